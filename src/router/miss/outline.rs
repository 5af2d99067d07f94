//! The outline of a prompt: its parts in the order in which templates show them, as hashes and lengths. No text is kept.
//!
//! Two turns of one conversation are compared part by part, so each part is hashed on its own, in ways that tell apart
//! what usually differs: with words that hold a digit masked (times, counters, ids), tools whatever their order, what
//! an assistant said without what it thought, and a system prompt line by line.

use std::fmt::Write;

use super::super::ask::Endpoint;
use super::super::prefix::hash;
use super::super::tokens::{Json, Map};

/// Most parts of an outline; what comes behind is not compared. A conversation of 2,000 turns is longer than any model's
/// window.
const PARTS_MAX: usize = 2048;

/// Most lines of a system prompt that are told apart.
const LINES_MAX: usize = 1024;

/// Fields beside the text that change what the template makes of it, or whose cache it is.
const OPTIONS: [&str; 9] = [
    "model",
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning",
    "reasoning_effort",
    "thinking",
    "add_generation_prompt",
];

/// Fields and kinds of content that hold what an assistant thought.
const THOUGHTS: [&str; 5] =
    ["reasoning", "reasoning_content", "thinking", "redacted_thinking", "reasoning_details"];

/// What a part is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Model, template options, salt.
    Options,
    Tools,
    System,
    Turn(Role),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    User,
    Assistant,
    Tool,
    /// Reasoning that stands as an item of its own.
    Thought,
    Other,
}

/// One part of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub what: What,
    /// Canonical bytes.
    pub bytes: u64,
    pub exact: u64,
    /// With every word that holds a digit taken for the same word.
    pub masked: u64,
    /// Of tools: whatever their order. Of an assistant's turn: without its reasoning. Else as `exact`.
    pub bare: u64,
    /// Of a system prompt alone.
    pub lines: Box<[Line]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line {
    pub exact: u32,
    pub bytes: u32,
}

/// A prompt's parts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outline {
    pub parts: Vec<Part>,
    pub bytes: u64,
}

impl Outline {
    /// Of a request's body. None: it is no prompt of messages, or there is more to it than the body says.
    pub fn read(endpoint: Endpoint, body: &[u8]) -> Option<Self> {
        let Json::Map(body) = Json::read(body).ok()? else { return None };
        if body.given("previous_response_id").is_some() {
            return None;
        }
        let messages = endpoint == Endpoint::Messages;
        let turns = match endpoint {
            Endpoint::Chat | Endpoint::Messages => body.get("messages")?,
            Endpoint::Responses => body.get("input")?,
            _ => return None,
        };
        let mut making = Making { outline: Self::default(), text: String::new(), strips: messages };
        making.options(&body);
        if let Some(Json::List(tools)) = body.given("tools") {
            making.tools(tools);
        }
        for name in ["system", "instructions"] {
            if let Some(system) = body.given(name) {
                making.part(What::System, system, false);
            }
        }
        match turns {
            Json::List(turns) => turns.iter().for_each(|turn| making.turn(turn)),
            text => making.part(What::Turn(Role::User), text, false),
        }
        Some(making.outline)
    }

    /// The first turn of a person: what a conversation is known by.
    pub fn opening(&self) -> Option<&Part> {
        self.parts.iter().find(|part| part.what == What::Turn(Role::User))
    }
}

struct Making {
    outline: Outline,
    /// Reused from part to part.
    text: String,
    /// Whether the engine takes the client's billing line out.
    strips: bool,
}

impl Making {
    fn options(&mut self, body: &Map) {
        self.text.clear();
        for name in OPTIONS {
            if let Some(value) = body.given(name) {
                let _ = write!(self.text, "{name}:");
                show(value, &mut self.text, Shape::default());
            }
        }
        let exact = hash(self.text.as_bytes());
        self.push(Part {
            what: What::Options,
            bytes: 0,
            exact,
            masked: exact,
            bare: exact,
            lines: Box::default(),
        });
    }

    fn tools(&mut self, tools: &[Json]) {
        let mut each = 0_u64;
        let mut all = String::new();
        for tool in tools {
            self.text.clear();
            show(tool, &mut self.text, Shape::default());
            each = each.wrapping_add(hash(self.text.as_bytes()));
            all.push_str(&self.text);
        }
        self.text = all;
        let part = self.of_text(What::Tools);
        self.push(Part { bare: each, ..part });
    }

    fn turn(&mut self, turn: &Json) {
        let map = turn.map();
        let kind = map.and_then(|map| map.text("type")).unwrap_or_default();
        let role = map.and_then(|map| map.text("role")).unwrap_or_default();
        // A client's instructions may come as the first message.
        let talking = self.outline.parts.iter().any(|part| matches!(part.what, What::Turn(_)));
        let what = match (role, kind) {
            ("system" | "developer", _) if !talking => What::System,
            ("user", _) => What::Turn(Role::User),
            ("assistant", _) | (_, "function_call") => What::Turn(Role::Assistant),
            ("tool", _) | (_, "function_call_output") => What::Turn(Role::Tool),
            (_, "reasoning") => What::Turn(Role::Thought),
            _ => What::Turn(Role::Other),
        };
        self.part(what, turn, what == What::Turn(Role::Assistant));
    }

