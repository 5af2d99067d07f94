//! Two boxes in two network namespaces, joined by two shaped cables (`install/rails.sh`), with `spark-kv bench fabric` on
//! both: one serves rows, the other one fetches them, and the kernel's own counters tell what each cable carried. Needs
//! root and network namespaces; without them a test says so and passes.

#![allow(
    dead_code,
    clippy::allow_attributes,
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "each test binary uses its own part of this"
)]

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_spark-kv");

/// Side b's ends of both cables.
pub const BOTH: [&str; 2] = ["10.77.0.2", "10.77.1.2"];

/// How long anything is awaited.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The same where a library has to be started for it.
const PATIENCE_NIXL: Duration = Duration::from_secs(90);

pub fn script(args: &[&str]) -> Output {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/install/rails.sh");
    Command::new(script).args(args).output().unwrap()
}

/// Makes two boxes. False, said aloud, where there cannot be any.
pub fn make(name: &str, rates: &[u32]) -> bool {
    let rates: Vec<String> = rates.iter().map(u32::to_string).collect();
    let words = ["up", name].into_iter().chain(rates.iter().map(String::as_str));
    let made = script(&words.collect::<Vec<_>>());
    if made.status.success() {
        return true;
    }
    let why = String::from_utf8_lossy(&made.stderr).into_owned();
    assert!(!nix::unistd::geteuid().is_root() || !may_make_namespaces(), "rails.sh failed as root: {why}");
    eprintln!("skipped: no network namespaces here (root needed): {}", why.trim());
    false
}

/// Root in a container may lack the right.
fn may_make_namespaces() -> bool {
    let name = format!("skv-try-{}", std::process::id());
    let ip = |verb: &str| Command::new("ip").args(["netns", verb, &name]).output();
    let made = ip("add").is_ok_and(|output| output.status.success());
    let _ = ip("del");
    made
}

/// Bytes that one side's kernel counted, by cable.
pub fn received(name: &str, side: char) -> [u64; 2] {
    let text = String::from_utf8(script(&["bytes", name]).stdout).unwrap();
    let of = |rail: &str| {
        let begin = format!("{name}-{side} {rail} ");
        text.lines().find_map(|line| line.strip_prefix(&begin)).unwrap().trim().parse().unwrap()
    };
    [of("rail0"), of("rail1")]
}

/// Only one test at a time, over all processes: they measure.
pub fn alone() -> File {
    let lock = File::create(std::env::temp_dir().join("spark-kv-test-rails.lock")).unwrap();
    lock.lock().unwrap();
    lock
}

/// Two boxes. Whatever happens, they go.
pub struct Boxes {
    pub name: String,
    folder: tempfile::TempDir,
    /// Rows are read by this library instead of being sent.
    nixl: Option<PathBuf>,
    host: Option<Child>,
}

impl Boxes {
    /// With cables of so many megabits a second.
    pub fn up(name: &str, first: u32, second: u32) -> Option<Self> {
        let name = format!("skv{}{name}", std::process::id() % 10_000);
        let boxes = Self { name, folder: tempfile::tempdir().unwrap(), nixl: None, host: None };
        make(&boxes.name, &[first, second]).then_some(boxes)
    }

    pub fn with_nixl(mut self, library: PathBuf) -> Self {
        self.nixl = Some(library);
        self
    }

