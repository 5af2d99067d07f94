//! `bench store`, `bench fabric` and `bench router`: arguments of the measurements, and their tables.
//!
//! How it goes is told on stderr, the figures stand on stdout. Ctrl-C and SIGTERM end it between two measurements,
//! with its folders gone.

use std::io::Read;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Subcommand};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::out::{Exit, Out, Told, say};
use crate::base::units::Bytes;
use crate::bench::{
    self, Contender, FabricOptions, FabricReport, Figures, Host, MatrixOptions, MatrixReport, Medium, Offer,
    Report, RouterFigures, RouterOptions, RouterReport, Spread,
};
use crate::engine::provision;
use crate::mock;
use crate::settings;
use crate::tasks::{Kind, Tasks};

#[derive(Debug, Subcommand)]
pub(super) enum Bench {
    /// Measure the store beside what the drive does without it, in one run.
    Store(Store),
    /// Measure rows from another box beside raw sockets on the same path, in one run. Alone: over loopback.
    Fabric(Fabric),
    /// Measure what the router adds to a request, beside the direct path and other routers, in one run.
    Router(Router),
    /// Compare ways to route under the load of coding agents: two mock engines behind each, in one run.
    Matrix(Matrix),
    /// One start of a store that was made to be measured; `store` starts it.
    #[command(hide = true)]
    Restart(Restart),
}

#[derive(Debug, Args)]
pub(super) struct Restart {
    #[arg(long)]
    dir: PathBuf,
    #[arg(long)]
    rows: u64,
    #[arg(long)]
    capacity: u64,
}

#[derive(Debug, Args)]
pub(super) struct Router {
    /// The figures as JSON.
    #[arg(long)]
    json: bool,
    /// A quick look: few and short sessions, two rounds. Not for comparing.
    #[arg(long)]
    quick: bool,
    /// Rounds; figures are medians over them.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,
    /// Folder with tokenizer.json and a chat template. Without it the run makes one.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Another router to be measured beside this one: {port} stands for the port it is to serve on, {backends} for
    /// the URLs of two backends. Can be given again. It ends with the run.
    #[arg(long, value_name = "NAME=COMMAND", value_parser = peer)]
    peer: Vec<(String, String)>,
    /// Folder in which one of the run's own is made and removed at the end.
    #[arg(long, value_name = "DIR", default_value_os_t = std::env::temp_dir())]
    dir: PathBuf,
}

fn peer(text: &str) -> Result<(String, String), String> {
    let plain =
        |name: &str| !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
    match text.split_once('=') {
        Some((name, line)) if plain(name) && line.contains("{port}") && line.contains("{backends}") => {
            Ok((name.to_owned(), line.to_owned()))
        }
        _ => Err("write it as NAME=COMMAND, with {port} and {backends} in the command".to_owned()),
    }
}

#[derive(Debug, Args)]
pub(super) struct Matrix {
    /// The figures as JSON.
    #[arg(long)]
    json: bool,
    /// A quick look: one seed, two short sessions, `cost` alone. Not for comparing.
    #[arg(long)]
    quick: bool,
    /// Each router meets the sessions of so many seeds.
    #[arg(long, value_name = "N", default_value = "5", value_parser = clap::value_parser!(u64).range(1..=100))]
    seeds: u64,
    /// Sessions side by side, and their turns.
    #[arg(long, value_name = "N", default_value = "10", value_parser = clap::value_parser!(u32).range(1..=200))]
    sessions: u32,
    #[arg(long, value_name = "N", default_value = "12", value_parser = clap::value_parser!(u32).range(1..=200))]
    turns: u32,
    /// Times that engines and clients are faster than a box. Times in the report are the box's.
    #[arg(long, value_name = "N", default_value = "20", value_parser = clap::value_parser!(u32).range(1..=100))]
    clock: u32,
    /// A prompt of so many tokens that nobody has seen comes in the middle.
    #[arg(long, value_name = "TOKENS", default_value = "0", value_parser = clap::value_parser!(u32).range(..=200_000))]
    cold: u32,
    /// Strategies of `router.strategy`. `cost` is what the others are compared with.
    #[arg(
        long,
        value_name = "NAMES",
        default_value = "cost,kv,prefix,least_load,round_robin",
        value_delimiter = ','
    )]
    strategies: Vec<String>,
    /// Leave out the cells with drives and the link between two nodes.
    #[arg(long)]
    no_tiers: bool,
    /// Another router: {port} stands for the port it is to serve on, {backends} for the URLs of both engines, {backend0},
    /// {backend1}, {events0} and {events1} for one each. Can be given again. It ends with the run.
    #[arg(long, value_name = "NAME=COMMAND", value_parser = peer)]
    peer: Vec<(String, String)>,
    /// Folder in which one of the run's own is made and removed at the end.
    #[arg(long, value_name = "DIR", default_value_os_t = std::env::temp_dir())]
    dir: PathBuf,
}

