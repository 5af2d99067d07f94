//! The one picture of both boxes: what `/api/v1/state`, the page, `spark-kv status` and the peer get.
//!
//! A node describes itself in a [`NodeView`] and sends the same to its peer, so that either box shows both. Every field
//! has a default: a peer of another version, or one that says nothing yet, is shown with what it said.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::alerts::Alert;
use super::health::Health;
use super::requests::{Request, Totals};
use crate::rails;

/// Requests in the state, of both boxes together.
pub const REQUESTS: usize = 50;

/// What a note to the peer may be, in bytes. The heartbeat carries it.
const NOTE_MAX: usize = 48 << 10;

/// The engine as people want to know it. Reads the keeper's view of it as it is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct EngineState {
    /// stopped, starting, ready, stopping or failed.
    pub phase: String,
    pub since_unix: u64,
    pub restarts: u32,
    pub reason: Option<String>,
    pub pid: Option<u32>,
    pub served_name: String,
    pub engine_id: String,
    /// Requests in the engine now.
    pub running: u32,
    /// Requests in line for room at an engine, by their class.
    pub waiting: Waiting,
}

/// Requests in line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Waiting {
    pub interactive: usize,
    pub normal: usize,
    pub batch: usize,
}

impl Waiting {
    pub fn all(self) -> usize {
        self.interactive + self.normal + self.batch
    }
}

/// The cache's switch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheState {
    /// None: not judged yet.
    pub on: Option<bool>,
    pub reason: String,
    pub plugin_connected: bool,
    pub drive_io: String,
    pub drive_read_only: Option<String>,
    /// Rows that failed their check and were not used.
    pub damaged: u64,
    /// Rows that a lookup had promised and a load did not bring, by reason, since the node started.
    pub broken_promises: BTreeMap<String, u64>,
}

/// Whether token ids are exact.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TokensState {
    pub exact: bool,
    /// Why they are guessed.
    pub why: String,
    /// Probes that agreed with the engine at its start, and requests that were compared with it since, id by id.
    pub proved: u32,
    pub checked: u64,
}

/// One place that rows live in.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Tier {
    /// device, staging, drive.
    pub name: String,
    pub rows: u64,
    /// None: only the engine knows.
    pub used_bytes: Option<u64>,
    pub capacity_bytes: u64,
}

/// What one box says of itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeView {
    pub name: String,
    pub version: String,
    pub generation: u64,
    pub started_unix: u64,
    /// Address of the public port.
    pub url: String,
    /// Requests need an API key.
    pub needs_key: bool,
    pub engine: EngineState,
    pub cache: CacheState,
    pub tokens: TokensState,
    pub tiers: Vec<Tier>,
    pub totals: Totals,
    pub health: Health,
    pub alerts: Vec<Alert>,
    pub rails: rails::View,
    /// What rows travel over between boxes, and why.
    pub fabric: String,
    /// The newest first. In a note: those that the peer's page shows.
    pub requests: Vec<Request>,
}

impl NodeView {
    /// For the peer: bounded, the oldest requests left out first.
    pub fn note(&self) -> serde_json::Value {
        let mut small = self.clone();
        small.requests.truncate(20);
        small.alerts.truncate(20);
        loop {
            let size = serde_json::to_vec(&small).map_or(0, |bytes| bytes.len());
            if size <= NOTE_MAX || (small.requests.is_empty() && small.alerts.is_empty()) {
                return serde_json::to_value(&small).unwrap_or_default();
            }
            if small.requests.pop().is_none() {
                small.alerts.pop();
            }
        }
    }
}

/// The other box as this one sees it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PeerView {
    pub name: String,
    pub address: String,
    /// connected, gone and so on, in the cluster's words.
    pub state: String,
    pub connected: bool,
    pub generation: u64,
    /// When that state began.
    pub since_unix: u64,
    /// What it said of itself last. None: nothing yet.
    pub view: Option<NodeView>,
}

