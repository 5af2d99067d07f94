//! What must hold for any bytes that a client or an engine may send, once for the tests and once for the fuzzers (`fuzz/`).
//!
//! Each law takes any bytes and fails by a panic. No reader panics; a body that was JSON is JSON when the router has
//! changed it, and says the same but for what was changed; a stream comes out the same however it was cut.

use bytes::Bytes;
use serde_json::Value;

use super::ask::{Ask, Endpoint};
use super::miss::Outline;
use super::nonce::drop_nonce;
use super::splice::{Alias, Mender, splice};
use super::usage::Tail;

const ENDPOINTS: [Endpoint; 4] =
    [Endpoint::Chat, Endpoint::Completions, Endpoint::Messages, Endpoint::Responses];

fn alias() -> Alias {
    Alias { alias: "mine".to_owned(), model: "own".to_owned() }
}

/// A body of a request. Its first byte says to which endpoint, and whether the model has another name.
pub fn body(bytes: &[u8]) {
    let Some((first, body)) = bytes.split_first() else { return };
    let endpoint = ENDPOINTS[usize::from(first % 4)];
    let came = Bytes::copy_from_slice(body);
    let body = drop_nonce(endpoint, &came);
    let _ = Outline::read(endpoint, &body);
    let own = |_: &str| (first & 4 != 0).then(|| alias().model);
    let Ok(ask) = Ask::read_as(endpoint, &http::HeaderMap::new(), &body, own, Some("salt")) else {
        return;
    };
    assert!(ask.prefix.is_sorted_by_key(|mark| mark.bytes), "marks cover more and more");
    let renamed = ask.alias.is_some().then(alias);
    let (sent, _) = splice(endpoint, ask.stream, &body, &ask.spans, renamed.clone(), Some("salt"));
    let parsed = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).ok();
    let (Some(before), Some(after)) = (parsed(&body), parsed(&sent)) else {
        assert_eq!(parsed(&body).is_some(), parsed(&sent).is_some(), "JSON stays JSON");
        return;
    };
    let Value::Object(after) = after else { panic!("an object stays an object") };
    for (name, value) in &after {
        let ours = match name.as_str() {
            "model" => renamed.is_some(),
            "stream_options" | "cache_salt" => true,
            _ => false,
        };
        assert!(ours || before.get(name) == Some(value), "{name} is as it came");
    }
    assert!(before.as_object().is_none_or(|before| before.keys().all(|name| after.contains_key(name))));
}

/// A stream of an engine. Its first byte says how it is cut.
pub fn stream(bytes: &[u8]) {
    let Some((cut, stream)) = bytes.split_first() else { return };
    let mended = |size: usize| {
        let asked = Bytes::from_static(br#"{"model":"mine","stream":true}"#);
        let ask = Ask::read_as(Endpoint::Chat, &http::HeaderMap::new(), &asked, |_| Some("own".into()), None);
        let Ok(ask) = ask else { unreachable!("a body of ours") };
        let (_, undo) = splice(Endpoint::Chat, true, &asked, &ask.spans, Some(alias()), None);
        let (mut mender, mut tail, mut out) = (Mender::new(undo), Tail::default(), Vec::new());
        for part in stream.chunks(size) {
            tail.push(part);
            out.extend_from_slice(&mender.push(Bytes::copy_from_slice(part)));
        }
        out.extend_from_slice(&mender.rest());
        (out, tail.usage())
    };
    let whole = mended(stream.len().max(1));
    assert_eq!(mended(usize::from(*cut).max(1)), whole, "however it is cut");
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Pieces of bodies and streams, so that more than the first byte is reached.
    fn soup() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop::sample::select(vec![
            "{",
            "}",
            "[",
            "]",
            ",",
            ":",
            "\"model\":",
            "\"mine\"",
            "\"own\"",
            "\"stream\":true,",
            "\"stream_options\":",
            "{\"include_usage\":false}",
            "\"cache_salt\":",
            "\"messages\":",
            "{\"role\":\"system\",\"content\":\"x-anthropic-billing-header: cch=1; a\\nb\"}",
            "null",
            "1.0",
            "data: ",
            "\n",
            "\n\n",
            "\r\n\r\n",
            "event: x\n",
            "[DONE]",
            "{\"usage\":{\"prompt_tokens\":3},\"choices\":[]}",
            "{\"model\":\"own\",\"choices\":[{}]}",
            " ",
            "\\",
            "\u{e9}",
        ]);
        (any::<u8>(), prop::collection::vec(piece, 0..24)).prop_map(|(first, pieces)| {
            let mut bytes = vec![first];
            pieces.iter().for_each(|piece| bytes.extend_from_slice(piece.as_bytes()));
            bytes
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn any_body_is_read_and_changed_by_a_span(bytes in soup()) {
            body(&bytes);
        }

        #[test]
        fn any_stream_is_mended_however_it_is_cut(bytes in soup()) {
            stream(&bytes);
        }
    }

    #[test]
    fn a_whole_body_is_reached() {
        for first in 0..8_u8 {
            let text = r#"{"model":"mine","stream":true,"messages":[{"role":"user","content":"hi"}],"cache_salt":"x"}"#;
            body(&[&[first], text.as_bytes()].concat());
            body(&[&[first], &b"{}"[..]].concat());
        }
    }
}
