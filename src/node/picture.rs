//! What this node tells: the ledger of requests, the picture of both boxes, alerts, and the note to the peer.
//!
//! Everything here reads. The picture is painted once a second from what the parts say of themselves; nothing else in
//! the process waits for it.

use std::time::Duration;

use tokio::sync::{broadcast::error::RecvError, watch};

use super::Parts;
use super::misses::Misses;
use super::pace::Pace;
use crate::api::admin::Picture;
use crate::base::block::Space;
use crate::base::clock::unix_seconds;
use crate::base::fault::{Code, Fault};
use crate::cluster::{Member, MemberState};
use crate::engine::{self, Finger, Pulse};
use crate::observe::health::{Health, HealthFacts, PeerFacts};
use crate::observe::requests::{Request, Written};
use crate::observe::state::{CacheState, EngineState, NodeView, PeerView, State, Tier, Waiting};
use crate::router::{self, InLine, Note, Peer};
use crate::tasks::Kind;

/// Between two pictures.
const PERIOD: Duration = Duration::from_secs(1);
/// Between two looks at the engine's counters.
const BEAT: Duration = Duration::from_secs(2);
/// Silence of running requests that one long step explains: a step is bounded by `max_num_batched_tokens`, and even
/// 16,384 of them at 150 tokens per second, ten times slower than anything that serves, end in two minutes.
const SILENCE: Duration = Duration::from_secs(120);
/// Between two looks of the ledger. Far shorter than its channels take to fill.
const LEDGER_PAUSE: Duration = Duration::from_millis(5);
/// Requests in the picture; the page lists as many.
const REQUESTS: usize = 50;

/// The engine's last beat, and for how long it has not moved while requests ran.
#[derive(Clone, Copy, Debug, Default)]
pub struct Beat {
    pulse: Pulse,
    silent: Duration,
}

/// Follows the engine's own counters.
pub fn watch_pulse(parts: &Parts) -> watch::Receiver<Beat> {
    let (sender, receiver) = watch::channel(Beat::default());
    let parts = parts.clone();
    parts.tasks.clone().spawn(Kind::Chore, "pulse", async move {
        let mut moved_at = parts.clock.now();
        let mut finger = Finger::default();
        loop {
            tokio::time::sleep(BEAT).await;
            let view = parts.engine.borrow().clone();
            let now = parts.clock.now();
            let before = sender.borrow().pulse;
            let pulse = if view.is_ready() { finger.read(&view.url).await.ok() } else { None };
            let still = pulse.is_some_and(|p| p.running > 0 && p.steps.is_some() && p.steps == before.steps);
            if !still {
                moved_at = now;
            }
            sender.send_replace(Beat { pulse: pulse.unwrap_or_default(), silent: now.since(moved_at) });
        }
    });
    receiver
}

/// Writes down every request and where its tokens came from, and learns the engine's pace in passing.
pub async fn keep_ledger(parts: Parts, mut misses: Misses) {
    let (mut outcomes, mut reports) = (parts.router.outcomes(), parts.door.reports());
    let stopping = parts.tasks.stopping();
    let mut pace = Pace::new(parts.settings.engine.prefill_tokens_per_s);
    loop {
        // Both receivers keep their place when the other arm wins.
        tokio::select! {
            () = stopping.cancelled() => return,
            outcome = outcomes.recv() => match outcome {
                Ok(outcome) => {
                    learn(&parts, &mut pace, &outcome);
                    parts.exact.heard(&outcome, is_own(&parts, &outcome));
                    // Polls of the model list would push real requests out of a bounded ledger.
                    if outcome.endpoint.generates() {
                        let engine_id = outcome.engine_id.clone();
                        let miss = misses.look(&parts, &outcome).await;
                        parts.ledger.lock().add_known(Request { miss, ..entry(outcome) }, &engine_id);
                    }
                }
                Err(RecvError::Lagged(missed)) => tracing::warn!(missed, "the ledger fell behind: requests are missing in it"),
                Err(RecvError::Closed) => return,
            },
            report = reports.recv() => match report {
                // What the node asked for itself (the canary) is nobody's traffic.
                Ok(report) if engine::is_own_request(&report.request) => {}
                Ok(report) => {
                    parts.ledger.lock().attach(&report.request, report.sources);
                    if let Some(engine) = parts.door.engine() {
                        let space = Space { namespace: engine.namespace, rank: engine.hello.rank() };
                        parts.store.heat(space, &report.chain, parts.clock.now());
                        parts.cluster.used(space, report.owner.as_ref(), &report.chain);
                        parts.chains.lock().add(&report.request, space, report.chain);
                    }
                }
                Err(RecvError::Lagged(missed)) => tracing::warn!(missed, "the ledger fell behind: sources are missing in it"),
                Err(RecvError::Closed) => return,
            },
        }
        if outcomes.is_empty() && reports.is_empty() {
            // Nobody waits for the ledger: what comes next is taken together, not one by one between two requests.
            tokio::time::sleep(LEDGER_PAUSE).await;
        }
    }
}

