//! Rows over NVIDIA's real NIXL, between two network namespaces with two cables, over TCP: no card is needed.
//!
//! The library is what `install/nixl.sh` gets; namespaces need root. Where either is missing that is said, and in CI
//! (`SPARK_KV_NIXL`) a missing library is a failure.

#![expect(clippy::unwrap_used, reason = "helpers of tests: a test that cannot go on panics")]
#![expect(clippy::print_stderr, reason = "a skipped test says so")]

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const PROGRAM: &str = env!("CARGO_BIN_EXE_spark-kv");

/// Of each cable, in megabits a second: far below what NIXL carries over TCP here.
const MBIT: u32 = 400;

const PATIENCE: Duration = Duration::from_secs(90);

const BOTH: [&str; 2] = ["10.77.0.2", "10.77.1.2"];

fn library() -> Option<PathBuf> {
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache/spark-kv");
    let cache = std::env::var_os("SPARK_KV_CACHE").map_or_else(home, PathBuf::from);
    let found = cache.join("nixl/lib/python3/site-packages/.nixl_cu12.mesonpy.libs/libnixl_capi.so");
    if found.is_file() {
        return Some(found);
    }
    assert!(std::env::var_os("SPARK_KV_NIXL").is_none(), "install/nixl.sh was run and left no library");
    eprintln!("skipped: no NIXL here; install/nixl.sh gets it");
    None
}

fn script(args: &[&str]) -> Output {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/install/rails.sh");
    Command::new(script).args(args).output().unwrap()
}

/// Only one test at a time, over all processes: they measure.
fn alone() -> File {
    let lock = File::create(std::env::temp_dir().join("spark-kv-test-rails.lock")).unwrap();
    lock.lock().unwrap();
    lock
}

/// Two boxes with a server on side a. Whatever happens, they go.
struct Boxes {
    name: String,
    folder: tempfile::TempDir,
    library: PathBuf,
    host: Option<Child>,
}

impl Boxes {
    fn up(name: &str, second: u32) -> Option<Self> {
        let library = library()?;
        let name = format!("skv{}{name}", std::process::id() % 10_000);
        let made = script(&["up", &name, &MBIT.to_string(), &second.to_string()]);
        let boxes = Self { name, folder: tempfile::tempdir().unwrap(), library, host: None };
        if !made.status.success() {
            let why = String::from_utf8_lossy(&made.stderr).into_owned();
            eprintln!("skipped: no network namespaces here (root needed): {}", why.trim());
            return None;
        }
        Some(boxes)
    }

