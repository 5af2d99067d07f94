//! A refusal as an HTTP answer.

use axum::body::Body;
use http::header::{self, HeaderValue};
use http::{Response, StatusCode};

use crate::router::{Endpoint, REQUEST_ID, Refusal};

/// The answer to a request that was refused, in its endpoint's shape. `close` where its body was not read.
pub(super) fn response(endpoint: Endpoint, id: &str, refusal: &Refusal, close: bool) -> Response<Body> {
    let mut response = Response::new(Body::from(refusal.body(endpoint)));
    *response.status_mut() =
        StatusCode::from_u16(refusal.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Ok(id) = HeaderValue::from_str(id) {
        headers.insert(REQUEST_ID, id);
    }
    if let Some(seconds) = refusal.retry_after_s() {
        headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    if refusal == &Refusal::NoKey {
        headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    if close {
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}
