//! Any sequence of calls, rot, restarts and power cuts against a plain twin that says for each row whether it must be
//! held, may be held or must not, and which answer is right.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use tokio::sync::broadcast;

use super::life::{Areas, SIDES, Which, accounts_are_right, holds, options_of_a_life, spoil};
use super::*;

/// Rows of each space that are named again and again. Rows that only make pressure have higher numbers.
const ROWS: u32 = 24;

#[derive(Clone, Debug)]
enum Act {
    Put {
        side: usize,
        first: u32,
        count: u32,
    },
    Get {
        side: usize,
        n: u32,
    },
    Peer {
        side: usize,
        n: u32,
    },
    /// So many rows that were never seen.
    Press {
        side: usize,
        count: u32,
    },
    /// The newest copy of a row changes a bit; the second time it changes back.
    Rot {
        side: usize,
        n: u32,
    },
    /// Rows are offered while their area is taken away; then it comes back.
    Detach {
        side: usize,
        first: u32,
    },
    Restart,
    Cut(Loss),
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let row = || (0..2_usize, 0..ROWS);
    let loss = prop_oneof![
        Just(Loss::All),
        Just(Loss::None),
        any::<u64>().prop_map(Loss::Torn),
        any::<u64>().prop_map(Loss::Reordered)
    ];
    let one = prop_oneof![
        8 => (row(), 1..4_u32).prop_map(|((side, first), count)| Act::Put { side, first, count }),
        6 => row().prop_map(|(side, n)| Act::Get { side, n }),
        3 => row().prop_map(|(side, n)| Act::Peer { side, n }),
        3 => (0..2_usize, 1..20_u32).prop_map(|(side, count)| Act::Press { side, count }),
        3 => row().prop_map(|(side, n)| Act::Rot { side, n }),
        1 => row().prop_map(|(side, first)| Act::Detach { side, first }),
        1 => Just(Act::Restart),
        1 => loss.prop_map(Act::Cut),
    ];
    proptest::collection::vec(one, 1..70)
}

/// What a read of a held row must give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Copy {
    Good,
    Rotten,
    /// An older copy may have come to light: right or missing, never wrong.
    Unknown,
}

/// Figures since the last start.
#[derive(Debug, Default, PartialEq, Eq)]
struct Figures {
    stored: u64,
    held: u64,
    loaded: u64,
    served: u64,
    failed: u64,
    damaged: u64,
}

/// The twin.
#[derive(Default)]
struct Model {
    held: BTreeMap<Which, Copy>,
    /// Rows of which it is certain that the drive was told to keep them.
    durable: BTreeSet<Which>,
    stored: BTreeSet<Which>,
    /// Rows that ever had a copy that rotted: an old copy may come to light at a start.
    rotted: BTreeSet<Which>,
    figures: Figures,
    /// Rotten rows that went since the last start without having been asked for: reclaimed with their segment, or found
    /// when they were to be moved out of it, which is damage that is counted.
    rotten_gone: u64,
    pressed: u32,
}

struct World {
    mem: Mem,
    store: Store,
    damaged_at_start: u64,
    areas: Areas,
    changes: [broadcast::Receiver<Change>; 2],
    model: Model,
}

fn start(mem: &Mem) -> (Store, u64) {
    let (store, opened) = open_with(&options_of_a_life(), &DiskKind::Mem(mem.clone()));
    (store, opened.damaged)
}

fn listen(store: &Store) -> [broadcast::Receiver<Change>; 2] {
    SIDES.map(|(space, _)| store.subscribe(space).1)
}

impl World {
    async fn new() -> Self {
        let mem = Mem::new();
        let (store, damaged_at_start) = start(&mem);
        let areas = Areas::new();
        areas.attach(&store).await;
        Self { mem, changes: listen(&store), store, damaged_at_start, areas, model: Model::default() }
    }

