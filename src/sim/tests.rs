//! Small traces whose figures can be counted by hand, and the shipped store beside the rivals.

use std::time::Duration;

use super::*;
use crate::trace::{Blocks, Request, Scope, Stream};

/// Blocks of 16 tokens, a second apart.
fn stream(prompts: &[&[(u64, u32)]]) -> Stream {
    let request = |(nth, runs): (usize, &&[(u64, u32)])| {
        let mut blocks = Blocks::default();
        for &(start, count) in *runs {
            blocks.push(start, count).unwrap();
        }
        Request {
            at: Duration::from_secs(nth as u64),
            streamed: false,
            model: None,
            input_tokens: blocks.len() * 16 + 1,
            output_tokens: 1,
            blocks,
            stop: String::new(),
            input_types: Vec::new(),
            output_types: Vec::new(),
            took: None,
            first_token: None,
            thought: None,
        }
    };
    Stream { agent: None, requests: prompts.iter().enumerate().map(request).collect() }
}

fn session(id: &str, streams: Vec<Stream>) -> Session {
    Session {
        id: id.to_owned(),
        models: Vec::new(),
        block_tokens: 16,
        scope: Scope::Local,
        tool_tokens: 0,
        system_tokens: 0,
        streams,
    }
}

/// Thirty requests, a second apart.
pub(super) fn long(n: u64) -> Session {
    let prompts = vec![&[(1_u64, 2_u32)][..]; 30];
    session(&n.to_string(), vec![stream(&prompts)])
}

pub(super) fn options_of_tests() -> Options {
    options(Capacity::Percent(50.0), &Policy::ALL)
}

fn options(capacity: Capacity, policies: &[Policy]) -> Options {
    Options {
        capacities: vec![capacity],
        policies: policies.to_vec(),
        row_tokens: 16,
        bytes_per_token: 256,
        state_groups: 0,
        segment: Bytes::kib(64),
        at_once: 2.0,
        seed: 1,
    }
}

/// A prompt that grows, shrinks a little, is cut down, and goes back to where it was.
fn one() -> Vec<Session> {
    let turns: [&[(u64, u32)]; 6] = [
        &[(1, 10)],
        &[(1, 12)],
        &[(1, 8), (50, 3)],
        &[(1, 2), (60, 2)],
        &[(1, 12), (70, 1)],
        &[(1, 12), (70, 2)],
    ];
    vec![session("one", vec![stream(&turns)])]
}

#[test]
fn with_room_for_all_only_new_tokens_are_computed() {
    let report = run(&one(), &options(Capacity::Bytes(Bytes::mib(8)), &Policy::ALL)).unwrap();
    let kinds: Vec<_> = report.kinds.iter().map(|k| (k.kind, k.requests)).collect();
    let expected =
        [(Kind::First, 1), (Kind::Append, 2), (Kind::Branch, 1), (Kind::Edit, 1), (Kind::Compaction, 1)];
    assert_eq!(kinds, expected);
    // 10 + 2 + 3 + 2 + 1 + 1 different rows of 4 KiB.
    assert_eq!((report.working_set_rows, report.working_set_bytes), (19, 19 * 4096));
    for run in &report.runs {
        assert_eq!(run.figures.lost_tokens, 0, "{:?}", run.policy);
        assert!((run.figures.loaded_pct - report.ceiling_pct).abs() < 1e-9);
        assert!((run.figures.excess_prefill - 1.0).abs() < 1e-9);
        assert_eq!(run.figures.rows_written, 19, "{:?}", run.policy);
    }
}

#[test]
fn what_is_lost_is_counted_by_kind() {
    // Room for 11 rows: the second turn pushes its last row out, or keeps 11 of 12.
    let report = run(&one(), &options(Capacity::Bytes(Bytes(11 * 4096)), &[Policy::Lru])).unwrap();
    let figures = &report.runs[0].figures;
    let parts: f64 = figures.lost_pct_by_kind.values().sum();
    assert!((parts - figures.lost_pct).abs() < 1e-9 && figures.lost_tokens > 0);
    assert!(figures.lost_pct_by_kind[&Kind::Branch] > 0.0, "{figures:?}");
    assert!((figures.lost_pct_by_kind[&Kind::First]).abs() < 1e-9);
    // Truly new: 19 rows and the last token of 6 prompts.
    let expected = (19.0 * 16.0 + 6.0 + figures.lost_tokens as f64) / (19.0 * 16.0 + 6.0);
    assert!((figures.excess_prefill - expected).abs() < 1e-9);
}

