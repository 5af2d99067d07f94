//! Makes the copies that [`super::sharing`] asks for: an ordinary fetch into rows of this module's own, then an ordinary
//! store.
//!
//! A copy gives way: it begins only when no engine's load is under way, and one that begins ends it at once. A fetch
//! that is dropped touches its rows no more; a store is awaited, because it does. The rows are a few, on this node's
//! own memory, and known to the store only while an engine of their space is here.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use prometheus::{IntCounter, IntCounterVec};
use tokio::sync::watch;

use super::Inner;
use super::proto::Forgotten;
use super::sharing::{Batch, Drive, Row, Share, Sharing, Why};
use crate::base::block::{RowItem, RowKey, Space};
use crate::base::clock::{Clock, Micros};
use crate::base::frame::Outcome;
use crate::base::rows::{AreaId, Rows};
use crate::meter::Meter;
use crate::store;

/// Bytes of rows that are copied at one time: at least one row.
const MEMORY: usize = 32 << 20;

/// Rows that are copied at one time.
const ROWS: usize = 16;

/// Between two looks.
const LOOK: Duration = Duration::from_millis(250);

/// Silence of the engine's loads after which the link counts as idle: longer than the pause between two loads of a
/// prompt.
const IDLE: Duration = Duration::from_millis(500);

/// Time for one batch.
const PATIENCE: Duration = Duration::from_secs(30);

/// Rows in one offer.
const OFFER: usize = 256;

/// Ids of this module's areas, far from those that the engine's door counts up.
const AREAS: u64 = 1 << 63;

/// Loads of the engine: how many are under way, and when the last one ended.
#[derive(Debug)]
pub struct Loads {
    under_way: watch::Sender<usize>,
    last: AtomicU64,
}

/// A load that is under way until this is dropped.
pub struct Load<'a>(&'a Loads, &'a Clock);

impl Drop for Load<'_> {
    fn drop(&mut self) {
        self.0.last.store(self.1.now().0, Ordering::Release);
        self.0.under_way.send_modify(|count| *count -= 1);
    }
}

impl Loads {
    pub fn begin<'a>(&'a self, clock: &'a Clock) -> Load<'a> {
        self.under_way.send_modify(|count| *count += 1);
        Load(self, clock)
    }

    fn is_idle(&self, now: Micros) -> bool {
        let last = self.last.load(Ordering::Acquire);
        *self.under_way.borrow() == 0 && (last == 0 || now.since(Micros(last)) >= IDLE)
    }

    /// Returns when a load is under way.
    async fn one_comes(&self) {
        let mut count = self.under_way.subscribe();
        // Fails only when the sender is gone, and it is ours.
        let _ = count.wait_for(|count| *count > 0).await;
    }
}

/// Series of this module.
#[derive(Clone, Debug)]
pub struct Metrics {
    rows: IntCounterVec,
    bytes: IntCounter,
    failed: IntCounter,
    interrupted: IntCounter,
    offered: IntCounter,
}

impl Metrics {
    fn new(meter: &Meter) -> Self {
        let rows = meter.counters(
            "cluster_copied_rows_total",
            "Rows of other nodes that were copied to the own drive: used by both, or offered by a full one.",
            &["why"],
        );
        for why in [Why::Used, Why::Offered] {
            rows.with_label_values(&[why.label()]);
        }
        Self {
            rows,
            bytes: meter.counter("cluster_copied_bytes_total", "Bytes of rows copied from other nodes."),
            failed: meter.counter(
                "cluster_copies_failed_total",
                "Rows that were to be copied from other nodes and did not come or were not kept.",
            ),
            interrupted: meter.counter(
                "cluster_copies_interrupted_total",
                "Times copying gave way to a load of the engine.",
            ),
            offered: meter
                .counter("cluster_offered_rows_total", "Cold rows that were offered to other nodes."),
        }
    }
}

/// What the parts of sharing have in common.
#[derive(Debug)]
pub struct Desk {
    pub loads: Loads,
    pub share: Mutex<Share>,
    /// Rows of the engine that is served: the copies have the same layout.
    engine: watch::Sender<Option<Arc<Rows>>>,
    metrics: Metrics,
    areas: AtomicU64,
}

