//! Which rows are held, and where: the only answer to "is it there". Pure.
//!
//! A key enters when its record is whole and leaves when its room is needed or its row turned out damaged.
//! Whoever subscribes to a space gets what it holds and every change from exactly there on, because both happen
//! under the one lock that the owner keeps around this.
//!
//! A drive of a terabyte holds a million rows, so a row must be small here, and nothing that happens often may walk
//! all of them. Rows lie in a [`Slab`], 80 bytes each; a hash table of their numbers finds them by space and key
//! (another 6 to 12 bytes); the rows of a segment are chained, so that emptying one costs that one's rows. Rows and
//! bytes are counted as they come and go, for each space and each segment.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;

use hashbrown::HashTable;
use tokio::sync::broadcast;

use super::format::{Entry, PAGE64, Sequence, record_bytes};
use super::slab::Slab;
use crate::base::block::{RowKey, Space};

/// Changes that a subscriber may lag behind. A segment of 256 MiB holds 4096 rows of 64 KiB, so one reclaim fits;
/// whoever lags further subscribes again.
const CHANGES: usize = 8192;

/// What happened to a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeKind {
    Added,
    Removed,
}

/// One change of what the store holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    pub space: Space,
    pub key: RowKey,
    pub position: u32,
    pub kind: ChangeKind,
}

/// Where a row lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub sequence: Sequence,
    pub page: u32,
    pub length: u32,
    pub position: u32,
    /// Number of the key that it is sealed under; 0: it is plain.
    pub seal: u32,
}

impl Place {
    pub fn of(sequence: Sequence, entry: &Entry) -> Self {
        let &Entry { page, length, position, seal, .. } = entry;
        Self { sequence, page, length, position, seal }
    }

    pub fn offset(&self) -> u64 {
        u64::from(self.page) * PAGE64
    }

    /// Bytes of its segment's file that its record takes.
    pub fn part(&self) -> Range<u64> {
        self.offset()..self.offset() + record_bytes(self.length)
    }
}

/// What is remembered of a row's use. Plain data that lies beside the row; `worth.rs` gives it its meaning. It begins
/// at zero, stays with a row that moves to another segment, and ends with the row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Heat {
    /// When it was last used, in seconds of the store's own clock.
    pub last: u32,
    /// How often it was used.
    pub uses: u16,
    pub flags: u16,
}

/// No row: the end of a chain.
const NONE: u32 = u32::MAX;

#[derive(Debug)]
struct Row {
    place: Place,
    key: RowKey,
    heat: Heat,
    /// Number of its space.
    space: u32,
    /// Its neighbours among the rows of its segment.
    before: u32,
    after: u32,
}

/// Rows of one segment, in the order in which they came.
#[derive(Debug)]
struct Chain {
    first: u32,
    last: u32,
    rows: u64,
    /// Of their records.
    bytes: u64,
}

/// What a space holds.
#[derive(Debug)]
struct Held {
    space: Space,
    rows: u64,
    bytes: u64,
}

/// Spaces that hold rows, each under a number that its rows carry.
#[derive(Debug, Default)]
struct Spaces {
    numbers: HashMap<Space, u32>,
    held: Slab<Held>,
}

impl Spaces {
    fn number(&mut self, space: Space) -> u32 {
        let held = &mut self.held;
        *self.numbers.entry(space).or_insert_with(|| held.add(Held { space, rows: 0, bytes: 0 }))
    }

    fn of(&self, number: u32) -> Space {
        self.held.get(number).space
    }

    fn count(&mut self, number: u32, length: u32) {
        let held = self.held.get_mut(number);
        held.rows += 1;
        held.bytes += u64::from(length);
    }

    fn discount(&mut self, number: u32, length: u32) {
        let held = self.held.get_mut(number);
        held.rows -= 1;
        held.bytes -= u64::from(length);
        if held.rows == 0 {
            self.numbers.remove(&held.space);
            self.held.remove(number);
        }
    }
}

/// Hashes of space and key. A key is a digest already, so mixing its words by two multiplications spreads it well;
/// the seeds are another pair in every process, so that nobody can choose keys that fall together.
#[derive(Debug)]
struct Mixer(u64, u64);

impl Default for Mixer {
    fn default() -> Self {
        let state = RandomState::new();
        Self(state.hash_one(1), state.hash_one(2))
    }
}

