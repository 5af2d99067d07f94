//! `bench store`: arguments of the measurement, and its table.
//!
//! How it goes is told on stderr, the figures stand on stdout. Ctrl-C and SIGTERM end it between two measurements,
//! with its folders gone.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::out::{Exit, Out, Told, say};
use crate::base::units::Bytes;
use crate::bench::{self, Figures, Medium, Report, Spread};
use crate::engine::provision;
use crate::settings;
use crate::tasks::{Kind, Tasks};

#[derive(Debug, Subcommand)]
pub(super) enum Bench {
    /// Measure the store beside what the drive does without it, in one run.
    Store(Store),
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
    /// Folder on a file system in memory.
    #[arg(long, value_name = "DIR", default_value = "/dev/shm")]
    memory: PathBuf,
    /// Python that can import vLLM. Without it the one that `provision` made.
    #[arg(long, value_name = "FILE")]
    python: Option<PathBuf>,
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
            (bench::ROW_BYTES.to_vec(), 5, Bytes::mib(512), 1_000_000)
        };
        let mut store = settings::Store::default();
        store.segment = self.segment.unwrap_or(store.segment);
        store.queue_depth = self.queue_depth.unwrap_or(store.queue_depth);
        bench::Options {
            store,
            restart_rows,
            program,
            folder: self.dir.clone(),
            memory: Some(self.memory.clone()),
            row_bytes: if self.row.is_empty() { sizes } else { self.row.clone() },
            rounds: self.rounds.map_or(rounds, |n| n as usize),
            amount: self.amount.unwrap_or(amount),
            python: self.python.clone().map_or_else(|| bench::python_under(&provision::cache_folder()), Ok),
        }
    }
}

pub(super) fn store(order: &Store) -> anyhow::Result<Exit> {
    if !order.dir.is_dir() {
        let what = format!("{}: no such folder", order.dir.display());
        return Err(Told { exit: Exit::Usage, what }.into());
    }
    // A second thread hears the signals while the first one measures.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let report = runtime.block_on(async {
        let tasks = Tasks::new();
        let stop = CancellationToken::new();
        let (mut interrupt, mut terminate) =
            (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        let heard = stop.clone();
        tasks.spawn(Kind::Chore, "signals", async move {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            heard.cancel();
        });
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
    out.line("medium  row bytes  way    ceiling       depth  store/ceiling        extra CPU s/GB       sealed/plain         vLLM fs/ceiling")?;
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
        "{ceiling:7.0} MB/s  {:5}  {:19}  {:19}  {:19}  {}",
        figures.depth,
        spread(figures.store),
        spread(figures.extra_cpu),
        spread(figures.sealed),
        spread(figures.other)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_whole_pages_and_bounded() {
        assert_eq!(row_bytes("1MiB"), Ok(1 << 20));
        for text in ["0", "4097", "1GiB", "x"] {
            assert!(row_bytes(text).is_err(), "{text}");
        }
        assert!(amount("512MiB").is_ok() && amount("1KiB").is_err() && amount("1TiB").is_err());
    }
}
