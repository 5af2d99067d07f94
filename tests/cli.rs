//! The command line as scripts and people meet it: words, streams and exit codes.
#![expect(clippy::unwrap_used, reason = "helpers of tests: a test that cannot go on panics")]

use std::net::TcpListener;
use std::process::{Command, Output};

use spark_kv::base::frame::Sources;
use spark_kv::observe::alerts::Alert;
use spark_kv::observe::health::Verdict;
use spark_kv::observe::requests::Request;
use spark_kv::observe::state::{NodeFile, NodeView, PeerView, State, Tier};

fn run(words: &[&str], env: &[(&str, &str)]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_spark-kv"))
        .args(words)
        .env_clear()
        .envs(env.iter().copied())
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn help_lists_what_a_person_needs_and_hides_the_rest() {
    let out = run(&["--help"], &[]);
    assert_eq!(out.status.code(), Some(0));
    let help = text(&out.stdout);
    for word in
        ["up", "status", "store", "config", "Exit codes: 0 done, 1 failed, 2 not found or not healthy, 64"]
    {
        assert!(help.contains(word), "{word}: {help}");
    }
    for word in ["guard", "mock-engine", "The node alone"] {
        assert!(!help.contains(word), "{word}: {help}");
    }
    assert!(!help.contains('\x1b'), "no colours into a pipe");
    assert!(out.stderr.is_empty());
}

#[test]
fn help_of_the_mock_engine_is_its_own() {
    let out = run(&["mock-engine", "--help"], &[]);
    let help = text(&out.stdout);
    assert_eq!(out.status.code(), Some(0), "{help}");
    for word in ["Usage: spark-kv mock-engine", "--kv-events-config", "gb10-nano", "/mock/faults"] {
        assert!(help.contains(word), "{word}: {help}");
    }
    let out = run(&["mock-engine", "--prot", "1"], &[]);
    assert_eq!(out.status.code(), Some(64));
    assert!(text(&out.stderr).contains("--port"), "{}", text(&out.stderr));
}

#[test]
fn help_of_up_warns_that_arguments_are_visible() {
    let help = text(&run(&["up", "--help"], &[]).stdout);
    for word in ["--profile", "--root", "--port-base", "--join", "--name", "--config", "--set"] {
        assert!(help.contains(word), "{word}");
    }
    let flat = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(flat.contains("Arguments can be seen by everybody on this machine"), "{flat}");
    assert!(flat.contains("SPARK_KV_JOIN"), "{flat}");
}

#[test]
fn every_kind_of_mistake_has_its_exit_code() {
    let base = free_ports();
    let root = tempfile::tempdir().unwrap();
    let root = root.path().to_str().unwrap();
    for (words, code, said) in [
        (vec!["--version"], 0, ""),
        (vec![], 64, "Usage"),
        (vec!["upp"], 64, "up"),
        (vec!["trace", "info"], 64, "FILE"),
        (vec!["trace", "info", "/nowhere.json"], 64, "failed to read /nowhere.json: No such file"),
        (vec!["sim", "x.json", "--capacity", "many"], 64, "or a share such as `25%`"),
        (vec!["sim", "x.json", "--policy", "mru"], 64, "worth, lru, s3fifo, sieve"),
        (vec!["up", "--prot-base", "1"], 64, "--port-base"),
        (vec!["up", "--set", "store.io"], 64, "SECTION.KEY=VALUE"),
        (vec!["up", "--root", root], 64, "default: engine.model: no model"),
        (vec!["up", "--root", root, "--port-base", "70000"], 64, "flag --port-base: listen.port: "),
        (vec!["up", "--root", root, "--join", "x"], 64, "flag --join: cluster.join: not a join token"),
        (
            vec!["config", "check", "--root", root, "--set", "store.capcity=1"],
            64,
            "did you mean `store.capacity`?",
        ),
        (
            vec!["config", "check", "--root", root, "--profile", "cpu-tiny", "--port-base", &base],
            0,
            "the settings are fine (profile cpu-tiny",
        ),
        (vec!["status", "--root", root], 2, "no running node"),
        (vec!["store"], 64, "Usage"),
        (vec!["store", "ls", "--root", root], 2, "no node answers, and there is no store in"),
        (vec!["store", "verify", "--root", root], 2, "no node answers, and there is no store in"),
        (vec!["store", "du", "--root", root, "--limit", "3"], 64, "--limit"),
        (vec!["store", "pin", "--root", root], 64, "name the rows: ids of requests, --key HEX, or --space"),
        (vec!["store", "drop", "--root", root, "r1"], 2, "no running node"),
        (vec!["store", "prune"], 64, "prune"),
        (vec!["status", "--root", root, "--url", "ftp://x"], 64, "http://"),
    ] {
        let out = run(&words, &[]);
        let talk = text(&out.stderr);
        assert_eq!(out.status.code(), Some(code), "{words:?}: {talk}");
        assert!(talk.contains(said), "{words:?}: {talk}");
        assert!(code == 0 || out.stdout.is_empty(), "{words:?} talks on stderr");
    }
}

/// The first of four neighbouring ports that nobody has.
fn free_ports() -> String {
    let is_free = |base: &u16| (0..4).all(|n| TcpListener::bind(("127.0.0.1", base + n)).is_ok());
    // Each test process begins elsewhere.
    let first = 20_000 + u16::try_from(std::process::id() % 5_000).unwrap() * 2;
    (first..32_000).step_by(4).find(is_free).unwrap().to_string()
}

#[test]
fn config_check_says_what_this_machine_lacks_and_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let (root, base) = (folder.path().join("root"), free_ports());
    std::fs::create_dir(&root).unwrap();
    let root = root.to_str().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap();
    // The port after ours is the engine's, so the one before may be the taken one's base.
    let taken_base = (taken.port() - 1).to_string();
    let (keys, empty) = (folder.path().join("keys"), format!("listen.api_keys_file={}", file.display()));
    let keys = format!("listen.api_keys_file={}", keys.display());
    let taken = format!("{taken} is taken by another program");
    // Nobody can make a folder there, not even root.
    let beside = "/proc/spark-kv";
    for (words, said) in [
        (["--root", beside, "--port-base", &base], "node.root: the folder"),
        (["--root", beside, "--port-base", &base], "cannot be made or written to: No such file"),
        (["--root", root, "--port-base", &taken_base], &taken),
        (["--root", root, "--set", &keys], "listen.api_keys_file: failed to read the API keys"),
        (["--root", root, "--set", &empty], "holds no API key"),
        (["--root", root, "--set", "cluster.address=192.0.2.1"], "cluster.address: 192.0.2.1:"),
        (["--root", root, "--set", "cluster.address=192.0.2.1"], "is no address of this machine"),
    ] {
        let words = [&["config", "check", "--profile", "cpu-tiny"], &words[..]].concat();
        let out = run(&words, &[]);
        let talk = text(&out.stderr);
        assert_eq!(out.status.code(), Some(64), "{words:?}: {talk}");
        assert!(talk.contains(said) && !talk.contains("are fine"), "{words:?}: {talk}");
    }
    assert_eq!(std::fs::read_dir(root).unwrap().count(), 0);
    let out = run(&["config", "check", "--root", root, "--profile", "cpu-tiny", "--port-base", &base], &[]);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    assert_eq!(std::fs::read_dir(root).unwrap().count(), 0);
}

