//! The segment log as a machine: where the next record goes, when a segment is sealed, which one makes room. Pure.
//!
//! One segment is open; records are appended to it. When the next one does not fit, the segment is sealed: wait for
//! its writes, make them durable, write the foot, make that durable. Meanwhile records go to the next segment, which
//! was made ahead: as soon as the open one took its first record where there is room, when it is half full where room
//! has to be made. Nobody waits for a seal or for a file, as long as [`SEALS_AT_ONCE`] segments take longer to fill
//! than one to be sealed: beside writes in flight a drive makes one wait for some tenths of a second.
//!
//! The driver asks [`Log::step`] what to do, does it, and reports with [`Log::stepped`]. Each segment that is being
//! sealed has one step at a time, because the order within a seal is what makes a foot trustworthy; and one file at
//! a time is being made or removed.
//!
//! Room is made of rows, not of segments: [`Step::Release`] asks for as many bytes of those worth least as are needed,
//! wherever they lie in sealed segments. They leave the index, and the parts of the files where they lay are given back.
//! No byte is moved for that. A segment of which no row is left is removed ([`Log::vacate`]).
//!
//! What is left of many segments is a few rows each, so their number needs a bound: beyond it, one is emptied
//! ([`Step::Choose`]): its rows are appended to the open segment, beside new rows, in room that is held free for them,
//! while the open one has most of its room left. So moving needs no room beyond the capacity, and what was moved is
//! durable before its old copy goes: should that seal never succeed, the segment that rows were moved out of stays
//! until the one that took them is gone. A drive that cannot give parts of a file back makes all of its room so.
//!
//! What is taken on the drive never exceeds the capacity: a segment is counted from before it is created until after
//! it is gone, files that are not ours are counted too, and a segment leaves only when no read needs it.
//!
//! After an error the log stops taking rows and tries again every [`RETRY`]. A retry first seals what was open, which
//! costs nothing but proves that the drive writes again, and only then takes a new segment: a drive that keeps
//! failing does not eat the rows that it still holds. That a segment could not be made ahead is no error yet: rows go
//! on into the open one, and it is tried again when that is full.

use std::collections::VecDeque;
use std::time::Duration;

use super::format::{Entry, Head, PAGE64, Sequence, StoreId, encode_foot, foot_bytes, record_bytes};
use super::ledger::{Ledger, Segment};
use crate::base::clock::Micros;

/// Pause between attempts to write again. Long enough that a full drive is not hammered, short enough that nobody
/// restarts a node by hand for it.
pub const RETRY: Duration = Duration::from_secs(30);

/// Segments that are being sealed at one time. At full speed one fills in less time than the two syncs of a seal take
/// beside writes.
pub const SEALS_AT_ONCE: usize = 2;

/// Attempts to seal a segment that fails to take its foot. Then it stays without one: its rows can be read, and a
/// start scans it.
const SEALS: u32 = 3;

/// Room for what the file system adds to a new file for itself.
const SLACK: u64 = 16 << 10;

/// What the driver does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Make everything written to the segment durable.
    Sync(Sequence),
    /// Write foot and trailer at this offset.
    Foot { sequence: Sequence, offset: u64, bytes: Vec<u8> },
    /// Take rows worth so many bytes on the drive out of the index, and give back what they took, and what else is
    /// given back: [`Log::set_taken`] for each segment, then [`Log::stepped`] with the bytes that were won.
    Release { bytes: u64 },
    /// Say with [`Log::chosen`] which of [`Log::eligible`] is emptied: its rows are appended to the open segment, `room`
    /// bytes of records at most. Without room all of its rows go, and it is given to [`Log::vacate`]. Nothing else to
    /// report.
    Choose { room: u64 },
    /// Remove the segment's file.
    Remove(Sequence),
    /// Make a file of the head's size that begins with it.
    Create(Head),
}

/// Where a record goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    At {
        sequence: Sequence,
        page: u32,
    },
    /// Not now; [`Log::step`] says what to do for it.
    Wait,
    /// Larger than a segment.
    Never,
    /// No rows are taken until further notice.
    Stopped,
}

/// How far a seal is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Waiting for the segment's writes.
    Draining,
    /// The first sync, the foot, the second sync.
    Syncing,
    Footing,
    Settling,
}

/// The segment that is being emptied.
#[derive(Clone, Copy, Debug)]
struct Victim {
    sequence: Sequence,
    /// Rows of it that are still to be moved, and the room that is held free for them.
    moves: u64,
    held_free: u64,
}

