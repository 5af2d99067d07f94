//! The simulator: recorded sessions played against the shipped store, and against policies that others use.
//!
//! It holds no cache of its own but the rivals'. `worth` is the store that ships, on a drive in memory, with its
//! thread, its log and its judgement; a row is one page instead of megabytes, and segments shrink with it, so that a
//! capacity holds as many segments as the real one would. The rivals ([`rivals`]) are textbook policies at row
//! granularity that pay nothing for segments: what they reach is a bound for a log-structured store that used them.
//!
//! What is played. Each session starts at a seeded, uniformly drawn offset within a span; the span is as long as makes
//! a request find [`Options::at_once`] sessions open on average, its own among them. Gaps within a session are the
//! recorded ones. A request finds the longest run of leading rows that are all held (hybrid models: and whose last
//! row has all its states), computes the rest of its prompt, and offers every row that it computed. Tokens that it
//! answers with are no part of it: they come back as prompt of the next request. A prompt's last token is always
//! computed. Same trace, options and seed: same figures.

mod plan;
mod rivals;
mod shipped;
mod tally;

use serde::Serialize;

pub use self::plan::Kind;
use self::plan::{Plan, Turn};
use self::rivals::{Lru, S3Fifo, Sieve};
use self::tally::Tally;
pub use self::tally::{ByKind, Figures};
use crate::base::units::Bytes;
use crate::trace::Session;

/// Longest prompt in rows that is played: a bound for what a caller can ask of memory.
const ROWS_MAX: usize = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// The shipped store.
    Worth,
    Lru,
    S3fifo,
    Sieve,
}

impl Policy {
    pub const ALL: [Self; 4] = [Self::Worth, Self::Lru, Self::S3fifo, Self::Sieve];

    pub fn name(self) -> &'static str {
        match self {
            Self::Worth => "worth",
            Self::Lru => "lru",
            Self::S3fifo => "s3fifo",
            Self::Sieve => "sieve",
        }
    }
}

/// How much a cache may take.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Capacity {
    Bytes(Bytes),
    /// Of all different rows of the trace.
    Percent(f64),
}

