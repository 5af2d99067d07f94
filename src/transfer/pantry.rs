//! Rows on their way from the drive to the rails.
//!
//! A row is read once, and lies here while its pieces leave on whichever connections ask for them: the first ones while
//! the drive still delivers the last ones. Reading begins when a peer says that it will pull a row, so that drive and
//! wire work at the same time. All rows together take at most `serve_memory`; memory is set aside before a read starts,
//! and what was sent is kept for further rows. A piece that is to be sent now has a claim on memory: it takes it from
//! rows that no connection is sending. Rows that are only wanted soon wait until there is some free. A connection holds
//! at most the row that it is sending, and waits for memory only while it holds none, so connections cannot wait for
//! each other in a circle.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Shelf;
use super::arrival::{Arrival, Arriving};
use super::wire::Ask;
use crate::base::block::{RowKey, Space};
use crate::base::buffer::Pool;
use crate::base::landing::About;
use crate::tasks::{Kind, Tasks};

/// Rows that are here or being read at one time, however small.
const ROWS: usize = 4096;

/// Rows to be read ahead that wait for memory. More are forgotten: a pull reads them too.
const WISHES: usize = 1024;

/// A row that nobody has asked for in this time is the first to go: its hint came late, or its rail was lost. What is
/// read ahead is on the wire long before, unless the wire carries less than 6 MB/s.
const STALE: Duration = Duration::from_secs(10);

/// Whose row it is: the peer's ticket and the peer's number of the fetch.
pub type Whose = (u64, u64);

/// Cheap to clone.
#[derive(Clone)]
pub struct Pantry(Arc<Inner>);

struct Inner {
    shelf: Arc<dyn Shelf>,
    tasks: Tasks,
    limit: u64,
    /// What rows are read into.
    memory: Pool,
    /// Taken from under the lock of `stock` only; given back without.
    free: AtomicU64,
    freed: Notify,
    stock: Mutex<Stock>,
}

#[derive(Default)]
struct Stock {
    rows: HashMap<(Space, RowKey), Entry>,
    wishes: VecDeque<(Whose, Ask)>,
    guests: HashMap<u64, usize>,
}

struct Entry {
    number: u64,
    row: Arriving,
    cancel: CancellationToken,
    whose: Whose,
    users: usize,
    /// Bytes that were sent, those sent twice counted twice.
    sent: u64,
    row_bytes: u32,
    /// Its fetch was given up: it goes when no connection sends it any more.
    forgotten: bool,
    used: Instant,
    charge: Arc<Charge>,
}

/// Memory set aside for a row.
struct Charge {
    pantry: Pantry,
    bytes: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.pantry.0.free.fetch_add(self.bytes, Ordering::AcqRel);
        self.pantry.0.freed.notify_waiters();
    }
}

/// A row that a connection is sending from.
pub struct Use {
    pantry: Pantry,
    key: (Space, RowKey),
    number: u64,
    row: Arriving,
    charge: Option<Arc<Charge>>,
    sent: u64,
}

impl Pantry {
    /// Takes at most `limit` bytes for rows; a row larger than that is served alone.
    pub fn new(shelf: Arc<dyn Shelf>, limit: u64, tasks: &Tasks) -> Self {
        let (limit, tasks) = (limit.max(1), tasks.clone());
        let (free, freed, stock) = (AtomicU64::new(limit), Notify::new(), Mutex::default());
        let memory = Pool::new(usize::try_from(limit).unwrap_or(usize::MAX));
        Self(Arc::new(Inner { shelf, tasks, limit, memory, free, freed, stock }))
    }

    /// A connection of a peer begins. What was read for a peer goes with its last connection.
    pub fn enter(&self, guest: u64) {
        *self.0.stock.lock().guests.entry(guest).or_default() += 1;
    }

    pub fn leave(&self, guest: u64) {
        let mut stock = self.0.stock.lock();
        let left = stock.guests.get_mut(&guest).map(|n| {
            *n -= 1;
            *n
        });
        if left == Some(0) {
            stock.guests.remove(&guest);
            drop(stock);
            self.drop_idle(|whose| whose.0 == guest);
        }
    }

    /// Nobody waits for the rows of this fetch any more: what is not being sent is not read either.
    pub fn cancel(&self, whose: Whose) {
        self.drop_idle(|of| of == whose);
    }

    fn drop_idle(&self, of: impl Fn(Whose) -> bool) {
        let mut gone = Vec::new();
        let mut stock = self.0.stock.lock();
        stock.wishes.retain(|(whose, _)| !of(*whose));
        stock.rows.retain(|_, entry| {
            entry.forgotten |= of(entry.whose);
            let goes = entry.users == 0 && entry.forgotten;
            if goes {
                entry.cancel.cancel();
                gone.push(entry.charge.clone());
            }
            !goes
        });
        drop(stock);
        drop(gone);
        self.grant();
    }

