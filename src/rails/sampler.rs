//! Reads the counters of a running node's rails every few seconds, and finds at its start what would fail at the first
//! transfer.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use prometheus::{IntCounterVec, IntGaugeVec};
use serde::{Deserialize, Serialize};

use super::counters::{self, Moved};
use super::inventory::Inventory;
use super::tree::Tree;
use super::verdict::{self, Case, Context, Level, Verdict};
use super::watch::{Use, Watch};
use crate::base::clock::Clock;
use crate::base::fault::{Code, Fault};
use crate::meter::Meter;
use crate::tasks::{Kind, Tasks};

/// Between two readings: a window in which a transfer of one long prompt fits, and twelve of them a minute.
const PERIOD: Duration = Duration::from_secs(5);

/// The inventory is read anew after so many readings: cables and GIDs change seldom.
const READINGS: u32 = 12;

/// What a node says of its rails.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct View {
    pub inventory: Inventory,
    pub gids_at_start: BTreeMap<String, u32>,
    pub uses: Vec<Use>,
}

/// The rails of a running node. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Sampler(Arc<Mutex<Seen>>);

/// What was seen last.
#[derive(Debug, Default)]
struct Seen {
    view: View,
    /// From the counters.
    faults: Vec<Fault>,
    /// From the inventory.
    unfit: Vec<Fault>,
}

/// Series of this module. Made once per node; labels are bounded by the machine's devices and the watched counters.
#[derive(Clone, Debug)]
struct Metrics {
    bytes: IntCounterVec,
    errors: IntCounterVec,
    share: IntGaugeVec,
    silent: IntGaugeVec,
}

impl Metrics {
    fn new(meter: &Meter) -> Self {
        Self {
            bytes: meter.counters(
                "rail_bytes_total",
                "Bytes that the kernel counted on a rail since the node started, by way: rdma or net, in or out.",
                &["rail", "way"],
            ),
            errors: meter.counters(
                "rail_errors_total",
                "Growth of error counters of a rail since the node started.",
                &["rail", "counter"],
            ),
            share: meter.gauges(
                "rail_share_percent",
                "Share of a rail in what all rails carried in the last minute.",
                &["rail"],
            ),
            silent: meter.gauges(
                "rail_silent",
                "1: rows were moved and this rail, which should carry its part, carried nothing.",
                &["rail"],
            ),
        }
    }

    fn count(&self, moved: &BTreeMap<String, Moved>) {
        for (device, moved) in moved {
            let ways = [
                ("rdma-in", moved.rdma_in),
                ("rdma-out", moved.rdma_out),
                ("net-in", moved.net_in),
                ("net-out", moved.net_out),
            ];
            for (way, bytes) in ways {
                self.bytes.with_label_values(&[device.as_str(), way]).inc_by(bytes);
            }
            for (name, n) in &moved.errors {
                self.errors.with_label_values(&[device, name]).inc_by(*n);
            }
        }
    }

    fn show(&self, uses: &[Use]) {
        for of in uses {
            let share = of.share_percent.and_then(|share| i64::try_from(share).ok()).unwrap_or(0);
            self.share.with_label_values(&[&of.device]).set(share);
            self.silent.with_label_values(&[&of.device]).set(of.silent.into());
        }
    }
}

impl Sampler {
    /// Looks at the machine, says once what is unfit, and goes on looking. `transferred` says how many bytes transfers
    /// have moved since the node started.
    pub async fn start(
        tree: Tree,
        context: Context,
        transferred: impl Fn() -> u64 + Send + 'static,
        clock: Clock,
        tasks: &Tasks,
        meter: &Meter,
    ) -> Self {
        let (tree, metrics) = (Arc::new(tree), Metrics::new(meter));
        let inventory = read(&tree, &context.data).await;
        let context = Context { gids_at_start: inventory.gids(), ..context };
        let unfit = unfit(&inventory, &context);
        for verdict in &unfit {
            let Verdict { what, cause, fix, .. } = verdict;
            tracing::warn!(what, cause, fix, "a rail is not fit");
        }
        let view = View { gids_at_start: inventory.gids(), inventory, ..View::default() };
        let seen = Seen { view, unfit: unfit.iter().map(fault).collect(), ..Seen::default() };
        let sampler = Self(Arc::new(Mutex::new(seen)));
        let driver = Driver { tree, metrics, context, clock, seen: sampler.clone() };
        tasks.spawn(Kind::Chore, "rails", driver.run(transferred));
        sampler
    }

    pub fn view(&self) -> View {
        self.0.lock().view.clone()
    }

    pub fn faults(&self) -> Vec<Fault> {
        let seen = self.0.lock();
        seen.unfit.iter().chain(&seen.faults).cloned().collect()
    }
}

/// The task that looks.
struct Driver {
    tree: Arc<Tree>,
    metrics: Metrics,
    context: Context,
    clock: Clock,
    seen: Sampler,
}

impl Driver {
    async fn run(self, transferred: impl Fn() -> u64) {
        let mut watch = Watch::default();
        for n in 1_u32.. {
            let inventory = self.inventory(n.is_multiple_of(READINGS)).await;
            let tree = Arc::clone(&self.tree);
            let of = inventory.clone();
            let Ok(sample) = tokio::task::spawn_blocking(move || counters::read(&tree, &of)).await else {
                return;
            };
            let moved = watch.take(
                self.clock.now(),
                &inventory,
                sample,
                transferred(),
                &carriers(&inventory, &self.context.data),
            );
            self.metrics.count(&moved);
            let uses = watch.uses(&inventory);
            self.metrics.show(&uses);
            {
                let mut seen = self.seen.0.lock();
                seen.faults = watch.faults(&inventory);
                seen.view.uses = uses;
            }
            tokio::time::sleep(PERIOD).await;
        }
    }

