//! The drive's tier: every row that was ever offered, until the capacity asks for its room.
//!
//! A [`Store`] is a handle. Behind it one thread owns the log and everything in flight (`work.rs`: select, apply);
//! what is held, and the figures that people look at, lie beside it under one small lock each, so that asking costs
//! no round trip. Rows are written from the shared area and read into it in place.
//!
//! What it promises. A key is visible only when its record is whole. A row is handed out only when its record's key,
//! space, position and checksum are what they should be; otherwise it is a miss, counted, and gone from the index.
//! The folder never takes more than its capacity. When the drive does not write, serving goes on. When a call for
//! rows returns, nothing of the store touches those rows any more; a call that is dropped before that leaves its rows
//! in use until [`Store::detach`] has returned.
//!
//! Rows can be sealed, each under the key of whoever it belongs to (`seal.rs`, `keys.rs`): forgetting an owner destroys
//! the key and with it the rows, wherever their bytes lie.
//!
//! A kill loses nothing that was reported as stored. A power cut may lose rows of the segment that was open, never
//! one of a sealed segment, and never yields a wrong one.

mod budget;
mod disk;
mod folder;
mod format;
mod hands;
mod holes;
mod index;
mod inspect;
mod keys;
#[cfg(any(test, fuzzing))]
pub mod laws;
mod ledger;
mod log;
mod marks;
mod mem;
mod metrics;
mod patrol;
mod probe;
mod recover;
mod ring;
mod scan;
mod scrub;
mod seal;
mod slab;
mod survey;
mod verify;
mod work;
mod worth;

#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc;

use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::{Semaphore, broadcast, oneshot};

use self::budget::Wear;
use self::disk::{Buffer, Disk, Files, OnDone};
use self::folder::Folder;
pub use self::format::{rows_in_segment, segment_for_rows};
use self::hands::Hands;
use self::index::Index;
pub use self::index::{Change, ChangeKind};
pub use self::inspect::{Located, inspect};
pub use self::keys::OWNER_MAX;
pub use self::mem::{Failure, Loss, Mem};
use self::metrics::Metrics;
pub use self::patrol::Rounds;
pub use self::probe::{Probe, Restart};
use self::ring::Ring;
use self::scrub::Scrub;
pub use self::seal::Sealing;
use self::seal::Seals;
pub use self::survey::{BandUse, GroupUse, SegmentUse, SpaceUse, Survey};
pub use self::verify::{Checked, Damage, Error as ShutError, Shut, Verification};
use self::work::{Event, Facts, Mark, Request, Work};
use crate::base::block::{RowItem, RowKey, Space};
use crate::base::clock::{Clock, Micros, unix_seconds};
use crate::base::fault::{Code, Fault};
use crate::base::frame::Outcome;
use crate::base::landing::{About, Landing};
use crate::base::rows::{AreaId, Rows};
use crate::base::units::Bytes;
use crate::meter::Meter;
use crate::settings::Io;

/// Jobs that are in the store at one time; further ones wait for their turn before they are handed over.
const JOBS: usize = 1024;

/// Segments that a capacity is divided into at least: with fewer, making room would throw away too much at once.
const SEGMENTS_MIN: u64 = 4;

/// Smallest segment: a head, one row of a page, foot and trailer are 5 pages, and tests want a few rows.
const SEGMENT_MIN: u64 = 64 << 10;

/// Largest segment: its rows are verified at one start when it was not sealed.
const SEGMENT_MAX: u64 = 4 << 30;

/// Smallest store.
const CAPACITY_MIN: u64 = MARGIN + SEGMENTS_MIN * SEGMENT_MIN;

/// Room that is left beside the segments for the identity and what the file system adds to each file.
const MARGIN: u64 = 64 << 10;

/// The least capacity that holds so many segments of so many bytes.
pub fn capacity_for(segments: u64, segment: u64) -> u64 {
    let bytes = segments * segment + MARGIN;
    // What is set aside depends on the whole, by far less than it.
    let once = bytes + marks::reserve(bytes);
    bytes + marks::reserve(once)
}

