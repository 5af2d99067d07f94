//! Whether the index tells the truth: what was foretold of each prompt against what the engine says it had. Pure.
//!
//! One request proves little: something may come or go between the look and the engine's own. Many in a row that are
//! off prove that the index speaks of something else than the engine: another seed, another size of blocks, a publisher
//! that is not heard, an engine that caches nothing. That is said within [`LAST`] requests, and taken back when they
//! meet again.

use std::collections::VecDeque;

/// Requests that are looked at together.
pub const LAST: usize = 10;

/// So many of them must be off for an alarm, and may be off for none.
const OFF: usize = 8;
const MET: usize = 4;

/// What was foretold of one request, and what became of it. In tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    pub prompt: u32,
    pub foretold: u32,
    /// As the engine says.
    pub cached: u32,
}

/// What is known of the engine's device cache beside it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Device {
    /// Whether its events are heard.
    pub heard: bool,
    /// Blocks that events told of since the engine started.
    pub stored: u64,
    /// Tokens of a block as the events say, and as the engine said at the door. 0: not known.
    pub block_size: u32,
    pub row_tokens: u32,
}

/// The last requests of one engine.
#[derive(Clone, Debug, Default)]
pub struct Coverage {
    last: VecDeque<Seen>,
    parted: bool,
}

impl Coverage {
    /// One more request. `grain`: tokens of the largest row; less is no difference, and neither is a tenth of the prompt.
    /// True: they have parted now.
    pub fn add(&mut self, seen: Seen, grain: u32) -> bool {
        // Neither of them had anything to say.
        if seen.foretold.max(seen.cached) <= 2 * grain {
            return false;
        }
        if self.last.len() == LAST {
            self.last.pop_front();
        }
        self.last.push_back(seen);
        let off = self.last.iter().filter(|seen| seen.is_off(grain)).count();
        let before = self.parted;
        self.parted = if self.parted { off > MET } else { off >= OFF };
        self.parted && !before
    }

    /// Another engine.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// What is wrong and why, in a sentence. None: they meet.
    pub fn parted(&self, device: &Device) -> Option<String> {
        if !self.parted {
            return None;
        }
        let sum = |of: fn(&Seen) -> u32| self.last.iter().map(|seen| u64::from(of(seen))).sum::<u64>();
        let (foretold, cached) = (sum(|seen| seen.foretold), sum(|seen| seen.cached));
        let cause = if cached == 0 {
            "the engine reports no cached token at all: its prefix caching is off, its hash seed is another, or rows are refused"
        } else if cached < foretold {
            "rows that are known are not taken: loads come too late or fail, or the engine hashes otherwise"
        } else if !device.heard {
            "the engine's events are not heard, so what its device holds is not known"
        } else if device.stored == 0 {
            "the engine's events tell of no block: they are of another publisher, or switched off"
        } else if device.block_size > 0 && device.row_tokens > 0 && device.block_size != device.row_tokens {
            "blocks have another size in the engine's events than at the door"
        } else {
            "the engine's events have other hashes than the prompts here: its hash seed, adapter or salt is another"
        };
        let of = self.last.len();
        Some(format!(
            "of the last {of} prompts {foretold} tokens were foretold to be cached and {cached} were; {cause}"
        ))
    }
}

impl Seen {
    fn is_off(&self, grain: u32) -> bool {
        self.foretold.abs_diff(self.cached) > (self.prompt / 10).max(2 * grain)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRAIN: u32 = 16;

    fn seen(foretold: u32, cached: u32) -> Seen {
        Seen { prompt: 2000, foretold, cached }
    }

    fn heard() -> Device {
        Device { heard: true, stored: 9, block_size: 16, row_tokens: 16 }
    }

    #[test]
    fn they_part_within_ten_requests_and_meet_again() {
        let mut coverage = Coverage::default();
        for _ in 0..20 {
            assert!(!coverage.add(seen(1600, 1584), GRAIN));
        }
        let told: Vec<bool> = (0..LAST).map(|_| coverage.add(seen(1600, 0), GRAIN)).collect();
        assert_eq!(told.iter().filter(|told| **told).count(), 1, "said once: {told:?}");
        let why = coverage.parted(&heard()).unwrap();
        assert!(why.contains("16000 tokens were foretold to be cached and 0 were"), "{why}");
        (0..5).for_each(|_| _ = coverage.add(seen(1600, 1600), GRAIN));
        assert!(coverage.parted(&heard()).is_some(), "half of them is not enough");
        coverage.add(seen(1600, 1600), GRAIN);
        assert_eq!(coverage.parted(&heard()), None);
    }

    #[test]
    fn one_in_three_that_is_off_is_no_alarm_and_short_prompts_are_none() {
        let mut coverage = Coverage::default();
        for n in 0..60 {
            coverage.add(if n % 3 == 0 { seen(1600, 0) } else { seen(1600, 1600) }, GRAIN);
            coverage.add(Seen { prompt: 40, foretold: 32, cached: 0 }, GRAIN);
        }
        assert_eq!(coverage.parted(&heard()), None);
        let mut cold = Coverage::default();
        (0..60).for_each(|_| _ = cold.add(seen(0, 0), GRAIN));
        assert_eq!(cold.parted(&heard()), None, "nothing was there, and nothing was foretold");
    }

    #[test]
    fn the_cause_is_named() {
        let cause = |one: Seen, device: &Device| {
            let mut coverage = Coverage::default();
            (0..LAST).for_each(|_| _ = coverage.add(one, GRAIN));
            coverage.parted(device).unwrap()
        };
        for (one, device, why) in [
            (seen(1600, 0), heard(), "no cached token at all"),
            (seen(1600, 400), heard(), "are not taken"),
            (seen(0, 1600), Device { heard: false, ..heard() }, "are not heard"),
            (seen(0, 1600), Device { stored: 0, ..heard() }, "tell of no block"),
            (seen(0, 1600), Device { block_size: 32, ..heard() }, "another size"),
            (seen(0, 1600), heard(), "other hashes"),
        ] {
            let said = cause(one, &device);
            assert!(said.contains(why), "{why}: {said}");
        }
    }

    #[test]
    fn another_engine_begins_anew() {
        let mut coverage = Coverage::default();
        (0..LAST).for_each(|_| _ = coverage.add(seen(0, 1600), GRAIN));
        coverage.clear();
        assert_eq!(coverage.parted(&heard()), None);
    }
}
