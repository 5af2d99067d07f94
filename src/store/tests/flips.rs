//! Flipped bits: a hundred thousand in the files of a store that was written to a drive, each judged on its own.
//!
//! A round takes a folder of 64 segments and flips one bit in each of them, and in every other round one of the
//! identity: no two flips share a file, and what a flip may cost is known beforehand and ends at its file. A head costs
//! the rows of its segment, a record or payload its row, a foot, a trailer or the identity none, and free space
//! nothing at all. Then the store starts, every row is asked for, and each must be right or missing exactly as foreseen.
//! Then the bits are flipped back. Most rounds run on images of those files in memory, some on the files themselves, on
//! every disk; what reads them is the same.

use std::collections::BTreeSet;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::super::format::PAGE;
use super::*;

const SEGMENTS: usize = 64;
const ROWS_OF_ONE: u32 = 6;

/// All segments but the last are full and sealed; that one has two rows.
const ROWS: u32 = (SEGMENTS as u32 - 1) * ROWS_OF_ONE + 2;

/// Rows asked for at a time.
const WIDTH: u32 = 64;

/// Flips in images, and on the drive for each disk.
const IN_MEMORY: usize = 96_000;
const ON_DRIVE: usize = 2_000;

/// Flips in images of sealed rows.
const SEALED: usize = 12_000;

/// What lies on a page of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Head,
    Record(u32),
    Payload(u32),
    Free,
    Foot,
    Trailer,
}

impl Part {
    /// What holds everything else together.
    fn is_structure(self) -> bool {
        matches!(self, Self::Head | Self::Foot | Self::Trailer)
    }
}

struct Segment {
    name: String,
    bytes: Vec<u8>,
    parts: Vec<Part>,
    is_sealed: bool,
}

impl Segment {
    fn of(name: String, bytes: &[u8]) -> Self {
        let head = format::Head::decode(bytes).unwrap();
        let mut parts = vec![Part::Free; bytes.len() / PAGE];
        parts[0] = Part::Head;
        let by_key: HashMap<RowKey, u32> = (0..ROWS).map(|n| (key(n), n)).collect();
        for (key, at) in records(bytes) {
            let n = by_key[&key];
            (parts[at / PAGE], parts[at / PAGE + 1]) = (Part::Record(n), Part::Payload(n));
        }
        let trailer = format::Trailer::decode(&bytes[bytes.len() - PAGE..], &head);
        if let Ok(trailer) = &trailer {
            let foot = usize::try_from(trailer.start).unwrap() / PAGE;
            parts[foot..].fill(Part::Foot);
            *parts.last_mut().unwrap() = Part::Trailer;
        }
        Self { name, bytes: bytes.to_vec(), parts, is_sealed: trailer.is_ok() }
    }

    fn rows(&self) -> impl Iterator<Item = u32> {
        self.parts.iter().filter_map(|part| match part {
            Part::Payload(n) => Some(*n),
            _ => None,
        })
    }

    /// A page to be hit: structure more often than its share of the file.
    fn pick(&self, dice: &mut StdRng) -> usize {
        let wanted: fn(&Part) -> bool = match dice.random_range(0..100) {
            0..28 => |p| p.is_structure(),
            28..40 => |p| matches!(p, Part::Record(_)),
            40..93 => |p| matches!(p, Part::Payload(_)),
            _ => |p| matches!(p, Part::Free),
        };
        let pages: Vec<usize> = (0..self.parts.len()).filter(|&page| wanted(&self.parts[page])).collect();
        if pages.is_empty() {
            dice.random_range(0..self.parts.len())
        } else {
            pages[dice.random_range(0..pages.len())]
        }
    }

