//! Where a row is brought to, portion by portion.
//!
//! Who reads a row and who passes it on do not know each other. The reader borrows memory from the [`Landing`], fills
//! it and says so; what is there can leave while the rest is being read. A landing that is dropped before its row is
//! whole says that the row does not come.

use bytes::Bytes;

use super::buffer::Buffer;

/// What is known of a row before its bytes are all there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct About {
    pub position: u32,
    /// crc64-nvme of the payload, made before it was written.
    pub checksum: u64,
    /// Bytes of the payload.
    pub length: u32,
}

/// The receiving end of one row.
pub trait Landing: Send {
    /// Whether anybody still waits for it.
    fn is_wanted(&self) -> bool;

    /// The only length that a row may have here. `None`: any.
    fn length(&self) -> Option<u32>;

    /// Memory for a portion. It holds anything, and is given back when the portion is dropped.
    fn buffer(&self, len: usize) -> Buffer;

    /// Comes once, before the first portion.
    fn begin(&mut self, about: About);

    /// The next bytes of the payload. With the last ones the row is whole.
    fn add(&mut self, portion: Bytes);
}
