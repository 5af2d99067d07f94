//! The serving side of data connections.
//!
//! A connection begins with a ticket and ends with it: when the control session that issued the ticket is gone, so
//! is everything opened with it. Words are answered in their order; the rows lie in a [`Pantry`] that all connections
//! share, so that each connection sends other pieces of the same row. While the next answer is not there, the
//! connection says so at every [`wire::BEAT`]: the other side can tell a slow drive from a cable that was pulled.
//! What was cancelled, or is over its patience, is answered without its bytes and not read for. Where peers read this
//! node's memory, a piece is lent instead of sent: its row stays until the peer says that it was taken.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::onesided::{Host, Lies};
use super::pantry::{Pantry, Use};
use super::wire::{self, ASK, Ask, BEAT, Head, PREAMBLE, Ticket, Want};
use super::{Listener, Metrics, Shelf, Stream};
use crate::base::doorway::{Doorway, Guest};
use crate::base::landing::About;
use crate::base::units;
use crate::tasks::{Kind, Tasks};

/// Data connections of peers at one time: two nodes with two rails need two; the rest is room for reconnects and
/// probes.
const CONNECTIONS: usize = 64;

/// Connections that have not shown a ticket yet, in all and from one address. Strangers take no peer's place.
const STRANGERS: usize = 32;
const STRANGERS_OF_ONE: usize = 8;

/// Answers that a connection may owe: more than a peer asks for at a time.
const OWED: usize = 4096;

/// Time for a ticket to arrive.
const TICKET_WAIT: Duration = Duration::from_secs(5);

/// Bytes of no meaning, sent or taken at a time.
const CHUNK: usize = 256 << 10;

/// Tickets of live control sessions. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Tickets(Arc<Mutex<Vec<Issued>>>);

/// Who shows a ticket.
#[derive(Clone, Debug)]
struct Session {
    /// The same for all connections with this ticket.
    number: u64,
    live: CancellationToken,
}

#[derive(Debug)]
struct Issued {
    peer: [u8; 32],
    generation: u64,
    ticket: Ticket,
    session: Session,
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
        let session = Session { number: rand::random(), live: CancellationToken::new() };
        issued.push(Issued { peer, generation, ticket, session });
        ticket
    }

    /// Ends everything that was opened with tickets of `peer`.
    pub fn revoke(&self, peer: [u8; 32]) {
        Self::drop_of(&mut self.0.lock(), peer);
    }

    fn drop_of(issued: &mut Vec<Issued>, peer: [u8; 32]) {
        issued.retain(|i| {
            if i.peer == peer {
                i.session.live.cancel();
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
    fn check(&self, shown: &Ticket) -> Option<Session> {
        let issued = self.0.lock();
        issued.iter().fold(None, |found, i| {
            if wire::same_secret(&i.ticket.0, &shown.0) { Some(i.session.clone()) } else { found }
        })
    }
}

/// Serves rows. Cheap to clone.
#[derive(Clone)]
pub struct Server {
    pantry: Pantry,
    tickets: Tickets,
    /// Longest time without progress of a write.
    patience: Duration,
    metrics: Metrics,
    tasks: Tasks,
    idle_bytes: Bytes,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("patience", &self.patience).finish_non_exhaustive()
    }
}

impl Server {
    /// All servers of a node that are clones of one share its memory.
    pub fn new(
        shelf: Arc<dyn Shelf>,
        tickets: Tickets,
        serve_memory: units::Bytes,
        patience: Duration,
        metrics: Metrics,
        tasks: &Tasks,
    ) -> Self {
        let pantry = Pantry::new(shelf, serve_memory.0, tasks);
        let idle_bytes = Bytes::from(vec![0xA5; CHUNK]);
        Self { pantry, tickets, patience, metrics, tasks: tasks.clone(), idle_bytes }
    }

    /// Accepts connections until the node stops.
    pub async fn run(self, mut listener: Listener) {
        let stopping = self.tasks.stopping();
        let doorway = Doorway::new(STRANGERS, STRANGERS_OF_ONE);
        let room = Arc::new(Semaphore::new(CONNECTIONS));
        let host = listener.host();
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
            let host = host.clone();
            self.tasks.spawn(Kind::Serving, "data connection", async move {
                tokio::select! {
                    () = stopping.cancelled() => {}
                    ended = server.converse(stream, guest, &room, host) => if let Err(error) = ended {
                        tracing::debug!(%error, "a data connection ended");
                    },
                }
            });
        }
    }

    async fn converse(
        &self,
        mut stream: Stream,
        guest: Guest,
        room: &Semaphore,
        host: Option<Arc<dyn Host>>,
    ) -> io::Result<()> {
        let admitted = self.admit(&mut stream).await?;
        drop(guest);
        let (Some(session), Ok(_place)) = (admitted, room.try_acquire()) else {
            self.metrics.refused.inc();
            return Err(io::Error::other("no valid ticket, or too many connections"));
        };
        stream.write_all(&[wire::ACCEPTED]).await?;
        let (from, to) = tokio::io::split(stream);
        let desk = Desk::new(self, session.number, host);
        tokio::select! {
            () = session.live.cancelled() => Err(io::Error::other("its control session is gone")),
            ended = desk.take_words(from) => ended,
            ended = desk.answer_all(to) => ended,
            forgotten = desk.watch_lent() => Err(forgotten),
        }
    }

    /// Checks the ticket.
    async fn admit(&self, stream: &mut Stream) -> io::Result<Option<Session>> {
        let mut preamble = [0; PREAMBLE];
        tokio::time::timeout(TICKET_WAIT, stream.read_exact(&mut preamble)).await??;
        Ok(wire::take_preamble(&preamble).ok().and_then(|ticket| self.tickets.check(&ticket)))
    }
}

/// What is known of a row, and the bytes of a piece as they lie.
type Part = (About, Vec<Bytes>);

/// An answer that is owed.
#[derive(Clone, Copy, Debug)]
struct Owed {
    ask: Ask,
    until: Option<Instant>,
    cancelled: bool,
}

/// One connection: what it was asked for and has not answered.
struct Desk<'a> {
    server: &'a Server,
    guest: u64,
    /// The first one is being answered.
    owed: Mutex<VecDeque<Owed>>,
    changed: Notify,
    host: Option<Arc<dyn Host>>,
    /// What the peer reads out of our memory, by the piece.
    lent: Mutex<HashMap<u64, Lent>>,
}

