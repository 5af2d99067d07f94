//! Reads a folder that nobody has open, and says what it holds and what of it is rotten. Changes no file of the store.
//!
//! It takes the store's lock, so that it never looks at a folder while it changes; a running store verifies itself
//! (`patrol.rs`). What a segment should hold is what its foot lists; a segment without a foot is searched page by page,
//! as a start does. Rows that were released (their room was given back) are neither there nor damaged. Broken records behind the last whole one of such a segment are what was being written when the
//! store ended, not rot.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Forgotten;
use super::disk::{Buffer, Files, Handle};
use super::folder::Folder;
use super::format::{
    Bad, Entry, Head, PAGE, PAGE64, Record, Sequence, Trailer, padded, parse_segment_name, record_bytes,
    segment_name,
};
use super::holes::Holes;
use super::index::Place;
use super::marks::{self, MARKS, Marks};
use super::seal::{Sealing, Seals};
use super::survey::{Survey, Surveyor};
use crate::base::block::{RowKey, Space};

/// Damaged rows that are named; all are counted.
const NAMED: usize = 1000;

/// Bytes read at a time while a segment is searched.
const WINDOW: u64 = 1 << 20;

/// One row, or a whole file, that is not what was written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Damage {
    pub file: String,
    /// Where its record begins; 0: the file as a whole.
    pub offset: u64,
    /// Namespace and key in hex, where they are known.
    pub namespace: String,
    pub key: String,
    pub position: u32,
    pub why: String,
}

impl Damage {
    pub(super) fn of(space: &Space, key: &RowKey, place: &Place, why: &str) -> Self {
        Self {
            file: segment_name(place.sequence),
            offset: place.offset(),
            namespace: space.namespace.to_string(),
            key: hex::encode(key.to_bytes()),
            position: place.position,
            why: why.to_owned(),
        }
    }

    fn of_file(file: &str, offset: u64, why: impl ToString) -> Self {
        Self { file: file.to_owned(), offset, why: why.to_string(), ..Self::default() }
    }
}

/// What became of one row that was read back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Checked {
    Whole {
        /// Payload bytes.
        bytes: u64,
    },
    Damaged(Damage),
    /// It left meanwhile, or the store is closing.
    Gone,
}

/// How far a verification is, and at the end what it found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Verification {
    pub segments: usize,
    pub segments_total: usize,
    pub rows: u64,
    /// Payload bytes read back.
    pub bytes: u64,
    /// Rows of these that are sealed under keys which are not here: forgotten, and no damage.
    pub unkeyed: u64,
    /// All there are; `named` ends with the thousandth.
    pub damaged: u64,
    pub named: Vec<Damage>,
    /// All of it was looked at.
    pub done: bool,
}

