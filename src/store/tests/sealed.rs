//! Sealed rows: nothing of them on the drive, nothing of them wrong, and nothing of them left when their owner is
//! forgotten.

use std::collections::HashSet;

use super::super::format::{PAGE, Record as Page};
use super::*;

pub fn sealing(folder: &std::path::Path, encrypt: bool) -> Sealing {
    Sealing { keys: Some(folder.join("keys")), encrypt }
}

/// A store in memory, with its keys on the drive.
struct Bed {
    place: Place,
    keys: tempfile::TempDir,
}

impl Bed {
    fn all() -> Vec<Self> {
        Place::all().into_iter().map(|place| Self { place, keys: folder() }).collect()
    }

    fn new() -> Self {
        Self { place: Place::in_memory(), keys: folder() }
    }

    fn open(&self, encrypt: bool) -> (Store, Opened) {
        let sealing = sealing(self.keys.path(), encrypt);
        let disk = self.place.disk.clone();
        Store::open_sealed(self.place.options(), &sealing, disk, Clock::real(), &Meter::new()).unwrap()
    }

    /// A store that seals, and rows that it knows.
    async fn sealing(&self) -> (Store, Arc<Rows>) {
        let ((store, _), rows) = (self.open(true), area(1, 4096, SPACE));
        store.attach(&rows).await.unwrap();
        (store, rows)
    }

    /// A folder that nobody has open: ann's rows 0 to 49 and bob's 50 to 59.
    async fn left_by_two() -> (Self, Arc<Rows>) {
        let bed = Self { place: Place::on_drive(Io::Plain, "plain"), keys: folder() };
        let (store, rows) = bed.sealing().await;
        put_of(&store, &rows, "ann", 0..50).await;
        put_of(&store, &rows, "bob", 50..60).await;
        store.close().await;
        (bed, rows)
    }

    /// The files of the keys, whole.
    fn keys(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.keys.path().join("keys")).into_iter().flatten();
        entries.map(|entry| entry.unwrap().path()).collect()
    }

    fn segments(&self) -> Vec<Vec<u8>> {
        let segments = self.place.segments();
        segments.iter().map(|name| self.place.with_file(name, |bytes| bytes.clone())).collect()
    }
}

async fn put_of(store: &Store, rows: &Arc<Rows>, owner: &str, which: std::ops::Range<u32>) -> Vec<Outcome> {
    let mut all = Vec::new();
    for n in which {
        fill(rows, 0, n);
        all.extend(store.put_of(owner.into(), rows, vec![item(n, 0)]).await);
        assert!(is_filled(rows, 0, n), "a row is the engine's: it stays as it is");
    }
    all
}

fn holds_any(segments: &[Vec<u8>], which: std::ops::Range<u32>) -> bool {
    which.into_iter().any(|n| {
        // Payloads begin at pages, so their bytes lie where they lay.
        let wanted = content(n, 4096);
        let wanted: HashSet<&[u8]> = wanted.chunks(16).collect();
        segments.iter().any(|bytes| bytes.chunks(16).any(|part| wanted.contains(part)))
    })
}

#[tokio::test]
async fn sealed_rows_come_back_after_a_restart_and_nothing_of_them_is_in_the_files() {
    for bed in Bed::all() {
        for encrypt in [true, false] {
            let bed = Bed { place: Place { folder: folder(), ..fresh(&bed.place) }, keys: folder() };
            let (store, _) = bed.open(encrypt);
            let rows = area(1, 4096, SPACE);
            store.attach(&rows).await.unwrap();
            assert_eq!(count(&put_of(&store, &rows, "ann", 0..60).await, Outcome::Stored), 60);
            assert_eq!(count(&get_each(&store, &rows, 0..60).await, Outcome::FromDrive), 60);
            store.close().await;
            assert_eq!(holds_any(&bed.segments(), 0..60), !encrypt, "{}, sealed: {encrypt}", bed.place.name);
            assert_eq!(bed.keys().len(), usize::from(encrypt));
            // Each record says what it is, whatever is set now.
            let (store, opened) = bed.open(!encrypt);
            assert_eq!((opened.rows, opened.damaged, opened.unkeyed), (60, 0, 0), "{opened:?}");
            store.attach(&rows).await.unwrap();
            assert_eq!(count(&get_each(&store, &rows, 0..60).await, Outcome::FromDrive), 60);
            assert_eq!(count(&put_of(&store, &rows, "ann", 60..70).await, Outcome::Stored), 10);
            assert_eq!(count(&get_each(&store, &rows, 0..70).await, Outcome::FromDrive), 70);
            assert_eq!(store.verify(|_| true).await.damaged, 0);
            store.close().await;
        }
    }
}