    /// Begins to read a row, when there is memory for it, or as soon as there is.
    pub fn ahead(&self, whose: Whose, ask: &Ask) {
        let mut stock = self.0.stock.lock();
        if let Some(entry) = stock.rows.get_mut(&(ask.space, ask.key)) {
            (entry.whose, entry.used, entry.forgotten) = (whose, Instant::now(), false);
        } else if stock.wishes.len() < WISHES {
            stock.wishes.push_back((whose, *ask));
        }
        drop(stock);
        self.grant();
    }

    /// Begins the reads ahead that there is memory for, in the order in which they were asked for.
    fn grant(&self) {
        let mut stock = self.0.stock.lock();
        while let Some((whose, ask)) = stock.wishes.front().copied() {
            let there = stock.rows.contains_key(&(ask.space, ask.key));
            if !there {
                match self.set_aside(&stock, ask.row_bytes) {
                    Some(charge) => self.begin(&mut stock, whose, &ask, charge),
                    None => match stale(&stock).and_then(|key| stock.rows.remove(&key)) {
                        Some(old) => {
                            old.cancel.cancel();
                            continue;
                        }
                        None => break,
                    },
                }
            }
            stock.wishes.pop_front();
        }
    }

    /// Memory for one row, when it is free.
    fn set_aside(&self, stock: &Stock, row_bytes: u32) -> Option<Arc<Charge>> {
        let bytes = u64::from(row_bytes).min(self.0.limit);
        if stock.rows.len() >= ROWS || self.0.free.load(Ordering::Acquire) < bytes {
            return None;
        }
        self.0.free.fetch_sub(bytes, Ordering::AcqRel);
        Some(Arc::new(Charge { pantry: self.clone(), bytes }))
    }

    fn begin(&self, stock: &mut Stock, whose: Whose, ask: &Ask, charge: Arc<Charge>) {
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        let (arrival, row) = Arrival::new(ask.row_bytes, &self.0.memory, charge.clone());
        let cancel = CancellationToken::new();
        let entry = Entry {
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            row,
            cancel: cancel.clone(),
            whose,
            users: 0,
            sent: 0,
            row_bytes: ask.row_bytes,
            forgotten: false,
            used: Instant::now(),
            charge,
        };
        stock.rows.insert((ask.space, ask.key), entry);
        let (shelf, ask) = (self.0.shelf.clone(), *ask);
        self.0.tasks.spawn(Kind::Chore, "row for a peer", async move {
            let read = async { shelf.read(ask.space, ask.key, arrival).await };
            cancel.run_until_cancelled(read).await;
        });
    }

    /// The row of a pull, read or being read. Waits for memory. Cancel-safe.
    pub async fn hold(&self, whose: Whose, ask: &Ask) -> Use {
        loop {
            let freed = self.0.freed.notified();
            tokio::pin!(freed);
            freed.as_mut().enable();
            if let Some(found) = self.try_hold(whose, ask) {
                return found;
            }
            freed.await;
        }
    }

    fn try_hold(&self, whose: Whose, ask: &Ask) -> Option<Use> {
        let key = (ask.space, ask.key);
        let mut stock = self.0.stock.lock();
        if !stock.rows.contains_key(&key) {
            // Of a row that was read the memory is free at once; of one being read, as soon as its read has ended.
            let mut promised = 0;
            let charge = loop {
                if let Some(charge) = self.set_aside(&stock, ask.row_bytes) {
                    break charge;
                }
                let enough = self.0.free.load(Ordering::Acquire) + promised >= u64::from(ask.row_bytes);
                let victim = if enough && promised > 0 { None } else { idle(&stock) };
                let entry = stock.rows.remove(&victim?)?;
                entry.cancel.cancel();
                promised += if Arc::strong_count(&entry.charge) > 1 { entry.charge.bytes } else { 0 };
            };
            self.begin(&mut stock, whose, ask, charge);
        }
        let entry = stock.rows.get_mut(&key).expect("found or begun");
        entry.users += 1;
        (entry.whose, entry.used, entry.forgotten) = (whose, Instant::now(), false);
        Some(Use {
            pantry: self.clone(),
            key,
            number: entry.number,
            row: entry.row.clone(),
            charge: Some(entry.charge.clone()),
            sent: 0,
        })
    }

    #[cfg(test)]
    pub fn free(&self) -> u64 {
        self.0.free.load(Ordering::Acquire)
    }
}

/// The longest unused of the rows that were forgotten.
fn stale(stock: &Stock) -> Option<(Space, RowKey)> {
    let now = Instant::now();
    let old = |entry: &&Entry| entry.users == 0 && now.duration_since(entry.used) > STALE;
    let old = stock.rows.iter().filter(|(_, entry)| old(entry));
    old.min_by_key(|(_, entry)| entry.used).map(|(key, _)| *key)
}

/// The row that goes first when memory is needed: a forgotten one, else the one that will be needed last, which is
/// the one that was wished for last.
fn idle(stock: &Stock) -> Option<(Space, RowKey)> {
    let newest = || {
        let idle = stock.rows.iter().filter(|(_, entry)| entry.users == 0);
        idle.max_by_key(|(_, entry)| entry.number).map(|(key, _)| *key)
    };
    stale(stock).or_else(newest)
}

