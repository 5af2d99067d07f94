//! The hand: what can be typed, and nothing of what it does.
//!
//! Words and flags are a promise to people and scripts; `tests/cli.rs` holds them. A verb's work is in the file that
//! [`main`] sends it to. Data goes to stdout, talk to stderr, the outcome is an exit code of [`Exit`].

mod ask;
mod bench;
mod cluster;
mod config;
mod explain;
mod out;
mod rails;
mod run;
mod sim;
mod status;
mod store;
mod trace;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::base::units::Bytes;
use crate::settings::{Flag, Inputs};
use crate::sim::{Capacity, Policy};

pub use out::Exit;

#[derive(Debug, Parser)]
#[command(name = "spark-kv", version, max_term_width = 100, after_help = EXIT_CODES)]
/// Turns two DGX Sparks into one coding-agent appliance: supervised vLLM, one KV cache on both drives, one endpoint.
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

const EXIT_CODES: &str = "\
Exit codes: 0 done, 1 failed, 2 not found or not healthy, 64 wrong arguments or settings.
Colours are left away when NO_COLOR is set or the output is not a terminal.";

#[derive(Debug, Subcommand)]
enum Verb {
    /// Start this node and its engine, and stay until told to stop.
    Up(Start),
    /// Show how the running node and its peer are, on one screen.
    Status(Status),
    /// Show each rail between the boxes, measure it alone and all together, and say what is wrong.
    Rails(rails::Rails),
    /// Look at the rows on the drive, verify, pin or drop them.
    #[command(subcommand)]
    Store(store::Verb),
    /// List the nodes that the running one knows, or forget one.
    #[command(subcommand)]
    Cluster(cluster::Verb),
    /// Say why a request went where it went, and what each box would have cost.
    Explain(explain::Explain),
    /// Show or check the settings.
    #[command(subcommand)]
    Config(Config),
    /// Look at recorded sessions.
    #[command(subcommand)]
    Trace(Trace),
    /// Play recorded sessions against the store and against policies that others use.
    Sim(Sim),
    /// Make what `up` needs and is missing: the vLLM environment, and with a tiny profile its model.
    Provision(Provision),
    /// Measure what this machine does.
    #[command(subcommand)]
    Bench(bench::Bench),
    /// The node alone; `up` starts it.
    #[command(hide = true)]
    Node(Start),
    /// Runs a program and ends its whole process group when the parent is gone; `up` starts it.
    #[command(hide = true)]
    Guard(Words),
    /// An engine without a model, for load, demos and faults; `up` starts it.
    #[command(hide = true, disable_help_flag = true)]
    MockEngine(Words),
}

/// Arguments that the verb reads itself.
#[derive(Debug, Args)]
struct Words {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    words: Vec<OsString>,
}

/// Which settings are meant.
#[derive(Clone, Debug, Default, Args)]
struct Layers {
    /// Built-in profile (cpu-tiny, cpu-tiny-hybrid, spark) or a path to one.
    #[arg(long, value_name = "NAME|FILE")]
    profile: Option<String>,
    /// Folder under which everything of this node lives. Without it: /var/lib, /etc, /run and /var/log.
    #[arg(long, value_name = "DIR")]
    root: Option<String>,
    /// Settings file. Without it: DIR/spark-kv.toml under --root, else /etc/spark-kv/spark-kv.toml, when there is one.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// One setting, as in `--set store.capacity=2TB`. Can be given again. Other users of this machine can see it.
    #[arg(long, value_name = "SECTION.KEY=VALUE", value_parser = assignment)]
    set: Vec<(String, String)>,
}