fn fresh(place: &Place) -> Place {
    match &place.disk {
        DiskKind::Mem(_) => Place::in_memory(),
        DiskKind::Real => Place::on_drive(place.io, place.name),
    }
}

#[tokio::test]
async fn each_owner_and_each_namespace_has_a_key_of_its_own() {
    let bed = Bed::new();
    let other = Space { namespace: Namespace([6; 32]), ..SPACE };
    let (store, _) = bed.open(true);
    let (rows, rows_of_other) = (area(1, 4096, SPACE), area(1, 4096, other));
    store.attach(&rows).await.unwrap();
    store.attach(&rows_of_other).await.unwrap();
    put_of(&store, &rows, "ann", 0..5).await;
    put_of(&store, &rows, "bob", 5..10).await;
    put_of(&store, &rows, "ann", 10..15).await;
    put_of(&store, &rows_of_other, "ann", 0..5).await;
    put_of(&store, &rows, "", 15..20).await;
    assert_eq!(bed.keys().len(), 4);
    // A row that is held stays whose it is.
    assert_eq!(put_of(&store, &rows, "bob", 0..1).await, [Outcome::Held]);
    assert_eq!(count(&get_each(&store, &rows, 0..20).await, Outcome::FromDrive), 20);
    assert_eq!(count(&get_each(&store, &rows_of_other, 0..5).await, Outcome::FromDrive), 5);
    store.close().await;
    let mut seals = HashMap::new();
    for bytes in bed.segments() {
        let head = format::Head::decode(&bytes).unwrap();
        for at in records(&bytes).values() {
            let page = Page::decode(&bytes[*at..], head.store, head.sequence).unwrap();
            assert_eq!(page.checksum, 0, "a checksum would tell about the payload");
            let seal = page.seal.unwrap();
            assert!(seals.insert(seal.nonce, page).is_none(), "a nonce came twice");
        }
    }
}

/// What [`Store::forget_owner`] promises, before and after a restart.
#[tokio::test]
async fn a_forgotten_owner_has_no_rows_and_others_keep_theirs() {
    let bed = Bed::new();
    let (store, rows) = bed.sealing().await;
    put_of(&store, &rows, "ann", 0..40).await;
    put_of(&store, &rows, "bob", 40..60).await;
    let (_, mut changes) = store.subscribe(SPACE);
    let told = store.forget_owner("ann").await.unwrap();
    assert_eq!((told.keys, told.rows), (1, 40));
    let gone = std::iter::from_fn(|| changes.try_recv().ok()).filter(|c| c.kind == ChangeKind::Removed);
    assert_eq!(gone.count(), 40, "whoever looks rows up hears of it");
    assert_eq!(count(&get_each(&store, &rows, 0..40).await, Outcome::Failed), 40);
    assert_eq!(count(&get_each(&store, &rows, 40..60).await, Outcome::FromDrive), 20);
    match store.forget_owner("ann").await {
        Err(Error::UnknownOwner { known, .. }) => assert_eq!(known, ["bob"]),
        other => panic!("{other:?}"),
    }
    assert!(store.forget_owner("zed").await.unwrap_err().to_string().contains("`bob`"));
    store.close().await;
    // Rows without a key are no damage, and not used. Those in sealed segments have given their room back already.
    let (store, opened) = bed.open(true);
    assert_eq!((opened.rows, opened.damaged), (20, 0), "{opened:?}");
    assert!(opened.unkeyed > 0 && opened.unkeyed < 40, "{opened:?}");
    let unkeyed = opened.unkeyed;
    assert_eq!(store.status().unkeyed, unkeyed);
    assert!(store.faults().is_empty(), "{:?}", store.faults());
    store.attach(&rows).await.unwrap();
    assert_eq!(count(&get_each(&store, &rows, 0..40).await, Outcome::Failed), 40);
    // They are computed again, under a key that has nothing to do with the first.
    assert_eq!(count(&put_of(&store, &rows, "ann", 0..40).await, Outcome::Stored), 40);
    assert_eq!(count(&get_each(&store, &rows, 0..60).await, Outcome::FromDrive), 60);
    assert_eq!(store.verify(|_| true).await.damaged, 0);
    store.close().await;
    let (store, opened) = bed.open(true);
    assert_eq!((opened.rows, opened.unkeyed, opened.damaged), (60, unkeyed, 0), "{opened:?}");
    store.close().await;
}

