//! What a measurement found: transfers over each rail alone and over all together, with what the kernel counted
//! meanwhile, and packets of full size sent to the other end. Facts only; [`super::verdict`] judges them.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::counters::Moved;

/// Most bytes that one transfer of a measurement moves. Larger buffers have frozen a Spark with a desktop running
/// (NVIDIA/dgx-spark-playbooks issue 102), and 60 MiB, which are 63 MB, keep two rails of 100 Gb/s busy for longer than
/// their connections need to get going.
pub const AMOUNT: u64 = 60 << 20;

/// What the transfer was to run over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Wire {
    #[default]
    Tcp,
    Rdma,
}

/// Everything that was measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Measured {
    pub wire: Wire,
    /// One for each rail, in the order of the inventory.
    pub alone: Vec<Run>,
    pub together: Option<Run>,
    pub probes: Vec<Probe>,
}

/// One transfer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Run {
    /// Devices that were to carry it.
    pub over: Vec<String>,
    pub bytes: u64,
    pub seconds: f64,
    /// What every rail did meanwhile, as the kernel counted it.
    pub moved: BTreeMap<String, Moved>,
    /// Why it did not end.
    pub failed: Option<String>,
}

impl Run {
    /// Gigabits per second, as the link's rate is given. Zero when it failed.
    pub fn gbit_s(&self) -> f64 {
        if self.failed.is_some() || self.seconds <= 0.0 {
            return 0.0;
        }
        self.bytes as f64 * 8.0 / 1e9 / self.seconds
    }

    /// Share of the payload that the kernel saw on `device`. Headers make it slightly more than all.
    pub fn share(&self, device: &str) -> f64 {
        let carried = self.moved.get(device).map_or(0, Moved::carried);
        if self.bytes == 0 { 0.0 } else { carried as f64 / self.bytes as f64 }
    }
}

/// Packets that must not be cut on the way, from one rail to one address of the other box.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    pub rail: String,
    pub to: IpAddr,
    /// Of the rail, in bytes: the size of the large packet with its headers.
    pub mtu: u32,
    pub small: Answer,
    pub large: Answer,
}

/// What became of a packet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// It arrived: the other end answered.
    Arrived,
    /// No answer came.
    Silent,
    /// It was refused on the way for its size; the path takes this many bytes, where that is known.
    TooLarge(Option<u32>),
    /// It could not be sent.
    Unsent(String),
}
