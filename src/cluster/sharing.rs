//! Which rows of other nodes are worth a second copy here, and which of ours others may take over. Pure.
//!
//! A row is written once, on the node that computed it; the others fetch it when they need it. Two things make a
//! second copy worth its room:
//!
//! - *Both use it.* A row that another node has written and that requests here have used [`OFTEN`] times, each time
//!   over the cable, is copied. Heads come first: a row is of no use without those before it.
//! - *It would be lost.* A node whose drive is [`NEARLY_FULL`] offers its coldest rows. A node with room takes them
//!   over, and gives them the least standing among its own. When the first one drops them they are still there.
//!
//! Copies wait for an idle moment, never take more than a rate, and never more than a share of the capacity. Nothing
//! here is remembered over a restart: what is used is learned again within two uses.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use crate::base::block::{RowKey, Space};
use crate::base::clock::Micros;
use crate::base::units::Bytes;

/// Uses over the cable after which a row is copied. The first may be a session that only passes through.
pub const OFTEN: u16 = 2;

/// Rows whose uses are counted, and rows that wait: a long session has some thousands. 60 bytes each.
pub const REMEMBERED: usize = 1 << 16;

/// Percent of the capacity in use at which a node offers its coldest rows.
pub const NEARLY_FULL: u64 = 90;

/// Percent of the capacity in use up to which a node takes rows over: well below where it would offer them itself.
pub const HAS_ROOM: u64 = 75;

/// Between two offers.
pub const OFFERS: Duration = Duration::from_secs(10);

/// What an operator allows.
#[derive(Clone, Copy, Debug)]
pub struct Sharing {
    /// Copy rows that both nodes use.
    pub copy: bool,
    /// Offer cold rows when nearly full, and take over those of others.
    pub take_over: bool,
    /// Bytes per second, for both together.
    pub rate: Bytes,
    /// Percent of the capacity that copies may take.
    pub share: u32,
}

impl Default for Sharing {
    fn default() -> Self {
        Self { copy: true, take_over: true, rate: Bytes::mib(128), share: 25 }
    }
}

/// A row that may be copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    pub key: RowKey,
    /// Tokens of its prompt up to its end.
    pub position: u32,
    /// The name under whose key a copy is sealed: whose request used it here, or whose it is where it is offered. None:
    /// nobody knows, or it lies there in the clear.
    pub owner: Option<Arc<str>>,
}

/// Why a row is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    Used,
    Offered,
}

impl Why {
    pub fn label(self) -> &'static str {
        match self {
            Self::Used => "used",
            Self::Offered => "offered",
        }
    }
}

/// How the own drive is.
#[derive(Clone, Copy, Debug)]
pub struct Drive {
    pub used: u64,
    pub capacity: u64,
    pub row_bytes: u64,
}

impl Drive {
    fn is_below(&self, percent: u64) -> bool {
        u128::from(self.used) * 100 < u128::from(self.capacity) * u128::from(percent)
    }

    /// Rows in so many percent of the capacity.
    fn rows_in(&self, percent: u32) -> usize {
        let bytes = u128::from(self.capacity) * u128::from(percent.min(100)) / 100;
        usize::try_from(bytes / u128::from(self.row_bytes.max(1))).unwrap_or(usize::MAX)
    }
}

/// Rows to be copied now, in the order of their positions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    pub why: Why,
    pub rows: Vec<Row>,
}

impl Batch {
    /// Takes rows until there are `most` that are to be copied.
    fn of(
        why: Why,
        next: impl Iterator<Item = Row>,
        most: usize,
        fresh: impl Fn(&RowKey) -> bool,
    ) -> Option<Self> {
        let rows: Vec<_> = next.filter(|row| fresh(&row.key)).take(most).collect();
        (!rows.is_empty()).then_some(Self { why, rows })
    }
}

#[derive(Clone, Copy, Debug)]
struct Use {
    count: u16,
    last: Micros,
}

/// What is to be copied. Of one space: another engine begins anew.
#[derive(Debug)]
pub struct Share {
    space: Option<Space>,
    sharing: Sharing,
    uses: HashMap<RowKey, Use>,
    wanted: BTreeMap<(u32, RowKey), Option<Arc<str>>>,
    offered: VecDeque<Row>,
    /// Copies that were made because both use them.
    copies: HashSet<RowKey>,
    /// Bytes that may be fetched now, and since when that is so.
    purse: u64,
    filled: Micros,
    offers_at: Micros,
}

