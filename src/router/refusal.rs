//! Why a request got no answer of an engine, and how each endpoint's clients are told.
//!
//! The catalogue of what the open API itself ever answers with an error: status, code, sentence. An engine's own
//! errors are not among them: they pass through untouched.

use bytes::Bytes;
use serde_json::json;

use super::ask::Endpoint;

/// One error, as the client reads it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("the request body is not valid JSON: {0}")]
    Malformed(String),
    #[error("the request body is larger than the limit of {limit} bytes (listen.max_body)")]
    TooLarge { limit: u64 },
    #[error("the request body did not arrive: {0}")]
    NoBody(String),
    #[error("the model `{asked}` does not exist; there are: {}", known.join(", "))]
    UnknownModel { asked: String, known: Vec<String> },
    #[error("there is no box `{asked}`, which x-spark-box asks for; there are: {}", known.join(", "))]
    UnknownBox { asked: String, known: Vec<String> },
    #[error("no API key, or one that is not known: send it as `Authorization: Bearer` or `x-api-key`")]
    NoKey,
    #[error("there is no `{method} {path}` here")]
    NoRoute { method: String, path: String },
    #[error("`{path}` does not take {method}")]
    WrongMethod { method: String, path: String },
    #[error("{max} requests are in flight here, which is the limit (listen.max_requests): try again")]
    Busy { max: u32 },
    #[error(
        "the line of requests that wait for an engine is full for class {class} (router.queue): try again in {seconds} s"
    )]
    QueueFull { class: &'static str, seconds: u32 },
    #[error(
        "{limit} requests with the API key `{key}` are in flight here, which is its limit: try again in {seconds} s"
    )]
    KeyBusy { key: String, limit: u32, seconds: u32 },
    #[error("x-spark-priority is interactive, normal or batch, not `{0}`")]
    UnknownClass(String),
    #[error("this box is about to stop and takes no new requests: try again")]
    Draining,
    #[error("no engine can serve this now: {0}")]
    NotReady(String),
    #[error("failed to reach the engine of {node}: {why}")]
    Unreachable { node: String, why: String },
    #[error("the engine of {node} broke off before its answer was whole: {why}")]
    BrokeOff { node: String, why: String },
    #[error("the engine of {node} has been silent for {seconds} s (router.idle_timeout_s): given up")]
    Silent { node: String, seconds: u64 },
}

impl Refusal {
    pub fn status(&self) -> u16 {
        match self {
            Self::Malformed(_) | Self::UnknownBox { .. } | Self::UnknownClass(_) => 400,
            Self::NoKey => 401,
            Self::UnknownModel { .. } | Self::NoRoute { .. } => 404,
            Self::WrongMethod { .. } => 405,
            Self::NoBody(_) => 408,
            Self::TooLarge { .. } => 413,
            Self::Busy { .. } | Self::QueueFull { .. } | Self::KeyBusy { .. } => 429,
            Self::Unreachable { .. } | Self::BrokeOff { .. } => 502,
            Self::Draining | Self::NotReady(_) => 503,
            Self::Silent { .. } => 504,
        }
    }

