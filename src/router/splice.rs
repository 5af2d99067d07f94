//! The few bytes of a body that have to change on the way to the engine, and how its answer is put right again. Pure.
//!
//! A body is never built anew: a span of it is replaced or something is put in front of its first field, and every other
//! byte stays as it came. Three things need that:
//!
//! - *Usage.* A stream says how many tokens it had, and how many of them came out of a cache, only when it is asked to.
//!   The router always wants to know, so it asks where the client did not, and leaves the event with the answer out of
//!   the stream.
//! - *Isolation.* Prompts of a key that is isolated get a `cache_salt` of their own; one that the client gave goes into it.
//! - *Aliases.* A model that the client calls by an alias is called by its own name on the way there and by the alias on
//!   the way back.

use std::ops::Range;

use bytes::{Bytes, BytesMut};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};

use super::ask::Endpoint;

/// Where a body says what may have to change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spans {
    pub model: Option<Range<usize>>,
    pub stream_options: Option<Range<usize>>,
    pub cache_salt: Option<Range<usize>>,
}

/// A name that the client used for a model, and the model's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Alias {
    pub alias: String,
    pub model: String,
}

/// What has to be put right in the answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Undo {
    /// The stream has an event that the client did not ask for.
    usage: bool,
    alias: Option<Alias>,
}

impl Undo {
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

const ASKED: &str = "\"include_usage\":true";

/// The body as the engine gets it. `streams`: the client wants a stream.
pub fn splice(
    endpoint: Endpoint,
    streams: bool,
    body: &Bytes,
    spans: &Spans,
    alias: Option<Alias>,
    salt: Option<&str>,
) -> (Bytes, Undo) {
    let mut changes: Vec<(Range<usize>, String)> = Vec::new();
    if let (Some(alias), Some(span)) = (&alias, &spans.model) {
        changes.push((span.clone(), serde_json::Value::from(alias.model.as_str()).to_string()));
    }
    let may_ask = streams && matches!(endpoint, Endpoint::Chat | Endpoint::Completions);
    let usage = if may_ask { ask_for_usage(body, spans.stream_options.as_ref()) } else { None };
    let undo = Undo { usage: usage.is_some(), alias };
    changes.extend(usage);
    changes.extend(salt.filter(|_| endpoint.generates()).and_then(|salt| isolate(body, spans, salt)));
    if changes.is_empty() {
        return (body.clone(), undo);
    }
    changes.sort_by_key(|(span, _)| span.start);
    let mut out = Vec::with_capacity(body.len() + 64);
    let mut from = 0;
    for (span, with) in changes {
        out.extend_from_slice(&body[from..span.start]);
        out.extend_from_slice(with.as_bytes());
        from = span.end;
    }
    out.extend_from_slice(&body[from..]);
    (out.into(), undo)
}

/// The salt of an isolated key's prompt; `given` is the client's own, which keeps its prompts apart from each other still.
/// Neither can be told from it.
pub fn salted(salt: &str, given: Option<&str>) -> String {
    let Some(given) = given else { return salt.to_owned() };
    let both = Sha256::new().chain_update(salt).chain_update([0]).chain_update(given).finalize();
    hex::encode(&both[..16])
}

/// What to change so that a prompt has the salt of its key. None: the client's is no text, which the engine refuses.
fn isolate(body: &Bytes, spans: &Spans, salt: &str) -> Option<(Range<usize>, String)> {
    let Some(span) = &spans.cache_salt else {
        return front(body, 0..body.len(), &format!("\"cache_salt\":\"{salt}\""));
    };
    let given: Option<String> = serde_json::from_slice(&body[span.clone()]).ok()?;
    Some((span.clone(), format!("\"{}\"", salted(salt, given.as_deref()))))
}

/// A field in front of all others of an object.
fn front(body: &Bytes, object: Range<usize>, field: &str) -> Option<(Range<usize>, String)> {
    let open = object.start + body[object.clone()].iter().position(|byte| *byte == b'{')? + 1;
    let comma = if body[open..].trim_ascii_start().starts_with(b"}") { "" } else { "," };
    Some((open..open, format!("{field}{comma}")))
}

/// What to change so that a stream ends with its usage. None: it does so already, or the options are for the engine to
/// refuse.
fn ask_for_usage(body: &Bytes, options: Option<&Range<usize>>) -> Option<(Range<usize>, String)> {
    #[derive(Deserialize)]
    struct Options<'a> {
        #[serde(borrow, default)]
        include_usage: Option<&'a RawValue>,
    }
    let Some(span) = options else {
        return front(body, 0..body.len(), &format!("\"stream_options\":{{{ASKED}}}"));
    };
    let text = std::str::from_utf8(&body[span.clone()]).ok()?;
    if text == "null" {
        return Some((span.clone(), format!("{{{ASKED}}}")));
    }
    match serde_json::from_str::<Options<'_>>(text).ok()?.include_usage {
        None => front(body, span.clone(), ASKED),
        Some(raw) if matches!(raw.get(), "false" | "null") => {
            let at = span.start + (raw.get().as_ptr() as usize - text.as_ptr() as usize);
            Some((at..at + raw.get().len(), "true".into()))
        }
        Some(_) => None,
    }
}

