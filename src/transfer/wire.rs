//! Bytes of a data connection: who may read rows, what is asked for, what comes back.
//!
//! ```text
//! client → server   magic "SKVD" | version u16 | ticket 32                                      once
//! server → client   accepted u8 (1)                                                             once; else it closes
//! client → server   length u32 | id u64 | space 36 | row_bytes u32 | count u32 | count × key 36
//! server → client   for every key of every request, in the order asked:
//!                   kind u8 (1 row, 2 missing) | id u64 | index u32 | space 36 | key 36 | position u32
//!                   | length u32 | algorithm u8 | checksum u64 | crc64 of the head so far | payload
//! space = namespace 32 | rank u16 | ranks u16;   all little-endian but the group in a key
//! ```
//!
//! Replies come in the order of the requests, so a receiver always knows into which row the next byte belongs and
//! needs no table of its own. The payload's checksum was made before the row was written to its drive and travels
//! unchanged; the head has one of its own, because a damaged length would make everything after it unreadable.

use crate::base::block::{Namespace, Rank, RowKey, Space};
use crate::base::checksum::{CRC64_NVME, crc64};
use crate::base::codec::{Malformed, Reader, Writer};

pub const VERSION: u16 = 1;
pub const TICKET: usize = 32;
pub const PREAMBLE: usize = 4 + 2 + TICKET;
pub const ACCEPTED: u8 = 1;

const MAGIC: [u8; 4] = *b"SKVD";
const SPACE: usize = 36;

/// Rows in one request. Requests are small so that several rails share a fetch evenly.
pub const MAX_REQUEST_ROWS: usize = 64;

/// Largest request, length field excluded.
pub const MAX_REQUEST: usize = 8 + SPACE + 4 + 4 + MAX_REQUEST_ROWS * RowKey::LEN;

/// Largest row anybody may announce ([`crate::base::geometry::Hello::check`] has the same limit).
pub const MAX_ROW: u32 = 1 << 30;

/// Length of a reply's head.
pub const HEAD: usize = 1 + 8 + 4 + SPACE + RowKey::LEN + 4 + 4 + 1 + 8 + 8;

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

/// Rows asked for, in prefix order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub id: u64,
    pub space: Space,
    /// Size of a row at the asking side: what the server sets aside before it reads.
    pub row_bytes: u32,
    pub keys: Vec<RowKey>,
}

impl Request {
    /// The whole frame, length first.
    pub fn encode(&self) -> Vec<u8> {
        assert!(self.keys.len() <= MAX_REQUEST_ROWS, "{} keys in one request", self.keys.len());
        let mut w = Writer::default();
        w.u32(0).u64(self.id);
        put_space(&mut w, &self.space);
        w.u32(self.row_bytes).u32(u32::try_from(self.keys.len()).expect("asserted above"));
        for key in &self.keys {
            w.bytes(&key.to_bytes());
        }
        let length = u32::try_from(w.0.len() - 4).expect("asserted above");
        w.0[..4].copy_from_slice(&length.to_le_bytes());
        w.0
    }

    /// `frame` without its length field.
    pub fn decode(frame: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(frame);
        let (id, space, row_bytes) = (r.u64()?, take_space(&mut r)?, r.u32()?);
        if row_bytes == 0 || row_bytes > MAX_ROW {
            let (value, limit) = (row_bytes.into(), MAX_ROW.into());
            return Err(Malformed::TooMany { what: "bytes of a row", value, limit });
        }
        let limit = u32::try_from(MAX_REQUEST_ROWS).expect("a small constant");
        let count = r.count("keys of a request", RowKey::LEN, limit)?;
        let keys = (0..count).map(|_| Ok(RowKey::from_bytes(&r.array()?))).collect::<Result<_, _>>()?;
        r.end()?;
        Ok(Self { id, space, row_bytes, keys })
    }
}

/// What precedes a row, or stands for one that is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    pub id: u64,
    /// Which key of the request.
    pub index: u32,
    pub space: Space,
    pub key: RowKey,
    /// `None`: the row is not there.
    pub row: Option<RowHead>,
}

/// Facts of a row that follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowHead {
    pub position: u32,
    pub length: u32,
    pub checksum: u64,
}

/// Why a head was not understood.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadHead {
    #[error("the head of a reply is damaged")]
    Checksum,
    #[error(transparent)]
    Malformed(#[from] Malformed),
}

impl Head {
    pub fn encode(&self) -> [u8; HEAD] {
        let mut w = Writer::default();
        let row = self.row.unwrap_or(RowHead { position: 0, length: 0, checksum: 0 });
        w.u8(if self.row.is_some() { 1 } else { 2 }).u64(self.id).u32(self.index);
        put_space(&mut w, &self.space);
        w.bytes(&self.key.to_bytes()).u32(row.position).u32(row.length).u8(CRC64_NVME).u64(row.checksum);
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
        let kind = r.u8()?;
        let (id, index, space) = (r.u64()?, r.u32()?, take_space(&mut r)?);
        let key = RowKey::from_bytes(&r.array()?);
        let (position, length, algorithm) = (r.u32()?, r.u32()?, r.u8()?);
        let row = RowHead { position, length, checksum: r.u64()? };
        if algorithm != CRC64_NVME {
            return Err(Malformed::Unknown { what: "checksum algorithm", value: algorithm.into() }.into());
        }
        if length > MAX_ROW {
            let (value, limit) = (length.into(), MAX_ROW.into());
            return Err(Malformed::TooMany { what: "bytes of a row", value, limit }.into());
        }
        match kind {
            1 => Ok(Self { id, index, space, key, row: Some(row) }),
            2 => Ok(Self { id, index, space, key, row: None }),
            other => Err(Malformed::Unknown { what: "kind of reply", value: other.into() }.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::base::block::{BlockHash, GroupId};

    fn key(n: u8) -> RowKey {
        RowKey { hash: BlockHash([n; 32]), group: GroupId(n.into()) }
    }

    fn space() -> Space {
        Space { namespace: Namespace([3; 32]), rank: Rank { index: 1, of: 2 } }
    }

    #[test]
    fn a_request_reads_back_and_a_cut_one_does_not() {
        let request = Request { id: 7, space: space(), row_bytes: 4096, keys: (0..64).map(key).collect() };
        let frame = request.encode();
        assert_eq!(frame.len(), MAX_REQUEST + 4);
        assert_eq!(Request::decode(&frame[4..]), Ok(request));
        for cut in 4..frame.len() {
            assert!(Request::decode(&frame[4..cut]).is_err(), "{cut}");
        }
    }

    #[test]
    fn any_flipped_bit_of_a_head_is_noticed() {
        let row = Some(RowHead { position: 128, length: 8192, checksum: 77 });
        let head = Head { id: 1, index: 2, space: space(), key: key(9), row };
        let bytes = head.encode();
        assert_eq!(Head::decode(&bytes), Ok(head));
        for bit in 0..HEAD * 8 {
            let mut damaged = bytes;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Head::decode(&damaged), Err(BadHead::Checksum), "bit {bit}");
        }
        let missing = Head { row: None, ..head };
        assert_eq!(Head::decode(&missing.encode()), Ok(missing));
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
        fn no_bytes_make_the_reader_of_requests_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Request::decode(&bytes);
        }
    }
}