#[test]
fn a_node_without_its_folders_says_why_once() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("none");
    let base = free_ports();
    let words =
        ["node", "--root", root.to_str().unwrap(), "--profile", "cpu-tiny", "--port-base", base.as_str()];
    let out = run(&words, &[]);
    let talk = text(&out.stderr);
    assert_eq!(out.status.code(), Some(78), "{talk}");
    assert_eq!(talk.matches("No such file or directory").count(), 1, "{talk}");
    assert!(talk.contains("error: failed to count up"), "{talk}");
}

#[test]
fn config_show_says_where_values_came_from_and_reads_back() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("spark-kv.toml");
    std::fs::write(
        &path,
        "[store]\nio = \"plain\"\n\n[engine.env]\n\"A.B\" = \"1\"\nHF_TOKEN = \"hunter2\"\n",
    )
    .unwrap();
    let words =
        ["config", "show", "--origin", "--root", root.path().to_str().unwrap(), "--profile", "cpu-tiny"];
    let out = run(&words, &[("SPARK_KV__LOG__JSON", "true"), ("SPARK_KV_JOIN", "spark1-hunter2")]);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let shown = text(&out.stdout);
    for (line, origin) in [
        ("io = \"plain\"", format!("# {}:2", path.display())),
        ("json = true", "# environment SPARK_KV__LOG__JSON".into()),
        ("join = \"(hidden)\"", "# environment SPARK_KV_JOIN".into()),
        ("tiny_family = \"llama\"", "# profile cpu-tiny:".into()),
        ("queue_depth = 32", "# default".into()),
        ("root = ", "# flag --root".into()),
    ] {
        let found = shown.lines().find(|l| l.starts_with(line)).unwrap_or_else(|| panic!("{line}: {shown}"));
        assert!(found.contains(&origin), "{found}");
    }
    assert!(!shown.contains("hunter2"), "{shown}");
    let table: toml::Table = toml::from_str(&shown).unwrap();
    assert_eq!(table["engine"]["env"]["A.B"].as_str(), Some("1"));
}

