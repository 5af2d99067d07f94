//! The engine's door: the Unix socket on which the plugin in vLLM's scheduler process speaks to the node.
//!
//! It promises the engine what [`crate::base::frame`] says: DONE once per job, and only when nothing can touch its
//! rows. It promises the node that no job touches memory before it was checked, that the table tells only what is
//! held, and that whoever breaks a rule loses the connection and nothing else happens.
//!
//! One engine is served at a time. A new HELLO of the same engine, or of a newer one, takes the seat: the
//! connection before it is closed, its jobs are awaited, and only then WELCOME is sent. An older engine is refused.
//!
//! A row area can be cut short by the engine that owns it, which would end this process at the next touch. The
//! keeper starts both and restarts the node, and the descriptor comes only from a process of the same user.

mod held;
mod job;
mod lease;
mod promise;
mod session;

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use prometheus::{Histogram, IntCounter, IntCounterVec, IntGauge};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, broadcast, watch};
use tokio_util::sync::CancellationToken;

use self::promise::{Promises, Reason};
use self::session::Turned;
use crate::base::block::{Namespace, RowKey};
use crate::base::clock::{Clock, unix_seconds};
use crate::base::fault::Fault;
use crate::base::frame::{Outcome, Sources};
use crate::base::geometry::Hello;
use crate::base::table::Probe;
use crate::cluster::Cluster;
use crate::meter::{Meter, SECONDS};
use crate::store::Store;
use crate::tasks::{self, Kind, Tasks};

/// Connections at one time, most of them before their HELLO. An engine has one; a restarting one may have two.
const CONNECTIONS: usize = 8;

/// Reports that a slow listener may be behind. Later ones push the oldest out, and it is told how many.
const REPORTS: usize = 1024;

/// How long a newcomer waits for the jobs of the connection before it. Loads end by their deadlines and stores by
/// the drive; what takes longer is a wedged drive, and then no engine is better off with this node.
const SUCCESSION_LIMIT: Duration = Duration::from_secs(60);

/// How long an answer on an existing socket is awaited before it counts as nobody's.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// Share of the rows that hits may hold. Hits beyond it are cut; stores need the rest, since one that finds no
/// row is lost for as long as its block is in the engine. A quarter takes a whole long prompt's tail in practice.
pub const ROW_BUDGET_PERCENT: u32 = 75;

/// What an engine's rows are called and why: the namespace, and the facts it was made of, name and value.
pub type Named = Result<(Namespace, BTreeMap<String, String>), String>;

/// Makes the namespace of an engine out of what it announced and of its model.
pub type Fingerprint = Arc<dyn Fn(Hello) -> BoxFuture<'static, Named> + Send + Sync>;

/// Tells by the engine's id of a request whose it is; None where that is not clear.
pub type OwnerOf = Arc<dyn Fn(&str) -> Option<Arc<str>> + Send + Sync>;

/// What the door needs to know.
#[derive(Clone)]
pub struct Options {
    /// Grows with every start of the node.
    pub generation: u64,
    pub fingerprint: Fingerprint,
    /// Whose rows the engine stores.
    pub owner_of: OwnerOf,
    /// Tokens per second that recomputing reaches, until [`Door::set_pace`] knows better.
    pub prefill_tokens_per_s: u32,
    /// Usually [`ROW_BUDGET_PERCENT`].
    pub row_budget_percent: u32,
    /// Whether rows are used before anybody has said so with [`Door::set_tier`].
    pub tier_on: bool,
}

impl Options {
    /// Rows that hits may hold, of `rows`: at least one, and at least one is left for stores where there are two.
    fn row_budget(&self, rows: u32) -> u32 {
        let share = u64::from(rows) * u64::from(self.row_budget_percent.min(100)) / 100;
        u32::try_from(share).expect("at most all rows").clamp(1, rows.saturating_sub(1).max(1))
    }
}

