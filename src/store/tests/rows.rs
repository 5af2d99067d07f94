//! Rows in and out, what others see of it, and the capacity.

use super::*;

/// Every promise of put, get, read, holds and a restart, on one disk.
async fn rows_come_back(place: Place) {
    let name = place.name;
    let (store, opened) = place.open();
    assert_eq!((opened.rows, opened.damaged, opened.io.as_str()), (0, 0, name));
    let rows = area(16, 8192, SPACE);
    store.attach(&rows).await.unwrap();
    let (held, mut changes) = store.subscribe(SPACE);
    assert!(held.is_empty());

    (0..8).for_each(|n| fill(&rows, n, n));
    let items: Vec<_> = (0..8).rev().map(|n| item(n, n)).collect();
    assert_eq!(store.put(&rows, items.clone()).await, vec![Outcome::Stored; 8], "{name}");
    assert_eq!(store.put(&rows, items).await, vec![Outcome::Held; 8], "{name}");
    let mut added: Vec<_> =
        (0..8).map(|_| changes.try_recv().unwrap()).map(|c| (c.position, c.kind)).collect();
    added.sort_by_key(|(position, _)| *position);
    assert_eq!(added, (0..8).map(|n| ((n + 1) * 16, ChangeKind::Added)).collect::<Vec<_>>());
    assert!(store.holds(SPACE, &key(3)) && !store.holds(SPACE, &key(8)));

    let mut wanted: Vec<_> = (0..8).map(|n| item(n, n + 8)).collect();
    wanted.push(item(99, 0));
    let outcomes = store.get(&rows, wanted, None).await;
    assert_eq!(outcomes[..8], [Outcome::FromDrive; 8], "{name}");
    assert_eq!(outcomes[8], Outcome::Failed);
    assert!((0..8).all(|n| is_filled(&rows, n + 8, n)), "{name}");

    let record = store.read(SPACE, key(5)).await.unwrap();
    assert_eq!(record.payload, content(5, 8192), "{name}");
    assert_eq!(record.checksum, crate::base::checksum::crc64(&[&record.payload]));
    assert_eq!(record.position, 96);
    assert!(store.read(SPACE, key(99)).await.is_none());
    let status = store.status();
    assert_eq!((status.rows, status.stored, status.held, status.loaded, status.served), (8, 8, 8, 8, 1));
    assert_eq!(status.spaces.len(), 1);
    assert!(status.spaces[0].attached && status.spaces[0].bytes == 8 * 8192);
    store.close().await;
    assert_eq!(store.put(&rows, vec![item(50, 0)]).await, [Outcome::Failed], "closed");
    assert!(matches!(store.attach(&rows).await, Err(Error::Closed)));

    let (store, opened) = place.open();
    // One with rows, and the next one.
    assert_eq!((opened.rows, opened.damaged, opened.segments), (8, 0, 2), "{name}: {:?}", opened.notes);
    store.attach(&rows).await.unwrap();
    assert_eq!(get_each(&store, &rows, 0..8).await, vec![Outcome::FromDrive; 8], "{name}");
    // The segment goes on where it stopped.
    assert_eq!(put_each(&store, &rows, 8..10).await, vec![Outcome::Stored; 2]);
    assert_eq!(store.status().segments, 2, "{name}");
    store.close().await;
    let (store, opened) = place.open();
    assert_eq!(opened.rows, 10, "{name}");
    store.close().await;
}

#[tokio::test]
async fn rows_come_back_on_every_disk() {
    for place in Place::all() {
        rows_come_back(place).await;
    }
}

#[tokio::test]
async fn bytes_that_a_group_does_not_cover_never_reach_the_drive() {
    let place = Place::in_memory();
    let (store, _) = place.open();
    let rows = area(2, 4096, SPACE);
    store.attach(&rows).await.unwrap();
    fill(&rows, 0, 1);
    let mut partial = item(1, 0);
    partial.key.group = GroupId(1);
    assert_eq!(store.put(&rows, vec![partial]).await, [Outcome::Stored]);
    let record = store.read(SPACE, partial.key).await.expect("it was stored");
    let mut expected = vec![0; 4096];
    for covered in [0..1000, 2000..2096] {
        expected[covered.clone()].copy_from_slice(&content(1, 4096)[covered]);
    }
    assert!(record.payload == expected, "other requests' bytes were stored");
    store.close().await;
}

#[tokio::test]
async fn a_key_that_is_offered_twice_at_once_is_stored_once() {
    for place in Place::all() {
        let (store, _) = place.open();
        let rows = area(2, 4096, SPACE);
        store.attach(&rows).await.unwrap();
        for n in 0..50 {
            fill(&rows, 0, n);
            fill(&rows, 1, n);
            let twice = store.put(&rows, vec![item(n, 0), item(n, 1)]).await;
            assert_eq!(twice, [Outcome::Stored, Outcome::Held]);
        }
        let (a, b) = (store.clone(), store.clone());
        fill(&rows, 0, 70);
        fill(&rows, 1, 70);
        let (x, y) = tokio::join!(a.put(&rows, vec![item(70, 0)]), b.put(&rows, vec![item(70, 1)]));
        assert_eq!((x[0], y[0]), (Outcome::Stored, Outcome::Held));
        assert_eq!(store.status().rows, 51);
        store.close().await;
    }
}

