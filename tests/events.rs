//! What is heard of an engine's device cache against what it has: a mock engine that publishes as vLLM does, over real
//! sockets, and the listener that the node has.

#![expect(clippy::unwrap_used, reason = "helpers of tests, which fail by panicking")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser;
use spark_kv::engine::events::{Endpoints, Events, held};
use spark_kv::engine::{Phase, View};
use spark_kv::meter::Meter;
use spark_kv::mock::engine::{Ask, Event};
use spark_kv::mock::{self, Mock};
use spark_kv::tasks::Tasks;
use tokio::sync::watch;

const LIMIT: Duration = Duration::from_secs(30);

/// A device of so few blocks that prompts push each other out.
const SMALL: &str =
    r#""rows": 8, "row_bytes": 4096, "device_blocks": 64, "prefill_us_per_token": 1, "itl_us": 1"#;

struct Sockets {
    _folder: tempfile::TempDir,
    live: PathBuf,
    replay: PathBuf,
}

impl Sockets {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (live, replay) = (folder.path().join("events.sock"), folder.path().join("replay.sock"));
        Self { _folder: folder, live, replay }
    }

    fn clean(&self) {
        let gone = |path: &Path| drop(std::fs::remove_file(path));
        gone(&self.live);
        gone(&self.replay);
    }

    /// An engine with further knobs that publishes here, and keeps so many batches.
    async fn engine(&self, id: &str, knobs: &str, kept: usize, tasks: &Tasks) -> Mock {
        self.clean();
        let config = serde_json::json!({
            "enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv", "buffer_steps": kept,
            "endpoint": format!("ipc://{}", self.live.display()),
            "replay_endpoint": format!("ipc://{}", self.replay.display()),
        });
        let (config, shape) = (config.to_string(), format!("{{{SMALL}{knobs}}}"));
        let words = ["--engine-id", id, "--kv-events-config", &config, "--shape", &shape];
        Mock::start(&mock::Options::try_parse_from(words).unwrap(), tasks).await.unwrap()
    }
}

/// A listener, and who tells it which engine is ready.
struct Listener {
    events: Events,
    view: watch::Sender<View>,
    meter: Meter,
}

impl Listener {
    fn start(sockets: &Sockets, tasks: &Tasks) -> Self {
        let (meter, view) = (Meter::new(), watch::Sender::new(View::default()));
        let events = Events::new(&meter);
        events.follow(Endpoints::of_files(&sockets.live, &sockets.replay), view.subscribe(), tasks);
        Self { events, view, meter }
    }

    fn ready(&self, id: &str) {
        self.view.send_replace(View { phase: Phase::Ready, engine_id: id.into(), ..View::default() });
    }

    fn blocks(&self, id: &str) -> Option<BTreeSet<(u32, u64)>> {
        Some(self.events.device(id)?.blocks().collect())
    }

