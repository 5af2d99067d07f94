//! Bytes on the drive, version 2: what a store's files hold, and how they are read back.
//!
//! ```text
//! folder/lock                  empty; held by flock while a store is open
//! folder/store                 one page: Identity
//! folder/segment-<sequence>.kv one segment, preallocated to its whole size:
//!
//!   page 0        Head        whose segment this is, and how long
//!   page 1        Record      one page that says what the payload is …
//!   …             payload     … and the row itself, padded to whole pages
//!   …             further records, back to back, in the order in which they were appended
//!   (free)        zeros, or what a cut left
//!   … end-1       Foot        one entry per record, padded to whole pages; only in a sealed segment
//!   last page     Trailer     where the foot begins, and its checksum
//! ```
//!
//! A page is 4096 bytes, because direct I/O wants that. Numbers are little-endian and of fixed width. Every page of
//! our own ends in a crc64 of what stands before, and begins with a magic and the version, so that a later version
//! is told from damage before anything else is believed. Records carry the store's id and the segment's sequence:
//! bytes that an earlier file left in the same place on the drive never count.
//!
//! The foot stands at the end, not behind the last record, so that a reader finds it with one read of the last page
//! and one more. It lists what the records say about themselves; a start reads feet only, and each row is verified
//! against its own record when it is read.
//!
//! A row that had to go is *released*: its record's pages are given back to the file system, in a sealed segment only,
//! and read as zeros from then on. The foot lists it still. So a record whose header page is all zeros is no damage, it
//! is a row that is not there any more; where the file system tells which parts of a file are holes, it need not even
//! be read. Head, foot and trailer are never given back while the segment stays.
//!
//! A payload is plain, vouched for by a crc64, or sealed by AES-256-GCM, vouched for by the cipher's tag; each record
//! says which. Everything but the payload is in the clear: whose row it is can be read without the key. Version 1 knew
//! plain payloads alone and is read as it is; its segments go on in version 2. Identity and marks have a version of
//! their own.

use std::ops::Range;

use crate::base::block::{Namespace, Rank, RowKey, Space};
use crate::base::checksum::{CRC64_NVME, crc64};
use crate::base::codec::{Malformed, Reader, Writer};

/// Unit of everything on the drive.
pub const PAGE: usize = 4096;
/// [`PAGE`] for offsets in files.
pub const PAGE64: u64 = 4096;

/// Version of heads, records and trailers that are written; all from 1 on are read.
pub const VERSION: u16 = 2;

/// Version of [`Identity`], which has not changed since the first: a store keeps its name under an older program.
const IDENTITY_VERSION: u16 = 1;

/// Largest payload: rows are at most 1 GiB (geometry.rs).
pub const PAYLOAD_MAX: u32 = 1 << 30;

/// Bytes of one foot entry.
pub const ENTRY: usize = 32 + 4 + RowKey::LEN + 4 + 4 + 4 + 8;

const IDENTITY: &[u8; 8] = b"SPARKKVI";
const HEAD: &[u8; 8] = b"SPARKKVS";
const RECORD: &[u8; 8] = b"SPARKKVR";
const TRAILER: &[u8; 8] = b"SPARKKVT";

/// Random name of one store; in every page that belongs to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StoreId(pub [u8; 16]);

/// Number of a segment, never used twice in a store, growing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Sequence(pub u64);

