//! How long a start takes with many rows: makes a folder that looks like a store of a million rows, and opens it.
//!
//! What a start reads is there in full: heads, feet and trailers of sealed segments, and every byte of the segment
//! that was open. Of each row of a sealed segment there are two pages, its record's and one of payload, all zeros with
//! the right checksum; the rest of the room that it would take is a hole, as after a row that was released. So a store
//! of a terabyte takes 8 GB and some seconds to make, and a start has to find as many holes as there ever can be: one
//! beside each row.
//!
//! ```no_run
//! # async fn measure() -> Result<(), spark_kv::store::Error> {
//! use spark_kv::store::Probe;
//! let probe = Probe::of(1_000_000);
//! let options = probe.make("folder".as_ref())?;
//! probe.drop_cache("folder".as_ref())?;
//! // Here, or in a process of its own:
//! let restart = probe.restart(&options).await?;
//! println!("{} rows after {} s, {} bytes each", restart.rows, restart.restart_s, restart.bytes_per_row);
//! # Ok(())
//! # }
//! ```

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use serde::Serialize;

use super::folder::Folder;
use super::format::{
    Entry, Head, Identity, PAGE, PAGE64, Record as Page, Sequence, StoreId, encode_foot, foot_bytes,
    record_bytes, segment_name,
};
use super::{DiskKind, Error, MARGIN, Options, SEGMENT_MAX, SEGMENT_MIN, Store};
use crate::base::block::{BlockHash, GroupId, Namespace, Rank, RowKey, Space};
use crate::base::checksum::crc64;
use crate::base::clock::Clock;
use crate::base::units::Bytes;
use crate::meter::Meter;
use crate::settings::Io;

/// All rows of a probe are in one space.
const SPACE: Space = Space { namespace: Namespace([0x70; 32]), rank: Rank::ONLY };

const STORE: StoreId = StoreId([0x70; 16]);

/// Keys that are asked for when lookups are measured: a prompt of 64,000 tokens in blocks of 16.
const LOOKUPS: u64 = 4000;

/// What a probe's folder holds.
#[derive(Clone, Copy, Debug)]
pub struct Probe {
    pub rows: u64,
    /// Bytes of a row.
    pub row_bytes: u32,
    pub segment: Bytes,
    /// Share of a segment that is open and filled for real, in percent: a start reads all of it.
    pub open_percent: u64,
}

/// What a start took.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Restart {
    pub rows: u64,
    pub segments: usize,
    /// From before the folder was opened until a row was read and found right.
    pub restart_s: f64,
    /// Of these, until the store was open.
    pub open_s: f64,
    /// Memory that the index takes, over all rows.
    pub bytes_per_row: f64,
    /// Whether 4000 keys are held, spread over all rows so that none is in a processor's cache.
    pub lookup_4000_ms: f64,
}

impl Probe {
    /// Rows of 1 MiB in segments of 256 MiB, the last of them half full: what one finds on a drive of a terabyte.
    pub fn of(rows: u64) -> Self {
        Self { rows, row_bytes: 1 << 20, segment: Bytes::mib(256), open_percent: 50 }
    }

    pub fn space(&self) -> Space {
        SPACE
    }

    /// Key of row `n`, as even as a digest.
    pub fn key(n: u64) -> RowKey {
        let mut state = n;
        let mut word = || {
            // SplitMix64: every n gives another key.
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let z = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            (z ^ (z >> 31)).to_le_bytes()
        };
        let mut hash = [0; 32];
        hash.chunks_mut(8).for_each(|chunk| chunk.copy_from_slice(&word()));
        RowKey { hash: BlockHash(hash), group: GroupId(0) }
    }

    /// Rows of one sealed segment.
    pub fn rows_per_segment(&self) -> u64 {
        let room = |rows: u64| PAGE64 + rows * record_bytes(self.row_bytes) + foot_bytes(rows);
        let mut rows = self.segment.0 / record_bytes(self.row_bytes);
        while rows > 0 && room(rows) > self.segment.0 {
            rows -= 1;
        }
        rows
    }

    /// Rows of the segment that is open.
    fn rows_open(&self) -> u64 {
        (self.rows_per_segment() * self.open_percent.min(100) / 100).min(self.rows)
    }

    /// Makes the folder, and says how it is to be opened. Blocks for some seconds.
    ///
    /// # Errors
    /// When a row does not fit into a segment, when the folder holds segments already, or the drive fails.
    pub fn make(&self, folder: &Path) -> Result<Options, Error> {
        let per_segment = self.rows_per_segment();
        let segment = self.segment.0;
        if per_segment == 0
            || !(SEGMENT_MIN..=SEGMENT_MAX).contains(&segment)
            || !segment.is_multiple_of(PAGE64)
        {
            return Err(Error::RowTooLarge { row: self.row_bytes as usize, segment });
        }
        let about = |source: io::Error| Error::Folder { folder: folder.to_owned(), source };
        let lock = Folder::lock(folder).map_err(about)?;
        if !lock.list().map_err(about)?.iter().all(|found| found.name == super::folder::LOCK) {
            return Err(about(io::Error::new(ErrorKind::AlreadyExists, "there are files in it already")));
        }
        lock.create("store", PAGE64, &Identity { store: STORE }.encode())?;
        let sealed = self.rows - self.rows_open();
        let zeros = crc64(&[&[0; PAGE]]);
        let mut sequence = 0;
        for first in (0..sealed).step_by(usize::try_from(per_segment).map_err(io::Error::other)?) {
            sequence += 1;
            let rows = first..(first + per_segment).min(sealed);
            self.make_sealed(folder, Sequence(sequence), rows, zeros)?;
        }
        self.make_open(folder, Sequence(sequence + 1), sealed..self.rows)?;
        // One call for all files: one each would take minutes.
        nix::unistd::syncfs(File::open(folder)?).map_err(io::Error::from)?;
        Ok(Options {
            folder: folder.to_owned(),
            capacity: Bytes((sequence + 5) * segment + MARGIN),
            segment: self.segment,
            io: Io::Auto,
            queue_depth: 32,
        })
    }

