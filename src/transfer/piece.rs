//! A few rows of one fetch, and the gate before them.
//!
//! A rail writes into a row only while it holds the gate of that row's piece, and only for one read that cannot
//! block. Whoever fetches closes the gates, at the deadline, when the peer is gone, or because its own caller went
//! away: once a gate is closed nothing writes behind it any more, however late bytes arrive. So "when it returns,
//! nothing touches those rows" needs no answer from a connection that may be stuck. A piece is on one rail at a
//! time: nobody waits for a gate.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::base::block::{RowItem, Space};
use crate::base::frame::Outcome;
use crate::base::mutant::{self, Mutant};
use crate::base::rows::Rows;

/// Some rows of a fetch.
#[derive(Debug)]
pub struct Piece {
    rows: Arc<Rows>,
    items: Vec<RowItem>,
    /// Guards the rows of `items`.
    gate: Mutex<Gate>,
    whole: Arc<Whole>,
}

#[derive(Debug)]
struct Gate {
    open: bool,
    outcomes: Vec<Option<Outcome>>,
    /// Outcomes that are still `None`.
    left: usize,
}

/// How many pieces are not settled yet.
#[derive(Debug)]
struct Whole {
    left: AtomicUsize,
    settled: Notify,
}

/// The side that waits. Dropping it closes every gate.
#[derive(Debug)]
pub struct Pieces {
    pieces: Vec<Arc<Piece>>,
    whole: Arc<Whole>,
}

impl Pieces {
    /// Cuts `items` into pieces of `per_piece` rows.
    pub fn cut(rows: &Arc<Rows>, items: &[RowItem], per_piece: usize) -> Self {
        let chunks = items.chunks(per_piece.max(1));
        let whole = Arc::new(Whole { left: AtomicUsize::new(chunks.len()), settled: Notify::new() });
        let pieces = chunks
            .map(|items| {
                let gate = Gate { open: true, outcomes: vec![None; items.len()], left: items.len() };
                Arc::new(Piece {
                    rows: rows.clone(),
                    items: items.to_vec(),
                    gate: Mutex::new(gate),
                    whole: whole.clone(),
                })
            })
            .collect();
        Self { pieces, whole }
    }

    pub fn list(&self) -> &[Arc<Piece>] {
        &self.pieces
    }

    /// Ends when every piece is settled. Cancel-safe.
    pub async fn settled(&self) {
        loop {
            let settled = self.whole.settled.notified();
            tokio::pin!(settled);
            settled.as_mut().enable();
            if self.whole.left.load(Ordering::Acquire) == 0 {
                return;
            }
            settled.await;
        }
    }

    /// Closes all gates and says what became of each row; what had not arrived is `Failed`.
    pub fn close(self) -> Vec<Outcome> {
        self.pieces.iter().flat_map(|piece| piece.close()).collect()
    }
}

impl Drop for Pieces {
    fn drop(&mut self) {
        for piece in &self.pieces {
            piece.close();
        }
    }
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

impl Piece {
    pub fn items(&self) -> &[RowItem] {
        &self.items
    }

    pub fn space(&self) -> Space {
        self.rows.space
    }

    pub fn row_bytes(&self) -> usize {
        self.rows.row_bytes()
    }

    pub fn is_open(&self) -> bool {
        self.gate.lock().open
    }

    /// Lends the rest of a row, from `offset` on, to a read that does not block. `None`: the gate is closed.
    pub fn write<T>(&self, index: usize, offset: usize, read: impl FnOnce(&mut [u8]) -> T) -> Option<T> {
        let gate = self.gate.lock();
        if !gate.open && !mutant::on(Mutant::LateWrite) {
            return None;
        }
        Some(self.rows.fill(self.items[index].row, |row| read(&mut row[offset..])))
    }

    /// Takes a whole row when `sound` says so.
    pub fn take(&self, index: usize, sound: impl FnOnce(&[u8]) -> bool) -> Taken {
        let mut gate = self.gate.lock();
        if !gate.open || gate.outcomes[index].is_some() {
            return Taken::Late;
        }
        let sound = self.rows.look(self.items[index].row, sound);
        let outcome = if sound { Outcome::FromPeer } else { Outcome::Failed };
        self.settle(&mut gate, index, outcome);
        if sound { Taken::Yes } else { Taken::Damaged }
    }

    /// Says that a row does not come. False when that was said before, or the gate is closed.
    pub fn fail(&self, index: usize) -> bool {
        let mut gate = self.gate.lock();
        if !gate.open || gate.outcomes[index].is_some() {
            return false;
        }
        self.settle(&mut gate, index, Outcome::Failed);
        true
    }

    /// Says that nothing more comes. Returns for how many rows.
    pub fn fail_rest(&self) -> usize {
        (0..self.items.len()).filter(|&index| self.fail(index)).count()
    }

    fn settle(&self, gate: &mut Gate, index: usize, outcome: Outcome) {
        gate.outcomes[index] = Some(outcome);
        gate.left -= 1;
        if gate.left == 0 && self.whole.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.whole.settled.notify_waiters();
        }
    }

    fn close(&self) -> Vec<Outcome> {
        let mut gate = self.gate.lock();
        gate.open = false;
        gate.outcomes.iter().map(|o| o.unwrap_or(Outcome::Failed)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{item, rows};
    use super::*;

    #[test]
    fn nothing_is_written_behind_a_closed_gate() {
        let rows = rows(4, 4096);
        let pieces = Pieces::cut(&rows, &[item(0), item(1), item(2)], 2);
        let [first, second] = pieces.list() else { panic!("two pieces") };
        let (first, second) = (first.clone(), second.clone());
        assert_eq!(
            first.write(0, 4090, |rest| {
                rest.fill(7);
                rest.len()
            }),
            Some(6)
        );
        assert_eq!(first.take(0, |row| row[4095] == 7), Taken::Yes);
        assert_eq!(first.take(1, |_| false), Taken::Damaged);
        assert_eq!(pieces.close(), [Outcome::FromPeer, Outcome::Failed, Outcome::Failed]);
        assert_eq!(second.write(0, 0, |_| ()), None);
        assert_eq!(second.take(0, |_| true), Taken::Late);
    }

    #[test]
    fn dropping_the_waiting_side_closes_the_gates() {
        let rows = rows(1, 4096);
        let pieces = Pieces::cut(&rows, &[item(0)], 1);
        let piece = pieces.list()[0].clone();
        assert!(piece.is_open());
        drop(pieces);
        assert!(!piece.is_open());
        assert_eq!(piece.write(0, 0, |_| ()), None);
    }

    #[tokio::test]
    async fn the_waiting_side_wakes_when_the_last_row_is_settled() {
        let rows = rows(2, 4096);
        let pieces = Pieces::cut(&rows, &[item(0), item(1)], 1);
        assert!(pieces.list()[0].fail(0));
        assert!(!pieces.list()[0].fail(0));
        assert_eq!(pieces.list()[1].fail_rest(), 1);
        pieces.settled().await;
    }
}
