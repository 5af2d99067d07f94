//! What one node knows of another, and what it tells it: a machine without clock and sockets.
//!
//! Both sides tell facts first. While the facts are equal, each tells the keys it holds: a snapshot in parts, then
//! deltas with numbers. A gap, or a heartbeat that is ahead, makes the listener ask for everything again. A node's
//! word is bound to its generation: what an older one said is dropped, and a newer one starts from nothing. Silence
//! ends the session, and with it everything the other node was believed to hold.
//!
//! The machine holds no copy of what its own node holds: the driver hands in a snapshot when [`Event::Tell`] asks
//! for one, and the changes from exactly there on. Memory is bounded on both sides: [`HELD`] keys of the peer,
//! [`PENDING`] changes not yet sent, 10 MB of them; a queue of messages does not exist, what is due is made when it can be sent.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use super::facts::{Match, differences};
use super::proto::{self, MAX_KEYS, MAX_OFFERED, SpaceFacts, Word};
use super::sharing::Row;
use super::telling::Telling;
use crate::base::block::{RowKey, Space};
use crate::base::clock::Micros;
use crate::base::mutant::{self, Mutant};
use crate::transfer::Ticket;

/// Keys believed of one peer: 1.8 TB of rows of 2 MiB. Seven eighths of a power of two: a hash table of a million
/// places takes as many before it doubles, so a peer takes 45 MB at most (41 bytes a place), and as much again while
/// its next snapshot comes in beside what is believed. More are counted, not kept: the engine then recomputes what it
/// could have fetched.
pub const HELD: usize = (1 << 20) / 8 * 7;

/// Changes that wait to be sent; beyond, a new snapshot is cheaper.
pub const PENDING: usize = 1 << 16;

/// Heartbeats within the silence that ends a session: three may be lost.
const BEATS: u32 = 4;

/// Words that wait to be said once: an operator's orders and their answers.
const WORDS: usize = 64;

/// Bounds of one machine. Tests make them small, so that they are reached.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Keys believed of the peer.
    pub held: usize,
    /// Changes that wait to be sent.
    pub pending: usize,
    /// Keys in one message; at most [`MAX_KEYS`].
    pub part: usize,
}

impl Default for Room {
    fn default() -> Self {
        Self { held: HELD, pending: PENDING, part: MAX_KEYS }
    }
}

/// What the driver must know or do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Hand in a snapshot of this space, and its changes from there on.
    Tell(Space),
    /// The peer holds more, or less, than before.
    Changed { space: Space, added: Vec<RowKey>, removed: Vec<RowKey> },
    /// Everything the peer was believed to hold is forgotten.
    Forgotten,
    /// The peer's word about itself.
    Note(String),
    /// What opens data connections to the peer.
    Ticket(Ticket),
    /// Rows that the peer is likely to drop.
    Offered { space: Space, rows: Vec<Row> },
    /// The peer's operator wants an owner's keys destroyed.
    Forget(String),
    /// The peer has destroyed an owner's keys, or says why not.
    OwnerForgotten(String, proto::Forgotten),
    /// The session is over: close the connection.
    Down(String),
}

/// Numbers for the metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Resyncs asked for.
    pub resyncs: u64,
    /// Words of another generation that were dropped.
    pub stale: u64,
    /// Keys over [`HELD`].
    pub over: u64,
}

/// A peer that says it is older than what was heard of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it says that it is generation {said}, but {known} was here already")]
pub struct Older {
    pub said: u64,
    pub known: u64,
}

#[derive(Debug)]
pub struct Peer {
    silence: Duration,
    room: Room,
    /// Newest generation of the peer.
    generation: u64,
    up: Option<Up>,
    ours: Option<SpaceFacts>,
    /// How often our facts changed.
    number: u32,
    theirs: Option<SpaceFacts>,
    their_number: u32,
    matched: Match,
    telling: Telling,
    hearing: Hearing,
    note: String,
    their_note: String,
    due: Due,
    events: VecDeque<Event>,
    counts: Counts,
}

