//! Bits that flipped, files that are cut or foreign, drives that are full or broken.

use super::super::format::{Head, PAGE};
use super::super::log::RETRY;
use super::*;

/// Flips one bit of each payload in the file. Returns how many.
fn damage_payloads(bytes: &mut [u8]) -> usize {
    let places = records(bytes);
    for (n, at) in places.values().enumerate() {
        bytes[at + PAGE + n * 37 % 4096] ^= 1 << (n % 8);
    }
    places.len()
}

#[tokio::test]
async fn a_thousand_damaged_rows_are_a_thousand_misses_and_a_counter_of_a_thousand() {
    for place in Place::all() {
        let options = Options { capacity: Bytes::mib(32), segment: Bytes::mib(1), ..place.options() };
        let (store, _) = open_with(&options, &place.disk);
        let rows = area(8, 4096, SPACE);
        store.attach(&rows).await.unwrap();
        // Enough that the last thousand's segments are sealed and read by their feet.
        assert_eq!(count(&put_each(&store, &rows, 0..1200).await, Outcome::Stored), 1200);
        let keep = store.status().sealed;
        store.close().await;
        let damaged: usize =
            place.segments()[..keep].iter().map(|name| place.with_file(name, |b| damage_payloads(b))).sum();
        assert!(damaged >= 1000, "{damaged}");
        let (store, opened) = open_with(&options, &place.disk);
        assert_eq!((opened.rows, opened.damaged), (1200, 0), "feet are not payloads");
        store.attach(&rows).await.unwrap();
        let (_, mut changes) = store.subscribe(SPACE);
        let outcomes = get_each(&store, &rows, 0..1000).await;
        assert_eq!(count(&outcomes, Outcome::Failed), 1000, "{}", place.name);
        assert_eq!(store.status().damaged, 1000, "{}", place.name);
        assert_eq!(store.faults().iter().filter(|f| f.code == Code::StoreDamaged).count(), 1);
        let removed =
            std::iter::from_fn(|| changes.try_recv().ok()).filter(|c| c.kind == ChangeKind::Removed).count();
        assert_eq!(removed, 1000);
        assert!(!store.holds(SPACE, &key(0)));
        // Computed again, stored again.
        assert_eq!(put_each(&store, &rows, 0..1).await, [Outcome::Stored]);
        assert_eq!(get_each(&store, &rows, 0..1).await, [Outcome::FromDrive]);
        store.close().await;
    }
}

#[tokio::test]
async fn rows_that_changed_places_are_misses() {
    for place in Place::all() {
        let (store, _) = place.open();
        let rows = area(2, 4096, SPACE);
        store.attach(&rows).await.unwrap();
        put_each(&store, &rows, 0..100).await;
        store.close().await;
        let first = place.segments().remove(0);
        // Whole records, headers included: every checksum is right, only the place is another row's.
        place.with_file(&first, |bytes| {
            let places = records(bytes);
            let (a, b) = (places[&key(1)], places[&key(2)]);
            let kept = bytes[a..a + 2 * PAGE].to_vec();
            bytes.copy_within(b..b + 2 * PAGE, a);
            bytes[b..b + 2 * PAGE].copy_from_slice(&kept);
        });
        let (store, _) = place.open();
        store.attach(&rows).await.unwrap();
        let outcomes = get_each(&store, &rows, 0..4).await;
        use Outcome::{Failed, FromDrive};
        assert_eq!(outcomes, [FromDrive, Failed, Failed, FromDrive], "{}", place.name);
        assert!(store.read(SPACE, key(1)).await.is_none());
        assert_eq!(store.status().damaged, 2);
        store.close().await;
    }
}

#[tokio::test]
async fn a_peer_is_never_served_a_damaged_row() {
    let place = Place::in_memory();
    let (store, _) = place.open();
    let rows = area(1, 4096, SPACE);
    store.attach(&rows).await.unwrap();
    put_each(&store, &rows, 0..2).await;
    place.with_file(&place.segments()[0], |b| damage_payloads(b));
    assert!(store.read(SPACE, key(0)).await.is_none());
    assert_eq!(store.status().damaged, 1);
    store.close().await;
}

