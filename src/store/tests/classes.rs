//! Two classes of work for the drive: reads, which an engine waits for, and writes, which nobody waits for. The memory
//! disk holds operations up, so their order is seen, not timed; age is simulated time.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use super::super::disk::Verb;
use super::*;

/// Rows that are held already, and rows that are offered, each with a row of the area.
const HELD: u32 = 100;
const OFFERED: u32 = 100;

/// Rows of 4 KiB that the drive takes at a time here, and how many of them may be writes.
const SLOTS: usize = 16;
const WRITES: usize = SLOTS / 2;

/// Reads that go before an old write.
const READS_PER_WRITE: usize = 8;

type Job<'a> = Pin<Box<dyn Future<Output = Vec<Outcome>> + Send + 'a>>;

struct Bed {
    store: Store,
    mem: Mem,
    clock: Clock,
    rows: Arc<Rows>,
}

impl Bed {
    /// A store that holds the first rows, before a drive that does nothing until it is told.
    async fn new() -> Self {
        let (mem, clock) = (Mem::new(), Clock::sim());
        let options = Options {
            capacity: Bytes::mib(8),
            // None is filled while a test looks at the order.
            segment: Bytes::mib(1),
            queue_depth: 2,
            ..options("mem".as_ref(), Io::Auto)
        };
        let opened = Store::open(options, DiskKind::Mem(mem.clone()), clock.clone(), &Meter::new());
        let (store, _) = opened.unwrap();
        let rows = area(HELD + OFFERED, 4096, SPACE);
        store.attach(&rows).await.unwrap();
        (0..HELD + OFFERED).for_each(|n| fill(&rows, n, n));
        let stored = store.put(&rows, (0..HELD).map(|n| item(n, n)).collect()).await;
        assert_eq!(count(&stored, Outcome::Stored), HELD as usize);
        mem.hold_ops();
        Self { store, mem, clock, rows }
    }

    fn get(&self, which: std::ops::Range<u32>, deadline: Option<Micros>) -> Job<'_> {
        let items = which.map(|n| item(n, n)).collect();
        let mut job: Job<'_> = Box::pin(self.store.get(&self.rows, items, deadline));
        assert!(is_pending(job.as_mut()));
        job
    }

    fn put(&self) -> Job<'_> {
        let items = (HELD..HELD + OFFERED).map(|n| item(n, n)).collect();
        let mut job: Job<'_> = Box::pin(self.store.put(&self.rows, items));
        assert!(is_pending(job.as_mut()));
        job
    }

    /// Operations at the drive, once there are as many as this.
    fn at_the_drive(&self, many: usize) -> Vec<Verb> {
        let verbs = || self.mem.held_ops().into_iter().map(|(verb, _)| verb).collect::<Vec<_>>();
        let seen = settled(verbs, |verbs| verbs.len() == many);
        assert_eq!(seen.len(), many, "{seen:?}");
        seen
    }

    /// Ends the oldest operation, and says what was begun in its stead.
    fn next(&self, many: usize) -> Verb {
        self.mem.let_ops_go(1);
        *self.at_the_drive(many).last().unwrap()
    }

    async fn end(self) {
        self.mem.let_go();
        self.store.close().await;
    }
}

#[tokio::test]
async fn a_read_is_begun_at_once_behind_any_backlog_of_writes() {
    let bed = Bed::new().await;
    let put = bed.put();
    assert_eq!(bed.at_the_drive(WRITES), [Verb::Write; WRITES], "half of the slots stay free");
    // They are free for reads that come now: no write has to end first.
    let few = bed.get(0..3, None);
    assert_eq!(bed.at_the_drive(WRITES + 3)[WRITES..], [Verb::Read; 3]);
    // With all slots taken, reads that wait go before each of the 92 writes that waited longer.
    let many = bed.get(3..40, None);
    assert_eq!(bed.at_the_drive(SLOTS)[WRITES + 3..], [Verb::Read; 5]);
    for n in 0..32 {
        assert_eq!(bed.next(SLOTS), Verb::Read, "after {n}");
    }
    // Then it is the writes' turn again.
    assert_eq!(bed.next(SLOTS), Verb::Write);
    bed.mem.let_go();
    for (job, outcome, all) in [(few, Outcome::FromDrive, 3), (many, Outcome::FromDrive, 37)] {
        assert_eq!(count(&job.await, outcome), all);
    }
    assert_eq!(count(&put.await, Outcome::Stored), OFFERED as usize);
    bed.end().await;
}

#[tokio::test]
async fn an_old_write_goes_with_every_few_reads_and_no_more() {
    let bed = Bed::new().await;
    let put = bed.put();
    bed.at_the_drive(WRITES);
    let reads = bed.get(0..HELD, None);
    bed.at_the_drive(SLOTS);
    bed.clock.advance(Duration::from_secs(2));
    let begun: Vec<Verb> = (0..60).map(|_| bed.next(SLOTS)).collect();
    let writes = begun.iter().filter(|&&verb| verb == Verb::Write).count();
    assert!(writes >= 60 / (READS_PER_WRITE + 1) - 1, "writes stand still: {begun:?}");
    let between = begun.split(|&verb| verb == Verb::Write);
    let inner = between.skip(1).take(writes - 1);
    for reads in inner {
        assert_eq!(reads.len(), READS_PER_WRITE, "{begun:?}");
    }
    bed.mem.let_go();
    assert_eq!(count(&reads.await, Outcome::FromDrive), HELD as usize);
    assert_eq!(count(&put.await, Outcome::Stored), OFFERED as usize);
    bed.end().await;
}

#[tokio::test]
async fn what_has_arrived_before_the_deadline_is_kept_and_nothing_is_begun_after_it() {
    let bed = Bed::new().await;
    (0..HELD).for_each(|n| bed.rows.fill(n, |bytes| bytes.fill(0xEE)));
    let before = bed.mem.touches();
    let deadline = bed.clock.now().plus(Duration::from_millis(10));
    let job = bed.get(0..HELD, Some(deadline));
    bed.at_the_drive(SLOTS);
    // Five arrive in time, and five others are begun for them.
    bed.mem.let_ops_go(5);
    bed.at_the_drive(SLOTS);
    bed.clock.advance(Duration::from_millis(11));
    bed.mem.let_go();
    let outcomes = job.await;
    let begun = SLOTS + 5;
    assert_eq!(outcomes[..begun], vec![Outcome::FromDrive; begun], "what was begun in time counts");
    assert_eq!(outcomes[begun..], vec![Outcome::Failed; HELD as usize - begun]);
    for n in 0..HELD {
        let is_there = n < begun as u32;
        assert_eq!(is_filled(&bed.rows, n, n), is_there, "row {n}");
        assert!(is_there || bed.rows.look(n, |bytes| bytes.iter().all(|&byte| byte == 0xEE)), "row {n}");
    }
    assert_eq!(bed.mem.touches() - before, begun as u64);
    assert!(bed.store.holds(SPACE, &key(HELD - 1)), "late is not lost");
    bed.end().await;
}
