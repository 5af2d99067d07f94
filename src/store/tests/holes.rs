//! Room that comes back while its segment stays: on the drive, over restarts and power cuts, and where the drive cannot.

use std::collections::BTreeSet;
use std::time::Duration;

use super::super::marks::MARKS;
use super::life::options_of_a_life;
use super::*;

/// What the file system has given to the segments.
fn blocks(place: &Place) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let path = |name: &String| place.folder.path().join(name);
    place.segments().iter().map(|name| std::fs::metadata(path(name)).unwrap().blocks() * 512).sum()
}

#[tokio::test]
async fn on_a_drive_the_room_of_dropped_rows_is_free_at_once_and_they_do_not_come_back() {
    for place in Place::all().into_iter().filter(|place| matches!(place.disk, DiskKind::Real)) {
        let rows = area(1, 16_384, SPACE);
        let (store, _) = place.open();
        store.attach(&rows).await.unwrap();
        put_each(&store, &rows, 0..100).await;
        // Eight segments hold twelve rows each, and are full; one is open and one is made ahead, behind the answers: one
        // that came after the look would hide what comes back.
        let made = settled(|| (store.status().sealed, place.segments().len()), |made| *made == (8, 10));
        assert_eq!(made, (8, 10), "{}", place.name);
        let (before, used) = (blocks(&place), store.status().used);
        // Every other one of the first half, which is sealed.
        let keys: Vec<_> = (0..50).step_by(2).map(key).collect();
        assert_eq!(store.drop_rows(SPACE, keys).await.unwrap(), 25);
        // A further call is answered behind what the drop has begun.
        get_each(&store, &rows, 1..2).await;
        let is_back = |(taken, status): &(u64, Status)| {
            taken + 20 * 20_480 <= before && status.used + 20 * 20_480 <= used
        };
        let (taken, status) = settled(|| (blocks(&place), store.status()), is_back);
        assert!(taken + 20 * 20_480 <= before, "{}: {before}, {taken}", place.name);
        assert!(status.used + 20 * 20_480 <= used, "{}: {status:?}", place.name);
        store.close().await;
        // Not because somebody remembers that they were dropped.
        std::fs::remove_file(place.folder.path().join(MARKS)).unwrap();
        let (store, opened) = place.open();
        assert_eq!((opened.rows, opened.damaged), (75, 0), "{}: {opened:?}", place.name);
        store.attach(&rows).await.unwrap();
        for n in 0..100 {
            let is_there = n >= 50 || n % 2 == 1;
            let outcome = get_each(&store, &rows, n..n + 1).await[0];
            assert_eq!(outcome.is_ok(), is_there, "{}: row {n}", place.name);
        }
        assert_eq!(store.status().damaged, 0);
        assert!(inspect(place.folder.path()).unwrap().len() == 75, "{}", place.name);
        store.close().await;
        let shut = Shut::lock(place.folder.path(), &place.folder.path().join("keys")).unwrap();
        let verified = shut.verify(|_| true);
        assert_eq!((verified.rows, verified.damaged, shut.survey().rows), (75, 0, 75), "{}", place.name);
    }
}

#[tokio::test]
async fn where_holes_cannot_be_told_a_released_row_is_a_quiet_miss() {
    let place = Place::in_memory();
    let DiskKind::Mem(mem) = &place.disk else { unreachable!("in memory") };
    let rows = area(1, 4096, SPACE);
    let (store, _) = place.open();
    store.attach(&rows).await.unwrap();
    put_each(&store, &rows, 0..100).await;
    store.drop_rows(SPACE, vec![key(3), key(4)]).await.unwrap();
    get_each(&store, &rows, 0..1).await;
    store.close().await;
    mem.remove(MARKS).unwrap();
    mem.without_holes();
    let (store, opened) = place.open();
    assert_eq!((opened.rows, opened.damaged), (100, 0), "{opened:?}");
    store.attach(&rows).await.unwrap();
    let (_, mut changes) = store.subscribe(SPACE);
    assert_eq!(count(&get_each(&store, &rows, 3..5).await, Outcome::Failed), 2);
    assert_eq!(changes.try_recv().unwrap().kind, ChangeKind::Removed);
    assert_eq!((store.status().damaged, store.status().rows), (0, 98));
    assert_eq!(store.check(SPACE, key(3)).await, Checked::Gone);
    assert_eq!(put_each(&store, &rows, 3..4).await, [Outcome::Stored]);
    store.close().await;
}

