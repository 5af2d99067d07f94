//! The fence: rules of the house that a compiler does not know, each with what to do when it fails.
//!
//! The floors say who may know whom; a pure file has no clock and no I/O; `unsafe` stays where it is watched; each
//! file says what it is for. The checks are functions from text to findings, so that the negative controls at the end
//! can show each of them a file that breaks its rule.

#![expect(clippy::unwrap_used, reason = "helpers of tests: a test that cannot go on panics")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// A module's floor. It may name modules of lower floors, and those in `sees` of its own.
struct Room {
    name: &'static str,
    floor: u8,
    sees: &'static [&'static str],
}

const fn room(name: &'static str, floor: u8) -> Room {
    Room { name, floor, sees: &[] }
}

/// From the ground up. A new edge in `sees` says why in its commit.
const FLOORS: [Room; 22] = [
    room("base", 0),
    room("tasks", 1),
    room("meter", 1),
    room("settings", 1),
    room("store", 2),
    room("transfer", 2),
    room("rails", 2),
    room("engine", 2),
    room("watch", 2),
    room("trace", 2),
    room("cluster", 3),
    room("observe", 3),
    room("router", 4),
    room("api", 5),
    room("mock", 5),
    room("bench", 5),
    room("sim", 5),
    room("node", 6),
    room("keeper", 6),
    room("cli", 7),
    room("lib", 8),
    room("main", 8),
];

fn floor(module: &str) -> Option<&'static Room> {
    FLOORS.iter().find(|room| room.name == module)
}

/// Files that may hold `unsafe`, with its reasons beside each block.
const UNSAFE: [&str; 8] = [
    "base/shm.rs",
    "bench/raw.rs",
    "store/ring.rs",
    "store/disk.rs",
    "engine/child.rs",
    "transfer/nixl/arena.rs",
    "transfer/nixl/library.rs",
    "transfer/nixl/mod.rs",
];

/// Files that decide and do not act. `store/index.rs` reads no clock and does no I/O either, but owns the channel that
/// its changes leave through: a listing and the changes after it are cut at one point.
const PURE: [&str; 78] = [
    "api/local/lease.rs",
    "api/local/promise.rs",
    "base/block.rs",
    "base/checksum.rs",
    "base/codec.rs",
    "base/fault.rs",
    "base/frame.rs",
    "base/geometry.rs",
    "base/units.rs",
    "bench/matrix/workload.rs",
    "bench/router/figures.rs",
    "bench/router/session.rs",
    "bench/stats.rs",
    "cluster/facts.rs",
    "cluster/peer.rs",
    "cluster/proto.rs",
    "cluster/sharing.rs",
    "cluster/telling.rs",
    "engine/events/held.rs",
    "engine/events/wire.rs",
    "engine/machine.rs",
    "mock/cache.rs",
    "mock/hits.rs",
    "mock/pace.rs",
    "mock/pool.rs",
    "mock/schedule.rs",
    "mock/wire.rs",
    "observe/alerts.rs",
    "observe/chains.rs",
    "observe/health.rs",
    "observe/requests.rs",
    "observe/state.rs",
    "rails/measured.rs",
    "rails/verdict.rs",
    "rails/verdict/measurement.rs",
    "rails/verdict/setup.rs",
    "rails/watch.rs",
    "router/ask.rs",
    "router/book.rs",
    "router/chain.rs",
    "router/coverage.rs",
    "router/laws.rs",
    "router/miss/mod.rs",
    "router/miss/outline.rs",
    "router/nonce.rs",
    "router/owners.rs",
    "router/policy.rs",
    "router/prefix.rs",
    "router/price/backlog.rs",
    "router/price/mod.rs",
    "router/price/speed.rs",
    "router/queue.rs",
    "router/refusal.rs",
    "router/splice.rs",
    "router/tokens/anthropic.rs",
    "router/tokens/args.rs",
    "router/tokens/chat.rs",
    "router/tokens/json.rs",
    "router/tokens/probes.rs",
    "router/tokens/recent.rs",
    "router/tokens/trail.rs",
    "router/tokens/trust.rs",
    "router/usage.rs",
    "settings/check.rs",
    "sim/plan.rs",
    "sim/rivals.rs",
    "sim/tally.rs",
    "store/budget.rs",
    "store/format.rs",
    "store/ledger.rs",
    "store/scrub.rs",
    "store/survey.rs",
    "trace/blocks.rs",
    "trace/info.rs",
    "trace/weka.rs",
    "transfer/line.rs",
    "transfer/share.rs",
    "transfer/wire.rs",
];

