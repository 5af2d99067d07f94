//! The invitation in the run folder: a token with which another box joins, for whoever may read this node's files.
//!
//! A token works once and for an hour, so a fresh one is written when one was used and before one is stale.

use std::time::Duration;

use super::{Parts, write_whole};

/// Well before the hour that a token lives.
const FRESH: Duration = Duration::from_secs(45 * 60);
const LOOK: Duration = Duration::from_millis(500);

/// Keeps `run/invite` usable until the node stops.
pub async fn keep(parts: Parts) {
    loop {
        let known = parts.cluster.members().len();
        let token = parts.cluster.invite();
        if let Err(error) = write_whole(&parts.places.invite(), format!("{token}\n").as_bytes()) {
            tracing::warn!(%error, "failed to write the invitation: no node can join until the next try");
        }
        let used = async {
            while parts.cluster.members().len() == known {
                tokio::time::sleep(LOOK).await;
            }
        };
        let _ = tokio::time::timeout(FRESH, used).await;
    }
}
