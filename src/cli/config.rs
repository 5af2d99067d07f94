//! `config show` and `config check`: the settings in force, where each came from, and whether they will do.
//!
//! The check also looks at what only this machine can tell: whether the folders can be written to, the ports are free
//! and the keys can be read. It leaves nothing behind. While a node of these settings runs, its ports are its own.

use std::io::{self, ErrorKind};
use std::net::TcpListener;
use std::path::Path;

use serde_json::json;

use super::ask::Running;
use super::out::{Exit, Out, Tint, say};
use super::{Show, Start};
use crate::api::Keys;
use crate::settings::{self, EngineKind, Loaded, Origin, Ports, Problem, load};

pub(super) fn show(show: &Show) -> anyhow::Result<Exit> {
    let loaded = load(&show.start.inputs().with_environment())?;
    let mut out = Out::new();
    if show.json {
        let values: serde_json::Map<String, serde_json::Value> = loaded
            .shown()
            .into_iter()
            .map(|v| (v.key, json!({ "value": v.value, "origin": v.origin.to_string() })))
            .collect();
        out.line(&serde_json::to_string_pretty(&values)?)?;
    } else {
        print(&loaded, show.origin, &mut out)?;
    }
    out.done()?;
    Ok(Exit::Done)
}

/// TOML that reads back, one table per section; origins stand behind as comments.
fn print(loaded: &Loaded, origin: bool, out: &mut Out) -> anyhow::Result<()> {
    let shown = loaded.shown();
    let mut lines: Vec<(String, String, String)> = shown
        .iter()
        .map(|v| {
            let (section, name) = split(&v.key);
            (section.to_owned(), format!("{name} = {}", v.value), v.origin.to_string())
        })
        .collect();
    lines.sort_by(|a, b| a.0.cmp(&b.0));
    let width = lines.iter().map(|(_, line, _)| line.chars().count()).filter(|w| *w <= 60).max().unwrap_or(0);
    let mut section = "";
    for (of, line, from) in &lines {
        if of != section {
            let gap = if section.is_empty() { "" } else { "\n" };
            out.line(&format!("{gap}{}", out.tint(Tint::Bold, &format!("[{of}]"))))?;
            section = of;
        }
        if origin {
            let from = out.tint(Tint::Dim, &format!("# {from}"));
            out.line(&format!("{line:width$}  {from}"))?;
        } else {
            out.line(line)?;
        }
    }
    Ok(())
}

/// The table a key stands in, and its name there. Names of free keys are quoted where TOML wants it.
fn split(key: &str) -> (&str, String) {
    let (section, name) = match key.strip_prefix("engine.env.") {
        Some(name) => ("engine.env", name),
        None => key.split_once('.').unwrap_or(("", key)),
    };
    let bare = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
    let name = if bare { name.to_owned() } else { toml::Value::String(name.to_owned()).to_string() };
    (section, name)
}

pub(super) fn check(start: &Start) -> anyhow::Result<Exit> {
    let loaded = load(&start.inputs().with_environment())?;
    loaded.ready_to_start()?;
    let found = [folders(&loaded), ports(&loaded), keys(&loaded)].concat();
    if !found.is_empty() {
        let problem = |(key, what): (&str, String)| {
            let origin = loaded.origin(key).cloned().unwrap_or(Origin::Default);
            Problem { origin, key: key.to_owned(), what }
        };
        return Err(settings::Error(found.into_iter().map(problem).collect()).into());
    }
    let file = match &loaded.file {
        Some(path) => format!("file {}", path.display()),
        None => format!("no file at {}", loaded.places.settings_file.display()),
    };
    let profile = start.layers.profile.as_deref().unwrap_or("none");
    say(&format!("the settings are fine (profile {profile}, {file})"));
    Ok(Exit::Done)
}

/// A key, and why its value does not do on this machine.
type Finding = (&'static str, String);

fn folders(loaded: &Loaded) -> Vec<Finding> {
    let places = &loaded.places;
    let cannot = |path: &&std::path::PathBuf| {
        let error = try_folder(path).err()?;
        Some(("node.root", format!("the folder {} cannot be made or written to: {error}", path.display())))
    };
    [&places.state, &places.run, &places.log].iter().filter_map(cannot).collect()
}

/// Makes a folder in what of `path` is there already, and removes it.
fn try_folder(path: &Path) -> io::Result<()> {
    // A name that cannot be looked up is there for all that matters: making something in it fails with the reason.
    let is_there =
        |path: &&Path| !matches!(path.symlink_metadata(), Err(e) if e.kind() == ErrorKind::NotFound);
    let there = path.ancestors().find(is_there).unwrap_or(Path::new("/"));
    let probe = there.join(format!(".spark-kv-check-{}", std::process::id()));
    std::fs::create_dir(&probe)?;
    std::fs::remove_dir(&probe)
}

fn ports(loaded: &Loaded) -> Vec<Finding> {
    if Running::find(&loaded.places.node_file()).is_ok_and(|running| running.answers()) {
        return Vec::new();
    }
    let (listen, cluster) = (&loaded.settings.listen, &loaded.settings.cluster);
    let ports = Ports::of(listen);
    let at = |address: &str, port: u16| match address.contains(':') {
        true => format!("[{address}]:{port}"),
        false => format!("{address}:{port}"),
    };
    let mut wanted = vec![("listen.address", at(&listen.address, ports.public))];
    if loaded.settings.engine.kind != EngineKind::Attached {
        wanted.push(("listen.address", at("127.0.0.1", ports.engine)));
    }
    wanted.push(("cluster.address", at(&cluster.address, ports.control)));
    let data = if cluster.rails.is_empty() { "cluster.address" } else { "cluster.rails" };
    wanted.extend(cluster.data_addresses(ports.data).into_iter().map(|address| (data, address)));
    let cannot = |(key, address): (&'static str, String)| {
        let error = TcpListener::bind(&address).err()?;
        Some(match error.kind() {
            ErrorKind::AddrInUse => {
                let what = format!("{address} is taken by another program: choose other ports, or end it");
                ("listen.port", what)
            }
            ErrorKind::AddrNotAvailable => (key, format!("{address} is no address of this machine")),
            _ => (key, format!("failed to listen on {address}: {error}")),
        })
    };
    wanted.into_iter().filter_map(cannot).collect()
}

fn keys(loaded: &Loaded) -> Vec<Finding> {
    let file = &loaded.settings.listen.api_keys_file;
    if file.as_os_str().is_empty() {
        return Vec::new();
    }
    Keys::read(file).err().map(|error| ("listen.api_keys_file", error.to_string())).into_iter().collect()
}
