//! Rot is found and named, running and shut; the day's budget stops stores and nothing else.

use super::*;

const ROW: u32 = 16 << 10;

/// Flips a bit in the middle of row `n`, and gives its file and where its record begins.
fn rot(place: &Place, n: u32) -> (String, u64) {
    let begin = content(n, 64);
    for name in place.segments() {
        let found = place.with_file(&name, |bytes| {
            let at = bytes.windows(64).position(|window| window == begin)?;
            bytes[at + 5000] ^= 4;
            Some((at - format::PAGE) as u64)
        });
        if let Some(offset) = found {
            return (name, offset);
        }
    }
    panic!("row {n} is in no segment");
}

async fn filled(place: &Place, rows: u32) -> (Store, Arc<Rows>) {
    let (store, _) = place.open();
    let area = area(4, ROW, SPACE);
    store.attach(&area).await.unwrap();
    assert_eq!(count(&put_each(&store, &area, 0..rows).await, Outcome::Stored), rows as usize);
    (store, area)
}

fn codes(store: &Store) -> Vec<Code> {
    store.faults().iter().map(|fault| fault.code).collect()
}

#[tokio::test]
async fn a_running_store_finds_rot_names_it_and_drops_the_row() {
    for place in Place::all() {
        let (store, area) = filled(&place, 40).await;
        let clean = store.verify(|_| true).await;
        assert_eq!((clean.rows, clean.damaged, clean.done), (40, 0, true), "{}", place.name);
        assert_eq!(clean.bytes, 40 * u64::from(ROW));
        assert!(store.survey().segments.iter().all(|segment| segment.verified_unix.is_some()));
        let (file, offset) = rot(&place, 3);
        let found = store.verify(|_| true).await;
        assert_eq!((found.rows, found.damaged), (40, 1), "{}", place.name);
        let damage = &found.named[0];
        assert_eq!((&damage.file, damage.offset, damage.position), (&file, offset, 64));
        assert_eq!(damage.key, hex::encode(key(3).to_bytes()));
        let cause = store.faults().into_iter().find(|f| f.code == Code::StoreDamaged).unwrap().cause;
        assert!(cause.contains(&format!("{file} at byte {offset}: the checksum does not match")), "{cause}");
        assert!(!store.holds(SPACE, &key(3)));
        assert_eq!(store.verify(|_| true).await.damaged, 0, "what is rotten is gone");
        assert_eq!(store.0.shared.metrics.scrub_damaged.get(), 1);
        let status = store.status();
        assert_eq!((status.served, status.failed), (0, 0), "nobody asked for these rows");
        assert_eq!(store.0.shared.metrics.read_bytes.get(), 0, "and nobody got them");
        assert_eq!(count(&put_each(&store, &area, 3..4).await, Outcome::Stored), 1);
        store.close().await;
        assert_eq!(store.check(SPACE, key(4)).await, Checked::Gone);
    }
}

#[tokio::test]
async fn a_verification_ends_when_nobody_listens() {
    let place = Place::in_memory();
    let (store, _area) = filled(&place, 40).await;
    let cut = store.verify(|so_far| so_far.rows < 5).await;
    assert_eq!((cut.rows, cut.done), (5, false));
}

#[tokio::test]
async fn a_shut_folder_is_surveyed_and_verified_and_a_used_one_is_refused() {
    let place = Place::on_drive(Io::Plain, "plain");
    let folder = place.folder.path();
    assert!(matches!(Shut::lock(&folder.join("none"), &folder.join("keys")), Err(ShutError::NoStore(_))));
    assert!(!folder.join("none").exists(), "looking makes nothing");
    let (store, _area) = filled(&place, 40).await;
    assert!(matches!(Shut::lock(folder, &folder.join("keys")), Err(ShutError::InUse(_))));
    let survey = store.survey();
    assert_eq!(store.drop_rows(SPACE, vec![key(0)]).await.unwrap(), 1);
    store.close().await;

    let shut = Shut::lock(folder, &folder.join("keys")).unwrap();
    let held = shut.survey();
    assert_eq!((held.rows, held.bytes), (39, 39 * u64::from(ROW)), "what was dropped is not listed");
    // The next segment may have been made meanwhile: it is empty.
    let files =
        |s: &Survey| s.segments.iter().filter(|s| s.rows > 0).map(|s| s.file.clone()).collect::<Vec<_>>();
    assert_eq!(files(&held), files(&survey));
    assert_eq!(held.spaces[0].groups[0].tokens_per_row, 16);
    let mut heard = 0;
    let clean = shut.verify(|_| {
        heard += 1;
        true
    });
    assert_eq!((clean.rows, clean.damaged, clean.done), (39, 0, true), "its room was given back");
    assert_eq!(clean.segments, clean.segments_total);
    assert!(heard >= 39);

    // One in a sealed segment, and the last row of the open one: that is what a cut leaves.
    let (file, offset) = rot(&place, 2);
    rot(&place, 39);
    let found = shut.verify(|_| true);
    assert_eq!((found.rows, found.damaged), (39, 1), "{:?}", found.named);
    assert_eq!((found.named[0].file.as_str(), found.named[0].offset), (file.as_str(), offset));

    // A head, and a file that is cut short.
    let names = place.segments();
    place.with_file(&names[0], |bytes| bytes[20] ^= 1);
    place.with_file(&names[1], |bytes| bytes.truncate(bytes.len() / 2));
    let found = shut.verify(|_| true);
    let named: Vec<_> = found.named.iter().map(|d| (d.file.as_str(), d.offset)).collect();
    assert!(named.contains(&(names[0].as_str(), 0)), "{named:?}");
    assert!(found.done);
}

