//! Messages between nodes, over TLS on the control port.
//!
//! A frame is `length u32 | kind u8 | body`, little-endian, `length` counting kind and body; a frame over
//! [`MAX_FRAME`] ends the connection. The first message each way is HELLO or REFUSED. Its first fields are the same
//! in every version to come, so that nodes of different versions can tell each other why they part.
//!
//! ```text
//! 1 HELLO      version u16 | generation u64 | name | control address | count u8 × data address
//!              | has secret u8 | secret 16                      what a node is; the secret only when it joins
//! 2 REFUSED    reason                                           the connection ends
//! 3 FACTS      generation u64 | number u32 | has space u8 | space 36 | count u16 × (name | value)
//! 4 SNAPSHOT   generation u64 | space 36 | epoch u32 | part u32 | last u8 | count u32 × (key 36 | position u32)
//! 5 DELTA      generation u64 | space 36 | epoch u32 | seq u64
//!              | count u32 × (key 36 | position u32)  added | count u32 × key 36  removed
//! 6 RESYNC     generation u64                                   tell me everything again
//! 7 HEARTBEAT  generation u64 | facts u32 | epoch u32 | seq u64 | complete u8 | note u32 + JSON
//! 8 TICKET     generation u64 | ticket 32                       opens data connections, as long as this session lives
//! 9 BYE        generation u64                                   the node stops
//! 10 OFFER     generation u64 | space 36 | count u32 × (key 36 | position u32 | has owner u8 | owner)
//!                                                               the sender will drop these
//! 13 FORGET    generation u64 | owner                           destroy the keys of this owner, and say when it is done
//! 14 FORGOTTEN generation u64 | owner | keys u64 | rows u64 | trouble
//!                                                               what became of it; no trouble: it is done
//! text = length u16 | UTF-8
//! ```
//!
//! `generation` is the sender's: what an older one said is dropped. A SNAPSHOT replaces everything told before;
//! its parts count from 0. DELTAs of an epoch count from 1. HEARTBEAT repeats where the sender is, so that a
//! listener that lost the tail of the conversation notices.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::sharing::Row;
use super::token::Secret;
use crate::base::block::{RowKey, Space};
use crate::base::codec::{Malformed, Reader, Writer};
use crate::transfer::{Ticket, put_space, take_space};

/// Version of this file.
pub const VERSION: u16 = 3;

/// Largest frame, length field excluded: facts of 64 × 8 KiB.
pub const MAX_FRAME: usize = 1 << 20;

/// Largest note, as JSON text.
pub const MAX_NOTE: usize = 64 << 10;

/// Keys in one SNAPSHOT or DELTA.
pub const MAX_KEYS: usize = 8192;

/// Facts of a space.
pub const MAX_FACTS: usize = 64;

/// Rows of one OFFER.
pub const MAX_OFFERED: usize = 1024;

/// Longest name of an owner, which is that of an API key.
pub const MAX_OWNER: usize = 512;

const MAX_TEXT: usize = 4096;
const MAX_NAME: usize = 128;
const MAX_DATA: usize = 8;

/// What a node says first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    pub generation: u64,
    pub name: String,
    /// Where its control port can be dialled.
    pub control: String,
    /// Where its data ports can be dialled: one rail each.
    pub data: Vec<String>,
    /// Of the token with which it joins.
    pub secret: Option<Secret>,
}

/// What must be equal on two nodes for their rows to be of use to each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpaceFacts {
    pub space: Space,
    /// Name and value of everything that went into the namespace, and of what must be equal besides.
    pub what: BTreeMap<String, String>,
}

/// What goes over the control connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    Hello(Hello),
    /// A HELLO of another version: nothing but its number is known.
    ForeignHello(u16),
    Refused(String),
    /// Everything after the greeting, with the generation of who says it.
    Word {
        generation: u64,
        word: Word,
    },
}