#[test]
fn config_show_as_json_has_value_and_origin_of_every_key() {
    let root = tempfile::tempdir().unwrap();
    let out = run(&["config", "show", "--json", "--root", root.path().to_str().unwrap()], &[]);
    let shown: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(shown["listen.port"], serde_json::json!({ "value": 8000, "origin": "default" }));
    assert_eq!(shown["node.root"]["origin"], "flag --root");
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let out = Command::new(env!("CARGO_BIN_EXE_spark-kv"))
        .args(["config", "show", "--root", "/nonexistent"])
        .env_clear()
        .stdout(writer)
        .output()
        .unwrap();
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    assert!(out.stderr.is_empty(), "{}", text(&out.stderr));
}

#[test]
fn the_join_token_can_come_through_standard_input() {
    use std::io::Write;
    use std::process::Stdio;
    let root = tempfile::tempdir().unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_spark-kv"))
        .args(["up", "--root", root.path().to_str().unwrap(), "--profile", "cpu-tiny", "--join", "-"])
        .env_clear()
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"hunter2\n").unwrap();
    let out = child.wait_with_output().unwrap();
    let talk = text(&out.stderr);
    assert_eq!(out.status.code(), Some(64), "{talk}");
    assert!(talk.contains("flag --join: cluster.join: not a join token"), "{talk}");
    assert!(!talk.contains("hunter2"), "{talk}");
}

/// Answers one request with `body` and gives its address.
fn answering(body: Vec<u8>) -> (String, std::thread::JoinHandle<String>) {
    use std::io::{Read, Write};
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let served = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut asked = Vec::new();
        let mut some = [0; 512];
        while !asked.windows(4).any(|w| w == b"\r\n\r\n") {
            let n = stream.read(&mut some).unwrap();
            assert!(n > 0, "the question is whole");
            asked.extend_from_slice(&some[..n]);
        }
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(&body).unwrap();
        text(&asked)
    });
    (url, served)
}

fn sample(verdict: Verdict) -> State {
    let mut node = NodeView { name: "spark-a".into(), ..NodeView::default() };
    node.engine.phase = "ready".into();
    node.health.status = verdict;
    node.health.serving = "by this box's engine".into();
    node.tiers =
        vec![Tier { name: "drive".into(), rows: 812, used_bytes: Some(1 << 30), capacity_bytes: 4 << 30 }];
    let sources = Sources { prompt: 7012, drive: 6896, computed: 116, ..Sources::default() };
    node.totals.add(&sources);
    node.requests = vec![Request {
        id: "r1".into(),
        endpoint: "chat\x1b[2J".into(),
        node: "spark-a".into(),
        status: 200,
        ttft_ms: Some(217),
        sources: Some(sources),
        ..Request::default()
    }];
    let of = |status, duration_ms, broken| Request {
        endpoint: "completions".into(),
        node: "spark-a".into(),
        status,
        duration_ms,
        broken,
        ..Request::default()
    };
    node.requests.extend([of(200, 380, false), of(200, 90, true), of(503, 1, false)]);
    let alert = Alert {
        code: "peer-gone".into(),
        cause: "spark-b was last heard at 14:02".into(),
        next_step: "look at the cable".into(),
        ..Alert::default()
    };
    node.alerts = vec![alert];
    let peer = PeerView { name: "spark-b".into(), state: "gone".into(), ..PeerView::default() };
    State::of(1_800_000_000, node, vec![peer])
}

