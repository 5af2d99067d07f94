//! What a rail decides: which words it says, what becomes of an answer, and when its connection is given up.
//!
//! No clock, no sockets: `now` is an argument, words and answers are handed over. [`super::rail`] drives it over
//! connections, the simulation over cables that it makes up.
//!
//! A rail keeps as many pieces in flight as the line gives it ([`super::share`]). Answers come in the order of the words, so
//! there is always one piece whose turn it is. A piece whose gate was closed meanwhile, or that another rail has
//! taken over, is read to nowhere: the connection stays usable for the other fetches that share it. The serving side
//! says at least every [`wire::BEAT`](super::wire::BEAT) that it is there; a connection on which nothing is heard for
//! [`SILENCE`] is over.
//!
//! Where the other side's memory can be read, an answer may only say where a piece lies. Such reads are carried out
//! elsewhere and end in their order; what comes behind one is booked behind it, so that turns stay in order.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::piece::{Ended, Fetch, Piece, Taken};
use super::pool::Pool;
use super::wire::{Ask, Head, Kind, Want};
use super::{Metrics, Reason};
use crate::base::checksum::crc64;
use crate::base::clock::Micros;
use crate::base::mutant::{self, Mutant};
use crate::base::rows::Rows;

/// Longest time without a byte while the serving side owes an answer: ten of its beats. A lost packet is sent again
/// after 0.2, 0.4 and 0.8 seconds, so two losses in a row are survived.
pub const SILENCE: Duration = Duration::from_secs(1);

/// An answer that does not belong to what was asked: nothing after it can be understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Odd {
    #[error("an answer that nobody asked for")]
    Unasked,
    #[error("another piece than the one whose turn it is")]
    Another,
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

/// An answer that is booked when those before it are: a piece that is being read out of the other side's memory, or one
/// that did not come while such a read was under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behind {
    Read,
    Nothing,
}

/// A piece that is to be read out of the other side's memory.
#[derive(Debug)]
pub struct ToRead {
    pub piece: Piece,
    pub turn: u32,
    pub at: u64,
}

/// An open connection's side of the conversation: everything in flight on it.
#[derive(Debug)]
pub struct Line {
    rail: usize,
    pool: Arc<Pool>,
    metrics: Metrics,
    /// Longest time without an answer, even when the other side is alive.
    patience: Duration,
    expected: VecDeque<Expected>,
    payload: Option<Payload>,
    /// Pieces being read, and what came behind them: `None` is nothing.
    behind: VecDeque<Option<Expected>>,
    /// Pieces that need not lie ready for us any more: fetch and number.
    taken: Vec<(u64, u64)>,
    /// Last byte of any kind, and last byte or answer that somebody waited for.
    heard: Micros,
    moved: Micros,
}

impl Line {
    pub fn new(rail: usize, pool: &Arc<Pool>, metrics: &Metrics, patience: Duration, now: Micros) -> Self {
        let (pool, metrics) = (pool.clone(), metrics.clone());
        let (expected, payload, behind, taken) = (VecDeque::new(), None, VecDeque::new(), Vec::new());
        Self { rail, pool, metrics, patience, expected, payload, behind, taken, heard: now, moved: now }
    }

    pub fn is_busy(&self) -> bool {
        self.is_owed() || !self.behind.is_empty()
    }

    /// Whether the other side has to say something.
    fn is_owed(&self) -> bool {
        !self.expected.is_empty() || self.payload.is_some()
    }

    /// When the connection is given up, unless something comes before. `None`: nothing is owed. Reads of the other side's
    /// memory are watched by who carries them out.
    pub fn until(&self) -> Option<Micros> {
        let patient = self.moved.plus(self.patience);
        let until = if self.is_owed() { patient.min(self.heard.plus(SILENCE)) } else { patient };
        self.is_busy().then_some(until)
    }

    /// Whether the connection is to be given up.
    pub fn is_over(&self, now: Micros) -> bool {
        self.until().is_some_and(|until| now >= until) && !mutant::on(Mutant::KeepSilent)
    }

    /// Says what is to be forgotten, what soon will be wanted, and what is wanted next: to be read into rows of which
    /// `reads` says that they can be, to be sent otherwise.
    pub fn ask(&mut self, now: Micros, mut reads: impl FnMut(&Arc<Rows>) -> bool, mut say: impl FnMut(&Ask)) {
        for (fetch, number) in self.taken.drain(..) {
            say(&Ask::plain(Want::Taken, fetch, number, 0));
        }
        for (fetch, id) in self.pool.cancels(self.rail) {
            say(&Ask::plain(Want::Cancel, fetch, id, 0));
        }
        if !self.is_busy() {
            (self.heard, self.moved) = (now, now);
        }
        while let Some((fetch, row)) = self.pool.next_ahead() {
            say(&word(Want::Ahead, &fetch, row, now, (0, 0, 0)));
        }
        while let Some(given) = self.pool.pull(self.rail, now) {
            let (number, piece, turn) = (given.number, given.piece, given.begun);
            let which = (number, piece.offset(), piece.length());
            let want = if reads(piece.rows()) { Want::Read } else { Want::Pull };
            say(&word(want, &piece.fetch, piece.row, now, which));
            self.expected.push_back(Expected { number, piece, turn });
        }
    }

