//! Two nodes in one process, over real sockets: joining, telling, fetching, and what happens when a cable is bad.
//!
//! A [`Proxy`] stands where the cable is: it can flip a byte, hold everything back, or cut. Nothing here measures
//! time; the silence after which a node counts as gone is a minute where a test wants to see that something else
//! ended a wait.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic like tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use spark_kv::base::block::{BlockHash, GroupId, Namespace, Rank, RowItem, RowKey, Space};
use spark_kv::base::clock::Clock;
use spark_kv::base::fault::Code;
use spark_kv::base::frame::{Outcome, PROTOCOL};
use spark_kv::base::geometry::{Group, GroupKind, Hello};
use spark_kv::base::rows::{AreaId, Rows};
use spark_kv::base::shm::Mapping;
use spark_kv::base::units::Bytes;
use spark_kv::cluster::{
    Cluster, Error, Forgotten, MemberState, Options, PeerChange, SeenAs, Sharing, SpaceFacts,
};
use spark_kv::meter::Meter;
use spark_kv::settings::Io;
use spark_kv::store::{self, DiskKind, Mem, Store};
use spark_kv::tasks::{Kind, Tasks};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};

const ROW: u32 = 8192;
/// A row and its head.
const ON_WIRE: u64 = ROW as u64 + 122;
const MINUTE: Duration = Duration::from_secs(60);

fn space() -> Space {
    Space { namespace: Namespace([4; 32]), rank: Rank::ONLY }
}

fn facts(vllm: &str) -> SpaceFacts {
    let what = [("vllm", vllm), ("hash seed", "0")].map(|(k, v)| (k.to_owned(), v.to_owned()));
    SpaceFacts { space: space(), what: BTreeMap::from(what) }
}

fn key(n: u32) -> RowKey {
    let mut hash = [9; 32];
    hash[..4].copy_from_slice(&n.to_le_bytes());
    RowKey { hash: BlockHash(hash), group: GroupId(0) }
}

fn items(which: std::ops::Range<u32>) -> Vec<RowItem> {
    which.clone().map(|n| RowItem { key: key(n), position: (n + 1) * 16, row: n - which.start }).collect()
}

fn payload(n: u32) -> Vec<u8> {
    (0..ROW).map(|i| (i.wrapping_mul(31) ^ n.wrapping_mul(7919) ^ (i >> 8)) as u8).collect()
}

fn area(count: u32) -> Arc<Rows> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let (_, fd) = Mapping::anonymous("rows", (count * ROW) as usize).unwrap();
    let hello = Hello {
        protocol: PROTOCOL,
        plugin: "1".into(),
        vllm: "0.32.0".into(),
        pid: 1,
        engine_id: "e".into(),
        model: "/m".into(),
        rank: 0,
        ranks: 1,
        rows: count,
        row_bytes: ROW,
        hash_unit: 16,
        hash_algorithm: "sha256_cbor".into(),
        hash_seed: "0".into(),
        groups: vec![Group { kind: GroupKind::FullAttention, tokens_per_row: 16, covered: vec![(0, ROW)] }],
        interchange: BTreeMap::new(),
    };
    assert_eq!(hello.check(), Ok(()));
    Rows::attach(AreaId(NEXT.fetch_add(1, Ordering::Relaxed)), space(), &hello, &fd).unwrap()
}

/// What outlives a restart.
struct Home {
    name: &'static str,
    folder: tempfile::TempDir,
    silence: Duration,
    seen_as: SeenAs,
    sharing: Sharing,
    capacity: Bytes,
    encrypt: bool,
}

struct Node {
    cluster: Cluster,
    store: Store,
    tasks: Tasks,
    meter: Meter,
}

impl Home {
    fn new(name: &'static str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self {
            name,
            folder,
            silence: MINUTE,
            seen_as: SeenAs::default(),
            sharing: Sharing::default(),
            capacity: Bytes::mib(32),
            encrypt: false,
        }
    }

    fn identity(&self) -> PathBuf {
        self.folder.path().join("identity")
    }

    async fn try_start(&self, generation: u64, join: Option<String>) -> Result<Node, Error> {
        let (tasks, meter) = (Tasks::new(), Meter::new());
        let options = store::Options {
            folder: self.folder.path().join("segments"),
            capacity: self.capacity,
            segment: Bytes::mib(4),
            io: Io::Auto,
            queue_depth: 8,
        };
        let sealing = store::Sealing { keys: Some(self.folder.path().join("keys")), encrypt: self.encrypt };
        let disk = DiskKind::Mem(Mem::new());
        let (store, _) = Store::open_sealed(options, &sealing, disk, Clock::real(), &meter).unwrap();
        let options = Options {
            name: self.name.into(),
            identity: self.identity(),
            control: "127.0.0.1:0".into(),
            data: vec!["127.0.0.1:0".into()],
            rails: Vec::new(),
            seen_as: self.seen_as.clone(),
            join,
            silence: self.silence,
            serve_memory: Bytes::kib(256),
            carrier: spark_kv::cluster::Carrier::default(),
            sharing: self.sharing,
            generation,
        };
        let cluster = Cluster::start(options, store.clone(), Clock::real(), &tasks, &meter).await?;
        cluster.set_space(Some(facts("0.32.0")));
        Ok(Node { cluster, store, tasks, meter })
    }

    async fn start(&self, generation: u64, join: Option<String>) -> Node {
        self.try_start(generation, join).await.unwrap()
    }
}

impl Node {
    async fn hold(&self, which: std::ops::Range<u32>) {
        self.hold_for("", which).await;
    }

    async fn hold_for(&self, owner: &str, which: std::ops::Range<u32>) {
        let rows = area(which.end - which.start);
        let items = items(which);
        for item in &items {
            let n = u32::from_le_bytes(item.key.hash.0[..4].try_into().unwrap());
            rows.fill(item.row, |row| row.copy_from_slice(&payload(n)));
        }
        self.store.attach(&rows).await.unwrap();
        assert!(self.store.put_of(owner.into(), &rows, items).await.iter().all(|o| o.is_ok()));
        self.store.detach(rows.id).await;
    }

