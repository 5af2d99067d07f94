//! What the engine counts, and how it says so: vLLM's names with vLLM's labels, and the mock's own without labels.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus::core::Collector;
use prometheus::{Encoder, Histogram, HistogramOpts, TextEncoder};

use super::schedule::Tally;

/// What the engine counts.
#[derive(Debug, Default)]
pub struct Counts {
    /// Requests that wait for a place, or for what is brought for them.
    pub waiting: AtomicU64,
    /// Rows whose bytes were not what the engine would have computed.
    pub wrong_rows: AtomicU64,
    /// Rows that were checked.
    pub checked_rows: AtomicU64,
    /// Rows that found no place in the area and were not offered.
    pub unplaced_rows: AtomicU64,
    pub requests: AtomicU64,
    pub words: AtomicU64,
    pub loads: AtomicU64,
    pub stores: AtomicU64,
    pub prompt_tokens: AtomicU64,
    pub cached_tokens: AtomicU64,
    /// Of those, what came from the node.
    pub brought_tokens: AtomicU64,
    pub stopped: AtomicU64,
    pub cut_short: AtomicU64,
    pub aborted: AtomicU64,
    /// Batches of events that were published.
    pub batches: AtomicU64,
}

/// Seconds that things took, on the wall.
#[derive(Debug)]
pub struct Took {
    first_word: Histogram,
    between_words: Histogram,
    whole: Histogram,
    queue: Histogram,
    prompt: Histogram,
}

/// Bounds of vLLM's histogram of first tokens, in seconds.
const SECONDS: [f64; 21] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0,
];

impl Took {
    pub fn new(model: &str) -> Self {
        let of = |name: &str, help: &str| {
            let options = HistogramOpts::new(format!("vllm:{name}"), help)
                .buckets(SECONDS.to_vec())
                .const_label("model_name", model)
                .const_label("engine", "0");
            Histogram::with_opts(options).expect("a constant, valid name")
        };
        Self {
            first_word: of("time_to_first_token_seconds", "From a request to its first token"),
            between_words: of("inter_token_latency_seconds", "From one token to the next"),
            whole: of("e2e_request_latency_seconds", "From a request to its end"),
            queue: of("request_queue_time_seconds", "From a request to its first step"),
            prompt: of("request_prefill_time_seconds", "From the first step to the first token"),
        }
    }

    pub fn begun(&self, queue: Duration) {
        self.queue.observe(queue.as_secs_f64());
    }

    pub fn first_word(&self, since_request: Duration, since_begin: Duration) {
        self.first_word.observe(since_request.as_secs_f64());
        self.prompt.observe(since_begin.as_secs_f64());
    }

    pub fn word(&self, since_last: Duration) {
        self.between_words.observe(since_last.as_secs_f64());
    }

    pub fn ended(&self, since_request: Duration) {
        self.whole.observe(since_request.as_secs_f64());
    }

    fn text(&self) -> String {
        let all = [&self.first_word, &self.between_words, &self.whole, &self.queue, &self.prompt];
        let families: Vec<_> = all.into_iter().flat_map(Collector::collect).collect();
        let mut out = Vec::new();
        TextEncoder::new().encode(&families, &mut out).expect("writing to memory");
        String::from_utf8(out).unwrap_or_default()
    }
}

/// What is true at one moment, beside what is counted.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    pub running: u64,
    pub waiting: u64,
    /// Share of blocks that are in use.
    pub usage: f64,
    pub blocks: usize,
    pub block_tokens: usize,
    pub hash_unit: usize,
    pub node: bool,
    pub pinned: usize,
    pub tally: Tally,
}

/// The whole page, as Prometheus reads it.
pub fn page(model: &str, counts: &Counts, took: &Took, now: &Now) -> String {
    let labels = format!("model_name=\"{model}\",engine=\"0\"");
    let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed) as f64;
    let mut out = String::new();
    let mut add = |name: &str, kind: &str, series: &[(&str, f64)]| {
        out.push_str(&format!("# TYPE {name} {kind}\n"));
        for (more, value) in series {
            let all = match (name.starts_with("vllm:"), more.is_empty()) {
                (true, true) => format!("{{{labels}}}"),
                (true, false) => format!("{{{labels},{more}}}"),
                (false, _) => String::new(),
            };
            out.push_str(&format!("{name}{all} {value}\n"));
        }
    };
    let (prompt, cached, brought) =
        (read(&counts.prompt_tokens), read(&counts.cached_tokens), read(&counts.brought_tokens));
    add("vllm:num_requests_running", "gauge", &[("", now.running as f64)]);
    add("vllm:num_requests_waiting", "gauge", &[("", now.waiting as f64)]);
    add("vllm:kv_cache_usage_perc", "gauge", &[("", now.usage)]);
    let config = format!(
        "block_size=\"{}\",num_gpu_blocks=\"{}\",enable_prefix_caching=\"True\",prefix_match_unit=\"{}\",\
         prefix_caching_hash_algo=\"sha256_cbor\"",
        now.block_tokens, now.blocks, now.hash_unit
    );
    add("vllm:cache_config_info", "gauge", &[(&config, 1.0)]);
    add("vllm:prompt_tokens_total", "counter", &[("", prompt)]);
    add("vllm:prompt_tokens_cached_total", "counter", &[("", cached)]);
    let sources = [
        ("source=\"local_compute\"", prompt - cached),
        ("source=\"local_cache_hit\"", cached - brought),
        ("source=\"external_kv_transfer\"", brought),
    ];
    add("vllm:prompt_tokens_by_source_total", "counter", &sources);
    add("vllm:prefix_cache_queries_total", "counter", &[("", now.tally.asked as f64)]);
    add("vllm:prefix_cache_hits_total", "counter", &[("", now.tally.hit as f64)]);
    add("vllm:generation_tokens_total", "counter", &[("", read(&counts.words))]);
    add("vllm:num_preemptions_total", "counter", &[("", now.tally.preempted as f64)]);
    let ends = [
        ("finished_reason=\"stop\"", read(&counts.stopped)),
        ("finished_reason=\"length\"", read(&counts.cut_short)),
        ("finished_reason=\"abort\"", read(&counts.aborted)),
    ];
    add("vllm:request_success_total", "counter", &ends);
    add("mock_node_connected", "gauge", &[("", u64::from(now.node) as f64)]);
    add("mock_rows_pinned", "gauge", &[("", now.pinned as f64)]);
    for (name, counter) in [
        ("mock_requests_total", &counts.requests),
        ("mock_loads_total", &counts.loads),
        ("mock_stores_total", &counts.stores),
        ("mock_checked_rows_total", &counts.checked_rows),
        ("mock_wrong_rows_total", &counts.wrong_rows),
        ("mock_unplaced_rows_total", &counts.unplaced_rows),
        ("mock_event_batches_total", &counts.batches),
    ] {
        add(name, "counter", &[("", read(counter))]);
    }
    add("mock_roomless_blocks_total", "counter", &[("", now.tally.roomless as f64)]);
    out + &took.text()
}