impl Share {
    pub fn new(sharing: Sharing) -> Self {
        Self {
            space: None,
            sharing,
            uses: HashMap::new(),
            wanted: BTreeMap::new(),
            offered: VecDeque::new(),
            copies: HashSet::new(),
            purse: 0,
            filled: Micros(0),
            offers_at: Micros(0),
        }
    }

    /// Rows of this space are meant from now on. Another one begins anew; the same goes on.
    pub fn set_space(&mut self, space: Space) {
        let Self { sharing, purse, filled, offers_at, .. } = *self;
        if self.space != Some(space) {
            *self = Self { space: Some(space), purse, filled, offers_at, ..Self::new(sharing) };
        }
    }

    /// A request here, of this owner, has used these rows, which only other nodes hold.
    pub fn on_used(
        &mut self,
        now: Micros,
        owner: Option<&Arc<str>>,
        rows: impl Iterator<Item = (RowKey, u32)>,
    ) {
        if !self.sharing.copy {
            return;
        }
        for (key, position) in rows {
            let seen = self.uses.entry(key).or_insert(Use { count: 0, last: now });
            *seen = Use { count: seen.count.saturating_add(1), last: now };
            if seen.count >= OFTEN && self.wanted.len() < REMEMBERED {
                self.wanted.insert((position, key), owner.cloned());
            }
        }
        if self.uses.len() > REMEMBERED {
            // The half that was used last stays.
            let mut ages: Vec<Micros> = self.uses.values().map(|seen| seen.last).collect();
            let (_, median, _) = ages.select_nth_unstable(REMEMBERED / 2);
            let median = *median;
            self.uses.retain(|_, seen| seen.last > median);
        }
    }

    /// Another node would drop these rows.
    pub fn on_offer(&mut self, rows: impl Iterator<Item = Row>) {
        if self.sharing.take_over {
            self.offered.extend(rows.take(REMEMBERED.saturating_sub(self.offered.len())));
        }
    }

    /// Nothing is copied for this owner any more.
    pub fn on_owner_forgotten(&mut self, owner: &str) {
        self.wanted.retain(|_, of| of.as_deref() != Some(owner));
        self.offered.retain(|row| row.owner.as_deref() != Some(owner));
    }

    /// Whether it is time to offer cold rows.
    pub fn offers(&mut self, now: Micros, drive: Drive) -> bool {
        if !self.sharing.take_over || now < self.offers_at || drive.is_below(NEARLY_FULL) {
            return false;
        }
        self.offers_at = now.plus(OFFERS);
        true
    }

    /// The next rows to copy, `most` at most; to be asked in an idle moment. `here` and `there` say who holds a row.
    pub fn next(
        &mut self,
        now: Micros,
        drive: Drive,
        most: usize,
        here: impl Fn(&RowKey) -> bool,
        there: impl Fn(&RowKey) -> bool,
    ) -> Option<Batch> {
        self.earn(now, drive.row_bytes);
        let most = most.min(usize::try_from(self.purse / drive.row_bytes.max(1)).unwrap_or(usize::MAX));
        if most == 0 || (self.wanted.is_empty() && self.offered.is_empty()) {
            return None;
        }
        let fresh = |key: &RowKey| !here(key) && there(key);
        let batch = self
            .used_batch(drive, most, &here, &fresh)
            .or_else(|| self.offered_batch(drive, most, &fresh))?;
        self.purse -= batch.rows.len() as u64 * drive.row_bytes;
        Some(batch)
    }

    fn used_batch(
        &mut self,
        drive: Drive,
        most: usize,
        here: &impl Fn(&RowKey) -> bool,
        fresh: &impl Fn(&RowKey) -> bool,
    ) -> Option<Batch> {
        if self.wanted.is_empty() {
            return None;
        }
        let limit = drive.rows_in(self.sharing.share);
        if self.copies.len() >= limit {
            // Some may have made room meanwhile.
            self.copies.retain(here);
        }
        let most = most.min(limit.saturating_sub(self.copies.len()));
        if most == 0 {
            // Copies that do not fit are not kept waiting: the next use asks again.
            self.wanted.clear();
            return None;
        }
        let next = std::iter::from_fn(|| self.wanted.pop_first());
        let next = next.map(|((position, key), owner)| Row { key, position, owner });
        Batch::of(Why::Used, next, most, fresh)
    }

    fn offered_batch(
        &mut self,
        drive: Drive,
        most: usize,
        fresh: &impl Fn(&RowKey) -> bool,
    ) -> Option<Batch> {
        if !drive.is_below(HAS_ROOM) {
            self.offered.clear();
            return None;
        }
        Batch::of(Why::Offered, std::iter::from_fn(|| self.offered.pop_front()), most, fresh)
    }

