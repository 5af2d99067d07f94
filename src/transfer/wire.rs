//! Bytes of a data connection: who may read rows, what is asked for, what comes back.
//!
//! ```text
//! client → server   magic "SKVD" | version u16 | ticket 32                                      once
//! server → client   accepted u8 (1)                                                             once; else it closes
//! client → server   word u8 | fetch u64 | id u64 | space 36 | key 36 | row_bytes u32 | offset u32 | length u32
//!                   | patience_ms u32 | for SINK: length bytes
//! server → client   for every PULL, FILL, SINK, MEET and READ, in the order asked:
//!                   kind u8 | id u64 | space 36 | key 36 | position u32 | row_bytes u32 | offset u32 | length u32
//!                   | algorithm u8 | checksum u64 | at u64 | crc64 of the head so far | for PIECE, CARD: length bytes
//! space = namespace 32 | rank u16 | ranks u16;   all little-endian but the group in a key
//! ```
//!
//! | word | meaning |
//! | --- | --- |
//! | 1 PULL | send this piece of this row |
//! | 2 AHEAD | this row will be pulled: begin to read it. No answer |
//! | 3 CANCEL | nothing of this fetch is wanted any more; with an id, only that piece is not. No answer, but what was pulled is answered with GONE unless it is on its way |
//! | 4 FILL | send `length` bytes of no meaning: what the rail carries from there to here |
//! | 5 SINK | take `length` bytes of no meaning and say that they came: from here to there |
//! | 6 MEET | say how this side reads memory of that one, where the fabric can |
//! | 7 READ | as PULL, but the piece may be left in memory that this side reads |
//! | 8 TAKEN | the piece of READ `id` was read or is not wanted: its memory is free. No answer |
//!
//! | kind | meaning |
//! | --- | --- |
//! | 1 PIECE | the piece follows; position, size and checksum are those of its row |
//! | 2 MISSING | the row is not there |
//! | 3 GONE | cancelled, or its patience is over |
//! | 4 WAIT | the next answer is being read; the connection is alive. Comes at least every [`BEAT`], counts as no answer |
//! | 5 CARD | what a reader needs to know of the serving side's memory follows; no bytes: it cannot be read |
//! | 6 LIES | as PIECE, but its bytes lie `at` there until TAKEN, or the end of the connection |
//!
//! Answers come in the order of the words, so a receiver always knows into which piece the next byte belongs. The
//! payload's checksum was made before the row was written to its drive and travels unchanged; the head has one of
//! its own, because a damaged length would make everything after it unreadable. Patience travels as a span, because
//! the boxes' clocks differ.

use std::time::Duration;

use crate::base::block::{BlockHash, GroupId, Namespace, Rank, RowKey, Space};
use crate::base::checksum::{CRC64_NVME, crc64};
use crate::base::codec::{Malformed, Reader, Writer};

pub const VERSION: u16 = 3;
pub const TICKET: usize = 32;
pub const PREAMBLE: usize = 4 + 2 + TICKET;
pub const ACCEPTED: u8 = 1;

const MAGIC: [u8; 4] = *b"SKVD";
const SPACE: usize = 36;

/// Largest row anybody may announce ([`crate::base::geometry::Hello::check`] has the same limit).
pub const MAX_ROW: u32 = 1 << 30;

/// Most bytes of one FILL or SINK.
pub const MAX_PROBE: u32 = 64 << 20;

/// Most bytes of a CARD.
pub const MAX_CARD: u32 = 1 << 20;

/// Length of a word.
pub const ASK: usize = 1 + 8 + 8 + SPACE + RowKey::LEN + 4 * 4;

/// Length of an answer's head.
pub const HEAD: usize = 1 + 8 + SPACE + RowKey::LEN + 4 * 4 + 1 + 8 + 8 + 8;

/// Longest silence of a server that owes an answer.
pub const BEAT: Duration = Duration::from_millis(100);

