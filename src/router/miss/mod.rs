//! Why a turn missed: a prompt whose beginning was computed before, and was computed again.
//!
//! The last turn of each conversation is remembered as an outline ([`outline`]): hashes and lengths, no text. When the
//! engine had less of a turn than the turn before had computed, either the prompt does not go on where that one
//! ended, and the first part that differs says why, or it does, and the cache has lost it. Pure.
//!
//! A conversation is known by the session that the client names or by its first turn of a person, so a client that
//! changes its system prompt each time is found out, too. Reports are for people: a wrong guess costs nothing but
//! their trust, so what is not clearly the same conversation is taken for a new one.

mod outline;

use std::collections::{HashSet, VecDeque};

use serde::{Deserialize, Serialize};

use crate::base::clock::Micros;
pub use outline::{Outline, Part, Role, What};

/// Conversations that are remembered, the longest unused forgotten first.
const KEPT: usize = 256;

/// Parts that are remembered together: about 4 MB.
const PARTS: usize = 64 << 10;

/// Prompts below this are not worth a word: computing them takes a second at most.
const LEAST: u32 = 1024;

/// Smaller conversations are not compacted by any client; a second one of the same session is another one, a
/// sub-agent's for example.
const COMPACTS_FROM: u32 = 16_384;

/// A compaction leaves less than this share of what the turn before had (router.md names 30 %).
const COMPACTED: f64 = 0.3;

/// A system prompt whose other lines are the same has changed in a place, not as a whole.
const LINES_CHANGED: usize = 2;

/// Prompts that should have had hits, and had none, before it is the engine that is blamed.
const NEVER: u32 = 3;

/// One turn that is over.
#[derive(Clone, Debug)]
pub struct Turn {
    pub outline: Outline,
    /// What the client calls the conversation, hashed.
    pub session: Option<u64>,
    pub node: String,
    /// The namespace of the engine's rows, where it is known; else empty.
    pub namespace: String,
    /// The life of the engine, where it is known; else empty.
    pub engine: String,
    pub begin: Micros,
    pub end: Micros,
    /// As the engine counted them.
    pub prompt: u32,
    pub cached: u32,
}

/// What made a turn miss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Model, template options or salt.
    OptionsChanged,
    ToolsReordered,
    ToolsChanged,
    /// A time, a counter, an id.
    TextVaries,
    SystemChanged,
    /// The client leaves out what the assistant thought.
    ReasoningDropped,
    /// The client replaced the conversation by a summary.
    Compacted,
    /// The client leaves out the oldest turns.
    TurnsRemoved,
    TurnEdited,
    /// The rows of the engine that is served now are others.
    NamespaceChanged,
    /// The engine was started again, and what its device held was nowhere else.
    EngineRestarted,
    /// The turn before was not over.
    StillRunning,
    /// It ran on the other box, and was not brought over.
    OtherBox,
    /// The engine never reports a hit.
    NeverHits,
    /// Pushed out, or never stored.
    Gone,
}

impl Cause {
    pub const ALL: [Self; 15] = [
        Self::OptionsChanged,
        Self::ToolsReordered,
        Self::ToolsChanged,
        Self::TextVaries,
        Self::SystemChanged,
        Self::ReasoningDropped,
        Self::Compacted,
        Self::TurnsRemoved,
        Self::TurnEdited,
        Self::NamespaceChanged,
        Self::EngineRestarted,
        Self::StillRunning,
        Self::OtherBox,
        Self::NeverHits,
        Self::Gone,
    ];

