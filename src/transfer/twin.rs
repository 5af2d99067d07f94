//! A fabric of one process for tests: threads read memory, as a device would, and can be made to never end.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use futures_util::FutureExt;
use parking_lot::Mutex;

use super::onesided::{Engine, Host, Lies, Reader, Remote};
use super::piece::{Leave, Piece};
use super::{Local, Path};
use crate::base::rows::{AreaId, Rows};

/// What lies where, and whether reads end.
#[derive(Clone, Debug, Default)]
pub struct Twin(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    places: Mutex<HashMap<u64, Bytes>>,
    next: AtomicU64,
    /// Reads do not end. What is under way is written when the engine is torn down: as late as it can be.
    pub stuck: AtomicBool,
    posted: AtomicU64,
    /// Every read fails at once.
    broken: AtomicBool,
    /// No area can be read into.
    shut: AtomicBool,
}

impl Twin {
    pub fn stick(&self, stuck: bool) {
        self.0.stuck.store(stuck, Ordering::Release);
    }

    /// Reads fail, or areas cannot be read into.
    pub fn spoil(&self, reads: bool, areas: bool) {
        self.0.broken.store(reads, Ordering::Release);
        self.0.shut.store(areas, Ordering::Release);
    }

    pub fn posted(&self) -> u64 {
        self.0.posted.load(Ordering::Acquire)
    }
}

impl Remote for Twin {
    fn name(&self) -> String {
        "memory that is read".to_owned()
    }

    fn host(&self, _: Option<&Local>) -> io::Result<Arc<dyn Host>> {
        Ok(Arc::new(self.clone()))
    }

    fn reader(&self, path: &Path, card: Bytes) -> BoxFuture<'static, io::Result<Reader>> {
        assert_eq!(&card[..], b"card");
        let (twin, name) = (self.clone(), path.name.clone());
        async move { Reader::start(&name, move || Ok(Device { twin, under_way: Vec::new(), next: 0 })).await }
            .boxed()
    }
}

impl Host for Twin {
    fn card(&self) -> Bytes {
        Bytes::from_static(b"card")
    }

    fn lend(&self, parts: &[Bytes]) -> Option<Lies> {
        let (at, bytes) = (self.0.next.fetch_add(1, Ordering::AcqRel), Bytes::from(parts.concat()));
        self.0.places.lock().insert(at, bytes.clone());
        Some(Lies { at, bytes })
    }
}

struct Device {
    twin: Twin,
    under_way: Vec<(u64, Piece, u64)>,
    next: u64,
}

impl Device {
    fn write(&self, piece: &Piece, at: u64) {
        let bytes = self.twin.0.places.lock()[&at].clone();
        piece.overwrite(&bytes);
    }
}

impl Engine for Device {
    type Read = u64;

    fn attach(&mut self, _: &Arc<Rows>) -> io::Result<()> {
        if self.twin.0.shut.load(Ordering::Acquire) { Err(io::ErrorKind::OutOfMemory.into()) } else { Ok(()) }
    }

    fn detach(&mut self, _: AreaId) {}

    fn post(&mut self, into: &Leave, at: u64) -> io::Result<u64> {
        self.next += 1;
        if self.twin.0.broken.load(Ordering::Acquire) {
            self.twin.0.posted.fetch_add(1, Ordering::AcqRel);
            return Err(io::Error::other("no read works here"));
        }
        self.under_way.push((self.next, into.piece().clone(), at));
        self.twin.0.posted.fetch_add(1, Ordering::AcqRel);
        Ok(self.next)
    }

    fn ended(&mut self, read: &mut u64) -> io::Result<bool> {
        if self.twin.0.stuck.load(Ordering::Acquire) {
            return Ok(false);
        }
        let place = self.under_way.iter().position(|(number, ..)| number == read);
        let (_, piece, at) = self.under_way.remove(place.expect("it was posted"));
        self.write(&piece, at);
        Ok(true)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        for (_, piece, at) in &self.under_way {
            self.write(piece, *at);
        }
    }
}
