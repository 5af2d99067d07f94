//! The command line as scripts and people meet it: words, streams and exit codes.
#![expect(clippy::unwrap_used, reason = "helpers of tests: a test that cannot go on panics")]

use std::process::{Command, Output};

fn run(words: &[&str], env: &[(&str, &str)]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_spark-kv"))
        .args(words)
        .env_clear()
        .envs(env.iter().copied())
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn help_lists_what_a_person_needs_and_hides_the_rest() {
    let out = run(&["--help"], &[]);
    assert_eq!(out.status.code(), Some(0));
    let help = text(&out.stdout);
    for word in ["up", "status", "config", "Exit codes: 0 done, 1 failed, 2 not found or not healthy, 64"] {
        assert!(help.contains(word), "{word}: {help}");
    }
    for word in ["guard", "mock-engine", "The node alone"] {
        assert!(!help.contains(word), "{word}: {help}");
    }
    assert!(!help.contains('\x1b'), "no colours into a pipe");
    assert!(out.stderr.is_empty());
}

#[test]
fn help_of_up_warns_that_arguments_are_visible() {
    let help = text(&run(&["up", "--help"], &[]).stdout);
    for word in ["--profile", "--root", "--port-base", "--join", "--name", "--config", "--set"] {
        assert!(help.contains(word), "{word}");
    }
    let flat = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(flat.contains("Arguments can be seen by everybody on this machine"), "{flat}");
    assert!(flat.contains("SPARK_KV_JOIN"), "{flat}");
}

#[test]
fn every_kind_of_mistake_has_its_exit_code() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path().to_str().unwrap();
    for (words, code, said) in [
        (vec!["--version"], 0, ""),
        (vec![], 64, "Usage"),
        (vec!["upp"], 64, "up"),
        (vec!["up", "--prot-base", "1"], 64, "--port-base"),
        (vec!["up", "--set", "store.io"], 64, "SECTION.KEY=VALUE"),
        (vec!["up", "--root", root], 64, "default: engine.model: no model"),
        (vec!["up", "--root", root, "--port-base", "70000"], 64, "flag --port-base: listen.port: "),
        (vec!["up", "--root", root, "--join", "x"], 64, "flag --join: cluster.join: not a join token"),
        (
            vec!["config", "check", "--root", root, "--set", "store.capcity=1"],
            64,
            "did you mean `store.capacity`?",
        ),
        (
            vec!["config", "check", "--root", root, "--profile", "cpu-tiny"],
            0,
            "the settings are fine (profile cpu-tiny",
        ),
        (vec!["status", "--root", root], 2, "no running node"),
        (vec!["status", "--root", root, "--url", "ftp://x"], 64, "http://"),
    ] {
        let out = run(&words, &[]);
        let talk = text(&out.stderr);
        assert_eq!(out.status.code(), Some(code), "{words:?}: {talk}");
        assert!(talk.contains(said), "{words:?}: {talk}");
        assert!(code == 0 || out.stdout.is_empty(), "{words:?} talks on stderr");
    }
}

#[test]
fn config_show_says_where_values_came_from_and_reads_back() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("spark-kv.toml");
    std::fs::write(
        &path,
        "[store]\nio = \"plain\"\n\n[engine.env]\n\"A.B\" = \"1\"\nHF_TOKEN = \"hunter2\"\n",
    )
    .unwrap();
    let words =
        ["config", "show", "--origin", "--root", root.path().to_str().unwrap(), "--profile", "cpu-tiny"];
    let out = run(&words, &[("SPARK_KV__LOG__JSON", "true"), ("SPARK_KV_JOIN", "spark1-hunter2")]);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let shown = text(&out.stdout);
    for (line, origin) in [
        ("io = \"plain\"", format!("# {}:2", path.display())),
        ("json = true", "# environment SPARK_KV__LOG__JSON".into()),
        ("join = \"(hidden)\"", "# environment SPARK_KV_JOIN".into()),
        ("tiny_family = \"llama\"", "# profile cpu-tiny:".into()),
        ("queue_depth = 32", "# default".into()),
        ("root = ", "# flag --root".into()),
    ] {
        let found = shown.lines().find(|l| l.starts_with(line)).unwrap_or_else(|| panic!("{line}: {shown}"));
        assert!(found.contains(&origin), "{found}");
    }
    assert!(!shown.contains("hunter2"), "{shown}");
    let table: toml::Table = toml::from_str(&shown).unwrap();
    assert_eq!(table["engine"]["env"]["A.B"].as_str(), Some("1"));
}

#[test]
fn config_show_as_json_has_value_and_origin_of_every_key() {
    let root = tempfile::tempdir().unwrap();
    let out = run(&["config", "show", "--json", "--root", root.path().to_str().unwrap()], &[]);
    let shown: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(shown["listen.port"], serde_json::json!({ "value": 8000, "origin": "default" }));
    assert_eq!(shown["node.root"]["origin"], "flag --root");
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let out = Command::new(env!("CARGO_BIN_EXE_spark-kv"))
        .args(["config", "show", "--root", "/nonexistent"])
        .env_clear()
        .stdout(writer)
        .output()
        .unwrap();
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    assert!(out.stderr.is_empty(), "{}", text(&out.stderr));
}

#[test]
fn the_join_token_can_come_through_standard_input() {
    use std::io::Write;
    use std::process::Stdio;
    let root = tempfile::tempdir().unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_spark-kv"))
        .args(["up", "--root", root.path().to_str().unwrap(), "--profile", "cpu-tiny", "--join", "-"])
        .env_clear()
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"hunter2\n").unwrap();
    let out = child.wait_with_output().unwrap();
    let talk = text(&out.stderr);
    assert_eq!(out.status.code(), Some(64), "{talk}");
    assert!(talk.contains("flag --join: cluster.join: not a join token"), "{talk}");
    assert!(!talk.contains("hunter2"), "{talk}");
}
