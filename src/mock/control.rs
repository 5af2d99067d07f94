//! What only a mock has: failures on command, and the truth that tests and benchmarks compare with.

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::{Value, json};

use super::faults::Order;
use super::http::{Served, tokens_of};

pub fn routes() -> Router<Served> {
    Router::new()
        .route("/mock/faults", get(shown).post(ordered).delete(healed))
        .route("/mock/state", get(state))
        .route("/mock/keys", get(keys))
        .route("/mock/peek", post(peek))
}

async fn shown(State(served): State<Served>) -> Response {
    axum::Json(served.engine.faults().state()).into_response()
}

async fn healed(State(served): State<Served>) -> Response {
    served.engine.faults().heal();
    axum::Json(served.engine.faults().state()).into_response()
}

async fn ordered(State(served): State<Served>, body: Bytes) -> Response {
    let order: Order = match serde_json::from_slice(&body) {
        Ok(order) => order,
        Err(error) => return refused(&error.to_string()),
    };
    match served.engine.faults().obey(&order) {
        Ok(()) => axum::Json(served.engine.faults().state()).into_response(),
        Err(error) => refused(&error.to_string()),
    }
}

async fn state(State(served): State<Served>) -> Response {
    let look = served.engine.device().look();
    let (running, waiting) = served.engine.load();
    axum::Json(json!({
        "running": running, "waiting": waiting, "prefill_left": look.prefill_left,
        "blocks": look.blocks, "blocks_used": look.blocks_used, "pinned_rows": served.engine.pinned_rows(),
        "preempted": look.tally.preempted, "steps": look.tally.steps,
    }))
    .into_response()
}

/// Hashes in hex by group, sorted: what events say must be the same.
async fn keys(State(served): State<Served>) -> Response {
    let mut keys = served.engine.keys();
    keys.sort_unstable();
    let groups = served.engine.shape().grid.groups.len();
    let of = |group: usize| {
        keys.iter()
            .filter(|key| key.group.0 as usize == group)
            .map(|key| hex::encode(key.hash.0))
            .collect::<Vec<_>>()
    };
    axum::Json(json!({"groups": (0..groups).map(of).collect::<Vec<_>>()})).into_response()
}

/// How much of a prompt would not be computed now.
async fn peek(State(served): State<Served>, body: Bytes) -> Response {
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    match tokens_of(&body) {
        Ok(tokens) => {
            let (cached, prompt) = served.engine.peek(&tokens);
            axum::Json(json!({"cached": cached, "prompt": prompt})).into_response()
        }
        Err(message) => refused(&message),
    }
}

fn refused(message: &str) -> Response {
    (StatusCode::BAD_REQUEST, axum::Json(json!({"error": message}))).into_response()
}
