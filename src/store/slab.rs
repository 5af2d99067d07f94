//! Many small values of one kind, each under a number: chunks that are made once and never move. Pure.
//!
//! A vector of a million rows would copy all of them when it grows, and hold both copies meanwhile. Here a value costs
//! its own size, and growing costs one chunk. Numbers of values that went are given again; chunks are kept, so that
//! what is taken is bounded by what was held at one time.

/// Values of one chunk: large enough that the chunks' own list stays small, small enough that the last one, on average
/// half empty, counts for nothing beside a million rows.
const CHUNK: usize = 4096;

/// Values by number. A number is good from [`Slab::add`] until [`Slab::remove`].
#[derive(Debug)]
pub struct Slab<T> {
    chunks: Vec<Vec<T>>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { chunks: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    pub fn add(&mut self, value: T) -> u32 {
        if let Some(number) = self.free.pop() {
            *self.get_mut(number) = value;
            return number;
        }
        if self.chunks.last().is_none_or(|chunk| chunk.len() == CHUNK) {
            self.chunks.push(Vec::with_capacity(CHUNK));
        }
        let before = (self.chunks.len() - 1) * CHUNK;
        let chunk = self.chunks.last_mut().expect("pushed just now when there was none");
        let number = u32::try_from(before + chunk.len()).expect("memory ends before numbers do");
        chunk.push(value);
        number
    }

    pub fn get(&self, number: u32) -> &T {
        &self.chunks[number as usize / CHUNK][number as usize % CHUNK]
    }

    pub fn get_mut(&mut self, number: u32) -> &mut T {
        &mut self.chunks[number as usize / CHUNK][number as usize % CHUNK]
    }

    /// The number may be given again from here on.
    pub fn remove(&mut self, number: u32) {
        self.free.push(number);
    }

    /// Bytes that this has allocated.
    pub fn memory(&self) -> usize {
        let lists = self.chunks.capacity() * size_of::<Vec<T>>() + self.free.capacity() * size_of::<u32>();
        self.chunks.len() * CHUNK * size_of::<T>() + lists
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stay_good_while_chunks_come_and_are_given_again() {
        let mut slab = Slab::default();
        let numbers: Vec<u32> = (0..3 * CHUNK).map(|n| slab.add(n)).collect();
        assert!(numbers.iter().enumerate().all(|(n, &number)| *slab.get(number) == n));
        let before = slab.memory();
        for &number in numbers.iter().step_by(2) {
            slab.remove(number);
        }
        let again: Vec<u32> = (0..3 * CHUNK / 2).map(|n| slab.add(n + 100_000)).collect();
        assert!(again.iter().enumerate().all(|(n, &number)| *slab.get(number) == n + 100_000));
        assert!(numbers.iter().enumerate().skip(1).step_by(2).all(|(n, &number)| *slab.get(number) == n));
        assert!(slab.memory() - before <= 4 * 2 * 3 * CHUNK, "only the list of free numbers was added");
    }
}