    /// Waits until it knows exactly what the engine has.
    async fn knows(&self, id: &str, mock: &Mock) {
        let mut last = None;
        for _ in 0..6000 {
            last = self.blocks(id);
            if last.as_ref() == Some(&truth(mock)) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("it believes {last:?} of {:?}", truth(mock));
    }

    fn count(&self, series: &str) -> u64 {
        let text = self.meter.text();
        let line =
            text.lines().find_map(|line| line.strip_prefix(&format!("sparkkv_{series} ")).map(str::to_owned));
        line.unwrap().parse::<f64>().unwrap() as u64
    }
}

fn truth(mock: &Mock) -> BTreeSet<(u32, u64)> {
    mock.engine.keys().iter().map(|key| (key.group.0, held::number(&key.hash))).collect()
}

async fn ask(mock: &Mock, seed: u32, tokens: u32) {
    let prompt = (0..tokens).map(|n| (n + 1).wrapping_mul(2_654_435_761).wrapping_add(seed) >> 4).collect();
    let ask = Ask { id: format!("r{seed}-{tokens}"), prompt, max_tokens: 3, to_the_limit: true };
    let mut events = mock.engine.submit(ask);
    loop {
        let event =
            tokio::time::timeout(LIMIT, events.recv()).await.expect("it hangs").expect("it ends early");
        if matches!(event, Event::End { .. }) {
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_heard_is_what_the_engine_has_in_every_form() {
    for (n, form) in [
        r#", "events": {"shape": "maps", "hashes": "bytes"}"#,
        r#", "events": {"shape": "maps", "hashes": "ints"}"#,
        r#", "events": {"shape": "arrays", "hashes": "ints"}"#,
        r#", "groups": "attention_and_state", "state_every": 2, "events": {"shape": "maps", "hashes": "bytes"}"#,
    ]
    .into_iter()
    .enumerate()
    {
        let (sockets, tasks, id) = (Sockets::new(), Tasks::new(), format!("engine-{n}"));
        let mock = sockets.engine(&id, form, 1000, &tasks).await;
        let listener = Listener::start(&sockets, &tasks);
        assert!(listener.blocks(&id).is_none(), "nobody is ready yet");
        listener.ready(&id);
        for seed in 0..6 {
            ask(&mock, seed, 400).await;
            listener.knows(&id, &mock).await;
        }
        assert!(truth(&mock).len() > 20, "{form}");
        assert!(listener.events.facts().stored > truth(&mock).len() as u64, "blocks were pushed out meanwhile");
        assert!(mock.engine.reset(), "nothing runs");
        ask(&mock, 9, 100).await;
        listener.knows(&id, &mock).await;
        tasks.stop(LIMIT).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_missed_is_asked_for() {
    let (sockets, tasks) = (Sockets::new(), Tasks::new());
    let mock = sockets.engine("one", r#", "events": {"drop_every": 3}"#, 1000, &tasks).await;
    let listener = Listener::start(&sockets, &tasks);
    ask(&mock, 1, 500).await;
    listener.ready("one");
    listener.knows("one", &mock).await;
    for seed in 2..12 {
        ask(&mock, seed, 300).await;
    }
    // Also when the last one is among those that were dropped.
    listener.knows("one", &mock).await;
    assert!(listener.count("events_gaps_total") > 2);
    assert!(listener.count("events_replays_total") > 3);
    tasks.stop(LIMIT).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_comes_late_knows_what_is_left_and_nothing_that_is_gone() {
    let (sockets, tasks) = (Sockets::new(), Tasks::new());
    let mock = sockets.engine("one", "", 3, &tasks).await;
    for seed in 0..8 {
        ask(&mock, seed, 400).await;
    }
    let listener = Listener::start(&sockets, &tasks);
    listener.ready("one");
    for _ in 0..6000 {
        if listener.blocks("one").is_some() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let believed = listener.blocks("one").expect("it is live");
    assert!(believed.is_subset(&truth(&mock)), "{believed:?}");
    assert!(believed.len() < truth(&mock).len(), "the older batches are gone");
    tasks.stop(LIMIT).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_engine_is_a_clean_slate_and_a_missing_one_is_waited_for() {
    let (sockets, tasks) = (Sockets::new(), Tasks::new());
    let listener = Listener::start(&sockets, &tasks);
    listener.ready("one");
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(listener.blocks("one").is_none(), "there is nobody");
    let first = Tasks::new();
    let mock = sockets.engine("one", "", 1000, &first).await;
    ask(&mock, 1, 500).await;
    listener.knows("one", &mock).await;
    first.stop(LIMIT).await;
    drop(mock);
    listener.view.send_replace(View::default());
    let second = Tasks::new();
    let mock = sockets.engine("two", "", 1000, &second).await;
    ask(&mock, 2, 200).await;
    listener.ready("two");
    listener.knows("two", &mock).await;
    assert!(listener.blocks("one").is_none(), "of the one that is gone nothing is believed");
    second.stop(LIMIT).await;
    tasks.stop(LIMIT).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_size_of_blocks_is_seen() {
    let (sockets, tasks) = (Sockets::new(), Tasks::new());
    let mock = sockets.engine("one", r#", "events": {"block_size": 99}"#, 1000, &tasks).await;
    let listener = Listener::start(&sockets, &tasks);
    listener.ready("one");
    ask(&mock, 1, 500).await;
    listener.knows("one", &mock).await;
    assert_eq!(listener.events.facts().block_size, 99);
    tasks.stop(LIMIT).await;
}