    /// What the other nodes are known to hold, as a subscriber learns it, once `enough` is satisfied.
    async fn learns(&self, enough: impl Fn(&BTreeSet<RowKey>) -> bool) -> BTreeSet<RowKey> {
        let (held, mut changes) = self.cluster.subscribe(space());
        let mut held: BTreeSet<RowKey> = held.into_iter().collect();
        while !enough(&held) {
            match changes.recv().await.unwrap() {
                PeerChange::Added(_, key) => assert!(held.insert(key)),
                PeerChange::Removed(_, key) => assert!(held.remove(&key)),
                PeerChange::Gone => held.clear(),
            }
        }
        held
    }

    fn is_connected(&self) -> bool {
        self.cluster.members().iter().any(|m| m.state == MemberState::Connected)
    }

    fn causes(&self, code: Code) -> Vec<String> {
        self.cluster.faults().into_iter().filter(|f| f.code == code).map(|f| f.cause).collect()
    }

    fn count(&self, series: &str) -> u64 {
        let text = self.meter.text();
        let line = text.lines().find(|l| l.starts_with(&format!("sparkkv_{series} ")));
        line.unwrap_or_else(|| panic!("{series} in {text}")).rsplit(' ').next().unwrap().parse().unwrap()
    }

    async fn end(self) {
        assert_eq!(self.tasks.stop(Duration::from_secs(10)).await, 0, "everything ends when asked");
        self.store.close().await;
    }
}

/// Waits for something that has no event of its own.
async fn until(what: &str, is: impl Fn() -> bool) {
    for _ in 0..10_000 {
        if is() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    panic!("{what} did not come about");
}

async fn joined(a: &Home, b: &Home) -> (Node, Node) {
    let first = a.start(1, None).await;
    let second = b.start(1, Some(first.cluster.invite())).await;
    until("a session", || first.is_connected() && second.is_connected()).await;
    (first, second)
}

/// A cable between two nodes that can be bad. Bytes are counted from the serving side to the other.
#[derive(Clone)]
struct Proxy {
    address: String,
    to: Arc<Mutex<String>>,
    /// Position of a byte that arrives flipped.
    flip: Arc<AtomicU64>,
    /// Bytes that pass, over all connections; then nothing moves until there are more.
    pass: watch::Sender<u64>,
    passed: Arc<AtomicU64>,
    cut: Arc<Notify>,
}

impl Proxy {
    async fn start(tasks: &Tasks) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = Self {
            address: listener.local_addr().unwrap().to_string(),
            to: Arc::default(),
            flip: Arc::new(AtomicU64::new(u64::MAX)),
            pass: watch::channel(u64::MAX).0,
            passed: Arc::default(),
            cut: Arc::default(),
        };
        let (worker, all) = (proxy.clone(), tasks.clone());
        tasks.spawn(Kind::Chore, "proxy", async move {
            loop {
                let (from, _) = listener.accept().await.unwrap();
                let address = worker.to.lock().clone();
                let Ok(to) = TcpStream::connect(address).await else { continue };
                let worker = worker.clone();
                all.spawn(Kind::Chore, "proxied", async move {
                    tokio::select! {
                        () = worker.cut.notified() => {}
                        () = worker.carry(from, to) => {}
                    }
                });
            }
        });
        proxy
    }

    async fn carry(&self, from: TcpStream, to: TcpStream) {
        let ((mut from_read, mut from_write), (mut to_read, mut to_write)) =
            (from.into_split(), to.into_split());
        let there = tokio::io::copy(&mut from_read, &mut to_write);
        let back = async {
            let mut buffer = vec![0; 4096];
            let mut pass = self.pass.subscribe();
            loop {
                let passed = self.passed.load(Ordering::SeqCst);
                let room = *pass.wait_for(|most| *most > passed).await.unwrap() - passed;
                let most = buffer.len().min(usize::try_from(room).unwrap_or(usize::MAX));
                let Ok(n @ 1..) = to_read.read(&mut buffer[..most]).await else { return };
                let flip = self.flip.load(Ordering::SeqCst);
                if let Some(byte) =
                    flip.checked_sub(passed).and_then(|at| buffer[..n].get_mut(usize::try_from(at).ok()?))
                {
                    *byte ^= 0x10;
                }
                self.passed.store(passed + n as u64, Ordering::SeqCst);
                if from_write.write_all(&buffer[..n]).await.is_err() {
                    return;
                }
            }
        };
        tokio::select! { _ = there => {}, () = back => {} }
    }

    fn allow(&self, more: u64) {
        self.pass.send_replace(self.passed.load(Ordering::SeqCst).saturating_add(more));
    }
}

/// Two nodes; the first one's rows come over a cable.
async fn over_a_cable(tasks: &Tasks) -> (Node, Node, Proxy) {
    let proxy = Proxy::start(tasks).await;
    let (mut a, b) = (Home::new("a"), Home::new("b"));
    a.seen_as.data = Some(proxy.address.clone());
    let first = a.start(1, None).await;
    *proxy.to.lock() = first.cluster.data_addresses()[0].clone();
    let second = b.start(1, Some(first.cluster.invite())).await;
    first.hold(0..200).await;
    second.learns(|held| held.len() == 200).await;
    (first, second, proxy)
}

async fn end(nodes: [Node; 2]) {
    for node in nodes {
        node.end().await;
    }
}

fn check_rows(rows: &Rows, outcomes: &[Outcome], which: std::ops::Range<u32>) {
    for (item, outcome) in items(which.clone()).iter().zip(outcomes) {
        if *outcome == Outcome::FromPeer {
            let n = which.start + item.row;
            rows.look(item.row, |row| assert!(row == payload(n), "row {n} is not what was stored"));
        }
    }
}

