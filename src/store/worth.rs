//! What a row is worth, and with it what goes when room is needed. Pure.
//!
//! A row's worth is what it costs to compute it again, times how likely it is needed again, per byte that it takes:
//!
//! ```text
//! worth = tokens / bytes · (fresh + AGAIN · uses) / (age + PAUSE) · standing   [1 / (byte · s)]
//! ```
//!
//! *Cost.* A token far behind costs more to compute than one at the front (attention grows with the position), but a
//! row is of use only while every row before it is there: it is best to keep or lose a chain as one, and all of its
//! rows count the same. At equal worth the tail goes first. A factor for the length of a chain was tried and made
//! recorded coding sessions worse (docs/sim-policies.md): a long session that is over outlived short ones that go on.
//!
//! *Likelihood.* Time to the next use has a heavy tail: the longer ago the last one, the less likely is one in the
//! next second, about as 1 / age. [`PAUSE`] keeps that from exploding for young rows: most reuse comes within ten
//! minutes (`KVCache in the Wild`, ATC 2025: 80 % of it in their interactive trace). Uses count what recency cannot
//! see: a chain that leaves another one in its middle is one more sharer of everything before ([`BRANCH`]). A chain
//! that goes on where it ended is one session's next turn: that is recency's to say. Uses halve every [`HALF_LIFE`],
//! so that yesterday's do not rule, and weigh little ([`AGAIN`]): counted in full they lost twice what recency alone
//! does (docs/sim-policies.md). `fresh` stands for rows that were never used again; it is learned
//! from those that go: the share that was ([`Fresh`]). A dump of one long session is worth what a row that nobody came
//! back for is worth, however large it is, and an anchor with sharers stays: scan resistance.
//!
//! *Standing.* Rows of spaces without an engine go first (they wait for an engine that may not come back), expired
//! rows before everything. A state of a recurrent layer is needed where prompts end or part; between, it is thinned.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BinaryHeap};

use super::format::record_bytes;
use super::index::{Heat, Index, Place};
use crate::base::block::{GroupId, RowKey, Space};

/// What a use counts beside `fresh`: with it an anchor of five sessions outlives a dump that is two hours younger.
pub const AGAIN: f32 = 0.05;
/// Seconds that an age is lengthened by.
pub const PAUSE: f32 = 600.0;
/// Seconds after which uses count half.
pub const HALF_LIFE: f32 = 3600.0;
/// Uses are counted in quarters.
const ONE: u16 = 4;
pub const BRANCH: u16 = 4 * ONE;
/// Uses count up to here.
const USES_MAX: u16 = 64 * ONE;
/// Worth of rows of spaces without an engine, beside those with one.
const LEFT: f32 = 1e-6;
/// Worth of a state that no prompt ended or parted at.
const THIN: f32 = 1.0 / 16.0;
/// Tokens of a row whose engine has not told: a page of its usual block size.
const TOKENS: u32 = 16;

/// Some chain ends here, at its last use.
const END: u16 = 1;
/// A chain has left another one here.
const PARTS: u16 = 2;
/// It was in a chain that a request has used.
const CHAINED: u16 = 4;
/// A request has found it, after the one that made it.
const USED: u16 = 8;

/// Uses that still count, in units of [`ONE`].
fn uses(heat: &Heat, now: u32) -> f32 {
    f32::from(heat.uses) * (-(now.saturating_sub(heat.last) as f32) / HALF_LIFE).exp2()
}

/// A row that was just stored, or found at a start and stored at `now`. `back`: it was here before, and went.
pub fn born(now: u32, back: bool) -> Heat {
    Heat { last: now, uses: if back { ONE } else { 0 }, flags: 0 }
}

/// A request has used this chain.
pub fn touch(index: &mut Index, space: &Space, chain: &[(RowKey, u32)], now: u32) {
    let mut groups: BTreeMap<GroupId, Vec<(u32, RowKey)>> = BTreeMap::new();
    for (key, position) in chain {
        if index.get(space, key).is_some() {
            groups.entry(key.group).or_default().push((*position, *key));
        }
    }
    for rows in groups.values_mut() {
        rows.sort_unstable();
        touch_group(index, space, rows, now);
    }
}

