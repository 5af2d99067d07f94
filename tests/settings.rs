//! Settings as a person meets them: layers, origins, and what is said about mistakes.
#![expect(clippy::unwrap_used, reason = "helpers of tests: a test that cannot go on panics")]

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use spark_kv::base::units::Bytes;
use spark_kv::settings::{Error, Flag, Inputs, Io, Leaf, Loaded, Origin, load, merge};

fn flag(name: &str, key: &str, text: &str) -> Flag {
    Flag { name: name.into(), key: key.into(), text: text.into() }
}

/// A root of its own, so that no file of the machine takes part.
struct Case {
    root: tempfile::TempDir,
    inputs: Inputs,
}

impl Case {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let inputs = Inputs {
            flags: vec![flag("--root", "node.root", root.path().to_str().unwrap())],
            ..Inputs::default()
        };
        Self { root, inputs }
    }

    fn path(&self) -> PathBuf {
        self.root.path().join("spark-kv.toml")
    }

    fn file(self, text: &str) -> Self {
        std::fs::write(self.path(), text).unwrap();
        self
    }

    fn profile(mut self, text: &str) -> Self {
        let path = self.root.path().join("mine.toml");
        std::fs::write(&path, text).unwrap();
        self.inputs.profile = Some(path.display().to_string());
        self
    }

    fn env(mut self, name: &str, text: &str) -> Self {
        self.inputs.env.push((name.into(), text.into()));
        self
    }

    fn set(mut self, key: &str, text: &str) -> Self {
        self.inputs.flags.push(flag("--set", key, text));
        self
    }

    fn load(&self) -> Result<Loaded, Error> {
        load(&self.inputs)
    }

    /// The one problem there must be, with the root's path cut out.
    fn problem(&self) -> String {
        let error = self.load().expect_err("it must not load");
        assert_eq!(error.0.len(), 1, "{error}");
        error.to_string().replace(&self.root.path().display().to_string(), "ROOT")
    }
}

#[test]
fn each_layer_wins_over_the_ones_below_it() {
    type Add = fn(Case) -> Case;
    let layers: [(&str, Add); 4] = [
        ("profile", |c| c.profile("[store]\nqueue_depth = 2\n")),
        ("file", |c| c.file("[store]\nqueue_depth = 3\n")),
        ("environment", |c| c.env("SPARK_KV__STORE__QUEUE_DEPTH", "4")),
        ("flag", |c| c.set("store.queue_depth", "5")),
    ];
    for present in 0_u32..16 {
        let mut case = Case::new();
        let mut wanted = (32, "default");
        for (n, (word, add)) in layers.iter().enumerate() {
            if present & (1 << n) != 0 {
                case = add(case);
                wanted = (u32::try_from(n).unwrap() + 2, word);
            }
        }
        let loaded = case.load().unwrap();
        assert_eq!(loaded.settings.store.queue_depth, wanted.0, "layers {present:04b}");
        let origin = loaded.origin("store.queue_depth").unwrap();
        let word = match origin {
            Origin::Default => "default",
            Origin::Profile(_, 2) => "profile",
            Origin::File(path, 2) if *path == case.path() => "file",
            Origin::Env(name) if name == "SPARK_KV__STORE__QUEUE_DEPTH" => "environment",
            Origin::Flag(name) if name == "--set" => "flag",
            other => panic!("{other:?}"),
        };
        assert_eq!(word, wanted.1, "layers {present:04b}");
    }
}

fn leaf(rank: usize, key: &str, number: i64) -> Leaf {
    let origin = match rank {
        0 => Origin::Default,
        1 => Origin::Profile("p".into(), 1),
        2 => Origin::File("f".into(), 1),
        3 => Origin::Env("E".into()),
        _ => Origin::Flag("--set".into()),
    };
    Leaf { key: key.into(), value: toml::Value::Integer(number), origin }
}

proptest! {
    #[test]
    fn any_order_of_layers_gives_the_highest_one(
        held in prop::collection::btree_map((0_usize..5, 0_usize..4), any::<i64>(), 1..20),
        order in Just((0..20).collect::<Vec<usize>>()).prop_shuffle(),
    ) {
        let names = ["a.one", "a.two", "b.one", "b.two"];
        let all: Vec<Leaf> = held.iter().map(|((rank, key), n)| leaf(*rank, names[*key], *n)).collect();
        let shuffled = order.iter().filter_map(|&n| all.get(n).cloned());
        let merged = merge(shuffled);
        for (n, name) in names.iter().enumerate() {
            let highest = held.iter().filter(|((_, key), _)| *key == n).max_by_key(|((rank, _), _)| *rank);
            let wanted = highest.map(|(_, n)| toml::Value::Integer(*n));
            prop_assert_eq!(merged.get(*name).map(|l| &l.value), wanted.as_ref());
        }
    }
}

