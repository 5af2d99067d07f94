//! The cache's events on ZeroMQ sockets, as vLLM publishes them, and what a reader missed once more.
//!
//! A message has three frames: topic, sequence number (8 bytes, big-endian, from 0), batch. A reader that saw a gap asks
//! the replay socket with `["", first number]` and gets every batch from there on, each with its topic and number, and
//! then one with the number -1 and nothing in it. Batches are kept for as long as the setting says.
//!
//! A subscriber that does not read is waited for, but not for long: what it misses then is a gap for it, as it would be
//! in vLLM when its queue is full. A `*` in an endpoint is the address that the engine listens on, and never more.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqError, ZmqMessage};

use super::counts::Counts;
use super::hits::Kind as Layers;
use super::options::{EventConfig, EventKnobs};
use super::pool::Change;
use super::steps::Publish;
use super::wire::{self, Form};
use crate::tasks::{Kind, Tasks};

/// Batches that wait to be sent. One a step: enough for minutes.
const QUEUE: usize = 10_000;

/// How long a subscriber that does not read holds up the others.
const PATIENCE: Duration = Duration::from_millis(500);

/// Number that ends a replay: -1 as it stands on the wire.
const END: [u8; 8] = (-1_i64).to_be_bytes();

#[derive(Debug)]
struct Kept {
    topic: Bytes,
    batches: VecDeque<(u64, Bytes)>,
    most: usize,
}

impl Kept {
    /// The batches from `from` on.
    fn since(&self, from: u64) -> Vec<(u64, Bytes)> {
        self.batches.iter().filter(|(number, _)| *number >= from).cloned().collect()
    }
}

/// Sockets that are bound, and who feeds them.
pub struct Publisher {
    /// The setting, with the endpoints that were bound.
    pub config: EventConfig,
    pub publish: Publish,
}

/// Binds the sockets of `config`; `host` stands for `*`.
pub async fn start(
    mut config: EventConfig,
    host: &str,
    knobs: EventKnobs,
    groups: Vec<Layers>,
    counts: Arc<Counts>,
    tasks: &Tasks,
) -> Result<Publisher, ZmqError> {
    let mut live = PubSocket::new();
    config.endpoint = live.bind(&at(&config.endpoint, host)).await?.to_string();
    let kept =
        Kept { topic: config.topic.clone().into(), batches: VecDeque::new(), most: config.buffer_steps };
    let kept = Arc::new(Mutex::new(kept));
    if let Some(endpoint) = &config.replay_endpoint {
        let mut replay = RouterSocket::new();
        config.replay_endpoint = Some(replay.bind(&at(endpoint, host)).await?.to_string());
        tasks.spawn(Kind::Chore, "mock replay", answer(replay, Arc::clone(&kept)));
    }
    let (changes, queue) = mpsc::channel(QUEUE);
    let form =
        Form { shape: knobs.shape, hashes: knobs.hashes.unwrap_or_default(), block_size: knobs.block_size };
    let sender = Sender { live, kept, form, groups, drop_every: knobs.drop_every, counts };
    tasks.spawn(Kind::Chore, "mock events", sender.run(queue));
    let publish = Box::new(move |batch| {
        if changes.try_send(batch).is_err() {
            tracing::error!(
                "failed to publish a batch: too many wait; the index of whoever reads is wrong now"
            );
        }
    });
    Ok(Publisher { config, publish })
}

fn at(endpoint: &str, host: &str) -> String {
    endpoint.replacen("://*", &format!("://{host}"), 1)
}

struct Sender {
    live: PubSocket,
    kept: Arc<Mutex<Kept>>,
    form: Form,
    groups: Vec<Layers>,
    drop_every: Option<u64>,
    counts: Arc<Counts>,
}

impl Sender {
    async fn run(mut self, mut queue: mpsc::Receiver<Vec<Change>>) {
        let mut number = 0;
        while let Some(changes) = queue.recv().await {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
            let batch = Bytes::from(wire::batch(&changes, &self.groups, self.form, now));
            self.keep(number, batch.clone());
            self.counts.batches.fetch_add(1, Ordering::Relaxed);
            if self.drop_every.is_none_or(|every| every == 0 || !(number + 1).is_multiple_of(every)) {
                self.send(number, batch).await;
            }
            number += 1;
        }
    }

    fn keep(&self, number: u64, batch: Bytes) {
        let mut kept = self.kept.lock();
        kept.batches.push_back((number, batch));
        while kept.batches.len() > kept.most {
            kept.batches.pop_front();
        }
    }

    async fn send(&mut self, number: u64, batch: Bytes) {
        let topic = self.kept.lock().topic.clone();
        let frames = vec![topic, Bytes::copy_from_slice(&number.to_be_bytes()), batch];
        let Ok(message) = ZmqMessage::try_from(frames) else { return };
        match tokio::time::timeout(PATIENCE, self.live.send(message)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, number, "failed to publish a batch"),
            Err(_) => tracing::warn!(number, "a subscriber does not read; it may have missed a batch"),
        }
    }
}

/// Answers those who ask what they missed, one after the other.
async fn answer(mut replay: RouterSocket, kept: Arc<Mutex<Kept>>) {
    loop {
        let frames = match replay.recv().await {
            Ok(message) => message.into_vec(),
            Err(error) => {
                tracing::warn!(%error, "the replay socket is gone");
                return;
            }
        };
        // Who asks, an empty frame, the first number.
        let [who, middle @ .., from] = frames.as_slice() else { continue };
        let Ok(from) = <[u8; 8]>::try_from(&from[..]) else {
            tracing::warn!(bytes = from.len(), "a replay is asked for with a number that is none");
            continue;
        };
        let (topic, batches) = {
            let kept = kept.lock();
            (kept.topic.clone(), kept.since(u64::from_be_bytes(from)))
        };
        let mut answers: Vec<[Bytes; 3]> = batches
            .into_iter()
            .map(|(number, batch)| [topic.clone(), Bytes::copy_from_slice(&number.to_be_bytes()), batch])
            .collect();
        answers.push([Bytes::new(), Bytes::from_static(&END), Bytes::new()]);
        for frames in answers {
            let all: Vec<Bytes> =
                std::iter::once(who.clone()).chain(middle.iter().cloned()).chain(frames).collect();
            let Ok(message) = ZmqMessage::try_from(all) else { break };
            if !matches!(tokio::time::timeout(PATIENCE, replay.send(message)).await, Ok(Ok(()))) {
                tracing::warn!("whoever asked for a replay does not read it");
                break;
            }
        }
    }
}