#[derive(Clone, Debug)]
pub struct Options {
    pub folder: PathBuf,
    /// Most bytes that the folder takes on the drive.
    pub capacity: Bytes,
    /// Bytes of one segment file; less when fewer than four would fit.
    pub segment: Bytes,
    pub io: Io,
    /// Operations in flight on the drive.
    pub queue_depth: u32,
}

/// Which drive.
#[derive(Clone, Debug)]
pub enum DiskKind {
    /// Files under [`Options::folder`], by the way that [`Options::io`] names.
    Real,
    Mem(Mem),
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the store in {0} is in use by another process")]
    InUse(PathBuf),
    #[error("failed to use the store's folder {folder}")]
    Folder { folder: PathBuf, source: std::io::Error },
    #[error("a store of {0} is too small: it needs {least} at least", least = Bytes(CAPACITY_MIN))]
    TooSmall(Bytes),
    #[error("io_uring with direct I/O was asked for and is not to be had: {0}")]
    NoRing(String),
    #[error("failed to use the drive")]
    Io(#[from] std::io::Error),
    #[error(
        "a row of {row} bytes does not fit into a segment of {segment} bytes: raise store.segment and store.capacity"
    )]
    RowTooLarge { row: usize, segment: u64 },
    #[error("the store is closed")]
    Closed,
    #[error(
        "{wanted} would be pinned ({pinned} are), at most {limit} may be: unpin rows or raise store.capacity"
    )]
    TooManyPins { pinned: Bytes, wanted: Bytes, limit: Bytes },
    #[error(
        "there is no room for more marks on rows: unpin rows, or drop whole namespaces instead of single rows"
    )]
    TooManyMarks,
    #[error("done, but not saved: it ends with this process: {0}")]
    NotSaved(String),
    #[error("{}", unknown_owner(.asked, .known))]
    UnknownOwner { asked: String, known: Vec<String> },
    #[error("its rows are gone here, but its key could not be destroyed on the drive: {0}. Try again")]
    KeyNotDestroyed(std::io::Error),
}

/// What a start has found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Opened {
    pub segments: usize,
    pub rows: u64,
    /// Files and rows that were not what was written.
    pub damaged: u64,
    /// `ring`, `plain` or `mem`.
    pub io: String,
    /// Sentences for the log and for people; all of them.
    pub notes: Vec<String>,
    /// Those of the notes that are about damage.
    pub damage: Vec<String>,
    /// Those about files that are not the store's.
    pub foreign: Vec<String>,
    /// Those about keys that could not be read.
    pub keys: Vec<String>,
    /// Rows that are sealed under keys which are not here. They are not used, and no damage.
    pub unkeyed: u64,
}

/// What became of an owner that was forgotten.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Forgotten {
    /// Keys that were destroyed: one for each namespace, mostly.
    pub keys: u64,
    /// Rows that were held under them.
    pub rows: u64,
}

fn unknown_owner(asked: &str, known: &[String]) -> String {
    let name =
        |name: &String| if name.is_empty() { "(requests without a key)".into() } else { format!("`{name}`") };
    match known {
        [] => format!("no row is sealed for `{asked}`, nor for anybody else"),
        _ => {
            let names: Vec<String> = known.iter().map(name).collect();
            format!("no row is sealed for `{asked}`; there are rows of {}", names.join(", "))
        }
    }
}

/// A row that was not used for long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cold {
    pub key: RowKey,
    pub position: u32,
    /// Under whose key it is sealed. None: it lies in the clear.
    pub owner: Option<Arc<str>>,
}

/// A whole row in own memory.
#[derive(Clone, Debug)]
pub struct Record {
    pub position: u32,
    /// crc64-nvme of the payload.
    pub checksum: u64,
    pub payload: bytes::Bytes,
}

/// Rows of one space.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SpaceStatus {
    pub namespace: String,
    pub rank: u16,
    pub ranks: u16,
    pub rows: u64,
    pub bytes: u64,
    /// An engine of this space is attached. Others stay until their room is needed.
    pub attached: bool,
}

