//! Two real nodes with mock engines: store, peer and router under load and under faults, without a model.
//!
//! The mock engine computes what every loaded row must hold and compares byte by byte; a wrong one is counted and
//! spoils its answer. So "no wrong answer" below is a claim about bytes, not only about texts.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test that cannot go on says where, and why it was skipped"
)]

mod common;

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use common::*;
use nix::sys::signal::Signal;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

const MODEL: &str = "mock";

/// Mock engine: 16 tokens a row, 16 KiB a row, a device pool small enough that the tier matters.
fn settings(mock: &Value, more: &str) -> String {
    format!(
        "[engine]\nkind = \"mock\"\nserved_name = \"{MODEL}\"\nstop_grace_s = 3\nextra_args = [\"--shape\", '{mock}']\n{more}\n\
         [store]\ncapacity = \"256MiB\"\nsegment = \"4MiB\"\n"
    )
}

fn mock() -> Value {
    json!({"rows": 512, "row_bytes": 16384, "device_blocks": 256, "block_tokens": 16, "prefill_us_per_token": 50, "itl_us": 200})
}

fn single(folder: &Path, name: &str, mutant: Option<&str>, settings: &str) -> Node {
    let mut node = Node::start(folder, &Spec { name, profile: "cpu-tiny", settings, join: None, mutant });
    node.await_ready(PATIENCE);
    node
}

fn pair(folder: &Path, settings: &str, mutant_b: Option<&str>) -> (Node, Node) {
    let a = single(folder, "a", None, settings);
    let spec = Spec { name: "b", profile: "cpu-tiny", settings, join: Some(a.invite()), mutant: mutant_b };
    let mut b = Node::start(folder, &spec);
    b.await_ready(PATIENCE);
    a.await_peer();
    b.await_peer();
    (a, b)
}

fn sources(node: &Node, answer: &Answer) -> Value {
    node.request(&answer.id)["sources"].clone()
}

fn engine_metric(node: &Node, series: &str) -> f64 {
    let url = format!("http://127.0.0.1:{}/metrics", node.ports.base + 1);
    let text = agent().get(&url).call().unwrap().into_body().read_to_string().unwrap();
    text.lines().find_map(|l| l.strip_prefix(series)?.trim().parse().ok()).unwrap_or_default()
}

fn wrong_rows(node: &Node) -> f64 {
    engine_metric(node, "mock_wrong_rows_total")
}

/// Drops device pool and rows of the mock engine: the next hit is the tier's.
fn forget(node: &Node) {
    let url = format!("http://127.0.0.1:{}/reset_prefix_cache?reset_external=true", node.ports.base + 1);
    await_some("the mock to reset", PATIENCE, || {
        let value: Value = agent().post(&url).send_empty().ok()?.into_body().read_json().ok()?;
        (value["success"] == true).then_some(())
    });
}

fn restart_engine(node: &mut Node) {
    let before = node.engine_view().unwrap()["engine_id"].clone();
    Node::signal(node.engine_pid(), Signal::SIGKILL);
    await_some("another engine", PATIENCE, || {
        let view = node.engine_view()?;
        (view["engine_id"] != before && view["phase"] == "ready").then_some(())
    });
    node.await_ready(PATIENCE);
}

#[test]
fn rows_come_back_from_the_own_drive_and_from_the_other_node() {
    let folder = tempfile::tempdir().unwrap();
    let (mut a, b) = pair(folder.path(), &settings(&mock(), ""), None);
    let prompt = words(1, 900);
    let cold = complete(&a, MODEL, &prompt, 8);
    assert!(sources(&a, &cold)["computed"].as_u64().unwrap() > 800);
    a.await_stored();
    b.await_index_of(&a);

    let peer = complete(&b, MODEL, &prompt, 8);
    assert_eq!(peer.text(), cold.text());
    assert!(sources(&b, &peer)["peer"].as_u64().unwrap() > 800, "{:?}", sources(&b, &peer));

    restart_engine(&mut a);
    let drive = complete(&a, MODEL, &prompt, 8);
    assert_eq!(drive.text(), cold.text());
    assert!(sources(&a, &drive)["drive"].as_u64().unwrap() > 800, "{:?}", sources(&a, &drive));
    assert_eq!(wrong_rows(&a) + wrong_rows(&b), 0.0);

    // A restart of everything forgets nothing either.
    assert_eq!(a.stop(), Some(0));
    a.await_gone();
    a.up(None);
    a.await_ready(PATIENCE);
    let again = complete(&a, MODEL, &prompt, 8);
    assert_eq!(again.text(), cold.text());
    assert!(sources(&a, &again)["drive"].as_u64().unwrap() > 800);
    a.await_peer();
}

