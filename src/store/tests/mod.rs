//! The store as its users see it, on every disk; what damage, full drives and power cuts make of it.

mod bench;
mod cancel;
mod classes;
mod cuts;
mod damage;
mod disks;
mod faults;
mod flips;
mod holes;
mod life;
mod oracle;
mod patrol;
mod peers;
mod pins;
mod restart;
mod rows;
mod sealed;
mod soak;
mod worth;

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Waker};

use super::*;
use crate::base::block::{BlockHash, GroupId, Namespace, Rank};
use crate::base::geometry::{Group, GroupKind, Hello};
use crate::base::shm::Mapping;

pub const SPACE: Space = Space { namespace: Namespace([5; 32]), rank: Rank::ONLY };

/// Group 0 covers whole rows, group 1 leaves bytes uncovered.
pub fn hello(rows: u32, row_bytes: u32) -> Hello {
    let group = |covered| Group { kind: GroupKind::FullAttention, tokens_per_row: 16, covered };
    Hello::of_rows(rows, row_bytes, vec![group(vec![(0, row_bytes)]), group(vec![(0, 1000), (2000, 96)])])
}

static AREAS: AtomicU64 = AtomicU64::new(1);

/// A row area that only we map.
pub fn area(count: u32, row_bytes: u32, space: Space) -> Arc<Rows> {
    let hello = hello(count, row_bytes);
    assert_eq!(hello.check(), Ok(()));
    let (_, fd) = Mapping::anonymous("rows", count as usize * row_bytes as usize).unwrap();
    let id = AreaId(AREAS.fetch_add(1, Ordering::Relaxed));
    Rows::attach(id, space, &hello, &fd).unwrap()
}

pub fn key(n: u32) -> RowKey {
    let mut hash = [0x5a; 32];
    hash[..4].copy_from_slice(&n.to_le_bytes());
    RowKey { hash: BlockHash(hash), group: GroupId(0) }
}

/// What row `n` holds: different on every page, and from every other row.
pub fn content(n: u32, len: usize) -> Vec<u8> {
    with_content(n, len, <[u8]>::to_vec)
}

/// Lends what row `n` holds. Made once: tests that look at a row a hundred thousand times are most of the suite.
fn with_content<T>(n: u32, len: usize, look: impl FnOnce(&[u8]) -> T) -> T {
    thread_local! {
        static MADE: std::cell::RefCell<HashMap<(u32, usize), Vec<u8>>> = std::cell::RefCell::default();
    }
    if n >= 2000 || len > 8192 {
        return look(&make_content(n, len));
    }
    MADE.with_borrow_mut(|made| look(made.entry((n, len)).or_insert_with(|| make_content(n, len))))
}

