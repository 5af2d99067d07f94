//! The nodes that this one knows, and how an operator takes one out.
//!
//! Looking is for whoever may look at the node; forgetting is an order ([`super::operators`]).

use axum::Json;
use axum::extract::State as With;
use axum::response::{IntoResponse, Response};
use axum::routing::{Router, get, post};
use http::StatusCode;
use serde::{Deserialize, Serialize};

use super::operators::{self, refused};
use crate::cluster::{Cluster, ForgetError, Member};

/// What the routes work with.
#[derive(Clone, Debug)]
pub struct Members(Cluster);

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
    pub fn new(cluster: Cluster) -> Self {
        Self(cluster)
    }

    /// The routes, to be merged with those of [`super::admin`]. Orders need `key`.
    pub fn routes(self, key: &str) -> Router {
        let orders = Router::new().route("/api/v1/cluster/forget", post(forget));
        Router::new()
            .route("/api/v1/cluster", get(list))
            .merge(operators::only(orders, key, "spark-kv cluster"))
            .with_state(self)
    }
}

async fn list(With(members): With<Members>) -> Json<Vec<Member>> {
    let without_note = |member| Member { note: serde_json::Value::Null, ..member };
    Json(members.0.members().into_iter().map(without_note).collect())
}

async fn forget(With(members): With<Members>, Json(named): Json<Named>) -> Response {
    match members.0.forget(&named.node).await {
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
