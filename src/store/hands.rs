//! A few threads that do what must not hold up the loop: checksums, making and removing files, plain I/O.
//!
//! The queue has no number of its own: every job belongs to an operation that the loop already counts against its
//! depth. Without threads ([`Hands::inline`]) a job runs where it is given, which is what makes the memory disk's
//! order of operations the same in every run.

use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use parking_lot::Mutex;

type Job = Box<dyn FnOnce() + Send>;

/// Threads with one queue. They end, after what is queued, when this is dropped.
#[derive(Debug)]
pub struct Hands {
    queue: Option<mpsc::Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
}

impl Hands {
    pub fn new(name: &'static str, count: usize) -> std::io::Result<Self> {
        let (queue, jobs) = mpsc::channel::<Job>();
        let jobs = Arc::new(Mutex::new(jobs));
        let work = |jobs: Arc<Mutex<mpsc::Receiver<Job>>>| {
            loop {
                // Taken in a statement of its own: the lock must be free while the job runs.
                let job = jobs.lock().recv();
                let Ok(job) = job else { break };
                job();
            }
        };
        let threads = (0..count)
            .map(|_| {
                let jobs = jobs.clone();
                thread(name, move || work(jobs))
            })
            .collect::<std::io::Result<_>>()?;
        Ok(Self { queue: Some(queue), threads })
    }

    pub fn inline() -> Self {
        Self { queue: None, threads: Vec::new() }
    }

    pub fn give(&self, job: impl FnOnce() + Send + 'static) {
        match &self.queue {
            Some(queue) => queue.send(Box::new(job)).expect("the threads live as long as this"),
            None => job(),
        }
    }
}

impl Drop for Hands {
    fn drop(&mut self) {
        self.queue = None;
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