fn touch_group(index: &mut Index, space: &Space, rows: &[(u32, RowKey)], now: u32) {
    let flags = |index: &Index, key| index.heat(space, key).map_or(0, |heat| heat.flags);
    // Where an earlier chain and this one have been together last.
    let known = rows.iter().rposition(|(_, key)| flags(index, key) & CHAINED != 0);
    let appends = known.is_some_and(|at| flags(index, &rows[at].1) & END != 0);
    let step = if appends { 0 } else { BRANCH };
    for (at, (_, key)) in rows.iter().enumerate() {
        let Some(heat) = index.heat_mut(space, key) else { continue };
        let mut flags = heat.flags | CHAINED;
        heat.uses = uses(heat, now).round() as u16;
        if known.is_some_and(|known| at <= known) {
            heat.uses = (heat.uses + step).min(USES_MAX);
            flags |= USED;
        }
        if known == Some(at) {
            flags = if appends { flags & !END } else { flags | PARTS };
        }
        if at + 1 == rows.len() {
            flags |= END;
        }
        heat.flags = flags;
        heat.last = heat.last.max(now);
    }
}

/// What is known of a row's group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    pub tokens: u32,
    /// It is a state: of use where a prompt ends or parts, not as one of many.
    pub state: bool,
}

impl Default for Kind {
    fn default() -> Self {
        Self { tokens: TOKENS, state: false }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// An engine of its space is attached.
    Attached,
    /// None is.
    Left,
    /// Its time to live is over.
    Expired,
}

/// Worth of one byte of a row's record, in tokens of prefill per byte and second.
pub fn density(heat: &Heat, place: &Place, kind: Kind, standing: Standing, fresh: f32, now: u32) -> f32 {
    let standing = match standing {
        Standing::Attached => 1.0,
        Standing::Left => LEFT,
        Standing::Expired => return 0.0,
    };
    let age = now.saturating_sub(heat.last) as f32;
    let likely = (fresh + AGAIN * uses(heat, now) / f32::from(ONE)) / (age + PAUSE);
    let cost = kind.tokens as f32 / record_bytes(place.length) as f32;
    let thin = if kind.state && heat.flags & (END | PARTS) == 0 { THIN } else { 1.0 };
    cost * likely * thin * standing
}

/// How likely a row that was never used again is to be: learned from the rows that go.
#[derive(Clone, Copy, Debug)]
pub struct Fresh(f32);

impl Default for Fresh {
    fn default() -> Self {
        Self(0.5)
    }
}

impl Fresh {
    /// Weight of the rows that go at one time.
    const STEP: f32 = 0.1;
    const LEAST: f32 = 0.1;

    pub fn get(self) -> f32 {
        self.0.max(Self::LEAST)
    }

    /// These rows have gone: learns how many of them had been used again.
    pub fn learn<'a>(&mut self, gone: impl Iterator<Item = &'a Heat>) {
        let (mut rows, mut used) = (0_u32, 0_u32);
        for heat in gone {
            rows += 1;
            used += u32::from(heat.flags & USED != 0);
        }
        if rows > 0 {
            self.0 += Self::STEP * (used as f32 / rows as f32 - self.0);
        }
    }
}

/// One row that may make room.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    pub space: Space,
    pub key: RowKey,
    pub place: Place,
    pub density: f32,
    /// When it was used last: whoever was used since is not the same candidate any more.
    pub last: u32,
}

impl Candidate {
    pub fn bytes(&self) -> u64 {
        record_bytes(self.place.length)
    }

    /// Worth least first. At equal worth the tail goes before the head.
    fn order(&self, other: &Self) -> Ordering {
        let (one, two) = (&self.place, &other.place);
        let worth = self.density.total_cmp(&other.density).then(two.position.cmp(&one.position));
        worth.then_with(|| (one.sequence, one.page).cmp(&(two.sequence, two.page)))
    }
}

/// For a heap whose top is worth most.
#[derive(Debug)]
struct Ranked(Candidate);

