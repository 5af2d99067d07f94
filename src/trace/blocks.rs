//! The blocks of one prompt, kept as runs of ascending numbers.
//!
//! Producers number blocks as they first see them, so a prompt of 3,000 blocks is a handful of runs. Neighbouring
//! runs are always joined: equal sequences are equal values.

/// A sequence of block numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Blocks {
    /// First number and count, none of them empty.
    runs: Vec<(u64, u32)>,
    len: u32,
}

impl Blocks {
    pub fn len(&self) -> u32 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        self.runs.iter().flat_map(|&(start, count)| start..start + u64::from(count))
    }

    /// Runs as first number and count.
    pub fn runs(&self) -> &[(u64, u32)] {
        &self.runs
    }

    /// Adds `start … start + count - 1`. `None` when that leaves the numbers or the counts there are.
    #[must_use = "None leaves the run out"]
    pub fn push(&mut self, start: u64, count: u32) -> Option<()> {
        start.checked_add(u64::from(count))?;
        self.len = self.len.checked_add(count)?;
        match self.runs.last_mut() {
            _ if count == 0 => {}
            Some((first, n)) if *first + u64::from(*n) == start => *n += count,
            _ => self.runs.push((start, count)),
        }
        Some(())
    }

    /// The first `keep` of them, or all.
    pub fn first(&self, keep: u32) -> Self {
        self.part(0, keep)
    }

    /// Without the first `skip`.
    pub fn after(&self, skip: u32) -> Self {
        self.part(skip, u32::MAX)
    }

    fn part(&self, mut skip: u32, mut most: u32) -> Self {
        let mut out = Self::default();
        for &(start, count) in &self.runs {
            let skipped = skip.min(count);
            let taken = (count - skipped).min(most);
            skip -= skipped;
            most -= taken;
            out.push(start + u64::from(skipped), taken).expect("a part of what was pushed");
        }
        out
    }

    /// How many of both beginnings are equal.
    pub fn shared(&self, other: &Self) -> u32 {
        let count = self.iter().zip(other.iter()).take_while(|(a, b)| a == b).count();
        u32::try_from(count).unwrap_or(u32::MAX)
    }
}

impl FromIterator<u64> for Blocks {
    /// What is past the bounds of [`Blocks::push`] is left out.
    fn from_iter<I: IntoIterator<Item = u64>>(numbers: I) -> Self {
        let mut out = Self::default();
        for number in numbers {
            if out.push(number, 1).is_none() {
                break;
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn runs_are_the_sequence(
            numbers in prop::collection::vec(0_u64..12, 0..40),
            others in prop::collection::vec(0_u64..12, 0..40),
            cut in 0_usize..45,
        ) {
            let blocks: Blocks = numbers.iter().copied().collect();
            prop_assert_eq!(blocks.iter().collect::<Vec<_>>(), numbers.clone());
            prop_assert_eq!(blocks.len() as usize, numbers.len());
            let at = cut.min(numbers.len());
            let (front, back) = (blocks.first(cut as u32), blocks.after(cut as u32));
            prop_assert_eq!(front, numbers[..at].iter().copied().collect::<Blocks>());
            prop_assert_eq!(back, numbers[at..].iter().copied().collect::<Blocks>());
            let same = numbers.iter().zip(&others).take_while(|(a, b)| a == b).count();
            prop_assert_eq!(blocks.shared(&others.into_iter().collect()) as usize, same);
        }
    }

    #[test]
    fn numbers_that_do_not_exist_are_refused() {
        assert_eq!(Blocks::default().push(u64::MAX, 2), None);
        let mut full = Blocks::default();
        full.push(0, u32::MAX).unwrap();
        assert_eq!(full.push(0, 1), None);
    }
}
