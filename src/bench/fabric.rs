//! How fast rows come from another box, beside what the same path does without us.
//!
//! Every round measures close together, with the same number of connections along the same paths and into the same
//! memory: raw sockets that only read (the ceiling), the fabric with rows out of the other side's memory, and the
//! whole fetch with rows out of a store on its drive, beside the drive alone. Ratios are made within a round, medians
//! over the rounds are the figures. Every row that came is compared with what it has to be, outside the clock.
//!
//! Without a peer both sides are in this process, over loopback, where sender, receiver and checksum share the
//! processor: that ratio is a floor of what a cable gives. With two boxes one is the [`Host`], whose [`Offer`] the
//! other one is given as a file.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::place::Place;
use super::stats::Spread;
use super::{Error, raw, store};
use crate::base::block::{Namespace, Rank, RowKey, Space};
use crate::base::checksum::crc64;
use crate::base::clock::Clock;
use crate::base::frame::Outcome;
use crate::base::rows::Rows;
use crate::base::units::Bytes;
use crate::cluster;
use crate::meter::Meter;
use crate::settings;
use crate::store::{DiskKind, Store};
use crate::tasks::{Kind, Tasks};
use crate::transfer::{
    Fabric, Fetcher, Listener, Metrics, Options, Path as Rail, Record, Server, Shelf, Stream, TICKET, Ticket,
    Tickets, same_secret,
};

/// The space of rows that lie in the other side's memory; those on its drive are in the store's.
const MEMORY: Space = Space { namespace: Namespace([0xb6; 32]), rank: Rank::ONLY };

/// Bytes that a raw socket is asked for at a time.
const RAW_READ: usize = 1 << 20;

/// Operations in flight of the drive's ceiling: where `bench store` finds it on most drives.
const DRIVE_DEPTH: u32 = 32;

/// Longest time without progress.
const PATIENCE: Duration = Duration::from_secs(10);

/// Longest time until all rails are open, and between two looks: nobody tells when one opens, and it is no part of what
/// is measured.
const OPEN: Duration = Duration::from_secs(10);
const OPEN_LOOK: Duration = Duration::from_millis(10);

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

/// The serving side: rows in memory, and rows of a real store on a drive.
pub struct Host {
    offer: Offer,
    tasks: Tasks,
    drive: Option<Drive>,
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host").field("fabric", &self.offer.fabric).finish_non_exhaustive()
    }
}

impl Host {
    /// Makes the rows and serves them at each address; port 0 is any. The raw sockets take the port after it.
    ///
    /// # Errors
    /// When an address is not this box's, or the drive fails.
    pub async fn start(
        options: &FabricOptions,
        at: &[SocketAddr],
        say: &dyn Fn(&str),
    ) -> Result<Self, Error> {
        let tasks = Tasks::new();
        let area = store::area(options.rows(), options.row_bytes)?;
        store::fill(&area);
        let drive = match &options.folder {
            Some(folder) => Some(Drive::make(folder, &area).await?),
            None => None,
        };
        let speed = match &drive {
            Some(drive) => Some(drive.speed().await?),
            None => None,
        };
        let shelf = Arc::new(Goods {
            memory: memory(&area),
            rows: (0..area.count()).map(store::key).zip(0..).collect(),
            store: drive.as_ref().map(|d| d.store.clone()),
        });
        let ips: Vec<IpAddr> = at.iter().map(SocketAddr::ip).filter(|ip| !ip.is_loopback()).collect();
        let memory = settings::Cluster::default().serve_memory;
        let fabric = fabric_of(options, &ips, memory).await?;
        let tickets = Tickets::default();
        let ticket = tickets.issue([0; 32], 1);
        let server = Server::new(
            fabric.lend(shelf.clone()),
            tickets,
            memory,
            PATIENCE,
            Metrics::new(&Meter::new()),
            &tasks,
        );
        let (mut fabric_at, mut raw_at) = (Vec::new(), Vec::new());
        for at in at {
            let listener = fabric.listen(&at.to_string()).await?;
            fabric_at.push(listener.address()?);
            tasks.spawn(Kind::Serving, "fabric server", server.clone().run(listener));
            let port = if at.port() == 0 { 0 } else { at.port() + 1 };
            let listener = fabric.listen(&SocketAddr::new(at.ip(), port).to_string()).await?;
            raw_at.push(listener.address()?);
            tasks.spawn(
                Kind::Chore,
                "raw server",
                raw_server(listener, shelf.clone(), ticket, tasks.clone()),
            );
        }
        let offer = Offer {
            ticket: hex::encode(ticket.0),
            fabric: fabric_at,
            raw: raw_at,
            row_bytes: options.row_bytes,
            rows: options.rows(),
            drive_bytes_per_s: speed,
        };
        say(&format!(
            "serving {} rows of {} bytes at {}",
            offer.rows,
            offer.row_bytes,
            offer.fabric.join(", ")
        ));
        Ok(Self { offer, tasks, drive })
    }

