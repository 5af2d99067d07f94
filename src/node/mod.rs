//! One node: build order, wiring, drain. The only place that knows everybody.
//!
//! Order of the start: public port bound (a port in use ends the start before anything was touched), store recovered,
//! cluster, door, router, faces. The port answers from the first moment; `/healthz` says what is still missing.
//! [`gate`] opens the engine for clients once the canary has judged it; [`picture`] tells people and the peer how
//! things are. The drain is the reverse, each step with a limit.

mod exact;
mod gate;
mod invite;
mod misses;
mod pace;
mod picture;
mod rails;

use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::api::{self, admin, desk, local, members, open};
use crate::base::clock::{Clock, unix_seconds};
use crate::base::geometry::Hello;
use crate::cluster::{self, Cluster};
use crate::engine;
use crate::meter::Meter;
use crate::observe::alerts::Alerts;
use crate::observe::chains::Chains;
use crate::observe::requests::Ledger;
use crate::observe::state::NodeFile;
use crate::rails::{Sampler, Tree};
use crate::router::{self, Router, Wire};
use crate::settings::{EngineKind, Places, Ports, Settings};
use crate::store::{self, DiskKind, Store};
use crate::tasks::{Kind, Tasks, log_slow};

pub use rails::{nixl, rails_context};

/// Share of the row area that hits may hold at one time, in percent. The rest is for stores: vLLM needs a free row for
/// every block that it writes through, and computes nothing less while it waits for one.
const ROW_BUDGET_PERCENT: u32 = 75;

