//! The weka form of a session, and the run-length form of the same: text to [`Session`] and back.
//!
//! One JSON object per conversation. `requests` holds requests (`type` `n` or `s`) and sub-agents (`subagent`, with
//! requests of their own) in the order of the recording. The run-length form has `keep` and `new` in place of
//! `hash_ids`: the first `keep` numbers of the request before in the same stream, then for each `[start, n]` of
//! `new` the numbers `start … start + n - 1`.
//!
//! What producers differ in. A sub-agent's inner times count from the session's start or from the sub-agent's own:
//! an inner time before its sub-agent's can only be the latter, and then all of them are. `hash_id_scope` is `local`,
//! `global` or absent (local). `subagent_type` and the sub-agent's figures may be null. `_analysis` and other fields
//! that nobody here needs are passed over.

use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Agent, Blocks, Error, Place, Request, Scope, Session, Stream};

/// Longest prompt: 16 times what any model takes today. Bounds what a damaged number can ask for.
const INPUT_MAX: u32 = 1 << 24;

/// Longest time since a session's start: ten years. Beyond it a number is no time of a session.
const SECONDS_MAX: f64 = 3.2e8;

/// Times are compared with the slack that producers' rounding needs.
const SLACK: f64 = 1e-6;

#[derive(Debug, Deserialize, Serialize)]
struct Object {
    id: String,
    #[serde(default)]
    models: Vec<String>,
    block_size: u32,
    hash_id_scope: Option<String>,
    tool_tokens: Option<u32>,
    system_tokens: Option<u32>,
    requests: Vec<Entry>,
}

/// A request or a sub-agent: which fields must be there depends on `type`, and is checked by hand, so that the
/// message names the field.
#[derive(Debug, Default, Deserialize, Serialize)]
struct Entry {
    t: f64,
    r#type: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    r#in: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    out: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hash_ids: Option<Vec<u64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    keep: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    new: Option<Vec<(u64, u32)>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    input_types: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_types: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    api_time: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ttft: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    think_time: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    agent_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    subagent_type: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    duration_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    models: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    system_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    requests: Option<Vec<Self>>,
}

/// Field and what is wrong with it.
type Wrong = (String, String);

fn wrong<T>(field: &str, what: impl Into<String>) -> Result<T, Wrong> {
    Err((field.to_owned(), what.into()))
}

/// Reads one object, which begins in `line` of `file`.
///
/// # Errors
/// What is wrong, with its place.
pub(super) fn parse(text: &str, file: &Path, line: usize) -> Result<Session, Error> {
    let place = |line, field| Place { file: file.to_owned(), line, field };
    let deserializer = &mut serde_json::Deserializer::from_str(text);
    let object: Object = serde_path_to_error::deserialize(&mut *deserializer).map_err(|e| {
        let field = Some(e.path().to_string()).filter(|p| p != "." && p != "?").unwrap_or_default();
        let inner = e.into_inner();
        Error::Wrong { place: place(line + inner.line().max(1) - 1, field), what: without_place(&inner) }
    })?;
    deserializer.end().map_err(|e| Error::Wrong {
        place: place(line + e.line() - 1, String::new()),
        what: without_place(&e),
    })?;
    session(object).map_err(|(field, what)| Error::Wrong { place: place(line, field), what })
}

/// The message without its own line, which counts from the object's begin.
fn without_place(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.split(" at line ").next().unwrap_or(&text).to_owned()
}

fn session(object: Object) -> Result<Session, Wrong> {
    if object.id.is_empty() {
        return wrong("id", "it is empty");
    }
    if object.block_size == 0 {
        return wrong("block_size", "blocks of no tokens");
    }
    let scope = match object.hash_id_scope.as_deref() {
        None | Some("local") => Scope::Local,
        Some("global") => Scope::Global,
        Some(other) => return wrong("hash_id_scope", format!("`{other}` is neither `local` nor `global`")),
    };
    let mut own = Reader::new(object.block_size);
    let mut agents = Vec::new();
    for (number, entry) in object.requests.into_iter().enumerate() {
        let at = |(field, what)| (format!("requests[{number}].{field}"), what);
        match entry.r#type.as_str() {
            "subagent" => agents.push(agent(entry, object.block_size, own.requests.len()).map_err(at)?),
            _ => own.take(entry, 0.0).map_err(at)?,
        }
    }
    let mut streams = vec![Stream { agent: None, requests: own.requests }];
    streams.append(&mut agents);
    Ok(Session {
        id: object.id,
        models: object.models,
        block_tokens: object.block_size,
        scope,
        tool_tokens: object.tool_tokens.unwrap_or(0),
        system_tokens: object.system_tokens.unwrap_or(0),
        streams,
    })
}

