//! What people and programs look at: `/metrics`, `/healthz`, the state of both boxes, and the page.
//!
//! Reads only. The picture is made once a second by the node, whoever looks, and written as JSON once; each viewer
//! gets the same bytes, so that three of them cost no more than one. Health is asked at the moment of the question,
//! because a minute-old 200 would be a lie.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Path, Query, State as With};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{Router, get};
use bytes::Bytes;
use futures_util::Stream;
use http::{HeaderMap, HeaderName, StatusCode, header};
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio_util::sync::CancellationToken;

use super::operators::refused;
use crate::meter::Meter;
use crate::observe::alerts::Alerts;
use crate::observe::health::Health;
use crate::observe::requests::{KEPT, Ledger};
use crate::observe::state::State;

/// Open event streams: a household and its wall displays. More get 503.
const VIEWERS: usize = 32;

/// Pages may load nothing from elsewhere and run no script that is not a file of ours.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The state, written once for everybody.
#[derive(Clone, Debug)]
pub struct Picture(Bytes);

impl Picture {
    pub fn of(state: &State) -> Self {
        Self(serde_json::to_vec(state).expect("plain data has a JSON form").into())
    }
}

/// What the faces read. The node fills it.
#[derive(Clone)]
pub struct Admin {
    pub meter: Meter,
    /// Sent once a second.
    pub picture: watch::Receiver<Picture>,
    /// Asked at each `/healthz`: cheap, does not wait.
    pub health: Arc<dyn Fn() -> Health + Send + Sync>,
    pub ledger: Arc<Mutex<Ledger>>,
    pub alerts: Arc<Mutex<Alerts>>,
    /// Ends the event streams when the node stops.
    pub stopping: CancellationToken,
}

#[derive(Clone)]
struct Shared {
    admin: Admin,
    viewers: Arc<Semaphore>,
}

/// The routes, to be merged into those of the public port.
pub fn routes(admin: Admin) -> Router {
    let shared = Shared { admin, viewers: Arc::new(Semaphore::new(VIEWERS)) };
    let mut router = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(healthz))
        .route("/api/v1/state", get(state))
        .route("/api/v1/requests", get(requests))
        .route("/api/v1/requests/{id}", get(request))
        .route("/api/v1/alerts", get(alerts))
        .route("/api/v1/events", get(events))
        .route("/", get(|headers: HeaderMap| async move { page("index.html", &headers) }));
    for name in Web::iter().filter(|name| name != "index.html") {
        let path = format!("/{name}");
        router = router.route(&path, get(move |headers: HeaderMap| async move { page(&name, &headers) }));
    }
    router.with_state(shared)
}

async fn metrics(With(shared): With<Shared>) -> Response {
    let text = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    (text, shared.admin.meter.text()).into_response()
}

async fn healthz(With(shared): With<Shared>) -> Response {
    let health = (shared.admin.health)();
    let code = if health.serves() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (code, fresh(), Json(health)).into_response()
}

