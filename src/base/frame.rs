//! The engine's door: frames between the plugin in vLLM's scheduler process and the node, over a Unix socket.
//!
//! A frame is `length u32 | kind u8 | body`, little-endian, `length` counting kind and body. Kinds 1 to 63 go from
//! the engine to the node, 64 and up the other way. HELLO and WELCOME carry JSON and one descriptor each
//! (SCM_RIGHTS, with the first byte of the frame): the row area, and the lookup table. All other bodies are binary.
//!
//! ```text
//! 1  HELLO    JSON (geometry::Hello)                                            + descriptor of the row area
//! 2  STORE    job u64 | request text | count u32 | count × item                    rows stay pinned until DONE
//! 3  LOAD     job u64 | deadline_us u32 (0 = none) | request text | count u32 | count × item   in prefix order
//! 4  REPORT   request text | prompt u32 | device u32 | staging u32 | drive u32 | peer u32 | computed u32
//!             | count u32 | count × (key 36 | position u32)                       tokens by source, then the chain
//! 64 WELCOME  JSON (geometry::Welcome)                                          + descriptor of the lookup table
//! 65 DONE     job u64 | micros u32 | count u32 | count × outcome u8                 in the order of the job's items
//! 66 TIER     on u8 | reason text                                                      the canary's or an operator's word
//! 67 PACE     prefill_tokens_per_s u32
//! 68 REFUSE   reason text                                                              instead of WELCOME; the node closes
//! item = key 36 | position u32 | row u32;   text = length u16 | UTF-8
//! ```
//!
//! Rules. One HELLO, first. A job's number is used once per connection. DONE comes once for every job, and only
//! when nothing of it can still touch a row. A deadline is the node's to keep: what has not arrived by then is
//! `Failed`, what has is kept. Frames over [`MAX_FRAME`] end the connection.

use super::block::{RowItem, RowKey};
use super::codec::{Malformed, Reader, Writer};

/// Version of everything in this file and in [`super::table`]; both sides must have the same.
pub const PROTOCOL: u16 = 2;

/// Largest frame, length field excluded: the chain of a million-token prompt at 16 tokens a block is 2.6 MB.
pub const MAX_FRAME: usize = 4 << 20;

/// Items that fit into one frame; longer jobs do not exist, because a row area has fewer rows or the plugin splits.
pub const MAX_ITEMS: u32 = 65_536;

/// What became of one item of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Not there, damaged, too late, or no room: a miss for a load, not kept for a store.
    Failed,
    /// Loaded from this node's drive.
    FromDrive,
    /// Loaded from the other node.
    FromPeer,
    /// Written to this node's drive.
    Stored,
    /// Not written, because it is held already, or because it is not worth what would have to go for it: there is no
    /// point in offering it again.
    Held,
}

impl Outcome {
    pub fn is_ok(self) -> bool {
        self != Self::Failed
    }

    fn to_u8(self) -> u8 {
        match self {
            Self::Failed => 0,
            Self::FromDrive => 1,
            Self::FromPeer => 2,
            Self::Stored => 3,
            Self::Held => 4,
        }
    }

    fn from_u8(v: u8) -> Result<Self, Malformed> {
        Ok(match v {
            0 => Self::Failed,
            1 => Self::FromDrive,
            2 => Self::FromPeer,
            3 => Self::Stored,
            4 => Self::Held,
            other => return Err(Malformed::Unknown { what: "outcome", value: other.into() }),
        })
    }
}

/// Prompt tokens of one request by where their KV came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Sources {
    pub prompt: u32,
    /// In the engine's own cache.
    pub device: u32,
    /// In the shared rows already.
    pub staging: u32,
    /// Read from this node's drive.
    pub drive: u32,
    /// Fetched from the other node.
    pub peer: u32,
    pub computed: u32,
}

/// What an engine says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromEngine {
    /// JSON of [`super::geometry::Hello`].
    Hello(Vec<u8>),
    Store {
        job: u64,
        /// The engine's id of the request that computed the rows: whose they are follows from it.
        request: String,
        items: Vec<RowItem>,
    },
    Load {
        job: u64,
        deadline_us: u32,
        request: String,
        items: Vec<RowItem>,
    },
    Report {
        request: String,
        sources: Sources,
        chain: Vec<(RowKey, u32)>,
    },
}

