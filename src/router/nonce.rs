//! The line by which Claude Code tells its maker whom to bill, left out of prompts. Pure.
//!
//! Its system prompt begins with `x-anthropic-billing-header: …`, which is another one in every request. A prompt that
//! begins with it shares no block with any other one, so that nothing of it is ever found in a cache. vLLM leaves it out
//! on `/v1/messages` by itself; who comes through the other endpoints (behind something that translates) gets the same
//! here: the line with the end of its line, and where it is all that a part says, that part. Every other byte stays.

use std::ops::Range;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::ask::Endpoint;

/// What the line begins with.
const LINE: &str = "x-anthropic-billing-header:";

/// Fields in which a system prompt can stand. One given twice counts as given last, as engines read it.
#[derive(Default)]
struct View<'a> {
    messages: Option<&'a RawValue>,
    input: Option<&'a RawValue>,
    instructions: Option<&'a RawValue>,
    prompt: Option<&'a RawValue>,
}

impl<'de> Deserialize<'de> for View<'de> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> serde::de::Visitor<'de> for Reader {
            type Value = View<'de>;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a JSON object")
            }
            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<View<'de>, A::Error> {
                let mut view = View::default();
                while let Some(name) = map.next_key::<std::borrow::Cow<'de, str>>()? {
                    let value = map.next_value()?;
                    match &*name {
                        "messages" => view.messages = Some(value),
                        "input" => view.input = Some(value),
                        "instructions" => view.instructions = Some(value),
                        "prompt" => view.prompt = Some(value),
                        _ => {}
                    }
                }
                Ok(view)
            }
        }
        deserializer.deserialize_map(Reader)
    }
}

/// The body without the line; as it is where there is none, or where it is not understood.
pub fn drop_nonce(endpoint: Endpoint, body: &Bytes) -> Bytes {
    let concerns = matches!(endpoint, Endpoint::Chat | Endpoint::Completions | Endpoint::Responses);
    if !concerns || memchr::memmem::find(body, LINE.as_bytes()).is_none() {
        return body.clone();
    }
    let Ok(view) = serde_json::from_slice::<View<'_>>(body) else { return body.clone() };
    let texts = [view.instructions, view.prompt, view.input].into_iter().flatten();
    let mut cuts: Vec<Range<usize>> = texts.filter_map(|raw| line(raw.get(), at(body, raw.get()))).collect();
    for raw in [view.messages, view.input].into_iter().flatten() {
        cuts.extend(first_message(raw).and_then(|content| of_content(body, content)));
    }
    if cuts.is_empty() {
        return body.clone();
    }
    cuts.sort_by_key(|cut| cut.start);
    let mut out = Vec::with_capacity(body.len());
    let mut from = 0;
    for cut in cuts {
        out.extend_from_slice(&body[from..cut.start]);
        from = cut.end;
    }
    out.extend_from_slice(&body[from..]);
    out.into()
}

/// Where a span lies in its body.
fn at(body: &[u8], span: &str) -> usize {
    span.as_ptr() as usize - body.as_ptr() as usize
}

/// The content of a conversation's first message, when that is the system's.
fn first_message(messages: &RawValue) -> Option<&RawValue> {
    #[derive(Deserialize)]
    struct Message<'a> {
        #[serde(borrow)]
        role: std::borrow::Cow<'a, str>,
        #[serde(borrow)]
        content: &'a RawValue,
    }
    let all: Vec<&RawValue> = serde_json::from_str(messages.get()).ok()?;
    let first: Message<'_> = serde_json::from_str(all.first()?.get()).ok()?;
    matches!(&*first.role, "system" | "developer").then_some(first.content)
}

/// What to cut out of a content: of its text, or of the first of its parts.
fn of_content(body: &[u8], content: &RawValue) -> Option<Range<usize>> {
    if content.get().starts_with('"') {
        return line(content.get(), at(body, content.get()));
    }
    #[derive(Deserialize)]
    struct Part<'a> {
        #[serde(borrow)]
        text: &'a RawValue,
    }
    let parts: Vec<&RawValue> = serde_json::from_str(content.get()).ok()?;
    let first = parts.first()?;
    let text = serde_json::from_str::<Part<'_>>(first.get()).ok()?.text;
    let cut = line(text.get(), at(body, text.get()))?;
    let whole = cut.len() + 2 == text.get().len();
    match parts.get(1) {
        // It says nothing else: the part goes, with the comma behind it.
        Some(second) if whole => Some(at(body, first.get())..at(body, second.get())),
        _ => Some(cut),
    }
}

