//! `config show` and `config check`: the settings in force, where each came from, and whether they will do.

use serde_json::json;

use super::out::{Exit, Out, Tint, say};
use super::{Show, Start};
use crate::settings::{Loaded, load};

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
    let file = match &loaded.file {
        Some(path) => format!("file {}", path.display()),
        None => format!("no file at {}", loaded.places.settings_file.display()),
    };
    let profile = start.layers.profile.as_deref().unwrap_or("none");
    say(&format!("the settings are fine (profile {profile}, {file})"));
    Ok(Exit::Done)
}