    async fn act(&mut self, act: &Act) {
        let full = self.is_full();
        let released = self.store.status().released;
        match *act {
            Act::Put { side, first, count } => {
                self.put(side, &(first..first + count).collect::<Vec<_>>()).await;
            }
            Act::Press { side, count } => {
                for _ in 0..count {
                    self.model.pressed += 1;
                    self.put(side, &[1000 + self.model.pressed]).await;
                }
            }
            Act::Get { side, n } => self.get((side, n)).await,
            Act::Peer { side, n } => self.peer((side, n)).await,
            Act::Rot { side, n } => self.rot((side, n)),
            Act::Detach { side, first } => self.detach(side, first).await,
            Act::Restart => self.restart().await,
            Act::Cut(loss) => self.cut(loss).await,
        }
        let made_room = full || self.is_full() || self.store.status().released > released;
        self.follow(made_room);
        self.compare();
    }

    /// Takes rows away that the store says are gone, if it may say so.
    fn follow(&mut self, made_room: bool) {
        for (side, changes) in self.changes.iter_mut().enumerate() {
            while let Ok(change) = changes.try_recv() {
                if change.kind == ChangeKind::Removed && !self.store.holds(change.space, &change.key) {
                    let which = (side, change.position / 16 - 1);
                    let was = self.model.held.remove(&which);
                    let rotten = was.is_some_and(|copy| copy != Copy::Good);
                    self.model.rotten_gone += u64::from(rotten);
                    assert!(made_room || rotten || was.is_none(), "{which:?} went although no room was made");
                    self.model.durable.remove(&which);
                }
            }
        }
    }

    fn compare(&self) {
        let model = &self.model;
        for &which in &model.stored {
            let held = holds(&self.store, which);
            assert_eq!(held, model.held.contains_key(&which), "{which:?}: {:?}", model.held.get(&which));
        }
        accounts_are_right(&self.store, &self.mem, "");
        let status = self.store.status();
        assert_eq!(status.rows, model.held.len() as u64, "{status:?}");
        let figures = Figures {
            stored: status.stored,
            held: status.held,
            loaded: status.loaded,
            served: status.served,
            failed: status.failed,
            damaged: model.figures.damaged,
        };
        let found = status.damaged - self.damaged_at_start;
        let expected = model.figures.damaged..=model.figures.damaged + model.rotten_gone;
        assert!(expected.contains(&found), "{found} rows found damaged, expected {expected:?}");
        assert_eq!(figures, model.figures, "what the store counted, and what was seen");
    }

    async fn put(&mut self, side: usize, numbers: &[u32]) {
        let was_held: Vec<bool> = numbers.iter().map(|&n| self.model.held.contains_key(&(side, n))).collect();
        let (full, released) = (self.is_full(), self.store.status().released);
        let outcomes = self.areas.put(&self.store, side, numbers).await;
        for ((&n, outcome), was_held) in numbers.iter().zip(outcomes).zip(was_held) {
            self.offered((side, n), outcome, was_held, self.is_full());
        }
        self.look_what_is_sealed();
        self.follow(full || self.is_full() || self.store.status().released > released);
    }

    fn look_what_is_sealed(&mut self) {
        let is_sealed = |&(side, n): &Which| self.store.is_sealed(SIDES[side].0, &key(n));
        self.model.durable.extend(self.model.held.keys().copied().filter(is_sealed));
    }

    /// Nothing fits without making room: then a store may be choosy about what it has never seen.
    fn is_full(&self) -> bool {
        let status = self.store.status();
        status.used + 2 * (64 << 10) > status.capacity
    }

    fn offered(&mut self, which: Which, outcome: Outcome, was_held: bool, may_refuse: bool) {
        let model = &mut self.model;
        match outcome {
            Outcome::Held => {
                // Not held and not worth its room: nobody is to offer it again, so it is answered the same way.
                assert!(was_held || may_refuse, "{which:?} is said to be held");
                model.figures.held += u64::from(was_held);
            }
            Outcome::Stored => {
                assert!(!was_held, "{which:?} was stored twice");
                model.figures.stored += 1;
                model.stored.insert(which);
                model.held.insert(which, Copy::Good);
                model.durable.remove(&which);
            }
            _ => {
                assert!(may_refuse && !was_held, "{which:?}: {outcome:?} while there is room");
                model.figures.failed += 1;
            }
        }
    }

    async fn get(&mut self, which: Which) {
        // A wrong row fails in here.
        let is_ok = self.areas.get(&self.store, which).await.is_ok();
        self.model.figures.loaded += u64::from(is_ok);
        self.answered(which, is_ok);
    }

