//! Follows what an engine says of its device cache, so that the router knows what lies there: [`wire`] reads it,
//! [`held`] keeps it, and one task listens.
//!
//! The engine publishes batches on one socket and answers on another for what a listener missed. Listening begins with
//! everything that it still has, and goes on with what comes; a hole in the numbers is filled in the same way. Another
//! engine, or one that counts anew, is a clean slate. Until a first replay has ended, and whenever the sockets are
//! silent where they should answer, nothing is said to be known: whoever asks then guesses, as for an engine without
//! events.

pub mod held;
pub mod wire;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::{RwLock, RwLockReadGuard};
use prometheus::{IntCounter, IntGauge};
use tokio::sync::watch;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqError, ZmqMessage};

use super::view::View;
use crate::meter::Meter;
use crate::tasks::{Kind, Tasks};
use held::{Device, Line, Turn};

/// Between two tries to reach an engine whose sockets are not there.
const PAUSE: Duration = Duration::from_millis(500);

/// After so long without a batch it is asked whether there was one: the last one before a silence shows no hole.
const QUIET: Duration = Duration::from_millis(500);

/// How long the next answer of a replay may take.
const ANSWER: Duration = Duration::from_secs(5);

/// The number that ends a replay: -1 as it stands on the wire.
const END: u64 = u64::MAX;

/// What one engine's device holds, as it is heard. Cheap to clone.
#[derive(Clone)]
pub struct Events(Arc<Shared>);

struct Shared {
    /// Held for a look, or for one batch.
    state: RwLock<State>,
    live: IntGauge,
    blocks: IntGauge,
    batches: IntCounter,
    gaps: IntCounter,
    replays: IntCounter,
    refused: IntCounter,
}

#[derive(Default)]
struct State {
    /// The life of the engine that is heard.
    engine: String,
    device: Device,
    live: bool,
    /// A batch could not be read: what it said is lost, and what is believed to be there may be gone.
    broken: bool,
}

impl State {
    fn is_known(&self) -> bool {
        self.live && !self.broken && self.device.is_whole()
    }
}

/// How it stands, for people.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Whether what is said can be believed.
    pub live: bool,
    pub blocks: usize,
    /// Blocks that were ever told by this engine.
    pub stored: u64,
    /// Tokens of its newest block.
    pub block_size: u32,
}

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("failed to connect: {0}")]
    Connect(ZmqError),
    #[error("the events' socket failed: {0}")]
    Live(ZmqError),
    #[error("the replay's socket failed: {0}")]
    Replay(ZmqError),
    #[error("no answer to a replay within {} s", ANSWER.as_secs())]
    Silent,
    #[error("batches are missing, and the engine has them no more")]
    Lost,
    #[error("another engine counts from its beginning")]
    Reborn,
    #[error("a message is not what one should be: {0}")]
    Message(String),
}

/// Where an engine's events are to be had.
#[derive(Clone, Debug)]
pub struct Endpoints {
    pub live: String,
    pub replay: String,
}

impl Endpoints {
    /// Of socket files.
    pub fn of_files(live: &Path, replay: &Path) -> Self {
        Self { live: format!("ipc://{}", live.display()), replay: format!("ipc://{}", replay.display()) }
    }
}

impl Events {
    pub fn new(meter: &Meter) -> Self {
        let shared = Shared {
            state: RwLock::default(),
            live: meter
                .gauge("events_live", "1 while the device cache is known by the engine's events, else 0"),
            blocks: meter
                .gauge("events_blocks", "Blocks of the device cache that the engine's events tell of"),
            batches: meter.counter("events_batches_total", "Batches of events that were taken"),
            gaps: meter.counter("events_gaps_total", "Holes in the numbers of batches"),
            replays: meter.counter("events_replays_total", "Times that missed batches were asked for"),
            refused: meter.counter("events_refused_total", "Batches that could not be read"),
        };
        Self(Arc::new(shared))
    }

