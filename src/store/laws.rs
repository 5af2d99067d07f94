//! What must hold for any bytes that a drive may give back, once for the tests and once for the fuzzers (`fuzz/`).
//!
//! Each law takes any bytes, makes pages of them, as they are and with the right beginning and checksum so that the
//! fields behind are reached too, and fails by a panic. No reader panics; what is read and written again reads the
//! same; and a page of ours that was changed is refused.

use std::ops::Range;

use super::format::{
    Bad, ENTRY, Entry, Head, Identity, PAGE, PAYLOAD_MAX, Record, Seal, Sequence, StoreId, Trailer,
    encode_foot, foot_bytes, record_bytes,
};
use crate::base::block::{BlockHash, GroupId, Namespace, Rank, RowKey, Space};
use crate::base::checksum::crc64;
use crate::base::codec::Reader;

/// The segment of which the bytes are said to be.
const HEAD: Head = Head { store: StoreId([3; 16]), sequence: Sequence(7), size: 64 * PAGE as u64 };

/// Magic and version.
const BEGIN: Range<usize> = 0..10;

/// Where a trailer keeps its foot's checksum.
const FOOT_SUM: Range<usize> = 46..54;

/// The bytes as one page.
fn page(bytes: &[u8]) -> Vec<u8> {
    let mut page = bytes[..bytes.len().min(PAGE)].to_vec();
    page.resize(PAGE, 0);
    page
}

/// Makes a page's checksum right.
fn close(page: &mut [u8]) {
    let sum = crc64(&[&page[..PAGE - 8]]);
    page[PAGE - 8..].copy_from_slice(&sum.to_le_bytes());
}

/// Whatever `decode` accepts is written and read again as the same. `pinned` are bytes of the example without which
/// nothing behind them is looked at.
fn round<T: PartialEq + std::fmt::Debug>(
    bytes: &[u8],
    pinned: &[Range<usize>],
    example: &T,
    decode: impl Fn(&[u8]) -> Result<T, Bad>,
    encode: impl Fn(&T) -> Vec<u8>,
) {
    let like = encode(example);
    assert_eq!(decode(&like).as_ref(), Ok(example));
    let mut deep = page(bytes);
    for range in pinned {
        deep[range.clone()].copy_from_slice(&like[range.clone()]);
    }
    close(&mut deep);
    for bytes in [bytes, &page(bytes), &deep] {
        if let Ok(read) = decode(bytes) {
            assert_eq!(decode(&encode(&read)).as_ref(), Ok(&read), "what is written is read as it was");
        }
    }
    let mut changed = like.clone();
    changed.iter_mut().zip(bytes).for_each(|(byte, change)| *byte ^= change);
    assert_eq!(decode(&changed).is_ok(), changed == like, "a changed page is refused");
}

/// Any bytes as the store's identity.
pub fn identity(bytes: &[u8]) {
    let example = Identity { store: HEAD.store };
    round(bytes, &[BEGIN], &example, Identity::decode, Identity::encode);
}

/// Any bytes as a segment's first page.
pub fn head(bytes: &[u8]) {
    round(bytes, &[BEGIN], &HEAD, Head::decode, Head::encode);
}

/// Any bytes as a record's page.
pub fn record(bytes: &[u8]) {
    let mut r = Reader::new(bytes);
    let Entry { space, key, position, length, checksum, seal, .. } = entry(&mut r).unwrap_or(FIRST);
    let length = length.clamp(1, PAYLOAD_MAX);
    let (store, sequence) = (HEAD.store, HEAD.sequence);
    let seal = (seal > 0).then_some(Seal { key: seal, nonce: [checksum as u8; 12], tag: [6; 16] });
    let checksum = if seal.is_some() { 0 } else { checksum };
    let example = Record { store, sequence, space, key, position, length, checksum, seal };
    // Its algorithm, what a seal takes the place of, and whose it is.
    let pinned = [BEGIN, 14..15, 92..100, 100..124];
    round(bytes, &pinned, &example, |page| Record::decode(page, store, sequence), Record::encode);
}

const FIRST: Entry = Entry {
    space: Space { namespace: Namespace([1; 32]), rank: Rank::ONLY },
    key: RowKey { hash: BlockHash([2; 32]), group: GroupId(0) },
    position: 16,
    page: 1,
    length: 1,
    checksum: 0,
    seal: 0,
};

/// An entry out of any bytes; its page and length often fit.
fn entry(r: &mut Reader<'_>) -> Option<Entry> {
    let wild = r.u8().ok()? % 16 == 0;
    let space = Space {
        namespace: Namespace(r.array().ok()?),
        rank: Rank { index: r.u16().ok()?, of: r.u16().ok()? },
    };
    let key = RowKey::from_bytes(&r.array().ok()?);
    let (position, page, length) = (r.u32().ok()?, r.u32().ok()?, r.u32().ok()?);
    // The highest bit of a length is the seal's.
    let (page, length) = if wild { (page, length >> 1) } else { (page % 32 + 1, length % 9000 + 1) };
    let last = r.u64().ok()?;
    let (checksum, seal) = if last % 2 == 0 { (last, 0) } else { (0, last as u32) };
    Some(Entry { space, key, position, page, length, checksum, seal })
}

/// Any bytes as foot and trailer of a segment.
pub fn foot(bytes: &[u8]) {
    let mut r = Reader::new(bytes);
    let entries: Vec<Entry> = std::iter::from_fn(|| entry(&mut r)).take(MOST).collect();
    let written = encode_foot(&HEAD, &entries);
    assert_eq!(written.len() as u64, foot_bytes(entries.len() as u64));
    let fit = |e: &Entry| {
        let end = u64::from(e.page) * PAGE as u64 + record_bytes(e.length);
        e.page > 0 && (1..=PAYLOAD_MAX).contains(&e.length) && end <= HEAD.size - written.len() as u64
    };
    let read = read_foot(&written);
    assert_eq!(
        read.is_ok(),
        entries.iter().all(fit),
        "a foot is taken when all of its records fit: {read:?}"
    );
    assert!(read.is_err() || read == Ok(entries.clone()));
    // Changed anywhere, it is refused.
    let mut changed = written.clone();
    changed.iter_mut().rev().zip(bytes).for_each(|(byte, change)| *byte ^= change);
    assert!(changed == written || read_foot(&changed).is_err(), "a changed foot is refused");
    // Any list of the right length under a trailer that vouches for it, and any trailer under a right checksum.
    let (list, trailer) = changed.split_at_mut(written.len() - PAGE);
    trailer.copy_from_slice(&written[written.len() - PAGE..]);
    trailer[FOOT_SUM].copy_from_slice(&crc64(&[list]).to_le_bytes());
    close(trailer);
    if let Ok(read) = read_foot(&changed) {
        assert_eq!(read_foot(&encode_foot(&HEAD, &read)), Ok(read));
    }
    let mut trailer = page(bytes);
    let like = &written[written.len() - PAGE..];
    // Its segment, and where the foot begins.
    trailer[..42].copy_from_slice(&like[..42]);
    close(&mut trailer);
    for page in [bytes, &trailer] {
        if let Ok(trailer) = Trailer::decode(page, &HEAD) {
            let _ = trailer.entries(bytes);
        }
    }
}

/// Entries that are tried at most: half of the segment.
const MOST: usize = 32 * PAGE / ENTRY;

fn read_foot(foot: &[u8]) -> Result<Vec<Entry>, Bad> {
    let (list, last) = foot.split_at(foot.len() - PAGE);
    let trailer = Trailer::decode(last, &HEAD)?;
    // A trailer that names another length leaves less, or more, than there is.
    trailer.entries(list)
}
