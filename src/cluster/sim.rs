//! Two to eight nodes on virtual time, in bad weather: the shipped machines of all nodes, driven by one loop.
//!
//! Nothing here waits, sleeps or opens a socket. A seed decides what the weather does (words are lost, doubled, late
//! and out of order, cables are cut in one direction, rails are slow) and what the nodes do (rows come and go, nodes
//! end and start again as a new generation, engines go and come back as another model). After every step the
//! invariants of [`World::check`] are looked at; at the end the weather clears, and all nodes must agree with the
//! truth. A failing seed says with which command it fails again.
//!
//! The weather is worse than any network that carries TCP: a word that is late may arrive in another session, also in
//! one of a later generation. Only the ticket keeps its place, because it is said once, at the head of a session.
//! Rails are modelled, not driven: a request travels to the peer with the ticket, and rows travel back.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::sync::broadcast::{self, error::TryRecvError};

use super::identity::{Fingerprint, Pin};
use super::peer::Room;
use super::proto::{Hello, Message, SpaceFacts, Word};
use super::state::{Begun, Parts, PeerChange, Shared};
use crate::base::block::{BlockHash, GroupId, Namespace, Rank, RowKey, Space};
use crate::base::clock::{Clock, Micros};
use crate::meter::Meter;
use crate::tasks::Tasks;
use crate::transfer::{Fabric, Ticket};

const SILENCE: Duration = Duration::from_secs(3);
const STEP: Duration = Duration::from_millis(50);
/// Time that a fetch has.
const DEADLINE: Duration = Duration::from_secs(2);
/// Steps of bad weather, and steps until all must agree: two silences, a dial and a heartbeat.
const STORM: u32 = 400;
const CALM: u32 = 240;
/// Steps at the end in which nobody may have had to ask again.
const QUIET: u32 = 60;
/// What each node may hold.
const KEYS: u32 = 90;
/// Two connections a pair dial each other at the same time, and one more may be about to be replaced.
const CONNECTIONS: usize = 6;
const SEEDS: u64 = 200;

fn space(n: u8) -> Space {
    Space { namespace: Namespace([n; 32]), rank: Rank::ONLY }
}

fn facts(n: u8) -> SpaceFacts {
    SpaceFacts { space: space(n), what: BTreeMap::from([("model".to_owned(), n.to_string())]) }
}

fn key(n: u32) -> RowKey {
    let mut hash = [0; 32];
    hash[..4].copy_from_slice(&n.to_be_bytes());
    RowKey { hash: BlockHash(hash), group: GroupId(0) }
}

