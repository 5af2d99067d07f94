//! Two machines, a network that loses, doubles and reorders, and a clock that the test moves.

use std::collections::{BTreeMap, BTreeSet};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::base::block::{BlockHash, GroupId, Namespace, Rank};

const SILENCE: Duration = Duration::from_secs(3);
const STEP: Duration = Duration::from_millis(50);

fn space(n: u8) -> Space {
    Space { namespace: Namespace([n; 32]), rank: Rank::ONLY }
}

fn facts(n: u8, what: &[(&str, &str)]) -> SpaceFacts {
    let what = what.iter().map(|&(k, v)| (k.to_owned(), v.to_owned())).collect();
    SpaceFacts { space: space(n), what }
}

fn key(n: u32) -> RowKey {
    let mut hash = [0; 32];
    hash[..4].copy_from_slice(&n.to_be_bytes());
    RowKey { hash: BlockHash(hash), group: GroupId(0) }
}

fn ticket(generation: u64) -> Ticket {
    Ticket([u8::try_from(generation).unwrap(); 32])
}

/// One node: its machine and what it really holds.
struct Side {
    peer: Peer,
    generation: u64,
    store: BTreeMap<RowKey, u32>,
    /// What a subscriber of this side's cluster would believe.
    believed: BTreeSet<RowKey>,
    ticket: Option<Ticket>,
    note: String,
    offered: Vec<Row>,
    forget: Vec<String>,
    forgotten: Vec<(String, proto::Forgotten)>,
    downs: Vec<String>,
}

impl Side {
    fn new(generation: u64, facts: Option<SpaceFacts>, most: usize) -> Self {
        Self {
            peer: Peer::new(SILENCE, facts, Room { held: most, ..Room::default() }),
            generation,
            store: BTreeMap::new(),
            believed: BTreeSet::new(),
            ticket: None,
            note: String::new(),
            offered: Vec::new(),
            forget: Vec::new(),
            forgotten: Vec::new(),
            downs: Vec::new(),
        }
    }

    fn put(&mut self, n: u32) {
        self.store.insert(key(n), n);
        self.peer.on_change(space(1), key(n), Some(n));
    }

    fn drop_row(&mut self, n: u32) {
        self.store.remove(&key(n));
        self.peer.on_change(space(1), key(n), None);
    }

    fn settle(&mut self) {
        while let Some(event) = self.peer.poll_event() {
            match event {
                Event::Tell(space) => {
                    let keys = self.store.iter().map(|(&k, &p)| (k, p)).collect();
                    self.peer.on_snapshot(space, keys);
                }
                Event::Changed { added, removed, .. } => {
                    for key in removed {
                        assert!(self.believed.remove(&key), "removed what was never added");
                    }
                    for key in added {
                        assert!(self.believed.insert(key), "added twice");
                    }
                }
                Event::Forgotten => self.believed.clear(),
                Event::Note(note) => self.note = note,
                Event::Ticket(ticket) => self.ticket = Some(ticket),
                Event::Offered { rows, .. } => self.offered.extend(rows),
                Event::Forget(owner) => self.forget.push(owner),
                Event::OwnerForgotten(owner, done) => self.forgotten.push((owner, done)),
                Event::Down(why) => self.downs.push(why),
            }
        }
        let held: BTreeSet<RowKey> = self.peer.held(space(1)).collect();
        assert_eq!(held, self.believed, "a subscriber and the machine believe the same");
    }
}

/// How the network treats words, per hundred.
#[derive(Clone, Copy, Default)]
struct Weather {
    lost: u32,
    doubled: u32,
    late: u32,
    /// From side 0 to side 1, and back.
    cut: [bool; 2],
}

struct Pair {
    sides: [Side; 2],
    now: Micros,
    weather: Weather,
    dice: StdRng,
    /// When, to whom, from which generation, what.
    flying: Vec<(Micros, usize, u64, Word)>,
}

impl Pair {
    fn new(seed: u64) -> Self {
        let side = || Side::new(1, Some(facts(1, &[("vllm", "0.32.0")])), HELD);
        Self {
            sides: [side(), side()],
            now: Micros(1),
            weather: Weather::default(),
            dice: StdRng::seed_from_u64(seed),
            flying: Vec::new(),
        }
    }

    fn connected(seed: u64) -> Self {
        let mut pair = Self::new(seed);
        pair.connect();
        pair.run(2);
        pair
    }

