//! A server and a fetcher over memory: what arrives, what does not, and that nothing arrives late.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::Instant;

use super::wire::{self, ASK, Ask, Head, Want};
use super::*;
use crate::base::block::{BlockHash, GroupId, Namespace, Rank, RowItem};
use crate::base::checksum::crc64;
use crate::base::frame::Outcome;
use crate::base::landing::{About, Landing};
use crate::base::rows::Rows;
use crate::base::units::Bytes as Size;
use crate::tasks::{Kind, Tasks};

const ROW: usize = 8192;

pub(super) fn space() -> Space {
    Space { namespace: Namespace([4; 32]), rank: Rank::ONLY }
}

pub(super) fn key(n: u32) -> RowKey {
    let mut hash = [0; 32];
    hash[..4].copy_from_slice(&n.to_le_bytes());
    RowKey { hash: BlockHash(hash), group: GroupId(n % 2) }
}

pub(super) fn item(n: u32) -> RowItem {
    RowItem { key: key(n), position: (n + 1) * 16, row: n }
}

pub(super) fn rows(count: u32, row_bytes: usize) -> Arc<Rows> {
    sim::area(space(), count, row_bytes)
}

fn payload(n: u32) -> Vec<u8> {
    payload_of(n, ROW)
}

pub(super) fn payload_of(n: u32, row_bytes: usize) -> Vec<u8> {
    let word =
        |i: u32| u64::from(i).wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(u64::from(n)).to_le_bytes();
    (0..row_bytes as u32 / 8).flat_map(word).collect()
}

/// Rows in memory; reads of keys over `slow_from` do not end.
#[derive(Default)]
pub(super) struct Memory {
    pub rows: Mutex<HashMap<RowKey, Record>>,
    pub slow_from: u32,
    /// Reads that began, and of those the ones that were not dropped.
    pub begun: Arc<AtomicUsize>,
    pub alive: Arc<AtomicUsize>,
}

impl Memory {
    pub fn with(count: u32) -> Self {
        Self::of(count, ROW)
    }

    pub fn of(count: u32, row_bytes: usize) -> Self {
        let rows = (0..count).map(|n| {
            let payload = Bytes::from(payload_of(n, row_bytes));
            let record = Record { position: item(n).position, checksum: crc64(&[&payload]), payload };
            (key(n), record)
        });
        Self { rows: Mutex::new(rows.collect()), slow_from: u32::MAX, ..Self::default() }
    }
}

impl Shelf for Memory {
    fn read(&self, asked: Space, wanted: RowKey, into: Arrival) -> BoxFuture<'static, ()> {
        let n = u32::from_le_bytes(wanted.hash.0[..4].try_into().unwrap());
        self.begun.fetch_add(1, Ordering::AcqRel);
        if n >= self.slow_from {
            struct Alive(Arc<AtomicUsize>);
            impl Drop for Alive {
                fn drop(&mut self) {
                    self.0.fetch_sub(1, Ordering::AcqRel);
                }
            }
            self.alive.fetch_add(1, Ordering::AcqRel);
            let alive = Alive(self.alive.clone());
            return Box::pin(async move {
                let _both = (alive, into);
                std::future::pending::<()>().await;
            });
        }
        let record = if asked == space() { self.rows.lock().get(&wanted).cloned() } else { None };
        if let Some(record) = record {
            into.whole(record);
        }
        Box::pin(std::future::ready(()))
    }
}

pub(super) struct World {
    pub fabric: Fabric,
    pub tickets: Tickets,
    pub tasks: Tasks,
    pub metrics: Metrics,
    meter: Meter,
}

pub(super) const PATIENCE: Duration = Duration::from_secs(30);

impl World {
    fn new() -> Self {
        Self::over(Fabric::Mem(MemNet::default()))
    }

    pub fn over(fabric: Fabric) -> Self {
        let meter = Meter::new();
        Self {
            fabric,
            tickets: Tickets::default(),
            tasks: Tasks::new(),
            metrics: Metrics::new(&meter),
            meter,
        }
    }