#[tokio::test]
async fn a_node_joins_by_a_token_and_both_learn_and_fetch_what_the_other_holds() {
    let (a, b) = (Home::new("a"), Home::new("b"));
    let first = a.start(1, None).await;
    first.hold(0..150).await;
    let second = b.start(1, Some(first.cluster.invite())).await;
    second.hold(500..520).await;
    assert_eq!(second.learns(|held| held.len() == 150).await, (0..150).map(key).collect());
    first.hold(150..200).await;
    assert_eq!(second.learns(|held| held.len() == 200).await, (0..200).map(key).collect());
    assert_eq!(first.learns(|held| held.len() == 20).await, (500..520).map(key).collect());

    let rows = area(200);
    let outcomes = second.cluster.fetch(&rows, items(0..200), None).await;
    assert_eq!(outcomes, vec![Outcome::FromPeer; 200]);
    check_rows(&rows, &outcomes, 0..200);
    let back = area(21);
    let outcomes = first.cluster.fetch(&back, items(500..521), None).await;
    assert_eq!(outcomes[..20], [Outcome::FromPeer; 20]);
    assert_eq!(outcomes[20], Outcome::Failed, "nobody holds it");
    check_rows(&back, &outcomes, 500..521);
    assert_eq!(second.count("transfer_received_rows_total"), 200);
    assert_eq!(first.count("transfer_sent_bytes_total"), 200 * u64::from(ROW));
    assert_eq!(second.count("cluster_resyncs_total"), 0);

    let [member] = &first.cluster.members()[..] else { panic!() };
    assert_eq!((member.name.as_str(), member.id.clone(), member.keys), ("b", second.cluster.id(), 20));
    second.cluster.tell(serde_json::json!({"load": 3}));
    assert!(first.cluster.faults().is_empty() && second.cluster.faults().is_empty());
    end([first, second]).await;
}

#[tokio::test]
async fn rows_that_a_node_loses_are_unlearned() {
    let (first, second) = joined(&Home::new("a"), &Home::new("b")).await;
    // Capacity is 32 MiB: some have to go.
    for from in (0..5000).step_by(500) {
        first.hold(from..from + 500).await;
    }
    let held = first.store.subscribe(space()).0.into_iter().map(|(key, _)| key).collect::<BTreeSet<_>>();
    assert!(held.len() > 1000 && held.len() < 5000, "{}", held.len());
    second.learns(|known| *known == held).await;
    end([first, second]).await;
}

#[tokio::test]
async fn a_note_reaches_the_other_node() {
    let (mut a, mut b) = (Home::new("a"), Home::new("b"));
    (a.silence, b.silence) = (Duration::from_secs(2), Duration::from_secs(2));
    let (first, second) = joined(&a, &b).await;
    let note = serde_json::json!({"load": 3});
    second.cluster.tell(note.clone());
    until("the note", || first.cluster.members()[0].note == note).await;
    second.cluster.tell(serde_json::json!("x".repeat(100_000)));
    second.cluster.tell(serde_json::json!({"load": 4}));
    until("the next one", || first.cluster.members()[0].note["load"] == 4).await;
    end([first, second]).await;
}

#[tokio::test]
async fn a_wrong_token_and_a_used_one_are_refused_said_and_counted() {
    let (a, b, c) = (Home::new("a"), Home::new("b"), Home::new("c"));
    let first = a.start(1, None).await;
    let token = first.cluster.invite();
    let wrong = format!("{}{}", &token[..token.len() - 4], "0000");
    let second = b.start(1, Some(wrong)).await;
    until("the refusal", || !second.causes(Code::JoinRefused).is_empty()).await;
    assert!(second.causes(Code::JoinRefused)[0].contains("not one of this node's"));
    assert_eq!(first.count("cluster_joins_refused_total{reason=\"unknown\"}"), 1);
    assert!(first.cluster.members().is_empty() && second.cluster.members().is_empty());
    second.end().await;

    let second = b.start(2, Some(token.clone())).await;
    until("a session", || second.is_connected()).await;
    assert!(second.causes(Code::JoinRefused).is_empty());
    let third = c.start(1, Some(token)).await;
    until("the refusal", || !third.causes(Code::JoinRefused).is_empty()).await;
    assert!(third.causes(Code::JoinRefused)[0].contains("used already"));
    assert_eq!(first.count("cluster_joins_refused_total{reason=\"used\"}"), 1);
    third.end().await;
    end([first, second]).await;

    let error = b.try_start(3, Some("spark1-nonsense".into())).await.err().unwrap().to_string();
    assert!(error.contains("2 of its 4 parts"), "{error}");
}

#[tokio::test]
async fn a_token_for_another_nodes_key_is_not_shown_to_whoever_answers() {
    let (a, b, c) = (Home::new("a"), Home::new("b"), Home::new("c"));
    let (first, other) = (a.start(1, None).await, c.start(1, None).await);
    let token = first.cluster.invite().replace(&first.cluster.id(), &other.cluster.id());
    let second = b.start(1, Some(token)).await;
    until("the refusal", || !second.causes(Code::JoinRefused).is_empty()).await;
    assert!(second.causes(Code::JoinRefused)[0].contains("its key differs"));
    other.end().await;
    end([first, second]).await;
}

#[tokio::test]
async fn somebody_else_at_one_address_of_a_token_does_not_end_the_search() {
    let (a, b, c) = (Home::new("a"), Home::new("b"), Home::new("c"));
    let (first, other) = (a.start(1, None).await, c.start(1, None).await);
    let right = first.cluster.control_address();
    let both = format!("{},{right}", other.cluster.control_address());
    let second = b.start(1, Some(first.cluster.invite().replace(right, &both))).await;
    until("the session", || first.is_connected() && second.is_connected()).await;
    assert!(other.cluster.members().is_empty() && second.causes(Code::JoinRefused).is_empty());
    other.end().await;
    end([first, second]).await;
}

