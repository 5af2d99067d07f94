//! The router's one state: who is there, what is in flight where, what each node is known to have computed.
//!
//! A small lock guards it; nobody holds it over an await, and what is done under it is a few map operations.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use prometheus::{Histogram, IntCounter, IntCounterVec, IntGauge};
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, broadcast};

use super::ask::Ask;
use super::book::{Book, Seat, Told};
use super::chain::Reach;
use super::flight::{End, Outcome};
use super::foresee::{Foresee, Foreseen};
use super::line::{Admission, Line};
use super::owners::Owners;
use super::policy::{Candidate, Fit, Request};
use super::prefix::{self, Known, Mark};
use super::price::Links;
use super::price::speed::Speeds;
use super::queue::{Room, Target, knee};
use super::refusal::Refusal;
use crate::base::clock::{Clock, Micros};
use crate::meter::{Meter, SECONDS};

/// This node's engine as the node sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Own {
    /// `http://host:port` of the engine.
    pub url: String,
    /// Names it serves. Empty: not known, any name is tried.
    pub models: Vec<String>,
    pub fit: Fit,
}

/// The other node as this one hears of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Peer {
    pub name: String,
    pub connected: bool,
    /// What it said last.
    pub note: Option<Note>,
}

/// What a node tells the others about itself, with each heartbeat. Sent as JSON; unknown fields are ignored and
/// missing ones have their defaults, so that two versions can talk.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Note {
    /// Whether its engine can serve, and when not, why.
    pub ready: bool,
    pub why: String,
    /// It serves, but others are better.
    pub strained: bool,
    pub models: Vec<String>,
    /// Requests in flight on its engine.
    pub in_flight: u32,
    /// Requests that its engine should have at once. 0: there is no bound.
    pub places: u32,
    /// Seconds until the prompts among them are computed.
    pub queue_s: f64,
    /// How fast it is, and how rows come to it, as it has learned.
    pub speeds: Option<Speeds>,
    pub links: Option<Links>,
    /// What it foretells has parted from what happens: its speeds are not to be used.
    pub drifted: bool,
    /// Of these, those that each other node passed on to it.
    pub from: BTreeMap<String, u32>,
    /// Hashes of the prefixes it computed last, the oldest first.
    pub recent: Vec<u64>,
}

/// Hashes in a note: what a dozen prompts of 40 KiB make, 11 KiB of the 64 KiB that a note may have. A peer that
/// misses some only guesses worse.
const RECENT_MAX: usize = 512;

/// Names that a peer's note may bring.
const MODELS_MAX: usize = 64;

/// Responses whose node is remembered; the engine's own store is in memory too and forgets with it.
const HELD_MAX: usize = 4096;

#[derive(Debug)]
struct State {
    own: Own,
    /// Requests that the own engine can run at once. 0: there is no bound.
    places: u32,
    peers: BTreeMap<String, Peer>,
    known: BTreeMap<String, Known>,
    /// Requests of this router by the node they are at, and what they teach.
    book: Book,
    /// Requests that other nodes passed on to this one.
    from: BTreeMap<String, u32>,
    total: u32,
    draining: bool,
    turn: u64,
    recent: VecDeque<u64>,
    held: HashMap<String, String>,
    held_order: VecDeque<String>,
}

/// Everything that handles, guards and bodies share.
#[derive(Debug)]
pub(super) struct Shared {
    pub name: String,
    pub max_requests: u32,
    pub clock: Clock,
    pub series: Series,
    pub outcomes: broadcast::Sender<Outcome>,
    /// Guards: whose request is whose. Held for a few map operations.
    pub owners: Mutex<Owners>,
    pub foresee: OnceLock<Foresee>,
    pub line: Line,
    state: Mutex<State>,
    left: Notify,
}

/// The router's series.
#[derive(Debug)]
pub(super) struct Series {
    pub requests: IntCounterVec,
    pub in_flight: IntGauge,
    pub added: Histogram,
    pub ttft: Histogram,
    pub hangups: IntCounter,
    pub broken: IntCounter,
    pub retries: IntCounter,
    pub decisions: IntCounterVec,
    pub foretold: Histogram,
    pub off: Histogram,
    pub regret: Histogram,
}

