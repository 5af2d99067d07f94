//! Rows for peers: large ones land portion by portion, and nothing that is damaged lands whole.

use super::super::format::PAGE;
use super::*;
use crate::base::checksum::crc64;

/// Three portions, the last of them short.
const ROW: usize = (5 << 19) + 4096;

/// Tells what lands, and how it ended when its sender goes.
struct Watch {
    about: Option<About>,
    length: Option<u32>,
    portions: tokio::sync::mpsc::Sender<(About, bytes::Bytes)>,
}

impl Landing for Watch {
    fn is_wanted(&self) -> bool {
        !self.portions.is_closed()
    }

    fn length(&self) -> Option<u32> {
        self.length
    }

    fn buffer(&self, len: usize) -> Buffer {
        let mut dirty = Buffer::zeroed(len);
        dirty.fill(0xEE);
        dirty
    }

    fn begin(&mut self, about: About) {
        assert!(self.about.replace(about).is_none(), "begun twice");
    }

    fn add(&mut self, portion: bytes::Bytes) {
        let _ = self.portions.try_send((self.about.expect("begun before"), portion));
    }
}

async fn landed(store: &Store, n: u32, length: Option<u32>) -> Vec<(About, bytes::Bytes)> {
    let (portions, mut seen) = tokio::sync::mpsc::channel(16);
    store.bring(SPACE, key(n), Box::new(Watch { about: None, length, portions })).await;
    let mut all = Vec::new();
    while let Some(portion) = seen.recv().await {
        all.push(portion);
    }
    all
}

async fn stored(place: &Place, row: usize, count: u32) -> Store {
    let options = Options { capacity: Bytes::mib(128), segment: Bytes::mib(16), ..place.options() };
    let (store, _) = open_with(&options, &place.disk);
    let rows = area(1, row as u32, SPACE);
    store.attach(&rows).await.unwrap();
    assert_eq!(put_each(&store, &rows, 0..count).await, vec![Outcome::Stored; count as usize]);
    store.detach(rows.id).await;
    store
}

#[tokio::test]
async fn large_rows_land_from_their_beginning_on_and_small_ones_at_once() {
    for place in Place::all() {
        for (row, portions) in [(1 << 20, 1), ((1 << 20) + 4096, 2), (ROW, 3)] {
            let place = Place { folder: folder(), disk: fresh(&place.disk), ..place };
            let store = stored(&place, row, 4).await;
            for n in 0..4 {
                let all = landed(&store, n, Some(row as u32)).await;
                assert_eq!(all.len(), portions, "{} {row}", place.name);
                let content = content(n, row);
                let about =
                    About { position: (n + 1) * 16, checksum: crc64(&[&content]), length: row as u32 };
                assert!(all.iter().all(|(seen, _)| *seen == about));
                assert!(all.iter().map(|(_, bytes)| &bytes[..]).collect::<Vec<_>>().concat() == content);
                assert!(store.read(SPACE, key(n)).await.unwrap().payload == content);
            }
            assert_eq!(store.status().served, 8);
            store.close().await;
        }
    }
}

fn fresh(disk: &DiskKind) -> DiskKind {
    match disk {
        DiskKind::Real => DiskKind::Real,
        DiskKind::Mem(_) => DiskKind::Mem(Mem::new()),
    }
}

#[tokio::test]
async fn of_a_damaged_row_the_last_portion_never_lands() {
    for place in Place::all() {
        let store = stored(&place, ROW, 4).await;
        place.with_file(&place.segments()[0], |bytes| {
            let places = records(bytes);
            // In the first portion, in the last, and in the header.
            bytes[places[&key(0)] + PAGE + 5] ^= 1;
            bytes[places[&key(1)] + PAGE + ROW - 1] ^= 1;
            bytes[places[&key(2)] + 20] ^= 1;
        });
        for (n, most) in [(0, 2), (1, 2), (2, 0)] {
            let all = landed(&store, n, None).await;
            assert!(all.len() <= most, "{} row {n}: {} portions", place.name, all.len());
            assert!(!store.holds(SPACE, &key(n)));
        }
        assert_eq!(landed(&store, 3, None).await.len(), 3);
        assert_eq!((store.status().damaged, store.status().served), (3, 1), "{}", place.name);
        store.close().await;
    }
}

#[tokio::test]
async fn a_row_of_another_length_is_not_read_and_one_that_fails_to_be_read_is_gone() {
    let place = Place::in_memory();
    let DiskKind::Mem(mem) = &place.disk else { unreachable!() };
    let store = stored(&place, ROW, 2).await;
    let before = mem.touches();
    assert!(landed(&store, 0, Some(ROW as u32 - 4096)).await.is_empty());
    assert_eq!(mem.touches(), before);
    assert!(store.holds(SPACE, &key(0)));
    mem.break_at(mem.touches() + 1, Failure::Broken);
    assert!(landed(&store, 0, Some(ROW as u32)).await.len() < 3);
    assert!(!store.holds(SPACE, &key(0)));
    mem.mend();
    assert_eq!(landed(&store, 1, Some(ROW as u32)).await.len(), 3);
    store.close().await;
}

#[tokio::test]
async fn what_nobody_waits_for_any_more_is_not_read() {
    let place = Place::in_memory();
    let store = stored(&place, ROW, 1).await;
    let (portions, seen) = tokio::sync::mpsc::channel(16);
    drop(seen);
    store.bring(SPACE, key(0), Box::new(Watch { about: None, length: None, portions })).await;
    assert_eq!(landed(&store, 0, None).await.len(), 3, "it is still held");
    assert_eq!(store.status().served, 1);
    store.close().await;
}
