//! One short HTTP exchange with the engine on loopback: bounded in time and size.

use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;

/// Longest answer that is read: a list of models or a completion of some tokens with log-probabilities.
const ANSWER_MAX: usize = 4 << 20;

/// Id of every request that the node makes for itself.
const OWN: &str = "spark-kv-own";

/// Whether the engine's id of a request says that the node made it itself (the canary's, mostly).
pub fn is_own_request(engine_id: &str) -> bool {
    engine_id.strip_prefix("cmpl-").is_some_and(|id| id.starts_with(OWN))
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no answer within {} s", .0.as_secs())]
    Late(Duration),
    #[error("failed to reach it: {0}")]
    Unreachable(String),
    #[error("answered {status}: {body}")]
    Status { status: StatusCode, body: String },
    #[error("answered something that is not JSON")]
    NotJson,
}

/// Client of one engine. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Http {
    client: Client<HttpConnector, Full<Bytes>>,
    url: String,
}

impl Http {
    /// `url` without a path, such as `http://127.0.0.1:8001`.
    pub fn new(url: &str) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(Duration::from_secs(5)));
        let client = Client::builder(TokioExecutor::new()).build(connector);
        Self { client, url: url.trim_end_matches('/').to_owned() }
    }

    pub fn is_of(&self, url: &str) -> bool {
        self.url == url.trim_end_matches('/')
    }

    pub async fn get(&self, path: &str, limit: Duration) -> Result<Bytes, Error> {
        self.exchange(Method::GET, path, Bytes::new(), limit).await
    }

    pub async fn get_json(&self, path: &str, limit: Duration) -> Result<serde_json::Value, Error> {
        serde_json::from_slice(&self.get(path, limit).await?).map_err(|_| Error::NotJson)
    }

    pub async fn post_json(
        &self,
        path: &str,
        body: Option<&serde_json::Value>,
        limit: Duration,
    ) -> Result<serde_json::Value, Error> {
        let body = body.map(|body| Bytes::from(body.to_string())).unwrap_or_default();
        self.post(path, body, limit).await
    }

    /// Posts a document as it is written.
    pub async fn post(&self, path: &str, body: Bytes, limit: Duration) -> Result<serde_json::Value, Error> {
        let answer = self.exchange(Method::POST, path, body, limit).await?;
        if answer.is_empty() {
            return Ok(serde_json::Value::Null);
        }
        serde_json::from_slice(&answer).map_err(|_| Error::NotJson)
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
        limit: Duration,
    ) -> Result<Bytes, Error> {
        tokio::time::timeout(limit, self.exchange_unbounded(method, path, body))
            .await
            .unwrap_or(Err(Error::Late(limit)))
    }

    async fn exchange_unbounded(&self, method: Method, path: &str, body: Bytes) -> Result<Bytes, Error> {
        let unreachable = |e: &dyn std::error::Error| {
            // The outermost error only says that sending failed; the innermost says why.
            let mut cause = e;
            while let Some(inner) = cause.source() {
                cause = inner;
            }
            Error::Unreachable(cause.to_string())
        };
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.url))
            .header("content-type", "application/json")
            .header("x-request-id", OWN)
            .body(Full::new(body))
            .map_err(|e| unreachable(&e))?;
        let answer = self.client.request(request).await.map_err(|e| unreachable(&e))?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), ANSWER_MAX)
            .collect()
            .await
            .map_err(|e| Error::Unreachable(e.to_string()))?
            .to_bytes();
        if status.is_success() {
            return Ok(body);
        }
        let body = String::from_utf8_lossy(&body[..body.len().min(300)]).into_owned();
        Err(Error::Status { status, body })
    }
}