#[test]
fn a_value_reads_the_same_from_every_layer() {
    for (key, text, toml) in [
        ("store.capacity", "1.5GiB", "\"1.5GiB\""),
        ("store.io", "plain", "\"plain\""),
        ("listen.port", "9000", "9000"),
        ("engine.canary", "false", "false"),
        ("engine.extra_args", "[\"--seed\", \"7\"]", "[\"--seed\", \"7\"]"),
        ("engine.env.OMP_NUM_THREADS", "2", "\"2\""),
        ("engine.hash_seed", "17", "\"17\""),
    ] {
        let (section, name) = key.rsplit_once('.').unwrap();
        let text_of_file = format!("[{section}]\n{name} = {toml}\n");
        let variable = match key.strip_prefix("engine.env.") {
            Some(free) => format!("SPARK_KV__ENGINE__ENV__{free}"),
            None => format!("SPARK_KV__{}", key.to_uppercase().replace('.', "__")),
        };
        let settings = |case: Case| {
            let mut settings = case.load().unwrap().settings;
            settings.node.root = PathBuf::new();
            settings
        };
        let from_file = settings(Case::new().file(&text_of_file));
        assert_ne!(from_file, settings(Case::new()), "{key} is not at its default");
        assert_eq!(from_file, settings(Case::new().profile(&text_of_file)), "{key}");
        assert_eq!(from_file, settings(Case::new().env(&variable, text)), "{key}");
        assert_eq!(from_file, settings(Case::new().set(key, text)), "{key}");
    }
}

#[test]
fn mistakes_in_a_file_name_the_line_the_key_and_what_was_expected() {
    for (text, wanted) in [
        (
            "[store]\n\ncapcity = \"1GiB\"\n",
            "ROOT/spark-kv.toml:3: store.capcity: there is no such setting; did you mean `store.capacity`?",
        ),
        (
            "# one\n[sotre]\nio = \"plain\"\n",
            "ROOT/spark-kv.toml:2: sotre: there is no such setting; did you mean `store`?",
        ),
        (
            "[store]\nmax_model_len = 5\n",
            "ROOT/spark-kv.toml:2: store.max_model_len: there is no such setting; did you mean `engine.max_model_len`?",
        ),
        (
            "[zebra]\nx = 5\n",
            "ROOT/spark-kv.toml:1: zebra: there is no such setting; sections are cluster, engine, listen, log, node, router, store",
        ),
        ("port = 5\n", "ROOT/spark-kv.toml:1: port: there is no such setting; did you mean `listen.port`?"),
        (
            "store = 5\n",
            "ROOT/spark-kv.toml:1: store: there is no such setting; it is a section; its settings are written as `store.…`",
        ),
        (
            "[engine]\nenv = 5\n",
            "ROOT/spark-kv.toml:2: engine.env: there is no such setting; it is a table; write `engine.env.NAME`",
        ),
        (
            "[listen]\nport = \"many\"\n",
            "ROOT/spark-kv.toml:2: listen.port: invalid type: string \"many\", expected a whole number from 0 to 65535",
        ),
        (
            "[listen]\nport = 70000\n",
            "ROOT/spark-kv.toml:2: listen.port: invalid value: integer `70000`, expected a whole number from 0 to 65535",
        ),
        (
            "[engine]\ncanary = 1\n",
            "ROOT/spark-kv.toml:2: engine.canary: invalid type: integer `1`, expected true or false",
        ),
        (
            "[store]\nio = \"rings\"\n",
            "ROOT/spark-kv.toml:2: store.io: unknown variant `rings`, expected one of `auto`, `ring`, `plain`",
        ),
        (
            "[store]\ncapacity = \"lots\"\n",
            "ROOT/spark-kv.toml:2: store.capacity: `lots` is not a size: write a number with one of B, KiB, MiB, GiB, TiB, kB, MB, GB, TB, such as `64GiB`",
        ),
        (
            "[engine]\nenv = { A = 2 }\n",
            "ROOT/spark-kv.toml:2: engine.env.A: invalid type: integer `2`, expected text",
        ),
    ] {
        assert_eq!(Case::new().file(text).problem(), wanted);
    }
}

#[test]
fn a_file_that_is_not_toml_is_named_with_its_line() {
    let said = Case::new().file("[store]\nio = \n").problem();
    assert!(said.starts_with("ROOT/spark-kv.toml:2: not TOML: "), "{said}");
}

