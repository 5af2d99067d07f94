//! Rounds of a running store: reads rows back to look for rot, and keeps the day's wear in a file.
//!
//! Rows are read through the store's own path, behind everything else that waits there; what is rotten leaves the
//! index and is told as damage. `scrub.rs` decides whose turn it is. Two small files hold what is worth keeping over a
//! restart; each is written whole and renamed, and losing one costs a pass or a day's count.

use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::StreamExt;
use tokio::sync::oneshot;

use super::Store;
use super::budget::{Wear, gigabytes, hour_and_minute};
use super::format::Sequence;
use super::index::Place;
use super::survey::{Survey, Surveyor};
use super::verify::{Checked, Damage, Verification};
use super::work::{Event, Request};
use crate::base::block::{RowKey, Space};
use crate::base::clock::unix_seconds;
use crate::base::fault::{Code, Fault};
use crate::tasks::{Kind, Tasks};

/// Between two looks whether a segment's turn has come.
const LOOK: Duration = Duration::from_secs(20);

/// How long scrub steps aside when loads wait.
const ASIDE: Duration = Duration::from_millis(200);

/// Rows that a verification has in flight: enough that the drive is not idle between two, few enough that a load waits
/// for no more than these.
const ABREAST: usize = 8;

/// Between two writings of the wear's file: what a kill may leave uncounted.
const KEEP: Duration = Duration::from_secs(60);

/// Most of a kept file that is read.
const FILE_MAX: u64 = 64 << 20;

/// Where a store's rounds keep what they know, and how they go.
#[derive(Clone, Debug)]
pub struct Rounds {
    pub wear_file: PathBuf,
    pub scrub_file: PathBuf,
    /// Days of one pass; 0: none.
    pub scrub_days: u32,
    /// Bytes that may be written in a day; 0: no limit.
    pub write_budget: u64,
}

impl Store {
    /// Takes up what was kept, sets the budget, and starts the rounds. Call it before rows are offered. Reads two
    /// small files.
    pub fn begin_rounds(&self, rounds: Rounds, tasks: &Tasks) {
        self.set_write_budget(rounds.write_budget);
        if let Some(text) = read_kept(&rounds.wear_file)
            && let Err(error) = self.0.shared.wear.lock().take_up(&text, unix_seconds())
        {
            tracing::warn!(file = %rounds.wear_file.display(), %error, "what the last day wrote is not known");
        }
        {
            let mut scrub = self.0.shared.scrub.lock();
            scrub.set_period(rounds.scrub_days);
            if let Some(text) = read_kept(&rounds.scrub_file)
                && !scrub.take_up(&text)
            {
                tracing::warn!(file = %rounds.scrub_file.display(), "what was read back when is not known");
            }
        }
        let (store, file, stopping) = (self.clone(), rounds.wear_file.clone(), tasks.stopping());
        tasks.spawn(Kind::Serving, "wear", async move {
            let mut kept = String::new();
            loop {
                let ended = stopping.run_until_cancelled(tokio::time::sleep(KEEP)).await.is_none();
                let text = store.0.shared.wear.lock().to_text();
                if text != kept && keep(&file, &text).await {
                    kept = text;
                }
                if ended {
                    return;
                }
            }
        });
        let store = self.clone();
        tasks.spawn(Kind::Chore, "scrub", async move { store.scrub(&rounds.scrub_file).await });
    }

    /// Most bytes to be written in a day; 0: as many as come.
    pub fn set_write_budget(&self, bytes_per_day: u64) {
        self.0.shared.wear.lock().set_budget(bytes_per_day);
        let gauge = i64::try_from(bytes_per_day).unwrap_or(i64::MAX);
        self.0.shared.metrics.write_budget_bytes.set(gauge);
    }

    /// Everything that is held, summed up. One pass over the index under its lock.
    pub fn survey(&self) -> Survey {
        let attached = self.0.shared.facts.lock().attached.clone();
        let mut surveyor = Surveyor::default();
        self.0.shared.index.lock().each(|space, key, place| surveyor.see(space, key, place));
        let verified = self.0.shared.scrub.lock().verified().clone();
        surveyor.finish(&verified, |space| attached.contains(space))
    }

    /// Reads one row back, when nothing else waits for the drive. What is rotten is dropped.
    pub async fn check(&self, space: Space, key: RowKey) -> Checked {
        let Ok(permit) = self.0.jobs.clone().acquire_owned().await else { return Checked::Gone };
        let (reply, answered) = oneshot::channel();
        self.send(Event::Request(Request::Check { space, key, reply }, permit));
        let checked = answered.await.unwrap_or(Checked::Gone);
        let metrics = &self.0.shared.metrics;
        match &checked {
            Checked::Whole { bytes } => {
                metrics.scrub_rows.inc();
                metrics.scrub_bytes.inc_by(*bytes);
            }
            Checked::Damaged(_) => {
                metrics.scrub_rows.inc();
                metrics.scrub_damaged.inc();
            }
            Checked::Gone => {}
        }
        checked
    }