const IMPURE: [&str; 12] = [
    "tokio::",
    "std::time::Instant",
    "time::Instant",
    "Instant::now",
    "SystemTime",
    "std::fs",
    "std::net::Tcp",
    "std::thread",
    "std::process",
    "std::env",
    "Clock::real",
    "unix_seconds(",
];

/// Words that have no place in the product, written apart so that this file does not hold them.
const FORBIDDEN: [&[&str]; 7] = [
    &["TO", "DO"],
    &["FIX", "ME"],
    &["XX", "X"],
    &["/wo", "rk/"],
    &["../sha", "red"],
    &["crates", ".io"],
    &["pypi", ".org"],
];

/// One broken rule.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Finding(String);

fn finding(path: &str, line: usize, what: &str, step: &str) -> Finding {
    Finding(format!("{path}:{}: {what}. {step}", line + 1))
}

/// Code without comments and without what stands in string literals; lines stay where they were.
fn code_of(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let chars: Vec<char> = text.chars().collect();
    let mut at = 0;
    while at < chars.len() {
        let next = |n: usize| chars.get(at + n).copied().unwrap_or('\0');
        match chars[at] {
            '/' if next(1) == '/' => {
                while at < chars.len() && chars[at] != '\n' {
                    at += 1;
                }
            }
            '/' if next(1) == '*' => {
                let mut depth = 0;
                while at < chars.len() {
                    let pair = (chars[at], chars.get(at + 1).copied().unwrap_or('\0'));
                    match pair {
                        ('/', '*') => (depth, at) = (depth + 1, at + 2),
                        ('*', '/') => (depth, at) = (depth - 1, at + 2),
                        ('\n', _) => {
                            out.push('\n');
                            at += 1;
                        }
                        _ => at += 1,
                    }
                    if depth == 0 {
                        break;
                    }
                }
            }
            'r' if (next(1) == '"' || (next(1) == '#' && (next(2) == '"' || next(2) == '#')))
                && !out.ends_with(|c: char| c.is_alphanumeric() || c == '_') =>
            {
                let marks = chars[at + 1..].iter().take_while(|c| **c == '#').count();
                let end: String = std::iter::once('"').chain(std::iter::repeat_n('#', marks)).collect();
                let body: String = chars[(at + 2 + marks).min(chars.len())..].iter().collect();
                let inner = body.find(&end).map_or(body.as_str(), |n| &body[..n]);
                out.push_str("\"\"");
                out.extend(inner.chars().filter(|c| *c == '\n'));
                at += 2 + marks + inner.chars().count() + end.chars().count();
            }
            '"' => {
                out.push_str("\"\"");
                at += 1;
                while at < chars.len() && chars[at] != '"' {
                    if chars[at] == '\n' {
                        out.push('\n');
                    }
                    at += if chars[at] == '\\' && chars.get(at + 1) != Some(&'\n') { 2 } else { 1 };
                }
                at += 1;
            }
            '\'' if next(1) == '\\' => {
                // A character that is escaped: its end is the next quote after the escaped one.
                at += 3;
                while at < chars.len() && chars[at] != '\'' {
                    at += 1;
                }
                at += 1;
            }
            '\'' if next(2) == '\'' => at += 3,
            c => {
                out.push(c);
                at += 1;
            }
        }
    }
    out
}

/// The part of a file that ships: what stands before its tests.
fn shipped(code: &str) -> &str {
    code.find("#[cfg(test)]\nmod tests").map_or(code, |end| &code[..end])
}

fn module_of(path: &str) -> &str {
    path.split('/').next().unwrap_or(path).trim_end_matches(".rs")
}

