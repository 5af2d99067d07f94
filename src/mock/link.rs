//! The engine's line to its node: it outlives the node, and no row is used again while a dead or lost node's write
//! may still land in it.
//!
//! A job ends by DONE. When the connection is gone, its jobs stay open in quarantine until nothing can touch their
//! rows: until pidfd says that the process is dead, or until that same process welcomes us again, which promises
//! it. Then they are failed. A node that lives and says nothing keeps its rows in quarantine for as long as it lives.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, oneshot};

use super::client::{Area, DoorClient, Error};
use crate::base::block::{RowItem, RowKey};
use crate::base::frame::{FromEngine, FromNode, Outcome, Sources};
use crate::base::geometry::Hello;
use crate::base::table::Probe;
use crate::tasks::{Kind, Tasks};

/// Orders that wait to be sent. One per running request and a few; whoever finds it full waits.
const QUEUE: usize = 256;

/// Pause between two attempts to reach a node that is not there.
const RETRY: Duration = Duration::from_millis(200);

/// A fingerprint of a large model on a cold drive comes before WELCOME.
const WELCOME_LIMIT: Duration = Duration::from_secs(180);

/// Sending waits for a node that does not read, but not for ever: then it is as good as gone.
const SEND_LIMIT: Duration = Duration::from_secs(10);

/// What a connected node offers. Changes with every connection.
#[derive(Clone, Debug)]
pub struct View {
    table: Arc<Probe>,
    pub row_budget: usize,
    pub prefill_tokens_per_s: u32,
    tier_on: bool,
}

impl View {
    /// Whether the node can bring `key`.
    pub fn has(&self, key: &RowKey) -> bool {
        self.tier_on && self.table.holders(key) != 0
    }
}

enum Order {
    Store { items: Vec<RowItem>, request: String, done: oneshot::Sender<Vec<Outcome>> },
    Load { items: Vec<RowItem>, deadline_us: u32, request: String, done: oneshot::Sender<Vec<Outcome>> },
    Report(FromEngine),
}

/// Handle of the line. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Link {
    orders: mpsc::Sender<Order>,
    view: Arc<Mutex<Option<View>>>,
}

impl Link {
    /// Connects, and stays connected, in a task of its own.
    pub fn start(socket: PathBuf, hello: Hello, area: Arc<Area>, tasks: &Tasks) -> Self {
        let (orders, queue) = mpsc::channel(QUEUE);
        let view = Arc::new(Mutex::new(None));
        let line = Line { socket, hello, area, queue, view: Arc::clone(&view), limbo: Vec::new() };
        tasks.spawn(Kind::Chore, "line to the node", line.run());
        Self { orders, view }
    }

    /// What the node offers; none while it is not there.
    pub fn view(&self) -> Option<View> {
        self.view.lock().clone()
    }

    /// Offers rows. Returns when nothing can touch them any more.
    pub async fn store(&self, items: Vec<RowItem>, request: String) -> Vec<Outcome> {
        let (done, answer) = oneshot::channel();
        self.order(items.len(), Order::Store { items, request, done }, answer).await
    }

    /// Asks for rows. Returns when nothing can touch them any more.
    pub async fn load(&self, items: Vec<RowItem>, deadline_us: u32, request: String) -> Vec<Outcome> {
        let (done, answer) = oneshot::channel();
        self.order(items.len(), Order::Load { items, deadline_us, request, done }, answer).await
    }

    async fn order(
        &self,
        count: usize,
        order: Order,
        answer: oneshot::Receiver<Vec<Outcome>>,
    ) -> Vec<Outcome> {
        let failed = vec![Outcome::Failed; count];
        if self.orders.send(order).await.is_err() {
            return failed;
        }
        match answer.await {
            Ok(outcomes) if outcomes.len() == count => outcomes,
            _ => failed,
        }
    }

    /// Tells where a request's tokens came from. Lost when no node is there.
    pub async fn report(&self, request: String, sources: Sources, chain: Vec<(RowKey, u32)>) {
        let _ = self.orders.send(Order::Report(FromEngine::Report { request, sources, chain })).await;
    }
}

/// Jobs of a connection that is gone, and the process that may still touch their rows.
struct Limbo {
    pid: u32,
    generation: u64,
    /// None when the process was gone before it could be watched.
    process: Option<AsyncFd<OwnedFd>>,
    jobs: Vec<Job>,
}

struct Job {
    count: usize,
    done: oneshot::Sender<Vec<Outcome>>,
}

impl Job {
    fn fail(self) {
        let _ = self.done.send(vec![Outcome::Failed; self.count]);
    }
}

struct Line {
    socket: PathBuf,
    hello: Hello,
    area: Arc<Area>,
    queue: mpsc::Receiver<Order>,
    view: Arc<Mutex<Option<View>>>,
    limbo: Vec<Limbo>,
}

impl Line {
    async fn run(mut self) {
        loop {
            let Some(client) = self.reach().await else { return };
            let welcome = &client.welcome;
            tracing::info!(pid = welcome.pid, generation = welcome.generation, "node welcomes the engine");
            let (pid, generation) = (welcome.pid, welcome.generation);
            let process = watch(pid);
            self.release(|limbo| limbo.pid == pid && limbo.generation == generation);
            *self.view.lock() = Some(View {
                table: Arc::clone(&client.table),
                row_budget: welcome.row_budget as usize,
                prefill_tokens_per_s: welcome.prefill_tokens_per_s,
                tier_on: welcome.tier_on,
            });
            let mut jobs = HashMap::new();
            let lost = self.talk(client, &mut jobs).await;
            *self.view.lock() = None;
            let Some(error) = lost else { return };
            tracing::warn!(%error, open_jobs = jobs.len(), "node lost");
            let jobs = jobs.into_values().collect();
            self.limbo.push(Limbo { pid, generation, process, jobs });
            self.release(|limbo| limbo.process.is_none() || limbo.jobs.is_empty());
        }
    }

