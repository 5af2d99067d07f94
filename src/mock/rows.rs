//! Rows that the engine shares with its node: hits are brought from it, and what was computed is offered to it.
//!
//! A hit reserves every row that it needs, or none, and waits for what others bring already. Each row that a hit uses
//! is compared with what the engine would have computed: a wrong byte is counted and said aloud in the reply. Without
//! a node the rows rest.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use super::cache::{self, ATTENTION, Lru, Place, Plan, STATE, Search};
use super::client::Area;
use super::counts::Counts;
use super::link::Link;
use super::model;
use super::options::{Groups, Shape};
use super::steps::Device;
use crate::base::block::{BlockHash, RowItem, RowKey};
use crate::base::frame::{Outcome, PROTOCOL, Sources};
use crate::base::geometry::{Group, GroupKind, Hello};
use crate::tasks::{Kind, Tasks};

/// Share of the recomputing time that a load may take (in hundredths).
const LOAD_SHARE: u64 = 90;

/// How long past its deadline a load's answer is awaited before the request goes on without.
const SLACK: Duration = Duration::from_millis(250);

/// Pause after an order is given until an engine that is told to abort in the middle of it does.
const CRASH_AFTER: Duration = Duration::from_millis(1);

/// The groups of `shape`, as the engine announces them.
fn groups(shape: &Shape) -> Vec<Group> {
    let tokens_per_row = u32::try_from(shape.block_tokens).unwrap_or(u32::MAX);
    let attention =
        Group { kind: GroupKind::FullAttention, tokens_per_row, covered: vec![(0, shape.row_bytes)] };
    // Two layers with a gap between them and after: what a group does not cover is never to come back.
    let half = shape.row_bytes / 2;
    let state =
        Group { kind: GroupKind::Mamba, tokens_per_row, covered: vec![(64, half - 128), (half, half / 2)] };
    match shape.groups {
        Groups::Attention => vec![attention],
        Groups::AttentionAndState => vec![attention, state],
    }
}

/// What the engine says of itself.
pub fn hello(shape: &Shape, engine_id: &str, model: &str) -> Hello {
    let interchange = BTreeMap::from([("mock.seed".to_owned(), shape.seed.to_string())]);
    Hello {
        protocol: PROTOCOL,
        plugin: "mock".into(),
        vllm: "mock".into(),
        pid: std::process::id(),
        engine_id: engine_id.to_owned(),
        model: model.to_owned(),
        rank: 0,
        ranks: 1,
        rows: shape.rows,
        row_bytes: shape.row_bytes,
        hash_unit: u32::try_from(shape.block_tokens).unwrap_or(u32::MAX),
        hash_algorithm: "sha256_cbor".into(),
        hash_seed: shape.hash_seed.clone(),
        groups: groups(shape),
        interchange,
    }
}

/// What a hit brought.
#[derive(Clone, Copy, Debug, Default)]
pub struct Hit {
    /// Blocks of the prompt that need not be computed, and how many of those came from where.
    pub blocks: usize,
    pub device: usize,
    staging: usize,
    drive: usize,
    peer: usize,
    pub wrong: bool,
}

/// Rows that a hit has reserved, all pinned.
struct Reserved {
    plan: Plan,
    /// Rows in the area already, and those to be loaded, with their numbers in `plan.beyond`.
    staging: Vec<(usize, u32)>,
    load: Vec<(usize, u32)>,
}

enum Reserving {
    Done(Reserved),
    /// Others have the rows, or bring them: look again when something changed.
    Busy(usize),
}

#[derive(Debug)]
struct State {
    rows: Lru,
    /// Rows that hits hold now.
    hit_rows: usize,
}

/// Rows, and the line to the node. Cheap to clone.
#[derive(Clone)]
pub struct Rows(Arc<Inner>);

struct Inner {
    shape: Shape,
    covered: Vec<Vec<(u32, u32)>>,
    area: Arc<Area>,
    link: Option<Link>,
    device: Device,
    /// Taken for moments only, and never while bytes are written or compared.
    state: Mutex<State>,
    /// Rows became ready, free, or less.
    changed: Notify,
    counts: Arc<Counts>,
    tasks: Tasks,
}

impl Rows {
    pub fn new(
        shape: Shape,
        area: Arc<Area>,
        link: Option<Link>,
        device: Device,
        counts: Arc<Counts>,
        tasks: Tasks,
    ) -> Self {
        Self(Arc::new(Inner {
            covered: groups(&shape).into_iter().map(|g| g.covered).collect(),
            state: Mutex::new(State { rows: Lru::new(shape.rows), hit_rows: 0 }),
            changed: Notify::new(),
            shape,
            area,
            link,
            device,
            counts,
            tasks,
        }))
    }

