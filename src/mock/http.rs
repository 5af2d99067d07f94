//! The engine's HTTP interface: the endpoints that the router, the canary and tests use.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::stream;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::engine::{Ask, Engine, Event};
use super::faces::{self, About, Face, Prompt, Wanted};
use super::model::{self, Word};
use crate::base::clock::unix_seconds;

/// What every handler has.
#[derive(Clone)]
pub struct Served {
    pub engine: Engine,
    pub name: Arc<str>,
    /// Makes ids of requests that bring none, and the tails of internal ids.
    pub serial: Arc<AtomicU64>,
}

pub fn routes(served: Served) -> Router {
    Router::new()
        .route("/health", get(|| async { StatusCode::OK }))
        .route("/ping", get(|| async { StatusCode::OK }))
        .route("/version", get(|| async { axum::Json(json!({"version": "mock"})) }))
        .route("/v1/models", get(models))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completion))
        .route("/v1/messages", post(messages))
        .route("/v1/messages/count_tokens", post(count_tokens))
        .route("/v1/responses", post(responses))
        .route("/tokenize", post(tokenize))
        .route("/reset_prefix_cache", post(reset))
        .route("/metrics", get(metrics))
        .layer(DefaultBodyLimit::disable())
        .with_state(served)
}

async fn models(State(served): State<Served>) -> Response {
    let model = json!({
        "id": *served.name, "object": "model", "created": unix_seconds(), "owned_by": "mock",
        "root": *served.name, "parent": null, "max_model_len": served.engine.shape().max_model_len,
    });
    axum::Json(json!({"object": "list", "data": [model]})).into_response()
}

async fn chat(State(served): State<Served>, headers: HeaderMap, body: Bytes) -> Response {
    answer(&served, Face::Chat, &headers, &body).await
}

async fn completion(State(served): State<Served>, headers: HeaderMap, body: Bytes) -> Response {
    answer(&served, Face::Completion, &headers, &body).await
}

async fn messages(State(served): State<Served>, headers: HeaderMap, body: Bytes) -> Response {
    answer(&served, Face::Messages, &headers, &body).await
}

async fn responses(State(served): State<Served>, headers: HeaderMap, body: Bytes) -> Response {
    answer(&served, Face::Responses, &headers, &body).await
}

fn refuse(face: Face, status: StatusCode, message: &str) -> Response {
    (status, axum::Json(faces::error(face, status.as_u16(), message))).into_response()
}

fn tokens(prompt: Prompt) -> Vec<u32> {
    match prompt {
        Prompt::Text(text) => model::tokens(&text),
        Prompt::Tokens(tokens) => tokens,
    }
}

/// Ids of a request: the one in the answer, and the engine's internal one.
fn ids(served: &Served, face: Face, headers: &HeaderMap, wanted: &Wanted) -> (String, String) {
    let serial = served.serial.fetch_add(1, Ordering::Relaxed);
    let made = || format!("{:016x}", model::Dice::of_prompt(serial, &[]).roll());
    let header = headers.get("x-request-id").and_then(|id| id.to_str().ok()).map(str::to_owned);
    let tail = model::Dice::of_prompt(serial, &[1]).roll() & 0xffff_ffff;
    let (outer, inner) = match face {
        // The header is not looked at here: only the body's id counts.
        Face::Responses => {
            let id = wanted.request_id.clone().unwrap_or_else(|| format!("resp_{}", made()));
            (id.clone(), id)
        }
        Face::Completion => {
            let id = format!("cmpl-{}", header.unwrap_or_else(made));
            (id.clone(), format!("{id}-0"))
        }
        Face::Chat | Face::Messages => {
            let id = format!("chatcmpl-{}", header.unwrap_or_else(made));
            (id.clone(), id)
        }
    };
    (outer, format!("{inner}-{tail:08x}"))
}

async fn answer(served: &Served, face: Face, headers: &HeaderMap, body: &[u8]) -> Response {
    let bad = |message: &str| refuse(face, StatusCode::BAD_REQUEST, message);
    let body: Value = match serde_json::from_slice(body) {
        Ok(body) => body,
        Err(error) => return bad(&format!("the body is not JSON: {error}")),
    };
    let wanted = match Wanted::read(face, &body) {
        Ok(wanted) => wanted,
        Err(message) => return bad(&message),
    };
    if let Some(model) = wanted.model.as_deref().filter(|model| *model != &*served.name) {
        return refuse(face, StatusCode::NOT_FOUND, &format!("The model `{model}` does not exist."));
    }
    let (id, internal) = ids(served, face, headers, &wanted);
    let prompt = tokens(wanted.prompt);
    let room = served.engine.shape().max_model_len.saturating_sub(prompt.len());
    if prompt.is_empty() {
        return bad("the prompt is empty");
    }
    if room == 0 || (face == Face::Completion && wanted.max_tokens.is_some_and(|n| n > room)) {
        let most = served.engine.shape().max_model_len;
        return bad(&format!(
            "The model's maximum context length is {most} tokens, and the request has {} of input and asks for {} \
             of output. Shorten the input or ask for less.",
            prompt.len(),
            wanted.max_tokens.unwrap_or(0),
        ));
    }
    let about = About {
        face,
        id,
        model: served.name.to_string(),
        created: unix_seconds(),
        prompt_tokens: prompt.len(),
        cached_tokens: 0,
        include_usage: wanted.include_usage,
        logprobs: wanted.logprobs,
    };
    // Without a word about the length, a reply is long enough to come to its own end.
    let max_tokens = wanted.max_tokens.unwrap_or(64).min(room);
    let events =
        served.engine.submit(Ask { id: internal, prompt, max_tokens, to_the_limit: wanted.to_the_limit });
    if wanted.stream { streamed(about, events) } else { whole(about, events).await }
}

