//! Reading the other box's memory instead of being sent its bytes: what a fabric provides for it, and the thread that
//! carries such reads out.
//!
//! A [`Remote`] is the whole fabric, a [`Host`] one end of this box that peers read from, an [`Engine`] one rail's own
//! way to read one peer. Engines belong to libraries that are polled; each has a thread of its own ([`Reader`]) that
//! posts reads in their order, a few at a time, and says in the same order what ended. The thread sleeps while there
//! is nothing to read. While something is under way it looks, and sleeps between looks: from [`LOOK_FIRST`] on, twice as long after
//! every look in vain, up to [`LOOK_LAST`]. A read of 1 MiB takes 84 µs on a rail of 100 Gb/s, so a rail at full speed is looked at
//! some ten thousand times a second, for a few microseconds each.
//!
//! Nothing says how far a read is. One that does not end within [`SILENCE`], counted from when the one before it ended,
//! has failed: the engine is torn down, and only then are its landings given back, so that nothing can be written into
//! a row that somebody else has by then.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::io;
use std::sync::mpsc::{self as orders, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use tokio::sync::{mpsc, oneshot};

use super::piece::{Land, Leave, Piece};
use super::{Local, Path};
use crate::base::rows::{AreaId, Rows};

/// A read that takes longer has failed, as a stream that is silent for so long has.
const SILENCE: Duration = Duration::from_secs(1);

/// Sleep between two looks at what is under way.
const LOOK_FIRST: Duration = Duration::from_micros(20);
const LOOK_LAST: Duration = Duration::from_millis(1);

/// How often a thread without reads looks whether row areas are gone.
const IDLE: Duration = Duration::from_secs(1);

/// Reads under way at one time. Two keep a rail busy while the end of one is noticed; a few more cover pieces that are
/// small. What waits behind them can still go to another rail.
const DEPTH: usize = 4;

/// Reads of one rail that are asked for and not reported: more than a rail has pieces in flight.
const ORDERS: usize = 1024;

/// A fabric by which memory of other boxes can be read.
pub trait Remote: Send + Sync + Debug + 'static {
    /// For people: what it is and runs over.
    fn name(&self) -> String;

    /// This box's end that has `end`'s device; none: of connections that are not pinned.
    ///
    /// # Errors
    /// When nothing can be read at that end.
    fn host(&self, end: Option<&Local>) -> io::Result<Arc<dyn Host>>;

    /// Opens the way along `path` to the memory that `card` describes.
    fn reader(&self, path: &Path, card: Bytes) -> BoxFuture<'static, io::Result<Reader>>;
}

/// One end of this box that peers read from.
pub trait Host: Send + Sync + Debug {
    /// What a peer's reader has to know.
    fn card(&self) -> Bytes;

    /// Puts these bytes, one part behind the other, where peers can read them. `None`: there is no room. May take as long as
    /// copying does.
    fn lend(&self, parts: &[Bytes]) -> Option<Lies>;
}

/// Bytes that peers can read as long as this is held.
#[derive(Clone, Debug)]
pub struct Lies {
    pub at: u64,
    pub bytes: Bytes,
}

/// One rail's way to read one peer's memory. Dropping it tears it down: nothing lands afterwards.
pub trait Engine: 'static {
    type Read;

    /// Prepares a row area to be read into. May take long: memory is pinned.
    ///
    /// # Errors
    /// With a reason that says what to change.
    fn attach(&mut self, rows: &Arc<Rows>) -> io::Result<()>;

    /// An area is gone.
    fn detach(&mut self, area: AreaId);

    /// Begins to read what lies `at` there into a piece of a row.
    fn post(&mut self, into: &Leave, at: u64) -> io::Result<Self::Read>;

    /// Whether no more of it can land. An error ends the engine.
    fn ended(&mut self, read: &mut Self::Read) -> io::Result<bool>;
}

/// A piece to be read.
#[derive(Debug)]
struct Job {
    piece: Piece,
    turn: u32,
    at: u64,
}

enum Order {
    Attach(Arc<Rows>),
    Read(Job),
}

