//! Starts: how fast they are, and that nothing that lies in the folder keeps one from happening.

use std::os::unix::fs::FileExt;
use std::path::Path;

use super::super::format::{Head, PAGE, PAGE64, Record as Page, Sequence, encode_foot, segment_name};
use super::super::log::{Room, Step};
use super::super::recover::recover;
use super::super::seal::Seals;
use super::*;
use crate::base::checksum::crc64;

/// 38 sealed segments of 14 rows, the last of them not full, and one that is open with 7.
const PROBE: Probe = Probe { rows: 526, row_bytes: 4096, segment: Bytes::kib(128), open_percent: 50 };

fn path_of(folder: &Path, sequence: u64) -> PathBuf {
    folder.join(segment_name(Sequence(sequence)))
}

fn flip(folder: &Path, sequence: u64, at: u64) {
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path_of(folder, sequence)).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 4], at).unwrap();
}

#[tokio::test]
async fn a_probe_looks_like_a_store_of_many_rows() {
    let folder = folder();
    let options = PROBE.make(folder.path()).unwrap();
    assert!(matches!(PROBE.make(folder.path()), Err(Error::Folder { .. })), "it never writes over a store");
    PROBE.drop_cache(folder.path()).unwrap();
    let restart = PROBE.restart(&options).await.unwrap();
    assert_eq!((restart.rows, restart.segments), (526, 39), "{restart:?}");
    let (store, opened) = open_with(&options, &DiskKind::Real);
    assert_eq!((opened.damaged, opened.notes.len()), (0, 0), "{opened:?}");
    assert_eq!(store.status().sealed, 38);
    let first = store.read(PROBE.space(), Probe::key(0)).await.unwrap();
    assert!(first.payload.iter().all(|&byte| byte == 0) && first.payload.len() == 4096);
    let last = store.read(PROBE.space(), Probe::key(525)).await.unwrap();
    assert_eq!(crc64(&[&last.payload]), last.checksum);
    store.close().await;
    let tiny = Probe { row_bytes: 1 << 20, ..PROBE };
    assert!(matches!(tiny.make(folder.path()), Err(Error::RowTooLarge { .. })));
}

#[tokio::test]
async fn damage_in_the_middle_of_many_good_segments_costs_the_damaged_ones_only() {
    let folder = folder();
    let options = PROBE.make(folder.path()).unwrap();
    let at = folder.path();
    let size = PROBE.segment.0;
    flip(at, 5, size - PAGE64 - 4000);
    flip(at, 7, size - 4000);
    flip(at, 9, size - PAGE64 + 3);
    flip(at, 11, 20);
    flip(at, 13, 5);
    std::fs::OpenOptions::new().write(true).open(path_of(at, 15)).unwrap().set_len(3 * PAGE64 + 7).unwrap();
    std::fs::OpenOptions::new().write(true).open(path_of(at, 17)).unwrap().set_len(0).unwrap();
    std::fs::remove_file(path_of(at, 19)).unwrap();
    std::fs::create_dir(path_of(at, 19)).unwrap();
    std::fs::rename(path_of(at, 21), path_of(at, 9000)).unwrap();
    let (store, opened) = open_with(&options, &DiskKind::Real);
    let note = |what: &str| opened.notes.iter().filter(|note| note.contains(what)).count();
    assert_eq!(note("its foot: the checksum does not match; 14 rows used"), 2, "{opened:?}");
    assert_eq!(note("never sealed; 14 rows used"), 1, "{opened:?}");
    assert_eq!(note("never sealed; 1 rows used"), 1, "{opened:?}");
    assert_eq!(note("the checksum does not match; set aside"), 1, "{opened:?}");
    assert_eq!(note("not one of our files; set aside"), 1, "{opened:?}");
    assert_eq!(note("its name is another segment's"), 1, "{opened:?}");
    assert_eq!(note("not a file of the store"), 1, "{opened:?}");
    assert_eq!(opened.damaged, 8, "{opened:?}");
    let harmed = [5, 7, 9, 11, 13, 15, 17, 19, 21];
    let found_by_record = [5, 7, 9, 15];
    for n in 0..526 {
        let (sequence, nth) = (n / 14 + 1, n % 14);
        let is_whole = n >= 519 || !harmed.contains(&sequence);
        // Of the one that was cut short the first is left.
        let expected = is_whole || found_by_record.contains(&sequence) && (sequence != 15 || nth == 0);
        assert_eq!(store.holds(PROBE.space(), &Probe::key(n)), expected, "row {n} of segment {sequence}");
    }
    assert!(store.read(PROBE.space(), Probe::key(4 * 14)).await.is_some(), "its record speaks for itself");
    // The next start finds the same.
    store.close().await;
    let (store, again) = open_with(&options, &DiskKind::Real);
    assert_eq!((again.rows, again.damaged), (opened.rows, opened.damaged), "{again:?}");
    store.close().await;
}

