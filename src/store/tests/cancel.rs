//! Reads that nobody waits for any more: in the queue, at the drive, and while they are summed. The memory disk holds
//! operations and jobs up until the test lets them go, so each state is one that was seen, not one that was timed.

use std::future::Future;
use std::pin::Pin;

use super::super::disk::Verb;
use super::*;

/// Rows of a test, and of its area.
const ROWS: u32 = 60;

/// Bytes of a row that other threads sum, because it is large; and of one that the loop sums itself.
const LARGE: u32 = 512 << 10;
const SMALL: u32 = 4096;

/// A store that holds [`ROWS`] rows and gives the drive one slot: what more it takes is what can be joined.
struct Bed {
    store: Store,
    mem: Mem,
    rows: Arc<Rows>,
}

impl Bed {
    async fn new(row_bytes: u32) -> Self {
        let mem = Mem::new();
        let room = u64::from(ROWS) * u64::from(row_bytes) * 4;
        let options = Options {
            capacity: Bytes(room.max(8 << 20)),
            segment: Bytes((8 * u64::from(row_bytes)).max(256 << 10)),
            queue_depth: 1,
            ..options("mem".as_ref(), Io::Auto)
        };
        let (store, _) = open_with(&options, &DiskKind::Mem(mem.clone()));
        let rows = area(ROWS, row_bytes, SPACE);
        store.attach(&rows).await.unwrap();
        (0..ROWS).for_each(|n| fill(&rows, n, n));
        let stored = store.put(&rows, (0..ROWS).map(|n| item(n, n)).collect()).await;
        assert_eq!(count(&stored, Outcome::Stored), ROWS as usize);
        (0..ROWS).for_each(|n| rows.fill(n, |bytes| bytes.fill(0xEE)));
        Self { store, mem, rows }
    }

    /// Asks for every row, so that as many are at the drive as it takes, and the others wait. Says how many are.
    fn ask(&self) -> (Job<'_>, usize) {
        self.mem.hold_ops();
        let mut job: Job<'_> = Box::pin(self.store.get(&self.rows, items(), None));
        assert!(is_pending(job.as_mut()));
        let held = settled(|| self.mem.held_ops(), |held| held.len() == most());
        assert!(held.iter().all(|(verb, _)| *verb == Verb::Read));
        (job, held.len())
    }

    fn is_untouched(&self, n: u32) -> bool {
        self.rows.look(n, |bytes| bytes.iter().all(|&byte| byte == 0xEE))
    }

    /// Every row can be had, and nothing is left behind in figures.
    async fn ends_well(self) {
        let Self { store, mem, rows } = self;
        mem.let_go();
        let outcomes = store.get(&rows, items(), None).await;
        assert_eq!(count(&outcomes, Outcome::FromDrive), ROWS as usize);
        assert!((0..ROWS).all(|n| is_filled(&rows, n, n)));
        assert_eq!(store.0.jobs.available_permits(), JOBS, "a job that nobody waits for is over too");
        let metrics = &store.0.shared.metrics;
        assert_eq!((metrics.queued_reads.get(), metrics.in_flight.get()), (0, 0));
        assert_eq!(store.status().damaged, 0);
        store.detach(rows.id).await;
        store.close().await;
        drop(store);
        assert_eq!(settled(|| Arc::strong_count(&rows), |&count| count == 1), 1, "somebody keeps the area");
    }
}

type Job<'a> = Pin<Box<dyn Future<Output = Vec<Outcome>> + Send + 'a>>;

fn items() -> Vec<RowItem> {
    (0..ROWS).map(|n| item(n, n)).collect()
}

/// Small rows that a drive with one slot takes, so that neighbours can be joined.
fn most() -> usize {
    8
}