/// Longest event that is waited for: one that is longer passes as it is.
const EVENT_MAX: usize = 1 << 20;

/// Puts a stream of events right. What it is given in pieces it gives on in whole events, which is how engines send them.
#[derive(Debug)]
pub struct Mender {
    undo: Undo,
    /// The beginning of an event.
    held: BytesMut,
}

impl Mender {
    pub fn new(undo: Undo) -> Self {
        Self { undo, held: BytesMut::new() }
    }

    /// What can be passed on after these bytes have come; may be nothing.
    pub fn push(&mut self, bytes: Bytes) -> Bytes {
        if self.undo.is_nothing() {
            return bytes;
        }
        let whole = end_of_events(&bytes);
        if self.held.is_empty() && whole == Some(bytes.len()) && !self.concerns(&bytes) {
            return bytes;
        }
        self.held.extend_from_slice(&bytes);
        let Some(end) = end_of_events(&self.held) else {
            return if self.held.len() > EVENT_MAX { self.rest() } else { Bytes::new() };
        };
        let events = self.held.split_to(end).freeze();
        if !self.concerns(&events) {
            return events;
        }
        let mut out = BytesMut::with_capacity(events.len() + 64);
        let mut from = 0;
        loop {
            // Empty lines beyond an event's own are no event, and pass as they came.
            let blank = events[from..].iter().take_while(|byte| matches!(byte, b'\n' | b'\r')).count();
            out.extend_from_slice(&events[from..from + blank]);
            from += blank;
            let Some(length) = first_event(&events[from..]) else { break };
            let event = &events[from..from + length];
            if !(self.undo.usage && is_usage_alone(event)) {
                self.put(event, &mut out);
            }
            from += length;
        }
        out.freeze()
    }

    /// What is left when the stream has ended, or was broken off.
    pub fn rest(&mut self) -> Bytes {
        self.held.split().freeze()
    }

    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Whether anything in it may have to change.
    fn concerns(&self, bytes: &[u8]) -> bool {
        self.undo.alias.is_some() || (self.undo.usage && find(bytes, b"\"usage\"").is_some())
    }

    fn put(&self, event: &[u8], out: &mut BytesMut) {
        match self.undo.alias.as_ref().and_then(|alias| renamed(event, alias)) {
            Some((span, name)) => {
                out.extend_from_slice(&event[..span.start]);
                out.extend_from_slice(name.as_bytes());
                out.extend_from_slice(&event[span.end..]);
            }
            None => out.extend_from_slice(event),
        }
    }
}

/// A whole document with the client's name for the model.
pub fn mend_whole(document: &Bytes, undo: &Undo) -> Bytes {
    let found = undo.alias.as_ref().and_then(|alias| renamed(document, alias));
    let Some((span, name)) = found else { return document.clone() };
    [&document[..span.start], name.as_bytes(), &document[span.end..]].concat().into()
}

/// Where the first `"model"` with the model's own name has its value, and the alias as JSON. A quote within a text is
/// escaped, so what the model writes is not mistaken for it.
fn renamed(bytes: &[u8], alias: &Alias) -> Option<(Range<usize>, String)> {
    const KEY: &[u8] = b"\"model\"";
    let own = serde_json::Value::from(alias.model.as_str()).to_string();
    let mut from = 0;
    while let Some(at) = find(&bytes[from..], KEY) {
        let after = from + at + KEY.len();
        let value = bytes[after..].trim_ascii_start().strip_prefix(b":").map(<[u8]>::trim_ascii_start);
        if let Some(value) = value.filter(|value| value.starts_with(own.as_bytes())) {
            let start = bytes.len() - value.len();
            let name = serde_json::Value::from(alias.alias.as_str()).to_string();
            return Some((start..start + own.len(), name));
        }
        from = after;
    }
    None
}

