//! From token ids to what each node holds of a prompt: the engine's own hash chain, walked along what is known to be held.
//!
//! A hash covers one unit of tokens and everything before it; a row of a group ends at such a hash. What a prompt
//! gains is one number: the largest boundary at which every attention group has all its rows and every state group
//! has a snapshot, and at least one token is left to compute, because the engine needs one to begin with.
//!
//! One pass over the hashes serves all nodes: forward along the rows of attention groups until no node can go on,
//! then back from there to the first boundary at which everything ends. States are asked for on the way back only,
//! so a hybrid model costs one probe for each attention row and a few for its states.

use crate::base::block::{BlockHash, ExtraKeys, GroupId, RowKey};
use crate::base::geometry::Hello;

/// What one node can take of a prompt without computing it, in tokens from its beginning. Each number includes the
/// ones before it: device <= own <= all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Reach {
    /// From its engine's device cache alone.
    pub device: u32,
    /// From device and its own drive.
    pub own: u32,
    /// From device, its own drive and the other nodes.
    pub all: u32,
}

/// As many nodes as a lookup has bits for: bit n says "on the drive of node n", bit 32+n "in the device cache of
/// node n's engine".
pub const NODES_MAX: usize = 8;

/// What goes into the hash beside tokens: prompts that differ in it share nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
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

    /// Tokens of one hash.
    pub fn unit(&self) -> usize {
        self.unit
    }

    /// The hashes of all whole units of `ids`, in order, made as they are asked for.
    pub fn hashes<'a>(&self, ids: &'a [u32], extra: &'a Extra) -> Hashes<'a> {
        self.hashes_after(&[], ids, extra)
    }

    /// The hashes that follow `known`, which are those of the first units of `ids`.
    pub fn hashes_after<'a>(&self, known: &[BlockHash], ids: &'a [u32], extra: &'a Extra) -> Hashes<'a> {
        let parent = known.last().copied().unwrap_or(self.start);
        let rest = ids.get(known.len() * self.unit..).unwrap_or_default();
        Hashes { parent, rest, unit: self.unit, extra, first: known.is_empty(), text: Vec::new() }
    }

    /// How far each of `nodes` nodes reaches into a prompt of `tokens` tokens with these hashes. `holders` is asked who
    /// has a row, in bits as [`NODES_MAX`] says. Hashes are taken only as far as somebody may have something.
    pub fn reaches(
        &self,
        tokens: usize,
        hashes: impl Iterator<Item = BlockHash>,
        nodes: usize,
        holders: impl Fn(&RowKey) -> u64,
    ) -> Vec<Reach> {
        let nodes = nodes.min(NODES_MAX);
        if nodes == 0 || self.groups.is_empty() {
            return vec![Reach::default(); nodes];
        }
        let mut walk = Walk { chain: self, holders, hashes: Vec::new(), rows: Vec::new(), ends: Vec::new() };
        // The last token is never counted: the engine computes it.
        let units = tokens.saturating_sub(1) / self.unit;
        walk.forward(hashes.take(units), (1 << nodes) - 1);
        (0..nodes).map(|node| walk.reach(node)).collect()
    }
}

/// Who can bring something, a bit for each way: n from the device of node n, 8 + n from its drive, 16 from any drive.
type Ways = u32;

const ANY_DRIVE: Ways = 1 << (2 * NODES_MAX);

fn ways(bits: u64) -> Ways {
    let drives = (bits & 0xff) as u32;
    let devices = (bits >> 32 & 0xff) as u32;
    devices | drives << NODES_MAX | if drives == 0 { 0 } else { ANY_DRIVE }
}

/// A walk along one prompt.
struct Walk<'a, H> {
    chain: &'a Chain,
    holders: H,
    hashes: Vec<BlockHash>,
    /// By unit: who has all rows of attention groups that end there. All ways where none ends.
    rows: Vec<Ways>,
    /// By unit: who has what every group needs for a hit to end there. Filled when it is asked for.
    ends: Vec<Option<Ways>>,
}

