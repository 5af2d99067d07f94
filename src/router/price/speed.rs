//! How fast a box is, learned from what the router sees of its requests. Pure.
//!
//! Two small least-squares fits with forgetting, each kept within bounds: the time to a first token against the tokens
//! that were computed for it, and the time between tokens against the requests that ran beside. A wrong coefficient sends
//! everything to one box, so what was foretold is set against what happened: while the two part, the learned speeds are
//! not to be used.

use serde::{Deserialize, Serialize};

use super::CHUNK;

/// Coefficients of one box.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Speeds {
    /// Tokens of a prompt computed in a second.
    pub rho: f64,
    /// Seconds for each token computed, for each token before it: attention.
    pub a2: f64,
    /// Seconds of a decode step of one request.
    pub s0: f64,
    /// By which share of `s0` a step is longer for each further request.
    pub kappa: f64,
    /// Probability that a block which is pushed out now is asked for again.
    pub eviction: f64,
}

impl Default for Speeds {
    /// A DGX Spark with a large hybrid model: an assumption until a box has learned its own.
    fn default() -> Self {
        Self { rho: 1700.0, a2: 0.0, s0: 0.0625, kappa: 0.08, eviction: 0.2 }
    }
}

impl Speeds {
    /// Those of a box that computes so many tokens of a prompt in a second.
    pub fn of_pace(tokens_per_s: f64) -> Self {
        Self { rho: tokens_per_s.max(1.0), ..Self::default() }
    }

    /// Seconds to compute `u` tokens behind `c` that are there, while `n` others run.
    pub fn prefill_s(&self, u: f64, c: f64, n: f64) -> f64 {
        let chunks = if n > 0.0 { (u / CHUNK).ceil() * self.step_s(n) } else { 0.0 };
        u / self.rho.max(1.0) + self.a2 * u * (c + u / 2.0) + chunks
    }

    /// Seconds of a decode step with so many requests. None: none.
    pub fn step_s(&self, requests: f64) -> f64 {
        if requests < 1.0 { 0.0 } else { self.s0 * (1.0 + self.kappa * (requests - 1.0)) }
    }

    /// As another node says, within what any box can be: its word is used in prices, and one below nothing would
    /// draw every request there.
    #[must_use]
    pub fn sane(self) -> Self {
        let prior = Self::default();
        // What is no number is taken for what is assumed.
        let within = |said: f64, least: f64, most: f64, else_: f64| match said.is_nan() {
            true => else_,
            false => said.clamp(least, most),
        };
        Self {
            rho: within(self.rho, 1.0, 1e7, prior.rho),
            a2: within(self.a2, 0.0, 1e-3, prior.a2),
            s0: within(self.s0, 1e-5, 60.0, prior.s0),
            kappa: within(self.kappa, 0.0, 1.0, prior.kappa),
            eviction: within(self.eviction, 0.0, 1.0, prior.eviction),
        }
    }

    /// The same box with its clock at this share of what it was.
    #[must_use]
    pub fn at_clock(&self, share: f64) -> Self {
        let share = share.clamp(0.05, 1.0);
        Self { rho: self.rho * share, a2: self.a2 / share, s0: self.s0 / share, ..*self }
    }
}

/// Least squares over `N` features, older samples counting less.
#[derive(Clone, Copy, Debug)]
struct Fitting<const N: usize> {
    weights: [f64; N],
    /// Inverse of what the features have said so far.
    spread: [[f64; N]; N],
    /// How far each weight may be off at most, squared.
    doubt: [f64; N],
}

/// What a sample counts after the next one: the last ten or so decide, so that a box that throttles is believed soon.
const FORGETTING: f64 = 0.9;

impl<const N: usize> Fitting<N> {
    /// `doubt`: how far each weight may be off.
    fn new(weights: [f64; N], doubt: [f64; N]) -> Self {
        let mut spread = [[0.0; N]; N];
        for (n, doubt) in doubt.into_iter().enumerate() {
            spread[n][n] = doubt * doubt;
        }
        Self { weights, spread, doubt: doubt.map(|doubt| doubt * doubt) }
    }