/// A piece that the peer reads, until it says that it has.
struct Lent {
    _bytes: Bytes,
    row: Use,
    length: u32,
    since: Instant,
}

impl Drop for Desk<'_> {
    fn drop(&mut self) {
        self.server.pantry.leave(self.guest);
    }
}

impl<'a> Desk<'a> {
    fn new(server: &'a Server, guest: u64, host: Option<Arc<dyn Host>>) -> Self {
        server.pantry.enter(guest);
        let (owed, changed, lent) = (Mutex::default(), Notify::new(), Mutex::default());
        Self { server, guest, owed, changed, host, lent }
    }

    /// Ends when the peer keeps a row for longer than it may.
    async fn watch_lent(&self) -> io::Error {
        let patience = self.server.patience;
        loop {
            tokio::time::sleep(patience / 4).await;
            let oldest = self.lent.lock().values().map(|lent| lent.since).min();
            if oldest.is_some_and(|since| since.elapsed() > patience) {
                return io::Error::new(io::ErrorKind::TimedOut, "a row that was lent was not taken");
            }
        }
    }

    /// The peer has read a piece, or does not want it.
    fn taken(&self, id: u64) {
        if let Some(mut lent) = self.lent.lock().remove(&id) {
            lent.row.sent(lent.length.into());
        }
    }

    /// Puts a piece where the peer can read it, when it asked for that and there is room.
    async fn lend(&self, ask: &Ask, piece: &[Bytes]) -> Option<Lies> {
        let host = self.host.clone().filter(|_| ask.want == Want::Read)?;
        let piece = piece.to_vec();
        tokio::task::spawn_blocking(move || host.lend(&piece)).await.ok()?
    }

    async fn take_words(&self, mut from: ReadHalf<Stream>) -> io::Result<()> {
        let mut word = [0; ASK];
        let mut sink = Vec::new();
        loop {
            from.read_exact(&mut word).await?;
            let refuse = |what: String| {
                self.server.metrics.refused.inc();
                io::Error::other(what)
            };
            let ask = Ask::decode(&word).map_err(|malformed| refuse(malformed.to_string()))?;
            match ask.want {
                Want::Ahead => self.server.pantry.ahead((self.guest, ask.fetch), &ask),
                Want::Cancel => self.cancel(&ask),
                Want::Sink => {
                    swallow(&mut from, ask.length as usize, &mut sink).await?;
                    self.owe(ask).map_err(refuse)?;
                }
                Want::Taken => self.taken(ask.id),
                Want::Pull | Want::Fill | Want::Meet | Want::Read => self.owe(ask).map_err(refuse)?,
            }
        }
    }

    fn owe(&self, ask: Ask) -> Result<(), String> {
        let patience = Duration::from_millis(ask.patience_ms.into());
        let until = (ask.patience_ms > 0).then(|| Instant::now() + patience);
        let mut owed = self.owed.lock();
        if owed.len() >= OWED {
            return Err(format!("more than {OWED} pieces asked for at once"));
        }
        owed.push_back(Owed { ask, until, cancelled: false });
        drop(owed);
        self.changed.notify_one();
        Ok(())
    }

    fn cancel(&self, ask: &Ask) {
        for owed in self.owed.lock().iter_mut() {
            owed.cancelled |= owed.ask.fetch == ask.fetch && (ask.id == 0 || owed.ask.id == ask.id);
        }
        if ask.id == 0 {
            self.server.pantry.cancel((self.guest, ask.fetch));
        }
        self.changed.notify_one();
    }

    fn front(&self) -> Option<Owed> {
        self.owed.lock().front().copied()
    }