/// Whether this node's engine served it.
fn is_own(parts: &Parts, outcome: &router::Outcome) -> bool {
    outcome.node.as_deref() == Some(parts.settings.node.name.as_str())
}

fn learn(parts: &Parts, pace: &mut Pace, outcome: &router::Outcome) {
    let own = is_own(parts, outcome);
    let (Some(usage), Some(ttft), true) = (&outcome.usage, outcome.ttft, own && outcome.stream) else {
        return;
    };
    let Some(prompt) = usage.prompt_tokens else { return };
    // With others in flight the time to the first token says how long the queue was.
    if parts.router.in_flight() > 1 {
        return;
    }
    if let Some(estimate) = pace.learn(prompt.saturating_sub(usage.cached_tokens.unwrap_or(0)), ttft) {
        parts.door.set_pace(estimate);
    }
}

fn entry(outcome: router::Outcome) -> Request {
    let tokens = |count: Option<u64>| count.and_then(|n| u32::try_from(n).ok());
    let millis = |span: Duration| u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
    let usage = outcome.usage.unwrap_or_default();
    let (foreseen, unforeseen) = match outcome.foreseen {
        Some(Ok(foreseen)) => (Some(foreseen), None),
        Some(Err(why)) => (None, Some(why)),
        None => (None, None),
    };
    let reach = foreseen.as_ref().and_then(|foreseen| foreseen.reach(outcome.node.as_deref()?));
    Request {
        id: outcome.id,
        endpoint: outcome.endpoint.name().to_owned(),
        model: outcome.model.unwrap_or_default(),
        node: outcome.node.unwrap_or_default(),
        forwarded_from: outcome.forwarded_from,
        started_unix: outcome.started_unix_s,
        ttft_ms: outcome.ttft.map(millis),
        duration_ms: millis(outcome.duration),
        status: outcome.status,
        prompt_tokens: tokens(usage.prompt_tokens),
        cached_tokens: tokens(usage.cached_tokens),
        completion_tokens: tokens(usage.completion_tokens),
        broken: outcome.end == router::End::Broken,
        why: outcome.why,
        decision: outcome.basis.and_then(|basis| Written::of(&*basis)),
        foreseen_tokens: foreseen.as_ref().map(|foreseen| foreseen.tokens),
        foreseen_cached: reach.map(|reach| reach.all),
        unforeseen,
        miss: None,
        sources: None,
    }
}

/// Paints the picture once a second.
pub fn paint(parts: &Parts, pulse: watch::Receiver<Beat>) -> watch::Receiver<Picture> {
    let (sender, receiver) = watch::channel(Picture::of(&State::default()));
    let parts = parts.clone();
    // An owner: the router and the peer rely on what is painted.
    let stopping = parts.tasks.stopping();
    parts.tasks.clone().spawn(Kind::Owner, "picture", async move {
        let mut every = tokio::time::interval(PERIOD);
        while stopping.run_until_cancelled(every.tick()).await.is_some() {
            let beat = *pulse.borrow();
            let members = parts.cluster.members();
            parts.router.set_peers(members.iter().map(peer).collect());
            let health = health(&parts, &beat);
            parts.alerts.lock().update(&faults(&parts, &beat), parts.clock.now(), unix_seconds());
            let view = view(&parts, &beat, health);
            parts.cluster.tell(note(&parts, &view));
            let peers = members.iter().map(peer_view).collect();
            sender.send_replace(Picture::of(&State::of(unix_seconds(), view, peers)));
        }
    });
    receiver
}

/// What the other nodes hear: the view of this one for their pages, with the router's own words inside.
fn note(parts: &Parts, view: &NodeView) -> serde_json::Value {
    let mut note = view.note();
    note["router"] = serde_json::to_value(parts.router.note()).expect("plain data has a JSON form");
    note
}

fn peer(member: &Member) -> Peer {
    let note: Option<Note> = serde_json::from_value(member.note["router"].clone()).ok();
    Peer { name: member.name.clone(), connected: member.state == MemberState::Connected, note }
}

fn peer_view(member: &Member) -> PeerView {
    PeerView {
        name: member.name.clone(),
        address: member.address.clone(),
        state: match member.state {
            MemberState::Connected => "connected".into(),
            MemberState::Gone => "gone".into(),
        },
        connected: member.state == MemberState::Connected,
        generation: member.generation,
        since_unix: member.since,
        view: None,
    }
    .with_note(&member.note)
}

