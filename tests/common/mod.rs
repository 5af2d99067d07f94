//! Real processes for tests: nodes started by `spark-kv up` in a folder of the test's own, on loopback ports of its
//! own. A node ends with its test, whole process tree and all, also when the test panics.

#![allow(
    dead_code,
    clippy::allow_attributes,
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "each test binary uses its own part of this"
)]

use std::fs;
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use serde_json::{Value, json};

/// How long anything here is awaited before the test fails with what it waited for.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// A real engine on two shared cores.
pub const ENGINE_PATIENCE: Duration = Duration::from_secs(240);

/// Polls `look` until it gives something, and fails the test with `what` when it does not within `limit`.
pub fn await_some<T>(what: &str, limit: Duration, mut look: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(begin.elapsed() < limit, "waited {limit:?} for {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Four neighbouring free ports, kept apart from those of other test processes by a lock file.
pub struct PortBlock {
    pub base: u16,
    _lock: fs::File,
}

impl PortBlock {
    pub fn take() -> Self {
        let folder = std::env::temp_dir().join("spark-kv-test-ports");
        fs::create_dir_all(&folder).unwrap();
        for base in (21_000..29_000).step_by(4) {
            let lock = fs::File::create(folder.join(base.to_string())).unwrap();
            if lock.try_lock().is_err() {
                continue;
            }
            if (base..base + 4).all(|port| TcpListener::bind(("127.0.0.1", port)).is_ok()) {
                return Self { base, _lock: lock };
            }
        }
        panic!("no four free ports between 21000 and 29000");
    }
}

/// One node: the keeper, and through it node and engine.
pub struct Node {
    pub name: String,
    pub root: PathBuf,
    pub ports: PortBlock,
    pub keeper: Option<Child>,
    mutant: Option<String>,
    profile: String,
}

pub struct Spec<'a> {
    pub name: &'a str,
    pub profile: &'a str,
    /// Text of ROOT/spark-kv.toml.
    pub settings: &'a str,
    pub join: Option<String>,
    pub mutant: Option<&'a str>,
}

impl Node {
    /// Starts `spark-kv up` and does not wait.
    pub fn start(folder: &Path, spec: &Spec<'_>) -> Self {
        let root = folder.join(spec.name);
        fs::create_dir_all(&root).unwrap();
        fs::write(root.join("spark-kv.toml"), spec.settings).unwrap();
        let mut node = Self {
            name: spec.name.to_owned(),
            root,
            ports: PortBlock::take(),
            keeper: None,
            mutant: spec.mutant.map(str::to_owned),
            profile: spec.profile.to_owned(),
        };
        node.up(spec.join.as_deref());
        node
    }

    /// Starts the keeper (again) on the same folder and ports.
    pub fn up(&mut self, join: Option<&str>) {
        assert!(self.keeper.is_none(), "{} is up", self.name);
        let log = fs::File::options().create(true).append(true).open(self.root.join("up.log")).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_spark-kv"));
        command
            .args(["up", "--profile", &self.profile, "--name", &self.name, "--port-base"])
            .arg(self.ports.base.to_string())
            .arg("--root")
            .arg(&self.root)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .process_group(0);
        if let Some(token) = join {
            command.env("SPARK_KV_JOIN", token);
        }
        if let Some(mutant) = &self.mutant {
            command.env("SPARK_KV_MUTANT", mutant);
        }
        self.keeper = Some(command.spawn().unwrap());
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.ports.base)
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.root.join("up.log")).unwrap_or_default()
    }

    pub fn engine_log(&self) -> String {
        fs::read_to_string(self.root.join("log/engine.log")).unwrap_or_default()
    }

    /// What a failing test prints about this node.
    pub fn tell(&self) -> String {
        let tail = |text: String| {
            let lines: Vec<&str> = text.lines().collect();
            lines[lines.len().saturating_sub(60)..].join("\n")
        };
        format!(
            "---- {} up.log\n{}\n---- engine.log\n{}\n",
            self.name,
            tail(self.log()),
            tail(self.engine_log())
        )
    }

    pub fn state(&self) -> Option<Value> {
        get_json(&self.url("/api/v1/state"))
    }

    /// `/healthz`: status code and body.
    pub fn health(&self) -> Option<(u16, Value)> {
        let response = agent().get(self.url("/healthz")).call().ok()?;
        let code = response.status().as_u16();
        let value = response.into_body().read_json().ok()?;
        Some((code, value))
    }

    /// Whether this node serves by its own engine, whose plugin is at the door and whose cache has been judged.
    fn is_ready(&self) -> bool {
        let Some((200, body)) = self.health() else { return false };
        let ok = |check: &str| body["checks"][check]["ok"] == true;
        let judged = || self.state().is_some_and(|state| state["node"]["cache"]["on"].is_boolean());
        ok("engine") && ok("plugin") && judged()
    }

    /// Waits until the node serves by its own engine.
    pub fn await_ready(&mut self, limit: Duration) {
        let begin = Instant::now();
        loop {
            if self.is_ready() {
                return;
            }
            if let Some(status) = self.keeper.as_mut().and_then(|k| k.try_wait().unwrap()) {
                panic!("{} ended with {status} before it was ready\n{}", self.name, self.tell());
            }
            assert!(
                begin.elapsed() < limit,
                "{} not ready in {limit:?}: {:?}\n{}",
                self.name,
                self.health(),
                self.tell()
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// The token with which another node joins this one.
    pub fn invite(&self) -> String {
        await_some("an invitation", PATIENCE, || {
            fs::read_to_string(self.root.join("run/invite"))
                .ok()
                .map(|t| t.trim().to_owned())
                .filter(|t| !t.is_empty())
        })
    }

    /// Waits until this node's peer is connected.
    pub fn await_peer(&self) {
        await_some("the peer", PATIENCE, || {
            let state = self.state()?;
            state["peers"].as_array()?.iter().any(|peer| peer["connected"] == true).then_some(())
        });
    }

    /// Process of the node itself, child of the keeper.
    pub fn node_pid(&self) -> i32 {
        await_some("run/node.json", PATIENCE, || {
            let text = fs::read_to_string(self.root.join("run/node.json")).ok()?;
            let pid = i32::try_from(serde_json::from_str::<Value>(&text).ok()?["pid"].as_i64()?).ok()?;
            alive(pid).then_some(pid)
        })
    }

    /// What the keeper says about the engine.
    pub fn engine_view(&self) -> Option<Value> {
        serde_json::from_str(&fs::read_to_string(self.root.join("run/engine.json")).ok()?).ok()
    }

    pub fn engine_pid(&self) -> i32 {
        await_some("the engine's pid", PATIENCE, || {
            i32::try_from(self.engine_view()?["pid"].as_i64()?).ok().filter(|&p| p > 1 && alive(p))
        })
    }

    pub fn signal(pid: i32, signal: Signal) {
        assert!(pid > 1, "never signal {pid}");
        let _ = kill(Pid::from_raw(pid), signal);
    }

    /// Ends the node the ordinary way and waits. Gives the exit code.
    pub fn stop(&mut self) -> Option<i32> {
        let mut keeper = self.keeper.take()?;
        let pid = Pid::from_raw(i32::try_from(keeper.id()).unwrap());
        let _ = kill(pid, Signal::SIGTERM);
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(45) {
            if let Some(status) = keeper.try_wait().unwrap() {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let _ = killpg(pid, Signal::SIGKILL);
        let _ = keeper.wait();
        panic!("{} did not stop within 45 s\n{}", self.name, self.tell());
    }

    /// SIGKILL to the keeper alone: everything else must end by itself.
    pub fn kill_keeper(&mut self) {
        let mut keeper = self.keeper.take().unwrap();
        let _ = keeper.kill();
        let _ = keeper.wait();
    }

    /// Processes whose command line or environment names this node's folder.
    pub fn processes(&self) -> Vec<(i32, String)> {
        let needle = self.root.to_str().unwrap().to_owned();
        fs::read_dir("/proc")
            .unwrap()
            .filter_map(|entry| {
                let pid: i32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
                let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
                let env = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
                let line = String::from_utf8_lossy(&line).replace('\0', " ");
                let hit = line.contains(&needle) || String::from_utf8_lossy(&env).contains(&needle);
                (hit && pid != i32::try_from(std::process::id()).unwrap()).then_some((pid, line))
            })
            .collect()
    }

    /// Shared memory files of this node's engines.
    pub fn shared_memory(&self) -> Vec<String> {
        let ours = format!("vllm_offload_spark-{}-", self.name);
        fs::read_dir("/dev/shm")
            .unwrap()
            .filter_map(|e| e.ok()?.file_name().into_string().ok())
            .filter(|name| name.starts_with(&ours))
            .collect()
    }

    /// Nothing of this node may be left.
    pub fn await_gone(&self) {
        let begin = Instant::now();
        loop {
            let (processes, memory) = (self.processes(), self.shared_memory());
            if processes.is_empty() && memory.is_empty() {
                return;
            }
            assert!(
                begin.elapsed() < Duration::from_secs(40),
                "{} left behind: {processes:?} {memory:?}\n{}",
                self.name,
                self.tell()
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// One value of the node's /metrics, labels included in `series`; 0 when it is not there.
    pub fn metric(&self, series: &str) -> f64 {
        let text = agent().get(self.url("/metrics")).call().unwrap().into_body().read_to_string().unwrap();
        text.lines()
            .find_map(|l| l.strip_prefix(series)?.strip_prefix(' ')?.trim().parse().ok())
            .unwrap_or_default()
    }

    /// Waits until no job is in flight any more: what was asked so far is on the drive.
    pub fn await_stored(&self) {
        let mut before = -1.0;
        await_some("stores to end", PATIENCE, || {
            let rows = self.metric("sparkkv_store_rows_stored_total");
            let quiet = self.metric("sparkkv_door_open_jobs") == 0.0 && rows == before;
            before = rows;
            quiet.then_some(())
        });
    }

    /// Whether this node knows as many rows of `peer` as that one holds.
    pub fn knows_index_of(&self, peer: &Self) -> bool {
        let known = self.metric("sparkkv_cluster_peer_keys");
        known > 0.0 && known == peer.metric("sparkkv_store_rows")
    }

    /// Waits until this node knows every row that `peer` holds.
    pub fn await_index_of(&self, peer: &Self) {
        await_some("the peer's index", PATIENCE, || self.knows_index_of(peer).then_some(()));
    }

    /// The ledger's entry of one request, once its sources are known.
    pub fn request(&self, id: &str) -> Value {
        await_some(&format!("request {id} in the ledger"), PATIENCE, || {
            let entry = get_json(&self.url(&format!("/api/v1/requests/{id}")))?;
            entry["sources"].is_object().then_some(entry)
        })
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let Some(mut keeper) = self.keeper.take() else { return };
        if std::thread::panicking() {
            eprintln!("{}", self.tell());
        }
        let pid = Pid::from_raw(i32::try_from(keeper.id()).unwrap());
        let _ = kill(pid, Signal::SIGTERM);
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(30) {
            if keeper.try_wait().ok().flatten().is_some() {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let _ = killpg(pid, Signal::SIGKILL);
        let _ = keeper.wait();
    }
}

pub fn alive(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit(')').next().unwrap_or("").trim_start().starts_with('Z'))
}

pub fn agent() -> ureq::Agent {
    ureq::Agent::config_builder()
        .http_status_as_error(false)
        .timeout_global(Some(Duration::from_secs(180)))
        .build()
        .into()
}

pub fn get_json(url: &str) -> Option<Value> {
    let response = agent().get(url).call().ok()?;
    (response.status() == 200).then(|| response.into_body().read_json().ok())?
}

/// An answer as a client sees it.
#[derive(Debug)]
pub struct Answer {
    pub code: u16,
    pub id: String,
    pub node: String,
    /// Tokens that the router foretold to be cached.
    pub foretold: Option<u64>,
    pub body: Value,
}

impl Answer {
    pub fn text(&self) -> String {
        let choice = &self.body["choices"][0];
        choice["text"]
            .as_str()
            .or_else(|| choice["message"]["content"].as_str())
            .unwrap_or_default()
            .to_owned()
    }
    pub fn prompt_tokens(&self) -> u64 {
        self.body["usage"]["prompt_tokens"].as_u64().unwrap_or(0)
    }
    pub fn cached_tokens(&self) -> u64 {
        self.body["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0)
    }
}

static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);

/// A request id no other test uses.
pub fn fresh_id() -> String {
    let n = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    format!("t{}x{n}", std::process::id())
}

/// Posts `body` to `node`, pinned to it.
pub fn post(node: &Node, path: &str, body: &Value) -> Answer {
    send(node, path, body, Some(&node.name))
}

/// Posts `body` to `node`, which places it.
pub fn place(node: &Node, path: &str, body: &Value) -> Answer {
    send(node, path, body, None)
}

fn send(node: &Node, path: &str, body: &Value, pinned: Option<&str>) -> Answer {
    let id = fresh_id();
    let mut request = agent().post(node.url(path)).header("x-request-id", &id);
    if let Some(name) = pinned {
        request = request.header("x-spark-box", name);
    }
    let response =
        request.send_json(body).unwrap_or_else(|e| panic!("{path} on {}: {e}\n{}", node.name, node.tell()));
    let header =
        |name: &str| response.headers().get(name).and_then(|v| v.to_str().ok()).unwrap_or("").to_owned();
    let (code, node_name) = (response.status().as_u16(), header("x-spark-box"));
    let foretold = header("x-spark-cached-tokens-predicted").parse().ok();
    let body = response.into_body().read_json().unwrap_or(Value::Null);
    Answer { code, id, node: node_name, foretold, body }
}

/// A greedy completion of `prompt`.
pub fn complete(node: &Node, model: &str, prompt: &str, tokens: u32) -> Answer {
    let body =
        json!({"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true});
    let answer = post(node, "/v1/completions", &body);
    assert_eq!(answer.code, 200, "{answer:?}\n{}", node.tell());
    answer
}

/// Deterministic text of about `words` words that shares no prefix with another `seed`'s.
pub fn words(seed: u64, words: usize) -> String {
    const LIST: [&str; 24] = [
        "river", "stone", "lantern", "copper", "window", "garden", "signal", "harbour", "meadow", "thunder",
        "paper", "silver", "orchard", "compass", "ember", "valley", "mirror", "anchor", "saddle", "canyon",
        "whistle", "marble", "prairie", "beacon",
    ];
    let mut dice = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut out = format!("note {seed}:");
    for _ in 0..words {
        dice ^= dice << 13;
        dice ^= dice >> 7;
        dice ^= dice << 17;
        out.push(' ');
        out.push_str(LIST[(dice % 24) as usize]);
    }
    out
}

/// Segment files of a node, in order of their names.
pub fn segments(node: &Node) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(node.root.join("state/segments"))
        .map(|d| d.filter_map(|e| Some(e.ok()?.path())).collect())
        .unwrap_or_default();
    files.retain(|p| p.extension().is_some());
    files.sort();
    files
}