/// Why bytes are not what they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Bad {
    #[error("not one of our files")]
    Magic,
    #[error("format version {found}, this program reads up to {known}")]
    Version { found: u16, known: u16 },
    #[error("the checksum does not match")]
    Checksum,
    #[error("it belongs to another store")]
    Foreign,
    #[error("it belongs to another segment")]
    Stale,
    #[error("it holds another row")]
    OtherRow,
    #[error("its room was given back")]
    Released,
    #[error("its seal is broken")]
    Seal,
    #[error("its name is another key's")]
    OtherKey,
    #[error("its key is not here")]
    NoKey,
    #[error("{0} leaves its bounds")]
    Bounds(&'static str),
    #[error(transparent)]
    Malformed(#[from] Malformed),
}

/// Bytes that `len` bytes take in whole pages.
pub const fn padded(len: u64) -> u64 {
    len.div_ceil(PAGE64) * PAGE64
}

/// Bytes that a record with a payload of `length` takes.
pub const fn record_bytes(length: u32) -> u64 {
    PAGE64 + padded(length as u64)
}

/// Bytes that foot and trailer of `entries` records take.
pub const fn foot_bytes(entries: u64) -> u64 {
    padded(entries * ENTRY as u64) + PAGE64
}

/// Bytes of a segment that takes just so many rows of so many bytes.
pub const fn segment_for_rows(rows: u64, row_bytes: u64) -> u64 {
    PAGE64 + rows * (PAGE64 + padded(row_bytes)) + foot_bytes(rows)
}

/// How many rows of so many bytes a segment takes.
pub const fn rows_in_segment(segment: u64, row_bytes: u64) -> u64 {
    let mut rows = segment / (PAGE64 + padded(row_bytes));
    while rows > 0 && segment_for_rows(rows, row_bytes) > segment {
        rows -= 1;
    }
    rows
}

/// Fills a page up and closes it with its checksum.
fn close(mut w: Writer) -> Vec<u8> {
    assert!(w.0.len() <= PAGE - 8, "a page of ours has room for its fields");
    w.0.resize(PAGE - 8, 0);
    let sum = crc64(&[&w.0]);
    w.u64(sum);
    w.0
}

fn begin(magic: &[u8; 8], version: u16) -> Writer {
    let mut w = Writer::default();
    w.bytes(magic).u16(version);
    w
}

/// Checks magic and version, of which all up to `known` are read, and gives what follows.
pub fn begun<'a>(bytes: &'a [u8], magic: &[u8; 8], known: u16) -> Result<Reader<'a>, Bad> {
    let mut r = Reader::new(bytes);
    if r.bytes(8)? != magic {
        return Err(Bad::Magic);
    }
    let found = r.u16()?;
    if found == 0 || found > known {
        return Err(Bad::Version { found, known });
    }
    Ok(r)
}

/// Checks magic, version and checksum, in that order, and gives the fields.
fn fields<'a>(page: &'a [u8], magic: &[u8; 8]) -> Result<Reader<'a>, Bad> {
    let Some((body, sum)) = page.get(..PAGE).and_then(|p| p.split_last_chunk::<8>()) else {
        return Err(Malformed::Short { wanted: PAGE, left: page.len() }.into());
    };
    let r = begun(body, magic, VERSION)?;
    if crc64(&[body]) != u64::from_le_bytes(*sum) {
        return Err(Bad::Checksum);
    }
    Ok(r)
}

/// The page `folder/store`: `magic 8 | version 2 | store 16`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    pub store: StoreId,
}

impl Identity {
    pub fn encode(&self) -> Vec<u8> {
        let mut w = begin(IDENTITY, IDENTITY_VERSION);
        w.bytes(&self.store.0);
        close(w)
    }

    pub fn decode(page: &[u8]) -> Result<Self, Bad> {
        Ok(Self { store: StoreId(fields(page, IDENTITY)?.array()?) })
    }
}

/// First page of a segment: `magic 8 | version 2 | store 16 | sequence 8 | size 8`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    pub store: StoreId,
    pub sequence: Sequence,
    /// Bytes of the whole file, as it was made.
    pub size: u64,
}

impl Head {
    pub fn encode(&self) -> Vec<u8> {
        let mut w = begin(HEAD, VERSION);
        w.bytes(&self.store.0).u64(self.sequence.0).u64(self.size);
        close(w)
    }

    pub fn decode(page: &[u8]) -> Result<Self, Bad> {
        let mut r = fields(page, HEAD)?;
        let head = Self { store: StoreId(r.array()?), sequence: Sequence(r.u64()?), size: r.u64()? };
        // The page number of a record is a u32.
        if !head.size.is_multiple_of(PAGE64)
            || head.size < 4 * PAGE64
            || head.size / PAGE64 > u64::from(u32::MAX)
        {
            return Err(Bad::Bounds("the segment's size"));
        }
        Ok(head)
    }
}

