//! Making room: which rows are released, how their room comes back, and what is not let in.
//!
//! Rows are asked what they are worth in one pass over all of them, and the pass keeps a list of those worth least:
//! as much as is needed now, and a [`SHARE`] of the capacity at least, so that a store of a million rows is gone through
//! once for many segments. A row that was used, moved or pinned since it was listed is passed over when its turn comes.
//! So is one that the drive is reading just now, and one that is on the move: what is given back must be wanted by
//! nobody.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::ops::Range;

use super::super::format::Sequence;
use super::super::holes::Parts;
use super::super::index::{Heat, Place};
use super::super::log::Step;
use super::super::worth::{self, Candidate, Fresh, Ghosts, Kind, Least, Standing};
use super::{Event, Flight, Slot, Work, say};
use crate::base::block::{RowItem, RowKey, Space};
use crate::base::frame::Outcome;
use crate::base::rows::Rows;

/// Part of the capacity that is listed in one pass, at least: one in so many. A list that is longer than what is needed
/// is older when its last row goes, by as much.
const SHARE: u64 = 64;

/// A row is refused only when what would go for it is worth more by this much: equals differ by a rounding.
const CLEARLY: f32 = 1.2;

/// What rows are worth, as far as it is learned or announced, and which of them go next.
#[derive(Default)]
pub struct Judge {
    pub kinds: HashMap<Space, Vec<Kind>>,
    pub ghosts: Ghosts,
    /// Seconds without use after which a row expires.
    ttl: Option<u32>,
    fresh: Fresh,
    /// What was known of it when rows were listed last: what is compared with them is measured by the same.
    likely: f32,
    /// Rows worth least, those first.
    next: VecDeque<Candidate>,
    /// What a byte was worth of the rows that were released last, and when.
    toll: f32,
    paid: u32,
    /// Nobody wants these any more.
    waiting: Parts,
}

impl Judge {
    /// From now on other rows than those listed may be worth least.
    pub fn changed(&mut self) {
        self.next.clear();
    }

    pub fn set_ttl(&mut self, ttl: Option<u32>) {
        self.ttl = ttl;
        self.changed();
    }

    /// The segment is gone.
    pub fn gone(&mut self, sequence: Sequence) {
        self.waiting.forget(sequence);
    }
}

/// Parts that were to be given back, and what became of it.
pub struct Given {
    step: Step,
    parts: Parts,
    taken: Vec<(Sequence, u64)>,
    result: Result<(), String>,
}

impl Work {
    /// Now, as rows know it.
    pub(super) fn seconds(&self) -> u32 {
        super::super::seconds(self.parts.epoch, self.parts.clock.now())
    }

    fn standing(&self, space: &Space, last: u32, now: u32) -> Standing {
        let age = now.saturating_sub(last);
        if self.judge.ttl.is_some_and(|ttl| age > ttl) {
            Standing::Expired
        } else if self.areas.values().any(|area| area.space == *space) {
            Standing::Attached
        } else {
            Standing::Left
        }
    }

    fn kind(&self, space: &Space, key: &RowKey) -> Kind {
        let kinds = self.judge.kinds.get(space);
        kinds.and_then(|kinds| kinds.get(key.group.0 as usize)).copied().unwrap_or_default()
    }

    fn candidate(&self, space: Space, key: RowKey, place: Place, heat: &Heat, now: u32) -> Candidate {
        let standing = self.standing(&space, heat.last, now);
        let kind = self.kind(&space, &key);
        let density = worth::density(heat, &place, kind, standing, self.judge.likely, now);
        Candidate { space, key, place, density, last: heat.last }
    }

    /// Goes through all rows for those worth least, one segment at a time under the index's lock.
    fn list_least(&mut self, bytes: u64, reading: &HashSet<(Sequence, u64)>) {
        let now = self.seconds();
        self.judge.likely = self.judge.fresh.get();
        let mut least = Least::new(bytes.max(self.parts.log.capacity() / SHARE));
        let segments: Vec<_> = self.parts.shared.index.lock().segments().collect();
        for sequence in segments.into_iter().filter(|sequence| self.parts.log.may_release(*sequence)) {
            let index = self.parts.shared.index.lock();
            for (space, key, place, heat) in index.rows_of(sequence) {
                if !self.parts.marks.is_pinned(&space, &key) && !reading.contains(&(sequence, place.offset()))
                {
                    least.offer(self.candidate(space, key, place, &heat, now));
                }
            }
        }
        self.judge.next = least.into_rows().into();
    }

