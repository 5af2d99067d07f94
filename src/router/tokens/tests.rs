//! Whole speakers: against what vLLM's own renderer made of the same bodies, and against a speaker without memory.

use std::path::PathBuf;
use std::sync::Arc;

use proptest::prelude::*;
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{
    OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, SplitDelimiterBehavior, Tokenizer,
};

use super::words::Words;
use super::*;
use crate::base::block::{BlockHash, DEFAULT_HASH_SEED};
use crate::base::geometry::{Group, GroupKind, Hello};

fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokens")
}

fn no_time() -> Now {
    Arc::new(|_| None)
}

/// A tokenizer of bytes with some merges and every kind of added token.
fn tokenizer() -> Tokenizer {
    let bytes = std::fs::read(fixtures().join("bytes/tokenizer.json")).unwrap();
    let mut tokenizer = Tokenizer::from_bytes(bytes).unwrap();
    let token = |text: &str| tokenizers::AddedToken::from(text, true);
    tokenizer
        .add_special_tokens([
            token("<|end|>"),
            token("<|end|>>"),
            token("<|left|>").lstrip(true),
            token("<|right|>").rstrip(true),
        ])
        .unwrap();
    tokenizer.add_tokens([tokenizers::AddedToken::from("ab<|end", false)]).unwrap();
    tokenizer.add_tokens([tokenizers::AddedToken::from("plain<", false).normalized(false)]).unwrap();
    tokenizer
}

fn whole(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode_fast(text, false).unwrap().get_ids().to_vec()
}

fn ids(pieces: &Pieces, text: &str) -> Ids {
    pieces.ids(text, pieces.look(text), false).unwrap()
}

/// What conversations are made of, and what could mislead a cutter.
fn fragment() -> impl Strategy<Value = String> {
    prop_oneof![
        Just("<|end|>".to_owned()),
        Just("<|im_start|>user\n".to_owned()),
        Just("<|im_end|>\n".to_owned()),
        Just("<|end|>>".to_owned()),
        Just("  <|left|>".to_owned()),
        Just("<|right|>  ".to_owned()),
        Just("ab<|end".to_owned()),
        Just("plain<".to_owned()),
        Just("<|e".to_owned()),
        "[a-z ]{0,12}",
        "\\PC{0,8}",
        "[\\s]{0,4}",
    ]
}

proptest! {
    /// Whatever was seen before, a text has the ids that the tokenizer gives it as a whole.
    #[test]
    fn pieces_have_the_ids_of_the_whole(
        turns in proptest::collection::vec(proptest::collection::vec(fragment(), 0..6), 1..12),
        edits in proptest::collection::vec((any::<proptest::sample::Index>(), any::<proptest::sample::Index>(), fragment()), 0..8),
        bound in prop_oneof![Just(0_usize), Just(2_000), Just(1_000_000)],
    ) {
        let reference = tokenizer();
        let pieces = Pieces::new(tokenizer(), bound).unwrap();
        let mut session: Vec<String> = Vec::new();
        let check = |session: &[String]| {
            let text = session.concat();
            let got = ids(&pieces, &text);
            prop_assert_eq!(&got.ids, &whole(&reference, &text), "{:?}", text);
            prop_assert!(pieces.bytes() <= bound);
            Ok(())
        };
        // It grows, branches off from its middle, and is changed in its middle.
        for turn in turns {
            session.push(turn.concat());
            check(&session)?;
        }
        for (at, from, instead) in edits {
            let at = at.index(session.len());
            let mut branch = session[..at].to_vec();
            branch.push(instead.clone());
            check(&branch)?;
            let from = from.index(session.len());
            session[from] = instead;
            check(&session)?;
        }
    }
}

/// The pattern of many models of today, before bytes.
const PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

