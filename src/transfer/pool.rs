//! What the rails to one peer share: the line of pieces, and each rail's figures. No clock: `now` is an argument.
//!
//! One lock guards the line ([`Share`]) and the count of rails that are up; it is held for a decision, never across
//! anything else. Each rail has a bell that is rung when there may be something for it, and a list of what its peer
//! is to be told to forget.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use prometheus::IntCounter;
use tokio::sync::Notify;

use super::piece::{Fetch, Piece};
use super::share::{Given, Share};
use super::{Metrics, Path, Reason};
use crate::base::block::RowItem;
use crate::base::clock::Micros;
use crate::base::rows::Rows;

/// Pieces that wait for a rail, over all fetches; a fetch beyond is failed at once. No row area has more pieces than
/// this in flight.
const PIECES_WAITING: usize = 1 << 18;

/// Bytes of rows that the peer is told to read before their pieces are pulled, those being pulled included, and how
/// many rows at least and at most. It reads them in this order as its memory allows. A row of 17 MB is on its way for
/// about 8 ms at 10 GB/s (drive, checksum, wire, checksum), in which 80 MB pass.
const AHEAD_BYTES: usize = 256 << 20;
const AHEAD_LEAST: usize = 2;
const AHEAD_MOST: usize = 256;

/// What a piece is when nobody says otherwise. Over loopback, with two connections and rows of 17 MB on two cores, the
/// fabric moved 0.84 of what raw sockets do with pieces of 256 KiB, 0.93 with 1 MiB and 0.94 with 4 MiB; smaller ones divide a
/// row better between rails.
pub const PIECE_BYTES: usize = 1 << 20;

#[derive(Debug)]
pub struct Pool {
    state: Mutex<State>,
    slots: Box<[Slot]>,
    ahead: Arc<AtomicUsize>,
    piece_bytes: usize,
    next_fetch: AtomicU64,
    metrics: Metrics,
}

#[derive(Debug)]
struct State {
    share: Share<Piece>,
    /// Which rails are up, or dial for the first time. With none, pieces are failed instead of kept.
    hopeful: Box<[bool]>,
    /// Rows that the peer was not told to read ahead yet.
    ahead: VecDeque<(Arc<Fetch>, usize)>,
}

/// One rail's own.
#[derive(Debug)]
struct Slot {
    path: Path,
    bell: Notify,
    /// Fetch, and piece (0: all), that the peer need not answer any more.
    cancels: Mutex<Vec<(u64, u64)>>,
    up: AtomicBool,
    bytes: AtomicU64,
    errors: AtomicU64,
    opened: AtomicU64,
    counted: Counted,
}

/// Its series, looked up once: bytes are counted for every portion that comes.
#[derive(Debug)]
struct Counted {
    bytes: IntCounter,
    errors: IntCounter,
    reconnects: IntCounter,
}

/// How a rail is.
#[derive(Clone, Debug, serde::Serialize)]
pub struct RailStatus {
    #[serde(flatten)]
    pub path: Path,
    pub up: bool,
    /// Bytes of rows that came over it.
    pub bytes: u64,
    /// Of the bytes over all rails to this peer, from 0 to 1.
    pub share: f64,
    /// Bytes per second when it last carried some, measured over tens of milliseconds.
    pub bytes_per_s: Option<f64>,
    /// Connections that ended by themselves, and that could not be opened.
    pub errors: u64,
    /// Times that it was opened again.
    pub reconnects: u64,
}

impl Pool {
    pub fn new(paths: Vec<Path>, piece_bytes: usize, metrics: &Metrics) -> Self {
        let counted = |path: &Path| {
            let name = [path.name.as_str()];
            Counted {
                bytes: metrics.rail_bytes.with_label_values(&name),
                errors: metrics.rail_errors.with_label_values(&name),
                reconnects: metrics.rail_reconnects.with_label_values(&name),
            }
        };
        let slot = |path: Path| Slot {
            counted: counted(&path),
            path,
            bell: Notify::new(),
            cancels: Mutex::default(),
            up: AtomicBool::new(false),
            bytes: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            opened: AtomicU64::new(0),
        };
        let share = Share::new(paths.len(), piece_bytes as u64);
        Self {
            state: Mutex::new(State {
                share,
                hopeful: paths.iter().map(|_| true).collect(),
                ahead: VecDeque::new(),
            }),
            slots: paths.into_iter().map(slot).collect(),
            ahead: Arc::default(),
            piece_bytes,
            next_fetch: AtomicU64::new(1),
            metrics: metrics.clone(),
        }
    }

    /// Lines up a fetch.
    pub fn fetch(&self, rows: &Arc<Rows>, items: &[RowItem], deadline: Option<Micros>) -> Arc<Fetch> {
        let id = self.next_fetch.fetch_add(1, Ordering::Relaxed);
        let fetch = Fetch::new(id, rows, items, self.piece_bytes, deadline, &self.ahead);
        self.push(&fetch);
        fetch
    }

    fn push(&self, fetch: &Arc<Fetch>) {
        let mut state = self.state.lock();
        let pieces = fetch.len() * fetch.row_bytes().div_ceil(self.piece_bytes);
        if !state.hopeful.contains(&true) || state.share.waiting() + pieces > PIECES_WAITING {
            drop(state);
            self.metrics.failed(Reason::Connection, fetch.fail_rest());
            return;
        }
        for piece in fetch.pieces() {
            let bytes = piece.length() as u64;
            state.share.offer(piece, bytes);
        }
        state.ahead.extend((0..fetch.len()).map(|row| (fetch.clone(), row)));
        drop(state);
        self.ring();
    }