    fn connect(&mut self) {
        let generations = [self.sides[0].generation, self.sides[1].generation];
        for (me, other) in [(0, 1), (1, 0)] {
            let ticket = ticket(generations[other]);
            self.sides[me].peer.on_connected(self.now, generations[other], ticket).unwrap();
        }
    }

    fn chance(&mut self, percent: u32) -> bool {
        self.dice.random_range(0..100) < percent
    }

    fn send_all(&mut self) {
        for me in 0..2 {
            self.sides[me].settle();
            while let Some(word) = self.sides[me].peer.poll_send() {
                let generation = self.sides[me].generation;
                let copies = 1 + u32::from(self.chance(self.weather.doubled));
                for _ in 0..copies {
                    if self.weather.cut[me] || self.chance(self.weather.lost) {
                        continue;
                    }
                    let late = if self.chance(self.weather.late) { self.dice.random_range(1..10) } else { 0 };
                    let at = self.now.plus(STEP * late);
                    self.flying.push((at, 1 - me, generation, word.clone()));
                }
            }
        }
    }

    fn step(&mut self) {
        self.now = self.now.plus(STEP);
        for side in &mut self.sides {
            side.peer.on_tick(self.now);
        }
        self.send_all();
        let now = self.now;
        let (due, later) = std::mem::take(&mut self.flying).into_iter().partition(|f| f.0 <= now);
        self.flying = later;
        let due: Vec<(Micros, usize, u64, Word)> = due;
        for (_, to, generation, word) in due {
            self.sides[to].peer.on_word(now, generation, word);
            self.sides[to].settle();
            assert!(self.sides[to].peer.held_count() <= self.sides[to].peer.room.held);
        }
        self.send_all();
    }

    fn run(&mut self, steps: u32) {
        for _ in 0..steps {
            self.step();
        }
    }

    fn agree(&self) -> bool {
        [(0, 1), (1, 0)]
            .iter()
            .all(|&(me, other)| self.sides[me].believed.iter().eq(self.sides[other].store.keys()))
    }
}

#[test]
fn keys_held_before_and_after_the_greeting_are_known_on_the_other_side() {
    let mut pair = Pair::new(1);
    for n in 0..20_000 {
        pair.sides[0].put(n);
    }
    pair.connect();
    pair.run(3);
    assert!(pair.agree(), "a snapshot of three parts");
    pair.sides[0].drop_row(5);
    pair.sides[0].put(30_000);
    pair.sides[1].put(7);
    pair.run(2);
    assert!(pair.agree(), "deltas");
    assert!(pair.sides[1].peer.holds(space(1), &key(30_000)));
    assert!(!pair.sides[1].peer.holds(space(2), &key(30_000)), "of another space");
    assert_eq!(pair.sides[1].peer.counts().resyncs, 0);
    assert_eq!(pair.sides[1].ticket, Some(ticket(1)));
}

#[test]
fn a_lost_delta_is_noticed_by_the_next_one_or_by_the_heartbeat() {
    for another in [true, false] {
        let mut pair = Pair::connected(2);
        pair.weather.cut = [true, false];
        pair.sides[0].put(1);
        pair.step();
        pair.weather.cut = [false, false];
        if another {
            pair.sides[0].put(2);
        }
        pair.run(30);
        assert!(pair.agree(), "another: {another}");
        assert_eq!(pair.sides[1].peer.counts().resyncs, 1);
        assert!(pair.sides[0].downs.is_empty() && pair.sides[1].downs.is_empty());
    }
}

#[test]
fn silence_ends_the_session_and_what_the_peer_held_is_forgotten_also_when_only_one_way_is_cut() {
    let mut pair = Pair::connected(3);
    pair.sides[0].put(1);
    pair.sides[1].put(2);
    pair.run(2);
    assert!(pair.agree());
    pair.weather.cut = [true, false];
    pair.run(61);
    assert!(!pair.sides[1].peer.is_up(), "it hears nothing");
    assert!(pair.sides[1].believed.is_empty());
    pair.run(61);
    assert!(!pair.sides[0].peer.is_up(), "nobody speaks to it any more");
    assert!(pair.sides[0].believed.is_empty());
    assert!(pair.sides[0].downs[0].starts_with("no word for 3."), "{:?}", pair.sides[0].downs);
    pair.weather.cut = [false, false];
    pair.connect();
    pair.run(3);
    assert!(pair.agree(), "it comes back");
}