/// From the word to stop until requests in flight are cut off. The keeper allows fifteen seconds in all.
const DRAIN: Duration = Duration::from_secs(8);
const CLOSE: Duration = Duration::from_secs(4);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("failed to listen on {address}: {source}")]
    Listen { address: String, source: io::Error },
    #[error("failed to listen on {0}: the loopback device is down; bring it up with `ip link set lo up`")]
    Loopback(String),
    #[error("failed to {what} {path}: {source}")]
    File { what: &'static str, path: PathBuf, source: io::Error },
    #[error("the store: {0}")]
    Store(#[from] store::Error),
    #[error("the cluster: {0}")]
    Cluster(#[from] cluster::Error),
    #[error("the engine's door: {0}")]
    Door(#[from] local::Error),
    #[error("API keys: {0}")]
    Keys(#[from] api::KeysError),
    #[error("failed to start: {0}")]
    Runtime(io::Error),
    #[error("a part that others rely on is gone; the log names it")]
    Broken,
}

/// Everything of a node that more than one of its tasks needs.
#[derive(Clone)]
struct Parts {
    settings: Arc<Settings>,
    places: Places,
    ports: Ports,
    generation: u64,
    started_unix: u64,
    needs_key: bool,
    clock: Clock,
    tasks: Tasks,
    store: Store,
    cluster: Cluster,
    rails: Sampler,
    exact: exact::Exact,
    /// What the engine's device holds.
    events: engine::events::Events,
    door: local::Door,
    router: Router,
    engine: tokio::sync::watch::Receiver<engine::View>,
    judged: tokio::sync::watch::Receiver<gate::Judged>,
    ledger: Arc<Mutex<Ledger>>,
    chains: Arc<Mutex<Chains>>,
    alerts: Arc<Mutex<Alerts>>,
}

/// Runs a node until a signal ends it. Starts a runtime of its own: not to be called within one.
///
/// # Errors
/// What kept it from starting, or [`Error::Broken`] when it cannot go on: the keeper then starts another.
pub fn run(settings: Settings, places: Places) -> Result<(), Error> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(Error::Runtime)?;
    let outcome = runtime.block_on(start_and_serve(settings, places));
    runtime.shutdown_timeout(Duration::from_secs(1));
    outcome
}

async fn start_and_serve(settings: Settings, places: Places) -> Result<(), Error> {
    let (tasks, meter, clock) = (Tasks::new(), Meter::new(), Clock::real());
    let listener = listen(&settings).await?;
    let generation = engine::generation::next(&places.state.join("node-generation")).map_err(|source| {
        Error::File { what: "count up", path: places.state.join("node-generation"), source }
    })?;
    let store = recover(&settings, &places, &clock, &meter).await?;
    let rounds = store::Rounds {
        wear_file: places.store_wear(),
        scrub_file: places.store_scrub(),
        scrub_days: settings.store.scrub_days,
        write_budget: settings.store.write_budget.0,
    };
    store.begin_rounds(rounds, &tasks);
    let ports = Ports::of(&settings.listen);
    let cluster = Cluster::start(
        cluster::Options {
            name: settings.node.name.clone(),
            identity: places.identity(),
            control: format!("{}:{}", settings.cluster.address, ports.control),
            data: settings.cluster.data_addresses(ports.data),
            rails: settings.cluster.rails.clone(),
            carrier: cluster::Carrier { wanted: settings.cluster.fabric, found: nixl(&settings) },
            seen_as: cluster::SeenAs::default(),
            join: Some(settings.cluster.join.clone()).filter(|token| !token.is_empty()),
            silence: Duration::from_secs(settings.cluster.silence_s.into()),
            serve_memory: settings.cluster.serve_memory,
            sharing: cluster::Sharing {
                copy: settings.cluster.copy,
                take_over: settings.cluster.take_over,
                rate: settings.cluster.copy_rate,
                share: settings.cluster.copy_share,
            },
            generation,
        },
        store.clone(),
        clock.clone(),
        &tasks,
        &meter,
    )
    .await?;
    let rails = watch_rails(&settings, &cluster, &clock, &tasks, &meter).await;
    let view = engine::watch_view(places.engine_view(), &tasks);
    let router = Router::new(
        router::Options {
            name: settings.node.name.clone(),
            share: settings.router.share,
            strategy: settings.router.strategy,
            idle: Duration::from_secs(settings.router.idle_timeout_s.into()),
            max_requests: settings.listen.max_requests,
            admission: admission(&settings),
            dial: dial(cluster.clone()),
        },
        clock.clone(),
        &meter,
    );
    let keys = match settings.listen.api_keys_file.as_os_str().is_empty() {
        true => api::Keys::none(),
        false => api::Keys::read(&settings.listen.api_keys_file)?,
    };
    let local_key = hex::encode(rand::random::<[u8; 16]>());
    let keys = keys.with_local(&local_key);
    let door = local::Door::start(
        places.engine_socket(),
        store.clone(),
        cluster.clone(),
        local::Options {
            generation,
            fingerprint: fingerprint(),
            owner_of: owner_of(router.clone(), keys.required()),
            prefill_tokens_per_s: settings.engine.prefill_tokens_per_s,
            row_budget_percent: ROW_BUDGET_PERCENT,
            // Until the gate has a verdict, also for whoever uses the engine's own port.
            tier_on: false,
        },
        clock.clone(),
        &tasks,
        &meter,
    )
    .await?;
    let (judge, judged) = tokio::sync::watch::channel(gate::Judged::default());
    let (exact, checks) = exact::Exact::new(&meter, &clock, &tasks, settings.engine.prefill_tokens_per_s);
    router.foresee_with(exact.foresee());
    let events = engine::events::Events::new(&meter);
    if settings.engine.kind != EngineKind::Attached {
        let endpoints = engine::events::Endpoints::of_files(&places.engine_events(), &places.engine_replay());
        events.follow(endpoints, view.clone(), &tasks);
    }
    let parts = Parts {
        exact,
        events,
        needs_key: keys.required(),
        settings: Arc::new(settings),
        places,
        ports,
        generation,
        started_unix: unix_seconds(),
        clock,
        tasks: tasks.clone(),
        store,
        cluster,
        rails,
        door,
        router: router.clone(),
        engine: view,
        judged,
        ledger: Arc::default(),
        chains: Arc::default(),
        alerts: Arc::default(),
    };
    let limits = open::Limits {
        max_body: parts.settings.listen.max_body,
        drop_billing_line: parts.settings.router.drop_billing_line,
        aliases: parts.settings.router.aliases.clone(),
    };
    let open = open::Open::new(router, keys, limits);
    let (store, cluster) = (parts.store.clone(), parts.cluster.clone());
    let desk = desk::Desk::new(store, cluster, Arc::clone(&parts.chains), tasks.clone());
    let asked = parts.clone();
    let desk = desk.with_rails(Arc::new(move |transfer| rails::report(asked.clone(), transfer).boxed()));
    let orders =
        desk.routes(&local_key).merge(members::Members::new(parts.cluster.clone()).routes(&local_key));
    tasks.spawn(Kind::Owner, "tokens", exact::run(parts.clone(), checks));
    serve(&parts, judge, open, listener, meter, orders)?;
    say_where(&parts, local_key)?;
    wait_and_drain(&parts).await
}

/// What the engine gets at once. Of an engine that somebody else starts it is not known what it can take.
fn admission(settings: &Settings) -> router::Admission {
    let places = match (settings.router.places, settings.engine.kind) {
        (0, EngineKind::Attached) => 0,
        (0, _) => settings.engine.max_num_seqs,
        (places, _) => places,
    };
    router::Admission { places, queue: settings.router.queue }
}

/// Finds at the start what would fail at the first transfer, and watches from then on.
async fn watch_rails(
    settings: &Settings,
    cluster: &Cluster,
    clock: &Clock,
    tasks: &Tasks,
    meter: &Meter,
) -> Sampler {
    let context = rails_context(settings);
    let (cluster, own) = (cluster.clone(), context.data.clone());
    // What two nodes on one machine tell each other crosses no cable.
    let here = move |address: &str| address.parse::<SocketAddr>().is_ok_and(|at| own.contains(&at.ip()));
    let moved = move || {
        let at_home = cluster.members().iter().any(|member| here(&member.address));
        if at_home { 0 } else { cluster.moved_bytes() }
    };
    Sampler::start(Tree::machine(), context, moved, clock.clone(), tasks, meter).await
}

async fn listen(settings: &Settings) -> Result<TcpListener, Error> {
    let address = format!("{}:{}", settings.listen.address, settings.listen.port);
    let loopback = settings.listen.address.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback());
    TcpListener::bind(&address).await.map_err(|source| match source.kind() {
        // Every machine has its loopback addresses, unless the device is down, as in a fresh network namespace.
        io::ErrorKind::AddrNotAvailable if loopback => Error::Loopback(address),
        _ => Error::Listen { address, source },
    })
}

async fn recover(settings: &Settings, places: &Places, clock: &Clock, meter: &Meter) -> Result<Store, Error> {
    let options = store::Options {
        folder: places.segments(),
        capacity: settings.store.capacity,
        segment: settings.store.segment,
        io: settings.store.io,
        queue_depth: settings.store.queue_depth,
    };
    let (clock, meter) = (clock.clone(), meter.clone());
    let sealing = store::Sealing { keys: Some(places.store_keys()), encrypt: settings.store.encrypt };
    let opening = tokio::task::spawn_blocking(move || {
        Store::open_sealed(options, &sealing, DiskKind::Real, clock, &meter)
    });
    let opened = log_slow("the store to read its segments", Duration::from_secs(5), opening).await;
    let (store, opened) = opened.map_err(|join| Error::Runtime(io::Error::other(join)))??;
    store.set_ttl_days(settings.store.ttl_days);
    let encrypts = store.encrypts();
    tracing::info!(
        segments = opened.segments,
        rows = opened.rows,
        damaged = opened.damaged,
        io = %opened.io,
        encrypts,
        "store"
    );
    for note in &opened.notes {
        tracing::warn!(note, "store");
    }
    Ok(store)
}

/// The namespace of an engine's rows. Reads some megabytes of the weights, on a thread that may block.
fn fingerprint() -> local::Fingerprint {
    Arc::new(|hello: Hello| {
        async move {
            let model = PathBuf::from(&hello.model);
            let work = tokio::task::spawn_blocking(move || engine::fingerprint(&model, &hello));
            match work.await {
                Ok(named) => named.map_err(|error| error.to_string()),
                Err(join) => Err(join.to_string()),
            }
        }
        .boxed()
    })
}

/// Whose rows the engine stores: the router has seen the request's key. Where nobody needs a key all rows are of one
/// owner without a name, as are those of this node's own prompts.
fn owner_of(router: Router, needs_key: bool) -> local::OwnerOf {
    Arc::new(move |request: &str| {
        let is_nobodys = || !needs_key || engine::is_own_request(request);
        router.owner_of(request).or_else(|| is_nobodys().then(|| "".into()))
    })
}

/// How the router reaches the engine of another node: over the cluster's encrypted streams.
fn dial(cluster: Cluster) -> router::Dial {
    Arc::new(move |peer: String| {
        let cluster = cluster.clone();
        async move {
            let stream: Box<dyn Wire> = Box::new(cluster.dial(&peer).await?);
            Ok(stream)
        }
        .boxed()
    })
}

/// Starts what answers and what decides.
fn serve(
    parts: &Parts,
    judge: tokio::sync::watch::Sender<gate::Judged>,
    open: open::Open,
    listener: TcpListener,
    meter: Meter,
    orders: axum::Router,
) -> Result<(), Error> {
    let tasks = &parts.tasks;
    tasks.spawn(Kind::Owner, "gate", gate::run(parts.clone(), judge));
    let misses = misses::Misses::new(&meter);
    tasks.spawn(Kind::Owner, "ledger", picture::keep_ledger(parts.clone(), misses));
    let pulse = picture::watch_pulse(parts);
    let painted = picture::paint(parts, pulse.clone());
    tasks.spawn(Kind::Chore, "invitation", invite::keep(parts.clone()));
    let health_of = (parts.clone(), pulse);
    let faces = admin::routes(admin::Admin {
        meter,
        picture: painted,
        health: Arc::new(move || picture::health(&health_of.0, &health_of.1.borrow())),
        ledger: Arc::clone(&parts.ledger),
        alerts: Arc::clone(&parts.alerts),
        stopping: tasks.stopping(),
    });
    if let Some(relays) = parts.cluster.relays() {
        tasks.spawn(Kind::Owner, "relays", api::serve_relays(relays, open.clone(), tasks.clone()));
    }
    let app = api::assemble(&open, faces.merge(orders));
    tasks.spawn(Kind::Owner, "public port", api::serve(listener, app, tasks.clone()));
    Ok(())
}

/// Where clients reach this node. An IPv6 address stands in brackets.
fn public_url(parts: &Parts) -> String {
    let (address, port) = (&parts.settings.listen.address, parts.ports.public);
    match address.parse::<std::net::IpAddr>() {
        Ok(ip) => format!("http://{}", SocketAddr::new(ip, port)),
        Err(_) => format!("http://{address}:{port}"),
    }
}

/// Leaves a note for `spark-kv status`, and a line in the log.
fn say_where(parts: &Parts, key: String) -> Result<(), Error> {
    let url = public_url(parts);
    let name = parts.settings.node.name.clone();
    tracing::info!(%url, name, generation = parts.generation, "the node answers");
    let file = NodeFile { url, pid: std::process::id(), name, started_unix: parts.started_unix, key };
    let path = parts.places.node_file();
    let text = serde_json::to_vec_pretty(&file).expect("plain data has a JSON form");
    write_whole(&path, &text).map_err(|source| Error::File { what: "write", path, source })
}

/// Writes a file readable by its owner only, whole or not at all.
fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let beside = path.with_extension("new");
    let mut file =
        std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
    file.write_all(bytes)?;
    std::fs::rename(&beside, path)
}

async fn wait_and_drain(parts: &Parts) -> Result<(), Error> {
    let mut term = signal(SignalKind::terminate()).map_err(Error::Runtime)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(Error::Runtime)?;
    let failed = parts.tasks.failed();
    let broken = tokio::select! {
        _ = term.recv() => false,
        _ = interrupt.recv() => false,
        () = failed.cancelled() => true,
    };
    tracing::info!(broken, in_flight = parts.router.in_flight(), "draining");
    parts.router.drain();
    if !broken {
        let drained = parts.router.idle(DRAIN);
        let left = tokio::select! {
            left = drained => left,
            _ = term.recv() => parts.router.in_flight(),
        };
        if left > 0 {
            tracing::warn!(left, "requests are cut off");
        }
    }
    let left = parts.tasks.stop(CLOSE).await;
    if left > 0 {
        tracing::warn!(left, "tasks did not end in time");
    }
    if tokio::time::timeout(CLOSE, parts.store.close()).await.is_err() {
        tracing::warn!("the store did not close in time; its open segment is read again at the next start");
    }
    let _ = std::fs::remove_file(parts.places.node_file());
    if broken { Err(Error::Broken) } else { Ok(()) }
}
