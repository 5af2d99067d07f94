//! A model's folder without a model: a tokenizer trained on the text that the measurement sends, and a chat template.
//!
//! It has the shape of what today's models bring: bytes with merges, text split by a pattern with classes of letters
//! and a look ahead, and a template that goes through all messages and looks at roles, reasoning and tools.

use std::path::Path;

use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior, Tokenizer};

use super::session::Words;

const VOCABULARY: usize = 8192;

const SPECIAL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// Contractions, words with the sign before them, digits one by one, signs, line ends, spaces.
const PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|\s?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const TEMPLATE: &str = "\
{%- if tools %}{{ '<|im_start|>system\n# Tools\n' }}{%- for tool in tools %}{{ tool | tojson }}{{ '\n' }}{%- endfor %}{{ '<|im_end|>\n' }}{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last_user = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- set content = message.content if message.content is string else '' %}
{%- if message.role == 'assistant' %}
{%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
{{- '<|im_start|>assistant\n' }}
{%- if reasoning and loop.index0 > ns.last_user %}{{ '<think>\n' + reasoning + '\n</think>\n\n' }}{%- endif %}
{{- content.lstrip('\n') + '<|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}
";

/// Writes the folder's files.
pub fn make(folder: &Path) -> Result<(), String> {
    let told = |error: Box<dyn std::error::Error + Send + Sync>| error.to_string();
    let split = Split::new(SplitPattern::Regex(PATTERN.into()), SplitDelimiterBehavior::Isolated, false);
    let bytes = ByteLevel::new(false, true, false);
    let mut tokenizer = Tokenizer::new(BPE::default());
    tokenizer.with_pre_tokenizer(Some(Sequence::new(vec![split.map_err(told)?.into(), bytes.into()])));
    tokenizer.with_decoder(Some(bytes));
    let special = SPECIAL.map(|text| AddedToken::from(text, true)).to_vec();
    let trainer = BpeTrainer::builder()
        .show_progress(false)
        .vocab_size(VOCABULARY)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .special_tokens(special);
    let text: Vec<String> = (0..200).map(|seed| Words::new(seed).text(4096)).collect();
    tokenizer.train(&mut TrainerWrapper::from(trainer.build()), text.into_iter()).map_err(told)?;
    tokenizer.save(folder.join("tokenizer.json"), false).map_err(told)?;
    let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).map_err(|e| e.to_string());
    write("tokenizer_config.json", r#"{"eos_token":"<|im_end|>"}"#)?;
    write("chat_template.jinja", TEMPLATE)
}
