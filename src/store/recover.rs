//! From a folder to a log and an index: what a start finds, and what it makes of damage.
//!
//! Sealed segments tell what they hold by their feet. A segment without one is scanned and each payload verified; the
//! newest of those goes on where it stopped. Whatever is not ours, or cannot be read as ours, is left where it is,
//! counted against the capacity and reported. A start fails only when the folder itself cannot be used.

use std::collections::{BTreeMap, HashMap};

use super::disk::{Buffer, Files, Found, Handle};
use super::folder::{LOCK, UNFINISHED};
use super::format::{
    Bad, Entry, Head, Identity, PAGE, PAGE64, Record, Sequence, StoreId, Trailer, parse_segment_name,
    record_bytes, segment_name,
};
use super::index::{Index, Place};
use super::log::{Limits, Log};
use super::marks::{self, MARKS};
use super::{Error, Opened};
use crate::base::checksum::crc64;

/// Name of the identity's file.
const IDENTITY: &str = "store";

/// Notes kept; more of the same kind tell nobody anything.
const NOTES: usize = 50;

/// Least bytes that the scan reads at a time.
const WINDOW: usize = 4 << 20;

/// What a start has found.
#[derive(Debug)]
pub struct Recovered {
    pub store: StoreId,
    pub log: Log,
    pub index: Index,
    pub handles: HashMap<Sequence, Handle>,
    pub opened: Opened,
}

/// One segment of ours, and what it holds.
struct Segment {
    head: Head,
    found: Found,
    handle: Handle,
    /// `None`: nothing tells that it was sealed.
    foot: Option<Vec<Entry>>,
}

struct Recovery<'a> {
    files: &'a Files,
    opened: Opened,
    /// Bytes of the folder that are no segments of ours.
    other: u64,
    next: Sequence,
}

/// Reads a folder that is locked.
pub fn recover(files: &Files, capacity: u64, segment: u64) -> Result<Recovered, Error> {
    let other = marks::reserve(capacity);
    let mut recovery = Recovery { files, opened: Opened::default(), other, next: Sequence(1) };
    let named = recovery.sort_files()?;
    let heads = recovery.read_heads(named);
    let store = recovery.identity(&heads)?;
    let segments = recovery.read_segments(store, heads);
    recovery.build(store, capacity, segment, segments)
}