impl Desk {
    pub fn new(sharing: Sharing, meter: &Meter) -> Self {
        Self {
            loads: Loads { under_way: watch::channel(0).0, last: AtomicU64::new(0) },
            share: Mutex::new(Share::new(sharing)),
            engine: watch::channel(None).0,
            metrics: Metrics::new(meter),
            areas: AtomicU64::new(AREAS),
        }
    }

    pub fn set_engine(&self, rows: Option<Arc<Rows>>) {
        let mut share = self.share.lock();
        if let Some(rows) = &rows {
            share.set_space(rows.space);
        }
        self.engine.send_replace(rows);
    }
}

impl Inner {
    /// A request here, of this owner if that is clear, has used this chain.
    pub fn used(&self, space: Space, owner: Option<&Arc<str>>, chain: &[(RowKey, u32)]) {
        let is_ours = self.desk.engine.borrow().as_ref().is_some_and(|rows| rows.space == space);
        // A copy must not be sealed under anybody's key.
        if !is_ours || (owner.is_none() && self.store.encrypts()) {
            return;
        }
        let keys: Vec<RowKey> = chain.iter().map(|(key, _)| *key).collect();
        let here = self.store.held(space, &keys);
        let there = self.shared.held(space, &keys);
        let now = self.shared.clock.now();
        let rows = chain.iter().zip(here.into_iter().zip(there));
        let rows = rows.filter(|(_, (here, there))| !here && *there).map(|(row, _)| *row);
        self.desk.share.lock().on_used(now, owner, rows);
    }
}

/// Copies until the node stops.
pub async fn run(inner: Arc<Inner>) {
    let stopping = inner.shared.tasks.stopping();
    let mut engine = inner.desk.engine.subscribe();
    let mut own: Option<Arc<Rows>> = None;
    let mut turn = 0;
    loop {
        forget_as_told(&inner).await;
        if engine.has_changed().unwrap_or(false)
            && let Some(rows) = own.take()
        {
            inner.store.detach(rows.id).await;
        }
        let rows = engine.borrow_and_update().clone();
        let more = match &rows {
            Some(rows) => step(&inner, rows, &mut own, &mut turn).await,
            None => false,
        };
        if more && !stopping.is_cancelled() {
            continue;
        }
        if stopping.run_until_cancelled(tokio::time::sleep(LOOK)).await.is_none() {
            return;
        }
    }
}

/// Destroys the keys of owners that other nodes' operators want to be forgotten. Between two batches, so that no copy of
/// theirs is under way.
async fn forget_as_told(inner: &Inner) {
    for (of, owner) in inner.shared.take_orders_to_forget() {
        inner.desk.share.lock().on_owner_forgotten(&owner);
        let done = match inner.store.forget_owner(&owner).await {
            Ok(store::Forgotten { keys, rows }) => Forgotten { keys, rows, trouble: String::new() },
            Err(store::Error::UnknownOwner { .. }) => Forgotten::default(),
            Err(error) => Forgotten { trouble: error.to_string(), ..Forgotten::default() },
        };
        match done.trouble.as_str() {
            "" => tracing::info!(
                keys = done.keys,
                rows = done.rows,
                "an owner was forgotten, as another node said"
            ),
            why => tracing::error!(why, "an owner that another node wants forgotten is not"),
        }
        inner.shared.say_forgotten(of, owner, done);
    }
}

