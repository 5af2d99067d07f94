//! What of a prompt is on the device: vLLM's rules for caches of several groups. Pure.
//!
//! A hit ends at a block's end, or, where hashes are finer than blocks, at the end of a kept tail. Every group must be
//! able to go on from there: full attention with all blocks before it, a sliding window with those that the next token
//! looks at, a recurrent state with a snapshot of exactly that place. The last token is always computed, because its
//! logits are wanted. Source: vLLM 0.32 `v1/core/kv_cache_coordinator.py`, `v1/core/single_type_kv_cache_manager.py`.

use crate::base::block::{BlockHash, GroupId, RowKey};

/// What a cache group keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A row for every block of the prompt.
    Full,
    /// As full attention, of which only so many last tokens are looked at.
    Sliding(usize),
    /// Snapshots at a few places.
    State,
}

/// The grid that hits lie on, and the groups that must agree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grid {
    pub groups: Vec<Kind>,
    /// Tokens of a block.
    pub block: usize,
    /// Tokens of a hash, of which a block has a whole number.
    pub unit: usize,
}

impl Grid {
    /// Hashes of one block.
    pub fn units(&self) -> usize {
        self.block / self.unit
    }

    /// Key of what ends after so many tokens, which end a unit.
    pub fn key(&self, hashes: &[BlockHash], tokens: usize, group: usize) -> RowKey {
        let group = GroupId(u32::try_from(group).unwrap_or(u32::MAX));
        RowKey { hash: hashes[tokens / self.unit - 1], group }
    }

    /// Whether tails shorter than a block are kept. Not with windows, as in vLLM.
    pub fn has_tails(&self) -> bool {
        self.unit < self.block && !self.groups.iter().any(|kind| matches!(kind, Kind::Sliding(_)))
    }

    /// Last place of a prompt that a later request can begin at: its last token is to be computed.
    pub fn checkpoint(&self, prompt: usize) -> usize {
        let step = if self.has_tails() { self.unit } else { self.block };
        prompt.saturating_sub(1) / step * step
    }

    fn has_states(&self) -> bool {
        self.groups.contains(&Kind::State)
    }

    /// Blocks that a window makes a hit at the end of `block` need.
    fn window(&self, tokens: usize, block: usize) -> std::ops::Range<usize> {
        block.saturating_sub(tokens.saturating_sub(1).div_ceil(self.block))..block
    }

    /// Tokens that need not be computed, of a prompt of `prompt` tokens with `hashes` of its whole units.
    pub fn hit(&self, hashes: &[BlockHash], prompt: usize, has: impl Fn(&RowKey) -> bool) -> usize {
        let most = prompt.saturating_sub(1) / self.block;
        let has = |tokens: usize, group: usize| has(&self.key(hashes, tokens, group));
        let full = |block: &usize| {
            (0..self.groups.len()).all(|g| self.groups[g] != Kind::Full || has((block + 1) * self.block, g))
        };
        let reach = (0..most).take_while(full).count();
        for block in (0..=reach).rev() {
            let from = block * self.block;
            if self.has_tails() {
                let last = ((prompt - 1) / self.unit).min((block + 1) * self.units() - 1);
                let tail = |unit: &usize| (0..self.groups.len()).all(|g| has(unit * self.unit, g));
                if let Some(unit) = (block * self.units() + 1..=last).rev().find(tail) {
                    return unit * self.unit;
                }
            }
            let goes_on = |group: usize| match self.groups[group] {
                Kind::Full => true,
                Kind::Sliding(tokens) => self.window(tokens, block).all(|b| has((b + 1) * self.block, group)),
                Kind::State => has(from, group),
            };
            if block == 0 || (0..self.groups.len()).all(goes_on) {
                return from;
            }
        }
        0
    }