    /// Label in metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::OptionsChanged => "options_changed",
            Self::ToolsReordered => "tools_reordered",
            Self::ToolsChanged => "tools_changed",
            Self::TextVaries => "text_varies",
            Self::SystemChanged => "system_changed",
            Self::ReasoningDropped => "reasoning_dropped",
            Self::Compacted => "compacted",
            Self::TurnsRemoved => "turns_removed",
            Self::TurnEdited => "turn_edited",
            Self::NamespaceChanged => "namespace_changed",
            Self::EngineRestarted => "engine_restarted",
            Self::StillRunning => "still_running",
            Self::OtherBox => "other_box",
            Self::NeverHits => "never_hits",
            Self::Gone => "gone",
        }
    }

    /// What it means, after "because".
    fn why(self) -> &'static str {
        match self {
            Self::OptionsChanged => "the model, the template's options or the cache salt are others",
            Self::ToolsReordered => "the tools are the same in another order",
            Self::ToolsChanged => "the tools are others",
            Self::TextVaries => "a time, a counter or an id in it is another",
            Self::SystemChanged => "its text is another",
            Self::ReasoningDropped => "the client left out what was thought in it",
            Self::Compacted => "the client replaced the conversation by a summary",
            Self::TurnsRemoved => "the client left out the oldest turns",
            Self::TurnEdited => "its text is another",
            Self::NamespaceChanged => {
                "the engine, the model or a setting that its rows depend on changed meanwhile"
            }
            Self::EngineRestarted => "the engine was started again, and nothing but its device held it",
            Self::StillRunning => "the turn before was still being computed",
            Self::OtherBox => "the turn before ran on another box, and it was not brought over",
            Self::NeverHits => "this engine has not reported one cached token since it started",
            Self::Gone => "it was pushed out, or never stored",
        }
    }

    /// What to do.
    pub fn advice(self) -> &'static str {
        match self {
            Self::OptionsChanged => {
                "keep reasoning effort, template options and salt as they are within a conversation"
            }
            Self::ToolsReordered => "send the tools in a fixed order, for example sorted by name",
            Self::ToolsChanged => {
                "announce all tools from the first turn on; MCP servers that come and go change the list"
            }
            Self::TextVaries => "take what changes out of it, or say it in the newest turn",
            Self::SystemChanged => {
                "keep the system prompt as it is within a conversation, and say what is new in the newest turn"
            }
            Self::ReasoningDropped => {
                "let the client send reasoning back, or take a template that never shows that of older turns"
            }
            Self::Compacted => "nothing: this is what compaction costs, once; a larger window makes it rarer",
            Self::TurnsRemoved => {
                "let the client compact in large steps instead of dropping a turn each time"
            }
            Self::TurnEdited => {
                "let the client append only; some clients rewrite tool results or attach reminders to older turns"
            }
            Self::NamespaceChanged => {
                "nothing, unless the engine's version, model or settings were not meant to change"
            }
            Self::EngineRestarted => {
                "look at why it ended, and at `spark-kv store du`: rows on the drive survive it"
            }
            Self::StillRunning => {
                "nothing: turns of one conversation that overlap cannot share what is not there yet"
            }
            Self::OtherBox => "look at `spark-kv rails` and `spark-kv cluster ls`",
            Self::NeverHits => {
                "look at `spark-kv status`: some hybrid models get no hits with speculative decoding or without prefix caching"
            }
            Self::Gone => {
                "look at `spark-kv store du` for room and at `spark-kv status` for writes that failed"
            }
        }
    }
}

/// Why one turn missed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Miss {
    pub cause: Cause,
    /// Tokens that were computed again.
    pub tokens: u32,
    /// In a sentence.
    pub why: String,
    /// What to do, in a sentence.
    pub advice: String,
}

/// The last turn of each conversation.
#[derive(Debug, Default)]
pub struct Conversations {
    /// Longest unused first.
    kept: VecDeque<Turn>,
    parts: usize,
    /// Of the newest life of an engine: turns that should have had hits and had none, and whether one had.
    engine: String,
    without: u32,
    hits: bool,
}

impl Conversations {
    /// A turn is over. `grain`: tokens of the largest row, below which nothing is said.
    pub fn add(&mut self, turn: Turn, grain: u32) -> Option<Miss> {
        if self.engine != turn.engine {
            (self.engine, self.without, self.hits) = (turn.engine.clone(), 0, false);
        }
        self.hits |= turn.cached > 0;
        if turn.prompt < LEAST || turn.outline.bytes == 0 {
            return None;
        }
        let before = self.before(&turn);
        let miss = before.and_then(|at| self.judge(&self.kept[at], &turn, grain));
        if miss.as_ref().is_some_and(|miss| !miss.cause.is_clients()) && turn.cached == 0 {
            self.without += 1;
        }
        self.keep(turn, before);
        miss
    }

