//! Everything that can be said of a machine's rails at one moment, as people and scripts get it.

use serde::{Deserialize, Serialize};

use super::inventory::Inventory;
use super::measured::{Measured, Run};
use super::nixl::Nixl;
use super::tree::Tree;
use super::verdict::{Case, Context, Level, Verdict, judge};
use super::watch::Use;

/// Counted up when a field changes its meaning.
const SCHEMA: u32 = 2;

/// Lines of a recording that no file of a machine is. The third stands in those of one peer without a name.
const CONTEXT: &str = "context";
const PEERS: &str = "peers";
const MEASURED: &str = "measured";

/// All of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    pub schema: u32,
    /// Name of the node, where one was asked.
    pub node: Option<String>,
    #[serde(flatten)]
    pub inventory: Inventory,
    pub context: Context,
    /// The other nodes that are connected, each with what was measured with it.
    pub peers: Vec<Peering>,
    /// What the rails did in the last minute, where a node watches them.
    pub uses: Vec<Use>,
    /// What rows travel over, and why, as a running node says it.
    pub fabric: Option<String>,
    /// Where NIXL lies. None: nobody looked, as in a recording.
    pub nixl: Option<Nixl>,
    /// The worst first.
    pub verdicts: Vec<Verdict>,
}

/// This machine and one other.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Peering {
    /// None: it was given by its addresses.
    pub name: Option<String>,
    /// What it said that it has.
    pub there: Option<Inventory>,
    pub measured: Option<Measured>,
    /// Gigabits per second, as far as it was measured.
    pub speeds: Vec<Speed>,
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
    /// Judges a machine by itself and with each of its peers.
    pub fn of(inventory: Inventory, context: Context, mut peers: Vec<Peering>) -> Self {
        let mut verdicts = Vec::new();
        if peers.is_empty() {
            verdicts = judge(&Case { here: &inventory, context: &context, measured: None });
        }
        for peer in &mut peers {
            peer.speeds = peer.measured.as_ref().map(speeds).unwrap_or_default();
            let there = peer.there.clone().or_else(|| context.there.clone());
            let context = Context { there, ..context.clone() };
            let case = Case { here: &inventory, context: &context, measured: peer.measured.as_ref() };
            let found = judge(&case).into_iter().map(|verdict| verdict.with(peer.name.as_deref()));
            // What is so without any peer is said once.
            let fresh: Vec<Verdict> = found.filter(|verdict| !verdicts.contains(verdict)).collect();
            verdicts.extend(fresh);
        }
        verdicts.sort_by_key(|verdict| std::cmp::Reverse(verdict.level));
        Self { schema: SCHEMA, inventory, context, peers, verdicts, ..Self::default() }
    }

    /// What a recording says, with the context and the measurements that were recorded beside it.
    ///
    /// # Errors
    /// When one of these is not what this version writes.
    pub fn recorded(tree: &Tree) -> Result<Self, serde_json::Error> {
        let part = |name: &str| tree.text(name);
        let context = part(CONTEXT).map(|text| serde_json::from_str(&text)).transpose()?.unwrap_or_default();
        let peers = part(PEERS).map(|text| serde_json::from_str(&text)).transpose()?;
        let one = part(MEASURED).map(|text| serde_json::from_str(&text)).transpose()?;
        let one = one.map(|measured| vec![Peering { measured: Some(measured), ..Peering::default() }]);
        Ok(Self::of(Inventory::read(tree, &[]), context, peers.or(one).unwrap_or_default()))
    }

    /// The lines of a recording beside those that a tree has kept.
    ///
    /// # Errors
    /// None that is known: plain data has a JSON form.
    pub fn lines(&self) -> Result<String, serde_json::Error> {
        let mut lines = format!("{CONTEXT} = {}\n", serde_json::to_string(&self.context)?);
        if !self.peers.is_empty() {
            lines += &format!("{PEERS} = {}\n", serde_json::to_string(&self.peers)?);
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
