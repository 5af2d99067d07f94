//! An answer's body on its way through: each frame as it came, the guard with it.
//!
//! A stream of events passes frame by frame. When it breaks off or falls silent, an event in the endpoint's own
//! shape ends it. Any other answer was first taken in whole (up to a limit), so that its failure could still
//! become a status; what it says then passes unchanged too.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep};

use super::flight::{End, Flight};
use super::refusal::Refusal;
use super::relay::chain;
use super::splice::{Mender, Undo};

/// The body handed to the client's connection.
#[derive(Debug)]
pub struct Passage {
    held: VecDeque<Frame<Bytes>>,
    rest: Option<Incoming>,
    wait: Wait,
    /// Whether it is a stream of events, which can say in its own words that it broke off.
    events: bool,
    mender: Mender,
    flight: Flight,
}

impl Passage {
    pub(super) fn new(
        held: VecDeque<Frame<Bytes>>,
        rest: Option<Incoming>,
        idle: Duration,
        events: bool,
        undo: Undo,
        flight: Flight,
    ) -> Self {
        let mender = Mender::new(if events { undo } else { Undo::default() });
        let mut this = Self { held, rest, wait: Wait::new(idle), events, mender, flight };
        // A body that is empty is never asked for its frames.
        if this.at_end() {
            this.flight.ended(End::Whole);
        }
        this
    }

    /// A body of our own making, for an answer that no engine gave.
    pub(super) fn of(bytes: Bytes, flight: Flight) -> Self {
        let held = VecDeque::from([Frame::data(bytes)]);
        Self::new(held, None, Duration::ZERO, false, Undo::default(), flight)
    }

    fn at_end(&self) -> bool {
        self.held.is_empty() && self.rest.as_ref().is_none_or(Body::is_end_stream) && self.mender.is_empty()
    }

    /// Lets a frame pass; what is left of it may be nothing.
    fn pass(&mut self, frame: Frame<Bytes>) -> Frame<Bytes> {
        if let Some(bytes) = frame.data_ref() {
            self.flight.passing(bytes, self.events);
        }
        let frame = frame.map_data(|bytes| self.mender.push(bytes));
        // A body of known length is not asked again after its last byte.
        if self.at_end() {
            self.flight.ended(End::Whole);
        }
        frame
    }

    /// The engine is lost in the middle of its answer.
    fn broken(&mut self, refusal: &Refusal) -> Result<Frame<Bytes>, std::io::Error> {
        self.rest = None;
        self.flight.ended(End::Broken);
        let (node, endpoint) = (self.flight.node().unwrap_or_default(), self.flight.endpoint());
        tracing::warn!(
            id = self.flight.id(),
            node,
            endpoint = endpoint.name(),
            "answer ends early: {refusal}"
        );
        // Other bodies have a length, or a client that waits for one whole document: only a cut connection tells.
        if self.events {
            Ok(Frame::data([self.mender.rest(), refusal.event(endpoint)].concat().into()))
        } else {
            Err(std::io::Error::other(refusal.to_string()))
        }
    }
}

impl Passage {
    fn poll_rest(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Refusal>>> {
        let Some(rest) = &mut self.rest else { return Poll::Ready(None) };
        self.wait.poll_frame(rest, cx, self.flight.node().unwrap_or_default())
    }
}

impl Body for Passage {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        let this = self.get_mut();
        loop {
            let next = match this.held.pop_front() {
                Some(frame) => Some(Ok(frame)),
                None => ready!(this.poll_rest(cx)),
            };
            match next {
                None => {
                    this.rest = None;
                    this.flight.ended(End::Whole);
                    let left = this.mender.rest();
                    return Poll::Ready((!left.is_empty()).then_some(Ok(Frame::data(left))));
                }
                Some(Ok(frame)) => {
                    let frame = this.pass(frame);
                    // The mender waits for the rest of an event, or has left one out.
                    if !frame.data_ref().is_some_and(Bytes::is_empty) {
                        return Poll::Ready(Some(Ok(frame)));
                    }
                }
                Some(Err(refusal)) => return Poll::Ready(Some(this.broken(&refusal))),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.at_end()
    }

    fn size_hint(&self) -> SizeHint {
        let held: u64 = self.held.iter().filter_map(Frame::data_ref).map(|bytes| bytes.len() as u64).sum();
        // A stream of events may get one of ours at its end: its length is open even where the engine gave one.
        let rest = match &self.rest {
            Some(_) if self.events => None,
            Some(rest) => rest.size_hint().exact(),
            None => Some(0),
        };
        rest.map_or_else(SizeHint::default, |rest| SizeHint::with_exact(held + rest))
    }
}

/// Waits for an engine's next frame, but not for ever. Only time in which the engine owes us something counts: a
/// client that reads slowly is not the engine's silence.
#[derive(Debug)]
pub(super) struct Wait {
    idle: Duration,
    timer: Pin<Box<Sleep>>,
    waiting: bool,
}

impl Wait {
    pub fn new(idle: Duration) -> Self {
        Self { idle, timer: Box::pin(tokio::time::sleep(idle)), waiting: false }
    }

    pub fn poll_frame(
        &mut self,
        body: &mut Incoming,
        cx: &mut Context<'_>,
        node: &str,
    ) -> Poll<Option<Result<Frame<Bytes>, Refusal>>> {
        if let Poll::Ready(frame) = Pin::new(body).poll_frame(cx) {
            self.waiting = false;
            let broke_off =
                |error: hyper::Error| Refusal::BrokeOff { node: node.to_owned(), why: chain(&error) };
            return Poll::Ready(frame.map(|frame| frame.map_err(broke_off)));
        }
        if !self.waiting {
            self.waiting = true;
            self.timer.as_mut().reset(Instant::now() + self.idle);
        }
        ready!(self.timer.as_mut().poll(cx));
        Poll::Ready(Some(Err(Refusal::Silent { node: node.to_owned(), seconds: self.idle.as_secs() })))
    }

    /// The next frame, awaited.
    pub async fn frame(&mut self, body: &mut Incoming, node: &str) -> Option<Result<Frame<Bytes>, Refusal>> {
        std::future::poll_fn(|cx| self.poll_frame(body, cx, node)).await
    }
}