/// The line in a JSON text that lies at `start`, with its end. None: the text begins otherwise.
fn line(text: &str, start: usize) -> Option<Range<usize>> {
    let inner = text.strip_prefix('"')?.strip_suffix('"')?;
    if !inner.starts_with(LINE) {
        return None;
    }
    let mut bytes = inner.bytes().enumerate();
    let mut end = inner.len();
    while let Some((n, byte)) = bytes.next() {
        // What follows a backslash belongs to it.
        if byte == b'\\' && bytes.next().is_some_and(|(_, escaped)| escaped == b'n') {
            end = n + 2;
            break;
        }
    }
    Some(start + 1..start + 1 + end)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dropped(endpoint: Endpoint, body: &str) -> String {
        let out = drop_nonce(endpoint, &Bytes::copy_from_slice(body.as_bytes()));
        String::from_utf8(out.to_vec()).unwrap()
    }

    const N: &str = "x-anthropic-billing-header: cc_version=2.1; cch=a\\\"1\\\\n2;";

    #[test]
    fn the_line_goes_and_every_other_byte_stays() {
        for (endpoint, before, after) in [
            (
                Endpoint::Chat,
                r#"{ "temperature":0.10000000149, "messages": [ {"content" : "NONCE\nYou are","role":"system"} ,{"role":"user","content":"NONCE\nhi"}],"x":1.0}"#,
                r#"{ "temperature":0.10000000149, "messages": [ {"content" : "You are","role":"system"} ,{"role":"user","content":"NONCE\nhi"}],"x":1.0}"#,
            ),
            (
                Endpoint::Chat,
                r#"{"messages":[{"role":"system","content":[{"type":"text","text":"NONCE"} , {"type":"text","text":"You"}]}]}"#,
                r#"{"messages":[{"role":"system","content":[{"type":"text","text":"You"}]}]}"#,
            ),
            (
                Endpoint::Chat,
                r#"{"messages":[{"role":"developer","content":[{"type":"text","text":"NONCE"}]}]}"#,
                r#"{"messages":[{"role":"developer","content":[{"type":"text","text":""}]}]}"#,
            ),
            (
                Endpoint::Responses,
                r#"{"instructions":"NONCE\n\nYou","input":[{"role":"developer","content":"NONCE"}]}"#,
                r#"{"instructions":"\nYou","input":[{"role":"developer","content":""}]}"#,
            ),
            (Endpoint::Completions, r#"{"prompt":"NONCE\nYou"}"#, r#"{"prompt":"You"}"#),
        ] {
            let (before, after) = (before.replace("NONCE", N), after.replace("NONCE", N));
            assert_eq!(dropped(endpoint, &before), after);
        }
    }

    #[test]
    fn what_only_looks_like_it_stays() {
        for (endpoint, body) in [
            (Endpoint::Messages, r#"{"system":[{"type":"text","text":"NONCE"}]}"#),
            (Endpoint::Chat, r#"{"messages":[{"role":"user","content":"NONCE\nhi"}]}"#),
            (Endpoint::Chat, r#"{"messages":[{"role":"system","content":"say NONCE\nhi"}]}"#),
            (Endpoint::Chat, r#"{"messages":[{"role":"system","content":7}],"x":"NONCE"}"#),
            (Endpoint::Chat, r#"{"messages":["NONCE"]}"#),
            (Endpoint::Chat, r#"{"messages":[],"x":"NONCE"}"#),
            (Endpoint::Chat, r#"{"messages":[{"role":"system","content":"NONCE"#),
        ] {
            let body = body.replace("NONCE", N);
            assert_eq!(dropped(endpoint, &body), body);
        }
    }

    proptest::proptest! {
        #[test]
        fn a_body_that_was_valid_stays_valid(line in ".{0,60}", rest in ".{0,60}", parts: bool) {
            let text = format!("{LINE}{line}\n{rest}");
            let content = match parts {
                true => serde_json::json!([{"type": "text", "text": text}, {"type": "text", "text": rest}]),
                false => serde_json::json!(text),
            };
            let body = serde_json::json!({"messages": [{"role": "system", "content": content}]}).to_string();
            let out: serde_json::Value = serde_json::from_str(&dropped(Endpoint::Chat, &body)).unwrap();
            let content = &out["messages"][0]["content"];
            let said = if parts { &content[0]["text"] } else { content };
            // `.` matches no end of a line.
            proptest::prop_assert_eq!(said.as_str().unwrap(), rest);
        }

        #[test]
        fn no_body_makes_it_panic(body: Vec<u8>) {
            let body = [b"{\"messages\":[{\"role\":\"system\",\"content\":\"x-anthropic-billing-header:", &body[..]].concat();
            drop_nonce(Endpoint::Chat, &body.into());
        }
    }
}
