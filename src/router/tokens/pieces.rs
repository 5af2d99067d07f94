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

use std::sync::Arc;

use aho_corasick::{AhoCorasick, AhoCorasickBuilder, MatchKind};
use hashbrown::HashMap;
use tokenizers::{AddedToken, Tokenizer};

use super::Unsure;

/// What an entry costs beside its text and its ids.
const ENTRY: usize = 96;

/// A tokenizer and the pieces it has seen.
pub struct Pieces {
    tokenizer: Tokenizer,
    cuts: Option<Cuts>,
    around: Around,
    seen: Seen,
}

impl std::fmt::Debug for Pieces {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pieces({} bytes seen)", self.seen.bytes())
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
}

impl Pieces {
    /// `bound`: bytes that seen pieces may take, text, ids and table.
    pub fn new(mut tokenizer: Tokenizer, bound: usize) -> Result<Self, Unsure> {
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|error| Unsure::of(error.to_string()))?;
        let tokens: Vec<AddedToken> = tokenizer.get_added_tokens_decoder().into_values().collect();
        let cuts = Cuts::of(&tokens);
        let around = Around::of(&tokenizer)?;
        Ok(Self { tokenizer, cuts, around, seen: Seen::new(bound) })
    }

    /// The ids of `text`; with `special` those around it too, as a prompt given as text gets them.
    pub fn ids(&mut self, text: &str, special: bool) -> Result<Ids, Unsure> {
        let mut out = Ids::default();
        if special {
            out.ids.extend(&self.around.before);
        }
        let ends = self.cuts.as_ref().map_or_else(Vec::new, |cuts| cuts.of_text(text));
        let mut from = 0;
        for end in ends.into_iter().chain([text.len()]) {
            if end > from {
                self.piece(&text[from..end], from == 0, &mut out)?;
                from = end;
            }
        }
        if special {
            out.ids.extend(&self.around.after);
        }
        Ok(out)
    }

    /// Bytes that seen pieces take.
    pub fn bytes(&self) -> usize {
        self.seen.bytes()
    }

    fn piece(&mut self, piece: &str, first: bool, out: &mut Ids) -> Result<(), Unsure> {
        // The beginning of a text may be treated in its own way, unless it is a cut itself.
        let shared = !first || self.cuts.as_ref().is_some_and(|cuts| cuts.begins(piece));
        if shared && let Some(ids) = self.seen.get(piece) {
            out.ids.extend_from_slice(&ids);
            return Ok(());
        }
        let ids = encode(&self.tokenizer, piece, false)?;
        out.fresh_bytes += piece.len();
        out.ids.extend_from_slice(&ids);
        if shared {
            self.seen.put(piece, ids.into());
        }
        Ok(())
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

/// Pieces in two generations: one that fills and one that was full. A piece that is asked for again moves to the
/// young one; when that is full the old one goes. Bounded by bytes; finding and keeping cost the same at any size.
struct Seen {
    /// For both generations.
    bound: usize,
    young: HashMap<Box<str>, Arc<[u32]>>,
    young_bytes: usize,
    old: HashMap<Box<str>, Arc<[u32]>>,
    old_bytes: usize,
}

impl Seen {
    fn new(bound: usize) -> Self {
        Self { bound, young: HashMap::new(), young_bytes: 0, old: HashMap::new(), old_bytes: 0 }
    }

    fn bytes(&self) -> usize {
        self.young_bytes + self.old_bytes
    }

    fn get(&mut self, piece: &str) -> Option<Arc<[u32]>> {
        if let Some(ids) = self.young.get(piece) {
            return Some(Arc::clone(ids));
        }
        let (text, ids) = self.old.remove_entry(piece)?;
        self.old_bytes -= cost(&text, &ids);
        self.keep(text, Arc::clone(&ids));
        Some(ids)
    }

    fn put(&mut self, piece: &str, ids: Arc<[u32]>) {
        if cost(piece, &ids) <= self.bound / 4 {
            self.keep(piece.into(), ids);
        }
    }

    fn keep(&mut self, text: Box<str>, ids: Arc<[u32]>) {
        let cost = cost(&text, &ids);
        if self.young_bytes + cost > self.bound / 2 {
            self.old = std::mem::take(&mut self.young);
            self.old_bytes = std::mem::take(&mut self.young_bytes);
        }
        self.young_bytes += cost;
        self.young.insert(text, ids);
    }
}

fn cost(text: &str, ids: &[u32]) -> usize {
    text.len() + size_of_val(ids) + ENTRY
}