/// Number of AES-256-GCM in record headers. crc64-nvme has [`CRC64_NVME`].
const AES_256_GCM: u8 = 2;

/// What opens a sealed payload, together with its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seal {
    /// Number of the key in this store; never 0.
    pub key: u32,
    /// Random, and used once with its key.
    pub nonce: [u8; 12],
    pub tag: [u8; 16],
}

/// The page before a payload. A row's identity is all of space and key, and where in its prompt it ends.
///
/// `magic 8 | version 2 | rank 2 | ranks 2 | algorithm 1 | 0 1 | namespace 32 | key 36 | position 4 | length 4 |
/// checksum 8 | sequence 8 | store 16`, and for a sealed payload `| number of its key 4 | nonce 12 | tag 16`. The
/// checksum is of the payload, without its padding; of a sealed one it is 0, since it would tell about the payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    pub store: StoreId,
    pub sequence: Sequence,
    pub space: Space,
    pub key: RowKey,
    pub position: u32,
    pub length: u32,
    pub checksum: u64,
    /// None: the payload is plain.
    pub seal: Option<Seal>,
}

impl Record {
    pub fn encode(&self) -> Vec<u8> {
        let mut w = begin(RECORD, VERSION);
        let algorithm = if self.seal.is_some() { AES_256_GCM } else { CRC64_NVME };
        w.u16(self.space.rank.index).u16(self.space.rank.of).u8(algorithm).u8(0);
        w.bytes(&self.space.namespace.0).bytes(&self.key.to_bytes());
        w.u32(self.position).u32(self.length).u64(self.checksum).u64(self.sequence.0).bytes(&self.store.0);
        if let Some(Seal { key, nonce, tag }) = &self.seal {
            w.u32(*key).bytes(nonce).bytes(tag);
        }
        close(w)
    }

    /// What the tag of a payload vouches for beside the payload: everything that this page says, but for the segment's
    /// sequence. A row that moves to another segment moves as it is, and a copy elsewhere is the same row.
    pub fn bound(&self, key: u32) -> Vec<u8> {
        let mut w = Writer::default();
        w.bytes(RECORD).u8(AES_256_GCM).u32(key).bytes(&self.store.0);
        w.bytes(&self.space.namespace.0).u16(self.space.rank.index).u16(self.space.rank.of);
        w.bytes(&self.key.to_bytes()).u32(self.position).u32(self.length);
        w.0
    }

    /// How the foot lists it, when it stands on this page.
    pub fn entry(&self, page: u32) -> Entry {
        let &Self { space, key, position, length, checksum, .. } = self;
        Entry { space, key, position, page, length, checksum, seal: self.seal.map_or(0, |seal| seal.key) }
    }

    /// Reads a record's page and refuses one that another segment or store wrote. [`Bad::Released`] is no damage.
    pub fn decode(page: &[u8], store: StoreId, sequence: Sequence) -> Result<Self, Bad> {
        if page.len() >= PAGE && page[..PAGE].iter().all(|&byte| byte == 0) {
            return Err(Bad::Released);
        }
        let mut r = fields(page, RECORD)?;
        let rank = Rank { index: r.u16()?, of: r.u16()? };
        let algorithm = r.u8()?;
        if algorithm != CRC64_NVME && algorithm != AES_256_GCM {
            return Err(Malformed::Unknown { what: "checksum algorithm", value: algorithm.into() }.into());
        }
        r.u8()?;
        let space = Space { namespace: Namespace(r.array()?), rank };
        let mut record = Self {
            space,
            key: RowKey::from_bytes(&r.array()?),
            position: r.u32()?,
            length: r.u32()?,
            checksum: r.u64()?,
            sequence: Sequence(r.u64()?),
            store: StoreId(r.array()?),
            seal: None,
        };
        if algorithm == AES_256_GCM {
            record.seal = Some(Seal { key: r.u32()?, nonce: r.array()?, tag: r.array()? });
        }
        if record.store != store {
            return Err(Bad::Foreign);
        }
        if record.sequence != sequence {
            return Err(Bad::Stale);
        }
        if record.length == 0 || record.length > PAYLOAD_MAX {
            return Err(Bad::Bounds("the payload"));
        }
        if record.seal.is_some_and(|seal| seal.key == 0 || record.checksum != 0) {
            return Err(Bad::Bounds("the seal"));
        }
        Ok(record)
    }
}

