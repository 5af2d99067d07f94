//! Exact tokens of this node's engine: loads the model's tokenizer and template when the engine is ready, proves them
//! against it, and then foresees requests before they are placed. A difference, at the start or in any request later,
//! ends it for this engine, and people are told.
//!
//! What was mostly seen before is found out where it is asked for, which takes less than handing it to another thread
//! and back. Everything else goes to threads that may compute, in two lanes: however many long new prompts there are,
//! a short one does not wait behind them. Few wait: a request that finds no place is served without being foreseen.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use prometheus::{Histogram, IntCounter, IntCounterVec, IntGauge};
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use super::Parts;
use crate::api::local::Door;
use crate::base::block::RowKey;
use crate::base::clock::{Clock, Micros};
use crate::base::fault::{Code, Fault};
use crate::base::table::{Holder, Probe as Table};
use crate::cluster::Cluster;
use crate::engine::events::Events;
use crate::engine::{View, probe};
use crate::meter::Meter;
use crate::observe::state::TokensState;
use crate::router::chain::{Chain, NODES_MAX, Reach};
use crate::router::coverage::{Coverage, Device, Seen};
use crate::router::tokens::{Draft, Now, Options, Prompt, Proof, Speaker, Trust, Unsure, difference, probes};
use crate::router::{Endpoint, Foresee, Foreseen, Known, Looking, Outcome, Slot};
use crate::tasks::{Kind, Tasks};

/// Prompts that wait for their turn: more than a node has requests in flight that begin at one moment.
const WAITING: usize = 64;

/// Bytes of prompts, their ids and their hashes that are remembered: at ten a token and some for the tables, about 6
/// million tokens, or a hundred sessions of 60,000.
const SEEN: usize = 64 << 20;

/// One in so many foreseen requests is compared with the engine, id by id. All are compared by their number of tokens.
const SAMPLE: u64 = 100;

/// Asks of the whole proof that may fail before it is given up for this engine.
const TRIES: usize = 3;

/// Bodies up to this are read where they are asked about: a millisecond or so.
const HERE_BODY_MAX: usize = 512 << 10;

/// New text up to this is tokenised there, too: about as long as reading the largest body.
const HERE_FRESH_MAX: usize = 6 << 10;

/// New text beyond this takes the lane of long prompts: a tenth of a second and more.
const LONG: usize = 256 << 10;

/// A token has about four bytes of text; and of what computing a prompt costs, waiting may cost this share.
const BYTES_PER_TOKEN: f64 = 4.0;
const SHARE: f64 = 0.02;

/// Waiting is bounded by this, at least and at most.
const PATIENCE: [Duration; 2] = [Duration::from_millis(10), Duration::from_secs(2)];

/// The bit of a lookup that says "on this node's device": [`NODES_MAX`] has all of them.
const DEVICE: u32 = 32;

/// Names of other nodes are looked at again after this.
const NAMES: Duration = Duration::from_secs(1);

/// Microseconds from 20 to a second.
const TOOK_US: [f64; 12] = [20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 20e3, 100e3, 300e3, 1e6];

/// One prompt to be made.
struct Job {
    endpoint: Endpoint,
    body: Bytes,
    begun: Micros,
    seat: Arc<Seat>,
}

/// A prompt that the engine is to be asked about.
struct Check {
    seat: Arc<Seat>,
    endpoint: Endpoint,
    body: Bytes,
    ids: Vec<u32>,
}

/// Foresees requests. Cheap to clone.
#[derive(Clone)]
pub struct Exact(Arc<Shared>);

struct Shared {
    clock: Clock,
    tasks: Tasks,
    /// Tokens that the engine computes in a second, as assumed.
    speed: f64,
    /// Guards one word on how it stands; held for a look.
    trust: Mutex<Trust>,
    /// The engine that is served, once it is proved. Held for a look.
    seat: Mutex<Option<Arc<Seat>>>,
    /// What was foretold against what came. Held for a request.
    coverage: Mutex<Coverage>,
    served: AtomicU64,
    waiting: AtomicUsize,
    short: Arc<Semaphore>,
    long: Arc<Semaphore>,
    checks: mpsc::Sender<Check>,
    series: Series,
}

