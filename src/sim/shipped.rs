//! The shipped store as a cache of the simulator: its own thread, log and judgement, on a drive in memory.
//!
//! What is smaller than life: a row is as few pages as the smallest segment allows, whatever the real row takes, and
//! a segment holds as many rows as the real one would. Calls wait for each other, and each turn moves the store's
//! clock to its time, so that a run can be repeated, nearly: rows are moved by the store's own thread, beside what is asked of it.

use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::plan::{Plan, Turn};
use super::{Cache, Error, Options, RowId};
use crate::base::block::{BlockHash, GroupId, Namespace, Rank, RowItem, RowKey, Space};
use crate::base::clock::{Clock, Micros};
use crate::base::frame::{Outcome, PROTOCOL};
use crate::base::geometry::{Group, GroupKind, Hello};
use crate::base::rows::{AreaId, Rows};
use crate::base::shm::Mapping;
use crate::base::units::Bytes;
use crate::meter::Meter;
use crate::settings::Io;
use crate::store::{self, DiskKind, Mem, Store};

/// Rows of one call.
const CALL: usize = 512;

/// Rows are whole pages.
const PAGE: u64 = 4096;

/// Smallest segment that the store makes.
const SEGMENT_MIN: u64 = 64 << 10;

/// Fewest segments in a capacity.
const SEGMENTS_MIN: u64 = 4;

const SPACE: Space = Space { namespace: Namespace([0x51; 32]), rank: Rank::ONLY };

/// Sizes of the store that stands for the real one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Scale {
    pub row: u32,
    pub segment: u64,
    pub capacity: u64,
}

impl Scale {
    pub(super) fn of(row: u64, segment: Bytes, capacity: Bytes) -> Result<Self, Error> {
        let per_segment = store::rows_in_segment(segment.0, row);
        if per_segment == 0 {
            return Err(Error::Row { row: Bytes(row), segment });
        }
        let segments = capacity.0 / segment.0;
        if segments < SEGMENTS_MIN {
            return Err(Error::Small { capacity, segment });
        }
        let row = PAGE * (SEGMENT_MIN / per_segment).div_ceil(PAGE).max(1);
        let small = store::segment_for_rows(per_segment, row);
        let capacity = store::capacity_for(segments, small);
        Ok(Self { row: u32::try_from(row).expect("a segment of 64 KiB at most"), segment: small, capacity })
    }
}

pub(super) struct Shipped {
    runtime: tokio::runtime::Runtime,
    store: Store,
    rows: Arc<Rows>,
    clock: Clock,
    row_tokens: u32,
    groups: u32,
    hashes: Vec<BlockHash>,
}

impl Shipped {
    pub(super) fn open(plan: &Plan, options: &Options, capacity: Bytes) -> Result<Self, Error> {
        let scale = Scale::of(plan.row_bytes, options.segment, capacity)?;
        let clock = Clock::sim();
        let shape = store::Options {
            folder: std::path::PathBuf::new(),
            capacity: Bytes(scale.capacity),
            segment: Bytes(scale.segment),
            io: Io::Auto,
            queue_depth: 8,
        };
        let (store, _) = Store::open(shape, DiskKind::Mem(Mem::new()), clock.clone(), &Meter::new())?;
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        let rows = area(scale.row, options)?;
        runtime.block_on(store.attach(&rows))?;
        let hashes = (0..plan.different).map(|n| BlockHash(Sha256::digest(n.to_le_bytes()).into())).collect();
        let groups = options.state_groups;
        Ok(Self { runtime, store, rows, clock, row_tokens: plan.row_tokens, groups, hashes })
    }

    fn key(&self, id: RowId) -> RowKey {
        RowKey { hash: self.hashes[id.row as usize], group: GroupId(id.group) }
    }

    /// Items in the order of position, states behind their row's attention.
    fn items(&self, turn: &Turn, rows: std::ops::Range<usize>, states_from: usize) -> Vec<RowItem> {
        let mut items = Vec::new();
        for nth in rows {
            let groups = if nth >= states_from { self.groups } else { 0 };
            for group in 0..=groups {
                let key = self.key(RowId { row: turn.rows[nth], group });
                let position = (nth as u32 + 1) * self.row_tokens;
                items.push(RowItem { key, position, row: (items.len() % CALL) as u32 });
            }
        }
        items
    }