    async fn answer_all(&self, mut to: WriteHalf<Stream>) -> io::Result<()> {
        loop {
            let Some(Owed { ask, .. }) = self.front() else {
                self.changed.notified().await;
                continue;
            };
            match ask.want {
                Want::Fill => self.fill(&mut to, &ask).await?,
                Want::Meet => {
                    let card = self.host.as_ref().map_or_else(Bytes::new, |host| host.card());
                    let length = u32::try_from(card.len()).map_err(io::Error::other)?;
                    let head = Head { length, ..Head::bare(wire::Kind::Card, &ask) };
                    self.send(&mut to, &head, vec![card]).await?;
                }
                Want::Sink => self.send(&mut to, &Head::bare(wire::Kind::Piece, &ask), Vec::new()).await?,
                _ => self.answer(&mut to, &ask).await?,
            }
            self.owed.lock().pop_front();
        }
    }

    /// Sends a piece, or says why not.
    async fn answer(&self, to: &mut WriteHalf<Stream>, ask: &Ask) -> io::Result<()> {
        let metrics = &self.server.metrics;
        match self.read(to, ask).await? {
            None => self.send(to, &Head::bare(wire::Kind::Gone, ask), Vec::new()).await,
            Some((_, None)) => {
                metrics.missing_rows.inc();
                self.send(to, &Head::bare(wire::Kind::Missing, ask), Vec::new()).await
            }
            Some((mut row, Some((About { position, checksum, .. }, piece)))) => {
                let &Ask { row_bytes, offset, length, .. } = ask;
                let head = Head {
                    position,
                    row_bytes,
                    checksum,
                    offset,
                    length,
                    ..Head::bare(wire::Kind::Piece, ask)
                };
                if let Some(Lies { at, bytes }) = self.lend(ask, &piece).await {
                    let lent = Lent { _bytes: bytes, row, length, since: Instant::now() };
                    // Lent before it is said: the answer to what is said may come at once.
                    if self.lent.lock().insert(ask.id, lent).is_some() {
                        return Err(io::Error::other("a piece is asked for that was not taken before"));
                    }
                    self.send(to, &Head { kind: wire::Kind::Lies, at, ..head }, Vec::new()).await?;
                } else {
                    self.send(to, &head, piece).await?;
                    row.sent(length.into());
                }
                metrics.sent_bytes.inc_by(length.into());
                if offset + length == row_bytes {
                    metrics.sent_rows.inc();
                }
                Ok(())
            }
        }
    }

    /// The piece of the first word that is owed; `None` when nobody waits for it any more. Says that it takes time.
    async fn read(&self, to: &mut WriteHalf<Stream>, ask: &Ask) -> io::Result<Option<(Use, Option<Part>)>> {
        let whose = (self.guest, ask.fetch);
        let reading = async {
            let mut row = self.server.pantry.hold(whose, ask).await;
            let from = ask.offset as usize;
            let part = row.part(from..from + ask.length as usize).await;
            (row, part)
        };
        tokio::pin!(reading);
        let mut beat = Instant::now() + BEAT;
        loop {
            let wanted = self.front().filter(|owed| !owed.cancelled);
            let Some(Owed { until, .. }) =
                wanted.filter(|o| o.until.is_none_or(|until| Instant::now() < until))
            else {
                return Ok(None);
            };
            tokio::select! {
                biased;
                read = &mut reading => return Ok(Some(read)),
                () = self.changed.notified() => {}
                () = tokio::time::sleep_until(until.map_or(beat, |until| until.min(beat))) => {
                    if Instant::now() >= beat {
                        self.send(to, &Head::bare(wire::Kind::Wait, ask), Vec::new()).await?;
                        beat = Instant::now() + BEAT;
                    }
                }
            }
        }
    }

    async fn send(&self, to: &mut WriteHalf<Stream>, head: &Head, payload: Vec<Bytes>) -> io::Result<()> {
        let head = head.encode();
        let mut parts = payload.into_iter();
        let mut both = Buf::chain(&head[..], parts.next().unwrap_or_default());
        while both.has_remaining() {
            tokio::time::timeout(self.server.patience, to.write_buf(&mut both)).await??;
        }
        for mut part in parts {
            while part.has_remaining() {
                tokio::time::timeout(self.server.patience, to.write_buf(&mut part)).await??;
            }
        }
        Ok(())
    }

    async fn fill(&self, to: &mut WriteHalf<Stream>, ask: &Ask) -> io::Result<()> {
        let head = Head { length: ask.length, ..Head::bare(wire::Kind::Piece, ask) };
        self.send(to, &head, Vec::new()).await?;
        let mut left = ask.length as usize;
        while left > 0 {
            let chunk = self.server.idle_bytes.slice(..left.min(CHUNK));
            left -= chunk.len();
            let mut chunk = chunk;
            while chunk.has_remaining() {
                tokio::time::timeout(self.server.patience, to.write_buf(&mut chunk)).await??;
            }
        }
        Ok(())
    }
}

/// Takes bytes of no meaning.
async fn swallow(from: &mut (impl AsyncRead + Unpin), bytes: usize, into: &mut Vec<u8>) -> io::Result<()> {
    into.resize(CHUNK, 0);
    let mut left = bytes;
    while left > 0 {
        let most = left.min(CHUNK);
        match from.read(&mut into[..most]).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => left -= n,
        }
    }
    Ok(())
}
