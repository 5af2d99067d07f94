//! The segment log as a machine: where the next record goes, when a segment is sealed, which one makes room. Pure.
//!
//! One segment is open; records are appended to it. When the next one does not fit, the segment is sealed: wait for
//! its writes, make them durable, write the foot, make that durable. Then room is made, and the next segment is
//! created. The driver asks [`Log::step`] what to do, does it, and reports with [`Log::stepped`]; there is one step at
//! a time, because the order is what makes a foot trustworthy.
//!
//! Which segment makes room is the driver's choice ([`Step::Choose`]), asked for while the open segment has most of
//! its room left: rows of the chosen one that are worth keeping are appended to the open one, beside new rows, in
//! room that is held free for them. So moving needs no room beyond the capacity, and what was moved is durable before
//! its old copy goes, because the open segment is sealed in between. Should that seal never succeed, the segment that
//! rows were moved out of stays until the one that took them is gone or durable.
//!
//! What is taken on the drive never exceeds the capacity: a segment is counted from before it is created until after
//! it is gone, files that are not ours are counted too, and a segment leaves only when no read needs it.
//!
//! After an error the log stops taking rows and tries again every [`RETRY`]. A retry first seals what was open, which
//! costs nothing but proves that the drive writes again, and only then takes a new segment: a drive that keeps
//! failing does not eat the rows that it still holds.

use std::collections::BTreeMap;
use std::time::Duration;

use super::format::{Entry, Head, PAGE64, Sequence, StoreId, encode_foot, foot_bytes, record_bytes};
use crate::base::clock::Micros;

/// Pause between attempts to write again. Long enough that a full drive is not hammered, short enough that nobody
/// restarts a node by hand for it.
pub const RETRY: Duration = Duration::from_secs(30);

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
    /// Say with [`Log::chosen`] which of [`Log::eligible`] makes room, and which of its rows are appended to the open
    /// segment before: `room` bytes of records at most. Nothing else to report.
    Choose { room: u64 },
    /// Take the segment's rows out of the index, or [`Log::spare`] it. Nothing to report: the next step follows at
    /// once.
    Forget(Sequence),
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Records are appended, or nothing is open and nobody asked for room yet.
    Writing,
    /// Waiting for the writes of the open segment.
    Draining,
    /// The first sync of a seal, its foot, the second sync.
    Syncing,
    Footing,
    Settling,
    /// Making room and the next segment.
    Making,
    /// After an error, until the next attempt.
    Resting(Micros),
}

/// One segment on the drive.
#[derive(Clone, Copy, Debug)]
struct Segment {
    /// Bytes taken on the drive.
    taken: u64,
    /// Reads in flight.
    reads: u32,
    /// Its foot is durable.
    sealed: bool,
    /// Its rows are gone from the index; it goes when its reads have ended.
    dying: bool,
    /// Rows of it were moved to this segment: it stays until that is durable.
    until: Option<Sequence>,
}

/// The segment that makes room next.
#[derive(Clone, Copy, Debug)]
struct Victim {
    sequence: Sequence,
    /// Rows of it that are still to be moved, and the room that is held free for them.
    moves: u64,
    held_free: u64,
}

/// The segment that takes records.
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
    /// Nobody could be chosen while this was open.
    asked: bool,
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
    segments: BTreeMap<Sequence, Segment>,
    open: Option<Open>,
    phase: Phase,
    /// A step was handed out and not reported yet.
    busy: bool,
    /// Why no rows are taken.
    stopped: Option<String>,
    next: Sequence,
    reclaimed: u64,
    /// Bytes of the small files that grow.
    small: u64,
    victim: Option<Victim>,
    /// A victim is to be chosen.
    choosing: bool,
}

impl Log {
    /// A log without segments. `next` is higher than any sequence that was ever seen in the folder.
    pub fn new(limits: Limits, next: Sequence) -> Self {
        Self {
            limits,
            segments: BTreeMap::new(),
            open: None,
            phase: Phase::Writing,
            busy: false,
            stopped: None,
            next,
            reclaimed: 0,
            small: 0,
            victim: None,
            choosing: false,
        }
    }

