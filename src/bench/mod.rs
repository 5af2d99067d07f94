//! How fast this program is here, beside what is there without it: the store beside its drive (this file), rows from
//! another box beside raw sockets ([`fabric`]), the router beside the direct path ([`router`]).
//!
//! For each row size and each medium, every round measures close together: the raw ceiling ([`raw`], at each depth of
//! [`DEPTHS`]), the store with checksums ([`store`]), the store with rows sealed, and for comparison the files tier that vLLM brings
//! ([`fs`](mod@fs)). Ratios are made within a round (`stats.rs`). Nothing is compared with an absolute number: drives
//! and machines differ, and are busy.
//!
//! What it promises. It says before it begins how much it will write and refuses when the folder lacks the room. All
//! that it writes lies in folders of its own, which go in every way that a run can end. Rows hold bytes that no drive
//! can shrink, no two alike.

mod fabric;
mod fs;
mod matrix;
mod place;
mod raw;
mod restart;
mod router;
mod stats;
mod store;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::sys::resource::{UsageWho, getrusage};
use serde::Serialize;
use tokio_util::sync::CancellationToken;

pub use self::fabric::{
    FabricOptions, FabricReport, Host, Offer, RailShare, from_peer as fabric_from_peer, here as fabric_here,
};
pub use self::fs::python_under;
pub use self::matrix::{Contender, MatrixOptions, MatrixReport, run as matrix_run};
use self::place::Place;
use self::raw::Way;
pub use self::restart::inside as restart_inside;
pub use self::router::{RouterError, RouterFigures, RouterOptions, RouterReport, run as router_run};
use self::stats::Direction;
pub use self::stats::Spread;
use crate::base::rows::Rows;
use crate::base::units::Bytes;
use crate::settings;

/// Operations in flight that the ceiling is looked for at.
pub const DEPTHS: [u32; 5] = [1, 4, 16, 32, 64];

/// Row sizes of real models, in whole pages: 128 KiB, 1 MiB, 6.5 MB, 17.3 MB.
pub const ROW_BYTES: [u32; 4] = [128 << 10, 1 << 20, 6_500_352, 17_301_504];

/// What is measured.
#[derive(Clone, Debug)]
pub struct Options {
    /// On the drive.
    pub folder: PathBuf,
    /// On a file system in memory; `None` leaves it out.
    pub memory: Option<PathBuf>,
    /// Each a multiple of 4096.
    pub row_bytes: Vec<u32>,
    pub rounds: usize,
    /// What one measurement moves, about: whole rows.
    pub amount: Bytes,
    /// A Python that can import vLLM, or why there is none.
    pub python: Result<PathBuf, String>,
    /// Rows of the store that a start is measured with; 0 leaves it out.
    pub restart_rows: u64,
    /// This program, to be started anew for it.
    pub program: PathBuf,
    /// How the store is set up beside its folder; the shipped defaults are what counts.
    pub store: settings::Store,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("failed to use {0}: {1}")]
    Folder(PathBuf, std::io::Error),
    #[error("{folder} has {free} free, and the measurement needs {needed} at a time")]
    NoRoom { folder: PathBuf, needed: Bytes, free: Bytes },
    #[error("the drive or the ring failed: {0}")]
    Io(#[from] std::io::Error),
    #[error("the store failed: {0}")]
    Store(crate::store::Error),
    #[error("{other} of {of} rows did not pass through the store")]
    Rows { other: usize, of: usize },
    #[error("a row that was got back is not the row that was put")]
    WrongBytes,
    #[error("the restarted store failed: {0}")]
    Restart(String),
    #[error("interrupted")]
    Interrupted,
}

/// Where the files lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Medium {
    Drive,
    Shm,
}