#[tokio::test]
async fn folders_where_files_should_be_are_left_alone() {
    let place = Place::on_drive(Io::Auto, "drive");
    for name in ["store", "probe-0.unfinished", "segment-0000000000000003.kv", "segment-x.kv.unfinished"] {
        std::fs::create_dir(place.folder.path().join(name)).unwrap();
    }
    for start in 0..3 {
        let (store, opened) = place.open();
        assert_eq!(opened.rows, start, "{opened:?}");
        assert!(opened.notes.iter().any(|n| n.contains("store: ")), "{opened:?}");
        let rows = area(1, 4096, SPACE);
        store.attach(&rows).await.unwrap();
        let n = u32::try_from(start).unwrap();
        assert_eq!(count(&get_each(&store, &rows, 0..n).await, Outcome::FromDrive), n as usize);
        assert_eq!(put_each(&store, &rows, n..n + 1).await, [Outcome::Stored]);
        store.close().await;
    }
}

#[tokio::test]
async fn a_file_that_cannot_be_opened_is_told_and_counted_and_comes_back() {
    let folder = folder();
    let options = PROBE.make(folder.path()).unwrap();
    let path = path_of(folder.path(), 10);
    // A program that runs cannot be opened for writing, not even by root.
    let aside = folder.path().join("aside");
    std::fs::rename(&path, &aside).unwrap();
    std::fs::copy("/bin/sleep", &path).unwrap();
    let mut program = std::process::Command::new(&path).arg("600").spawn().unwrap();
    let (store, opened) = open_with(&options, &DiskKind::Real);
    program.kill().unwrap();
    program.wait().unwrap();
    assert_eq!((opened.rows, opened.damaged), (526 - 14, 1), "{opened:?}");
    assert!(path.exists(), "what cannot be read is not removed");
    store.close().await;
    std::fs::rename(&aside, &path).unwrap();
    let (store, opened) = open_with(&options, &DiskKind::Real);
    assert_eq!((opened.rows, opened.damaged), (526, 0), "{opened:?}");
    store.close().await;
}

/// A memory drive with 200 rows.
async fn with_rows() -> (Place, Mem, Arc<Rows>) {
    let mem = Mem::new();
    let place = Place { disk: DiskKind::Mem(mem.clone()), ..Place::in_memory() };
    let (store, _) = place.open();
    let rows = area(1, 4096, SPACE);
    store.attach(&rows).await.unwrap();
    assert_eq!(count(&put_each(&store, &rows, 0..200).await, Outcome::Stored), 200);
    store.close().await;
    (place, mem, rows)
}

#[tokio::test]
async fn foreign_files_larger_than_the_capacity_cost_no_row() {
    let (place, mem, rows) = with_rows().await;
    mem.put_file("model.bin", vec![0; 5 << 20]);
    let (store, opened) = place.open();
    assert!(opened.notes.iter().any(|n| n.contains("more than the capacity")), "{opened:?}");
    store.attach(&rows).await.unwrap();
    assert_eq!(
        count(&put_each(&store, &rows, 300..303).await, Outcome::Stored),
        3,
        "the open segment has room"
    );
    // Until it is full.
    let outcomes = put_each(&store, &rows, 400..500).await;
    assert!(count(&outcomes, Outcome::Failed) > 50);
    assert!(store.status().read_only.is_some_and(|r| r.contains("other files")), "{:?}", store.status());
    assert_eq!(count(&get_each(&store, &rows, 0..200).await, Outcome::FromDrive), 200);
    store.close().await;
    mem.remove("model.bin").unwrap();
    let (store, _) = place.open();
    store.attach(&rows).await.unwrap();
    assert_eq!(count(&get_each(&store, &rows, 0..200).await, Outcome::FromDrive), 200);
    assert_eq!(count(&put_each(&store, &rows, 500..600).await, Outcome::Stored), 100);
    assert!(store.status().used <= 4 << 20);
    store.close().await;
}