async fn whole(mut about: About, mut events: mpsc::Receiver<Event>) -> Response {
    let mut words = Vec::new();
    while let Some(event) = events.recv().await {
        match event {
            Event::Begin { cached } => about.cached_tokens = cached,
            Event::Word(word) => words.push(word),
            Event::End { natural } => return axum::Json(about.whole(&words, natural)).into_response(),
        }
    }
    // The engine stops: whoever asked is told that it is not an answer.
    refuse(about.face, StatusCode::INTERNAL_SERVER_ERROR, "the engine ended")
}

/// A stream in progress.
struct Flow {
    about: About,
    events: mpsc::Receiver<Event>,
    words: Vec<Word>,
}

impl Flow {
    /// Bytes of the next event that has some; none when the stream is over, whole or not.
    async fn next(&mut self) -> Option<String> {
        loop {
            let out = match self.events.recv().await? {
                Event::Begin { cached } => {
                    self.about.cached_tokens = cached;
                    self.about.begin()
                }
                Event::Word(word) => {
                    let out = self.about.word(&word);
                    self.words.push(word);
                    out
                }
                Event::End { natural } => self.about.end(&self.words, natural),
            };
            if !out.is_empty() {
                return Some(out);
            }
        }
    }
}

fn streamed(about: About, events: mpsc::Receiver<Event>) -> Response {
    let flow = Flow { about, events, words: Vec::new() };
    let bytes = stream::unfold(flow, |mut flow| async move {
        let out = flow.next().await?;
        Some((Ok::<_, Infallible>(Bytes::from(out)), flow))
    });
    ([(header::CONTENT_TYPE, "text/event-stream; charset=utf-8")], Body::from_stream(bytes)).into_response()
}

async fn tokenize(State(served): State<Served>, body: Bytes) -> Response {
    let body: Value = match serde_json::from_slice(&body) {
        Ok(body) => body,
        Err(error) => return refuse(Face::Chat, StatusCode::BAD_REQUEST, &error.to_string()),
    };
    let face = if body.get("messages").is_some() { Face::Chat } else { Face::Completion };
    let text = match faces::prompt(face, &body) {
        Ok(Prompt::Text(text)) => text,
        Ok(Prompt::Tokens(_)) => return refuse(face, StatusCode::BAD_REQUEST, "prompt must be a string"),
        Err(message) => return refuse(face, StatusCode::BAD_REQUEST, &message),
    };
    let tokens = model::tokens(&text);
    let most = served.engine.shape().max_model_len;
    axum::Json(json!({"count": tokens.len(), "max_model_len": most, "tokens": tokens, "token_strs": null}))
        .into_response()
}

async fn count_tokens(body: Bytes) -> Response {
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    match faces::prompt(Face::Messages, &body) {
        Ok(prompt) => axum::Json(json!({"input_tokens": tokens(prompt).len()})).into_response(),
        Err(message) => refuse(Face::Messages, StatusCode::BAD_REQUEST, &message),
    }
}

async fn reset(State(served): State<Served>) -> Response {
    axum::Json(json!({"success": served.engine.reset()})).into_response()
}

/// vLLM's names with vLLM's labels; our own bare, so that a reader who takes a number for granted finds it.
async fn metrics(State(served): State<Served>) -> String {
    let counts = served.engine.counts();
    let labels = format!("{{model_name=\"{}\",engine=\"0\"}}", served.name);
    let node = AtomicU64::new(served.engine.has_node().into());
    let pinned = AtomicU64::new(served.engine.pinned_rows() as u64);
    let series: [(&str, &str, &AtomicU64); 13] = [
        ("vllm:num_requests_running", "gauge", &counts.running),
        ("vllm:num_requests_waiting", "gauge", &counts.waiting),
        ("vllm:prompt_tokens_total", "counter", &counts.prompt_tokens),
        ("vllm:prompt_tokens_cached_total", "counter", &counts.cached_tokens),
        ("vllm:generation_tokens_total", "counter", &counts.words),
        ("mock_node_connected", "gauge", &node),
        ("mock_rows_pinned", "gauge", &pinned),
        ("mock_requests_total", "counter", &counts.requests),
        ("mock_loads_total", "counter", &counts.loads),
        ("mock_stores_total", "counter", &counts.stores),
        ("mock_checked_rows_total", "counter", &counts.checked_rows),
        ("mock_wrong_rows_total", "counter", &counts.wrong_rows),
        ("mock_unplaced_rows_total", "counter", &counts.unplaced_rows),
    ];
    let line = |(name, kind, value): (&str, &str, &AtomicU64)| {
        let labels = if name.starts_with("vllm:") { labels.as_str() } else { "" };
        format!("# TYPE {name} {kind}\n{name}{labels} {}\n", value.load(Ordering::Relaxed))
    };
    series.into_iter().map(line).collect()
}