#[tokio::test]
async fn a_store_that_is_shut_is_verified_with_its_keys_and_without() {
    let (bed, _rows) = Bed::left_by_two().await;
    let folder = bed.place.folder.path();
    let keys = bed.keys.path().join("keys");
    let shut = Shut::lock(folder, &keys).unwrap();
    let whole = shut.verify(|_| true);
    assert_eq!((whole.rows, whole.damaged, whole.unkeyed), (60, 0, 0));
    assert_eq!(shut.survey().rows, 60);
    drop(shut);
    let shut = Shut::lock(folder, &bed.keys.path().join("none")).unwrap();
    let blind = shut.verify(|_| true);
    assert_eq!((blind.rows, blind.damaged, blind.unkeyed), (60, 0, 60));
    assert_eq!(shut.survey().rows, 0);
    drop(shut);
    // One segment with a foot, and one without.
    for name in &bed.place.segments()[..2] {
        bed.place.with_file(name, |bytes| {
            let places = records(bytes);
            let first = places.values().min().unwrap();
            bytes[first + PAGE + 100] ^= 1;
        });
    }
    let rotten = Shut::lock(folder, &keys).unwrap().verify(|_| true);
    assert_eq!((rotten.rows, rotten.damaged), (60, 2), "{rotten:?}");
}

/// Everything that a record says and holds, bit by bit where a tag must notice: the page's own checksum is made right
/// again, as somebody who means harm would.
#[tokio::test]
async fn no_changed_bit_of_a_record_is_served() {
    let bed = Bed::new();
    let (store, rows) = bed.sealing().await;
    put_of(&store, &rows, "ann", 0..3).await;
    store.close().await;
    let name = bed.place.segments()[0].clone();
    let whole = bed.place.with_file(&name, |bytes| bytes.clone());
    let at = records(&whole)[&key(1)];
    // What is said of the row, number of the key, nonce, tag; and bits of the payload, the last one too.
    let said = (12..100).chain(124..156).flat_map(|byte| (0..8).map(move |bit| (byte, bit)));
    let held = [0, 1, 15, 16, 2000, 4094, 4095].into_iter().map(|byte| (PAGE + byte, 3));
    for (byte, bit) in said.chain(held) {
        let mut bytes = whole.clone();
        bytes[at + byte] ^= 1 << bit;
        let page = &mut bytes[at..at + PAGE];
        let sum = crate::base::checksum::crc64(&[&page[..PAGE - 8]]);
        page[PAGE - 8..].copy_from_slice(&sum.to_le_bytes());
        bed.place.with_file(&name, |file| file.clone_from(&bytes));
        let (store, _) = bed.open(true);
        store.attach(&rows).await.unwrap();
        // A right row, or none: `get_each` looks.
        let outcomes = get_each(&store, &rows, 0..3).await;
        let ours = outcomes[1];
        // Two bytes of the page are of no meaning.
        assert!(ours == Outcome::Failed || byte == 15, "byte {byte} bit {bit}: {outcomes:?}");
        assert_eq!((outcomes[0], outcomes[2]), (Outcome::FromDrive, Outcome::FromDrive), "byte {byte}");
        store.close().await;
    }
}

