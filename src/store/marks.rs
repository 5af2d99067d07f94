//! What people said about rows: which are pinned, and which are not to come back. Pure, but for the file's name.
//!
//! A pin keeps a row whatever else needs its room. A drop takes a row out although the segment that holds its bytes
//! stays: a start reads segments, so the drop must be remembered until they are gone. Both are the operator's word,
//! which no segment can tell again, so they live in a plain file of their own that is written whole and renamed.
//!
//! Pins are bounded in bytes ([`limit`]), and the file is: its room, twice because the old one stays until the new
//! one is whole, is set aside from the capacity at every start ([`reserve`]), so that marking never has to wait for
//! room.
//!
//! ```text
//! folder/marks, padded to whole pages:
//!   magic 8 | version 2 | length 4 (of everything before the checksum)
//!   spaces 4 | namespace 32, rank 2, ranks 2 …
//!   pins 4   | space 4, key 36, length 4 …
//!   drops 4  | space 4, key 36, sequence 8, page 4 …
//!   gone 4   | space 4, sequence 8, page 4 …
//!   crc64 of all of it 8
//! ```

use std::collections::{BTreeMap, BTreeSet};

use super::format::{Bad, PAGE, PAGE64, Sequence, begun, padded, record_bytes};
use super::index::Place;
use crate::base::block::{Namespace, Rank, RowKey, Space};
use crate::base::checksum::crc64;
use crate::base::codec::{Malformed, Reader, Writer};

/// Name of the file.
pub const MARKS: &str = "marks";

const MAGIC: &[u8; 8] = b"SPARKKVM";
const VERSION: u16 = 1;
const SPACE: usize = 36;
const PIN: usize = 4 + RowKey::LEN + 4;
const DROP: usize = 4 + RowKey::LEN + 8 + 4;
const GONE: usize = 4 + 8 + 4;
/// Magic, version, length, four counts, checksum.
const FIXED: usize = 8 + 2 + 4 + 4 * 4 + 8;

/// Largest file.
pub const FILE_MAX: u64 = 32 << 20;

/// Bytes of the capacity that are set aside for the file and its successor.
pub fn reserve(capacity: u64) -> u64 {
    padded((capacity / 2048).clamp(4 * PAGE64, 2 * FILE_MAX))
}

/// Most bytes of records that may be pinned: half of what is left when one segment is open. Then some sealed segment
/// has at most half of its room pinned, and that half fits into the open one when it makes room.
pub fn limit(capacity: u64, segment: u64) -> u64 {
    capacity.saturating_sub(segment + reserve(capacity)) / 2
}

/// Behind everything that was written up to here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Point {
    pub sequence: Sequence,
    pub page: u32,
}

impl Point {
    pub fn of(place: &Place) -> Self {
        Self { sequence: place.sequence, page: place.page }
    }
}

/// Why a mark was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Full {
    /// Bytes that are pinned, and would be.
    Pins { pinned: u64, wanted: u64 },
    /// The file would outgrow its room.
    File,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    /// Payload length of each pinned row.
    pins: BTreeMap<(Space, RowKey), u32>,
    /// Rows whose copies up to a point do not count.
    drops: BTreeMap<(Space, RowKey), Point>,
    /// Spaces of which nothing up to a point counts.
    gone: BTreeMap<Space, Point>,
    /// Bytes that the pinned rows take as records.
    pinned: u64,
}

impl Marks {
    pub fn is_pinned(&self, space: &Space, key: &RowKey) -> bool {
        !self.pins.is_empty() && self.pins.contains_key(&(*space, *key))
    }

