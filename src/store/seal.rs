//! Vouching for payloads: a checksum in the clear, or AES-256-GCM under the key of whoever the row belongs to.
//!
//! The row area is the engine's too, so nothing is sealed where it lies: the sealed bytes go into memory of their own,
//! from a bounded pool. What is read lands in the row and is opened there; a payload whose tag does not fit is damage
//! like any other and never handed out. A row that moves to another segment is opened aside, to look at it, and moves
//! as it is. Each record says what it is, so sealing can be turned on and off with rows held.
//!
//! Work for the hands: everything here may take as long as a row is large, and the first row under a key waits for
//! that key to be durable.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use ring::aead::{Aad, Nonce, Tag};

use super::disk::{Body, Buffer};
use super::format::{Bad, Entry, PAGE, Record, Seal, padded};
use super::keys::Keys;
use crate::base::block::Namespace;
use crate::base::checksum::crc64;
use crate::base::mutant::{self, Mutant};
use crate::base::rows::Rows;

/// Bytes of rows that are sealed and not yet written: as much as the ring gives the drive at one time, twice. Memory
/// that was never touched costs as much as sealing does, so rows wait for memory that another row has left.
const POOL: usize = 64 << 20;

/// Rows that may be sealed and not yet written, whatever their size: two that the drive has, two that are next, and
/// one for each of two processors.
const FEWEST: usize = 6;

/// Buffers that are made ahead, at most: of small rows one more is no matter.
const WARM: usize = 512;

/// Sealed rows of so many bytes that there may be at a time.
fn most(len: usize) -> usize {
    (POOL / len.max(1)).max(FEWEST)
}

/// How a store seals.
#[derive(Clone, Debug, Default)]
pub struct Sealing {
    /// Folder of the keys. None: nothing is sealed, and sealed rows are not used.
    pub keys: Option<std::path::PathBuf>,
    /// Whether new rows are sealed.
    pub encrypt: bool,
}

/// What is done with the bytes of a record that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// They are wanted in the clear, where they are.
    Open,
    /// The same, with a checksum of them for whoever they are sent to.
    Send,
    /// They are only looked at, and stay as they are.
    Look,
}

/// A payload that is ready to be written.
#[derive(Debug)]
pub enum Closed {
    /// It lies in its row, with this checksum.
    Plain(u64),
    Sealed(Seal, Buffer),
}

impl Closed {
    /// Completes what is known of a record.
    pub fn record(&self, record: Record) -> Record {
        match self {
            Self::Plain(checksum) => Record { checksum: *checksum, seal: None, ..record },
            Self::Sealed(seal, _) => Record { checksum: 0, seal: Some(*seal), ..record },
        }
    }

    /// What is written: all but the last `dropped` bytes.
    pub fn body(self, rows: &Arc<Rows>, row: u32, dropped: usize) -> Body {
        match self {
            Self::Plain(_) => Body::Row { rows: rows.clone(), row, len: rows.row_bytes() - dropped },
            Self::Sealed(_, mut bytes) => {
                let len = bytes.len() - dropped;
                bytes.truncate(len);
                Body::Own(bytes)
            }
        }
    }
}

/// Seals and opens. Shared by everybody who touches payloads.
#[derive(Debug, Default)]
pub struct Seals {
    keys: Option<Keys>,
    encrypt: bool,
    /// Guards: buffers that are free. Held for a push or a pop.
    pool: Mutex<Vec<Buffer>>,
    /// Guards: why the last row could not be sealed.
    trouble: Mutex<Option<String>>,
}

impl Seals {
    /// Reads the keys. Also tells which could not be read.
    pub fn open(sealing: &Sealing) -> (Self, Vec<String>) {
        let (keys, told) = match sealing.keys.as_deref().map(Path::new).map(Keys::open) {
            Some((keys, told)) => (Some(keys), told),
            None => (None, Vec::new()),
        };
        let encrypt = sealing.encrypt && keys.is_some();
        (Self { keys, encrypt, ..Self::default() }, told)
    }

    /// Whether new rows are sealed.
    pub fn encrypts(&self) -> bool {
        self.encrypt
    }

    /// Whether another row may be vouched for, when so many are and are not written yet.
    pub fn may_close(&self, open: usize, row_bytes: usize) -> bool {
        !self.encrypt || open < most(row_bytes)
    }

