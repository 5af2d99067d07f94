//! The files tier that vLLM brings, on the same folder, for comparison: `fs.py` drives vLLM's own code in a child.
//!
//! One child serves the whole run. It answers one line per order. That it cannot be had, or fails, is a sentence for
//! people and leaves its figures out; it never fails the measurement.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use super::stats::Cost;

const SCRIPT: &str = include_str!("fs.py");

/// Longest that one answer may take. Importing vLLM takes some ten seconds, a slow drive as much for one pass.
const PATIENCE: Duration = Duration::from_secs(180);

/// The child. It ends when this is dropped.
#[derive(Debug)]
pub struct Tier {
    _child: Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Tier {
    /// Starts `python` and waits until vLLM is imported.
    ///
    /// # Errors
    /// Why it cannot be had.
    pub async fn start(python: &Path) -> Result<Self, String> {
        let mut child = Command::new(python)
            .args(["-c", SCRIPT])
            // Nothing of the tier needs a device, and nothing of it may ask the network.
            .envs([("VLLM_LOGGING_LEVEL", "ERROR"), ("HF_HUB_OFFLINE", "1"), ("VLLM_NO_USAGE_STATS", "1")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| format!("{}: {e}", python.display()))?;
        let orders = child.stdin.take().expect("piped");
        let answers = BufReader::new(child.stdout.take().expect("piped")).lines();
        let mut tier = Self { _child: child, orders, answers };
        tier.answer().await.map_err(|e| format!("{} does not drive vLLM's tier: {e}", python.display()))?;
        Ok(tier)
    }

    /// Makes an area and a folder for it.
    ///
    /// # Errors
    /// What the tier says.
    pub async fn begin(&mut self, folder: &Path, row_bytes: u32, rows: u32) -> Result<(), String> {
        let folder = folder.to_str().ok_or("the folder's name is no text")?;
        let order = json!({ "do": "begin", "folder": folder, "row_bytes": row_bytes, "rows": rows });
        self.order(&order).await.map(drop)
    }

    /// Stores every row once and loads every row once, and removes the files.
    ///
    /// # Errors
    /// What the tier says.
    pub async fn round(&mut self) -> Result<(Cost, Cost), String> {
        let write = cost(&self.order(&json!({ "do": "store" })).await?)?;
        let read = cost(&self.order(&json!({ "do": "load" })).await?)?;
        self.order(&json!({ "do": "clear" })).await?;
        Ok((write, read))
    }

    /// Ends the tier and removes its folder.
    ///
    /// # Errors
    /// What the tier says.
    pub async fn end(&mut self) -> Result<(), String> {
        self.order(&json!({ "do": "end" })).await.map(drop)
    }

    async fn order(&mut self, order: &Value) -> Result<Value, String> {
        let line = format!("{order}\n");
        self.orders.write_all(line.as_bytes()).await.map_err(|e| e.to_string())?;
        self.answer().await
    }

    async fn answer(&mut self) -> Result<Value, String> {
        let line = tokio::time::timeout(PATIENCE, self.answers.next_line());
        let line = line.await.map_err(|_| "no answer".to_owned())?.map_err(|e| e.to_string())?;
        let answer: Value = serde_json::from_str(&line.ok_or("it ended")?).map_err(|e| e.to_string())?;
        match answer.get("error").and_then(Value::as_str) {
            Some(error) => Err(error.to_owned()),
            None => Ok(answer),
        }
    }
}

fn cost(answer: &Value) -> Result<Cost, String> {
    let number =
        |name: &str| answer.get(name).and_then(Value::as_f64).ok_or(format!("no {name} in the answer"));
    Ok(Cost { bytes: number("bytes")? as u64, seconds: number("seconds")?, cpu: number("cpu")? })
}

/// The Python of a vLLM environment under `cache`, as `provision` makes them: the newest one.
///
/// # Errors
/// Why there is none.
pub fn python_under(cache: &Path) -> Result<PathBuf, String> {
    let mut found: Vec<_> = std::fs::read_dir(cache)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("venv-"))
        .map(|entry| entry.path().join("bin/python"))
        .filter_map(|python| Some((python.metadata().ok()?.modified().ok()?, python)))
        .collect();
    found.sort();
    let newest = found.pop().map(|(_, python)| python);
    newest.ok_or_else(|| {
        format!("no vLLM under {}; `spark-kv provision` makes one, or name one by --python", cache.display())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_python_without_vllm_is_a_sentence() {
        let folder = tempfile::tempdir().unwrap();
        assert!(python_under(folder.path()).unwrap_err().contains("--python"));
        let missing = Tier::start(&folder.path().join("python")).await.unwrap_err();
        assert!(missing.contains("python"), "{missing}");
        // A program that ends at once, as a Python does whose import fails.
        let failing = Tier::start(Path::new("/bin/false")).await.unwrap_err();
        assert!(failing.contains("does not drive"), "{failing}");
    }

    #[test]
    fn an_answer_without_figures_is_refused() {
        assert!(cost(&json!({ "seconds": 1.0, "cpu": 1.0 })).is_err());
        let whole = cost(&json!({ "seconds": 2.0, "cpu": 1.0, "bytes": 8 })).unwrap();
        assert_eq!(whole, Cost { bytes: 8, seconds: 2.0, cpu: 1.0 });
    }
}