/// A segment that takes records, or did until it was full.
#[derive(Debug)]
struct Open {
    head: Head,
    tail: u64,
    /// Writes in flight.
    writes: u32,
    /// Records that are whole.
    entries: Vec<Entry>,
    /// Records that have a place: whole, in flight or failed.
    places: u64,
    failed_seals: u32,
    /// Somebody was to be chosen while this was open.
    asked: bool,
    /// The next segment could not be made while this was open.
    alone: bool,
    /// It has taken a record since the store began: until somebody writes, nothing has to go for the next one.
    grows: bool,
}

impl Open {
    fn new(head: Head, tail: u64, entries: Vec<Entry>) -> Self {
        let places = entries.len() as u64;
        Self {
            head,
            tail,
            writes: 0,
            entries,
            places,
            failed_seals: 0,
            asked: false,
            alone: false,
            grows: false,
        }
    }
}

/// The segment that is being sealed.
#[derive(Debug)]
struct Sealing {
    segment: Open,
    stage: Stage,
}

/// What one log is made of.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub store: StoreId,
    pub capacity: u64,
    /// Bytes of a new segment.
    pub segment: u64,
    /// Bytes of the folder that are no segments of ours.
    pub other: u64,
    /// Bytes that the folder's small files may grow by.
    pub reserve: u64,
}

#[derive(Debug)]
pub struct Log {
    limits: Limits,
    segments: Ledger,
    /// The oldest first, at most [`SEALS_AT_ONCE`].
    sealing: VecDeque<Sealing>,
    open: Option<Open>,
    /// The next one, made and empty.
    ahead: Option<Head>,
    /// Nothing is open and somebody has a record.
    wanted: bool,
    /// A file is being made or removed, or room given back: bytes that the drive is about to give.
    making: Option<u64>,
    /// After an error, until the next attempt.
    resting: Option<Micros>,
    /// Why no rows are taken.
    stopped: Option<String>,
    next: Sequence,
    reclaimed: u64,
    /// Bytes of the small files that grow.
    small: u64,
    victim: Option<Victim>,
    /// A victim is to be chosen.
    choosing: bool,
    /// The drive gives parts of a file back.
    punches: bool,
    /// Something is to be given back although no room is needed.
    giving: bool,
    /// The last release won nothing, and since then no segment was sealed or removed.
    dry: bool,
}

impl Log {
    /// A log without segments. `next` is higher than any sequence that was ever seen in the folder.
    pub fn new(limits: Limits, next: Sequence) -> Self {
        Self {
            limits,
            segments: Ledger::default(),
            sealing: VecDeque::new(),
            open: None,
            ahead: None,
            wanted: false,
            making: None,
            resting: None,
            stopped: None,
            next,
            reclaimed: 0,
            small: 0,
            victim: None,
            choosing: false,
            punches: true,
            giving: false,
            dry: false,
        }
    }

    /// A segment that was found at start and takes no more records.
    pub fn found(&mut self, sequence: Sequence, taken: u64, sealed: bool) {
        self.segments.add(sequence, taken, sealed);
    }

    /// A segment that was found without a foot: in ascending order, the last ones of a log. Records go on behind
    /// `tail` in the last that has any; one before it is sealed, an empty one behind it is the next.
    pub fn reopened(&mut self, head: Head, taken: u64, tail: u64, entries: Vec<Entry>) {
        self.found(head.sequence, taken, false);
        if self.open.is_some() && entries.is_empty() && self.ahead.is_none() {
            self.ahead = Some(head);
            return;
        }
        // With more before it, the older ones stay without a foot: each start scans them, until they go.
        if self.open.is_some() && self.sealing.len() == SEALS_AT_ONCE {
            self.sealing.pop_front();
        }
        self.begin_seal();
        self.open = Some(Open::new(head, tail, entries));
    }

    pub fn capacity(&self) -> u64 {
        self.limits.capacity
    }

    /// Bytes of a new segment.
    pub fn segment_bytes(&self) -> u64 {
        self.limits.segment
    }

    pub fn used(&self) -> u64 {
        self.limits.other + self.small + self.segments.taken() + self.making.unwrap_or(0)
    }

    /// The small files that grow take this much.
    pub fn set_small(&mut self, bytes: u64) {
        self.small = bytes;
    }

    /// Whether there is no room for the next segment.
    pub fn is_pressed(&self) -> bool {
        self.missing() > 0
    }

    /// Bytes that the next segment lacks.
    fn missing(&self) -> u64 {
        if self.ahead.is_some() {
            return 0;
        }
        let beside = self.limits.reserve.saturating_sub(self.small) + SLACK;
        (self.used() + beside + self.limits.segment).saturating_sub(self.limits.capacity)
    }

    /// Room comes back by segments only.
    pub fn cannot_punch(&mut self) {
        self.punches = false;
    }

    pub fn punches(&self) -> bool {
        self.punches
    }

    /// Something can be given back.
    pub fn give_back(&mut self) {
        self.giving = self.punches;
    }

