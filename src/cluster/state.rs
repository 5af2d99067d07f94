//! Everything the cluster knows, and who may change it.
//!
//! One struct under one lock: the machines of all peers, their sessions and what is told to subscribers. Sessions,
//! diallers and the handle take the lock for a moment each, feed a machine, and carry out what it says before they
//! let go, so that a subscriber's snapshot and its changes fit without a gap. The lock is never held across a wait.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, broadcast, oneshot, watch};
use tokio_util::sync::CancellationToken;

use super::facts::Match;
use super::identity::{Fingerprint, Pin};
use super::metrics::Metrics;
use super::peer::{Counts, Event, Peer, Room};
use super::proto::{Forgotten, Hello, SpaceFacts, Word};
use super::sharing::Row;
use crate::base::block::{RowKey, Space};
use crate::base::clock::{Clock, Micros, unix_seconds};
use crate::base::fault::{Code, Fault};
use crate::base::mutant::{self, Mutant};
use crate::meter::Meter;
use crate::tasks::Tasks;
use crate::transfer::{self, Fabric, Fetcher, Ticket, Tickets};

/// Offers that are kept until they are looked at; each node makes one every ten seconds.
const OFFERS: usize = 16;

/// Changes that a subscriber may be behind before it has to subscribe again.
const CHANGES: usize = 8192;

/// What changed on the other nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerChange {
    Added(Space, RowKey),
    Removed(Space, RowKey),
    /// Nothing told before holds any more. What other nodes still have follows as `Added`.
    Gone,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemberState {
    Connected,
    Gone,
}

/// Another node, for people and for the router.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Member {
    pub name: String,
    /// SHA-256 of its certificate, in hex.
    pub id: String,
    pub address: String,
    pub state: MemberState,
    pub generation: u64,
    /// Seconds since 1970 of the last change of `state`.
    pub since: u64,
    /// Rows it is known to hold that this node can use.
    pub keys: usize,
    /// Why its rows are of no use here; empty when they are, or when one side has no engine.
    pub differs: Vec<String>,
    /// Its last word about itself.
    pub note: serde_json::Value,
}

/// What every part of the cluster needs.
#[derive(Debug)]
pub struct Shared {
    pub me: Fingerprint,
    pub silence: Duration,
    pub clock: Clock,
    pub tasks: Tasks,
    pub metrics: Metrics,
    pub transfer: transfer::Metrics,
    pub fabric: Fabric,
    pub room: Room,
    pub tickets: Tickets,
    /// Wakes sessions when something is to be told.
    pub wake: watch::Sender<()>,
    changes: broadcast::Sender<PeerChange>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    peers: BTreeMap<Fingerprint, Entry>,
    facts: Option<SpaceFacts>,
    note: String,
    join: Join,
    sessions: u64,
    /// Rows that other nodes offered, until they are taken.
    offers: VecDeque<(Space, Vec<Row>)>,
    /// Owners that other nodes' operators want to be forgotten here, until that is done.
    forget: VecDeque<(Fingerprint, String)>,
    /// Who waits for another node to forget an owner.
    asked: Vec<Asked>,
}

/// An order that another node was given.
#[derive(Debug)]
struct Asked {
    of: Fingerprint,
    owner: String,
    answer: oneshot::Sender<Forgotten>,
}

/// How joining by a token stands.
#[derive(Clone, Debug, Default)]
pub enum Join {
    #[default]
    None,
    /// Not answered yet: since when, where, and the last failure.
    Trying { since: Micros, address: String, error: String },
    /// The other side said no.
    Refused(String),
}

#[derive(Debug)]
struct Entry {
    pin: Pin,
    peer: Peer,
    session: Option<Session>,
    data: Vec<String>,
    fetcher: Option<(Ticket, Fetcher)>,
    note: serde_json::Value,
    since: u64,
    /// When it was heard last, or this node started.
    lost: Micros,
    /// Why it could not be reached.
    trouble: String,
    /// A snapshot that its session has to hand in.
    tell: Option<Space>,
    counted: Counts,
    /// Wakes whoever waits for its session to begin or end.
    moved: Arc<Notify>,
}

#[derive(Debug)]
struct Session {
    number: u64,
    /// This side opened the connection.
    dialled: bool,
    replaced: CancellationToken,
}

/// A session that may speak.
#[derive(Clone, Debug)]
pub struct Begun {
    pub number: u64,
    pub replaced: CancellationToken,
}

