//! Text to token ids word by word, for tokenizers that first cut a text into words and treat each on its own.
//!
//! Bytes with merges behind patterns are what today's models have; their library spends most of its time on keeping
//! track of where each character came from, which nobody here asks for. The cutting is done with the library's own
//! compiled patterns, and a word that is new is tokenised by the library's own steps, so the ids are its own; words
//! that were seen before, which are nearly all, are looked up.
//!
//! Whatever is not of that form (another normalizer than one that leaves ASCII alone, other ways of cutting, a merge
//! that is left out by chance, an added token inside the text) is left to the library as a whole: [`Words::ids`] says
//! None. Proved by a property test against it, and like everything here against the engine.

use std::ops::Range;
use std::sync::Arc;

use aho_corasick::{AhoCorasick, AhoCorasickBuilder, MatchKind};
use parking_lot::Mutex;
use regex::Regex;
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::split::SplitPattern;
use tokenizers::utils::SysRegex;
use tokenizers::{
    AddedToken, Model, ModelWrapper, NormalizerWrapper, OffsetType, PreTokenizedString, PreTokenizer,
    PreTokenizerWrapper, SplitDelimiterBehavior, Tokenizer,
};

use super::recent::Recent;

/// The pattern that the library's byte level has built in.
const BUILT_IN: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Bytes that seen words may take: some 40,000, more than the words of most code bases.
const BOUND: usize = 4 << 20;

/// Longer words are no words, and hardly seen twice.
const WORD_MAX: usize = 64;

/// What an entry costs beside its text.
const ENTRY: usize = 96;

/// How nearly every pattern ends: of spaces before a word the last one belongs to the word. It is what keeps a pattern
/// from being searched for in one pass.
const LOOKS_AHEAD: &str = r"|\s+(?!\S)|\s+";

/// In such a pattern, spaces with line ends among them are one word up to the last line end.
const LINES: &str = r"|\s*[\r\n]+|";

/// Cuts a text into words.
enum Pattern {
    /// Without its look ahead, which is done to what is found.
    OnePass {
        regex: Regex,
        lines: bool,
    },
    Library(SysRegex),
}

impl Pattern {
    fn of(text: &str) -> Option<Self> {
        if let Some(before) = text.strip_suffix(LOOKS_AHEAD)
            && !before.contains("(?!")
            && !before.contains("(?=")
            && !before.contains("(?<")
            && let Ok(regex) = Regex::new(&format!(r"{before}|\s+"))
        {
            return Some(Self::OnePass { regex, lines: before.ends_with(LINES.trim_end_matches('|')) });
        }
        SysRegex::new(text).ok().map(Self::Library)
    }

    /// Calls `found` with each match's place in `text`.
    fn each(&self, text: &str, mut found: impl FnMut(usize, usize)) {
        match self {
            Self::Library(regex) => regex.find_iter(text).for_each(|(start, end)| found(start, end)),
            Self::OnePass { regex, lines } => {
                let mut from = 0;
                while let Some(word) = regex.find_at(text, from) {
                    let end = word.end() - word_after(text, word.range(), *lines);
                    found(word.start(), end);
                    // No pattern of this kind matches nothing; a text must come to its end all the same.
                    from = if end > from { end } else { text.ceil_char_boundary(end + 1) };
                    if from > text.len() {
                        return;
                    }
                }
            }
        }
    }
}

/// Bytes at the end of the spaces at `word` that belong to the word after them.
fn word_after(text: &str, word: Range<usize>, lines: bool) -> usize {
    let found = &text[word.clone()];
    let Some(last) = found.chars().next_back().filter(|last| last.is_whitespace()) else { return 0 };
    let ends_line = lines && ['\r', '\n'].contains(&last);
    let alone = found.len() == last.len_utf8();
    let at_end = text[word.end..].chars().next().is_none_or(char::is_whitespace);
    if ends_line || alone || at_end || !found.chars().all(char::is_whitespace) { 0 } else { last.len_utf8() }
}

/// Cuts and looks up.
pub struct Words {
    /// Applied one after the other.
    patterns: Vec<Pattern>,
    bytes: ByteLevel,
    /// A normalizer is there that leaves ASCII alone, and perhaps nothing else.
    ascii_only: bool,
    added: AhoCorasick,
    /// By pattern of `added`: the id, where a piece may begin with it.
    begins: Vec<Option<u32>>,
    seen: Mutex<Recent<Box<str>, Word>>,
}

/// Ids of one word.
#[derive(Clone)]
enum Word {
    Few(u8, [u32; FEW]),
    Many(Arc<[u32]>),
}

const FEW: usize = 4;

impl Word {
    fn of(ids: &[u32]) -> Self {
        let mut few = [0; FEW];
        match (few.get_mut(..ids.len()), u8::try_from(ids.len())) {
            (Some(room), Ok(count)) => {
                room.copy_from_slice(ids);
                Self::Few(count, few)
            }
            _ => Self::Many(ids.into()),
        }
    }

    fn ids(&self) -> &[u32] {
        match self {
            Self::Few(count, ids) => &ids[..usize::from(*count)],
            Self::Many(ids) => ids,
        }
    }
}

