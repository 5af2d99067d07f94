//! What a request asks for, as far as placing it needs to know: a borrowed view of headers and body.
//!
//! The body is never changed and never built up as a tree: one pass takes the spans of the fields below, a second
//! walks the prompt and hashes it. Spelling that does not reach the model (spaces, escapes, `cache_control` marks
//! that move from turn to turn, a text given bare or as a list of one part) does not change the hashes.

use std::fmt;

use http::HeaderMap;
use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::prefix::{Mark, Roller};
use super::splice::Spans;

/// The routes of the open API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Endpoint {
    Chat,
    Completions,
    Messages,
    CountTokens,
    Responses,
    /// A response of `/v1/responses` by its id: read or cancelled.
    ResponseById,
    Tokenize,
    Detokenize,
    /// Embeddings, scores, ranks, classes: one answer to one input, no prefix to be found again.
    Plain,
    Models,
    /// No route of ours: only its refusal needs a shape.
    Unknown,
}

impl Endpoint {
    pub const ALL: [Self; 11] = [
        Self::Chat,
        Self::Completions,
        Self::Messages,
        Self::CountTokens,
        Self::Responses,
        Self::ResponseById,
        Self::Tokenize,
        Self::Detokenize,
        Self::Plain,
        Self::Models,
        Self::Unknown,
    ];

    /// Label in metrics and pages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "completions",
            Self::Messages => "messages",
            Self::CountTokens => "count_tokens",
            Self::Responses => "responses",
            Self::ResponseById => "response_by_id",
            Self::Tokenize => "tokenize",
            Self::Detokenize => "detokenize",
            Self::Plain => "plain",
            Self::Models => "models",
            Self::Unknown => "unknown",
        }
    }

    /// Whether it makes the engine prefill a prompt: only then does it matter where it goes.
    pub fn generates(self) -> bool {
        matches!(self, Self::Chat | Self::Completions | Self::Messages | Self::Responses)
    }

    /// What the engine's own id of a request begins with, given the `X-Request-Id` that it was sent with.
    pub fn engine_id(self, id: &str) -> String {
        match self {
            Self::Chat | Self::Messages => format!("chatcmpl-{id}"),
            Self::Completions => format!("cmpl-{id}"),
            Self::Responses if !id.starts_with("resp_") => format!("resp_{id}"),
            _ => id.to_owned(),
        }
    }
}

/// What is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    pub endpoint: Endpoint,
    pub model: Option<String>,
    pub stream: bool,
    /// What the client or the body says about which conversation this is. A hint, never relied on.
    pub session: Option<String>,
    /// Hashes of the prompt's beginnings, shortest first.
    pub prefix: Vec<Mark>,
    /// Bytes of the canonical prompt; those of the last mark, or more where marks were cut off.
    pub prompt_bytes: u64,
    pub max_tokens: Option<u64>,
    /// `request_id` of the body, which `/v1/responses` takes instead of the header.
    pub request_id: Option<String>,
    /// `previous_response_id` of the body: only the engine that made that response has it.
    pub previous: Option<String>,
    /// The alias that the client used for the model, where it used one.
    pub alias: Option<String>,
    pub spans: Spans,
}

impl Ask {
    /// An ask without a body.
    pub fn bare(endpoint: Endpoint) -> Self {
        Self {
            endpoint,
            model: None,
            stream: false,
            session: None,
            prefix: Vec::new(),
            prompt_bytes: 0,
            max_tokens: None,
            request_id: None,
            previous: None,
            alias: None,
            spans: Spans::default(),
        }
    }

    /// Reads a JSON body. The error is serde_json's, with line and column.
    pub fn read(endpoint: Endpoint, headers: &HeaderMap, body: &[u8]) -> Result<Self, serde_json::Error> {
        Self::read_as(endpoint, headers, body, |_| None, None)
    }