#[tokio::test]
async fn after_restarts_nodes_find_each_other_by_their_keys_also_at_new_ports() {
    let (a, b) = (Home::new("a"), Home::new("b"));
    let (first, second) = joined(&a, &b).await;
    let token = first.cluster.invite();
    let keys = (first.cluster.id(), second.cluster.id());
    second.end().await;
    until("the other is gone", || !first.is_connected()).await;
    // The same command line as at the first start: the token is of no effect, and not used up.
    let second = b.start(2, Some(token)).await;
    until("a session", || first.is_connected() && second.is_connected()).await;
    assert_eq!(first.cluster.members()[0].generation, 2);
    first.end().await;
    until("the other is gone", || !second.is_connected()).await;
    let first = a.start(5, None).await;
    until("a session", || first.is_connected() && second.is_connected()).await;
    assert_eq!((first.cluster.id(), second.cluster.id()), keys);
    first.hold(0..10).await;
    second.learns(|held| held.len() == 10).await;
    let rows = area(10);
    assert_eq!(second.cluster.fetch(&rows, items(0..10), None).await, [Outcome::FromPeer; 10]);
    let files: Vec<_> = std::fs::read_dir(a.identity()).unwrap().map(|f| f.unwrap().file_name()).collect();
    assert_eq!(files.len(), 2, "{files:?}");
    check_private(&a.identity());
    end([first, second]).await;
}

