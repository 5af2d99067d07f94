//! What samples say: percentiles, and what a router adds to the path without it. Pure.

/// Latencies in microseconds, sorted.
#[derive(Clone, Debug, Default)]
pub struct Latencies(Vec<f64>);

impl Latencies {
    pub fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        Self(samples)
    }

    /// The sample that `share` of all do not exceed. 0 without samples.
    pub fn at(&self, share: f64) -> f64 {
        let last = self.0.len().saturating_sub(1);
        let at = (share * self.0.len() as f64).ceil() as usize;
        self.0.get(at.saturating_sub(1).min(last)).copied().unwrap_or(0.0)
    }
}

/// What one path took, by round.
#[derive(Clone, Debug, Default)]
pub struct Rounds(Vec<Vec<f64>>);

impl Rounds {
    pub fn begin(&mut self) {
        self.0.push(Vec::new());
    }

    pub fn add(&mut self, us: f64) {
        if let Some(round) = self.0.last_mut() {
            round.push(us);
        }
    }

    pub fn all(&self) -> Latencies {
        Latencies::of(self.0.concat())
    }

    /// By round.
    pub fn medians(&self) -> Vec<f64> {
        self.0.iter().map(|round| Latencies::of(round.clone()).at(0.5)).collect()
    }

    /// What this path takes more than `direct` does: the median over rounds of what medians differ by, and what the
    /// 99th percentiles of all samples differ by.
    pub fn added(&self, direct: &Self) -> Added {
        let each = self.medians().into_iter().zip(direct.medians()).map(|(ours, theirs)| ours - theirs);
        let p99_us = self.all().at(0.99) - direct.all().at(0.99);
        Added { p50_us: Latencies::of(each.collect()).at(0.5), p99_us }
    }
}

/// Microseconds beyond the direct path.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Added {
    pub p50_us: f64,
    pub p99_us: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(of: &[&[f64]]) -> Rounds {
        let mut rounds = Rounds::default();
        for round in of {
            rounds.begin();
            round.iter().for_each(|us| rounds.add(*us));
        }
        rounds
    }

    #[test]
    fn percentiles_are_samples() {
        let all = Latencies::of((1..=100).rev().map(f64::from).collect());
        assert_eq!([all.at(0.5), all.at(0.99), all.at(1.0), all.at(0.0)], [50.0, 99.0, 100.0, 1.0]);
        assert_eq!(Latencies::default().at(0.5), 0.0);
    }

    #[test]
    fn a_slow_round_does_not_move_what_is_added() {
        let direct = rounds(&[&[10.0, 11.0, 12.0], &[100.0, 110.0, 120.0], &[10.0, 11.0, 12.0]]);
        let routed = rounds(&[&[60.0, 61.0, 62.0], &[400.0, 410.0, 420.0], &[61.0, 62.0, 63.0]]);
        assert_eq!(routed.added(&direct), Added { p50_us: 51.0, p99_us: 300.0 });
    }
}