#[tokio::test]
async fn what_is_not_attached_or_not_there_is_never_touched() {
    let place = Place::in_memory();
    let (store, _) = place.open();
    let rows = area(2, 4096, SPACE);
    fill(&rows, 0, 1);
    assert_eq!(store.put(&rows, vec![item(1, 0)]).await, [Outcome::Failed]);
    store.attach(&rows).await.unwrap();
    assert_eq!(store.put(&rows, vec![item(1, 2)]).await, [Outcome::Failed], "row 2 of 2");
    let mut strange = item(1, 0);
    strange.key.group = GroupId(7);
    assert_eq!(store.put(&rows, vec![strange]).await, [Outcome::Failed], "group 7 of 2");
    assert_eq!(store.put(&rows, vec![]).await, []);
    assert_eq!(store.put(&rows, vec![item(1, 0)]).await, [Outcome::Stored]);
    let misplaced = RowItem { position: 5, ..item(1, 1) };
    assert_eq!(store.get(&rows, vec![misplaced], None).await, [Outcome::Failed], "another position");
    let wider = area(2, 8192, SPACE);
    store.attach(&wider).await.unwrap();
    assert_eq!(store.get(&wider, vec![item(1, 1)], None).await, [Outcome::Failed], "another length");
    let elsewhere = area(2, 4096, Space { namespace: Namespace([6; 32]), ..SPACE });
    store.attach(&elsewhere).await.unwrap();
    assert_eq!(store.get(&elsewhere, vec![item(1, 1)], None).await, [Outcome::Failed], "another namespace");
    let other_rank = area(2, 4096, Space { rank: Rank { index: 1, of: 2 }, ..SPACE });
    store.attach(&other_rank).await.unwrap();
    assert_eq!(store.get(&other_rank, vec![item(1, 1)], None).await, [Outcome::Failed], "another rank");
    assert_eq!(store.status().damaged, 0);
    store.detach(rows.id).await;
    store.detach(rows.id).await;
    assert_eq!(store.get(&rows, vec![item(1, 1)], None).await, [Outcome::Failed], "detached");
    let huge = area(1, 2 << 20, SPACE);
    assert!(matches!(store.attach(&huge).await, Err(Error::RowTooLarge { .. })));
    store.close().await;
}

#[tokio::test]
async fn no_read_starts_after_its_deadline() {
    let place = Place::in_memory();
    let clock = Clock::sim();
    let (store, _) = Store::open(place.options(), place.disk.clone(), clock.clone(), &Meter::new()).unwrap();
    let rows = area(2, 4096, SPACE);
    store.attach(&rows).await.unwrap();
    put_each(&store, &rows, 0..1).await;
    let deadline = Some(clock.now().plus(std::time::Duration::from_millis(5)));
    clock.advance(std::time::Duration::from_millis(5));
    assert_eq!(store.get(&rows, vec![item(0, 1)], deadline).await, [Outcome::FromDrive]);
    clock.advance(std::time::Duration::from_millis(1));
    rows.fill(1, |b| b.fill(7));
    assert_eq!(store.get(&rows, vec![item(0, 1)], deadline).await, [Outcome::Failed]);
    assert!(rows.look(1, |b| b.iter().all(|&x| x == 7)), "the row was touched");
    store.close().await;
}

/// What the folder takes on the drive, as the file system counts it.
fn taken(place: &Place) -> u64 {
    use std::os::unix::fs::MetadataExt;
    if let DiskKind::Mem(mem) = &place.disk {
        return mem.list().iter().map(|f| f.taken).sum();
    }
    let entries = std::fs::read_dir(place.folder.path()).unwrap();
    // A file that went between listing and looking takes nothing.
    entries.filter_map(|e| e.unwrap().metadata().ok()).map(|m| m.blocks() * 512).sum()
}