#[test]
fn a_prompt_that_both_nodes_use_is_copied_and_outlives_the_node_that_wrote_it() {
    let folder = tempfile::tempdir().unwrap();
    let (mut a, b) = pair(folder.path(), &settings(&mock(), ""), None);
    let prompt = words(7, 900);
    let cold = complete(&a, MODEL, &prompt, 8);
    a.await_stored();
    b.await_index_of(&a);
    let before = b.metric("sparkkv_store_rows");
    for turn in 1..=2 {
        let answer = complete(&b, MODEL, &prompt, 8);
        assert_eq!(answer.text(), cold.text());
        assert!(sources(&b, &answer)["peer"].as_u64().unwrap() > 800, "{turn}: {:?}", sources(&b, &answer));
        b.await_stored();
        // A few rows of the answer are b's own. What it has fetched it does not write, until it is used again.
        assert!(turn == 2 || b.metric("sparkkv_store_rows") < before + 10.0, "written once");
        forget(&b);
    }
    let copied = || b.metric("sparkkv_cluster_copied_rows_total{why=\"used\"}");
    await_some("copies", PATIENCE, || (copied() >= 50.0).then_some(()));
    assert_eq!(a.stop(), Some(0));
    a.await_gone();
    let alone = complete(&b, MODEL, &prompt, 8);
    assert_eq!(alone.text(), cold.text());
    assert!(sources(&b, &alone)["drive"].as_u64().unwrap() > 800, "{:?}", sources(&b, &alone));
    assert_eq!(wrong_rows(&b), 0.0);
}

/// Clients that never stop asking; each answer is checked against the first one for its prompt.
struct Load {
    stop: AtomicBool,
    answered: AtomicU64,
    failed: AtomicU64,
}

impl Load {
    fn new() -> Self {
        Self { stop: AtomicBool::new(false), answered: AtomicU64::new(0), failed: AtomicU64::new(0) }
    }

    /// Asks the engine itself, because the node is what dies. A refused connection is not an answer; a wrong text is
    /// a failed test.
    fn run(&self, port: u16, seeds: std::ops::Range<u64>, texts: &[String]) {
        let url = format!("http://127.0.0.1:{port}/v1/completions");
        let mut seed = seeds.start;
        while !self.stop.load(Ordering::Relaxed) {
            let body = json!({"model": MODEL, "prompt": words(seed, 300), "max_tokens": 4, "temperature": 0});
            match agent().post(&url).send_json(&body) {
                Ok(response) if response.status() == 200 => {
                    let value: Value = response.into_body().read_json().unwrap();
                    assert_eq!(value["choices"][0]["text"], texts[seed as usize], "prompt {seed}");
                    self.answered.fetch_add(1, Ordering::Relaxed);
                }
                _ => {
                    self.failed.fetch_add(1, Ordering::Relaxed);
                }
            }
            seed = if seed + 1 == seeds.end { seeds.start } else { seed + 1 };
        }
    }
}

