//! The store's side of a round: a fresh store, every row of an area put and then got back, timed apart.
//!
//! It is the shipped [`Store`](crate::store::Store) with the shipped defaults; only the folder and the capacity are
//! the measurement's own. Opening it and its end are outside the clock; making and sealing segments is inside.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::stats::Cost;
use super::{Error, cpu_seconds};
use crate::base::block::{BlockHash, GroupId, Namespace, Rank, RowItem, RowKey, Space};
use crate::base::checksum::crc64;
use crate::base::clock::Clock;
use crate::base::frame::{Outcome, PROTOCOL};
use crate::base::geometry::{Group, GroupKind, Hello};
use crate::base::rows::{AreaId, Rows};
use crate::base::shm::Mapping;
use crate::base::units::Bytes;
use crate::meter::Meter;
use crate::settings;
use crate::store::{DiskKind, Options, Sealing, Store};

/// The space that measured rows live in.
pub const SPACE: Space = Space { namespace: Namespace([0xb5; 32]), rank: Rank::ONLY };

static AREAS: AtomicU64 = AtomicU64::new(1);

/// A row area as an engine would share it.
///
/// # Errors
/// When there is no memory for it.
pub fn area(count: u32, row_bytes: u32) -> std::io::Result<Arc<Rows>> {
    Ok(areas(count, row_bytes, [SPACE])?.into_iter().next().expect("one space"))
}

/// The same memory once per space.
///
/// # Errors
/// When there is no memory for it.
pub fn areas<const N: usize>(
    count: u32,
    row_bytes: u32,
    spaces: [Space; N],
) -> std::io::Result<Vec<Arc<Rows>>> {
    let group = Group { kind: GroupKind::FullAttention, tokens_per_row: 16, covered: vec![(0, row_bytes)] };
    let hello = Hello {
        protocol: PROTOCOL,
        plugin: String::new(),
        vllm: String::new(),
        pid: std::process::id(),
        engine_id: "bench".to_owned(),
        model: String::new(),
        rank: 0,
        ranks: 1,
        rows: count,
        row_bytes,
        hash_unit: 16,
        hash_algorithm: String::new(),
        hash_seed: String::new(),
        groups: vec![group],
        interchange: std::collections::BTreeMap::default(),
    };
    hello.check().map_err(std::io::Error::other)?;
    let (_, fd) = Mapping::anonymous("bench-rows", count as usize * row_bytes as usize)?;
    let attach = |space| Rows::attach(AreaId(AREAS.fetch_add(1, Ordering::Relaxed)), space, &hello, &fd);
    spaces.into_iter().map(attach).collect()
}

/// Fills every row with bytes that no drive can shrink and no other row holds.
pub fn fill(rows: &Rows) {
    for row in 0..rows.count() {
        rows.fill(row, |bytes| content(row, bytes));
    }
}

/// Fills one row.
pub fn content(row: u32, bytes: &mut [u8]) {
    let mut state = u64::from(row).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    for word in bytes.chunks_exact_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes());
    }
}

