//! From a folder to a log and an index: what a start finds, and what it makes of damage.
//!
//! Sealed segments tell what they hold by their feet; the newest ones without a foot (one that was being sealed, one
//! that took rows, one that was to be next) are scanned, verified, and go on where they stopped. A segment whose foot
//! is damaged is asked for its records instead, as long as that takes little; what is not found then is room that is
//! reclaimed in its turn. Rows that were released lie in holes, and do not come back. Heads and feet are read by
//! several threads while another one fills the index: a million rows are there in a second or two.
//!
//! Whatever is not ours is left where it is, counted against the capacity and reported. A file with a segment's name
//! and nobody's head is set aside in the same way, so that somebody can look at it, but not for ever: such files take
//! an eighth of the capacity at most, and go before any segment does. A start fails only when the folder itself
//! cannot be used, never because of what is in it.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use super::disk::{Buffer, Files, Found, Handle};
use super::folder::{LOCK, UNFINISHED};
use super::format::{Bad, Entry, Head, Identity, PAGE64, Sequence, StoreId, parse_segment_name};
use super::holes::{Holes, Parts};
use super::index::{Index, Place};
use super::log::{Limits, Log};
use super::marks::{self, MARKS, Marks};
use super::scan::{Budget, Guess, How, NoFoot, Scan, read_first, read_foot, scan};
use super::seal::{Seals, Unkeyed};
use super::worth::{self, Candidate, Kind, Least, Standing};
use super::{Error, Opened};

/// Name of the identity's file.
const IDENTITY: &str = "store";

/// Notes kept; more of the same kind tell nobody anything.
const NOTES: usize = 50;

/// Share of the capacity that files with nobody's head may take: one in so many.
const ASIDE: u64 = 8;

/// Segments at the end of a log that may be without a foot: being sealed, open, and made ahead.
const YOUNG: usize = 3;

/// Threads that read heads and feet. One waits for the drive most of the time; a drive likes 16 at once.
const READERS: usize = 16;

/// Bytes that are read at a start to find the records of segments without a foot: a second or so.
const GLANCES: u64 = 512 << 20;

/// Rows that room is made for before they are counted, at most: a table of 10 MB.
const AT_ONCE: usize = 1 << 20;

/// What a start has found.
#[derive(Debug)]
pub struct Recovered {
    pub store: StoreId,
    pub log: Log,
    pub index: Index,
    pub handles: HashMap<Sequence, Handle>,
    pub opened: Opened,
    pub marks: Marks,
}

/// One segment of ours.
struct Segment {
    head: Head,
    found: Found,
    handle: Handle,
}

/// What becomes of a segment.
enum Kept {
    Sealed,
    Unsealed,
    /// It is sealed or goes on behind these.
    Young(Scan),
}

/// What a segment says that it holds.
enum Told {
    Foot(Vec<Entry>),
    /// One of the newest, not sealed.
    Young(Scan),
    Nothing(NoFoot),
}

struct Recovery<'a> {
    files: &'a Files,
    seals: &'a Seals,
    unkeyed: Unkeyed,
    opened: Opened,
    /// Bytes of the folder that are no segments of ours.
    other: u64,
    /// Bytes of the file of marks, which may grow.
    small: u64,
    /// Of these, files with a segment's name and nobody's head.
    aside: Vec<Found>,
    next: Sequence,
}

/// Reads a folder that is locked.
pub fn recover(files: &Files, seals: &Seals, capacity: u64, segment: u64) -> Result<Recovered, Error> {
    let mut recovery = Recovery {
        files,
        seals,
        unkeyed: Unkeyed::default(),
        opened: Opened::default(),
        other: 0,
        small: 0,
        aside: Vec::new(),
        next: Sequence(1),
    };
    let named = recovery.sort_files()?;
    let heads = recovery.read_heads(named);
    let store = recovery.identity(&heads)?;
    let segments = recovery.own(store, heads);
    recovery.clear_aside(capacity, &segments);
    let mut index = Index::default();
    let mut kept = recovery.read_rows(segments, &mut index);
    let marks = recovery.load_marks(&mut index);
    recovery.fit(capacity, &mut kept, &mut index, &marks);
    let limits =
        Limits { store, capacity, segment, other: recovery.other, reserve: marks::reserve(capacity) };
    Ok(recovery.build(limits, kept, index, marks))
}