/// Microseconds from 10 to a tenth of a second: what reading, hashing and placing take.
const ADDED_US: [f64; 13] =
    [10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0, 20_000.0, 50_000.0, 100_000.0];

impl Series {
    fn new(meter: &Meter) -> Self {
        Self {
            requests: meter.counters(
                "router_requests_total",
                "Finished requests by endpoint, status and the node whose engine answered",
                &["endpoint", "code", "node"],
            ),
            in_flight: meter.gauge("router_in_flight", "Requests in flight at this node's port"),
            added: meter.histogram(
                "router_added_microseconds",
                "Time from a request's last byte to its being sent on",
                &ADDED_US,
            ),
            ttft: meter.histogram(
                "router_ttft_seconds",
                "Time from a request's arrival to the first byte of its stream",
                &SECONDS,
            ),
            hangups: meter.counter("router_hangups_total", "Requests whose client went away before the end"),
            broken: meter.counter("router_broken_total", "Answers that an engine broke off in the middle"),
            retries: meter.counter("router_retries_total", "Tries on the other node before the first byte"),
            decisions: meter.counters(
                "route_decisions_total",
                "Requests by why they went where they went",
                &["reason"],
            ),
            foretold: meter.histogram(
                "route_predicted_ttft_seconds",
                "Time to the first token that was foretold when a stream was placed",
                &SECONDS,
            ),
            off: meter.histogram(
                "route_ttft_error_ratio",
                "How far off that was, as a share of the time that it took",
                &[0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0],
            ),
            regret: meter.histogram(
                "route_regret_seconds",
                "What the chosen box cost more than the cheapest one, by the price it was chosen by",
                &SECONDS,
            ),
        }
    }
}

/// Outcomes kept for slow listeners; who lags more loses the oldest and is told.
const OUTCOMES_MAX: usize = 1024;

impl Shared {
    pub fn new(name: String, max_requests: u32, admission: Admission, clock: Clock, meter: &Meter) -> Self {
        let own =
            Own { url: String::new(), models: Vec::new(), fit: Fit::Unfit("it has no engine yet".into()) };
        Self {
            name,
            max_requests,
            clock,
            series: Series::new(meter),
            outcomes: broadcast::channel(OUTCOMES_MAX).0,
            left: Notify::new(),
            owners: Mutex::default(),
            foresee: OnceLock::new(),
            line: Line::new(admission.queue, meter),
            state: Mutex::new(State {
                own,
                places: admission.places,
                peers: BTreeMap::new(),
                known: BTreeMap::new(),
                book: Book::new(Speeds::default()),
                from: BTreeMap::new(),
                total: 0,
                draining: false,
                turn: 0,
                recent: VecDeque::new(),
                held: HashMap::new(),
                held_order: VecDeque::new(),
            }),
        }
    }

    pub fn enter(&self, from: Option<&str>) -> Result<(), Refusal> {
        let mut state = self.state.lock();
        if state.draining {
            return Err(Refusal::Draining);
        }
        if state.total >= self.max_requests {
            return Err(Refusal::Busy { max: self.max_requests });
        }
        state.total += 1;
        if let Some(from) = from {
            *state.from.entry(from.to_owned()).or_default() += 1;
        }
        self.series.in_flight.set(i64::from(state.total));
        Ok(())
    }

    /// A request goes to `node`, where its prompt takes so many seconds, leaving the node before.
    pub fn move_to(&self, before: Option<(&str, Seat)>, node: &str, prefill_s: f64) -> Seat {
        let now = self.clock.now();
        let mut state = self.state.lock();
        if let Some((before, seat)) = before {
            state.book.stand(before, &seat, now);
        }
        state.book.sit(node, prefill_s, now)
    }

    /// The first byte of its answer comes.
    pub fn first_byte(&self, node: &str, seat: &mut Seat) {
        let now = self.clock.now();
        self.state.lock().book.first_byte(node, seat, now);
    }

