//! The engine: a queue, a device cache, rows shared with the node, and a model that is none.
//!
//! A request waits for a place, finds the longest prefix that device, rows and node have, brings it, computes the
//! rest at the model's speed, and says its reply word by word. What it computed is written into rows and offered to
//! the node. Every row that a hit uses is compared with what the engine would have computed for it: a wrong byte
//! is counted and said aloud in the reply.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore, mpsc, oneshot};
use tokio::time::Instant;

use super::cache::{self, ATTENTION, Lru, Place, Plan, STATE, Search};
use super::client::Area;
use super::link::Link;
use super::model::{self, Word};
use super::options::{Groups, Shape};
use crate::base::block::{BlockHash, RowItem, RowKey};
use crate::base::frame::{Outcome, PROTOCOL, Sources};
use crate::base::geometry::{Group, GroupKind, Hello};
use crate::tasks::{Kind, Tasks};

/// Events that a slow client may be behind; its request then waits, as an engine's output queue does.
const EVENTS: usize = 64;

/// Share of the recomputing time that a load may take (in hundredths).
const LOAD_SHARE: u64 = 90;

/// How long past its deadline a load's answer is awaited before the request goes on without.
const SLACK: Duration = Duration::from_millis(250);

/// Pause after an order is given until an engine that is told to abort in the middle of it does.
const CRASH_AFTER: Duration = Duration::from_millis(1);

/// A request, ready to run.
#[derive(Clone, Debug)]
pub struct Ask {
    /// The internal id.
    pub id: String,
    pub prompt: Vec<u32>,
    pub max_tokens: usize,
    /// Say exactly `max_tokens` words.
    pub to_the_limit: bool,
}

/// What a request hears.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The prompt is computed; so many of its tokens were not, because they came out of a cache.
    Begin {
        cached: usize,
    },
    Word(Word),
    /// It is over; whether the reply came to its own end.
    End {
        natural: bool,
    },
}

/// What the engine counts.
#[derive(Debug, Default)]
pub struct Counts {
    pub running: AtomicU64,
    pub waiting: AtomicU64,
    /// Rows whose bytes were not what the engine would have computed.
    pub wrong_rows: AtomicU64,
    /// Rows that were checked.
    pub checked_rows: AtomicU64,
    /// Rows that found no place in the area and were not offered.
    pub unplaced_rows: AtomicU64,
    pub requests: AtomicU64,
    pub words: AtomicU64,
    pub loads: AtomicU64,
    pub stores: AtomicU64,
    pub prompt_tokens: AtomicU64,
    pub cached_tokens: AtomicU64,
}

#[derive(Debug)]
struct Caches {
    device: Lru,
    rows: Lru,
    /// Rows that hits hold now.
    hit_rows: usize,
}

/// Handle of the engine. Cheap to clone.
#[derive(Clone)]
pub struct Engine(Arc<Inner>);

struct Inner {
    shape: Shape,
    covered: Vec<Vec<(u32, u32)>>,
    area: Arc<Area>,
    link: Option<Link>,
    /// Guards both caches; taken for moments only, and never while bytes are written or compared.
    caches: Mutex<Caches>,
    /// Rows became ready, free, or less.
    changed: Notify,
    places: Semaphore,
    /// There is one device: prompts are computed one after the other.
    compute: tokio::sync::Mutex<()>,
    counts: Counts,
    tasks: Tasks,
}

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
struct Hit {
    /// Blocks of the prompt that need not be computed, and how many of those came from where.
    blocks: usize,
    device: usize,
    staging: usize,
    drive: usize,
    peer: usize,
    wrong: bool,
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

/// Counts down when it is dropped.
struct Counted<'a>(&'a AtomicU64);

