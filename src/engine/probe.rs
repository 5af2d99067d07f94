//! Asks an engine whether it is ready, and later whether it still lives.

use std::time::Duration;

use bytes::Bytes;

use super::http::{Error, Http};

/// `/health` of a busy engine on a loaded CPU takes seconds; a dead one answers 503 or nothing.
const LIMIT: Duration = Duration::from_secs(10);

#[derive(Clone, Debug)]
pub struct Probe {
    http: Http,
    served_name: String,
}

impl Probe {
    pub fn new(url: &str, served_name: &str) -> Self {
        Self { http: Http::new(url), served_name: served_name.to_owned() }
    }

    /// Whether it answers and serves our model: somebody else may sit on its port. The error is for people.
    pub async fn ready(&self) -> Result<(), String> {
        self.alive().await?;
        let models = self.http.get_json("/v1/models", LIMIT).await.map_err(|e| format!("/v1/models {e}"))?;
        let names: Vec<&str> =
            models["data"].as_array().into_iter().flatten().filter_map(|m| m["id"].as_str()).collect();
        if self.served_name.is_empty() || names.contains(&self.served_name.as_str()) {
            return Ok(());
        }
        Err(format!("the server on the engine's port serves {names:?}, not `{}`", self.served_name))
    }

    /// Whether it answers at all.
    pub async fn alive(&self) -> Result<(), String> {
        match self.http.get("/health", LIMIT).await {
            Ok(_) => Ok(()),
            Err(error @ Error::Status { .. }) => Err(format!("/health {error}")),
            Err(error) => Err(error.to_string()),
        }
    }

    /// The token ids that it makes of `question`, a body of `/tokenize` as text. None: it refuses the question.
    pub async fn tokenize(&self, question: Bytes) -> Result<Option<Vec<u32>>, String> {
        let answer = match self.http.post("/tokenize", question, LIMIT).await {
            Ok(answer) => answer,
            Err(Error::Status { status, .. }) if status.is_client_error() => return Ok(None),
            Err(error) => return Err(error.to_string()),
        };
        let ids = answer["tokens"].as_array().ok_or("/tokenize answered without tokens")?;
        let ids: Option<Vec<u32>> =
            ids.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect();
        ids.map(Some).ok_or_else(|| "/tokenize answered with tokens that are no numbers".into())
    }

    /// Names of the models it serves.
    pub async fn models(&self) -> Vec<String> {
        let Ok(models) = self.http.get_json("/v1/models", LIMIT).await else { return Vec::new() };
        let data = models["data"].as_array().into_iter().flatten();
        data.filter_map(|m| m["id"].as_str().map(str::to_owned)).collect()
    }
}