    async fn serving(shelf: Memory, memory: Size) -> Self {
        let world = Self::new();
        world.serve(shelf, memory, &["b"]).await;
        world
    }

    /// Serves at each address; gives where that is.
    pub async fn serve(&self, shelf: impl Shelf, memory: Size, at: &[&str]) -> Vec<String> {
        let (shelf, tickets, metrics) = (Arc::new(shelf), self.tickets.clone(), self.metrics.clone());
        let server = Server::new(shelf, tickets, memory, PATIENCE, metrics, &self.tasks);
        let mut addresses = Vec::new();
        for at in at {
            let listener = self.fabric.listen(at).await.unwrap();
            addresses.push(listener.address().unwrap());
            self.tasks.spawn(Kind::Serving, "server", server.clone().run(listener));
        }
        addresses
    }

    pub fn fetcher(&self, addresses: &[&str], ticket: Ticket, patience: Duration) -> Fetcher {
        let addresses: Vec<String> = addresses.iter().map(|&a| a.to_owned()).collect();
        Fetcher::start(&self.fabric, &addresses, ticket, patience, &self.metrics, &self.tasks)
    }

    pub fn count(&self, series: &str) -> u64 {
        let text = self.meter.text();
        let line = text.lines().find(|l| l.starts_with(&format!("sparkkv_transfer_{series} ")));
        line.unwrap_or_else(|| panic!("{series} in {text}")).rsplit(' ').next().unwrap().parse().unwrap()
    }

    pub async fn end(self) {
        assert_eq!(self.tasks.stop(Duration::from_secs(5)).await, 0, "everything ends when asked");
    }
}

pub(super) fn items(count: u32) -> Vec<RowItem> {
    (0..count).map(item).collect()
}

#[tokio::test]
async fn rows_arrive_as_stored_with_memory_for_less_than_one_of_them() {
    for memory in [Size::mib(64), Size(1)] {
        let world = World::serving(Memory::with(300), memory).await;
        let fetcher = world.fetcher(&["b"], world.tickets.issue([1; 32], 1), PATIENCE);
        let rows = rows(300, ROW);
        let outcomes = fetcher.fetch(&rows, &items(300), None).await;
        assert_eq!(outcomes, vec![Outcome::FromPeer; 300]);
        for n in 0..300 {
            rows.look(n, |row| assert!(row == payload(n), "row {n}"));
        }
        assert_eq!(world.count("sent_rows_total"), 300);
        world.end().await;
    }
}

#[tokio::test]
async fn what_the_peer_lost_or_mislabels_fails_and_the_rest_comes() {
    let shelf = Memory::with(10);
    {
        let mut held = shelf.rows.lock();
        held.remove(&key(3));
        held.get_mut(&key(4)).unwrap().position += 1;
        held.get_mut(&key(5)).unwrap().checksum ^= 1;
        held.get_mut(&key(6)).unwrap().payload.truncate(4096);
    }
    let world = World::serving(shelf, Size::mib(64)).await;
    let fetcher = world.fetcher(&["b"], world.tickets.issue([1; 32], 1), PATIENCE);
    let outcomes = fetcher.fetch(&rows(10, ROW), &items(10), None).await;
    let failed: Vec<usize> = (0..10).filter(|&i| outcomes[i] == Outcome::Failed).collect();
    assert_eq!(failed, [3, 4, 5, 6]);
    assert_eq!(world.count("rows_failed_total{reason=\"missing\"}"), 2);
    assert_eq!(world.count("rows_failed_total{reason=\"mismatch\"}"), 1);
    assert_eq!(world.count("rows_failed_total{reason=\"checksum\"}"), 1);
    world.end().await;
}

