//! Prompts that a box has been given and not computed yet, as a fluid: the first one is worked off at the box's speed, the
//! others wait behind it. Pure.
//!
//! A first token says that its prompt is done, whatever the fluid says; a request that ends without one leaves with it.

use crate::base::clock::Micros;

/// One prompt.
#[derive(Clone, Copy, Debug)]
struct Prompt {
    id: u64,
    seconds: f64,
}

/// The prompts of one box, in the order in which they came.
#[derive(Clone, Debug, Default)]
pub struct Backlog {
    prompts: Vec<Prompt>,
    /// Since when the first one is worked on.
    since: Micros,
}

impl Backlog {
    /// A prompt that takes so many seconds is given to the box.
    pub fn add(&mut self, id: u64, seconds: f64, now: Micros) {
        if self.prompts.is_empty() {
            self.since = now;
        }
        self.prompts.push(Prompt { id, seconds: seconds.max(0.0) });
    }

    /// Its first token has come, or nobody waits for it any more. One that is not there is no matter.
    pub fn remove(&mut self, id: u64, now: Micros) {
        let Some(nth) = self.prompts.iter().position(|prompt| prompt.id == id) else { return };
        if nth == 0 {
            self.since = now;
        } else {
            // Out of order, as short prompts pass long ones that are computed in chunks: the first one's work stands.
            let spent = now.since(self.since).as_secs_f64();
            self.prompts[0].seconds = (self.prompts[0].seconds - spent).max(0.0);
            self.since = now;
        }
        self.prompts.remove(nth);
    }

    /// Seconds until all of them are computed.
    pub fn seconds(&self, now: Micros) -> f64 {
        let mut spent = now.since(self.since).as_secs_f64();
        let mut left = 0.0;
        for prompt in &self.prompts {
            let of_it = spent.min(prompt.seconds);
            spent -= of_it;
            left += prompt.seconds - of_it;
        }
        left
    }

    pub fn count(&self) -> usize {
        self.prompts.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: f64) -> Micros {
        Micros((seconds * 1e6) as u64)
    }

    #[test]
    fn prompts_are_worked_off_in_their_order_and_leave_with_their_first_token() {
        let mut backlog = Backlog::default();
        assert_eq!(backlog.seconds(at(5.0)), 0.0);
        backlog.add(1, 4.0, at(10.0));
        backlog.add(2, 6.0, at(11.0));
        assert_eq!(backlog.seconds(at(11.0)), 9.0);
        assert_eq!(backlog.seconds(at(15.0)), 5.0, "the second one has begun");
        // The first one was done late: the second begins only now.
        backlog.remove(1, at(16.0));
        assert_eq!((backlog.seconds(at(16.0)), backlog.seconds(at(18.0))), (6.0, 4.0));
        backlog.remove(1, at(18.0));
        backlog.remove(2, at(18.0));
        assert_eq!((backlog.seconds(at(18.0)), backlog.count()), (0.0, 0));
    }

    #[test]
    fn one_that_leaves_out_of_order_takes_its_own_work_only() {
        let mut backlog = Backlog::default();
        backlog.add(1, 10.0, at(0.0));
        backlog.add(2, 1.0, at(0.0));
        backlog.remove(2, at(4.0));
        assert_eq!(backlog.seconds(at(4.0)), 6.0);
        assert_eq!(backlog.seconds(at(40.0)), 0.0);
    }
}
