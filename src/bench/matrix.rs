//! Routers beside each other under the load of coding agents: each gets two fresh engines, the same sessions, and as
//! long as it needs.
//!
//! The engines are mock engines of one profile, processes of their own, whose clock runs faster than a box's; times in the
//! report are the box's. This program stands there with each of its strategies, with the engines as attached ones
//! (`device`: it knows no more of them than another router), and as on a box (`tiers`: engine, store and index of two
//! connected nodes). Others stand beside it by their command. Everything is repeated over seeds, and only runs of one
//! seed are compared.

mod client;
mod workload;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde::Serialize;
use tokio::process::{Child, Command};
use tokio_util::sync::CancellationToken;

use self::client::{Crowd, Seen};
use self::workload::{Session, Sizes};
use super::place::Place;
use super::router::RouterError;
use super::router::guest::{Guest, Node, free};

/// Bytes of a row in cells with tiers: small, because two drives are one here. What loading costs on a box is not
/// among what is measured.
const ROW_BYTES: u32 = 4096;

/// Tokens of a long prompt in one step beside others, where the engine is the node's own. Others' engines have their
/// default: the whole step.
const LONG_PREFILL: u32 = 256;

/// What is compared.
#[derive(Clone, Debug)]
pub struct MatrixOptions {
    pub seeds: u64,
    pub sessions: usize,
    pub turns: usize,
    /// Times that engines and clients are faster than a box.
    pub clock: f64,
    /// Tokens of one cold prompt that comes in the middle. 0: none.
    pub cold: usize,
    pub strategies: Vec<String>,
    /// Also with both nodes' drives and the link between them.
    pub tiers: bool,
    /// Other routers: name and command.
    pub peers: Vec<(String, String)>,
    /// Tokens of a text, as the engines count them.
    pub count: fn(&str) -> usize,
    /// This program.
    pub program: PathBuf,
    /// Where the run's own folder is made.
    pub folder: PathBuf,
}

/// One router over one seed, in seconds of the box's time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Cell {
    pub makespan_s: f64,
    /// Mean over requests, until the last byte.
    pub latency_s: f64,
    pub ttft_mean_s: f64,
    pub ttft_p50_s: f64,
    pub ttft_p99_s: f64,
    /// Of the prompts' tokens.
    pub cached_share: f64,
    /// Between two words of a stream, while the cold prompt was there; of the whole run without one.
    pub gap_p99_s: f64,
    pub cold_ttft_s: f64,
    pub requests: usize,
    pub errors: usize,
}

/// One router over all seeds.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Contender {
    pub name: String,
    pub mean: Cell,
    pub seeds: Vec<Cell>,
    /// Against `cost` of the same kind of cell, seed by seed, means: above 1 it is slower.
    pub makespan_ratio: f64,
    pub latency_ratio: f64,
    pub gap_ratio: f64,
}

/// The whole run, by kind of cell: `device`, `tiers`.
#[derive(Clone, Debug, Default, Serialize)]
pub struct MatrixReport {
    pub cells: BTreeMap<String, Vec<Contender>>,
    pub clock: f64,
    pub sessions: usize,
    pub turns: usize,
    pub cold_tokens: usize,
    /// First words of errors, if there were any.
    pub errors: Vec<String>,
}

/// A router and how it meets its engines.
#[derive(Clone, Debug)]
enum Who {
    Ours { strategy: String, tiers: bool },
    Other { name: String, line: String },
}

impl Who {
    fn kind(&self) -> &'static str {
        match self {
            Self::Ours { tiers: true, .. } => "tiers",
            Self::Ours { .. } | Self::Other { .. } => "device",
        }
    }

    fn name(&self) -> &str {
        match self {
            Self::Ours { strategy, .. } => strategy,
            Self::Other { name, .. } => name,
        }
    }
}

/// Measures. `say` is told how it goes.
///
/// # Errors
/// When a router does not serve, or `stop` comes.
pub async fn run(
    options: &MatrixOptions,
    stop: &CancellationToken,
    say: &dyn Fn(&str),
) -> Result<MatrixReport, RouterError> {
    let work = Box::pin(measure(options, say));
    stop.run_until_cancelled(work).await.unwrap_or(Err(RouterError::Interrupted))
}

