//! The engine: what becomes of one request.
//!
//! With a node, what it and the shared rows have of a prompt is brought first; then the request queues for the device,
//! whose steps say when its prompt is computed and when each of its words is there. The words are known beforehand,
//! because the model is none. What was computed is offered to the node.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::{Semaphore, mpsc};
use tokio::time::Instant;

use super::client::Area;
use super::counts::{Counts, Now, Took, page};
use super::faults::Faults;
use super::hits::Kind as Layers;
use super::link::Link;
use super::model::{self, Word};
use super::options::Shape;
use super::rows::{self, Hit, Rows};
use super::schedule::{Id, Request, Scheduler, Told};
use super::steps::{Device, Publish, Ticket};
use crate::base::block::{BlockHash, RowKey};
use crate::tasks::{Kind, Tasks};

pub use super::rows::hello;

/// Events that a slow client may be behind; its request then goes on, and what it says waits.
const EVENTS: usize = 64;

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

/// Handle of the engine. Cheap to clone.
#[derive(Clone)]
pub struct Engine(Arc<Inner>);

struct Inner {
    shape: Shape,
    device: Device,
    rows: Rows,
    /// Places beside the device's own, for requests that bring rows: they hold some of the area.
    places: Semaphore,
    faults: Arc<Faults>,
    counts: Arc<Counts>,
    took: Took,
    tasks: Tasks,
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

/// A request with the reply that it will get.
struct Reply {
    words: Vec<Word>,
    natural: bool,
    tokens: Arc<[u32]>,
    hashes: Arc<[BlockHash]>,
}

impl Engine {
    /// `model` is the name in metrics; `counts` are shared with whoever publishes.
    pub fn new(
        shape: Shape,
        model: &str,
        area: Arc<Area>,
        link: Option<Link>,
        publish: Option<Publish>,
        counts: Arc<Counts>,
        tasks: Tasks,
    ) -> Self {
        let faults = Arc::new(Faults::default());
        faults.obey(&shape.faults).expect("it was checked with the shape");
        let scheduler =
            Scheduler::new(shape.grid.clone(), shape.limits.clone(), shape.pace, shape.device_blocks);
        let device = Device::start(scheduler, shape.clock, Arc::clone(&faults), publish, &tasks);
        let rows = Rows::new(shape.clone(), area, link, device.clone(), Arc::clone(&counts), tasks.clone());
        Self(Arc::new(Inner {
            places: Semaphore::new(shape.limits.requests),
            took: Took::new(model),
            shape,
            device,
            rows,
            faults,
            counts,
            tasks,
        }))
    }

    pub fn shape(&self) -> &Shape {
        &self.0.shape
    }

    pub fn counts(&self) -> &Counts {
        &self.0.counts
    }

    pub fn faults(&self) -> &Faults {
        &self.0.faults
    }

    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Rows of the shared area that a request or a job holds.
    pub fn pinned_rows(&self) -> usize {
        self.0.rows.pinned()
    }

    /// Whether a node is connected.
    pub fn has_node(&self) -> bool {
        self.0.rows.has_node()
    }

    /// Runs a request. It ends by itself when nobody listens any more.
    pub fn submit(&self, ask: Ask) -> mpsc::Receiver<Event> {
        let (events, heard) = mpsc::channel(EVENTS);
        let inner = Arc::clone(&self.0);
        self.0.tasks.spawn(Kind::Serving, "mock request", async move {
            tokio::select! {
                () = events.closed() => {
                    inner.counts.aborted.fetch_add(1, Ordering::Relaxed);
                }
                () = inner.serve(ask, &events) => {}
            }
        });
        heard
    }

    /// Empties the device and the rows, but for what is in use. Whether all went.
    pub fn reset(&self) -> bool {
        let (device, rows) = (self.0.device.clear(), self.0.rows.clear());
        device && rows
    }

    /// Tokens of a prompt that the device would not compute now, and all of them.
    pub fn peek(&self, prompt: &[u32]) -> (usize, usize) {
        let hashes = model::chain(&self.0.shape.hash_seed, self.0.shape.grid.unit, prompt);
        (self.0.device.peek(&hashes, prompt.len()), prompt.len())
    }

    /// Everything that the device can be hit with.
    pub fn keys(&self) -> Vec<RowKey> {
        self.0.device.keys()
    }

    /// Requests that run, and those that wait.
    pub fn load(&self) -> (u64, u64) {
        let look = self.0.device.look();
        (look.running as u64, look.waiting as u64 + self.0.counts.waiting.load(Ordering::Relaxed))
    }

