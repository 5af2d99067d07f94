//! Identity of a KV row: the engine's block hash, the cache group, and the space both live in.
//!
//! The hash is vLLM's own `sha256_cbor` chain: `H(parent, tokens, extra)` over canonical CBOR, started from the
//! hash of a seed. It covers the whole prefix, so equal hashes mean equal prefixes; it covers neither model nor
//! dtype nor layout, which is what [`Namespace`] is for.

use std::convert::Infallible;
use std::fmt;

use minicbor::Encoder;
use sha2::{Digest, Sha256};

/// Digest of one block and everything before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash(pub [u8; 32]);

/// Seed that vLLM hashes when `PYTHONHASHSEED` is not set.
pub const DEFAULT_HASH_SEED: &str = "vllm-none-hash";

impl BlockHash {
    /// Start of every chain: `sha256(cbor(seed))`, the seed being `PYTHONHASHSEED` as text.
    pub fn start(seed: &str) -> Self {
        let mut text = Vec::new();
        Encoder::new(&mut text).str(seed).expect("writing to memory");
        Self(Sha256::digest(&text).into())
    }

    /// The block after `self` that holds `tokens` and no extra keys (no LoRA, salt or image).
    pub fn next(&self, tokens: &[u32]) -> Self {
        self.next_with(tokens, ExtraKeys::default(), &mut Vec::new())
    }

    /// The block after `self` that holds `tokens`. `text` is room to write in, used again and again.
    pub fn next_with(&self, tokens: &[u32], extra: ExtraKeys<'_>, text: &mut Vec<u8>) -> Self {
        text.clear();
        self.write_next(tokens, extra, text).expect("writing to memory");
        Self(Sha256::digest(text).into())
    }

    /// `[parent, [tokens], extra or null]` in canonical CBOR. Sources: vLLM 0.32 `v1/core/kv_cache_utils.py`
    /// (`hash_block_tokens`, `generate_block_hash_extra_keys`: adapter first, then the salt) and `utils/hashing.py`.
    fn write_next(
        &self,
        tokens: &[u32],
        extra: ExtraKeys<'_>,
        text: &mut Vec<u8>,
    ) -> Result<(), minicbor::encode::Error<Infallible>> {
        let mut e = Encoder::new(text);
        e.array(3)?.bytes(&self.0)?.array(tokens.len() as u64)?;
        for &token in tokens {
            e.u32(token)?;
        }
        let ExtraKeys { lora, salt } = extra;
        let keys = u64::from(lora.is_some()) + u64::from(salt.is_some());
        if keys == 0 {
            return e.null().map(|_| ());
        }
        e.array(keys)?;
        if let Some((name, path)) = lora {
            e.array(3)?.str("lora")?.str(name)?.str(path)?;
        }
        if let Some(salt) = salt {
            e.array(2)?.str("cache_salt")?.str(salt)?;
        }
        Ok(())
    }
}

/// What goes into one block's hash beside its tokens.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExtraKeys<'a> {
    /// Name and path of the adapter.
    pub lora: Option<(&'a str, &'a str)>,
    pub salt: Option<&'a str>,
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(&self.0[..6]))
    }
}

/// Number of a cache group, in the order in which the engine announces them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub u32);

/// Key of one row: block hash and group. 36 bytes everywhere: the hash, then the group as u32 big-endian, which
/// is how vLLM builds its own offload keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RowKey {
    pub hash: BlockHash,
    pub group: GroupId,
}

impl RowKey {
    pub const LEN: usize = 36;

    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[..32].copy_from_slice(&self.hash.0);
        out[32..].copy_from_slice(&self.group.0.to_be_bytes());
        out
    }

    pub fn from_bytes(bytes: &[u8; Self::LEN]) -> Self {
        let (hash, group) = bytes.split_at(32);
        Self {
            hash: BlockHash(hash.try_into().expect("split at 32")),
            group: GroupId(u32::from_be_bytes(group.try_into().expect("4 bytes are left"))),
        }
    }
}

/// Fingerprint of everything that makes rows interchangeable: weights, config, dtype, layout, groups, versions.
/// Rows of different namespaces never meet.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Namespace(pub [u8; 32]);

impl fmt::Debug for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(&self.0[..6]))
    }
}

impl fmt::Display for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

/// Which worker's part of a block a row holds. One engine per box is rank 0 of 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank {
    pub index: u16,
    pub of: u16,
}

impl Rank {
    pub const ONLY: Self = Self { index: 0, of: 1 };
}

/// The space in which a [`RowKey`] is unique. Everything stored, indexed or sent carries it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Space {
    pub namespace: Namespace,
    pub rank: Rank,
}

/// One row that a job moves: what it is, where in its prompt it ends, and which row of the shared area it uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowItem {
    pub key: RowKey,
    /// Tokens of the prompt up to the end of this row. Rows are read in this order.
    pub position: u32,
    /// Index in the shared row area.
    pub row: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Vectors computed with Python's cbor2 and hashlib, the way vLLM does (tokens 1..16, then four times
    /// 100, 256, 70000, 5).
    #[test]
    fn chain_equals_the_engines() {
        let first: Vec<u32> = (1..=16).collect();
        let second: Vec<u32> = [100, 256, 70000, 5].repeat(4);
        for (seed, none, block0, block1) in [
            (
                DEFAULT_HASH_SEED,
                "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0",
                "cd7c51bc5a8fc8643f383a2b9e01522fba7473c669e9270c7b0bf7bf7fd01682",
                "add0e0b9e895e8e56a4b2f653fab6803ae91b8456ecb717fe77cba0e8c762a31",
            ),
            (
                "0",
                "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e",
                "202da172482d928bbc42ab25b0151e2b895f13f41002e27b2ceabcfae6d332ea",
                "ac6189ca15c19eee542eebb1256f399b6b4fac4d3c5b50bc3dcdcff9034bdab0",
            ),
        ] {
            let start = BlockHash::start(seed);
            assert_eq!(hex::encode(start.0), none);
            let one = start.next(&first);
            assert_eq!(hex::encode(one.0), block0);
            assert_eq!(hex::encode(one.next(&second).0), block1);
        }
    }

    #[test]
    fn key_is_36_bytes_with_the_group_big_endian() {
        let key = RowKey { hash: BlockHash([7; 32]), group: GroupId(0x0102_0304) };
        let bytes = key.to_bytes();
        assert_eq!(&bytes[32..], &[1, 2, 3, 4]);
        assert_eq!(RowKey::from_bytes(&bytes), key);
    }
}
