//! What a node tells a peer of its rows: a snapshot in parts, then changes with numbers. Made when it can be sent.

use std::collections::BTreeMap;

use super::proto::Word;
use crate::base::block::{RowKey, Space};

/// What we tell of ourselves.
#[derive(Debug, Default)]
pub struct Telling {
    pub(super) space: Option<Space>,
    pub(super) epoch: u32,
    pub(super) seq: u64,
    /// Rest of the snapshot, last key first; `None` when it was sent to its end.
    pub(super) snapshot: Option<Vec<(RowKey, u32)>>,
    pub(super) part: u32,
    /// Position of what was added, `None` for what was removed.
    pub(super) pending: BTreeMap<RowKey, Option<u32>>,
}

impl Telling {
    /// The next part of the snapshot, or the next delta once it is sent.
    pub fn next(&mut self, most: usize) -> Option<Word> {
        let (space, epoch) = (self.space?, self.epoch);
        if let Some(rest) = &mut self.snapshot {
            let from = rest.len().saturating_sub(most);
            let mut keys = rest.split_off(from);
            keys.reverse();
            let (part, last) = (self.part, rest.is_empty());
            self.part += 1;
            if last {
                self.snapshot = None;
            }
            return Some(Word::Snapshot { space, epoch, part, last, keys });
        }
        if self.pending.is_empty() {
            return None;
        }
        let (mut added, mut removed) = (Vec::new(), Vec::new());
        while added.len() + removed.len() < most
            && let Some((key, position)) = self.pending.pop_first()
        {
            match position {
                Some(position) => added.push((key, position)),
                None => removed.push(key),
            }
        }
        self.seq += 1;
        Some(Word::Delta { space, epoch, seq: self.seq, added, removed })
    }
}
