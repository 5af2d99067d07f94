//! Figures of a recorded set, every refusal by its place, and the round trip of the run-length form.

use std::io::Write;

use proptest::prelude::*;

use super::*;

/// Recorded sessions are no part of the repository: where they lie is told by the environment, or beside it.
fn recorded() -> Option<PathBuf> {
    let beside =
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(|p| p.join("shared").join("data").join("traces"));
    let folder = std::env::var_os("SPARK_KV_TRACES").map(PathBuf::from).or(beside)?;
    let found = folder.join("cc85.rle.jsonl.gz").exists();
    if !found {
        println!("skipped: no recorded sessions in {} (SPARK_KV_TRACES)", folder.display());
    }
    found.then_some(folder)
}

fn two_places(x: f64) -> f64 {
    (x * 100.0).round() / 100.0
}

#[test]
fn a_recorded_set_has_the_figures_that_other_readers_find() {
    let Some(folder) = recorded() else { return };
    let sessions = read(&[folder.join("cc85.rle.jsonl.gz")]).unwrap();
    let info = Info::of(&sessions);
    assert_eq!((info.sessions, info.sub_agents, info.requests), (85, 6, 3_486));
    assert_eq!((info.unique_tokens, info.input_tokens), (13_600_384, 238_711_698));
    assert_eq!((two_places(info.ceiling_pct), two_places(info.ceiling_tokens_pct)), (94.30, 94.26));
    let found: Vec<_> = info
        .ceiling_by_block
        .iter()
        .map(|c| (c.tokens_per_row, two_places(c.cold_pct), two_places(c.warm_pct)))
        .collect();
    let expected = [
        (16, 94.26, 99.95),
        (64, 94.26, 99.95),
        (512, 93.94, 99.63),
        (2128, 92.75, 98.40),
        (4224, 91.31, 96.93),
    ];
    assert_eq!(found, expected);
}

#[test]
fn a_folder_of_recorded_sessions_is_read_and_written_again() {
    let Some(folder) = recorded() else { return };
    let sessions = read(&[folder.join("weka-small")]).unwrap();
    assert_eq!(sessions.len(), 7);
    let agents = sessions.iter().flat_map(|s| &s.streams).filter_map(|s| s.agent.as_ref()).count();
    assert_eq!(agents, 6);
    for session in &sessions {
        for stream in session.streams.iter().filter(|s| s.agent.is_some()) {
            let at = stream.agent.as_ref().unwrap().at;
            assert!(stream.requests.iter().all(|r| r.at >= at), "{}: relative times", session.id);
        }
        assert_eq!(&parsed(&write_line(session)).unwrap(), session);
    }
}

fn parsed(text: &str) -> Result<Session, Error> {
    weka::parse(text, Path::new("a.json"), 1)
}

