//! What is known of a request's prompt before the engine has seen it: how many tokens it has, and how many of them
//! need not be computed. It is found out beside the request, never in its way, and so far only written down: its
//! record sets it beside what the engine says in the end.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;

use super::ask::Endpoint;
use super::chain::Reach;

/// A prompt's exact tokens and what is there of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Foreseen {
    pub tokens: u32,
    /// What each node can take of it, this node first. Empty: no engine sits at the door, and nobody knows.
    pub reaches: Vec<(String, Reach)>,
    /// Bytes of the prompt that were not seen before.
    pub fresh_bytes: u32,
    /// What finding it out took.
    pub took: Duration,
}

impl Foreseen {
    /// What `node` can take of it.
    pub fn reach(&self, node: &str) -> Option<Reach> {
        self.reaches.iter().find(|(name, _)| name == node).map(|(_, reach)| *reach)
    }
}

/// Filled when it is known, or with why it is not.
pub type Slot = Arc<OnceLock<Result<Foreseen, String>>>;

/// Given an endpoint and a body. None: too busy for that.
type Begin = dyn Fn(Endpoint, &Bytes) -> Option<Slot> + Send + Sync;

/// Begins to find out.
#[derive(Clone)]
pub struct Foresee(pub Arc<Begin>);

impl std::fmt::Debug for Foresee {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Foresee")
    }
}
