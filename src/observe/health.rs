//! Whether this node serves, and what is not as it should be.
//!
//! `/healthz` answers 200 exactly when a request that came now would be served, by this node's engine or through the
//! other box. A node without its cache serves, more slowly: that is said as `degraded`, not as failure.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What is known at this moment.
#[derive(Clone, Debug, Default)]
pub struct HealthFacts {
    /// The engine answers its own health check.
    pub engine_ready: bool,
    /// Its phase in a word, and why, for people.
    pub engine_phase: String,
    pub engine_reason: Option<String>,
    /// Requests in the engine, and for how long none of them has moved.
    pub running: u32,
    pub silent: Duration,
    /// Silence that a long prefill explains.
    pub silence_allowed: Duration,
    /// The plugin of the running engine is connected.
    pub plugin_connected: bool,
    /// None: no engine start was judged yet. Else on, or off with the reason.
    pub tier: Option<Result<(), String>>,
    /// Why the store cannot be written. None: it can.
    pub drive_read_only: Option<String>,
    /// Peers that were joined.
    pub peers: Vec<PeerFacts>,
    /// Requests may go to the other box.
    pub share: bool,
}

#[derive(Clone, Debug, Default)]
pub struct PeerFacts {
    pub name: String,
    pub connected: bool,
    /// It says of itself that its engine serves.
    pub serves: bool,
    /// Why it is not connected.
    pub why: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    Ok,
    /// Serves, and something that should work does not.
    Degraded,
    /// Does not serve.
    #[default]
    Down,
}

/// One thing that was looked at.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Check {
    pub ok: bool,
    pub what: String,
}

/// The answer of `/healthz`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Health {
    pub status: Verdict,
    /// How requests are served, or why they are not.
    pub serving: String,
    pub checks: BTreeMap<String, Check>,
}

impl Health {
    pub fn of(facts: &HealthFacts) -> Self {
        let checks: BTreeMap<String, Check> = [
            ("engine", engine(facts)),
            ("plugin", plugin(facts)),
            ("cache", cache(facts)),
            ("drive", drive(facts)),
            ("peer", peer(facts)),
        ]
        .into_iter()
        .map(|(name, (ok, what))| (name.to_owned(), Check { ok, what }))
        .collect();
        let own = checks["engine"].ok;
        let other = facts.peers.iter().find(|peer| facts.share && peer.connected && peer.serves);
        let serving = match (own, other) {
            (true, _) => "by this box's engine".to_owned(),
            (false, Some(peer)) => format!("through {}, because this box's engine does not serve", peer.name),
            (false, None) => format!("not at all: {}", checks["engine"].what),
        };
        let status = match (own || other.is_some(), checks.values().all(|check| check.ok)) {
            (true, true) => Verdict::Ok,
            (true, false) => Verdict::Degraded,
            (false, _) => Verdict::Down,
        };
        Self { status, serving, checks }
    }

    pub fn serves(&self) -> bool {
        self.status != Verdict::Down
    }
}

fn engine(facts: &HealthFacts) -> (bool, String) {
    if !facts.engine_ready {
        let phase = if facts.engine_phase.is_empty() { "not known" } else { &facts.engine_phase };
        let why = facts.engine_reason.as_deref().map(|why| format!(": {why}")).unwrap_or_default();
        return (false, format!("the engine is {phase}{why}"));
    }
    if facts.running > 0 && facts.silent > facts.silence_allowed {
        let silent = facts.silent.as_secs();
        return (false, format!("{} requests run and none has moved for {silent} s", facts.running));
    }
    (true, format!("ready, {} requests run", facts.running))
}

fn plugin(facts: &HealthFacts) -> (bool, String) {
    match (facts.plugin_connected, facts.engine_ready) {
        (true, _) => (true, "connected".into()),
        (false, true) => (false, "the engine serves without our plugin: nothing is stored or loaded".into()),
        (false, false) => (false, "not connected, there is no engine".into()),
    }
}

fn cache(facts: &HealthFacts) -> (bool, String) {
    match &facts.tier {
        Some(Ok(())) => (true, "on".into()),
        Some(Err(why)) => (false, format!("off: {why}")),
        None => (false, "not judged yet for this engine start".into()),
    }
}