    /// Gets the memory that rows of this size will be sealed into. Takes as long as touching it does.
    pub fn warm(&self, row_bytes: usize) {
        if !self.encrypt {
            return;
        }
        let len = usize::try_from(padded(row_bytes as u64)).expect("a row is at most 1 GiB");
        let lacking =
            most(len).min(WARM).saturating_sub(self.pool.lock().iter().filter(|b| b.len() == len).count());
        for _ in 0..lacking {
            let mut buffer = Buffer::zeroed(len);
            // Only what is written to is there.
            buffer.iter_mut().step_by(PAGE).for_each(|byte| *byte = 1);
            self.give_back(buffer);
        }
    }

    /// Whether a row that is sealed so can be opened. 0 is no seal.
    pub fn has(&self, number: u32) -> bool {
        number == 0 || self.keys.as_ref().is_some_and(|keys| keys.get(number).is_some())
    }

    /// Whose key this is.
    pub fn owner(&self, number: u32) -> Option<Arc<str>> {
        self.keys.as_ref()?.get(number).map(|key| Arc::clone(&key.owner))
    }

    /// Why rows cannot be sealed at present.
    pub fn trouble(&self) -> Option<String> {
        self.trouble.lock().clone()
    }

    /// Whose keys there are.
    pub fn owners(&self) -> BTreeSet<String> {
        self.keys.as_ref().map(Keys::owners).unwrap_or_default()
    }

    /// # Errors
    /// When there is no key of this owner.
    pub fn knows(&self, owner: &str) -> Result<(), super::Error> {
        let known = self.owners();
        if known.contains(owner) {
            return Ok(());
        }
        let known = known.into_iter().collect();
        Err(super::Error::UnknownOwner { asked: owner.to_owned(), known })
    }

    /// Numbers of all keys.
    pub fn numbers(&self) -> Vec<u32> {
        self.keys.as_ref().map(Keys::numbers).unwrap_or_default()
    }

    /// Takes those of `numbers` out of use that are of no namespace in use. Gives which.
    pub fn retire(&self, numbers: &BTreeSet<u32>, in_use: impl Fn(&Namespace) -> bool) -> Vec<u32> {
        self.keys.as_ref().map_or(Vec::new(), |keys| keys.retire(numbers, in_use))
    }

    /// Takes them off the drive. Blocks.
    pub fn destroy_retired(&self) -> std::io::Result<()> {
        self.keys.as_ref().map_or(Ok(()), Keys::destroy_retired)
    }

    /// Destroys an owner's keys. Gives their numbers.
    pub fn forget(&self, owner: &str) -> (Vec<u32>, std::io::Result<()>) {
        self.keys.as_ref().map_or((Vec::new(), Ok(())), |keys| keys.forget(owner))
    }