impl Recovery<'_> {
    fn note(&mut self, note: String) {
        if self.opened.notes.len() < NOTES {
            self.opened.notes.push(note);
        }
    }

    fn damaged(&mut self, note: String) {
        self.opened.damaged += 1;
        self.tell_damage(note);
    }

    fn tell_damage(&mut self, note: String) {
        if self.opened.damage.len() < NOTES {
            self.opened.damage.push(note.clone());
        }
        self.note(note);
    }

    /// Leaves a file where it is: it takes room, and nothing of it is used.
    fn set_aside(&mut self, found: &Found, why: &str) {
        self.other += found.taken;
        self.damaged(format!("{}: {why}; set aside, it still counts against the capacity", found.name));
    }

    /// Segments by sequence. Leftovers of files that were being made are removed, everything else is counted.
    fn sort_files(&mut self) -> Result<BTreeMap<Sequence, Found>, Error> {
        let mut named = BTreeMap::new();
        for found in self.files.list()? {
            if let Some(sequence) = parse_segment_name(&found.name).filter(|_| found.is_file) {
                self.next = self.next.max(Sequence(sequence.0.saturating_add(1)));
                named.insert(sequence, found);
            } else if found.is_file && found.name.ends_with(UNFINISHED) {
                self.files.remove(&found.name)?;
            } else if found.name == IDENTITY || found.name == LOCK {
                self.other += found.taken;
            } else if found.name == MARKS {
                // Its room is set aside already.
            } else {
                self.other += found.taken;
                let note = format!("{}: not a file of the store; it counts against the capacity", found.name);
                if self.opened.foreign.len() < NOTES {
                    self.opened.foreign.push(note.clone());
                }
                self.note(note);
            }
        }
        Ok(named)
    }

    fn read_heads(&mut self, named: BTreeMap<Sequence, Found>) -> Vec<(Head, Found, Handle)> {
        let mut heads = Vec::new();
        for (sequence, found) in named {
            let read = self.files.open(&found.name).and_then(|handle| {
                let mut page = Buffer::zeroed(PAGE);
                let len = self.files.read(&handle, 0, &mut page)?;
                page.truncate(len);
                Ok((handle, page))
            });
            match read.map(|(handle, page)| (handle, Head::decode(&page))) {
                Ok((handle, Ok(head))) if head.sequence == sequence => heads.push((head, found, handle)),
                Ok((_, Ok(_))) => self.set_aside(&found, "its name is another segment's"),
                Ok((_, Err(bad))) => self.set_aside(&found, &bad.to_string()),
                Err(e) => self.set_aside(&found, &e.to_string()),
            }
        }
        heads
    }

    /// Who we are. Without a readable identity, whoever wrote most of the segments.
    fn identity(&mut self, heads: &[(Head, Found, Handle)]) -> Result<StoreId, Error> {
        let page = self.files.open(IDENTITY).and_then(|handle| {
            let mut page = Buffer::zeroed(PAGE);
            let len = self.files.read(&handle, 0, &mut page)?;
            page.truncate(len);
            Ok(page)
        });
        let missing = match page {
            Ok(page) => match Identity::decode(&page) {
                Ok(identity) => return Ok(identity.store),
                Err(bad) => Some(bad.to_string()),
            },
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
            Err(e) => Some(e.to_string()),
        };
        let mut votes: BTreeMap<StoreId, usize> = BTreeMap::new();
        heads.iter().for_each(|(head, ..)| *votes.entry(head.store).or_default() += 1);
        let store = match votes.into_iter().max_by_key(|(_, count)| *count) {
            Some((store, _)) => store,
            None => StoreId(rand::random()),
        };
        let counted = missing.is_some();
        if counted || !heads.is_empty() {
            let why = missing.unwrap_or_else(|| "missing".into());
            self.damaged(format!("{IDENTITY}: {why}; taken from the segments"));
        }
        match self.files.create(IDENTITY, PAGE64, &Identity { store }.encode()) {
            Ok((_, taken)) => self.other += if counted { 0 } else { taken },
            // A full drive can still serve what it holds; the next start tries again.
            Err(e) => self.note(format!("{IDENTITY}: could not be written: {e}")),
        }
        Ok(store)
    }

    fn read_segments(&mut self, store: StoreId, heads: Vec<(Head, Found, Handle)>) -> Vec<Segment> {
        let mut segments = Vec::new();
        for (head, found, handle) in heads {
            if head.store != store {
                self.set_aside(&found, &Bad::Foreign.to_string());
                continue;
            }
            let foot = match self.read_foot(&head, &handle) {
                Ok(entries) => Some(entries),
                Err(Ok(Bad::Magic | Bad::Malformed(_))) => None,
                Err(Ok(bad)) => {
                    self.damaged(format!("{}: its foot: {bad}; it is scanned instead", found.name));
                    None
                }
                Err(Err(e)) => {
                    self.damaged(format!("{}: its foot: {e}; it is scanned instead", found.name));
                    None
                }
            };
            segments.push(Segment { head, found, handle, foot });
        }
        segments
    }

    fn read_foot(&self, head: &Head, handle: &Handle) -> Result<Vec<Entry>, Result<Bad, std::io::Error>> {
        let mut last = Buffer::zeroed(PAGE);
        let len = self.files.read(handle, head.size - PAGE64, &mut last).map_err(Err)?;
        last.truncate(len);
        let trailer = Trailer::decode(&last, head).map_err(Ok)?;
        let mut foot = Buffer::zeroed(usize::try_from(trailer.foot_len()).expect("at most 2^32 entries"));
        let len = self.files.read(handle, trailer.start, &mut foot).map_err(Err)?;
        foot.truncate(len);
        trailer.entries(&foot).map_err(Ok)
    }

    fn build(
        mut self,
        store: StoreId,
        capacity: u64,
        segment: u64,
        segments: Vec<Segment>,
    ) -> Result<Recovered, Error> {
        let segments = self.fit(capacity, segments)?;
        let mut log = Log::new(Limits { store, capacity, segment, other: self.other }, self.next);
        let mut index = Index::default();
        index.reserve(segments.iter().filter_map(|s| s.foot.as_ref()).map(Vec::len).sum());
        let mut handles = HashMap::new();
        let newest = segments.last().map(|s| s.head.sequence);
        for Segment { head, found, handle, foot } in segments {
            let sequence = head.sequence;
            let sealed = foot.is_some();
            let entries = match foot {
                Some(entries) => {
                    log.found(sequence, found.taken, sealed);
                    entries
                }
                None => {
                    let scan = self.scan(&head, &found, &handle);
                    if found.len >= head.size && newest == Some(sequence) {
                        log.reopened(head, found.taken, scan.tail, scan.entries.clone());
                    } else {
                        log.found(sequence, found.taken, false);
                        self.damaged(format!(
                            "{}: cut short or never sealed; {} rows used",
                            found.name,
                            scan.entries.len()
                        ));
                    }
                    scan.entries
                }
            };
            for entry in &entries {
                index.add(entry.space, entry.key, Place::of(sequence, entry));
            }
            handles.insert(sequence, handle);
        }
        self.opened.segments = log.segments();
        self.opened.rows = index.rows();
        Ok(Recovered { store, log, index, handles, opened: self.opened })
    }

    /// Removes the oldest segments while the capacity is exceeded: it may have been lowered, or a cut brought back
    /// what had been removed.
    fn fit(&mut self, capacity: u64, mut segments: Vec<Segment>) -> Result<Vec<Segment>, Error> {
        let mut used: u64 = self.other + segments.iter().map(|s| s.found.taken).sum::<u64>();
        let mut removed = 0_u32;
        while used > capacity && !segments.is_empty() {
            let oldest = segments.remove(0);
            self.files.remove(&segment_name(oldest.head.sequence))?;
            used -= oldest.found.taken;
            removed += 1;
        }
        if removed > 0 {
            self.files.sync()?;
            self.note(format!("{removed} oldest segments removed: they did not fit into the capacity"));
        }
        Ok(segments)
    }
}

