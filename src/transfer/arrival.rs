//! A row between the drive and the rails, as far as it is there.
//!
//! One side lands portions ([`Arrival`]), the other ones wait for the bytes of a piece ([`Arriving`]) and get them as
//! they lie, without a copy. An arrival that ends before its row is whole is a row that does not come.

use std::any::Any;
use std::ops::Range;

use bytes::Bytes;
use tokio::sync::watch;

use super::Record;
use crate::base::buffer::{Buffer, Pool};
use crate::base::landing::{About, Landing};

#[derive(Debug, Default)]
struct State {
    about: Option<About>,
    portions: Vec<Bytes>,
    there: usize,
    /// Nothing more comes.
    over: bool,
}

impl State {
    fn is_whole(&self) -> bool {
        self.about.is_some_and(|about| about.length as usize == self.there)
    }

    /// The bytes of `range`, which are there.
    fn cut(&self, range: &Range<usize>) -> Vec<Bytes> {
        let mut parts = Vec::with_capacity(2);
        let mut at = 0;
        for portion in &self.portions {
            let (from, to) = (range.start.max(at), range.end.min(at + portion.len()));
            if from < to {
                parts.push(portion.slice(from - at..to - at));
            }
            at += portion.len();
        }
        parts
    }
}

/// Where a shelf lands one row. Dropped early, the row does not come.
pub struct Arrival {
    state: watch::Sender<State>,
    length: u32,
    pool: Pool,
    /// Held until nothing more is read.
    _held: Box<dyn Any + Send + Sync>,
}

impl std::fmt::Debug for Arrival {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Arrival").field("length", &self.length).finish_non_exhaustive()
    }
}

/// The other end.
#[derive(Clone, Debug)]
pub struct Arriving(watch::Receiver<State>);

impl Arrival {
    /// For a row of `length` bytes, in memory of `pool`. `held` goes with it.
    pub fn new(length: u32, pool: &Pool, held: impl Any + Send + Sync) -> (Self, Arriving) {
        let (state, arriving) = watch::channel(State::default());
        (Self { state, length, pool: pool.clone(), _held: Box::new(held) }, Arriving(arriving))
    }

    /// Lands a row that is there already.
    pub fn whole(mut self, record: Record) {
        let Record { position, checksum, payload } = record;
        let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        self.begin(About { position, checksum, length });
        self.add(payload);
    }
}

impl Landing for Arrival {
    fn is_wanted(&self) -> bool {
        !self.state.is_closed()
    }

    fn length(&self) -> Option<u32> {
        Some(self.length)
    }

    fn buffer(&self, len: usize) -> Buffer {
        self.pool.take(len)
    }

    fn begin(&mut self, about: About) {
        self.state.send_modify(|state| {
            state.about = Some(about);
            // A row of another size is not the one that both sides agreed on.
            state.over |= about.length != self.length;
        });
    }

    fn add(&mut self, portion: Bytes) {
        self.state.send_modify(|state| {
            if !state.over {
                state.there += portion.len();
                state.portions.push(portion);
            }
        });
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        self.state.send_modify(|state| state.over = true);
    }
}

impl Arriving {
    /// What is known of the row, and these bytes of it, once they are there; `None`: they do not come. Cancel-safe.
    pub async fn part(&mut self, range: Range<usize>) -> Option<(About, Vec<Bytes>)> {
        let enough = |state: &State| state.about.is_some() && state.there >= range.end;
        let state = self.0.wait_for(|state| enough(state) || state.over).await.ok()?;
        let about = state.about.filter(|_| enough(&state))?;
        Some((about, state.cut(&range)))
    }

    /// Whether the row does not come.
    pub fn has_failed(&self) -> bool {
        let state = self.0.borrow();
        state.over && !state.is_whole()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begun(length: u32) -> (Arrival, Arriving) {
        let (mut arrival, arriving) = Arrival::new(length, &Pool::new(0), ());
        arrival.begin(About { position: 16, checksum: 5, length: 10 });
        (arrival, arriving)
    }

    #[tokio::test]
    async fn a_part_is_there_as_soon_as_its_last_byte_is_and_is_cut_out_of_what_lies_around() {
        let (mut arrival, mut arriving) = begun(10);
        arrival.add(Bytes::from_static(b"0123"));
        let (about, parts) = arriving.part(1..4).await.unwrap();
        assert_eq!((about.position, about.checksum, parts), (16, 5, vec![Bytes::from_static(b"123")]));
        {
            let mut other = arriving.clone();
            let mut later = std::pin::pin!(other.part(2..10));
            assert!(futures_util::poll!(&mut later).is_pending());
            arrival.add(Bytes::from_static(b"456"));
            assert!(futures_util::poll!(&mut later).is_pending());
            arrival.add(Bytes::from_static(b"789"));
            assert_eq!(later.await.unwrap().1.concat(), b"23456789");
        }
        assert_eq!(arriving.part(4..7).await.unwrap().1, [Bytes::from_static(b"456")]);
        drop(arrival);
        assert!(!arriving.has_failed() && arriving.part(0..10).await.is_some());
    }

    #[tokio::test]
    async fn a_row_that_ends_early_or_is_of_another_size_does_not_come() {
        let (mut arrival, mut arriving) = begun(10);
        arrival.add(Bytes::from_static(b"0123"));
        assert!(!arriving.has_failed() && arrival.is_wanted());
        drop(arrival);
        assert!(arriving.has_failed());
        assert!(arriving.part(0..4).await.is_some(), "what came is there");
        assert!(arriving.part(3..5).await.is_none());
        let (mut arrival, mut arriving) = begun(11);
        arrival.add(Bytes::from_static(b"0123456789"));
        assert!(arriving.part(0..4).await.is_none() && arriving.has_failed());
        drop(arriving);
        assert!(!arrival.is_wanted());
    }
}