/// What waits for [`run`].
pub struct Inbox(mpsc::Receiver<Check>);

struct Series {
    prompts: IntCounterVec,
    exact: IntGauge,
    took: Histogram,
    fresh: IntCounter,
    checks: IntCounterVec,
    foreseen: IntCounter,
    cached: IntCounter,
}

impl Series {
    fn new(meter: &Meter) -> Self {
        Self {
            prompts: meter.counters(
                "tokens_prompts_total",
                "Prompts by what is known of them: exact, unsure, or busy (nobody looked)",
                &["known"],
            ),
            exact: meter.gauge("tokens_exact", "1 while token ids are exact and proved, else 0"),
            took: meter.histogram(
                "tokens_microseconds",
                "Time from a request's arrival until its tokens and their coverage are known, beside it",
                &TOOK_US,
            ),
            fresh: meter.counter("tokens_fresh_bytes_total", "Bytes of prompts that had to be tokenised"),
            checks: meter.counters(
                "tokens_checks_total",
                "Comparisons of a request's tokens with the engine's, by outcome",
                &["outcome"],
            ),
            foreseen: meter.counter(
                "tokens_foreseen_cached_total",
                "Prompt tokens that were foreseen to be there, of requests whose engine said how many it had",
            ),
            cached: meter.counter(
                "tokens_cached_total",
                "Prompt tokens that the engine said it had, of the same requests",
            ),
        }
    }
}

impl Exact {
    /// `speed`: tokens that the engine is assumed to compute in a second.
    pub fn new(meter: &Meter, clock: &Clock, tasks: &Tasks, speed: u32) -> (Self, Inbox) {
        // As many as wait at one moment are rarely sampled together; one that finds no place is not compared.
        let (checks, inbox) = mpsc::channel(4);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let shared = Shared {
            clock: clock.clone(),
            tasks: tasks.clone(),
            speed: f64::from(speed.max(1)),
            trust: Mutex::default(),
            seat: Mutex::default(),
            coverage: Mutex::default(),
            served: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            short: Arc::new(Semaphore::new(cores)),
            long: Arc::new(Semaphore::new((cores / 4).max(1))),
            checks,
            series: Series::new(meter),
        };
        (Self(Arc::new(shared)), Inbox(inbox))
    }

    /// For the router.
    pub fn foresee(&self) -> Foresee {
        let this = self.clone();
        Foresee(Arc::new(move |endpoint, body| this.begin(endpoint, body)))
    }

    fn begin(&self, endpoint: Endpoint, body: &Bytes) -> Option<Looking> {
        let told = |known| Some(Looking { slot: Arc::new(Slot::of(known)), patience: Duration::ZERO });
        if let Some(why) = self.0.trust.lock().why() {
            return told(Err(why.to_owned()));
        }
        let Some(seat) = self.0.seat.lock().clone() else { return told(Err("there is no tokenizer".into())) };
        let job = Job { endpoint, body: body.clone(), begun: self.0.clock.now(), seat };
        let drafted = if body.len() > HERE_BODY_MAX { None } else { Some(self.draft(&job)) };
        let slot = match drafted {
            Some(Err(why)) => return told(Err(why)),
            Some(Ok(draft)) if draft.fresh_bytes() <= HERE_FRESH_MAX => {
                return told(self.finish(&job, draft));
            }
            other => self.aside(job, other.and_then(Result::ok))?,
        };
        Some(Looking { slot, patience: patience(body.len(), self.0.speed) })
    }

    /// Goes on with a prompt beside its request. None: too many wait.
    fn aside(&self, job: Job, draft: Option<Draft>) -> Option<Arc<Slot>> {
        if self.0.waiting.fetch_add(1, Ordering::Relaxed) >= WAITING {
            self.0.waiting.fetch_sub(1, Ordering::Relaxed);
            self.0.series.prompts.with_label_values(&["busy"]).inc();
            return None;
        }
        let (waiting, (slot, gone)) = (Waiting(self.clone()), Slot::watched());
        let told = Arc::downgrade(&slot);
        self.0.tasks.spawn(Kind::Chore, "tokens of a prompt", async move {
            let Waiting(this) = &waiting;
            if let Some(known) = this.made(job, draft, &gone).await
                && let Some(slot) = told.upgrade()
            {
                slot.fill(known);
            }
        });
        Some(slot)
    }

