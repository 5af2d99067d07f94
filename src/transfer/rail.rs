//! The fetching side: rails that pull pieces, and what each rail does with the bytes that come.
//!
//! A rail owns its connection. It keeps a few pieces in flight, so that the server always has something to send,
//! and reads each payload into its row in the pieces in which the socket has it. A row whose gate was closed
//! meanwhile is read to nowhere: the connection stays usable for the other fetches that share it. A rail that sees
//! no progress for `patience` gives its connection up, and everything in flight on it is failed at once.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::piece::{Piece, Pieces, Taken};
use super::wire::{self, HEAD, Head, MAX_REQUEST_ROWS, Request, RowHead, Ticket};
use super::{Fabric, Metrics, Reason, Stream};
use crate::base::block::RowItem;
use crate::base::checksum::crc64;
use crate::base::frame::Outcome;
use crate::base::mutant::{self, Mutant};
use crate::base::rows::Rows;
use crate::tasks::{Kind, Tasks};

/// Bytes of one piece: small enough that two rails end together, large enough that a request per piece is nothing.
const PIECE_BYTES: usize = 4 << 20;

/// Pieces in flight on one rail. Four of 4 MiB cover the delay of a drive and of a 200 Gb/s link.
const PIECES_AHEAD: usize = 4;

/// Pieces that wait for a rail, over all fetches; a fetch beyond is failed at once. Each is at least one row, and
/// no row area has more rows than this in flight.
const PIECES_WAITING: usize = 1 << 16;

/// Bytes taken for nothing at a time, for rows that nobody waits for any more.
const SCRATCH: usize = 64 << 10;

/// Time to open a connection on a local network.
const CONNECT_WAIT: Duration = Duration::from_secs(2);

const BACKOFF_FIRST: Duration = Duration::from_millis(250);
const BACKOFF_LAST: Duration = Duration::from_secs(5);

/// Fetches rows from one peer in one of its generations. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Fetcher {
    queue: Arc<Queue>,
    metrics: Metrics,
    closed: CancellationToken,
}

/// Pieces that wait for a rail.
#[derive(Debug)]
struct Queue {
    /// Guards the list and the count of rails; never held while anything else is done.
    waiting: Mutex<Waiting>,
    more: Notify,
}

#[derive(Debug)]
struct Waiting {
    pieces: VecDeque<Arc<Piece>>,
    /// Rails that are up or on their way up. With none, pieces are failed instead of kept.
    hopeful: usize,
}

impl Fetcher {
    /// Opens a rail to each of `addresses` and keeps it open until [`Fetcher::close`].
    pub fn start(
        fabric: &Fabric,
        addresses: &[String],
        ticket: Ticket,
        patience: Duration,
        metrics: &Metrics,
        tasks: &Tasks,
    ) -> Self {
        let waiting = Mutex::new(Waiting { pieces: VecDeque::new(), hopeful: addresses.len() });
        let queue = Arc::new(Queue { waiting, more: Notify::new() });
        let closed = tasks.stopping().child_token();
        for address in addresses {
            let rail = Rail {
                fabric: fabric.clone(),
                address: address.clone(),
                ticket,
                patience,
                queue: queue.clone(),
                metrics: metrics.clone(),
            };
            let closed = closed.clone();
            tasks.spawn(Kind::Serving, "rail", async move { rail.run(&closed).await });
        }
        Self { queue, metrics: metrics.clone(), closed }
    }

    /// Ends all rails; everything that is being fetched is failed at once.
    pub fn close(&self) {
        self.closed.cancel();
    }