/// Names of modules of this crate that a line names through `crate::`, also in `crate::{a::x, b}`.
fn named(code: &str) -> Vec<(usize, Vec<String>)> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        if code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '$' || c == ':') {
            continue;
        }
        let line = code[..at].matches('\n').count();
        let rest = &code[at + "crate::".len()..];
        match rest.strip_prefix('{') {
            None => found.push((line, vec![path_of(rest)])),
            Some(group) => {
                let mut depth = 1;
                let mut part = String::new();
                for c in group.chars() {
                    match c {
                        '{' => depth += 1,
                        '}' => depth -= 1,
                        _ => {}
                    }
                    if depth == 0 || (depth == 1 && c == ',') {
                        found.push((line, vec![path_of(part.trim())]));
                        part.clear();
                        if depth == 0 {
                            break;
                        }
                    } else {
                        part.push(c);
                    }
                }
            }
        }
    }
    found.retain(|(_, paths)| paths.iter().any(|path| !path.is_empty()));
    found
}

fn path_of(text: &str) -> String {
    text.chars().take_while(|c| c.is_alphanumeric() || *c == '_' || *c == ':').collect()
}

fn climbs(path: &str, code: &str) -> Vec<Finding> {
    let module = module_of(path);
    let Some(from) = floor(module) else {
        return vec![finding(
            path,
            0,
            &format!("`{module}` has no floor"),
            "Give it one in FLOORS of tests/tidy.rs",
        )];
    };
    let mut findings = Vec::new();
    for (line, paths) in named(shipped(code)) {
        for used in paths {
            let to = used.split("::").next().unwrap_or_default();
            if to == module || to.is_empty() {
                continue;
            }
            let Some(room) = floor(to) else {
                let what = format!("`crate::{to}` is on no floor");
                findings.push(finding(path, line, &what, "Name modules, and give each a floor in FLOORS"));
                continue;
            };
            if room.floor >= from.floor && !from.sees.contains(&to) {
                let how = if room.floor == from.floor { "crosses" } else { "climbs" };
                let what = format!("`{module}` names `crate::{to}`, which {how} floors");
                let step = "Pass the fact up as a value or the effect down as a call; if the edge is right, say why \
                            in `sees`";
                findings.push(finding(path, line, &what, step));
            }
        }
    }
    findings
}

fn unsafe_blocks(path: &str, code: &str) -> Vec<Finding> {
    if UNSAFE.contains(&path) {
        return Vec::new();
    }
    lines_with(code, "unsafe", |line, at| alone(line, at, "unsafe".len()))
        .map(|line| {
            finding(
                path,
                line,
                "`unsafe` outside the watched files",
                "Use a safe call, or move it to one of them",
            )
        })
        .collect()
}

fn impure(path: &str, code: &str) -> Vec<Finding> {
    if !PURE.contains(&path) {
        return Vec::new();
    }
    let step = "A pure file decides: take `now` and facts as arguments and act in the driving file";
    IMPURE
        .iter()
        .flat_map(|word| {
            lines_with(shipped(code), word, |_, _| true)
                .map(move |line| finding(path, line, &format!("`{word}` in a pure file"), step))
        })
        .collect()
}

fn headless(path: &str, text: &str) -> Vec<Finding> {
    let begins = text.lines().next().is_some_and(|line| line.starts_with("//! ") && line.len() > 8);
    let step = "Begin it with `//!`: what it owns, what it promises, why so";
    if begins { Vec::new() } else { vec![finding(path, 0, "the file does not say what it is for", step)] }
}

fn forbidden(path: &str, text: &str) -> Vec<Finding> {
    FORBIDDEN
        .iter()
        .map(|parts| parts.concat())
        .flat_map(|word| {
            lines_with(text, &word, |line, at| alone(line, at, word.len()))
                .map(|line| {
                    finding(
                        path,
                        line,
                        &format!("`{word}`"),
                        "Do it, or file it; the code speaks of itself alone",
                    )
                })
                .collect::<Vec<_>>()
        })
        .collect()
}

/// Whether what stands there is a word, not a piece of one: `mktemp` wants its own row of letters.
fn alone(line: &str, at: usize, length: usize) -> bool {
    let free = |c: Option<char>| !c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    let (first, last) = (line[at..].chars().next(), line[..at + length].chars().next_back());
    (free(first) || free(line[..at].chars().next_back()))
        && (free(last) || free(line[at + length..].chars().next()))
}

fn lines_with<'a>(
    text: &'a str,
    word: &'a str,
    fits: impl Fn(&str, usize) -> bool + 'a,
) -> impl Iterator<Item = usize> + 'a {
    text.lines()
        .enumerate()
        .filter(move |(_, line)| line.match_indices(word).any(|(at, _)| fits(line, at)))
        .map(|(n, _)| n)
}

