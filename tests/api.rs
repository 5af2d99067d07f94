//! The open API between a client that is a bare socket and engines that do what the test says.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail the test")]

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use futures_util::StreamExt;
use http::{HeaderMap, Request, Response};
use http_body_util::BodyExt;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use spark_kv::api::open::{Limits, Open};
use spark_kv::api::{self, Keys};
use spark_kv::base::clock::Clock;
use spark_kv::base::units;
use spark_kv::meter::Meter;
use spark_kv::router::{
    Admission, Dial, End, Endpoint, Fit, Foresee, Foreseen, HUNG_UP, Looking, Note, Options, Outcome, Own,
    Peer, Reach, Router, Slot, Usage, Wire, nobody,
};
use spark_kv::settings::Strategy;
use spark_kv::tasks::{Kind, Tasks};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{broadcast, mpsc, oneshot};

#[path = "api/fidelity.rs"]
mod fidelity;
#[path = "api/hangups.rs"]
mod hangups;
#[path = "api/queue.rs"]
mod queue;

/// Longer than anything here takes; a wait that reaches it has failed.
const LIMIT: Duration = Duration::from_secs(30);

async fn soon<T>(what: &str, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(LIMIT, work).await.unwrap_or_else(|_| panic!("waited in vain for {what}"))
}

// ---------------------------------------------------------------------------------------------- engines

/// A request that reached an engine, waiting for what the test answers.
struct Exchange {
    target: String,
    method: String,
    headers: HeaderMap,
    body: Bytes,
    reply: oneshot::Sender<Response<Body>>,
    /// Resolves when the router lets go of the exchange, before or within the answer.
    gone: oneshot::Receiver<()>,
}

struct Told(Option<oneshot::Sender<()>>);

impl Drop for Told {
    fn drop(&mut self) {
        if let Some(gone) = self.0.take() {
            let _ = gone.send(());
        }
    }
}

struct Engine {
    url: String,
    exchanges: mpsc::Receiver<Exchange>,
}

impl Engine {
    async fn start(tasks: &Tasks) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (sender, exchanges) = mpsc::channel(64);
        let inner = tasks.clone();
        tasks.spawn(Kind::Chore, "engine", async move {
            while let Ok((stream, _)) = listener.accept().await {
                let sender = sender.clone();
                inner.spawn(Kind::Chore, "engine connection", async move {
                    let service = service_fn(move |request| exchange(sender.clone(), request));
                    let http = hyper::server::conn::http1::Builder::new();
                    let _ = http.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Self { url, exchanges }
    }

    async fn next(&mut self) -> Exchange {
        soon("a request at the engine", self.exchanges.recv()).await.unwrap()
    }

    fn untouched(&mut self) -> bool {
        self.exchanges.try_recv().is_err()
    }
}

async fn exchange(
    sender: mpsc::Sender<Exchange>,
    request: Request<hyper::body::Incoming>,
) -> Result<Response<Body>, Infallible> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let (reply, replied) = oneshot::channel();
    let (left, gone) = oneshot::channel();
    let told = Told(Some(left));
    let target = parts.uri.to_string();
    let method = parts.method.to_string();
    sender.send(Exchange { target, method, headers: parts.headers, body, reply, gone }).await.unwrap();
    let response = replied.await.unwrap();
    // The guard stays with the body, so that it tells when the body is let go.
    Ok(response.map(|body| {
        let frames = body.into_data_stream().map(move |frame| {
            let _ = &told;
            frame
        });
        Body::from_stream(frames)
    }))
}

fn answer(status: u16, kind: &str, body: &str) -> Response<Body> {
    let response = Response::builder().status(status).header("content-type", kind);
    response.header("content-length", body.len()).body(Body::from(body.to_owned())).unwrap()
}

/// An answer in events, which the test sends one by one.
fn events() -> (mpsc::Sender<Bytes>, Response<Body>) {
    let (sender, receiver) = mpsc::channel::<Bytes>(64);
    let frames = futures_util::stream::unfold(receiver, |mut receiver| async {
        receiver.recv().await.map(|frame| (Ok::<_, Infallible>(frame), receiver))
    });
    let response = Response::builder().header("content-type", "text/event-stream; charset=utf-8");
    (sender, response.body(Body::from_stream(frames)).unwrap())
}

/// An engine that answers each connection with these bytes and then closes it, whatever it is asked.
async fn blunt_engine(tasks: &Tasks, bytes: &'static [u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tasks.spawn(Kind::Chore, "blunt engine", async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = vec![0; 64 << 10];
            let _ = stream.read(&mut request).await;
            let _ = stream.write_all(bytes).await;
            let _ = stream.shutdown().await;
            // Read to the end, so that the close is no reset that would overtake the bytes.
            while stream.read(&mut request).await.is_ok_and(|n| n > 0) {}
        }
    });
    url
}

async fn dead_url() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}

// ---------------------------------------------------------------------------------------------- nodes

struct Setup {
    name: &'static str,
    url: String,
    dial: Dial,
    keys: Keys,
    share: bool,
    idle: Duration,
    max_body: u64,
    max_requests: u32,
    aliases: BTreeMap<String, String>,
    admission: Admission,
}

impl Setup {
    fn new(name: &'static str, url: &str) -> Self {
        Self {
            name,
            url: url.to_owned(),
            dial: nobody(),
            keys: Keys::none(),
            share: true,
            idle: LIMIT,
            max_body: 1 << 20,
            max_requests: 16,
            aliases: BTreeMap::new(),
            admission: Admission::default(),
        }
    }
}

struct Node {
    router: Router,
    address: SocketAddr,
    relay: SocketAddr,
    meter: Meter,
    outcomes: broadcast::Receiver<Outcome>,
    tasks: Tasks,
}

fn own(url: &str, fit: Fit) -> Own {
    Own { url: url.into(), models: vec!["m".into()], fit }
}

impl Node {
    async fn start(tasks: &Tasks, setup: Setup) -> Self {
        let meter = Meter::new();
        let Setup { name, url, dial, keys, share, idle, max_body, max_requests, aliases, admission } = setup;
        let options = Options {
            name: name.into(),
            share,
            strategy: Strategy::Cost,
            idle,
            max_requests,
            admission,
            dial,
        };
        let router = Router::new(options, Clock::real(), &meter);
        router.set_own(own(&url, Fit::Well));
        let outcomes = router.outcomes();
        let limits = Limits { max_body: units::Bytes(max_body), drop_billing_line: true, aliases };
        let open = Open::new(router.clone(), keys, limits);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let app = api::assemble(&open, axum::Router::new());
        tasks.spawn(Kind::Owner, "public port", api::serve(listener, app, tasks.clone()));
        let relays = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let relay = relays.local_addr().unwrap();
        let (sender, receiver) = mpsc::channel(8);
        tasks.spawn(Kind::Chore, "relays", async move {
            while let Ok((stream, _)) = relays.accept().await {
                let _ = sender.send(stream).await;
            }
        });
        tasks.spawn(Kind::Owner, "relayed", api::serve_relays(receiver, open, tasks.clone()));
        Self { router, address, relay, meter, outcomes, tasks: tasks.clone() }
    }

    async fn alone(tasks: &Tasks, url: &str) -> Self {
        Self::start(tasks, Setup::new("a", url)).await
    }

    async fn outcome(&mut self) -> Outcome {
        soon("an outcome", self.outcomes.recv()).await.unwrap()
    }

    async fn send(&self, head: &str, body: &[u8]) -> Client {
        Client::send(self.address, head, body).await
    }

    async fn post(&self, path: &str, body: &str) -> Client {
        self.send(&format!("POST {path} HTTP/1.1\r\nx-request-id: id\r\n"), body.as_bytes()).await
    }

    async fn ask(&self, path: &str, body: &str) -> Answer {
        self.post(path, body).await.answer().await
    }
}