impl Matrix {
    fn options(&self, program: PathBuf) -> MatrixOptions {
        let mut options = MatrixOptions {
            seeds: self.seeds,
            sessions: self.sessions as usize,
            turns: self.turns as usize,
            clock: self.clock.into(),
            cold: self.cold as usize,
            strategies: self.strategies.clone(),
            tiers: !self.no_tiers,
            peers: self.peer.clone(),
            count: |text| mock::model::tokens(text).len(),
            program,
            folder: self.dir.clone(),
        };
        if self.quick {
            options.strategies = vec!["cost".to_owned()];
            (options.seeds, options.sessions, options.turns) = (1, 2, 2);
        }
        options
    }
}

pub(super) fn matrix(order: &Matrix) -> anyhow::Result<Exit> {
    let known = ["cost", "kv", "prefix", "least_load", "round_robin"];
    let told = |what: String| Told { exit: Exit::Usage, what };
    if !order.dir.is_dir() {
        return Err(told(format!("{}: no such folder", order.dir.display())).into());
    }
    if let Some(other) = order.strategies.iter().find(|name| !known.contains(&name.as_str())) {
        return Err(told(format!("{other}: no strategy; there are {}", known.join(", "))).into());
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let report = runtime.block_on(async {
        let stop = until_signal(&Tasks::new())?;
        let program = std::env::current_exe()?;
        anyhow::Ok(bench::matrix_run(&order.options(program), &stop, &say).await?)
    })?;
    let mut out = Out::new();
    if order.json {
        out.line(&serde_json::to_string(&report)?)?;
    } else {
        matrix_table(&report, &mut out)?;
    }
    out.done()?;
    let failed = report.cells.values().flatten().any(|contender| contender.mean.errors > 0);
    Ok(if failed { Exit::Failed } else { Exit::Done })
}

fn matrix_table(report: &MatrixReport, out: &mut Out) -> std::io::Result<()> {
    for (kind, all) in &report.cells {
        out.line(&format!(
            "{kind:14}  makespan s    / cost   latency s    / cost   TTFT p50     p99   cached %   gap p99 s    / cost   cold s   errors"
        ))?;
        for Contender { name, mean: m, makespan_ratio, latency_ratio, gap_ratio, .. } in all {
            out.line(&format!(
                "{name:14}  {:10.0}  {makespan_ratio:8.2}  {:10.2}  {latency_ratio:8.2}  {:9.2}  {:6.2}  {:9.1}  {:10.2}  {gap_ratio:8.2}  {:7.1}  {:7}",
                m.makespan_s, m.latency_s, m.ttft_p50_s, m.ttft_p99_s, m.cached_share * 100.0, m.gap_p99_s, m.cold_ttft_s, m.errors
            ))?;
        }
    }
    for error in &report.errors {
        out.line(error)?;
    }
    out.line(&format!(
        "{} sessions of {} turns, engines {} times faster than a box, cold prompt of {} tokens; seconds are the box's",
        report.sessions, report.turns, report.clock, report.cold_tokens
    ))
}

impl Router {
    fn options(&self, program: PathBuf) -> RouterOptions {
        let (rounds, sessions, tokens) = if self.quick { (2, 4, 6_000) } else { (5, 100, 50_000) };
        RouterOptions {
            rounds: self.rounds.map_or(rounds, |n| n as usize),
            sessions,
            tokens,
            turn: 700,
            flood: if self.quick { Duration::from_millis(300) } else { Duration::from_secs(3) },
            model: self.model.clone(),
            peers: self.peer.clone(),
            program,
            folder: self.dir.clone(),
        }
    }
}

#[derive(Debug, Args)]
pub(super) struct Store {
    /// Folder on the drive to be measured. A folder of its own is made in it and removed at the end.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// The figures as JSON.
    #[arg(long)]
    json: bool,
    /// A quick look: two sizes, few rounds, little data. Not for comparing.
    #[arg(long)]
    quick: bool,
    /// Rounds; figures are medians over them.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,
    /// What one measurement moves, such as 512MiB.
    #[arg(long, value_name = "SIZE", value_parser = amount)]
    amount: Option<Bytes>,
    /// Only this row size in bytes. Can be given again.
    #[arg(long, value_name = "BYTES", value_parser = row_bytes)]
    row: Vec<u32>,
    /// Size of one segment, instead of the default of `store.segment`.
    #[arg(long, value_name = "SIZE", value_parser = amount)]
    segment: Option<Bytes>,
    /// Operations in flight, instead of the default of `store.queue_depth`.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    queue_depth: Option<u32>,
    /// Folder on a file system in memory; `none` leaves it out.
    #[arg(long, value_name = "DIR", default_value = "/dev/shm")]
    memory: PathBuf,
    /// Rows of the store that a start is measured with; 0 leaves it out.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(..=10_000_000))]
    restart_rows: Option<u64>,
    /// Python that can import vLLM. Without it the one that `provision` made.
    #[arg(long, value_name = "FILE")]
    python: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(super) struct Fabric {
    /// The figures as JSON.
    #[arg(long)]
    json: bool,
    /// Serve here until interrupted, for `--peer` on another box, which is told what is printed. It holds what opens
    /// the connections: copy it as a secret. IP or IP:PORT of one end of a rail; can be given again.
    #[arg(long, value_name = "ADDRESS", value_parser = end, conflicts_with_all = ["peer", "from"])]
    serve: Vec<SocketAddr>,
    /// File with what `--serve` printed on the other box.
    #[arg(long, value_name = "FILE")]
    peer: Option<PathBuf>,
    /// This box's end of a rail, to which its connection is pinned. Can be given again. Without it the routing table
    /// decides.
    #[arg(long, value_name = "IP", requires = "peer")]
    from: Vec<IpAddr>,
    /// Folder on the serving side's drive, for whole fetches. A folder of its own is made in it and removed at the end.
    #[arg(long, value_name = "DIR", conflicts_with = "peer")]
    dir: Option<PathBuf>,
    /// Row size in bytes.
    #[arg(long, value_name = "BYTES", value_parser = row_bytes, default_value = "17301504", conflicts_with = "peer")]
    row: u32,
    /// Bytes that a rail takes at a time.
    #[arg(long, value_name = "SIZE", value_parser = piece, default_value = "1MiB")]
    piece: Bytes,
    /// What one measurement moves.
    #[arg(long, value_name = "SIZE", value_parser = amount, default_value = "512MiB", conflicts_with = "peer")]
    amount: Bytes,
    /// Rounds; figures are medians over them.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000), default_value = "5")]
    rounds: u32,
    /// Connections over loopback.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16), default_value = "2")]
    connections: u32,
    /// Measure the fabric alone, without raw sockets and drive: for watching rails while cables are pulled.
    #[arg(long)]
    only_fabric: bool,
    /// Read the other side's memory by NIXL instead of sending rows over TCP: its library, `libnixl_capi.so`. Needed on both sides.
    /// Devices without RDMA use TCP, through ports that ask for no key.
    #[arg(long, value_name = "FILE")]
    nixl: Option<PathBuf>,
}

/// One end of a rail, with any port unless one is named.
fn end(text: &str) -> Result<SocketAddr, String> {
    let ip = text.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, 0));
    let end = ip.or_else(|_| text.parse()).map_err(|_| "an IP address, or one with a port".to_owned())?;
    if end.port() == u16::MAX { Err("the port after it is needed too".to_owned()) } else { Ok(end) }
}