    /// What the drive has given a segment.
    pub fn set_taken(&mut self, sequence: Sequence, taken: u64) {
        self.segments.set_taken(sequence, taken);
    }

    pub fn is_sealed(&self, sequence: Sequence) -> bool {
        self.segments.get(sequence).is_some_and(|segment| segment.sealed)
    }

    /// Whether rows of it may be released: their room comes back, sooner or later.
    pub fn may_release(&self, sequence: Sequence) -> bool {
        let may = |segment: &Segment| segment.sealed || !self.punches;
        self.victim() != Some(sequence)
            && self.segments.get(sequence).is_some_and(may)
            && !self.segments.is_dying(sequence)
            && !self.is_young(sequence)
    }

    /// No row of the segment is left: it goes as soon as nobody reads it, and `until` is durable.
    pub fn vacate(&mut self, sequence: Sequence, until: Option<Sequence>) {
        if self.is_young(sequence) {
            return;
        }
        self.segments.vacate(sequence);
        if let Some(until) = until {
            self.segments.bind(sequence, until);
        }
    }

    /// A segment that can go.
    fn removable(&self) -> Option<Sequence> {
        let may = |(sequence, segment): &(Sequence, &Segment)| {
            segment.reads == 0 && Some(*sequence) != self.victim() && !self.is_bound(segment)
        };
        self.segments.dying().find(may).map(|(sequence, _)| sequence)
    }

    /// Whether one segment is to be emptied into the open one: there are too many, or room comes back in no other way.
    fn is_crowded(&self) -> bool {
        let most = 2 * self.limits.capacity / self.limits.segment;
        if self.punches { self.segments.len() as u64 > most } else { self.is_pressed() }
    }

    /// Segments that may be emptied, in ascending order, with the bytes that each takes.
    pub fn eligible(&self) -> Vec<(Sequence, u64)> {
        let may = |(sequence, segment): &(Sequence, &Segment)| {
            !self.segments.is_dying(*sequence) && !self.is_young(*sequence) && !self.is_bound(segment)
        };
        self.segments.iter().filter(may).map(|(sequence, segment)| (sequence, segment.taken)).collect()
    }

    /// Whether it takes records, is being sealed, or is the next to take them.
    fn is_young(&self, sequence: Sequence) -> bool {
        self.unsealed().chain(self.ahead.map(|head| head.sequence)).any(|young| young == sequence)
    }

    /// Whether rows of it were moved to a segment that is not durable yet.
    fn is_bound(&self, segment: &Segment) -> bool {
        let target = segment.until.and_then(|until| self.segments.get(until));
        target.is_some_and(|target| !target.sealed)
    }

    pub fn segments(&self) -> usize {
        self.segments.len()
    }

    pub fn oldest(&self) -> Option<Sequence> {
        self.segments.iter().next().map(|(sequence, _)| sequence)
    }

    pub fn sealed(&self) -> usize {
        self.segments.sealed()
    }

    pub fn reclaimed(&self) -> u64 {
        self.reclaimed
    }

    pub fn stopped(&self) -> Option<&str> {
        self.stopped.as_deref()
    }

    /// The segments that are being sealed and the open one, if any.
    pub fn unsealed(&self) -> impl Iterator<Item = Sequence> {
        let sealing = self.sealing.iter().map(|sealing| &sealing.segment);
        sealing.chain(&self.open).map(|segment| segment.head.sequence)
    }

    /// Whether a payload of `length` fits into an empty segment.
    pub fn can_ever_take(&self, length: u32) -> bool {
        PAGE64 + record_bytes(length) + foot_bytes(1) <= self.limits.segment
    }

    /// A place for a record. It must be followed by [`Log::written`] or [`Log::failed`].
    pub fn place(&mut self, length: u32) -> Room {
        if self.stopped.is_some() {
            return Room::Stopped;
        }
        if !self.can_ever_take(length) {
            return Room::Never;
        }
        let record = record_bytes(length);
        let (moves, held_free) = self.victim.map_or((0, 0), |victim| (victim.moves, victim.held_free));
        let has_room = |open: &Open| {
            open.tail + record + held_free + foot_bytes(open.places + moves + 1) <= open.head.size
        };
        if self.open.as_ref().is_some_and(|open| !has_room(open)) {
            if moves > 0 || self.sealing.len() == SEALS_AT_ONCE {
                return Room::Wait;
            }
            self.begin_seal();
        }
        self.open =
            self.open.take().or_else(|| self.ahead.take().map(|head| Open::new(head, PAGE64, Vec::new())));
        let crowded = self.is_crowded();
        let Some(open) = &mut self.open else {
            self.wanted = true;
            return Room::Wait;
        };
        // With five eighths of the room left, what can be pinned at most of the best victim (half) fits, foot included.
        let chooses = crowded && self.victim.is_none() && !open.asked && open.places > 0;
        if chooses && open.tail + record > open.head.size / 8 * 3 {
            self.choosing = true;
            return Room::Wait;
        }
        let page = take(open, record);
        Room::At { sequence: open.head.sequence, page }
    }