    pub fn offer(&self) -> &Offer {
        &self.offer
    }

    /// Ends all connections and removes what lay on the drive.
    pub async fn end(self) {
        self.tasks.stop(Duration::from_secs(2)).await;
        if let Some(drive) = self.drive {
            drive.store.close().await;
        }
    }
}

/// A store with all rows, and a raw file of the same size beside it.
struct Drive {
    bed: Arc<raw::Bed>,
    area: Arc<Rows>,
    store: Store,
    _place: Place,
}

impl Drive {
    async fn make(folder: &Path, area: &Arc<Rows>) -> Result<Self, Error> {
        let place = Place::under(folder).map_err(|e| Error::Folder(folder.to_owned(), e))?;
        let options = store::options(&place.path().join("store"), &settings::Store::default(), area);
        let opened = Store::open(options, DiskKind::Real, Clock::real(), &Meter::new());
        let (store, _) = opened.map_err(Error::Store)?;
        store.attach(area).await.map_err(Error::Store)?;
        let outcomes = store.put(area, store::items(area)).await;
        store.detach(area.id).await;
        store::all_are(&outcomes, Outcome::Stored)?;
        let bed = Arc::new(raw::Bed::make(&place.path().join("raw"))?);
        let drive = Self { bed, area: area.clone(), store, _place: place };
        drive.pass(raw::Way::Write).await?;
        Ok(drive)
    }

    /// Bytes per second that the drive reads with nothing in between.
    async fn speed(&self) -> Result<f64, Error> {
        self.pass(raw::Way::Read).await
    }

    async fn pass(&self, way: raw::Way) -> Result<f64, Error> {
        let (bed, area) = (self.bed.clone(), self.area.clone());
        let pass = move || bed.pass(way, &area, DRIVE_DEPTH);
        Ok(tokio::task::spawn_blocking(pass).await.map_err(io::Error::other)??.speed())
    }
}

/// What is served.
struct Goods {
    memory: Vec<Record>,
    /// Which of these a key is: looked up for every piece that is measured.
    rows: HashMap<RowKey, usize>,
    store: Option<Store>,
}

impl Shelf for Goods {
    fn read(&self, space: Space, key: RowKey) -> BoxFuture<'static, Option<Record>> {
        match &self.store {
            Some(drive) if space == store::SPACE => Shelf::read(drive, space, key),
            _ => {
                let row = self.rows.get(&key).filter(|_| space == MEMORY);
                let found = row.map(|&row| self.memory[row].clone());
                Box::pin(async move { found })
            }
        }
    }
}

fn memory(area: &Rows) -> Vec<Record> {
    let record = |row: u32| {
        let payload = area.look(row, bytes::Bytes::copy_from_slice);
        Record { position: (row + 1) * 16, checksum: crc64(&[&payload]), payload }
    };
    (0..area.count()).map(record).collect()
}

/// Writes rows to whoever shows the ticket, of each row the part of that connection.
async fn raw_server(mut listener: Listener, goods: Arc<Goods>, ticket: Ticket, tasks: Tasks) {
    loop {
        let Ok((Stream::Tcp(stream), _)) = listener.accept().await else { continue };
        let goods = goods.clone();
        tasks.spawn(Kind::Chore, "raw connection", async move {
            let Ok(stream) = stream.into_std() else { return };
            // The other side sees that the connection ends early, which is an error there.
            let _ = tokio::task::spawn_blocking(move || raw_send(stream, &goods, ticket)).await;
        });
    }
}

fn raw_send(mut to: std::net::TcpStream, goods: &Goods, ticket: Ticket) -> io::Result<()> {
    to.set_nonblocking(false)?;
    to.set_read_timeout(Some(PATIENCE))?;
    to.set_write_timeout(Some(PATIENCE))?;
    let mut asked = [0; TICKET + 2];
    to.read_exact(&mut asked)?;
    let shown: &[u8; TICKET] = asked[..TICKET].try_into().expect("cut to that length");
    let (connection, of) = (usize::from(asked[TICKET]), usize::from(asked[TICKET + 1]));
    if !same_secret(shown, &ticket.0) || connection >= of {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    goods
        .memory
        .iter()
        .map(|record| &record.payload)
        .try_for_each(|row| to.write_all(&row[part(row.len(), connection, of)]))
}

/// Which bytes of a row a raw connection carries: equal parts, one after the other.
fn part(row_bytes: usize, connection: usize, of: usize) -> Range<usize> {
    row_bytes * connection / of..row_bytes * (connection + 1) / of
}

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

async fn measure(
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
                seen.drive.push(match host.and_then(|host| host.drive.as_ref()) {
                    Some(drive) => drive.speed().await?,
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

#[cfg(test)]
mod tests {
    use super::*;

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