    fn bench(&self, side: char) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &format!("{}-{side}", self.name), PROGRAM, "bench", "fabric"]);
        if let Some(library) = &self.nixl {
            command.arg("--nixl").arg(library);
        }
        command
    }

    fn offer(&self) -> PathBuf {
        self.folder.path().join("offer.json")
    }

    fn patience(&self) -> Duration {
        if self.nixl.is_some() { PATIENCE_NIXL } else { PATIENCE }
    }

    /// Serves `megabytes` of rows of `row` bytes on side a.
    pub fn serve(&mut self, megabytes: u32, row: u32) {
        let mut command = self.bench('a');
        command.args(["--serve", "10.77.0.1", "--serve", "10.77.1.1"]);
        command.args(["--row", &row.to_string(), "--amount", &format!("{megabytes}MB")]);
        command.stdout(File::create(self.offer()).unwrap());
        command.stderr(File::create(self.folder.path().join("host.log")).unwrap());
        self.host = Some(command.spawn().unwrap());
        let begin = Instant::now();
        while !fs::read_to_string(self.offer()).unwrap().ends_with("}\n") {
            assert!(begin.elapsed() < self.patience(), "no offer: {}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("host.log")).unwrap_or_default()
    }

    /// What fetches on side b, over these of its ends.
    pub fn fetch(&self, ends: &[&str], rounds: u32) -> Command {
        let mut command = self.bench('b');
        command.args(["--json", "--only-fabric", "--rounds", &rounds.to_string()]);
        command.arg("--peer").arg(self.offer());
        ends.iter().for_each(|end| {
            command.args(["--from", end]);
        });
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// What a fetch said that ended well. Every row was compared with what it has to be.
    pub fn said(&self, output: &Output) -> String {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}\n{}", self.log());
        eprintln!("{said}");
        if self.nixl.is_some() {
            assert!(read_of(&said) > 0.5, "most was read, not sent: {said}");
        }
        said
    }

    /// Megabytes per second of the best round, and what each cable carried. A busy machine only takes away: the best
    /// round is what the cables gave.
    pub fn measured(&self, ends: &[&str], rounds: u32) -> (f64, [u64; 2]) {
        let before = self.received('b');
        let output = self.fetch(ends, rounds).output().unwrap();
        let said = self.said(&output);
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(report["fabric_gb_s"].as_f64().unwrap() > 0.0 && report["rails"].is_array(), "{report}");
        let after = self.received('b');
        let carried = [after[0] - before[0], after[1] - before[1]];
        let rounds = speeds(&said);
        eprintln!("{} ends: {rounds:?} MB/s, {carried:?} bytes", ends.len());
        (rounds.into_iter().max_by(f64::total_cmp).unwrap(), carried)
    }

    /// Bytes that the kernel counted, by cable.
    pub fn received(&self, side: char) -> [u64; 2] {
        received(&self.name, side)
    }

    pub fn cable(&self, verb: &str, rail: u32, mbit: Option<u32>) {
        let (rail, mbit) = (rail.to_string(), mbit.map(|m| m.to_string()));
        let mut args = vec![verb, &self.name, &rail];
        args.extend(mbit.as_deref());
        let done = script(&args);
        assert!(done.status.success(), "{verb}: {}", String::from_utf8_lossy(&done.stderr));
    }

    /// Gives what it took.
    pub fn until(&self, what: &str, mut holds: impl FnMut() -> bool) -> Duration {
        let begin = Instant::now();
        while !holds() {
            assert!(begin.elapsed() < self.patience(), "waited for {what}");
            std::thread::sleep(Duration::from_millis(20));
        }
        begin.elapsed()
    }

    /// Each cable alone carries its own bytes only, and both together nearly twice as many: of them `half` on the first.
    pub fn carry_twice(&self, rounds: u32, half: std::ops::Range<f64>) {
        let (one, carried) = self.measured(&BOTH[..1], 3);
        assert!(
            carried[0] > 120_000_000 && carried[1] < 1_000_000,
            "it is pinned to its device: {carried:?}"
        );
        let (other, carried) = self.measured(&BOTH[1..], 3);
        assert!(
            carried[1] > 120_000_000 && carried[0] < 1_000_000,
            "it is pinned to its device: {carried:?}"
        );
        let (both, carried) = self.measured(&BOTH, rounds);
        assert!(both >= 1.9 * one.max(other), "{both} MB/s over both, {one} and {other} over one");
        let first = carried[0] as f64 / (carried[0] + carried[1]) as f64;
        assert!(half.contains(&first), "{carried:?}");
    }
}

impl Drop for Boxes {
    fn drop(&mut self) {
        if let Some(host) = &mut self.host {
            let _ = host.kill();
            let _ = host.wait();
        }
        script(&["down", &self.name]);
    }
}

/// Megabytes per second of each round.
pub fn speeds(said: &str) -> Vec<f64> {
    let speed = |line: &str| line.split("fabric ").nth(1)?.split(' ').next()?.parse().ok();
    said.lines().filter(|line| line.starts_with("round")).filter_map(speed).collect()
}

/// Of all bytes, those that were read out of the other side's memory.
fn read_of(said: &str) -> f64 {
    let line = said.lines().find_map(|line| line.strip_prefix("NIXL over TCP: "));
    line.unwrap_or_else(|| panic!("{said}")).split(' ').next().unwrap().parse().unwrap()
}
