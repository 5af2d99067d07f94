//! What must be so: what is told is true, what is believed was told, and in the end everybody knows everything.

use std::collections::{BTreeMap, BTreeSet};

use super::super::proto::Word;
use super::node::{facts, id, space};
use super::world::{Weather, World};
use super::{CALM, CONNECTIONS, QUIET};
use crate::base::block::RowKey;

/// A number for a set of keys, whatever their order.
pub(super) fn digest<'a>(keys: impl Iterator<Item = &'a RowKey>) -> u64 {
    let mixed = |key: &RowKey| {
        let n = u32::from_be_bytes(key.hash.0[..4].try_into().expect("4 of 32"));
        let z = (u64::from(n) + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (z ^ (z >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9)
    };
    keys.fold(0, |sum, key| sum.wrapping_add(mixed(key)))
}

/// What one life of a node has told one other node.
#[derive(Default)]
pub(super) struct Told {
    pub(super) keys: BTreeSet<RowKey>,
    /// Digest of the keys after each snapshot and change.
    pub(super) at: BTreeMap<(u32, u64), u64>,
}

impl World {
    /// Keeps what is told, and looks whether it is true.
    pub(super) fn remember(&mut self, (me, other): (usize, usize), word: &Word) {
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

    /// What must be so at every moment.
    pub(super) fn check(&mut self) {
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
    pub(super) fn check_belief(&self, me: usize, other: usize) {
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
    pub(super) fn clear(&mut self) {
        self.weather = Weather::CLEAR;
        self.cut.clear();
        self.cut_rails.clear();
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
        self.check_fetches();
    }

    pub(super) fn check_truth(&self) {
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
}