/// Two nodes, each with a way to the other, and a router that has heard that the other is well.
async fn pair(tasks: &Tasks, url_a: &str, url_b: &str) -> (Node, Node) {
    let b = Node::start(tasks, Setup::new("b", url_b)).await;
    let dial = dial_to(b.relay);
    let a = Node::start(tasks, Setup { dial, ..Setup::new("a", url_a) }).await;
    hear(&a, &b);
    (a, b)
}

fn dial_to(address: SocketAddr) -> Dial {
    Arc::new(move |_| {
        Box::pin(async move { Ok(Box::new(TcpStream::connect(address).await?) as Box<dyn Wire>) })
    })
}

/// `a` hears what `b` says about itself.
fn hear(a: &Node, b: &Node) {
    let said = serde_json::to_value(b.router.note()).unwrap();
    let note: Note = serde_json::from_value(said).unwrap();
    a.router.set_peers(vec![Peer { name: b.router.name().into(), connected: true, note: Some(note) }]);
}

// ---------------------------------------------------------------------------------------------- client

/// A client as a bare socket: what it sees is what is on the wire.
struct Client {
    stream: TcpStream,
    seen: Vec<u8>,
}

#[derive(Debug)]
struct Answer {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Answer {
    fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("{}", self.text()))
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// What a body in chunks says without its framing. Panics when it does not end as it should.
    fn events(&self) -> String {
        self.chunks().concat()
    }

    fn chunks(&self) -> Vec<String> {
        let mut rest = &self.body[..];
        let mut chunks = Vec::new();
        loop {
            let end = rest.windows(2).position(|w| w == b"\r\n").expect("a chunk's size");
            let size = usize::from_str_radix(std::str::from_utf8(&rest[..end]).unwrap(), 16).unwrap();
            rest = &rest[end + 2..];
            if size == 0 {
                assert_eq!(rest, b"\r\n");
                return chunks;
            }
            chunks.push(String::from_utf8(rest[..size].to_vec()).unwrap());
            rest = &rest[size + 2..];
        }
    }
}

impl Client {
    /// Sends a head (request line and headers, each ended) and a body with its length.
    async fn send(address: SocketAddr, head: &str, body: &[u8]) -> Self {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let head = format!("{head}host: test\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", body.len());
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut client = Self { stream, seen: Vec::new() };
        client.write(body).await;
        client
    }

    async fn write(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
    }

    /// Reads until `text` has come.
    async fn see(&mut self, text: &str) {
        let reading = async {
            while !self.seen.windows(text.len()).any(|window| window == text.as_bytes()) {
                let n = self.stream.read_buf(&mut self.seen).await.unwrap();
                assert!(n > 0, "closed before {text:?}: {:?}", String::from_utf8_lossy(&self.seen));
            }
        };
        soon(text, reading).await;
    }

    /// Reads until the connection is closed.
    async fn answer(mut self) -> Answer {
        soon("the end of an answer", self.stream.read_to_end(&mut self.seen)).await.unwrap();
        let end = self.seen.windows(4).position(|w| w == b"\r\n\r\n").expect("a head");
        let head = String::from_utf8(self.seen[..end].to_vec()).unwrap();
        let mut lines = head.split("\r\n");
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let headers = lines
            .map(|line| line.split_once(": ").unwrap())
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        Answer { status, headers, body: self.seen[end + 4..].to_vec() }
    }
}

const CHAT: &str = "/v1/chat/completions";
const HI: &str = r#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#;
const STREAM: &str = r#"{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}"#;

fn chat(text: &str) -> String {
    json!({"model": "m", "messages": [{"role": "user", "content": text}]}).to_string()
}

/// Both shapes of an error: OpenAI's and Anthropic's.
const SHAPES: [(&str, bool); 6] = [
    (CHAT, false),
    ("/v1/completions", false),
    ("/v1/responses", false),
    ("/tokenize", false),
    ("/v1/messages", true),
    ("/v1/messages/count_tokens", true),
];

fn assert_error(answer: &Answer, anthropic: bool, status: u16, kind: &str, code: &str, message: &str) {
    assert_eq!(answer.status, status, "{}", answer.text());
    assert_eq!(answer.header("content-type"), Some("application/json"));
    assert_eq!(answer.header("content-length"), Some(answer.body.len().to_string().as_str()));
    let body = answer.json();
    let error = &body["error"];
    assert_eq!(error["type"], kind);
    assert!(error["message"].as_str().unwrap().contains(message), "{error}");
    if anthropic {
        assert_eq!(body["type"], "error");
    } else {
        assert_eq!(error["code"], code);
        assert!(error.as_object().unwrap().contains_key("param"));
    }
}

// ---------------------------------------------------------------------------------------------- bytes

#[tokio::test]
async fn bytes_pass_unchanged_both_ways_on_every_endpoint() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let mut node = Node::alone(&tasks, &engine.url).await;
    let body = concat!(
        "  {\"unknown\" : 1.10000000149e-0,\t\"model\":\"x\", \"model\":\"m\",\r\n \"content\":null,",
        "\"text\":\"\\u00e4\\/\\ud83d\\ude00 \u{e4}\",\"strict\":true, \"messages\":[ {\"role\":\"user\" ,",
        "\"reasoning\":\"a\",\"reasoning_content\":\"b\",\"content\":[]} ] ,\"n\":1e400,\"request_id\":\"own\"}\n "
    );
    let back = "{ \"x\":1.0 ,\"x\":2,\"usage\":{\"prompt_tokens\":7 ,\"completion_tokens\":2,\
                \"prompt_tokens_details\":{\"cached_tokens\":5}} }\n\n";
    for path in [
        CHAT,
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
        "/tokenize",
        "/detokenize",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/score",
        "/rerank",
        "/score",
        "/pooling",
        "/classify",
    ] {
        let head = format!(
            "POST {path}?beta=true&&x=%2f HTTP/1.1\r\nX-Request-Id: my \"id\"\r\nX-Other: one\r\nx-other: two\r\n\
             te: trailers\r\nauthorization: Bearer theirs\r\ncontent-type: application/json\r\n"
        );
        let client = node.send(&head, body.as_bytes()).await;
        let exchange = engine.next().await;
        assert_eq!(exchange.body, body.as_bytes(), "{path}");
        assert_eq!(
            (exchange.method.as_str(), exchange.target.as_str()),
            ("POST", format!("{path}?beta=true&&x=%2f").as_str())
        );
        let header = |name: &str| -> Vec<String> {
            exchange.headers.get_all(name).iter().map(|v| v.to_str().unwrap().to_owned()).collect()
        };
        assert_eq!(header("x-other"), ["one", "two"]);
        assert_eq!(header("x-request-id"), ["myid"]);
        assert_eq!(header("authorization"), ["Bearer theirs"], "without keys of ours it is the engine's");
        assert_eq!(header("content-length"), [body.len().to_string()]);
        assert!(
            header("te").is_empty() && header("connection").is_empty() && header("x-spark-box").is_empty()
        );
        let mut response = answer(200, "application/json", back);
        response.headers_mut().append("set-cookie", "a=1".parse().unwrap());
        response.headers_mut().append("set-cookie", "b=2".parse().unwrap());
        response.headers_mut().append("keep-alive", "timeout=5".parse().unwrap());
        exchange.reply.send(response).unwrap();
        let answer = client.answer().await;
        assert_eq!((answer.status, answer.text().as_str()), (200, back), "{path}");
        assert_eq!(answer.header("content-length"), Some(back.len().to_string().as_str()));
        assert_eq!(answer.header("transfer-encoding"), None);
        assert_eq!(answer.header("keep-alive"), None);
        assert_eq!(answer.header("x-request-id"), Some("myid"));
        assert_eq!(answer.header("x-spark-box"), Some("a"));
        answer.header("x-spark-router-us").unwrap().parse::<u64>().unwrap();
        assert_eq!(answer.headers.iter().filter(|(name, _)| name == "set-cookie").count(), 2);
        let outcome = node.outcome().await;
        assert_eq!((outcome.id.as_str(), outcome.status, outcome.end), ("myid", 200, End::Whole));
        assert_eq!(outcome.bytes, back.len() as u64);
        let usage = Usage { prompt_tokens: Some(7), cached_tokens: Some(5), completion_tokens: Some(2) };
        assert_eq!(outcome.usage, Some(usage));
    }
    assert_eq!(node.router.in_flight(), 0);
}