#[tokio::test]
async fn a_deadline_keeps_what_came_and_fails_the_rest() {
    let shelf = Memory { slow_from: 5, ..Memory::with(10) };
    let world = World::serving(shelf, Size::mib(64)).await;
    let fetcher = world.fetcher(&["b"], world.tickets.issue([1; 32], 1), PATIENCE);
    let rows = rows(10, ROW);
    // Rows that come are awaited first, so that the test says nothing about speed.
    assert_eq!(fetcher.fetch(&rows, &items(5), None).await, vec![Outcome::FromPeer; 5]);
    let deadline = Instant::now() + Duration::from_millis(300);
    let outcomes = fetcher.fetch(&rows, &items(10), Some(deadline)).await;
    assert_eq!(outcomes[5..], [Outcome::Failed; 5]);
    assert!(world.count("rows_failed_total{reason=\"deadline\"}") >= 5);
    let past = fetcher.fetch(&rows, &items(10), Some(Instant::now())).await;
    assert_eq!(past, [Outcome::Failed; 10]);
    world.end().await;
}

#[tokio::test]
async fn a_revoked_ticket_ends_its_connections_and_a_made_up_one_opens_none() {
    let shelf = Memory { slow_from: 0, ..Memory::with(3) };
    let world = World::serving(shelf, Size::mib(64)).await;
    let fetcher = world.fetcher(&["b"], world.tickets.issue([1; 32], 1), PATIENCE);
    let (rows, wanted) = (rows(3, ROW), items(3));
    let fetch = fetcher.fetch(&rows, &wanted, None);
    let revoke = async {
        while world.count("rails") == 0 {
            tokio::task::yield_now().await;
        }
        world.tickets.revoke([1; 32]);
    };
    assert_eq!(tokio::join!(fetch, revoke).0, [Outcome::Failed; 3]);
    let stranger = world.fetcher(&["b"], Ticket([9; 32]), PATIENCE);
    assert_eq!(stranger.fetch(&rows, &items(3), None).await, [Outcome::Failed; 3]);
    assert!(world.count("refused_connections_total") >= 1);
    assert_eq!(world.count("sent_rows_total"), 0);
    world.end().await;
}

#[tokio::test]
async fn a_new_generation_has_a_new_ticket_and_the_old_one_is_void() {
    let tickets = Tickets::default();
    let first = tickets.issue([1; 32], 1);
    assert_eq!(tickets.issue([1; 32], 1), first, "one per generation");
    let second = tickets.issue([1; 32], 2);
    assert_ne!(first, second);
    assert_ne!(tickets.issue([2; 32], 2), second);
    let world = World::serving(Memory::with(1), Size::mib(1)).await;
    let old = world.tickets.issue([1; 32], 1);
    let new = world.tickets.issue([1; 32], 2);
    let rows = rows(1, ROW);
    let with = |ticket| world.fetcher(&["b"], ticket, PATIENCE);
    assert_eq!(with(old).fetch(&rows, &items(1), None).await, [Outcome::Failed]);
    assert_eq!(with(new).fetch(&rows, &items(1), None).await, [Outcome::FromPeer]);
    world.end().await;
}

/// The other side, played by hand.
struct Hand(Stream);

impl Hand {
    async fn accept(listener: &mut Listener) -> Self {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut preamble = [0; wire::PREAMBLE];
        stream.read_exact(&mut preamble).await.unwrap();
        wire::take_preamble(&preamble).unwrap();
        stream.write_all(&[wire::ACCEPTED]).await.unwrap();
        Self(stream)
    }

    async fn word(&mut self) -> Ask {
        let mut word = [0; ASK];
        self.0.read_exact(&mut word).await.unwrap();
        Ask::decode(&word).unwrap()
    }

    /// The next word that is not a hint.
    async fn pull(&mut self) -> Ask {
        loop {
            let ask = self.word().await;
            if ask.want == Want::Pull {
                return ask;
            }
        }
    }

    async fn head(&mut self, ask: &Ask, n: u32) {
        let &Ask { row_bytes, offset, length, .. } = ask;
        let (position, checksum) = (item(n).position, crc64(&[&payload(n)]));
        let bare = Head { key: key(n), ..Head::bare(wire::Kind::Piece, ask) };
        let head = Head { position, row_bytes, checksum, offset, length, ..bare };
        self.0.write_all(&head.encode()).await.unwrap();
    }
}