fn check_private(folder: &Path) {
    use std::os::unix::fs::PermissionsExt;
    for file in std::fs::read_dir(folder).unwrap() {
        let mode = file.unwrap().metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}

#[tokio::test]
async fn nodes_that_dial_each_other_at_the_same_moment_end_up_with_one_session() {
    let tasks = Tasks::new();
    // Addresses that stay over restarts, as ports do outside of tests.
    let (at_a, at_b) = (Proxy::start(&tasks).await, Proxy::start(&tasks).await);
    let (mut a, mut b) = (Home::new("a"), Home::new("b"));
    a.seen_as.control = Some(at_a.address.clone());
    b.seen_as.control = Some(at_b.address.clone());
    for generation in 1..8 {
        let first = a.start(generation, None).await;
        *at_a.to.lock() = first.cluster.control_address().to_owned();
        let join = (generation == 1).then(|| first.cluster.invite());
        let second = b.start(generation, join).await;
        *at_b.to.lock() = second.cluster.control_address().to_owned();
        first.hold(0..10).await;
        second.hold(50..60).await;
        first.learns(|held| held.len() == 10).await;
        second.learns(|held| held.len() == 10).await;
        let rows = area(10);
        // A session that is replaced meanwhile takes neither the index nor the rails with it.
        assert_eq!(second.cluster.fetch(&rows, items(0..10), None).await, [Outcome::FromPeer; 10]);
        assert_eq!(first.cluster.fetch(&rows, items(50..60), None).await, [Outcome::FromPeer; 10]);
        assert!(first.is_connected() && second.is_connected());
        end([first, second]).await;
    }
    tasks.stop(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn different_facts_are_named_on_both_nodes_and_no_key_is_used() {
    let (first, second) = joined(&Home::new("a"), &Home::new("b")).await;
    first.hold(0..5).await;
    second.learns(|held| held.len() == 5).await;
    second.cluster.set_space(Some(facts("0.33.0")));
    until("both say it", || {
        !first.causes(Code::PeerDiffers).is_empty() && !second.causes(Code::PeerDiffers).is_empty()
    })
    .await;
    assert_eq!(first.causes(Code::PeerDiffers), ["b: vllm is 0.32.0 here and 0.33.0 there"]);
    assert_eq!(second.causes(Code::PeerDiffers), ["a: vllm is 0.33.0 here and 0.32.0 there"]);
    assert!(second.cluster.subscribe(space()).0.is_empty());
    let rows = area(5);
    assert_eq!(second.cluster.fetch(&rows, items(0..5), None).await, [Outcome::Failed; 5]);
    second.cluster.set_space(None);
    until("nothing differs", || first.cluster.faults().is_empty()).await;
    second.cluster.set_space(Some(facts("0.32.0")));
    second.learns(|held| held.len() == 5).await;
    assert_eq!(second.cluster.fetch(&rows, items(0..5), None).await, [Outcome::FromPeer; 5]);
    end([first, second]).await;
}

#[tokio::test]
async fn a_byte_flipped_on_the_wire_is_never_accepted() {
    let tasks = Tasks::new();
    let (first, second, proxy) = over_a_cable(&tasks).await;
    let rows = area(200);
    // Row 100 of a fetch, in the middle of its payload.
    let begin = proxy.passed.load(Ordering::SeqCst);
    proxy.flip.store(begin + 100 * ON_WIRE + 4000, Ordering::SeqCst);
    let outcomes = second.cluster.fetch(&rows, items(0..200), None).await;
    let failed: Vec<usize> = (0..200).filter(|&n| outcomes[n] == Outcome::Failed).collect();
    assert_eq!(failed, [100]);
    check_rows(&rows, &outcomes, 0..200);
    assert_eq!(second.count("transfer_rows_failed_total{reason=\"checksum\"}"), 1);
    // In the head of a row: what follows cannot be read any more.
    let begin = proxy.passed.load(Ordering::SeqCst);
    proxy.flip.store(begin + 10 * ON_WIRE + 20, Ordering::SeqCst);
    let outcomes = second.cluster.fetch(&rows, items(0..200), None).await;
    assert_eq!(outcomes[..10], [Outcome::FromPeer; 10]);
    assert_eq!(outcomes[10], Outcome::Failed);
    check_rows(&rows, &outcomes, 0..200);
    end([first, second]).await;
    tasks.stop(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn a_cable_cut_in_the_middle_of_a_fetch_ends_it_at_once_and_it_mends_itself() {
    let tasks = Tasks::new();
    let (first, second, proxy) = over_a_cable(&tasks).await;
    let rows = area(200);
    proxy.allow(50 * ON_WIRE + 1000);
    let (outcomes, ()) = tokio::join!(second.cluster.fetch(&rows, items(0..200), None), async {
        let all = *proxy.pass.borrow();
        until("50 rows", || proxy.passed.load(Ordering::SeqCst) == all).await;
        until("they are taken", || second.count("transfer_received_rows_total") == 50).await;
        proxy.cut.notify_waiters();
    });
    assert_eq!(outcomes[..50], [Outcome::FromPeer; 50]);
    assert_eq!(outcomes[50..], [Outcome::Failed; 150]);
    check_rows(&rows, &outcomes, 0..200);
    assert!(second.is_connected(), "control has its own connection");
    proxy.pass.send_replace(u64::MAX);
    until("the rail is back", || second.count("transfer_rails") == 1).await;
    let outcomes = second.cluster.fetch(&rows, items(0..200), None).await;
    assert_eq!(outcomes, vec![Outcome::FromPeer; 200]);
    end([first, second]).await;
    tasks.stop(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn a_node_that_goes_in_the_middle_of_a_fetch_ends_it_at_once() {
    let tasks = Tasks::new();
    let (first, second, proxy) = over_a_cable(&tasks).await;
    let rows = area(200);
    proxy.allow(20 * ON_WIRE);
    let (outcomes, ()) = tokio::join!(second.cluster.fetch(&rows, items(0..200), None), async {
        until("20 rows", || second.count("transfer_received_rows_total") == 20).await;
        first.end().await;
    });
    assert_eq!(outcomes[..20], [Outcome::FromPeer; 20]);
    assert_eq!(outcomes[20..], [Outcome::Failed; 180]);
    until("it is forgotten", || second.cluster.subscribe(space()).0.is_empty()).await;
    second.end().await;
    tasks.stop(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn after_a_deadline_nothing_is_accepted_and_nothing_is_written() {
    let tasks = Tasks::new();
    let (first, second, proxy) = over_a_cable(&tasks).await;
    let clock = Clock::real();
    let rows = area(200);
    let past = second.cluster.fetch(&rows, items(0..200), Some(clock.now())).await;
    assert_eq!(past, vec![Outcome::Failed; 200]);
    proxy.allow(30 * ON_WIRE + 5000);
    // The cluster's clock began a little before this one, so its deadline is a little sooner.
    // And it is sooner than a silent cable is given up.
    let deadline = clock.now().plus(Duration::from_millis(800));
    let outcomes = second.cluster.fetch(&rows, items(0..200), Some(deadline)).await;
    assert_eq!(outcomes[..30], [Outcome::FromPeer; 30]);
    assert_eq!(outcomes[30..], [Outcome::Failed; 170]);
    check_rows(&rows, &outcomes, 0..200);
    assert_eq!(second.count("transfer_rows_failed_total{reason=\"deadline\"}"), 170);
    for n in 30..200 {
        rows.fill(n, |row| row.fill(0xAA));
    }
    // What was on its way comes now, and then rows of another fetch on the same connection.
    proxy.pass.send_replace(u64::MAX);
    let others = area(10);
    assert_eq!(second.cluster.fetch(&others, items(0..10), None).await, [Outcome::FromPeer; 10]);
    for n in 30..200 {
        rows.look(n, |row| assert!(row.iter().all(|&b| b == 0xAA), "row {n} was written late"));
    }
    end([first, second]).await;
    tasks.stop(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn a_silent_cable_makes_both_forget_each_other_and_its_mending_brings_all_back() {
    let tasks = Tasks::new();
    let proxy = Proxy::start(&tasks).await;
    let (mut a, mut b) = (Home::new("a"), Home::new("b"));
    (a.silence, b.silence) = (Duration::from_millis(600), Duration::from_millis(600));
    a.seen_as.control = Some(proxy.address.clone());
    // The way back goes to a port where nobody listens: only the cable connects them.
    b.seen_as.control = Some("127.0.0.1:1".into());
    let first = a.start(1, None).await;
    let real = first.cluster.invite();
    assert!(real.contains(&proxy.address));
    *proxy.to.lock() = first.cluster.control_address().to_owned();
    let second = b.start(1, Some(real)).await;
    first.hold(0..5).await;
    second.learns(|held| held.len() == 5).await;
    proxy.allow(0);
    second.learns(BTreeSet::is_empty).await;
    until("both say it", || {
        !first.causes(Code::PeerGone).is_empty() && !second.causes(Code::PeerGone).is_empty()
    })
    .await;
    assert!(second.causes(Code::PeerGone)[0].starts_with(&format!("a at {}", proxy.address)));
    proxy.pass.send_replace(u64::MAX);
    second.learns(|held| held.len() == 5).await;
    until("a session", || first.is_connected()).await;
    assert!(second.causes(Code::PeerGone).is_empty());
    end([first, second]).await;
    tasks.stop(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn relayed_streams_reach_the_other_node_both_ways_and_only_known_ones() {
    let (first, second) = joined(&Home::new("a"), &Home::new("b")).await;
    for (from, to, name) in [(&first, &second, "b"), (&second, &first, "a")] {
        let mut incoming = to.cluster.relays().unwrap();
        let by_id = from.cluster.dial(&to.cluster.id()).await;
        assert!(by_id.is_ok());
        drop((by_id, incoming.recv().await.unwrap()));
        let (out, into) = tokio::join!(from.cluster.dial(name), incoming.recv());
        let (mut out, mut into) = (out.unwrap(), into.unwrap());
        let (said, heard) = tokio::join!(
            async {
                out.write_all(b"POST /v1/completions").await.unwrap();
                out.shutdown().await.unwrap();
                let mut answer = String::new();
                out.read_to_string(&mut answer).await.unwrap();
                answer
            },
            async {
                let mut question = String::new();
                into.read_to_string(&mut question).await.unwrap();
                into.write_all(b"200 OK").await.unwrap();
                into.shutdown().await.unwrap();
                question
            }
        );
        assert_eq!((said.as_str(), heard.as_str()), ("200 OK", "POST /v1/completions"));
    }
    assert_eq!(first.cluster.dial("nobody").await.unwrap_err().kind(), std::io::ErrorKind::NotFound);
    second.end().await;
    assert!(first.cluster.dial("b").await.is_err());
    first.end().await;
}

fn chain(which: std::ops::Range<u32>) -> Vec<(RowKey, u32)> {
    items(which).into_iter().map(|item| (item.key, item.position)).collect()
}

impl Node {
    fn copied(&self, why: &str) -> u64 {
        self.count(&format!("cluster_copied_rows_total{{why=\"{why}\"}}"))
    }

    fn holds(&self, which: std::ops::Range<u32>) -> Vec<u32> {
        which.filter(|&n| self.store.holds(space(), &key(n))).collect()
    }
}

#[tokio::test]
async fn rows_that_requests_on_both_nodes_use_are_copied_and_no_others() {
    let (first, second) = joined(&Home::new("a"), &Home::new("b")).await;
    first.hold(0..30).await;
    second.learns(|held| held.len() == 30).await;
    second.cluster.set_rows(Some(area(4)));
    second.cluster.used(space(), None, &chain(0..30));
    second.cluster.used(space(), None, &chain(0..20));
    until("copies", || second.copied("used") == 20).await;
    assert_eq!(second.holds(0..30), (0..20).collect::<Vec<_>>());
    for n in 0..20 {
        let row = second.store.read(space(), key(n)).await.unwrap();
        assert!(row.payload == payload(n) && row.position == (n + 1) * 16, "row {n}");
    }
    // What is here now is not fetched any more, and not copied again; the other node learns of the copies.
    first.learns(|held| held.len() == 20).await;
    for _ in 0..3 {
        second.cluster.used(space(), None, &chain(0..20));
    }
    second.cluster.used(space(), None, &chain(20..21));
    until("the next one", || second.copied("used") == 21).await;
    assert_eq!(second.count("cluster_copied_bytes_total"), 21 * u64::from(ROW));
    assert_eq!((first.copied("used"), second.count("cluster_copies_failed_total")), (0, 0));
    end([first, second]).await;
}

#[tokio::test]
async fn copying_gives_way_to_a_load_and_goes_on_after_it() {
    let tasks = Tasks::new();
    let (first, second, proxy) = over_a_cable(&tasks).await;
    second.cluster.set_rows(Some(area(4)));
    proxy.allow(3 * ON_WIRE + 1000);
    for _ in 0..2 {
        second.cluster.used(space(), None, &chain(0..16));
    }
    until("three rows of a copy", || second.count("transfer_received_rows_total") == 3).await;
    let rows = area(10);
    let (outcomes, ()) = tokio::join!(second.cluster.fetch(&rows, items(100..110), None), async {
        until("it gives way", || second.count("cluster_copies_interrupted_total") == 1).await;
        assert_eq!(second.copied("used"), 0, "nothing of it was stored");
        proxy.pass.send_replace(u64::MAX);
    });
    assert_eq!(outcomes, [Outcome::FromPeer; 10]);
    check_rows(&rows, &outcomes, 100..110);
    until("the copies", || second.copied("used") == 16).await;
    for n in 0..16 {
        assert!(second.store.read(space(), key(n)).await.unwrap().payload == payload(n), "row {n}");
    }
    end([first, second]).await;
    tasks.stop(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn cold_rows_of_a_node_that_is_nearly_full_move_to_one_with_room() {
    let (mut a, b) = (Home::new("a"), Home::new("b"));
    a.capacity = Bytes::mib(17);
    let (first, second) = joined(&a, &b).await;
    let full = || {
        let (used, capacity) = first.store.usage();
        used * 100 >= capacity * 90
    };
    let mut held = 0;
    while !full() {
        first.hold(held..held + 100).await;
        held += 100;
        assert!(held < 10_000, "it is never full");
    }
    for node in [&first, &second] {
        node.cluster.set_rows(Some(area(4)));
    }
    until("rows that are taken over", || second.copied("offered") > 100).await;
    let moved = second.holds(0..held);
    for &n in &moved {
        assert!(second.store.read(space(), key(n)).await.unwrap().payload == payload(n), "row {n}");
    }
    // The first one goes on writing; what it drops is still known, at the other one.
    let dropped = || moved.iter().copied().find(|&n| !first.store.holds(space(), &key(n)));
    while dropped().is_none() {
        first.hold(held..held + 100).await;
        held += 100;
        assert!(held < 20_000, "it never drops what it offered");
    }
    let n = dropped().unwrap();
    first.learns(|known| known.contains(&key(n))).await;
    let rows = area(1);
    assert_eq!(first.cluster.fetch(&rows, items(n..n + 1), None).await, [Outcome::FromPeer]);
    assert!(first.count("cluster_offered_rows_total") > 0 && first.copied("offered") == 0);
    end([first, second]).await;
}

/// Nodes that seal, the first one small.
async fn that_seal() -> [Node; 2] {
    let (mut a, mut b) = (Home::new("a"), Home::new("b"));
    (a.encrypt, b.encrypt, a.capacity) = (true, true, Bytes::mib(17));
    let (first, second) = joined(&a, &b).await;
    for node in [&first, &second] {
        node.cluster.set_rows(Some(area(4)));
    }
    [first, second]
}

#[tokio::test]
async fn a_copy_of_a_sealed_row_belongs_to_whoever_used_it_here() {
    let [first, second] = that_seal().await;
    first.hold_for("ann", 0..20).await;
    second.learns(|held| held.len() == 20).await;
    let (bob, cid) = ("bob".into(), "cid".into());
    for _ in 0..2 {
        second.cluster.used(space(), None, &chain(15..20));
        second.cluster.used(space(), Some(&bob), &chain(0..10));
        second.cluster.used(space(), Some(&cid), &chain(10..12));
    }
    until("copies", || second.copied("used") == 12).await;
    assert_eq!(second.holds(0..20), (0..12).collect::<Vec<_>>(), "whose the others would be is not clear");
    for n in 0..12 {
        assert!(second.store.read(space(), key(n)).await.unwrap().payload == payload(n), "row {n}");
    }
    let gone = second.store.forget_owner("bob").await.unwrap();
    assert_eq!((gone.rows, second.holds(0..20)), (10, vec![10, 11]));
    assert!(second.store.forget_owner("ann").await.is_err(), "no key of hers came along");
    end([first, second]).await;
}

#[tokio::test]
async fn a_sealed_row_that_is_taken_over_stays_its_owners_and_goes_with_the_key_on_both_nodes() {
    let [first, second] = that_seal().await;
    let mut held = 0;
    while second.copied("offered") < 100 {
        let owner = if held % 200 == 0 { "ann" } else { "bob" };
        first.hold_for(owner, held..held + 100).await;
        held += 100;
        assert!(held < 20_000, "nothing is taken over");
        let (used, capacity) = first.store.usage();
        if used * 100 >= capacity * 90 {
            until("it is taken over", || second.copied("offered") >= 100).await;
        }
    }
    let is_anns = |n: &u32| n % 200 < 100;
    let before = second.holds(0..held);
    for &n in &before {
        assert!(second.store.read(space(), key(n)).await.unwrap().payload == payload(n), "row {n}");
    }
    // No more of them come meanwhile.
    first.cluster.set_rows(None);
    let told = first.cluster.forget_owner("ann").await;
    let [(name, Ok(gone))] = &told[..] else { panic!("{told:?}") };
    assert!(name == "b" && gone.keys == 1 && gone.rows > 0, "{told:?}");
    assert!(second.holds(0..held).iter().all(|n| !is_anns(n)), "rows of hers are left");
    assert!(second.holds(0..held).len() + gone.rows as usize >= before.len());
    let again = first.cluster.forget_owner("ann").await;
    assert_eq!(again[0].1, Ok(Forgotten::default()), "it knows her no more, and that is no trouble");
    second.end().await;
    until("it is gone", || first.cluster.members()[0].state == MemberState::Gone).await;
    let told = first.cluster.forget_owner("bob").await;
    assert!(told[0].1.as_ref().is_err_and(|why| why.contains("not connected")), "{told:?}");
    first.end().await;
}

#[tokio::test]
async fn what_is_turned_off_is_not_copied() {
    let (a, mut b) = (Home::new("a"), Home::new("b"));
    b.sharing = Sharing { copy: false, ..Sharing::default() };
    let (first, second) = joined(&a, &b).await;
    first.hold(0..10).await;
    second.hold(10..20).await;
    second.learns(|held| held.len() == 10).await;
    first.learns(|held| held.len() == 10).await;
    for node in [&first, &second] {
        node.cluster.set_rows(Some(area(4)));
    }
    for _ in 0..3 {
        second.cluster.used(space(), None, &chain(0..10));
    }
    for _ in 0..2 {
        first.cluster.used(space(), None, &chain(10..20));
    }
    until("copies where it is on", || first.copied("used") == 10).await;
    assert_eq!((second.copied("used"), second.holds(0..10)), (0, Vec::new()));
    end([first, second]).await;
}

#[tokio::test]
async fn a_node_that_is_forgotten_is_a_stranger_until_it_has_a_token() {
    let (mut a, b, mut c) = (Home::new("a"), Home::new("b"), Home::new("c"));
    (a.silence, c.silence) = (Duration::from_millis(600), Duration::from_millis(600));
    let (first, second) = joined(&a, &b).await;
    let third = c.start(1, Some(first.cluster.invite())).await;
    until("three", || first.cluster.members().iter().all(|m| m.state == MemberState::Connected)).await;
    second.hold(0..5).await;
    third.hold(0..7).await;
    first.learns(|held| held.len() == 7).await;
    third.end().await;
    until("it is missed", || !first.causes(Code::PeerGone).is_empty()).await;
    first.learns(|held| held.len() == 5).await;
    let error = first.cluster.forget("nobody").await.unwrap_err().to_string();
    assert!(error.contains("no node `nobody` is known"), "{error}");
    assert_eq!(first.cluster.forget("c").await.unwrap(), "c");
    assert!(first.causes(Code::PeerGone).is_empty());
    let names = |node: &Node| node.cluster.members().into_iter().map(|m| m.name).collect::<Vec<_>>();
    assert_eq!(names(&first), ["b"]);
    let third = c.start(2, None).await;
    until("it is refused", || third.cluster.faults().iter().any(|f| f.cause.contains("does not know you")))
        .await;
    assert!(first.count("cluster_joins_refused_total{reason=\"stranger\"}") > 0);
    third.end().await;
    // Over a restart too.
    first.end().await;
    let first = a.start(2, None).await;
    assert_eq!(names(&first), ["b"]);
    let third = c.start(3, Some(first.cluster.invite())).await;
    until("it is back", || third.is_connected() && names(&first).len() == 2).await;
    until("b found the new port", || second.is_connected()).await;
    // One that is connected can be forgotten as well, by its id.
    let id = second.cluster.id();
    assert_eq!(first.cluster.forget(&id[..8]).await.unwrap(), "b");
    until("the session ends", || !second.is_connected()).await;
    assert_eq!(names(&first), ["c"]);
    third.end().await;
    end([first, second]).await;
}

/// Where the node lives that is killed, its generation, and the token with which it joined.
const KILLED: [&str; 3] = ["KILLED_FOLDER", "KILLED_GENERATION", "KILLED_TOKEN"];
const KILLS: u64 = 50;
/// Rows that it may hold; the ones of the survivor come after them.
const ROWS: u32 = 2000;
const SURVIVORS: std::ops::Range<u32> = 10_000..10_100;

/// The other process of the test below, which starts it; by itself it does nothing.
#[test]
#[ignore = "a process that another test starts and kills"]
fn the_node_that_is_killed() {
    let [Ok(folder), Ok(generation), Ok(token)] = KILLED.map(std::env::var) else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(live_until_killed(PathBuf::from(folder), generation.parse().unwrap(), token));
}

async fn live_until_killed(folder: PathBuf, generation: u64, token: String) {
    let (tasks, meter) = (Tasks::new(), Meter::new());
    let options = store::Options {
        folder: folder.join("segments"),
        capacity: Bytes::mib(64),
        segment: Bytes::mib(1),
        io: Io::Auto,
        queue_depth: 8,
    };
    let (store, _) = Store::open(options, DiskKind::Real, Clock::real(), &meter).unwrap();
    let options = Options {
        name: "killed".into(),
        identity: folder.join("identity"),
        control: "127.0.0.1:0".into(),
        data: vec!["127.0.0.1:0".into()],
        rails: Vec::new(),
        seen_as: SeenAs::default(),
        join: Some(token),
        silence: Duration::from_secs(2),
        serve_memory: Bytes::kib(256),
        carrier: spark_kv::cluster::Carrier::default(),
        sharing: Sharing::default(),
        generation,
    };
    let cluster = Cluster::start(options, store.clone(), Clock::real(), &tasks, &meter).await.unwrap();
    cluster.set_space(Some(facts("0.32.0")));
    let node = Node { cluster, store, tasks, meter };
    let rows = area(20);
    for turn in 0_u32.. {
        let from = turn.wrapping_mul(7919) % (ROWS - 20);
        node.hold(from..from + 20).await;
        let from = SURVIVORS.start + turn % 80;
        let outcomes = node.cluster.fetch(&rows, items(from..from + 20), None).await;
        // A wrong row ends this process with another status than the kill.
        check_rows(&rows, &outcomes, from..from + 20);
    }
}

fn number(key: &RowKey) -> u32 {
    u32::from_le_bytes(key.hash.0[..4].try_into().unwrap())
}

/// Fetches some of what is known, and looks at every byte. How many came, and how many did not.
async fn fetch_known(node: &Node, rows: &Arc<Rows>, turn: usize) -> (u64, u64) {
    let known: Vec<u32> = node.cluster.subscribe(space()).0.iter().map(number).collect();
    if known.is_empty() {
        tokio::time::sleep(Duration::from_millis(2)).await;
        return (0, 0);
    }
    let numbers: Vec<u32> =
        (0..rows.count() as usize).map(|n| known[(turn * 37 + n * 11) % known.len()]).collect();
    let item = |(row, &n): (u32, &u32)| RowItem { key: key(n), position: (n + 1) * 16, row };
    let items: Vec<RowItem> = (0..).zip(&numbers).map(item).collect();
    let chain: Vec<(RowKey, u32)> = items.iter().map(|item| (item.key, item.position)).collect();
    node.cluster.used(space(), None, &chain);
    let outcomes = node.cluster.fetch(rows, items, Some(Clock::real().now().plus(MINUTE))).await;
    let mut came = 0;
    for ((row, n), outcome) in (0..).zip(numbers).zip(&outcomes) {
        if *outcome == Outcome::FromPeer {
            came += 1;
            rows.look(row, |row| assert!(row == payload(n), "row {n} is not what was stored"));
        }
    }
    (came, outcomes.len() as u64 - came)
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[tokio::test]
async fn a_process_killed_fifty_times_costs_rows_and_leaks_nothing() {
    use std::os::unix::process::ExitStatusExt;
    let mut home = Home::new("survivor");
    home.silence = Duration::from_secs(2);
    let folder = tempfile::tempdir().unwrap();
    let survivor = home.start(1, None).await;
    survivor.hold(SURVIVORS).await;
    survivor.cluster.set_rows(Some(area(4)));
    let token = survivor.cluster.invite();
    let child = |generation: u64| {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "the_node_that_is_killed", "--nocapture"]);
        for (name, value) in
            KILLED.iter().zip([folder.path().to_str().unwrap(), &generation.to_string(), &token])
        {
            command.env(name, value);
        }
        command.stdout(std::process::Stdio::null()).spawn().unwrap()
    };
    let kill = |mut child: std::process::Child| {
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(9), "it ended by itself before it was killed");
    };
    // The first life joins, in peace.
    let first = child(1);
    until("rows of it", || survivor.count("cluster_peer_keys") > 0).await;
    kill(first);
    until("it is gone", || !survivor.is_connected()).await;
    let before = descriptors();
    let rows = area(24);
    let (mut came, mut failed, mut turn, mut connected) = (0, 0, 0, 0);
    for life in 0..KILLS {
        let child = child(2 + life);
        // Every other life ends when it has given some rows, however long that takes; the others at any time, from
        // before they listen on.
        let gives = if life % 2 == 0 { rand::random_range(1..100) } else { 0 };
        let begun = tokio::time::Instant::now();
        let at_any_time = begun + Duration::from_millis(rand::random_range(20..500));
        let mut given = 0;
        while if gives > 0 { given < gives } else { tokio::time::Instant::now() < at_any_time } {
            let (some, others) = fetch_known(&survivor, &rows, turn).await;
            (came, failed, turn, given) = (came + some, failed + others, turn + 1, given + some);
            if some == 0 {
                // The other process needs the processor, and a node that is not there is asked in vain at once.
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            assert!(begun.elapsed() < Duration::from_secs(30), "life {life} gave {given} rows of {gives}");
        }
        connected += u64::from(survivor.is_connected());
        // In the middle of a fetch, where there is one.
        let (fetched, ()) = tokio::join!(fetch_known(&survivor, &rows, turn), async { kill(child) });
        (came, failed, turn) = (came + fetched.0, failed + fetched.1, turn + 1);
    }
    assert!(connected > KILLS / 4, "it was connected at {connected} of {KILLS} kills");
    assert!(came >= KILLS / 2 && failed > 0, "{came} rows came, {failed} did not");
    // The last life is let live: everything that it is known to hold comes.
    let last = child(2 + KILLS);
    until("it is back", || survivor.is_connected() && survivor.count("cluster_peer_keys") > 20).await;
    until("rails", || survivor.count("transfer_rails") > 0).await;
    let (came, failed) = fetch_known(&survivor, &rows, 0).await;
    assert_eq!((came, failed), (24, 0));
    kill(last);
    until("it is forgotten", || !survivor.is_connected() && survivor.count("cluster_peer_keys") == 0).await;
    assert!(survivor.cluster.subscribe(space()).0.is_empty());
    until("descriptors are given back", || descriptors() <= before).await;
    assert_eq!(survivor.count("transfer_rails"), 0);
    until("nothing holds the rows", || Arc::strong_count(&rows) == 1).await;
    assert_eq!(survivor.cluster.members().len(), 1, "fifty lives of one node");
    survivor.end().await;
}
