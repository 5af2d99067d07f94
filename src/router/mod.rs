//! Judgement: which node serves a request, and the way there and back.
//!
//! `ask` reads what a request asks for, `prefix` remembers what each node computed, `price` says what each box would
//! cost in seconds, `policy` decides, `book` keeps what is in flight and learns from it, `splice` changes the few bytes
//! that have to change: all pure. `tokens` makes a prompt's exact token ids and `chain` the engine's hashes of them;
//! `foresee` waits for that before a request is placed. `queue` says who goes next where engines have all that they can
//! take, `line` lets the others wait, `waiting` keeps their connections alive meanwhile. `relay` carries the bytes, `flight` and `passage` count a
//! request until the last byte of its answer, `state` holds what they share. `miss` says afterwards why a turn was
//! computed again.
//!
//! Promises: bytes pass unchanged both ways. A client that goes away ends the work upstream at once. A request is
//! tried on a second node at most once, and only while nothing of an answer has been passed on: when the first
//! could not be reached or said 502, 503 or 504. A request that another node passed on is served here or refused,
//! never passed on again.

mod ask;
mod book;
mod catalog;
pub mod chain;
pub mod coverage;
mod flight;
mod foresee;
#[cfg(any(test, fuzzing))]
pub mod laws;
mod line;
mod miss;
mod nonce;
mod owners;
mod passage;
mod policy;
mod prefix;
mod price;
mod queue;
mod refusal;
mod relay;
mod splice;
mod state;
pub mod tokens;
mod usage;
mod waiting;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use http::header::{self, HeaderMap, HeaderValue};
use http::{Response, StatusCode};
use hyper::body::Incoming;
use tokio::sync::broadcast;

use crate::base::clock::Clock;
use crate::meter::Meter;
use crate::settings::Strategy;

pub use ask::{Ask, Endpoint};
pub use chain::Reach;
pub use flight::{End, Flight, HUNG_UP, Outcome};
pub use foresee::{Foresee, Foreseen, Known, Looking, Slot};
pub use line::{Admission, Rights, Waiting as InLine};
pub use miss::{Cause, Conversations, Miss, Outline, Turn};
pub use nonce::drop_nonce;
pub use passage::Passage;
pub use policy::{Basis, Candidate, Decision, Fit, Reason, Request, Terms};
pub use prefix::Mark;
pub use price::speed::Speeds;
pub use price::{Link, Links};
pub use queue::Class;
pub use refusal::Refusal;
pub use relay::{
    BOX, CACHED_FORETOLD, Call, Dial, FORWARDED, OWNER, PRIORITY, QUEUE_MS, REQUEST_ID, ROUTER_US, Wire,
    nobody,
};
pub use splice::{Alias, Undo, splice};
pub use state::{Note, Own, Peer};
pub use usage::Usage;
pub use waiting::{Carried, Waiting};

/// What a router is made with.
pub struct Options {
    /// This node's name.
    pub name: String,
    /// Whether requests may go to the other node when that looks better (`router.share`).
    pub share: bool,
    /// How a place is chosen (`router.strategy`).
    pub strategy: Strategy,
    /// How long a silent engine is waited for (`router.idle_timeout_s`).
    pub idle: Duration,
    /// Most requests in flight (`listen.max_requests`).
    pub max_requests: u32,
    /// Requests that the own engine gets at once, and how many may wait for room.
    pub admission: Admission,
    pub dial: Dial,
}

/// What binds a request to a place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Aim {
    /// The policy decides.
    Best,
    /// Here, and why.
    Here(String),
    /// The client asks for this node.
    Pinned(String),
    /// It continues something that only this node has.
    Held(String),
    /// It costs next to nothing: the own engine while it can.
    Near,
}

/// The router. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Router {
    shared: Arc<state::Shared>,
    relay: relay::Relay,
    share: bool,
    strategy: Strategy,
    idle: Duration,
}

/// A request on its way to a place.
struct Wanted {
    ask: Ask,
    aim: Aim,
    call: Call,
    request: Request,
    foreseen: Option<Foreseen>,
}

/// A stream that waits longer in line is begun by the router ([`waiting`]).
const QUIET: Duration = Duration::from_secs(1);

/// An answer that is not a stream is taken in up to this size before its head is passed on, so that an engine that
/// dies in the middle becomes a 502 and not half a document. Larger ones pass as they come.
const WHOLE_MAX: usize = 4 << 20;

