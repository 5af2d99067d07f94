//! Orders: only whoever has the key that the node leaves for its own user may give them, also where the API needs no key.
//! A page in a browser on this machine can send requests to loopback, and clients of the API are not its operators.

use axum::Json;
use axum::extract::Request;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::Router;
use http::StatusCode;
use serde_json::json;

use super::Keys;

/// Closes routes to everybody else. `command` is what an operator runs instead.
pub fn only<S>(orders: Router<S>, key: &str, command: &'static str) -> Router<S>
where
    S: Clone + Send + Sync + 'static,
{
    let key = Keys::only("operator", key);
    orders.route_layer(middleware::from_fn(move |request: Request, next: Next| {
        let may = key.check(request.headers()).is_ok();
        async move {
            if may {
                return next.run(request).await;
            }
            let what = format!(
                "this needs the key in the node's run/node.json: run `{command}` on its own machine, as its user"
            );
            refused(StatusCode::FORBIDDEN, &what)
        }
    }))
}

/// Why something is not to be had, as the API's own errors say it.
pub fn refused(code: StatusCode, what: &str) -> Response {
    (code, Json(json!({ "error": { "message": what } }))).into_response()
}
