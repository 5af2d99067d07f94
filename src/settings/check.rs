//! What values cannot be, whichever layer they come from, and which must not be shown.
//!
//! Pure: looks at the tree alone. A finding is the key and what is wrong with it; `load` adds where the value came
//! from.

use std::net::IpAddr;

use toml::Value;

use super::{EngineKind, Settings};
use crate::base::units::Bytes;

/// A key and what is wrong with its value.
pub(super) type Finding = (&'static str, String);

/// Rails of one node: two cables with two functions each, and as many again.
const RAILS: usize = 8;

/// Shown in place of a secret.
const HIDDEN: &str = "(hidden)";

/// Every problem of a whole tree.
pub(super) fn impossible(settings: &Settings) -> Vec<Finding> {
    let mut found = Vec::new();
    node(settings, &mut found);
    listen(settings, &mut found);
    engine(settings, &mut found);
    store(settings, &mut found);
    cluster(settings, &mut found);
    router(settings, &mut found);
    if let Err(why) = tracing_subscriber::EnvFilter::try_new(&settings.log.level) {
        found.push(("log.level", format!("not a filter such as `info` or `info,spark_kv=debug`: {why}")));
    }
    found
}

/// Aliases are looked up with every request and told with every list of models.
const ALIASES_MAX: usize = 64;

fn router(settings: &Settings, found: &mut Vec<Finding>) {
    let router = &settings.router;
    if router.idle_timeout_s == 0 {
        found.push(("router.idle_timeout_s", "must be at least 1".into()));
    }
    between("router.places", router.places, 0, 65_536, found);
    between("router.queue", router.queue, 0, 65_536, found);
    if router.aliases.len() > ALIASES_MAX {
        found.push(("router.aliases", format!("at most {ALIASES_MAX} names, not {}", router.aliases.len())));
    }
    for (alias, model) in &router.aliases {
        let why = match () {
            () if alias.trim().is_empty() || model.trim().is_empty() => "a name is empty",
            () if alias == model => "it stands for itself",
            () if router.aliases.contains_key(model) => "it stands for another alias: name the model",
            () => continue,
        };
        found.push(("router.aliases", format!("`{alias}` = `{model}`: {why}")));
    }
}

/// What is missing to start a node.
pub(super) fn startable(settings: &Settings) -> Vec<Finding> {
    let engine = &settings.engine;
    let mut found = Vec::new();
    match engine.kind {
        EngineKind::Vllm if engine.model.as_os_str().is_empty() && engine.tiny_family.is_empty() => {
            let what = "no model: name its folder, or take `--profile cpu-tiny` to try without one";
            found.push(("engine.model", what.into()));
        }
        EngineKind::Attached if engine.url.is_empty() => {
            found.push((
                "engine.url",
                "an attached engine needs its URL, such as `http://127.0.0.1:8001`".into(),
            ));
        }
        _ => {}
    }
    found
}

fn node(settings: &Settings, found: &mut Vec<Finding>) {
    let name = &settings.node.name;
    let plain = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
    if name.is_empty() || name.len() > 40 || !plain {
        found.push(("node.name", format!("`{}` must be 1 to 40 letters, digits and dashes", short(name))));
    }
}

fn listen(settings: &Settings, found: &mut Vec<Finding>) {
    let listen = &settings.listen;
    if listen.port == 0 || listen.port > u16::MAX - 3 {
        let what = format!(
            "{} must be from 1 to 65532: the engine, control and data take the three ports after it",
            listen.port
        );
        found.push(("listen.port", what));
    }
    match listen.address.parse::<IpAddr>() {
        Err(_) => {
            found.push(("listen.address", format!("`{}` is not an IP address", short(&listen.address))));
        }
        Ok(address) if !address.is_loopback() && listen.api_keys_file.as_os_str().is_empty() => {
            let what = format!(
                "{address} can be reached from other machines, which needs `listen.api_keys_file`; without keys only loopback is allowed"
            );
            found.push(("listen.address", what));
        }
        Ok(_) => {}
    }
    if listen.max_body < Bytes::kib(1) || listen.max_body > Bytes::gib(4) {
        found.push(("listen.max_body", format!("{} must be from 1KiB to 4GiB", listen.max_body)));
    }
    between("listen.max_requests", listen.max_requests, 1, 65_536, found);
}

fn engine(settings: &Settings, found: &mut Vec<Finding>) {
    let engine = &settings.engine;
    if !["", "llama", "lfm2"].contains(&engine.tiny_family.as_str()) {
        found.push(("engine.tiny_family", format!("`{}` must be llama or lfm2", short(&engine.tiny_family))));
    }
    if !engine.url.is_empty() && !engine.url.starts_with("http://") {
        found.push(("engine.url", "must begin with `http://`: an engine is reached on this machine".into()));
    }
    if own_port(&engine.url, settings.listen.port) {
        let what = format!("port {} is this node's own: requests would go in a circle", settings.listen.port);
        found.push(("engine.url", what));
    }
    // `random` and an empty seed give each process its own hashes, and then no block is ever found again.
    if engine.hash_seed.parse::<u32>().is_err() {
        found.push((
            "engine.hash_seed",
            format!("`{}` must be a number from 0 to 4294967295", short(&engine.hash_seed)),
        ));
    }
    between("engine.max_model_len", engine.max_model_len, 1, u32::MAX, found);
    between("engine.max_num_seqs", engine.max_num_seqs, 1, 65_536, found);
    between("engine.prefix_match_unit", engine.prefix_match_unit, 0, 65_536, found);
    // vLLM refuses one that is larger than the window.
    let window = engine.max_model_len.max(1);
    between("engine.long_prefill_token_threshold", engine.long_prefill_token_threshold, 0, window, found);
    between("engine.prefill_tokens_per_s", engine.prefill_tokens_per_s, 1, u32::MAX, found);
    between("engine.ready_timeout_s", engine.ready_timeout_s, 1, 86_400, found);
    between("engine.stop_grace_s", engine.stop_grace_s, 0, 3_600, found);
    at_least("engine.kv_cache", engine.kv_cache, Bytes::mib(1), found);
    at_least("engine.row_area", engine.row_area, Bytes::mib(1), found);
    for name in engine.env.keys() {
        if name.is_empty() || name.contains(['=', '\0']) {
            found.push(("engine.env", format!("`{}` cannot be the name of a variable", short(name))));
        }
    }
}

/// Whether a URL is this node's public port, as far as its text tells.
fn own_port(url: &str, port: u16) -> bool {
    let Ok(url) = url.parse::<http::Uri>() else { return false };
    let local = url.host().is_some_and(|host| {
        let host = host.trim_matches(['[', ']']);
        host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback() || ip.is_unspecified())
    });
    local && url.port_u16().unwrap_or(80) == port
}