    /// What a request is, as far as its price goes. Once for each: a session is found to go on.
    pub fn wanted(&self, ask: &Ask, foreseen: Option<&Foreseen>) -> Request {
        let mut state = self.state.lock();
        let known = state.known.values().map(|known| known.longest(&ask.prefix)).max().unwrap_or(0);
        let session = ask.session.as_deref().map(prefix::session);
        let compacted = session.is_some_and(|mark| state.book.goes_on(mark.hash, ask.prompt_bytes, known));
        Request {
            tokens: foreseen.map_or_else(|| state.book.tokens(ask.prompt_bytes), |foreseen| foreseen.tokens),
            approximate: foreseen.is_none_or(|foreseen| foreseen.reaches.is_empty()),
            output: state.book.words(ask.max_tokens),
            compacted,
        }
    }

    pub fn leave(&self, out: &Outcome, added: Option<Duration>, seat: Option<Seat>) {
        {
            let now = self.clock.now();
            let mut state = self.state.lock();
            state.total = state.total.saturating_sub(1);
            self.series.in_flight.set(i64::from(state.total));
            if let (Some(node), Some(seat)) = (&out.node, seat) {
                state.book.stand(node, &seat, now);
                self.learn_from(&mut state.book, out, &seat, *node == self.name, now);
            }
            if let Some(from) = &out.forwarded_from {
                less(&mut state.from, from);
            }
        }
        self.call_next();
        self.left.notify_waiters();
        self.series
            .requests
            .with_label_values(&[
                out.endpoint.name(),
                &out.status.to_string(),
                out.node.as_deref().unwrap_or("none"),
            ])
            .inc();
        if let Some(added) = added {
            self.series.added.observe(added.as_secs_f64() * 1e6);
        }
        if let Some(ttft) = out.ttft {
            self.series.ttft.observe(ttft.as_secs_f64());
        }
        match out.end {
            End::HungUp => self.series.hangups.inc(),
            End::Broken => self.series.broken.inc(),
            End::Whole | End::Refused => {}
        }
        // Nobody listening is fine.
        let _ = self.outcomes.send(out.clone());
    }

    /// What a whole answer teaches.
    fn learn_from(&self, book: &mut Book, out: &Outcome, seat: &Seat, own: bool, now: Micros) {
        let (Some(usage), 200, End::Whole) = (out.usage, out.status, out.end) else { return };
        let (Some(prompt), Some(words)) = (usage.prompt_tokens, usage.completion_tokens) else { return };
        let told =
            Told { prompt, cached: usage.cached_tokens.unwrap_or(0), words, prompt_bytes: out.prompt_bytes };
        book.on_answer(&told);
        let terms = out.basis.as_ref().and_then(|basis| basis.terms());
        if let (true, Some(ttft)) = (out.stream, out.ttft) {
            if own {
                book.on_own_answer(seat, terms, &told, now);
            }
            if let Some(terms) = terms {
                self.series.foretold.observe(terms.ttft_s());
                let ttft = ttft.saturating_sub(out.queued).as_secs_f64();
                let off = (ttft - terms.ttft_s()).abs() / ttft.max(0.001);
                self.series.off.observe(off);
            }
        }
    }

    /// Another engine is served: its speeds as far as they are assumed, and how rows come to it.
    pub fn begin_engine(&self, speeds: Speeds, links: Links) {
        self.state.lock().book.begin(speeds, links);
    }

    /// This box's clock has fallen to a share of what it was, or is back at 1.
    pub fn set_clock(&self, share: f64) {
        self.state.lock().book.set_clock(share);
    }

    /// What was foretold has parted from what happened: by how much, and how wrong it is either way.
    pub fn drift(&self) -> Option<(f64, f64)> {
        let state = self.state.lock();
        state.book.has_drifted().then(|| state.book.residual())
    }