/// Offers, and copies one batch. True when there may be more to do at once.
async fn step(inner: &Inner, engine: &Arc<Rows>, own: &mut Option<Arc<Rows>>, turn: &mut usize) -> bool {
    let (desk, shared, space) = (&inner.desk, &inner.shared, engine.space);
    let now = shared.clock.now();
    let status = inner.store.usage();
    let drive = Drive { used: status.0, capacity: status.1, row_bytes: engine.row_bytes() as u64 };
    let seals = inner.store.encrypts();
    for rows in shared.take_offers(space) {
        // What is sealed there is sealed here too or not taken, and the other way round: in the clear a row would
        // outlive its owner's key, and sealed under nobody's key it could never be forgotten.
        desk.share.lock().on_offer(rows.into_iter().filter(|row| row.owner.is_some() == seals));
    }
    if desk.share.lock().offers(now, drive) {
        *turn = turn.wrapping_add(1);
        let cold = inner.store.coldest(space, *turn, OFFER).into_iter();
        let cold = cold.map(|store::Cold { key, position, owner }| Row { key, position, owner }).collect();
        desk.metrics.offered.inc_by(shared.offer(space, cold, *turn) as u64);
    }
    if !desk.loads.is_idle(now) {
        return false;
    }
    let most = (MEMORY / engine.row_bytes().max(1)).clamp(1, ROWS);
    let here = |key: &RowKey| inner.store.holds(space, key);
    let there = |key: &RowKey| shared.held(space, std::slice::from_ref(key)) == [true];
    let batch = desk.share.lock().next(now, drive, most, here, there);
    let Some(batch) = batch else { return false };
    if own.is_none() {
        *own = attach(inner, engine, most).await;
    }
    match own {
        Some(rows) => copy(inner, rows, batch).await,
        None => false,
    }
}

async fn attach(inner: &Inner, engine: &Rows, most: usize) -> Option<Arc<Rows>> {
    let id = AreaId(inner.desk.areas.fetch_add(1, Ordering::Relaxed));
    let rows = match engine.twin(id, u32::try_from(most).expect("a few rows")) {
        Ok(rows) => rows,
        Err(error) => {
            tracing::warn!(%error, "no memory to copy rows of other nodes with");
            return None;
        }
    };
    match inner.store.attach(&rows).await {
        Ok(()) => Some(rows),
        Err(error) => {
            tracing::warn!(%error, "rows of other nodes cannot be copied");
            None
        }
    }
}

/// Copies a batch, unless a load comes.
async fn copy(inner: &Inner, rows: &Arc<Rows>, batch: Batch) -> bool {
    let desk = &inner.desk;
    let numbered = (0_u32..).zip(&batch.rows);
    let items: Vec<RowItem> =
        numbered.map(|(row, wanted)| RowItem { key: wanted.key, position: wanted.position, row }).collect();
    let deadline = inner.shared.clock.now().plus(PATIENCE);
    let fetched = tokio::select! {
        biased;
        () = desk.loads.one_comes() => None,
        fetched = inner.fetch(rows, items.clone(), Some(deadline)) => Some(fetched),
    };
    let Some(fetched) = fetched else {
        desk.metrics.interrupted.inc();
        desk.share.lock().on_interrupted(batch);
        return false;
    };
    let mut came: BTreeMap<Arc<str>, Vec<RowItem>> = BTreeMap::new();
    for ((item, row), outcome) in items.iter().zip(&batch.rows).zip(fetched) {
        if outcome == Outcome::FromPeer {
            came.entry(row.owner.clone().unwrap_or_default()).or_default().push(*item);
        }
    }
    let mut kept: Vec<RowKey> = Vec::new();
    for (owner, items) in came {
        let stored = inner.store.put_of(owner, rows, items.clone()).await;
        let done = items.iter().zip(stored).filter(|(_, outcome)| outcome.is_ok());
        // A full drive keeps what is worth more, and does not count that as a failure.
        kept.extend(done.map(|(item, _)| item.key).filter(|key| inner.store.holds(rows.space, key)));
    }
    if batch.why == Why::Offered {
        inner.store.cool(rows.space, &kept);
    }
    desk.metrics.failed.inc_by((items.len() - kept.len()) as u64);
    desk.metrics.rows.with_label_values(&[batch.why.label()]).inc_by(kept.len() as u64);
    desk.metrics.bytes.inc_by((kept.len() * rows.row_bytes()) as u64);
    let all = kept.len() == items.len();
    desk.share.lock().on_copied(batch.why, kept.into_iter());
    all
}