/// What nodes tell each other once they know each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Word {
    Facts {
        number: u32,
        facts: Option<SpaceFacts>,
    },
    Snapshot {
        space: Space,
        epoch: u32,
        part: u32,
        last: bool,
        keys: Vec<(RowKey, u32)>,
    },
    Delta {
        space: Space,
        epoch: u32,
        seq: u64,
        added: Vec<(RowKey, u32)>,
        removed: Vec<RowKey>,
    },
    Resync,
    Heartbeat {
        facts: u32,
        epoch: u32,
        seq: u64,
        /// The snapshot of `epoch` was sent to its end.
        complete: bool,
        note: String,
    },
    Ticket(Ticket),
    /// Rows that the sender is likely to drop soon, for whoever has room.
    Offer {
        space: Space,
        rows: Vec<Row>,
    },
    /// An operator wants the keys of this owner destroyed on every node.
    Forget {
        owner: String,
    },
    /// The answer to [`Word::Forget`].
    Forgotten {
        owner: String,
        done: Forgotten,
    },
    Bye,
}

/// What became of an owner on the node that was told to forget it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Forgotten {
    /// Keys that were destroyed.
    pub keys: u64,
    /// Rows that were held under them.
    pub rows: u64,
    /// Why a key may still be there; empty when none is.
    pub trouble: String,
}

fn put_rows(w: &mut Writer, rows: &[Row]) {
    w.u32(u32::try_from(rows.len()).expect("at most MAX_OFFERED"));
    for Row { key, position, owner } in rows {
        w.bytes(&key.to_bytes()).u32(*position).u8(owner.is_some().into());
        if let Some(owner) = owner {
            w.text(owner);
        }
    }
}

fn take_rows(r: &mut Reader<'_>) -> Result<Vec<Row>, Malformed> {
    let count = r.count("offered rows", RowKey::LEN + 5, limit(MAX_OFFERED))?;
    let row = |_| {
        let (key, position) = (RowKey::from_bytes(&r.array()?), r.u32()?);
        let owned = take_flag(r, "mark of an owner")?;
        let owner = owned.then(|| bounded(r, "owner", MAX_OWNER)).transpose()?.map(Arc::from);
        Ok(Row { key, position, owner })
    };
    (0..count).map(row).collect()
}

fn put_keys(w: &mut Writer, keys: &[(RowKey, u32)]) {
    w.u32(u32::try_from(keys.len()).expect("at most MAX_KEYS"));
    for (key, position) in keys {
        w.bytes(&key.to_bytes()).u32(*position);
    }
}

fn limit(of: usize) -> u32 {
    u32::try_from(of).expect("a small constant")
}

fn take_keys(r: &mut Reader<'_>) -> Result<Vec<(RowKey, u32)>, Malformed> {
    let count = r.count("keys", RowKey::LEN + 4, limit(MAX_KEYS))?;
    (0..count).map(|_| Ok((RowKey::from_bytes(&r.array()?), r.u32()?))).collect()
}

fn bounded<'a>(r: &mut Reader<'a>, what: &'static str, limit: usize) -> Result<&'a str, Malformed> {
    let text = r.text(what)?;
    if text.len() > limit {
        return Err(Malformed::TooMany { what, value: text.len() as u64, limit: limit as u64 });
    }
    Ok(text)
}

fn take_flag(r: &mut Reader<'_>, what: &'static str) -> Result<bool, Malformed> {
    match r.u8()? {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Malformed::Unknown { what, value: other.into() }),
    }
}

/// A text cut to what the other side takes.
fn put_bounded(w: &mut Writer, text: &str, limit: usize) {
    w.text(&text[..text.floor_char_boundary(limit)]);
}

impl Hello {
    fn put(&self, w: &mut Writer) {
        w.u16(VERSION).u64(self.generation);
        put_bounded(w, &self.name, MAX_NAME);
        put_bounded(w, &self.control, MAX_TEXT);
        let data = &self.data[..self.data.len().min(MAX_DATA)];
        w.u8(u8::try_from(data.len()).expect("at most MAX_DATA"));
        for address in data {
            put_bounded(w, address, MAX_TEXT);
        }
        let secret = self.secret.map_or([0; 16], |s| s.0);
        w.u8(self.secret.is_some().into()).bytes(&secret);
    }

