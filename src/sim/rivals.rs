//! Policies that others use, at row granularity: LRU, S3-FIFO and SIEVE. Pure.
//!
//! Each is a set of keys with a bound; the textbook's rule says who leaves. They are given the best order there is
//! for prefixes: a request touches and offers its rows from the last to the first, so that of rows with one history
//! the end of a prompt leaves before its beginning. Without that LRU would evict beginnings first and lose whole
//! prompts.
//!
//! S3-FIFO: Yang et al., SOSP 2023; a tenth of the room for the small queue, a ghost of nine tenths, rows that were
//! asked for again while they were small go to main. SIEVE: Zhang et al., NSDI 2024.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::Hash;

use super::plan::Turn;
use super::{Cache, Error, RowId};

/// A bounded set of keys.
pub trait Policy<K> {
    fn holds(&self, key: &K) -> bool;

    /// A held key was used.
    fn touch(&mut self, key: K);

    /// A key that is not held comes in; others leave as the bound asks.
    fn insert(&mut self, key: K);

    /// A key that was touched belongs before those that came in since. Only orders that know recency care.
    fn renew(&mut self, _key: K) {}
}

/// Least recently used leaves.
#[derive(Debug)]
pub struct Lru<K> {
    most: usize,
    stamps: HashMap<K, u64>,
    order: BTreeMap<u64, K>,
    next: u64,
}

impl<K> Lru<K> {
    pub fn new(most: usize) -> Self {
        Self { most, stamps: HashMap::new(), order: BTreeMap::new(), next: 0 }
    }
}

impl<K: Copy + Eq + Hash> Policy<K> for Lru<K> {
    fn holds(&self, key: &K) -> bool {
        self.stamps.contains_key(key)
    }

    fn touch(&mut self, key: K) {
        if let Some(stamp) = self.stamps.get_mut(&key) {
            self.order.remove(stamp);
            *stamp = self.next;
            self.order.insert(self.next, key);
            self.next += 1;
        }
    }

    fn insert(&mut self, key: K) {
        if self.most == 0 {
            return;
        }
        if self.stamps.len() == self.most
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.stamps.remove(&oldest);
        }
        self.stamps.insert(key, self.next);
        self.order.insert(self.next, key);
        self.next += 1;
    }

    fn renew(&mut self, key: K) {
        self.touch(key);
    }
}

/// Uses that S3-FIFO counts at most.
const USES_MAX: u8 = 3;

/// Uses by which a row of the small queue has earned its place in main.
const PROMOTED_BY: u8 = 1;

#[derive(Debug)]
pub struct S3Fifo<K> {
    most: usize,
    small_most: usize,
    small: VecDeque<K>,
    main: VecDeque<K>,
    uses: HashMap<K, u8>,
    /// Keys that left small unused, and when they came: a key that came again has left its older place.
    ghost: VecDeque<(K, u64)>,
    ghosts: HashMap<K, u64>,
    next: u64,
}

impl<K: Copy + Eq + Hash> S3Fifo<K> {
    pub fn new(most: usize) -> Self {
        Self {
            most,
            small_most: (most / 10).max(1),
            small: VecDeque::new(),
            main: VecDeque::new(),
            uses: HashMap::new(),
            ghost: VecDeque::new(),
            ghosts: HashMap::new(),
            next: 0,
        }
    }

    fn make_room(&mut self) {
        while self.small.len() + self.main.len() >= self.most {
            if self.small.len() >= self.small_most || self.main.is_empty() {
                self.leave_small();
            } else {
                self.leave_main();
            }
        }
    }

    fn leave_small(&mut self) {
        let Some(key) = self.small.pop_front() else { return };
        let uses = self.uses.get_mut(&key).expect("each held key has its uses");
        if *uses >= PROMOTED_BY {
            *uses = 0;
            self.main.push_back(key);
        } else {
            self.uses.remove(&key);
            self.remember(key);
        }
    }

    fn leave_main(&mut self) {
        let Some(key) = self.main.pop_front() else { return };
        let uses = self.uses.get_mut(&key).expect("each held key has its uses");
        if *uses > 0 {
            *uses -= 1;
            self.main.push_back(key);
        } else {
            self.uses.remove(&key);
        }
    }