    /// What the engine's plugin reports once a request is through: its whole chain, with the tokens up to each row.
    fn report(&self, turn: &Turn) {
        let items = self.items(turn, 0..turn.rows.len(), 0);
        let chain: Vec<_> = items.into_iter().map(|item| (item.key, item.position)).collect();
        self.store.heat(SPACE, &chain, turn.at);
    }

    fn go_to(&self, at: Micros) {
        let ahead: Duration = at.since(self.clock.now());
        self.clock.advance(ahead);
    }
}

/// Rows that calls use in turn. What they hold does not matter: the store looks at keys and checksums.
fn area(row: u32, options: &Options) -> Result<Arc<Rows>, Error> {
    let group = |kind| Group { kind, tokens_per_row: options.row_tokens, covered: vec![(0, row)] };
    let states = (0..options.state_groups).map(|_| group(GroupKind::Mamba));
    let hello = Hello {
        protocol: PROTOCOL,
        plugin: "sim".to_owned(),
        vllm: String::new(),
        pid: std::process::id(),
        engine_id: "sim".to_owned(),
        model: String::new(),
        rank: 0,
        ranks: 1,
        rows: CALL as u32,
        row_bytes: row,
        hash_unit: options.row_tokens,
        hash_algorithm: String::new(),
        hash_seed: String::new(),
        groups: std::iter::once(group(GroupKind::FullAttention)).chain(states).collect(),
        interchange: Default::default(),
    };
    let (_, fd) = Mapping::anonymous("sim", CALL * row as usize)?;
    Ok(Rows::attach(AreaId(1), SPACE, &hello, &fd)?)
}

impl Cache for Shipped {
    fn holds(&self, row: RowId) -> bool {
        self.store.holds(SPACE, &self.key(row))
    }

    fn serve(&mut self, turn: &Turn, loaded: usize) -> Result<u64, Error> {
        self.go_to(turn.at);
        let load = self.items(turn, 0..loaded, loaded.saturating_sub(1));
        let keep = self.items(turn, loaded..turn.rows.len(), loaded);
        let before = self.store.status();
        let lost = self.runtime.block_on(async {
            let mut lost = 0;
            for call in load.chunks(CALL) {
                let outcomes = self.store.get(&self.rows, call.to_vec(), None).await;
                lost += outcomes.iter().filter(|&&o| o != Outcome::FromDrive).count();
            }
            for call in keep.chunks(CALL) {
                self.store.put(&self.rows, call.to_vec()).await;
            }
            lost
        });
        if lost > 0 {
            return Err(Error::Failed(lost as u64));
        }
        self.report(turn);
        let after = self.store.status();
        let moved = (after.moved_bytes - before.moved_bytes) / self.rows.row_bytes() as u64;
        Ok(after.stored - before.stored + moved)
    }
}

impl Drop for Shipped {
    fn drop(&mut self) {
        self.runtime.block_on(self.store.close());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_small_store_has_as_many_segments_and_rows_as_the_real_one() {
        let (row, segment) = (512 * 14_848, Bytes::mib(256));
        for count in [4_u64, 40, 400] {
            let scale = Scale::of(row, segment, Bytes(count * segment.0 + 77)).unwrap();
            let per_segment = store::rows_in_segment(segment.0, row);
            assert_eq!(store::rows_in_segment(scale.segment, u64::from(scale.row)), per_segment);
            assert_eq!(scale.capacity / scale.segment, count, "less than a segment is beside them");
        }
        let scale = Scale::of(100 << 20, segment, Bytes::gib(2)).unwrap();
        assert_eq!(store::rows_in_segment(scale.segment, u64::from(scale.row)), 2);
        assert!(scale.segment >= SEGMENT_MIN);
        assert!(matches!(Scale::of(300 << 20, segment, Bytes::gib(2)), Err(Error::Row { .. })));
        assert!(matches!(Scale::of(row, segment, Bytes::mib(1023)), Err(Error::Small { .. })));
    }
}