    /// Rows that were copied.
    pub fn on_copied(&mut self, why: Why, keys: impl Iterator<Item = RowKey>) {
        for key in keys {
            self.uses.remove(&key);
            if why == Why::Used {
                self.copies.insert(key);
            }
        }
    }

    /// A load came in between: the rows are to be copied later.
    pub fn on_interrupted(&mut self, batch: Batch) {
        match batch.why {
            Why::Used => {
                self.wanted.extend(batch.rows.into_iter().map(|row| ((row.position, row.key), row.owner)));
            }
            Why::Offered => batch.rows.into_iter().rev().for_each(|row| self.offered.push_front(row)),
        }
    }

    /// A second's worth at most, or one row: idle hours are not saved up for a burst.
    fn earn(&mut self, now: Micros, row_bytes: u64) {
        let micros = u128::from(now.0.saturating_sub(self.filled.0));
        let earned = micros * u128::from(self.sharing.rate.0) / 1_000_000;
        if earned == 0 {
            return;
        }
        let earned = u64::try_from(earned).unwrap_or(u64::MAX);
        self.purse = self.purse.saturating_add(earned).min(self.sharing.rate.0.max(row_bytes));
        self.filled = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::block::{BlockHash, GroupId};

    const ROW: u64 = 1 << 20;

    fn key(n: u32) -> RowKey {
        let mut hash = [0; 32];
        hash[..4].copy_from_slice(&n.to_be_bytes());
        RowKey { hash: BlockHash(hash), group: GroupId(0) }
    }

    fn chain(which: std::ops::Range<u32>) -> impl Iterator<Item = (RowKey, u32)> {
        which.map(|n| (key(n), (n + 1) * 16))
    }

    fn rows(which: std::ops::Range<u32>) -> impl Iterator<Item = Row> {
        chain(which).map(|(key, position)| Row { key, position, owner: None })
    }

    fn drive(percent: u64) -> Drive {
        Drive { used: percent * ROW * 10, capacity: 1000 * ROW, row_bytes: ROW }
    }

    fn at(seconds: u64) -> Micros {
        Micros(seconds * 1_000_000)
    }

    /// What is copied when it all is elsewhere and nothing here.
    fn next(share: &mut Share, seconds: u64, percent: u64, most: usize) -> Option<(Why, Vec<u32>)> {
        let batch = share.next(at(seconds), drive(percent), most, |_| false, |_| true)?;
        Some((batch.why, batch.rows.iter().map(|row| row.position / 16 - 1).collect()))
    }

    #[test]
    fn a_row_is_copied_after_its_second_use_over_the_cable_heads_first() {
        let mut share = Share::new(Sharing::default());
        share.on_used(at(1), None, chain(0..6));
        assert_eq!(next(&mut share, 10, 50, 4), None, "used once");
        share.on_used(at(11), None, chain(3..6));
        share.on_used(at(11), None, chain(0..3));
        assert_eq!(next(&mut share, 12, 50, 4), Some((Why::Used, vec![0, 1, 2, 3])));
        assert_eq!(next(&mut share, 13, 50, 4), Some((Why::Used, vec![4, 5])));
        assert_eq!(next(&mut share, 14, 50, 4), None);
    }

    #[test]
    fn what_is_here_already_or_nowhere_else_is_not_copied() {
        let mut share = Share::new(Sharing::default());
        share.on_used(at(1), None, chain(0..6));
        share.on_used(at(2), None, chain(0..6));
        let batch = share.next(at(3), drive(50), 10, |k| *k == key(0), |k| *k != key(5)).unwrap();
        assert_eq!(batch.rows, rows(1..5).collect::<Vec<_>>());
    }

    #[test]
    fn copies_keep_to_their_rate_and_their_share() {
        let sharing = Sharing { rate: Bytes(3 * ROW), share: 1, ..Sharing::default() };
        let mut share = Share::new(sharing);
        let used = |share: &mut Share| (0..2).for_each(|_| share.on_used(at(1), None, chain(0..100)));
        used(&mut share);
        let first = next(&mut share, 100, 50, 50).unwrap();
        assert_eq!(first.1, [0, 1, 2], "a second's worth, however long it was idle");
        assert_eq!(next(&mut share, 100, 50, 50), None, "the purse is empty");
        share.on_copied(Why::Used, chain(0..3).map(|(k, _)| k));
        let mut held: HashSet<RowKey> = chain(0..3).map(|(k, _)| k).collect();
        for second in 101..200 {
            if let Some(batch) = share.next(at(second), drive(50), 50, |k| held.contains(k), |_| true) {
                held.extend(batch.rows.iter().map(|row| row.key));
                share.on_copied(batch.why, batch.rows.into_iter().map(|row| row.key));
            }
        }
        assert_eq!(held.len(), 10);
        assert_eq!(share.copies.len(), 10, "one percent of a thousand rows");
        used(&mut share);
        // Three of them have gone from the drive since.
        let batch = share.next(at(300), drive(50), 50, |k| *k >= key(3), |_| true);
        assert_eq!(batch.map(|b| b.rows), Some(rows(0..3).collect()));
    }

    #[test]
    fn a_row_larger_than_a_seconds_worth_still_comes() {
        let mut share = Share::new(Sharing { rate: Bytes(ROW / 4), ..Sharing::default() });
        (0..2).for_each(|_| share.on_used(at(0), None, chain(0..2)));
        let came: Vec<u64> = (1..10).filter(|&s| next(&mut share, s, 50, 8).is_some()).collect();
        assert_eq!(came, [4, 8]);
    }

    #[test]
    fn offers_are_made_when_nearly_full_and_taken_while_there_is_room() {
        let mut share = Share::new(Sharing::default());
        assert!(!share.offers(at(1), drive(89)));
        assert!(share.offers(at(1), drive(90)));
        assert!(!share.offers(at(5), drive(99)), "not at once again");
        assert!(share.offers(at(11), drive(99)));
        share.on_offer(rows(0..4));
        assert_eq!(next(&mut share, 12, 74, 3), Some((Why::Offered, vec![0, 1, 2])));
        assert_eq!(next(&mut share, 13, 75, 3), None, "it has no room itself");
        assert_eq!(next(&mut share, 14, 10, 3), None, "and forgets what it was offered");
    }

    #[test]
    fn what_is_turned_off_does_not_happen() {
        let mut share = Share::new(Sharing { copy: false, take_over: false, ..Sharing::default() });
        (0..3).for_each(|n| share.on_used(at(n), None, chain(0..4)));
        share.on_offer(rows(0..4));
        assert_eq!(next(&mut share, 10, 10, 9), None);
        assert!(!share.offers(at(10), drive(99)));
    }

    #[test]
    fn a_copy_is_for_whoever_used_it_or_whose_it_was_until_that_owner_is_forgotten() {
        let mut share = Share::new(Sharing::default());
        let (ann, bob): (Arc<str>, Arc<str>) = ("ann".into(), "bob".into());
        (0..2).for_each(|_| share.on_used(at(1), Some(&ann), chain(0..2)));
        (0..2).for_each(|_| share.on_used(at(1), Some(&bob), chain(2..4)));
        share.on_offer(rows(4..6).map(|row| Row { owner: Some(bob.clone()), ..row }));
        share.on_owner_forgotten("bob");
        let batch = share.next(at(5), drive(10), 9, |_| false, |_| true).unwrap();
        assert_eq!(batch.rows, rows(0..2).map(|r| Row { owner: Some(ann.clone()), ..r }).collect::<Vec<_>>());
        share.on_interrupted(batch.clone());
        assert_eq!(share.next(at(6), drive(10), 9, |_| false, |_| true), Some(batch), "with its owner");
        assert_eq!(share.next(at(7), drive(10), 9, |_| false, |_| true), None);
    }

    #[test]
    fn an_interrupted_batch_comes_again() {
        let mut share = Share::new(Sharing::default());
        (0..2).for_each(|_| share.on_used(at(1), None, chain(0..3)));
        share.on_offer(rows(10..13));
        for why in [Why::Used, Why::Offered] {
            let batch = share.next(at(5), drive(10), 3, |_| false, |_| true).unwrap();
            assert_eq!(batch.why, why);
            share.on_interrupted(batch.clone());
            assert_eq!(share.next(at(6), drive(10), 3, |_| false, |_| true), Some(batch));
        }
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut share = Share::new(Sharing::default());
        let step = 1 << 14;
        for n in 0..32 {
            (0..2).for_each(|_| share.on_used(at(n.into()), None, chain(n * step..(n + 1) * step)));
            share.on_offer(rows(n * step..(n + 1) * step));
            assert!(share.uses.len() <= REMEMBERED + step as usize);
            assert!(share.wanted.len() <= REMEMBERED && share.offered.len() <= REMEMBERED);
        }
        assert!(share.uses.contains_key(&key(32 * step - 1)), "the last ones stay");
    }
}
