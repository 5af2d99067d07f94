//! Which rail carries the next piece. No clock, no sockets: `now` is an argument.
//!
//! Pieces wait in one line, in prefix order, and a rail takes the next one when it has credit: as many bytes in flight
//! as it moves in [`CREDIT_SPAN`], at least two pieces. So nothing is divided in advance. A rail that becomes slow
//! has few bytes in flight soon after and carries what it can; one that is lost gives its pieces back, to the front.
//! When the line is empty, a rail with nothing to do takes over the last piece of the one that would be ready last,
//! if it is faster even when it begins from nothing: a transfer ends with its fastest rail, not with its slowest. Each
//! time that a piece is taken over it takes twice as much to take it over again: two rails on which a piece needs longer
//! than either believes would otherwise take it from each other for ever, and neither would finish it.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::base::clock::Micros;
use crate::base::mutant::{self, Mutant};

/// A rail has as many bytes in flight as it moves in this time: longer than a round trip with its wait for a drive,
/// short against the second within which a rail's share has to follow its speed.
pub const CREDIT_SPAN: Duration = Duration::from_millis(80);

/// Most bytes in flight on one rail: 16 MiB are 1.3 ms of a 100 Gb/s rail, many times its round trip.
const CREDIT_MOST: u64 = 16 << 20;

/// Pieces in flight while nothing is known about a rail, and the fewest at any time.
pub const PIECES_FIRST: u64 = 4;
const PIECES_LEAST: u64 = 2;

/// Pieces in flight on one rail, however small.
const PIECES_MOST: usize = 512;

/// Speed is measured over at least this time.
const SAMPLE: Duration = Duration::from_millis(20);

/// Bytes per second that a rail is taken for until it was measured: slow, so that one known to be fast helps it.
const RATE_UNKNOWN: f64 = 50e6;

/// A piece is taken over when the other rail would need this many times as long.
const TAKE_OVER: f64 = 1.5;

/// Seconds that it takes at least until a piece is taken over: what asking costs.
const TAKE_OVER_LEAST: f64 = 0.002;

/// How often a piece may be lost with its rail. A piece that ends every connection it is asked on must not end them
/// all for ever.
const TRIES: u8 = 4;

/// The line and what flies on each rail.
#[derive(Debug)]
pub struct Share<T> {
    waiting: BTreeMap<u64, Waiting<T>>,
    rails: Vec<Rail<T>>,
    piece_bytes: u64,
    next: u64,
}

#[derive(Debug)]
struct Waiting<T> {
    piece: T,
    bytes: u64,
    tries: u8,
}

#[derive(Debug)]
struct Rail<T> {
    up: bool,
    flying: VecDeque<Flying<T>>,
    /// Bytes in flight that have not arrived.
    left: u64,
    rate: Option<f64>,
    /// Since when bytes are counted for the next sample, and how many.
    since: Micros,
    counted: u64,
    /// Last time that something arrived, or that it began to wait for it.
    moved: Micros,
}

#[derive(Debug)]
struct Flying<T> {
    number: u64,
    left: u64,
    bytes: u64,
    tries: u8,
    /// How often it was taken over.
    taken: u8,
    /// `None`: another rail has taken it over.
    piece: Option<T>,
}

/// A piece for a rail to ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Given<T, B> {
    /// Place in the line; the same when it is given again.
    pub number: u64,
    pub piece: T,
    /// What beginning it gave.
    pub begun: B,
    /// The rail that had it and needs it no more.
    pub taken_from: Option<usize>,
}

impl<T> Default for Rail<T> {
    fn default() -> Self {
        let (since, moved) = (Micros::default(), Micros::default());
        Self { up: false, flying: VecDeque::new(), left: 0, rate: None, since, counted: 0, moved }
    }
}

impl<T: Clone> Share<T> {
    pub fn new(rails: usize, piece_bytes: u64) -> Self {
        let rails = (0..rails).map(|_| Rail::default()).collect();
        Self { waiting: BTreeMap::new(), rails, piece_bytes, next: 1 }
    }

    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Whether anything flies anywhere.
    pub fn is_busy(&self) -> bool {
        self.rails.iter().any(|rail| !rail.flying.is_empty())
    }

    /// Bytes per second of a rail, once they were measured.
    pub fn rate(&self, rail: usize) -> Option<f64> {
        self.rails[rail].rate
    }