    /// None: the request is `gone`.
    async fn made(&self, job: Job, draft: Option<Draft>, gone: &CancellationToken) -> Option<Known> {
        let job = Arc::new(job);
        let drafted = match draft {
            Some(draft) => Ok(draft),
            None => {
                let (this, job) = (self.clone(), Arc::clone(&job));
                on_thread(&self.0.short, gone, move || this.draft(&job)).await?
            }
        };
        let draft = match drafted {
            Ok(draft) => draft,
            Err(why) => return Some(Err(why)),
        };
        let lane = if draft.fresh_bytes() > LONG { &self.0.long } else { &self.0.short };
        let this = self.clone();
        on_thread(lane, gone, move || this.finish(&job, draft)).await
    }

    fn draft(&self, job: &Job) -> Result<Draft, String> {
        let drafted = self.guarded(|| job.seat.speaker.draft(job.endpoint, &job.body))?;
        drafted.map_err(|why| self.unsure(&why))
    }

    fn finish(&self, job: &Job, draft: Draft) -> Known {
        let prompt = self.guarded(|| job.seat.speaker.finish(draft))?.map_err(|why| self.unsure(&why))?;
        let held = job.seat.held(self.0.clock.now());
        let reaches = self.guarded(|| held.map(|held| held.reaches(&job.seat.speaker, &prompt)))?;
        let (reaches, device_known) = reaches.unwrap_or_default();
        let (series, took) = (&self.0.series, self.0.clock.now().since(job.begun));
        series.prompts.with_label_values(&["exact"]).inc();
        series.took.observe(took.as_secs_f64() * 1e6);
        series.fresh.inc_by(prompt.fresh_bytes as u64);
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let (tokens, fresh_bytes) = (count(prompt.ids.len()), count(prompt.fresh_bytes));
        if self.0.served.fetch_add(1, Ordering::Relaxed) % SAMPLE == SAMPLE - 1 {
            let (seat, body) = (Arc::clone(&job.seat), job.body.clone());
            let _ = self.0.checks.try_send(Check { seat, endpoint: job.endpoint, body, ids: prompt.ids });
        }
        Ok(Foreseen { tokens, reaches, device_known, fresh_bytes, took })
    }

    fn unsure(&self, why: &Unsure) -> String {
        self.0.series.prompts.with_label_values(&["unsure"]).inc();
        why.to_string()
    }

    /// What panics once would do so again: it ends exact tokens for this engine, and no request.
    fn guarded<T>(&self, work: impl FnOnce() -> T) -> Result<T, String> {
        catch_unwind(AssertUnwindSafe(work)).map_err(|_| {
            self.0.seat.lock().take();
            self.stands(Trust::Absent("making a prompt's tokens ended in a panic".into()));
            "it ended in a panic".to_owned()
        })
    }

    /// A request is over: what was foreseen against what the engine says. `own`: this node's engine served it.
    pub fn heard(&self, outcome: &Outcome, own: bool) {
        let (Some(Ok(foreseen)), Some(usage), 200, true) =
            (&outcome.foreseen, &outcome.usage, outcome.status, own)
        else {
            return;
        };
        let Some(tokens) = usage.prompt_tokens else { return };
        if tokens != u64::from(foreseen.tokens) {
            let endpoint = outcome.endpoint.name();
            self.differed(format!(
                "a prompt of {endpoint} has {} tokens here and {tokens} there ({})",
                foreseen.tokens, outcome.id
            ));
            return;
        }
        self.0.series.checks.with_label_values(&["length"]).inc();
        let reach = outcome.node.as_deref().and_then(|node| foreseen.reach(node));
        if let (Some(reach), Some(cached)) = (reach, usage.cached_tokens) {
            self.0.series.foreseen.inc_by(reach.all.into());
            self.0.series.cached.inc_by(cached);
            let cached = u32::try_from(cached).unwrap_or(u32::MAX);
            self.covered(Seen { prompt: foreseen.tokens, foretold: reach.all, cached });
        }
    }