#[derive(Clone, Debug)]
pub struct Options {
    pub capacities: Vec<Capacity>,
    pub policies: Vec<Policy>,
    pub row_tokens: u32,
    /// Bytes of one token in one row of the attention group.
    pub bytes_per_token: u64,
    /// Rows of state at each row's end, each as large as the attention's row. 0: no hybrid model.
    pub state_groups: u32,
    /// Bytes of one segment of the real store.
    pub segment: Bytes,
    /// Sessions that are open at a time, on average.
    pub at_once: f64,
    pub seed: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("there is no request to play")]
    Nothing,
    #[error("{0} rows in one prompt: raise the tokens per row")]
    Rows(usize),
    #[error("{0} is out of its range")]
    Option(&'static str),
    #[error("a capacity of {capacity} is too small: it needs four segments of {segment}")]
    Small { capacity: Bytes, segment: Bytes },
    #[error("a row of {row} does not fit into a segment of {segment}")]
    Row { row: Bytes, segment: Bytes },
    #[error("failed to run the store")]
    Store(#[from] crate::store::Error),
    #[error("failed to prepare the store's run")]
    Io(#[from] std::io::Error),
    #[error("the store failed {0} of the rows that it was offered")]
    Failed(u64),
}

/// What was played, and what each policy made of it.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub sessions: usize,
    pub requests: usize,
    pub prompt_tokens: u64,
    pub row_tokens: u32,
    pub row_bytes: u64,
    pub state_groups: u32,
    pub segment_bytes: u64,
    pub seed: u64,
    /// Asked for.
    pub sessions_at_once: f64,
    /// Reached: how many sessions are open when a request comes, on average.
    pub sessions_open_mean: f64,
    /// All different rows, states included.
    pub working_set_rows: u64,
    pub working_set_bytes: u64,
    /// Prompt tokens that a cache that never forgets would spare, with these rows.
    pub ceiling_pct: f64,
    pub kinds: Vec<ByKind>,
    pub runs: Vec<Run>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Run {
    pub policy: Policy,
    pub capacity_bytes: u64,
    pub capacity_pct: f64,
    #[serde(flatten)]
    pub figures: Figures,
}

/// One row: its number in the plan, and its group, 0 for attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RowId {
    row: u32,
    group: u32,
}

/// A cache as a request meets it.
trait Cache {
    fn holds(&self, row: RowId) -> bool;

    /// A request has found `loaded` leading rows, and computes and offers the others. Gives the rows written.
    fn serve(&mut self, turn: &Turn, loaded: usize) -> Result<u64, Error>;
}

/// Plays everything.
///
/// # Errors
/// When an option or the trace leaves its bounds, or the store cannot be run.
pub fn run(sessions: &[Session], options: &Options) -> Result<Report, Error> {
    check(options)?;
    let plan = Plan::of(sessions, options)?;
    let mut report = plan.report(options);
    for &capacity in &options.capacities {
        let bytes = match capacity {
            Capacity::Bytes(bytes) => bytes.0,
            Capacity::Percent(pct) => (report.working_set_bytes as f64 * pct / 100.0) as u64,
        };
        for &policy in &options.policies {
            let figures = play(&plan, options, policy, Bytes(bytes))?;
            let capacity_pct = bytes as f64 / report.working_set_bytes.max(1) as f64 * 100.0;
            report.runs.push(Run { policy, capacity_bytes: bytes, capacity_pct, figures });
        }
    }
    Ok(report)
}

fn check(options: &Options) -> Result<(), Error> {
    let in_range = [
        ("the tokens per row", (1..=1 << 20).contains(&options.row_tokens)),
        ("the bytes per token", (1..=1 << 24).contains(&options.bytes_per_token)),
        ("the number of state groups", options.state_groups <= 63),
        ("the number of sessions at once", options.at_once > 0.0 && options.at_once <= 1e6),
    ];
    match in_range.iter().find(|(_, ok)| !ok) {
        Some((what, _)) => Err(Error::Option(what)),
        None => Ok(()),
    }
}

fn play(plan: &Plan, options: &Options, policy: Policy, capacity: Bytes) -> Result<Figures, Error> {
    let groups = options.state_groups;
    let rows = usize::try_from(capacity.0 / plan.row_bytes).unwrap_or(usize::MAX);
    let mut cache: Box<dyn Cache> = match policy {
        Policy::Worth => Box::new(shipped::Shipped::open(plan, options, capacity)?),
        Policy::Lru => Box::new(rivals::Rival::new(Lru::new(rows), groups)),
        Policy::S3fifo => Box::new(rivals::Rival::new(S3Fifo::new(rows), groups)),
        Policy::Sieve => Box::new(rivals::Rival::new(Sieve::new(rows), groups)),
    };
    let mut tally = Tally::default();
    for turn in &plan.turns {
        let loaded = leading(cache.as_ref(), turn, groups);
        let written = cache.serve(turn, loaded)?;
        tally.add(turn, loaded as u64, written, plan.row_tokens);
    }
    Ok(tally.figures(plan.row_bytes))
}

/// Rows from the front that can be loaded: the longest run of held attention rows at whose end all states are held.
fn leading(cache: &dyn Cache, turn: &Turn, groups: u32) -> usize {
    let held =
        turn.rows[..turn.usable].iter().take_while(|&&row| cache.holds(RowId { row, group: 0 })).count();
    let whole = |n: &usize| {
        let row = turn.rows[n - 1];
        (1..=groups).all(|group| cache.holds(RowId { row, group }))
    };
    (1..=held).rev().find(whole).unwrap_or(0)
}

#[cfg(test)]
mod tests;
