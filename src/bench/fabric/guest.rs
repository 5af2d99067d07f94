//! The measuring side of the benchmark: raw sockets, the fabric and whole fetches in turn, round by round.

use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::super::stats::Spread;
use super::super::{Error, store};
use super::{
    FabricOptions, FabricReport, FabricSeen, Host, MEMORY, Offer, PATIENCE, RailShare, fabric_of, part,
};
use crate::base::checksum::crc64;
use crate::base::frame::Outcome;
use crate::base::rows::Rows;
use crate::base::units::Bytes;
use crate::meter::Meter;
use crate::tasks::Tasks;
use crate::transfer::{Fabric, Fetcher, Metrics, Options, Path as Rail, Stream, TICKET, Ticket};

/// Bytes that a raw socket is asked for at a time.
const RAW_READ: usize = 1 << 20;

/// Longest time until all rails are open, and between two looks: nobody tells when one opens, and it is no part of what
/// is measured.
const OPEN: Duration = Duration::from_secs(10);
const OPEN_LOOK: Duration = Duration::from_millis(10);

/// The other side of a [`Host`], over all rounds.
struct Guest<'a> {
    options: &'a FabricOptions,
    offer: &'a Offer,
    ticket: Ticket,
    fabric: Fabric,
    raw_paths: Vec<Rail>,
    fetcher: Fetcher,
    metrics: Metrics,
    /// The same memory in both spaces.
    memory: Arc<Rows>,
    drive: Arc<Rows>,
    /// What each row has to be.
    sums: Vec<u64>,
}

/// Measures what an offer offers, round by round.
pub async fn measure(
    options: &FabricOptions,
    offer: &Offer,
    from: &[IpAddr],
    host: Option<&Host>,
    stop: &CancellationToken,
    say: &dyn Fn(&str),
) -> Result<FabricReport, Error> {
    let tasks = Tasks::new();
    let guest = Guest::new(options, offer, from, &tasks).await?;
    let measured = guest.rounds(host, stop, say).await;
    tasks.stop(Duration::from_secs(2)).await;
    measured
}

/// Speeds of one round, in bytes per second.
#[derive(Default)]
struct Speeds {
    raw: Vec<f64>,
    fabric: Vec<f64>,
    drive: Vec<f64>,
    fetch: Vec<f64>,
}

impl<'a> Guest<'a> {
    async fn new(
        options: &'a FabricOptions,
        offer: &'a Offer,
        from: &[IpAddr],
        tasks: &Tasks,
    ) -> Result<Self, Error> {
        let bad = |what: &str| {
            Error::Io(io::Error::new(io::ErrorKind::InvalidData, format!("the offer has {what}")))
        };
        let ticket: [u8; TICKET] = hex::decode(&offer.ticket)
            .ok()
            .and_then(|bytes| bytes.try_into().ok())
            .ok_or_else(|| bad("no valid ticket"))?;
        let ticket = Ticket(ticket);
        let size = u64::from(offer.row_bytes) * u64::from(offer.rows);
        if offer.fabric.len() != offer.raw.len() || offer.fabric.is_empty() || offer.fabric.len() > 64 {
            return Err(bad("no addresses, or other ones for raw sockets"));
        }
        if offer.row_bytes == 0 || !offer.row_bytes.is_multiple_of(4096) || size > 64 << 30 {
            return Err(bad("rows of no possible size"));
        }
        // It serves nobody.
        let fabric = fabric_of(options, from, Bytes::mib(1)).await?;
        let paths = fabric.paths(&offer.fabric);
        let set = Options { patience: PATIENCE, piece_bytes: options.piece_bytes };
        let metrics = Metrics::new(&Meter::new());
        let fetcher = Fetcher::along(&fabric, paths, ticket, set, &metrics, tasks);
        let areas = store::areas(offer.rows, offer.row_bytes, [MEMORY, store::SPACE])?;
        let [memory, drive] = <[Arc<Rows>; 2]>::try_from(areas).expect("one per space");
        memory.populate()?;
        let raw_paths = fabric.paths(&offer.raw);
        store::fill(&memory);
        let sums = (0..memory.count()).map(|row| memory.look(row, |bytes| crc64(&[bytes]))).collect();
        Ok(Self { options, offer, ticket, fabric, raw_paths, fetcher, metrics, memory, drive, sums })
    }

