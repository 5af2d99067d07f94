//! Tests of the scheduler: against a plain one where memory does not matter, and laws where it does.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::base::block::RowKey;
use crate::mock::pool::Change;

const PACE: Pace = Pace { token_s: 0.001, attention_s: 1e-7, word_s: 0.01, kappa: 0.1 };

fn limits(requests: usize, tokens: usize) -> Limits {
    Limits { requests, tokens, prefills: 0, chunk: 0 }
}

fn grid(groups: &[Kind], block: usize, unit: usize) -> Grid {
    Grid { groups: groups.to_vec(), block, unit }
}

/// A prompt whose first `shared` tokens are `root`'s.
fn request(id: u64, root: u32, shared: usize, prompt: usize, words: usize, unit: usize) -> Request {
    let own = u32::try_from(id).unwrap() + 1000;
    let token = |n: usize| u32::try_from(n).unwrap() * 7 + if n < shared { root } else { own * 10_000 };
    let tokens: Vec<u32> = (0..prompt + words.saturating_sub(1)).map(token).collect();
    let mut at = BlockHash::start("0");
    let next = |part: &[u32]| {
        at = at.next(part);
        at
    };
    let hashes: Vec<BlockHash> = tokens.chunks_exact(unit).map(next).collect();
    Request {
        id: Id(id),
        tokens: tokens.into(),
        prompt,
        words,
        hashes: hashes.into(),
        snapshots: Vec::new(),
        given: None,
    }
}

/// Everything that is heard until nothing is left to do, with the time. Arrivals by their time, in order.
fn play(scheduler: &mut Scheduler, arrivals: &[(f64, Request)]) -> Vec<(u64, Told, f64)> {
    let (mut heard, mut now, mut next) = (Vec::new(), 0.0, 0);
    for _ in 0..100_000 {
        while next < arrivals.len() && arrivals[next].0 <= now {
            scheduler.submit(arrivals[next].1.clone());
            next += 1;
        }
        match scheduler.step() {
            Some(step) => {
                now += step.seconds;
                heard.extend(scheduler.finish(&step).into_iter().map(|(id, told)| (id.0, told, now)));
            }
            None if next < arrivals.len() => now = arrivals[next].0,
            None => return heard,
        }
    }
    panic!("it does not come to an end");
}

/// One box whose memory is endless, written down step by step: attention only, blocks of `block` tokens.
fn plain(limits: &Limits, block: usize, arrivals: &[(f64, Request)]) -> Vec<(u64, Told, f64)> {
    struct One {
        request: Request,
        done: usize,
        said: usize,
        first: bool,
        over: bool,
    }
    let mut known: BTreeSet<BlockHash> = BTreeSet::new();
    let mut queue: Vec<(f64, Request)> = arrivals.to_vec();
    let (mut running, mut heard, mut now): (Vec<One>, Vec<_>, f64) = (Vec::new(), Vec::new(), 0.0);
    while !queue.is_empty() || !running.is_empty() {
        if running.is_empty() && queue[0].0 > now {
            now = queue[0].0;
        }
        let mut budget = limits.tokens;
        let mut parts: BTreeMap<u64, (usize, bool)> = BTreeMap::new();
        let mut begun = Vec::new();
        for decode in [true, false] {
            for one in &mut running {
                if one.first != decode || budget == 0 {
                    continue;
                }
                let left = one.request.prompt + one.said - one.done;
                let count = left.min(budget);
                budget -= count;
                parts.insert(one.request.id.0, (count, decode));
                one.done += count;
                (1..=one.done / block).for_each(|b| _ = known.insert(one.request.hashes[b - 1]));
            }
        }
        while budget > 0 && running.len() < limits.requests && queue.first().is_some_and(|(at, _)| *at <= now)
        {
            let (_, request) = queue.remove(0);
            let most = (request.prompt - 1) / block;
            let hit = (0..most).take_while(|b| known.contains(&request.hashes[*b])).count() * block;
            begun.push((request.id.0, hit));
            let count = (request.prompt - hit).min(budget);
            budget -= count;
            parts.insert(request.id.0, (count, false));
            let one = One { done: hit + count, said: 0, first: false, over: false, request };
            (1..=one.done / block).for_each(|b| _ = known.insert(one.request.hashes[b - 1]));
            running.push(one);
        }
        // Added up in the scheduler's order, so that both clocks say the same to the last bit.
        let (mut decoding, mut seconds) = (0, 0.0);
        for one in &running {
            match parts.get(&one.request.id.0) {
                Some((_, true)) => decoding += 1,
                Some((count, false)) => {
                    let (before, n) = ((one.done - count) as f64, *count as f64);
                    seconds += PACE.token_s * n + PACE.attention_s * n * (before + n / 2.0);
                }
                None => {}
            }
        }
        if decoding > 0 {
            seconds += PACE.word_s * (1.0 + PACE.kappa * f64::from(decoding - 1));
        }
        now += seconds;
        heard.extend(begun.into_iter().map(|(id, cached)| (id, Told::Begun { cached }, now)));
        for one in &mut running {
            let id = one.request.id.0;
            if !parts.contains_key(&id) || one.done < one.request.prompt + one.said {
                continue;
            }
            if !std::mem::replace(&mut one.first, true) {
                heard.push((id, Told::Prefilled, now));
            }
            if one.said < one.request.words {
                one.said += 1;
                heard.push((id, Told::Word, now));
            }
            if one.said == one.request.words {
                heard.push((id, Told::End, now));
                one.over = true;
            }
        }
        running.retain(|one| !one.over);
    }
    heard
}

