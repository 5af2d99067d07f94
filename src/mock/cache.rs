//! The rows shared with the node, and what a prompt finds on the device, in them and at the node: pure.
//!
//! The area keeps what was used last. What a running transfer touches is pinned and is not evicted. A row that is being
//! loaded is there but not ready.

use std::collections::{BTreeMap, HashMap};

use crate::base::block::{BlockHash, GroupId, RowKey};

/// Group of the attention rows, and of the states where there are any.
pub const ATTENTION: GroupId = GroupId(0);
pub const STATE: GroupId = GroupId(1);

#[derive(Clone, Copy, Debug)]
struct Entry {
    slot: u32,
    used: u64,
    pins: u32,
    ready: bool,
    /// Whether a node has it, as far as is known: what is not is offered again.
    kept: bool,
}

/// A cache of numbered slots that gives up what was not used for longest.
#[derive(Debug)]
pub struct Lru {
    entries: HashMap<RowKey, Entry>,
    /// What may be evicted, by last use.
    order: BTreeMap<u64, RowKey>,
    free: Vec<u32>,
    uses: u64,
}

impl Lru {
    pub fn new(slots: u32) -> Self {
        let free = (0..slots).rev().collect();
        Self { entries: HashMap::new(), order: BTreeMap::new(), free, uses: 0 }
    }

    /// Whether `key` is there, and ready.
    pub fn state(&self, key: &RowKey) -> Option<bool> {
        self.entries.get(key).map(|e| e.ready)
    }

    pub fn is_kept(&self, key: &RowKey) -> bool {
        self.entries.get(key).is_some_and(|e| e.kept)
    }

    /// Says that `key` was used now.
    pub fn touch(&mut self, key: &RowKey) {
        self.uses += 1;
        if let Some(entry) = self.entries.get_mut(key) {
            if entry.pins == 0 {
                self.order.remove(&entry.used);
                self.order.insert(self.uses, *key);
            }
            entry.used = self.uses;
        }
    }

    /// A slot for `key`, which is not there yet: a free one, or that of what was not used for longest. It is
    /// pinned and not ready. None when all is pinned.
    pub fn insert(&mut self, key: RowKey) -> Option<u32> {
        debug_assert!(!self.entries.contains_key(&key), "a key has one slot");
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                let (_, oldest) = self.order.pop_first()?;
                self.entries.remove(&oldest)?.slot
            }
        };
        self.uses += 1;
        self.entries.insert(key, Entry { slot, used: self.uses, pins: 1, ready: false, kept: false });
        Some(slot)
    }

    /// Keeps `key` from eviction, once more. Its slot.
    pub fn pin(&mut self, key: &RowKey) -> Option<u32> {
        let entry = self.entries.get_mut(key)?;
        if entry.pins == 0 {
            self.order.remove(&entry.used);
        }
        entry.pins += 1;
        Some(entry.slot)
    }

    pub fn unpin(&mut self, key: &RowKey) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.pins = entry.pins.saturating_sub(1);
            if entry.pins == 0 {
                self.order.insert(entry.used, *key);
            }
        }
    }

    pub fn set_ready(&mut self, key: &RowKey) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.ready = true;
        }
    }

    pub fn set_kept(&mut self, key: &RowKey, kept: bool) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.kept = kept;
        }
    }

    /// Takes `key` out, pinned or not: whoever pinned it must be the one who calls.
    pub fn remove(&mut self, key: &RowKey) {
        if let Some(entry) = self.entries.remove(key) {
            self.order.remove(&entry.used);
            self.free.push(entry.slot);
        }
    }

    /// How many are in use and cannot be evicted.
    pub fn pinned(&self) -> usize {
        self.entries.len() - self.order.len()
    }

    /// Takes out everything that is not pinned. Whether that was all.
    pub fn clear(&mut self) -> bool {
        while let Some((_, key)) = self.order.pop_first() {
            if let Some(entry) = self.entries.remove(&key) {
                self.free.push(entry.slot);
            }
        }
        self.entries.is_empty()
    }
}

/// Where a row that a hit needs is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Device,
    /// In the shared rows.
    Staging,
    /// The node has it.
    Node,
}

/// What a prompt finds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Blocks that the device has.
    pub device: usize,
    /// Blocks that a hit reaches, with what is elsewhere.
    pub reach: usize,
    /// What lies beyond the device's blocks: key, number of its block, where it is.
    pub beyond: Vec<(RowKey, usize, Place)>,
    /// Some of it is on its way into the rows already.
    pub pending: bool,
}

/// The facts a plan is made of.
#[derive(Clone, Copy, Debug)]
pub struct Search<'a> {
    pub chain: &'a [BlockHash],
    /// Blocks of the chain that a hit may cover: the last token is always computed.
    pub most: usize,
    pub states: bool,
    /// Rows that one hit may hold.
    pub budget: usize,
}

fn key(chain: &[BlockHash], block: usize, group: GroupId) -> RowKey {
    RowKey { hash: chain[block], group }
}

/// Key of the attention row of a block, and of the state at its end.
pub fn keys(chain: &[BlockHash], block: usize) -> (RowKey, RowKey) {
    (key(chain, block, ATTENTION), key(chain, block, STATE))
}

