//! Prefixes: how a prompt's beginnings become hashes, and which of them a node has computed.
//!
//! A prompt of the same model with the same mark is, as far as the mark reaches, the same prompt. The history is a
//! guess about a node's cache, made of what was sent there; the engine's own block hashes are the truth, and they
//! take this one's place where exact tokens are to be had.

use std::collections::{HashMap, VecDeque};

use serde::{Deserialize, Serialize};

/// A beginning of a prompt: its hash, and how many canonical bytes it covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Mark {
    pub hash: u64,
    pub bytes: u64,
}

/// A mark is made each time this many bytes have come since the last: about 250 tokens, so that a prompt without
/// turns is known to within a few blocks of the engine's cache.
const PIECE: usize = 1024;

/// Most marks of one prompt; what comes after has none. 16 MiB of text in one turn reach it, a conversation of
/// 16,384 turns too.
const MARKS_MAX: usize = 16_384;

/// Rolls a hash over what is fed and makes marks.
#[derive(Debug)]
pub struct Roller {
    state: u64,
    piece: Vec<u8>,
    fed: u64,
    marks: Vec<Mark>,
}

impl Roller {
    pub fn new(seed: &str) -> Self {
        Self { state: mix(0, seed.as_bytes()), piece: Vec::with_capacity(PIECE), fed: 0, marks: Vec::new() }
    }

    pub fn feed(&mut self, mut bytes: &[u8]) {
        self.fed += bytes.len() as u64;
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(PIECE - self.piece.len()));
            self.piece.extend_from_slice(now);
            bytes = later;
            if self.piece.len() == PIECE {
                self.mark(self.fed - bytes.len() as u64);
            }
        }
    }

    /// Bytes fed so far.
    pub fn fed(&self) -> u64 {
        self.fed
    }

    /// Makes a mark here, unless there is one.
    pub fn boundary(&mut self) {
        if !self.piece.is_empty() {
            self.mark(self.fed);
        }
    }

    pub fn finish(mut self) -> (Vec<Mark>, u64) {
        self.boundary();
        (self.marks, self.fed)
    }

    fn mark(&mut self, bytes: u64) {
        self.state = mix(self.state, &self.piece);
        self.piece.clear();
        if self.marks.len() < MARKS_MAX {
            self.marks.push(Mark { hash: self.state, bytes });
        }
    }
}

/// Folds bytes into a state, eight at a time, by the two halves of a wide product. Not a fingerprint: two prompts
/// that collide are only placed alike.
fn mix(state: u64, bytes: &[u8]) -> u64 {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
    const OTHER: u64 = 0xd6e8_feb8_6659_fd93;
    let fold = |a: u64, b: u64| {
        let wide = u128::from(a ^ ODD) * u128::from(b ^ OTHER);
        (wide as u64) ^ ((wide >> 64) as u64)
    };
    let mut state = fold(state, bytes.len() as u64);
    for chunk in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        state = fold(state.rotate_left(23), u64::from_le_bytes(word));
    }
    fold(state, ODD)
}

/// The hash of a text on its own.
pub fn hash(text: &[u8]) -> u64 {
    mix(0, text)
}

/// The mark of a session's name, in the same history as those of prompts.
pub fn session(name: &str) -> Mark {
    Mark { hash: mix(u64::MAX, name.as_bytes()), bytes: 0 }
}

/// What one node is known to have computed: bounded, the longest unused forgotten first.
#[derive(Debug)]
pub struct Known {
    max: usize,
    stamps: HashMap<u64, u64>,
    order: VecDeque<(u64, u64)>,
    stamp: u64,
}

/// Most marks remembered of a node: 64 MiB of text or 65,536 turns, several times what a drive's worth of coding
/// sessions of one day has, in about 3 MiB of memory.
pub const KNOWN_MAX: usize = 65_536;

impl Default for Known {
    fn default() -> Self {
        Self::new(KNOWN_MAX)
    }
}

