//! A few threads that do what must not hold up the loop: checksums, making and removing files, plain I/O.
//!
//! The queue has no number of its own: every job belongs to an operation that the loop already counts against its
//! depth. Without threads ([`Hands::of`]) a job runs where it is given, which is what makes the memory disk's
//! order of operations the same in every run.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};

use super::mem::Mem;

pub type Job = Box<dyn FnOnce() + Send>;

/// Threads with one queue. They end, after what is queued, when this is dropped.
#[derive(Debug)]
pub struct Hands {
    /// `None`: jobs run where they are given.
    queue: Option<Arc<Queue>>,
    /// Whose jobs a test may hold up, then.
    of: Option<Mem>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Queue {
    /// Guards: what is to be done, and how many sleep. Never held while a job runs.
    state: Mutex<State>,
    bell: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// Threads that sleep and have not been rung for.
    idle: usize,
    closed: bool,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Queue({})", self.state.lock().jobs.len())
    }
}

impl Queue {
    /// Wakes a thread only when one sleeps: a thread that has just ended a job takes the next one without being rung
    /// for, which for rows of 128 KiB is most of what a job would cost otherwise.
    fn push(&self, job: Job) {
        let mut state = self.state.lock();
        state.jobs.push_back(job);
        if state.idle > 0 {
            state.idle -= 1;
            self.bell.notify_one();
        }
    }

    /// The next job. `None` when there is none and none will come.
    fn next(&self) -> Option<Job> {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            if state.closed {
                return None;
            }
            state.idle += 1;
            self.bell.wait(&mut state);
        }
    }
}

impl Hands {
    pub fn new(name: &'static str, count: usize) -> std::io::Result<Self> {
        let queue = Arc::new(Queue::default());
        let threads = (0..count)
            .map(|_| {
                let queue = queue.clone();
                thread(name, move || {
                    while let Some(job) = queue.next() {
                        job();
                    }
                })
            })
            .collect::<std::io::Result<_>>()?;
        Ok(Self { queue: Some(queue), of: None, threads })
    }

    #[cfg(test)]
    pub fn inline() -> Self {
        Self { queue: None, of: None, threads: Vec::new() }
    }

    /// Jobs run where they are given, unless this drive holds them up.
    pub fn of(mem: Mem) -> Self {
        Self { queue: None, of: Some(mem), threads: Vec::new() }
    }

    pub fn give(&self, job: impl FnOnce() + Send + 'static) {
        match &self.queue {
            Some(queue) => queue.push(Box::new(job)),
            None => match &self.of {
                Some(mem) => mem.do_job(Box::new(job)),
                None => job(),
            },
        }
    }
}

impl Drop for Hands {
    fn drop(&mut self) {
        if let Some(queue) = &self.queue {
            queue.state.lock().closed = true;
            queue.bell.notify_all();
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// A thread of the store. A panic in one ends the process: others wait for it, and rows that a drive may still write
/// to must not be given back because somebody unwound.
pub fn thread(name: &str, work: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.to_owned()).spawn(move || {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        if outcome.is_err() {
            tracing::error!("a thread of the store panicked; the process ends");
            std::process::abort();
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn everything_given_is_done_before_the_hands_are_gone() {
        for hands in [Hands::new("test", 3).unwrap(), Hands::inline()] {
            let done = Arc::new(AtomicUsize::new(0));
            for _ in 0..100 {
                let done = done.clone();
                hands.give(move || {
                    done.fetch_add(1, Ordering::Relaxed);
                });
            }
            drop(hands);
            assert_eq!(done.load(Ordering::Relaxed), 100);
        }
    }
}
