//! How a request reaches an engine: over loopback to the own one, over an injected dialer to the other node.
//!
//! One pooled HTTP/1.1 client for both. Heads are cleaned of what belongs to one hop and otherwise passed as they
//! came; bodies are never touched. Dropping the answer, or the future that waits for it, closes the connection
//! under it: that is how an engine learns that nobody listens any more.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{Method, Request, Response, Uri};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use super::splice::Undo;

/// A connection to another node, whatever carries it.
pub trait Wire: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Wire for T {}

/// Opens a connection to the node of this name.
pub type Dial = Arc<dyn Fn(String) -> BoxFuture<'static, io::Result<Box<dyn Wire>>> + Send + Sync>;

/// A dialer for a node that has no other.
pub fn nobody() -> Dial {
    Arc::new(|name| {
        Box::pin(async move { Err(io::Error::other(format!("there is no way to {name} from here"))) })
    })
}

/// Names the node that passed a request on.
pub const FORWARDED: HeaderName = HeaderName::from_static("x-spark-forwarded");
/// In a request: the node that must serve it. In an answer: the node that did.
pub const BOX: HeaderName = HeaderName::from_static("x-spark-box");
/// Tokens of the prompt that were foretold to come out of a cache, when the request was placed.
pub const CACHED_FORETOLD: HeaderName = HeaderName::from_static("x-spark-cached-tokens-predicted");
/// Microseconds that the routers added.
pub const ROUTER_US: HeaderName = HeaderName::from_static("x-spark-router-us");
/// Milliseconds that a request waited in line for room at an engine.
pub const QUEUE_MS: HeaderName = HeaderName::from_static("x-spark-queue-ms");
/// In a request: `interactive`, `normal` or `batch`.
pub const PRIORITY: HeaderName = HeaderName::from_static("x-spark-priority");
/// The name of the API key that a request came with, in hexadecimal: what one node tells another. Nobody else is heard.
pub const OWNER: HeaderName = HeaderName::from_static("x-spark-owner");
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// An idle connection is kept this long. Shorter than the 5 s after which the engine's server closes its side, so
/// that a request is not written into a connection that is just being closed.
const KEEP: Duration = Duration::from_secs(2);

/// A loopback connect takes microseconds; to another box with its handshake a few milliseconds. Past this the
/// other side is not there.
const CONNECT: Duration = Duration::from_secs(5);

/// Connections kept to one place; more are opened and closed as needed.
const KEPT_MAX: usize = 64;

/// Why no answer's head came.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nothing was sent.
    #[error("{0}")]
    Connect(String),
    #[error("{0}")]
    BrokeOff(String),
    #[error("no answer for {0:?}")]
    Silent(Duration),
}

/// A request as it came in, to be sent as often as needed.
#[derive(Clone, Debug)]
pub struct Call {
    pub method: Method,
    pub target: PathAndQuery,
    pub headers: HeaderMap,
    pub body: Bytes,
    /// What was changed in the body that the answer would show.
    pub undo: Undo,
}

/// Where a call goes.
#[derive(Clone, Copy, Debug)]
pub(super) enum To<'a> {
    /// `http://host:port`.
    Engine(&'a str),
    /// A node's name, and ours.
    Peer { name: &'a str, own: &'a str },
}

/// The client. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Relay {
    client: Client<Connector, Full<Bytes>>,
}

impl Relay {
    pub fn new(dial: Dial) -> Self {
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(KEEP)
            .pool_max_idle_per_host(KEPT_MAX)
            .build(Connector { dial });
        Self { client }
    }

    /// Sends and waits for the answer's head, at most `idle`.
    pub async fn send(&self, to: To<'_>, call: &Call, idle: Duration) -> Result<Response<Incoming>, Error> {
        let request = request(to, call).map_err(Error::Connect)?;
        match tokio::time::timeout(idle, self.client.request(request)).await {
            Err(_) => Err(Error::Silent(idle)),
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) if error.is_connect() => Err(Error::Connect(chain(&error))),
            Ok(Err(error)) => Err(Error::BrokeOff(chain(&error))),
        }
    }
}

fn request(to: To<'_>, call: &Call) -> Result<Request<Full<Bytes>>, String> {
    let authority: Authority = match to {
        To::Engine(url) => {
            let rest = url.strip_prefix("http://").ok_or(format!("the engine's URL `{url}` is not http"))?;
            rest.trim_end_matches('/').parse().map_err(|_| format!("`{url}` is not a URL of an engine"))?
        }
        To::Peer { name, .. } => {
            format!("{}{PEER}", hex::encode(name)).parse().map_err(|_| format!("`{name}` is no name"))?
        }
    };
    let mut uri = http::uri::Parts::default();
    uri.scheme = Some(Scheme::HTTP);
    uri.authority = Some(authority);
    uri.path_and_query = Some(call.target.clone());
    let mut request = Request::new(Full::new(call.body.clone()));
    *request.method_mut() = call.method.clone();
    *request.uri_mut() = Uri::from_parts(uri).map_err(|error| error.to_string())?;
    *request.headers_mut() = call.headers.clone();
    let headers = request.headers_mut();
    strip_hop(headers);
    // The client sets its own host and length; whoever sent `expect` has its answer already.
    for name in [header::HOST, header::CONTENT_LENGTH, header::EXPECT, BOX, FORWARDED] {
        headers.remove(name);
    }
    match to {
        To::Peer { own, .. } => {
            headers.insert(FORWARDED, HeaderValue::from_str(own).map_err(|error| error.to_string())?);
        }
        To::Engine(_) => {
            headers.remove(OWNER);
        }
    }
    Ok(request)
}