    /// Ends a fetch that was given up: the peer is told on every rail.
    pub fn cancel(&self, fetch: &Fetch) {
        {
            let mut state = self.state.lock();
            state.ahead.retain(|(of, _)| of.id != fetch.id);
        }
        for slot in &self.slots {
            if slot.up.load(Ordering::Acquire) {
                slot.cancels.lock().push((fetch.id, 0));
            }
        }
        self.ring();
    }

    fn ring(&self) {
        for slot in &self.slots {
            slot.bell.notify_one();
        }
    }

    /// Counts rows that do not come.
    pub fn failed(&self, reason: Reason, rows: usize) {
        self.metrics.failed(reason, rows);
    }

    /// Ends when there may be something for `rail`. Cancel-safe.
    pub async fn rung(&self, rail: usize) {
        self.slots[rail].bell.notified().await;
    }

    pub fn path(&self, rail: usize) -> &Path {
        &self.slots[rail].path
    }

    /// The next piece for `rail`, and its turn.
    pub fn pull(&self, rail: usize, now: Micros) -> Option<Given<Piece, u32>> {
        let given = self.state.lock().share.pull(rail, now, Piece::begin)?;
        if let Some(loser) = given.taken_from {
            self.slots[loser].cancels.lock().push((given.piece.fetch.id, given.number));
            self.slots[loser].bell.notify_one();
        }
        Some(given)
    }

    /// The next row that the peer shall read ahead, when it is not far enough ahead already.
    pub fn next_ahead(&self) -> Option<(Arc<Fetch>, usize)> {
        let mut state = self.state.lock();
        loop {
            let row_bytes = state.ahead.front()?.0.row_bytes();
            let bytes = self.ahead.load(Ordering::Acquire);
            let room = bytes + row_bytes <= AHEAD_BYTES.max(AHEAD_LEAST * row_bytes)
                && bytes < AHEAD_MOST * row_bytes;
            if !room {
                return None;
            }
            let (fetch, row) = state.ahead.pop_front()?;
            if fetch.read_ahead(row) {
                return Some((fetch, row));
            }
        }
    }

    pub fn cancels(&self, rail: usize) -> Vec<(u64, u64)> {
        std::mem::take(&mut *self.slots[rail].cancels.lock())
    }

    /// Whether any rail waits for pieces that an idle one may have to take over.
    pub fn is_busy(&self) -> bool {
        self.state.lock().share.is_busy()
    }

    pub fn moved(&self, rail: usize, bytes: u64, now: Micros) {
        self.state.lock().share.moved(rail, bytes, now);
        let slot = &self.slots[rail];
        slot.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.metrics.received_bytes.inc_by(bytes);
        slot.counted.bytes.inc_by(bytes);
    }

    pub fn landed(&self, rail: usize, now: Micros) {
        self.state.lock().share.landed(rail, now);
    }

    /// `rail` is open.
    pub fn up(&self, rail: usize, now: Micros) {
        let slot = &self.slots[rail];
        slot.cancels.lock().clear();
        slot.up.store(true, Ordering::Release);
        if slot.opened.fetch_add(1, Ordering::Relaxed) > 0 {
            slot.counted.reconnects.inc();
        }
        self.metrics.rails.inc();
        let mut state = self.state.lock();
        state.share.up(rail, now);
        state.hopeful[rail] = true;
    }

    /// `rail` could not be opened, or ended by an error, or (`asked`) because it was to end. What flew on it goes to
    /// the others; without any other, everything is failed.
    pub fn down(&self, rail: usize, asked: bool) {
        let slot = &self.slots[rail];
        if slot.up.swap(false, Ordering::AcqRel) {
            self.metrics.rails.dec();
        }
        if !asked {
            slot.errors.fetch_add(1, Ordering::Relaxed);
            slot.counted.errors.inc();
        }
        let mut state = self.state.lock();
        let mut failed = state.share.lost(rail);
        state.hopeful[rail] = false;
        if !state.hopeful.contains(&true) {
            failed.extend(state.share.clear());
            state.ahead.clear();
        }
        drop(state);
        let rows = failed.iter().filter(|piece| piece.fetch.fail(piece.row)).count();
        self.metrics.failed(Reason::Connection, rows);
        self.ring();
    }

    pub fn rails(&self) -> Vec<RailStatus> {
        let all: u64 = self.slots.iter().map(|slot| slot.bytes.load(Ordering::Relaxed)).sum();
        let rates: Vec<Option<f64>> = {
            let state = self.state.lock();
            (0..self.slots.len()).map(|rail| state.share.rate(rail)).collect()
        };
        let status = |(slot, bytes_per_s): (&Slot, Option<f64>)| {
            let bytes = slot.bytes.load(Ordering::Relaxed);
            RailStatus {
                path: slot.path.clone(),
                up: slot.up.load(Ordering::Acquire),
                bytes,
                share: bytes as f64 / all.max(1) as f64,
                bytes_per_s,
                errors: slot.errors.load(Ordering::Relaxed),
                reconnects: slot.opened.load(Ordering::Relaxed).saturating_sub(1),
            }
        };
        self.slots.iter().zip(rates).map(status).collect()
    }
}
