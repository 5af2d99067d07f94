//! The routers that are measured, each a process of its own: this program with an attached engine, and whatever a
//! command starts.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde_json::Value;
use tokio::process::{Child, Command};

use super::wire::Client;

/// Longest that a router may take until it serves: some load a runtime and look at their backends first.
const START: Duration = Duration::from_secs(90);
/// Longest that it may take to end.
const END: Duration = Duration::from_secs(15);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(50);

/// A node as `spark-kv up` starts it.
#[derive(Clone, Copy, Debug)]
pub struct Node<'a> {
    pub name: &'a str,
    pub root: &'a Path,
    pub settings: &'a [(&'static str, String)],
    /// Joins the node that gave it.
    pub invite: Option<&'a str>,
}

/// A router that runs. It and what it started end with this.
#[derive(Debug)]
pub struct Guest {
    pub name: String,
    pub address: SocketAddr,
    child: Child,
    /// Its process group.
    group: Pid,
    /// Where it writes which process routes; ours has a keeper beside it.
    node: Option<PathBuf>,
    /// It is ready only when its tokens are proved.
    exact: bool,
}

impl Guest {
    /// This program: `spark-kv up` with `backend` as its attached engine, on `root`. The keeper, the store and
    /// everything else of a node is there and idle; requests take the way that they take on a box.
    pub async fn ours(
        program: &Path,
        root: &Path,
        backend: SocketAddr,
        model: &Path,
        served: &str,
    ) -> Result<Self, String> {
        let base = free(4)?;
        let mut command = Command::new(program);
        command.args(["up", "--name", "bench", "--port-base", &base.to_string(), "--root"]).arg(root);
        let model = model.to_str().ok_or("the model's folder is no text")?;
        for (key, value) in [
            ("engine.kind", "attached"),
            ("engine.url", &format!("http://{backend}")),
            ("engine.model", model),
            ("engine.served_name", served),
            ("engine.canary", "false"),
            ("store.capacity", "1GiB"),
            ("store.segment", "16MiB"),
        ] {
            command.args(["--set", &format!("{key}={value}")]);
        }
        let mut guest = Self::start("spark-kv".into(), command, base, root)?;
        (guest.node, guest.exact) = (Some(root.join("run/node.json")), true);
        Ok(guest)
    }

    /// This program as a node of this description.
    pub fn node(program: &Path, node: &Node<'_>) -> Result<Self, String> {
        let base = free(4)?;
        let mut command = Command::new(program);
        command.args(["up", "--name", node.name, "--port-base", &base.to_string(), "--root"]).arg(node.root);
        for (key, value) in node.settings {
            command.args(["--set", &format!("{key}={value}")]);
        }
        if let Some(invite) = node.invite {
            // Not among the arguments, which everybody can see.
            command.env("SPARK_KV_JOIN", invite);
        }
        let mut guest = Self::start(node.name.to_owned(), command, base, node.root)?;
        guest.node = Some(node.root.join("run/node.json"));
        Ok(guest)
    }

    /// Waits until a node's engine serves.
    pub async fn serves(&mut self) -> Result<(), String> {
        self.until("its engine serves", |state| state["node"]["engine"]["phase"] == "ready").await
    }

    /// Waits until a node is connected with another.
    pub async fn has_peer(&mut self) -> Result<(), String> {
        self.until("it is connected", |state| {
            state["peers"].as_array().is_some_and(|peers| peers.iter().any(|peer| peer["connected"] == true))
        })
        .await
    }

    /// What lets another node join this one.
    pub async fn invite(&self) -> Result<String, String> {
        let run = self.node.as_ref().and_then(|file| file.parent()).ok_or("only a node invites")?;
        let begin = Instant::now();
        while begin.elapsed() < START {
            match std::fs::read_to_string(run.join("invite")) {
                Ok(token) if !token.trim().is_empty() => return Ok(token.trim().to_owned()),
                _ => tokio::time::sleep(PAUSE).await,
            }
        }
        Err(format!("{} invites nobody", self.name))
    }