impl Words {
    /// None: this tokenizer does not go word by word.
    pub fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let ascii_only = match tokenizer.get_normalizer() {
            None => false,
            Some(NormalizerWrapper::NFC(_) | NormalizerWrapper::NFKC(_)) => true,
            Some(_) => return None,
        };
        match tokenizer.get_model() {
            ModelWrapper::BPE(model) if goes_by_bytes(model) => {}
            _ => return None,
        }
        let mut patterns = Vec::new();
        let bytes = stages(tokenizer.get_pre_tokenizer()?, &mut patterns)?;
        let tokens: Vec<AddedToken> = tokenizer.get_added_tokens_decoder().into_values().collect();
        if tokens.iter().any(|token| token.single_word || token.content.is_empty()) {
            return None;
        }
        let added = AhoCorasickBuilder::new()
            .match_kind(MatchKind::LeftmostLongest)
            .build(tokens.iter().map(|token| token.content.as_bytes()))
            .ok()?;
        let begins = |token: &AddedToken| {
            let plain = token.special && !token.lstrip && !token.rstrip && !token.normalized;
            tokenizer.token_to_id(&token.content).filter(|_| plain)
        };
        let begins = tokens.iter().map(begins).collect();
        Some(Self { patterns, bytes, ascii_only, added, begins, seen: Mutex::new(Recent::new(BOUND)) })
    }

    /// The ids of `text`, which may begin with a special token. None: it is left to the tokenizer as a whole.
    pub fn ids(&self, tokenizer: &Tokenizer, text: &str) -> Option<Vec<u32>> {
        if self.ascii_only && !text.is_ascii() {
            return None;
        }
        let mut out = Vec::with_capacity(text.len() / 2);
        let mut from = 0;
        for found in self.added.find_iter(text) {
            let id = self.begins[found.pattern().as_usize()].filter(|_| found.start() == 0)?;
            out.push(id);
            from = found.end();
        }
        let words = self.cut(text, from);
        let known: Vec<Option<Word>> = {
            let mut seen = self.seen.lock();
            words.iter().map(|word| seen.get(&text[word.clone()])).collect()
        };
        for (word, known) in words.into_iter().zip(known) {
            match known {
                Some(known) => out.extend_from_slice(known.ids()),
                None => out.extend_from_slice(self.fresh(tokenizer, &text[word])?.ids()),
            }
        }
        Some(out)
    }

    /// The words of what follows `from`.
    pub(super) fn cut(&self, text: &str, from: usize) -> Vec<Range<usize>> {
        let mut words: Vec<Range<usize>> =
            (from < text.len()).then_some(from..text.len()).into_iter().collect();
        for pattern in &self.patterns {
            let mut finer = Vec::with_capacity(text.len() / 3);
            for word in words {
                let mut end = word.start;
                pattern.each(&text[word.clone()], |a, b| {
                    let (a, b) = (word.start + a, word.start + b);
                    finer.extend([end..a, a..b].into_iter().filter(|part| !part.is_empty()));
                    end = b;
                });
                finer.extend((end < word.end).then_some(end..word.end));
            }
            words = finer;
        }
        words
    }

    /// Tokenises a word and keeps it.
    fn fresh(&self, tokenizer: &Tokenizer, word: &str) -> Option<Word> {
        let mut text = PreTokenizedString::from(word);
        self.bytes.pre_tokenize(&mut text).ok()?;
        text.tokenize(|part| tokenizer.get_model().tokenize(part.get())).ok()?;
        let encoding = text.into_encoding(None, 0, OffsetType::None).ok()?;
        let ids = Word::of(encoding.get_ids());
        if word.len() <= WORD_MAX {
            self.seen.lock().put(word.into(), ids.clone(), word.len() + ENTRY);
        }
        Some(ids)
    }
}

/// Whether a word's ids depend on nothing but its bytes.
fn goes_by_bytes(model: &BPE) -> bool {
    model.dropout.is_none()
}

/// The patterns of a pre-tokenizer that only cuts and then goes to bytes, and that last stage.
fn stages(stage: &PreTokenizerWrapper, patterns: &mut Vec<Pattern>) -> Option<ByteLevel> {
    let all = match stage {
        PreTokenizerWrapper::Sequence(all) => all.as_ref(),
        one => std::slice::from_ref(one),
    };
    let (last, cutting) = all.split_last()?;
    for stage in cutting {
        match stage {
            PreTokenizerWrapper::Split(split)
                if split.behavior == SplitDelimiterBehavior::Isolated && !split.invert =>
            {
                patterns.push(match &split.pattern {
                    SplitPattern::Regex(text) => Pattern::of(text)?,
                    SplitPattern::String(_) => Pattern::Library(split.clone().regex),
                });
            }
            _ => return None,
        }
    }
    match last {
        PreTokenizerWrapper::ByteLevel(bytes) if !bytes.add_prefix_space => {
            if bytes.use_regex {
                patterns.push(Pattern::of(BUILT_IN)?);
            }
            Some(ByteLevel::new(false, bytes.trim_offsets, false))
        }
        _ => None,
    }
}
