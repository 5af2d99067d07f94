//! The mock engine against a real door and a real store: what it says is the same wherever its rows came from.

#![expect(clippy::unwrap_used, reason = "helpers of tests, which fail by panicking")]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use clap::Parser;
use sha2::{Digest, Sha256};
use spark_kv::api::local::{Door, Fingerprint, Options, ROW_BUDGET_PERCENT, Report};
use spark_kv::base::block::Namespace;
use spark_kv::base::clock::Clock;
use spark_kv::base::units::Bytes;
use spark_kv::meter::Meter;
use spark_kv::mock::engine::{Ask, Event};
use spark_kv::mock::{self, Mock};
use spark_kv::settings::Io;
use spark_kv::store::{self, DiskKind, Store};
use spark_kv::tasks::Tasks;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::broadcast;

const LIMIT: Duration = Duration::from_secs(30);

/// A node's half: store and door, in a given folder so that it can come back.
struct Node {
    door: Door,
    store: Store,
    tasks: Tasks,
}

impl Node {
    async fn start(folder: &Path) -> Self {
        let (tasks, meter, clock) = (Tasks::new(), Meter::new(), Clock::real());
        let options = store::Options {
            folder: folder.join("segments"),
            capacity: Bytes::mib(64),
            segment: Bytes::mib(2),
            io: Io::Auto,
            queue_depth: 8,
        };
        let store = Store::open(options, DiskKind::Real, clock.clone(), &meter).unwrap().0;
        let fingerprint: Fingerprint = Arc::new(|hello| {
            let namespace = Namespace(Sha256::digest(format!("{:?}", hello.groups)).into());
            Box::pin(async move { Ok((namespace, BTreeMap::new())) })
        });
        let options = Options {
            generation: 1,
            fingerprint,
            owner_of: Arc::new(|_| Some("".into())),
            // Slow, so that no load is too late on a busy machine.
            prefill_tokens_per_s: 100,
            row_budget_percent: ROW_BUDGET_PERCENT,
            tier_on: true,
        };
        let socket = folder.join("engine.sock");
        let door = Door::start(socket, store.clone(), None, options, clock, &tasks, &meter).await.unwrap();
        Self { door, store, tasks }
    }

    async fn stop(self) {
        assert_eq!(self.tasks.stop(LIMIT).await, 0);
        self.store.close().await;
    }
}

async fn engine(folder: &Path, engine_id: &str, shape: &str, tasks: &Tasks) -> Mock {
    let socket = folder.join("engine.sock");
    let words = [
        "--socket",
        socket.to_str().unwrap(),
        "--engine-id",
        engine_id,
        "--settings",
        "{}",
        "--shape",
        shape,
    ];
    let mock = Mock::start(&mock::Options::try_parse_from(words).unwrap(), tasks).await.unwrap();
    until("the node", || mock.engine.has_node()).await;
    mock
}

