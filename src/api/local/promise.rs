//! Lookups that said present, and loads that then failed: an error class of its own. Pure.
//!
//! The engine asks for a row only because the table said that it is held, and has put the request's tokens on it: when
//! the load fails they are computed after all, later than if nobody had promised. Each failed row is counted by its
//! reason, and an hour in which too many failed is a fault.

use std::collections::VecDeque;

use crate::base::clock::Micros;
use crate::base::fault::{Code, Fault};

/// Why a row that was promised did not come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// Not in the time that recomputing takes.
    Deadline,
    /// It was on the drive and was not what was written.
    Damaged,
    /// It left the drive, here or on the other box, between lookup and load.
    Reclaimed,
    /// The other box held it and is not there.
    PeerGone,
    /// None of these: the row's shape differs, or the job was cut off.
    Other,
}

impl Reason {
    pub const ALL: [Self; 5] = [Self::Deadline, Self::Damaged, Self::Reclaimed, Self::PeerGone, Self::Other];

    pub fn word(self) -> &'static str {
        match self {
            Self::Deadline => "deadline",
            Self::Damaged => "damaged",
            Self::Reclaimed => "reclaimed",
            Self::PeerGone => "peer_gone",
            Self::Other => "other",
        }
    }
}

/// What is known of one failed row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Circumstances {
    /// The deadline had passed when the load ended.
    pub late: bool,
    /// The own drive held it when the load began.
    pub was_held: bool,
    /// It does so still.
    pub is_held: bool,
    /// It is among the rows that turned out damaged.
    pub damaged: bool,
    /// Some other box is connected.
    pub peer: bool,
    /// There is another box, connected or not.
    pub has_peer: bool,
}

impl Circumstances {
    /// Damage is told first: it is rare and the most serious. A row that is there and came too late was late; one that
    /// is gone was reclaimed, whatever the hour.
    pub fn reason(self) -> Reason {
        match self {
            Self { damaged: true, .. } => Reason::Damaged,
            Self { was_held: true, is_held: false, .. } => Reason::Reclaimed,
            Self { late: true, .. } => Reason::Deadline,
            Self { was_held: false, has_peer: true, peer: false, .. } => Reason::PeerGone,
            Self { was_held: false, .. } => Reason::Reclaimed,
            _ => Reason::Other,
        }
    }
}

/// The time that is looked at, and its grain.
const WINDOW_US: u64 = 60 * 60 * 1_000_000;
const STEP_US: u64 = 60 * 1_000_000;

/// Failed rows in an hour from which a person should know, and the share of what was asked for that they must be: one
/// prompt that came too late is a few hundred rows of many thousand, and no reason to get up.
const FAILED_MIN: u64 = 50;
const FAILED_PERCENT: u64 = 2;

#[derive(Clone, Copy, Debug, Default)]
struct Step {
    at: u64,
    loaded: u64,
    failed: [u64; Reason::ALL.len()],
}

/// The last hour.
#[derive(Clone, Debug, Default)]
pub struct Promises {
    steps: VecDeque<Step>,
}

impl Promises {
    pub fn kept(&mut self, rows: u64, now: Micros) {
        if rows > 0 {
            self.step(now).loaded += rows;
        }
    }

    pub fn broken(&mut self, reason: Reason, now: Micros) {
        self.step(now).failed[reason as usize] += 1;
    }

    fn step(&mut self, now: Micros) -> &mut Step {
        let at = now.0 / STEP_US;
        if self.steps.back().is_none_or(|newest| newest.at < at) {
            self.steps.push_back(Step { at, ..Step::default() });
            while self.steps.front().is_some_and(|oldest| oldest.at + WINDOW_US / STEP_US <= at) {
                self.steps.pop_front();
            }
        }
        self.steps.back_mut().expect("pushed just now when there was none")
    }

    /// Too many promises of the last hour were broken.
    pub fn fault(&self, now: Micros) -> Option<Fault> {
        let first = (now.0 / STEP_US + 1).saturating_sub(WINDOW_US / STEP_US);
        let (mut loaded, mut by_reason) = (0, [0; Reason::ALL.len()]);
        for step in self.steps.iter().filter(|step| step.at >= first) {
            loaded += step.loaded;
            by_reason.iter_mut().zip(step.failed).for_each(|(sum, n)| *sum += n);
        }
        let failed: u64 = by_reason.iter().sum();
        if failed < FAILED_MIN || failed * 100 < (loaded + failed) * FAILED_PERCENT {
            return None;
        }
        let reasons = Reason::ALL.iter().filter(|reason| by_reason[**reason as usize] > 0);
        let reasons: Vec<_> =
            reasons.map(|reason| format!("{} {}", reason.word(), by_reason[*reason as usize])).collect();
        let asked = loaded + failed;
        let cause = format!(
            "in the last hour {failed} of {asked} rows that a lookup had promised were not loaded: {}",
            reasons.join(", ")
        );
        Some(Fault::new(Code::LoadsFail, cause))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn minute(n: u64) -> Micros {
        Micros(n * STEP_US)
    }

    #[test]
    fn every_failed_row_has_one_reason() {
        let held = Circumstances { was_held: true, is_held: true, ..Circumstances::default() };
        let away = Circumstances { has_peer: true, peer: true, ..Circumstances::default() };
        for (circumstances, reason) in [
            (Circumstances { late: true, ..held }, Reason::Deadline),
            (Circumstances { late: true, ..away }, Reason::Deadline),
            (Circumstances { damaged: true, is_held: false, late: true, ..held }, Reason::Damaged),
            (Circumstances { is_held: false, ..held }, Reason::Reclaimed),
            (Circumstances { is_held: false, late: true, ..held }, Reason::Reclaimed),
            (away, Reason::Reclaimed),
            (Circumstances { peer: false, ..away }, Reason::PeerGone),
            (Circumstances::default(), Reason::Reclaimed),
            (held, Reason::Other),
        ] {
            assert_eq!(circumstances.reason(), reason, "{circumstances:?}");
        }
    }

    #[test]
    fn a_few_broken_promises_are_no_fault_and_many_of_an_hour_are() {
        let mut promises = Promises::default();
        promises.kept(1000, minute(0));
        for _ in 0..FAILED_MIN - 1 {
            promises.broken(Reason::Deadline, minute(1));
        }
        assert_eq!(promises.fault(minute(1)), None, "too few");
        promises.broken(Reason::Reclaimed, minute(2));
        let fault = promises.fault(minute(2)).unwrap();
        assert_eq!(fault.code, Code::LoadsFail);
        assert!(fault.cause.contains("50 of 1050 rows"), "{}", fault.cause);
        assert!(fault.cause.ends_with("deadline 49, reclaimed 1"), "{}", fault.cause);
        promises.kept(1_450, minute(3));
        assert!(promises.fault(minute(3)).is_some(), "2 % is enough");
        promises.kept(1, minute(3));
        assert_eq!(promises.fault(minute(3)), None, "and less is not");
        assert_eq!(promises.fault(minute(62)), None, "an hour later all is forgotten");
    }

    #[test]
    fn what_is_kept_is_an_hour() {
        let mut promises = Promises::default();
        for n in 0..1000 {
            promises.broken(Reason::Other, minute(n));
        }
        assert_eq!(promises.steps.len() as u64, WINDOW_US / STEP_US);
        assert!(promises.fault(minute(999)).unwrap().cause.contains("60 of 60"));
    }
}