    /// Fetches `items` into their rows, in their order. After `deadline` nothing more is accepted. When this ends,
    /// or is dropped, nothing of it touches the rows any more.
    pub async fn fetch(
        &self,
        rows: &Arc<Rows>,
        items: &[RowItem],
        deadline: Option<Instant>,
    ) -> Vec<Outcome> {
        let per_piece = (PIECE_BYTES / rows.row_bytes().max(1)).clamp(1, MAX_REQUEST_ROWS);
        let pieces = Pieces::cut(rows, items, per_piece);
        self.queue.push(&pieces, &self.metrics);
        let late = async {
            match deadline {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        let rest = tokio::select! {
            biased;
            () = pieces.settled() => None,
            () = self.closed.cancelled() => Some(Reason::Connection),
            () = late => Some(Reason::Deadline),
        };
        if let Some(reason) = rest {
            let failed = pieces.list().iter().map(|piece| piece.fail_rest()).sum();
            self.metrics.failed(reason, failed);
        }
        pieces.close()
    }
}

impl Queue {
    fn push(&self, pieces: &Pieces, metrics: &Metrics) {
        let list = pieces.list();
        let mut waiting = self.waiting.lock();
        if waiting.hopeful == 0 || waiting.pieces.len() + list.len() > PIECES_WAITING {
            drop(waiting);
            metrics.failed(Reason::Connection, list.iter().map(|piece| piece.fail_rest()).sum());
            return;
        }
        waiting.pieces.extend(list.iter().cloned());
        drop(waiting);
        self.more.notify_one();
    }

    /// The next piece that somebody still waits for.
    fn pull(&self) -> Option<Arc<Piece>> {
        let mut waiting = self.waiting.lock();
        loop {
            let piece = waiting.pieces.pop_front()?;
            if piece.is_open() {
                if !waiting.pieces.is_empty() {
                    self.more.notify_one();
                }
                return Some(piece);
            }
        }
    }

    fn hope(&self) {
        self.waiting.lock().hopeful += 1;
    }

    /// A rail went down. Without any other, what waits is failed.
    fn lose_hope(&self, metrics: &Metrics) {
        let mut waiting = self.waiting.lock();
        waiting.hopeful -= 1;
        if waiting.hopeful == 0 {
            let left = std::mem::take(&mut waiting.pieces);
            drop(waiting);
            metrics.failed(Reason::Connection, left.iter().map(|piece| piece.fail_rest()).sum());
        }
    }
}

/// One connection to one address, opened again whenever it ends.
struct Rail {
    fabric: Fabric,
    address: String,
    ticket: Ticket,
    patience: Duration,
    queue: Arc<Queue>,
    metrics: Metrics,
}

impl Rail {
    async fn run(self, closed: &CancellationToken) {
        let mut pause = BACKOFF_FIRST;
        // The count of hopeful rails includes this one from the start.
        loop {
            let opened = tokio::select! {
                () = closed.cancelled() => break,
                opened = tokio::time::timeout(CONNECT_WAIT, self.open()) => opened,
            };
            match opened.map_err(io::Error::from).and_then(|opened| opened) {
                Ok(stream) => {
                    pause = BACKOFF_FIRST;
                    self.metrics.rails.inc();
                    let mut line = Line::new(stream, self.metrics.clone());
                    let error = tokio::select! {
                        () = closed.cancelled() => None,
                        error = line.serve(&self.queue, self.patience) => Some(error),
                    };
                    self.metrics.failed(Reason::Connection, line.fail_all());
                    self.metrics.rails.dec();
                    let Some(error) = error else { break };
                    tracing::warn!(address = self.address, %error, "a rail went down");
                }
                Err(error) => {
                    tracing::debug!(address = self.address, %error, "failed to open a rail");
                }
            }
            self.queue.lose_hope(&self.metrics);
            let closed = closed.run_until_cancelled(tokio::time::sleep(pause)).await.is_none();
            self.queue.hope();
            if closed {
                break;
            }
            pause = (pause * 2).min(BACKOFF_LAST);
        }
        self.queue.lose_hope(&self.metrics);
    }

    async fn open(&self) -> io::Result<Stream> {
        let mut stream = self.fabric.connect(&self.address).await?;
        stream.write_all(&wire::preamble(&self.ticket)).await?;
        match stream.read_u8().await? {
            wire::ACCEPTED => Ok(stream),
            other => Err(io::Error::other(format!("the ticket was answered with {other}"))),
        }
    }
}

/// A row that was asked for.
#[derive(Debug)]
struct Expected {
    id: u64,
    piece: Arc<Piece>,
    index: usize,
}

/// A payload that is arriving.
#[derive(Debug)]
struct Payload {
    expected: Expected,
    row: RowHead,
    got: usize,
    /// False: it is not what was asked for, and is read to nowhere.
    wanted: bool,
}

/// An open connection and everything in flight on it.
struct Line {
    stream: Stream,
    metrics: Metrics,
    /// Requests not written yet, and how far the first of them is.
    requests: VecDeque<Vec<u8>>,
    written: usize,
    expected: VecDeque<Expected>,
    head: [u8; HEAD],
    head_got: usize,
    payload: Option<Payload>,
    scratch: Box<[u8]>,
    next_id: u64,
}

impl Line {
    fn new(stream: Stream, metrics: Metrics) -> Self {
        Self {
            stream,
            metrics,
            requests: VecDeque::new(),
            written: 0,
            expected: VecDeque::new(),
            head: [0; HEAD],
            head_got: 0,
            payload: None,
            scratch: vec![0; SCRATCH].into(),
            next_id: 1,
        }
    }

    /// Asks and receives until the connection fails; the error says how. Cancel-safe: every step is booked when it
    /// is done.
    async fn serve(&mut self, queue: &Queue, patience: Duration) -> io::Error {
        let mut progress = Instant::now();
        loop {
            self.ask(queue);
            let idle = self.expected.is_empty() && self.payload.is_none();
            let room = self.room();
            let stalled = tokio::time::sleep_until(progress + patience);
            tokio::select! {
                moved = std::future::poll_fn(|cx| self.step(cx)) => match moved {
                    Ok(()) => progress = Instant::now(),
                    Err(error) => return error,
                },
                () = queue.more.notified(), if room => if idle { progress = Instant::now(); },
                () = stalled, if !idle => {
                    return io::Error::new(io::ErrorKind::TimedOut, "no bytes came in time");
                }
            }
        }
    }

    /// Rows in flight are at most four pieces, whatever their sizes.
    fn room(&self) -> bool {
        let row_bytes = self.expected.back().map_or(0, |e| e.piece.row_bytes());
        self.expected.len() < PIECES_AHEAD
            || (self.expected.len() * row_bytes < PIECES_AHEAD * PIECE_BYTES
                && self.expected.len() < PIECES_AHEAD * MAX_REQUEST_ROWS)
    }

    fn ask(&mut self, queue: &Queue) {
        while self.room()
            && let Some(piece) = queue.pull()
        {
            let id = self.next_id;
            self.next_id += 1;
            let row_bytes = u32::try_from(piece.row_bytes()).expect("a row is at most 1 GiB");
            let keys = piece.items().iter().map(|item| item.key).collect();
            self.requests.push_back(Request { id, space: piece.space(), row_bytes, keys }.encode());
            let count = piece.items().len();
            self.expected.extend((0..count).map(|index| Expected { id, piece: piece.clone(), index }));
        }
    }

    /// Writes and reads what can be without waiting. Ready when a row was finished or the connection failed.
    fn step(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Poll::Ready(Err(error)) = self.poll_write(cx) {
            return Poll::Ready(Err(error));
        }
        match self.payload.take() {
            None => self.poll_head(cx),
            Some(mut payload) => match self.poll_payload(cx, &mut payload) {
                Poll::Ready(Ok(true)) => {
                    self.finish(payload);
                    Poll::Ready(Ok(()))
                }
                moved => {
                    self.payload = Some(payload);
                    moved.map_ok(|_| ())
                }
            },
        }
    }

    fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while let Some(request) = self.requests.front() {
            let n = ready!(Pin::new(&mut self.stream).poll_write(cx, &request[self.written..]))?;
            if n == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.written += n;
            if self.written == request.len() {
                self.requests.pop_front();
                self.written = 0;
            }
        }
        Poll::Ready(Ok(()))
    }

    fn poll_head(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.head_got < HEAD {
            let into = &mut self.head[self.head_got..];
            self.head_got += ready!(poll_some(&mut self.stream, cx, into))?;
        }
        self.head_got = 0;
        let head = Head::decode(&self.head).map_err(io::Error::other)?;
        let Some(expected) = self.expected.pop_front() else {
            return Poll::Ready(Err(io::Error::other("a row that nobody asked for")));
        };
        Poll::Ready(self.begin(head, expected))
    }

    /// Decides what becomes of the row that `head` announces.
    fn begin(&mut self, head: Head, expected: Expected) -> io::Result<()> {
        let Expected { id, ref piece, index } = expected;
        let item = piece.items()[index];
        let asked = (id, index, piece.space(), item.key);
        if (head.id, head.index as usize, head.space, head.key) != asked {
            self.expected.push_front(expected);
            return Err(io::Error::other("another row than the one whose turn it is"));
        }
        let Some(row) = head.row else {
            self.fail(piece, index, Reason::Missing);
            return Ok(());
        };
        let wanted = row.length as usize == piece.row_bytes() && row.position == item.position;
        if !wanted {
            self.fail(piece, index, Reason::Mismatch);
        }
        self.payload = Some(Payload { expected, row, got: 0, wanted });
        Ok(())
    }

    fn fail(&self, piece: &Piece, index: usize, reason: Reason) {
        if piece.fail(index) {
            self.metrics.failed(reason, 1);
        }
    }

    /// Reads one portion of a payload; true when it was the last.
    fn poll_payload(&mut self, cx: &mut Context<'_>, payload: &mut Payload) -> Poll<io::Result<bool>> {
        let left = payload.row.length as usize - payload.got;
        if left == 0 {
            return Poll::Ready(Ok(true));
        }
        let Expected { ref piece, index, .. } = payload.expected;
        let stream = &mut self.stream;
        let in_place = payload
            .wanted
            .then(|| piece.write(index, payload.got, |rest| poll_some(stream, cx, rest)))
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
        self.metrics.received_bytes.inc_by(n as u64);
        Poll::Ready(Ok(n == left))
    }

    /// All bytes of a row are here: it is taken when they are those that were stored.
    fn finish(&self, payload: Payload) {
        let Payload { expected: Expected { piece, index, .. }, row, wanted, .. } = payload;
        if !wanted {
            return;
        }
        let sound = |bytes: &[u8]| crc64(&[bytes]) == row.checksum || mutant::on(Mutant::SkipReceiveCheck);
        match piece.take(index, sound) {
            Taken::Yes => self.metrics.received_rows.inc(),
            Taken::Damaged => {
                tracing::warn!(key = ?piece.items()[index].key, "a row arrived damaged");
                self.metrics.failed(Reason::Checksum, 1);
            }
            Taken::Late => {}
        }
    }

    /// Fails everything in flight and says how many rows that were.
    fn fail_all(&mut self) -> usize {
        let arriving = self.payload.take().map(|payload| payload.expected);
        arriving.into_iter().chain(self.expected.drain(..)).filter(|e| e.piece.fail(e.index)).count()
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
