//! The seam to the drive: operations in flight, and the files they go to. Three variants of one surface.
//!
//! *Ring* is io_uring with direct I/O, for the rows. *Plain* is a few threads with `preadv`/`pwritev`, where the ring
//! or direct I/O is missing. *Mem* keeps files in memory, counts operations, fails where a test says so and can be
//! cut at any operation.
//!
//! An [`Op`] owns everything the drive touches (own buffers, and a clone of the row area's mapping), and comes back
//! whole in [`Done`] when the drive is through with it. Nothing is borrowed, so nobody can give memory back early.

use std::fs::File;
use std::io::{self, Error, ErrorKind, IoSlice, IoSliceMut};
use std::ops::Range;
use std::sync::Arc;

use super::folder::{self, Folder};
use super::format::PAGE;
use super::hands::Hands;
use super::mem::Mem;
use super::ring::Ring;
pub use crate::base::buffer::Buffer;
use crate::base::rows::Rows;

/// What follows the header page of an operation.
#[derive(Debug)]
pub enum Body {
    None,
    /// The first `len` bytes of a row, in place.
    Row {
        rows: Arc<Rows>,
        row: u32,
        len: usize,
    },
    Own(Buffer),
}

impl Body {
    pub fn len(&self) -> usize {
        match self {
            Self::None => 0,
            Self::Row { len, .. } => *len,
            Self::Own(buffer) => buffer.len(),
        }
    }

    /// Lends the bytes.
    pub fn with<T>(&mut self, lend: impl FnOnce(&mut [u8]) -> T) -> T {
        match self {
            Self::None => lend(&mut []),
            Self::Row { rows, row, len } => rows.fill(*row, |bytes| lend(&mut bytes[..*len])),
            Self::Own(buffer) => lend(buffer),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    Read,
    Write,
    /// Makes what was written to the file durable. Offset and buffers mean nothing.
    Sync,
}

/// One operation: `head`, then `body`, from `offset` on.
#[derive(Debug)]
pub struct Op {
    pub tag: u64,
    pub verb: Verb,
    pub file: Handle,
    pub offset: u64,
    pub head: Buffer,
    pub body: Body,
}

impl Op {
    pub fn len(&self) -> usize {
        self.head.len() + self.body.len()
    }
}

/// An operation that the drive is through with. `Ok` means all of its bytes.
#[derive(Debug)]
pub struct Done {
    pub op: Op,
    pub result: io::Result<()>,
}

/// Called from whichever thread finishes an operation; must not block.
pub type OnDone = Arc<dyn Fn(Done) + Send + Sync>;

/// An open file.
#[derive(Clone, Debug)]
pub enum Handle {
    Real(Arc<File>),
    Mem(Arc<str>),
}

/// One entry of the folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    pub name: String,
    pub len: u64,
    /// Bytes that the drive has given it: fewer than its length where it has holes.
    pub taken: u64,
    pub is_file: bool,
    /// When its bytes were changed last, in seconds since 1970. 0: nobody knows.
    pub modified: u32,
}

/// Operations in flight, by one of three ways.
pub enum Disk {
    Ring(Ring),
    Plain { hands: Hands, direct: bool, on_done: OnDone },
    Mem { mem: Mem, on_done: OnDone },
}

impl std::fmt::Debug for Disk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl Disk {
    pub fn name(&self) -> &'static str {
        match self {
            Self::Ring(_) => "ring",
            Self::Plain { .. } => "plain",
            Self::Mem { .. } => "mem",
        }
    }

    /// Starts `op`. Its end is told by the callback, once.
    pub fn submit(&self, op: Op) {
        match self {
            Self::Ring(ring) => ring.submit(op),
            Self::Plain { hands, direct, on_done } => {
                let (direct, on_done) = (*direct, on_done.clone());
                hands.give(move || {
                    let mut op = op;
                    let result = perform(&mut op, direct);
                    on_done(Done { op, result });
                });
            }
            Self::Mem { mem, on_done } => {
                let Some(mut op) = mem.hold_up(op, on_done) else { return };
                let result = mem.perform(&mut op);
                on_done(Done { op, result });
            }
        }
    }
}

/// How often an operation is tried again in a row without getting on.
pub const TRIES: u32 = 100;

/// Bytes that count as moved when the drive moved `got` of `left`, or why there is nothing to be tried again. Direct
/// I/O goes on at page borders only.
pub fn progress(verb: Verb, left: usize, got: usize, direct: bool) -> io::Result<usize> {
    if got == 0 {
        let (kind, what) = match verb {
            Verb::Read => (ErrorKind::UnexpectedEof, "the file ends before the row does"),
            _ => (ErrorKind::WriteZero, "the drive takes no more bytes"),
        };
        return Err(Error::new(kind, what));
    }
    Ok(if direct && got < left { got - got % PAGE } else { got })
}

/// Whether an error only asks to try again.
pub fn is_transient(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock)
}

/// Does one operation with plain system calls.
fn perform(op: &mut Op, direct: bool) -> io::Result<()> {
    let Handle::Real(file) = op.file.clone() else { unreachable!("real disks have real files") };
    if op.verb == Verb::Sync {
        return file.sync_data();
    }
    let (verb, offset, total) = (op.verb, op.offset, op.len());
    let head = &mut op.head;
    op.body.with(|body| {
        let (mut moved, mut tries) = (0, 0);
        while moved < total {
            let got = match move_some(verb, &file, offset + moved as u64, head, body, moved) {
                Ok(got) => progress(verb, total - moved, got, direct)?,
                Err(e) if is_transient(&e) => 0,
                Err(e) => return Err(e),
            };
            moved += got;
            tries = if got == 0 { tries + 1 } else { 0 };
            if tries > TRIES {
                return Err(Error::new(ErrorKind::TimedOut, "the drive does not get on"));
            }
        }
        Ok(())
    })
}

