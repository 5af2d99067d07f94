//! Rails on virtual time: what decides a fetch, driven over cables that are slow, lossy and dead by turns.
//!
//! The fetching side is the shipped one ([`Pool`], [`Line`], [`Waits`]): it says real words and gets real answers, byte
//! for byte. Made up are the cables and the serving side, which answers as `serve.rs` promises: in order, with a word
//! every [`wire::BEAT`] while it reads, and nothing once its ticket is not good any more. Nothing here waits or sleeps;
//! whoever drives it moves the clock by [`TICK`].
//!
//! Looked at with every byte that lands, not afterwards: that its fetch still waits, that it comes over the rail which was
//! asked last, that its piece was not whole already, and that the node which sent it is not gone. With every tick: that
//! no rail has more in flight than its credit, that silence ends a connection, and a deadline its fetch.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use rand::Rng;
use rand::rngs::StdRng;

use super::line::{self, Line, SILENCE};
use super::pool::Pool;
use super::share::{CREDIT_SPAN, PIECES_FIRST};
use super::wait::Waits;
use super::wire::{self, ASK, Ask, HEAD, Head, Kind, Ticket, Want};
use super::{Metrics, Path};
use crate::base::block::{RowItem, RowKey, Space};
use crate::base::checksum::crc64;
use crate::base::clock::Micros;
use crate::base::frame::Outcome;
use crate::base::geometry::{Group, GroupKind, Hello};
use crate::base::rows::{AreaId, Rows};
use crate::base::shm::Mapping;

/// Time between two looks at the cables: half a sample of a rail's speed.
pub const TICK: Duration = Duration::from_millis(10);

/// A row of three pieces: the smallest of which one is neither first nor last.
pub const PIECE: usize = 4096;
pub const ROW: usize = 3 * PIECE;

/// Rails between two nodes.
pub const RAILS: usize = 2;

/// As `rail.rs` dials.
const CONNECT_WAIT: Duration = Duration::from_millis(1_200);
const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_LAST: Duration = Duration::from_secs(1);

/// Bytes that the serving side has handed to the network and that are not here.
const BUFFER: usize = 8 * PIECE;

/// How a cable is.
#[derive(Clone, Copy, Debug)]
pub struct Cable {
    /// Bytes per second.
    pub rate: u64,
    /// Whether anything passes: to the serving side, and from it. What waits is not lost; the network sends it again.
    pub passes: [bool; 2],
    /// Of a thousand payloads, so many arrive damaged; heads a tenth as often.
    pub damage: u32,
    /// Longest time of a read at the serving side, in ticks.
    pub reads: u32,
}

/// The serving node, as it is now.
pub trait There {
    fn generation(&self) -> u64;
    /// Whether the bearer of this ticket is let in, and stays in.
    fn admits(&self, ticket: &Ticket) -> bool;
    /// The position of a row that it holds.
    fn position(&self, key: &RowKey) -> Option<u32>;
}

/// The moment of a tick.
pub struct Scene<'a> {
    pub now: Micros,
    pub cables: [Cable; RAILS],
    pub there: &'a dyn There,
    /// Whether this node has a session with the life of the serving node that these rails lead to.
    pub alive: bool,
}

/// A fetch that is over.
#[derive(Debug)]
pub struct Ended {
    pub fetch: u64,
    pub outcomes: Vec<Outcome>,
}

/// The rails from one node to one life of another.
pub struct Rails {
    pub ticket: Ticket,
    /// Of the serving node.
    pub generation: u64,
    pool: Arc<Pool>,
    metrics: Metrics,
    patience: Duration,
    ends: [End; RAILS],
    waits: BTreeMap<u64, (Waits, Option<Micros>)>,
    /// When each row that it was told of will have been read by the serving side.
    reads: BTreeMap<(u64, RowKey), Micros>,
    /// Which connection was asked last for each piece, by its place in the line.
    asked: BTreeMap<u64, u64>,
    whole: BTreeSet<u64>,
    serial: u64,
}