/// 200 rows over several segments; then `harm` is done to the folder.
async fn after(place: &Place, harm: impl FnOnce(&Place, Vec<String>)) -> (Store, Opened, Vec<Outcome>) {
    let (store, _) = place.open();
    let rows = area(1, 4096, SPACE);
    store.attach(&rows).await.unwrap();
    assert_eq!(count(&put_each(&store, &rows, 0..200).await, Outcome::Stored), 200);
    store.close().await;
    let segments = place.segments();
    assert!(segments.len() > 5);
    harm(place, segments);
    let (store, opened) = place.open();
    store.attach(&rows).await.unwrap();
    let outcomes = get_each(&store, &rows, 0..200).await;
    (store, opened, outcomes)
}

#[tokio::test]
async fn a_segment_that_was_cut_short_gives_what_is_left_of_it() {
    for place in Place::all() {
        let (store, opened, outcomes) = after(&place, |place, segments| {
            place.with_file(&segments[1], |bytes| bytes.truncate(100 * 1024 + 77));
        })
        .await;
        assert_eq!(opened.damaged, 1, "{:?}", opened.notes);
        assert!(opened.notes.iter().any(|n| n.contains("cut short")), "{:?}", opened.notes);
        let lost = count(&outcomes, Outcome::Failed);
        assert!((1..31).contains(&lost), "{lost} lost, of the one segment only");
        assert_eq!(store.status().damaged, 1, "what is not there is not offered");
        store.close().await;
    }
}

#[tokio::test]
async fn a_flipped_bit_in_a_foot_or_head_costs_no_more_than_its_segment() {
    let flip = |at: fn(&[u8]) -> usize| {
        move |place: &Place, segments: Vec<String>| {
            place.with_file(&segments[2], |bytes| {
                let at = at(bytes);
                bytes[at] ^= 4;
            });
        }
    };
    for place in Place::all() {
        // Trailer: the segment is scanned, nothing is lost.
        let (store, opened, outcomes) = after(&place, flip(|b| b.len() - 4000)).await;
        assert!(opened.damaged >= 1, "{opened:?}");
        assert_eq!(count(&outcomes, Outcome::FromDrive), 200);
        store.close().await;
    }
    for place in Place::all() {
        // Foot: the same.
        let (store, opened, outcomes) = after(&place, flip(|b| b.len() - PAGE - 4090)).await;
        assert!(opened.damaged >= 1, "{opened:?}");
        assert_eq!(count(&outcomes, Outcome::FromDrive), 200);
        store.close().await;
    }
    for place in Place::all() {
        // Head: it cannot be told whose it is; the file stays, and is counted.
        let (store, opened, outcomes) = after(&place, flip(|_| 77)).await;
        assert_eq!(opened.damaged, 1);
        let lost = count(&outcomes, Outcome::Failed);
        assert!((20..=31).contains(&lost), "{lost}");
        assert_eq!(place.segments().len(), store.status().segments + 1);
        store.close().await;
    }
}

#[tokio::test]
async fn damage_in_the_segment_that_was_open_is_found_at_the_start() {
    let place = Place::in_memory();
    let (store, _) = place.open();
    let rows = area(1, 4096, SPACE);
    store.attach(&rows).await.unwrap();
    put_each(&store, &rows, 0..10).await;
    store.close().await;
    place.with_file(&place.segments()[0], |bytes| {
        let places = records(bytes);
        bytes[places[&key(4)] + PAGE + 9] ^= 1;
        bytes[places[&key(9)] + PAGE + 9] ^= 1;
    });
    let (store, opened) = place.open();
    assert_eq!((opened.rows, opened.damaged), (8, 1), "{:?}", opened.notes);
    assert!(opened.notes.iter().any(|n| n.contains("were being written")), "{:?}", opened.notes);
    store.attach(&rows).await.unwrap();
    assert_eq!(count(&put_each(&store, &rows, 0..10).await, Outcome::Stored), 2);
    assert_eq!(count(&get_each(&store, &rows, 0..10).await, Outcome::FromDrive), 10);
    store.close().await;
}