#[tokio::test]
async fn a_row_under_another_key_is_damage_and_not_served() {
    let bed = Bed::new();
    let (store, rows) = bed.sealing().await;
    put_of(&store, &rows, "ann", 0..40).await;
    store.close().await;
    // Another secret under the same number: what a mixed-up backup would give.
    let other = Bed::new();
    let (store, _) = other.open(true);
    store.attach(&rows).await.unwrap();
    put_of(&store, &rows, "ann", 0..1).await;
    store.close().await;
    let (path, donor) = (&bed.keys()[0], &other.keys()[0]);
    let mut bytes = std::fs::read(path).unwrap();
    let donor = std::fs::read(donor).unwrap();
    bytes[54..86].copy_from_slice(&donor[54..86]);
    let covered = bytes.len() - 24;
    let sum = crate::base::checksum::crc64(&[&bytes[..covered]]);
    bytes[covered..covered + 8].copy_from_slice(&sum.to_le_bytes());
    std::fs::write(path, bytes).unwrap();
    let (store, opened) = bed.open(true);
    assert_eq!(opened.unkeyed, 0);
    store.attach(&rows).await.unwrap();
    assert_eq!(count(&get_each(&store, &rows, 0..40).await, Outcome::Failed), 40);
    assert!(store.status().damaged > 0, "{:?}", store.status());
    store.close().await;
}

#[tokio::test]
async fn a_damaged_key_is_told_costs_its_rows_and_keeps_nothing_else_from_starting() {
    let bed = Bed::new();
    let (store, rows) = bed.sealing().await;
    put_of(&store, &rows, "ann", 0..10).await;
    let anns = bed.keys()[0].clone();
    put_of(&store, &rows, "bob", 10..20).await;
    store.close().await;
    std::fs::write(&anns, b"nothing").unwrap();
    let (store, opened) = bed.open(true);
    assert_eq!((opened.rows, opened.unkeyed, opened.damaged), (10, 10, 0), "{opened:?}");
    let codes: Vec<_> = store.faults().iter().map(|fault| fault.code).collect();
    assert_eq!(codes, [Code::StoreKeys]);
    store.attach(&rows).await.unwrap();
    assert_eq!(count(&put_of(&store, &rows, "ann", 0..10).await, Outcome::Stored), 10);
    assert_eq!(count(&get_each(&store, &rows, 0..20).await, Outcome::FromDrive), 20);
    store.close().await;
}

#[tokio::test]
async fn without_a_key_nothing_is_kept_in_the_clear() {
    let bed = Bed::new();
    // A file where the folder should be.
    std::fs::write(bed.keys.path().join("keys"), b"").unwrap();
    let (store, opened) = bed.open(true);
    assert_eq!(opened.keys.len(), 1, "{opened:?}");
    let rows = area(1, 4096, SPACE);
    store.attach(&rows).await.unwrap();
    assert_eq!(put_of(&store, &rows, "ann", 0..3).await, [Outcome::Failed; 3]);
    let said = |store: &Store| store.faults().iter().any(|f| f.cause.contains("rows are not kept"));
    assert!(said(&store), "{:?}", store.faults());
    assert!(!holds_any(&bed.segments(), 0..3));
    std::fs::remove_file(bed.keys.path().join("keys")).unwrap();
    assert_eq!(put_of(&store, &rows, "ann", 0..3).await, [Outcome::Stored; 3]);
    assert!(!said(&store), "{:?}", store.faults());
    store.close().await;
}