fn piece(text: &str) -> Result<Bytes, String> {
    let bytes: Bytes = text.parse().map_err(|e| format!("{e}"))?;
    let allowed = Bytes::kib(64)..=Bytes::mib(16);
    if allowed.contains(&bytes) { Ok(bytes) } else { Err("from 64KiB to 16MiB".to_owned()) }
}

fn amount(text: &str) -> Result<Bytes, String> {
    let bytes: Bytes = text.parse().map_err(|e| format!("{e}"))?;
    let allowed = Bytes::mib(1)..=Bytes::gib(16);
    if allowed.contains(&bytes) { Ok(bytes) } else { Err("from 1MiB to 16GiB".to_owned()) }
}

fn row_bytes(text: &str) -> Result<u32, String> {
    let bytes: Bytes = text.parse().map_err(|e| format!("{e}"))?;
    let fits = bytes.0.is_multiple_of(4096) && (4096..=128 << 20).contains(&bytes.0);
    u32::try_from(bytes.0).ok().filter(|_| fits).ok_or_else(|| "a multiple of 4KiB up to 128MiB".to_owned())
}

impl Store {
    fn options(&self, program: PathBuf) -> bench::Options {
        let (sizes, rounds, amount, restart_rows) = if self.quick {
            (vec![bench::ROW_BYTES[0], bench::ROW_BYTES[1]], 2, Bytes::mib(16), 10_000)
        } else {
            (bench::ROW_BYTES.to_vec(), 5, Bytes::gib(1), 1_000_000)
        };
        let mut store = settings::Store::default();
        store.segment = self.segment.unwrap_or(store.segment);
        store.queue_depth = self.queue_depth.unwrap_or(store.queue_depth);
        bench::Options {
            store,
            restart_rows: self.restart_rows.unwrap_or(restart_rows),
            program,
            folder: self.dir.clone(),
            memory: Some(self.memory.clone()).filter(|folder| folder.as_os_str() != "none"),
            row_bytes: if self.row.is_empty() { sizes } else { self.row.clone() },
            rounds: self.rounds.map_or(rounds, |n| n as usize),
            amount: self.amount.unwrap_or(amount),
            python: self.python.clone().map_or_else(|| bench::python_under(&provision::cache_folder()), Ok),
        }
    }
}