#[test]
fn a_restart_begins_from_nothing_and_the_old_generations_words_are_dropped() {
    let mut pair = Pair::connected(4);
    pair.sides[0].put(1);
    pair.run(2);
    pair.sides[0].put(99);
    pair.weather.late = 100;
    pair.step();
    let old: Vec<_> = pair.flying.iter().filter(|f| f.1 == 1).cloned().collect();
    assert!(!old.is_empty());
    pair.weather.late = 0;
    pair.flying.clear();
    pair.sides[0] = Side::new(2, Some(facts(1, &[("vllm", "0.32.0")])), HELD);
    pair.sides[0].put(50);
    pair.connect();
    for (_, to, generation, word) in old {
        pair.sides[to].peer.on_word(pair.now, generation, word);
    }
    pair.run(30);
    assert!(pair.agree());
    assert!(pair.sides[1].peer.counts().stale > 0);
    let older = pair.sides[1].peer.on_connected(pair.now, 1, ticket(1));
    assert_eq!(older, Err(Older { said: 1, known: 2 }));
    assert!(pair.sides[1].peer.is_up(), "the session of the newer one goes on");
}

#[test]
fn a_second_connection_of_the_same_generation_forgets_nothing() {
    let mut pair = Pair::connected(5);
    pair.sides[0].put(1);
    pair.run(2);
    pair.connect();
    for side in &mut pair.sides {
        side.settle();
    }
    assert!(pair.agree(), "nothing was forgotten");
    pair.sides[0].put(2);
    pair.run(3);
    assert!(pair.agree());
    assert!(pair.sides[0].downs.is_empty());
}

#[test]
fn different_facts_are_named_and_no_key_is_used_until_they_are_equal() {
    let mut pair = Pair::connected(6);
    pair.sides[0].put(1);
    pair.run(2);
    assert!(pair.agree());
    pair.sides[0].peer.set_facts(Some(facts(2, &[("vllm", "0.33.0"), ("hash seed", "1")])));
    pair.run(3);
    for side in &pair.sides {
        assert!(side.believed.is_empty());
    }
    let Match::Differ(named) = pair.sides[1].peer.matched() else { panic!() };
    assert_eq!(*named, ["hash seed is not known here and 1 there", "vllm is 0.32.0 here and 0.33.0 there"]);
    pair.sides[0].peer.set_facts(None);
    pair.run(3);
    assert_eq!(*pair.sides[1].peer.matched(), Match::Open);
    pair.sides[0].peer.set_facts(Some(facts(1, &[("vllm", "0.32.0")])));
    pair.run(3);
    assert!(pair.agree(), "and they flow again");
    // There and back between two words: only one side forgot.
    pair.sides[0].peer.set_facts(None);
    pair.sides[0].peer.set_facts(Some(facts(1, &[("vllm", "0.32.0")])));
    pair.sides[1].put(3);
    pair.run(60);
    assert!(pair.agree());
}

#[test]
fn equal_facts_of_different_spaces_still_differ() {
    let list = differences(&facts(1, &[]), &facts(2, &[]));
    assert_eq!(list, ["the namespace is 010101010101 rank 0 of 1 here and 020202020202 rank 0 of 1 there"]);
    assert!(differences(&facts(1, &[("a", "b")]), &facts(1, &[("a", "b")])).is_empty());
    assert_eq!(differences(&facts(1, &[("a", "b")]), &facts(1, &[("a", "c")])).len(), 1);
}

#[test]
fn keys_over_the_limit_are_counted_and_not_kept() {
    let mut pair = Pair::new(7);
    pair.sides[1] = Side::new(1, Some(facts(1, &[("vllm", "0.32.0")])), 100);
    for n in 0..150 {
        pair.sides[0].put(n);
    }
    pair.connect();
    pair.run(3);
    assert_eq!(pair.sides[1].peer.held_count(), 100);
    assert_eq!(pair.sides[1].peer.counts().over, 50);
    pair.sides[0].put(200);
    pair.run(2);
    assert_eq!(pair.sides[1].peer.held_count(), 100);
    assert_eq!(pair.sides[1].peer.counts().over, 51);
    // Once half of the room is free, what was left out is asked for again.
    for n in 0..60 {
        pair.sides[0].drop_row(n);
    }
    pair.run(30);
    assert!(pair.agree(), "everything has room now");
}