/// The key of a measured row.
pub fn key(row: u32) -> RowKey {
    // Spread as a digest is.
    let mut hash = [0_u8; 32];
    for (n, part) in (1_u64..).zip(hash.chunks_exact_mut(8)) {
        let mixed = (u64::from(row) + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(7 * n as u32);
        part.copy_from_slice(&(mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9).to_le_bytes());
    }
    RowKey { hash: BlockHash(hash), group: GroupId(0) }
}

/// Every row under its key.
pub fn items(rows: &Rows) -> Vec<RowItem> {
    (0..rows.count()).map(|row| RowItem { key: key(row), position: (row + 1) * 16, row }).collect()
}

/// `set`, in a folder of the measurement, with room for every row once.
pub fn options(folder: &Path, set: &settings::Store, rows: &Rows) -> Options {
    let settings::Store { segment, io, queue_depth, .. } = *set;
    let bytes = (u64::from(rows.count()) + 1) * (rows.row_bytes() as u64 + 8192);
    // A segment's end that no row fits into is lost: two spare ones cover that.
    let capacity = Bytes(bytes.next_multiple_of(segment.0) + bytes / 4 + 6 * segment.0);
    Options { folder: folder.to_owned(), capacity, segment, io, queue_depth }
}

/// Most bytes that [`round`] takes on the drive.
pub fn room(set: &settings::Store, rows: u32, row_bytes: u32) -> u64 {
    let segment = set.segment.0;
    ((u64::from(rows) + 1) * (u64::from(row_bytes) + 8192) * 5 / 4).next_multiple_of(segment) + segment
}

/// What the checksums of an area cost alone, on one thread: the floor of what the store adds.
pub fn checksums(rows: &Rows) -> Cost {
    let (begin, cpu) = (Instant::now(), cpu_seconds());
    for row in 0..rows.count() {
        std::hint::black_box(rows.look(row, |bytes| crc64(&[bytes])));
    }
    let bytes = u64::from(rows.count()) * rows.row_bytes() as u64;
    Cost { bytes, seconds: begin.elapsed().as_secs_f64(), cpu: cpu_seconds() - cpu }
}

/// What one round with the store cost, and how it did its I/O.
#[derive(Clone, Debug)]
pub struct Measured {
    pub write: Cost,
    pub read: Cost,
    /// `ring` or `plain`.
    pub io: String,
    pub notes: Vec<String>,
}

/// Puts every row into a new store and gets every row back.
///
/// # Errors
/// When the store fails, or a row does not come back as it was.
pub async fn round(folder: &Path, set: &settings::Store, rows: &Arc<Rows>) -> Result<Measured, Error> {
    let keys = folder.with_extension("keys");
    let sealing = Sealing { keys: Some(keys.clone()), encrypt: set.encrypt };
    let (options, clock) = (options(folder, set, rows), Clock::real());
    let opened = Store::open_sealed(options, &sealing, DiskKind::Real, clock, &Meter::new());
    let (store, opened) = opened.map_err(Error::Store)?;
    store.attach(rows).await.map_err(Error::Store)?;
    let outcome = both_ways(&store, rows).await;
    store.detach(rows.id).await;
    store.close().await;
    std::fs::remove_dir_all(folder)?;
    if set.encrypt {
        std::fs::remove_dir_all(keys)?;
    }
    let (write, read) = outcome?;
    Ok(Measured { write, read, io: opened.io, notes: opened.notes })
}

async fn both_ways(store: &Store, rows: &Arc<Rows>) -> Result<(Cost, Cost), Error> {
    let bytes = u64::from(rows.count()) * rows.row_bytes() as u64;
    let (items, again) = (items(rows), items(rows));
    // A running store has a segment open; how long the first one of its life takes is not what is asked.
    let first = RowItem { key: key(u32::MAX), position: 16, row: 0 };
    all_are(&store.put(rows, vec![first]).await, Outcome::Stored)?;
    let (begin, cpu) = (Instant::now(), cpu_seconds());
    let outcomes = store.put(rows, items).await;
    let write = Cost { bytes, seconds: begin.elapsed().as_secs_f64(), cpu: cpu_seconds() - cpu };
    all_are(&outcomes, Outcome::Stored)?;
    let first: Vec<[u8; 8]> = (0..rows.count()).map(|row| rows.fill(row, take_first)).collect();
    let (begin, cpu) = (Instant::now(), cpu_seconds());
    let outcomes = store.get(rows, again, None).await;
    let read = Cost { bytes, seconds: begin.elapsed().as_secs_f64(), cpu: cpu_seconds() - cpu };
    all_are(&outcomes, Outcome::FromDrive)?;
    let same = |row: u32| rows.look(row, |bytes| bytes[..8] == first[row as usize]);
    if (0..rows.count()).all(same) { Ok((write, read)) } else { Err(Error::WrongBytes) }
}

/// A row's first bytes, which are wiped: only a read brings them back.
fn take_first(bytes: &mut [u8]) -> [u8; 8] {
    let mut first = [0; 8];
    first.swap_with_slice(&mut bytes[..8]);
    first
}

/// # Errors
/// When one did not end so.
pub fn all_are(outcomes: &[Outcome], wanted: Outcome) -> Result<(), Error> {
    let other = outcomes.iter().filter(|&&o| o != wanted).count();
    if other == 0 { Ok(()) } else { Err(Error::Rows { other, of: outcomes.len() }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_differ_and_so_do_their_keys() {
        let rows = area(3, 8192).unwrap();
        fill(&rows);
        let (a, b) = (rows.look(0, <[u8]>::to_vec), rows.look(1, <[u8]>::to_vec));
        assert!(a != b && a[..4096] != a[4096..]);
        let keys: std::collections::HashSet<_> = (0..10_000).map(key).collect();
        assert_eq!(keys.len(), 10_000);
    }
}