#[tokio::test]
async fn a_scrubs_turn_reads_one_segment_back() {
    let place = Place::in_memory();
    let (store, _area) = filled(&place, 40).await;
    store.0.shared.scrub.lock().set_period(30);
    let held = store.held_segments();
    assert_eq!(store.next_turn(&held, 1_000_000), None, "what was just written is not rotten");
    let turn = store.next_turn(&held, 1_000_000 + 86_400).unwrap();
    assert_eq!(turn, held[0]);
    assert_eq!(store.next_turn(&held, 1_000_000 + 86_401), None, "one turn at a time");
    rot(&place, 3);
    store.read_back(turn, false).await;
    assert_eq!(store.0.shared.metrics.scrub_segments.get(), 1);
    assert_eq!(store.0.shared.metrics.scrub_damaged.get(), 1);
    let survey = store.survey();
    let verified: Vec<_> = survey.segments.iter().map(|s| s.verified_unix.is_some()).collect();
    assert_eq!(verified.iter().filter(|yes| **yes).count(), 1, "{verified:?}");
}

#[tokio::test]
async fn a_days_budget_stops_stores_and_not_loads() {
    let place = Place::in_memory();
    let (store, area) = filled(&place, 3).await;
    store.set_write_budget(5 * u64::from(ROW + 4096));
    let stored = put_each(&store, &area, 3..8).await;
    assert_eq!(stored, [Outcome::Stored, Outcome::Stored, Outcome::Failed, Outcome::Failed, Outcome::Failed]);
    assert_eq!(put_each(&store, &area, 0..1).await, [Outcome::Held]);
    assert_eq!(count(&get_each(&store, &area, 0..5).await, Outcome::FromDrive), 5);
    let fault = store.faults().into_iter().find(|f| f.code == Code::StoreBudget).unwrap();
    assert!(
        fault.cause.contains("no rows are taken until") && fault.cause.contains("UTC"),
        "{}",
        fault.cause
    );
    assert_eq!(store.status().read_only, None);
    store.set_write_budget(0);
    assert_eq!(put_each(&store, &area, 5..6).await, [Outcome::Stored]);
    assert_eq!(codes(&store), []);
}

#[tokio::test]
async fn a_day_of_writes_that_nobody_reads_is_told() {
    let place = Place::in_memory();
    let (store, area) = filled(&place, 100).await;
    assert_eq!(codes(&store), [], "the first filling is no waste");
    put_each(&store, &area, 100..260).await;
    assert_eq!(codes(&store), [Code::StoreUnread]);
    for n in (0..260).filter(|n| store.holds(SPACE, &key(*n))).take(20) {
        get_each(&store, &area, n..n + 1).await;
    }
    assert_eq!(codes(&store), [], "it is read after all");
}

#[tokio::test]
async fn what_a_start_finds_has_the_code_it_deserves() {
    let place = Place::on_drive(Io::Plain, "plain");
    let (store, _area) = filled(&place, 40).await;
    store.close().await;
    std::fs::write(place.folder.path().join("holiday.jpg"), b"x").unwrap();
    let names = place.segments();
    place.with_file(&names[0], |bytes| bytes[20] ^= 1);
    let (store, opened) = place.open();
    assert_eq!(opened.foreign.len(), 1, "{opened:?}");
    let faults = store.faults();
    let cause = |code| {
        let mut causes = faults.iter().filter(|f| f.code == code).map(|f| f.cause.as_str());
        causes.next().unwrap_or_default()
    };
    assert!(cause(Code::StoreForeign).starts_with("holiday.jpg: not a file of the store"), "{faults:?}");
    assert!(cause(Code::StoreDamaged).contains(&names[0]), "{faults:?}");
    assert_eq!(cause(Code::StorePlainIo), "", "plain I/O was asked for");
    store.close().await;
}

#[tokio::test]
async fn what_the_rounds_know_survives_a_restart() {
    let place = Place::in_memory();
    let files = tempfile::tempdir().unwrap();
    let rounds = |budget| Rounds {
        wear_file: files.path().join("wear"),
        scrub_file: files.path().join("scrub"),
        scrub_days: 30,
        write_budget: budget,
    };
    let budget = 4 * u64::from(ROW + 4096);
    let tasks = crate::tasks::Tasks::new();
    let (store, _) = place.open();
    store.begin_rounds(rounds(budget), &tasks);
    let area = area(4, ROW, SPACE);
    store.attach(&area).await.unwrap();
    assert_eq!(count(&put_each(&store, &area, 0..6).await, Outcome::Stored), 4);
    assert_eq!(tasks.stop(std::time::Duration::from_secs(20)).await, 0);
    store.close().await;

    let tasks = crate::tasks::Tasks::new();
    let (store, _) = place.open();
    store.begin_rounds(rounds(budget), &tasks);
    store.attach(&area).await.unwrap();
    assert_eq!(put_each(&store, &area, 6..7).await, [Outcome::Failed], "the day goes on");
    tasks.stop(std::time::Duration::from_secs(20)).await;
    store.close().await;
    std::fs::write(files.path().join("wear"), "nonsense").unwrap();
    let (store, _) = place.open();
    store.begin_rounds(rounds(budget), &crate::tasks::Tasks::new());
    store.attach(&area).await.unwrap();
    assert_eq!(put_each(&store, &area, 6..7).await, [Outcome::Stored], "a file that cannot be read is none");
}