impl PartialEq for Ranked {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Ranked {}

impl PartialOrd for Ranked {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Ranked {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.order(&other.0)
    }
}

/// Of many rows those that are worth least, as many as take so many bytes: one pass, and memory for those alone.
#[derive(Debug)]
pub struct Least {
    want: u64,
    have: u64,
    rows: BinaryHeap<Ranked>,
}

impl Least {
    pub fn new(want: u64) -> Self {
        Self { want, have: 0, rows: BinaryHeap::new() }
    }

    pub fn offer(&mut self, row: Candidate) {
        if self.have >= self.want && self.rows.peek().is_none_or(|top| row.order(&top.0).is_gt()) {
            return;
        }
        self.have += row.bytes();
        self.rows.push(Ranked(row));
        while let Some(top) = self.rows.peek().map(|top| top.0.bytes())
            && self.have - top >= self.want
        {
            self.rows.pop();
            self.have -= top;
        }
    }

    /// Worth least first.
    pub fn into_rows(self) -> Vec<Candidate> {
        self.rows.into_sorted_vec().into_iter().map(|ranked| ranked.0).collect()
    }
}

/// Rows that went or were refused, as hashes: whoever is in here and comes again was missed. Takes 8 bytes for each,
/// forgets the oldest of a bucket for a new one.
#[derive(Debug, Default)]
pub struct Ghosts {
    slots: Vec<u64>,
    next: u8,
}

impl Ghosts {
    const WAYS: usize = 4;

    fn hash(space: &Space, key: &RowKey) -> u64 {
        // The key is a digest already: its first bytes are as good as any hash, and the rest tells spaces apart.
        let word = |bytes: &[u8; 32]| u64::from_le_bytes(bytes[..8].try_into().expect("8 of 32"));
        let rank = u64::from(space.rank.index) << 32 | u64::from(key.group.0);
        let mixed = word(&key.hash.0)
            ^ word(&space.namespace.0).rotate_left(17)
            ^ rank.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        mixed.max(1)
    }

    fn bucket(&self, hash: u64) -> std::ops::Range<usize> {
        let buckets = self.slots.len() / Self::WAYS;
        let at = (hash.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as usize % buckets * Self::WAYS;
        at..at + Self::WAYS
    }

    /// Makes room for about as many as rows are held. What was there is kept as far as it fits.
    pub fn fit(&mut self, rows: u64) {
        let wanted = usize::try_from(rows).unwrap_or(0).next_power_of_two().clamp(1024, 1 << 24);
        if wanted > self.slots.len() {
            let old = std::mem::replace(&mut self.slots, vec![0; wanted]);
            old.into_iter().filter(|hash| *hash != 0).for_each(|hash| self.put(hash));
        }
    }

    fn put(&mut self, hash: u64) {
        let bucket = self.bucket(hash);
        let slots = &mut self.slots[bucket];
        if slots.contains(&hash) {
            return;
        }
        self.next = self.next.wrapping_add(1);
        let at = slots.iter().position(|slot| *slot == 0).unwrap_or(usize::from(self.next) % Self::WAYS);
        slots[at] = hash;
    }

    pub fn add(&mut self, space: &Space, key: &RowKey) {
        if !self.slots.is_empty() {
            self.put(Self::hash(space, key));
        }
    }

    /// Whether it was here. It is not any more.
    pub fn take(&mut self, space: &Space, key: &RowKey) -> bool {
        if self.slots.is_empty() {
            return false;
        }
        let hash = Self::hash(space, key);
        let bucket = self.bucket(hash);
        match self.slots[bucket].iter_mut().find(|slot| **slot == hash) {
            Some(slot) => {
                *slot = 0;
                true
            }
            None => false,
        }
    }

    /// One row in eight is let in whatever it is worth: without trying, nothing would be learned.
    pub fn is_lucky(space: &Space, key: &RowKey) -> bool {
        Self::hash(space, key).rotate_left(13).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 61 == 0
    }
}

#[cfg(test)]
mod tests {
    use super::super::format::Sequence;
    use super::*;
    use crate::base::block::{BlockHash, Namespace, Rank};
    use proptest::prelude::*;

    const SPACE: Space = Space { namespace: Namespace([1; 32]), rank: Rank::ONLY };
    const LENGTH: u32 = 65_536;

    fn key(n: u32) -> RowKey {
        let mut hash = [9; 32];
        hash[..4].copy_from_slice(&n.to_le_bytes());
        RowKey { hash: BlockHash(hash), group: GroupId(0) }
    }

