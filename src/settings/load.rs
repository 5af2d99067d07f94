//! Builds [`Settings`] out of layers, and knows of every value where it came from.
//!
//! Each layer becomes a flat list of leaves (`listen.port` = a value, from there). [`merge`] keeps the leaf of the
//! highest layer, whatever order the layers come in, and one conversion (serde's, the same for a file, a variable and
//! a flag) turns the rest into the tree. All problems are collected before anything is said, so that a person mends
//! a file once. Values of secrets are never part of a message.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::IntoDeserializer;
use toml::de::{DeTable, DeValue};
use toml::{Spanned, Value};

use super::check;
use super::{Places, Settings};

/// Prefix of variables that carry one setting each: `SPARK_KV__STORE__CAPACITY`.
const PREFIX: &str = "SPARK_KV__";

/// The join token has a name of its own, because an argument is visible to everybody on the machine.
const JOIN: (&str, &str) = ("SPARK_KV_JOIN", "cluster.join");

/// Keys whose value is a path; a relative one is meant from where it was written down.
const PATHS: [&str; 4] = ["node.root", "listen.api_keys_file", "engine.venv", "engine.model"];

/// Tables whose keys are free.
const FREE: [&str; 2] = ["engine.env", "router.aliases"];

fn is_free(key: &str) -> bool {
    FREE.contains(&key)
}

/// Settings files are a few kilobytes.
const FILE_MAX: u64 = 1 << 20;

const BUILT_IN: [(&str, &str); 3] = [
    ("cpu-tiny", include_str!("../../profiles/cpu-tiny.toml")),
    ("cpu-tiny-hybrid", include_str!("../../profiles/cpu-tiny-hybrid.toml")),
    ("spark", include_str!("../../profiles/spark.toml")),
];

/// Where a value came from. Later variants win over earlier ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    Default,
    /// Built in or a path, with the line.
    Profile(String, usize),
    File(PathBuf, usize),
    Env(String),
    /// The flag as a person writes it.
    Flag(String),
}

impl Origin {
    fn rank(&self) -> u8 {
        match self {
            Self::Default => 0,
            Self::Profile(..) => 1,
            Self::File(..) => 2,
            Self::Env(_) => 3,
            Self::Flag(_) => 4,
        }
    }

    /// The folder that relative paths of this origin are meant from. None: the working directory.
    fn folder(&self) -> Option<&Path> {
        match self {
            Self::Profile(name, _) if is_path(name) => Path::new(name).parent(),
            Self::File(path, _) => path.parent(),
            _ => None,
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Profile(name, 0) => write!(f, "profile {name}"),
            Self::Profile(name, line) => write!(f, "profile {name}:{line}"),
            Self::File(path, 0) => write!(f, "{}", path.display()),
            Self::File(path, line) => write!(f, "{}:{line}", path.display()),
            Self::Env(name) => write!(f, "environment {name}"),
            Self::Flag(name) => write!(f, "flag {name}"),
        }
    }
}

/// One value of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Leaf {
    pub key: String,
    pub value: Value,
    pub origin: Origin,
}

/// Something that must be mended before the settings can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub origin: Origin,
    /// Empty when no key is concerned.
    pub key: String,
    pub what: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.key.is_empty() {
            write!(f, "{}: {}", self.origin, self.what)
        } else {
            write!(f, "{}: {}: {}", self.origin, self.key, self.what)
        }
    }
}

/// All problems, one per line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error(pub Vec<Problem>);

impl std::error::Error for Error {}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, problem) in self.0.iter().enumerate() {
            let gap = if n == 0 { "" } else { "\n" };
            write!(f, "{gap}{problem}")?;
        }
        Ok(())
    }
}

/// What the layers above the defaults are made of.
#[derive(Clone, Debug, Default)]
pub struct Inputs {
    /// A built-in profile's name, or a path to a profile.
    pub profile: Option<String>,
    /// The settings file. None: the one under the root, when there is one.
    pub file: Option<PathBuf>,
    pub env: Vec<(String, String)>,
    pub flags: Vec<Flag>,
}

/// One setting given on the command line.
#[derive(Clone, Debug)]
pub struct Flag {
    /// As a person writes it, `--root`.
    pub name: String,
    pub key: String,
    pub text: String,
}

