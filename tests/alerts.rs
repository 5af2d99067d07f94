//! Rails with rows on them: two real nodes with mock engines in two network namespaces, one of which goes on fetching from
//! the other, while one of the two cables reports errors and then falls silent. The node must say so by name, and stop
//! saying so when it is over. Needs root and network namespaces; without them the test says so and passes.

#![expect(clippy::unwrap_used, reason = "helpers of tests: a test that cannot go on panics")]

mod cables;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cables::PROGRAM;
use serde_json::{Value, json};

/// Of each cable, in megabits a second: one alone carries more than the 64 MiB in five seconds that make a window busy.
const MBIT: u32 = 400;

/// Three windows of five seconds until silence is said or taken back, a minute for errors, and a slow machine.
const PATIENCE: Duration = Duration::from_secs(150);

/// Prompts of 250 rows of 64 KiB: together more than the fetching node keeps anywhere.
const PROMPTS: u32 = 10;

/// Asks prompts in a circle for as long as it lives; a line for each round.
const CLIENT: &str = r#"
import json, sys, urllib.request
prompts, rounds = int(sys.argv[1]), int(sys.argv[2])
names = ["river", "stone", "lantern", "copper", "window", "garden", "signal"]
words = [f"note {n}: " + " ".join(names[(n + i * i) % 7] for i in range(4000)) for n in range(prompts)]
for _ in range(rounds):
    for prompt in words:
        body = json.dumps({"model": "mock", "prompt": prompt, "max_tokens": 2, "temperature": 0}).encode()
        ask = urllib.request.Request("http://127.0.0.1:8001/v1/completions", body, {"Content-Type": "application/json"})
        urllib.request.urlopen(ask, timeout=60).read()
    print("round", flush=True)
"#;

/// A process that is ended when dropped, and all that it started with it.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let pid = nix::unistd::Pid::from_raw(self.0.id().try_into().unwrap());
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        let _ = self.0.wait();
    }
}

/// Two boxes with two cables; gone when dropped.
struct Boxes {
    name: String,
    folder: tempfile::TempDir,
}

impl Drop for Boxes {
    fn drop(&mut self) {
        cables::script(&["down", &self.name]);
    }
}

impl Boxes {
    fn up() -> Option<Self> {
        let name = format!("ska{}", std::process::id() % 100_000);
        let boxes = Self { name, folder: tempfile::tempdir().unwrap() };
        cables::make(&boxes.name, &[MBIT]).then_some(boxes)
    }

    fn cable(&self, words: &[&str]) {
        let (verb, rest) = words.split_first().unwrap();
        let done = cables::script(&[&[verb, self.name.as_str()], rest].concat());
        assert!(done.status.success(), "{words:?}: {}", String::from_utf8_lossy(&done.stderr));
    }

