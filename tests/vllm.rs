//! KV correctness with a real vLLM: what comes back from the own drive, from the other node and around damage gives
//! the same greedy text as what was computed. The tiny models' output depends on every KV byte.
//!
//! Engines take most of a minute to start on two cores, so the tests of one model share one pair.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test that cannot go on says where, and why it was skipped"
)]

mod common;

use std::fs;
use std::os::unix::fs::FileExt;

use common::*;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

const MODEL: &str = "tiny-llama";
const HYBRID: &str = "tiny-lfm2";

/// Tokens of one row of the tiny models: vLLM's CPU block.
const BLOCK: u64 = 128;

fn offline() -> bool {
    let offline = std::env::var_os("SPARK_KV_OFFLINE").is_some();
    if offline {
        eprintln!("skipped: --offline was asked for, and this needs vLLM");
    }
    offline
}

fn tokens(entry: &Value, source: &str) -> u64 {
    entry["sources"][source].as_u64().unwrap_or_else(|| panic!("no {source} in {entry}"))
}

/// Asks and checks that at least `share` of the prompt came from `source`, and the text is `text` where given.
fn ask(node: &Node, prompt: &str, source: &str, share: f64, text: Option<&str>) -> String {
    ask_model(node, MODEL, prompt, source, share, text)
}

fn ask_model(node: &Node, model: &str, prompt: &str, source: &str, share: f64, text: Option<&str>) -> String {
    let answer = complete(node, model, prompt, 12);
    let entry = node.request(&answer.id);
    let sum: u64 = ["device", "staging", "drive", "peer", "computed"].iter().map(|s| tokens(&entry, s)).sum();
    assert_eq!(sum, answer.prompt_tokens(), "sources add up to the prompt: {entry}");
    let from = tokens(&entry, source);
    assert!(
        from as f64 >= share * sum as f64,
        "{}: {from} of {sum} from {source}, {entry}\n{}",
        node.name,
        node.tell()
    );
    if let Some(text) = text {
        assert_eq!(answer.text(), text, "greedy text differs, {entry}");
    }
    answer.text()
}

/// Drops what the device and the row area hold, through vLLM's own loopback route: the next hit is the tier's.
fn forget(node: &Node) {
    let url = format!("http://127.0.0.1:{}/reset_prefix_cache?reset_external=true", node.ports.base + 1);
    await_some("vLLM to reset its caches", PATIENCE, || {
        let response = agent().post(&url).send_empty().ok()?;
        if response.status() != 200 {
            return None;
        }
        let value: Value = response.into_body().read_json().ok()?;
        (value["success"] == true).then_some(())
    });
}

fn kill_engine(node: &mut Node) {
    let before = node.engine_view().unwrap()["engine_id"].clone();
    Node::signal(node.engine_pid(), Signal::SIGKILL);
    await_some("another engine", ENGINE_PATIENCE, || {
        let view = node.engine_view()?;
        (view["engine_id"] != before && view["phase"] == "ready").then_some(())
    });
    node.await_ready(ENGINE_PATIENCE);
}

fn pair(folder: &std::path::Path, profile: &str) -> (Node, Node) {
    let spec = |name| Spec { name, profile, settings: "", join: None, mutant: None };
    let mut a = Node::start(folder, &spec("a"));
    a.await_ready(ENGINE_PATIENCE);
    let mut b = Node::start(folder, &Spec { join: Some(a.invite()), ..spec("b") });
    b.await_ready(ENGINE_PATIENCE);
    a.await_peer();
    b.await_peer();
    (a, b)
}

