//! The side that waits for a fetch: when it is over, and what that means for what still flies.
//!
//! However it ends, by all its rows, by its deadline, with the peer, or because its own caller went away: the gates are
//! closed before anybody learns of it, and the peer is told that nobody waits. Reads of the peer's memory that a device
//! carries out are waited for: who drops a fetch in the middle of some blocks until they have ended, within a second.

use std::sync::Arc;

use super::Reason;
use super::piece::Fetch;
use super::pool::Pool;
use crate::base::block::RowItem;
use crate::base::clock::Micros;
use crate::base::frame::Outcome;
use crate::base::mutant::{self, Mutant};
use crate::base::rows::Rows;

/// A fetch under way.
#[derive(Debug)]
pub struct Waits {
    fetch: Arc<Fetch>,
    pool: Arc<Pool>,
}

/// Why a fetch is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// Every row came, or is known not to come.
    Settled,
    /// The rest is given up.
    GivenUp(Reason),
}

impl Waits {
    /// Lines up `items` to be fetched into their rows, in their order.
    pub fn new(pool: &Arc<Pool>, rows: &Arc<Rows>, items: &[RowItem], deadline: Option<Micros>) -> Self {
        Self { fetch: pool.fetch(rows, items, deadline), pool: pool.clone() }
    }

    #[cfg(test)]
    pub fn number(&self) -> u64 {
        self.fetch.id
    }

    /// Ends when every row is settled. Cancel-safe.
    pub async fn settled(&self) {
        self.fetch.settled().await;
    }

    /// Whether the fetch is over now; `closed`: the peer is gone.
    pub fn over(&self, now: Micros, closed: bool) -> Option<Over> {
        if self.fetch.is_settled() {
            Some(Over::Settled)
        } else if closed {
            Some(Over::GivenUp(Reason::Connection))
        } else {
            let late = self.fetch.deadline.is_some_and(|deadline| deadline <= now);
            (late && !mutant::on(Mutant::LateFetch)).then_some(Over::GivenUp(Reason::Deadline))
        }
    }

    /// Closes the gates and says what became of each row. From here on nothing but a device that reads touches the rows:
    /// see [`Waits::landed`].
    pub fn end(&self, over: Over) -> Vec<Outcome> {
        if let Over::GivenUp(reason) = over {
            self.pool.failed(reason, self.fetch.fail_rest());
            self.pool.cancel(&self.fetch);
        }
        self.fetch.close()
    }

    /// Ends when no device writes any of the rows. Cancel-safe.
    pub async fn landed(&self) {
        self.fetch.landed().await;
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        let given_up = !self.fetch.is_settled();
        self.fetch.close();
        if given_up {
            self.pool.cancel(&self.fetch);
        }
        self.fetch.wait_landed();
    }
}