async fn state(With(shared): With<Shared>) -> Response {
    let Picture(body) = shared.admin.picture.borrow().clone();
    (fresh(), [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

#[derive(Deserialize)]
struct Limit {
    limit: Option<usize>,
}

async fn requests(With(shared): With<Shared>, Query(Limit { limit }): Query<Limit>) -> Response {
    let recent = shared.admin.ledger.lock().recent(limit.unwrap_or(100).min(KEPT));
    (fresh(), Json(recent)).into_response()
}

async fn request(With(shared): With<Shared>, Path(id): Path<String>) -> Response {
    match shared.admin.ledger.lock().find(&id) {
        Some(request) => (fresh(), Json(request)).into_response(),
        None => {
            let what = format!("no request of this id among the last {KEPT} of this box");
            refused(StatusCode::NOT_FOUND, &what)
        }
    }
}

async fn alerts(With(shared): With<Shared>) -> Response {
    let (active, history) = {
        let alerts = shared.admin.alerts.lock();
        (alerts.active(), alerts.history())
    };
    (fresh(), Json(json!({ "active": active, "history": history }))).into_response()
}

/// The picture at once, then each new one.
async fn events(With(shared): With<Shared>) -> Response {
    let Ok(seat) = shared.viewers.clone().try_acquire_owned() else {
        let what = format!("{VIEWERS} viewers are looking already");
        return refused(StatusCode::SERVICE_UNAVAILABLE, &what);
    };
    let pulse = KeepAlive::new().interval(Duration::from_secs(10));
    (fresh(), Sse::new(pictures(shared.admin, seat)).keep_alive(pulse)).into_response()
}

fn pictures(admin: Admin, seat: OwnedSemaphorePermit) -> impl Stream<Item = Result<Event, Infallible>> {
    let mut picture = admin.picture;
    picture.mark_changed();
    futures_util::stream::unfold((picture, admin.stopping, seat), async |(mut picture, stopping, seat)| {
        stopping.run_until_cancelled(picture.changed()).await?.ok()?;
        let Picture(body) = picture.borrow_and_update().clone();
        // JSON is UTF-8 and serde writes it on one line.
        let event = Event::default().event("state").data(String::from_utf8_lossy(&body));
        Some((Ok(event), (picture, stopping, seat)))
    })
}

/// Facts of this moment are not to be kept by anybody on the way.
fn fresh() -> [(HeaderName, &'static str); 1] {
    [(header::CACHE_CONTROL, "no-store")]
}

/// The page's files, inside the binary.
#[derive(rust_embed::Embed)]
#[folder = "web/"]
struct Web;

fn page(name: &str, asked: &HeaderMap) -> Response {
    let Some(file) = Web::get(name) else { return StatusCode::NOT_FOUND.into_response() };
    let tag = format!("\"{}\"", hex::encode(&file.metadata.sha256_hash()[..16]));
    let head = [
        (header::ETAG, tag.as_str()),
        // Ask each time whether it changed: after an upgrade the page and the API belong together.
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    let known = asked.get(header::IF_NONE_MATCH).and_then(|value| value.to_str().ok());
    if known.is_some_and(|known| known.split(',').any(|one| one.trim().trim_start_matches("W/") == tag)) {
        return (StatusCode::NOT_MODIFIED, head).into_response();
    }
    let kind = match name.rsplit_once('.').map(|(_, end)| end) {
        Some("html") => "text/html; charset=utf-8",
        Some("js") => "text/javascript; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        Some("svg") => "image/svg+xml",
        _ => "application/octet-stream",
    };
    (head, [(header::CONTENT_TYPE, kind)], file.data.into_owned()).into_response()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use futures_util::StreamExt;
    use http_body_util::BodyExt;

    use super::*;
    use crate::base::clock::Micros;
    use crate::base::fault::{Code, Fault};
    use crate::observe::health::Verdict;
    use crate::observe::requests::Request;
    use crate::observe::state::NodeView;

    struct Case {
        port: std::net::SocketAddr,
        send: watch::Sender<Picture>,
        serves: Arc<AtomicBool>,
        admin: Admin,
    }

    fn named(name: &str) -> Picture {
        let node = NodeView { name: name.into(), ..NodeView::default() };
        Picture::of(&State { node, ..State::default() })
    }

    impl Case {
        async fn new(tasks: &crate::tasks::Tasks) -> Self {
            let (send, picture) = watch::channel(named("a"));
            let serves = Arc::new(AtomicBool::new(true));
            let told = serves.clone();
            let health = move || Health {
                status: if told.load(Ordering::Acquire) { Verdict::Degraded } else { Verdict::Down },
                ..Health::default()
            };
            let admin = Admin {
                meter: Meter::new(),
                picture,
                health: Arc::new(health),
                ledger: Arc::default(),
                alerts: Arc::default(),
                stopping: tasks.stopping(),
            };
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let port = listener.local_addr().unwrap();
            let routes = routes(admin.clone());
            tasks.spawn(crate::tasks::Kind::Chore, "admin", async move {
                axum::serve(listener, routes).await.unwrap();
            });
            Self { port, send, serves, admin }
        }

        async fn ask(&self, path: &str, head: &[(&str, &str)]) -> http::Response<hyper::body::Incoming> {
            let connector = hyper_util::client::legacy::connect::HttpConnector::new();
            let executor = hyper_util::rt::TokioExecutor::new();
            let client = hyper_util::client::legacy::Client::builder(executor)
                .build::<_, http_body_util::Empty<Bytes>>(connector);
            let mut ask = http::Request::get(format!("http://{}{path}", self.port));
            for (name, value) in head {
                ask = ask.header(*name, *value);
            }
            client.request(ask.body(http_body_util::Empty::new()).unwrap()).await.unwrap()
        }

        async fn json(&self, path: &str) -> (u16, serde_json::Value) {
            let answer = self.ask(path, &[]).await;
            let code = answer.status().as_u16();
            (code, serde_json::from_slice(&answer.into_body().collect().await.unwrap().to_bytes()).unwrap())
        }
    }

    #[tokio::test]
    async fn health_is_asked_at_the_moment_and_sets_the_code() {
        let case = Case::new(&crate::tasks::Tasks::new()).await;
        let (code, body) = case.json("/healthz").await;
        assert_eq!((code, body["status"].as_str()), (200, Some("degraded")));
        case.serves.store(false, Ordering::Release);
        let (code, body) = case.json("/healthz").await;
        assert_eq!((code, body["status"].as_str()), (503, Some("down")));
    }

    #[tokio::test]
    async fn state_requests_alerts_and_metrics_are_what_the_node_says() {
        let case = Case::new(&crate::tasks::Tasks::new()).await;
        case.admin.meter.counter("test_total", "help").inc();
        for n in 0..5 {
            case.admin.ledger.lock().add(Request { id: format!("r{n}"), ..Request::default() });
        }
        case.admin.alerts.lock().update(&[Fault::new(Code::TierOff, "canary")], Micros(0), 7);
        assert_eq!(case.json("/api/v1/state").await.1["node"]["name"], "a");
        let (_, two) = case.json("/api/v1/requests?limit=2").await;
        assert_eq!((two.as_array().unwrap().len(), two[0]["id"].as_str()), (2, Some("r4")));
        assert_eq!(case.json("/api/v1/requests/r3").await.1["id"], "r3");
        assert_eq!(case.json("/api/v1/requests/r9").await.0, 404);
        assert_eq!(case.json("/api/v1/alerts").await.1["active"][0]["id"], "tier-off-7");
        let text = case.ask("/metrics", &[]).await.into_body().collect().await.unwrap().to_bytes();
        assert!(String::from_utf8_lossy(&text).contains("sparkkv_test_total 1"));
    }

    #[tokio::test]
    async fn events_begin_with_the_picture_and_end_with_the_node() {
        let tasks = crate::tasks::Tasks::new();
        let case = Case::new(&tasks).await;
        let answer = case.ask("/api/v1/events", &[]).await;
        assert_eq!(answer.headers()["content-type"], "text/event-stream");
        let mut frames = answer.into_body().into_data_stream();
        let mut next = async || String::from_utf8(frames.next().await?.unwrap().to_vec()).ok();
        let first = next().await.unwrap();
        assert!(first.starts_with("event: state\ndata: {") && first.ends_with("}\n\n"), "{first}");
        assert!(first.contains("\"name\":\"a\""), "{first}");
        case.send.send(named("b")).unwrap();
        assert!(next().await.unwrap().contains("\"name\":\"b\""));
        case.admin.stopping.cancel();
        assert_eq!(next().await, None);
    }

    #[tokio::test]
    async fn viewers_are_bounded_and_a_seat_comes_free_again() {
        let case = Case::new(&crate::tasks::Tasks::new()).await;
        let mut open = Vec::new();
        for _ in 0..VIEWERS {
            let answer = case.ask("/api/v1/events", &[]).await;
            assert_eq!(answer.status(), 200);
            open.push(answer);
        }
        assert_eq!(case.ask("/api/v1/events", &[]).await.status(), 503);
        open.clear();
        // The server sees a viewer go when it writes to it.
        for n in 0..200 {
            case.send.send(named(&n.to_string())).unwrap();
            if case.ask("/api/v1/events", &[]).await.status() == 200 {
                return;
            }
            tokio::task::yield_now().await;
        }
        panic!("no seat came free");
    }

    #[tokio::test]
    async fn the_page_is_ours_alone_and_is_not_sent_twice() {
        let case = Case::new(&crate::tasks::Tasks::new()).await;
        for (path, kind) in [("/", "text/html"), ("/app.js", "text/javascript"), ("/style.css", "text/css")] {
            let answer = case.ask(path, &[]).await;
            let head = answer.headers().clone();
            assert_eq!(answer.status(), 200, "{path}");
            assert!(head["content-type"].to_str().unwrap().starts_with(kind), "{path}");
            let policy = head["content-security-policy"].to_str().unwrap();
            assert!(policy.contains("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
            let body = answer.into_body().collect().await.unwrap().to_bytes();
            let text = String::from_utf8_lossy(&body);
            for foreign in ["https://", "//cdn", "innerHTML", "<script>", "onclick=", "style=\""] {
                assert!(!text.contains(foreign), "{path} has {foreign}");
            }
            let again = case.ask(path, &[("if-none-match", head["etag"].to_str().unwrap())]).await;
            assert_eq!(again.status(), 304, "{path}");
        }
        assert_eq!(case.ask("/no.js", &[]).await.status(), 404);
    }
}