/// What people and other modules can know about a store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Status {
    pub capacity: u64,
    pub used: u64,
    pub rows: u64,
    pub segments: usize,
    /// Segments that are whole and durable.
    pub sealed: usize,
    pub io: String,
    /// Why no rows are taken at present.
    pub read_only: Option<String>,
    /// Files and rows that were not what was written, those found at start included.
    pub damaged: u64,
    pub stored: u64,
    pub held: u64,
    pub loaded: u64,
    pub served: u64,
    pub failed: u64,
    /// Segments removed because no row was left in them.
    pub reclaimed: u64,
    /// Rows that went because room was needed.
    pub released: u64,
    /// Payload bytes of rows that were copied out of segments that were emptied.
    pub moved_bytes: u64,
    /// Rows offered that were not kept because what is held is worth more.
    pub refused: u64,
    /// Rows that are pinned, and the bytes that they take at most.
    pub pinned: u64,
    pub pinned_bytes: u64,
    pub spaces: Vec<SpaceStatus>,
    /// New rows are sealed.
    pub encrypts: bool,
    /// Rows that the start has found under keys which are not here.
    pub unkeyed: u64,
}

/// What the handle and the owner both look at.
struct Shared {
    /// Guards: what is held. Never held across an I/O or an await.
    index: Mutex<Index>,
    /// Guards: figures, copied as a whole.
    facts: Mutex<Facts>,
    /// Guards: what a day wrote and read.
    wear: Mutex<Wear>,
    /// Guards: when each segment was read back.
    scrub: Mutex<Scrub>,
    /// Guards: the last damaged rows.
    damages: Mutex<Damages>,
    metrics: Metrics,
    seals: Arc<Seals>,
}

/// Damaged rows that are remembered.
const DAMAGES: usize = 64;

/// The last damaged rows, newest last.
#[derive(Debug, Default)]
struct Damages(VecDeque<Damage>);

impl Damages {
    fn add(&mut self, damage: Damage) {
        if self.0.len() == DAMAGES {
            self.0.pop_front();
        }
        self.0.push_back(damage);
    }
}

/// Closes the store when the last handle goes.
struct Inner {
    shared: Arc<Shared>,
    events: mpsc::Sender<Event>,
    /// What bounds `events`: a job holds a permit until it is answered.
    jobs: Arc<Semaphore>,
    io: &'static str,
    /// What the start has found that stays as it is.
    found: Vec<Fault>,
    /// Damage that the start has found, in sentences.
    damage: Vec<String>,
    unkeyed: u64,
    /// Seconds since 1970 at the clock's zero; 0 when its time is not the world's.
    epoch: u64,
}

impl Drop for Inner {
    fn drop(&mut self) {
        let _ = self.events.send(Event::Close(None));
    }
}

/// The store's handle. Cheap to clone.
#[derive(Clone)]
pub struct Store(Arc<Inner>);

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Store({})", self.0.io)
    }
}

impl Store {
    /// As [`Store::open_sealed`], without keys: rows are kept in the clear, and sealed ones are not used.
    ///
    /// # Errors
    /// The same.
    pub fn open(
        options: Options,
        disk: DiskKind,
        clock: Clock,
        meter: &Meter,
    ) -> Result<(Self, Opened), Error> {
        Self::open_sealed(options, &Sealing::default(), disk, clock, meter)
    }

