//! What a router adds to a request: this program's, and others beside it, against the same backend in the same run.
//!
//! Each is a process of its own between a client and a backend that answers at once. Every request is sent on the
//! direct path and through each router, one right after the other, and only what differs within a round counts.
//! Sessions of a coding agent grow turn by turn; that their tokens are made before a request is placed is part of
//! what is measured. The backend's tokens are this program's own: what is proved at the start is only that proving
//! works.

mod figures;
pub(super) mod guest;
mod model;
pub(super) mod session;
pub(super) mod wire;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use self::figures::{Added, Rounds};
use self::guest::Guest;
use self::session::Session;
use self::wire::{Client, Served};
use super::place::Place;
use crate::router::Endpoint;
use crate::router::tokens::{Options as Speech, Speaker};
use crate::tasks::Tasks;

/// Bytes of a small body: one question.
const SMALL: usize = 785;
/// Small requests of one round and path.
const SMALL_SAMPLES: usize = 300;
/// Connections that ask at once.
const CONNECTIONS: usize = 32;
/// Tokens that all sessions have in common at their beginning.
const SYSTEM: usize = 8_000;
/// Tokens by which sessions grow when the length of the tail is looked at.
const TAILS: [usize; 5] = [100, 350, 700, 1400, 2800];

const CHAT: &str = "/v1/chat/completions";

/// What is measured.
#[derive(Clone, Debug)]
pub struct RouterOptions {
    pub rounds: usize,
    pub sessions: usize,
    /// Tokens of a session at its beginning, and of a turn.
    pub tokens: usize,
    pub turn: usize,
    /// How long the many small requests last, in each round.
    pub flood: Duration,
    /// Folder with a tokenizer and a chat template. None: one is made.
    pub model: Option<PathBuf>,
    /// Other routers: name and command.
    pub peers: Vec<(String, String)>,
    /// This program.
    pub program: PathBuf,
    /// Where the run's own folder is made.
    pub folder: PathBuf,
}

#[derive(Debug, thiserror::Error)]
pub enum RouterError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Guest(String),
    #[error("the model: {0}")]
    Model(String),
    #[error("interrupted")]
    Interrupted,
}

/// One router, in microseconds beyond the direct path.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RouterFigures {
    pub small_p50_us: f64,
    pub small_p99_us: f64,
    pub big_p50_us: f64,
    pub big_p99_us: f64,
    pub small_rps: f64,
    /// Anonymous memory at the end and before the first session.
    pub rss_mb: f64,
    pub rss_start_mb: f64,
    /// Sessions that were never seen before.
    pub cold_p50_us: f64,
    pub tails: Vec<Tail>,
}

/// What a turn of this many tokens costs.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Tail {
    pub tokens: usize,
    pub p50_us: f64,
    pub p99_us: f64,
}

/// The whole run.
#[derive(Clone, Debug, Serialize)]
pub struct RouterReport {
    #[serde(flatten)]
    pub ours: RouterFigures,
    pub peers: BTreeMap<String, RouterFigures>,
    /// The direct path itself, in microseconds and requests a second.
    pub direct_small_us: f64,
    pub direct_big_us: f64,
    pub direct_small_rps: f64,
    /// The slowest round's median of small requests on the direct path over the fastest one's: 1 on a quiet machine.
    pub noise: f64,
    /// A session's tokens and bytes, as it was at its beginning.
    pub prompt_tokens: usize,
    pub body_bytes: usize,
}

/// One path: the direct one first, then ours, then the others.
#[derive(Debug)]
struct Way {
    address: SocketAddr,
    client: Client,
    small: Rounds,
    big: Rounds,
    cold: Rounds,
    tails: Vec<Rounds>,
    rps: Vec<f64>,
    rss_start_mb: f64,
}

impl Way {
    async fn open(address: SocketAddr) -> io::Result<Self> {
        let client = Client::connect(address).await?;
        let (small, big, cold) = (Rounds::default(), Rounds::default(), Rounds::default());
        let tails = vec![Rounds::default(); TAILS.len()];
        Ok(Self { address, client, small, big, cold, tails, rps: Vec::new(), rss_start_mb: 0.0 })
    }

    /// Microseconds of one request.
    async fn ask(&mut self, request: &[u8]) -> io::Result<f64> {
        let begin = Instant::now();
        self.client.ask(request).await?;
        Ok(begin.elapsed().as_secs_f64() * 1e6)
    }