#[test]
fn llama_pair() {
    if offline() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (mut a, mut b) = pair(folder.path(), "cpu-tiny");

    // A growing conversation: each turn computes its tail only.
    let mut prompt = words(1, 1200);
    let reply = ask(&a, &prompt, "computed", 0.99, None);
    prompt += &reply;
    prompt += &words(2, 60);
    let text = ask(&a, &prompt, "device", 0.8, None);
    ask(&a, &prompt, "device", 0.9, Some(&text));

    // Another process, another box: from the peer's drive.
    a.await_stored();
    b.await_index_of(&a);
    ask(&b, &prompt, "peer", 0.9, Some(&text));
    ask(&b, &prompt, "device", 0.9, Some(&text));

    // Another life of the engine: from the own drive.
    kill_engine(&mut a);
    ask(&a, &prompt, "drive", 0.9, Some(&text));

    three_sessions_at_once(&a);
    node_dies_and_vllm_serves(&mut a, &prompt, &text);
    damaged_rows_end_the_hit_exactly(&a);
    errors_pass_through(&a);
    every_endpoint_answers(&a);

    // Nothing is left, in whatever way it ended.
    assert_eq!(a.stop(), Some(0));
    a.await_gone();
    b.kill_keeper();
    b.await_gone();
}

/// Three returning prompts at once: each row is read once.
fn three_sessions_at_once(a: &Node) {
    let prompts: Vec<String> = (10..13).map(|seed| words(seed, 600)).collect();
    let texts: Vec<String> = prompts.iter().map(|p| ask(a, p, "computed", 0.99, None)).collect();
    a.await_stored();
    forget(a);
    let loaded = a.metric("sparkkv_store_rows_loaded_total");
    let answers: Vec<Answer> = std::thread::scope(|scope| {
        let asked: Vec<_> = prompts.iter().map(|p| scope.spawn(move || complete(a, MODEL, p, 12))).collect();
        asked.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let mut drive = 0;
    for (answer, text) in answers.iter().zip(&texts) {
        assert_eq!(&answer.text(), text);
        drive += tokens(&a.request(&answer.id), "drive");
    }
    assert!(drive > 0);
    let rows = a.metric("sparkkv_store_rows_loaded_total") - loaded;
    assert_eq!(rows as u64, drive / BLOCK, "each row is read once");
}

/// The node is killed: vLLM itself goes on, and uses the drive again once the node is back.
fn node_dies_and_vllm_serves(a: &mut Node, prompt: &str, text: &str) {
    forget(a);
    let (node, engine) = (a.node_pid(), a.engine_view().unwrap()["engine_id"].clone());
    Node::signal(node, Signal::SIGKILL);
    let direct = json!({"model": MODEL, "prompt": words(77, 300), "max_tokens": 4, "temperature": 0});
    let url = format!("http://127.0.0.1:{}/v1/completions", a.ports.base + 1);
    assert_eq!(agent().post(&url).send_json(&direct).unwrap().status(), 200, "vLLM serves without the node");
    await_some("another node process", PATIENCE, || (a.node_pid() != node).then_some(()));
    a.await_ready(PATIENCE);
    assert_eq!(a.engine_view().unwrap()["engine_id"], engine, "the engine lived on");
    ask(a, prompt, "drive", 0.9, Some(text));
}

/// Fifty prompts, one random row of each damaged on the drive: the hit ends exactly there, the text is the same.
fn damaged_rows_end_the_hit_exactly(a: &Node) {
    let folder = a.root.join("state/segments");
    let rows = || spark_kv::store::inspect(&folder).unwrap();
    a.await_stored();
    let mut known: std::collections::HashSet<_> = rows().iter().map(|r| r.key).collect();
    let mut prompts = Vec::new();
    for seed in 100..150 {
        let prompt = words(seed, 230);
        let text = ask(a, &prompt, "computed", 0.99, None);
        a.await_stored();
        // What this prompt added, in prefix order; on the drive, rows of one job lie as their writes came.
        let mut chain: Vec<_> = rows().into_iter().filter(|r| known.insert(r.key)).collect();
        chain.sort_by_key(|r| r.position);
        assert!(chain.len() >= 4, "{} rows of a prompt", chain.len());
        prompts.push((prompt, text, chain));
    }
    forget(a);
    let damaged = a.metric("sparkkv_store_rows_damaged_total");
    let mut broken = Vec::new();
    for (n, (_, _, chain)) in prompts.iter().enumerate() {
        let row = &chain[(n * 7 + 3) % chain.len()];
        let file = fs::File::options().read(true).write(true).open(&row.file).unwrap();
        let at = row.payload_offset + (n as u64 * 7919) % u64::from(row.payload_length);
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
        file.sync_all().unwrap();
        broken.push(u64::from(row.position) - BLOCK);
    }
    for ((prompt, text, _), good) in prompts.iter().zip(broken) {
        let answer = complete(a, MODEL, prompt, 12);
        assert_eq!(&answer.text(), text);
        assert_eq!(answer.cached_tokens(), good, "cached tokens end at the damage");
    }
    assert_eq!(a.metric("sparkkv_store_rows_damaged_total") - damaged, 50.0);
}

fn errors_pass_through(a: &Node) {
    let long =
        post(a, "/v1/completions", &json!({"model": MODEL, "prompt": words(5, 40_000), "max_tokens": 1}));
    assert_eq!(long.code, 400, "{long:?}");
    assert!(long.body["error"]["message"].as_str().unwrap().contains("maximum"), "{long:?}");
    let unknown = post(a, "/v1/completions", &json!({"model": "nobody", "prompt": "x"}));
    assert_eq!(unknown.code, 404, "{unknown:?}");
}

fn every_endpoint_answers(a: &Node) {
    let messages = json!([{"role": "user", "content": words(9, 200)}]);
    let chat = post(
        a,
        "/v1/chat/completions",
        &json!({"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0}),
    );
    assert_eq!(chat.code, 200, "{chat:?}");
    assert_eq!(tokens(&a.request(&chat.id), "prompt"), chat.prompt_tokens());
    let anthropic = post(a, "/v1/messages", &json!({"model": MODEL, "messages": messages, "max_tokens": 4}));
    assert_eq!(anthropic.code, 200, "{anthropic:?}");
    assert_eq!(anthropic.body["type"], "message");
    let responses =
        post(a, "/v1/responses", &json!({"model": MODEL, "input": words(9, 50), "max_output_tokens": 4}));
    assert_eq!(responses.code, 200, "{responses:?}");
    assert!(tokens(&a.request(&responses.id), "prompt") > 0);
    let tokenized = post(a, "/tokenize", &json!({"model": MODEL, "prompt": "river stone"}));
    assert!(tokenized.body["count"].as_u64().unwrap() > 0, "{tokenized:?}");
    let models = get_json(&a.url("/v1/models")).unwrap();
    assert_eq!(models["data"][0]["id"], MODEL);
}

/// How it stands with exact tokens, once that is settled.
/// What the engine says of its device is what it has there: with nothing on the device all is on the drive.
fn device_is_heard(node: &Node, prompt: &str) {
    let reach = |id: &str| node.request(id)["decision"]["boxes"][0]["reach"].clone();
    let asked = |prompt: &str| {
        let body = json!({"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0});
        let answer = place(node, "/v1/completions", &body);
        assert_eq!(answer.code, 200, "{answer:?}");
        answer
    };
    let third = asked(prompt);
    let whole = (third.prompt_tokens() - 1) / BLOCK * BLOCK;
    assert_eq!((third.cached_tokens(), &reach(&third.id)["device"]), (whole, &json!(whole)), "{third:?}");
    let longer = asked(&format!("{prompt} and {}", words(93, 200)));
    let device = reach(&longer.id)["device"].as_u64().unwrap();
    assert!(device >= whole && device == longer.cached_tokens(), "{device} of {longer:?}");
    assert_eq!(longer.foretold, Some(device), "{longer:?}");
    assert_eq!(node.metric("sparkkv_events_live"), 1.0);
    forget(node);
    // The engine tells of it with its next step.
    asked("who is there?");
    let few = (whole / BLOCK) as f64 / 2.0;
    await_some("an empty device", PATIENCE, || (node.metric("sparkkv_events_blocks") < few).then_some(()));
    let fourth = asked(prompt);
    let there = reach(&fourth.id);
    assert_eq!((&there["device"], &there["own"]), (&json!(0), &json!(whole)), "{there}");
    assert_eq!(fourth.cached_tokens(), whole);
}

fn settled_tokens(node: &Node) -> Value {
    await_some("tokens to be proved or not", PATIENCE, || {
        let tokens = node.state()?["node"]["tokens"].clone();
        let why = tokens["why"].as_str()?;
        (tokens["exact"] == true
            || !(why.is_empty() || why.contains("being proved") || why.contains("engine is")))
        .then_some(tokens)
    })
}

/// A chat template for the tiny model's special tokens.
const TEMPLATE: &str = "{{ bos_token }}{% if tools %}<|system|>{{ tools | tojson(indent=1) }}<|eos|>{% endif %}\
    {% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}\
    {{ m.reasoning_content if m.reasoning_content is defined }}<|eos|>{% endfor %}\
    {% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}{% endif %}";

/// Exact tokens are proved against the engine at its start and right in every request's record; what is foreseen to be
/// cached is what the engine then has. They are given up, loudly, when the template on the disk is no longer the one
/// that the engine runs with.
#[test]
fn tokens_are_the_engines() {
    if offline() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let template = folder.path().join("chat.jinja");
    fs::write(&template, TEMPLATE).unwrap();
    let settings = format!(
        "[engine]\nextra_args = [\"--enforce-eager\", \"--dtype\", \"float32\", \"--chat-template\", {template:?}]\n"
    );
    let spec = Spec { name: "exact", profile: "cpu-tiny", settings: &settings, join: None, mutant: None };
    let mut node = Node::start(folder.path(), &spec);
    node.await_ready(ENGINE_PATIENCE);
    let proved = settled_tokens(&node);
    assert_eq!(proved["exact"], true, "{proved}");
    assert!(proved["proved"].as_u64().unwrap() >= 30, "{proved}");

    let user = json!({"role": "user", "content": words(91, 40)});
    let tool = json!({"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}});
    let described = json!({"name": "look", "input_schema": {"properties": {"at": {"type": "string"}}}});
    for (path, body) in [
        ("/v1/chat/completions", json!({"messages": [user]})),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "system", "content": "be brief"}, user], "tools": [tool], "tool_choice": "none"}),
        ),
        (
            "/v1/messages",
            json!({"messages": [user], "system": "be brief", "tools": [described], "tool_choice": {"type": "none"}}),
        ),
        ("/v1/completions", json!({"prompt": "a<|user|>b <|eos|>"})),
        ("/v1/completions", json!({"prompt": [5, 6, 7, 8, 9]})),
    ] {
        let mut body = body;
        (body["model"], body["max_tokens"]) = (MODEL.into(), 2.into());
        let answer = post(&node, path, &body);
        assert_eq!(answer.code, 200, "{path}: {answer:?}");
        let entry = node.request(&answer.id);
        assert!(entry["prompt_tokens"].as_u64().is_some_and(|n| n > 0), "{path}: {entry}");
        assert_eq!(entry["foreseen_tokens"], entry["prompt_tokens"], "{path}: {entry}");
        assert_eq!(tokens(&entry, "prompt"), entry["foreseen_tokens"].as_u64().unwrap(), "{path}: {entry}");
    }

    // What lies on the drive is what the engine finds: nothing before, all whole rows after.
    let prompt = words(92, 900);
    let first = node.request(&complete(&node, MODEL, &prompt, 4).id);
    assert_eq!(first["foreseen_cached"], 0, "{first}");
    node.await_stored();
    forget(&node);
    let second = node.request(&complete(&node, MODEL, &prompt, 4).id);
    let whole = (second["prompt_tokens"].as_u64().unwrap() - 1) / BLOCK * BLOCK;
    assert!(whole > 5 * BLOCK, "{second}");
    assert_eq!(
        (second["foreseen_cached"].as_u64(), second["cached_tokens"].as_u64()),
        (Some(whole), Some(whole)),
        "{second}"
    );
    assert_eq!(settled_tokens(&node)["exact"], true);

    device_is_heard(&node, &prompt);

    // The engine lives on with the template it has read.
    fs::write(&template, TEMPLATE.replace("<|eos|>{% endfor", " <|eos|>{% endfor")).unwrap();
    let before = node.node_pid();
    Node::signal(before, Signal::SIGKILL);
    await_some("another node process", PATIENCE, || (node.node_pid() != before).then_some(()));
    node.await_ready(PATIENCE);
    let differs = settled_tokens(&node);
    assert_eq!(differs["exact"], false, "{differs}");
    assert!(differs["why"].as_str().unwrap().contains("probe"), "{differs}");
    await_some("the alert", PATIENCE, || node.state()?.to_string().contains("tokens-differ").then_some(()));
    await_some("the device again", PATIENCE, || (node.metric("sparkkv_events_blocks") > 5.0).then_some(()));
    assert_eq!(node.metric("sparkkv_events_live"), 1.0, "a new node asks for everything that it missed");
    let guessed = node.request(&complete(&node, MODEL, "after all", 2).id);
    assert_eq!(guessed["foreseen_tokens"], Value::Null, "{guessed}");
    assert!(guessed["unforeseen"].as_str().unwrap().contains("probe"), "{guessed}");
    assert_eq!(node.stop(), Some(0));
    node.await_gone();
}

/// Hits larger than the row area: cut to the budget, served, each row read once, also three at a time.
#[test]
fn hits_larger_than_the_row_area_are_served() {
    if offline() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let settings = "[engine]\nrow_area = \"12MiB\"\n"; // 24 rows of 512 KiB
    let spec = Spec { name: "small", profile: "cpu-tiny", settings, join: None, mutant: None };
    let mut node = Node::start(folder.path(), &spec);
    node.await_ready(ENGINE_PATIENCE);
    let prompts: Vec<String> = (30..33).map(|seed| words(seed, 2400)).collect();
    let texts: Vec<String> = prompts.iter().map(|p| ask(&node, p, "computed", 0.99, None)).collect();
    node.await_stored();
    forget(&node);
    ask(&node, &prompts[0], "drive", 0.2, Some(&texts[0]));
    forget(&node);
    let loaded = node.metric("sparkkv_store_rows_loaded_total");
    let answers: Vec<Answer> = std::thread::scope(|scope| {
        let node = &node;
        let asked: Vec<_> =
            prompts.iter().map(|p| scope.spawn(move || complete(node, MODEL, p, 12))).collect();
        asked.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let mut drive = 0;
    for (answer, text) in answers.iter().zip(&texts) {
        assert_eq!(&answer.text(), text);
        drive += tokens(&node.request(&answer.id), "drive");
    }
    let rows = (node.metric("sparkkv_store_rows_loaded_total") - loaded) as u64;
    assert!(rows > 0);
    assert_eq!(rows, drive / BLOCK, "each row is read once");
    assert_eq!(node.stop(), Some(0));
    node.await_gone();
}

/// A model with state beside attention: both groups come back; where a snapshot is missing, the one before is used.
#[test]
fn hybrid_pair() {
    if offline() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (mut a, b) = pair(folder.path(), "cpu-tiny-hybrid");
    let prompt = words(1, 900);
    let text = ask_model(&a, HYBRID, &prompt, "computed", 0.99, None);
    let groups = |node: &Node| {
        let mut groups: Vec<u32> = spark_kv::store::inspect(&node.root.join("state/segments"))
            .unwrap()
            .iter()
            .map(|r| r.key.group.0)
            .collect();
        groups.sort_unstable();
        groups.dedup();
        groups
    };
    assert_eq!(groups(&a).len(), 2, "both groups are on the drive");

    a.await_stored();
    b.await_index_of(&a);
    ask_model(&b, HYBRID, &prompt, "peer", 0.8, Some(&text));
    kill_engine(&mut a);
    ask_model(&a, HYBRID, &prompt, "drive", 0.8, Some(&text));

    // A branch in mid-prompt begins at a snapshot before it. What it computed comes back as the engine's own cache has
    // it. (Its first answer is no measure: vLLM cuts that prefill at the branch, and where a prefill of this family is
    // cut moves its log-probabilities by up to 0.04, also without any plugin.)
    let half = prompt.len() / 2;
    let branch = format!("{}{}", &prompt[..half], words(8, 200));
    ask_model(&a, HYBRID, &branch, "computed", 0.3, None);
    let device = ask_model(&a, HYBRID, &branch, "device", 0.8, None);
    a.await_stored();
    forget(&a);
    ask_model(&a, HYBRID, &branch, "drive", 0.8, Some(&device));

    // The last snapshot is damaged: the one before is used, or all is computed; the text is the same.
    let last = spark_kv::store::inspect(&a.root.join("state/segments")).unwrap();
    let attention = last
        .iter()
        .map(|r| r.key.group.0)
        .max_by_key(|g| last.iter().filter(|r| r.key.group.0 == *g).count());
    let state = last.iter().filter(|r| Some(r.key.group.0) != attention);
    let victim = state.max_by_key(|r| r.position).expect("a state row").clone();
    let file = fs::File::options().read(true).write(true).open(&victim.file).unwrap();
    file.write_all_at(&[0xA5; 64], victim.payload_offset).unwrap();
    file.sync_all().unwrap();
    forget(&a);
    let answer = complete(&a, HYBRID, &prompt, 12);
    assert_eq!(answer.text(), text);
    assert!(answer.cached_tokens() < u64::from(victim.position), "{answer:?}");

    drop(b);
    assert_eq!(a.stop(), Some(0));
    a.await_gone();
}

/// A plugin that captures wrong bytes is blessed by every checksum. The canary must see it, turn the cache off, and say
/// so; the engine goes on serving without it.
fn canary_sees(mutant: &str, profile: &str) {
    if offline() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let tests = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/plugin/broken");
    // A name of its own: what is looked for in shared memory goes by it, and two of these tests run at a time.
    let name = mutant.to_lowercase();
    let plugin = folder.path().join(&name).join("run/plugin");
    let settings = format!(
        "[engine.env]\nVLLM_CPU_OMP_THREADS_BIND = \"nobind\"\nSPARK_KV_MUTANT = \"{mutant}\"\nPYTHONPATH = \"{tests}:{}\"\n",
        plugin.display()
    );
    let mut node = Node::start(
        folder.path(),
        &Spec { name: &name, profile, settings: &settings, join: None, mutant: None },
    );
    node.await_ready(ENGINE_PATIENCE);
    let state = node.state().unwrap();
    assert_eq!(state["node"]["cache"]["on"], false, "{mutant} went unnoticed: {state}\n{}", node.tell());
    let alerts = get_json(&node.url("/api/v1/alerts")).unwrap().to_string();
    assert!(alerts.contains("tier-off"), "{alerts}");
    let model = profile.replace("cpu-tiny-hybrid", "tiny-lfm2").replace("cpu-tiny", "tiny-llama");
    let first = complete(&node, &model, &words(3, 300), 8);
    let again = complete(&node, &model, &words(3, 300), 8);
    assert_eq!(first.text(), again.text());
    assert_eq!(node.stop(), Some(0));
    node.await_gone();
}

#[test]
fn canary_sees_a_row_captured_before_its_copy() {
    canary_sees("CaptureEarly", "cpu-tiny");
}

#[test]
fn canary_sees_a_dropped_page() {
    canary_sees("PageDropped", "cpu-tiny");
}

#[test]
fn canary_sees_blocks_shifted_by_one() {
    canary_sees("ShiftByOne", "cpu-tiny");
}

#[test]
fn canary_sees_a_stale_row() {
    canary_sees("StaleRow", "cpu-tiny");
}

#[test]
fn canary_sees_the_wrong_group() {
    canary_sees("WrongGroup", "cpu-tiny-hybrid");
}
