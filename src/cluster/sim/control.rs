//! Control between nodes: who dials whom, which connection begins a session, and what is said in it.

use std::time::Duration;

use rand::Rng;

use super::super::proto::{Hello, Message, Word};
use super::super::state::Begun;
use super::STEP;
use super::check::digest;
use super::node::id;
use super::world::World;
use crate::base::clock::Micros;

/// A connection; side 0 has dialled.
pub(super) struct Conn {
    pub(super) ends: [usize; 2],
    pub(super) generations: [u64; 2],
    pub(super) begun: [Option<Begun>; 2],
    pub(super) open: [bool; 2],
    pub(super) since: Micros,
}

/// What is under way.
#[derive(Clone)]
pub(super) enum Flight {
    Hello { conn: u64, to: usize, hello: Hello },
    Word { conn: u64, from: usize, to: usize, frame: Vec<u8> },
    Closed { conn: u64, side: usize },
}

impl World {
    pub(super) fn dial(&mut self) {
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

    pub(super) fn greet(&mut self, way: (usize, usize), flight: Flight) {
        if !self.cut.contains(&way) {
            let late = if self.chance(self.weather.late) { self.dice.random_range(1..20) } else { 0 };
            self.fly(late, flight);
        }
    }

    /// One side of a connection ends; the other side hears of it, unless the cable is cut.
    pub(super) fn close(&mut self, conn: u64, side: usize) {
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
    pub(super) fn lives(&self, conn: u64, side: usize) -> bool {
        self.conns
            .get(&conn)
            .is_some_and(|c| c.open[side] && c.generations[side] == self.nodes[c.ends[side]].generation)
    }

    pub(super) fn deliver(&mut self, flight: Flight) {
        match flight {
            Flight::Hello { conn, to, hello } => self.on_hello(conn, to, &hello),
            Flight::Closed { conn, side } => {
                if self.lives(conn, side) {
                    self.end(conn, side, "the connection ended");
                }
            }
            Flight::Word { conn, from, to, frame } => self.on_word(conn, (from, to), frame),
        }
    }

    pub(super) fn end(&mut self, conn: u64, side: usize, why: &str) {
        let Some(c) = self.conns.get(&conn) else { return };
        if let Some(begun) = &c.begun[side] {
            self.nodes[c.ends[side]].shared.end(id(c.ends[1 - side]), begun.number, why);
        }
        self.close(conn, side);
    }

    pub(super) fn on_hello(&mut self, conn: u64, to: usize, hello: &Hello) {
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
    pub(super) fn on_word(&mut self, conn: u64, (from, to): (usize, usize), frame: Vec<u8>) {
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
    pub(super) fn drive(&mut self, conn: u64, side: usize) {
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

    pub(super) fn send(&mut self, conn: u64, (me, other): (usize, usize), word: Word) {
        let generation = self.nodes[me].generation;
        self.remember((me, other), &word);
        // A connection that the other side refused carries nothing: that is not weather, whatever else is late.
        let refused = self.conns.get(&conn).is_some_and(|c| {
            let there = usize::from(c.ends[1] == other);
            !c.open[there] && c.begun[there].is_none()
        });
        if refused {
            return;
        }
        let is_ticket = matches!(word, Word::Ticket(_));
        let frame = Message::Word { generation, word }.encode();
        let flight = Flight::Word { conn, from: me, to: other, frame };
        if is_ticket { self.fly(0, flight) } else { self.toss((me, other), &flight) }
    }
}
