//! Two boxes in two network namespaces, joined by two shaped cables: real processes of this program on both sides,
//! and the kernel's own counters for what each cable carried.
//!
//! Rates are compared within one run, over links that the kernel shapes to the same rate: the two cores of a small
//! machine carry them with ease, so a ratio says something about this program only. Needs root and network
//! namespaces; without them each test says so and passes.

#![expect(clippy::unwrap_used, reason = "helpers of tests: a test that cannot go on panics")]
#![expect(clippy::print_stderr, reason = "a skipped test says so")]

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

const PROGRAM: &str = env!("CARGO_BIN_EXE_spark-kv");

/// Of each cable, in megabits a second.
const MBIT: u32 = 400;

/// How long anything is awaited.
const PATIENCE: Duration = Duration::from_secs(60);

/// Two boxes. Whatever happens, they go.
struct Boxes {
    name: String,
    folder: tempfile::TempDir,
    host: Option<Child>,
}

fn script(args: &[&str]) -> Output {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/install/rails.sh");
    Command::new(script).args(args).output().unwrap()
}

impl Boxes {
    /// `None`, said aloud, where there cannot be any.
    fn up(name: &str, first: u32, second: u32) -> Option<Self> {
        let name = format!("skv{}{name}", std::process::id() % 10_000);
        let boxes = Self { name, folder: tempfile::tempdir().unwrap(), host: None };
        let made = script(&["up", &boxes.name, &first.to_string(), &second.to_string()]);
        if !made.status.success() {
            let why = String::from_utf8_lossy(&made.stderr).into_owned();
            assert!(
                !nix::unistd::geteuid().is_root() || !may_make_namespaces(),
                "rails.sh failed as root: {why}"
            );
            eprintln!("skipped: no network namespaces here (root needed): {}", why.trim());
            return None;
        }
        Some(boxes)
    }