fn make_content(n: u32, len: usize) -> Vec<u8> {
    let mut state = u64::from(n).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Row `n` in row `row` of an area.
pub fn item(n: u32, row: u32) -> RowItem {
    RowItem { key: key(n), position: (n + 1) * 16, row }
}

pub fn fill(rows: &Rows, row: u32, n: u32) {
    rows.fill(row, |b| with_content(n, b.len(), |c| b.copy_from_slice(c)));
}

pub fn is_filled(rows: &Rows, row: u32, n: u32) -> bool {
    rows.look(row, |b| with_content(n, b.len(), |c| b == c))
}

/// Stores rows `which` one after another, and says what became of each.
pub async fn put_each(store: &Store, rows: &Arc<Rows>, which: std::ops::Range<u32>) -> Vec<Outcome> {
    let mut all = Vec::new();
    for n in which {
        fill(rows, 0, n);
        all.extend(store.put(rows, vec![item(n, 0)]).await);
    }
    all
}

/// Loads rows `which` one after another. A row that is handed out must be the right one.
pub async fn get_each(store: &Store, rows: &Arc<Rows>, which: std::ops::Range<u32>) -> Vec<Outcome> {
    let mut all = Vec::new();
    for n in which {
        rows.fill(0, |b| b.fill(0));
        let outcome = store.get(rows, vec![item(n, 0)], None).await[0];
        assert!(outcome != Outcome::FromDrive || is_filled(rows, 0, n), "row {n} is wrong");
        all.push(outcome);
    }
    all
}

pub fn count(outcomes: &[Outcome], outcome: Outcome) -> usize {
    outcomes.iter().filter(|&&o| o == outcome).count()
}

pub fn options(folder: &std::path::Path, io: Io) -> Options {
    Options {
        folder: folder.to_owned(),
        capacity: Bytes::mib(4),
        segment: Bytes::kib(256),
        io,
        queue_depth: 8,
    }
}

pub fn open_with(options: &Options, disk: &DiskKind) -> (Store, Opened) {
    Store::open(options.clone(), disk.clone(), Clock::real(), &Meter::new()).unwrap()
}

/// A place for a store, one per kind of disk. The ring is left out, loudly, only where the kernel refuses it.
pub struct Place {
    pub folder: tempfile::TempDir,
    pub disk: DiskKind,
    pub io: Io,
    pub name: &'static str,
}

impl Place {
    /// Beside the build, because /tmp may be memory without direct I/O.
    pub fn on_drive(io: Io, name: &'static str) -> Self {
        Self { folder: folder(), disk: DiskKind::Real, io, name }
    }

    pub fn in_memory() -> Self {
        Self { folder: folder(), disk: DiskKind::Mem(Mem::new()), io: Io::Auto, name: "mem" }
    }

    pub fn all() -> Vec<Self> {
        let mut all = vec![Self::in_memory(), Self::on_drive(Io::Plain, "plain")];
        match Ring::start(4, Arc::new(|_| {})) {
            Ok(_) => all.push(Self::on_drive(Io::Ring, "ring")),
            Err(e) => println!("the kernel refuses io_uring ({e}): the ring is not tested here"),
        }
        all
    }

    pub fn options(&self) -> Options {
        options(self.folder.path(), self.io)
    }

    pub fn open(&self) -> (Store, Opened) {
        open_with(&self.options(), &self.disk)
    }

    /// Lets a test look at or damage a file.
    pub fn with_file<T>(&self, name: &str, look: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        if let DiskKind::Mem(mem) = &self.disk {
            return mem.with_file(name, look).unwrap();
        }
        let path = self.folder.path().join(name);
        let mut bytes = std::fs::read(&path).unwrap();
        let seen = look(&mut bytes);
        std::fs::write(&path, bytes).unwrap();
        seen
    }

    pub fn files(&self) -> Vec<String> {
        if let DiskKind::Mem(mem) = &self.disk {
            return mem.list().into_iter().map(|f| f.name).collect();
        }
        let entries = std::fs::read_dir(self.folder.path()).unwrap();
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    pub fn segments(&self) -> Vec<String> {
        self.files().into_iter().filter(|n| format::parse_segment_name(n).is_some()).collect()
    }
}

pub fn folder() -> tempfile::TempDir {
    let beside = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("target");
    std::fs::create_dir_all(&beside).unwrap();
    tempfile::Builder::new().prefix("store-test-").tempdir_in(beside).unwrap()
}

/// Where each row's record begins in a segment's bytes.
pub fn records(bytes: &[u8]) -> HashMap<RowKey, usize> {
    let head = format::Head::decode(bytes).unwrap();
    let pages = (format::PAGE..bytes.len()).step_by(format::PAGE);
    let record = |at: usize| {
        let record = format::Record::decode(&bytes[at..], head.store, head.sequence).ok()?;
        Some((record.key, at))
    };
    pages.filter_map(record).collect()
}

/// Looks at a future, which begins it.
pub fn is_pending<T>(future: Pin<&mut (impl Future<Output = T> + ?Sized)>) -> bool {
    future.poll(&mut Context::from_waker(Waker::noop())).is_pending()
}

/// What there is to see once it is as it should be, or after some seconds: the store makes files and gives room back
/// behind its answers, and nobody tells when.
pub fn settled<T>(look: impl Fn() -> T, is_right: impl Fn(&T) -> bool) -> T {
    let mut seen = look();
    for _ in 0..2000 {
        if is_right(&seen) {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
        seen = look();
    }
    seen
}
