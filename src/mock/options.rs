//! What a mock engine is told: where to listen, and the shape of its cache and its speed.
//!
//! `SPARK_KV_MOCK` carries JSON: either knobs of [`Shape`] by their names, or the node's engine settings, from which
//! the shape is derived where a knob is not given. `--shape` carries knobs that win over both. Names that are
//! neither are left alone, because the settings have many that say nothing to a mock.

use std::path::PathBuf;

use clap::Parser;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::faults::Order;
use super::hits::{Grid, Kind as Layers};
use super::pace::Pace;
use super::profile::Profile;
use super::schedule::Limits;
use super::wire::{EventShape, HashForm};
use crate::base::units::Bytes;

/// Words of `spark-kv mock-engine`.
#[derive(Clone, Debug, Parser)]
#[command(name = "spark-kv mock-engine", no_binary_name = true, about = ABOUT, after_long_help = LONG, max_term_width = 100)]
pub struct Options {
    /// Address to listen on; events of the cache are published on it, too
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
    /// What the box is like: knobs that settings and --shape win over
    #[arg(long, value_enum)]
    pub profile: Option<Profile>,
    /// Times faster than the box would be; all of the engine's durations are divided by it
    #[arg(long)]
    pub clock: Option<f64>,
    /// Where the cache's events are published, as vLLM takes it: JSON with endpoint, replay_endpoint, topic, buffer_steps
    #[arg(long, value_name = "JSON")]
    pub kv_events_config: Option<String>,
    /// Hashes in events: 1 as numbers, 0 as bytes
    #[arg(long, env = "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", hide_env_values = true, default_value = "1")]
    pub int_block_hashes: String,
    /// Engine settings or knobs, as JSON
    #[arg(long, env = "SPARK_KV_MOCK", hide_env_values = true, default_value = "{}")]
    pub settings: String,
    /// Knobs that win over the settings, as JSON
    #[arg(long, default_value = "{}")]
    pub shape: String,
}

const ABOUT: &str =
    "An engine without a model: vLLM's scheduler, cache, events and HTTP, for load, demos and faults";