    async fn peer(&mut self, (side, n): Which) {
        let (space, bytes) = SIDES[side];
        let record = self.store.read(space, key(n)).await;
        if let Some(record) = &record {
            assert!(record.payload == content(n, bytes as usize), "a peer got a wrong row {n}");
            assert_eq!(record.position, (n + 1) * 16);
        }
        self.model.figures.served += u64::from(record.is_some());
        self.answered((side, n), record.is_some());
    }

    fn answered(&mut self, which: Which, is_ok: bool) {
        let copy = self.model.held.get(&which).copied();
        match (copy, is_ok) {
            (Some(Copy::Good), false) => panic!("{which:?} is held, whole, and was not given"),
            (Some(Copy::Rotten), true) => panic!("{which:?} is rotten and was given"),
            (None, true) => panic!("{which:?} is not held and was given"),
            _ => {}
        }
        if is_ok {
            return;
        }
        self.model.figures.failed += 1;
        if copy.is_some() {
            self.model.figures.damaged += 1;
            self.model.held.remove(&which);
            self.model.durable.remove(&which);
        }
    }

    fn rot(&mut self, which: Which) {
        let copy = self.model.held.get(&which).copied();
        if let Some(Copy::Good | Copy::Rotten) = copy
            && spoil(&self.mem, which)
        {
            self.model.rotted.insert(which);
            let turned = if copy == Some(Copy::Good) { Copy::Rotten } else { Copy::Good };
            self.model.held.insert(which, turned);
        }
    }

    async fn detach(&mut self, side: usize, first: u32) {
        let numbers = [first, first + 1];
        let was_held = numbers.map(|n| self.model.held.contains_key(&(side, n)));
        let released = self.store.status().released;
        let put = self.areas.put(&self.store, side, &numbers);
        let (outcomes, ()) = tokio::join!(put, self.store.detach(self.areas.id(side)));
        for ((n, outcome), was_held) in numbers.into_iter().zip(outcomes).zip(was_held) {
            self.offered((side, n), outcome, was_held, true);
        }
        self.look_what_is_sealed();
        self.follow(self.store.status().released > released);
        assert!(!self.areas.get(&self.store, (side, first)).await.is_ok(), "the area is gone");
        self.model.figures.failed += 1;
        self.areas.attach(&self.store).await;
    }

    async fn restart(&mut self) {
        self.store.close().await;
        let must: BTreeSet<Which> = self.model.held.keys().copied().collect();
        self.model.durable = must.clone();
        self.begin(&must).await;
    }

    async fn cut(&mut self, loss: Loss) {
        let left = self.mem.after_cut(loss);
        self.store.close().await;
        self.mem = left;
        let must = self.model.durable.clone();
        self.begin(&must).await;
    }

    /// Starts on what is there. What was whole and in `must` is held; what else is there was stored once.
    async fn begin(&mut self, must: &BTreeSet<Which>) {
        (self.store, self.damaged_at_start) = start(&self.mem);
        self.areas.attach(&self.store).await;
        self.changes = listen(&self.store);
        self.model.figures = Figures::default();
        self.model.rotten_gone = 0;
        let before = std::mem::take(&mut self.model.held);
        for &which in &self.model.stored {
            let copy = before.get(&which).copied();
            let rotted = self.model.rotted.contains(&which);
            if holds(&self.store, which) {
                let copy = match copy {
                    _ if !rotted => Copy::Good,
                    Some(Copy::Good) if must.contains(&which) => Copy::Good,
                    _ => Copy::Unknown,
                };
                self.model.held.insert(which, copy);
            } else {
                let owed = must.contains(&which) && copy == Some(Copy::Good);
                assert!(!owed, "{which:?} was durable and is lost");
            }
        }
        // A start keeps what it keeps: the next cut takes nothing of it but what was never durable.
        self.model.durable.retain(|which| must.contains(which) && self.model.held.contains_key(which));
    }
}

fn run(acts: &[Act]) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let mut world = World::new().await;
        for act in acts {
            world.act(act).await;
        }
        world.store.close().await;
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, max_shrink_iters: 2000, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn whatever_is_done_to_it_the_store_answers_like_its_plain_twin(acts in acts()) {
        run(&acts);
    }
}
