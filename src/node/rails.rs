//! The rails of this node: what it should run over, by its settings, and measuring them when somebody asks.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use super::Parts;
use crate::engine::provision;
use crate::rails::measure::{self, Mover, Ran};
use crate::rails::measured::Wire;
use crate::rails::verdict::Context;
use crate::rails::{Inventory, Nixl, Peering, Report, Tree};
use crate::settings::Settings;
use crate::transfer::{Fetcher, Way};

/// Variables by which the engine's libraries are told a GID index.
const GID_VARIABLES: [&str; 2] = ["NCCL_IB_GID_INDEX", "UCX_IB_GID_INDEX"];

/// Addresses of this node that rows travel over, as far as its settings say; an address of loopback leads nowhere.
fn data_addresses(settings: &Settings) -> Vec<IpAddr> {
    let cluster = &settings.cluster;
    let one = cluster.address.parse::<IpAddr>().ok();
    let all: Vec<IpAddr> =
        if cluster.rails.is_empty() { one.into_iter().collect() } else { cluster.rails.clone() };
    all.into_iter().filter(|ip| !ip.is_loopback() && !ip.is_unspecified()).collect()
}

/// Where NIXL lies: in vLLM's environment, the one that is set or those that were provisioned, where `install/nixl.sh`
/// puts it, or installed.
pub fn nixl(settings: &Settings) -> Nixl {
    let set = &settings.engine.venv;
    let cache = provision::cache_folder();
    let mut environments: Vec<PathBuf> = Vec::new();
    if set.as_os_str().is_empty() {
        let made = std::fs::read_dir(&cache).into_iter().flatten().flatten();
        let made = made.filter(|entry| entry.file_name().to_string_lossy().starts_with("venv-"));
        environments.extend(made.map(|entry| entry.path()));
    } else {
        environments.push(set.clone());
    }
    environments.push(cache.join("nixl"));
    Nixl::find(Path::new("/"), &environments)
}

/// What the settings say that bears on the rails.
pub fn rails_context(settings: &Settings) -> Context {
    let engine = &settings.engine;
    let fixed =
        GID_VARIABLES.iter().filter_map(|name| Some(((*name).to_owned(), engine.env.get(*name)?.clone())));
    Context {
        data: data_addresses(settings),
        pinned: engine.row_area.0,
        gids_fixed: fixed.collect(),
        ..Context::default()
    }
}

/// Describes this node's rails, and measures those to each connected node, one after the other, when `transfer` says so.
pub(super) async fn report(parts: Parts, transfer: bool) -> Report {
    let data = data_addresses(&parts.settings);
    let view = parts.rails.view();
    let tree = Arc::new(Tree::machine());
    let read = {
        let tree = Arc::clone(&tree);
        tokio::task::spawn_blocking(move || Inventory::read(&tree, &data)).await
    };
    let inventory = read.unwrap_or(view.inventory);
    let mut peers = Vec::new();
    for (name, fetcher) in parts.cluster.rails() {
        let there = said_by(&parts, &name);
        let mut peer = Peering { name: Some(name), there, ..Peering::default() };
        if transfer {
            let ways = Ways::of(fetcher, &inventory);
            let ends = ways.ends.clone();
            peer.measured = Some(measure::measure(&tree, &inventory, &ends, Wire::Tcp, Some(&ways)).await);
        }
        peers.push(peer);
    }
    let context = Context { gids_at_start: view.gids_at_start, ..rails_context(&parts.settings) };
    let node = Some(parts.settings.node.name.clone());
    let fabric = Some(parts.cluster.carried_by().to_owned());
    Report { node, uses: view.uses, fabric, ..Report::of(inventory, context, peers) }
}

/// What another node said of its rails with its last heartbeat.
fn said_by(parts: &Parts, name: &str) -> Option<Inventory> {
    let member = parts.cluster.members().into_iter().find(|member| member.name == name)?;
    serde_json::from_value(member.note["rails"]["inventory"].clone()).ok()
}

/// The rails to one node, by device.
struct Ways {
    fetcher: Fetcher,
    devices: Vec<String>,
    /// Addresses of their other ends.
    ends: Vec<IpAddr>,
}

impl Ways {
    fn of(fetcher: Fetcher, inventory: &Inventory) -> Self {
        let (mut devices, mut ends) = (Vec::new(), Vec::new());
        for rail in fetcher.rails() {
            let end = rail.path.remote.parse::<SocketAddr>().ok().map(|at| at.ip());
            let routed = end.and_then(|end| inventory.rail_to(end)).map(|rail| rail.device.clone());
            let pinned = rail.path.local.map(|local| local.device);
            devices.push(pinned.or(routed).unwrap_or(rail.path.name));
            ends.extend(end);
        }
        Self { fetcher, devices, ends }
    }
}

impl Mover for Ways {
    fn rails(&self) -> Vec<String> {
        self.devices.clone()
    }

    fn run(&self, over: Vec<String>, bytes: u64) -> BoxFuture<'_, Result<Ran, String>> {
        async move {
            let one = match &over[..] {
                [device] => self.devices.iter().position(|own| own == device),
                _ => None,
            };
            match self.fetcher.probe(one, Way::Here, bytes).await {
                Ok(probe) => Ok(Ran { bytes: probe.bytes, seconds: probe.seconds }),
                Err(error) => Err(error.to_string()),
            }
        }
        .boxed()
    }
}