/// Why the door does not open.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("another node answers on {0}")]
    Taken(PathBuf),
    #[error("failed to open the engine's socket {path}: {source}")]
    Socket { path: PathBuf, source: io::Error },
}

/// The engine that is served.
#[derive(Clone, Debug)]
pub struct EngineFacts {
    pub hello: Hello,
    pub namespace: Namespace,
    /// What the namespace was made of.
    pub what: BTreeMap<String, String>,
    pub since_unix: u64,
}

/// Where the tokens of one request came from, as the plugin saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The engine's internal id of the request.
    pub request: String,
    /// Whose request it is, where that is clear.
    pub owner: Option<Arc<str>>,
    pub sources: Sources,
    /// Every row of the prompt that is held somewhere, and where it ends.
    pub chain: Vec<(RowKey, u32)>,
}

/// What people and pages see.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Status {
    pub socket: PathBuf,
    pub engine: Option<EngineStatus>,
    pub tier_on: bool,
    pub tier_reason: String,
    pub prefill_tokens_per_s: u32,
    pub open_jobs: i64,
    pub loads: Loads,
    pub stores: Stores,
    /// Rows that a lookup had promised and a load did not bring, by reason.
    pub broken: BTreeMap<String, u64>,
    /// The last connection that was refused, or closed for breaking a rule.
    pub last_refusal: Option<Refusal>,
}

#[derive(Clone, Debug, serde::Serialize)]
pub struct EngineStatus {
    pub engine_id: String,
    pub vllm: String,
    pub plugin: String,
    pub pid: u32,
    pub namespace: String,
    pub since_unix: u64,
    pub rows: u32,
    pub row_bytes: u32,
    pub row_budget: u32,
    pub table_slots: usize,
    /// Keys that are held but found no place in the table.
    pub table_overflowed: i64,
}

/// Rows loaded, by where they came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Loads {
    pub drive: u64,
    pub peer: u64,
    pub failed: u64,
}

/// Rows offered for storing, by what became of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Stores {
    pub stored: u64,
    pub held: u64,
    pub failed: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Refusal {
    pub reason: String,
    pub unix: u64,
}

/// What an engine is told when it changes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Pushed {
    tier_on: bool,
    reason: String,
    prefill_tokens_per_s: u32,
}

/// The series of the door.
#[derive(Debug)]
struct Meters {
    prompt_tokens: IntCounterVec,
    load_rows: IntCounterVec,
    store_rows: IntCounterVec,
    broken: IntCounterVec,
    load_seconds: Histogram,
    store_seconds: Histogram,
    open_jobs: IntGauge,
    connected: IntGauge,
    overflowed: IntGauge,
    refusals: IntCounter,
}

impl Meters {
    fn new(meter: &Meter) -> Self {
        let this = Self {
            prompt_tokens: meter.counters(
                "door_prompt_tokens_total",
                "Prompt tokens by where their KV came from, as the plugin reported them.",
                &["source"],
            ),
            load_rows: meter.counters("door_load_rows_total", "Rows asked for, by outcome.", &["outcome"]),
            store_rows: meter.counters("door_store_rows_total", "Rows offered, by outcome.", &["outcome"]),
            broken: meter.counters(
                "door_broken_promises_total",
                "Rows that a lookup said are present and a load did not bring, by reason.",
                &["reason"],
            ),
            load_seconds: meter.histogram("door_load_seconds", "Seconds from LOAD to DONE.", &SECONDS),
            store_seconds: meter.histogram("door_store_seconds", "Seconds from STORE to DONE.", &SECONDS),
            open_jobs: meter.gauge("door_open_jobs", "Jobs whose rows are lent to this node."),
            connected: meter.gauge("door_engine_connected", "1 while an engine is served."),
            overflowed: meter.gauge("door_table_overflowed", "Held keys that found no place in the table."),
            refusals: meter
                .counter("door_refusals_total", "Connections refused or closed for a broken rule."),
        };
        // Every series is there from the start, so that a rate over the first event is not lost.
        for source in ["device", "staging", "drive", "peer", "computed"] {
            this.prompt_tokens.with_label_values(&[source]);
        }
        for outcome in ["drive", "peer", "failed"] {
            this.load_rows.with_label_values(&[outcome]);
        }
        for outcome in ["stored", "held", "failed"] {
            this.store_rows.with_label_values(&[outcome]);
        }
        for reason in Reason::ALL {
            this.broken.with_label_values(&[reason.word()]);
        }
        this
    }

