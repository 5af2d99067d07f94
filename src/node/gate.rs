//! When clients may use the engine: it is ready, and the canary has judged the cache of this very start.
//!
//! The canary computes a prompt, drops it, and compares what comes back from the drive. Nobody else may use the engine
//! meanwhile, because the check drops the engine's own caches. An engine whose cache was not proved serves without
//! it: the tier is off, with the reason in an alert. A node that is started again beside a running engine does not
//! judge twice: the verdict lies in the run folder, under the engine's id, which never comes back.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::{Parts, write_whole};
use crate::base::fault::{Code, Fault};
use crate::engine::canary::{Order, Verdict};
use crate::engine::{View, canary};
use crate::router::{Fit, Links, Own, Speeds};
use crate::settings::EngineKind;
use crate::tasks::{Kind, log_slow};

/// How long the plugin of an engine that is ready is awaited. It dials four times a second while the engine steps; an
/// engine without requests does not step, so it is made to ([`canary::knock`]) when nobody came within [`KNOCK_AFTER`].
const PLUGIN_PATIENCE: Duration = Duration::from_secs(15);

/// A plugin that found the node when its engine started is there already.
const KNOCK_AFTER: Duration = Duration::from_secs(1);

/// One step finds out that the connection is lost, the next one dials; the third is for a node that was slow.
const KNOCKS: u32 = 3;

/// What is known about the cache of the running engine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Judged {
    pub engine_id: String,
    /// None: not yet.
    pub tier: Option<Result<(), String>>,
    /// The engine came without the plugin.
    pub plugin_missing: bool,
}

impl Judged {
    /// Whether this is about this very engine. Without an id of ours nobody can say.
    fn is_of(&self, view: &View) -> bool {
        !self.engine_id.is_empty() && self.engine_id == view.engine_id
    }

    pub fn fault(&self) -> Option<Fault> {
        let reason = self.tier.as_ref()?.as_ref().err()?;
        let code = if self.plugin_missing { Code::PluginMissing } else { Code::TierOff };
        Some(Fault::new(code, reason.clone()))
    }
}

/// Follows the engine through its lives until the node stops.
pub async fn run(parts: Parts, judge: watch::Sender<Judged>) {
    let stopping = parts.tasks.stopping();
    let mut engine = parts.engine.clone();
    loop {
        let view = engine.borrow_and_update().clone();
        let next = async {
            follow(&parts, &judge, &view).await;
            engine.changed().await
        };
        match stopping.run_until_cancelled(next).await {
            Some(Ok(())) => {}
            // The sender ends with the node only.
            Some(Err(_)) | None => return,
        }
    }
}

async fn follow(parts: &Parts, judge: &watch::Sender<Judged>, view: &View) {
    if !view.is_ready() {
        close(parts, view, format!("its engine is {}", view.phase));
        if parts.door.status().tier_on {
            parts.door.set_tier(false, "the next engine is not checked yet");
        }
        if view.engine_id.is_empty() {
            // An attached engine has no id of ours: what comes back may be another one.
            judge.send_replace(Judged::default());
        }
        return;
    }
    if judge.borrow().engine_id != view.engine_id || judge.borrow().tier.is_none() {
        close(parts, view, "its cache is being checked".into());
        let judged = recall(parts, view).unwrap_or_default();
        let judged = match judged.tier {
            Some(_) => {
                bring_plugin_back(parts, view);
                judged
            }
            None => log_slow("the canary", Duration::from_secs(30), check(parts, view)).await,
        };
        apply(parts, &judged);
        judge.send_replace(judged);
        let pace = f64::from(parts.settings.engine.prefill_tokens_per_s);
        parts.router.begin_engine(Speeds::of_pace(pace), links(parts));
    }
    let fit = match &judge.borrow().tier {
        Some(Err(reason)) => Fit::Strained(format!("it serves without its cache: {reason}")),
        _ => Fit::Well,
    };
    parts.router.set_own(Own { url: view.url.clone(), models: vec![view.served_name.clone()], fit });
}

/// How rows come to the engine: their size is known, the speed of drive and rails is assumed.
fn links(parts: &Parts) -> Links {
    let Some(engine) = parts.door.engine() else { return Links::default() };
    let row_bytes = f64::from(engine.hello.row_bytes);
    let whole = engine.hello.groups.iter().filter(|group| group.kind.needs_whole_prefix());
    let bytes_per_token = whole.map(|group| row_bytes / f64::from(group.tokens_per_row.max(1))).sum();
    Links { bytes_per_token, ..Links::default() }
}

