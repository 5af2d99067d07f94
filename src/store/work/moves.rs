//! Making room: which segment goes, which of its rows are copied out of it first, and what is not let in.
//!
//! A copy is a read like any other, verified, and an append like any other; only then does the index point to it, so
//! a row can be read at every moment. At most [`AT_ONCE`] rows are on the move, each in memory of its own.

use std::collections::{HashMap, VecDeque};

use super::super::disk::{Body, Buffer, Op, Verb};
use super::super::format::{Bad, Entry, PAGE, PAGE64, Record, Sequence, padded};
use super::super::index::{Heat, Place};
use super::super::seal::Use;
use super::super::worth::{self, Candidate, Fresh, Ghosts, Kind, Plan, Ranking, Standing};
use super::{Event, Flight, Slot, Work, verify};
use crate::base::block::{RowItem, RowKey, Space};
use crate::base::frame::Outcome;
use crate::base::rows::Rows;

/// Rows on the move at one time.
const AT_ONCE: usize = 4;

/// Share of a segment that rows which are worth it may take in the one that is open: so many bytes of it, at most, are
/// not new. Pinned rows are moved beyond that.
const SHARE: u64 = 2;

/// What rows are worth, as far as it is learned or announced.
#[derive(Default)]
pub struct Judge {
    pub kinds: HashMap<Space, Vec<Kind>>,
    pub ghosts: Ghosts,
    /// Seconds without use after which a row expires.
    pub ttl: Option<u32>,
    ranking: Ranking,
    fresh: Fresh,
    /// When the toll was paid last.
    paid: u32,
}

/// A row that is copied to the open segment.
#[derive(Clone, Copy, Debug)]
pub struct Move {
    space: Space,
    key: RowKey,
    place: Place,
}

/// A row that was read for a move, and whether it is the one it should be.
pub struct Fetched {
    row: Move,
    body: Body,
    verdict: Result<Record, Bad>,
}

/// Rows on the move: to be read, and read but not written yet.
#[derive(Default)]
pub struct Moves {
    waiting: VecDeque<Move>,
    fetched: VecDeque<(Move, Buffer, Record)>,
    /// Being read, looked at, or written.
    busy: usize,
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

    fn candidates(&self, sequence: Sequence, now: u32) -> Vec<Candidate> {
        let index = self.parts.shared.index.lock();
        let fresh = self.judge.fresh.get();
        let candidate = |(space, key, place, heat): (Space, RowKey, Place, Heat)| {
            let pinned = self.parts.marks.is_pinned(&space, &key);
            let standing = self.standing(&space, heat.last, now);
            let density = worth::density(&heat, &place, self.kind(&space, &key), standing, fresh, now);
            Candidate { space, key, place, density, pinned }
        };
        index.rows_of(sequence).map(candidate).collect()
    }

    /// Which segment makes room next, and what of it is kept.
    pub(super) fn choose(&mut self, room: u64) {
        let now = self.seconds();
        let taken: HashMap<_, _> = self.parts.log.eligible().into_iter().collect();
        let mut all: Vec<_> = taken.keys().copied().collect();
        all.sort_unstable();
        let mut looked: Vec<_> = Vec::new();
        for sequence in self.judge.ranking.looks(&all) {
            let (rows, taken) = (self.candidates(sequence, now), taken[&sequence]);
            self.judge.ranking.note(sequence, &rows, taken);
            looked.push((sequence, rows, taken));
        }
        let threshold = self.judge.ranking.threshold();
        let budget = self.parts.log.segment_bytes() / SHARE;
        let plans = looked.into_iter().filter_map(|(sequence, rows, taken)| {
            Some((sequence, worth::plan(rows, taken, threshold, budget, room)?))
        });
        let order =
            |a: &(Sequence, Plan), b: &(Sequence, Plan)| a.1.loss.total_cmp(&b.1.loss).then(a.0.cmp(&b.0));
        let best = plans.min_by(order);
        if let Some((sequence, plan)) = &best {
            tracing::debug!(
                segment = sequence.0,
                moves = plan.moves.len(),
                loss = plan.loss,
                "makes room next"
            );
            self.judge.ranking.paid(plan.loss);
            self.judge.paid = now;
            let row = |c: &Candidate| Move { space: c.space, key: c.key, place: c.place };
            self.moves.waiting.extend(plan.moves.iter().map(row));
        }
        let choice = best.map(|(sequence, plan)| (sequence, plan.moves.len() as u64, plan.moved));
        self.parts.log.chosen(choice, self.parts.clock.now());
    }

