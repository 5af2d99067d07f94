//! Twenty times the capacity through a folder on the drive, with reads between, and exact accounts at the end.

use super::*;

const ROW: u32 = 32 << 10;
const BATCH: u32 = 16;

/// What the file system has given to the folder.
fn blocks(place: &Place) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let entries = std::fs::read_dir(place.folder.path()).unwrap();
    // One that was just removed takes nothing.
    entries.filter_map(|entry| Some(entry.unwrap().metadata().ok()?.blocks() * 512)).sum()
}

/// Offers rows in one call and again until all are held, three times at most.
async fn offer(store: &Store, rows: &Arc<Rows>, first: u32, seen: &mut [u64; 3]) {
    let items: Vec<_> = (0..BATCH).map(|row| item(first + row, row)).collect();
    for _ in 0..3 {
        (0..BATCH).for_each(|row| fill(rows, row, first + row));
        let outcomes = store.put(rows, items.clone()).await;
        seen[0] += count(&outcomes, Outcome::Stored) as u64;
        seen[1] += count(&outcomes, Outcome::Held) as u64;
        seen[2] += count(&outcomes, Outcome::Failed) as u64;
        if outcomes.iter().all(|o| o.is_ok()) {
            return;
        }
    }
    panic!("rows from {first} on are not taken: {:?}", store.status());
}

/// Asks for rows in one call. Those that are given are right.
async fn ask(store: &Store, rows: &Arc<Rows>, numbers: &[u32]) -> u64 {
    let items = numbers.iter().zip(0..).map(|(&n, row)| item(n, row)).collect();
    let outcomes = store.get(rows, items, None).await;
    for (&n, (outcome, row)) in numbers.iter().zip(outcomes.iter().zip(0..)) {
        assert!(!outcome.is_ok() || is_filled(rows, row, n), "row {n} is wrong");
    }
    outcomes.iter().filter(|o| o.is_ok()).count() as u64
}

#[tokio::test]
async fn twenty_capacities_later_every_account_is_exact() {
    let place = Place::on_drive(Io::Auto, "any");
    let options = Options { capacity: Bytes::mib(8), segment: Bytes::mib(1), ..place.options() };
    let total = u32::try_from(20 * options.capacity.0).unwrap() / ROW / BATCH * BATCH;
    let (store, _) = open_with(&options, &place.disk);
    let (mine, theirs) = (area(BATCH, ROW, SPACE), area(BATCH, ROW, SPACE));
    store.attach(&mine).await.unwrap();
    store.attach(&theirs).await.unwrap();
    let (mut seen, mut loaded, mut asked) = ([0; 3], 0, 0);
    for first in (0..total).step_by(BATCH as usize) {
        offer(&store, &mine, first, &mut seen).await;
        // Some that are new, and some that are gone.
        let back = [0, 1, 7, 40, 90, 150, 400, 2000];
        let numbers: Vec<u32> =
            back.iter().filter_map(|back| (first + BATCH - 1).checked_sub(*back)).collect();
        loaded += ask(&store, &theirs, &numbers).await;
        asked += numbers.len() as u64;
        let status = store.status();
        assert!(status.used <= status.capacity && blocks(&place) <= status.capacity, "{status:?}");
    }
    let status = store.status();
    assert!(
        seen[0] + status.refused >= u64::from(total) && loaded > asked / 3 && loaded < asked,
        "{seen:?}, {loaded} of {asked}"
    );
    assert!(status.reclaimed > 80 && status.released > 2000, "{status:?}");
    // What is not worth its room is answered as if it were held.
    let held = seen[1] - status.refused;
    assert_eq!((status.stored, status.held, status.loaded), (seen[0], held, loaded), "{status:?}");
    assert_eq!((status.failed, status.damaged), (seen[2] + asked - loaded, 0), "{status:?}");
    is_exact(&store, &place, &theirs, total).await;
    let rows = status.rows;
    store.close().await;
    let (store, opened) = open_with(&options, &place.disk);
    assert_eq!((opened.rows, opened.damaged), (rows, 0), "{opened:?}");
    store.attach(&theirs).await.unwrap();
    is_exact(&store, &place, &theirs, total).await;
    store.close().await;
}

/// Used is what the file system gave; the rows are those that can be read, and no others.
async fn is_exact(store: &Store, place: &Place, rows: &Arc<Rows>, total: u32) {
    let (status, taken) =
        settled(|| (store.status(), blocks(place)), |(status, taken)| status.used == *taken);
    assert_eq!(status.used, taken, "{status:?}");
    let held: Vec<u32> = (0..total).filter(|&n| store.holds(SPACE, &key(n))).collect();
    assert_eq!(status.rows, held.len() as u64);
    let mut readable = 0;
    for some in held.chunks(BATCH as usize) {
        readable += ask(store, rows, some).await;
    }
    assert_eq!(readable, status.rows, "{status:?}");
    assert_eq!(status.spaces.iter().map(|s| s.bytes).sum::<u64>(), readable * u64::from(ROW), "{status:?}");
}