    /// The open segment takes no more records.
    fn begin_seal(&mut self) {
        debug_assert!(self.sealing.len() < SEALS_AT_ONCE, "as many seals at a time as were measured");
        self.sealing.extend(self.open.take().map(|segment| Sealing { segment, stage: Stage::Draining }));
    }

    /// A place for a row of the victim. It must be followed by [`Log::written`], [`Log::unwritten`] or
    /// [`Log::failed`]. `None`: it cannot be moved.
    pub fn place_move(&mut self, length: u32) -> Option<(Sequence, u32)> {
        let record = record_bytes(length);
        let (Some(open), Some(victim)) = (&mut self.open, &mut self.victim) else { return None };
        if self.stopped.is_some()
            || open.tail + record + foot_bytes(open.places + victim.moves) > open.head.size
        {
            return None;
        }
        victim.held_free = victim.held_free.saturating_sub(record);
        let page = take(open, record);
        let sequence = open.head.sequence;
        self.segments.bind(victim.sequence, sequence);
        Some((sequence, page))
    }

    /// A row of the victim was moved, or will not be.
    pub fn move_ended(&mut self) {
        if let Some(victim) = &mut self.victim {
            victim.moves = victim.moves.saturating_sub(1);
            if victim.moves == 0 {
                self.victim = None;
            }
        }
    }

    /// The answer to [`Step::Choose`]: a segment, how many rows of it will be moved, and the bytes of their records.
    pub fn chosen(&mut self, choice: Option<(Sequence, u64, u64)>, now: Micros) {
        if let Some((sequence, moves, held_free)) = choice.filter(|(_, moves, _)| *moves > 0) {
            self.victim = Some(Victim { sequence, moves, held_free });
        }
        match &mut self.open {
            Some(open) => open.asked = true,
            None if choice.is_none() => {
                self.stop("pinned rows are in every segment: there is no room for others".into(), now);
            }
            None => {}
        }
    }

    /// The segment of which rows are being moved.
    pub fn victim(&self) -> Option<Sequence> {
        self.victim.map(|victim| victim.sequence)
    }

    /// A record is whole.
    pub fn written(&mut self, sequence: Sequence, entry: Entry) {
        if let Some(open) = self.unsealed_as(sequence) {
            open.writes -= 1;
            open.entries.push(entry);
        }
    }

    /// A record is whole, and not wanted any more.
    pub fn unwritten(&mut self, sequence: Sequence) {
        if let Some(open) = self.unsealed_as(sequence) {
            open.writes -= 1;
        }
    }

    /// A record could not be written.
    pub fn failed(&mut self, sequence: Sequence, reason: String, now: Micros) {
        if let Some(open) = self.unsealed_as(sequence) {
            open.writes -= 1;
        }
        self.stop(reason, now);
    }

    /// A read of the segment begins.
    pub fn reading(&mut self, sequence: Sequence) {
        self.segments.reading(sequence);
    }

    /// A read of the segment has ended.
    pub fn read(&mut self, sequence: Sequence) {
        self.segments.read(sequence);
    }

    /// When [`Log::step`] has to be asked although nothing happened.
    pub fn retry_at(&self) -> Option<Micros> {
        self.resting
    }

    /// What to do now. Each step but [`Step::Choose`] is followed by [`Log::stepped`].
    pub fn step(&mut self, now: Micros) -> Option<Step> {
        if self.resting.is_some_and(|at| now < at) {
            return None;
        }
        self.resting = None;
        let moves = self.victim.is_some();
        if self.stopped.is_some() && self.sealing.is_empty() && !moves {
            self.begin_seal();
            self.go_on();
        }
        if std::mem::take(&mut self.choosing)
            && let Some(open) = self.open.as_ref().filter(|_| self.stopped.is_none())
        {
            let room = open.head.size.saturating_sub(open.tail + foot_bytes(open.places) + PAGE64);
            return Some(Step::Choose { room });
        }
        let drained = |seal: &&mut Sealing| seal.stage == Stage::Draining && seal.segment.writes == 0;
        if let Some(seal) = self.sealing.iter_mut().find(drained) {
            seal.stage = Stage::Syncing;
            return Some(Step::Sync(seal.segment.head.sequence));
        }
        if self.making.is_some() {
            return None;
        }
        let step = self.file_step(moves, now);
        self.making = step.as_ref().and_then(|step| match step {
            Step::Create(head) => Some(head.size),
            Step::Remove(_) | Step::Release { .. } => Some(0),
            _ => None,
        });
        step
    }

