//! What becomes of a chat before it reaches the template: of `/v1/chat/completions`, and of `/v1/messages` once it
//! was turned into one. And of a plain prompt.
//!
//! Sources: vLLM 0.32 `entrypoints/openai/chat_completion/protocol.py` (validation, template arguments),
//! `renderers/chat_utils.py` (`_parse_chat_message_content`, `_postprocess_messages`), `renderers/hf.py` (developer
//! role), and Transformers 5 `utils/chat_template_utils.py` (continuing a last message).

use std::sync::Arc;

use minijinja::Value;

use super::json::{Json, Map};
use super::template::Template;
use super::{Options, Raw, Unsure};

/// A chat as the engine keeps it after validation.
#[derive(Clone, Debug, PartialEq)]
pub struct Chat {
    messages: Vec<Map>,
    pub tools: Option<Json>,
    /// Further variables of the template.
    arguments: Map,
    generation_prompt: bool,
    continue_last: bool,
    /// Whether the tokenizer puts its own tokens around the text.
    pub special: bool,
}

/// Fields that change a chat's prompt in ways that are not followed.
const UNFOLLOWED: [&str; 6] = [
    "chat_template",
    "documents",
    "truncate_prompt_tokens",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "prompt_embeds",
];

/// Names in `chat_template_kwargs` that mean something else to the engine than a variable.
const RESERVED: [&str; 15] = [
    "messages",
    "conversation",
    "tools",
    "documents",
    "chat_template",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "add_generation_prompt",
    "continue_final_message",
];

const BILLING_LINE: &str = "x-anthropic-billing-header";

impl Chat {
    /// Of a body of `/v1/chat/completions`.
    pub fn of_openai(body: &Map, options: &Options) -> Result<Self, Unsure> {
        for name in UNFOLLOWED {
            if body.given(name).is_some() {
                return Err(Unsure::of(format!("{name} is not followed")));
            }
        }
        let ids = body
            .given("kv_transfer_params")
            .and_then(Json::map)
            .and_then(|map| map.given("prompt_token_ids"));
        if ids.is_some() {
            return Err(Unsure::of("the request brings token ids of its own"));
        }
        let Some(Json::List(messages)) = body.get("messages") else {
            return Err(Unsure::of("there are no messages"));
        };
        if messages.is_empty() {
            return Err(Unsure::of("there are no messages"));
        }
        let excluded = options.exclude_tools && body.text("tool_choice") == Some("none");
        let tools = match body.given("tools") {
            Some(Json::List(tools)) if !excluded => {
                Some(Json::List(tools.iter().map(tool).collect::<Result<_, _>>()?))
            }
            Some(Json::List(_)) | None => None,
            Some(_) => return Err(Unsure::of("tools that are no list")),
        };
        let chat = Self {
            messages: messages.iter().map(message).collect::<Result<_, _>>()?,
            tools,
            arguments: arguments(body, options)?,
            generation_prompt: flag(body, "add_generation_prompt", true)?,
            continue_last: flag(body, "continue_final_message", false)?,
            special: flag(body, "add_special_tokens", false)?,
        };
        if chat.continue_last && chat.generation_prompt {
            return Err(Unsure::of("both a last message to continue and a new one are asked for"));
        }
        Ok(chat)
    }

    /// The chat by which the engine finds out what an effort does.
    pub fn greeting(effort: &str) -> Self {
        let mut arguments = Map::from([("reasoning_effort", Json::from(effort))]);
        arguments.set("enable_thinking", Json::Bool(effort != "none"));
        Self {
            messages: vec![Map::from([("role", "user".into()), ("content", "Hi".into())])],
            tools: None,
            arguments,
            generation_prompt: true,
            continue_last: false,
            special: false,
        }
    }