impl Router {
    pub fn new(options: Options, clock: Clock, meter: &Meter) -> Self {
        let Options { name, share, strategy, idle, max_requests, admission, dial } = options;
        let shared = Arc::new(state::Shared::new(name, max_requests, admission, clock, meter));
        Self { shared, relay: relay::Relay::new(dial), share, strategy, idle }
    }

    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// This node's engine has changed.
    pub fn set_own(&self, own: Own) {
        self.shared.set_own(own);
    }

    /// Who finds out what prompts hold. Said once, before the first request.
    pub fn foresee_with(&self, foresee: Foresee) {
        let _ = self.shared.foresee.set(foresee);
    }

    /// All other nodes as they are now.
    pub fn set_peers(&self, peers: Vec<Peer>) {
        self.shared.set_peers(peers);
    }

    /// What to tell the other nodes.
    pub fn note(&self) -> Note {
        self.shared.note()
    }

    /// What became of each request, from now on.
    pub fn outcomes(&self) -> broadcast::Receiver<Outcome> {
        self.shared.outcomes.subscribe()
    }

    /// Whose request the engine of this node means by its id: the name of the API key, or an empty one. None: it is not
    /// clear, and nobody must guess.
    pub fn owner_of(&self, internal: &str) -> Option<Arc<str>> {
        self.shared.owners.lock().of(internal)
    }

    /// The nodes as the next request would find them, when nothing is foreseen of it.
    pub fn candidates(&self, ask: &Ask) -> Vec<Candidate> {
        self.shared.candidates(ask, &self.shared.wanted(ask, None), None)
    }

    /// Another engine is served here: what is assumed of its speed, and how rows come to it. The rest is learned anew.
    pub fn begin_engine(&self, speeds: Speeds, links: Links) {
        self.shared.begin_engine(speeds, links);
    }

    /// This box's clock has fallen to a share of what it was when its speeds were learned, or is back at 1: its price
    /// follows at once, before a slower answer has been seen.
    pub fn set_clock(&self, share: f64) {
        self.shared.set_clock(share);
    }

    /// While the time to a first token is not what was foretold, so that no learned speed decides: by which share it is
    /// longer on average, and by which share it is off.
    pub fn drift(&self) -> Option<(f64, f64)> {
        self.shared.drift()
    }

    pub fn in_flight(&self) -> u32 {
        self.shared.in_flight()
    }

    /// Requests that wait for room at an engine.
    pub fn waiting(&self) -> InLine {
        self.shared.waiting()
    }

    /// Nothing is in flight, nobody waits, and nothing counts against a key or is somebody's.
    pub fn is_idle(&self) -> bool {
        self.in_flight() == 0 && self.shared.is_idle() && self.shared.owners.lock().is_idle()
    }

    /// Admits no more requests: they get 503 with a time to try again.
    pub fn drain(&self) {
        self.shared.drain();
    }

    /// Waits until the requests in flight have ended, at most `limit`. Returns how many are left.
    pub async fn idle(&self, limit: Duration) -> u32 {
        let _ = tokio::time::timeout(limit, self.shared.idle()).await;
        self.in_flight()
    }

    /// Counts a request from now on, or refuses it. `forwarded_from` is the node that passed it on to us.
    pub fn admit(
        &self,
        endpoint: Endpoint,
        id: String,
        forwarded_from: Option<String>,
    ) -> Result<Flight, Refusal> {
        let from = forwarded_from.map(|name| self.shared.known_peer(&name));
        let flight = Flight::admit(&self.shared, endpoint, id, from);
        if let Err(refusal) = &flight {
            self.turned_away(endpoint, refusal);
        }
        flight
    }

    /// Counts a request that was refused before it was admitted.
    pub fn turned_away(&self, endpoint: Endpoint, refusal: &Refusal) {
        let labels = [endpoint.name(), &refusal.status().to_string(), "none"];
        self.shared.series.requests.with_label_values(&labels).inc();
    }

    /// Whether an engine is known to serve a model under this very name.
    pub fn serves(&self, name: &str) -> bool {
        self.shared.models().is_some_and(|known| known.iter().any(|model| model == name))
    }

    /// Whether somebody serves the model that is asked for.
    pub fn knows(&self, ask: &Ask) -> Result<(), Refusal> {
        let (Some(asked), Some(known)) = (&ask.model, self.shared.models()) else { return Ok(()) };
        if known.is_empty() {
            return Err(Refusal::NotReady(format!("{} has no engine yet", self.name())));
        }
        if known.contains(asked) {
            return Ok(());
        }
        Err(Refusal::UnknownModel { asked: asked.chars().take(256).collect(), known })
    }

