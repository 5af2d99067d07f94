//! Power cuts at every operation: a workload is run once to count its operations, then once per operation with the
//! power going there, and the drive is looked at as the next start would find it.

use super::*;

const ROWS: u32 = 90;

fn small(mem: &Mem) -> (Options, DiskKind) {
    let options =
        Options { capacity: Bytes::kib(700), segment: Bytes::kib(128), ..options("mem".as_ref(), Io::Auto) };
    (options, DiskKind::Mem(mem.clone()))
}

/// What was promised before the power went.
struct Promised {
    /// Rows reported as stored, and how many segments were sealed when they were all reported.
    stored: Vec<u32>,
    /// Rows of which it is certain that their segment was sealed, and not removed, before the power went.
    sealed: Vec<u32>,
}

/// Stores rows until all are stored or the power goes.
async fn workload(mem: &Mem) -> Promised {
    let (options, disk) = small(mem);
    let mut promised = Promised { stored: Vec::new(), sealed: Vec::new() };
    let Ok((store, _)) = Store::open(options, disk, Clock::sim(), &Meter::new()) else { return promised };
    let rows = area(3, 4096, SPACE);
    store.attach(&rows).await.unwrap();
    let (mut stored, mut in_segment) = (Vec::new(), 0);
    for batch in 0..ROWS / 3 {
        let sealed_before = store.status().sealed as u64 + store.status().reclaimed;
        let numbers: Vec<u32> = (0..3).map(|i| batch * 3 + i).collect();
        numbers.iter().zip(0..).for_each(|(&n, row)| fill(&rows, row, n));
        let items = numbers.iter().zip(0..).map(|(&n, row)| item(n, row)).collect();
        let outcomes = store.put(&rows, items).await;
        let sealed_after = store.status().sealed as u64 + store.status().reclaimed;
        if sealed_after > sealed_before {
            // A seal came between, so everything before this batch is in sealed segments.
            in_segment = stored.len();
        }
        stored.extend(numbers.iter().zip(outcomes).filter(|(_, o)| *o == Outcome::Stored).map(|(n, _)| *n));
    }
    let is_held = |n: &u32| store.holds(SPACE, &key(*n));
    promised.sealed = stored[..in_segment].iter().copied().filter(is_held).collect();
    promised.stored = stored;
    store.close().await;
    promised
}

/// Opens what a cut left, and holds it against what was promised.
async fn check(mem: &Mem, promised: &Promised, loss: Loss, context: &str) {
    let (options, disk) = small(mem);
    let opened = Store::open(options, disk, Clock::sim(), &Meter::new());
    let (store, opened) = opened.unwrap_or_else(|e| panic!("{context}: {e}"));
    let rows = area(3, 4096, SPACE);
    store.attach(&rows).await.unwrap();
    // get_each fails on a wrong row.
    let outcomes = get_each(&store, &rows, 0..ROWS).await;
    for n in &promised.sealed {
        assert!(outcomes[*n as usize].is_ok(), "{context}: row {n} of a sealed segment is lost ({opened:?})");
    }
    if loss == Loss::None {
        let kept = promised.stored.iter().filter(|n| outcomes[**n as usize].is_ok()).count();
        let held = promised.stored.len().min(60);
        assert!(kept >= held.saturating_sub(30), "{context}: {kept} of {} came back", promised.stored.len());
    }
    assert!(store.status().used <= 700 << 10, "{context}");
    // And it goes on: what is missing can be stored.
    let again = put_each(&store, &rows, 200..215).await;
    assert_eq!(count(&again, Outcome::Stored), 15, "{context}: {:?}", store.status());
    store.close().await;
    let left: Vec<_> = mem.list().into_iter().filter(|f| f.name.contains("unfinished")).collect();
    assert!(left.is_empty(), "{context}: {left:?}");
}

#[tokio::test]
async fn a_power_cut_at_any_operation_never_gives_a_wrong_row_nor_loses_a_sealed_one() {
    let whole = Mem::new();
    let promised = workload(&whole).await;
    assert_eq!(promised.stored.len() as u32, ROWS);
    assert!(promised.sealed.len() > 20);
    let total = whole.ops();
    assert!(total > 100, "{total}");
    for cut in 0..total {
        let mem = Mem::new();
        mem.cut_at(cut);
        let promised = workload(&mem).await;
        for loss in [Loss::All, Loss::None, Loss::Torn(cut * 2 + 1), Loss::Torn(cut * 77 + 5)] {
            check(&mem.after_cut(loss), &promised, loss, &format!("cut at {cut} of {total}, {loss:?}")).await;
        }
    }
}

#[tokio::test]
async fn this_test_notices_a_drive_that_lies_about_what_is_durable() {
    use futures_util::FutureExt;
    let mem = Mem::new();
    mem.lie();
    let promised = workload(&mem).await;
    assert!(promised.sealed.len() > 20);
    let left = mem.after_cut(Loss::All);
    let verdict =
        std::panic::AssertUnwindSafe(check(&left, &promised, Loss::All, "a liar")).catch_unwind().await;
    assert!(verdict.is_err(), "rows that were never durable count as kept");
}
