//! Waiting for room at an engine: who goes first, who is turned away, what a client sees meanwhile.

use spark_kv::router::InLine;

use super::*;

async fn narrow(tasks: &Tasks, url: &str, places: u32, queue: u32) -> Node {
    Node::start(tasks, Setup { admission: Admission { places, queue }, ..Setup::new("a", url) }).await
}

/// Waits until so many are in line.
async fn in_line(node: &Node, interactive: usize, normal: usize, batch: usize) {
    let wanted = InLine { interactive, normal, batch };
    let waiting = async {
        while node.router.waiting() != wanted {
            tokio::task::yield_now().await;
        }
    };
    soon("a line of this length", waiting).await;
}

async fn nobody_left(node: &Node) {
    let waiting = async {
        while !node.router.is_idle() {
            tokio::task::yield_now().await;
        }
    };
    soon("nobody to be left", waiting).await;
}

async fn urgent(node: &Node, class: &str, text: &str) -> Client {
    let head = format!("POST {CHAT} HTTP/1.1\r\nx-spark-priority: {class}\r\n");
    node.send(&head, chat(text).as_bytes()).await
}

fn fine(exchange: Exchange) {
    let _ = exchange.reply.send(answer(200, "application/json", "{}"));
}

#[tokio::test]
async fn beyond_an_engines_places_requests_wait_and_the_urgent_pass() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let node = narrow(&tasks, &engine.url, 1, 8).await;
    let first = urgent(&node, "batch", "first").await;
    let running = engine.next().await;
    let batch = urgent(&node, "batch", "slow").await;
    in_line(&node, 0, 0, 1).await;
    let normal = node.post(CHAT, &chat("plain")).await;
    in_line(&node, 0, 1, 1).await;
    let interactive = urgent(&node, "interactive", "fast").await;
    in_line(&node, 1, 1, 1).await;
    assert!(engine.untouched());
    assert!(node.meter.text().contains("router_queue_depth{class=\"batch\"} 1"), "{}", node.meter.text());
    fine(running);
    assert_eq!(first.answer().await.status, 200);
    for (client, text) in [(interactive, "fast"), (normal, "plain"), (batch, "slow")] {
        let next = engine.next().await;
        assert_eq!(next.body, chat(text));
        assert!(engine.untouched(), "one at a time");
        fine(next);
        let answer = client.answer().await;
        assert_eq!(answer.status, 200);
        assert!(answer.header("x-spark-queue-ms").is_some());
    }
    nobody_left(&node).await;
    let text = node.meter.text();
    assert!(text.contains("router_queue_wait_seconds_count{class=\"normal\"} 1"), "{text}");
    assert!(text.contains("router_queue_depth{class=\"batch\"} 0"), "{text}");
}

#[tokio::test]
async fn who_hangs_up_in_line_leaves_it_and_the_engine_never_hears_of_it() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let mut node = narrow(&tasks, &engine.url, 1, 8).await;
    let first = node.post(CHAT, HI).await;
    let running = engine.next().await;
    let mut stream = node.post(CHAT, STREAM).await;
    // It has been begun by the router, so that the line is left through its body.
    stream.see(": waiting").await;
    let document = node.post(CHAT, HI).await;
    in_line(&node, 0, 2, 0).await;
    drop((stream, document));
    in_line(&node, 0, 0, 0).await;
    for _ in 0..2 {
        let outcome = node.outcome().await;
        assert_eq!((outcome.end, outcome.status, outcome.node), (End::HungUp, HUNG_UP, None));
    }
    fine(running);
    assert_eq!(first.answer().await.status, 200);
    nobody_left(&node).await;
    assert!(engine.untouched());
}

#[tokio::test]
async fn a_full_line_says_when_to_come_back() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let node = narrow(&tasks, &engine.url, 1, 2).await;
    let _first = node.post(CHAT, HI).await;
    let running = engine.next().await;
    let waits = urgent(&node, "batch", "slow").await;
    in_line(&node, 0, 0, 1).await;
    // Half of the line is for batch.
    let refused = urgent(&node, "batch", "slow").await.answer().await;
    assert_error(&refused, false, 429, "rate_limit_error", "queue_full", "router.queue");
    let seconds: u32 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!((1..60).contains(&seconds), "{seconds}");
    let more = urgent(&node, "interactive", "fast").await;
    in_line(&node, 1, 0, 1).await;
    let refused = node.ask("/v1/messages", HI).await;
    assert_error(&refused, true, 429, "rate_limit_error", "", "class normal");
    fine(running);
    for client in [more, waits] {
        fine(engine.next().await);
        assert_eq!(client.answer().await.status, 200);
    }
    let odd = urgent(&node, "urgent", "hi").await.answer().await;
    assert_error(&odd, false, 400, "invalid_request_error", "unknown_priority", "not `urgent`");
}

