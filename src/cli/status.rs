//! `status`: asks the running node over its public port and shows the answer on one screen.

use std::collections::BTreeMap;

use super::Status;
use super::ask::{Running, not_found};
use super::out::{Exit, Out, Tint};
use crate::base::frame::Sources;
use crate::base::units::Bytes;
use crate::observe::health::Verdict;
use crate::observe::requests::{Request, Totals};
use crate::observe::state::{NodeView, PeerView, State, Tier, Waiting};
use crate::settings::load;

/// Requests on the screen.
const SHOWN: usize = 10;

pub(super) fn show(status: &Status) -> anyhow::Result<Exit> {
    let running = match &status.url {
        Some(url) => Running::at(url, status.key_file.as_deref())?,
        None => {
            let loaded = load(&status.layers.inputs().with_environment())?;
            Running::find(&loaded.places.node_file())?
        }
    };
    let body = running.get("/api/v1/state")?;
    let url = &running.url;
    let state: State = serde_json::from_slice(&body).map_err(|error| {
        not_found(format!("what answers at {url} is no spark-kv of this version: {error}"))
    })?;
    if state.now_unix == 0 {
        return Err(not_found(format!("the node at {url} is just starting: ask again in a second")));
    }
    let mut out = Out::new();
    if status.json {
        out.line(&String::from_utf8_lossy(&body))?;
    } else {
        screen(&state, &mut out)?;
    }
    out.done()?;
    Ok(if state.node.health.serves() { Exit::Done } else { Exit::NotFound })
}

fn screen(state: &State, out: &mut Out) -> std::io::Result<()> {
    node(&state.node, None, state.now_unix, out)?;
    for peer in &state.peers {
        out.line("")?;
        match &peer.view {
            Some(view) => node(view, Some(peer), state.now_unix, out)?,
            None => out.line(&format!(
                "{}  {}",
                out.tint(Tint::Bold, &clean(&peer.name)),
                peer_words(peer, state.now_unix, out)
            ))?,
        }
    }
    out.line("")?;
    out.line(&tokens(&state.totals))?;
    if !state.requests.is_empty() {
        out.line("")?;
        out.line(&out.tint(Tint::Bold, "last requests"))?;
    }
    for request in state.requests.iter().take(SHOWN) {
        out.line(&line_of(request, state.now_unix))?;
    }
    out.line("")?;
    if state.alerts.is_empty() {
        return out.line("no alerts");
    }
    out.line(&out.tint(Tint::Bold, "alerts"))?;
    for a in &state.alerts {
        let since = ago(state.now_unix, a.alert.since_unix);
        let head = format!("! {} on {}, {since}: {}", a.alert.code, clean(&a.node), clean(&a.alert.cause));
        out.line(&format!("  {}", out.tint(Tint::Bad, &head)))?;
        out.line(&format!("    what to do: {}", clean(&a.alert.next_step)))?;
    }
    Ok(())
}

