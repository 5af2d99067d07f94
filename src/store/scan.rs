//! What one segment's file says about itself at a start: its head, its foot, and, where there is none, its records.
//!
//! A start has thousands of segments to look at, so each is asked for as little as possible: one page for the head,
//! one piece of the end for trailer and foot together. The piece is as long as the last foot was, because segments of
//! one store are alike; a longer foot costs a second read.
//!
//! Scanning is for a segment that was never sealed, where what was written last may be torn: there every payload is
//! verified. Where a seal is there but damaged, it only finds the records, and goes from one to the next by their
//! lengths: each row is verified when it is read, as all rows are.
//! What lies in holes is passed over.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use super::disk::{Buffer, Files, Handle};
use super::format::{Bad, Entry, Head, PAGE, PAGE64, Record, Trailer, padded, record_bytes};
use super::holes::Holes;
use super::seal::Seals;

/// Least bytes that a scan which verifies reads at a time: it needs all of them.
const WINDOW: usize = 8 << 20;

/// Least bytes that a scan which only looks for records reads at a time. Most records are longer, and what lies
/// between is not wanted.
const GLANCE: usize = 64 << 10;

/// Longest end that is read at once on the guess that it holds the foot.
const GUESS_MAX: u64 = 1 << 20;

/// How long the feet of this store are, by the last one that was read.
#[derive(Debug)]
pub struct Guess(AtomicU64);

impl Default for Guess {
    fn default() -> Self {
        Self(AtomicU64::new(4 * PAGE64))
    }
}

/// Why a segment has no list of its records.
#[derive(Debug)]
pub enum NoFoot {
    /// Nothing says that it was ever sealed.
    Unsealed,
    Bad(Bad),
    Unreadable(io::Error),
}

impl From<Bad> for NoFoot {
    fn from(bad: Bad) -> Self {
        match bad {
            Bad::Magic | Bad::Malformed(_) => Self::Unsealed,
            bad => Self::Bad(bad),
        }
    }
}

impl std::fmt::Display for NoFoot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unsealed => f.write_str("it was cut short or never sealed"),
            Self::Bad(bad) => write!(f, "its foot: {bad}"),
            Self::Unreadable(error) => write!(f, "its foot: {error}"),
        }
    }
}

/// Opens a file and reads its first page.
pub fn read_first(files: &Files, name: &str) -> io::Result<(Handle, Buffer)> {
    let handle = files.open(name)?;
    let page = read_at(files, &handle, 0, PAGE64)?;
    Ok((handle, page))
}

/// What there is of `len` bytes from `offset` on.
fn read_at(files: &Files, handle: &Handle, offset: u64, len: u64) -> io::Result<Buffer> {
    let mut bytes = Buffer::zeroed(usize::try_from(len).map_err(io::Error::other)?);
    let read = files.read(handle, offset, &mut bytes)?;
    bytes.truncate(read);
    Ok(bytes)
}

/// The records of a sealed segment, as its foot lists them.
pub fn read_foot(files: &Files, head: &Head, handle: &Handle, guess: &Guess) -> Result<Vec<Entry>, NoFoot> {
    let want = guess.0.load(Ordering::Relaxed).min(head.size - PAGE64);
    let end = read_at(files, handle, head.size - want, want).map_err(NoFoot::Unreadable)?;
    let list_len = usize::try_from(want - PAGE64).expect("a guess is bounded");
    let (list, last) = end.split_at_checked(list_len).ok_or(NoFoot::Unsealed)?;
    let trailer = Trailer::decode(last, head)?;
    let foot_len = trailer.foot_len();
    guess.0.store((foot_len + PAGE64).min(GUESS_MAX), Ordering::Relaxed);
    let inside = usize::try_from(foot_len).ok().and_then(|len| list.len().checked_sub(len));
    let entries = match inside {
        Some(from) => trailer.entries(&list[from..])?,
        None => {
            let foot = read_at(files, handle, trailer.start, foot_len).map_err(NoFoot::Unreadable)?;
            trailer.entries(&foot)?
        }
    };
    Ok(entries)
}

/// Bytes that scans may still read. What is damaged must not hold up a start for long.
#[derive(Debug)]
pub struct Budget(AtomicU64);

impl Budget {
    pub fn new(bytes: u64) -> Self {
        Self(AtomicU64::new(bytes))
    }

    fn is_left(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }

    fn spend(&self, bytes: u64) {
        // More than what is left may be spent, once by each reader.
        let _ = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| Some(left.saturating_sub(bytes)));
    }
}

/// What a scan has found.
#[derive(Debug)]
pub struct Scan {
    pub entries: Vec<Entry>,
    /// Behind the last record.
    pub tail: u64,
    /// Records before a whole one whose payloads are not what was written.
    pub broken: u64,
    /// Such records behind the last whole one: they were being written when the store ended.
    pub unfinished: u64,
    /// Some of the file could not be read, or was not looked at any more.
    pub partial: bool,
}