/// What became of a read: true, its bytes lie in the row.
type Ended = io::Result<bool>;

/// Carries out reads of one rail. Dropping it has its thread tear the engine down.
pub struct Reader {
    orders: orders::SyncSender<Order>,
    ended: mpsc::Receiver<Ended>,
    attached: mpsc::Receiver<(AreaId, bool)>,
    areas: Vec<(AreaId, Area)>,
}

/// Whether rows of an area can be read into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Area {
    Asked,
    Yes,
    No,
}

impl Debug for Reader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reader").field("areas", &self.areas).finish_non_exhaustive()
    }
}

impl Reader {
    /// Starts a thread with the engine that `open` makes on it.
    ///
    /// # Errors
    /// Those of `open`.
    pub async fn start<E: Engine>(
        name: &str,
        open: impl FnOnce() -> io::Result<E> + Send + 'static,
    ) -> io::Result<Self> {
        let (orders, taken) = orders::sync_channel(ORDERS);
        let (say_ended, ended) = mpsc::channel(ORDERS);
        let (say_attached, attached) = mpsc::channel(ORDERS);
        let (say_open, opened) = oneshot::channel();
        let rail = name.to_owned();
        std::thread::Builder::new().name(format!("read {name}")).spawn(move || {
            let engine = match open() {
                Ok(engine) => engine,
                Err(error) => return drop(say_open.send(Err(error))),
            };
            if say_open.send(Ok(())).is_ok() {
                Hands { rail, taken, say_ended, say_attached }.run(engine);
            }
        })?;
        opened.await.map_err(|_| io::Error::other("the reader ended while it was opened"))??;
        Ok(Self { orders, ended, attached, areas: Vec::new() })
    }

    /// Whether pieces of these rows can be read into them. The first time it asks for it, which takes until a later
    /// call; until then, and where it fails, they are sent over the connection.
    pub fn takes(&mut self, rows: &Arc<Rows>) -> bool {
        while let Ok((area, worked)) = self.attached.try_recv() {
            if let Some(known) = self.areas.iter_mut().find(|(id, _)| *id == area) {
                known.1 = if worked { Area::Yes } else { Area::No };
            }
        }
        match self.areas.iter().find(|(id, _)| *id == rows.id) {
            Some((_, area)) => *area == Area::Yes,
            None => {
                self.areas.push((rows.id, Area::Asked));
                let _ = self.orders.send(Order::Attach(rows.clone()));
                false
            }
        }
    }

    pub fn read(&self, piece: &Piece, turn: u32, at: u64) {
        let job = Job { piece: piece.clone(), turn, at };
        // A thread that is gone has said why, or its channel is closed: poll_ended says so.
        let _ = self.orders.send(Order::Read(job));
    }

    /// What became of the reads, in their order. An error is the end.
    pub fn poll_ended(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<bool>> {
        Poll::Ready(match ready!(self.ended.poll_recv(cx)) {
            Some(ended) => ended,
            None => Err(io::Error::other("the reader ended")),
        })
    }
}

/// What the thread has.
struct Hands {
    rail: String,
    taken: orders::Receiver<Order>,
    say_ended: mpsc::Sender<Ended>,
    say_attached: mpsc::Sender<(AreaId, bool)>,
}

/// A read, in the order in which it was asked for.
enum Slot<R> {
    Waiting(Job),
    /// Without a read: posting it failed, perhaps halfway.
    UnderWay {
        read: Option<R>,
        _leave: Leave,
    },
    /// Its bytes lie in the row, or not.
    Over(bool),
}

impl Hands {
    fn run<E: Engine>(self, engine: E) {
        let mut slots = VecDeque::new();
        let mut areas: Vec<(AreaId, Weak<Rows>)> = Vec::new();
        // Declared last: it goes first, however this ends.
        let mut engine = engine;
        let failed = self.work(&mut engine, &mut slots, &mut areas);
        // In this order: nothing lands any more, then the landings end, then it is said.
        let begin = Instant::now();
        drop(engine);
        drop(slots);
        if let Err(error) = failed {
            let torn_down_ms = begin.elapsed().as_millis() as u64;
            tracing::warn!(rail = self.rail, %error, torn_down_ms, "reads of a rail failed");
            let _ = self.say_ended.try_send(Err(error));
        }
    }

