//! What is played, in what order, and what each turn could find at best. Pure: computed once for all policies.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::Serialize;

use super::tally::ByKind;
use super::{Error, Options, ROWS_MAX, Report};
use crate::base::clock::Micros;
use crate::trace::{Request, RowTokens, Scope, SeenRows, Session};

/// Halvings by which the span of starts is found: to a millionth.
const SEARCHES: usize = 30;

/// Longest span of starts, in sums of all lengths: a request then hardly ever finds a second session open.
const LONGEST: f64 = 64.0;

/// What a turn does to the prompt before it in its stream. Kept is counted in the trace's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Nothing to build on: no request before it in its stream, and no prefix of another one's.
    First,
    /// Keeps the whole prompt before it, but perhaps its last block, where clients move their cache mark.
    Append,
    /// Shares more with an earlier request than with the one before it.
    Branch,
    /// Keeps at least half.
    Edit,
    /// Keeps less than half.
    Compaction,
}

impl Kind {
    pub const ALL: [Self; 5] = [Self::First, Self::Append, Self::Branch, Self::Edit, Self::Compaction];

    pub fn name(self) -> &'static str {
        match self {
            Self::First => "first",
            Self::Append => "append",
            Self::Branch => "branch",
            Self::Edit => "edit",
            Self::Compaction => "compaction",
        }
    }

    /// `before` and `kept` of it; `known`: the longest prefix that any earlier request shares. All in blocks.
    fn of(before: Option<u32>, kept: u32, known: u32) -> Self {
        match before {
            _ if known > kept => Self::Branch,
            None => Self::First,
            Some(before) if kept + 1 >= before => Self::Append,
            Some(before) if u64::from(kept) * 2 >= u64::from(before) => Self::Edit,
            Some(_) => Self::Compaction,
        }
    }
}

/// One request.
#[derive(Clone, Debug)]
pub struct Turn {
    pub at: Micros,
    pub kind: Kind,
    pub input_tokens: u32,
    /// The prompt's whole rows, as numbers that stand for a row and everything before it.
    pub rows: Vec<u32>,
    /// How many of them a load can spare: not the one with the last token.
    pub usable: usize,
    /// How many of them a cache that never forgets would spare.
    pub known: usize,
}

#[derive(Debug)]
pub struct Plan {
    pub turns: Vec<Turn>,
    pub row_tokens: u32,
    pub row_bytes: u64,
    /// Different rows of the attention group.
    pub different: u32,
    sessions: usize,
    open_mean: f64,
}

impl Plan {
    pub fn of(sessions: &[Session], options: &Options) -> Result<Self, Error> {
        let starts = starts(sessions, options);
        let mut order = Vec::new();
        for (number, session) in sessions.iter().enumerate() {
            for (s, r) in session.in_time() {
                order.push((starts[number] + session.streams[s].requests[r].at, number, s, r));
            }
        }
        if order.is_empty() {
            return Err(Error::Nothing);
        }
        order.sort_unstable();
        let mut player = Player::new(options.row_tokens);
        let mut turns = Vec::with_capacity(order.len());
        for (at, number, s, r) in order {
            let turn = player.turn(sessions, (number, s, r), at);
            if turn.rows.len() > ROWS_MAX {
                return Err(Error::Rows(turn.rows.len()));
            }
            turns.push(turn);
        }
        Ok(Self {
            turns,
            row_tokens: options.row_tokens,
            row_bytes: u64::from(options.row_tokens) * options.bytes_per_token,
            different: u32::try_from(player.numbers.len()).expect("numbered as u32"),
            sessions: sessions.len(),
            open_mean: open_mean(sessions, &starts),
        })
    }

    /// Everything but the runs.
    pub fn report(&self, options: &Options) -> Report {
        let prompt_tokens: u64 = self.turns.iter().map(|t| u64::from(t.input_tokens)).sum();
        let known: u64 = self.turns.iter().map(|t| t.known as u64 * u64::from(self.row_tokens)).sum();
        let rows = u64::from(self.different) * (1 + u64::from(options.state_groups));
        let about = |kind| {
            let mut one = ByKind { kind, requests: 0, prompt_tokens: 0 };
            for turn in self.turns.iter().filter(|t| t.kind == kind) {
                one.requests += 1;
                one.prompt_tokens += u64::from(turn.input_tokens);
            }
            one
        };
        Report {
            sessions: self.sessions,
            requests: self.turns.len(),
            prompt_tokens,
            row_tokens: self.row_tokens,
            row_bytes: self.row_bytes,
            state_groups: options.state_groups,
            segment_bytes: options.segment.0,
            seed: options.seed,
            sessions_at_once: options.at_once,
            sessions_open_mean: self.open_mean,
            working_set_rows: rows,
            working_set_bytes: rows * self.row_bytes,
            ceiling_pct: super::tally::pct(known, prompt_tokens),
            kinds: Kind::ALL.map(about).to_vec(),
            runs: Vec::new(),
        }
    }
}