#[derive(Clone, Debug, Default, Args)]
struct Start {
    #[command(flatten)]
    layers: Layers,
    /// Public port; the engine takes the next one, control and data between nodes the two after it.
    #[arg(long, value_name = "PORT")]
    port_base: Option<String>,
    /// Name of this node: letters, digits, dashes.
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Token of the node to join, once. Arguments can be seen by everybody on this machine: `--join -` reads the
    /// token from standard input, and SPARK_KV_JOIN in the environment does as well.
    #[arg(long, value_name = "TOKEN|-", allow_hyphen_values = true)]
    join: Option<String>,
}

#[derive(Debug, Args)]
struct Provision {
    #[command(flatten)]
    layers: Layers,
    /// Print the path of the environment's Python and nothing else.
    #[arg(long)]
    print_python: bool,
}

#[derive(Debug, Args)]
struct Status {
    #[command(flatten)]
    layers: Layers,
    /// Address of the node's public port. Without it the running node is found through its root.
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// File with the API key for --url: the key, or a `name:key` line as in listen.api_keys_file.
    #[arg(long, value_name = "FILE", requires = "url")]
    key_file: Option<PathBuf>,
    /// Everything the node says, as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Config {
    /// Print the settings that are in force. Secrets are masked.
    Show(Show),
    /// Say whether a node could start with these settings.
    Check(Start),
}

#[derive(Debug, Args)]
struct Show {
    #[command(flatten)]
    start: Start,
    /// Say of each value where it came from.
    #[arg(long)]
    origin: bool,
    /// As JSON: each key with its value and origin.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Trace {
    /// Print what recorded sessions hold, and the most that a cache can save of them.
    Info(TraceInfo),
}

#[derive(Debug, Args)]
struct TraceInfo {
    /// Weka traces: JSON files, folders of *.json, `.rle.jsonl` with one session per line; each also as `.gz`.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct Sim {
    /// Weka traces, as in `trace info`.
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// Room for rows: a size such as 64GiB, or a share of all different rows such as 25%. Several with commas.
    #[arg(long, value_name = "SIZE|PCT%", value_delimiter = ',', default_value = "10%,25%,50%,75%",
        value_parser = sim::capacity)]
    capacity: Vec<Capacity>,
    /// Tokens of one row.
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    row_tokens: u32,
    /// Bytes of one token in a row. The default is that of a 30B hybrid model whose layers share one row size.
    #[arg(long, value_name = "BYTES", default_value_t = 14_848)]
    bytes_per_token: u64,
    /// State groups of a hybrid model: that many further rows at each row's end, needed where a prefix ends.
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    state_groups: u32,
    /// Bytes of one segment, as store.segment.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = str::parse::<Bytes>)]
    segment: Bytes,
    /// worth (the shipped store), lru, s3fifo, sieve. Several with commas.
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_value = "worth,lru,s3fifo,sieve",
        value_parser = sim::policy)]
    policy: Vec<Policy>,
    /// Sessions that a request finds open, its own among them, on average.
    #[arg(long, value_name = "NUMBER", default_value_t = 8.0)]
    sessions_at_once: f64,
    /// When sessions start follows from it: same seed, same figures.
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

fn assignment(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.trim().to_owned(), value.to_owned())),
        _ => Err("write it as SECTION.KEY=VALUE".to_owned()),
    }
}

impl Layers {
    fn inputs(&self) -> Inputs {
        let mut flags: Vec<Flag> = Vec::new();
        for (key, text) in &self.set {
            flags.push(flag("--set", key, text));
        }
        if let Some(root) = &self.root {
            flags.push(flag("--root", "node.root", root));
        }
        Inputs { profile: self.profile.clone(), file: self.config.clone(), flags, ..Inputs::default() }
    }
}

impl Start {
    /// A flag of its own wins over `--set` of the same key.
    fn inputs(&self) -> Inputs {
        let mut inputs = self.layers.inputs();
        let named = [
            ("--port-base", "listen.port", &self.port_base),
            ("--name", "node.name", &self.name),
            ("--join", "cluster.join", &self.join),
        ];
        for (name, key, text) in named {
            inputs.flags.extend(text.iter().map(|text| flag(name, key, text)));
        }
        inputs
    }