fn behind_patterns() -> Tokenizer {
    let split = |pattern: &str| {
        let pattern = SplitPattern::Regex(pattern.into());
        Split::new(pattern, SplitDelimiterBehavior::Isolated, false).unwrap().into()
    };
    let bytes = ByteLevel::new(false, true, false).into();
    let mut tokenizer = tokenizer();
    tokenizer.with_pre_tokenizer(Some(Sequence::new(vec![split(r"\p{N}{1,2}"), split(PATTERN), bytes])));
    tokenizer
}

proptest! {
    /// Word by word, again and again, a text has the ids that the library gives it.
    #[test]
    fn words_have_the_ids_of_the_library(
        texts in proptest::collection::vec(proptest::collection::vec(prop_oneof![fragment(), "[ a-z0-9'\\.\n]{0,20}"], 0..12), 1..8),
        patterns: bool,
        composed: bool,
    ) {
        let mut reference = if patterns { behind_patterns() } else { tokenizer() };
        if composed {
            reference.with_normalizer(Some(NFC)).unwrap();
        }
        let words = Words::of(&reference).unwrap();
        for text in texts {
            let text = text.concat();
            for beginning in ["", "<|end|>"] {
                let text = format!("{beginning}{text}");
                if let Some(ids) = words.ids(&reference, &text) {
                    prop_assert_eq!(ids, whole(&reference, &text), "{:?}", text);
                }
            }
        }
    }
}

proptest! {
    /// Words end where the library's do, whatever stands between them.
    #[test]
    fn words_are_those_of_the_library(text in "([ \t\r\n\u{a0}\u{3000}]{0,4}([a-zA-Z]{1,5}|[0-9]{1,5}|'[a-z]{1,2}|[-.,/=]{1,3}|\\PC{0,3})){0,12}[ \r\n]{0,3}", patterns: bool) {
        let reference = if patterns { behind_patterns() } else { tokenizer() };
        let mut pieces = PreTokenizedString::from(text.as_str());
        reference.get_pre_tokenizer().unwrap().pre_tokenize(&mut pieces).unwrap();
        let theirs = pieces.get_splits(OffsetReferential::Original, OffsetType::Byte);
        let theirs: Vec<_> = theirs.into_iter().map(|(_, (start, end), _)| start..end).collect();
        prop_assert_eq!(Words::of(&reference).unwrap().cut(&text, 0), theirs, "{:?}", text);
    }
}

#[test]
fn nearly_every_text_goes_word_by_word_and_what_does_not_is_left_alone() {
    for reference in [tokenizer(), behind_patterns()] {
        let words = Words::of(&reference).unwrap();
        let text = "<|im_start|>user\nfn main() {\n    let x = \"héllo 世界\"; // it's 12345\n}\n";
        assert_eq!(words.ids(&reference, text), Some(whole(&reference, text)));
        assert_eq!(words.ids(&reference, text), Some(whole(&reference, text)), "again");
        for odd in ["ab<|end|>", "<|left|>", "plain<", "<|end|><|end|>"] {
            assert_eq!(words.ids(&reference, odd), None, "{odd}");
        }
    }
    let mut odd = tokenizer();
    odd.with_pre_tokenizer(Some(ByteLevel::new(true, true, true)));
    assert!(Words::of(&odd).is_none(), "a space before the text depends on where it begins");
}

#[test]
fn a_growing_session_pays_for_its_tail() {
    let pieces = Pieces::new(tokenizer(), 1 << 20).unwrap();
    let turn = |n: usize| format!("<|im_start|>user\nturn {n} {}<|im_end|>\n", "word ".repeat(200));
    let mut text = String::new();
    for n in 0..20 {
        text += &turn(n);
        let asked = format!("{text}<|im_start|>assistant\n");
        let fresh = ids(&pieces, &asked).fresh_bytes;
        let tail = turn(n).len() + "<|im_start|>assistant\n".len();
        assert!(fresh <= tail, "turn {n}: {fresh} of {} bytes", asked.len());
        assert_eq!(ids(&pieces, &asked).fresh_bytes, 0, "the same again costs nothing");
    }
}