fn session_text(requests: &str) -> String {
    format!(r#"{{"id":"a","block_size":64,"requests":[{requests}]}}"#)
}

const ONE: &str = r#"{"t":0,"type":"n","in":130,"out":1,"hash_ids":[1,2]}"#;

#[test]
fn refusals_name_file_line_and_field() {
    let agent = |inner: &str| format!(r#"{{"t":10,"type":"subagent","agent_id":"x","requests":[{inner}]}}"#);
    for (text, message) in [
        ("{".to_owned(), "a.json:1: EOF while parsing an object"),
        (r#"{"id":"a","requests":[]}"#.to_owned(), "a.json:1: missing field `block_size`"),
        (r#"{"id":"","block_size":64,"requests":[]}"#.to_owned(), "a.json:1: id: it is empty"),
        (
            r#"{"id":"a","block_size":0,"requests":[]}"#.to_owned(),
            "a.json:1: block_size: blocks of no tokens",
        ),
        (
            r#"{"id":"a","block_size":64,"hash_id_scope":"galactic","requests":[]}"#.to_owned(),
            "a.json:1: hash_id_scope: `galactic` is neither `local` nor `global`",
        ),
        (session_text(ONE) + "{}", "a.json:1: trailing characters"),
        (
            session_text(&format!("{ONE},\n{{\"t\":1,\"type\":\"n\",\"in\":\"many\",\"out\":1}}")),
            "a.json:2: requests[1].in: invalid type: string \"many\", expected u32",
        ),
        (session_text(r#"{"t":0,"type":"x","in":1,"out":1}"#), "a.json:1: requests[0].type: `x` is none of"),
        (session_text(r#"{"t":0,"type":"n","out":1}"#), "a.json:1: requests[0].in: it is missing"),
        (session_text(r#"{"t":0,"type":"n","in":0,"out":1}"#), "a.json:1: requests[0].in: 0 tokens"),
        (session_text(r#"{"t":-5,"type":"n","in":1,"out":1}"#), "a.json:1: requests[0].t: -5 is no time"),
        (
            session_text(r#"{"t":0,"type":"n","in":64,"out":1,"hash_ids":[1,2]}"#),
            "a.json:1: requests[0].hash_ids: 2 blocks, and 64 tokens have at most 1",
        ),
        (
            session_text(r#"{"t":0,"type":"n","in":64,"out":1,"keep":1,"new":[]}"#),
            "a.json:1: requests[0].keep: 1 of 0 blocks",
        ),
        (
            session_text(r#"{"t":0,"type":"n","in":64,"out":1,"keep":0,"new":[[0,4294967295],[0,9]]}"#),
            "a.json:1: requests[0].new: there are no 9 numbers from 0 on",
        ),
        (
            session_text(r#"{"t":0,"type":"n","in":64,"out":1,"keep":0}"#),
            "a.json:1: requests[0].keep: there must be either",
        ),
        (
            session_text(&agent(r#"{"t":10,"type":"n","in":1,"out":1},{"t":3,"type":"n","in":1,"out":1}"#)),
            "a.json:1: requests[0].requests[1].t: 3 is before its sub-agent's 10",
        ),
        (
            session_text(&agent(r#"{"t":10,"type":"subagent"}"#)),
            "a.json:1: requests[0].requests[0].type: a sub-agent within a sub-agent",
        ),
    ] {
        let told = parsed(&text).unwrap_err().to_string();
        assert!(told.starts_with(message), "{told}\n  is not\n{message}");
    }
}

#[test]
fn both_conventions_of_inner_times_mean_the_same() {
    let text = |t: [u32; 2]| {
        let [a, b] = t;
        let inner = format!(r#"{{"t":{a},"type":"n","in":9,"out":1}},{{"t":{b},"type":"s","in":9,"out":1}}"#);
        session_text(&format!(
            r#"{ONE},{{"t":100,"type":"subagent","agent_id":"x","subagent_type":null,"duration_ms":null,"requests":[{inner}]}}"#
        ))
    };
    let relative = parsed(&text([0, 7])).unwrap();
    assert_eq!(relative, parsed(&text([100, 107])).unwrap());
    let at: Vec<u64> = relative.streams[1].requests.iter().map(|r| r.at.as_secs()).collect();
    assert_eq!(at, [100, 107]);
    assert_eq!(relative.streams[1].agent.as_ref().unwrap().after, 1);
}

#[test]
fn what_producers_add_is_passed_over() {
    let text = format!(
        r#"{{"id":"a","block_size":64,"hash_id_scope":"global","_analysis":{{"x":[1]}},"totals":{{}},"requests":[{ONE}]}}"#
    );
    assert_eq!(parsed(&text).unwrap().scope, Scope::Global);
}

#[test]
fn an_id_stands_for_one_session() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("two.jsonl");
    let mut to = File::create(&file).unwrap();
    writeln!(to, "{}\n\n{}", session_text(ONE), session_text(ONE)).unwrap();
    let told = read(std::slice::from_ref(&file)).unwrap_err().to_string();
    let name = file.display();
    assert_eq!(told, format!("{name}:3: id: the id `a` was taken before, by {name}:1"));
    assert!(matches!(read(&[folder.path().to_owned()]), Err(Error::Nothing { .. })));
    assert!(matches!(read(&[folder.path().join("none")]), Err(Error::Io { .. })));
}

#[test]
fn rows_end_where_their_length_says_and_global_numbers_meet() {
    let mut session = parsed(&session_text(ONE)).unwrap();
    let rows =
        |session: &Session, row| SeenRows::rows(RowTokens(row), 4, session, &session.streams[0].requests[0]);
    assert_eq!(rows(&session, 64), [(5, 1, 1), (5, 2, 2)]);
    assert_eq!(rows(&session, 32), [(5, 1, 1), (5, 1, 2), (5, 2, 3), (5, 2, 4)]);
    assert_eq!(rows(&session, 100), [(5, 2, 1)]);
    assert_eq!(rows(&session, 129), []);
    session.scope = Scope::Global;
    assert_eq!(rows(&session, 128), [(0, 2, 1)]);
}

#[test]
fn one_token_of_each_prompt_is_computed() {
    let twice = session_text(
        r#"{"t":0,"type":"n","in":128,"out":1,"hash_ids":[1,2]},{"t":1,"type":"n","in":128,"out":1,"hash_ids":[1,2]}"#,
    );
    let info = Info::of(&[parsed(&twice).unwrap()]);
    assert_eq!((info.ceiling_pct, info.ceiling_tokens_pct), (50.0, 25.0));
    assert_eq!(info.unique_tokens, 128);
}

fn durations() -> impl Strategy<Value = Duration> {
    (0_u64..4_000_000_000).prop_map(Duration::from_micros)
}

fn requests(at: Duration) -> impl Strategy<Value = Vec<Request>> {
    let one = (
        (durations(), any::<bool>(), prop::option::of("[a-z]{1,4}"), 0_u32..3000),
        (prop::collection::vec((0_u64..50, 0_u32..9), 0..6), prop::option::of(0_usize..40)),
        ("[a-z_]{0,5}", prop::collection::vec("[a-z]{1,3}", 0..3)),
        (prop::option::of(durations()), prop::option::of(durations()), prop::option::of(durations())),
    );
    prop::collection::vec(one, 0..8).prop_map(move |all| {
        let mut made: Vec<Request> = Vec::new();
        for (
            (later, streamed, model, output_tokens),
            (runs, keep),
            (stop, types),
            (took, first_token, thought),
        ) in all
        {
            let before = made.last().map(|r| r.blocks.clone()).unwrap_or_default();
            let mut blocks = keep.map(|k| before.first(k as u32)).unwrap_or_default();
            for (start, count) in runs {
                blocks.push(start, count).unwrap();
            }
            made.push(Request {
                at: at + later,
                streamed,
                model,
                input_tokens: blocks.len() * 16 + 1,
                output_tokens,
                blocks,
                stop,
                input_types: types.clone(),
                output_types: types,
                took,
                first_token,
                thought,
            });
        }
        made
    })
}

fn streams() -> impl Strategy<Value = Vec<Stream>> {
    let agent = (durations(), prop::option::of(durations()), prop::option::of("[a-z]{1,5}"), 0_usize..9)
        .prop_flat_map(|(at, lasted, kind, after)| {
            let agent = Agent {
                id: "agent".to_owned(),
                status: kind.clone(),
                kind,
                at,
                lasted,
                after,
                models: vec!["m".to_owned()],
                tool_tokens: 3,
                system_tokens: 0,
            };
            requests(at).prop_map(move |requests| Stream { agent: Some(agent.clone()), requests })
        });
    (requests(Duration::ZERO), prop::collection::vec(agent, 0..4)).prop_map(|(own, mut agents)| {
        let count = own.len();
        agents.iter_mut().filter_map(|s| s.agent.as_mut()).for_each(|a| a.after = a.after.min(count));
        agents.sort_by_key(|s| s.agent.as_ref().map(|a| a.after));
        std::iter::once(Stream { agent: None, requests: own }).chain(agents).collect()
    })
}

proptest! {
    #[test]
    fn the_run_length_form_keeps_everything(streams in streams(), global in any::<bool>()) {
        let session = Session {
            id: "s".to_owned(),
            models: vec!["m".to_owned()],
            block_tokens: 16,
            scope: if global { Scope::Global } else { Scope::Local },
            tool_tokens: 7,
            system_tokens: 9,
            streams,
        };
        prop_assert_eq!(parsed(&write_line(&session)).unwrap(), session);
    }
}