    fn remember(&mut self, key: K) {
        self.ghost.push_back((key, self.next));
        self.ghosts.insert(key, self.next);
        self.next += 1;
        let most = self.most - self.most / 10;
        while self.ghosts.len() > most {
            let Some((key, stamp)) = self.ghost.pop_front() else { break };
            if self.ghosts.get(&key) == Some(&stamp) {
                self.ghosts.remove(&key);
            }
        }
        // Places that were left behind are few as long as the ghosts are: twice as many are cleared at once.
        if self.ghost.len() > 2 * most + 16 {
            self.ghost.retain(|(key, stamp)| self.ghosts.get(key) == Some(stamp));
        }
    }
}

impl<K: Copy + Eq + Hash> Policy<K> for S3Fifo<K> {
    fn holds(&self, key: &K) -> bool {
        self.uses.contains_key(key)
    }

    fn touch(&mut self, key: K) {
        if let Some(uses) = self.uses.get_mut(&key) {
            *uses = (*uses + 1).min(USES_MAX);
        }
    }

    fn insert(&mut self, key: K) {
        if self.most == 0 {
            return;
        }
        self.make_room();
        let known = self.ghosts.remove(&key).is_some();
        let queue = if known { &mut self.main } else { &mut self.small };
        queue.push_back(key);
        self.uses.insert(key, 0);
    }
}

/// A hand goes from the oldest to the newest, spares what was used since it came by, and takes the first that was
/// not. Behind the newest it begins again at the oldest.
#[derive(Debug)]
pub struct Sieve<K> {
    most: usize,
    /// By age.
    order: BTreeMap<u64, K>,
    /// Age, and whether it was used.
    held: HashMap<K, (u64, bool)>,
    /// Age of the key that is looked at next; `None`: the oldest.
    hand: Option<u64>,
    next: u64,
}

impl<K> Sieve<K> {
    pub fn new(most: usize) -> Self {
        Self { most, order: BTreeMap::new(), held: HashMap::new(), hand: None, next: 0 }
    }
}

impl<K: Copy + Eq + Hash> Sieve<K> {
    fn evict(&mut self) {
        // Twice around at most: the first round clears every mark.
        for _ in 0..=2 * self.order.len() {
            let Some((&age, &key)) = self.order.range(self.hand.unwrap_or(0)..).next() else { return };
            self.hand = self.order.range(age + 1..).next().map(|(&newer, _)| newer);
            let (_, used) = self.held.get_mut(&key).expect("each key has its age");
            if !std::mem::take(used) {
                self.order.remove(&age);
                self.held.remove(&key);
                return;
            }
        }
    }
}

impl<K: Copy + Eq + Hash> Policy<K> for Sieve<K> {
    fn holds(&self, key: &K) -> bool {
        self.held.contains_key(key)
    }

    fn touch(&mut self, key: K) {
        if let Some((_, used)) = self.held.get_mut(&key) {
            *used = true;
        }
    }

    fn insert(&mut self, key: K) {
        if self.most == 0 {
            return;
        }
        if self.held.len() == self.most {
            self.evict();
        }
        self.order.insert(self.next, key);
        self.held.insert(key, (self.next, false));
        self.next += 1;
    }
}

/// A policy as a cache of rows.
#[derive(Debug)]
pub(super) struct Rival<P> {
    policy: P,
    groups: u32,
}

impl<P> Rival<P> {
    pub(super) fn new(policy: P, groups: u32) -> Self {
        Self { policy, groups }
    }
}

impl<P: Policy<RowId>> Cache for Rival<P> {
    fn holds(&self, row: RowId) -> bool {
        self.policy.holds(&row)
    }

    /// What is loaded is used before room is made for what is new: rows in use do not leave.
    fn serve(&mut self, turn: &Turn, loaded: usize) -> Result<u64, Error> {
        let used = self.used(&turn.rows[..loaded]);
        for &id in &used {
            self.policy.touch(id);
        }
        let mut written = 0;
        for &row in turn.rows[loaded..].iter().rev() {
            for group in (0..=self.groups).rev() {
                let id = RowId { row, group };
                if self.policy.holds(&id) {
                    self.policy.touch(id);
                } else {
                    self.policy.insert(id);
                    written += 1;
                }
            }
        }
        for id in used {
            self.policy.renew(id);
        }
        Ok(written)
    }
}

