//! The fetching side: rails, each with the connection that it owns.
//!
//! What is asked for and what becomes of an answer is decided in [`super::line`]; here are the socket, the clock and
//! the waiting. Each payload goes into its row in the portions in which the socket has it. A connection that is over,
//! by an error or by silence, gives what flew on it to the other rails, and the rail dials again.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::line::{self, Behind, Line, ToRead};
use super::onesided::Reader;
use super::piece::Piece;
use super::pool::{PIECE_BYTES, Pool, RailStatus};
use super::probe::{self, Probe, Way};
use super::wait::Waits;
use super::wire::{self, Ask, HEAD, Head, Ticket, Want};
use super::{Fabric, Metrics, Path, Reason, Stream};
use crate::base::block::RowItem;
use crate::base::clock::Micros;
use crate::base::frame::Outcome;
use crate::base::rows::Rows;
use crate::tasks::{Kind, Tasks};

/// How often a rail without work looks whether it has to help another one.
const HELP: Duration = Duration::from_millis(20);

/// Bytes taken for nothing at a time, for pieces that nobody waits for any more.
const SCRATCH: usize = 64 << 10;

/// A row up to this size is verified by the rail itself, from the processor's cache; a larger one beside it.
const VERIFY_HERE: usize = 256 << 10;

/// Time to open a connection on a local network: one lost packet is sent again after a second.
const CONNECT_WAIT: Duration = Duration::from_millis(1_200);

/// Time for a library to open its way to the other side's memory.
const READER_WAIT: Duration = Duration::from_secs(10);

/// After so many connections on which reads failed before one had worked, a rail goes on without reads.
const FRUITLESS: u32 = 2;

const BACKOFF_FIRST: Duration = Duration::from_millis(100);
const BACKOFF_LAST: Duration = Duration::from_secs(1);

/// How rows are fetched.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Longest time without an answer of the peer, even when it is alive.
    pub patience: Duration,
    pub piece_bytes: usize,
}

/// Fetches rows from one peer in one of its generations. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Fetcher {
    pool: Arc<Pool>,
    /// When the pool's time began.
    epoch: Instant,
    paths: Arc<[Path]>,
    fabric: Fabric,
    ticket: Ticket,
    metrics: Metrics,
    closed: CancellationToken,
}

impl Fetcher {
    /// Opens a rail along each path to `addresses` and keeps it open until [`Fetcher::close`].
    pub fn start(
        fabric: &Fabric,
        addresses: &[String],
        ticket: Ticket,
        patience: Duration,
        metrics: &Metrics,
        tasks: &Tasks,
    ) -> Self {
        let options = Options { patience, piece_bytes: PIECE_BYTES };
        Self::along(fabric, fabric.paths(addresses), ticket, options, metrics, tasks)
    }

    /// As [`Fetcher::start`], along these paths.
    pub fn along(
        fabric: &Fabric,
        paths: Vec<Path>,
        ticket: Ticket,
        options: Options,
        metrics: &Metrics,
        tasks: &Tasks,
    ) -> Self {
        let pool = Arc::new(Pool::new(paths.clone(), options.piece_bytes, metrics));
        let (closed, epoch) = (tasks.stopping().child_token(), Instant::now());
        for number in 0..paths.len() {
            let rail = Rail {
                fabric: fabric.clone(),
                number,
                ticket,
                patience: options.patience,
                pool: pool.clone(),
                epoch,
                metrics: metrics.clone(),
            };
            let closed = closed.clone();
            tasks.spawn(Kind::Serving, "rail", async move { rail.run(&closed).await });
        }
        let (fabric, metrics) = (fabric.clone(), metrics.clone());
        Self { pool, epoch, paths: paths.into(), fabric, ticket, metrics, closed }
    }

    /// Ends all rails; everything that is being fetched is failed at once.
    pub fn close(&self) {
        self.closed.cancel();
    }

    /// How each rail is, in the order of the paths.
    pub fn rails(&self) -> Vec<RailStatus> {
        self.pool.rails()
    }

