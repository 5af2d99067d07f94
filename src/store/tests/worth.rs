//! What is kept under pressure: pins, anchors, spaces with an engine; and what is not let in.

use std::time::Duration;

use super::*;

/// A store in memory whose time a test moves.
async fn timed(place: &Place, rows: &Arc<Rows>) -> (Store, Clock) {
    let clock = Clock::sim();
    clock.advance(Duration::from_secs(1000));
    let (store, _) = Store::open(place.options(), place.disk.clone(), clock.clone(), &Meter::new()).unwrap();
    store.attach(rows).await.unwrap();
    (store, clock)
}

/// Neither what the folder takes nor what is counted is ever more than the capacity.
fn accounts(place: &Place, store: &Store) {
    let DiskKind::Mem(mem) = &place.disk else { unreachable!("in memory") };
    let (status, taken) = (store.status(), mem.list().iter().map(|f| f.taken).sum::<u64>());
    assert!(taken <= status.capacity && status.used <= status.capacity, "{taken} {status:?}");
}

fn chain(rows: impl Iterator<Item = u32>) -> Vec<(RowKey, u32)> {
    rows.map(|n| (key(n), (n + 1) * 16)).collect()
}

#[tokio::test]
async fn a_large_dump_of_one_session_never_pushes_out_a_small_shared_anchor() {
    let place = Place::in_memory();
    let rows = area(1, 4096, SPACE);
    let (store, clock) = timed(&place, &rows).await;
    // Each row of the anchor lies in a segment with others that nobody comes back for.
    for n in 0..10 {
        put_each(&store, &rows, n..n + 1).await;
        put_each(&store, &rows, 5000 + n * 29..5029 + n * 29).await;
    }
    for session in 1..=5 {
        put_each(&store, &rows, session * 10..session * 10 + 5).await;
        store.heat(SPACE, &chain((0..10).chain(session * 10..session * 10 + 5)), clock.now());
        clock.advance(Duration::from_secs(60));
    }
    for n in 1000..4000 {
        fill(&rows, 0, n);
        store.put(&rows, vec![item(n, 0)]).await;
        clock.advance(Duration::from_millis(100));
        if n % 50 == 0 {
            assert!((0..10).all(|n| store.holds(SPACE, &key(n))), "{:?} after {n}", store.status());
            accounts(&place, &store);
        }
    }
    let status = store.status();
    assert!(status.released > 2000 && status.segments < 32, "{status:?}");
    assert_eq!(status.moved_bytes, 0, "what stays is not written again: {status:?}");
    assert_eq!(get_each(&store, &rows, 0..10).await, [Outcome::FromDrive; 10]);
    store.close().await;
    accounts(&place, &store);
}

#[tokio::test]
async fn rows_of_a_space_without_an_engine_go_before_older_ones_of_one_that_has_it() {
    let place = Place::in_memory();
    let rows = area(1, 4096, SPACE);
    let (store, clock) = timed(&place, &rows).await;
    put_each(&store, &rows, 0..100).await;
    clock.advance(Duration::from_secs(3600));
    let gone = area(1, 4096, Space { namespace: Namespace([1; 32]), ..SPACE });
    store.attach(&gone).await.unwrap();
    put_each(&store, &gone, 0..200).await;
    store.heat(gone.space, &chain(0..200), clock.now());
    store.detach(gone.id).await;
    put_each(&store, &rows, 100..340).await;
    let status = store.status();
    assert!(status.released > 50, "{status:?}");
    assert!((0..100).all(|n| store.holds(SPACE, &key(n))), "{status:?}");
    assert!(status.spaces.iter().any(|s| !s.attached && s.rows < 150), "{status:?}");
    store.close().await;
}

#[tokio::test]
async fn what_was_not_used_for_its_time_to_live_goes_first() {
    let place = Place::in_memory();
    let rows = area(1, 4096, SPACE);
    let (store, clock) = timed(&place, &rows).await;
    store.set_ttl_days(1);
    // Before: much used, but long ago; after: not used, but young.
    put_each(&store, &rows, 0..60).await;
    for n in 0..20 {
        store.heat(SPACE, &chain((0..60).filter(|at| *at != 59 - n)), clock.now());
    }
    clock.advance(Duration::from_secs(86_401));
    put_each(&store, &rows, 100..470).await;
    clock.advance(Duration::from_secs(60_000));
    put_each(&store, &rows, 470..600).await;
    assert!((0..60).all(|n| !store.holds(SPACE, &key(n))), "{:?}", store.status());
    store.close().await;
}