/// Files of the page that nothing leads to from `index.html`.
fn unreachable(files: &BTreeMap<String, String>) -> Vec<Finding> {
    let mut reached = BTreeSet::from(["index.html".to_owned()]);
    let mut next = vec!["index.html".to_owned()];
    while let Some(name) = next.pop() {
        let Some(text) = files.get(&name) else { continue };
        for other in files.keys() {
            let quoted = ['"', '\''].iter().any(|q| {
                [format!("{q}{other}{q}"), format!("{q}./{other}{q}"), format!("{q}/{other}{q}")]
                    .iter()
                    .any(|form| text.contains(form.as_str()))
            });
            if quoted && reached.insert(other.clone()) {
                next.push(other.clone());
            }
        }
    }
    files
        .keys()
        .filter(|name| !reached.contains(*name))
        .map(|name| {
            finding(&format!("web/{name}"), 0, "nothing leads here from index.html", "Use it or drop it")
        })
        .collect()
}

/// The page loads nothing from elsewhere and never turns text into markup.
fn page_rules(path: &str, text: &str) -> Vec<Finding> {
    ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "https://", "javascript:"]
        .iter()
        .flat_map(|word| {
            lines_with(text, word, |_, _| true).map(move |line| {
                finding(
                    path,
                    line,
                    &format!("`{word}` in the page"),
                    "Set text with textContent; keep files ours",
                )
            })
        })
        .collect()
}

fn files_under(folder: &Path, end: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(at) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(&at) else { continue };
        for path in entries.map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.to_string_lossy().ends_with(end) {
                let name = path.strip_prefix(folder).unwrap().to_string_lossy().into_owned();
                // Fixtures and caches are no text; what they hold is no source of ours.
                if let Ok(text) = String::from_utf8(std::fs::read(&path).unwrap()) {
                    found.push((name, text));
                }
            }
        }
    }
    found.sort();
    found
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn none(findings: Vec<Finding>) {
    let lines: Vec<String> = findings.into_iter().map(|Finding(line)| line).collect();
    assert!(lines.is_empty(), "{} broken rules:\n{}", lines.len(), lines.join("\n"));
}

fn over_sources(rule: impl Fn(&str, &str) -> Vec<Finding>) -> Vec<Finding> {
    let files = files_under(&root().join("src"), ".rs");
    assert!(files.len() > 10, "the sources are where they were");
    files.iter().flat_map(|(path, text)| rule(path, text)).collect()
}

#[test]
fn nobody_names_a_higher_floor_or_a_neighbour() {
    none(over_sources(|path, text| climbs(path, &code_of(text))));
}

#[test]
fn unsafe_stays_in_the_watched_files() {
    none(over_sources(|path, text| unsafe_blocks(path, &code_of(text))));
}

#[test]
fn the_lists_of_files_are_not_stale() {
    for path in PURE {
        assert!(root().join("src").join(path).is_file(), "src/{path} is in PURE and does not exist");
    }
}

#[test]
fn pure_files_have_no_clock_and_no_io() {
    none(over_sources(|path, text| impure(path, &code_of(text))));
}

#[test]
fn every_file_says_what_it_is_for() {
    none(over_sources(headless));
    let tests = files_under(&root().join("tests"), ".rs");
    none(tests.iter().flat_map(|(path, text)| headless(&format!("tests/{path}"), text)).collect());
}

#[test]
fn no_word_is_left_that_does_not_belong() {
    let mut findings = over_sources(forbidden);
    for folder in ["tests", "web", "profiles", "install", "systemd", "plugin", "docs"] {
        for (path, text) in files_under(&root().join(folder), "") {
            findings.extend(forbidden(&format!("{folder}/{path}"), &text));
        }
    }
    none(findings);
}

#[test]
fn every_file_of_the_page_is_used_and_keeps_its_rules() {
    let files = files_under(&root().join("web"), "");
    assert!(files.iter().any(|(name, _)| name == "index.html"));
    none(files.iter().flat_map(|(name, text)| page_rules(&format!("web/{name}"), text)).collect());
    none(unreachable(&files.into_iter().collect()));
}

// Negative controls: a fence that lets everything through is none.