#[tokio::test]
async fn foreign_files_are_left_alone_counted_and_reported() {
    for place in Place::all() {
        let (store, opened, outcomes) = after(&place, |place, segments| {
            let put = |name: &str, bytes: Vec<u8>| match &place.disk {
                DiskKind::Mem(mem) => mem.put_file(name, bytes),
                DiskKind::Real => std::fs::write(place.folder.path().join(name), bytes).unwrap(),
            };
            let stranger =
                Head { store: format::StoreId([8; 16]), sequence: format::Sequence(900), size: 1 << 16 };
            let whole = |page: Vec<u8>| [page, vec![0; (1 << 16) - PAGE]].concat();
            put("segment-0000000000000384.kv", whole(stranger.encode()));
            put("segment-0000000000000385.kv", content(3, 1 << 16));
            let mut newer = place.with_file(&segments[0], |b| b.clone());
            newer[8] = 3;
            put("segment-0000000000000386.kv", newer);
            put("segment-0000000000000387.kv", Vec::new());
            // A whole segment of ours under another number.
            put("segment-0000000000000388.kv", place.with_file(&segments[1], |b| b.clone()));
            put("notes.txt", content(1, 5000));
            put("segment-0000000000000389.kv.unfinished", vec![0; 9000]);
        })
        .await;
        assert_eq!(opened.damaged, 5, "{:?}", opened.notes);
        assert_eq!(opened.notes.len(), 6, "{:?}", opened.notes);
        assert!(opened.notes.iter().any(|n| n.contains("another store")));
        assert!(opened.notes.iter().any(|n| n.contains("format version 3")));
        assert_eq!(count(&outcomes, Outcome::FromDrive), 200, "{}", place.name);
        assert!(place.files().contains(&"notes.txt".to_owned()));
        assert!(!place.files().iter().any(|n| n.ends_with("unfinished")));
        let ours = place.segments().len() as u64 - 5;
        assert!(store.status().used >= ours * (256 << 10) + 2 * (256 << 10) + (2 << 16) + 5000);
        let rows = area(1, 4096, SPACE);
        store.attach(&rows).await.unwrap();
        assert_eq!(count(&put_each(&store, &rows, 200..900).await, Outcome::Stored), 700);
        assert!(store.status().used <= 4 << 20);
        assert!(place.files().contains(&"segment-0000000000000385.kv".to_owned()), "never deleted");
        store.close().await;
    }
}

#[tokio::test]
async fn a_lost_identity_is_taken_from_the_segments() {
    for harm in [true, false] {
        let place = Place::on_drive(Io::Plain, "plain");
        let (store, opened, outcomes) = after(&place, |place, _| {
            if harm {
                place.with_file("store", |b| b[20] ^= 1);
            } else {
                std::fs::remove_file(place.folder.path().join("store")).unwrap();
            }
        })
        .await;
        assert_eq!(opened.damaged, 1, "{:?}", opened.notes);
        assert_eq!(count(&outcomes, Outcome::FromDrive), 200);
        store.close().await;
        let (store, opened) = place.open();
        assert_eq!(opened.damaged, 0, "{:?}", opened.notes);
        store.close().await;
    }
}

#[tokio::test]
async fn a_folder_full_of_foreign_files_takes_no_rows_and_says_why() {
    let mem = Mem::new();
    mem.put_file("huge", vec![0; 4 << 20]);
    let place = Place { disk: DiskKind::Mem(mem), ..Place::in_memory() };
    let (store, _) = place.open();
    let rows = area(1, 4096, SPACE);
    store.attach(&rows).await.unwrap();
    assert_eq!(put_each(&store, &rows, 0..2).await, [Outcome::Failed; 2]);
    assert!(store.status().read_only.is_some_and(|r| r.contains("other files")));
    store.close().await;
}

