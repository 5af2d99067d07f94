//! What a mock engine is told: where to listen, and the shape of its cache and its speed.
//!
//! `SPARK_KV_MOCK` carries JSON: either knobs of [`Shape`] by their names, or the node's engine settings, from which
//! the shape is derived where a knob is not given. `--shape` carries knobs that win over both. Names that are
//! neither are left alone, because the settings have many that say nothing to a mock.

use std::path::PathBuf;

use clap::Parser;
use serde::Deserialize;

use crate::base::units::Bytes;

/// Words of `spark-kv mock-engine`.
#[derive(Clone, Debug, Parser)]
#[command(name = "mock-engine", no_binary_name = true)]
pub struct Options {
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 0)]
    pub port: u16,
    /// The node's socket; without it the engine has its own cache only
    #[arg(long)]
    pub socket: Option<PathBuf>,
    /// Name of this engine start, never used twice
    #[arg(long, default_value = "spark-mock-0")]
    pub engine_id: String,
    /// Name of the model
    #[arg(long, default_value = "mock")]
    pub served_name: String,
    /// Folder in which the engine may write
    #[arg(long)]
    pub root: Option<PathBuf>,
    /// Engine settings or knobs, as JSON
    #[arg(long, env = "SPARK_KV_MOCK", hide_env_values = true, default_value = "{}")]
    pub settings: String,
    /// Knobs that win over the settings, as JSON
    #[arg(long, default_value = "{}")]
    pub shape: String,
}

/// Which cache groups the engine has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Groups {
    /// One group of full attention.
    #[default]
    Attention,
    /// Attention and a recurrent state, whose rows are usable only where they end.
    AttentionAndState,
}

/// Where the engine ends, or stops answering, by itself. Counts begin at 1; absent: never.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Crash {
    /// Aborts while this load is open.
    pub in_load: Option<u64>,
    /// Aborts while this store is open.
    pub in_store: Option<u64>,
    /// Aborts after this token was sent.
    pub after_token: Option<u64>,
    /// Answers this request and later ones with silence.
    pub stuck_at_request: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Knobs {
    rows: Option<u32>,
    row_bytes: Option<u32>,
    device_blocks: Option<usize>,
    block_tokens: Option<u32>,
    groups: Option<Groups>,
    state_every: Option<usize>,
    prefill_us_per_token: Option<u64>,
    itl_us: Option<u64>,
    seed: Option<u64>,
    crash: Option<Crash>,
    max_num_seqs: Option<usize>,
    max_model_len: Option<usize>,
    hash_seed: Option<String>,
    offload_prompt_only: Option<bool>,
    prefill_tokens_per_s: Option<u64>,
    kv_cache: Option<Bytes>,
    row_area: Option<Bytes>,
}

/// The engine's cache and speed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Rows of the area shared with the node.
    pub rows: u32,
    /// 4 to 64 KiB.
    pub row_bytes: u32,
    /// Rows that the device holds.
    pub device_blocks: usize,
    /// Tokens of one block, which are those of one hash and of one row.
    pub block_tokens: usize,
    pub groups: Groups,
    /// A state is kept at every so many blocks, and at the last whole one.
    pub state_every: usize,
    pub prefill_us_per_token: u64,
    /// Microseconds from one token of a reply to the next.
    pub itl_us: u64,
    /// Stands for the weights: engines of one seed compute the same bytes and say the same.
    pub seed: u64,
    pub crash: Crash,
    pub max_num_seqs: usize,
    pub max_model_len: usize,
    pub hash_seed: String,
    pub offload_prompt_only: bool,
}

/// Why the words or the JSON are none.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{what} is not to be understood: {why}")]
    Json { what: &'static str, why: serde_json::Error },
    #[error("{what} is {value}: it must be {must}")]
    Value { what: &'static str, value: u64, must: &'static str },
}

fn knobs(what: &'static str, json: &str) -> Result<Knobs, Error> {
    serde_json::from_str(json).map_err(|why| Error::Json { what, why })
}

impl Options {
    pub fn shape(&self) -> Result<Shape, Error> {
        Shape::from_json(&self.settings, &self.shape)
    }
}

