//! Which segment is read back next, when, and how slowly: rot is found before somebody needs the row. Pure.
//!
//! Every segment is read back once in a period. The one that was looked at longest ago comes first; turns are spread
//! evenly over the period, and a segment that is overdue (the box was off) has its turn at once. Within a turn the
//! pause after each row bounds the rate. The driver asks for nothing while loads wait.
//!
//! A segment that is seen for the first time counts as looked at: what was just written is not rotten yet. What is
//! known survives a restart as a few lines of text, because a node that is restarted daily would otherwise begin each
//! day with the same segments; losing the text costs a pass.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use super::format::Sequence;

const DAY_S: u64 = 24 * 60 * 60;

/// Fastest reading: half a percent of a drive that does 7 GB/s, a tenth of the slow ones.
const RATE_MAX: u64 = 32 << 20;
/// Slowest: a segment of 256 MiB ends within five minutes, so that a turn is not cut by every restart.
const RATE_MIN: u64 = 1 << 20;

/// Lines of text that are read at most; a store of 4 TiB has 16,384 segments.
const LINES: usize = 1 << 20;

const TITLE: &str = "spark-kv scrub 1";

/// What is known about each segment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scrub {
    period_s: u64,
    /// When each segment was read back, or seen first.
    looked: BTreeMap<Sequence, u64>,
    /// Those of `looked` that were read back.
    verified: BTreeMap<Sequence, u64>,
    last_turn: u64,
}

impl Scrub {
    /// A pass takes `days`; 0: no passes.
    pub fn set_period(&mut self, days: u32) {
        self.period_s = u64::from(days) * DAY_S;
    }

    /// When each segment was read back last.
    pub fn verified(&self) -> &BTreeMap<Sequence, u64> {
        &self.verified
    }

    /// The segment whose turn it is, if it is anybody's. Forgets segments that are gone.
    pub fn choose(&mut self, held: &[Sequence], now_unix: u64) -> Option<Sequence> {
        let before = std::mem::take(&mut self.looked);
        // A time from the future is of a clock that was wrong.
        let time = |sequence| before.get(sequence).map_or(now_unix, |at| (*at).min(now_unix));
        self.looked = held.iter().map(|sequence| (*sequence, time(sequence))).collect();
        self.verified.retain(|sequence, _| self.looked.contains_key(sequence));
        self.last_turn = self.last_turn.min(now_unix);
        if self.period_s == 0 {
            return None;
        }
        let (&oldest, &looked) = self.looked.iter().min_by_key(|(sequence, at)| (**at, **sequence))?;
        let every = self.period_s / self.looked.len() as u64;
        let due = now_unix >= self.last_turn.saturating_add(every) && looked < now_unix;
        let overdue = now_unix - looked >= self.period_s;
        (due || overdue).then_some(oldest)
    }

    /// A turn begins.
    pub fn begun(&mut self, now_unix: u64) {
        self.last_turn = now_unix;
    }

    /// Every row of the segment was read back.
    pub fn ended(&mut self, sequence: Sequence, now_unix: u64) {
        self.looked.insert(sequence, now_unix);
        self.verified.insert(sequence, now_unix);
    }

    /// How long to pause after `bytes` were read, in a store of `total` bytes: twice as fast as a pass needs, within
    /// bounds.
    pub fn pause(&self, bytes: u64, total: u64) -> Duration {
        let wanted = total.saturating_mul(2) / self.period_s.max(1);
        Duration::from_secs_f64(bytes as f64 / wanted.clamp(RATE_MIN, RATE_MAX) as f64)
    }

    pub fn to_text(&self) -> String {
        let mut text = format!("{TITLE}\n{}\n", self.last_turn);
        for (sequence, looked) in &self.looked {
            let verified = self.verified.get(sequence).copied().unwrap_or(0);
            let _ = writeln!(text, "{} {looked} {verified}", sequence.0);
        }
        text
    }