impl Mixer {
    fn hash(&self, space: u32, key: &RowKey) -> u64 {
        let fold = |a: u64, b: u64| {
            let product = u128::from(a) * u128::from(b);
            product as u64 ^ (product >> 64) as u64
        };
        let word = |at: usize| key.hash.0[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let one = fold(word(0) ^ self.0, word(8) ^ self.1);
        let two = fold(word(16) ^ self.1, word(24) ^ self.0);
        fold(one ^ self.0, two.rotate_left(32) ^ u64::from(key.group.0) << 32 ^ u64::from(space) ^ self.1)
    }
}

#[derive(Debug, Default)]
pub struct Index {
    rows: Slab<Row>,
    /// Numbers of rows, by the hash of space and key.
    table: HashTable<u32>,
    hasher: Mixer,
    spaces: Spaces,
    chains: BTreeMap<Sequence, Chain>,
    /// Segments whose last row has left since somebody asked.
    vacated: Vec<Sequence>,
    /// Rows under each key, and keys whose last row has left since somebody asked.
    sealed: HashMap<u32, u64>,
    unused: Vec<u32>,
    listeners: HashMap<Space, broadcast::Sender<Change>>,
}

impl Index {
    pub fn rows(&self) -> u64 {
        self.table.len() as u64
    }

    pub fn get(&self, space: &Space, key: &RowKey) -> Option<Place> {
        Some(self.rows.get(self.find(space, key)?).place)
    }

    /// Which of these keys are held. One after another without anything between, a processor looks up several at once.
    pub fn held(&self, space: &Space, keys: &[RowKey]) -> Vec<bool> {
        match self.spaces.numbers.get(space) {
            Some(&number) => keys.iter().map(|key| self.find_in(number, key).is_some()).collect(),
            None => vec![false; keys.len()],
        }
    }

    /// Room for this many further rows, made at once.
    pub fn reserve(&mut self, rows: usize) {
        let Self { rows: slab, hasher, table, .. } = self;
        table.reserve(rows, |&at| {
            let row = slab.get(at);
            hasher.hash(row.space, &row.key)
        });
    }

    /// A row is whole at `place`. An older place of the same key is forgotten; its heat stays.
    #[cfg(test)]
    pub fn add(&mut self, space: Space, key: RowKey, place: Place) {
        self.add_with(space, key, place, Heat::default());
    }

    /// A row is whole at `place`. An older place of the same key is forgotten; the heat that it has stays.
    pub fn add_with(&mut self, space: Space, key: RowKey, place: Place, heat: Heat) {
        let number = self.spaces.number(space);
        self.spaces.count(number, place.length);
        self.seal(place.seal);
        let hash = self.hasher.hash(number, &key);
        let Self { rows, hasher, table, .. } = self;
        let same = |&at: &u32| {
            let row = rows.get(at);
            row.key == key && row.space == number
        };
        if let Some(&at) = table.find(hash, same) {
            let old = self.unchain(at);
            self.spaces.discount(number, old.length);
            self.unseal(old.seal);
            self.rows.get_mut(at).place = place;
            self.chain(at);
        } else {
            let at = rows.add(Row { place, key, heat, space: number, before: NONE, after: NONE });
            table.insert_unique(hash, at, |&at| {
                let row = rows.get(at);
                hasher.hash(row.space, &row.key)
            });
            self.chain(at);
        }
        self.tell(Change { space, key, position: place.position, kind: ChangeKind::Added });
    }

    /// The row at `place` is not to be read again. False when the key has moved on, or is gone already.
    pub fn remove(&mut self, space: &Space, key: &RowKey, place: &Place) -> bool {
        let Some(at) = self.find(space, key).filter(|&at| self.rows.get(at).place == *place) else {
            return false;
        };
        self.unchain(at);
        let change = self.drop_row(at);
        self.tell(change);
        true
    }

    /// Every row of a segment leaves. Returns how many.
    pub fn forget(&mut self, sequence: Sequence) -> usize {
        let Some(chain) = self.chains.remove(&sequence) else { return 0 };
        let (mut at, mut count) = (chain.first, 0);
        while at != NONE {
            let next = self.rows.get(at).after;
            let change = self.drop_row(at);
            self.tell(change);
            (at, count) = (next, count + 1);
        }
        count
    }