#[tokio::test]
async fn a_large_answer_passes_whole_with_its_length() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let mut node = Node::alone(&tasks, &engine.url).await;
    let back: String = (0..1_500_000).map(|n| format!("{n:06}")).collect();
    let client = node.post(CHAT, HI).await;
    engine.next().await.reply.send(answer(200, "application/json", &back)).unwrap();
    let got = client.answer().await;
    assert_eq!(got.header("content-length"), Some(back.len().to_string().as_str()));
    assert!(got.body == back.as_bytes());
    assert_eq!(node.outcome().await.end, End::Whole);
}

#[tokio::test]
async fn a_large_request_passes_whole() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let setup = Setup { max_body: 8 << 20, ..Setup::new("a", &engine.url) };
    let mut node = Node::start(&tasks, setup).await;
    let body = chat(&"word ".repeat(1_000_000));
    let client = node.post(CHAT, &body).await;
    let exchange = engine.next().await;
    assert!(exchange.body == body);
    exchange.reply.send(answer(200, "application/json", "{}")).unwrap();
    assert_eq!(client.answer().await.status, 200);
    assert!(node.outcome().await.prompt_bytes > 5_000_000);
}

#[tokio::test]
async fn a_stream_passes_event_by_event() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let mut node = Node::alone(&tasks, &engine.url).await;
    let mut client = node.post(CHAT, STREAM).await;
    let exchange = engine.next().await;
    let (sender, response) = events();
    exchange.reply.send(response).unwrap();
    // Each is sent only when the one before has been seen: nothing waits for company.
    for n in 0..5 {
        sender.send(format!("data: {{\"n\":{n}}}\n\n").into()).await.unwrap();
        client.see(&format!("data: {{\"n\":{n}}}\n\n")).await;
    }
    assert_eq!(node.router.in_flight(), 1);
    sender.send("data: {\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":5}}\n\n".into()).await.unwrap();
    sender.send("data: [DONE]\n\n".into()).await.unwrap();
    drop(sender);
    let got = client.answer().await;
    assert_eq!(got.header("content-type"), Some("text/event-stream; charset=utf-8"));
    assert_eq!(got.chunks().len(), 7);
    assert!(got.events().ends_with("data: [DONE]\n\n"));
    let outcome = node.outcome().await;
    assert_eq!((outcome.end, outcome.stream), (End::Whole, true));
    assert!(outcome.ttft.is_some_and(|ttft| ttft <= outcome.duration));
    assert_eq!(outcome.usage.unwrap().completion_tokens, Some(5));
}

#[tokio::test]
async fn chunks_of_a_stream_are_neither_merged_nor_cut() {
    let tasks = Tasks::new();
    let url = blunt_engine(
        &tasks,
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n\
          7\r\ndata: a\r\n2\r\n\n\n\r\n3\r\n: k\r\n10\r\n\n\ndata: [DONE]\n\n\r\n0\r\n\r\n",
    )
    .await;
    let node = Node::alone(&tasks, &url).await;
    let asks = STREAM.replace("true,", "true,\"stream_options\":{\"include_usage\":true},");
    let got = node.ask(CHAT, &asks).await;
    assert_eq!(got.chunks(), ["data: a", "\n\n", ": k", "\n\ndata: [DONE]\n\n"]);
    // Where an event may have to be left out, they pass as events.
    let got = node.ask(CHAT, STREAM).await;
    assert_eq!(got.chunks(), ["data: a\n\n", ": k\n\ndata: [DONE]\n\n"]);
}

/// Streams of both endpoints that have options for it: what reaches the engine, and what of its answer is passed on.
#[tokio::test]
async fn a_stream_tells_the_router_its_usage_and_the_client_only_when_it_asked() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let mut node = Node::alone(&tasks, &engine.url).await;
    let word = "data: {\"choices\":[{\"text\":\"x\"}]}\n\n";
    let usage = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":1,\
                 \"prompt_tokens_details\":{\"cached_tokens\":8}}}\n\n";
    let done = "data: [DONE]\n\n";
    for (path, asks) in [(CHAT, false), (CHAT, true), ("/v1/completions", false)] {
        let with = STREAM.replacen('{', "{\"stream_options\":{\"include_usage\":true},", 1);
        let client = node.post(path, if asks { &with } else { STREAM }).await;
        let exchange = engine.next().await;
        assert_eq!(exchange.body, with.as_bytes(), "{path}");
        assert_eq!(exchange.headers["content-length"], with.len().to_string());
        let (sender, response) = events();
        exchange.reply.send(response).unwrap();
        for event in [word, usage, done] {
            sender.send(event.into()).await.unwrap();
        }
        drop(sender);
        let wanted = if asks { [word, usage, done].concat() } else { [word, done].concat() };
        assert_eq!(client.answer().await.events(), wanted, "{path}");
        let outcome = node.outcome().await;
        let known = Usage { prompt_tokens: Some(9), cached_tokens: Some(8), completion_tokens: Some(1) };
        assert_eq!((outcome.usage, outcome.end), (Some(known), End::Whole), "{path}");
    }
    // Others have no such option, or are no streams.
    for (path, body) in [("/v1/messages", STREAM), (CHAT, HI)] {
        let client = node.post(path, body).await;
        let exchange = engine.next().await;
        assert_eq!(exchange.body, body.as_bytes(), "{path}");
        exchange.reply.send(answer(200, "application/json", "{}")).unwrap();
        client.answer().await;
    }
}

