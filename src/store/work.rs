//! The owner of the log and of everything in flight: one thread that takes an event, applies it, and starts what can
//! be started. Select, apply, advance; no lock but the two short ones of `Shared`, no wait but for the next event.
//!
//! Reads go before writes: an engine waits for a read, nobody waits for a write but the rows it holds. While a write
//! has waited for [`PATIENCE`], one goes with every [`READS_PER_WRITE`] reads all the same, so that loads without end
//! cannot keep rows in use for ever, and a backlog cannot hold up loads. Rows of a job are read and land in the order
//! of their positions.

mod forget;
mod moves;
mod peers;
mod room;
mod words;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, oneshot};

pub use self::moves::Fetched;
use self::moves::{Move, Moves};
use self::peers::{Peers, Summed, about};
pub use self::room::Given;
use self::room::Judge;
use super::disk::{Body, Buffer, Disk, Done, Files, Handle, Op, Verb};
use super::format::{
    Bad, Entry, PAGE, PAGE64, Record, Sequence, StoreId, padded, record_bytes, segment_name,
};
use super::hands::Hands;
use super::index::Place;
use super::log::{Log, Room, Step};
use super::marks::Marks;
use super::seal::{Closed, Seals, Use};
use super::verify::{Checked, Damage};
use super::worth::{self, Kind};
use super::{Error, Forgotten, Shared};
use crate::base::block::{GroupId, Rank, RowItem, RowKey, Space};
use crate::base::clock::{Clock, Micros, unix_seconds};
use crate::base::frame::Outcome;
use crate::base::landing::Landing;
use crate::base::mutant::{self, Mutant};
use crate::base::rows::{AreaId, Rows};

/// Age at which a write does not wait for all reads any more.
const PATIENCE: Duration = Duration::from_secs(1);

/// Reads that go between two such writes: the drive gives them at most a ninth of its time.
const READS_PER_WRITE: u32 = 8;

/// How often the clock is looked at while an attempt to write again is due. At other times the thread just waits.
const TICK: Duration = Duration::from_millis(500);

/// Rows that the drive may be handed for each of its slots while they are small: those that lie side by side go as one.
const PER_SLOT: usize = 8;

/// Events that are applied in one go, at most: what they make possible must not wait for long.
const EVENTS: usize = 32;

/// Answers wait until nothing else is to be done, so that whoever has one finds what follows from it done or begun; but
/// for so many rounds at most.
const ROUNDS: u32 = 16;

/// Bytes of rows that are summed ahead of the drive, and rows that may be whatever their size. Summing many large rows
/// at once keeps the processor from the one that the drive waits for: with rows of 17 MB, 32 of them ahead cost a
/// sixth of the write speed on two cores.
const AHEAD: usize = 32 << 20;
const AHEAD_FEWEST: usize = 4;

/// Rows of so many bytes are summed and verified by the loop itself: handing one to another thread and back takes as
/// long as the sum of 128 KiB.
const SMALL: usize = 256 << 10;

/// Why a read failed whose row was read and is not what was written.
const DAMAGED: &str = "damaged";

/// What callers ask for.
pub enum Request {
    Put {
        rows: Arc<Rows>,
        items: Vec<RowItem>,
        /// Whose rows they are.
        owner: Arc<str>,
        reply: oneshot::Sender<Vec<Outcome>>,
    },
    Get {
        rows: Arc<Rows>,
        items: Vec<RowItem>,
        deadline: Option<Micros>,
        reply: oneshot::Sender<Vec<Outcome>>,
    },
    Read {
        space: Space,
        key: RowKey,
        into: Box<dyn Landing>,
    },
    /// Reads a row back for nobody, when nothing else waits.
    Check {
        space: Space,
        key: RowKey,
        reply: oneshot::Sender<Checked>,
    },
}

/// What people say about rows of a space.
pub enum Mark {
    Pin(Vec<RowKey>),
    Unpin(Vec<RowKey>),
    Drop(Vec<RowKey>),
    Forget,
}

/// Answers with what was destroyed.
pub type ForgetAnswer = oneshot::Sender<Result<Forgotten, Error>>;

/// Answers a [`Mark`] with how many rows it concerned.
pub type Marked = oneshot::Sender<Result<u64, Error>>;

/// What can happen.
pub enum Event {
    Attach(Arc<Rows>, oneshot::Sender<Result<(), Error>>),
    Detach(AreaId, oneshot::Sender<()>),
    Request(Request, OwnedSemaphorePermit),
    /// A row was blanked, and summed or sealed.
    Prepared(u64, Write, Result<Closed, &'static str>),
    /// The drive is through with an operation.
    Done(Done),
    /// A row that was read has been looked at.
    Verified(Box<Verified>),
    /// A portion of a row for a peer has been looked at.
    Summed(Box<Summed>),
    /// A row that is to be moved has been looked at.
    Fetched(Box<Fetched>),
    /// Room was given back, or could not be.
    Given(Box<Given>),
    /// A file was made or removed.
    Stepped(Step, Result<(Option<Handle>, u64), String>),
    Mark(Space, Mark, Marked),
    /// What people said was written down, or could not be.
    Saved(Vec<(Marked, u64)>, Result<u64, String>),
    Pinned(oneshot::Sender<Vec<(Space, RowKey)>>),
    /// An owner's keys are to be destroyed.
    Forget(String, ForgetAnswer),
    /// Keys of these numbers are gone.
    Forgot(Vec<u32>, std::io::Result<()>, ForgetAnswer),
    /// Keys that no row needed are off the drive, or could not be taken off.
    Pruned(std::io::Result<()>),
    /// Seconds without use after which a row expires.
    Ttl(Option<u32>),
    Close(Option<oneshot::Sender<()>>),
}

/// Figures for people.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    pub capacity: u64,
    pub used: u64,
    pub segments: usize,
    pub sealed: usize,
    /// Segments whose rows a power cut may take: what tests hold it to.
    #[cfg(test)]
    pub unsealed: Vec<Sequence>,
    pub read_only: Option<String>,
    pub damaged: u64,
    pub stored: u64,
    pub held: u64,
    pub loaded: u64,
    pub served: u64,
    pub failed: u64,
    pub reclaimed: u64,
    pub released: u64,
    pub moved_bytes: u64,
    pub refused: u64,
    pub pinned: u64,
    pub pinned_bytes: u64,
    pub attached: HashSet<Space>,
}

