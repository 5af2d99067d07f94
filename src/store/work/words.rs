//! What people say about rows: pins and drops, applied at once and answered when they are on the drive.

use super::super::Error;
use super::super::index::{Index, Place};
use super::super::marks::{self, Full, MARKS, Point};
use super::{Event, Mark, Marked, Work};
use crate::base::block::{RowKey, Space};
use crate::base::units::Bytes;

impl Work {
    pub(super) fn mark(&mut self, space: Space, mark: Mark, answer: Marked) {
        if self.closing.is_some() {
            let _ = answer.send(Err(Error::Closed));
            return;
        }
        match self.apply_mark(space, mark) {
            Err(error) => drop(answer.send(Err(error))),
            Ok(0) => drop(answer.send(Ok(0))),
            Ok(count) => {
                self.unsaved.push((answer, count));
                self.save_marks();
            }
        }
    }

    fn apply_mark(&mut self, space: Space, mark: Mark) -> Result<u64, Error> {
        let (capacity, segment) = (self.parts.log.capacity(), self.parts.log.segment_bytes());
        let limit = marks::limit(capacity, segment);
        let refuse = |full| match full {
            Full::Pins { pinned, wanted } => {
                Error::TooManyPins { pinned: Bytes(pinned), wanted: Bytes(wanted), limit: Bytes(limit) }
            }
            Full::File => Error::TooManyMarks,
        };
        let marks = &mut self.parts.marks;
        let mut index = self.parts.shared.index.lock();
        let held = |index: &Index, keys: Vec<RowKey>| -> Vec<(RowKey, Place)> {
            keys.into_iter().filter_map(|key| Some((key, index.get(&space, &key)?))).collect()
        };
        let gone = match mark {
            Mark::Pin(keys) => {
                let rows: Vec<_> =
                    held(&index, keys).iter().map(|(key, place)| (*key, place.length)).collect();
                return marks.pin(space, &rows, capacity, limit).map_err(refuse);
            }
            Mark::Unpin(keys) => return Ok(marks.unpin(space, &keys)),
            Mark::Drop(keys) => {
                let rows = held(&index, keys);
                let points: Vec<_> = rows.iter().map(|(key, place)| (*key, Point::of(place))).collect();
                marks.drop_rows(space, &points, capacity).map_err(refuse)?;
                rows
            }
            Mark::Forget => {
                let keys = index.subscribe(space).0.into_iter().map(|(key, _)| key).collect();
                let rows = held(&index, keys);
                if let Some(last) = rows.iter().map(|(_, place)| Point::of(place)).max() {
                    marks.forget(space, last, capacity).map_err(refuse)?;
                }
                rows
            }
        };
        let gone: Vec<_> = gone
            .into_iter()
            .filter_map(|(key, place)| index.remove(&space, &key, &place).then_some(place))
            .collect();
        drop(index);
        self.dropped(&gone);
        Ok(gone.len() as u64)
    }

    /// One version of the file at a time; what is said meanwhile goes into the next.
    fn save_marks(&mut self) {
        if self.saving || self.unsaved.is_empty() {
            return;
        }
        self.saving = true;
        self.with_hands += 1;
        if let Some(oldest) = self.parts.log.oldest() {
            self.parts.marks.prune(oldest);
        }
        let (answers, bytes) = (std::mem::take(&mut self.unsaved), self.parts.marks.encode());
        let (files, events) = (self.parts.files.clone(), self.parts.events.clone());
        self.parts.hands.give(move || {
            let result = files.replace(MARKS, &bytes).map(|()| bytes.len() as u64).map_err(|e| e.to_string());
            drop(files);
            let _ = events.send(Event::Saved(answers, result));
        });
    }

    pub(super) fn saved(&mut self, answers: Vec<(Marked, u64)>, result: &Result<u64, String>) {
        match result {
            Ok(bytes) => self.parts.log.set_small(*bytes),
            Err(reason) => tracing::error!(%reason, "failed to save pins and drops"),
        }
        // Figures first: whoever has the answer finds them.
        self.publish();
        for (answer, count) in answers {
            let _ = answer.send(result.clone().map(|_| count).map_err(Error::NotSaved));
        }
        self.save_marks();
    }
}