#[tokio::test]
async fn after_the_capacity_was_lowered_the_newest_rows_are_left() {
    let (place, mem, rows) = with_rows().await;
    let options = Options { capacity: Bytes::mib(1), ..place.options() };
    let (store, opened) = open_with(&options, &place.disk);
    assert!(opened.notes.iter().any(|n| n.contains("rows released: they did not fit")), "{opened:?}");
    assert_eq!(opened.damaged, 0);
    assert!(store.status().used <= 1 << 20, "{:?}", store.status());
    store.attach(&rows).await.unwrap();
    let outcomes = get_each(&store, &rows, 0..200).await;
    let kept = count(&outcomes, Outcome::FromDrive);
    assert!(kept >= 50, "{kept}");
    // Of the segment in the middle the end of the chain went.
    assert!(outcomes[150..].iter().all(|o| *o == Outcome::FromDrive), "the newest ones");
    assert!(outcomes[..50].iter().all(|o| !o.is_ok()), "not the oldest ones");
    assert_eq!(count(&put_each(&store, &rows, 300..400).await, Outcome::Stored), 100);
    assert!(store.status().used <= 1 << 20);
    store.close().await;
    // A drive that does not remove files cannot keep a start from happening either.
    mem.fail(0, u64::MAX, Failure::Broken);
    let options = Options { capacity: Bytes::kib(512), ..place.options() };
    let (store, opened) = open_with(&options, &place.disk);
    assert!(opened.notes.iter().any(|n| n.contains("could not be removed")), "{opened:?}");
    assert!(opened.rows > 50);
    store.close().await;
}

#[tokio::test]
async fn what_was_set_aside_takes_an_eighth_of_the_capacity_at_most_and_goes_before_any_row() {
    let (place, mem, rows) = with_rows().await;
    let garbage = |n: u64| segment_name(Sequence(0x1000 + n));
    for n in 0..6 {
        mem.put_file(&garbage(n), content(9, 200 << 10));
    }
    let (store, opened) = place.open();
    assert_eq!(opened.damaged, 6, "{opened:?}");
    let left: Vec<_> = (0..6).filter(|n| mem.open(&garbage(*n)).is_ok()).collect();
    assert_eq!(left, [4, 5], "the oldest ones were removed, and told");
    assert!(opened.notes.iter().filter(|n| n.contains("no room for what cannot be read")).count() == 4);
    store.close().await;
    // Rows and the segment that was made ahead.
    let capacity = Bytes::kib(2048 + 256);
    let options = Options { capacity, ..place.options() };
    let (store, opened) = open_with(&options, &place.disk);
    assert_eq!(opened.rows, 200, "{opened:?}");
    assert!(store.status().used <= capacity.0);
    store.attach(&rows).await.unwrap();
    assert_eq!(count(&get_each(&store, &rows, 0..200).await, Outcome::FromDrive), 200);
    store.close().await;
}

const STORE: format::StoreId = format::StoreId([6; 16]);

/// A segment of 64 KiB with these rows.
fn segment(sequence: u64, rows: &[u32], sealed: bool) -> (String, Vec<u8>) {
    let head = Head { store: STORE, sequence: Sequence(sequence), size: 64 << 10 };
    let mut bytes = vec![0; 64 << 10];
    bytes[..PAGE].copy_from_slice(&head.encode());
    let mut entries = Vec::new();
    for (page, &n) in (1..).step_by(2).zip(rows) {
        let (payload, at) = (content(n, PAGE), page as usize * PAGE);
        let (space, key, position, length) = (SPACE, key(n), (n + 1) * 16, 4096);
        let checksum = crc64(&[&payload]);
        let sequence = head.sequence;
        let record = Page { store: STORE, sequence, space, key, position, length, checksum, seal: None };
        bytes[at..at + PAGE].copy_from_slice(&record.encode());
        bytes[at + PAGE..at + 2 * PAGE].copy_from_slice(&payload);
        entries.push(record.entry(page));
    }
    if sealed {
        let foot = encode_foot(&head, &entries);
        let at = bytes.len() - foot.len();
        bytes[at..].copy_from_slice(&foot);
    }
    (segment_name(head.sequence), bytes)
}