#[tokio::test]
async fn bytes_that_come_after_the_fetch_returned_or_was_dropped_touch_no_row() {
    for drop_it in [false, true] {
        let world = World::new();
        let mut listener = world.fabric.listen("b").await.unwrap();
        let fetcher = world.fetcher(&["b"], Ticket([1; 32]), PATIENCE);
        let mut hand = Hand::accept(&mut listener).await;
        let rows = rows(3, ROW);
        let wanted = items(2);
        let (first, second);
        {
            let deadline = Instant::now() + Duration::from_millis(if drop_it { 60_000 } else { 100 });
            let fetch = fetcher.fetch(&rows, &wanted, Some(deadline));
            tokio::pin!(fetch);
            (first, second) = tokio::select! {
                biased;
                asks = async { (hand.pull().await, hand.pull().await) } => asks,
                _ = &mut fetch => panic!("nothing came yet"),
            };
            assert!(first.patience_ms > 0, "the deadline travels");
            hand.head(&first, 0).await;
            hand.0.write_all(&payload(0)[..100]).await.unwrap();
            if !drop_it {
                assert_eq!(fetch.await, [Outcome::Failed; 2]);
            }
        }
        rows.fill(0, |row| row.fill(0xAA));
        rows.fill(1, |row| row.fill(0xAA));
        let cancel = hand.word().await;
        assert_eq!(
            (cancel.want, cancel.fetch, cancel.id),
            (Want::Cancel, first.fetch, 0),
            "the peer is told"
        );
        hand.0.write_all(&payload(0)[100..]).await.unwrap();
        hand.head(&second, 1).await;
        hand.0.write_all(&payload(1)).await.unwrap();
        // The same connection goes on to serve the next fetch: by then all late bytes have passed.
        let next = [item(2)];
        let (outcomes, ()) = tokio::join!(fetcher.fetch(&rows, &next, None), async {
            let ask = hand.pull().await;
            hand.head(&ask, 2).await;
            hand.0.write_all(&payload(2)).await.unwrap();
        });
        assert_eq!(outcomes, [Outcome::FromPeer]);
        for n in 0..2 {
            rows.look(n, |row| assert!(row.iter().all(|&b| b == 0xAA), "row {n} was touched, {drop_it}"));
        }
        world.end().await;
    }
}

#[tokio::test]
async fn an_answer_out_of_turn_a_silent_peer_and_a_closed_connection_fail_at_once() {
    for what in ["out of turn", "silent", "only alive", "closed", "unasked"] {
        let world = World::new();
        let mut listener = world.fabric.listen("b").await.unwrap();
        let patience = if what.starts_with(['s', 'o']) { Duration::from_millis(50) } else { PATIENCE };
        let fetcher = world.fetcher(&["b"], Ticket([1; 32]), patience);
        let mut hand = Hand::accept(&mut listener).await;
        let (rows, wanted) = (rows(4, ROW), items(2));
        let (outcomes, hand) = tokio::join!(fetcher.fetch(&rows, &wanted, None), async {
            let ask = hand.pull().await;
            match what {
                "out of turn" => hand.head(&Ask { id: ask.id + 1, ..ask }, 1).await,
                "unasked" => hand.head(&ask, 3).await,
                "only alive" => {
                    let head = Head::bare(wire::Kind::Wait, &ask).encode();
                    hand.0.write_all(&head).await.unwrap();
                }
                "closed" => return None,
                _ => {}
            }
            Some(hand)
        });
        assert_eq!(outcomes, [Outcome::Failed; 2], "{what}");
        assert_eq!(world.count("rows_failed_total{reason=\"connection\"}"), 2, "{what}");
        drop(hand);
        world.end().await;
    }
}

