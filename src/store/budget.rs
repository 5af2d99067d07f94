//! What a sliding day has written to the drive and read from it, and what follows: whether more may be written, and
//! whether what is written is ever read. Pure.
//!
//! A drive wears by what is written to it. The operator may allow so many bytes a day; when they are used up no rows
//! are taken until enough of the day has slid away, and loads go on. The day is kept in steps of half an hour, so that
//! a restart can take it up from a few lines of text. What was written since the text was kept last (a minute at most)
//! is not counted after a kill.
//!
//! A cache that writes far more than it reads is worn for nothing. The rule is [`Wear::unread`].

use std::collections::VecDeque;
use std::fmt::Write;

/// Seconds of the day that is looked at.
const DAY_S: u64 = 24 * 60 * 60;

/// Grain of the day: what was written leaves it up to this much late.
const STEP_S: u64 = 30 * 60;

const STEPS: u64 = DAY_S / STEP_S;

/// Written over read from which writes count as unread. A prefix that comes back is usually read many times; 20 means
/// that of a hundred rows not even five came back once.
const UNREAD_TIMES: u64 = 20;

/// First line of the text form.
const TITLE: &str = "spark-kv wear 1";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step {
    /// Unix seconds over [`STEP_S`].
    at: u64,
    written: u64,
    read: u64,
}

/// The text of a day that cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {0} is not what was written there")]
pub struct Unreadable(pub usize);

/// Bytes of the last day, by direction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wear {
    /// Most bytes to be written in a day; 0: as many as come.
    budget: u64,
    /// Oldest first, at most [`STEPS`].
    steps: VecDeque<Step>,
}

impl Wear {
    pub fn set_budget(&mut self, bytes_per_day: u64) {
        self.budget = bytes_per_day;
    }

    pub fn budget(&self) -> u64 {
        self.budget
    }

    pub fn wrote(&mut self, bytes: u64, now_unix: u64) {
        let step = self.step(now_unix);
        step.written = step.written.saturating_add(bytes);
    }

    pub fn read(&mut self, bytes: u64, now_unix: u64) {
        let step = self.step(now_unix);
        step.read = step.read.saturating_add(bytes);
    }

    /// The step of this moment. A clock that was set back counts into the newest there is.
    fn step(&mut self, now_unix: u64) -> &mut Step {
        let at = now_unix / STEP_S;
        if self.steps.back().is_none_or(|newest| newest.at < at) {
            self.steps.push_back(Step { at, written: 0, read: 0 });
            while self.steps.front().is_some_and(|oldest| oldest.at + STEPS <= at) {
                self.steps.pop_front();
            }
        }
        self.steps.back_mut().expect("pushed just now when there was none")
    }

    fn of_day(&self, now_unix: u64) -> impl Iterator<Item = &Step> {
        let first = (now_unix / STEP_S + 1).saturating_sub(STEPS);
        self.steps.iter().filter(move |step| step.at >= first)
    }

    /// Bytes written in the last day.
    pub fn written(&self, now_unix: u64) -> u64 {
        self.of_day(now_unix).map(|step| step.written).sum()
    }

    /// Bytes read in the last day, for the engine and for peers.
    pub fn reads(&self, now_unix: u64) -> u64 {
        self.of_day(now_unix).map(|step| step.read).sum()
    }

    /// When rows are taken again. `None`: the budget is not used up.
    pub fn spent_until(&self, now_unix: u64) -> Option<u64> {
        if self.budget == 0 {
            return None;
        }
        let mut left = self.written(now_unix);
        if left < self.budget {
            return None;
        }
        for step in self.of_day(now_unix) {
            left -= step.written;
            if left < self.budget {
                return Some((step.at + STEPS) * STEP_S);
            }
        }
        unreachable!("without any step nothing is written, which is less than a budget")
    }

    /// Says so when a day has written far more than was read: at least a whole capacity, so that rows of this very
    /// day had to go (below that, everything written today is still there and can be read tomorrow), and at least
    /// [`UNREAD_TIMES`] as much as was read.
    pub fn unread(&self, capacity: u64, now_unix: u64) -> Option<String> {
        let (written, read) = (self.written(now_unix), self.reads(now_unix));
        let unread = capacity > 0 && written >= capacity && written >= read.saturating_mul(UNREAD_TIMES);
        unread.then(|| {
            format!(
                "in the last day {} were written and {} read back; the store holds {}",
                gigabytes(written),
                gigabytes(read),
                gigabytes(capacity)
            )
        })
    }

    /// The day as text, for a file.
    pub fn to_text(&self) -> String {
        let mut text = format!("{TITLE}\n");
        for Step { at, written, read } in &self.steps {
            let _ = writeln!(text, "{at} {written} {read}");
        }
        text
    }

