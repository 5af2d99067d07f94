//! Pinned rows and power: what was answered as pinned stays pinned and, when it was durable, stays there, wherever the
//! power goes and however much is written after it.

use super::life::{Areas, SIDES, accounts_are_right, holds, open_of_a_life};
use super::*;

/// Rows that are pinned, four at a time, while others are offered that do not fit.
const PINNED: u32 = 12;

/// What a store was heard to say before the power went.
#[derive(Default)]
struct Said {
    /// Rows whose pin was answered, and whether they were durable then.
    pinned: HashMap<u32, bool>,
    /// Rows whose pin was asked for, answered or not.
    asked: Vec<u32>,
    released: u64,
}

async fn live(mem: &Mem) -> Said {
    let mut said = Said::default();
    let Ok((store, _)) = open_of_a_life(&Sealing::default(), mem, &Clock::sim()) else { return said };
    let areas = Areas::new();
    areas.attach(&store).await;
    for batch in 0..60 {
        let first = batch * 4;
        let outcomes = areas.put(&store, 0, &[first, first + 1, first + 2, first + 3]).await;
        let step = batch / 5;
        if batch % 5 == 4 && step < PINNED / 4 {
            // One that is sealed by now, and some of the newest.
            let rows = [first - 8, first, first + 1, first + 2];
            said.asked.extend(rows);
            if store.pin(SIDES[0].0, rows.map(key).to_vec()).await.is_ok() {
                let held = rows.into_iter().filter(|&n| holds(&store, (0, n)));
                said.pinned.extend(held.map(|n| (n, store.is_sealed(SIDES[0].0, &key(n)))));
            }
        }
        if mem.is_cut() && !outcomes.iter().any(|outcome| outcome.is_ok()) {
            break;
        }
        said.pinned.iter_mut().for_each(|(&n, durable)| *durable |= store.is_sealed(SIDES[0].0, &key(n)));
    }
    said.released = store.status().released;
    store.close().await;
    said
}

async fn check(said: &Said, mem: &Mem, context: &str) {
    let (store, _) = open_of_a_life(&Sealing::default(), mem, &Clock::sim()).unwrap();
    let areas = Areas::new();
    areas.attach(&store).await;
    let pinned: Vec<_> = store.pinned().await.into_iter().map(|(_, key)| key).collect();
    for (&n, &durable) in &said.pinned {
        assert!(pinned.contains(&key(n)), "{context}: row {n} was pinned and is not");
        let outcome = areas.get(&store, (0, n)).await;
        assert!(outcome.is_ok() || !durable, "{context}: row {n} was pinned and durable and is lost");
    }
    let asked: Vec<_> = said.asked.iter().map(|&n| key(n)).collect();
    assert!(pinned.iter().all(|key| asked.contains(key)), "{context}: pins that nobody asked for");
    // They hold against what comes next, too.
    let kept: Vec<u32> = said.pinned.keys().copied().filter(|&n| holds(&store, (0, n))).collect();
    for n in (1000..1160).step_by(4) {
        areas.put(&store, 0, &[n, n + 1, n + 2, n + 3]).await;
    }
    for n in kept {
        assert!(areas.get(&store, (0, n)).await.is_ok(), "{context}: row {n} is pinned and went");
    }
    accounts_are_right(&store, mem, context);
    store.close().await;
}

#[tokio::test]
async fn a_power_cut_at_any_third_operation_takes_no_pin_and_no_pinned_row() {
    let whole = Mem::new();
    let said = live(&whole).await;
    assert!(said.pinned.len() > 9, "{:?}", said.pinned);
    assert!(said.pinned.values().all(|&durable| durable) && said.released > 20, "{}", said.released);
    let total = whole.ops();
    let mut judged = 0;
    for cut in (0..total).step_by(3) {
        let mem = Mem::new();
        mem.cut_at(cut);
        let said = live(&mem).await;
        for loss in [Loss::All, Loss::None, Loss::Torn(cut * 2 + 1), Loss::Reordered(cut * 77 + 5)] {
            check(&said, &mem.after_cut(loss), &format!("cut at {cut} of {total}, {loss:?}")).await;
            judged += 1;
        }
    }
    println!("{judged} starts after a power cut");
}
