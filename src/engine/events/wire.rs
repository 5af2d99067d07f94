//! What an engine publishes of its device cache: batches of msgpack, as bytes come in. Pure.
//!
//! A batch is `[time, events, rank]`; an event is a map with its `type` among its fields, or, as older releases wrote
//! it, an array that begins with it. Hashes are whole digests, or numbers of their last 8 bytes; both are kept as that
//! number. Source: vLLM 0.32 `distributed/kv_events.py`. What is not known is left out and counted; what is no batch is an
//! error. Nothing here trusts a length.

use rmpv::ValueRef;
use rmpv::decode::read_value_ref_with_max_depth;

/// Deeper is no batch: an event's extra keys lie five levels down. The reader counts a level more than once.
const DEPTH_MAX: usize = 32;

/// One thing that happened to the engine's cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Blocks hold these now. May be told twice.
    Stored {
        group: u32,
        /// Last 8 bytes of each digest, big-endian.
        hashes: Vec<u64>,
        /// Tokens of one block. 0: it is not said.
        block_size: u32,
    },
    Removed {
        group: u32,
        hashes: Vec<u64>,
    },
    /// Nothing is held any more.
    Cleared,
}

/// One batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Of the device alone.
    pub events: Vec<Event>,
    /// Events of other kinds of memory, or of kinds that are not known.
    pub skipped: usize,
}

/// Why bytes are no batch.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("they are no msgpack: {0}")]
    Msgpack(String),
    #[error("bytes follow the batch")]
    Longer,
    #[error("it is no batch of [time, events, rank]")]
    NoBatch,
    #[error("{0} is missing or of another type")]
    Field(&'static str),
}

/// Reads one batch.
pub fn read(bytes: &[u8]) -> Result<Batch, Error> {
    let mut rest = bytes;
    let value = read_value_ref_with_max_depth(&mut rest, DEPTH_MAX);
    let value = value.map_err(|error| Error::Msgpack(error.to_string()))?;
    if !rest.is_empty() {
        return Err(Error::Longer);
    }
    let ValueRef::Array(parts) = value else { return Err(Error::NoBatch) };
    let Some(ValueRef::Array(events)) = parts.get(1) else { return Err(Error::NoBatch) };
    let mut batch = Batch::default();
    for event in events {
        match one(event)? {
            Some(event) => batch.events.push(event),
            None => batch.skipped += 1,
        }
    }
    Ok(batch)
}

/// Positions of fields in the older form: `[type, ...]`.
struct Places {
    medium: usize,
    group: usize,
}

const STORED: Places = Places { medium: 6, group: 9 };
const REMOVED: Places = Places { medium: 2, group: 3 };
const HASHES: usize = 1;
const BLOCK_SIZE: usize = 4;

fn one(event: &ValueRef<'_>) -> Result<Option<Event>, Error> {
    let kind = match event {
        ValueRef::Map(_) => field(event, "type", 0),
        ValueRef::Array(parts) => parts.first(),
        _ => None,
    };
    let kind = kind.and_then(text).ok_or(Error::Field("type"))?;
    let places = match kind {
        "AllBlocksCleared" => return Ok(Some(Event::Cleared)),
        "BlockStored" => STORED,
        "BlockRemoved" => REMOVED,
        _ => return Ok(None),
    };
    // The device where it is not said: releases before tiers had nothing else.
    let medium = field(event, "medium", places.medium).and_then(text).unwrap_or("GPU");
    if medium != "GPU" {
        return Ok(None);
    }
    let group = match field(event, "group_idx", places.group) {
        None | Some(ValueRef::Nil) => 0,
        Some(group) => whole(group).ok_or(Error::Field("group_idx"))?,
    };
    let hashes = match field(event, "block_hashes", HASHES) {
        Some(ValueRef::Array(hashes)) => hashes.iter().map(hash).collect::<Option<Vec<u64>>>(),
        _ => None,
    };
    let hashes = hashes.ok_or(Error::Field("block_hashes"))?;
    if kind == "BlockRemoved" {
        return Ok(Some(Event::Removed { group, hashes }));
    }
    let block_size = field(event, "block_size", BLOCK_SIZE).and_then(whole);
    Ok(Some(Event::Stored { group, hashes, block_size: block_size.ok_or(Error::Field("block_size"))? }))
}

/// A field by its name, or by its place where fields have no names.
fn field<'v, 'a>(event: &'v ValueRef<'a>, name: &str, place: usize) -> Option<&'v ValueRef<'a>> {
    match event {
        ValueRef::Map(fields) => {
            fields.iter().find(|(key, _)| text(key) == Some(name)).map(|(_, value)| value)
        }
        ValueRef::Array(parts) => parts.get(place),
        _ => None,
    }
}

fn text<'v>(value: &'v ValueRef<'_>) -> Option<&'v str> {
    match value {
        ValueRef::String(text) => text.as_str(),
        _ => None,
    }
}

