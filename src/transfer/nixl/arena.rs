//! Memory in which rows lie for peers to read: one mapping, known to every rail's device, cut into rows.
//!
//! Registering memory costs more than reading into it, so it is done once. A row takes the first gap that is long
//! enough; rows of one model are of one size, so gaps fit. Where there is none, the row stays where it was and its
//! bytes are sent.

#![expect(unsafe_code, reason = "lending bytes of a mapping for as long as they are held")]

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;

use super::library::Region;
use crate::base::shm::Mapping;

/// Rows begin at multiples of this, a page.
const ALIGN: usize = 4096;

#[derive(Debug)]
pub struct Arena {
    map: Mapping,
    /// Offset and length of each gap.
    gaps: Mutex<BTreeMap<usize, usize>>,
}

/// A part of it that nobody else has.
struct Slot {
    arena: Arc<Arena>,
    offset: usize,
    length: usize,
}

impl Arena {
    /// # Errors
    /// When there is not that much memory.
    pub fn new(bytes: usize) -> io::Result<Arc<Self>> {
        let bytes = bytes.max(1).next_multiple_of(ALIGN);
        let (map, _) = Mapping::anonymous("rows for peers", bytes)?;
        map.populate()?;
        Ok(Arc::new(Self { map, gaps: Mutex::new(BTreeMap::from([(0, bytes)])) }))
    }

    pub fn region(&self) -> Region {
        Region { address: self.map.address(0, self.map.len()) as usize, bytes: self.map.len() }
    }

    /// Copies bytes in, when there is room.
    pub fn keep(self: &Arc<Self>, bytes: &[u8]) -> Option<Bytes> {
        let taken = bytes.len().next_multiple_of(ALIGN).max(ALIGN);
        let offset = {
            let mut gaps = self.gaps.lock();
            let (offset, gap) = gaps.iter().find(|(_, gap)| **gap >= taken).map(|(at, gap)| (*at, *gap))?;
            gaps.remove(&offset);
            if gap > taken {
                gaps.insert(offset + taken, gap - taken);
            }
            offset
        };
        let slot = Slot { arena: self.clone(), offset, length: bytes.len() };
        self.map.fill(offset, bytes.len(), |into| into.copy_from_slice(bytes));
        Some(Bytes::from_owner(slot))
    }

    /// The address of bytes that lie here.
    pub fn at(&self, bytes: &Bytes) -> Option<u64> {
        let Region { address, bytes: length } = self.region();
        let at = bytes.as_ptr() as usize;
        let inside = at >= address && at + bytes.len() <= address + length;
        inside.then_some(at as u64)
    }

    fn give_back(&self, offset: usize, length: usize) {
        let mut gaps = self.gaps.lock();
        let (mut from, mut length) = (offset, length);
        if let Some(next) = gaps.remove(&(from + length)) {
            length += next;
        }
        if let Some((&before, &gap)) = gaps.range(..from).next_back()
            && before + gap == from
        {
            gaps.remove(&before);
            (from, length) = (before, length + gap);
        }
        gaps.insert(from, length);
    }
}

impl AsRef<[u8]> for Slot {
    fn as_ref(&self) -> &[u8] {
        let at = self.arena.map.address(self.offset, self.length);
        // SAFETY: in bounds (checked), mapped as long as the arena that this holds, written once before anybody saw it
        // and by nobody afterwards: peers read.
        unsafe { std::slice::from_raw_parts(at, self.length) }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.arena.give_back(self.offset, self.length.next_multiple_of(ALIGN).max(ALIGN));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_lie_apart_and_their_room_comes_back_whole() {
        let arena = Arena::new(8 * ALIGN).unwrap();
        let rows: Vec<Bytes> = (1..=4_u8).map(|n| arena.keep(&vec![n; ALIGN + 1]).unwrap()).collect();
        assert!(arena.keep(&[9]).is_none(), "it is full");
        for (n, row) in (1..=4_u8).zip(&rows) {
            assert!(row.len() == ALIGN + 1 && row.iter().all(|&b| b == n));
            assert!(arena.at(&row.slice(5..7)).is_some());
        }
        assert_eq!(arena.at(&Bytes::from_static(b"elsewhere")), None);
        // In any order, and the last reference counts.
        let held = rows[2].slice(1..2);
        for n in [2, 0, 3, 1] {
            drop(rows[n].clone());
        }
        drop(rows);
        assert!(arena.keep(&vec![0; 5 * ALIGN]).is_none(), "one row is still held");
        drop(held);
        assert!(arena.keep(&vec![0; 8 * ALIGN]).is_some());
    }
}