proptest! {
    /// Whatever was seen before, each node reaches as far as it does by hashes made anew; and what a session had when
    /// it grew is not hashed again.
    #[test]
    fn hashes_that_are_remembered_are_those_made_anew(
        turns in proptest::collection::vec((any::<bool>(), "[a-z]{0,60}", 0_usize..4, any::<u64>()), 1..12),
        bound in prop_oneof![Just(4_000_usize), Just(1_000_000)],
    ) {
        let options = Options { model: fixtures().join("chatml"), ..Options::default() };
        let speaker = Speaker::load(options, bound, no_time()).unwrap();
        let chain = Chain::of(&hello(4)).unwrap();
        let mut messages: Vec<serde_json::Value> = Vec::new();
        let mut before: Vec<Step> = Vec::new();
        for (user, text, back, seed) in turns {
            messages.truncate(messages.len().saturating_sub(back));
            messages.push(serde_json::json!({"role": if user { "user" } else { "assistant" }, "content": text}));
            let salt = if seed % 5 == 0 { "other" } else { "same" };
            let body = serde_json::json!({"messages": messages, "cache_salt": salt}).to_string();
            let prompt = speaker.prompt(Endpoint::Chat, body.as_bytes()).unwrap();
            let anew: Vec<BlockHash> = chain.hashes(&prompt.ids, &prompt.extra).collect();
            let known = speaker.trail.lock().known(&chain, &prompt).hashes;
            prop_assert_eq!(&known, &anew[..known.len()]);
            if bound > 4_000 && back == 0 && !before.is_empty() && salt == "same" {
                // All pieces but the one that asked for an answer and the last are there as they were.
                let shared = prompt.steps.iter().zip(&before).take_while(|(a, b)| a == b).last();
                prop_assert!(known.len() >= shared.map_or(0, |(step, _)| step.end / 4), "{} known", known.len());
            }
            // Everything is held but now and then a hash.
            let holders = |key: &RowKey| if u64::from(key.hash.0[0]) == seed % 256 { 0 } else { 1 | 2 << 32 };
            let plain = chain.reaches(prompt.ids.len(), anew.iter().copied(), 2, holders);
            prop_assert_eq!(speaker.reaches(&prompt, &chain, 2, holders), plain);
            // All of it is held: every hash was made.
            speaker.reaches(&prompt, &chain, 2, |_| 1);
            prop_assert!(speaker.bytes() <= bound);
            before = if salt == "same" { prompt.steps } else { Vec::new() };
        }
    }
}

fn hello(unit: u32) -> Hello {
    let group = Group { kind: GroupKind::FullAttention, tokens_per_row: unit, covered: vec![(0, 4096)] };
    Hello { hash_unit: unit, hash_seed: DEFAULT_HASH_SEED.into(), ..Hello::of_rows(8, 4096, vec![group]) }
}

#[test]
fn a_tokenizer_with_whole_word_tokens_is_not_cut() {
    let mut odd = tokenizer();
    odd.add_special_tokens([tokenizers::AddedToken::from("word", true).single_word(true)]).unwrap();
    let pieces = Pieces::new(odd.clone(), 1 << 20).unwrap();
    for text in ["word<|end|>word", "aword<|end|>", "word <|end|>b"] {
        assert_eq!(ids(&pieces, text).ids, whole(&odd, text), "{text}");
    }
}