#[tokio::test]
async fn what_waited_is_not_read_any_more_and_what_the_drive_had_lands_in_its_row() {
    let bed = Bed::new(SMALL).await;
    let before = bed.mem.touches();
    let (job, at_the_drive) = bed.ask();
    assert_eq!(at_the_drive, most());
    drop(job);
    // The drive still has them: their rows are not free, and nobody says that they are.
    let mut detach: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(bed.store.detach(bed.rows.id));
    assert!(is_pending(detach.as_mut()));
    bed.mem.let_ops_go(most() - 1);
    settled(|| is_filled(&bed.rows, 6, 6), |&is| is);
    assert!(is_pending(detach.as_mut()), "one is at the drive still");
    bed.mem.let_ops_go(1);
    detach.await;
    assert!((0..8).all(|n| is_filled(&bed.rows, n, n)));
    assert!((8..ROWS).all(|n| bed.is_untouched(n)), "what nobody waits for was read");
    assert_eq!(bed.mem.touches() - before, 8, "and the drive had other work than it");
    bed.store.attach(&bed.rows).await.unwrap();
    bed.ends_well().await;
}

/// The same without the word to detach: the queue finds out by itself.
#[tokio::test]
async fn a_job_that_was_dropped_makes_way_for_the_next_one() {
    let bed = Bed::new(SMALL).await;
    let before = bed.mem.touches();
    let (job, _) = bed.ask();
    drop(job);
    let mut next: Job<'_> = Box::pin(bed.store.get(&bed.rows, vec![item(50, 0)], None));
    assert!(is_pending(next.as_mut()));
    bed.mem.let_go();
    assert_eq!(next.await, [Outcome::FromDrive]);
    assert!(is_filled(&bed.rows, 0, 50), "it is newer than what the drive had for that row");
    assert_eq!(bed.mem.touches() - before, 9, "eight, and the one that somebody waits for");
    bed.ends_well().await;
}

#[tokio::test]
async fn a_read_that_is_dropped_while_it_is_summed_keeps_its_area_until_then() {
    let bed = Bed::new(LARGE).await;
    bed.mem.hold_jobs();
    let mut job: Job<'_> = Box::pin(bed.store.get(&bed.rows, vec![item(3, 3), item(4, 4)], None));
    assert!(is_pending(job.as_mut()));
    assert_eq!(settled(|| bed.mem.held_jobs(), |&held| held == 2), 2);
    drop(job);
    let mut detach: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(bed.store.detach(bed.rows.id));
    assert!(is_pending(detach.as_mut()));
    bed.mem.let_jobs_go(1);
    // The loop takes events in their order: behind this answer it has heard of the first row.
    bed.store.pinned().await;
    assert!(is_pending(detach.as_mut()), "one is summed still");
    bed.mem.let_jobs_go(1);
    detach.await;
    bed.store.attach(&bed.rows).await.unwrap();
    bed.ends_well().await;
}

#[tokio::test]
async fn an_area_outlives_its_owner_until_the_drive_is_through_with_it() {
    let Bed { store, mem, rows } = Bed::new(SMALL).await;
    mem.hold_ops();
    let mut job: Job<'_> = Box::pin(store.get(&rows, items(), None));
    assert!(is_pending(job.as_mut()));
    assert_eq!(settled(|| mem.held_ops().len(), |&held| held == most()), most());
    drop(job);
    let (id, area) = (rows.id, Arc::downgrade(&rows));
    drop(rows);
    assert!(area.upgrade().is_some(), "the drive would write into memory that is not there");
    mem.let_go();
    store.detach(id).await;
    assert!(settled(|| area.upgrade().is_none(), |&gone| gone), "somebody keeps the area");
    store.close().await;
}

#[tokio::test]
async fn a_peers_read_that_is_dropped_is_not_begun_and_leaks_nothing() {
    let bed = Bed::new(SMALL).await;
    let before = bed.mem.touches();
    let (job, at_the_drive) = bed.ask();
    let mut peers: Pin<Box<dyn Future<Output = Option<Record>> + Send>> =
        Box::pin(bed.store.read(SPACE, key(7)));
    assert!(is_pending(peers.as_mut()));
    drop(peers);
    bed.mem.let_go();
    assert_eq!(count(&job.await, Outcome::FromDrive), ROWS as usize);
    // The peer's came behind all of them.
    bed.store.pinned().await;
    assert_eq!(bed.mem.touches() - before, u64::from(ROWS), "{at_the_drive}");
    bed.ends_well().await;
}
