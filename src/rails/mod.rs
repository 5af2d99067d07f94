//! The rails between the boxes: which there are, whether they can work, whether they do, and what is wrong when not.
//!
//! A transfer that is slow, or that runs over one of two cables, looks like a transfer that works. So nothing here
//! believes what a library says of itself: [`Inventory`] is what the kernel lists, [`counters`] what it counted, and
//! [`verdict`] says what they mean, with a cause and a fix for each fault that pairs of Sparks are known to have.
//! Everything is read from a [`Tree`], which may be this machine or a recording of another.

pub mod counters;
mod inventory;
pub mod measure;
pub mod measured;
mod nixl;
mod probe;
mod report;
mod sampler;
mod tree;
pub mod verdict;
mod watch;

pub use inventory::{Gid, Host, Inventory, Pcie, Rail, Rdma};
pub use nixl::Nixl;
pub use report::{Peering, Report, Speed};
pub use sampler::{Sampler, View};
pub use tree::{Access, Error, Net, Tree};
pub use watch::Use;
