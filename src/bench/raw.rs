//! The ceiling: rows to and from one file by io_uring, past the page cache, and nothing else.
//!
//! No header, no checksum, no index, no second thread: one loop keeps `depth` whole rows in flight between the row
//! area and one file. A write begins by allotting the file, inside the clock as the store's segments are; that makes
//! it faster than a file that grows. Nothing is made durable but by [`Bed::sync`], whose time is kept apart. The area is registered with the kernel where it may be.
//! Where a file system has no direct I/O the page cache is used, as the store does there; [`Bed::direct`] says which.

#![expect(unsafe_code, reason = "the kernel is given addresses, which has no safe form")]

use std::fs::{File, OpenOptions};
use std::io::{self, Error, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use io_uring::{IoUring, opcode, types};
use nix::fcntl::{FallocateFlags, fallocate};
use nix::libc::{O_DIRECT, iovec};

use super::cpu_seconds;
use super::stats::Cost;
use crate::base::rows::Rows;

/// Most bytes of one registered buffer; the kernel's own limit is 1 GiB.
const REGISTERED_MAX: usize = 1 << 30;

/// Which way rows go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Write,
    Read,
}

/// One file that rows go to and come from.
#[derive(Debug)]
pub struct Bed {
    path: PathBuf,
    file: File,
    /// Past the page cache.
    pub direct: bool,
}

impl Bed {
    /// A new file without content.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn make(path: &Path) -> io::Result<Self> {
        let open = |flags| {
            let mut options = OpenOptions::new();
            options
                .read(true)
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .custom_flags(flags)
                .open(path)
        };
        let (file, direct) = match open(O_DIRECT) {
            Ok(file) => (file, true),
            Err(e) if e.kind() == ErrorKind::InvalidInput => (open(0)?, false),
            Err(e) => return Err(e),
        };
        Ok(Self { path: path.to_owned(), file, direct })
    }

    /// Moves every row of `rows` once, `depth` at a time.
    ///
    /// # Errors
    /// When the ring or the drive fails.
    pub fn pass(&self, way: Way, rows: &Arc<Rows>, depth: u32) -> io::Result<Cost> {
        let mut pass = Pass::new(&self.file, way, rows, depth)?;
        let bytes = u64::from(rows.count()) * rows.row_bytes() as u64;
        let (begin, cpu) = (Instant::now(), cpu_seconds());
        if way == Way::Write {
            let length = i64::try_from(bytes).map_err(Error::other)?;
            fallocate(&self.file, FallocateFlags::empty(), 0, length)?;
        }
        pass.run()?;
        Ok(Cost { bytes, seconds: begin.elapsed().as_secs_f64(), cpu: cpu_seconds() - cpu })
    }

    /// Makes durable what the pass before it wrote, and adds that to what it cost.
    ///
    /// # Errors
    /// When the drive fails.
    pub fn sync(&self, pass: Cost) -> io::Result<Cost> {
        let (begin, cpu) = (Instant::now(), cpu_seconds());
        self.file.sync_data()?;
        let Cost { bytes, seconds, cpu: before } = pass;
        Ok(Cost {
            bytes,
            seconds: seconds + begin.elapsed().as_secs_f64(),
            cpu: before + cpu_seconds() - cpu,
        })
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        // The folder goes as well; this only gives the room back early.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// One run over all rows.
struct Pass<'a> {
    file: &'a File,
    way: Way,
    rows: &'a Arc<Rows>,
    depth: u32,
    ring: IoUring,
    /// Rows per registered buffer; `None` when the kernel would not register the area.
    registered: Option<u32>,
    /// By row: bytes that are done.
    moved: Vec<usize>,
}

impl<'a> Pass<'a> {
    fn new(file: &'a File, way: Way, rows: &'a Arc<Rows>, depth: u32) -> io::Result<Self> {
        let ring = IoUring::builder().setup_single_issuer().build(depth.next_power_of_two())?;
        let each = u32::try_from(REGISTERED_MAX / rows.row_bytes()).map_err(Error::other)?.max(1);
        let buffers: Vec<iovec> = (0..rows.count())
            .step_by(each as usize)
            .map(|first| iovec {
                iov_base: rows.address(first).cast(),
                iov_len: each.min(rows.count() - first) as usize * rows.row_bytes(),
            })
            .collect();
        // SAFETY: the area stays mapped while `rows` is held, and the ring goes before it.
        let registered = unsafe { ring.submitter().register_buffers(&buffers) }.is_ok();
        let registered = registered.then_some(each);
        Ok(Self { file, way, rows, depth, ring, registered, moved: vec![0; rows.count() as usize] })
    }

    /// Returns when nothing is in flight any more, whatever happened.
    fn run(&mut self) -> io::Result<()> {
        let (mut next, mut in_flight) = (0, 0);
        let mut failed = None;
        while in_flight > 0 || (next < self.rows.count() && failed.is_none()) {
            while in_flight < self.depth && next < self.rows.count() && failed.is_none() {
                self.push(next);
                (next, in_flight) = (next + 1, in_flight + 1);
            }
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => {
                    // The kernel may still write to the area: it is never given back.
                    std::mem::forget(self.rows.clone());
                    return Err(e);
                }
            }
            let ended: Vec<_> = self.ring.completion().map(|c| (c.user_data(), c.result())).collect();
            for (row, result) in ended {
                let row = u32::try_from(row).map_err(Error::other)?;
                in_flight -= 1;
                match self.ended(row, result) {
                    Ok(true) => {}
                    Ok(false) => {
                        self.push(row);
                        in_flight += 1;
                    }
                    Err(e) => failed = Some(e),
                }
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// Whether the row is whole.
    fn ended(&mut self, row: u32, result: i32) -> io::Result<bool> {
        let got = usize::try_from(result).map_err(|_| Error::from_raw_os_error(-result))?;
        if got == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        let moved = &mut self.moved[row as usize];
        *moved += got;
        Ok(*moved == self.rows.row_bytes())
    }

    /// Queues what is left of a row.
    fn push(&mut self, row: u32) {
        let moved = self.moved[row as usize];
        let at = self.rows.address(row).wrapping_add(moved);
        let length = u32::try_from(self.rows.row_bytes() - moved).expect("a row is at most 1 GiB");
        let offset = u64::from(row) * self.rows.row_bytes() as u64 + moved as u64;
        let fd = types::Fd(self.file.as_raw_fd());
        let buffer =
            self.registered.map(|each| u16::try_from(row / each).expect("an area is far below 64 TiB"));
        let entry = match (self.way, buffer) {
            (Way::Read, None) => opcode::Read::new(fd, at, length).offset(offset).build(),
            (Way::Write, None) => opcode::Write::new(fd, at, length).offset(offset).build(),
            (Way::Read, Some(b)) => opcode::ReadFixed::new(fd, at, length, b).offset(offset).build(),
            (Way::Write, Some(b)) => opcode::WriteFixed::new(fd, at, length, b).offset(offset).build(),
        };
        // SAFETY: the row lies in the area, which outlives the ring (held, or forgotten when the ring fails).
        let pushed = unsafe { self.ring.submission().push(&entry.user_data(row.into())) };
        pushed.expect("no more than `depth` entries are in the queue");
    }
}
