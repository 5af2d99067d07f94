//! The lookup table: which rows this node can bring, in shared memory, so that the engine's scheduler asks without
//! a round trip.
//!
//! One writer (the node), one reader (the plugin). A slot is one little-endian u64: `0` is empty, otherwise the upper
//! 62 bits are the key's tag and the lower two say who holds it (1 own drive, 2 the other node). Slots stand in
//! buckets of [`BUCKET`], and a key lives in one of two buckets, so an entry can be removed by zeroing it and a probe
//! reads two cache lines. A tag is 62 bits of the block hash: a false match is a load that fails, never a wrong row,
//! because a record's full key is compared when it is read.
//!
//! With `h = key bytes 0..8`, `g = key bytes 8..16` (u64 little-endian) and `G` the group number:
//! `tag = h xor (G * 0x9E37_79B9_7F4A_7C15)` with its two low bits cleared, and 4 in place of a zero tag;
//! `first = g mod buckets`, `second = (first xor (1 | (tag >> 32))) mod buckets`, `buckets = slots / 8`, a power of two.

use super::block::RowKey;
use super::shm::Mapping;

/// Slots per bucket: one cache line.
pub const BUCKET: usize = 8;

/// Who can bring a row. Both bits may be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    Drive = 1,
    Peer = 2,
}

/// The node's side of the table.
#[derive(Debug)]
pub struct Table {
    map: Mapping,
    buckets: usize,
    /// Keys that found both buckets full: they are held, but the engine will not find them.
    overflowed: u64,
}

impl Table {
    /// Slots for `rows` keys at a load of at most one half; both buckets of a key are then practically never full.
    pub fn slots_for(rows: usize) -> usize {
        (rows.max(64) * 2).next_power_of_two()
    }

    /// A table in new shared memory, and the descriptor to hand to the plugin.
    ///
    /// # Panics
    /// When `slots` is not a power of two of at least 16.
    pub fn create(slots: usize) -> std::io::Result<(Self, std::os::fd::OwnedFd)> {
        assert!(slots.is_power_of_two() && slots >= 2 * BUCKET, "{slots} slots");
        let (map, fd) = Mapping::anonymous("spark-kv-table", slots * 8)?;
        Ok((Self { map, buckets: slots / BUCKET, overflowed: 0 }, fd))
    }

    pub fn slots(&self) -> usize {
        self.buckets * BUCKET
    }

    pub fn overflowed(&self) -> u64 {
        self.overflowed
    }

    fn place(&self, key: &RowKey) -> (u64, [usize; 2]) {
        place(key, self.buckets)
    }

    fn find(&self, tag: u64, buckets: [usize; 2]) -> Option<usize> {
        find(&self.map, tag, buckets)
    }

    /// Says that `holder` has `key`. False when there was no room for it.
    pub fn add(&mut self, key: &RowKey, holder: Holder) -> bool {
        let (tag, buckets) = self.place(key);
        if let Some(slot) = self.find(tag, buckets) {
            self.map.store(slot, self.map.load(slot) | holder as u64);
            return true;
        }
        let load = |bucket: usize| {
            (bucket * BUCKET..(bucket + 1) * BUCKET).filter(|&s| self.map.load(s) != 0).count()
        };
        let bucket = if load(buckets[0]) <= load(buckets[1]) { buckets[0] } else { buckets[1] };
        match (bucket * BUCKET..(bucket + 1) * BUCKET).find(|&slot| self.map.load(slot) == 0) {
            Some(slot) => {
                self.map.store(slot, tag | holder as u64);
                true
            }
            None => {
                self.overflowed += 1;
                false
            }
        }
    }

    /// Says that `holder` no longer has `key`.
    pub fn remove(&mut self, key: &RowKey, holder: Holder) {
        let (tag, buckets) = self.place(key);
        if let Some(slot) = self.find(tag, buckets) {
            let left = self.map.load(slot) & 3 & !(holder as u64);
            self.map.store(slot, if left == 0 { 0 } else { tag | left });
        }
    }

    /// Takes back everything that `holder` had.
    pub fn forget(&mut self, holder: Holder) {
        for slot in 0..self.slots() {
            let value = self.map.load(slot);
            if value & holder as u64 != 0 {
                let left = value & 3 & !(holder as u64);
                self.map.store(slot, if left == 0 { 0 } else { (value & !3) | left });
            }
        }
    }

    /// Makes `keys` all that `holder` has. A key that it had and still has never vanishes meanwhile: what is new
    /// goes in first, what is gone goes out after, and only then what found no room is tried again.
    pub fn replace(&mut self, holder: Holder, keys: &[RowKey]) {
        let before = self.overflowed;
        let crowded: Vec<&RowKey> = keys.iter().filter(|key| !self.add(key, holder)).collect();
        self.overflowed = before;
        let kept: std::collections::HashSet<u64> = keys.iter().map(|key| self.place(key).0).collect();
        for slot in 0..self.slots() {
            let value = self.map.load(slot);
            if value & holder as u64 != 0 && !kept.contains(&(value & !3)) {
                let left = value & 3 & !(holder as u64);
                self.map.store(slot, if left == 0 { 0 } else { (value & !3) | left });
            }
        }
        for key in crowded {
            self.add(key, holder);
        }
    }

    /// Whether `holder` has `key`, as the plugin would see it.
    pub fn has(&self, key: &RowKey, holder: Holder) -> bool {
        let (tag, buckets) = self.place(key);
        self.find(tag, buckets).is_some_and(|slot| self.map.load(slot) & holder as u64 != 0)
    }
}

/// The reader's side of the table, as the plugin has it.
#[derive(Debug)]
pub struct Probe {
    map: Mapping,
    buckets: usize,
}