    fn on(&self, side: char) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &format!("{}-{side}", self.name), PROGRAM, "bench", "fabric"]);
        command.arg("--nixl").arg(&self.library);
        command
    }

    fn serve(&mut self, megabytes: u32) {
        let offer = self.folder.path().join("offer.json");
        let mut command = self.on('a');
        command.args(["--serve", "10.77.0.1", "--serve", "10.77.1.1", "--row", "17301504"]);
        command.arg("--amount").arg(format!("{megabytes}MB"));
        command.stdout(File::create(&offer).unwrap());
        command.stderr(File::create(self.folder.path().join("host.log")).unwrap());
        self.host = Some(command.spawn().unwrap());
        let begin = Instant::now();
        while !fs::read_to_string(&offer).unwrap().ends_with("}\n") {
            assert!(begin.elapsed() < PATIENCE, "no offer: {}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("host.log")).unwrap_or_default()
    }

    fn fetch(&self, ends: &[&str], rounds: u32) -> Child {
        let mut command = self.on('b');
        command.args(["--json", "--only-fabric", "--rounds", &rounds.to_string(), "--peer"]);
        command.arg(self.folder.path().join("offer.json"));
        ends.iter().for_each(|end| {
            command.args(["--from", end]);
        });
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// What it said. Every row was compared with what it has to be.
    fn said(&self, fetch: Child) -> String {
        let output = fetch.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}\n{}", self.log());
        eprintln!("{said}");
        said
    }

    /// Megabytes per second of the best round, and what each cable carried.
    fn measured(&self, ends: &[&str], rounds: u32) -> (f64, [u64; 2]) {
        let before = self.received();
        let said = self.said(self.fetch(ends, rounds));
        let after = self.received();
        let carried = [after[0] - before[0], after[1] - before[1]];
        assert!(read_of(&said) > 0.5, "most was read, not sent: {said}");
        (speeds(&said).into_iter().max_by(f64::total_cmp).unwrap(), carried)
    }

    fn received(&self) -> [u64; 2] {
        let text = String::from_utf8(script(&["bytes", &self.name]).stdout).unwrap();
        let of = |rail: &str| {
            let begin = format!("{}-b {rail} ", self.name);
            text.lines().find_map(|line| line.strip_prefix(&begin)).unwrap().trim().parse().unwrap()
        };
        [of("rail0"), of("rail1")]
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

fn speeds(said: &str) -> Vec<f64> {
    let speed = |line: &str| line.split("fabric ").nth(1)?.split(' ').next()?.parse().ok();
    said.lines().filter(|line| line.starts_with("round")).filter_map(speed).collect()
}

/// Of all bytes, those that were read out of the other side's memory.
fn read_of(said: &str) -> f64 {
    let line = said.lines().find_map(|line| line.strip_prefix("NIXL over TCP: "));
    line.unwrap_or_else(|| panic!("{said}")).split(' ').next().unwrap().parse().unwrap()
}

#[test]
fn two_cables_carry_nearly_twice_what_one_does_and_each_agent_stays_on_its_own() {
    let _alone = alone();
    let Some(mut boxes) = Boxes::up("ne", MBIT) else { return };
    boxes.serve(128);
    let (one, carried) = boxes.measured(&BOTH[..1], 3);
    assert!(carried[0] > 120_000_000 && carried[1] < 1_000_000, "it is pinned to its device: {carried:?}");
    let (other, carried) = boxes.measured(&BOTH[1..], 3);
    assert!(carried[1] > 120_000_000 && carried[0] < 1_000_000, "it is pinned to its device: {carried:?}");
    let (both, carried) = boxes.measured(&BOTH, 4);
    assert!(both >= 1.9 * one.max(other), "{both} MB/s over both, {one} and {other} over one");
    let half = carried[0] as f64 / (carried[0] + carried[1]) as f64;
    assert!((0.42..0.58).contains(&half), "{carried:?}");
}

#[test]
fn a_cable_of_a_quarter_still_helps() {
    let _alone = alone();
    let Some(mut boxes) = Boxes::up("nq", MBIT / 4) else { return };
    boxes.serve(128);
    let (one, _) = boxes.measured(&BOTH[..1], 3);
    let (both, carried) = boxes.measured(&BOTH, 4);
    assert!(both >= 1.2 * one, "{both} MB/s over both, {one} over the faster one: {carried:?}");
}

/// Both ways a cable can go: nothing is said, or the link is gone.
#[test]
fn a_cable_that_is_cut_in_mid_fetch_costs_nothing_but_time() {
    let _alone = alone();
    for how in ["cut", "unplug"] {
        let Some(mut boxes) = Boxes::up(&format!("n{}", &how[..1]), MBIT) else { return };
        boxes.serve(256);
        let begin = boxes.received()[1];
        let fetch = boxes.fetch(&BOTH, 2);
        let since = Instant::now();
        while boxes.received()[1] < begin + 90_000_000 {
            assert!(since.elapsed() < PATIENCE, "the transfer does not begin");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(script(&[how, &boxes.name, "1"]).status.success());
        let said = boxes.said(fetch);
        assert_eq!(speeds(&said).len(), 2, "both rounds ended in the same process: {said}");
        let cut = said.lines().find(|line| line.starts_with("rail rail1")).unwrap();
        assert!(!cut.contains(" 0 errors"), "the cut was noticed: {cut}");
        assert!(read_of(&said) > 0.5, "{said}");
    }
}