    /// Moves `bytes` of no meaning over connections of their own, along one rail (by its place in
    /// [`Fetcher::rails`]) or along all at once: what the cables carry, to be compared with the kernel's counters.
    ///
    /// # Errors
    /// When there is no such rail, or a connection fails.
    pub async fn probe(&self, rail: Option<usize>, way: Way, bytes: u64) -> io::Result<Probe> {
        let paths = match rail {
            None => &self.paths[..],
            Some(rail) => self.paths.get(rail..=rail).ok_or(io::ErrorKind::NotFound)?,
        };
        probe::probe(&self.fabric, paths, self.ticket, way, bytes).await
    }

    /// Fetches `items` into their rows, in their order. After `deadline` nothing more is accepted. When this ends,
    /// or is dropped, nothing of it touches the rows any more, and the peer is told that nobody waits.
    pub async fn fetch(
        &self,
        rows: &Arc<Rows>,
        items: &[RowItem],
        deadline: Option<Instant>,
    ) -> Vec<Outcome> {
        if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            self.metrics.failed(Reason::Deadline, items.len());
            return vec![Outcome::Failed; items.len()];
        }
        let until = deadline.map(|deadline| micros(self.epoch, deadline));
        let waits = Waits::new(&self.pool, rows, items, until);
        let late = async {
            match deadline {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(late);
        loop {
            if let Some(over) = waits.over(micros(self.epoch, Instant::now()), self.closed.is_cancelled()) {
                let outcomes = waits.end(over);
                waits.landed().await;
                return outcomes;
            }
            tokio::select! {
                biased;
                () = waits.settled() => {}
                () = self.closed.cancelled() => {}
                () = &mut late => {}
            }
        }
    }
}

/// The pool's time at a moment.
fn micros(epoch: Instant, at: Instant) -> Micros {
    Micros::default().plus(at.saturating_duration_since(epoch))
}

/// One connection along one path, opened again whenever it ends.
struct Rail {
    fabric: Fabric,
    number: usize,
    ticket: Ticket,
    patience: Duration,
    pool: Arc<Pool>,
    epoch: Instant,
    metrics: Metrics,
}

impl Rail {
    fn now(&self) -> Micros {
        micros(self.epoch, Instant::now())
    }

    async fn run(self, closed: &CancellationToken) {
        let path = self.pool.path(self.number).clone();
        let mut pause = BACKOFF_FIRST;
        let mut fruitless = 0;
        loop {
            let opened = tokio::select! {
                () = closed.cancelled() => break,
                opened = self.open(&path, fruitless < FRUITLESS) => opened,
            };
            match opened {
                Ok((stream, reader)) => {
                    pause = BACKOFF_FIRST;
                    let now = self.now();
                    self.pool.up(self.number, now);
                    let line = Line::new(self.number, &self.pool, &self.metrics, self.patience, now);
                    let mut talk = Talk::new(stream, line, reader, &self);
                    let error = tokio::select! {
                        () = closed.cancelled() => break,
                        error = talk.serve() => error,
                    };
                    fruitless =
                        if talk.read_something { 0 } else { fruitless + u32::from(talk.read_nothing) };
                    if fruitless == FRUITLESS {
                        tracing::warn!(rail = path.name, %error, "reads fail from the start: bytes are sent from now on");
                    }
                    tracing::warn!(rail = path.name, to = path.remote, %error, "a rail went down");
                }
                Err(error) => {
                    tracing::debug!(rail = path.name, to = path.remote, %error, "failed to open a rail");
                }
            }
            self.pool.down(self.number, false);
            if closed.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
                break;
            }
            pause = (pause * 2).min(BACKOFF_LAST);
        }
        self.pool.down(self.number, true);
    }