/// What a session has to do next.
#[derive(Clone, Copy, Debug, Default)]
pub struct Chores {
    /// The session is over.
    pub over: bool,
    /// Hand in a snapshot of this space.
    pub tell: Option<Space>,
    /// Changes are wanted at all.
    pub tells: bool,
    /// Changes can be taken now.
    pub room: bool,
    /// Something can be sent.
    pub send: bool,
}

/// What a [`Shared`] is made of.
#[derive(Debug)]
pub struct Parts {
    pub me: Fingerprint,
    pub silence: Duration,
    pub clock: Clock,
    pub tasks: Tasks,
    pub fabric: Fabric,
    pub room: Room,
}

impl Shared {
    pub fn new(parts: Parts, pins: Vec<Pin>, meter: &Meter) -> Self {
        let Parts { me, silence, clock, tasks, fabric, room } = parts;
        let shared = Self {
            me,
            silence,
            clock,
            tasks,
            metrics: Metrics::new(meter),
            transfer: transfer::Metrics::new(meter),
            fabric,
            room,
            tickets: Tickets::default(),
            wake: watch::channel(()).0,
            changes: broadcast::channel(CHANGES).0,
            state: Mutex::new(State { note: "null".into(), ..State::default() }),
        };
        for pin in pins {
            shared.pin(pin);
        }
        shared
    }

    /// Everything other nodes hold of `space`, and what changes from exactly there on.
    pub fn subscribe(&self, space: Space) -> (Vec<RowKey>, broadcast::Receiver<PeerChange>) {
        let state = self.state.lock();
        let mut keys: Vec<RowKey> = state.peers.values().flat_map(|e| e.peer.held(space)).collect();
        if state.peers.len() > 1 {
            keys.sort_unstable();
            keys.dedup();
        }
        (keys, self.changes.subscribe())
    }

    /// For each fetcher, the indices of the keys that its peer holds. Keys that nobody holds are in none.
    pub fn holders(&self, space: Space, keys: impl Iterator<Item = RowKey>) -> Vec<(Fetcher, Vec<usize>)> {
        let state = self.state.lock();
        let of = |(entry, list): (&Entry, Vec<usize>)| {
            entry.fetcher.as_ref().map(|(_, fetcher)| (fetcher.clone(), list))
        };
        state.holders(space, keys).into_iter().filter_map(of).collect()
    }

    /// Which of these keys some other node holds, from which they can be fetched.
    pub fn held(&self, space: Space, keys: &[RowKey]) -> Vec<bool> {
        let state = self.state.lock();
        let open = || state.peers.values().filter(|entry| entry.fetcher.is_some());
        keys.iter().map(|key| open().any(|entry| entry.peer.holds(space, key))).collect()
    }

    /// Offers rows of which nobody else has a copy to one of the nodes that can use them, another one each `turn`.
    /// Gives how many.
    pub fn offer(&self, space: Space, mut rows: Vec<Row>, turn: usize) -> usize {
        let mut state = self.state.lock();
        rows.retain(|row| !state.peers.values().any(|entry| entry.peer.holds(space, &row.key)));
        let fit = |entry: &&Entry| *entry.peer.matched() == Match::Same(space) && entry.peer.is_up();
        let count = state.peers.values().filter(fit).count();
        let chosen = state.peers.values().filter(fit).nth(turn % count.max(1)).map(|e| e.pin.fingerprint);
        let Some(of) = chosen.filter(|_| !rows.is_empty()) else { return 0 };
        let offered = rows.len();
        let taken = self.feed(&mut state, of, |peer| peer.offer(space, rows)) == Some(true);
        drop(state);
        self.wake.send_replace(());
        if taken { offered } else { 0 }
    }

    /// What other nodes have offered of this space since it was asked last.
    pub fn take_offers(&self, space: Space) -> Vec<Vec<Row>> {
        let offers = std::mem::take(&mut self.state.lock().offers);
        offers.into_iter().filter(|(of, _)| *of == space).map(|(_, rows)| rows).collect()
    }