    fn learn(&mut self, features: [f64; N], seen: f64) {
        let mut gain: [f64; N] =
            std::array::from_fn(|n| (0..N).map(|m| self.spread[n][m] * features[m]).sum());
        let along: f64 = (0..N).map(|n| features[n] * gain[n]).sum();
        // Samples are good to a tenth of what they say.
        let noise = (0.1 * seen).powi(2).max(1e-9);
        gain.iter_mut().for_each(|gain| *gain /= FORGETTING * noise + along);
        let foretold: f64 = (0..N).map(|n| self.weights[n] * features[n]).sum();
        let row: [f64; N] = std::array::from_fn(|m| (0..N).map(|n| features[n] * self.spread[n][m]).sum());
        for ((weight, spread), gain) in self.weights.iter_mut().zip(&mut self.spread).zip(gain) {
            *weight += gain * (seen - foretold);
            for (spread, row) in spread.iter_mut().zip(row) {
                *spread = (*spread - gain * row) / FORGETTING;
            }
        }
        // What the samples say nothing of is forgotten no further than to where it began.
        for n in 0..N {
            let shrink = (self.doubt[n] / self.spread[n][n].max(1e-300)).min(1.0).sqrt();
            for m in 0..N {
                self.spread[n][m] *= shrink;
                self.spread[m][n] *= shrink;
            }
        }
    }
}

/// A prompt that was computed, as it was seen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prefill {
    /// Tokens that were computed, and those that were there before them.
    pub uncached: u32,
    pub cached: u32,
    /// Requests that ran beside.
    pub running: u32,
    /// Seconds from when it was begun to its first token, without what was loaded.
    pub seconds: f64,
}

/// Words that were said, as they were seen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decode {
    /// After the first.
    pub tokens: u64,
    /// Requests that ran, this one among them, on average.
    pub running: f64,
    pub seconds: f64,
}

/// Shorter prompts say more about everything else than about computing.
const PREFILL_MIN: u32 = 512;

/// Fewer words say little.
const WORDS_MIN: u64 = 8;

/// How far a learned speed may be from what was assumed. Wide: the assumption may be of another model altogether, and
/// what leads astray within it is noticed as drift.
const SLOWEST: f64 = 0.01;
const FASTEST: f64 = 100.0;

/// What a new residual counts.
const RESIDUAL: f64 = 0.1;

/// Foretold and seen part by this share: the learned speeds are not used until they are within the second.
const DRIFTS: f64 = 0.3;
const HEALED: f64 = 0.15;

/// Below this many seconds other things than prompts decide.
const SHORT_S: f64 = 0.1;

/// Prompts that have to have taught before foretelling is judged.
const TAUGHT: u32 = 5;

/// Residuals before anything is said about them.
const JUDGED: u32 = 20;

/// What one box has taught.
#[derive(Clone, Copy, Debug)]
pub struct Learner {
    prior: Speeds,
    prefill: Fitting<2>,
    /// The same without attention: what holds where the first finds less than none of it.
    linear: Fitting<1>,
    decode: Fitting<2>,
    prefills: u32,
    decodes: u32,
    /// Seen less foretold, as a share of seen, and its size.
    bias: f64,
    error: f64,
    residuals: u32,
    drifted: bool,
}

impl Learner {
    pub fn new(prior: Speeds) -> Self {
        let per_token = 1.0 / prior.rho;
        Self {
            prior,
            prefill: Fitting::new([per_token, prior.a2], [per_token, per_token / 50_000.0]),
            linear: Fitting::new([per_token], [per_token]),
            decode: Fitting::new([prior.s0, prior.s0 * prior.kappa], [prior.s0, prior.s0]),
            prefills: 0,
            decodes: 0,
            bias: 0.0,
            error: 0.0,
            residuals: 0,
            drifted: false,
        }
    }