    /// Rows that a flip on this page costs.
    fn cost(&self, page: usize) -> BTreeSet<u32> {
        match self.parts[page] {
            Part::Head => self.rows().collect(),
            Part::Record(n) | Part::Payload(n) => BTreeSet::from([n]),
            Part::Free | Part::Foot | Part::Trailer => BTreeSet::new(),
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    flips: usize,
    structure: usize,
    identity: usize,
    missing: usize,
    right: usize,
}

/// A store that lies in a place, whole.
struct Target {
    place: Place,
    options: Options,
    sealing: Sealing,
    segments: Vec<Segment>,
    rows: Arc<Rows>,
    tally: Tally,
}

/// Writes the store that is to be damaged.
async fn write(place: &Place, sealing: &Sealing) -> Options {
    let options = Options { capacity: Bytes::mib(5), segment: Bytes::kib(64), ..place.options() };
    let (disk, clock) = (place.disk.clone(), Clock::real());
    let opened = Store::open_sealed(options.clone(), sealing, disk, clock, &Meter::new());
    let (store, _) = opened.unwrap();
    let rows = area(1, 4096, SPACE);
    store.attach(&rows).await.unwrap();
    assert_eq!(count(&put_each(&store, &rows, 0..ROWS).await, Outcome::Stored), ROWS as usize);
    store.close().await;
    options
}

impl Target {
    fn new(place: Place, options: Options, sealing: &Sealing) -> Self {
        let segment = |name: String| {
            let bytes = place.with_file(&name, |bytes| bytes.clone());
            Segment::of(name, &bytes)
        };
        // The next segment is made already, and empty.
        let has_rows = |segment: &Segment| segment.rows().next().is_some();
        let segments: Vec<_> = place.segments().into_iter().map(segment).filter(has_rows).collect();
        assert_eq!(segments.len(), SEGMENTS);
        assert_eq!(segments.iter().filter(|s| s.is_sealed).count(), SEGMENTS - 1);
        assert_eq!(segments.iter().flat_map(Segment::rows).count(), ROWS as usize);
        let (sealing, rows) = (sealing.clone(), area(WIDTH, 4096, SPACE));
        Self { place, options, sealing, segments, rows, tally: Tally::default() }
    }

    fn flip(&self, name: &str, at: usize, bit: u32) {
        use std::os::unix::fs::FileExt;
        if let DiskKind::Mem(mem) = &self.place.disk {
            assert!(mem.flip(name, at, 1 << bit));
            return;
        }
        let path = self.place.folder.path().join(name);
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at as u64).unwrap();
        file.write_all_at(&[byte[0] ^ (1 << bit)], at as u64).unwrap();
    }

    /// One flip in each segment, and in the identity if asked for; then everything is read.
    async fn round(&mut self, dice: &mut StdRng, identity: bool) {
        let mut hits: Vec<(String, usize, u32)> = Vec::new();
        let (mut lost, mut structure, mut single) = (BTreeSet::new(), 0, 0);
        for segment in &self.segments {
            let page = segment.pick(dice);
            hits.push((
                segment.name.clone(),
                page * PAGE + dice.random_range(0..PAGE),
                dice.random_range(0..8),
            ));
            lost.extend(segment.cost(page));
            let part = segment.parts[page];
            structure += u64::from(part.is_structure());
            single += u64::from(segment.is_sealed && matches!(part, Part::Record(_) | Part::Payload(_)));
        }
        self.tally.structure += usize::try_from(structure).unwrap();
        if identity {
            hits.push(("store".to_owned(), dice.random_range(0..PAGE), dice.random_range(0..8)));
            self.tally.identity += 1;
        }
        self.tally.flips += hits.len();
        let before = self.place.with_identity();
        hits.iter().for_each(|(name, at, bit)| self.flip(name, *at, *bit));

        let (options, disk, clock) = (self.options.clone(), self.place.disk.clone(), Clock::real());
        let opened = Store::open_sealed(options, &self.sealing, disk, clock, &Meter::new());
        let (store, opened) = opened.unwrap_or_else(|e| panic!("a start failed: {e}; {hits:?}"));
        let told = structure + u64::from(identity);
        assert!(opened.damaged >= told, "{told} files are damaged, {opened:?}, {hits:?}");
        store.attach(&self.rows).await.unwrap();
        self.read_all(&store, &lost, &hits).await;
        let status = store.status();
        assert_eq!(status.damaged - opened.damaged, single, "{status:?}, {opened:?}, {hits:?}");
        store.close().await;

        // Flipping back is not enough: a damaged row has given its room back, and a file of which nobody can tell whose it
        // is may have been removed for its room.
        for Segment { name, bytes, .. } in &self.segments {
            match &self.place.disk {
                DiskKind::Mem(mem) => mem.put_file(name, bytes.clone()),
                DiskKind::Real => std::fs::write(self.place.folder.path().join(name), bytes).unwrap(),
            }
        }
        assert_eq!(self.place.with_identity(), before, "the identity was not mended: {hits:?}");
    }

    async fn read_all(&mut self, store: &Store, lost: &BTreeSet<u32>, hits: &[(String, usize, u32)]) {
        for first in (0..ROWS).step_by(WIDTH as usize) {
            let items: Vec<_> = (first..ROWS.min(first + WIDTH)).map(|n| item(n, n - first)).collect();
            items.iter().for_each(|item| self.rows.fill(item.row, |b| b.fill(0)));
            let outcomes = store.get(&self.rows, items, None).await;
            for (n, outcome) in (first..).zip(outcomes) {
                if outcome.is_ok() {
                    assert!(is_filled(&self.rows, n - first, n), "row {n} is wrong: {hits:?}");
                    self.tally.right += 1;
                } else {
                    self.tally.missing += 1;
                }
                assert_eq!(
                    outcome.is_ok(),
                    !lost.contains(&n),
                    "row {n}, foreseen as lost: {lost:?}, {hits:?}"
                );
            }
        }
    }

    /// Rounds until so many bits were flipped.
    async fn flip_many(mut self, flips: usize, seed: u64, identity_each: usize) -> Tally {
        let mut dice = StdRng::seed_from_u64(seed);
        let mut round = 0;
        while self.tally.flips < flips {
            round += 1;
            self.round(&mut dice, round % identity_each == 0).await;
        }
        self.tally
    }
}

impl Place {
    fn with_identity(&self) -> Vec<u8> {
        self.with_bytes("store")
    }