    fn make_file(&self, folder: &Path, sequence: Sequence) -> io::Result<(File, Head)> {
        let head = Head { store: STORE, sequence, size: self.segment.0 };
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        let file = options.open(folder.join(segment_name(sequence)))?;
        file.set_len(head.size)?;
        file.write_all_at(&head.encode(), 0)?;
        Ok((file, head))
    }

    fn entry(&self, n: u64, nth: u64, length: u32, checksum: u64) -> Entry {
        let at = PAGE64 + nth * record_bytes(self.row_bytes);
        Entry {
            space: SPACE,
            key: Self::key(n),
            position: position(n),
            page: u32::try_from(at / PAGE64).expect("a segment has at most 2^20 pages"),
            length,
            checksum,
            seal: 0,
        }
    }

    fn make_sealed(
        &self,
        folder: &Path,
        sequence: Sequence,
        rows: std::ops::Range<u64>,
        zeros: u64,
    ) -> io::Result<()> {
        let (file, head) = self.make_file(folder, sequence)?;
        let length = self.row_bytes.min(PAGE as u32);
        let entries: Vec<_> = (0..).zip(rows).map(|(nth, n)| self.entry(n, nth, length, zeros)).collect();
        for entry in &entries {
            let mut record = page_of(&head, entry);
            record.resize(2 * PAGE, 0);
            file.write_all_at(&record, u64::from(entry.page) * PAGE64)?;
        }
        let foot = encode_foot(&head, &entries);
        file.write_all_at(&foot, head.size - foot.len() as u64)
    }

    fn make_open(&self, folder: &Path, sequence: Sequence, rows: std::ops::Range<u64>) -> io::Result<()> {
        let (file, head) = self.make_file(folder, sequence)?;
        let mut payload = vec![0; self.row_bytes as usize];
        for (nth, n) in (0..).zip(rows) {
            payload.chunks_mut(32).zip(n * 4096..).for_each(|(chunk, word)| {
                chunk.copy_from_slice(&Self::key(word).hash.0[..chunk.len()]);
            });
            let entry = self.entry(n, nth, self.row_bytes, crc64(&[&payload]));
            let at = u64::from(entry.page) * PAGE64;
            file.write_all_at(&page_of(&head, &entry), at)?;
            file.write_all_at(&payload, at + PAGE64)?;
        }
        Ok(())
    }

    /// Takes the folder's files out of the page cache.
    ///
    /// # Errors
    /// When the drive fails.
    pub fn drop_cache(&self, folder: &Path) -> Result<(), Error> {
        nix::unistd::syncfs(File::open(folder)?).map_err(io::Error::from)?;
        for entry in std::fs::read_dir(folder)? {
            let file = File::open(entry?.path())?;
            posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).map_err(io::Error::from)?;
        }
        Ok(())
    }

    /// Opens what [`Probe::make`] made, until a row was looked up, read and found right. Blocks while it opens. The
    /// store is closed again.
    ///
    /// # Errors
    /// When it does not open, or does not hold what was put there.
    pub async fn restart(&self, options: &Options) -> Result<Restart, Error> {
        let clock = Clock::real();
        let begun = clock.now();
        let (store, opened) = Store::open(options.clone(), DiskKind::Real, clock.clone(), &Meter::new())?;
        let open_s = clock.now().since(begun).as_secs_f64();
        let sealed = self.rows - self.rows_open();
        // The first row of a segment in the middle; without a sealed one, the first row that there is.
        let n = sealed / 2 / self.rows_per_segment() * self.rows_per_segment();
        let record = store.read(SPACE, Self::key(n)).await;
        let restart_s = clock.now().since(begun).as_secs_f64();
        let is_right = record.is_some_and(|r| {
            r.position == position(n) && (n >= sealed || r.payload.iter().all(|&byte| byte == 0))
        });
        let memory = store.index_bytes();
        let step = (self.rows / LOOKUPS).max(1);
        let keys: Vec<_> = (0..LOOKUPS).map(|i| Self::key(i * step % self.rows)).collect();
        let begun = clock.now();
        let held = store.held(SPACE, &keys).into_iter().filter(|held| *held).count();
        let lookup_4000_ms = clock.now().since(begun).as_secs_f64() * 1e3;
        store.close().await;
        if !is_right || opened.rows != self.rows || held as u64 != LOOKUPS {
            let what =
                format!("the probe's store is not what was made: {opened:?}, row {n} right: {is_right}");
            return Err(io::Error::other(what).into());
        }
        let bytes_per_row = memory as f64 / self.rows as f64;
        let segments = opened.segments;
        Ok(Restart { rows: opened.rows, segments, restart_s, open_s, bytes_per_row, lookup_4000_ms })
    }
}

fn position(n: u64) -> u32 {
    u32::try_from(n % (1 << 16)).expect("a remainder") * 16 + 16
}

fn page_of(head: &Head, entry: &Entry) -> Vec<u8> {
    let Entry { space, key, position, length, checksum, .. } = *entry;
    let Head { store, sequence, .. } = *head;
    let page = Page { store, sequence, space, key, position, length, checksum, seal: None }.encode();
    assert_eq!(page.len(), PAGE);
    page
}
