//! The lookup table of one engine, kept equal to what the drive and the other node hold.
//!
//! One task owns the table: it begins with a snapshot of both and follows their changes. A subscription that
//! lagged is begun again, and the difference is applied without a moment in which a held key is missing.
//! [`Settler::settle`] waits until every change that was sent before the call is in the table: an engine that heard
//! DONE finds what was stored, and does not find what just turned out to be damaged.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::sync::{broadcast, mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::base::block::{RowKey, Space};
use crate::base::table::{Holder, Table};
use crate::cluster::{Cluster, PeerChange};
use crate::store::{Change, ChangeKind, Store};
use crate::tasks::{Kind, Tasks};

/// Slots of the largest table: 128 MiB of shared memory, 8 million keys at half load.
const SLOTS_MAX: usize = 1 << 24;

/// How many times the own store's rows the table makes room for. The boxes of a pair are alike, so the other one
/// holds at most about as many; a larger one overflows softly, which costs lookups and never an answer.
const HOLDERS: usize = 2;

/// Settlings waiting at one time: one per open job at most, and waiting for the queue is bounded by its task.
const SETTLE_QUEUE: usize = 64;

/// Slots for a store of `capacity` bytes with rows of `row_bytes`.
pub(super) fn slots(capacity: u64, row_bytes: u32) -> usize {
    let own = usize::try_from(capacity / u64::from(row_bytes.max(1))).unwrap_or(usize::MAX);
    let wanted = own.saturating_mul(HOLDERS).min(SLOTS_MAX / 2);
    Table::slots_for(wanted).min(SLOTS_MAX)
}

/// Handle of the task that owns the table. Dropping it ends the task.
#[derive(Debug)]
pub(super) struct Held {
    settle: mpsc::Sender<oneshot::Sender<()>>,
    overflowed: Arc<AtomicU64>,
    stop: CancellationToken,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Held {
    /// Fills a table of `slots` and begins to follow. Returns its descriptor too.
    pub(super) async fn start(
        store: Store,
        cluster: Option<Cluster>,
        space: Space,
        slots: usize,
        tasks: &Tasks,
    ) -> std::io::Result<(Self, OwnedFd)> {
        let (table, fd) = Table::create(slots)?;
        let (settle, settling) = mpsc::channel(SETTLE_QUEUE);
        let overflowed = Arc::new(AtomicU64::new(0));
        let stop = CancellationToken::new();
        let table = Arc::new(Mutex::new(table));
        let mut keeper = Keeper { store, cluster, space, table, overflowed: Arc::clone(&overflowed) };
        let drive = keeper.read_drive().await;
        let peer = keeper.read_peer().await;
        tasks.spawn(Kind::Serving, "lookup table", keeper.follow(drive, peer, settling, stop.clone()));
        Ok((Self { settle, overflowed, stop }, fd))
    }

    /// For jobs, which settle on their own.
    pub(super) fn settler(&self) -> Settler {
        Settler(self.settle.clone())
    }

    pub(super) fn overflowed(&self) -> u64 {
        self.overflowed.load(Ordering::Relaxed)
    }
}

/// Waits for the table.
#[derive(Clone, Debug)]
pub(super) struct Settler(mpsc::Sender<oneshot::Sender<()>>);

impl Settler {
    /// Waits until what store and cluster said before is in the table. Returns at once when its owner is gone.
    pub(super) async fn settle(&self) {
        let (done, settled) = oneshot::channel();
        if self.0.send(done).await.is_ok() {
            let _ = settled.await;
        }
    }
}

type Drive = broadcast::Receiver<Change>;
type Peer = Option<broadcast::Receiver<PeerChange>>;

/// Owner of the table.
struct Keeper {
    store: Store,
    cluster: Option<Cluster>,
    space: Space,
    /// Never contended: a lock only so that long work on it can move to a thread of its own.
    table: Arc<Mutex<Table>>,
    overflowed: Arc<AtomicU64>,
}

/// What a subscription said.
enum Heard<T> {
    Change(T),
    /// Some were missed.
    Lagged,
    /// Whoever speaks is gone.
    Ended,
}

impl<T> From<Result<T, RecvError>> for Heard<T> {
    fn from(said: Result<T, RecvError>) -> Self {
        match said {
            Ok(change) => Self::Change(change),
            Err(RecvError::Lagged(_)) => Self::Lagged,
            Err(RecvError::Closed) => Self::Ended,
        }
    }
}

impl Keeper {
    async fn follow(
        mut self,
        mut drive: Drive,
        mut peer: Peer,
        mut settling: mpsc::Receiver<oneshot::Sender<()>>,
        stop: CancellationToken,
    ) {
        let mut drive_lives = true;
        loop {
            // Each arm is cancel-safe: receiving from a channel loses nothing when another arm wins.
            tokio::select! {
                () = stop.cancelled() => return,
                said = drive.recv(), if drive_lives => {
                    drive_lives = self.hear_drive(said.into(), &mut drive).await;
                }
                said = next(&mut peer) => self.hear_peer(said, &mut peer).await,
                done = settling.recv() => {
                    let Some(done) = done else { return };
                    drive_lives = self.drain(&mut drive, &mut peer).await && drive_lives;
                    let _ = done.send(());
                }
            }
            self.count_overflow();
        }
    }

