//! `rails`: what the cables between the boxes do, and what is wrong when they do not.
//!
//! With a node running it is the node that measures, because it knows its peer and may open data connections to it.
//! Without one, this machine is described and, with `--peer`, packets of full size are sent. A recording of another
//! machine is described in the same words.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use clap::Args;

use super::Layers;
use super::ask::Running;
use super::out::{Exit, Out, Tint, Told, say};
use super::status::clean;
use crate::rails::measured::Wire;
use crate::rails::verdict::{Level, Verdict};
use crate::rails::{Access, Inventory, Nixl, Peering, Rail, Report, Tree, measure};
use crate::settings::{Loaded, load};

#[derive(Debug, Args)]
pub(super) struct Rails {
    #[command(flatten)]
    layers: Layers,
    /// Everything, as JSON.
    #[arg(long)]
    json: bool,
    /// Only look: move nothing.
    #[arg(long)]
    look: bool,
    /// Addresses of the other box, one per rail, to send packets of full size to when no node runs here.
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',')]
    peer: Vec<IpAddr>,
    /// Describe another machine: a recording, or a folder that holds its `sys`, `proc` and `dev`.
    #[arg(long, value_name = "FILE|DIR", conflicts_with_all = ["peer", "record", "look"])]
    sys: Option<PathBuf>,
    /// Write down what was read, so that it can be looked at elsewhere with --sys. Holds addresses, no secrets.
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
}

pub(super) fn show(order: &Rails) -> anyhow::Result<Exit> {
    let report = match &order.sys {
        Some(path) => {
            let tree = Tree::at(path).map_err(|error| Told { exit: Exit::Usage, what: error.to_string() })?;
            Report::recorded(&tree).with_context(|| {
                format!("{}: context or measured is not what this version writes", path.display())
            })?
        }
        None => here(order)?,
    };
    let mut out = Out::new();
    if order.json {
        out.line(&serde_json::to_string_pretty(&report)?)?;
    } else {
        screen(&report, &mut out)?;
    }
    out.done()?;
    Ok(if report.worst() == Some(Level::Fail) { Exit::NotFound } else { Exit::Done })
}

fn here(order: &Rails) -> anyhow::Result<Report> {
    let loaded = load(&order.layers.inputs().with_environment())?;
    let tree = Arc::new(if order.record.is_some() { Tree::machine().recording() } else { Tree::machine() });
    let report = match node_says(order, &loaded)? {
        Some(report) => {
            if order.record.is_some() {
                Inventory::read(&tree, &[]);
            }
            report
        }
        None => alone(order, &loaded, &tree)?,
    };
    let nixl = Some(crate::node::nixl(&loaded.settings));
    let report = Report { nixl, ..report };
    if let Some(path) = &order.record {
        let text = format!("{}{}", tree.recorded(), report.lines()?);
        std::fs::write(path, text).with_context(|| format!("failed to write {}", path.display()))?;
        say(&format!("written: {}", path.display()));
    }
    Ok(report)
}

/// What the running node says, when there is one.
fn node_says(order: &Rails, loaded: &Loaded) -> anyhow::Result<Option<Report>> {
    let Ok(running) = Running::find(&loaded.places.node_file()) else { return Ok(None) };
    if !order.peer.is_empty() || !running.answers() {
        return Ok(None);
    }
    let answer =
        running.order_whole("/api/v1/rails/measure", &format!("{{\"transfer\":{}}}", !order.look))?;
    Ok(Some(serde_json::from_str(&answer).context("what the node says is not to be understood")?))
}

fn alone(order: &Rails, loaded: &Loaded, tree: &Arc<Tree>) -> anyhow::Result<Report> {
    let context = crate::node::rails_context(&loaded.settings);
    let inventory = Inventory::read(tree, &context.data);
    let measured = if order.peer.is_empty() || order.look {
        None
    } else {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let measured = runtime.block_on(measure::measure(tree, &inventory, &order.peer, Wire::Tcp, None));
        Some(Peering { measured: Some(measured), ..Peering::default() })
    };
    if measured.is_none() && !order.look {
        say(
            "no node runs here, so nothing was moved; start one on both boxes, or name the other box with --peer",
        );
    }
    Ok(Report::of(inventory, context, measured.into_iter().collect()))
}

fn screen(report: &Report, out: &mut Out) -> std::io::Result<()> {
    if !report.inventory.rails.is_empty() {
        let title =
            report.node.as_deref().map_or("rails".to_owned(), |node| format!("rails of {}", clean(node)));
        out.line(&out.tint(Tint::Bold, &title))?;
        table(&report.inventory, out)?;
        out.line("")?;
    }
    for of in report.uses.iter().filter(|of| of.bytes_per_s > 0) {
        let how = if of.rdma { "RDMA" } else { "TCP" };
        let share = of.share_percent.unwrap_or(0);
        let rate = super::status::about(of.bytes_per_s);
        out.line(&format!(
            "  {} carried {share} % in the last minute: {rate}/s, mostly by {how}",
            clean(&of.device)
        ))?;
    }
    for peer in report.peers.iter().filter(|peer| !peer.speeds.is_empty()) {
        speeds(peer, out)?;
    }
    for verdict in &report.verdicts {
        say_verdict(verdict, report.peers.len() > 1, out)?;
    }
    if let Some(fabric) = &report.fabric {
        out.line(&out.tint(Tint::Dim, &format!("note    rows travel over {}", clean(fabric))))?;
    } else if let Some(nixl) = &report.nixl {
        out.line(&out.tint(Tint::Dim, &format!("note    {}", nixl_words(nixl))))?;
    }
    if report.verdicts.is_empty() {
        out.line("nothing is wrong with what can be seen without moving anything")?;
    }
    Ok(())
}