#[test]
fn a_node_killed_twenty_times_under_load_never_gives_a_wrong_answer() {
    let folder = tempfile::tempdir().unwrap();
    // A device pool and a row area too small for the prompts in play: loads and stores never cease.
    let mock = json!({"rows": 96, "row_bytes": 65536, "device_blocks": 64, "block_tokens": 16, "prefill_us_per_token": 20, "itl_us": 100});
    let mut a = single(folder.path(), "a", None, &settings(&mock, ""));
    let texts: Vec<String> = (0..24).map(|seed| complete(&a, MODEL, &words(seed, 300), 4).text()).collect();
    let load = Load::new();
    let mut in_flight = 0;
    std::thread::scope(|scope| {
        for client in 0..3 {
            let (load, texts, port) = (&load, &texts, a.ports.base + 1);
            scope.spawn(move || load.run(port, client * 8..(client + 1) * 8, texts));
        }
        for kill in 0..20 {
            let before = load.answered.load(Ordering::Relaxed);
            await_some("answers between two kills", PATIENCE, || {
                (load.answered.load(Ordering::Relaxed) > before + 3).then_some(())
            });
            // A moment in which a job is in flight; under this load one comes many times a second.
            let begin = std::time::Instant::now();
            let mut open = false;
            while begin.elapsed() < Duration::from_secs(5) && !open {
                open = a.metric("sparkkv_door_open_jobs") > 0.0;
            }
            in_flight += u32::from(open);
            let node = a.node_pid();
            Node::signal(node, Signal::SIGKILL);
            await_some(&format!("node number {}", kill + 2), PATIENCE, || {
                (a.node_pid() != node).then_some(())
            });
            a.await_ready(PATIENCE);
        }
        load.stop.store(true, Ordering::Relaxed);
    });
    assert!(in_flight >= 15, "a job was in flight at {in_flight} of 20 kills");
    assert_eq!(wrong_rows(&a), 0.0);
    assert!(engine_metric(&a, "mock_checked_rows_total") > 0.0, "rows were loaded in between");
    // What was stored still comes from the drive.
    complete(&a, MODEL, &words(0, 300), 4);
    a.await_stored();
    forget(&a);
    let answer = complete(&a, MODEL, &words(0, 300), 4);
    assert_eq!(answer.text(), texts[0]);
    assert!(sources(&a, &answer)["drive"].as_u64().unwrap() > 0, "{}", a.tell());
    assert_eq!(a.stop(), Some(0));
    a.await_gone();
}

/// Open descriptors of a process, but for the segments of its store: those come with rows.
fn descriptors(pid: i32) -> usize {
    let of = |entry: std::io::Result<fs::DirEntry>| fs::read_link(entry.ok()?.path()).ok();
    let targets = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().filter_map(of);
    targets.filter(|target| !target.to_string_lossy().contains("/segments/")).count()
}