/// Where an outcome belongs.
#[derive(Clone, Copy, Debug)]
struct Slot {
    job: u64,
    index: usize,
}

/// Items of one call.
struct Job {
    area: AreaId,
    outcomes: Vec<Outcome>,
    left: usize,
    reply: oneshot::Sender<Vec<Outcome>>,
    _permit: OwnedSemaphorePermit,
}

/// A row on its way to the drive.
pub struct Write {
    slot: Slot,
    rows: Arc<Rows>,
    row: u32,
    space: Space,
    key: RowKey,
    position: u32,
    owner: Arc<str>,
    since: Micros,
    /// It was here before, and went.
    back: bool,
}

impl Write {
    fn length(&self) -> u32 {
        u32::try_from(self.rows.row_bytes()).expect("a row is at most 1 GiB")
    }

    /// What is known of its record before its payload was summed or sealed.
    fn record(&self, store: StoreId, sequence: Sequence) -> Record {
        let &Self { space, key, position, .. } = self;
        Record { store, sequence, space, key, position, length: self.length(), checksum: 0, seal: None }
    }
}

/// For whom a row is read.
enum Reader {
    Row { slot: Slot, rows: Arc<Rows>, row: u32, deadline: Option<Micros> },
    Peer { into: Box<dyn Landing>, _permit: OwnedSemaphorePermit },
    Check { reply: oneshot::Sender<Checked>, _permit: OwnedSemaphorePermit },
}

/// A row on its way from the drive.
pub struct Read {
    reader: Reader,
    space: Space,
    key: RowKey,
    /// As the caller named it; a peer takes what there is.
    position: Option<u32>,
    /// What the drive is asked for, once it is: with a mutant not the row above.
    asked: Option<(RowKey, Place)>,
}

/// A row that was read, and whether it is the one that was asked for.
pub struct Verified {
    read: Read,
    body: Body,
    verdict: Result<Record, Bad>,
}

/// What an operation in flight is for.
enum Flight {
    Read(Read),
    /// Which row for a peer, and which portion of it.
    Portion(u64, usize),
    Write(Write, Sequence, Entry),
    Fetch(Move),
    Move(Move, Sequence, Entry),
    Step(Step),
}

struct Area {
    space: Space,
    /// Items whose outcome is open.
    busy: usize,
    detaching: Vec<oneshot::Sender<()>>,
}

/// What a [`Work`] is made of.
pub struct Parts {
    pub shared: Arc<Shared>,
    pub clock: Clock,
    pub events: mpsc::Sender<Event>,
    pub disk: Disk,
    pub files: Files,
    pub hands: Hands,
    pub depth: usize,
    pub store: StoreId,
    pub log: Log,
    pub handles: HashMap<Sequence, Handle>,
    pub marks: Marks,
    pub seals: Arc<Seals>,
    /// Keys under which the start has found no row.
    pub unused_keys: BTreeSet<u32>,
    /// Seconds of the wall at the clock's zero.
    pub epoch: u64,
}

pub struct Work {
    parts: Parts,
    areas: HashMap<AreaId, Area>,
    jobs: HashMap<u64, Job>,
    /// Rows to be read; rows to be summed; rows to be written.
    reads: VecDeque<Read>,
    /// Rows to be read back when nothing else is to be done.
    checks: VecDeque<Read>,
    writes: VecDeque<Write>,
    /// By ticket: the order in which they were offered, in which they also land.
    ready: BTreeMap<u64, (Write, Closed)>,
    /// Tickets of rows being summed.
    preparing: BTreeSet<u64>,
    /// With the hands: rows being summed, rows being verified, files being made or removed.
    with_hands: usize,
    /// Reads that were started since the last write, and writes in flight.
    reads_in_row: u32,
    writes_in_flight: usize,
    /// What rows are worth, and which of them are on the move.
    judge: Judge,
    moves: Moves,
    peers: Peers,
    flights: HashMap<u64, Flight>,
    /// Bytes that the drive was handed.
    bytes: usize,
    /// Keys between being offered and being whole or failed, with who else offered them meanwhile.
    pending: HashMap<(Space, RowKey), Vec<Slot>>,
    /// Whether the file of marks is being written, and who waits for its next version.
    saving: bool,
    unsaved: Vec<(Marked, u64)>,
    /// Keys that no row needs.
    unused_keys: BTreeSet<u32>,
    /// What calls ended with, not told yet, and for how many rounds.
    answers: Vec<(oneshot::Sender<Vec<Outcome>>, Vec<Outcome>)>,
    rounds: u32,
    next_job: u64,
    next_tag: u64,
    next_ticket: u64,
    closing: Option<Vec<oneshot::Sender<()>>>,
}

impl Work {
    pub fn new(mut parts: Parts) -> Self {
        let work = Self {
            unused_keys: std::mem::take(&mut parts.unused_keys),
            parts,
            areas: HashMap::new(),
            jobs: HashMap::new(),
            reads: VecDeque::new(),
            checks: VecDeque::new(),
            writes: VecDeque::new(),
            ready: BTreeMap::new(),
            preparing: BTreeSet::new(),
            with_hands: 0,
            reads_in_row: 0,
            writes_in_flight: 0,
            judge: Judge::default(),
            moves: Moves::default(),
            peers: Peers::default(),
            flights: HashMap::new(),
            bytes: 0,
            pending: HashMap::new(),
            saving: false,
            unsaved: Vec::new(),
            answers: Vec::new(),
            rounds: 0,
            next_job: 0,
            next_tag: 0,
            next_ticket: 0,
            closing: None,
        };
        work.publish();
        work
    }