    /// A look at what the device of this life of an engine holds. None: it is not known.
    pub fn device(&self, engine_id: &str) -> Option<Look<'_>> {
        let state = self.0.state.read();
        (state.is_known() && state.engine == engine_id).then_some(Look(state))
    }

    pub fn facts(&self) -> Facts {
        let state = self.0.state.read();
        let device = &state.device;
        Facts {
            live: state.is_known(),
            blocks: device.len(),
            stored: device.stored(),
            block_size: device.block_size(),
        }
    }

    /// Listens to whichever engine is ready, until `tasks` stop.
    pub fn follow(&self, endpoints: Endpoints, engine: watch::Receiver<View>, tasks: &Tasks) {
        let (this, stopping) = (self.clone(), tasks.stopping());
        tasks.spawn(Kind::Owner, "events", async move {
            stopping.run_until_cancelled(this.run(endpoints, engine)).await;
        });
    }

    async fn run(&self, endpoints: Endpoints, mut engine: watch::Receiver<View>) {
        let mut told = String::new();
        loop {
            let Ok(view) = engine.wait_for(View::is_ready).await.map(|view| view.clone()) else { return };
            let another = |other: &View| !other.is_ready() || other.engine_id != view.engine_id;
            let ended = tokio::select! {
                ended = self.listen(&endpoints, &view.engine_id) => Some(ended),
                changed = engine.wait_for(another) => match changed {
                    Ok(_) => None,
                    Err(_) => return,
                },
            };
            self.unknown();
            let Some(ended) = ended else { continue };
            let why = ended.to_string();
            // The same again is not news: an engine without events stays one.
            if why != told {
                tracing::info!(why, "the engine's device cache is guessed for now");
                told = why;
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Takes everything that the engine says until something is wrong.
    async fn listen(&self, endpoints: &Endpoints, engine_id: &str) -> Error {
        match Box::pin(self.take(endpoints, engine_id)).await {
            Ok(never) => match never {},
            Err(error) => error,
        }
    }

    async fn take(&self, endpoints: &Endpoints, engine_id: &str) -> Result<std::convert::Infallible, Error> {
        let (mut live, mut replay) = (SubSocket::new(), DealerSocket::new());
        live.connect(&endpoints.live).await.map_err(Error::Connect)?;
        // Whatever the topic: what is published on this socket is this engine's.
        live.subscribe("").await.map_err(Error::Connect)?;
        replay.connect(&endpoints.replay).await.map_err(Error::Connect)?;
        self.begin(engine_id);
        let mut line = Line::default();
        self.replay(&mut replay, &mut line).await?;
        self.settle();
        loop {
            // Nothing is lost where the time is over: a message is taken whole or not at all.
            let Ok(message) = tokio::time::timeout(QUIET, live.recv()).await else {
                self.replay(&mut replay, &mut line).await?;
                continue;
            };
            let (number, batch) = parts(message.map_err(Error::Live)?)?;
            match line.hear(number) {
                Turn::Next => self.apply(&batch),
                Turn::Known => {}
                Turn::Reborn => return Err(Error::Reborn),
                Turn::Gap(from) => {
                    self.0.gaps.inc();
                    self.replay(&mut replay, &mut line).await?;
                    if line.next() <= number {
                        return Err(Error::Lost);
                    }
                    tracing::debug!(from, number, "batches of events were missed and brought again");
                }
            }
        }
    }

    /// Brings everything from the line's next number on.
    async fn replay(&self, replay: &mut DealerSocket, line: &mut Line) -> Result<(), Error> {
        self.0.replays.inc();
        let wanted = line.next();
        let ask = vec![Bytes::new(), Bytes::copy_from_slice(&wanted.to_be_bytes())];
        let ask = ZmqMessage::try_from(ask).map_err(|error| Error::Message(error.to_string()))?;
        replay.send(ask).await.map_err(Error::Replay)?;
        loop {
            let answer = tokio::time::timeout(ANSWER, replay.recv()).await.map_err(|_| Error::Silent)?;
            let (number, batch) = parts(answer.map_err(Error::Replay)?)?;
            if number == END {
                return Ok(());
            }
            // What was there before the first batch that is left is told by no one: a hole in the beginning only hides
            // blocks, one in the middle would keep those that are gone.
            if number > line.next() && line.next() > 0 {
                return Err(Error::Lost);
            }
            if line.replayed(number) {
                self.apply(&batch);
            }
        }
    }

    fn apply(&self, batch: &[u8]) {
        match wire::read(batch) {
            Ok(batch) => {
                self.0.batches.inc();
                let mut state = self.0.state.write();
                batch.events.iter().for_each(|event| state.device.apply(event));
                self.0.blocks.set(i64::try_from(state.device.len()).unwrap_or(i64::MAX));
            }
            Err(error) => {
                self.0.refused.inc();
                tracing::warn!(%error, bytes = batch.len(), "a batch of the engine's events cannot be read");
                self.0.state.write().broken = true;
                self.0.live.set(0);
            }
        }
    }

    /// A clean slate for this life of an engine.
    fn begin(&self, engine_id: &str) {
        *self.0.state.write() = State { engine: engine_id.to_owned(), ..State::default() };
        self.0.live.set(0);
        self.0.blocks.set(0);
    }

    fn settle(&self) {
        self.0.state.write().live = true;
        self.0.live.set(1);
    }

    fn unknown(&self) {
        self.0.state.write().live = false;
        self.0.live.set(0);
    }
}

/// A look at a device; what comes waits meanwhile.
pub struct Look<'a>(RwLockReadGuard<'a, State>);

impl std::ops::Deref for Look<'_> {
    type Target = Device;

    fn deref(&self) -> &Device {
        &self.0.device
    }
}

/// Number and batch of a message: the last two of its frames. What a number's frame has beside its first 8 bytes names
/// the publisher in later releases.
fn parts(message: ZmqMessage) -> Result<(u64, Bytes), Error> {
    let frames = message.into_vec();
    let [.., number, batch] = frames.as_slice() else {
        return Err(Error::Message(format!("{} frames", frames.len())));
    };
    let Some(first) = number.first_chunk() else {
        return Err(Error::Message(format!("a number of {} bytes", number.len())));
    };
    Ok((u64::from_be_bytes(*first), batch.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(frames: &[&[u8]]) -> ZmqMessage {
        ZmqMessage::try_from(frames.iter().map(|frame| Bytes::copy_from_slice(frame)).collect::<Vec<_>>())
            .unwrap()
    }

    #[test]
    fn a_message_is_read_from_its_end() {
        let seven = 7_u64.to_be_bytes();
        let longer = [&seven[..], &[9; 16]].concat();
        for frames in
            [vec![&b"kv"[..], &seven, b"x"], vec![b"", b"kv", &seven, b"x"], vec![b"", &longer, b"x"]]
        {
            assert_eq!(parts(message(&frames)).unwrap(), (7, Bytes::from_static(b"x")));
        }
        assert!(parts(message(&[b"x"])).unwrap_err().to_string().contains("1 frames"));
        assert!(parts(message(&[b"kv", b"short", b"x"])).unwrap_err().to_string().contains("5 bytes"));
    }

    #[test]
    fn what_another_life_of_an_engine_had_is_not_believed() {
        let events = Events::new(&Meter::new());
        assert!(events.device("").is_none(), "nothing was heard");
        events.begin("one");
        assert!(events.device("one").is_none(), "not whole yet");
        events.settle();
        assert!(events.device("one").is_some() && events.device("two").is_none());
        events.apply(b"nonsense");
        assert!(events.device("one").is_none(), "something was missed");
    }
}
