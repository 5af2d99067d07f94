//! All nodes, what is under way between them, and what happens to them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::super::identity::Fingerprint;
use super::super::peer::Room;
use super::check::Told;
use super::control::{Conn, Flight};
use super::fetches::Fetch;
use super::node::{Node, facts, id, key, space};
use super::{KEYS, STEP};
use crate::base::clock::{Clock, Micros};
use crate::transfer::sim::{Cable, RAILS, Rails, TICK};

/// How the network treats what is sent, in percent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Weather {
    pub(super) lost: u32,
    pub(super) doubled: u32,
    pub(super) late: u32,
    pub(super) rails: [Cable; RAILS],
    /// Of a hundred fetches, so many are given up by whoever waits for them.
    pub(super) given_up: u32,
}

impl Weather {
    /// Nothing is lost, and every rail carries 20 MB/s.
    pub(super) const CLEAR: Self =
        Self { lost: 0, doubled: 0, late: 0, rails: [Cable::WELL; RAILS], given_up: 0 };

    fn bad(dice: &mut StdRng) -> Self {
        let rails = [(); RAILS].map(|()| Cable::bad(dice));
        let mut up_to = |most| dice.random_range(0..most);
        Self { lost: up_to(40), doubled: up_to(40), late: up_to(60), rails, given_up: up_to(8) }
    }
}

pub(super) struct World {
    pub(super) dice: StdRng,
    pub(super) clock: Clock,
    pub(super) room: Room,
    pub(super) nodes: Vec<Node>,
    pub(super) conns: BTreeMap<u64, Conn>,
    /// Directions in which nothing passes.
    pub(super) cut: BTreeSet<(usize, usize)>,
    pub(super) cut_rails: BTreeSet<(usize, usize)>,
    pub(super) weather: Weather,
    pub(super) flying: BTreeMap<(Micros, u64), Flight>,
    pub(super) serial: u64,
    pub(super) told: BTreeMap<(usize, u64, usize), Told>,
    /// From one node to another.
    pub(super) rails: BTreeMap<(usize, usize), Rails>,
    pub(super) fetches: BTreeMap<(usize, usize, u64), Fetch>,
    /// Rows that came, and that did not.
    pub(super) fetched: u64,
    pub(super) failed: u64,
    /// The last things that happened, for whoever reads a failure.
    pub(super) trail: VecDeque<String>,
}

impl World {
    pub(super) fn new(seed: u64) -> Self {
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
            cut_rails: BTreeSet::new(),
            weather: Weather::CLEAR,
            flying: BTreeMap::new(),
            serial: 0,
            told: BTreeMap::new(),
            rails: BTreeMap::new(),
            fetches: BTreeMap::new(),
            fetched: 0,
            failed: 0,
            trail: VecDeque::new(),
        }
    }

    pub(super) fn chance(&mut self, percent: u32) -> bool {
        self.dice.random_range(0..100) < percent
    }

    pub(super) fn pick(&mut self) -> usize {
        self.dice.random_range(0..self.nodes.len())
    }

    pub(super) fn note(&mut self, what: impl std::fmt::Display) {
        if self.trail.len() == 30 {
            self.trail.pop_front();
        }
        self.trail.push_back(format!("{:>8.2} s  {what}", self.clock.now().0 as f64 / 1e6));
    }

    pub(super) fn serial(&mut self) -> u64 {
        self.serial += 1;
        self.serial
    }

    pub(super) fn fly(&mut self, steps: u32, flight: Flight) {
        let at = (self.clock.now().plus(STEP * steps), self.serial());
        self.flying.insert(at, flight);
    }

    /// Sends what a network may lose, double and delay.
    pub(super) fn toss(&mut self, way: (usize, usize), flight: &Flight) {
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
    pub(super) fn stir(&mut self) {
        if self.chance(8) {
            self.weather = Weather::bad(&mut self.dice);
            let weather = self.weather;
            self.note(format_args!("{weather:?}"));
        }
        if self.chance(6) {
            let way = (self.pick(), self.pick());
            let now = if self.cut.remove(&way) { "mended" } else { "cut" };
            self.cut_rails.remove(&way);
            if now == "cut" {
                self.cut.insert(way);
                // Control may have a cable of its own.
                if self.chance(60) {
                    self.cut_rails.insert(way);
                }
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
            if self.chance(self.weather.given_up) {
                self.give_up(me);
            }
        }
    }

    /// The process of a node dies, and another one begins with what the drive still has.
    pub(super) fn restart(&mut self) {
        let me = self.pick();
        let (count, generation) = (self.nodes.len(), self.nodes[me].generation + 1);
        let mut store = std::mem::take(&mut self.nodes[me].store);
        let kept: Vec<bool> = store.iter().map(|_| self.dice.random_range(0..10) > 0).collect();
        let mut kept = kept.into_iter();
        store.retain(|_, _| kept.next().unwrap_or_default());
        self.nodes[me] = Node::start(me, count, generation, &self.clock, self.room);
        self.nodes[me].store = store;
        self.note(format_args!("n{me} starts again, generation {generation}"));
        // What it fetched it does not wait for any more; rails to it notice by themselves.
        self.rails.retain(|&(from, _), _| from != me);
        self.fetches.retain(|&(from, _, _), _| from != me);
        let of: Vec<(u64, usize)> = self
            .conns
            .iter()
            .filter_map(|(&conn, c)| c.ends.iter().position(|&end| end == me).map(|side| (conn, side)))
            .collect();
        for (conn, side) in of {
            self.close(conn, side);
        }
    }

    pub(super) fn change_rows(&mut self, me: usize) {
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
    pub(super) fn sessions(&self, me: usize) -> Vec<(Fingerprint, u64)> {
        let of = |conn: &Conn| {
            let side = conn.ends.iter().position(|&end| end == me).filter(|&side| conn.open[side])?;
            Some((id(conn.ends[1 - side]), conn.begun[side].as_ref()?.number))
        };
        self.conns.values().filter_map(of).collect()
    }

    /// Everything moves on: rails by ticks, all else once.
    pub(super) fn step(&mut self) {
        (0..STEP.as_millis() / TICK.as_millis()).for_each(|_| self.tick());
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
        self.check();
    }
}
