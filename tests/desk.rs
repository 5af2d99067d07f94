//! The operator's commands on a real node with a mock engine, and on its folder when it is gone.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Output};

use common::*;
use serde_json::{Value, json};

const SETTINGS: &str = "[engine]\nkind = \"mock\"\nserved_name = \"mock\"\nstop_grace_s = 3\n\
    extra_args = [\"--shape\", '{\"rows\": 512, \"row_bytes\": 16384, \"device_blocks\": 256, \"block_tokens\": 16, \
    \"prefill_us_per_token\": 50, \"itl_us\": 200}']\n\
    [store]\ncapacity = \"64MiB\"\nsegment = \"4MiB\"\n";

fn store(node: &Node, words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_spark-kv"));
    command.arg("store").args(words).arg("--root").arg(&node.root).output().unwrap()
}

/// The answer as JSON, with the exit code that it must have.
fn told(node: &Node, words: &[&str], code: i32) -> Value {
    let out = store(node, &[words, &["--json"]].concat());
    let talk = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(code), "{words:?}: {talk}");
    serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{words:?}: {e} {talk}"))
}

fn refused(node: &Node, words: &[&str], code: i32, why: &str) {
    let out = store(node, words);
    let talk = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(code), "{words:?}: {talk}");
    assert!(talk.contains(why), "{words:?}: {talk}");
    assert!(out.stdout.is_empty(), "{words:?} talks on stderr");
}

#[test]
fn an_operator_looks_verifies_pins_and_drops() {
    let folder = tempfile::tempdir().unwrap();
    let spec = Spec { name: "a", profile: "cpu-tiny", settings: SETTINGS, join: None, mutant: None };
    let mut node = Node::start(folder.path(), &spec);
    node.await_ready(PATIENCE);
    let first = words(1, 150);
    let short = complete(&node, "mock", &first, 2).id;
    node.await_stored();
    let long = complete(&node, "mock", &format!("{first} and more: {}", words(2, 150)), 2).id;
    node.request(&long);
    node.await_stored();

    looks(&node, &short, &long);
    explains(&node, &long);
    pins(&node, &long);
    refuses(&node);
    finds_rot(&node);
    drops(&node, &short);

    let rows = told(&node, &["ls"], 0)["rows"].as_u64().unwrap();
    node.stop();
    let shut = told(&node, &["ls"], 0);
    assert_eq!(
        shut["rows"].as_u64(),
        Some(rows + 1),
        "without a look at payloads the rotten row is listed too"
    );
    let found = told(&node, &["verify"], 1);
    assert_eq!((found["done"].as_bool(), found["damaged"].as_u64()), (Some(true), Some(1)), "{found}");
    refused(&node, &["pin", "x"], 2, "no running node");
    let text = String::from_utf8(store(&node, &["du"]).stdout).unwrap();
    assert!(text.contains("(no node runs)") && text.contains("bytes per token"), "{text}");
}

/// A node that keeps so many rows, sealed for requests without a key.
fn with_sealed_rows(folder: &Path) -> (Node, u64) {
    let settings = format!("{SETTINGS}encrypt = true\n");
    let spec = Spec { name: "a", profile: "cpu-tiny", settings: &settings, join: None, mutant: None };
    let mut node = Node::start(folder, &spec);
    node.await_ready(PATIENCE);
    complete(&node, "mock", &words(3, 150), 2);
    node.await_stored();
    let rows = told(&node, &["ls"], 0)["rows"].as_u64().unwrap();
    assert!(rows > 5, "{rows}");
    (node, rows)
}

#[test]
fn an_operator_forgets_an_owner() {
    let folder = tempfile::tempdir().unwrap();
    let (mut node, rows) = with_sealed_rows(folder.path());
    refused(
        &node,
        &["forget", "--key", "bob"],
        1,
        "no row is sealed for `bob`; there are rows of (requests without a key)",
    );
    refused(&node, &["forget"], 64, "--key");
    let gone = told(&node, &["forget", "--key", ""], 0);
    assert!(gone["keys"] == 1 && gone["rows"] == rows, "{gone}");
    assert_eq!(gone["others"], json!([]));
    assert_eq!(told(&node, &["ls"], 0)["rows"], 0);
    node.stop();
    // Their bytes are there still, and nobody's.
    let left = told(&node, &["verify"], 0);
    assert!(left["unkeyed"] == rows && left["damaged"] == 0, "{left}");
    refused(&node, &["forget", "--key", "bob"], 2, "no row is sealed for `bob`, nor for anybody else");
}