impl<P> Rival<P> {
    /// Rows that a load reads, from the last to the first: of states only the last row's.
    fn used(&self, loaded: &[u32]) -> Vec<RowId> {
        let states =
            loaded.last().into_iter().flat_map(|&row| (1..=self.groups).map(move |group| (row, group)));
        let attention = loaded.iter().rev().map(|&row| (row, 0));
        states.chain(attention).map(|(row, group)| RowId { row, group }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plays keys, and gives for each whether it was held.
    fn play(policy: &mut impl Policy<char>, keys: &str) -> String {
        let hit = |key| {
            let held = policy.holds(&key);
            match held {
                true => policy.touch(key),
                false => policy.insert(key),
            }
            if held { '+' } else { '-' }
        };
        keys.chars().map(hit).collect()
    }

    fn held(policy: &impl Policy<char>) -> String {
        ('a'..='z').filter(|key| policy.holds(key)).collect()
    }

    #[test]
    fn lru_by_hand() {
        let mut lru = Lru::new(3);
        assert_eq!(play(&mut lru, "abcadb"), "---+--");
        // d took b's place, b took c's.
        assert_eq!(held(&lru), "abd");
    }

    #[test]
    fn sieve_by_hand() {
        let mut sieve = Sieve::new(3);
        assert_eq!(play(&mut sieve, "abcab"), "---++");
        // The hand spares a and b, takes c, the newest, and begins again.
        assert_eq!((play(&mut sieve, "d").as_str(), held(&sieve).as_str()), ("-", "abd"));
        // a and b lost their marks.
        assert_eq!((play(&mut sieve, "e").as_str(), held(&sieve).as_str()), ("-", "bde"));
        assert_eq!((play(&mut sieve, "ef").as_str(), held(&sieve).as_str()), ("+-", "def"));
        assert_eq!((play(&mut sieve, "g").as_str(), held(&sieve).as_str()), ("-", "efg"));
        // e is spared once, f goes.
        assert_eq!((play(&mut sieve, "h").as_str(), held(&sieve).as_str()), ("-", "egh"));
    }

    #[test]
    fn s3_fifo_by_hand() {
        // Small takes one of ten, main the others.
        let mut s3 = S3Fifo::new(10);
        assert_eq!(play(&mut s3, "abcdefghij"), "----------");
        // a was used while it was small: it goes to main, and b, the next, to the ghosts.
        assert_eq!((play(&mut s3, "ak").as_str(), held(&s3).as_str()), ("+-", "acdefghijk"));
        // b comes back through its ghost into main; c leaves for it.
        assert_eq!((play(&mut s3, "b").as_str(), held(&s3).as_str()), ("-", "abdefghijk"));
        // A long scan goes through small and leaves main alone.
        play(&mut s3, "lmnopqrstuvwxyz");
        assert!(s3.holds(&'a') && s3.holds(&'b'));
        assert_eq!(held(&s3).len(), 10);
    }

    #[test]
    fn no_room_holds_nothing_and_bounds_hold() {
        assert_eq!(play(&mut Lru::new(0), "aa"), "--");
        assert_eq!(play(&mut Sieve::new(0), "aa"), "--");
        assert_eq!(play(&mut S3Fifo::new(0), "aa"), "--");
        let keys = "abcabdeafgbhijacklmnoabpqrsatuvabwxyzab";
        for most in 1..12 {
            let (mut lru, mut sieve, mut s3) = (Lru::new(most), Sieve::new(most), S3Fifo::new(most));
            for key in keys.repeat(5).chars() {
                play(&mut lru, &key.to_string());
                play(&mut sieve, &key.to_string());
                play(&mut s3, &key.to_string());
                assert!(held(&lru).len() <= most && held(&sieve).len() <= most && held(&s3).len() <= most);
                assert!(s3.ghosts.len() <= most && s3.ghost.len() <= 2 * most + 16);
            }
        }
    }
}
