//! Emptying a segment: its rows are copied to the open one, so that its file can go.
//!
//! A copy is a read like any other, verified, and an append like any other; only then does the index point to it, so
//! a row can be read at every moment. At most [`AT_ONCE`] rows are on the move, each in memory of its own.

use std::collections::VecDeque;

use super::super::disk::{Body, Buffer, Op, Verb};
use super::super::format::{Bad, Entry, PAGE, PAGE64, Record, Sequence, padded, record_bytes};
use super::super::index::Place;
use super::super::seal::Use;
use super::{Event, Flight, Work, verify};
use crate::base::block::{RowKey, Space};
use crate::base::clock::unix_seconds;

/// Rows on the move at one time.
const AT_ONCE: usize = 4;

/// A row that is copied to the open segment.
#[derive(Clone, Copy, Debug)]
pub struct Move {
    space: Space,
    key: RowKey,
    pub place: Place,
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
    /// Begins to empty a segment. Gives how many rows are moved for it, and the bytes of their records.
    pub(super) fn begin_moves(&mut self, sequence: Sequence) -> (u64, u64) {
        let index = self.parts.shared.index.lock();
        let row = |(space, key, place, _)| Move { space, key, place };
        let mut rows: Vec<_> = index.rows_of(sequence).map(row).collect();
        rows.sort_unstable_by_key(|row| row.place.page);
        let of_all = (rows.len() as u64, index.bytes_of(sequence));
        self.moves.waiting.extend(rows);
        of_all
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
            self.parts.shared.wear.lock().wrote(record_bytes(entry.length), unix_seconds());
        } else {
            self.parts.log.unwritten(sequence);
        }
        drop(index);
        self.move_ended();
    }

    fn move_ended(&mut self) {
        self.moves.busy -= 1;
        self.end_move();
    }

    /// What is left of a segment that was emptied stays in it: such rows could not be moved now.
    fn end_move(&mut self) {
        let victim = self.parts.log.victim();
        self.parts.log.move_ended();
        if let Some(sequence) = victim.filter(|_| self.parts.log.victim().is_none())
            && self.parts.shared.index.lock().count_of(sequence) == 0
        {
            self.parts.log.vacate(sequence, None);
        }
    }

    /// Nothing is moved that is not on its way already.
    pub(super) fn drop_moves(&mut self) {
        for _ in std::mem::take(&mut self.moves.waiting) {
            self.end_move();
        }
        for _ in std::mem::take(&mut self.moves.fetched) {
            self.move_ended();
        }
    }
}