    /// The arguments that give a child the same settings, secrets left out: those go through its environment.
    fn again(&self) -> Vec<OsString> {
        let Layers { profile, root, config, set } = &self.layers;
        let mut words: Vec<OsString> = Vec::new();
        let mut pair = |name: &str, value: OsString| words.extend([OsString::from(name), value]);
        for (name, value) in [
            ("--profile", profile),
            ("--root", root),
            ("--port-base", &self.port_base),
            ("--name", &self.name),
        ] {
            if let Some(value) = value {
                pair(name, value.into());
            }
        }
        if let Some(path) = config {
            pair("--config", path.into());
        }
        for (key, value) in set.iter().filter(|(key, _)| key != "cluster.join") {
            pair("--set", format!("{key}={value}").into());
        }
        words
    }
}

fn flag(name: &str, key: &str, text: &str) -> Flag {
    Flag { name: name.to_owned(), key: key.to_owned(), text: text.to_owned() }
}

/// Help and version are what was asked for; the rest is a mistake in the arguments.
fn told_by_clap(error: &clap::Error) -> Exit {
    match error.print() {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Exit::Failed,
        _ if error.use_stderr() => Exit::Usage,
        _ => Exit::Done,
    }
}

/// The whole program.
pub fn main(words: impl IntoIterator<Item = OsString>) -> Exit {
    let cli = match Cli::try_parse_from(words) {
        Ok(cli) => cli,
        Err(error) => return told_by_clap(&error),
    };
    let outcome = match cli.verb {
        Verb::Up(start) => run::up(start),
        Verb::Node(start) => run::node(&start),
        Verb::Provision(order) => run::provide(&order),
        Verb::Guard(Words { words }) => run::guard(&words),
        Verb::MockEngine(Words { words }) => run::mock_engine(words),
        Verb::Bench(bench::Bench::Store(order)) => bench::store(&order),
        Verb::Bench(bench::Bench::Fabric(order)) => bench::fabric(&order),
        Verb::Bench(bench::Bench::Router(order)) => bench::router(&order),
        Verb::Bench(bench::Bench::Matrix(order)) => bench::matrix(&order),
        Verb::Bench(bench::Bench::Restart(order)) => bench::restart(&order),
        Verb::Status(status) => status::show(&status),
        Verb::Rails(order) => rails::show(&order),
        Verb::Trace(Trace::Info(order)) => trace::info(&order),
        Verb::Sim(order) => sim::play(order),
        Verb::Store(verb) => store::run(verb),
        Verb::Cluster(verb) => cluster::run(verb),
        Verb::Explain(explain) => explain::run(&explain),
        Verb::Config(Config::Show(show)) => config::show(&show),
        Verb::Config(Config::Check(start)) => config::check(&start),
    };
    out::finish(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_are_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn a_childs_arguments_give_the_same_settings_and_hold_no_token() {
        let words = "spark-kv up --root /r --profile cpu-tiny --set store.io=plain --set cluster.join=spark1-a \
                     --name one --port-base 9000 --join spark1-b";
        let Verb::Up(start) = Cli::try_parse_from(words.split_whitespace()).unwrap().verb else {
            panic!("not up");
        };
        let again = start.again();
        assert!(!again.iter().any(|w| w.to_string_lossy().contains("spark1-")), "{again:?}");
        let words = ["spark-kv".into(), "node".into()].into_iter().chain(again);
        let Verb::Node(child) = Cli::try_parse_from(words).unwrap().verb else { panic!("not node") };
        let keys = |start: &Start| -> Vec<(String, String)> {
            let flags = start.inputs().flags;
            flags.into_iter().filter(|f| f.key != "cluster.join").map(|f| (f.key, f.text)).collect()
        };
        assert_eq!(keys(&child), keys(&start));
        assert_eq!(child.layers.profile, start.layers.profile);
    }
}