    /// Tells every other node to destroy the keys of an owner. For each its name, and what to await its answer with; the
    /// sender is dropped when the order cannot be said.
    pub fn tell_to_forget(&self, owner: &str) -> Vec<(String, oneshot::Receiver<Forgotten>)> {
        let mut state = self.state.lock();
        state.asked.retain(|asked| !asked.answer.is_closed());
        let all: Vec<Pin> = state.peers.values().map(|entry| entry.pin.clone()).collect();
        let tell = |Pin { name, fingerprint: of, .. }| {
            let (answer, answered) = oneshot::channel();
            let word = Word::Forget { owner: owner.to_owned() };
            if self.feed(&mut state, of, |peer| peer.say(word)) == Some(true) {
                state.asked.push(Asked { of, owner: owner.to_owned(), answer });
            }
            (name, answered)
        };
        let told = all.into_iter().map(tell).collect();
        drop(state);
        self.wake.send_replace(());
        told
    }

    /// Owners that are to be forgotten here, with the nodes that wait for an answer.
    pub fn take_orders_to_forget(&self) -> VecDeque<(Fingerprint, String)> {
        std::mem::take(&mut self.state.lock().forget)
    }

    /// Answers such an order. A node that is gone meanwhile asks again by its operator.
    pub fn say_forgotten(&self, of: Fingerprint, owner: String, done: Forgotten) {
        let mut state = self.state.lock();
        self.feed(&mut state, of, |peer| peer.say(Word::Forgotten { owner, done }));
        drop(state);
        self.wake.send_replace(());
    }

    /// As [`Self::holders`]: whom a fetch would ask, and with which ticket.
    #[cfg(test)]
    pub fn sources(&self, space: Space, keys: &[RowKey]) -> Vec<(Fingerprint, Ticket, Vec<usize>)> {
        let state = self.state.lock();
        let of = |(entry, list): (&Entry, Vec<usize>)| {
            entry.fetcher.as_ref().map(|(ticket, _)| (entry.pin.fingerprint, *ticket, list))
        };
        state.holders(space, keys.iter().copied()).into_iter().filter_map(of).collect()
    }

    /// The ticket that opens rails to a node now.
    #[cfg(test)]
    pub fn ticket_of(&self, of: Fingerprint) -> Option<Ticket> {
        self.state.lock().peers.get(&of)?.fetcher.as_ref().map(|(ticket, _)| *ticket)
    }

    #[cfg(test)]
    pub fn look<T>(&self, of: Fingerprint, look: impl FnOnce(&Peer) -> T) -> T {
        look(&self.state.lock().peers[&of].peer)
    }

    /// The rails to each node that is connected, by its name.
    pub fn fetchers(&self) -> Vec<(String, Fetcher)> {
        let state = self.state.lock();
        let open = |e: &Entry| Some((e.pin.name.clone(), e.fetcher.as_ref()?.1.clone()));
        state.peers.values().filter_map(open).collect()
    }

    pub fn members(&self) -> Vec<Member> {
        self.state.lock().peers.values().map(Entry::member).collect()
    }

    pub fn faults(&self) -> Vec<Fault> {
        let now = self.clock.now();
        let state = self.state.lock();
        let mut faults = Vec::new();
        match &state.join {
            Join::Refused(reason) => faults.push(Fault::new(Code::JoinRefused, reason)),
            Join::Trying { since, address, error } if now.since(*since) >= self.silence => {
                let cause = format!("the node of the join token at {address} does not answer: {error}");
                faults.push(Fault::new(Code::PeerGone, cause));
            }
            Join::None | Join::Trying { .. } => {}
        }
        for entry in state.peers.values() {
            let Pin { name, address, .. } = &entry.pin;
            let gone = now.since(entry.lost);
            if let Match::Differ(list) = entry.peer.matched() {
                faults.push(Fault::new(Code::PeerDiffers, format!("{name}: {}", list.join("; "))));
            }
            if !entry.peer.is_up() && gone >= self.silence {
                let (gone, trouble) = (gone.as_secs(), &entry.trouble);
                let cause = format!("{name} at {address} has not been heard for {gone} s: {trouble}");
                faults.push(Fault::new(Code::PeerGone, cause));
            }
        }
        faults
    }

    pub fn set_facts(&self, facts: Option<SpaceFacts>) {
        let facts = facts.map(SpaceFacts::bounded);
        let mut state = self.state.lock();
        state.facts.clone_from(&facts);
        let all: Vec<Fingerprint> = state.peers.keys().copied().collect();
        for of in all {
            self.feed(&mut state, of, |peer| peer.set_facts(facts.clone()));
        }
        drop(state);
        self.wake.send_replace(());
    }

