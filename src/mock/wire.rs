//! What the engine publishes of its cache, as bytes: vLLM's event batches in msgpack. Pure.
//!
//! A batch is `[time, events, rank]`. An event is a map with its `type`, or, as older releases wrote it, an array that
//! begins with it. Hashes are whole digests, or numbers of their last 8 bytes. Source: vLLM 0.32
//! `distributed/kv_events.py`. Writing to memory does not fail.

use rmp::encode as put;
use serde::Deserialize;

use super::hits::Kind;
use super::pool::{Change, Stored};
use crate::base::block::{BlockHash, GroupId, RowKey};

/// How events are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form {
    pub shape: EventShape,
    pub hashes: HashForm,
    /// Said instead of the blocks' own size, which is then wrong.
    pub block_size: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventShape {
    #[default]
    Maps,
    Arrays,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HashForm {
    Bytes,
    /// vLLM's default.
    #[default]
    Ints,
}

/// Bytes of one batch. `kinds` are the groups' kinds by their number.
pub fn batch(changes: &[Change], kinds: &[Kind], form: Form, unix_s: f64) -> Vec<u8> {
    let events = merged(changes);
    let mut out = Writer { form, bytes: Vec::with_capacity(64 + events.len() * 64) };
    out.array(3);
    out.float(unix_s);
    out.array(events.len());
    for event in &events {
        match event {
            Event::Stored(stored) => out.stored(stored, kinds),
            Event::Removed(group, hashes) => out.removed(*group, hashes),
            Event::Cleared => out.cleared(),
        }
    }
    out.uint(0);
    out.bytes
}

/// The hash as a number: the last 8 bytes of the digest, big-endian.
pub fn as_number(hash: &BlockHash) -> u64 {
    u64::from_be_bytes(hash.0[24..].try_into().expect("8 bytes are left"))
}

enum Event<'a> {
    Stored(&'a Stored),
    Removed(GroupId, Vec<BlockHash>),
    Cleared,
}

/// Blocks of a group that go one after the other go in one event.
fn merged(changes: &[Change]) -> Vec<Event<'_>> {
    let mut events = Vec::new();
    for change in changes {
        match change {
            Change::Stored(stored) => events.push(Event::Stored(stored)),
            Change::Cleared => events.push(Event::Cleared),
            Change::Removed(RowKey { hash, group }) => match events.last_mut() {
                Some(Event::Removed(same, hashes)) if same == group => hashes.push(*hash),
                _ => events.push(Event::Removed(*group, vec![*hash])),
            },
        }
    }
    events
}

struct Writer {
    form: Form,
    bytes: Vec<u8>,
}

const MEMORY: &str = "writing to memory";

impl Writer {
    fn array(&mut self, length: usize) {
        put::write_array_len(&mut self.bytes, u32::try_from(length).unwrap_or(u32::MAX)).expect(MEMORY);
    }

    fn float(&mut self, value: f64) {
        put::write_f64(&mut self.bytes, value).expect(MEMORY);
    }

    fn uint(&mut self, value: u64) {
        put::write_uint(&mut self.bytes, value).expect(MEMORY);
    }

    fn text(&mut self, value: &str) {
        put::write_str(&mut self.bytes, value).expect(MEMORY);
    }

    fn nil(&mut self) {
        put::write_nil(&mut self.bytes).expect(MEMORY);
    }

    fn hash(&mut self, hash: &BlockHash) {
        match self.form.hashes {
            HashForm::Bytes => put::write_bin(&mut self.bytes, &hash.0).expect(MEMORY),
            HashForm::Ints => self.uint(as_number(hash)),
        }
    }

    fn hashes(&mut self, hashes: &[BlockHash]) {
        self.array(hashes.len());
        hashes.iter().for_each(|hash| self.hash(hash));
    }

    /// Begin of an event of `fields` fields beside its type.
    fn open(&mut self, kind: &str, fields: u32) {
        match self.form.shape {
            EventShape::Maps => {
                put::write_map_len(&mut self.bytes, fields + 1).expect(MEMORY);
                self.text("type");
            }
            EventShape::Arrays => self.array(fields as usize + 1),
        }
        self.text(kind);
    }

    /// Name of the next field, where fields have names.
    fn name(&mut self, name: &str) {
        if self.form.shape == EventShape::Maps {
            self.text(name);
        }
    }

