//! The shapes of requests, replies, streams and errors: OpenAI's and Anthropic's, as vLLM speaks them. Pure.

use serde_json::{Value, json};

use super::model::Word;

/// Which endpoint a request came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Face {
    Chat,
    Completion,
    Messages,
    Responses,
}

/// Words of a reply when nobody says how many.
const MAX_TOKENS: u64 = 16;

/// What a body asks for.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    pub model: Option<String>,
    pub prompt: Prompt,
    pub max_tokens: Option<usize>,
    pub to_the_limit: bool,
    pub stream: bool,
    pub include_usage: bool,
    pub logprobs: bool,
    /// `/v1/responses` takes its id from the body.
    pub request_id: Option<String>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// What an answer is about.
#[derive(Clone, Debug)]
pub struct About {
    pub face: Face,
    /// Id in the answer.
    pub id: String,
    pub model: String,
    pub created: u64,
    pub prompt_tokens: usize,
    pub cached_tokens: usize,
    pub include_usage: bool,
    pub logprobs: bool,
}

/// Text of a message's content: a string, or parts of which the text counts.
fn text(content: &Value) -> Result<String, String> {
    match content {
        Value::Null => Ok(String::new()),
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => parts.iter().map(part).collect(),
        _ => Err("content must be a string or a list of parts".into()),
    }
}

fn part(part: &Value) -> Result<String, String> {
    match part {
        Value::String(text) => Ok(text.clone()),
        Value::Object(fields) => match fields.get("text").and_then(Value::as_str) {
            Some(text) => Ok(text.to_owned()),
            // A tool's call or result, an image: its bytes stand for it.
            None => Ok(part.to_string()),
        },
        _ => Err("a part of content must be an object".into()),
    }
}

fn message(message: &Value) -> Result<(String, String), String> {
    let role = message["role"].as_str().unwrap_or("user").to_owned();
    let mut content = text(&message["content"])?;
    if let Some(calls) = message.get("tool_calls").filter(|calls| !calls.is_null()) {
        content.push_str(&calls.to_string());
    }
    Ok((role, content))
}

fn messages(body: &Value, field: &str) -> Result<Vec<(String, String)>, String> {
    let list = body[field].as_array().ok_or_else(|| format!("{field} must be a list"))?;
    if list.is_empty() {
        return Err(format!("{field} must not be empty"));
    }
    list.iter().map(message).collect()
}

/// The prompt of a body, through the chat template where there is one.
pub fn prompt(face: Face, body: &Value) -> Result<Prompt, String> {
    let tools = body.get("tools").filter(|tools| !tools.is_null()).map(Value::to_string);
    let mut turns = Vec::new();
    match face {
        Face::Completion => return completion_prompt(&body["prompt"]),
        Face::Chat => turns = messages(body, "messages")?,
        Face::Messages => {
            if let Some(system) = body.get("system") {
                turns.push(("system".to_owned(), text(system)?));
            }
            turns.extend(messages(body, "messages")?);
        }
        Face::Responses => {
            if let Some(system) = body["instructions"].as_str() {
                turns.push(("system".to_owned(), system.to_owned()));
            }
            match &body["input"] {
                Value::String(input) => turns.push(("user".to_owned(), input.clone())),
                _ => turns.extend(messages(body, "input")?),
            }
        }
    }
    Ok(Prompt::Text(super::model::render(&turns, tools.as_deref())))
}

fn completion_prompt(prompt: &Value) -> Result<Prompt, String> {
    let wrong = || "prompt must be a string or a list of token ids".to_owned();
    match prompt {
        Value::String(text) => Ok(Prompt::Text(text.clone())),
        Value::Array(list) if list.len() == 1 && list[0].is_string() => {
            Ok(Prompt::Text(list[0].as_str().unwrap_or_default().to_owned()))
        }
        Value::Array(list) if !list.is_empty() => {
            let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(wrong);
            Ok(Prompt::Tokens(list.iter().map(id).collect::<Result<_, _>>()?))
        }
        _ => Err(wrong()),
    }
}

impl Wanted {
    pub fn read(face: Face, body: &Value) -> Result<Self, String> {
        if !body.is_object() {
            return Err("the body must be an object".into());
        }
        let number = |name: &str| body.get(name).and_then(Value::as_u64);
        let max_tokens = match face {
            Face::Chat => number("max_completion_tokens").or(number("max_tokens")),
            Face::Completion => Some(number("max_tokens").unwrap_or(MAX_TOKENS)),
            Face::Messages => number("max_tokens"),
            Face::Responses => number("max_output_tokens"),
        };
        let flag = |value: &Value| value.as_bool().unwrap_or(false);
        let logprobs = &body["logprobs"];
        Ok(Self {
            model: body["model"].as_str().map(str::to_owned),
            prompt: prompt(face, body)?,
            max_tokens: max_tokens.map(|n| usize::try_from(n).unwrap_or(usize::MAX)),
            to_the_limit: flag(&body["ignore_eos"]),
            stream: flag(&body["stream"]),
            include_usage: flag(&body["stream_options"]["include_usage"]),
            logprobs: face == Face::Completion && logprobs.as_u64().is_some(),
            request_id: body["request_id"].as_str().map(str::to_owned),
        })
    }
}