/// Ends when Ctrl-C or SIGTERM come.
fn until_signal(tasks: &Tasks) -> anyhow::Result<CancellationToken> {
    let stop = CancellationToken::new();
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let heard = stop.clone();
    tasks.spawn(Kind::Chore, "signals", async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        heard.cancel();
    });
    Ok(stop)
}

pub(super) fn store(order: &Store) -> anyhow::Result<Exit> {
    if !order.dir.is_dir() {
        let what = format!("{}: no such folder", order.dir.display());
        return Err(Told { exit: Exit::Usage, what }.into());
    }
    // A second thread hears the signals while the first one measures.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let report = runtime.block_on(async {
        let stop = until_signal(&Tasks::new())?;
        let program = std::env::current_exe()?;
        anyhow::Ok(bench::run(&order.options(program), &stop, &say).await?)
    })?;
    let mut out = Out::new();
    if order.json {
        out.line(&serde_json::to_string(&report)?)?;
    } else {
        table(&report, &mut out)?;
    }
    out.done()?;
    Ok(Exit::Done)
}

pub(super) fn router(order: &Router) -> anyhow::Result<Exit> {
    if !order.dir.is_dir() {
        let what = format!("{}: no such folder", order.dir.display());
        return Err(Told { exit: Exit::Usage, what }.into());
    }
    // Client and backend; the routers are processes of their own.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let report = runtime.block_on(async {
        let stop = until_signal(&Tasks::new())?;
        let program = std::env::current_exe()?;
        anyhow::Ok(bench::router_run(&order.options(program), &stop, &say).await?)
    })?;
    let mut out = Out::new();
    if order.json {
        out.line(&serde_json::to_string(&report)?)?;
    } else {
        router_table(&report, &mut out)?;
    }
    out.done()?;
    Ok(Exit::Done)
}

