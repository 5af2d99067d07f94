//! One engine's connection: hello, jobs, reports, goodbye.
//!
//! The session owns the connection's state: what was read and not yet understood, what is to be written, the
//! leases. Jobs run beside it and come back through one bounded channel. Its end is ordered: nothing new is read,
//! the open jobs are awaited, the store lets go of the area, and only then the seat is free. A WELCOME therefore
//! also promises that nothing of an earlier connection can touch a row any more.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::held::{self, Held};
use super::job::Mover;
use super::lease::{Ledger, MAX_OPEN_JOBS, Verdict, Violation};
use super::{EngineFacts, Pushed, Report, Seat, Shared};
use crate::base::block::{Namespace, RowItem, Space};
use crate::base::clock::{Micros, unix_seconds};
use crate::base::codec::Malformed;
use crate::base::frame::{FromEngine, FromNode, Outcome, PROTOCOL};
use crate::base::geometry::{Hello, Refused, Welcome};
use crate::base::handover::{self, Inbox};
use crate::base::rows::{AreaId, Rows};
use crate::base::table::Probe;
use crate::cluster::SpaceFacts;
use crate::tasks::{self, Kind};

/// From connecting to a whole HELLO. The plugin sends it at once; whoever does not is not a plugin.
const HELLO_LIMIT: Duration = Duration::from_secs(10);

/// Reading a model's fingerprint: 64 reads of 64 KiB and its headers, on a cold and busy drive.
const FINGERPRINT_LIMIT: Duration = Duration::from_secs(120);

/// Bytes that wait for an engine that does not read: 250,000 outcomes. Beyond, it is taken for dead.
const UNREAD_MAX: usize = 8 << 20;

/// How often an awaited end is said to be still awaited.
const SAY_SO: Duration = Duration::from_secs(5);

const READ_STEP: usize = 64 << 10;

