//! The serving side of the benchmark: rows in memory, rows of a real store on a drive, and raw sockets beside them.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::super::place::Place;
use super::super::{Error, raw, store};
use super::{FabricOptions, MEMORY, Offer, PATIENCE, fabric_of, part};
use crate::base::block::{RowKey, Space};
use crate::base::checksum::crc64;
use crate::base::clock::Clock;
use crate::base::frame::Outcome;
use crate::base::rows::Rows;
use crate::meter::Meter;
use crate::settings;
use crate::store::{DiskKind, Store};
use crate::tasks::{Kind, Tasks};
use crate::transfer::{
    Arrival, Listener, Metrics, Record, Server, Shelf, Stream, TICKET, Ticket, Tickets, same_secret,
};

/// Operations in flight of the drive's ceiling: where `bench store` finds it on most drives.
const DRIVE_DEPTH: u32 = 32;

/// Bytes of a read of the drive's ceiling beside whole rows: what most drives like best.
const READ: u32 = 1 << 20;

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
        let server =
            Server::new(shelf.clone(), tickets, memory, PATIENCE, Metrics::new(&Meter::new()), &tasks);
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

    /// Bytes per second that its drive reads now with nothing in between.
    pub async fn drive_speed(&self) -> Result<Option<f64>, Error> {
        match &self.drive {
            Some(drive) => Ok(Some(drive.speed().await?)),
            None => Ok(None),
        }
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
    /// About as many bytes in rows of [`READ`].
    reads: Arc<Rows>,
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
        let bytes = u64::from(area.count()) * area.row_bytes() as u64;
        let reads = match u32::try_from(bytes / u64::from(READ)).map_err(io::Error::other)? {
            // Less than one of them.
            0 => area.clone(),
            count => store::area(count, READ)?,
        };
        reads.populate()?;
        let drive = Self { bed, area: area.clone(), reads, store, _place: place };
        drive.pass(raw::Way::Write, &drive.area).await?;
        Ok(drive)
    }

    /// Bytes per second that the drive reads with nothing in between: in whole rows or in reads of [`READ`], whichever it
    /// likes better now.
    async fn speed(&self) -> Result<f64, Error> {
        let rows = self.pass(raw::Way::Read, &self.area).await?;
        Ok(rows.max(self.pass(raw::Way::Read, &self.reads).await?))
    }

    async fn pass(&self, way: raw::Way, area: &Arc<Rows>) -> Result<f64, Error> {
        let (bed, area) = (self.bed.clone(), area.clone());
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
    fn read(&self, space: Space, key: RowKey, into: Arrival) -> BoxFuture<'static, ()> {
        match &self.store {
            Some(drive) if space == store::SPACE => Shelf::read(drive, space, key, into),
            _ => {
                if let Some(&row) = self.rows.get(&key).filter(|_| space == MEMORY) {
                    into.whole(self.memory[row].clone());
                }
                Box::pin(std::future::ready(()))
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