    /// Recovers what the folder holds and starts the threads. Blocks.
    ///
    /// # Errors
    /// When the folder is in use or cannot be used at all; never because of what damaged files hold.
    pub fn open_sealed(
        options: Options,
        sealing: &Sealing,
        disk: DiskKind,
        clock: Clock,
        meter: &Meter,
    ) -> Result<(Self, Opened), Error> {
        let capacity = options.capacity.0;
        let segment = segment_bytes(&options)?;
        let (sender, events) = mpsc::channel();
        let done = sender.clone();
        // Fails only when the loop is gone, and it goes last.
        let on_done: OnDone = Arc::new(move |d| drop(done.send(Event::Done(d))));
        let mut notes = Vec::new();
        let depth = options.queue_depth.clamp(1, 1024);
        let (files, disk, hands) = start_disk(&options, disk, depth, on_done, &mut notes)?;
        let (seals, told) = Seals::open(sealing);
        let seals = Arc::new(seals);
        let found = recover::recover(&files, &seals, capacity, segment).inspect_err(|_| files.release())?;
        let mut opened = found.opened;
        opened.notes.extend(told.iter().cloned());
        opened.keys = told;
        opened.io = disk.name().to_owned();
        opened.notes.splice(0..0, notes.iter().cloned());
        let epoch = match &clock {
            Clock::Real(_) => unix_seconds().saturating_sub(clock.now().0 / 1_000_000),
            Clock::Sim(_) => 0,
        };
        let metrics = Metrics::new(meter);
        metrics.damaged.inc_by(opened.damaged);
        metrics.capacity_bytes.set(i64::try_from(capacity).unwrap_or(i64::MAX));
        let facts = Facts { damaged: opened.damaged, ..Facts::default() };
        let shared = Arc::new(Shared {
            index: Mutex::new(found.index),
            facts: Mutex::new(facts),
            wear: Mutex::default(),
            scrub: Mutex::default(),
            damages: Mutex::default(),
            metrics,
            seals: seals.clone(),
        });
        let io = disk.name();
        let unused_keys = unused_keys(&seals, &mut shared.index.lock(), &opened);
        let work = Work::new(work::Parts {
            shared: shared.clone(),
            clock,
            events: sender.clone(),
            disk,
            files,
            hands,
            depth: depth as usize,
            store: found.store,
            log: found.log,
            handles: found.handles,
            marks: found.marks,
            seals,
            unused_keys,
            epoch,
        });
        hands::thread("store", move || work.run(&events))?;
        let jobs = Arc::new(Semaphore::new(JOBS));
        let plain = notes.into_iter().map(|note| Fault::new(Code::StorePlainIo, note));
        let foreign = opened.foreign.iter().map(|note| Fault::new(Code::StoreForeign, note.clone()));
        let keys = opened.keys.iter().map(|note| Fault::new(Code::StoreKeys, note.clone()));
        let found = plain.chain(foreign).chain(keys).collect();
        let (damage, unkeyed) = (opened.damage.clone(), opened.unkeyed);
        let inner = Inner { shared, events: sender, jobs, io, found, damage, unkeyed, epoch };
        Ok((Self(Arc::new(inner)), opened))
    }

    /// Makes a row area known; its rows can be put and got from now on.
    ///
    /// # Errors
    /// When a row does not fit into a segment, or the store is closed.
    pub async fn attach(&self, rows: &Arc<Rows>) -> Result<(), Error> {
        let (answer, answered) = oneshot::channel();
        self.send(Event::Attach(rows.clone(), answer));
        answered.await.unwrap_or(Err(Error::Closed))
    }

    /// Returns when nothing of the store can touch the area any more. What of it waited has failed.
    pub async fn detach(&self, area: AreaId) {
        let (answer, answered) = oneshot::channel();
        self.send(Event::Detach(area, answer));
        let _ = answered.await;
    }

    /// Writes rows: blanks what their group does not cover, makes the checksum, appends. One outcome per item, in
    /// order: stored, held or failed. When it returns, nothing touches those rows.
    pub async fn put(&self, rows: &Arc<Rows>, items: Vec<RowItem>) -> Vec<Outcome> {
        self.put_of("".into(), rows, items).await
    }

    /// As [`Store::put`], for an owner: where rows are sealed, it is under a key of that name and of their namespace. A
    /// row that is held already stays whose it is.
    pub async fn put_of(&self, owner: Arc<str>, rows: &Arc<Rows>, items: Vec<RowItem>) -> Vec<Outcome> {
        self.job(rows, items, |rows, items, reply| Request::Put { rows, items, owner, reply }).await
    }

    /// Whether new rows are sealed.
    pub fn encrypts(&self) -> bool {
        self.0.shared.seals.encrypts()
    }

