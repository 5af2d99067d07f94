//! What every fabric must do, as one test that runs over each of them.
//!
//! A new fabric adds one line at the end. Nothing here knows which one it is: rows of several pieces over two rails,
//! what is missing, a deadline, a fetch that is given up, probes both ways, a ticket that is revoked.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::tests::{Memory, PATIENCE, World, items, key, payload_of, rows};
use super::twin::Twin;
use super::*;
use crate::base::frame::Outcome;
use crate::base::rows::Rows;
use crate::base::units::Bytes as Size;

const ROW: usize = 192 << 10;

/// Gives how many bytes were read out of the other side's memory.
async fn conforms(fabric: Fabric, at: &[&str]) -> u64 {
    let world = World::over(fabric);
    let shelf = Memory { slow_from: 30, ..Memory::of(32, ROW) };
    shelf.rows.lock().remove(&key(7));
    let addresses = world.serve(shelf, Size::mib(1), at).await;
    let ticket = world.tickets.issue([1; 32], 1);
    let options = Options { patience: PATIENCE, piece_bytes: 64 << 10 };
    let paths = world.fabric.paths(&addresses);
    assert_eq!(paths.len(), at.len());
    let fetcher = Fetcher::along(&world.fabric, paths, ticket, options, &world.metrics, &world.tasks);
    let area = rows(32, ROW);
    whole_rows_come_and_a_missing_one_fails(&fetcher, &area).await;
    a_deadline_ends_what_the_drive_does_not_deliver(&fetcher, &area).await;
    bytes_flow_both_ways(&fetcher, at.len()).await;
    world.tickets.revoke([1; 32]);
    while fetcher.rails().iter().any(|rail| rail.up) {
        tokio::task::yield_now().await;
    }
    assert_eq!(fetcher.fetch(&area, &items(1), None).await, [Outcome::Failed]);
    let read = world.metrics.read_bytes();
    world.end().await;
    read
}

async fn whole_rows_come_and_a_missing_one_fails(fetcher: &Fetcher, area: &Arc<Rows>) {
    while fetcher.rails().iter().any(|rail| !rail.up) {
        tokio::task::yield_now().await;
    }
    let outcomes = fetcher.fetch(area, &items(30), None).await;
    for n in 0..30_u32 {
        let wanted = if n == 7 { Outcome::Failed } else { Outcome::FromPeer };
        assert_eq!(outcomes[n as usize], wanted, "row {n}");
        if n != 7 {
            area.look(n, |row| assert!(row == payload_of(n, ROW), "row {n}"));
        }
    }
    let carried: Vec<u64> = fetcher.rails().iter().map(|rail| rail.bytes).collect();
    assert!(carried.iter().all(|&bytes| bytes > 0), "every rail took part: {carried:?}");
    assert!(carried.iter().sum::<u64>() >= 29 * ROW as u64);
}

async fn a_deadline_ends_what_the_drive_does_not_deliver(fetcher: &Fetcher, area: &Arc<Rows>) {
    let deadline = Instant::now() + Duration::from_millis(200);
    let outcomes = fetcher.fetch(area, &items(32)[28..], Some(deadline)).await;
    assert_eq!(outcomes[2..], [Outcome::Failed; 2]);
    // Dropped instead of awaited: the rails go on with what comes next.
    {
        let wanted = items(32);
        let mut given_up = std::pin::pin!(fetcher.fetch(area, &wanted[30..], None));
        assert!(futures_util::poll!(&mut given_up).is_pending());
    }
    assert_eq!(fetcher.fetch(area, &items(3), None).await, [Outcome::FromPeer; 3]);
}

async fn bytes_flow_both_ways(fetcher: &Fetcher, rails: usize) {
    for way in [Way::Here, Way::There] {
        for rail in (0..rails).map(Some).chain([None]) {
            let moved = fetcher.probe(rail, way, 1 << 20).await.unwrap();
            assert!(moved.bytes >= 1 << 20 && moved.bytes < 2 << 20, "{way:?} {rail:?}: {moved:?}");
            assert_eq!(moved.rails.len(), if rail.is_some() { 1 } else { rails });
        }
    }
    assert!(fetcher.probe(Some(rails), Way::Here, 1).await.is_err());
    assert!(fetcher.probe(None, Way::Here, PROBE_MOST + 1).await.is_err());
}

#[tokio::test]
async fn memory_conforms() {
    assert_eq!(conforms(Fabric::Mem(MemNet::default()), &["one", "two"]).await, 0);
}

fn read_memory() -> (Fabric, Twin) {
    let twin = Twin::default();
    (Fabric::one_sided(Fabric::Mem(MemNet::default()), Arc::new(twin.clone())), twin)
}

#[tokio::test]
async fn memory_that_is_read_conforms() {
    let (fabric, twin) = read_memory();
    conforms(fabric, &["one", "two"]).await;
    assert!(twin.posted() > 0, "it was read");
}