impl PeerView {
    /// `note` is what the peer said of itself; anything that is not a [`NodeView`] is no view.
    pub fn with_note(mut self, note: &serde_json::Value) -> Self {
        self.view = match note {
            serde_json::Value::Object(fields) if !fields.is_empty() => NodeView::deserialize(note).ok(),
            _ => None,
        };
        self
    }
}

/// Everything the page shows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct State {
    pub now_unix: u64,
    /// This box.
    pub node: NodeView,
    pub peers: Vec<PeerView>,
    /// Last requests of both boxes, newest first.
    pub requests: Vec<Request>,
    /// Prompt tokens by source, of both boxes.
    pub totals: Totals,
    /// What is wrong, on both boxes; the node is named.
    pub alerts: Vec<NodeAlert>,
}

/// An alert and the box that raised it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeAlert {
    pub node: String,
    #[serde(flatten)]
    pub alert: Alert,
}

impl State {
    /// Puts both boxes together. A peer that is gone keeps its last words; its totals still count, because those
    /// tokens were spared.
    pub fn of(now_unix: u64, node: NodeView, peers: Vec<PeerView>) -> Self {
        let views = || std::iter::once(&node).chain(peers.iter().filter_map(|peer| peer.view.as_ref()));
        let mut totals = Totals::default();
        // Saturating: a peer may say what it likes, and whoever paints this also tells the router who is there.
        for Totals { prompts, prompt, device, staging, drive, peer, computed } in views().map(|v| v.totals) {
            totals.prompts = totals.prompts.saturating_add(prompts);
            totals.prompt = totals.prompt.saturating_add(prompt);
            totals.device = totals.device.saturating_add(device);
            totals.staging = totals.staging.saturating_add(staging);
            totals.drive = totals.drive.saturating_add(drive);
            totals.peer = totals.peer.saturating_add(peer);
            totals.computed = totals.computed.saturating_add(computed);
        }
        let requests = together(views().flat_map(|view| view.requests.iter().cloned()));
        let connected = |name: &str| peers.iter().any(|peer| peer.name == name && peer.connected);
        let alerts = views()
            .filter(|view| view.name == node.name || connected(&view.name))
            .flat_map(|view| {
                view.alerts.iter().map(|alert| NodeAlert { node: view.name.clone(), alert: alert.clone() })
            })
            .collect();
        let mut state = Self { now_unix, peers, requests, totals, alerts, ..Self::default() };
        state.node = NodeView { requests: Vec::new(), ..node };
        for view in state.peers.iter_mut().filter_map(|peer| peer.view.as_mut()) {
            view.requests = Vec::new();
        }
        state
    }
}

/// One line per request. One that was forwarded is known to both boxes: the box that took it in knows how long the
/// client waited, the box that computed it knows where its tokens came from.
fn together(all: impl Iterator<Item = Request>) -> Vec<Request> {
    let mut seen: Vec<Request> = Vec::new();
    for request in all {
        let twin = seen.iter_mut().find(|held| {
            held.id == request.id
                && held.node == request.node
                && held.forwarded_from.is_some() != request.forwarded_from.is_some()
        });
        match twin {
            None => seen.push(request),
            Some(held) => {
                let origin = held.forwarded_from.clone().or_else(|| request.forwarded_from.clone());
                let sources = held.sources.or(request.sources);
                if held.forwarded_from.is_some() {
                    *held = request;
                }
                held.forwarded_from = origin;
                held.sources = sources;
            }
        }
    }
    seen.sort_by_key(|request| std::cmp::Reverse(request.started_unix));
    seen.truncate(REQUESTS);
    seen
}