/// The longest usable prefix: every attention row up to it, and a state that ends there. `on_device` and `node` say
/// what is there.
pub fn plan(
    search: Search<'_>,
    on_device: impl Fn(&RowKey) -> bool,
    rows: &Lru,
    node: impl Fn(&RowKey) -> bool,
) -> Plan {
    let Search { chain, most, states, budget } = search;
    let place = |k: &RowKey| {
        if on_device(k) {
            Some(Place::Device)
        } else if rows.state(k).is_some() {
            Some(Place::Staging)
        } else {
            node(k).then_some(Place::Node)
        }
    };
    let held = (0..most).take_while(|&b| on_device(&keys(chain, b).0)).count();
    let usable = |&b: &usize| !states || b == 0 || on_device(&keys(chain, b - 1).1);
    let base = (0..=held).rev().find(usable).unwrap_or(0);
    let places: Vec<Place> = (base..most).map_while(|b| place(&keys(chain, b).0)).collect();
    for reach in (base + 1..=base + places.len()).rev() {
        let mut beyond: Vec<(RowKey, usize, Place)> =
            (base..reach).map(|b| (keys(chain, b).0, b, places[b - base])).collect();
        if states {
            let state = keys(chain, reach - 1).1;
            let Some(place) = place(&state) else { continue };
            beyond.push((state, reach - 1, place));
        }
        if beyond.iter().filter(|(_, _, place)| *place != Place::Device).count() > budget {
            continue;
        }
        let pending =
            beyond.iter().any(|(k, _, place)| *place == Place::Staging && rows.state(k) == Some(false));
        return Plan { device: base, reach, beyond, pending };
    }
    Plan { device: base, reach: base, beyond: Vec::new(), pending: false }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn chain(n: u8) -> Vec<BlockHash> {
        (0..n).map(|b| BlockHash([b; 32])).collect()
    }

    fn put(cache: &mut Lru, key: RowKey) {
        cache.insert(key).unwrap();
        cache.set_ready(&key);
        cache.unpin(&key);
    }

    fn has(cache: &Lru) -> impl Fn(&RowKey) -> bool {
        |key| cache.state(key).is_some()
    }

    #[test]
    fn the_longest_unused_goes_first_and_what_is_pinned_stays() {
        let c = chain(5);
        let k: Vec<RowKey> = (0..5).map(|b| keys(&c, b).0).collect();
        let mut cache = Lru::new(3);
        (0..3).for_each(|n| put(&mut cache, k[n]));
        cache.touch(&k[0]);
        assert_eq!(cache.pin(&k[1]), Some(1));
        let slot = cache.insert(k[3]).unwrap();
        assert_eq!(slot, 2, "that of the third, which was neither pinned nor used");
        assert_eq!(cache.insert(k[4]), Some(0));
        assert_eq!(cache.insert(k[0]), None, "all are pinned");
        assert!(!cache.clear());
        for key in [k[1], k[3], k[4]] {
            cache.unpin(&key);
        }
        assert!(cache.clear());
        assert_eq!((0..3).filter_map(|n| cache.insert(k[n])).collect::<HashSet<_>>().len(), 3);
    }

    #[test]
    fn attention_reaches_to_the_first_hole() {
        let c = chain(10);
        let (mut device, mut rows) = (Lru::new(20), Lru::new(20));
        (0..3).for_each(|b| put(&mut device, keys(&c, b).0));
        put(&mut rows, keys(&c, 3).0);
        let node = |k: &RowKey| (4..7).chain(8..10).any(|b| keys(&c, b).0 == *k);
        let search = Search { chain: &c, most: 10, states: false, budget: 100 };
        let found = plan(search, has(&device), &rows, node);
        assert_eq!((found.device, found.reach, found.pending), (3, 7, false));
        let places: Vec<Place> = found.beyond.iter().map(|(_, _, p)| *p).collect();
        assert_eq!(places, [Place::Staging, Place::Node, Place::Node, Place::Node]);
        assert_eq!(plan(Search { budget: 2, ..search }, has(&device), &rows, node).reach, 5);
        assert_eq!(plan(Search { most: 6, ..search }, has(&device), &rows, node).reach, 6);
        rows.insert(keys(&c, 7).0).unwrap();
        assert!(plan(search, has(&device), &rows, node).pending);
    }

    #[test]
    fn with_states_a_hit_ends_where_a_state_is() {
        let c = chain(10);
        let (mut device, rows) = (Lru::new(20), Lru::new(20));
        (0..5).for_each(|b| put(&mut device, keys(&c, b).0));
        put(&mut device, keys(&c, 1).1);
        let search = Search { chain: &c, most: 10, states: true, budget: 100 };
        let attention = |k: &RowKey| (5..9).any(|b| keys(&c, b).0 == *k);
        let found = plan(search, has(&device), &rows, attention);
        assert_eq!((found.device, found.reach), (2, 2), "without a later state only the device's counts");
        let node = |k: &RowKey| attention(k) || *k == keys(&c, 6).1;
        let found = plan(search, has(&device), &rows, node);
        assert_eq!((found.device, found.reach), (2, 7));
        assert_eq!(found.beyond.len(), 6);
        assert_eq!(found.beyond.iter().filter(|(_, _, p)| *p == Place::Device).count(), 3);
        assert_eq!(found.beyond[5], (keys(&c, 6).1, 6, Place::Node));
    }
}
