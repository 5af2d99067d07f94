//! Requests that wait for room at an engine: which of them goes next, and who is turned away. Pure.
//!
//! An engine that has all the sequences it can run gains nothing from another one; it only makes everybody's next token
//! later, and in its own queue nobody can be passed by. So what is beyond the [`knee`] waits here.
//!
//! - Three classes share the room by weight, in seconds of work: a busy class gets 16, 4 or 1 parts of it, so none ever
//!   stands still. What one does not use goes to the others.
//! - Within a class short work comes first, and every second of waiting makes a second of work up: nobody who comes later
//!   by more seconds than his work is shorter passes.
//! - The line is bounded, and the lower classes get in while it is half (batch) or three quarters (normal) full: a flood
//!   of work that can wait does not turn away what somebody sits in front of.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;

use super::price::speed::Speeds;
use crate::base::clock::Micros;

/// How urgent a request is. The first is the most urgent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Somebody sits in front of it.
    Interactive,
    #[default]
    Normal,
    /// It can wait.
    Batch,
}

impl Class {
    pub const ALL: [Self; 3] = [Self::Interactive, Self::Normal, Self::Batch];

    pub fn name(self) -> &'static str {
        match self {
            Self::Interactive => "interactive",
            Self::Normal => "normal",
            Self::Batch => "batch",
        }
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|class| class.name() == name)
    }

    /// Parts of the room, while all classes want some.
    fn weight(self) -> f64 {
        match self {
            Self::Interactive => 16.0,
            Self::Normal => 4.0,
            Self::Batch => 1.0,
        }
    }

    /// So long may the line be for one of this class to join it, of a line of `most`.
    fn joins_below(self, most: usize) -> usize {
        match self {
            Self::Interactive => most,
            Self::Normal => (most * 3).div_ceil(4),
            Self::Batch => most.div_ceil(2),
        }
    }
}

/// Where a request can go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Target {
    /// None: any that is served.
    pub model: Option<String>,
    /// None: any node.
    pub node: Option<String>,
}

/// What there is for a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// So many more.
    Places(u32),
    /// There is no bound, or nobody who serves it: waiting would change nothing.
    Open,
}

/// The line is too long for this class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// What an engine does with so many requests beside each other is s / (1 - s) times as much as is still to gain: nine
/// tenths of what it can do at most.
const NINE_TENTHS: f64 = 9.0;

/// Requests that an engine with so many places should have at once: where it does nine tenths of what it ever could, as
/// its speeds say. A step with n requests takes s0·(1 + kappa·(n − 1)), so at n it makes n / that, at most
/// 1 / (s0·kappa). At least half of its places, because `kappa` is learned from few requests first.
pub fn knee(speeds: Option<Speeds>, places: u32) -> u32 {
    let Some(kappa) = speeds.map(|speeds| speeds.kappa).filter(|kappa| *kappa > 0.0) else { return places };
    let knee = (NINE_TENTHS * (1.0 - kappa) / kappa).ceil();
    let least = places.div_ceil(2).max(1);
    // A float becomes the nearest whole number that there is.
    (knee as u32).clamp(least.min(places), places)
}

#[derive(Debug)]
struct Waiter {
    target: Target,
    cost_s: f64,
}

/// One class.
#[derive(Debug, Default)]
struct Lane {
    /// By when it came and its work together, in microseconds, and its number.
    line: BTreeMap<(u64, u64), Waiter>,
    /// Seconds of work that it was given, by its weight.
    given: f64,
}

/// Requests that were looked at in one class for one that has room: those bound to a full node stand aside.
const LOOK_MAX: usize = 64;

/// Work counts as this much at least, in seconds: every request takes its turn.
const COST_LEAST_S: f64 = 0.05;

#[derive(Debug)]
pub struct Queue {
    most: usize,
    next: u64,
    lanes: [Lane; 3],
    /// Which lane and place a waiting one has.
    places: HashMap<u64, (Class, (u64, u64))>,
    /// Those that may go and have not taken their seat, and the node they are bound to.
    passed: HashMap<u64, Option<String>>,
    /// Work that was given by weight, of the lane that was served last.
    now: f64,
}

