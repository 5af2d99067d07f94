//! Which rows an engine has lent to which open job: pure, and asked before a job touches anything.
//!
//! A row is in at most one open job, a job's number is used once per connection, and a job names only rows and
//! groups that exist. What breaks this would make two parties write one row, so it is never bent: the connection
//! ends. Memory is bounded by the rows of the area and by [`RANGES`].

use std::collections::{BTreeMap, HashMap};

use crate::base::block::RowItem;

/// Jobs open at one time. An engine runs at most some hundred sequences, each with a store and a load; more is
/// answered `Failed` at once, which is a miss, and never waited for.
pub const MAX_OPEN_JOBS: usize = 1024;

/// Runs of used job numbers that are remembered. Engines count upwards, so a handful is usual. Beyond, the gap
/// between the two lowest is taken as used: an old number may be refused, a used one is never let through.
const RANGES: usize = 4096;

/// Why a job ends the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    #[error("job {0} was used before on this connection")]
    Job(u64),
    #[error("job {job} names row {row} of {rows}")]
    Row { job: u64, row: u32, rows: u32 },
    #[error("job {job} names group {group} of {groups}")]
    Group { job: u64, group: u32, groups: usize },
    #[error("job {job} names row {row}, which an open job has")]
    Leased { job: u64, row: u32 },
}

/// What to do with a sound job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Its rows are leased until [`Ledger::close`].
    Open,
    /// Nothing to move, or too many open already: answer at once, nothing is leased.
    Answer,
}

/// The open jobs of one connection.
#[derive(Debug)]
pub struct Ledger {
    rows: u32,
    groups: usize,
    /// One bit per row of the area.
    leased: Vec<u64>,
    open: HashMap<u64, Vec<u32>>,
    /// Used job numbers, as runs first → last.
    used: BTreeMap<u64, u64>,
}

impl Ledger {
    pub fn new(rows: u32, groups: usize) -> Self {
        let words = (rows as usize).div_ceil(64);
        Self { rows, groups, leased: vec![0; words], open: HashMap::new(), used: BTreeMap::new() }
    }

    pub fn open_jobs(&self) -> usize {
        self.open.len()
    }

    /// Rows that an open job has; none when it is not open.
    pub fn rows_of(&self, job: u64) -> usize {
        self.open.get(&job).map_or(0, Vec::len)
    }

    /// Checks a job and leases its rows. After a violation the ledger is not to be used for further jobs.
    pub fn open(&mut self, job: u64, items: &[RowItem]) -> Result<Verdict, Violation> {
        self.use_number(job)?;
        for item in items {
            self.check(job, item)?;
        }
        if items.is_empty() || self.open.len() >= MAX_OPEN_JOBS {
            return Ok(Verdict::Answer);
        }
        let mut rows = Vec::with_capacity(items.len());
        for &RowItem { row, .. } in items {
            if self.is_leased(row) {
                rows.into_iter().for_each(|row| self.give_back(row));
                return Err(Violation::Leased { job, row });
            }
            self.leased[row as usize / 64] |= 1 << (row % 64);
            rows.push(row);
        }
        self.open.insert(job, rows);
        Ok(Verdict::Open)
    }

    /// Ends a job: its rows are the engine's again. False when it was not open.
    pub fn close(&mut self, job: u64) -> bool {
        let Some(rows) = self.open.remove(&job) else { return false };
        rows.into_iter().for_each(|row| self.give_back(row));
        true
    }

    fn check(&self, job: u64, item: &RowItem) -> Result<(), Violation> {
        if item.row >= self.rows {
            return Err(Violation::Row { job, row: item.row, rows: self.rows });
        }
        if item.key.group.0 as usize >= self.groups {
            return Err(Violation::Group { job, group: item.key.group.0, groups: self.groups });
        }
        Ok(())
    }

    fn is_leased(&self, row: u32) -> bool {
        self.leased[row as usize / 64] & (1 << (row % 64)) != 0
    }

    fn give_back(&mut self, row: u32) {
        self.leased[row as usize / 64] &= !(1 << (row % 64));
    }