    pub fn set_note(&self, note: String) {
        let mut state = self.state.lock();
        for entry in state.peers.values_mut() {
            entry.peer.tell(note.clone());
        }
        state.note = note;
    }

    pub fn set_join(&self, join: Join) {
        self.state.lock().join = join;
    }

    /// Knows a node from now on, or knows its new name and address. True when anything is new.
    pub fn pin(&self, pin: Pin) -> bool {
        let mut state = self.state.lock();
        if let Some(entry) = state.peers.get_mut(&pin.fingerprint) {
            let new = entry.pin != pin;
            entry.pin = pin;
            return new;
        }
        let mut peer = Peer::new(self.silence, state.facts.clone(), self.room);
        peer.tell(state.note.clone());
        let entry = Entry {
            peer,
            session: None,
            data: Vec::new(),
            fetcher: None,
            note: serde_json::Value::Null,
            since: unix_seconds(),
            lost: self.clock.now(),
            trouble: "not reached yet".into(),
            tell: None,
            counted: Counts::default(),
            moved: Arc::default(),
            pin,
        };
        state.peers.insert(entry.pin.fingerprint, entry);
        true
    }

    /// Does not know a node any more. Its session ends, and what it held is forgotten.
    pub fn unpin(&self, of: Fingerprint) {
        let mut state = self.state.lock();
        self.feed(&mut state, of, |peer| peer.on_disconnected("it was forgotten"));
        if let Some(entry) = state.peers.remove(&of) {
            entry.moved.notify_waiters();
        }
    }

    /// Known nodes with this name or, in hex, this fingerprint or its beginning.
    pub fn named(&self, name: &str) -> Vec<Pin> {
        let begins = |pin: &Pin| name.len() >= 8 && pin.fingerprint.to_string().starts_with(name);
        self.pins().into_iter().filter(|pin| pin.name == name || begins(pin)).collect()
    }

    pub fn pins(&self) -> Vec<Pin> {
        self.state.lock().peers.values().map(|e| e.pin.clone()).collect()
    }

    pub fn is_up(&self, of: Fingerprint) -> bool {
        self.state.lock().peers.get(&of).is_some_and(|entry| entry.peer.is_up())
    }

    pub fn knows(&self, of: Fingerprint) -> bool {
        self.state.lock().peers.contains_key(&of)
    }

    /// The known node with this name or, in hex, this fingerprint; one that is connected before one that is not.
    pub fn find(&self, name: &str) -> Option<Pin> {
        let state = self.state.lock();
        let named = |e: &&Entry| e.pin.name == name || e.pin.fingerprint.to_string() == name;
        let found = state.peers.values().filter(named).max_by_key(|e| e.peer.is_up());
        found.map(|e| e.pin.clone())
    }

    /// Whether this is still the node whose waker this is: a node that was forgotten and came back has another.
    pub fn is_known_by(&self, of: Fingerprint, moved: &Arc<Notify>) -> bool {
        self.state.lock().peers.get(&of).is_some_and(|entry| Arc::ptr_eq(&entry.moved, moved))
    }

    /// Where to dial a node that has no session; `None` while it has one.
    pub fn to_dial(&self, of: Fingerprint) -> Option<String> {
        let state = self.state.lock();
        state.peers.get(&of).filter(|e| e.session.is_none()).map(|e| e.pin.address.clone())
    }

    pub fn moved(&self, of: Fingerprint) -> Arc<Notify> {
        self.state.lock().peers.get(&of).map(|e| e.moved.clone()).unwrap_or_default()
    }

    pub fn trouble(&self, of: Fingerprint, trouble: String) {
        if let Some(entry) = self.state.lock().peers.get_mut(&of) {
            entry.trouble = trouble;
        }
    }