    /// Decides what becomes of the piece that `head` announces; what it gives is to be read, and told to
    /// [`Line::on_read`]. `can_read`: there is somebody who reads.
    ///
    /// # Errors
    /// When it is not the one whose turn it is: the connection is of no use any more.
    pub fn on_head(&mut self, now: Micros, head: &Head, can_read: bool) -> Result<Option<ToRead>, Odd> {
        self.heard = now;
        let Expected { number, ref piece, turn } = *self.expected.front().ok_or(Odd::Unasked)?;
        if (head.id, head.space, head.key) != (number, piece.fetch.space(), piece.item().key) {
            return Err(Odd::Another);
        }
        if head.kind == Kind::Wait {
            return Ok(None);
        }
        self.moved = now;
        let reason = match head.kind {
            Kind::Piece | Kind::Lies => piece.check(head).err(),
            Kind::Missing => Some(Reason::Missing),
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
        match head.kind {
            Kind::Piece if head.length > 0 => {
                let length = head.length as usize;
                self.payload = Some(Payload { expected, length, got: 0, wanted: reason.is_none() });
                return Ok(None);
            }
            Kind::Lies if reason.is_none() && can_read => {
                let to_read = ToRead { piece: expected.piece.clone(), turn, at: head.at };
                self.behind.push_back(Some(expected));
                return Ok(Some(to_read));
            }
            Kind::Lies => self.taken.push((expected.piece.fetch.id, expected.number)),
            _ => {}
        }
        if self.behind.is_empty() {
            self.pool.landed(self.rail, now);
        } else {
            self.behind.push_back(None);
        }
        Ok(None)
    }

    /// What is to be booked before anything else. `None`: what comes is booked as it comes.
    pub fn behind(&self) -> Option<Behind> {
        self.behind.front().map(|first| if first.is_some() { Behind::Read } else { Behind::Nothing })
    }

    /// Books the first of what stands behind: `read`, its bytes lie in the row. When they were the last ones of a row,
    /// that row is to be verified.
    pub fn on_read(&mut self, now: Micros, read: bool) -> Option<Piece> {
        (self.heard, self.moved) = (now, now);
        let first = self.behind.pop_front()?;
        if let Some(Expected { number, piece, .. }) = &first {
            self.taken.push((piece.fetch.id, *number));
            if read {
                self.pool.moved(self.rail, piece.length() as u64, now);
                self.metrics.read_bytes.inc_by(piece.length() as u64);
            }
        }
        self.landed(now, first.filter(|_| read))
    }

    /// A piece has been answered; `whole`, when all of its bytes lie in its row. Gives it when it makes the row whole.
    fn landed(&self, now: Micros, whole: Option<Expected>) -> Option<Piece> {
        self.pool.landed(self.rail, now);
        let Expected { piece, turn, .. } = whole?;
        (piece.end(turn) == Ended::Row).then_some(piece)
    }

    /// Bytes of a payload that come next; 0: a head does.
    pub fn left(&self) -> usize {
        self.payload.as_ref().map_or(0, |payload| payload.length - payload.got)
    }

    /// Lends the place of the next bytes to a read that does not block. `None`: nobody waits for them, they are to be
    /// read to nowhere.
    pub fn place<T>(&mut self, read: impl FnOnce(&mut [u8]) -> T) -> Option<T> {
        let payload = self.payload.as_mut().filter(|payload| payload.wanted)?;
        let Expected { ref piece, turn, .. } = payload.expected;
        let read = piece.write(turn, payload.got, read);
        payload.wanted = read.is_some();
        read
    }

    /// So many bytes of a payload came. When they were the last ones of a row, that row is to be verified.
    pub fn on_bytes(&mut self, now: Micros, bytes: usize) -> Option<Piece> {
        let payload = self.payload.as_mut()?;
        payload.got += bytes;
        (self.heard, self.moved) = (now, now);
        self.pool.moved(self.rail, bytes as u64, now);
        let payload = self.payload.take_if(|payload| payload.got >= payload.length)?;
        self.landed(now, payload.wanted.then_some(payload.expected))
    }
}

/// Takes the row whose last piece this is, when its bytes are those that were stored.
pub fn verify(piece: &Piece, metrics: &Metrics) {
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

/// A word about a piece (its number, place and length) of a row.
fn word(
    want: Want,
    fetch: &Fetch,
    row: usize,
    now: Micros,
    (id, offset, length): (u64, usize, usize),
) -> Ask {
    let small = |n: usize| u32::try_from(n).expect("a row is at most 1 GiB");
    // Never 0, which would be no deadline at all.
    let left = |deadline: Micros| u32::try_from(deadline.since(now).as_millis() + 1).unwrap_or(u32::MAX);
    Ask {
        want,
        fetch: fetch.id,
        id,
        space: fetch.space(),
        key: fetch.item(row).key,
        row_bytes: small(fetch.row_bytes()),
        offset: small(offset),
        length: small(length),
        patience_ms: fetch.deadline.map_or(0, left),
    }
}