/// A drive that fails for a while: stores stop, loads go on, and it mends itself after the pause.
async fn drive_fails(failure: Failure, skip: u64) {
    let mem = Mem::new();
    let place = Place { disk: DiskKind::Mem(mem.clone()), ..Place::in_memory() };
    let clock = Clock::sim();
    let (store, _) = Store::open(place.options(), place.disk.clone(), clock.clone(), &Meter::new()).unwrap();
    let rows = area(1, 4096, SPACE);
    store.attach(&rows).await.unwrap();
    assert_eq!(count(&put_each(&store, &rows, 0..40).await, Outcome::Stored), 40);
    mem.fail(skip, u64::MAX, failure);
    let outcomes = put_each(&store, &rows, 100..200).await;
    let kept = count(&outcomes, Outcome::Stored);
    assert!(kept < 100 && count(&outcomes, Outcome::Failed) == 100 - kept);
    assert!(outcomes[kept..].iter().all(|o| !o.is_ok()), "once stopped, it stays so");
    let reason = store.status().read_only.expect("it says that it takes no rows");
    assert!(reason.contains("failed to"), "{reason}");
    assert_eq!(store.faults()[0].code, Code::StoreReadOnly);
    assert_eq!(count(&get_each(&store, &rows, 0..40).await, Outcome::FromDrive), 40, "serving goes on");
    // An attempt that fails costs none of the rows.
    for _ in 0..5 {
        clock.advance(RETRY);
        assert_eq!(put_each(&store, &rows, 300..301).await, [Outcome::Failed]);
    }
    assert_eq!(store.status().rows, 40 + kept as u64);
    mem.mend();
    let (_, mut changes) = store.subscribe(SPACE);
    // It mends by itself once its pause is over. A load is an event at which it looks at the clock.
    let mut attempts = 0;
    while store.status().read_only.is_some() {
        clock.advance(RETRY);
        assert_eq!(get_each(&store, &rows, 0..1).await, [Outcome::FromDrive]);
        attempts += 1;
        assert!(attempts < 1000, "{:?}", store.status());
    }
    assert_eq!(put_each(&store, &rows, 300..310).await, [Outcome::Stored; 10]);
    assert_eq!(changes.try_recv().unwrap().kind, ChangeKind::Added);
    assert_eq!(count(&get_each(&store, &rows, 0..40).await, Outcome::FromDrive), 40);
    store.close().await;
    let (store, opened) = place.open();
    assert_eq!(opened.rows, 50 + kept as u64, "{opened:?}");
    store.close().await;
}

#[tokio::test]
async fn a_full_or_broken_drive_stops_stores_and_serving_goes_on() {
    for failure in [Failure::Full, Failure::Broken, Failure::Short] {
        for skip in [0, 5, 20, 21, 22, 23, 24, 25, 26, 27, 28] {
            drive_fails(failure, skip).await;
        }
    }
}

#[tokio::test]
async fn nothing_is_taken_before_the_first_row_whatever_the_capacity() {
    let place = Place::on_drive(Io::Plain, "plain");
    let beyond = Options { capacity: Bytes::gib(1 << 20), segment: Bytes::gib(4), ..place.options() };
    let (store, _) = open_with(&beyond, &place.disk);
    assert_eq!(store.status().used, 4096, "nothing is taken before the first row");
    store.close().await;
}

/// A segment of format version 1, as its first release wrote it: this program must read it for ever.
#[tokio::test]
async fn a_segment_of_version_1_is_read() {
    let bytes = include_bytes!("../../../tests/fixtures/segment-v1.bin").to_vec();
    let head = Head::decode(&bytes).unwrap();
    let mem = Mem::new();
    let mut whole = bytes;
    assert_eq!(head.size, whole.len() as u64);
    mem.put_file(&format::segment_name(head.sequence), std::mem::take(&mut whole));
    let place = Place { disk: DiskKind::Mem(mem), ..Place::in_memory() };
    let (store, opened) = place.open();
    assert_eq!(opened.rows, 6, "{opened:?}");
    assert_eq!(store.status().sealed, 1);
    let rows = area(1, 4096, SPACE);
    store.attach(&rows).await.unwrap();
    assert_eq!(get_each(&store, &rows, 0..6).await, [Outcome::FromDrive; 6]);
    store.close().await;
}

/// Number of the key in the fixture of format version 2, which its file is named after.
const KEY: u32 = 0x5965_dc4b;

/// A segment of format version 2: three plain rows, then sealed ones, and the key of these.
#[tokio::test]
async fn a_segment_of_version_2_is_read() {
    let bytes = include_bytes!("../../../tests/fixtures/segment-v2.bin").to_vec();
    let secret = include_bytes!("../../../tests/fixtures/segment-v2.key");
    let head = Head::decode(&bytes).unwrap();
    let keys = folder();
    for has_key in [true, false] {
        if has_key {
            std::fs::create_dir(keys.path().join("keys")).unwrap();
            std::fs::write(keys.path().join(format!("keys/{KEY:08x}.key")), secret).unwrap();
        } else {
            std::fs::remove_dir_all(keys.path().join("keys")).unwrap();
        }
        let mem = Mem::new();
        mem.put_file(&format::segment_name(head.sequence), bytes.clone());
        let place = Place::in_memory();
        let (options, disk) = (place.options(), DiskKind::Mem(mem));
        let sealing = sealed::sealing(keys.path(), false);
        let opened = Store::open_sealed(options, &sealing, disk, Clock::real(), &Meter::new());
        let (store, opened) = opened.unwrap();
        assert_eq!((opened.rows, opened.unkeyed), if has_key { (6, 0) } else { (3, 3) }, "{opened:?}");
        let rows = area(1, 4096, SPACE);
        store.attach(&rows).await.unwrap();
        let outcomes = get_each(&store, &rows, 0..6).await;
        assert_eq!(count(&outcomes, Outcome::FromDrive), if has_key { 6 } else { 3 }, "{outcomes:?}");
        store.close().await;
    }
}

