//! The engine's own token ids of a request, without asking the engine: its tokenizer, its chat template and its rules
//! of what becomes of a request before either.
//!
//! Exact or nothing: whatever is not surely as the engine has it (images, a template feature that differs, a field
//! whose handling is not known) is [`Unsure`] with the reason, and the router then guesses as it did before. That the
//! rest *is* exact is proved against the engine's `/tokenize`, at start with [`probes`] and on a sample of requests.
//! What the rules are was read from vLLM 0.32: `renderers/{hf,chat_utils,params,online_renderer}.py` and
//! `entrypoints/{openai,anthropic}`.

mod anthropic;
mod args;
mod chat;
mod folder;
mod json;
mod pieces;
pub mod probes;
mod recent;
mod template;
mod trail;
mod trust;
mod words;

use std::borrow::Cow;

use parking_lot::Mutex;

pub use args::Options;
pub use json::{Json, Map};
pub use pieces::Step;
pub use template::Now;
pub use trust::{Proof, Trust, difference};

use super::ask::Endpoint;
use super::chain::{Chain, Extra, Reach};
use crate::base::block::RowKey;
use chat::Chat;
use folder::Templates;
use pieces::{Ids, Looked, Pieces};
use trail::Trail;

/// Why there are no exact tokens, as a fragment for people. Clipped: it may quote a client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unsure(Cow<'static, str>);

const WHY_MAX: usize = 200;

impl Unsure {
    pub fn of(why: impl Into<Cow<'static, str>>) -> Self {
        let why = why.into();
        match why.char_indices().nth(WHY_MAX) {
            Some((at, _)) => Self(why[..at].to_owned().into()),
            None => Self(why),
        }
    }
}

/// A request's prompt: its ids, and what else goes into the engine's hashes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    pub ids: Vec<u32>,
    pub extra: Extra,
    /// Bytes of the prompt that had to be tokenised; the rest was seen before.
    pub fresh_bytes: usize,
    /// Its pieces from its beginning, as far as each is remembered.
    pub steps: Vec<Step>,
    /// Whether the tokenizer put ids of its own around it.
    pub special: bool,
}

/// A prompt that is read but not tokenised yet.
#[derive(Debug)]
pub struct Draft {
    raw: Raw,
    looked: Option<Looked>,
    extra: Extra,
}

impl Draft {
    /// Bytes that must be tokenised.
    pub fn fresh_bytes(&self) -> usize {
        self.looked.as_ref().map_or(0, |looked| looked.fresh_bytes)
    }
}

/// A model that is spoken to: tokenizer, templates, rules. It remembers what it has seen; several threads may ask.
pub struct Speaker {
    options: Options,
    templates: Templates,
    pieces: Pieces,
    /// Held while a path is looked up or written down.
    trail: Mutex<Trail>,
    /// `reasoning_effort` that stands for no thinking on `/v1/messages`.
    calm: &'static str,
    /// How message contents are handed to the template, and how the template's text suggests.
    parts: bool,
    guessed: bool,
}

impl std::fmt::Debug for Speaker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Speaker({:?})", self.pieces)
    }
}

/// Text, or ids as they came.
#[derive(Debug)]
enum Raw {
    Text { text: String, special: bool },
    Ids(Vec<u32>),
}

impl Speaker {
    /// Reads the model's folder. `bound`: bytes that seen text, its ids and its hashes may take.
    pub fn load(options: Options, bound: usize, now: Now) -> Result<Self, Unsure> {
        // A token has four bytes of text and four of id, and two of a hash where the engine hashes sixteen at a time.
        let pieces = Pieces::new(folder::tokenizer(&options.model)?, bound / 5 * 4)?;
        let trail = Mutex::new(Trail::new(bound / 5));
        let templates = Templates::load(&options, &now)?;
        let parts = options.parts.unwrap_or_else(|| templates.wants_parts());
        let mut speaker = Self { options, templates, pieces, trail, calm: "none", parts, guessed: parts };
        speaker.calm = anthropic::calm(|effort| {
            let chat = Chat::greeting(effort);
            speaker.chat_text(&chat).ok()
        });
        Ok(speaker)
    }

