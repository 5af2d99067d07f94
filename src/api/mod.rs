//! The HTTP faces. `open` is what clients talk to; the other faces are merged into the same port.

mod body;
mod errors;
mod keys;
pub mod open;
mod serve;

pub use keys::{Error as KeysError, Keys};
pub use serve::{serve, serve_relays};

/// What listens on the public port: the open API, and what else the node serves there.
pub fn assemble(open: &open::Open, more: axum::Router) -> axum::Router {
    open.routes(open::Entry::Public).merge(more)
}
//! The faces of a node: what speaks to it from outside.

pub mod local;
//! Faces: what others reach over HTTP.

pub mod admin;
