//! API keys: a file of `name:key` lines. Kept as hashes and compared in constant time; never logged, never shown.
//!
//! A key may stand there as its hash, `sha256:` and 64 hexadecimal digits (`printf %s KEY | sha256sum`), and what it may
//! do in brackets behind the name:
//!
//! ```text
//! ann: the-key-of-ann
//! nightly [class=batch limit=4]: sha256:5e88…
//! guest [limit=2 isolated]: the-key-of-guest
//! ```
//!
//! - `class=interactive|normal|batch`: how urgent its requests are (normal); `x-spark-priority` lowers it and never raises it.
//! - `limit=N`: most requests in flight at a time on this node.
//! - `isolated`: what it computes is found by nobody else, nor others' by it. Its prompts get a `cache_salt` that is made
//!   of the key and of the client's own salt, the same on every node that knows the key.

use std::path::{Path, PathBuf};

use http::header::{self, HeaderMap};
use sha2::{Digest, Sha256};

use crate::router::{Class, Refusal, Rights};
use crate::store::OWNER_MAX;

/// The keys that open the API. None: it is open to everybody who reaches the port.
#[derive(Clone, Default)]
pub struct Keys(Option<Vec<Key>>);

#[derive(Clone)]
struct Key {
    name: String,
    hash: [u8; 32],
    rights: Rights,
}

/// Why the keys cannot be used. Says the line, never what it holds.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("failed to read the API keys in {0}: {1}")]
    Read(PathBuf, std::io::Error),
    #[error("line {line} of {path} is not `name:key` with a key of at least {KEY_MIN} characters")]
    Line { path: PathBuf, line: usize },
    #[error("line {line} of {path}: a name has at most {OWNER_MAX} bytes")]
    Name { path: PathBuf, line: usize },
    #[error("line {line} of {path}: `{what}` is not class=interactive|normal|batch, limit=N or isolated")]
    Right { path: PathBuf, line: usize, what: String },
    #[error("{0} holds no API key")]
    Empty(PathBuf),
}

/// Shorter keys can be guessed over the network.
const KEY_MIN: usize = 8;

/// What a key begins with that stands there as its hash.
const HASHED: &str = "sha256:";

/// The rights of a key whose line says nothing of them.
const PLAIN: Rights = Rights { class: Class::Normal, best: Class::Normal, limit: None, salt: None };

/// Goes into the salt of an isolated key beside it, so that the salt says nothing about the key's hash.
const SALT: &[u8] = b"spark-kv cache salt";

/// Reads what stands in brackets. The error is the word that is wrong.
fn rights(words: &str, hash: &[u8; 32]) -> Result<Rights, String> {
    let mut rights = PLAIN;
    for word in words.split_whitespace() {
        let wrong = || word.chars().take(64).collect::<String>();
        match word.split_once('=') {
            Some(("class", name)) => {
                rights.class = Class::named(name).ok_or_else(wrong)?;
                rights.best = rights.class;
            }
            Some(("limit", number)) => {
                let limit = number.parse().ok().filter(|limit| *limit > 0).ok_or_else(wrong)?;
                rights.limit = Some(limit);
            }
            None if word == "isolated" => {
                let salt = Sha256::new().chain_update(SALT).chain_update(hash).finalize();
                rights.salt = Some(hex::encode(&salt[..16]).into());
            }
            _ => return Err(wrong()),
        }
    }
    Ok(rights)
}

/// A key's hash, from the key or as it stands there. None: too short to be a key.
fn hash_of(key: &str) -> Option<[u8; 32]> {
    if let Some(hash) = key.strip_prefix(HASHED) {
        return hex::decode(hash).ok()?.try_into().ok();
    }
    (key.len() >= KEY_MIN).then(|| Sha256::digest(key).into())
}

/// The page's cookie. It is set by the page itself, for this site only.
const COOKIE: &str = "sparkkv_key=";

/// Undoes `encodeURIComponent`. What is no escape stays as it is.
fn unescaped(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let escaped = (*first == b'%').then(|| tail.get(..2)).flatten();
        match escaped.and_then(|two| u8::from_str_radix(std::str::from_utf8(two).ok()?, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            None => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.iter().flatten().map(|key| &key.name)).finish()
    }
}

impl Keys {
    pub fn none() -> Self {
        Self(None)
    }

