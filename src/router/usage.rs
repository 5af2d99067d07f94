//! What an answer says about itself in passing: its token counts, and whether it was whole. Only looked at, never
//! altered; only the end of the answer is kept for it.

use serde::{Deserialize, Serialize};

/// Tokens as the engine counted them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    pub prompt_tokens: Option<u64>,
    /// Of the prompt's, those that came out of any cache.
    pub cached_tokens: Option<u64>,
    pub completion_tokens: Option<u64>,
}

/// The usage object of OpenAI's and Anthropic's answers together.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Raw {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    prompt_tokens_details: Option<Details>,
    input_tokens: Option<u64>,
    output_tokens: Option<u64>,
    input_tokens_details: Option<Details>,
    cache_read_input_tokens: Option<u64>,
    cache_creation_input_tokens: Option<u64>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Details {
    cached_tokens: Option<u64>,
}

impl Raw {
    fn usage(self) -> Usage {
        let details = self.prompt_tokens_details.or(self.input_tokens_details).and_then(|d| d.cached_tokens);
        // Anthropic counts the cached tokens beside the others, OpenAI among them.
        let beside =
            self.cache_read_input_tokens.unwrap_or(0) + self.cache_creation_input_tokens.unwrap_or(0);
        Usage {
            prompt_tokens: self.prompt_tokens.or(self.input_tokens.map(|n| n.saturating_add(beside))),
            cached_tokens: details.or(self.cache_read_input_tokens),
            completion_tokens: self.completion_tokens.or(self.output_tokens),
        }
    }
}

/// Bytes of an answer's end that are kept: the usage object is within the last event or the last fields.
const TAIL: usize = 16 << 10;

/// The last bytes of an answer.
#[derive(Debug, Default)]
pub struct Tail(Vec<u8>);

const USAGE: &[u8] = b"\"usage\"";

impl Tail {
    pub fn push(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(&bytes[bytes.len().saturating_sub(TAIL)..]);
        // In halves, so that a stream of small frames does not move the whole at each.
        if self.0.len() > 2 * TAIL {
            self.0.drain(..self.0.len() - TAIL);
        }
    }

    /// The last usage object. A quote inside a text is escaped, so what the model writes is not mistaken for it.
    pub fn usage(&self) -> Option<Usage> {
        let mut end = self.0.len();
        while let Some(at) = self.0[..end].windows(USAGE.len()).rposition(|window| window == USAGE) {
            if let Some(usage) = read(&self.0[at + USAGE.len()..]) {
                return Some(usage);
            }
            end = at;
        }
        None
    }

    /// Whether a stream said that it was at its end. At the begin of a line only: a text of the model may hold the
    /// words, but not behind a line break, which JSON escapes.
    pub fn whole(&self) -> bool {
        const ENDS: [&[u8]; 3] = [b"data: [DONE]", b"event: message_stop", b"event: response.completed"];
        let end = &self.0[self.0.len().saturating_sub(TAIL)..];
        end.split(|byte| *byte == b'\n').any(|line| ENDS.contains(&line.trim_ascii_end()))
    }
}

fn read(after: &[u8]) -> Option<Usage> {
    let value = after.trim_ascii_start().strip_prefix(b":")?;
    let mut values = serde_json::Deserializer::from_slice(value).into_iter::<Option<Raw>>();
    values.next()?.ok()?.map(Raw::usage)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(text: &str) -> Option<(Option<u64>, Option<u64>, Option<u64>)> {
        let mut tail = Tail::default();
        text.as_bytes().chunks(7).for_each(|chunk| tail.push(chunk));
        tail.usage().map(|u| (u.prompt_tokens, u.cached_tokens, u.completion_tokens))
    }

    #[test]
    fn the_usage_of_each_kind_of_answer_is_found() {
        for (text, expected) in [
            (
                r#"{"choices":[],"usage":{"prompt_tokens":9,"total_tokens":12,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":8}},"x":1}"#,
                (Some(9), Some(8), Some(3)),
            ),
            (
                "data: {\"usage\":null}\n\ndata: {\"usage\" : {\"prompt_tokens\":5,\"completion_tokens\":2,\"prompt_tokens_details\":null}}\n\ndata: [DONE]\n\n",
                (Some(5), None, Some(2)),
            ),
            (
                r#"event: message_delta data: {"usage":{"input_tokens":2,"output_tokens":3,"cache_read_input_tokens":40}}"#,
                (Some(42), Some(40), Some(3)),
            ),
            (
                r#"{"response":{"usage":{"input_tokens":7,"input_tokens_details":{"cached_tokens":4},"output_tokens":1}}}"#,
                (Some(7), Some(4), Some(1)),
            ),
        ] {
            assert_eq!(usage(text), Some(expected), "{text}");
        }
    }

    #[test]
    fn the_last_usage_counts_and_null_does_not() {
        let text = r#"{"usage":{"prompt_tokens":1}} {"usage":{"prompt_tokens":2}} {"usage":null}"#;
        assert_eq!(usage(text), Some((Some(2), None, None)));
    }

    #[test]
    fn what_a_model_writes_is_not_a_usage() {
        assert_eq!(usage(r#"{"content":"\"usage\":{\"prompt_tokens\":1}"}"#), None);
        assert_eq!(usage(r#"{"usage":{"prompt_tokens":"many"}}"#), None);
        assert_eq!(usage(r#"{"usage":{"prompt_tok"#), None);
    }

    #[test]
    fn a_long_answer_keeps_only_its_end() {
        let mut tail = Tail::default();
        for _ in 0..10_000 {
            tail.push(b"data: {\"delta\":\"word\"}\n\n");
        }
        assert!(tail.0.len() <= 2 * TAIL);
        tail.push(b"data: {\"delta\":\"data: [DONE]\"}\n\n");
        assert!(!tail.whole());
        tail.push(&[b' '; 100_000]);
        tail.push(b"\n\ndata: [DONE]\n\n");
        assert!(tail.whole());
    }
}