/// What a file takes, counted with what a sparse one may still take.
fn whole(found: &Found) -> u64 {
    found.taken.max(found.len)
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
        self.other += whole(found);
        self.damaged(format!("{}: {why}; set aside, it still counts against the capacity", found.name));
    }

    /// Segments by sequence. Leftovers of files that were being made are removed, everything else is counted.
    fn sort_files(&mut self) -> Result<Vec<(Sequence, Found)>, Error> {
        let mut named = BTreeMap::new();
        for found in self.files.list()? {
            if let Some(sequence) = parse_segment_name(&found.name).filter(|_| found.is_file) {
                self.next = self.next.max(Sequence(sequence.0.saturating_add(1)));
                named.insert(sequence, found);
            } else if found.is_file && found.name.ends_with(UNFINISHED) {
                if let Err(e) = self.files.remove(&found.name) {
                    self.other += whole(&found);
                    self.note(format!("{}: could not be removed: {e}", found.name));
                }
            } else if found.name == IDENTITY || found.name == LOCK {
                self.other += whole(&found);
            } else if found.name == MARKS {
                self.small = whole(&found);
            } else {
                self.other += whole(&found);
                let note = format!("{}: not a file of the store; it counts against the capacity", found.name);
                if self.opened.foreign.len() < NOTES {
                    self.opened.foreign.push(note.clone());
                }
                self.note(note);
            }
        }
        Ok(named.into_iter().collect())
    }

    fn read_heads(&mut self, named: Vec<(Sequence, Found)>) -> Vec<(Head, Found, Handle)> {
        let (files, mut heads) = (self.files, Vec::with_capacity(named.len()));
        let read = |(_, found): &(Sequence, Found)| {
            read_first(files, &found.name).map(|(handle, page)| (handle, Head::decode(&page)))
        };
        in_order(files, &named, read, |(sequence, found), read| match read {
            Ok((handle, Ok(head))) if head.sequence == *sequence => {
                heads.push((head, found.clone(), handle));
            }
            Ok((_, Ok(_))) => self.set_aside(found, "its name is another segment's"),
            // A later program may come back to it.
            Ok((_, Err(bad @ Bad::Version { .. }))) => self.set_aside(found, &bad.to_string()),
            Ok((_, Err(bad))) => {
                self.set_aside(found, &bad.to_string());
                self.aside.push(found.clone());
            }
            Err(e) => self.set_aside(found, &e.to_string()),
        });
        heads
    }

    /// Who we are. Without a readable identity, whoever wrote most of the segments.
    fn identity(&mut self, heads: &[(Head, Found, Handle)]) -> Result<StoreId, Error> {
        let missing = match read_first(self.files, IDENTITY) {
            Ok((_, page)) => match Identity::decode(&page) {
                Ok(identity) => return Ok(identity.store),
                Err(bad) => Some(bad.to_string()),
            },
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
            Err(e) => return self.unread_identity(e, heads),
        };
        let store = majority(heads).unwrap_or_else(|| StoreId(rand::random()));
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

    /// The identity is there and the drive does not give it. It may tomorrow, so it is never written over: under a new
    /// one every row would be a stranger's for ever.
    fn unread_identity(
        &mut self,
        error: std::io::Error,
        heads: &[(Head, Found, Handle)],
    ) -> Result<StoreId, Error> {
        // Where a folder stands there never was an identity that could come back.
        let lost = error.kind() == std::io::ErrorKind::IsADirectory;
        let known = majority(heads).or_else(|| lost.then(|| StoreId(rand::random())));
        self.damaged(format!("{IDENTITY}: it could not be read ({error}); taken from the segments"));
        known.ok_or(Error::Io(error))
    }

    /// Segments that this store wrote.
    fn own(&mut self, store: StoreId, heads: Vec<(Head, Found, Handle)>) -> Vec<Segment> {
        let mut segments = Vec::with_capacity(heads.len());
        for (head, found, handle) in heads {
            if head.store == store {
                segments.push(Segment { head, found, handle });
            } else {
                self.set_aside(&found, &Bad::Foreign.to_string());
            }
        }
        segments
    }

    /// Removes what was set aside as far as its room is needed. Files that are not ours stay.
    fn clear_aside(&mut self, capacity: u64, segments: &[Segment]) {
        let mut used = self.other + self.small + segments.iter().map(|s| s.found.taken).sum::<u64>();
        let mut aside: u64 = self.aside.iter().map(whole).sum();
        for found in std::mem::take(&mut self.aside) {
            if (used > capacity || aside > capacity / ASIDE) && self.removed(&found.name) {
                self.note(format!("{}: removed, there is no room for what cannot be read", found.name));
                self.other -= whole(&found);
                used -= whole(&found);
                aside -= whole(&found);
            }
        }
    }

    /// Keeps the capacity: it may have been lowered, a cut may have brought back what had been removed, and somebody
    /// may have put files here. Rows go by their worth; where that wins nothing, segments go, the oldest first. Pinned
    /// rows go last. When files that are not ours alone exceed the capacity, removing ours would not bring it back.
    fn fit(&mut self, capacity: u64, kept: &mut Vec<(Segment, Kept)>, index: &mut Index, marks: &Marks) {
        let used = |this: &Self, kept: &[(Segment, Kept)]| {
            this.other + this.small + kept.iter().map(|(segment, _)| segment.found.taken).sum::<u64>()
        };
        if used(self, kept) <= capacity {
            return;
        }
        if self.other > capacity {
            let other = self.other;
            self.note(format!("other files take {other} bytes, more than the capacity; no rows are taken"));
            return;
        }
        // What was made ahead holds nothing.
        if let Some((segment, Kept::Young(scan))) = kept.last()
            && scan.entries.is_empty()
            && self.removed(&segment.found.name.clone())
        {
            kept.pop();
        }
        if used(self, kept) <= capacity {
            return;
        }
        // A row that was moved may lie nowhere else.
        for (segment, _) in kept.iter().filter(|(_, kept)| matches!(kept, Kept::Young(_))) {
            let _ = self.files.sync_file(&segment.handle);
        }
        if self.files.can_punch() {
            let over = used(self, kept) - capacity;
            self.release(over, kept, index, marks);
        }
        let mut gone = 0_u32;
        for pinned in [false, true] {
            let mut at = 0;
            while at < kept.len() && used(self, kept) > capacity {
                let (segment, _) = &kept[at];
                let sequence = segment.head.sequence;
                let has_pins = index.rows_of(sequence).any(|(space, key, ..)| marks.is_pinned(&space, &key));
                let name = segment.found.name.clone();
                if has_pins == pinned && self.removed(&name) {
                    index.forget(sequence);
                    kept.remove(at);
                    gone += 1;
                } else {
                    at += 1;
                }
            }
        }
        if gone > 0 {
            self.note(format!("{gone} segments removed: they did not fit into the capacity"));
            if let Err(e) = self.files.sync() {
                self.note(format!("removed segments may come back: {e}"));
            }
        }
    }

    /// Gives back so many bytes of the rows that are worth least.
    fn release(&mut self, over: u64, kept: &mut [(Segment, Kept)], index: &mut Index, marks: &Marks) {
        let sealed = || kept.iter().filter(|(_, kept)| matches!(kept, Kept::Sealed)).map(|(s, _)| s);
        let rows = |sequence| index.rows_of(sequence);
        let now = sealed().flat_map(|s| rows(s.head.sequence)).map(|(.., heat)| heat.last).max().unwrap_or(0);
        let mut least = Least::new(over);
        for segment in sealed() {
            for (space, key, place, heat) in rows(segment.head.sequence) {
                if !marks.is_pinned(&space, &key) {
                    let density =
                        worth::density(&heat, &place, Kind::default(), Standing::Attached, 1.0, now);
                    least.offer(Candidate { space, key, place, density, last: heat.last });
                }
            }
        }
        let (mut parts, rows) = (Parts::default(), least.into_rows());
        rows.iter().for_each(|row| parts.add(row.place.sequence, row.place.part()));
        let of_parts =
            |segment: &&Segment| parts.sequences().any(|sequence| sequence == segment.head.sequence);
        let handles: BTreeMap<_, _> =
            sealed().filter(of_parts).map(|s| (s.head.sequence, s.handle.clone())).collect();
        let (taken, result) = parts.give_back(self.files, &handles);
        for (sequence, taken) in taken {
            if let Some((segment, _)) = kept.iter_mut().find(|(segment, _)| segment.head.sequence == sequence)
            {
                segment.found.taken = taken;
            }
        }
        // Of a drive that failed meanwhile, what is still there stays.
        let holes: BTreeMap<_, _> =
            handles.iter().map(|(s, handle)| (*s, Holes::of(self.files, handle, u64::MAX))).collect();
        let (mut gone, failed) = (0, result.is_err());
        for row in rows {
            let is_there = |holes: &Holes| !holes.touch(&row.place.part());
            if !(failed && holes.get(&row.place.sequence).is_some_and(is_there)) {
                gone += usize::from(index.remove(&row.space, &row.key, &row.place));
            }
        }
        self.note(format!("{gone} rows released: they did not fit into the capacity"));
        if let Err(e) = result {
            self.note(format!("rows could not be released: {e}"));
        }
    }

    fn removed(&mut self, name: &str) -> bool {
        let removed = self.files.remove(name);
        if let Err(e) = &removed {
            self.note(format!("{name}: could not be removed: {e}"));
        }
        removed.is_ok()
    }

    /// Asks every segment for its rows.
    fn read_rows(&mut self, segments: Vec<Segment>, index: &mut Index) -> Vec<(Segment, Kept)> {
        let (files, seals) = (self.files, self.seals);
        let young = segments.iter().rev().nth(YOUNG - 1).map_or(Sequence(0), |s| s.head.sequence);
        let guess = Guess::default();
        let ask = |Segment { head, found, handle }: &Segment| match read_foot(files, head, handle, &guess) {
            Ok(mut entries) => {
                // Nothing was given back of a file that has all of its room.
                if found.taken < head.size {
                    let holes = Holes::of(files, handle, head.size);
                    entries.retain(|entry| !holes.have(entry));
                }
                Told::Foot(entries)
            }
            Err(NoFoot::Unsealed) if head.sequence >= young && found.len >= head.size => {
                Told::Young(scan(files, head, handle, found.len, How { verify: Some(seals), budget: None }))
            }
            Err(why) => Told::Nothing(why),
        };
        let (mut unlisted, mut all) = (Vec::new(), Vec::with_capacity(segments.len()));
        in_order(files, &segments, ask, |segment, told| {
            all.push(match told {
                Told::Foot(entries) => {
                    // Segments are alike: the first tells how many rows there will be.
                    if index.rows() == 0 {
                        index.reserve((entries.len() * segments.len()).min(AT_ONCE));
                    }
                    entries.iter().for_each(|e| self.add(index, segment, e));
                    Kept::Sealed
                }
                Told::Young(scan) => {
                    scan.entries.iter().for_each(|e| self.add(index, segment, e));
                    self.tell_torn(&segment.found, &scan);
                    // What could not be read may be there at the next start: nothing is written over it.
                    if scan.partial { Kept::Unsealed } else { Kept::Young(scan) }
                }
                Told::Nothing(why) => {
                    unlisted.push((segment, why));
                    Kept::Unsealed
                }
            });
        });
        self.ask_records(unlisted, index);
        let mut kept: Vec<_> = segments.into_iter().zip(all).collect();
        let sealed = kept.iter().rposition(|(_, kept)| matches!(kept, Kept::Sealed));
        for (at, (segment, kept)) in kept.iter_mut().enumerate() {
            let Kept::Young(scan) = kept else { continue };
            segment.found.taken = whole(&segment.found);
            if Some(at) < sealed {
                // Newer ones are sealed, and this one is not: it failed to take its foot.
                let (name, rows) = (&segment.found.name, scan.entries.len());
                self.damaged(format!("{name}: {}; {rows} rows used", NoFoot::Unsealed));
                *kept = Kept::Unsealed;
            }
        }
        self.tell_unkeyed();
        kept
    }

    fn build(
        mut self,
        limits: Limits,
        kept: Vec<(Segment, Kept)>,
        mut index: Index,
        marks: Marks,
    ) -> Recovered {
        let mut log = Log::new(limits, self.next);
        log.set_small(self.small);
        if !self.files.can_punch() {
            log.cannot_punch();
        }
        let mut handles = HashMap::new();
        for (Segment { head, found, handle }, kept) in kept {
            match kept {
                Kept::Sealed => log.found(head.sequence, found.taken, true),
                Kept::Unsealed => log.found(head.sequence, found.taken, false),
                Kept::Young(scan) => log.reopened(head, found.taken, scan.tail, scan.entries),
            }
            handles.insert(head.sequence, handle);
        }
        // Their rows were released, or have moved on: perhaps to what was not made durable when the store ended.
        let open = log.unsealed().last();
        index.take_vacated();
        let empty: Vec<_> =
            handles.keys().copied().filter(|s| log.is_sealed(*s) && index.count_of(*s) == 0).collect();
        empty.into_iter().for_each(|sequence| log.vacate(sequence, open));
        self.opened.segments = log.segments();
        self.opened.rows = index.rows();
        Recovered { store: limits.store, log, index, handles, opened: self.opened, marks }
    }

    /// Reads what people said about rows, and takes out what they dropped.
    fn load_marks(&mut self, index: &mut Index) -> Marks {
        let read = self.files.open(MARKS).and_then(|handle| {
            let most = usize::try_from(marks::FILE_MAX).expect("a few MiB");
            let mut bytes = Buffer::zeroed(most);
            let len = self.files.read(&handle, 0, &mut bytes)?;
            bytes.truncate(len);
            Ok(bytes)
        });
        let why = match read.map(|bytes| Marks::decode(&bytes)) {
            Ok(Ok(marks)) => {
                take_out_dropped(&marks, index);
                return marks;
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Marks::default(),
            Ok(Err(bad)) => bad.to_string(),
            Err(e) => e.to_string(),
        };
        self.opened.damaged += 1;
        self.note(format!("{MARKS}: {why}; no row is pinned or dropped"));
        Marks::default()
    }

    /// A row that is sealed under a key which is not here is as good as dropped.
    fn add(&mut self, index: &mut Index, segment: &Segment, entry: &Entry) {
        if self.unkeyed.may_use(self.seals, entry) {
            add(index, segment, entry);
        }
    }

    fn tell_unkeyed(&mut self) {
        let rows = self.unkeyed.rows;
        self.opened.unkeyed = rows;
        if rows > 0 {
            self.note(format!("{rows} rows are sealed under keys that are not here; they are not used"));
        }
    }

    fn tell_torn(&mut self, found: &Found, scan: &Scan) {
        let Scan { broken, unfinished, .. } = scan;
        if *broken > 0 {
            self.opened.damaged += broken;
            self.tell_damage(format!("{}: {broken} damaged rows skipped", found.name));
        }
        if *unfinished > 0 {
            self.note(format!(
                "{}: {unfinished} rows were being written when the store ended; skipped",
                found.name
            ));
        }
        if scan.partial {
            self.damaged(format!("{}: could not be read to its end; its last rows are not used", found.name));
        }
    }

    /// Finds the rows of segments that do not list them, the newest first, as far as that takes little.
    fn ask_records(&mut self, mut unlisted: Vec<(&Segment, NoFoot)>, index: &mut Index) {
        unlisted.reverse();
        let (files, seals, budget) = (self.files, self.seals, Budget::new(GLANCES));
        let look = |(Segment { head, found, handle }, why): &(&Segment, NoFoot)| {
            let verify = matches!(why, NoFoot::Unsealed).then_some(seals);
            scan(files, head, handle, found.len, How { verify, budget: Some(&budget) })
        };
        in_order(files, &unlisted, look, |(segment, why), scan| {
            let Segment { head, found, .. } = *segment;
            for entry in &scan.entries {
                // A newer segment may hold the same key, and has been listed already.
                let newer = index.get(&entry.space, &entry.key).is_some_and(|p| p.sequence > head.sequence);
                if !newer && self.unkeyed.may_use(self.seals, entry) {
                    add(index, segment, entry);
                }
            }
            let (rows, rest) =
                (scan.entries.len(), if scan.partial { "; the rest was not looked at" } else { "" });
            self.damaged(format!("{}: {why}; {rows} rows used{rest}", found.name));
        });
    }
}

fn take_out_dropped(marks: &Marks, index: &mut Index) {
    let (rows, spaces) = marks.dropped();
    let mut dropped: Vec<_> = rows.collect();
    for space in spaces {
        dropped.extend(index.subscribe(space).0.into_iter().map(|(key, _)| (space, key)));
    }
    for (space, key) in dropped {
        if let Some(place) = index.get(&space, &key).filter(|place| marks.is_dropped(&space, &key, place)) {
            index.remove(&space, &key, &place);
        }
    }
}

/// A segment lists this row. What was used when is not written down: a row counts as used when its segment was written
/// last, or in the segments' order where no time is known.
fn add(index: &mut Index, segment: &Segment, entry: &Entry) {
    let Segment { head, found, .. } = segment;
    let order = u32::try_from(head.sequence.0).unwrap_or(u32::MAX);
    let since = if found.modified == 0 { order } else { found.modified };
    let heat = worth::born(since, false);
    index.add_with(entry.space, entry.key, Place::of(head.sequence, entry), heat);
}

/// Does `work` for each item, several at a time, and hands the results on in the order of the items. A memory drive
/// gets one at a time: it counts, and the count must be the same in every run.
fn in_order<'a, T: Sync, R: Send>(
    files: &Files,
    items: &'a [T],
    work: impl Fn(&T) -> R + Sync,
    mut take: impl FnMut(&'a T, R),
) {
    let readers = match files {
        Files::Real(_) if items.len() > 1 => READERS.min(items.len()),
        _ => 0,
    };
    let next = AtomicUsize::new(0);
    let (sender, results) = mpsc::sync_channel(READERS);
    let (next, work) = (&next, &work);
    let started = std::thread::scope(|scope| {
        let mut started = 0;
        for _ in 0..readers {
            let sender = sender.clone();
            let read = move || {
                while let Some((at, item)) = nth(items, next) {
                    // Results are taken until the last sender is gone.
                    let _ = sender.send((at, work(item)));
                }
            };
            let thread = std::thread::Builder::new().name("store-reader".into()).spawn_scoped(scope, read);
            started += usize::from(thread.is_ok());
        }
        drop(sender);
        let (mut early, mut due) = (BTreeMap::new(), 0);
        for (at, result) in results {
            early.insert(at, result);
            while let Some(result) = early.remove(&due) {
                take(&items[due], result);
                due += 1;
            }
        }
        started
    });
    if started == 0 {
        items.iter().for_each(|item| take(item, work(item)));
    }
}

/// The next item that nobody has taken yet.
fn nth<'a, T>(items: &'a [T], next: &AtomicUsize) -> Option<(usize, &'a T)> {
    let at = next.fetch_add(1, Ordering::Relaxed);
    Some((at, items.get(at)?))
}

/// Whoever wrote most of the segments.
fn majority(heads: &[(Head, Found, Handle)]) -> Option<StoreId> {
    let mut votes: BTreeMap<StoreId, usize> = BTreeMap::new();
    heads.iter().for_each(|(head, ..)| *votes.entry(head.store).or_default() += 1);
    votes.into_iter().max_by_key(|(_, count)| *count).map(|(store, _)| store)
}