    /// The one that is known, or a fresh one with what is unfit by it.
    async fn inventory(&self, afresh: bool) -> Inventory {
        if !afresh {
            return self.seen.0.lock().view.inventory.clone();
        }
        let inventory = read(&self.tree, &self.context.data).await;
        let unfit = unfit(&inventory, &self.context).iter().map(fault).collect();
        let mut seen = self.seen.0.lock();
        seen.view.inventory = inventory.clone();
        seen.unfit = unfit;
        inventory
    }
}

async fn read(tree: &Arc<Tree>, data: &[IpAddr]) -> Inventory {
    let (tree, data) = (Arc::clone(tree), data.to_vec());
    tokio::task::spawn_blocking(move || Inventory::read(&tree, &data)).await.unwrap_or_default()
}

/// Devices that rows should be found on: those with an address that rows travel over.
fn carriers(inventory: &Inventory, data: &[IpAddr]) -> Vec<String> {
    let carries = |rail: &&super::Rail| rail.addresses.iter().any(|net| data.contains(&net.ip));
    inventory.rails.iter().filter(carries).map(|rail| rail.device.clone()).collect()
}

/// Faults that can be told without a transfer. A machine without RDMA devices has none of them: its rows travel over
/// what it has, and nobody claims more.
fn unfit(inventory: &Inventory, context: &Context) -> Vec<Verdict> {
    if inventory.rails.iter().all(|rail| rail.rdma.is_none()) {
        return Vec::new();
    }
    let mut verdicts = verdict::judge(&Case { here: inventory, context, measured: None });
    verdicts.retain(|verdict| verdict.level == Level::Fail);
    verdicts
}

fn fault(verdict: &Verdict) -> Fault {
    let Verdict { id, what, cause, fix, .. } = verdict;
    let code = if verdict::is_registration(*id) { Code::RailRegistration } else { Code::RailUnfit };
    // Causes of one code are joined with semicolons.
    Fault::new(code, format!("{what}: {cause}. To mend it: {fix}").replace(';', ","))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    async fn started(case: &str) -> (Sampler, Meter, Tasks) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/rails").join(case);
        let (tasks, meter) = (Tasks::new(), Meter::new());
        let data = vec![[192, 168, 100, 10].into(), [192, 168, 101, 10].into(), [10, 0, 0, 1].into()];
        let options = Context { data, pinned: 4 << 30, ..Context::default() };
        let tree = Tree::at(&path).unwrap();
        (Sampler::start(tree, options, || 0, Clock::real(), &tasks, &meter).await, meter, tasks)
    }

    #[tokio::test]
    async fn what_would_fail_at_the_first_transfer_is_a_fault_at_the_start() {
        for (case, code, words) in [
            ("memlock-small.tree", Code::RailRegistration, "To mend it: LimitMEMLOCK=infinity"),
            ("kernel-handover.tree", Code::RailRegistration, "add kho=off"),
            ("device-cgroup.tree", Code::RailRegistration, "/dev/infiniband/uverbs1 does not open"),
            ("twin-not-configured.tree", Code::RailUnfit, "has no address"),
        ] {
            let (sampler, _, tasks) = started(case).await;
            let faults = sampler.faults();
            assert!(
                !faults.is_empty() && faults.iter().all(|fault| fault.code == code),
                "{case}: {faults:?}"
            );
            assert!(faults.iter().any(|fault| fault.cause.contains(words)), "{case}: {faults:?}");
            assert!(faults.iter().all(|fault| !fault.cause.contains(';')), "{case}: {faults:?}");
            tasks.stop(Duration::from_secs(5)).await;
        }
    }

    #[tokio::test]
    async fn a_sound_box_and_a_plain_one_have_no_faults() {
        for case in ["healthy.tree", "plain-ethernet.tree"] {
            let (sampler, _, tasks) = started(case).await;
            assert_eq!(sampler.faults(), [], "{case}");
            assert!(!sampler.view().inventory.rails.is_empty());
            tasks.stop(Duration::from_secs(5)).await;
        }
    }

    #[test]
    fn series_are_counted_by_rail_and_way() {
        let meter = Meter::new();
        let metrics = Metrics::new(&meter);
        let moved = Moved {
            rdma_in: 5,
            net_out: 7,
            errors: [("symbol_error".to_owned(), 2)].into(),
            ..Moved::default()
        };
        metrics.count(&BTreeMap::from([("rail0".to_owned(), moved)]));
        metrics.show(&[Use {
            device: "rail0".into(),
            share_percent: Some(40),
            silent: true,
            ..Use::default()
        }]);
        for line in [
            "sparkkv_rail_bytes_total{rail=\"rail0\",way=\"rdma-in\"} 5",
            "sparkkv_rail_bytes_total{rail=\"rail0\",way=\"net-out\"} 7",
            "sparkkv_rail_errors_total{counter=\"symbol_error\",rail=\"rail0\"} 2",
            "sparkkv_rail_share_percent{rail=\"rail0\"} 40",
            "sparkkv_rail_silent{rail=\"rail0\"} 1",
        ] {
            assert!(meter.text().contains(line), "{line}: {}", meter.text());
        }
    }
}