    /// Places that the drive is reading.
    fn being_read(&self) -> HashSet<(Sequence, u64)> {
        let place = |flight: &Flight| match flight {
            Flight::Read(read) => read.asked.map(|(_, place)| place),
            Flight::Fetch(row) => Some(row.place),
            Flight::Portion(row, _) => self.peers.place(*row),
            Flight::Write(..) | Flight::Move(..) | Flight::Step(_) => None,
        };
        self.flights.values().filter_map(place).map(|place| (place.sequence, place.offset())).collect()
    }

    /// The next row of the list that can go, out of the index.
    fn release_one(&mut self, reading: &HashSet<(Sequence, u64)>) -> Option<(Candidate, Heat)> {
        while let Some(row) = self.judge.next.pop_front() {
            let Candidate { space, key, place, last, .. } = row;
            if !self.parts.log.may_release(place.sequence)
                || self.parts.marks.is_pinned(&space, &key)
                || reading.contains(&(place.sequence, place.offset()))
            {
                continue;
            }
            let mut index = self.parts.shared.index.lock();
            let same = index.get(&space, &key) == Some(place);
            if let Some(heat) = index.heat(&space, &key).filter(|heat| same && heat.last == last) {
                // Counted first: whoever hears of it finds it counted.
                self.count_released(1);
                index.remove(&space, &key, &place);
                return Some((row, heat));
            }
        }
        None
    }

    /// Takes rows out of the index, those worth least first, until as many bytes went, or `enough` says so of the
    /// segment that the last one left, and the bytes of rows that are left in it.
    fn release_until(&mut self, bytes: u64, enough: impl Fn(Sequence, u64) -> bool) {
        let reading = self.being_read();
        let (mut gone, mut worth, mut heats, mut is_new) = (0, 0.0, Vec::new(), false);
        let rows = self.parts.shared.index.lock().rows();
        self.judge.ghosts.fit(rows);
        while gone < bytes {
            let Some((row, heat)) = self.release_one(&reading) else {
                if is_new {
                    break;
                }
                // Those listed are all gone: one more pass, and who is not in it cannot go now.
                is_new = true;
                self.list_least(bytes.saturating_sub(gone), &reading);
                continue;
            };
            gone += row.bytes();
            worth += row.density * row.bytes() as f32;
            self.judge.ghosts.add(&row.space, &row.key);
            self.unwanted(row.place.sequence, row.place.part());
            heats.push(heat);
            let left = self.parts.shared.index.lock().bytes_of(row.place.sequence);
            if enough(row.place.sequence, left) {
                break;
            }
        }
        if heats.is_empty() {
            return;
        }
        self.judge.fresh.learn(heats.iter());
        self.judge.toll = worth / gone as f32;
        self.judge.paid = self.seconds();
        tracing::debug!(rows = heats.len(), bytes = gone, "making room: rows go");
    }

    fn count_released(&self, rows: usize) {
        self.parts.shared.metrics.released.inc_by(rows as u64);
        self.parts.shared.facts.lock().released += rows as u64;
    }

    /// Makes so many bytes of room, out of what waits to be given back and of rows.
    pub(super) fn release(&mut self, step: Step, bytes: u64) {
        let waiting = self.ready_parts();
        let lacking = bytes.saturating_sub(waiting.bytes());
        self.judge.waiting.append(waiting);
        if lacking > 0 {
            self.release_until(lacking, |_, _| false);
        }
        let mut parts = self.ready_parts();
        if parts.is_empty() {
            return self.step_ended(&step, Ok(0));
        }
        let handle = |sequence| Some((sequence, self.parts.handles.get(&sequence)?.clone()));
        let handles: BTreeMap<_, _> = parts.sequences().filter_map(handle).collect();
        let (files, events) = (self.parts.files.clone(), self.parts.events.clone());
        self.with_hands += 1;
        self.parts.hands.give(move || {
            let (taken, result) = parts.give_back(&files, &handles);
            drop((files, handles));
            let result = result.map_err(|error| say(&step, &error));
            let _ = events.send(Event::Given(Box::new(Given { step, parts, taken, result })));
        });
    }