/// One system call, behind the `moved` bytes that are done.
fn move_some(
    verb: Verb,
    file: &File,
    offset: u64,
    head: &mut [u8],
    body: &mut [u8],
    moved: usize,
) -> io::Result<usize> {
    let offset = i64::try_from(offset).map_err(Error::other)?;
    if verb == Verb::Write {
        let mut parts = [IoSlice::new(head), IoSlice::new(body)];
        let mut rest = &mut parts[..];
        IoSlice::advance_slices(&mut rest, moved);
        return Ok(nix::sys::uio::pwritev(file, rest, offset)?);
    }
    let mut parts = [IoSliceMut::new(head), IoSliceMut::new(body)];
    let mut rest = &mut parts[..];
    IoSliceMut::advance_slices(&mut rest, moved);
    Ok(nix::sys::uio::preadv(file, rest, offset)?)
}

/// The folder behind a disk: whole files, one blocking call each. Not for the rows.
#[derive(Clone, Debug)]
pub enum Files {
    Real(Arc<Folder>),
    Mem(Mem),
}

impl Files {
    pub fn list(&self) -> io::Result<Vec<Found>> {
        match self {
            Self::Real(folder) => folder.list(),
            Self::Mem(mem) => Ok(mem.list()),
        }
    }

    pub fn open(&self, name: &str) -> io::Result<Handle> {
        match self {
            Self::Real(folder) => folder.open(name),
            Self::Mem(mem) => mem.open(name),
        }
    }

    /// A new durable file of `size` bytes, all of them allotted, that begins with `head`. It appears whole or not at
    /// all. Also gives the bytes that it takes.
    pub fn create(&self, name: &str, size: u64, head: &[u8]) -> io::Result<(Handle, u64)> {
        match self {
            Self::Real(folder) => folder.create(name, size, head),
            Self::Mem(mem) => mem.create(name, size, head),
        }
    }

    /// Puts a durable file of whole pages in the place of one that may be there. After a failure the old one is still
    /// whole.
    pub fn replace(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Real(folder) => folder.replace(name, bytes),
            Self::Mem(mem) => mem.replace(name, bytes),
        }
    }

    /// Removes a file. One that is gone already is fine.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        match self {
            Self::Real(folder) => folder.remove(name),
            Self::Mem(mem) => mem.remove(name),
        }
    }

    /// Makes names that came and went durable.
    pub fn sync(&self) -> io::Result<()> {
        match self {
            Self::Real(folder) => folder.sync(),
            Self::Mem(mem) => mem.sync_names(),
        }
    }

    /// Gives the memory drive's lock back. A real folder's goes with its last handle.
    pub fn release(&self) {
        if let Self::Mem(mem) = self {
            mem.unlock();
        }
    }

    /// Fills `buffer` from `offset` on, as far as the file goes. Gives the bytes read.
    pub fn read(&self, file: &Handle, offset: u64, buffer: &mut Buffer) -> io::Result<usize> {
        match (self, file) {
            (Self::Real(_), Handle::Real(file)) => read_up_to(file, offset, buffer),
            (Self::Mem(mem), Handle::Mem(name)) => mem.read(name, offset, buffer),
            _ => unreachable!("a folder opens files of its own kind"),
        }
    }

    /// Whether parts of a file can be given back while it stays.
    pub fn can_punch(&self) -> bool {
        match self {
            Self::Real(folder) => folder.punches,
            Self::Mem(mem) => mem.can_punch(),
        }
    }

    /// Gives the room of these parts of a file back, which read as zeros from then on. Its length stays, and so does
    /// the time at which it was written.
    pub fn punch(&self, file: &Handle, parts: &[Range<u64>]) -> io::Result<()> {
        match (self, file) {
            (Self::Mem(mem), Handle::Mem(name)) => mem.punch(name, parts),
            (_, Handle::Real(file)) => folder::punch(file, parts),
            _ => unreachable!("a folder opens files of its own kind"),
        }
    }

    /// Bytes that the drive has given a file.
    pub fn taken(&self, file: &Handle) -> io::Result<u64> {
        match (self, file) {
            (Self::Mem(mem), Handle::Mem(name)) => mem.taken(name),
            (_, Handle::Real(file)) => Ok(folder::taken(&file.metadata()?)),
            _ => unreachable!("a folder opens files of its own kind"),
        }
    }

    /// Parts of a file of `len` bytes for which the drive keeps nothing, ascending: those that were punched, and those
    /// that were never written. None where the file system cannot tell.
    pub fn holes(&self, file: &Handle, len: u64) -> Vec<Range<u64>> {
        match (self, file) {
            (Self::Mem(mem), Handle::Mem(name)) => mem.holes(name),
            (_, Handle::Real(file)) => folder::holes(file, len),
            _ => unreachable!("a folder opens files of its own kind"),
        }
    }

    /// Makes a file's bytes durable.
    pub fn sync_file(&self, file: &Handle) -> io::Result<()> {
        match (self, file) {
            (Self::Mem(mem), Handle::Mem(name)) => mem.sync_file(name),
            (_, Handle::Real(file)) => file.sync_data(),
            _ => unreachable!("a folder opens files of its own kind"),
        }
    }
}

fn read_up_to(file: &File, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
    use std::os::unix::fs::FileExt;
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], offset + done as u64) {
            Ok(0) => break,
            // The end of a file that is no multiple of a page: direct I/O cannot go on from here.
            Ok(n) if !n.is_multiple_of(PAGE) => return Ok(done + n),
            Ok(n) => done += n,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}
