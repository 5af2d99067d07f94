//! Rails: every known fault in a recording that shows it, and two that are made with real devices in namespaces.
#![expect(clippy::unwrap_used, reason = "helpers of tests: a test that cannot go on panics")]

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use spark_kv::rails::verdict::{Id, Level};
use spark_kv::rails::{Report, Tree};

const ONE: &str = "enp1s0f1np1";
const TWIN: &str = "enP2p1s0f1np1";

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/rails")
}

fn report(case: &str) -> Report {
    Report::recorded(&Tree::at(&fixtures().join(format!("{case}.tree"))).unwrap()).unwrap()
}

fn run(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_spark-kv")).args(words).env_clear().output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A finding: level, id and device.
type Said<'a> = (Level, Id, Option<&'a str>);

/// What is said beyond "carries".
fn said(report: &Report) -> Vec<Said<'_>> {
    let words = report.verdicts.iter().filter(|v| v.id != Id::Carries);
    words.map(|v| (v.level, v.id, v.rail.as_deref())).collect()
}

#[test]
fn every_fault_is_told_from_its_recording_and_nothing_else_is() {
    use Level::{Fail, Note, Warn};
    let (one, twin) = (Some(ONE), Some(TWIN));
    let cases: &[(&str, &[Said<'_>])] = &[
        ("healthy", &[]),
        ("plain-ethernet", &[]),
        ("rail-silent", &[(Fail, Id::RailSilent, twin)]),
        ("only-one-rail", &[(Fail, Id::OnlyOneRail, twin)]),
        ("rdma-was-tcp", &[(Fail, Id::RdmaWasTcp, None)]),
        ("tcp-by-choice", &[(Note, Id::TcpByChoice, None)]),
        ("nic-degraded", &[(Fail, Id::NicDegraded, one), (Fail, Id::NicDegraded, twin)]),
        (
            "nic-degraded-tcp",
            &[(Warn, Id::NicDegraded, one), (Warn, Id::NicDegraded, twin), (Note, Id::TcpByChoice, None)],
        ),
        ("mtu-not-end-to-end", &[(Fail, Id::MtuNotEndToEnd, twin)]),
        ("twin-not-configured", &[(Fail, Id::TwinNotConfigured, twin)]),
        (
            "same-subnet",
            &[(Fail, Id::SameSubnet, one), (Fail, Id::RailSilent, twin), (Note, Id::TcpByChoice, None)],
        ),
        ("rail-not-used", &[(Warn, Id::RailNotUsed, twin)]),
        (
            "pcie-x2",
            &[
                (Fail, Id::PcieNarrow, Some("enP2p1s0f0np0")),
                (Fail, Id::PcieNarrow, twin),
                (Warn, Id::RailSlow, twin),
            ],
        ),
        ("gid-drift", &[(Fail, Id::GidDrift, twin)]),
        ("gid-fixed", &[(Fail, Id::GidDrift, twin), (Fail, Id::GidDrift, one)]),
        ("gid-missing", &[(Fail, Id::GidMissing, twin)]),
        ("cable-crossed", &[(Warn, Id::CableCrossed, twin)]),
        ("answers-over-the-other", &[(Fail, Id::CableCrossed, twin), (Note, Id::TcpByChoice, None)]),
        ("memlock-small", &[(Fail, Id::MemlockSmall, None)]),
        ("kernel-handover", &[(Fail, Id::KernelHandover, None)]),
        ("device-cgroup", &[(Fail, Id::DeviceForbidden, twin), (Fail, Id::DeviceForbidden, one)]),
        ("device-missing", &[(Fail, Id::DeviceForbidden, twin), (Fail, Id::DeviceForbidden, one)]),
        ("no-cable", &[(Fail, Id::NoCable, twin), (Fail, Id::NoCable, one)]),
        ("card-switched-off", &[(Warn, Id::CardSwitchedOff, None)]),
        ("small-mtu", &[(Note, Id::SmallMtu, twin), (Note, Id::SmallMtu, one)]),
        ("loss", &[(Warn, Id::Errors, twin)]),
        ("both-slow", &[(Warn, Id::BothSlow, None)]),
        ("rail-slow", &[(Warn, Id::RailSlow, twin)]),
        ("uncounted", &[(Warn, Id::Uncounted, None)]),
    ];
    for (case, wanted) in cases {
        let report = report(case);
        let mut said = said(&report);
        let mut wanted = wanted.to_vec();
        said.sort_by_key(|s| format!("{s:?}"));
        wanted.sort_by_key(|s| format!("{s:?}"));
        assert_eq!(said, wanted, "{case}: {:#?}", report.verdicts);
        let empty = |v: &&spark_kv::rails::verdict::Verdict| v.cause.is_empty() || v.fix.is_empty();
        let mute = report.verdicts.iter().filter(|v| v.id != Id::Carries).find(empty);
        assert_eq!(mute, None, "{case}: each finding has a cause and a fix");
    }
    let tested: BTreeSet<String> = cases.iter().map(|(case, _)| format!("{case}.tree")).collect();
    let there = std::fs::read_dir(fixtures()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    assert_eq!(tested, there.collect(), "every recording is tested");
}

#[test]
fn a_healthy_spark_is_described_as_it_is() {
    let report = report("healthy");
    let devices: Vec<&str> = report.inventory.rails.iter().map(|rail| rail.device.as_str()).collect();
    assert_eq!(
        devices,
        ["enP2p1s0f0np0", TWIN, "enp1s0f0np0", ONE],
        "four functions, and no management port"
    );
    let rail = report.inventory.rail(ONE).unwrap();
    assert_eq!(rail.twin.as_deref(), Some(TWIN));
    assert_eq!(rail.addresses.len(), 1, "{:?}", rail.addresses);
    let rdma = rail.rdma.as_ref().unwrap();
    assert_eq!(
        (rdma.device.as_str(), rdma.gid.as_ref().unwrap().index, rdma.mtu),
        ("rocep1s0f1", 3, Some(4096))
    );
    let pcie = rail.pcie.as_ref().unwrap();
    assert_eq!((pcie.address.as_str(), pcie.gt_s, pcie.width), ("0000:01:00.1", Some(32.0), Some(4)));
    let words: Vec<&str> = report.verdicts.iter().map(|v| v.what.as_str()).collect();
    assert!(words.iter().any(|w| w.contains("both rails carry: 189.8 Gb/s together")), "{words:?}");
}

#[test]
fn small_mtus_make_small_rdma_mtus() {
    let rdma = |case: &str| report(case).inventory.rail(ONE).unwrap().rdma.clone().unwrap();
    assert_eq!(rdma("small-mtu").mtu, Some(1024));
    assert_eq!(rdma("gid-drift").gid.unwrap().index, 3);
    assert_eq!(report("gid-drift").inventory.rail(TWIN).unwrap().rdma.clone().unwrap().gid.unwrap().index, 5);
}

#[test]
fn the_command_shows_a_recording_and_its_exit_code_says_how_it_is() {
    let path = |case: &str| fixtures().join(format!("{case}.tree")).to_string_lossy().into_owned();
    let out = run(&["rails", "--sys", &path("healthy")]);
    let screen = text(&out.stdout);
    assert_eq!(out.status.code(), Some(0), "{screen}{}", text(&out.stderr));
    for words in [
        "192.168.100.10/24  200 Gb/s  9000  32 GT/s x4  rocep1s0f1 MTU 4096",
        "no cable",
        "111.89 Gb/s   the kernel counted 101 % by RDMA, 0 % by TCP",
        "ok      both rails carry: 189.8 Gb/s together",
    ] {
        assert!(screen.contains(words), "{words}: {screen}");
    }
    let out = run(&["rails", "--sys", &path("kernel-handover")]);
    let screen = text(&out.stdout);
    assert_eq!(out.status.code(), Some(2), "{screen}");
    assert!(
        screen.contains("FAULT   CmaFree is 9522 MiB and CmaTotal 0 MiB (kernel 7.0.0-1019-nvidia)"),
        "{screen}"
    );
    assert!(screen.contains("to do: add kho=off to the kernel's command line"), "{screen}");
    let out = run(&["rails", "--sys", &path("loss")]);
    assert_eq!(out.status.code(), Some(0), "a warning is no failure");
    for (words, what) in [
        (vec!["rails", "--sys", "/nowhere"], "/nowhere: No such file"),
        (vec!["rails", "--sys", "/nowhere", "--peer", "10.0.0.1"], "cannot be used with"),
        (vec!["rails", "--peer", "box"], "invalid IP address"),
    ] {
        let out = run(&words);
        assert_eq!(out.status.code(), Some(64), "{words:?}");
        assert!(text(&out.stderr).contains(what), "{words:?}: {}", text(&out.stderr));
    }
}

#[test]
fn json_has_the_rails_the_speeds_and_the_verdicts() {
    let path = fixtures().join("nic-degraded.tree");
    let out = run(&["rails", "--json", "--sys", path.to_str().unwrap()]);
    assert_eq!(out.status.code(), Some(2));
    let said: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(said["schema"], 2);
    assert_eq!(said["rails"].as_array().unwrap().len(), 4);
    assert_eq!(said["rails"][1]["rdma"]["gid"], serde_json::json!({"index": 3, "address": "192.168.101.10"}));
    assert_eq!(said["rails"][1]["pcie"]["width"], 4);
    let speeds = &said["peers"][0]["speeds"];
    assert_eq!(speeds[0]["over"], ONE);
    assert!((speeds[0]["gbit_s"].as_f64().unwrap() - 12.8).abs() < 0.01);
    assert_eq!(speeds[2]["over"], "together");
    assert_eq!(said["verdicts"][0]["id"], "nic-degraded");
    assert_eq!(said["verdicts"][0]["level"], "fail");
    assert!(said["verdicts"][0]["fix"].as_str().unwrap().contains("shut the box down"));
}

/// Two namespaces with two cables between them; gone when dropped.
struct Boxes {
    one: String,
    other: String,
}

impl Boxes {
    /// None where namespaces cannot be made.
    fn new(name: &str) -> Option<Self> {
        let id = std::process::id();
        let boxes = Self { one: format!("{name}{id}a"), other: format!("{name}{id}b") };
        if !ip(&["netns", "add", &boxes.one]) || !ip(&["netns", "add", &boxes.other]) {
            return None;
        }
        for ns in [&boxes.one, &boxes.other] {
            assert!(ip(&["-n", ns, "link", "set", "lo", "up"]));
        }
        for rail in 0..2 {
            boxes.cable(rail);
        }
        Some(boxes)
    }

    /// A node without an engine, with both rails.
    fn node(&self, ns: &str, host: u8, root: &Path, token: &str) -> Node {
        self.named(ns, host, &format!("box{host}"), 8000, root, token)
    }

    fn named(&self, ns: &str, host: u8, name: &str, ports: u16, root: &Path, token: &str) -> Node {
        let rails = format!("cluster.rails=[\"10.99.0.{host}\",\"10.99.1.{host}\"]");
        let address = format!("cluster.address=10.99.0.{host}");
        let mut command = Command::new("ip");
        command.args([
            "netns",
            "exec",
            ns,
            env!("CARGO_BIN_EXE_spark-kv"),
            "up",
            "--name",
            name,
            "--port-base",
            &ports.to_string(),
        ]);
        command.arg("--root").arg(root);
        for set in ["engine.kind=attached", "engine.url=http://127.0.0.1:9", &address, &rails] {
            command.args(["--set", set]);
        }
        let log = File::create(root.join("up.log")).unwrap();
        if !token.is_empty() {
            command.env("SPARK_KV_JOIN", token);
        }
        Node(command.stdout(Stdio::null()).stderr(log).spawn().unwrap())
    }

    fn cable(&self, rail: u8) {
        let device = format!("rail{rail}");
        let made = ip(&[
            "link",
            "add",
            &device,
            "netns",
            &self.one,
            "type",
            "veth",
            "peer",
            "name",
            &device,
            "netns",
            &self.other,
        ]);
        assert!(made, "a pair of devices");
        for (host, ns) in [(1, &self.one), (2, &self.other)] {
            assert!(ip(&["-n", ns, "addr", "add", &format!("10.99.{rail}.{host}/24"), "dev", &device]));
            assert!(ip(&["-n", ns, "link", "set", &device, "up", "mtu", "9000"]));
        }
    }

    fn rails(&self, words: &[&str]) -> Value {
        self.rails_of(tempfile::tempdir().unwrap().path(), words)
    }

    fn rails_of(&self, root: &Path, words: &[&str]) -> Value {
        let out = Command::new("ip")
            .args(["netns", "exec", &self.one, env!("CARGO_BIN_EXE_spark-kv"), "rails", "--json", "--root"])
            .arg(root)
            .args(words)
            .output()
            .unwrap();
        serde_json::from_slice(&out.stdout).unwrap_or_else(|_| panic!("{}", text(&out.stderr)))
    }
}

impl Drop for Boxes {
    fn drop(&mut self) {
        ip(&["netns", "del", &self.one]);
        ip(&["netns", "del", &self.other]);
    }
}

/// `spark-kv up`; ended when dropped, and all that it started with it.
struct Node(Child);

impl Drop for Node {
    fn drop(&mut self) {
        if !matches!(self.0.try_wait(), Ok(None)) {
            return;
        }
        let pid = nix::unistd::Pid::from_raw(self.0.id().try_into().unwrap());
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        let _ = self.0.wait();
    }
}

/// Asks until there is an answer, for a minute at most.
fn until<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(begin.elapsed() < Duration::from_secs(60), "no {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// What lets another node in, once; not `before`, which was used.
fn token_of(root: &Path, before: &str) -> String {
    until("token", || {
        let token = std::fs::read_to_string(root.join("run/invite")).ok()?.trim().to_owned();
        (!token.is_empty() && token != before).then_some(token)
    })
}

fn ids(report: &Value) -> Vec<(String, String)> {
    let of = |v: &Value| (v["id"].as_str().unwrap().to_owned(), v["rail"].as_str().unwrap_or("").to_owned());
    report["verdicts"].as_array().unwrap().iter().map(of).collect()
}

fn ip(words: &[&str]) -> bool {
    Command::new("ip").args(words).output().is_ok_and(|out| out.status.success())
}

#[test]
fn a_smaller_mtu_at_the_other_end_and_a_silent_rail_are_seen_with_real_devices() {
    let Some(boxes) = Boxes::new("skv") else {
        println!("skipped: this needs root and `ip netns`");
        return;
    };
    let peer = ["--peer", "10.99.0.2,10.99.1.2"];
    let ids = |report: &Value| -> Vec<(String, String)> {
        let of =
            |v: &Value| (v["id"].as_str().unwrap().to_owned(), v["rail"].as_str().unwrap_or("").to_owned());
        report["verdicts"].as_array().unwrap().iter().map(of).collect()
    };
    let well = boxes.rails(&peer);
    assert_eq!(ids(&well), [], "{well:#}");
    assert_eq!(well["peers"][0]["measured"]["probes"][1]["large"], "arrived", "{well:#}");
    assert_eq!(well["rails"][0]["mtu"], 9000);

    assert!(ip(&["-n", &boxes.other, "link", "set", "rail1", "mtu", "1500"]));
    assert_eq!(ids(&boxes.rails(&peer)), [("mtu-not-end-to-end".to_owned(), "rail1".to_owned())]);

    assert!(ip(&["-n", &boxes.other, "addr", "del", "10.99.1.2/24", "dev", "rail1"]));
    assert_eq!(ids(&boxes.rails(&peer)), [("rail-silent".to_owned(), "rail1".to_owned())]);

    assert!(ip(&["-n", &boxes.other, "link", "set", "rail1", "down"]));
    let dead = ids(&boxes.rails(&peer));
    assert!(dead.contains(&("no-cable".to_owned(), "rail1".to_owned())), "{dead:?}");

    let record = tempfile::tempdir().unwrap();
    let file = record.path().join("box.tree");
    boxes.rails(&[peer[0], peer[1], "--record", file.to_str().unwrap()]);
    let again = Report::recorded(&Tree::at(&file).unwrap()).unwrap();
    let again = serde_json::to_value(&again).unwrap();
    assert_eq!(ids(&again), dead, "a recording says the same");
}

#[test]
fn two_nodes_measure_both_rails_and_see_the_one_that_falls_silent() {
    let Some(boxes) = Boxes::new("skn") else {
        println!("skipped: this needs root and `ip netns`");
        return;
    };
    let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let _first = boxes.node(&boxes.one, 1, one.path(), "");
    let _second = boxes.node(&boxes.other, 2, other.path(), &token_of(one.path(), ""));
    let look = || {
        Some(boxes.rails_of(one.path(), &["--look"])).filter(|report| report["peers"][0]["name"] == "box2")
    };
    let looked = until("peer", look);
    assert_eq!((looked["node"].as_str(), &looked["peers"][0]["measured"]), (Some("box1"), &Value::Null));

    let well = boxes.rails_of(one.path(), &[]);
    assert!(ids(&well).iter().all(|(id, _)| id == "carries"), "{well:#}");
    let over: Vec<&str> =
        well["peers"][0]["speeds"].as_array().unwrap().iter().map(|s| s["over"].as_str().unwrap()).collect();
    assert_eq!(over, ["rail0", "rail1", "together"]);
    for run in well["peers"][0]["measured"]["alone"].as_array().unwrap() {
        let (device, bytes) = (run["over"][0].as_str().unwrap(), run["bytes"].as_f64().unwrap());
        for rail in ["rail0", "rail1"] {
            let counted = run["moved"][rail]["net_in"].as_f64().unwrap() / bytes;
            assert!(
                if rail == device { counted > 0.95 } else { counted < 0.02 },
                "{rail} of {device}: {run:#}"
            );
        }
    }

    assert!(ip(&["-n", &boxes.other, "addr", "del", "10.99.1.2/24", "dev", "rail1"]));
    let silent = boxes.rails_of(one.path(), &[]);
    let found = ids(&silent);
    assert_eq!(found[0], ("rail-silent".to_owned(), "rail1".to_owned()), "{silent:#}");
    assert_eq!(silent["verdicts"][0]["level"], "fail");
    assert!(found.contains(&("carries".to_owned(), "rail0".to_owned())), "{found:?}");
}

#[test]
fn each_connected_node_is_measured_over_each_rail_and_over_both() {
    let Some(boxes) = Boxes::new("sk3") else {
        println!("skipped: this needs root and `ip netns`");
        return;
    };
    let [one, two, three] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let _first = boxes.node(&boxes.one, 1, one.path(), "");
    let token = token_of(one.path(), "");
    let _second = boxes.node(&boxes.other, 2, two.path(), &token);
    let _third = boxes.named(&boxes.other, 2, "box3", 8010, three.path(), &token_of(one.path(), &token));
    until("two peers", || {
        let looked = boxes.rails_of(one.path(), &["--look"]);
        (looked["peers"].as_array().unwrap().len() == 2).then_some(())
    });
    let report = boxes.rails_of(one.path(), &[]);
    let mut names = BTreeSet::new();
    for peer in report["peers"].as_array().unwrap() {
        names.insert(peer["name"].as_str().unwrap());
        let over: Vec<&str> =
            peer["speeds"].as_array().unwrap().iter().map(|s| s["over"].as_str().unwrap()).collect();
        assert_eq!(over, ["rail0", "rail1", "together"], "{peer:#}");
        let measured = &peer["measured"];
        let runs = measured["alone"].as_array().unwrap().iter().chain([&measured["together"]]);
        for run in runs {
            assert!(run["failed"].is_null() && run["bytes"].as_u64().unwrap() >= 60 << 20, "{run:#}");
        }
    }
    assert_eq!(names, BTreeSet::from(["box2", "box3"]));
    let carries = |peer: &str| {
        let of = |v: &&Value| v["id"] == "carries" && v["peer"] == peer;
        report["verdicts"].as_array().unwrap().iter().filter(of).count()
    };
    assert_eq!((carries("box2"), carries("box3")), (3, 3), "each rail and both: {report:#}");

    let out = Command::new("ip")
        .args(["netns", "exec", &boxes.one, env!("CARGO_BIN_EXE_spark-kv"), "rails", "--root"])
        .arg(one.path())
        .output()
        .unwrap();
    let screen = text(&out.stdout);
    for words in [
        "60.0 MiB from box2",
        "60.0 MiB from box3",
        "with box2: both rails carry",
        "with box3: rail0 carries",
    ] {
        assert!(screen.contains(words), "{words}: {screen}");
    }
}

#[test]
fn without_a_loopback_device_a_node_says_what_to_do() {
    let Some(boxes) = Boxes::new("skl") else {
        println!("skipped: this needs root and `ip netns`");
        return;
    };
    assert!(ip(&["-n", &boxes.one, "link", "set", "lo", "down"]));
    assert!(ip(&["-n", &boxes.one, "addr", "flush", "dev", "lo"]), "as in a namespace where it was never up");
    let root = tempfile::tempdir().unwrap();
    let mut node = boxes.node(&boxes.one, 1, root.path(), "");
    let ended = until("end", || node.0.try_wait().unwrap());
    let log = std::fs::read_to_string(root.path().join("up.log")).unwrap();
    assert!(!ended.success() && log.contains("`ip link set lo up`"), "{ended}: {log}");
}
