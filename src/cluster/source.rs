//! The store as a shelf from which other nodes are served.

use futures_util::future::BoxFuture;

use crate::base::block::{RowKey, Space};
use crate::store::Store;
use crate::transfer::{Record, Shelf};

impl Shelf for Store {
    fn read(&self, space: Space, key: RowKey) -> BoxFuture<'static, Option<Record>> {
        let store = self.clone();
        Box::pin(async move {
            let record = Self::read(&store, space, key).await?;
            // The store's checksum is over the payload alone, with the algorithm that transfer names.
            Some(Record { position: record.position, checksum: record.checksum, payload: record.payload })
        })
    }
}