    /// Whether the engine was given a node at all.
    pub fn has_line(&self) -> bool {
        self.0.link.is_some()
    }

    /// Whether a node is connected.
    pub fn has_node(&self) -> bool {
        self.0.link.as_ref().is_some_and(|link| link.view().is_some())
    }

    /// Rows that a request or a job holds.
    pub fn pinned(&self) -> usize {
        self.0.state.lock().rows.pinned()
    }

    /// Empties the area, but for what a transfer holds. Whether all went.
    pub fn clear(&self) -> bool {
        self.0.state.lock().rows.clear()
    }

    /// Brings what is there. A request that has waited long enough goes on without; what it reserved is given
    /// back when nothing can touch it any more.
    pub async fn hit(&self, request: &str, chain: &[BlockHash], prompt: usize) -> Hit {
        let (done, brought) = oneshot::channel();
        let (inner, chain, request) = (Arc::clone(&self.0), chain.to_vec(), request.to_owned());
        let most = prompt.saturating_sub(1) / self.0.shape.block_tokens;
        self.0.tasks.spawn(Kind::Serving, "mock hit", async move {
            let _ = done.send(inner.bring(&chain, most, request).await);
        });
        let limit = self.0.patience(most) * 2 + SLACK;
        match tokio::time::timeout(limit, brought).await {
            Ok(Ok(hit)) => hit,
            _ => Hit::default(),
        }
    }

    /// Offers the rows of `chain` from `from` on, those before it where the node has lost them.
    pub fn offer(&self, request: &str, chain: &[BlockHash], from: usize) {
        self.0.offer(request, chain, from);
    }

    /// Tells the node where a request's tokens came from.
    pub async fn report(&self, request: &str, prompt: usize, chain: &[BlockHash], hit: Hit) {
        self.0.report(request, prompt, chain, hit).await;
    }
}

impl Inner {
    /// What recomputing `blocks` takes, less a tenth.
    fn patience(&self, blocks: usize) -> Duration {
        let pace = self.link.as_ref().and_then(Link::view).map(|view| u64::from(view.prefill_tokens_per_s));
        let pace = pace.unwrap_or_else(|| self.shape.tokens_per_s()).max(1);
        let tokens = (blocks * self.shape.block_tokens) as u64;
        Duration::from_micros(tokens * 1_000_000 / pace * LOAD_SHARE / 100)
    }

    async fn bring(&self, chain: &[BlockHash], most: usize, request: String) -> Hit {
        let begun = Instant::now();
        // A hit without a row, once it has waited long enough for rows.
        let mut device_alone = false;
        let reserved = loop {
            let changed = self.changed.notified();
            match self.reserve(chain, most, device_alone) {
                Reserving::Done(reserved) => break reserved,
                Reserving::Busy(blocks) => {
                    let until = begun + self.patience(blocks);
                    device_alone = tokio::time::timeout_at(until, changed).await.is_err();
                }
            }
        };
        self.take(reserved, request, begun).await
    }

    /// Plans, and reserves every row that the plan needs, or none.
    fn reserve(&self, chain: &[BlockHash], most: usize, device_alone: bool) -> Reserving {
        let view = self.link.as_ref().and_then(Link::view);
        let all = view.as_ref().map_or(self.shape.rows as usize, |view| view.row_budget);
        let budget = if device_alone { 0 } else { all };
        let search = Search { chain, most, states: self.covered.len() > 1, budget };
        let mut state = self.state.lock();
        let State { rows, hit_rows } = &mut *state;
        let node = |key: &RowKey| view.as_ref().is_some_and(|v| v.has(key));
        let plan = self.device.with_keys(|on_device| cache::plan(search, on_device, rows, node));
        let needed = plan.beyond.iter().filter(|(_, _, place)| *place != Place::Device).count();
        if plan.pending || needed > 0 && *hit_rows + needed > budget {
            return Reserving::Busy(plan.reach - plan.device);
        }
        let mut reserved = Reserved { plan, staging: Vec::new(), load: Vec::new() };
        for (n, (key, _, place)) in reserved.plan.beyond.iter().enumerate() {
            if *place == Place::Staging
                && let Some(row) = rows.pin(key)
            {
                rows.touch(key);
                reserved.staging.push((n, row));
            }
        }
        for (n, (key, _, place)) in reserved.plan.beyond.iter().enumerate() {
            if *place != Place::Node {
                continue;
            }
            let Some(row) = rows.insert(*key) else {
                // Running stores have the rest of the area.
                let Reserved { plan, staging, load } = reserved;
                staging.iter().for_each(|&(n, _)| rows.unpin(&plan.beyond[n].0));
                load.iter().for_each(|&(n, _)| rows.remove(&plan.beyond[n].0));
                return Reserving::Busy(plan.reach - plan.device);
            };
            reserved.load.push((n, row));
        }
        *hit_rows += needed;
        Reserving::Done(reserved)
    }