    /// A connection, and where both sides can, the way to read the other one's memory.
    async fn open(&self, path: &Path, read: bool) -> io::Result<(Stream, Option<Reader>)> {
        let mut stream = open(&self.fabric, path, self.ticket).await?;
        let Some(remote) = self.fabric.remote().filter(|_| read) else { return Ok((stream, None)) };
        let card = tokio::time::timeout(CONNECT_WAIT, meet(&mut stream)).await??;
        if card.is_empty() {
            tracing::info!(
                rail = path.name,
                to = path.remote,
                "its memory cannot be read there: bytes are sent"
            );
            return Ok((stream, None));
        }
        let reader = tokio::time::timeout(READER_WAIT, remote.reader(path, card)).await;
        match reader.unwrap_or_else(|late| Err(late.into())) {
            Ok(reader) => Ok((stream, Some(reader))),
            Err(error) => {
                let (rail, to) = (&path.name, &path.remote);
                tracing::warn!(rail, to, %error, "memory of the other side cannot be read: bytes are sent");
                Ok((stream, None))
            }
        }
    }
}

/// Asks how the other side's memory is read.
async fn meet(stream: &mut Stream) -> io::Result<Bytes> {
    stream.write_all(&Ask::plain(Want::Meet, 0, 0, 0).encode()).await?;
    let mut head = [0; HEAD];
    stream.read_exact(&mut head).await?;
    let head = Head::decode(&head).map_err(io::Error::other)?;
    if head.kind != wire::Kind::Card {
        return Err(io::Error::other("another answer than the one asked for"));
    }
    let mut card = vec![0; head.length as usize];
    stream.read_exact(&mut card).await?;
    Ok(card.into())
}

/// Opens a connection and shows the ticket, within [`CONNECT_WAIT`].
pub(super) async fn open(fabric: &Fabric, path: &Path, ticket: Ticket) -> io::Result<Stream> {
    let open = async {
        let mut stream = fabric.connect(path).await?;
        stream.write_all(&wire::preamble(&ticket)).await?;
        match stream.read_u8().await? {
            wire::ACCEPTED => Ok(stream),
            other => Err(io::Error::other(format!("the ticket was answered with {other}"))),
        }
    };
    tokio::time::timeout(CONNECT_WAIT, open).await?
}

/// A connection, and the line that says what to do with it.
struct Talk<'a> {
    rail: &'a Rail,
    stream: Stream,
    line: Line,
    reader: Option<Reader>,
    /// Whether a read of the other side's memory has worked, and whether one has failed.
    read_something: bool,
    read_nothing: bool,
    /// Words not written yet, and how far they are.
    words: Vec<u8>,
    written: usize,
    head: [u8; HEAD],
    head_got: usize,
    scratch: Box<[u8]>,
}

impl<'a> Talk<'a> {
    fn new(stream: Stream, line: Line, reader: Option<Reader>, rail: &'a Rail) -> Self {
        Self {
            rail,
            stream,
            line,
            reader,
            read_something: false,
            read_nothing: false,
            words: Vec::new(),
            written: 0,
            head: [0; HEAD],
            head_got: 0,
            scratch: vec![0; SCRATCH].into(),
        }
    }

    /// Asks and receives until the connection fails; the error says how. Cancel-safe: every step is booked when it
    /// is done.
    async fn serve(&mut self) -> io::Error {
        let rail = self.rail;
        loop {
            let (words, reader) = (&mut self.words, &mut self.reader);
            let reads = |rows: &Arc<Rows>| reader.as_mut().is_some_and(|reader| reader.takes(rows));
            self.line.ask(rail.now(), reads, |ask| words.extend_from_slice(&ask.encode()));
            let until = self.line.until().map(|until| rail.epoch + until.since(Micros::default()));
            let helps = until.is_none() && rail.pool.is_busy();
            let wake = until.unwrap_or_else(|| Instant::now() + HELP);
            tokio::select! {
                moved = std::future::poll_fn(|cx| self.step(cx)) => if let Err(error) = moved {
                    return error;
                },
                () = rail.pool.rung(rail.number) => {}
                () = tokio::time::sleep_until(wake), if until.is_some() || helps => {
                    if self.line.is_over(rail.now()) {
                        return io::Error::new(io::ErrorKind::TimedOut, "no bytes came in time");
                    }
                }
            }
        }
    }

