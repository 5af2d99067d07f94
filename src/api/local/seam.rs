//! The parts of store and cluster that the door uses, in memory, until those two are in the tree.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::broadcast;

use crate::base::block::{RowItem, RowKey, Space};
use crate::base::clock::Micros;
use crate::base::frame::Outcome;
use crate::base::rows::{AreaId, Rows};
use crate::base::units::Bytes;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeKind {
    Added,
    Removed,
}

#[derive(Clone, Copy, Debug)]
pub struct Change {
    pub space: Space,
    pub key: RowKey,
    pub position: u32,
    pub kind: ChangeKind,
}

#[derive(Clone, Debug)]
#[expect(clippy::type_complexity, reason = "goes away")]
pub struct Store(Arc<(Mutex<HashMap<(Space, RowKey), (u32, Vec<u8>)>>, broadcast::Sender<Change>)>);

#[derive(Debug)]
pub struct StoreStatus {
    pub capacity: Bytes,
}

impl Store {
    #[expect(clippy::new_without_default, reason = "goes away")]
    pub fn new() -> Self {
        Self(Arc::new((Mutex::default(), broadcast::channel(64).0)))
    }
    pub async fn attach(&self, _rows: &Arc<Rows>) -> Result<(), std::io::Error> {
        Ok(())
    }
    pub async fn detach(&self, _area: AreaId) {}
    pub async fn put(&self, rows: &Arc<Rows>, items: Vec<RowItem>) -> Vec<Outcome> {
        items
            .into_iter()
            .map(|item| {
                rows.blank_uncovered(item.row, item.key.group.0);
                let bytes = rows.look(item.row, <[u8]>::to_vec);
                let old = self.0.0.lock().insert((rows.space, item.key), (item.position, bytes));
                if old.is_some() {
                    return Outcome::Held;
                }
                let _ = self.0.1.send(Change {
                    space: rows.space,
                    key: item.key,
                    position: item.position,
                    kind: ChangeKind::Added,
                });
                Outcome::Stored
            })
            .collect()
    }
    pub async fn get(
        &self,
        rows: &Arc<Rows>,
        items: Vec<RowItem>,
        _deadline: Option<Micros>,
    ) -> Vec<Outcome> {
        items
            .into_iter()
            .map(|item| match self.0.0.lock().get(&(rows.space, item.key)) {
                Some((_, bytes)) => {
                    rows.fill(item.row, |b| b.copy_from_slice(bytes));
                    Outcome::FromDrive
                }
                None => Outcome::Failed,
            })
            .collect()
    }
    pub fn holds(&self, space: Space, key: &RowKey) -> bool {
        self.0.0.lock().contains_key(&(space, *key))
    }
    pub fn subscribe(&self, space: Space) -> (Vec<(RowKey, u32)>, broadcast::Receiver<Change>) {
        let held = self.0.0.lock();
        let keys = held.iter().filter(|((s, _), _)| *s == space).map(|((_, k), (p, _))| (*k, *p)).collect();
        (keys, self.0.1.subscribe())
    }
    pub fn status(&self) -> StoreStatus {
        StoreStatus { capacity: Bytes::mib(64) }
    }
}

#[derive(Clone, Copy, Debug)]
pub enum PeerChange {
    Added(Space, RowKey),
    Removed(Space, RowKey),
    Gone,
}

#[derive(Clone, Debug)]
pub struct SpaceFacts {
    pub space: Space,
    pub what: BTreeMap<String, String>,
}

#[derive(Clone, Debug)]
pub struct Cluster(broadcast::Sender<PeerChange>);

impl Cluster {
    pub fn set_space(&self, _facts: Option<SpaceFacts>) {}
    pub fn subscribe(&self, _space: Space) -> (Vec<RowKey>, broadcast::Receiver<PeerChange>) {
        (Vec::new(), self.0.subscribe())
    }
    pub async fn fetch(
        &self,
        _rows: &Arc<Rows>,
        items: Vec<RowItem>,
        _deadline: Option<Micros>,
    ) -> Vec<Outcome> {
        vec![Outcome::Failed; items.len()]
    }
}