    /// Begins a session with a known node, unless there is a better one.
    ///
    /// When both sides dialled at the same time, both keep the connection that the node with the lower fingerprint
    /// dialled. A second one from the same side, or of a newer generation, takes the place of the first.
    pub fn begin(&self, of: Fingerprint, hello: &Hello, dialled: bool) -> Result<Begun, String> {
        let now = self.clock.now();
        let mut state = self.state.lock();
        state.sessions += 1;
        let number = state.sessions;
        let Some(entry) = state.peers.get_mut(&of) else { return Err("it is not known".into()) };
        if let Some(current) = &entry.session
            && hello.generation == entry.peer.generation()
            && current.dialled != dialled
            && dialled != (self.me < of)
        {
            return Err("another connection with it is up already".into());
        }
        if hello.generation < entry.peer.generation() {
            let known = entry.peer.generation();
            return Err(format!("it is generation {}, but {known} was here already", hello.generation));
        }
        let ticket = self.tickets.issue(of.0, hello.generation);
        let replaced = CancellationToken::new();
        let session = Session { number, dialled, replaced: replaced.clone() };
        let (was_up, old) = (entry.peer.is_up(), entry.session.replace(session));
        if let Some(old) = old {
            old.replaced.cancel();
        }
        // Rails to an earlier life are of no use, and what still comes over them is not its word any more.
        if hello.generation > entry.peer.generation()
            && let Some((_, rails)) = entry.fetcher.take_if(|_| !mutant::on(Mutant::KeepRails))
        {
            rails.close();
        }
        entry.data.clone_from(&hello.data);
        if !was_up {
            entry.since = unix_seconds();
        }
        entry.moved.notify_waiters();
        self.metrics.sessions.inc();
        self.feed(&mut state, of, |peer| {
            peer.on_connected(now, hello.generation, ticket).expect("the generation was compared above");
        });
        Ok(Begun { number, replaced })
    }

    /// Ends session `number`, if it is still the one.
    pub fn end(&self, of: Fingerprint, number: u64, why: &str) {
        let mut state = self.state.lock();
        if state.peers.get(&of).is_some_and(|e| e.is_in(number)) {
            self.feed(&mut state, of, |peer| peer.on_disconnected(why));
        }
    }

    /// Feeds a machine on behalf of session `number`; None when that session is over.
    pub fn with<T>(&self, of: Fingerprint, number: u64, feed: impl FnOnce(&mut Peer) -> T) -> Option<T> {
        let mut state = self.state.lock();
        if !state.peers.get(&of).is_some_and(|e| e.is_in(number)) {
            return None;
        }
        self.feed(&mut state, of, feed)
    }

    /// What the driver of session `number` has to do. Asking takes the wish for a snapshot away, so only the loop that
    /// fulfils it asks.
    pub fn chores(&self, of: Fingerprint, number: u64) -> Chores {
        let mut state = self.state.lock();
        let Some(entry) = state.peers.get_mut(&of).filter(|e| e.is_in(number)) else {
            return Chores { over: true, ..Chores::default() };
        };
        Chores {
            over: false,
            tell: entry.tell.take(),
            tells: entry.peer.tells().is_some(),
            room: entry.peer.has_room(),
            send: entry.peer.wants_to_send(),
        }
    }

    /// A word from the peer of session `number`.
    pub fn hear(&self, of: Fingerprint, number: u64, generation: u64, word: Word) {
        let now = self.clock.now();
        self.with(of, number, |peer| peer.on_word(now, generation, word));
    }

    /// Feeds a machine and carries out what it says.
    fn feed<T>(&self, state: &mut State, of: Fingerprint, feed: impl FnOnce(&mut Peer) -> T) -> Option<T> {
        let entry = state.peers.get_mut(&of)?;
        let fed = feed(&mut entry.peer);
        let mut spread = Vec::new();
        while let Some(event) = entry.peer.poll_event() {
            match event {
                Event::Tell(space) => entry.tell = Some(space),
                Event::Note(note) => entry.note = serde_json::from_str(&note).unwrap_or_default(),
                Event::Ticket(ticket) => self.open_rails(entry, ticket),
                Event::Down(why) => self.down(entry, why),
                Event::Offered { space, rows } => {
                    if state.offers.len() == OFFERS {
                        state.offers.pop_front();
                    }
                    state.offers.push_back((space, rows));
                }
                // Each peer is told so once by an operator; what does not fit is not answered, and so seen there.
                Event::Forget(owner) if state.forget.len() < OFFERS => state.forget.push_back((of, owner)),
                Event::Forget(_) => {}
                Event::OwnerForgotten(owner, done) => {
                    let waits = |asked: &Asked| asked.of == of && asked.owner == owner;
                    if let Some(nth) = state.asked.iter().position(waits) {
                        // Whoever asked may have gone.
                        let _ = state.asked.swap_remove(nth).answer.send(done);
                    }
                }
                Event::Changed { .. } | Event::Forgotten => spread.push(event),
            }
        }
        self.count(entry);
        for event in spread {
            self.spread(state, of, event);
        }
        self.metrics.connected.set(state.peers.values().filter(|e| e.peer.is_up()).count() as i64);
        self.metrics.keys.set(state.peers.values().map(|e| e.peer.held_count()).sum::<usize>() as i64);
        Some(fed)
    }

