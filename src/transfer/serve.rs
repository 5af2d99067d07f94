//! The serving side of data connections.
//!
//! A connection begins with a ticket and ends with it: when the control session that issued the ticket is gone, so
//! is everything opened with it. Rows are read ahead, but all connections together hold at most `serve_memory` bytes
//! of rows. Memory is set aside before a read starts and given back when the row is sent; a connection waits for
//! memory only while it holds none, so connections cannot wait for each other in a circle.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Buf;
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesOrdered;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use super::wire::{self, Head, PREAMBLE, Request, RowHead, Ticket};
use super::{Listener, Metrics, Record, Shelf, Stream};
use crate::base::block::{RowKey, Space};
use crate::base::doorway::{Doorway, Guest};
use crate::base::units::Bytes;
use crate::tasks::{Kind, Tasks};

/// Data connections of peers at one time: two nodes with two rails need two; the rest is room for reconnects.
const CONNECTIONS: usize = 64;

/// Connections that have not shown a ticket yet, in all and from one address. Strangers take no peer's place.
const STRANGERS: usize = 32;
const STRANGERS_OF_ONE: usize = 8;

/// Requests read ahead of the row being sent. Each is at most 64 keys.
const REQUESTS_AHEAD: usize = 8;

/// Reads in flight for one connection.
const READS_AHEAD: usize = 16;

/// Time for a ticket to arrive.
const TICKET_WAIT: Duration = Duration::from_secs(5);

/// Memory is set aside in units of this many bytes, so that a semaphore's 32-bit counts are enough for any size.
const UNIT: u64 = 4096;

/// Tickets of live control sessions. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Tickets(Arc<Mutex<Vec<Issued>>>);

#[derive(Debug)]
struct Issued {
    peer: [u8; 32],
    generation: u64,
    ticket: Ticket,
    live: CancellationToken,
}

impl Tickets {
    /// The ticket of `peer` in its `generation`: the same one until it is revoked. Those of other generations end.
    pub fn issue(&self, peer: [u8; 32], generation: u64) -> Ticket {
        let mut issued = self.0.lock();
        if let Some(there) = issued.iter().find(|i| i.peer == peer && i.generation == generation) {
            return there.ticket;
        }
        Self::drop_of(&mut issued, peer);
        let ticket = Ticket(rand::random());
        issued.push(Issued { peer, generation, ticket, live: CancellationToken::new() });
        ticket
    }

    /// Ends everything that was opened with tickets of `peer`.
    pub fn revoke(&self, peer: [u8; 32]) {
        Self::drop_of(&mut self.0.lock(), peer);
    }

    fn drop_of(issued: &mut Vec<Issued>, peer: [u8; 32]) {
        issued.retain(|i| {
            if i.peer == peer {
                i.live.cancel();
            }
            i.peer != peer
        });
    }

    /// Whether a server would let the bearer of this ticket in now.
    #[cfg(test)]
    pub fn admits(&self, shown: &Ticket) -> bool {
        self.check(shown).is_some()
    }

    /// Tickets that are good now.
    #[cfg(test)]
    pub fn live(&self) -> usize {
        self.0.lock().len()
    }

    /// Looks at every ticket, whichever matches, so that the time taken tells nothing.
    fn check(&self, shown: &Ticket) -> Option<CancellationToken> {
        let issued = self.0.lock();
        issued.iter().fold(None, |found, i| {
            if wire::same_secret(&i.ticket.0, &shown.0) { Some(i.live.clone()) } else { found }
        })
    }
}

/// Serves rows. Cheap to clone.
#[derive(Clone)]
pub struct Server {
    shelf: Arc<dyn Shelf>,
    tickets: Tickets,
    memory: Arc<Semaphore>,
    units: u32,
    /// Longest time without progress of a write.
    patience: Duration,
    metrics: Metrics,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("units", &self.units).finish_non_exhaustive()
    }
}

impl Server {
    pub fn new(
        shelf: Arc<dyn Shelf>,
        tickets: Tickets,
        serve_memory: Bytes,
        patience: Duration,
        metrics: Metrics,
    ) -> Self {
        let units = u32::try_from(serve_memory.0.div_ceil(UNIT).max(1)).unwrap_or(u32::MAX);
        let memory = Arc::new(Semaphore::new(units as usize));
        Self { shelf, tickets, memory, units, patience, metrics }
    }

    /// Accepts connections until the node stops.
    pub async fn run(self, mut listener: Listener, tasks: Tasks) {
        let stopping = tasks.stopping();
        let doorway = Doorway::new(STRANGERS, STRANGERS_OF_ONE);
        let room = Arc::new(Semaphore::new(CONNECTIONS));
        loop {
            let accepted = tokio::select! {
                () = stopping.cancelled() => return,
                accepted = listener.accept() => accepted,
            };
            let (stream, from) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of descriptors, mostly: others may close some meanwhile.
                    tracing::warn!(%error, "failed to accept a data connection");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let Some(guest) = doorway.admit(from) else {
                self.metrics.refused.inc();
                continue;
            };
            let (server, stopping, room) = (self.clone(), stopping.clone(), room.clone());
            tasks.spawn(Kind::Serving, "data connection", async move {
                tokio::select! {
                    () = stopping.cancelled() => {}
                    ended = server.converse(stream, guest, &room) => if let Err(error) = ended {
                        tracing::debug!(%error, "a data connection ended");
                    },
                }
            });
        }
    }