fn node(view: &NodeView, peer: Option<&PeerView>, now: u64, out: &mut Out) -> std::io::Result<()> {
    let gone = peer.is_some_and(|peer| !peer.connected);
    let (tint, word) = match view.health.status {
        Verdict::Ok => (Tint::Good, "ok"),
        Verdict::Degraded => (Tint::Warn, "degraded"),
        Verdict::Down => (Tint::Bad, "down"),
    };
    let verdict = match peer {
        Some(peer) if gone => peer_words(peer, now, out),
        _ => format!("{}, serving {}", out.tint(tint, word), clean(&view.health.serving)),
    };
    out.line(&format!("{}  {verdict}  {}", out.tint(Tint::Bold, &clean(&view.name)), clean(&view.url)))?;
    if gone {
        out.line("  what it said last:")?;
    }
    let engine = &view.engine;
    let reason = engine.reason.as_deref().map(|why| format!(": {}", clean(why))).unwrap_or_default();
    out.line(&format!(
        "  engine   {} {}{reason}; {} running{}, {} restarts; model {}",
        clean(&engine.phase),
        ago(now, engine.since_unix),
        engine.running,
        in_line(engine.waiting),
        engine.restarts,
        clean(&engine.served_name)
    ))?;
    let tokens = &view.tokens;
    if tokens.exact {
        let (proved, checked) = (tokens.proved, tokens.checked);
        out.line(&format!("  tokens   exact: {proved} probes and {checked} requests agree with the engine"))?;
    } else if !tokens.why.is_empty() {
        out.line(&format!("  tokens   guessed: {}", clean(&tokens.why)))?;
    }
    for (name, check) in view.health.checks.iter().filter(|(name, _)| *name != "engine") {
        let mark = if check.ok { "" } else { "! " };
        let line = format!("{mark}{}", clean(&check.what));
        let line = if check.ok { line } else { out.tint(Tint::Warn, &line) };
        out.line(&format!("  {:8} {line}", clean(name)))?;
    }
    if let Some(line) = broken_words(&view.cache.broken_promises) {
        out.line(&format!("  {:8} {}", "loads", out.tint(Tint::Warn, &line)))?;
    }
    for tier in &view.tiers {
        out.line(&format!("  {:8} {}", clean(&tier.name), tier_words(tier)))?;
    }
    if let Some(line) = rail_words(&view.rails) {
        out.line(&format!("  {:8} {line}", "rails"))?;
    }
    if !view.fabric.is_empty() {
        out.line(&format!("  {:8} {}", "fabric", clean(&view.fabric)))?;
    }
    Ok(())
}

/// Loads that failed although a lookup had said that the rows are there.
fn broken_words(broken: &BTreeMap<String, u64>) -> Option<String> {
    let reasons: Vec<_> = broken.iter().filter(|(_, rows)| **rows > 0).collect();
    let all: u64 = reasons.iter().map(|(_, rows)| **rows).sum();
    let each: Vec<_> = reasons.iter().map(|(reason, rows)| format!("{} {rows}", clean(reason))).collect();
    (all > 0).then(|| format!("! {all} rows were promised and did not come: {}", each.join(", ")))
}

/// What each rail carried in the last minute. None: the box has none, or does not say.
fn rail_words(rails: &crate::rails::View) -> Option<String> {
    let words = |of: &crate::rails::Use| {
        let share = of
            .share_percent
            .map_or("idle".to_owned(), |share| format!("{share} %, {}/s", about(of.bytes_per_s)));
        format!("{} {share}{}", clean(&of.device), if of.silent { " ! silent" } else { "" })
    };
    let each: Vec<String> = rails.uses.iter().map(words).collect();
    (!each.is_empty()).then(|| each.join("; "))
}

/// Who waits for room, where somebody does.
fn in_line(waiting: Waiting) -> String {
    if waiting.all() == 0 {
        return String::new();
    }
    let Waiting { interactive, normal, batch } = waiting;
    format!(", {} in line ({interactive} interactive, {normal} normal, {batch} batch)", waiting.all())
}

fn peer_words(peer: &PeerView, now: u64, out: &Out) -> String {
    let tint = if peer.connected { Tint::Good } else { Tint::Bad };
    format!(
        "{} {} ({})",
        out.tint(tint, &clean(&peer.state)),
        ago(now, peer.since_unix),
        clean(&peer.address)
    )
}

fn tier_words(tier: &Tier) -> String {
    match tier.used_bytes {
        Some(used) => format!(
            "{} {} rows, {} of {}",
            bar(used, tier.capacity_bytes),
            tier.rows,
            about(used),
            about(tier.capacity_bytes)
        ),
        None if tier.rows > 0 => {
            format!("{} rows, {}, kept by the engine", tier.rows, about(tier.capacity_bytes))
        }
        None => format!("{}, kept by the engine", about(tier.capacity_bytes)),
    }
}

fn bar(used: u64, of: u64) -> String {
    const WIDTH: u64 = 20;
    // Something is never drawn as nothing.
    let full = if of == 0 { 0 } else { (u128::from(used) * u128::from(WIDTH)).div_ceil(u128::from(of)) };
    let full = usize::try_from(full.min(u128::from(WIDTH))).unwrap_or(0);
    format!("[{}{}]", "#".repeat(full), ".".repeat(WIDTH as usize - full))
}

