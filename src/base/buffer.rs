//! Own memory that begins at a page, as direct I/O wants it, and a pool that lends it again and again.
//!
//! Fresh memory costs more than what is done with it: the kernel clears each page before the drive overwrites it, at
//! about the speed of a checksum. Whoever reads rows without end borrows them from a [`Pool`], which they go back to
//! when nobody looks at them any more.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use parking_lot::Mutex;

/// Bytes of a page: what direct I/O is aligned to.
const PAGE: usize = 4096;

/// The vector behind it never grows, so its bytes never move.
#[derive(Debug)]
pub struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
    /// Where it goes back to.
    home: Option<Pool>,
}

impl Buffer {
    pub fn zeroed(len: usize) -> Self {
        let bytes = vec![0; len + PAGE];
        let start = bytes.as_ptr().addr().wrapping_neg() % PAGE;
        Self { bytes, start, len, home: None }
    }

    pub fn of(content: &[u8]) -> Self {
        let mut buffer = Self::zeroed(content.len());
        buffer.copy_from_slice(content);
        buffer
    }

    /// Forgets what is behind `len`.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Its length when it was made.
    fn size(&self) -> usize {
        self.bytes.len() - PAGE
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(home) = self.home.take() {
            let (start, len) = (self.start, self.size());
            let bytes = std::mem::take(&mut self.bytes);
            home.give_back(Self { bytes, start, len, home: None });
        }
    }
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

/// Buffers that are lent and come back. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Pool(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    limit: usize,
    /// Held for a push or a pop.
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    free: Vec<Buffer>,
    free_bytes: usize,
    lent_bytes: usize,
}

impl Pool {
    /// Keeps what comes back as long as that and what is lent are at most `limit` bytes together.
    pub fn new(limit: usize) -> Self {
        Self(Arc::new(Inner { limit, kept: Mutex::default() }))
    }

    /// Memory that holds anything.
    pub fn take(&self, len: usize) -> Buffer {
        let (found, gone) = {
            let mut kept = self.0.kept.lock();
            kept.lent_bytes += len;
            let at = kept.free.iter().rposition(|buffer| buffer.size() == len);
            let found = at.map(|at| kept.free.swap_remove(at));
            kept.free_bytes -= found.as_ref().map_or(0, Buffer::size);
            (found, kept.make_room(self.0.limit, len))
        };
        drop(gone);
        let mut buffer = found.unwrap_or_else(|| Buffer::zeroed(len));
        buffer.home = Some(self.clone());
        buffer
    }

    fn give_back(&self, buffer: Buffer) {
        let size = buffer.size();
        let gone = {
            let mut kept = self.0.kept.lock();
            kept.lent_bytes -= size;
            kept.free_bytes += size;
            kept.free.push(buffer);
            kept.make_room(self.0.limit, size)
        };
        // Outside the lock: giving memory back to the kernel takes its time.
        drop(gone);
    }

    /// Bytes that are lent, and that wait to be.
    #[cfg(test)]
    fn bytes(&self) -> (usize, usize) {
        let kept = self.0.kept.lock();
        (kept.lent_bytes, kept.free_bytes)
    }
}

impl Kept {
    /// Takes out what is too much: first what is of another size than what is asked for now.
    fn make_room(&mut self, limit: usize, size: usize) -> Vec<Buffer> {
        let mut gone = Vec::new();
        while self.free_bytes + self.lent_bytes > limit && !self.free.is_empty() {
            let at = self.free.iter().position(|buffer| buffer.size() != size).unwrap_or(0);
            let buffer = self.free.swap_remove(at);
            self.free_bytes -= buffer.size();
            gone.push(buffer);
        }
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_back_is_lent_again_whole_and_at_a_page() {
        let pool = Pool::new(3 * 8192);
        let mut first = pool.take(8192);
        first[8191] = 7;
        first.truncate(10);
        let at = first.as_ptr();
        drop(first);
        let second = pool.take(8192);
        assert_eq!((second.as_ptr(), second.len(), second[8191]), (at, 8192, 7));
        assert!(at.addr().is_multiple_of(PAGE));
        assert!(pool.take(4096).as_ptr().addr().is_multiple_of(PAGE));
    }

    #[test]
    fn free_and_lent_together_stay_under_the_limit_and_other_sizes_go_first() {
        let pool = Pool::new(4 * 8192);
        let all: Vec<Buffer> = (0..4).map(|_| pool.take(8192)).collect();
        drop(all);
        assert_eq!(pool.bytes(), (0, 4 * 8192));
        let other = pool.take(2 * 8192);
        assert_eq!(pool.bytes(), (2 * 8192, 2 * 8192));
        drop(other);
        let more: Vec<Buffer> = (0..6).map(|_| pool.take(8192)).collect();
        assert_eq!(pool.bytes(), (6 * 8192, 0), "what is lent is the borrower's to bound");
        drop(more);
        assert_eq!(pool.bytes(), (0, 4 * 8192));
    }
}
