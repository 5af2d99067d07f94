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

use super::super::onesided::Lies;
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

    /// Copies bytes in, one part behind the other, when there is room.
    pub fn lend(self: &Arc<Self>, parts: &[Bytes]) -> Option<Lies> {
        let length = parts.iter().map(Bytes::len).sum::<usize>();
        let taken = length.next_multiple_of(ALIGN).max(ALIGN);
        let offset = {
            let mut gaps = self.gaps.lock();
            let (offset, gap) = gaps.iter().find(|(_, gap)| **gap >= taken).map(|(at, gap)| (*at, *gap))?;
            gaps.remove(&offset);
            if gap > taken {
                gaps.insert(offset + taken, gap - taken);
            }
            offset
        };
        let slot = Slot { arena: self.clone(), offset, length };
        self.map.fill(offset, length, |mut into| {
            for part in parts {
                let (here, rest) = into.split_at_mut(part.len());
                here.copy_from_slice(part);
                into = rest;
            }
        });
        let bytes = Bytes::from_owner(slot);
        Some(Lies { at: bytes.as_ptr() as u64, bytes })
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
        let lend = |parts: &[&[u8]]| {
            let parts: Vec<_> = parts.iter().map(|part| Bytes::copy_from_slice(part)).collect();
            arena.lend(&parts)
        };
        let lent: Vec<Lies> = (1..=4_u8).map(|n| lend(&[&[n; ALIGN], &[n]]).unwrap()).collect();
        assert!(lend(&[&[9]]).is_none(), "it is full");
        let Region { address, bytes } = arena.region();
        for (n, Lies { at, bytes: piece }) in (1..=4_u8).zip(&lent) {
            assert!(piece.len() == ALIGN + 1 && piece.iter().all(|&b| b == n));
            let at = usize::try_from(*at).unwrap();
            assert!(at >= address && at + piece.len() <= address + bytes);
        }
        // The last reference counts.
        let held = lent[2].bytes.slice(1..2);
        drop(lent);
        assert!(lend(&[&[0; 5 * ALIGN]]).is_none(), "one piece is still held");
        drop(held);
        assert!(lend(&[&[0; 8 * ALIGN]]).is_some());
    }
}
