//! Sums over turns, and the figures that follow from them. Pure.

use std::collections::BTreeMap;

use serde::Serialize;

use super::plan::{Kind, Turn};

/// What of the trace is of one kind, whatever the policy.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ByKind {
    pub kind: Kind,
    pub requests: u64,
    pub prompt_tokens: u64,
}

/// What a policy made of the trace.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figures {
    /// Prompt tokens that were loaded, of all.
    pub loaded_pct: f64,
    /// Prompt tokens that were computed although they had been before, of all.
    pub lost_pct: f64,
    /// The same by kind of turn, of all prompt tokens: the parts of `lost_pct`.
    pub lost_pct_by_kind: BTreeMap<Kind, f64>,
    pub lost_tokens: u64,
    /// Tokens computed over those that nothing could have spared.
    pub excess_prefill: f64,
    /// Rows written, those included that were moved to keep them.
    pub rows_written: u64,
    pub bytes_written_per_prompt_token: f64,
}

#[derive(Debug, Default)]
pub struct Tally {
    prompt: u64,
    loaded: u64,
    lost: BTreeMap<Kind, u64>,
    /// Tokens that nothing could have spared.
    new: u64,
    rows_written: u64,
}

impl Tally {
    /// `loaded` and `written` in rows.
    pub fn add(&mut self, turn: &Turn, loaded: u64, written: u64, row_tokens: u32) {
        let row = u64::from(row_tokens);
        let (known, prompt) = (turn.known as u64, u64::from(turn.input_tokens));
        assert!(loaded <= known, "a cache gave {loaded} rows of which {known} were ever computed");
        self.prompt += prompt;
        self.loaded += loaded * row;
        *self.lost.entry(turn.kind).or_default() += (known - loaded) * row;
        self.new += prompt - known * row;
        self.rows_written += written;
    }

    pub fn figures(self, row_bytes: u64) -> Figures {
        let lost: u64 = self.lost.values().sum();
        let by_kind = Kind::ALL.map(|k| (k, pct(self.lost.get(&k).copied().unwrap_or(0), self.prompt)));
        Figures {
            loaded_pct: pct(self.loaded, self.prompt),
            lost_pct: pct(lost, self.prompt),
            lost_pct_by_kind: by_kind.into(),
            lost_tokens: lost,
            excess_prefill: (self.new + lost) as f64 / self.new.max(1) as f64,
            rows_written: self.rows_written,
            bytes_written_per_prompt_token: (self.rows_written * row_bytes) as f64
                / self.prompt.max(1) as f64,
        }
    }
}

pub fn pct(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 * 100.0 }
}
