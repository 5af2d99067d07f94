//! The keeper with engines that are scripts: every way in which keeper, guard, node or engine can end, and that
//! nothing is left behind.
//!
//! This binary plays all parts of the program itself: [`part`] is called again and again as keeper, guard and node.
//! A fake environment's `bin/vllm` is a script that each test writes.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a test, and a program that plays all parts of the real one"
)]

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use spark_kv::engine::{Identity, Own, Phase, View, guard};
use spark_kv::keeper::{self, NodeCommand, Options};
use spark_kv::settings::{Places, Settings};

/// How long anything is awaited before the test fails with what it waited for.
const PATIENCE: Duration = Duration::from_secs(40);

/// Words that call this binary as a part of the program. What follows `part` looks like names of tests to the
/// harness, which runs exactly the one that bears this name.
const BEFORE: [&str; 6] = ["--ignored", "--exact", "--nocapture", "--test-threads=1", "--", "part"];

#[test]
#[ignore = "not a test: the program, called by the tests"]
fn part() {
    let words: Vec<OsString> = std::env::args_os().collect();
    let Some(at) = words.iter().position(|word| word == "part") else { return };
    let words = &words[at + 1..];
    let code = match words.first().and_then(|w| w.to_str()) {
        Some("guard") => guard::run(&words[1..]),
        Some("node") => node(Path::new(&words[1])),
        Some("up") => up(Path::new(&words[1])),
        _ => return,
    };
    std::process::exit(code);
}

fn own() -> Own {
    let program = std::env::current_exe().unwrap();
    Own { program, before: BEFORE.iter().map(OsString::from).collect() }
}

/// A node that does nothing: says its number, then waits.
fn node(root: &Path) -> i32 {
    use std::io::Write;
    let mut pids = fs::File::options().append(true).create(true).open(root.join("nodes")).unwrap();
    writeln!(pids, "{}", std::process::id()).unwrap();
    fs::write(root.join("run/invite"), "spark1-token").unwrap();
    loop {
        nix::unistd::pause();
    }
}

fn up(root: &Path) -> i32 {
    let settings: Settings =
        toml::from_str(&fs::read_to_string(root.join("spark-kv.toml")).unwrap()).unwrap();
    let options = Options {
        places: Places::of(&settings),
        settings,
        node: NodeCommand { words: vec![root.into()], env: Vec::new() },
        own: own(),
        cache: root.join("cache"),
        say: Arc::new(|line| println!("{line}")),
    };
    match keeper::run(options) {
        Ok(code) => code,
        Err(error) => {
            println!("error: {error}");
            1
        }
    }
}

/// One folder with a keeper in it.
struct Box {
    dir: tempfile::TempDir,
    keeper: Option<Child>,
}