#[derive(Debug)]
struct Up {
    heard: Micros,
    beat: Micros,
}

/// Small words to be said at the next chance.
#[derive(Debug, Default)]
struct Due {
    ticket: Option<Ticket>,
    facts: bool,
    resync: bool,
    beat: bool,
    offer: Vec<Row>,
    /// Said once, in their order.
    words: VecDeque<Word>,
}

/// What we were told.
#[derive(Debug, Default)]
struct Hearing {
    held: HashMap<RowKey, u32>,
    epoch: u32,
    seq: u64,
    /// A snapshot of `epoch` was heard to its end.
    whole: bool,
    /// Keys were left out for want of room.
    short: bool,
    building: Option<Building>,
    asked: Option<Micros>,
}

#[derive(Debug)]
struct Building {
    epoch: u32,
    next: u32,
    held: HashMap<RowKey, u32>,
    /// Keys were left out for want of room.
    short: bool,
}

impl Peer {
    pub fn new(silence: Duration, ours: Option<SpaceFacts>, room: Room) -> Self {
        Self {
            silence,
            room,
            generation: 0,
            up: None,
            ours,
            number: 1,
            theirs: None,
            their_number: 0,
            matched: Match::Open,
            telling: Telling::default(),
            hearing: Hearing::default(),
            note: "null".into(),
            their_note: String::new(),
            due: Due::default(),
            events: VecDeque::new(),
            counts: Counts::default(),
        }
    }

    pub fn is_up(&self) -> bool {
        self.up.is_some()
    }