    /// The segment goes, unless a row of it was pinned meanwhile or could not be moved although it is.
    pub(super) fn forget(&mut self, sequence: Sequence) {
        let mut index = self.parts.shared.index.lock();
        if index.rows_of(sequence).any(|(space, key, ..)| self.parts.marks.is_pinned(&space, &key)) {
            drop(index);
            return self.parts.log.spare();
        }
        let rows: Vec<_> = index.rows_of(sequence).collect();
        self.judge.fresh.learn(rows.iter().map(|(.., heat)| heat));
        self.judge.ghosts.fit(index.rows());
        rows.iter().for_each(|(space, key, ..)| self.judge.ghosts.add(space, key));
        let rows = index.forget(sequence);
        tracing::info!(segment = sequence.0, rows, "making room: a segment goes");
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
        let heat = worth::born(item.position, now, false);
        let kind = self.kind(&space, &item.key);
        let own = worth::density(&heat, &place, kind, Standing::Attached, self.judge.fresh.get(), now);
        // What is held ages while nothing is let in.
        let ages = worth::PAUSE / (worth::PAUSE + now.saturating_sub(self.judge.paid) as f32);
        own < self.judge.ranking.toll() * ages
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

    /// Starts to read or to write a row on the move.
    pub(super) fn start_move(&mut self) -> bool {
        if let Some((row, body, record)) = self.moves.fetched.pop_front() {
            self.write_move(row, body, record);
            return true;
        }
        if self.moves.busy >= AT_ONCE {
            return false;
        }
        let Some(row) = self.moves.waiting.pop_front() else { return false };
        self.moves.busy += 1;
        if self.parts.shared.index.lock().get(&row.space, &row.key) != Some(row.place) {
            self.move_ended();
            return true;
        }
        self.parts.log.reading(row.place.sequence);
        let len = usize::try_from(padded(row.place.length.into())).expect("a row is at most 1 GiB");
        let body = Body::Own(Buffer::zeroed(len));
        let (sequence, offset) = (row.place.sequence, row.place.offset());
        self.submit(Verb::Read, sequence, offset, Buffer::zeroed(PAGE), body, Flight::Fetch(row));
        true
    }

    pub(super) fn have_fetched(&mut self, row: Move, op: Op, result: std::io::Result<()>) {
        self.parts.log.read(row.place.sequence);
        if let Err(error) = result {
            tracing::warn!(%error, "failed to read a row that was to be moved; it is dropped");
            return self.lost(&row);
        }
        let Op { head, mut body, .. } = op;
        let (store, events, seals) = (self.parts.store, self.parts.events.clone(), self.parts.seals.clone());
        self.with_hands += 1;
        self.parts.hands.give(move || {
            let Move { space, key, place } = row;
            let verdict = Record::decode(&head, store, place.sequence)
                .and_then(|record| verify(record, &space, &key, &place))
                .and_then(|record| seals.check(record, &mut body, Use::Look));
            let _ = events.send(Event::Fetched(Box::new(Fetched { row, body, verdict })));
        });
    }

    pub(super) fn fetched(&mut self, fetched: Fetched) {
        let Fetched { row, body, verdict } = fetched;
        match (verdict, body) {
            (Ok(record), Body::Own(body)) => self.moves.fetched.push_back((row, body, record)),
            (Ok(_), _) => unreachable!("a row that is moved is read into own memory"),
            (Err(Bad::NoKey), _) => self.move_ended(),
            (Err(bad), _) => {
                tracing::warn!(%bad, key = ?row.key, "a row is not what was written; it is dropped");
                self.lost(&row);
            }
        }
    }

    fn lost(&mut self, row: &Move) {
        if self.parts.shared.index.lock().remove(&row.space, &row.key, &row.place) {
            self.parts.shared.metrics.damaged.inc();
            self.parts.shared.facts.lock().damaged += 1;
        }
        self.move_ended();
    }

    fn write_move(&mut self, row: Move, mut body: Buffer, record: Record) {
        let Some((sequence, page)) = self.parts.log.place_move(record.length) else {
            return self.move_ended();
        };
        // What follows the payload on its last page is nobody's.
        body[record.length as usize..].fill(0);
        let record = Record { sequence, ..record };
        let entry = record.entry(page);
        let head = Buffer::of(&record.encode());
        self.writes_in_flight += 1;
        let offset = u64::from(page) * PAGE64;
        self.submit(Verb::Write, sequence, offset, head, Body::Own(body), Flight::Move(row, sequence, entry));
    }

    pub(super) fn moved(&mut self, row: Move, sequence: Sequence, entry: Entry, result: std::io::Result<()>) {
        if let Err(error) = result {
            tracing::error!(%error, "failed to write a row; no rows are taken for now");
            self.parts.log.failed(
                sequence,
                format!("failed to write a row: {error}"),
                self.parts.clock.now(),
            );
            self.move_ended();
            return self.fail_writes();
        }
        let mut index = self.parts.shared.index.lock();
        // It may have been dropped or found damaged meanwhile: then it must not come back.
        if index.get(&row.space, &row.key) == Some(row.place) {
            self.parts.log.written(sequence, entry);
            let heat = index.heat(&row.space, &row.key).unwrap_or_default();
            index.add_with(row.space, row.key, Place::of(sequence, &entry), heat);
            self.parts.shared.metrics.moved_bytes.inc_by(entry.length.into());
            self.parts.shared.facts.lock().moved_bytes += u64::from(entry.length);
        } else {
            self.parts.log.unwritten(sequence);
        }
        drop(index);
        self.move_ended();
    }

    fn move_ended(&mut self) {
        self.moves.busy -= 1;
        self.parts.log.move_ended();
    }

    /// Nothing is moved that is not on its way already.
    pub(super) fn drop_moves(&mut self) {
        for _ in std::mem::take(&mut self.moves.waiting) {
            self.parts.log.move_ended();
        }
        for _ in std::mem::take(&mut self.moves.fetched) {
            self.move_ended();
        }
    }
}
