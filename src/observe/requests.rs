//! The last requests, each with where its prompt tokens came from.
//!
//! Two witnesses speak of a request: the router, when it is over, and the engine's plugin, when its prefill is. They
//! come in either order and know each other by the request's id, which the engine wraps into an id of its own. What
//! came first waits for the other, within bounds; totals count what the plugin said, matched or not.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::clip;
use crate::base::frame::Sources;

/// Requests that are kept.
pub const KEPT: usize = 512;

/// Reports that wait for their request: a request with several prompts has one for each.
const WAITING: usize = 1024;

const ID_MAX: usize = 160;
const TEXT_MAX: usize = 400;

/// One request that is over, as the router saw it, with what the plugin said of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Request {
    /// The `X-Request-Id` that client, router and engine share.
    pub id: String,
    pub endpoint: String,
    pub model: String,
    /// Where it was computed.
    pub node: String,
    /// The node that took it in, when that was another one.
    pub forwarded_from: Option<String>,
    pub started_unix: u64,
    /// Until the first byte of the answer's body. None: there was none.
    pub ttft_ms: Option<u64>,
    pub duration_ms: u64,
    /// What the client got; 499 when it hung up.
    pub status: u16,
    pub prompt_tokens: Option<u32>,
    pub cached_tokens: Option<u32>,
    pub completion_tokens: Option<u32>,
    /// The engine broke off after the answer had begun.
    pub broken: bool,
    /// Why it went to that node, in a sentence.
    pub why: String,
    /// What the decision was made of: each box as it was, and the terms of its price.
    pub decision: Option<Written>,
    /// What was foreseen: the prompt's tokens, and how many of them drive and peer would bring.
    pub foreseen_tokens: Option<u32>,
    pub foreseen_cached: Option<u32>,
    /// Why nothing was foreseen, where there is a reason.
    pub unforeseen: Option<String>,
    /// Why a prompt that was there before was computed again. None: it was not, or it is not known.
    pub miss: Option<Missed>,
    /// Where the prompt's tokens came from. Filled by the ledger.
    pub sources: Option<Sources>,
}

/// Why a turn of a conversation was computed again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Missed {
    /// A word for programs.
    pub cause: String,
    /// Tokens that were computed again.
    pub tokens: u32,
    /// In a sentence.
    pub why: String,
    /// What to do about it.
    pub advice: String,
}

/// JSON as it was written: a record is kept for every request and read for few, so it is not taken apart.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Written(Box<RawValue>);

impl Written {
    /// None: it has no form as JSON.
    pub fn of(what: &impl Serialize) -> Option<Self> {
        serde_json::value::to_raw_value(what).ok().map(Self)
    }

    /// # Errors
    /// When it is something else.
    pub fn read<'a, T: Deserialize<'a>>(&'a self) -> serde_json::Result<T> {
        serde_json::from_str(self.0.get())
    }
}

impl PartialEq for Written {
    fn eq(&self, other: &Self) -> bool {
        self.0.get() == other.0.get()
    }
}

/// What the router hands in is a request without sources.
pub type Outcome = Request;

/// Prompt tokens since the node started, by where their KV came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Totals {
    /// Reports counted, one per prompt.
    pub prompts: u64,
    pub prompt: u64,
    pub device: u64,
    pub staging: u64,
    pub drive: u64,
    pub peer: u64,
    pub computed: u64,
}

impl Totals {
    pub fn add(&mut self, s: &Sources) {
        self.prompts += 1;
        for (total, n) in [
            (&mut self.prompt, s.prompt),
            (&mut self.device, s.device),
            (&mut self.staging, s.staging),
            (&mut self.drive, s.drive),
            (&mut self.peer, s.peer),
            (&mut self.computed, s.computed),
        ] {
            *total += u64::from(n);
        }
    }
}

#[derive(Clone, Debug)]
struct Entry {
    request: Request,
    /// What the engine's id begins with, where the router knows it.
    engine_id: Option<String>,
    /// Reports it has, by engine id without the random part. A second one with the same name is another request
    /// that was given the same id.
    reports: Vec<String>,
}

/// The last [`KEPT`] requests of this node.
#[derive(Debug, Default)]
pub struct Ledger {
    /// Oldest first.
    entries: VecDeque<Entry>,
    waiting: VecDeque<(String, Sources)>,
    totals: Totals,
}

impl Ledger {
    /// Takes a request that is over.
    pub fn add(&mut self, outcome: Outcome) {
        self.enter(outcome, None);
    }

    /// Takes a request that is over and whose id in the engine begins with `engine_id`: a client can give the engine
    /// an id of its own that has nothing of ours.
    pub fn add_known(&mut self, outcome: Outcome, engine_id: &str) {
        let engine_id = (!engine_id.is_empty()).then(|| clip(engine_id.to_owned(), ID_MAX));
        self.enter(outcome, engine_id);
    }