#[tokio::test]
async fn a_rail_that_ends_in_mid_transfer_gives_its_pieces_to_the_other() {
    let world = World::new();
    let addresses = world.serve(Memory::of(8, 256 << 10), Size::mib(64), &["b"]).await;
    let mut listener = world.fabric.listen("a").await.unwrap();
    let mut paths = world.fabric.paths(&["a".into(), addresses[0].clone()]);
    paths[0].name = "bad".into();
    let options = Options { patience: PATIENCE, piece_bytes: 64 << 10 };
    let ticket = world.tickets.issue([1; 32], 1);
    let fetcher = Fetcher::along(&world.fabric, paths, ticket, options, &world.metrics, &world.tasks);
    let mut hand = Hand::accept(&mut listener).await;
    while fetcher.rails().iter().any(|rail| !rail.up) {
        tokio::task::yield_now().await;
    }
    let bad = async {
        let ask = hand.pull().await;
        // Part of a piece, and wrong bytes at that: what comes after is another rail's.
        let n = u32::from_le_bytes(ask.key.hash.0[..4].try_into().unwrap());
        let bytes = payload_of(n, 256 << 10);
        let &Ask { row_bytes, offset, length, .. } = &ask;
        let bare = Head::bare(wire::Kind::Piece, &ask);
        let (position, checksum) = (item(n).position, crc64(&[&bytes]));
        let head = Head { position, row_bytes, checksum, offset, length, ..bare };
        hand.0.write_all(&head.encode()).await.unwrap();
        hand.0.write_all(&[0xEE; 5000]).await.unwrap();
        drop(hand);
    };
    let rows = rows(8, 256 << 10);
    let wanted = items(8);
    let (outcomes, ()) = tokio::join!(fetcher.fetch(&rows, &wanted, None), bad);
    assert_eq!(outcomes, [Outcome::FromPeer; 8]);
    for n in 0..8 {
        rows.look(n, |row| assert!(row == payload_of(n, 256 << 10), "row {n}"));
    }
    while fetcher.rails()[0].errors == 0 {
        tokio::task::yield_now().await;
    }
    let rails = fetcher.rails();
    assert!(rails[1].bytes >= 8 * (256 << 10) && rails[1].share > 0.99, "{rails:?}");
    world.end().await;
}

#[tokio::test]
async fn a_slow_drive_is_told_from_a_dead_cable_and_a_given_up_fetch_stops_its_reads() {
    let shelf = Memory { slow_from: 4, ..Memory::with(40) };
    let (begun, alive) = (shelf.begun.clone(), shelf.alive.clone());
    let world = World::serving(shelf, Size(16 * ROW as u64)).await;
    let fetcher = world.fetcher(&["b"], world.tickets.issue([1; 32], 1), PATIENCE);
    let rows = rows(40, ROW);
    let wanted = items(40);
    {
        let fetch = fetcher.fetch(&rows, &wanted, None);
        tokio::pin!(fetch);
        // Longer than a silent cable is borne.
        let long = tokio::time::timeout(Duration::from_millis(1_500), &mut fetch).await;
        assert!(long.is_err(), "{long:?}");
        assert_eq!(fetcher.rails()[0].errors, 0, "the connection was kept");
        assert!(alive.load(Ordering::Acquire) > 0);
    }
    while alive.load(Ordering::Acquire) > 0 {
        tokio::task::yield_now().await;
    }
    assert!(begun.load(Ordering::Acquire) < 40, "the rest was never begun");
    assert_eq!(fetcher.fetch(&rows, &items(4), None).await, [Outcome::FromPeer; 4], "and it goes on");
    world.end().await;
}

/// The fetching side, played by hand: one head, and its payload.
async fn answer(stream: &mut Stream) -> (Head, Vec<u8>) {
    let mut head = [0; wire::HEAD];
    stream.read_exact(&mut head).await.unwrap();
    let head = Head::decode(&head).unwrap();
    let mut payload = vec![0; head.length as usize];
    stream.read_exact(&mut payload).await.unwrap();
    (head, payload)
}