/// One medium and row size, as scripts read it. Ratios are medians of the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub row_bytes: u32,
    pub medium: Medium,
    pub read_ratio: Option<f64>,
    pub write_ratio: Option<f64>,
    /// Against the raw path with a sync at its end: the store makes each segment durable, the ceiling nothing.
    pub synced_write_ratio: Option<f64>,
    /// The larger of both ways.
    pub extra_cpu_s_per_gb: Option<f64>,
    /// Speed with rows sealed over speed with rows in the clear.
    pub sealed_read_ratio: Option<f64>,
    pub sealed_write_ratio: Option<f64>,
    /// What sealing adds; the larger of both ways.
    pub sealed_cpu_s_per_gb: Option<f64>,
    pub vllm_fs_read_ratio: Option<f64>,
    pub vllm_fs_write_ratio: Option<f64>,
    #[serde(skip)]
    pub seen: Seen,
}

/// The same for people: spreads and speeds.
#[derive(Clone, Debug)]
pub struct Seen {
    pub read: Figures,
    pub write: Figures,
}

/// One way of one medium and row size.
#[derive(Clone, Debug)]
pub struct Figures {
    pub depth: u32,
    /// Bytes per second of the ceiling.
    pub ceiling: Option<Spread>,
    pub store: Option<Spread>,
    /// Of the ceiling that makes durable what it wrote; for writes.
    pub synced: Option<Spread>,
    /// Sealed over plain.
    pub sealed: Option<Spread>,
    pub other: Option<Spread>,
    /// CPU seconds per GB beyond the ceiling's own.
    pub extra_cpu: Option<Spread>,
}

/// All of it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    pub rows: Vec<Row>,
    pub restart_rows: Option<u64>,
    pub restart_s: Option<f64>,
    pub lookup_4000_ms: Option<f64>,
    pub bytes_per_row: Option<f64>,
    /// Spread of `restart_s` over the starts.
    #[serde(skip)]
    pub restart_seen: Option<Spread>,
}

/// Starts that the restart figure is the median of.
const STARTS: usize = 3;

/// CPU seconds that this process has taken, the kernel's work for it included.
pub(crate) fn cpu_seconds() -> f64 {
    let usage = getrusage(UsageWho::RUSAGE_SELF).expect("asking about oneself");
    [usage.user_time(), usage.system_time()]
        .iter()
        .map(|t| t.tv_sec() as f64 + t.tv_usec() as f64 / 1e6)
        .sum()
}

/// Measures everything. `say` is told how it goes, a line at a time.
///
/// # Errors
/// When the folder lacks room, something fails, or `stop` ends.
pub async fn run(options: &Options, stop: &CancellationToken, say: &dyn Fn(&str)) -> Result<Report, Error> {
    announce(options, say)?;
    let mut tier = other(options, say).await;
    let mut rows = Vec::new();
    for (medium, folder) in media(options) {
        let place = Place::under(folder).map_err(|e| Error::Folder(folder.to_owned(), e))?;
        for &row_bytes in &options.row_bytes {
            rows.push(one(options, medium, place.path(), row_bytes, &mut tier, stop, say).await?);
        }
    }
    let mut report = Report { rows, ..Report::default() };
    if options.restart_rows > 0 {
        restarted(options, &mut report, say).await?;
    }
    if stop.is_cancelled() { Err(Error::Interrupted) } else { Ok(report) }
}

/// Adds what a start takes on the drive.
async fn restarted(options: &Options, report: &mut Report, say: &dyn Fn(&str)) -> Result<(), Error> {
    say(&format!("Restart with {} rows: {STARTS} starts of a new process", options.restart_rows));
    let folder = &options.folder;
    let place = Place::under(folder).map_err(|e| Error::Folder(folder.to_owned(), e))?;
    let all = restart::measure(&options.program, &place.path().join("restart"), options.restart_rows, STARTS)
        .await?;
    let median = |of: fn(&restart::Started) -> f64| Spread::of(all.iter().map(of)).map(|s| s.median);
    report.restart_rows = all.first().map(|started| started.inside.rows);
    report.restart_seen = Spread::of(all.iter().map(|started| started.seconds));
    report.restart_s = report.restart_seen.map(|s| s.median);
    report.lookup_4000_ms = median(|started| started.inside.lookup_4000_ms);
    report.bytes_per_row = median(|started| started.inside.bytes_per_row);
    Ok(())
}