/// The beginning of every fake engine: says its number, finds its port, answers `/health` and `/v1/models`.
const SERVE: &str = r#"
port=; for word; do [ "$before" = --port ] && port=$word; before=$word; done
serve() { exec python3 -c '
import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b"{\"data\":[{\"id\":\"fake\"}]}"
        self.send_response(200); self.send_header("content-length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer.allow_reuse_address = True
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
' "$port"; }
"#;

impl Box {
    /// A keeper whose engine is this script.
    fn start(script: &str) -> Self {
        Self::with_grace(script, 1)
    }

    fn with_grace(script: &str, grace_s: u32) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        fs::create_dir_all(root.join("venv/bin")).unwrap();
        fs::create_dir_all(root.join("fake")).unwrap();
        fs::write(root.join("fake/config.json"), "{}").unwrap();
        let vllm = root.join("venv/bin/vllm");
        fs::write(
            &vllm,
            format!("#!/bin/sh\nroot={}\necho $$ >> $root/engines\n{SERVE}\n{script}\n", root.display()),
        )
        .unwrap();
        fs::set_permissions(&vllm, fs::Permissions::from_mode(0o700)).unwrap();
        let settings = format!(
            "[node]\nname = \"t\"\nroot = {root:?}\n[listen]\nport = {}\n[engine]\nvenv = {:?}\nmodel = {:?}\nstop_grace_s = {grace_s}\n",
            free_port(),
            root.join("venv"),
            root.join("fake"),
        );
        fs::write(root.join("spark-kv.toml"), settings).unwrap();
        let mut started = Self { dir, keeper: None };
        started.up();
        started
    }

    fn up(&mut self) {
        let log = fs::File::options().append(true).create(true).open(self.root().join("up.log")).unwrap();
        let mut command = Command::new(own().program);
        command.args(BEFORE).arg("up").arg(self.root()).stdin(Stdio::null());
        command.stdout(log.try_clone().unwrap()).stderr(log);
        self.keeper = Some(command.spawn().unwrap());
    }

    fn root(&self) -> &Path {
        self.dir.path()
    }

    fn keeper(&self) -> u32 {
        self.keeper.as_ref().unwrap().id()
    }

    fn view(&self) -> View {
        View::read(&self.root().join("run/engine.json"))
    }

    fn numbers(&self, file: &str) -> Vec<u32> {
        let text = fs::read_to_string(self.root().join(file)).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).collect()
    }

    fn guard(&self) -> u32 {
        self.wait("the guard", || guard::Record::read(&self.root().join("run/engine.record"))).guard.pid
    }

    fn ready(&self) -> View {
        self.wait("a ready engine", || Some(self.view()).filter(View::is_ready))
    }

    /// Polls `look` until it gives something.
    fn wait<T>(&self, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
        let begin = Instant::now();
        loop {
            if let Some(found) = look() {
                return found;
            }
            if begin.elapsed() > PATIENCE {
                panic!("waited for {what}\n{:?}\n{}", self.view(), self.logs());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn logs(&self) -> String {
        let read = |name: &str| fs::read_to_string(self.root().join(name)).unwrap_or_default();
        format!("---- up.log\n{}\n---- engine.log\n{}", read("up.log"), read("log/engine.log"))
    }

    /// Waits until no process has this folder in its words or environment.
    fn nobody_left(&self) {
        self.wait("all processes to be gone", || {
            let left = processes_of(self.root());
            left.is_empty().then_some(())
        });
        self.nothing_in_shm();
    }

    /// Every name in shared memory that belongs to this folder's engines.
    fn nothing_in_shm(&self) {
        self.wait("shared memory to be gone", || shm_of(&self.shm()).is_empty().then_some(()));
    }

    /// What the fake engines put into the names of their shared memory.
    fn shm(&self) -> String {
        format!("test{}", self.root().file_name().unwrap().to_string_lossy().replace('.', ""))
    }

    fn signal(pid: u32, signal: Signal) {
        let _ = kill(Pid::from_raw(pid.cast_signed()), signal);
    }

    /// Asks the keeper to end and waits for it.
    fn stop(&mut self) -> i32 {
        Self::signal(self.keeper(), Signal::SIGTERM);
        self.keeper_ended()
    }

    fn keeper_ended(&mut self) -> i32 {
        let mut keeper = self.keeper.take().unwrap();
        let status = self.wait("the keeper's end", || keeper.try_wait().unwrap());
        status.code().unwrap_or(-1)
    }
}

impl Drop for Box {
    fn drop(&mut self) {
        if let Some(mut keeper) = self.keeper.take() {
            let _ = keeper.kill();
            let _ = keeper.wait();
        }
        for pid in processes_of(self.root()) {
            Self::signal(pid, Signal::SIGKILL);
        }
        for file in shm_of(&self.shm()) {
            let _ = fs::remove_file(file);
        }
    }
}

fn free_port() -> u16 {
    // The engine's is the next one; both are asked for so that neither is taken now.
    loop {
        let one = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = one.local_addr().unwrap().port();
        if port < 65_000 && std::net::TcpListener::bind(("127.0.0.1", port + 1)).is_ok() {
            return port;
        }
    }
}

/// Living processes that were started for `root`: their words or their environment name it.
fn processes_of(root: &Path) -> Vec<u32> {
    let name = root.to_string_lossy().into_owned();
    let holds =
        |file: PathBuf| fs::read(file).is_ok_and(|bytes| String::from_utf8_lossy(&bytes).contains(&name));
    let own = std::process::id();
    fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| *pid != own)
        .filter(|pid| {
            holds(format!("/proc/{pid}/cmdline").into()) || holds(format!("/proc/{pid}/environ").into())
        })
        .collect()
}

fn zombies_of(parent: u32) -> Vec<u32> {
    let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap();
    children.split(' ').filter_map(|pid| pid.parse().ok()).filter(|&pid| !lives(pid)).collect()
}

/// Not a zombie either: what collects those of a killed keeper is the box's business.
fn lives(pid: u32) -> bool {
    Identity::of(pid).is_some_and(Identity::lives)
}

fn shm_of(tag: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir("/dev/shm").unwrap().flatten();
    entries.map(|e| e.path()).filter(|p| p.to_string_lossy().contains(tag)).collect()
}

/// An engine with everything that makes ending hard: a child in a session of its own that ignores TERM, and shared
/// memory that somebody maps and nobody unlinks.
const STUBBORN: &str = r#"
name=test$(basename "$root" | tr -d .)
setsid python3 -c '
import mmap, os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
fd = os.open("/dev/shm/" + sys.argv[2], os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(fd, 4096)
held = mmap.mmap(fd, 4096)
open(sys.argv[1] + "/stubborn", "a").write(str(os.getpid()) + "\n")
while True: signal.pause()
' "$root" "$name" &
while [ ! -s $root/stubborn ]; do sleep 0.05; done
serve
"#;

/// A stubborn engine whose guard has written down its shared memory.
fn stubborn() -> Box {
    let started = Box::start(STUBBORN);
    started.ready();
    started.wait("the guard's note of the shared memory", || {
        let record = fs::read_to_string(started.root().join("run/engine.record")).ok()?;
        record.contains(&started.shm()).then_some(())
    });
    started
}

#[test]
fn a_stop_ends_a_grandchild_that_ignores_term_and_leaves_nothing() {
    let mut b = stubborn();
    let view = b.view();
    assert_eq!(view.pid, b.numbers("engines").first().copied(), "the engine's own first process");
    assert!(view.engine_id.starts_with("spark-t-") && view.engine_id.ends_with("-1"), "{}", view.engine_id);
    assert_eq!(b.stop(), 0);
    b.nobody_left();
    let log = b.logs();
    assert!(log.contains("serves `fake`") && log.contains("SPARK_KV_JOIN=spark1-token"), "{log}");
}

/// A port that stays taken is not waited for without end: whoever typed `up` is told, and nothing is left.
#[test]
fn a_node_that_cannot_start_is_given_up_with_its_reason() {
    let dir = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().min(65_000).to_string();
    let _also = std::net::TcpListener::bind(format!("127.0.0.1:{port}"));
    let root = dir.path().to_str().unwrap();
    let ended = Command::new(env!("CARGO_BIN_EXE_spark-kv"))
        .args(["up", "--root", root, "--port-base", &port, "--set", "engine.kind=mock", "--name", "t"])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ended.stderr).into_owned() + &String::from_utf8_lossy(&ended.stdout);
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(said.contains(&format!("failed to listen on 127.0.0.1:{port}")), "{said}");
    assert!(said.contains("the node could not start 5 times in a row"), "{said}");
    assert_eq!(processes_of(dir.path()), Vec::<u32>::new());
}

#[test]
fn a_killed_keeper_takes_node_guard_and_engine_with_it() {
    let mut b = stubborn();
    Box::signal(b.keeper(), Signal::SIGKILL);
    b.keeper_ended();
    b.nobody_left();
    assert_eq!(b.view().phase, Phase::Stopped);
}

#[test]
fn a_killed_guard_takes_the_engine_with_it_and_another_one_is_started() {
    let mut b = stubborn();
    let (guard, first) = (b.guard(), b.view());
    let stubborn = b.numbers("stubborn")[0];
    Box::signal(guard, Signal::SIGKILL);
    let second = b.wait("another engine", || Some(b.view()).filter(|v| v.is_ready() && v.pid != first.pid));
    assert_ne!(second.engine_id, first.engine_id);
    assert!(!lives(stubborn), "the first engine's child is gone");
    assert_eq!(zombies_of(b.keeper()), Vec::<u32>::new(), "what became the keeper's is collected");
    assert_eq!(b.stop(), 0);
    b.nobody_left();
}

#[test]
fn keeper_and_guard_killed_at_once_leave_what_the_next_keeper_ends() {
    let mut b = stubborn();
    let (guard, first) = (b.guard(), b.view().engine_id);
    let stubborn = b.numbers("stubborn")[0];
    Box::signal(b.keeper(), Signal::SIGSTOP);
    Box::signal(guard, Signal::SIGKILL);
    Box::signal(b.keeper(), Signal::SIGKILL);
    b.keeper_ended();
    b.up();
    let second = b.ready();
    assert_ne!(second.engine_id, first);
    assert!(!lives(stubborn), "the first engine's child is gone");
    assert_eq!(b.stop(), 0);
    b.nobody_left();
}

#[test]
fn a_killed_engine_is_started_again_and_the_node_stays() {
    let mut b = Box::start("serve");
    let first = b.ready();
    Box::signal(first.pid.unwrap(), Signal::SIGKILL);
    let down = b.wait("the crash in the view", || Some(b.view()).filter(|v| v.phase == Phase::Stopped));
    assert!(down.reason.as_ref().unwrap().contains("SIGKILL"), "{down:?}");
    let second = b.wait("another engine", || Some(b.view()).filter(|v| v.is_ready() && v.pid != first.pid));
    assert_eq!(second.restarts, 1);
    assert_eq!(b.numbers("nodes").len(), 1);
    assert_eq!(b.stop(), 0);
    b.nobody_left();
}

#[test]
fn a_killed_node_is_started_again_and_the_engine_stays() {
    let mut b = Box::start("serve");
    let engine = b.ready();
    let node = b.wait("a node", || b.numbers("nodes").first().copied());
    Box::signal(node, Signal::SIGKILL);
    b.wait("another node", || (b.numbers("nodes").len() == 2).then_some(()));
    assert_eq!(b.view(), engine);
    assert_eq!(b.stop(), 0);
    b.nobody_left();
}

#[test]
fn an_engine_that_always_crashes_is_given_up_with_its_own_words() {
    let mut b = Box::start("echo 'ValueError: no such model' >&2; exit 3");
    let failed = b.wait("the end of the attempts", || Some(b.view()).filter(|v| v.phase == Phase::Failed));
    let reason = failed.reason.unwrap();
    assert!(reason.contains("code 3") && reason.contains("ValueError: no such model"), "{reason}");
    assert_eq!(b.numbers("engines").len(), 6);
    assert_eq!(b.stop(), 0);
    b.nobody_left();
}

#[test]
fn a_second_signal_does_not_wait_for_the_grace() {
    let mut b = Box::with_grace("trap '' TERM; while :; do sleep 1; done", 3600);
    b.wait("an engine", || b.numbers("engines").first().copied());
    Box::signal(b.keeper(), Signal::SIGINT);
    b.wait("the engine to be ending", || (b.view().phase == Phase::Stopping).then_some(()));
    Box::signal(b.keeper(), Signal::SIGINT);
    assert_eq!(b.keeper_ended(), 0);
    b.nobody_left();
}

#[test]
fn a_second_keeper_in_the_same_folder_names_the_first() {
    let mut b = Box::start("serve");
    b.ready();
    let first = b.keeper.take().unwrap();
    b.up();
    assert_eq!(b.keeper_ended(), 1);
    assert!(b.logs().contains(&format!("another spark-kv (process {})", first.id())), "{}", b.logs());
    b.keeper = Some(first);
    assert_eq!(b.stop(), 0);
}

#[test]
fn an_engine_that_talks_without_end_fills_two_files_and_no_more() {
    let script =
        "yes 'a line of sixty-four bytes, which is repeated without end, again' | head -c 40000000; serve";
    let mut b = Box::start(script);
    b.ready();
    let size = |name: &str| fs::metadata(b.root().join(name)).map_or(0, |m| m.len());
    for name in ["log/engine.log", "log/engine.log.1"] {
        assert!((1..=16 << 20).contains(&size(name)), "{name}: {}", size(name));
    }
    assert_eq!(fs::read_dir(b.root().join("log")).unwrap().count(), 2);
    assert_eq!(b.stop(), 0);
}
