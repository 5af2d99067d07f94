//! The faces of a node: what speaks to it from outside.
//!
//! `open` is what clients talk to, `admin` what operators look at, `desk` what they do with the store, `members` what
//! with other nodes (`operators` guards their orders); they share the public port. `local` is the engine's door, a Unix socket.

pub mod admin;
mod body;
pub mod desk;
mod errors;
mod keys;
pub mod local;
pub mod members;
pub mod open;
mod operators;
mod serve;

pub use keys::{Error as KeysError, Keys};
pub use serve::{serve, serve_relays};

/// What listens on the public port: the open API, and what operators look at. Where requests need a key, so does
/// whatever tells about them; the page itself and `/healthz` do not.
pub fn assemble(open: &open::Open, faces: axum::Router) -> axum::Router {
    let keys = open.keys().clone();
    let guarded =
        axum::middleware::from_fn(move |request: axum::extract::Request, next: axum::middleware::Next| {
            let path = request.uri().path();
            let tells = path == "/metrics" || path.starts_with("/api/");
            let refused = tells && keys.check_viewer(request.headers()).is_err();
            async move {
                if refused {
                    return operators::refused(http::StatusCode::UNAUTHORIZED, "an API key is needed");
                }
                next.run(request).await
            }
        });
    open.routes(open::Entry::Public).merge(faces.layer(guarded))
}