/// Each fixture is a model's folder and what vLLM 0.32's own renderer made of the probes with it.
#[test]
fn ids_are_those_of_the_engine() {
    let mut models = 0;
    for folder in std::fs::read_dir(fixtures()).unwrap() {
        let folder = folder.unwrap().path();
        let Ok(expected) = std::fs::read(folder.join("expected.json")) else { continue };
        models += 1;
        let expected: Vec<Option<Vec<u32>>> = serde_json::from_slice(&expected).unwrap();
        let probes = probes::all("m");
        assert_eq!(expected.len(), probes.len(), "{}", folder.display());
        let speaker = speaker(&folder);
        // Twice: what was seen must not change what comes out.
        for round in 0..2 {
            for ((endpoint, body), expected) in probes.iter().zip(&expected) {
                match (speaker.prompt(*endpoint, body), expected) {
                    (Ok(got), Some(expected)) => assert_eq!(
                        &got.ids,
                        expected,
                        "{} {round} {}",
                        folder.display(),
                        String::from_utf8_lossy(body)
                    ),
                    (Err(why), Some(_)) => {
                        panic!("{}: {why}: {}", folder.display(), String::from_utf8_lossy(body))
                    }
                    // The engine refuses it, too: nobody will ask what it costs.
                    (_, None) => {}
                }
            }
        }
    }
    assert!(models >= 3, "{models} fixtures");
}

fn speaker(folder: &std::path::Path) -> Speaker {
    let options = Options { model: folder.to_owned(), ..Options::default() };
    Speaker::load(options, 1 << 20, no_time()).unwrap()
}

#[test]
fn what_is_not_followed_is_said_with_its_reason() {
    let speaker = speaker(&fixtures().join("chatml"));
    for (endpoint, body, part) in [
        (
            Endpoint::Chat,
            r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}"#,
            "image_url",
        ),
        (
            Endpoint::Messages,
            r#"{"messages":[{"role":"user","content":[{"type":"image","source":{}}]}]}"#,
            "image",
        ),
        (
            Endpoint::Chat,
            r#"{"messages":[{"role":"user","content":"x"}],"chat_template":"{{ x }}"}"#,
            "chat_template",
        ),
        (
            Endpoint::Chat,
            r#"{"messages":[{"role":"user","content":"x"}],"truncate_prompt_tokens":5}"#,
            "truncate",
        ),
        (
            Endpoint::Chat,
            r#"{"messages":[{"role":"user","content":"x"}],"kv_transfer_params":{"prompt_token_ids":[1]}}"#,
            "ids of its own",
        ),
        (Endpoint::Chat, r#"{"messages":[{"role":"narrator","content":"x"}]}"#, "narrator"),
        (Endpoint::Completions, r#"{"prompt":["a","b"]}"#, "several"),
        (Endpoint::Completions, r#"{"prompt":"a","suffix":"b"}"#, "suffix"),
        (Endpoint::Responses, r#"{"input":"a"}"#, "not followed"),
        (Endpoint::Chat, "[]", "no object"),
        (Endpoint::Chat, "{", "JSON"),
    ] {
        let why = speaker.prompt(endpoint, body.as_bytes()).unwrap_err().to_string();
        assert!(why.contains(part), "{body}: {why}");
    }
}

#[test]
fn ids_that_come_as_ids_stay_and_the_salt_is_kept() {
    let speaker = speaker(&fixtures().join("chatml"));
    let prompt = speaker.prompt(Endpoint::Completions, br#"{"prompt":[5,6,7],"cache_salt":"s"}"#).unwrap();
    assert_eq!((prompt.ids, prompt.extra.salt.as_deref()), (vec![5, 6, 7], Some("s")));
    let nested = speaker.prompt(Endpoint::Completions, br#"{"prompt":[[5,6,7]]}"#).unwrap();
    assert_eq!(nested.ids, [5, 6, 7]);
}

proptest! {
    #[test]
    fn no_body_makes_it_panic(body: Vec<u8>, text in "\\PC{0,60}") {
        let speaker = speaker(&fixtures().join("chatml"));
        let _ = speaker.prompt(Endpoint::Chat, &body);
        let body = serde_json::json!({"messages": [{"role": "user", "content": text}], "tools": [text]});
        let _ = speaker.prompt(Endpoint::Messages, body.to_string().as_bytes());
    }
}
