//! What a trace holds, and the most that any cache can save of it.
//!
//! Two ceilings per row size, both over prompt tokens. Cold: a cache that never forgets and begins empty; a request
//! finds the leading rows that some earlier request of its scope had. Warm: it holds every row of the trace already.
//! Rows are whole, and at least one token of each prompt is computed, as engines do. `ceiling_pct` is the cold one in
//! AIPerf's form: over blocks instead of tokens, the last partial one counted whole, none kept back.

use std::collections::HashSet;

use serde::Serialize;

use super::{Request, Scope, Session};

/// Tokens per row that ceilings are given for: usual device blocks, this project's rows, and those of two hybrid
/// models whose state rows make rows long.
pub const CEILING_BLOCKS: [u32; 5] = [16, 64, 512, 2128, 4224];

/// Tokens of one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowTokens(pub u32);

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Ceiling {
    pub tokens_per_row: u32,
    pub cold_pct: f64,
    pub warm_pct: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Info {
    pub sessions: usize,
    pub sub_agents: usize,
    pub requests: usize,
    /// Tokens of all different blocks.
    pub unique_tokens: u64,
    pub input_tokens: u64,
    pub output_tokens: u64,
    pub mean_input_tokens: f64,
    /// Over blocks, as AIPerf counts.
    pub ceiling_pct: f64,
    /// Over tokens, rows of one block.
    pub ceiling_tokens_pct: f64,
    pub ceiling_by_block: Vec<Ceiling>,
}

/// Names a row by the block in which it ends, within that block's scope: the block's number stands for everything
/// before it, so rows of equal names have equal content.
pub type RowName = (u64, u64, u32);

/// Which rows have been seen.
#[derive(Debug)]
pub struct SeenRows {
    row: RowTokens,
    seen: HashSet<RowName>,
}

impl SeenRows {
    pub fn new(row: RowTokens) -> Self {
        Self { row, seen: HashSet::new() }
    }

    /// Different rows so far.
    pub fn count(&self) -> usize {
        self.seen.len()
    }

    /// The rows of a request's prompt, in the order of position. `session` numbers the session.
    pub fn rows(row: RowTokens, session: usize, of: &Session, request: &Request) -> Vec<RowName> {
        let scope = match of.scope {
            Scope::Local => session as u64 + 1,
            Scope::Global => 0,
        };
        let (row, block) = (u64::from(row.0), u64::from(of.block_tokens));
        let known = (u64::from(request.blocks.len()) * block).min(u64::from(request.input_tokens));
        let mut names = Vec::with_capacity((known / row) as usize);
        let mut from = 0;
        for number in request.blocks.iter() {
            let end = from + block;
            // Rows that end in this block: at multiples of the row's length in (from, end].
            for nth in from / row + 1..=end.min(known) / row {
                names.push((scope, number, u32::try_from(nth).unwrap_or(u32::MAX)));
            }
            from = end;
        }
        names
    }

    /// How many leading rows were seen before; and remembers all.
    pub fn visit(&mut self, rows: &[RowName]) -> u32 {
        let found = rows.iter().take_while(|r| self.seen.contains(*r)).count();
        self.seen.extend(&rows[found..]);
        u32::try_from(found).unwrap_or(u32::MAX)
    }

    /// Rows that a prompt of so many tokens can be spared: its last token is always computed.
    pub fn usable(&self, found: u32, input_tokens: u32) -> u32 {
        found.min(input_tokens.saturating_sub(1) / self.row.0)
    }
}

impl Info {
    pub fn of(sessions: &[Session]) -> Self {
        let all = || sessions.iter().flat_map(Session::requests);
        let requests = all().count();
        let input_tokens: u64 = all().map(|r| u64::from(r.input_tokens)).sum();
        let blocks = over_blocks(sessions);
        let ceiling_by_block: Vec<_> =
            CEILING_BLOCKS.iter().map(|&b| ceiling(sessions, RowTokens(b))).collect();
        Self {
            sessions: sessions.len(),
            sub_agents: sessions.iter().map(|s| s.streams.len().saturating_sub(1)).sum(),
            requests,
            unique_tokens: blocks.unique_tokens,
            input_tokens,
            output_tokens: all().map(|r| u64::from(r.output_tokens)).sum(),
            mean_input_tokens: input_tokens as f64 / requests.max(1) as f64,
            ceiling_pct: pct(blocks.found, blocks.all),
            ceiling_tokens_pct: pct(blocks.tokens, input_tokens),
            ceiling_by_block,
        }
    }
}

pub(super) fn pct(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 * 100.0 }
}

#[derive(Default)]
struct OverBlocks {
    found: u64,
    all: u64,
    tokens: u64,
    unique_tokens: u64,
}

fn over_blocks(sessions: &[Session]) -> OverBlocks {
    let mut sum = OverBlocks::default();
    let mut global = HashSet::new();
    for session in sessions {
        let mut local = HashSet::new();
        let seen = if session.scope == Scope::Global { &mut global } else { &mut local };
        let block = u64::from(session.block_tokens);
        for (s, r) in session.in_time() {
            let request = &session.streams[s].requests[r];
            let found = request.blocks.iter().take_while(|id| seen.contains(id)).count() as u64;
            sum.found += found;
            sum.all += u64::from(request.blocks.len());
            sum.tokens += found.min(u64::from(request.input_tokens - 1) / block) * block;
            for id in request.blocks.iter().skip(found as usize) {
                sum.unique_tokens += if seen.insert(id) { block } else { 0 };
            }
        }
    }
    sum
}

fn ceiling(sessions: &[Session], row: RowTokens) -> Ceiling {
    let mut seen = SeenRows::new(row);
    let (mut cold, mut warm, mut input) = (0, 0, 0);
    for (number, session) in sessions.iter().enumerate() {
        for (s, r) in session.in_time() {
            let request = &session.streams[s].requests[r];
            let rows = SeenRows::rows(row, number, session, request);
            let all = u32::try_from(rows.len()).unwrap_or(u32::MAX);
            let found = seen.visit(&rows);
            cold += u64::from(seen.usable(found, request.input_tokens)) * u64::from(row.0);
            warm += u64::from(seen.usable(all, request.input_tokens)) * u64::from(row.0);
            input += u64::from(request.input_tokens);
        }
    }
    Ceiling { tokens_per_row: row.0, cold_pct: pct(cold, input), warm_pct: pct(warm, input) }
}