    /// Newest generation of the peer that was heard of.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    pub fn matched(&self) -> &Match {
        &self.matched
    }

    /// The space whose changes are to be handed in.
    pub fn tells(&self) -> Option<Space> {
        self.telling.space
    }

    /// Whether more changes are welcome; the driver leaves them where they are meanwhile.
    pub fn has_room(&self) -> bool {
        self.telling.pending.len() < self.room.pending / 2
    }

    pub fn holds(&self, space: Space, key: &RowKey) -> bool {
        self.matched == Match::Same(space) && self.hearing.held.contains_key(key)
    }

    /// Everything the peer is believed to hold of `space`.
    pub fn held(&self, space: Space) -> impl Iterator<Item = RowKey> + '_ {
        let same = self.matched == Match::Same(space);
        self.hearing.held.keys().filter(move |_| same).copied()
    }

    pub fn held_count(&self) -> usize {
        self.hearing.held.len()
    }

    /// Where the peer's telling was heard last, once a snapshot was heard to its end, and whether all of it was kept.
    #[cfg(test)]
    pub fn heard(&self) -> Option<((u32, u64), bool)> {
        let Hearing { epoch, seq, whole, short, .. } = self.hearing;
        whole.then_some(((epoch, seq), !short))
    }

    #[cfg(test)]
    pub fn held_keys(&self) -> impl Iterator<Item = &RowKey> {
        self.hearing.held.keys()
    }

    /// Changes that wait to be sent.
    #[cfg(test)]
    pub fn waiting(&self) -> usize {
        self.telling.pending.len()
    }

    /// Everything was told that was handed in.
    #[cfg(test)]
    pub fn told_all(&self) -> bool {
        self.telling.snapshot.is_none() && self.telling.pending.is_empty()
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// A session with the peer in its `generation` begins; also when one was up already.
    pub fn on_connected(&mut self, now: Micros, generation: u64, ticket: Ticket) -> Result<(), Older> {
        if generation < self.generation {
            return Err(Older { said: generation, known: self.generation });
        }
        if generation > self.generation {
            self.forget_peer();
            self.hearing = Hearing::default();
            self.generation = generation;
        }
        self.up = Some(Up { heard: now, beat: now.plus(self.silence / BEATS) });
        self.due = Due { ticket: Some(ticket), facts: true, beat: true, ..Due::default() };
        self.hearing.building = None;
        self.hearing.asked = None;
        self.tell_anew();
        Ok(())
    }

    /// The connection ended.
    pub fn on_disconnected(&mut self, why: impl Into<String>) {
        if self.up.take().is_none() {
            return;
        }
        if !mutant::on(Mutant::KeepDead) {
            self.forget_peer();
        }
        self.due = Due::default();
        self.events.push_back(Event::Down(why.into()));
    }

    pub fn set_facts(&mut self, facts: Option<SpaceFacts>) {
        if self.ours == facts {
            return;
        }
        self.ours = facts;
        self.number = self.number.wrapping_add(1);
        self.due.facts = self.is_up();
        self.compare();
    }

    /// JSON for the next heartbeats.
    pub fn tell(&mut self, note: String) {
        self.note = note;
    }

    /// Rows that this node is likely to drop, to be taken over by the peer. The last offer counts. False when the peer
    /// has no use for them.
    pub fn offer(&mut self, space: Space, mut rows: Vec<Row>) -> bool {
        let of_use = self.is_up() && self.matched == Match::Same(space);
        if of_use {
            rows.truncate(MAX_OFFERED);
            self.due.offer = rows;
        }
        of_use
    }

    /// Says this once, while the session lives. False when there is none, or too much waits to be said.
    pub fn say(&mut self, word: Word) -> bool {
        let can = self.is_up() && self.due.words.len() < WORDS;
        if can {
            self.due.words.push_back(word);
        }
        can
    }

    /// What this node holds of `space`; answers [`Event::Tell`].
    pub fn on_snapshot(&mut self, space: Space, mut keys: Vec<(RowKey, u32)>) {
        if self.telling.space != Some(space) {
            return;
        }
        keys.reverse();
        let epoch = self.telling.epoch.wrapping_add(1);
        self.telling = Telling { space: Some(space), epoch, snapshot: Some(keys), ..Telling::default() };
    }

    /// This node holds more (with its position) or less than before.
    pub fn on_change(&mut self, space: Space, key: RowKey, position: Option<u32>) {
        if self.telling.space != Some(space) {
            return;
        }
        self.telling.pending.insert(key, position);
        if self.telling.pending.len() > self.room.pending {
            self.tell_anew();
        }
    }

    /// Changes were missed: tells everything again.
    pub fn tell_anew(&mut self) {
        self.telling.pending.clear();
        self.telling.snapshot = None;
        self.telling.space = match self.matched {
            Match::Same(space) if self.is_up() => Some(space),
            _ => None,
        };
        if let Some(space) = self.telling.space {
            self.events.push_back(Event::Tell(space));
        }
    }

    pub fn on_tick(&mut self, now: Micros) {
        let Some(up) = &mut self.up else { return };
        if now.since(up.heard) >= self.silence {
            let silent = now.since(up.heard).as_secs_f32();
            self.on_disconnected(format!("no word for {silent:.1} s"));
            return;
        }
        if now >= up.beat {
            up.beat = now.plus(self.silence / BEATS);
            self.due.beat = true;
        }
    }

    pub fn on_word(&mut self, now: Micros, generation: u64, word: Word) {
        let Some(up) = &mut self.up else { return };
        if generation != self.generation && !mutant::on(Mutant::SkipGeneration) {
            self.counts.stale += 1;
            return;
        }
        up.heard = now;
        match word {
            Word::Facts { number, facts } => self.on_facts(number, facts),
            Word::Snapshot { space, epoch, part, last, keys } => {
                if self.matched == Match::Same(space) {
                    self.on_part(now, space, epoch, part, last, keys);
                }
            }
            Word::Delta { space, epoch, seq, added, removed } => {
                if self.matched == Match::Same(space) {
                    self.on_delta(now, space, (epoch, seq), added, removed);
                }
            }
            Word::Resync => {
                self.due.facts = true;
                // A snapshot under way is new enough.
                if self.telling.snapshot.is_none() {
                    self.tell_anew();
                }
            }
            Word::Heartbeat { facts, epoch, seq, complete, note } => {
                self.on_beat(now, facts, (epoch, seq), complete, note);
            }
            Word::Ticket(ticket) => self.events.push_back(Event::Ticket(ticket)),
            Word::Offer { space, rows } => {
                if self.matched == Match::Same(space) {
                    self.events.push_back(Event::Offered { space, rows });
                }
            }
            Word::Forget { owner } => self.events.push_back(Event::Forget(owner)),
            Word::Forgotten { owner, done } => self.events.push_back(Event::OwnerForgotten(owner, done)),
            Word::Bye => self.on_disconnected("it stopped"),
        }
    }

    /// Something could be sent.
    pub fn wants_to_send(&self) -> bool {
        let Due { ticket, facts, resync, beat, offer, words } = &self.due;
        self.is_up()
            && (ticket.is_some()
                || *facts
                || *resync
                || *beat
                || !offer.is_empty()
                || !words.is_empty()
                || self.telling.snapshot.is_some()
                || !self.telling.pending.is_empty())
    }

    /// The next word to send.
    pub fn poll_send(&mut self) -> Option<Word> {
        if !self.is_up() {
            return None;
        }
        if let Some(ticket) = self.due.ticket.take() {
            return Some(Word::Ticket(ticket));
        }
        if std::mem::take(&mut self.due.facts) {
            return Some(Word::Facts { number: self.number, facts: self.ours.clone() });
        }
        if std::mem::take(&mut self.due.resync) {
            return Some(Word::Resync);
        }
        if std::mem::take(&mut self.due.beat) {
            let Telling { space, epoch, seq, ref snapshot, .. } = self.telling;
            let complete = space.is_some() && epoch > 0 && snapshot.is_none();
            let note = self.note.clone();
            return Some(Word::Heartbeat { facts: self.number, epoch, seq, complete, note });
        }
        if let Some(word) = self.due.words.pop_front() {
            return Some(word);
        }
        if let (Match::Same(space), false) = (&self.matched, self.due.offer.is_empty()) {
            return Some(Word::Offer { space: *space, rows: std::mem::take(&mut self.due.offer) });
        }
        self.due.offer.clear();
        self.telling.next(self.room.part)
    }

    /// What happened.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    fn on_facts(&mut self, number: u32, facts: Option<SpaceFacts>) {
        // Numbers only grow within a generation: an older one arrived late.
        if number >= self.their_number {
            self.their_number = number;
            self.theirs = facts;
            self.compare();
        }
    }

    fn on_part(
        &mut self,
        now: Micros,
        space: Space,
        epoch: u32,
        part: u32,
        last: bool,
        keys: Vec<(RowKey, u32)>,
    ) {
        let newest = self.hearing.building.as_ref().map_or(self.hearing.epoch, |b| b.epoch);
        if epoch > newest && part == 0 {
            self.hearing.building = Some(Building { epoch, next: 0, held: HashMap::new(), short: false });
            self.hearing.asked = None;
        }
        let next = match &mut self.hearing.building {
            Some(building) if building.epoch == epoch => building,
            // An old part is nothing new; a newer one without its beginning is a gap.
            _ if epoch <= newest => return,
            _ => return self.ask(now),
        };
        if part < next.next {
            return;
        }
        if part > next.next {
            self.hearing.building = None;
            return self.ask(now);
        }
        next.next += 1;
        for (key, position) in keys {
            if next.held.len() < self.room.held || next.held.contains_key(&key) {
                next.held.insert(key, position);
            } else {
                self.counts.over += 1;
                next.short = true;
            }
        }
        if last && let Some(built) = self.hearing.building.take() {
            self.install(space, built);
        }
    }

    /// A whole snapshot takes the place of what was believed.
    fn install(&mut self, space: Space, built: Building) {
        let old = std::mem::replace(&mut self.hearing.held, built.held);
        let added = self.hearing.held.keys().filter(|k| !old.contains_key(k)).copied().collect();
        let removed = old.into_keys().filter(|k| !self.hearing.held.contains_key(k)).collect();
        (self.hearing.epoch, self.hearing.seq, self.hearing.whole) = (built.epoch, 0, true);
        self.hearing.short = built.short;
        self.changed(space, added, removed);
    }

    fn on_delta(
        &mut self,
        now: Micros,
        space: Space,
        (epoch, seq): (u32, u64),
        added: Vec<(RowKey, u32)>,
        removed: Vec<RowKey>,
    ) {
        let hearing = &mut self.hearing;
        if (epoch, seq) <= (hearing.epoch, hearing.seq) {
            return;
        }
        let gap = !hearing.whole || epoch != hearing.epoch || seq != hearing.seq + 1;
        if gap && !mutant::on(Mutant::SkipGap) {
            return self.ask(now);
        }
        hearing.seq = seq;
        let removed: Vec<RowKey> =
            removed.into_iter().filter(|key| hearing.held.remove(key).is_some()).collect();
        let mut fresh = Vec::new();
        for (key, position) in added {
            if hearing.held.len() >= self.room.held && !hearing.held.contains_key(&key) {
                self.counts.over += 1;
                hearing.short = true;
            } else if hearing.held.insert(key, position).is_none() {
                fresh.push(key);
            }
        }
        // Keys were left out, and half of the room is free again. Half, so that it is not asked for often.
        if hearing.short && hearing.held.len() < self.room.held / 2 {
            self.ask(now);
        }
        self.changed(space, fresh, removed);
    }

    fn on_beat(&mut self, now: Micros, facts: u32, at: (u32, u64), complete: bool, note: String) {
        let matched = matches!(self.matched, Match::Same(_));
        let behind = !self.hearing.whole || at > (self.hearing.epoch, self.hearing.seq);
        if facts > self.their_number || (matched && complete && behind) {
            self.ask(now);
        }
        if note != self.their_note {
            self.their_note.clone_from(&note);
            self.events.push_back(Event::Note(note));
        }
    }

    /// Asks for everything again, once until it comes or may be lost.
    fn ask(&mut self, now: Micros) {
        let pause = self.silence / BEATS;
        if self.hearing.asked.is_none_or(|asked| now.since(asked) >= pause) {
            self.hearing.asked = Some(now);
            self.due.resync = true;
            self.counts.resyncs += 1;
        }
    }

    fn changed(&mut self, space: Space, added: Vec<RowKey>, removed: Vec<RowKey>) {
        if !added.is_empty() || !removed.is_empty() {
            self.events.push_back(Event::Changed { space, added, removed });
        }
    }

    /// Looks again whether the facts are equal.
    fn compare(&mut self) {
        let matched = match (&self.ours, &self.theirs) {
            (Some(ours), Some(theirs)) => match differences(ours, theirs) {
                list if list.is_empty() => Match::Same(ours.space),
                list => Match::Differ(list),
            },
            _ => Match::Open,
        };
        if matched != self.matched {
            self.matched = matched;
            self.forget_keys();
            self.tell_anew();
        }
    }

    fn forget_keys(&mut self) {
        self.hearing.whole = false;
        self.hearing.building = None;
        if !self.hearing.held.is_empty() {
            self.hearing.held = HashMap::new();
            self.events.push_back(Event::Forgotten);
        }
    }

    fn forget_peer(&mut self) {
        self.forget_keys();
        self.theirs = None;
        self.their_number = 0;
        self.their_note.clear();
        self.matched = Match::Open;
        self.telling = Telling { epoch: self.telling.epoch, ..Telling::default() };
    }
}

#[cfg(test)]
#[path = "peer_tests.rs"]
mod tests;