    /// A prompt was computed with no other one before it.
    pub fn on_prefill(&mut self, seen: Prefill) {
        let Prefill { uncached, cached, running, seconds } = seen;
        if uncached < PREFILL_MIN || !seconds.is_finite() || seconds <= 0.0 {
            return;
        }
        let (u, c, n) = (f64::from(uncached), f64::from(cached), f64::from(running));
        let steps = if running > 0 { (u / CHUNK).ceil() * self.speeds().step_s(n) } else { 0.0 };
        let alone = (seconds - steps).max(0.1 * seconds);
        self.prefill.learn([u, u * (c + u / 2.0)], alone);
        self.linear.learn([u], alone);
        self.prefills += 1;
    }

    /// Words were said.
    pub fn on_decode(&mut self, seen: Decode) {
        let Decode { tokens, running, seconds } = seen;
        if tokens < WORDS_MIN || !seconds.is_finite() || seconds <= 0.0 || running < 1.0 {
            return;
        }
        self.decode.learn([1.0, running - 1.0], seconds / tokens as f64);
        self.decodes += 1;
    }

    /// A first token came after `seen` seconds, and `foretold` had been said.
    pub fn on_first_token(&mut self, foretold: f64, seen: f64) {
        let is_said = foretold.is_finite() && seen.is_finite() && seen.max(foretold) >= SHORT_S;
        if !is_said || seen <= 0.0 || self.prefills < TAUGHT {
            return;
        }
        let residual = ((seen - foretold) / seen.max(SHORT_S)).clamp(-3.0, 1.0);
        self.bias += RESIDUAL * (residual - self.bias);
        self.error += RESIDUAL * (residual.abs() - self.error);
        self.residuals = self.residuals.saturating_add(1);
        let limit = if self.drifted { HEALED } else { DRIFTS };
        self.drifted = self.residuals >= JUDGED && self.bias.abs() > limit;
    }

    /// What was learned, within bounds.
    pub fn speeds(&self) -> Speeds {
        let prior = &self.prior;
        let bounded = |learned: f64, prior: f64| learned.clamp(prior * SLOWEST, prior * FASTEST);
        let (per_token, a2) = match self.prefill.weights {
            [per_token, a2] if per_token > 0.0 && a2 >= 0.0 => (per_token, a2),
            _ => (self.linear.weights[0], 0.0),
        };
        let [s0, more] = self.decode.weights;
        let rho = if per_token > 0.0 { 1.0 / per_token } else { prior.rho * FASTEST };
        let s0 = 1.0 / bounded(1.0 / s0.max(1e-9), 1.0 / prior.s0);
        Speeds {
            rho: bounded(rho, prior.rho),
            a2: a2.clamp(0.0, 1.0 / prior.rho / 10_000.0),
            s0,
            kappa: (more / s0).clamp(0.0, 1.0),
            eviction: prior.eviction,
        }
    }

    /// Whether enough was seen to say how fast this box is.
    pub fn is_taught(&self) -> bool {
        self.prefills >= TAUGHT && self.decodes >= TAUGHT
    }

    /// Seen less foretold as a share of seen, on average, and how large it is either way.
    pub fn residual(&self) -> (f64, f64) {
        (self.bias, self.error)
    }

