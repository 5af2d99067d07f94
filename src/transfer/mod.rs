//! Rows of another node, read straight into this node's rows.
//!
//! One side serves: whoever shows a ticket of a live control session may ask for rows ([`Server`]). The other side
//! fetches: a [`Fetcher`] keeps one connection (a rail) per pair of ends ([`path`]), and cuts what is to be fetched
//! into pieces that the rails pull, each as fast as it is ([`share`]): a large row uses all of them at once, a slow
//! rail carries less and a dead one nothing. A payload goes from the socket into the row that the engine reads. On
//! the serving side each row is read once and lies in the [`pantry`] until its pieces are gone; a piece leaves as soon
//! as the drive has delivered it ([`arrival`]).
//!
//! Nothing is accepted without its checksum, nothing is written once the fetch has returned ([`piece`]), and no
//! failure is an error: a row that does not come is a miss. Connections are not encrypted; the ticket is.

mod arrival;
#[cfg(test)]
mod conform;
mod fabric;
mod line;
pub mod nixl;
mod onesided;
mod pantry;
mod path;
mod piece;
mod pool;
mod probe;
mod rail;
mod serve;
mod share;
#[cfg(test)]
pub mod sim;
mod wait;
mod wire;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use prometheus::{IntCounter, IntCounterVec, IntGauge};

pub use arrival::Arrival;
pub use fabric::{Fabric, Listener, MemNet, Stream};
pub use onesided::{Engine, Host, Reader, Remote};
pub use path::{Local, Path};
pub use pool::{PIECE_BYTES, RailStatus};
pub use probe::{Carried, PROBE_MOST, Probe, Way, probe};
pub use rail::{Fetcher, Options};
pub use serve::{Server, Tickets};
pub use wire::{TICKET, Ticket, put_space, same_secret, take_space};

use crate::base::block::{RowKey, Space};
use crate::meter::Meter;

/// A whole row in memory.
#[derive(Clone, Debug)]
pub struct Record {
    pub position: u32,
    /// crc64-nvme over `payload`, made before it was written.
    pub checksum: u64,
    pub payload: Bytes,
}

/// Where a server reads rows.
pub trait Shelf: Send + Sync + 'static {
    /// Begins to read a row, which lands at `into` from its beginning on. What is dropped before that is not read.
    fn read(&self, space: Space, key: RowKey, into: Arrival) -> BoxFuture<'static, ()>;
}

/// Why a row did not come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The peer does not have it any more.
    Missing,
    /// Its bytes are not those that were stored.
    Checksum,
    /// It is another row than the one asked for, or of another size.
    Mismatch,
    /// It did not arrive in time.
    Deadline,
    /// The connection ended or there is none.
    Connection,
}

impl Reason {
    const ALL: [Self; 5] = [Self::Missing, Self::Checksum, Self::Mismatch, Self::Deadline, Self::Connection];

    fn label(self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Checksum => "checksum",
            Self::Mismatch => "mismatch",
            Self::Deadline => "deadline",
            Self::Connection => "connection",
        }
    }
}

/// Series of this module. Made once per node.
#[derive(Clone, Debug)]
pub struct Metrics {
    received_bytes: IntCounter,
    received_rows: IntCounter,
    failed_rows: IntCounterVec,
    sent_bytes: IntCounter,
    sent_rows: IntCounter,
    missing_rows: IntCounter,
    refused: IntCounter,
    read_bytes: IntCounter,
    rails: IntGauge,
    rail_bytes: IntCounterVec,
    rail_errors: IntCounterVec,
    rail_reconnects: IntCounterVec,
}

impl Metrics {
    pub fn new(meter: &Meter) -> Self {
        let failed_rows = meter.counters(
            "transfer_rows_failed_total",
            "Rows asked for from another node that did not come, by reason.",
            &["reason"],
        );
        for reason in Reason::ALL {
            failed_rows.with_label_values(&[reason.label()]);
        }
        Self {
            received_bytes: meter
                .counter("transfer_received_bytes_total", "Bytes of rows received from other nodes."),
            received_rows: meter
                .counter("transfer_received_rows_total", "Rows received from other nodes and verified."),
            failed_rows,
            sent_bytes: meter.counter("transfer_sent_bytes_total", "Bytes of rows sent to other nodes."),
            sent_rows: meter.counter("transfer_sent_rows_total", "Rows sent to other nodes."),
            missing_rows: meter.counter(
                "transfer_missing_rows_total",
                "Rows that other nodes asked for and that were not there or not readable.",
            ),
            refused: meter.counter(
                "transfer_refused_connections_total",
                "Data connections closed because their ticket or their requests were not in order.",
            ),
            read_bytes: meter.counter(
                "transfer_read_bytes_total",
                "Of the bytes of rows received from other nodes, those that were read out of their memory.",
            ),
            rails: meter.gauge("transfer_rails", "Data connections to other nodes that are up."),
            rail_bytes: meter.counters(
                "transfer_rail_received_bytes_total",
                "Bytes of rows received from other nodes, by the device of the rail.",
                &["rail"],
            ),
            rail_errors: meter.counters(
                "transfer_rail_errors_total",
                "Data connections that ended by themselves or could not be opened, by the device of the rail.",
                &["rail"],
            ),
            rail_reconnects: meter.counters(
                "transfer_rail_reconnects_total",
                "Data connections that were opened again, by the device of the rail.",
                &["rail"],
            ),
        }
    }

    /// Bytes of rows that were read out of other nodes' memory.
    pub fn read_bytes(&self) -> u64 {
        self.read_bytes.get()
    }

    /// Bytes of rows that were received and sent since the start.
    pub fn moved_bytes(&self) -> u64 {
        self.received_bytes.get() + self.sent_bytes.get()
    }

    fn failed(&self, reason: Reason, rows: usize) {
        self.failed_rows.with_label_values(&[reason.label()]).inc_by(rows as u64);
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod twin;