fn agent(entry: Entry, block_tokens: u32, after: usize) -> Result<Stream, Wrong> {
    let Some(id) = entry.agent_id else { return wrong("agent_id", "it is missing") };
    let Some(inner) = entry.requests else { return wrong("requests", "they are missing") };
    let at = span("t", entry.t)?;
    let begins = begins(&inner, entry.t)?;
    let mut reader = Reader::new(block_tokens);
    for (number, request) in inner.into_iter().enumerate() {
        let at = |(field, what)| (format!("requests[{number}].{field}"), what);
        if request.r#type == "subagent" {
            return wrong(&format!("requests[{number}].type"), "a sub-agent within a sub-agent");
        }
        reader.take(request, begins).map_err(at)?;
    }
    let agent = Agent {
        id,
        kind: entry.subagent_type,
        status: entry.status,
        at,
        lasted: entry.duration_ms.map(|ms| span("duration_ms", ms / 1e3)).transpose()?,
        after,
        models: entry.models.unwrap_or_default(),
        tool_tokens: entry.tool_tokens.unwrap_or(0),
        system_tokens: entry.system_tokens.unwrap_or(0),
    };
    Ok(Stream { agent: Some(agent), requests: reader.requests })
}

/// Seconds that a sub-agent's inner times count from.
fn begins(inner: &[Entry], agent_t: f64) -> Result<f64, Wrong> {
    let before = |e: &Entry| e.t + SLACK < agent_t;
    let (Some(first), Some(early)) = (inner.first(), inner.iter().position(before)) else { return Ok(0.0) };
    if before(first) {
        return Ok(agent_t);
    }
    let (t, began) = (inner[early].t, first.t);
    let what = format!("{t} is before its sub-agent's {agent_t}, and {began} of the first request is not");
    wrong(&format!("requests[{early}].t"), what)
}

/// Requests of one stream, one after another.
struct Reader {
    block_tokens: u32,
    requests: Vec<Request>,
}

impl Reader {
    fn new(block_tokens: u32) -> Self {
        Self { block_tokens, requests: Vec::new() }
    }

    fn take(&mut self, entry: Entry, begins: f64) -> Result<(), Wrong> {
        let streamed = match entry.r#type.as_str() {
            "n" => false,
            "s" => true,
            other => return wrong("type", format!("`{other}` is none of `n`, `s`, `subagent`")),
        };
        let Some(input_tokens) = entry.r#in else { return wrong("in", "it is missing") };
        let Some(output_tokens) = entry.out else { return wrong("out", "it is missing") };
        if input_tokens == 0 || input_tokens > INPUT_MAX {
            return wrong("in", format!("{input_tokens} tokens: it must be from 1 to {INPUT_MAX}"));
        }
        let blocks = self.blocks(&entry)?;
        let most = input_tokens.div_ceil(self.block_tokens);
        if blocks.len() > most {
            let field = if entry.hash_ids.is_some() { "hash_ids" } else { "new" };
            let what = format!("{} blocks, and {input_tokens} tokens have at most {most}", blocks.len());
            return wrong(field, what);
        }
        self.requests.push(Request {
            at: span("t", entry.t + begins)?,
            streamed,
            model: entry.model,
            input_tokens,
            output_tokens,
            blocks,
            stop: entry.stop.unwrap_or_default(),
            input_types: entry.input_types.unwrap_or_default(),
            output_types: entry.output_types.unwrap_or_default(),
            took: entry.api_time.map(|s| span("api_time", s)).transpose()?,
            first_token: entry.ttft.map(|s| span("ttft", s)).transpose()?,
            thought: entry.think_time.map(|s| span("think_time", s)).transpose()?,
        });
        Ok(())
    }

    fn blocks(&self, entry: &Entry) -> Result<Blocks, Wrong> {
        let (mut blocks, field, new) = match (&entry.hash_ids, entry.keep, &entry.new) {
            (Some(_), None, None) => (Blocks::default(), "hash_ids", &Vec::new()),
            (None, None, None) => return Ok(Blocks::default()),
            (None, Some(keep), Some(new)) => {
                let none = Blocks::default();
                let before = self.requests.last().map_or(&none, |r| &r.blocks);
                if keep > before.len() {
                    return wrong("keep", format!("{keep} of {} blocks", before.len()));
                }
                (before.first(keep), "new", new)
            }
            _ => return wrong("keep", "there must be either `hash_ids`, or `keep` and `new`"),
        };
        let single = entry.hash_ids.iter().flatten().map(|&id| (id, 1));
        for (start, count) in single.chain(new.iter().copied()) {
            if blocks.push(start, count).is_none() {
                return wrong(field, format!("there are no {count} numbers from {start} on"));
            }
        }
        Ok(blocks)
    }
}

