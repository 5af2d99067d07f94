//! One command under its guard, seen from the keeper: started, asked to end, waited for, its words kept.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::process::{ChildStdin, Command};

use crate::tasks::{Kind, Tasks};

use super::Own;
use super::guard::{self, Record};
use super::log::Log;

/// How long the pipes may stay open once all processes are gone: somebody outside may hold them.
const DRAIN: Duration = Duration::from_secs(2);

/// What is to be run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    pub program: PathBuf,
    pub args: Vec<String>,
    /// On top of the keeper's own environment, of which nothing of ours goes along.
    pub env: BTreeMap<String, String>,
    /// Working folder.
    pub folder: PathBuf,
}

/// A running command. Dropping it ends the command, by its guard and its grace.
pub struct Child {
    guard: tokio::process::Child,
    words: Option<ChildStdin>,
    record: PathBuf,
    drained: tokio::sync::mpsc::Receiver<()>,
    end: End,
}

/// How far [`Child::ended`] has come. Kept here because it is dropped and called again whenever something else
/// happens first: an end that began anew each time would never come to its own limits.
#[derive(Default)]
struct End {
    sweeping: Option<tokio::task::JoinHandle<io::Result<()>>>,
    /// Why something is left, if so.
    swept: Option<Result<(), String>>,
    drain_until: Option<tokio::time::Instant>,
}

impl Child {
    /// Starts `launch` under a guard. Call it on the keeper's main thread: the kernel ties parent-death signals to
    /// the thread that forked.
    pub fn spawn(
        own: &Own,
        launch: &Launch,
        record: PathBuf,
        grace: Duration,
        log: &Log,
        tasks: &Tasks,
    ) -> io::Result<Self> {
        let mut command: Vec<OsString> = vec![launch.program.clone().into()];
        command.extend(launch.args.iter().map(OsString::from));
        let words = guard::words(own, &record, grace, &command);
        let mut guard = guard::command_of(&words);
        guard::hide(&mut guard);
        guard.envs(&launch.env).current_dir(&launch.folder);
        let mut guard = Command::from(guard);
        guard.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut guard = guard.spawn()?;
        let (done, drained) = tokio::sync::mpsc::channel(1);
        if let Some(pipe) = guard.stdout.take() {
            let (log, done) = (log.clone(), done.clone());
            tasks.spawn(Kind::Chore, "engine stdout", async move {
                log.follow(pipe).await;
                drop(done);
            });
        }
        if let Some(pipe) = guard.stderr.take() {
            let log = log.clone();
            tasks.spawn(Kind::Chore, "engine stderr", async move {
                log.follow(pipe).await;
                drop(done);
            });
        }
        let words = guard.stdin.take();
        Ok(Self { guard, words, record, drained, end: End::default() })
    }

    /// Process group of the command, once the guard has told it.
    pub fn group(&self) -> Option<u32> {
        let record = Record::read(&self.record)?;
        (Some(record.guard.pid) == self.guard.id()).then_some(record.group)
    }

    /// TERM, grace, KILL.
    pub async fn term(&mut self) {
        self.say(b"t").await;
    }

    /// KILL now.
    pub async fn kill(&mut self) {
        self.say(b"k").await;
    }

    async fn say(&mut self, word: &[u8]) {
        // A guard that does not take one byte into an empty pipe is gone: its end is seen elsewhere.
        if let Some(words) = &mut self.words {
            let _ = words.write_all(word).await;
            let _ = words.flush().await;
        }
    }

    /// Waits until nothing of the command is left, and says how it ended. May be dropped and called again: it goes on
    /// where it was.
    pub async fn ended(&mut self) -> String {
        let status = self.guard.wait().await;
        if self.end.swept.is_none() {
            // The guard removes its record when its work is done; what it left is finished here.
            let record = self.record.clone();
            let sweeping = self
                .end
                .sweeping
                .get_or_insert_with(|| tokio::task::spawn_blocking(move || guard::sweep(&record)));
            let swept = sweeping.await;
            self.end.sweeping = None;
            self.end.swept = Some(swept.unwrap_or(Ok(())).map_err(|error| error.to_string()));
        }
        let until = *self.end.drain_until.get_or_insert_with(|| tokio::time::Instant::now() + DRAIN);
        let _ = tokio::time::timeout_at(until, self.drained.recv()).await;
        match (status, &self.end.swept) {
            (_, Some(Err(error))) => error.clone(),
            (Ok(status), _) => guard::describe(status),
            (Err(error), _) => format!("cannot be waited for: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A child whose processes are gone while somebody outside still holds its pipes.
    fn held_open() -> (Child, tokio::sync::mpsc::Sender<()>) {
        let guard = Command::new("true").spawn().unwrap();
        let (open, drained) = tokio::sync::mpsc::channel(1);
        let record = PathBuf::from("/nonexistent/engine.record");
        (Child { guard, words: None, record, drained, end: End::default() }, open)
    }

    #[tokio::test]
    async fn an_end_that_is_interrupted_again_and_again_keeps_its_limits() {
        let (mut child, _open) = held_open();
        child.guard.wait().await.unwrap();
        // Probes of an engine interrupt once a second; here it is at every turn.
        while child.end.drain_until.is_none() {
            assert!(futures_util::poll!(std::pin::pin!(child.ended())).is_pending());
            tokio::task::yield_now().await;
        }
        let until = child.end.drain_until;
        assert!(futures_util::poll!(std::pin::pin!(child.ended())).is_pending(), "the pipes are open");
        assert_eq!(child.end.drain_until, until, "the limit does not move");
        assert!(child.end.sweeping.is_none() && child.end.swept == Some(Ok(())), "swept once");
        child.end.drain_until = Some(tokio::time::Instant::now());
        assert_eq!(child.ended().await, "ended with code 0");
    }
}
