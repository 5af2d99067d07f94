//! The engine's log: what its processes say, in a file of bounded size and a short tail in memory.
//!
//! Reading must never stop: an engine whose pipe is full stands still. So a drive that takes nothing more costs
//! lines, which are counted, and nothing else.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt};

/// Size at which `engine.log` becomes `engine.log.1`; there is no `.2`.
pub const FILE_MAX: u64 = 16 << 20;

/// Lines and bytes of a line that the tail keeps.
const TAIL_LINES: usize = 200;
const TAIL_LINE: usize = 2000;

/// A longer line is cut into several.
const LINE_MAX: usize = 16 << 10;

/// A longer line of progress is cut.
const PROGRESS: usize = 160;

/// How lines of the keeper begin.
const OWN_WORD: &str = "---";

type Listener = Box<dyn Fn(&str) + Send + Sync>;

/// Cheap to clone.
#[derive(Clone)]
pub struct Log(Arc<Shared>);

struct Shared {
    path: PathBuf,
    file_max: u64,
    listener: Option<Listener>,
    /// Guards the file and the tail: one line is written at a time.
    inner: Mutex<Inner>,
}

struct Inner {
    file: Option<File>,
    size: u64,
    lost: u64,
    tail: VecDeque<String>,
}

impl Log {
    /// Appends to the file at `path`. `listener` hears every line.
    pub fn open(path: &Path, file_max: u64, listener: Option<Listener>) -> io::Result<Self> {
        let file = open(path)?;
        let inner = Inner { size: file.metadata()?.len(), file: Some(file), lost: 0, tail: VecDeque::new() };
        Ok(Self(Arc::new(Shared { path: path.to_owned(), file_max, listener, inner: Mutex::new(inner) })))
    }

    /// Writes one line, without its end.
    pub fn line(&self, bytes: &[u8]) {
        let text = String::from_utf8_lossy(&bytes[..bytes.len().min(TAIL_LINE)]);
        let text = text.trim_end().to_owned();
        if let Some(listener) = &self.0.listener {
            listener(&text);
        }
        let mut inner = self.0.inner.lock();
        inner.append(&self.0, bytes);
        if inner.tail.len() == TAIL_LINES {
            inner.tail.pop_front();
        }
        inner.tail.push_back(text);
    }

    /// The last lines, oldest first.
    pub fn tail(&self, lines: usize) -> Vec<String> {
        let inner = self.0.inner.lock();
        inner.tail.iter().skip(inner.tail.len().saturating_sub(lines)).cloned().collect()
    }

    /// The last line that says anything, if there is one since the keeper's own last word.
    pub fn last(&self) -> Option<String> {
        let inner = self.0.inner.lock();
        let line = inner.tail.iter().rev().find(|line| !line.trim().is_empty())?;
        (!line.starts_with(OWN_WORD)).then(|| line.trim().chars().take(PROGRESS).collect())
    }

    /// A line of the keeper itself.
    pub fn note(&self, text: &str) {
        self.line(format!("{OWN_WORD} {text}").as_bytes());
    }

    /// Lines that could not be written.
    pub fn lost(&self) -> u64 {
        self.0.inner.lock().lost
    }

    /// Copies `pipe` line by line until it ends. Progress bars overwrite their line: each state is a line here.
    pub async fn follow(&self, mut pipe: impl AsyncRead + Unpin) {
        let mut buffer = vec![0; LINE_MAX];
        let mut filled = 0;
        loop {
            match pipe.read(&mut buffer[filled..]).await {
                Ok(0) | Err(_) => break,
                Ok(n) => filled += n,
            }
            let mut from = 0;
            while let Some(end) = buffer[from..filled].iter().position(|b| matches!(b, b'\n' | b'\r')) {
                if end > 0 || buffer[from] == b'\n' {
                    self.line(&buffer[from..from + end]);
                }
                from += end + 1;
            }
            if from == 0 && filled == buffer.len() {
                self.line(&buffer);
                from = filled;
            }
            buffer.copy_within(from..filled, 0);
            filled -= from;
        }
        if filled > 0 {
            self.line(&buffer[..filled]);
        }
    }
}

impl Inner {
    fn append(&mut self, shared: &Shared, line: &[u8]) {
        let length = line.len() as u64 + 1;
        if self.size + length > shared.file_max {
            self.rotate(&shared.path);
        }
        let written = self.file.as_mut().map(|file| file.write_all(&[line, b"\n"].concat()));
        match written {
            Some(Ok(())) => self.size += length,
            Some(Err(_)) | None => {
                if self.lost == 0 {
                    tracing::warn!(path = %shared.path.display(), "lines of the engine's log are lost");
                }
                self.lost += 1;
            }
        }
    }

    fn rotate(&mut self, path: &Path) {
        let mut older = path.as_os_str().to_owned();
        older.push(".1");
        // When the old file cannot be moved away it is cut instead: the bound comes before the history.
        if std::fs::rename(path, &older).is_err() {
            let _ = std::fs::remove_file(path);
        }
        self.file = open(path).ok();
        self.size = 0;
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(file_max: u64) -> (tempfile::TempDir, Log) {
        let dir = tempfile::tempdir().unwrap();
        let log = Log::open(&dir.path().join("engine.log"), file_max, None).unwrap();
        (dir, log)
    }

    #[test]
    fn the_files_stay_within_their_bound_and_hold_the_newest_lines() {
        let (dir, log) = log(1000);
        for number in 0..500 {
            log.line(format!("line {number:04}").as_bytes());
        }
        let size = |name: &str| std::fs::metadata(dir.path().join(name)).unwrap().len();
        assert!(size("engine.log") <= 1000 && size("engine.log.1") <= 1000);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
        let newest = std::fs::read_to_string(dir.path().join("engine.log")).unwrap();
        assert!(newest.ends_with("line 0499\n"), "{newest}");
        assert_eq!(log.tail(1000).len(), TAIL_LINES);
        assert_eq!(log.tail(2), ["line 0498", "line 0499"]);
    }

    #[test]
    fn a_restart_goes_on_in_the_same_file_and_keeps_the_bound() {
        let (dir, first) = log(100);
        first.line(&[b'x'; 80]);
        drop(first);
        let path = dir.path().join("engine.log");
        let second = Log::open(&path, 100, None).unwrap();
        second.line(&[b'y'; 30]);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 31);
        assert_eq!(std::fs::metadata(dir.path().join("engine.log.1")).unwrap().len(), 81);
    }

    #[tokio::test]
    async fn a_pipe_is_cut_into_lines_of_bounded_length() {
        let (_dir, log) = log(FILE_MAX);
        let mut said = b"one\n\nprogress 1\rprogress 2\r\n".to_vec();
        said.extend(vec![b'x'; LINE_MAX + 5]);
        said.extend(b"\nlast");
        log.follow(&said[..]).await;
        let tail = log.tail(100);
        assert_eq!(&tail[..2], ["one", ""]);
        assert!(tail.contains(&"progress 1".to_owned()) && tail.contains(&"progress 2".to_owned()));
        assert_eq!(tail.last().unwrap(), "last");
        assert!(tail.iter().all(|line| line.len() <= TAIL_LINE));
        assert_eq!(log.last().as_deref(), Some("last"));
        log.note("the engine ended");
        assert_eq!(log.last(), None);
    }
}