/// Takes out what belongs to one connection: the fixed names, and those that `connection` lists.
pub(super) fn strip_hop(headers: &mut HeaderMap) {
    let listed: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        // A length is never one hop's affair, whoever lists it.
        .filter(|name| name != header::CONTENT_LENGTH)
        .collect();
    let fixed = [
        header::CONNECTION,
        HeaderName::from_static("keep-alive"),
        HeaderName::from_static("proxy-connection"),
        header::PROXY_AUTHENTICATE,
        header::PROXY_AUTHORIZATION,
        header::TE,
        header::TRAILER,
        header::TRANSFER_ENCODING,
        header::UPGRADE,
    ];
    for name in listed.into_iter().chain(fixed) {
        headers.remove(name);
    }
}

/// An error with its causes: the outermost alone says nothing.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    text
}

/// What the authority of another node ends with; in front of it stands the name in hexadecimal, so that any name
/// makes a valid one.
const PEER: &str = ".node.spark-kv";

#[derive(Clone)]
struct Connector {
    dial: Dial,
}

impl std::fmt::Debug for Connector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Connector")
    }
}

impl Connector {
    async fn connect(self, uri: Uri) -> io::Result<Link> {
        let host = uri.host().unwrap_or_default();
        let wire: Box<dyn Wire> = match host.strip_suffix(PEER).and_then(|name| hex::decode(name).ok()) {
            Some(name) => (self.dial)(String::from_utf8_lossy(&name).into_owned()).await?,
            None => {
                // A literal IPv6 address stands in brackets in a URL only.
                let host = host.trim_start_matches('[').trim_end_matches(']');
                let stream = TcpStream::connect((host, uri.port_u16().unwrap_or(80))).await?;
                stream.set_nodelay(true)?;
                Box::new(stream)
            }
        };
        Ok(Link(TokioIo::new(wire)))
    }
}

impl tower_service::Service<Uri> for Connector {
    type Response = Link;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<Link>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connect = self.clone().connect(uri);
        Box::pin(async move {
            let late =
                |_| io::Error::new(io::ErrorKind::TimedOut, format!("no connection within {CONNECT:?}"));
            tokio::time::timeout(CONNECT, connect).await.map_err(late)?
        })
    }
}

/// A connection in the client's hands.
struct Link(TokioIo<Box<dyn Wire>>);

impl Connection for Link {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl Read for Link {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().0).poll_read(cx, buf)
    }
}

impl Write for Link {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().0).poll_write(cx, buf)
    }
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().0).poll_flush(cx)
    }
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().0).poll_shutdown(cx)
    }
    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }
    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().0).poll_write_vectored(cx, bufs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(headers: &[(&'static str, &'static str)]) -> Call {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, HeaderValue::from_static(value));
        }
        let target = PathAndQuery::from_static("/v1/x?a=%20b&&c");
        Call {
            method: Method::POST,
            target,
            headers: map,
            body: Bytes::from_static(b"{}"),
            undo: Undo::default(),
        }
    }

    #[test]
    fn what_belongs_to_one_hop_stays_behind_and_all_else_goes_on() {
        let call = call(&[
            ("connection", "keep-alive, X-Secret-Hop, content-length"),
            ("x-secret-hop", "1"),
            ("te", "trailers"),
            ("host", "public:8000"),
            ("expect", "100-continue"),
            ("x-spark-box", "b"),
            ("x-spark-forwarded", "evil"),
            ("content-type", "application/json"),
            ("x-anything", "one"),
            ("x-anything", "two"),
        ]);
        let request = request(To::Engine("http://127.0.0.1:8001"), &call).unwrap();
        let mut left: Vec<_> =
            request.headers().iter().map(|(n, v)| format!("{n}: {}", v.to_str().unwrap())).collect();
        left.sort();
        assert_eq!(left, ["content-type: application/json", "x-anything: one", "x-anything: two"]);
        assert_eq!(request.uri(), "http://127.0.0.1:8001/v1/x?a=%20b&&c");
    }

    #[test]
    fn a_request_to_another_node_says_who_passed_it_on() {
        let to = To::Peer { name: "box 2/ö", own: "box1" };
        let request = request(to, &call(&[("x-spark-forwarded", "evil")])).unwrap();
        let forwarded: Vec<_> = request.headers().get_all(FORWARDED).iter().collect();
        assert_eq!(forwarded, ["box1"]);
    }

    #[test]
    fn an_engine_that_is_not_http_is_an_error_and_not_a_panic() {
        for url in ["https://x", "", "http://", "http:// space", "unix:/x"] {
            assert!(request(To::Engine(url), &call(&[])).is_err(), "{url}");
        }
    }
}