    /// The node that has a response of `/v1/responses`, if it was made through this router and the node is there.
    pub fn holder(&self, response: &str) -> Option<String> {
        let node = self.shared.holder(response)?;
        let all = self.candidates(&Ask::bare(Endpoint::ResponseById));
        all.iter().any(|c| c.node == node && !matches!(c.fit, Fit::Unfit(_))).then_some(node)
    }

    /// Sends a request where it belongs, when there is room for it, and brings back the answer. On an error the flight
    /// has ended with it.
    pub async fn carry(
        &self,
        mut flight: Flight,
        ask: Ask,
        aim: Aim,
        call: Call,
    ) -> Result<Response<Carried>, Refusal> {
        flight.asked(&ask);
        flight.look_ahead(&call.body);
        // Where it goes is settled for the others: what is found out by now is only written down.
        let foreseen = match aim {
            Aim::Best => flight.foreseen().await.cloned(),
            _ => flight.known().and_then(|known| known.as_ref().ok()).cloned(),
        };
        let request = self.shared.wanted(&ask, foreseen.as_ref());
        let wanted = Wanted { ask, aim, call, request, foreseen };
        match self.line_up(&mut flight, &wanted) {
            Err(refusal) => {
                flight.refused(refusal.status());
                return Err(refusal);
            }
            Ok(false) => {}
            Ok(true) => {
                let called = tokio::time::timeout(QUIET, flight.called()).await.is_ok();
                if !called && wanted.ask.stream {
                    return Ok(self.begin(flight, wanted));
                }
                flight.called().await;
            }
        }
        Ok(self.serve(flight, &wanted).await?.map(Carried::from))
    }

    /// Takes a place in line, where one is needed. Whether it has to wait for its turn.
    fn line_up(&self, flight: &mut Flight, wanted: &Wanted) -> Result<bool, Refusal> {
        let Wanted { ask, aim, request, foreseen, .. } = wanted;
        let own = || Some(self.name().to_owned());
        let node = match aim {
            Aim::Near => return Ok(false),
            // The node where it came in has seen to it.
            Aim::Here(_) if flight.came_from().is_some() => return Ok(false),
            Aim::Here(_) => own(),
            Aim::Pinned(node) | Aim::Held(node) => Some(node.clone()),
            Aim::Best if !self.share && self.can_serve() => own(),
            Aim::Best => None,
        };
        if ask.endpoint == Endpoint::ResponseById {
            return Ok(false);
        }
        let target = queue::Target { model: ask.model.clone(), node };
        let cost_s = || {
            let all = self.shared.candidates(ask, request, foreseen.as_ref());
            let works = all.iter().filter_map(|box_| {
                let terms = price::price(request, box_)?;
                let beside = f64::from(box_.running.max(1));
                Some(terms.prefill_s + request.output * box_.speeds.step_s(beside) / beside)
            });
            works.min_by(f64::total_cmp).unwrap_or(0.0)
        };
        flight.line_up(target, cost_s)
    }

    fn can_serve(&self) -> bool {
        !matches!(self.shared.own().fit, Fit::Unfit(_))
    }

    /// Begins the answer to a stream that has waited long enough.
    fn begin(&self, mut flight: Flight, wanted: Wanted) -> Response<Carried> {
        let (endpoint, id) = (flight.endpoint(), HeaderValue::from_str(flight.id()));
        let router = self.clone();
        let way = async move {
            flight.called().await;
            router.serve(flight, &wanted).await
        };
        let mut response = Waiting::answer(endpoint, Box::pin(way));
        if let Ok(id) = id {
            response.headers_mut().insert(REQUEST_ID, id);
        }
        response
    }

    /// Places a request whose turn it is and brings back the answer.
    async fn serve(&self, mut flight: Flight, wanted: &Wanted) -> Result<Response<Passage>, Refusal> {
        match Box::pin(self.fetch(&mut flight, wanted)).await {
            Err(refusal) => {
                flight.refused(refusal.status());
                Err(refusal)
            }
            Ok(fetched) => {
                let undo = &wanted.call.undo;
                let Fetched { answer, held, rest, events } = fetched.mended(undo);
                flight.answered(answer.status.as_u16());
                let headers = self.dress(&flight, answer.headers);
                let passage = Passage::new(held, rest, self.idle, events, undo.clone(), flight);
                let mut response = Response::new(passage);
                (*response.status_mut(), *response.headers_mut()) = (answer.status, headers);
                Ok(response)
            }
        }
    }

