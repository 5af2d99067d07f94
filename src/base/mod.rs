//! Ground floor: units, identities of KV rows, shared memory, frames, faults and the clock.
//!
//! Nothing here knows tokio, a file system or another module of the crate. Everything that two modules must
//! agree on byte by byte (a row's key, the engine's door, the lookup table) is defined here and nowhere else.

pub mod block;
pub mod buffer;
pub mod checksum;
pub mod clock;
pub mod codec;
pub mod doorway;
pub mod fault;
pub mod frame;
pub mod geometry;
pub mod handover;
pub mod landing;
pub mod mutant;
pub mod rows;
pub mod shm;
pub mod table;
pub mod units;
