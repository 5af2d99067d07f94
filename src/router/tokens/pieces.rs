//! Text to token ids, paying only for what is new.
//!
//! A tokenizer first cuts a text at its special tokens and treats what lies between on its own. So do we, before it:
//! a piece is a special token and the text up to the next one, and its ids depend on nothing else. A conversation
//! that grows consists of the pieces it had and a few more, and the template puts a special token at every message.
//!
//! Where the cut is provable: the tokenizer scans for the leftmost, longest of its added tokens that are matched in
//! plain text, and so do we, over all of them. At a match of a *special* one that takes no whitespace with it
//! (`lstrip`, `rstrip`) the text before cannot reach over it, nor it into the text before. A piece begins with its
//! token, so that what a tokenizer does only at the very beginning of a text is not done to it. A tokenizer with
//! tokens that count only as whole words looks across cuts; it gets no pieces. Proved by a property test, too.
//!
//! Pieces are compared as text, not by a hash of it: ids may one day be sent to the engine in place of the text.

use std::ops::Range;
use std::sync::Arc;

use aho_corasick::{AhoCorasick, AhoCorasickBuilder, MatchKind};
use parking_lot::Mutex;
use tokenizers::{AddedToken, Tokenizer};

use super::Unsure;
use super::recent::Recent;
use super::words::Words;

/// What an entry costs beside its text and its ids.
const ENTRY: usize = 128;

/// A tokenizer and the pieces it has seen. Several threads may ask at once: what is known is looked up in a moment,
/// and what is not is tokenised outside of the lock.
pub struct Pieces {
    tokenizer: Tokenizer,
    words: Option<Words>,
    cuts: Option<Cuts>,
    around: Around,
    seen: Mutex<Seen>,
}

impl std::fmt::Debug for Pieces {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pieces({} bytes seen)", self.bytes())
    }
}

/// Where to cut.
struct Cuts {
    finder: AhoCorasick,
    /// By pattern of the finder.
    here: Vec<bool>,
}

/// Ids that the tokenizer puts around a prompt given as text.
#[derive(Clone, Debug, Default, PartialEq)]
struct Around {
    before: Vec<u32>,
    after: Vec<u32>,
}

/// Ids of a text, and what they cost.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ids {
    pub ids: Vec<u32>,
    /// Bytes that the tokenizer had to look at.
    pub fresh_bytes: usize,
    /// The text's pieces from its beginning, as far as each is remembered.
    pub steps: Vec<Step>,
}

/// A piece of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Stands for its text, as long as that is remembered; never used twice.
    pub piece: u64,
    /// Ids of the prompt up to its end.
    pub end: usize,
}

/// A text in pieces, and which of them are known.
#[derive(Debug)]
pub struct Looked {
    pieces: Vec<(Range<usize>, Option<Piece>)>,
    /// Bytes that are not known.
    pub fresh_bytes: usize,
}