#[tokio::test]
async fn a_model_can_be_called_by_an_alias_and_answers_to_it() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let aliases = [("fast", "m"), ("lost", "nowhere"), ("m", "other")];
    let aliases = aliases.map(|(alias, model)| (alias.to_owned(), model.to_owned())).into();
    let mut node = Node::start(&tasks, Setup { aliases, ..Setup::new("a", &engine.url) }).await;
    let called = |name: &str| format!("{{ \"model\" : \"{name}\",\"x\":1.0}}");
    let client = node.post(CHAT, &called("fast")).await;
    let exchange = engine.next().await;
    assert_eq!(exchange.body, called("m").as_bytes());
    exchange.reply.send(answer(200, "application/json", &called("m"))).unwrap();
    let got = client.answer().await;
    assert_eq!((got.text(), got.header("content-length")), (called("fast"), Some("27")));
    assert_eq!(node.outcome().await.model.as_deref(), Some("m"));
    // In a stream each event.
    let client = node.post(CHAT, &STREAM.replace("\"m\"", "\"fast\"")).await;
    let (sender, response) = events();
    engine.next().await.reply.send(response).unwrap();
    for _ in 0..2 {
        sender.send(format!("data: {}\n\n", called("m")).into()).await.unwrap();
    }
    drop(sender);
    assert_eq!(client.answer().await.events(), format!("data: {}\n\n", called("fast")).repeat(2));
    // A name of the engine's own stays its own, and an alias of nothing is told by the name that it stands for.
    let client = node.post(CHAT, &called("m")).await;
    let exchange = engine.next().await;
    assert_eq!(exchange.body, called("m").as_bytes());
    exchange.reply.send(answer(200, "application/json", "{}")).unwrap();
    client.answer().await;
    let refused = node.ask(CHAT, &called("lost")).await;
    assert_error(
        &refused,
        false,
        404,
        "invalid_request_error",
        "model_not_found",
        "`nowhere` does not exist",
    );
    // They are listed.
    let client = node.send("GET /v1/models HTTP/1.1\r\n", b"").await;
    let list = "{\"object\":\"list\",\"data\":[{\"id\":\"m\"}]}";
    engine.next().await.reply.send(answer(200, "application/json", list)).unwrap();
    let names = client.answer().await.json();
    assert_eq!(
        names["data"][1],
        json!({"id": "fast", "object": "model", "owned_by": "spark-kv", "root": "m"})
    );
    assert_eq!(names["data"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn the_id_of_a_response_goes_into_the_body_and_nothing_else_changes() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let mut node = Node::alone(&tasks, &engine.url).await;
    for (body, expected, engine_id) in [
        (
            "\n{ \"model\":\"m\" ,\"input\":\"hi\"}",
            "\n{\"request_id\":\"resp_id\", \"model\":\"m\" ,\"input\":\"hi\"}",
            "resp_id",
        ),
        ("{}", "{\"request_id\":\"resp_id\"}", "resp_id"),
        ("{\"model\":\"m\",\"request_id\":\"x\"}", "{\"model\":\"m\",\"request_id\":\"x\"}", "x"),
    ] {
        let client = node.post("/v1/responses", body).await;
        let exchange = engine.next().await;
        assert_eq!(exchange.body, expected);
        assert_eq!(exchange.headers["content-length"], expected.len().to_string());
        exchange.reply.send(answer(200, "application/json", "{}")).unwrap();
        client.answer().await;
        assert_eq!(node.outcome().await.engine_id, engine_id);
    }
}

#[tokio::test]
async fn an_engines_own_errors_pass_untouched_and_are_not_tried_again() {
    let tasks = Tasks::new();
    let (mut first, mut second) = (Engine::start(&tasks).await, Engine::start(&tasks).await);
    let (mut a, _b) = pair(&tasks, &first.url, &second.url).await;
    let body =
        "{\"error\": {\"message\":\"This model's maximum context length is 10 tokens\", \"code\":400}}";
    for status in [400, 404, 422, 429, 500] {
        let client =
            a.send(&format!("POST {CHAT} HTTP/1.1\r\nx-spark-forwarded: me\r\n"), HI.as_bytes()).await;
        let mut response = answer(status, "application/json", body);
        response.headers_mut().insert("retry-after", "17".parse().unwrap());
        first.next().await.reply.send(response).unwrap();
        let got = client.answer().await;
        assert_eq!((got.status, got.text().as_str(), got.header("retry-after")), (status, body, Some("17")));
        let outcome = a.outcome().await;
        assert_eq!((outcome.status, outcome.end, outcome.retries), (status, End::Whole, 0));
    }
    for status in [429, 500] {
        let client = a.post(CHAT, HI).await;
        let exchange = tokio::select! { x = first.next() => x, x = second.next() => x };
        exchange.reply.send(answer(status, "application/json", body)).unwrap();
        assert_eq!(client.answer().await.status, status);
        assert!(first.untouched() && second.untouched());
    }
}

// ---------------------------------------------------------------------------------------------- hang-ups

#[tokio::test]
async fn a_client_that_hangs_up_cancels_the_engine_at_once() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let mut node = Node::alone(&tasks, &engine.url).await;
    // Before the first byte, with an answer awaited whole or in events.
    for body in [HI, STREAM] {
        let client = node.post(CHAT, body).await;
        let exchange = engine.next().await;
        assert_eq!(node.router.in_flight(), 1);
        drop(client);
        soon("the engine to be let go", exchange.gone).await.unwrap();
        let outcome = node.outcome().await;
        assert_eq!((outcome.end, outcome.status), (End::HungUp, HUNG_UP));
        assert_eq!(node.router.in_flight(), 0);
    }
    // In the middle of a stream.
    let mut client = node.post(CHAT, STREAM).await;
    let exchange = engine.next().await;
    let (sender, response) = events();
    exchange.reply.send(response).unwrap();
    sender.send("data: 1\n\n".into()).await.unwrap();
    client.see("data: 1").await;
    drop(client);
    soon("the engine to be let go", exchange.gone).await.unwrap();
    let outcome = node.outcome().await;
    assert_eq!((outcome.end, outcome.status, outcome.bytes), (End::HungUp, 200, 9));
    // In the middle of an answer that is taken in whole first.
    let client = node.post(CHAT, HI).await;
    let exchange = engine.next().await;
    let (sender, response) = events();
    let (mut parts, body) = response.into_parts();
    parts.headers.insert("content-type", "application/json".parse().unwrap());
    exchange.reply.send(Response::from_parts(parts, body)).unwrap();
    sender.send("{\"half\":".into()).await.unwrap();
    drop(client);
    soon("the engine to be let go", exchange.gone).await.unwrap();
    assert_eq!(node.outcome().await.end, End::HungUp);
    assert!(node.meter.text().contains("sparkkv_router_hangups_total 4"));
    assert!(node.meter.text().contains("sparkkv_router_in_flight 0"));
}

/// A router that is told what prompts hold when the test says so: each prompt's slot comes out of the channel.
fn looked_ahead(node: &Node, patience: Duration) -> mpsc::Receiver<Arc<Slot>> {
    let (sender, slots) = mpsc::channel(8);
    node.router.foresee_with(Foresee(Arc::new(move |_, _| {
        let slot = Arc::<Slot>::default();
        sender.try_send(Arc::clone(&slot)).ok()?;
        Some(Looking { slot, patience })
    })));
    slots
}

#[tokio::test]
async fn a_request_is_placed_when_its_prompt_is_known_and_a_hang_up_ends_the_wait() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let mut node = Node::alone(&tasks, &engine.url).await;
    let mut slots = looked_ahead(&node, 2 * LIMIT);
    let client = node.post(CHAT, HI).await;
    let slot = soon("a look ahead", slots.recv()).await.unwrap();
    assert_eq!(node.router.in_flight(), 1);
    drop(client);
    let outcome = node.outcome().await;
    assert_eq!((outcome.end, outcome.node, node.router.in_flight()), (End::HungUp, None, 0));
    assert_eq!(Arc::strong_count(&slot), 1, "nobody waits for it any more");
    let client = node.post(CHAT, HI).await;
    let slot = soon("a look ahead", slots.recv()).await.unwrap();
    let reaches = vec![("a".to_owned(), Reach { device: 16, own: 32, all: 48 })];
    let foreseen = Foreseen { tokens: 64, reaches, ..Foreseen::default() };
    slot.fill(Ok(foreseen.clone()));
    engine.next().await.reply.send(answer(200, "application/json", "{}")).unwrap();
    client.answer().await;
    assert_eq!(node.outcome().await.foreseen, Some(Ok(foreseen)));
}

#[tokio::test]
async fn a_prompt_that_takes_too_long_is_placed_without_and_what_is_found_later_is_written_down() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let mut node = Node::alone(&tasks, &engine.url).await;
    let mut slots = looked_ahead(&node, Duration::from_millis(1));
    let client = node.post(CHAT, HI).await;
    let slot = soon("a look ahead", slots.recv()).await.unwrap();
    let exchange = engine.next().await;
    slot.fill(Err("late".into()));
    exchange.reply.send(answer(200, "application/json", "{}")).unwrap();
    client.answer().await;
    assert_eq!(node.outcome().await.foreseen, Some(Err("late".into())));
}

#[tokio::test]
async fn a_client_that_closes_after_the_last_event_did_not_hang_up() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let mut node = Node::alone(&tasks, &engine.url).await;
    let mut client = node.post(CHAT, STREAM).await;
    let exchange = engine.next().await;
    let (sender, response) = events();
    exchange.reply.send(response).unwrap();
    sender.send("data: [DONE]\n\n".into()).await.unwrap();
    client.see("[DONE]").await;
    drop(client);
    assert_eq!(node.outcome().await.end, End::Whole);
}