    /// Some node's speeds are not to be used: prices are compared, so that one wrong one spoils all.
    pub fn distrusts(&self) -> bool {
        let state = self.state.lock();
        let told = |peer: &Peer| peer.connected && peer.note.as_ref().is_some_and(|note| note.drifted);
        state.book.has_drifted() || state.peers.values().any(told)
    }

    pub fn learn(&self, node: &str, marks: &[Mark], session: Option<Mark>) {
        let mut state = self.state.lock();
        let hashes = marks.iter().copied().chain(session).map(|mark| mark.hash);
        state.known.entry(node.to_owned()).or_default().learn(hashes.clone());
        if node == self.name {
            state.recent.extend(hashes);
            let surplus = state.recent.len().saturating_sub(RECENT_MAX);
            state.recent.drain(..surplus);
        }
    }

    pub fn holds(&self, node: &str, response: &str) {
        let mut state = self.state.lock();
        if state.held.insert(response.to_owned(), node.to_owned()).is_none() {
            state.held_order.push_back(response.to_owned());
        }
        if state.held_order.len() > HELD_MAX
            && let Some(oldest) = state.held_order.pop_front()
        {
            state.held.remove(&oldest);
        }
    }

    pub fn holder(&self, response: &str) -> Option<String> {
        self.state.lock().held.get(response).cloned()
    }

    pub fn set_own(&self, own: Own) {
        self.state.lock().own = own;
        self.call_next();
    }

    pub fn own(&self) -> Own {
        self.state.lock().own.clone()
    }

    pub fn set_peers(&self, peers: Vec<Peer>) {
        let mut state = self.state.lock();
        state.known.retain(|node, _| *node == self.name || peers.iter().any(|peer| peer.name == *node));
        for peer in &peers {
            if let Some(note) = &peer.note {
                let recent = note.recent.iter().copied().take(RECENT_MAX);
                state.known.entry(peer.name.clone()).or_default().learn(recent);
            }
        }
        state.peers = peers
            .into_iter()
            .filter(|peer| peer.name != self.name)
            .map(|mut peer| {
                if let Some(note) = &mut peer.note {
                    note.models.truncate(MODELS_MAX);
                    note.speeds = note.speeds.map(Speeds::sane);
                }
                (peer.name.clone(), peer)
            })
            .collect();
        drop(state);
        self.call_next();
    }

    pub fn note(&self) -> Note {
        let now = self.clock.now();
        let state = self.state.lock();
        let (ready, strained, why) = match &state.own.fit {
            _ if state.draining => (false, false, DRAINING.to_owned()),
            Fit::Well => (true, false, String::new()),
            Fit::Strained(why) => (true, true, why.clone()),
            Fit::Unfit(why) => (false, false, why.clone()),
        };
        Note {
            ready,
            why,
            strained,
            models: state.own.models.clone(),
            in_flight: state.book.running(&self.name),
            places: state.places(),
            queue_s: state.book.queue_s(&self.name, now),
            speeds: state.book.learned(),
            links: Some(state.book.links()),
            drifted: state.book.has_drifted(),
            from: state.from.clone(),
            recent: state.recent.iter().copied().collect(),
        }
    }