    fn take(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let generation = r.u64()?;
        let name = bounded(r, "name", MAX_NAME)?.to_owned();
        let control = bounded(r, "control address", MAX_TEXT)?.to_owned();
        let count = usize::from(r.u8()?);
        if count > MAX_DATA {
            let (value, limit) = (count as u64, MAX_DATA as u64);
            return Err(Malformed::TooMany { what: "data addresses", value, limit });
        }
        let data = (0..count)
            .map(|_| Ok(bounded(r, "data address", MAX_TEXT)?.to_owned()))
            .collect::<Result<_, _>>()?;
        let joins = take_flag(r, "mark of a secret")?;
        let secret = Secret(r.array()?);
        Ok(Self { generation, name, control, data, secret: joins.then_some(secret) })
    }
}

impl SpaceFacts {
    /// As many facts, as long, as a message takes; what is over is cut, on both nodes alike. Of a model of many files
    /// some are left out before anything else is: those differ together, and the namespace still tells.
    pub fn bounded(mut self) -> Self {
        let cut = |text: &str| text[..text.floor_char_boundary(MAX_TEXT)].to_owned();
        let (files, rest): (Vec<_>, Vec<_>) =
            self.what.iter().partition(|(name, _)| name.starts_with("model."));
        let kept = rest.into_iter().chain(files).take(MAX_FACTS);
        self.what = kept.map(|(name, value)| (cut(name), cut(value))).collect();
        self
    }

    fn put(&self, w: &mut Writer) {
        put_space(w, &self.space);
        w.u16(u16::try_from(self.what.len()).expect("at most MAX_FACTS"));
        for (name, value) in &self.what {
            w.text(name).text(value);
        }
    }

    fn take(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let space = take_space(r)?;
        let count = usize::from(r.u16()?);
        if count > MAX_FACTS {
            let (value, limit) = (count as u64, MAX_FACTS as u64);
            return Err(Malformed::TooMany { what: "facts", value, limit });
        }
        let mut what = BTreeMap::new();
        for _ in 0..count {
            let name = bounded(r, "name of a fact", MAX_TEXT)?.to_owned();
            what.insert(name, bounded(r, "value of a fact", MAX_TEXT)?.to_owned());
        }
        Ok(Self { space, what })
    }
}

impl Message {
    /// The whole frame, length first.
    ///
    /// # Panics
    /// When it is larger than [`MAX_FRAME`]: whoever makes messages keeps to the limits above.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        w.u32(0);
        self.put(&mut w);
        assert!(w.0.len() - 4 <= MAX_FRAME, "a frame of {} bytes", w.0.len());
        let length = u32::try_from(w.0.len() - 4).expect("asserted above");
        w.0[..4].copy_from_slice(&length.to_le_bytes());
        w.0
    }

    fn put(&self, w: &mut Writer) {
        match self {
            Self::Hello(hello) => hello.put(w.u8(1)),
            Self::ForeignHello(version) => {
                w.u8(1).u16(*version);
            }
            Self::Refused(reason) => put_bounded(w.u8(2), reason, MAX_TEXT),
            Self::Word { generation, word } => word.put(w.u8(word.kind()).u64(*generation)),
        }
    }

    /// `frame` without its length field.
    pub fn decode(frame: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(frame);
        let message = match r.u8()? {
            1 => match r.u16()? {
                VERSION => Self::Hello(Hello::take(&mut r)?),
                other => return Ok(Self::ForeignHello(other)),
            },
            2 => Self::Refused(bounded(&mut r, "reason", MAX_TEXT)?.to_owned()),
            kind => Self::Word { generation: r.u64()?, word: Word::take(kind, &mut r)? },
        };
        r.end()?;
        Ok(message)
    }
}

impl Word {
    fn kind(&self) -> u8 {
        match self {
            Self::Facts { .. } => 3,
            Self::Snapshot { .. } => 4,
            Self::Delta { .. } => 5,
            Self::Resync => 6,
            Self::Heartbeat { .. } => 7,
            Self::Ticket(_) => 8,
            Self::Bye => 9,
            Self::Offer { .. } => 10,
            Self::Forget { .. } => 13,
            Self::Forgotten { .. } => 14,
        }
    }

