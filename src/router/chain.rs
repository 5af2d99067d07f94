//! From token ids to what each tier holds of a prompt: the engine's own hash chain, walked along the lookup table.
//!
//! A hash covers one unit of tokens and everything before it; a row of a group ends at such a hash. What a prompt
//! gains is one number: the largest boundary at which every attention group has all its rows and every state group
//! has a snapshot, and at least one token is left to compute, because the engine needs one to begin with.

use crate::base::block::{BlockHash, ExtraKeys, GroupId, RowKey};
use crate::base::geometry::Hello;
use crate::base::table::Holder;

/// What goes into the hash beside tokens: prompts that differ in it share nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extra {
    /// `cache_salt` of the request. In the first block, and so in all.
    pub salt: Option<String>,
    /// Name and path of the adapter. In every block.
    pub lora: Option<(String, String)>,
}

/// How one engine hashes and what its groups need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    start: BlockHash,
    unit: usize,
    groups: Vec<Need>,
}

/// What a group needs for a hit to end somewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Need {
    group: GroupId,
    /// Tokens of one row.
    row: usize,
    /// All rows of the prefix, or only the one at its end.
    whole: bool,
}

/// Why an engine's chain cannot be followed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unknown {
    #[error("the engine hashes with {0}; only sha256_cbor can be followed")]
    Algorithm(String),
    #[error("a hash of {unit} tokens does not divide a row of {row}")]
    Unit { unit: u32, row: u32 },
}

/// What is there of a prompt, in tokens from its beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Coverage {
    /// From this node's drive and the other node together.
    pub usable: u32,
    /// From this node's drive alone.
    pub drive: u32,
    /// From the other node alone.
    pub peer: u32,
    /// Units that were hashed: the walk ends where nothing more can be gained.
    pub hashed: u32,
}

impl Chain {
    /// The chain of the engine that said `hello`.
    pub fn of(hello: &Hello) -> Result<Self, Unknown> {
        if hello.hash_algorithm != "sha256_cbor" {
            return Err(Unknown::Algorithm(hello.hash_algorithm.clone()));
        }
        let unit = hello.hash_unit;
        let groups = hello.groups.iter().zip(0..).map(|(group, number)| {
            let row = group.tokens_per_row;
            match unit != 0 && row != 0 && row.is_multiple_of(unit) {
                true => Ok(Need {
                    group: GroupId(number),
                    row: row as usize,
                    whole: group.kind.needs_whole_prefix(),
                }),
                false => Err(Unknown::Unit { unit, row }),
            }
        });
        let groups = groups.collect::<Result<_, _>>()?;
        Ok(Self { start: BlockHash::start(&hello.hash_seed), unit: unit as usize, groups })
    }

    /// The hashes of all whole units of `ids`, in order, made as they are asked for.
    pub fn hashes<'a>(&self, ids: &'a [u32], extra: &'a Extra) -> Hashes<'a> {
        Hashes { parent: self.start, rest: ids, unit: self.unit, extra, first: true, text: Vec::new() }
    }

    /// How far `holders` (bits of [`Holder`]) reaches. The last token is never counted: the engine computes it.
    pub fn coverage(&self, ids: &[u32], extra: &Extra, holders: impl Fn(&RowKey) -> u64) -> Coverage {
        let (drive, peer) = (Holder::Drive as u64, Holder::Peer as u64);
        let mut walks = [Walk::new(drive | peer), Walk::new(drive), Walk::new(peer)];
        let mut coverage = Coverage::default();
        let reachable = ids.len().saturating_sub(1);
        for (n, hash) in self.hashes(&ids[..reachable], extra).enumerate() {
            let end = (n + 1) * self.unit;
            coverage.hashed += 1;
            let mut bits = [0_u64; GROUPS_MAX];
            for (need, bits) in self.groups.iter().zip(&mut bits) {
                *bits = holders(&RowKey { hash, group: need.group });
            }
            for walk in walks.iter_mut().filter(|walk| walk.goes_on) {
                walk.step(&self.groups, &bits, end);
            }
            if !walks[0].goes_on {
                break;
            }
        }
        let tokens = |walk: &Walk| u32::try_from(walk.usable).unwrap_or(u32::MAX);
        (coverage.usable, coverage.drive, coverage.peer) =
            (tokens(&walks[0]), tokens(&walks[1]), tokens(&walks[2]));
        coverage
    }
}

/// As many groups as an engine may announce.
const GROUPS_MAX: usize = 64;