    fn covered(&self, seen: Seen) {
        let Some(seat) = self.0.seat.lock().clone() else { return };
        let Some(held) = seat.held(self.0.clock.now()) else { return };
        let parted = self.0.coverage.lock().add(seen, held.grain);
        if parted && let Some(how) = self.parted() {
            tracing::error!(how, "what is foretold to be cached is not what the engine has");
        }
    }

    /// How what was foretold and what the engine had have parted.
    fn parted(&self) -> Option<String> {
        let seat = self.0.seat.lock().clone()?;
        let (_, door, _, events) = seat.rows.as_ref()?;
        let facts = events.facts();
        let hello = door.engine().map(|engine| engine.hello);
        // Of several groups their blocks differ by nature.
        let row_tokens =
            hello.filter(|hello| hello.groups.len() == 1).map(|hello| hello.groups[0].tokens_per_row);
        let device = Device {
            heard: facts.live,
            stored: facts.stored,
            block_size: facts.block_size,
            row_tokens: row_tokens.unwrap_or(0),
        };
        self.0.coverage.lock().parted(&device)
    }

    pub fn state(&self) -> TokensState {
        match &*self.0.trust.lock() {
            Trust::Exact { proved, checked } => {
                TokensState { exact: true, why: String::new(), proved: *proved, checked: *checked }
            }
            Trust::Absent(why) | Trust::Differs(why) => {
                TokensState { why: why.clone(), ..TokensState::default() }
            }
        }
    }

    pub fn faults(&self) -> Vec<Fault> {
        let differs = match &*self.0.trust.lock() {
            Trust::Differs(how) => Some(Fault::new(Code::TokensDiffer, how.clone())),
            Trust::Absent(_) | Trust::Exact { .. } => None,
        };
        let parted = self.parted().map(|how| Fault::new(Code::CacheDiffers, how));
        differs.into_iter().chain(parted).collect()
    }

    fn stands(&self, trust: Trust) {
        match &trust {
            Trust::Exact { proved, .. } => tracing::info!(proved, "tokens are exact"),
            Trust::Absent(why) => tracing::info!(why, "tokens are guessed"),
            Trust::Differs(how) => tracing::error!(how, "tokens are not the engine's: they are guessed"),
        }
        self.0.series.exact.set(i64::from(trust.is_exact()));
        *self.0.trust.lock() = trust;
    }

    fn agreed(&self) {
        self.0.trust.lock().agreed();
        self.0.series.checks.with_label_values(&["ids"]).inc();
    }

    fn differed(&self, how: String) {
        self.0.series.checks.with_label_values(&["differs"]).inc();
        if self.0.trust.lock().differed(how.clone()) {
            tracing::error!(how, "tokens are not the engine's: they are guessed from now on");
            self.0.series.exact.set(0);
        }
    }
}

/// A prompt that waits or is made. The count goes down whichever way it ends.
struct Waiting(Exact);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Runs `work` on a thread that may compute, when its lane has room. None: the request is gone by then.
async fn on_thread<T: Send + 'static>(
    lane: &Arc<Semaphore>,
    gone: &CancellationToken,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let permit = gone.run_until_cancelled(Arc::clone(lane).acquire_owned()).await?.ok()?;
    // Both may have come at one moment.
    if gone.is_cancelled() {
        return None;
    }
    let work = tokio::task::spawn_blocking(move || {
        let done = work();
        drop(permit);
        done
    });
    work.await.ok()
}

/// What waiting for a prompt's tokens is worth: nothing is saved by knowing that is dearer than computing it.
fn patience(bytes: usize, tokens_per_s: f64) -> Duration {
    let [least, most] = PATIENCE;
    let compute_s = bytes as f64 / BYTES_PER_TOKEN / tokens_per_s;
    Duration::try_from_secs_f64(SHARE * compute_s).unwrap_or(most).clamp(least, most)
}

