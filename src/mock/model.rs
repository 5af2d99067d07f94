//! The model that is none: tokens of a text, bytes of a row, words of a reply. Pure, and the same everywhere.
//!
//! The tokenizer cuts text before every white space and after every 8 bytes, and knows the marks of the chat template
//! as single tokens. A token's number is a hash of its bytes. Words of a reply are one token each and begin with a
//! space, so a reply that comes back in the next prompt has the tokens it was made of.
//!
//! A row's bytes follow from seed, block hash and group, so any engine of the seed can say whether a row that it
//! was given is right: a wrong byte anywhere in the path is seen, whatever its checksum says.

use sha2::{Digest, Sha256};

use crate::base::block::{BlockHash, RowKey};

/// Marks of the chat template. Their token is their number here, plus one.
const MARKS: [&str; 6] = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|tools|>", "<|end|>"];

/// Tokens below are marks; above, hashes of pieces.
const PIECES: u32 = 256;

/// Longest piece of text that is one token.
const PIECE: usize = 8;

const WORDS: [&str; 32] = [
    " amber", " birch", " cedar", " delta", " ember", " fjord", " grove", " heron", " islet", " jetty",
    " knoll", " larch", " maple", " north", " ocean", " poppy", " quartz", " river", " stone", " thyme",
    " umber", " vale", " willow", " xenon", " yarrow", " zephyr", " bloom", " cliff", " drift", " field",
    " harbor", " meadow",
];

/// First word of a reply that was made from a wrong row.
pub const WRONG: &str = " WRONG";

/// Pieces of `text`, one for each token.
pub fn pieces(text: &str) -> Vec<&[u8]> {
    let bytes = text.as_bytes();
    let (mut out, mut from) = (Vec::with_capacity(bytes.len() / 4), 0);
    while from < bytes.len() {
        let rest = &bytes[from..];
        let mark = MARKS.iter().find(|mark| rest.starts_with(mark.as_bytes()));
        let ends = |&at: &usize| bytes[from + at].is_ascii_whitespace() || bytes[from + at] == b'<';
        let length = match mark {
            Some(mark) => mark.len(),
            None => (1..rest.len().min(PIECE)).find(ends).unwrap_or(rest.len().min(PIECE)),
        };
        out.push(&rest[..length]);
        from += length;
    }
    out
}

/// The token of one piece.
pub fn token(piece: &[u8]) -> u32 {
    if let Some(mark) = MARKS.iter().position(|mark| mark.as_bytes() == piece) {
        return u32::try_from(mark).expect("few marks") + 1;
    }
    // FNV-1a, folded into what a token id may be.
    let hash = piece.iter().fold(0x811c_9dc5_u32, |h, &b| (h ^ u32::from(b)).wrapping_mul(0x0100_0193));
    PIECES + hash % (0x7fff_ffff - PIECES)
}

pub fn tokens(text: &str) -> Vec<u32> {
    pieces(text).into_iter().map(token).collect()
}

/// The chat template: every message between its role's mark and the end mark, then the assistant's mark.
pub fn render(messages: &[(String, String)], tools: Option<&str>) -> String {
    let mut out = String::new();
    if let Some(tools) = tools {
        out.extend(["<|tools|>", tools, "<|end|>"]);
    }
    for (role, content) in messages {
        let mark = match role.as_str() {
            "system" | "developer" => "<|system|>",
            "assistant" => "<|assistant|>",
            "tool" => "<|tool|>",
            _ => "<|user|>",
        };
        out.extend([mark, content, "<|end|>"]);
    }
    out.push_str("<|assistant|>");
    out
}

/// Hashes of the whole blocks of `tokens`.
pub fn chain(hash_seed: &str, block_tokens: usize, tokens: &[u32]) -> Vec<BlockHash> {
    let mut at = BlockHash::start(hash_seed);
    let next = |block: &[u32]| {
        at = at.next(block);
        at
    };
    tokens.chunks_exact(block_tokens).map(next).collect()
}

/// Numbers without end from one seed (splitmix64).
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn of_row(seed: u64, key: &RowKey) -> Self {
        let word = u64::from_le_bytes(key.hash.0[8..16].try_into().expect("8 bytes"));
        Self(word ^ seed.rotate_left(17) ^ u64::from(key.group.0).wrapping_mul(0xd6e8_feb8_6659_fd93))
    }

    /// The dice of a reply: they follow from the whole prompt.
    pub fn of_prompt(seed: u64, tokens: &[u32]) -> Self {
        let mut hash = Sha256::new();
        hash.update(seed.to_le_bytes());
        tokens.iter().for_each(|token| hash.update(token.to_le_bytes()));
        let digest: [u8; 32] = hash.finalize().into();
        Self(u64::from_le_bytes(digest[..8].try_into().expect("8 bytes")))
    }
}

