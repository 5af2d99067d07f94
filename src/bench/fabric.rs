//! How fast rows come from another box, beside what the same path does without us.
//!
//! Every round measures close together, with the same number of connections along the same paths and into the same
//! memory: raw sockets that only read (the ceiling), the fabric with rows out of the other side's memory, and the whole
//! fetch with rows out of a store on its drive, beside the drive alone, in whole rows and in reads of 1 MiB. Ratios are
//! made within a round, medians over the rounds are the figures. Every row that came is compared with what it has to
//! be, outside the clock.
//!
//! Without a peer both sides are in this process, over loopback, where sender, receiver and checksum share the
//! processor: that ratio is a floor of what a cable gives. With two boxes one is the [`Host`], whose [`Offer`] the
//! other one is given as a file.

mod guest;
mod host;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use self::guest::measure;
pub use self::host::Host;
use super::Error;
use super::stats::Spread;
use crate::base::block::{Namespace, Rank, Space};
use crate::base::units::Bytes;
use crate::cluster;
use crate::transfer::Fabric;

/// The space of rows that lie in the other side's memory; those on its drive are in the store's.
const MEMORY: Space = Space { namespace: Namespace([0xb6; 32]), rank: Rank::ONLY };

/// Longest time without progress.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is measured.
#[derive(Clone, Debug)]
pub struct FabricOptions {
    /// A multiple of 4096.
    pub row_bytes: u32,
    pub piece_bytes: usize,
    /// What one measurement moves, about: whole rows.
    pub amount: Bytes,
    pub rounds: usize,
    /// Connections over loopback.
    pub connections: usize,
    /// Folder on the serving side's drive. `None`: nothing is fetched from a drive.
    pub folder: Option<PathBuf>,
    /// The fabric alone.
    pub only_fabric: bool,
    /// NIXL by this library, instead of TCP.
    pub nixl: Option<PathBuf>,
}

impl FabricOptions {
    fn rows(&self) -> u32 {
        u32::try_from(self.amount.0 / u64::from(self.row_bytes)).unwrap_or(1 << 20).clamp(2, 1 << 20)
    }
}

async fn fabric_of(options: &FabricOptions, ends: &[IpAddr], memory: Bytes) -> io::Result<Fabric> {
    let Some(library) = options.nixl.clone() else { return Fabric::tcp(ends) };
    let ends = ends.to_vec();
    let choose = move || cluster::Carrier::nixl(library).choose(&ends, memory);
    Ok(tokio::task::spawn_blocking(choose).await.map_err(io::Error::other)??.fabric)
}

/// What one side serves, for the other one to be told. Holds the ticket that lets it in.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Offer {
    /// In hex.
    pub ticket: String,
    pub fabric: Vec<String>,
    pub raw: Vec<String>,
    pub row_bytes: u32,
    pub rows: u32,
    /// What its drive reads, in bytes per second; `None`: rows come from memory only.
    pub drive_bytes_per_s: Option<f64>,
}

/// A rail's part.
#[derive(Clone, Debug, Serialize)]
pub struct RailShare {
    pub name: String,
    /// Of all bytes, from 0 to 1.
    pub share: f64,
}

/// The figures: medians of the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct FabricReport {
    pub raw_gb_s: Option<f64>,
    pub fabric_gb_s: Option<f64>,
    /// Of the raw sockets.
    pub fabric_ratio: Option<f64>,
    pub drive_gb_s: Option<f64>,
    pub fetch_gb_s: Option<f64>,
    /// Of the slower one of drive and raw sockets.
    pub fetch_ratio: Option<f64>,
    pub rails: Vec<RailShare>,
    #[serde(skip)]
    pub seen: FabricSeen,
}

/// The same for people, with spreads.
#[derive(Clone, Copy, Debug, Default)]
pub struct FabricSeen {
    /// Bytes per second.
    pub raw: Option<Spread>,
    pub fabric: Option<Spread>,
    pub drive: Option<Spread>,
    pub fetch: Option<Spread>,
    pub fabric_ratio: Option<Spread>,
    pub fetch_ratio: Option<Spread>,
}

/// Measures over loopback.
///
/// # Errors
/// When something fails, a row is not what it has to be, or `stop` ends.
pub async fn here(
    options: &FabricOptions,
    stop: &CancellationToken,
    say: &dyn Fn(&str),
) -> Result<FabricReport, Error> {
    let at = vec![SocketAddr::from(([127, 0, 0, 1], 0)); options.connections.max(1)];
    let host = Host::start(options, &at, say).await?;
    let measured = measure(options, host.offer(), &[], Some(&host), stop, say).await;
    host.end().await;
    measured
}

/// Measures rows that come from a [`Host`] on another box. `from`: this box's ends of the rails.
///
/// # Errors
/// As [`here`], and when the offer is not one.
pub async fn from_peer(
    options: &FabricOptions,
    offer: &Offer,
    from: &[IpAddr],
    stop: &CancellationToken,
    say: &dyn Fn(&str),
) -> Result<FabricReport, Error> {
    measure(options, offer, from, None, stop, say).await
}

/// Which bytes of a row a raw connection carries: equal parts, one after the other.
fn part(row_bytes: usize, connection: usize, of: usize) -> Range<usize> {
    row_bytes * connection / of..row_bytes * (connection + 1) / of
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;
    use crate::transfer::TICKET;

    fn options(folder: Option<PathBuf>) -> FabricOptions {
        FabricOptions {
            row_bytes: 128 << 10,
            piece_bytes: 32 << 10,
            amount: Bytes::mib(4),
            rounds: 1,
            connections: 2,
            folder,
            only_fabric: false,
            nixl: None,
        }
    }

    #[test]
    fn the_parts_of_a_row_are_the_row() {
        for of in 1..=5 {
            let parts: Vec<_> = (0..of).map(|connection| part(17_301_504, connection, of)).collect();
            assert!(parts[0].start == 0 && parts[of - 1].end == 17_301_504);
            assert!(parts.windows(2).all(|two| two[0].end == two[1].start), "{parts:?}");
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_round_over_loopback_gives_every_figure_and_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        let report =
            here(&options(Some(folder.path().into())), &CancellationToken::new(), &|_| ()).await.unwrap();
        assert!(report.raw_gb_s.unwrap() > 0.0 && report.fabric_ratio.unwrap() > 0.0);
        assert!(report.fetch_ratio.unwrap() > 0.0);
        assert_eq!(report.rails.len(), 2);
        assert!((report.rails.iter().map(|rail| rail.share).sum::<f64>() - 1.0).abs() < 1e-6);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_wrong_ticket_or_offer_opens_nothing() {
        let options = options(None);
        let at = [SocketAddr::from(([127, 0, 0, 1], 0))];
        let host = Host::start(&options, &at, &|_| ()).await.unwrap();
        let right = host.offer().clone();
        for wrong in [
            Offer { ticket: "00".into(), ..right.clone() },
            Offer { raw: Vec::new(), ..right.clone() },
            Offer { row_bytes: 5, ..right.clone() },
            Offer { rows: u32::MAX, ..right.clone() },
        ] {
            let failed = from_peer(&options, &wrong, &[], &CancellationToken::new(), &|_| ()).await;
            assert!(failed.is_err(), "{wrong:?}");
        }
        let mut raw = std::net::TcpStream::connect(&right.raw[0]).unwrap();
        raw.write_all(&[0; TICKET + 2]).unwrap();
        assert_eq!(raw.read(&mut [0; 8]).unwrap_or(0), 0);
        host.end().await;
    }
}