/// vLLM's tier, when it can be had.
async fn other(options: &Options, say: &dyn Fn(&str)) -> Option<fs::Tier> {
    let started = match &options.python {
        Ok(python) => fs::Tier::start(python).await,
        Err(why) => Err(why.clone()),
    };
    started.inspect_err(|why| say(&format!("without vLLM's fs tier: {why}"))).ok()
}

fn media(options: &Options) -> impl Iterator<Item = (Medium, &Path)> {
    let memory = options.memory.iter().map(|folder| (Medium::Shm, folder.as_path()));
    std::iter::once((Medium::Drive, options.folder.as_path())).chain(memory)
}

/// Rows of one measurement: at least as many as keep the deepest queue busy twice, when that is no more than twice
/// the amount.
fn count(options: &Options, row_bytes: u32) -> u32 {
    let fits = |bytes: u64| u32::try_from(bytes / u64::from(row_bytes)).unwrap_or(1 << 20);
    fits(options.amount.0).clamp(2, 1 << 20)
}

/// Says what will be written, and refuses when there is no room for it.
fn announce(options: &Options, say: &dyn Fn(&str)) -> Result<(), Error> {
    // One file of rows, one store, one folder of the files tier, never all at once with those of another size.
    let most = |row_bytes: u32| {
        let rows = count(options, row_bytes);
        u64::from(rows) * u64::from(row_bytes) * 2 + store::room(&options.store, rows, row_bytes)
    };
    let needed = options.row_bytes.iter().map(|&bytes| most(bytes)).max().unwrap_or(0);
    let passes = (DEPTHS.len() + 2 + usize::from(options.python.is_ok())) as u64 * options.rounds as u64;
    let each = |bytes: &u32| u64::from(count(options, *bytes)) * u64::from(*bytes);
    let written: u64 = options.row_bytes.iter().map(each).sum::<u64>() * passes;
    for (_, folder) in media(options) {
        let free = place::free(folder).map_err(|e| Error::Folder(folder.to_owned(), e))?;
        say(&format!(
            "{}: will write {:.1} GB in all, {:.1} GB at a time; {:.1} GB are free",
            folder.display(),
            written as f64 / 1e9,
            needed as f64 / 1e9,
            free as f64 / 1e9
        ));
        if free < needed {
            return Err(Error::NoRoom {
                folder: folder.to_owned(),
                needed: Bytes(needed),
                free: Bytes(free),
            });
        }
    }
    Ok(())
}

/// All rounds of one medium and row size.
async fn one(
    options: &Options,
    medium: Medium,
    folder: &Path,
    row_bytes: u32,
    tier: &mut Option<fs::Tier>,
    stop: &CancellationToken,
    say: &dyn Fn(&str),
) -> Result<Row, Error> {
    let rows = store::area(count(options, row_bytes), row_bytes)?;
    store::fill(&rows);
    let (mut write, mut read) = (Direction::default(), Direction::default());
    let mut told = false;
    let sum = store::checksums(&rows);
    say(&format!(
        "{medium:?}, {} rows of {row_bytes} bytes; a checksum alone: {:.2} CPU s/GB, {:.1} GB/s a thread",
        rows.count(),
        sum.cpu_per_gb(),
        sum.speed() / 1e9
    ));
    if let Some(begun) = tier
        && let Err(why) = begun.begin(&folder.join("fs"), row_bytes, rows.count()).await
    {
        say(&format!("  without vLLM's fs tier: {why}"));
        *tier = None;
    }
    for round in 1..=options.rounds {
        let (raw, direct) = ceilings(folder, &rows, stop)?;
        write.raw.push(raw.write);
        write.synced.push(raw.synced);
        read.raw.push(raw.read);
        // Sealed and plain take turns at going first.
        let mut measured = None;
        for sealed in [round % 2 == 0, round % 2 != 0] {
            let set = settings::Store { encrypt: sealed, ..options.store.clone() };
            let of = store::round(&folder.join("store"), &set, &rows).await?;
            place::rest(folder)?;
            if sealed {
                write.sealed.push(of.write);
                read.sealed.push(of.read);
            } else {
                write.store.push(of.write);
                read.store.push(of.read);
                measured = Some(of);
            }
        }
        let measured = measured.expect("one of two passes is plain");
        if !std::mem::replace(&mut told, true) {
            let how =
                if direct { "past the page cache" } else { "through the page cache: no direct I/O here" };
            say(&format!(
                "{medium:?}, rows of {row_bytes} bytes: ceiling {how}; the store uses {}",
                measured.io
            ));
            measured.notes.iter().for_each(|note| say(&format!("  {note}")));
        }
        if let Some(of) = tier {
            match of.round().await {
                Ok((wrote, got)) => {
                    write.other.push(wrote);
                    read.other.push(got);
                }
                Err(why) => {
                    say(&format!("  without vLLM's fs tier: {why}"));
                    (*tier, write.other, read.other) = (None, Vec::new(), Vec::new());
                }
            }
        }
        let against = |way: &Direction| way.last_ratio().map_or(String::new(), |r| format!(" ({r:.2})"));
        say(&format!(
            "  round {round}: write {:.0} MB/s{}, read {:.0} MB/s{}",
            measured.write.speed() / 1e6,
            against(&write),
            measured.read.speed() / 1e6,
            against(&read)
        ));
        if stop.is_cancelled() {
            return Err(Error::Interrupted);
        }
    }
    if let Some(of) = tier {
        // Its folder goes with ours in any case.
        let _ = of.end().await;
    }
    Ok(row(medium, row_bytes, &write, &read))
}