#[tokio::test]
async fn rows_on_the_move_stay_sealed_and_a_peer_gets_them_in_the_clear() {
    let bed = Bed::new();
    let (store, rows) = bed.sealing().await;
    // What stays of each segment is one row, so there are soon too many of them, and some are emptied.
    for n in 0..45 {
        // A store that is full may want to see it twice.
        put_of(&store, &rows, "ann", n..n + 1).await;
        put_of(&store, &rows, "ann", n..n + 1).await;
        assert_eq!(store.pin(SPACE, vec![key(n)]).await.unwrap(), 1);
        put_of(&store, &rows, "bob", 2000 + n * 32..2032 + n * 32).await;
    }
    put_of(&store, &rows, "bob", 100..1500).await;
    assert!(store.status().moved_bytes > 0, "{:?}", store.status());
    for n in 0..45 {
        let record = store.read(SPACE, key(n)).await.unwrap();
        assert_eq!(record.payload[..], content(n, 4096));
        assert_eq!(record.checksum, crate::base::checksum::crc64(&[&content(n, 4096)]));
    }
    assert_eq!(count(&get_each(&store, &rows, 0..45).await, Outcome::FromDrive), 45);
    assert!(!holds_any(&bed.segments(), 0..45));
    // A moved row goes with its owner, too.
    assert_eq!(store.forget_owner("ann").await.unwrap().rows, 45);
    assert_eq!(count(&get_each(&store, &rows, 0..45).await, Outcome::Failed), 45);
    assert_eq!(store.status().damaged, 0);
    store.close().await;
}

#[tokio::test]
async fn keys_of_old_namespaces_go_with_their_last_row_and_those_in_use_stay() {
    let bed = Bed::new();
    let old = Space { namespace: Namespace([6; 32]), ..SPACE };
    let (store, rows) = bed.sealing().await;
    let of_old = area(1, 4096, old);
    store.attach(&of_old).await.unwrap();
    put_of(&store, &rows, "ann", 0..5).await;
    put_of(&store, &of_old, "ann", 0..5).await;
    put_of(&store, &of_old, "bob", 5..10).await;
    let keys = |many: usize| settled(|| bed.keys().len(), |&keys| keys == many);
    assert_eq!(keys(3), 3);
    // While an engine of it is here its next row may come at any time.
    assert_eq!(store.drop_rows(old, (0..5).map(key).collect()).await.unwrap(), 5);
    put_of(&store, &of_old, "cid", 20..21).await;
    assert_eq!(keys(4), 4);
    store.detach(of_old.id).await;
    assert_eq!(keys(3), 3, "ann's of the old namespace has no row");
    assert_eq!(store.drop_rows(old, (5..10).map(key).collect()).await.unwrap(), 5);
    assert_eq!(keys(2), 2, "now bob's has none either");
    let owners = settled(|| store.0.shared.seals.owners(), |owners| owners.len() == 2);
    assert_eq!(Vec::from_iter(owners), ["ann", "cid"]);
    assert_eq!(count(&get_each(&store, &rows, 0..5).await, Outcome::FromDrive), 5);
    store.close().await;
    let (store, opened) = bed.open(true);
    // The bytes of what left lie in the open segment still, for nobody.
    assert_eq!((opened.rows, opened.damaged), (6, 0), "{opened:?}");
    store.attach(&rows).await.unwrap();
    assert_eq!(count(&get_each(&store, &rows, 0..5).await, Outcome::FromDrive), 5);
    store.close().await;
}

