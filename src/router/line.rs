//! Waiting in line: the queue with those who wait, woken when there is room, and gone when they hang up.
//!
//! [`super::queue`] decides; here it is asked whenever something has changed: a request ended, a node said what it has
//! to do, an engine came or went. A [`Turn`] is a request's place, waiting or on its way; dropping it gives the place
//! back, whoever holds it. The queue's lock is taken before the router's, never the other way round.

use std::collections::{BTreeMap, HashMap};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use parking_lot::Mutex;
use prometheus::{HistogramVec, IntGaugeVec};
use serde::Serialize;
use tokio::sync::oneshot;

use super::queue::{Class, Queue, Target};
use super::refusal::Refusal;
use super::state::Shared;
use crate::base::clock::Micros;
use crate::meter::{Meter, SECONDS};

/// How many may wait where.
#[derive(Clone, Copy, Debug, Default)]
pub struct Admission {
    /// Requests that this node's engine gets at once. 0: no bound, and nobody ever waits for it.
    pub places: u32,
    /// Longest line (`router.queue`).
    pub queue: u32,
}

/// What a request may do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rights {
    /// Its class where it does not ask for one.
    pub class: Class,
    /// The best class that it gets.
    pub best: Class,
    /// Most requests in flight with this key on this node.
    pub limit: Option<u32>,
    /// Goes into the `cache_salt` of its prompts: nothing that it computed is found by others, and nothing of theirs by it.
    pub salt: Option<Arc<str>>,
}

impl Default for Rights {
    /// Where there are no keys everybody is trusted.
    fn default() -> Self {
        Self { class: Class::Normal, best: Class::Interactive, limit: None, salt: None }
    }
}

impl Rights {
    /// The class of one that asks for `asked`.
    pub fn class(&self, asked: Option<Class>) -> Class {
        asked.map_or(self.class, |asked| asked.max(self.best))
    }
}

/// How many wait now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Waiting {
    pub interactive: usize,
    pub normal: usize,
    pub batch: usize,
}

#[derive(Debug)]
struct Inner {
    queue: Queue,
    wake: HashMap<u64, oneshot::Sender<()>>,
}

/// The line of one router.
#[derive(Debug)]
pub(super) struct Line {
    inner: Mutex<Inner>,
    /// Requests in flight by API key.
    keys: Mutex<BTreeMap<Arc<str>, u32>>,
    depth: IntGaugeVec,
    waited: HistogramVec,
}

impl Line {
    pub fn new(most: u32, meter: &Meter) -> Self {
        Self {
            inner: Mutex::new(Inner { queue: Queue::new(most as usize), wake: HashMap::new() }),
            keys: Mutex::default(),
            depth: meter.gauges("router_queue_depth", "Requests that wait for room at an engine", &["class"]),
            waited: meter.histograms(
                "router_queue_wait_seconds",
                "How long those waited that had to, and got room",
                &SECONDS,
                &["class"],
            ),
        }
    }

    fn show(&self, inner: &Inner) {
        for class in Class::ALL {
            let depth = i64::try_from(inner.queue.waiting(class)).unwrap_or(i64::MAX);
            self.depth.with_label_values(&[class.name()]).set(depth);
        }
    }
}

/// A place in line, or on the way from there to a seat.
#[derive(Debug)]
pub(super) struct Turn {
    shared: Arc<Shared>,
    id: u64,
    class: Class,
    since: Micros,
    /// None: it never had to wait, or has waited.
    called: Option<oneshot::Receiver<()>>,
}

impl Turn {
    /// Whether it has to wait.
    pub fn waits(&self) -> bool {
        self.called.is_some()
    }

    /// How long it has waited; zero where it did not.
    pub fn waited(&self) -> Duration {
        self.shared.clock.now().since(self.since)
    }
}

impl Future for Turn {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let Some(called) = &mut self.called else { return Poll::Ready(()) };
        // A caller that is gone took the whole router with it.
        if Pin::new(called).poll(cx).is_pending() {
            return Poll::Pending;
        }
        self.called = None;
        let waited = self.waited().as_secs_f64();
        self.shared.line.waited.with_label_values(&[self.class.name()]).observe(waited);
        Poll::Ready(())
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut inner = self.shared.line.inner.lock();
        inner.queue.leave(self.id);
        if inner.wake.remove(&self.id).is_some() {
            self.shared.line.show(&inner);
        }
        self.shared.call(&mut inner);
    }
}

impl Shared {
    /// Takes a place: on the way at once where there is room, else in line. `cost_s` is asked only for those who wait.
    pub fn take_turn(
        self: &Arc<Self>,
        class: Class,
        target: Target,
        cost_s: impl FnOnce() -> f64,
    ) -> Result<Turn, Refusal> {
        let since = self.clock.now();
        let turn = |id, called| Turn { shared: Arc::clone(self), id, class, since, called };
        let mut inner = self.line.inner.lock();
        if let Some(id) = inner.queue.pass(&target, self.room(&target)) {
            return Ok(turn(id, None));
        }
        let Ok(id) = inner.queue.join(class, target.clone(), cost_s(), since) else {
            let seconds = self.backlog_s(&target, inner.queue.work_s());
            return Err(Refusal::QueueFull { class: class.name(), seconds });
        };
        let (wake, called) = oneshot::channel();
        inner.wake.insert(id, wake);
        self.line.show(&inner);
        self.call(&mut inner);
        Ok(turn(id, Some(called)))
    }

    /// Something has changed: calls whoever may go now.
    pub fn call_next(&self) {
        self.call(&mut self.line.inner.lock());
    }

    fn call(&self, inner: &mut Inner) {
        let mut any = false;
        while !inner.queue.is_empty()
            && let Some(id) = inner.queue.next(|target| self.room(target))
        {
            any = true;
            // One that is gone gives its place back when its turn is dropped.
            if let Some(wake) = inner.wake.remove(&id) {
                let _ = wake.send(());
            }
        }
        if any {
            self.line.show(inner);
        }
    }

    pub fn waiting(&self) -> Waiting {
        let inner = self.line.inner.lock();
        let of = |class| inner.queue.waiting(class);
        Waiting { interactive: of(Class::Interactive), normal: of(Class::Normal), batch: of(Class::Batch) }
    }

    /// Nobody waits, is on the way to an engine, or counts against a key.
    pub fn is_idle(&self) -> bool {
        self.line.inner.lock().queue.is_idle() && self.line.keys.lock().is_empty()
    }

    /// One more request with this key, of at most `limit`.
    pub fn enter_key(&self, key: &Arc<str>, limit: Option<u32>) -> Result<(), Refusal> {
        let mut keys = self.line.keys.lock();
        let count = keys.get(key).copied().unwrap_or(0);
        if let Some(limit) = limit.filter(|limit| count >= *limit) {
            let seconds = self.backlog_s(&Target::default(), 0.0);
            return Err(Refusal::KeyBusy { key: key.to_string(), limit, seconds });
        }
        keys.insert(Arc::clone(key), count + 1);
        Ok(())
    }

    pub fn leave_key(&self, key: &Arc<str>) {
        let mut keys = self.line.keys.lock();
        match keys.get_mut(key) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(keys.remove(key)),
        }
    }
}