impl Known {
    pub fn new(max: usize) -> Self {
        Self { max: max.max(1), stamps: HashMap::new(), order: VecDeque::new(), stamp: 0 }
    }

    /// The node has computed the prompt that these marks begin.
    pub fn learn(&mut self, hashes: impl IntoIterator<Item = u64>) {
        for hash in hashes {
            self.stamp += 1;
            self.stamps.insert(hash, self.stamp);
            self.order.push_back((hash, self.stamp));
            while self.stamps.len() > self.max || self.order.len() > 2 * self.max {
                self.forget_oldest();
            }
        }
    }

    fn forget_oldest(&mut self) {
        let Some((hash, stamp)) = self.order.pop_front() else { return };
        // An entry that was learned again has a younger place further back.
        if self.stamps.get(&hash) == Some(&stamp) {
            self.stamps.remove(&hash);
        }
    }

    /// How many bytes of the prompt the longest known mark covers.
    pub fn longest(&self, marks: &[Mark]) -> u64 {
        marks.iter().rev().find(|mark| self.stamps.contains_key(&mark.hash)).map_or(0, |mark| mark.bytes)
    }

    pub fn has(&self, mark: Mark) -> bool {
        self.stamps.contains_key(&mark.hash)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn marks(bytes: &[u8]) -> Vec<Mark> {
        let mut roller = Roller::new("test");
        roller.feed(bytes);
        roller.finish().0
    }

    #[test]
    fn the_longest_known_beginning_counts() {
        let mut known = Known::new(100);
        let (short, long) = (marks(&[7; 3000]), marks(&[7; 9000]));
        known.learn(short.iter().map(|mark| mark.hash));
        assert_eq!(
            known.longest(&long),
            2048,
            "the rest of 3000 bytes ends inside a piece of the longer one"
        );
        assert_eq!(known.longest(&short), 3000);
        assert_eq!(known.longest(&marks(&[8; 9000])), 0);
    }

    #[test]
    fn what_was_learned_again_outlives_what_was_not() {
        let mut known = Known::new(3);
        known.learn([1, 2, 3, 1, 4]);
        let has = |hash| known.has(Mark { hash, bytes: 0 });
        assert_eq!([has(1), has(2), has(3), has(4)], [true, false, true, true]);
    }

    #[test]
    fn a_prompt_has_a_bounded_number_of_marks() {
        let mut roller = Roller::new("test");
        for _ in 0..MARKS_MAX + 100 {
            roller.feed(b"turn");
            roller.boundary();
        }
        let (marks, bytes) = roller.finish();
        assert_eq!((marks.len(), bytes), (MARKS_MAX, 4 * (MARKS_MAX as u64 + 100)));
    }

    proptest! {
        #[test]
        fn the_history_never_outgrows_its_bound(hashes: Vec<u8>, max in 1_usize..20) {
            let mut known = Known::new(max);
            for hash in hashes {
                known.learn([u64::from(hash)]);
                prop_assert!(known.stamps.len() <= max && known.order.len() <= 2 * max);
                let just_learned = known.has(Mark { hash: u64::from(hash), bytes: 0 });
                prop_assert!(just_learned);
            }
        }

        #[test]
        fn marks_do_not_depend_on_how_the_bytes_arrive(
            bytes in proptest::collection::vec(any::<u8>(), 0..5000), cut in 0_usize..5000
        ) {
            let mut roller = Roller::new("test");
            let (front, back) = bytes.split_at(cut.min(bytes.len()));
            roller.feed(front);
            roller.feed(back);
            prop_assert_eq!(roller.finish().0, marks(&bytes));
        }

        #[test]
        fn one_changed_byte_changes_all_marks_from_there_on(
            bytes in proptest::collection::vec(any::<u8>(), 1..5000), at: proptest::sample::Index
        ) {
            let mut other = bytes.clone();
            let at = at.index(bytes.len());
            other[at] ^= 1;
            for (one, two) in marks(&bytes).iter().zip(&marks(&other)) {
                prop_assert_eq!(one.hash == two.hash, one.bytes <= at as u64);
            }
        }
    }
}