/// This node's end of a rail.
enum End {
    /// Dials at this time.
    Waits {
        at: Micros,
        pause: Duration,
    },
    /// Has dialled, and knows at this time what became of it.
    Dials {
        until: Micros,
        pause: Duration,
    },
    Open(Box<Wire>),
}

/// An open connection with what is under way on it.
struct Wire {
    serial: u64,
    line: Line,
    /// Words, and when they arrive.
    words: VecDeque<(Micros, [u8; ASK])>,
    owed: VecDeque<Owed>,
    /// The serving side has ended it.
    ended: bool,
    beat: Micros,
    /// What is on its way here.
    coming: VecDeque<Parcel>,
    coming_bytes: usize,
    /// Bytes that the cable could have carried and has not.
    budget: u64,
    /// Pieces asked for and not answered: place in the line, and bytes that have not come.
    flying: VecDeque<(u64, usize)>,
    /// Last byte, or when something was asked for the first time since.
    heard: Micros,
    /// The fastest that its cable was.
    peak: u64,
}

struct Owed {
    ask: Ask,
    until: Option<Micros>,
    cancelled: bool,
}

/// What travels.
enum Parcel {
    Head([u8; HEAD]),
    Bytes {
        ask: Ask,
        bytes: Vec<u8>,
        got: usize,
    },
    /// The other side closed.
    End,
}

/// An engine's rows, in two groups of one layout.
pub fn area(space: Space, count: u32, row_bytes: usize) -> Arc<Rows> {
    let bytes = u32::try_from(row_bytes).expect("a small row");
    let (_, fd) = Mapping::anonymous("rows", row_bytes * count as usize).expect("memory");
    let group = || Group { kind: GroupKind::FullAttention, tokens_per_row: 16, covered: vec![(0, bytes)] };
    let hello = Hello::of_rows(count, bytes, vec![group(), group()]);
    assert_eq!(hello.check(), Ok(()));
    Rows::attach(AreaId(1), space, &hello, &fd).expect("memory")
}