    fn count(&self, load: bool, outcomes: &[Outcome]) {
        let rows = if load { &self.load_rows } else { &self.store_rows };
        for outcome in outcomes {
            let label = match outcome {
                Outcome::Failed => "failed",
                Outcome::FromDrive => "drive",
                Outcome::FromPeer => "peer",
                Outcome::Stored => "stored",
                Outcome::Held => "held",
            };
            rows.with_label_values(&[label]).inc();
        }
    }

    fn seconds(&self, load: bool) -> &Histogram {
        if load { &self.load_seconds } else { &self.store_seconds }
    }
}

/// Who sits at the door.
#[derive(Debug)]
struct Seated {
    serial: u64,
    engine_id: String,
    replaced: CancellationToken,
    /// Known once WELCOME was sent, and until the connection ended.
    facts: Option<(EngineFacts, usize)>,
    /// The lookup table as the engine has it, as long.
    holders: Option<Arc<Probe>>,
}

/// What all parts of the door share.
struct Shared {
    socket: PathBuf,
    store: Store,
    cluster: Option<Cluster>,
    options: Options,
    clock: Clock,
    tasks: Tasks,
    meters: Meters,
    pushed: watch::Sender<Pushed>,
    reports: broadcast::Sender<Report>,
    /// Guards who sits; taken for moments only.
    seated: Mutex<Option<Seated>>,
    /// One permit: whoever has it may have jobs that touch rows.
    rows_in_use: Arc<Semaphore>,
    last_refusal: Mutex<Option<Refusal>>,
    /// Guards what the last hour's lookups promised.
    promises: Mutex<Promises>,
    areas: AtomicU64,
    serials: AtomicU64,
    /// Ends when rows were lost sight of: only the end of the process makes them safe.
    lost: CancellationToken,
}

/// The right of one connection to be the engine's, given back when it is dropped: by then nothing of the
/// connection can touch a row.
struct Seat {
    serial: u64,
    engine_id: String,
    replaced: CancellationToken,
    rows_in_use: Option<OwnedSemaphorePermit>,
    shared: Arc<Shared>,
}

impl Drop for Seat {
    fn drop(&mut self) {
        if std::thread::panicking()
            && let Some(permit) = self.rows_in_use.take()
        {
            // Its jobs may still run, and nobody awaits them: the rows stay in use until the process ends.
            permit.forget();
            self.shared.lost.cancel();
        }
        let mut seated = self.shared.seated.lock();
        if seated.as_ref().is_some_and(|s| s.serial == self.serial) {
            *seated = None;
            self.shared.meters.connected.set(0);
        }
    }
}

/// Generation at the end of `spark-<node>-<generation>`, and what stands before it.
fn generation(engine_id: &str) -> Option<(&str, u64)> {
    let (name, number) = engine_id.rsplit_once('-')?;
    Some((name, number.parse().ok()?))
}

/// Whether `newcomer` must give way to `seated`: same name, smaller generation. All else is decided by who
/// came last, because an engine that says hello is alive and the one before it need not be.
fn gives_way(newcomer: &str, seated: &str) -> bool {
    match (generation(newcomer), generation(seated)) {
        (Some((name, number)), Some((other, served))) => name == other && number < served,
        _ => false,
    }
}