/// Writes what the engine computes for `key`: the covered ranges. The rest holds what another request left there.
pub fn compute_row(row: &mut [u8], covered: &[(u32, u32)], seed: u64, key: &RowKey) {
    row.fill(0xA5);
    let mut dice = Dice::of_row(seed, key);
    for &(offset, length) in covered {
        for chunk in row[offset as usize..(offset + length) as usize].chunks_mut(8) {
            let length = chunk.len();
            chunk.copy_from_slice(&dice.roll().to_le_bytes()[..length]);
        }
    }
}

/// Whether the covered ranges of a row are what the engine would compute for `key`. In a row that was brought,
/// the rest must be zero: it held other requests' data, which is never stored.
pub fn is_right(row: &[u8], covered: &[(u32, u32)], seed: u64, key: &RowKey, brought: bool) -> bool {
    let (mut dice, mut from) = (Dice::of_row(seed, key), 0);
    for &(offset, length) in covered {
        let (offset, end) = (offset as usize, (offset + length) as usize);
        if brought && row[from..offset].iter().any(|&b| b != 0) {
            return false;
        }
        let wrong = |chunk: &[u8]| dice.roll().to_le_bytes()[..chunk.len()] != *chunk;
        if row[offset..end].chunks(8).any(wrong) {
            return false;
        }
        from = end;
    }
    !brought || row[from..].iter().all(|&b| b == 0)
}

/// One word of a reply and how sure the model that is none was of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Word {
    pub text: &'static str,
    pub logprob: f64,
}

/// The reply to a prompt: words, and whether it came to its end before `limit`.
pub fn reply(seed: u64, prompt: &[u32], wrong: bool, limit: usize, to_the_limit: bool) -> (Vec<Word>, bool) {
    let mut dice = Dice::of_prompt(seed, prompt);
    let natural = 8 + usize::try_from(dice.roll() % 25).expect("below 25");
    let length = if to_the_limit { limit } else { natural.min(limit) };
    let mut words: Vec<Word> = (0..length)
        .map(|_| {
            let roll = dice.roll();
            let text = WORDS[usize::try_from(roll % 32).expect("below 32")];
            Word { text, logprob: -((roll >> 40) as f64) / f64::from(1 << 24) }
        })
        .collect();
    if let Some(first) = words.first_mut().filter(|_| wrong) {
        *first = Word { text: WRONG, logprob: -99.0 };
    }
    (words, !to_the_limit && natural <= limit)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::base::block::GroupId;

    #[test]
    fn a_reply_that_comes_back_has_the_tokens_it_was_made_of() {
        let said = |role: &str, content: &str| (role.to_owned(), content.to_owned());
        let prompt = render(&[said("system", "be brief"), said("user", "hello there, friend")], None);
        let first = tokens(&prompt);
        let (words, ended) = reply(1, &first, false, 100, false);
        assert!(ended && words.len() >= 8);
        let answer: String = words.iter().map(|w| w.text).collect();
        let made: Vec<u32> = words.iter().map(|w| token(w.text.as_bytes())).collect();
        let turns = [
            said("system", "be brief"),
            said("user", "hello there, friend"),
            said("assistant", &answer),
            said("user", "go on"),
        ];
        let next = tokens(&render(&turns, None));
        assert_eq!(next[..first.len()], first);
        assert_eq!(next[first.len()..first.len() + made.len()], made);
    }

    #[test]
    fn replies_follow_from_the_whole_prompt_and_the_seed() {
        let words = |seed, prompt: &[u32]| reply(seed, prompt, false, 50, true).0;
        assert_eq!(words(1, &[1, 2, 3]), words(1, &[1, 2, 3]));
        assert_ne!(words(1, &[1, 2, 3]), words(1, &[9, 2, 3]));
        assert_ne!(words(1, &[1, 2, 3]), words(2, &[1, 2, 3]));
        assert_eq!(words(1, &[1]).len(), 50);
        assert_eq!(reply(1, &[1], true, 3, false).0[0].text, WRONG);
    }

    proptest! {
        #[test]
        fn pieces_are_the_text(text in ".{0,200}") {
            prop_assert_eq!(pieces(&text).concat(), text.as_bytes());
            prop_assert!(pieces(&text).iter().all(|p| !p.is_empty() && p.len() <= 13));
        }

        #[test]
        fn one_wrong_byte_is_seen(at in 0_usize..4096, flip in 1_u8..) {
            let key = RowKey { hash: BlockHash([3; 32]), group: GroupId(1) };
            let covered = [(16, 100), (200, 1001)];
            let mut row = vec![0; 4096];
            compute_row(&mut row, &covered, 5, &key);
            prop_assert!(is_right(&row, &covered, 5, &key, false));
            prop_assert!(!is_right(&row, &covered, 5, &key, true));
            let inside = |at: usize| (16..116).contains(&at) || (200..1201).contains(&at);
            (0..4096).filter(|&at| !inside(at)).for_each(|at| row[at] = 0);
            prop_assert!(is_right(&row, &covered, 5, &key, true));
            prop_assert!(!is_right(&row, &covered, 6, &key, true));
            row[at] ^= flip;
            prop_assert!(!is_right(&row, &covered, 5, &key, true));
        }
    }
}
