//! Failures on command: a real mock engine process, each failure as a client meets it.

#![expect(clippy::unwrap_used, reason = "helpers of tests, which fail by panicking")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(30);

/// A mock engine that says its words fast.
struct Engine {
    child: Child,
    address: String,
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Engine {
    fn start(shape: &str) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
        let child = Command::new(env!("CARGO_BIN_EXE_spark-kv"))
            .args(["mock-engine", "--port", &port, "--shape", shape])
            .env_clear()
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let engine = Self { child, address: format!("127.0.0.1:{port}") };
        let begin = Instant::now();
        while TcpStream::connect(&engine.address).is_err() {
            assert!(begin.elapsed() < LIMIT, "it does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        engine
    }

    fn quick() -> Self {
        Self::start(r#"{"prefill_us_per_token": 1, "itl_us": 100, "rows": 8, "row_bytes": 4096}"#)
    }

    /// Sends a request; what comes back is still to be read.
    fn send(&self, method: &str, path: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: mock\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream
    }

    /// Status, head and body; a connection that breaks ends the body.
    fn ask(&self, method: &str, path: &str, body: &str) -> (u16, String, String) {
        let mut bytes = Vec::new();
        let _ = self.send(method, path, body).read_to_end(&mut bytes);
        let answer = String::from_utf8_lossy(&bytes).into_owned();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
        let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
        (status, head.to_ascii_lowercase(), body.to_owned())
    }

    fn order(&self, order: Value) -> Value {
        let (status, _, body) = self.ask("POST", "/mock/faults", &order.to_string());
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).unwrap()
    }

    fn state(&self) -> Value {
        serde_json::from_str(&self.ask("GET", "/mock/state", "").2).unwrap()
    }

    fn heal(&self) {
        assert_eq!(self.ask("DELETE", "/mock/faults", "").0, 200);
    }

    /// How the process ended.
    fn ended(&mut self) -> Option<i32> {
        let begin = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.signal();
            }
            assert!(begin.elapsed() < LIMIT, "it lives");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn chat(words: u32, stream: bool) -> String {
    let messages = json!([{"role": "user", "content": "say something"}]);
    json!({"messages": messages, "max_tokens": words, "stream": stream, "ignore_eos": true}).to_string()
}

const CHAT: &str = "/v1/chat/completions";

#[test]
fn the_next_answers_are_errors_and_then_all_is_well() {
    let engine = Engine::quick();
    for (status, after) in [(429, Some(7)), (500, None), (503, None)] {
        engine.order(json!({"answers": {"status": status, "times": 2, "retry_after_s": after}}));
        for _ in 0..2 {
            let (got, head, body) = engine.ask("POST", CHAT, &chat(3, true));
            assert_eq!(got, status, "{body}");
            assert_eq!(head.contains("retry-after: 7"), after.is_some(), "{head}");
            assert!(serde_json::from_str::<Value>(&body).unwrap().get("error").is_some(), "{body}");
        }
        assert_eq!(engine.ask("POST", CHAT, &chat(3, true)).0, 200);
    }
    for order in
        [json!({"crush": true}), json!({"speed": 0}), json!({"answers": {"status": 200, "times": 1}})]
    {
        assert_eq!(engine.ask("POST", "/mock/faults", &order.to_string()).0, 400, "{order}");
    }
}

#[test]
fn a_stream_breaks_off_in_the_middle_without_its_end() {
    let engine = Engine::quick();
    engine.order(json!({"cut": {"after_words": 3, "times": 1}}));
    let (status, _, cut) = engine.ask("POST", CHAT, &chat(20, true));
    assert_eq!(status, 200);
    assert!(cut.matches("\"content\":").count() >= 3 && !cut.contains("[DONE]"), "{cut}");
    let (_, _, whole) = engine.ask("POST", CHAT, &chat(20, true));
    assert!(whole.matches("\"content\":").count() >= 20 && whole.contains("[DONE]"), "{whole}");
    assert_eq!(engine.state()["running"], 0, "what broke off runs no more");
}

#[test]
fn an_engine_that_hangs_says_that_it_is_healthy_and_goes_on_when_it_is_healed() {
    let engine = Engine::quick();
    engine.order(json!({"hang": true}));
    let hanging = engine.send("POST", CHAT, &chat(3, true));
    let begin = Instant::now();
    while engine.state()["waiting"].as_u64().unwrap() + engine.state()["running"].as_u64().unwrap() == 0 {
        assert!(begin.elapsed() < LIMIT, "it has not come");
    }
    let steps = engine.state()["steps"].clone();
    for _ in 0..5 {
        assert_eq!(engine.ask("GET", "/health", "").0, 200);
    }
    assert!(engine.state()["steps"].as_u64() <= steps.as_u64().map(|n| n + 1), "nothing gets on");
    engine.heal();
    let text: String = BufReader::new(hanging).lines().map_while(Result::ok).collect();
    assert!(text.contains("[DONE]"), "{text}");
}

#[test]
fn an_engine_crashes_at_once_or_in_the_middle_of_an_answer() {
    let mut engine = Engine::quick();
    engine.order(json!({"crash_after_words": 5}));
    let (_, _, body) = engine.ask("POST", CHAT, &chat(50, true));
    assert!(!body.contains("[DONE]"), "{body}");
    assert_eq!(engine.ended(), Some(nix::libc::SIGABRT));
    let mut engine = Engine::quick();
    engine.ask("POST", "/mock/faults", r#"{"crash": true}"#);
    assert_eq!(engine.ended(), Some(nix::libc::SIGABRT));
}

#[test]
fn a_prompt_costs_steps_by_what_is_not_cached() {
    let engine = Engine::start(
        r#"{"prefill_us_per_token": 1, "itl_us": 1, "rows": 8, "row_bytes": 4096, "max_num_batched_tokens": 256}"#,
    );
    let ask = |tokens: u32| {
        let prompt: Vec<u32> = (1..=tokens).collect();
        let body = json!({"prompt": prompt, "max_tokens": 1}).to_string();
        let before = engine.state()["steps"].as_u64().unwrap();
        let (status, _, body) = engine.ask("POST", "/v1/completions", &body);
        assert_eq!(status, 200, "{body}");
        let body: Value = serde_json::from_str(&body).unwrap();
        let cached = body["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        (engine.state()["steps"].as_u64().unwrap() - before, cached)
    };
    assert_eq!(ask(2048), (8, 0), "eight chunks");
    assert_eq!(ask(2048), (1, 2032), "all but the last block are there");
    assert_eq!(ask(2048 + 512), (2, 2048));
}