    fn figures(&self, direct: &Self, rss_mb: f64) -> RouterFigures {
        let (small, big) = (self.small.added(&direct.small), self.big.added(&direct.big));
        let tail = |(tokens, (ours, theirs)): (&usize, (&Rounds, &Rounds))| {
            let Added { p50_us, p99_us } = ours.added(theirs);
            Tail { tokens: *tokens, p50_us, p99_us }
        };
        RouterFigures {
            small_p50_us: small.p50_us,
            small_p99_us: small.p99_us,
            big_p50_us: big.p50_us,
            big_p99_us: big.p99_us,
            small_rps: figures::Latencies::of(self.rps.clone()).at(0.5),
            rss_mb,
            rss_start_mb: self.rss_start_mb,
            cold_p50_us: self.cold.added(&direct.cold).p50_us,
            tails: TAILS.iter().zip(self.tails.iter().zip(&direct.tails)).map(tail).collect(),
        }
    }
}

/// What is sent, and how it grows.
struct Traffic {
    model: String,
    /// Requests as they go over the wire.
    small: Vec<u8>,
    sessions: Vec<Session>,
    bytes_per_token: f64,
    prompt_tokens: usize,
    body_bytes: usize,
}

impl Traffic {
    fn new(options: &RouterOptions, model: &str, speaker: &Speaker) -> Result<Self, RouterError> {
        let told = |error: crate::router::tokens::Unsure| RouterError::Model(error.to_string());
        let count = |session: &Session| {
            speaker.prompt(Endpoint::Chat, &session.body(model)).map(|prompt| prompt.ids.len()).map_err(told)
        };
        let sample = session::Words::new(0).text(1 << 16);
        let mut probe = Session::new(0, &sample);
        probe.grow(16);
        let bytes_per_token = sample.len() as f64 / count(&probe)? as f64;
        let bytes = |tokens: usize| (tokens as f64 * bytes_per_token) as usize;
        let system = session::Words::new(1).text(bytes(SYSTEM.min(options.tokens / 2)));
        let sessions: Vec<Session> = (0..options.sessions as u64)
            .map(|seed| {
                let mut session = Session::new(seed, &system);
                let mut left = bytes(options.tokens).saturating_sub(system.len());
                while left > 0 {
                    let now = left.min(bytes(options.turn));
                    session.grow(now);
                    left -= now;
                }
                session
            })
            .collect();
        let first = sessions.first().cloned().unwrap_or_else(|| Session::new(0, ""));
        Ok(Self {
            small: wire::request(CHAT, &session::small(model, SMALL)),
            prompt_tokens: count(&first)?,
            body_bytes: first.body(model).len(),
            model: model.to_owned(),
            sessions,
            bytes_per_token,
        })
    }

    /// Session `n` as it stands after another turn of `tokens` tokens; 0 leaves it as it is.
    fn turn(&mut self, n: usize, tokens: usize) -> Vec<u8> {
        let bytes = (tokens as f64 * self.bytes_per_token) as usize;
        let session = &mut self.sessions[n];
        if bytes > 0 {
            session.grow(bytes);
        }
        wire::request(CHAT, &session.body(&self.model))
    }
}

/// Measures. `say` is told how it goes.
///
/// # Errors
/// When a router does not serve, or `stop` comes.
pub async fn run(
    options: &RouterOptions,
    stop: &CancellationToken,
    say: &dyn Fn(&str),
) -> Result<RouterReport, RouterError> {
    let work = Box::pin(measure(options, say));
    stop.run_until_cancelled(work).await.unwrap_or(Err(RouterError::Interrupted))
}

async fn measure(options: &RouterOptions, say: &dyn Fn(&str)) -> Result<RouterReport, RouterError> {
    let place = Place::under(&options.folder)?;
    let folder = match &options.model {
        Some(folder) => folder.clone(),
        None => {
            say("a tokenizer is made");
            let folder = place.path().join("model");
            std::fs::create_dir(&folder)?;
            model::make(&folder).map_err(RouterError::Model)?;
            folder
        }
    };
    let speak = || {
        let options = Speech { model: folder.clone(), ..Speech::default() };
        Speaker::load(options, 1 << 20, Arc::new(|_| None)).map_err(|e| RouterError::Model(e.to_string()))
    };
    let mut traffic = Traffic::new(options, "m", &speak()?)?;
    let tasks = Tasks::new();
    let served = Arc::new(Served { model: traffic.model.clone(), speaker: speak()? });
    let backends = [wire::backend(Arc::clone(&served), &tasks).await?, wire::backend(served, &tasks).await?];
    let mut guests = start(options, place.path(), &backends, &folder, &traffic, say).await?;
    let outcome = paths(options, &backends, &mut guests, &mut traffic, say).await;
    for guest in guests {
        guest.end().await;
    }
    tasks.stop(Duration::from_secs(1)).await;
    outcome
}