/// Follows the engine and compares samples with it, until the node stops.
pub async fn run(parts: Parts, inbox: Inbox) {
    let Inbox(mut checks) = inbox;
    let (stopping, mut engine) = (parts.tasks.stopping(), parts.engine.clone());
    engine.mark_changed();
    let mut served = View::default();
    loop {
        // Each arm keeps its place when another wins.
        tokio::select! {
            () = stopping.cancelled() => return,
            changed = engine.changed() => {
                if changed.is_err() {
                    return;
                }
                let view = engine.borrow_and_update().clone();
                let follow = Box::pin(follow(&parts, &mut served, view));
                if stopping.run_until_cancelled(follow).await.is_none() {
                    return;
                }
            }
            check = checks.recv() => match check {
                Some(check) => compare(&parts, check),
                None => return,
            },
        }
    }
}

/// The engine is another one, or in another state.
async fn follow(parts: &Parts, served: &mut View, view: View) {
    let same = view.engine_id == served.engine_id && view.url == served.url;
    if view.is_ready() && served.is_ready() && same {
        return;
    }
    *served = view;
    let (exact, view) = (&parts.exact, &*served);
    exact.0.seat.lock().take();
    exact.0.coverage.lock().clear();
    if !view.is_ready() {
        exact.stands(Trust::Absent(format!("its engine is {}", view.phase)));
        return;
    }
    exact.stands(Trust::Absent("it is being proved".into()));
    let loaded = load(&view.model, &parts.settings.engine.extra_args).await;
    let (speaker, trust) = match loaded {
        Err(why) => (None, Trust::Absent(why.to_string())),
        Ok(speaker) => prove(view, speaker).await,
    };
    let seat = speaker.filter(|_| trust.is_exact()).map(|speaker| Arc::new(Seat::new(parts, speaker, view)));
    *exact.0.seat.lock() = seat;
    exact.stands(trust);
}

/// Compares one prompt with the engine, beside everything else.
fn compare(parts: &Parts, check: Check) {
    let exact = parts.exact.clone();
    parts.tasks.spawn(Kind::Chore, "check of tokens", async move {
        let Check { seat, endpoint, body, ids } = check;
        let asker = Arc::clone(&seat);
        let question = tokio::task::spawn_blocking(move || asker.speaker.question(endpoint, &body)).await;
        let Ok(Ok(question)) = question else { return };
        let engine = probe::Probe::new(&seat.url, &seat.served_name);
        if let Ok(Some(theirs)) = engine.tokenize(question.into()).await {
            match difference(&ids, &theirs) {
                None => exact.agreed(),
                Some(how) => exact.differed(how),
            }
        }
    });
}

/// An engine whose tokens are proved.
struct Seat {
    speaker: Speaker,
    url: String,
    served_name: String,
    /// This node's name, and whom to ask about rows and blocks. None: nobody.
    rows: Option<(String, Door, Cluster, Events)>,
    /// Who holds what, as it was a moment ago. Held for a look.
    held: Mutex<Option<(Micros, Arc<Held>)>>,
}

impl Seat {
    fn new(parts: &Parts, speaker: Speaker, view: &View) -> Self {
        Self {
            speaker,
            url: view.url.clone(),
            served_name: view.served_name.clone(),
            rows: Some((
                parts.settings.node.name.clone(),
                parts.door.clone(),
                parts.cluster.clone(),
                parts.events.clone(),
            )),
            held: Mutex::default(),
        }
    }

    /// None: no engine sits at the door, or its chain cannot be followed.
    fn held(&self, now: Micros) -> Option<Arc<Held>> {
        let (node, door, cluster, events) = self.rows.as_ref()?;
        let table = door.holders()?;
        let mut held = self.held.lock();
        if let Some((since, held)) = &*held
            && Arc::ptr_eq(&held.table, &table)
            && now.since(*since) < NAMES
        {
            return Some(Arc::clone(held));
        }
        let hello = door.engine()?.hello;
        let chain = Chain::of(&hello).ok()?;
        let grain = hello.groups.iter().map(|group| group.tokens_per_row).max().unwrap_or(0);
        let mut names = vec![node.clone()];
        names.extend(cluster.members().into_iter().map(|member| member.name));
        names.truncate(NODES_MAX);
        let (events, engine_id) = (events.clone(), hello.engine_id);
        let new = Arc::new(Held { chain, table, names, events, engine_id, grain });
        *held = Some((now, Arc::clone(&new)));
        Some(new)
    }
}