/// What was measured with one other node.
fn speeds(peer: &Peering, out: &mut Out) -> std::io::Result<()> {
    let moved = peer.measured.iter().flat_map(|m| &m.alone).map(|run| run.bytes).max().unwrap_or(0);
    let with = peer.name.as_deref().map_or(String::new(), |name| format!(" from {}", clean(name)));
    out.line(&out.tint(Tint::Bold, &format!("{}{with}", super::status::about(moved))))?;
    let width = peer.speeds.iter().map(|speed| speed.over.len()).max().unwrap_or(0);
    for speed in &peer.speeds {
        let (rdma, tcp) = (speed.rdma_share * 100.0, speed.tcp_share * 100.0);
        let over = clean(&speed.over);
        out.line(&format!(
            "  {over:width$}  {:7.2} Gb/s   the kernel counted {rdma:.0} % by RDMA, {tcp:.0} % by TCP",
            speed.gbit_s
        ))?;
    }
    out.line("")
}

fn table(inventory: &Inventory, out: &mut Out) -> std::io::Result<()> {
    let head = ["device", "address", "link", "MTU", "PCIe", "RDMA", "GID", "twin"].map(str::to_owned);
    let lines: Vec<[String; 8]> = std::iter::once(head).chain(inventory.rails.iter().map(cells)).collect();
    let widths: Vec<usize> =
        (0..8).map(|n| lines.iter().map(|cells| cells[n].chars().count()).max().unwrap_or(0)).collect();
    for cells in &lines {
        let padded: Vec<String> =
            cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        out.line(format!("  {}", padded.join("  ")).trim_end())?;
    }
    Ok(())
}

fn cells(rail: &Rail) -> [String; 8] {
    let none = || "-".to_owned();
    let speed = rail.link_mb_s.map_or("up".to_owned(), |mb| format!("{} Gb/s", mb as f64 / 1e3));
    let link = match rail.carrier {
        Some(true) => speed,
        Some(false) => "no cable".to_owned(),
        None => "down".to_owned(),
    };
    let addresses: Vec<String> = rail.addresses.iter().map(ToString::to_string).collect();
    let rdma = rail.rdma.as_ref().map(|rdma| {
        let shut = match &rdma.verbs {
            Some((_, Access::Opens)) => "",
            _ => ", does not open",
        };
        let mtu = rdma.mtu.map_or(String::new(), |mtu| format!(" MTU {mtu}"));
        format!("{}{mtu}{shut}", rdma.device)
    });
    let gid = rail.rdma.as_ref().and_then(|rdma| Some(rdma.gid.as_ref()?.index.to_string()));
    let pcie = rail.pcie.as_ref().and_then(|pcie| Some(format!("{} GT/s x{}", pcie.gt_s?, pcie.width?)));
    [
        rail.device.clone(),
        if addresses.is_empty() { none() } else { addresses.join(" ") },
        link,
        rail.mtu.to_string(),
        pcie.unwrap_or_else(none),
        rdma.unwrap_or_else(none),
        gid.unwrap_or_else(none),
        rail.twin.clone().unwrap_or_else(none),
    ]
    .map(|cell| clean(&cell))
}

/// Where no node runs that could say what it uses.
fn nixl_words(nixl: &Nixl) -> String {
    let Nixl { library, version, looked_in } = nixl;
    match library {
        Some(at) => {
            let version = version.as_deref().map_or(String::new(), |version| format!(" {version}"));
            clean(&format!("NIXL{version} is at {}; a node uses it as cluster.fabric says", at.display()))
        }
        None => {
            let looked: Vec<String> = looked_in.iter().map(|at| at.display().to_string()).collect();
            clean(&format!("NIXL is not installed (looked in {}); rows travel by TCP", looked.join(", ")))
        }
    }
}

/// With `named`, says which other node it was seen with.
fn say_verdict(verdict: &Verdict, named: bool, out: &mut Out) -> std::io::Result<()> {
    let (tint, word) = match verdict.level {
        Level::Ok => (Tint::Good, "ok"),
        Level::Note => (Tint::Dim, "note"),
        Level::Warn => (Tint::Warn, "warning"),
        Level::Fail => (Tint::Bad, "FAULT"),
    };
    let with = verdict.peer.as_ref().filter(|_| named).map_or(String::new(), |peer| format!("with {peer}: "));
    out.line(&format!(
        "{} {}",
        out.tint(tint, &format!("{word:7}")),
        clean(&format!("{with}{}", verdict.what))
    ))?;
    for (name, text) in [("because", &verdict.cause), ("to do", &verdict.fix)] {
        if !text.is_empty() {
            out.line(&format!("        {name}: {}", clean(text)))?;
        }
    }
    Ok(())
}
