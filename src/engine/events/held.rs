//! What an engine's device cache holds, by what its events say. Pure.
//!
//! Events are facts about a set: a block that is stored twice is there once, one that is removed twice is gone. Batches
//! are numbered without holes; [`Line`] says what to do with the next one.

use hashbrown::HashSet;

use super::wire::Event;
use crate::base::block::{BlockHash, RowKey};

/// Blocks that are remembered: those of an engine with a million of them, in some 20 MB. More is no engine.
pub const KEPT: usize = 1 << 20;

/// The device cache of one engine.
#[derive(Debug, Default)]
pub struct Device {
    blocks: HashSet<(u32, u64)>,
    /// Blocks that were told as stored since the beginning.
    stored: u64,
    /// Tokens of the newest block that was stored.
    block_size: u32,
    /// More was told than can be: nothing is believed until the next clean slate.
    overflowed: bool,
}

impl Device {
    pub fn apply(&mut self, event: &Event) {
        match event {
            Event::Stored { group, hashes, block_size } => {
                self.stored += hashes.len() as u64;
                if *block_size > 0 {
                    self.block_size = *block_size;
                }
                self.blocks.extend(hashes.iter().map(|hash| (*group, *hash)));
                if self.blocks.len() > KEPT {
                    self.overflowed = true;
                    self.blocks = HashSet::new();
                }
            }
            Event::Removed { group, hashes } => hashes.iter().for_each(|hash| {
                self.blocks.remove(&(*group, *hash));
            }),
            Event::Cleared => {
                *self = Self { stored: self.stored, block_size: self.block_size, ..Self::default() }
            }
        }
    }

    pub fn has(&self, key: &RowKey) -> bool {
        self.blocks.contains(&(key.group.0, number(&key.hash)))
    }

    /// Blocks that are held.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Blocks that were ever told.
    pub fn stored(&self) -> u64 {
        self.stored
    }

    /// Tokens of the newest block. 0: none was told.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Whether what it says can be believed.
    pub fn is_whole(&self) -> bool {
        !self.overflowed
    }

    /// All blocks: group and number.
    pub fn blocks(&self) -> impl Iterator<Item = (u32, u64)> {
        self.blocks.iter().copied()
    }
}

/// How a digest is told as a number: its last 8 bytes.
pub fn number(hash: &BlockHash) -> u64 {
    u64::from_be_bytes(*hash.0.last_chunk().expect("a digest has 32 bytes"))
}

/// Numbers of batches, one after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Line {
    next: u64,
    /// A batch came in its turn since the line began: what is older from then on is no copy that was on its way.
    settled: bool,
}

/// What a batch's number says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// It is the next one, and counted.
    Next,
    /// It is known already.
    Known,
    /// Batches from this number on are missing, and are to be asked for.
    Gap(u64),
    /// Another engine began to count anew.
    Reborn,
}

impl Line {
    pub fn hear(&mut self, number: u64) -> Turn {
        if number == self.next {
            (self.next, self.settled) = (number + 1, true);
            Turn::Next
        } else if number > self.next {
            Turn::Gap(self.next)
        } else if self.settled {
            Turn::Reborn
        } else {
            Turn::Known
        }
    }

    /// A batch was brought once more. Older ones than the replay begins with are gone for good: it goes on from there.
    /// False: it is known already.
    pub fn replayed(&mut self, number: u64) -> bool {
        let new = number >= self.next;
        if new {
            (self.next, self.settled) = (number + 1, false);
        }
        new
    }

    /// The number that is waited for.
    pub fn next(&self) -> u64 {
        self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::block::GroupId;

    fn stored(group: u32, hashes: &[u64]) -> Event {
        Event::Stored { group, hashes: hashes.to_vec(), block_size: 16 }
    }

    #[test]
    fn events_are_facts_about_a_set() {
        let mut device = Device::default();
        device.apply(&stored(0, &[1, 2]));
        device.apply(&stored(0, &[2, 3]));
        device.apply(&stored(1, &[1]));
        assert_eq!((device.len(), device.stored(), device.block_size()), (4, 5, 16));
        device.apply(&Event::Removed { group: 0, hashes: vec![1, 9] });
        device.apply(&Event::Removed { group: 0, hashes: vec![1] });
        let mut hash = BlockHash([0xff; 32]);
        hash.0[24..].copy_from_slice(&1_u64.to_be_bytes());
        let has = |device: &Device, group| device.has(&RowKey { hash, group: GroupId(group) });
        assert_eq!((has(&device, 0), has(&device, 1)), (false, true), "of the other group it is there still");
        device.apply(&Event::Cleared);
        assert!(device.is_empty() && !has(&device, 1) && device.is_whole());
        assert_eq!(device.stored(), 5);
    }

    #[test]
    fn an_engine_that_holds_more_than_can_be_is_not_believed() {
        let mut device = Device::default();
        let hashes: Vec<u64> = (0..=KEPT as u64).collect();
        device.apply(&stored(0, &hashes[..KEPT]));
        assert!(device.is_whole());
        device.apply(&stored(0, &hashes[KEPT..]));
        assert!(!device.is_whole() && device.is_empty());
        device.apply(&stored(0, &[1]));
        assert!(!device.is_whole());
        device.apply(&Event::Cleared);
        assert!(device.is_whole());
    }

    #[test]
    fn a_line_asks_for_what_is_missing_and_tells_a_copy_from_a_new_engine() {
        let mut line = Line::default();
        assert_eq!(line.hear(5), Turn::Gap(0), "what came before it was there");
        assert!((0..5).all(|number| line.replayed(number)));
        assert!(line.replayed(5) && !line.replayed(3));
        assert_eq!(line.hear(5), Turn::Known, "a copy that was on its way");
        assert_eq!([line.hear(6), line.hear(7)], [Turn::Next; 2]);
        assert_eq!(line.hear(9), Turn::Gap(8));
        assert_eq!(line.hear(8), Turn::Next);
        assert_eq!(line.hear(0), Turn::Reborn);
        let mut late = Line::default();
        assert!(late.replayed(400), "older batches are gone for good");
        assert_eq!(late.next(), 401);
    }
}
