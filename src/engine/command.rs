//! Settings to the engine's command line and environment. Pure: the same facts give the same words.
//!
//! Nothing secret goes into the words or the environment: both can be read by others on the box.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::json;

use crate::settings::{Engine, EngineKind};

use super::Own;
use super::child::Launch;

/// Names by which vLLM loads the plugin.
pub const PLUGIN_MODULE: &str = "spark_kv_tier";
pub const PLUGIN_CONNECTOR: &str = "SparkKvConnector";
pub const PLUGIN_TIER: &str = "SparkKvTier";
pub const PLUGIN_SPEC: &str = "SparkKvSpec";

/// Environment variable that carries the engine settings to the mock engine, as JSON.
pub const MOCK_SETTINGS: &str = "SPARK_KV_MOCK";

/// What the command line is made of.
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    pub engine: &'a Engine,
    pub own: &'a Own,
    /// Virtual environment with vLLM.
    pub venv: &'a Path,
    /// Folder of the model, absolute.
    pub model: &'a Path,
    pub served_name: &'a str,
    /// Never used twice ([`super::generation`]).
    pub engine_id: &'a str,
    /// On loopback.
    pub port: u16,
    /// The plugin's socket at the node.
    pub socket: &'a Path,
    /// Socket files of the engine's cache events, and of those that were missed.
    pub events: &'a Path,
    pub replay: &'a Path,
    /// Folder that holds the plugin's module.
    pub plugin: &'a Path,
    /// Working folder of the engine.
    pub folder: &'a Path,
    /// `PATH` of the keeper.
    pub path: &'a str,
}

/// The words for this kind of engine; none for one that somebody else starts.
pub fn launch(facts: &Facts<'_>) -> Option<Launch> {
    match facts.engine.kind {
        EngineKind::Vllm => Some(vllm(facts)),
        EngineKind::Mock => Some(mock(facts)),
        EngineKind::Attached => None,
    }
}

fn vllm(f: &Facts<'_>) -> Launch {
    let e = f.engine;
    let mut args: Vec<String> = vec!["serve".into(), text(f.model)];
    let mut flag = |name: &str, value: String| args.extend([name.to_owned(), value]);
    flag("--host", "127.0.0.1".into());
    flag("--port", f.port.to_string());
    flag("--served-model-name", f.served_name.into());
    flag("--max-model-len", e.max_model_len.to_string());
    flag("--max-num-seqs", e.max_num_seqs.to_string());
    flag("--kv-cache-memory-bytes", e.kv_cache.0.to_string());
    flag("--prefix-caching-hash-algo", "sha256_cbor".into());
    if e.prefix_match_unit > 0 {
        flag("--prefix-match-unit", e.prefix_match_unit.to_string());
    }
    if e.long_prefill_token_threshold > 0 {
        flag("--long-prefill-token-threshold", e.long_prefill_token_threshold.to_string());
    }
    flag("--kv-events-config", events(f).to_string());
    flag("--kv-transfer-config", transfer(f).to_string());
    // Asked every second by the keeper: the log would hold nothing else.
    flag("--disable-access-log-for-endpoints", "/health,/metrics,/v1/models".into());
    args.extend(["--enable-prefix-caching".into(), "--enable-prompt-tokens-details".into()]);
    args.extend(e.extra_args.iter().cloned());
    Launch { program: f.venv.join("bin/vllm"), args, env: vllm_env(f), folder: f.folder.to_owned() }
}

fn events(f: &Facts<'_>) -> serde_json::Value {
    json!({
        "enable_kv_cache_events": true,
        "publisher": "zmq",
        "endpoint": format!("ipc://{}", f.events.display()),
        "replay_endpoint": format!("ipc://{}", f.replay.display()),
        "topic": "kv",
    })
}

fn transfer(f: &Facts<'_>) -> serde_json::Value {
    json!({
        "kv_connector": PLUGIN_CONNECTOR,
        "kv_connector_module_path": PLUGIN_MODULE,
        "kv_role": "kv_both",
        "engine_id": f.engine_id,
        // A load that fails is computed again; the request must not.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": PLUGIN_SPEC,
            "spec_module_path": PLUGIN_MODULE,
            "cpu_bytes_to_use": f.engine.row_area.0,
            "offload_prompt_only": f.engine.offload_prompt_only,
            "secondary_tiers": [{
                "type": PLUGIN_TIER,
                "module_path": PLUGIN_MODULE,
                "socket": text(f.socket),
            }],
        },
    })
}

