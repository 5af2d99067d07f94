//! One fetch, cut into pieces of rows, and the gate before each piece.
//!
//! A rail writes into a row only while it holds the gate of that piece, only while the piece is its turn, and only
//! for one read that cannot block. Whoever fetches closes the gates, at the deadline, when the peer is gone, or
//! because its own caller went away: once a gate is closed nothing writes behind it any more, however late bytes
//! arrive. So "when it returns, nothing touches those rows" needs no answer from a connection that may be stuck.
//!
//! A piece that is given to another rail gets a new turn, and what the first one still brings is read to nowhere:
//! two rails never write the same bytes. A row is taken when all its pieces are there and its checksum, made over
//! what then lies in the row, is the one that was stored; nobody can write it at that time, because none of its
//! pieces has a turn left.
//!
//! A read that a device carries out by itself cannot be stopped by a gate. It holds a [`Leave`] from before it is
//! posted until the library says that no more of it can land. A piece has one at a time, whoever's turn it is, and a
//! fetch ends only when none of its pieces has one ([`Fetch::landed`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};
use tokio::sync::Notify;

use super::Reason;
use super::wire::Head;
use crate::base::block::{RowItem, Space};
use crate::base::clock::Micros;
use crate::base::frame::Outcome;
use crate::base::mutant::{self, Mutant};
use crate::base::rows::Rows;

/// Rows that are fetched together. Dropping the last handle closes nothing: [`Fetch::close`] does.
#[derive(Debug)]
pub struct Fetch {
    pub id: u64,
    /// In the time of its [`Pool`](super::pool::Pool).
    pub deadline: Option<Micros>,
    rows: Arc<Rows>,
    items: Vec<RowItem>,
    piece_bytes: usize,
    gates: Vec<Gate>,
    /// Rows that are not settled.
    left: AtomicUsize,
    settled: Notify,
    /// Bytes of rows, over all fetches of a peer, that the peer was told to read ahead and that are not settled.
    ahead: Arc<AtomicUsize>,
    /// Reads that a device may still be writing, and who waits for their end: a thread, or a task.
    landing: Mutex<usize>,
    landed: Condvar,
    landed_too: Notify,
}

/// The gates of one row. Locks are taken in this order: state, then parts.
#[derive(Debug)]
struct Gate {
    state: Mutex<State>,
    parts: Box<[Mutex<Part>]>,
}

#[derive(Debug)]
struct State {
    open: bool,
    outcome: Option<Outcome>,
    /// The row's checksum, as the first head said.
    checksum: Option<u64>,
    parts_left: usize,
    ahead: bool,
}

#[derive(Debug, Default)]
struct Part {
    closed: bool,
    /// Counts who may write it: whoever has the newest number.
    turn: u32,
    /// A device may be writing it.
    landing: bool,
}

/// A piece of a row of a fetch.
#[derive(Clone, Debug)]
pub struct Piece {
    pub fetch: Arc<Fetch>,
    pub row: usize,
    part: usize,
}

/// Leave to have a piece written by a device. Dropped when nothing more of it can land, and not before.
#[derive(Debug)]
pub struct Leave {
    piece: Piece,
}

/// Whether a piece may be read into its row now.
#[derive(Debug)]
pub enum Land {
    Now(Leave),
    /// Another read of it has not ended.
    Busy,
    /// The gate was closed, or it is another rail's turn.
    Late,
}

/// What the last byte of a piece made of its row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// More pieces are missing.
    Part,
    /// All are there: [`Fetch::take`] is next.
    Row,
    /// The gate was closed, or it was another rail's turn.
    Late,
}

/// Whether a whole row was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    Yes,
    /// Its bytes are not those that the checksum was made over.
    Damaged,
    /// The gate was closed before.
    Late,
}

impl Fetch {
    /// Cuts `items` into pieces of `piece_bytes`.
    pub fn new(
        id: u64,
        rows: &Arc<Rows>,
        items: &[RowItem],
        piece_bytes: usize,
        deadline: Option<Micros>,
        ahead: &Arc<AtomicUsize>,
    ) -> Arc<Self> {
        let parts = rows.row_bytes().div_ceil(piece_bytes.max(1)).max(1);
        let gate = || Gate {
            state: Mutex::new(State {
                open: true,
                outcome: None,
                checksum: None,
                parts_left: parts,
                ahead: false,
            }),
            parts: (0..parts).map(|_| Mutex::default()).collect(),
        };
        Arc::new(Self {
            id,
            deadline,
            rows: rows.clone(),
            items: items.to_vec(),
            piece_bytes: piece_bytes.max(1),
            gates: items.iter().map(|_| gate()).collect(),
            left: AtomicUsize::new(items.len()),
            settled: Notify::new(),
            ahead: ahead.clone(),
            landing: Mutex::default(),
            landed: Condvar::new(),
            landed_too: Notify::new(),
        })
    }

