//! The fetching side: rails that pull pieces, and what each rail does with the bytes that come.
//!
//! A rail owns its connection. It keeps as many pieces in flight as the line gives it ([`super::share`]), and reads
//! each payload into its row in the portions in which the socket has it. A piece whose gate was closed meanwhile, or
//! that another rail has taken over, is read to nowhere: the connection stays usable for the other fetches that share
//! it. The serving side says at least every [`wire::BEAT`] that it is there; a rail that hears nothing for [`SILENCE`]
//! gives its connection up, what flew on it goes to the other rails, and it dials again.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::onesided::Reader;
use super::piece::{Ended, Fetch, Piece, Taken};
use super::pool::{PIECE_BYTES, Pool, RailStatus};
use super::probe::{self, Probe, Way};
use super::wire::{self, Ask, HEAD, Head, Ticket, Want};
use super::{Fabric, Metrics, Path, Reason, Stream};
use crate::base::block::RowItem;
use crate::base::checksum::crc64;
use crate::base::frame::Outcome;
use crate::base::mutant::{self, Mutant};
use crate::base::rows::Rows;
use crate::tasks::{Kind, Tasks};

/// Longest time without a byte while the serving side owes an answer: ten of its beats. A lost packet is sent again
/// after 0.2, 0.4 and 0.8 seconds, so two losses in a row are survived.
const SILENCE: Duration = Duration::from_secs(1);

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
        let closed = tasks.stopping().child_token();
        for number in 0..paths.len() {
            let rail = Rail {
                fabric: fabric.clone(),
                number,
                ticket,
                patience: options.patience,
                pool: pool.clone(),
                metrics: metrics.clone(),
            };
            let closed = closed.clone();
            tasks.spawn(Kind::Serving, "rail", async move { rail.run(&closed).await });
        }
        Self { pool, paths: paths.into(), fabric: fabric.clone(), ticket, metrics: metrics.clone(), closed }
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
        let waits = Waits { fetch: self.pool.fetch(rows, items, deadline), pool: &self.pool };
        let fetch = &waits.fetch;
        let late = async {
            match deadline {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        let rest = tokio::select! {
            biased;
            () = fetch.settled() => None,
            () = self.closed.cancelled() => Some(Reason::Connection),
            () = late => Some(Reason::Deadline),
        };
        if let Some(reason) = rest {
            self.metrics.failed(reason, fetch.fail_rest());
            self.pool.cancel(fetch);
        }
        let outcomes = fetch.close();
        fetch.landed().await;
        outcomes
    }
}

/// The side that waits for a fetch. However it ends, the gates are closed and nothing lands any more. Dropped in the
/// middle of reads of the peer's memory, it blocks until they have ended, which they do within a second.
struct Waits<'a> {
    fetch: Arc<Fetch>,
    pool: &'a Pool,
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        let given_up = !self.fetch.is_settled();
        self.fetch.close();
        if given_up {
            self.pool.cancel(&self.fetch);
        }
        self.fetch.wait_landed();
    }
}

/// One connection along one path, opened again whenever it ends.
struct Rail {
    fabric: Fabric,
    number: usize,
    ticket: Ticket,
    patience: Duration,
    pool: Arc<Pool>,
    metrics: Metrics,
}

impl Rail {
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
                    self.pool.up(self.number);
                    let mut line = Line::new(stream, self.number, &self.pool, &self.metrics, reader);
                    let error = tokio::select! {
                        () = closed.cancelled() => break,
                        error = line.serve(self.patience) => error,
                    };
                    fruitless =
                        if line.read_something { 0 } else { fruitless + u32::from(line.read_nothing) };
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
}