    /// Until closed and nothing is in flight.
    pub fn run(mut self, events: &mpsc::Receiver<Event>) {
        while !self.is_over() {
            if let Some(event) = self.next(events) {
                self.apply(event);
                // What has come meanwhile goes along: starting things and telling figures cost once for all of it.
                events.try_iter().take(EVENTS).for_each(|event| self.apply(event));
            }
            self.advance();
            self.publish();
        }
        self.answer();
        self.end();
    }

    fn next(&mut self, events: &mpsc::Receiver<Event>) -> Option<Event> {
        self.rounds += 1;
        if self.rounds < ROUNDS
            && let Ok(event) = events.try_recv()
        {
            return Some(event);
        }
        self.answer();
        match self.parts.log.retry_at() {
            Some(_) => events.recv_timeout(TICK).ok(),
            None => events.recv().ok(),
        }
    }

    fn answer(&mut self) {
        self.rounds = 0;
        for (reply, outcomes) in self.answers.drain(..) {
            let _ = reply.send(outcomes);
        }
    }

    fn is_over(&self) -> bool {
        self.closing.is_some() && self.flights.is_empty() && self.with_hands == 0
    }

    /// Makes the open segment durable, gives the folder free, and only then says that it is closed.
    fn end(self) {
        let Self { parts, closing, .. } = self;
        let Parts { disk, files, hands, log, handles, .. } = parts;
        for handle in log.unsealed().filter_map(|sequence| handles.get(&sequence)) {
            if let Err(error) = files.sync_file(handle) {
                tracing::warn!(%error, "failed to make the last rows durable");
            }
        }
        drop((disk, hands, handles));
        files.release();
        drop(files);
        for answer in closing.into_iter().flatten() {
            let _ = answer.send(());
        }
    }

    fn apply(&mut self, event: Event) {
        match event {
            Event::Attach(rows, answer) => drop(answer.send(self.attach(&rows))),
            Event::Detach(area, answer) => self.detach(area, answer),
            Event::Request(request, permit) => self.request(request, permit),
            Event::Prepared(ticket, write, closed) => {
                self.with_hands -= 1;
                self.preparing.remove(&ticket);
                match closed {
                    Ok(closed) => drop(self.ready.insert(ticket, (write, closed))),
                    Err(reason) => self.write_failed(&write, reason),
                }
            }
            Event::Done(done) => self.done(done),
            Event::Verified(verified) => {
                self.with_hands -= 1;
                self.verified(*verified);
            }
            Event::Summed(summed) => {
                self.with_hands -= 1;
                self.summed(*summed);
            }
            Event::Fetched(fetched) => {
                self.with_hands -= 1;
                self.fetched(*fetched);
            }
            Event::Given(given) => {
                self.with_hands -= 1;
                self.given(*given);
            }
            Event::Stepped(step, result) => {
                self.with_hands -= 1;
                self.file_step_ended(&step, result);
            }
            Event::Mark(space, mark, answer) => self.mark(space, mark, answer),
            Event::Saved(answers, result) => {
                self.with_hands -= 1;
                self.saving = false;
                self.saved(answers, &result);
            }
            Event::Ttl(ttl) => self.judge.set_ttl(ttl),
            Event::Pinned(answer) => drop(answer.send(self.parts.marks.pins().collect())),
            Event::Forget(owner, answer) => self.forget_owner(owner, answer),
            Event::Forgot(keys, outcome, answer) => {
                self.with_hands -= 1;
                self.forgot(&keys, outcome, answer);
            }
            Event::Pruned(outcome) => {
                self.with_hands -= 1;
                if let Err(error) = outcome {
                    tracing::warn!(%error, "failed to remove keys that no row needs; tried again with the next ones");
                }
            }
            Event::Close(answer) => {
                self.closing.get_or_insert_default().extend(answer);
                self.drop_queued(None);
            }
        }
    }

    fn attach(&mut self, rows: &Rows) -> Result<(), Error> {
        if self.closing.is_some() {
            return Err(Error::Closed);
        }
        let row = rows.row_bytes();
        if !u32::try_from(row).is_ok_and(|length| self.parts.log.can_ever_take(length)) {
            return Err(Error::RowTooLarge { row, segment: self.parts.log.segment_bytes() });
        }
        let area = || Area { space: rows.space, busy: 0, detaching: Vec::new() };
        self.areas.entry(rows.id).or_insert_with(area);
        let kind = |&(tokens, state): &(u32, bool)| Kind { tokens, state };
        self.judge.kinds.insert(rows.space, rows.kinds().iter().map(kind).collect());
        self.judge.changed();
        self.prune_keys();
        let seals = self.parts.seals.clone();
        if seals.encrypts() {
            self.parts.hands.give(move || seals.warm(row));
        }
        Ok(())
    }

    fn detach(&mut self, id: AreaId, answer: oneshot::Sender<()>) {
        let Some(area) = self.areas.get_mut(&id) else {
            let _ = answer.send(());
            return;
        };
        area.detaching.push(answer);
        self.drop_queued(Some(id));
        self.settle_area(id);
    }

    /// Lets an area go once nothing of it is open.
    fn settle_area(&mut self, id: AreaId) {
        if self.areas.get(&id).is_some_and(|area| area.busy == 0 && !area.detaching.is_empty()) {
            let area = self.areas.remove(&id).expect("looked at just now");
            self.judge.changed();
            self.prune_keys();
            for answer in area.detaching {
                let _ = answer.send(());
            }
        }
    }

