//! The engine's door over a real Unix socket, with real shared memory: what is stored comes back byte for byte,
//! what breaks a rule ends the connection and nothing else, and no row is written after its job was answered.

#![expect(clippy::unwrap_used, reason = "helpers of tests, which fail by panicking")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest, Sha256};
use spark_kv::api::local::{Door, Fingerprint, Options, ROW_BUDGET_PERCENT};
use spark_kv::base::block::{BlockHash, GroupId, Namespace, RowItem, RowKey};
use spark_kv::base::clock::Clock;
use spark_kv::base::frame::{FromEngine, FromNode, Outcome, PROTOCOL, Sources};
use spark_kv::base::geometry::{Group, GroupKind, Hello};
use spark_kv::base::units::Bytes;
use spark_kv::cluster::{self, Cluster};
use spark_kv::meter::Meter;
use spark_kv::mock::client::{Area, DoorClient, Error};
use spark_kv::settings::Io;
use spark_kv::store::{self, DiskKind, Failure, Mem, Store};
use spark_kv::tasks::Tasks;

const ROW: u32 = 8192;
const ROWS: u32 = 64;

/// Nothing in these tests takes that long unless it hangs.
const LIMIT: Duration = Duration::from_secs(20);

fn key(n: u32) -> RowKey {
    RowKey { hash: BlockHash(Sha256::digest(n.to_le_bytes()).into()), group: GroupId(n % 2) }
}

fn item(n: u32, row: u32) -> RowItem {
    RowItem { key: key(n), position: 16 * (n + 1), row }
}

/// The bytes of row `n`: all of it for group 0, the first half for group 1 (see [`hello`]).
fn bytes(n: u32) -> Vec<u8> {
    let covered = if n.is_multiple_of(2) { ROW } else { ROW / 2 };
    let byte = |at: u32| (at.wrapping_mul(31) ^ n.wrapping_mul(2_654_435_761)).to_le_bytes()[1];
    let mut out: Vec<u8> = (0..covered).map(byte).collect();
    out.resize(ROW as usize, 0);
    out
}

fn hello(engine_id: &str) -> Hello {
    let group = |kind, covered| Group { kind, tokens_per_row: 16, covered: vec![(0, covered)] };
    Hello {
        protocol: PROTOCOL,
        plugin: "test".into(),
        vllm: "0".into(),
        pid: std::process::id(),
        engine_id: engine_id.into(),
        model: "test".into(),
        rank: 0,
        ranks: 1,
        rows: ROWS,
        row_bytes: ROW,
        hash_unit: 16,
        hash_algorithm: "sha256_cbor".into(),
        hash_seed: "0".into(),
        groups: vec![group(GroupKind::FullAttention, ROW), group(GroupKind::Mamba, ROW / 2)],
        interchange: BTreeMap::new(),
    }
}

/// A node's door in a folder of its own.
struct House {
    door: Door,
    socket: PathBuf,
    store: Store,
    cluster: Option<Cluster>,
    tasks: Tasks,
    meter: Meter,
    folder: tempfile::TempDir,
}

fn store_options(folder: &Path) -> store::Options {
    store::Options {
        folder: folder.join("segments"),
        capacity: Bytes::mib(32),
        segment: Bytes::mib(1),
        io: Io::Auto,
        queue_depth: 8,
    }
}

fn open_store(folder: &Path, kind: DiskKind, clock: &Clock, meter: &Meter) -> Store {
    Store::open(store_options(folder), kind, clock.clone(), meter).unwrap().0
}

fn fingerprint() -> Fingerprint {
    Arc::new(|hello| {
        Box::pin(async move {
            if hello.model == "unknown" {
                return Err("no such folder".to_owned());
            }
            Ok((Namespace(Sha256::digest(hello.model).into()), BTreeMap::new()))
        })
    })
}

fn options() -> Options {
    Options {
        generation: 7,
        fingerprint: fingerprint(),
        owner_of: Arc::new(|_| Some("".into())),
        prefill_tokens_per_s: 1500,
        row_budget_percent: ROW_BUDGET_PERCENT,
        tier_on: true,
    }
}

impl House {
    async fn new() -> Self {
        Self::on(DiskKind::Real).await
    }

    async fn on(kind: DiskKind) -> Self {
        Self::with(kind, None).await
    }