    fn place(n: u32) -> Place {
        Place { sequence: Sequence(1), page: n + 1, length: LENGTH, position: (n % 1000 + 1) * 16, seal: 0 }
    }

    /// Rows `session · 1000 ..` hang on the rows `0 .. anchor`.
    fn chain(anchor: u32, session: u32, length: u32) -> Vec<(RowKey, u32)> {
        let rows = (0..anchor).chain((anchor..length).map(|n| session * 1000 + n));
        rows.zip(1..).map(|(n, at)| (key(n), at * 16)).collect()
    }

    /// A request: what it uses, what it stores.
    fn request(index: &mut Index, chain: &[(RowKey, u32)], now: u32) {
        for (n, (key, position)) in chain.iter().enumerate() {
            if index.get(&SPACE, key).is_none() {
                index.add(SPACE, *key, Place { position: *position, ..place(n as u32) });
                *index.heat_mut(&SPACE, key).unwrap() = born(now, false);
            }
        }
        touch(index, &SPACE, chain, now);
    }

    fn worth(index: &Index, key: &RowKey, now: u32) -> f32 {
        let (heat, place) = (index.heat(&SPACE, key).unwrap(), index.get(&SPACE, key).unwrap());
        density(&heat, &place, Kind::default(), Standing::Attached, Fresh::default().get(), now)
    }

    #[test]
    fn a_head_is_never_worth_less_than_what_hangs_on_it() {
        let mut index = Index::default();
        for now in 0..200 {
            let session = now % 7 + 1;
            request(&mut index, &chain(20, session, 30 + now), now * 50);
        }
        for session in 1..=7 {
            let worths: Vec<_> =
                chain(20, session, 200).iter().map(|(key, _)| worth(&index, key, 10_000)).collect();
            assert!(worths.is_sorted_by(|a, b| a >= b), "{worths:?}");
        }
    }

    #[test]
    fn a_shared_anchor_outlives_a_large_dump_and_a_long_session() {
        let mut index = Index::default();
        for session in 1..=6 {
            request(&mut index, &chain(20, session, 40), session * 60);
        }
        for turn in 0..50 {
            request(&mut index, &chain(0, 8, 100 + turn * 10), 400 + turn * 10);
        }
        request(&mut index, &chain(0, 9, 900), 1000);
        for minutes in [17, 30, 60, 120] {
            let anchor = worth(&index, &key(3), minutes * 60);
            assert!(anchor > worth(&index, &key(9003), minutes * 60), "the dump, after {minutes} minutes");
        }
        let (anchor, session) = (worth(&index, &key(3), 4000), worth(&index, &key(8003), 4000));
        assert!(anchor > session, "one session's turns are no sharers: {anchor} {session}");
    }

    #[test]
    fn uses_fade_and_age_counts() {
        let mut index = Index::default();
        for session in 1..=6 {
            request(&mut index, &chain(20, session, 40), session);
        }
        let worths: Vec<_> = (1..40).map(|hour| worth(&index, &key(3), hour * 3600)).collect();
        assert!(worths.is_sorted_by(|a, b| a > b), "{worths:?}");
        request(&mut index, &chain(0, 9, 40), 86_400);
        assert!(
            worth(&index, &key(9001), 86_400) > 10.0 * worth(&index, &key(3), 86_400),
            "yesterday's do not rule"
        );
    }

    #[test]
    fn standing_goes_before_worth() {
        let (fresh, now) = (0.5, 1_000_000);
        let hot = Heat { uses: USES_MAX, ..born(now, true) };
        let cold = born(0, false);
        let of = |heat, standing| density(heat, &place(1), Kind::default(), standing, fresh, now);
        assert!(of(&hot, Standing::Left) < of(&cold, Standing::Attached));
        assert!(of(&cold, Standing::Left) < of(&hot, Standing::Left), "older generations first");
        assert_eq!(of(&hot, Standing::Expired), 0.0);
    }

