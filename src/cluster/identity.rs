//! Who this node is, and whom it knows.
//!
//! The identity is an ed25519 key and a certificate that it signed itself, made at the first start and kept for
//! good, in one file so that neither is ever without the other. Known nodes ("pins") are a list of name, SHA-256 of
//! the certificate, and last address. Both files are readable by their owner only, written whole under another name
//! and renamed, so that a power cut leaves the old one or the new one. A damaged file is an error, never a reason
//! to make a new identity: that would silently lock this node out of its cluster.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Nodes that can be known. Two now; the limit keeps a damaged file from being believed.
pub const PINS: usize = 64;

/// SHA-256 of a node's certificate: its name among nodes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint(pub [u8; 32]);

impl Fingerprint {
    pub fn of(certificate: &CertificateDer<'_>) -> Self {
        Self(Sha256::digest(certificate).into())
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(&self.0[..6]))
    }
}

impl FromStr for Fingerprint {
    type Err = hex::FromHexError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut bytes = [0; 32];
        hex::decode_to_slice(text, &mut bytes)?;
        Ok(Self(bytes))
    }
}

impl Serialize for Fingerprint {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Fingerprint {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Why an identity could not be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("failed to read or write {path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("failed to make a key: {0}")]
    Make(#[from] rcgen::Error),
    #[error("{path} is damaged ({what}); restore it, or remove it and join again")]
    Damaged { path: PathBuf, what: String },
}

/// This node's key and certificate.
#[derive(Debug)]
pub struct Identity {
    pub fingerprint: Fingerprint,
    pub certificate: CertificateDer<'static>,
    pub key: PrivateKeyDer<'static>,
}

impl Identity {
    /// Reads the identity in `folder`, or makes it. Blocks.
    pub fn open(folder: &Path) -> Result<Self, Error> {
        let path = folder.join("node.pem");
        let pem = match fs::read(&path) {
            Ok(pem) => pem,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let pem = Self::make()?;
                write_whole(folder, "node.pem", &pem)
                    .map_err(|source| Error::Io { path: path.clone(), source })?;
                pem
            }
            Err(source) => return Err(Error::Io { path, source }),
        };
        let damaged = |what: &str| Error::Damaged { path: path.clone(), what: what.to_owned() };
        let key = PrivateKeyDer::from_pem_slice(&pem).map_err(|_| damaged("no key in it"))?;
        let certificate =
            CertificateDer::from_pem_slice(&pem).map_err(|_| damaged("no certificate in it"))?;
        Ok(Self { fingerprint: Fingerprint::of(&certificate), certificate, key })
    }

    fn make() -> Result<Vec<u8>, Error> {
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519)?;
        let mut params = rcgen::CertificateParams::new(vec!["spark-kv".to_owned()])?;
        // Two nodes must never have equal certificates, and a name of the host would only go stale.
        params.distinguished_name.push(rcgen::DnType::CommonName, hex::encode(rand::random::<[u8; 8]>()));
        let certificate = params.self_signed(&key)?;
        Ok([key.serialize_pem(), certificate.pem()].concat().into_bytes())
    }
}

/// A known node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pin {
    pub name: String,
    pub fingerprint: Fingerprint,
    /// Where its control port was last.
    pub address: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PinsFile {
    version: u32,
    pins: Vec<Pin>,
}

/// Reads the known nodes. Blocks.
pub fn read_pins(folder: &Path) -> Result<Vec<Pin>, Error> {
    let path = folder.join("pins.json");
    let text = match fs::read(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(Error::Io { path, source }),
    };
    let damaged = |what: String| Error::Damaged { path: path.clone(), what };
    let file: PinsFile = serde_json::from_slice(&text).map_err(|e| damaged(e.to_string()))?;
    if file.version != 1 {
        return Err(damaged(format!("version {}", file.version)));
    }
    if file.pins.len() > PINS {
        return Err(damaged(format!("{} nodes", file.pins.len())));
    }
    Ok(file.pins)
}

/// Writes the known nodes. Blocks until they are on the drive.
pub fn write_pins(folder: &Path, pins: &[Pin]) -> Result<(), Error> {
    let file = PinsFile { version: 1, pins: pins.to_vec() };
    let text = serde_json::to_vec_pretty(&file).expect("texts and numbers");
    write_whole(folder, "pins.json", &text)
        .map_err(|source| Error::Io { path: folder.join("pins.json"), source })
}

fn write_whole(folder: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let draft = folder.join(format!("{name}.new"));
    let _ = fs::remove_file(&draft);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&draft)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&draft, folder.join(name))?;
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn an_identity_is_made_once_and_for_its_owner_only() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("identity");
        let made = Identity::open(&place).unwrap();
        let again = Identity::open(&place).unwrap();
        assert_eq!(made.fingerprint, again.fingerprint);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&place), 0o700);
        assert_eq!(mode(&place.join("node.pem")), 0o600);
        let other = Identity::open(&folder.path().join("other")).unwrap();
        assert_ne!(made.fingerprint, other.fingerprint);
    }

    #[test]
    fn a_damaged_identity_is_an_error_and_stays_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        Identity::open(folder.path()).unwrap();
        let path = folder.path().join("node.pem");
        let half = fs::read(&path).unwrap();
        let half = &half[..half.len() / 2];
        fs::write(&path, half).unwrap();
        assert!(matches!(Identity::open(folder.path()), Err(Error::Damaged { .. })));
        assert_eq!(fs::read(&path).unwrap(), half);
    }

    #[test]
    fn pins_read_back_and_damaged_ones_are_an_error() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(read_pins(folder.path()).unwrap(), []);
        let pin = Pin { name: "b".into(), fingerprint: Fingerprint([3; 32]), address: "h:1".into() };
        write_pins(folder.path(), std::slice::from_ref(&pin)).unwrap();
        write_pins(folder.path(), &[pin.clone(), pin.clone()]).unwrap();
        assert_eq!(read_pins(folder.path()).unwrap(), [pin.clone(), pin]);
        fs::write(folder.path().join("pins.json"), "{\"version\":2,\"pins\":[]}").unwrap();
        assert!(matches!(read_pins(folder.path()), Err(Error::Damaged { .. })));
    }
}