    /// Destroys every key of an owner. Its rows are gone with them, at once; their room comes back as that
    /// of dropped rows does, and nobody can read them until then.
    ///
    /// # Errors
    /// [`Error::UnknownOwner`] with the names that there are; [`Error::KeyNotDestroyed`] when the drive failed.
    pub async fn forget_owner(&self, owner: &str) -> Result<Forgotten, Error> {
        self.0.shared.seals.knows(owner)?;
        let (answer, answered) = oneshot::channel();
        self.send(Event::Forget(owner.to_owned(), answer));
        answered.await.unwrap_or(Err(Error::Closed))
    }

    /// Reads rows in place, in the order of position, verified. One outcome per item, in order: from the drive or
    /// failed. No read starts after `deadline`. When it returns, nothing touches those rows.
    pub async fn get(&self, rows: &Arc<Rows>, items: Vec<RowItem>, deadline: Option<Micros>) -> Vec<Outcome> {
        self.job(rows, items, |rows, items, reply| Request::Get { rows, items, deadline, reply }).await
    }

    /// Brings one row to `into`, for a peer: verified, and from its beginning on while the rest is still being read.
    /// What is dropped before it is whole does not come.
    pub async fn bring(&self, space: Space, key: RowKey, into: Box<dyn Landing>) {
        let Ok(permit) = self.0.jobs.clone().acquire_owned().await else { return };
        self.send(Event::Request(Request::Read { space, key, into }, permit));
    }

    /// One whole row in own memory, verified.
    pub async fn read(&self, space: Space, key: RowKey) -> Option<Record> {
        let (whole, answered) = Whole::new();
        self.bring(space, key, Box::new(whole)).await;
        answered.await.ok()
    }

    pub fn holds(&self, space: Space, key: &RowKey) -> bool {
        self.0.shared.index.lock().get(&space, key).is_some()
    }

    /// Whether a power cut cannot take the row any more.
    #[cfg(test)]
    fn is_sealed(&self, space: Space, key: &RowKey) -> bool {
        let place = self.0.shared.index.lock().get(&space, key);
        place.is_some_and(|place| !self.0.shared.facts.lock().unsealed.contains(&place.sequence))
    }

    /// Which of these keys are held, all asked at one moment.
    pub fn held(&self, space: Space, keys: &[RowKey]) -> Vec<bool> {
        self.0.shared.index.lock().held(&space, keys)
    }

    /// Memory that the index takes.
    pub fn index_bytes(&self) -> usize {
        self.0.shared.index.lock().memory()
    }

    /// Payload bytes of a row, if it is held.
    pub fn bytes_of(&self, space: Space, key: &RowKey) -> Option<u64> {
        self.0.shared.index.lock().get(&space, key).map(|place| place.length.into())
    }

    /// Spaces of which rows are held.
    pub fn spaces(&self) -> Vec<Space> {
        self.0.shared.index.lock().spaces().into_iter().map(|(space, ..)| space).collect()
    }

    /// Everything that is held in `space`, and every change from exactly there on. A receiver that lags
    /// (`RecvError::Lagged`) subscribes again.
    pub fn subscribe(&self, space: Space) -> (Vec<(RowKey, u32)>, broadcast::Receiver<Change>) {
        self.0.shared.index.lock().subscribe(space)
    }

    /// A request has used this chain: the rows of its prompt, each with the tokens up to its end. What of it is held
    /// is worth more from now on.
    pub fn heat(&self, space: Space, chain: &[(RowKey, u32)], now: Micros) {
        let now = seconds(self.0.epoch, now);
        worth::touch(&mut self.0.shared.index.lock(), &space, chain, now);
    }

    /// Rows that are likely to go when room is needed: up to `most` of those that were used longest ago, out of a few
    /// segments that are looked at in turn. Each with its position.
    pub fn coldest(&self, space: Space, turn: usize, most: usize) -> Vec<Cold> {
        let index = self.0.shared.index.lock();
        let segments: Vec<_> = index.segments().collect();
        let from = turn.wrapping_mul(COLD_SEGMENTS) % segments.len().max(1);
        let looked = segments.iter().cycle().skip(from).take(COLD_SEGMENTS.min(segments.len()));
        let rows = looked.flat_map(|&sequence| index.rows_of(sequence)).filter(|(of, ..)| *of == space);
        let mut rows: Vec<_> =
            rows.map(|(_, key, place, heat)| (heat.last, place.position, key, place.seal)).collect();
        drop(index);
        rows.sort_unstable();
        let owner = |seal| (seal != 0).then(|| self.0.shared.seals.owner(seal)).flatten();
        let cold = |(_, position, key, seal)| Cold { key, position, owner: owner(seal) };
        rows.into_iter().take(most).map(cold).collect()
    }