/// How a segment is scanned.
#[derive(Clone, Copy, Debug)]
pub struct How<'a> {
    /// Each payload is held against its checksum, or its seal where the key is there. Otherwise records are believed,
    /// as those of a foot are.
    pub verify: Option<&'a Seals>,
    /// Ends the scan when it is spent.
    pub budget: Option<&'a Budget>,
}

/// Looks for the records of the segment that `head` describes, in a file of `len` bytes.
pub fn scan(files: &Files, head: &Head, handle: &Handle, len: u64, how: How<'_>) -> Scan {
    let least = if how.verify.is_some() { WINDOW } else { GLANCE };
    let bytes = Buffer::zeroed(0);
    let mut window = Window { files, handle, least, start: 0, bytes, read: 0, failed: false };
    let mut found = Scan { entries: Vec::new(), tail: PAGE64, broken: 0, unfinished: 0, partial: false };
    let end = head.size.min(len);
    let holes = Holes::of(files, handle, end);
    let mut at = holes.skip(PAGE64);
    // A drive may take seconds to say that it cannot read: the first time is the last.
    while at + 2 * PAGE64 <= end && !window.failed {
        if let Some(budget) = how.budget {
            budget.spend(std::mem::take(&mut window.read));
            if !budget.is_left() {
                found.partial = true;
                break;
            }
        }
        let next = match look(&mut window, head, at, end, how) {
            Look::Nothing => at + PAGE64,
            Look::Torn => {
                found.unfinished += 1;
                at + PAGE64
            }
            Look::Whole(entry) => {
                found.entries.push(entry);
                found.broken += std::mem::take(&mut found.unfinished);
                found.tail = at + record_bytes(entry.length);
                found.tail
            }
        };
        at = holes.skip(next);
    }
    found.partial |= window.failed;
    found
}

/// What lies at a page.
enum Look {
    Nothing,
    /// A record without its payload.
    Torn,
    Whole(Entry),
}

fn look(window: &mut Window<'_>, head: &Head, at: u64, end: u64, how: How<'_>) -> Look {
    let record = window.get(at, PAGE64).and_then(|p| Record::decode(p, head.store, head.sequence).ok());
    let Some(record) = record.filter(|r| at + record_bytes(r.length) <= head.size) else {
        return Look::Nothing;
    };
    let is_there = at + PAGE64 + u64::from(record.length) <= end;
    let mut sums_up = |seals: &Seals| {
        let payload = window.get(at + PAGE64, record.length.into());
        // Without its key nobody can tell, and nobody will ask.
        payload.is_some_and(|payload| matches!(seals.look(&record, payload), Ok(()) | Err(Bad::NoKey)))
    };
    let is_whole = is_there && how.verify.is_none_or(&mut sums_up);
    if !is_whole {
        return Look::Torn;
    }
    let page = u32::try_from(at / PAGE64).expect("Head::decode bounds a segment's pages");
    Look::Whole(record.entry(page))
}

/// A part of a file, read in large pieces.
struct Window<'a> {
    files: &'a Files,
    handle: &'a Handle,
    /// Bytes that are read at a time, at least.
    least: usize,
    start: u64,
    bytes: Buffer,
    /// Bytes read since somebody asked.
    read: u64,
    /// Something could not be read.
    failed: bool,
}

impl Window<'_> {
    /// `len` bytes at `at`; `None` behind the file's end, or where it cannot be read.
    fn get(&mut self, at: u64, len: u64) -> Option<&[u8]> {
        let inside = at >= self.start && at + len <= self.start + self.bytes.len() as u64;
        if !inside {
            self.slide(at, usize::try_from(padded(len)).ok()?);
        }
        let from = usize::try_from(at - self.start).ok()?;
        self.bytes.get(from..from + usize::try_from(len).ok()?)
    }

    /// Begins the window at `at`. What it has of that already is kept, not read again.
    fn slide(&mut self, at: u64, len: usize) {
        let old = at.checked_sub(self.start).and_then(|from| self.bytes.get(usize::try_from(from).ok()?..));
        // A file that ends within a page cannot be read on from there, and need not be.
        let kept = old.filter(|old| old.len().is_multiple_of(PAGE)).unwrap_or_default();
        let mut rest = Buffer::zeroed((len - kept.len().min(len)).max(self.least));
        let read = self.files.read(self.handle, at + kept.len() as u64, &mut rest);
        self.failed |= read.is_err();
        // What cannot be read is like what is not there.
        rest.truncate(read.unwrap_or(0));
        self.read += rest.len() as u64;
        if kept.is_empty() {
            self.bytes = rest;
        } else {
            let mut bytes = Buffer::zeroed(kept.len() + rest.len());
            bytes[..kept.len()].copy_from_slice(kept);
            bytes[kept.len()..].copy_from_slice(&rest);
            self.bytes = bytes;
        }
        self.start = at;
    }
}
