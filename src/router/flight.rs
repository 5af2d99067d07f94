//! A request in flight: counted from its admission to the last byte of its answer, whichever way it ends.
//!
//! The guard rides in the future that waits for the answer and then in the answer's body. Dropping either, by the
//! end, an error or a client that hangs up, takes the request off the counts and tells what became of it.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;

use super::ask::{Ask, Endpoint};
use super::book::Seat;
use super::foresee::{Foreseen, Known, Looking};
use super::line::{Rights, Turn};
use super::policy::Basis;
use super::prefix::{self, Mark};
use super::queue::{Class, Target};
use super::refusal::Refusal;
use super::state::Shared;
use super::usage::{Tail, Usage};
use crate::base::clock::{Micros, unix_seconds};

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// The answer was passed on whole. It may be an engine's error.
    Whole,
    /// The client went away before.
    HungUp,
    /// The engine broke off or fell silent after the answer had begun.
    Broken,
    /// Answered by the router itself.
    Refused,
}

/// Status under which a client that hung up before an answer is counted, as web servers do.
pub const HUNG_UP: u16 = 499;

/// What became of a request.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// The `X-Request-Id` it was answered with.
    pub id: String,
    /// What the engine's own id of it begins with; `-` or `_` and a few characters follow.
    pub engine_id: String,
    pub endpoint: Endpoint,
    pub model: Option<String>,
    /// The node whose engine answered. None: none was asked.
    pub node: Option<String>,
    /// The node that it came in at, when another passed it on to this one.
    pub forwarded_from: Option<String>,
    pub started_unix_s: u64,
    /// Until the first byte of a stream.
    pub ttft: Option<Duration>,
    pub duration: Duration,
    /// In line for room at an engine.
    pub queued: Duration,
    pub status: u16,
    pub end: End,
    pub stream: bool,
    /// Bytes of the answer's body that were passed on.
    pub bytes: u64,
    pub usage: Option<Usage>,
    /// Bytes of the canonical prompt, and how many of them the node was believed to know.
    pub prompt_bytes: u64,
    pub known_bytes: u64,
    /// What was known of the prompt before the engine saw it, or why nothing. None: nobody looked, or it was over first.
    pub foreseen: Option<Result<Foreseen, String>>,
    /// Tries on another node.
    pub retries: u32,
    /// Why it went where it went, in a sentence.
    pub why: String,
    /// What the decision was made of. None: there was none to make.
    #[serde(skip)]
    pub basis: Option<Arc<Basis>>,
    /// The body of a prompt, as the engine got it.
    #[serde(skip)]
    pub body: Option<Bytes>,
    /// What the client calls the conversation, hashed.
    #[serde(skip)]
    pub session: Option<u64>,
}

/// The guard.
#[derive(Debug)]
pub struct Flight {
    shared: Arc<Shared>,
    begin: Micros,
    ready: Option<Micros>,
    added: Option<Duration>,
    prefix: Vec<Mark>,
    session: Option<Mark>,
    /// The name of the API key that it came with.
    owner: Option<Arc<str>>,
    /// The owner is known to whoever asks about the engine's id.
    entered: bool,
    tail: Tail,
    looking: Option<Looking>,
    done: bool,
    seat: Option<Seat>,
    /// Its place in line, or on the way from there to its seat.
    turn: Option<Turn>,
    salt: Option<Arc<str>>,
    class: Class,
    /// It counts against its key.
    counted: bool,
    out: Outcome,
}

impl Flight {
    /// Admits a request, or says why not.
    pub(super) fn admit(
        shared: &Arc<Shared>,
        endpoint: Endpoint,
        id: String,
        forwarded_from: Option<String>,
    ) -> Result<Self, Refusal> {
        shared.enter(forwarded_from.as_deref())?;
        Ok(Self {
            begin: shared.clock.now(),
            shared: Arc::clone(shared),
            ready: None,
            added: None,
            prefix: Vec::new(),
            session: None,
            owner: None,
            entered: false,
            tail: Tail::default(),
            looking: None,
            done: false,
            seat: None,
            turn: None,
            salt: None,
            class: Class::default(),
            counted: false,
            out: Outcome {
                engine_id: endpoint.engine_id(&id),
                id,
                endpoint,
                model: None,
                node: None,
                forwarded_from,
                started_unix_s: unix_seconds(),
                ttft: None,
                duration: Duration::ZERO,
                queued: Duration::ZERO,
                status: HUNG_UP,
                end: End::HungUp,
                stream: false,
                bytes: 0,
                usage: None,
                prompt_bytes: 0,
                known_bytes: 0,
                foreseen: None,
                retries: 0,
                why: String::new(),
                basis: None,
                body: None,
                session: None,
            },
        })
    }