    /// The boxes as a request would find them.
    pub fn candidates(&self, ask: &Ask, request: &Request, foreseen: Option<&Foreseen>) -> Vec<Candidate> {
        let now = self.clock.now();
        let state = self.state.lock();
        let session = ask.session.as_deref().map(prefix::session);
        let guesses = state.guesses(ask, request);
        let anywhere = guesses.values().copied().max().unwrap_or(0);
        let own_links = state.book.links();
        // A box that has shown nothing yet is taken for one like those that have: with speeds that are only assumed it
        // would look slower or faster than they are, and might never be asked.
        let told = state.peers.values().find_map(|peer| peer.note.as_ref()?.speeds);
        let own_speeds = state.book.learned().or(told).unwrap_or_else(|| state.book.speeds());
        let candidate = |node: &str, fit: Fit, models: &[String], running: u32, queue_s: f64| {
            let serves = models.is_empty() || ask.model.as_ref().is_none_or(|model| models.contains(model));
            let guess = guesses.get(node).copied().unwrap_or(0);
            let reach = match foreseen.filter(|foreseen| !foreseen.reaches.is_empty()) {
                Some(foreseen) => {
                    let exact = foreseen.reach(node).unwrap_or_default();
                    let known = foreseen.device_known && node == self.name;
                    // Nobody says what is there: what it computed lately lies on its device still, as far as its drive
                    // has it.
                    let lately = if known { 0 } else { guess.min(exact.own) };
                    Reach { device: exact.device.max(lately), ..exact }
                }
                None => Reach { device: guess, own: guess, all: anywhere },
            };
            Candidate {
                node: node.to_owned(),
                fit: if serves { fit } else { Fit::Unfit("it does not serve this model".into()) },
                running,
                queue_s,
                speeds: own_speeds,
                links: own_links,
                reach,
                bound: session.is_some_and(|mark| state.known.get(node).is_some_and(|known| known.has(mark))),
            }
        };
        let (own, models) = (&self.name, &state.own.models);
        let (running, queue_s) = (state.book.running(own), state.book.queue_s(own, now));
        let mut all = vec![candidate(own, state.own.fit.clone(), models, running, queue_s)];
        for peer in state.peers.values() {
            let note = peer.note.as_ref();
            let models = note.map_or(&[][..], |note| &note.models);
            let running = peer.load(own, state.book.running(&peer.name));
            let queue_s = state.book.queue_s(&peer.name, now) + peer.queue_of_others_s(own);
            let mut one = candidate(&peer.name, peer.fit(), models, running, queue_s);
            one.speeds = note.and_then(|note| note.speeds).unwrap_or(one.speeds);
            one.links = note.and_then(|note| note.links).unwrap_or(one.links);
            all.push(one);
        }
        all
    }

    /// What room there is for a target at the nodes that serve it.
    pub fn room(&self, target: &Target) -> Room {
        let serving = self.state.lock().serving(&self.name, target, self.clock.now());
        if serving.iter().all(|(places, ..)| *places > 0) && !serving.is_empty() {
            return Room::Places(
                serving.iter().map(|(places, running, _)| places.saturating_sub(*running)).sum(),
            );
        }
        Room::Open
    }

    /// Whole seconds, at least one, until what is ahead of a request for a target is worked off: the least that a node
    /// has to do, and what waits in line, shared by all of them.
    pub fn backlog_s(&self, target: &Target, waiting_s: f64) -> u32 {
        let serving = self.state.lock().serving(&self.name, target, self.clock.now());
        let least = serving.iter().map(|(.., queue_s)| *queue_s).min_by(f64::total_cmp).unwrap_or(0.0);
        let seconds = least + waiting_s / serving.len().max(1) as f64;
        // A float becomes the nearest whole number that there is; an hour says enough.
        (seconds.ceil() as u32).clamp(1, 3600)
    }

    /// How many bytes of a prompt `node` is believed to know.
    pub fn known(&self, node: &str, marks: &[Mark]) -> u64 {
        self.state.lock().known.get(node).map_or(0, |known| known.longest(marks))
    }

    /// Counts decisions, so that equals take turns.
    pub fn turn(&self) -> u64 {
        let mut state = self.state.lock();
        state.turn += 1;
        state.turn - 1
    }

    /// Names that can be asked for, sorted. None: somebody serves names that are not known, so any may do.
    pub fn models(&self) -> Option<Vec<String>> {
        let state = self.state.lock();
        let mut names = state.own.models.clone();
        if names.is_empty() && !matches!(state.own.fit, Fit::Unfit(_)) {
            return None;
        }
        for note in state.peers.values().filter(|peer| peer.connected).filter_map(|peer| peer.note.as_ref()) {
            if note.models.is_empty() && note.ready {
                return None;
            }
            names.extend(note.models.iter().cloned());
        }
        names.sort();
        names.dedup();
        Some(names)
    }

    pub fn peers(&self) -> Vec<Peer> {
        self.state.lock().peers.values().cloned().collect()
    }

    pub fn in_flight(&self) -> u32 {
        self.state.lock().total
    }