fn store(settings: &Settings, found: &mut Vec<Finding>) {
    let store = &settings.store;
    if store.segment < Bytes::mib(1) || store.segment > Bytes::gib(4) {
        found.push(("store.segment", format!("{} must be from 1MiB to 4GiB", store.segment)));
    }
    if !store.segment.0.is_multiple_of(4096) {
        found.push(("store.segment", format!("{} must be a multiple of 4KiB", store.segment)));
    }
    if store.segment.0.checked_mul(4).is_none_or(|four| store.capacity.0 < four) {
        let what = format!("{} must hold at least four segments of {}", store.capacity, store.segment);
        found.push(("store.capacity", what));
    }
    between("store.queue_depth", store.queue_depth, 1, 4_096, found);
    between("store.scrub_days", store.scrub_days, 0, 3_650, found);
    if store.write_budget > Bytes(0) && store.write_budget < store.segment {
        let what = format!(
            "{} must be 0 (no limit) or at least one segment, which is {}",
            store.write_budget, store.segment
        );
        found.push(("store.write_budget", what));
    }
    between("store.ttl_days", store.ttl_days, 0, 36_500, found);
}

fn cluster(settings: &Settings, found: &mut Vec<Finding>) {
    let cluster = &settings.cluster;
    if cluster.address.parse::<IpAddr>().is_err() {
        found.push(("cluster.address", format!("`{}` is not an IP address", short(&cluster.address))));
    }
    if !cluster.join.is_empty() && !cluster.join.starts_with("spark1-") {
        found.push((
            "cluster.join",
            "not a join token: one begins with `spark1-` (the value is not shown)".into(),
        ));
    }
    let rails = &cluster.rails;
    if rails.len() > RAILS {
        found.push(("cluster.rails", format!("{} addresses, at most {RAILS}", rails.len())));
    }
    if let Some(twice) = rails.iter().enumerate().find(|(n, rail)| rails[..*n].contains(rail)) {
        found.push((
            "cluster.rails",
            format!("{} is there twice: each rail has an address of its own", twice.1),
        ));
    }
    if let Some(any) = rails.iter().find(|rail| rail.is_unspecified() || rail.is_multicast()) {
        found.push(("cluster.rails", format!("{any} is no address of a device")));
    }
    between("cluster.silence_s", cluster.silence_s, 1, 3_600, found);
    at_least("cluster.serve_memory", cluster.serve_memory, Bytes::mib(1), found);
    at_least("cluster.copy_rate", cluster.copy_rate, Bytes::mib(1), found);
    between("cluster.copy_share", cluster.copy_share, 0, 100, found);
}

fn between(key: &'static str, value: u32, low: u32, high: u32, found: &mut Vec<Finding>) {
    if !(low..=high).contains(&value) {
        found.push((key, format!("{value} must be from {low} to {high}")));
    }
}

