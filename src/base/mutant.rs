//! Faults that tests put into the data path to prove that something catches them.
//!
//! A suite that never failed proves nothing. With `SPARK_KV_MUTANT=<name>` a build with debug assertions breaks
//! one step of the path; each name has a test that must notice. A release build has none of this: [`on`] is then
//! constant and the branch is gone.

/// The steps that can be broken on the node's side (the plugin has its own, in the tests' copy of it).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    /// Rows are accepted after a read without looking at their checksum.
    SkipChecksum,
    /// The last 4 KiB of a row are not written.
    DropPage,
    /// A read answers with the row that was stored just before.
    StaleRow,
    /// Rows are stored under the next group's number.
    WrongGroup,
    /// Rows are stored under another rank.
    WrongRank,
    /// Rows of a job are stored under each other's keys, shifted by one.
    ShiftByOne,
    /// The key in a record's header is not compared with the key asked for.
    SkipKeyCheck,
    /// A received row is accepted without its checksum.
    SkipReceiveCheck,
    /// A load is reported done before its rows have arrived.
    EarlyDone,
    /// A row is written after its job was reported failed.
    LateWrite,
    /// A rail goes on writing a piece that was given to another one.
    StaleRail,
    /// A rail gets pieces although it has enough in flight.
    NoCredit,
    /// A connection on which nothing is heard is kept.
    KeepSilent,
    /// What flew on a rail that is lost goes to no other.
    LosePieces,
    /// A fetch goes on after its deadline.
    LateFetch,
    /// Rails to a node's earlier life stay open.
    KeepRails,
    /// Bytes that a group does not cover are stored as found.
    KeepForeignBytes,
    /// Words of another node's earlier life are heard.
    SkipGeneration,
    /// Changes of another node's index are applied although some before them are missing.
    SkipGap,
    /// What a node that is gone was known to hold is not forgotten.
    KeepDead,
    /// The ticket of a session that ended stays good.
    KeepTicket,
}

/// Name of the environment variable that arms a mutant.
pub const VARIABLE: &str = "SPARK_KV_MUTANT";

/// Whether `mutant` was armed for this process.
#[cfg(debug_assertions)]
pub fn on(mutant: Mutant) -> bool {
    use std::sync::OnceLock;
    static ARMED: OnceLock<Option<String>> = OnceLock::new();
    ARMED.get_or_init(|| std::env::var(VARIABLE).ok()).as_deref() == Some(format!("{mutant:?}").as_str())
}

/// Whether `mutant` was armed for this process: never, in a release build.
#[cfg(not(debug_assertions))]
pub const fn on(_: Mutant) -> bool {
    false
}
