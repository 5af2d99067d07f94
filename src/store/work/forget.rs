//! Forgetting an owner: the keys go first, in memory and on the drive, then the rows that nobody can open any more.

use super::super::Error;
use super::super::Forgotten;
use super::{Event, ForgetAnswer, Read, Work};

impl Work {
    pub(super) fn forget_owner(&mut self, owner: String, answer: ForgetAnswer) {
        if self.closing.is_some() {
            let _ = answer.send(Err(Error::Closed));
            return;
        }
        self.with_hands += 1;
        let (seals, events) = (self.parts.seals.clone(), self.parts.events.clone());
        self.parts.hands.give(move || {
            let (keys, outcome) = seals.forget(&owner);
            let _ = events.send(Event::Forgot(keys, outcome, answer));
        });
    }

    /// Keys are gone: so is what they opened, at once. Its room is given back as that of dropped rows is.
    pub(super) fn forgot(&mut self, keys: &[u32], outcome: std::io::Result<()>, answer: ForgetAnswer) {
        let gone = self.parts.shared.index.lock().forget_sealed(keys);
        let rows = gone.len() as u64;
        self.dropped(&gone);
        tracing::info!(keys = keys.len(), rows, "an owner was forgotten");
        // Figures first: whoever has the answer finds them.
        self.publish();
        let told = Forgotten { keys: keys.len() as u64, rows };
        let _ = answer.send(match outcome {
            Ok(()) => Ok(told),
            Err(error) => Err(Error::KeyNotDestroyed(error)),
        });
    }

    /// Keys that no row needs any more go, unless an engine of their namespace is here, whose next row would want them.
    /// A row that goes leaves the index before its key leaves the table, and an engine that comes is known before its
    /// first row: neither can meet a key that is going.
    pub(super) fn prune_keys(&mut self) {
        let mut unused = std::mem::take(&mut self.unused_keys);
        {
            let index = self.parts.shared.index.lock();
            unused.retain(|&key| !index.needs_key(key));
        }
        let areas = &self.areas;
        let gone = self
            .parts
            .seals
            .retire(&unused, |namespace| areas.values().any(|area| area.space.namespace == *namespace));
        unused.retain(|key| !gone.contains(key));
        self.unused_keys = unused;
        if gone.is_empty() {
            return;
        }
        tracing::info!(keys = gone.len(), "keys of old namespaces go: no row is left under them");
        self.with_hands += 1;
        let (seals, events) = (self.parts.seals.clone(), self.parts.events.clone());
        self.parts.hands.give(move || {
            let _ = events.send(Event::Pruned(seals.destroy_retired()));
        });
    }

    /// A row's key went while the row was being read. That is no damage.
    pub(super) fn unkeyed(&mut self, read: Read) {
        if let Some((key, place)) = &read.asked {
            self.parts.shared.index.lock().remove(&read.space, key, place);
        }
        self.read_failed(read, "no_key");
    }
}