/// Who holds what, as the engine at the door hashes it.
struct Held {
    chain: Chain,
    table: Arc<Table>,
    /// This node first.
    names: Vec<String>,
    events: Events,
    /// The life of the engine at the door.
    engine_id: String,
    /// Tokens of its largest row.
    grain: u32,
}

impl Held {
    /// And whether what lies on this node's device is among it.
    fn reaches(&self, speaker: &Speaker, prompt: &Prompt) -> (Vec<(String, Reach)>, bool) {
        let device = self.events.device(&self.engine_id);
        let others = (1_u64 << self.names.len()) - 2;
        // The table says "one of the others" without saying which.
        let holders = |key: &RowKey| {
            let bits = self.table.holders(key);
            let drive = bits & Holder::Drive as u64;
            let here = device.as_ref().is_some_and(|device| device.has(key));
            drive | if bits & Holder::Peer as u64 == 0 { 0 } else { others } | u64::from(here) << DEVICE
        };
        let reaches = speaker.reaches(prompt, &self.chain, self.names.len(), holders);
        (self.names.iter().cloned().zip(reaches).collect(), device.is_some())
    }
}

/// The present time as a template prints it, in the box's time zone: the engine's process has the same.
fn now() -> Now {
    Arc::new(|format| jiff::fmt::strtime::format(format, &jiff::ZonedDateTime::now()).ok())
}

async fn load(model: &Path, args: &[String]) -> Result<Speaker, Unsure> {
    if model.as_os_str().is_empty() {
        return Err(Unsure::of("the folder of its model is not known"));
    }
    let options = Options::of(model, args)?;
    let work = tokio::task::spawn_blocking(move || Speaker::load(options, SEEN, now()));
    work.await.unwrap_or_else(|_| Err(Unsure::of("reading the tokenizer ended in a panic")))
}

/// Compares all probes with the engine; where they differ, once more with message contents in the other form.
async fn prove(view: &View, mut speaker: Speaker) -> (Option<Speaker>, Trust) {
    let engine = probe::Probe::new(&view.url, &view.served_name);
    let mut first: Option<Trust> = None;
    loop {
        let proved = match proof(&engine, &view.served_name, speaker).await {
            Ok(proved) => proved,
            Err(why) => return (None, Trust::Absent(why)),
        };
        let (again, proof) = proved;
        speaker = again;
        if !proof.differs() {
            return (Some(speaker), proof.verdict());
        }
        // The first difference is told: it is the one in the form that the template seemed to want.
        let told = first.get_or_insert(proof.verdict()).clone();
        if !speaker.try_other_form() || speaker.is_in_guessed_form() {
            return (None, told);
        }
    }
}

async fn proof(
    engine: &probe::Probe,
    served_name: &str,
    speaker: Speaker,
) -> Result<(Speaker, Proof), String> {
    let all = probes::all(served_name);
    let work = move || {
        let ask = |(endpoint, body): &(Endpoint, Vec<u8>)| {
            let ids = speaker.prompt(*endpoint, body).ok().map(|prompt| prompt.ids);
            (*endpoint, ids, speaker.question(*endpoint, body))
        };
        let asked: Vec<_> = all.iter().map(ask).collect();
        (speaker, asked)
    };
    let (speaker, asked) = tokio::task::spawn_blocking(work)
        .await
        .map_err(|_| "making the tokens of a probe ended in a panic".to_owned())?;
    let mut proof = Proof::default();
    for (number, (endpoint, ours, question)) in asked.into_iter().enumerate() {
        let Ok(question) = question else { continue };
        let theirs = ask(engine, &question).await?;
        let what = format!("probe {number} ({})", endpoint.name());
        proof.take(&what, ours.as_deref(), theirs.as_deref());
    }
    Ok((speaker, proof))
}

