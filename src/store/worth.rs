//! What a row is worth, and with it what goes when room is needed. Pure.
//!
//! A row's worth is what it costs to compute it again, times how likely it is needed again, per byte that it takes:
//!
//! ```text
//! worth = tokens / bytes · min(1 + reach / 2·KNEE, DEAREST) · (fresh + uses) / (age + PAUSE) · standing  [1 / (byte · s)]
//! ```
//!
//! *Cost.* Prefill of one token costs 24·d² operations per layer in the matrices and 8·l·d in attention at position l
//! (the derivative of Marconi's 16·l·d² + 8·l·d² + 4·l²·d, MLSys 2025), so its cost is 1 + l / 3d in units of a token
//! at the front; [`KNEE`] is that 3d, for d = 4096 and rounded up. A row is of use only while every row before it is
//! there, and later rows are dearer: then it is best to keep or lose a chain as one, at its mean cost, which is
//! 1 + reach / 2·KNEE with the chain's end as reach. So all rows of a chain cost the same, the head is never worth
//! less than what hangs on it, and at equal worth the tail goes first. [`DEAREST`] bounds the factor: in recorded coding
//! sessions (docs/sim-policies.md) recency says far more than length, and without a bound a long session that is over
//! outlives the short ones that go on.
//!
//! *Likelihood.* Time to the next use has a heavy tail: the longer ago the last one, the less likely is one in the
//! next second, about as 1 / age. [`PAUSE`] keeps that from exploding for young rows: most reuse comes within ten
//! minutes (`KVCache in the Wild`, ATC 2025: 80 % of it in their interactive trace). Uses count what recency cannot
//! see: a chain that leaves another one in its middle is one more sharer of everything before and counts much
//! ([`BRANCH`]). A chain that goes on where it ended is one session's next turn: that is recency's to say, and counting
//! it made room worse than by age alone, because the heads of long dead sessions stayed. They
//! halve every [`HALF_LIFE`], so that yesterday's do not rule. `fresh` stands for rows that were never used again; it
//! is learned from those that go: the share that was ([`Fresh`]). A dump of one long session is worth what a row
//! that nobody came back for is worth, however large it is, and an anchor with sharers stays: scan resistance.
//!
//! *Standing.* Rows of spaces without an engine go first (they wait for an engine that may not come back), expired
//! rows before everything. A state of a recurrent layer is needed where prompts end or part; between, it is thinned.

use std::collections::BTreeMap;

use super::format::{Sequence, record_bytes};
use super::index::{Heat, Index, Place};
use crate::base::block::{GroupId, RowKey, Space};

/// Position, in tokens, at which attention costs as much as everything else.
pub const KNEE: f32 = 16_384.0;
/// Most that the cost of a token grows by its chain.
pub const DEAREST: f32 = 2.0;
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
/// High byte of the flags: how far the longest chain through the row goes, as twelfths of a power of two.
const REACH_SHIFT: u32 = 8;

fn reach_code(tokens: u32) -> u16 {
    // At most 12 · 32, cut to a byte: 2^21 tokens.
    ((tokens.max(1) as f32).log2() * 12.0).round().min(255.0) as u16
}

fn reach(heat: &Heat) -> f32 {
    (f32::from(heat.flags >> REACH_SHIFT) / 12.0).exp2()
}

fn with_reach(flags: u16, code: u16) -> u16 {
    let code = code.max(flags >> REACH_SHIFT);
    flags & ((1 << REACH_SHIFT) - 1) | code << REACH_SHIFT
}

/// Uses that still count, in units of [`ONE`].
fn uses(heat: &Heat, now: u32) -> f32 {
    f32::from(heat.uses) * (-(now.saturating_sub(heat.last) as f32) / HALF_LIFE).exp2()
}

/// A row that was just stored, or found at a start and stored at `now`. `back`: it was here before, and went.
pub fn born(position: u32, now: u32, back: bool) -> Heat {
    Heat { last: now, uses: if back { ONE } else { 0 }, flags: with_reach(0, reach_code(position)) }
}

/// A request has used this chain.
pub fn touch(index: &mut Index, space: &Space, chain: &[(RowKey, u32)], now: u32) {
    let end = chain.iter().map(|(_, position)| *position).max().unwrap_or(0);
    let mut groups: BTreeMap<GroupId, Vec<(u32, RowKey)>> = BTreeMap::new();
    for (key, position) in chain {
        if index.get(space, key).is_some() {
            groups.entry(key.group).or_default().push((*position, *key));
        }
    }
    for rows in groups.values_mut() {
        rows.sort_unstable();
        touch_group(index, space, rows, reach_code(end), now);
    }
}