impl Shared {
    /// A seat for `engine_id`, once nothing of the connection before can touch a row.
    async fn seat(self: &Arc<Self>, engine_id: &str) -> Result<Seat, Turned> {
        let mut seat = self.take_place(engine_id)?;
        let permit = tasks::log_slow(
            "the engine before",
            Duration::from_secs(5),
            Arc::clone(&self.rows_in_use).acquire_owned(),
        );
        // Waiting for a permit is cancel-safe: it only loses the place in the queue.
        tokio::select! {
            () = seat.replaced.cancelled() => return Err(Turned::Replaced),
            waited = tokio::time::timeout(SUCCESSION_LIMIT, permit) => {
                seat.rows_in_use = Some(waited.map_err(|_| Turned::Busy)?.expect("never closed"));
            }
        }
        Ok(seat)
    }

    /// Puts `engine_id` in the place of whoever sits there, and tells them to go.
    fn take_place(self: &Arc<Self>, engine_id: &str) -> Result<Seat, Turned> {
        let (serial, replaced) = (self.serials.fetch_add(1, Ordering::Relaxed), CancellationToken::new());
        let mut seated = self.seated.lock();
        if let Some(before) = seated.take() {
            if gives_way(engine_id, &before.engine_id) {
                let other = before.engine_id.clone();
                *seated = Some(before);
                return Err(Turned::Older(other));
            }
            tracing::warn!(
                newer = engine_id,
                older = before.engine_id,
                "an engine takes another one's place"
            );
            before.replaced.cancel();
        }
        let engine_id = engine_id.to_owned();
        *seated = Some(Seated {
            serial,
            engine_id: engine_id.clone(),
            replaced: replaced.clone(),
            facts: None,
            holders: None,
        });
        Ok(Seat { serial, engine_id, replaced, rows_in_use: None, shared: Arc::clone(self) })
    }

    fn sat_down(&self, seat: &Seat, facts: EngineFacts, slots: usize, holders: Option<Probe>) {
        let hello = &facts.hello;
        tracing::info!(
            engine = hello.engine_id,
            vllm = hello.vllm,
            pid = hello.pid,
            rows = hello.rows,
            row_bytes = hello.row_bytes,
            groups = hello.groups.len(),
            slots,
            namespace = ?facts.namespace,
            "engine connected"
        );
        if let Some(seated) = self.seated.lock().as_mut().filter(|s| s.serial == seat.serial) {
            seated.facts = Some((facts, slots));
            seated.holders = holders.map(Arc::new);
            self.meters.connected.set(1);
        }
    }

    fn stood_up(&self, seat: &Seat) {
        if let Some(seated) = self.seated.lock().as_mut().filter(|s| s.serial == seat.serial) {
            seated.facts = None;
            seated.holders = None;
            self.meters.connected.set(0);
        }
    }

    fn next_area(&self) -> u64 {
        self.areas.fetch_add(1, Ordering::Relaxed)
    }

    /// What became of the rows of one load.
    fn promised(&self, kept: u64, broken: &[Reason]) {
        let now = self.clock.now();
        let mut promises = self.promises.lock();
        promises.kept(kept, now);
        for reason in broken {
            promises.broken(*reason, now);
            self.meters.broken.with_label_values(&[reason.word()]).inc();
        }
    }

    fn refused(&self, reason: String) {
        self.meters.refusals.inc();
        *self.last_refusal.lock() = Some(Refusal { reason, unix: unix_seconds() });
    }

    fn report(&self, report: Report) {
        let s = report.sources;
        for (source, tokens) in [
            ("device", s.device),
            ("staging", s.staging),
            ("drive", s.drive),
            ("peer", s.peer),
            ("computed", s.computed),
        ] {
            self.meters.prompt_tokens.with_label_values(&[source]).inc_by(tokens.into());
        }
        // Nobody listening is no fault: the counters have it.
        let _ = self.reports.send(report);
    }
}

/// Handle of the door. Cheap to clone; the door ends with the tasks it was given.
#[derive(Clone)]
pub struct Door(Arc<Shared>);

