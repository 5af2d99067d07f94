//! What is sent: sessions of a coding agent that grow turn by turn, and the text that they are made of.

use serde_json::{Value, json};

/// Text that looks like code and talk about it, the same for the same seed.
#[derive(Clone, Debug)]
pub struct Words(u64);

const STEMS: [&str; 48] = [
    "request", "buffer", "stream", "index", "value", "token", "cluster", "node", "engine", "table", "record",
    "segment", "handle", "reader", "writer", "offset", "length", "state", "event", "timer", "queue",
    "worker", "thread", "lock", "cache", "block", "prefix", "router", "session", "message", "header", "body",
    "parse", "render", "encode", "verify", "retry", "limit", "budget", "window", "sample", "metric",
    "config", "option", "result", "error", "context", "signal",
];
const FORMS: [&str; 16] = [
    "    let {a}_{b} = self.{c}.{a}();\n",
    "fn {a}_{b}(&mut self, {c}: &str) -> Result<(), Error> {{\n",
    "        if {a}.{b}() == {n} {{ return Err(Error::{c}); }}\n",
    "    // The {a} of a {b} is what the {c} waits for.\n",
    "}}\n\n",
    "    {a}.push({b}[{n}]);\n",
    "The {a} does not reach the {b}, because its {c} is empty. ",
    "I will look at `{a}/{b}.rs` first and then change the {c}.\n",
    "{n}: \"{a}\", \"{b}\": [{n}, {n}],\n",
    "error[E0{n}]: the {a} `{b}` is not in this {c}\n",
    "    assert_eq!({a}.{b}, {n});\n",
    "| {a} | {b} | {n} |\n",
    "    for {a} in {b}.iter().filter(|{c}| {c}.is_some()) {{\n",
    "  - {a}: {b}-{c}-{n}\n",
    "#[derive(Debug)]\nstruct {a}{b} {{ {c}: Vec<u{n}> }}\n",
    "What happens when the {a} is {n} and its {b} has no {c}?\n",
];

impl Words {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// About `bytes` bytes.
    pub fn text(&mut self, bytes: usize) -> String {
        let mut text = String::with_capacity(bytes + 128);
        while text.len() < bytes {
            let form = FORMS[self.below(FORMS.len())];
            let mut rest = form;
            while let Some(at) = rest.find(['{', '}']) {
                text.push_str(&rest[..at]);
                let (mark, after) = rest[at..].split_at(2);
                rest = after;
                match mark {
                    "{{" => text.push('{'),
                    "}}" => text.push('}'),
                    "{n" => text.push_str(&self.below(1000).to_string()),
                    _ => text.push_str(STEMS[self.below(STEMS.len())]),
                }
                // The end of a mark in single braces.
                if mark.starts_with('{') && mark != "{{" {
                    rest = rest.strip_prefix('}').unwrap_or(rest);
                }
            }
            text.push_str(rest);
        }
        text
    }

    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap_or(0) % limit
    }
}

/// A conversation.
#[derive(Clone, Debug)]
pub struct Session {
    words: Words,
    messages: Vec<Value>,
}

/// Of a turn, what the client adds: results of tools are longer than replies.
const ASKED: f64 = 0.75;

impl Session {
    /// All sessions begin with the same `system` text.
    pub fn new(seed: u64, system: &str) -> Self {
        Self { words: Words::new(seed + 1000), messages: vec![json!({"role": "system", "content": system})] }
    }

    /// Another reply and another question, of `bytes` bytes together.
    pub fn grow(&mut self, bytes: usize) {
        let asked = (bytes as f64 * ASKED) as usize;
        if self.messages.len() > 1 {
            let text = self.words.text(bytes - asked);
            self.messages.push(json!({"role": "assistant", "content": text}));
        }
        let text = self.words.text(asked);
        self.messages.push(json!({"role": "user", "content": text}));
    }

    pub fn body(&self, model: &str) -> Vec<u8> {
        json!({"model": model, "messages": self.messages, "max_tokens": 64}).to_string().into_bytes()
    }
}

/// A body of `bytes` bytes with one short question.
pub fn small(model: &str, bytes: usize) -> Vec<u8> {
    let of = |text: &str| {
        let messages = json!([{"role": "user", "content": text}]);
        json!({"model": model, "messages": messages, "max_tokens": 64}).to_string().into_bytes()
    };
    let room = bytes.saturating_sub(of("").len());
    of(&"word ".repeat(room / 5 + 1)[..room])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_as_asked_and_a_session_only_grows() {
        assert_eq!(small("m", 785).len(), 785);
        let text = Words::new(3).text(5000);
        assert!((5000..5200).contains(&text.len()));
        assert_eq!(text, Words::new(3).text(5000));
        assert_ne!(text, Words::new(4).text(5000));
        assert!(text.contains("fn ") && !text.contains("{a}") && !text.contains("{{"), "{text}");
        let mut session = Session::new(1, "system");
        session.grow(2000);
        let before = session.messages.clone();
        session.grow(2000);
        assert_eq!(session.messages[..before.len()], before[..]);
        assert!(session.body("m").len() > 3500);
    }
}