    /// A segment that was found at start and takes no more records.
    pub fn found(&mut self, sequence: Sequence, taken: u64, sealed: bool) {
        self.segments.insert(sequence, Segment { taken, reads: 0, sealed, dying: false, until: None });
    }

    /// The segment that was open when the store ended; records go on behind `tail`.
    pub fn reopened(&mut self, head: Head, taken: u64, tail: u64, entries: Vec<Entry>) {
        self.found(head.sequence, taken, false);
        let places = entries.len() as u64;
        self.open = Some(Open { head, tail, writes: 0, entries, places, failed_seals: 0, asked: false });
    }

    pub fn capacity(&self) -> u64 {
        self.limits.capacity
    }

    /// Bytes of a new segment.
    pub fn segment_bytes(&self) -> u64 {
        self.limits.segment
    }

    pub fn used(&self) -> u64 {
        self.limits.other + self.small + self.segments.values().map(|s| s.taken).sum::<u64>()
    }

    /// The small files that grow take this much.
    pub fn set_small(&mut self, bytes: u64) {
        self.small = bytes;
    }

    /// Whether the next segment needs another one's room.
    pub fn is_pressed(&self) -> bool {
        let beside = self.limits.reserve.saturating_sub(self.small) + SLACK;
        self.used() + beside + self.limits.segment > self.limits.capacity
    }

    /// Segments that may make room, in ascending order, with the bytes that each takes.
    pub fn eligible(&self) -> Vec<(Sequence, u64)> {
        let open = self.open();
        let may = |(sequence, segment): &(&Sequence, &Segment)| {
            !segment.dying && Some(**sequence) != open && !self.is_bound(segment)
        };
        self.segments.iter().filter(may).map(|(sequence, segment)| (*sequence, segment.taken)).collect()
    }

    /// Whether rows of it were moved to a segment that is not durable yet.
    fn is_bound(&self, segment: &Segment) -> bool {
        let target = segment.until.and_then(|until| self.segments.get(&until));
        target.is_some_and(|target| !target.sealed)
    }

    pub fn segments(&self) -> usize {
        self.segments.len()
    }

    pub fn oldest(&self) -> Option<Sequence> {
        self.segments.keys().next().copied()
    }

    pub fn sealed(&self) -> usize {
        self.segments.values().filter(|s| s.sealed).count()
    }

    pub fn reclaimed(&self) -> u64 {
        self.reclaimed
    }

    pub fn stopped(&self) -> Option<&str> {
        self.stopped.as_deref()
    }

    /// The open segment, if any.
    pub fn open(&self) -> Option<Sequence> {
        self.open.as_ref().map(|o| o.head.sequence)
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
        if self.phase != Phase::Writing {
            return Room::Wait;
        }
        let pressed = self.is_pressed();
        let Some(open) = &mut self.open else {
            self.phase = Phase::Making;
            return Room::Wait;
        };
        let record = record_bytes(length);
        // With five eighths of the room left, what can be pinned at most of the best victim (half) fits, foot included.
        let chooses = pressed && self.victim.is_none() && !open.asked && open.places > 0;
        if chooses && open.tail + record > open.head.size / 8 * 3 {
            self.choosing = true;
            return Room::Wait;
        }
        let (moves, held_free) = self.victim.map_or((0, 0), |victim| (victim.moves, victim.held_free));
        if open.tail + record + held_free + foot_bytes(open.places + moves + 1) > open.head.size {
            if moves == 0 {
                self.phase = Phase::Draining;
            }
            return Room::Wait;
        }
        let page = take(open, record);
        Room::At { sequence: open.head.sequence, page }
    }

