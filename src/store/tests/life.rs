//! A life of a store that power cuts and broken drives are tried on: two spaces of different row sizes, many
//! segments, rows that are offered again, rows that rot and are stored anew, a restart in the middle, and more rows
//! than the capacity. It notes what it was promised, and [`Life::check`] holds what a later start finds against that.

use std::collections::{BTreeMap, BTreeSet};

use super::*;

pub const OTHER: Space = Space { namespace: Namespace([9; 32]), rank: Rank { index: 1, of: 2 } };

/// The spaces, and the bytes of their rows.
pub const SIDES: [(Space, u32); 2] = [(SPACE, 4096), (OTHER, 8192)];

/// Rows of each space that a life offers before and after its restart.
const ROWS: [u32; 2] = [66, 22];

/// A row: which space, which number.
pub type Which = (usize, u32);

pub fn options_of_a_life() -> Options {
    Options { capacity: Bytes::kib(512), segment: Bytes::kib(64), ..options("mem".as_ref(), Io::Auto) }
}

/// A store of a life.
pub fn open_of_a_life(sealing: &Sealing, mem: &Mem, clock: &Clock) -> Result<(Store, Opened), Error> {
    let (options, disk) = (options_of_a_life(), DiskKind::Mem(mem.clone()));
    Store::open_sealed(options, sealing, disk, clock.clone(), &Meter::new())
}

/// Rows of an area.
const WIDTH: u32 = 48;

/// The row areas of both spaces.
pub struct Areas([Arc<Rows>; 2]);

impl Areas {
    pub fn new() -> Self {
        Self(SIDES.map(|(space, bytes)| area(WIDTH, bytes, space)))
    }

    pub async fn attach(&self, store: &Store) {
        for rows in &self.0 {
            // A store that is closed by now says so by failing everything else.
            let _ = store.attach(rows).await;
        }
    }

    pub fn id(&self, side: usize) -> AreaId {
        self.0[side].id
    }

    /// Offers a few rows of one space. One outcome each.
    pub async fn put(&self, store: &Store, side: usize, numbers: &[u32]) -> Vec<Outcome> {
        let rows = &self.0[side];
        numbers.iter().zip(0..).for_each(|(&n, row)| fill(rows, row, n));
        store.put(rows, numbers.iter().zip(0..).map(|(&n, row)| item(n, row)).collect()).await
    }

    /// Asks for one row. A row that is handed out must be the right one.
    pub async fn get(&self, store: &Store, which: Which) -> Outcome {
        self.get_all(store, &[which]).await[0]
    }

    /// Asks for many rows, many at a time. A row that is handed out must be the right one.
    pub async fn get_all(&self, store: &Store, wanted: &[Which]) -> Vec<Outcome> {
        let mut outcomes = Vec::new();
        for some in wanted.chunk_by(|a, b| a.0 == b.0).flat_map(|of_one| of_one.chunks(WIDTH as usize)) {
            let side = some[0].0;
            let rows = &self.0[side];
            let items = || some.iter().zip(0..).map(|(&(_, n), row)| item(n, row));
            items().for_each(|item| rows.fill(item.row, |b| b.fill(0)));
            let these = store.get(rows, items().collect(), None).await;
            for (&(_, n), (outcome, row)) in some.iter().zip(these.iter().zip(0..)) {
                let is_right = *outcome != Outcome::FromDrive || is_filled(rows, row, n);
                assert!(is_right, "row {n} of space {side} is wrong");
            }
            outcomes.extend(these);
        }
        outcomes
    }
}

/// What a life was promised.
#[derive(Default)]
pub struct Life {
    /// Rows reported as stored, and whether it is certain that the drive was told to keep them.
    stored: BTreeMap<Which, bool>,
    ever: usize,
    /// Rows with a copy that rotted.
    pub rotten: BTreeSet<Which>,
    /// Rows that had to go for their room.
    pub released: u64,
    /// Durable rows that were held when the life ended.
    pub promised: BTreeSet<Which>,
    /// How its rows are kept.
    sealing: Sealing,
}

impl Life {
    /// Lives until the end, or until the power goes.
    pub async fn live(mem: &Mem, clock: &Clock) -> Self {
        Self::live_sealed(mem, clock, &Sealing::default()).await
    }