    fn part(&mut self, what: What, value: &Json, thinks: bool) {
        // A bare text of a conversation is what a list of one text is.
        let shape =
            Shape { content: !matches!(value, Json::Map(_)), strips: self.strips, ..Shape::default() };
        let shown = |text: &mut String, without_thoughts| {
            text.clear();
            show(value, text, Shape { without_thoughts, ..shape });
        };
        let bare = thinks.then(|| {
            shown(&mut self.text, true);
            hash(self.text.as_bytes())
        });
        shown(&mut self.text, false);
        let part = self.of_text(what);
        self.push(Part { bare: bare.unwrap_or(part.exact), ..part });
    }

    fn of_text(&self, what: What) -> Part {
        let (text, exact) = (self.text.as_str(), hash(self.text.as_bytes()));
        let line = |line: &str| Line {
            exact: hash(line.as_bytes()) as u32,
            bytes: u32::try_from(line.len()).unwrap_or(u32::MAX),
        };
        let lines = match what {
            What::System => text.split_inclusive('\n').take(LINES_MAX).map(line).collect(),
            _ => Box::default(),
        };
        Part { what, bytes: text.len() as u64, exact, masked: masked(text), bare: exact, lines }
    }

    fn push(&mut self, part: Part) {
        if self.outline.parts.len() < PARTS_MAX {
            self.outline.bytes += part.bytes;
            self.outline.parts.push(part);
        }
    }
}

/// The hash of a text in which every word that holds a digit is the same word.
fn masked(text: &str) -> u64 {
    let mut plain = String::with_capacity(text.len());
    for word in text.split_inclusive(|c: char| !c.is_alphanumeric()) {
        let body = word.trim_end_matches(|c: char| !c.is_alphanumeric());
        if body.bytes().any(|byte| byte.is_ascii_digit()) {
            plain.push('0');
            plain.push_str(&word[body.len()..]);
        } else {
            plain.push_str(word);
        }
    }
    hash(plain.as_bytes())
}

/// How a value is spelled.
#[derive(Clone, Copy, Default)]
struct Shape {
    /// A bare text here means a list of one text.
    content: bool,
    without_thoughts: bool,
    strips: bool,
}

const BILLING_LINE: &str = "x-anthropic-billing-header:";

/// Spells a value: texts as they are, so that lines stay lines; marks that never reach the model left out.
fn show(value: &Json, out: &mut String, shape: Shape) {
    let inner = Shape { content: false, ..shape };
    match value {
        Json::Null => out.push_str("null"),
        Json::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
        Json::Int(value) => drop(write!(out, "{value}")),
        Json::Float(value) => drop(write!(out, "{value}")),
        Json::Text(text) if shape.strips && text.starts_with(BILLING_LINE) => {}
        Json::Text(text) if shape.content => drop(write!(out, "[{{type:text,text:{text},}},]")),
        Json::Text(text) => out.push_str(text),
        Json::List(list) => {
            out.push('[');
            for value in list {
                if !(shape.without_thoughts && is_thought(value)) {
                    show(value, out, inner);
                    out.push(',');
                }
            }
            out.push(']');
        }
        // In whichever order its two fields stand.
        Json::Map(map) if map.text("type") == Some("text") && map.text("text").is_some() => {
            out.push_str("{type:text,text:");
            show(map.get("text").unwrap_or(&Json::Null), out, inner);
            out.push_str(",}");
        }
        Json::Map(map) => {
            out.push('{');
            for (name, value) in map.iter() {
                if name.as_ref() == "cache_control"
                    || (shape.without_thoughts && THOUGHTS.contains(&name.as_ref()))
                {
                    continue;
                }
                let _ = write!(out, "{name}:");
                show(value, out, Shape { content: name.as_ref() == "content", ..inner });
                out.push(',');
            }
            out.push('}');
        }
    }
}