    /// All pieces, in prefix order.
    pub fn pieces(self: &Arc<Self>) -> impl Iterator<Item = Piece> + '_ {
        let of = |row: usize| (0..self.gates[row].parts.len()).map(move |part| (row, part));
        (0..self.items.len()).flat_map(of).map(|(row, part)| Piece { fetch: self.clone(), row, part })
    }

    pub fn item(&self, row: usize) -> &RowItem {
        &self.items[row]
    }

    pub fn len(&self) -> usize {
        self.items.len()
    }

    pub fn space(&self) -> Space {
        self.rows.space
    }

    pub fn row_bytes(&self) -> usize {
        self.rows.row_bytes()
    }

    /// Ends when every row is settled. Cancel-safe.
    pub async fn settled(&self) {
        loop {
            let settled = self.settled.notified();
            tokio::pin!(settled);
            settled.as_mut().enable();
            if self.is_settled() {
                return;
            }
            settled.await;
        }
    }

    pub fn is_settled(&self) -> bool {
        self.left.load(Ordering::Acquire) == 0
    }

    /// Closes all gates and says what became of each row; what had not arrived is `Failed`.
    pub fn close(&self) -> Vec<Outcome> {
        let outcome = |gate: &Gate| {
            let mut state = gate.state.lock();
            state.open = false;
            self.shut(gate, &mut state);
            state.outcome.unwrap_or(Outcome::Failed)
        };
        self.gates.iter().map(outcome).collect()
    }

    /// Ends when no device writes any of the rows. After [`Fetch::close`] it stays so. Cancel-safe.
    pub async fn landed(&self) {
        loop {
            let landed = self.landed_too.notified();
            tokio::pin!(landed);
            landed.as_mut().enable();
            if *self.landing.lock() == 0 {
                return;
            }
            landed.await;
        }
    }

    /// As [`Fetch::landed`], for who cannot await: returns within the time that a read without progress is borne.
    pub fn wait_landed(&self) {
        let mut landing = self.landing.lock();
        while *landing > 0 {
            self.landed.wait(&mut landing);
        }
    }

    /// Notes that the peer is told to read a row ahead. False: nobody waits for it.
    pub fn read_ahead(&self, row: usize) -> bool {
        let mut state = self.gates[row].state.lock();
        let wanted = state.open && state.outcome.is_none() && !state.ahead;
        if wanted {
            state.ahead = true;
            self.ahead.fetch_add(self.row_bytes(), Ordering::AcqRel);
        }
        wanted
    }

    /// Takes a row whose pieces are all there when `sound` says so.
    pub fn take(&self, row: usize, sound: impl FnOnce(&[u8], u64) -> bool) -> Taken {
        let gate = &self.gates[row];
        let mut state = gate.state.lock();
        let Some(checksum) = state.checksum.filter(|_| state.open && state.outcome.is_none()) else {
            return Taken::Late;
        };
        let sound = self.rows.look(self.items[row].row, |bytes| sound(bytes, checksum));
        self.settle(gate, &mut state, if sound { Outcome::FromPeer } else { Outcome::Failed });
        if sound { Taken::Yes } else { Taken::Damaged }
    }

    /// Says that a row does not come. False when that was said before, or the gate is closed.
    pub fn fail(&self, row: usize) -> bool {
        let gate = &self.gates[row];
        let mut state = gate.state.lock();
        if !state.open || state.outcome.is_some() {
            return false;
        }
        self.settle(gate, &mut state, Outcome::Failed);
        true
    }

    /// Says that nothing more comes. Returns for how many rows.
    pub fn fail_rest(&self) -> usize {
        (0..self.items.len()).filter(|&row| self.fail(row)).count()
    }

    fn settle(&self, gate: &Gate, state: &mut State, outcome: Outcome) {
        state.outcome = Some(outcome);
        self.shut(gate, state);
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.settled.notify_waiters();
        }
    }

    /// From here on no piece of the row is written.
    fn shut(&self, gate: &Gate, state: &mut State) {
        for part in &gate.parts {
            part.lock().closed = true;
        }
        if std::mem::take(&mut state.ahead) {
            self.ahead.fetch_sub(self.row_bytes(), Ordering::AcqRel);
        }
    }
}