    /// What the lane of files does next.
    fn file_step(&mut self, moves: bool, now: Micros) -> Option<Step> {
        if self.stopped.is_none() || self.wants_next() {
            if let Some(sequence) = self.removable() {
                return Some(Step::Remove(sequence));
            }
            if std::mem::take(&mut self.giving) {
                return Some(Step::Release { bytes: 0 });
            }
        }
        if moves || !self.wants_next() {
            return None;
        }
        self.make_room(now)
    }

    /// Whether it is time for the next segment.
    fn wants_next(&self) -> bool {
        if self.ahead.is_some() {
            return false;
        }
        match &self.open {
            Some(open) => {
                // Where rows would have to go for it they stay until the open one is half full.
                let is_due = !self.is_pressed() || open.tail >= open.head.size / 2;
                self.stopped.is_none() && open.grows && !open.alone && is_due
            }
            // A drive that failed has to prove that it writes again before it is given more.
            None => self.wanted && (self.stopped.is_none() || self.sealing.is_empty()),
        }
    }

    /// A step has ended. After success there may be a next one at once.
    pub fn stepped(&mut self, step: &Step, result: Result<u64, String>, now: Micros) -> Option<Step> {
        match step {
            Step::Remove(_) | Step::Create(_) | Step::Release { .. } => {
                self.making = None;
                match result {
                    Ok(taken) => self.made(step, taken),
                    Err(reason) => self.not_made(reason, now),
                }
                None
            }
            Step::Sync(sequence) | Step::Foot { sequence, .. } => match result {
                Ok(_) => self.seal_goes_on(*sequence),
                Err(reason) => {
                    self.seal_failed(*sequence);
                    self.stop(reason, now);
                    None
                }
            },
            Step::Choose { .. } => None,
        }
    }

    fn seal_goes_on(&mut self, sequence: Sequence) -> Option<Step> {
        let nth = self.seal_of(sequence)?;
        let Sealing { segment, stage } = &mut self.sealing[nth];
        match stage {
            Stage::Draining => None,
            Stage::Syncing => {
                *stage = Stage::Footing;
                let bytes = encode_foot(&segment.head, &segment.entries);
                let offset = segment.head.size - bytes.len() as u64;
                Some(Step::Foot { sequence, offset, bytes })
            }
            Stage::Footing => {
                *stage = Stage::Settling;
                Some(Step::Sync(sequence))
            }
            Stage::Settling => {
                self.segments.seal(sequence);
                self.sealing.remove(nth);
                self.dry = false;
                self.go_on();
                None
            }
        }
    }

    fn seal_failed(&mut self, sequence: Sequence) {
        let Some(nth) = self.seal_of(sequence) else { return };
        let Sealing { segment, stage } = &mut self.sealing[nth];
        *stage = Stage::Draining;
        segment.failed_seals += 1;
        if segment.failed_seals >= SEALS {
            self.sealing.remove(nth);
        }
    }

    fn seal_of(&self, sequence: Sequence) -> Option<usize> {
        self.sealing.iter().position(|seal| seal.segment.head.sequence == sequence)
    }

    fn made(&mut self, step: &Step, taken: u64) {
        match step {
            Step::Remove(sequence) => {
                self.segments.remove(*sequence);
                self.reclaimed += 1;
                self.dry = false;
            }
            Step::Release { bytes } => self.dry = *bytes > 0 && taken == 0,
            Step::Create(head) => {
                self.found(head.sequence, taken.max(head.size), false);
                self.ahead = Some(*head);
                self.wanted = false;
                self.go_on();
            }
            _ => {}
        }
    }

    /// There is no next segment. While one is open, rows still have a place.
    fn not_made(&mut self, reason: String, now: Micros) {
        match &mut self.open {
            Some(open) if self.stopped.is_none() => open.alone = true,
            _ => self.stop(reason, now),
        }
    }

    /// After an error: rows are taken again once what was open is sealed and the next segment is there.
    fn go_on(&mut self) {
        if self.resting.is_none() && self.sealing.is_empty() && self.open.is_none() && self.ahead.is_some() {
            self.stopped = None;
        }
    }

