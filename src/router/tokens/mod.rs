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
mod template;
mod trust;

use std::borrow::Cow;

pub use args::Options;
pub use pieces::Ids;
pub use template::Now;
pub use trust::{Proof, Trust, difference};

use super::ask::Endpoint;
use super::chain::Extra;
use chat::Chat;
use folder::Templates;
use json::Json;
use pieces::Pieces;

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
}

/// A model that is spoken to: tokenizer, templates, rules. One owner; it remembers what it has seen.
#[derive(Debug)]
pub struct Speaker {
    options: Options,
    templates: Templates,
    pieces: Pieces,
    /// `reasoning_effort` that stands for no thinking on `/v1/messages`.
    calm: &'static str,
    /// How message contents are handed to the template, and how the template's text suggests.
    parts: bool,
    guessed: bool,
}

/// Text, or ids as they came.
enum Raw {
    Text { text: String, special: bool },
    Ids(Vec<u32>),
}

impl Speaker {
    /// Reads the model's folder. `bound`: bytes that seen text and its ids may take.
    pub fn load(options: Options, bound: usize, now: Now) -> Result<Self, Unsure> {
        let pieces = Pieces::new(folder::tokenizer(&options.model)?, bound)?;
        let templates = Templates::load(&options, &now)?;
        let parts = options.parts.unwrap_or_else(|| templates.wants_parts());
        let mut speaker = Self { options, templates, pieces, calm: "none", parts, guessed: parts };
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
    pub fn prompt(&mut self, endpoint: Endpoint, body: &[u8]) -> Result<Prompt, Unsure> {
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
        let extra = self.options.extra(&body)?;
        Ok(match raw {
            Raw::Ids(ids) => Prompt { ids, extra, fresh_bytes: 0 },
            Raw::Text { text, special } => {
                let Ids { ids, fresh_bytes } = self.pieces.ids(&text, special)?;
                Prompt { ids, extra, fresh_bytes }
            }
        })
    }

    /// The chat as the engine's `/tokenize` takes it, for a request whose own endpoint has no such question.
    pub fn question(&self, endpoint: Endpoint, body: &[u8]) -> Result<Vec<u8>, Unsure> {
        probes::question(endpoint, body, self.templates.system_first(), self.calm, &self.options)
    }

    /// Bytes that seen text takes.
    pub fn bytes(&self) -> usize {
        self.pieces.bytes()
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