    /// A place for a row of the victim. It must be followed by [`Log::written`], [`Log::unwritten`] or
    /// [`Log::failed`]. `None`: it cannot be moved.
    pub fn place_move(&mut self, length: u32) -> Option<(Sequence, u32)> {
        let record = record_bytes(length);
        let (Phase::Writing, Some(open), Some(victim)) = (self.phase, &mut self.open, &mut self.victim)
        else {
            return None;
        };
        if self.stopped.is_some()
            || open.tail + record + foot_bytes(open.places + victim.moves) > open.head.size
        {
            return None;
        }
        victim.held_free = victim.held_free.saturating_sub(record);
        let page = take(open, record);
        let sequence = open.head.sequence;
        self.segments.get_mut(&victim.sequence).expect("a victim stays until it goes").until = Some(sequence);
        Some((sequence, page))
    }

    /// A row of the victim was moved, or will not be.
    pub fn move_ended(&mut self) {
        if let Some(victim) = &mut self.victim {
            victim.moves = victim.moves.saturating_sub(1);
            if victim.moves == 0 {
                victim.held_free = 0;
            }
        }
    }

    /// The answer to [`Step::Choose`]: a segment, how many rows of it will be moved, and the bytes of their records.
    pub fn chosen(&mut self, choice: Option<(Sequence, u64, u64)>, now: Micros) {
        if let Some((sequence, moves, held_free)) = choice {
            self.victim = Some(Victim { sequence, moves, held_free });
        } else if self.phase == Phase::Making {
            self.stop("pinned rows are in every segment: there is no room for others".into(), now);
        } else if let Some(open) = &mut self.open {
            open.asked = true;
        }
    }

    /// The victim stays after all: it holds what must not go. Another one is chosen.
    pub fn spare(&mut self) {
        if let Some(victim) = self.victim.take()
            && let Some(segment) = self.segments.get_mut(&victim.sequence)
        {
            segment.dying = false;
        }
    }

    /// A record is whole.
    pub fn written(&mut self, sequence: Sequence, entry: Entry) {
        if let Some(open) = self.open_as(sequence) {
            open.writes -= 1;
            open.entries.push(entry);
        }
    }

    /// A record is whole, and not wanted any more.
    pub fn unwritten(&mut self, sequence: Sequence) {
        if let Some(open) = self.open_as(sequence) {
            open.writes -= 1;
        }
    }

    /// A record could not be written.
    pub fn failed(&mut self, sequence: Sequence, reason: String, now: Micros) {
        if let Some(open) = self.open_as(sequence) {
            open.writes -= 1;
        }
        self.stop(reason, now);
    }

    /// A read of the segment begins.
    pub fn reading(&mut self, sequence: Sequence) {
        self.segments.get_mut(&sequence).expect("the index names segments that exist").reads += 1;
    }

    /// A read of the segment has ended.
    pub fn read(&mut self, sequence: Sequence) {
        self.segments.get_mut(&sequence).expect("a segment stays until its reads have ended").reads -= 1;
    }

    /// When [`Log::step`] has to be asked although nothing happened.
    pub fn retry_at(&self) -> Option<Micros> {
        match self.phase {
            Phase::Resting(at) => Some(at),
            _ => None,
        }
    }

    /// What to do now. Each step but [`Step::Choose`] and [`Step::Forget`] is followed by [`Log::stepped`].
    pub fn step(&mut self, now: Micros) -> Option<Step> {
        if self.busy {
            return None;
        }
        if let Phase::Resting(at) = self.phase {
            if now < at {
                return None;
            }
            self.phase = if self.open.is_some() { Phase::Draining } else { Phase::Making };
        }
        let moves = self.victim.is_some_and(|victim| victim.moves > 0);
        let step = match (self.phase, &self.open) {
            (Phase::Writing, Some(open)) if std::mem::take(&mut self.choosing) => {
                let room = open.head.size.saturating_sub(open.tail + foot_bytes(open.places) + PAGE64);
                Some(Step::Choose { room })
            }
            (Phase::Draining, Some(open)) if open.writes > 0 || moves => None,
            (Phase::Draining, Some(open)) => {
                self.phase = Phase::Syncing;
                Some(Step::Sync(open.head.sequence))
            }
            (Phase::Making, _) => self.make_room(now),
            _ => None,
        };
        self.busy = step.as_ref().is_some_and(|s| !matches!(s, Step::Forget(_) | Step::Choose { .. }));
        step
    }

