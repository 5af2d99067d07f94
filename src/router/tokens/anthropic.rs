//! `/v1/messages` as a chat. Source: vLLM 0.32 `entrypoints/anthropic/{protocol,serving}.py`.

use super::chat::Chat;
use super::json::{Json, Map};
use super::{Options, Unsure};

const BILLING_LINE: &str = "x-anthropic-billing-header";

const EFFORTS: [&str; 5] = ["low", "medium", "high", "xhigh", "max"];

/// The effort that stands for no thinking: `none`, unless the template refuses it or takes it for another one.
pub fn calm(render: impl Fn(&str) -> Option<String>) -> &'static str {
    let Some(none) = render("none") else { return "low" };
    let same = EFFORTS.iter().any(|effort| render(effort).as_ref() == Some(&none));
    if same { "low" } else { "none" }
}

/// The chat that the engine makes of `body`.
pub fn chat(body: &Map, system_first: bool, calm: &str, options: &Options) -> Result<Chat, Unsure> {
    Chat::of_openai(&openai(body, system_first, calm)?, options)
}

/// The same as a body of `/v1/chat/completions`.
pub fn openai(body: &Map, system_first: bool, calm: &str) -> Result<Map, Unsure> {
    let Some(Json::List(said)) = body.get("messages") else {
        return Err(Unsure::of("there are no messages"));
    };
    let mut messages = Vec::new();
    if let Some(system) = system(body, said, system_first)? {
        messages.push(text_message("system", &system));
    }
    for message in said {
        convert(message, system_first, &mut messages)?;
    }
    let mut out = Map::from([("messages", Json::List(messages))]);
    for name in ["model", "chat_template_kwargs", "cache_salt", "kv_transfer_params"] {
        if let Some(value) = body.given(name) {
            out.set(name, value.clone());
        }
    }
    if let Some(effort) = body.given("output_config").and_then(Json::map).and_then(|map| map.given("effort"))
    {
        out.set("reasoning_effort", effort.clone());
    }
    if let Some(thinking) = body.given("thinking").and_then(Json::map)
        && thinking.text("type") == Some("disabled")
    {
        out.set("reasoning_effort", calm.into());
    }
    let choice = body.given("tool_choice").and_then(Json::map).and_then(|map| map.text("type"));
    if let Some(Json::List(tools)) = body.given("tools") {
        out.set("tools", Json::List(tools.iter().map(tool).collect::<Result<_, _>>()?));
        // Only whether it is `none` matters to a prompt.
        out.set("tool_choice", if choice == Some("none") { "none" } else { "auto" }.into());
    }
    Ok(out)
}

fn text_message(role: &str, text: &str) -> Json {
    Json::Map(Map::from([("role", role.into()), ("content", text.into())]))
}

/// The system prompt, with later system messages where the template wants them first.
fn system(body: &Map, said: &[Json], system_first: bool) -> Result<Option<String>, Unsure> {
    let mut parts = Vec::new();
    match body.given("system") {
        None => {}
        Some(Json::Text(text)) if text.is_empty() => {}
        Some(Json::Text(text)) => parts.push(text.to_string()),
        Some(Json::List(blocks)) => parts.extend(system_texts(blocks)?),
        Some(_) => return Err(Unsure::of("a system prompt that is neither text nor blocks")),
    }
    let given = !parts.is_empty();
    if system_first {
        for message in said.iter().filter_map(Json::map).filter(|m| m.text("role") == Some("system")) {
            parts.extend(system_text(message)?);
        }
    }
    Ok((given || !parts.is_empty()).then(|| parts.concat()))
}

/// Texts of system blocks but for Claude Code's line, which differs with every request.
fn system_texts(blocks: &[Json]) -> Result<Vec<String>, Unsure> {
    let mut texts = Vec::new();
    for block in blocks {
        let block = block.map().ok_or_else(|| Unsure::of("a system block that is no object"))?;
        match (block.text("type"), block.given("text")) {
            (Some("text"), Some(Json::Text(text))) => {
                if !text.is_empty() && !text.starts_with(BILLING_LINE) {
                    texts.push(text.to_string());
                }
            }
            (Some("text"), None) => {}
            (kind, _) => {
                return Err(Unsure::of(format!("a system block of type `{}`", kind.unwrap_or("none"))));
            }
        }
    }
    Ok(texts)
}

fn system_text(message: &Map) -> Result<Option<String>, Unsure> {
    match message.get("content") {
        Some(Json::Text(text)) if text.is_empty() || text.starts_with(BILLING_LINE) => Ok(None),
        Some(Json::Text(text)) => Ok(Some(text.to_string())),
        Some(Json::List(blocks)) => {
            let texts = system_texts(blocks)?;
            Ok((!texts.is_empty()).then(|| texts.concat()))
        }
        _ => Err(Unsure::of("a system message that is neither text nor blocks")),
    }
}