    /// Foretold and seen have parted.
    pub fn has_drifted(&self) -> bool {
        self.drifted
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn taught(real: Speeds, samples: u32) -> Learner {
        let mut learner = Learner::new(Speeds::default());
        for n in 0..samples {
            let (uncached, cached, running) = (600 + n * 997 % 30_000, n * 577 % 40_000, n % 5);
            let (u, c, b) = (f64::from(uncached), f64::from(cached), f64::from(running));
            let noise = 1.0 + 0.1 * f64::from(n as i32 % 3 - 1);
            learner.on_prefill(Prefill {
                uncached,
                cached,
                running,
                seconds: noise * real.prefill_s(u, c, b),
            });
            let seconds = noise * 100.0 * real.step_s(b + 1.0);
            learner.on_decode(Decode { tokens: 100, running: b + 1.0, seconds });
        }
        learner
    }

    #[test]
    fn what_another_node_says_is_kept_within_what_a_box_can_be() {
        let usual = Speeds { rho: 900.0, a2: 1e-8, s0: 0.11, kappa: 0.05, eviction: 0.2 };
        assert_eq!(usual.sane(), usual);
        let odd = Speeds { rho: f64::NAN, a2: f64::INFINITY, s0: -1.0, kappa: 9.0, eviction: -1.0 }.sane();
        assert_eq!((odd.rho, odd.a2, odd.s0, odd.kappa, odd.eviction), (1700.0, 1e-3, 1e-5, 1.0, 0.0));
    }

    #[test]
    fn a_box_teaches_its_own_speeds() {
        let real = Speeds { rho: 900.0, a2: 1e-8, s0: 0.11, kappa: 0.05, eviction: 0.2 };
        assert!(!taught(real, TAUGHT - 1).is_taught() && taught(real, TAUGHT).is_taught());
        let learned = taught(real, 60).speeds();
        let near =
            |a: f64, b: f64, within: f64| assert!((a / b - 1.0).abs() < within, "{a} for {b}: {learned:?}");
        near(learned.rho, real.rho, 0.1);
        near(learned.s0, real.s0, 0.05);
        near(learned.prefill_s(20_000.0, 20_000.0, 2.0), real.prefill_s(20_000.0, 20_000.0, 2.0), 0.05);
        near(learned.step_s(5.0), real.step_s(5.0), 0.05);
    }

    #[test]
    fn a_box_that_slows_is_believed_within_twenty_answers_and_again_when_it_recovers() {
        let mut learner = taught(Speeds::default(), 100);
        let slow = Speeds::default().at_clock(0.55);
        for (speeds, wanted) in [(slow, slow), (Speeds::default(), Speeds::default())] {
            for n in 0..20 {
                let uncached = 2000 + n * 331 % 6000;
                let seconds = speeds.prefill_s(f64::from(uncached), 8000.0, 0.0);
                learner.on_prefill(Prefill { uncached, cached: 8000, running: 0, seconds });
            }
            let (got, real) =
                (learner.speeds().prefill_s(4000.0, 8000.0, 0.0), wanted.prefill_s(4000.0, 8000.0, 0.0));
            assert!((got / real - 1.0).abs() < 0.15, "{got} for {real}");
        }
    }

    #[test]
    fn what_parts_from_what_was_foretold_is_not_used_until_it_heals() {
        let mut learner = taught(Speeds::default(), TAUGHT);
        (0..JUDGED - 1).for_each(|_| learner.on_first_token(1.0, 2.0));
        assert!(!learner.has_drifted(), "few samples say little");
        learner.on_first_token(1.0, 2.0);
        assert!(learner.has_drifted() && learner.residual().0 > 0.3);
        (0..9).for_each(|_| learner.on_first_token(2.0, 2.0));
        assert!(learner.has_drifted(), "not healed yet: {:?}", learner.residual());
        (0..20).for_each(|_| learner.on_first_token(2.0, 2.0));
        assert!(!learner.has_drifted());
    }

    proptest! {
        #[test]
        fn nothing_that_is_seen_leads_out_of_bounds(
            samples in proptest::collection::vec((any::<u32>(), any::<u32>(), 0_u32..64, any::<f64>()), 0..60)
        ) {
            let mut learner = Learner::new(Speeds::default());
            for (uncached, cached, running, seconds) in samples {
                learner.on_prefill(Prefill { uncached, cached, running, seconds });
                learner.on_decode(Decode { tokens: uncached.into(), running: f64::from(running), seconds });
                learner.on_first_token(seconds, f64::from(cached));
            }
            let (speeds, prior) = (learner.speeds(), Speeds::default());
            prop_assert!(speeds.rho >= prior.rho * SLOWEST && speeds.rho <= prior.rho * FASTEST, "{speeds:?}");
            prop_assert!(speeds.s0 * SLOWEST <= prior.s0 * 1.0001 && speeds.s0 * FASTEST >= prior.s0 * 0.9999);
            prop_assert!((0.0..=1.0).contains(&speeds.kappa) && speeds.a2 >= 0.0 && speeds.a2.is_finite());
        }
    }
}