fn router_table(report: &RouterReport, out: &mut Out) -> std::io::Result<()> {
    out.line("added, in us          small p50   small p99     big p50     big p99    cold p50   small req/s   RssAnon MB")?;
    let named = report.peers.iter().map(|(name, figures)| (name.as_str(), figures));
    for (name, f) in std::iter::once(("spark-kv", &report.ours)).chain(named) {
        out.line(&format!(
            "{name:20}  {:10.0}  {:10.0}  {:10.0}  {:10.0}  {:10.0}  {:12.0}  {:.0} -> {:.0}",
            f.small_p50_us,
            f.small_p99_us,
            f.big_p50_us,
            f.big_p99_us,
            f.cold_p50_us,
            f.small_rps,
            f.rss_start_mb,
            f.rss_mb
        ))?;
        out.line(&format!("{:20}  {}", "", tails(f)))?;
    }
    out.line(&format!(
        "direct: {:.0} us small, {:.0} us big, {:.0} small req/s; noise {:.2}; sessions of {} tokens in {} bytes at their beginning",
        report.direct_small_us, report.direct_big_us, report.direct_small_rps, report.noise, report.prompt_tokens, report.body_bytes
    ))
}

fn tails(figures: &RouterFigures) -> String {
    let each =
        figures.tails.iter().map(|t| format!("{} tokens {:.0} (p99 {:.0})", t.tokens, t.p50_us, t.p99_us));
    format!("by tail: {}", each.collect::<Vec<_>>().join(", "))
}

/// Offers are a few hundred bytes.
const OFFER_MAX: u64 = 64 << 10;

fn read_offer(file: &Path) -> anyhow::Result<Offer> {
    let told = |what: String| Told { exit: Exit::Usage, what: format!("{}: {what}", file.display()) };
    let mut text = String::new();
    let opened = std::fs::File::open(file).map_err(|e| told(e.to_string()))?;
    opened.take(OFFER_MAX).read_to_string(&mut text).map_err(|e| told(e.to_string()))?;
    // What it holds is a secret: the message does not quote it.
    let offer = serde_json::from_str(&text);
    Ok(offer.map_err(|_| told("not what `spark-kv bench fabric --serve` printed".to_owned()))?)
}

pub(super) fn fabric(order: &Fabric) -> anyhow::Result<Exit> {
    let options = FabricOptions {
        row_bytes: order.row,
        piece_bytes: usize::try_from(order.piece.0)?,
        amount: order.amount,
        rounds: order.rounds as usize,
        connections: order.connections as usize,
        folder: order.dir.clone(),
        only_fabric: order.only_fabric,
        nixl: order.nixl.clone(),
    };
    let offer = order.peer.as_deref().map(read_offer).transpose()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let mut out = Out::new();
    let report = runtime.block_on(async {
        let stop = until_signal(&Tasks::new())?;
        if !order.serve.is_empty() {
            let host = Host::start(&options, &order.serve, &say).await?;
            out.line(&serde_json::to_string(host.offer())?)?;
            out.done()?;
            stop.cancelled().await;
            host.end().await;
            return Ok(None);
        }
        let report = match &offer {
            Some(offer) => bench::fabric_from_peer(&options, offer, &order.from, &stop, &say).await?,
            None => bench::fabric_here(&options, &stop, &say).await?,
        };
        anyhow::Ok(Some(report))
    })?;
    let Some(report) = report else { return Ok(Exit::Done) };
    if order.json {
        out.line(&serde_json::to_string(&report)?)?;
    } else {
        fabric_table(&report, &mut out)?;
    }
    out.done()?;
    Ok(Exit::Done)
}

fn fabric_table(report: &FabricReport, out: &mut Out) -> std::io::Result<()> {
    let seen = &report.seen;
    let ratio = |of: Option<Spread>| {
        of.map_or(String::new(), |s| format!("{:.2} ({:.2}..{:.2})", s.median, s.least, s.most))
    };
    out.line("            speed       of the slower one below it")?;
    for (what, speed, of) in [
        ("whole fetch", seen.fetch, seen.fetch_ratio),
        ("drive", seen.drive, None),
        ("fabric", seen.fabric, seen.fabric_ratio),
        ("raw sockets", seen.raw, None),
    ] {
        if let Some(speed) = speed {
            out.line(format!("{what:11} {:5.0} MB/s  {}", speed.median / 1e6, ratio(of)).trim_end())?;
        }
    }
    for rail in &report.rails {
        out.line(&format!("rail {}: {:.1} % of all bytes", rail.name, rail.share * 100.0))?;
    }
    Ok(())
}