    /// Fails what has not been started, of one area or of everybody.
    fn drop_queued(&mut self, only: Option<AreaId>) {
        let reason = if only.is_some() { "detached" } else { "closed" };
        let concerns = |rows: &Rows| only.is_none_or(|id| id == rows.id);
        if only.is_none() {
            // Whoever waits sees that the answer's sender is gone.
            self.checks.clear();
        }
        for read in std::mem::take(&mut self.reads) {
            let concerned = match &read.reader {
                Reader::Row { rows, .. } => concerns(rows),
                Reader::Peer { .. } | Reader::Check { .. } => only.is_none(),
            };
            if concerned {
                self.read_failed(read, reason);
            } else {
                self.reads.push_back(read);
            }
        }
        for write in std::mem::take(&mut self.writes) {
            if concerns(&write.rows) {
                self.write_failed(&write, reason);
            } else {
                self.writes.push_back(write);
            }
        }
        for (ticket, (write, sum)) in std::mem::take(&mut self.ready) {
            if concerns(&write.rows) {
                self.write_failed(&write, reason);
            } else {
                self.ready.insert(ticket, (write, sum));
            }
        }
        if only.is_none() {
            self.drop_moves();
        }
    }

    fn request(&mut self, request: Request, permit: OwnedSemaphorePermit) {
        match request {
            Request::Put { rows, items, owner, reply } => {
                let job = self.begin_job(&rows, items.len(), reply, permit);
                let ordered = in_order(&items);
                let refuses = self.refuses(&rows, &ordered);
                for (index, item) in ordered {
                    self.offer(Slot { job, index }, &rows, &item, &items, &owner, refuses);
                }
                self.finish_job_if_done(job);
            }
            Request::Get { rows, items, deadline, reply } => {
                let job = self.begin_job(&rows, items.len(), reply, permit);
                for (index, item) in in_order(&items) {
                    self.ask(Slot { job, index }, &rows, &item, deadline);
                }
                self.finish_job_if_done(job);
            }
            Request::Read { space, key, into } => {
                let reader = Reader::Peer { into, _permit: permit };
                let read = Read { reader, space, key, position: None, asked: None };
                if self.closing.is_some() {
                    self.read_failed(read, "closed");
                } else {
                    self.reads.push_back(read);
                }
            }
            Request::Check { space, key, reply } => {
                let reader = Reader::Check { reply, _permit: permit };
                if self.closing.is_none() {
                    self.checks.push_back(Read { reader, space, key, position: None, asked: None });
                }
            }
        }
    }

    fn begin_job(
        &mut self,
        rows: &Rows,
        left: usize,
        reply: oneshot::Sender<Vec<Outcome>>,
        permit: OwnedSemaphorePermit,
    ) -> u64 {
        self.next_job += 1;
        let job = Job { area: rows.id, outcomes: vec![Outcome::Failed; left], left, reply, _permit: permit };
        self.jobs.insert(self.next_job, job);
        if let Some(area) = self.areas.get_mut(&rows.id) {
            area.busy += left;
        }
        self.next_job
    }