impl Pieces {
    /// `bound`: bytes that seen pieces may take, text, ids and table.
    pub fn new(mut tokenizer: Tokenizer, bound: usize) -> Result<Self, Unsure> {
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|error| Unsure::of(error.to_string()))?;
        let tokens: Vec<AddedToken> = tokenizer.get_added_tokens_decoder().into_values().collect();
        let cuts = Cuts::of(&tokens);
        let around = Around::of(&tokenizer)?;
        let seen = Mutex::new(Seen { table: Recent::new(bound), made: 0 });
        let words = Words::of(&tokenizer);
        Ok(Self { tokenizer, words, cuts, around, seen })
    }

    /// Cuts `text` and says what of it is known.
    pub fn look(&self, text: &str) -> Looked {
        let ends = self.cuts.as_ref().map_or_else(Vec::new, |cuts| cuts.of_text(text));
        let mut looked = Looked { pieces: Vec::with_capacity(ends.len() + 1), fresh_bytes: 0 };
        let mut from = 0;
        let mut seen = self.seen.lock();
        for end in ends.into_iter().chain([text.len()]) {
            if end > from {
                let piece = seen.table.get(&text[from..end]).filter(|_| self.shared(text, from));
                looked.fresh_bytes += if piece.is_none() { end - from } else { 0 };
                looked.pieces.push((from..end, piece));
                from = end;
            }
        }
        looked
    }

    /// The ids of `text`, of which `looked` was said; with `special` those around it too, as a prompt given as text
    /// gets them.
    pub fn ids(&self, text: &str, looked: Looked, special: bool) -> Result<Ids, Unsure> {
        let known = |piece: &Option<Piece>| piece.as_ref().map_or(0, |piece| piece.ids.len());
        let count: usize = looked.pieces.iter().map(|(_, piece)| known(piece)).sum();
        let mut out = Ids { fresh_bytes: looked.fresh_bytes, ..Ids::default() };
        out.ids.reserve(count + looked.fresh_bytes / 2 + 16);
        out.steps.reserve(looked.pieces.len());
        if special {
            out.ids.extend(&self.around.before);
        }
        let mut without_gap = true;
        for (range, piece) in looked.pieces {
            let piece = match piece {
                Some(piece) => Some(piece),
                None => self.fresh(text, range, &mut out.ids)?,
            };
            match piece {
                Some(Piece { number, ids }) => {
                    out.ids.extend_from_slice(&ids);
                    if without_gap {
                        out.steps.push(Step { piece: number, end: out.ids.len() });
                    }
                }
                None => without_gap = false,
            }
        }
        if special {
            out.ids.extend(&self.around.after);
        }
        Ok(out)
    }

    /// Bytes that seen pieces take.
    pub fn bytes(&self) -> usize {
        self.seen.lock().table.bytes()
    }

    /// Tokenises a piece and keeps it. None: it cannot be kept, and its ids stand in `out` already.
    fn fresh(&self, text: &str, range: Range<usize>, out: &mut Vec<u32>) -> Result<Option<Piece>, Unsure> {
        let piece = &text[range.clone()];
        let by_words = self.words.as_ref().and_then(|words| words.ids(&self.tokenizer, piece));
        let ids = by_words.map_or_else(|| encode(&self.tokenizer, piece, false), Ok)?;
        let ids: Arc<[u32]> = ids.into();
        let kept = match self.shared(text, range.start) {
            true => self.seen.lock().keep(piece, &ids),
            false => None,
        };
        if kept.is_none() {
            out.extend_from_slice(&ids);
        }
        Ok(kept)
    }

    /// Whether the piece that begins at `from` has the ids that its text has anywhere. The beginning of a text may be
    /// treated in its own way, unless it is a cut itself.
    fn shared(&self, text: &str, from: usize) -> bool {
        from > 0 || self.cuts.as_ref().is_some_and(|cuts| cuts.begins(text))
    }
}

fn encode(tokenizer: &Tokenizer, text: &str, special: bool) -> Result<Vec<u32>, Unsure> {
    let encoding = tokenizer.encode_fast(text, special).map_err(|error| Unsure::of(error.to_string()))?;
    Ok(encoding.get_ids().to_vec())
}

impl Cuts {
    fn of(tokens: &[AddedToken]) -> Option<Self> {
        if tokens.iter().any(|token| token.single_word) {
            return None;
        }
        let plain: Vec<&AddedToken> =
            tokens.iter().filter(|token| !token.normalized && !token.content.is_empty()).collect();
        let here: Vec<bool> =
            plain.iter().map(|token| token.special && !token.lstrip && !token.rstrip).collect();
        let finder = AhoCorasickBuilder::new()
            .match_kind(MatchKind::LeftmostLongest)
            .build(plain.iter().map(|token| token.content.as_bytes()))
            .ok()?;
        here.contains(&true).then_some(Self { finder, here })
    }

    /// Where pieces begin, but for the first.
    fn of_text(&self, text: &str) -> Vec<usize> {
        let found = self.finder.find_iter(text).filter(|found| self.here[found.pattern().as_usize()]);
        found.map(|found| found.start()).collect()
    }

    fn begins(&self, piece: &str) -> bool {
        self.finder
            .find(piece)
            .is_some_and(|found| found.start() == 0 && self.here[found.pattern().as_usize()])
    }
}

impl Around {
    /// Found by asking: with and without, around a text that is in every vocabulary.
    fn of(tokenizer: &Tokenizer) -> Result<Self, Unsure> {
        let (bare, dressed) = (encode(tokenizer, "a", false)?, encode(tokenizer, "a", true)?);
        let at = dressed.windows(bare.len().max(1)).position(|window| window == bare);
        match at {
            Some(at) => {
                Ok(Self { before: dressed[..at].to_vec(), after: dressed[at + bare.len()..].to_vec() })
            }
            None => Err(Unsure::of("what the tokenizer puts around a prompt is not clear")),
        }
    }
}

#[derive(Clone, Debug)]
struct Piece {
    number: u64,
    ids: Arc<[u32]>,
}

/// What was seen.
struct Seen {
    table: Recent<Box<str>, Piece>,
    made: u64,
}

impl Seen {
    fn keep(&mut self, piece: &str, ids: &Arc<[u32]>) -> Option<Piece> {
        self.made += 1;
        let new = Piece { number: self.made, ids: Arc::clone(ids) };
        self.table.put(piece.into(), new, piece.len() + size_of_val(&**ids) + ENTRY)
    }
}