impl Rail {
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

/// A piece that was asked for.
#[derive(Debug)]
struct Expected {
    number: u64,
    piece: Piece,
    turn: u32,
}

/// A payload that is arriving.
#[derive(Debug)]
struct Payload {
    expected: Expected,
    length: usize,
    got: usize,
    /// False: nobody waits for it, and it is read to nowhere.
    wanted: bool,
}

/// An answer whose turn it is to be booked after those before it: a piece that is being read out of the other side's
/// memory, or one that did not come while such a read was under way.
#[derive(Debug)]
enum Behind {
    Read(Expected),
    Nothing,
}

/// An open connection and everything in flight on it.
struct Line {
    stream: Stream,
    reader: Option<Reader>,
    behind: VecDeque<Behind>,
    /// Whether a read of the other side's memory has worked, and whether one has failed.
    read_something: bool,
    read_nothing: bool,
    rail: usize,
    pool: Arc<Pool>,
    metrics: Metrics,
    /// Words not written yet, and how far they are.
    words: Vec<u8>,
    written: usize,
    expected: VecDeque<Expected>,
    head: [u8; HEAD],
    head_got: usize,
    payload: Option<Payload>,
    scratch: Box<[u8]>,
    /// Last byte of any kind, and last byte or answer that somebody waited for.
    heard: Instant,
    moved: Instant,
}

impl Line {
    fn new(stream: Stream, rail: usize, pool: &Arc<Pool>, metrics: &Metrics, reader: Option<Reader>) -> Self {
        let now = Instant::now();
        Self {
            stream,
            reader,
            behind: VecDeque::new(),
            read_something: false,
            read_nothing: false,
            rail,
            pool: pool.clone(),
            metrics: metrics.clone(),
            words: Vec::new(),
            written: 0,
            expected: VecDeque::new(),
            head: [0; HEAD],
            head_got: 0,
            payload: None,
            scratch: vec![0; SCRATCH].into(),
            heard: now,
            moved: now,
        }
    }

    /// Asks and receives until the connection fails; the error says how. Cancel-safe: every step is booked when it
    /// is done.
    async fn serve(&mut self, patience: Duration) -> io::Error {
        let (pool, rail) = (self.pool.clone(), self.rail);
        loop {
            self.ask();
            let busy = self.is_busy();
            let until = self.until(patience);
            let helps = !busy && pool.is_busy();
            let wake = if busy { until } else { Instant::now() + HELP };
            tokio::select! {
                moved = std::future::poll_fn(|cx| self.step(cx)) => if let Err(error) = moved {
                    return error;
                },
                () = pool.rung(rail) => {}
                () = tokio::time::sleep_until(wake), if busy || helps => {
                    let until = self.until(patience);
                    if busy && Instant::now() >= until {
                        return io::Error::new(io::ErrorKind::TimedOut, "no bytes came in time");
                    }
                }
            }
        }
    }

    /// When this has been silent for too long. Reads of the other side's memory are watched by who carries them out.
    fn until(&self, patience: Duration) -> Instant {
        let patient = self.moved + patience;
        let owed = !self.expected.is_empty() || self.payload.is_some();
        if owed { patient.min(self.heard + SILENCE) } else { patient }
    }

    fn is_busy(&self) -> bool {
        !self.expected.is_empty() || self.payload.is_some() || !self.behind.is_empty()
    }

    /// Puts into words what is to be forgotten, what is wanted next, and what soon.
    fn ask(&mut self) {
        for (fetch, id) in self.pool.cancels(self.rail) {
            self.say(&Ask::plain(Want::Cancel, fetch, id, 0));
        }
        if !self.is_busy() {
            (self.heard, self.moved) = (Instant::now(), Instant::now());
        }
        while let Some((fetch, row)) = self.pool.next_ahead() {
            self.say(&word(Want::Ahead, &fetch, row, 0, 0, 0));
        }
        while let Some(given) = self.pool.pull(self.rail) {
            let (number, piece, turn) = (given.number, given.piece, given.begun);
            let reads = self.reader.as_mut().is_some_and(|reader| reader.takes(piece.rows()));
            let want = if reads { Want::Read } else { Want::Pull };
            let ask = word(want, &piece.fetch, piece.row, number, piece.offset(), piece.length());
            self.say(&ask);
            self.expected.push_back(Expected { number, piece, turn });
        }
    }