    fn on(&self, side: char) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &format!("{}-{side}", self.name), PROGRAM]);
        command
    }

    fn offer(&self) -> PathBuf {
        self.folder.path().join("offer.json")
    }

    /// Serves `megabytes` of rows of `row` bytes on side a.
    fn serve(&mut self, megabytes: u32, row: u32) {
        let mut command = self.on('a');
        command.args(["bench", "fabric", "--serve", "10.77.0.1", "--serve", "10.77.1.1"]);
        command.args(["--row", &row.to_string(), "--amount", &format!("{megabytes}MB")]);
        command.stdout(File::create(self.offer()).unwrap());
        command.stderr(File::create(self.folder.path().join("host.log")).unwrap());
        self.host = Some(command.spawn().unwrap());
        let begin = Instant::now();
        while !fs::read_to_string(self.offer()).unwrap().ends_with("}\n") {
            assert!(begin.elapsed() < PATIENCE, "no offer: {}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("host.log")).unwrap_or_default()
    }

    /// What fetches on side b, over these of its ends.
    fn fetch(&self, ends: &[&str], rounds: u32) -> Command {
        let mut command = self.on('b');
        command.args(["bench", "fabric", "--json", "--only-fabric", "--rounds", &rounds.to_string()]);
        command.arg("--peer").arg(self.offer());
        ends.iter().for_each(|end| {
            command.args(["--from", end]);
        });
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Megabytes per second of the best round, and what each cable carried. A busy machine only takes away: the best
    /// round is what the cables gave.
    fn measured(&self, ends: &[&str], rounds: u32) -> (f64, [u64; 2]) {
        let before = self.received('b');
        let output = self.fetch(ends, rounds).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}\n{}", self.log());
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(report["fabric_gb_s"].as_f64().unwrap() > 0.0 && report["rails"].is_array(), "{report}");
        let speed = |line: &str| line.split("fabric ").nth(1)?.split(' ').next()?.parse().ok();
        let rounds: Vec<f64> =
            said.lines().filter(|line| line.starts_with("round")).filter_map(speed).collect();
        let after = self.received('b');
        let carried = [after[0] - before[0], after[1] - before[1]];
        eprintln!("{} ends: {rounds:?} MB/s, {carried:?} bytes", ends.len());
        (rounds.into_iter().max_by(f64::total_cmp).unwrap(), carried)
    }

    /// Bytes that the kernel counted, by cable.
    fn received(&self, side: char) -> [u64; 2] {
        let text = String::from_utf8(script(&["bytes", &self.name]).stdout).unwrap();
        let of = |rail: &str| {
            let begin = format!("{}-{side} {rail} ", self.name);
            text.lines().find_map(|line| line.strip_prefix(&begin)).unwrap().trim().parse().unwrap()
        };
        [of("rail0"), of("rail1")]
    }

    fn cable(&self, verb: &str, rail: u32, mbit: Option<u32>) {
        let (rail, mbit) = (rail.to_string(), mbit.map(|m| m.to_string()));
        let mut args = vec![verb, &self.name, &rail];
        args.extend(mbit.as_deref());
        let done = script(&args);
        assert!(done.status.success(), "{verb}: {}", String::from_utf8_lossy(&done.stderr));
    }

    /// Changes the routes of one side.
    fn route(&self, side: char, words: &[&str]) {
        let box_name = format!("{}-{side}", self.name);
        let done = Command::new("ip").args(["-n", &box_name, "route"]).args(words).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }

    /// Whether side b has a connection along the second cable, as its kernel says.
    fn has_second(&self) -> bool {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &format!("{}-b", self.name)]);
        let said = command.args(["ss", "-Htn", "state", "established", "dst", "10.77.1.1"]).output().unwrap();
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        !said.stdout.is_empty()
    }

    fn until(&self, what: &str, mut holds: impl FnMut() -> bool) -> Duration {
        let begin = Instant::now();
        while !holds() {
            assert!(begin.elapsed() < PATIENCE, "waited for {what}");
            std::thread::sleep(Duration::from_millis(20));
        }
        begin.elapsed()
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

/// Root in a container may lack the right.
fn may_make_namespaces() -> bool {
    let name = format!("skv-try-{}", std::process::id());
    let ip = |verb: &str| Command::new("ip").args(["netns", verb, &name]).output();
    let made = ip("add").is_ok_and(|output| output.status.success());
    let _ = ip("del");
    made
}

const BOTH: [&str; 2] = ["10.77.0.2", "10.77.1.2"];

/// Only one test at a time, over all processes: they measure.
fn alone() -> File {
    let lock = File::create(std::env::temp_dir().join("spark-kv-test-rails.lock")).unwrap();
    lock.lock().unwrap();
    lock
}

#[test]
fn two_equal_cables_carry_nearly_twice_what_one_does_and_each_half_of_it() {
    let _alone = alone();
    let Some(mut boxes) = Boxes::up("eq", MBIT, MBIT) else { return };
    // One row of 17 MB and a few more: a row has to use both at once.
    boxes.serve(128, 17_301_504);
    let (one, carried) = boxes.measured(&BOTH[..1], 3);
    assert!(carried[0] > 120_000_000 && carried[1] < 1_000_000, "it is pinned to its device: {carried:?}");
    let (other, carried) = boxes.measured(&BOTH[1..], 3);
    assert!(carried[1] > 120_000_000 && carried[0] < 1_000_000, "it is pinned to its device: {carried:?}");
    let (both, carried) = boxes.measured(&BOTH, 3);
    assert!(both >= 1.9 * one.max(other), "{both} MB/s over both, {one} and {other} over one");
    let half = carried[0] as f64 / (carried[0] + carried[1]) as f64;
    assert!((0.45..0.55).contains(&half), "{carried:?}");
}

/// Each rail uses its cable whatever the routing table says, on both sides.
#[test]
fn routes_that_lead_everything_over_one_cable_change_nothing() {
    let _alone = alone();
    let Some(mut boxes) = Boxes::up("ro", MBIT, MBIT) else { return };
    boxes.route('a', &["add", "10.77.1.2/32", "dev", "rail0"]);
    boxes.route('b', &["add", "10.77.1.1/32", "dev", "rail0"]);
    boxes.serve(128, 17_301_504);
    let (_, carried) = boxes.measured(&BOTH, 1);
    let half = carried[0] as f64 / (carried[0] + carried[1]) as f64;
    assert!((0.4..0.6).contains(&half), "{carried:?}");
}

#[test]
fn a_cable_of_a_quarter_still_helps() {
    let _alone = alone();
    let Some(mut boxes) = Boxes::up("qu", MBIT, MBIT / 4) else { return };
    boxes.serve(128, 17_301_504);
    let (one, _) = boxes.measured(&BOTH[..1], 3);
    let (both, carried) = boxes.measured(&BOTH, 3);
    assert!(both >= 1.2 * one, "{both} MB/s over both, {one} over the faster one");
    let share = carried[1] as f64 / (carried[0] + carried[1]) as f64;
    assert!((0.12..0.25).contains(&share), "a fifth is its part: {carried:?}");
}

#[test]
fn a_cable_that_slows_to_a_tenth_carries_a_tenth_within_a_second() {
    let _alone = alone();
    let Some(mut boxes) = Boxes::up("sl", MBIT, MBIT) else { return };
    boxes.serve(512, 17_301_504);
    let fetch = boxes.fetch(&BOTH, 1).spawn().unwrap();
    let begin = boxes.received('b');
    boxes.until("the transfer to begin", || boxes.received('b')[1] > begin[1] + 50_000_000);
    boxes.cable("rate", 1, Some(MBIT / 10));
    std::thread::sleep(Duration::from_secs(1));
    let from = boxes.received('b');
    std::thread::sleep(Duration::from_secs(2));
    let to = boxes.received('b');
    let (fast, slow) = ((to[0] - from[0]) as f64, (to[1] - from[1]) as f64);
    let output = fetch.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // In two seconds the fast one could carry 100 MB and the slow one a tenth of it.
    assert!(fast > 80e6, "the fast one waits for the slow one: {fast} {slow}");
    assert!((0.05..0.15).contains(&(slow / fast)), "{fast} {slow}");
    // Nothing was set aside for the slow one: of what was left when it became slow it carried a tenth, too.
    let to = boxes.received('b');
    let all = [to[0] - begin[0], to[1] - begin[1]];
    assert!(all[1] * 3 < all[0], "{all:?}");
}

/// Both ways a cable can go: nothing is said, or the link is gone.
#[test]
fn a_cable_that_is_cut_in_mid_transfer_costs_nothing_but_time_and_is_used_again_when_mended() {
    let _alone = alone();
    for how in ["cut", "unplug"] {
        let Some(mut boxes) = Boxes::up(&how[..1], MBIT, MBIT) else { return };
        boxes.serve(256, 17_301_504);
        let mut fetch = boxes.fetch(&BOTH, 8).spawn().unwrap();
        let said = BufReader::new(fetch.stderr.take().unwrap());
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || said.lines().map_while(Result::ok).for_each(|line| drop(tell.send(line))));
        let begin = boxes.received('b');
        boxes.until("the transfer to begin", || boxes.received('b')[1] > begin[1] + 30_000_000);
        assert!(boxes.has_second());
        boxes.cable(how, 1, None);
        // The kernel gives a connection up that is silent for four seconds.
        let took = boxes.until("the silent rail to be given up", || !boxes.has_second());
        assert!(took < Duration::from_secs(3), "{how}: given up only after {took:?}");
        // Every row of the first round was compared with what it has to be before this is said.
        let first = loop {
            let line = told.recv_timeout(PATIENCE).unwrap();
            if line.starts_with("round 1:") {
                break line;
            }
        };
        boxes.cable("mend", 1, Some(MBIT));
        let mended = boxes.received('b')[1];
        let took = boxes.until("the mended cable", || boxes.received('b')[1] > mended + 5_000_000);
        let output = fetch.wait_with_output().unwrap();
        let rest: Vec<String> = told.iter().collect();
        eprintln!("{how}: {first}; used again after {took:?}; {rest:#?}");
        assert!(output.status.success(), "{how}: {rest:?} {}", boxes.log());
        assert!(took < Duration::from_secs(5), "{how}: used again only after {took:?}");
        assert!(rest.iter().any(|line| line.starts_with("round 8:")), "the same process went on: {rest:?}");
        let line = rest.iter().find(|line| line.starts_with("rail rail1")).unwrap();
        assert!(!line.contains(" 0 errors"), "{how}: the cut was noticed: {line}");
    }
}
