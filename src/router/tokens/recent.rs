//! A table bounded by bytes that forgets what was not used for the longest time.
//!
//! Entries stand in a list of places, linked from the youngest to the oldest; a hash table finds the place. Finding,
//! keeping and forgetting cost the same at any size.

use std::hash::{BuildHasher, Hash};

use hashbrown::{DefaultHashBuilder, Equivalent, HashTable};

/// No place.
const NONE: u32 = u32::MAX;

/// The table. What an entry costs is said when it is put.
pub struct Recent<K, V> {
    bound: usize,
    bytes: usize,
    hasher: DefaultHashBuilder,
    find: HashTable<u32>,
    places: Vec<Option<Entry<K, V>>>,
    free: Vec<u32>,
    youngest: u32,
    oldest: u32,
}

struct Entry<K, V> {
    key: K,
    value: V,
    cost: usize,
    younger: u32,
    older: u32,
}

impl<K: Hash + Eq, V: Clone> Recent<K, V> {
    pub fn new(bound: usize) -> Self {
        Self {
            bound,
            bytes: 0,
            hasher: DefaultHashBuilder::default(),
            find: HashTable::new(),
            places: Vec::new(),
            free: Vec::new(),
            youngest: NONE,
            oldest: NONE,
        }
    }

    /// What all entries cost.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The value of `key`, which becomes the youngest.
    pub fn get<Q: Hash + Equivalent<K> + ?Sized>(&mut self, key: &Q) -> Option<V> {
        let at = self.place(key)?;
        if at != self.youngest {
            self.unlink(at);
            self.link(at);
        }
        self.entry(at).map(|entry| entry.value.clone())
    }

    /// Keeps `value` under `key`, unless there is one already, and returns what stands there. None: it is too large
    /// to be kept beside others.
    pub fn put(&mut self, key: K, value: V, cost: usize) -> Option<V> {
        if let Some(known) = self.get(&key) {
            return Some(known);
        }
        if cost > self.bound / 4 {
            return None;
        }
        while self.bytes + cost > self.bound {
            self.forget(self.oldest);
        }
        let hash = self.hasher.hash_one(&key);
        let kept = value.clone();
        let entry = Some(Entry { key, value, cost, younger: NONE, older: NONE });
        let at = match self.free.pop() {
            Some(at) => {
                self.places[at as usize] = entry;
                at
            }
            None => {
                // A bound of bytes ends long before places are numbered out.
                let at = u32::try_from(self.places.len()).ok().filter(|at| *at != NONE)?;
                self.places.push(entry);
                at
            }
        };
        let Self { find, places, hasher, .. } = self;
        let again = |at: &u32| places[*at as usize].as_ref().map_or(0, |entry| hasher.hash_one(&entry.key));
        find.insert_unique(hash, at, again);
        self.bytes += cost;
        self.link(at);
        Some(kept)
    }

    pub fn clear(&mut self) {
        *self = Self::new(self.bound);
    }

    fn place<Q: Hash + Equivalent<K> + ?Sized>(&self, key: &Q) -> Option<u32> {
        let hash = self.hasher.hash_one(key);
        let is = |at: &u32| self.entry(*at).is_some_and(|entry| key.equivalent(&entry.key));
        self.find.find(hash, is).copied()
    }

    fn entry(&self, at: u32) -> Option<&Entry<K, V>> {
        self.places.get(at as usize)?.as_ref()
    }

    fn entry_mut(&mut self, at: u32) -> Option<&mut Entry<K, V>> {
        self.places.get_mut(at as usize)?.as_mut()
    }

    fn forget(&mut self, at: u32) {
        self.unlink(at);
        let Some(entry) = self.places.get_mut(at as usize).and_then(Option::take) else { return };
        let hash = self.hasher.hash_one(&entry.key);
        if let Ok(found) = self.find.find_entry(hash, |place| *place == at) {
            found.remove();
        }
        self.bytes -= entry.cost;
        self.free.push(at);
    }

    fn unlink(&mut self, at: u32) {
        let Some(entry) = self.entry(at) else { return };
        let (younger, older) = (entry.younger, entry.older);
        match self.entry_mut(younger) {
            Some(entry) => entry.older = older,
            None => self.youngest = older,
        }
        match self.entry_mut(older) {
            Some(entry) => entry.younger = younger,
            None => self.oldest = younger,
        }
    }

    fn link(&mut self, at: u32) {
        let before = self.youngest;
        if let Some(entry) = self.entry_mut(at) {
            (entry.younger, entry.older) = (NONE, before);
        }
        match self.entry_mut(before) {
            Some(entry) => entry.younger = at,
            None => self.oldest = at,
        }
        self.youngest = at;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Against a plain list, youngest last.
        #[test]
        fn it_forgets_the_oldest_and_stays_within_its_bound(
            steps in proptest::collection::vec((any::<bool>(), 0_u8..20, 1_usize..30), 0..200),
        ) {
            let (mut recent, mut twin) = (Recent::new(100), Vec::<(u8, usize, usize)>::new());
            for (n, (put, key, cost)) in steps.into_iter().enumerate() {
                let known = twin.iter().position(|(k, ..)| *k == key).map(|at| twin.remove(at));
                let expected = known.map(|(_, value, _)| value);
                twin.extend(known);
                if !put {
                    prop_assert_eq!(recent.get(&key), expected);
                } else {
                    let kept = if expected.is_some() || cost > 25 { expected } else { Some(n) };
                    prop_assert_eq!(recent.put(key, n, cost), kept);
                    if expected.is_none() && cost <= 25 {
                        twin.push((key, n, cost));
                        while twin.iter().map(|(.., cost)| cost).sum::<usize>() > 100 {
                            twin.remove(0);
                        }
                    }
                }
                prop_assert_eq!(recent.bytes(), twin.iter().map(|(.., cost)| cost).sum::<usize>());
            }
        }
    }
}
