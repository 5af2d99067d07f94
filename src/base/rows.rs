//! The shared row area: `count` rows of `row_bytes`, mapped by the engine's workers and by this node.
//!
//! Store and peer read and write rows in place; no byte is copied between the engine and the node. Who may touch a
//! row is decided by the door (frame.rs): from STORE or LOAD until DONE it is the node's, otherwise the engine's.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::block::Space;
use super::geometry::{GroupKind, Hello};
use super::shm::Mapping;

/// Identity of an attached area, never used twice in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AreaId(pub u64);

/// The row area of one engine, with the layout its engine announced.
#[derive(Debug)]
pub struct Rows {
    pub id: AreaId,
    pub space: Space,
    row_bytes: usize,
    count: u32,
    /// Per group, the byte ranges of a row that it covers.
    covered: Vec<Vec<(u32, u32)>>,
    /// Per group, the tokens of a row, and whether it is a state.
    kinds: Vec<(u32, bool)>,
    map: Mapping,
}

impl Rows {
    /// Maps the area that `hello` describes. `hello` must have passed [`Hello::check`].
    pub fn attach(id: AreaId, space: Space, hello: &Hello, fd: &OwnedFd) -> std::io::Result<Arc<Self>> {
        let row_bytes = hello.row_bytes as usize;
        let len = row_bytes.checked_mul(hello.rows as usize).expect("Hello::check bounds both");
        let covered = hello.groups.iter().map(|g| g.covered.clone()).collect();
        let is_state = |kind: &GroupKind| matches!(kind, GroupKind::Mamba);
        let kinds = hello.groups.iter().map(|g| (g.tokens_per_row, is_state(&g.kind))).collect();
        let map = Mapping::of(fd, len)?;
        Ok(Arc::new(Self { id, space, row_bytes, count: hello.rows, covered, kinds, map }))
    }

    /// `count` rows of the same layout, in memory of this process alone.
    pub fn twin(&self, id: AreaId, count: u32) -> std::io::Result<Arc<Self>> {
        let (map, _) = Mapping::anonymous("copies", self.row_bytes * count as usize)?;
        let (space, row_bytes, covered, kinds) =
            (self.space, self.row_bytes, self.covered.clone(), self.kinds.clone());
        Ok(Arc::new(Self { id, space, row_bytes, count, covered, kinds, map }))
    }

    /// Gives the whole area its memory now ([`Mapping::populate`]): otherwise the first load of each row waits for it.
    ///
    /// # Errors
    /// When there is not enough.
    pub fn populate(&self) -> std::io::Result<()> {
        self.map.populate()
    }

    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    pub fn count(&self) -> u32 {
        self.count
    }

    /// Per group, how many tokens a row covers, and whether it is a state instead: what a recurrent layer remembers at
    /// the row's end.
    pub fn kinds(&self) -> &[(u32, bool)] {
        &self.kinds
    }

    /// Base address and length, to register the whole area with the kernel.
    pub fn whole(&self) -> (*mut u8, usize) {
        (self.map.address(0, self.map.len()), self.map.len())
    }

    /// Whether `row` and `group` exist; a job that names others is refused before it touches anything.
    pub fn has(&self, row: u32, group: u32) -> bool {
        row < self.count && (group as usize) < self.covered.len()
    }

    /// Address of a row, for the kernel.
    pub fn address(&self, row: u32) -> *mut u8 {
        assert!(row < self.count, "row {row} of {}", self.count);
        self.map.address(row as usize * self.row_bytes, self.row_bytes)
    }

    /// Lends a row's bytes for reading.
    pub fn look<T>(&self, row: u32, look: impl FnOnce(&[u8]) -> T) -> T {
        assert!(row < self.count, "row {row} of {}", self.count);
        self.map.look(row as usize * self.row_bytes, self.row_bytes, look)
    }

    /// Lends a row's bytes for writing.
    pub fn fill<T>(&self, row: u32, fill: impl FnOnce(&mut [u8]) -> T) -> T {
        assert!(row < self.count, "row {row} of {}", self.count);
        self.map.fill(row as usize * self.row_bytes, self.row_bytes, fill)
    }

    /// Lends `length` bytes of a row for writing, from `offset` on. Parts that do not overlap may be lent at once.
    pub fn fill_part<T>(
        &self,
        row: u32,
        offset: usize,
        length: usize,
        fill: impl FnOnce(&mut [u8]) -> T,
    ) -> T {
        assert!(row < self.count, "row {row} of {}", self.count);
        assert!(
            offset <= self.row_bytes && length <= self.row_bytes - offset,
            "{offset} + {length} in a row"
        );
        self.map.fill(row as usize * self.row_bytes + offset, length, fill)
    }

    /// Zeroes what `group` does not cover: those bytes hold other requests' data, and would make equal rows differ.
    pub fn blank_uncovered(&self, row: u32, group: u32) {
        let covered = &self.covered[group as usize];
        let whole = [(0, u32::try_from(self.row_bytes).expect("a row is at most 1 GiB"))];
        if covered[..] == whole {
            return;
        }
        self.fill(row, |bytes| {
            let mut from = 0;
            for &(offset, length) in covered {
                bytes[from..offset as usize].fill(0);
                from = offset as usize + length as usize;
            }
            bytes[from..].fill(0);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::block::{Namespace, Rank};
    use super::super::geometry::Group;
    use super::*;

    #[test]
    fn only_covered_bytes_survive_blanking() {
        let (map, fd) = Mapping::anonymous("rows", 3 * 4096).unwrap();
        let covered = vec![(10, 20), (100, 1)];
        let group = Group { kind: GroupKind::Mamba, tokens_per_row: 16, covered };
        let hello = Hello::of_rows(3, 4096, vec![group]);
        assert_eq!(hello.check(), Ok(()));
        let space = Space { namespace: Namespace([0; 32]), rank: Rank::ONLY };
        let rows = Rows::attach(AreaId(1), space, &hello, &fd).unwrap();
        map.fill(4096, 4096, |b| b.fill(9));
        rows.blank_uncovered(1, 0);
        rows.look(1, |b| {
            let kept: Vec<usize> = (0..4096).filter(|&i| b[i] == 9).collect();
            assert_eq!(kept, (10..30).chain(100..101).collect::<Vec<_>>());
        });
        assert!(rows.has(2, 0) && !rows.has(3, 0) && !rows.has(0, 1));
    }
}
