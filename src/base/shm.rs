//! Memory that another process maps too: the engine's row area, and the lookup table that its plugin probes.
//!
//! The other process may write at any time, so no Rust reference to these bytes is ever handed out. Single words
//! are read and written as atomics; ranges are copied, or lent as raw parts for the length of one closure to code
//! that tolerates torn bytes (checksums, the kernel). Torn bytes are found by checksum, never trusted.

#![expect(unsafe_code, reason = "mapping shared memory has no safe form")]

use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::errno::Errno;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, munmap};

/// A shared mapping of a whole descriptor. Unmapped when dropped.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<c_void>,
    len: usize,
}

// SAFETY: the mapping is plain memory that stays mapped until drop; all access goes through atomics or copies.
unsafe impl Send for Mapping {}
// SAFETY: as above; concurrent access from threads is no different from that of the other process.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `fd` for reading and writing.
    ///
    /// # Errors
    /// When `fd` is shorter than `len` (touching what lies beyond would kill the process) or cannot be mapped.
    pub fn of(fd: &OwnedFd, len: usize) -> std::io::Result<Self> {
        let size = nix::sys::stat::fstat(fd)?.st_size;
        if len == 0 || u64::try_from(size).unwrap_or(0) < len as u64 {
            return Err(std::io::Error::new(
                std::io::ErrorKind::UnexpectedEof,
                format!("shared memory holds {size} bytes, {len} wanted"),
            ));
        }
        let length = NonZeroUsize::new(len).expect("checked above");
        // SAFETY: a fresh mapping of a descriptor we own; no address is asked for.
        let base = unsafe {
            mmap(
                None,
                length,
                ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
                MapFlags::MAP_SHARED,
                fd.as_fd(),
                0,
            )?
        };
        Ok(Self { base, len })
    }

    /// New anonymous shared memory of `len` zero bytes, and its descriptor to hand over. It has no name: nothing
    /// is left behind, however the processes end.
    pub fn anonymous(name: &str, len: usize) -> std::io::Result<(Self, OwnedFd)> {
        let fd = memfd_create(name, MFdFlags::MFD_CLOEXEC)?;
        nix::unistd::ftruncate(&fd, i64::try_from(len).map_err(std::io::Error::other)?)?;
        Ok((Self::of(&fd, len)?, fd))
    }

    /// Gives every page its memory now, without changing a byte. Blocks for about a quarter of a second per GiB that
    /// has none yet. A kernel that cannot (before 5.14) leaves it to the first touch.
    ///
    /// # Errors
    /// When there is not that much memory. Found out by touching, it would kill the process.
    pub fn populate(&self) -> std::io::Result<()> {
        // SAFETY: the advice concerns our own whole mapping and changes no content.
        match unsafe { madvise(self.base, self.len, MmapAdvise::MADV_POPULATE_WRITE) } {
            Ok(()) | Err(Errno::EINVAL) => Ok(()),
            Err(Errno::EFAULT) => Err(std::io::Error::new(
                std::io::ErrorKind::OutOfMemory,
                format!("shared memory has no room for {} bytes", self.len),
            )),
            Err(error) => Err(error.into()),
        }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of `range`, for the kernel (io_uring, sockets). Valid as long as the mapping.
    ///
    /// # Panics
    /// When the range leaves the mapping.
    pub fn address(&self, offset: usize, len: usize) -> *mut u8 {
        let end = offset.checked_add(len).expect("no range wraps");
        assert!(end <= self.len, "bytes {offset}..{end} of a mapping of {}", self.len);
        // SAFETY: in bounds, checked above.
        unsafe { self.base.as_ptr().cast::<u8>().add(offset) }
    }

    /// The word at `index * 8`.
    pub fn word(&self, index: usize) -> &AtomicU64 {
        let at = self.address(index * 8, 8).cast::<AtomicU64>();
        // SAFETY: in bounds (address() checks), aligned (a page start plus a multiple of 8), and only ever accessed
        // as an atomic in this process.
        unsafe { &*at }
    }

    /// Lends the bytes of a range to `look`, which must tolerate that they change under it.
    pub fn look<T>(&self, offset: usize, len: usize, look: impl FnOnce(&[u8]) -> T) -> T {
        let at = self.address(offset, len);
        // SAFETY: in bounds and mapped for the length of the call. The caller holds the row by the door's lease
        // (frame.rs): the engine does not write it meanwhile; if it did, a checksum would tell.
        look(unsafe { std::slice::from_raw_parts(at, len) })
    }

    /// Lends a range to `fill` for writing.
    pub fn fill<T>(&self, offset: usize, len: usize, fill: impl FnOnce(&mut [u8]) -> T) -> T {
        let at = self.address(offset, len);
        // SAFETY: as in look(); a row is leased to one job at a time, so nobody else writes it.
        fill(unsafe { std::slice::from_raw_parts_mut(at, len) })
    }

    pub fn load(&self, index: usize) -> u64 {
        self.word(index).load(Ordering::Acquire)
    }

    pub fn store(&self, index: usize, value: u64) {
        self.word(index).store(value, Ordering::Release);
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and len are those that mmap gave; nothing borrowed from self can outlive it.
        let unmapped = unsafe { munmap(self.base, self.len) };
        debug_assert!(unmapped.is_ok(), "munmap of our own mapping");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_of_one_descriptor_are_the_same_memory() {
        let (one, fd) = Mapping::anonymous("test", 8192).unwrap();
        let two = Mapping::of(&fd, 8192).unwrap();
        one.store(3, 77);
        assert_eq!(two.load(3), 77);
        two.fill(4096, 4, |b| b.copy_from_slice(b"abcd"));
        assert_eq!(one.look(4096, 4, <[u8]>::to_vec), b"abcd");
    }

    #[test]
    fn memory_that_is_not_there_is_told_when_it_is_asked_for() {
        let (map, fd) = Mapping::anonymous("test", 8192).unwrap();
        map.store(3, 77);
        map.populate().unwrap();
        assert_eq!(map.load(3), 77);
        nix::unistd::ftruncate(&fd, 4096).unwrap();
        let error = map.populate().unwrap_err();
        assert!(error.to_string().contains("no room for 8192 bytes"), "{error}");
    }

    #[test]
    fn a_short_descriptor_is_refused_before_anything_faults() {
        let (_one, fd) = Mapping::anonymous("test", 4096).unwrap();
        assert!(Mapping::of(&fd, 8192).is_err());
    }

    #[test]
    #[should_panic(expected = "bytes 4090..4100")]
    fn ranges_outside_are_never_addressed() {
        let (one, _fd) = Mapping::anonymous("test", 4096).unwrap();
        one.address(4090, 10);
    }
}
