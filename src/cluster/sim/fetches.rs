//! Rows that nodes fetch from each other, over rails that open and end with their sessions.

use std::sync::Arc;
use std::time::Duration;

use rand::Rng;
use rand::rngs::StdRng;

use super::super::identity::Fingerprint;
use super::SILENCE;
use super::node::{Node, id, node, space};
use super::world::World;
use crate::base::block::{RowItem, RowKey};
use crate::base::frame::Outcome;
use crate::base::rows::Rows;
use crate::transfer::Ticket;
use crate::transfer::sim::{self, Cable, Ended, RAILS, ROW, Rails, Scene, TICK, There};

/// Rows of an engine: more than any node knows of.
const ROWS: u32 = 320;

/// What lies in rows that belong to nobody.
const BLANK: [u8; ROW] = [0xEE; ROW];

/// Longest time of a fetch in clear weather while one of its two rails is dead: silence of that rail, and the rest.
const WITH_ONE_DEAD: Duration = Duration::from_secs(4);

/// The rows of one life of a node, and which are free.
pub(super) struct Area {
    rows: Arc<Rows>,
    free: Vec<u32>,
}

/// Rows that are being fetched.
pub(super) struct Fetch {
    items: Vec<RowItem>,
}

/// A node as those see it that it serves.
struct Serving<'a> {
    node: &'a Node,
    /// Who is served.
    to: Fingerprint,
}

impl There for Serving<'_> {
    fn generation(&self) -> u64 {
        self.node.generation
    }

    fn admits(&self, ticket: &Ticket) -> bool {
        let good = self.node.shared.tickets.admits(ticket);
        let up = self.node.shared.look(self.to, |p| p.is_up());
        assert!(up || !good, "a ticket is good although its session is over");
        good
    }

    fn position(&self, key: &RowKey) -> Option<u32> {
        self.node.store.get(key).copied()
    }
}

impl Cable {
    /// As a cable should be, made slower so that a fetch takes a while.
    pub(super) const WELL: Self = Self { rate: 20_000_000, passes: [true, true], damage: 0, reads: 1 };

    pub(super) fn bad(dice: &mut StdRng) -> Self {
        let rate = [50_000, 200_000, 1_000_000, 20_000_000][dice.random_range(0..4)];
        let passes = [(); 2].map(|()| dice.random_range(0..6) > 0);
        let damage = if dice.random_range(0..4) == 0 { 20 } else { 0 };
        // Sometimes the drive takes longer than anybody waits.
        let reads = [1, 10, 10, 40, 1_000][dice.random_range(0..5)];
        Self { rate, passes, damage, reads }
    }
}

impl Area {
    pub(super) fn new() -> Self {
        let rows = sim::area(space(1), ROWS, ROW);
        (0..ROWS).for_each(|row| rows.fill(row, |bytes| bytes.copy_from_slice(&BLANK)));
        Self { rows, free: (0..ROWS).rev().collect() }
    }

    /// A row that nobody has touched since it was handed back.
    fn take(&mut self) -> Option<u32> {
        let row = self.free.pop()?;
        let blank = self.rows.look(row, |bytes| bytes == BLANK);
        assert!(blank, "a row was written after it was handed back");
        Some(row)
    }

    fn give_back(&mut self, row: u32) {
        self.rows.fill(row, |bytes| bytes.copy_from_slice(&BLANK));
        self.free.push(row);
    }
}

impl World {
    pub(super) fn fetch(&mut self, me: usize) {
        let all: Vec<RowKey> = self.nodes[me].view.iter().copied().collect();
        if all.is_empty() || self.nodes[me].model != Some(1) {
            return;
        }
        let keys: Vec<RowKey> = (0..5).map(|_| all[self.dice.random_range(0..all.len())]).collect();
        let patient = self.chance(20);
        let deadline =
            if patient { None } else { Some(Duration::from_millis(self.dice.random_range(30..2_500))) };
        self.fetch_these(me, &keys, deadline);
    }

    fn fetch_these(&mut self, me: usize, keys: &[RowKey], deadline: Option<Duration>) {
        self.follow_sessions();
        let deadline = deadline.map(|span| self.clock.now().plus(span));
        for (of, _, indices) in self.nodes[me].shared.sources(space(1), keys) {
            let (peer, area) = (node(of), &mut self.nodes[me].area);
            let item = |index: usize| {
                let key = keys[index];
                let position = u32::from_be_bytes(key.hash.0[..4].try_into().expect("4 of 32"));
                Some(RowItem { key, position, row: area.take()? })
            };
            let items: Vec<RowItem> = indices.into_iter().filter_map(item).collect();
            let rails = self.rails.get_mut(&(me, peer)).expect("a node with a ticket has rails");
            let fetch = rails.fetch(&area.rows, &items, deadline);
            self.fetches.insert((me, peer, fetch), Fetch { items });
        }
    }