fn drive(facts: &HealthFacts) -> (bool, String) {
    match &facts.drive_read_only {
        None => (true, "writable".into()),
        Some(why) => (false, format!("read only: {why}")),
    }
}

fn peer(facts: &HealthFacts) -> (bool, String) {
    if facts.peers.is_empty() {
        return (true, "none joined, this box serves alone".into());
    }
    let ok = facts.peers.iter().all(|peer| peer.connected);
    let words: Vec<String> = facts
        .peers
        .iter()
        .map(|peer| match (peer.connected, peer.why.is_empty()) {
            (true, _) => format!("{} is connected", peer.name),
            (false, true) => format!("{} is gone", peer.name),
            (false, false) => format!("{} is gone: {}", peer.name, peer.why),
        })
        .collect();
    (ok, words.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn well() -> HealthFacts {
        HealthFacts {
            engine_ready: true,
            engine_phase: "ready".into(),
            plugin_connected: true,
            tier: Some(Ok(())),
            silence_allowed: Duration::from_secs(60),
            peers: vec![PeerFacts {
                name: "b".into(),
                connected: true,
                serves: true,
                ..PeerFacts::default()
            }],
            share: true,
            ..HealthFacts::default()
        }
    }

    #[test]
    fn each_fault_changes_the_verdict_and_the_check_that_names_it() {
        type Change = fn(&mut HealthFacts);
        let gone: Change = |f| f.peers[0] = PeerFacts { name: "b".into(), ..PeerFacts::default() };
        let cases: [(&str, Verdict, &[&str], &[Change]); 11] = [
            ("all well", Verdict::Ok, &[], &[]),
            ("nobody joined", Verdict::Ok, &[], &[|f| f.peers.clear()]),
            ("peer gone", Verdict::Degraded, &["peer"], &[gone]),
            ("cache off", Verdict::Degraded, &["cache"], &[|f| f.tier = Some(Err("canary".into()))]),
            ("not judged", Verdict::Degraded, &["cache"], &[|f| f.tier = None]),
            ("no plugin", Verdict::Degraded, &["plugin"], &[|f| f.plugin_connected = false]),
            ("drive full", Verdict::Degraded, &["drive"], &[|f| f.drive_read_only = Some("full".into())]),
            ("own engine down", Verdict::Degraded, &["engine"], &[|f| f.engine_ready = false]),
            ("both down", Verdict::Down, &["engine", "peer"], &[|f| f.engine_ready = false, gone]),
            (
                "peer does not serve",
                Verdict::Down,
                &["engine"],
                &[|f| f.engine_ready = false, |f| f.peers[0].serves = false],
            ),
            ("no sharing", Verdict::Down, &["engine"], &[|f| f.engine_ready = false, |f| f.share = false]),
        ];
        for (name, verdict, failing, changes) in cases {
            let mut facts = well();
            changes.iter().for_each(|change| change(&mut facts));
            let health = Health::of(&facts);
            assert_eq!(health.status, verdict, "{name}");
            assert_eq!(health.serves(), verdict != Verdict::Down);
            let not_ok: Vec<&str> =
                health.checks.iter().filter(|(_, c)| !c.ok).map(|(name, _)| name.as_str()).collect();
            assert_eq!(not_ok, failing, "{name}");
        }
    }

    #[test]
    fn an_engine_whose_requests_stand_still_is_not_ready() {
        let mut facts = HealthFacts { running: 2, silent: Duration::from_secs(61), share: false, ..well() };
        let health = Health::of(&facts);
        assert_eq!(health.status, Verdict::Down);
        assert_eq!(health.checks["engine"].what, "2 requests run and none has moved for 61 s");
        facts.silent = Duration::from_secs(60);
        assert_eq!(Health::of(&facts).status, Verdict::Ok);
        facts = HealthFacts { running: 0, silent: Duration::from_secs(9999), ..facts };
        assert_eq!(Health::of(&facts).status, Verdict::Ok, "an idle engine has nothing to say");
    }
}