#[test]
fn status_finds_the_node_through_its_root_and_shows_one_screen() {
    let root = tempfile::tempdir().unwrap();
    let (url, served) = answering(serde_json::to_vec(&sample(Verdict::Degraded)).unwrap());
    std::fs::create_dir(root.path().join("run")).unwrap();
    let file = NodeFile { url, ..NodeFile::default() };
    std::fs::write(root.path().join("run/node.json"), serde_json::to_vec(&file).unwrap()).unwrap();
    let out = run(&["status", "--root", root.path().to_str().unwrap()], &[]);
    let screen = text(&out.stdout);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    assert!(served.join().unwrap().starts_with("GET /api/v1/state HTTP/1.0\r\n"));
    for words in [
        "spark-a  degraded, serving by this box's engine",
        "drive    [#####...............] 812 rows, 1.00 GiB of 4.00 GiB",
        "spark-b  gone",
        "98.3 % own drive",
        "7012 tokens: drive 6896, computed 116  217 ms to first",
        "200  completions on spark-a  sources not reported  380 ms in all",
        "the engine broke off",
        "503  completions on spark-a  sources not reported  failed",
        "! peer-gone on spark-a",
        "what to do: look at the cable",
    ] {
        assert!(screen.contains(words), "{words}\n{screen}");
    }
    assert!(!screen.contains('\x1b'), "neither colours into a pipe nor what a request brought");
}

#[test]
fn status_of_another_machines_node_shows_a_key_that_lies_in_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys");
    let file = file.to_str().unwrap();
    for line in ["hunter2-hunter2", "# mine\n\nme:hunter2-hunter2\n"] {
        std::fs::write(file, line).unwrap();
        let (url, served) = answering(serde_json::to_vec(&sample(Verdict::Ok)).unwrap());
        let out = run(&["status", "--url", &url, "--key-file", file], &[]);
        assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
        assert!(served.join().unwrap().contains("\r\nAuthorization: Bearer hunter2-hunter2\r\n"));
    }
    for (line, why) in [("", "it is empty"), ("me:two words", "its first line is no key")] {
        std::fs::write(file, line).unwrap();
        let out = run(&["status", "--url", "http://127.0.0.1:1", "--key-file", file], &[]);
        let talk = text(&out.stderr);
        assert!(out.status.code() == Some(64) && talk.contains(why) && !talk.contains("words"), "{talk}");
    }
    let out = run(&["status", "--key-file", file], &[]);
    assert_eq!(out.status.code(), Some(64), "a key of this node is found by itself");
}

#[test]
fn status_of_a_node_that_is_down_or_is_none_is_exit_code_2() {
    let (url, _served) = answering(serde_json::to_vec(&sample(Verdict::Down)).unwrap());
    let out = run(&["status", "--url", &url, "--json"], &[]);
    assert_eq!(out.status.code(), Some(2));
    let shown: State = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(shown, sample(Verdict::Down));

    let (url, _served) = answering(b"<html>".to_vec());
    let out = run(&["status", "--url", &url], &[]);
    assert_eq!((out.status.code(), out.stdout.len()), (Some(2), 0));
    assert!(text(&out.stderr).contains("is no spark-kv of this version"));

    let (url, _served) = answering(serde_json::to_vec(&State::default()).unwrap());
    let out = run(&["status", "--url", &url], &[]);
    assert!(text(&out.stderr).contains("is just starting"), "{}", text(&out.stderr));

    // A port that was free a moment ago.
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let out = run(&["status", "--url", &format!("http://{free}")], &[]);
    assert_eq!(out.status.code(), Some(2));
    assert!(text(&out.stderr).contains("no running node answers at"), "{}", text(&out.stderr));
}