    fn put(&self, w: &mut Writer) {
        match self {
            Self::Facts { number, facts } => {
                w.u32(*number).u8(facts.is_some().into());
                if let Some(facts) = facts {
                    facts.put(w);
                }
            }
            Self::Snapshot { space, epoch, part, last, keys } => {
                put_space(w, space);
                w.u32(*epoch).u32(*part).u8((*last).into());
                put_keys(w, keys);
            }
            Self::Delta { space, epoch, seq, added, removed } => {
                put_space(w, space);
                w.u32(*epoch).u64(*seq);
                put_keys(w, added);
                w.u32(u32::try_from(removed.len()).expect("at most MAX_KEYS"));
                for key in removed {
                    w.bytes(&key.to_bytes());
                }
            }
            Self::Offer { space, rows } => {
                put_space(w, space);
                put_rows(w, rows);
            }
            Self::Forget { owner } => {
                w.text(owner);
            }
            Self::Forgotten { owner, done: Forgotten { keys, rows, trouble } } => {
                w.text(owner).u64(*keys).u64(*rows);
                put_bounded(w, trouble, MAX_TEXT);
            }
            Self::Resync | Self::Bye => {}
            Self::Heartbeat { facts, epoch, seq, complete, note } => {
                w.u32(*facts).u32(*epoch).u64(*seq).u8((*complete).into());
                w.u32(u32::try_from(note.len()).expect("at most MAX_NOTE")).bytes(note.as_bytes());
            }
            Self::Ticket(ticket) => {
                w.bytes(&ticket.0);
            }
        }
    }