/// A number for a set of keys, whatever their order.
fn digest<'a>(keys: impl Iterator<Item = &'a RowKey>) -> u64 {
    let mixed = |key: &RowKey| {
        let n = u32::from_be_bytes(key.hash.0[..4].try_into().expect("4 of 32"));
        let z = (u64::from(n) + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (z ^ (z >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9)
    };
    keys.fold(0, |sum, key| sum.wrapping_add(mixed(key)))
}

/// How the network treats what is sent, in percent.
#[derive(Clone, Copy, Debug, Default)]
struct Weather {
    lost: u32,
    doubled: u32,
    late: u32,
    /// Steps that a row takes on the rails, at most.
    rails: u32,
}

/// One life of a node.
struct Node {
    shared: Shared,
    generation: u64,
    /// What it really holds.
    store: BTreeMap<RowKey, u32>,
    /// The model that its engine serves.
    model: Option<u8>,
    heard: broadcast::Receiver<PeerChange>,
    /// What a subscriber believes that the others hold.
    view: BTreeSet<RowKey>,
    dial_at: Vec<Micros>,
}

/// A connection; side 0 has dialled.
struct Conn {
    ends: [usize; 2],
    generations: [u64; 2],
    begun: [Option<Begun>; 2],
    open: [bool; 2],
    since: Micros,
}

/// What is under way.
#[derive(Clone)]
enum Flight {
    Hello { conn: u64, to: usize, hello: Hello },
    Word { conn: u64, from: usize, to: usize, frame: Vec<u8> },
    Closed { conn: u64, side: usize },
    Asked { fetch: u64, from: usize, to: usize, ticket: Ticket, keys: Vec<RowKey> },
    Rows { fetch: u64, generation: u64, keys: Vec<RowKey> },
}

/// What one life of a node has told one other node.
#[derive(Default)]
struct Told {
    keys: BTreeSet<RowKey>,
    /// Digest of the keys after each snapshot and change.
    at: BTreeMap<(u32, u64), u64>,
}

/// Rows that are being fetched.
struct Fetch {
    node: usize,
    generation: u64,
    peer: usize,
    ticket: Ticket,
    deadline: Micros,
}

struct World {
    dice: StdRng,
    clock: Clock,
    room: Room,
    nodes: Vec<Node>,
    conns: BTreeMap<u64, Conn>,
    /// Directions in which nothing passes.
    cut: BTreeSet<(usize, usize)>,
    weather: Weather,
    flying: BTreeMap<(Micros, u64), Flight>,
    serial: u64,
    told: BTreeMap<(usize, u64, usize), Told>,
    fetches: BTreeMap<u64, Fetch>,
    fetched: u64,
    /// The last things that happened, for whoever reads a failure.
    trail: VecDeque<String>,
}

fn id(node: usize) -> Fingerprint {
    Fingerprint([u8::try_from(node).expect("eight nodes") + 1; 32])
}

fn node(of: Fingerprint) -> usize {
    usize::from(of.0[0]) - 1
}

fn name(node: usize) -> String {
    format!("n{node}")
}

impl Node {
    fn start(me: usize, count: usize, generation: u64, clock: &Clock, room: Room) -> Self {
        let parts = Parts {
            me: id(me),
            silence: SILENCE,
            clock: clock.clone(),
            tasks: Tasks::new(),
            fabric: Fabric::Mem(crate::transfer::MemNet::default()),
            room,
        };
        let pin = |n| Pin { name: name(n), fingerprint: id(n), address: name(n) };
        let pins = (0..count).filter(|&n| n != me).map(pin).collect();
        let shared = Shared::new(parts, pins, &Meter::new());
        shared.set_facts(Some(facts(1)));
        let (_, heard) = shared.subscribe(space(1));
        Self {
            shared,
            generation,
            store: BTreeMap::new(),
            model: Some(1),
            heard,
            view: BTreeSet::new(),
            dial_at: vec![clock.now(); count],
        }
    }

    fn hello(&self, me: usize) -> Hello {
        // Without a data address no rail is opened: rails are modelled here.
        Hello {
            generation: self.generation,
            name: name(me),
            control: name(me),
            data: Vec::new(),
            secret: None,
        }
    }

    /// What a subscriber learns.
    fn follow(&mut self) {
        loop {
            match self.heard.try_recv() {
                Ok(PeerChange::Added(of, key)) if of == space(1) => {
                    assert!(self.view.insert(key), "a subscriber hears of a key twice");
                }
                Ok(PeerChange::Removed(of, key)) if of == space(1) => {
                    assert!(self.view.remove(&key), "a subscriber loses what it never had");
                }
                Ok(PeerChange::Added(..) | PeerChange::Removed(..)) => {}
                Ok(PeerChange::Gone) => self.view.clear(),
                Err(TryRecvError::Lagged(_)) => {
                    let (keys, heard) = self.shared.subscribe(space(1));
                    (self.view, self.heard) = (keys.into_iter().collect(), heard);
                }
                Err(TryRecvError::Empty | TryRecvError::Closed) => return,
            }
        }
    }
}

impl World {
    fn new(seed: u64) -> Self {
        let mut dice = StdRng::seed_from_u64(seed);
        let count = if dice.random_range(0..4) > 0 { 2 } else { dice.random_range(3..=8) };
        let small = dice.random_range(0..5) == 0;
        let room = Room { held: if small { 40 } else { 1000 }, pending: 24, part: 16 };
        let clock = Clock::sim();
        clock.advance(STEP);
        Self {
            nodes: (0..count).map(|n| Node::start(n, count, 1, &clock, room)).collect(),
            dice,
            clock,
            room,
            conns: BTreeMap::new(),
            cut: BTreeSet::new(),
            weather: Weather::default(),
            flying: BTreeMap::new(),
            serial: 0,
            told: BTreeMap::new(),
            fetches: BTreeMap::new(),
            fetched: 0,
            trail: VecDeque::new(),
        }
    }

    fn chance(&mut self, percent: u32) -> bool {
        self.dice.random_range(0..100) < percent
    }

    fn pick(&mut self) -> usize {
        self.dice.random_range(0..self.nodes.len())
    }

    fn note(&mut self, what: impl std::fmt::Display) {
        if self.trail.len() == 30 {
            self.trail.pop_front();
        }
        self.trail.push_back(format!("{:>8.2} s  {what}", self.clock.now().0 as f64 / 1e6));
    }

    fn serial(&mut self) -> u64 {
        self.serial += 1;
        self.serial
    }

    fn fly(&mut self, steps: u32, flight: Flight) {
        let at = (self.clock.now().plus(STEP * steps), self.serial());
        self.flying.insert(at, flight);
    }

    /// Sends what a network may lose, double and delay.
    fn toss(&mut self, way: (usize, usize), flight: &Flight) {
        let copies = 1 + u32::from(self.chance(self.weather.doubled));
        for _ in 0..copies {
            if self.cut.contains(&way) || self.chance(self.weather.lost) {
                continue;
            }
            let late = if self.chance(self.weather.late) { self.dice.random_range(1..80) } else { 0 };
            self.fly(late, flight.clone());
        }
    }

    /// Things that happen to nodes and cables.
    fn stir(&mut self) {
        if self.chance(8) {
            let mut up_to = |most| self.dice.random_range(0..most);
            self.weather =
                Weather { lost: up_to(40), doubled: up_to(40), late: up_to(60), rails: 1 + up_to(60) };
            let weather = self.weather;
            self.note(format_args!("{weather:?}"));
        }
        if self.chance(6) {
            let way = (self.pick(), self.pick());
            let now = if self.cut.remove(&way) { "mended" } else { "cut" };
            if now == "cut" {
                self.cut.insert(way);
            }
            self.note(format_args!("the cable from n{} to n{} is {now}", way.0, way.1));
        }
        if self.chance(2) {
            self.restart();
        }
        if self.chance(2) {
            let (me, model) = (self.pick(), [None, Some(1), Some(1), Some(2)][self.dice.random_range(0..4)]);
            self.note(format_args!("n{me} serves model {model:?}"));
            self.nodes[me].model = model;
            self.nodes[me].shared.set_facts(model.map(facts));
        }
        for me in 0..self.nodes.len() {
            if self.chance(30) {
                self.change_rows(me);
            }
            if self.chance(15) {
                self.fetch(me);
            }
        }
    }

    /// The process of a node dies, and another one begins with what the drive still has.
    fn restart(&mut self) {
        let me = self.pick();
        let (count, generation) = (self.nodes.len(), self.nodes[me].generation + 1);
        let mut store = std::mem::take(&mut self.nodes[me].store);
        let kept: Vec<bool> = store.iter().map(|_| self.dice.random_range(0..10) > 0).collect();
        let mut kept = kept.into_iter();
        store.retain(|_, _| kept.next().unwrap_or_default());
        self.nodes[me] = Node::start(me, count, generation, &self.clock, self.room);
        self.nodes[me].store = store;
        self.note(format_args!("n{me} starts again, generation {generation}"));
        self.fetches.retain(|_, fetch| fetch.node != me);
        let of: Vec<(u64, usize)> = self
            .conns
            .iter()
            .filter_map(|(&conn, c)| c.ends.iter().position(|&end| end == me).map(|side| (conn, side)))
            .collect();
        for (conn, side) in of {
            self.close(conn, side);
        }
    }

    fn change_rows(&mut self, me: usize) {
        let base = u32::try_from(me / 2).expect("eight nodes") * 60;
        // Now and then more at once than a driver takes from the store: it then tells everything again.
        let count = if self.chance(5) { 40 } else { self.dice.random_range(1..8) };
        let missed = self.chance(3);
        for _ in 0..count {
            let n = base + self.dice.random_range(0..KEYS);
            let position = if self.chance(55) { Some(n) } else { None };
            match position {
                Some(position) => self.nodes[me].store.insert(key(n), position),
                None => self.nodes[me].store.remove(&key(n)),
            };
            for (of, number) in self.sessions(me) {
                self.nodes[me].shared.with(of, number, |peer| match missed {
                    true => peer.tell_anew(),
                    false => peer.on_change(space(1), key(n), position),
                });
            }
        }
    }

    /// Sessions of a node that have begun: with whom, and which.
    fn sessions(&self, me: usize) -> Vec<(Fingerprint, u64)> {
        let of = |conn: &Conn| {
            let side = conn.ends.iter().position(|&end| end == me).filter(|&side| conn.open[side])?;
            Some((id(conn.ends[1 - side]), conn.begun[side].as_ref()?.number))
        };
        self.conns.values().filter_map(of).collect()
    }

    fn fetch(&mut self, me: usize) {
        let all: Vec<RowKey> = self.nodes[me].view.iter().copied().collect();
        if all.is_empty() || self.nodes[me].model != Some(1) {
            return;
        }
        let keys: Vec<RowKey> = (0..5).map(|_| all[self.dice.random_range(0..all.len())]).collect();
        self.fetch_these(me, &keys);
    }

    fn fetch_these(&mut self, me: usize, keys: &[RowKey]) {
        for (of, ticket, indices) in self.nodes[me].shared.sources(space(1), keys) {
            let (peer, fetch) = (node(of), self.serial());
            let generation = self.nodes[me].shared.look(of, |p| p.generation());
            let deadline = self.clock.now().plus(DEADLINE);
            self.fetches.insert(fetch, Fetch { node: me, generation, peer, ticket, deadline });
            let keys = indices.iter().map(|&index| keys[index]).collect();
            self.ride((me, peer), Flight::Asked { fetch, from: me, to: peer, ticket, keys });
        }
    }

    /// Sends something over the rails: slow, and not at all where the cable is cut.
    fn ride(&mut self, way: (usize, usize), flight: Flight) {
        if !self.cut.contains(&way) {
            let steps = self.dice.random_range(0..=self.weather.rails);
            self.fly(steps, flight);
        }
    }

    fn step(&mut self) {
        self.clock.advance(STEP);
        self.dial();
        let now = self.clock.now();
        while let Some(first) = self.flying.first_entry().filter(|first| first.key().0 <= now) {
            let flight = first.remove();
            self.deliver(flight);
        }
        let sides: Vec<(u64, usize)> = self.conns.keys().flat_map(|&conn| [(conn, 0), (conn, 1)]).collect();
        for (conn, side) in sides {
            self.drive(conn, side);
        }
        self.end_fetches();
        self.check();
    }

    fn dial(&mut self) {
        let now = self.clock.now();
        for me in 0..self.nodes.len() {
            for to in (0..self.nodes.len()).filter(|&to| to != me) {
                let waits = |c: &Conn| c.ends == [me, to] && c.open[0];
                if self.nodes[me].dial_at[to] > now || self.conns.values().any(waits) {
                    continue;
                }
                if self.nodes[me].shared.to_dial(id(to)).is_none() {
                    continue;
                }
                let pause = STEP * self.dice.random_range(5..20);
                self.nodes[me].dial_at[to] = now.plus(pause);
                let conn = self.serial();
                let generations = [self.nodes[me].generation, self.nodes[to].generation];
                let fresh =
                    Conn { ends: [me, to], generations, begun: [None, None], open: [true, true], since: now };
                self.conns.insert(conn, fresh);
                let hello = self.nodes[me].hello(me);
                self.greet((me, to), Flight::Hello { conn, to, hello });
            }
        }
        // A greeting has so much time.
        let stale: Vec<(u64, usize)> = self
            .conns
            .iter()
            .filter(|(_, c)| now.since(c.since) > Duration::from_secs(5))
            .flat_map(|(&conn, c)| (0..2).filter(|&s| c.begun[s].is_none()).map(move |s| (conn, s)))
            .collect();
        for (conn, side) in stale {
            self.close(conn, side);
        }
    }

    fn greet(&mut self, way: (usize, usize), flight: Flight) {
        if !self.cut.contains(&way) {
            let late = if self.chance(self.weather.late) { self.dice.random_range(1..20) } else { 0 };
            self.fly(late, flight);
        }
    }

    /// One side of a connection ends; the other side hears of it, unless the cable is cut.
    fn close(&mut self, conn: u64, side: usize) {
        let Some(c) = self.conns.get_mut(&conn) else { return };
        c.open[side] = false;
        let way = (c.ends[side], c.ends[1 - side]);
        if !c.open[1 - side] {
            self.conns.remove(&conn);
        } else if !self.cut.contains(&way) {
            self.fly(1, Flight::Closed { conn, side: 1 - side });
        }
    }

    /// Whether this side of a connection is of the life that its node lives now.
    fn lives(&self, conn: u64, side: usize) -> bool {
        self.conns
            .get(&conn)
            .is_some_and(|c| c.open[side] && c.generations[side] == self.nodes[c.ends[side]].generation)
    }

    fn deliver(&mut self, flight: Flight) {
        match flight {
            Flight::Hello { conn, to, hello } => self.on_hello(conn, to, &hello),
            Flight::Closed { conn, side } => {
                if self.lives(conn, side) {
                    self.end(conn, side, "the connection ended");
                }
            }
            Flight::Word { conn, from, to, frame } => self.on_word(conn, (from, to), frame),
            Flight::Asked { fetch, from, to, ticket, keys } => {
                let node = &self.nodes[to];
                if node.shared.tickets.admits(&ticket) {
                    let up = node.shared.look(id(from), |p| p.is_up());
                    assert!(up, "a ticket is good although its session is over");
                    let there = keys.into_iter().filter(|key| node.store.contains_key(key)).collect();
                    let generation = node.generation;
                    self.ride((to, from), Flight::Rows { fetch, generation, keys: there });
                }
            }
            Flight::Rows { fetch, generation, keys } => {
                if let Some(f) = self.fetches.remove(&fetch) {
                    assert_eq!(generation, f.generation, "rows of another generation than was asked");
                    self.fetched += keys.len() as u64;
                }
            }
        }
    }

    fn end(&mut self, conn: u64, side: usize, why: &str) {
        let Some(c) = self.conns.get(&conn) else { return };
        if let Some(begun) = &c.begun[side] {
            self.nodes[c.ends[side]].shared.end(id(c.ends[1 - side]), begun.number, why);
        }
        self.close(conn, side);
    }

    fn on_hello(&mut self, conn: u64, to: usize, hello: &Hello) {
        let Some(c) = self.conns.get(&conn) else { return };
        let side = usize::from(c.ends[1] == to);
        if !self.lives(conn, side) {
            return;
        }
        let (other, dialled) = (self.conns[&conn].ends[1 - side], side == 0);
        if !dialled {
            let hello = self.nodes[to].hello(to);
            self.greet((to, other), Flight::Hello { conn, to: other, hello });
        }
        match self.nodes[to].shared.begin(id(other), hello, dialled) {
            Ok(begun) => {
                self.note(format_args!("n{to} begins a session with n{other} of {}", hello.generation));
                if let Some(c) = self.conns.get_mut(&conn) {
                    c.begun[side] = Some(begun);
                }
            }
            Err(_) => self.close(conn, side),
        }
    }

    /// A word arrives in whatever session is the newest.
    fn on_word(&mut self, conn: u64, (from, to): (usize, usize), frame: Vec<u8>) {
        let Ok(Message::Word { generation, word }) = Message::decode(&frame[4..]) else {
            panic!("a word does not read back")
        };
        let mut number =
            self.sessions(to).into_iter().filter(|(of, _)| *of == id(from)).map(|(_, n)| n).max();
        if let Word::Ticket(_) = word {
            let Some(c) = self.conns.get(&conn) else { return };
            let side = usize::from(c.ends[1] == to);
            if !self.lives(conn, side) {
                return;
            }
            number = c.begun[side].as_ref().map(|b| b.number);
            if number.is_none() {
                return self.fly(1, Flight::Word { conn, from, to, frame });
            }
        }
        let Some(number) = number else { return };
        let shared = &self.nodes[to].shared;
        let look = || {
            shared.look(id(from), |p| {
                (p.generation(), p.is_up(), p.heard(), p.matched().clone(), digest(p.held_keys()))
            })
        };
        let before = look();
        shared.hear(id(from), number, generation, word);
        if generation != before.0 {
            assert_eq!(before, look(), "a word of generation {generation} was heard");
        }
    }

    /// What the loop of a session does.
    fn drive(&mut self, conn: u64, side: usize) {
        if !self.lives(conn, side) {
            return;
        }
        let c = &self.conns[&conn];
        let (me, other) = (c.ends[side], c.ends[1 - side]);
        let Some(begun) = c.begun[side].clone() else { return };
        let now = self.clock.now();
        self.nodes[me].shared.with(id(other), begun.number, |peer| peer.on_tick(now));
        for _ in 0..1000 {
            let node = &self.nodes[me];
            let chores = node.shared.chores(id(other), begun.number);
            if chores.over || begun.replaced.is_cancelled() {
                self.end(conn, side, "it was replaced");
                return;
            }
            if let Some(space) = chores.tell {
                let keys = node.store.iter().map(|(&key, &position)| (key, position)).collect();
                node.shared.with(id(other), begun.number, |peer| peer.on_snapshot(space, keys));
                continue;
            }
            let word = node.shared.with(id(other), begun.number, |peer| peer.poll_send());
            let Some(word) = word.flatten() else { return };
            self.send(conn, (me, other), word);
        }
        panic!("a session never comes to rest");
    }

    fn send(&mut self, conn: u64, (me, other): (usize, usize), word: Word) {
        let generation = self.nodes[me].generation;
        self.remember((me, other), &word);
        let is_ticket = matches!(word, Word::Ticket(_));
        let frame = Message::Word { generation, word }.encode();
        let flight = Flight::Word { conn, from: me, to: other, frame };
        if is_ticket { self.fly(0, flight) } else { self.toss((me, other), &flight) }
    }

    /// Keeps what is told, and looks whether it is true.
    fn remember(&mut self, (me, other): (usize, usize), word: &Word) {
        let node = &self.nodes[me];
        let told = self.told.entry((me, node.generation, other)).or_default();
        match word {
            Word::Snapshot { epoch, part, last, keys, .. } => {
                if *part == 0 {
                    told.keys.clear();
                }
                told.keys.extend(keys.iter().map(|(key, _)| *key));
                if *last {
                    told.at.insert((*epoch, 0), digest(told.keys.iter()));
                }
            }
            Word::Delta { epoch, seq, added, removed, .. } => {
                told.keys.extend(added.iter().map(|(key, _)| *key));
                told.keys.retain(|key| !removed.contains(key));
                told.at.insert((*epoch, *seq), digest(told.keys.iter()));
            }
            _ => return,
        }
        if node.shared.look(id(other), |p| p.told_all()) {
            assert!(told.keys.iter().eq(node.store.keys()), "n{me} tells n{other} what is not so");
        }
    }

    /// A fetch ends with its session, or at its deadline.
    fn end_fetches(&mut self) {
        let now = self.clock.now();
        let nodes = &self.nodes;
        self.fetches
            .retain(|_, f| f.deadline > now && nodes[f.node].shared.ticket_of(id(f.peer)) == Some(f.ticket));
    }

    /// What must be so at every moment.
    fn check(&mut self) {
        // The sets take most of the time; the digests are looked at after every step.
        let whole = self.serial.is_multiple_of(8);
        for me in 0..self.nodes.len() {
            self.nodes[me].follow();
            let node = &self.nodes[me];
            for other in (0..self.nodes.len()).filter(|&other| other != me) {
                self.check_belief(me, other);
            }
            if whole || self.nodes.len() == 2 {
                let (keys, _) = node.shared.subscribe(space(1));
                assert!(
                    keys.len() == node.view.len() && digest(keys.iter()) == digest(node.view.iter()),
                    "a subscriber of n{me} and its machines believe the same"
                );
            }
            assert!(node.shared.tickets.live() < self.nodes.len(), "tickets pile up");
        }
        let pairs = self.nodes.len() * (self.nodes.len() - 1) / 2;
        assert!(self.conns.len() <= pairs * CONNECTIONS, "{} connections", self.conns.len());
    }

    /// What n`me` believes of n`other` is what one life of it has told, up to some point, and no dead one's.
    fn check_belief(&self, me: usize, other: usize) {
        self.nodes[me].shared.look(id(other), |p| {
            assert!(p.held_count() <= self.room.held, "more keys are believed than there is room for");
            assert!(p.waiting() <= self.room.pending, "more changes wait than there is room for");
            if !p.is_up() {
                assert!(p.held_count() == 0, "n{other} is gone, and n{me} still believes what it held");
            }
            if p.held_count() == 0 {
                return;
            }
            let told = self.told.get(&(other, p.generation(), me));
            let told = told.unwrap_or_else(|| panic!("n{me} believes what n{other} never told"));
            if let Some((at, true)) = p.heard() {
                let (so, believed) = (told.at.get(&at).copied(), digest(p.held_keys()));
                assert_eq!(so, Some(believed), "n{me} believes of n{other} at {at:?} what it never told");
            }
        });
    }

    /// The weather clears; then everybody must know everything, and get it.
    fn clear(&mut self) {
        self.weather = Weather::default();
        self.cut.clear();
        for node in &mut self.nodes {
            node.model = Some(1);
            node.shared.set_facts(Some(facts(1)));
        }
        self.note("the weather clears");
        (0..CALM).for_each(|_| self.step());
        let asked = |world: &Self| -> u64 {
            let of = |me: usize| {
                (0..world.nodes.len())
                    .filter(move |&o| o != me)
                    .map(move |o| world.nodes[me].shared.look(id(o), |p| p.counts().resyncs))
            };
            (0..world.nodes.len()).flat_map(of).sum()
        };
        let before = asked(self);
        (0..QUIET).for_each(|_| self.step());
        assert_eq!(asked(self), before, "somebody still asks again although nothing is lost");
        self.check_truth();
        self.check_rails();
    }

    fn check_truth(&self) {
        for me in 0..self.nodes.len() {
            for other in (0..self.nodes.len()).filter(|&other| other != me) {
                let truth = &self.nodes[other].store;
                self.nodes[me].shared.look(id(other), |p| {
                    assert!(p.is_up(), "n{me} has no session with n{other}");
                    let held: BTreeSet<RowKey> = p.held(space(1)).collect();
                    let most = truth.len().min(self.room.held);
                    let enough = most == truth.len() && truth.len() < self.room.held / 2;
                    assert!(
                        held.iter().all(|key| truth.contains_key(key)),
                        "n{me} believes too much of n{other}"
                    );
                    let least = if enough || self.room.held > 500 { truth.len() } else { most / 2 };
                    assert!(held.len() >= least, "n{me} knows {} of {} of n{other}", held.len(), truth.len());
                });
            }
            assert!(self.nodes[me].shared.faults().is_empty(), "{:?}", self.nodes[me].shared.faults());
        }
    }

    /// Everything that is known comes when it is asked for.
    fn check_rails(&mut self) {
        for me in 0..self.nodes.len() {
            let all: Vec<RowKey> = self.nodes[me].view.iter().copied().collect();
            let before = self.fetched;
            self.fetch_these(me, &all);
            (0..4).for_each(|_| self.step());
            let came = self.fetched - before;
            assert_eq!(came, all.len() as u64, "n{me} knows {} rows and gets {came}", all.len());
        }
        assert!(self.fetches.is_empty(), "fetches never end");
    }

    /// Everything of one seed. The last events when it fails.
    fn play(seed: u64) -> Result<(), String> {
        let mut world = Self::new(seed);
        let played = catch_unwind(AssertUnwindSafe(|| {
            for _ in 0..STORM {
                world.stir();
                world.step();
            }
            world.clear();
        }));
        let trail = || Vec::from(world.trail.clone()).join("\n");
        played.map_err(|_| format!("{} nodes; what happened last:\n{}", world.nodes.len(), trail()))
    }
}

/// Plays seeds on all cores until one fails.
fn play_all(seeds: std::ops::Range<u64>) -> Option<(u64, String)> {
    let next = AtomicU64::new(seeds.start);
    let player = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return None;
            }
            if let Err(trail) = World::play(seed) {
                next.store(seeds.end, Ordering::Relaxed);
                return Some((seed, trail));
            }
        }
    };
    let players = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..players).map(|_| scope.spawn(player)).collect();
        all.into_iter().filter_map(|one| one.join().expect("a player catches what fails")).min()
    })
}