    /// These rows count as not used for a day: they make room before those that requests here have used.
    pub fn cool(&self, space: Space, keys: &[RowKey]) {
        let mut index = self.0.shared.index.lock();
        for key in keys {
            if let Some(heat) = index.heat_mut(&space, key) {
                heat.last = heat.last.saturating_sub(86_400);
            }
        }
    }

    /// Bytes that the folder takes, and may take.
    pub fn usage(&self) -> (u64, u64) {
        let facts = self.0.shared.facts.lock();
        (facts.used, facts.capacity)
    }

    /// From now on a row that was not used for so many days goes before all others when room is needed, in every
    /// space. 0, as it is at first: never for that alone.
    pub fn set_ttl_days(&self, days: u32) {
        self.send(Event::Ttl((days > 0).then(|| days.saturating_mul(86_400))));
    }

    /// Keeps rows whatever else needs their room, this process's life and later ones. Keys that are not held are
    /// passed over. Gives how many were not pinned before.
    ///
    /// # Errors
    /// [`Error::TooManyPins`] or [`Error::TooManyMarks`], and then none is pinned.
    pub async fn pin(&self, space: Space, keys: Vec<RowKey>) -> Result<u64, Error> {
        self.mark(space, Mark::Pin(keys)).await
    }

    /// Ends pins. Gives how many there were.
    ///
    /// # Errors
    /// When it could not be saved.
    pub async fn unpin(&self, space: Space, keys: Vec<RowKey>) -> Result<u64, Error> {
        self.mark(space, Mark::Unpin(keys)).await
    }

    /// Takes rows out for good; pinned ones too. Their room comes back at once where their segment is sealed. Gives how
    /// many were held.
    ///
    /// # Errors
    /// [`Error::TooManyMarks`], and then none is gone.
    pub async fn drop_rows(&self, space: Space, keys: Vec<RowKey>) -> Result<u64, Error> {
        self.mark(space, Mark::Drop(keys)).await
    }

    /// Takes every row of a space out for good. Gives how many there were.
    ///
    /// # Errors
    /// [`Error::TooManyMarks`], and then none is gone.
    pub async fn forget(&self, space: Space) -> Result<u64, Error> {
        self.mark(space, Mark::Forget).await
    }

    /// Rows that are pinned.
    pub async fn pinned(&self) -> Vec<(Space, RowKey)> {
        let (answer, answered) = oneshot::channel();
        self.send(Event::Pinned(answer));
        answered.await.unwrap_or_default()
    }

    async fn mark(&self, space: Space, mark: Mark) -> Result<u64, Error> {
        let (answer, answered) = oneshot::channel();
        self.send(Event::Mark(space, mark, answer));
        answered.await.unwrap_or(Err(Error::Closed))
    }

    pub fn status(&self) -> Status {
        let facts = self.0.shared.facts.lock().clone();
        let (rows, spaces) = {
            let index = self.0.shared.index.lock();
            (index.rows(), index.spaces())
        };
        let about = |(space, rows, bytes): (Space, u64, u64)| SpaceStatus {
            namespace: space.namespace.to_string(),
            rank: space.rank.index,
            ranks: space.rank.of,
            rows,
            bytes,
            attached: facts.attached.contains(&space),
        };
        let spaces = spaces.into_iter().map(about).collect();
        Status {
            capacity: facts.capacity,
            used: facts.used,
            rows,
            segments: facts.segments,
            sealed: facts.sealed,
            io: self.0.io.to_owned(),
            read_only: facts.read_only,
            damaged: facts.damaged,
            stored: facts.stored,
            held: facts.held,
            loaded: facts.loaded,
            served: facts.served,
            failed: facts.failed,
            reclaimed: facts.reclaimed,
            released: facts.released,
            moved_bytes: facts.moved_bytes,
            refused: facts.refused,
            pinned: facts.pinned,
            pinned_bytes: facts.pinned_bytes,
            spaces,
            encrypts: self.encrypts(),
            unkeyed: self.0.unkeyed,
        }
    }