    /// Bytes that were read out of the other side's memory, of all that came.
    fn say_read(&self, say: &dyn Fn(&str)) {
        if self.options.nixl.is_some() {
            let (read, all) = (self.metrics.read_bytes() as f64, self.metrics.moved_bytes() as f64);
            say(&format!("{}: {:.3} of all bytes were read", self.fabric.name(), read / all.max(1.0)));
        }
    }

    async fn rounds(
        &self,
        host: Option<&Host>,
        stop: &CancellationToken,
        say: &dyn Fn(&str),
    ) -> Result<FabricReport, Error> {
        self.open().await?;
        let mut seen = Speeds::default();
        for round in 1..=self.options.rounds {
            let mut line = format!("round {round}:");
            if !self.options.only_fabric {
                seen.raw.push(self.raw().await?);
                line += &format!(" raw {:.0} MB/s,", last(&seen.raw) / 1e6);
            }
            seen.fabric.push(self.fetch(&self.memory).await?);
            line += &format!(" fabric {:.0} MB/s", last(&seen.fabric) / 1e6);
            if let Some(told) = self.offer.drive_bytes_per_s.filter(|_| !self.options.only_fabric) {
                seen.drive.push(match host {
                    Some(host) => host.drive_speed().await?.unwrap_or(told),
                    None => told,
                });
                seen.fetch.push(self.fetch(&self.drive).await?);
                let (drive, fetch) = (last(&seen.drive) / 1e6, last(&seen.fetch) / 1e6);
                line += &format!(", drive {drive:.0} MB/s, fetch {fetch:.0} MB/s");
            }
            say(&line);
            if stop.is_cancelled() {
                return Err(Error::Interrupted);
            }
        }
        for rail in self.fetcher.rails() {
            say(&format!(
                "rail {} to {}: {:.0} MB, share {:.3}, {} errors, {} reconnects",
                rail.path.name,
                rail.path.remote,
                rail.bytes as f64 / 1e6,
                rail.share,
                rail.errors,
                rail.reconnects
            ));
        }
        self.say_read(say);
        Ok(self.report(&seen))
    }

    fn report(&self, speeds: &Speeds) -> FabricReport {
        let Speeds { raw, fabric, drive, fetch } = speeds;
        let spread = |of: &[f64]| Spread::of(of.iter().copied());
        let slower = raw.iter().zip(drive).map(|(raw, drive)| raw.min(*drive));
        let seen = FabricSeen {
            raw: spread(raw),
            fabric: spread(fabric),
            drive: spread(drive),
            fetch: spread(fetch),
            fabric_ratio: Spread::of(fabric.iter().zip(raw).map(|(fabric, raw)| fabric / raw)),
            fetch_ratio: Spread::of(fetch.iter().zip(slower).map(|(fetch, slower)| fetch / slower)),
        };
        let median = |of: Option<Spread>| of.map(|s| s.median);
        let share = |rail: crate::transfer::RailStatus| RailShare { name: rail.path.name, share: rail.share };
        FabricReport {
            raw_gb_s: median(seen.raw).map(|speed| speed / 1e9),
            fabric_gb_s: median(seen.fabric).map(|speed| speed / 1e9),
            fabric_ratio: median(seen.fabric_ratio),
            drive_gb_s: median(seen.drive).map(|speed| speed / 1e9),
            fetch_gb_s: median(seen.fetch).map(|speed| speed / 1e9),
            fetch_ratio: median(seen.fetch_ratio),
            rails: self.fetcher.rails().into_iter().map(share).collect(),
            seen,
        }
    }