#[test]
fn more_changes_than_fit_become_a_new_snapshot() {
    let mut pair = Pair::connected(8);
    for n in 0..u32::try_from(PENDING).unwrap() + 10 {
        pair.sides[0].put(n);
        assert!(pair.sides[0].peer.telling.pending.len() <= PENDING);
        pair.sides[0].settle();
    }
    assert!(pair.sides[0].peer.telling.pending.len() < 100, "they are in the snapshot");
    pair.run(3);
    assert!(pair.agree());
}

#[test]
fn notes_come_with_the_heartbeat() {
    let mut pair = Pair::connected(9);
    pair.sides[0].peer.tell("{\"load\":3}".into());
    pair.run(20);
    assert_eq!(pair.sides[1].note, "{\"load\":3}");
}

#[test]
fn an_offer_reaches_a_peer_of_the_same_space_and_no_other() {
    let mut pair = Pair::connected(12);
    let row = |n| Row { key: key(n), position: 16, owner: Some("ann".into()) };
    assert!(pair.sides[0].peer.offer(space(1), vec![row(1)]));
    pair.run(2);
    assert_eq!(pair.sides[1].offered, [row(1)]);
    assert!(!pair.sides[0].peer.offer(space(2), vec![row(2)]), "another space");
    // One that waits when the facts change is not said any more.
    assert!(pair.sides[0].peer.offer(space(1), vec![row(3)]));
    pair.sides[0].peer.set_facts(None);
    pair.run(3);
    assert!(!pair.sides[0].peer.wants_to_send());
    assert_eq!(pair.sides[1].offered.len(), 1);
}

#[test]
fn an_order_to_forget_an_owner_and_its_answer_are_said_once_while_the_session_lives() {
    let mut pair = Pair::connected(13);
    assert!(pair.sides[0].peer.say(Word::Forget { owner: "ann".into() }));
    pair.run(2);
    assert_eq!(pair.sides[1].forget, ["ann"]);
    let done = proto::Forgotten { keys: 1, rows: 7, trouble: String::new() };
    assert!(pair.sides[1].peer.say(Word::Forgotten { owner: "ann".into(), done: done.clone() }));
    pair.run(3);
    assert_eq!(pair.sides[0].forgotten, [("ann".to_owned(), done)]);
    assert_eq!(pair.sides[1].forget.len(), 1, "once");
    pair.sides[1].peer.on_word(pair.now, 1, Word::Bye);
    assert!(!pair.sides[1].peer.say(Word::Forget { owner: "bob".into() }), "nobody hears it");
}

#[test]
fn a_stopping_node_is_gone_at_once() {
    let mut pair = Pair::connected(10);
    pair.sides[1].peer.on_word(pair.now, 1, Word::Bye);
    assert!(!pair.sides[1].peer.is_up());
}

/// Loss, doubling, reordering, cuts and restarts at random; when the weather clears, both sides agree again.
#[test]
fn after_any_bad_weather_both_sides_agree_again() {
    for seed in 0..60 {
        let mut pair = Pair::connected(seed);
        for _ in 0..40 {
            let rough = |p: &mut Pair, most| p.dice.random_range(0..most);
            pair.weather = Weather {
                lost: rough(&mut pair, 40),
                doubled: rough(&mut pair, 40),
                late: rough(&mut pair, 60),
                cut: [pair.chance(10), pair.chance(10)],
            };
            for me in 0..2 {
                for _ in 0..pair.dice.random_range(0..20) {
                    let n = pair.dice.random_range(0..200);
                    if pair.chance(60) { pair.sides[me].put(n) } else { pair.sides[me].drop_row(n) }
                }
            }
            if pair.chance(5) {
                let me = pair.dice.random_range(0..2_usize);
                let generation = pair.sides[me].generation + 1;
                pair.sides[me] = Side::new(generation, Some(facts(1, &[("vllm", "0.32.0")])), HELD);
                pair.connect();
            }
            let steps = pair.dice.random_range(1..20);
            pair.run(steps);
            if pair.sides.iter().all(|s| !s.peer.is_up()) {
                pair.connect();
            }
        }
        pair.weather = Weather::default();
        for _ in 0..4 {
            pair.run(70);
            if pair.sides.iter().all(|s| !s.peer.is_up()) {
                pair.connect();
            }
        }
        assert!(pair.agree(), "seed {seed}");
    }
}