pub(super) fn restart(order: &Restart) -> anyhow::Result<Exit> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut out = Out::new();
    let mut told = Ok(());
    let mut say = |line: &str| {
        let line = out.line(line).and_then(|()| out.done());
        told = std::mem::replace(&mut told, Ok(())).and(line);
    };
    let (dir, capacity) = (&order.dir, Bytes(order.capacity));
    runtime.block_on(bench::restart_inside(dir, capacity, order.rows, &mut say))?;
    told?;
    Ok(Exit::Done)
}

fn table(report: &Report, out: &mut Out) -> std::io::Result<()> {
    out.line("medium  row bytes  way    ceiling       depth  store/ceiling        store/synced         extra CPU s/GB       sealed/plain         vLLM fs/ceiling")?;
    for row in &report.rows {
        let medium = if row.medium == Medium::Drive { "drive" } else { "shm" };
        for (way, figures) in [("read", &row.seen.read), ("write", &row.seen.write)] {
            out.line(format!("{medium:6}  {:9}  {way:5}  {}", row.row_bytes, line(figures)).trim_end())?;
        }
    }
    if let (Some(rows), Some(seen)) = (report.restart_rows, report.restart_seen) {
        let Spread { median, least, most } = seen;
        out.line(&format!(
            "restart with {rows} rows: {median:.2} s ({least:.2}..{most:.2}) from exec to the first row"
        ))?;
    }
    if let (Some(ms), Some(bytes)) = (report.lookup_4000_ms, report.bytes_per_row) {
        out.line(&format!("lookup of 4000 keys: {ms:.2} ms; {bytes:.0} bytes of memory per row"))?;
    }
    Ok(())
}

fn line(figures: &Figures) -> String {
    let spread = |of: Option<Spread>| {
        of.map_or("-".to_owned(), |s| format!("{:.2} ({:.2}..{:.2})", s.median, s.least, s.most))
    };
    let ceiling = figures.ceiling.map_or(0.0, |s| s.median / 1e6);
    format!(
        "{ceiling:7.0} MB/s  {:5}  {:19}  {:19}  {:19}  {:19}  {}",
        figures.depth,
        spread(figures.store),
        spread(figures.synced),
        spread(figures.extra_cpu),
        spread(figures.sealed),
        spread(figures.other)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_of_rails_and_pieces_are_bounded() {
        assert_eq!(end("10.0.0.1"), Ok("10.0.0.1:0".parse().unwrap()));
        assert_eq!(end("[::1]:7"), Ok("[::1]:7".parse().unwrap()));
        assert!(end("10.0.0.1:65535").is_err() && end("box").is_err());
        assert!(piece("1MiB").is_ok() && piece("4KiB").is_err() && piece("1GiB").is_err());
    }

    #[test]
    fn an_offer_that_is_none_is_refused_without_being_shown() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "{\"ticket\":\"secret\"}").unwrap();
        let error = read_offer(file.path()).unwrap_err().to_string();
        assert!(error.contains("--serve") && !error.contains("secret"), "{error}");
        assert!(read_offer(Path::new("/nonexistent/offer")).is_err());
    }

    #[test]
    fn another_router_is_named_and_says_where_its_port_and_backends_go() {
        let got = peer("a=b --port {port} --to {backends}").unwrap();
        assert_eq!(got, ("a".into(), "b --port {port} --to {backends}".into()));
        for text in ["a", "=x {port} {backends}", "a=x {port}", "a=x {backends}", "a/b=x {port} {backends}"] {
            assert!(peer(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_whole_pages_and_bounded() {
        assert_eq!(row_bytes("1MiB"), Ok(1 << 20));
        for text in ["0", "4097", "1GiB", "x"] {
            assert!(row_bytes(text).is_err(), "{text}");
        }
        assert!(amount("512MiB").is_ok() && amount("1KiB").is_err() && amount("1TiB").is_err());
    }
}