#[test]
fn an_owner_is_forgotten_while_the_node_is_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let (mut node, rows) = with_sealed_rows(folder.path());
    node.stop();
    let gone = told(&node, &["forget", "--key", ""], 0);
    assert_eq!(gone, json!({"keys": 1, "rows": rows, "others": []}));
    assert_eq!(told(&node, &["ls"], 0)["rows"], 0);
    let left = told(&node, &["verify"], 0);
    assert!(left["unkeyed"] == rows && left["damaged"] == 0, "{left}");
}

#[test]
fn an_owner_is_forgotten_on_every_box_and_one_that_is_away_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let (mut a, rows) = with_sealed_rows(folder.path());
    let invite = a.invite();
    let settings = format!("{SETTINGS}encrypt = true\n");
    let spec = Spec { name: "b", profile: "cpu-tiny", settings: &settings, join: Some(invite), mutant: None };
    let mut b = Node::start(folder.path(), &spec);
    b.await_ready(PATIENCE);
    a.await_peer();
    b.await_peer();
    complete(&b, "mock", &words(9, 150), 2);
    b.await_stored();
    let there = told(&b, &["ls"], 0)["rows"].as_u64().unwrap();
    let gone = told(&a, &["forget", "--key", ""], 0);
    let other = json!({"node": "b", "keys": 1, "rows": there, "trouble": ""});
    assert_eq!(gone, json!({"keys": 1, "rows": rows, "others": [other]}));
    assert_eq!(told(&b, &["ls"], 0)["rows"], 0);

    // A name that only the other one knows is no mistake; one that nobody knows is.
    complete(&b, "mock", &words(10, 150), 2);
    b.await_stored();
    let gone = told(&a, &["forget", "--key", ""], 0);
    assert!(gone["keys"] == 0 && gone["others"][0]["keys"] == 1, "{gone}");
    refused(&a, &["forget", "--key", ""], 1, "no row is sealed for");

    b.stop();
    complete(&a, "mock", &words(4, 150), 2);
    a.await_stored();
    let gone = told(&a, &["forget", "--key", ""], 1);
    assert_eq!((&gone["keys"], &gone["others"][0]["node"]), (&json!(1), &json!("b")), "{gone}");
    assert!(gone["others"][0]["trouble"].as_str().unwrap().contains("not connected"), "{gone}");
    a.stop();
}

/// Why a request went where it went, in words and in figures.
fn explains(node: &Node, id: &str) {
    let explain = |words: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_spark-kv"));
        command.arg("explain").args(words).arg("--root").arg(&node.root).output().unwrap()
    };
    let text = String::from_utf8(explain(&[id]).stdout).unwrap();
    for part in [
        "a serves it: the client asks for it",
        "tokens to compute",
        "price in seconds",
        "foretold: ",
        "it was:",
    ] {
        assert!(text.contains(part), "no `{part}` in {text}");
    }
    let out: Value = serde_json::from_slice(&explain(&[id, "--json"]).stdout).unwrap();
    let (decision, prompt) = (&out["decision"], out["prompt_tokens"].as_u64().unwrap());
    assert_eq!((&decision["boxes"][0]["node"], &decision["reason"]), (&json!("a"), &json!("bound")), "{out}");
    // The mock's tokenizer is not ours to know: it is an estimate, and of the right size.
    let tokens = decision["request"]["tokens"].as_u64().unwrap();
    assert!(
        decision["request"]["approximate"] == true && tokens > prompt / 3 && tokens < prompt * 3,
        "{out}"
    );
    let lost = explain(&["nobody"]);
    assert_eq!(lost.status.code(), Some(2), "{}", String::from_utf8_lossy(&lost.stderr));
}

/// One turn of a conversation that goes on, under a system prompt that may tell the time.
fn turn(node: &Node, clock: &str, turns: usize) -> Answer {
    let system = format!("You help.\nIt is {clock}.\n{}", words(5, 600));
    let mut messages = vec![json!({"role": "system", "content": system})];
    messages.extend((0..turns).map(|n| json!({"role": "user", "content": words(n as u64, 300)})));
    let body = json!({"model": "mock", "messages": messages, "max_tokens": 2, "prompt_cache_key": "mine"});
    let answer = post(node, "/v1/chat/completions", &body);
    assert_eq!(answer.code, 200, "{answer:?}");
    answer
}