    /// Tells subscribers. A key that another peer holds as well is neither news nor lost.
    fn spread(&self, state: &State, of: Fingerprint, event: Event) {
        let others = || state.peers.iter().filter(move |&(&f, _)| f != of).map(|(_, e)| &e.peer);
        match event {
            Event::Changed { space, added, removed } => {
                for key in removed.into_iter().filter(|key| !others().any(|o| o.holds(space, key))) {
                    let _ = self.changes.send(PeerChange::Removed(space, key));
                }
                for key in added.into_iter().filter(|key| !others().any(|o| o.holds(space, key))) {
                    let _ = self.changes.send(PeerChange::Added(space, key));
                }
            }
            _ => {
                let _ = self.changes.send(PeerChange::Gone);
                let mut left: Vec<(Space, RowKey)> = Vec::new();
                for other in others() {
                    let Match::Same(space) = *other.matched() else { continue };
                    left.extend(other.held(space).map(|key| (space, key)));
                }
                left.sort_unstable();
                left.dedup();
                for (space, key) in left {
                    let _ = self.changes.send(PeerChange::Added(space, key));
                }
            }
        }
    }

    fn open_rails(&self, entry: &mut Entry, ticket: Ticket) {
        if entry.fetcher.as_ref().is_some_and(|(old, _)| *old == ticket) {
            return;
        }
        let fetcher =
            Fetcher::start(&self.fabric, &entry.data, ticket, self.silence, &self.transfer, &self.tasks);
        if let Some((_, old)) = entry.fetcher.replace((ticket, fetcher)) {
            old.close();
        }
    }

    fn down(&self, entry: &mut Entry, why: String) {
        tracing::warn!(peer = entry.pin.name, why, "the session with a node ended");
        if let Some((_, fetcher)) = entry.fetcher.take_if(|_| !mutant::on(Mutant::KeepRails)) {
            fetcher.close();
        }
        if !mutant::on(Mutant::KeepTicket) {
            self.tickets.revoke(entry.pin.fingerprint.0);
        }
        if let Some(session) = entry.session.take() {
            session.replaced.cancel();
        }
        (entry.lost, entry.since) = (self.clock.now(), unix_seconds());
        entry.tell = None;
        entry.trouble = why;
        entry.moved.notify_waiters();
    }

    fn count(&self, entry: &mut Entry) {
        let (new, old) = (entry.peer.counts(), entry.counted);
        self.metrics.resyncs.inc_by(new.resyncs - old.resyncs);
        self.metrics.stale.inc_by(new.stale - old.stale);
        self.metrics.over.inc_by(new.over - old.over);
        entry.counted = new;
    }
}

impl State {
    /// For each peer whose rails are open, the indices of the keys that it holds; no key twice.
    fn holders(
        &self,
        space: Space,
        keys: impl Iterator<Item = RowKey>,
    ) -> impl IntoIterator<Item = (&Entry, Vec<usize>)> {
        let open = self.peers.values().filter(|entry| entry.fetcher.is_some());
        let mut peers: Vec<(&Entry, Vec<usize>)> = open.map(|entry| (entry, Vec::new())).collect();
        for (index, key) in keys.enumerate() {
            if let Some((_, list)) = peers.iter_mut().find(|(entry, _)| entry.peer.holds(space, &key)) {
                list.push(index);
            }
        }
        peers.retain(|(_, list)| !list.is_empty());
        peers
    }
}

impl Entry {
    fn is_in(&self, number: u64) -> bool {
        self.session.as_ref().is_some_and(|s| s.number == number)
    }

    fn member(&self) -> Member {
        let differs = match self.peer.matched() {
            Match::Differ(list) => list.clone(),
            Match::Open | Match::Same(_) => Vec::new(),
        };
        Member {
            name: self.pin.name.clone(),
            id: self.pin.fingerprint.to_string(),
            address: self.pin.address.clone(),
            state: if self.peer.is_up() { MemberState::Connected } else { MemberState::Gone },
            generation: self.peer.generation(),
            since: self.since,
            keys: self.peer.held_count(),
            differs,
            note: self.note.clone(),
        }
    }
}