impl Shape {
    /// Knobs of `over` win over those of `base`, and both over what the settings in `base` imply.
    pub fn from_json(base: &str, over: &str) -> Result<Self, Error> {
        let (base, over) = (knobs("SPARK_KV_MOCK", base)?, knobs("--shape", over)?);
        let row_bytes = over.row_bytes.or(base.row_bytes).unwrap_or(16 << 10);
        if row_bytes == 0 || !row_bytes.is_multiple_of(4096) || row_bytes > 64 << 10 {
            let value = row_bytes.into();
            return Err(Error::Value { what: "row_bytes", value, must: "4096 to 65536, in steps of 4096" });
        }
        let fits = |bytes: Bytes| bytes.0 / u64::from(row_bytes);
        let rows = over.rows.or(base.rows).map(u64::from);
        let rows = rows.or(base.row_area.map(fits)).unwrap_or(256);
        if rows == 0 || rows > 1 << 24 {
            return Err(Error::Value { what: "rows", value: rows, must: "1 to 16777216" });
        }
        let device = over.device_blocks.or(base.device_blocks);
        let device = device.or(base.kv_cache.map(|b| usize::try_from(fits(b)).unwrap_or(usize::MAX)));
        let prefill = over.prefill_us_per_token.or(base.prefill_us_per_token);
        let prefill = prefill.or(base.prefill_tokens_per_s.map(|rate| 1_000_000 / rate.max(1)));
        let at_least_one = |n: Option<usize>, usual| n.unwrap_or(usual).max(1);
        let block_tokens = over.block_tokens.or(base.block_tokens).unwrap_or(16);
        Ok(Self {
            rows: u32::try_from(rows).expect("checked above"),
            row_bytes,
            device_blocks: at_least_one(device, 512),
            block_tokens: at_least_one(Some(block_tokens as usize), 16),
            groups: over.groups.or(base.groups).unwrap_or_default(),
            state_every: at_least_one(over.state_every.or(base.state_every), 4),
            prefill_us_per_token: prefill.unwrap_or(50),
            itl_us: over.itl_us.or(base.itl_us).unwrap_or(500),
            seed: over.seed.or(base.seed).unwrap_or(0),
            crash: over.crash.or(base.crash).unwrap_or_default(),
            max_num_seqs: at_least_one(over.max_num_seqs.or(base.max_num_seqs), 8),
            max_model_len: at_least_one(over.max_model_len.or(base.max_model_len), 131_072),
            hash_seed: over.hash_seed.or(base.hash_seed).unwrap_or_else(|| "0".into()),
            offload_prompt_only: over.offload_prompt_only.or(base.offload_prompt_only).unwrap_or(false),
        })
    }

    /// Tokens per second that computing a prompt reaches.
    pub fn pace(&self) -> u64 {
        1_000_000 / self.prefill_us_per_token.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engine_settings_give_a_shape_and_knobs_win() {
        let settings = crate::settings::Engine { row_area: Bytes::mib(8), ..Default::default() };
        let json = serde_json::to_string(&settings).unwrap();
        let shape = Shape::from_json(&json, "{}").unwrap();
        assert_eq!((shape.rows, shape.row_bytes, shape.max_num_seqs), (512, 16384, 8));
        assert_eq!((shape.prefill_us_per_token, shape.offload_prompt_only), (666, true));
        let knobs =
            r#"{"rows": 9, "row_bytes": 4096, "groups": "attention_and_state", "crash": {"in_load": 2}}"#;
        let shape = Shape::from_json(&json, knobs).unwrap();
        assert_eq!((shape.rows, shape.row_bytes, shape.groups), (9, 4096, Groups::AttentionAndState));
        assert_eq!(shape.crash.in_load, Some(2));
    }

    #[test]
    fn what_cannot_be_is_said() {
        for (base, over, said) in [
            ("{", "{}", "SPARK_KV_MOCK"),
            ("{}", "7", "--shape"),
            ("{\"row_bytes\": 5000}", "{}", "row_bytes"),
            ("{}", "{\"rows\": 0}", "rows"),
        ] {
            let error = Shape::from_json(base, over).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }

    #[test]
    fn the_words_of_the_keeper_are_understood() {
        let words = ["--host", "127.0.0.1", "--port", "8001", "--socket", "/s", "--engine-id", "e-1"];
        let options =
            Options::try_parse_from(words.iter().chain(&["--served-name", "m", "--root", "/r"])).unwrap();
        assert_eq!((options.port, options.engine_id.as_str()), (8001, "e-1"));
    }
}
