//! Parts of segments' files that are given back: which ones, how, and how a start sees them again.
//!
//! A row that goes takes nothing with it: the file system is told that nobody wants these pages any more (a hole is
//! punched), the file keeps its length, and what it took is free. Several parts are given back in one go, file by file,
//! and only then made durable, again file by file: the first of these calls writes the file system's journal for all.
//! They must be durable before their room is used, because a power cut that brings them back would bring the folder
//! over its capacity.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

use super::disk::{Files, Handle};
use super::format::{Entry, PAGE64, Sequence};

/// Parts of a segment's file for which the drive keeps nothing, ascending.
#[derive(Debug, Default)]
pub struct Holes(Vec<Range<u64>>);

impl Holes {
    /// Of a file of `len` bytes.
    pub fn of(files: &Files, handle: &Handle, len: u64) -> Self {
        Self(files.holes(handle, len))
    }

    /// The first hole that ends behind `at`.
    fn next(&self, at: u64) -> Option<&Range<u64>> {
        self.0.get(self.0.partition_point(|hole| hole.end <= at))
    }

    /// Whether the row that a foot lists is not there any more. Any hole in its record counts: a cut may have come
    /// while its pages were given back, in whichever order.
    pub fn have(&self, entry: &Entry) -> bool {
        self.touch(&entry.part())
    }

    /// Whether any of this part is gone.
    pub fn touch(&self, part: &Range<u64>) -> bool {
        self.next(part.start).is_some_and(|hole| hole.start < part.end)
    }

    /// The first page from `at` on that is not all hole.
    pub fn skip(&self, at: u64) -> u64 {
        let hole = self.next(at).filter(|hole| hole.start <= at);
        hole.map_or(at, |hole| (hole.end - hole.end % PAGE64).max(at))
    }
}

/// Parts to be given back, by segment.
#[derive(Debug, Default)]
pub struct Parts(BTreeMap<Sequence, Vec<Range<u64>>>);

impl Parts {
    pub fn add(&mut self, sequence: Sequence, part: Range<u64>) {
        if !part.is_empty() {
            self.0.entry(sequence).or_default().push(part);
        }
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn bytes(&self) -> u64 {
        self.0.values().flatten().map(|part| part.end - part.start).sum()
    }

    /// The segment is gone, and with it all of its parts.
    pub fn forget(&mut self, sequence: Sequence) {
        self.0.remove(&sequence);
    }

    /// Puts parts back that could not be given back.
    pub fn append(&mut self, other: Self) {
        for (sequence, parts) in other.0 {
            self.0.entry(sequence).or_default().extend(parts);
        }
    }

    /// Takes those out of which `may` says that they can be given back now.
    pub fn split_off(&mut self, may: impl Fn(Sequence, &Range<u64>) -> bool) -> Self {
        let mut off = Self::default();
        for (&sequence, parts) in &mut self.0 {
            let (now, later) = std::mem::take(parts).into_iter().partition(|part| may(sequence, part));
            *parts = later;
            now.into_iter().for_each(|part| off.add(sequence, part));
        }
        self.0.retain(|_, parts| !parts.is_empty());
        off
    }

    /// Makes one part of neighbours.
    fn join(&mut self) {
        for parts in self.0.values_mut() {
            parts.sort_unstable_by_key(|part| part.start);
            parts.dedup_by(|next, last| {
                let joins = next.start <= last.end;
                if joins {
                    last.end = last.end.max(next.end);
                }
                joins
            });
        }
    }

    pub fn sequences(&self) -> impl Iterator<Item = Sequence> + '_ {
        self.0.keys().copied()
    }

    /// Gives everything back, durably. Also gives what each segment takes now, after a failure too. Blocks.
    pub fn give_back(
        &mut self,
        files: &Files,
        handles: &BTreeMap<Sequence, Handle>,
    ) -> (Vec<(Sequence, u64)>, io::Result<()>) {
        self.join();
        let each = || self.0.iter().filter_map(|(sequence, parts)| Some((handles.get(sequence)?, parts)));
        let mut result = each().try_for_each(|(handle, parts)| files.punch(handle, parts));
        if result.is_ok() {
            result = each().try_for_each(|(handle, _)| files.sync_file(handle));
        }
        let taken = |(sequence, handle): (&Sequence, &Handle)| Some((*sequence, files.taken(handle).ok()?));
        (handles.iter().filter_map(taken).collect(), result)
    }
}

#[cfg(test)]
mod tests {
    use super::super::mem::{Loss, Mem};
    use super::*;
    use crate::base::block::{BlockHash, GroupId, Namespace, Rank, RowKey, Space};

    fn entry(page: u32, length: u32) -> Entry {
        let space = Space { namespace: Namespace([0; 32]), rank: Rank::ONLY };
        let key = RowKey { hash: BlockHash([0; 32]), group: GroupId(0) };
        Entry { space, key, position: 0, page, length, checksum: 0, seal: 0 }
    }

    #[test]
    fn a_row_is_gone_when_any_page_of_it_is_and_no_other_row_is() {
        // Pages 4 to 6, and the second half of page 9 on a drive with smaller blocks.
        let holes = Holes(vec![4 * PAGE64..7 * PAGE64, 9 * PAGE64 + 2048..10 * PAGE64]);
        let gone: Vec<u32> = (1..10).filter(|page| holes.have(&entry(*page, 1))).collect();
        assert_eq!(gone, [3, 4, 5, 6, 8, 9]);
        assert!(holes.have(&entry(1, 3 * 4096)) && !holes.have(&entry(1, 2 * 4096)));
        let skips: Vec<u64> = (3..11).map(|page| holes.skip(page * PAGE64) / PAGE64).collect();
        assert_eq!(skips, [3, 7, 7, 7, 7, 8, 9, 10]);
        assert!(!Holes::default().have(&entry(1, 1)));
    }

    #[test]
    fn parts_are_given_back_at_once_durably_and_those_that_wait_stay() {
        let mem = Mem::new();
        let files = Files::Mem(mem.clone());
        let mut handles = BTreeMap::new();
        for n in 1..3 {
            let (handle, _) = files.create(&format!("{n}"), 16 * PAGE64, &[1; 4096]).unwrap();
            handles.insert(Sequence(n), handle);
        }
        let mut parts = Parts::default();
        for page in [5, 3, 4, 8] {
            parts.add(Sequence(1), page * PAGE64..(page + 1) * PAGE64);
        }
        parts.add(Sequence(2), 2 * PAGE64..4 * PAGE64);
        parts.add(Sequence(2), 7 * PAGE64..7 * PAGE64);
        assert_eq!(parts.bytes(), 6 * PAGE64);
        let mut now = parts.split_off(|_, part| part.start != 8 * PAGE64);
        assert_eq!((now.bytes(), parts.bytes()), (5 * PAGE64, PAGE64));
        let before = mem.ops();
        let (taken, result) = now.give_back(&files, &handles);
        result.unwrap();
        assert_eq!(taken, [(Sequence(1), 13 * PAGE64), (Sequence(2), 14 * PAGE64)]);
        assert_eq!(mem.ops() - before, 4, "one part of neighbours, and one sync for each file");
        let holes = mem.after_cut(Loss::All).holes("1");
        assert_eq!((holes.len(), &holes[0]), (1, &(3 * PAGE64..6 * PAGE64)));
        parts.append(now);
        parts.forget(Sequence(1));
        assert_eq!(parts.sequences().collect::<Vec<_>>(), [Sequence(2)]);
    }
}
