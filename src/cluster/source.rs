//! What this node holds, as the cluster sees it: rows to serve and changes to tell.

use std::collections::HashMap;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::broadcast;

use crate::base::block::{RowKey, Space};
use crate::transfer::{Record, Shelf};

/// A row came or went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    pub space: Space,
    pub key: RowKey,
    /// `None`: it is gone.
    pub position: Option<u32>,
}

/// Where rows are.
#[derive(Clone, Debug)]
pub enum Source {
    Mem(MemSource),
}

/// Rows in memory.
#[derive(Clone, Debug)]
pub struct MemSource {
    rows: Arc<Mutex<HashMap<(Space, RowKey), Record>>>,
    changes: broadcast::Sender<Change>,
}

impl Default for MemSource {
    fn default() -> Self {
        Self { rows: Arc::default(), changes: broadcast::channel(1024).0 }
    }
}

impl MemSource {
    pub fn put(&self, space: Space, key: RowKey, record: Record) {
        let mut rows = self.rows.lock();
        let position = Some(record.position);
        rows.insert((space, key), record);
        let _ = self.changes.send(Change { space, key, position });
    }

    pub fn remove(&self, space: Space, key: RowKey) {
        self.rows.lock().remove(&(space, key));
        let _ = self.changes.send(Change { space, key, position: None });
    }
}

impl From<MemSource> for Source {
    fn from(mem: MemSource) -> Self {
        Self::Mem(mem)
    }
}

impl Source {
    /// Everything held of `space`, and every change from exactly there on.
    pub fn subscribe(&self, space: Space) -> (Vec<(RowKey, u32)>, broadcast::Receiver<Change>) {
        match self {
            Self::Mem(mem) => {
                let rows = mem.rows.lock();
                let held = rows.iter().filter(|((s, _), _)| *s == space);
                (held.map(|((_, k), r)| (*k, r.position)).collect(), mem.changes.subscribe())
            }
        }
    }
}

impl Shelf for Source {
    fn read(&self, space: Space, key: RowKey) -> BoxFuture<'static, Option<Record>> {
        match self {
            Self::Mem(mem) => {
                let record = mem.rows.lock().get(&(space, key)).cloned();
                Box::pin(std::future::ready(record))
            }
        }
    }
}
