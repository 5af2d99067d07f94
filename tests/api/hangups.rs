//! Thousands of clients that go away at any moment: in line, on the way, in the middle of an answer. Nothing stays.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use spark_kv::router::InLine;
use tower_service::Service;

use super::*;

const CLIENTS: usize = 50;
const EACH: usize = 200;
const SEED: u64 = 7;

/// Requests that the engine works on, until it is let go of or done.
#[derive(Clone, Default)]
struct Working(Arc<AtomicU32>);

struct One(Working);

impl Working {
    fn one(&self) -> One {
        self.0.fetch_add(1, Ordering::SeqCst);
        One(self.clone())
    }
}

impl Drop for One {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// An engine that streams where it is asked to, and now and then fails, or dies in the middle.
async fn busy_engine(tasks: &Tasks, working: Working) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let inner = tasks.clone();
    let count = Arc::new(AtomicU32::new(0));
    tasks.spawn(Kind::Chore, "engine", async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (working, count) = (working.clone(), Arc::clone(&count));
            inner.spawn(Kind::Chore, "engine connection", async move {
                let service = service_fn(move |request| work(working.one(), Arc::clone(&count), request));
                let http = hyper::server::conn::http1::Builder::new();
                let _ = http.serve_connection(TokioIo::new(stream), service).await;
            });
        }
    });
    url
}

async fn work(
    one: One,
    count: Arc<AtomicU32>,
    request: Request<hyper::body::Incoming>,
) -> Result<Response<Body>, Infallible> {
    let Ok(body) = request.into_body().collect().await else { return Ok(Response::default()) };
    let streams = body.to_bytes().windows(13).any(|window| window == b"\"stream\":true");
    let n = count.fetch_add(1, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_micros(u64::from(n % 7) * 300)).await;
    if n.is_multiple_of(16) {
        return Ok(answer(500, "application/json", "{}"));
    }
    if !streams {
        return Ok(answer(
            200,
            "application/json",
            "{\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":1}}",
        ));
    }
    let frames = futures_util::stream::unfold((0, one), move |(at, one)| async move {
        tokio::time::sleep(Duration::from_micros(200)).await;
        match at {
            3 if n % 16 == 1 => Some((Err(std::io::Error::other("dies")), (9, one))),
            0..4 => Some((Ok(Bytes::from_static(b"data: {\"x\":1}\n\n")), (at + 1, one))),
            4 => Some((Ok(Bytes::from_static(b"data: [DONE]\n\n")), (9, one))),
            _ => None,
        }
    });
    let response = Response::builder().header("content-type", "text/event-stream");
    Ok(response.body(Body::from_stream(frames)).unwrap())
}

/// One client's requests, each given up at any moment, or not at all. Dropping the call, or the body of its answer, is
/// what the server does when a connection is closed.
async fn client(mut app: axum::Router, number: usize) {
    let mut dice = StdRng::seed_from_u64(SEED * 1000 + number as u64);
    for _ in 0..EACH {
        let body = if dice.random_bool(0.6) { STREAM } else { HI };
        let path = [CHAT, "/v1/messages", "/v1/completions"][dice.random_range(0..3)];
        let class = ["interactive", "normal", "batch"][dice.random_range(0..3)];
        let key = ["secret-of-ann", "secret-of-bob"][dice.random_range(0..2)];
        let request = Request::post(path).header("x-api-key", key).header("x-spark-priority", class);
        let request = request.body(Body::from(body)).unwrap();
        let whole = async {
            let answer = app.call(request).await.unwrap();
            let _ = answer.into_body().collect().await;
        };
        let patience = match dice.random_range(0..4) {
            0 => LIMIT,
            _ => Duration::from_micros(dice.random_range(0..20_000)),
        };
        let _ = tokio::time::timeout(patience, whole).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_ten_thousand_random_hang_ups_nothing_is_left() {
    let tasks = Tasks::new();
    let working = Working::default();
    let url = busy_engine(&tasks, working.clone()).await;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(
        file.path(),
        "ann [class=interactive limit=30]: secret-of-ann\nbob [class=interactive isolated]: secret-of-bob\n",
    )
    .unwrap();
    let meter = Meter::new();
    let options = Options {
        name: "a".into(),
        share: true,
        strategy: Strategy::Cost,
        idle: LIMIT,
        max_requests: 256,
        admission: Admission { places: 4, queue: 32 },
        dial: nobody(),
    };
    let router = Router::new(options, Clock::real(), &meter);
    router.set_own(own(&url, Fit::Well));
    let limits =
        Limits { max_body: units::Bytes(1 << 20), drop_billing_line: true, aliases: BTreeMap::new() };
    let open = Open::new(router.clone(), Keys::read(file.path()).unwrap(), limits);
    let app = api::assemble(&open, axum::Router::new());
    futures_util::future::join_all((0..CLIENTS).map(|number| client(app.clone(), number))).await;
    let settled = async {
        while !(router.is_idle() && working.0.load(Ordering::SeqCst) == 0) {
            tokio::task::yield_now().await;
        }
    };
    soon("everything to settle", settled).await;
    let note = router.note();
    assert_eq!((router.in_flight(), note.in_flight, note.queue_s), (0, 0, 0.0));
    assert_eq!(router.waiting(), InLine::default());
    assert!(note.from.is_empty());
    let text = meter.text();
    for line in [
        "router_in_flight 0",
        "router_queue_depth{class=\"normal\"} 0",
        "router_queue_depth{class=\"batch\"} 0",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    // Each was counted once, and of every kind there were some.
    let counted: Vec<(&str, u64)> = text
        .lines()
        .filter_map(|line| line.strip_prefix("sparkkv_router_requests_total{")?.rsplit_once(' '))
        .map(|(labels, count)| (labels, count.parse().unwrap()))
        .collect();
    assert_eq!(counted.iter().map(|(_, count)| count).sum::<u64>(), (CLIENTS * EACH) as u64, "{counted:?}");
    for code in ["200", "429", "499", "500"] {
        let code = format!("code=\"{code}\"");
        assert!(counted.iter().any(|(labels, _)| labels.contains(&code)), "{code}: {counted:?}");
    }
    // What is remembered of so few prompts is bounded by how many there are.
    let recent: BTreeSet<u64> = note.recent.iter().copied().collect();
    assert!(recent.len() <= 64, "{}", recent.len());
}