#[tokio::test]
async fn an_answer_without_a_body_is_whole_and_nobody_hung_up() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let mut node = Node::alone(&tasks, &engine.url).await;
    let client = node.post(CHAT, HI).await;
    engine.next().await.reply.send(answer(500, "application/json", "")).unwrap();
    assert_eq!(client.answer().await.status, 500);
    let outcome = node.outcome().await;
    assert_eq!((outcome.status, outcome.end), (500, End::Whole));
}

#[tokio::test]
async fn hanging_up_reaches_the_other_nodes_engine() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let (mut a, mut b) = pair(&tasks, &dead_url().await, &engine.url).await;
    a.router.set_own(own("", Fit::Unfit("is starting".into())));
    for body in [HI, STREAM] {
        let client = a.post(CHAT, body).await;
        let exchange = engine.next().await;
        drop(client);
        soon("the engine to be let go", exchange.gone).await.unwrap();
        assert_eq!((a.outcome().await.end, b.outcome().await.end), (End::HungUp, End::HungUp));
        assert_eq!((a.router.in_flight(), b.router.in_flight()), (0, 0));
    }
}

// ---------------------------------------------------------------------------------------------- refusals

#[tokio::test]
async fn malformed_json_is_refused_in_the_endpoints_shape() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let node = Node::alone(&tasks, &engine.url).await;
    for (path, anthropic) in SHAPES {
        for body in ["", "{\"model\":", "[1]", "{\"a\":1}}"] {
            let got = node.ask(path, body).await;
            assert_error(&got, anthropic, 400, "invalid_request_error", "invalid_json", "line 1");
            assert_eq!(got.header("x-request-id"), Some("id"));
        }
    }
    assert!(engine.untouched());
}

#[tokio::test]
async fn an_unknown_model_is_refused_with_the_names_there_are() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let mut node = Node::alone(&tasks, &engine.url).await;
    for (path, anthropic) in SHAPES {
        let got = node.ask(path, r#"{"model":"gpt-9"}"#).await;
        let kind = if anthropic { "not_found_error" } else { "invalid_request_error" };
        let message = "the model `gpt-9` does not exist; there are: m";
        assert_error(&got, anthropic, 404, kind, "model_not_found", message);
        let outcome = node.outcome().await;
        assert_eq!((outcome.status, outcome.end, outcome.node), (404, End::Refused, None));
    }
    assert!(engine.untouched());
}

#[tokio::test]
async fn while_no_engine_is_ready_a_time_to_try_again_is_given() {
    let tasks = Tasks::new();
    let engine = Engine::start(&tasks).await;
    let node = Node::alone(&tasks, &engine.url).await;
    node.router.set_own(own(&engine.url, Fit::Unfit("is loading its model".into())));
    for (path, anthropic) in SHAPES {
        let got = node.ask(path, HI).await;
        let kind = if anthropic { "overloaded_error" } else { "service_unavailable_error" };
        assert_error(&got, anthropic, 503, kind, "engine_not_ready", "a: is loading its model");
        assert_eq!(got.header("retry-after"), Some("5"));
    }
}

#[tokio::test]
async fn a_body_over_the_limit_is_refused_with_or_without_a_length() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let setup = Setup { max_body: 100_000, ..Setup::new("a", &engine.url) };
    let node = Node::start(&tasks, setup).await;
    let large = "x".repeat(150_000);
    for (path, anthropic) in SHAPES {
        let kind = if anthropic { "request_too_large" } else { "invalid_request_error" };
        let got = node.ask(path, &large).await;
        assert_error(&got, anthropic, 413, kind, "request_too_large", "100000 bytes");
        let stream = TcpStream::connect(node.address).await.unwrap();
        let mut client = Client { stream, seen: Vec::new() };
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        );
        client.write(head.as_bytes()).await;
        client.write(format!("{:x}\r\n{large}\r\n0\r\n\r\n", large.len()).as_bytes()).await;
        assert_error(&client.answer().await, anthropic, 413, kind, "request_too_large", "100000 bytes");
    }
    assert_eq!(node.router.in_flight(), 0);
    assert!(engine.untouched());
    // Exactly the limit passes.
    let exact = format!("{{\"model\":\"m\",\"x\":\"{}\"}}", "y".repeat(100_000 - 20));
    assert_eq!(exact.len(), 100_000);
    let client = node.post(CHAT, &exact).await;
    engine.next().await.reply.send(answer(200, "application/json", "{}")).unwrap();
    assert_eq!(client.answer().await.status, 200);
}

#[tokio::test]
async fn a_client_that_asks_first_is_told_before_it_sends() {
    let tasks = Tasks::new();
    let engine = Engine::start(&tasks).await;
    let node = Node::alone(&tasks, &engine.url).await;
    let mut stream = TcpStream::connect(node.address).await.unwrap();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: t\r\nexpect: 100-continue\r\ncontent-length: 99000000\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let got = Client { stream, seen: Vec::new() }.answer().await;
    assert_eq!((got.status, got.header("connection")), (413, Some("close")));
}

#[tokio::test]
async fn more_requests_than_the_limit_are_told_to_come_back() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let setup = Setup { max_requests: 2, ..Setup::new("a", &engine.url) };
    let node = Node::start(&tasks, setup).await;
    let (first, _second) = (node.post(CHAT, HI).await, node.post(CHAT, STREAM).await);
    let (one, _two) = (engine.next().await, engine.next().await);
    for (path, anthropic) in SHAPES {
        let got = node.ask(path, HI).await;
        assert_error(&got, anthropic, 429, "rate_limit_error", "too_many_requests", "limit");
        assert_eq!(got.header("retry-after"), Some("1"));
    }
    // Whichever came first at the engine: when one has ended there is room for one.
    one.reply.send(answer(200, "application/json", "{}")).unwrap();
    drop(first);
    soon("room", async {
        while node.router.in_flight() == 2 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    let third = node.post(CHAT, HI).await;
    engine.next().await.reply.send(answer(200, "application/json", "{}")).unwrap();
    assert_eq!(third.answer().await.status, 200);
}

#[tokio::test]
async fn with_keys_only_their_holders_get_in_and_the_engine_sees_no_key() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "ann:secret-of-ann\n").unwrap();
    let setup = Setup { keys: Keys::read(file.path()).unwrap(), ..Setup::new("a", &engine.url) };
    let node = Node::start(&tasks, setup).await;
    for (path, anthropic) in SHAPES {
        for header in ["", "authorization: Bearer wrong-key\r\n", "x-api-key: secret-of-an\r\n"] {
            let got =
                node.send(&format!("POST {path} HTTP/1.1\r\n{header}"), HI.as_bytes()).await.answer().await;
            assert_error(&got, anthropic, 401, "authentication_error", "invalid_api_key", "API key");
        }
    }
    for line in ["GET /v1/models", "GET /v1/nothing", "DELETE /v1/models"] {
        assert_eq!(node.send(&format!("{line} HTTP/1.1\r\n"), b"").await.answer().await.status, 401);
    }
    assert!(engine.untouched());
    for header in ["authorization: Bearer secret-of-ann", "x-api-key: secret-of-ann"] {
        let client = node.send(&format!("POST {CHAT} HTTP/1.1\r\n{header}\r\n"), HI.as_bytes()).await;
        let exchange = engine.next().await;
        assert!(!exchange.headers.values().any(|value| value.to_str().unwrap().contains("secret")));
        exchange.reply.send(answer(200, "application/json", "{}")).unwrap();
        assert_eq!(client.answer().await.status, 200);
    }
}