    /// Writes and reads what can be without waiting. Ready when a piece was answered or the connection failed.
    fn step(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Poll::Ready(Err(error)) = self.poll_write(cx) {
            return Poll::Ready(Err(error));
        }
        if self.line.behind().is_some() && self.poll_behind(cx)?.is_ready() {
            return Poll::Ready(Ok(()));
        }
        if self.line.left() == 0 {
            ready!(self.poll_head(cx))?;
        }
        while self.line.left() > 0 {
            // The pieces before it are being read: their turn is first, and it waits in the socket.
            if self.line.behind().is_some() {
                return Poll::Pending;
            }
            ready!(self.poll_payload(cx))?;
        }
        Poll::Ready(Ok(()))
    }

    /// Books what has been read out of the other side's memory, and what came behind it. Ready when something was.
    fn poll_behind(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let read = match (self.line.behind(), &mut self.reader) {
            (Some(Behind::Nothing), _) => false,
            (Some(Behind::Read), Some(reader)) => {
                let ended = ready!(reader.poll_ended(cx));
                self.read_something |= matches!(ended, Ok(true));
                self.read_nothing = ended.is_err();
                ended?
            }
            _ => return Poll::Pending,
        };
        if let Some(row) = self.line.on_read(self.rail.now(), read) {
            self.finish(row);
        }
        Poll::Ready(Ok(()))
    }

    fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.written < self.words.len() {
            let n = ready!(Pin::new(&mut self.stream).poll_write(cx, &self.words[self.written..]))?;
            if n == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.written += n;
        }
        self.words.clear();
        self.written = 0;
        Poll::Ready(Ok(()))
    }

    fn poll_head(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.head_got < HEAD {
            let into = &mut self.head[self.head_got..];
            self.head_got += ready!(poll_some(&mut self.stream, cx, into))?;
        }
        self.head_got = 0;
        let head = Head::decode(&self.head).map_err(io::Error::other)?;
        let to_read =
            self.line.on_head(self.rail.now(), &head, self.reader.is_some()).map_err(io::Error::other)?;
        if let (Some(ToRead { piece, turn, at }), Some(reader)) = (to_read, &self.reader) {
            reader.read(&piece, turn, at);
        }
        Poll::Ready(Ok(()))
    }

    /// Reads one portion of a payload, into its row when somebody waits for it.
    fn poll_payload(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let stream = &mut self.stream;
        let n = match self.line.place(|rest| poll_some(stream, cx, rest)) {
            Some(read) => ready!(read)?,
            None => {
                let into = &mut self.scratch[..self.line.left().min(SCRATCH)];
                ready!(poll_some(&mut self.stream, cx, into))?
            }
        };
        if let Some(row) = self.line.on_bytes(self.rail.now(), n) {
            self.finish(row);
        }
        Poll::Ready(Ok(()))
    }

    /// All pieces of a row are here.
    fn finish(&self, last: Piece) {
        let metrics = self.rail.metrics.clone();
        if last.fetch.row_bytes() <= VERIFY_HERE {
            line::verify(&last, &metrics);
        } else {
            // It ends by itself within milliseconds; the gates wait for it when they are closed meanwhile.
            tokio::task::spawn_blocking(move || line::verify(&last, &metrics));
        }
    }
}

/// One read that does not wait; zero bytes are the end of the connection.
fn poll_some(stream: &mut Stream, cx: &mut Context<'_>, into: &mut [u8]) -> Poll<io::Result<usize>> {
    let mut buffer = ReadBuf::new(into);
    ready!(Pin::new(stream).poll_read(cx, &mut buffer))?;
    match buffer.filled().len() {
        0 => Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into())),
        n => Poll::Ready(Ok(n)),
    }
}