    /// Takes what is there already from both.
    async fn drain(&mut self, drive: &mut Drive, peer: &mut Peer) -> bool {
        let drive_lives = loop {
            match drive.try_recv() {
                Ok(change) => self.apply_drive(change),
                Err(TryRecvError::Lagged(_)) => *drive = self.read_drive().await,
                Err(TryRecvError::Empty) => break true,
                Err(TryRecvError::Closed) => break false,
            }
        };
        while let Some(changes) = peer {
            match changes.try_recv() {
                Ok(change) => self.hear_peer(Heard::Change(change), peer).await,
                Err(TryRecvError::Lagged(_)) => self.hear_peer(Heard::Lagged, peer).await,
                Err(TryRecvError::Closed) => self.hear_peer(Heard::Ended, peer).await,
                Err(TryRecvError::Empty) => break,
            }
        }
        drive_lives
    }

    async fn hear_drive(&mut self, said: Heard<Change>, drive: &mut Drive) -> bool {
        match said {
            Heard::Change(change) => self.apply_drive(change),
            Heard::Lagged => *drive = self.read_drive().await,
            Heard::Ended => return false,
        }
        true
    }

    fn apply_drive(&mut self, change: Change) {
        if change.space != self.space {
            return;
        }
        match change.kind {
            ChangeKind::Added => {
                self.table.lock().add(&change.key, Holder::Drive);
            }
            ChangeKind::Removed => self.table.lock().remove(&change.key, Holder::Drive),
        }
    }

    async fn hear_peer(&mut self, said: Heard<PeerChange>, peer: &mut Peer) {
        match said {
            Heard::Change(PeerChange::Added(space, key)) if space == self.space => {
                self.table.lock().add(&key, Holder::Peer);
            }
            Heard::Change(PeerChange::Removed(space, key)) if space == self.space => {
                self.table.lock().remove(&key, Holder::Peer);
            }
            Heard::Change(PeerChange::Added(..) | PeerChange::Removed(..)) => {}
            Heard::Change(PeerChange::Gone) => self.table.lock().forget(Holder::Peer),
            Heard::Lagged => *peer = self.read_peer().await,
            Heard::Ended => {
                self.table.lock().forget(Holder::Peer);
                *peer = None;
            }
        }
    }

    /// Subscribes to the drive and makes the table hold what it holds.
    async fn read_drive(&mut self) -> Drive {
        let (held, changes) = self.store.subscribe(self.space);
        self.replace(Holder::Drive, held.into_iter().map(|(key, _)| key).collect()).await;
        changes
    }

    async fn read_peer(&mut self) -> Peer {
        let (held, changes) = self.cluster.as_ref()?.subscribe(self.space);
        self.replace(Holder::Peer, held).await;
        Some(changes)
    }

    /// Walks millions of keys and up to 128 MiB: too long for a thread that others wait for.
    async fn replace(&mut self, holder: Holder, keys: Vec<RowKey>) {
        let table = Arc::clone(&self.table);
        let work = tokio::task::spawn_blocking(move || {
            let mut table = table.lock();
            let before = table.overflowed();
            table.replace(holder, &keys);
            let (crowded, slots) = (table.overflowed() - before, table.slots());
            if crowded > 0 {
                tracing::warn!(?holder, keys = keys.len(), crowded, slots, "lookup table is full");
            }
        });
        if work.await.is_err() {
            tracing::error!(?holder, "failed to fill the lookup table");
        }
        self.count_overflow();
    }

    fn count_overflow(&self) {
        self.overflowed.store(self.table.lock().overflowed(), Ordering::Relaxed);
    }
}

/// The next word of the other node; none ever without one.
async fn next(peer: &mut Peer) -> Heard<PeerChange> {
    match peer {
        Some(changes) => changes.recv().await.into(),
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_room_for_both_boxes_and_a_bound() {
        assert_eq!(slots(64 << 20, 4096), 1 << 16);
        assert_eq!(slots(0, 4096), 128);
        assert_eq!(slots(u64::MAX, 4096), SLOTS_MAX);
        assert_eq!(slots(64 << 30, 1 << 20), 1 << 18);
    }
}
