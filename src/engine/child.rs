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
        Ok(Self { guard, words, record, drained })
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

    /// Waits until nothing of the command is left, and says how it ended. May be dropped and called again.
    pub async fn ended(&mut self) -> String {
        let status = self.guard.wait().await;
        let record = self.record.clone();
        // The guard removes its record when its work is done; what it left is finished here.
        let swept = tokio::task::spawn_blocking(move || guard::sweep(&record)).await;
        let _ = tokio::time::timeout(DRAIN, self.drained.recv()).await;
        match (status, swept) {
            (_, Ok(Err(error))) => error.to_string(),
            (Ok(status), _) => guard::describe(status),
            (Err(error), _) => format!("cannot be waited for: {error}"),
        }
    }
}
