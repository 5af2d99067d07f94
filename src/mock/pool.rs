//! The device's blocks: which are in use, which are free, and what the free ones still hold. Pure.
//!
//! One space of numbered blocks serves all cache groups. A block that nobody uses any more keeps its content and its
//! key until its number is needed: the one that was freed first goes first, and of a request's blocks the last ones of
//! the prompt before the first ones. So it is in vLLM (`v1/core/block_pool.py`). Unlike there, a key has one block: a
//! second request that computes the same block at the same time keeps its copy unnamed.
//!
//! What became known by a key and what ceased to be is told as [`Change`]s, in order: they are the engine's events.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use crate::base::block::{BlockHash, GroupId, RowKey};

/// Number of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(u32);

/// What happened to the index of blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    Stored(Stored),
    Removed(RowKey),
    Cleared,
}

/// Blocks of one group that can be hit from now on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    pub group: GroupId,
    /// In the order of the prompt. Of a state only the kept ones, so they need not be as many as the tokens make.
    pub hashes: Vec<BlockHash>,
    /// The hash that ends where the first of them begins; none at the beginning of a prompt.
    pub parent: Option<BlockHash>,
    /// Tokens that they span, by their places in the prompt that they were computed for.
    pub span: Range<usize>,
    /// The tokens themselves.
    pub tokens: Vec<u32>,
    /// Tokens of a block; fewer than a block has for the tail of a prompt.
    pub block_size: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Block {
    key: Option<RowKey>,
    users: u32,
    /// Its place among the free ones, while it is one of them.
    freed: u64,
}

/// All blocks of a device.
#[derive(Debug)]
pub struct Pool {
    blocks: Vec<Block>,
    named: HashMap<RowKey, Slot>,
    /// Free blocks, the next to be given away first.
    free: BTreeMap<u64, Slot>,
    clock: u64,
    changes: Vec<Change>,
}

impl Pool {
    pub fn new(blocks: usize) -> Self {
        let count = u32::try_from(blocks).unwrap_or(u32::MAX);
        Self {
            blocks: (0..count).map(|n| Block { freed: u64::from(n), ..Block::default() }).collect(),
            named: HashMap::new(),
            free: (0..count).map(|n| (u64::from(n), Slot(n))).collect(),
            clock: u64::from(count),
            changes: Vec::new(),
        }
    }

    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Blocks that somebody uses.
    pub fn used(&self) -> usize {
        self.blocks.len() - self.free.len()
    }

    pub fn has(&self, key: &RowKey) -> bool {
        self.named.contains_key(key)
    }

    /// Every key that can be hit, in no order.
    pub fn keys(&self) -> impl Iterator<Item = &RowKey> {
        self.named.keys()
    }

    /// Whether the block of `key` is there and free: using it takes one of the free ones.
    pub fn is_free(&self, key: &RowKey) -> bool {
        self.named.get(key).is_some_and(|slot| self.block(*slot).users == 0)
    }

    /// One more user of the block of `key`.
    pub fn take(&mut self, key: &RowKey) -> Option<Slot> {
        let slot = *self.named.get(key)?;
        let block = &mut self.blocks[slot.0 as usize];
        if block.users == 0 {
            self.free.remove(&block.freed);
        }
        block.users += 1;
        Some(slot)
    }

    /// A block for one user, without a key. What it held is gone. None when all are in use.
    pub fn allocate(&mut self) -> Option<Slot> {
        let (_, slot) = self.free.pop_first()?;
        let block = &mut self.blocks[slot.0 as usize];
        block.users = 1;
        if let Some(key) = block.key.take() {
            self.named.remove(&key);
            self.changes.push(Change::Removed(key));
        }
        Some(slot)
    }

    /// From now on `key` can be hit in `slot`. False when it can be hit elsewhere already.
    pub fn name(&mut self, slot: Slot, key: RowKey) -> bool {
        let block = &mut self.blocks[slot.0 as usize];
        if block.users == 0 || block.key.is_some() || self.named.contains_key(&key) {
            return false;
        }
        block.key = Some(key);
        self.named.insert(key, slot);
        true
    }

    /// One user less. The block keeps what it holds until its number is needed.
    pub fn release(&mut self, slot: Slot) {
        let block = &mut self.blocks[slot.0 as usize];
        assert!(block.users > 0, "a block is released as often as it was taken");
        block.users -= 1;
        if block.users == 0 {
            self.clock += 1;
            block.freed = self.clock;
            self.free.insert(self.clock, slot);
        }
    }

