//! Everything that can be said of a machine's rails at one moment, as people and scripts get it.

use serde::{Deserialize, Serialize};

use super::inventory::Inventory;
use super::measured::{Measured, Run};
use super::nixl::Nixl;
use super::tree::Tree;
use super::verdict::{Case, Context, Level, Verdict, judge};
use super::watch::Use;

/// Counted up when a field changes its meaning.
const SCHEMA: u32 = 1;

/// Lines of a recording that no file of a machine is.
const CONTEXT: &str = "context";
const MEASURED: &str = "measured";

/// All of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    pub schema: u32,
    /// Name of the node, where one was asked.
    pub node: Option<String>,
    /// The other node, when something was measured with it.
    pub peer: Option<String>,
    #[serde(flatten)]
    pub inventory: Inventory,
    pub context: Context,
    pub measured: Option<Measured>,
    /// Gigabits per second, as far as it was measured.
    pub speeds: Vec<Speed>,
    /// What the rails did in the last minute, where a node watches them.
    pub uses: Vec<Use>,
    /// What rows travel over, and why, as a running node says it.
    pub fabric: Option<String>,
    /// Where NIXL lies. None: nobody looked, as in a recording.
    pub nixl: Option<Nixl>,
    /// The worst first.
    pub verdicts: Vec<Verdict>,
}

/// How fast a transfer was.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Speed {
    /// Device, or `together`.
    pub over: String,
    pub gbit_s: f64,
    /// Of the payload, as the kernel counted it on all rails.
    pub rdma_share: f64,
    pub tcp_share: f64,
}

impl Report {
    pub fn of(inventory: Inventory, context: Context, measured: Option<Measured>) -> Self {
        let case = Case { here: &inventory, context: &context, measured: measured.as_ref() };
        let verdicts = judge(&case);
        let speeds = measured.as_ref().map(speeds).unwrap_or_default();
        Self { schema: SCHEMA, inventory, context, measured, speeds, verdicts, ..Self::default() }
    }

    /// What a recording says, with the context and the measurement that were recorded beside it.
    ///
    /// # Errors
    /// When one of the two is not what this version writes.
    pub fn recorded(tree: &Tree) -> Result<Self, serde_json::Error> {
        let part = |name: &str| tree.text(name);
        let context = part(CONTEXT).map(|text| serde_json::from_str(&text)).transpose()?.unwrap_or_default();
        let measured = part(MEASURED).map(|text| serde_json::from_str(&text)).transpose()?;
        Ok(Self::of(Inventory::read(tree, &[]), context, measured))
    }

    /// The lines of a recording beside those that a tree has kept.
    ///
    /// # Errors
    /// None that is known: plain data has a JSON form.
    pub fn lines(&self) -> Result<String, serde_json::Error> {
        let mut lines = format!("{CONTEXT} = {}\n", serde_json::to_string(&self.context)?);
        if let Some(measured) = &self.measured {
            lines += &format!("{MEASURED} = {}\n", serde_json::to_string(measured)?);
        }
        Ok(lines)
    }

    /// The worst that was found. None: nothing was.
    pub fn worst(&self) -> Option<Level> {
        self.verdicts.first().map(|verdict| verdict.level)
    }
}

fn speeds(measured: &Measured) -> Vec<Speed> {
    let speed = |over: String, run: &Run| {
        let share = |bytes: u64| if run.bytes == 0 { 0.0 } else { bytes as f64 / run.bytes as f64 };
        let (rdma, tcp) = run.moved.values().fold((0, 0), |(rdma, tcp), m| (rdma + m.rdma(), tcp + m.net()));
        Speed { over, gbit_s: run.gbit_s(), rdma_share: share(rdma), tcp_share: share(tcp) }
    };
    let alone = measured.alone.iter().map(|run| speed(run.over.join(", "), run));
    alone.chain(measured.together.iter().map(|run| speed("together".to_owned(), run))).collect()
}