/// One way of looking at the table.
struct Walk {
    mask: u64,
    goes_on: bool,
    usable: usize,
}

impl Walk {
    fn new(mask: u64) -> Self {
        Self { mask, goes_on: true, usable: 0 }
    }

    /// `bits`: who holds each group's row that ends at `end`.
    fn step(&mut self, groups: &[Need], bits: &[u64], end: usize) {
        let mut ends_here = true;
        for (need, bits) in groups.iter().zip(bits) {
            let here = bits & self.mask != 0;
            ends_here &= here;
            // A row of the prefix is missing: no longer prefix can be whole.
            if need.whole && end.is_multiple_of(need.row) && !here {
                self.goes_on = false;
            }
        }
        if self.goes_on && ends_here {
            self.usable = end;
        }
    }
}

/// The chain along a prompt.
#[derive(Clone, Debug)]
pub struct Hashes<'a> {
    parent: BlockHash,
    rest: &'a [u32],
    unit: usize,
    extra: &'a Extra,
    first: bool,
    text: Vec<u8>,
}

impl Iterator for Hashes<'_> {
    type Item = BlockHash;

    fn next(&mut self) -> Option<BlockHash> {
        let (unit, rest) = self.rest.split_at_checked(self.unit)?;
        self.rest = rest;
        let lora = self.extra.lora.as_ref().map(|(name, path)| (name.as_str(), path.as_str()));
        let salt = self.extra.salt.as_deref().filter(|salt| self.first && !salt.is_empty());
        self.first = false;
        self.parent = self.parent.next_with(unit, ExtraKeys { lora, salt }, &mut self.text);
        Some(self.parent)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::base::block::DEFAULT_HASH_SEED;
    use crate::base::geometry::{Group, GroupKind};

    fn hello(unit: u32, groups: &[(GroupKind, u32)]) -> Hello {
        let groups = groups.iter().map(|(kind, row)| Group {
            kind: kind.clone(),
            tokens_per_row: *row,
            covered: vec![(0, 4096)],
        });
        Hello {
            hash_unit: unit,
            hash_seed: DEFAULT_HASH_SEED.into(),
            ..Hello::of_rows(8, 4096, groups.collect())
        }
    }

    fn attention(unit: u32) -> Chain {
        Chain::of(&hello(unit, &[(GroupKind::FullAttention, unit)])).unwrap()
    }

    /// Vectors computed with Python's cbor2 and hashlib as vLLM does.
    #[test]
    fn hashes_are_the_engines() {
        let (chain, plain) = (attention(16), Extra::default());
        let ids: Vec<u32> = (1..=16).chain([100, 256, 70000, 5].repeat(4)).chain([9]).collect();
        let of = |extra: &Extra| -> Vec<String> {
            chain.hashes(&ids, extra).map(|hash| hex::encode(hash.0)).collect()
        };
        assert_eq!(
            of(&plain),
            [
                "cd7c51bc5a8fc8643f383a2b9e01522fba7473c669e9270c7b0bf7bf7fd01682",
                "add0e0b9e895e8e56a4b2f653fab6803ae91b8456ecb717fe77cba0e8c762a31"
            ]
        );
        let salted = Extra { salt: Some("s".into()), ..plain.clone() };
        assert_eq!(of(&salted)[0], "0e2fe8da3f2a8de255dd656495ba99599c80c4f8e53f038014d549debe7fce13");
        let adapted = Extra { lora: Some(("a".into(), "/p".into())), ..plain.clone() };
        assert_eq!(of(&adapted)[0], "09d17ce9b5a729e7e371cb55d5b00d3a7705fb22a467a9e767ad7cb7f006f7ab");
        assert_ne!(of(&salted)[1], of(&plain)[1], "the salt of the first block is in all");
        let start = BlockHash::start(DEFAULT_HASH_SEED);
        assert_eq!(chain.hashes(&ids, &plain).next(), Some(start.next(&ids[..16])));
    }

    /// A table of what stands at (group, end).
    fn holders<'a>(
        chain: &'a Chain,
        ids: &'a [u32],
        held: &'a [(u32, usize, u64)],
    ) -> impl Fn(&RowKey) -> u64 + use<'a> {
        let ends: HashMap<BlockHash, usize> = chain
            .hashes(ids, &Extra { salt: None, lora: None })
            .zip(1..)
            .map(|(hash, n)| (hash, n * chain.unit))
            .collect();
        move |key| {
            let end = ends.get(&key.hash).copied();
            held.iter().find(|(g, e, _)| *g == key.group.0 && Some(*e) == end).map_or(0, |(_, _, bits)| *bits)
        }
    }

    fn cover(chain: &Chain, tokens: u32, held: &[(u32, usize, u64)]) -> Coverage {
        let ids: Vec<u32> = (0..tokens).collect();
        chain.coverage(&ids, &Extra::default(), holders(chain, &ids, held))
    }

    #[test]
    fn an_attention_model_reaches_to_the_first_hole() {
        let chain = attention(16);
        let held = [(0, 16, 1), (0, 32, 3), (0, 48, 2), (0, 80, 3)];
        assert_eq!(cover(&chain, 200, &held), Coverage { usable: 48, drive: 32, peer: 0, hashed: 4 });
        assert_eq!(cover(&chain, 48, &held).usable, 32, "one token is always computed");
        assert_eq!(cover(&chain, 49, &held).usable, 48);
        assert_eq!(cover(&chain, 0, &held), Coverage::default());
        assert_eq!(cover(&chain, 16, &held).hashed, 0);
    }

    #[test]
    fn a_hybrid_model_ends_where_every_state_has_a_snapshot() {
        let kinds = [(GroupKind::FullAttention, 64), (GroupKind::Mamba, 64)];
        let chain = Chain::of(&hello(16, &kinds)).unwrap();
        let rows = [(0, 64, 1), (0, 128, 1), (0, 192, 1)];
        let with = |states: &[(u32, usize, u64)]| {
            let held: Vec<_> = rows.iter().chain(states).copied().collect();
            cover(&chain, 1000, &held)
        };
        assert_eq!(with(&[]).usable, 0, "attention without a state is worth nothing");
        assert_eq!(with(&[(1, 128, 1)]).usable, 128);
        assert_eq!(
            with(&[(1, 64, 1), (1, 192, 2)]),
            Coverage { usable: 192, drive: 64, peer: 0, hashed: 16 }
        );
        assert_eq!(with(&[(1, 256, 1)]).usable, 0, "a state beyond the attention's reach");
        // A tail inside a block: every group has a row that ends there.
        assert_eq!(with(&[(1, 208, 1), (0, 208, 1)]).usable, 208);
        assert_eq!(with(&[(1, 208, 1)]).usable, 0);
    }

    #[test]
    fn what_cannot_be_followed_is_said() {
        let mut other = hello(16, &[(GroupKind::FullAttention, 16)]);
        other.hash_algorithm = "xxhash".into();
        assert_eq!(Chain::of(&other), Err(Unknown::Algorithm("xxhash".into())));
        assert_eq!(
            Chain::of(&hello(16, &[(GroupKind::FullAttention, 24)])),
            Err(Unknown::Unit { unit: 16, row: 24 })
        );
        assert!(Chain::of(&hello(0, &[(GroupKind::FullAttention, 24)])).is_err());
    }

    proptest::proptest! {
        /// Against a twin that looks at every boundary on its own.
        #[test]
        fn coverage_is_the_largest_boundary_that_holds(
            tokens in 0_usize..400,
            held in proptest::collection::vec((0_u32..2, 1_usize..25, 0_u64..4), 0..60),
        ) {
            let kinds = [(GroupKind::FullAttention, 32), (GroupKind::Mamba, 64)];
            let chain = Chain::of(&hello(16, &kinds)).unwrap();
            let mut rows: HashMap<(u32, usize), u64> = HashMap::new();
            for (group, n, bits) in held {
                rows.entry((group, n * 16)).or_insert(bits);
            }
            let list: Vec<_> = rows.iter().map(|(&(g, e), &bits)| (g, e, bits)).collect();
            let has = |group, end, mask| rows.get(&(group, end)).is_some_and(|bits| bits & mask != 0);
            let best = |mask: u64| (1..).map(|n| n * 16).take_while(|end| *end < tokens).filter(|&end| {
                (1..=end / 32).all(|row| has(0, row * 32, mask))
                    && (end % 32 == 0 || has(0, end, mask))
                    && has(1, end, mask)
            }).last().unwrap_or(0);
            let got = cover(&chain, u32::try_from(tokens).unwrap(), &list);
            proptest::prop_assert_eq!(
                (got.usable as usize, got.drive as usize, got.peer as usize), (best(3), best(1), best(2)));
        }
    }
}
