//! How fast the engine prefills, learned from what passes: the deadline of a load follows from it.
//!
//! A request counts when it had the engine to itself and computed enough tokens that fixed costs do not matter. The
//! estimate follows slowly, so that one odd request changes no deadline by much.

use std::time::Duration;

/// Fewer computed tokens say more about fixed costs than about speed.
const TOKENS_MIN: u64 = 512;
/// Weight of a new measurement.
const WEIGHT: f64 = 0.2;

/// Tokens per second that the engine computes.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    tokens_per_s: f64,
    measured: bool,
}

impl Pace {
    /// `assumed` holds until the first measurement.
    pub fn new(assumed: u32) -> Self {
        Self { tokens_per_s: f64::from(assumed.max(1)), measured: false }
    }

    /// A request computed `tokens` and took `ttft` to its first token. Gives the new estimate when it changed.
    pub fn learn(&mut self, tokens: u64, ttft: Duration) -> Option<u32> {
        if tokens < TOKENS_MIN || ttft.is_zero() {
            return None;
        }
        let now = tokens as f64 / ttft.as_secs_f64();
        let weight = if self.measured { WEIGHT } else { 1.0 };
        self.tokens_per_s += weight * (now - self.tokens_per_s);
        self.measured = true;
        Some(self.tokens_per_s.clamp(1.0, f64::from(u32::MAX)) as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_measurement_replaces_the_assumption_and_later_ones_move_it() {
        let mut pace = Pace::new(1500);
        assert_eq!(pace.learn(1000, Duration::from_secs(1)), Some(1000));
        assert_eq!(pace.learn(2000, Duration::from_secs(1)), Some(1200));
    }

    #[test]
    fn short_prompts_say_nothing() {
        let mut pace = Pace::new(1500);
        assert_eq!(pace.learn(100, Duration::from_secs(1)), None);
        assert_eq!(pace.learn(5000, Duration::ZERO), None);
    }
}