/// Proof of a control session, shown once at the start of a data connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Ticket(pub [u8; TICKET]);

impl std::fmt::Debug for Ticket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Ticket(…)")
    }
}

/// Compares secrets without telling by its duration where they differ.
pub fn same_secret(one: &[u8; 32], other: &[u8; 32]) -> bool {
    let differ = one.iter().zip(other).fold(0_u8, |acc, (a, b)| acc | (a ^ b));
    std::hint::black_box(differ) == 0
}

/// Writes a space: namespace, rank, ranks.
pub fn put_space(w: &mut Writer, space: &Space) {
    w.bytes(&space.namespace.0).u16(space.rank.index).u16(space.rank.of);
}

/// Reads what [`put_space`] wrote.
pub fn take_space(r: &mut Reader<'_>) -> Result<Space, Malformed> {
    let namespace = Namespace(r.array()?);
    Ok(Space { namespace, rank: Rank { index: r.u16()?, of: r.u16()? } })
}

/// First bytes of a data connection.
pub fn preamble(ticket: &Ticket) -> [u8; PREAMBLE] {
    let mut out = [0; PREAMBLE];
    out[..4].copy_from_slice(&MAGIC);
    out[4..6].copy_from_slice(&VERSION.to_le_bytes());
    out[6..].copy_from_slice(&ticket.0);
    out
}

/// The ticket in a preamble of our version.
pub fn take_preamble(bytes: &[u8; PREAMBLE]) -> Result<Ticket, Malformed> {
    let mut r = Reader::new(bytes);
    if r.array::<4>()? != MAGIC {
        return Err(Malformed::Text("start of a data connection"));
    }
    let version = r.u16()?;
    if version != VERSION {
        return Err(Malformed::Unknown { what: "version of a data connection", value: version.into() });
    }
    Ok(Ticket(r.array()?))
}

/// What a word wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    Pull,
    Ahead,
    Cancel,
    Fill,
    Sink,
    Meet,
    Read,
    Taken,
}

/// One word of the fetching side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    pub want: Want,
    /// Which fetch of the asking side; what it gives up it gives up by this number.
    pub fetch: u64,
    /// Which piece; the answer has the same number. For a cancel, 0 is every piece.
    pub id: u64,
    pub space: Space,
    pub key: RowKey,
    /// Size of a row at the asking side: what the server sets aside before it reads.
    pub row_bytes: u32,
    /// Which bytes of the row.
    pub offset: u32,
    pub length: u32,
    /// After so many milliseconds nobody waits for it any more; 0: somebody always does.
    pub patience_ms: u32,
}

impl Ask {
    /// A word that names no row.
    pub fn plain(want: Want, fetch: u64, id: u64, length: u32) -> Self {
        let space = Space { namespace: Namespace([0; 32]), rank: Rank::ONLY };
        let key = RowKey { hash: BlockHash([0; 32]), group: GroupId(0) };
        Self { want, fetch, id, space, key, row_bytes: 0, offset: 0, length, patience_ms: 0 }
    }

    pub fn encode(&self) -> [u8; ASK] {
        let mut w = Writer::default();
        let word = match self.want {
            Want::Pull => 1,
            Want::Ahead => 2,
            Want::Cancel => 3,
            Want::Fill => 4,
            Want::Sink => 5,
            Want::Meet => 6,
            Want::Read => 7,
            Want::Taken => 8,
        };
        w.u8(word).u64(self.fetch).u64(self.id);
        put_space(&mut w, &self.space);
        w.bytes(&self.key.to_bytes())
            .u32(self.row_bytes)
            .u32(self.offset)
            .u32(self.length)
            .u32(self.patience_ms);
        w.0.try_into().expect("ASK counts exactly these fields")
    }

