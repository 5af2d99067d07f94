//! Exact tokens of this node's engine: loads the model's tokenizer and template when the engine is ready, proves them
//! against it, and then foresees requests, beside them. A difference, at the start or in any request later, ends it
//! for this engine, and people are told.
//!
//! One task owns the speaker and lends it to a thread that may compute; at most one prompt is made at a time and few
//! wait: a request that finds no place is served without being foreseen.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use prometheus::{Histogram, IntCounter, IntCounterVec, IntGauge};
use tokio::sync::mpsc;

use super::Parts;
use crate::base::block::RowKey;
use crate::base::clock::Micros;
use crate::base::fault::{Code, Fault};
use crate::base::table::{Holder, Probe as Table};
use crate::engine::{View, probe};
use crate::meter::Meter;
use crate::observe::state::TokensState;
use crate::router::chain::{Chain, NODES_MAX, Reach};
use crate::router::tokens::{Now, Options, Prompt, Proof, Speaker, Trust, Unsure, difference, probes};
use crate::router::{Endpoint, Foresee, Foreseen, Outcome, Slot};
use crate::tasks::Kind;

/// Prompts that wait for their turn: more than a node has requests in flight that begin at one moment.
const WAITING: usize = 64;

/// Bytes of prompts and their ids that are remembered: at eight a token and some for the table, about 7 million
/// tokens, or a hundred sessions of 70,000.
const SEEN: usize = 64 << 20;

/// One in so many foreseen requests is compared with the engine, id by id. All are compared by their number of tokens.
const SAMPLE: u64 = 100;

/// Asks of the whole proof that may fail before it is given up for this engine.
const TRIES: usize = 3;

/// Microseconds from 20 to a second.
const TOOK_US: [f64; 12] = [20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 20e3, 100e3, 300e3, 1e6];

struct Job {
    endpoint: Endpoint,
    body: Bytes,
    slot: Slot,
    begun: Micros,
}

/// Where requests are handed in, and what is known. Cheap to clone.
#[derive(Clone)]
pub struct Exact {
    jobs: mpsc::Sender<Job>,
    /// Guards one word on how it stands; held for a look.
    trust: Arc<Mutex<Trust>>,
    series: Arc<Series>,
}

/// What waits for [`run`].
pub struct Inbox(mpsc::Receiver<Job>);

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
    pub fn new(meter: &Meter) -> (Self, Inbox) {
        let (jobs, inbox) = mpsc::channel(WAITING);
        (Self { jobs, trust: Arc::default(), series: Arc::new(Series::new(meter)) }, Inbox(inbox))
    }

    /// For the router.
    pub fn foresee(&self, clock: &crate::base::clock::Clock) -> Foresee {
        let (this, clock) = (self.clone(), clock.clone());
        Foresee(Arc::new(move |endpoint, body| {
            if let Some(why) = this.trust.lock().why() {
                let known = Slot::default();
                let _ = known.set(Err(why.to_owned()));
                return Some(known);
            }
            let slot = Slot::default();
            let job = Job { endpoint, body: body.clone(), slot: Arc::clone(&slot), begun: clock.now() };
            if this.jobs.try_send(job).is_err() {
                this.series.prompts.with_label_values(&["busy"]).inc();
                return None;
            }
            Some(slot)
        }))
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
        self.series.checks.with_label_values(&["length"]).inc();
        let reach = outcome.node.as_deref().and_then(|node| foreseen.reach(node));
        if let (Some(reach), Some(cached)) = (reach, usage.cached_tokens) {
            self.series.foreseen.inc_by(reach.all.into());
            self.series.cached.inc_by(cached);
        }
    }

    pub fn state(&self) -> TokensState {
        match &*self.trust.lock() {
            Trust::Exact { proved, checked } => {
                TokensState { exact: true, why: String::new(), proved: *proved, checked: *checked }
            }
            Trust::Absent(why) | Trust::Differs(why) => {
                TokensState { why: why.clone(), ..TokensState::default() }
            }
        }
    }

    pub fn fault(&self) -> Option<Fault> {
        match &*self.trust.lock() {
            Trust::Differs(how) => Some(Fault::new(Code::TokensDiffer, how.clone())),
            Trust::Absent(_) | Trust::Exact { .. } => None,
        }
    }

    fn is_exact(&self) -> bool {
        self.trust.lock().is_exact()
    }

    fn stands(&self, trust: Trust) {
        match &trust {
            Trust::Exact { proved, .. } => tracing::info!(proved, "tokens are exact"),
            Trust::Absent(why) => tracing::info!(why, "tokens are guessed"),
            Trust::Differs(how) => tracing::error!(how, "tokens are not the engine's: they are guessed"),
        }
        self.series.exact.set(i64::from(trust.is_exact()));
        *self.trust.lock() = trust;
    }

    fn agreed(&self) {
        self.trust.lock().agreed();
        self.series.checks.with_label_values(&["ids"]).inc();
    }

    fn differed(&self, how: String) {
        self.series.checks.with_label_values(&["differs"]).inc();
        if self.trust.lock().differed(how.clone()) {
            tracing::error!(how, "tokens are not the engine's: they are guessed from now on");
            self.series.exact.set(0);
        }
    }
}

/// Follows the engine and serves what is handed in, until the node stops.
pub async fn run(parts: Parts, inbox: Inbox) {
    let Inbox(mut jobs) = inbox;
    let (stopping, mut engine) = (parts.tasks.stopping(), parts.engine.clone());
    engine.mark_changed();
    let mut seat = Seat::default();
    loop {
        // Each arm keeps its place when another wins.
        tokio::select! {
            () = stopping.cancelled() => return,
            changed = engine.changed() => {
                if changed.is_err() {
                    return;
                }
                let view = engine.borrow_and_update().clone();
                let follow = Box::pin(seat.follow(&parts, view));
                if stopping.run_until_cancelled(follow).await.is_none() {
                    return;
                }
            }
            job = jobs.recv() => match job {
                Some(job) => seat.serve(&parts, job).await,
                None => return,
            },
        }
    }
}