/// An error in the endpoint's own shape.
pub fn error(face: Face, status: u16, message: &str) -> Value {
    let missing = status == 404;
    if face == Face::Messages {
        let kind = if missing { "not_found_error" } else { "invalid_request_error" };
        return json!({"type": "error", "error": {"type": kind, "message": message}});
    }
    let kind = if missing { "NotFoundError" } else { "BadRequestError" };
    json!({"error": {"message": message, "type": kind, "param": null, "code": status}})
}

/// How a reply ended, in each face's words.
fn reason(face: Face, natural: bool) -> &'static str {
    match (face, natural) {
        (Face::Messages, true) => "end_turn",
        (Face::Messages, false) => "max_tokens",
        (Face::Responses, true) => "completed",
        (Face::Responses, false) => "incomplete",
        (_, true) => "stop",
        (_, false) => "length",
    }
}

fn sse(event: Option<&str>, data: &Value) -> String {
    match event {
        Some(event) => format!("event: {event}\ndata: {data}\n\n"),
        None => format!("data: {data}\n\n"),
    }
}

/// An event that names itself.
fn named(data: &Value) -> String {
    sse(data["type"].as_str(), data)
}

impl About {
    fn usage(&self, words: usize) -> Value {
        let (prompt, cached) = (self.prompt_tokens, self.cached_tokens);
        match self.face {
            Face::Messages => json!({
                "input_tokens": prompt - cached, "output_tokens": words, "cache_read_input_tokens": cached,
            }),
            Face::Responses => json!({
                "input_tokens": prompt, "input_tokens_details": {"cached_tokens": cached},
                "output_tokens": words, "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + words,
            }),
            Face::Chat | Face::Completion => json!({
                "prompt_tokens": prompt, "completion_tokens": words, "total_tokens": prompt + words,
                "prompt_tokens_details": {"cached_tokens": cached},
            }),
        }
    }

    fn chunk(&self, choices: Value) -> Value {
        let object = if self.face == Face::Chat { "chat.completion.chunk" } else { "text_completion" };
        json!({"id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices})
    }

    fn message(&self, content: Value, natural: Option<bool>, words: usize) -> Value {
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content,
            "stop_reason": natural.map(|n| reason(Face::Messages, n)), "stop_sequence": null,
            "usage": self.usage(words),
        })
    }

    fn response(&self, text: Option<&str>, natural: bool, words: usize) -> Value {
        let output: Vec<Value> = text.map(|text| self.item("completed", text)).into_iter().collect();
        let status = if text.is_none() { "in_progress" } else { reason(Face::Responses, natural) };
        let usage = text.map(|_| self.usage(words));
        json!({
            "id": self.id, "object": "response", "created_at": self.created, "model": self.model,
            "status": status, "output": output, "usage": usage,
        })
    }

    fn item(&self, status: &str, text: &str) -> Value {
        let content = if status == "completed" { vec![Self::part(text)] } else { Vec::new() };
        json!({
            "id": format!("msg_{}", self.id), "type": "message", "role": "assistant", "status": status,
            "content": content,
        })
    }

    fn part(text: &str) -> Value {
        json!({"type": "output_text", "text": text, "annotations": []})
    }

    fn logprobs(words: &[Word]) -> Value {
        let mut offset = 0;
        let mut offsets = Vec::new();
        for word in words {
            offsets.push(offset);
            offset += word.text.len();
        }
        let tokens: Vec<&str> = words.iter().map(|w| w.text).collect();
        let sure: Vec<f64> = words.iter().map(|w| w.logprob).collect();
        let top: Vec<Value> = words.iter().map(|w| json!({w.text: w.logprob})).collect();
        json!({"tokens": tokens, "token_logprobs": sure, "top_logprobs": top, "text_offset": offsets})
    }

    /// The whole answer.
    pub fn whole(&self, words: &[Word], natural: bool) -> Value {
        let text: String = words.iter().map(|w| w.text).collect();
        let end = reason(self.face, natural);
        match self.face {
            Face::Messages => {
                self.message(json!([{"type": "text", "text": text}]), Some(natural), words.len())
            }
            Face::Responses => self.response(Some(&text), natural, words.len()),
            Face::Chat => json!({
                "id": self.id, "object": "chat.completion", "created": self.created, "model": self.model,
                "choices": [{
                    "index": 0, "message": {"role": "assistant", "content": text, "tool_calls": []},
                    "logprobs": null, "finish_reason": end,
                }],
                "usage": self.usage(words.len()),
            }),
            Face::Completion => json!({
                "id": self.id, "object": "text_completion", "created": self.created, "model": self.model,
                "choices": [{
                    "index": 0, "text": text, "finish_reason": end,
                    "logprobs": if self.logprobs { Self::logprobs(words) } else { Value::Null },
                }],
                "usage": self.usage(words.len()),
            }),
        }
    }