/// From the key that a request comes with to the id by which the engine knows it, on whichever node that is.
#[tokio::test]
async fn whose_a_request_is_is_known_where_it_is_computed_and_said_to_nobody_else() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "ann \u{e4}:secret-of-ann\nbob:secret-of-bob\n").unwrap();
    let keys = || Keys::read(file.path()).unwrap();
    let b = Node::start(&tasks, Setup { keys: keys(), ..Setup::new("b", &engine.url) }).await;
    let setup = Setup { keys: keys(), dial: dial_to(b.relay), ..Setup::new("a", &engine.url) };
    let a = Node::start(&tasks, setup).await;
    let ask = async |id: &str, key: &str| {
        // Nobody is heard who says whose a request is.
        let head =
            format!("x-request-id: {id}\r\nx-api-key: {key}\r\nx-spark-owner: {}\r\n", hex::encode("eve"));
        a.send(&format!("POST {CHAT} HTTP/1.1\r\n{head}"), HI.as_bytes()).await
    };
    let owner = |node: &Node, internal: &str| node.router.owner_of(internal).map(|name| name.to_string());
    for (id, here) in [("one", true), ("two", false)] {
        if !here {
            a.router.set_own(own("", Fit::Unfit("is starting".into())));
            hear(&a, &b);
        }
        let client = ask(id, "secret-of-ann").await;
        let exchange = engine.next().await;
        assert!(!exchange.headers.contains_key("x-spark-owner"), "the engine need not know");
        let computes = if here { &a } else { &b };
        assert_eq!(owner(computes, &format!("chatcmpl-{id}-0a1b2c3d")).unwrap(), "ann \u{e4}");
        exchange.reply.send(answer(200, "application/json", "{}")).unwrap();
        let got = client.answer().await;
        assert_eq!((got.status, got.header("x-spark-owner")), (200, None));
        // Rows are stored when the answer may have ended.
        assert_eq!(owner(computes, &format!("chatcmpl-{id}-0a1b2c3d")).unwrap(), "ann \u{e4}");
    }
    assert_eq!(owner(&b, "chatcmpl-one-0a1b2c3d"), None, "what did not come through it is nobody's");
    let client = ask("two", "secret-of-bob").await;
    engine.next().await.reply.send(answer(200, "application/json", "{}")).unwrap();
    assert_eq!(client.answer().await.status, 200);
    assert_eq!(owner(&b, "chatcmpl-two-0a1b2c3d"), None, "two keys, one id: nobody must guess");
}

#[tokio::test]
async fn what_is_not_served_is_said_in_json() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let node = Node::alone(&tasks, &engine.url).await;
    let got = node.ask("/v1/images/generations", "{}").await;
    assert_error(&got, false, 404, "invalid_request_error", "not_found", "POST /v1/images/generations");
    let got = node.send("GET /v1/messages HTTP/1.1\r\n", b"").await.answer().await;
    assert_error(&got, true, 405, "invalid_request_error", "method_not_allowed", "does not take GET");
    assert!(engine.untouched());
}

// ---------------------------------------------------------------------------------------------- two nodes

#[tokio::test]
async fn a_request_is_passed_on_with_its_bytes_and_never_further() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let (mut a, mut b) = pair(&tasks, &dead_url().await, &engine.url).await;
    a.router.set_own(own("", Fit::Unfit("is starting".into())));
    // b would rather have it elsewhere: it has heard that a is idle and is itself of no use to a.
    b.router.set_peers(vec![Peer {
        name: "a".into(),
        connected: true,
        note: Some(Note { ready: true, ..Note::default() }),
    }]);
    let body = " {\"model\":\"m\", \"x\":1.50}";
    let client = a.post("/v1/completions?q", body).await;
    let exchange = engine.next().await;
    assert_eq!((exchange.target.as_str(), &exchange.body[..]), ("/v1/completions?q", body.as_bytes()));
    assert_eq!(exchange.headers["x-request-id"], "id");
    assert!(!exchange.headers.contains_key("x-spark-forwarded"));
    exchange.reply.send(answer(200, "application/json", "{\"y\": 1}")).unwrap();
    let got = client.answer().await;
    assert_eq!((got.status, got.text().as_str(), got.header("x-spark-box")), (200, "{\"y\": 1}", Some("b")));
    let (there, here) = (b.outcome().await, a.outcome().await);
    assert_eq!((here.node.as_deref(), here.forwarded_from.as_deref()), (Some("b"), None));
    assert_eq!(here.why, "b is the only node that can serve it: a: is starting");
    assert_eq!((there.node.as_deref(), there.forwarded_from.as_deref()), (Some("b"), Some("a")));
    assert_eq!(there.why, "b serves it: a passed it on");
    // What cannot be served there is not passed back.
    b.router.set_own(own(&engine.url, Fit::Unfit("is stopping".into())));
    let got = a.ask(CHAT, HI).await;
    assert_eq!(got.status, 503);
    assert!(got.text().contains("b: is stopping"), "{}", got.text());
}

#[tokio::test]
async fn a_stream_from_the_other_node_passes_event_by_event() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let (a, _b) = pair(&tasks, &dead_url().await, &engine.url).await;
    a.router.set_own(own("", Fit::Unfit("is starting".into())));
    let mut client = a.post("/v1/messages", STREAM).await;
    let (sender, response) = events();
    engine.next().await.reply.send(response).unwrap();
    for n in 0..5 {
        sender.send(format!("event: x\ndata: {n}\n\n").into()).await.unwrap();
        client.see(&format!("event: x\ndata: {n}\n\n")).await;
    }
    drop(sender);
    assert_eq!(client.answer().await.chunks().len(), 5);
}

#[tokio::test]
async fn a_client_can_say_which_box() {
    let tasks = Tasks::new();
    let (mut first, mut second) = (Engine::start(&tasks).await, Engine::start(&tasks).await);
    let (a, _b) = pair(&tasks, &first.url, &second.url).await;
    for _ in 0..3 {
        for (header, there) in
            [("x-spark-box: a", false), ("x-spark-box: b", true), ("x-spark-forwarded: x", false)]
        {
            let client = a.send(&format!("POST {CHAT} HTTP/1.1\r\n{header}\r\n"), HI.as_bytes()).await;
            let exchange = if there { second.next().await } else { first.next().await };
            assert!(!exchange.headers.contains_key("x-spark-box"));
            exchange.reply.send(answer(200, "application/json", "{}")).unwrap();
            assert_eq!(client.answer().await.header("x-spark-box"), Some(if there { "b" } else { "a" }));
        }
    }
    let got =
        a.send(&format!("POST {CHAT} HTTP/1.1\r\nx-spark-box: c\r\n"), HI.as_bytes()).await.answer().await;
    assert_error(&got, false, 400, "invalid_request_error", "box_not_found", "there are: a, b");
}

#[tokio::test]
async fn an_engine_that_cannot_be_reached_costs_one_try_on_the_other_node() {
    let tasks = Tasks::new();
    let mut second = Engine::start(&tasks).await;
    let (mut a, _b) = pair(&tasks, &dead_url().await, &second.url).await;
    // Equals take turns, so that one of two begins at the dead engine.
    let mut retries = 0;
    for _ in 0..2 {
        let client = a.post(CHAT, &chat(&"long ".repeat(1000))).await;
        second.next().await.reply.send(answer(200, "application/json", "{}")).unwrap();
        let got = client.answer().await;
        assert_eq!((got.status, got.header("x-spark-box")), (200, Some("b")));
        let outcome = a.outcome().await;
        retries += outcome.retries;
        if outcome.retries == 1 {
            assert!(outcome.why.starts_with("a failed (failed to reach the engine of a"), "{}", outcome.why);
        }
    }
    assert_eq!(retries, 1);
    assert!(a.meter.text().contains("sparkkv_router_retries_total 1"));
    assert!(second.untouched());
}