    /// One key, which is needed.
    pub fn only(name: &str, key: &str) -> Self {
        Self(Some(vec![Key { name: name.to_owned(), hash: Sha256::digest(key).into(), rights: PLAIN }]))
    }

    /// Reads a file of keys. Empty lines and those that begin with `#` are skipped.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let text = std::fs::read_to_string(path).map_err(|error| Error::Read(path.to_owned(), error))?;
        let mut keys = Vec::new();
        for (n, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let wrong = || Error::Line { path: path.to_owned(), line: n + 1 };
            let (name, key) = line.split_once(':').ok_or_else(wrong)?;
            let (name, key) = (name.trim(), key.trim());
            let (name, words) = match name.strip_suffix(']').and_then(|name| name.split_once('[')) {
                Some((name, words)) => (name.trim(), words),
                None => (name, ""),
            };
            let hash = hash_of(key).filter(|_| !name.is_empty()).ok_or_else(wrong)?;
            if name.len() > OWNER_MAX {
                return Err(Error::Name { path: path.to_owned(), line: n + 1 });
            }
            let rights = rights(words, &hash).map_err(|what| Error::Right {
                path: path.to_owned(),
                line: n + 1,
                what,
            })?;
            keys.push(Key { name: name.to_owned(), hash, rights });
        }
        if keys.is_empty() {
            return Err(Error::Empty(path.to_owned()));
        }
        Ok(Self(Some(keys)))
    }

    pub fn required(&self) -> bool {
        self.0.is_some()
    }

    /// Adds a key for programs of this machine's own user (`spark-kv status`). Without other keys none is needed.
    #[must_use]
    pub fn with_local(mut self, key: &str) -> Self {
        if let Some(keys) = &mut self.0 {
            keys.push(Key {
                name: "local".into(),
                hash: Sha256::digest(key).into(),
                rights: Rights::default(),
            });
        }
        self
    }

    /// As [`Self::check`], for what only reads: a page cannot set headers on its event stream, so its cookie counts too.
    pub fn check_viewer(&self, headers: &HeaderMap) -> Result<Option<&str>, Refusal> {
        let cookies = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
        let key = cookies.flat_map(|line| line.split(';')).find_map(|pair| pair.trim().strip_prefix(COOKIE));
        let Some(value) = key.and_then(|key| format!("Bearer {}", unescaped(key)).parse().ok()) else {
            return self.check(headers);
        };
        self.check(&HeaderMap::from_iter([(header::AUTHORIZATION, value)]))
    }

    /// The name of the key that a request brings. None: no key is needed.
    pub fn check(&self, headers: &HeaderMap) -> Result<Option<&str>, Refusal> {
        Ok(self.guest(headers)?.map(|(name, _)| name))
    }

    /// The same, with what the key may do.
    pub fn guest(&self, headers: &HeaderMap) -> Result<Option<(&str, &Rights)>, Refusal> {
        let Some(keys) = &self.0 else { return Ok(None) };
        let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
            let (scheme, key) = value.as_bytes().split_at_checked(7)?;
            scheme.eq_ignore_ascii_case(b"bearer ").then_some(key.trim_ascii())
        });
        let plain = headers.get("x-api-key").map(|value| value.as_bytes());
        let mut found = None;
        for brought in bearer.into_iter().chain(plain) {
            let hash: [u8; 32] = Sha256::digest(brought).into();
            // Every key is looked at to its end, whichever fits.
            for key in keys {
                if same(&hash, &key.hash) {
                    found = Some((key.name.as_str(), &key.rights));
                }
            }
        }
        found.map(Some).ok_or(Refusal::NoKey)
    }
}