    /// Forgets what the blocks hold. False, and nothing is forgotten, while a block is in use.
    pub fn clear(&mut self) -> bool {
        if self.used() > 0 {
            return false;
        }
        self.named.clear();
        self.blocks.iter_mut().for_each(|block| block.key = None);
        self.changes.push(Change::Cleared);
        true
    }

    pub fn tell(&mut self, stored: Stored) {
        self.changes.push(Change::Stored(stored));
    }

    /// What changed since the last call.
    pub fn changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    fn block(&self, slot: Slot) -> &Block {
        &self.blocks[slot.0 as usize]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(n: u8) -> RowKey {
        RowKey { hash: BlockHash([n; 32]), group: GroupId(u32::from(n % 2)) }
    }

    /// The same with lists that are searched from end to end.
    #[derive(Default)]
    struct Plain {
        /// Key and users of each block.
        blocks: Vec<(Option<RowKey>, u32)>,
        free: Vec<usize>,
    }

    impl Plain {
        fn at(&self, key: &RowKey) -> Option<usize> {
            self.blocks.iter().position(|(k, _)| k.as_ref() == Some(key))
        }

        fn take(&mut self, key: &RowKey) -> Option<usize> {
            let at = self.at(key)?;
            self.blocks[at].1 += 1;
            self.free.retain(|n| *n != at);
            Some(at)
        }

        fn allocate(&mut self) -> Option<usize> {
            if self.free.is_empty() {
                return None;
            }
            let at = self.free.remove(0);
            self.blocks[at] = (None, 1);
            Some(at)
        }

        fn release(&mut self, at: usize) {
            self.blocks[at].1 -= 1;
            if self.blocks[at].1 == 0 {
                self.free.push(at);
            }
        }
    }

    #[test]
    fn what_was_freed_first_goes_first_and_says_so() {
        let mut pool = Pool::new(2);
        let (a, b) = (pool.allocate().unwrap(), pool.allocate().unwrap());
        assert!(pool.name(a, key(1)) && pool.name(b, key(2)) && pool.allocate().is_none());
        pool.release(b);
        pool.release(a);
        assert_eq!((pool.used(), pool.is_free(&key(2))), (0, true));
        // Used again, the other one is the oldest.
        assert_eq!(pool.take(&key(2)), Some(b));
        assert_eq!(pool.allocate(), Some(a));
        assert_eq!(pool.changes(), [Change::Removed(key(1))]);
        assert!(!pool.clear() && pool.has(&key(2)));
        pool.release(a);
        pool.release(b);
        assert!(pool.clear() && !pool.has(&key(2)));
        assert_eq!(pool.changes(), [Change::Cleared]);
    }

    proptest! {
        #[test]
        fn it_is_the_plain_one(orders in prop::collection::vec((0_u8..4, 0_u8..12, 0_usize..8), 1..200)) {
            let mut pool = Pool::new(5);
            let mut plain = Plain { blocks: vec![(None, 0); 5], free: (0..5).collect() };
            let mut held: Vec<Slot> = Vec::new();
            for (order, k, n) in orders {
                match order {
                    0 => {
                        let (got, due) = (pool.take(&key(k)), plain.take(&key(k)));
                        prop_assert_eq!(got.map(|s| s.0 as usize), due);
                        held.extend(got);
                    }
                    1 => {
                        let (got, due) = (pool.allocate(), plain.allocate());
                        prop_assert_eq!(got.map(|s| s.0 as usize), due);
                        held.extend(got);
                    }
                    2 if !held.is_empty() => {
                        let slot = held[n % held.len()];
                        let free = plain.blocks[slot.0 as usize].0.is_none() && plain.at(&key(k)).is_none();
                        prop_assert_eq!(pool.name(slot, key(k)), free);
                        if free {
                            plain.blocks[slot.0 as usize].0 = Some(key(k));
                        }
                    }
                    _ if !held.is_empty() => {
                        let slot = held.swap_remove(n % held.len());
                        pool.release(slot);
                        plain.release(slot.0 as usize);
                    }
                    _ => {}
                }
                prop_assert_eq!(pool.free(), plain.free.len());
                for k in 0..12 {
                    prop_assert_eq!(pool.has(&key(k)), plain.at(&key(k)).is_some());
                }
            }
        }
    }
}