/// Rows go first, then their key: a cut between the two leaves a key that no row needs.
#[tokio::test]
async fn a_key_that_a_cut_has_left_goes_later_unless_it_is_not_sure_that_no_row_needs_it() {
    let bed = Bed::new();
    let old = Space { namespace: Namespace([6; 32]), ..SPACE };
    let (store, rows) = bed.sealing().await;
    let of_old = area(1, 4096, old);
    store.attach(&of_old).await.unwrap();
    put_of(&store, &rows, "ann", 0..40).await;
    put_of(&store, &of_old, "ann", 0..5).await;
    store.detach(of_old.id).await;
    let saved: Vec<_> =
        bed.keys().into_iter().map(|path| (path.clone(), std::fs::read(path).unwrap())).collect();
    store.forget(old).await.unwrap();
    assert_eq!(settled(|| bed.keys().len(), |&keys| keys == 1), 1);
    store.close().await;
    let put_back = || saved.iter().for_each(|(path, bytes)| std::fs::write(path, bytes).unwrap());
    // Another folder, as a drive that is not mounted is.
    put_back();
    let elsewhere = Bed { place: Place::in_memory(), keys: bed.keys };
    let (store, opened) = elsewhere.open(true);
    assert_eq!(opened.rows, 0);
    store.attach(&rows).await.unwrap();
    assert_eq!(put_of(&store, &rows, "ann", 0..1).await, [Outcome::Stored]);
    store.detach(rows.id).await;
    store.close().await;
    assert_eq!(elsewhere.keys().len(), 2);
    // Its own, of which a segment cannot be read.
    let bed = Bed { place: bed.place, keys: elsewhere.keys };
    let first = bed.place.segments()[0].clone();
    let whole = bed.place.with_file(&first, |bytes| bytes.clone());
    bed.place.with_file(&first, |bytes| bytes[100] ^= 1);
    let (store, opened) = bed.open(true);
    assert!(opened.damaged > 0, "{opened:?}");
    store.attach(&rows).await.unwrap();
    store.close().await;
    assert_eq!(bed.keys().len(), 2);
    bed.place.with_file(&first, |bytes| bytes.clone_from(&whole));
    let (store, opened) = bed.open(true);
    assert_eq!((opened.rows, opened.damaged), (40, 0), "{opened:?}");
    assert_eq!(bed.keys().len(), 2, "which namespace is in use is known when an engine comes");
    store.attach(&rows).await.unwrap();
    assert_eq!(settled(|| bed.keys().len(), |&keys| keys == 1), 1);
    assert_eq!(count(&get_each(&store, &rows, 0..40).await, Outcome::FromDrive), 40);
    store.close().await;
}

#[tokio::test]
async fn an_owner_is_forgotten_in_a_folder_that_nobody_has_open() {
    let (bed, rows) = Bed::left_by_two().await;
    let shut = Shut::lock(bed.place.folder.path(), &bed.keys.path().join("keys")).unwrap();
    let error = shut.forget_owner("zed").unwrap_err().to_string();
    assert_eq!(error, "no row is sealed for `zed`; there are rows of `ann`, `bob`");
    assert_eq!(shut.forget_owner("ann").unwrap(), Forgotten { keys: 1, rows: 50 });
    assert!(shut.forget_owner("ann").is_err());
    drop(shut);
    let (store, opened) = bed.open(true);
    assert_eq!((opened.rows, opened.unkeyed), (10, 50), "{opened:?}");
    store.attach(&rows).await.unwrap();
    assert_eq!(count(&get_each(&store, &rows, 0..50).await, Outcome::Failed), 50);
    assert_eq!(count(&get_each(&store, &rows, 50..60).await, Outcome::FromDrive), 10);
    store.close().await;
}

/// However many are offered at once: rows wait for the memory of those before them.
#[tokio::test]
async fn no_more_rows_are_sealed_ahead_than_there_is_memory_for() {
    let mem = Mem::new();
    let keys = folder();
    let options = Options {
        capacity: Bytes::mib(512),
        segment: Bytes::mib(64),
        queue_depth: 64,
        ..options("mem".as_ref(), Io::Auto)
    };
    let (sealing, disk) = (sealing(keys.path(), true), DiskKind::Mem(mem.clone()));
    let (store, _) = Store::open_sealed(options, &sealing, disk, Clock::real(), &Meter::new()).unwrap();
    let rows = area(12, 17 << 20, SPACE);
    store.attach(&rows).await.unwrap();
    mem.hold_ops();
    let mut put = Box::pin(store.put(&rows, (0..12).map(|n| item(n, n)).collect()));
    assert!(is_pending(put.as_mut()));
    let many = settled(|| mem.held_ops().len(), |&many| many == 6);
    // The loop is behind what it has begun when it answers.
    store.pinned().await;
    assert_eq!((many, mem.held_ops().len()), (6, 6));
    mem.let_go();
    assert_eq!(count(&put.await, Outcome::Stored), 12);
    store.close().await;
}