    /// As [`Ask::read`]; `own` gives the own name of a model that is called by an alias, `salt` keeps its prompts apart
    /// from those of others.
    pub fn read_as(
        endpoint: Endpoint,
        headers: &HeaderMap,
        body: &[u8],
        own: impl Fn(&str) -> Option<String>,
        salt: Option<&str>,
    ) -> Result<Self, serde_json::Error> {
        let view: View<'_> = serde_json::from_slice(body)?;
        let mut roller = Roller::new(endpoint.name());
        let called = text(view.model);
        let named = called.as_deref().and_then(own);
        let (model, alias) = if named.is_some() { (named, called) } else { (called, None) };
        if endpoint.generates() {
            roller.feed(model.as_deref().unwrap_or_default().as_bytes());
            // Prompts with another salt share nothing.
            for salt in salt.into_iter().chain(view.cache_salt.map(RawValue::get)) {
                roller.feed(b"\0salt\0");
                roller.feed(salt.as_bytes());
            }
            let strip = endpoint == Endpoint::Messages;
            for (span, content) in [(view.tools, false), (view.system, true), (view.instructions, false)] {
                if let Some(span) = span {
                    walk(span, Walk { roller: &mut roller, content, strip });
                    roller.boundary();
                }
            }
            for span in [view.messages, view.input, view.prompt].into_iter().flatten() {
                walk(span, Turns { roller: &mut roller, strip });
                roller.boundary();
            }
        }
        let (prefix, prompt_bytes) = roller.finish();
        Ok(Self {
            endpoint,
            model,
            stream: view.stream.is_some_and(|raw| raw.get() == "true"),
            session: session(headers, &view),
            prefix,
            prompt_bytes,
            max_tokens: [view.max_completion_tokens, view.max_tokens, view.max_output_tokens]
                .into_iter()
                .flatten()
                .find_map(|raw| raw.get().parse().ok()),
            request_id: text(view.request_id),
            previous: text(view.previous_response_id),
            alias,
            spans: Spans {
                model: view.model.map(|raw| span(body, raw)),
                stream_options: view.stream_options.map(|raw| span(body, raw)),
                cache_salt: view.cache_salt.map(|raw| span(body, raw)),
            },
        })
    }
}

/// Headers that name a conversation, in the order in which they are believed. Request and trace ids are not among
/// them: they differ from turn to turn.
const SESSION_HEADERS: [&str; 10] = [
    "x-session-id",
    "x-dynamo-session-id",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "thread-id",
    "x-litellm-session-id",
    "x-session-token",
    "x-olla-session-id",
    "x-codex-parent-thread-id",
];

/// Longer session ids are cut here: they are hashed, and nobody's id needs more to be told apart.
const SESSION_CHARS_MAX: usize = 256;

fn session(headers: &HeaderMap, view: &View<'_>) -> Option<String> {
    let header = SESSION_HEADERS.iter().find_map(|name| headers.get(*name)?.to_str().ok().map(str::to_owned));
    let user_id = || {
        #[derive(serde::Deserialize)]
        struct Metadata {
            user_id: Option<String>,
        }
        serde_json::from_str::<Metadata>(view.metadata?.get()).ok()?.user_id
    };
    header
        .or_else(|| text(view.prompt_cache_key))
        .or_else(|| text(view.session_id))
        .or_else(user_id)
        .or_else(|| text(view.user))
        .filter(|session| !session.is_empty())
        .map(|session| session.chars().take(SESSION_CHARS_MAX).collect())
}

/// Where a span lies in its body.
fn span(body: &[u8], raw: &RawValue) -> std::ops::Range<usize> {
    let start = raw.get().as_ptr() as usize - body.as_ptr() as usize;
    start..start + raw.get().len()
}

/// The text of a span that is a string; anything else is the engine's to refuse.
fn text(span: Option<&RawValue>) -> Option<String> {
    serde_json::from_str(span?.get()).ok()
}

/// A key or a text, without a copy where it is spelled without escapes.
struct Name<'de>(std::borrow::Cow<'de, str>);

impl<'de> de::Deserialize<'de> for Name<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Name<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a name")
            }
            fn visit_borrowed_str<E: de::Error>(self, name: &'de str) -> Result<Name<'de>, E> {
                Ok(Name(name.into()))
            }
            fn visit_str<E: de::Error>(self, name: &str) -> Result<Name<'de>, E> {
                Ok(Name(name.to_owned().into()))
            }
        }
        deserializer.deserialize_str(Reader)
    }
}