    /// What can be given back now: of sealed segments, and not being read.
    fn ready_parts(&mut self) -> Parts {
        if !self.parts.log.punches() {
            return Parts::default();
        }
        let reading = self.being_read();
        let log = &self.parts.log;
        // A part may be of many rows: of what nobody can ask for only a read that began before can be in flight.
        self.judge.waiting.split_off(|sequence, part| {
            log.is_sealed(sequence) && !reading.iter().any(|(of, at)| *of == sequence && part.contains(at))
        })
    }

    pub(super) fn given(&mut self, given: Given) {
        let Given { step, parts, taken, result } = given;
        let before = self.parts.log.used();
        taken.into_iter().for_each(|(sequence, taken)| self.parts.log.set_taken(sequence, taken));
        let won = before.saturating_sub(self.parts.log.used());
        if result.is_err() {
            self.judge.waiting.append(parts);
        }
        self.step_ended(&step, result.map(|()| won));
    }

    fn unwanted(&mut self, sequence: Sequence, part: Range<u64>) {
        if self.parts.log.punches() {
            self.judge.waiting.add(sequence, part);
        }
    }

    /// Rows left for good, by word.
    pub(super) fn dropped(&mut self, places: &[Place]) {
        places.iter().for_each(|place| self.unwanted(place.sequence, place.part()));
        self.parts.log.give_back();
    }

    /// The segment has its foot at `foot`: what lies before it and is no row is wanted by nobody.
    pub(super) fn footed(&mut self, sequence: Sequence, foot: u64) {
        let mut parts: Vec<_> =
            self.parts.shared.index.lock().rows_of(sequence).map(|(_, _, place, _)| place.part()).collect();
        parts.sort_unstable_by_key(|part| part.start);
        self.judge.waiting.forget(sequence);
        let mut at = super::PAGE64;
        for part in parts {
            self.unwanted(sequence, at..part.start);
            at = part.end;
        }
        self.unwanted(sequence, at..foot);
    }

    /// Segments that no row is left in go.
    pub(super) fn vacate(&mut self) {
        let (vacated, unused) = {
            let mut index = self.parts.shared.index.lock();
            let mut vacated = index.take_vacated();
            vacated.retain(|sequence| index.count_of(*sequence) == 0);
            (vacated, index.take_unused_keys())
        };
        if !unused.is_empty() {
            self.unused_keys.extend(unused);
            self.prune_keys();
        }
        for sequence in vacated {
            // Of one without a foot something may be left that could not be read.
            if self.parts.log.is_sealed(sequence) {
                self.parts.log.vacate(sequence, None);
            }
        }
    }

    /// Which segment is emptied next.
    pub(super) fn choose(&mut self, room: u64) {
        let choice = if room == 0 { self.give_up_one() } else { self.choose_emptiest(room) };
        self.parts.log.chosen(choice, self.parts.clock.now());
    }

    fn emptiest(&self) -> Option<(Sequence, u64)> {
        let index = self.parts.shared.index.lock();
        let all = self.parts.log.eligible().into_iter();
        all.map(|(sequence, _)| (sequence, index.bytes_of(sequence))).min_by_key(|(_, bytes)| *bytes)
    }