    /// Takes up a day that was kept, before anything is counted. What is from the future is of a clock that was wrong,
    /// and would stay for ever: it is left out.
    ///
    /// # Errors
    /// When the text is not a day's; nothing is taken then.
    pub fn take_up(&mut self, text: &str, now_unix: u64) -> Result<(), Unreadable> {
        let mut lines = text.lines().enumerate();
        if lines.next().is_none_or(|(_, title)| title != TITLE) {
            return Err(Unreadable(1));
        }
        let mut steps = VecDeque::new();
        for (n, line) in lines.take(2 * usize::try_from(STEPS).unwrap_or(usize::MAX)) {
            let mut numbers = line.split(' ').map(str::parse::<u64>);
            let (Some(Ok(at)), Some(Ok(written)), Some(Ok(read)), None) =
                (numbers.next(), numbers.next(), numbers.next(), numbers.next())
            else {
                return Err(Unreadable(n + 1));
            };
            if steps.back().is_some_and(|last: &Step| last.at >= at) {
                return Err(Unreadable(n + 1));
            }
            if at <= now_unix / STEP_S {
                steps.push_back(Step { at, written, read });
            }
        }
        // One more than a day's would overflow no sum, but is no day either.
        while steps.len() as u64 > STEPS {
            steps.pop_front();
        }
        self.steps = steps;
        Ok(())
    }
}

/// A time of day that people read, from Unix seconds.
pub fn hour_and_minute(unix: u64) -> String {
    let minutes = unix % DAY_S / 60;
    format!("{:02}:{:02} UTC", minutes / 60, minutes % 60)
}

/// An amount for a sentence.
pub fn gigabytes(bytes: u64) -> String {
    format!("{:.1} GB", bytes as f64 / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: u64 = 3600;
    /// Some moment at the beginning of a step.
    const T: u64 = 1_000_000 * STEP_S;

    fn with_budget(budget: u64) -> Wear {
        let mut wear = Wear::default();
        wear.set_budget(budget);
        wear
    }

    #[test]
    fn the_budget_is_free_again_when_enough_of_the_day_slid_away() {
        let mut wear = with_budget(100);
        wear.wrote(60, T);
        assert_eq!(wear.spent_until(T), None);
        wear.wrote(30, T + 6 * HOUR);
        assert_eq!(wear.spent_until(T + 6 * HOUR), None);
        wear.wrote(30, T + 7 * HOUR);
        let until = T + 24 * HOUR;
        assert_eq!(wear.spent_until(T + 7 * HOUR), Some(until), "the first 60 go first");
        assert_eq!(wear.spent_until(until - 1), Some(until));
        assert_eq!(wear.spent_until(until), None);
        assert_eq!(wear.written(until), 60);
        wear.wrote(40, until);
        assert_eq!(wear.spent_until(until), Some(T + 30 * HOUR));
    }

    #[test]
    fn without_a_budget_nothing_is_ever_spent_and_a_day_is_bounded() {
        let mut wear = Wear::default();
        for step in 0..1000 {
            wear.wrote(u64::MAX / 4096, T + step * STEP_S);
            assert_eq!(wear.spent_until(T + step * STEP_S), None);
        }
        assert_eq!(wear.steps.len() as u64, STEPS);
    }

    #[test]
    fn a_clock_that_jumps_neither_panics_nor_loses_what_was_written() {
        let mut wear = with_budget(10);
        wear.wrote(10, T);
        wear.wrote(5, T - 40 * HOUR);
        assert_eq!(wear.written(T), 15);
        assert_eq!(wear.spent_until(T), Some(T + 24 * HOUR));
        assert_eq!(wear.spent_until(T + 1000 * HOUR), None);
        wear.wrote(1, u64::MAX);
        assert_eq!(wear.written(u64::MAX), 1);
        assert_eq!(wear.written(0), 1, "steps of the future count: rather too few writes than too many");
    }

    #[test]
    fn a_day_survives_as_text_and_bad_text_takes_nothing() {
        let mut wear = with_budget(7);
        wear.wrote(5, T);
        wear.read(3, T + 2 * HOUR);
        let mut again = with_budget(7);
        assert_eq!(again.take_up(&wear.to_text(), T + 2 * HOUR), Ok(()));
        assert_eq!(again, wear);
        for (text, line) in [
            ("", 1),
            ("something else\n", 1),
            ("spark-kv wear 1\n5 6\n", 2),
            ("spark-kv wear 1\n5 6 7 8\n", 2),
            ("spark-kv wear 1\n5 6 -7\n", 2),
            ("spark-kv wear 1\n5 6 7\n5 6 7\n", 3),
        ] {
            assert_eq!(again.take_up(text, T), Err(Unreadable(line)), "{text}");
        }
        assert_eq!(again, wear, "what was there stays");
        assert_eq!(again.take_up(&wear.to_text(), T - 1), Ok(()));
        assert_eq!(again.written(T), 0, "a day from the future is none");
    }

    #[test]
    fn writes_that_nobody_reads_are_told_once_a_capacity_of_them_was_written() {
        let mut wear = Wear::default();
        wear.wrote(999, T);
        assert_eq!(wear.unread(1000, T), None, "the first filling is no waste");
        wear.wrote(1, T + HOUR);
        let said = wear.unread(1000, T + HOUR).unwrap();
        assert!(said.contains("written") && said.contains("read back"), "{said}");
        wear.read(50, T + HOUR);
        assert!(wear.unread(1000, T + HOUR).is_some(), "20 times is still too much");
        wear.read(1, T + HOUR);
        assert_eq!(wear.unread(1000, T + HOUR), None);
        assert_eq!(wear.unread(0, T), None);
        assert_eq!(wear.unread(500, T + 100 * HOUR), None, "yesterday is forgotten");
    }

    #[test]
    fn times_of_day_are_readable() {
        assert_eq!(hour_and_minute(0), "00:00 UTC");
        assert_eq!(hour_and_minute(3 * DAY_S + 13 * 3600 + 5 * 60 + 59), "13:05 UTC");
    }
}