    /// With a cluster of its own when it has a name: that, and the token of a node to join.
    async fn with(kind: DiskKind, named: Option<(&str, Option<String>)>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (tasks, meter, clock) = (Tasks::new(), Meter::new(), Clock::real());
        let store = open_store(folder.path(), kind, &clock, &meter);
        let cluster = match named {
            None => None,
            Some((name, join)) => {
                let options = cluster::Options {
                    name: name.into(),
                    identity: folder.path().join("identity"),
                    control: "127.0.0.1:0".into(),
                    data: vec!["127.0.0.1:0".into()],
                    rails: Vec::new(),
                    seen_as: cluster::SeenAs::default(),
                    join,
                    silence: Duration::from_secs(3),
                    serve_memory: Bytes::mib(8),
                    carrier: cluster::Carrier::default(),
                    sharing: cluster::Sharing::default(),
                    generation: 1,
                };
                Some(Cluster::start(options, store.clone(), clock.clone(), &tasks, &meter).await.unwrap())
            }
        };
        let socket = folder.path().join("run/engine.sock");
        let door =
            Door::start(socket.clone(), store.clone(), cluster.clone(), options(), clock, &tasks, &meter);
        Self { door: door.await.unwrap(), socket, store, cluster, tasks, meter, folder }
    }

    /// With rows sealed, of whoever the request's id says: `clear-NAME`, or nobody knows.
    async fn sealed() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (tasks, meter, clock) = (Tasks::new(), Meter::new(), Clock::real());
        let sealing = store::Sealing { keys: Some(folder.path().join("keys")), encrypt: true };
        let store = store_options(folder.path());
        let store = Store::open_sealed(store, &sealing, DiskKind::Real, clock.clone(), &meter).unwrap().0;
        let owner_of = |request: &str| request.strip_prefix("clear-").map(Arc::from);
        let options = Options { owner_of: Arc::new(owner_of), ..options() };
        let socket = folder.path().join("run/engine.sock");
        let door = Door::start(socket.clone(), store.clone(), None, options, clock, &tasks, &meter);
        Self { door: door.await.unwrap(), socket, store, cluster: None, tasks, meter, folder }
    }

    async fn engine(&self, engine_id: &str) -> Engine {
        Engine::connect(&self.socket, &hello(engine_id)).await.unwrap()
    }

    /// Waits until nobody is served: the goodbye of an engine is complete.
    async fn alone(&self) {
        for _ in 0..2000 {
            if self.door.engine().is_none() && self.door.status().open_jobs == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("the engine is still served: {:?}", self.door.status());
    }

    async fn close(self) {
        assert_eq!(self.tasks.stop(LIMIT).await, 0, "tasks are left");
        assert!(!self.tasks.failed().is_cancelled(), "the node failed");
        assert!(!self.socket.exists(), "the socket is left");
        self.store.close().await;
    }
}

/// An engine's side: connection and rows.
struct Engine {
    client: DoorClient,
    area: Arc<Area>,
}

impl Engine {
    async fn connect(socket: &Path, hello: &Hello) -> Result<Self, Error> {
        let area = Arc::new(Area::new(hello.rows, hello.row_bytes).unwrap());
        let client = within(DoorClient::connect(socket, hello, area.fd())).await?;
        Ok(Self { client, area })
    }

    /// Fills the rows of `items` with what belongs there, and offers them.
    async fn store(&mut self, items: &[(u32, u32)]) -> Vec<Outcome> {
        for &(n, row) in items {
            self.area.fill(row, |b| {
                b.copy_from_slice(&bytes(n));
                if !n.is_multiple_of(2) {
                    // What the group does not cover is other requests' data.
                    b[ROW as usize / 2..].fill(0xEE);
                }
            });
        }
        let items = items.iter().map(|&(n, row)| item(n, row)).collect();
        within(self.client.store(items)).await.unwrap()
    }

    async fn load(&mut self, items: &[(u32, u32)], deadline_us: u32) -> Vec<Outcome> {
        let items = items.iter().map(|&(n, row)| item(n, row)).collect();
        within(self.client.load(items, deadline_us)).await.unwrap()
    }

    fn row(&self, row: u32) -> Vec<u8> {
        self.area.look(row, <[u8]>::to_vec)
    }