    /// The text that is tokenised.
    pub fn text(
        &self,
        template: &Template,
        specials: &[(&'static str, Value)],
        parts: bool,
    ) -> Result<String, Unsure> {
        let messages: Result<Vec<Map>, Unsure> = self.messages.iter().map(|m| in_form(m, parts)).collect();
        let mut messages = messages?;
        if !template.knows_developer && messages.iter().any(|m| m.text("role") == Some("developer")) {
            messages = without_developer(messages);
        }
        let last = if self.continue_last { Some(mark_last(&mut messages, template)?) } else { None };
        let mut variables: Vec<(Value, Value)> =
            specials.iter().map(|(name, token)| (Value::from(*name), token.clone())).collect();
        variables
            .extend(self.arguments.iter().map(|(name, v)| (Value::from(Arc::clone(name)), v.to_value())));
        let tools = self.tools.as_ref().map_or_else(|| Value::from(()), Json::to_value);
        variables.extend([
            (Value::from("messages"), messages.iter().map(Map::to_value).collect()),
            (Value::from("tools"), tools),
            (Value::from("documents"), Value::from(())),
            (Value::from("add_generation_prompt"), Value::from(self.generation_prompt)),
        ]);
        let text = template.render(Value::from_pairs(variables))?;
        match last {
            Some(last) => up_to_mark(text, &last),
            None => Ok(text),
        }
    }
}

fn flag(body: &Map, name: &str, default: bool) -> Result<bool, Unsure> {
    match body.get(name) {
        None => Ok(default),
        Some(Json::Bool(b)) => Ok(*b),
        Some(_) => Err(Unsure::of(format!("{name} is neither true nor false"))),
    }
}

/// The request's own arguments over the engine's defaults. Null and `auto` in what overrides count as not given.
pub fn arguments(body: &Map, options: &Options) -> Result<Map, Unsure> {
    let own = match body.given("chat_template_kwargs") {
        None => Map::default(),
        Some(Json::Map(map)) => map.clone(),
        Some(_) => return Err(Unsure::of("chat_template_kwargs are no object")),
    };
    if let Some(name) =
        RESERVED.iter().find(|name| own.get(name).is_some() || options.defaults.get(name).is_some())
    {
        return Err(Unsure::of(format!("chat_template_kwargs set {name}")));
    }
    let unset = |value: &Json| *value == Json::Null || value.text() == Some("auto");
    let mut over = own.clone();
    if let Some(effort) = body.given("reasoning_effort") {
        if !unset(effort) {
            over.set("reasoning_effort", effort.clone());
        }
        if own.get("enable_thinking").is_none() {
            over.set("enable_thinking", Json::Bool(effort.text() != Some("none")));
        }
    }
    // Without any default the engine merges nothing and keeps what is null.
    let mut all = options.defaults.clone();
    for (name, value) in over.iter().filter(|(_, value)| !unset(value)) {
        all.set(name, value.clone());
    }
    Ok(all)
}

/// A tool as the engine's model of one comes out again.
pub fn tool(tool: &Json) -> Result<Json, Unsure> {
    let unclear = || Unsure::of("a tool that is not of a known form");
    let tool = tool.map().ok_or_else(unclear)?;
    if !matches!(tool.text("type"), Some("function")) && tool.get("type").is_some() {
        return Err(unclear());
    }
    let function = tool.get("function").and_then(Json::map).ok_or_else(unclear)?;
    let text = |name: &str| match function.given(name) {
        None => Ok(Json::Null),
        Some(text @ Json::Text(_)) => Ok(text.clone()),
        Some(_) => Err(unclear()),
    };
    let parameters = match function.given("parameters") {
        None => Json::Null,
        Some(map @ Json::Map(_)) => map.clone(),
        Some(_) => return Err(unclear()),
    };
    let name = text("name")?;
    if name == Json::Null {
        return Err(unclear());
    }
    let mut out =
        Map::from([("name", name), ("description", text("description")?), ("parameters", parameters)]);
    for flag in ["strict", "defer_loading"] {
        let outer = if flag == "defer_loading" { tool.given(flag) } else { None };
        match function.given(flag).or(outer) {
            None => {}
            Some(Json::Bool(b)) => out.set(flag, Json::Bool(*b)),
            Some(_) => return Err(unclear()),
        }
    }
    let mut whole = Map::from([("type", Json::from("function")), ("function", Json::Map(out))]);
    if let Some(deferred) = tool.given("defer_loading") {
        whole.set("defer_loading", deferred.clone());
    }
    Ok(Json::Map(whole))
}

/// A message of known form. Contents stay as they came: their form depends on the template.
fn message(message: &Json) -> Result<Map, Unsure> {
    let unclear = |what: &str| Unsure::of(format!("a message whose {what} is not of a known form"));
    let message = message.map().ok_or_else(|| unclear("form"))?;
    let role = message.text("role").ok_or_else(|| unclear("role"))?;
    if !["system", "user", "assistant", "tool", "developer"].contains(&role) {
        return Err(Unsure::of(format!("a message of role `{role}`")));
    }
    for name in ["audio", "function_call", "refusal", "task", "tools"] {
        if message.given(name).is_some() {
            return Err(Unsure::of(format!("a message with {name}")));
        }
    }
    let content = match message.given("content") {
        None if role == "assistant" => Json::List(Vec::new()),
        None => return Err(unclear("content")),
        Some(Json::Text(text)) => Json::List(vec![part_of(text)]),
        Some(Json::List(parts)) => Json::List(parts.iter().map(part).collect::<Result<_, _>>()?),
        Some(_) => return Err(unclear("content")),
    };
    let content = if role == "system" { without_billing_line(content) } else { content };
    let mut out = Map::from([("role", role.into()), ("content", content)]);
    if role == "assistant" {
        if let Some(calls) = message.given("tool_calls") {
            let calls = calls.list().ok_or_else(|| unclear("tool_calls"))?;
            if !calls.is_empty() {
                out.set("tool_calls", Json::List(calls.iter().map(call).collect::<Result<_, _>>()?));
            }
        }
        let reasoning = message.given("reasoning").or_else(|| message.given("reasoning_content"));
        if let Some(reasoning) = reasoning {
            reasoning.text().ok_or_else(|| unclear("reasoning"))?;
            out.set("reasoning", reasoning.clone());
            out.set("reasoning_content", reasoning.clone());
        }
    } else if message.given("tool_calls").is_some() {
        return Err(unclear("tool_calls"));
    }
    if role == "tool"
        && let Some(id) = message.get("tool_call_id")
    {
        out.set("tool_call_id", id.clone());
    }
    if let Some(name @ Json::Text(_)) = message.get("name") {
        out.set("name", name.clone());
    }
    if role == "developer" {
        out.set("tools", Json::Null);
    }
    Ok(out)
}

fn part_of(text: &Arc<str>) -> Json {
    Json::Map(Map::from([("type", "text".into()), ("text", Json::Text(Arc::clone(text)))]))
}

fn part(part: &Json) -> Result<Json, Unsure> {
    let map = match part {
        Json::Text(text) => return Ok(part_of(text)),
        Json::Map(map) => map,
        _ => return Err(Unsure::of("a content part that is not of a known form")),
    };
    match (map.text("type"), map.get("text")) {
        (Some("text"), Some(Json::Text(text))) => {
            if let Some((name, _)) =
                map.iter().find(|(name, _)| !["type", "text", "cache_control"].contains(&&***name))
            {
                return Err(Unsure::of(format!("a text part with {name}")));
            }
            Ok(part_of(text))
        }
        (kind, _) => Err(Unsure::of(format!("a content part of type `{}`", kind.unwrap_or("none")))),
    }
}

/// Claude Code's line that differs with every request; gateways leave it in the first system part.
fn without_billing_line(content: Json) -> Json {
    let Json::List(parts) = content else { return content };
    let strip = |part: Json| -> Option<Json> {
        let text = part.map().and_then(|map| map.text("text")).unwrap_or_default();
        if !text.starts_with(BILLING_LINE) {
            return Some(part);
        }
        let rest = text.split_once('\n').map_or("", |(_, rest)| rest);
        (!rest.is_empty()).then(|| part_of(&rest.into()))
    };
    Json::List(parts.into_iter().filter_map(strip).collect())
}

/// A tool call in the order of its typed dictionary, its arguments as an object.
fn call(call: &Json) -> Result<Json, Unsure> {
    let unclear = || Unsure::of("a tool call that is not of a known form");
    let call = call.map().ok_or_else(unclear)?;
    if call.get("type").is_some_and(|kind| kind.text() != Some("function")) {
        return Err(unclear());
    }
    let function = call.get("function").and_then(Json::map).ok_or_else(unclear)?;
    if function.text("name").is_none() || call.text("id").is_none() {
        return Err(unclear());
    }
    let arguments = match function.get("arguments") {
        Some(Json::Text(text)) => parsed(text)?,
        Some(Json::Map(map)) => map.clone(),
        _ => return Err(unclear()),
    };
    let mut function = function.typed(&["arguments", "name"]);
    function.set("arguments", Json::Map(arguments));
    let mut call = call.typed(&["id", "function", "type"]);
    call.set("function", Json::Map(function));
    Ok(Json::Map(call))
}

/// Arguments that are no object become an empty one: a broken call in the history must not end the conversation.
fn parsed(text: &str) -> Result<Map, Unsure> {
    if text.is_empty() {
        return Ok(Map::default());
    }
    match Json::read(text.as_bytes()) {
        Ok(Json::Map(map)) => Ok(map),
        Ok(_) => Ok(Map::default()),
        // Python reads some texts that we do not: then what it read is not known.
        Err(_) if serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok() => {
            Err(Unsure::of("arguments of a tool call that Python reads otherwise"))
        }
        Err(_) if ["NaN", "Infinity", "\\u"].iter().any(|odd| text.contains(odd)) => {
            Err(Unsure::of("arguments of a tool call that only Python reads"))
        }
        Err(_) => Ok(Map::default()),
    }
}

/// Contents as a list of parts, or as one text.
fn in_form(message: &Map, parts: bool) -> Result<Map, Unsure> {
    let content = message.get("content").and_then(Json::list).unwrap_or_default();
    if parts && message.text("role") != Some("tool") {
        return Ok(message.clone());
    }
    let texts: Vec<&str> =
        content.iter().filter_map(|part| part.map().and_then(|map| map.text("text"))).collect();
    let mut message = message.clone();
    let one = match content {
        [part] => part.map().and_then(|map| map.get("text")).cloned(),
        _ => None,
    };
    message.set("content", one.unwrap_or_else(|| Json::Text(texts.join("\n").into())));
    Ok(message)
}

/// Developer messages as system messages, all of those merged into the first.
fn without_developer(messages: Vec<Map>) -> Vec<Map> {
    let renamed: Vec<Map> = messages
        .into_iter()
        .map(|mut message| {
            if message.text("role") == Some("developer") {
                message.set("role", "system".into());
                message.remove("tools");
            }
            message
        })
        .collect();
    let is_system = |message: &Map| message.text("role") == Some("system");
    let systems = renamed.iter().filter(|message| is_system(message)).count();
    if systems <= 1 && renamed.first().is_some_and(is_system) {
        return renamed;
    }
    let text = |message: &Map| -> String {
        match message.get("content") {
            Some(Json::List(parts)) => {
                let texts = parts.iter().filter_map(|part| part.map().and_then(|map| map.text("text")));
                texts.collect::<Vec<_>>().join("\n")
            }
            Some(Json::Text(text)) => text.to_string(),
            _ => String::new(),
        }
    };
    let all: Vec<String> =
        renamed.iter().filter(|m| is_system(m)).map(text).filter(|text| !text.is_empty()).collect();
    let merged = Map::from([("role", "system".into()), ("content", Json::Text(all.join("\n\n").into()))]);
    std::iter::once(merged).chain(renamed.into_iter().filter(|message| !is_system(message))).collect()
}

const MARK: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// Marks the end of the last message's text, and returns that text.
fn mark_last(messages: &mut [Map], template: &Template) -> Result<String, Unsure> {
    let nothing = || Unsure::of("there is no last text to continue");
    let last = messages.last_mut().ok_or_else(nothing)?;
    if !template.shows_content {
        return Err(nothing());
    }
    let marked = |text: &str| Json::Text(format!("{text}{MARK}").into());
    match last.get("content").cloned() {
        Some(Json::Text(text)) => {
            last.set("content", marked(&text));
            Ok(text.to_string())
        }
        Some(Json::List(mut parts)) => {
            let Some(Json::Map(part)) = parts.last_mut() else { return Err(nothing()) };
            let text = part.text("text").ok_or_else(nothing)?.to_owned();
            part.set("text", marked(&text));
            last.set("content", Json::List(parts));
            Ok(text)
        }
        _ => Err(nothing()),
    }
}

/// What Python's `str.strip` takes away.
fn python_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

fn up_to_mark(text: String, last: &str) -> Result<String, Unsure> {
    let at = text.rfind(MARK.trim_end()).filter(|_| text.contains(last.trim_matches(python_space)));
    let at = at.ok_or_else(|| Unsure::of("the template does not show the last message"))?;
    let before = &text[..at];
    let before = if text[at..].starts_with(MARK) { before } else { before.trim_end_matches(python_space) };
    Ok(before.to_owned())
}

/// Of a body of `/v1/completions`, or of `/tokenize` with a prompt.
pub fn completion(body: &Map) -> Result<Raw, Unsure> {
    for name in ["suffix", "prompt_embeds", "truncate_prompt_tokens"] {
        if body.given(name).is_some() {
            return Err(Unsure::of(format!("{name} is not followed")));
        }
    }
    let special = flag(body, "add_special_tokens", true)?;
    let several = || Unsure::of("several prompts in one request");
    let prompt = body.get("prompt").ok_or_else(|| Unsure::of("there is no prompt"))?;
    match prompt {
        Json::Text(text) => Ok(Raw::Text { text: text.to_string(), special }),
        Json::List(list) => match list.as_slice() {
            [Json::Text(text)] => Ok(Raw::Text { text: text.to_string(), special }),
            [Json::List(ids)] => ids_of(ids),
            [Json::Int(_), ..] => ids_of(list),
            _ => Err(several()),
        },
        _ => Err(Unsure::of("a prompt that is neither text nor ids")),
    }
}

fn ids_of(ids: &[Json]) -> Result<Raw, Unsure> {
    let id = |id: &Json| match id {
        Json::Int(n) => u32::try_from(*n).ok(),
        _ => None,
    };
    let ids: Option<Vec<u32>> = ids.iter().map(id).collect();
    ids.map(Raw::Ids).ok_or_else(|| Unsure::of("ids that are no whole numbers"))
}