    /// What is wrong with the store now.
    pub fn faults(&self) -> Vec<Fault> {
        let (read_only, damaged, capacity) = {
            let facts = self.0.shared.facts.lock();
            (facts.read_only.clone(), facts.damaged, facts.capacity)
        };
        let mut faults = Vec::new();
        if let Some(reason) = read_only {
            faults.push(Fault::new(Code::StoreReadOnly, reason));
        }
        if damaged > 0 {
            let which = self.damaged_where();
            let cause =
                format!("{damaged} rows or segments were not what was written; they were skipped{which}");
            faults.push(Fault::new(Code::StoreDamaged, cause));
        }
        faults.extend(self.0.found.iter().cloned());
        if let Some(why) = self.0.shared.seals.trouble() {
            faults.push(Fault::new(Code::StoreKeys, format!("rows are not kept: {why}")));
        }
        faults.extend(self.wear_faults(capacity));
        faults
    }

    /// The last rows that turned out damaged while the store ran, newest last.
    pub fn damages(&self) -> Vec<Damage> {
        self.0.shared.damages.lock().0.iter().cloned().collect()
    }

    /// The newest damage in words: a person looks at a file first.
    fn damaged_where(&self) -> String {
        let mut words: Vec<String> = self
            .damages()
            .iter()
            .rev()
            .take(DAMAGES_TOLD)
            .map(|damage| format!("{} at byte {}: {}", damage.file, damage.offset, damage.why))
            .collect();
        words.extend(self.0.damage.iter().take(DAMAGES_TOLD - words.len()).cloned());
        if words.is_empty() { String::new() } else { format!(" ({})", words.join(", ")) }
    }

    /// Ends what is in flight, makes it durable, and gives the folder free. Further calls fail.
    pub async fn close(&self) {
        let (answer, answered) = oneshot::channel();
        self.send(Event::Close(Some(answer)));
        let _ = answered.await;
    }

    async fn job(
        &self,
        rows: &Arc<Rows>,
        items: Vec<RowItem>,
        request: impl FnOnce(Arc<Rows>, Vec<RowItem>, oneshot::Sender<Vec<Outcome>>) -> Request,
    ) -> Vec<Outcome> {
        let count = items.len();
        let failed = || vec![Outcome::Failed; count];
        let Ok(permit) = self.0.jobs.clone().acquire_owned().await else { return failed() };
        let (reply, answered) = oneshot::channel();
        self.send(Event::Request(request(rows.clone(), items, reply), permit));
        answered.await.unwrap_or_else(|_| failed())
    }

    /// A loop that has ended drops the event, and with it the answer's sender: the caller sees that it is closed.
    fn send(&self, event: Event) {
        let _ = self.0.events.send(event);
    }
}

/// Collects the portions of one row.
struct Whole {
    about: Option<About>,
    bytes: Vec<u8>,
    reply: Option<oneshot::Sender<Record>>,
}

impl Whole {
    fn new() -> (Self, oneshot::Receiver<Record>) {
        let (reply, answered) = oneshot::channel();
        (Self { about: None, bytes: Vec::new(), reply: Some(reply) }, answered)
    }
}

impl Landing for Whole {
    fn is_wanted(&self) -> bool {
        self.reply.as_ref().is_some_and(|reply| !reply.is_closed())
    }

    fn length(&self) -> Option<u32> {
        None
    }

    fn buffer(&self, len: usize) -> Buffer {
        Buffer::zeroed(len)
    }

    fn begin(&mut self, about: About) {
        self.about = Some(about);
    }