    /// The same with rows sealed so. The keys lie elsewhere: they are durable before the first row under them.
    pub async fn live_sealed(mem: &Mem, clock: &Clock, sealing: &Sealing) -> Self {
        let mut life = Self { sealing: sealing.clone(), ..Self::default() };
        let areas = Areas::new();
        for session in 0..2 {
            let opened = open_of_a_life(sealing, mem, clock);
            // Nothing is promised by a start that failed, and nothing taken back.
            let Ok((store, _)) = opened else { break };
            areas.attach(&store).await;
            life.session(mem, &store, &areas, session).await;
            life.promised = life.durable().filter(|&which| holds(&store, which)).collect();
            life.released += store.status().released;
            store.close().await;
            if mem.is_cut() {
                break;
            }
            // What had to go is owed no more: of one that had rotted an old copy may come to light at a start.
            life.stored.retain(|which, _| holds(&store, *which));
            life.stored.values_mut().for_each(|durable| *durable = true);
            life.promised = life.durable().filter(|&which| holds(&store, which)).collect();
        }
        life
    }

    fn durable(&self) -> impl Iterator<Item = Which> {
        self.stored.iter().filter(|(_, durable)| **durable).map(|(which, _)| *which)
    }

    async fn session(&mut self, mem: &Mem, store: &Store, areas: &Areas, session: u32) {
        for batch in 0..ROWS[0] / 3 {
            if mem.is_cut() {
                return;
            }
            let first = session * ROWS[0] + batch * 3;
            self.put(store, areas, 0, &[first, first + 1, first + 2]).await;
            if batch % 3 == 0 {
                let first = session * ROWS[1] + batch;
                self.put(store, areas, 1, &[first, first + 1, first + 2]).await;
            }
            if batch % 4 == 1 {
                // Held mostly, and stored again where their room was needed.
                self.put(store, areas, 0, &[first - 1, first / 2, first]).await;
                let _ = areas.get(store, (1, first / 3)).await;
            }
            if batch % 7 == 6 {
                // One in a sealed segment, and the newest one.
                for n in [first - 13, first + 2] {
                    self.rot(mem, store, areas, (0, n)).await;
                }
            }
        }
    }

    async fn put(&mut self, store: &Store, areas: &Areas, side: usize, numbers: &[u32]) {
        let outcomes = areas.put(store, side, numbers).await;
        let stored = numbers.iter().zip(outcomes).filter(|(_, outcome)| *outcome == Outcome::Stored);
        let before = self.stored.len();
        self.stored.extend(stored.map(|(&n, _)| ((side, n), false)));
        self.ever += self.stored.len() - before;
        for ((side, n), durable) in &mut self.stored {
            *durable |= store.is_sealed(SIDES[*side].0, &key(*n));
        }
    }

    /// Lets a row rot, notices it, and stores it again.
    async fn rot(&mut self, mem: &Mem, store: &Store, areas: &Areas, which: Which) {
        if !holds(store, which) || !spoil(mem, which) {
            return;
        }
        self.rotten.insert(which);
        // Until it is stored again nothing is owed.
        self.stored.remove(&which);
        assert!(!areas.get(store, which).await.is_ok(), "{which:?} is rotten and was handed out");
        self.put(store, areas, which.0, &[which.1]).await;
    }

    pub fn all() -> impl Iterator<Item = Which> {
        (0..2).flat_map(|side| (0..ROWS[side] * 2 + 3).map(move |n| (side, n)))
    }

    /// How many rows were ever reported as stored.
    pub fn len(&self) -> usize {
        self.ever
    }

