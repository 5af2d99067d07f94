//! The catalogue of what an operator can be told is wrong: a code, what it means, and the next step.
//!
//! Modules have errors of their own; whatever reaches a person (an alert, `/healthz`, a page) is one of these, so
//! that it always carries a cause and something to do.

use serde::Serialize;

/// Codes are stable: they appear in alerts, in logs and in what people search for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Code {
    EngineDown,
    EngineCrashLoop,
    EngineStuck,
    PluginMissing,
    TierOff,
    StoreReadOnly,
    StoreDamaged,
    StorePlainIo,
    StoreForeign,
    StoreKeys,
    StoreBudget,
    StoreUnread,
    LoadsFail,
    PeerGone,
    PeerDiffers,
    JoinRefused,
    RailUnfit,
    RailRegistration,
    RailSilent,
    RailErrors,
    TokensDiffer,
    RouterDrift,
    CacheDiffers,
}

impl Code {
    pub const ALL: [Self; 23] = [
        Self::EngineDown,
        Self::EngineCrashLoop,
        Self::EngineStuck,
        Self::PluginMissing,
        Self::TierOff,
        Self::StoreReadOnly,
        Self::StoreDamaged,
        Self::StorePlainIo,
        Self::StoreForeign,
        Self::StoreKeys,
        Self::StoreBudget,
        Self::StoreUnread,
        Self::LoadsFail,
        Self::PeerGone,
        Self::PeerDiffers,
        Self::JoinRefused,
        Self::RailUnfit,
        Self::RailRegistration,
        Self::RailSilent,
        Self::RailErrors,
        Self::TokensDiffer,
        Self::RouterDrift,
        Self::CacheDiffers,
    ];

    /// What to do, in one sentence.
    pub fn next_step(self) -> &'static str {
        match self {
            Self::EngineDown => {
                "wait: it is restarted with growing pauses; the end of log/engine.log says why it ended"
            }
            Self::EngineCrashLoop => "read the end of log/engine.log, mend the cause, then restart spark-kv",
            Self::EngineStuck => "requests run but no token comes: restart spark-kv if it does not pass",
            Self::PluginMissing => {
                "the engine serves without the cache: look for `spark_kv_tier` in log/engine.log"
            }
            Self::TierOff => {
                "the cache is off for this engine start; the cause names the check that failed. Restart to check again; please report it when it returns"
            }
            Self::StoreReadOnly => "free space on the drive or lower store.capacity, then restart",
            Self::StoreDamaged => {
                "damaged rows were skipped and are computed again; look at the drive's health (smartctl -a)"
            }
            Self::StorePlainIo => {
                "raise the memlock limit (ulimit -l unlimited) or use a kernel with io_uring for full speed"
            }
            Self::StoreForeign => {
                "move files that are not the store's out of its folder: they take room from the cache"
            }
            Self::StoreKeys => {
                "look at state/store-keys: rows under a key that cannot be read are computed again, and none are kept while no key can be made"
            }
            Self::StoreBudget => {
                "nothing: loads go on and stores come back by themselves; raise store.write_budget when it happens daily"
            }
            Self::StoreUnread => {
                "look at `spark-kv store du` for who writes; prompts whose beginnings change each time (dates, ids) are never read again: let them stand at the end, raise store.capacity, or set store.write_budget"
            }
            Self::LoadsFail => {
                "`spark-kv status` counts the reasons: deadline = the drive or link is too slow or too busy; damaged = run `spark-kv store verify` and look at the drive; reclaimed = store.capacity is too small for the load; peer_gone = look at the other box and the cable"
            }
            Self::PeerGone => "look at the other box and the cable; this box serves alone until it is back",
            Self::PeerDiffers => {
                "make model, vLLM version and hash seed equal on both boxes: the cause names the difference"
            }
            Self::JoinRefused => {
                "make a new token with `spark-kv up` on the first box: a token works once, for an hour"
            }
            Self::RailUnfit => {
                "the cause says what to change; `spark-kv rails` shows every rail and measures them"
            }
            Self::RailRegistration => {
                "the cause says what to change; until then memory cannot be registered with the RDMA devices, and what needs them fails at its first transfer"
            }
            Self::RailSilent => {
                "run `spark-kv rails`: it measures each rail alone and says why one is silent"
            }
            Self::TokensDiffer => {
                "requests are placed by guesses until the engine is started again; if the model's tokenizer or template was changed on disk under a running engine, restart it, else please report the cause"
            }
            Self::RouterDrift => {
                "requests are placed by how much each box has to do until speeds are learned anew; if it stays, look for what slows this box down: `spark-kv status`, its clock, other programs"
            }
            Self::CacheDiffers => {
                "requests are answered rightly, and placed by an index that is wrong: the cause says what differs; restart the engine, and please report it when it returns"
            }
            Self::RailErrors => {
                "make the MTU equal on both ends, then try another cable; `spark-kv rails` measures what it costs"
            }
        }
    }
}

/// One thing that is wrong now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Fault {
    pub code: Code,
    /// The facts of this case, in a sentence without a full stop.
    pub cause: String,
}

impl Fault {
    pub fn new(code: Code, cause: impl Into<String>) -> Self {
        Self { code, cause: cause.into() }
    }
}
