//! One body for every disk: whoever implements the surface keeps its promises, or fails here.

use std::sync::mpsc;

use super::super::disk::{Body, Buffer, Done, Op, Verb};
use super::super::format::PAGE;
use super::super::start_disk;
use super::*;

struct Rig {
    disk: Disk,
    files: Files,
    done: mpsc::Receiver<Done>,
    _place: Place,
}

fn rig(place: Place) -> Rig {
    let (sender, done) = mpsc::channel();
    let sender = Mutex::new(sender);
    let on_done: OnDone = Arc::new(move |d| sender.lock().send(d).unwrap());
    let (files, disk, _) =
        start_disk(&place.options(), place.disk.clone(), 8, on_done, &mut Vec::new()).unwrap();
    assert_eq!(disk.name(), place.name);
    Rig { disk, files, done, _place: place }
}

impl Rig {
    fn run(&self, op: Op) -> Done {
        let tag = op.tag;
        self.disk.submit(op);
        let done = self.done.recv_timeout(std::time::Duration::from_secs(60)).unwrap();
        assert_eq!(done.op.tag, tag);
        done
    }
}

fn conforms(place: Place) {
    let name = place.name;
    let rig = rig(place);
    let rows = area(4, 3 * 4096, SPACE);
    let head = Buffer::of(&content(9, PAGE));
    let (file, taken) = rig.files.create("one", 64 * 4096, &head).unwrap();
    assert!(taken >= 64 * 4096, "{name}: a file is allotted whole");
    assert!(rig.files.list().unwrap().iter().any(|f| f.name == "one" && f.len == 64 * 4096), "{name}");

    // What is written from a row is read into another one, and into own memory.
    fill(&rows, 1, 77);
    let row = |row, len| Body::Row { rows: rows.clone(), row, len };
    let op = |tag, verb, offset, head: Buffer, body| Op { tag, verb, file: file.clone(), offset, head, body };
    let written = rig.run(op(1, Verb::Write, 8192, Buffer::of(&content(5, PAGE)), row(1, 3 * 4096)));
    written.result.unwrap();
    rig.run(op(2, Verb::Sync, 0, Buffer::zeroed(0), Body::None)).result.unwrap();
    let read = rig.run(op(3, Verb::Read, 8192, Buffer::zeroed(PAGE), row(2, 3 * 4096)));
    read.result.unwrap();
    assert_eq!(&read.op.head[..], content(5, PAGE), "{name}");
    assert!(is_filled(&rows, 2, 77), "{name}");
    let mut own =
        rig.run(op(4, Verb::Read, 8192 + 4096, Buffer::zeroed(0), Body::Own(Buffer::zeroed(3 * 4096))));
    own.result.unwrap();
    assert!(own.op.body.with(|b| b == content(77, 3 * 4096)), "{name}");
    // A part of a row leaves the rest of it alone.
    fill(&rows, 3, 1);
    rig.run(op(5, Verb::Read, 8192 + 4096, Buffer::zeroed(0), row(3, 4096))).result.unwrap();
    let expect = [content(77, 4096), content(1, 3 * 4096)[4096..].to_vec()].concat();
    assert!(rows.look(3, |b| b == expect), "{name}");

    // Behind the end nothing is there, half in and half out included.
    for offset in [64 * 4096, 63 * 4096] {
        let beyond = rig.run(op(6, Verb::Read, offset, Buffer::zeroed(PAGE), row(2, 4096)));
        assert_eq!(beyond.result.unwrap_err().kind(), std::io::ErrorKind::UnexpectedEof, "{name}");
    }

    // Many at once, each answered once.
    for tag in 10..18 {
        rig.disk.submit(op(tag, Verb::Read, 8192, Buffer::zeroed(PAGE), Body::None));
    }
    let mut tags: Vec<_> = (10..18).map(|_| rig.done.recv().unwrap().op.tag).collect();
    tags.sort_unstable();
    assert_eq!(tags, (10..18).collect::<Vec<_>>(), "{name}");

    let mut again = Buffer::zeroed(PAGE);
    assert_eq!(rig.files.read(&rig.files.open("one").unwrap(), 0, &mut again).unwrap(), PAGE, "{name}");
    assert_eq!(again[..], head[..], "{name}");

    // Parts are given back: they read as zeros, take nothing, and the length stays.
    let find = || rig.files.list().unwrap().into_iter().find(|found| found.name == "one").unwrap();
    let before = find();
    let part = 8192..8192 + 4 * 4096;
    assert!(rig.files.can_punch(), "{name}: the tests' drive is expected to");
    rig.files.punch(&file, std::slice::from_ref(&part)).unwrap();
    rig.files.sync_file(&file).unwrap();
    let found = find();
    assert_eq!((found.len, found.modified), (64 * 4096, before.modified), "{name}");
    assert_eq!(rig.files.taken(&file).unwrap(), found.taken, "{name}");
    assert!(found.taken + 4 * 4096 <= taken + 4096, "{name}: a page may be needed to note the hole");
    let holes = rig.files.holes(&file, found.len);
    assert!(holes.iter().any(|hole| hole.start <= part.start && hole.end >= part.end), "{name}: {holes:?}");
    assert!(holes.iter().all(|hole| hole.start >= 4096), "{name}: the first page is there: {holes:?}");
    let empty = rig.run(op(20, Verb::Read, 8192, Buffer::of(&content(5, PAGE)), row(2, 3 * 4096)));
    empty.result.unwrap();
    assert!(empty.op.head.iter().all(|b| *b == 0) && rows.look(2, |b| b.iter().all(|b| *b == 0)), "{name}");
    rig.files.remove("one").unwrap();
    rig.files.remove("one").unwrap();
    rig.files.sync().unwrap();
    assert!(rig.files.open("one").is_err(), "{name}");
}

#[test]
fn every_disk_keeps_the_same_promises() {
    Place::all().into_iter().for_each(conforms);
}

#[test]
fn a_buffer_begins_at_a_page_wherever_it_is_moved() {
    for len in [0, 1, PAGE, 3 * PAGE + 1] {
        let moved = [Buffer::zeroed(len)];
        assert_eq!(moved[0].as_ptr().addr() % PAGE, 0);
        assert_eq!(moved[0].len(), len);
    }
}

#[test]
fn moving_nothing_is_an_error_and_direct_io_goes_on_at_pages() {
    use super::super::disk::progress;
    assert_eq!(progress(Verb::Read, 8192, 0, true).unwrap_err().kind(), std::io::ErrorKind::UnexpectedEof);
    assert_eq!(progress(Verb::Write, 8192, 0, false).unwrap_err().kind(), std::io::ErrorKind::WriteZero);
    assert_eq!(progress(Verb::Read, 8192, 5000, true).unwrap(), 4096);
    assert_eq!(progress(Verb::Read, 8192, 5000, false).unwrap(), 5000);
    assert_eq!(progress(Verb::Read, 5000, 5000, true).unwrap(), 5000);
}

#[test]
fn a_ring_is_demanded_or_an_error_and_plain_is_said() {
    let without_direct = std::path::Path::new("/proc");
    let refused =
        Store::open(options(without_direct, Io::Auto), DiskKind::Real, Clock::real(), &Meter::new());
    assert!(matches!(refused, Err(Error::Folder { .. })), "{refused:?}");
    let place = Place::on_drive(Io::Plain, "plain");
    let (_store, opened) = place.open();
    assert_eq!(opened.io, "plain");
}
