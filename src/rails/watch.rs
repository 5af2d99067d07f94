//! The rails while they serve: share of each, errors per minute, and whether one that should carry carries nothing.
//!
//! Pure: it is given samples and times. A rail is called silent only after three of the last five busy windows said
//! so, because one window can hold the end of a transfer that one rail happened to finish; an error that should never
//! grow is said at once and for a minute.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::counters::{self, Moved, Sample};
use super::inventory::Inventory;
use crate::base::clock::Micros;
use crate::base::fault::{Code, Fault};

/// Rates and shares are over this long.
const SPAN: Duration = Duration::from_secs(60);

/// Bytes that transfers moved in one window, so that it says something about shares: sixteen pieces of 4 MiB, of which
/// a rail that works takes more than none.
pub const BUSY: u64 = 64 << 20;

/// Share of what was moved below which a rail carried nothing, in percent; as for a measurement.
const NOTHING_PERCENT: u64 = 2;

/// Of the last windows that were busy, so many must agree.
const WINDOWS: usize = 5;
const AGREE: usize = 3;

/// Busy windows that are older say nothing about now.
const STALE: Duration = Duration::from_secs(600);

/// What one rail did in the last minute.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Use {
    pub device: String,
    pub bytes_per_s: u64,
    /// Of what all rails carried, in percent. None: nothing was carried.
    pub share_percent: Option<u64>,
    /// Whether most of it went by RDMA.
    pub rdma: bool,
    /// Those that grew.
    pub errors: BTreeMap<String, u64>,
    pub silent: bool,
}

/// What is remembered. One per node.
#[derive(Debug, Default)]
pub struct Watch {
    last: Option<(Micros, Sample, u64)>,
    /// What was moved, by window, over [`SPAN`].
    windows: VecDeque<Window>,
    /// For each rail, of the last busy windows: whether it carried nothing.
    quiet: BTreeMap<String, VecDeque<bool>>,
    busy_at: Micros,
}

#[derive(Debug)]
struct Window {
    from: Micros,
    to: Micros,
    moved: BTreeMap<String, Moved>,
}

impl Watch {
    /// Takes what the counters say now. `transferred` is what transfers have moved since the node started; `rails` are
    /// the devices that should carry it. Returns what moved since the last time.
    pub fn take(
        &mut self,
        now: Micros,
        inventory: &Inventory,
        sample: Sample,
        transferred: u64,
        rails: &[String],
    ) -> BTreeMap<String, Moved> {
        let Some((before, old, so_far)) = self.last.replace((now, sample.clone(), transferred)) else {
            return BTreeMap::new();
        };
        let moved = counters::between(&old, &sample, inventory);
        self.judge(now, &moved, transferred.saturating_sub(so_far), rails);
        self.windows.push_back(Window { from: before, to: now, moved: moved.clone() });
        while self.windows.front().is_some_and(|window| now.since(window.to) > SPAN) {
            self.windows.pop_front();
        }
        moved
    }

    fn judge(&mut self, now: Micros, moved: &BTreeMap<String, Moved>, bytes: u64, rails: &[String]) {
        self.quiet.retain(|device, _| rails.contains(device));
        if now.since(self.busy_at) > STALE {
            self.quiet.clear();
        }
        if bytes < BUSY {
            return;
        }
        self.busy_at = now;
        for device in rails {
            let carried = moved.get(device).map_or(0, Moved::carried);
            let quiet = self.quiet.entry(device.clone()).or_default();
            quiet.push_back(carried < bytes / 100 * NOTHING_PERCENT);
            if quiet.len() > WINDOWS {
                quiet.pop_front();
            }
        }
    }

    fn is_silent(&self, device: &str) -> bool {
        self.quiet.get(device).is_some_and(|quiet| quiet.iter().filter(|quiet| **quiet).count() >= AGREE)
    }

    /// Each rail, in the inventory's order.
    pub fn uses(&self, inventory: &Inventory) -> Vec<Use> {
        let mut sums: BTreeMap<&str, Moved> = BTreeMap::new();
        for (device, moved) in self.windows.iter().flat_map(|window| &window.moved) {
            let sum = sums.entry(device).or_default();
            sum.rdma_out += moved.rdma_out;
            sum.rdma_in += moved.rdma_in;
            sum.net_out += moved.net_out;
            sum.net_in += moved.net_in;
            for (name, n) in &moved.errors {
                *sum.errors.entry(name.clone()).or_default() += n;
            }
        }
        let ends = self.windows.front().zip(self.windows.back());
        let seconds = ends.map_or(0.0, |(first, last)| last.to.since(first.from).as_secs_f64());
        let all: u64 = sums.values().map(Moved::all).sum();
        let of = |device: &String| {
            let sum = sums.get(device.as_str()).cloned().unwrap_or_default();
            let bytes_per_s = if seconds > 0.0 { (sum.all() as f64 / seconds) as u64 } else { 0 };
            let share = (u128::from(sum.all()) * 100).checked_div(u128::from(all));
            Use {
                bytes_per_s,
                share_percent: share.and_then(|share| u64::try_from(share).ok()),
                rdma: sum.rdma() > sum.net(),
                errors: sum.errors,
                silent: self.is_silent(device),
                device: device.clone(),
            }
        };
        inventory.rails.iter().map(|rail| of(&rail.device)).collect()
    }