/// Writes the fixture. Run by hand, once per format version: `cargo test write_the_fixture -- --ignored`.
#[tokio::test]
#[ignore = "writes tests/fixtures"]
async fn write_the_fixture() {
    let place = Place::in_memory();
    let options = Options { capacity: Bytes::kib(512), segment: Bytes::kib(64), ..place.options() };
    let (rows, keys) = (area(1, 4096, SPACE), folder());
    for (encrypt, which) in [(false, 0..3), (true, 3..8)] {
        let sealing = sealed::sealing(keys.path(), encrypt);
        let disk = place.disk.clone();
        let opened = Store::open_sealed(options.clone(), &sealing, disk, Clock::real(), &Meter::new());
        let (store, _) = opened.unwrap();
        store.attach(&rows).await.unwrap();
        put_each(&store, &rows, which).await;
        store.close().await;
    }
    let bytes = place.with_file(&place.segments()[0], |b| b.clone());
    let fixtures = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    std::fs::write(fixtures.join("segment-v2.bin"), bytes).unwrap();
    let key = std::fs::read_dir(keys.path().join("keys")).unwrap().next().unwrap().unwrap();
    std::fs::copy(key.path(), fixtures.join("segment-v2.key")).unwrap();
    println!("the key's number is {:?}", key.file_name());
}

#[tokio::test]
async fn the_room_of_a_damaged_row_comes_back_and_it_is_damage_once() {
    for place in Place::all() {
        let (store, _) = place.open();
        let rows = area(1, 16_384, SPACE);
        store.attach(&rows).await.unwrap();
        put_each(&store, &rows, 0..60).await;
        assert!(store.is_sealed(SPACE, &key(3)));
        store.close().await;
        let first = place.segments().remove(0);
        place.with_file(&first, |bytes| {
            let at = records(bytes)[&key(3)];
            bytes[at + PAGE + 5000] ^= 1;
        });
        let (store, opened) = place.open();
        assert_eq!((opened.rows, opened.damaged), (60, 0), "{}", place.name);
        store.attach(&rows).await.unwrap();
        let before = store.status().used;
        assert_eq!(store.verify(|_| true).await.damaged, 1, "{}", place.name);
        let used = settled(|| store.status().used, |&used| used + 20_480 <= before);
        assert_eq!(used + 20_480, before, "{}", place.name);
        store.close().await;
        let (store, opened) = place.open();
        assert_eq!((opened.rows, opened.damaged), (59, 0), "{}: {opened:?}", place.name);
        store.attach(&rows).await.unwrap();
        assert_eq!(store.verify(|_| true).await.damaged, 0, "{}", place.name);
        assert_eq!(count(&get_each(&store, &rows, 0..60).await, Outcome::FromDrive), 59);
        store.close().await;
    }
}

/// A drive that answers no read says nothing about what it holds.
#[tokio::test]
async fn rows_that_a_drive_only_failed_to_read_are_there_when_it_is_well_again() {
    let mem = Mem::new();
    let disk = DiskKind::Mem(mem.clone());
    let (store, _) = open_with(&options("mem".as_ref(), Io::Auto), &disk);
    let rows = area(1, 4096, SPACE);
    store.attach(&rows).await.unwrap();
    put_each(&store, &rows, 0..100).await;
    mem.break_at(mem.touches(), Failure::Broken);
    assert_eq!(count(&get_each(&store, &rows, 0..30).await, Outcome::Failed), 30);
    store.close().await;
    mem.mend();
    let (store, opened) = open_with(&options("mem".as_ref(), Io::Auto), &disk);
    assert_eq!(opened.rows, 100, "{opened:?}");
    store.attach(&rows).await.unwrap();
    assert_eq!(count(&get_each(&store, &rows, 0..100).await, Outcome::FromDrive), 100);
    store.close().await;
}