    /// Adds a piece to the end of the line.
    pub fn offer(&mut self, piece: T, bytes: u64) {
        self.waiting.insert(self.next, Waiting { piece, bytes, tries: 0 });
        self.next += 1;
    }

    /// A rail is open; nothing is known of it.
    pub fn up(&mut self, rail: usize, now: Micros) {
        self.rails[rail] = Rail { up: true, since: now, moved: now, ..Rail::default() };
    }

    /// A rail is gone. What flew on it waits again; what was lost too often is given back.
    pub fn lost(&mut self, rail: usize) -> Vec<T> {
        let gone = std::mem::take(&mut self.rails[rail]);
        let mut given_up = Vec::new();
        for Flying { number, bytes, tries, piece, .. } in gone.flying {
            match piece {
                Some(_) if mutant::on(Mutant::LosePieces) => {}
                Some(piece) if tries + 1 < TRIES => {
                    self.waiting.insert(number, Waiting { piece, bytes, tries: tries + 1 });
                }
                Some(piece) => given_up.push(piece),
                None => {}
            }
        }
        given_up
    }

    /// Everything that waits, taken out.
    pub fn clear(&mut self) -> Vec<T> {
        std::mem::take(&mut self.waiting).into_values().map(|w| w.piece).collect()
    }

    /// The next piece for a rail that has credit. `begin` says that a piece begins on it, or that nobody wants it
    /// any more.
    pub fn pull<B>(
        &mut self,
        rail: usize,
        now: Micros,
        begin: impl Fn(&T) -> Option<B>,
    ) -> Option<Given<T, B>> {
        if !self.has_credit(rail) {
            return None;
        }
        while let Some((number, Waiting { piece, bytes, tries })) = self.waiting.pop_first() {
            if let Some(begun) = begin(&piece) {
                self.fly(
                    rail,
                    now,
                    Flying { number, left: bytes, bytes, tries, taken: 0, piece: Some(piece.clone()) },
                );
                return Some(Given { number, piece, begun, taken_from: None });
            }
        }
        self.take_over(rail, now, begin)
    }

    fn has_credit(&self, rail: usize) -> bool {
        let Rail { up, ref flying, left, rate, .. } = self.rails[rail];
        let pieces = |n: u64| n * self.piece_bytes;
        let credit = rate.map_or(pieces(PIECES_FIRST), |rate| (rate * CREDIT_SPAN.as_secs_f64()) as u64);
        let credit = credit.min(CREDIT_MOST).max(pieces(PIECES_LEAST));
        up && flying.len() < PIECES_MOST && (left < credit || mutant::on(Mutant::NoCredit))
    }

    fn fly(&mut self, rail: usize, now: Micros, flying: Flying<T>) {
        let rail = &mut self.rails[rail];
        if rail.flying.is_empty() {
            (rail.since, rail.counted, rail.moved) = (now, 0, now);
        }
        rail.left += flying.left;
        rail.flying.push_back(flying);
    }

    fn take_over<B>(
        &mut self,
        thief: usize,
        now: Micros,
        begin: impl Fn(&T) -> Option<B>,
    ) -> Option<Given<T, B>> {
        if !self.rails[thief].flying.is_empty() {
            return None;
        }
        let rate = self.rails[thief].rate.unwrap_or(RATE_UNKNOWN);
        let last = (0..self.rails.len()).filter(|&n| n != thief && self.rails[n].held() > 0);
        let slowest = last.max_by(|&a, &b| self.rails[a].ready(now).total_cmp(&self.rails[b].ready(now)))?;
        let ready = self.rails[slowest].ready(now);
        // Pieces that nobody wants any more are passed over; the others keep their place.
        for flying in self.rails[slowest].flying.iter_mut().rev() {
            let Flying { number, bytes, tries, taken, .. } = *flying;
            if flying.piece.is_none() {
                continue;
            }
            let worth = TAKE_OVER * bytes as f64 / rate + TAKE_OVER_LEAST;
            if ready < worth * f64::from(1_u32 << taken.min(30)) {
                return None;
            }
            let Some(begun) = flying.piece.as_ref().and_then(&begin) else { continue };
            let piece = flying.piece.take()?;
            let taken = taken.saturating_add(1);
            let flying = Flying { number, left: bytes, bytes, tries, taken, piece: Some(piece.clone()) };
            self.fly(thief, now, flying);
            return Some(Given { number, piece, begun, taken_from: Some(slowest) });
        }
        None
    }

