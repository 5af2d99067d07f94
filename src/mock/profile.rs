//! What a box is like, by name: knobs of a shape, each with where its number comes from. Pure.
//!
//! A figure that somebody measured has its source. What nobody measured on this machine is called an assumption: it is
//! there so that comparisons of routers have a box of the right order, not to say how fast a model is.

/// A box with a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Profile {
    /// One DGX Spark with Nemotron-3-Nano-30B-A3B: recurrent states beside attention, blocks of 2,128 tokens.
    Gb10Nano,
    /// One DGX Spark with Nemotron-3-Super-120B-A12B: recurrent states beside attention, blocks of 4,224 tokens.
    Gb10Super,
    /// The box that routers are compared on: attention only, blocks of 64 tokens, a device for 200,000 tokens.
    Plain,
}

/// One knob of a profile.
#[derive(Clone, Copy, Debug)]
pub struct Figure {
    pub knob: &'static str,
    /// As JSON.
    pub value: &'static str,
    pub source: &'static str,
}

const fn figure(knob: &'static str, value: &'static str, source: &'static str) -> Figure {
    Figure { knob, value, source }
}

const ASSUMED: &str = "assumption: not measured on this box";

const NANO: [Figure; 9] = [
    figure(
        "block_tokens",
        "2128",
        "bytes of fp8 attention and 16-bit states, and what vLLM logs at its start",
    ),
    figure(
        "device_groups",
        r#"["full", "state", "state", "state", "state"]"#,
        "one attention block for 2,128 tokens and four blocks for each kept state",
    ),
    figure("device_blocks", "1155", "assumption: as many as a cache of 20 GB has with the larger model"),
    figure("prefill_us_per_token", "250", ASSUMED),
    figure("attention_us_per_token2", "0.0005", ASSUMED),
    figure("itl_us", "25000", ASSUMED),
    figure("kappa", "0.08", ASSUMED),
    figure("max_num_batched_tokens", "8192", "vLLM 0.33, the tier for compute capability 12.1"),
    figure("max_num_seqs", "8", "vLLM's recipe for one Spark"),
];

const SUPER: [Figure; 9] = [
    figure(
        "block_tokens",
        "4224",
        "bytes of fp8 attention and 16-bit states, and what vLLM logs at its start",
    ),
    figure(
        "device_groups",
        r#"["full", "state", "state", "state", "state", "state"]"#,
        "one attention block for 4,224 tokens and five blocks for each kept state",
    ),
    figure("device_blocks", "1155", "vLLM's log with a cache of 20 GB, as reported from a pair of Sparks"),
    figure("prefill_us_per_token", "667", ASSUMED),
    figure("attention_us_per_token2", "0.001", ASSUMED),
    figure("itl_us", "83000", ASSUMED),
    figure("kappa", "0.08", ASSUMED),
    figure("max_num_batched_tokens", "16384", "vLLM's recipe for this model on one Spark"),
    figure("max_num_seqs", "8", "vLLM's recipe for this model on one Spark"),
];

const PLAIN: [Figure; 8] = [
    figure("block_tokens", "64", "a choice"),
    figure("device_blocks", "3125", "200,000 tokens: a choice that makes ten sessions fill it"),
    figure("prefill_us_per_token", "588", "assumption: 1,700 tokens a second"),
    figure("itl_us", "62500", "assumption: 16 words a second"),
    figure("kappa", "0.08", ASSUMED),
    figure("max_num_batched_tokens", "2048", "vLLM's small tier"),
    figure("max_num_seqs", "16", "a choice"),
    figure("max_model_len", "262144", "a choice"),
];

impl Profile {
    pub fn figures(self) -> &'static [Figure] {
        match self {
            Self::Gb10Nano => &NANO,
            Self::Gb10Super => &SUPER,
            Self::Plain => &PLAIN,
        }
    }

    /// The knobs as a JSON object.
    pub fn json(self) -> String {
        let knobs: Vec<String> =
            self.figures().iter().map(|f| format!("\"{}\": {}", f.knob, f.value)).collect();
        format!("{{{}}}", knobs.join(", "))
    }

    /// For people: every knob, its value and its source.
    pub fn table(self) -> String {
        let line = |f: &Figure| format!("  {} = {}  ({})", f.knob, f.value, f.source);
        self.figures().iter().map(line).collect::<Vec<_>>().join("\n")
    }
}