    fn stored(&mut self, stored: &Stored, kinds: &[Kind]) {
        let kind = kinds.get(stored.group.0 as usize).copied().unwrap_or(Kind::Full);
        let window = if let Kind::Sliding(tokens) = kind { Some(tokens as u64) } else { None };
        // In a map a field that has its default is left away; in an array what stands before another cannot be.
        let maps = self.form.shape == EventShape::Maps;
        self.open("BlockStored", if maps { 9 + u32::from(window.is_some()) } else { 11 });
        self.name("block_hashes");
        self.hashes(&stored.hashes);
        self.name("parent_block_hash");
        match &stored.parent {
            Some(parent) => self.hash(parent),
            None => self.nil(),
        }
        self.name("token_ids");
        self.array(stored.tokens.len());
        stored.tokens.iter().for_each(|token| self.uint(u64::from(*token)));
        self.name("block_size");
        self.uint(self.form.block_size.unwrap_or(stored.block_size as u64));
        self.name("lora_id");
        self.nil();
        self.name("medium");
        self.text("GPU");
        self.name("lora_name");
        self.nil();
        if !maps {
            // extra_keys
            self.nil();
        }
        self.name("group_idx");
        self.uint(u64::from(stored.group.0));
        self.name("kv_cache_spec_kind");
        self.text(match kind {
            Kind::Full => "full_attention",
            Kind::Sliding(_) => "sliding_window",
            Kind::State => "mamba",
        });
        if let Some(tokens) = window {
            self.name("kv_cache_spec_sliding_window");
            self.uint(tokens);
        } else if !maps {
            self.nil();
        }
    }

    fn removed(&mut self, group: GroupId, hashes: &[BlockHash]) {
        self.open("BlockRemoved", 3);
        self.name("block_hashes");
        self.hashes(hashes);
        self.name("medium");
        self.text("GPU");
        self.name("group_idx");
        self.uint(u64::from(group.0));
    }

    fn cleared(&mut self) {
        self.open("AllBlocksCleared", 0);
    }
}

#[cfg(test)]
mod tests {
    use rmpv::Value;

    use super::*;

    fn changes() -> Vec<Change> {
        let hash = |n| BlockHash([n; 32]);
        let removed = |n, group| Change::Removed(RowKey { hash: hash(n), group: GroupId(group) });
        let stored = Stored {
            group: GroupId(1),
            hashes: vec![hash(2), hash(3)],
            parent: Some(hash(1)),
            span: 4..8,
            tokens: vec![1, 200, 70_000, u32::MAX],
            block_size: 2,
        };
        vec![removed(8, 0), removed(9, 0), removed(7, 1), Change::Stored(stored), Change::Cleared]
    }

    fn read(form: Form) -> Value {
        let bytes = batch(&changes(), &[Kind::Full, Kind::Sliding(64)], form, 1.5);
        let mut rest = bytes.as_slice();
        let value = rmpv::decode::read_value(&mut rest).unwrap();
        assert!(rest.is_empty(), "one value, and nothing after it");
        value
    }

    fn field<'a>(event: &'a Value, name: &str) -> &'a Value {
        let fields = event.as_map().unwrap();
        &fields.iter().find(|(key, _)| key.as_str() == Some(name)).unwrap_or_else(|| panic!("{name}")).1
    }

    #[test]
    fn maps_with_bytes_are_read_by_another_decoder() {
        let form = Form { shape: EventShape::Maps, hashes: HashForm::Bytes, block_size: None };
        let value = read(form);
        let batch = value.as_array().unwrap();
        assert_eq!((batch[0].as_f64(), batch[2].as_u64()), (Some(1.5), Some(0)));
        let events = batch[1].as_array().unwrap();
        let kinds: Vec<&str> = events.iter().map(|e| field(e, "type").as_str().unwrap()).collect();
        assert_eq!(kinds, ["BlockRemoved", "BlockRemoved", "BlockStored", "AllBlocksCleared"]);
        assert_eq!(field(&events[0], "block_hashes").as_array().unwrap().len(), 2);
        let stored = &events[2];
        assert_eq!(field(stored, "block_hashes")[0].as_slice(), Some(&[2; 32][..]));
        assert_eq!(field(stored, "parent_block_hash").as_slice(), Some(&[1; 32][..]));
        assert_eq!(field(stored, "token_ids")[3].as_u64(), Some(u64::from(u32::MAX)));
        assert_eq!(field(stored, "block_size").as_u64(), Some(2));
        assert_eq!(field(stored, "kv_cache_spec_kind").as_str(), Some("sliding_window"));
        assert_eq!(field(stored, "kv_cache_spec_sliding_window").as_u64(), Some(64));
        assert!(field(stored, "lora_id").is_nil());
    }

    #[test]
    fn arrays_with_numbers_and_a_wrong_size_are_what_was_asked_for() {
        let form = Form { shape: EventShape::Arrays, hashes: HashForm::Ints, block_size: Some(99) };
        let value = read(form);
        let stored = value[1][2].as_array().unwrap();
        assert_eq!((stored.len(), stored[0].as_str()), (12, Some("BlockStored")));
        assert_eq!(stored[1][0].as_u64(), Some(0x0202_0202_0202_0202));
        assert_eq!((stored[4].as_u64(), stored[9].as_u64()), (Some(99), Some(1)));
        assert_eq!(value[1][3][0].as_str(), Some("AllBlocksCleared"));
    }

    #[test]
    fn a_number_is_the_end_of_the_digest() {
        // sha256_cbor with the default seed over tokens 1 to 16.
        let start = BlockHash::start(crate::base::block::DEFAULT_HASH_SEED);
        let tokens: Vec<u32> = (1..=16).collect();
        assert_eq!(as_number(&start.next(&tokens)), 8_866_452_693_264_111_234);
    }
}