/// What a row of this key holds: in each piece a word of its own, again and again.
pub fn content(key: &RowKey) -> Vec<u8> {
    let seed = key.hash.0.iter().fold(17_u64, |sum, &byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
    let piece =
        |n: u64| seed.wrapping_add(n).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes().repeat(PIECE / 8);
    [piece(0), piece(1), piece(2)].concat()
}

impl Rails {
    pub fn open(ticket: Ticket, generation: u64, patience: Duration, metrics: &Metrics, now: Micros) -> Self {
        let path = |n| Path { name: format!("rail{n}"), local: None, remote: String::new() };
        let pool = Arc::new(Pool::new((0..RAILS).map(path).collect(), PIECE, metrics));
        let end = || End::Waits { at: now, pause: PAUSE_FIRST };
        Self {
            ticket,
            generation,
            pool,
            metrics: metrics.clone(),
            patience,
            ends: [end(), end()],
            waits: BTreeMap::new(),
            reads: BTreeMap::new(),
            asked: BTreeMap::new(),
            whole: BTreeSet::new(),
            serial: 0,
        }
    }

    /// How a fetch stands, for whoever reads a failure.
    pub fn tell(&self, fetch: u64) -> String {
        let end = |end: &End| match end {
            End::Waits { at, .. } => format!("waits until {at:?}"),
            End::Dials { until, .. } => format!("dials until {until:?}"),
            End::Open(wire) => format!(
                "open, {} words, {} owed, {} coming, {:?} flying, heard {:?}",
                wire.words.len(),
                wire.owed.len(),
                wire.coming.len(),
                wire.flying,
                wire.heard
            ),
        };
        let ends: Vec<String> = self.ends.iter().map(end).collect();
        format!("fetch {fetch} of {:?}; {ends:?}; {:?}", self.waits.keys(), self.pool)
    }

    /// Begins a fetch; what became of it comes from [`Rails::tick`] or [`Rails::close`].
    pub fn fetch(&mut self, rows: &Arc<Rows>, items: &[RowItem], deadline: Option<Micros>) -> u64 {
        let waits = Waits::new(&self.pool, rows, items, deadline);
        let number = waits.number();
        self.waits.insert(number, (waits, deadline));
        number
    }

    /// Whoever waited went away. What became of its rows nobody learns.
    pub fn abandon(&mut self, fetch: u64) {
        self.waits.remove(&fetch);
    }

    /// The session that these rails came with is over.
    pub fn close(&mut self, now: Micros) -> Vec<Ended> {
        self.end_fetches(now, true)
    }

    /// One [`TICK`] has passed.
    pub fn tick(&mut self, scene: &Scene<'_>, dice: &mut StdRng) -> Vec<Ended> {
        for rail in 0..RAILS {
            self.drive(rail, scene, dice);
        }
        let ended = self.end_fetches(scene.now, false);
        let late = self.waits.values().find(|(_, deadline)| deadline.is_some_and(|d| scene.now >= d));
        assert!(late.is_none(), "a fetch goes on after its deadline");
        ended
    }

    fn end_fetches(&mut self, now: Micros, closed: bool) -> Vec<Ended> {
        let over = |(&fetch, (waits, _)): (&u64, &(Waits, _))| Some((fetch, waits.over(now, closed)?));
        let over: Vec<_> = self.waits.iter().filter_map(over).collect();
        let end = |(fetch, over)| {
            self.reads.retain(|(of, _), _| *of != fetch);
            self.waits.remove(&fetch).map(|(waits, _)| Ended { fetch, outcomes: waits.end(over) })
        };
        over.into_iter().filter_map(end).collect()
    }

    fn drive(&mut self, rail: usize, scene: &Scene<'_>, dice: &mut StdRng) {
        let (now, cable) = (scene.now, scene.cables[rail]);
        match self.ends[rail] {
            End::Waits { at, .. } if now < at => {}
            End::Waits { pause, .. } => {
                self.ends[rail] = End::Dials { until: now.plus(CONNECT_WAIT), pause };
            }
            End::Dials { until, pause } => {
                let reached = cable.passes == [true, true];
                if reached && scene.there.generation() == self.generation && scene.there.admits(&self.ticket)
                {
                    self.open_wire(rail, now);
                } else if reached || now >= until {
                    self.down(rail, now, pause);
                }
            }
            End::Open(_) => {
                if let Err(why) = self.converse(rail, scene, dice) {
                    tracing::trace!(why, rail, "a simulated rail went down");
                    self.down(rail, now, PAUSE_FIRST / 2);
                }
            }
        }
    }

    fn open_wire(&mut self, rail: usize, now: Micros) {
        self.serial += 1;
        self.pool.up(rail, now);
        let wire = Wire {
            serial: self.serial,
            line: Line::new(rail, &self.pool, &self.metrics, self.patience, now),
            words: VecDeque::new(),
            owed: VecDeque::new(),
            ended: false,
            beat: now,
            coming: VecDeque::new(),
            coming_bytes: 0,
            budget: 0,
            flying: VecDeque::new(),
            heard: now,
            peak: 0,
        };
        self.ends[rail] = End::Open(Box::new(wire));
    }

    fn down(&mut self, rail: usize, now: Micros, pause: Duration) {
        self.pool.down(rail, false);
        let pause = (pause * 2).min(PAUSE_LAST);
        self.ends[rail] = End::Waits { at: now.plus(pause), pause };
    }

    /// What happens on an open connection in a tick; the error says why it is over.
    fn converse(&mut self, rail: usize, scene: &Scene<'_>, dice: &mut StdRng) -> Result<(), &'static str> {
        let end = std::mem::replace(&mut self.ends[rail], End::Waits { at: scene.now, pause: PAUSE_FIRST });
        let End::Open(mut wire) = end else { unreachable!("only open ends converse") };
        let cable = scene.cables[rail];
        wire.peak = wire.peak.max(cable.rate);
        self.ask(&mut wire, scene.now);
        self.serve(&mut wire, &cable, scene, dice);
        let result = self.receive(&mut wire, &cable, scene);
        self.ask(&mut wire, scene.now);
        let allowed =
            (PIECES_FIRST * PIECE as u64).max(wire.peak * 2 * CREDIT_SPAN.as_millis() as u64 / 1000);
        let flying: usize = wire.flying.iter().map(|(_, left)| left).sum();
        assert!(
            flying <= allowed as usize + PIECE,
            "{flying} bytes in flight on a rail that never moved more than {} a second",
            wire.peak
        );
        let over = wire.line.is_over(scene.now);
        let silent = !wire.flying.is_empty() && scene.now.since(wire.heard) > SILENCE + TICK;
        assert!(over || result.is_err() || !silent, "a connection that is silent is kept");
        self.ends[rail] = End::Open(wire);
        result.and(if over { Err("it was silent") } else { Ok(()) })
    }

    fn ask(&mut self, wire: &mut Wire, now: Micros) {
        let Wire { serial, line, words, flying, heard, .. } = wire;
        line.ask(
            now,
            |_| false,
            |ask| {
                if ask.want == Want::Pull {
                    if flying.is_empty() {
                        *heard = now;
                    }
                    flying.push_back((ask.id, ask.length as usize));
                    self.asked.insert(ask.id, *serial);
                }
                words.push_back((now.plus(TICK), ask.encode()));
            },
        );
    }

    /// The serving side: takes words, and answers them in their order.
    fn serve(&mut self, wire: &mut Wire, cable: &Cable, scene: &Scene<'_>, dice: &mut StdRng) {
        let now = scene.now;
        if !wire.ended && (scene.there.generation() != self.generation || !scene.there.admits(&self.ticket)) {
            wire.ended = true;
            wire.coming.push_back(Parcel::End);
        }
        if wire.ended {
            return;
        }
        while let Some((_, word)) = wire.words.pop_front_if(|(at, _)| cable.passes[0] && *at <= now) {
            let ask = Ask::decode(&word).expect("a word reads back");
            if matches!(ask.want, Want::Ahead | Want::Pull) {
                let ready = now.plus(TICK * dice.random_range(0..=cable.reads));
                self.reads.entry((ask.fetch, ask.key)).or_insert(ready);
            }
            match ask.want {
                Want::Pull => {
                    let patience = Duration::from_millis(ask.patience_ms.into());
                    let until = (ask.patience_ms > 0).then(|| now.plus(patience));
                    if wire.owed.is_empty() {
                        wire.beat = now.plus(wire::BEAT);
                    }
                    wire.owed.push_back(Owed { ask, until, cancelled: false });
                }
                Want::Cancel => {
                    for owed in wire.owed.iter_mut().filter(|o| o.ask.fetch == ask.fetch) {
                        owed.cancelled |= ask.id == 0 || owed.ask.id == ask.id;
                    }
                }
                Want::Ahead | Want::Fill | Want::Sink | Want::Meet | Want::Read | Want::Taken => {}
            }
        }
        while wire.coming_bytes < BUFFER && self.answer(wire, cable, scene, dice) {}
    }

    /// Answers the word whose turn it is, when it can be.
    fn answer(&mut self, wire: &mut Wire, cable: &Cable, scene: &Scene<'_>, dice: &mut StdRng) -> bool {
        let now = scene.now;
        let Some(Owed { ask, until, cancelled }) = wire.owed.front() else { return false };
        let ask = *ask;
        let gone = *cancelled || until.is_some_and(|until| now >= until);
        let read = self.reads.get(&(ask.fetch, ask.key)).is_none_or(|ready| *ready <= now);
        let (head, payload) = match scene.there.position(&ask.key) {
            _ if gone => (Head::bare(Kind::Gone, &ask), Vec::new()),
            _ if !read && now < wire.beat => return false,
            _ if !read => (Head::bare(Kind::Wait, &ask), Vec::new()),
            None => (Head::bare(Kind::Missing, &ask), Vec::new()),
            Some(position) => {
                let (row, bare) = (content(&ask.key), Head::bare(Kind::Piece, &ask));
                let Ask { row_bytes, offset, length, .. } = ask;
                let (from, to) = (offset as usize, (offset + length) as usize);
                let head = Head { position, row_bytes, checksum: crc64(&[&row]), offset, length, ..bare };
                (head, row[from..to].to_vec())
            }
        };
        wire.beat = now.plus(wire::BEAT);
        if head.kind != Kind::Wait {
            wire.owed.pop_front();
        }
        let mut hurt = |per_mille: u32, bytes: &mut [u8]| {
            if !bytes.is_empty() && dice.random_range(0..10_000) < per_mille {
                let at = dice.random_range(0..bytes.len());
                bytes[at] ^= 1 << dice.random_range(0..8);
            }
        };
        let (waits, mut head, mut payload) = (head.kind == Kind::Wait, head.encode(), payload);
        hurt(cable.damage, &mut head);
        hurt(cable.damage * 10, &mut payload);
        wire.coming_bytes += HEAD + payload.len();
        wire.coming.push_back(Parcel::Head(head));
        if !payload.is_empty() {
            wire.coming.push_back(Parcel::Bytes { ask, bytes: payload, got: 0 });
        }
        !waits
    }

    /// This side: takes what the cable has carried.
    fn receive(&mut self, wire: &mut Wire, cable: &Cable, scene: &Scene<'_>) -> Result<(), &'static str> {
        let per_tick = cable.rate * TICK.as_millis() as u64 / 1000;
        wire.budget = if wire.coming.is_empty() { per_tick } else { wire.budget + per_tick };
        if !cable.passes[1] {
            wire.budget = 0;
            return Ok(());
        }
        loop {
            match wire.coming.front_mut() {
                None => return Ok(()),
                Some(Parcel::End) => return Err("the other side closed it"),
                Some(Parcel::Head(_)) if wire.budget < HEAD as u64 => return Ok(()),
                Some(Parcel::Head(head)) => {
                    wire.budget -= HEAD as u64;
                    wire.coming_bytes -= HEAD;
                    let head = Head::decode(head).map_err(|_| "a damaged head")?;
                    wire.coming.pop_front();
                    wire.heard = scene.now;
                    let to_read = wire.line.on_head(scene.now, &head, false);
                    assert!(to_read.expect("answers come in the order of the words").is_none());
                    if !matches!(head.kind, Kind::Piece | Kind::Wait) {
                        wire.flying.pop_front();
                    }
                }
                Some(Parcel::Bytes { .. }) if wire.budget == 0 => return Ok(()),
                Some(Parcel::Bytes { .. }) => self.land(wire, scene),
            }
        }
    }

    /// A portion of a payload arrives. The fetching side says where it belongs.
    fn land(&mut self, wire: &mut Wire, scene: &Scene<'_>) {
        let Some(Parcel::Bytes { ask, bytes, got }) = wire.coming.front_mut() else { return };
        let portion = (bytes.len() - *got).min(wire.budget as usize);
        let place = wire.line.place(|rest| rest[..portion].copy_from_slice(&bytes[*got..*got + portion]));
        if place.is_some() {
            assert!(self.waits.contains_key(&ask.fetch), "a piece lands in a row that was handed back");
            assert_eq!(
                self.asked.get(&ask.id),
                Some(&wire.serial),
                "a piece lands that another rail has taken over"
            );
            assert!(!self.whole.contains(&ask.id), "a piece lands twice");
            assert!(scene.alive, "a piece lands from a node that is gone");
        }
        *got += portion;
        let done = *got == bytes.len();
        if done && place.is_some() {
            self.whole.insert(ask.id);
        }
        wire.budget -= portion as u64;
        wire.coming_bytes -= portion;
        wire.heard = scene.now;
        if let Some((_, left)) = wire.flying.front_mut() {
            *left -= portion;
        }
        if done {
            wire.coming.pop_front();
            wire.flying.pop_front();
        }
        if let Some(row) = wire.line.on_bytes(scene.now, portion) {
            line::verify(&row, &self.metrics);
        }
    }
}