impl<H: Fn(&RowKey) -> u64> Walk<'_, H> {
    /// Goes on while one of `nodes` (a bit each) may.
    fn forward(&mut self, hashes: impl Iterator<Item = BlockHash>, nodes: Ways) {
        let mut going = nodes;
        for (hash, end) in hashes.zip((self.chain.unit..).step_by(self.chain.unit)) {
            let mut here = Ways::MAX;
            for need in self.chain.groups.iter().filter(|need| need.ends_at(end)) {
                here &= ways((self.holders)(&RowKey { hash, group: need.group }));
            }
            // Up to its device's reach a node takes rows from there, beyond it from drives.
            if here & ANY_DRIVE == 0 {
                going &= here;
            }
            self.hashes.push(hash);
            self.rows.push(here);
            self.ends.push(None);
            if going == 0 {
                return;
            }
        }
    }

    /// The largest boundary after `base` units up to which `way` brings everything that `base` does not, or `base`.
    fn back(&mut self, way: Ways, base: usize) -> usize {
        let whole = self.rows[base..].iter().take_while(|row| **row & way != 0).count();
        (base + 1..=base + whole).rev().find(|units| self.ends_with(units - 1) & way != 0).unwrap_or(base)
    }

    fn ends_with(&mut self, unit: usize) -> Ways {
        if let Some(known) = self.ends[unit] {
            return known;
        }
        let (hash, end) = (self.hashes[unit], (unit + 1) * self.chain.unit);
        let mut here = self.rows[unit];
        for need in self.chain.groups.iter().filter(|need| !need.ends_at(end)) {
            if here == 0 {
                break;
            }
            here &= ways((self.holders)(&RowKey { hash, group: need.group }));
        }
        self.ends[unit] = Some(here);
        here
    }

    fn reach(&mut self, node: usize) -> Reach {
        let device = self.back(1 << node, 0);
        let own = self.back(1 << (NODES_MAX + node), device);
        let all = self.back(ANY_DRIVE, device);
        let tokens = |units: usize| u32::try_from(units * self.chain.unit).unwrap_or(u32::MAX);
        Reach { device: tokens(device), own: tokens(own), all: tokens(all) }
    }
}

