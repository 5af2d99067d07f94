//! Figures from rounds: medians, spreads, and what they say about store and ceiling. Pure.
//!
//! A machine that measures is never quiet. Each round measures everything once, close together, and only ratios within
//! a round count; the median of the rounds is the figure and the extremes stand beside it. The depth that is a round's
//! ceiling is chosen by the medians of the other rounds: the best of five noisy figures is not a ceiling but luck, and a
//! figure that takes part in its own choice keeps some of that.

/// What moving some bytes took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    pub bytes: u64,
    pub seconds: f64,
    /// CPU seconds of the whole process, the kernel's work for it included.
    pub cpu: f64,
}

impl Cost {
    /// Bytes per second.
    pub fn speed(&self) -> f64 {
        self.bytes as f64 / self.seconds.max(1e-9)
    }

    /// CPU seconds per gigabyte (10^9 bytes).
    pub fn cpu_per_gb(&self) -> f64 {
        self.cpu * 1e9 / (self.bytes.max(1) as f64)
    }
}

/// The middle of some figures and their extremes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    pub median: f64,
    pub least: f64,
    pub most: f64,
}

impl Spread {
    /// `None` without figures.
    pub fn of(figures: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut all: Vec<f64> = figures.into_iter().collect();
        all.sort_by(f64::total_cmp);
        let (&least, &most) = (all.first()?, all.last()?);
        let (low, high) = (all[(all.len() - 1) / 2], all[all.len() / 2]);
        Some(Self { median: f64::midpoint(low, high), least, most })
    }
}

/// One direction of one medium and row size, over all rounds.
#[derive(Clone, Debug, Default)]
pub struct Direction {
    /// By round, by depth of [`super::DEPTHS`].
    pub raw: Vec<Vec<Cost>>,
    /// The same with what was written made durable at the end. Empty for reads.
    pub synced: Vec<Vec<Cost>>,
    /// By round.
    pub store: Vec<Cost>,
    /// The same with rows sealed, by round.
    pub sealed: Vec<Cost>,
    /// By round; empty when it could not be measured.
    pub other: Vec<Cost>,
}

impl Direction {
    /// Which depth is the ceiling: the highest median speed.
    pub fn best_depth(&self) -> Option<usize> {
        best_depth(self.raw.iter())
    }

    /// The ceiling of each round.
    pub fn ceiling(&self) -> Vec<Cost> {
        best_of(&self.raw)
    }

    /// `speed / ceiling`, within each round.
    fn ratios(&self, of: &[Cost]) -> Option<Spread> {
        Spread::of(of.iter().zip(self.ceiling()).map(|(cost, raw)| cost.speed() / raw.speed()))
    }

    pub fn store_ratio(&self) -> Option<Spread> {
        self.ratios(&self.store)
    }

    /// The store's speed over that of the raw path that makes durable what it wrote, within each round.
    pub fn synced_ratio(&self) -> Option<Spread> {
        let pairs = self.store.iter().zip(best_of(&self.synced));
        Spread::of(pairs.map(|(cost, raw)| cost.speed() / raw.speed()))
    }

    /// That of the last round, against the depth that is the ceiling so far.
    pub fn last_ratio(&self) -> Option<f64> {
        Some(self.store.last()?.speed() / self.ceiling().last()?.speed())
    }

    /// Speed with rows sealed over speed with rows in the clear, within each round.
    pub fn sealed_ratio(&self) -> Option<Spread> {
        Spread::of(self.sealed.iter().zip(&self.store).map(|(sealed, plain)| sealed.speed() / plain.speed()))
    }

    /// CPU seconds per GB that sealing adds, within each round.
    pub fn sealed_cpu(&self) -> Option<Spread> {
        let pairs = self.sealed.iter().zip(&self.store);
        Spread::of(pairs.map(|(sealed, plain)| sealed.cpu_per_gb() - plain.cpu_per_gb()))
    }

    pub fn other_ratio(&self) -> Option<Spread> {
        self.ratios(&self.other)
    }

    /// CPU seconds per GB of the store beyond those of the ceiling, within each round.
    pub fn extra_cpu(&self) -> Option<Spread> {
        let pairs = self.store.iter().zip(self.ceiling());
        Spread::of(pairs.map(|(cost, raw)| cost.cpu_per_gb() - raw.cpu_per_gb()))
    }
}

