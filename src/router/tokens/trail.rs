//! Hashes of prompts that were seen before, beside the pieces that their text consists of.
//!
//! A block's hash covers all ids before it, so it can be known again only along a path: the pieces from the beginning
//! of the prompt, in their order. Each step of such a path remembers the hashes of the blocks that end in its piece.
//! A session that grows walks along its steps and makes the hashes of its tail alone.
//!
//! A piece is named by a number that its text has as long as it is remembered, never used twice: two paths of the
//! same numbers are the same ids.

use std::hash::BuildHasher;
use std::sync::Arc;

use hashbrown::DefaultHashBuilder;

use super::Prompt;
use super::recent::Recent;
use crate::base::block::BlockHash;
use crate::router::chain::Chain;

/// What a step costs beside its hashes.
const STEP: usize = 112;

/// Set in what stands for the beginning of paths; steps are counted from 1 and never get there.
const ROOT: u64 = 1 << 63;

/// The paths.
pub struct Trail {
    chain: Option<Chain>,
    hasher: DefaultHashBuilder,
    /// By the step before and the piece.
    steps: Recent<(u64, u64), Step>,
    made: u64,
}

#[derive(Clone)]
struct Step {
    number: u64,
    /// Of the blocks that end in this piece.
    hashes: Arc<[BlockHash]>,
}

/// How much of a prompt's path is known.
#[derive(Debug)]
pub struct Known {
    pub hashes: Vec<BlockHash>,
    /// Steps that were known, and the last of them.
    steps: usize,
    last: u64,
}

impl Trail {
    /// `bound`: bytes that it may take.
    pub fn new(bound: usize) -> Self {
        Self { chain: None, hasher: DefaultHashBuilder::default(), steps: Recent::new(bound), made: 0 }
    }

    pub fn bytes(&self) -> usize {
        self.steps.bytes()
    }

    /// The hashes of the prompt's beginning, as far as they were made before, for the engine that hashes by `chain`.
    pub fn known(&mut self, chain: &Chain, prompt: &Prompt) -> Known {
        if self.chain.as_ref() != Some(chain) {
            self.chain = Some(chain.clone());
            self.steps.clear();
        }
        let root = self.hasher.hash_one((&prompt.extra, prompt.special)) | ROOT;
        let mut known = Known { hashes: Vec::new(), steps: 0, last: root };
        known.hashes.reserve(prompt.ids.len() / chain.unit());
        for step in &prompt.steps {
            let Some(found) = self.steps.get(&(known.last, step.piece)) else { break };
            known.hashes.extend_from_slice(&found.hashes);
            known.last = found.number;
            known.steps += 1;
        }
        known
    }

    /// Remembers what was made after `known`.
    pub fn learn(&mut self, chain: &Chain, prompt: &Prompt, known: Known, made: &[BlockHash]) {
        if self.chain.as_ref() != Some(chain) {
            return;
        }
        let (mut at, mut last) = (known.hashes.len(), known.last);
        for step in &prompt.steps[known.steps..] {
            let end = step.end / chain.unit();
            let Some(hashes) = made.get(at - known.hashes.len()..end - known.hashes.len()) else { return };
            self.made += 1;
            let new = Step { number: self.made, hashes: hashes.into() };
            let cost = STEP + size_of_val(hashes);
            let Some(kept) = self.steps.put((last, step.piece), new, cost) else { return };
            (at, last) = (end, kept.number);
        }
    }
}