/// What a node says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromNode {
    /// JSON of [`super::geometry::Welcome`].
    Welcome(Vec<u8>),
    Done {
        job: u64,
        micros: u32,
        outcomes: Vec<Outcome>,
    },
    Tier {
        on: bool,
        reason: String,
    },
    Pace {
        prefill_tokens_per_s: u32,
    },
    Refuse {
        reason: String,
    },
}

const ITEM: usize = RowKey::LEN + 8;

fn put_items(w: &mut Writer, items: &[RowItem]) {
    w.u32(u32::try_from(items.len()).expect("bounded by MAX_ITEMS"));
    for item in items {
        w.bytes(&item.key.to_bytes()).u32(item.position).u32(item.row);
    }
}

fn take_items(r: &mut Reader<'_>) -> Result<Vec<RowItem>, Malformed> {
    let count = r.count("items", ITEM, MAX_ITEMS)?;
    (0..count)
        .map(|_| Ok(RowItem { key: RowKey::from_bytes(&r.array()?), position: r.u32()?, row: r.u32()? }))
        .collect()
}

fn framed(kind: u8, body: impl FnOnce(&mut Writer)) -> Vec<u8> {
    let mut w = Writer::default();
    w.u32(0).u8(kind);
    body(&mut w);
    let length = u32::try_from(w.0.len() - 4).expect("bounded by MAX_FRAME");
    w.0[..4].copy_from_slice(&length.to_le_bytes());
    w.0
}

impl FromEngine {
    /// The whole frame, length first.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Hello(json) => framed(1, |w| {
                w.bytes(json);
            }),
            Self::Store { job, request, items } => framed(2, |w| put_items(w.u64(*job).text(request), items)),
            Self::Load { job, deadline_us, request, items } => {
                framed(3, |w| put_items(w.u64(*job).u32(*deadline_us).text(request), items))
            }
            Self::Report { request, sources: s, chain } => framed(4, |w| {
                w.text(request);
                for n in [s.prompt, s.device, s.staging, s.drive, s.peer, s.computed] {
                    w.u32(n);
                }
                w.u32(u32::try_from(chain.len()).expect("bounded by MAX_ITEMS"));
                for (key, position) in chain {
                    w.bytes(&key.to_bytes()).u32(*position);
                }
            }),
        }
    }

    /// `frame` without its length field.
    pub fn decode(frame: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(frame);
        let said = match r.u8()? {
            1 => Self::Hello(r.rest().to_vec()),
            2 => Self::Store {
                job: r.u64()?,
                request: r.text("request")?.to_owned(),
                items: take_items(&mut r)?,
            },
            3 => Self::Load {
                job: r.u64()?,
                deadline_us: r.u32()?,
                request: r.text("request")?.to_owned(),
                items: take_items(&mut r)?,
            },
            4 => {
                let request = r.text("request")?.to_owned();
                let sources = Sources {
                    prompt: r.u32()?,
                    device: r.u32()?,
                    staging: r.u32()?,
                    drive: r.u32()?,
                    peer: r.u32()?,
                    computed: r.u32()?,
                };
                let count = r.count("chain", RowKey::LEN + 4, MAX_ITEMS)?;
                let chain = (0..count)
                    .map(|_| Ok((RowKey::from_bytes(&r.array()?), r.u32()?)))
                    .collect::<Result<_, Malformed>>()?;
                Self::Report { request, sources, chain }
            }
            other => return Err(Malformed::Unknown { what: "kind of frame", value: other.into() }),
        };
        r.end()?;
        Ok(said)
    }
}