    /// The turn of the same conversation that has most of this one.
    fn before(&self, turn: &Turn) -> Option<usize> {
        let opening = turn.outline.opening().map(|part| part.exact);
        let theirs: HashSet<u64> = turns(&turn.outline).map(|part| part.exact).collect();
        let alike = |before: &Turn| -> u64 {
            turns(&before.outline).filter(|part| theirs.contains(&part.exact)).map(|part| part.bytes).sum()
        };
        let is_same = |before: &Turn, alike: u64| {
            let said = turns(&before.outline).map(|part| part.bytes).sum::<u64>();
            let says = turns(&turn.outline).map(|part| part.bytes).sum::<u64>();
            let same_session = turn.session.is_some() && before.session == turn.session;
            2 * alike >= said.min(says).max(1) || (same_session && is_compacted(before, turn))
        };
        let may = |before: &Turn| {
            (opening.is_some() && before.outline.opening().map(|part| part.exact) == opening)
                || (turn.session.is_some() && before.session == turn.session)
        };
        let candidates = self.kept.iter().enumerate().filter(|(_, before)| may(before));
        let scored = candidates.map(|(at, before)| (at, alike(before)));
        // Of those that are alike the newest.
        scored
            .filter(|&(at, alike)| is_same(&self.kept[at], alike))
            .max_by_key(|&(at, alike)| (alike, at))
            .map(|(at, _)| at)
    }

    fn judge(&self, before: &Turn, now: &Turn, grain: u32) -> Option<Miss> {
        let shared = Shared::of(&before.outline, &now.outline);
        let goes_on = shared.parts == before.outline.parts.len();
        // Bytes per token differ from part to part, and a row that is not full holds nothing.
        let most = before.prompt.min(now.prompt.saturating_sub(1));
        let slack = (most / 10).max(2 * grain + 64);
        let lost = most.saturating_sub(now.cached);
        if lost <= slack {
            return None;
        }
        let could = if goes_on {
            most
        } else {
            let share = shared.bytes as f64 / before.outline.bytes.max(1) as f64;
            (f64::from(before.prompt) * share) as u32
        };
        if now.cached.saturating_add(slack) < could.min(most) {
            let cause = self.cache_lost(before, now);
            let tokens = could.min(most) - now.cached;
            let why = format!(
                "{tokens} tokens that the turn before had computed were computed again, because {}",
                cause.why()
            );
            return Some(Miss { cause, tokens, why, advice: cause.advice().to_owned() });
        }
        let (place, cause) = differs(&before.outline, &now.outline, &shared, is_compacted(before, now));
        let why = format!(
            "{place} is not what it was in the turn before, so {lost} tokens from there on were computed again: {}",
            cause.why()
        );
        Some(Miss { cause, tokens: lost, why, advice: cause.advice().to_owned() })
    }

    fn cache_lost(&self, before: &Turn, now: &Turn) -> Cause {
        if before.node == now.node && before.namespace != now.namespace {
            Cause::NamespaceChanged
        } else if before.end > now.begin {
            Cause::StillRunning
        } else if before.node != now.node {
            Cause::OtherBox
        } else if before.engine != now.engine {
            Cause::EngineRestarted
        } else if !self.hits && self.without >= NEVER {
            Cause::NeverHits
        } else {
            Cause::Gone
        }
    }

    /// The turn takes the place of the one that it goes on from.
    fn keep(&mut self, turn: Turn, before: Option<usize>) {
        if let Some(at) = before
            && Shared::of(&self.kept[at].outline, &turn.outline).parts == self.kept[at].outline.parts.len()
        {
            self.forget(at);
        }
        self.parts += turn.outline.parts.len();
        self.kept.push_back(turn);
        while self.kept.len() > KEPT || self.parts > PARTS {
            self.forget(0);
        }
    }

    fn forget(&mut self, at: usize) {
        if let Some(turn) = self.kept.remove(at) {
            self.parts -= turn.outline.parts.len();
        }
    }
}

impl Cause {
    /// Whether it lies in what the client sent.
    fn is_clients(self) -> bool {
        (self as usize) < Self::NamespaceChanged as usize
    }
}

fn turns(outline: &Outline) -> impl Iterator<Item = &Part> {
    outline.parts.iter().filter(|part| matches!(part.what, What::Turn(_)))
}