/// Spans of the fields that placing looks at. A field given twice counts as given last, as engines read it.
#[derive(Default)]
struct View<'a> {
    model: Option<&'a RawValue>,
    stream: Option<&'a RawValue>,
    stream_options: Option<&'a RawValue>,
    prompt: Option<&'a RawValue>,
    input: Option<&'a RawValue>,
    instructions: Option<&'a RawValue>,
    messages: Option<&'a RawValue>,
    system: Option<&'a RawValue>,
    tools: Option<&'a RawValue>,
    max_tokens: Option<&'a RawValue>,
    max_completion_tokens: Option<&'a RawValue>,
    max_output_tokens: Option<&'a RawValue>,
    prompt_cache_key: Option<&'a RawValue>,
    session_id: Option<&'a RawValue>,
    user: Option<&'a RawValue>,
    metadata: Option<&'a RawValue>,
    request_id: Option<&'a RawValue>,
    cache_salt: Option<&'a RawValue>,
    previous_response_id: Option<&'a RawValue>,
}

impl<'a> View<'a> {
    fn field(&mut self, name: &str) -> Option<&mut Option<&'a RawValue>> {
        Some(match name {
            "model" => &mut self.model,
            "stream" => &mut self.stream,
            "stream_options" => &mut self.stream_options,
            "prompt" => &mut self.prompt,
            "input" => &mut self.input,
            "instructions" => &mut self.instructions,
            "messages" => &mut self.messages,
            "system" => &mut self.system,
            "tools" => &mut self.tools,
            "max_tokens" => &mut self.max_tokens,
            "max_completion_tokens" => &mut self.max_completion_tokens,
            "max_output_tokens" => &mut self.max_output_tokens,
            "prompt_cache_key" => &mut self.prompt_cache_key,
            "session_id" => &mut self.session_id,
            "user" => &mut self.user,
            "metadata" => &mut self.metadata,
            "request_id" => &mut self.request_id,
            "cache_salt" => &mut self.cache_salt,
            "previous_response_id" => &mut self.previous_response_id,
            _ => return None,
        })
    }
}

impl<'de> de::Deserialize<'de> for View<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = View<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<View<'de>, A::Error> {
                let mut view = View::default();
                while let Some(Name(name)) = map.next_key()? {
                    match view.field(&name) {
                        Some(field) => *field = Some(map.next_value()?),
                        None => drop(map.next_value::<IgnoredAny>()?),
                    }
                }
                Ok(view)
            }
        }
        deserializer.deserialize_map(Reader)
    }
}

/// Walks a span. What cannot be walked (nested too deep, a lone surrogate) ends the hashes there: the request is
/// the engine's to judge, and a shorter known prefix is only a worse guess.
fn walk<'a>(span: &'a RawValue, seed: impl DeserializeSeed<'a, Value = ()>) {
    let _ = seed.deserialize(&mut serde_json::Deserializer::from_str(span.get()));
}

/// The turns of a conversation: a boundary after each.
struct Turns<'r> {
    roller: &'r mut Roller,
    strip: bool,
}

impl<'de> DeserializeSeed<'de> for Turns<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Turns<'_> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a prompt")
    }
    fn visit_str<E: de::Error>(self, text: &str) -> Result<(), E> {
        self.roller.feed(text.as_bytes());
        Ok(())
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let Self { roller, strip } = self;
        while seq.next_element_seed(Turn { roller, strip })?.is_some() {}
        Ok(())
    }
    fn visit_unit<E: de::Error>(self) -> Result<(), E> {
        Ok(())
    }
}

/// One turn, or one token of a prompt given as tokens: those have no boundary of their own.
struct Turn<'r> {
    roller: &'r mut Roller,
    strip: bool,
}

impl<'de> DeserializeSeed<'de> for Turn<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        let Self { roller, strip } = self;
        let fed = roller.fed();
        Walk { roller, content: false, strip }.deserialize(deserializer)?;
        if roller.fed() - fed > size_of::<u64>() as u64 {
            roller.boundary();
        }
        Ok(())
    }
}

/// Feeds one value.
struct Walk<'r> {
    roller: &'r mut Roller,
    /// A bare text here means a list of one text part.
    content: bool,
    /// Whether the engine strips the client's billing line, which differs from request to request.
    strip: bool,
}