impl Door {
    /// Opens the socket and serves whoever comes.
    pub async fn start(
        socket: PathBuf,
        store: Store,
        cluster: impl Into<Option<Cluster>>,
        options: Options,
        clock: Clock,
        tasks: &Tasks,
        meter: &Meter,
    ) -> Result<Self, Error> {
        let listener = match open(&socket).await {
            Ok(Some(listener)) => listener,
            Ok(None) => return Err(Error::Taken(socket)),
            Err(source) => return Err(Error::Socket { path: socket, source }),
        };
        let pushed = Pushed {
            tier_on: options.tier_on,
            reason: String::new(),
            prefill_tokens_per_s: options.prefill_tokens_per_s,
        };
        let shared = Arc::new(Shared {
            socket,
            store,
            cluster: cluster.into(),
            options,
            clock,
            tasks: tasks.clone(),
            meters: Meters::new(meter),
            pushed: watch::Sender::new(pushed),
            reports: broadcast::Sender::new(REPORTS),
            seated: Mutex::new(None),
            rows_in_use: Arc::new(Semaphore::new(1)),
            last_refusal: Mutex::new(None),
            promises: Mutex::default(),
            areas: AtomicU64::new(1),
            serials: AtomicU64::new(1),
            lost: CancellationToken::new(),
        });
        tasks.spawn(Kind::Owner, "engine's door", accept(Arc::clone(&shared), listener));
        Ok(Self(shared))
    }

    /// The engine that is served now.
    pub fn engine(&self) -> Option<EngineFacts> {
        self.0.seated.lock().as_ref()?.facts.as_ref().map(|(facts, _)| facts.clone())
    }

    /// Who can bring which row: the lookup table, as the engine that is served sees it.
    pub fn holders(&self) -> Option<Arc<Probe>> {
        self.0.seated.lock().as_ref()?.holders.clone()
    }

    /// Every request's sources from now on.
    pub fn reports(&self) -> broadcast::Receiver<Report> {
        self.0.reports.subscribe()
    }

    /// Turns the cache off or on, for the engine that is served and for those to come. While it is off, jobs are
    /// answered `Failed` and nothing is moved.
    pub fn set_tier(&self, on: bool, reason: &str) {
        if on {
            tracing::info!(reason, "tier on");
        } else {
            tracing::warn!(reason, "tier off");
        }
        self.0.pushed.send_modify(|p| (p.tier_on, p.reason) = (on, reason.to_owned()));
    }

    /// Tells the speed of recomputing, as measured.
    pub fn set_pace(&self, prefill_tokens_per_s: u32) {
        self.0.pushed.send_if_modified(|p| {
            let before = std::mem::replace(&mut p.prefill_tokens_per_s, prefill_tokens_per_s);
            before != prefill_tokens_per_s
        });
    }

    /// What is wrong at the door now.
    pub fn faults(&self) -> Vec<Fault> {
        self.0.promises.lock().fault(self.0.clock.now()).into_iter().collect()
    }

    pub fn status(&self) -> Status {
        let shared = &self.0;
        let pushed = shared.pushed.borrow().clone();
        let (m, overflowed) = (&shared.meters, shared.meters.overflowed.get());
        let engine = shared.seated.lock().as_ref().and_then(|s| s.facts.clone());
        let loads = |outcome| m.load_rows.with_label_values(&[outcome]).get();
        let stores = |outcome| m.store_rows.with_label_values(&[outcome]).get();
        let broken = |reason: Reason| {
            let word = reason.word();
            (word.to_owned(), m.broken.with_label_values(&[word]).get())
        };
        Status {
            socket: shared.socket.clone(),
            engine: engine.map(|(facts, slots)| self.engine_status(facts, slots, overflowed)),
            tier_on: pushed.tier_on,
            tier_reason: pushed.reason,
            prefill_tokens_per_s: pushed.prefill_tokens_per_s,
            open_jobs: m.open_jobs.get(),
            loads: Loads { drive: loads("drive"), peer: loads("peer"), failed: loads("failed") },
            stores: Stores { stored: stores("stored"), held: stores("held"), failed: stores("failed") },
            broken: Reason::ALL.into_iter().map(broken).collect(),
            last_refusal: shared.last_refusal.lock().clone(),
        }
    }