    /// What is wrong now.
    pub fn faults(&self, inventory: &Inventory) -> Vec<Fault> {
        let mut faults = Vec::new();
        for of in self.uses(inventory) {
            let Use { device, errors, silent, .. } = of;
            if silent {
                let cause = format!(
                    "rows were moved and {device} carried less than {NOTHING_PERCENT} % of them, in {AGREE} of the last {WINDOWS} busy windows"
                );
                faults.push(Fault::new(Code::RailSilent, cause));
            }
            for (name, n) in errors {
                let words = counters::meaning(&name).map_or("", counters::Meaning::words);
                faults.push(Fault::new(
                    Code::RailErrors,
                    format!("{name} of {device} grew by {n} in a minute ({words})"),
                ));
            }
        }
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::super::counters::Counts;
    use super::super::inventory::Rail;
    use super::*;

    const MIB: u64 = 1 << 20;

    struct Bench {
        watch: Watch,
        inventory: Inventory,
        sample: Sample,
        second: u64,
        transferred: u64,
    }

    impl Bench {
        fn new() -> Self {
            let rail = |device: &str| Rail { device: device.into(), ..Rail::default() };
            let inventory = Inventory { rails: vec![rail("a"), rail("b")], ..Inventory::default() };
            let mut bench =
                Self { watch: Watch::default(), inventory, sample: Sample::new(), second: 0, transferred: 0 };
            bench.sample = [("a".to_owned(), Counts::default()), ("b".to_owned(), Counts::default())].into();
            bench.after(0, 0);
            bench
        }

        fn after(&mut self, a: u64, b: u64) {
            self.second += 5;
            self.transferred += (a + b) * MIB;
            for (device, mib) in [("a", a), ("b", b)] {
                self.sample.get_mut(device).unwrap().net_in += mib * MIB;
            }
            let rails = ["a".to_owned(), "b".to_owned()];
            let now = Micros(self.second * 1_000_000);
            self.watch.take(now, &self.inventory, self.sample.clone(), self.transferred, &rails);
        }

        fn codes(&self) -> Vec<Code> {
            self.watch.faults(&self.inventory).into_iter().map(|fault| fault.code).collect()
        }
    }

    #[test]
    fn a_rail_that_carries_nothing_is_said_after_three_of_five_busy_windows() {
        let mut bench = Bench::new();
        bench.after(100, 0);
        bench.after(100, 1);
        assert_eq!(bench.codes(), [], "two windows are chance");
        bench.after(10, 0);
        assert_eq!(bench.codes(), [], "a window in which little moved says nothing");
        bench.after(50, 50);
        bench.after(100, 1);
        assert_eq!(bench.codes(), [Code::RailSilent]);
        assert!(bench.watch.faults(&bench.inventory)[0].cause.contains("b carried less than 2 %"));
        for _ in 0..3 {
            bench.after(60, 40);
        }
        assert_eq!(bench.codes(), [], "it is back");
    }

    #[test]
    fn old_silence_says_nothing_about_now() {
        let mut bench = Bench::new();
        for _ in 0..3 {
            bench.after(100, 0);
        }
        assert_eq!(bench.codes(), [Code::RailSilent]);
        bench.second += 700;
        bench.after(0, 0);
        assert_eq!(bench.codes(), []);
    }

    #[test]
    fn a_slow_rail_is_not_a_silent_one() {
        let mut bench = Bench::new();
        for _ in 0..5 {
            bench.after(95, 5);
        }
        assert_eq!(bench.codes(), []);
        let uses = bench.watch.uses(&bench.inventory);
        assert_eq!(uses.iter().map(|of| of.share_percent).collect::<Vec<_>>(), [Some(95), Some(5)]);
        assert_eq!(uses[0].bytes_per_s, 95 * MIB / 5);
    }

    #[test]
    fn an_error_is_said_for_a_minute() {
        let mut bench = Bench::new();
        bench.sample.get_mut("a").unwrap().errors.insert("symbol_error".into(), 4);
        bench.after(0, 0);
        assert_eq!(bench.codes(), [], "the first reading of a counter is no growth");
        bench.sample.get_mut("a").unwrap().errors.insert("symbol_error".into(), 7);
        bench.after(0, 0);
        assert_eq!(bench.codes(), [Code::RailErrors]);
        let cause = &bench.watch.faults(&bench.inventory)[0].cause;
        assert_eq!(cause, "symbol_error of a grew by 3 in a minute (the cable or its plug)");
        for _ in 0..13 {
            bench.after(0, 0);
        }
        assert_eq!(bench.codes(), []);
    }
}