#[test]
fn after_any_weather_all_nodes_agree_and_nobody_believes_the_dead() {
    let seeds = match std::env::var("SEED") {
        Ok(seed) => {
            let seed = seed.parse().expect("SEED is a number");
            seed..seed + 1
        }
        Err(_) => 0..SEEDS,
    };
    if let Some((seed, trail)) = play_all(seeds) {
        panic!(
            "seed {seed}, {trail}\nto see it again: SEED={seed} cargo test --lib cluster::sim::after_any_weather"
        );
    }
}

#[test]
fn a_seed_plays_the_same_way_twice() {
    let play = |seed| {
        let mut world = World::new(seed);
        for _ in 0..STORM {
            world.stir();
            world.step();
        }
        (world.serial, world.fetched, Vec::from(world.trail))
    };
    for seed in [3, 4] {
        assert_eq!(play(seed), play(seed));
    }
}

/// Breaks one step of the machines at a time: the same seeds must notice, and say how to see it again.
#[test]
fn what_the_weather_must_not_do_is_noticed_when_a_check_is_missing() {
    if !cfg!(debug_assertions) {
        return;
    }
    for (mutant, noticed) in [
        ("SkipGeneration", "was heard"),
        ("SkipGap", "what it never told"),
        ("KeepDead", "still believes what it held"),
        ("KeepTicket", "a ticket is good although its session is over"),
    ] {
        let program = std::env::current_exe().expect("a test has a program");
        let run = std::process::Command::new(program)
            .args(["--exact", "cluster::sim::after_any_weather_all_nodes_agree_and_nobody_believes_the_dead"])
            .env(crate::base::mutant::VARIABLE, mutant)
            .env_remove("SEED")
            .output()
            .expect("it runs");
        let said = [run.stdout, run.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
        assert!(!run.status.success(), "{mutant} goes unnoticed: {said}");
        assert!(said.contains(noticed), "{mutant} is noticed by another check: {said}");
        assert!(said.contains("to see it again: SEED="), "{said}");
    }
}
