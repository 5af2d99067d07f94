//! The verbs that stay: `up` and the processes it starts. This file turns arguments into settings and hands over;
//! what runs is in `keeper`, `node`, `engine::guard` and `mock`.

use std::ffi::OsString;
use std::io::Read;
use std::sync::Arc;

use anyhow::Context;
use clap::Parser;
use tracing_subscriber::EnvFilter;

use super::out::{self, Exit, Told};
use super::{Provision, Start};
use crate::engine::{self, Own, provision};
use crate::keeper::{self, NodeCommand};
use crate::settings::{self, Loaded, Places, load};
use crate::{mock, node};

pub(super) fn up(mut start: Start) -> anyhow::Result<Exit> {
    if start.join.as_deref() == Some("-") {
        start.join = Some(token_from(std::io::stdin().lock())?);
    }
    let loaded = checked(&start)?;
    let join = loaded.settings.cluster.join.clone();
    let env = if join.is_empty() { Vec::new() } else { vec![("SPARK_KV_JOIN".to_owned(), join)] };
    let node = NodeCommand { words: start.again(), env };
    keep(loaded, node)
}

pub(super) fn node(start: &Start) -> anyhow::Result<Exit> {
    serve(checked(start)?)
}

fn checked(start: &Start) -> anyhow::Result<Loaded> {
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

/// The rest of `up`: from here on the keeper has the word.
fn keep(loaded: Loaded, node: NodeCommand) -> anyhow::Result<Exit> {
    let code = keeper::run(orders(loaded, node))?;
    Ok(if code == 0 { Exit::Done } else { Exit::Failed })
}

fn orders(loaded: Loaded, node: NodeCommand) -> keeper::Options {
    let settings = loaded.settings;
    keeper::Options {
        places: Places::of(&settings),
        settings,
        node,
        own: Own::this(),
        cache: provision::cache_folder(),
        say: Arc::new(out::say),
    }
}

/// `provision`: what `up` would make first, and nothing else.
pub(super) fn provide(order: &Provision) -> anyhow::Result<Exit> {
    let loaded = load(&order.layers.inputs().with_environment())?;
    let made = keeper::provide(&orders(loaded, NodeCommand::default()))?;
    let mut out = out::Out::new();
    if order.print_python {
        out.line(&made.venv.join("bin/python").display().to_string())?;
    } else {
        out.line(&format!("vLLM: {}", made.venv.display()))?;
        out.line(&format!("model: {} (served as {})", made.model.display(), made.served_name))?;
    }
    Ok(Exit::Done)
}

fn serve(loaded: Loaded) -> anyhow::Result<Exit> {
    let settings = loaded.settings;
    log_to_stderr(&settings.log);
    let places = Places::of(&settings);
    match node::run(settings, places) {
        Ok(()) => Ok(Exit::Done),
        Err(error @ node::Error::Broken) => Err(error.into()),
        Err(error) => Err(Told { exit: Exit::CannotStart, what: out::whole(&error.into()) }.into()),
    }
}

/// The log's one set-up. Its lines go to stderr, which the keeper passes on.
fn log_to_stderr(log: &settings::Log) {
    let filter = EnvFilter::try_new(&log.level).unwrap_or_else(|_| EnvFilter::new("info"));
    let builder =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false);
    if log.json {
        builder.json().init();
    } else {
        builder.with_target(false).init();
    }
}

pub(super) fn guard(words: &[OsString]) -> anyhow::Result<Exit> {
    match engine::guard::run(words) {
        0 => Ok(Exit::Done),
        code => Ok(Exit::Child(u8::try_from(code).unwrap_or(1))),
    }
}

pub(super) fn mock_engine(words: Vec<OsString>) -> anyhow::Result<Exit> {
    let options = match mock::Options::try_parse_from(words) {
        Ok(options) => options,
        Err(error) => return Ok(super::told_by_clap(&error)),
    };
    log_to_stderr(&settings::Log::default());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(mock::run(options))?;
    Ok(Exit::Done)
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