#[test]
fn a_turn_that_was_computed_again_is_explained() {
    let folder = tempfile::tempdir().unwrap();
    let spec = Spec { name: "a", profile: "cpu-tiny", settings: SETTINGS, join: None, mutant: None };
    let mut node = Node::start(folder.path(), &spec);
    node.await_ready(PATIENCE);
    turn(&node, "10:22", 2);
    node.await_stored();
    let goes_on = turn(&node, "10:22", 3);
    assert!(goes_on.cached_tokens() > 1000, "{goes_on:?}");
    assert_eq!(node.request(&goes_on.id)["miss"], Value::Null, "nothing was computed again");

    let again = turn(&node, "10:23", 4);
    let miss = &node.request(&again.id)["miss"];
    assert_eq!(miss["cause"], "text_varies", "{miss}");
    let lost = goes_on.prompt_tokens() - again.cached_tokens();
    assert_eq!(miss["tokens"].as_u64(), Some(lost), "{miss}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_spark-kv"));
    let out = command.arg("explain").args([&again.id, "--root"]).arg(&node.root).output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(text.contains("missed: the system prompt is not what it was"), "{text}");
    assert!(text.contains("what to do: take what changes out of it"), "{text}");
    assert_eq!(node.metric("sparkkv_missed_turns_total{cause=\"text_varies\"}"), 1.0);
    assert_eq!(node.metric("sparkkv_missed_turns_total{cause=\"gone\"}"), 0.0);
    node.stop();
}

fn looks(node: &Node, short: &str, long: &str) {
    let ls = told(node, &["ls"], 0);
    let rows = ls["rows"].as_u64().unwrap();
    assert_eq!(rows as f64, node.metric("sparkkv_store_rows"));
    assert_eq!(ls["bytes"].as_u64(), Some(rows * 16384));
    assert_eq!(ls["spaces"][0]["attached"], true);
    let prefix = |id: &str| {
        let all = ls["prefixes"].as_array().unwrap();
        let of = |p: &&Value| p["request"].as_str().unwrap().contains(id);
        all.iter().find(of).unwrap_or_else(|| panic!("{id} in {all:?}")).clone()
    };
    assert!(prefix(long)["bytes"].as_u64() > prefix(short)["bytes"].as_u64());
    assert!(prefix(short)["asked"].as_u64() >= Some(2), "the longer prompt begins with the shorter");
    let one = told(node, &["ls", "--limit", "1", "--by", "asked"], 0);
    assert_eq!(one["prefixes"].as_array().unwrap().len(), 1);
    let group = told(node, &["du"], 0)[0]["groups"][0].clone();
    assert_eq!((&group["tokens_per_row"], &group["bytes_per_token"]), (&json!(16), &json!(1024.0)));
    let text = String::from_utf8(store(node, &["ls"]).stdout).unwrap();
    assert!(text.contains("in use") && text.contains(long), "{text}");
}

fn pins(node: &Node, long: &str) {
    let pinned = told(node, &["pin", long], 0);
    assert!(pinned["changed"].as_u64().unwrap() > 10, "{pinned}");
    assert_eq!(pinned["changed"], pinned["meant"]);
    assert_eq!(told(node, &["pin", long], 0)["changed"], 0);
    assert_eq!(told(node, &["ls"], 0)["pinned_rows"], pinned["changed"]);
    assert_eq!(told(node, &["unpin", long], 0)["changed"], pinned["changed"]);
}

fn refuses(node: &Node) {
    refused(node, &["pin"], 64, "name the rows");
    refused(node, &["drop", "never-was"], 1, "no request `never-was` is remembered");
    refused(node, &["drop", "--key", "xyz"], 1, "`xyz` is no key: write 64 hex digits");
    refused(node, &["drop", "--key", &"ab".repeat(32)], 1, "no row of key");
    refused(node, &["drop", "--space", "xyz!"], 1, "is no namespace");
    refused(node, &["drop", "--space", "00000000"], 1, "no rows of namespace `00000000`");
    refused(node, &["ls", "--limit", "many"], 64, "--limit");
    refused(node, &["ls", "--by", "colour"], 64, "bytes");
    // Nobody but this machine's user gives orders, whatever a page in a browser sends.
    let rows = node.metric("sparkkv_store_rows");
    for verb in ["verify", "pin", "unpin", "drop", "forget"] {
        let url = node.url(&format!("/api/v1/store/{verb}"));
        let answer = agent().post(url).send_json(json!({"space": "0000"})).unwrap();
        assert_eq!(answer.status(), 403, "{verb}");
    }
    assert_eq!(node.metric("sparkkv_store_rows"), rows);
}

