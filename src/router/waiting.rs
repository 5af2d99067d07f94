//! An answer that begins before its request has a place: comments until the engine's stream is there.
//!
//! Clients and proxies give up on a connection on which nothing comes. A stream that waits in line is therefore begun by
//! the router: a comment (`: waiting`), which every reader of events skips, at once and every few seconds. The price is
//! that the status is said: what goes wrong after that is an event in the endpoint's own shape, without `[DONE]`.
//!
//! The request rides in the body: dropping it takes the request out of the line, or ends the work upstream.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::future::BoxFuture;
use http::header::{self, HeaderValue};
use http::{Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep};

use super::ask::Endpoint;
use super::passage::Passage;
use super::refusal::Refusal;

/// The rest of a request's way.
pub(super) type Way = BoxFuture<'static, Result<Response<Passage>, Refusal>>;

/// Comments come so often. Proxies give up after 30 to 60 seconds of silence, the impatient among clients after 10.
const EVERY: Duration = Duration::from_secs(5);

const COMMENT: &[u8] = b": waiting\n\n";

/// An engine's error is some hundred bytes; what is longer is cut off.
const ERROR_MAX: usize = 64 << 10;

enum Stage {
    /// A comment is due.
    Owing(Way),
    Waiting(Way, Pin<Box<Sleep>>),
    Passing(Box<Passage>),
    /// The engine said something else than a stream.
    Failed(Box<Passage>, BytesMut),
    Over,
}

/// A body that is there before its request has a place.
pub struct Waiting {
    endpoint: Endpoint,
    stage: Stage,
}

impl std::fmt::Debug for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Waiting").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

impl Waiting {
    pub(super) fn answer(endpoint: Endpoint, way: Way) -> Response<Carried> {
        let mut response = Response::new(Carried::Waiting(Self { endpoint, stage: Stage::Owing(way) }));
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        response
    }

    /// What the engine said instead of a stream, as the event of an error.
    fn event(&self, said: &[u8]) -> Bytes {
        let name: &[u8] = match self.endpoint {
            Endpoint::Messages | Endpoint::Responses => b"event: error\n",
            _ => b"",
        };
        let mut event = BytesMut::from(name);
        for line in said.split(|byte| *byte == b'\n') {
            event.extend_from_slice(b"data: ");
            event.extend_from_slice(line.trim_ascii_end());
            event.extend_from_slice(b"\n");
        }
        event.extend_from_slice(b"\n");
        event.freeze()
    }
}

type Next = Option<Result<Frame<Bytes>, std::io::Error>>;

fn data(bytes: impl Into<Bytes>) -> Next {
    Some(Ok(Frame::data(bytes.into())))
}

impl Body for Waiting {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Next> {
        let this = self.get_mut();
        loop {
            match std::mem::replace(&mut this.stage, Stage::Over) {
                Stage::Owing(way) => {
                    let sleep = Box::pin(tokio::time::sleep_until(Instant::now() + EVERY));
                    this.stage = Stage::Waiting(way, sleep);
                    return Poll::Ready(data(Bytes::from_static(COMMENT)));
                }
                Stage::Waiting(mut way, mut sleep) => match way.as_mut().poll(cx) {
                    Poll::Pending if sleep.as_mut().poll(cx).is_ready() => this.stage = Stage::Owing(way),
                    Poll::Pending => {
                        this.stage = Stage::Waiting(way, sleep);
                        return Poll::Pending;
                    }
                    Poll::Ready(Err(refusal)) => return Poll::Ready(data(refusal.event(this.endpoint))),
                    Poll::Ready(Ok(response)) => {
                        let events = is_stream(&response);
                        let passage = Box::new(response.into_body());
                        this.stage = match events {
                            true => Stage::Passing(passage),
                            false => Stage::Failed(passage, BytesMut::new()),
                        };
                    }
                },
                Stage::Passing(mut passage) => {
                    let next = Pin::new(&mut *passage).poll_frame(cx);
                    if !matches!(next, Poll::Ready(None)) {
                        this.stage = Stage::Passing(passage);
                    }
                    return next;
                }
                Stage::Failed(mut passage, mut said) => match Pin::new(&mut *passage).poll_frame(cx) {
                    Poll::Pending => {
                        this.stage = Stage::Failed(passage, said);
                        return Poll::Pending;
                    }
                    Poll::Ready(Some(Ok(frame))) => {
                        let left = ERROR_MAX.saturating_sub(said.len());
                        said.extend(frame.data_ref().iter().flat_map(|bytes| bytes.iter().take(left)));
                        this.stage = Stage::Failed(passage, said);
                    }
                    Poll::Ready(Some(Err(_)) | None) => return Poll::Ready(data(this.event(&said))),
                },
                Stage::Over => return Poll::Ready(None),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.stage, Stage::Over)
    }
}

fn is_stream<B>(response: &Response<B>) -> bool {
    let kind = response.headers().get(header::CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    response.status() == StatusCode::OK && kind.starts_with(b"text/event-stream")
}

/// A body of an answer, begun by the engine or by the router.
#[derive(Debug)]
pub enum Carried {
    Passing(Box<Passage>),
    Waiting(Waiting),
}

impl From<Passage> for Carried {
    fn from(passage: Passage) -> Self {
        Self::Passing(Box::new(passage))
    }
}

impl Body for Carried {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Next> {
        let next = match self.get_mut() {
            Self::Passing(passage) => Pin::new(&mut **passage).poll_frame(cx),
            Self::Waiting(waiting) => Pin::new(waiting).poll_frame(cx),
        };
        Poll::Ready(ready!(next))
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Passing(passage) => passage.is_end_stream(),
            Self::Waiting(waiting) => waiting.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Passing(passage) => passage.size_hint(),
            Self::Waiting(_) => SizeHint::default(),
        }
    }
}