    /// A step has ended. After success there may be a next one at once.
    pub fn stepped(&mut self, step: &Step, result: Result<u64, String>, now: Micros) -> Option<Step> {
        self.busy = false;
        let taken = match result {
            Ok(taken) => taken,
            Err(reason) => {
                self.step_failed(step, reason, now);
                return None;
            }
        };
        let next = match (self.phase, &mut self.open) {
            (Phase::Syncing, Some(open)) => {
                self.phase = Phase::Footing;
                let bytes = encode_foot(&open.head, &open.entries);
                let offset = open.head.size - bytes.len() as u64;
                Some(Step::Foot { sequence: open.head.sequence, offset, bytes })
            }
            (Phase::Footing, Some(open)) => {
                self.phase = Phase::Settling;
                Some(Step::Sync(open.head.sequence))
            }
            (Phase::Settling, Some(open)) => {
                self.segments.get_mut(&open.head.sequence).expect("the open segment exists").sealed = true;
                self.open = None;
                self.phase = Phase::Making;
                None
            }
            (Phase::Making, _) => {
                self.made(step, taken);
                None
            }
            _ => None,
        };
        self.busy = next.is_some();
        next
    }

    fn made(&mut self, step: &Step, taken: u64) {
        match step {
            Step::Remove(sequence) => {
                self.segments.remove(sequence);
                self.victim = None;
                self.reclaimed += 1;
            }
            Step::Create(head) => {
                self.reopened(*head, taken.max(head.size), PAGE64, Vec::new());
                self.phase = Phase::Writing;
                self.stopped = None;
            }
            _ => {}
        }
    }

    fn make_room(&mut self, now: Micros) -> Option<Step> {
        let victim =
            self.victim.and_then(|victim| Some((victim.sequence, *self.segments.get(&victim.sequence)?)));
        let going = victim.is_some_and(|(_, segment)| segment.dying);
        if !going && !self.is_pressed() {
            self.victim = None;
            let head = Head { store: self.limits.store, sequence: self.next, size: self.limits.segment };
            self.next = Sequence(self.next.0 + 1);
            return Some(Step::Create(head));
        }
        let other = self.limits.other;
        if other + self.limits.segment + SLACK > self.limits.capacity {
            // No segment of ours that goes would make room for another one.
            let why = format!("other files in its folder take {other} bytes, there is no room for a segment");
            self.stop(why, now);
            return None;
        }
        let Some((sequence, segment)) = victim.filter(|(_, segment)| going || !self.is_bound(segment)) else {
            self.victim = None;
            if self.eligible().is_empty() {
                return None;
            }
            return Some(Step::Choose { room: 0 });
        };
        if !segment.dying {
            self.segments.get_mut(&sequence).expect("looked at just now").dying = true;
            return Some(Step::Forget(sequence));
        }
        (segment.reads == 0).then_some(Step::Remove(sequence))
    }

    fn step_failed(&mut self, step: &Step, reason: String, now: Micros) {
        if let (Step::Sync(_) | Step::Foot { .. }, Some(open)) = (step, &mut self.open) {
            open.failed_seals += 1;
            if open.failed_seals >= SEALS {
                self.open = None;
            }
        }
        self.stop(reason, now);
    }

    /// Stops taking rows until the next attempt has worked. Whatever a running step says meanwhile changes nothing.
    fn stop(&mut self, reason: String, now: Micros) {
        self.stopped = Some(reason);
        self.phase = Phase::Resting(now.plus(RETRY));
    }

    fn open_as(&mut self, sequence: Sequence) -> Option<&mut Open> {
        self.open.as_mut().filter(|o| o.head.sequence == sequence)
    }
}

/// The next `record` bytes of the open segment, as a page.
fn take(open: &mut Open, record: u64) -> u32 {
    let page = u32::try_from(open.tail / PAGE64).expect("Head::decode bounds a segment's pages");
    open.tail += record;
    open.places += 1;
    open.writes += 1;
    page
}