#[test]
fn all_mistakes_are_said_at_once() {
    let case = Case::new()
        .file("[store]\nio = 5\nqueue = 1\n")
        .set("listen.prot", "1")
        .env("SPARK_KV__LOG__JSON", "maybe");
    let error = case.load().unwrap_err();
    let said: Vec<String> = error
        .0
        .iter()
        .map(|p| format!("{}|{}", p.key, p.origin).replace(case.root.path().to_str().unwrap(), "ROOT"))
        .collect();
    for wanted in [
        "store.queue|ROOT/spark-kv.toml:3",
        "store.io|ROOT/spark-kv.toml:2",
        "listen.prot|flag --set",
        "log.json|environment SPARK_KV__LOG__JSON",
    ] {
        assert!(said.iter().any(|s| s == wanted), "{wanted} in {said:?}");
    }
    assert_eq!(said.len(), 4);
}

#[test]
fn impossible_values_are_refused_with_their_origin() {
    for (key, text, wanted) in [
        ("listen.port", "0", "must be from 1 to 65532"),
        ("listen.port", "65533", "must be from 1 to 65532"),
        ("listen.address", "0.0.0.0", "needs `listen.api_keys_file`"),
        ("listen.address", "here", "is not an IP address"),
        ("listen.max_body", "1", "must be from 1KiB to 4GiB"),
        ("listen.max_requests", "0", "must be from 1 to 65536"),
        ("store.capacity", "1023MiB", "must hold at least four segments of 256MiB"),
        ("store.segment", "512KiB", "must be from 1MiB to 4GiB"),
        ("store.segment", "1048577", "must be a multiple of 4KiB"),
        ("store.queue_depth", "0", "must be from 1 to 4096"),
        ("store.scrub_days", "3651", "must be from 0 to 3650"),
        ("store.write_budget", "255MiB", "must be 0 (no limit) or at least one segment, which is 256MiB"),
        ("node.name", "", "must be 1 to 40 letters, digits and dashes"),
        ("node.name", "a_b", "must be 1 to 40 letters, digits and dashes"),
        ("node.name", "a1234567890123456789012345678901234567890", "must be 1 to 40"),
        ("engine.hash_seed", "random", "must be a number from 0 to 4294967295"),
        ("engine.tiny_family", "mistral", "must be llama or lfm2"),
        ("engine.url", "https://x", "must begin with `http://`"),
        ("engine.url", "http://localhost:8000/v1", "port 8000 is this node's own"),
        ("engine.row_area", "0", "must be at least 1MiB"),
        ("engine.prefill_tokens_per_s", "0", "must be from 1"),
        ("cluster.address", "box", "is not an IP address"),
        ("cluster.silence_s", "0", "must be from 1"),
        ("cluster.join", "hunter2", "not a join token"),
        ("cluster.copy_rate", "1023KiB", "must be at least 1MiB"),
        ("cluster.copy_share", "101", "must be from 0 to 100"),
        ("router.idle_timeout_s", "0", "must be at least 1"),
        ("router.places", "65537", "must be from 0 to 65536"),
        ("router.queue", "65537", "must be from 0 to 65536"),
        ("log.level", "info,=", "not a filter"),
    ] {
        let said = Case::new().set(key, text).problem();
        assert!(said.starts_with(&format!("flag --set: {key}: ")), "{said}");
        assert!(said.contains(wanted), "{said}");
    }
}

#[test]
fn an_alias_stands_for_a_model() {
    let of = |aliases: &[(&str, &str)]| {
        let set =
            |case: Case, &(alias, model): &(&str, &str)| case.set(&format!("router.aliases.{alias}"), model);
        aliases.iter().fold(Case::new(), set).problem()
    };
    for (aliases, wanted) in [
        (&[("a", "b"), ("b", "m")][..], "`a` = `b`: it stands for another alias"),
        (&[("a", "a")], "it stands for itself"),
        (&[("a", " ")], "a name is empty"),
    ] {
        let said = of(aliases);
        assert!(said.contains("router.aliases: ") && said.contains(wanted), "{said}");
    }
}

#[test]
fn what_is_just_possible_is_taken() {
    for (key, text) in [
        ("listen.port", "65532"),
        ("listen.address", "::1"),
        ("store.capacity", "1GiB"),
        ("store.segment", "1MiB"),
        ("store.scrub_days", "0"),
        ("store.write_budget", "0"),
        ("store.write_budget", "256MiB"),
        ("node.name", "spark-1"),
    ] {
        Case::new().set(key, text).load().unwrap_or_else(|e| panic!("{key}={text}: {e}"));
    }
    let case = Case::new().set("listen.address", "0.0.0.0").set("listen.api_keys_file", "/etc/keys");
    case.load().unwrap();
}