impl Queue {
    /// Of at most `most` requests.
    pub fn new(most: usize) -> Self {
        Self {
            most,
            next: 0,
            lanes: Default::default(),
            places: HashMap::new(),
            passed: HashMap::new(),
            now: 0.0,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Nobody waits, and nobody is on his way.
    pub fn is_idle(&self) -> bool {
        self.is_empty() && self.passed.is_empty()
    }

    pub fn waiting(&self, class: Class) -> usize {
        self.lanes[class as usize].line.len()
    }

    /// Seconds of work that wait.
    pub fn work_s(&self) -> f64 {
        self.lanes.iter().flat_map(|lane| lane.line.values()).map(|waiter| waiter.cost_s).sum()
    }

    /// One that goes at once, where there is room and nobody waits.
    pub fn pass(&mut self, target: &Target, room: Room) -> Option<u64> {
        (self.is_empty() && self.has_room(target, room)).then(|| {
            self.next += 1;
            self.passed.insert(self.next, target.node.clone());
            self.next
        })
    }

    /// One joins the line. `cost_s`: seconds that an engine works for it alone.
    pub fn join(&mut self, class: Class, target: Target, cost_s: f64, now: Micros) -> Result<u64, Full> {
        if self.places.len() >= class.joins_below(self.most) {
            return Err(Full);
        }
        self.next += 1;
        // A price that is no number, or beyond an hour, is as good as an hour.
        let cost_s = if cost_s.is_finite() { cost_s.clamp(COST_LEAST_S, 3600.0) } else { 3600.0 };
        let place = (now.0.saturating_add((cost_s * 1e6) as u64), self.next);
        let lane = &mut self.lanes[class as usize];
        if lane.line.is_empty() {
            // Time in which it wanted nothing is not made up.
            lane.given = lane.given.max(self.now);
        }
        lane.line.insert(place, Waiter { target, cost_s });
        self.places.insert(self.next, (class, place));
        Ok(self.next)
    }

    /// The next that may go, if there is room for one. It counts as on its way until it leaves.
    pub fn next(&mut self, room: impl Fn(&Target) -> Room) -> Option<u64> {
        let mut order: Vec<Class> =
            Class::ALL.into_iter().filter(|class| !self.lanes[*class as usize].line.is_empty()).collect();
        order.sort_by(|a, b| self.lanes[*a as usize].given.total_cmp(&self.lanes[*b as usize].given));
        for class in order {
            let line = &self.lanes[class as usize].line;
            let mut full: Vec<&Target> = Vec::new();
            let found = line.iter().take(LOOK_MAX).find(|(_, waiter)| {
                if full.contains(&&waiter.target) {
                    return false;
                }
                let fits = self.has_room(&waiter.target, room(&waiter.target));
                if !fits {
                    full.push(&waiter.target);
                }
                fits
            });
            let Some(place) = found.map(|(place, _)| *place) else { continue };
            let lane = &mut self.lanes[class as usize];
            let Some(waiter) = lane.line.remove(&place) else { continue };
            self.now = lane.given;
            lane.given += waiter.cost_s / class.weight();
            self.places.remove(&place.1);
            self.passed.insert(place.1, waiter.target.node);
            return Some(place.1);
        }
        None
    }

    /// One has taken its seat, or has gone away, waiting or on its way.
    pub fn leave(&mut self, id: u64) {
        self.passed.remove(&id);
        if let Some((class, place)) = self.places.remove(&id) {
            self.lanes[class as usize].line.remove(&place);
        }
    }

    /// Whether there is room beside those that are on their way.
    fn has_room(&self, target: &Target, room: Room) -> bool {
        let Room::Places(free) = room else { return true };
        let ahead = match &target.node {
            None => self.passed.len(),
            Some(node) => self.passed.values().filter(|bound| bound.as_ref() == Some(node)).count(),
        };
        (free as usize) > ahead
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANY: Target = Target { model: None, node: None };

    fn at(node: &str) -> Target {
        Target { node: Some(node.into()), ..ANY }
    }

    fn second(n: u64) -> Micros {
        Micros(n * 1_000_000)
    }

    fn one(_: &Target) -> Room {
        Room::Places(1)
    }

    #[test]
    fn where_there_is_room_nobody_waits_and_who_is_on_the_way_counts() {
        let mut queue = Queue::new(4);
        let first = queue.pass(&ANY, Room::Places(1)).unwrap();
        assert_eq!(queue.pass(&ANY, Room::Places(1)), None);
        assert!(queue.pass(&ANY, Room::Open).is_some(), "no bound");
        queue.leave(first);
        assert_eq!(queue.passed.len(), 1);
    }

    #[test]
    fn nobody_passes_who_waits() {
        let mut queue = Queue::new(4);
        let waits = queue.join(Class::Batch, ANY, 1.0, second(0)).unwrap();
        assert_eq!(queue.pass(&ANY, Room::Places(9)), None);
        assert_eq!(queue.next(one), Some(waits));
        assert_eq!(queue.next(one), None, "the room is taken until it sits");
        queue.leave(waits);
        assert!(queue.is_idle());
    }

    #[test]
    fn classes_share_by_weight_and_none_stands_still() {
        let mut queue = Queue::new(400);
        for _ in 0..100 {
            for class in Class::ALL {
                let _ = queue.join(class, ANY, 1.0, second(0));
            }
        }
        let mut served = HashMap::new();
        for _ in 0..63 {
            let class_of: HashMap<u64, Class> =
                queue.places.iter().map(|(id, (class, _))| (*id, *class)).collect();
            let id = queue.next(one).unwrap();
            *served.entry(class_of[&id]).or_insert(0) += 1;
            queue.leave(id);
        }
        assert_eq!(Class::ALL.map(|class| served[&class]), [48, 12, 3]);
    }

    #[test]
    fn a_class_that_was_away_does_not_make_it_up() {
        let mut queue = Queue::new(99);
        for _ in 0..40 {
            queue.join(Class::Normal, ANY, 1.0, second(0)).unwrap();
        }
        for _ in 0..20 {
            let id = queue.next(one).unwrap();
            queue.leave(id);
        }
        let batch: Vec<u64> =
            (0..5).map(|_| queue.join(Class::Batch, ANY, 1.0, second(1)).unwrap()).collect();
        let next: Vec<u64> = (0..6)
            .map(|_| {
                let id = queue.next(one).unwrap();
                queue.leave(id);
                id
            })
            .collect();
        assert_eq!(next.iter().filter(|id| batch.contains(id)).count(), 2, "{next:?}");
    }

    #[test]
    fn short_work_goes_first_until_long_work_has_waited_for_it() {
        let mut queue = Queue::new(9);
        let long = queue.join(Class::Normal, ANY, 30.0, second(0)).unwrap();
        let short = queue.join(Class::Normal, ANY, 1.0, second(10)).unwrap();
        let late = queue.join(Class::Normal, ANY, 1.0, second(40)).unwrap();
        let mut order = Vec::new();
        while let Some(id) = queue.next(one) {
            queue.leave(id);
            order.push(id);
        }
        assert_eq!(order, [short, long, late]);
    }

    #[test]
    fn who_waits_for_a_full_node_holds_up_nobody_else() {
        let mut queue = Queue::new(9);
        let bound = queue.join(Class::Interactive, at("a"), 1.0, second(0)).unwrap();
        let free = queue.join(Class::Interactive, at("b"), 1.0, second(1)).unwrap();
        let room = |target: &Target| Room::Places(u32::from(target.node.as_deref() == Some("b")));
        assert_eq!(queue.next(room), Some(free));
        assert_eq!(queue.next(room), None);
        assert_eq!(queue.next(|_| Room::Places(2)), Some(bound));
    }

    #[test]
    fn a_line_is_full_for_batch_first() {
        let mut queue = Queue::new(8);
        let mut joined =
            |class: Class| (0..9).take_while(|_| queue.join(class, ANY, 1.0, second(0)).is_ok()).count();
        assert_eq!([joined(Class::Batch), joined(Class::Normal), joined(Class::Interactive)], [4, 2, 2]);
        assert_eq!(Queue::new(0).join(Class::Interactive, ANY, 1.0, second(0)), Err(Full));
        assert!(Queue::new(1).join(Class::Batch, ANY, f64::NAN, second(0)).is_ok());
    }

    #[test]
    fn who_goes_away_leaves_nothing() {
        let mut queue = Queue::new(9);
        let ids: Vec<u64> = Class::ALL.map(|class| queue.join(class, ANY, 2.0, second(0)).unwrap()).into();
        assert!((queue.work_s() - 6.0).abs() < 1e-9);
        let passed = queue.next(one).unwrap();
        for id in ids {
            queue.leave(id);
        }
        queue.leave(passed);
        assert!(queue.is_idle() && queue.work_s() == 0.0);
    }

    #[test]
    fn the_knee_is_where_more_beside_each_other_gain_little() {
        let of = |kappa| knee(Some(Speeds { kappa, ..Speeds::default() }), 32);
        assert_eq!((knee(None, 32), of(0.08), of(0.25), of(0.9), of(3.0)), (32, 32, 27, 16, 16));
        assert_eq!((of(0.0), knee(Some(Speeds { kappa: 9.0, ..Speeds::default() }), 1)), (32, 1));
    }

    proptest::proptest! {
        /// Whatever joins, goes, sits and leaves: nothing stays, and nobody goes without room.
        #[test]
        fn nothing_is_lost(steps in proptest::collection::vec((0_u8..4, 0_usize..3, 0.0..50.0_f64), 1..200)) {
            let mut queue = Queue::new(16);
            let (mut waiting, mut going) = (Vec::new(), Vec::new());
            for (n, (step, which, cost)) in steps.into_iter().enumerate() {
                let now = second(n as u64);
                match step {
                    0 => waiting.extend(queue.join(Class::ALL[which], ANY, cost, now)),
                    1 => if let Some(id) = queue.next(|_| Room::Places(3)) {
                        waiting.retain(|other| *other != id);
                        going.push(id);
                    },
                    2 if !waiting.is_empty() => queue.leave(waiting.remove(which % waiting.len())),
                    3 if !going.is_empty() => queue.leave(going.remove(which % going.len())),
                    _ => {}
                }
                proptest::prop_assert!(going.len() <= 3);
                let line: usize = Class::ALL.map(|class| queue.waiting(class)).iter().sum();
                proptest::prop_assert_eq!((line, queue.passed.len()), (waiting.len(), going.len()));
            }
            waiting.into_iter().chain(going).for_each(|id| queue.leave(id));
            proptest::prop_assert!(queue.is_idle());
        }
    }
}