    fn on(&self, side: &str, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &format!("{}-{side}", self.name), program]);
        command
    }

    fn root(&self, side: &str) -> PathBuf {
        self.folder.path().join(side)
    }

    /// What the kernel says of errors on rail1 of side b, as a file that the test writes.
    fn errors(&self) -> PathBuf {
        self.folder.path().join("rx_errors")
    }

    /// A node with a mock engine and both rails.
    fn node(&self, side: &str, host: u8, capacity: &str, token: &str) -> Running {
        let (root, shape) = (
            self.root(side),
            json!({"rows": 300, "row_bytes": 65536, "device_blocks": 280, "block_tokens": 16,
                   "prefill_us_per_token": 20, "itl_us": 100}),
        );
        fs::create_dir_all(&root).unwrap();
        let settings = format!(
            "[engine]\nkind = \"mock\"\nserved_name = \"mock\"\nextra_args = [\"--shape\", '{shape}']\n\
             [store]\ncapacity = \"{capacity}\"\nsegment = \"8MiB\"\n\
             [cluster]\naddress = \"10.77.0.{host}\"\nrails = [\"10.77.0.{host}\", \"10.77.1.{host}\"]\n\
             copy = false\ntake_over = false\n"
        );
        fs::write(root.join("spark-kv.toml"), settings).unwrap();
        // `ip netns exec` gives a /sys of its own, in which one counter is the test's.
        let instead = "mount --bind \"$1\" /sys/class/net/rail1/statistics/rx_errors && shift && exec \"$@\"";
        let mut command = self.on(side, "sh");
        command.args(["-c", instead, "sh"]).arg(self.errors());
        command.args([PROGRAM, "up", "--profile", "cpu-tiny", "--name", side, "--root"]).arg(&root);
        if !token.is_empty() {
            command.env("SPARK_KV_JOIN", token);
        }
        let log = File::create(root.join("up.log")).unwrap();
        Running(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap())
    }

    fn ask(&self, side: &str, rounds: u32) -> Command {
        let mut command = self.on(side, "python3");
        command.args(["-c", CLIENT, &PROMPTS.to_string(), &rounds.to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }

    fn says(&self, side: &str, words: &[&str]) -> Option<Value> {
        let mut command = self.on(side, PROGRAM);
        let out = command.args(words).args(["--json", "--root"]).arg(self.root(side)).output().unwrap();
        serde_json::from_slice(&out.stdout).ok()
    }

    fn state(&self, side: &str) -> Option<Value> {
        self.says(side, &["status"])
    }

    /// Waits until the alerts of side b, as text, are as wanted.
    fn until(&self, what: &str, wanted: impl Fn(&str) -> bool) {
        until(what, || {
            let alerts = self.state("b")?["alerts"].to_string();
            wanted(&alerts).then_some(())
        });
    }
}

fn until<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(begin.elapsed() < PATIENCE, "no {what}");
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn read(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
}

#[test]
fn a_rail_that_errs_and_one_that_falls_silent_under_rows_are_named_until_they_are_well() {
    let Some(boxes) = Boxes::up() else { return };
    fs::write(boxes.errors(), "3\n").unwrap();
    let _a = boxes.node("a", 1, "1GiB", "");
    let token = until("token", || read(&boxes.root("a").join("run/invite")));
    let _b = boxes.node("b", 2, "32MiB", &token);
    let ready = |side: &str| {
        until("a node that serves", || {
            let checks = boxes.state(side)?["node"]["health"]["checks"].clone();
            ["engine", "plugin", "cache"].iter().all(|of| checks[*of]["ok"] == true).then_some(())
        });
    };
    ["a", "b"].into_iter().for_each(ready);
    until("the index of a", || {
        // A row that found no room on its way to the drive is offered again when its prompt comes again.
        assert!(boxes.ask("a", 1).status().unwrap().success(), "a answers");
        let members = boxes.says("b", &["cluster", "ls"])?;
        (members[0]["keys"].as_u64()? >= 2400).then_some(())
    });
    let _client = Running(boxes.ask("b", 1_000_000).spawn().unwrap());

    // Both cables carry rows, and nothing is wrong with them.
    let carried = || cables::received(&boxes.name, 'b');
    until("rows over both cables", || carried().iter().all(|bytes| *bytes > 64 << 20).then_some(()));
    let quiet = |alerts: &str| !alerts.contains("rail-silent") && !alerts.contains("rail-errors");
    assert!(quiet(&boxes.state("b").unwrap()["alerts"].to_string()));

    fs::write(boxes.errors(), "10\n").unwrap();
    boxes.until("alert of errors", |alerts| {
        alerts.contains("rail-errors") && alerts.contains("rx_errors of rail1 grew by 7")
    });

    boxes.cable(&["cut", "1"]);
    boxes.until("alert of silence", |alerts| {
        alerts.contains("rail-silent") && alerts.contains("rail1 carried less")
    });

    boxes.cable(&["mend", "1", &MBIT.to_string()]);
    boxes.until("end of both alerts", quiet);
    let before = carried()[1];
    until("rows over the mended cable", || (carried()[1] > before + (8 << 20)).then_some(()));
}