/// Where a running node says how it is reached.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeFile {
    pub url: String,
    pub pid: u32,
    pub name: String,
    pub started_unix: u64,
    /// Opens what tells about requests, where keys are in use. Made at each start; the file is its owner's only.
    pub key: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::frame::Sources;

    fn request(id: &str, node: &str, started: u64) -> Request {
        Request { id: id.into(), node: node.into(), started_unix: started, ..Request::default() }
    }

    #[test]
    fn a_note_is_bounded_and_reads_back() {
        let mut view = NodeView { name: "a".into(), ..NodeView::default() };
        view.requests = (0..500).map(|n| Request { why: "w".repeat(400), ..request("r", "a", n) }).collect();
        view.alerts = (0..500).map(|_| Alert { cause: "c".repeat(5000), ..Alert::default() }).collect();
        let note = view.note();
        assert!(serde_json::to_vec(&note).unwrap().len() <= NOTE_MAX);
        let peer = PeerView::default().with_note(&note);
        assert_eq!(peer.view.unwrap().name, "a");
    }

    #[test]
    fn a_peer_that_says_nothing_or_nonsense_has_no_view() {
        for note in [serde_json::json!(null), serde_json::json!({}), serde_json::json!({ "tiers": 5 })] {
            assert_eq!(PeerView::default().with_note(&note).view, None, "{note}");
        }
        let newer = serde_json::json!({ "name": "b", "invented_later": [1] });
        assert_eq!(PeerView::default().with_note(&newer).view.unwrap().name, "b");
    }

    #[test]
    fn a_peer_that_says_absurd_numbers_does_not_stop_the_painting() {
        let absurd =
            NodeView { totals: Totals { prompt: u64::MAX, ..Totals::default() }, ..NodeView::default() };
        let peer = PeerView { view: Some(absurd.clone()), ..PeerView::default() };
        assert_eq!(State::of(1, absurd, vec![peer]).totals.prompt, u64::MAX);
    }

    #[test]
    fn a_forwarded_request_is_one_line_with_the_best_of_both_boxes() {
        let taken = Request { ttft_ms: Some(120), ..request("r1", "b", 7) };
        let computed = Request {
            ttft_ms: Some(100),
            forwarded_from: Some("a".into()),
            sources: Some(Sources { prompt: 9, drive: 9, ..Sources::default() }),
            ..request("r1", "b", 7)
        };
        let wanted = Request { ttft_ms: Some(120), ..computed.clone() };
        for order in [[taken.clone(), computed.clone()], [computed, taken]] {
            assert_eq!(together(order.into_iter()), std::slice::from_ref(&wanted));
        }
    }

    #[test]
    fn the_state_holds_both_boxes_and_the_last_requests_in_order() {
        let own = NodeView {
            name: "a".into(),
            totals: Totals { prompt: 5, drive: 5, ..Totals::default() },
            requests: (0..60).map(|n| request(&format!("a{n}"), "a", n)).collect(),
            alerts: vec![Alert { code: "tier-off".into(), ..Alert::default() }],
            ..NodeView::default()
        };
        let other = NodeView {
            name: "b".into(),
            totals: Totals { prompt: 7, peer: 7, ..Totals::default() },
            requests: vec![request("b0", "b", 1000)],
            alerts: vec![Alert { code: "store-damaged".into(), ..Alert::default() }],
            ..NodeView::default()
        };
        let peer = |connected| {
            PeerView { name: "b".into(), connected, ..PeerView::default() }
                .with_note(&serde_json::to_value(&other).unwrap())
        };
        let state = State::of(1, own.clone(), vec![peer(true)]);
        assert_eq!((state.totals.prompt, state.totals.drive, state.totals.peer), (12, 5, 7));
        assert_eq!((state.requests.len(), state.requests[0].id.as_str()), (REQUESTS, "b0"));
        let alerts: Vec<_> = state.alerts.iter().map(|a| (a.node.as_str(), a.alert.code.as_str())).collect();
        assert_eq!(alerts, [("a", "tier-off"), ("b", "store-damaged")]);
        let gone = State::of(1, own, vec![peer(false)]);
        assert_eq!(gone.alerts.len(), 1, "what a box said before it went is no news");
        let text = serde_json::to_string(&state).unwrap();
        assert_eq!(serde_json::from_str::<State>(&text).unwrap(), state);
    }
}