fn finds_rot(node: &Node) {
    let clean = told(node, &["verify"], 0);
    assert_eq!((clean["damaged"].as_u64(), clean["done"].as_bool()), (Some(0), Some(true)));
    assert_eq!(clean["rows"].as_f64(), Some(node.metric("sparkkv_store_rows")));
    let rows = spark_kv::store::inspect(&node.root.join("state/segments")).unwrap();
    let row = &rows[rows.len() / 2];
    let file = fs::File::options().read(true).write(true).open(&row.file).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, row.payload_offset + 77).unwrap();
    file.write_all_at(&[byte[0] ^ 16], row.payload_offset + 77).unwrap();
    file.sync_all().unwrap();
    let found = told(node, &["verify"], 1);
    let name = row.file.file_name().unwrap().to_str().unwrap();
    assert_eq!(found["damaged"], 1);
    assert_eq!(found["named"][0]["file"], name);
    assert_eq!(found["named"][0]["offset"].as_u64(), Some(row.payload_offset - 4096));
    assert_eq!(told(node, &["verify"], 0)["damaged"], 0, "it is dropped");
    let alert = await_some("the alert", PATIENCE, || {
        let state = get_json(&node.url("/api/v1/alerts"))?;
        state["active"].as_array()?.iter().find(|alert| alert["code"] == "store-damaged").cloned()
    });
    assert!(alert["cause"].as_str().unwrap().contains(name), "{alert}");
}

fn drops(node: &Node, short: &str) {
    let before = told(node, &["ls"], 0);
    let dropped = told(node, &["drop", short], 0);
    let rows = |ls: &Value| ls["rows"].as_u64().unwrap();
    let after = told(node, &["ls"], 0);
    assert_eq!(rows(&before) - rows(&after), dropped["changed"].as_u64().unwrap());
    assert!(dropped["changed"].as_u64() > Some(0));
    let row = &spark_kv::store::inspect(&node.root.join("state/segments")).unwrap();
    let kept = row.last().unwrap();
    assert_eq!(told(node, &["drop", "--key", &hex::encode(kept.key.to_bytes())], 0)["changed"], 1);
}

#[test]
fn an_operator_sees_the_other_node_and_takes_it_out_when_it_is_gone() {
    let folder = tempfile::tempdir().unwrap();
    let spec = Spec { name: "a", profile: "cpu-tiny", settings: SETTINGS, join: None, mutant: None };
    let mut a = Node::start(folder.path(), &spec);
    a.await_ready(PATIENCE);
    let cluster = |words: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_spark-kv"));
        let out = command.arg("cluster").args(words).arg("--root").arg(&a.root).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (out.status.code().unwrap(), text(&out.stdout), text(&out.stderr))
    };
    let (code, said, _) = cluster(&["ls"]);
    assert_eq!((code, said.as_str()), (0, "no other node is known\n"));
    let spec = Spec { name: "b", join: Some(a.invite()), ..spec };
    let mut b = Node::start(folder.path(), &spec);
    a.await_peer();
    let (code, said, _) = cluster(&["ls", "--json"]);
    let listed: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((code, &listed[0]["name"], &listed[0]["state"]), (0, &json!("b"), &json!("connected")));
    let (code, said, _) = cluster(&["ls"]);
    assert!(code == 0 && said.starts_with("b  connected for "), "{said}");

    let (code, said, why) = cluster(&["forget", "c"]);
    assert!(code == 1 && said.is_empty() && why.contains("no node `c` is known"), "{code}: {why}");
    // A page in a browser on this machine has no key of the operator's.
    let asked = agent().post(a.url("/api/v1/cluster/forget")).send_json(json!({"node": "b"})).unwrap();
    assert_eq!(asked.status(), 403);

    assert_eq!(b.stop(), Some(0));
    let peer = || a.health().map(|(_, body)| body["checks"]["peer"].clone());
    await_some("b is missed", PATIENCE, || (peer()?["ok"] == false).then_some(()));
    let (code, said, why) = cluster(&["forget", "b"]);
    assert_eq!((code, said.as_str()), (0, "b is not known any more; a token lets it in again\n"), "{why}");
    assert_eq!(peer().unwrap(), json!({"ok": true, "what": "none joined, this box serves alone"}));
}