    /// So many bytes of the piece whose turn it is have arrived on a rail.
    pub fn moved(&mut self, rail: usize, bytes: u64, now: Micros) {
        let rail = &mut self.rails[rail];
        if let Some(front) = rail.flying.front_mut() {
            let bytes = bytes.min(front.left);
            front.left -= bytes;
            rail.left -= bytes;
        }
        rail.moved = now;
        rail.counted += bytes;
        let span = now.since(rail.since);
        if span >= SAMPLE {
            let fresh = rail.counted as f64 / span.as_secs_f64();
            rail.rate = Some(rail.rate.map_or(fresh, |old| old / 2.0 + fresh / 2.0).max(1.0));
            (rail.since, rail.counted) = (now, 0);
        }
    }

    /// The piece whose turn it is on a rail was answered, with or without its bytes.
    pub fn landed(&mut self, rail: usize, now: Micros) {
        let rail = &mut self.rails[rail];
        if let Some(front) = rail.flying.pop_front() {
            rail.left -= front.left;
        }
        rail.moved = now;
    }
}

impl<T> Rail<T> {
    /// Pieces that another rail could take over.
    fn held(&self) -> usize {
        self.flying.iter().filter(|f| f.piece.is_some()).count()
    }

    /// Seconds until everything in flight has arrived. Standing still counts against it, the longer the more.
    fn ready(&self, now: Micros) -> f64 {
        self.left as f64 / self.rate.unwrap_or(RATE_UNKNOWN) + 4.0 * now.since(self.moved).as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE: u64 = 1 << 20;
    const MS: Duration = Duration::from_millis(1);

    /// Links that move bytes on virtual time.
    struct Run {
        share: Share<u64>,
        now: Micros,
        /// Bytes that arrived on each rail, those of pieces taken over included.
        moved: Vec<u64>,
        landed: Vec<u64>,
        seen: Vec<VecDeque<(u64, u64)>>,
        due: Vec<f64>,
    }

    impl Run {
        fn new(rails: usize, pieces: u64) -> Self {
            let mut share = Share::new(rails, PIECE);
            (0..rails).for_each(|rail| share.up(rail, Micros(0)));
            (0..pieces).for_each(|piece| share.offer(piece, PIECE));
            let (moved, seen) = (vec![0; rails], vec![VecDeque::new(); rails]);
            Self { share, now: Micros(0), moved, landed: Vec::new(), seen, due: vec![0.0; rails] }
        }

        /// One millisecond with these speeds, in bytes per second.
        fn step(&mut self, rates: &[f64]) {
            self.now = self.now.plus(MS);
            for (rail, rate) in rates.iter().enumerate() {
                while let Some(given) = self.share.pull(rail, self.now, |_| Some(())) {
                    if let Some(from) = given.taken_from {
                        // The server drops what it has not begun.
                        if let Some(n) =
                            self.seen[from].iter().position(|&(p, left)| p == given.piece && left == PIECE)
                            && n > 0
                        {
                            self.seen[from][n].1 = 0;
                        }
                    }
                    self.seen[rail].push_back((given.piece, PIECE));
                }
                self.due[rail] = (self.due[rail] + rate / 1e3).min(*rate);
                while let Some((piece, left)) = self.seen[rail].front_mut() {
                    let bytes = (self.due[rail] as u64).min(*left);
                    (self.due[rail], *left) = (self.due[rail] - bytes as f64, *left - bytes);
                    let (piece, left) = (*piece, *left);
                    self.moved[rail] += bytes;
                    self.share.moved(rail, bytes, self.now);
                    if left > 0 {
                        break;
                    }
                    self.seen[rail].pop_front();
                    self.share.landed(rail, self.now);
                    self.landed.push(piece);
                }
                if self.seen[rail].is_empty() {
                    self.due[rail] = 0.0;
                }
            }
        }

        fn until_done(&mut self, rates: &[f64], pieces: u64) -> Duration {
            let begin = self.now;
            while (0..pieces).any(|piece| !self.landed.contains(&piece)) {
                self.step(rates);
                assert!(self.now.since(begin) < Duration::from_secs(100), "it never ends: {:?}", self.share);
            }
            self.now.since(begin)
        }
    }

    #[test]
    fn two_equal_rails_are_twice_one() {
        let one = Run::new(1, 128).until_done(&[50e6], 128);
        let both = Run::new(2, 128).until_done(&[50e6, 50e6], 128);
        let times = one.as_secs_f64() / both.as_secs_f64();
        assert!(times > 1.95, "{times}");
    }

    #[test]
    fn a_rail_of_a_quarter_still_adds_nearly_all_of_it() {
        let one = Run::new(1, 64).until_done(&[50e6], 64);
        let both = Run::new(2, 64).until_done(&[50e6, 12.5e6], 64);
        let times = one.as_secs_f64() / both.as_secs_f64();
        assert!(times > 1.2, "{times}");
    }

    #[test]
    fn a_rail_that_slows_to_a_tenth_has_a_tenth_within_a_second() {
        let mut run = Run::new(2, 100_000);
        (0..2_000).for_each(|_| run.step(&[100e6, 100e6]));
        (0..1_000).for_each(|_| run.step(&[100e6, 10e6]));
        let before = run.moved.clone();
        (0..1_000).for_each(|_| run.step(&[100e6, 10e6]));
        let share = |rail: usize| (run.moved[rail] - before[rail]) as f64;
        assert!((share(0) - 100e6).abs() < 5e6 && (share(1) - 10e6).abs() < 1e6, "{} {}", share(0), share(1));
        // And it has no more in flight than it moves in a short time.
        assert!(run.share.rails[1].left <= 3 * PIECE, "{}", run.share.rails[1].left);
    }

    #[test]
    fn pieces_of_a_lost_rail_come_first_and_are_not_tried_for_ever() {
        let mut share = Share::new(2, PIECE);
        let now = Micros(0);
        (0..20).for_each(|piece| share.offer(piece, PIECE));
        share.up(0, now);
        share.up(1, now);
        let pull = |share: &mut Share<u64>, rail| share.pull(rail, now, |_| Some(())).map(|g| g.piece);
        let mine: Vec<u64> = std::iter::from_fn(|| pull(&mut share, 0)).collect();
        assert_eq!(mine, [0, 1, 2, 3]);
        assert_eq!(pull(&mut share, 1), Some(4));
        assert!(share.lost(0).is_empty());
        assert_eq!(pull(&mut share, 0), None, "it is down");
        assert_eq!(pull(&mut share, 1), Some(0));
        for _ in 0..TRIES {
            share.up(0, now);
            while pull(&mut share, 0).is_some() {}
            let given_up = share.lost(0);
            if !given_up.is_empty() {
                assert_eq!(given_up, [1, 2, 3]);
                return;
            }
        }
        panic!("tried for ever");
    }

    #[test]
    fn a_rail_that_stands_still_gives_its_pieces_to_the_one_that_is_free() {
        let mut run = Run::new(2, 64);
        (0..200).for_each(|_| run.step(&[50e6, 50e6]));
        let took = run.until_done(&[50e6, 0.0], 64);
        assert!(took < Duration::from_millis(1_700), "{took:?}");
    }

    /// Each piece takes longer to begin than either rail believes, as when a row is read from a slow drive first.
    #[test]
    fn two_rails_do_not_take_a_piece_from_each_other_for_ever() {
        let mut run = Run::new(2, 64);
        run.until_done(&[50e6, 50e6], 64);
        let Run { mut share, mut now, .. } = run;
        (0..2).for_each(|rail| {
            while share.rails[rail].flying.front().is_some() {
                share.landed(rail, now);
            }
        });
        share.offer(64, PIECE);
        assert!(share.pull(0, now, |_| Some(())).is_some());
        let mut taken = 0;
        for _ in 0..1_000 {
            now = now.plus(MS * 10);
            for rail in 0..2 {
                // What was taken over is answered at once.
                while share.rails[rail].flying.front().is_some_and(|f| f.piece.is_none()) {
                    share.landed(rail, now);
                }
                taken += usize::from(share.pull(rail, now, |_| Some(())).is_some());
            }
        }
        assert!((1..=12).contains(&taken), "taken over {taken} times in ten seconds");
    }

    #[test]
    fn pieces_that_nobody_wants_are_passed_over() {
        let mut share = Share::new(1, PIECE);
        share.up(0, Micros(0));
        (0..4_u64).for_each(|piece| share.offer(piece, PIECE));
        let odd = |piece: &u64| (piece % 2 == 1).then_some(*piece);
        assert_eq!(share.pull(0, Micros(0), odd).map(|g| g.begun), Some(1));
        assert_eq!(share.pull(0, Micros(0), odd).map(|g| g.begun), Some(3));
        assert_eq!((share.pull(0, Micros(0), odd), share.waiting()), (None, 0));
    }
}