    /// Tries one node and, where that may help, a second.
    async fn fetch(&self, flight: &mut Flight, wanted: &Wanted) -> Result<Fetched, Refusal> {
        let Wanted { aim, call, .. } = wanted;
        let first = self.choose(wanted, None)?;
        let once = self.attempt(flight, &first, call).await;
        let bound = matches!(aim, Aim::Here(_) | Aim::Pinned(_) | Aim::Held(_));
        if bound || !worth_another(wanted.ask.endpoint, &once) {
            return self.take_in(once?, &first.node).await;
        }
        let Ok(second) = self.choose(wanted, Some(&first.node)) else {
            return self.take_in(once?, &first.node).await;
        };
        let failure = match &once {
            Ok(answer) => format!("said {}", answer.status().as_u16()),
            Err(refusal) => refusal.to_string(),
        };
        tracing::info!(
            id = flight.id(),
            first = first.node,
            second = second.node,
            failure,
            "trying the other node"
        );
        let second = Decision { why: format!("{} failed ({failure}); {}", first.node, second.why), ..second };
        match (self.attempt(flight, &second, call).await, once) {
            // An engine's own words are worth more than ours about a node that cannot be reached.
            (Err(_), Ok(answer)) => {
                flight.returned(&first.node);
                self.take_in(answer, &first.node).await
            }
            (answer, _) => self.take_in(answer?, &second.node).await,
        }
    }

    /// Decides where to go, leaving out a node that was tried.
    fn choose(&self, wanted: &Wanted, tried: Option<&str>) -> Result<Decision, Refusal> {
        let Wanted { ask, aim, request, foreseen, .. } = wanted;
        let mut all = self.shared.candidates(ask, request, foreseen.as_ref());
        let own = self.name();
        match aim {
            Aim::Here(why) => return self.bound(request, all, own, why.clone()),
            Aim::Held(node) => return self.bound(request, all, node, "it holds the response before".into()),
            Aim::Pinned(node) if all.iter().any(|c| c.node == *node) => {
                return self.bound(request, all, node, "the client asks for it".into());
            }
            Aim::Pinned(node) => {
                let known = all.into_iter().map(|c| c.node).collect();
                return Err(Refusal::UnknownBox { asked: node.chars().take(256).collect(), known });
            }
            Aim::Best | Aim::Near => {}
        }
        all.retain(|c| Some(c.node.as_str()) != tried);
        let own_can = all.iter().any(|c| c.node == own && !matches!(c.fit, Fit::Unfit(_)));
        // Not shared, or not worth a hop: the others only when there is no engine here.
        if own_can && (*aim == Aim::Near || !self.share) {
            let why = if self.share { "it costs little" } else { "router.share is off" };
            return self.bound(request, all, own, why.into());
        }
        self.place(request, all, self.shared.distrusts(), self.shared.turn())
    }

    fn place(
        &self,
        request: &Request,
        all: Vec<Candidate>,
        drifted: bool,
        turn: u64,
    ) -> Result<Decision, Refusal> {
        if all.iter().all(|c| matches!(c.fit, Fit::Unfit(_))) {
            return Err(not_ready(&all));
        }
        let none = || Refusal::NotReady("no node can serve it".into());
        policy::place(self.strategy, drifted, *request, all, turn).ok_or_else(none)
    }

    fn bound(
        &self,
        request: &Request,
        mut all: Vec<Candidate>,
        node: &str,
        why: String,
    ) -> Result<Decision, Refusal> {
        all.retain(|c| c.node == node);
        if all.is_empty() {
            return Err(Refusal::NotReady(format!("{node} is not there")));
        }
        let decision = self.place(request, all, false, 0)?;
        Ok(Decision { why: format!("{node} serves it: {why}"), ..decision })
    }

    async fn attempt(
        &self,
        flight: &mut Flight,
        to: &Decision,
        call: &Call,
    ) -> Result<Response<Incoming>, Refusal> {
        let known = self.shared.known(&to.node, flight.prefix());
        flight.placed(&to.node, known, to.why.clone(), Some(to.basis.clone()));
        flight.sent();
        let node = to.node.clone();
        let own = self.shared.own();
        let way = match node == self.name() {
            true => relay::To::Engine(&own.url),
            false => relay::To::Peer { name: &node, own: self.name() },
        };
        let sent = self.relay.send(way, call, self.idle).await;
        sent.map_err(|error| match error {
            relay::Error::Connect(why) => Refusal::Unreachable { node, why },
            relay::Error::BrokeOff(why) => Refusal::BrokeOff { node, why },
            relay::Error::Silent(idle) => Refusal::Silent { node, seconds: idle.as_secs() },
        })
    }

