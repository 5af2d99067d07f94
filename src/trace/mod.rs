//! Recorded coding sessions: what a replay sends again and the simulator plays.
//!
//! A trace says of every request when it came, how long it was and which blocks its prompt is made of; it holds no
//! text. The one format read today is weka's, as single JSON objects or in this crate's run-length form
//! ([`write_line`]). Readers refuse what is wrong with file, line and field, and take what only differs between
//! producers: times of sub-agents from the session's or from the sub-agent's start, absent or null optional fields,
//! fields nobody here needs.
//!
//! A block's number stands for the block and everything before it (producers number links of a hash chain): prompts
//! that share a number share the whole prefix up to there. Everything in this module and in the simulator rests on
//! that.

mod blocks;
mod info;
mod weka;

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use self::blocks::Blocks;
pub use self::info::{CEILING_BLOCKS, Ceiling, Info, RowTokens, SeenRows};
pub use self::weka::write_line;

/// Bytes of one line or JSON file: the longest recorded session takes some 60 MiB.
const LINE_MAX: u64 = 1 << 30;

/// How far a block's number is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Within its session, sub-agents included.
    Local,
    /// In all sessions that say so.
    Global,
}

/// One conversation with its sub-agents.
#[derive(Clone, Debug, PartialEq)]
pub struct Session {
    pub id: String,
    pub models: Vec<String>,
    /// Tokens of one block.
    pub block_tokens: u32,
    pub scope: Scope,
    /// Tokens of the tools' and the system's part at the front of each prompt, as far as the producer says.
    pub tool_tokens: u32,
    pub system_tokens: u32,
    /// The session's own requests first, then each sub-agent's, in the order in which they were started.
    pub streams: Vec<Stream>,
}

/// Requests that follow from each other.
#[derive(Clone, Debug, PartialEq)]
pub struct Stream {
    /// None for the session itself.
    pub agent: Option<Agent>,
    /// In the producer's order; times do not always ascend.
    pub requests: Vec<Request>,
}

/// Whose stream it is, and what the producer says of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Agent {
    pub id: String,
    pub kind: Option<String>,
    pub status: Option<String>,
    /// Since the session's start.
    pub at: Duration,
    pub lasted: Option<Duration>,
    /// How many of the session's own requests stand before it.
    pub after: usize,
    pub models: Vec<String>,
    pub tool_tokens: u32,
    pub system_tokens: u32,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Since the session's start, also for sub-agents. Whole microseconds.
    pub at: Duration,
    /// Recorded over a streaming connection.
    pub streamed: bool,
    pub model: Option<String>,
    pub input_tokens: u32,
    pub output_tokens: u32,
    /// The prompt's blocks from its begin on. Tokens after the last one are in no block.
    pub blocks: Blocks,
    /// What ended the answer: `tool_use`, `end_turn` or nothing.
    pub stop: String,
    pub input_types: Vec<String>,
    pub output_types: Vec<String>,
    /// How long the answer took.
    pub took: Option<Duration>,
    pub first_token: Option<Duration>,
    /// How long the client waited before it sent this one.
    pub thought: Option<Duration>,
}

impl Session {
    /// All requests in the order of time; those at one time in the order of streams.
    pub fn in_time(&self) -> Vec<(usize, usize)> {
        let mut all: Vec<(usize, usize)> = (0..self.streams.len())
            .flat_map(|s| (0..self.streams[s].requests.len()).map(move |r| (s, r)))
            .collect();
        all.sort_by_key(|&(s, r)| (self.streams[s].requests[r].at, s, r));
        all
    }

    /// From its start to the end of its last answer.
    pub fn lasts(&self) -> Duration {
        let ends = self.requests().map(|r| r.at + r.took.unwrap_or_default());
        ends.max().unwrap_or_default()
    }

    pub fn requests(&self) -> impl Iterator<Item = &Request> {
        self.streams.iter().flat_map(|s| &s.requests)
    }
}

/// Why a trace was not taken.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("failed to read {file}")]
    Io { file: PathBuf, source: std::io::Error },
    #[error("{file} holds no traces: a folder must have *.json in it")]
    Nothing { file: PathBuf },
    #[error("{place}: {what}")]
    Wrong { place: Place, what: String },
    #[error("{place}: the id `{id}` was taken before, by {first}")]
    Twice { place: Place, first: Box<Place>, id: String },
}

/// File, line and field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub file: PathBuf,
    pub line: usize,
    pub field: String,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.file.display(), self.line)?;
        if self.field.is_empty() { Ok(()) } else { write!(f, ": {}", self.field) }
    }
}

/// Reads files and folders of `*.json`, folders in the order of names.
///
/// # Errors
/// At the first thing that is wrong, with its place.
pub fn read(paths: &[PathBuf]) -> Result<Vec<Session>, Error> {
    let mut sessions = Vec::new();
    let mut taken: HashMap<String, Place> = HashMap::new();
    for path in paths {
        for file in files(path)? {
            each_object(&file, &mut |text, line| {
                let session = weka::parse(text, &file, line)?;
                let place = Place { file: file.clone(), line, field: String::new() };
                if let Some(first) = taken.get(&session.id) {
                    let place = Place { field: "id".to_owned(), ..place };
                    return Err(Error::Twice { place, first: Box::new(first.clone()), id: session.id });
                }
                taken.insert(session.id.clone(), place);
                sessions.push(session);
                Ok(())
            })?;
        }
    }
    Ok(sessions)
}

fn files(path: &Path) -> Result<Vec<PathBuf>, Error> {
    let failed = |source| Error::Io { file: path.to_owned(), source };
    if !std::fs::metadata(path).map_err(failed)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut found = Vec::new();
    for entry in std::fs::read_dir(path).map_err(failed)? {
        let file = entry.map_err(failed)?.path();
        if file.extension().is_some_and(|e| e == "json") {
            found.push(file);
        }
    }
    found.sort();
    if found.is_empty() { Err(Error::Nothing { file: path.to_owned() }) } else { Ok(found) }
}

/// Hands over each object's text with the line it begins in. `*.jsonl` has one per line, other files are one. Both
/// may be compressed (`.gz`).
fn each_object(file: &Path, take: &mut dyn FnMut(&str, usize) -> Result<(), Error>) -> Result<(), Error> {
    let failed = |source| Error::Io { file: file.to_owned(), source };
    let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let plain = name.strip_suffix(".gz");
    let opened = File::open(file).map_err(failed)?;
    let mut reader: Box<dyn BufRead> = match plain {
        Some(_) => Box::new(BufReader::new(flate2::read::MultiGzDecoder::new(opened))),
        None => Box::new(BufReader::new(opened)),
    };
    let lines = plain.unwrap_or(&name).ends_with(".jsonl");
    let mut text = String::new();
    for number in 1.. {
        text.clear();
        let mut bounded = reader.by_ref().take(LINE_MAX);
        let read = if lines { bounded.read_line(&mut text) } else { bounded.read_to_string(&mut text) };
        let read = read.map_err(failed)? as u64;
        if read == LINE_MAX {
            let place = Place { file: file.to_owned(), line: number, field: String::new() };
            return Err(Error::Wrong { place, what: format!("more than {LINE_MAX} bytes in one object") });
        }
        if read == 0 {
            break;
        }
        if !text.trim().is_empty() {
            take(&text, number)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
