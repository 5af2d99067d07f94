//! The verbs that stay: `up` and the processes it starts. This file turns arguments into settings and hands over;
//! what runs is in `keeper`, `node`, `engine::guard` and `mock`.

use std::ffi::OsString;
use std::io::Read;

use anyhow::{Context, bail};

use super::Start;
use super::out::{Exit, Told};
use crate::settings::{Loaded, load};

/// What the keeper starts the node with: the same settings, the join token in the environment only.
#[derive(Clone, Debug)]
pub struct NodeCommand {
    /// After `spark-kv node`.
    pub words: Vec<OsString>,
    pub env: Vec<(String, String)>,
}

pub(super) fn up(mut start: Start) -> anyhow::Result<Exit> {
    if start.join.as_deref() == Some("-") {
        start.join = Some(token_from(std::io::stdin().lock())?);
    }
    let loaded = settings(&start)?;
    let join = loaded.settings.cluster.join.clone();
    let env = if join.is_empty() { Vec::new() } else { vec![("SPARK_KV_JOIN".to_owned(), join)] };
    let node = NodeCommand { words: start.again(), env };
    keep(&loaded, &node)
}

pub(super) fn node(start: &Start) -> anyhow::Result<Exit> {
    serve(&settings(start)?)
}

fn settings(start: &Start) -> anyhow::Result<Loaded> {
    let loaded = load(&start.inputs().with_environment())?;
    loaded.ready_to_start()?;
    Ok(loaded)
}

/// A token is one line of some 150 bytes.
fn token_from(input: impl Read) -> anyhow::Result<String> {
    let mut text = String::new();
    input
        .take(4096)
        .read_to_string(&mut text)
        .context("failed to read the join token from standard input")?;
    match text.split_whitespace().next() {
        Some(token) => Ok(token.to_owned()),
        None => {
            let what = "no join token on standard input".to_owned();
            Err(Told { exit: Exit::Usage, what }.into())
        }
    }
}

fn keep(loaded: &Loaded, node: &NodeCommand) -> anyhow::Result<Exit> {
    let (name, NodeCommand { words, env }) = (&loaded.settings.node.name, node);
    tracing::debug!(name, ?words, variables = env.len(), "the node's command");
    bail!("`up` is not built yet")
}

fn serve(_loaded: &Loaded) -> anyhow::Result<Exit> {
    bail!("`node` is not built yet")
}

pub(super) fn guard(_words: Vec<OsString>) -> anyhow::Result<Exit> {
    bail!("`guard` is not built yet")
}

pub(super) fn mock_engine(_words: Vec<OsString>) -> anyhow::Result<Exit> {
    bail!("`mock-engine` is not built yet")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_the_first_word_of_the_input() {
        assert_eq!(token_from(&b"spark1-a-b-c\n"[..]).unwrap(), "spark1-a-b-c");
        assert!(token_from(&b" \n"[..]).is_err());
        assert!(token_from(&[0xff_u8, 0xfe][..]).is_err());
    }
}
