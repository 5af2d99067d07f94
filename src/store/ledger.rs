//! The segments of a log and what they take together. Pure.
//!
//! The totals are asked for with every event, and a drive of some terabytes has many thousands of segments: so they are
//! kept beside the segments, and whoever changes a segment does it here.

use std::collections::{BTreeMap, BTreeSet};

use super::format::Sequence;

/// One segment on the drive.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    /// Bytes taken on the drive.
    pub taken: u64,
    /// Reads in flight.
    pub reads: u32,
    /// Its foot is durable.
    pub sealed: bool,
    /// Rows of it were moved to this segment: it stays until that is durable.
    pub until: Option<Sequence>,
}

/// All segments.
#[derive(Debug, Default)]
pub struct Ledger {
    all: BTreeMap<Sequence, Segment>,
    taken: u64,
    sealed: usize,
    /// No row of these is in the index; each goes when its reads have ended.
    dying: BTreeSet<Sequence>,
}

impl Ledger {
    pub fn add(&mut self, sequence: Sequence, taken: u64, sealed: bool) {
        debug_assert!(!self.all.contains_key(&sequence), "a number is used once");
        self.taken += taken;
        self.sealed += usize::from(sealed);
        self.all.insert(sequence, Segment { taken, reads: 0, sealed, until: None });
    }

    pub fn remove(&mut self, sequence: Sequence) {
        self.dying.remove(&sequence);
        if let Some(segment) = self.all.remove(&sequence) {
            self.taken -= segment.taken;
            self.sealed -= usize::from(segment.sealed);
        }
    }

    pub fn get(&self, sequence: Sequence) -> Option<&Segment> {
        self.all.get(&sequence)
    }

    /// In ascending order.
    pub fn iter(&self) -> impl Iterator<Item = (Sequence, &Segment)> {
        self.all.iter().map(|(sequence, segment)| (*sequence, segment))
    }

    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Bytes that all of them take.
    pub fn taken(&self) -> u64 {
        self.taken
    }

    pub fn sealed(&self) -> usize {
        self.sealed
    }

    /// Those in which no row is left, in ascending order.
    pub fn dying(&self) -> impl Iterator<Item = (Sequence, &Segment)> {
        self.dying.iter().filter_map(|sequence| Some((*sequence, self.all.get(sequence)?)))
    }

    pub fn is_dying(&self, sequence: Sequence) -> bool {
        self.dying.contains(&sequence)
    }

    pub fn set_taken(&mut self, sequence: Sequence, taken: u64) {
        if let Some(segment) = self.all.get_mut(&sequence) {
            self.taken = self.taken - segment.taken + taken;
            segment.taken = taken;
        }
    }

    /// Its foot is durable.
    pub fn seal(&mut self, sequence: Sequence) {
        if let Some(segment) = self.all.get_mut(&sequence) {
            self.sealed += usize::from(!segment.sealed);
            segment.sealed = true;
        }
    }

    /// No row of it is left.
    pub fn vacate(&mut self, sequence: Sequence) {
        if self.all.contains_key(&sequence) {
            self.dying.insert(sequence);
        }
    }

    /// Rows of it are moved to `until`.
    pub fn bind(&mut self, sequence: Sequence, until: Sequence) {
        if let Some(segment) = self.all.get_mut(&sequence) {
            segment.until = Some(until);
        }
    }

    /// A read of it begins.
    pub fn reading(&mut self, sequence: Sequence) {
        self.all.get_mut(&sequence).expect("the index names segments that exist").reads += 1;
    }

    /// A read of it has ended.
    pub fn read(&mut self, sequence: Sequence) {
        self.all.get_mut(&sequence).expect("a segment stays until its reads have ended").reads -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_totals_are_those_of_the_segments(
            acts in proptest::collection::vec((0..6_u8, 0..8_u64, 0..1000_u64), 0..100),
        ) {
            let mut ledger = Ledger::default();
            for (act, number, bytes) in acts {
                let sequence = Sequence(number);
                match act {
                    0 if ledger.get(sequence).is_none() => ledger.add(sequence, bytes, bytes % 2 == 0),
                    1 => ledger.remove(sequence),
                    2 => ledger.set_taken(sequence, bytes),
                    3 => ledger.seal(sequence),
                    4 => ledger.vacate(sequence),
                    _ => {}
                }
                let all: Vec<_> = ledger.iter().collect();
                prop_assert_eq!(ledger.len(), all.len());
                prop_assert_eq!(ledger.taken(), all.iter().map(|(_, segment)| segment.taken).sum::<u64>());
                prop_assert_eq!(ledger.sealed(), all.iter().filter(|(_, segment)| segment.sealed).count());
                prop_assert!(ledger.dying().all(|(sequence, _)| ledger.get(sequence).is_some()));
                prop_assert_eq!(ledger.dying().count(), ledger.dying.len(), "none is kept of what is gone");
            }
        }
    }
}