fn whole(value: &ValueRef<'_>) -> Option<u32> {
    match value {
        ValueRef::Integer(n) => n.as_u64().and_then(|n| u32::try_from(n).ok()),
        _ => None,
    }
}

fn hash(value: &ValueRef<'_>) -> Option<u64> {
    match value {
        ValueRef::Integer(n) => n.as_u64(),
        ValueRef::Binary(digest) => digest.last_chunk().map(|last| u64::from_be_bytes(*last)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rmpv::Value;

    fn bytes(value: &Value) -> Vec<u8> {
        let mut out = Vec::new();
        rmpv::encode::write_value(&mut out, value).unwrap();
        out
    }

    fn map(fields: &[(&str, Value)]) -> Value {
        Value::Map(fields.iter().map(|(name, value)| ((*name).into(), value.clone())).collect())
    }

    fn batch(events: Vec<Value>) -> Vec<u8> {
        bytes(&Value::Array(vec![1.5.into(), Value::Array(events), 0.into()]))
    }

    fn digest(n: u8) -> Value {
        Value::Binary((0..32).map(|at| if at < 24 { 0xff } else { n }).collect())
    }

    const ONE: u64 = 0x0101_0101_0101_0101;

    #[test]
    fn maps_and_arrays_digests_and_numbers_say_the_same() {
        let stored = map(&[
            ("type", "BlockStored".into()),
            ("block_hashes", Value::Array(vec![digest(1)])),
            ("parent_block_hash", Value::Nil),
            ("token_ids", Value::Array(vec![1.into(), 2.into()])),
            ("block_size", 16.into()),
            ("lora_id", Value::Nil),
            ("medium", "GPU".into()),
            ("extra_keys", Value::Array(vec![Value::Nil, Value::Array(vec!["salt".into()])])),
            ("group_idx", 2.into()),
        ]);
        let nil = Value::Nil;
        let older = Value::Array(vec![
            "BlockStored".into(),
            Value::Array(vec![ONE.into()]),
            nil.clone(),
            Value::Array(vec![]),
            16.into(),
            nil.clone(),
            "GPU".into(),
            nil.clone(),
            nil,
            2.into(),
        ]);
        let wanted = Event::Stored { group: 2, hashes: vec![ONE], block_size: 16 };
        for event in [stored, older] {
            let read = read(&batch(vec![event])).unwrap();
            assert_eq!(read, Batch { events: vec![wanted.clone()], skipped: 0 });
        }
        let removed = map(&[
            ("block_hashes", Value::Array(vec![digest(1), ONE.into()])),
            ("type", "BlockRemoved".into()),
        ]);
        let cleared = Value::Array(vec!["AllBlocksCleared".into()]);
        let events = read(&batch(vec![removed, cleared])).unwrap().events;
        assert_eq!(events, [Event::Removed { group: 0, hashes: vec![ONE, ONE] }, Event::Cleared]);
    }

    #[test]
    fn other_memory_and_other_events_are_left_out() {
        let of = |medium: Value| {
            map(&[
                ("type", "BlockStored".into()),
                ("block_hashes", Value::Array(vec![digest(1)])),
                ("block_size", 0.into()),
                ("medium", medium),
            ])
        };
        let later = map(&[("type", "BlockDreamed".into()), ("of", 1.into())]);
        let read = read(&batch(vec![of("CPU".into()), of("STORAGE".into()), later, of(Value::Nil)])).unwrap();
        assert_eq!((read.events.len(), read.skipped), (1, 3), "no medium is the device");
    }

    #[test]
    fn what_is_no_batch_is_refused_with_its_reason() {
        let event = |fields: &[(&str, Value)]| batch(vec![map(fields)]);
        let kind = ("type", Value::from("BlockStored"));
        let hashes = ("block_hashes", Value::Array(vec![]));
        let longer = [bytes(&Value::Array(vec![0.into(), Value::Array(vec![]), 0.into()])), vec![0]].concat();
        for (bytes, why) in [
            (vec![], "no msgpack"),
            (vec![0xdd, 0xff, 0xff, 0xff, 0xff], "no msgpack"),
            (vec![0x91; 4000], "no msgpack"),
            (longer, "bytes follow"),
            (bytes(&"x".into()), "no batch"),
            (bytes(&Value::Array(vec![0.into(), 1.into()])), "no batch"),
            (batch(vec![7.into()]), "type is missing"),
            (event(&[("block_hashes", Value::Nil)]), "type is missing"),
            (event(std::slice::from_ref(&kind)), "block_hashes is missing"),
            (
                event(&[kind.clone(), ("block_hashes", Value::Array(vec![Value::Binary(vec![1])]))]),
                "block_hashes",
            ),
            (event(&[kind.clone(), hashes.clone()]), "block_size is missing"),
            (event(&[kind, hashes, ("block_size", (-1).into())]), "block_size"),
        ] {
            let error = read(&bytes).unwrap_err().to_string();
            assert!(error.contains(why), "{why}: {error}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes: Vec<u8>) {
            let _ = read(&bytes);
        }
    }
}