impl Probe {
    /// Maps the table of `slots` slots that came with WELCOME.
    pub fn attach(slots: u32, fd: &std::os::fd::OwnedFd) -> std::io::Result<Self> {
        let slots = slots as usize;
        if !slots.is_power_of_two() || slots < 2 * BUCKET {
            return Err(std::io::Error::other(format!("a lookup table of {slots} slots")));
        }
        Ok(Self { map: Mapping::of(fd, slots * 8)?, buckets: slots / BUCKET })
    }

    /// Who can bring `key`: bits of [`Holder`], 0 for nobody.
    pub fn holders(&self, key: &RowKey) -> u64 {
        let (tag, buckets) = place(key, self.buckets);
        find(&self.map, tag, buckets).map_or(0, |slot| {
            let value = self.map.load(slot);
            // The node may have cleared or reused the slot since it was found.
            if value & !3 == tag { value & 3 } else { 0 }
        })
    }
}

fn place(key: &RowKey, buckets: usize) -> (u64, [usize; 2]) {
    let word = |at: usize| u64::from_le_bytes(key.hash.0[at..at + 8].try_into().expect("8 bytes"));
    let tag = (word(0) ^ u64::from(key.group.0).wrapping_mul(0x9E37_79B9_7F4A_7C15)) & !3;
    let tag = if tag == 0 { 4 } else { tag };
    let mask = buckets as u64 - 1;
    let first = word(8) & mask;
    let second = (first ^ (1 | (tag >> 32))) & mask;
    (tag, [usize::try_from(first).expect("masked"), usize::try_from(second).expect("masked")])
}

fn find(map: &Mapping, tag: u64, buckets: [usize; 2]) -> Option<usize> {
    buckets.into_iter().flat_map(|b| b * BUCKET..(b + 1) * BUCKET).find(|&slot| map.load(slot) & !3 == tag)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use sha2::Digest;

    use super::super::block::{BlockHash, GroupId};
    use super::*;

    fn key(n: u32) -> RowKey {
        RowKey { hash: BlockHash(sha2::Sha256::digest(n.to_le_bytes()).into()), group: GroupId(n % 3) }
    }

    #[test]
    fn equals_a_map_through_adds_removes_and_forgetting() {
        let (mut table, _fd) = Table::create(Table::slots_for(2000)).unwrap();
        let mut twin: HashMap<RowKey, u64> = HashMap::new();
        let mut dice = 1_u64;
        for step in 0..20_000_u32 {
            dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let k = key(u32::try_from(dice >> 33).unwrap() % 2000);
            let holder = if dice & 1 << 20 == 0 { Holder::Drive } else { Holder::Peer };
            if dice & 1 << 21 == 0 {
                assert!(table.add(&k, holder));
                *twin.entry(k).or_default() |= holder as u64;
            } else {
                table.remove(&k, holder);
                if let Some(v) = twin.get_mut(&k) {
                    *v &= !(holder as u64);
                }
            }
            if step == 10_000 {
                table.forget(Holder::Peer);
                twin.values_mut().for_each(|v| *v &= 1);
            }
        }
        for n in 0..2000 {
            let bits = twin.get(&key(n)).copied().unwrap_or(0);
            assert_eq!(table.has(&key(n), Holder::Drive), bits & 1 != 0, "{n}");
            assert_eq!(table.has(&key(n), Holder::Peer), bits & 2 != 0, "{n}");
        }
        assert_eq!(table.overflowed(), 0);
    }

    #[test]
    fn a_full_table_says_so() {
        let (mut table, _fd) = Table::create(16).unwrap();
        let kept = (0..40).filter(|&n| table.add(&key(n), Holder::Drive)).count();
        assert!(kept <= 16);
        assert_eq!(table.overflowed(), 40 - kept as u64);
    }

    #[test]
    fn a_probe_sees_what_the_node_says() {
        let (mut table, fd) = Table::create(64).unwrap();
        let probe = Probe::attach(64, &fd).unwrap();
        assert_eq!(probe.holders(&key(1)), 0);
        table.add(&key(1), Holder::Drive);
        table.add(&key(1), Holder::Peer);
        table.add(&key(2), Holder::Peer);
        assert_eq!((probe.holders(&key(1)), probe.holders(&key(2))), (3, 2));
        table.forget(Holder::Peer);
        assert_eq!((probe.holders(&key(1)), probe.holders(&key(2))), (1, 0));
        assert!(Probe::attach(63, &fd).is_err());
        assert!(Probe::attach(1 << 20, &fd).is_err());
    }

    #[test]
    fn replacing_leaves_exactly_the_new_keys_and_the_other_holders() {
        let (mut table, _fd) = Table::create(Table::slots_for(400)).unwrap();
        (0..300).for_each(|n| assert!(table.add(&key(n), Holder::Drive)));
        (0..50).for_each(|n| assert!(table.add(&key(n), Holder::Peer)));
        let keys: Vec<RowKey> = (200..400).map(key).collect();
        table.replace(Holder::Drive, &keys);
        for n in 0..400 {
            assert_eq!(table.has(&key(n), Holder::Drive), n >= 200, "{n}");
            assert_eq!(table.has(&key(n), Holder::Peer), n < 50, "{n}");
        }
    }

    #[test]
    fn replacing_in_a_crowded_table_counts_only_what_stays_out() {
        let (mut table, _fd) = Table::create(16).unwrap();
        let before = (0..16).filter(|&n| table.add(&key(n), Holder::Drive)).count();
        assert!(before > 0);
        let overflowed = table.overflowed();
        table.replace(Holder::Drive, &[key(100)]);
        assert!(table.has(&key(100), Holder::Drive));
        assert_eq!(table.overflowed(), overflowed);
    }
}