    fn make_room(&mut self, now: Micros) -> Option<Step> {
        if !self.is_pressed() {
            let head = Head { store: self.limits.store, sequence: self.next, size: self.limits.segment };
            self.next = Sequence(self.next.0 + 1);
            return Some(Step::Create(head));
        }
        let other = self.limits.other;
        if other + self.limits.segment + SLACK > self.limits.capacity {
            // No segment of ours that goes would make room for another one.
            let why = format!("other files in its folder take {other} bytes, there is no room for a segment");
            self.not_made(why, now);
            return None;
        }
        if self.punches && !self.dry {
            return Some(Step::Release { bytes: self.missing() });
        }
        // What is going makes room when its reads have ended; and while there is an open one it says itself when it is
        // time to choose.
        let going = self.segments.dying().any(|(_, segment)| !self.is_bound(segment));
        let waits = going || self.open.is_some() || !self.sealing.is_empty() || self.eligible().is_empty();
        (!waits).then_some(Step::Choose { room: 0 })
    }

    /// Stops taking rows until the next attempt has worked. What is under way goes on.
    fn stop(&mut self, reason: String, now: Micros) {
        self.stopped = Some(reason);
        self.wanted = true;
        self.resting = Some(now.plus(RETRY));
    }

    fn unsealed_as(&mut self, sequence: Sequence) -> Option<&mut Open> {
        let sealing = self.sealing.iter_mut().map(|sealing| &mut sealing.segment);
        sealing.chain(&mut self.open).find(|segment| segment.head.sequence == sequence)
    }
}

/// The next `record` bytes of the open segment, as a page.
fn take(open: &mut Open, record: u64) -> u32 {
    let page = u32::try_from(open.tail / PAGE64).expect("Head::decode bounds a segment's pages");
    open.tail += record;
    open.places += 1;
    open.writes += 1;
    open.grows = true;
    page
}

#[cfg(test)]
mod tests {
    use super::super::format::{PAGE, Trailer};
    use super::*;
    use crate::base::block::{BlockHash, GroupId, Namespace, Rank, RowKey, Space};
    use proptest::prelude::*;
    use std::collections::{BTreeMap, HashMap};

    const LIMITS: Limits = Limits {
        store: StoreId([1; 16]),
        capacity: 5 * (64 << 10) + 8192,
        segment: 64 << 10,
        other: 4096,
        reserve: 8192,
    };
    const ROW: u32 = 8192;

    fn entry(page: u32) -> Entry {
        let space = Space { namespace: Namespace([0; 32]), rank: Rank::ONLY };
        let key = RowKey { hash: BlockHash([0; 32]), group: GroupId(page) };
        Entry { space, key, position: 0, page, length: ROW, checksum: 0, seal: 0 }
    }

    /// The segment whose seal a step belongs to.
    fn seal_of(step: &Step) -> Option<Sequence> {
        match step {
            Step::Sync(sequence) | Step::Foot { sequence, .. } => Some(*sequence),
            _ => None,
        }
    }

    #[derive(Clone, Copy, Debug)]
    enum Act {
        Place,
        WriteEnds {
            well: bool,
        },
        ReadBegins(usize),
        ReadEnds,
        StepEnds {
            nth: usize,
            well: bool,
        },
        /// Who is emptied, of those that may, and how many of its rows are moved; who gives how much room back.
        Choose {
            nth: usize,
            moves: usize,
        },
        /// A row that was to be moved is read, and appended or given up; one that was appended is whole.
        MoveBegins {
            well: bool,
        },
        MoveEnds,
        Wait,
    }

    fn acts() -> impl Strategy<Value = Vec<Act>> {
        let one = prop_oneof![
            4 => Just(Act::Place),
            4 => Just(Act::WriteEnds { well: true }),
            1 => Just(Act::WriteEnds { well: false }),
            2 => (0..6_usize).prop_map(Act::ReadBegins),
            2 => Just(Act::ReadEnds),
            6 => (0..3_usize).prop_map(|nth| Act::StepEnds { nth, well: true }),
            1 => (0..3_usize).prop_map(|nth| Act::StepEnds { nth, well: false }),
            2 => (0..4_usize, 0..4_usize).prop_map(|(nth, moves)| Act::Choose { nth, moves }),
            3 => any::<bool>().prop_map(|well| Act::MoveBegins { well }),
            3 => Just(Act::MoveEnds),
            2 => Just(Act::Wait),
        ];
        proptest::collection::vec(one, 0..600)
    }

    /// A drive that does what the log asks for, and everything that must hold about it.
    #[derive(Default)]
    struct World {
        now: Micros,
        files: BTreeMap<Sequence, u64>,
        writing: Vec<(Sequence, u32)>,
        whole: HashMap<Sequence, Vec<Entry>>,
        reading: Vec<Sequence>,
        forgotten: Vec<Sequence>,
        /// One for each seal, one for a file.
        steps: Vec<Step>,
        /// What the next choices are.
        choice: (usize, usize),
        /// Rows to be moved, and rows that were: from where to where.
        to_move: usize,
        moving: Vec<(Sequence, u32)>,
        moved: Vec<(Sequence, Sequence)>,
        /// Segments that a sync after their foot has made durable.
        durable: Vec<Sequence>,
        footed: Vec<Sequence>,
        victim: Option<Sequence>,
    }

