//! The store as a shelf from which other nodes are served.
//!
//! Rows come from the drive alone, never out of the engine's row area, although some lie there too:
//!
//! - A peer asks for what this node announced, which is what is whole on the drive. Until then nobody asks for a row
//!   whose job is open; it has no checksum yet that a receiver could hold it to, and may still fail.
//! - From the answer to its job on a row is the engine's again, which writes to it without a word. To lend it longer
//!   would be to hold back that answer until a peer's cable has taken it: a slow cable would use up the engine's rows.
//! - What is left is a row that is announced while another job loads it into the area, and only from its last byte to
//!   the job's answer. Serving it from there would save a read when both nodes load one row within milliseconds.

use futures_util::future::BoxFuture;

use crate::base::block::{RowKey, Space};
use crate::store::Store;
use crate::transfer::{Arrival, Shelf};

impl Shelf for Store {
    fn read(&self, space: Space, key: RowKey, into: Arrival) -> BoxFuture<'static, ()> {
        let store = self.clone();
        // The store's checksum is over the payload alone, with the algorithm that transfer names.
        Box::pin(async move { store.bring(space, key, Box::new(into)).await })
    }
}
