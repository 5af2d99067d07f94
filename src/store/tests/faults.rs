//! Drives that break: from the N-th operation on, reads included, everything fails, for every N of a life and every
//! way of failing. Each call answers, no row is wrong, the capacity holds, and when the drive works again so does
//! the store.

use std::time::Duration;

use super::life::{Areas, Life, accounts_are_right, offer, open_of_a_life, options_of_a_life};
use super::*;

/// Longest that anything may take: a call that waits for ever is what is looked for, not a slow one.
const PATIENCE: Duration = Duration::from_secs(30);

/// Breaks the drive at each `step`-th operation from `first` on.
async fn break_from(first: u64, step: usize, failure: Failure, sealing: &Sealing) -> u64 {
    let whole = Mem::new();
    Life::live_sealed(&whole, &Clock::sim(), sealing).await;
    let total = whole.touches();
    let mut judged = 0;
    for touch in (first..total).step_by(step) {
        let context = format!("{failure:?} from operation {touch} of {total} on");
        let judge = std::pin::pin!(break_at(touch, failure, sealing, &context));
        tokio::time::timeout(PATIENCE, judge).await.unwrap_or_else(|_| panic!("{context}: a call hangs"));
        judged += 1;
    }
    judged
}

async fn break_at(touch: u64, failure: Failure, sealing: &Sealing, context: &str) {
    let mem = Mem::new();
    mem.break_at(touch, failure);
    // Whatever is handed out during it was looked at there.
    Life::live_sealed(&mem, &Clock::sim(), sealing).await;
    let taken: u64 = mem.list().iter().map(|f| f.taken).sum();
    assert!(taken <= options_of_a_life().capacity.0, "{context}: {taken}");
    // A start on the broken drive serves what it can or says why not.
    let clock = Clock::sim();
    let start = || open_of_a_life(sealing, &mem, &clock);
    let areas = Areas::new();
    let (store, begun_broken) = match start() {
        Ok((store, _)) => {
            areas.attach(&store).await;
            let _ = (areas.put(&store, 0, &[600, 601]).await, areas.get(&store, (0, 5)).await);
            assert!(store.status().used <= store.status().capacity, "{context}: {:?}", store.status());
            mem.mend();
            (store, true)
        }
        Err(error) => {
            mem.mend();
            let (store, _) = start().unwrap_or_else(|e| panic!("{context}: {error}, and mended: {e}"));
            areas.attach(&store).await;
            (store, false)
        }
    };
    goes_on(&store, &areas, &clock, context).await;
    assert!(store.status().used <= store.status().capacity, "{context}: {:?}", store.status());
    store.close().await;
    drop(store);
    // And the next start has it all.
    let (store, opened) = start().unwrap_or_else(|e| panic!("{context}: {e}"));
    areas.attach(&store).await;
    let new: Vec<_> = (700..706).map(|n| (0, n)).collect();
    let outcomes = areas.get_all(&store, &new).await;
    assert_eq!(outcomes, [Outcome::FromDrive; 6], "{context}, begun broken: {begun_broken}, {opened:?}");
    let all: Vec<_> = Life::all().chain([(0, 600), (0, 601)]).chain(new).collect();
    let readable = areas.get_all(&store, &all).await.iter().filter(|o| o.is_ok()).count() as u64;
    assert_eq!(store.status().rows, readable, "{context}: {:?}", store.status());
    accounts_are_right(&store, &mem, context);
    store.close().await;
}

/// The drive works again: after its pause the store takes rows, and gives them back.
async fn goes_on(store: &Store, areas: &Areas, clock: &Clock, context: &str) {
    for attempt in 0.. {
        // A call is an event at which the store looks at the clock.
        clock.advance(Duration::from_secs(60));
        let _ = areas.get(store, (0, 5)).await;
        if store.status().read_only.is_none() {
            break;
        }
        assert!(attempt < 1000, "{context}: {:?}", store.status());
    }
    for n in 700..706 {
        assert_eq!(offer(store, areas, (0, n)).await, Outcome::Stored, "{context}: {:?}", store.status());
        assert_eq!(areas.get(store, (0, n)).await, Outcome::FromDrive, "{context}");
    }
}

#[tokio::test]
async fn a_drive_with_input_and_output_errors_from_any_operation_on() {
    let judged = break_from(0, 1, Failure::Broken, &Sealing::default()).await;
    println!("{judged} lives on a drive that breaks");
}

#[tokio::test]
async fn a_drive_that_breaks_at_any_seventh_operation_does_no_more_to_sealed_rows() {
    let keys = folder();
    let sealing = sealed::sealing(keys.path(), true);
    let judged = break_from(3, 7, Failure::Broken, &sealing).await;
    println!("{judged} lives on a drive that breaks");
}

#[tokio::test]
async fn a_drive_that_is_full_from_any_operation_on() {
    let judged = break_from(0, 1, Failure::Full, &Sealing::default()).await;
    println!("{judged} lives on a drive that fills up");
}

#[tokio::test]
async fn a_drive_that_moves_half_from_any_operation_on() {
    let judged = break_from(0, 1, Failure::Short, &Sealing::default()).await;
    println!("{judged} lives on a drive that falls short");
}