/// A piece of content that holds reasoning.
fn is_thought(value: &Json) -> bool {
    value.map().and_then(|map| map.text("type")).is_some_and(|kind| THOUGHTS.contains(&kind))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn chat(body: &serde_json::Value) -> Outline {
        Outline::read(Endpoint::Chat, body.to_string().as_bytes()).unwrap()
    }

    fn kinds(outline: &Outline) -> Vec<What> {
        outline.parts.iter().map(|part| part.what).collect()
    }

    #[test]
    fn parts_stand_in_the_order_of_the_template() {
        let outline = chat(&json!({"messages": [
            {"role": "system", "content": "be kind\nbe short"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "ho", "reasoning": "hm"},
            {"role": "tool", "content": "42"},
            {"role": "system", "content": "late"},
        ], "tools": [{"name": "a"}], "model": "m"}));
        use Role::{Assistant, Other, Tool, User};
        let turn = What::Turn;
        let wanted =
            [What::Options, What::Tools, What::System, turn(User), turn(Assistant), turn(Tool), turn(Other)];
        assert_eq!(kinds(&outline), wanted);
        assert_eq!(outline.parts[2].lines.len(), 2);
        assert_eq!(
            outline.parts[2].lines.iter().map(|line| u64::from(line.bytes)).sum::<u64>(),
            outline.parts[2].bytes
        );
        assert_eq!(outline.bytes, outline.parts.iter().map(|part| part.bytes).sum::<u64>());
        assert_eq!(outline.opening().unwrap().what, turn(User));
    }

    #[test]
    fn spelling_that_does_not_reach_the_model_is_the_same_part() {
        let of =
            |content: serde_json::Value| chat(&json!({"messages": [{"role": "user", "content": content}]}));
        let plain = of(json!("hi"));
        assert_eq!(of(json!([{"type": "text", "text": "hi"}])), plain);
        assert_eq!(
            of(json!([{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}])),
            plain
        );
        assert_ne!(of(json!("ho")), plain);
    }

    #[test]
    fn tools_in_another_order_differ_and_are_the_same_tools() {
        let of = |names: &[&str]| {
            let tools: Vec<_> = names.iter().map(|name| json!({"name": name})).collect();
            chat(&json!({"tools": tools, "messages": []})).parts[1].clone()
        };
        let (one, two) = (of(&["a", "b"]), of(&["b", "a"]));
        assert_ne!(one.exact, two.exact);
        assert_eq!(one.bare, two.bare);
        assert_ne!(one.bare, of(&["a", "c"]).bare);
    }

    #[test]
    fn a_turn_is_known_without_what_was_thought_in_it() {
        let of = |turn: serde_json::Value| chat(&json!({"messages": [turn]})).parts[1].clone();
        let bare = of(json!({"role": "assistant", "content": [{"type": "text", "text": "ho"}]}));
        for thinking in [
            json!({"role": "assistant", "content": "ho", "reasoning_content": "hm"}),
            json!({"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "ho"}]}),
        ] {
            let full = of(thinking);
            assert_ne!(full.exact, bare.exact);
            assert_eq!(full.bare, bare.exact);
        }
    }

    #[test]
    fn numbers_times_and_ids_are_masked_and_words_are_not() {
        assert_eq!(masked("at 10:22, id 7f3a-b2; go"), masked("at 9:05, id 1b-c9d0; go"));
        assert_ne!(masked("at 10:22; go"), masked("at 10:22; stop"));
        assert_ne!(masked("a b"), masked("a c"));
    }

    #[test]
    fn the_routes_of_other_clients_are_read_too() {
        let messages = json!({"system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1"},
            {"type": "text", "text": "be kind"}], "messages": [{"role": "user", "content": "hi"}]});
        let of = |body: &serde_json::Value| {
            Outline::read(Endpoint::Messages, body.to_string().as_bytes()).unwrap()
        };
        let mut other = messages.clone();
        other["system"][0]["text"] = "x-anthropic-billing-header: cch=2".into();
        assert_eq!(of(&messages), of(&other));
        let responses = json!({"instructions": "be kind", "input": [{"type": "reasoning", "summary": []},
            {"type": "function_call", "name": "f"}, {"type": "function_call_output", "output": "1"}]});
        let read = |body: &serde_json::Value| Outline::read(Endpoint::Responses, body.to_string().as_bytes());
        let turn = What::Turn;
        let wanted =
            [What::Options, What::System, turn(Role::Thought), turn(Role::Assistant), turn(Role::Tool)];
        assert_eq!(kinds(&read(&responses).unwrap()), wanted);
        let asked = read(&json!({"input": "hi"})).unwrap();
        assert_eq!(kinds(&asked), [What::Options, turn(Role::User)]);
        assert_eq!(read(&json!({"input": "hi", "previous_response_id": "resp_1"})), None);
        assert_eq!(Outline::read(Endpoint::Completions, br#"{"prompt":"x"}"#), None);
        assert_eq!(Outline::read(Endpoint::Chat, b"[1"), None);
    }

    #[test]
    fn there_is_a_bound() {
        let turns: Vec<_> = (0..3000).map(|n| json!({"role": "user", "content": n.to_string()})).collect();
        let system = json!({"role": "system", "content": "a line\n".repeat(5000)});
        let messages = [vec![system], turns].concat();
        let outline = chat(&json!({"messages": messages}));
        assert_eq!(outline.parts.len(), PARTS_MAX);
        assert_eq!(outline.parts[1].lines.len(), LINES_MAX);
    }
}