    impl World {
        /// The one chosen is one that may go now.
        fn choose(&mut self, log: &mut Log, room: u64) {
            let may = log.eligible();
            assert!(
                may.iter()
                    .all(|(s, _)| self.files.contains_key(s) && log.unsealed().all(|young| young != *s))
            );
            assert_eq!(self.to_move + self.moving.len(), 0, "one victim at a time");
            let most = room / (record_bytes(ROW) + super::super::format::ENTRY as u64);
            let moves = (self.choice.1 as u64).min(most);
            let victim = may.get(self.choice.0 % may.len().max(1)).map(|(sequence, _)| *sequence);
            if let Some(sequence) = victim.filter(|_| moves == 0) {
                self.forgotten.push(sequence);
                log.vacate(sequence, None);
            }
            self.victim = victim.filter(|_| moves > 0);
            self.to_move = if self.victim.is_some() { usize::try_from(moves).unwrap() } else { 0 };
            log.chosen(victim.map(|v| (v, moves, moves * record_bytes(ROW))), self.now);
        }

        /// All of its rows are moved, or were not to be had.
        fn emptied(&mut self, log: &mut Log) {
            if log.victim().is_none()
                && let Some(sequence) = self.victim.take()
            {
                self.forgotten.push(sequence);
                log.vacate(sequence, None);
            }
        }

        /// Sealed segments give room back until there is enough, or none of them can.
        fn release(&mut self, log: &mut Log, bytes: u64) -> u64 {
            let mut won = 0;
            let may: Vec<_> = self.files.keys().copied().filter(|s| log.may_release(*s)).collect();
            assert!(may.iter().all(|s| self.durable.contains(s) && log.unsealed().all(|young| young != *s)));
            for sequence in may.into_iter().skip(self.choice.0) {
                let taken = self.files.get_mut(&sequence).unwrap();
                let most = taken.saturating_sub(3 * PAGE64);
                let gives = bytes.saturating_sub(won).next_multiple_of(PAGE64).min(most);
                *taken -= gives;
                log.set_taken(sequence, *taken);
                won += gives;
            }
            won
        }

        fn begin(&mut self, log: &mut Log, step: Step) {
            match &step {
                Step::Choose { room } => return self.choose(log, *room),
                Step::Release { .. } => assert!(log.punches()),
                Step::Sync(sequence) | Step::Foot { sequence, .. } => {
                    assert!(self.writing.iter().all(|(s, _)| s != sequence), "sealed under its writes");
                }
                Step::Remove(sequence) => {
                    assert!(!self.reading.contains(sequence), "removed under its reads");
                    assert!(self.forgotten.contains(sequence), "removed while it can be found");
                    let targets = self.moved.iter().filter(|(from, _)| from == sequence).map(|(_, to)| to);
                    let is_safe = |to: &Sequence| self.durable.contains(to) || !self.files.contains_key(to);
                    assert!(targets.clone().all(is_safe), "what was moved out of it is not durable");
                }
                Step::Create(head) => {
                    let used = LIMITS.other + self.files.values().sum::<u64>();
                    assert!(used + head.size <= LIMITS.capacity, "over the capacity");
                }
            }
            self.steps.push(step);
            let mut sealed: Vec<_> = self.steps.iter().filter_map(seal_of).collect();
            let seals = sealed.len();
            assert!(seals <= SEALS_AT_ONCE && self.steps.len() <= seals + 1, "one file at a time");
            sealed.dedup();
            assert_eq!(sealed.len(), seals, "one step of a seal at a time");
        }

        /// The foot lists exactly the rows that are whole.
        fn ends_well(&mut self, step: &Step) {
            match step {
                Step::Foot { sequence, offset, bytes } => {
                    let head = Head { store: LIMITS.store, sequence: *sequence, size: LIMITS.segment };
                    let (list, last) = bytes.split_at(bytes.len() - PAGE);
                    let trailer = Trailer::decode(last, &head).unwrap();
                    assert_eq!(trailer.start, *offset);
                    let whole = self.whole.get(sequence).cloned().unwrap_or_default();
                    assert!(whole.iter().all(|e| u64::from(e.page) * PAGE64 + record_bytes(ROW) <= *offset));
                    assert_eq!(trailer.entries(list).unwrap(), whole);
                    self.footed.push(*sequence);
                }
                Step::Remove(sequence) => {
                    self.files.remove(sequence);
                }
                Step::Create(head) => {
                    self.files.insert(head.sequence, head.size);
                }
                Step::Sync(sequence) if self.footed.contains(sequence) => self.durable.push(*sequence),
                _ => {}
            }
        }