fn best_depth<'a>(rounds: impl Iterator<Item = &'a Vec<Cost>> + Clone) -> Option<usize> {
    let depths = rounds.clone().next()?.len();
    let median = |depth: usize| Spread::of(rounds.clone().map(|round| round[depth].speed()));
    let known = (0..depths).filter_map(|depth| Some((depth, median(depth)?.median)));
    known.max_by(|a, b| a.1.total_cmp(&b.1)).map(|(depth, _)| depth)
}

/// Of each round what that depth cost which is the best of the other rounds.
fn best_of(rounds: &[Vec<Cost>]) -> Vec<Cost> {
    let of = |(nth, round): (usize, &Vec<Cost>)| {
        let others =
            rounds.iter().enumerate().filter(move |(other, _)| *other != nth).map(|(_, round)| round);
        best_depth(others).or_else(|| best_depth(rounds.iter())).map(|depth| round[depth])
    };
    rounds.iter().enumerate().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(seconds: f64, cpu: f64) -> Cost {
        Cost { bytes: 1_000_000_000, seconds, cpu }
    }

    #[test]
    fn the_median_is_the_middle_and_the_extremes_stand_beside_it() {
        assert_eq!(Spread::of([]), None);
        assert_eq!(Spread::of([3.0, 1.0, 2.0]), Some(Spread { median: 2.0, least: 1.0, most: 3.0 }));
        assert_eq!(Spread::of([4.0, 1.0]).unwrap().median, 2.5);
    }

    #[test]
    fn one_lucky_round_makes_no_ceiling() {
        // The second depth is better in the middle; the first had one lucky round.
        let direction = Direction {
            raw: [0.1, 2.0, 2.0, 2.0, 2.0].map(|first| vec![cost(first, 0.1), cost(1.0, 0.1)]).to_vec(),
            sealed: [2.5, 2.5, 2.5, 2.0, 2.5].map(|seconds| cost(seconds, 0.3)).to_vec(),
            // With a sync each takes longer, and the first depth is the better one.
            synced: vec![vec![cost(1.0, 0.1), cost(4.0, 0.1)]; 5],
            store: [1.25, 1.25, 1.25, 1.0, 2.0].map(|seconds| cost(seconds, 0.2)).to_vec(),
            other: Vec::new(),
        };
        assert_eq!(direction.synced_ratio(), Some(Spread { median: 0.8, least: 0.5, most: 1.0 }));
        assert_eq!(direction.best_depth(), Some(1));
        assert_eq!(direction.store_ratio(), Some(Spread { median: 0.8, least: 0.5, most: 1.0 }));
        assert_eq!(direction.last_ratio(), Some(0.5));
        assert!((direction.extra_cpu().unwrap().median - 0.1).abs() < 1e-9);
        assert_eq!(direction.sealed_ratio(), Some(Spread { median: 0.5, least: 0.5, most: 0.8 }));
        assert!((direction.sealed_cpu().unwrap().median - 0.1).abs() < 1e-9);
        assert_eq!(direction.other_ratio(), None);
    }

    #[test]
    fn equal_paths_are_equal_whatever_the_noise() {
        // Five depths and the store, all of one speed, each figure off by up to a fifth.
        let mut state = 7_u64;
        let mut noisy = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            cost(0.8 + 0.4 * ((state >> 33) as f64 / f64::from(1_u32 << 31)), 0.1)
        };
        let mut median = || {
            let raw = (0..5).map(|_| (0..5).map(|_| noisy()).collect()).collect();
            let store = (0..5).map(|_| noisy()).collect();
            Direction { raw, store, ..Direction::default() }.store_ratio().unwrap().median
        };
        let mean = (0..400).map(|_| median()).sum::<f64>() / 400.0;
        assert!((mean - 1.0).abs() < 0.02, "{mean}");
    }

    #[test]
    fn nothing_measured_is_no_figure() {
        let none = Direction::default();
        assert_eq!((none.best_depth(), none.store_ratio(), none.extra_cpu()), (None, None, None));
        assert_eq!(none.synced_ratio(), None);
    }
}