/// Rows travel from a to b all the time: b keeps only a few of its own. Each kill waits until rows have come, and a moment
/// of chance. Four in a row hit the same node: its keeper waits longer each time, and the other one has lived long enough
/// meanwhile to be started again at once.
#[test]
fn two_nodes_of_which_one_is_killed_fifty_times_give_no_wrong_row_and_lose_nothing() {
    const KILLS: u32 = 50;
    const PROMPTS: u64 = 24;
    /// Descriptors that come and go: a scrape, a connection about to close.
    const SPARE: usize = 2;
    let folder = tempfile::tempdir().unwrap();
    let mock = json!({"rows": 96, "row_bytes": 65536, "device_blocks": 64, "block_tokens": 16, "prefill_us_per_token": 20, "itl_us": 100});
    let lonely = |settings: String| settings + "[cluster]\ncopy = false\ntake_over = false\n";
    let mut a = single(folder.path(), "a", None, &lonely(settings(&mock, "")));
    let small = lonely(settings(&mock, "").replace("256MiB", "16MiB"));
    let join = Some(a.invite());
    let mut b = Node::start(
        folder.path(),
        &Spec { name: "b", profile: "cpu-tiny", settings: &small, join, mutant: None },
    );
    b.await_ready(PATIENCE);
    a.await_peer();
    b.await_peer();
    let texts: Vec<String> =
        (0..PROMPTS).map(|seed| complete(&a, MODEL, &words(seed, 300), 4).text()).collect();
    a.await_stored();
    b.await_index_of(&a);
    let keeper = |node: &Node| i32::try_from(node.keeper.as_ref().unwrap().id()).unwrap();
    let lasting = [keeper(&a), keeper(&b), a.engine_pid(), b.engine_pid()];
    let all = |a: &Node, b: &Node| {
        let [ka, kb, ea, eb] = lasting;
        [ka, kb, ea, eb, a.node_pid(), b.node_pid()].map(descriptors)
    };
    let before = all(&a, &b);
    let load = Load::new();
    let mut dice = StdRng::seed_from_u64(50);
    std::thread::scope(|scope| {
        for client in 0..3 {
            let (load, texts, port) = (&load, &texts, b.ports.base + 1);
            scope.spawn(move || load.run(port, client * 8..(client + 1) * 8, texts));
        }
        for kill in 0..KILLS {
            let rows = || b.metric("sparkkv_transfer_received_rows_total");
            let had = rows();
            await_some("rows of the other node", PATIENCE, || (rows() > had).then_some(()));
            std::thread::sleep(Duration::from_millis(dice.random_range(0..40)));
            let victim = if kill / 4 % 2 == 0 { &mut a } else { &mut b };
            let node = victim.node_pid();
            Node::signal(node, Signal::SIGKILL);
            await_some("another node", PATIENCE, || (victim.node_pid() != node).then_some(()));
            victim.await_ready(PATIENCE);
        }
        load.stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(load.failed.load(Ordering::Relaxed), 0, "the engine never died");
    assert_eq!(wrong_rows(&a) + wrong_rows(&b), 0.0);
    assert!(engine_metric(&b, "mock_checked_rows_total") > 0.0, "rows were loaded in between");
    a.await_peer();
    b.await_peer();
    b.await_stored();
    // Rows that a dead node's loads or stores held are free again.
    await_some("all rows of the area to be free", PATIENCE, || {
        (engine_metric(&b, "mock_rows_pinned") == 0.0 && engine_metric(&a, "mock_rows_pinned") == 0.0)
            .then_some(())
    });
    let mut settled = before;
    let begin = std::time::Instant::now();
    while begin.elapsed() < PATIENCE {
        settled = all(&a, &b);
        if settled.iter().zip(before).all(|(now, before)| *now <= before + SPARE) {
            break;
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    let more = settled.iter().zip(before).filter(|(now, before)| **now > before + SPARE).count();
    assert_eq!(
        more, 0,
        "descriptors of both keepers, engines and nodes: {before:?} before, {settled:?} after"
    );
    eprintln!(
        "descriptors {before:?} before, {settled:?} after; {} answers",
        load.answered.load(Ordering::Relaxed)
    );
    for node in [&mut a, &mut b] {
        assert_eq!(node.stop(), Some(0));
        node.await_gone();
    }
}

#[test]
fn a_keeper_killed_three_times_leaves_nothing_and_starts_again() {
    let folder = tempfile::tempdir().unwrap();
    let mut a = single(folder.path(), "a", None, &settings(&mock(), ""));
    let text = complete(&a, MODEL, &words(3, 400), 4).text();
    a.await_stored();
    for _ in 0..3 {
        a.kill_keeper();
        a.await_gone();
        a.up(None);
        a.await_ready(PATIENCE);
        let answer = complete(&a, MODEL, &words(3, 400), 4);
        assert_eq!(answer.text(), text);
        assert!(sources(&a, &answer)["drive"].as_u64().unwrap() > 300);
        assert_eq!(wrong_rows(&a), 0.0);
    }
}

#[test]
fn a_peer_gone_in_the_middle_of_a_fetch_costs_a_recompute() {
    let folder = tempfile::tempdir().unwrap();
    let big = json!({"rows": 1024, "row_bytes": 65536, "device_blocks": 1200, "block_tokens": 16, "prefill_us_per_token": 200, "itl_us": 200});
    let (mut a, b) = pair(folder.path(), &settings(&big, ""), None);
    let prompts: Vec<String> = (40..46).map(|seed| words(seed, 2500)).collect();
    let texts: Vec<String> = prompts.iter().map(|p| complete(&a, MODEL, p, 4).text()).collect();
    a.await_stored();
    b.await_index_of(&a);
    let answers: Vec<Answer> = std::thread::scope(|scope| {
        let b = &b;
        let asked: Vec<_> = prompts.iter().map(|p| scope.spawn(move || complete(b, MODEL, p, 4))).collect();
        await_some("a fetch under way", PATIENCE, || {
            (b.metric("sparkkv_door_open_jobs") > 0.0).then_some(())
        });
        a.kill_keeper();
        asked.into_iter().map(|t| t.join().unwrap()).collect()
    });
    for (answer, text) in answers.iter().zip(&texts) {
        assert_eq!(&answer.text(), text);
    }
    assert_eq!(wrong_rows(&b), 0.0);
    await_some("the alert that the peer is gone", PATIENCE, || {
        let alerts = get_json(&b.url("/api/v1/alerts"))?;
        alerts.to_string().contains("peer-gone").then_some(())
    });
    assert_eq!(b.health().unwrap().0, 200, "it serves alone");
    a.await_gone();
    // It comes back by itself, and so does what it holds.
    a.up(None);
    a.await_ready(PATIENCE);
    b.await_peer();
}

#[test]
fn an_engine_killed_is_started_again_and_the_next_turn_comes_from_the_drive() {
    let folder = tempfile::tempdir().unwrap();
    let mut a = single(folder.path(), "a", None, &settings(&mock(), ""));
    let mut prompt = words(4, 500);
    prompt += &complete(&a, MODEL, &prompt, 8).text();
    a.await_stored();
    restart_engine(&mut a);
    prompt += " and what then?";
    let answer = complete(&a, MODEL, &prompt, 8);
    assert!(sources(&a, &answer)["drive"].as_u64().unwrap() > 400);
    assert_eq!(wrong_rows(&a), 0.0);
}

#[test]
fn a_full_drive_stops_stores_and_not_serving() {
    let folder = tempfile::tempdir().unwrap();
    let mount = folder.path().join("a/state");
    fs::create_dir_all(&mount).unwrap();
    // A drive of its own, smaller than the store was told it may take.
    nix::mount::mount(
        Some("tmpfs"),
        &mount,
        Some("tmpfs"),
        nix::mount::MsFlags::empty(),
        Some("size=24M,mode=700"),
    )
    .unwrap();
    struct Unmount<'a>(&'a Path);
    impl Drop for Unmount<'_> {
        fn drop(&mut self) {
            let _ = nix::mount::umount2(self.0, nix::mount::MntFlags::MNT_DETACH);
        }
    }
    let _unmount = Unmount(&mount);
    let mut a = single(folder.path(), "a", None, &settings(&mock(), ""));
    let texts: Vec<String> = (0..20).map(|seed| complete(&a, MODEL, &words(seed, 1500), 4).text()).collect();
    await_some("the alert", PATIENCE, || {
        let alerts = get_json(&a.url("/api/v1/alerts"))?;
        alerts.to_string().contains("store-read-only").then_some(())
    });
    forget(&a);
    let answer = complete(&a, MODEL, &words(0, 1500), 4);
    assert_eq!(answer.text(), texts[0]);
    assert!(sources(&a, &answer)["drive"].as_u64().unwrap() > 1000, "what is on the drive is used");
    assert_eq!(complete(&a, MODEL, &words(99, 100), 4).code, 200);
    assert_eq!(wrong_rows(&a), 0.0);
    assert_eq!(a.stop(), Some(0));
    a.await_gone();
}

#[test]
fn damaged_truncated_and_foreign_segments_are_skipped_and_the_rest_is_used() {
    let folder = tempfile::tempdir().unwrap();
    let mut a = single(folder.path(), "a", None, &settings(&mock(), ""));
    let texts: Vec<String> = (0..12).map(|seed| complete(&a, MODEL, &words(seed, 1500), 4).text()).collect();
    assert_eq!(a.stop(), Some(0));
    let files = segments(&a);
    assert!(files.len() >= 4, "{files:?}");
    fs::File::options().write(true).open(&files[0]).unwrap().set_len(1 << 20).unwrap();
    let flipped = fs::File::options().read(true).write(true).open(&files[1]).unwrap();
    for at in (0..4 << 20).step_by(300_007) {
        let mut byte = [0];
        flipped.read_exact_at(&mut byte, at).unwrap();
        flipped.write_all_at(&[byte[0] ^ 1], at).unwrap();
    }
    fs::write(&files[2], b"not a segment at all").unwrap();
    a.up(None);
    a.await_ready(PATIENCE);
    let mut drive = 0;
    for (seed, text) in texts.iter().enumerate() {
        let answer = complete(&a, MODEL, &words(seed as u64, 1500), 4);
        assert_eq!(&answer.text(), text);
        drive += sources(&a, &answer)["drive"].as_u64().unwrap();
    }
    assert!(drive > 5000, "the rest is used: {drive} tokens");
    assert_eq!(wrong_rows(&a), 0.0);
    let state = a.state().unwrap();
    assert!(state["node"]["cache"]["damaged"].as_u64().unwrap() > 0, "{state}");
    assert!(state["alerts"].to_string().contains("store-damaged"), "{state}");
}

#[test]
fn bad_input_gets_a_clear_error_in_the_endpoints_own_shape() {
    let folder = tempfile::tempdir().unwrap();
    let settings = settings(&mock(), "").replace("[engine]", "[listen]\nmax_body = \"1MiB\"\n[engine]");
    let a = single(folder.path(), "a", None, &settings);
    let raw = |path: &str, body: &str| {
        let response = agent().post(a.url(path)).content_type("application/json").send(body).unwrap();
        let code = response.status().as_u16();
        (code, response.into_body().read_json::<Value>().unwrap())
    };
    let (code, body) = raw("/v1/chat/completions", "{\"model\": ");
    assert_eq!(code, 400);
    assert!(body["error"]["message"].as_str().unwrap().contains("JSON"), "{body}");
    let (code, body) = raw("/v1/messages", "[1, 2");
    assert_eq!((code, &body["type"]), (400, &json!("error")), "{body}");
    assert!(body["error"]["message"].is_string());
    let (code, body) = raw("/v1/completions", "{\"model\":\"nobody\",\"prompt\":\"x\"}");
    assert_eq!(code, 404);
    assert!(body["error"]["message"].as_str().unwrap().contains(MODEL), "names the models there are: {body}");
    let big = format!("{{\"model\":\"{MODEL}\",\"prompt\":\"{}\"}}", "x".repeat(2 << 20));
    let (code, body) = raw("/v1/completions", &big);
    assert_eq!(code, 413);
    assert!(body["error"]["message"].is_string(), "{body}");
    let (code, body) =
        raw("/v1/completions", &json!({"model": MODEL, "prompt": words(1, 150_000)}).to_string());
    assert!(code == 400 || code == 413, "{code} {body}");
}

#[test]
fn a_wrong_or_used_join_token_is_refused_and_said() {
    let folder = tempfile::tempdir().unwrap();
    let (a, _b) = pair(folder.path(), &settings(&mock(), ""), None);
    let token = a.invite();
    let (front, secret) = token.rsplit_once('-').unwrap();
    let wrong: String = secret.chars().map(|c| if c == 'a' { 'b' } else { 'a' }).collect();
    let spec = Spec {
        name: "c",
        profile: "cpu-tiny",
        settings: &settings(&mock(), ""),
        join: Some(format!("{front}-{wrong}")),
        mutant: None,
    };
    let c = Node::start(folder.path(), &spec);
    await_some("the alert on c", PATIENCE, || {
        let alerts = get_json(&c.url("/api/v1/alerts"))?;
        alerts.to_string().contains("join-refused").then_some(())
    });
    let state = a.state().unwrap();
    let stranger = |m: &Value| m["name"] == "c";
    assert!(!state["peers"].as_array().unwrap().iter().any(stranger), "{state}");
    assert!(a.metric("sparkkv_cluster_joins_refused_total{reason=\"unknown\"}") >= 1.0);
}

/// What is done to node a's drive between storing and loading.
#[derive(Clone, Copy, PartialEq)]
enum Damage {
    None,
    /// A bit of every payload, which only checksums tell.
    Flipped,
    /// Whole rows in each other's place, which only their keys tell.
    Swapped,
}

/// What was seen.
#[derive(Debug, Default, PartialEq)]
struct Noticed {
    /// Bytes or texts that are not those that were computed. Never allowed.
    wrong: Vec<String>,
    /// Rows that did not come back, or were counted as damaged: noticed before they could do harm.
    missed: Vec<String>,
}

/// Each fault in the path, armed in a node, is noticed: by the mock's byte check, by a checksum, or by a row that does
/// not come back. The same run without a fault is clean, so the noticing means something.
fn run_with(mutant_a: Option<&str>, mutant_b: Option<&str>, damage: Damage) -> Noticed {
    let folder = tempfile::tempdir().unwrap();
    // Two groups, and rows that their groups cover only in part: there is something to confuse and to leak.
    let mock = json!({"rows": 256, "row_bytes": 16384, "device_blocks": 128, "block_tokens": 16,
        "prefill_us_per_token": 50, "itl_us": 100, "groups": "attention_and_state"});
    let settings = settings(&mock, "canary = false\n");
    // A broken build is looked for in the clear: sealed, a row's tag notices what its checks should have.
    let sealed = mutant_a.is_none() && mutant_b.is_none();
    let settings = format!("{settings}encrypt = {sealed}\n");
    let mut a = single(folder.path(), "a", mutant_a, &settings);
    let spec = Spec {
        name: "b",
        profile: "cpu-tiny",
        settings: &settings,
        join: Some(a.invite()),
        mutant: mutant_b,
    };
    let mut b = Node::start(folder.path(), &spec);
    b.await_ready(PATIENCE);
    a.await_peer();
    b.await_peer();
    let prompts: Vec<String> = (60..66).map(|seed| words(seed, 400)).collect();
    let texts: Vec<String> = prompts.iter().map(|p| complete(&a, MODEL, p, 4).text()).collect();
    a.await_stored();
    // Rows stored under a wrong name never arrive in b's index; that is for what follows to notice.
    let begin = std::time::Instant::now();
    while !b.knows_index_of(&a) && begin.elapsed() < Duration::from_secs(5) {
        std::thread::sleep(Duration::from_millis(50));
    }
    match damage {
        Damage::None => {}
        Damage::Flipped => damage_every_row(&a),
        Damage::Swapped => swap_rows(&a),
    }
    let mut noticed = Noticed::default();
    let mut look = |node: &Node, wanted: &str| {
        for (prompt, text) in prompts.iter().zip(&texts) {
            let answer = complete(node, MODEL, prompt, 4);
            if &answer.text() != text {
                noticed.wrong.push(format!("{wanted}: another text"));
            }
            let from = sources(node, &answer);
            if from[wanted].as_u64().unwrap() < 300 {
                noticed.missed.push(format!("{wanted}: {from}"));
            }
        }
        if wrong_rows(node) > 0.0 {
            noticed.wrong.push(format!("{wanted}: wrong rows"));
        }
    };
    // The other node first: what it finds damaged is gone from the drive afterwards.
    look(&b, "peer");
    forget(&a);
    look(&a, "drive");
    for node in [&a, &b] {
        if node.metric("sparkkv_store_rows_damaged_total") > 0.0 {
            noticed.missed.push(format!("{}: damaged rows counted", node.name));
        }
    }
    assert_eq!(a.stop(), Some(0));
    noticed
}

/// Exchanges neighbouring records, headers and all.
fn swap_rows(node: &Node) {
    let rows = spark_kv::store::inspect(&node.root.join("state/segments")).unwrap();
    for two in rows.chunks_exact(2).filter(|two| two[0].file == two[1].file) {
        let file = fs::File::options().read(true).write(true).open(&two[0].file).unwrap();
        let record = |row: &spark_kv::store::Located| {
            let mut bytes = vec![0; 4096 + row.payload_length as usize];
            file.read_exact_at(&mut bytes, row.payload_offset - 4096).unwrap();
            bytes
        };
        let (one, other) = (record(&two[0]), record(&two[1]));
        assert_eq!(one.len(), other.len());
        file.write_all_at(&other, two[0].payload_offset - 4096).unwrap();
        file.write_all_at(&one, two[1].payload_offset - 4096).unwrap();
        file.sync_all().unwrap();
    }
}

fn damage_every_row(node: &Node) {
    for row in spark_kv::store::inspect(&node.root.join("state/segments")).unwrap() {
        let file = fs::File::options().read(true).write(true).open(&row.file).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, row.payload_offset + 64).unwrap();
        file.write_all_at(&[byte[0] ^ 1], row.payload_offset + 64).unwrap();
        file.sync_all().unwrap();
    }
}

#[test]
fn the_path_without_a_fault_is_clean() {
    assert_eq!(run_with(None, None, Damage::None), Noticed::default());
}

#[test]
fn damage_alone_costs_rows_and_never_gives_wrong_bytes() {
    for damage in [Damage::Flipped, Damage::Swapped] {
        let noticed = run_with(None, None, damage);
        assert_eq!(noticed.wrong, Vec::<String>::new());
        assert!(!noticed.missed.is_empty());
    }
}

/// A release build has no mutants.
fn mutants_exist() -> bool {
    if !cfg!(debug_assertions) {
        eprintln!("skipped: a release build has no mutants");
    }
    cfg!(debug_assertions)
}

macro_rules! caught {
    ($($name:ident: $mutant:literal,)*) => {$(
        #[test]
        fn $name() {
            if mutants_exist() {
                let noticed = run_with(Some($mutant), Some($mutant), Damage::None);
                assert_ne!(noticed, Noticed::default(), "{} went unnoticed", $mutant);
            }
        }
    )*};
}

caught! {
    a_dropped_page_is_caught: "DropPage",
    a_stale_row_is_caught: "StaleRow",
    a_wrong_group_is_caught: "WrongGroup",
    a_wrong_rank_is_caught: "WrongRank",
    rows_shifted_by_one_are_caught: "ShiftByOne",
    a_load_done_early_is_caught: "EarlyDone",
    foreign_bytes_kept_are_caught: "KeepForeignBytes",
}

/// Checks that are skipped show only where there is something to catch; then wrong bytes come through, which is what
/// must be seen.
macro_rules! caught_as_wrong {
    ($($name:ident: $a:expr, $b:expr, $damage:expr;)*) => {$(
        #[test]
        fn $name() {
            if mutants_exist() {
                let noticed = run_with($a, $b, $damage);
                assert!(!noticed.wrong.is_empty(), "went unnoticed: {noticed:?}");
            }
        }
    )*};
}

caught_as_wrong! {
    a_skipped_checksum_is_caught: Some("SkipChecksum"), None, Damage::Flipped;
    a_skipped_key_check_is_caught: Some("SkipKeyCheck"), None, Damage::Swapped;
}

/// Node a hands out damaged rows unchecked; the receiver's own check must hold, and without it wrong bytes come through.
#[test]
fn the_receivers_check_holds_when_the_senders_is_gone_and_its_absence_is_caught() {
    if !mutants_exist() {
        return;
    }
    let from_peer = |noticed: &Noticed| noticed.wrong.iter().any(|what| what.starts_with("peer"));
    assert!(!from_peer(&run_with(Some("SkipChecksum"), None, Damage::Flipped)));
    assert!(from_peer(&run_with(Some("SkipChecksum"), Some("SkipReceiveCheck"), Damage::Flipped)));
}