    pub fn drain(&self) {
        self.state.lock().draining = true;
    }

    /// Waits until nothing is in flight.
    pub async fn idle(&self) {
        loop {
            let left = self.left.notified();
            tokio::pin!(left);
            // Registered before looking: what leaves in between is not missed.
            left.as_mut().enable();
            if self.in_flight() == 0 {
                return;
            }
            left.await;
        }
    }
}

impl State {
    /// Requests that the own engine should have at once.
    fn places(&self) -> u32 {
        knee(self.book.learned(), self.places)
    }

    /// The nodes that serve a target now: places, requests in flight, and seconds until their prompts are computed.
    fn serving(&self, own: &str, target: &Target, now: Micros) -> Vec<(u32, u32, f64)> {
        let wants = |node: &str, fit: &Fit, models: &[String]| {
            let model = models.is_empty() || target.model.as_ref().is_none_or(|model| models.contains(model));
            model && !matches!(fit, Fit::Unfit(_)) && target.node.as_ref().is_none_or(|bound| bound == node)
        };
        let mut all = Vec::with_capacity(1 + self.peers.len());
        if wants(own, &self.own.fit, &self.own.models) {
            all.push((self.places(), self.book.running(own), self.book.queue_s(own, now)));
        }
        for peer in self.peers.values() {
            let Some(note) = &peer.note else { continue };
            if wants(&peer.name, &peer.fit(), &note.models) {
                let queue_s = self.book.queue_s(&peer.name, now) + peer.queue_of_others_s(own);
                all.push((note.places, peer.load(own, self.book.running(&peer.name)), queue_s));
            }
        }
        all
    }

    /// Tokens of a prompt that each node is believed to have computed before.
    fn guesses(&self, ask: &Ask, request: &Request) -> BTreeMap<&str, u32> {
        let tokens = |bytes: u64| {
            let all = u128::from(ask.prompt_bytes.max(1));
            u32::try_from(u128::from(request.tokens) * u128::from(bytes) / all).unwrap_or(u32::MAX)
        };
        let known = self.known.iter().map(|(node, known)| (node.as_str(), known.longest(&ask.prefix)));
        known.map(|(node, bytes)| (node, tokens(bytes.min(ask.prompt_bytes)))).collect()
    }
}

const DRAINING: &str = "is about to stop";

fn less(counts: &mut BTreeMap<String, u32>, name: &str) {
    if let Some(count) = counts.get_mut(name) {
        *count = count.saturating_sub(1);
        if *count == 0 {
            counts.remove(name);
        }
    }
}

impl Peer {
    pub fn fit(&self) -> Fit {
        match &self.note {
            _ if !self.connected => Fit::Unfit("is not connected".into()),
            None => Fit::Unfit("has not said yet that it can serve".into()),
            Some(note) if !note.ready => Fit::Unfit(format!("cannot serve ({})", note.why)),
            Some(note) if note.strained => Fit::Strained(note.why.clone()),
            Some(_) => Fit::Well,
        }
    }

    /// Its load: what it said without what came from here, and what is there from here now. A note is as old as
    /// the heartbeat; our own share is exact.
    fn load(&self, own: &str, ours: u32) -> u32 {
        let said = self
            .note
            .as_ref()
            .map_or(0, |note| note.in_flight.saturating_sub(note.from.get(own).copied().unwrap_or(0)));
        said.saturating_add(ours)
    }
}

impl Peer {
    /// Seconds of its queue that others than `own` have made: what it said, less our share of its requests. Our own
    /// prompts are known exactly; its word is as old as the heartbeat.
    fn queue_of_others_s(&self, own: &str) -> f64 {
        let Some(note) = &self.note else { return 0.0 };
        let ours = note.from.get(own).copied().unwrap_or(0);
        let share = f64::from(ours) / f64::from(note.in_flight.max(1));
        (note.queue_s * (1.0 - share)).max(0.0)
    }
}