#[cfg(test)]
mod tests {
    use super::super::format::{PAGE, Trailer};
    use super::*;
    use crate::base::block::{BlockHash, GroupId, Namespace, Rank, RowKey, Space};
    use proptest::prelude::*;
    use std::collections::HashMap;

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
        Entry { space, key, position: 0, page, length: ROW, checksum: 0 }
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
            well: bool,
        },
        /// Who makes room, of those that may, and how many of its rows are moved.
        Choose {
            nth: usize,
            moves: usize,
        },
        /// A row that was to be moved is read, and appended or given up; one that was appended is whole.
        MoveBegins {
            well: bool,
        },
        MoveEnds,
        /// What was to make room holds what must not go.
        Spare,
        Wait,
    }

    fn acts() -> impl Strategy<Value = Vec<Act>> {
        let one = prop_oneof![
            4 => Just(Act::Place),
            4 => Just(Act::WriteEnds { well: true }),
            1 => Just(Act::WriteEnds { well: false }),
            2 => (0..6_usize).prop_map(Act::ReadBegins),
            2 => Just(Act::ReadEnds),
            6 => Just(Act::StepEnds { well: true }),
            1 => Just(Act::StepEnds { well: false }),
            2 => (0..4_usize, 0..4_usize).prop_map(|(nth, moves)| Act::Choose { nth, moves }),
            3 => any::<bool>().prop_map(|well| Act::MoveBegins { well }),
            3 => Just(Act::MoveEnds),
            1 => Just(Act::Spare),
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
        step: Option<Step>,
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
        spares: bool,
    }

    impl World {
        /// Everything that was held lies in segments that may go sometime; the one chosen is one that may go now.
        fn choose(&mut self, log: &mut Log, room: u64) {
            let may = log.eligible();
            assert!(may.iter().all(|(s, _)| self.files.contains_key(s) && Some(*s) != log.open()));
            assert_eq!(self.to_move + self.moving.len(), 0, "one victim at a time");
            let most = room / (record_bytes(ROW) + super::super::format::ENTRY as u64);
            let moves = (self.choice.1 as u64).min(most);
            self.victim = may.get(self.choice.0 % may.len().max(1)).map(|(sequence, _)| *sequence);
            self.to_move = if self.victim.is_some() { usize::try_from(moves).unwrap() } else { 0 };
            log.chosen(self.victim.map(|v| (v, moves, moves * record_bytes(ROW))), self.now);
        }

        fn begin(&mut self, log: &mut Log, step: Step) {
            match &step {
                Step::Choose { room } => return self.choose(log, *room),
                Step::Forget(sequence) => {
                    assert_eq!(Some(*sequence), self.victim, "another one was chosen");
                    if std::mem::take(&mut self.spares) {
                        return log.spare();
                    }
                    return self.forgotten.push(*sequence);
                }
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
            assert!(self.step.replace(step).is_none(), "one step at a time");
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
                Act::StepEnds { well } => {
                    let Some(step) = self.step.take() else { return };
                    if well {
                        self.ends_well(&step);
                    }
                    let result = if well { Ok(LIMITS.segment) } else { Err("broken".into()) };
                    if let Some(next) = log.stepped(&step, result, self.now) {
                        self.begin(log, next);
                    }
                }
                Act::Choose { nth, moves } => self.choice = (nth, moves),
                Act::MoveBegins { well } => self.begin_move(log, well),
                Act::MoveEnds => self.end_move(log),
                Act::Spare => self.spares = true,
                Act::Wait => self.now = self.now.plus(RETRY / 2),
            }
            // Nobody moves while the drive does not write.
            while log.stopped().is_some() && self.to_move > 0 {
                self.to_move -= 1;
                log.move_ended();
            }
            while let Some(step) = log.step(self.now) {
                self.begin(log, step);
            }
        }
    }

    proptest! {
        #[test]
        fn whatever_happens_the_log_keeps_its_order_and_its_capacity(acts in acts()) {
            let mut log = Log::new(LIMITS, Sequence(1));
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
                    Act::StepEnds { well: true },
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