    fn take(kind: u8, r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(match kind {
            3 => {
                let number = r.u32()?;
                let there = take_flag(r, "mark of a space")?;
                Self::Facts { number, facts: there.then(|| SpaceFacts::take(r)).transpose()? }
            }
            4 => Self::Snapshot {
                space: take_space(r)?,
                epoch: r.u32()?,
                part: r.u32()?,
                last: take_flag(r, "mark of the last part")?,
                keys: take_keys(r)?,
            },
            5 => {
                let (space, epoch, seq, added) = (take_space(r)?, r.u32()?, r.u64()?, take_keys(r)?);
                let count = r.count("removed keys", RowKey::LEN, limit(MAX_KEYS))?;
                let removed =
                    (0..count).map(|_| Ok(RowKey::from_bytes(&r.array()?))).collect::<Result<_, _>>()?;
                Self::Delta { space, epoch, seq, added, removed }
            }
            6 => Self::Resync,
            7 => {
                let (facts, epoch, seq) = (r.u32()?, r.u32()?, r.u64()?);
                let complete = take_flag(r, "mark of completeness")?;
                let length = r.count("bytes of a note", 1, limit(MAX_NOTE))?;
                let note = std::str::from_utf8(r.bytes(length)?).map_err(|_| Malformed::Text("note"))?;
                Self::Heartbeat { facts, epoch, seq, complete, note: note.to_owned() }
            }
            8 => Self::Ticket(Ticket(r.array()?)),
            9 => Self::Bye,
            10 => Self::Offer { space: take_space(r)?, rows: take_rows(r)? },
            13 => Self::Forget { owner: bounded(r, "owner", MAX_OWNER)?.to_owned() },
            14 => {
                let owner = bounded(r, "owner", MAX_OWNER)?.to_owned();
                let (keys, rows) = (r.u64()?, r.u64()?);
                let trouble = bounded(r, "trouble", MAX_TEXT)?.to_owned();
                Self::Forgotten { owner, done: Forgotten { keys, rows, trouble } }
            }
            other => return Err(Malformed::Unknown { what: "kind of message", value: other.into() }),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::base::block::{BlockHash, GroupId, Namespace, Rank};

    fn key(n: u8) -> RowKey {
        RowKey { hash: BlockHash([n; 32]), group: GroupId(1) }
    }

    fn word(word: Word) -> Message {
        Message::Word { generation: 6, word }
    }

    fn one_of_each() -> Vec<Message> {
        let space = Space { namespace: Namespace([8; 32]), rank: Rank { index: 1, of: 2 } };
        let what = BTreeMap::from([("vllm".to_owned(), "0.32.0".to_owned())]);
        vec![
            Message::Hello(Hello {
                generation: 4,
                name: "spark-a".into(),
                control: "h:1".into(),
                data: vec!["h:2".into(), "i:2".into()],
                secret: Some(Secret([9; 16])),
            }),
            Message::ForeignHello(VERSION + 1),
            Message::Refused("no".into()),
            word(Word::Facts { number: 2, facts: Some(SpaceFacts { space, what }) }),
            word(Word::Facts { number: 3, facts: None }),
            word(Word::Snapshot {
                space,
                epoch: 2,
                part: 3,
                last: true,
                keys: vec![(key(1), 16), (key(2), 32)],
            }),
            word(Word::Delta { space, epoch: 2, seq: 3, added: vec![(key(1), 16)], removed: vec![key(3)] }),
            word(Word::Resync),
            word(Word::Heartbeat { facts: 2, epoch: 3, seq: 4, complete: true, note: "{}".into() }),
            word(Word::Ticket(Ticket([5; 32]))),
            word(Word::Offer {
                space,
                rows: vec![
                    Row { key: key(1), position: 16, owner: None },
                    Row { key: key(2), position: 32, owner: Some("".into()) },
                    Row { key: key(3), position: 48, owner: Some("ann".into()) },
                ],
            }),
            word(Word::Forget { owner: "ann".into() }),
            word(Word::Forgotten {
                owner: "".into(),
                done: Forgotten { keys: 1, rows: 2, trouble: "the drive says no".into() },
            }),
            word(Word::Bye),
        ]
    }

    #[test]
    fn every_message_reads_back_and_no_cut_one_does() {
        for message in one_of_each() {
            let frame = message.encode();
            assert_eq!(u32::from_le_bytes(frame[..4].try_into().unwrap()) as usize, frame.len() - 4);
            assert_eq!(Message::decode(&frame[4..]), Ok(message.clone()));
            for cut in 4..frame.len() {
                assert_ne!(Message::decode(&frame[4..cut]), Ok(message.clone()), "{message:?} at {cut}");
            }
        }
    }

    #[test]
    fn of_more_facts_than_fit_files_of_the_model_are_left_out_first() {
        let files = (0..100).map(|n| (format!("model.{n:03}.safetensors"), "x".to_owned()));
        let rest = ["hash.seed", "version.vllm"].map(|name| (name.to_owned(), "1".to_owned()));
        let space = Space { namespace: Namespace([8; 32]), rank: Rank::ONLY };
        let facts = SpaceFacts { space, what: files.chain(rest).collect() }.bounded();
        assert_eq!(facts.what.len(), MAX_FACTS);
        assert!(facts.what.contains_key("hash.seed") && facts.what.contains_key("version.vllm"));
    }

    #[test]
    fn the_largest_messages_fit_into_a_frame() {
        let keys = vec![(key(1), 1); MAX_KEYS];
        let removed = vec![key(1); MAX_KEYS];
        let space = Space { namespace: Namespace([8; 32]), rank: Rank::ONLY };
        let delta = word(Word::Delta { space, epoch: 1, seq: 1, added: keys, removed });
        assert!(delta.encode().len() <= MAX_FRAME);
        let row = Row { key: key(1), position: 1, owner: Some("o".repeat(MAX_OWNER).into()) };
        let offer = word(Word::Offer { space, rows: vec![row; MAX_OFFERED] });
        assert!(offer.encode().len() <= MAX_FRAME);
        let what = (0..100).map(|n| (format!("{n:05000}"), "v".repeat(9000))).collect();
        let facts = SpaceFacts { space, what }.bounded();
        let message = word(Word::Facts { number: 1, facts: Some(facts) });
        assert_eq!(Message::decode(&message.encode()[4..]), Ok(message));
    }

    #[test]
    fn limits_are_kept_when_reading() {
        let note = "n".repeat(MAX_NOTE + 1);
        let beat = word(Word::Heartbeat { facts: 1, epoch: 1, seq: 1, complete: false, note });
        assert!(matches!(Message::decode(&beat.encode()[4..]), Err(Malformed::TooMany { .. })));
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_reader_panic(mut bytes in proptest::collection::vec(any::<u8>(), 1..300), kind in 0_u8..16) {
            bytes[0] = kind;
            if let Ok(message) = Message::decode(&bytes)
                && !matches!(message, Message::ForeignHello(_))
            {
                prop_assert_eq!(Message::decode(&message.encode()[4..]), Ok(message));
            }
        }
    }
}