/// By request, because within a step nobody is promised to hear first.
fn by_request(heard: &[(u64, Told, f64)]) -> BTreeMap<u64, Vec<(Told, i64)>> {
    let mut out: BTreeMap<u64, Vec<_>> = BTreeMap::new();
    for (id, told, at) in heard {
        out.entry(*id).or_default().push((*told, (at * 1e6).round() as i64));
    }
    out
}

/// Keys that events say are there.
fn replay(index: &mut BTreeSet<RowKey>, changes: Vec<Change>) {
    for change in changes {
        match change {
            Change::Stored(stored) => {
                index.extend(stored.hashes.into_iter().map(|hash| RowKey { hash, group: stored.group }));
            }
            Change::Removed(key) => assert!(index.remove(&key), "what goes was there"),
            Change::Cleared => index.clear(),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn with_memory_enough_it_is_the_plain_one(
        asks in prop::collection::vec((0_u64..400, 0_u32..3, 0_usize..40, 1_usize..80, 0_usize..6), 1..14),
        requests in 1_usize..5, tokens in 1_usize..60,
    ) {
        let mut at = 0.0;
        let arrivals: Vec<(f64, Request)> = asks.iter().enumerate().map(|(n, &(pause, root, shared, prompt, words))| {
            at += pause as f64 / 1000.0;
            (at, request(n as u64, root, shared, prompt, words, 4))
        }).collect();
        let limits = limits(requests, tokens);
        let mut scheduler = Scheduler::new(grid(&[Kind::Full], 4, 4), limits.clone(), PACE, 10_000);
        let heard = play(&mut scheduler, &arrivals);
        prop_assert_eq!(by_request(&heard), by_request(&plain(&limits, 4, &arrivals)));
        prop_assert_eq!(scheduler.pool.used(), 0);
    }

    #[test]
    fn everybody_is_served_in_any_memory_and_events_are_the_truth(
        asks in prop::collection::vec((0_u64..400, 0_u32..3, 0_usize..60, 1_usize..80, 0_usize..12), 1..16),
        kinds in prop::collection::vec(prop_oneof![Just(Kind::Full), Just(Kind::State), (1_usize..20).prop_map(Kind::Sliding)], 1..4),
        unit in 1_usize..3, blocks in 1_usize..60, requests in 1_usize..6, tokens in 1_usize..40,
        prefills in 0_usize..3, chunk in 0_usize..20, gone in prop::collection::vec(0_u64..16, 0..4),
    ) {
        let limits = Limits { prefills, chunk, ..limits(requests, tokens) };
        let mut scheduler = Scheduler::new(grid(&kinds, 4, unit * 2), limits.clone(), PACE, blocks);
        let mut index = BTreeSet::new();
        let mut heard: BTreeMap<u64, Vec<Told>> = BTreeMap::new();
        for (n, &(_, root, shared, prompt, words)) in asks.iter().enumerate() {
            let mut one = request(n as u64, root, shared, prompt, words, unit * 2);
            one.snapshots = vec![8, 16, 24];
            scheduler.submit(one);
        }
        let mut steps = 0_u64;
        while let Some(step) = scheduler.step() {
            steps += 1;
            prop_assert!(steps < 20_000, "it does not come to an end");
            prop_assert!(step.chunks.iter().map(|(_, _, n)| n).sum::<usize>() <= tokens);
            let free = chunk == 0 || scheduler.running() + scheduler.waiting() == 1;
            prop_assert!(step.chunks.iter().all(|(_, _, n)| *n > 0 && (free || *n <= chunk)));
            prop_assert!(scheduler.running() <= requests);
            if let Some(id) = gone.get(usize::try_from(steps).unwrap() / 3) {
                scheduler.abort(Id(*id));
            }
            for (id, told) in scheduler.finish(&step) {
                heard.entry(id.0).or_default().push(told);
            }
            replay(&mut index, scheduler.pool.changes());
            prop_assert_eq!(&index, &scheduler.pool.keys().copied().collect::<BTreeSet<_>>());
        }
        prop_assert_eq!((scheduler.running(), scheduler.waiting(), scheduler.pool.used()), (0, 0, 0));
        for (n, ask) in asks.iter().enumerate() {
            let said = heard.remove(&(n as u64)).unwrap_or_default();
            if gone.contains(&(n as u64)) && said.last() != Some(&Told::End) {
                continue;
            }
            let fits = matches!(said[0], Told::Begun { cached } if cached < ask.3);
            prop_assert!(fits, "{:?}", said);
            prop_assert_eq!(said[1], Told::Prefilled);
            prop_assert_eq!(said[2..].iter().filter(|t| **t == Told::Word).count(), ask.4);
            prop_assert_eq!((said.len(), said[said.len() - 1]), (ask.4 + 3, Told::End));
        }
    }
}

fn told(heard: &[(u64, Told, f64)], id: u64) -> Vec<Told> {
    heard.iter().filter(|(of, _, _)| *of == id).map(|(_, told, _)| *told).collect()
}

#[test]
fn what_is_scheduled_can_be_hit_at_once() {
    let mut scheduler = Scheduler::new(grid(&[Kind::Full], 4, 4), limits(4, 100), PACE, 100);
    scheduler.submit(request(1, 5, 40, 40, 1, 4));
    scheduler.submit(request(2, 5, 40, 40, 1, 4));
    let step = scheduler.step().unwrap();
    assert_eq!(step.chunks, [(Id(1), 0, 40), (Id(2), 36, 4)], "the second hits what the first is computing");
}

#[test]
fn a_long_prompt_is_cut_and_others_decode_beside_it() {
    let limits = Limits { chunk: 16, ..limits(4, 64) };
    let mut scheduler = Scheduler::new(grid(&[Kind::Full], 4, 4), limits, PACE, 1000);
    scheduler.submit(request(1, 0, 0, 8, 5, 4));
    let first = scheduler.step().unwrap();
    scheduler.finish(&first);
    scheduler.submit(request(2, 0, 0, 200, 1, 4));
    scheduler.submit(request(3, 0, 0, 8, 1, 4));
    let step = scheduler.step().unwrap();
    assert_eq!(
        step.chunks,
        [(Id(1), 8, 1), (Id(2), 0, 16), (Id(3), 0, 8)],
        "its share is 16 tokens of a step"
    );
    assert!((step.seconds - PACE.words_s(1) - PACE.chunk_s(0, 16) - PACE.chunk_s(0, 8)).abs() < 1e-9);
}

#[test]
fn a_prompt_that_waits_for_its_turn_is_not_begun_while_enough_are() {
    let limits = Limits { prefills: 1, ..limits(4, 16) };
    let mut scheduler = Scheduler::new(grid(&[Kind::Full], 4, 4), limits, PACE, 1000);
    scheduler.submit(request(1, 0, 0, 20, 1, 4));
    scheduler.submit(request(2, 0, 0, 4, 1, 4));
    let step = scheduler.step().unwrap();
    scheduler.finish(&step);
    let step = scheduler.step().unwrap();
    assert_eq!(step.chunks, [(Id(1), 16, 4)]);
}

#[test]
fn without_blocks_the_one_begun_last_gives_way_and_comes_back() {
    let mut scheduler = Scheduler::new(grid(&[Kind::Full], 4, 4), limits(4, 100), PACE, 6);
    let heard = play(&mut scheduler, &[(0.0, request(1, 0, 0, 8, 12, 4)), (0.0, request(2, 1, 0, 8, 12, 4))]);
    assert!(scheduler.tally.preempted > 0 && scheduler.tally.roomless == 0);
    for id in [1, 2] {
        let said = told(&heard, id);
        assert_eq!(said.iter().filter(|t| matches!(t, Told::Begun { .. })).count(), 1, "it is told once");
        assert_eq!(said.iter().filter(|t| **t == Told::Word).count(), 12);
    }
    // What was given back first is found again when it was not needed.
    let end = |id| heard.iter().find(|(of, told, _)| *of == id && *told == Told::End).unwrap().2;
    assert!(end(1) < end(2));
}

#[test]
fn a_state_is_kept_at_the_checkpoint_and_where_prompts_part() {
    let hybrid = grid(&[Kind::Full, Kind::State], 4, 4);
    let mut scheduler = Scheduler::new(hybrid, limits(4, 100), PACE, 200);
    let cached = |scheduler: &mut Scheduler, one: Request| {
        let id = one.id.0;
        match told(&play(scheduler, &[(0.0, one)]), id)[0] {
            Told::Begun { cached } => cached,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(cached(&mut scheduler, request(1, 9, 30, 41, 1, 4)), 0);
    assert_eq!(cached(&mut scheduler, request(1, 9, 30, 41, 1, 4)), 40, "the checkpoint");
    // It parts after 30 tokens: no state is there yet, and one is left behind.
    assert_eq!(cached(&mut scheduler, request(2, 9, 30, 41, 1, 4)), 0);
    assert_eq!(cached(&mut scheduler, request(3, 9, 30, 41, 1, 4)), 28, "the junction");
}

#[test]
fn with_fine_hashes_the_tail_of_a_prompt_is_kept() {
    let mut scheduler = Scheduler::new(grid(&[Kind::Full, Kind::State], 16, 2), limits(4, 100), PACE, 200);
    play(&mut scheduler, &[(0.0, request(1, 9, 40, 40, 1, 2))]);
    let tail = scheduler.pool.changes().into_iter().filter_map(|change| match change {
        Change::Stored(stored) if stored.block_size < 16 => {
            Some((stored.group.0, stored.span, stored.block_size))
        }
        _ => None,
    });
    assert_eq!(tail.collect::<Vec<_>>(), [(0, 32..38, 6), (1, 32..38, 6)]);
    let longer = request(2, 9, 40, 60, 1, 2);
    assert_eq!(scheduler.peek(&longer.hashes, 60), 38);
    assert_eq!(scheduler.peek(&request(3, 9, 36, 60, 1, 2).hashes, 60), 0, "it parts before the tail ends");
}

#[test]
fn what_was_brought_is_not_looked_up_and_can_be_hit_by_the_next() {
    let mut scheduler = Scheduler::new(grid(&[Kind::Full], 4, 4), limits(4, 100), PACE, 100);
    let brought = Request { given: Some(32), ..request(1, 9, 40, 40, 2, 4) };
    scheduler.submit(brought);
    let step = scheduler.step().unwrap();
    assert_eq!(step.chunks, [(Id(1), 32, 8)]);
    assert_eq!(scheduler.peek(&request(2, 9, 40, 40, 1, 4).hashes, 40), 36);
    assert!(scheduler.abort(Id(1)) && !scheduler.abort(Id(1)));
    assert_eq!((scheduler.pool.used(), scheduler.finish(&step).len()), (0, 1), "it was begun, and no more");
}