    /// A word for programs.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Malformed(_) => "invalid_json",
            Self::TooLarge { .. } => "request_too_large",
            Self::NoBody(_) => "request_timeout",
            Self::UnknownModel { .. } => "model_not_found",
            Self::UnknownBox { .. } => "box_not_found",
            Self::NoKey => "invalid_api_key",
            Self::NoRoute { .. } => "not_found",
            Self::WrongMethod { .. } => "method_not_allowed",
            Self::Busy { .. } => "too_many_requests",
            Self::QueueFull { .. } => "queue_full",
            Self::KeyBusy { .. } => "key_limit",
            Self::UnknownClass(_) => "unknown_priority",
            Self::Draining => "draining",
            Self::NotReady(_) => "engine_not_ready",
            Self::Unreachable { .. } => "engine_unreachable",
            Self::BrokeOff { .. } => "engine_broke_off",
            Self::Silent { .. } => "engine_silent",
        }
    }

    /// Seconds after which trying again makes sense. An engine takes minutes to load a model; the other node may
    /// be ready much sooner.
    pub fn retry_after_s(&self) -> Option<u32> {
        match self {
            Self::Busy { .. } => Some(1),
            // What the price says that the work ahead takes.
            Self::QueueFull { seconds, .. } | Self::KeyBusy { seconds, .. } => Some(*seconds),
            Self::Draining | Self::NotReady(_) => Some(5),
            _ => None,
        }
    }

    fn param(&self) -> Option<&'static str> {
        matches!(self, Self::UnknownModel { .. }).then_some("model")
    }

    /// OpenAI's and Anthropic's names for the kind of an error.
    fn kinds(&self) -> (&'static str, &'static str) {
        match self.status() {
            401 => ("authentication_error", "authentication_error"),
            404 => ("invalid_request_error", "not_found_error"),
            413 => ("invalid_request_error", "request_too_large"),
            429 => ("rate_limit_error", "rate_limit_error"),
            503 => ("service_unavailable_error", "overloaded_error"),
            502 | 504 => ("server_error", "api_error"),
            _ => ("invalid_request_error", "invalid_request_error"),
        }
    }

    /// The JSON body, in the shape that clients of `endpoint` read.
    pub fn body(&self, endpoint: Endpoint) -> Bytes {
        let (openai, anthropic) = self.kinds();
        let message = self.to_string();
        let value = match endpoint {
            Endpoint::Messages | Endpoint::CountTokens => {
                json!({"type": "error", "error": {"type": anthropic, "message": message}})
            }
            _ => json!({"error": {"message": message, "type": openai, "param": self.param(),
                "code": self.code()}}),
        };
        value.to_string().into()
    }

    /// The server-sent event that ends a stream which cannot go on. No `[DONE]` follows: it would make a client
    /// take what it has for the whole. The blank line in front ends an event that broke off in the middle.
    pub fn event(&self, endpoint: Endpoint) -> Bytes {
        match endpoint {
            Endpoint::Messages => {
                let data = String::from_utf8_lossy(&self.body(endpoint)).into_owned();
                format!("\n\nevent: error\ndata: {data}\n\n").into()
            }
            Endpoint::Responses | Endpoint::ResponseById => {
                let data = json!({"type": "error", "code": self.code(), "message": self.to_string(),
                    "param": null, "sequence_number": 0});
                format!("\n\nevent: error\ndata: {data}\n\n").into()
            }
            _ => {
                let data = String::from_utf8_lossy(&self.body(endpoint)).into_owned();
                format!("\n\ndata: {data}\n\n").into()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn each_endpoint_is_told_in_its_own_shape() {
        let refusal = Refusal::UnknownModel { asked: "x".into(), known: vec!["a".into(), "b".into()] };
        let read = |endpoint| serde_json::from_slice::<Value>(&refusal.body(endpoint)).unwrap();
        let message = "the model `x` does not exist; there are: a, b";
        assert_eq!(
            read(Endpoint::Chat),
            json!({"error": {"message": message, "type": "invalid_request_error", "param": "model",
                "code": "model_not_found"}})
        );
        assert_eq!(
            read(Endpoint::Messages),
            json!({"type": "error", "error": {"type": "not_found_error", "message": message}})
        );
    }

    #[test]
    fn events_are_whole_and_never_say_done() {
        let refusal = Refusal::BrokeOff { node: "a".into(), why: "reset\nby peer".into() };
        for endpoint in Endpoint::ALL {
            let event = String::from_utf8(refusal.event(endpoint).to_vec()).unwrap();
            assert!(event.starts_with("\n\n") && event.ends_with("\n\n") && !event.contains("[DONE]"));
            let data = event.lines().find_map(|line| line.strip_prefix("data: ")).unwrap();
            assert!(serde_json::from_str::<Value>(data).unwrap().to_string().contains("broke off"));
        }
    }
}