    /// Waits until every rail is open: what is measured begins with all of them.
    async fn open(&self) -> Result<(), Error> {
        let begin = Instant::now();
        while let Some(shut) = self.fetcher.rails().iter().find(|rail| !rail.up) {
            if begin.elapsed() > OPEN {
                let what = format!("no connection along {} to {}", shut.path.name, shut.path.remote);
                return Err(io::Error::new(io::ErrorKind::TimedOut, what).into());
            }
            tokio::time::sleep(OPEN_LOOK).await;
        }
        Ok(())
    }

    /// Raw sockets, one thread each, into the same rows: the sum of what each of them moved in a second, so that unequal
    /// rails count with all they have.
    async fn raw(&self) -> Result<f64, Error> {
        let mut streams = Vec::new();
        for path in &self.raw_paths {
            let Stream::Tcp(stream) = self.fabric.connect(path).await? else {
                return Err(io::Error::other("not a socket").into());
            };
            streams.push(stream.into_std()?);
        }
        self.wipe();
        let (rows, ticket) = (self.memory.clone(), self.ticket);
        let run = move || {
            let of = streams.len();
            std::thread::scope(|scope| {
                let receive = |(connection, stream)| {
                    let rows = &rows;
                    scope.spawn(move || raw_receive(stream, rows, ticket, connection, of))
                };
                let threads: Vec<_> = streams.into_iter().enumerate().map(receive).collect();
                let join = |thread: std::thread::ScopedJoinHandle<'_, io::Result<f64>>| {
                    thread.join().unwrap_or_else(|_| Err(io::Error::other("a reading thread panicked")))
                };
                threads.into_iter().map(join).sum::<io::Result<f64>>()
            })
        };
        let speed = tokio::task::spawn_blocking(run).await.map_err(io::Error::other)??;
        self.check()?;
        Ok(speed)
    }

    /// All rows of a space over the fabric.
    async fn fetch(&self, rows: &Arc<Rows>) -> Result<f64, Error> {
        self.wipe();
        let items = store::items(rows);
        let begin = Instant::now();
        let outcomes = self.fetcher.fetch(rows, &items, None).await;
        let took = begin.elapsed();
        store::all_are(&outcomes, Outcome::FromPeer)?;
        self.check()?;
        Ok(self.bytes() / took.as_secs_f64())
    }

    fn bytes(&self) -> f64 {
        f64::from(self.memory.count()) * self.memory.row_bytes() as f64
    }

    /// Every row has to come to be there.
    fn wipe(&self) {
        (0..self.memory.count()).for_each(|row| self.memory.fill(row, |bytes| bytes.fill(0)));
    }

    fn check(&self) -> Result<(), Error> {
        let same = |row: u32| self.memory.look(row, |bytes| crc64(&[bytes])) == self.sums[row as usize];
        if (0..self.memory.count()).all(same) { Ok(()) } else { Err(Error::WrongBytes) }
    }
}

fn last(of: &[f64]) -> f64 {
    of.last().copied().unwrap_or_default()
}

/// Bytes per second of one raw connection.
fn raw_receive(
    mut from: std::net::TcpStream,
    rows: &Rows,
    ticket: Ticket,
    connection: usize,
    of: usize,
) -> io::Result<f64> {
    from.set_nonblocking(false)?;
    from.set_read_timeout(Some(PATIENCE))?;
    let number = |n: usize| u8::try_from(n).map_err(io::Error::other);
    let begin = Instant::now();
    from.write_all(&[&ticket.0[..], &[number(connection)?, number(of)?]].concat())?;
    let mine = part(rows.row_bytes(), connection, of);
    for row in 0..rows.count() {
        let mut at = mine.start;
        while at < mine.end {
            let most = (mine.end - at).min(RAW_READ);
            match rows.fill_part(row, at, most, |into| from.read(into))? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => at += n,
            }
        }
    }
    Ok(f64::from(rows.count()) * mine.len() as f64 / begin.elapsed().as_secs_f64())
}
