//! Power cuts at every operation: a life is lived once to count its operations, then once per operation with the
//! power going there, and what is left is looked at in four ways as the next start would find it.

use super::life::Life;
use super::*;

/// A life with the power going at each `step`-th operation from `first` on. Returns how many starts were judged.
async fn cut_from(first: u64, step: usize, sealing: &Sealing) -> u64 {
    let whole = Mem::new();
    let life = Life::live_sealed(&whole, &Clock::sim(), sealing).await;
    assert!(
        life.len() > 100 && life.released > 20 && life.rotten.len() > 5,
        "{} {} {:?}",
        life.len(),
        life.released,
        life.rotten
    );
    assert!(life.promised.len() > 20, "{}", life.promised.len());
    let total = whole.ops();
    assert!(total > 200, "{total}");
    let mut judged = 0;
    for cut in (first..total).step_by(step) {
        let mem = Mem::new();
        mem.cut_at(cut);
        let life = Life::live_sealed(&mem, &Clock::sim(), sealing).await;
        assert!(mem.is_cut());
        for loss in [Loss::All, Loss::None, Loss::Torn(cut * 2 + 1), Loss::Reordered(cut * 77 + 5)] {
            life.check(&mem.after_cut(loss), &format!("cut at {cut} of {total}, {loss:?}")).await;
            judged += 1;
        }
    }
    judged
}

// Two halves, so that two cores can share them.

#[tokio::test]
async fn a_power_cut_at_any_even_operation_never_gives_a_wrong_row_nor_loses_a_sealed_one() {
    let judged = cut_from(0, 2, &Sealing::default()).await;
    println!("{judged} starts after a power cut");
}

#[tokio::test]
async fn a_power_cut_at_any_odd_operation_never_gives_a_wrong_row_nor_loses_a_sealed_one() {
    let judged = cut_from(1, 2, &Sealing::default()).await;
    println!("{judged} starts after a power cut");
}

/// Sealing changes no operation of the drive, so a part of them says as much.
#[tokio::test]
async fn a_power_cut_at_any_fifth_operation_does_no_more_to_sealed_rows() {
    let keys = folder();
    let judged = cut_from(2, 5, &sealed::sealing(keys.path(), true)).await;
    println!("{judged} starts after a power cut");
}

#[tokio::test]
async fn a_power_cut_that_keeps_everything_costs_what_was_in_flight_at_most() {
    let mem = Mem::new();
    let life = Life::live(&mem, &Clock::sim()).await;
    let (store, opened) = open_with(&life::options_of_a_life(), &DiskKind::Mem(mem.after_cut(Loss::None)));
    assert!(opened.rows > 20, "{opened:?}");
    assert!(life.promised.iter().all(|&which| life::holds(&store, which)));
    store.close().await;
}

#[tokio::test]
async fn this_test_notices_a_drive_that_lies_about_what_is_durable() {
    use futures_util::FutureExt;
    let mem = Mem::new();
    mem.lie();
    let life = Life::live(&mem, &Clock::sim()).await;
    assert!(life.promised.len() > 20);
    for loss in [Loss::All, Loss::Torn(5), Loss::Reordered(5)] {
        let left = mem.after_cut(loss);
        let verdict = std::panic::AssertUnwindSafe(life.check(&left, "a liar")).catch_unwind().await;
        assert!(verdict.is_err(), "rows that were never durable count as kept: {loss:?}");
    }
}