impl Piece {
    pub fn offset(&self) -> usize {
        self.part * self.fetch.piece_bytes
    }

    pub fn length(&self) -> usize {
        (self.fetch.row_bytes() - self.offset()).min(self.fetch.piece_bytes)
    }

    pub fn item(&self) -> &RowItem {
        self.fetch.item(self.row)
    }

    fn gate(&self) -> &Mutex<Part> {
        &self.fetch.gates[self.row].parts[self.part]
    }

    /// Makes it the caller's turn, and nobody else's. `None`: nobody waits for it.
    pub fn begin(&self) -> Option<u32> {
        let mut part = self.gate().lock();
        if part.closed {
            return None;
        }
        part.turn += 1;
        Some(part.turn)
    }

    /// Whether somebody waits for it, from the rail with this turn.
    pub fn is_turn(&self, turn: u32) -> bool {
        let part = self.gate().lock();
        !part.closed && part.turn == turn
    }

    /// Compares what a head says with what was asked for, and with what heads of the same row said before.
    pub fn check(&self, head: &Head) -> Result<(), Reason> {
        let size = (head.row_bytes as usize, head.length as usize, head.offset as usize);
        if head.position != self.item().position
            || size != (self.fetch.row_bytes(), self.length(), self.offset())
        {
            return Err(Reason::Mismatch);
        }
        let mut state = self.fetch.gates[self.row].state.lock();
        if *state.checksum.get_or_insert(head.checksum) == head.checksum {
            Ok(())
        } else {
            Err(Reason::Mismatch)
        }
    }

    /// Lends the rest of the piece, from `offset` on, to a read that does not block. `None`: the gate is closed, or
    /// it is another's turn.
    pub fn write<T>(&self, turn: u32, offset: usize, read: impl FnOnce(&mut [u8]) -> T) -> Option<T> {
        let part = self.gate().lock();
        let late = part.closed && !mutant::on(Mutant::LateWrite);
        let stale = part.turn != turn && !mutant::on(Mutant::StaleRail);
        if late || stale {
            return None;
        }
        let (row, from) = (self.item().row, self.offset() + offset);
        Some(self.fetch.rows.fill_part(row, from, self.length() - offset, read))
    }

    /// Leave to have the whole piece written by a device.
    pub fn land(&self, turn: u32) -> Land {
        let mut part = self.gate().lock();
        let late = part.closed && !mutant::on(Mutant::LateWrite);
        if late || part.turn != turn {
            return Land::Late;
        }
        if part.landing && !mutant::on(Mutant::StaleRail) {
            return Land::Busy;
        }
        part.landing = true;
        *self.fetch.landing.lock() += 1;
        Land::Now(Leave { piece: self.clone() })
    }

    pub fn rows(&self) -> &Arc<Rows> {
        &self.fetch.rows
    }

    /// Writes it whatever the gate says, as a device does.
    #[cfg(test)]
    pub fn overwrite(&self, bytes: &[u8]) {
        let row = self.item().row;
        self.fetch.rows.fill_part(row, self.offset(), self.length(), |piece| piece.copy_from_slice(bytes));
    }

    /// All bytes of the piece are there.
    pub fn end(&self, turn: u32) -> Ended {
        {
            let mut part = self.gate().lock();
            if part.closed || part.turn != turn {
                return Ended::Late;
            }
            part.closed = true;
        }
        let mut state = self.fetch.gates[self.row].state.lock();
        state.parts_left -= 1;
        if state.parts_left == 0 { Ended::Row } else { Ended::Part }
    }
}

impl Leave {
    /// Address and length of the piece in its row, for a device. Good as long as this.
    pub fn region(&self) -> (usize, usize) {
        let row = self.piece.fetch.rows.address(self.piece.item().row) as usize;
        (row + self.piece.offset(), self.piece.length())
    }

    #[cfg(test)]
    pub fn piece(&self) -> &Piece {
        &self.piece
    }
}