/// What the raw path cost, by depth.
#[derive(Debug, Default)]
struct Ceilings {
    write: Vec<stats::Cost>,
    /// With a sync at the end.
    synced: Vec<stats::Cost>,
    read: Vec<stats::Cost>,
}

/// The raw path at every depth, each with a new file, and whether it went past the page cache.
fn ceilings(folder: &Path, rows: &Arc<Rows>, stop: &CancellationToken) -> Result<(Ceilings, bool), Error> {
    let (mut all, mut direct) = (Ceilings::default(), true);
    for depth in DEPTHS {
        if stop.is_cancelled() {
            return Err(Error::Interrupted);
        }
        let bed = raw::Bed::make(&folder.join("raw"))?;
        let wrote = bed.pass(Way::Write, rows, depth)?;
        all.write.push(wrote);
        all.synced.push(bed.sync(wrote)?);
        all.read.push(bed.pass(Way::Read, rows, depth)?);
        direct &= bed.direct;
        drop(bed);
        place::rest(folder)?;
    }
    Ok((all, direct))
}

fn row(medium: Medium, row_bytes: u32, write: &Direction, read: &Direction) -> Row {
    let median = |spread: Option<Spread>| spread.map(|s| s.median);
    let figures = |of: &Direction| Figures {
        depth: of.best_depth().map_or(0, |n| DEPTHS[n]),
        ceiling: Spread::of(of.ceiling().iter().map(stats::Cost::speed)),
        store: of.store_ratio(),
        synced: of.synced_ratio(),
        sealed: of.sealed_ratio(),
        other: of.other_ratio(),
        extra_cpu: of.extra_cpu(),
    };
    let cpu = [write, read].into_iter().filter_map(|d| median(d.extra_cpu()));
    let sealed_cpu = [write, read].into_iter().filter_map(|d| median(d.sealed_cpu()));
    Row {
        row_bytes,
        medium,
        read_ratio: median(read.store_ratio()),
        write_ratio: median(write.store_ratio()),
        synced_write_ratio: median(write.synced_ratio()),
        extra_cpu_s_per_gb: cpu.max_by(f64::total_cmp),
        sealed_read_ratio: median(read.sealed_ratio()),
        sealed_write_ratio: median(write.sealed_ratio()),
        sealed_cpu_s_per_gb: sealed_cpu.max_by(f64::total_cmp),
        vllm_fs_read_ratio: median(read.other_ratio()),
        vllm_fs_write_ratio: median(write.other_ratio()),
        seen: Seen { read: figures(read), write: figures(write) },
    }
}