    pub fn id(&self) -> &str {
        &self.out.id
    }

    /// The id that the engine is to use where the body carries it.
    pub fn engine_id(&self) -> &str {
        &self.out.engine_id
    }

    pub fn endpoint(&self) -> Endpoint {
        self.out.endpoint
    }

    pub fn node(&self) -> Option<&str> {
        self.out.node.as_deref()
    }

    /// The node that passed it on to this one.
    pub fn came_from(&self) -> Option<&str> {
        self.out.forwarded_from.as_deref()
    }

    pub(super) fn prefix(&self) -> &[Mark] {
        &self.prefix
    }

    /// What it may do; `asked` is the class that it asks for.
    pub fn may(&mut self, rights: Rights, asked: Option<Class>) -> Result<(), Refusal> {
        self.class = rights.class(asked);
        if let (Some(owner), false) = (&self.owner, self.counted) {
            self.shared.enter_key(owner, rights.limit)?;
            self.counted = true;
        }
        self.salt = rights.salt;
        Ok(())
    }

    /// What it computes is for its key alone, under this salt.
    pub fn salt(&self) -> Option<&Arc<str>> {
        self.salt.as_ref()
    }

    /// Takes its place. Whether it has to wait.
    pub(super) fn line_up(&mut self, target: Target, cost_s: impl FnOnce() -> f64) -> Result<bool, Refusal> {
        let turn = self.shared.take_turn(self.class, target, cost_s)?;
        let waits = turn.waits();
        self.turn = Some(turn);
        Ok(waits)
    }

    /// Waits until it may go.
    pub(super) async fn called(&mut self) {
        let Some(turn) = &mut self.turn else { return };
        (&mut *turn).await;
        self.out.queued = turn.waited();
    }

    pub fn queued(&self) -> Duration {
        self.out.queued
    }

    /// It came with the API key of this name, here or at the node that passed it on.
    pub fn belongs_to(&mut self, owner: &str) {
        self.owner = Some(owner.into());
    }

    pub fn owner(&self) -> Option<&str> {
        self.owner.as_deref()
    }

    /// The request is whole and read: from here on the router is what it waits for.
    pub fn body_arrived(&mut self) {
        self.ready = Some(self.shared.clock.now());
    }

    /// What it asks for is known.
    pub fn asked(&mut self, ask: &Ask) {
        self.out.model = ask.model.clone();
        self.out.stream = ask.stream;
        self.out.prompt_bytes = ask.prompt_bytes;
        self.prefix.clone_from(&ask.prefix);
        self.session = ask.session.as_deref().map(prefix::session);
        self.out.session = self.session.map(|mark| mark.hash);
        if let (Endpoint::Responses, Some(id)) = (ask.endpoint, &ask.request_id) {
            self.out.engine_id.clone_from(id);
        }
        if let (Some(owner), false) = (&self.owner, self.entered) {
            self.shared.owners.lock().enter(&self.out.engine_id, owner);
            self.entered = true;
        }
    }

    /// What its prompt holds is found out from now on.
    pub(super) fn look_ahead(&mut self, body: &Bytes) {
        if !self.out.endpoint.generates() {
            return;
        }
        self.out.body = Some(body.clone());
        if let Some(foresee) = self.shared.foresee.get() {
            self.looking = (foresee.0)(self.out.endpoint, body);
        }
    }

    /// What is known of its prompt, waited for as long as that is worth it.
    pub(super) async fn foreseen(&self) -> Option<&Foreseen> {
        let Looking { slot, patience } = self.looking.as_ref()?;
        slot.wait(*patience).await?.as_ref().ok()
    }

    /// What is known of its prompt by now.
    pub fn known(&self) -> Option<&Known> {
        self.looking.as_ref()?.slot.get()
    }