impl Inputs {
    /// Takes the process's environment: the variables that concern us, and only those.
    #[must_use]
    pub fn with_environment(mut self) -> Self {
        self.env = std::env::vars_os()
            .filter_map(|(name, value)| {
                Some((name.into_string().ok()?, value.to_string_lossy().into_owned()))
            })
            .filter(|(name, _)| name.starts_with(PREFIX) || name == JOIN.0 || nearly(name).is_some())
            .collect();
        self
    }
}

/// Settings that are checked, and where each came from.
#[derive(Clone, Debug)]
pub struct Loaded {
    pub settings: Settings,
    pub places: Places,
    /// The settings file that was read, when there was one.
    pub file: Option<PathBuf>,
    leaves: BTreeMap<String, Leaf>,
}

/// One line of `config show`.
#[derive(Clone, Debug, PartialEq)]
pub struct Shown {
    pub key: String,
    /// Secrets are masked.
    pub value: Value,
    pub origin: Origin,
}

impl Loaded {
    /// All values in the order of the tree, secrets masked.
    pub fn shown(&self) -> Vec<Shown> {
        self.leaves
            .values()
            .map(|leaf| Shown {
                key: leaf.key.clone(),
                value: check::masked(&leaf.key, &leaf.value),
                origin: leaf.origin.clone(),
            })
            .collect()
    }

    pub fn origin(&self, key: &str) -> Option<&Origin> {
        self.leaves.get(key).map(|leaf| &leaf.origin)
    }

    /// What is missing before a node can be started with these settings. The other commands need none of it.
    pub fn ready_to_start(&self) -> Result<(), Error> {
        let problems = self.blame(check::startable(&self.settings));
        if problems.is_empty() { Ok(()) } else { Err(Error(problems)) }
    }

    fn blame(&self, findings: Vec<check::Finding>) -> Vec<Problem> {
        findings
            .into_iter()
            .map(|(key, what)| Problem {
                origin: self.origin(key).cloned().unwrap_or(Origin::Default),
                key: key.to_owned(),
                what,
            })
            .collect()
    }
}

/// Reads the layers, merges, converts and checks.
pub fn load(inputs: &Inputs) -> Result<Loaded, Error> {
    let schema = Schema::new();
    let mut problems = Vec::new();
    let mut leaves = schema.defaults();
    if let Some(profile) = &inputs.profile {
        let named = |line| Origin::Profile(profile.clone(), line);
        match profile_text(profile) {
            Ok(text) => schema.read(&text, &named, &mut leaves, &mut problems),
            Err(what) => problems.push(Problem { origin: named(0), key: String::new(), what }),
        }
    }
    schema.read_environment(&inputs.env, &mut leaves, &mut problems);
    schema.read_flags(&inputs.flags, &mut leaves, &mut problems);

    // The file lies under the root, so the other layers say first where that is.
    let (path, wanted) = match &inputs.file {
        Some(path) => (path.clone(), true),
        None => (convert(&merge(leaves.iter().cloned())).0.places().settings_file, false),
    };
    let named = |line| Origin::File(path.clone(), line);
    let file = match text_of(&path) {
        Ok(text) => {
            schema.read(&text, &named, &mut leaves, &mut problems);
            Some(path.clone())
        }
        Err(NotRead::Missing) if !wanted => None,
        Err(why) => {
            problems.push(Problem { origin: named(0), key: String::new(), what: why.to_string() });
            None
        }
    };

    let leaves = merge(leaves);
    let (settings, failed) = convert(&leaves);
    problems.extend(failed);
    let loaded = Loaded { places: Places::of(&settings), settings, file, leaves };
    if problems.is_empty() {
        problems = loaded.blame(check::impossible(&loaded.settings));
    }
    if problems.is_empty() { Ok(loaded) } else { Err(Error(problems)) }
}

/// The leaf of the highest layer for each key. Within one layer the later one wins: `--set` twice means the second.
pub fn merge(leaves: impl IntoIterator<Item = Leaf>) -> BTreeMap<String, Leaf> {
    let mut best: BTreeMap<String, Leaf> = BTreeMap::new();
    for leaf in leaves {
        match best.get(&leaf.key) {
            Some(held) if held.origin.rank() > leaf.origin.rank() => {}
            _ => {
                best.insert(leaf.key.clone(), leaf);
            }
        }
    }
    best
}

