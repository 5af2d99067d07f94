//! Which rows the last requests were made of: how a person names rows without knowing a hash. Pure.
//!
//! The engine's plugin tells each request's chain. The newest are kept, bounded by the keys they hold together, so
//! that `spark-kv store pin REQUEST` finds them and `ls` can say which prefixes many requests begin with.

use std::collections::{HashMap, HashSet, VecDeque};

use serde::{Deserialize, Serialize};

use super::clip;
use super::requests::belongs;
use crate::base::block::{RowKey, Space};

/// Keys that are kept in all: 40 bytes each, so about 10 MB. A prompt of 128,000 tokens has 8,000 in blocks of 16.
const KEYS: usize = 256 << 10;

/// Chains that are kept: as many as the ledger has requests.
const CHAINS: usize = super::requests::KEPT;

const ID_MAX: usize = 320;

/// One prompt's rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// The engine's id of the request.
    pub request: String,
    pub space: Space,
    /// In the order of the prompt.
    pub rows: Vec<(RowKey, u32)>,
}

/// A prefix that is known by a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PrefixUse {
    /// The newest request that ended with it.
    pub request: String,
    pub namespace: String,
    /// Up to the end of its last row that is held.
    pub tokens: u32,
    /// Rows of it that are held.
    pub rows: u64,
    pub bytes: u64,
    /// Requests among those remembered that have all of it.
    pub asked: u64,
}

#[derive(Debug, Default)]
pub struct Chains {
    /// Oldest first.
    kept: VecDeque<Chain>,
    keys: usize,
}

impl Chains {
    pub fn add(&mut self, request: &str, space: Space, mut rows: Vec<(RowKey, u32)>) {
        if rows.is_empty() {
            return;
        }
        rows.sort_by_key(|(_, position)| *position);
        rows.truncate(KEYS);
        self.keys += rows.len();
        self.kept.push_back(Chain { request: clip(request.to_owned(), ID_MAX), space, rows });
        while self.keys > KEYS || self.kept.len() > CHAINS {
            let Some(oldest) = self.kept.pop_front() else { return };
            self.keys -= oldest.rows.len();
        }
    }

    /// Rows of the newest request that is called `id`, by us or by the engine. A request with several prompts has a
    /// chain for each, and all are meant.
    pub fn find(&self, id: &str) -> Vec<(Space, RowKey)> {
        let mut seen = HashSet::new();
        let chains = self.kept.iter().filter(|chain| chain.request == id || belongs(&chain.request, id));
        let rows = chains.flat_map(|chain| chain.rows.iter().map(|(key, _)| (chain.space, *key)));
        rows.filter(|row| seen.insert(*row)).collect()
    }

    /// Every chain that is no other one's twin, newest first, with what `held` says of its rows: bytes, if held.
    pub fn prefixes(&self, held: impl Fn(&Space, &RowKey) -> Option<u64>) -> Vec<PrefixUse> {
        let mut asked: HashMap<(Space, RowKey), u64> = HashMap::new();
        for chain in &self.kept {
            let own: HashSet<RowKey> = chain.rows.iter().map(|(key, _)| *key).collect();
            own.into_iter().for_each(|key| *asked.entry((chain.space, key)).or_default() += 1);
        }
        let mut ends = HashSet::new();
        let mut prefixes = Vec::new();
        for Chain { request, space, rows } in self.kept.iter().rev() {
            let Some((last, _)) = rows.last() else { continue };
            if !ends.insert((*space, *last)) {
                continue;
            }
            let mut prefix = PrefixUse {
                request: request.clone(),
                namespace: space.namespace.to_string(),
                asked: asked.get(&(*space, *last)).copied().unwrap_or(0),
                ..PrefixUse::default()
            };
            for (key, position) in rows {
                if let Some(bytes) = held(space, key) {
                    prefix.tokens = prefix.tokens.max(*position);
                    prefix.rows += 1;
                    prefix.bytes += bytes;
                }
            }
            prefixes.push(prefix);
        }
        prefixes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::block::{BlockHash, GroupId, Namespace, Rank};

    const SPACE: Space = Space { namespace: Namespace([1; 32]), rank: Rank::ONLY };

    fn key(n: u32) -> RowKey {
        let mut hash = [0; 32];
        hash[..4].copy_from_slice(&n.to_le_bytes());
        RowKey { hash: BlockHash(hash), group: GroupId(0) }
    }

    fn rows(range: std::ops::Range<u32>) -> Vec<(RowKey, u32)> {
        range.map(|n| (key(n), (n + 1) * 16)).collect()
    }

    #[test]
    fn rows_are_found_by_the_id_of_their_request() {
        let mut chains = Chains::default();
        chains.add("chatcmpl-r1-0a1b2c3d", SPACE, rows(0..3));
        chains.add("cmpl-r2-0-0a1b2c3d", SPACE, rows(0..2));
        chains.add("cmpl-r2-1-0a1b2c3d", SPACE, rows(1..4));
        chains.add("chatcmpl-r3-0a1b2c3d", SPACE, Vec::new());
        assert_eq!(chains.find("r1").len(), 3);
        assert_eq!(chains.find("chatcmpl-r1-0a1b2c3d").len(), 3);
        assert_eq!(chains.find("r2"), [0, 1, 2, 3].map(|n| (SPACE, key(n))));
        assert_eq!(chains.find("r3"), []);
        assert_eq!(chains.find(""), []);
    }

    #[test]
    fn a_prefix_counts_the_requests_that_have_all_of_it() {
        let mut chains = Chains::default();
        chains.add("turn-1", SPACE, rows(0..4));
        chains.add("turn-2", SPACE, rows(0..8));
        chains.add("again-2", SPACE, rows(0..8));
        chains.add("branch", SPACE, [rows(0..4), rows(100..102)].concat());
        let held = |_: &Space, key_: &RowKey| (*key_ != key(7)).then_some(10);
        let seen: Vec<_> = chains
            .prefixes(held)
            .into_iter()
            .map(|p| (p.request, p.tokens, p.rows, p.bytes, p.asked))
            .collect();
        assert_eq!(
            seen,
            [
                ("branch".to_owned(), 102 * 16, 6, 60, 1),
                ("again-2".to_owned(), 7 * 16, 7, 70, 2),
                ("turn-1".to_owned(), 4 * 16, 4, 40, 4),
            ]
        );
    }

    #[test]
    fn what_is_kept_is_bounded_by_chains_and_by_keys() {
        let mut chains = Chains::default();
        for n in 0..2 * u32::try_from(CHAINS).unwrap() {
            chains.add(&format!("r{n}"), SPACE, rows(n..n + 2));
        }
        assert_eq!((chains.kept.len(), chains.keys), (CHAINS, 2 * CHAINS));
        let many = u32::try_from(KEYS).unwrap();
        chains.add("long", SPACE, rows(0..many + 5));
        assert_eq!((chains.kept.len(), chains.keys), (1, KEYS));
        assert_eq!(chains.prefixes(|_, _| None)[0].rows, 0);
    }
}