/// The speaker of the engine that is served.
#[derive(Default)]
struct Seat {
    speaker: Option<Speaker>,
    view: View,
    served: u64,
}

impl Seat {
    async fn follow(&mut self, parts: &Parts, view: View) {
        let same = view.engine_id == self.view.engine_id && view.url == self.view.url;
        if view.is_ready() && self.view.is_ready() && same {
            return;
        }
        self.speaker = None;
        self.view = view;
        let view = &self.view;
        if !view.is_ready() {
            parts.exact.stands(Trust::Absent(format!("its engine is {}", view.phase)));
            return;
        }
        parts.exact.stands(Trust::Absent("it is being proved".into()));
        let loaded = load(&view.model, &parts.settings.engine.extra_args).await;
        let (speaker, trust) = match loaded {
            Err(why) => (None, Trust::Absent(why.to_string())),
            Ok(speaker) => prove(view, speaker).await,
        };
        self.speaker = speaker.filter(|_| trust.is_exact());
        parts.exact.stands(trust);
    }

    async fn serve(&mut self, parts: &Parts, job: Job) {
        let Some(mut speaker) = self.speaker.take().filter(|_| parts.exact.is_exact()) else {
            let why = parts.exact.state().why;
            let _ = job.slot.set(Err(if why.is_empty() { "there is no tokenizer".into() } else { why }));
            return;
        };
        self.served += 1;
        let sampled = self.served.is_multiple_of(SAMPLE);
        let (endpoint, body) = (job.endpoint, job.body.clone());
        let held = Held::of(parts);
        let work = move || {
            let prompt = speaker.prompt(endpoint, &body);
            let question = if sampled { speaker.question(endpoint, &body).ok() } else { None };
            let reaches = prompt.as_ref().ok().zip(held).map(|(prompt, held)| held.reaches(prompt));
            (speaker, prompt, question, reaches.unwrap_or_default())
        };
        // A panic takes the speaker with it: what made it panic would do so again.
        let Ok((speaker, prompt, question, reaches)) = tokio::task::spawn_blocking(work).await else {
            parts.exact.stands(Trust::Absent("making a prompt's tokens ended in a panic".into()));
            let _ = job.slot.set(Err("it ended in a panic".into()));
            return;
        };
        self.speaker = Some(speaker);
        let known = foreseen(parts, &job, &prompt, reaches);
        if let (Ok(prompt), Some(question)) = (prompt, question) {
            self.check(parts, prompt.ids, question);
        }
        let _ = job.slot.set(known);
    }

    /// Compares with the engine, beside everything else.
    fn check(&self, parts: &Parts, ids: Vec<u32>, question: Vec<u8>) {
        let engine = probe::Probe::new(&self.view.url, &self.view.served_name);
        let exact = parts.exact.clone();
        parts.tasks.spawn(Kind::Chore, "check of tokens", async move {
            if let Ok(Some(theirs)) = engine.tokenize(question.into()).await {
                match difference(&ids, &theirs) {
                    None => exact.agreed(),
                    Some(how) => exact.differed(how),
                }
            }
        });
    }
}

/// Who holds what, as the engine at the door hashes it.
struct Held {
    chain: Chain,
    table: Arc<Table>,
    /// This node first.
    names: Vec<String>,
}

impl Held {
    /// None: no engine sits at the door, or its chain cannot be followed.
    fn of(parts: &Parts) -> Option<Self> {
        let (engine, table) = parts.door.engine().zip(parts.door.holders())?;
        let chain = Chain::of(&engine.hello).ok()?;
        let mut names = vec![parts.settings.node.name.clone()];
        names.extend(parts.cluster.members().into_iter().map(|member| member.name));
        names.truncate(NODES_MAX);
        Some(Self { chain, table, names })
    }

    fn reaches(self, prompt: &Prompt) -> Vec<(String, Reach)> {
        let hashes = self.chain.hashes(&prompt.ids, &prompt.extra);
        let others = (1_u64 << self.names.len()) - 2;
        // The table says "one of the others" without saying which.
        let holders = |key: &RowKey| {
            let bits = self.table.holders(key);
            let drive = bits & Holder::Drive as u64;
            drive | if bits & Holder::Peer as u64 == 0 { 0 } else { others }
        };
        let reaches = self.chain.reaches(prompt.ids.len(), hashes, self.names.len(), holders);
        self.names.into_iter().zip(reaches).collect()
    }
}

fn foreseen(
    parts: &Parts,
    job: &Job,
    prompt: &Result<Prompt, Unsure>,
    reaches: Vec<(String, Reach)>,
) -> Result<Foreseen, String> {
    let series = &parts.exact.series;
    match prompt {
        Err(why) => {
            series.prompts.with_label_values(&["unsure"]).inc();
            Err(why.to_string())
        }
        Ok(prompt) => {
            let took = parts.clock.now().since(job.begun);
            series.prompts.with_label_values(&["exact"]).inc();
            series.took.observe(took.as_secs_f64() * 1e6);
            series.fresh.inc_by(prompt.fresh_bytes as u64);
            let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
            Ok(Foreseen {
                tokens: count(prompt.ids.len()),
                reaches,
                fresh_bytes: count(prompt.fresh_bytes),
                took,
            })
        }
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
    mut speaker: Speaker,
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
