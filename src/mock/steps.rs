//! The engine's loop: a step is planned, takes its time, and is told.
//!
//! One task owns the steps; everything else asks [`Device`], whose lock is held for moments only. Time is that of the
//! plan: what a timer oversleeps is made up for in the next steps, so that a fast clock does not slow the engine down.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};
use tokio::time::{Duration, Instant, sleep_until};

use super::faults::Faults;
use super::pace::on_the_wall;
use super::pool::Change;
use super::schedule::{Id, Request, Scheduler, Step, Tally, Told};
use crate::base::block::{BlockHash, RowKey};
use crate::tasks::{Kind, Tasks};

/// How far the steps may be behind before the rest is given up.
const LAG: Duration = Duration::from_millis(100);

/// Takes what changed, in order.
pub type Publish = Box<dyn Fn(Vec<Change>) + Send>;

struct Core {
    scheduler: Scheduler,
    heard: HashMap<Id, mpsc::Sender<Told>>,
    publish: Option<Publish>,
    next: u64,
}

impl Core {
    fn publish(&mut self) {
        let changes = self.scheduler.pool.changes();
        if let Some(publish) = self.publish.as_ref().filter(|_| !changes.is_empty()) {
            publish(changes);
        }
    }

    fn tell(&mut self, step: &Step) {
        for (id, told) in self.scheduler.finish(step) {
            if let Some(heard) = self.heard.get(&id) {
                // The channel has room for everything that a request can hear; one that is gone aborts itself.
                let _ = heard.try_send(told);
            }
            if told == Told::End {
                self.heard.remove(&id);
            }
        }
    }
}

/// Handle of scheduler and blocks. Cheap to clone.
#[derive(Clone)]
pub struct Device {
    core: Arc<Mutex<Core>>,
    work: Arc<Notify>,
}

/// A request that is there. When it is dropped, its blocks are given back.
pub struct Ticket {
    id: Id,
    device: Device,
    pub heard: mpsc::Receiver<Told>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut core = self.device.core.lock();
        if core.heard.remove(&self.id).is_some() {
            core.scheduler.abort(self.id);
        }
    }
}

/// How the device is.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    pub running: usize,
    pub waiting: usize,
    pub prefill_left: usize,
    pub blocks: usize,
    pub blocks_used: usize,
    pub tally: Tally,
}

impl Device {
    /// Runs the steps of `scheduler` until `tasks` stop.
    pub fn start(
        scheduler: Scheduler,
        clock: f64,
        faults: Arc<Faults>,
        publish: Option<Publish>,
        tasks: &Tasks,
    ) -> Self {
        let core = Core { scheduler, heard: HashMap::new(), publish, next: 0 };
        let device = Self { core: Arc::new(Mutex::new(core)), work: Arc::default() };
        let (running, stopping) = (device.clone(), tasks.stopping());
        tasks.spawn(Kind::Owner, "mock steps", async move {
            tokio::select! {
                () = running.run(clock, &faults) => {}
                () = stopping.cancelled() => {}
            }
        });
        device
    }

    async fn run(&self, clock: f64, faults: &Faults) {
        let mut due = Instant::now();
        loop {
            let speed = faults.speed().await;
            let step = {
                let mut core = self.core.lock();
                let step = core.scheduler.step();
                core.publish();
                step
            };
            let Some(step) = step else {
                self.work.notified().await;
                due = Instant::now();
                continue;
            };
            let now = Instant::now();
            due = due.max(now.checked_sub(LAG).unwrap_or(now)).min(now);
            match due.checked_add(on_the_wall(step.seconds, clock, speed)) {
                Some(end) => due = end,
                None => std::future::pending().await,
            }
            sleep_until(due).await;
            // An engine that hangs does not say what it computed either.
            faults.speed().await;
            let mut core = self.core.lock();
            core.tell(&step);
            core.publish();
        }
    }

    /// Puts a request into the queue. Its number is given here.
    pub fn submit(&self, mut request: Request) -> Ticket {
        let (said, heard) = mpsc::channel(request.words + 3);
        let id = {
            let mut core = self.core.lock();
            let id = Id(core.next);
            core.next += 1;
            request.id = id;
            core.heard.insert(id, said);
            core.scheduler.submit(request);
            id
        };
        self.work.notify_one();
        Ticket { id, device: self.clone(), heard }
    }

    /// Looks at which keys can be hit, all at one moment.
    pub fn with_keys<R>(&self, look: impl FnOnce(&dyn Fn(&RowKey) -> bool) -> R) -> R {
        let core = self.core.lock();
        look(&|key| core.scheduler.pool.has(key))
    }

    pub fn keys(&self) -> Vec<RowKey> {
        self.core.lock().scheduler.pool.keys().copied().collect()
    }

    /// Tokens of a prompt that would not be computed now.
    pub fn peek(&self, hashes: &[BlockHash], prompt: usize) -> usize {
        self.core.lock().scheduler.peek(hashes, prompt)
    }

    /// Forgets all blocks. False, and none is forgotten, while one is in use.
    pub fn clear(&self) -> bool {
        let mut core = self.core.lock();
        let cleared = core.scheduler.pool.clear();
        core.publish();
        cleared
    }

    pub fn look(&self) -> Look {
        let core = self.core.lock();
        let (scheduler, pool) = (&core.scheduler, &core.scheduler.pool);
        Look {
            running: scheduler.running(),
            waiting: scheduler.waiting(),
            prefill_left: scheduler.prefill_left(),
            blocks: pool.len(),
            blocks_used: pool.used(),
            tally: scheduler.tally,
        }
    }
}