#[tokio::test]
async fn what_is_cancelled_or_over_its_patience_is_answered_without_its_bytes() {
    let world = World::serving(Memory { slow_from: 5, ..Memory::with(10) }, Size::mib(64)).await;
    let path = world.fabric.paths(&["b".into()]).remove(0);
    let mut stream = rail::open(&world.fabric, &path, world.tickets.issue([1; 32], 1)).await.unwrap();
    let pull = |n: u32, id: u64, patience_ms: u32| Ask {
        space: space(),
        key: key(n),
        row_bytes: ROW as u32,
        offset: 4096,
        patience_ms,
        ..Ask::plain(Want::Pull, 3, id, 4096)
    };
    // The drive does not deliver: signs of life, then an answer, at the time that was asked for.
    stream.write_all(&pull(7, 1, 350).encode()).await.unwrap();
    let mut beats = 0;
    let gone = loop {
        let (head, payload) = answer(&mut stream).await;
        assert!(head.id == 1 && payload.is_empty());
        if head.kind != wire::Kind::Wait {
            break head;
        }
        beats += 1;
    };
    assert_eq!((gone.kind, gone.key), (wire::Kind::Gone, key(7)));
    assert!(beats >= 1, "it was not silent");
    // Of three, the one that is read for and one that is not are given up; each is answered in its turn.
    for ask in [pull(8, 2, 0), pull(1, 3, 0), pull(2, 4, 0)] {
        stream.write_all(&ask.encode()).await.unwrap();
    }
    for id in [3, 2] {
        stream.write_all(&Ask::plain(Want::Cancel, 3, id, 0).encode()).await.unwrap();
    }
    let mut said = Vec::new();
    while said.len() < 3 {
        let (head, payload) = answer(&mut stream).await;
        if head.kind != wire::Kind::Wait {
            said.push((head.id, head.kind, payload));
        }
    }
    let wanted = payload(2)[4096..].to_vec();
    let gone = |id| (id, wire::Kind::Gone, Vec::new());
    assert_eq!(said, [gone(2), gone(3), (4, wire::Kind::Piece, wanted)]);
    world.end().await;
}

#[tokio::test]
async fn senseless_words_end_the_connection_and_are_counted() {
    let world = World::serving(Memory::with(1), Size::mib(1)).await;
    let path = world.fabric.paths(&["b".into()]).remove(0);
    for bad in [Ask::plain(Want::Pull, 1, 1, 1), Ask::plain(Want::Fill, 1, 1, wire::MAX_PROBE + 1)] {
        let before = world.count("refused_connections_total");
        let mut stream = rail::open(&world.fabric, &path, world.tickets.issue([1; 32], 1)).await.unwrap();
        stream.write_all(&bad.encode()).await.unwrap();
        assert_eq!(stream.read(&mut [0; 1]).await.unwrap_or(0), 0, "{bad:?}");
        assert_eq!(world.count("refused_connections_total"), before + 1);
    }
    world.end().await;
}

/// Runs one unit test in a process of its own, with a mutant.
fn passes(test: &str, mutant: Option<&str>) -> bool {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--test-threads", "1"]).env_remove(crate::base::mutant::VARIABLE);
    if let Some(mutant) = mutant {
        command.env(crate::base::mutant::VARIABLE, mutant);
    }
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("running 1 test"), "{test}: {text}");
    output.status.success()
}

#[test]
fn mutants_of_the_receiving_side_are_noticed() {
    if !cfg!(debug_assertions) {
        eprintln!("skipped: a release build has no mutants");
        return;
    }
    for (test, mutant) in [
        (
            "transfer::tests::bytes_that_come_after_the_fetch_returned_or_was_dropped_touch_no_row",
            "LateWrite",
        ),
        ("transfer::piece::tests::nothing_is_written_behind_a_closed_gate", "LateWrite"),
        ("transfer::piece::tests::a_piece_is_written_by_the_rail_whose_turn_it_is", "StaleRail"),
        ("transfer::tests::what_the_peer_lost_or_mislabels_fails_and_the_rest_comes", "SkipReceiveCheck"),
    ] {
        assert!(passes(test, None), "{test} fails without a mutant");
        assert!(!passes(test, Some(mutant)), "{mutant} went unnoticed by {test}");
    }
}

