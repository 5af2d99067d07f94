//! The faces of a node: what speaks to it from outside.
//!
//! `open` is what clients talk to, `admin` what operators look at; both share the public port. `local` is the engine's
//! door, a Unix socket.

pub mod admin;
mod body;
mod errors;
mod keys;
pub mod local;
pub mod open;
mod serve;

pub use keys::{Error as KeysError, Keys};
pub use serve::{serve, serve_relays};

/// What listens on the public port: the open API, and what else the node serves there.
pub fn assemble(open: &open::Open, more: axum::Router) -> axum::Router {
    open.routes(open::Entry::Public).merge(more)
}