/// The tree out of leaves. What does not convert is named and left at its default.
fn convert(leaves: &BTreeMap<String, Leaf>) -> (Settings, Vec<Problem>) {
    let mut tree = toml::Table::new();
    let mut problems = Vec::new();
    for leaf in leaves.values() {
        let value = absolute(leaf);
        let mut alone = toml::Table::new();
        plant(&mut alone, &leaf.key, value.clone());
        match Value::Table(alone).try_into::<Settings>() {
            Ok(_) => plant(&mut tree, &leaf.key, value),
            Err(error) => problems.push(Problem {
                origin: leaf.origin.clone(),
                key: leaf.key.clone(),
                what: wrong_value(&leaf.key, error.message()),
            }),
        }
    }
    // Each leaf converts alone, so all of them do together; a tree that could not would be said, not hidden.
    match Value::Table(tree).try_into::<Settings>() {
        Ok(settings) => (settings, problems),
        Err(error) => {
            let what = error.message().to_owned();
            problems.push(Problem { origin: Origin::Default, key: String::new(), what });
            (Settings::default(), problems)
        }
    }
}

fn plant(tree: &mut toml::Table, key: &str, value: Value) {
    let mut at = tree;
    let mut parts = key.splitn(3, '.').peekable();
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            at.insert(part.to_owned(), value);
            return;
        }
        let next = at.entry(part).or_insert_with(|| Value::Table(toml::Table::new()));
        let Value::Table(next) = next else { return };
        at = next;
    }
}

fn absolute(leaf: &Leaf) -> Value {
    match &leaf.value {
        Value::String(text) if PATHS.contains(&leaf.key.as_str()) && !text.is_empty() => {
            let path = leaf.origin.folder().unwrap_or(Path::new("")).join(text);
            let path = std::path::absolute(&path).unwrap_or(path);
            Value::String(path.to_string_lossy().into_owned())
        }
        other => other.clone(),
    }
}

/// Serde's message in words that somebody who does not write Rust understands.
fn wrong_value(key: &str, message: &str) -> String {
    if check::is_secret(key) {
        return "expected text".to_owned();
    }
    let words = [
        ("u16", "a whole number from 0 to 65535"),
        ("u32", "a whole number from 0 to 4294967295"),
        ("a string", "text"),
        ("path string", "a path"),
        ("a boolean", "true or false"),
        ("a sequence", "a list such as [\"--flag\", \"value\"]"),
    ];
    let message = message.trim();
    match message.rsplit_once("expected ") {
        Some((head, tail)) => {
            let tail = words.iter().find(|(rust, _)| *rust == tail).map_or(tail, |(_, plain)| plain);
            format!("{head}expected {tail}")
        }
        None => message.to_owned(),
    }
}

/// The keys there are, taken from the defaults: whatever the tree has can be set, and nothing else.
struct Schema {
    tree: toml::Table,
}

impl Schema {
    fn new() -> Self {
        let tree = toml::Table::try_from(Settings::default()).expect("the defaults are plain values");
        Self { tree }
    }

    fn defaults(&self) -> Vec<Leaf> {
        let mut leaves = Vec::new();
        for (section, inner) in &self.tree {
            let Value::Table(inner) = inner else { continue };
            for (name, value) in inner {
                let key = format!("{section}.{name}");
                if !is_free(&key) {
                    leaves.push(Leaf { key, value: value.clone(), origin: Origin::Default });
                }
            }
        }
        leaves
    }

    /// The default of a key that exists. Free keys are texts.
    fn find(&self, key: &str) -> Option<Value> {
        let mut parts = key.splitn(3, '.');
        let (section, name, rest) = (parts.next()?, parts.next()?, parts.next());
        let default = self.tree.get(section)?.get(name)?;
        match rest {
            None if !is_free(&format!("{section}.{name}")) => Some(default.clone()),
            Some(free) if !free.is_empty() && is_free(&format!("{section}.{name}")) => {
                Some(Value::String(String::new()))
            }
            _ => None,
        }
    }