/// What a scan has found.
struct Scan {
    entries: Vec<Entry>,
    /// Behind the last record.
    tail: u64,
}

impl Recovery<'_> {
    /// Looks for records at every page, and verifies their payloads. Broken ones before a whole one are damage; behind
    /// the last whole one they are what was being written when the store ended.
    fn scan(&mut self, head: &Head, found: &Found, handle: &Handle) -> Scan {
        let mut window = Window { files: self.files, handle, start: 0, bytes: Buffer::zeroed(0) };
        let mut scan = Scan { entries: Vec::new(), tail: PAGE64 };
        let (mut at, mut broken, mut unfinished) = (PAGE64, 0_u64, 0_u64);
        let end = head.size.min(found.len);
        while at + 2 * PAGE64 <= end {
            let record =
                window.get(at, PAGE64).and_then(|p| Record::decode(p, head.store, head.sequence).ok());
            let Some(record) = record.filter(|r| at + record_bytes(r.length) <= head.size) else {
                at += PAGE64;
                continue;
            };
            let payload = window.get(at + PAGE64, record.length.into());
            if payload.is_none_or(|p| crc64(&[p]) != record.checksum) {
                unfinished += 1;
                at += PAGE64;
                continue;
            }
            let page = u32::try_from(at / PAGE64).expect("Head::decode bounds a segment's pages");
            let Record { space, key, position, length, checksum, .. } = record;
            scan.entries.push(Entry { space, key, position, page, length, checksum });
            at += record_bytes(record.length);
            scan.tail = at;
            broken += std::mem::take(&mut unfinished);
        }
        if broken > 0 {
            self.opened.damaged += broken;
            self.tell_damage(format!("{}: {broken} damaged rows skipped", found.name));
        }
        if unfinished > 0 {
            self.note(format!(
                "{}: {unfinished} rows were being written when the store ended; skipped",
                found.name
            ));
        }
        scan
    }
}

/// A part of a file, read in large pieces.
struct Window<'a> {
    files: &'a Files,
    handle: &'a Handle,
    start: u64,
    bytes: Buffer,
}

impl Window<'_> {
    /// `len` bytes at `at`; `None` behind the file's end, or where it cannot be read.
    fn get(&mut self, at: u64, len: u64) -> Option<&[u8]> {
        let len = usize::try_from(len).ok()?;
        let inside = at >= self.start && at + len as u64 <= self.start + self.bytes.len() as u64;
        if !inside {
            let mut bytes = Buffer::zeroed(len.next_multiple_of(PAGE).max(WINDOW));
            // What cannot be read is like what is not there.
            let read = self.files.read(self.handle, at, &mut bytes).unwrap_or(0);
            bytes.truncate(read);
            (self.start, self.bytes) = (at, bytes);
        }
        let from = usize::try_from(at - self.start).ok()?;
        self.bytes.get(from..from + len)
    }
}
