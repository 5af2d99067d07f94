//! What the engine is asked to prove that our ids are its own: bodies of every shape that is followed, and the
//! question that `/tokenize` answers for a body of another endpoint.

use serde_json::value::RawValue;

use super::chat::{Chat, arguments};
use super::json::{Json, Map};
use super::{Options, Unsure, anthropic};
use crate::router::ask::Endpoint;

/// What `/tokenize` is asked about a request. It has fewer fields than a chat: what is missing travels as template
/// arguments, which is what the engine makes of it, too.
pub fn question(
    endpoint: Endpoint,
    body: &[u8],
    system_first: bool,
    calm: &str,
    options: &Options,
) -> Result<Vec<u8>, Unsure> {
    let Json::Map(body) = Json::read(body)? else { return Err(Unsure::of("the body is no object")) };
    let question = match endpoint {
        Endpoint::Chat => of_chat(&body, options)?,
        Endpoint::Messages => of_chat(&anthropic::openai(&body, system_first, calm)?, options)?,
        Endpoint::Completions => match body.get("prompt") {
            Some(text @ Json::Text(_)) => {
                let mut question = Map::from([("prompt", text.clone())]);
                copy(&body, &mut question, &["model", "add_special_tokens"]);
                question
            }
            _ => return Err(Unsure::of("ids need no tokenizer")),
        },
        other => return Err(Unsure::of(format!("{} is not followed yet", other.name()))),
    };
    serde_json::to_vec(&Json::Map(question)).map_err(|error| Unsure::of(error.to_string()))
}

fn copy(from: &Map, to: &mut Map, names: &[&str]) {
    for name in names {
        if let Some(value) = from.get(name) {
            to.set(name, value.clone());
        }
    }
}

fn of_chat(body: &Map, options: &Options) -> Result<Map, Unsure> {
    // Only what is followed is asked about.
    Chat::of_openai(body, options)?;
    let messages = body.get("messages").and_then(Json::list).unwrap_or_default();
    let messages = messages.iter().map(in_its_terms).collect();
    let mut question = Map::from([("messages", Json::List(messages))]);
    copy(
        body,
        &mut question,
        &["model", "add_generation_prompt", "continue_final_message", "add_special_tokens"],
    );
    if !(options.exclude_tools && body.text("tool_choice") == Some("none")) {
        copy(body, &mut question, &["tools"]);
    }
    let own = Options { defaults: Map::default(), ..options.clone() };
    let arguments = arguments(body, &own)?;
    if arguments.iter().next().is_some() {
        question.set("chat_template_kwargs", Json::Map(arguments));
    }
    Ok(question)
}

/// A message for `/tokenize`, which knows `reasoning` by that name only and takes arguments of calls as text.
fn in_its_terms(message: &Json) -> Json {
    let Json::Map(message) = message else { return message.clone() };
    let mut message = message.clone();
    if let Some(reasoning) = message.given("reasoning_content").cloned() {
        message.remove("reasoning_content");
        if message.given("reasoning").is_none() {
            message.set("reasoning", reasoning);
        }
    }
    if let Some(Json::List(calls)) = message.get("tool_calls").cloned() {
        message.set("tool_calls", Json::List(calls.into_iter().map(with_text).collect()));
    }
    Json::Map(message)
}

fn with_text(call: Json) -> Json {
    let Json::Map(mut call) = call else { return call };
    if let Some(Json::Map(function)) = call.get("function").cloned()
        && let Some(arguments @ Json::Map(_)) = function.get("arguments")
        && let Ok(text) = serde_json::to_string(arguments)
    {
        let mut function = function.clone();
        function.set("arguments", Json::Text(text.into()));
        call.set("function", Json::Map(function));
    }
    Json::Map(call)
}

/// One body a line: texts that tokenizers treat in ways of their own (spaces, digits, scripts, what looks like a
/// special token), and every shape of request that is followed. Text, because the order of fields shows in a prompt.
const PROBES: &str = include_str!("probes.jsonl");

/// Stands in a probe for a long text.
const LONG: &str = "$LONG";

#[derive(serde::Deserialize)]
struct Line<'a> {
    endpoint: &'a str,
    #[serde(borrow)]
    body: &'a RawValue,
}

/// Bodies to prove with. `model`: the name the engine serves.
pub fn all(model: &str) -> Vec<(Endpoint, Vec<u8>)> {
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    let long = quoted(&"The quick brown fox jumps over the lazy dog. 0123456789\n".repeat(400));
    let head = format!(r#"{{"model":{},"max_tokens":1,"#, quoted(model));
    let probe = |line: &str| {
        let Line { endpoint, body } = serde_json::from_str(line).expect("a probe is JSON");
        let body = body.get().replace(&quoted(LONG), &long).replacen('{', &head, 1);
        let endpoint = Endpoint::ALL.into_iter().find(|known| known.name() == endpoint);
        (endpoint.expect("a probe has an endpoint"), body.into_bytes())
    };
    PROBES.lines().map(probe).collect()
}