    fn unknown(&self, key: &str, origin: Origin) -> Problem {
        let hint = if self.tree.contains_key(key) {
            format!("it is a section; its settings are written as `{key}.…`")
        } else if is_free(key) {
            format!("it is a table; write `{key}.NAME`")
        } else {
            match self.nearest(key) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("sections are {}", self.tree.keys().cloned().collect::<Vec<_>>().join(", ")),
            }
        };
        Problem { origin, key: key.to_owned(), what: format!("there is no such setting; {hint}") }
    }

    fn nearest(&self, key: &str) -> Option<String> {
        let name = key.splitn(3, '.').last();
        let known = self.defaults().into_iter().map(|leaf| leaf.key).chain(self.tree.keys().cloned());
        known
            .map(|near| {
                // The right name in the wrong section is as near as one slip.
                let moved = near.split('.').nth(1) == name;
                let distance = distance(key, &near);
                (if moved { distance.min(1) } else { distance }, near)
            })
            .min()
            .filter(|(slips, _)| *slips <= 1 + key.len() / 5)
            .map(|(_, near)| near)
    }

    /// A file or profile: keys and lines from the parser, values through serde.
    fn read(
        &self,
        text: &str,
        named: &dyn Fn(usize) -> Origin,
        leaves: &mut Vec<Leaf>,
        problems: &mut Vec<Problem>,
    ) {
        let line =
            |at: usize| text.as_bytes()[..at.min(text.len())].iter().filter(|&&b| b == b'\n').count() + 1;
        let table = match DeTable::parse(text) {
            Ok(table) => table.into_inner(),
            Err(error) => {
                let origin = named(error.span().map_or(0, |span| line(span.start)));
                let what = format!("not TOML: {}", error.message().trim());
                problems.push(Problem { origin, key: String::new(), what });
                return;
            }
        };
        for (section, inner) in table {
            let begin = section.span().start;
            let section = section.into_inner().into_owned();
            let DeValue::Table(inner) = inner.into_inner() else {
                problems.push(self.unknown(&section, named(line(begin))));
                continue;
            };
            if !self.tree.contains_key(&section) {
                problems.push(self.unknown(&section, named(line(begin))));
                continue;
            }
            for (name, value) in inner {
                let origin = named(line(name.span().start));
                let key = format!("{section}.{}", name.into_inner());
                match value.get_ref() {
                    DeValue::Table(_) if is_free(&key) => {
                        let DeValue::Table(free) = value.into_inner() else { continue };
                        for (name, value) in free {
                            let origin = named(line(name.span().start));
                            let key = format!("{key}.{}", name.into_inner());
                            self.take(key, origin, value, leaves, problems);
                        }
                    }
                    _ => self.take(key, origin, value, leaves, problems),
                }
            }
        }
    }

    fn take(
        &self,
        key: String,
        origin: Origin,
        value: Spanned<DeValue<'_>>,
        leaves: &mut Vec<Leaf>,
        problems: &mut Vec<Problem>,
    ) {
        if self.find(&key).is_none() {
            problems.push(self.unknown(&key, origin));
            return;
        }
        match Value::deserialize(value.into_deserializer()) {
            Ok(value) => leaves.push(Leaf { key, value, origin }),
            Err(error) => {
                let what = wrong_value(&key, error.message());
                problems.push(Problem { origin, key, what });
            }
        }
    }

    fn read_environment(
        &self,
        env: &[(String, String)],
        leaves: &mut Vec<Leaf>,
        problems: &mut Vec<Problem>,
    ) {
        for (name, text) in env {
            let key = match name.strip_prefix(PREFIX) {
                Some(rest) => {
                    let mut parts = rest.splitn(3, "__");
                    let part = |p: Option<&str>| p.unwrap_or_default().to_ascii_lowercase();
                    let (section, key) = (part(parts.next()), part(parts.next()));
                    // Names of free keys are variables of somebody else: their case is theirs.
                    match parts.next() {
                        Some(free) => format!("{section}.{key}.{free}"),
                        None => format!("{section}.{key}"),
                    }
                }
                None if name == JOIN.0 => JOIN.1.to_owned(),
                None => {
                    let what = |meant| format!("is no variable of spark-kv; did you mean {meant}?");
                    let (origin, key) = (Origin::Env(name.clone()), String::new());
                    problems.extend(nearly(name).map(|meant| Problem { origin, key, what: what(meant) }));
                    continue;
                }
            };
            self.take_text(key, Origin::Env(name.clone()), text, leaves, problems);
        }
    }

    fn read_flags(&self, flags: &[Flag], leaves: &mut Vec<Leaf>, problems: &mut Vec<Problem>) {
        for flag in flags {
            self.take_text(flag.key.clone(), Origin::Flag(flag.name.clone()), &flag.text, leaves, problems);
        }
    }

    /// Text has no type of its own, so it is read as what the default is. What does not fit stays text, and the
    /// conversion then says what was expected.
    fn take_text(
        &self,
        key: String,
        origin: Origin,
        text: &str,
        leaves: &mut Vec<Leaf>,
        problems: &mut Vec<Problem>,
    ) {
        let Some(default) = self.find(&key) else {
            problems.push(self.unknown(&key, origin));
            return;
        };
        let plain = || Value::String(text.to_owned());
        let value = match default {
            Value::Integer(_) => text.trim().parse().map_or_else(|_| plain(), Value::Integer),
            Value::Boolean(_) => text.trim().parse().map_or_else(|_| plain(), Value::Boolean),
            Value::Array(_) => toml::from_str::<toml::Table>(&format!("list = {text}"))
                .ok()
                .and_then(|mut table| table.remove("list"))
                .unwrap_or_else(plain),
            _ => plain(),
        };
        leaves.push(Leaf { key, value, origin });
    }
}