#[tokio::test]
async fn two_rails_share_one_fetch_and_a_dead_one_carries_nothing() {
    let world = World::serving(Memory::with(400), Size::mib(64)).await;
    let fetcher = world.fetcher(&["b", "b", "nowhere"], world.tickets.issue([1; 32], 1), PATIENCE);
    let outcomes = fetcher.fetch(&rows(400, ROW), &items(400), None).await;
    assert_eq!(outcomes, vec![Outcome::FromPeer; 400]);
    world.end().await;
}

#[tokio::test]
async fn without_any_rail_a_fetch_fails_instead_of_waiting() {
    let world = World::new();
    let fetcher = world.fetcher(&["nowhere"], Ticket([1; 32]), PATIENCE);
    assert_eq!(fetcher.fetch(&rows(2, ROW), &items(2), None).await, [Outcome::Failed; 2]);
    let none = world.fetcher(&[], Ticket([1; 32]), PATIENCE);
    assert_eq!(none.fetch(&rows(2, ROW), &items(2), None).await, [Outcome::Failed; 2]);
    world.end().await;
}

/// Lands the first half of each row at once, and keeps where the rest of it goes. A row that did not come is not there
/// when it is asked for again.
#[derive(Default)]
struct Halves {
    kept: Arc<Mutex<Vec<Arrival>>>,
    begun: Mutex<HashSet<u32>>,
}

impl Shelf for Halves {
    fn read(&self, _: Space, wanted: RowKey, mut into: Arrival) -> BoxFuture<'static, ()> {
        let n = u32::from_le_bytes(wanted.hash.0[..4].try_into().unwrap());
        if !self.begun.lock().insert(n) {
            return Box::pin(std::future::ready(()));
        }
        let payload = Bytes::from(payload(n));
        into.begin(About { position: item(n).position, checksum: crc64(&[&payload]), length: ROW as u32 });
        into.add(payload.slice(..ROW / 2));
        self.kept.lock().push(into);
        Box::pin(std::future::ready(()))
    }
}

#[tokio::test]
async fn pieces_leave_while_the_rest_of_their_row_is_still_being_read() {
    let world = World::new();
    let shelf = Halves::default();
    let kept = shelf.kept.clone();
    let addresses = world.serve(shelf, Size::mib(1), &["b"]).await;
    let options = Options { patience: PATIENCE, piece_bytes: ROW / 4 };
    let ticket = world.tickets.issue([1; 32], 1);
    let paths = world.fabric.paths(&addresses);
    let fetcher = Fetcher::along(&world.fabric, paths, ticket, options, &world.metrics, &world.tasks);
    let (rows, wanted) = (rows(2, ROW), items(2));
    let fetch = fetcher.fetch(&rows, &wanted, None);
    let rest = async {
        // The whole first half is here before the second one is there to be read.
        while fetcher.rails()[0].bytes < ROW as u64 / 2 || kept.lock().len() < 2 {
            tokio::task::yield_now().await;
        }
        rows.look(0, |row| {
            let wanted = payload(0);
            assert!(row[..ROW / 2] == wanted[..ROW / 2] && row[ROW / 2..] != wanted[ROW / 2..]);
        });
        let mut first = kept.lock().remove(0);
        first.add(Bytes::from(payload(0)).slice(ROW / 2..));
        drop(first);
        // Of the second row the rest does not come.
        kept.lock().clear();
    };
    let (outcomes, ()) = tokio::join!(fetch, rest);
    assert_eq!(outcomes, [Outcome::FromPeer, Outcome::Failed]);
    rows.look(0, |row| assert!(row == payload(0)));
    assert_eq!(world.count("rows_failed_total{reason=\"missing\"}"), 1);
    world.end().await;
}