    fn add(&mut self, portion: bytes::Bytes) {
        self.bytes.extend_from_slice(&portion);
        let Some(About { position, checksum, length }) = self.about else { return };
        if self.bytes.len() == length as usize
            && let Some(reply) = self.reply.take()
        {
            let payload = std::mem::take(&mut self.bytes).into();
            let _ = reply.send(Record { position, checksum, payload });
        }
    }
}

/// A moment as rows remember it: seconds since 1970, or since a simulation's beginning.
fn seconds(epoch: u64, now: Micros) -> u32 {
    u32::try_from(epoch + now.0 / 1_000_000).unwrap_or(u32::MAX)
}

/// Keys that no row needs. None when rows may be missing that were not read, or when none is here at all: a drive that
/// is not mounted looks like an empty folder.
fn unused_keys(seals: &Seals, index: &mut Index, opened: &Opened) -> BTreeSet<u32> {
    // What came and went while segments were read says nothing.
    index.take_unused_keys();
    let numbers = seals.numbers();
    let is_sure = opened.damage.is_empty() && opened.foreign.is_empty() && opened.damaged == 0;
    if !is_sure || !numbers.iter().any(|&number| index.needs_key(number)) {
        return BTreeSet::new();
    }
    numbers.into_iter().filter(|&number| !index.needs_key(number)).collect()
}

/// Segments in which cold rows are looked for at one time: some thousand rows.
const COLD_SEGMENTS: usize = 8;

/// Damages that a fault names.
const DAMAGES_TOLD: usize = 3;

/// Bytes of a new segment: as asked for, but at least four fit.
fn segment_bytes(options: &Options) -> Result<u64, Error> {
    let beside = MARGIN + marks::reserve(options.capacity.0);
    let most = options.capacity.0.saturating_sub(beside) / SEGMENTS_MIN;
    let bytes = options.segment.0.clamp(SEGMENT_MIN, SEGMENT_MAX).min(most);
    let bytes = bytes - bytes % format::PAGE64;
    if bytes < SEGMENT_MIN { Err(Error::TooSmall(options.capacity)) } else { Ok(bytes) }
}

/// Threads for checksums: one does 5 to 10 GB/s, a drive 7 to 14.
const HANDS: usize = 3;

/// Threads of plain I/O, at most: enough to keep a drive busy with rows of a few hundred KiB.
const PLAIN_HANDS: usize = 16;

fn start_disk(
    options: &Options,
    kind: DiskKind,
    depth: u32,
    on_done: OnDone,
    notes: &mut Vec<String>,
) -> Result<(Files, Disk, Hands), Error> {
    let in_use = || Error::InUse(options.folder.clone());
    if let DiskKind::Mem(mem) = kind {
        if !mem.lock() {
            return Err(in_use());
        }
        return Ok((Files::Mem(mem.clone()), Disk::Mem { mem: mem.clone(), on_done }, Hands::of(mem)));
    }
    let folder = Folder::lock(&options.folder).map_err(|source| match source.kind() {
        std::io::ErrorKind::WouldBlock => in_use(),
        _ => Error::Folder { folder: options.folder.clone(), source },
    })?;
    let folder = Arc::new(folder);
    let hands = Hands::new("store-hand", HANDS)?;
    let ring = match options.io {
        Io::Plain => None,
        Io::Auto | Io::Ring if !folder.direct => {
            Some(Err("the folder's file system has no direct I/O".to_owned()))
        }
        Io::Auto | Io::Ring => {
            Some(Ring::start(depth, on_done.clone()).map_err(|e| format!("no io_uring: {e}")))
        }
    };
    let disk = match ring {
        Some(Ok(ring)) => Disk::Ring(ring),
        Some(Err(why)) if options.io == Io::Ring => return Err(Error::NoRing(why)),
        refused => {
            if let Some(Err(why)) = refused {
                notes.push(format!("plain I/O instead of the ring: {why}"));
            }
            let threads = PLAIN_HANDS.min(depth as usize);
            Disk::Plain { hands: Hands::new("store-plain", threads)?, direct: folder.direct, on_done }
        }
    };
    Ok((Files::Real(folder), disk, hands))
}