    fn enter(&mut self, mut outcome: Outcome, engine_id: Option<String>) {
        outcome.id = clip(outcome.id, ID_MAX);
        for text in [&mut outcome.endpoint, &mut outcome.model, &mut outcome.node, &mut outcome.why] {
            *text = clip(std::mem::take(text), TEXT_MAX);
        }
        outcome.forwarded_from = outcome.forwarded_from.map(|node| clip(node, TEXT_MAX));
        outcome.unforeseen = outcome.unforeseen.map(|why| clip(why, TEXT_MAX));
        let mut entry = Entry { request: outcome, engine_id, reports: Vec::new() };
        self.waiting.retain(|(internal, sources)| !entry.take(internal, sources));
        if self.entries.len() == KEPT {
            self.entries.pop_front();
        }
        self.entries.push_back(entry);
    }

    /// Takes what the plugin says of the prompt that the engine calls `internal`.
    pub fn attach(&mut self, internal: &str, sources: Sources) {
        self.totals.add(&sources);
        // The longest id that fits: `a` fits wherever `a-1` does.
        let owner = self
            .entries
            .iter_mut()
            .filter(|entry| entry.may_take(internal))
            .max_by_key(|entry| entry.request.id.len());
        if owner.is_some_and(|entry| entry.take(internal, &sources)) {
            return;
        }
        if self.waiting.len() == WAITING {
            self.waiting.pop_front();
        }
        self.waiting.push_back((clip(internal.to_owned(), 2 * ID_MAX), sources));
    }

    /// The newest `count` requests, newest first.
    pub fn recent(&self, count: usize) -> Vec<Request> {
        self.entries.iter().rev().take(count).map(|entry| entry.request.clone()).collect()
    }

    /// The newest request with this id.
    pub fn find(&self, id: &str) -> Option<Request> {
        self.entries.iter().rev().find(|entry| entry.request.id == id).map(|entry| entry.request.clone())
    }

    pub fn totals(&self) -> Totals {
        self.totals
    }
}

impl Entry {
    fn may_take(&self, internal: &str) -> bool {
        let ours = match &self.engine_id {
            Some(id) => internal.strip_prefix(id.as_str()).is_some_and(is_end),
            None => belongs(internal, &self.request.id),
        };
        ours && !self.reports.iter().any(|held| held == stem(internal))
    }

    fn take(&mut self, internal: &str, sources: &Sources) -> bool {
        if !self.may_take(internal) {
            return false;
        }
        self.reports.push(stem(internal).to_owned());
        let sum = self.request.sources.get_or_insert_default();
        for (total, n) in [
            (&mut sum.prompt, sources.prompt),
            (&mut sum.device, sources.device),
            (&mut sum.staging, sources.staging),
            (&mut sum.drive, sources.drive),
            (&mut sum.peer, sources.peer),
            (&mut sum.computed, sources.computed),
        ] {
            *total = total.saturating_add(n);
        }
        true
    }
}

/// Whether the engine's id is about the request `id`. The engine makes `chatcmpl-ID-RANDOM` and, for each prompt of a
/// completion, `cmpl-ID-N-RANDOM`; a response is `resp_ID` or `ID`, with or without a random end.
pub fn belongs(internal: &str, id: &str) -> bool {
    if id.is_empty() {
        return false;
    }
    let after_word = internal.split_once(['-', '_']).map(|(_, rest)| rest);
    [Some(internal), after_word].into_iter().flatten().any(|at| at.strip_prefix(id).is_some_and(is_end))
}

/// Whether this is what may follow a request's id: nothing, or at most two short words.
fn is_end(text: &str) -> bool {
    if text.is_empty() {
        return true;
    }
    text.strip_prefix(['-', '_']).is_some_and(|text| {
        let mut words = text.split(['-', '_']);
        words.by_ref().take(2).all(|word| !word.is_empty() && word.len() <= 10) && words.next().is_none()
    })
}