    /// Every row that is sealed under one of these keys leaves. One pass over all rows. Returns how many.
    pub fn forget_sealed(&mut self, keys: &[u32]) -> Vec<Place> {
        let mut gone = Vec::new();
        self.each(|space, key, place| {
            if keys.contains(&place.seal) {
                gone.push((*space, *key, *place));
            }
        });
        gone.retain(|(space, key, place)| self.remove(space, key, place));
        gone.into_iter().map(|(_, _, place)| place).collect()
    }

    /// What a space holds, and what changes from here on.
    pub fn subscribe(&mut self, space: Space) -> (Vec<(RowKey, u32)>, broadcast::Receiver<Change>) {
        self.listeners.retain(|_, sender| sender.receiver_count() > 0);
        let number = self.spaces.numbers.get(&space);
        let rows = number.map_or(0, |&number| self.spaces.held.get(number).rows);
        let mut held = Vec::with_capacity(usize::try_from(rows).expect("they are in memory"));
        if let Some(&number) = number {
            let all = self.table.iter().map(|&at| self.rows.get(at));
            held.extend(all.filter(|row| row.space == number).map(|row| (row.key, row.place.position)));
        }
        let sender = self.listeners.entry(space).or_insert_with(|| broadcast::channel(CHANGES).0);
        (held, sender.subscribe())
    }

    /// Shows every row, segment by segment.
    pub fn each(&self, mut see: impl FnMut(&Space, &RowKey, &Place)) {
        for chain in self.chains.values() {
            self.walk(chain.first).for_each(|(_, row)| see(&self.spaces.of(row.space), &row.key, &row.place));
        }
    }

    /// Segments of which rows can be read, oldest first.
    pub fn segments(&self) -> impl Iterator<Item = Sequence> + '_ {
        self.chains.keys().copied()
    }

    /// Per space: rows and payload bytes.
    pub fn spaces(&self) -> Vec<(Space, u64, u64)> {
        let held = self.spaces.numbers.values().map(|&number| self.spaces.held.get(number));
        let mut all: Vec<_> = held.map(|held| (held.space, held.rows, held.bytes)).collect();
        all.sort_unstable();
        all
    }

    /// Bytes that this has allocated.
    pub fn memory(&self) -> usize {
        let chain = size_of::<(Sequence, Chain)>() + size_of::<(Space, u32)>();
        self.rows.memory()
            + self.table.allocation_size()
            + self.spaces.held.memory()
            + (self.chains.len() + self.spaces.numbers.capacity()) * chain
    }

    /// The row of this space that was appended just before `place`, for the mutant that answers with it.
    pub fn before(&self, space: &Space, place: &Place) -> Option<(RowKey, Place)> {
        let number = *self.spaces.numbers.get(space)?;
        let order = |p: &Place| (p.sequence, p.page);
        self.chains.range(..=place.sequence).rev().find_map(|(_, chain)| {
            let rows = self.walk(chain.first).map(|(_, row)| row);
            let earlier = rows.filter(|row| row.space == number && order(&row.place) < order(place));
            earlier.max_by_key(|row| row.place.page).map(|row| (row.key, row.place))
        })
    }
}

impl Index {
    pub fn heat(&self, space: &Space, key: &RowKey) -> Option<Heat> {
        Some(self.rows.get(self.find(space, key)?).heat)
    }

    pub fn heat_mut(&mut self, space: &Space, key: &RowKey) -> Option<&mut Heat> {
        let at = self.find(space, key)?;
        Some(&mut self.rows.get_mut(at).heat)
    }

    /// What a segment holds, in the order in which it came: nearly that of its pages.
    pub fn rows_of(&self, sequence: Sequence) -> impl Iterator<Item = (Space, RowKey, Place, Heat)> + '_ {
        let first = self.chains.get(&sequence).map_or(NONE, |chain| chain.first);
        self.walk(first).map(|(_, row)| (self.spaces.of(row.space), row.key, row.place, row.heat))
    }

    /// Rows of a segment that can be read.
    pub fn count_of(&self, sequence: Sequence) -> u64 {
        self.chains.get(&sequence).map_or(0, |chain| chain.rows)
    }

    /// Bytes that the records of a segment's rows take, of those that can be read.
    pub fn bytes_of(&self, sequence: Sequence) -> u64 {
        self.chains.get(&sequence).map_or(0, |chain| chain.bytes)
    }

    /// Whether a row is sealed under this key.
    pub fn needs_key(&self, key: u32) -> bool {
        self.sealed.contains_key(&key)
    }

    /// Keys whose last row has left since this was asked last. Some may have got one again.
    pub fn take_unused_keys(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.unused)
    }

    /// Segments whose last row has left since this was asked last. Some may have got one again.
    pub fn take_vacated(&mut self) -> Vec<Sequence> {
        std::mem::take(&mut self.vacated)
    }
}

