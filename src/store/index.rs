//! Which rows are held, and where: the only answer to "is it there". Pure.
//!
//! A key enters when its record is whole and leaves when its segment is reclaimed or its row turned out damaged.
//! Whoever subscribes to a space gets what it holds and every change from exactly there on, because both happen
//! under the one lock that the owner keeps around this.

use std::collections::HashMap;

use tokio::sync::broadcast;

use super::format::{Entry, PAGE64, Sequence};
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
}

impl Place {
    pub fn of(sequence: Sequence, entry: &Entry) -> Self {
        Self { sequence, page: entry.page, length: entry.length, position: entry.position }
    }

    pub fn offset(&self) -> u64 {
        u64::from(self.page) * PAGE64
    }
}

#[derive(Debug, Default)]
pub struct Index {
    spaces: HashMap<Space, HashMap<RowKey, Place>>,
    listeners: HashMap<Space, broadcast::Sender<Change>>,
    rows: u64,
}

impl Index {
    pub fn rows(&self) -> u64 {
        self.rows
    }

    pub fn get(&self, space: &Space, key: &RowKey) -> Option<Place> {
        self.spaces.get(space)?.get(key).copied()
    }

    /// A row is whole at `place`. An older place of the same key is forgotten.
    pub fn add(&mut self, space: Space, key: RowKey, place: Place) {
        if self.spaces.entry(space).or_default().insert(key, place).is_none() {
            self.rows += 1;
        }
        self.tell(Change { space, key, position: place.position, kind: ChangeKind::Added });
    }

    /// The row at `place` is not to be read again. False when the key has moved on, or is gone already.
    pub fn remove(&mut self, space: &Space, key: &RowKey, place: &Place) -> bool {
        let Some(keys) = self.spaces.get_mut(space).filter(|keys| keys.get(key) == Some(place)) else {
            return false;
        };
        keys.remove(key);
        if keys.is_empty() {
            self.spaces.remove(space);
        }
        self.rows -= 1;
        self.tell(Change { space: *space, key: *key, position: place.position, kind: ChangeKind::Removed });
        true
    }

    /// Every row of a segment leaves. Returns how many.
    pub fn forget(&mut self, sequence: Sequence) -> usize {
        let mut gone = Vec::new();
        for (space, keys) in &mut self.spaces {
            gone.extend(keys.extract_if(|_, place| place.sequence == sequence).map(|(key, place)| Change {
                space: *space,
                key,
                position: place.position,
                kind: ChangeKind::Removed,
            }));
        }
        self.spaces.retain(|_, keys| !keys.is_empty());
        self.rows -= gone.len() as u64;
        let count = gone.len();
        gone.into_iter().for_each(|change| self.tell(change));
        count
    }

    /// What a space holds, and what changes from here on.
    pub fn subscribe(&mut self, space: Space) -> (Vec<(RowKey, u32)>, broadcast::Receiver<Change>) {
        self.listeners.retain(|_, sender| sender.receiver_count() > 0);
        let held = self
            .spaces
            .get(&space)
            .into_iter()
            .flatten()
            .map(|(key, place)| (*key, place.position))
            .collect();
        let sender = self.listeners.entry(space).or_insert_with(|| broadcast::channel(CHANGES).0);
        (held, sender.subscribe())
    }

    /// Per space: rows and payload bytes.
    pub fn spaces(&self) -> Vec<(Space, u64, u64)> {
        let sum = |keys: &HashMap<RowKey, Place>| keys.values().map(|p| u64::from(p.length)).sum();
        let mut all: Vec<_> =
            self.spaces.iter().map(|(s, keys)| (*s, keys.len() as u64, sum(keys))).collect();
        all.sort_unstable();
        all
    }

    /// The row of this space that was appended just before `place`, for the mutant that answers with it.
    pub fn before(&self, space: &Space, place: &Place) -> Option<(RowKey, Place)> {
        let order = |p: &Place| (p.sequence, p.page);
        let earlier = self.spaces.get(space)?.iter().filter(|(_, p)| order(p) < order(place));
        earlier.max_by_key(|(_, p)| order(p)).map(|(key, p)| (*key, *p))
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

    const SPACE: Space = Space { namespace: Namespace([1; 32]), rank: Rank::ONLY };

    fn key(n: u8) -> RowKey {
        RowKey { hash: BlockHash([n; 32]), group: GroupId(0) }
    }

    fn place(sequence: u64, page: u32) -> Place {
        Place { sequence: Sequence(sequence), page, length: 10, position: page }
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
}