impl Shared {
    /// A name for where a forwarded request came from: labels and counts stay bounded by the nodes there are.
    pub fn known_peer(self: &Arc<Self>, name: &str) -> String {
        if self.state.lock().peers.contains_key(name) { name.to_owned() } else { "peer".to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared() -> Shared {
        Shared::new("a".into(), 9, Admission::default(), Clock::sim(), &Meter::new())
    }

    fn peer(note: Note) -> Peer {
        Peer { name: "b".into(), connected: true, note: Some(Note { ready: true, ..note }) }
    }

    #[test]
    fn a_note_of_an_older_version_says_nothing_of_speeds_and_is_understood() {
        let note: Note =
            serde_json::from_str(r#"{"ready":true,"in_flight":3,"from":{"a":1},"x":1}"#).unwrap();
        assert_eq!((note.in_flight, note.speeds, note.drifted, note.queue_s), (3, None, false, 0.0));
        let told = shared().note();
        let read: Note = serde_json::from_str(&serde_json::to_string(&told).unwrap()).unwrap();
        assert_eq!((read.speeds, read.links, read.drifted), (told.speeds, told.links, false));
        assert_eq!(told.speeds, None, "it has shown nothing yet");
    }

    #[test]
    fn a_box_that_has_shown_nothing_is_taken_for_one_like_the_others() {
        let shared = shared();
        let ask = Ask::bare(super::super::ask::Endpoint::Models);
        let request = Request { tokens: 9000, approximate: false, output: 100.0, compacted: false };
        let fast = Speeds { rho: 9000.0, ..Speeds::default() };
        shared.set_peers(vec![peer(Note { speeds: Some(fast), ..Note::default() })]);
        let speeds = |boxes: Vec<Candidate>| boxes.into_iter().map(|one| one.speeds.rho).collect::<Vec<_>>();
        assert_eq!(speeds(shared.candidates(&ask, &request, None)), [9000.0, 9000.0]);
        shared.set_peers(vec![peer(Note::default())]);
        let assumed = Speeds::default().rho;
        let both = speeds(shared.candidates(&ask, &request, None));
        assert!(both.iter().all(|rho| (rho - assumed).abs() < 1e-6), "{both:?}");
    }

    #[test]
    fn of_another_nodes_queue_what_went_there_from_here_is_not_counted_twice() {
        let said = |in_flight, ours, queue_s| {
            let from = BTreeMap::from([("a".to_owned(), ours)]);
            peer(Note { in_flight, from, queue_s, ..Note::default() }).queue_of_others_s("a")
        };
        assert_eq!([said(4, 1, 8.0), said(2, 2, 8.0), said(0, 0, 8.0)], [6.0, 0.0, 8.0]);
        assert_eq!(said(1, 3, 8.0), 0.0, "never below nothing");
    }

    #[test]
    fn while_another_nodes_speeds_lead_astray_nobodys_are_used() {
        let shared = shared();
        let told = |drifted, connected| {
            shared.set_peers(vec![Peer { connected, ..peer(Note { drifted, ..Note::default() }) }]);
            shared.distrusts()
        };
        assert_eq!([told(false, true), told(true, true), told(true, false)], [false, true, false]);
        assert!(shared.drift().is_none(), "it is the other one's fault to tell");
    }

    #[test]
    fn speeds_that_nothing_can_have_are_not_taken_from_another_node() {
        let shared = shared();
        let ask = Ask::bare(super::super::ask::Endpoint::Models);
        let request = Request { tokens: 9000, approximate: false, output: 100.0, compacted: false };
        let odd = Speeds { rho: -5.0, a2: -1.0, s0: -1e9, kappa: -3.0, eviction: -1.0 };
        shared.set_peers(vec![peer(Note { speeds: Some(odd), ..Note::default() })]);
        let boxes = shared.candidates(&ask, &request, None);
        let other = boxes.iter().find(|candidate| candidate.node == "b").unwrap();
        let terms = super::super::price::price(&request, other).unwrap();
        assert!(terms.total_s > 0.0 && terms.decode_s > 0.0 && terms.eviction_s >= 0.0, "{terms:?}");
    }
}