    /// Whoever waits for the oldest fetch of a node goes away.
    pub(super) fn give_up(&mut self, me: usize) {
        let Some((&(_, peer, fetch), _)) = self.fetches.range((me, 0, 0)..(me + 1, 0, 0)).next() else {
            return;
        };
        self.rails.get_mut(&(me, peer)).expect("a fetch has rails").abandon(fetch);
        self.hand_back(me, peer, fetch);
    }

    fn hand_back(&mut self, me: usize, peer: usize, fetch: u64) -> Vec<RowItem> {
        let Fetch { items } = self.fetches.remove(&(me, peer, fetch)).expect("it was begun");
        for item in &items {
            self.nodes[me].area.give_back(item.row);
        }
        items
    }

    /// Rails begin with the ticket of a session, and end when it is good for nothing any more.
    fn follow_sessions(&mut self) {
        let now = self.clock.now();
        for me in 0..self.nodes.len() {
            for peer in (0..self.nodes.len()).filter(|&peer| peer != me) {
                let shared = &self.nodes[me].shared;
                let ticket = shared.ticket_of(id(peer));
                let open = self.rails.get(&(me, peer)).map(|rails| rails.ticket);
                if open == ticket {
                    continue;
                }
                let fresh = ticket.map(|ticket| {
                    let generation = shared.look(id(peer), |p| p.generation());
                    Rails::open(ticket, generation, SILENCE, &shared.transfer, now)
                });
                if let Some(mut old) = self.rails.remove(&(me, peer)) {
                    let ended = old.close(now);
                    self.take(me, peer, ended);
                }
                if let Some(fresh) = fresh {
                    self.rails.insert((me, peer), fresh);
                }
            }
        }
    }

    /// One tick of all rails.
    pub(super) fn tick(&mut self) {
        self.clock.advance(TICK);
        self.follow_sessions();
        let now = self.clock.now();
        let ways: Vec<(usize, usize)> = self.rails.keys().copied().collect();
        for (me, peer) in ways {
            let Some(rails) = self.rails.get_mut(&(me, peer)) else { continue };
            let alive =
                self.nodes[me].shared.look(id(peer), |p| p.is_up() && p.generation() == rails.generation);
            let there = Serving { node: &self.nodes[peer], to: id(me) };
            let mut cables = self.weather.rails;
            for cable in &mut cables {
                cable.passes[0] &= !self.cut_rails.contains(&(me, peer));
                cable.passes[1] &= !self.cut_rails.contains(&(peer, me));
            }
            let ended = rails.tick(&Scene { now, cables, there: &there, alive }, &mut self.dice);
            self.take(me, peer, ended);
        }
    }

    /// Rows of fetches that are over are whole and right, or failed.
    fn take(&mut self, me: usize, peer: usize, ended: Vec<Ended>) {
        for Ended { fetch, outcomes } in ended {
            let Fetch { items } = &self.fetches[&(me, peer, fetch)];
            for (item, outcome) in items.iter().zip(outcomes) {
                if outcome == Outcome::FromPeer {
                    let right = |bytes: &[u8]| bytes == sim::content(&item.key);
                    assert!(
                        self.nodes[me].area.rows.look(item.row, right),
                        "a row came that is not the one asked for"
                    );
                    self.fetched += 1;
                } else {
                    assert_eq!(outcome, Outcome::Failed);
                    self.failed += 1;
                }
            }
            self.hand_back(me, peer, fetch);
        }
    }

    /// The weather is clear: everything that is known comes when it is asked for, also when a rail dies meanwhile.
    pub(super) fn check_fetches(&mut self) {
        let stuck: Vec<_> = self
            .fetches
            .keys()
            .map(|(me, peer, fetch)| (me, peer, self.rails[&(*me, *peer)].tell(*fetch)))
            .collect();
        assert!(stuck.is_empty(), "fetches never end: {stuck:?}");
        for me in 0..self.nodes.len() {
            let all: Vec<RowKey> = self.nodes[me].view.iter().copied().collect();
            let before = self.fetched;
            self.fetch_these(me, &all, None);
            (0..4).for_each(|_| self.tick());
            let dead = self.dice.random_range(0..RAILS);
            self.weather.rails[dead].passes = [false, false];
            let until = self.clock.now().plus(WITH_ONE_DEAD);
            while !self.fetches.is_empty() && self.clock.now() < until {
                self.step();
            }
            let came = self.fetched - before;
            assert_eq!(came, all.len() as u64, "n{me} knows {} rows and gets {came}", all.len());
            self.weather.rails[dead] = Cable::WELL;
            // Until the dead rail is back.
            (0..40).for_each(|_| self.step());
        }
        for node in &self.nodes {
            assert_eq!(node.area.free.len(), ROWS as usize, "rows are lost");
        }
    }
}
