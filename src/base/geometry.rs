//! What an engine announces about itself when its plugin says hello: rows, groups, and what makes bytes equal.

use serde::{Deserialize, Serialize};

use super::block::Rank;

/// What a cache group holds. Kinds this program does not know are kept as text and treated as state: a row of
/// them is usable only where it ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupKind {
    FullAttention,
    MlaAttention,
    SlidingWindow,
    Mamba,
    #[serde(untagged)]
    Other(String),
}

impl GroupKind {
    /// Whether a hit needs every row of the prefix (attention) or only the last one (state).
    pub fn needs_whole_prefix(&self) -> bool {
        matches!(self, Self::FullAttention | Self::MlaAttention)
    }
}

/// One cache group of the engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    pub kind: GroupKind,
    /// Tokens that one row of this group covers.
    pub tokens_per_row: u32,
    /// Byte ranges `(offset, length)` of a row that this group's layers fill, ascending. The rest of the row holds
    /// other requests' data and is never stored.
    pub covered: Vec<(u32, u32)>,
}

/// Body of the plugin's HELLO, as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`super::frame::PROTOCOL`] of the plugin.
    pub protocol: u16,
    pub plugin: String,
    pub vllm: String,
    /// The engine's process, for logs and liveness.
    pub pid: u32,
    pub engine_id: String,
    /// Folder of the model as the engine opened it.
    pub model: String,
    pub rank: u16,
    pub ranks: u16,
    pub rows: u32,
    /// Bytes from one row to the next; a multiple of 4096.
    pub row_bytes: u32,
    /// Tokens that one hash covers.
    pub hash_unit: u32,
    pub hash_algorithm: String,
    pub hash_seed: String,
    pub groups: Vec<Group>,
    /// Everything else that makes bytes interchangeable (dtype, cache layout, quantisation …), name and value.
    /// Goes into the namespace as it is, in order of name.
    pub interchange: std::collections::BTreeMap<String, String>,
}

/// Why a HELLO is refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("the plugin speaks protocol {theirs}, this node speaks {ours}")]
    Protocol { theirs: u16, ours: u16 },
    #[error("a row of {0} bytes: it must be a multiple of 4096 of at most 1 GiB")]
    RowBytes(u32),
    #[error("{0} rows: there must be between 1 and 16777216")]
    Rows(u32),
    #[error("{0} groups: there must be between 1 and 64")]
    Groups(usize),
    #[error("group {group} covers bytes {offset}..{end}: outside its row, empty, or not ascending")]
    Covered { group: usize, offset: u64, end: u64 },
    #[error("group {0} has rows of no tokens")]
    NoTokens(usize),
    #[error("rank {index} of {of}")]
    Rank { index: u16, of: u16 },
}

impl Hello {
    /// What an engine would say that is none: rows of this shape in one area, for benchmarks, the simulator and tests.
    pub fn of_rows(rows: u32, row_bytes: u32, groups: Vec<Group>) -> Self {
        Self {
            protocol: super::frame::PROTOCOL,
            plugin: String::new(),
            vllm: String::new(),
            pid: 0,
            engine_id: String::new(),
            model: String::new(),
            rank: 0,
            ranks: 1,
            rows,
            row_bytes,
            hash_unit: 16,
            hash_algorithm: "sha256_cbor".into(),
            hash_seed: "0".into(),
            groups,
            interchange: std::collections::BTreeMap::new(),
        }
    }

    pub fn rank(&self) -> Rank {
        Rank { index: self.rank, of: self.ranks }
    }

    /// Refuses what no engine would say, before any of it is used to size or address memory.
    pub fn check(&self) -> Result<(), Refused> {
        if self.protocol != super::frame::PROTOCOL {
            return Err(Refused::Protocol { theirs: self.protocol, ours: super::frame::PROTOCOL });
        }
        if self.row_bytes == 0 || !self.row_bytes.is_multiple_of(4096) || self.row_bytes > 1 << 30 {
            return Err(Refused::RowBytes(self.row_bytes));
        }
        if self.rows == 0 || self.rows > 1 << 24 {
            return Err(Refused::Rows(self.rows));
        }
        if self.groups.is_empty() || self.groups.len() > 64 {
            return Err(Refused::Groups(self.groups.len()));
        }
        if self.ranks == 0 || self.rank >= self.ranks {
            return Err(Refused::Rank { index: self.rank, of: self.ranks });
        }
        for (number, group) in self.groups.iter().enumerate() {
            if group.tokens_per_row == 0 {
                return Err(Refused::NoTokens(number));
            }
            let mut from = 0_u64;
            for &(offset, length) in &group.covered {
                let (offset, end) = (u64::from(offset), u64::from(offset) + u64::from(length));
                if length == 0 || offset < from || end > u64::from(self.row_bytes) {
                    return Err(Refused::Covered { group: number, offset, end });
                }
                from = end;
            }
        }
        Ok(())
    }
}

/// Body of the node's WELCOME, as JSON. The table's descriptor travels with it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    pub protocol: u16,
    /// Grows with every start of the node.
    pub generation: u64,
    pub pid: u32,
    /// Hex of the namespace this engine's rows live in.
    pub namespace: String,
    /// Slots of the lookup table ([`super::table`]); a power of two.
    pub table_slots: u32,
    /// Most rows that hits may hold at one time, over all requests. The rest of the area is for stores.
    pub row_budget: u32,
    /// Tokens per second that recomputing reaches: what the deadline of a load follows from.
    pub prefill_tokens_per_s: u32,
    /// False when the canary has turned the cache off: lookups miss, stores are dropped.
    pub tier_on: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        let all = Group { kind: GroupKind::FullAttention, tokens_per_row: 128, covered: vec![(0, 8192)] };
        Hello::of_rows(8, 8192, vec![all])
    }

    #[test]
    fn a_sound_hello_is_taken() {
        assert_eq!(hello().check(), Ok(()));
        let text = serde_json::to_string(&hello()).unwrap();
        assert_eq!(serde_json::from_str::<Hello>(&text).unwrap(), hello());
    }

    #[test]
    fn what_no_engine_would_say_is_refused() {
        type Break = fn(&mut Hello);
        let cases: [(Break, Refused); 7] = [
            (|h| h.protocol = 99, Refused::Protocol { theirs: 99, ours: super::super::frame::PROTOCOL }),
            (|h| h.row_bytes = 5000, Refused::RowBytes(5000)),
            (|h| h.rows = 0, Refused::Rows(0)),
            (|h| h.groups.clear(), Refused::Groups(0)),
            (|h| h.rank = 1, Refused::Rank { index: 1, of: 1 }),
            (|h| h.groups[0].tokens_per_row = 0, Refused::NoTokens(0)),
            (
                |h| h.groups[0].covered = vec![(4096, 8192)],
                Refused::Covered { group: 0, offset: 4096, end: 12288 },
            ),
        ];
        for (break_it, refused) in cases {
            let mut h = hello();
            break_it(&mut h);
            assert_eq!(h.check(), Err(refused));
        }
    }

    #[test]
    fn unknown_kinds_are_kept_and_treated_as_state() {
        let kind: GroupKind = serde_json::from_str("\"short_conv\"").unwrap();
        assert_eq!(kind, GroupKind::Other("short_conv".into()));
        assert!(!kind.needs_whole_prefix());
        let kind: GroupKind = serde_json::from_str("\"full_attention\"").unwrap();
        assert_eq!(kind, GroupKind::FullAttention);
    }
}
