//! `cluster`: the nodes that the running one knows, and how one of them is taken out.

use clap::{Args, Subcommand};

use super::Layers;
use super::ask::{Running, not_found};
use super::out::{Exit, Out, Tint};
use super::status::{ago, clean};
use crate::api::members::{Forgotten, Named};
use crate::base::clock::unix_seconds;
use crate::cluster::{Member, MemberState};
use crate::settings::load;

#[derive(Debug, Subcommand)]
pub(super) enum Verb {
    /// List the other nodes that the running one knows.
    Ls(Ls),
    /// Do not know a node any more: one that left for good keeps this one degraded otherwise. It can come back only
    /// with a token. The rows that it held are its own affair.
    Forget(Forget),
}

#[derive(Debug, Args)]
pub(super) struct Ls {
    #[command(flatten)]
    layers: Layers,
    /// Everything, as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(super) struct Forget {
    #[command(flatten)]
    layers: Layers,
    /// Its name, its id, or the first 8 digits of its id.
    #[arg(value_name = "NODE")]
    node: String,
}

pub(super) fn run(verb: Verb) -> anyhow::Result<Exit> {
    match verb {
        Verb::Ls(ls) => list(&ls),
        Verb::Forget(forget) => take_out(forget),
    }
}

fn running(layers: &Layers) -> anyhow::Result<Running> {
    Running::find(&load(&layers.inputs().with_environment())?.places.node_file())
}

fn odd(error: impl std::fmt::Display) -> anyhow::Error {
    not_found(format!("what the node says is not to be understood: {error}"))
}

fn list(ls: &Ls) -> anyhow::Result<Exit> {
    let body = running(&ls.layers)?.get("/api/v1/cluster")?;
    let members: Vec<Member> = serde_json::from_slice(&body).map_err(odd)?;
    let mut out = Out::new();
    if ls.json {
        out.line(&serde_json::to_string_pretty(&members)?)?;
    } else if members.is_empty() {
        out.line("no other node is known")?;
    }
    for member in members.iter().filter(|_| !ls.json) {
        let (tint, word) = match member.state {
            MemberState::Connected => (Tint::Good, "connected"),
            MemberState::Gone => (Tint::Bad, "gone"),
        };
        out.line(&format!(
            "{}  {} {}  at {}, generation {}, {} rows of use here; id {}",
            out.tint(Tint::Bold, &clean(&member.name)),
            out.tint(tint, word),
            ago(unix_seconds(), member.since),
            clean(&member.address),
            member.generation,
            member.keys,
            clean(&member.id)
        ))?;
        for what in &member.differs {
            out.line(&format!("  {}", out.tint(Tint::Warn, &format!("! {}", clean(what)))))?;
        }
    }
    out.done()?;
    Ok(Exit::Done)
}

fn take_out(forget: Forget) -> anyhow::Result<Exit> {
    let order = serde_json::to_string(&Named { node: forget.node })?;
    let text = running(&forget.layers)?.order_whole("/api/v1/cluster/forget", &order)?;
    let Forgotten { name } = serde_json::from_str(&text).map_err(odd)?;
    let mut out = Out::new();
    out.line(&format!("{} is not known any more; a token lets it in again", clean(&name)))?;
    out.done()?;
    Ok(Exit::Done)
}