impl Verification {
    pub(super) fn add_damage(&mut self, damage: Damage) {
        self.damaged += 1;
        if self.named.len() < NAMED {
            self.named.push(damage);
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("there is no store in {0}")]
    NoStore(PathBuf),
    #[error("the store in {0} is in use by another process, which does not answer")]
    InUse(PathBuf),
    #[error("failed to read {path}: {source}")]
    Io { path: PathBuf, source: io::Error },
}

/// A folder that nobody else has open.
#[derive(Debug)]
pub struct Shut {
    path: PathBuf,
    files: Files,
    seals: Seals,
    /// By sequence, with the files' sizes.
    segments: BTreeMap<Sequence, u64>,
}

/// What one segment should hold.
struct Listing {
    head: Head,
    handle: Handle,
    entries: Vec<Entry>,
    sealed: bool,
}

impl Shut {
    /// Locks the folder. `keys` is the folder of its keys.
    ///
    /// # Errors
    /// When there is no store, or somebody has it open.
    pub fn lock(path: &Path, keys: &Path) -> Result<Self, Error> {
        let failed = |source| Error::Io { path: path.to_owned(), source };
        // Locking would make the folder.
        if !path.is_dir() {
            return Err(Error::NoStore(path.to_owned()));
        }
        let folder = Folder::lock(path).map_err(|source| match source.kind() {
            io::ErrorKind::WouldBlock => Error::InUse(path.to_owned()),
            _ => failed(source),
        })?;
        let files = Files::Real(Arc::new(folder));
        let found = files.list().map_err(failed)?;
        let ours = |f: &super::disk::Found| Some((parse_segment_name(&f.name).filter(|_| f.is_file)?, f.len));
        let segments = found.iter().filter_map(ours).collect();
        let (seals, told) = Seals::open(&Sealing { keys: Some(keys.to_owned()), encrypt: false });
        told.iter().for_each(|why| tracing::warn!(why, "store"));
        Ok(Self { path: path.to_owned(), segments, files, seals })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the segments list. Payloads are not read; the newest place of a key counts.
    pub fn survey(&self) -> Survey {
        let mut rows: HashMap<(Space, RowKey), Place> = HashMap::new();
        let mut surveyor = Surveyor::default();
        let marks = self.marks();
        for (&sequence, &len) in &self.segments {
            surveyor.see_segment(sequence);
            let Ok(listing) = self.list(sequence, len, &mut |_| {}) else { continue };
            for entry in listing.entries.iter().filter(|entry| self.seals.has(entry.seal)) {
                rows.insert((entry.space, entry.key), Place::of(sequence, entry));
            }
        }
        let held = rows.iter().filter(|((space, key), place)| !marks.is_dropped(space, key, place));
        held.for_each(|((space, key), place)| surveyor.see(space, key, place));
        surveyor.finish(&BTreeMap::new(), |_| false)
    }

    /// As [`Store::forget_owner`](super::Store::forget_owner). The room of the rows comes back when a store needs it.
    ///
    /// # Errors
    /// The same.
    pub fn forget_owner(&self, owner: &str) -> Result<Forgotten, super::Error> {
        self.seals.knows(owner)?;
        let before = self.survey().rows;
        let (keys, outcome) = self.seals.forget(owner);
        outcome.map_err(super::Error::KeyNotDestroyed)?;
        Ok(Forgotten { keys: keys.len() as u64, rows: before.saturating_sub(self.survey().rows) })
    }

    /// What people said about rows. A file that cannot be read says nothing, as at a start.
    fn marks(&self) -> Marks {
        let mut bytes = Buffer::zeroed(usize::try_from(marks::FILE_MAX).expect("a few MiB"));
        let read = self.files.open(MARKS).and_then(|handle| self.files.read(&handle, 0, &mut bytes));
        bytes.truncate(read.unwrap_or(0));
        Marks::decode(&bytes).unwrap_or_default()
    }

    /// Reads every row back. `tell` hears after each row how far it is, and ends it with `false`.
    pub fn verify(&self, mut tell: impl FnMut(&Verification) -> bool) -> Verification {
        let mut so_far = Verification { segments_total: self.segments.len(), ..Verification::default() };
        for (&sequence, &len) in &self.segments {
            let file = segment_name(sequence);
            let mut damage = Vec::new();
            match self.list(sequence, len, &mut |d| damage.push(d)) {
                Ok(listing) => {
                    damage.drain(..).for_each(|d| so_far.add_damage(d));
                    if !self.verify_rows(&listing, &mut so_far, &mut tell) {
                        return so_far;
                    }
                }
                Err(why) => so_far.add_damage(Damage::of_file(&file, 0, why)),
            }
            so_far.segments += 1;
            if !tell(&so_far) {
                return so_far;
            }
        }
        so_far.done = true;
        so_far
    }

    /// False when `tell` had enough.
    fn verify_rows(
        &self,
        listing: &Listing,
        so_far: &mut Verification,
        tell: &mut impl FnMut(&Verification) -> bool,
    ) -> bool {
        let mut broken = Vec::new();
        let mut buffer = Buffer::zeroed(0);
        for entry in &listing.entries {
            let place = Place::of(listing.head.sequence, entry);
            match self.read_back(listing, entry, &mut buffer) {
                Ok(false) => continue,
                Ok(true) => {
                    so_far.unkeyed += u64::from(!self.seals.has(entry.seal));
                    so_far.bytes += u64::from(entry.length);
                    // Behind the last whole record of an open segment nothing is rot.
                    broken.drain(..).for_each(|d| so_far.add_damage(d));
                }
                Err(why) => {
                    let damage = Damage::of(&entry.space, &entry.key, &place, &why);
                    if listing.sealed { so_far.add_damage(damage) } else { broken.push(damage) }
                }
            }
            so_far.rows += 1;
            if !tell(so_far) {
                return false;
            }
        }
        true
    }

    /// False: it was released.
    fn read_back(&self, listing: &Listing, entry: &Entry, buffer: &mut Buffer) -> Result<bool, String> {
        let total = usize::try_from(record_bytes(entry.length)).expect("a row is at most 1 GiB");
        if buffer.len() != total {
            *buffer = Buffer::zeroed(total);
        }
        let offset = u64::from(entry.page) * PAGE64;
        let read = self.files.read(&listing.handle, offset, buffer).map_err(|e| e.to_string())?;
        if read < total {
            return Err("the file ends before the row does".into());
        }
        let record = Record::decode(&buffer[..PAGE], listing.head.store, listing.head.sequence);
        let record = match record {
            // The file system does not tell its holes.
            Err(Bad::Released) if listing.sealed => return Ok(false),
            record => record.map_err(|bad| bad.to_string())?,
        };
        let same =
            record.space == entry.space && record.key == entry.key && record.position == entry.position;
        if !same || record.length != entry.length {
            return Err(Bad::OtherRow.to_string());
        }
        match self.seals.look(&record, &buffer[PAGE..PAGE + entry.length as usize]) {
            // What nobody can open any more is not looked at.
            Ok(()) | Err(Bad::NoKey) => Ok(true),
            Err(bad) => Err(bad.to_string()),
        }
    }

    /// The rows that a segment should hold, in their order.
    fn list(&self, sequence: Sequence, len: u64, damage: &mut dyn FnMut(Damage)) -> Result<Listing, String> {
        let file = segment_name(sequence);
        let handle = self.files.open(&file).map_err(|e| e.to_string())?;
        let head = Head::decode(&self.page(&handle, 0)?).map_err(|bad| bad.to_string())?;
        if head.sequence != sequence {
            return Err("its name is another segment's".into());
        }
        let foot = match self.foot(&head, &handle) {
            Ok(entries) => Some(entries),
            // No foot was ever written, or not all of it.
            Err(Ok(Bad::Magic | Bad::Malformed(_))) => None,
            Err(Ok(bad)) => {
                damage(Damage::of_file(&file, head.size - PAGE64, format!("its foot: {bad}")));
                None
            }
            Err(Err(error)) => {
                damage(Damage::of_file(&file, head.size - PAGE64, format!("its foot: {error}")));
                None
            }
        };
        let sealed = foot.is_some();
        let holes = Holes::of(&self.files, &handle, len);
        let mut entries = match foot {
            Some(entries) => entries.into_iter().filter(|entry| !holes.have(entry)).collect(),
            None => self.search(&head, len, &handle, &holes),
        };
        entries.sort_unstable_by_key(|entry| entry.page);
        Ok(Listing { head, handle, entries, sealed })
    }

    fn page(&self, handle: &Handle, offset: u64) -> Result<Buffer, String> {
        let mut page = Buffer::zeroed(PAGE);
        let read = self.files.read(handle, offset, &mut page).map_err(|e| e.to_string())?;
        page.truncate(read);
        Ok(page)
    }

    fn foot(&self, head: &Head, handle: &Handle) -> Result<Vec<Entry>, Result<Bad, String>> {
        let last = self.page(handle, head.size - PAGE64).map_err(Err)?;
        let trailer = Trailer::decode(&last, head).map_err(Ok)?;
        let mut foot = Buffer::zeroed(usize::try_from(trailer.foot_len()).expect("at most 2^32 entries"));
        let read = self.files.read(handle, trailer.start, &mut foot).map_err(|e| Err(e.to_string()))?;
        foot.truncate(read);
        trailer.entries(&foot).map_err(Ok)
    }

    /// Looks for records at every page.
    fn search(&self, head: &Head, len: u64, handle: &Handle, holes: &Holes) -> Vec<Entry> {
        let mut entries = Vec::new();
        let (mut at, end) = (holes.skip(PAGE64), head.size.min(padded(len)));
        let (mut start, mut window) = (0, Buffer::zeroed(0));
        while at + 2 * PAGE64 <= end {
            if at < start || at + PAGE64 > start + window.len() as u64 {
                window = Buffer::zeroed(usize::try_from(WINDOW).expect("a megabyte"));
                // What cannot be read is like what is not there.
                let read = self.files.read(handle, at, &mut window).unwrap_or(0);
                window.truncate(read);
                start = at;
            }
            let from = usize::try_from(at - start).expect("within the window");
            let record = window
                .get(from..from + PAGE)
                .and_then(|page| Record::decode(page, head.store, head.sequence).ok());
            let Some(record) = record.filter(|r| at + record_bytes(r.length) <= head.size) else {
                at = holes.skip(at + PAGE64);
                continue;
            };
            let page = u32::try_from(at / PAGE64).expect("Head::decode bounds a segment's pages");
            entries.push(record.entry(page));
            at = holes.skip(at + record_bytes(record.length));
        }
        entries
    }
}
