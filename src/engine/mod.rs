//! The engine's life: how vLLM is started, watched, ended, told apart from others, and checked before it serves.
//!
//! The keeper drives it; the node only reads [`View`] and calls [`fingerprint`](fingerprint()) and [`canary::run`].

pub mod canary;
pub mod child;
pub mod command;
pub mod events;
pub mod fingerprint;
pub mod generation;
pub mod guard;
mod http;
pub mod log;
pub mod machine;
mod own;
pub mod probe;
mod process;
pub mod provision;
pub mod pulse;
pub mod supervise;
pub mod view;

pub use fingerprint::{differences, fingerprint};
pub use http::is_own_request;
pub use own::Own;
pub use process::Identity;
pub use pulse::{Finger, Pulse};
pub use view::{Phase, View, watch_view};