    /// Marks `job` as used, joining the runs beside it.
    fn use_number(&mut self, job: u64) -> Result<(), Violation> {
        let below = self.used.range(..=job).next_back().map(|(&first, &last)| (first, last));
        if below.is_some_and(|(_, last)| last >= job) {
            return Err(Violation::Job(job));
        }
        let above = job.checked_add(1).and_then(|next| self.used.remove(&next));
        let last = above.unwrap_or(job);
        let first = match below {
            Some((first, end)) if end + 1 == job => first,
            _ => job,
        };
        self.used.insert(first, last);
        if self.used.len() > RANGES
            && let Some((lowest, _)) = self.used.pop_first()
            && let Some((_, last)) = self.used.pop_first()
        {
            self.used.insert(lowest, last);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;
    use crate::base::block::{BlockHash, GroupId, RowKey};

    fn item(row: u32, group: u32) -> RowItem {
        RowItem { key: RowKey { hash: BlockHash([1; 32]), group: GroupId(group) }, position: 16, row }
    }

    #[test]
    fn what_would_touch_foreign_memory_is_a_violation() {
        let mut ledger = Ledger::new(8, 2);
        assert_eq!(ledger.open(1, &[item(0, 0), item(7, 1)]), Ok(Verdict::Open));
        assert_eq!(ledger.open(1, &[item(2, 0)]), Err(Violation::Job(1)));
        assert_eq!(ledger.open(2, &[item(8, 0)]), Err(Violation::Row { job: 2, row: 8, rows: 8 }));
        assert_eq!(ledger.open(3, &[item(2, 2)]), Err(Violation::Group { job: 3, group: 2, groups: 2 }));
        assert_eq!(ledger.open(4, &[item(2, 0), item(7, 0)]), Err(Violation::Leased { job: 4, row: 7 }));
        assert_eq!(ledger.open(5, &[item(3, 0), item(3, 1)]), Err(Violation::Leased { job: 5, row: 3 }));
        assert!(ledger.close(1) && !ledger.close(1));
        assert_eq!(ledger.open(6, &[item(7, 0), item(2, 0), item(3, 0)]), Ok(Verdict::Open));
    }

    #[test]
    fn empty_jobs_and_those_over_the_bound_are_answered_at_once() {
        let mut ledger = Ledger::new(4096, 1);
        assert_eq!(ledger.open(0, &[]), Ok(Verdict::Answer));
        for n in 0..MAX_OPEN_JOBS {
            let job = n as u64 + 1;
            assert_eq!(ledger.open(job, &[item(u32::try_from(n).unwrap(), 0)]), Ok(Verdict::Open));
        }
        assert_eq!(ledger.open(5000, &[item(4000, 0)]), Ok(Verdict::Answer));
        assert!(ledger.close(1));
        assert_eq!(ledger.open(5001, &[item(4000, 0)]), Ok(Verdict::Open));
    }

    #[test]
    fn the_memory_of_numbers_is_bounded_and_forgets_no_used_one() {
        let mut ledger = Ledger::new(1, 1);
        for n in 0..3 * RANGES as u64 {
            assert_eq!(ledger.open(n * 10, &[]), Ok(Verdict::Answer));
        }
        assert!(ledger.used.len() <= RANGES);
        for n in 0..3 * RANGES as u64 {
            assert_eq!(ledger.open(n * 10, &[]), Err(Violation::Job(n * 10)));
        }
        assert_eq!(ledger.open(u64::MAX, &[]), Ok(Verdict::Answer));
        assert_eq!(ledger.open(u64::MAX, &[]), Err(Violation::Job(u64::MAX)));
    }

    proptest! {
        #[test]
        fn no_row_is_ever_in_two_open_jobs(steps in proptest::collection::vec((0_u64..40, proptest::collection::vec(0_u32..80, 0..5), any::<bool>()), 1..200)) {
            let mut ledger = Ledger::new(70, 1);
            let mut used = HashSet::new();
            let mut open: HashMap<u64, Vec<u32>> = HashMap::new();
            for (job, rows, close) in steps {
                if close {
                    prop_assert_eq!(ledger.close(job), open.remove(&job).is_some());
                    continue;
                }
                let items: Vec<RowItem> = rows.iter().map(|&row| item(row, 0)).collect();
                let fresh = used.insert(job);
                let distinct = rows.iter().collect::<HashSet<_>>().len() == rows.len();
                let free = !open.values().flatten().any(|row| rows.contains(row));
                let sound = fresh && distinct && free && rows.iter().all(|&row| row < 70);
                let verdict = ledger.open(job, &items);
                prop_assert_eq!(verdict.is_ok(), sound);
                if verdict == Ok(Verdict::Open) {
                    open.insert(job, rows);
                }
                prop_assert_eq!(ledger.open_jobs(), open.len());
            }
        }
    }
}