impl FromNode {
    /// The whole frame, length first.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Welcome(json) => framed(64, |w| {
                w.bytes(json);
            }),
            Self::Done { job, micros, outcomes } => framed(65, |w| {
                w.u64(*job).u32(*micros).u32(u32::try_from(outcomes.len()).expect("bounded by MAX_ITEMS"));
                for outcome in outcomes {
                    w.u8(outcome.to_u8());
                }
            }),
            Self::Tier { on, reason } => framed(66, |w| {
                w.u8((*on).into()).text(reason);
            }),
            Self::Pace { prefill_tokens_per_s } => framed(67, |w| {
                w.u32(*prefill_tokens_per_s);
            }),
            Self::Refuse { reason } => framed(68, |w| {
                w.text(reason);
            }),
        }
    }

    /// `frame` without its length field.
    pub fn decode(frame: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(frame);
        let said = match r.u8()? {
            64 => Self::Welcome(r.rest().to_vec()),
            65 => {
                let (job, micros) = (r.u64()?, r.u32()?);
                let count = r.count("outcomes", 1, MAX_ITEMS)?;
                let outcomes =
                    r.bytes(count)?.iter().map(|&v| Outcome::from_u8(v)).collect::<Result<_, _>>()?;
                Self::Done { job, micros, outcomes }
            }
            66 => Self::Tier { on: r.u8()? != 0, reason: r.text("reason")?.to_owned() },
            67 => Self::Pace { prefill_tokens_per_s: r.u32()? },
            68 => Self::Refuse { reason: r.text("reason")?.to_owned() },
            other => return Err(Malformed::Unknown { what: "kind of frame", value: other.into() }),
        };
        r.end()?;
        Ok(said)
    }
}

/// Length of the next frame's kind and body, once four bytes of it are here.
pub fn frame_length(head: [u8; 4]) -> Result<usize, Malformed> {
    let length = u32::from_le_bytes(head) as usize;
    if length == 0 || length > MAX_FRAME {
        return Err(Malformed::TooMany {
            what: "frame length",
            value: length as u64,
            limit: MAX_FRAME as u64,
        });
    }
    Ok(length)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::block::{BlockHash, GroupId};
    use super::*;

    fn key() -> impl Strategy<Value = RowKey> {
        (any::<[u8; 32]>(), any::<u32>()).prop_map(|(h, g)| RowKey { hash: BlockHash(h), group: GroupId(g) })
    }

    fn items() -> impl Strategy<Value = Vec<RowItem>> {
        let item = (key(), any::<u32>(), any::<u32>()).prop_map(|(key, position, row)| RowItem {
            key,
            position,
            row,
        });
        proptest::collection::vec(item, 0..20)
    }

    proptest! {
        #[test]
        fn what_the_engine_says_reads_back(job: u64, deadline_us: u32, request in ".{0,40}", items in items()) {
            for said in [
                FromEngine::Store { job, request: request.clone(), items: items.clone() },
                FromEngine::Load { job, deadline_us, request: request.clone(), items: items.clone() },
                FromEngine::Report {
                    request,
                    sources: Sources { prompt: 9, device: 1, staging: 2, drive: 3, peer: 1, computed: 2 },
                    chain: items.iter().map(|i| (i.key, i.position)).collect(),
                },
            ] {
                let bytes = said.encode();
                prop_assert_eq!(frame_length(bytes[..4].try_into().unwrap()), Ok(bytes.len() - 4));
                prop_assert_eq!(FromEngine::decode(&bytes[4..]), Ok(said));
            }
        }

        #[test]
        fn no_bytes_make_the_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = FromEngine::decode(&bytes);
            let _ = FromNode::decode(&bytes);
        }
    }

    #[test]
    fn what_the_node_says_reads_back() {
        for said in [
            FromNode::Welcome(b"{}".to_vec()),
            FromNode::Done {
                job: 7,
                micros: 12,
                outcomes: vec![
                    Outcome::Failed,
                    Outcome::FromDrive,
                    Outcome::FromPeer,
                    Outcome::Stored,
                    Outcome::Held,
                ],
            },
            FromNode::Tier { on: false, reason: "the canary differs".into() },
            FromNode::Pace { prefill_tokens_per_s: 1200 },
            FromNode::Refuse { reason: "protocol".into() },
        ] {
            assert_eq!(FromNode::decode(&said.encode()[4..]), Ok(said));
        }
    }

    #[test]
    fn a_length_without_bound_is_refused() {
        assert!(frame_length(0_u32.to_le_bytes()).is_err());
        assert!(frame_length(u32::MAX.to_le_bytes()).is_err());
    }
}
