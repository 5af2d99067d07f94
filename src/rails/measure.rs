//! Measures: a transfer over each rail alone, one over all, and what the kernel counted meanwhile.
//!
//! How bytes get moved is the caller's ([`Mover`]); what they moved over is the kernel's to say.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::counters::{self, Sample};
use super::inventory::Inventory;
use super::measured::{AMOUNT, Measured, Run, Wire};
use super::probe::probe;
use super::tree::Tree;

/// Each transfer is made twice, and the faster counts: the first opens windows and fills buffers, and what else the
/// machine does can only slow a transfer down.
const ROUNDS: usize = 2;

/// [`AMOUNT`] takes half a second at 1 Gb/s, which is slower than anything that anybody would call a rail; what is not
/// done after so long is broken.
const PATIENCE: Duration = Duration::from_secs(20);

/// From a transfer's end until its last packets are counted.
const SETTLE: Duration = Duration::from_millis(50);

/// Moves bytes to or from the other box.
pub trait Mover: Send + Sync {
    /// Devices of the rails that it can move bytes over.
    fn rails(&self) -> Vec<String>;

    /// Moves some `bytes` over the rails with these devices: one of them, or all.
    fn run(&self, over: Vec<String>, bytes: u64) -> BoxFuture<'_, Result<Ran, String>>;
}

/// A transfer that ended.
#[derive(Clone, Copy, Debug)]
pub struct Ran {
    pub bytes: u64,
    pub seconds: f64,
}

/// Measures the rails of `mover`, and probes those of `here` that lead to one of `peers`.
pub async fn measure(
    tree: &Arc<Tree>,
    here: &Inventory,
    peers: &[IpAddr],
    wire: Wire,
    mover: Option<&dyn Mover>,
) -> Measured {
    let (inventory, addresses) = (here.clone(), peers.to_vec());
    let probes = tokio::task::spawn_blocking(move || probe(&inventory, &addresses)).await.unwrap_or_default();
    let mut measured = Measured { wire, probes, ..Measured::default() };
    let Some(mover) = mover else { return measured };
    let devices = mover.rails();
    for device in &devices {
        measured.alone.push(run(tree, here, vec![device.clone()], mover).await);
    }
    // With a rail that fails alone, all together would only say the same again.
    let sound = measured.alone.iter().all(|run| run.failed.is_none());
    if sound && devices.len() > 1 {
        measured.together = Some(run(tree, here, devices, mover).await);
    }
    measured
}

async fn run(tree: &Arc<Tree>, here: &Inventory, over: Vec<String>, mover: &dyn Mover) -> Run {
    let mut best: Option<Run> = None;
    for _ in 0..ROUNDS {
        let before = sample(tree, here).await;
        let ran = tokio::time::timeout(PATIENCE, mover.run(over.clone(), AMOUNT)).await;
        tokio::time::sleep(SETTLE).await;
        let moved = counters::between(&before, &sample(tree, here).await, here);
        let run = Run { over: over.clone(), bytes: AMOUNT, moved, ..Run::default() };
        let late = || Err(format!("not ended after {} s", PATIENCE.as_secs()));
        match ran.unwrap_or_else(|_| late()) {
            Ok(Ran { bytes, seconds }) => best = Some(faster(best, Run { bytes, seconds, ..run })),
            Err(why) => return Run { failed: Some(why), ..run },
        }
    }
    best.unwrap_or_default()
}

/// The faster of two, with the errors of both: no error is left out for its transfer being slow.
fn faster(best: Option<Run>, run: Run) -> Run {
    let Some(best) = best else { return run };
    let (mut fast, slow) = if best.seconds <= run.seconds { (best, run) } else { (run, best) };
    for (device, moved) in slow.moved {
        let errors = &mut fast.moved.entry(device).or_default().errors;
        for (name, n) in moved.errors {
            *errors.entry(name).or_default() += n;
        }
    }
    fast
}

/// Reading a card's counters asks its firmware, which may take a while.
async fn sample(tree: &Arc<Tree>, here: &Inventory) -> Sample {
    let (tree, inventory) = (Arc::clone(tree), here.clone());
    tokio::task::spawn_blocking(move || counters::read(&tree, &inventory)).await.unwrap_or_default()
}