    /// Works until the reader is dropped.
    fn work<E: Engine>(
        &self,
        engine: &mut E,
        slots: &mut VecDeque<Slot<E::Read>>,
        areas: &mut Vec<(AreaId, Weak<Rows>)>,
    ) -> io::Result<()> {
        let (mut pause, mut moved) = (LOOK_FIRST, Instant::now());
        loop {
            let idle = slots.is_empty();
            let mut order = match self.taken.recv_timeout(if idle { IDLE } else { pause }) {
                Ok(order) => Some(order),
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Err(RecvTimeoutError::Timeout) => None,
            };
            if order.is_none() && idle {
                forget(engine, areas);
            }
            while let Some(one) = order {
                match one {
                    Order::Read(job) => slots.push_back(Slot::Waiting(job)),
                    Order::Attach(rows) => self.attach(engine, areas, &rows),
                }
                order = self.taken.try_recv().ok();
            }
            let none_before = !under_way(slots);
            post(engine, slots)?;
            let ended = look(engine, slots)?;
            while let Some(Slot::Over(read)) = slots.front() {
                let _ = self.say_ended.try_send(Ok(*read));
                slots.pop_front();
            }
            if ended || none_before {
                moved = Instant::now();
            }
            pause = if ended { LOOK_FIRST } else { (pause * 2).min(LOOK_LAST) };
            if under_way(slots) && moved.elapsed() > SILENCE {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "a read did not end in time"));
            }
        }
    }

    fn attach<E: Engine>(&self, engine: &mut E, areas: &mut Vec<(AreaId, Weak<Rows>)>, rows: &Arc<Rows>) {
        forget(engine, areas);
        let done = engine.attach(rows);
        match &done {
            Ok(()) => areas.push((rows.id, Arc::downgrade(rows))),
            Err(error) => tracing::warn!(
                rail = self.rail,
                %error,
                "rows cannot be read into their area; they are sent over the connection instead"
            ),
        }
        let _ = self.say_attached.try_send((rows.id, done.is_ok()));
    }
}

fn under_way<R>(slots: &VecDeque<Slot<R>>) -> bool {
    slots.iter().any(|slot| matches!(slot, Slot::UnderWay { .. }))
}

/// Posts what may be posted, in order. A piece that another read still writes waits, and those behind it pass.
fn post<E: Engine>(engine: &mut E, slots: &mut VecDeque<Slot<E::Read>>) -> io::Result<()> {
    let mut room =
        DEPTH - slots.iter().filter(|slot| matches!(slot, Slot::UnderWay { .. })).count().min(DEPTH);
    for slot in slots.iter_mut() {
        let Slot::Waiting(job) = slot else { continue };
        if room == 0 {
            break;
        }
        match job.piece.land(job.turn) {
            Land::Busy => {}
            Land::Late => *slot = Slot::Over(false),
            Land::Now(leave) => {
                let posted = engine.post(&leave, job.at);
                let (read, failed) =
                    posted.map_or_else(|error| (None, Err(error)), |read| (Some(read), Ok(())));
                *slot = Slot::UnderWay { read, _leave: leave };
                failed?;
                room -= 1;
            }
        }
    }
    Ok(())
}

/// Whether anything ended. A landing ends here, before anybody is told.
fn look<E: Engine>(engine: &mut E, slots: &mut VecDeque<Slot<E::Read>>) -> io::Result<bool> {
    let mut any = false;
    for slot in slots.iter_mut() {
        if let Slot::UnderWay { read: Some(read), .. } = slot
            && engine.ended(read)?
        {
            *slot = Slot::Over(true);
            any = true;
        }
    }
    Ok(any)
}

fn forget<E: Engine>(engine: &mut E, areas: &mut Vec<(AreaId, Weak<Rows>)>) {
    areas.retain(|(area, rows)| {
        let gone = rows.strong_count() == 0;
        if gone {
            engine.detach(*area);
        }
        !gone
    });
}