    /// Starts on what is left of a drive and holds it against what was promised.
    pub async fn check(&self, mem: &Mem, context: &str) {
        let start = || {
            let opened = open_of_a_life(&self.sealing, mem, &Clock::sim());
            opened.unwrap_or_else(|e| panic!("{context}: {e}"))
        };
        let (store, opened) = start();
        let areas = Areas::new();
        areas.attach(&store).await;
        let mut readable = 0;
        let mut refused = 0;
        let all: Vec<Which> = Self::all().collect();
        let held: Vec<bool> = all.iter().map(|&which| holds(&store, which)).collect();
        let outcomes = areas.get_all(&store, &all).await;
        for (which, (held, outcome)) in all.into_iter().zip(held.into_iter().zip(outcomes)) {
            let is_ok = outcome.is_ok();
            assert!(
                is_ok || !self.promised.contains(&which),
                "{context}: {which:?} was durable and is lost (held: {held}, {opened:?})"
            );
            assert!(held || !is_ok, "{context}: {which:?} is not held and yet there");
            assert!(
                is_ok || !held || self.rotten.contains(&which),
                "{context}: {which:?} is held in name only"
            );
            readable += u64::from(is_ok);
            refused += u64::from(held && !is_ok);
        }
        let status = store.status();
        assert_eq!(status.rows, readable, "{context}: {status:?}");
        assert_eq!(status.damaged - opened.damaged, refused, "{context}: {status:?}");
        accounts_are_right(&store, mem, context);
        // And it goes on: what is missing can be stored.
        for n in 500..506 {
            assert_eq!(
                offer(&store, &areas, (0, n)).await,
                Outcome::Stored,
                "{context}: {:?}",
                store.status()
            );
        }
        accounts_are_right(&store, mem, context);
        let kept: BTreeSet<Which> = Self::all().filter(|&which| holds(&store, which)).collect();
        store.close().await;
        let left: Vec<_> = mem.list().into_iter().filter(|f| f.name.contains("unfinished")).collect();
        assert!(left.is_empty(), "{context}: {left:?}");
        // The next start finds the same, and what had rotted at most.
        let (store, _) = start();
        let again: BTreeSet<Which> = Self::all().filter(|&which| holds(&store, which)).collect();
        assert!(kept.is_subset(&again), "{context}: a clean restart forgot {:?}", kept.difference(&again));
        let more: BTreeSet<Which> = again.difference(&kept).copied().collect();
        assert!(more.is_subset(&self.rotten), "{context}: a clean restart found {more:?}");
        store.close().await;
    }
}

pub fn holds(store: &Store, (side, n): Which) -> bool {
    store.holds(SIDES[side].0, &key(n))
}

/// Offers a row until it is taken, three times at most: a store that is full may want to see a row come back first.
pub async fn offer(store: &Store, areas: &Areas, (side, n): Which) -> Outcome {
    let mut outcome = Outcome::Failed;
    for _ in 0..3 {
        outcome = areas.put(store, side, &[n]).await[0];
        if outcome.is_ok() {
            break;
        }
    }
    outcome
}

/// What is said to be used is what the drive has given, and never more than the capacity. The store may just be making
/// its next segment: figures follow as soon as it is there.
pub fn accounts_are_right(store: &Store, mem: &Mem, context: &str) {
    let look = || (store.status(), mem.list().iter().map(|f| f.taken).sum::<u64>());
    let (status, taken) = settled(look, |(status, taken)| {
        assert!(*taken <= status.capacity, "{context}: {status:?}");
        status.used == *taken
    });
    assert_eq!(status.used, taken, "{context}: {status:?}");
    assert_eq!(status.spaces.iter().map(|s| s.rows).sum::<u64>(), status.rows, "{context}");
    for space in &status.spaces {
        let bytes = SIDES.iter().find(|(s, _)| s.namespace.to_string() == space.namespace).map(|(_, b)| *b);
        assert_eq!(space.bytes, space.rows * u64::from(bytes.expect("a space of ours")), "{context}");
    }
}

/// Flips a bit in the payload of the newest record of a row. False when there is none.
pub fn spoil(mem: &Mem, (side, n): Which) -> bool {
    let mut found = None;
    for file in mem.list().into_iter().filter(|f| format::parse_segment_name(&f.name).is_some()) {
        let at = mem.with_bytes(&file.name, |bytes| {
            let head = format::Head::decode(bytes).ok()?;
            let mine = |at: &usize| {
                format::Record::decode(&bytes[*at..], head.store, head.sequence)
                    .is_ok_and(|r| r.key == key(n) && r.space == SIDES[side].0)
            };
            (format::PAGE..bytes.len()).step_by(format::PAGE).rfind(mine)
        });
        found = at.flatten().map(|at| (file.name, at)).or(found);
    }
    found.is_some_and(|(name, at)| mem.flip(&name, at + format::PAGE + 100 + n as usize, 1 << (n % 8)))
}