fn touch_group(index: &mut Index, space: &Space, rows: &[(u32, RowKey)], code: u16, now: u32) {
    let flags = |index: &Index, key| index.heat(space, key).map_or(0, |heat| heat.flags);
    // Where an earlier chain and this one have been together last.
    let known = rows.iter().rposition(|(_, key)| flags(index, key) & CHAINED != 0);
    let appends = known.is_some_and(|at| flags(index, &rows[at].1) & END != 0);
    let step = if appends { 0 } else { BRANCH };
    for (at, (_, key)) in rows.iter().enumerate() {
        let Some(heat) = index.heat_mut(space, key) else { continue };
        let mut flags = with_reach(heat.flags, code) | CHAINED;
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
    let likely = (fresh + uses(heat, now) / f32::from(ONE)) / (age + PAUSE);
    let cost = kind.tokens as f32 / record_bytes(place.length) as f32
        * (1.0 + reach(heat) / (2.0 * KNEE)).min(DEAREST);
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
    /// Weight of one segment's rows.
    const STEP: f32 = 0.1;
    const LEAST: f32 = 0.1;

    pub fn get(self) -> f32 {
        self.0.max(Self::LEAST)
    }

    /// A segment has gone: of this many rows, so many had been used again.
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

/// One row of a segment that may make room.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    pub space: Space,
    pub key: RowKey,
    pub place: Place,
    pub density: f32,
    pub pinned: bool,
}

/// What it would take to make room with a segment.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Worth that is lost for each byte that is won.
    pub loss: f32,
    /// Rows to be copied first, in the order of their positions.
    pub moves: Vec<Candidate>,
    /// Bytes of records that these take.
    pub moved: u64,
}

/// A row is moved only when it is clearly worth more than others: moving is a read and a write.
const CLEARLY: f32 = 1.2;

/// Plans to make room with one segment of `taken` bytes. Rows worth more than `threshold` are moved, the best first,
/// as far as `budget` goes; pinned ones must be, as far as `room` goes. `None` when they do not fit.
pub fn plan(mut rows: Vec<Candidate>, taken: u64, threshold: f32, budget: u64, room: u64) -> Option<Plan> {
    // At equal worth the head before the tail.
    rows.sort_by(|a, b| {
        let worth = b.pinned.cmp(&a.pinned).then(b.density.total_cmp(&a.density));
        worth.then(a.place.position.cmp(&b.place.position))
    });
    let mut plan = Plan { loss: 0.0, moves: Vec::new(), moved: 0 };
    for row in rows {
        let bytes = record_bytes(row.place.length);
        let fits = plan.moved + bytes <= if row.pinned { room } else { budget.min(room) };
        if row.pinned && !fits {
            return None;
        }
        if fits && (row.pinned || row.density > threshold * CLEARLY) {
            plan.moved += bytes;
            plan.moves.push(row);
        } else {
            plan.loss += row.density * bytes as f32;
        }
    }
    plan.moves.sort_by_key(|row| row.place.position);
    plan.loss /= taken.saturating_sub(plan.moved).max(1) as f32;
    Some(plan)
}

/// Which segments are looked at when one must make room: those that were worth least when they were looked at last,
/// and some in turn, because worth changes. No more than [`Ranking::LOOKS`], however many there are.
#[derive(Debug, Default)]
pub struct Ranking {
    /// Worth for each byte of the segment, and for each byte of its rows.
    seen: BTreeMap<Sequence, (f32, f32)>,
    turn: Option<Sequence>,
    /// What the last segment that made room was worth.
    toll: f32,
}

impl Ranking {
    pub const LOOKS: usize = 32;