/// Reads that do not end: the fetch returns when nothing can land any more, by a deadline and dropped.
#[tokio::test]
async fn a_read_that_was_given_up_lands_in_no_row_that_was_handed_back() {
    for dropped in [false, true] {
        let (fabric, twin) = read_memory();
        let world = World::over(fabric);
        let addresses = world.serve(Memory::of(4, ROW), Size::mib(8), &["one"]).await;
        let fetcher = world.fetcher(&[&addresses[0]], world.tickets.issue([1; 32], 1), PATIENCE);
        let area = rows(4, ROW);
        // Sent over the connection while the area is prepared, then read.
        while twin.posted() == 0 {
            assert_eq!(fetcher.fetch(&area, &items(4), None).await, [Outcome::FromPeer; 4]);
        }
        twin.stick(true);
        let before = twin.posted();
        let wanted = items(4);
        {
            let deadline = Instant::now() + Duration::from_millis(if dropped { 60_000 } else { 200 });
            let mut fetch = std::pin::pin!(fetcher.fetch(&area, &wanted, Some(deadline)));
            while twin.posted() == before {
                assert!(futures_util::poll!(&mut fetch).is_pending());
                tokio::task::yield_now().await;
            }
            if !dropped {
                assert_eq!(fetch.await, [Outcome::Failed; 4]);
            }
        }
        (0..4).for_each(|n| area.fill(n, |row| row.fill(0xAA)));
        // The rail has failed and comes back; by then the device has written all that it could.
        twin.stick(false);
        while fetcher.rails()[0].reconnects == 0 {
            tokio::task::yield_now().await;
        }
        (0..4)
            .for_each(|n| area.look(n, |row| assert!(row.iter().all(|&b| b == 0xAA), "row {n}, {dropped}")));
        assert_eq!(fetcher.fetch(&area, &items(4), None).await, [Outcome::FromPeer; 4]);
        world.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tcp_conforms() {
    conforms(Fabric::tcp(&[]).unwrap(), &["127.0.0.1:0", "127.0.0.1:0"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tcp_with_pinned_rails_conforms() {
    let ends = ["127.0.0.1".parse().unwrap(), "127.0.0.2".parse().unwrap()];
    conforms(Fabric::tcp(&ends).unwrap(), &["127.0.0.1:0", "127.0.0.2:0"]).await;
}

#[tokio::test]
async fn where_reads_fail_or_rows_cannot_be_read_into_bytes_are_sent() {
    for (reads, areas) in [(true, false), (false, true)] {
        let (fabric, twin) = read_memory();
        twin.spoil(reads, areas);
        let world = World::over(fabric);
        let addresses = world.serve(Memory::of(4, ROW), Size::mib(8), &["one"]).await;
        let fetcher = world.fetcher(&[&addresses[0]], world.tickets.issue([1; 32], 1), PATIENCE);
        let area = rows(4, ROW);
        // Each connection on which reads fail is lost, and they are not tried for ever.
        let mut lost = 0;
        for _ in 0..20 {
            while !fetcher.rails()[0].up {
                tokio::task::yield_now().await;
            }
            fetcher.fetch(&area, &items(4), None).await;
            lost = fetcher.rails()[0].errors;
            tokio::task::yield_now().await;
        }
        assert_eq!(lost, if reads { 2 } else { 0 });
        assert_eq!((twin.posted() > 0, world.metrics.read_bytes()), (reads, 0));
        assert_eq!(fetcher.fetch(&area, &items(4), None).await, [Outcome::FromPeer; 4]);
        world.end().await;
    }
}

/// Where `install/nixl.sh` put NVIDIA's library. In CI it must be there; elsewhere its absence is said.
fn nixl_library() -> Option<std::path::PathBuf> {
    let home =
        || std::path::PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache/spark-kv");
    let cache = std::env::var_os("SPARK_KV_CACHE").map_or_else(home, Into::into);
    let library = cache.join("nixl/lib/python3/site-packages/.nixl_cu12.mesonpy.libs/libnixl_capi.so");
    let found = library.is_file().then_some(library);
    if found.is_none() {
        assert!(std::env::var_os("SPARK_KV_NIXL").is_none(), "install/nixl.sh was run and left no library");
        eprintln!("skipped: no NIXL here; install/nixl.sh gets it");
    }
    found
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nixl_over_tcp_conforms() {
    let Some(library) = nixl_library() else { return };
    let remote = nixl::start(nixl::Options { library, transports: Vec::new(), memory: 8 << 20 }).unwrap();
    let ends = ["127.0.0.1".parse().unwrap(), "127.0.0.2".parse().unwrap()];
    let fabric = Fabric::one_sided(Fabric::tcp(&ends).unwrap(), remote);
    assert_eq!(fabric.name(), "NIXL over TCP");
    let read = conforms(fabric, &["127.0.0.1:0", "127.0.0.2:0"]).await;
    assert!(read > 0, "something was read, not sent");
}