impl Drop for Leave {
    fn drop(&mut self) {
        self.piece.gate().lock().landing = false;
        let fetch = &self.piece.fetch;
        let mut landing = fetch.landing.lock();
        *landing -= 1;
        if *landing == 0 {
            fetch.landed.notify_all();
            fetch.landed_too.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{item, rows};
    use super::*;

    fn fetch(rows: &Arc<Rows>, count: u32, piece_bytes: usize) -> Arc<Fetch> {
        let items: Vec<RowItem> = (0..count).map(item).collect();
        Fetch::new(1, rows, &items, piece_bytes, None, &Arc::default())
    }

    fn said(piece: &Piece, checksum: u64) {
        piece.fetch.gates[piece.row].state.lock().checksum = Some(checksum);
    }

    #[test]
    fn nothing_is_written_behind_a_closed_gate() {
        let rows = rows(2, 8192);
        let fetch = fetch(&rows, 2, 4096);
        let pieces: Vec<Piece> = fetch.pieces().collect();
        let turns: Vec<u32> = pieces.iter().map(|p| p.begin().unwrap()).collect();
        let filled = pieces[1].write(turns[1], 4090, |rest| {
            rest.fill(7);
            rest.len()
        });
        assert_eq!(filled, Some(6));
        assert_eq!(pieces[0].end(turns[0]), Ended::Part);
        assert_eq!(pieces[1].end(turns[1]), Ended::Row);
        assert_eq!(pieces[1].write(turns[1], 0, |_| ()), None, "a whole piece is not written again");
        said(&pieces[0], 5);
        assert_eq!(fetch.take(0, |row, sum| row[8191] == 7 && row[8185] == 0 && sum == 5), Taken::Yes);
        assert_eq!(fetch.close(), [Outcome::FromPeer, Outcome::Failed]);
        assert_eq!(pieces[2].write(turns[2], 0, |_| ()), None);
        assert_eq!((pieces[2].begin(), pieces[2].end(turns[2])), (None, Ended::Late));
        assert_eq!(fetch.take(1, |_, _| true), Taken::Late);
    }

    #[test]
    fn a_piece_is_written_by_the_rail_whose_turn_it_is() {
        let rows = rows(1, 4096);
        let fetch = fetch(&rows, 1, 4096);
        let piece = fetch.pieces().next().unwrap();
        let first = piece.begin().unwrap();
        piece.write(first, 0, |bytes| bytes.fill(1)).unwrap();
        let second = piece.begin().unwrap();
        assert_eq!(piece.write(first, 100, |bytes| bytes.fill(9)), None);
        assert_eq!(piece.end(first), Ended::Late);
        piece.write(second, 0, |bytes| bytes.fill(2)).unwrap();
        assert_eq!(piece.end(second), Ended::Row);
        rows.look(0, |bytes| assert!(bytes.iter().all(|&b| b == 2)));
    }

    #[tokio::test]
    async fn a_fetch_ends_when_no_device_writes_its_rows_and_a_piece_is_read_by_one_at_a_time() {
        let rows = rows(1, 4096);
        let fetch = fetch(&rows, 1, 4096);
        let piece = fetch.pieces().next().unwrap();
        let first = piece.begin().unwrap();
        let Land::Now(landing) = piece.land(first) else { panic!("it is its turn") };
        assert_eq!(landing.region(), (rows.address(0) as usize, 4096));
        let second = piece.begin().unwrap();
        assert!(matches!((piece.land(first), piece.land(second)), (Land::Late, Land::Busy)));
        fetch.close();
        assert!(matches!(piece.land(second), Land::Late));
        {
            let mut landed = std::pin::pin!(fetch.landed());
            assert!(futures_util::poll!(&mut landed).is_pending());
            // Whoever cannot await waits for the same word.
            let waits = std::thread::spawn({
                let fetch = fetch.clone();
                move || fetch.wait_landed()
            });
            assert!(!waits.is_finished());
            drop(landing);
            landed.await;
            waits.join().unwrap();
        }
        fetch.landed().await;
    }

    #[tokio::test]
    async fn a_damaged_or_failed_row_is_settled_once_and_wakes_the_waiting_side() {
        let rows = rows(2, 8192);
        let fetch = fetch(&rows, 2, 4096);
        assert!(fetch.read_ahead(0) && !fetch.read_ahead(0));
        assert_eq!(fetch.ahead.load(Ordering::Acquire), 8192);
        let piece = fetch.pieces().next().unwrap();
        said(&piece, 1);
        assert_eq!(fetch.take(0, |_, _| false), Taken::Damaged);
        assert!(!fetch.fail(0) && !fetch.is_settled());
        assert_eq!((fetch.fail_rest(), fetch.fail_rest()), (1, 0));
        fetch.settled().await;
        assert_eq!(fetch.close(), [Outcome::Failed; 2]);
        assert_eq!(fetch.ahead.load(Ordering::Acquire), 0);
    }
}
