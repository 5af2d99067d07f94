//! The engine's life: how vLLM is started, watched, ended, told apart from others, and checked before it serves.
//!
//! The keeper drives it; the node only reads [`View`] and calls [`fingerprint`] and [`canary`].

pub mod fingerprint;
mod process;
pub mod view;

pub use fingerprint::{differences, fingerprint};
pub use process::Identity;
pub use view::{Phase, View, watch_view};
