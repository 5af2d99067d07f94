//! How long a step takes: the model's speed as five numbers. Pure.
//!
//! ```text
//! step = Σ chunk (a·n + b·n·(c + n/2))  +  s0·(1 + κ·(B - 1))   when B > 0
//! ```
//!
//! n: tokens of a chunk, c: tokens computed before it, B: requests that get a word. Attention makes a chunk dearer the
//! later it comes, and every request that decodes makes the step longer for all of them.

use std::time::Duration;

/// The numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// Seconds for one token of a prompt, without attention.
    pub token_s: f64,
    /// Seconds for one token and one token before it.
    pub attention_s: f64,
    /// Seconds from one word to the next when one request decodes.
    pub word_s: f64,
    /// What each further request adds to that, as a share.
    pub kappa: f64,
}

impl Pace {
    /// Of `count` tokens after `before` others.
    pub fn chunk_s(&self, before: usize, count: usize) -> f64 {
        let (before, count) = (before as f64, count as f64);
        self.token_s * count + self.attention_s * count * (before + count / 2.0)
    }

    /// Of the words of `requests` requests.
    pub fn words_s(&self, requests: usize) -> f64 {
        match requests {
            0 => 0.0,
            n => self.word_s * (1.0 + self.kappa * (n - 1) as f64),
        }
    }
}

/// Engine time to time on the wall. `speed` is what faults leave of it.
pub fn on_the_wall(seconds: f64, clock: f64, speed: f64) -> Duration {
    Duration::try_from_secs_f64(seconds / clock / speed).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_costs_the_same_in_pieces_and_words_cost_by_their_number() {
        let pace = Pace { token_s: 0.001, attention_s: 1e-7, word_s: 0.0625, kappa: 0.08 };
        let whole = pace.chunk_s(100, 3000);
        assert!((whole - pace.chunk_s(100, 1000) - pace.chunk_s(1100, 2000)).abs() < 1e-9);
        assert!((whole - (3.0 + 1e-7 * 3000.0 * 1600.0)).abs() < 1e-9);
        assert_eq!((pace.words_s(0), pace.words_s(1)), (0.0, 0.0625));
        assert!((pace.words_s(11) - 0.0625 * 1.8).abs() < 1e-12);
        assert_eq!(on_the_wall(2.0, 20.0, 0.5), Duration::from_millis(200));
        assert_eq!(on_the_wall(f64::INFINITY, 1.0, 1.0), Duration::MAX);
    }
}