#[test]
fn bench_store_measures_says_what_it_writes_and_leaves_nothing() {
    let beside = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (dir, memory) = (tempfile::tempdir_in(beside).unwrap(), tempfile::tempdir_in(beside).unwrap());
    let (here, there) = (dir.path().to_str().unwrap(), memory.path().to_str().unwrap());
    let words = ["bench", "store", "--json", "--quick", "--rounds", "1", "--amount", "4MiB", "--dir", here];
    let words = [&words[..], &["--memory", there, "--python", "/no/python"]].concat();
    let out = run(&words, &[]);
    let talk = text(&out.stderr);
    assert_eq!(out.status.code(), Some(0), "{talk}");
    for said in ["will write", "are free", "without vLLM's fs tier: /no/python"] {
        assert!(talk.contains(said), "{said}: {talk}");
    }
    let report: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let keys = |of: &serde_json::Value| of.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    let mut expected = ["rows", "restart_rows", "restart_s", "lookup_4000_ms", "bytes_per_row"];
    expected.sort_unstable();
    assert_eq!(keys(&report), expected);
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4);
    let media: Vec<_> = rows.iter().map(|row| row["medium"].as_str().unwrap()).collect();
    assert_eq!(media, ["drive", "drive", "shm", "shm"]);
    for row in rows {
        assert_eq!(keys(row).len(), 11);
        assert!(row["synced_write_ratio"].as_f64().unwrap() > 0.0, "{row}");
        let sealed = ["sealed_read_ratio", "sealed_write_ratio"].map(|key| row[key].as_f64().unwrap());
        assert!(sealed.iter().all(|&ratio| ratio > 0.0) && row["sealed_cpu_s_per_gb"].is_number(), "{row}");
        assert!(
            row["read_ratio"].as_f64().unwrap() > 0.0 && row["write_ratio"].as_f64().unwrap() > 0.0,
            "{row}"
        );
        assert!(row["extra_cpu_s_per_gb"].is_number() && row["vllm_fs_read_ratio"].is_null(), "{row}");
    }
    assert_eq!(report["restart_rows"], 10_000);
    assert!(report["restart_s"].as_f64().unwrap() > 0.0);
    for folder in [&dir, &memory] {
        assert_eq!(std::fs::read_dir(folder).unwrap().count(), 0, "nothing is left");
    }
}

#[test]
fn bench_router_measures_and_leaves_nothing() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let here = dir.path().to_str().unwrap();
    let out = run(&["bench", "router", "--json", "--quick", "--rounds", "1", "--dir", here], &[]);
    let talk = text(&out.stderr);
    assert_eq!(out.status.code(), Some(0), "{talk}");
    let report: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    for key in ["small_p50_us", "small_p99_us", "big_p50_us", "big_p99_us", "small_rps", "rss_mb"] {
        assert!(report[key].is_number(), "{key}: {report}");
    }
    assert!(report["small_rps"].as_f64() > Some(0.0) && report["rss_mb"].as_f64() > Some(1.0), "{report}");
    assert_eq!(report["tails"].as_array().map(Vec::len), Some(5), "{report}");
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0, "nothing is left");
}

#[test]
fn bench_router_says_when_another_one_does_not_serve() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let here = dir.path().to_str().unwrap();
    let out = run(
        &["bench", "router", "--quick", "--dir", here, "--peer", "x=sh -c 'exit 3' {port} {backends}"],
        &[],
    );
    assert_eq!(out.status.code(), Some(1), "{}", text(&out.stderr));
    assert!(text(&out.stderr).contains("x ended with exit status: 3"), "{}", text(&out.stderr));
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0, "nothing is left");
    let out = run(&["bench", "router", "--dir", "/no/such/folder"], &[]);
    assert_eq!(out.status.code(), Some(64));
}

#[test]
fn bench_store_refuses_what_it_cannot_do() {
    for (words, code, said) in
        [(["--dir", "/no/such/folder"], 64, "no such folder"), (["--dir", "/proc"], 1, "/proc")]
    {
        let words = [&["bench", "store", "--quick"][..], &words].concat();
        let out = run(&words, &[]);
        let talk = text(&out.stderr);
        assert_eq!(out.status.code(), Some(code), "{talk}");
        assert!(talk.contains(said), "{talk}");
    }
}