#[test]
fn secrets_are_never_shown() {
    let secret = "spark1-10.0.0.1:7700-abcd-hunter2";
    let loaded = Case::new()
        .env("SPARK_KV_JOIN", secret)
        .set("engine.env.HF_TOKEN", "hunter2")
        .set("engine.extra_args", "[\"--api-key\", \"hunter2\"]")
        .load()
        .unwrap();
    assert_eq!(loaded.settings.cluster.join, secret);
    assert_eq!(loaded.origin("cluster.join"), Some(&Origin::Env("SPARK_KV_JOIN".into())));
    let shown: String =
        loaded.shown().iter().map(|v| format!("{} {} {}\n", v.key, v.value, v.origin)).collect();
    assert!(!shown.contains("hunter2"), "{shown}");
    assert!(shown.contains("cluster.join \"(hidden)\" environment SPARK_KV_JOIN"), "{shown}");

    for case in [
        Case::new().set("cluster.join", "hunter2"),
        Case::new().file("[cluster]\njoin = [\"hunter2\"]\n"),
        Case::new().file("[cluster]\njoin = \"hunter2\n"),
        Case::new().file("[cluster]\njoin = hunter2\n"),
    ] {
        let said = case.load().unwrap_err().to_string();
        assert!(!said.contains("hunter2"), "{said}");
    }
}

#[test]
fn the_file_under_the_root_is_found_and_a_named_one_must_exist() {
    let case = Case::new();
    assert_eq!(case.load().unwrap().file, None);
    let case = case.file("[store]\nio = \"plain\"\n");
    let loaded = case.load().unwrap();
    assert_eq!((loaded.settings.store.io, loaded.file), (Io::Plain, Some(case.path())));

    let mut case = Case::new();
    case.inputs.file = Some(case.root.path().join("none.toml"));
    assert_eq!(case.problem(), "ROOT/none.toml: there is no such file");
}

#[test]
fn a_relative_path_is_meant_from_the_file_it_stands_in() {
    let case = Case::new().file("[listen]\napi_keys_file = \"keys\"\n").set("engine.model", "models/m");
    let settings = case.load().unwrap().settings;
    assert_eq!(settings.listen.api_keys_file, case.root.path().join("keys"));
    assert_eq!(settings.engine.model, std::env::current_dir().unwrap().join("models/m"));
    assert_eq!(Case::new().load().unwrap().settings.engine.model, Path::new(""));
}

#[test]
fn an_unknown_profile_lists_those_there_are() {
    let mut case = Case::new();
    case.inputs.profile = Some("cpu-tinny".into());
    assert_eq!(
        case.problem(),
        "profile cpu-tinny: there is no such profile; built in are cpu-tiny, cpu-tiny-hybrid, spark; a path is taken too"
    );
}

#[test]
fn a_node_needs_a_model_to_start_and_the_other_commands_do_not() {
    let loaded = Case::new().load().unwrap();
    let said = loaded.ready_to_start().unwrap_err().to_string();
    assert!(said.starts_with("default: engine.model: no model"), "{said}");
    let said = Case::new().set("engine.kind", "attached").load().unwrap().ready_to_start().unwrap_err();
    assert!(said.to_string().contains("engine.url"), "{said}");
    for (key, text) in [("engine.kind", "mock"), ("engine.model", "/m"), ("engine.tiny_family", "llama")] {
        Case::new().set(key, text).load().unwrap().ready_to_start().unwrap();
    }
}

#[test]
fn a_file_too_large_or_not_text_is_refused() {
    let case = Case::new();
    std::fs::write(case.path(), [0xff, 0xfe]).unwrap();
    assert_eq!(case.problem(), "ROOT/spark-kv.toml: the file is not UTF-8 text");
    std::fs::write(case.path(), vec![b'#'; (1 << 20) + 1]).unwrap();
    assert_eq!(case.problem(), "ROOT/spark-kv.toml: the file is larger than 1 MiB");
}

#[test]
fn sizes_are_exact() {
    let settings = Case::new().set("store.capacity", "2TB").load().unwrap().settings;
    assert_eq!(settings.store.capacity, Bytes(2_000_000_000_000));
}

#[test]
fn a_variable_that_nobody_reads_is_not_passed_over_in_silence() {
    let case = Case::new().env("SPARK_KV_STORE_QUEUE_DEPTH", "4");
    assert_eq!(
        case.problem(),
        "environment SPARK_KV_STORE_QUEUE_DEPTH: is no variable of spark-kv; did you mean SPARK_KV__STORE__QUEUE_DEPTH?"
    );
    Case::new().env("SPARK_KV_OFFLINE", "1").load().unwrap();
}