const LONG: &str = "\
Knobs of --shape (JSON; every one can be left away):
  block_tokens 16, hash_unit = block_tokens, device_blocks 512, groups attention|attention_and_state,
  device_groups [\"full\", {\"sliding\": TOKENS}, \"state\"], state_every 4 (blocks)
  prefill_us_per_token 50, attention_us_per_token2 0, itl_us 500, kappa 0, clock 1
  max_num_batched_tokens 2048, max_num_seqs 8, max_num_partial_prefills 0, long_prefill_token_threshold 0,
  max_model_len 131072, hash_seed \"0\", seed 0, rows 256, row_bytes 16384, offload_prompt_only false
  crash {in_load, in_store, after_token, stuck_at_request}, faults (as below)
  events {shape maps|arrays, hashes bytes|ints, block_size N (a wrong one), drop_every N}

Failures while it runs, JSON to POST /mock/faults (GET shows them, DELETE ends them):
  {\"crash\": true}  {\"hang\": true}  {\"speed\": 0.55}  {\"crash_after_words\": 40}
  {\"answers\": {\"status\": 429, \"times\": 3, \"retry_after_s\": 2}}  {\"cut\": {\"after_words\": 5, \"times\": 1}}

The truth, for tests: GET /mock/state, GET /mock/keys, POST /mock/peek with a chat body.

Examples:
  spark-kv mock-engine --port 9101 --profile plain --clock 20 \\
    --kv-events-config '{\"enable_kv_cache_events\": true, \"publisher\": \"zmq\", \"endpoint\": \"tcp://*:5701\"}'
  curl -s localhost:9101/mock/faults -d '{\"speed\": 0.55}'";

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

/// What is wrong with the events, for tests of whoever reads them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EventKnobs {
    pub shape: EventShape,
    pub hashes: Option<HashForm>,
    pub block_size: Option<u64>,
    /// Every so many batches one is not sent. It can be had by a replay.
    pub drop_every: Option<u64>,
}

/// Where events go: the fields of vLLM's own setting that matter here.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, serde::Serialize)]
#[serde(default)]
pub struct EventConfig {
    pub enable_kv_cache_events: bool,
    pub publisher: Option<String>,
    pub endpoint: String,
    pub replay_endpoint: Option<String>,
    /// Batches that a replay can go back.
    pub buffer_steps: usize,
    pub topic: String,
}

impl Default for EventConfig {
    fn default() -> Self {
        Self {
            enable_kv_cache_events: false,
            publisher: None,
            endpoint: "tcp://*:5557".into(),
            replay_endpoint: None,
            buffer_steps: 10_000,
            topic: String::new(),
        }
    }
}

impl EventConfig {
    /// Whether anything is published.
    pub fn is_on(&self) -> bool {
        self.enable_kv_cache_events && self.publisher.as_deref().unwrap_or("zmq") == "zmq"
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Knobs {
    rows: Option<u64>,
    row_bytes: Option<u32>,
    device_blocks: Option<usize>,
    block_tokens: Option<usize>,
    hash_unit: Option<usize>,
    groups: Option<Groups>,
    device_groups: Option<Vec<Layers>>,
    state_every: Option<usize>,
    prefill_us_per_token: Option<f64>,
    attention_us_per_token2: Option<f64>,
    itl_us: Option<f64>,
    kappa: Option<f64>,
    clock: Option<f64>,
    seed: Option<u64>,
    crash: Option<Crash>,
    faults: Option<Order>,
    events: Option<EventKnobs>,
    max_num_seqs: Option<usize>,
    max_num_batched_tokens: Option<usize>,
    max_num_partial_prefills: Option<usize>,
    long_prefill_token_threshold: Option<usize>,
    max_model_len: Option<usize>,
    hash_seed: Option<String>,
    offload_prompt_only: Option<bool>,
    prefill_tokens_per_s: Option<u64>,
    kv_cache: Option<Bytes>,
    row_area: Option<Bytes>,
}

/// The engine's cache and speed.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Rows of the area shared with the node.
    pub rows: u32,
    /// 4 to 64 KiB.
    pub row_bytes: u32,
    /// Blocks that the device holds, of all groups together.
    pub device_blocks: usize,
    /// Tokens of one block, which are those of one row.
    pub block_tokens: usize,
    pub groups: Groups,
    /// Groups and grid of the device's cache.
    pub grid: Grid,
    /// A state is kept at every so many blocks, and at the last whole one.
    pub state_every: usize,
    pub pace: Pace,
    pub limits: Limits,
    /// Times faster than the pace.
    pub clock: f64,
    /// Stands for the weights: engines of one seed compute the same bytes and say the same.
    pub seed: u64,
    pub crash: Crash,
    pub faults: Order,
    pub events: EventKnobs,
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
    Value { what: &'static str, value: String, must: &'static str },
    #[error("faults: {0}")]
    Faults(#[from] super::faults::Error),
}

fn wrong(what: &'static str, value: impl ToString, must: &'static str) -> Error {
    Error::Value { what, value: value.to_string(), must }
}

/// Fields of `json` that say something, over those of `under`.
fn laid_over(under: &mut Map<String, Value>, what: &'static str, json: &str) -> Result<(), Error> {
    let fail = |why| Error::Json { what, why };
    // Whatever is wrong is said of the words that it stands in.
    serde_json::from_str::<Knobs>(json).map_err(fail)?;
    let fields: Map<String, Value> = serde_json::from_str(json).map_err(fail)?;
    under.extend(fields.into_iter().filter(|(_, value)| !value.is_null()));
    Ok(())
}

impl Options {
    pub fn shape(&self) -> Result<Shape, Error> {
        let mut shape = Shape::layered(self.profile, &self.settings, &self.shape)?;
        if let Some(clock) = self.clock {
            shape.clock = checked("--clock", clock)?;
        }
        shape.events.hashes = shape.events.hashes.or(match self.int_block_hashes.as_str() {
            "0" => Some(HashForm::Bytes),
            "1" => Some(HashForm::Ints),
            other => return Err(wrong("--int-block-hashes", other, "0 or 1")),
        });
        if self.socket.is_some() && shape.grid.groups != shape.groups.kinds() {
            let must = "left away beside --socket: a node's rows are those of `groups`";
            return Err(wrong("device_groups", "given", must));
        }
        Ok(shape)
    }

    /// Where events are to be published; none when they are not.
    pub fn events(&self) -> Result<Option<EventConfig>, Error> {
        let Some(json) = &self.kv_events_config else { return Ok(None) };
        let config: EventConfig =
            serde_json::from_str(json).map_err(|why| Error::Json { what: "--kv-events-config", why })?;
        Ok(Some(config).filter(EventConfig::is_on))
    }
}

impl Groups {
    fn kinds(self) -> Vec<Layers> {
        match self {
            Self::Attention => vec![Layers::Full],
            Self::AttentionAndState => vec![Layers::Full, Layers::State],
        }
    }
}

/// A number above 0 that a duration can be divided by.
fn checked(what: &'static str, value: f64) -> Result<f64, Error> {
    match value > 0.0 && value <= 1e6 {
        true => Ok(value),
        false => Err(wrong(what, value, "above 0 and at most 1000000")),
    }
}

/// A number that is not below 0.
fn positive(what: &'static str, value: f64) -> Result<f64, Error> {
    match value >= 0.0 && value.is_finite() {
        true => Ok(value),
        false => Err(wrong(what, value, "0 or more")),
    }
}

impl Knobs {
    fn pace(&self) -> Result<Pace, Error> {
        let token_s = match self.prefill_us_per_token {
            Some(us) => positive("prefill_us_per_token", us)? / 1e6,
            None => self.prefill_tokens_per_s.map_or(50e-6, |rate| 1.0 / rate.max(1) as f64),
        };
        let of = |what, value: Option<f64>, usual: f64| positive(what, value.unwrap_or(usual));
        Ok(Pace {
            token_s,
            attention_s: of("attention_us_per_token2", self.attention_us_per_token2, 0.0)? / 1e6,
            word_s: of("itl_us", self.itl_us, 500.0)? / 1e6,
            kappa: of("kappa", self.kappa, 0.0)?,
        })
    }

    fn limits(&self) -> Limits {
        Limits {
            requests: self.max_num_seqs.unwrap_or(8).max(1),
            tokens: self.max_num_batched_tokens.unwrap_or(2048).max(1),
            prefills: self.max_num_partial_prefills.unwrap_or(0),
            chunk: self.long_prefill_token_threshold.unwrap_or(0),
        }
    }

    fn grid(&self) -> Result<Grid, Error> {
        let block = self.block_tokens.unwrap_or(16).max(1);
        let unit = self.hash_unit.unwrap_or(block);
        if unit == 0 || !block.is_multiple_of(unit) {
            return Err(wrong("hash_unit", unit, "a part of block_tokens without a rest"));
        }
        let groups = self.device_groups.clone().unwrap_or_else(|| self.groups.unwrap_or_default().kinds());
        if groups.is_empty() || groups.len() > 64 {
            return Err(wrong("device_groups", groups.len(), "1 to 64 groups"));
        }
        Ok(Grid { groups, block, unit })
    }
}

impl Shape {
    /// Knobs of `over` win over those of `base`, and both over what the settings in `base` imply.
    pub fn from_json(base: &str, over: &str) -> Result<Self, Error> {
        Self::layered(None, base, over)
    }

    fn layered(profile: Option<Profile>, base: &str, over: &str) -> Result<Self, Error> {
        let mut all = Map::new();
        if let Some(profile) = profile {
            laid_over(&mut all, "--profile", &profile.json())?;
        }
        laid_over(&mut all, "SPARK_KV_MOCK", base)?;
        laid_over(&mut all, "--shape", over)?;
        let knobs: Knobs = serde_json::from_value(Value::Object(all))
            .map_err(|why| Error::Json { what: "SPARK_KV_MOCK and --shape together", why })?;
        let row_bytes = knobs.row_bytes.unwrap_or(16 << 10);
        if row_bytes == 0 || !row_bytes.is_multiple_of(4096) || row_bytes > 64 << 10 {
            return Err(wrong("row_bytes", row_bytes, "4096 to 65536, in steps of 4096"));
        }
        let fits = |bytes: Bytes| bytes.0 / u64::from(row_bytes);
        let rows = knobs.rows.or(knobs.row_area.map(fits)).unwrap_or(256);
        if rows == 0 || rows > 1 << 24 {
            return Err(wrong("rows", rows, "1 to 16777216"));
        }
        let derived = knobs.kv_cache.map(|bytes| usize::try_from(fits(bytes)).unwrap_or(usize::MAX));
        let device = knobs.device_blocks.or(derived).unwrap_or(512).clamp(1, 1 << 24);
        let faults = knobs.faults.clone().unwrap_or_default();
        faults.check()?;
        let grid = knobs.grid()?;
        Ok(Self {
            rows: u32::try_from(rows).expect("checked above"),
            row_bytes,
            device_blocks: device,
            block_tokens: grid.block,
            groups: knobs.groups.unwrap_or_default(),
            grid,
            state_every: knobs.state_every.unwrap_or(4).max(1),
            pace: knobs.pace()?,
            limits: knobs.limits(),
            clock: checked("clock", knobs.clock.unwrap_or(1.0))?,
            seed: knobs.seed.unwrap_or(0),
            crash: knobs.crash.unwrap_or_default(),
            faults,
            events: knobs.events.unwrap_or_default(),
            max_model_len: knobs.max_model_len.unwrap_or(131_072).max(1),
            hash_seed: knobs.hash_seed.unwrap_or_else(|| "0".into()),
            offload_prompt_only: knobs.offload_prompt_only.unwrap_or(false),
        })
    }

    /// Tokens per second on the wall that computing a prompt reaches.
    pub fn tokens_per_s(&self) -> u64 {
        (self.clock / self.pace.token_s.max(1e-6)) as u64
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    #[test]
    fn engine_settings_give_a_shape_and_knobs_win() {
        let settings = crate::settings::Engine { row_area: Bytes::mib(8), ..Default::default() };
        let json = serde_json::to_string(&settings).unwrap();
        let shape = Shape::from_json(&json, "{}").unwrap();
        assert_eq!((shape.rows, shape.row_bytes, shape.limits.requests), (512, 16384, 8));
        assert_eq!((shape.tokens_per_s(), shape.offload_prompt_only), (1500, true));
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
            ("{}", "{\"clock\": 0}", "clock"),
            ("{}", "{\"kappa\": -1}", "kappa"),
            ("{}", "{\"hash_unit\": 5}", "hash_unit"),
            ("{}", "{\"device_groups\": []}", "device_groups"),
            ("{}", "{\"device_groups\": [\"none\"]}", "--shape"),
            ("{}", "{\"faults\": {\"speed\": 0}}", "speed"),
            ("{}", "{\"events\": {\"shape\": \"xml\"}}", "--shape"),
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

    #[test]
    fn a_profile_is_the_ground_and_every_one_of_its_figures_is_a_knob_with_a_source() {
        let knobs = Options::try_parse_from(["--profile", "gb10-super", "--shape", r#"{"kappa": 0.5}"#]);
        let shape = knobs.unwrap().shape().unwrap();
        assert_eq!((shape.block_tokens, shape.grid.groups.len(), shape.limits.tokens), (4224, 6, 16384));
        assert_eq!((shape.pace.kappa, shape.pace.word_s), (0.5, 0.083));
        for profile in Profile::value_variants() {
            let plain = Shape::from_json("{}", "{}").unwrap();
            for figure in profile.figures() {
                let alone =
                    Shape::from_json("{}", &format!("{{\"{}\": {}}}", figure.knob, figure.value)).unwrap();
                let usual = ["max_num_seqs", "max_num_batched_tokens"].contains(&figure.knob);
                assert!(usual || alone != plain, "{} is no knob", figure.knob);
                assert!(figure.source.len() > 5);
            }
        }
    }

    #[test]
    fn events_are_configured_as_the_engine_s_own_and_are_off_without() {
        let of = |json: &str| Options::try_parse_from(["--kv-events-config", json]).unwrap().events();
        let on = of(r#"{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv", "hwm": 5}"#)
            .unwrap()
            .unwrap();
        assert_eq!(
            (on.topic.as_str(), on.buffer_steps, on.endpoint.as_str()),
            ("kv", 10_000, "tcp://*:5557")
        );
        assert_eq!(of(r#"{"enable_kv_cache_events": false}"#).unwrap(), None);
        assert_eq!(of(r#"{"enable_kv_cache_events": true, "publisher": "null"}"#).unwrap(), None);
        assert!(of("[").is_err());
    }

    #[test]
    fn help_names_every_flag_and_shows_an_example() {
        use clap::CommandFactory;
        let help = Options::command().render_long_help().to_string();
        for word in
            ["--profile", "--clock", "--kv-events-config", "--shape", "gb10-nano", "/mock/faults", "Examples"]
        {
            assert!(help.contains(word), "{word} in {help}");
        }
    }
}