    pub fn pins(&self) -> impl Iterator<Item = (Space, RowKey)> + '_ {
        self.pins.keys().copied()
    }

    /// Rows and bytes that are pinned.
    pub fn pinned(&self) -> (u64, u64) {
        (self.pins.len() as u64, self.pinned)
    }

    /// Whether a copy at this place was dropped.
    pub fn is_dropped(&self, space: &Space, key: &RowKey, place: &Place) -> bool {
        let point = Point::of(place);
        let covers = |mark: Option<&Point>| mark.is_some_and(|mark| point <= *mark);
        covers(self.drops.get(&(*space, *key))) || covers(self.gone.get(space))
    }

    /// Rows that a start must look at, and spaces that it must go through.
    pub fn dropped(&self) -> (impl Iterator<Item = (Space, RowKey)> + '_, impl Iterator<Item = Space> + '_) {
        (self.drops.keys().copied(), self.gone.keys().copied())
    }

    /// Pins all of these rows, or none. Gives how many were not pinned before.
    pub fn pin(
        &mut self,
        space: Space,
        rows: &[(RowKey, u32)],
        capacity: u64,
        limit: u64,
    ) -> Result<u64, Full> {
        let new: BTreeMap<_, _> =
            rows.iter().filter(|(key, _)| !self.is_pinned(&space, key)).copied().collect();
        let wanted = self.pinned + new.values().map(|&length| record_bytes(length)).sum::<u64>();
        if wanted > limit {
            return Err(Full::Pins { pinned: self.pinned, wanted });
        }
        if (self.len() + new.len() * PIN + SPACE) as u64 > reserve(capacity) / 2 {
            return Err(Full::File);
        }
        self.pinned = wanted;
        let count = new.len() as u64;
        self.pins.extend(new.into_iter().map(|(key, length)| ((space, key), length)));
        Ok(count)
    }

    /// Gives how many were pinned.
    pub fn unpin(&mut self, space: Space, keys: &[RowKey]) -> u64 {
        let mut count = 0;
        for key in keys {
            if let Some(length) = self.pins.remove(&(space, *key)) {
                self.pinned -= record_bytes(length);
                count += 1;
            }
        }
        count
    }

    /// Rows are not to come back from where they lie.
    pub fn drop_rows(&mut self, space: Space, rows: &[(RowKey, Point)], capacity: u64) -> Result<(), Full> {
        if (self.len() + rows.len() * DROP + SPACE) as u64 > reserve(capacity) / 2 {
            return Err(Full::File);
        }
        let keys: Vec<_> = rows.iter().map(|(key, _)| *key).collect();
        self.unpin(space, &keys);
        self.drops.extend(rows.iter().map(|(key, point)| ((space, *key), *point)));
        Ok(())
    }

    /// Nothing of the space up to `point` is to come back.
    pub fn forget(&mut self, space: Space, point: Point, capacity: u64) -> Result<(), Full> {
        if (self.len() + GONE + SPACE) as u64 > reserve(capacity) / 2 {
            return Err(Full::File);
        }
        self.pins.retain(|(other, _), _| *other != space);
        self.drops.retain(|(other, _), _| *other != space);
        self.pinned = self.pins.values().map(|&length| record_bytes(length)).sum();
        self.gone.insert(space, point);
        Ok(())
    }

    /// Forgets drops that no segment can undo any more: everything before `oldest` is gone.
    pub fn prune(&mut self, oldest: Sequence) {
        self.drops.retain(|_, point| point.sequence >= oldest);
        self.gone.retain(|_, point| point.sequence >= oldest);
    }

    fn spaces(&self) -> BTreeSet<Space> {
        let keyed = self.pins.keys().chain(self.drops.keys()).map(|(space, _)| *space);
        keyed.chain(self.gone.keys().copied()).collect()
    }

    /// Bytes without padding.
    fn len(&self) -> usize {
        let marks = self.pins.len() * PIN + self.drops.len() * DROP + self.gone.len() * GONE;
        FIXED + self.spaces().len() * SPACE + marks
    }

    pub fn encode(&self) -> Vec<u8> {
        let count = |n: usize| u32::try_from(n).expect("the file is bounded");
        let spaces: Vec<_> = self.spaces().into_iter().collect();
        let number = |space: &Space| count(spaces.binary_search(space).expect("collected just now"));
        let mut w = Writer::default();
        w.bytes(MAGIC).u16(VERSION).u32(count(self.len() - 8));
        w.u32(count(spaces.len()));
        for space in &spaces {
            w.bytes(&space.namespace.0).u16(space.rank.index).u16(space.rank.of);
        }
        w.u32(count(self.pins.len()));
        for ((space, key), length) in &self.pins {
            w.u32(number(space)).bytes(&key.to_bytes()).u32(*length);
        }
        w.u32(count(self.drops.len()));
        for ((space, key), point) in &self.drops {
            w.u32(number(space)).bytes(&key.to_bytes()).u64(point.sequence.0).u32(point.page);
        }
        w.u32(count(self.gone.len()));
        for (space, point) in &self.gone {
            w.u32(number(space)).u64(point.sequence.0).u32(point.page);
        }
        let sum = crc64(&[&w.0]);
        w.u64(sum);
        let len = w.0.len().next_multiple_of(PAGE);
        w.0.resize(len, 0);
        w.0
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, Bad> {
        let mut r = begun(bytes, MAGIC, VERSION)?;
        let length = r.u32()? as usize;
        let Some((body, sum)) = bytes.split_at_checked(length).filter(|_| length >= FIXED - 8) else {
            return Err(Malformed::Short { wanted: length, left: bytes.len() }.into());
        };
        if Reader::new(sum).u64()? != crc64(&[body]) {
            return Err(Bad::Checksum);
        }
        let mut r = Reader::new(&body[14..]);
        let marks = Self::read(&mut r)?;
        r.end()?;
        Ok(marks)
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Bad> {
        let mut spaces = Vec::new();
        for _ in 0..r.count("spaces", SPACE, u32::MAX)? {
            let namespace = Namespace(r.array()?);
            spaces.push(Space { namespace, rank: Rank { index: r.u16()?, of: r.u16()? } });
        }
        let named = |number: u32| spaces.get(number as usize).copied().ok_or(Bad::Bounds("a mark's space"));
        let mut marks = Self::default();
        for _ in 0..r.count("pins", PIN, u32::MAX)? {
            let at = (named(r.u32()?)?, RowKey::from_bytes(&r.array()?));
            let length = r.u32()?;
            marks.pinned += record_bytes(length);
            marks.pins.insert(at, length);
        }
        for _ in 0..r.count("drops", DROP, u32::MAX)? {
            let at = (named(r.u32()?)?, RowKey::from_bytes(&r.array()?));
            marks.drops.insert(at, Point { sequence: Sequence(r.u64()?), page: r.u32()? });
        }
        for _ in 0..r.count("spaces that are gone", GONE, u32::MAX)? {
            let space = named(r.u32()?)?;
            marks.gone.insert(space, Point { sequence: Sequence(r.u64()?), page: r.u32()? });
        }
        Ok(marks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::block::{BlockHash, GroupId};
    use proptest::prelude::*;

    const SPACE_A: Space = Space { namespace: Namespace([1; 32]), rank: Rank::ONLY };
    const SPACE_B: Space = Space { namespace: Namespace([2; 32]), rank: Rank { index: 1, of: 2 } };
    const CAPACITY: u64 = 4 << 20;

    fn key(n: u8) -> RowKey {
        RowKey { hash: BlockHash([n; 32]), group: GroupId(n.into()) }
    }

    fn point(sequence: u64, page: u32) -> Point {
        Point { sequence: Sequence(sequence), page }
    }

    fn place(sequence: u64, page: u32) -> Place {
        Place { sequence: Sequence(sequence), page, length: 10, position: 0, seal: 0 }
    }

    fn some() -> Marks {
        let mut marks = Marks::default();
        assert_eq!(
            marks.pin(SPACE_A, &[(key(1), 4096), (key(2), 1), (key(1), 4096)], CAPACITY, 1 << 20),
            Ok(2)
        );
        marks.drop_rows(SPACE_B, &[(key(3), point(7, 9))], CAPACITY).unwrap();
        marks.forget(Space { namespace: Namespace([3; 32]), ..SPACE_A }, point(5, 1), CAPACITY).unwrap();
        marks
    }

    #[test]
    fn marks_come_back_as_they_were_written() {
        for marks in [Marks::default(), some()] {
            let bytes = marks.encode();
            assert_eq!(bytes.len() % PAGE, 0);
            assert_eq!(Marks::decode(&bytes), Ok(marks));
        }
    }

    #[test]
    fn a_drop_covers_copies_up_to_its_point_and_ends_with_their_segments() {
        let mut marks = some();
        assert!(marks.is_dropped(&SPACE_B, &key(3), &place(7, 9)));
        assert!(marks.is_dropped(&SPACE_B, &key(3), &place(6, 90)), "an older copy of a row that moved");
        assert!(!marks.is_dropped(&SPACE_B, &key(3), &place(7, 10)), "stored again since");
        assert!(!marks.is_dropped(&SPACE_B, &key(4), &place(1, 1)));
        marks.prune(Sequence(7));
        assert!(marks.is_dropped(&SPACE_B, &key(3), &place(7, 9)));
        assert_eq!(marks.dropped().1.count(), 0, "a whole space, up to segment 5");
        marks.prune(Sequence(8));
        assert!(!marks.is_dropped(&SPACE_B, &key(3), &place(7, 9)));
        assert_eq!(marks.pinned().0, 2, "pins do not end");
    }

    #[test]
    fn pins_are_bounded_and_refused_as_a_whole() {
        let mut marks = some();
        let before = marks.clone();
        let many: Vec<_> = (10..100).map(|n| (key(n), 16384)).collect();
        assert_eq!(
            marks.pin(SPACE_A, &many, CAPACITY, 1 << 20),
            Err(Full::Pins { pinned: 16384, wanted: 16384 + 90 * 20480 })
        );
        let many: Vec<_> = (3..=255).map(|n| (key(n), 1)).collect();
        assert_eq!(marks.pin(SPACE_A, &many, CAPACITY, u64::MAX), Err(Full::File));
        assert_eq!(marks, before);
        assert_eq!(marks.unpin(SPACE_A, &[key(1), key(9)]), 1);
        assert_eq!(marks.pinned(), (1, 8192));
        marks.drop_rows(SPACE_A, &[(key(2), point(1, 1))], CAPACITY).unwrap();
        assert_eq!(marks.pinned(), (0, 0), "what is dropped is pinned no more");
    }

    #[test]
    fn a_flipped_bit_is_noticed() {
        let bytes = some().encode();
        for at in 0..some().len() {
            let mut bytes = bytes.clone();
            bytes[at] ^= 4;
            assert!(Marks::decode(&bytes).is_err(), "byte {at}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), sealed: bool) {
            let mut bytes = bytes;
            if sealed {
                let mut w = Writer::default();
                let length = u32::try_from(14 + bytes.len()).unwrap();
                w.bytes(MAGIC).u16(VERSION).u32(length).bytes(&bytes);
                let sum = crc64(&[&w.0]);
                w.u64(sum);
                bytes = w.0;
            }
            let _ = Marks::decode(&bytes);
        }
    }
}