#[tokio::test]
async fn a_drive_without_holes_makes_room_by_emptying_segments_and_keeps_what_is_worth_most() {
    let place = Place::in_memory();
    let DiskKind::Mem(mem) = &place.disk else { unreachable!("in memory") };
    mem.without_holes();
    let clock = Clock::sim();
    let (store, _) = Store::open(place.options(), place.disk.clone(), clock.clone(), &Meter::new()).unwrap();
    let rows = area(1, 4096, SPACE);
    store.attach(&rows).await.unwrap();
    // Rows in use, each in a segment with others that nobody comes back for.
    for n in 0..10 {
        put_each(&store, &rows, n..n + 1).await;
        put_each(&store, &rows, 5000 + n * 29..5029 + n * 29).await;
    }
    store.pin(SPACE, vec![key(5007)]).await.unwrap();
    let used: Vec<_> = (0..10).map(|n| (key(n), (n + 1) * 16)).collect();
    for n in 0..1500 {
        clock.advance(Duration::from_secs(1));
        put_each(&store, &rows, 1000 + n..1001 + n).await;
        if n % 20 == 0 {
            store.heat(SPACE, &used, clock.now());
            let taken: u64 = mem.list().iter().map(|f| f.taken).sum();
            assert!(taken <= store.status().capacity, "{:?}", store.status());
        }
    }
    let status = store.status();
    assert!(status.reclaimed > 20 && status.read_only.is_none(), "{status:?}");
    assert!(status.moved_bytes > 0 && status.rows > 200, "{status:?}");
    assert_eq!(get_each(&store, &rows, 0..10).await, [Outcome::FromDrive; 10], "{status:?}");
    assert_eq!(get_each(&store, &rows, 5007..5008).await, [Outcome::FromDrive]);
    assert_eq!(get_each(&store, &rows, 2490..2500).await, [Outcome::FromDrive; 10], "the newest too");
    store.close().await;
}

/// Pins rows while others press, until the end or until the power goes. Gives those of which it is certain that they
/// are pinned and durable.
async fn pin_under_pressure(mem: &Mem) -> BTreeSet<u32> {
    let (mut pinned, mut promised) = (Vec::new(), BTreeSet::new());
    let opened = Store::open(options_of_a_life(), DiskKind::Mem(mem.clone()), Clock::sim(), &Meter::new());
    let Ok((store, _)) = opened else { return promised };
    let rows = area(1, 4096, SPACE);
    let _ = store.attach(&rows).await;
    for n in 0..20 {
        put_each(&store, &rows, n..n + 1).await;
        if store.pin(SPACE, vec![key(n)]).await.is_ok_and(|count| count == 1) {
            pinned.push(n);
        }
        put_each(&store, &rows, 100 + n * 6..106 + n * 6).await;
        promised.extend(pinned.iter().filter(|n| store.is_sealed(SPACE, &key(**n))));
        if mem.is_cut() {
            break;
        }
    }
    store.close().await;
    promised
}

#[tokio::test]
async fn a_power_cut_never_costs_a_pinned_row() {
    for solid in [false, true] {
        let drive = || {
            let mem = Mem::new();
            if solid {
                mem.without_holes();
            }
            mem
        };
        let whole = drive();
        let promised = pin_under_pressure(&whole).await;
        assert!(promised.len() > 5, "{promised:?}");
        let total = whole.ops();
        for cut in (1..total).step_by(3) {
            let mem = drive();
            mem.cut_at(cut);
            let promised = pin_under_pressure(&mem).await;
            for loss in [Loss::All, Loss::None, Loss::Torn(cut * 2 + 1), Loss::Reordered(cut * 77 + 5)] {
                let context = format!("cut at {cut} of {total}, {loss:?}, solid: {solid}");
                let (store, opened) = open_with(&options_of_a_life(), &DiskKind::Mem(mem.after_cut(loss)));
                let rows = area(1, 4096, SPACE);
                store.attach(&rows).await.unwrap();
                // Also when room is needed again.
                put_each(&store, &rows, 500..520).await;
                for &n in &promised {
                    let outcome = get_each(&store, &rows, n..n + 1).await;
                    assert_eq!(outcome, [Outcome::FromDrive], "{context}: row {n}, {opened:?}");
                }
                assert!(store.status().used <= store.status().capacity, "{context}");
                store.close().await;
            }
        }
    }
}