/// Why a connection did not become a session.
#[derive(Debug, thiserror::Error)]
pub(super) enum Turned {
    #[error("user {0} is neither this node's nor root")]
    Stranger(u32),
    #[error("no whole HELLO within {} s", HELLO_LIMIT.as_secs())]
    Silent,
    #[error("the connection ended before HELLO was whole")]
    Ended,
    #[error("HELLO came without the row area's descriptor")]
    NoDescriptor,
    #[error("the first frame is not a HELLO")]
    NotHello,
    #[error("HELLO is not to be understood: {0}")]
    Json(serde_json::Error),
    #[error("HELLO is not to be understood: {0}")]
    Malformed(#[from] Malformed),
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error("failed to fingerprint the model: {0}")]
    Fingerprint(String),
    #[error("engine {0} is served, and is newer")]
    Older(String),
    #[error("another engine took its place")]
    Replaced,
    #[error("jobs of the connection before still use their rows")]
    Busy,
    #[error("failed to take the row area: {0}")]
    Area(String),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum End {
    #[error("the engine closed the connection")]
    Closed,
    #[error("the engine closed the connection in the middle of a frame")]
    Cut,
    #[error("another engine took its place")]
    Replaced,
    #[error("the node stops")]
    Stopping,
    #[error("the engine does not read: {0} bytes wait")]
    Unread(usize),
    #[error("a second HELLO")]
    HelloAgain,
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error(transparent)]
    Violation(#[from] Violation),
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl End {
    /// Whether the engine broke a rule, as opposed to the connection having had its day.
    pub(super) fn is_fault(&self) -> bool {
        !matches!(self, Self::Closed | Self::Replaced | Self::Stopping)
    }
}

/// What a job comes back with.
struct Ended {
    job: u64,
    begun: Micros,
    /// Whether DONE went out before (broken builds only).
    answered: bool,
    load: bool,
    outcomes: Vec<Outcome>,
}

/// Reads HELLO and its descriptor.
async fn read_hello(stream: &UnixStream, inbox: &mut Inbox) -> Result<(Hello, OwnedFd), Turned> {
    let mut area = None;
    let mut buffer = vec![0; READ_STEP];
    loop {
        let receive = || handover::receive_with(stream.as_fd(), &mut buffer);
        let (n, fd) = stream.async_io(Interest::READABLE, receive).await?;
        if n == 0 {
            return Err(Turned::Ended);
        }
        area = area.or(fd);
        inbox.feed(&buffer[..n]);
        let Some(frame) = inbox.frame()? else { continue };
        let FromEngine::Hello(json) = FromEngine::decode(frame)? else { return Err(Turned::NotHello) };
        let hello: Hello = serde_json::from_slice(&json).map_err(Turned::Json)?;
        hello.check()?;
        return Ok((hello, area.ok_or(Turned::NoDescriptor)?));
    }
}

/// What HELLO and the checks after it gave.
struct Guest {
    hello: Hello,
    area: OwnedFd,
    namespace: Namespace,
    what: BTreeMap<String, String>,
    inbox: Inbox,
}

async fn meet(shared: &Shared, stream: &UnixStream) -> Result<Guest, Turned> {
    let uid = stream.peer_cred()?.uid();
    if uid != 0 && uid != nix::unistd::geteuid().as_raw() {
        return Err(Turned::Stranger(uid));
    }
    let mut inbox = Inbox::default();
    let hello = tokio::time::timeout(HELLO_LIMIT, read_hello(stream, &mut inbox));
    let (hello, area) = hello.await.map_err(|_| Turned::Silent)??;
    let asked = (shared.options.fingerprint)(hello.clone());
    let answered = tokio::time::timeout(FINGERPRINT_LIMIT, asked).await;
    let answered = answered.unwrap_or_else(|_| Err("it takes too long".into()));
    let (namespace, what) = answered.map_err(Turned::Fingerprint)?;
    Ok(Guest { hello, area, namespace, what, inbox })
}

/// Serves one connection from its first byte to its last.
pub(super) async fn serve(shared: Arc<Shared>, stream: UnixStream) {
    let opened = match meet(&shared, &stream).await {
        Ok(guest) => match shared.seat(&guest.hello.engine_id).await {
            Ok(seat) => Session::open(&shared, stream, guest, seat).await,
            Err(turned) => Err((turned, stream)),
        },
        Err(turned) => Err((turned, stream)),
    };
    match opened {
        Ok(session) => session.run().await,
        Err((turned, stream)) => refuse(&shared, &stream, &turned),
    }
}

/// Says why and closes. Whoever does not read it has it in the log.
fn refuse(shared: &Shared, stream: &UnixStream, turned: &Turned) {
    let reason = turned.to_string();
    tracing::warn!(reason, "engine refused");
    let _ = stream.try_write(&FromNode::Refuse { reason: reason.clone() }.encode());
    shared.refused(reason);
}

/// A served engine.
struct Session {
    shared: Arc<Shared>,
    stream: UnixStream,
    inbox: Inbox,
    /// Frames to be written, as bytes.
    out: Vec<u8>,
    mover: Mover,
    ledger: Ledger,
    held: Held,
    back: mpsc::Sender<Ended>,
    ended: mpsc::Receiver<Ended>,
    pushed: watch::Receiver<Pushed>,
    /// What the engine was told last.
    told: Pushed,
    seat: Seat,
}

impl Session {
    async fn open(
        shared: &Arc<Shared>,
        stream: UnixStream,
        guest: Guest,
        seat: Seat,
    ) -> Result<Self, (Turned, UnixStream)> {
        let Guest { hello, area, namespace, what, inbox } = guest;
        let space = Space { namespace, rank: hello.rank() };
        let id = AreaId(shared.next_area());
        let shape = hello.clone();
        let attached = tokio::task::spawn_blocking(move || {
            let rows = Rows::attach(id, space, &shape, &area)?;
            rows.populate()?;
            Ok(rows)
        });
        let attached: io::Result<_> = attached.await.unwrap_or_else(|e| Err(io::Error::other(e)));
        let rows = match attached {
            Ok(rows) => rows,
            Err(error) => return Err((Turned::Area(error.to_string()), stream)),
        };
        if let Err(error) = shared.store.attach(&rows).await {
            return Err((Turned::Area(error.to_string()), stream));
        }
        if let Some(cluster) = &shared.cluster {
            cluster.set_space(Some(SpaceFacts { space, what: what.clone() }));
            cluster.set_rows(Some(Arc::clone(&rows)));
        }
        let slots = held::slots(shared.store.status().capacity, hello.row_bytes);
        let (store, cluster) = (shared.store.clone(), shared.cluster.clone());
        let (held, table) = match Held::start(store, cluster, space, slots, &shared.tasks).await {
            Ok(held) => held,
            Err(error) => {
                shared.store.detach(rows.id).await;
                return Err((Turned::Io(error), stream));
            }
        };
        let (back, ended) = mpsc::channel(MAX_OPEN_JOBS);
        let mut pushed = shared.pushed.subscribe();
        let told = pushed.borrow_and_update().clone();
        let mover = Mover {
            store: shared.store.clone(),
            cluster: shared.cluster.clone(),
            rows,
            clock: shared.clock.clone(),
        };
        let ledger = Ledger::new(hello.rows, hello.groups.len());
        let facts = EngineFacts { hello, namespace, what, since_unix: unix_seconds() };
        let shared = Arc::clone(shared);
        let out = Vec::new();
        let mut session =
            Self { shared, stream, inbox, out, mover, ledger, held, back, ended, pushed, told, seat };
        // Before WELCOME: an engine that heard it is the one that others see here.
        let holders = u32::try_from(slots).ok().and_then(|slots| Probe::attach(slots, &table).ok());
        session.shared.sat_down(&session.seat, facts.clone(), slots, holders);
        match session.welcome(&facts, slots, table).await {
            Ok(()) => Ok(session),
            Err(error) => {
                session.shared.store.detach(session.mover.rows.id).await;
                Err((Turned::Io(error), session.stream))
            }
        }
    }

    /// Sends WELCOME with the table's descriptor, and the reason behind it when the tier is off.
    async fn welcome(&mut self, facts: &EngineFacts, slots: usize, table: OwnedFd) -> io::Result<()> {
        let welcome = Welcome {
            protocol: PROTOCOL,
            generation: self.shared.options.generation,
            pid: std::process::id(),
            namespace: facts.namespace.to_string(),
            table_slots: u32::try_from(slots).expect("at most 2^24 slots"),
            row_budget: self.shared.options.row_budget(facts.hello.rows),
            prefill_tokens_per_s: self.told.prefill_tokens_per_s,
            tier_on: self.told.tier_on,
        };
        let json = serde_json::to_vec(&welcome).map_err(io::Error::other)?;
        let frame = FromNode::Welcome(json).encode();
        let send = || handover::send_with(self.stream.as_fd(), &frame, table.as_fd());
        let sent = self.stream.async_io(Interest::WRITABLE, send).await?;
        self.out.extend_from_slice(&frame[sent..]);
        if !self.told.tier_on {
            self.say(&FromNode::Tier { on: false, reason: self.told.reason.clone() });
        }
        Ok(())
    }

    async fn run(mut self) {
        let end = self.serve().await;
        let engine = self.seat.engine_id.clone();
        if end.is_fault() {
            tracing::warn!(engine, reason = %end, open_jobs = self.ledger.open_jobs(), "engine's connection closed");
            self.shared.refused(end.to_string());
        } else {
            tracing::info!(engine, reason = %end, open_jobs = self.ledger.open_jobs(), "engine's connection ended");
        }
        if !matches!(end, End::Stopping) {
            self.close_stream();
        }
        self.leave().await;
    }

    /// The engine sees the end before the jobs are awaited: it must not believe that it is still served.
    fn close_stream(&self) {
        let _ = self.stream.try_write(&self.out);
        let _ = rustix::net::shutdown(&self.stream, rustix::net::Shutdown::Both);
    }

    /// Awaits the open jobs, lets go of the rows, frees the seat.
    async fn leave(mut self) {
        self.shared.stood_up(&self.seat);
        let jobs = async {
            while self.ledger.open_jobs() > 0 {
                let Some(ended) = self.ended.recv().await else { return };
                self.finish(ended);
            }
        };
        tasks::log_slow("open jobs of an engine that left", SAY_SO, jobs).await;
        if let Some(cluster) = &self.shared.cluster {
            cluster.set_rows(None);
        }
        let detach = self.shared.store.detach(self.mover.rows.id);
        tasks::log_slow("the store lets go of a row area", SAY_SO, detach).await;
        // What is still to be said (the last DONEs of a node that stops) is said as far as it goes at once.
        let _ = self.stream.try_write(&self.out);
        drop(self.seat);
    }

    async fn serve(&mut self) -> End {
        let stopping = self.shared.tasks.stopping();
        let replaced = self.seat.replaced.clone();
        let mut buffer = vec![0; READ_STEP];
        // What came with HELLO is understood before anything else is read.
        if let Err(end) = self.understand() {
            return end;
        }
        loop {
            // Each arm is cancel-safe: waiting takes nothing, and receiving loses nothing when another arm wins.
            let said = tokio::select! {
                () = replaced.cancelled() => return End::Replaced,
                () = stopping.cancelled() => return End::Stopping,
                ended = self.ended.recv() => {
                    if let Some(ended) = ended {
                        self.finish(ended);
                    }
                    Ok(())
                }
                changed = self.pushed.changed() => {
                    if changed.is_ok() {
                        self.push();
                    }
                    Ok(())
                }
                ready = self.stream.readable() => match ready {
                    Ok(()) => self.read(&mut buffer),
                    Err(error) => Err(error.into()),
                },
                ready = self.stream.writable(), if !self.out.is_empty() => match ready {
                    Ok(()) => Ok(()),
                    Err(error) => Err(error.into()),
                },
            };
            if let Err(end) = said.and_then(|()| self.write()) {
                return end;
            }
        }
    }

    fn read(&mut self, buffer: &mut [u8]) -> Result<(), End> {
        match self.stream.try_read(buffer) {
            Ok(0) if self.inbox.in_the_middle() => Err(End::Cut),
            Ok(0) => Err(End::Closed),
            Ok(n) => {
                self.inbox.feed(&buffer[..n]);
                self.understand()
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn write(&mut self) -> Result<(), End> {
        while !self.out.is_empty() {
            match self.stream.try_write(&self.out) {
                Ok(n) => {
                    self.out.drain(..n);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.into()),
            }
        }
        if self.out.len() > UNREAD_MAX { Err(End::Unread(self.out.len())) } else { Ok(()) }
    }

    fn understand(&mut self) -> Result<(), End> {
        while let Some(frame) = self.inbox.frame()? {
            match FromEngine::decode(frame)? {
                FromEngine::Hello(_) => return Err(End::HelloAgain),
                FromEngine::Store { job, request, items } => self.store(job, &request, items)?,
                FromEngine::Load { job, deadline_us, request, items } => {
                    self.load(job, deadline_us, &request, items)?;
                }
                FromEngine::Report { request, sources, chain } => {
                    let owner = (self.shared.options.owner_of)(&request);
                    self.shared.report(Report { request, owner, sources, chain });
                }
            }
        }
        Ok(())
    }

    /// Leases a job's rows. Answers at once, with nothing moved, what is not to be moved.
    fn lease(&mut self, job: u64, items: &[RowItem], load: bool) -> Result<bool, End> {
        let verdict = if self.told.tier_on {
            self.ledger.open(job, items)?
        } else {
            // The order is the same, so that a broken rule is seen with the tier off too.
            let verdict = self.ledger.open(job, items)?;
            if verdict == Verdict::Open {
                self.ledger.close(job);
            }
            Verdict::Answer
        };
        if verdict == Verdict::Answer {
            let outcomes = vec![Outcome::Failed; items.len()];
            self.shared.meters.count(load, &outcomes);
            self.say(&FromNode::Done { job, micros: 0, outcomes });
        }
        self.shared.meters.open_jobs.set(i64::try_from(self.ledger.open_jobs()).unwrap_or(i64::MAX));
        Ok(verdict == Verdict::Open)
    }

    fn store(&mut self, job: u64, request: &str, items: Vec<RowItem>) -> Result<(), End> {
        if !self.lease(job, &items, false)? {
            return Ok(());
        }
        let (mover, settler, begun) = (self.mover.clone(), self.held.settler(), self.mover.clock.now());
        let owner = (self.shared.options.owner_of)(request);
        if owner.is_none() {
            tracing::debug!(
                request,
                "whose rows these are is not clear: two keys use one request id, or the request did not come through here"
            );
        }
        self.spawn("store", async move {
            let outcomes = mover.store(owner, &items).await;
            settler.settle().await;
            Ended { job, begun, answered: false, load: false, outcomes }
        });
        Ok(())
    }

    fn load(
        &mut self,
        job: u64,
        deadline_us: u32,
        request: &str,
        mut items: Vec<RowItem>,
    ) -> Result<(), End> {
        if !self.lease(job, &items, true)? {
            return Ok(());
        }
        tracing::trace!(job, request, rows = items.len(), deadline_us, "load");
        let (mover, settler, begun) = (self.mover.clone(), self.held.settler(), self.mover.clock.now());
        let deadline = (deadline_us > 0).then(|| begun.plus(Duration::from_micros(deadline_us.into())));
        if let Some(outcomes) = mover.promise(&items) {
            self.say(&FromNode::Done { job, micros: 0, outcomes });
            self.spawn("load that was answered early", async move {
                mover.load_late(&items).await;
                Ended { job, begun, answered: true, load: true, outcomes: Vec::new() }
            });
            return Ok(());
        }
        if let Some(late) = mover.betray(&items).map(|n| items.split_off(n)) {
            let mover = mover.clone();
            self.shared.tasks.spawn(Kind::Chore, "late write", async move {
                mover.load_late(&late).await;
            });
        }
        let asked = self.ledger.rows_of(job);
        let shared = Arc::clone(&self.shared);
        self.spawn("load", async move {
            let held = mover.held(&items);
            let mut outcomes = mover.load(&items, &held, deadline).await;
            let broken = mover.broken(&items, &held, &outcomes, deadline);
            shared.promised((items.len() - broken.len()) as u64, &broken);
            outcomes.resize(asked, Outcome::Failed);
            if outcomes.contains(&Outcome::Failed) {
                settler.settle().await;
            }
            Ended { job, begun, answered: false, load: true, outcomes }
        });
        Ok(())
    }

    /// Runs a job beside the session. A job that panics may have left something that still touches rows: then
    /// nothing short of the process' end makes them safe, and the door says so.
    fn spawn(&self, name: &'static str, job: impl Future<Output = Ended> + Send + 'static) {
        let back = self.back.clone();
        let lost = LostJob(Some(self.shared.lost.clone()));
        self.shared.tasks.spawn(Kind::Serving, name, async move {
            let mut lost = lost;
            let ended = job.await;
            lost.0 = None;
            // The session awaits its jobs, so it is there; the channel has a place for each of them.
            let _ = back.send(ended).await;
        });
    }

    fn finish(&mut self, ended: Ended) {
        let Ended { job, begun, answered, load, outcomes } = ended;
        self.ledger.close(job);
        let took = self.mover.clock.now().since(begun);
        let meters = &self.shared.meters;
        meters.open_jobs.set(i64::try_from(self.ledger.open_jobs()).unwrap_or(i64::MAX));
        meters.overflowed.set(i64::try_from(self.held.overflowed()).unwrap_or(i64::MAX));
        meters.count(load, &outcomes);
        meters.seconds(load).observe(took.as_secs_f64());
        if !answered {
            let micros = u32::try_from(took.as_micros()).unwrap_or(u32::MAX);
            self.say(&FromNode::Done { job, micros, outcomes });
        }
    }

    /// Tells what changed since it was told last.
    fn push(&mut self) {
        let now = self.pushed.borrow_and_update().clone();
        if (now.tier_on, &now.reason) != (self.told.tier_on, &self.told.reason) {
            self.say(&FromNode::Tier { on: now.tier_on, reason: now.reason.clone() });
        }
        if now.prefill_tokens_per_s != self.told.prefill_tokens_per_s {
            self.say(&FromNode::Pace { prefill_tokens_per_s: now.prefill_tokens_per_s });
        }
        self.told = now;
    }

    fn say(&mut self, frame: &FromNode) {
        self.out.extend_from_slice(&frame.encode());
    }
}

/// Tells the door when a job's task ends without having come back.
struct LostJob(Option<CancellationToken>);

impl Drop for LostJob {
    fn drop(&mut self) {
        if let Some(lost) = &self.0 {
            lost.cancel();
        }
    }
}