    async fn until(&mut self, what: &str, is: impl Fn(&Value) -> bool) -> Result<(), String> {
        let begin = Instant::now();
        while begin.elapsed() < START {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(format!("{} ended with {status}", self.name));
            }
            if self.state().await.is_ok_and(|state| is(&state)) {
                return Ok(());
            }
            tokio::time::sleep(PAUSE).await;
        }
        Err(format!("{}: it is not so that {what} within {} s", self.name, START.as_secs()))
    }

    async fn state(&self) -> io::Result<Value> {
        let mut client = Client::connect(self.address).await?;
        client.ask(b"GET /api/v1/state HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n").await?;
        let answer = client.answer();
        let at = answer.windows(4).position(|window| window == b"\r\n\r\n").unwrap_or(0);
        serde_json::from_slice(&answer[at..]).map_err(io::Error::other)
    }

    /// What `line` starts, in which `{port}` and `{backends}` stand for where it serves and what it serves from.
    pub async fn other(name: &str, line: &str, root: &Path, backends: &[SocketAddr]) -> Result<Self, String> {
        let port = free(1)?;
        let urls: Vec<String> = backends.iter().map(|address| format!("http://{address}")).collect();
        let line = line.replace("{port}", &port.to_string()).replace("{backends}", &urls.join(" "));
        let mut command = Command::new("sh");
        command.args(["-c", &format!("exec {line}")]).current_dir(root);
        Self::start(name.to_owned(), command, port, root)
    }

    fn start(name: String, mut command: Command, port: u16, root: &Path) -> Result<Self, String> {
        let told = |error: io::Error| format!("{name}: {error}");
        let log = std::fs::File::create(root.join(format!("{name}.log"))).map_err(told)?;
        let child = command
            .stdin(Stdio::null())
            .stdout(log.try_clone().map_err(told)?)
            .stderr(log)
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(told)?;
        let number = child.id().and_then(|id| i32::try_from(id).ok()).filter(|id| *id > 1);
        let group = Pid::from_raw(number.ok_or_else(|| format!("{name} ended at once"))?);
        Ok(Self {
            name,
            address: SocketAddr::from(([127, 0, 0, 1], port)),
            child,
            group,
            node: None,
            exact: false,
        })
    }

    /// Waits until it answers `request`; one whose tokens are to be exact until they are proved, too.
    pub async fn ready(&mut self, request: &[u8]) -> Result<(), String> {
        let begin = Instant::now();
        let mut last = String::from("it does not listen");
        while begin.elapsed() < START {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(format!("{} ended with {status}", self.name));
            }
            match self.answers(request).await {
                Ok(()) => return Ok(()),
                Err(error) => last = error.to_string(),
            }
            tokio::time::sleep(PAUSE).await;
        }
        Err(format!("{} does not serve: {last}", self.name))
    }

    async fn answers(&self, request: &[u8]) -> io::Result<()> {
        let mut client = Client::connect(self.address).await?;
        client.ask(request).await?;
        if self.exact {
            let state = self.state().await?;
            let tokens = &state["node"]["tokens"];
            if tokens["exact"] != true {
                return Err(io::Error::other(format!("its tokens are guessed: {}", tokens["why"])));
            }
        }
        Ok(())
    }

    /// Anonymous memory in MB: of the process that routes; of all of its group where that is not known.
    pub fn memory_mb(&self) -> f64 {
        let node = self.node.as_ref().and_then(|file| {
            let node: Value = serde_json::from_str(&std::fs::read_to_string(file).ok()?).ok()?;
            node["pid"].as_u64()
        });
        match node {
            Some(pid) => anonymous(pid),
            None => processes()
                .into_iter()
                .filter(|(_, group)| *group == self.group.as_raw())
                .map(|(pid, _)| anonymous(pid))
                .sum(),
        }
    }

    pub async fn end(mut self) {
        let _ = killpg(self.group, Signal::SIGTERM);
        if tokio::time::timeout(END, self.child.wait()).await.is_err() {
            let _ = killpg(self.group, Signal::SIGKILL);
            let _ = self.child.wait().await;
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Ended the ordinary way it is gone already, and its number may be another's.
        if self.child.id().is_some() {
            let _ = killpg(self.group, Signal::SIGKILL);
        }
    }
}

/// Waits until somebody listens there.
pub async fn listens(at: SocketAddr, limit: Duration) -> Result<(), String> {
    let begin = Instant::now();
    while begin.elapsed() < limit {
        if Client::connect(at).await.is_ok() {
            return Ok(());
        }
        tokio::time::sleep(PAUSE).await;
    }
    Err(format!("nobody listens on {at}"))
}

/// The first of `count` free ports in a row.
pub fn free(count: u16) -> Result<u16, String> {
    for _ in 0..200 {
        let first = 20_000 + rand::random::<u16>() % 10_000;
        if (first..first + count).all(|port| TcpListener::bind(("127.0.0.1", port)).is_ok()) {
            return Ok(first);
        }
    }
    Err("no free ports".into())
}

fn anonymous(pid: u64) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
    kib.unwrap_or(0.0) * 1024.0 / 1e6
}

/// All processes and their groups.
fn processes() -> Vec<(u64, i32)> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let of = |entry: std::fs::DirEntry| {
        let pid: u64 = entry.file_name().to_str()?.parse().ok()?;
        let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
        // After the name in parentheses: state, parent, group.
        let group = stat.rsplit_once(')')?.1.split_whitespace().nth(2)?.parse().ok()?;
        Some((pid, group))
    };
    entries.flatten().filter_map(of).collect()
}