impl Use {
    /// What is known of the row, and these bytes of it, once they were read; `None`: they do not come. Cancel-safe.
    pub async fn part(&mut self, range: Range<usize>) -> Option<(About, Vec<Bytes>)> {
        self.row.part(range).await
    }

    /// So many bytes of it were sent.
    pub fn sent(&mut self, bytes: u64) {
        self.sent += bytes;
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        let mut gone = None;
        {
            let mut stock = self.pantry.0.stock.lock();
            if let Some(entry) = stock.rows.get_mut(&self.key).filter(|entry| entry.number == self.number) {
                entry.users -= 1;
                entry.sent += self.sent;
                let missing = entry.row.has_failed();
                let sent = entry.sent >= u64::from(entry.row_bytes);
                if entry.users == 0 && (missing || sent || entry.forgotten) {
                    entry.cancel.cancel();
                    gone = stock.rows.remove(&self.key);
                }
            }
        }
        drop(gone);
        self.charge = None;
        // A row that is idle now may give its memory to whoever waits for some.
        self.pantry.0.freed.notify_waiters();
        self.pantry.grant();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use futures_util::future::BoxFuture;

    use super::super::Record;
    use super::super::tests::{key, space};
    use super::super::wire::Want;
    use super::*;

    /// Counts reads; those of keys over `ends` do not end.
    struct Counting {
        begun: AtomicUsize,
        ends: u32,
    }

    impl Shelf for Counting {
        fn read(&self, _: Space, wanted: RowKey, into: Arrival) -> BoxFuture<'static, ()> {
            self.begun.fetch_add(1, Ordering::AcqRel);
            let n = u32::from_le_bytes(wanted.hash.0[..4].try_into().unwrap());
            if n >= self.ends {
                return Box::pin(async move {
                    let _into = into;
                    std::future::pending::<()>().await;
                });
            }
            let payload = Bytes::from(vec![0; 4096]);
            into.whole(Record { position: n, checksum: 0, payload });
            Box::pin(std::future::ready(()))
        }
    }

    fn pantry(rows: u64, ends: u32) -> (Pantry, Arc<Counting>, Tasks) {
        let (shelf, tasks) = (Arc::new(Counting { begun: AtomicUsize::new(0), ends }), Tasks::new());
        (Pantry::new(shelf.clone(), rows * 4096, &tasks), shelf, tasks)
    }

    fn ask(n: u32) -> Ask {
        Ask { space: space(), key: key(n), row_bytes: 4096, ..Ask::plain(Want::Pull, 1, 0, 4096) }
    }

    #[tokio::test]
    async fn a_row_is_read_once_for_all_its_pieces_and_goes_when_all_were_sent() {
        let (pantry, shelf, _tasks) = pantry(4, 100);
        pantry.ahead((1, 1), &ask(0));
        for half in 0..2 {
            let mut row = pantry.hold((1, 1), &ask(0)).await;
            assert_eq!(row.part(0..4096).await.unwrap().0.position, 0, "{half}");
            row.sent(2048);
        }
        assert_eq!(shelf.begun.load(Ordering::Acquire), 1);
        assert!(pantry.0.stock.lock().rows.is_empty());
        while pantry.free() < 4 * 4096 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn memory_is_bounded_and_what_is_sent_now_goes_before_what_is_wanted_soon() {
        let (pantry, shelf, _tasks) = pantry(2, 100);
        (0..5).for_each(|n| pantry.ahead((1, 1), &ask(n)));
        tokio::task::yield_now().await;
        assert_eq!((shelf.begun.load(Ordering::Acquire), pantry.free()), (2, 0));
        let mut far = pantry.hold((1, 1), &ask(9)).await;
        assert_eq!(far.part(0..4096).await.unwrap().0.position, 9);
        let mut near = pantry.hold((1, 1), &ask(0)).await;
        assert_eq!(near.part(0..4096).await.unwrap().0.position, 0, "the first one wished for was kept");
        // Both are being sent: a third waits, until one of them is sent.
        let third = ask(3);
        let mut waits = std::pin::pin!(pantry.hold((1, 1), &third));
        assert!(futures_util::poll!(&mut waits).is_pending());
        drop(near);
        assert_eq!(waits.await.part(0..4096).await.unwrap().0.position, 3);
    }

    #[tokio::test]
    async fn a_cancelled_fetch_reads_nothing_more_and_gives_its_memory_back() {
        let (pantry, shelf, _tasks) = pantry(2, 0);
        (0..8).for_each(|n| pantry.ahead((1, 7), &ask(n)));
        tokio::task::yield_now().await;
        assert_eq!(shelf.begun.load(Ordering::Acquire), 2);
        pantry.cancel((1, 7));
        while pantry.free() < 2 * 4096 {
            tokio::task::yield_now().await;
        }
        assert_eq!(shelf.begun.load(Ordering::Acquire), 2, "the other six were never begun");
        pantry.enter(1);
        pantry.ahead((1, 8), &ask(1));
        pantry.leave(1);
        while pantry.free() < 2 * 4096 {
            tokio::task::yield_now().await;
        }
    }
}
