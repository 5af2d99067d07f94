//! Tokens: how one node lets another in, once, within an hour.
//!
//! `spark1-<host:port,…>-<fingerprint>-<secret>`: where to go, whose certificate must be there (SHA-256, 64 hex
//! digits), and what to say (32 hex digits). A host may have dashes in it, so a token is read from its end. The node
//! that gives tokens out keeps only hashes of their secrets, in memory: a restart voids them, which is said where
//! they are printed.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::identity::Fingerprint;
use crate::base::clock::Micros;
use crate::transfer::same_secret;

/// How long a token is good for.
pub const LIFETIME: Duration = Duration::from_secs(3600);

/// Tokens that are remembered, used and expired ones included, so that a refusal can say which it was.
const REMEMBERED: usize = 64;

const ADDRESSES: usize = 8;
const ADDRESS: usize = 255;

/// What a joining node shows. Never logged, never stored.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Secret(pub [u8; 16]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

impl Secret {
    fn hash(&self) -> [u8; 32] {
        Sha256::digest(self.0).into()
    }
}

/// A token, read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    pub addresses: Vec<String>,
    pub fingerprint: Fingerprint,
    pub secret: Secret,
}

/// Why a text is no token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAToken {
    #[error("a join token begins with `spark1-`; copy all of what the first box printed")]
    Start,
    #[error("the join token has {0} of its 4 parts; copy all of what the first box printed")]
    Parts(usize),
    #[error("the join token's address `{0}` is not host:port")]
    Address(String),
    #[error("the join token's fingerprint is not 64 hex digits; copy all of what the first box printed")]
    Fingerprint,
    #[error("the join token's secret is not 32 hex digits; copy all of what the first box printed")]
    Secret,
}

/// Whether `text` is `host:port`.
pub fn is_address(text: &str) -> bool {
    let sound = |host: &str| {
        !host.is_empty() && host.chars().all(|c| c.is_ascii_alphanumeric() || "-._:[]%".contains(c))
    };
    text.len() <= ADDRESS
        && text.rsplit_once(':').is_some_and(|(host, port)| sound(host) && port.parse::<u16>().is_ok())
}

impl FromStr for Token {
    type Err = NotAToken;

    fn from_str(text: &str) -> Result<Self, NotAToken> {
        let rest = text.trim().strip_prefix("spark1-").ok_or(NotAToken::Start)?;
        let mut parts = rest.rsplitn(3, '-');
        let (Some(secret), Some(fingerprint), Some(addresses)) = (parts.next(), parts.next(), parts.next())
        else {
            return Err(NotAToken::Parts(1 + rest.split('-').count()));
        };
        let addresses: Vec<String> = addresses.split(',').map(str::to_owned).collect();
        if let Some(wrong) = addresses.iter().find(|a| !is_address(a)) {
            return Err(NotAToken::Address(wrong.clone()));
        }
        if addresses.len() > ADDRESSES {
            return Err(NotAToken::Address(addresses[ADDRESSES].clone()));
        }
        let fingerprint = fingerprint.parse().map_err(|_| NotAToken::Fingerprint)?;
        let mut bytes = [0; 16];
        hex::decode_to_slice(secret, &mut bytes).map_err(|_| NotAToken::Secret)?;
        Ok(Self { addresses, fingerprint, secret: Secret(bytes) })
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let secret = hex::encode(self.secret.0);
        write!(f, "spark1-{}-{}-{secret}", self.addresses.join(","), self.fingerprint)
    }
}

/// Why a token was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("the token is not one of this node's (a restart voids them)")]
    Unknown,
    #[error("the token was used already")]
    Used,
    #[error("the token is older than an hour")]
    Expired,
}

impl Refusal {
    pub fn label(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Used => "used",
            Self::Expired => "expired",
        }
    }
}

/// Tokens that were given out.
#[derive(Debug, Default)]
pub struct Invites(Vec<Invite>);

#[derive(Debug)]
struct Invite {
    hash: [u8; 32],
    expires: Micros,
    used: bool,
}

impl Invites {
    /// Remembers a secret that was given out. The oldest is forgotten when there are too many.
    pub fn add(&mut self, now: Micros, secret: &Secret) {
        if self.0.len() == REMEMBERED {
            self.0.remove(0);
        }
        self.0.push(Invite { hash: secret.hash(), expires: now.plus(LIFETIME), used: false });
    }

    /// Accepts a secret, once.
    pub fn redeem(&mut self, now: Micros, secret: &Secret) -> Result<(), Refusal> {
        let hash = secret.hash();
        let invite = self
            .0
            .iter_mut()
            .fold(None, |found, i| if same_secret(&i.hash, &hash) { Some(i) } else { found });
        let invite = invite.ok_or(Refusal::Unknown)?;
        if invite.used {
            return Err(Refusal::Used);
        }
        if now >= invite.expires {
            return Err(Refusal::Expired);
        }
        invite.used = true;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(addresses: &[&str]) -> Token {
        Token {
            addresses: addresses.iter().map(|&a| a.to_owned()).collect(),
            fingerprint: Fingerprint([0xab; 32]),
            secret: Secret([7; 16]),
        }
    }

    #[test]
    fn tokens_read_back_also_with_dashes_in_host_names() {
        for addresses in [&["127.0.0.1:8002"][..], &["spark-a-1.local:8002", "[::1]:9"]] {
            let token = token(addresses);
            assert_eq!(token.to_string().parse(), Ok(token.clone()));
            assert_eq!(format!(" {token}\n").parse(), Ok(token));
        }
    }

    #[test]
    fn what_is_no_token_says_what_is_wrong_with_it() {
        let good = token(&["a:1"]).to_string();
        for (text, error) in [
            ("", NotAToken::Start),
            ("spark2-a:1-00-00", NotAToken::Start),
            ("spark1-a:1", NotAToken::Parts(2)),
            (&good[..good.len() - 1], NotAToken::Secret),
            (&good.replace("abab", "xyxy"), NotAToken::Fingerprint),
            (&good.replace("a:1", "a"), NotAToken::Address("a".into())),
            (&good.replace("a:1", "a:70000"), NotAToken::Address("a:70000".into())),
            (&good.replace("a:1", "a b:1"), NotAToken::Address("a b:1".into())),
        ] {
            assert_eq!(text.parse::<Token>(), Err(error), "{text}");
        }
    }

    #[test]
    fn a_token_works_once_and_for_an_hour() {
        let mut invites = Invites::default();
        let (one, two, other) = (Secret([1; 16]), Secret([2; 16]), Secret([3; 16]));
        let begin = Micros(5);
        invites.add(begin, &one);
        invites.add(begin, &two);
        assert_eq!(invites.redeem(begin, &other), Err(Refusal::Unknown));
        assert_eq!(invites.redeem(begin, &one), Ok(()));
        assert_eq!(invites.redeem(begin, &one), Err(Refusal::Used));
        let late = begin.plus(LIFETIME);
        assert_eq!(invites.redeem(late, &two), Err(Refusal::Expired));
        assert_eq!(invites.redeem(Micros(late.0 - 1), &two), Ok(()));
    }

    #[test]
    fn old_tokens_are_forgotten_not_piled_up() {
        let mut invites = Invites::default();
        for n in 0..200 {
            invites.add(Micros(0), &Secret([n; 16]));
        }
        assert_eq!(invites.0.len(), REMEMBERED);
        assert_eq!(invites.redeem(Micros(0), &Secret([0; 16])), Err(Refusal::Unknown));
        assert_eq!(invites.redeem(Micros(0), &Secret([199; 16])), Ok(()));
    }
}