fn vllm_env(f: &Facts<'_>) -> BTreeMap<String, String> {
    let mut env = BTreeMap::new();
    let mut set = |name: &str, value: String| env.insert(name.to_owned(), value);
    set("PYTHONHASHSEED", f.engine.hash_seed.clone());
    set("PYTHONPATH", text(f.plugin));
    set("PYTHONUNBUFFERED", "1".into());
    set("PYTHONDONTWRITEBYTECODE", "1".into());
    set("PATH", format!("{}:{}", f.venv.join("bin").display(), f.path));
    set("VIRTUAL_ENV", text(f.venv));
    // Raw 32-byte hashes in events: the same as in the keys of rows.
    set("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0".into());
    // Loopback only; the canary needs `/reset_prefix_cache`. The router never routes these paths.
    set("VLLM_SERVER_DEV_MODE", "1".into());
    set("VLLM_NO_USAGE_STATS", "1".into());
    set("DO_NOT_TRACK", "1".into());
    // A model is a folder here; an engine that asks the network at start fails without one.
    set("HF_HUB_OFFLINE", "1".into());
    set("TRANSFORMERS_OFFLINE", "1".into());
    env.extend(f.engine.env.iter().map(|(name, value)| (name.clone(), value.clone())));
    env
}

fn mock(f: &Facts<'_>) -> Launch {
    let mut words = f.own.words("mock-engine").into_iter().map(|w| w.to_string_lossy().into_owned());
    let program = words.next().expect("a program and a subcommand").into();
    let mut args: Vec<String> = words.collect();
    for (name, value) in [
        ("--host", "127.0.0.1".to_owned()),
        ("--port", f.port.to_string()),
        ("--socket", text(f.socket)),
        ("--engine-id", f.engine_id.to_owned()),
        ("--served-name", f.served_name.to_owned()),
        ("--root", text(f.folder)),
        ("--kv-events-config", events(f).to_string()),
    ] {
        args.extend([name.to_owned(), value]);
    }
    args.extend(f.engine.extra_args.iter().cloned());
    let mut env = f.engine.env.clone();
    let settings = serde_json::to_string(f.engine).expect("plain fields");
    env.insert(MOCK_SETTINGS.to_owned(), settings);
    Launch { program, args, env, folder: f.folder.to_owned() }
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// The engine's id: unique over all engines that ever ran on this box, also over nodes of one name in two folders.
/// It names files in `/dev/shm`, and joining a stale one would mix two engines' rows.
pub fn engine_id(node: &str, state: &Path, generation: u64) -> String {
    format!("{}{generation}", engine_id_prefix(node, state))
}

pub(super) fn engine_id_prefix(node: &str, state: &Path) -> String {
    use sha2::Digest;
    use std::os::unix::ffi::OsStrExt;
    let digest = sha2::Sha256::digest(state.as_os_str().as_bytes());
    let safe = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    let node: String = node.chars().take(40).map(safe).collect();
    format!("spark-{node}-{}-", hex::encode(&digest[..3]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::units::Bytes;
    use std::path::PathBuf;

    fn with<R>(engine: Engine, look: impl FnOnce(Launch) -> R) -> R {
        let own = Own { program: "/opt/spark-kv".into(), before: Vec::new() };
        let facts = Facts {
            engine: &engine,
            own: &own,
            venv: Path::new("/venv"),
            model: Path::new("/models/tiny"),
            served_name: "tiny",
            engine_id: "spark-a-012345-7",
            port: 8001,
            socket: Path::new("/r/run/engine.sock"),
            events: Path::new("/r/run/events.sock"),
            replay: Path::new("/r/run/replay.sock"),
            plugin: Path::new("/r/run/plugin"),
            folder: Path::new("/r/run"),
            path: "/usr/bin",
        };
        look(launch(&facts).expect("an engine of ours"))
    }

    fn engine() -> Engine {
        Engine {
            kv_cache: Bytes::mib(256),
            row_area: Bytes::mib(64),
            max_model_len: 8192,
            max_num_seqs: 4,
            ..Engine::default()
        }
    }

    #[test]
    fn the_words_for_vllm() {
        let launch = with(engine(), |l| l);
        assert_eq!(launch.program, PathBuf::from("/venv/bin/vllm"));
        let expected = [
            "serve",
            "/models/tiny",
            "--host",
            "127.0.0.1",
            "--port",
            "8001",
            "--served-model-name",
            "tiny",
            "--max-model-len",
            "8192",
            "--max-num-seqs",
            "4",
            "--kv-cache-memory-bytes",
            "268435456",
            "--prefix-caching-hash-algo",
            "sha256_cbor",
            "--kv-events-config",
            concat!(
                r#"{"enable_kv_cache_events":true,"endpoint":"ipc:///r/run/events.sock","publisher":"zmq","#,
                r#""replay_endpoint":"ipc:///r/run/replay.sock","topic":"kv"}"#
            ),
            "--kv-transfer-config",
            concat!(
                r#"{"engine_id":"spark-a-012345-7","kv_connector":"SparkKvConnector","#,
                r#""kv_connector_extra_config":{"cpu_bytes_to_use":67108864,"offload_prompt_only":true,"#,
                r#""secondary_tiers":[{"module_path":"spark_kv_tier","socket":"/r/run/engine.sock","#,
                r#""type":"SparkKvTier"}],"spec_module_path":"spark_kv_tier","spec_name":"SparkKvSpec"},"#,
                r#""kv_connector_module_path":"spark_kv_tier","#,
                r#""kv_load_failure_policy":"recompute","kv_role":"kv_both"}"#
            ),
            "--disable-access-log-for-endpoints",
            "/health,/metrics,/v1/models",
            "--enable-prefix-caching",
            "--enable-prompt-tokens-details",
        ];
        assert_eq!(launch.args, expected);
    }

    #[test]
    fn the_environment_of_vllm_keeps_hashes_equal_and_stays_offline() {
        let mut settings = engine();
        settings.hash_seed = "17".into();
        settings.env.insert("VLLM_CPU_OMP_THREADS_BIND".into(), "nobind".into());
        settings.env.insert("HF_HUB_OFFLINE".into(), "0".into());
        let env = with(settings, |l| l.env);
        for (name, value) in [
            ("PYTHONHASHSEED", "17"),
            ("PYTHONPATH", "/r/run/plugin"),
            ("PATH", "/venv/bin:/usr/bin"),
            ("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0"),
            ("VLLM_SERVER_DEV_MODE", "1"),
            ("VLLM_NO_USAGE_STATS", "1"),
            ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
            ("HF_HUB_OFFLINE", "0"),
        ] {
            assert_eq!(env.get(name).map(String::as_str), Some(value), "{name}");
        }
    }

    #[test]
    fn further_arguments_come_last_so_that_they_win() {
        let mut settings = engine();
        settings.prefix_match_unit = 128;
        settings.long_prefill_token_threshold = 512;
        settings.extra_args = vec!["--enforce-eager".into(), "--max-num-seqs=2".into()];
        let args = with(settings, |l| l.args);
        assert_eq!(&args[args.len() - 2..], ["--enforce-eager", "--max-num-seqs=2"]);
        assert!(args.windows(2).any(|w| w == ["--prefix-match-unit", "128"]));
        assert!(args.windows(2).any(|w| w == ["--long-prefill-token-threshold", "512"]));
    }

    #[test]
    fn the_words_for_the_mock_and_none_for_an_attached_engine() {
        let launch = with(Engine { kind: EngineKind::Mock, ..engine() }, |l| l);
        assert_eq!(launch.program, PathBuf::from("/opt/spark-kv"));
        assert_eq!(&launch.args[..5], ["mock-engine", "--host", "127.0.0.1", "--port", "8001"]);
        let told: Engine = serde_json::from_str(&launch.env[MOCK_SETTINGS]).unwrap();
        assert_eq!(told.row_area, Bytes::mib(64));
    }

    #[test]
    fn nodes_of_one_name_in_two_folders_have_different_engine_ids() {
        let (one, two) = (engine_id("a b/c", Path::new("/one"), 3), engine_id("a b/c", Path::new("/two"), 3));
        assert_ne!(one, two);
        assert!(one.starts_with("spark-a-b-c-") && one.ends_with("-3"), "{one}");
    }
}