/// Seconds of a producer, to the microsecond.
fn span(field: &str, seconds: f64) -> Result<Duration, Wrong> {
    // Some clients record a think time of minus a few milliseconds where answers overlap.
    if !(-1.0..=SECONDS_MAX).contains(&seconds) {
        return wrong(field, format!("{seconds} is no time within a session"));
    }
    Ok(Duration::from_micros((seconds.max(0.0) * 1e6).round() as u64))
}

/// The session as one line of the run-length form, without its end of line. Read again it is the same session.
///
/// # Panics
/// Never: the form has no part that JSON cannot hold.
pub fn write_line(session: &Session) -> String {
    let mut requests: Vec<Entry> = Vec::new();
    let (own, agents) =
        session.streams.split_first().map_or((&[][..], &[][..]), |(own, agents)| (&own.requests[..], agents));
    let mut agents = agents.iter().peekable();
    let own = entries(own);
    let count = own.len();
    for (number, entry) in own.into_iter().map(Some).chain([None]).enumerate() {
        let due = |s: &&Stream| s.agent.as_ref().is_none_or(|a| a.after <= number || number == count);
        while let Some(stream) = agents.next_if(due) {
            requests.extend(stream.agent.as_ref().map(|agent| agent_entry(agent, &stream.requests)));
        }
        requests.extend(entry);
    }
    let object = Object {
        id: session.id.clone(),
        models: session.models.clone(),
        block_size: session.block_tokens,
        hash_id_scope: Some(if session.scope == Scope::Global { "global" } else { "local" }.to_owned()),
        tool_tokens: Some(session.tool_tokens),
        system_tokens: Some(session.system_tokens),
        requests,
    };
    serde_json::to_string(&object).expect("plain data")
}

fn agent_entry(agent: &Agent, requests: &[Request]) -> Entry {
    Entry {
        t: agent.at.as_secs_f64(),
        r#type: "subagent".to_owned(),
        agent_id: Some(agent.id.clone()),
        subagent_type: agent.kind.clone(),
        status: agent.status.clone(),
        duration_ms: agent.lasted.map(|d| d.as_secs_f64() * 1e3),
        models: Some(agent.models.clone()),
        tool_tokens: Some(agent.tool_tokens),
        system_tokens: Some(agent.system_tokens),
        requests: Some(entries(requests)),
        ..Entry::default()
    }
}

fn entries(requests: &[Request]) -> Vec<Entry> {
    let none = Blocks::default();
    let before = std::iter::once(&none).chain(requests.iter().map(|r| &r.blocks));
    requests.iter().zip(before).map(|(request, before)| request_entry(request, before)).collect()
}

fn request_entry(request: &Request, before: &Blocks) -> Entry {
    let keep = request.blocks.shared(before);
    Entry {
        t: request.at.as_secs_f64(),
        r#type: if request.streamed { "s" } else { "n" }.to_owned(),
        model: request.model.clone(),
        r#in: Some(request.input_tokens),
        out: Some(request.output_tokens),
        keep: Some(keep),
        new: Some(request.blocks.after(keep).runs().to_vec()),
        input_types: Some(request.input_types.clone()),
        output_types: Some(request.output_types.clone()),
        stop: Some(request.stop.clone()),
        api_time: request.took.map(|d| d.as_secs_f64()),
        ttft: request.first_token.map(|d| d.as_secs_f64()),
        think_time: request.thought.map(|d| d.as_secs_f64()),
        ..Entry::default()
    }
}