/// The engine's id without the random word at its end.
fn stem(internal: &str) -> &str {
    internal.rsplit_once(['-', '_']).map_or(internal, |(stem, _)| stem)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(id: &str) -> Outcome {
        Outcome { id: id.into(), status: 200, ..Outcome::default() }
    }

    fn sources(drive: u32, computed: u32) -> Sources {
        Sources { prompt: drive + computed, drive, computed, ..Sources::default() }
    }

    #[test]
    fn engine_ids_belong_to_the_request_they_wrap() {
        let uuid = "5f0c9a52-7f3e-4c39-9d7c-3f6f2f0a1b2c";
        for (internal, id, yes) in [
            ("chatcmpl-r1-0a1b2c3d", "r1", true),
            ("cmpl-r1-0-0a1b2c3d", "r1", true),
            ("resp_77", "resp_77", true),
            ("resp_77-0a1b2c3d", "resp_77", true),
            ("resp_r1-0a1b2c3d", "r1", true),
            ("resp_r1_0a1b2c3d", "r1", true),
            (&format!("chatcmpl-{uuid}-0a1b2c3d"), uuid, true),
            (&format!("cmpl-{uuid}-11-0a1b2c3d"), uuid, true),
            ("chatcmpl-r11-0a1b2c3d", "r1", false),
            ("chatcmpl-xr1-0a1b2c3d", "r1", false),
            ("chatcmpl-a-r1-0a1b2c3d", "r1", false),
            ("cmpl-r1-0-0a1b2c3d", "0", false),
            (&format!("chatcmpl-{uuid}-0a1b2c3d"), "5f0c9a52", false),
            ("chatcmpl-r1-0a1b2c3d", "", false),
        ] {
            assert_eq!(belongs(internal, id), yes, "{internal} and {id}");
        }
    }

    #[test]
    fn sources_find_their_request_in_either_order() {
        for report_first in [false, true] {
            let mut ledger = Ledger::default();
            ledger.add(outcome("other"));
            if report_first {
                ledger.attach("chatcmpl-r1-aaaaaaaa", sources(48, 16));
                ledger.add(outcome("r1"));
            } else {
                ledger.add(outcome("r1"));
                ledger.attach("chatcmpl-r1-aaaaaaaa", sources(48, 16));
            }
            assert_eq!(ledger.find("r1").unwrap().sources, Some(sources(48, 16)), "{report_first}");
            assert_eq!(ledger.find("other").unwrap().sources, None);
            assert_eq!((ledger.totals().drive, ledger.totals().computed), (48, 16));
        }
    }

    #[test]
    fn prompts_of_one_request_add_up() {
        let mut ledger = Ledger::default();
        ledger.attach("cmpl-r1-0-aaaaaaaa", sources(1, 2));
        ledger.add(outcome("r1"));
        ledger.attach("cmpl-r1-1-bbbbbbbb", sources(10, 20));
        assert_eq!(ledger.find("r1").unwrap().sources, Some(sources(11, 22)));
    }

    #[test]
    fn an_id_used_twice_keeps_the_two_apart() {
        let mut ledger = Ledger::default();
        ledger.attach("chatcmpl-r1-aaaaaaaa", sources(0, 64));
        ledger.add(outcome("r1"));
        ledger.attach("chatcmpl-r1-bbbbbbbb", sources(64, 0));
        ledger.add(outcome("r1"));
        let kept: Vec<_> = ledger.recent(9).into_iter().map(|r| r.sources.unwrap()).collect();
        assert_eq!(kept, [sources(64, 0), sources(0, 64)]);
    }

    #[test]
    fn an_id_that_the_client_gave_the_engine_is_known_by_the_router() {
        let mut ledger = Ledger::default();
        ledger.add_known(outcome("r1"), "resp_mine");
        ledger.attach("resp_mine_0a1b2c3d", sources(8, 0));
        ledger.attach("chatcmpl-r1-0a1b2c3d", sources(0, 4));
        assert_eq!(ledger.find("r1").unwrap().sources, Some(sources(8, 0)));
    }

    #[test]
    fn the_longest_id_that_fits_gets_the_report() {
        let mut ledger = Ledger::default();
        ledger.add(outcome("job"));
        ledger.add(outcome("job-1"));
        ledger.attach("chatcmpl-job-1-aaaaaaaa", sources(5, 0));
        assert_eq!(ledger.find("job").unwrap().sources, None);
        assert_eq!(ledger.find("job-1").unwrap().sources, Some(sources(5, 0)));
    }

    #[test]
    fn nothing_grows_without_bound() {
        let mut ledger = Ledger::default();
        for n in 0..3000 {
            ledger.add(outcome(&format!("r{n}")));
            ledger.attach(&format!("chatcmpl-lost{n}-aaaaaaaa"), sources(1, 1));
        }
        ledger.add(Outcome { why: "ä".repeat(5000), ..outcome(&"x".repeat(5000)) });
        assert_eq!(ledger.recent(usize::MAX).len(), KEPT);
        assert_eq!(ledger.waiting.len(), WAITING);
        let newest = &ledger.recent(1)[0];
        assert_eq!((newest.id.len(), newest.why.len()), (ID_MAX, TEXT_MAX));
        assert!(ledger.find("r2999").is_some() && ledger.find("r0").is_none());
        assert_eq!(ledger.totals().prompts, 3000);
    }
}
