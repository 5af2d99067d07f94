//! Taking in a request's body, once, within a limit of size and of patience.

use std::time::Duration;

use axum::body::{Body, HttpBody};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;

use crate::router::Refusal;

/// A client that sends nothing for this long in the middle of a body has gone or means ill.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long a body that is refused is still read, so that the client gets to the answer: a connection closed over
/// unread bytes is reset, and the reset overtakes the answer.
const LINGER: Duration = Duration::from_secs(5);

/// Room made for a body before any of it has come; a client's word for its length is worth no more than this.
const ROOM: u64 = 1 << 20;

/// Reads a body of at most `limit` bytes.
pub(super) async fn read(body: &mut Body, limit: u64) -> Result<Bytes, Refusal> {
    let said = body.size_hint().lower();
    if said > limit {
        return Err(Refusal::TooLarge { limit });
    }
    let mut whole = BytesMut::new();
    loop {
        let frame = match tokio::time::timeout(PATIENCE, body.frame()).await {
            Err(_) => return Err(Refusal::NoBody(format!("nothing came for {} s", PATIENCE.as_secs()))),
            Ok(Some(Err(error))) => return Err(Refusal::NoBody(error.to_string())),
            Ok(Some(Ok(frame))) => frame,
            Ok(None) => return Ok(whole.freeze()),
        };
        let Ok(data) = frame.into_data() else { continue };
        if (whole.len() + data.len()) as u64 > limit {
            return Err(Refusal::TooLarge { limit });
        }
        if whole.is_empty() && body.is_end_stream() {
            return Ok(data);
        }
        if whole.is_empty() {
            whole.reserve(usize::try_from(said.min(ROOM)).unwrap_or_default());
        }
        whole.extend_from_slice(&data);
    }
}

/// Reads what is left of a refused body and forgets it. Returns whether it came to its end.
pub(super) async fn linger(mut body: Body, most: u64) -> bool {
    let mut left = most;
    let discard = async {
        while let Some(frame) = body.frame().await {
            let size = frame.ok().and_then(|f| f.data_ref().map(|data| data.len() as u64)).unwrap_or(left);
            if size >= left {
                return false;
            }
            left -= size;
        }
        true
    };
    tokio::time::timeout(LINGER, discard).await.unwrap_or(false)
}

/// The body of `/v1/responses` with an id in front of its first field; every other byte as it came. That endpoint
/// ignores the `X-Request-Id` header and takes the id out of the body, so this is the only way by which what the
/// engine reports can be told to belong to the request.
pub(super) fn with_request_id(body: &Bytes, id: &str) -> Bytes {
    let Some(open) = body.iter().position(|byte| *byte == b'{') else { return body.clone() };
    let (front, rest) = body.split_at(open + 1);
    let comma = if rest.trim_ascii_start().starts_with(b"}") { "" } else { "," };
    // The id has no character that JSON would escape: it was cleaned when it came in.
    [front, format!("\"request_id\":\"{id}\"{comma}").as_bytes(), rest].concat().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_goes_in_front_and_nothing_else_changes() {
        let with = |body: &'static str| with_request_id(&Bytes::from_static(body.as_bytes()), "resp_1");
        assert_eq!(with(" \n{ \"a\" : 1.0 }"), " \n{\"request_id\":\"resp_1\", \"a\" : 1.0 }");
        assert_eq!(with("{ }"), "{\"request_id\":\"resp_1\" }");
        for body in [" \n{ \"a\" : 1.0 }", "{}"] {
            assert!(
                serde_json::from_slice::<serde_json::Value>(&with(body)).unwrap()["request_id"].is_string()
            );
        }
    }
}