    /// Vouches for a row that is to be written as `record` says, all but its place. The row stays as it is.
    ///
    /// # Errors
    /// When it is to be sealed and there is no key: it must not be kept in the clear then.
    pub fn close(
        &self,
        rows: &Rows,
        row: u32,
        owner: &Arc<str>,
        record: &Record,
    ) -> Result<Closed, &'static str> {
        let Some(keys) = self.keys.as_ref().filter(|_| self.encrypt) else {
            return Ok(Closed::Plain(rows.look(row, |bytes| crc64(&[bytes]))));
        };
        let key = keys.for_writing(owner, record.space.namespace).map_err(|error| {
            let said = self.trouble.lock().replace(error.to_string());
            if said.is_none() {
                tracing::error!(%error, "failed to make a key; no rows are kept until there is one");
            }
            "no_key"
        })?;
        if self.trouble.lock().take().is_some() {
            tracing::info!("keys can be made again; rows are kept");
        }
        let mut bytes = self.buffer(record.length);
        let payload = &mut bytes[..record.length as usize];
        rows.look(row, |plain| payload.copy_from_slice(plain));
        let nonce: [u8; 12] = rand::random();
        let bound = Aad::from(record.bound(key.number));
        let tag = key.cipher.seal_in_place_separate_tag(Nonce::assume_unique_for_key(nonce), bound, payload);
        // Fails for more than 64 GiB alone.
        let tag = tag.map_err(|_| "too_large")?.as_ref().try_into().expect("a tag has 16 bytes");
        bytes[record.length as usize..].fill(0);
        Ok(Closed::Sealed(Seal { key: key.number, nonce, tag }, bytes))
    }

    /// Whether `body` holds what `record` says. Afterwards it is as `what` wants it; after an error it is anything.
    ///
    /// # Errors
    /// [`Bad::Checksum`] and [`Bad::Seal`] are damage. [`Bad::NoKey`] is not: nobody may read the row any more.
    pub fn check(&self, record: Record, body: &mut Body, what: Use) -> Result<Record, Bad> {
        let length = record.length as usize;
        if record.seal.is_none() {
            let checksum = body.with(|bytes| crc64(&[&bytes[..length]]));
            if checksum != record.checksum && !mutant::on(Mutant::SkipChecksum) {
                return Err(Bad::Checksum);
            }
            return Ok(record);
        }
        body.with(|bytes| {
            let payload = &mut bytes[..length];
            match what {
                Use::Open => self.open_in_place(&record, payload).map(|()| record),
                Use::Send => {
                    self.open_in_place(&record, payload)?;
                    Ok(Record { checksum: crc64(&[payload]), ..record })
                }
                Use::Look => self.look(&record, payload).map(|()| record),
            }
        })
    }

    /// As [`Self::check`], of bytes that stay as they are.
    pub fn look(&self, record: &Record, payload: &[u8]) -> Result<(), Bad> {
        if record.seal.is_none() {
            return if crc64(&[payload]) == record.checksum { Ok(()) } else { Err(Bad::Checksum) };
        }
        let mut copy = self.buffer(record.length);
        copy[..payload.len()].copy_from_slice(payload);
        let looked = self.open_in_place(record, &mut copy[..payload.len()]);
        self.give_back(copy);
        looked
    }

    /// Opens a sealed payload.
    fn open_in_place(&self, record: &Record, payload: &mut [u8]) -> Result<(), Bad> {
        let Some(Seal { key, nonce, tag }) = record.seal else { return Ok(()) };
        let key = self.keys.as_ref().and_then(|keys| keys.get(key)).ok_or(Bad::NoKey)?;
        let (nonce, bound) = (Nonce::assume_unique_for_key(nonce), Aad::from(record.bound(key.number)));
        let opened = key.cipher.open_in_place_separate_tag(nonce, bound, Tag::from(tag), payload, 0..);
        opened.map(|_| ()).map_err(|_| Bad::Seal)
    }

    /// Memory for a payload and its padding. What it holds is of no meaning.
    fn buffer(&self, length: u32) -> Buffer {
        let len = usize::try_from(padded(length.into())).expect("a row is at most 1 GiB");
        let mut pool = self.pool.lock();
        match pool.iter().rposition(|buffer| buffer.len() == len) {
            Some(at) => pool.swap_remove(at),
            None => {
                drop(pool);
                Buffer::zeroed(len)
            }
        }
    }

    /// Takes memory back that a row was sealed into.
    pub fn give_back(&self, buffer: Buffer) {
        let mut pool = self.pool.lock();
        // Rows of one engine are of one size: others are of an engine that has left.
        pool.retain(|other| other.len() == buffer.len());
        if pool.len() < most(buffer.len()) {
            pool.push(buffer);
        }
    }

    /// Takes the memory of a write back that has ended.
    pub fn give_back_body(&self, body: Body) {
        if let Body::Own(buffer) = body {
            self.give_back(buffer);
        }
    }
}

/// Rows that a start has found under keys that are not there.
#[derive(Debug, Default)]
pub struct Unkeyed {
    /// The key of the last row, and whether it is there: rows of a segment mostly share theirs.
    last: Option<(u32, bool)>,
    pub rows: u64,
}

impl Unkeyed {
    /// Whether the row can be opened; counts it if not.
    pub fn may_use(&mut self, seals: &Seals, entry: &Entry) -> bool {
        let has = match self.last {
            Some((number, has)) if number == entry.seal => has,
            _ => seals.has(entry.seal),
        };
        self.last = Some((entry.seal, has));
        self.rows += u64::from(!has);
        has
    }
}