impl<'a> Counted<'a> {
    fn new(gauge: &'a AtomicU64) -> Self {
        gauge.fetch_add(1, Ordering::Relaxed);
        Self(gauge)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Engine {
    pub fn new(shape: Shape, area: Arc<Area>, link: Option<Link>, tasks: Tasks) -> Self {
        let slots = u32::try_from(shape.device_blocks).unwrap_or(u32::MAX >> 8).min(1 << 24);
        let caches = Caches { device: Lru::new(slots), rows: Lru::new(shape.rows), hit_rows: 0 };
        Self(Arc::new(Inner {
            covered: groups(&shape).into_iter().map(|g| g.covered).collect(),
            area,
            link,
            caches: Mutex::new(caches),
            changed: Notify::new(),
            places: Semaphore::new(shape.max_num_seqs),
            compute: tokio::sync::Mutex::new(()),
            counts: Counts::default(),
            tasks,
            shape,
        }))
    }

    pub fn shape(&self) -> &Shape {
        &self.0.shape
    }

    pub fn counts(&self) -> &Counts {
        &self.0.counts
    }

    /// Rows of the shared area that a request or a job holds.
    pub fn pinned_rows(&self) -> usize {
        self.0.caches.lock().rows.pinned()
    }

    /// Whether a node is connected.
    pub fn has_node(&self) -> bool {
        self.0.link.as_ref().is_some_and(|link| link.view().is_some())
    }

    /// Runs a request. It ends by itself when nobody listens any more.
    pub fn submit(&self, ask: Ask) -> mpsc::Receiver<Event> {
        let (events, heard) = mpsc::channel(EVENTS);
        let inner = Arc::clone(&self.0);
        self.0.tasks.spawn(Kind::Serving, "mock request", async move {
            tokio::select! {
                () = events.closed() => {}
                () = inner.serve(ask, &events) => {}
            }
        });
        heard
    }

    /// Empties the device and the rows, but for what a transfer holds. Whether all went.
    pub fn reset(&self) -> bool {
        let mut caches = self.0.caches.lock();
        let (device, rows) = (caches.device.clear(), caches.rows.clear());
        device && rows
    }
}

impl Inner {
    async fn serve(self: &Arc<Self>, ask: Ask, events: &mpsc::Sender<Event>) {
        let place = {
            let _waiting = Counted::new(&self.counts.waiting);
            self.places.acquire().await
        };
        let _running = Counted::new(&self.counts.running);
        let number = self.counts.requests.fetch_add(1, Ordering::Relaxed) + 1;
        if self.shape.crash.stuck_at_request.is_some_and(|stuck| number >= stuck) {
            std::future::pending::<()>().await;
        }
        let mut tokens = ask.prompt.clone();
        let chain = model::chain(&self.shape.hash_seed, self.shape.block_tokens, &tokens);
        let hit = self.hit(&ask, &chain).await;
        let cached = hit.blocks * self.shape.block_tokens;
        self.compute_prompt(&chain, hit.blocks, tokens.len() - cached).await;
        self.offer(&ask.id, &chain, hit.blocks);
        self.report(&ask, &chain, hit).await;
        self.counts.prompt_tokens.fetch_add(tokens.len() as u64, Ordering::Relaxed);
        self.counts.cached_tokens.fetch_add(cached as u64, Ordering::Relaxed);
        if events.send(Event::Begin { cached }).await.is_err() {
            return;
        }
        let (words, natural) =
            model::reply(self.shape.seed, &ask.prompt, hit.wrong, ask.max_tokens, ask.to_the_limit);
        for word in words {
            tokio::time::sleep(Duration::from_micros(self.shape.itl_us)).await;
            tokens.push(model::token(word.text.as_bytes()));
            if events.send(Event::Word(word)).await.is_err() {
                return;
            }
            let said = self.counts.words.fetch_add(1, Ordering::Relaxed) + 1;
            crash_if(self.shape.crash.after_token == Some(said));
        }
        self.keep_reply(&ask.id, &tokens, chain.len());
        drop(place);
        let _ = events.send(Event::End { natural }).await;
    }

    /// Brings what is there. A request that has waited long enough goes on without; what it reserved is given
    /// back when nothing can touch it any more.
    async fn hit(self: &Arc<Self>, ask: &Ask, chain: &[BlockHash]) -> Hit {
        let (done, brought) = oneshot::channel();
        let (inner, chain, request) = (Arc::clone(self), chain.to_vec(), ask.id.clone());
        let most = ask.prompt.len().saturating_sub(1) / self.shape.block_tokens;
        self.tasks.spawn(Kind::Serving, "mock hit", async move {
            let _ = done.send(inner.bring(&chain, most, request).await);
        });
        let limit = self.patience(most) * 2 + SLACK;
        match tokio::time::timeout(limit, brought).await {
            Ok(Ok(hit)) => hit,
            _ => Hit::default(),
        }
    }

    /// What recomputing `blocks` takes, less a tenth.
    fn patience(&self, blocks: usize) -> Duration {
        let pace = self.link.as_ref().and_then(Link::view).map(|view| u64::from(view.prefill_tokens_per_s));
        let pace = pace.unwrap_or_else(|| self.shape.pace()).max(1);
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
        let mut caches = self.caches.lock();
        let Caches { device, rows, hit_rows } = &mut *caches;
        let plan = cache::plan(search, device, rows, |key| view.as_ref().is_some_and(|v| v.has(key)));
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

    /// Loads what is not there, checks everything, moves it to the device, and gives the rows back.
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
        let mut caches = self.caches.lock();
        let hit = settle(&plan, &from, &wrong, self.covered.len() > 1);
        for &(n, _) in &load {
            let key = &plan.beyond[n].0;
            if brought(n) {
                caches.rows.set_ready(key);
                caches.rows.set_kept(key, true);
                caches.rows.unpin(key);
            } else {
                caches.rows.remove(key);
            }
        }
        staging.iter().for_each(|&(n, _)| caches.rows.unpin(&plan.beyond[n].0));
        caches.hit_rows -= staging.len() + load.len();
        for (key, block, _) in plan.beyond.iter().filter(|(_, block, _)| *block < hit.blocks) {
            if key.group == ATTENTION || block + 1 == hit.blocks {
                to_device(&mut caches.device, *key);
            }
        }
        drop(caches);
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

    /// Takes the model's time for `tokens`, then has every whole block of the prompt on the device.
    async fn compute_prompt(&self, chain: &[BlockHash], hit: usize, tokens: usize) {
        {
            let _device = self.compute.lock().await;
            tokio::time::sleep(Duration::from_micros(self.shape.prefill_us_per_token * tokens as u64)).await;
        }
        let mut caches = self.caches.lock();
        for block in 0..chain.len() {
            let (attention, state) = cache::keys(chain, block);
            to_device(&mut caches.device, attention);
            if block >= hit && self.has_state(block, chain.len()) {
                to_device(&mut caches.device, state);
            }
        }
    }

    /// Whether a state is kept at the end of `block`, of `blocks`.
    fn has_state(&self, block: usize, blocks: usize) -> bool {
        let last = block + 1 == blocks;
        self.covered.len() > 1 && (last || (block + 1).is_multiple_of(self.shape.state_every))
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
            let mut caches = self.caches.lock();
            for (key, block) in wanted {
                let row = match caches.rows.state(&key) {
                    // Being loaded, or offered and not answered yet, or held.
                    Some(false) => continue,
                    Some(true) if caches.rows.is_kept(&key) => continue,
                    Some(true) => caches.rows.pin(&key),
                    None => caches.rows.insert(key),
                };
                let Some(row) = row else {
                    self.counts.unplaced_rows.fetch_add(1, Ordering::Relaxed);
                    continue;
                };
                // Believed kept until the answer: nobody else offers it meanwhile.
                caches.rows.set_kept(&key, true);
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
            let fresh = self.caches.lock().rows.state(&item.key) == Some(false);
            if fresh {
                let covered = &self.covered[item.key.group.0 as usize];
                self.area.fill(item.row, |row| model::compute_row(row, covered, self.shape.seed, &item.key));
                self.caches.lock().rows.set_ready(&item.key);
            }
        }
        self.changed.notify_waiters();
        let number = self.counts.stores.fetch_add(1, Ordering::Relaxed) + 1;
        let storing = link.store(items.clone(), request);
        let outcomes = crash_within(self.shape.crash.in_store == Some(number), storing).await;
        let mut caches = self.caches.lock();
        for (item, outcome) in items.iter().zip(outcomes) {
            caches.rows.set_kept(&item.key, outcome.is_ok());
            caches.rows.unpin(&item.key);
        }
        drop(caches);
        self.changed.notify_waiters();
    }

    /// What the reply filled: on the device, and offered unless only prompts are kept. The last word was said and
    /// never read, so nothing was computed for it.
    fn keep_reply(self: &Arc<Self>, request: &str, tokens: &[u32], prompt_blocks: usize) {
        let tokens = &tokens[..tokens.len().saturating_sub(1)];
        let chain = model::chain(&self.shape.hash_seed, self.shape.block_tokens, tokens);
        let mut caches = self.caches.lock();
        for block in prompt_blocks..chain.len() {
            let (attention, state) = cache::keys(&chain, block);
            to_device(&mut caches.device, attention);
            if self.has_state(block, chain.len()) {
                to_device(&mut caches.device, state);
            }
        }
        drop(caches);
        if !self.shape.offload_prompt_only && chain.len() > prompt_blocks {
            self.offer(request, &chain, prompt_blocks);
        }
    }

    async fn report(&self, ask: &Ask, chain: &[BlockHash], hit: Hit) {
        let Some(link) = &self.link else { return };
        let tokens = |blocks: usize| u32::try_from(blocks * self.shape.block_tokens).unwrap_or(u32::MAX);
        let prompt = u32::try_from(ask.prompt.len()).unwrap_or(u32::MAX);
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
        link.report(ask.id.clone(), sources, rows.collect()).await;
    }
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

fn to_device(device: &mut Lru, key: RowKey) {
    if device.state(&key).is_some() {
        device.touch(&key);
    } else if device.insert(key).is_some() {
        device.set_ready(&key);
        device.unpin(&key);
    }
}

fn crash_if(now: bool) {
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