#[test]
fn the_floor_check_sees_climbing_crossing_and_strangers() {
    for (path, code, wanted) in [
        ("store/mod.rs", "use crate::cluster::Cluster;", "climbs"),
        ("store/mod.rs", "use crate::transfer::Fabric;", "crosses"),
        ("base/units.rs", "fn f() -> crate::settings::Settings {}", "climbs"),
        ("store/mod.rs", "use crate::{base::units::Bytes, engine::{View, x}};", "crosses"),
        ("store/mod.rs", "pub use crate::nowhere::X;", "is on no floor"),
        ("novel/mod.rs", "", "has no floor"),
        ("observe/mod.rs", "use crate::router::Router;", "climbs"),
    ] {
        let findings = climbs(path, &code_of(code));
        assert_eq!(findings.len(), 1, "{path}: {code}");
        assert!(findings[0].0.contains(wanted), "{findings:?}");
    }
    for (path, code) in [
        ("store/mod.rs", "use crate::base::{units::Bytes, block::RowKey};\nuse crate::settings;"),
        ("store/log.rs", "use crate::store::Error;"),
        ("store/log.rs", "// see crate::cluster\n/* crate::node */ fn f() { let _ = \"crate::cli\"; }"),
        ("store/log.rs", "#[cfg(test)]\nmod tests { use crate::mock::Engine; }"),
        ("cli/run.rs", "use crate::{keeper, node, base::units::Bytes};"),
    ] {
        assert_eq!(climbs(path, &code_of(code)), [], "{path}: {code}");
    }
}

#[test]
fn the_other_checks_see_what_they_are_for() {
    let count = |findings: Vec<Finding>| findings.len();
    let risky = "fn f() { unsafe { g() } }\n// unsafe\nlet unsafe_code = \"unsafe\";";
    assert_eq!(
        unsafe_blocks("store/log.rs", &code_of(risky)),
        [finding(
            "store/log.rs",
            0,
            "`unsafe` outside the watched files",
            "Use a safe call, or move it to one of them"
        )]
    );
    assert_eq!(count(unsafe_blocks("store/ring.rs", &code_of(risky))), 0);
    assert!(count(impure("observe/alerts.rs", "let now = std::time::Instant::now();")) > 0);
    assert!(count(impure("router/ask.rs", "use tokio::sync::watch;")) > 0);
    assert_eq!(count(impure("router/relay.rs", "use tokio::sync::watch;")), 0);
    assert_eq!(count(impure("router/ask.rs", "#[cfg(test)]\nmod tests { use tokio::sync; }")), 0);
    assert_eq!(count(headless("a.rs", "use std::fs;\n//! Late.")), 1);
    assert_eq!(count(headless("a.rs", "//!\nuse std::fs;")), 1);
    assert_eq!(count(headless("a.rs", "//! Owns the rows.\nuse std::fs;")), 0);
    let word = FORBIDDEN[0].concat();
    assert_eq!(count(forbidden("a.rs", &format!("// {word}: later"))), 1);
    assert_eq!(count(forbidden("a.rs", &format!("// {word}S and A{word}"))), 0);
    assert_eq!(count(page_rules("web/a.js", "e.innerHTML = name;")), 1);
    let page = |files: &[(&str, &str)]| {
        let files = files.iter().map(|(n, t)| ((*n).to_owned(), (*t).to_owned()));
        count(unreachable(&files.collect()))
    };
    let index = ("index.html", "<script src=\"a.js\"></script>");
    assert_eq!(page(&[index, ("a.js", "import './b.js'"), ("b.js", "")]), 0);
    assert_eq!(page(&[index, ("a.js", ""), ("b.js", "import './c.js'"), ("c.js", "")]), 2);
}

#[test]
fn code_is_told_from_comments_and_texts() {
    for (text, code) in [
        ("a // b\nc", "a \nc"),
        ("a /* b /* c */ d\n */ e", "a \n e"),
        ("f(\"x // y\") // z", "f(\"\") "),
        ("f(\"a\\\"b\")", "f(\"\")"),
        ("r#\"a \" // b\"# + c", "\"\" + c"),
        ("var\"x\"", "var\"\""),
        ("'\"' + 'a + '\\'' + b", " + 'a +  + b"),
    ] {
        assert_eq!(code_of(text), code, "{text}");
    }
}