#[test]
fn a_key_in_two_segments_is_read_from_the_newer_one_whichever_is_damaged() {
    for damaged in [None, Some(1), Some(2)] {
        let mem = Mem::new();
        for (sequence, rows) in [(1, vec![1, 2, 3]), (2, vec![2, 3, 4]), (3, vec![5])] {
            let (name, mut bytes) = segment(sequence, &rows, sequence < 3);
            if damaged == Some(sequence) {
                let at = bytes.len() - PAGE - 4000;
                bytes[at] ^= 1;
            }
            mem.put_file(&name, bytes);
        }
        let found = recover(&Files::Mem(mem), &Seals::default(), 4 << 20, 64 << 10).unwrap();
        assert_eq!(found.opened.rows, 5, "{:?}", found.opened);
        // The lost identity, and the foot.
        assert_eq!(found.opened.damaged, 1 + u64::from(damaged.is_some()));
        let sequence = |n| found.index.get(&SPACE, &key(n)).unwrap().sequence.0;
        assert_eq!([1, 2, 3, 4, 5].map(sequence), [1, 2, 2, 2, 3], "{damaged:?}");
        assert_eq!(found.log.unsealed().collect::<Vec<_>>(), [Sequence(3)]);
    }
}

#[test]
fn only_the_segment_that_was_open_goes_on() {
    let mem = Mem::new();
    for (sequence, sealed) in [(1, false), (2, true), (3, false)] {
        let (name, bytes) = segment(sequence, &[u32::try_from(sequence).unwrap()], sealed);
        mem.put_file(&name, bytes);
    }
    let found = recover(&Files::Mem(mem), &Seals::default(), 4 << 20, 64 << 10).unwrap();
    let unsealed: Vec<_> = found.log.unsealed().collect();
    assert_eq!((found.opened.rows, unsealed), (3, vec![Sequence(3)]), "{:?}", found.opened);
    assert!(found.opened.notes.iter().any(|n| n.contains("never sealed; 1 rows used")), "{:?}", found.opened);
}

/// A store ended while one segment was being sealed, one took rows, and the next one was there already.
#[test]
fn what_was_being_sealed_is_sealed_and_what_was_made_ahead_is_used() {
    let mem = Mem::new();
    for (sequence, rows, sealed) in [(1, 1..4, true), (2, 4..7, false), (3, 7..9, false), (4, 0..0, false)] {
        let (name, bytes) = segment(sequence, &rows.collect::<Vec<u32>>(), sealed);
        mem.put_file(&name, bytes);
    }
    let found = recover(&Files::Mem(mem), &Seals::default(), 4 << 20, 64 << 10).unwrap();
    // Its identity is taken from the segments; nothing else is amiss.
    assert_eq!((found.opened.rows, found.opened.damaged), (8, 1), "{:?}", found.opened);
    let (mut log, now) = (found.log, Micros(0));
    assert_eq!(log.unsealed().collect::<Vec<_>>(), [Sequence(2), Sequence(3)]);
    assert!(!log.is_pressed());
    // The seal of the second goes its way beside a row into the third.
    let step = log.step(now).unwrap();
    assert_eq!(step, Step::Sync(Sequence(2)));
    assert!(matches!(log.place(4096), Room::At { sequence: Sequence(3), .. }));
    let foot = log.stepped(&step, Ok(0), now).unwrap();
    assert!(matches!(&foot, Step::Foot { sequence: Sequence(2), .. }));
    let sync = log.stepped(&foot, Ok(0), now).unwrap();
    assert_eq!(log.stepped(&sync, Ok(0), now), None);
    assert_eq!((log.unsealed().collect::<Vec<_>>(), log.sealed()), (vec![Sequence(3)], 2));
    // Rows go on into the fourth without a file being made.
    let full = std::iter::from_fn(|| match log.place(4096) {
        Room::At { sequence, .. } => Some(sequence),
        _ => None,
    });
    assert!(full.take(100).any(|sequence| sequence == Sequence(4)));
}