/// Bit of a foot entry's length: the payload is sealed. A length never has it ([`PAYLOAD_MAX`]).
const SEALED: u32 = 1 << 31;

/// One record as the foot lists it: `namespace 32 | rank 2 | ranks 2 | key 36 | position 4 | page 4 | length 4 |
/// checksum 8`. Of a sealed record the length has its highest bit set, and the number of its key stands in the
/// checksum's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    pub space: Space,
    pub key: RowKey,
    pub position: u32,
    /// Where the record's page is, in pages from the beginning of the file.
    pub page: u32,
    pub length: u32,
    pub checksum: u64,
    /// Number of the key that the payload is sealed under; 0: it is plain.
    pub seal: u32,
}

impl Entry {
    fn write(&self, w: &mut Writer) {
        w.bytes(&self.space.namespace.0).u16(self.space.rank.index).u16(self.space.rank.of);
        let (length, last) = match self.seal {
            0 => (self.length, self.checksum),
            key => (self.length | SEALED, key.into()),
        };
        w.bytes(&self.key.to_bytes()).u32(self.position).u32(self.page).u32(length).u64(last);
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let namespace = Namespace(r.array()?);
        let rank = Rank { index: r.u16()?, of: r.u16()? };
        let (key, position, page) = (RowKey::from_bytes(&r.array()?), r.u32()?, r.u32()?);
        let (length, last) = (r.u32()?, r.u64()?);
        let (mut checksum, mut seal) = (last, 0);
        if length & SEALED != 0 {
            let number = u32::try_from(last).ok().filter(|&number| number != 0);
            seal = number.ok_or(Malformed::Unknown { what: "number of a key", value: last })?;
            checksum = 0;
        }
        let space = Space { namespace, rank };
        Ok(Self { space, key, position, page, length: length & !SEALED, checksum, seal })
    }

    /// Where its record lies.
    pub fn part(&self) -> Range<u64> {
        let start = u64::from(self.page) * PAGE64;
        start..start + record_bytes(self.length)
    }

    /// Whether the record lies behind the head and before `end`.
    fn is_within(&self, end: u64) -> bool {
        self.page >= 1 && self.length > 0 && self.length <= PAYLOAD_MAX && self.part().end <= end
    }
}

/// Last page of a sealed segment: `magic 8 | version 2 | store 16 | sequence 8 | start 8 | count 4 | foot checksum 8`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trailer {
    /// Where the foot begins.
    pub start: u64,
    pub count: u32,
    checksum: u64,
}

impl Trailer {
    /// Reads the last page of the segment that `head` describes.
    pub fn decode(page: &[u8], head: &Head) -> Result<Self, Bad> {
        let mut r = fields(page, TRAILER)?;
        if StoreId(r.array()?) != head.store {
            return Err(Bad::Foreign);
        }
        if Sequence(r.u64()?) != head.sequence {
            return Err(Bad::Stale);
        }
        let trailer = Self { start: r.u64()?, count: r.u32()?, checksum: r.u64()? };
        let foot = foot_bytes(trailer.count.into());
        if trailer.start < PAGE64 || trailer.start.checked_add(foot) != Some(head.size) {
            return Err(Bad::Bounds("the foot"));
        }
        Ok(trailer)
    }

    /// Bytes between the foot's start and the trailer.
    pub fn foot_len(&self) -> u64 {
        padded(u64::from(self.count) * ENTRY as u64)
    }

    /// Reads the foot that this trailer points to.
    pub fn entries(&self, foot: &[u8]) -> Result<Vec<Entry>, Bad> {
        if crc64(&[foot]) != self.checksum {
            return Err(Bad::Checksum);
        }
        let mut r = Reader::new(foot);
        let mut entries = Vec::with_capacity(foot.len().min(self.count as usize * ENTRY) / ENTRY);
        for _ in 0..self.count {
            let entry = Entry::read(&mut r)?;
            if !entry.is_within(self.start) {
                return Err(Bad::Bounds("a record of the foot"));
            }
            entries.push(entry);
        }
        Ok(entries)
    }
}

