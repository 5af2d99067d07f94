//! What the keeper tells everybody else about the engine: one small JSON file, written whole and renamed.
//!
//! The keeper is the only writer. Readers poll: a file survives the death of either side, needs no connection to
//! mend, and can be read by a person. A view whose keeper is dead says nothing about now, so it reads as Stopped.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::base::fault::{Code, Fault};
use crate::tasks::{Kind, Tasks};

use super::process::Identity;

/// Longest view that is read: the reason is clipped well below.
const SIZE_MAX: u64 = 64 << 10;

/// Longest reason that is kept, in bytes.
const REASON_MAX: usize = 2000;

/// How often the file is looked at. A quarter of a second is short beside an engine's start and costs one `stat`.
const POLL: Duration = Duration::from_millis(250);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Not running. With a reason: it will be started again, or the keeper is gone.
    #[default]
    Stopped,
    /// Running, not answering yet.
    Starting,
    /// Answers `/health` and serves the model.
    Ready,
    /// Asked to end.
    Stopping,
    /// Given up after too many crashes. Only a restart of spark-kv tries again.
    Failed,
}

/// The phase in a word, for people and for the state.
impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Stopped => "stopped",
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Stopping => "stopping",
            Self::Failed => "failed",
        })
    }
}

/// The engine as the keeper sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct View {
    pub phase: Phase,
    /// Process group of the engine while it runs.
    pub pid: Option<u32>,
    /// When this phase began, seconds since 1970.
    pub since_unix: u64,
    /// Starts after the first one, in this keeper's life.
    pub restarts: u32,
    /// Why it is not ready, or the last line it said while it starts. A fragment for people, clipped.
    pub reason: Option<String>,
    /// `http://127.0.0.1:PORT` of the engine.
    pub url: String,
    /// `spark-<node>-<root>-<generation>`; never used twice.
    pub engine_id: String,
    /// Name clients use for the model.
    pub served_name: String,
    /// Folder of the model.
    pub model: PathBuf,
    /// Who wrote this.
    pub keeper: Option<Identity>,
}

impl View {
    pub fn is_ready(&self) -> bool {
        self.phase == Phase::Ready
    }

    /// What an operator should be told, if anything.
    pub fn fault(&self) -> Option<Fault> {
        let cause = || self.reason.clone().unwrap_or_else(|| "no reason was given".into());
        match self.phase {
            Phase::Failed => Some(Fault::new(Code::EngineCrashLoop, cause())),
            Phase::Stopped if self.reason.is_some() => Some(Fault::new(Code::EngineDown, cause())),
            Phase::Stopped | Phase::Starting | Phase::Ready | Phase::Stopping => None,
        }
    }

    /// Replaces the file at `path` as a whole.
    pub fn write(&self, path: &Path) -> std::io::Result<()> {
        let mut view = self.clone();
        if let Some(reason) = &mut view.reason {
            clip(reason, REASON_MAX);
        }
        super::process::write_whole(path, &serde_json::to_vec(&view)?, 0o600)
    }

    /// Reads the file. No file, an unreadable one and one of a dead keeper are all a stopped engine with a reason.
    pub fn read(path: &Path) -> Self {
        let stopped = |reason: &str| Self { reason: Some(reason.into()), ..Self::default() };
        let Ok(bytes) = super::process::read_bounded(path, SIZE_MAX) else {
            return stopped("no keeper has said anything about an engine yet");
        };
        match serde_json::from_slice::<Self>(&bytes) {
            Err(_) => stopped("the keeper's view of the engine cannot be read"),
            Ok(view) if view.keeper.is_some_and(Identity::lives) => view,
            Ok(view) => Self {
                phase: Phase::Stopped,
                pid: None,
                reason: Some("the keeper that looked after the engine is gone".into()),
                ..view
            },
        }
    }
}

/// Follows the file until the node stops.
pub fn watch_view(path: PathBuf, tasks: &Tasks) -> watch::Receiver<View> {
    let (tell, told) = watch::channel(View::read(&path));
    tasks.spawn(Kind::Chore, "engine view", async move {
        loop {
            tokio::time::sleep(POLL).await;
            if tell.is_closed() {
                return;
            }
            let seen = View::read(&path);
            tell.send_if_modified(|view| {
                let changed = *view != seen;
                *view = seen;
                changed
            });
        }
    });
    told
}

/// Cuts `text` to at most `max` bytes at a character's edge.
fn clip(text: &mut String, max: usize) {
    if text.len() > max {
        let end = (0..=max).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
        text.truncate(end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready(keeper: Identity) -> View {
        View { phase: Phase::Ready, keeper: Some(keeper), engine_id: "spark-a-0-1".into(), ..View::default() }
    }

    #[test]
    fn a_view_of_a_living_keeper_reads_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("engine.json");
        let view = ready(Identity::own());
        view.write(&path).unwrap();
        assert_eq!(View::read(&path), view);
        assert_eq!(view.fault(), None);
    }

    #[test]
    fn a_view_of_a_dead_keeper_is_a_stopped_engine_with_a_reason() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("engine.json");
        // Same pid, another start: the number was given to somebody else since.
        let reused = Identity { started: 1, ..Identity::own() };
        ready(reused).write(&path).unwrap();
        let read = View::read(&path);
        assert_eq!(read.phase, Phase::Stopped);
        assert_eq!(read.fault().unwrap().code, Code::EngineDown);
    }

    #[test]
    fn garbage_and_nothing_are_a_stopped_engine() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("engine.json");
        assert_eq!(View::read(&path).phase, Phase::Stopped);
        std::fs::write(&path, b"{\"phase\":\"ready").unwrap();
        assert_eq!(View::read(&path).phase, Phase::Stopped);
    }

    #[test]
    fn a_long_reason_is_clipped_at_a_characters_edge() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("engine.json");
        let view = View { reason: Some("ä".repeat(70_000)), ..ready(Identity::own()) };
        view.write(&path).unwrap();
        assert_eq!(View::read(&path).reason.unwrap().len(), REASON_MAX);
    }

    #[tokio::test]
    async fn a_watcher_sees_the_next_view() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("engine.json");
        let tasks = Tasks::new();
        let mut views = watch_view(path.clone(), &tasks);
        assert_eq!(views.borrow().phase, Phase::Stopped);
        ready(Identity::own()).write(&path).unwrap();
        views.wait_for(View::is_ready).await.unwrap();
        tasks.stop(Duration::from_secs(5)).await;
    }
}