async fn start(
    options: &RouterOptions,
    root: &Path,
    backends: &[SocketAddr],
    model: &Path,
    traffic: &Traffic,
    say: &dyn Fn(&str),
) -> Result<Vec<Guest>, RouterError> {
    let ours = root.join("node");
    std::fs::create_dir(&ours)?;
    let ours = Guest::ours(&options.program, &ours, backends[0], model, &traffic.model).await;
    let mut guests = vec![ours.map_err(RouterError::Guest)?];
    for (name, line) in &options.peers {
        guests.push(Guest::other(name, line, root, backends).await.map_err(RouterError::Guest)?);
    }
    for guest in &mut guests {
        say(&format!("{} starts", guest.name));
        guest.ready(&traffic.small).await.map_err(RouterError::Guest)?;
    }
    Ok(guests)
}

async fn paths(
    options: &RouterOptions,
    backends: &[SocketAddr],
    guests: &mut [Guest],
    traffic: &mut Traffic,
    say: &dyn Fn(&str),
) -> Result<RouterReport, RouterError> {
    let mut ways = vec![Way::open(backends[0]).await?];
    for guest in guests.iter() {
        let mut way = Way::open(guest.address).await?;
        // Connections and threads are there before memory is looked at.
        for _ in 0..SMALL_SAMPLES {
            way.ask(&traffic.small).await?;
        }
        way.rss_start_mb = guest.memory_mb();
        ways.push(way);
    }
    say(&format!("{} sessions of {} tokens", options.sessions, traffic.prompt_tokens));
    ways.iter_mut().for_each(|way| way.cold.begin());
    for n in 0..options.sessions {
        let request = traffic.turn(n, 0);
        for way in &mut ways {
            let us = way.ask(&request).await?;
            way.cold.add(us);
        }
    }
    for round in 1..=options.rounds {
        say(&format!("round {round} of {}", options.rounds));
        self::round(options, &mut ways, traffic).await?;
    }
    say("tails by their length");
    for (at, tokens) in TAILS.into_iter().enumerate() {
        ways.iter_mut().for_each(|way| way.tails[at].begin());
        for n in (at..options.sessions).step_by(2) {
            let request = traffic.turn(n, tokens);
            for way in &mut ways {
                let us = way.ask(&request).await?;
                way.tails[at].add(us);
            }
        }
    }
    Ok(report(&ways, guests, traffic))
}

async fn round(options: &RouterOptions, ways: &mut [Way], traffic: &mut Traffic) -> io::Result<()> {
    for way in ways.iter_mut() {
        way.small.begin();
        way.big.begin();
    }
    for _ in 0..SMALL_SAMPLES {
        for way in ways.iter_mut() {
            let us = way.ask(&traffic.small).await?;
            way.small.add(us);
        }
    }
    for n in 0..options.sessions {
        let request = traffic.turn(n, options.turn);
        for way in ways.iter_mut() {
            let us = way.ask(&request).await?;
            way.big.add(us);
        }
    }
    for way in ways.iter_mut() {
        let rps = flood(way.address, &traffic.small, options.flood).await?;
        way.rps.push(rps);
        // What was kept open may have been closed meanwhile.
        way.client = Client::connect(way.address).await?;
    }
    Ok(())
}

/// Requests a second over many connections.
async fn flood(to: SocketAddr, request: &[u8], how_long: Duration) -> io::Result<f64> {
    let mut clients = Vec::with_capacity(CONNECTIONS);
    for _ in 0..CONNECTIONS {
        clients.push(Client::connect(to).await?);
    }
    let begin = Instant::now();
    let asking = clients.into_iter().map(|mut client| async move {
        let mut count = 0_u64;
        while begin.elapsed() < how_long {
            client.ask(request).await?;
            count += 1;
        }
        Ok(count)
    });
    let counts: io::Result<Vec<u64>> = join_all(asking).await.into_iter().collect();
    Ok(counts?.into_iter().sum::<u64>() as f64 / begin.elapsed().as_secs_f64())
}

fn report(ways: &[Way], guests: &[Guest], traffic: &Traffic) -> RouterReport {
    let (direct, routed) = (&ways[0], &ways[1..]);
    let of = |(way, guest): (&Way, &Guest)| (guest.name.clone(), way.figures(direct, guest.memory_mb()));
    let mut all: Vec<(String, RouterFigures)> = routed.iter().zip(guests).map(of).collect();
    let (_, ours) = all.remove(0);
    let medians = figures::Latencies::of(direct.small.medians());
    RouterReport {
        ours,
        peers: all.into_iter().collect(),
        direct_small_us: direct.small.all().at(0.5),
        direct_big_us: direct.big.all().at(0.5),
        direct_small_rps: figures::Latencies::of(direct.rps.clone()).at(0.5),
        noise: medians.at(1.0) / medians.at(0.0).max(f64::MIN_POSITIVE),
        prompt_tokens: traffic.prompt_tokens,
        body_bytes: traffic.body_bytes,
    }
}