/// Foot and trailer in one piece, for the last bytes of the segment that `head` describes.
pub fn encode_foot(head: &Head, entries: &[Entry]) -> Vec<u8> {
    let count = u32::try_from(entries.len()).expect("a segment has at most 2^32 pages");
    let mut w = Writer::default();
    for entry in entries {
        entry.write(&mut w);
    }
    let len = usize::try_from(padded(w.0.len() as u64)).expect("it is in memory");
    w.0.resize(len, 0);
    let mut trailer = begin(TRAILER, VERSION);
    trailer.bytes(&head.store.0).u64(head.sequence.0);
    trailer.u64(head.size - foot_bytes(count.into())).u32(count).u64(crc64(&[&w.0]));
    w.bytes(&close(trailer));
    w.0
}

/// Name of a segment's file.
pub fn segment_name(sequence: Sequence) -> String {
    format!("segment-{:016x}.kv", sequence.0)
}

/// The sequence in a segment's name.
pub fn parse_segment_name(name: &str) -> Option<Sequence> {
    let digits = name.strip_prefix("segment-")?.strip_suffix(".kv")?;
    let sequence = Sequence(u64::from_str_radix(digits, 16).ok()?);
    (segment_name(sequence) == name).then_some(sequence)
}

#[cfg(test)]
mod tests {
    use super::super::laws;
    use super::*;
    use crate::base::block::{BlockHash, GroupId};
    use proptest::prelude::*;

    const STORE: StoreId = StoreId([3; 16]);
    const HEAD_OF_7: Head = Head { store: STORE, sequence: Sequence(7), size: 64 * PAGE64 };

    fn key() -> impl Strategy<Value = RowKey> {
        (any::<[u8; 32]>(), any::<u32>()).prop_map(|(h, g)| RowKey { hash: BlockHash(h), group: GroupId(g) })
    }

    fn space() -> impl Strategy<Value = Space> {
        (any::<[u8; 32]>(), any::<(u16, u16)>())
            .prop_map(|(n, (index, of))| Space { namespace: Namespace(n), rank: Rank { index, of } })
    }

    fn entries() -> impl Strategy<Value = Vec<Entry>> {
        let vouched =
            prop_oneof![any::<u64>().prop_map(|sum| (sum, 0)), (1..=u32::MAX).prop_map(|key| (0, key))];
        let one = (space(), key(), any::<u32>(), 1..40_u32, 1..PAGE as u32, vouched).prop_map(
            |(space, key, position, page, length, (checksum, seal))| Entry {
                space,
                key,
                position,
                page,
                length,
                checksum,
                seal,
            },
        );
        proptest::collection::vec(one, 0..60)
    }