    /// It goes to `node`, leaving the one before, if any.
    pub(super) fn placed(&mut self, node: &str, known_bytes: u64, why: String, basis: Option<Basis>) {
        if self.out.node.is_some() {
            self.out.retries += 1;
            self.shared.series.retries.inc();
        }
        let basis = basis.map(Arc::new);
        if let Some(basis) = &basis {
            self.shared.series.decisions.with_label_values(&[basis.reason.label()]).inc();
            self.shared.series.regret.observe(basis.regret_s());
        }
        self.out.basis = basis;
        self.sit(node);
        self.out.known_bytes = known_bytes;
        self.out.why = match self.out.queued.as_secs_f64() {
            waited if waited > 0.0 => {
                format!("{why}; it had waited in line for {waited:.1} s as {}", self.class.name())
            }
            _ => why,
        };
    }

    /// Takes a seat at `node`, leaving the one before.
    fn sit(&mut self, node: &str) {
        // A prompt that is not computed (a count, a list) waits for nothing.
        let terms = self.out.basis.as_ref().and_then(|basis| basis.terms());
        let prefill_s = terms.filter(|_| self.out.endpoint.generates()).map_or(0.0, |terms| terms.prefill_s);
        let before = self.out.node.replace(node.to_owned());
        let before = before.as_deref().zip(self.seat.take());
        let moved = before.is_some();
        self.seat = Some(self.shared.move_to(before, node, prefill_s));
        // Its seat counts from now on, and no longer that it is on its way.
        if self.turn.take().is_none() && moved {
            self.shared.call_next();
        }
    }

    /// Tokens of its prompt that were foretold to come out of a cache.
    pub fn foretold_cached(&self) -> Option<u32> {
        self.out.basis.as_ref().and_then(|basis| basis.terms()).map(|terms| terms.cached)
    }

    /// What `node` had said before is passed on after all.
    pub(super) fn returned(&mut self, node: &str) {
        self.sit(node);
    }

    /// It is handed to the relay. Only the first time counts: a retry waits for a node, not for the router.
    pub(super) fn sent(&mut self) {
        let now = self.shared.clock.now();
        let all = now.since(self.ready.unwrap_or(self.begin));
        self.added.get_or_insert(all.saturating_sub(self.out.queued));
    }

    /// What the router has added so far.
    pub fn added(&self) -> Duration {
        self.added.unwrap_or_default()
    }

    /// The router answers itself.
    pub fn refused(&mut self, status: u16) {
        self.out.status = status;
        self.out.end = End::Refused;
        self.done = true;
    }

    /// The engine's answer begins. Until its body has passed it counts as hung up.
    pub(super) fn answered(&mut self, status: u16) {
        self.out.status = status;
    }

    /// Bytes of the answer pass.
    pub(super) fn passing(&mut self, bytes: &[u8], stream: bool) {
        if self.out.bytes == 0 {
            if let (Some(node), Some(seat)) = (&self.out.node, &mut self.seat) {
                self.shared.first_byte(node, seat);
            }
            if stream {
                self.out.ttft = Some(self.shared.clock.now().since(self.begin));
            }
            // The first byte says that the prompt is computed: from now on the node knows it.
            if let (200, true, Some(node)) = (self.out.status, self.out.endpoint.generates(), &self.out.node)
            {
                self.shared.learn(node, &self.prefix, self.session);
                if self.out.endpoint == Endpoint::Responses {
                    self.shared.holds(node, &self.out.engine_id);
                }
            }
        }
        self.out.bytes += bytes.len() as u64;
        self.tail.push(bytes);
    }

    pub(super) fn ended(&mut self, end: End) {
        self.out.end = end;
        self.done = true;
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        // Many clients close as soon as they have read the stream's last event.
        if !self.done && self.tail.whole() {
            self.out.end = End::Whole;
        }
        if self.entered {
            self.shared.owners.lock().leave(&self.out.engine_id);
        }
        if let (Some(owner), true) = (&self.owner, self.counted) {
            self.shared.leave_key(owner);
        }
        drop(self.turn.take());
        self.out.duration = self.shared.clock.now().since(self.begin);
        self.out.usage = self.tail.usage();
        self.out.foreseen = self.known().cloned();
        self.shared.leave(&self.out, self.added, self.seat);
    }
}