/// Three digits are enough to look at.
pub(super) fn about(bytes: u64) -> String {
    let (unit, word) = match bytes {
        0..Bytes::KIB => return format!("{bytes} B"),
        Bytes::KIB..Bytes::MIB => (Bytes::KIB, "KiB"),
        Bytes::MIB..Bytes::GIB => (Bytes::MIB, "MiB"),
        _ => (Bytes::GIB, "GiB"),
    };
    let n = bytes as f64 / unit as f64;
    let places = if n >= 99.95 {
        0
    } else if n >= 9.995 {
        1
    } else {
        2
    };
    format!("{n:.places$} {word}")
}

pub(super) fn ago(now: u64, then: u64) -> String {
    if then == 0 {
        return "since an unknown time".into();
    }
    match now.saturating_sub(then) {
        s @ 0..120 => format!("for {s} s"),
        s @ 120..7200 => format!("for {} min", s / 60),
        s @ 7200..172_800 => format!("for {} h", s / 3600),
        s => format!("for {} d", s / 86_400),
    }
}

fn tokens(t: &Totals) -> String {
    if t.prompt == 0 {
        return "no prompt token was seen yet".into();
    }
    let share = |n: u64| n as f64 * 100.0 / t.prompt as f64;
    format!(
        "{} prompt tokens in {} prompts: {:.1} % device, {:.1} % staging, {:.1} % own drive, {:.1} % peer, {:.1} % computed",
        t.prompt,
        t.prompts,
        share(t.device),
        share(t.staging),
        share(t.drive),
        share(t.peer),
        share(t.computed)
    )
}

fn line_of(r: &Request, now: u64) -> String {
    let sources = match r.sources {
        None => "sources not reported".to_owned(),
        Some(Sources { prompt, device, staging, drive, peer, computed }) => {
            let parts = [
                ("device", device),
                ("staging", staging),
                ("drive", drive),
                ("peer", peer),
                ("computed", computed),
            ];
            let parts: Vec<String> =
                parts.iter().filter(|(_, n)| *n > 0).map(|(word, n)| format!("{word} {n}")).collect();
            format!("{prompt} tokens: {}", parts.join(", "))
        }
    };
    let answer = match (r.ttft_ms, r.status) {
        _ if r.broken => "the engine broke off".to_owned(),
        (Some(ms), _) => format!("{ms} ms to first"),
        (None, 499) => "client left".to_owned(),
        (None, 400..) => "failed".to_owned(),
        (None, _) => format!("{} ms in all", r.duration_ms),
    };
    let node = if r.node.is_empty() { "no box" } else { &r.node };
    format!(
        "  {:>4} s ago  {}  {} on {}  {sources}  {answer}  {}",
        now.saturating_sub(r.started_unix),
        r.status,
        clean(&r.endpoint),
        clean(node),
        clean(&r.why)
    )
}

/// Text that came from elsewhere must not steer a terminal.
pub(super) fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_for_reading() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1536, "1.50 KiB"),
            (10 << 20, "10.0 MiB"),
            (300 << 30, "300 GiB"),
            (2 << 40, "2048 GiB"),
        ] {
            assert_eq!(about(bytes), text);
        }
        for (then, text) in [(0, "since an unknown time"), (1_000_000, "for 0 s"), (999_000, "for 16 min")] {
            assert_eq!(ago(1_000_000, then), text);
        }
    }

    #[test]
    fn a_bar_is_as_full_as_the_tier_and_never_longer() {
        assert_eq!(bar(0, 10), format!("[{}]", ".".repeat(20)));
        assert_eq!(bar(1, 1000), format!("[#{}]", ".".repeat(19)));
        assert_eq!(bar(u64::MAX, 1), format!("[{}]", "#".repeat(20)));
        assert_eq!(bar(5, 0), format!("[{}]", ".".repeat(20)));
    }

    #[test]
    fn foreign_text_cannot_steer_the_terminal() {
        assert_eq!(clean("a\x1b[2Jb\nc"), "a [2Jb c");
    }
}