    /// Hands message contents over in the other form, when the proof fails in the guessed one. False: the form is
    /// given by the engine's arguments.
    pub fn try_other_form(&mut self) -> bool {
        if self.options.parts.is_some() {
            return false;
        }
        self.parts = !self.parts;
        true
    }

    pub fn is_in_guessed_form(&self) -> bool {
        self.parts == self.guessed
    }

    /// The prompt of a request to `endpoint`.
    pub fn prompt(&self, endpoint: Endpoint, body: &[u8]) -> Result<Prompt, Unsure> {
        self.finish(self.draft(endpoint, body)?)
    }

    /// Everything but tokenising what was not seen before.
    pub fn draft(&self, endpoint: Endpoint, body: &[u8]) -> Result<Draft, Unsure> {
        let body = Json::read(body)?;
        let Json::Map(body) = body else { return Err(Unsure::of("the body is no object")) };
        let raw = match endpoint {
            Endpoint::Chat => self.chat(&Chat::of_openai(&body, &self.options)?)?,
            Endpoint::Tokenize if body.get("messages").is_some() => {
                self.chat(&Chat::of_openai(&body, &self.options)?)?
            }
            Endpoint::Messages | Endpoint::CountTokens => {
                let system_first = self.templates.system_first();
                self.chat(&anthropic::chat(&body, system_first, self.calm, &self.options)?)?
            }
            Endpoint::Completions | Endpoint::Tokenize => chat::completion(&body)?,
            other => return Err(Unsure::of(format!("{} is not followed yet", other.name()))),
        };
        let looked = match &raw {
            Raw::Text { text, .. } => Some(self.pieces.look(text)),
            Raw::Ids(_) => None,
        };
        Ok(Draft { raw, looked, extra: self.options.extra(&body)? })
    }

    /// Tokenises what is left.
    pub fn finish(&self, draft: Draft) -> Result<Prompt, Unsure> {
        let Draft { raw, looked, extra } = draft;
        Ok(match (raw, looked) {
            (Raw::Ids(ids), _) => Prompt { ids, extra, ..Prompt::default() },
            (Raw::Text { text, special }, looked) => {
                let looked = looked.unwrap_or_else(|| self.pieces.look(&text));
                let Ids { ids, fresh_bytes, steps } = self.pieces.ids(&text, looked, special)?;
                Prompt { ids, extra, fresh_bytes, steps, special }
            }
        })
    }

    /// What each of `nodes` nodes can take of a prompt, by an engine that hashes by `chain`; see [`Chain::reaches`].
    /// Hashes that were made before are not made again.
    pub fn reaches(
        &self,
        prompt: &Prompt,
        chain: &Chain,
        nodes: usize,
        holders: impl Fn(&RowKey) -> u64,
    ) -> Vec<Reach> {
        let known = self.trail.lock().known(chain, prompt);
        let mut made = Vec::new();
        let rest = chain.hashes_after(&known.hashes, &prompt.ids, &prompt.extra);
        let hashes = known.hashes.iter().copied().chain(rest.inspect(|hash| made.push(*hash)));
        let reaches = chain.reaches(prompt.ids.len(), hashes, nodes, holders);
        self.trail.lock().learn(chain, prompt, known, &made);
        reaches
    }

    /// The chat as the engine's `/tokenize` takes it, for a request whose own endpoint has no such question.
    pub fn question(&self, endpoint: Endpoint, body: &[u8]) -> Result<Vec<u8>, Unsure> {
        probes::question(endpoint, body, self.templates.system_first(), self.calm, &self.options)
    }

    /// Bytes that seen text, ids and hashes take.
    pub fn bytes(&self) -> usize {
        self.pieces.bytes() + self.trail.lock().bytes()
    }

    fn chat(&self, chat: &Chat) -> Result<Raw, Unsure> {
        Ok(Raw::Text { text: self.chat_text(chat)?, special: chat.special })
    }

    fn chat_text(&self, chat: &Chat) -> Result<String, Unsure> {
        chat.text(self.templates.for_chat(chat.tools.is_some()), self.templates.specials(), self.parts)
    }
}

#[cfg(test)]
mod tests;