/// When each session starts: at a seeded share of a span that is as long as makes as many sessions open at a time as
/// were asked for. With fewer sessions than that all start at once.
fn starts(sessions: &[Session], options: &Options) -> Vec<Duration> {
    let mut dice = StdRng::seed_from_u64(options.seed);
    let shares: Vec<f64> = sessions.iter().map(|_| dice.random()).collect();
    let within = |span: f64| -> Vec<Duration> {
        shares.iter().map(|share| Duration::from_micros((share * span * 1e6) as u64)).collect()
    };
    let (mut short, mut long) =
        (0.0, sessions.iter().map(|s| s.lasts().as_secs_f64()).sum::<f64>() * LONGEST);
    for _ in 0..SEARCHES {
        let middle = f64::midpoint(short, long);
        if open_mean(sessions, &within(middle)) > options.at_once { short = middle } else { long = middle }
    }
    within(long)
}

/// How many sessions are open when a request comes, on average.
fn open_mean(sessions: &[Session], starts: &[Duration]) -> f64 {
    let mut begins = starts.to_vec();
    let mut ends: Vec<_> = sessions.iter().zip(starts).map(|(s, &start)| start + s.lasts()).collect();
    begins.sort_unstable();
    ends.sort_unstable();
    let (mut open, mut requests) = (0, 0);
    for (session, &start) in sessions.iter().zip(starts) {
        for at in session.requests().map(|r| start + r.at) {
            open += begins.partition_point(|&b| b <= at) - ends.partition_point(|&e| e < at);
            requests += 1;
        }
    }
    open as f64 / requests.max(1) as f64
}

/// What earlier requests leave behind for later ones.
struct Player {
    row: RowTokens,
    numbers: HashMap<(u64, u64, u32), u32>,
    seen: SeenRows,
    blocks: HashSet<(u64, u64)>,
    /// The request before, by session and stream.
    before: HashMap<(usize, usize), usize>,
}

impl Player {
    fn new(row_tokens: u32) -> Self {
        let row = RowTokens(row_tokens);
        Self {
            row,
            numbers: HashMap::new(),
            seen: SeenRows::new(row),
            blocks: HashSet::new(),
            before: HashMap::new(),
        }
    }

    fn turn(&mut self, sessions: &[Session], (number, s, r): (usize, usize, usize), at: Duration) -> Turn {
        let session = &sessions[number];
        let requests = &session.streams[s].requests;
        let request = &requests[r];
        let before = self.before.insert((number, s), r).map(|b| &requests[b]);
        let kind = self.kind(number, session, before, request);
        let names = SeenRows::rows(self.row, number, session, request);
        let found = self.seen.visit(&names);
        let all = u32::try_from(names.len()).unwrap_or(u32::MAX);
        let rows = names.into_iter().map(|name| {
            let next = u32::try_from(self.numbers.len()).expect("fewer rows than blocks in memory");
            *self.numbers.entry(name).or_insert(next)
        });
        Turn {
            at: Micros(0).plus(at),
            kind,
            input_tokens: request.input_tokens,
            rows: rows.collect(),
            usable: self.seen.usable(all, request.input_tokens) as usize,
            known: self.seen.usable(found, request.input_tokens) as usize,
        }
    }

    fn kind(
        &mut self,
        number: usize,
        session: &Session,
        before: Option<&Request>,
        request: &Request,
    ) -> Kind {
        let scope = if session.scope == Scope::Global { 0 } else { number as u64 + 1 };
        let ids = || request.blocks.iter().map(|id| (scope, id));
        let known = ids().take_while(|id| self.blocks.contains(id)).count();
        let known = u32::try_from(known).unwrap_or(u32::MAX);
        self.blocks.extend(ids().skip(known as usize));
        let kept = before.map_or(0, |b| b.blocks.shared(&request.blocks));
        Kind::of(before.map(|b| b.blocks.len()), kept, known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_follow_from_what_is_kept_and_known() {
        for (before, kept, known, kind) in [
            (None, 0, 0, Kind::First),
            (None, 0, 3, Kind::Branch),
            (Some(10), 10, 10, Kind::Append),
            (Some(10), 9, 9, Kind::Append),
            (Some(10), 8, 8, Kind::Edit),
            (Some(10), 5, 5, Kind::Edit),
            (Some(10), 4, 4, Kind::Compaction),
            (Some(10), 0, 0, Kind::Compaction),
            (Some(10), 4, 7, Kind::Branch),
        ] {
            assert_eq!(Kind::of(before, kept, known), kind, "{before:?} {kept} {known}");
        }
    }

    #[test]
    fn as_many_sessions_are_open_as_were_asked_for() {
        let sessions: Vec<_> = (0..60).map(super::super::tests::long).collect();
        for at_once in [1.5, 4.0, 12.0] {
            let options = Options { at_once, ..super::super::tests::options_of_tests() };
            let mean = open_mean(&sessions, &starts(&sessions, &options));
            assert!((mean / at_once - 1.0).abs() < 0.1, "{mean} instead of {at_once}");
        }
        let options = Options { at_once: 1000.0, ..super::super::tests::options_of_tests() };
        assert!(starts(&sessions, &options).iter().all(|s| s.as_secs() == 0));
    }
}
