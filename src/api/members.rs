//! The nodes that this one knows, and how an operator takes one out.
//!
//! Looking is for whoever may look at the node; forgetting needs the key that the node leaves for its own user, as the
//! orders of [`super::desk`] do, and for the same reason.

use axum::Json;
use axum::extract::State as With;
use axum::response::{IntoResponse, Response};
use axum::routing::{Router, get, post};
use http::{HeaderMap, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::Keys;
use crate::cluster::{Cluster, ForgetError, Member};

/// What the routes work with.
#[derive(Clone, Debug)]
pub struct Members {
    cluster: Cluster,
    /// What orders need.
    key: Keys,
}

/// Which node is meant.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Named {
    /// Its name, its id, or the first 8 digits of its id.
    pub node: String,
}

/// Who was forgotten.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Forgotten {
    pub name: String,
}

impl Members {
    pub fn new(cluster: Cluster, key: &str) -> Self {
        Self { cluster, key: Keys::only("operator", key) }
    }

    /// The routes, to be merged with those of [`super::admin`].
    pub fn routes(self) -> Router {
        Router::new()
            .route("/api/v1/cluster", get(list))
            .route("/api/v1/cluster/forget", post(forget))
            .with_state(self)
    }
}

async fn list(With(members): With<Members>) -> Json<Vec<Member>> {
    let without_note = |member| Member { note: serde_json::Value::Null, ..member };
    Json(members.cluster.members().into_iter().map(without_note).collect())
}

async fn forget(With(members): With<Members>, headers: HeaderMap, Json(named): Json<Named>) -> Response {
    if members.key.check(&headers).is_err() {
        let what = "this needs the key in the node's run/node.json: run `spark-kv cluster` on its own machine, as its user";
        return refused(StatusCode::FORBIDDEN, what);
    }
    match members.cluster.forget(&named.node).await {
        Ok(name) => Json(Forgotten { name }).into_response(),
        Err(error) => {
            let code = match error {
                ForgetError::Unknown(_) => StatusCode::NOT_FOUND,
                ForgetError::Ambiguous(..) => StatusCode::CONFLICT,
                ForgetError::Write(_) => StatusCode::INTERNAL_SERVER_ERROR,
            };
            refused(code, &error.to_string())
        }
    }
}

fn refused(code: StatusCode, what: &str) -> Response {
    (code, Json(json!({ "error": { "message": what } }))).into_response()
}