    /// Loads what is not there, checks everything, and gives the rows back: what they held is moved to the device when the
    /// request is scheduled.
    async fn take(&self, reserved: Reserved, request: String, begun: Instant) -> Hit {
        let Reserved { plan, staging, load } = reserved;
        let mut from: Vec<Option<Outcome>> = vec![None; plan.beyond.len()];
        if !load.is_empty() {
            let outcomes = self.load(&plan, &load, request, begun).await;
            for (&(n, _), outcome) in load.iter().zip(outcomes) {
                from[n] = Some(outcome);
            }
        }
        let brought = |n: usize| from[n].is_none_or(Outcome::is_ok);
        let mut wrong = HashSet::new();
        for &(n, row) in staging.iter().chain(&load) {
            if brought(n) && !self.is_right(&plan.beyond[n].0, row, from[n].is_some()) {
                wrong.insert(n);
            }
        }
        let mut state = self.state.lock();
        let hit = settle(&plan, &from, &wrong, self.covered.len() > 1);
        for &(n, _) in &load {
            let key = &plan.beyond[n].0;
            if brought(n) {
                state.rows.set_ready(key);
                state.rows.set_kept(key, true);
                state.rows.unpin(key);
            } else {
                state.rows.remove(key);
            }
        }
        staging.iter().for_each(|&(n, _)| state.rows.unpin(&plan.beyond[n].0));
        state.hit_rows -= staging.len() + load.len();
        drop(state);
        self.changed.notify_waiters();
        hit
    }

    async fn load(
        &self,
        plan: &Plan,
        load: &[(usize, u32)],
        request: String,
        begun: Instant,
    ) -> Vec<Outcome> {
        let item = |&(n, row): &(usize, u32)| {
            let (key, block, _) = plan.beyond[n];
            RowItem { key, position: self.position(block), row }
        };
        let Some(link) = &self.link else { return vec![Outcome::Failed; load.len()] };
        let left = self.patience(plan.reach - plan.device).saturating_sub(begun.elapsed());
        let deadline_us = u32::try_from(left.as_micros()).unwrap_or(u32::MAX).max(1);
        let number = self.counts.loads.fetch_add(1, Ordering::Relaxed) + 1;
        let loading = link.load(load.iter().map(item).collect(), deadline_us, request);
        crash_within(self.shape.crash.in_load == Some(number), loading).await
    }

    /// Tokens of the prompt up to the end of a block.
    fn position(&self, block: usize) -> u32 {
        u32::try_from((block + 1) * self.shape.block_tokens).unwrap_or(u32::MAX)
    }

    fn is_right(&self, key: &RowKey, row: u32, brought: bool) -> bool {
        let covered = &self.covered[key.group.0 as usize];
        let right =
            self.area.look(row, |bytes| model::is_right(bytes, covered, self.shape.seed, key, brought));
        self.counts.checked_rows.fetch_add(1, Ordering::Relaxed);
        if !right {
            self.counts.wrong_rows.fetch_add(1, Ordering::Relaxed);
            tracing::error!(?key, row, brought, "a row holds wrong bytes");
        }
        right
    }

    /// Writes what is on the device and not in the rows, or in the rows but with no node, into rows and offers it,
    /// in the order of the prompt and as far as rows are free. States below `from` were not computed.
    fn offer(self: &Arc<Self>, request: &str, chain: &[BlockHash], from: usize) {
        let Some(link) = self.link.clone() else { return };
        let wanted = (0..chain.len()).flat_map(|block| {
            let (attention, state) = cache::keys(chain, block);
            let state = (block >= from && self.has_state(block, chain.len())).then_some(state);
            std::iter::once(attention).chain(state).map(move |key| (key, block))
        });
        let mut items = Vec::new();
        {
            let mut state = self.state.lock();
            for (key, block) in wanted {
                let row = match state.rows.state(&key) {
                    // Being loaded, or offered and not answered yet, or held.
                    Some(false) => continue,
                    Some(true) if state.rows.is_kept(&key) => continue,
                    Some(true) => state.rows.pin(&key),
                    None => state.rows.insert(key),
                };
                let Some(row) = row else {
                    self.counts.unplaced_rows.fetch_add(1, Ordering::Relaxed);
                    continue;
                };
                // Believed kept until the answer: nobody else offers it meanwhile.
                state.rows.set_kept(&key, true);
                items.push(RowItem { key, position: self.position(block), row });
            }
        }
        if items.is_empty() {
            return;
        }
        let (inner, request) = (Arc::clone(self), request.to_owned());
        self.tasks.spawn(
            Kind::Serving,
            "mock store",
            async move { inner.store(&link, request, items).await },
        );
    }

