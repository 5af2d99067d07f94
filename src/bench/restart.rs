//! How long a start takes: a folder as a store of a million rows leaves it, opened by a new process.
//!
//! The clock runs from before the program is started until that program has looked up a row, read it and found it
//! right. The folder's files are out of the page cache before; the program's own pages are not, because a box has
//! them from the first start on.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

use super::Error;
use crate::base::units::Bytes;
use crate::settings;
use crate::store::{Options, Probe, Restart};

/// Longest that a start may take before it is given up.
const PATIENCE: Duration = Duration::from_secs(300);

/// What a start took, from exec on.
#[derive(Clone, Copy, Debug)]
pub struct Started {
    pub seconds: f64,
    pub inside: Inside,
}

/// What the new process says: its own part of it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Inside {
    pub rows: u64,
    pub restart_s: f64,
    pub open_s: f64,
    pub bytes_per_row: f64,
    pub lookup_4000_ms: f64,
}

impl From<Restart> for Inside {
    fn from(r: Restart) -> Self {
        Self {
            rows: r.rows,
            restart_s: r.restart_s,
            open_s: r.open_s,
            bytes_per_row: r.bytes_per_row,
            lookup_4000_ms: r.lookup_4000_ms,
        }
    }
}

/// First line of the new process: it runs.
const HERE: &str = "here";

/// Makes the folder and starts `program` on it, `times` times.
///
/// # Errors
/// When it cannot be made, or the new process fails.
pub async fn measure(program: &Path, folder: &Path, rows: u64, times: usize) -> Result<Vec<Started>, Error> {
    let probe = Probe::of(rows);
    let made = probe.make(folder).map_err(Error::Store)?;
    let mut all = Vec::new();
    for _ in 0..times {
        probe.drop_cache(folder).map_err(Error::Store)?;
        all.push(one(program, &made, rows).await.map_err(Error::Restart)?);
    }
    Ok(all)
}

async fn one(program: &Path, made: &Options, rows: u64) -> Result<Started, String> {
    let begin = Instant::now();
    let mut child = Command::new(program)
        .args([
            "bench",
            "restart",
            "--rows",
            &rows.to_string(),
            "--capacity",
            &made.capacity.0.to_string(),
            "--dir",
        ])
        .arg(&made.folder)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|e| format!("{}: {e}", program.display()))?;
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let mut next = async || {
        let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
        line.map_err(|_| "no answer".to_owned())?.map_err(|e| e.to_string())?.ok_or("it ended".to_owned())
    };
    if next().await? != HERE {
        return Err("an answer that is not ours".to_owned());
    }
    // From exec until it runs, and from there on what it measured itself.
    let before = begin.elapsed().as_secs_f64();
    let inside: Inside = serde_json::from_str(&next().await?).map_err(|e| e.to_string())?;
    let _ = child.wait().await;
    Ok(Started { seconds: before + inside.restart_s, inside })
}

/// The new process's part. `say` is told one line when it runs and one when it is through.
///
/// # Errors
/// When the store does not open, or holds something else.
pub async fn inside(
    folder: &Path,
    capacity: Bytes,
    rows: u64,
    say: &mut dyn FnMut(&str),
) -> Result<(), Error> {
    say(HERE);
    let probe = Probe::of(rows);
    let settings::Store { io, queue_depth, .. } = settings::Store::default();
    let options = Options { folder: folder.to_owned(), capacity, segment: probe.segment, io, queue_depth };
    let restart = probe.restart(&options).await.map_err(Error::Store)?;
    say(&serde_json::to_string(&Inside::from(restart)).map_err(std::io::Error::other)?);
    Ok(())
}