    /// Whether the node closes the connection, whatever it says before.
    async fn is_closed(&mut self) -> bool {
        loop {
            match within(self.client.heard()).await {
                Ok(_) => {}
                Err(Error::Closed) => return true,
                Err(Error::Io(error)) => return error.kind() == std::io::ErrorKind::ConnectionReset,
                Err(_) => return false,
            }
        }
    }
}

async fn within<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(LIMIT, work).await.expect("it hangs")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_stored_comes_back_byte_for_byte_and_the_table_knows() {
    let house = House::new().await;
    let mut engine = house.engine("spark-a-1").await;
    assert_eq!(engine.client.welcome.generation, 7);
    assert_eq!(engine.client.welcome.row_budget, 48);
    assert!(engine.client.welcome.tier_on);
    assert_eq!(house.door.engine().unwrap().hello.engine_id, "spark-a-1");

    let stored: Vec<(u32, u32)> = (0..20).map(|n| (n, n + 3)).collect();
    assert_eq!(engine.client.table.holders(&key(3)), 0);
    assert_eq!(engine.store(&stored).await, [Outcome::Stored; 20]);
    for n in 0..20 {
        assert_eq!(engine.client.table.holders(&key(n)), 1, "row {n} is in the table when DONE is heard");
    }
    assert_eq!(engine.store(&stored[..2]).await, [Outcome::Held; 2]);

    (0..ROWS).for_each(|row| engine.area.fill(row, |b| b.fill(0x11)));
    let mut wanted: Vec<(u32, u32)> = (0..20).rev().map(|n| (n, 40 + n)).collect();
    wanted.push((99, 0));
    let outcomes = engine.load(&wanted, 5_000_000).await;
    assert_eq!(&outcomes[..20], [Outcome::FromDrive; 20]);
    assert_eq!(outcomes[20], Outcome::Failed);
    for n in 0..20 {
        assert!(engine.row(40 + n) == bytes(n), "row {n}");
    }
    assert!(engine.row(0) == vec![0x11; ROW as usize], "a row that failed is not touched");

    let status = house.door.status();
    assert_eq!((status.loads.drive, status.loads.failed), (20, 1));
    assert_eq!((status.stores.stored, status.stores.held), (20, 2));
    assert_eq!(status.open_jobs, 0);
    drop(engine);
    house.alone().await;

    // Another engine with the same model finds them at hello; one with another model does not.
    let engine = house.engine("spark-a-2").await;
    assert_eq!(engine.client.table.holders(&key(7)), 1);
    let other = Hello { model: "other".into(), ..hello("spark-a-3") };
    let other = Engine::connect(&house.socket, &other).await.unwrap();
    assert_eq!(other.client.table.holders(&key(7)), 0);
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hello_that_does_not_fit_is_refused_with_its_reason() {
    type Break = fn(&mut Hello);
    let house = House::new().await;
    let cases: [(Break, &str); 4] = [
        (|h| h.protocol += 1, "protocol"),
        (|h| h.row_bytes = 5000, "4096"),
        (|h| h.groups.clear(), "groups"),
        (|h| h.model = "unknown".into(), "no such folder"),
    ];
    for (break_it, reason) in cases {
        let mut broken = hello("spark-a-1");
        let area = Area::new(ROWS, ROW).unwrap();
        break_it(&mut broken);
        match within(DoorClient::connect(&house.socket, &broken, area.fd())).await {
            Err(Error::Refused(said)) => assert!(said.contains(reason), "{said}"),
            other => panic!("{reason}: {other:?}"),
        }
        assert!(house.door.status().last_refusal.unwrap().reason.contains(reason));
    }
    // An area that is smaller than announced would kill whoever touches its end.
    let small = Area::new(ROWS - 1, ROW).unwrap();
    match within(DoorClient::connect(&house.socket, &hello("spark-a-1"), small.fd())).await {
        Err(Error::Refused(said)) => assert!(said.contains("holds"), "{said}"),
        other => panic!("{other:?}"),
    }
    house.engine("spark-a-1").await;
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_is_no_hello_is_turned_away() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let house = House::new().await;
    let store = FromEngine::Store { job: 1, request: "r".into(), items: vec![item(1, 1)] }.encode();
    let bare = FromEngine::Hello(serde_json::to_vec(&hello("spark-a-1")).unwrap()).encode();
    let nonsense = FromEngine::Hello(b"{\"protocol\":".to_vec()).encode();
    for (bytes, reason) in [
        (store, "not a HELLO"),
        (bare, "without the row area's descriptor"),
        (nonsense, "not to be understood"),
        (vec![0xff; 64], "frame length"),
        (vec![1, 0, 0, 0, 77], "kind of frame"),
    ] {
        let mut stream = tokio::net::UnixStream::connect(&house.socket).await.unwrap();
        stream.write_all(&bytes).await.unwrap();
        let mut said = Vec::new();
        let _ = within(stream.read_to_end(&mut said)).await;
        match FromNode::decode(&said[4..]) {
            Ok(FromNode::Refuse { reason: said }) => assert!(said.contains(reason), "{said}"),
            other => panic!("{reason}: {other:?}"),
        }
    }
    house.engine("spark-a-1").await;
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_breaks_a_rule_loses_its_connection_and_the_node_lives() {
    let house = House::new().await;
    let load = |job, items: Vec<RowItem>| {
        FromEngine::Load { job, deadline_us: 0, request: "r".into(), items }.encode()
    };
    let wrong_group = RowItem { key: RowKey { group: GroupId(2), ..key(1) }, position: 16, row: 1 };
    let hello_again = FromEngine::Hello(serde_json::to_vec(&hello("spark-a-1")).unwrap()).encode();
    let cut_count = {
        let mut frame = load(1, vec![item(1, 1)]);
        let at = frame.len() - 48;
        frame[at..at + 4].copy_from_slice(&9_u32.to_le_bytes());
        frame
    };
    let cases: [(Vec<u8>, &str); 8] = [
        (load(1, vec![item(1, ROWS)]), "names row 64 of 64"),
        (load(1, vec![item(1, u32::MAX)]), "names row"),
        (load(1, vec![wrong_group]), "names group 2 of 2"),
        (load(1, vec![item(1, 5), item(2, 5)]), "which an open job has"),
        ([load(1, vec![]), load(1, vec![])].concat(), "used before"),
        (hello_again, "second HELLO"),
        (vec![0, 0, 0, 0], "frame length"),
        (cut_count, "wanted"),
    ];
    for (bytes, reason) in cases {
        let mut engine = house.engine("spark-a-1").await;
        engine.area.fill(5, |b| b.fill(0x77));
        engine.client.send_bytes(&bytes).await.unwrap();
        assert!(engine.is_closed().await, "{reason}");
        house.alone().await;
        let said = house.door.status().last_refusal.unwrap().reason;
        assert!(said.contains(reason), "`{said}` where `{reason}` was due");
        assert!(engine.row(5) == vec![0x77; ROW as usize], "{reason}: memory was touched");
    }
    let mut engine = house.engine("spark-a-1").await;
    assert_eq!(engine.store(&[(1, 1)]).await, [Outcome::Stored]);
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_cut_into_single_bytes_are_understood() {
    let house = House::new().await;
    let mut engine = house.engine("spark-a-1").await;
    engine.area.fill(2, |b| b.copy_from_slice(&bytes(4)));
    for byte in (FromEngine::Store { job: 900, request: "r".into(), items: vec![item(4, 2)] }).encode() {
        engine.client.send_bytes(&[byte]).await.unwrap();
        tokio::task::yield_now().await;
    }
    assert_eq!(within(engine.client.done(900, 1)).await.unwrap(), [Outcome::Stored]);
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_newer_of_two_living_engines_is_served() {
    let house = House::new().await;
    let mut old = house.engine("spark-a-1").await;
    assert_eq!(old.store(&[(2, 2)]).await, [Outcome::Stored]);
    let mut new = house.engine("spark-a-2").await;
    assert!(old.is_closed().await);
    assert_eq!(house.door.engine().unwrap().hello.engine_id, "spark-a-2");
    match Engine::connect(&house.socket, &hello("spark-a-1")).await.map(|_| ()) {
        Err(Error::Refused(said)) => assert!(said.contains("newer"), "{said}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(new.load(&[(2, 9)], 0).await, [Outcome::FromDrive]);
    assert!(new.row(9) == bytes(2));
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_job_may_fill_the_whole_area() {
    let house = House::new().await;
    let mut engine = house.engine("spark-a-1").await;
    for half in 0..2 {
        let rows: Vec<(u32, u32)> = (0..ROWS).map(|row| (half * ROWS + row, row)).collect();
        assert_eq!(engine.store(&rows).await, [Outcome::Stored; ROWS as usize]);
    }
    // The budget is the plugin's to keep: the node serves what the rows can hold.
    let rows: Vec<(u32, u32)> = (0..ROWS).map(|row| (row, ROWS - 1 - row)).collect();
    assert!(ROWS > engine.client.welcome.row_budget);
    assert_eq!(engine.load(&rows, 0).await, [Outcome::FromDrive; ROWS as usize]);
    for (n, row) in rows {
        assert!(engine.row(row) == bytes(n), "row {row}");
    }
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_belong_to_whoever_computed_them_and_go_with_their_key() {
    let house = House::sealed().await;
    let mut engine = house.engine("spark-a-1").await;
    for (n, request) in [(0, "clear-ann"), (2, "clear-bob"), (4, "clear-ann"), (6, "nobody knows")] {
        engine.area.fill(n, |b| b.copy_from_slice(&bytes(n)));
        let outcome = within(engine.client.store_for(request, vec![item(n, n)])).await.unwrap();
        // What cannot be said to be anybody's is not kept, and need not be offered again.
        assert_eq!(outcome, [if n < 6 { Outcome::Stored } else { Outcome::Held }], "{request}");
    }
    let all = [(0, 10), (2, 12), (4, 14), (6, 16)];
    let [stored, missing] = [Outcome::FromDrive, Outcome::Failed];
    assert_eq!(engine.load(&all, 0).await, [stored, stored, stored, missing]);
    assert!([0, 2, 4].into_iter().all(|n| engine.row(n + 10) == bytes(n)), "they are opened");
    let forgotten = house.store.forget_owner("ann").await.unwrap();
    assert_eq!((forgotten.keys, forgotten.rows), (1, 2));
    assert_eq!(engine.load(&all, 0).await, [missing, stored, missing, missing]);
    let known = |n| engine.client.table.holders(&key(n)) != 0;
    assert_eq!([0, 2, 4, 6].map(known), [false, true, false, false], "nobody is promised what is gone");
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_too_late_fails_and_never_lands() {
    let house = House::new().await;
    let mut engine = house.engine("spark-a-1").await;
    let rows: Vec<(u32, u32)> = (0..ROWS).map(|row| (row, row)).collect();
    assert_eq!(engine.store(&rows).await, [Outcome::Stored; ROWS as usize]);
    (0..ROWS).for_each(|row| engine.area.fill(row, |b| b.fill(0x22)));
    let outcomes = engine.load(&rows, 1).await;
    // The engine reuses what failed at once: whatever the node still had in flight would show.
    let failed: Vec<u32> = (0..ROWS).filter(|&row| !outcomes[row as usize].is_ok()).collect();
    assert!(failed.len() > ROWS as usize / 2, "a microsecond is not enough for {ROWS} rows: {outcomes:?}");
    assert_eq!(house.door.status().broken["deadline"], failed.len() as u64, "each was promised");
    for &row in &failed {
        engine.area.fill(row, |b| b.fill(0x33));
    }
    for row in (0..ROWS).filter(|row| !failed.contains(row)) {
        assert!(engine.row(row) == bytes(row), "row {row}");
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    for row in failed {
        assert!(
            engine.row(row) == vec![0x33; ROW as usize],
            "row {row} was written after its job had failed"
        );
    }
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_run_side_by_side_and_each_is_answered_once() {
    let house = House::new().await;
    let mut engine = house.engine("spark-a-1").await;
    for row in 0..ROWS {
        engine.area.fill(row, |b| b.copy_from_slice(&bytes(row)));
        let job = u64::from(row) * 3;
        let store = FromEngine::Store { job, request: String::new(), items: vec![item(row, row)] };
        engine.client.send(&store).await.unwrap();
    }
    let mut answered = BTreeMap::new();
    while answered.len() < ROWS as usize {
        let FromNode::Done { job, outcomes, .. } = within(engine.client.heard()).await.unwrap() else {
            panic!("nothing else is said")
        };
        assert_eq!(outcomes, [Outcome::Stored]);
        assert_eq!(answered.insert(job, ()), None, "job {job} was answered twice");
    }
    assert!(answered.keys().all(|job| job % 3 == 0));
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_vanishes_in_the_middle_of_jobs_leaves_a_node_that_serves_the_next() {
    let house = House::new().await;
    let mut engine = house.engine("spark-a-1").await;
    let rows: Vec<(u32, u32)> = (0..ROWS).map(|row| (row, row)).collect();
    engine.store(&rows).await;
    for round in 2..12 {
        let items = |from: u32| (from..from + ROWS / 2).map(|n| item(n, n % ROWS)).collect::<Vec<_>>();
        let load = FromEngine::Load { job: 50, deadline_us: 0, request: "r".into(), items: items(0) };
        let store = FromEngine::Store { job: 51, request: "r".into(), items: items(ROWS * round + ROWS / 2) };
        engine.client.send_bytes(&[load.encode(), store.encode()].concat()).await.unwrap();
        // Connection, mapping and descriptor go away while the jobs run.
        drop(engine);
        engine = house.engine(&format!("spark-a-{round}")).await;
        assert_eq!(engine.load(&[(5, 5)], 0).await, [Outcome::FromDrive]);
        assert!(engine.row(5) == bytes(5));
    }
    drop(engine);
    house.alone().await;
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_tiers_state_and_the_pace_reach_this_engine_and_the_next() {
    let house = House::new().await;
    let mut engine = house.engine("spark-a-1").await;
    assert_eq!(engine.store(&[(1, 1)]).await, [Outcome::Stored]);
    house.door.set_tier(false, "the canary differs");
    let off = FromNode::Tier { on: false, reason: "the canary differs".into() };
    assert_eq!(within(engine.client.heard()).await.unwrap(), off);
    assert_eq!(engine.load(&[(1, 2)], 0).await, [Outcome::Failed]);
    assert_eq!(engine.store(&[(3, 3)]).await, [Outcome::Failed]);
    house.door.set_pace(900);
    assert_eq!(within(engine.client.heard()).await.unwrap(), FromNode::Pace { prefill_tokens_per_s: 900 });

    let mut engine = house.engine("spark-a-2").await;
    assert_eq!((engine.client.welcome.tier_on, engine.client.welcome.prefill_tokens_per_s), (false, 900));
    assert_eq!(within(engine.client.heard()).await.unwrap(), off);
    house.door.set_tier(true, "checked again");
    let on = FromNode::Tier { on: true, reason: "checked again".into() };
    assert_eq!(within(engine.client.heard()).await.unwrap(), on);
    assert_eq!(engine.load(&[(1, 2)], 0).await, [Outcome::FromDrive]);
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_are_passed_on_and_counted_by_source() {
    let house = House::new().await;
    let mut reports = house.door.reports();
    let engine = house.engine("spark-a-1").await;
    let sources = Sources { prompt: 100, device: 32, staging: 16, drive: 48, peer: 0, computed: 4 };
    let chain = vec![(key(1), 16), (key(2), 32)];
    for n in 0..2 {
        let request = format!("chatcmpl-{n}-0badcafe");
        engine.client.send(&FromEngine::Report { request, sources, chain: chain.clone() }).await.unwrap();
    }
    let report = within(reports.recv()).await.unwrap();
    assert_eq!((report.request.as_str(), report.sources), ("chatcmpl-0-0badcafe", sources));
    assert_eq!(report.chain, chain);
    within(reports.recv()).await.unwrap();
    let text = house.meter.text();
    for (source, tokens) in [("device", 64), ("staging", 32), ("drive", 96), ("peer", 0), ("computed", 8)] {
        let line = format!("sparkkv_door_prompt_tokens_total{{source=\"{source}\"}} {tokens}");
        assert!(text.contains(&line), "{line} in\n{text}");
    }
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_node_does_not_take_a_living_ones_socket_but_a_dead_ones() {
    use std::os::unix::fs::PermissionsExt;
    let house = House::new().await;
    let mode = std::fs::metadata(&house.socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let start = |socket: PathBuf, tasks: Tasks| {
        let store = house.store.clone();
        async move { Door::start(socket, store, None, options(), Clock::real(), &tasks, &Meter::new()).await }
    };
    let refused = start(house.socket.clone(), Tasks::new()).await;
    assert!(refused.is_err_and(|e| e.to_string().contains("another node answers")));
    house.engine("spark-a-1").await;

    // What a killed node leaves: a socket file without a listener.
    let stale = house.socket.with_file_name("stale.sock");
    drop(std::os::unix::net::UnixListener::bind(&stale).unwrap());
    assert!(stale.exists());
    let tasks = Tasks::new();
    start(stale.clone(), tasks.clone()).await.unwrap();
    Engine::connect(&stale, &hello("spark-b-1")).await.unwrap();
    tasks.stop(LIMIT).await;
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_row_fails_alone_and_leaves_the_table() {
    let house = House::new().await;
    let mut engine = house.engine("spark-a-1").await;
    let rows: Vec<(u32, u32)> = (0..30).map(|n| (n, n)).collect();
    assert_eq!(engine.store(&rows).await, [Outcome::Stored; 30]);
    let victim = bytes(17);
    let mut damaged = 0;
    for entry in std::fs::read_dir(house.folder.path().join("segments")).unwrap() {
        let path = entry.unwrap().path();
        let Ok(mut file) = std::fs::read(&path) else { continue };
        // The covered half of an odd row: its first bytes are enough to find it.
        if let Some(at) = file.windows(512).position(|w| *w == victim[..512]) {
            file[at + 100] ^= 1;
            std::fs::write(&path, file).unwrap();
            damaged += 1;
        }
    }
    assert_eq!(damaged, 1, "the row is in one segment");
    (30..60).for_each(|row| engine.area.fill(row, |b| b.fill(0)));
    let moved: Vec<(u32, u32)> = (0..30).map(|n| (n, n + 30)).collect();
    let outcomes = engine.load(&moved, 0).await;
    for n in 0..30 {
        if n == 17 {
            assert_eq!(outcomes[17], Outcome::Failed);
            assert_eq!(engine.client.table.holders(&key(17)), 0, "it is not offered again");
        } else {
            assert_eq!(outcomes[n as usize], Outcome::FromDrive, "row {n}");
            assert!(engine.row(n + 30) == bytes(n), "row {n}");
        }
    }
    let broken = house.door.status().broken;
    assert_eq!((broken["damaged"], broken.values().sum::<u64>()), (1, 1), "{broken:?}");
    let series = "sparkkv_door_broken_promises_total{reason=\"damaged\"} 1";
    assert!(house.meter.text().contains(series), "a rate can be taken of it");
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_drive_fails_stores_and_goes_on_loading() {
    let mem = Mem::new();
    let house = House::on(DiskKind::Mem(mem.clone())).await;
    let mut engine = house.engine("spark-a-1").await;
    assert_eq!(engine.store(&[(1, 1), (2, 2)]).await, [Outcome::Stored; 2]);
    mem.fail(0, 1_000_000, Failure::Full);
    assert_eq!(engine.store(&[(3, 3), (4, 4)]).await, [Outcome::Failed; 2]);
    assert_eq!(engine.client.table.holders(&key(3)), 0);
    assert_eq!(engine.load(&[(2, 9), (3, 10)], 0).await, [Outcome::FromDrive, Outcome::Failed]);
    assert!(engine.row(9) == bytes(2));
    assert_eq!(house.door.status().broken["reclaimed"], 1, "nobody holds it any more");
    assert_eq!(house.door.faults(), [], "one row is no reason to get up");
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_capacity_pushes_out_leaves_the_table() {
    let house = House::new().await;
    let mut engine = house.engine("spark-a-1").await;
    // 32 MiB hold fewer than 4,096 rows of 8 KiB; twice as many are offered.
    let mut stored = 0;
    for round in 0..128 {
        let rows: Vec<(u32, u32)> = (0..ROWS).map(|row| (round * ROWS + row, row)).collect();
        stored += engine.store(&rows).await.iter().filter(|o| **o == Outcome::Stored).count();
    }
    assert!(stored > 4096, "{stored}");
    let held = (0..128 * ROWS).filter(|&n| engine.client.table.holders(&key(n)) != 0).count();
    let status = house.store.status();
    assert_eq!(held as u64, status.rows, "the table tells exactly what the drive holds");
    assert!(held < 4096, "{held}");
    assert_eq!(engine.client.table.holders(&key(128 * ROWS - 1)), 1, "the newest is there");
    house.close().await;
}

/// Waits until `is` holds.
async fn until(what: &str, mut is: impl FnMut() -> bool) {
    for _ in 0..4000 {
        if is() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("{what} did not come");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_of_the_other_node_are_in_the_table_and_come_with_those_of_the_own_drive() {
    let a = House::with(DiskKind::Real, Some(("a", None))).await;
    let token = a.cluster.as_ref().unwrap().invite();
    let b = House::with(DiskKind::Real, Some(("b", Some(token)))).await;
    let mut engine_a = a.engine("spark-a-1").await;
    let mut engine_b = b.engine("spark-b-1").await;
    let of_a: Vec<(u32, u32)> = (0..20).map(|n| (n, n)).collect();
    let of_b: Vec<(u32, u32)> = (10..30).map(|n| (n, n)).collect();
    assert_eq!(engine_a.store(&of_a).await, [Outcome::Stored; 20]);
    assert_eq!(engine_b.store(&of_b).await, [Outcome::Stored; 20]);
    let table = Arc::clone(&engine_b.client.table);
    until("what a holds", || (0..20).all(|n| table.holders(&key(n)) & 2 != 0)).await;
    let holders: Vec<u64> = (0..31).map(|n| table.holders(&key(n))).collect();
    assert!(holders[..10].iter().all(|h| *h == 2) && holders[20..30].iter().all(|h| *h == 1));
    assert!(holders[10..20].iter().all(|h| *h == 3) && holders[30] == 0);

    // One job, rows of both, of neither, and in no order.
    (0..ROWS).for_each(|row| engine_b.area.fill(row, |b| b.fill(0x44)));
    let wanted: Vec<(u32, u32)> = (0..31).rev().map(|n| (n, n + 33)).collect();
    let outcomes = engine_b.load(&wanted, 10_000_000).await;
    for (&(n, row), outcome) in wanted.iter().zip(outcomes) {
        let due = match n {
            0..10 => Outcome::FromPeer,
            10..30 => Outcome::FromDrive,
            _ => Outcome::Failed,
        };
        assert_eq!(outcome, due, "row {n}");
        let held = if due.is_ok() { bytes(n) } else { vec![0x44; ROW as usize] };
        assert!(engine_b.row(row) == held, "row {n}");
    }
    assert_eq!(b.door.status().loads.peer, 10);

    // What the own drive damaged comes from the other node, in the same job.
    let victim = bytes(15);
    for entry in std::fs::read_dir(b.folder.path().join("segments")).unwrap() {
        let path = entry.unwrap().path();
        let Ok(mut file) = std::fs::read(&path) else { continue };
        if let Some(at) = file.windows(512).position(|w| *w == victim[..512]) {
            file[at] ^= 1;
            std::fs::write(&path, file).unwrap();
        }
    }
    let outcomes = engine_b.load(&[(14, 0), (15, 1), (16, 2)], 10_000_000).await;
    assert_eq!(outcomes, [Outcome::FromDrive, Outcome::FromPeer, Outcome::FromDrive]);
    assert!(engine_b.row(1) == victim);

    // A node that goes takes its keys out of the table, and loads of them fail.
    a.close().await;
    until("the farewell of a", || (0..10).all(|n| table.holders(&key(n)) == 0)).await;
    assert_eq!(table.holders(&key(16)), 1);
    assert_eq!(engine_b.load(&[(3, 5), (16, 6)], 1_000_000).await, [Outcome::Failed, Outcome::FromDrive]);
    assert_eq!(b.door.status().broken["peer_gone"], 1);
    b.close().await;
}

/// The same tests in a process of their own, with a fault armed: they must see it.
#[test]
fn late_writes_and_early_answers_are_caught() {
    if !cfg!(debug_assertions) {
        return;
    }
    let run = |test: &str, mutant: Option<&str>| {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test]).env_remove("SPARK_KV_MUTANT");
        if let Some(mutant) = mutant {
            command.env("SPARK_KV_MUTANT", mutant);
        }
        let output = command.output().unwrap();
        assert!(
            String::from_utf8_lossy(&output.stdout).contains("running 1 test"),
            "no test of the name {test}"
        );
        output.status.success()
    };
    let test = "what_is_too_late_fails_and_never_lands";
    assert!(run(test, None));
    for mutant in ["LateWrite", "EarlyDone"] {
        assert!(!run(test, Some(mutant)), "{mutant} went unnoticed");
    }
}
