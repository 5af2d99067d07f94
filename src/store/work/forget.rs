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

    /// A row's key went while the row was being read. That is no damage.
    pub(super) fn unkeyed(&mut self, read: Read) {
        if let Some((key, place)) = &read.asked {
            self.parts.shared.index.lock().remove(&read.space, key, place);
        }
        self.read_failed(read, "no_key");
    }
}