#[tokio::test]
async fn a_draining_engine_costs_one_try_and_two_of_them_an_answer() {
    let tasks = Tasks::new();
    let (mut first, mut second) = (Engine::start(&tasks).await, Engine::start(&tasks).await);
    let (mut a, _b) = pair(&tasks, &first.url, &second.url).await;
    for status in [502, 503, 504] {
        let client = a.post(CHAT, HI).await;
        let refusing = tokio::select! { x = first.next() => x, x = second.next() => x };
        refusing.reply.send(answer(status, "application/json", "{\"first\":1}")).unwrap();
        let helping = tokio::select! { x = first.next() => x, x = second.next() => x };
        helping.reply.send(answer(200, "application/json", "{\"second\":2}")).unwrap();
        assert_eq!(client.answer().await.text(), "{\"second\":2}");
        assert_eq!(a.outcome().await.retries, 1);
    }
    // Both refuse: the second's word counts, and there is no third try.
    let client = a.post(CHAT, HI).await;
    for body in ["{\"first\":1}", "{\"second\":2}"] {
        let refusing = tokio::select! { x = first.next() => x, x = second.next() => x };
        refusing.reply.send(answer(503, "application/json", body)).unwrap();
    }
    let got = client.answer().await;
    assert_eq!((got.status, got.text().as_str()), (503, "{\"second\":2}"));
    assert!(first.untouched() && second.untouched());
}

#[tokio::test]
async fn nobody_to_be_reached_is_a_bad_gateway_in_the_endpoints_shape() {
    let tasks = Tasks::new();
    let mut node = Node::alone(&tasks, &dead_url().await).await;
    for (path, anthropic) in SHAPES {
        let got = node.ask(path, HI).await;
        let kind = if anthropic { "api_error" } else { "server_error" };
        assert_error(&got, anthropic, 502, kind, "engine_unreachable", "failed to reach the engine of a");
        assert_eq!(node.outcome().await.end, End::Refused);
    }
}

#[tokio::test]
async fn an_engines_answer_survives_a_peer_that_cannot_be_reached() {
    let tasks = Tasks::new();
    let url = blunt_engine(
        &tasks,
        b"HTTP/1.1 503 Busy\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{\"own\":1}",
    )
    .await;
    let a = Node::alone(&tasks, &url).await;
    a.router.set_peers(vec![Peer {
        name: "b".into(),
        connected: true,
        note: Some(Note { ready: true, ..Note::default() }),
    }]);
    for _ in 0..2 {
        let got = a.ask(CHAT, HI).await;
        assert_eq!((got.status, got.text().as_str()), (503, "{\"own\":1}"));
        assert_eq!(got.header("x-spark-box"), Some("a"));
    }
}

#[tokio::test]
async fn a_conversation_returns_to_the_node_that_knows_it() {
    let tasks = Tasks::new();
    let (mut first, mut second) = (Engine::start(&tasks).await, Engine::start(&tasks).await);
    let (mut a, mut b) = pair(&tasks, &first.url, &second.url).await;
    let long = "what was said before ".repeat(200);
    // b serves it at its own port; a has never seen it but hears of it.
    let client = b.post(CHAT, &chat(&long)).await;
    second.next().await.reply.send(answer(200, "application/json", "{}")).unwrap();
    client.answer().await;
    b.outcome().await;
    hear(&a, &b);
    for turn in 0..4 {
        let body = json!({"model": "m", "messages": [{"role": "user", "content": long},
            {"role": "assistant", "content": "yes"}, {"role": "user", "content": format!("turn {turn}")}]});
        let client = a.post(CHAT, &body.to_string()).await;
        second.next().await.reply.send(answer(200, "application/json", "{}")).unwrap();
        assert_eq!(client.answer().await.header("x-spark-box"), Some("b"));
        let outcome = a.outcome().await;
        assert!(outcome.known_bytes > 4000 && outcome.known_bytes < outcome.prompt_bytes, "{outcome:?}");
        assert!(outcome.why.starts_with("b costs least"), "{}", outcome.why);
        b.outcome().await;
    }
    assert!(first.untouched());
}

#[tokio::test]
async fn without_sharing_everything_stays_while_there_is_an_engine() {
    let tasks = Tasks::new();
    let (mut first, mut second) = (Engine::start(&tasks).await, Engine::start(&tasks).await);
    let b = Node::start(&tasks, Setup::new("b", &second.url)).await;
    let setup = Setup { share: false, dial: dial_to(b.relay), ..Setup::new("a", &first.url) };
    let a = Node::start(&tasks, setup).await;
    hear(&a, &b);
    for _ in 0..4 {
        let client = a.post(CHAT, HI).await;
        first.next().await.reply.send(answer(200, "application/json", "{}")).unwrap();
        client.answer().await;
    }
    a.router.set_own(own("", Fit::Unfit("is starting".into())));
    let client = a.post(CHAT, HI).await;
    second.next().await.reply.send(answer(200, "application/json", "{}")).unwrap();
    assert_eq!(client.answer().await.status, 200);
}

#[tokio::test]
async fn what_peers_say_makes_their_load_without_counting_our_own_twice() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let (a, b) = pair(&tasks, &dead_url().await, &engine.url).await;
    a.router.set_own(own("", Fit::Unfit("is starting".into())));
    hear(&b, &a);
    let (_one, _two) = (a.post(CHAT, HI).await, b.post(CHAT, HI).await);
    let (_x, _y) = (engine.next().await, engine.next().await);
    assert_eq!(b.router.note().in_flight, 2);
    assert_eq!(b.router.note().from["a"], 1);
    let load = |a: &Node| a.router.candidates(&spark_kv::router::Ask::bare(Endpoint::Chat))[1].running;
    assert_eq!(load(&a), 1, "before the news of it");
    hear(&a, &b);
    assert_eq!(load(&a), 2, "after");
}

// ---------------------------------------------------------------------------------------------- models, responses

