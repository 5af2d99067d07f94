//! A server and a fetcher over memory: what arrives, what does not, and that nothing arrives late.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::Instant;

use super::wire::{self, Head, Request, RowHead};
use super::*;
use crate::base::block::{BlockHash, GroupId, Namespace, Rank, RowItem};
use crate::base::checksum::crc64;
use crate::base::frame::Outcome;
use crate::base::geometry::{Group, GroupKind, Hello};
use crate::base::rows::{AreaId, Rows};
use crate::base::shm::Mapping;
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
    let row_bytes = u32::try_from(row_bytes).unwrap();
    let (_, fd) = Mapping::anonymous("rows", (count * row_bytes) as usize).unwrap();
    let group =
        || Group { kind: GroupKind::FullAttention, tokens_per_row: 16, covered: vec![(0, row_bytes)] };
    let hello = Hello::of_rows(count, row_bytes, vec![group(), group()]);
    assert_eq!(hello.check(), Ok(()));
    Rows::attach(AreaId(1), space(), &hello, &fd).unwrap()
}

fn payload(n: u32) -> Vec<u8> {
    (0..ROW).map(|i| (i as u32).wrapping_mul(31).wrapping_add(n * 7) as u8).collect()
}

/// Rows in memory; reads of keys over `slow_from` do not end.
#[derive(Default)]
struct Memory {
    rows: Mutex<HashMap<RowKey, Record>>,
    slow_from: u32,
}

impl Memory {
    fn with(count: u32) -> Self {
        let rows = (0..count).map(|n| {
            let payload = Bytes::from(payload(n));
            let record = Record { position: item(n).position, checksum: crc64(&[&payload]), payload };
            (key(n), record)
        });
        Self { rows: Mutex::new(rows.collect()), slow_from: u32::MAX }
    }
}

impl Shelf for Memory {
    fn read(&self, asked: Space, wanted: RowKey) -> BoxFuture<'static, Option<Record>> {
        let n = u32::from_le_bytes(wanted.hash.0[..4].try_into().unwrap());
        if n >= self.slow_from {
            return Box::pin(std::future::pending());
        }
        let record = if asked == space() { self.rows.lock().get(&wanted).cloned() } else { None };
        Box::pin(async move { record })
    }
}

struct World {
    fabric: Fabric,
    tickets: Tickets,
    tasks: Tasks,
    metrics: Metrics,
    meter: Meter,
}

const PATIENCE: Duration = Duration::from_secs(30);

impl World {
    fn new() -> Self {
        let meter = Meter::new();
        Self {
            fabric: Fabric::Mem(MemNet::default()),
            tickets: Tickets::default(),
            tasks: Tasks::new(),
            metrics: Metrics::new(&meter),
            meter,
        }
    }

    async fn serving(shelf: Memory, memory: Size) -> Self {
        let world = Self::new();
        let listener = world.fabric.listen("b").await.unwrap();
        let server =
            Server::new(Arc::new(shelf), world.tickets.clone(), memory, PATIENCE, world.metrics.clone());
        world.tasks.spawn(Kind::Serving, "server", server.run(listener, world.tasks.clone()));
        world
    }

    fn fetcher(&self, addresses: &[&str], ticket: Ticket, patience: Duration) -> Fetcher {
        let addresses: Vec<String> = addresses.iter().map(|&a| a.to_owned()).collect();
        Fetcher::start(&self.fabric, &addresses, ticket, patience, &self.metrics, &self.tasks)
    }

    fn count(&self, series: &str) -> u64 {
        let text = self.meter.text();
        let line = text.lines().find(|l| l.starts_with(&format!("sparkkv_transfer_{series} ")));
        line.unwrap_or_else(|| panic!("{series} in {text}")).rsplit(' ').next().unwrap().parse().unwrap()
    }

    async fn end(self) {
        assert_eq!(self.tasks.stop(Duration::from_secs(5)).await, 0, "everything ends when asked");
    }
}

fn items(count: u32) -> Vec<RowItem> {
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

    async fn request(&mut self) -> Request {
        let length = self.0.read_u32_le().await.unwrap();
        let mut frame = vec![0; length as usize];
        self.0.read_exact(&mut frame).await.unwrap();
        Request::decode(&frame).unwrap()
    }

    async fn head(&mut self, request: &Request, index: u32, n: u32) {
        let row = RowHead { position: item(n).position, length: ROW as u32, checksum: crc64(&[&payload(n)]) };
        let head = Head { id: request.id, index, space: request.space, key: key(n), row: Some(row) };
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
        let request;
        {
            let deadline = Instant::now() + Duration::from_millis(if drop_it { 60_000 } else { 100 });
            let fetch = fetcher.fetch(&rows, &wanted, Some(deadline));
            tokio::pin!(fetch);
            request = tokio::select! {
                biased;
                request = hand.request() => request,
                _ = &mut fetch => panic!("nothing came yet"),
            };
            hand.head(&request, 0, 0).await;
            hand.0.write_all(&payload(0)[..100]).await.unwrap();
            if !drop_it {
                assert_eq!(fetch.await, [Outcome::Failed; 2]);
            }
        }
        rows.fill(0, |row| row.fill(0xAA));
        rows.fill(1, |row| row.fill(0xAA));
        hand.0.write_all(&payload(0)[100..]).await.unwrap();
        hand.head(&request, 1, 1).await;
        hand.0.write_all(&payload(1)).await.unwrap();
        // The same connection goes on to serve the next fetch: by then all late bytes have passed.
        let next = [item(2)];
        let (outcomes, ()) = tokio::join!(fetcher.fetch(&rows, &next, None), async {
            let request = hand.request().await;
            hand.head(&request, 0, 2).await;
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
async fn a_reply_out_of_turn_a_silent_peer_and_a_closed_connection_fail_at_once() {
    for what in ["out of turn", "silent", "closed", "unasked"] {
        let world = World::new();
        let mut listener = world.fabric.listen("b").await.unwrap();
        let patience = if what == "silent" { Duration::from_millis(50) } else { PATIENCE };
        let fetcher = world.fetcher(&["b"], Ticket([1; 32]), patience);
        let mut hand = Hand::accept(&mut listener).await;
        let (rows, wanted) = (rows(4, ROW), items(2));
        let (outcomes, hand) = tokio::join!(fetcher.fetch(&rows, &wanted, None), async {
            let request = hand.request().await;
            match what {
                "out of turn" => hand.head(&request, 1, 1).await,
                "unasked" => hand.head(&request, 0, 3).await,
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