/// Whether an event has a stream's usage and nothing else.
fn is_usage_alone(event: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Chunk {
        choices: Vec<IgnoredAny>,
        usage: Option<IgnoredAny>,
    }
    let Some(data) = event.strip_prefix(b"data:") else { return false };
    serde_json::from_slice::<Chunk>(data).is_ok_and(|chunk| chunk.choices.is_empty() && chunk.usage.is_some())
}

/// Bytes of the first whole event, its blank line included.
fn first_event(bytes: &[u8]) -> Option<usize> {
    let ends: [&[u8]; 2] = [b"\n\n", b"\r\n\r\n"];
    ends.iter().filter_map(|end| Some(find(bytes, end)? + end.len())).min()
}

/// Where the last whole event ends.
fn end_of_events(bytes: &[u8]) -> Option<usize> {
    let ends: [&[u8]; 2] = [b"\n\n", b"\r\n\r\n"];
    let last =
        |end: &&[u8]| bytes.windows(end.len()).rposition(|window| window == *end).map(|at| at + end.len());
    ends.iter().filter_map(last).max()
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    memchr::memmem::find(bytes, what)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::ask::Ask;
    use super::*;

    fn alias() -> Alias {
        Alias { alias: "fast \"one\"".into(), model: "nano".into() }
    }

    fn there(body: &str, alias: Option<Alias>) -> (String, Undo) {
        let body = Bytes::copy_from_slice(body.as_bytes());
        let ask = Ask::read(Endpoint::Chat, &http::HeaderMap::new(), &body).unwrap();
        let (spliced, undo) = splice(Endpoint::Chat, ask.stream, &body, &ask.spans, alias, None);
        (String::from_utf8(spliced.to_vec()).unwrap(), undo)
    }

    #[test]
    fn a_stream_is_asked_for_its_usage_and_no_other_byte_changes() {
        for (before, after) in [
            (
                r#" { "stream" : true, "x": 1.0e0}"#,
                r#" {"stream_options":{"include_usage":true}, "stream" : true, "x": 1.0e0}"#,
            ),
            (
                r#"{"stream":true,"stream_options": null}"#,
                r#"{"stream":true,"stream_options": {"include_usage":true}}"#,
            ),
            (
                r#"{"stream":true,"stream_options":{ }}"#,
                r#"{"stream":true,"stream_options":{"include_usage":true }}"#,
            ),
            (
                r#"{"stream":true,"stream_options":{"include_usage" : false, "a":1}}"#,
                r#"{"stream":true,"stream_options":{"include_usage" : true, "a":1}}"#,
            ),
            (
                r#"{"stream":true,"stream_options":{"a":1}}"#,
                r#"{"stream":true,"stream_options":{"include_usage":true,"a":1}}"#,
            ),
        ] {
            let (spliced, undo) = there(before, None);
            assert_eq!((spliced.as_str(), undo.usage), (after, true));
        }
        for same in [
            r#"{"stream":true,"stream_options":{"include_usage":true}}"#,
            r#"{"stream":true,"stream_options":{"include_usage":3}}"#,
            r#"{"stream":true,"stream_options":[1]}"#,
            r#"{"stream":false}"#,
            r#"{"stream_options":{}}"#,
        ] {
            assert_eq!(there(same, None), (same.to_owned(), Undo::default()));
        }
    }

    #[test]
    fn an_alias_is_the_model_there_and_the_alias_here() {
        let (spliced, undo) =
            there(r#"{"a": "model", "mod\u0065l" : "fast \"one\"" , "b":2}"#, Some(alias()));
        assert_eq!(spliced, r#"{"a": "model", "mod\u0065l" : "nano" , "b":2}"#);
        let document =
            Bytes::from_static(br#"{"text":"\"model\":\"nano\"","model": "nano","x":{"model":"nano"}}"#);
        assert_eq!(
            mend_whole(&document, &undo),
            &br#"{"text":"\"model\":\"nano\"","model": "fast \"one\"","x":{"model":"nano"}}"#[..]
        );
        let other = Bytes::from_static(br#"{"model":"nano-2"}"#);
        assert_eq!(mend_whole(&other, &undo), other);
    }

    fn stream() -> String {
        let word =
            |n| format!("data: {{\"model\":\"nano\",\"choices\":[{{\"text\":\"{n} \\\"usage\\\"\"}}]}}\n\n");
        let usage = "data: {\"model\":\"nano\",\"choices\":[],\"usage\":{\"prompt_tokens\":9}}\n\n";
        format!("{}: a comment\n\n{}{usage}data: [DONE]\n\n", word(1), word(2))
    }

    #[test]
    fn the_event_that_nobody_asked_for_is_left_out() {
        let mut mender = Mender::new(Undo { usage: true, alias: None });
        let mended = mender.push(Bytes::from(stream()));
        let wanted =
            stream().split_inclusive("\n\n").filter(|e| !e.contains("\"choices\":[]")).collect::<String>();
        assert_eq!(mended, wanted.as_bytes());
        assert!(mender.is_empty());
        // Usage that comes with words stays.
        let both = "data: {\"choices\":[{\"text\":\"x\"}],\"usage\":{\"prompt_tokens\":9}}\n\n";
        assert_eq!(mender.push(both.into()), both);
        let none = "data: {\"choices\":[],\"usage\":null}\n\n";
        assert_eq!(mender.push(none.into()), none);
    }

    #[test]
    fn what_is_no_whole_event_passes_when_the_stream_ends_or_it_is_too_long() {
        let mut mender = Mender::new(Undo { usage: true, alias: None });
        assert!(mender.push("data: {\"half".into()).is_empty() && !mender.is_empty());
        assert_eq!(mender.rest(), "data: {\"half");
        let long = Bytes::from(vec![b'x'; EVENT_MAX + 1]);
        assert_eq!(mender.push(long.clone()), long);
        let mut nothing = Mender::new(Undo::default());
        assert_eq!(nothing.push("data: {\"half".into()), "data: {\"half");
    }

    #[test]
    fn the_prompts_of_an_isolated_key_have_a_salt_and_every_other_byte_stays() {
        let isolated = |endpoint, body: &str| {
            let body = Bytes::copy_from_slice(body.as_bytes());
            let ask = Ask::read(endpoint, &http::HeaderMap::new(), &body).unwrap();
            let out = splice(endpoint, false, &body, &ask.spans, None, Some("S")).0;
            String::from_utf8(out.to_vec()).unwrap()
        };
        let both = salted("S", Some("mine"));
        assert!(both.len() == 32 && both != salted("S", Some("yours")) && both != salted("T", Some("mine")));
        for (before, after) in [
            (r#" { "a":1.0}"#, r#" {"cache_salt":"S", "a":1.0}"#.to_owned()),
            (r#"{"x":0.10,"cache_salt": null }"#, r#"{"x":0.10,"cache_salt": "S" }"#.to_owned()),
            (r#"{"cache_salt":"m\u0069ne","x":1}"#, format!(r#"{{"cache_salt":"{both}","x":1}}"#)),
            (r#"{"cache_salt":7}"#, r#"{"cache_salt":7}"#.to_owned()),
        ] {
            assert_eq!(isolated(Endpoint::Messages, before), after);
            assert_eq!(isolated(Endpoint::Plain, before), before);
        }
    }

    #[test]
    fn empty_lines_between_events_pass_and_hide_none() {
        let usage = "data: {\"choices\":[],\"usage\":{}}\n\n";
        let stream = format!("data: a\n\n\n{usage}\n\r\n: b\n\n\n");
        for cut in 0..=stream.len() {
            let mut mender = Mender::new(Undo { usage: true, alias: None });
            let parts = [&stream[..cut], &stream[cut..]].map(|part| Bytes::copy_from_slice(part.as_bytes()));
            let mut out: Vec<u8> = parts.into_iter().flat_map(|part| mender.push(part)).collect();
            out.extend_from_slice(&mender.rest());
            assert_eq!(String::from_utf8(out).unwrap(), stream.replace(usage, ""), "cut at {cut}");
        }
    }

    proptest! {
        #[test]
        fn however_a_stream_is_cut_the_same_comes_out(
            cuts in proptest::collection::vec(0_usize..400, 0..8), crlf: bool, named: bool
        ) {
            let text = if crlf { stream().replace('\n', "\r\n") } else { stream() };
            let undo = Undo { usage: true, alias: named.then(alias) };
            let whole = Mender::new(undo.clone()).push(Bytes::from(text.clone()));
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut % text.len()).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let mut mender = Mender::new(undo);
            let mut out = Vec::new();
            for two in cuts.windows(2) {
                out.extend_from_slice(&mender.push(Bytes::copy_from_slice(&text.as_bytes()[two[0]..two[1]])));
            }
            out.extend_from_slice(&mender.rest());
            prop_assert_eq!(&out[..], &whole[..]);
            prop_assert_eq!(whole.windows(4).any(|w| w == b"nano"), !named);
        }
    }
}