    /// Whether rows of this area may be touched, and this row exists.
    fn may_touch(&self, rows: &Rows, item: &RowItem) -> Result<(), &'static str> {
        if self.closing.is_some() {
            return Err("closed");
        }
        let attached = self.areas.get(&rows.id).is_some_and(|area| area.detaching.is_empty());
        match (attached, rows.has(item.row, item.key.group.0)) {
            (false, _) => Err("detached"),
            (true, false) => Err("no_such_row"),
            (true, true) => Ok(()),
        }
    }

    /// A row is offered.
    fn offer(
        &mut self,
        slot: Slot,
        rows: &Arc<Rows>,
        item: &RowItem,
        items: &[RowItem],
        owner: &Arc<str>,
        refuses: bool,
    ) {
        if let Err(reason) = self.may_touch(rows, item) {
            return self.fail(slot, reason);
        }
        let (mut space, mut key) = (rows.space, item.key);
        if mutant::on(Mutant::ShiftByOne) {
            key.hash = items[(slot.index + 1) % items.len()].key.hash;
        }
        if mutant::on(Mutant::WrongRank) {
            space.rank = Rank { index: space.rank.index + 1, of: space.rank.of + 1 };
        }
        if mutant::on(Mutant::WrongGroup) {
            key.group = GroupId(key.group.0 + 1);
        }
        let now = self.seconds();
        let held =
            self.parts.shared.index.lock().heat_mut(&space, &key).map(|heat| heat.last = heat.last.max(now));
        if held.is_some() {
            return self.resolve(slot, Outcome::Held);
        }
        if let Some(others) = self.pending.get_mut(&(space, key)) {
            others.push(slot);
            return;
        }
        if self.parts.log.stopped().is_some() {
            return self.fail(slot, "read_only");
        }
        if self.parts.shared.wear.lock().spent_until(unix_seconds()).is_some() {
            return self.fail(slot, "write_budget");
        }
        if refuses {
            return self.refuse(slot, &space, &key);
        }
        let back = self.judge.ghosts.take(&space, &key);
        self.pending.insert((space, key), Vec::new());
        let since = self.parts.clock.now();
        let write = Write {
            slot,
            rows: rows.clone(),
            row: item.row,
            space,
            key,
            position: item.position,
            owner: owner.clone(),
            since,
            back,
        };
        self.writes.push_back(write);
    }

    /// A row is asked for.
    fn ask(&mut self, slot: Slot, rows: &Arc<Rows>, item: &RowItem, deadline: Option<Micros>) {
        if let Err(reason) = self.may_touch(rows, item) {
            return self.fail(slot, reason);
        }
        if self.parts.shared.index.lock().get(&rows.space, &item.key).is_none() {
            return self.fail(slot, "not_held");
        }
        let reader = Reader::Row { slot, rows: rows.clone(), row: item.row, deadline };
        let (space, position) = (rows.space, Some(item.position));
        self.reads.push_back(Read { reader, space, key: item.key, position, asked: None });
    }

    /// Starts what can be started.
    fn advance(&mut self) {
        self.advance_log();
        loop {
            self.prepare_writes();
            while self.has_slot(self.flights.len()) && self.start_one() {}
            if !self.advance_log() {
                return;
            }
        }
    }

    /// Whether the drive, which has `taken` operations, is given another one.
    fn has_slot(&self, taken: usize) -> bool {
        taken < self.parts.depth || (self.bytes < AHEAD && taken < self.parts.depth * PER_SLOT)
    }

    /// False when there is nothing that can be started.
    fn start_one(&mut self) -> bool {
        let now = self.parts.clock.now();
        let waits = self.ready.first_key_value();
        let aged = waits.is_some_and(|(_, (write, _))| now.since(write.since) > PATIENCE);
        if aged && self.reads_in_row >= READS_PER_WRITE && self.start_writing() {
            return true;
        }
        if let Some(read) = self.reads.pop_front() {
            self.reads_in_row = self.reads_in_row.saturating_add(1);
            self.start_read(read);
            return true;
        }
        if self.start_writing() {
            return true;
        }
        let Some(check) = self.checks.pop_front() else { return false };
        self.start_read(check);
        true
    }

    /// Starts something of the second class: rows on the move first, because new ones may wait for their room. Half of
    /// the drive's slots stay free for reads that come meanwhile.
    fn start_writing(&mut self) -> bool {
        if !self.has_slot(2 * self.writes_in_flight) {
            return false;
        }
        let started = self.start_move() || self.start_next_write();
        if started {
            self.reads_in_row = 0;
        }
        started
    }

    /// The next write is the one with the lowest ticket, also of those still being summed.
    fn start_next_write(&mut self) -> bool {
        let Some((&ticket, _)) = self.ready.first_key_value() else { return false };
        if self.preparing.first().is_some_and(|&earlier| earlier < ticket) {
            return false;
        }
        let (write, closed) = self.ready.remove(&ticket).expect("looked at just now");
        self.start_write(ticket, write, closed)
    }

    /// Rows that are vouched for, or soon will be, and not written.
    fn unwritten(&self) -> usize {
        self.preparing.len() + self.ready.len() + self.writes_in_flight
    }

    /// Keeps as many rows summed as the drive can take, and no more: they are summed late so that they fail early.
    fn prepare_writes(&mut self) {
        while let Some(next) = self.writes.front()
            && self.preparing.len() + self.ready.len()
                < (PER_SLOT * self.parts.depth).min((AHEAD / next.rows.row_bytes()).max(AHEAD_FEWEST))
            && self.parts.seals.may_close(self.unwritten(), next.rows.row_bytes())
        {
            let write = self.writes.pop_front().expect("looked at just now");
            self.with_hands += 1;
            self.next_ticket += 1;
            let ticket = self.next_ticket;
            self.preparing.insert(ticket);
            let (seals, store) = (self.parts.seals.clone(), self.parts.store);
            // The first row under a key waits for that key.
            let is_small = write.rows.row_bytes() <= SMALL && !seals.encrypts();
            let prepare = move || {
                if !mutant::on(Mutant::KeepForeignBytes) {
                    let group = GroupId(write.key.group.0 - u32::from(mutant::on(Mutant::WrongGroup)));
                    write.rows.blank_uncovered(write.row, group.0);
                }
                let record = write.record(store, Sequence(0));
                let closed = seals.close(&write.rows, write.row, &write.owner, &record);
                Event::Prepared(ticket, write, closed)
            };
            self.sum(is_small, prepare);
        }
    }

    /// False when it has to wait for room.
    fn start_write(&mut self, ticket: u64, write: Write, closed: Closed) -> bool {
        let length = write.length();
        let (sequence, page) = match self.parts.log.place(length) {
            Room::At { sequence, page } => (sequence, page),
            Room::Wait => {
                self.ready.insert(ticket, (write, closed));
                return false;
            }
            Room::Never => {
                self.write_failed(&write, "too_large");
                return true;
            }
            Room::Stopped => {
                self.write_failed(&write, "read_only");
                return true;
            }
        };
        let record = closed.record(write.record(self.parts.store, sequence));
        let entry = record.entry(page);
        let dropped = if mutant::on(Mutant::DropPage) { PAGE } else { 0 };
        let body = closed.body(&write.rows, write.row, dropped);
        let offset = u64::from(page) * PAGE64;
        let head = Buffer::of(&record.encode());
        self.writes_in_flight += 1;
        self.submit(Verb::Write, sequence, offset, head, body, Flight::Write(write, sequence, entry));
        true
    }

    fn start_read(&mut self, mut read: Read) {
        let late = |d: Micros| self.parts.clock.now() > d;
        if matches!(read.reader, Reader::Row { deadline: Some(d), .. } if late(d)) {
            return self.read_failed(read, "deadline");
        }
        let given_up = match &read.reader {
            Reader::Row { slot, .. } => self.jobs.get(&slot.job).is_some_and(|job| job.reply.is_closed()),
            Reader::Peer { into, .. } => !into.is_wanted(),
            Reader::Check { reply, .. } => reply.is_closed(),
        };
        if given_up {
            return self.read_failed(read, "given_up");
        }
        let (place, before) = {
            let index = self.parts.shared.index.lock();
            let place = index.get(&read.space, &read.key);
            let stale = place.filter(|_| mutant::on(Mutant::StaleRow));
            (place, stale.and_then(|place| index.before(&read.space, &place)))
        };
        let Some(place) = place else {
            return self.read_failed(read, "not_held");
        };
        if read.position.is_some_and(|position| position != place.position) {
            return self.read_failed(read, "position");
        }
        let (key, place) = before.unwrap_or((read.key, place));
        let body = match &read.reader {
            Reader::Row { rows, .. } if rows.row_bytes() != place.length as usize => {
                return self.read_failed(read, "length");
            }
            Reader::Row { rows, row, .. } => {
                Body::Row { rows: rows.clone(), row: *row, len: rows.row_bytes() }
            }
            Reader::Peer { into, .. } if into.length().is_some_and(|length| length != place.length) => {
                return self.read_failed(read, "length");
            }
            Reader::Peer { .. } if Self::is_in_portions(&read, &place) => {
                read.asked = Some((key, place));
                return self.start_portions(read, place);
            }
            Reader::Peer { into, .. } => Body::Own(into.buffer(whole_pages(&place))),
            Reader::Check { .. } => Body::Own(Buffer::zeroed(whole_pages(&place))),
        };
        read.asked = Some((key, place));
        self.parts.log.reading(place.sequence);
        let head = Buffer::zeroed(PAGE);
        self.submit(Verb::Read, place.sequence, place.offset(), head, body, Flight::Read(read));
    }

    fn submit(
        &mut self,
        verb: Verb,
        sequence: Sequence,
        offset: u64,
        head: Buffer,
        body: Body,
        flight: Flight,
    ) {
        self.next_tag += 1;
        let tag = self.next_tag;
        self.flights.insert(tag, flight);
        self.bytes += head.len() + body.len();
        let file = self.parts.handles.get(&sequence).expect("each segment of the log is open").clone();
        self.parts.disk.submit(Op { tag, verb, file, offset, head, body });
    }

    /// The drive is through with an operation.
    fn done(&mut self, done: Done) {
        let Done { op, result } = done;
        self.bytes -= op.len();
        let flight = self.flights.remove(&op.tag).expect("each operation ends once");
        match flight {
            Flight::Write(write, sequence, entry) => {
                self.parts.seals.give_back_body(op.body);
                self.writes_in_flight -= 1;
                self.wrote(&write, sequence, entry, result);
            }
            Flight::Read(read) => self.have_read(read, op, result),
            Flight::Portion(row, number) => self.have_portion(row, number, op, result),
            Flight::Fetch(row) => self.have_fetched(row, op, result),
            Flight::Move(row, sequence, entry) => {
                drop(op);
                self.writes_in_flight -= 1;
                self.moved(row, sequence, entry, result);
            }
            Flight::Step(step) => {
                drop(op);
                self.step_ended(&step, result.map(|()| 0).map_err(|e| say(&step, &e)));
            }
        }
    }

    fn wrote(&mut self, write: &Write, sequence: Sequence, entry: Entry, result: std::io::Result<()>) {
        if let Err(error) = result {
            let reason = format!("failed to write a row: {error}");
            tracing::error!(%error, "failed to write a row; no rows are taken for now");
            self.parts.log.failed(sequence, reason, self.parts.clock.now());
            self.write_failed(write, "io");
            self.fail_writes();
            return;
        }
        if !self.parts.seals.has(entry.seal) {
            // Its key was destroyed meanwhile.
            self.parts.log.unwritten(sequence);
            return self.write_failed(write, "forgotten");
        }
        self.parts.log.written(sequence, entry);
        let heat = worth::born(self.seconds(), write.back);
        self.parts.shared.index.lock().add_with(write.space, write.key, Place::of(sequence, &entry), heat);
        self.parts.shared.metrics.written_bytes.inc_by(entry.length.into());
        self.parts.shared.wear.lock().wrote(record_bytes(entry.length), unix_seconds());
        self.resolve(write.slot, Outcome::Stored);
        for other in self.pending.remove(&(write.space, write.key)).unwrap_or_default() {
            self.resolve(other, Outcome::Held);
        }
    }

    /// The drive does not write: nobody waits for it.
    fn fail_writes(&mut self) {
        for write in std::mem::take(&mut self.writes) {
            self.write_failed(&write, "read_only");
        }
        for (_, (write, _)) in std::mem::take(&mut self.ready) {
            self.write_failed(&write, "read_only");
        }
        self.drop_moves();
    }

    fn have_read(&mut self, read: Read, op: Op, result: std::io::Result<()>) {
        let (key, place) = read.asked.expect("set when the read began");
        self.parts.log.read(place.sequence);
        if let Err(error) = result {
            tracing::warn!(%error, "failed to read a row; it is dropped");
            return self.damaged(read, "io", &error.to_string());
        }
        let Op { head, mut body, .. } = op;
        let (store, space) = (self.parts.store, read.space);
        let seals = self.parts.seals.clone();
        let what = if matches!(read.reader, Reader::Peer { .. }) { Use::Send } else { Use::Open };
        self.with_hands += 1;
        self.sum(body.len() <= SMALL && place.seal == 0, move || {
            let verdict = Record::decode(&head, store, place.sequence)
                .and_then(|record| verify(record, &space, &key, &place))
                .and_then(|record| seals.check(record, &mut body, what));
            Event::Verified(Box::new(Verified { read, body, verdict }))
        });
    }

    /// Sums a row, here when it is small.
    fn sum(&mut self, is_small: bool, sum: impl FnOnce() -> Event + Send + 'static) {
        if is_small {
            return self.apply(sum());
        }
        let events = self.parts.events.clone();
        self.parts.hands.give(move || {
            let _ = events.send(sum());
        });
    }

    fn verified(&mut self, verified: Verified) {
        let Verified { read, body, verdict } = verified;
        let record = match verdict {
            Ok(record) => record,
            Err(bad) => return self.bad(read, &bad),
        };
        if !matches!(read.reader, Reader::Check { .. }) {
            self.count_read(&read, &record);
        }
        match (read.reader, body) {
            (Reader::Row { slot, .. }, body) => {
                drop(body);
                self.resolve(slot, Outcome::FromDrive);
            }
            (Reader::Peer { mut into, .. }, Body::Own(mut payload)) => {
                payload.truncate(record.length as usize);
                self.count_served();
                into.begin(about(&record));
                into.add(bytes::Bytes::from_owner(payload));
            }
            (Reader::Peer { .. }, _) => unreachable!("a peer's row is read into own memory"),
            (Reader::Check { reply, .. }, _) => {
                let _ = reply.send(Checked::Whole { bytes: record.length.into() });
            }
        }
    }

    /// A row was read, for somebody who wanted it.
    fn count_read(&self, read: &Read, record: &Record) {
        self.parts.shared.metrics.read_bytes.inc_by(record.length.into());
        self.parts.shared.wear.lock().read(record.length.into(), unix_seconds());
        let now = self.seconds();
        if let Some(heat) = self.parts.shared.index.lock().heat_mut(&read.space, &read.key) {
            heat.last = heat.last.max(now);
        }
    }

    /// A row that was read is not the one that was asked for, or not to be used.
    fn bad(&mut self, read: Read, bad: &Bad) {
        match bad {
            Bad::Released => {
                // It was released by an earlier process, on a file system that does not tell its holes.
                let (key, place) = read.asked.expect("set when the read began");
                self.parts.shared.index.lock().remove(&read.space, &key, &place);
                self.read_failed(read, "not_held");
            }
            Bad::NoKey => self.unkeyed(read),
            bad => {
                tracing::warn!(%bad, key = ?read.key, "a row is not what was written; it is dropped");
                self.damaged(read, DAMAGED, &bad.to_string());
            }
        }
    }

    /// A row that was held is not to be had: counted, and not offered again.
    fn damaged(&mut self, read: Read, reason: &'static str, why: &str) {
        let (key, place) = read.asked.expect("set when the read began");
        let damage = Damage::of(&read.space, &key, &place, why);
        // Two reads of one row find the same damage.
        if self.parts.shared.index.lock().remove(&read.space, &key, &place) {
            self.parts.shared.metrics.damaged.inc();
            self.parts.shared.facts.lock().damaged += 1;
            self.parts.shared.damages.lock().add(damage.clone());
            // What the drive only refused to read may be there the next time.
            if reason == DAMAGED {
                self.dropped(&[place]);
            }
        }
        if let Reader::Check { reply, .. } = read.reader {
            let _ = reply.send(Checked::Damaged(damage));
            return;
        }
        self.read_failed(read, reason);
    }

    fn read_failed(&mut self, read: Read, reason: &'static str) {
        match read.reader {
            Reader::Row { slot, .. } => self.fail(slot, reason),
            Reader::Peer { into, .. } => {
                self.count_failure(reason);
                // Whoever waits sees that it ends before it is whole.
                drop(into);
            }
            Reader::Check { reply, .. } => {
                let _ = reply.send(Checked::Gone);
            }
        }
    }

    fn write_failed(&mut self, write: &Write, reason: &'static str) {
        self.fail(write.slot, reason);
        for other in self.pending.remove(&(write.space, write.key)).unwrap_or_default() {
            self.fail(other, reason);
        }
    }

    fn fail(&mut self, slot: Slot, reason: &'static str) {
        self.count_failure(reason);
        self.resolve(slot, Outcome::Failed);
    }

    fn count_failure(&self, reason: &'static str) {
        self.parts.shared.metrics.failed.with_label_values(&[reason]).inc();
        self.parts.shared.facts.lock().failed += 1;
    }

    /// Nothing touches the item's row any more.
    fn resolve(&mut self, slot: Slot, outcome: Outcome) {
        let metrics = &self.parts.shared.metrics;
        {
            let mut facts = self.parts.shared.facts.lock();
            match outcome {
                Outcome::Stored => (facts.stored, _) = (facts.stored + 1, metrics.stored.inc()),
                Outcome::Held => (facts.held, _) = (facts.held + 1, metrics.held.inc()),
                Outcome::FromDrive => (facts.loaded, _) = (facts.loaded + 1, metrics.loaded.inc()),
                Outcome::Failed | Outcome::FromPeer => {}
            }
        }
        self.settle(slot, outcome);
    }

    fn settle(&mut self, slot: Slot, outcome: Outcome) {
        let job = self.jobs.get_mut(&slot.job).expect("a job stays until all of its items have an outcome");
        job.outcomes[slot.index] = outcome;
        job.left -= 1;
        let (area, left) = (job.area, job.left);
        if let Some(area) = self.areas.get_mut(&area) {
            area.busy = area.busy.saturating_sub(1);
        }
        if left == 0 {
            self.finish_job_if_done(slot.job);
        }
        self.settle_area(area);
    }

    fn finish_job_if_done(&mut self, number: u64) {
        if self.jobs.get(&number).is_some_and(|job| job.left == 0) {
            let job = self.jobs.remove(&number).expect("looked at just now");
            self.answers.push((job.reply, job.outcomes));
        }
    }

    /// Does what the log wants done. Says whether there was anything.
    fn advance_log(&mut self) -> bool {
        let mut any = false;
        self.vacate();
        while self.closing.is_none()
            && let Some(step) = self.parts.log.step(self.parts.clock.now())
        {
            self.begin_step(step);
            any = true;
        }
        if self.parts.log.stopped().is_some() {
            self.fail_writes();
        }
        any
    }

    fn begin_step(&mut self, step: Step) {
        let none = || Buffer::zeroed(0);
        match step.clone() {
            Step::Sync(sequence) => {
                self.submit(Verb::Sync, sequence, 0, none(), Body::None, Flight::Step(step));
            }
            Step::Foot { sequence, offset, bytes } => {
                self.submit(
                    Verb::Write,
                    sequence,
                    offset,
                    Buffer::of(&bytes),
                    Body::None,
                    Flight::Step(step),
                );
            }
            Step::Release { bytes } => self.release(step, bytes),
            Step::Choose { room } => self.choose(room),
            Step::Remove(sequence) => {
                self.judge.gone(sequence);
                // The last descriptor goes before the name: then the room is free when the removal has ended.
                self.parts.handles.remove(&sequence);
                self.file_step(step, move |files| {
                    // Durable before a new segment takes its room: after a power cut both would be there, and a start
                    // could not tell which of them was meant to go.
                    files.remove(&segment_name(sequence))?;
                    files.sync()?;
                    Ok((None, 0))
                });
            }
            Step::Create(head) => self.file_step(step, move |files| {
                let (handle, taken) =
                    files.create(&segment_name(head.sequence), head.size, &head.encode())?;
                Ok((Some(handle), taken))
            }),
        }
    }

    fn file_step(
        &mut self,
        step: Step,
        act: impl FnOnce(&Files) -> std::io::Result<(Option<Handle>, u64)> + Send + 'static,
    ) {
        self.with_hands += 1;
        let (files, events) = (self.parts.files.clone(), self.parts.events.clone());
        self.parts.hands.give(move || {
            let result = act(&files).map_err(|e| say(&step, &e));
            drop(files);
            let _ = events.send(Event::Stepped(step, result));
        });
    }

    fn file_step_ended(&mut self, step: &Step, result: Result<(Option<Handle>, u64), String>) {
        let result = result.map(|(handle, taken)| {
            if let (Step::Create(head), Some(handle)) = (step, handle) {
                self.parts.handles.insert(head.sequence, handle);
            }
            taken
        });
        self.step_ended(step, result);
    }

    fn step_ended(&mut self, step: &Step, result: Result<u64, String>) {
        let reason = result.as_ref().err().cloned();
        if let (Step::Foot { sequence, offset, .. }, Ok(_)) = (step, &result) {
            self.footed(*sequence, *offset);
        }
        let next = self.parts.log.stepped(step, result, self.parts.clock.now());
        if let Some(reason) = reason {
            match self.parts.log.stopped() {
                Some(_) => tracing::error!(%reason, "no rows are taken for now; serving goes on"),
                None => tracing::warn!(%reason, "tried again when the open segment is full"),
            }
        }
        if let Step::Sync(sequence) = step
            && self.parts.log.is_sealed(*sequence)
            && self.parts.shared.index.lock().count_of(*sequence) == 0
        {
            self.parts.log.vacate(*sequence, None);
        }
        if let Some(next) = next {
            self.begin_step(next);
        }
    }

    /// Figures for those who look from outside.
    fn publish(&self) {
        let log = &self.parts.log;
        let metrics = &self.parts.shared.metrics;
        let rows = self.parts.shared.index.lock().rows();
        let mut facts = self.parts.shared.facts.lock();
        metrics.reclaimed.inc_by(log.reclaimed() - facts.reclaimed);
        facts.capacity = log.capacity();
        facts.used = log.used();
        facts.segments = log.segments();
        facts.sealed = log.sealed();
        #[cfg(test)]
        facts.unsealed.splice(.., log.unsealed());
        facts.reclaimed = log.reclaimed();
        if facts.read_only.as_deref() != log.stopped() {
            if log.stopped().is_none() {
                tracing::info!("the drive writes again; rows are taken");
            }
            facts.read_only = log.stopped().map(str::to_owned);
        }
        if facts.attached.len() != self.areas.len()
            || !self.areas.values().all(|a| facts.attached.contains(&a.space))
        {
            facts.attached = self.areas.values().map(|a| a.space).collect();
        }
        (facts.pinned, facts.pinned_bytes) = self.parts.marks.pinned();
        metrics.pinned_bytes.set(i64::try_from(facts.pinned_bytes).unwrap_or(i64::MAX));
        let count = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        metrics.used_bytes.set(i64::try_from(facts.used).unwrap_or(i64::MAX));
        metrics.rows.set(i64::try_from(rows).unwrap_or(i64::MAX));
        metrics.segments.set(count(facts.segments));
        metrics.queued_reads.set(count(self.reads.len()));
        metrics.queued_writes.set(count(self.writes.len() + self.preparing.len() + self.ready.len()));
        metrics.in_flight.set(count(self.flights.len()));
        metrics.read_only.set(i64::from(facts.read_only.is_some()));
    }
}

