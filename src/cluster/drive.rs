//! One session: a greeted TLS connection on one side, a peer's machine and the store's changes on the other.
//!
//! The loop waits for whichever comes first and feeds the machine; it never waits to write, so two nodes that send
//! each other a large index cannot stop each other. What cannot be sent yet stays in the machine, which keeps only
//! what is newest; what the machine has no room for stays with the store, which makes this side tell everything
//! again. Every arm of the select is cancel-safe: frames are collected in a buffer that outlives the wait.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, WriteHalf};
use tokio::sync::broadcast::{self, error::RecvError};
use tokio::sync::mpsc;

use super::Inner;
use super::identity::Fingerprint;
use super::proto::{MAX_FRAME, Message, Word};
use super::state::Begun;
use crate::store::{Change, ChangeKind};
use crate::tasks::Kind;

/// Frames between a session and its socket.
const FRAMES: usize = 4;

/// Changes taken from the store at one time.
const CHANGES: usize = 4096;

/// Time for the last word of a node that stops.
const FAREWELL: Duration = Duration::from_millis(500);

/// Frames out of a stream.
#[derive(Debug)]
pub struct Frames<R> {
    from: R,
    buffer: BytesMut,
}

impl<R: AsyncRead + Unpin> Frames<R> {
    pub fn new(from: R) -> Self {
        Self { from, buffer: BytesMut::new() }
    }

    /// The next frame without its length; larger ones than `limit` are an error. Cancel-safe.
    pub async fn next(&mut self, limit: usize) -> io::Result<Bytes> {
        loop {
            let wanted = match self.buffer.first_chunk::<4>() {
                Some(length) => 4 + u32::from_le_bytes(*length) as usize,
                None => 4,
            };
            if wanted > 4 + limit {
                let error = format!("a frame of {} bytes, the limit is {limit}", wanted - 4);
                return Err(io::Error::new(io::ErrorKind::InvalidData, error));
            }
            if self.buffer.len() >= 4 && self.buffer.len() >= wanted {
                self.buffer.advance(4);
                return Ok(self.buffer.split_to(wanted - 4).freeze());
            }
            self.buffer.reserve(wanted - self.buffer.len());
            if self.from.read_buf(&mut self.buffer).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// The next message. Cancel-safe.
    pub async fn message(&mut self, limit: usize) -> io::Result<Message> {
        let frame = self.next(limit).await?;
        Message::decode(&frame).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
    }
}

/// Runs a session until it ends, and books its end.
pub async fn session<S>(
    inner: Arc<Inner>,
    of: Fingerprint,
    begun: Begun,
    mut frames: Frames<tokio::io::ReadHalf<S>>,
    to: WriteHalf<S>,
) where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (sender, receiver) = mpsc::channel(FRAMES);
    let patience = inner.shared.silence;
    inner.shared.tasks.spawn(Kind::Serving, "control writer", write(to, receiver, patience));
    let why = converse(&inner, of, &begun, &mut frames, &sender).await;
    inner.shared.end(of, begun.number, &why);
}

async fn write<W: AsyncWrite + Unpin>(mut to: W, mut frames: mpsc::Receiver<Vec<u8>>, patience: Duration) {
    while let Some(frame) = frames.recv().await {
        let write = async {
            to.write_all(&frame).await?;
            to.flush().await
        };
        if !matches!(tokio::time::timeout(patience, write).await, Ok(Ok(()))) {
            return;
        }
    }
    let _ = tokio::time::timeout(FAREWELL, to.shutdown()).await;
}

/// The loop of a session; says why it ended.
async fn converse<R: AsyncRead + Unpin>(
    inner: &Inner,
    of: Fingerprint,
    begun: &Begun,
    frames: &mut Frames<R>,
    sender: &mpsc::Sender<Vec<u8>>,
) -> String {
    let (shared, number) = (&inner.shared, begun.number);
    let stopping = shared.tasks.stopping();
    let mut wake = shared.wake.subscribe();
    let mut tick = tokio::time::interval((shared.silence / 16).max(Duration::from_millis(5)));
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut changes: Option<broadcast::Receiver<Change>> = None;
    loop {
        let chores = shared.chores(of, number);
        if chores.over {
            return "it was replaced or is down".into();
        }
        if let Some(space) = chores.tell {
            let (keys, receiver) = inner.store.subscribe(space);
            changes = Some(receiver);
            shared.with(of, number, |peer| peer.on_snapshot(space, keys));
            continue;
        }
        if !chores.tells {
            changes = None;
        }
        tokio::select! {
            () = begun.replaced.cancelled() => return "it was replaced".into(),
            () = stopping.cancelled() => {
                let bye = inner.say(Word::Bye);
                let _ = tokio::time::timeout(FAREWELL, sender.send(bye)).await;
                return "this node stops".into();
            }
            message = frames.message(MAX_FRAME) => match message {
                Ok(Message::Word { generation, word }) => shared.hear(of, number, generation, word),
                Ok(_) => {
                    shared.metrics.malformed.inc();
                    return "it greeted twice".into();
                }
                Err(error) => {
                    if error.kind() == io::ErrorKind::InvalidData {
                        shared.metrics.malformed.inc();
                    }
                    return error.to_string();
                }
            },
            permit = sender.reserve(), if chores.send => {
                let Ok(permit) = permit else { return "it cannot be written to".into() };
                if let Some(Some(word)) = shared.with(of, number, |peer| peer.poll_send()) {
                    permit.send(inner.say(word));
                }
            }
            change = next(&mut changes), if changes.is_some() && chores.room => {
                take(inner, of, number, change, changes.as_mut());
            }
            _ = tick.tick() => {
                let now = shared.clock.now();
                shared.with(of, number, |peer| peer.on_tick(now));
            }
            _ = wake.changed() => {}
        }
    }
}

async fn next(changes: &mut Option<broadcast::Receiver<Change>>) -> Result<Change, RecvError> {
    match changes {
        Some(changes) => changes.recv().await,
        None => std::future::pending().await,
    }
}

/// Hands changes of the store to the machine: `first` and what else is there.
fn take(
    inner: &Inner,
    of: Fingerprint,
    number: u64,
    first: Result<Change, RecvError>,
    changes: Option<&mut broadcast::Receiver<Change>>,
) {
    let mut list = Vec::new();
    let mut missed = match first {
        Ok(change) => {
            list.push(change);
            false
        }
        Err(RecvError::Lagged(_)) => true,
        Err(RecvError::Closed) => false,
    };
    if let Some(changes) = changes {
        while !missed && list.len() < CHANGES {
            match changes.try_recv() {
                Ok(change) => list.push(change),
                Err(broadcast::error::TryRecvError::Lagged(_)) => missed = true,
                Err(_) => break,
            }
        }
    }
    inner.shared.with(of, number, |peer| {
        if missed {
            peer.tell_anew();
            return;
        }
        for change in list {
            let position = match change.kind {
                ChangeKind::Added => Some(change.position),
                ChangeKind::Removed => None,
            };
            peer.on_change(change.space, change.key, position);
        }
    });
}