async fn measure(options: &MatrixOptions, say: &dyn Fn(&str)) -> Result<MatrixReport, RouterError> {
    let place = Place::under(&options.folder)?;
    let all = contenders(options);
    let mut cells: Vec<Vec<Cell>> = vec![Vec::new(); all.len()];
    let mut errors = Vec::new();
    for seed in 1..=options.seeds {
        for (who, cells) in all.iter().zip(&mut cells) {
            let root = place.path().join(format!("{}-{}-{seed}", who.kind(), who.name()));
            std::fs::create_dir(&root)?;
            let rig = Rig::start(options, who, &root).await.map_err(RouterError::Guest)?;
            let (seen, makespan) = ask(options, seed, rig.address).await;
            rig.end().await;
            std::fs::remove_dir_all(&root)?;
            let cell = Cell::of(&seen, makespan);
            say(&format!(
                "seed {seed}: {} {:14} {:6.0} s, latency {:6.2} s, TTFT p50 {:5.2} p99 {:6.2} s, {:4.1} % cached, gap p99 {:5.2} s, {} errors",
                who.kind(),
                who.name(),
                cell.makespan_s,
                cell.latency_s,
                cell.ttft_p50_s,
                cell.ttft_p99_s,
                cell.cached_share * 100.0,
                cell.gap_p99_s,
                cell.errors
            ));
            errors.extend(seen.errors.iter().take(3).map(|why| format!("{}: {why}", who.name())));
            cells.push(cell);
        }
    }
    errors.truncate(20);
    let (clock, sessions, turns) = (options.clock, options.sessions, options.turns);
    let cells = compared(&all, &cells);
    Ok(MatrixReport { cells, clock, sessions, turns, cold_tokens: options.cold, errors })
}

fn contenders(options: &MatrixOptions) -> Vec<Who> {
    let ours = |tiers| {
        options.strategies.iter().map(move |strategy| Who::Ours { strategy: strategy.clone(), tiers })
    };
    let others =
        options.peers.iter().map(|(name, line)| Who::Other { name: name.clone(), line: line.clone() });
    let tiers = options.tiers.then(|| ours(true)).into_iter().flatten();
    ours(false).chain(others).chain(tiers).collect()
}

async fn ask(options: &MatrixOptions, seed: u64, to: SocketAddr) -> (Seen, f64) {
    let sample = super::router::session::Words::new(0).text(1 << 16);
    let bytes_per_token = sample.len() as f64 / (options.count)(&sample).max(1) as f64;
    let MatrixOptions { sessions, turns, .. } = *options;
    let sizes = Sizes { turns, system: 8000, compact: 48_000, bytes_per_token };
    let all = (0..sessions).map(|number| Session::new(seed, number, sizes)).collect();
    // All sessions have come by then.
    let cold = (options.cold > 0).then(|| (75.0, workload::cold(&sizes, seed, options.cold)));
    Crowd::new(to, options.clock).run(all, cold).await
}

/// Two engines and a router before them.
struct Rig {
    address: SocketAddr,
    engines: Vec<Child>,
    guests: Vec<Guest>,
}