    async fn store(&self, link: &Link, request: String, items: Vec<RowItem>) {
        for item in &items {
            let fresh = self.state.lock().rows.state(&item.key) == Some(false);
            if fresh {
                let covered = &self.covered[item.key.group.0 as usize];
                self.area.fill(item.row, |row| model::compute_row(row, covered, self.shape.seed, &item.key));
                self.state.lock().rows.set_ready(&item.key);
            }
        }
        self.changed.notify_waiters();
        let number = self.counts.stores.fetch_add(1, Ordering::Relaxed) + 1;
        let storing = link.store(items.clone(), request);
        let outcomes = crash_within(self.shape.crash.in_store == Some(number), storing).await;
        let mut state = self.state.lock();
        for (item, outcome) in items.iter().zip(outcomes) {
            state.rows.set_kept(&item.key, outcome.is_ok());
            state.rows.unpin(&item.key);
        }
        drop(state);
        self.changed.notify_waiters();
    }

    fn has_state(&self, block: usize, blocks: usize) -> bool {
        self.covered.len() > 1 && keeps_state(&self.shape, block, blocks)
    }

    async fn report(&self, request: &str, prompt: usize, chain: &[BlockHash], hit: Hit) {
        let Some(link) = &self.link else { return };
        let tokens = |blocks: usize| u32::try_from(blocks * self.shape.block_tokens).unwrap_or(u32::MAX);
        let prompt = u32::try_from(prompt).unwrap_or(u32::MAX);
        let sources = Sources {
            prompt,
            device: tokens(hit.device),
            staging: tokens(hit.staging),
            drive: tokens(hit.drive),
            peer: tokens(hit.peer),
            computed: prompt - tokens(hit.blocks),
        };
        let rows = (0..chain.len()).flat_map(|block| {
            let (attention, state) = cache::keys(chain, block);
            let state = self.has_state(block, chain.len()).then_some(state);
            std::iter::once(attention).chain(state).map(move |key| (key, self.position(block)))
        });
        link.report(request.to_owned(), sources, rows.collect()).await;
    }
}

/// Whether a state is kept at the end of `block`, of `blocks`.
pub fn keeps_state(shape: &Shape, block: usize, blocks: usize) -> bool {
    block + 1 == blocks || (block + 1).is_multiple_of(shape.state_every)
}

/// What a plan came to: its longest prefix without a hole, ending where a state is if there are any.
fn settle(plan: &Plan, from: &[Option<Outcome>], wrong: &HashSet<usize>, states: bool) -> Hit {
    let failed = |n: usize| from[n].is_some_and(|outcome| !outcome.is_ok());
    let hole = |n: usize| plan.beyond[n].0.group == ATTENTION && failed(n);
    let first_hole = (0..plan.beyond.len()).find(|&n| hole(n)).map(|n| plan.beyond[n].1);
    let mut blocks = first_hole.unwrap_or(plan.reach);
    // The plan has one state, where it ends: short of that only what the device had alone is usable.
    let state_lost = (0..plan.beyond.len()).any(|n| plan.beyond[n].0.group == STATE && failed(n));
    if states && (blocks < plan.reach || state_lost) {
        blocks = plan.device;
    }
    let mut hit = Hit { blocks, device: plan.device, ..Hit::default() };
    for (n, (key, block, place)) in plan.beyond.iter().enumerate().filter(|(_, (_, b, _))| *b < blocks) {
        hit.wrong |= wrong.contains(&n);
        if key.group != ATTENTION {
            continue;
        }
        debug_assert!(*block >= plan.device, "what the device has is not beyond it");
        match (place, from[n]) {
            (Place::Device, _) => hit.device += 1,
            (_, Some(Outcome::FromPeer)) => hit.peer += 1,
            (_, Some(_)) => hit.drive += 1,
            (_, None) => hit.staging += 1,
        }
    }
    hit
}

/// Aborts the process, when told to.
pub fn crash_if(now: bool) {
    if now {
        tracing::warn!("told to crash here");
        std::process::abort();
    }
}

/// Awaits `order`; aborts in the middle of it when told to.
async fn crash_within<T>(crash: bool, order: impl Future<Output = T>) -> T {
    if !crash {
        return order.await;
    }
    let _ = tokio::time::timeout(CRASH_AFTER, order).await;
    crash_if(true);
    std::future::pending().await
}