async fn ask(engine: &probe::Probe, question: &[u8]) -> Result<Option<Vec<u32>>, String> {
    let mut last = String::new();
    for attempt in 0..TRIES {
        if attempt > 0 {
            // An engine that has just come up may be busy for a moment.
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        match engine.tokenize(Bytes::copy_from_slice(question)).await {
            Ok(ids) => return Ok(ids),
            Err(why) => last = why,
        }
    }
    Err(format!("the engine could not be asked: {last}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Foresees with a tokenizer of the fixtures, by an engine that is taken as proved.
    fn exact() -> (Exact, Inbox) {
        let (clock, tasks) = (Clock::real(), Tasks::new());
        let (exact, inbox) = Exact::new(&Meter::new(), &clock, &tasks, 1000);
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokens/chatml");
        let speaker =
            Speaker::load(Options { model, ..Options::default() }, SEEN, Arc::new(|_| None)).unwrap();
        let (url, served_name) = (String::new(), String::new());
        let seat = Seat { speaker, url, served_name, rows: None, held: Mutex::default() };
        *exact.0.seat.lock() = Some(Arc::new(seat));
        exact.stands(Trust::Exact { proved: 16, checked: 0 });
        (exact, inbox)
    }

    fn chat(text: &str) -> Bytes {
        let message = serde_json::json!({"role": "user", "content": text});
        serde_json::json!({"messages": [message]}).to_string().into()
    }

    async fn known(looking: &Looking) -> Known {
        looking.slot.wait(Duration::from_secs(60)).await.cloned().unwrap()
    }

    #[tokio::test]
    async fn a_short_prompt_is_known_at_once_and_an_unproved_engine_costs_nothing() {
        let (exact, _inbox) = exact();
        let looking = exact.begin(Endpoint::Chat, &chat("hi")).unwrap();
        let foreseen = looking.slot.get().cloned().unwrap().unwrap();
        assert!(
            foreseen.tokens > 2 && foreseen.fresh_bytes > 0 && foreseen.reaches.is_empty(),
            "{foreseen:?}"
        );
        let again = exact.begin(Endpoint::Chat, &chat("hi")).unwrap();
        assert_eq!(again.slot.get().cloned().unwrap().unwrap().fresh_bytes, 0);
        exact.differed("how".into());
        let guessed = exact.begin(Endpoint::Chat, &chat("hi")).unwrap();
        assert_eq!((guessed.slot.get(), guessed.patience), (Some(&Err("how".into())), Duration::ZERO));
    }

    #[tokio::test]
    async fn a_short_prompt_does_not_wait_behind_long_ones_and_a_hang_up_ends_the_wait() {
        let (exact, _inbox) = exact();
        let lane = Arc::clone(&exact.0.long);
        let taken = lane.acquire_many(u32::try_from(lane.available_permits()).unwrap()).await.unwrap();
        let long = chat(&"word ".repeat(LONG / 4));
        let mut stuck: Vec<Looking> =
            (0..WAITING).map(|_| exact.begin(Endpoint::Chat, &long).unwrap()).collect();
        assert!(exact.begin(Endpoint::Chat, &long).is_none(), "no more than so many wait");
        let short = exact.begin(Endpoint::Chat, &chat("short")).unwrap();
        assert!(short.slot.get().is_some(), "found out on the spot");
        drop(stuck.pop());
        while exact.0.waiting.load(Ordering::Relaxed) == WAITING {
            tokio::task::yield_now().await;
        }
        let middling = exact.begin(Endpoint::Chat, &chat(&"word ".repeat(HERE_FRESH_MAX))).unwrap();
        assert!(known(&middling).await.is_ok());
        assert!(stuck.iter().all(|looking| looking.slot.get().is_none()), "they wait for their own lane");
        let last = stuck.pop().unwrap();
        drop(stuck);
        drop(taken);
        let foreseen = known(&last).await.unwrap();
        assert!(foreseen.fresh_bytes as usize > LONG, "{foreseen:?}");
        while exact.0.waiting.load(Ordering::Relaxed) > 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(
            exact.0.series.prompts.with_label_values(&["exact"]).get(),
            3,
            "nobody waited for the others"
        );
    }

    #[test]
    fn waiting_is_a_small_share_of_computing() {
        assert_eq!(patience(0, 1000.0), PATIENCE[0]);
        assert_eq!(patience(400_000, 1000.0), Duration::from_secs(2));
        assert_eq!(patience(40_000, 1000.0), Duration::from_millis(200));
        assert_eq!(patience(usize::MAX, 1.0), PATIENCE[1]);
    }
}