    pub fn decode(bytes: &[u8; ASK]) -> Result<Self, Malformed> {
        let mut r = Reader::new(bytes);
        let want = match r.u8()? {
            1 => Want::Pull,
            2 => Want::Ahead,
            3 => Want::Cancel,
            4 => Want::Fill,
            5 => Want::Sink,
            6 => Want::Meet,
            7 => Want::Read,
            8 => Want::Taken,
            other => {
                return Err(Malformed::Unknown { what: "word of a data connection", value: other.into() });
            }
        };
        let (fetch, id, space) = (r.u64()?, r.u64()?, take_space(&mut r)?);
        let key = RowKey::from_bytes(&r.array()?);
        let (row_bytes, offset, length, patience_ms) = (r.u32()?, r.u32()?, r.u32()?, r.u32()?);
        let ask = Self { want, fetch, id, space, key, row_bytes, offset, length, patience_ms };
        ask.check()?;
        Ok(ask)
    }

    fn check(&self) -> Result<(), Malformed> {
        let over = |what, value: u32, limit: u32| {
            Err(Malformed::TooMany { what, value: value.into(), limit: limit.into() })
        };
        match self.want {
            Want::Cancel | Want::Meet | Want::Taken => Ok(()),
            Want::Fill | Want::Sink if self.length > MAX_PROBE => {
                over("bytes of a probe", self.length, MAX_PROBE)
            }
            Want::Fill | Want::Sink => Ok(()),
            Want::Pull | Want::Read | Want::Ahead if self.row_bytes == 0 || self.row_bytes > MAX_ROW => {
                over("bytes of a row", self.row_bytes, MAX_ROW)
            }
            Want::Pull | Want::Read | Want::Ahead => match self.offset.checked_add(self.length) {
                Some(end) if end <= self.row_bytes => Ok(()),
                _ => over("bytes of a piece", self.length, self.row_bytes),
            },
        }
    }
}

/// What an answer says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Piece,
    Missing,
    Gone,
    Wait,
    Card,
    Lies,
}

/// What precedes a piece, or stands for one that does not come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    pub kind: Kind,
    pub id: u64,
    pub space: Space,
    pub key: RowKey,
    /// Of the row.
    pub position: u32,
    pub row_bytes: u32,
    pub checksum: u64,
    /// Of the piece.
    pub offset: u32,
    pub length: u32,
    /// Where its bytes lie, for LIES.
    pub at: u64,
}

/// Why a head was not understood.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadHead {
    #[error("the head of an answer is damaged")]
    Checksum,
    #[error(transparent)]
    Malformed(#[from] Malformed),
}

impl Head {
    /// An answer without a payload.
    pub fn bare(kind: Kind, ask: &Ask) -> Self {
        let &Ask { id, space, key, .. } = ask;
        Self { kind, id, space, key, position: 0, row_bytes: 0, checksum: 0, offset: 0, length: 0, at: 0 }
    }

    pub fn encode(&self) -> [u8; HEAD] {
        let mut w = Writer::default();
        let kind = match self.kind {
            Kind::Piece => 1,
            Kind::Missing => 2,
            Kind::Gone => 3,
            Kind::Wait => 4,
            Kind::Card => 5,
            Kind::Lies => 6,
        };
        w.u8(kind).u64(self.id);
        put_space(&mut w, &self.space);
        w.bytes(&self.key.to_bytes())
            .u32(self.position)
            .u32(self.row_bytes)
            .u32(self.offset)
            .u32(self.length);
        w.u8(CRC64_NVME).u64(self.checksum).u64(self.at);
        let crc = crc64(&[&w.0]);
        w.u64(crc);
        w.0.try_into().expect("HEAD counts exactly these fields")
    }

