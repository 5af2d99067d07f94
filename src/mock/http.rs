//! The engine's HTTP interface: the endpoints that the router, the canary and tests use.

use std::io;
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

use super::control;
use super::engine::{Ask, Engine, Event};
use super::faces::{self, About, Face, Prompt, Wanted};
use super::faults::Answers;
use super::model::{self, Word};
use super::options::EventConfig;
use crate::base::clock::unix_seconds;

/// What every handler has.
#[derive(Clone)]
pub struct Served {
    pub engine: Engine,
    pub name: Arc<str>,
    /// What publishes the cache's events, as `/kv_event_sources` shows it.
    pub events: Option<Arc<EventConfig>>,
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
        .route("/v1/chat/completions/render", post(render_chat))
        .route("/v1/completions/render", post(render_completion))
        .route("/tokenize", post(tokenize))
        .route("/kv_event_sources", get(event_sources))
        .route("/load", get(load))
        .route("/reset_prefix_cache", post(reset))
        .route("/metrics", get(metrics))
        // Other routers ask one of these before they take a worker.
        .route("/get_model_info", get(model_info))
        .route("/model_info", get(model_info))
        .route("/get_server_info", get(model_info))
        .route("/server_info", get(model_info))
        .merge(control::routes())
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

/// An error that the engine was told to answer with.
fn ordered_error(face: Face, answers: Answers) -> Response {
    let status = StatusCode::from_u16(answers.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = refuse(face, status, "the engine was told to answer so");
    if let Some(seconds) = answers.retry_after_s {
        response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
    }
    response
}

async fn answer(served: &Served, face: Face, headers: &HeaderMap, body: &[u8]) -> Response {
    if let Some(answers) = served.engine.faults().answer() {
        return ordered_error(face, answers);
    }
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
    let cut = served.engine.faults().cut();
    if wanted.stream { streamed(about, events, cut) } else { whole(about, events, cut).await }
}

async fn whole(mut about: About, mut events: mpsc::Receiver<Event>, cut: Option<u64>) -> Response {
    let mut words = Vec::new();
    while let Some(event) = events.recv().await {
        match event {
            Event::Begin { cached } => about.cached_tokens = cached,
            Event::Word(_) if cut.is_some_and(|after| words.len() as u64 >= after) => {
                // The head is sent, and then the connection ends.
                let body = Body::from_stream(stream::iter([Err::<Bytes, _>(broken_off())]));
                return ([(header::CONTENT_TYPE, "application/json")], body).into_response();
            }
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
    /// Breaks off after so many words.
    cut: Option<u64>,
}

fn broken_off() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, "told to break off here")
}

impl Flow {
    /// Bytes of the next event that has some; none when the stream is over, whole or not.
    async fn next(&mut self) -> Option<io::Result<String>> {
        loop {
            let out = match self.events.recv().await? {
                Event::Begin { cached } => {
                    self.about.cached_tokens = cached;
                    self.about.begin()
                }
                Event::Word(_) if self.cut.is_some_and(|after| self.words.len() as u64 >= after) => {
                    self.events.close();
                    return Some(Err(broken_off()));
                }
                Event::Word(word) => {
                    let out = self.about.word(&word);
                    self.words.push(word);
                    out
                }
                Event::End { natural } => self.about.end(&self.words, natural),
            };
            if !out.is_empty() {
                return Some(Ok(out));
            }
        }
    }
}

fn streamed(about: About, events: mpsc::Receiver<Event>, cut: Option<u64>) -> Response {
    let flow = Flow { about, events, words: Vec::new(), cut };
    let bytes = stream::unfold(flow, |mut flow| async move {
        let out = flow.next().await?;
        if out.is_err() {
            // What was said before the break is on its way: a server that waits flushes.
            tokio::task::yield_now().await;
        }
        Some((out.map(Bytes::from), flow))
    });
    ([(header::CONTENT_TYPE, "text/event-stream; charset=utf-8")], Body::from_stream(bytes)).into_response()
}

/// Token ids of a body for any endpoint that has messages or a prompt.
pub fn tokens_of(body: &Value) -> Result<Vec<u32>, String> {
    let face = if body.get("messages").is_some() { Face::Chat } else { Face::Completion };
    faces::prompt(face, body).map(tokens)
}

async fn tokenize(State(served): State<Served>, body: Bytes) -> Response {
    let body: Value = match serde_json::from_slice(&body) {
        Ok(body) => body,
        Err(error) => return refuse(Face::Chat, StatusCode::BAD_REQUEST, &error.to_string()),
    };
    if body["prompt"].is_array() {
        return refuse(Face::Completion, StatusCode::BAD_REQUEST, "prompt must be a string");
    }
    let most = served.engine.shape().max_model_len;
    match tokens_of(&body) {
        Ok(tokens) => {
            let said =
                json!({"count": tokens.len(), "max_model_len": most, "tokens": tokens, "token_strs": null});
            axum::Json(said).into_response()
        }
        Err(message) => refuse(Face::Chat, StatusCode::BAD_REQUEST, &message),
    }
}

async fn render_chat(body: Bytes) -> Response {
    rendered(Face::Chat, &body)
}

async fn render_completion(body: Bytes) -> Response {
    rendered(Face::Completion, &body)
}

/// What the engine would compute for a body, without computing it.
fn rendered(face: Face, body: &[u8]) -> Response {
    let body: Value = serde_json::from_slice(body).unwrap_or_default();
    match Wanted::read(face, &body) {
        Ok(wanted) => {
            let most = wanted.max_tokens;
            let ids = tokens(wanted.prompt);
            axum::Json(json!({"token_ids": ids, "sampling_params": {"max_tokens": most}})).into_response()
        }
        Err(message) => refuse(face, StatusCode::BAD_REQUEST, &message),
    }
}

async fn event_sources(State(served): State<Served>) -> Response {
    match &served.events {
        Some(config) => axum::Json(json!({"0": **config})).into_response(),
        None => axum::Json(json!({})).into_response(),
    }
}

async fn load(State(served): State<Served>) -> Response {
    let (running, waiting) = served.engine.load();
    axum::Json(json!({"server_load": running + waiting})).into_response()
}

async fn model_info(State(served): State<Served>) -> Response {
    let said = json!({"model_path": *served.name, "served_model_name": *served.name, "is_generation": true});
    axum::Json(said).into_response()
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

async fn metrics(State(served): State<Served>) -> String {
    served.engine.metrics(&served.name)
}