    #[test]
    fn states_are_kept_where_prompts_end_or_part() {
        let mut index = Index::default();
        request(&mut index, &chain(20, 1, 40), 10);
        request(&mut index, &chain(20, 2, 40), 20);
        let state = |n| {
            let heat = index.heat(&SPACE, &key(n)).unwrap();
            let kind = Kind { tokens: 16, state: true };
            density(&heat, &place(n), kind, Standing::Attached, 0.5, 30)
        };
        let (between, parts, end) = (state(1025), state(19), state(1039));
        assert!(parts > 8.0 * between && end > 8.0 * between, "{between} {parts} {end}");
        assert!(state(10) < parts);
    }

    fn candidate(n: u32, density: f32) -> Candidate {
        Candidate { space: SPACE, key: key(n), place: place(n), density, last: 0 }
    }

    fn least(want: u64, rows: &[Candidate]) -> Vec<u32> {
        let mut least = Least::new(want);
        rows.iter().for_each(|row| least.offer(*row));
        least.into_rows().iter().map(|row| row.place.page - 1).collect()
    }

    #[test]
    fn those_worth_least_are_found_in_one_pass_and_no_more_than_are_needed() {
        let record = record_bytes(LENGTH);
        let rows: Vec<_> =
            [5.0, 1.0, 9.0, 1.0, 0.0, 3.0].into_iter().zip(0..).map(|(d, n)| candidate(n, d)).collect();
        assert_eq!(least(3 * record, &rows), [4, 3, 1], "the tail of two equals first");
        assert_eq!(least(2 * record + 1, &rows), [4, 3, 1], "enough, and not one more");
        assert_eq!(least(2 * record, &rows), [4, 3]);
        assert_eq!(least(0, &rows), [0; 0]);
        assert_eq!(least(u64::MAX, &rows), [4, 3, 1, 5, 0, 2], "all there are");
    }

    proptest! {
        #[test]
        fn one_pass_finds_what_sorting_finds(
            all in proptest::collection::vec((0..20_u8, 1..100_000_u32), 0..200),
            want in 0..4_000_000_u64,
        ) {
            let row = |(n, &(density, length)): (usize, &(u8, u32))| {
                let n = u32::try_from(n).unwrap();
                Candidate { place: Place { length, ..place(n) }, ..candidate(n, f32::from(density)) }
            };
            let rows: Vec<_> = all.iter().enumerate().map(row).collect();
            let mut sorted = rows.clone();
            sorted.sort_by(Candidate::order);
            let mut sum = 0;
            let enough = |row: &Candidate| {
                let is_needed = sum < want;
                sum += row.bytes();
                is_needed
            };
            let expected: Vec<_> =
                sorted.iter().copied().take_while(enough).map(|row| row.place.page - 1).collect();
            prop_assert_eq!(least(want, &rows), expected);
        }
    }

    #[test]
    fn ghosts_are_bounded_and_come_back_once() {
        let mut ghosts = Ghosts::default();
        ghosts.add(&SPACE, &key(1));
        assert!(!ghosts.take(&SPACE, &key(1)), "none without room");
        ghosts.fit(100);
        ghosts.add(&SPACE, &key(1));
        ghosts.fit(5000);
        assert!(ghosts.take(&SPACE, &key(1)) && !ghosts.take(&SPACE, &key(1)));
        (0..50_000).for_each(|n| ghosts.add(&SPACE, &key(n)));
        assert_eq!(ghosts.slots.len(), 8192);
        let kept = (45_000..50_000).filter(|n| ghosts.take(&SPACE, &key(*n))).count();
        assert!(kept > 2500, "{kept} of the newest 5000");
        let lucky = (0..8000).filter(|n| Ghosts::is_lucky(&SPACE, &key(*n))).count();
        assert!((800..1200).contains(&lucky), "{lucky}");
    }

    #[test]
    fn what_a_lone_row_is_worth_is_learned_from_those_that_go() {
        let mut fresh = Fresh::default();
        let (used, never) = (Heat { flags: USED, ..Heat::default() }, Heat::default());
        (0..100).for_each(|_| fresh.learn([used, never, never, never].iter()));
        assert!((fresh.get() - 0.25).abs() < 0.01);
        (0..100).for_each(|_| fresh.learn([never].iter()));
        assert_eq!(fresh.get(), Fresh::LEAST);
        fresh.learn([].iter());
    }
}