impl Rig {
    async fn start(options: &MatrixOptions, who: &Who, root: &Path) -> Result<Self, String> {
        let mut rig =
            Self { address: SocketAddr::from(([127, 0, 0, 1], 0)), engines: Vec::new(), guests: Vec::new() };
        match who {
            Who::Ours { strategy, tiers: true } => {
                let shape = format!("{{\"rows\": 1024, \"row_bytes\": {ROW_BYTES}}}");
                let args = ["--profile", "plain", "--clock", &options.clock.to_string(), "--shape", &shape]
                    .map(|word| serde_json::Value::from(word).to_string());
                let settings = [
                    ("engine.kind", "mock".to_owned()),
                    ("engine.extra_args", format!("[{}]", args.join(", "))),
                ];
                rig.nodes(options, strategy, root, |_| settings.clone()).await?;
            }
            Who::Ours { strategy, tiers: false } => {
                let backends = rig.engines(options, root).await?;
                let of = |n: usize| {
                    [
                        ("engine.kind", "attached".to_owned()),
                        ("engine.url", format!("http://{}", backends[n].0)),
                    ]
                };
                rig.nodes(options, strategy, root, of).await?;
            }
            Who::Other { name, line } => {
                let backends = rig.engines(options, root).await?;
                let mut line = line.clone();
                for (n, (backend, events)) in backends.iter().enumerate() {
                    line = line.replace(&format!("{{backend{n}}}"), &format!("http://{backend}"));
                    line = line.replace(&format!("{{events{n}}}"), &format!("tcp://{events}"));
                }
                let backends: Vec<SocketAddr> = backends.iter().map(|(backend, _)| *backend).collect();
                let guest = Guest::other(name, &line, root, &backends).await?;
                rig.guests.push(guest);
            }
        }
        let first = rig.guests.first_mut().ok_or("nobody routes")?;
        rig.address = first.address;
        let body = serde_json::json!({"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1});
        let request = super::router::wire::request("/v1/chat/completions", body.to_string().as_bytes());
        first.ready(&request).await?;
        Ok(rig)
    }

    /// Two connected nodes.
    async fn nodes(
        &mut self,
        options: &MatrixOptions,
        strategy: &str,
        root: &Path,
        engine: impl Fn(usize) -> [(&'static str, String); 2],
    ) -> Result<(), String> {
        let mut invite = None;
        for (n, name) in ["a", "b"].into_iter().enumerate() {
            let mut settings = vec![
                ("engine.served_name", "mock".to_owned()),
                ("engine.canary", "false".to_owned()),
                ("engine.max_model_len", "262144".to_owned()),
                ("engine.prefill_tokens_per_s", format!("{}", (1700.0 * options.clock) as u64)),
                ("store.capacity", "4GiB".to_owned()),
                ("store.segment", "64MiB".to_owned()),
                ("router.strategy", strategy.to_owned()),
                ("engine.long_prefill_token_threshold", LONG_PREFILL.to_string()),
            ];
            settings.extend(engine(n));
            let folder = root.join(name);
            std::fs::create_dir(&folder).map_err(|error| error.to_string())?;
            let node = Node { name, root: &folder, settings: &settings, invite: invite.as_deref() };
            let mut guest = Guest::node(&options.program, &node)?;
            guest.serves().await?;
            invite = Some(guest.invite().await?);
            self.guests.push(guest);
        }
        for guest in &mut self.guests {
            guest.has_peer().await?;
        }
        Ok(())
    }

    /// Engines of their own: where each serves, and where it publishes.
    async fn engines(
        &mut self,
        options: &MatrixOptions,
        root: &Path,
    ) -> Result<Vec<(SocketAddr, SocketAddr)>, String> {
        let mut all = Vec::new();
        for n in 0..2 {
            let port = free(3)?;
            let at = |offset: u16| SocketAddr::from(([127, 0, 0, 1], port + offset));
            let events = serde_json::json!({
                "enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv",
                "endpoint": format!("tcp://{}", at(1)), "replay_endpoint": format!("tcp://{}", at(2)),
            });
            let told = |error: std::io::Error| format!("engine {n}: {error}");
            let log = std::fs::File::create(root.join(format!("engine{n}.log"))).map_err(told)?;
            let child = Command::new(&options.program)
                .args(["mock-engine", "--profile", "plain", "--clock", &options.clock.to_string()])
                .args(["--port", &port.to_string(), "--kv-events-config", &events.to_string()])
                .args(["--shape", "{\"rows\": 8, \"row_bytes\": 4096}"])
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(log)
                .kill_on_drop(true)
                .spawn()
                .map_err(told)?;
            self.engines.push(child);
            all.push((at(0), at(1)));
        }
        for (address, _) in &all {
            super::router::guest::listens(*address, Duration::from_secs(30)).await?;
        }
        Ok(all)
    }

    async fn end(self) {
        for guest in self.guests {
            guest.end().await;
        }
        for mut engine in self.engines {
            let _ = engine.kill().await;
        }
    }
}

impl Cell {
    fn of(seen: &Seen, makespan_s: f64) -> Self {
        let crowd: Vec<_> = seen.answers.iter().filter(|answer| !answer.cold).collect();
        let cold = seen.answers.iter().find(|answer| answer.cold);
        let during = |end: f64| cold.is_none_or(|cold| end >= cold.begin && end <= cold.begin + cold.whole);
        let gaps = seen.gaps.iter().filter(|gap| during(gap.end)).map(|gap| gap.seconds).collect();
        let ttft = sorted(crowd.iter().map(|answer| answer.ttft).collect());
        let sum = |of: fn(&client::Answer) -> f64| crowd.iter().map(|answer| of(answer)).sum::<f64>();
        let count = crowd.len().max(1) as f64;
        Self {
            makespan_s,
            latency_s: sum(|answer| answer.whole) / count,
            ttft_mean_s: sum(|answer| answer.ttft) / count,
            ttft_p50_s: at(&ttft, 0.5),
            ttft_p99_s: at(&ttft, 0.99),
            cached_share: sum(|answer| answer.cached as f64) / sum(|answer| answer.prompt as f64).max(1.0),
            gap_p99_s: at(&sorted(gaps), 0.99),
            cold_ttft_s: cold.map_or(0.0, |cold| cold.ttft),
            requests: crowd.len(),
            errors: seen.errors.len(),
        }
    }

    fn mean(cells: &[Self]) -> Self {
        let of = |figure: fn(&Self) -> f64| cells.iter().map(figure).sum::<f64>() / cells.len().max(1) as f64;
        Self {
            makespan_s: of(|c| c.makespan_s),
            latency_s: of(|c| c.latency_s),
            ttft_mean_s: of(|c| c.ttft_mean_s),
            ttft_p50_s: of(|c| c.ttft_p50_s),
            ttft_p99_s: of(|c| c.ttft_p99_s),
            cached_share: of(|c| c.cached_share),
            gap_p99_s: of(|c| c.gap_p99_s),
            cold_ttft_s: of(|c| c.cold_ttft_s),
            requests: cells.iter().map(|c| c.requests).sum(),
            errors: cells.iter().map(|c| c.errors).sum(),
        }
    }
}

fn sorted(mut all: Vec<f64>) -> Vec<f64> {
    all.sort_by(f64::total_cmp);
    all
}

fn at(sorted: &[f64], share: f64) -> f64 {
    let place = (sorted.len() as f64 * share) as usize;
    sorted.get(place.min(sorted.len().saturating_sub(1))).copied().unwrap_or(0.0)
}

fn compared(all: &[Who], cells: &[Vec<Cell>]) -> BTreeMap<String, Vec<Contender>> {
    let base = |kind: &str| {
        let at = all.iter().position(|who| who.kind() == kind && who.name() == "cost");
        at.map(|at| &cells[at][..]).unwrap_or_default()
    };
    let mut by_kind: BTreeMap<String, Vec<Contender>> = BTreeMap::new();
    for (who, cells) in all.iter().zip(cells) {
        let ours = base(who.kind());
        let ratio = |figure: fn(&Cell) -> f64| {
            let pairs = cells.iter().zip(ours).map(|(cell, ours)| figure(cell) / figure(ours).max(1e-9));
            pairs.sum::<f64>() / cells.len().min(ours.len()).max(1) as f64
        };
        by_kind.entry(who.kind().to_owned()).or_default().push(Contender {
            name: who.name().to_owned(),
            mean: Cell::mean(cells),
            seeds: cells.clone(),
            makespan_ratio: ratio(|cell| cell.makespan_s),
            latency_ratio: ratio(|cell| cell.latency_s),
            gap_ratio: ratio(|cell| cell.gap_p99_s),
        });
    }
    by_kind
}

#[cfg(test)]
mod tests {
    use super::client::{Answer, Gap};
    use super::*;

    #[test]
    fn a_cell_counts_the_crowd_and_the_gaps_beside_the_cold_prompt() {
        let answer = |begin: f64, ttft: f64| Answer {
            begin,
            ttft,
            whole: ttft + 1.0,
            prompt: 100,
            cached: 25,
            cold: false,
        };
        let cold = Answer { cold: true, begin: 10.0, ttft: 5.0, whole: 6.0, prompt: 9, cached: 0 };
        let gap = |end: f64, seconds: f64| Gap { end, seconds };
        let seen = Seen {
            answers: vec![answer(0.0, 1.0), answer(1.0, 3.0), cold],
            gaps: vec![gap(9.0, 50.0), gap(12.0, 2.0), gap(17.0, 60.0)],
            errors: vec!["x".into()],
        };
        let cell = Cell::of(&seen, 30.0);
        assert_eq!((cell.requests, cell.errors, cell.latency_s, cell.cached_share), (2, 1, 3.0, 0.25));
        assert_eq!((cell.gap_p99_s, cell.cold_ttft_s, cell.ttft_p99_s), (2.0, 5.0, 3.0));
        let alone = Seen { answers: seen.answers[..2].to_vec(), ..seen };
        assert_eq!(Cell::of(&alone, 30.0).gap_p99_s, 60.0);
        assert_eq!(Cell::of(&Seen::default(), 0.0).errors, 0);
    }

    #[test]
    fn ratios_are_those_of_one_seed() {
        let ours = |strategy: &str| Who::Ours { strategy: strategy.into(), tiers: false };
        let of = |makespan_s| Cell { makespan_s, latency_s: 1.0, ..Cell::default() };
        let all = [ours("kv"), ours("cost"), Who::Other { name: "x".into(), line: String::new() }];
        let cells = [vec![of(20.0), of(30.0)], vec![of(10.0), of(20.0)], vec![of(10.0), of(10.0)]];
        let compared = &compared(&all, &cells)["device"];
        let ratios: Vec<f64> = compared.iter().map(|c| c.makespan_ratio).collect();
        assert_eq!(ratios, [1.75, 1.0, 0.75]);
        assert_eq!(compared[0].mean.makespan_s, 25.0);
    }
}