    /// Reads every row back, at once. `tell` hears after each row how far it is, and ends it with `false`.
    pub async fn verify(&self, mut tell: impl FnMut(&Verification) -> bool) -> Verification {
        let segments = self.held_segments();
        let mut so_far = Verification { segments_total: segments.len(), ..Verification::default() };
        for sequence in segments {
            let rows = self.rows_of(sequence);
            let mut checks = futures_util::stream::iter(rows)
                .map(|(space, key, _)| self.check(space, key))
                .buffered(ABREAST);
            while let Some(checked) = checks.next().await {
                match checked {
                    Checked::Whole { bytes } => {
                        so_far.rows += 1;
                        so_far.bytes += bytes;
                    }
                    Checked::Damaged(damage) => {
                        so_far.rows += 1;
                        so_far.add_damage(damage);
                    }
                    Checked::Gone => {}
                }
                if !tell(&so_far) {
                    return so_far;
                }
            }
            self.was_read_back(sequence);
            so_far.segments += 1;
        }
        so_far.done = true;
        so_far
    }

    pub(super) fn held_segments(&self) -> Vec<Sequence> {
        self.0.shared.index.lock().segments().collect()
    }

    /// Rows of one segment in the order in which they lie.
    fn rows_of(&self, sequence: Sequence) -> Vec<(Space, RowKey, Place)> {
        let index = self.0.shared.index.lock();
        let mut rows: Vec<_> =
            index.rows_of(sequence).map(|(space, key, place, _)| (space, key, place)).collect();
        drop(index);
        rows.sort_unstable_by_key(|(.., place)| place.page);
        rows
    }

    fn was_read_back(&self, sequence: Sequence) {
        self.0.shared.scrub.lock().ended(sequence, unix_seconds());
        self.0.shared.metrics.scrub_segments.inc();
    }

    /// Turn by turn, until dropped.
    async fn scrub(&self, file: &Path) {
        loop {
            tokio::time::sleep(LOOK).await;
            let held = self.held_segments();
            let Some(sequence) = self.next_turn(&held, unix_seconds()) else { continue };
            self.read_back(sequence, true).await;
            let text = self.0.shared.scrub.lock().to_text();
            keep(file, &text).await;
        }
    }

    pub(super) fn next_turn(&self, held: &[Sequence], now_unix: u64) -> Option<Sequence> {
        let mut scrub = self.0.shared.scrub.lock();
        let turn = scrub.choose(held, now_unix)?;
        scrub.begun(now_unix);
        Some(turn)
    }

    /// Reads a segment's rows back one by one, and steps aside for loads.
    pub(super) async fn read_back(&self, sequence: Sequence, paced: bool) {
        let total = self.0.shared.facts.lock().used;
        let mut damaged = 0;
        for (space, key, place) in self.rows_of(sequence) {
            while self.0.shared.metrics.queued_reads.get() > 0 {
                tokio::time::sleep(ASIDE).await;
            }
            if let Checked::Damaged(Damage { file, offset, why, .. }) = self.check(space, key).await {
                tracing::warn!(file, offset, why, "a row has rotted on the drive; it is dropped");
                damaged += 1;
            }
            if paced {
                let pause = self.0.shared.scrub.lock().pause(place.length.into(), total);
                tokio::time::sleep(pause).await;
            }
        }
        tracing::debug!(segment = sequence.0, damaged, "read back");
        self.was_read_back(sequence);
    }

    /// What the day says: the budget is used up, or what is written is not read. Also brings the gauges up to date.
    pub(super) fn wear_faults(&self, capacity: u64) -> Vec<Fault> {
        let now = unix_seconds();
        let wear = self.0.shared.wear.lock();
        let metrics = &self.0.shared.metrics;
        metrics.day_written_bytes.set(i64::try_from(wear.written(now)).unwrap_or(i64::MAX));
        metrics.day_read_bytes.set(i64::try_from(wear.reads(now)).unwrap_or(i64::MAX));
        let budget = spent(&wear, now).map(|cause| Fault::new(Code::StoreBudget, cause));
        let unread = wear.unread(capacity, now).map(|cause| Fault::new(Code::StoreUnread, cause));
        budget.into_iter().chain(unread).collect()
    }
}

fn spent(wear: &Wear, now: u64) -> Option<String> {
    let until = wear.spent_until(now)?;
    Some(format!(
        "{} were written in 24 hours, store.write_budget is {}; no rows are taken until {}",
        gigabytes(wear.written(now)),
        gigabytes(wear.budget()),
        hour_and_minute(until)
    ))
}

fn read_kept(path: &Path) -> Option<String> {
    use std::io::Read;
    let mut text = String::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(FILE_MAX).read_to_string(&mut text));
    match read {
        Ok(_) => Some(text),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            tracing::warn!(file = %path.display(), %error, "failed to read what was kept");
            None
        }
    }
}

/// Writes a file whole and renames it, on a thread that may block. False when it could not be.
async fn keep(path: &Path, text: &str) -> bool {
    let (path, text) = (path.to_owned(), text.to_owned());
    let written = tokio::task::spawn_blocking(move || {
        let beside = path.with_extension("new");
        let mut file =
            std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&beside, &path)
    });
    match written.await {
        Ok(Ok(())) => true,
        Ok(Err(error)) => {
            tracing::warn!(%error, "failed to keep what the store's rounds know");
            false
        }
        Err(_) => false,
    }
}
