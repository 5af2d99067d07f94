//! What is known of a request's prompt before the engine has seen it: how many tokens it has, and how many of them
//! need not be computed.
//!
//! The router waits for it before it places the request, within a bound: knowing is worth a small share of what
//! computing the prompt would cost, and no more. What is found later still stands in the request's record.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use tokio::sync::Notify;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::ask::Endpoint;
use super::chain::Reach;

/// A prompt's exact tokens and what is there of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Foreseen {
    pub tokens: u32,
    /// What each node can take of it, this node first. Empty: no engine sits at the door, and nobody knows.
    pub reaches: Vec<(String, Reach)>,
    /// Whether what this node's engine has on its device is known by its own word; else it is not among `reaches`.
    pub device_known: bool,
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

/// What is known, or why nothing is.
pub type Known = Result<Foreseen, String>;

/// Filled once, by whoever finds out.
#[derive(Debug, Default)]
pub struct Slot {
    known: OnceLock<Known>,
    filled: Notify,
    /// Tells whoever finds out that nobody waits any more.
    _alive: Option<DropGuard>,
}

impl Slot {
    /// A slot whose content is known from the beginning.
    pub fn of(known: Known) -> Self {
        Self { known: known.into(), ..Self::default() }
    }

    /// A slot to be filled, and what ends when nobody cares any more.
    pub fn watched() -> (Arc<Self>, CancellationToken) {
        let gone = CancellationToken::new();
        let slot = Self { _alive: Some(gone.clone().drop_guard()), ..Self::default() };
        (Arc::new(slot), gone)
    }

    /// Only the first time counts.
    pub fn fill(&self, known: Known) {
        let _ = self.known.set(known);
        self.filled.notify_waiters();
    }

    pub fn get(&self) -> Option<&Known> {
        self.known.get()
    }

    /// What is known once it is filled, at most `limit` from now.
    pub async fn wait(&self, limit: Duration) -> Option<&Known> {
        // Counts from here on, so that nothing is missed between the look and the wait.
        let filled = self.filled.notified();
        if self.known.get().is_none() {
            let _ = tokio::time::timeout(limit, filled).await;
        }
        self.known.get()
    }
}

/// Somebody is finding out.
#[derive(Clone, Debug)]
pub struct Looking {
    pub slot: Arc<Slot>,
    /// What waiting for it is worth.
    pub patience: Duration,
}

/// Given an endpoint and a body. It may find out what takes a moment before it returns, and nothing longer.
/// None: too busy for that.
type Begin = dyn Fn(Endpoint, &Bytes) -> Option<Looking> + Send + Sync;

/// Begins to find out.
#[derive(Clone)]
pub struct Foresee(pub Arc<Begin>);

impl std::fmt::Debug for Foresee {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Foresee")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn who_waits_is_told_and_not_held_beyond_the_limit() {
        let slot = Arc::new(Slot::default());
        assert_eq!(slot.wait(Duration::ZERO).await, None);
        let (long, waiting) = (Duration::from_secs(3600), Arc::clone(&slot));
        let filling = async {
            tokio::task::yield_now().await;
            slot.fill(Err("why".into()));
            slot.fill(Err("late".into()));
        };
        let (got, ()) = tokio::join!(waiting.wait(long), filling);
        assert_eq!(got, Some(&Err("why".into())));
        assert_eq!(slot.wait(Duration::ZERO).await, Some(&Err("why".into())));
        assert_eq!(Slot::of(Err("x".into())).get(), Some(&Err("x".into())));
    }
}