impl Need {
    /// Whether it needs a row that ends at `end`, wherever beyond a hit ends.
    fn ends_at(&self, end: usize) -> bool {
        self.whole && end.is_multiple_of(self.row)
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

    /// Drives of nodes 0 and 1, their devices.
    const DRIVE: [u64; 2] = [1, 2];
    const DEVICE: [u64; 2] = [1 << 32, 2 << 32];

    /// Reaches of two nodes, given who has what: (group, end, bits). And how many hashes were made.
    fn reaches(chain: &Chain, tokens: u32, held: &[(u32, usize, u64)]) -> ([Reach; 2], usize) {
        let (ids, extra): (Vec<u32>, _) = ((0..tokens).collect(), Extra::default());
        let ends: HashMap<BlockHash, usize> =
            chain.hashes(&ids, &extra).zip(1..).map(|(hash, n)| (hash, n * chain.unit)).collect();
        let holders = |key: &RowKey| {
            let end = ends.get(&key.hash).copied();
            held.iter().find(|(g, e, _)| *g == key.group.0 && Some(*e) == end).map_or(0, |(_, _, bits)| *bits)
        };
        let mut made = 0;
        let hashes = chain.hashes(&ids, &extra).inspect(|_| made += 1);
        let got = chain.reaches(ids.len(), hashes, 2, holders);
        (got.try_into().unwrap(), made)
    }

    fn reach(device: u32, own: u32, all: u32) -> Reach {
        Reach { device, own, all }
    }

    #[test]
    fn an_attention_model_reaches_to_the_first_hole() {
        let chain = attention(16);
        let held = [(0, 16, 1), (0, 32, 3), (0, 48, 2), (0, 80, 3)];
        let (got, made) = reaches(&chain, 200, &held);
        assert_eq!(got, [reach(0, 32, 48), reach(0, 0, 48)]);
        assert_eq!(made, 4, "no hash beyond the hole");
        assert_eq!(reaches(&chain, 48, &held).0[0].all, 32, "one token is always computed");
        assert_eq!(reaches(&chain, 49, &held).0[0].all, 48);
        assert_eq!(reaches(&chain, 0, &held), ([Reach::default(); 2], 0));
        assert_eq!(reaches(&chain, 16, &held).1, 0);
    }

    #[test]
    fn a_device_goes_first_and_drives_go_on_from_where_it_ends() {
        let chain = attention(16);
        let held = [
            (0, 16, DEVICE[0]),
            (0, 32, DEVICE[0] | DRIVE[1]),
            (0, 48, DRIVE[0]),
            (0, 64, DRIVE[1]),
            (0, 80, DEVICE[0]),
        ];
        let (got, _) = reaches(&chain, 200, &held);
        assert_eq!(got, [reach(32, 48, 64), reach(0, 0, 0)], "the other node lacks the first row");
    }

    #[test]
    fn a_hybrid_model_ends_where_every_state_has_a_snapshot() {
        let kinds = [(GroupKind::FullAttention, 64), (GroupKind::Mamba, 64)];
        let chain = Chain::of(&hello(16, &kinds)).unwrap();
        let rows = [(0, 64, 1), (0, 128, 1), (0, 192, 1)];
        let with = |states: &[(u32, usize, u64)]| {
            let held: Vec<_> = rows.iter().chain(states).copied().collect();
            reaches(&chain, 1000, &held).0[0]
        };
        assert_eq!(with(&[]), Reach::default(), "attention without a state is worth nothing");
        assert_eq!(with(&[(1, 128, 1)]), reach(0, 128, 128));
        assert_eq!(with(&[(1, 64, 1), (1, 192, 2)]), reach(0, 64, 192));
        assert_eq!(with(&[(1, 256, 1)]), Reach::default(), "a state beyond the attention's reach");
        // A tail inside a block: every group has a row that ends there.
        assert_eq!(with(&[(1, 208, 1), (0, 208, 1)]), reach(0, 208, 208));
        assert_eq!(with(&[(1, 208, 1)]), Reach::default());
    }

    #[test]
    fn hashes_go_on_from_those_that_are_known() {
        let (chain, extra) = (attention(16), Extra { salt: Some("s".into()), lora: None });
        let ids: Vec<u32> = (0..100).collect();
        let all: Vec<BlockHash> = chain.hashes(&ids, &extra).collect();
        for known in 0..=all.len() {
            let rest: Vec<BlockHash> = chain.hashes_after(&all[..known], &ids, &extra).collect();
            assert_eq!(rest, all[known..], "{known}");
        }
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
        fn a_reach_is_the_largest_boundary_that_holds(
            tokens in 0_usize..400,
            held in proptest::collection::vec((0_u32..3, 1_usize..25, 0_u64..16), 0..150),
            full in 0_usize..20,
        ) {
            let kinds = [(GroupKind::FullAttention, 32), (GroupKind::Mamba, 64), (GroupKind::MlaAttention, 16)];
            let chain = Chain::of(&hello(16, &kinds)).unwrap();
            let spread = |bits: u64| bits & 3 | (bits >> 2) << 32;
            let mut rows: HashMap<(u32, usize), u64> = HashMap::new();
            for (group, n, bits) in held {
                rows.entry((group, n * 16)).or_insert(spread(bits));
            }
            // Long runs would hardly ever come about by chance.
            for n in 1..=full {
                *rows.entry((0, n * 16)).or_default() |= DRIVE[n % 2] | DEVICE[0];
                *rows.entry((2, n * 16)).or_default() |= DRIVE[1] | DEVICE[0];
            }
            let list: Vec<_> = rows.iter().map(|(&(g, e), &bits)| (g, e, bits)).collect();
            let has = |group, end, mask| rows.get(&(group, end)).is_some_and(|bits| bits & mask != 0);
            // Everything up to `base` is there; after it `mask` must bring it.
            let best = |mask: u64, base: usize| (1..).map(|n| n * 16).take_while(|end| *end < tokens).filter(|&end| {
                end > base
                    && (1..=end / 32).map(|row| row * 32).all(|row| row <= base || has(0, row, mask))
                    && (1..=end / 16).map(|row| row * 16).all(|row| row <= base || has(2, row, mask))
                    && has(0, end, mask)
                    && has(1, end, mask)
            }).last().unwrap_or(base);
            let (got, made) = reaches(&chain, u32::try_from(tokens).unwrap(), &list);
            for node in 0..2 {
                let device = best(DEVICE[node], 0);
                let (own, all) = (best(DRIVE[node], device), best(DRIVE[0] | DRIVE[1], device));
                let twin = [device, own, all].map(|n| u32::try_from(n).unwrap());
                proptest::prop_assert_eq!(got[node], reach(twin[0], twin[1], twin[2]));
            }
            proptest::prop_assert!(made <= tokens.saturating_sub(1) / 16);
        }
    }
}
