//! One life of a node: its machines, its drive and its engine's rows.

use std::collections::{BTreeMap, BTreeSet};

use tokio::sync::broadcast::{self, error::TryRecvError};

use super::super::identity::{Fingerprint, Pin};
use super::super::peer::Room;
use super::super::proto::{Hello, SpaceFacts};
use super::super::state::{Parts, PeerChange, Shared};
use super::SILENCE;
use super::fetches::Area;
use crate::base::block::{BlockHash, GroupId, Namespace, Rank, RowKey, Space};
use crate::base::clock::{Clock, Micros};
use crate::meter::Meter;
use crate::tasks::Tasks;
use crate::transfer::Fabric;

pub(super) fn space(n: u8) -> Space {
    Space { namespace: Namespace([n; 32]), rank: Rank::ONLY }
}

pub(super) fn facts(n: u8) -> SpaceFacts {
    SpaceFacts { space: space(n), what: BTreeMap::from([("model".to_owned(), n.to_string())]) }
}

pub(super) fn key(n: u32) -> RowKey {
    let mut hash = [0; 32];
    hash[..4].copy_from_slice(&n.to_be_bytes());
    RowKey { hash: BlockHash(hash), group: GroupId(0) }
}

pub(super) fn id(node: usize) -> Fingerprint {
    Fingerprint([u8::try_from(node).expect("eight nodes") + 1; 32])
}

pub(super) fn node(of: Fingerprint) -> usize {
    usize::from(of.0[0]) - 1
}

pub(super) fn name(node: usize) -> String {
    format!("n{node}")
}

/// One life of a node.
pub(super) struct Node {
    pub(super) shared: Shared,
    pub(super) generation: u64,
    /// What it really holds.
    pub(super) store: BTreeMap<RowKey, u32>,
    /// The model that its engine serves.
    pub(super) model: Option<u8>,
    pub(super) heard: broadcast::Receiver<PeerChange>,
    /// What a subscriber believes that the others hold.
    pub(super) view: BTreeSet<RowKey>,
    pub(super) area: Area,
    pub(super) dial_at: Vec<Micros>,
}

impl Node {
    pub(super) fn start(me: usize, count: usize, generation: u64, clock: &Clock, room: Room) -> Self {
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
            area: Area::new(),
            dial_at: vec![clock.now(); count],
        }
    }

    pub(super) fn hello(&self, me: usize) -> Hello {
        // Without a data address no rail is opened: the simulation has rails of its own.
        Hello {
            generation: self.generation,
            name: name(me),
            control: name(me),
            data: Vec::new(),
            secret: None,
        }
    }

    /// What a subscriber learns.
    pub(super) fn follow(&mut self) {
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