    /// The page of metrics.
    pub fn metrics(&self, model: &str) -> String {
        let look = self.0.device.look();
        let (running, waiting) = self.load();
        let now = Now {
            running,
            waiting,
            usage: look.blocks_used as f64 / look.blocks.max(1) as f64,
            blocks: look.blocks,
            block_tokens: self.0.shape.grid.block,
            hash_unit: self.0.shape.grid.unit,
            node: self.has_node(),
            pinned: self.pinned_rows(),
            tally: look.tally,
        };
        page(model, &self.0.counts, &self.0.took, &now)
    }
}

impl Inner {
    async fn serve(self: &Arc<Self>, ask: Ask, events: &mpsc::Sender<Event>) {
        let asked = Instant::now();
        let waiting = Counted::new(&self.counts.waiting);
        // A request that brings rows has its place from then on.
        let place = match self.rows.has_line() {
            true => Some(self.places.acquire().await),
            false => None,
        };
        let number = self.counts.requests.fetch_add(1, Ordering::Relaxed) + 1;
        if self.shape.crash.stuck_at_request.is_some_and(|stuck| number >= stuck) {
            std::future::pending::<()>().await;
        }
        let prompt_chain =
            self.blocks_of(&model::chain(&self.shape.hash_seed, self.shape.grid.unit, &ask.prompt));
        let hit = match self.rows.has_line() {
            true => Some(self.rows.hit(&ask.id, &prompt_chain, ask.prompt.len()).await),
            false => None,
        };
        let reply = self.reply(&ask, hit.is_some_and(|hit| hit.wrong));
        let mut ticket = self.device.submit(self.request(&ask, &reply, hit));
        drop(waiting);
        let natural = reply.natural;
        if self.say(&ask, reply, &prompt_chain, hit, &mut ticket, events, asked).await.is_none() {
            return;
        }
        drop(place);
        let counter = if natural { &self.counts.stopped } else { &self.counts.cut_short };
        counter.fetch_add(1, Ordering::Relaxed);
        self.took.ended(asked.elapsed());
        let _ = events.send(Event::End { natural }).await;
    }

    /// Passes on what the device says, as words. None when the engine stops or nobody listens.
    #[expect(
        clippy::too_many_arguments,
        reason = "the parts of one request, which only this and its caller know"
    )]
    async fn say(
        &self,
        ask: &Ask,
        reply: Reply,
        prompt_chain: &[BlockHash],
        hit: Option<Hit>,
        ticket: &mut Ticket,
        events: &mpsc::Sender<Event>,
        asked: Instant,
    ) -> Option<()> {
        let mut words = reply.words.into_iter();
        let (mut cached, mut begun, mut last) = (0, asked, None);
        loop {
            match ticket.heard.recv().await? {
                Told::Begun { cached: tokens } => {
                    (cached, begun) = (tokens, Instant::now());
                    self.took.begun(begun - asked);
                }
                Told::Prefilled => {
                    self.prompt_is_there(ask, prompt_chain, cached, hit).await;
                    events.send(Event::Begin { cached }).await.ok()?;
                }
                Told::Word => {
                    self.count_word(asked, begun, &mut last);
                    events.send(Event::Word(words.next()?)).await.ok()?;
                    self.crash_after_words();
                }
                Told::End => break,
            }
        }
        let chain = self.blocks_of(&reply.hashes);
        if !self.shape.offload_prompt_only && chain.len() > prompt_chain.len() {
            self.rows.offer(&ask.id, &chain, prompt_chain.len());
        }
        Some(())
    }

    async fn prompt_is_there(&self, ask: &Ask, chain: &[BlockHash], cached: usize, hit: Option<Hit>) {
        if let Some(hit) = hit {
            self.rows.offer(&ask.id, chain, hit.blocks);
            self.rows.report(&ask.id, ask.prompt.len(), chain, hit).await;
            let brought = (hit.blocks - hit.device.min(hit.blocks)) * self.shape.grid.block;
            self.counts.brought_tokens.fetch_add(brought as u64, Ordering::Relaxed);
        }
        self.counts.prompt_tokens.fetch_add(ask.prompt.len() as u64, Ordering::Relaxed);
        self.counts.cached_tokens.fetch_add(cached as u64, Ordering::Relaxed);
    }

    fn count_word(&self, asked: Instant, begun: Instant, last: &mut Option<Instant>) {
        let now = Instant::now();
        match last.replace(now) {
            None => self.took.first_word(now - asked, now - begun),
            Some(before) => self.took.word(now - before),
        }
    }

    fn crash_after_words(&self) {
        let said = self.counts.words.fetch_add(1, Ordering::Relaxed) + 1;
        rows::crash_if(self.shape.crash.after_token == Some(said));
        self.faults.said();
    }

    /// What the model that is none will say, with the tokens and hashes that it makes.
    fn reply(&self, ask: &Ask, wrong: bool) -> Reply {
        let (words, natural) =
            model::reply(self.shape.seed, &ask.prompt, wrong, ask.max_tokens, ask.to_the_limit);
        let mut tokens = ask.prompt.clone();
        // The last word is said and never read: nothing is computed for it.
        let read = words.len().saturating_sub(1);
        tokens.extend(words[..read].iter().map(|word| model::token(word.text.as_bytes())));
        let hashes = model::chain(&self.shape.hash_seed, self.shape.grid.unit, &tokens);
        Reply { words, natural, tokens: tokens.into(), hashes: hashes.into() }
    }

    fn request(&self, ask: &Ask, reply: &Reply, hit: Option<Hit>) -> Request {
        let block = self.shape.grid.block;
        let mut snapshots = Vec::new();
        if self.shape.grid.groups.contains(&Layers::State) {
            for blocks in [ask.prompt.len() / block, reply.tokens.len() / block] {
                let kept = (0..blocks).filter(|n| rows::keeps_state(&self.shape, *n, blocks));
                snapshots.extend(kept.map(|n| (n + 1) * block));
            }
        }
        Request {
            id: Id(0),
            tokens: Arc::clone(&reply.tokens),
            prompt: ask.prompt.len(),
            words: reply.words.len(),
            hashes: Arc::clone(&reply.hashes),
            snapshots,
            given: hit.map(|hit| hit.blocks * block),
        }
    }

    /// The hashes that end blocks, of those that end units.
    fn blocks_of(&self, hashes: &[BlockHash]) -> Vec<BlockHash> {
        let units = self.shape.grid.units();
        hashes.iter().skip(units - 1).step_by(units).copied().collect()
    }
}