    fn engine_status(&self, facts: EngineFacts, table_slots: usize, table_overflowed: i64) -> EngineStatus {
        let EngineFacts { hello, namespace, since_unix, .. } = facts;
        EngineStatus {
            row_budget: self.0.options.row_budget(hello.rows),
            engine_id: hello.engine_id,
            vllm: hello.vllm,
            plugin: hello.plugin,
            pid: hello.pid,
            namespace: namespace.to_string(),
            since_unix,
            rows: hello.rows,
            row_bytes: hello.row_bytes,
            table_slots,
            table_overflowed,
        }
    }
}

/// Binds the socket, for this user alone. None when somebody answers on it; a file that nobody answers on is what
/// a killed node left behind.
async fn open(path: &Path) -> io::Result<Option<UnixListener>> {
    if let Some(folder) = path.parent() {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    match tokio::time::timeout(ANSWER_LIMIT, UnixStream::connect(path)).await {
        Ok(Ok(_)) => return Ok(None),
        Ok(Err(error)) if error.kind() == io::ErrorKind::NotFound => {}
        Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path)?,
        Ok(Err(error)) => return Err(error),
        // A full queue on a listener that does not accept: somebody is there.
        Err(_) => return Ok(None),
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(Some(listener))
}

/// Takes connections until the node stops. Ends early, and with it the node, when rows were lost sight of.
async fn accept(shared: Arc<Shared>, listener: UnixListener) {
    let stopping = shared.tasks.stopping();
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        // Accepting is cancel-safe: a connection is either taken or still queued.
        let accepted = tokio::select! {
            () = stopping.cancelled() => break,
            () = shared.lost.cancelled() => {
                tracing::error!("a task that moved rows panicked: the node ends, so that nothing writes them late");
                break;
            }
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, usually: a pause, or the loop would spin.
                tracing::warn!(%error, "failed to accept an engine's connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            tracing::warn!(CONNECTIONS, "too many connections at the engine's door");
            continue;
        };
        let shared = Arc::clone(&shared);
        shared.tasks.clone().spawn(Kind::Serving, "engine connection", async move {
            session::serve(shared, stream).await;
            drop(place);
        });
    }
    let _ = std::fs::remove_file(&shared.socket);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_leave_rows_for_stores() {
        let fingerprint: Fingerprint = Arc::new(|_| Box::pin(async { Err(String::new()) }));
        let mut options = Options {
            generation: 1,
            fingerprint,
            owner_of: Arc::new(|_| None),
            prefill_tokens_per_s: 1,
            row_budget_percent: ROW_BUDGET_PERCENT,
            tier_on: true,
        };
        let budgets = [1, 2, 3, 4, 100, 1 << 24].map(|rows| options.row_budget(rows));
        assert_eq!(budgets, [1, 1, 2, 3, 75, 12_582_912]);
        options.row_budget_percent = 100;
        assert_eq!([1, 2, 100].map(|rows| options.row_budget(rows)), [1, 1, 99]);
        options.row_budget_percent = 0;
        assert_eq!(options.row_budget(100), 1);
    }

    #[test]
    fn an_older_engine_gives_way_and_nobody_else() {
        assert!(gives_way("spark-a-3", "spark-a-4"));
        assert!(!gives_way("spark-a-4", "spark-a-4"));
        assert!(!gives_way("spark-a-10", "spark-a-9"));
        assert!(!gives_way("spark-b-1", "spark-a-9"));
        assert!(!gives_way("attached", "spark-a-9"));
    }
}