#[tokio::test]
async fn a_stream_that_waits_is_kept_alive_and_then_is_the_engines() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let mut node = narrow(&tasks, &engine.url, 1, 8).await;
    let _first = node.post(CHAT, HI).await;
    let running = engine.next().await;
    let asked = STREAM.replace("true", "true,\"stream_options\":{\"include_usage\":true}");
    let mut well = node.post(CHAT, &asked).await;
    well.see(": waiting\n\n").await;
    let mut ill = node.post("/v1/messages", STREAM).await;
    ill.see(": waiting\n\n").await;
    fine(running);
    node.outcome().await;
    let next = engine.next().await;
    let (events, response) = events();
    next.reply.send(response).unwrap();
    events.send(Bytes::from_static(b"data: {\"x\": 1.0}\n\n")).await.unwrap();
    events.send(Bytes::from_static(b"data: [DONE]\n\n")).await.unwrap();
    drop(events);
    let answer = well.answer().await;
    assert_eq!(
        (answer.status, answer.header("content-type")),
        (200, Some("text/event-stream; charset=utf-8"))
    );
    assert_eq!(answer.header("x-request-id"), Some("id"));
    let said = answer.events();
    assert!(said.ends_with("\n\ndata: {\"x\": 1.0}\n\ndata: [DONE]\n\n"), "{said}");
    assert!(said.replace(": waiting\n\n", "").starts_with("data: {"), "{said}");
    let outcome = node.outcome().await;
    assert!(outcome.end == End::Whole && outcome.queued >= Duration::from_secs(1), "{outcome:?}");
    assert!(outcome.why.contains("waited in line for"), "{}", outcome.why);
    // The status was said: an error can only be an event now.
    let next = engine.next().await;
    let said = "{\"type\":\"error\",\n\"error\":{\"message\":\"too long\"}}";
    next.reply.send(super::answer(400, "application/json", said)).unwrap();
    let answer = ill.answer().await;
    let event = "event: error\ndata: {\"type\":\"error\",\ndata: \"error\":{\"message\":\"too long\"}}\n\n";
    assert!(answer.events().ends_with(event), "{}", answer.text());
    assert_eq!(node.outcome().await.status, 400);
    nobody_left(&node).await;
}

#[tokio::test]
async fn an_engine_that_is_lost_while_a_stream_waits_ends_it_with_an_event() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let node = narrow(&tasks, &engine.url, 1, 8).await;
    let _first = node.post(CHAT, HI).await;
    let _running = engine.next().await;
    let mut client = node.post(CHAT, STREAM).await;
    client.see(": waiting\n\n").await;
    node.router.set_own(own(&engine.url, Fit::Unfit("it is gone".into())));
    let said = client.answer().await.events();
    assert!(said.contains("engine_not_ready") && said.contains("it is gone"), "{said}");
    assert!(!said.contains("[DONE]"));
}

#[tokio::test]
async fn what_another_node_passed_on_does_not_wait_again_and_its_places_are_known_there() {
    let tasks = Tasks::new();
    let (dead, mut engine) = (dead_url().await, Engine::start(&tasks).await);
    let admission = Admission { places: 1, queue: 8 };
    let b = Node::start(&tasks, Setup { admission, ..Setup::new("b", &engine.url) }).await;
    let dial = dial_to(b.relay);
    let a = Node::start(&tasks, Setup { dial, admission, ..Setup::new("a", &dead) }).await;
    a.router.set_own(own(&dead, Fit::Unfit("it is gone".into())));
    hear(&a, &b);
    assert_eq!(b.router.note().places, 1);
    // The place at b is taken there; a has not heard of it and passes one on.
    let _first = b.post(CHAT, HI).await;
    let _running = engine.next().await;
    let second = a.post(CHAT, HI).await;
    fine(engine.next().await);
    assert_eq!(second.answer().await.status, 200);
    // Now it has.
    hear(&a, &b);
    let _third = a.post(CHAT, HI).await;
    in_line(&a, 0, 1, 0).await;
    assert!(engine.untouched());
    in_line(&b, 0, 0, 0).await;
}

#[tokio::test]
async fn a_key_has_its_limit_and_its_class_and_an_isolated_one_its_salt() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let file = tempfile::NamedTempFile::new().unwrap();
    let lines = "ann [limit=1]: secret-of-ann\nguest [class=batch isolated]: secret-of-guest\n";
    std::fs::write(file.path(), lines).unwrap();
    let keys = Keys::read(file.path()).unwrap();
    let admission = Admission { places: 2, queue: 8 };
    let node = Node::start(&tasks, Setup { keys, admission, ..Setup::new("a", &engine.url) }).await;
    let with = |key: &str, more: &str| {
        let head = format!("POST {CHAT} HTTP/1.1\r\nx-api-key: {key}\r\n{more}");
        let node = &node;
        async move { node.send(&head, HI.as_bytes()).await }
    };
    let ann = with("secret-of-ann", "").await;
    let first = engine.next().await;
    assert_eq!(first.body, HI);
    let refused = with("secret-of-ann", "").await.answer().await;
    assert_error(&refused, false, 429, "rate_limit_error", "key_limit", "API key `ann`");
    assert_eq!(refused.header("retry-after"), Some("1"));
    let guest = with("secret-of-guest", "").await;
    let second = engine.next().await;
    let said: Value = serde_json::from_slice(&second.body).unwrap();
    assert_eq!(said["cache_salt"].as_str().map(str::len), Some(32));
    let salt = format!("{{\"cache_salt\":{},", said["cache_salt"]);
    assert_eq!(std::str::from_utf8(&second.body).unwrap().replacen(&salt, "{", 1), HI);
    // A key does not raise its class.
    let _third = with("secret-of-guest", "x-spark-priority: interactive\r\n").await;
    in_line(&node, 0, 0, 1).await;
    fine(first);
    assert_eq!(ann.answer().await.status, 200);
    let third = engine.next().await;
    let again: Value = serde_json::from_slice(&third.body).unwrap();
    assert_eq!(again["cache_salt"], said["cache_salt"]);
    fine(second);
    fine(third);
    assert_eq!(guest.answer().await.status, 200);
    let again = with("secret-of-ann", "").await;
    fine(engine.next().await);
    assert_eq!(again.answer().await.status, 200, "its place is free again");
}