async fn until(what: &str, mut is: impl FnMut() -> bool) {
    for _ in 0..4000 {
        if is() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("{what} did not come");
}

fn prompt(seed: u32, tokens: u32) -> Vec<u32> {
    (0..tokens).map(|n| (n + 1).wrapping_mul(2_654_435_761).wrapping_add(seed) >> 4).collect()
}

/// What a request says, and how many of its tokens were cached.
async fn ask(mock: &Mock, id: &str, prompt: &[u32]) -> (String, usize) {
    let ask = Ask { id: id.into(), prompt: prompt.to_vec(), max_tokens: 12, to_the_limit: true };
    let mut events = mock.engine.submit(ask);
    let (mut text, mut cached) = (String::new(), 0);
    loop {
        match tokio::time::timeout(LIMIT, events.recv()).await.expect("it hangs").expect("it ends early") {
            Event::Begin { cached: n } => cached = n,
            Event::Word(word) => text.push_str(word.text),
            Event::End { .. } => return (text, cached),
        }
    }
}

/// Drops device and rows, once no transfer holds any.
async fn forget(mock: &Mock) {
    until("an engine without transfers", || mock.engine.reset()).await;
}

async fn report(reports: &mut broadcast::Receiver<Report>) -> Report {
    tokio::time::timeout(LIMIT, reports.recv()).await.expect("no report").unwrap()
}

fn wrong(mock: &Mock) -> u64 {
    mock.engine.counts().wrong_rows.load(Ordering::Relaxed)
}

const SMALL: &str =
    r#"{"rows": 64, "row_bytes": 8192, "device_blocks": 128, "prefill_us_per_token": 1, "itl_us": 1}"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_prompt_says_the_same_computed_from_device_from_staging_and_from_the_drive() {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::start(folder.path()).await;
    let tasks = Tasks::new();
    let mock = engine(folder.path(), "spark-a-1", SMALL, &tasks).await;
    let mut reports = node.door.reports();
    let long = prompt(1, 330);

    let (computed, cached) = ask(&mock, "one", &long).await;
    assert_eq!(cached, 0);
    let said = report(&mut reports).await;
    assert_eq!((said.request.as_str(), said.sources.prompt, said.sources.computed), ("one", 330, 330));
    assert_eq!(said.chain.len(), 20);
    let (device, cached) = ask(&mock, "two", &long).await;
    assert_eq!((device.as_str(), cached), (computed.as_str(), 320));
    assert_eq!(report(&mut reports).await.sources.device, 320);

    forget(&mock).await;
    let (drive, cached) = ask(&mock, "three", &long).await;
    assert_eq!((drive.as_str(), cached), (computed.as_str(), 320));
    let said = report(&mut reports).await.sources;
    assert_eq!((said.drive, said.device, said.computed), (320, 0, 10));
    assert!(mock.engine.counts().checked_rows.load(Ordering::Relaxed) >= 20);

    // Another prompt with the same beginning shares it, and ends otherwise.
    let mut branch = long[..160].to_vec();
    branch.extend(prompt(2, 90));
    let (other, cached) = ask(&mock, "four", &branch).await;
    assert_eq!(cached, 160);
    assert_ne!(other, computed);
    assert_eq!(wrong(&mock), 0);
    tasks.stop(LIMIT).await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_engine_finds_what_the_one_before_stored_and_says_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::start(folder.path()).await;
    let mut texts = Vec::new();
    for (engine_id, due) in [("spark-a-1", 0), ("spark-a-2", 320)] {
        let tasks = Tasks::new();
        let mock = engine(folder.path(), engine_id, SMALL, &tasks).await;
        let (text, cached) = ask(&mock, "r", &prompt(3, 325)).await;
        assert_eq!(cached, due, "{engine_id}");
        texts.push(text);
        forget(&mock).await;
        assert_eq!(wrong(&mock), 0);
        tasks.stop(LIMIT).await;
    }
    assert_eq!(texts[0], texts[1]);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hits_larger_than_the_rows_are_cut_and_three_at_once_are_served() {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::start(folder.path()).await;
    let tasks = Tasks::new();
    let shape =
        r#"{"rows": 20, "row_bytes": 8192, "device_blocks": 256, "prefill_us_per_token": 1, "itl_us": 1}"#;
    let mock = engine(folder.path(), "spark-a-1", shape, &tasks).await;
    let mut texts = Vec::new();
    for seed in 0..3 {
        // Stores are as large as the rows allow: each pass stores what the one before could not.
        for pass in 0..6 {
            let long = prompt(seed, 16 * 30 + 5);
            texts.push(ask(&mock, &format!("{seed}-{pass}"), &long).await.0);
            forget(&mock).await;
        }
    }
    let prompts: Vec<Vec<u32>> = (0..3).map(|seed| prompt(seed, 16 * 30 + 5)).collect();
    let (a, b, c) = tokio::join!(
        ask(&mock, "a", &prompts[0]),
        ask(&mock, "b", &prompts[1]),
        ask(&mock, "c", &prompts[2])
    );
    for (seed, (text, cached)) in [a, b, c].into_iter().enumerate() {
        assert_eq!(text, texts[seed * 6]);
        assert!(cached <= 15 * 16, "{cached} tokens are more than the rows that hits may hold");
    }
    let (_, cached) = ask(&mock, "alone", &[&prompts[0][..16 * 30], &[1, 2, 3]].concat()).await;
    assert!(cached > 0);
    assert_eq!(wrong(&mock), 0);
    tasks.stop(LIMIT).await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_states_a_hit_ends_at_a_state() {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::start(folder.path()).await;
    let tasks = Tasks::new();
    let shape = r#"{"rows": 64, "row_bytes": 8192, "device_blocks": 128, "groups": "attention_and_state",
        "state_every": 4, "prefill_us_per_token": 1, "itl_us": 1}"#;
    let mock = engine(folder.path(), "spark-a-1", shape, &tasks).await;
    let long = prompt(5, 16 * 18 + 3);
    let (computed, _) = ask(&mock, "one", &long).await;
    forget(&mock).await;
    assert_eq!(ask(&mock, "two", &long).await, (computed, 16 * 18), "the last whole block has a state");
    forget(&mock).await;
    // It leaves the prompt in the middle of the eleventh block: the state at the eighth is the last before it.
    let mut branch = long[..16 * 10 + 7].to_vec();
    branch.extend(prompt(6, 60));
    let (_, cached) = ask(&mock, "three", &branch).await;
    assert_eq!(cached, 16 * 8);
    assert_eq!(wrong(&mock), 0);
    tasks.stop(LIMIT).await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_serves_without_its_node_and_picks_it_up_again() {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::start(folder.path()).await;
    let tasks = Tasks::new();
    let mock = engine(folder.path(), "spark-a-1", SMALL, &tasks).await;
    let long = prompt(7, 200);
    let (computed, _) = ask(&mock, "one", &long).await;
    forget(&mock).await;
    node.stop().await;
    until("the loss", || !mock.engine.has_node()).await;
    assert_eq!(ask(&mock, "two", &long).await, (computed.clone(), 0));
    forget(&mock).await;
    let node = Node::start(folder.path()).await;
    until("the node again", || mock.engine.has_node()).await;
    assert_eq!(ask(&mock, "three", &long).await, (computed, 192));
    assert_eq!(wrong(&mock), 0);
    tasks.stop(LIMIT).await;
    node.stop().await;
}

/// One HTTP exchange: status and body.
async fn http(mock: &Mock, method: &str, path: &str, body: &str) -> (u16, String) {
    let mut stream = tokio::net::TcpStream::connect(mock.address).await.unwrap();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: mock\r\nX-Request-Id: abc\r\nConnection: close\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = String::new();
    tokio::time::timeout(LIMIT, stream.read_to_string(&mut answer)).await.expect("it hangs").unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_faces_answer_in_their_own_shape() {
    let folder = tempfile::tempdir().unwrap();
    let tasks = Tasks::new();
    let words = ["--settings", r#"{"max_model_len": 500, "itl_us": 1, "prefill_us_per_token": 1}"#];
    let mock = Mock::start(&mock::Options::try_parse_from(words).unwrap(), &tasks).await.unwrap();
    let chat = r#"{"model": "mock", "messages": [{"role": "user", "content": "hello there"}]}"#;
    let (status, body) = http(&mock, "POST", "/v1/chat/completions", chat).await;
    let body: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, body["id"].as_str()), (200, Some("chatcmpl-abc")));
    let text = body["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    assert!(text.len() > 10 && body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0);

    let streamed = r#"{"stream": true, "stream_options": {"include_usage": true}, "messages": [{"role": "user", "content": "hello there"}]}"#;
    let (_, body) = http(&mock, "POST", "/v1/chat/completions", streamed).await;
    let data: Vec<serde_json::Value> = body
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .filter_map(|data| serde_json::from_str(data).ok())
        .collect();
    let said: String = data.iter().filter_map(|d| d["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(said, text, "the stream says what the whole answer says");
    assert!(data.last().unwrap()["usage"]["completion_tokens"].as_u64() > Some(0));
    assert!(body.contains("data: [DONE]"));

    let messages =
        r#"{"max_tokens": 5, "stream": true, "messages": [{"role": "user", "content": "hello there"}]}"#;
    let (_, body) = http(&mock, "POST", "/v1/messages", messages).await;
    for event in ["message_start", "content_block_delta", "message_delta", "message_stop"] {
        assert!(body.contains(&format!("event: {event}\n")), "{event} in {body}");
    }
    let (_, body) = http(&mock, "POST", "/v1/responses", r#"{"input": "hello there", "stream": true}"#).await;
    assert!(body.contains("event: response.completed\n"), "{body}");
    let (_, body) =
        http(&mock, "POST", "/v1/completions", r#"{"prompt": [1, 2], "max_tokens": 3, "logprobs": 5}"#).await;
    let body: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert!(body["choices"][0]["logprobs"]["token_logprobs"][0].is_f64(), "{body}");

    for (path, body, due, said) in [
        ("/v1/chat/completions", "{", 400, "not JSON"),
        ("/v1/chat/completions", r#"{"model": "x", "messages": [{"content": "a"}]}"#, 404, "NotFoundError"),
        ("/v1/messages", r#"{"model": "x", "messages": [{"content": "a"}]}"#, 404, "not_found_error"),
        ("/v1/completions", r#"{"prompt": "a", "max_tokens": 501}"#, 400, "maximum context length"),
    ] {
        let (status, body) = http(&mock, "POST", path, body).await;
        assert!(status == due && body.contains(said), "{status} {body}");
    }
    let (_, tokens) = http(&mock, "POST", "/tokenize", r#"{"prompt": "hello there"}"#).await;
    assert!(tokens.contains("\"count\":2"), "{tokens}");
    let (_, metrics) = http(&mock, "GET", "/metrics", "").await;
    assert!(metrics.contains("\nmock_wrong_rows_total 0\n"), "{metrics}");
    assert_eq!(http(&mock, "GET", "/health", "").await.0, 200);
    let (_, reset) = http(&mock, "POST", "/reset_prefix_cache?reset_external=true", "").await;
    assert!(reset.contains("true"));
    drop(folder);
    tasks.stop(LIMIT).await;
}