    pub fn decode(bytes: &[u8; HEAD]) -> Result<Self, BadHead> {
        let (head, crc) = bytes.split_at(HEAD - 8);
        if crc64(&[head]).to_le_bytes() != crc {
            return Err(BadHead::Checksum);
        }
        let mut r = Reader::new(head);
        let kind = match r.u8()? {
            1 => Kind::Piece,
            2 => Kind::Missing,
            3 => Kind::Gone,
            4 => Kind::Wait,
            5 => Kind::Card,
            6 => Kind::Lies,
            other => return Err(Malformed::Unknown { what: "kind of answer", value: other.into() }.into()),
        };
        let (id, space) = (r.u64()?, take_space(&mut r)?);
        let key = RowKey::from_bytes(&r.array()?);
        let (position, row_bytes, offset, length) = (r.u32()?, r.u32()?, r.u32()?, r.u32()?);
        let (algorithm, checksum, at) = (r.u8()?, r.u64()?, r.u64()?);
        if algorithm != CRC64_NVME {
            return Err(Malformed::Unknown { what: "checksum algorithm", value: algorithm.into() }.into());
        }
        let limit = if kind == Kind::Card { MAX_CARD } else { MAX_ROW };
        if length > limit {
            let (value, limit) = (length.into(), limit.into());
            return Err(Malformed::TooMany { what: "bytes of a piece", value, limit }.into());
        }
        Ok(Self { kind, id, space, key, position, row_bytes, checksum, offset, length, at })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ask(want: Want) -> Ask {
        let space = Space { namespace: Namespace([3; 32]), rank: Rank { index: 1, of: 2 } };
        let key = RowKey { hash: BlockHash([9; 32]), group: GroupId(9) };
        Ask { want, fetch: 5, id: 7, space, key, row_bytes: 8192, offset: 4096, length: 4096, patience_ms: 9 }
    }

    #[test]
    fn words_read_back() {
        let all = [
            Want::Pull,
            Want::Ahead,
            Want::Cancel,
            Want::Fill,
            Want::Sink,
            Want::Meet,
            Want::Read,
            Want::Taken,
        ];
        for want in all {
            assert_eq!(Ask::decode(&ask(want).encode()), Ok(ask(want)));
        }
    }

    #[test]
    fn what_lies_outside_its_row_or_is_too_much_is_refused() {
        let piece = ask(Want::Pull);
        for bad in [
            Ask { offset: 4097, ..piece },
            Ask { offset: u32::MAX, ..piece },
            Ask { row_bytes: 0, offset: 0, length: 0, ..piece },
            Ask { row_bytes: MAX_ROW + 1, ..piece },
            Ask { want: Want::Ahead, length: 8193, ..piece },
            Ask { want: Want::Fill, length: MAX_PROBE + 1, ..piece },
            Ask { want: Want::Sink, length: MAX_PROBE + 1, ..piece },
        ] {
            assert!(Ask::decode(&bad.encode()).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn any_flipped_bit_of_a_head_is_noticed() {
        let bare = Head::bare(Kind::Missing, &ask(Want::Pull));
        let head = Head {
            kind: Kind::Piece,
            position: 128,
            row_bytes: 8192,
            checksum: 77,
            offset: 1,
            length: 2,
            at: 3,
            ..bare
        };
        let bytes = head.encode();
        assert_eq!(Head::decode(&bytes), Ok(head));
        for bit in 0..HEAD * 8 {
            let mut damaged = bytes;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Head::decode(&damaged), Err(BadHead::Checksum), "bit {bit}");
        }
        for kind in [Kind::Missing, Kind::Gone, Kind::Wait, Kind::Card, Kind::Lies] {
            let other = Head { kind, ..bare };
            assert_eq!(Head::decode(&other.encode()), Ok(other));
        }
    }

    #[test]
    fn secrets_are_equal_only_when_every_byte_is() {
        let one = [5; 32];
        assert!(same_secret(&one, &one));
        for at in 0..32 {
            let mut other = one;
            other[at] ^= 1;
            assert!(!same_secret(&one, &other));
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_reader_of_words_panic(bytes in proptest::array::uniform32(any::<u8>()), word in 0_u8..10) {
            let mut frame = [0; ASK];
            for (n, byte) in frame.iter_mut().enumerate() {
                *byte = bytes[n % 32];
            }
            frame[0] = word;
            let _ = Ask::decode(&frame);
        }
    }
}