    /// Takes up what was kept. Text that is not ours is as good as none.
    pub fn take_up(&mut self, text: &str) -> bool {
        let mut lines = text.lines();
        let title = lines.next() == Some(TITLE);
        let (true, Some(Ok(last_turn))) = (title, lines.next().map(str::parse)) else { return false };
        let (mut looked, mut verified) = (BTreeMap::new(), BTreeMap::new());
        for line in lines.take(LINES) {
            let mut numbers = line.split(' ').map(str::parse::<u64>);
            let (Some(Ok(sequence)), Some(Ok(seen)), Some(Ok(read)), None) =
                (numbers.next(), numbers.next(), numbers.next(), numbers.next())
            else {
                return false;
            };
            looked.insert(Sequence(sequence), seen);
            if read > 0 {
                verified.insert(Sequence(sequence), read);
            }
        }
        (self.last_turn, self.looked, self.verified) = (last_turn, looked, verified);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const T: u64 = 1_800_000_000;

    fn held(range: std::ops::Range<u64>) -> Vec<Sequence> {
        range.map(Sequence).collect()
    }

    fn monthly() -> Scrub {
        let mut scrub = Scrub::default();
        scrub.set_period(30);
        scrub
    }

    /// Minutes pass, turns end at once. Gives who had a turn, and when.
    fn run(scrub: &mut Scrub, held: &[Sequence], from: u64, days: u64) -> Vec<(u64, u64)> {
        let mut turns = Vec::new();
        for now in (from..from + days * DAY_S).step_by(60) {
            if let Some(sequence) = scrub.choose(held, now) {
                scrub.begun(now);
                scrub.ended(sequence, now);
                turns.push((sequence.0, now - from));
            }
        }
        turns
    }

    #[test]
    fn a_pass_takes_the_period_and_has_each_segment_once_in_even_steps() {
        let mut scrub = monthly();
        let held = held(1..11);
        let turns = run(&mut scrub, &held, T, 30);
        assert_eq!(turns.iter().map(|(s, _)| *s).collect::<Vec<_>>(), (1..11).collect::<Vec<_>>());
        let steps: Vec<u64> = turns.windows(2).map(|pair| (pair[1].1 - pair[0].1) / DAY_S).collect();
        assert_eq!(steps, [3; 9]);
        let again = run(&mut scrub, &held, T + 30 * DAY_S, 30);
        assert_eq!(again.len(), 10, "and so each period");
    }

    #[test]
    fn what_was_looked_at_longest_ago_comes_first_and_new_segments_last() {
        let mut scrub = monthly();
        scrub.choose(&held(1..4), T);
        scrub.ended(Sequence(1), T + DAY_S);
        scrub.choose(&held(1..5), T + DAY_S + 3600);
        let turns = run(&mut scrub, &held(1..5), T + 2 * DAY_S, 30);
        assert_eq!(turns.iter().map(|(s, _)| *s).collect::<Vec<_>>(), [2, 3, 1, 4]);
    }

    #[test]
    fn what_is_overdue_does_not_wait_for_its_step() {
        let mut scrub = monthly();
        scrub.choose(&held(1..4), T);
        let later = T + 100 * DAY_S;
        let turns = run(&mut scrub, &held(1..4), later, 1);
        assert_eq!(turns, [(1, 0), (2, 60), (3, 120)]);
    }

    #[test]
    fn off_is_off_and_segments_that_are_gone_are_forgotten() {
        let mut scrub = Scrub::default();
        assert_eq!(scrub.choose(&held(1..4), T), None);
        assert_eq!(scrub.choose(&held(1..4), T + 1000 * DAY_S), None);
        scrub.ended(Sequence(1), T);
        scrub.choose(&held(3..4), T);
        assert_eq!((scrub.looked.len(), scrub.verified.len()), (1, 0));
        let mut scrub = monthly();
        assert_eq!(scrub.choose(&[], T), None);
    }

    #[test]
    fn the_rate_is_bounded_on_both_sides() {
        let scrub = monthly();
        let rate = |total| (RATE_MAX as f64 / scrub.pause(RATE_MAX, total).as_secs_f64()) as u64;
        assert_eq!(rate(0), RATE_MIN);
        assert_eq!(rate(u64::MAX), RATE_MAX);
        let terabytes = 8 << 40;
        assert!((RATE_MIN..RATE_MAX).contains(&rate(terabytes)), "{}", rate(terabytes));
    }

    #[test]
    fn what_is_known_survives_as_text_and_nonsense_changes_nothing() {
        let mut scrub = monthly();
        scrub.choose(&held(1..4), T);
        scrub.begun(T + 5);
        scrub.ended(Sequence(2), T + 6);
        let mut again = monthly();
        assert!(again.take_up(&scrub.to_text()));
        assert_eq!(again, scrub);
        for text in
            ["", "spark-kv scrub 1", "spark-kv scrub 1\nx\n", "spark-kv scrub 1\n5\n1 2\n", "other\n5\n"]
        {
            assert!(!again.take_up(text), "{text}");
        }
        assert_eq!(again, scrub);
    }

    #[test]
    fn a_clock_that_was_wrong_does_not_stop_the_passes() {
        let mut scrub = monthly();
        scrub.choose(&held(1..3), T + 1000 * DAY_S);
        scrub.begun(T + 1000 * DAY_S);
        assert_eq!(run(&mut scrub, &held(1..3), T, 61).len(), 4);
    }
}