    /// Fails the jobs of every quarantine that is over.
    fn release(&mut self, over: impl Fn(&Limbo) -> bool) {
        let (over, left): (Vec<_>, Vec<_>) = std::mem::take(&mut self.limbo).into_iter().partition(over);
        self.limbo = left;
        over.into_iter().flat_map(|limbo| limbo.jobs).for_each(Job::fail);
    }

    /// Connects, however long it takes. None when nobody is left who would want it.
    async fn reach(&mut self) -> Option<DoorClient> {
        let mut said = false;
        loop {
            let (socket, hello, area) = (self.socket.clone(), self.hello.clone(), Arc::clone(&self.area));
            let attempt = async move {
                let connecting = DoorClient::connect(&socket, &hello, area.fd());
                tokio::time::timeout(WELCOME_LIMIT, connecting).await.unwrap_or(Err(Error::Closed))
            };
            tokio::pin!(attempt);
            let error = loop {
                // The attempt goes on while orders are refused; the other arms lose nothing when one wins.
                tokio::select! {
                    reached = &mut attempt => match reached {
                        Ok(client) => return Some(client),
                        Err(error) => break error,
                    },
                    order = self.queue.recv() => refuse(order?),
                    dead = a_death(&self.limbo) => self.release(|limbo| limbo.pid == dead),
                }
            };
            if !std::mem::replace(&mut said, true) {
                tracing::info!(%error, "no node yet; the engine serves without");
            }
            let pause = tokio::time::sleep(RETRY);
            tokio::pin!(pause);
            loop {
                tokio::select! {
                    () = &mut pause => break,
                    order = self.queue.recv() => refuse(order?),
                    dead = a_death(&self.limbo) => self.release(|limbo| limbo.pid == dead),
                }
            }
        }
    }

    /// Passes orders on and answers back, until the connection is gone (its error) or nobody orders any more.
    async fn talk(&mut self, mut client: DoorClient, jobs: &mut HashMap<u64, Job>) -> Option<Error> {
        loop {
            // Hearing and receiving lose nothing when another arm wins.
            tokio::select! {
                said = client.heard() => match said {
                    Ok(said) => self.heard(said, jobs),
                    Err(error) => return Some(error),
                },
                order = self.queue.recv() => {
                    let frame = enter(order?, client.next_job(), jobs);
                    match tokio::time::timeout(SEND_LIMIT, client.send(&frame)).await {
                        Ok(Ok(())) => {}
                        Ok(Err(error)) => return Some(error),
                        Err(_) => return Some(Error::Closed),
                    }
                }
                dead = a_death(&self.limbo) => self.release(|limbo| limbo.pid == dead),
            }
        }
    }

    fn heard(&mut self, said: FromNode, jobs: &mut HashMap<u64, Job>) {
        match said {
            FromNode::Done { job, outcomes, .. } => match jobs.remove(&job) {
                Some(Job { done, .. }) => {
                    let _ = done.send(outcomes);
                }
                None => tracing::warn!(job, "DONE for a job that is not open"),
            },
            FromNode::Tier { on, reason } => {
                tracing::info!(on, reason, "tier");
                if let Some(view) = self.view.lock().as_mut() {
                    view.tier_on = on;
                }
            }
            FromNode::Pace { prefill_tokens_per_s } => {
                if let Some(view) = self.view.lock().as_mut() {
                    view.prefill_tokens_per_s = prefill_tokens_per_s;
                }
            }
            FromNode::Welcome(_) | FromNode::Refuse { .. } => tracing::warn!("a second welcome"),
        }
    }
}

/// The frame of an order, and its place among the open jobs.
fn enter(order: Order, job: u64, jobs: &mut HashMap<u64, Job>) -> FromEngine {
    match order {
        Order::Store { items, request, done } => {
            jobs.insert(job, Job { count: items.len(), done });
            FromEngine::Store { job, request, items }
        }
        Order::Load { items, deadline_us, request, done } => {
            jobs.insert(job, Job { count: items.len(), done });
            FromEngine::Load { job, deadline_us, request, items }
        }
        Order::Report(report) => report,
    }
}

/// Without a node nothing is touched: the answer is there at once.
fn refuse(order: Order) {
    match order {
        Order::Store { items, done, .. } | Order::Load { items, done, .. } => {
            Job { count: items.len(), done }.fail();
        }
        Order::Report(_) => {}
    }
}

/// A process to be told of the end of. None when it is gone already.
#[expect(
    deprecated,
    reason = "its successor is unsafe for types that lend their descriptor; this one owns it"
)]
fn watch(pid: u32) -> Option<AsyncFd<OwnedFd>> {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).ok()?)?;
    let fd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok()?;
    AsyncFd::with_interest(fd, Interest::READABLE).ok()
}

/// Pid of the next process in quarantine that ends; never, when none is.
async fn a_death(limbo: &[Limbo]) -> u32 {
    let watched = limbo.iter().filter_map(|limbo| {
        let process = limbo.process.as_ref()?;
        Some(Box::pin(async move {
            // An error here would be one of the runtime; the process is then taken for alive.
            match process.readable().await {
                Ok(_) => limbo.pid,
                Err(_) => std::future::pending().await,
            }
        }))
    });
    let watched: Vec<_> = watched.collect();
    if watched.is_empty() {
        return std::future::pending().await;
    }
    futures_util::future::select_all(watched).await.0
}