    async fn converse(&self, mut stream: Stream, guest: Guest, room: &Semaphore) -> io::Result<()> {
        let admitted = self.admit(&mut stream).await?;
        drop(guest);
        let (Some(live), Ok(_place)) = (admitted, room.try_acquire()) else {
            self.metrics.refused.inc();
            return Err(io::Error::other("no valid ticket, or too many connections"));
        };
        stream.write_all(&[wire::ACCEPTED]).await?;
        let (from, to) = tokio::io::split(stream);
        let (sender, receiver) = mpsc::channel(REQUESTS_AHEAD);
        tokio::select! {
            () = live.cancelled() => Err(io::Error::other("its control session is gone")),
            ended = self.take_requests(from, sender) => ended,
            ended = self.send_rows(to, receiver) => ended,
        }
    }

    /// Checks the ticket.
    async fn admit(&self, stream: &mut Stream) -> io::Result<Option<CancellationToken>> {
        let mut preamble = [0; PREAMBLE];
        tokio::time::timeout(TICKET_WAIT, stream.read_exact(&mut preamble)).await??;
        Ok(wire::take_preamble(&preamble).ok().and_then(|ticket| self.tickets.check(&ticket)))
    }

    async fn take_requests(
        &self,
        mut from: ReadHalf<Stream>,
        requests: mpsc::Sender<Request>,
    ) -> io::Result<()> {
        loop {
            let length = from.read_u32_le().await? as usize;
            if length > wire::MAX_REQUEST {
                self.metrics.refused.inc();
                return Err(io::Error::other(format!("a request of {length} bytes")));
            }
            let mut frame = vec![0; length];
            from.read_exact(&mut frame).await?;
            let request = Request::decode(&frame).map_err(|malformed| {
                self.metrics.refused.inc();
                io::Error::other(malformed)
            })?;
            if requests.send(request).await.is_err() {
                return Ok(());
            }
        }
    }

    async fn send_rows(
        &self,
        mut to: WriteHalf<Stream>,
        mut requests: mpsc::Receiver<Request>,
    ) -> io::Result<()> {
        let mut wanted: VecDeque<Wanted> = VecDeque::new();
        let mut reads: FuturesOrdered<BoxFuture<'static, Read>> = FuturesOrdered::new();
        loop {
            while wanted.len() < READS_AHEAD {
                let request = match requests.try_recv() {
                    Ok(request) => request,
                    Err(_) if wanted.is_empty() && reads.is_empty() => match requests.recv().await {
                        Some(request) => request,
                        None => return Ok(()),
                    },
                    Err(_) => break,
                };
                wanted.extend(Wanted::of(&request));
            }
            while reads.len() < READS_AHEAD
                && let Some(next) = wanted.front()
            {
                let units = self.units_for(next.row_bytes);
                let memory = match self.memory.clone().try_acquire_many_owned(units) {
                    Ok(memory) => memory,
                    Err(_) if reads.is_empty() => {
                        self.memory.clone().acquire_many_owned(units).await.map_err(io::Error::other)?
                    }
                    Err(_) => break,
                };
                let next = wanted.pop_front().expect("front() was there");
                reads.push_back(next.read(&*self.shelf, memory));
            }
            if let Some(read) = reads.next().await {
                tokio::time::timeout(self.patience, self.send(&mut to, read)).await??;
            }
        }
    }

    /// A row larger than all memory is served alone.
    fn units_for(&self, row_bytes: u32) -> u32 {
        let units = u64::from(row_bytes).div_ceil(UNIT);
        u32::try_from(units).unwrap_or(u32::MAX).min(self.units)
    }

    async fn send(&self, to: &mut WriteHalf<Stream>, read: Read) -> io::Result<()> {
        let Read { wanted, record, memory } = read;
        // What is larger than what was set aside is not sent: its size is not the one both sides agreed on.
        let record = record.filter(|r| r.payload.len() == wanted.row_bytes as usize);
        let row = record.as_ref().map(|r| RowHead {
            position: r.position,
            length: wanted.row_bytes,
            checksum: r.checksum,
        });
        let head = Head { id: wanted.id, index: wanted.index, space: wanted.space, key: wanted.key, row };
        let head = head.encode();
        match record {
            Some(record) => {
                let length = record.payload.len() as u64;
                to.write_all_buf(&mut Buf::chain(&head[..], record.payload)).await?;
                self.metrics.sent_rows.inc();
                self.metrics.sent_bytes.inc_by(length);
            }
            None => {
                to.write_all(&head).await?;
                self.metrics.missing_rows.inc();
            }
        }
        drop(memory);
        Ok(())
    }
}

/// One key of a request.
struct Wanted {
    id: u64,
    index: u32,
    space: Space,
    key: RowKey,
    row_bytes: u32,
}

/// A finished read, with the memory it holds.
struct Read {
    wanted: Wanted,
    record: Option<Record>,
    memory: OwnedSemaphorePermit,
}

impl Wanted {
    fn of(request: &Request) -> impl Iterator<Item = Self> + '_ {
        let &Request { id, space, row_bytes, ref keys } = request;
        (0..).zip(keys).map(move |(index, &key)| Self { id, index, space, key, row_bytes })
    }

    fn read(self, shelf: &dyn Shelf, memory: OwnedSemaphorePermit) -> BoxFuture<'static, Read> {
        let record = shelf.read(self.space, self.key);
        Box::pin(async move { Read { record: record.await, wanted: self, memory } })
    }
}