fn close(parts: &Parts, view: &View, why: String) {
    let models = Some(view.served_name.clone()).filter(|name| !name.is_empty());
    parts.router.set_own(Own {
        url: view.url.clone(),
        models: models.into_iter().collect(),
        fit: Fit::Unfit(why),
    });
}

fn verdict_file(parts: &Parts) -> PathBuf {
    parts.places.run.join("canary.json")
}

/// The verdict of a node before this one on the same engine.
fn recall(parts: &Parts, view: &View) -> Option<Judged> {
    let text = std::fs::read(verdict_file(parts)).ok()?;
    let judged: Judged = serde_json::from_slice(&text).ok()?;
    judged.is_of(view).then_some(judged)
}

/// An engine that went on without a node notices the new one at its next request: better at one of ours.
fn bring_plugin_back(parts: &Parts, view: &View) {
    let (tasks, parts, view) = (parts.tasks.clone(), parts.clone(), view.clone());
    tasks.spawn(Kind::Chore, "knock", async move {
        plugin(&parts, &view).await;
    });
}

fn apply(parts: &Parts, judged: &Judged) {
    match &judged.tier {
        Some(Err(reason)) => parts.door.set_tier(false, reason),
        _ => parts.door.set_tier(true, "the canary agrees"),
    }
    let text = serde_json::to_vec(judged).expect("plain data has a JSON form");
    if let Err(error) = write_whole(&verdict_file(parts), &text) {
        tracing::warn!(%error, "failed to keep the canary's verdict; the next node judges again");
    }
}

async fn check(parts: &Parts, view: &View) -> Judged {
    let judged =
        |tier, plugin_missing| Judged { engine_id: view.engine_id.clone(), tier: Some(tier), plugin_missing };
    parts.door.set_tier(true, "to be checked");
    let Some(row_tokens) = plugin(parts, view).await else {
        let seconds = PLUGIN_PATIENCE.as_secs();
        return judged(
            Err(format!("no plugin of {} came to the door within {seconds} s", view.engine_id)),
            true,
        );
    };
    if !parts.settings.engine.canary || parts.settings.engine.kind == EngineKind::Attached {
        // An attached engine is somebody else's: its caches are not ours to drop.
        tracing::warn!("the cache is used without a check: engine.canary is off or the engine is attached");
        return judged(Ok(()), false);
    }
    let order = Order {
        url: &view.url,
        served_name: &view.served_name,
        row_tokens,
        max_model_len: parts.settings.engine.max_model_len,
        seed: &view.engine_id,
    };
    match canary::run(order).await {
        Verdict::Agree { cached } => {
            tracing::info!(cached, engine = view.engine_id, "the canary agrees");
            judged(Ok(()), false)
        }
        Verdict::Differs(how) => {
            tracing::error!(how, engine = view.engine_id, "the canary differs: the cache is off");
            judged(Err(format!("what came back from the drive is not what was computed: {how}")), false)
        }
        Verdict::Inconclusive(why) => {
            tracing::error!(why, engine = view.engine_id, "the canary could not prove the cache: it is off");
            judged(Err(format!("the check could not be made: {why}")), false)
        }
    }
}

/// Waits for the plugin of this engine. Tokens of its largest row.
async fn plugin(parts: &Parts, view: &View) -> Option<u32> {
    for _ in 0..KNOCKS {
        if let Ok(found) = tokio::time::timeout(KNOCK_AFTER, seen(parts, view)).await {
            return found;
        }
        canary::knock(&view.url, &view.served_name).await;
    }
    tokio::time::timeout(PLUGIN_PATIENCE, seen(parts, view)).await.ok().flatten()
}

async fn seen(parts: &Parts, view: &View) -> Option<u32> {
    loop {
        if let Some(facts) = parts.door.engine()
            && (facts.hello.engine_id == view.engine_id || parts.settings.engine.kind == EngineKind::Attached)
        {
            return facts.hello.groups.iter().map(|group| group.tokens_per_row).max();
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_is_good_for_the_engine_it_was_made_of_and_for_none_without_an_id() {
        let judged = |id: &str| Judged { engine_id: id.into(), tier: Some(Ok(())), plugin_missing: false };
        let view = |id: &str| View { engine_id: id.into(), ..View::default() };
        assert!(judged("spark-a-1").is_of(&view("spark-a-1")));
        assert!(!judged("spark-a-1").is_of(&view("spark-a-2")));
        assert!(!judged("").is_of(&view("")), "an attached engine may be another one each time");
    }
}