    fn say(&mut self, ask: &Ask) {
        self.words.extend_from_slice(&ask.encode());
    }

    /// Writes and reads what can be without waiting. Ready when a piece was answered or the connection failed.
    fn step(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Poll::Ready(Err(error)) = self.poll_write(cx) {
            return Poll::Ready(Err(error));
        }
        if !self.behind.is_empty() && self.poll_behind(cx)?.is_ready() {
            return Poll::Ready(Ok(()));
        }
        loop {
            // The pieces before it are being read: their turn is first, and it waits in the socket.
            if self.payload.is_some() && !self.behind.is_empty() {
                return Poll::Pending;
            }
            match self.payload.take() {
                None => {
                    ready!(self.poll_head(cx))?;
                    if self.payload.is_none() {
                        return Poll::Ready(Ok(()));
                    }
                }
                Some(mut payload) => match self.poll_payload(cx, &mut payload) {
                    Poll::Ready(Ok(true)) => {
                        self.finish(payload);
                        return Poll::Ready(Ok(()));
                    }
                    Poll::Ready(Ok(false)) => self.payload = Some(payload),
                    Poll::Ready(Err(error)) => {
                        self.payload = Some(payload);
                        return Poll::Ready(Err(error));
                    }
                    Poll::Pending => {
                        self.payload = Some(payload);
                        return Poll::Pending;
                    }
                },
            }
        }
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

    /// Books what has been read out of the other side's memory, and what came behind it. Ready when something was.
    fn poll_behind(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let read = match self.behind.front() {
            None => return Poll::Pending,
            Some(Behind::Nothing) => false,
            Some(Behind::Read(_)) => {
                let Some(reader) = &mut self.reader else { return Poll::Pending };
                let ended = ready!(reader.poll_ended(cx));
                self.read_something |= matches!(ended, Ok(true));
                self.read_nothing = ended.is_err();
                ended?
            }
        };
        self.heard = Instant::now();
        self.moved = self.heard;
        let Some(Behind::Read(expected)) = self.behind.pop_front() else {
            self.pool.landed(self.rail);
            return Poll::Ready(Ok(()));
        };
        self.say(&Ask::plain(Want::Taken, expected.piece.fetch.id, expected.number, 0));
        let length = expected.piece.length();
        if read {
            self.pool.moved(self.rail, length as u64);
            self.metrics.read_bytes.inc_by(length as u64);
        }
        self.finish(Payload { expected, length, got: length, wanted: read });
        Poll::Ready(Ok(()))
    }

    fn poll_head(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.head_got < HEAD {
            let into = &mut self.head[self.head_got..];
            self.head_got += ready!(poll_some(&mut self.stream, cx, into))?;
        }
        self.head_got = 0;
        self.heard = Instant::now();
        let head = Head::decode(&self.head).map_err(io::Error::other)?;
        Poll::Ready(self.begin(&head))
    }

    /// Decides what becomes of the piece that `head` announces.
    fn begin(&mut self, head: &Head) -> io::Result<()> {
        let Some(expected) = self.expected.front() else {
            return Err(io::Error::other("an answer that nobody asked for"));
        };
        let Expected { number, ref piece, turn } = *expected;
        if (head.id, head.space, head.key) != (number, piece.fetch.space(), piece.item().key) {
            return Err(io::Error::other("another piece than the one whose turn it is"));
        }
        if head.kind == wire::Kind::Wait {
            return Ok(());
        }
        self.moved = self.heard;
        let reason = match head.kind {
            wire::Kind::Piece | wire::Kind::Lies => piece.check(head).err(),
            wire::Kind::Missing => Some(Reason::Missing),
            // Cancelled pieces are somebody else's, or nobody's. Of the others the serving side says that their
            // patience is over.
            _ => piece.is_turn(turn).then_some(Reason::Deadline),
        };
        if let Some(reason) = reason
            && piece.fetch.fail(piece.row)
        {
            self.metrics.failed(reason, 1);
        }
        let expected = self.expected.pop_front().expect("it was in front");
        match (head.kind, &self.reader) {
            (wire::Kind::Piece, _) => {
                let length = head.length as usize;
                self.payload = Some(Payload { expected, length, got: 0, wanted: reason.is_none() });
            }
            (wire::Kind::Lies, Some(reader)) if reason.is_none() => {
                reader.read(&expected.piece, expected.turn, head.at);
                self.behind.push_back(Behind::Read(expected));
            }
            _ => {
                if head.kind == wire::Kind::Lies {
                    self.say(&Ask::plain(Want::Taken, expected.piece.fetch.id, expected.number, 0));
                }
                if self.behind.is_empty() {
                    self.pool.landed(self.rail);
                } else {
                    self.behind.push_back(Behind::Nothing);
                }
            }
        }
        Ok(())
    }

    /// Reads one portion of a payload; true when it was the last.
    fn poll_payload(&mut self, cx: &mut Context<'_>, payload: &mut Payload) -> Poll<io::Result<bool>> {
        let left = payload.length - payload.got;
        if left == 0 {
            return Poll::Ready(Ok(true));
        }
        let Expected { ref piece, turn, .. } = payload.expected;
        let stream = &mut self.stream;
        let in_place = payload
            .wanted
            .then(|| piece.write(turn, payload.got, |rest| poll_some(stream, cx, rest)))
            .flatten();
        let n = match in_place {
            Some(read) => ready!(read)?,
            None => {
                payload.wanted = false;
                let into = &mut self.scratch[..left.min(SCRATCH)];
                ready!(poll_some(&mut self.stream, cx, into))?
            }
        };
        payload.got += n;
        self.heard = Instant::now();
        self.moved = self.heard;
        self.pool.moved(self.rail, n as u64);
        Poll::Ready(Ok(n == left))
    }

    /// All bytes of a piece are here. The last one of a row makes the row, when its bytes are those that were stored.
    fn finish(&self, payload: Payload) {
        let Payload { expected: Expected { piece, turn, .. }, wanted, .. } = payload;
        self.pool.landed(self.rail);
        if !wanted || piece.end(turn) != Ended::Row {
            return;
        }
        let metrics = self.metrics.clone();
        if piece.fetch.row_bytes() <= VERIFY_HERE {
            verify(&piece, &metrics);
        } else {
            // It ends by itself within milliseconds; the gates wait for it when they are closed meanwhile.
            tokio::task::spawn_blocking(move || verify(&piece, &metrics));
        }
    }
}

/// A word about a piece of a row.
fn word(want: Want, fetch: &Fetch, row: usize, id: u64, offset: usize, length: usize) -> Ask {
    let small = |n: usize| u32::try_from(n).expect("a row is at most 1 GiB");
    let left = |deadline: Instant| deadline.saturating_duration_since(Instant::now()).as_millis();
    // Never 0, which would be no deadline at all.
    let patience_ms = fetch.deadline.map_or(0, |d| u32::try_from(left(d) + 1).unwrap_or(u32::MAX));
    Ask {
        want,
        fetch: fetch.id,
        id,
        space: fetch.space(),
        key: fetch.item(row).key,
        row_bytes: small(fetch.row_bytes()),
        offset: small(offset),
        length: small(length),
        patience_ms,
    }
}

fn verify(piece: &Piece, metrics: &Metrics) {
    let sound = |bytes: &[u8], checksum| crc64(&[bytes]) == checksum || mutant::on(Mutant::SkipReceiveCheck);
    match piece.fetch.take(piece.row, sound) {
        Taken::Yes => metrics.received_rows.inc(),
        Taken::Damaged => {
            tracing::warn!(key = ?piece.item().key, "a row arrived damaged");
            metrics.failed(Reason::Checksum, 1);
        }
        Taken::Late => {}
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