const BILLING_LINE: &str = "x-anthropic-billing-header:";

impl<'de> DeserializeSeed<'de> for Walk<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Walk<'_> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }
    fn visit_unit<E: de::Error>(self) -> Result<(), E> {
        self.roller.feed(b"null");
        Ok(())
    }
    fn visit_bool<E: de::Error>(self, value: bool) -> Result<(), E> {
        self.roller.feed(if value { b"true" } else { b"false" });
        Ok(())
    }
    fn visit_u64<E: de::Error>(self, value: u64) -> Result<(), E> {
        self.roller.feed(&value.to_le_bytes());
        Ok(())
    }
    fn visit_i64<E: de::Error>(self, value: i64) -> Result<(), E> {
        self.roller.feed(&value.to_le_bytes());
        Ok(())
    }
    fn visit_f64<E: de::Error>(self, value: f64) -> Result<(), E> {
        self.roller.feed(&value.to_bits().to_le_bytes());
        Ok(())
    }
    fn visit_str<E: de::Error>(self, text: &str) -> Result<(), E> {
        let shown = if self.strip && text.starts_with(BILLING_LINE) { "" } else { text };
        let (open, close): (&[u8], &[u8]) = match self.content {
            true => (b"[{type:\"text\",text:\"", b"\",},]"),
            false => (b"\"", b"\""),
        };
        for piece in [open, shown.as_bytes(), close] {
            self.roller.feed(piece);
        }
        Ok(())
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let Self { roller, strip, .. } = self;
        roller.feed(b"[");
        while seq.next_element_seed(Walk { roller, content: false, strip })?.is_some() {
            roller.feed(b",");
        }
        roller.feed(b"]");
        Ok(())
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Self { roller, strip, .. } = self;
        roller.feed(b"{");
        while let Some(Name(name)) = map.next_key()? {
            if name == "cache_control" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            roller.feed(name.as_bytes());
            roller.feed(b":");
            map.next_value_seed(Walk { roller, content: name == "content", strip })?;
            roller.feed(b",");
        }
        roller.feed(b"}");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn chat(body: &str) -> Ask {
        Ask::read(Endpoint::Chat, &HeaderMap::new(), body.as_bytes()).unwrap()
    }

    fn turns(turns: &[&str]) -> Ask {
        let messages: Vec<_> = turns.iter().map(|t| json!({"role": "user", "content": t})).collect();
        chat(&json!({"model": "m", "messages": messages}).to_string())
    }

    #[test]
    fn a_growing_conversation_keeps_the_marks_it_had() {
        let long = "word ".repeat(900);
        let (one, two) = (turns(&["hi", &long]), turns(&["hi", &long, "more"]));
        assert!(one.prefix.len() > 4, "a long turn is cut inside too: {:?}", one.prefix);
        assert_eq!(two.prefix[..one.prefix.len()], one.prefix[..]);
        assert_eq!(two.prefix.last().unwrap().bytes, two.prompt_bytes);
    }

    #[test]
    fn another_first_turn_changes_every_mark() {
        let (one, two) = (turns(&["hi", "same"]), turns(&["ho", "same"]));
        assert!(one.prefix.iter().all(|mark| !two.prefix.contains(mark)));
    }

    #[test]
    fn spelling_that_does_not_reach_the_model_does_not_change_the_marks() {
        let plain = chat(r#"{"model":"m","messages":[{"role":"user","content":"höhe"}]}"#);
        for other in [
            r#"{"messages" : [ {"role":"user", "content" : "h\u00f6he"} ],"model":"m"}"#,
            r#"{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"höhe"}]}]}"#,
            r#"{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"höhe","cache_control":{"type":"ephemeral"}}]}]}"#,
            r#"{"m\u006fdel":"x","model":"m","temperature":0.10000000149,"messages":[{"role":"user","content":"höhe"}]}"#,
        ] {
            assert_eq!(chat(other).prefix, plain.prefix, "{other}");
        }
        let other = chat(r#"{"model":"n","messages":[{"role":"user","content":"höhe"}]}"#);
        assert_ne!(other.prefix, plain.prefix, "another model");
    }

    #[test]
    fn the_billing_line_of_a_client_does_not_change_the_marks_of_messages() {
        let ask = |line: &str| {
            let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}],
                "system": [{"type": "text", "text": format!("x-anthropic-billing-header: {line}")}]});
            Ask::read(Endpoint::Messages, &HeaderMap::new(), body.to_string().as_bytes()).unwrap()
        };
        assert_eq!(ask("one").prefix, ask("two").prefix);
    }

    #[test]
    fn a_field_given_twice_counts_as_given_last() {
        let ask =
            chat(r#"{"model":"a","stream":true,"model":"b","stream":false,"max_tokens":1,"max_tokens":7}"#);
        assert_eq!((ask.model.as_deref(), ask.stream, ask.max_tokens), (Some("b"), false, Some(7)));
    }

    #[test]
    fn what_is_no_object_is_refused_with_its_place() {
        for body in ["", "[]", "{", r#"{"a":1,}"#, r#"{"a":1} x"#, "{\"a\":\n nope}"] {
            let error = Ask::read(Endpoint::Chat, &HeaderMap::new(), body.as_bytes()).unwrap_err();
            assert!(error.to_string().contains("line"), "{body}: {error}");
        }
    }

    #[test]
    fn a_field_of_the_wrong_type_is_left_to_the_engine() {
        let ask = chat(r#"{"model":7,"stream":"yes","messages":"hi","max_tokens":"many"}"#);
        assert_eq!((ask.model, ask.stream, ask.max_tokens), (None, false, None));
    }

    #[test]
    fn nesting_without_end_is_neither_a_panic_nor_an_error() {
        let deep = format!(r#"{{"messages":{}1{}}}"#, "[".repeat(5000), "]".repeat(5000));
        assert_eq!(chat(&deep).model, None);
        assert!(chat(r#"{"messages":[{"content":"\ud800"}]}"#).prefix.len() < 3);
    }

    #[test]
    fn tokens_are_hashed_by_the_kilobyte() {
        let ask = |n: u64| {
            let body = json!({"model": "m", "prompt": (0..n).collect::<Vec<_>>()});
            Ask::read(Endpoint::Completions, &HeaderMap::new(), body.to_string().as_bytes()).unwrap()
        };
        let (short, long) = (ask(512), ask(600));
        assert!(short.prefix.len() < 7, "no mark per token: {}", short.prefix.len());
        assert_eq!(long.prefix[..4], short.prefix[..4]);
    }

    #[test]
    fn the_session_is_the_most_telling_hint() {
        let mut headers = HeaderMap::new();
        let body = br#"{"prompt_cache_key":"key","user":"me","metadata":{"user_id":"you"}}"#;
        let ask =
            |headers: &HeaderMap, body: &[u8]| Ask::read(Endpoint::Chat, headers, body).unwrap().session;
        assert_eq!(ask(&headers, body).as_deref(), Some("key"));
        assert_eq!(ask(&headers, br#"{"metadata":{"user_id":"you"},"user":"me"}"#).as_deref(), Some("you"));
        assert_eq!(ask(&headers, br#"{"metadata":5}"#), None);
        headers.insert("session_id", "codex".parse().unwrap());
        headers.insert("x-request-id", "never".parse().unwrap());
        assert_eq!(ask(&headers, body).as_deref(), Some("codex"));
        headers.insert("x-session-id", "s".repeat(1000).parse().unwrap());
        assert_eq!(ask(&headers, body).map(|s| s.len()), Some(256));
    }

    proptest::proptest! {
        #[test]
        fn no_body_makes_it_panic(body: Vec<u8>) {
            let _ = Ask::read(Endpoint::Messages, &HeaderMap::new(), &body);
        }

        #[test]
        fn whatever_follows_the_marks_of_a_prefix_stay(
            first in proptest::collection::vec(".{0,300}", 1..6), more in proptest::collection::vec(".{0,300}", 0..4)
        ) {
            let first: Vec<&str> = first.iter().map(String::as_str).collect();
            let all: Vec<&str> = first.iter().copied().chain(more.iter().map(String::as_str)).collect();
            let (short, long) = (turns(&first), turns(&all));
            proptest::prop_assert_eq!(&long.prefix[..short.prefix.len()], &short.prefix[..]);
        }
    }
}