#[tokio::test]
async fn pins_survive_pressure_and_a_restart_and_drops_do_not_come_back() {
    for place in [Place::in_memory(), Place::on_drive(Io::Plain, "plain")] {
        let (store, _) = place.open();
        let rows = area(1, 4096, SPACE);
        store.attach(&rows).await.unwrap();
        put_each(&store, &rows, 0..100).await;
        let pins: Vec<u32> = (0..100).step_by(5).collect();
        let keys: Vec<_> = pins.iter().map(|n| key(*n)).collect();
        assert_eq!(store.pin(SPACE, keys.clone()).await.unwrap(), 20);
        assert_eq!(store.pin(SPACE, vec![key(0), key(7777)]).await.unwrap(), 0, "pinned, and not held");
        assert_eq!(store.drop_rows(SPACE, vec![key(1), key(5), key(7777)]).await.unwrap(), 2);
        assert!(!store.holds(SPACE, &key(1)) && !store.holds(SPACE, &key(5)));
        assert_eq!(store.status().pinned, 19, "what is dropped is pinned no more");
        store.close().await;
        let (store, _) = place.open();
        store.attach(&rows).await.unwrap();
        assert_eq!(store.pinned().await.len(), 19);
        assert!(!store.holds(SPACE, &key(1)) && !store.holds(SPACE, &key(5)), "{}", place.name);
        put_each(&store, &rows, 1000..3000).await;
        let status = store.status();
        assert!(status.reclaimed > 10 && status.used <= status.capacity, "{status:?}");
        for n in pins.iter().filter(|n| **n != 5) {
            assert_eq!(get_each(&store, &rows, *n..n + 1).await, [Outcome::FromDrive], "{n} {status:?}");
        }
        assert_eq!(store.unpin(SPACE, keys).await.unwrap(), 19);
        assert_eq!(store.forget(SPACE).await.unwrap(), status.rows);
        store.close().await;
        let (store, opened) = place.open();
        assert_eq!((opened.rows, opened.damaged), (0, 0), "{:?}", opened.notes);
        assert!(store.pinned().await.is_empty());
        store.close().await;
    }
}

#[tokio::test]
async fn pins_beyond_half_of_the_capacity_are_refused() {
    let place = Place::in_memory();
    let (store, _) = place.open();
    let rows = area(1, 65_536, SPACE);
    store.attach(&rows).await.unwrap();
    put_each(&store, &rows, 0..40).await;
    let error = store.pin(SPACE, (0..40).map(key).collect()).await.unwrap_err();
    assert!(matches!(error, Error::TooManyPins { .. }), "{error}");
    assert!(error.to_string().contains("unpin rows or raise store.capacity"), "{error}");
    assert_eq!(store.status().pinned, 0, "all or none");
    let most = (0..40).filter(|n| n % 2 == 0).map(key).collect();
    assert_eq!(store.pin(SPACE, most).await.unwrap(), 20);
    // As much as may be pinned is, in every segment, and still there is room for others.
    put_each(&store, &rows, 100..400).await;
    assert!((0..40).step_by(2).all(|n| store.holds(SPACE, &key(n))), "{:?}", store.status());
    assert_eq!(store.status().read_only, None);
    assert_eq!(put_each(&store, &rows, 500..501).await, [Outcome::Stored]);
    store.close().await;
}

#[tokio::test]
async fn rows_on_the_move_can_be_read_at_every_moment() {
    for place in Place::all() {
        let (store, _) = place.open();
        let (mine, theirs) = (area(1, 8192, SPACE), area(1, 8192, SPACE));
        store.attach(&mine).await.unwrap();
        store.attach(&theirs).await.unwrap();
        // What stays of each segment is one row, so there are soon too many of them.
        for n in 0..45 {
            // A store that is full may want to see it twice.
            put_each(&store, &mine, n..n + 1).await;
            put_each(&store, &mine, n..n + 1).await;
            assert_eq!(store.pin(SPACE, vec![key(n)]).await.unwrap(), 1);
            put_each(&store, &mine, 2000 + n * 21..2021 + n * 21).await;
        }
        let written = std::cell::Cell::new(false);
        let writer = async {
            put_each(&store, &mine, 100..1500).await;
            written.set(true);
        };
        let reader = async {
            while !written.get() {
                let seen = get_each(&store, &theirs, 0..45).await;
                assert_eq!(seen, [Outcome::FromDrive; 45], "{}: {:?}", place.name, store.status());
            }
        };
        tokio::join!(writer, reader);
        let status = store.status();
        assert!(status.moved_bytes > 0 && status.damaged == 0, "{}: {status:?}", place.name);
        store.close().await;
    }
}

#[tokio::test]
async fn rows_that_never_came_back_are_refused_only_when_hotter_ones_would_go() {
    let place = Place::in_memory();
    let rows = area(1, 4096, SPACE);
    let (store, clock) = timed(&place, &rows).await;
    // All that fits, and all of it in use by many.
    put_each(&store, &rows, 0..440).await;
    for n in 0..30 {
        store.heat(SPACE, &chain((0..440).filter(|at| *at != 439 - n)), clock.now());
    }
    assert_eq!(store.status().refused, 0, "nothing is refused while there is room");
    let first = put_each(&store, &rows, 1000..1400).await;
    let status = store.status();
    assert!(status.refused > 80, "{status:?}");
    assert!(count(&first, Outcome::Failed) == 0 && status.held == 0, "the engine has nothing to offer again");
    let refused: Vec<_> = (1000..1400).filter(|n| !store.holds(SPACE, &key(*n))).collect();
    let again = *refused.last().unwrap();
    assert_eq!(put_each(&store, &rows, again..again + 1).await, [Outcome::Stored], "what comes back is kept");
    accounts(&place, &store);
    store.close().await;
}