#[tokio::test]
async fn the_capacity_holds_and_the_oldest_rows_go_first() {
    for place in Place::all() {
        let clock = Clock::sim();
        let (store, _) =
            Store::open(place.options(), place.disk.clone(), clock.clone(), &Meter::new()).unwrap();
        let rows = area(2, 4096, SPACE);
        store.attach(&rows).await.unwrap();
        let (_, mut changes) = store.subscribe(SPACE);
        let mut gone = 0;
        for n in 0..1200 {
            clock.advance(std::time::Duration::from_secs(1));
            fill(&rows, 0, n);
            assert_eq!(store.put(&rows, vec![item(n, 0)]).await, [Outcome::Stored], "{}", place.name);
            assert!(taken(&place) <= 4 << 20, "{}", place.name);
            while let Ok(change) = changes.try_recv() {
                if change.kind == ChangeKind::Removed {
                    assert!(change.position / 16 + 380 <= n, "the oldest go first: {change:?} after {n}");
                    assert!(!store.holds(SPACE, &change.key));
                    gone += 1;
                }
            }
        }
        let status = store.status();
        assert!(status.used <= status.capacity && status.reclaimed > 10, "{status:?}");
        assert_eq!(status.rows + gone, 1200);
        let kept = get_each(&store, &rows, 0..1200).await;
        assert_eq!(count(&kept, Outcome::FromDrive) as u64, status.rows);
        let first = u32::try_from(1200 - status.rows).unwrap();
        assert!(kept[first as usize..].iter().all(|o| o.is_ok()), "exactly the newest are kept");
        store.close().await;

        // A lowered capacity is kept from the start on.
        let smaller = Options { capacity: Bytes::mib(2), ..place.options() };
        let (store, opened) = open_with(&smaller, &place.disk);
        assert!(taken(&place) <= 2 << 20, "{}", place.name);
        assert!(opened.rows > 0 && opened.damaged == 0, "{opened:?}");
        store.close().await;
    }
}

#[tokio::test]
async fn loads_stores_and_room_making_at_once_never_give_a_wrong_row() {
    for place in Place::all() {
        let (store, _) = place.open();
        let (mine, theirs) = (area(8, 16384, SPACE), area(8, 16384, SPACE));
        store.attach(&mine).await.unwrap();
        store.attach(&theirs).await.unwrap();
        let written = std::cell::Cell::new(false);
        let writer = async {
            for batch in 0..100 {
                (0..8).for_each(|row| fill(&mine, row, batch * 8 + row));
                let items = (0..8).map(|row| item(batch * 8 + row, row)).collect();
                let outcomes = store.put(&mine, items).await;
                assert_eq!(count(&outcomes, Outcome::Stored), 8);
            }
            written.set(true);
        };
        let reader = async {
            let (mut seen, mut round, mut last) = (0, 0_u32, false);
            while !last {
                // One more round after the writer has ended: then there is something to be seen for certain.
                last = written.get();
                round += 1;
                let (held, _) = store.subscribe(SPACE);
                let pick = |i: u32| held.get((i * 7 + round) as usize % held.len().max(1));
                let wanted: Vec<_> = (0..8).filter_map(|i| Some((i, pick(i)?))).collect();
                let items =
                    wanted.iter().map(|&(row, &(key, position))| RowItem { key, position, row }).collect();
                for (outcome, (row, (_, position))) in
                    store.get(&theirs, items, None).await.into_iter().zip(wanted)
                {
                    if outcome.is_ok() {
                        assert!(is_filled(&theirs, row, position / 16 - 1), "{}", place.name);
                        seen += 1;
                    }
                }
                tokio::task::yield_now().await;
            }
            seen
        };
        let ((), seen) = tokio::join!(writer, reader);
        let status = store.status();
        assert!(seen > 0 && status.reclaimed > 5 && status.damaged == 0, "{seen} {status:?}");
        store.detach(theirs.id).await;
        store.close().await;
    }
}

#[tokio::test]
async fn a_folder_is_open_once() {
    for place in Place::all() {
        let (store, _) = place.open();
        let second = Store::open(place.options(), place.disk.clone(), Clock::real(), &Meter::new());
        assert!(matches!(second, Err(Error::InUse(_))), "{second:?}");
        store.close().await;
        let (store, _) = place.open();
        drop(store);
    }
    let tiny = Options { capacity: Bytes::kib(100), ..Place::in_memory().options() };
    let refused = Store::open(tiny, DiskKind::Mem(Mem::new()), Clock::real(), &Meter::new());
    assert!(matches!(refused, Err(Error::TooSmall(_))));
}

#[tokio::test]
async fn rows_of_old_namespaces_stay_until_their_room_is_needed() {
    let place = Place::in_memory();
    let (store, _) = place.open();
    let old = area(1, 4096, Space { namespace: Namespace([1; 32]), ..SPACE });
    store.attach(&old).await.unwrap();
    put_each(&store, &old, 0..3).await;
    store.close().await;
    let (store, _) = place.open();
    let new = area(1, 4096, SPACE);
    store.attach(&new).await.unwrap();
    put_each(&store, &new, 0..2).await;
    let spaces = store.status().spaces;
    assert_eq!(spaces.iter().map(|s| (s.rows, s.attached)).collect::<Vec<_>>(), [(3, false), (2, true)]);
    put_each(&store, &new, 2..600).await;
    assert_eq!(store.status().spaces.len(), 1, "the old rows were the oldest");
    store.close().await;
}