fn at_least(key: &'static str, value: Bytes, low: Bytes, found: &mut Vec<Finding>) {
    if value < low {
        found.push((key, format!("{value} must be at least {low}")));
    }
}

/// The beginning of what a person wrote: messages stay on a line.
fn short(text: &str) -> String {
    text.chars().take(60).flat_map(char::escape_default).collect()
}

/// Whether the value of a key must never be shown. Free variables of the engine are judged by their name.
pub(super) fn is_secret(key: &str) -> bool {
    key == "cluster.join" || key.strip_prefix("engine.env.").is_some_and(names_a_secret)
}

/// Judged by the ends of words: `HF_TOKEN` and `--api-key` do, `--tokenizer` and `--max-num-batched-tokens` do not.
fn names_a_secret(name: &str) -> bool {
    let name = name.to_ascii_uppercase();
    let ends = ["TOKEN", "KEY", "KEYS", "SECRET", "PASSWORD", "PASSWD", "CREDENTIALS"];
    name.split(['_', '-']).any(|word| ends.iter().any(|end| word.ends_with(end)))
}

/// A value as it may be shown.
pub(super) fn masked(key: &str, value: &Value) -> Value {
    let hidden = || Value::String(HIDDEN.to_owned());
    match value {
        Value::String(text) if text.is_empty() => value.clone(),
        _ if is_secret(key) => hidden(),
        Value::String(url) if key == "engine.url" => Value::String(without_password(url)),
        Value::Array(items) if key == "engine.extra_args" => {
            let mut after = false;
            let hide = |item: &Value| {
                let text = item.as_str().unwrap_or_default();
                let flag =
                    text.starts_with("--") && names_a_secret(text.split('=').next().unwrap_or_default());
                let shown = match text.split_once('=') {
                    Some((name, _)) if flag => Value::String(format!("{name}={HIDDEN}")),
                    _ if after && !text.starts_with("--") => hidden(),
                    _ => item.clone(),
                };
                after = (flag && !text.contains('=')) || (after && !text.starts_with("--"));
                shown
            };
            Value::Array(items.iter().map(hide).collect())
        }
        other => other.clone(),
    }
}

fn without_password(url: &str) -> String {
    match url.split_once("://").and_then(|(scheme, rest)| Some((scheme, rest.rsplit_once('@')?.1))) {
        Some((scheme, rest)) => format!("{scheme}://{HIDDEN}@{rest}"),
        None => url.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_possible() {
        assert_eq!(impossible(&Settings::default()), []);
    }

    #[test]
    fn rails_are_addresses_of_devices_each_once() {
        let with = |rails: &[&str]| {
            let mut settings = Settings::default();
            settings.cluster.rails = rails.iter().map(|rail| rail.parse().unwrap()).collect();
            impossible(&settings).into_iter().map(|(key, what)| format!("{key}: {what}")).collect::<Vec<_>>()
        };
        assert!(with(&["10.77.0.1", "10.77.1.1"]).is_empty());
        for (rails, says) in [
            (&["10.77.0.1", "10.77.0.1"][..], "twice"),
            (&["0.0.0.0"], "no address"),
            (
                &[
                    "10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.0.6", "10.0.0.7",
                    "10.0.0.8", "::1",
                ],
                "at most",
            ),
        ] {
            let found = with(rails);
            assert!(found.len() == 1 && found[0].contains(says), "{rails:?}: {found:?}");
        }
        let mut settings = Settings::default();
        assert_eq!(settings.cluster.data_addresses(7), ["127.0.0.1:7"]);
        settings.cluster.rails = vec!["10.77.0.1".parse().unwrap(), "fd00::1".parse().unwrap()];
        assert_eq!(settings.cluster.data_addresses(7), ["10.77.0.1:7", "[fd00::1]:7"]);
    }

    #[test]
    fn secrets_are_masked_wherever_they_stand() {
        let text = |s: &str| Value::String(s.into());
        assert_eq!(masked("cluster.join", &text("spark1-x")), text(HIDDEN));
        assert_eq!(masked("cluster.join", &text("")), text(""));
        assert_eq!(masked("engine.env.HF_TOKEN", &text("abc")), text(HIDDEN));
        assert_eq!(masked("engine.env.OMP_NUM_THREADS", &text("2")), text("2"));
        assert_eq!(masked("engine.url", &text("http://me:pw@host:1")), text("http://(hidden)@host:1"));
        let args = ["--api-key", "one", "two", "--seed", "7", "--hf-token=three", "--tokenizer", "x"];
        let shown = masked("engine.extra_args", &Value::Array(args.map(text).to_vec()));
        let wanted = ["--api-key", HIDDEN, HIDDEN, "--seed", "7", "--hf-token=(hidden)", "--tokenizer", "x"];
        assert_eq!(shown, Value::Array(wanted.map(text).to_vec()));
    }
}