#[tokio::test]
async fn models_pass_as_they_are_until_the_other_node_has_more() {
    let tasks = Tasks::new();
    let (mut first, mut second) = (Engine::start(&tasks).await, Engine::start(&tasks).await);
    let (a, b) = pair(&tasks, &first.url, &second.url).await;
    let own_list = "{\"object\" :\"list\",\"data\":[{\"id\":\"m\", \"max_model_len\":10}]}";
    let client = a.send("GET /v1/models HTTP/1.1\r\n", b"").await;
    let exchange = first.next().await;
    assert_eq!((exchange.method.as_str(), exchange.target.as_str()), ("GET", "/v1/models"));
    exchange.reply.send(answer(200, "application/json", own_list)).unwrap();
    assert_eq!(client.answer().await.text(), own_list);
    assert!(second.untouched());
    b.router.set_own(Own { models: vec!["m".into(), "n".into()], ..own(&second.url, Fit::Well) });
    hear(&a, &b);
    let client = a.send("GET /v1/models HTTP/1.1\r\n", b"").await;
    first.next().await.reply.send(answer(200, "application/json", own_list)).unwrap();
    let more = "{\"data\":[{\"id\":\"m\"},{\"id\":\"n\", \"x\":1.0}]}";
    second.next().await.reply.send(answer(200, "application/json", more)).unwrap();
    let merged =
        "{\"object\":\"list\",\"data\":[{\"id\":\"m\", \"max_model_len\":10},{\"id\":\"n\", \"x\":1.0}]}";
    let got = client.answer().await;
    assert_eq!((got.status, got.text().as_str()), (200, merged));
    assert_eq!(got.header("content-length"), Some(merged.len().to_string().as_str()));
    // And a request for what only the other has goes there.
    let client = a.post(CHAT, r#"{"model":"n"}"#).await;
    second.next().await.reply.send(answer(200, "application/json", "{}")).unwrap();
    assert_eq!(client.answer().await.header("x-spark-box"), Some("b"));
}

#[tokio::test]
async fn a_response_is_read_cancelled_and_continued_where_it_was_made() {
    let tasks = Tasks::new();
    let (mut first, mut second) = (Engine::start(&tasks).await, Engine::start(&tasks).await);
    let (a, _b) = pair(&tasks, &first.url, &second.url).await;
    let make = "POST /v1/responses HTTP/1.1\r\nx-spark-box: b\r\nx-request-id: resp_7\r\n";
    let client = a.send(make, br#"{"model":"m","input":"hi"}"#).await;
    second.next().await.reply.send(answer(200, "application/json", "{\"id\":\"resp_7\"}")).unwrap();
    client.answer().await;
    for (line, body) in [
        ("GET /v1/responses/resp_7?stream=true", ""),
        ("POST /v1/responses/resp_7/cancel", ""),
        ("POST /v1/responses", r#"{"model":"m","previous_response_id":"resp_7"}"#),
    ] {
        let client = a.send(&format!("{line} HTTP/1.1\r\n"), body.as_bytes()).await;
        let exchange = second.next().await;
        assert_eq!(format!("{} {}", exchange.method, exchange.target), line);
        exchange.reply.send(answer(200, "application/json", "{}")).unwrap();
        assert_eq!(client.answer().await.status, 200);
    }
    // One that nobody remembers is looked for here, then there.
    let client = a.send("GET /v1/responses/resp_8 HTTP/1.1\r\n", b"").await;
    first.next().await.reply.send(answer(404, "application/json", "{}")).unwrap();
    second.next().await.reply.send(answer(200, "application/json", "{\"found\":1}")).unwrap();
    assert_eq!(client.answer().await.text(), "{\"found\":1}");
}

// ---------------------------------------------------------------------------------------------- engines that fail

const HALF: &[u8] =
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n\
    9\r\ndata: 1\n\n\r\n";

#[tokio::test]
async fn a_stream_that_breaks_off_ends_with_an_event_in_the_endpoints_shape() {
    let tasks = Tasks::new();
    let mut node = Node::alone(&tasks, &blunt_engine(&tasks, HALF).await).await;
    for (path, event) in [
        (CHAT, "data: {\"error\":{"),
        ("/v1/completions", "data: {\"error\":{"),
        ("/v1/messages", "event: error\ndata: {\"error\":{"),
        ("/v1/responses", "event: error\ndata: {\"code\":\"engine_broke_off\""),
    ] {
        let got = node.ask(path, STREAM).await;
        let events = got.events();
        let (_, end) = events.split_once("data: 1\n\n\n\n").unwrap();
        assert!(end.starts_with(event) && end.contains("the engine of a broke off"), "{end}");
        assert!(end.ends_with("}\n\n") && !end.contains("[DONE]"));
        let outcome = node.outcome().await;
        assert_eq!((outcome.end, outcome.status), (End::Broken, 200));
    }
    assert!(node.meter.text().contains("sparkkv_router_broken_total 4"));
}

#[tokio::test]
async fn an_answer_that_breaks_off_before_it_is_whole_is_a_bad_gateway() {
    let tasks = Tasks::new();
    for bytes in [
        &b""[..],
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{\"half\":",
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{\"ha\"\r\n",
    ] {
        let mut node = Node::alone(&tasks, &blunt_engine(&tasks, bytes).await).await;
        for (path, anthropic) in [(CHAT, false), ("/v1/messages", true)] {
            let got = node.ask(path, HI).await;
            let kind = if anthropic { "api_error" } else { "server_error" };
            assert_error(&got, anthropic, 502, kind, "engine_broke_off", "broke off before its answer was whole");
            assert_eq!(node.outcome().await.status, 502);
        }
    }
}

#[tokio::test]
async fn a_stream_through_a_node_that_dies_ends_with_an_event() {
    let tasks = Tasks::new();
    // What the dying node's relay has sent when its connection ends.
    let url = blunt_engine(&tasks, HALF).await;
    let address: SocketAddr = url.strip_prefix("http://").unwrap().parse().unwrap();
    let setup = Setup { dial: dial_to(address), ..Setup::new("a", "") };
    let mut a = Node::start(&tasks, setup).await;
    a.router.set_own(own("", Fit::Unfit("is starting".into())));
    a.router.set_peers(vec![Peer {
        name: "b".into(),
        connected: true,
        note: Some(Note { ready: true, ..Note::default() }),
    }]);
    let got = a.ask(CHAT, STREAM).await;
    assert!(got.events().contains("the engine of b broke off"), "{}", got.events());
    assert_eq!(a.outcome().await.end, End::Broken);
}

#[tokio::test]
async fn an_engine_that_falls_silent_is_given_up() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let setup = Setup { idle: Duration::from_millis(200), ..Setup::new("a", &engine.url) };
    let mut node = Node::start(&tasks, setup).await;
    // Before its answer.
    let client = node.post(CHAT, HI).await;
    let exchange = engine.next().await;
    let got = client.answer().await;
    assert_error(&got, false, 504, "server_error", "engine_silent", "has been silent for 0 s");
    soon("the engine to be let go", exchange.gone).await.unwrap();
    assert_eq!(node.outcome().await.status, 504);
    // In the middle of a stream.
    let client = node.post("/v1/messages", STREAM).await;
    let exchange = engine.next().await;
    let (sender, response) = events();
    exchange.reply.send(response).unwrap();
    sender.send("event: ping\n\n".into()).await.unwrap();
    let got = client.answer().await;
    assert!(got.events().contains("has been silent"), "{}", got.events());
    soon("the engine to be let go", exchange.gone).await.unwrap();
    assert_eq!(node.outcome().await.end, End::Broken);
}

// ---------------------------------------------------------------------------------------------- drain, metrics

#[tokio::test]
async fn draining_admits_nobody_and_lets_streams_end() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let node = Node::alone(&tasks, &engine.url).await;
    let mut client = node.post(CHAT, STREAM).await;
    let exchange = engine.next().await;
    let (sender, response) = events();
    exchange.reply.send(response).unwrap();
    sender.send("data: 1\n\n".into()).await.unwrap();
    client.see("data: 1").await;
    node.router.drain();
    assert!(!node.router.note().ready);
    for (path, anthropic) in SHAPES {
        let got = node.ask(path, HI).await;
        let kind = if anthropic { "overloaded_error" } else { "service_unavailable_error" };
        assert_error(&got, anthropic, 503, kind, "draining", "about to stop");
        assert_eq!(got.header("retry-after"), Some("5"));
    }
    assert_eq!(node.router.idle(Duration::ZERO).await, 1, "bounded");
    sender.send("data: [DONE]\n\n".into()).await.unwrap();
    drop(sender);
    assert_eq!(node.router.idle(LIMIT).await, 0);
    assert!(client.answer().await.events().ends_with("[DONE]\n\n"));
    assert_eq!(soon("tasks to end", node.tasks.stop(LIMIT)).await, 0);
}

#[tokio::test]
async fn requests_are_counted_by_endpoint_status_and_node() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let mut node = Node::alone(&tasks, &engine.url).await;
    let client = node.post("/v1/messages", HI).await;
    engine.next().await.reply.send(answer(200, "application/json", "{}")).unwrap();
    client.answer().await;
    node.outcome().await;
    node.ask(CHAT, "no json").await;
    node.outcome().await;
    node.ask("/v1/nothing", "{}").await;
    let text = node.meter.text();
    for line in [
        "sparkkv_router_requests_total{code=\"200\",endpoint=\"messages\",node=\"a\"} 1",
        "sparkkv_router_requests_total{code=\"400\",endpoint=\"chat\",node=\"none\"} 1",
        "sparkkv_router_requests_total{code=\"404\",endpoint=\"unknown\",node=\"none\"} 1",
        "sparkkv_router_added_microseconds_count 1",
        "sparkkv_router_ttft_seconds_count 0",
        "sparkkv_router_in_flight 0",
    ] {
        assert!(text.contains(line), "{line} in\n{text}");
    }
}