    /// One that is half empty. Where room comes back in no other way, rows go until there is one.
    fn choose_emptiest(&mut self, room: u64) -> Option<(Sequence, u64, u64)> {
        let most = room.min(self.parts.log.segment_bytes() / 2);
        let mut found = self.emptiest();
        if !self.parts.log.punches() {
            let mut bytes = self.parts.log.segment_bytes();
            while found.is_some_and(|(_, bytes)| bytes > most) && bytes < self.parts.log.capacity() {
                let eligible: BTreeSet<_> = self.parts.log.eligible().into_iter().map(|(s, _)| s).collect();
                let before = self.parts.shared.index.lock().rows();
                self.release_until(bytes, |sequence, left| left <= most && eligible.contains(&sequence));
                found = self.emptiest();
                if self.parts.shared.index.lock().rows() == before {
                    break;
                }
                bytes *= 2;
            }
        }
        let (sequence, _) = found.filter(|(_, bytes)| *bytes <= most)?;
        let (moves, bytes) = self.begin_moves(sequence);
        tracing::debug!(segment = sequence.0, moves, bytes, "a segment is emptied");
        if moves == 0 {
            self.parts.log.vacate(sequence, None);
        }
        Some((sequence, moves, bytes))
    }

    /// Whatever can be moved or released, it does not suffice: the segment whose rows are worth least goes with all of
    /// them, unless one is pinned.
    fn give_up_one(&mut self) -> Option<(Sequence, u64, u64)> {
        let now = self.seconds();
        let worth = |(sequence, taken): (Sequence, u64)| {
            let index = self.parts.shared.index.lock();
            let mut worth = 0.0;
            for (space, key, place, heat) in index.rows_of(sequence) {
                if self.parts.marks.is_pinned(&space, &key) {
                    return None;
                }
                let row = self.candidate(space, key, place, &heat, now);
                worth += row.density * row.bytes() as f32;
            }
            Some((sequence, worth / taken.max(1) as f32))
        };
        let all = self.parts.log.eligible().into_iter().filter_map(worth);
        let (sequence, loss) = all.min_by(|a, b| a.1.total_cmp(&b.1))?;
        let rows: Vec<_> = self.parts.shared.index.lock().rows_of(sequence).collect();
        self.judge.ghosts.fit(rows.len() as u64);
        rows.iter().for_each(|(space, key, ..)| self.judge.ghosts.add(space, key));
        self.judge.fresh.learn(rows.iter().map(|(.., heat)| heat));
        (self.judge.toll, self.judge.paid) = (loss, now);
        self.count_released(rows.len());
        self.parts.shared.index.lock().forget(sequence);
        tracing::info!(segment = sequence.0, rows = rows.len(), "making room: a segment goes");
        self.parts.log.vacate(sequence, None);
        Some((sequence, 0, 0))
    }

    /// Whether the rows of a job are refused: room is needed for them, they were never here before, and what would go
    /// for them is worth more. The first row that is not held decides for all, because rows behind one that is missing
    /// are of no use.
    pub(super) fn refuses(&mut self, rows: &Rows, items: &[(usize, RowItem)]) -> bool {
        if !self.parts.log.is_pressed() {
            return false;
        }
        let first = {
            let index = self.parts.shared.index.lock();
            items.iter().find(|(_, item)| index.get(&rows.space, &item.key).is_none()).map(|(_, item)| *item)
        };
        let Some(item) = first else { return false };
        let (space, now) = (rows.space, self.seconds());
        let length = u32::try_from(rows.row_bytes()).expect("a row is at most 1 GiB");
        let place = Place { sequence: Sequence(0), page: 0, length, position: item.position, seal: 0 };
        let heat = worth::born(now, false);
        let kind = self.kind(&space, &item.key);
        let own = worth::density(&heat, &place, kind, Standing::Attached, self.judge.likely, now);
        // What is held ages while nothing is let in.
        let ages = worth::PAUSE / (worth::PAUSE + now.saturating_sub(self.judge.paid) as f32);
        own * CLEARLY < self.judge.toll * ages
            && !self.judge.ghosts.take(&space, &item.key)
            && !Ghosts::is_lucky(&space, &item.key)
    }

    /// A row is not kept. The engine hears `Held`: there is nothing to wait for and nothing to offer again, and what is
    /// held it knows from the table, not from this.
    pub(super) fn refuse(&mut self, slot: Slot, space: &Space, key: &RowKey) {
        let rows = self.parts.shared.index.lock().rows();
        self.judge.ghosts.fit(rows);
        self.judge.ghosts.add(space, key);
        self.parts.shared.metrics.refused.inc();
        self.parts.shared.facts.lock().refused += 1;
        self.settle(slot, Outcome::Held);
    }
}