    /// Takes in an answer that is no stream, so that its failure can still become a status.
    async fn take_in(&self, answer: Response<Incoming>, node: &str) -> Result<Fetched, Refusal> {
        let (answer, mut body) = answer.into_parts();
        let kind = answer.headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
        let events = kind.starts_with(b"text/event-stream");
        let whole =
            kind.starts_with(b"application/json") || answer.headers.contains_key(header::CONTENT_LENGTH);
        let mut held = VecDeque::new();
        if events || !whole {
            return Ok(Fetched { answer, held, rest: Some(body), events });
        }
        let (mut wait, mut size) = (passage::Wait::new(self.idle), 0);
        while size < WHOLE_MAX {
            let Some(frame) = wait.frame(&mut body, node).await else {
                return Ok(Fetched { answer, held, rest: None, events });
            };
            let frame = frame?;
            size += frame.data_ref().map_or(0, bytes::Bytes::len);
            held.push_back(frame);
        }
        Ok(Fetched { answer, held, rest: Some(body), events })
    }

    /// The head of an answer as the client gets it: the engine's, and what we say about the way.
    fn dress(&self, flight: &Flight, mut headers: HeaderMap) -> HeaderMap {
        relay::strip_hop(&mut headers);
        // What the node that served has said stays; it knows best.
        if let Some(node) = flight.node()
            && !headers.contains_key(BOX)
            && let Ok(node) = HeaderValue::from_str(node)
        {
            headers.insert(BOX, node);
        }
        if let (Some(cached), false) = (flight.foretold_cached(), headers.contains_key(&CACHED_FORETOLD)) {
            headers.insert(CACHED_FORETOLD, HeaderValue::from(cached));
        }
        if flight.queued() > Duration::ZERO {
            let waited = u64::try_from(flight.queued().as_millis()).unwrap_or(u64::MAX);
            headers.insert(QUEUE_MS, HeaderValue::from(waited));
        }
        let there = headers.get(ROUTER_US).and_then(|us| us.to_str().ok()?.parse::<u64>().ok()).unwrap_or(0);
        let here = u64::try_from(flight.added().as_micros()).unwrap_or(u64::MAX);
        headers.insert(ROUTER_US, HeaderValue::from(there.saturating_add(here)));
        if let Ok(id) = HeaderValue::from_str(flight.id()) {
            headers.insert(REQUEST_ID, id);
        }
        headers
    }
}

struct Fetched {
    answer: http::response::Parts,
    held: VecDeque<http_body::Frame<bytes::Bytes>>,
    rest: Option<Incoming>,
    events: bool,
}

impl Fetched {
    /// A document that is here whole, as the client's own words want it. Of one that is larger than what is held the names
    /// stay as they are.
    fn mended(mut self, undo: &Undo) -> Self {
        if self.events || self.rest.is_some() || undo.is_nothing() {
            return self;
        }
        let data = self.held.iter().filter_map(http_body::Frame::data_ref);
        let document: bytes::Bytes = data.fold(Vec::new(), |all, part| [&all[..], part].concat()).into();
        let mended = splice::mend_whole(&document, undo);
        if self.answer.headers.contains_key(header::CONTENT_LENGTH) {
            self.answer.headers.insert(header::CONTENT_LENGTH, HeaderValue::from(mended.len()));
        }
        self.held = VecDeque::from([http_body::Frame::data(mended)]);
        self
    }
}

/// Whether the other node may do better. Nothing of an answer has been passed on yet.
fn worth_another(endpoint: Endpoint, once: &Result<Response<Incoming>, Refusal>) -> bool {
    match once {
        Err(refusal) => matches!(refusal, Refusal::Unreachable { .. }),
        Ok(answer) => match answer.status() {
            StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT => true,
            // Which node made a response is forgotten with a restart of this one.
            StatusCode::NOT_FOUND => endpoint == Endpoint::ResponseById,
            _ => false,
        },
    }
}

fn not_ready(all: &[Candidate]) -> Refusal {
    let reasons: Vec<String> = all
        .iter()
        .filter_map(|c| match &c.fit {
            Fit::Unfit(why) => Some(format!("{}: {why}", c.node)),
            _ => None,
        })
        .collect();
    Refusal::NotReady(reasons.join(", "))
}