    fn with_bytes(&self, name: &str) -> Vec<u8> {
        match &self.disk {
            DiskKind::Mem(mem) => mem.with_bytes(name, <[u8]>::to_vec).unwrap(),
            DiskKind::Real => std::fs::read(self.folder.path().join(name)).unwrap(),
        }
    }
}

fn is_enough(tally: &Tally, name: &str) {
    println!("{name}: {tally:?}");
    let structure = tally.structure + tally.identity;
    assert!(structure * 5 >= tally.flips, "{structure} of {} flips in structure", tally.flips);
}

/// Rounds on images of the files that a store has written to the drive.
async fn flips_in_images(seed: u64, flips: usize, sealing: &Sealing) {
    let written = Place::on_drive(Io::Plain, "plain");
    let options = write(&written, sealing).await;
    let mem = Mem::new();
    written.files().iter().for_each(|name| mem.put_file(name, written.with_bytes(name)));
    let place = Place { disk: DiskKind::Mem(mem), ..Place::in_memory() };
    let target = Target::new(place, options, sealing);
    let tally = target.flip_many(flips, seed, 2).await;
    assert!(tally.flips >= flips, "{tally:?}");
    is_enough(&tally, "images");
}

// In two halves, so that two cores can share them.

#[tokio::test]
async fn no_flipped_bit_makes_a_wrong_row_in_the_first_48_000() {
    flips_in_images(1, IN_MEMORY / 2, &Sealing::default()).await;
}

#[tokio::test]
async fn no_flipped_bit_makes_a_wrong_row_in_the_second_48_000() {
    flips_in_images(2, IN_MEMORY / 2, &Sealing::default()).await;
}

#[tokio::test]
async fn no_flipped_bit_makes_a_wrong_row_of_sealed_ones() {
    let keys = folder();
    flips_in_images(9, SEALED, &sealed::sealing(keys.path(), true)).await;
}

#[tokio::test]
async fn no_flipped_bit_on_the_drive_makes_a_wrong_row() {
    let mut flipped = 0;
    // Both disks of every machine: where the kernel refuses the ring, plain I/O takes its share.
    let mut places: Vec<_> = Place::all().into_iter().filter(|p| matches!(p.disk, DiskKind::Real)).collect();
    if places.len() == 1 {
        places.push(Place::on_drive(Io::Plain, "plain"));
    }
    for (place, seed) in places.into_iter().zip(3..) {
        let (name, options) = (place.name, write(&place, &Sealing::default()).await);
        let tally = Target::new(place, options, &Sealing::default()).flip_many(ON_DRIVE, seed, 8).await;
        is_enough(&tally, name);
        flipped += tally.flips;
    }
    assert!(flipped + IN_MEMORY >= 100_000, "{flipped}");
}