    /// Segments to look at, out of those that may make room, which ascend.
    pub fn looks(&mut self, all: &[Sequence]) -> Vec<Sequence> {
        self.seen.retain(|sequence, _| all.binary_search(sequence).is_ok());
        if all.len() <= Self::LOOKS {
            return all.to_vec();
        }
        let from = all.partition_point(|sequence| Some(*sequence) <= self.turn);
        let mut looks: Vec<_> = all.iter().cycle().skip(from).take(Self::LOOKS / 2).copied().collect();
        self.turn = looks.last().copied();
        let mut least: Vec<_> = self.seen.iter().map(|(sequence, (worth, _))| (*worth, *sequence)).collect();
        least.sort_by(|a, b| a.0.total_cmp(&b.0));
        let rest = Self::LOOKS - looks.len();
        let least: Vec<_> = least
            .into_iter()
            .map(|(_, sequence)| sequence)
            .filter(|s| !looks.contains(s))
            .take(rest)
            .collect();
        looks.extend(least);
        looks
    }

    /// What a segment of `taken` bytes was found to hold.
    pub fn note(&mut self, sequence: Sequence, rows: &[Candidate], taken: u64) {
        let bytes = |row: &Candidate| record_bytes(row.place.length) as f32;
        let worth: f32 = rows.iter().map(|row| row.density * bytes(row)).sum();
        let live: f32 = rows.iter().map(bytes).sum();
        self.seen.insert(sequence, (worth / taken.max(1) as f32, worth / live.max(1.0)));
    }

    /// The median of what rows were worth in the segments seen: rows worth clearly more are kept.
    pub fn threshold(&self) -> f32 {
        let mut all: Vec<_> = self.seen.values().map(|(_, rows)| *rows).collect();
        all.sort_by(f32::total_cmp);
        all.get(all.len() / 2).copied().unwrap_or(f32::INFINITY)
    }

    pub fn paid(&mut self, loss: f32) {
        self.toll = loss;
    }

    /// What a new row must be worth to push out others.
    pub fn toll(&self) -> f32 {
        self.toll
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
    use super::*;
    use crate::base::block::{BlockHash, Namespace, Rank};

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
                *index.heat_mut(&SPACE, key).unwrap() = born(*position, now, false);
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
        let hot = Heat { uses: USES_MAX, ..born(100_000, now, true) };
        let cold = born(16, 0, false);
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

    fn candidate(n: u32, density: f32, pinned: bool) -> Candidate {
        Candidate { space: SPACE, key: key(n), place: place(n), density, pinned }
    }

    #[test]
    fn the_best_rows_are_moved_within_the_budget_and_pinned_ones_always() {
        let record = record_bytes(LENGTH);
        let rows = vec![
            candidate(0, 1.0, false),
            candidate(1, 5.0, false),
            candidate(2, 0.0, true),
            candidate(3, 5.0, false),
            candidate(4, 9.0, false),
        ];
        let moved = |threshold, budget, room| {
            let plan = plan(rows.clone(), 10 * record, threshold, budget, room)?;
            Some(plan.moves.iter().map(|row| row.place.page - 1).collect::<Vec<_>>())
        };
        assert_eq!(moved(4.5, 9 * record, 9 * record), Some(vec![2, 4]), "five is not clearly more");
        assert_eq!(moved(2.0, 3 * record, 9 * record), Some(vec![1, 2, 4]), "the head of two equals");
        assert_eq!(moved(2.0, 0, 9 * record), Some(vec![2]), "a pin needs no budget");
        assert_eq!(moved(f32::INFINITY, 9 * record, 9 * record), Some(vec![2]));
        assert_eq!(moved(2.0, 9 * record, record - 1), None, "a pin that cannot be moved keeps its segment");
        let all = plan(rows, 10 * record, 0.5, 9 * record, 9 * record).unwrap();
        assert_eq!((all.loss, all.moved), (0.0, 5 * record));
    }

    #[test]
    fn every_segment_is_looked_at_in_turn_and_the_least_each_time() {
        let all: Vec<_> = (1..=500).map(Sequence).collect();
        let mut ranking = Ranking::default();
        for _ in 0..32 {
            let looks = ranking.looks(&all);
            assert!(looks.len() <= Ranking::LOOKS);
            looks
                .iter()
                .for_each(|s| ranking.note(*s, &[candidate(1, s.0 as f32, false)], record_bytes(LENGTH)));
        }
        assert_eq!(ranking.seen.len(), 500);
        let looks = ranking.looks(&all);
        assert!((1..=8).all(|n| looks.contains(&Sequence(n))));
        assert_eq!(ranking.threshold(), 251.0);
        assert_eq!(ranking.looks(&all[..3]), all[..3], "few are all looked at");
        assert_eq!(ranking.threshold(), 2.0, "what is gone does not count");
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