/// Asked at each `/healthz`.
pub fn health(parts: &Parts, beat: &Beat) -> Health {
    let engine = parts.engine.borrow().clone();
    let members = parts.cluster.members();
    let peers = members.iter().map(|member| {
        let note = peer(member).note.unwrap_or_default();
        PeerFacts {
            name: member.name.clone(),
            connected: member.state == MemberState::Connected,
            serves: note.ready,
            why: if note.why.is_empty() { "no word from it".into() } else { note.why },
        }
    });
    let judged = parts.judged.borrow().clone();
    let tier = (judged.engine_id == engine.engine_id).then_some(judged.tier).flatten();
    let checking = engine.is_ready() && tier.is_none();
    Health::of(&HealthFacts {
        engine_ready: engine.is_ready() && !checking,
        engine_phase: engine.phase.to_string(),
        engine_reason: if checking {
            Some("its cache is being checked".into())
        } else {
            engine.reason.clone()
        },
        running: beat.pulse.running,
        silent: beat.silent,
        silence_allowed: SILENCE,
        plugin_connected: parts.door.engine().is_some(),
        tier,
        drive_read_only: parts.store.status().read_only,
        peers: peers.collect(),
        share: parts.settings.router.share,
    })
}

fn faults(parts: &Parts, beat: &Beat) -> Vec<Fault> {
    let mut faults = Vec::new();
    faults.extend(parts.engine.borrow().fault());
    faults.extend(parts.judged.borrow().fault());
    faults.extend(parts.store.faults());
    faults.extend(parts.door.faults());
    faults.extend(parts.cluster.faults());
    faults.extend(parts.rails.faults());
    faults.extend(parts.exact.faults());
    faults.extend(parts.router.drift().map(|(bias, error)| {
        let how = format!(
            "first tokens come {:.0} % {} than foretold on average, and are {:.0} % off either way",
            bias.abs() * 100.0,
            if bias > 0.0 { "later" } else { "earlier" },
            error * 100.0
        );
        Fault::new(Code::RouterDrift, how)
    }));
    if beat.silent > SILENCE {
        let (running, seconds) = (beat.pulse.running, beat.silent.as_secs());
        faults.push(Fault::new(
            Code::EngineStuck,
            format!("{running} requests run and no step ended for {seconds} s"),
        ));
    }
    faults
}

fn view(parts: &Parts, beat: &Beat, health: Health) -> NodeView {
    let engine = parts.engine.borrow().clone();
    let judged = parts.judged.borrow().clone();
    let tier = (judged.engine_id == engine.engine_id).then_some(judged.tier).flatten();
    let (store, door) = (parts.store.status(), parts.door.status());
    let (requests, totals) = {
        let ledger = parts.ledger.lock();
        (ledger.recent(REQUESTS), ledger.totals())
    };
    let alerts = parts.alerts.lock().active();
    NodeView {
        name: parts.settings.node.name.clone(),
        version: env!("CARGO_PKG_VERSION").into(),
        generation: parts.generation,
        started_unix: parts.started_unix,
        url: super::public_url(parts),
        needs_key: parts.needs_key,
        engine: EngineState {
            phase: engine.phase.to_string(),
            since_unix: engine.since_unix,
            restarts: engine.restarts,
            reason: engine.reason,
            pid: engine.pid,
            served_name: engine.served_name,
            engine_id: engine.engine_id,
            running: beat.pulse.running,
            waiting: waiting(parts),
        },
        cache: CacheState {
            on: tier.as_ref().map(Result::is_ok),
            reason: tier.and_then(Result::err).unwrap_or_default(),
            plugin_connected: door.engine.is_some(),
            drive_io: store.io.clone(),
            drive_read_only: store.read_only.clone(),
            damaged: store.damaged,
            broken_promises: door.broken.clone(),
        },
        tokens: parts.exact.state(),
        tiers: tiers(parts, &store, door.engine.as_ref()),
        totals,
        health,
        alerts,
        rails: parts.rails.view(),
        fabric: parts.cluster.carried_by().to_owned(),
        requests,
    }
}

fn waiting(parts: &Parts) -> Waiting {
    let InLine { interactive, normal, batch } = parts.router.waiting();
    Waiting { interactive, normal, batch }
}

fn tiers(
    parts: &Parts,
    store: &crate::store::Status,
    engine: Option<&crate::api::local::EngineStatus>,
) -> Vec<Tier> {
    let staging = engine.map(|engine| Tier {
        name: "staging".into(),
        rows: engine.rows.into(),
        used_bytes: None,
        capacity_bytes: u64::from(engine.rows) * u64::from(engine.row_bytes),
    });
    let device =
        Tier { name: "device".into(), capacity_bytes: parts.settings.engine.kv_cache.0, ..Tier::default() };
    let drive = Tier {
        name: "drive".into(),
        rows: store.rows,
        used_bytes: Some(store.used),
        capacity_bytes: store.capacity,
    };
    [Some(device), staging, Some(drive)].into_iter().flatten().collect()
}