/// Compares without an end that depends on where they differ. Of hashes, so that even a compiler that undoes this
/// gives away nothing about a key.
fn same(one: &[u8; 32], two: &[u8; 32]) -> bool {
    let differ = one.iter().zip(two).fold(0, |acc, (a, b)| std::hint::black_box(acc | (a ^ b)));
    differ == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(text: &str) -> Result<Keys, Error> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        Keys::read(file.path())
    }

    fn headers(name: &'static str, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::HeaderName::from_static(name), value.parse().unwrap())])
    }

    #[test]
    fn a_key_opens_by_either_header_and_is_named() {
        let keys = keys("# ours\n\nann: secret-of-ann\nbob:colon:in:key\n").unwrap();
        for (name, value, who) in [
            ("authorization", "Bearer secret-of-ann", "ann"),
            ("authorization", "bearer  secret-of-ann ", "ann"),
            ("x-api-key", "colon:in:key", "bob"),
        ] {
            assert_eq!(keys.check(&headers(name, value)), Ok(Some(who)), "{value}");
        }
        for (name, value) in [
            ("authorization", "secret-of-ann"),
            ("authorization", "Basic secret-of-ann"),
            ("x-api-key", "secret-of-an"),
            ("x-api-key", ""),
            ("cookie", "secret-of-ann"),
        ] {
            assert_eq!(keys.check(&headers(name, value)), Err(Refusal::NoKey), "{value}");
        }
    }

    #[test]
    fn a_viewer_may_bring_the_key_in_a_cookie_and_a_client_may_not() {
        let keys = keys("ann:secret%of ann").unwrap().with_local("made-at-start");
        let cookie = headers("cookie", "theme=dark; sparkkv_key=secret%25of%20ann");
        assert_eq!(keys.check_viewer(&cookie), Ok(Some("ann")));
        assert_eq!(keys.check(&cookie), Err(Refusal::NoKey));
        assert_eq!(keys.check_viewer(&headers("cookie", "sparkkv_key=wrong%")), Err(Refusal::NoKey));
        assert_eq!(keys.check_viewer(&headers("authorization", "Bearer made-at-start")), Ok(Some("local")));
        assert_eq!(keys.check_viewer(&HeaderMap::new()), Err(Refusal::NoKey));
        assert!(!Keys::none().with_local("made-at-start").required());
    }

    #[test]
    fn a_key_may_do_what_its_line_says() {
        let hash = hex::encode(Sha256::digest("secret-of-nightly"));
        let text = format!("ann:secret-of-ann\nnightly [class=batch  limit=4 isolated] : sha256:{hash}");
        let keys = keys(&text).unwrap();
        let guest = |key: &str| keys.guest(&headers("x-api-key", key)).map(|guest| guest.unwrap());
        assert_eq!(guest("secret-of-ann"), Ok(("ann", &PLAIN)));
        let (name, rights) = guest("secret-of-nightly").unwrap();
        assert_eq!(
            (name, rights.class, rights.best, rights.limit),
            ("nightly", Class::Batch, Class::Batch, Some(4))
        );
        assert_eq!(rights.salt.as_ref().map(|salt| salt.len()), Some(32));
        assert!(!hash.contains(&**rights.salt.as_ref().unwrap()));
        // The hash itself opens nothing.
        assert_eq!(guest(&format!("sha256:{hash}")), Err(Refusal::NoKey));
        assert_eq!(PLAIN.class(Some(Class::Interactive)), Class::Normal, "no key raises itself");
        assert_eq!(PLAIN.class(Some(Class::Batch)), Class::Batch);
        assert_eq!(rights.class(None), Class::Batch);
        assert_eq!(Rights::default().class(Some(Class::Interactive)), Class::Interactive);
    }

    #[test]
    fn a_right_that_there_is_not_is_named_and_the_key_is_not() {
        for word in ["limit=0", "limit=many", "class=urgent", "isolatd", "isolated=yes"] {
            let error = keys(&format!("ann [{word}]: secret-of-ann")).unwrap_err().to_string();
            assert!(error.contains(word) && error.contains("line 1") && !error.contains("secret"), "{error}");
        }
        assert!(matches!(keys("ann: sha256:abcd"), Err(Error::Line { line: 1, .. })));
    }

    #[test]
    fn without_keys_everybody_may() {
        assert_eq!(Keys::none().check(&HeaderMap::new()), Ok(None));
    }

    #[test]
    fn a_file_that_would_leave_the_door_open_is_an_error_that_shows_no_key() {
        assert!(matches!(keys("# nothing\n"), Err(Error::Empty(_))));
        for text in ["a:long-enough\nno-colon-secret", "ok:long-enough\nx:short"] {
            let error = keys(text).unwrap_err().to_string();
            assert!(
                error.contains("line 2") && !error.contains("secret") && !error.contains("short\""),
                "{error}"
            );
        }
        let long = format!("{}:secret-of-long", "n".repeat(257));
        assert!(matches!(keys(&long), Err(Error::Name { line: 1, .. })));
        assert!(keys(&long[1..]).is_ok());
        assert!(!format!("{:?}", keys("ann:secret-of-ann").unwrap()).contains("secret"));
    }
}