/// What a variable was meant to be that names a section of ours as nobody reads it: it would be ignored in silence.
fn nearly(name: &str) -> Option<String> {
    const SECTIONS: [&str; 7] = ["NODE", "LISTEN", "ENGINE", "STORE", "CLUSTER", "ROUTER", "LOG"];
    let rest = name.strip_prefix("SPARK_KV_").filter(|_| !name.starts_with(PREFIX))?;
    let (section, key) = rest.split_once('_')?;
    let key = key.trim_start_matches('_');
    SECTIONS.contains(&section).then(|| format!("{PREFIX}{section}__{key}"))
}

fn is_path(profile: &str) -> bool {
    profile.contains('/') || profile.ends_with(".toml")
}

fn profile_text(profile: &str) -> Result<String, String> {
    if is_path(profile) {
        return text_of(Path::new(profile)).map_err(|why| why.to_string());
    }
    BUILT_IN.iter().find(|(name, _)| *name == profile).map(|(_, text)| (*text).to_owned()).ok_or_else(|| {
        let names: Vec<_> = BUILT_IN.iter().map(|(name, _)| *name).collect();
        format!("there is no such profile; built in are {}; a path is taken too", names.join(", "))
    })
}

/// Why a file gave no text.
#[derive(Debug, thiserror::Error)]
enum NotRead {
    #[error("there is no such file")]
    Missing,
    #[error("the file is larger than 1 MiB")]
    Large,
    #[error("the file is not UTF-8 text")]
    NotText,
    #[error("cannot be read: {0}")]
    Io(std::io::Error),
}

fn text_of(path: &Path) -> Result<String, NotRead> {
    use std::io::Read;
    let file = std::fs::File::open(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => NotRead::Missing,
        _ => NotRead::Io(error),
    })?;
    let mut bytes = Vec::new();
    file.take(FILE_MAX + 1).read_to_end(&mut bytes).map_err(NotRead::Io)?;
    if bytes.len() as u64 > FILE_MAX {
        return Err(NotRead::Large);
    }
    String::from_utf8(bytes).map_err(|_| NotRead::NotText)
}

/// Slips between two words: letters put in, left out, changed, or two neighbours swapped.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().take(80).collect(), b.chars().take(80).collect());
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for i in 0..=a.len() {
        for j in 0..=b.len() {
            rows[i][j] = if i == 0 || j == 0 {
                i + j
            } else {
                let changed = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
                let mut least = changed.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
                if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                    least = least.min(rows[i - 2][j - 2] + 1);
                }
                least
            };
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distance_counts_slips() {
        for (a, b, slips) in [
            ("", "", 0),
            ("port", "port", 0),
            ("prot", "port", 1),
            ("capcity", "capacity", 1),
            ("a", "xyz", 3),
        ] {
            assert_eq!(distance(a, b), slips, "{a} {b}");
            assert_eq!(distance(b, a), slips, "{b} {a}");
        }
    }

    #[test]
    fn every_path_of_the_tree_is_known_to_be_one() {
        let schema = Schema::new();
        for key in PATHS {
            assert!(schema.find(key).is_some_and(|v| v.is_str()), "{key}");
        }
        let free = schema.find("engine.env.HOME");
        assert_eq!(free, Some(Value::String(String::new())));
        assert_eq!(schema.find("engine.env"), None);
    }

    #[test]
    fn built_in_profiles_are_valid() {
        for (name, _) in BUILT_IN {
            let root = tempfile::tempdir().unwrap();
            let flag = Flag {
                name: "--root".into(),
                key: "node.root".into(),
                text: root.path().display().to_string(),
            };
            let inputs = Inputs { profile: Some(name.into()), flags: vec![flag], ..Inputs::default() };
            let loaded = load(&inputs).unwrap();
            assert!(loaded.shown().iter().any(|v| matches!(v.origin, Origin::Profile(..))), "{name}");
        }
    }
}