    /// As far as attention alone would reach: where a state is worth keeping, because prompts part there.
    pub fn junction(
        &self,
        hashes: &[BlockHash],
        prompt: usize,
        has: impl Fn(&RowKey) -> bool,
    ) -> Option<usize> {
        if !self.has_states() {
            return None;
        }
        let most = prompt.saturating_sub(1) / self.block;
        let all = |block: &usize| {
            let end = (block + 1) * self.block;
            (0..self.groups.len()).all(|g| self.groups[g] == Kind::State || has(&self.key(hashes, end, g)))
        };
        let reach = (0..most).take_while(all).count();
        (reach > 0).then_some(reach * self.block)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn hashes(units: usize) -> Vec<BlockHash> {
        (0..units).map(|n| BlockHash([u8::try_from(n).unwrap(); 32])).collect()
    }

    /// The rule as it is said, tried at every place from the end.
    fn plain(grid: &Grid, hashes: &[BlockHash], prompt: usize, held: &HashSet<RowKey>) -> usize {
        let has = |tokens: usize, group: usize| held.contains(&grid.key(hashes, tokens, group));
        let fits = |end: usize| {
            let whole = end / grid.block * grid.block;
            let ends = |upto: usize| (1..=upto / grid.block).map(|b| b * grid.block);
            if end != whole && !grid.has_tails() {
                return false;
            }
            grid.groups.iter().enumerate().all(|(g, kind)| match kind {
                Kind::State => has(end, g),
                Kind::Full => ends(whole).all(|at| has(at, g)) && (end == whole || has(end, g)),
                Kind::Sliding(window) => {
                    // The next token looks at the `window - 1` before it.
                    let from = end.saturating_sub(window.saturating_sub(1));
                    ends(whole).filter(|at| *at > from).all(|at| has(at, g))
                }
            })
        };
        (1..prompt).rev().filter(|end| end % grid.unit == 0).find(|end| fits(*end)).unwrap_or(0)
    }

    fn kinds() -> impl Strategy<Value = Vec<Kind>> {
        let kind = prop_oneof![
            Just(Kind::Full),
            Just(Kind::Full),
            Just(Kind::State),
            (1_usize..20).prop_map(Kind::Sliding)
        ];
        prop::collection::vec(kind, 1..4)
    }

    proptest! {
        #[test]
        fn a_hit_is_the_longest_that_all_groups_can_go_on_from(
            groups in kinds(), units in 1_usize..4, prompt in 1_usize..60, holes in prop::collection::vec(0_u8..5, 120),
        ) {
            let grid = Grid { groups, block: units * 2, unit: 2 };
            let hashes = hashes(prompt / 2);
            let mut held = HashSet::new();
            for (at, hole) in (2..=prompt).step_by(2).flat_map(|at| (0..grid.groups.len()).map(move |g| (at, g))).zip(&holes) {
                if *hole > 0 {
                    held.insert(grid.key(&hashes, at.0, at.1));
                }
            }
            let hit = grid.hit(&hashes, prompt, |key| held.contains(key));
            prop_assert_eq!(hit, plain(&grid, &hashes, prompt, &held));
            prop_assert!(hit < prompt);
        }
    }

    #[test]
    fn a_state_is_worth_keeping_where_attention_ends() {
        let grid = Grid { groups: vec![Kind::Full, Kind::State], block: 4, unit: 4 };
        let hashes = hashes(5);
        let held = [4, 8, 12].map(|at| grid.key(&hashes, at, 0));
        assert_eq!(grid.hit(&hashes, 20, |key| held.contains(key)), 0);
        assert_eq!(grid.junction(&hashes, 20, |key| held.contains(key)), Some(12));
        let full = Grid { groups: vec![Kind::Full], ..grid };
        assert_eq!(full.junction(&hashes, 20, |_| true), None);
    }

    #[test]
    fn the_last_token_is_computed_whatever_is_there() {
        let grid = Grid { groups: vec![Kind::Full], block: 4, unit: 2 };
        let hashes = hashes(6);
        assert_eq!([12, 11, 10, 9, 8, 1].map(|n| grid.hit(&hashes, n, |_| true)), [10, 10, 8, 8, 6, 0]);
        let coarse = Grid { unit: 4, ..grid };
        assert_eq!(coarse.hit(&hashes[..3], 12, |_| true), 8);
        assert_eq!([coarse.checkpoint(12), coarse.checkpoint(13), coarse.checkpoint(0)], [8, 12, 0]);
    }
}