    fn record(space: Space, key: RowKey, position: u32, length: u32, checksum: u64) -> Record {
        Record { store: STORE, sequence: Sequence(7), space, key, position, length, checksum, seal: None }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn the_laws_hold_for_any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..6000),
                                       sparse in proptest::collection::vec(prop_oneof![9 => Just(0), 1 => any::<u8>()], 0..200)) {
            for bytes in [bytes, sparse] {
                laws::identity(&bytes);
                laws::head(&bytes);
                laws::record(&bytes);
                laws::foot(&bytes);
            }
        }
    }

    proptest! {
        #[test]
        fn what_is_written_reads_back(space in space(), key in key(), position: u32, checksum: u64,
                                      length in 1..PAYLOAD_MAX, entries in entries()) {
            let r = record(space, key, position, length, checksum);
            prop_assert_eq!(Record::decode(&r.encode(), STORE, Sequence(7)), Ok(r));
            let seal = Some(Seal { key: checksum as u32 | 1, nonce: [5; 12], tag: [position as u8; 16] });
            let sealed = Record { checksum: 0, seal, ..r };
            prop_assert_eq!(Record::decode(&sealed.encode(), STORE, Sequence(7)), Ok(sealed));
            prop_assert_eq!(Head::decode(&HEAD_OF_7.encode()), Ok(HEAD_OF_7));
            let foot = encode_foot(&HEAD_OF_7, &entries);
            prop_assert_eq!(foot.len() as u64, foot_bytes(entries.len() as u64));
            let (list, last) = foot.split_at(foot.len() - PAGE);
            let trailer = Trailer::decode(last, &HEAD_OF_7).unwrap();
            prop_assert_eq!(trailer.foot_len(), list.len() as u64);
            prop_assert_eq!(trailer.entries(list), Ok(entries));
        }

        #[test]
        fn one_flipped_bit_anywhere_is_noticed(bit in 0..PAGE * 8, space in space(), key in key()) {
            let mut page = record(space, key, 5, 9, 1).encode();
            page[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Record::decode(&page, STORE, Sequence(7)).is_err());
            let seal = Some(Seal { key: 9, nonce: [1; 12], tag: [2; 16] });
            let mut page = Record { seal, ..record(space, key, 5, 9, 0) }.encode();
            page[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Record::decode(&page, STORE, Sequence(7)).is_err());
            let mut page = HEAD_OF_7.encode();
            page[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Head::decode(&page).is_err());
        }

        #[test]
        fn no_bytes_make_a_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..5000)) {
            let _ = (Identity::decode(&bytes), Head::decode(&bytes), Trailer::decode(&bytes, &HEAD_OF_7));
            let trailer = Trailer { start: PAGE64, count: 9, checksum: crc64(&[&bytes]) };
            let _ = (Record::decode(&bytes, STORE, Sequence(7)), trailer.entries(&bytes));
        }
    }

    #[test]
    fn another_version_is_told_from_damage() {
        let mut page = HEAD_OF_7.encode();
        page[8] = 3;
        assert_eq!(Head::decode(&page), Err(Bad::Version { found: 3, known: VERSION }));
        assert_eq!(Identity { store: STORE }.encode()[8], 1, "an older program still knows the store");
    }

    #[test]
    fn a_tag_vouches_for_all_that_a_record_says_but_its_segment() {
        let space = Space { namespace: Namespace([1; 32]), rank: Rank::ONLY };
        let one = record(space, RowKey { hash: BlockHash([2; 32]), group: GroupId(0) }, 1, 1, 1);
        let others = [
            Record { store: StoreId([4; 16]), ..one },
            Record { space: Space { namespace: Namespace([2; 32]), ..space }, ..one },
            Record { space: Space { rank: Rank { index: 1, of: 2 }, ..space }, ..one },
            Record { key: RowKey { group: GroupId(1), ..one.key }, ..one },
            Record { key: RowKey { hash: BlockHash([3; 32]), ..one.key }, ..one },
            Record { position: 2, ..one },
            Record { length: 2, ..one },
        ];
        others.iter().for_each(|other| assert_ne!(other.bound(5), one.bound(5), "{other:?}"));
        assert_ne!(one.bound(6), one.bound(5));
        assert_eq!(Record { sequence: Sequence(9), ..one }.bound(5), one.bound(5), "it moves as it is");
    }

    #[test]
    fn records_of_another_store_or_segment_never_count() {
        let space = Space { namespace: Namespace([1; 32]), rank: Rank::ONLY };
        let page = record(space, RowKey { hash: BlockHash([2; 32]), group: GroupId(0) }, 1, 1, 1).encode();
        assert_eq!(Record::decode(&page, StoreId([9; 16]), Sequence(7)), Err(Bad::Foreign));
        assert_eq!(Record::decode(&page, STORE, Sequence(8)), Err(Bad::Stale));
    }

    #[test]
    fn names_of_segments_read_back_and_others_do_not() {
        assert_eq!(parse_segment_name(&segment_name(Sequence(77))), Some(Sequence(77)));
        for name in
            ["segment-7.kv", "segment-+000000000000007.kv", "segment-000000000000000G.kv", "store", ""]
        {
            assert_eq!(parse_segment_name(name), None, "{name}");
        }
    }
}