/// Bytes of a payload with its padding.
fn whole_pages(place: &Place) -> usize {
    usize::try_from(padded(place.length.into())).expect("a row is at most 1 GiB")
}

/// Items in the order in which they end in their prompt, with their place in the call.
fn in_order(items: &[RowItem]) -> Vec<(usize, RowItem)> {
    let mut all: Vec<_> = items.iter().copied().enumerate().collect();
    all.sort_by_key(|(_, item)| item.position);
    all
}

/// Whether a record is the one that was asked for.
fn verify(record: Record, space: &Space, key: &RowKey, place: &Place) -> Result<Record, Bad> {
    let same = record.key == *key && record.space == *space && record.position == place.position;
    if !same && !mutant::on(Mutant::SkipKeyCheck) {
        return Err(Bad::OtherRow);
    }
    if record.length != place.length {
        return Err(Bad::Bounds("the payload"));
    }
    Ok(record)
}

fn say(step: &Step, error: &std::io::Error) -> String {
    let what = match step {
        Step::Sync(_) => "make a segment durable",
        Step::Foot { .. } => "seal a segment",
        Step::Remove(_) => "remove a segment",
        Step::Create(_) => "make a segment",
        Step::Release { .. } => "give back the room of rows that went",
        Step::Choose { .. } => "make room",
    };
    format!("failed to {what}: {error}")
}
