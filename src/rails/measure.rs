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

/// A transfer of [`AMOUNT`] at a hundredth of the slowest rail that anybody would call one, 1 Gb/s, takes a minute.
const PATIENCE: Duration = Duration::from_secs(60);

/// From a transfer's end until its last packets are counted.
const SETTLE: Duration = Duration::from_millis(50);

/// Moves bytes to or from the other box.
pub trait Mover: Send + Sync {
    /// Moves `bytes` over the rails with these devices and no other, and says in how many seconds.
    fn run(&self, over: Vec<String>, bytes: u64) -> BoxFuture<'_, Result<f64, String>>;
}

/// Measures the rails of `here` that lead to one of `peers`.
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
    let leads = |net: &super::Net| peers.iter().any(|peer| net.holds(*peer));
    let devices: Vec<String> = here
        .rails
        .iter()
        .filter(|rail| rail.addresses.iter().any(leads))
        .map(|rail| rail.device.clone())
        .collect();
    for device in &devices {
        measured.alone.push(run(tree, here, vec![device.clone()], mover).await);
    }
    if devices.len() > 1 {
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
            Ok(seconds) => {
                let run = Run { seconds, ..run };
                best = Some(match best {
                    Some(best) if best.seconds <= seconds => best,
                    _ => run,
                });
            }
            Err(why) => return Run { failed: Some(why), ..run },
        }
    }
    best.unwrap_or_default()
}

/// Reading a card's counters asks its firmware, which may take a while.
async fn sample(tree: &Arc<Tree>, here: &Inventory) -> Sample {
    let (tree, inventory) = (Arc::clone(tree), here.clone());
    tokio::task::spawn_blocking(move || counters::read(&tree, &inventory)).await.unwrap_or_default()
}