        fn begin_move(&mut self, log: &mut Log, well: bool) {
            if self.to_move == 0 {
                return;
            }
            self.to_move -= 1;
            match log.place_move(ROW).filter(|_| well || log.stopped().is_none()) {
                Some((sequence, page)) => {
                    assert!(!self.writing.contains(&(sequence, page)), "two rows in one place");
                    self.writing.push((sequence, page));
                    self.moving.push((sequence, page));
                    self.moved.push((self.victim.unwrap(), sequence));
                }
                None => log.move_ended(),
            }
        }

        fn end_move(&mut self, log: &mut Log) {
            let Some((sequence, page)) = self.moving.pop() else { return };
            self.writing.retain(|at| *at != (sequence, page));
            log.written(sequence, entry(page));
            self.whole.entry(sequence).or_default().push(entry(page));
            log.move_ended();
        }

        fn act(&mut self, log: &mut Log, act: Act) {
            match act {
                Act::Place => {
                    if let Room::At { sequence, page } = log.place(ROW) {
                        assert!(!self.writing.contains(&(sequence, page)), "two rows in one place");
                        self.writing.push((sequence, page));
                    }
                }
                Act::WriteEnds { well } => {
                    let Some(at) = self.writing.iter().rposition(|at| !self.moving.contains(at)) else {
                        return;
                    };
                    let (sequence, page) = self.writing.remove(at);
                    if well {
                        log.written(sequence, entry(page));
                        self.whole.entry(sequence).or_default().push(entry(page));
                    } else {
                        log.failed(sequence, "broken".into(), self.now);
                        assert_eq!(log.place(ROW), Room::Stopped);
                    }
                }
                Act::ReadBegins(nth) => {
                    let readable = self.files.keys().filter(|s| !self.forgotten.contains(s)).nth(nth);
                    if let Some(&sequence) = readable {
                        log.reading(sequence);
                        self.reading.push(sequence);
                    }
                }
                Act::ReadEnds => {
                    if let Some(sequence) = self.reading.pop() {
                        log.read(sequence);
                    }
                }
                Act::StepEnds { nth, well } => {
                    if nth >= self.steps.len() {
                        return;
                    }
                    let step = self.steps.remove(nth);
                    if well {
                        self.ends_well(&step);
                    }
                    let won = match &step {
                        Step::Release { bytes } if well => self.release(log, *bytes),
                        _ => LIMITS.segment,
                    };
                    let result = if well { Ok(won) } else { Err("broken".into()) };
                    if let Some(next) = log.stepped(&step, result, self.now) {
                        self.begin(log, next);
                    }
                }
                Act::Choose { nth, moves } => self.choice = (nth, moves),
                Act::MoveBegins { well } => self.begin_move(log, well),
                Act::MoveEnds => self.end_move(log),
                Act::Wait => self.now = self.now.plus(RETRY / 2),
            }
            // Nobody moves while the drive does not write.
            while log.stopped().is_some() && self.to_move > 0 {
                self.to_move -= 1;
                log.move_ended();
            }
            self.emptied(log);
            while let Some(step) = log.step(self.now) {
                self.begin(log, step);
            }
        }
    }

    proptest! {
        #[test]
        fn whatever_happens_the_log_keeps_its_order_and_its_capacity(acts in acts(), punches: bool) {
            let mut log = Log::new(LIMITS, Sequence(1));
            if !punches {
                log.cannot_punch();
            }
            let mut world = World::default();
            for act in acts {
                world.act(&mut log, act);
                prop_assert!(log.used() <= LIMITS.capacity);
                prop_assert_eq!(log.segments(), world.files.len());
            }
            // When everything works again, rows are taken again.
            for _ in 0..200 {
                for act in [
                    Act::WriteEnds { well: true },
                    Act::ReadEnds,
                    Act::MoveBegins { well: true },
                    Act::MoveEnds,
                    Act::StepEnds { nth: 0, well: true },
                    Act::StepEnds { nth: 0, well: true },
                    Act::Wait,
                ] {
                    world.act(&mut log, act);
                }
                if log.stopped().is_none() && matches!(log.place(ROW), Room::At { .. }) {
                    return Ok(());
                }
            }
            prop_assert!(false, "it never takes rows again: {:?}", log);
        }
    }

    #[test]
    fn a_row_larger_than_a_segment_is_refused_at_once() {
        let mut log = Log::new(LIMITS, Sequence(1));
        assert_eq!(log.place(64 << 10), Room::Never);
        assert_eq!(log.step(Micros(0)), None, "no segment is made for it");
        assert!(log.can_ever_take((64 << 10) - 4 * 4096) && !log.can_ever_take((64 << 10) - 3 * 4096));
    }
}
