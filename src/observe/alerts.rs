//! What is wrong now, since when, and what was wrong lately.
//!
//! Faults are facts of this moment; an alert is a fault with a life. It is raised at once, because each fault is a hard
//! fact by itself, and cleared only after the fault stayed away for [`HOLD`], so that something that comes and goes
//! is one alert and not twenty.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::clip;
use crate::base::clock::Micros;
use crate::base::fault::{Code, Fault};

/// How long a fault must be gone until its alert is cleared: longer than a peer's reconnect and a store's retry.
pub const HOLD: Duration = Duration::from_secs(5);

/// Cleared alerts that are kept.
pub const HISTORY: usize = 100;

const CAUSE_MAX: usize = 600;

/// One thing that is, or was, wrong.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Alert {
    /// Code and beginning, unique on this node.
    pub id: String,
    pub code: String,
    pub since_unix: u64,
    pub cause: String,
    pub next_step: String,
    /// None while it lasts.
    pub cleared_unix: Option<u64>,
}

#[derive(Debug)]
struct Active {
    alert: Alert,
    /// When the fault was there last.
    seen: Micros,
    seen_unix: u64,
}

/// All alerts of this node.
#[derive(Debug, Default)]
pub struct Alerts {
    active: BTreeMap<Code, Active>,
    /// Newest first.
    cleared: VecDeque<Alert>,
}

impl Alerts {
    /// Takes everything that is wrong at this moment.
    pub fn update(&mut self, faults: &[Fault], now: Micros, now_unix: u64) {
        for (code, cause) in by_code(faults) {
            let active = self.active.entry(code).or_insert_with(|| {
                let word = word(code);
                let alert = Alert {
                    id: format!("{word}-{now_unix}"),
                    code: word,
                    since_unix: now_unix,
                    next_step: code.next_step().to_owned(),
                    ..Alert::default()
                };
                Active { alert, seen: now, seen_unix: now_unix }
            });
            active.alert.cause = clip(cause, CAUSE_MAX);
            (active.seen, active.seen_unix) = (now, now_unix);
        }
        let gone = self.active.extract_if(.., |_, active| now.since(active.seen) >= HOLD);
        for (_, Active { mut alert, seen_unix, .. }) in gone {
            alert.cleared_unix = Some(seen_unix);
            self.cleared.push_front(alert);
        }
        self.cleared.truncate(HISTORY);
    }

    /// What is wrong now, the longest-lasting first.
    pub fn active(&self) -> Vec<Alert> {
        let mut alerts: Vec<Alert> = self.active.values().map(|active| active.alert.clone()).collect();
        alerts.sort_by(|a, b| (a.since_unix, &a.code).cmp(&(b.since_unix, &b.code)));
        alerts
    }

    /// What was wrong, newest first.
    pub fn history(&self) -> Vec<Alert> {
        self.cleared.iter().cloned().collect()
    }
}

/// One cause per code: two peers that are gone are one alert with both named.
fn by_code(faults: &[Fault]) -> BTreeMap<Code, String> {
    let mut causes: BTreeMap<Code, String> = BTreeMap::new();
    for fault in faults {
        let cause = causes.entry(fault.code).or_default();
        if !cause.split("; ").any(|known| known == fault.cause) {
            let gap = if cause.is_empty() { "" } else { "; " };
            cause.push_str(gap);
            cause.push_str(&fault.cause);
        }
    }
    causes
}

/// A code as people read and search it.
fn word(code: Code) -> String {
    match serde_json::to_value(code) {
        Ok(serde_json::Value::String(word)) => word,
        _ => format!("{code:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(alerts: &mut Alerts, second: u64, faults: &[(Code, &str)]) {
        let faults: Vec<Fault> = faults.iter().map(|(code, cause)| Fault::new(*code, *cause)).collect();
        alerts.update(&faults, Micros(second * 1_000_000), 1000 + second);
    }

    #[test]
    fn a_fault_raises_at_once_and_clears_after_five_seconds_without_it() {
        let mut alerts = Alerts::default();
        at(&mut alerts, 0, &[(Code::PeerGone, "spark-b was last heard at 14:02")]);
        let raised = alerts.active();
        assert_eq!(raised.len(), 1);
        assert_eq!(raised[0].id, "peer-gone-1000");
        assert_eq!(raised[0].next_step, Code::PeerGone.next_step());
        at(&mut alerts, 1, &[(Code::PeerGone, "spark-b was last heard at 14:02")]);
        at(&mut alerts, 5, &[]);
        assert_eq!(alerts.active(), raised, "four seconds without it are not enough");
        at(&mut alerts, 6, &[]);
        assert_eq!(alerts.active(), []);
        assert_eq!(alerts.history()[0].cleared_unix, Some(1001), "it ended when it was seen last");
    }

    #[test]
    fn what_comes_and_goes_is_one_alert() {
        let mut alerts = Alerts::default();
        for second in 0..60 {
            let faults: &[_] = if second % 4 == 0 { &[(Code::StoreReadOnly, "no space")] } else { &[] };
            at(&mut alerts, second, faults);
            assert_eq!(alerts.active()[0].since_unix, 1000);
        }
        assert_eq!(alerts.history(), []);
    }

    #[test]
    fn causes_of_one_code_stand_together_and_change_in_place() {
        let mut alerts = Alerts::default();
        at(&mut alerts, 0, &[(Code::PeerGone, "a"), (Code::PeerGone, "b"), (Code::PeerGone, "a")]);
        assert_eq!(alerts.active()[0].cause, "a; b");
        at(&mut alerts, 1, &[(Code::PeerGone, "b"), (Code::TierOff, "canary")]);
        let causes: Vec<_> = alerts.active().into_iter().map(|a| (a.since_unix, a.cause)).collect();
        assert_eq!(causes, [(1000, "b".to_owned()), (1001, "canary".to_owned())]);
    }

    #[test]
    fn history_is_bounded_and_newest_first() {
        let mut alerts = Alerts::default();
        for n in 0..150 {
            at(&mut alerts, n * 20, &[(Code::EngineDown, "ended")]);
            at(&mut alerts, n * 20 + 10, &[]);
        }
        let history = alerts.history();
        assert_eq!(history.len(), HISTORY);
        assert_eq!(history[0].since_unix, 1000 + 149 * 20);
    }

    #[test]
    fn every_code_has_a_word_of_its_own() {
        let words: std::collections::BTreeSet<String> = Code::ALL.into_iter().map(word).collect();
        assert_eq!(words.len(), Code::ALL.len());
        assert!(words.iter().all(|w| w.chars().all(|c| c.is_ascii_lowercase() || c == '-')), "{words:?}");
    }
}