    /// Begin of a stream.
    pub fn begin(&self) -> String {
        match self.face {
            Face::Chat => {
                let delta = json!({"role": "assistant", "content": ""});
                sse(None, &self.chunk(json!([{"index": 0, "delta": delta, "finish_reason": null}])))
            }
            Face::Completion => String::new(),
            Face::Messages => {
                let message = self.message(json!([]), None, 0);
                let block = json!({"type": "text", "text": ""});
                named(&json!({"type": "message_start", "message": message}))
                    + &named(&json!({"type": "content_block_start", "index": 0, "content_block": block}))
            }
            Face::Responses => {
                let (response, item) = (self.response(None, false, 0), self.item("in_progress", ""));
                named(&json!({"type": "response.created", "response": response}))
                    + &named(&json!({"type": "response.output_item.added", "output_index": 0, "item": item}))
                    + &named(&json!({
                        "type": "response.content_part.added", "item_id": format!("msg_{}", self.id),
                        "output_index": 0, "content_index": 0, "part": Self::part(""),
                    }))
            }
        }
    }

    /// One word of a stream.
    pub fn word(&self, word: &Word) -> String {
        match self.face {
            Face::Chat => {
                let delta = json!({"content": word.text});
                sse(None, &self.chunk(json!([{"index": 0, "delta": delta, "finish_reason": null}])))
            }
            Face::Completion => {
                let logprobs =
                    if self.logprobs { Self::logprobs(std::slice::from_ref(word)) } else { Value::Null };
                let choice =
                    json!({"index": 0, "text": word.text, "logprobs": logprobs, "finish_reason": null});
                sse(None, &self.chunk(json!([choice])))
            }
            Face::Messages => {
                let delta = json!({"type": "text_delta", "text": word.text});
                named(&json!({"type": "content_block_delta", "index": 0, "delta": delta}))
            }
            Face::Responses => named(&json!({
                "type": "response.output_text.delta", "item_id": format!("msg_{}", self.id),
                "output_index": 0, "content_index": 0, "delta": word.text,
            })),
        }
    }

    /// End of a stream.
    pub fn end(&self, words: &[Word], natural: bool) -> String {
        let end = reason(self.face, natural);
        match self.face {
            Face::Chat | Face::Completion => {
                let choice = if self.face == Face::Chat {
                    json!({"index": 0, "delta": {}, "finish_reason": end})
                } else {
                    json!({"index": 0, "text": "", "logprobs": null, "finish_reason": end})
                };
                let mut out = sse(None, &self.chunk(json!([choice])));
                if self.include_usage {
                    let mut chunk = self.chunk(json!([]));
                    chunk["usage"] = self.usage(words.len());
                    out += &sse(None, &chunk);
                }
                out + "data: [DONE]\n\n"
            }
            Face::Messages => {
                let delta = json!({"stop_reason": end, "stop_sequence": null});
                let usage = self.usage(words.len());
                named(&json!({"type": "content_block_stop", "index": 0}))
                    + &named(&json!({"type": "message_delta", "delta": delta, "usage": usage}))
                    + &named(&json!({"type": "message_stop"}))
            }
            Face::Responses => {
                let text: String = words.iter().map(|w| w.text).collect();
                let (item, id) = (self.item("completed", &text), format!("msg_{}", self.id));
                named(&json!({
                    "type": "response.output_text.done", "item_id": id, "output_index": 0, "content_index": 0,
                    "text": text,
                })) + &named(&json!({
                    "type": "response.content_part.done", "item_id": id, "output_index": 0, "content_index": 0,
                    "part": Self::part(&text),
                })) + &named(&json!({"type": "response.output_item.done", "output_index": 0, "item": item}))
                    + &named(&json!({
                        "type": "response.completed",
                        "response": self.response(Some(&text), natural, words.len()),
                    }))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_of_all_faces_that_say_the_same_are_the_same() {
        let chat = json!({"messages": [
            {"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]},
        ]});
        let anthropic = json!({"system": [{"type": "text", "text": "s"}], "messages": [{"role": "user", "content": "u"}]});
        let responses = json!({"instructions": "s", "input": "u"});
        let same = prompt(Face::Chat, &chat).unwrap();
        assert_eq!(prompt(Face::Messages, &anthropic), Ok(same.clone()));
        assert_eq!(prompt(Face::Responses, &responses), Ok(same));
        assert_eq!(prompt(Face::Completion, &json!({"prompt": [1, 2]})), Ok(Prompt::Tokens(vec![1, 2])));
    }

    #[test]
    fn bodies_that_ask_for_nothing_are_errors() {
        for (face, body) in [
            (Face::Chat, json!({"messages": []})),
            (Face::Chat, json!({"messages": [{"content": 7}]})),
            (Face::Completion, json!({"prompt": [-1]})),
            (Face::Completion, json!({})),
            (Face::Responses, json!({"input": 3})),
            (Face::Messages, json!([])),
        ] {
            assert!(Wanted::read(face, &body).is_err(), "{body}");
        }
    }
}
