//! Every task of the process: its kind says what its end means. One table to review instead of many spawn sites.
//!
//! A request that panics ends alone. A loop that owns state and ends, by error or by panic, ends the node: the
//! keeper starts a whole one again, which is safer than half of one. What still runs when the node stops is either
//! awaited or cut off, by kind.

use std::future::Future;
use std::time::Duration;

use futures_util::FutureExt;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// What a task is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Owns state that others rely on. Ends the node when it ends before it is asked to. Awaited at stop.
    Owner,
    /// Serves one connection or one request. Its failure is logged. Cut off at stop after the grace.
    Serving,
    /// Housekeeping that may end at any time. Cut off at stop.
    Chore,
}

/// Spawns tasks and ends them. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Tasks {
    tracker: TaskTracker,
    stopping: CancellationToken,
    failed: CancellationToken,
}

impl Tasks {
    pub fn new() -> Self {
        Self::default()
    }

    /// Runs `work` on the runtime. `name` appears in logs.
    pub fn spawn<F>(&self, kind: Kind, name: &'static str, work: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let Self { stopping, failed, .. } = self.clone();
        let work = std::panic::AssertUnwindSafe(work).catch_unwind();
        self.tracker.spawn(async move {
            let outcome = match kind {
                Kind::Owner | Kind::Serving => work.await,
                Kind::Chore => match stopping.run_until_cancelled(work).await {
                    Some(outcome) => outcome,
                    None => return,
                },
            };
            match (kind, outcome) {
                (Kind::Owner, Ok(())) if stopping.is_cancelled() => {}
                (Kind::Owner, outcome) => {
                    let how = if outcome.is_ok() { "ended" } else { "panicked" };
                    tracing::error!(task = name, how, "a task that others rely on is gone; the node ends");
                    failed.cancel();
                }
                (_, Err(_)) => tracing::error!(task = name, "task panicked"),
                (_, Ok(())) => {}
            }
        });
    }

    /// Ends when the node is to stop. Owners and long servings watch it.
    pub fn stopping(&self) -> CancellationToken {
        self.stopping.clone()
    }

    /// Ends when an owner is gone: the node cannot go on.
    pub fn failed(&self) -> CancellationToken {
        self.failed.clone()
    }

    /// Asks everybody to stop and waits for at most `grace`. Returns how many tasks were still there.
    pub async fn stop(&self, grace: Duration) -> usize {
        self.stopping.cancel();
        self.tracker.close();
        let _ = tokio::time::timeout(grace, self.tracker.wait()).await;
        self.tracker.len()
    }
}

/// Awaits `work` and says, every `pause`, that it is still awaited: nothing waits silently.
pub async fn log_slow<F: Future>(what: &str, pause: Duration, work: F) -> F::Output {
    tokio::pin!(work);
    let begin = tokio::time::Instant::now();
    loop {
        match tokio::time::timeout(pause, &mut work).await {
            Ok(output) => return output,
            Err(_) => tracing::warn!(what, waited_s = begin.elapsed().as_secs(), "still waiting"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_owner_that_panics_fails_the_node_and_a_request_does_not() {
        let tasks = Tasks::new();
        tasks.spawn(Kind::Serving, "request", async { panic!("one request") });
        tokio::task::yield_now().await;
        assert!(!tasks.failed().is_cancelled());
        tasks.spawn(Kind::Owner, "store", async { panic!("the store") });
        tasks.failed().cancelled().await;
    }

    #[tokio::test]
    async fn stop_waits_for_owners_and_cuts_chores() {
        let tasks = Tasks::new();
        let stopping = tasks.stopping();
        tasks.spawn(Kind::Owner, "owner", async move { stopping.cancelled().await });
        tasks.spawn(Kind::Chore, "chore", std::future::pending());
        assert_eq!(tasks.stop(Duration::from_secs(5)).await, 0);
        assert!(!tasks.failed().is_cancelled());
    }
}
