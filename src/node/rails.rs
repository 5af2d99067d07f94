//! The rails of this node: what it should run over, by its settings, and measuring them when somebody asks.

use std::net::IpAddr;

use super::Parts;
use crate::rails::measured::Wire;
use crate::rails::verdict::Context;
use crate::rails::{Inventory, Report, Tree, measure};
use crate::settings::Settings;

/// Variables by which the engine's libraries are told a GID index.
const GID_VARIABLES: [&str; 2] = ["NCCL_IB_GID_INDEX", "UCX_IB_GID_INDEX"];

/// Addresses of this node that rows travel over, as far as its settings say; an address of loopback leads nowhere.
fn data_addresses(settings: &Settings) -> Vec<IpAddr> {
    let address = settings.cluster.address.parse::<IpAddr>().ok();
    address.into_iter().filter(|ip| !ip.is_loopback() && !ip.is_unspecified()).collect()
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

/// Describes this node's rails, and measures them when `transfer` says so.
pub(super) async fn report(parts: Parts, transfer: bool) -> Report {
    let data = data_addresses(&parts.settings);
    let view = parts.rails.view();
    let tree = std::sync::Arc::new(Tree::machine());
    let read = {
        let (tree, data) = (std::sync::Arc::clone(&tree), data.clone());
        tokio::task::spawn_blocking(move || Inventory::read(&tree, &data)).await
    };
    let inventory = read.unwrap_or(view.inventory);
    let there = parts.cluster.members().into_iter().find_map(|member| {
        let connected = member.state == crate::cluster::MemberState::Connected;
        let said = serde_json::from_value(member.note["rails"]["inventory"].clone()).ok()?;
        connected.then_some((member.name, said))
    });
    let (peer, there): (Option<String>, Option<Inventory>) = there.unzip();
    let context = Context { there, gids_at_start: view.gids_at_start, ..rails_context(&parts.settings) };
    let measured = match &context.there {
        Some(there) if transfer => {
            let peers: Vec<IpAddr> =
                there.rails.iter().flat_map(|rail| &rail.addresses).map(|net| net.ip).collect();
            Some(measure::measure(&tree, &inventory, &peers, Wire::Tcp, None).await)
        }
        _ => None,
    };
    let report = Report::of(inventory, context, measured);
    Report { node: Some(parts.settings.node.name.clone()), peer, uses: view.uses, ..report }
}
