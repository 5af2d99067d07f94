//! What the facts mean, in words: one verdict for each known fault of a pair of Sparks, with cause and fix, and one for
//! what is well.
//!
//! Pure. Figures to judge by hold for the one card they were measured on; any other device is described and not
//! accused. Where each threshold comes from stands beside it. No verdict rests on what a library or a log claims.

mod measurement;
mod setup;

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::inventory::Inventory;
use super::measured::Measured;

/// What is judged.
#[derive(Clone, Copy, Debug)]
pub struct Case<'a> {
    pub here: &'a Inventory,
    pub context: &'a Context,
    pub measured: Option<&'a Measured>,
}

/// What a machine's own files do not say.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Context {
    /// Addresses of this box that rows travel over. Empty: not set, or not known.
    pub data: Vec<IpAddr>,
    /// The other box, where it said what it has.
    pub there: Option<Inventory>,
    /// Bytes that are to be registered with the RDMA devices.
    pub pinned: u64,
    /// GID index of each RDMA device when the node started.
    pub gids_at_start: BTreeMap<String, u32>,
    /// GID indices that the engine's environment fixes, by variable.
    pub gids_fixed: BTreeMap<String, String>,
}

/// Which fault, or which part is well. Stable words for scripts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Id {
    /// There is nothing to judge.
    NoRails,
    NoCable,
    TwinNotConfigured,
    RailNotUsed,
    SameSubnet,
    CableCrossed,
    PcieNarrow,
    GidMissing,
    GidDrift,
    SmallMtu,
    MtuNotEndToEnd,
    MemlockSmall,
    KernelHandover,
    DeviceForbidden,
    CardSwitchedOff,
    RailSilent,
    OnlyOneRail,
    RdmaWasTcp,
    TcpByChoice,
    NicDegraded,
    RailSlow,
    BothSlow,
    Errors,
    Uncounted,
    Carries,
}

impl Id {
    /// Whether it is about this machine and another one, and not about this one alone.
    fn is_between_nodes(self) -> bool {
        match self {
            Self::CableCrossed
            | Self::MtuNotEndToEnd
            | Self::RailSilent
            | Self::OnlyOneRail
            | Self::RdmaWasTcp
            | Self::TcpByChoice
            | Self::NicDegraded
            | Self::RailSlow
            | Self::BothSlow
            | Self::Errors
            | Self::Uncounted
            | Self::Carries => true,
            Self::NoRails
            | Self::NoCable
            | Self::TwinNotConfigured
            | Self::RailNotUsed
            | Self::SameSubnet
            | Self::PcieNarrow
            | Self::GidMissing
            | Self::GidDrift
            | Self::SmallMtu
            | Self::MemlockSmall
            | Self::KernelHandover
            | Self::DeviceForbidden
            | Self::CardSwitchedOff => false,
        }
    }
}

/// How much it matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Worth knowing.
    Note,
    /// Works, and worse than it could.
    Warn,
    /// Somebody must act.
    Fail,
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    pub id: Id,
    pub level: Level,
    /// Device it is about. None: the pair, or the machine.
    pub rail: Option<String>,
    /// The other node, when it was seen with one of them.
    #[serde(default)]
    pub peer: Option<String>,
    /// What was seen, with its figures.
    pub what: String,
    pub cause: String,
    pub fix: String,
}

impl Verdict {
    fn new(level: Level, id: Id, what: impl Into<String>) -> Self {
        let (rail, peer, cause, fix) = (None, None, String::new(), String::new());
        Self { id, level, rail, peer, what: what.into(), cause, fix }
    }

    fn on(mut self, rail: &str) -> Self {
        self.rail = Some(rail.to_owned());
        self
    }

    /// Names the other node, when that has a say in it.
    pub(super) fn with(mut self, peer: Option<&str>) -> Self {
        if self.id.is_between_nodes() {
            self.peer = peer.map(str::to_owned);
        }
        self
    }

    fn because(mut self, cause: impl Into<String>) -> Self {
        self.cause = cause.into();
        self
    }

    fn fix(mut self, fix: impl Into<String>) -> Self {
        self.fix = fix.into();
        self
    }
}

/// Everything that can be said, the worst first.
pub fn judge(case: &Case<'_>) -> Vec<Verdict> {
    let mut verdicts = setup::judge(case);
    verdicts.extend(case.measured.into_iter().flat_map(|measured| measurement::judge(case, measured)));
    verdicts.sort_by_key(|verdict| std::cmp::Reverse(verdict.level));
    verdicts
}

/// Whether a verdict is about registering memory, which fails at the first transfer when nobody looks before.
pub fn is_registration(id: Id) -> bool {
    matches!(id, Id::MemlockSmall | Id::KernelHandover | Id::DeviceForbidden)
}