impl Index {
    fn find(&self, space: &Space, key: &RowKey) -> Option<u32> {
        self.find_in(*self.spaces.numbers.get(space)?, key)
    }

    fn find_in(&self, space: u32, key: &RowKey) -> Option<u32> {
        let same = |&at: &u32| {
            let row = self.rows.get(at);
            row.key == *key && row.space == space
        };
        self.table.find(self.hasher.hash(space, key), same).copied()
    }

    /// A chain from a row on.
    fn walk(&self, first: u32) -> impl Iterator<Item = (u32, &Row)> + '_ {
        let row = |at: u32| (at != NONE).then(|| (at, self.rows.get(at)));
        std::iter::successors(row(first), move |(_, last)| row(last.after))
    }

    /// Puts a row at the end of its segment's chain.
    fn chain(&mut self, at: u32) {
        let Place { sequence, length, .. } = self.rows.get(at).place;
        let new = Chain { first: at, last: NONE, rows: 0, bytes: 0 };
        let chain = self.chains.entry(sequence).or_insert(new);
        let before = std::mem::replace(&mut chain.last, at);
        chain.rows += 1;
        chain.bytes += record_bytes(length);
        if before != NONE {
            self.rows.get_mut(before).after = at;
        }
        let row = self.rows.get_mut(at);
        (row.before, row.after) = (before, NONE);
    }

    /// Counts a row under a key; 0 is none.
    fn seal(&mut self, key: u32) {
        if key != 0 {
            *self.sealed.entry(key).or_default() += 1;
        }
    }

    fn unseal(&mut self, key: u32) {
        if let Some(rows) = self.sealed.get_mut(&key) {
            *rows -= 1;
            if *rows == 0 {
                self.sealed.remove(&key);
                self.unused.push(key);
            }
        }
    }

    /// Takes a row out of its segment's chain, and gives where it was.
    fn unchain(&mut self, at: u32) -> Place {
        let &Row { place, before, after, .. } = self.rows.get(at);
        if before != NONE {
            self.rows.get_mut(before).after = after;
        }
        if after != NONE {
            self.rows.get_mut(after).before = before;
        }
        let chain = self.chains.get_mut(&place.sequence).expect("every row is in its segment's chain");
        chain.rows -= 1;
        chain.bytes -= record_bytes(place.length);
        if before == NONE {
            chain.first = after;
        }
        if after == NONE {
            chain.last = before;
        }
        if chain.rows == 0 {
            self.chains.remove(&place.sequence);
            self.vacated.push(place.sequence);
        }
        place
    }

    /// Takes a row that is in no chain any more out of everything else.
    fn drop_row(&mut self, at: u32) -> Change {
        let &Row { key, place, space: number, .. } = self.rows.get(at);
        let hash = self.hasher.hash(number, &key);
        let entry = self.table.find_entry(hash, |&other| other == at);
        entry.expect("every row is in the table").remove();
        let space = self.spaces.of(number);
        self.spaces.discount(number, place.length);
        self.unseal(place.seal);
        self.rows.remove(at);
        Change { space, key, position: place.position, kind: ChangeKind::Removed }
    }

    fn tell(&self, change: Change) {
        if let Some(sender) = self.listeners.get(&change.space) {
            // Nobody listening is fine.
            let _ = sender.send(change);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::block::{BlockHash, GroupId, Namespace, Rank};
    use proptest::prelude::*;

    const SPACE: Space = Space { namespace: Namespace([1; 32]), rank: Rank::ONLY };

    fn key(n: u8) -> RowKey {
        RowKey { hash: BlockHash([n; 32]), group: GroupId(0) }
    }

    fn place(sequence: u64, page: u32) -> Place {
        Place { sequence: Sequence(sequence), page, length: 10, position: page, seal: 0 }
    }

    #[test]
    fn a_subscriber_sees_what_is_held_and_every_change_after_it() {
        let mut index = Index::default();
        index.add(SPACE, key(1), place(1, 1));
        let (held, mut changes) = index.subscribe(SPACE);
        assert_eq!(held, [(key(1), 1)]);
        index.add(SPACE, key(2), place(2, 4));
        index.add(Space { namespace: Namespace([2; 32]), ..SPACE }, key(3), place(2, 5));
        assert_eq!(index.forget(Sequence(1)), 1);
        let seen: Vec<_> = std::iter::from_fn(|| changes.try_recv().ok()).map(|c| (c.key, c.kind)).collect();
        assert_eq!(seen, [(key(2), ChangeKind::Added), (key(1), ChangeKind::Removed)]);
        assert_eq!(index.rows(), 2);
    }

    #[test]
    fn a_key_that_moved_on_survives_its_old_segment() {
        let mut index = Index::default();
        index.add(SPACE, key(1), place(1, 1));
        index.add(SPACE, key(1), place(2, 9));
        assert_eq!(index.rows(), 1);
        index.remove(&SPACE, &key(1), &place(1, 1));
        assert_eq!(index.forget(Sequence(1)), 0);
        assert_eq!(index.get(&SPACE, &key(1)), Some(place(2, 9)));
        index.remove(&SPACE, &key(1), &place(2, 9));
        assert_eq!((index.rows(), index.spaces().len()), (0, 0));
    }

    /// A slow index that cannot be wrong.
    #[derive(Default)]
    struct Oracle(HashMap<(Space, RowKey), (Place, Heat)>);

    impl Oracle {
        fn of(&self, sequence: Sequence) -> Vec<(Space, RowKey, Place, Heat)> {
            let rows = self.0.iter().map(|(&(space, key), &(place, heat))| (space, key, place, heat));
            let mut rows: Vec<_> = rows.filter(|row| row.2.sequence == sequence).collect();
            rows.sort_by_key(|row| (row.0, row.1));
            rows
        }

        fn spaces(&self) -> Vec<(Space, u64, u64)> {
            let mut spaces = BTreeMap::<Space, (u64, u64)>::new();
            for ((space, _), (place, _)) in &self.0 {
                let held = spaces.entry(*space).or_default();
                *held = (held.0 + 1, held.1 + u64::from(place.length));
            }
            spaces.into_iter().map(|(space, (rows, bytes))| (space, rows, bytes)).collect()
        }

        fn before(&self, space: &Space, place: &Place) -> Option<(RowKey, Place)> {
            let order = |p: &Place| (p.sequence, p.page);
            let rows = self.0.iter().filter(|((s, _), (p, _))| s == space && order(p) < order(place));
            rows.max_by_key(|(_, (p, _))| order(p)).map(|((_, key), (p, _))| (*key, *p))
        }
    }

    #[derive(Clone, Copy, Debug)]
    enum Act {
        Add { space: u8, key: u8, sequence: u64, length: u32 },
        Remove { space: u8, key: u8, current: bool },
        Forget(u64),
        Warm { space: u8, key: u8 },
    }

    fn acts() -> impl Strategy<Value = Vec<Act>> {
        let named = || (0..3_u8, 0..24_u8);
        let one = prop_oneof![
            8 => (named(), 0..6_u64, 1..9_u32)
                .prop_map(|((space, key), sequence, length)| Act::Add { space, key, sequence, length }),
            3 => (named(), any::<bool>())
                .prop_map(|((space, key), current)| Act::Remove { space, key, current }),
            1 => (0..6_u64).prop_map(Act::Forget),
            2 => named().prop_map(|(space, key)| Act::Warm { space, key }),
        ];
        proptest::collection::vec(one, 0..300)
    }

    fn space(n: u8) -> Space {
        Space { namespace: Namespace([n; 32]), ..SPACE }
    }

    fn act(index: &mut Index, oracle: &mut Oracle, act: Act, page: u32) {
        match act {
            Act::Add { space: s, key: k, sequence, length } => {
                let place = Place { sequence: Sequence(sequence), page, length, position: page, seal: 0 };
                let heat = oracle.0.get(&(space(s), key(k))).map_or(Heat::default(), |old| old.1);
                index.add(space(s), key(k), place);
                oracle.0.insert((space(s), key(k)), (place, heat));
            }
            Act::Remove { space: s, key: k, current } => {
                let held = oracle.0.get(&(space(s), key(k))).copied();
                let named = held.filter(|_| current).map_or(place(99, 1), |(place, _)| place);
                assert_eq!(index.remove(&space(s), &key(k), &named), held.is_some() && current);
                if current {
                    oracle.0.remove(&(space(s), key(k)));
                }
            }
            Act::Forget(sequence) => {
                let before = oracle.0.len();
                oracle.0.retain(|_, (place, _)| place.sequence != Sequence(sequence));
                assert_eq!(index.forget(Sequence(sequence)), before - oracle.0.len());
            }
            Act::Warm { space: s, key: k } => {
                let heat = index.heat_mut(&space(s), &key(k));
                assert_eq!(heat.is_some(), oracle.0.contains_key(&(space(s), key(k))));
                if let Some(heat) = heat {
                    (heat.last, heat.uses) = (page, heat.uses + 1);
                    oracle.0.get_mut(&(space(s), key(k))).unwrap().1 = *heat;
                }
            }
        }
    }

    proptest! {
        #[test]
        fn whatever_happens_it_knows_what_a_plain_map_knows(acts in acts()) {
            let (mut index, mut oracle) = (Index::default(), Oracle::default());
            let (held, mut changes) = index.subscribe(space(1));
            prop_assert!(held.is_empty());
            let mut heard = HashMap::new();
            for (page, one) in (1..).zip(acts) {
                act(&mut index, &mut oracle, one, page);
                prop_assert_eq!(index.rows(), oracle.0.len() as u64);
                while let Ok(change) = changes.try_recv() {
                    match change.kind {
                        ChangeKind::Added => heard.insert(change.key, change.position),
                        ChangeKind::Removed => heard.remove(&change.key),
                    };
                }
            }
            for s in 0..3 {
                for k in 0..24 {
                    let known = oracle.0.get(&(space(s), key(k))).copied();
                    prop_assert_eq!(index.get(&space(s), &key(k)), known.map(|(place, _)| place));
                    prop_assert_eq!(index.heat(&space(s), &key(k)), known.map(|(_, heat)| heat));
                    if let Some((place, _)) = known {
                        prop_assert_eq!(index.before(&space(s), &place), oracle.before(&space(s), &place));
                    }
                }
            }
            for sequence in (0..6).map(Sequence) {
                let mut rows: Vec<_> = index.rows_of(sequence).collect();
                prop_assert!(rows.is_sorted_by_key(|row| row.2.page), "in the order in which they came");
                rows.sort_by_key(|row| (row.0, row.1));
                let known = oracle.of(sequence);
                prop_assert_eq!(index.count_of(sequence), known.len() as u64);
                prop_assert_eq!(index.bytes_of(sequence), known.iter().map(|r| record_bytes(r.2.length)).sum::<u64>());
                prop_assert_eq!(rows, known);
            }
            for s in 0..3 {
                let keys: Vec<_> = (0..24).map(key).collect();
                let known: Vec<_> = keys.iter().map(|k| oracle.0.contains_key(&(space(s), *k))).collect();
                prop_assert_eq!(index.held(&space(s), &keys), known);
            }
            let mut shown = Oracle::default();
            index.each(|&space, &key, &place| {
                shown.0.insert((space, key), (place, index.heat(&space, &key).unwrap()));
            });
            prop_assert_eq!(&shown.0, &oracle.0);
            prop_assert_eq!(index.spaces(), oracle.spaces());
            let (mut held, _) = index.subscribe(space(1));
            held.sort_unstable();
            let mut heard: Vec<_> = heard.into_iter().collect();
            heard.sort_unstable();
            prop_assert_eq!(held, heard);
        }
    }

    #[test]
    fn a_row_takes_at_most_128_bytes_also_just_after_the_table_has_grown() {
        let mut index = Index::default();
        for n in 0..120_000_u32 {
            let mut hash = [7; 32];
            hash[..4].copy_from_slice(&n.to_le_bytes());
            let place = Place {
                sequence: Sequence(u64::from(n) / 4096),
                page: n,
                length: 4096,
                position: n,
                seal: 0,
            };
            index.add(SPACE, RowKey { hash: BlockHash(hash), group: GroupId(0) }, place);
            if n >= 50_000 {
                assert!(index.memory() <= 128 * (n as usize + 1), "{} bytes for {n} rows", index.memory());
            }
        }
    }
}
