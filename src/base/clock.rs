//! The only `now` in the crate. Pure files take it as an argument; driving files ask a [`Clock`].

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Microseconds since the clock began; comparable only within one clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Micros(pub u64);

impl Micros {
    pub fn plus(self, span: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(span.as_micros()).unwrap_or(u64::MAX)))
    }

    /// Not before the clock's beginning.
    pub fn minus(self, span: Duration) -> Self {
        Self(self.0.saturating_sub(u64::try_from(span.as_micros()).unwrap_or(u64::MAX)))
    }

    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

/// Real time, or simulated time that a test or the simulator moves by hand.
#[derive(Clone, Debug)]
pub enum Clock {
    Real(Instant),
    Sim(Arc<AtomicU64>),
}

impl Clock {
    pub fn real() -> Self {
        Self::Real(Instant::now())
    }

    pub fn sim() -> Self {
        Self::Sim(Arc::new(AtomicU64::new(0)))
    }

    pub fn now(&self) -> Micros {
        match self {
            Self::Real(begin) => Micros(u64::try_from(begin.elapsed().as_micros()).unwrap_or(u64::MAX)),
            Self::Sim(now) => Micros(now.load(Ordering::Acquire)),
        }
    }

    /// Moves simulated time. Real time moves by itself: the call is then a mistake of the caller.
    pub fn advance(&self, span: Duration) {
        match self {
            Self::Real(_) => debug_assert!(false, "real time cannot be moved"),
            Self::Sim(now) => {
                now.fetch_add(u64::try_from(span.as_micros()).unwrap_or(u64::MAX), Ordering::AcqRel);
            }
        }
    }
}

/// Seconds since 1970 for what people read: logs, alerts, the age of a record.
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simulated_time_moves_only_by_hand() {
        let clock = Clock::sim();
        let twin = clock.clone();
        assert_eq!(clock.now(), Micros(0));
        clock.advance(Duration::from_millis(3));
        assert_eq!(twin.now(), Micros(3_000));
        assert_eq!(twin.now().since(Micros(1_000)), Duration::from_millis(2));
    }
}