fn convert(message: &Json, system_first: bool, out: &mut Vec<Json>) -> Result<(), Unsure> {
    let message = message.map().ok_or_else(|| Unsure::of("a message that is no object"))?;
    let role = message.text("role").unwrap_or_default();
    if role == "system" {
        if let Some(text) = system_text(message)?.filter(|_| !system_first) {
            out.push(text_message("system", &text));
        }
        return Ok(());
    }
    if !["user", "assistant"].contains(&role) {
        return Err(Unsure::of(format!("a message of role `{role}`")));
    }
    let mut converted = Map::from([("role", role.into())]);
    match message.get("content") {
        Some(text @ Json::Text(_)) => converted.set("content", text.clone()),
        Some(Json::List(blocks)) => self::blocks(blocks, role, &mut converted, out)?,
        _ => return Err(Unsure::of("a message that is neither text nor blocks")),
    }
    if role == "assistant" || converted.get("content").is_some() {
        out.push(Json::Map(converted));
    }
    Ok(())
}

fn blocks(blocks: &[Json], role: &str, message: &mut Map, out: &mut Vec<Json>) -> Result<(), Unsure> {
    let (mut parts, mut calls, mut reasoning) = (Vec::new(), Vec::new(), None::<String>);
    for block in blocks {
        let block = block.map().ok_or_else(|| Unsure::of("a block that is no object"))?;
        let text = |name: &str| match block.given(name) {
            None => Ok(None),
            Some(Json::Text(text)) => Ok(Some(text)),
            Some(_) => Err(Unsure::of(format!("a block whose {name} is no text"))),
        };
        match block.text("type").unwrap_or("none") {
            "text" => {
                if let Some(said) = text("text")?.filter(|said| !said.is_empty()) {
                    parts.push(Map::from([("type", "text".into()), ("text", Json::Text(said.clone()))]));
                }
            }
            "thinking" => {
                if let Some(thought) = text("thinking")? {
                    reasoning.get_or_insert_default().push_str(thought);
                }
            }
            "redacted_thinking" => {}
            "tool_use" => calls.push(call(block)?),
            "tool_result" if role == "user" => out.push(result(block)?),
            kind => return Err(Unsure::of(format!("a block of type `{kind}`"))),
        }
    }
    if let Some(reasoning) = reasoning {
        message.set("reasoning", Json::Text(reasoning.into()));
    }
    if !calls.is_empty() {
        message.set("tool_calls", Json::List(calls));
    }
    match parts.as_slice() {
        [] => {}
        [only] => message.set("content", only.get("text").cloned().unwrap_or(Json::Null)),
        _ => message.set("content", Json::List(parts.into_iter().map(Json::Map).collect())),
    }
    Ok(())
}

/// A call of a tool. Its input travels as an object: the engine writes it as text and reads it back.
fn call(block: &Map) -> Result<Json, Unsure> {
    let id = block.text("id").filter(|id| !id.is_empty());
    let id = id.ok_or_else(|| Unsure::of("a tool call without an id gets a new one each time"))?;
    let name = block.text("name").unwrap_or_default();
    let input = match block.given("input") {
        None => Json::Map(Map::default()),
        Some(input @ Json::Map(_)) => input.clone(),
        Some(_) => return Err(Unsure::of("a tool call whose input is no object")),
    };
    let function = Map::from([("name", name.into()), ("arguments", input)]);
    Ok(Json::Map(Map::from([
        ("id", id.into()),
        ("type", "function".into()),
        ("function", Json::Map(function)),
    ])))
}

fn result(block: &Map) -> Result<Json, Unsure> {
    let text = match block.given("content") {
        None => String::new(),
        Some(Json::Text(text)) => text.to_string(),
        Some(Json::List(items)) => {
            let mut texts = Vec::new();
            for item in items {
                let item = item.map().ok_or_else(|| Unsure::of("a tool result that is no object"))?;
                match (item.text("type"), item.get("text")) {
                    (Some("text"), Some(Json::Text(text))) => texts.push(text.to_string()),
                    (Some("text"), None) => texts.push(String::new()),
                    (kind, _) => {
                        return Err(Unsure::of(format!(
                            "a tool result of type `{}`",
                            kind.unwrap_or("none")
                        )));
                    }
                }
            }
            texts.join("\n")
        }
        Some(_) => return Err(Unsure::of("a tool result that is neither text nor blocks")),
    };
    let id = block.text("tool_use_id").unwrap_or_default();
    Ok(Json::Map(Map::from([
        ("role", "tool".into()),
        ("tool_call_id", id.into()),
        ("content", Json::Text(text.into())),
    ])))
}

/// A tool in OpenAI's form.
fn tool(tool: &Json) -> Result<Json, Unsure> {
    let unclear = || Unsure::of("a tool that is not of a known form");
    let tool = tool.map().ok_or_else(unclear)?;
    let Some(Json::Map(schema)) = tool.get("input_schema") else { return Err(unclear()) };
    let mut schema = schema.clone();
    if schema.get("type").is_none() {
        schema.set("type", "object".into());
    }
    let mut function = Map::from([("name", tool.get("name").cloned().unwrap_or(Json::Null))]);
    for name in ["description", "strict", "defer_loading"] {
        if let Some(value) = tool.given(name) {
            function.set(name, value.clone());
        }
    }
    function.set("parameters", Json::Map(schema));
    Ok(Json::Map(Map::from([("type", "function".into()), ("function", Json::Map(function))])))
}