fn is_compacted(before: &Turn, now: &Turn) -> bool {
    let shared = Shared::of(&before.outline, &now.outline);
    let head = |outline: &Outline| {
        outline.parts.iter().take_while(|part| !matches!(part.what, What::Turn(_))).count()
    };
    let share = shared.bytes as f64 / before.outline.bytes.max(1) as f64;
    before.prompt >= COMPACTS_FROM
        && shared.parts >= head(&before.outline)
        && share < COMPACTED
        && now.prompt < before.prompt / 2
}

/// What two prompts have in common from their beginnings.
struct Shared {
    /// Whole parts.
    parts: usize,
    bytes: u64,
}

impl Shared {
    fn of(before: &Outline, now: &Outline) -> Self {
        let pairs = before.parts.iter().zip(&now.parts);
        let parts = pairs.take_while(|(a, b)| a.exact == b.exact && a.what == b.what).count();
        let whole: u64 = before.parts[..parts].iter().map(|part| part.bytes).sum();
        let lines = match (before.parts.get(parts), now.parts.get(parts)) {
            (Some(a), Some(b)) => a
                .lines
                .iter()
                .zip(&b.lines)
                .take_while(|(a, b)| a == b)
                .map(|(line, _)| u64::from(line.bytes))
                .sum(),
            _ => 0,
        };
        Self { parts, bytes: whole + lines }
    }
}

/// Where two prompts part, and why.
fn differs(before: &Outline, now: &Outline, shared: &Shared, compacted: bool) -> (String, Cause) {
    let at = shared.parts;
    let (Some(was), Some(is)) = (before.parts.get(at), now.parts.get(at)) else {
        return ("the end of the prompt".to_owned(), Cause::TurnsRemoved);
    };
    let cause = match was.what {
        What::Options => Cause::OptionsChanged,
        What::Tools if is.what == was.what && is.bare == was.bare => Cause::ToolsReordered,
        _ if is.what == was.what && is.masked == was.masked => Cause::TextVaries,
        What::Tools => Cause::ToolsChanged,
        // Tools that were not there before stand where the system prompt stood.
        What::System if is.what == What::Tools => Cause::ToolsChanged,
        What::System if has_changed_in_a_place(was, is) => Cause::TextVaries,
        What::System => Cause::SystemChanged,
        What::Turn(_) if compacted => Cause::Compacted,
        What::Turn(Role::Thought) if before.parts.get(at + 1).is_some_and(|next| next.exact == is.exact) => {
            Cause::ReasoningDropped
        }
        What::Turn(Role::Assistant) if is.what == was.what && is.bare == was.bare => Cause::ReasoningDropped,
        What::Turn(_) if goes_on_later(&before.parts[at..], &now.parts[at..]) => Cause::TurnsRemoved,
        What::Turn(_) => Cause::TurnEdited,
    };
    (place(now, at), cause)
}

/// Whether all but a line or two of a system prompt are the same, in the same order.
fn has_changed_in_a_place(was: &Part, is: &Part) -> bool {
    let changed = was.lines.iter().zip(&is.lines).filter(|(a, b)| a != b).count();
    was.lines.len() == is.lines.len() && was.lines.len() > 2 * LINES_CHANGED && changed <= LINES_CHANGED
}

/// Whether what comes now stood some turns later before.
fn goes_on_later(before: &[Part], now: &[Part]) -> bool {
    let Some(first) = now.first() else { return false };
    let later = before.iter().skip(1).position(|part| part.exact == first.exact);
    later.is_some_and(|skipped| {
        let rest = &before[skipped + 1..];
        let same = rest.iter().zip(now).take_while(|(a, b)| a.exact == b.exact).count();
        same >= 2.min(rest.len())
    })
}

/// A part by its name.
fn place(outline: &Outline, at: usize) -> String {
    let number = outline.parts[..at].iter().filter(|part| matches!(part.what, What::Turn(_))).count() + 1;
    match outline.parts[at].what {
        What::Options => "what stands beside the messages".to_owned(),
        What::Tools => "the list of tools".to_owned(),
        What::System => "the system prompt".to_owned(),
        What::Turn(role) => {
            let who = match role {
                Role::User => "the user's",
                Role::Assistant => "the assistant's",
                Role::Tool => "a tool's",
                Role::Thought => "reasoning",
                Role::Other => "another's",
            };
            format!("turn {number} ({who})")
        }
    }
}

#[cfg(test)]
mod tests;