#[test]
fn states_are_needed_where_a_prefix_ends() {
    let turns: [&[(u64, u32)]; 2] = [&[(1, 4)], &[(1, 2), (9, 1)]];
    let sessions = vec![session("s", vec![stream(&turns)])];
    let mut options = options(Capacity::Bytes(Bytes::mib(8)), &Policy::ALL);
    options.state_groups = 2;
    let report = run(&sessions, &options).unwrap();
    assert_eq!(report.working_set_rows, 5 * 3);
    for run in &report.runs {
        assert_eq!((run.figures.lost_tokens, run.figures.rows_written), (0, 15), "{:?}", run.policy);
    }
    // A cache of attention rows alone finds nothing.
    struct Attention;
    impl Cache for Attention {
        fn holds(&self, row: RowId) -> bool {
            row.group == 0
        }
        fn serve(&mut self, _: &Turn, _: usize) -> Result<u64, Error> {
            Ok(0)
        }
    }
    let plan = Plan::of(&sessions, &options).unwrap();
    assert_eq!(leading(&Attention, &plan.turns[1], 2), 0);
    assert_eq!(leading(&Attention, &plan.turns[1], 0), 3);
}

/// Sessions that come back after others have gone through.
fn many() -> Vec<Session> {
    let grow = |n: u64| {
        let turns: Vec<Vec<(u64, u32)>> =
            (1..30_u32).map(|t| vec![(1, 10 + 3 * t), (1000 * n, t % 3)]).collect();
        let turns: Vec<&[(u64, u32)]> = turns.iter().map(Vec::as_slice).collect();
        session(&n.to_string(), vec![stream(&turns), stream(&turns[..5])])
    };
    (1..9).map(grow).collect()
}

#[test]
fn under_pressure_every_policy_stays_within_its_bounds_and_runs_repeat() {
    let options = Options { at_once: 8.0, ..options(Capacity::Percent(25.0), &Policy::ALL) };
    let report = run(&many(), &options).unwrap();
    for run in &report.runs {
        let figures = &run.figures;
        assert!(figures.lost_tokens > 0, "{:?} is not under pressure", run.policy);
        assert!((figures.loaded_pct + figures.lost_pct - report.ceiling_pct).abs() < 1e-9);
        assert!(figures.rows_written >= report.working_set_rows, "{:?}", run.policy);
    }
    let again = run(&many(), &options).unwrap();
    // The store moves rows on a thread of its own, beside what is asked of it: its figures repeat nearly, the others'
    // to the last digit.
    let text = |report: &Report| {
        let others = report.runs.iter().filter(|run| run.policy != Policy::Worth);
        serde_json::to_string(&others.collect::<Vec<_>>()).unwrap()
    };
    assert_eq!(text(&report), text(&again));
}

#[test]
fn what_cannot_be_played_is_refused() {
    let good = options(Capacity::Percent(10.0), &[Policy::Worth]);
    assert!(matches!(run(&[], &good), Err(Error::Nothing)));
    assert!(matches!(run(&one(), &good), Err(Error::Small { .. })));
    let bad = |change: fn(&mut Options)| {
        let mut options = good.clone();
        change(&mut options);
        run(&one(), &options).unwrap_err().to_string()
    };
    assert_eq!(bad(|o| o.row_tokens = 0), "the tokens per row is out of its range");
    assert_eq!(bad(|o| o.at_once = f64::NAN), "the number of sessions at once is out of its range");
    assert!(bad(|o| o.bytes_per_token = 1 << 20).contains("does not fit into a segment"));
}
