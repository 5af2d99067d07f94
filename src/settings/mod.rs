//! The one settings tree. Defaults < profile < file < environment < flags; every value knows where it came from.
//!
//! The tree below is the reference: field docs say unit, default and reason. `load` builds it and nothing else does.

mod check;
mod load;

pub use load::{Error, Flag, Inputs, Leaf, Loaded, Origin, Problem, Shown, load, merge};

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::base::units::Bytes;

/// All settings of one node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    pub node: Node,
    pub listen: Listen,
    pub engine: Engine,
    pub store: Store,
    pub cluster: Cluster,
    pub router: Router,
    pub log: Log,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Node {
    /// Name of this node in pages, logs and engine ids. Letters, digits, dashes. Default: the host's name.
    pub name: String,
    /// Folder under which everything lives. Empty: /var/lib, /etc, /run (needs root).
    pub root: PathBuf,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Listen {
    /// Address of the public port. Default 127.0.0.1; anything else needs `api_keys_file`.
    pub address: String,
    /// Public port: API under /v1, page under /, /metrics, /healthz. Default 8000. The engine takes +1, control
    /// between nodes +2, data between nodes +3.
    pub port: u16,
    /// File with one API key per line (`name:key`). Empty: none, loopback only. A key may stand there as `sha256:` and its
    /// hash. Rights in brackets behind the name: `name [class=batch limit=4 isolated]:key`. `class` (interactive, normal,
    /// batch; default normal) is how urgent its requests are, which `x-spark-priority` can lower; `limit` how many it may
    /// have in flight on this node; `isolated` keeps what it computes in the cache to itself.
    pub api_keys_file: PathBuf,
    /// Largest request body. Default 64 MiB: a 1M-token prompt with tools is about 6 MB, images are more.
    pub max_body: Bytes,
    /// Most requests in flight on this node; more get 429 with Retry-After. Default 256.
    pub max_requests: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EngineKind {
    /// `vllm serve` out of a virtual environment.
    Vllm,
    /// `spark-kv mock-engine`: no model, real rows. For load, demos and faults.
    Mock,
    /// Somebody else starts the engine; its URL is `engine.url`.
    Attached,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Engine {
    pub kind: EngineKind,
    /// Virtual environment with vLLM. Empty: the one `spark-kv up` makes in the cache folder.
    pub venv: PathBuf,
    /// Folder of the model. Empty with `tiny_family` set: a tiny model is made in the cache folder.
    pub model: PathBuf,
    /// `llama` or `lfm2`: make a tiny random model of this family when `model` is empty. For tests and demos.
    pub tiny_family: String,
    /// Name clients use for the model. Empty: the model folder's name.
    pub served_name: String,
    /// URL of an attached engine.
    pub url: String,
    pub max_model_len: u32,
    pub max_num_seqs: u32,
    /// Device cache of the engine.
    pub kv_cache: Bytes,
    /// Shared row area (staging). A hit larger than its budget is cut; see `plan`.
    pub row_area: Bytes,
    /// Tokens per hash (`--prefix-match-unit`). 0: the engine's block size. Hybrid models need it small.
    pub prefix_match_unit: u32,
    /// Tokens of one prompt that a step computes at most while there are other requests: what a long cold prompt makes
    /// everybody's next word wait for. Smaller is smoother and makes the long prompt slower. 0: the engine's step.
    pub long_prefill_token_threshold: u32,
    /// `PYTHONHASHSEED` of the engine. Must be equal on all nodes.
    pub hash_seed: String,
    /// Store prompts only, not replies. True where the chat template strips reasoning from earlier replies.
    pub offload_prompt_only: bool,
    /// Prefill speed assumed until one was measured, in tokens per second. Deadlines of loads follow from it.
    pub prefill_tokens_per_s: u32,
    /// Seconds until an engine that is not ready is given up and started again. Default 900.
    pub ready_timeout_s: u32,
    /// Seconds between TERM and KILL. Default 20.
    pub stop_grace_s: u32,
    /// Further arguments for `vllm serve`, as they are.
    pub extra_args: Vec<String>,
    /// Further environment of the engine.
    pub env: BTreeMap<String, String>,
    /// Run the canary at every engine start. Default true.
    pub canary: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Io {
    /// The ring where it works, else plain, said at start.
    Auto,
    Ring,
    Plain,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Store {
    /// Hard cap of what the store takes on the drive. Default 64 GiB.
    pub capacity: Bytes,
    /// Size of one segment file. Default 256 MiB. At least four must fit into `capacity`.
    pub segment: Bytes,
    pub io: Io,
    /// Operations in flight on the drive. Default 32.
    pub queue_depth: u32,
    /// Days in which every row is read back once, slowly and when nothing else waits, so that rot is found early.
    /// Default 30, which for 2 TiB is less than 1 MB/s on average. 0: never.
    pub scrub_days: u32,
    /// Most bytes written to the drive in 24 hours, to spare it; beyond, rows are not taken and loads go on. Default 0:
    /// no limit. A drive that may write 1,200 TB in five years lasts them at 650GB a day.
    pub write_budget: Bytes,
    /// Days without use after which a row goes before all others when room is needed, in every namespace. Default 0:
    /// a row goes only for one that is worth more.
    pub ttl_days: u32,
    /// Seal new rows with AES-256-GCM, each under a key of the API key that its request came with and of its namespace;
    /// `spark-kv store forget --key NAME` destroys a key. Rows that are held stay as they are. Keys lie in
    /// `state/store-keys`. Default true: on a drive of 1.3 to 1.6 GB/s and two cores reading keeps 0.96 to 1.04 of its
    /// speed and writing gains (docs/speed.md); a drive several times as fast waits for the processor, which
    /// `spark-kv bench store` measures.
    pub encrypt: bool,
}

/// What rows travel over between nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Carries {
    /// NIXL where it is found and starts and every rail has RDMA, else TCP; said at start.
    Auto,
    #[default]
    Tcp,
    /// NIXL, also over TCP; the node does not start without it.
    Nixl,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Cluster {
    /// Address that control and data between nodes listen on. Default 127.0.0.1.
    pub address: String,
    /// Addresses of this node's ends of the cables to the other one, one per cable function. Rows travel over all of
    /// them at once, each connection pinned to its own device; ends of two nodes are paired by subnet, else by order.
    /// Empty: rows use `address`, as the routing table says. Default empty.
    pub rails: Vec<IpAddr>,
    /// What rows travel over: `auto`, `tcp` or `nixl`. NIXL is NVIDIA's library, looked for in vLLM's environment; with
    /// it rows are read out of the other node's memory by RDMA. `auto` uses it when it is found and starts and every
    /// rail has RDMA. `nixl` uses it over TCP too, where it opens ports that ask for no key, or refuses to start. Default
    /// `auto`.
    pub fabric: Carries,
    /// Token of a node to join, once. Later starts rejoin by the pinned key.
    pub join: String,
    /// Seconds without a word until a peer counts as gone. Default 3.
    pub silence_s: u32,
    /// Bytes of rows read for peers at one time. Default 256 MiB: what drive and wire have under way at 10 GB/s, thrice.
    pub serve_memory: Bytes,
    /// Copy rows that requests on both nodes use, while no load is under way. Default true.
    pub copy: bool,
    /// Let cold rows move to a node with room when this one is nearly full, and take those of others. Default true.
    pub take_over: bool,
    /// Most bytes copied or taken over in a second. Default 128 MiB.
    pub copy_rate: Bytes,
    /// Percent of `store.capacity` that copies of rows that others hold as well may take. Default 25.
    pub copy_share: u32,
}

/// How a request's place is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Strategy {
    #[default]
    Cost,
    Prefix,
    Kv,
    LeastLoad,
    RoundRobin,
}

impl Strategy {
    pub fn name(self) -> &'static str {
        match self {
            Self::Cost => "cost",
            Self::Prefix => "prefix",
            Self::Kv => "kv",
            Self::LeastLoad => "least_load",
            Self::RoundRobin => "round_robin",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Router {
    /// Seconds until a silent engine's request is given up. Default 600.
    pub idle_timeout_s: u32,
    /// Send requests to the other node when that looks better. False: every request stays where it came in.
    pub share: bool,
    /// How a request's place is chosen. Default `cost`: where everybody together waits least, in seconds. The others are
    /// for comparing: `prefix` (the longest known beginning, until that node has 4 more requests in flight), `kv` (tokens
    /// to be computed times requests in flight), `least_load` and `round_robin`.
    pub strategy: Strategy,
    /// Requests that this node's engine gets at once; more wait in line at the router, where the urgent pass the others.
    /// 0 (default): as many as `engine.max_num_seqs`, and fewer where more beside each other are seen to gain nothing; no
    /// bound for an attached engine, whose limits are not known here.
    pub places: u32,
    /// Longest line of waiting requests: more get 429 with the seconds after which to try again. Batch gets in while it is
    /// half full, normal up to three quarters. Default 128.
    pub queue: u32,
    /// Leave the line `x-anthropic-billing-header: …`, with which Claude Code begins its system prompt and which is another
    /// one in every request, out of prompts of the OpenAI endpoints: with it no two prompts begin alike, and nothing is found
    /// in any cache. The engine does the same by itself on `/v1/messages`. Default true.
    pub drop_billing_line: bool,
    /// Other names for models: `fast = "nano"` serves `nano` to who asks for `fast`. The answer has the name that was
    /// asked for. A name that an engine itself serves wins.
    pub aliases: BTreeMap<String, String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    /// Filter in the form of `RUST_LOG`. Default `info`.
    pub level: String,
    /// One JSON object per line instead of text.
    pub json: bool,
}

impl Default for Node {
    fn default() -> Self {
        let host = nix::unistd::gethostname().ok().and_then(|h| h.into_string().ok()).unwrap_or_default();
        // As long as a name may be; hosts may be called more.
        let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
        let name: String = host.chars().map(plain).take(40).collect();
        Self { name: if name.is_empty() { "node".into() } else { name }, root: PathBuf::new() }
    }
}

impl Default for Listen {
    fn default() -> Self {
        Self {
            address: "127.0.0.1".into(),
            port: 8000,
            api_keys_file: PathBuf::new(),
            max_body: Bytes::mib(64),
            max_requests: 256,
        }
    }
}

impl Default for Engine {
    fn default() -> Self {
        Self {
            kind: EngineKind::Vllm,
            venv: PathBuf::new(),
            model: PathBuf::new(),
            tiny_family: String::new(),
            served_name: String::new(),
            url: String::new(),
            max_model_len: 131_072,
            max_num_seqs: 8,
            kv_cache: Bytes::gib(16),
            row_area: Bytes::gib(4),
            prefix_match_unit: 0,
            long_prefill_token_threshold: 0,
            hash_seed: "0".into(),
            offload_prompt_only: true,
            prefill_tokens_per_s: 1500,
            ready_timeout_s: 900,
            stop_grace_s: 20,
            extra_args: Vec::new(),
            env: BTreeMap::new(),
            canary: true,
        }
    }
}

impl Default for Store {
    fn default() -> Self {
        Self {
            capacity: Bytes::gib(64),
            segment: Bytes::mib(256),
            io: Io::Auto,
            queue_depth: 32,
            scrub_days: 30,
            write_budget: Bytes(0),
            ttl_days: 0,
            encrypt: true,
        }
    }
}

impl Default for Cluster {
    fn default() -> Self {
        Self {
            address: "127.0.0.1".into(),
            rails: Vec::new(),
            fabric: Carries::Auto,
            join: String::new(),
            silence_s: 3,
            serve_memory: Bytes::mib(256),
            copy: true,
            take_over: true,
            copy_rate: Bytes::mib(128),
            copy_share: 25,
        }
    }
}

impl Cluster {
    /// Where rows are served: at each rail's address, or at the one for everything.
    pub fn data_addresses(&self, port: u16) -> Vec<String> {
        let at = |ip: &IpAddr| SocketAddr::new(*ip, port).to_string();
        if self.rails.is_empty() {
            return vec![format!("{}:{port}", self.address)];
        }
        self.rails.iter().map(at).collect()
    }
}

impl Default for Router {
    fn default() -> Self {
        Self {
            idle_timeout_s: 600,
            share: true,
            strategy: Strategy::Cost,
            places: 0,
            queue: 128,
            drop_billing_line: true,
            aliases: BTreeMap::new(),
        }
    }
}

impl Default for Log {
    fn default() -> Self {
        Self { level: "info".into(), json: false }
    }
}

/// Where everything of one node lies, derived from `node.root`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// Segments, identity, history.
    pub state: PathBuf,
    /// Sockets and what lives only as long as the processes.
    pub run: PathBuf,
    pub log: PathBuf,
    pub settings_file: PathBuf,
}

impl Settings {
    /// Where everything of this node lies.
    pub fn places(&self) -> Places {
        Places::of(self)
    }
}

impl Places {
    pub fn of(settings: &Settings) -> Self {
        let root = &settings.node.root;
        if root.as_os_str().is_empty() {
            return Self {
                state: "/var/lib/spark-kv".into(),
                run: "/run/spark-kv".into(),
                log: "/var/log/spark-kv".into(),
                settings_file: "/etc/spark-kv/spark-kv.toml".into(),
            };
        }
        Self {
            state: root.join("state"),
            run: root.join("run"),
            log: root.join("log"),
            settings_file: root.join("spark-kv.toml"),
        }
    }

    /// The plugin's socket. A path over the 108 bytes of `sun_path` falls back to a short one that both sides can
    /// derive from the long one.
    pub fn engine_socket(&self) -> PathBuf {
        Self::socket(self.run.join("engine.sock"))
    }

    /// Socket file of the engine's cache events, bounded in the same way.
    pub fn engine_events(&self) -> PathBuf {
        Self::socket(self.run.join("events.sock"))
    }

    /// Socket file on which the engine answers for events that were missed, bounded in the same way.
    pub fn engine_replay(&self) -> PathBuf {
        Self::socket(self.run.join("replay.sock"))
    }

    fn socket(long: PathBuf) -> PathBuf {
        use sha2::Digest;
        use std::os::unix::ffi::OsStrExt;
        // 108 bytes with the closing zero, as the kernel's sockaddr_un has it.
        if long.as_os_str().len() < 108 {
            return long;
        }
        let digest = sha2::Sha256::digest(long.as_os_str().as_bytes());
        std::env::temp_dir().join(format!("spark-kv-{}.sock", hex::encode(&digest[..8])))
    }

    pub fn segments(&self) -> PathBuf {
        self.state.join("segments")
    }
    /// What the last day wrote and read; beside the store's folder, in which every file counts.
    pub fn store_wear(&self) -> PathBuf {
        self.state.join("store-wear")
    }
    /// The keys that rows are sealed under; beside the store's folder, so that it can be copied or given away without.
    pub fn store_keys(&self) -> PathBuf {
        self.state.join("store-keys")
    }
    /// Which segment was read back when.
    pub fn store_scrub(&self) -> PathBuf {
        self.state.join("store-scrub")
    }
    pub fn identity(&self) -> PathBuf {
        self.state.join("identity")
    }
    /// A fresh token with which another node joins; readable by this node's user only.
    pub fn invite(&self) -> PathBuf {
        self.run.join("invite")
    }
    /// Where the running node says how it is reached, for `spark-kv status`.
    pub fn node_file(&self) -> PathBuf {
        self.run.join("node.json")
    }
    /// What the keeper tells the node about the engine ([`crate::engine::view`]).
    pub fn engine_view(&self) -> PathBuf {
        self.run.join("engine.json")
    }
    pub fn engine_log(&self) -> PathBuf {
        self.log.join("engine.log")
    }
}

/// Ports of one node, derived from the public one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ports {
    pub public: u16,
    pub engine: u16,
    pub control: u16,
    pub data: u16,
}

impl Ports {
    pub fn of(listen: &Listen) -> Self {
        let public = listen.port;
        Self { public, engine: public + 1, control: public + 2, data: public + 3 }
    }
}
