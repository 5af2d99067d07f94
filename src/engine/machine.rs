//! The engine's life as a machine: when to start it, when to end it, when to give up. No clock, no process.
//!
//! ```text
//! Stopped ─start→ Starting ─answers→ Ready
//!    ↑               │ too slow         │ silent for long
//!    │ pause over    ↓                  ↓
//!    └──────────── Stopping ←───────────┘      ended by itself: a crash; pause 1 s, doubling to 60 s
//! six crashes within ten minutes: Failed
//! ```

use std::collections::VecDeque;
use std::time::Duration;

use crate::base::clock::Micros;

use super::view::Phase;

/// First and longest pause after a crash. A start of vLLM costs about a minute of a whole box: a minute is as much
/// as a pause can save.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// An engine that was ready for this long starts its next pause from the beginning.
const HEALTHY: Duration = Duration::from_secs(600);

/// So many crashes within so long are not bad luck.
const CRASHES: usize = 6;
const CRASH_WINDOW: Duration = Duration::from_secs(600);

/// An engine whose `/health` has been silent for so long is ended. A loaded CPU answers within seconds.
const SILENCE: Duration = Duration::from_secs(120);

/// How long KILL may take beyond the grace until the machine asks again.
const KILL_AGAIN: Duration = Duration::from_secs(10);

/// What one engine is allowed.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// From spawn to ready.
    pub ready: Duration,
    /// From TERM to KILL.
    pub grace: Duration,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// An engine is wanted.
    Start,
    /// No engine is wanted any more.
    Stop,
    /// Not even the grace is wanted.
    Kill,
    /// It answers and serves the model.
    Answered,
    /// It did not answer; why.
    Silent(String),
    /// All its processes are gone; how. Also when it could not be started at all.
    Ended(String),
    /// Time passed.
    Tick,
}

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    Spawn,
    Term,
    Kill,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing wanted.
    Idle,
    /// Crashed; started again at this time.
    Waiting(Micros),
    Starting(Micros),
    Ready {
        since: Micros,
        silent_since: Option<Micros>,
    },
    Stopping {
        kill_at: Micros,
        /// Whether an engine is wanted afterwards.
        again: bool,
    },
    Failed,
}

#[derive(Clone, Debug)]
pub struct Machine {
    limits: Limits,
    state: State,
    crashes: VecDeque<Micros>,
    /// Crashes since it was last healthy: the pause follows from it.
    in_a_row: u32,
    spawned: u32,
    reason: Option<String>,
}

impl Machine {
    pub fn new(limits: Limits) -> Self {
        Self { limits, state: State::Idle, crashes: VecDeque::new(), in_a_row: 0, spawned: 0, reason: None }
    }

    pub fn phase(&self) -> Phase {
        match self.state {
            State::Idle | State::Waiting(_) => Phase::Stopped,
            State::Starting(_) => Phase::Starting,
            State::Ready { .. } => Phase::Ready,
            State::Stopping { .. } => Phase::Stopping,
            State::Failed => Phase::Failed,
        }
    }

    pub fn reason(&self) -> Option<&str> {
        self.reason.as_deref()
    }

    /// Starts after the first.
    pub fn restarts(&self) -> u32 {
        self.spawned.saturating_sub(1)
    }

    /// Whether nothing will happen any more without a word from outside.
    pub fn rests(&self) -> bool {
        matches!(self.state, State::Idle | State::Failed)
    }

    /// When to send [`Event::Tick`] at the latest.
    pub fn wake_at(&self) -> Option<Micros> {
        match self.state {
            State::Idle | State::Failed => None,
            State::Waiting(until) => Some(until),
            State::Starting(since) => Some(since.plus(self.limits.ready)),
            State::Ready { silent_since, .. } => silent_since.map(|at| at.plus(SILENCE)),
            State::Stopping { kill_at, .. } => Some(kill_at),
        }
    }

    pub fn on(&mut self, event: Event, now: Micros) -> Option<Act> {
        match event {
            Event::Start => self.start(now),
            Event::Stop => self.stop(now),
            Event::Kill => self.kill(now),
            Event::Answered => self.answered(now),
            Event::Silent(why) => self.silent(why, now),
            Event::Ended(how) => self.ended(how, now),
            Event::Tick => self.tick(now),
        }
    }

    fn start(&mut self, now: Micros) -> Option<Act> {
        match self.state {
            State::Idle => self.spawn(now),
            State::Stopping { kill_at, .. } => {
                self.state = State::Stopping { kill_at, again: true };
                None
            }
            State::Waiting(_) | State::Starting(_) | State::Ready { .. } | State::Failed => None,
        }
    }

    fn spawn(&mut self, now: Micros) -> Option<Act> {
        self.spawned += 1;
        self.reason = None;
        self.state = State::Starting(now);
        Some(Act::Spawn)
    }

    fn stop(&mut self, now: Micros) -> Option<Act> {
        match self.state {
            State::Idle | State::Waiting(_) | State::Failed => {
                self.state = State::Idle;
                None
            }
            State::Starting(_) | State::Ready { .. } => {
                self.reason = None;
                self.end(now, false)
            }
            State::Stopping { kill_at, .. } => {
                self.state = State::Stopping { kill_at, again: false };
                None
            }
        }
    }

    fn kill(&mut self, now: Micros) -> Option<Act> {
        match self.state {
            State::Idle | State::Waiting(_) | State::Failed => {
                self.state = State::Idle;
                None
            }
            State::Starting(_) | State::Ready { .. } | State::Stopping { .. } => {
                self.state = State::Stopping { kill_at: now.plus(KILL_AGAIN), again: false };
                Some(Act::Kill)
            }
        }
    }

    fn end(&mut self, now: Micros, again: bool) -> Option<Act> {
        self.state = State::Stopping { kill_at: now.plus(self.limits.grace).plus(KILL_AGAIN), again };
        Some(Act::Term)
    }

    fn answered(&mut self, now: Micros) -> Option<Act> {
        match self.state {
            State::Starting(_) => {
                self.reason = None;
                self.state = State::Ready { since: now, silent_since: None };
            }
            State::Ready { since, .. } => {
                self.reason = None;
                self.state = State::Ready { since, silent_since: None };
            }
            State::Idle | State::Waiting(_) | State::Stopping { .. } | State::Failed => {}
        }
        None
    }

    fn silent(&mut self, why: String, now: Micros) -> Option<Act> {
        match self.state {
            State::Starting(_) => self.reason = Some(why),
            State::Ready { since, silent_since } => {
                self.state = State::Ready { since, silent_since: Some(silent_since.unwrap_or(now)) };
                self.reason = Some(format!("does not answer: {why}"));
            }
            State::Idle | State::Waiting(_) | State::Stopping { .. } | State::Failed => return None,
        }
        self.tick(now)
    }

    fn tick(&mut self, now: Micros) -> Option<Act> {
        match self.state {
            State::Waiting(until) if now >= until => self.spawn(now),
            State::Starting(since) if now >= since.plus(self.limits.ready) => {
                let last = self.reason.take().map(|r| format!("; last: {r}")).unwrap_or_default();
                self.reason = Some(format!("was not ready within {} s{last}", self.limits.ready.as_secs()));
                self.end(now, true)
            }
            State::Ready { silent_since: Some(at), .. } if now >= at.plus(SILENCE) => {
                self.reason = Some(format!("did not answer for {} s", SILENCE.as_secs()));
                self.end(now, true)
            }
            State::Stopping { kill_at, again } if now >= kill_at => {
                self.state = State::Stopping { kill_at: now.plus(KILL_AGAIN), again };
                Some(Act::Kill)
            }
            _ => None,
        }
    }

    fn ended(&mut self, how: String, now: Micros) -> Option<Act> {
        match self.state {
            State::Starting(_) => self.crashed(how, now),
            State::Ready { since, .. } => {
                if now.since(since) >= HEALTHY {
                    self.in_a_row = 0;
                }
                self.crashed(how, now);
            }
            State::Stopping { again: true, .. } => {
                let why = self.reason.take().unwrap_or(how);
                self.crashed(why, now);
            }
            State::Stopping { again: false, .. } => {
                self.state = State::Idle;
                self.reason = None;
            }
            State::Idle | State::Waiting(_) | State::Failed => {}
        }
        None
    }

    fn crashed(&mut self, how: String, now: Micros) {
        self.crashes.retain(|&at| now.since(at) < CRASH_WINDOW);
        self.crashes.push_back(now);
        if self.crashes.len() >= CRASHES {
            self.state = State::Failed;
            self.reason = Some(format!(
                "the engine {how}; that was crash {} within {} minutes",
                self.crashes.len(),
                CRASH_WINDOW.as_secs() / 60
            ));
            return;
        }
        let pause = PAUSE_MIN.saturating_mul(1 << self.in_a_row.min(6)).min(PAUSE_MAX);
        self.in_a_row += 1;
        self.state = State::Waiting(now.plus(pause));
        self.reason = Some(format!("the engine {how}; it is started again in {} s", pause.as_secs()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { ready: Duration::from_secs(300), grace: Duration::from_secs(20) };

    fn at(seconds: u64) -> Micros {
        Micros(seconds * 1_000_000)
    }

    fn started() -> Machine {
        let mut m = Machine::new(LIMITS);
        assert_eq!(m.on(Event::Start, at(0)), Some(Act::Spawn));
        m
    }

    fn crash(m: &mut Machine, now: Micros) {
        assert_eq!(m.on(Event::Ended("ended with code 1".into()), now), None);
    }

    /// The pause after a crash at `now`, and the start that ends it.
    fn pause(m: &mut Machine, now: Micros) -> u64 {
        let until = m.wake_at().expect("a crashed engine is started again");
        assert_eq!(m.on(Event::Tick, Micros(until.0 - 1)), None, "not before its time");
        assert_eq!(m.on(Event::Tick, until), Some(Act::Spawn));
        until.since(now).as_secs()
    }

    #[test]
    fn an_engine_that_answers_is_ready_and_one_that_ends_when_asked_is_stopped() {
        let mut m = started();
        assert_eq!(m.phase(), Phase::Starting);
        m.on(Event::Answered, at(40));
        assert_eq!(m.phase(), Phase::Ready);
        assert_eq!(m.on(Event::Stop, at(50)), Some(Act::Term));
        assert_eq!(m.phase(), Phase::Stopping);
        crash(&mut m, at(52));
        assert_eq!((m.phase(), m.reason(), m.rests()), (Phase::Stopped, None, true));
    }

    #[test]
    fn pauses_double_and_the_sixth_crash_within_ten_minutes_is_the_last() {
        let mut m = started();
        let mut now = 0;
        for expected in [1, 2, 4, 8, 16] {
            now += 10;
            crash(&mut m, at(now));
            assert_eq!(m.phase(), Phase::Stopped);
            assert_eq!(pause(&mut m, at(now)), expected);
            now += expected;
        }
        assert_eq!(m.restarts(), 5);
        crash(&mut m, at(now + 10));
        assert_eq!(m.phase(), Phase::Failed);
        assert!(m.reason().unwrap().contains("ended with code 1"), "{:?}", m.reason());
        assert_eq!(m.on(Event::Start, at(now + 20)), None, "only a restart of spark-kv tries again");
        assert_eq!(m.on(Event::Tick, at(now + 10_000)), None);
    }

    #[test]
    fn crashes_far_apart_are_no_loop_and_the_pause_stays_at_a_minute() {
        let mut m = started();
        let mut now = 0;
        for round in 0..20 {
            now += 150;
            crash(&mut m, at(now));
            assert_eq!(m.phase(), Phase::Stopped, "crash {round} is one of four within ten minutes");
            let pause = pause(&mut m, at(now));
            assert_eq!(pause, (1 << round.min(6)).min(60));
            now += pause;
        }
    }

    #[test]
    fn ten_healthy_minutes_forget_the_pauses() {
        let mut m = started();
        for now in [10, 20, 30] {
            crash(&mut m, at(now));
            pause(&mut m, at(now));
        }
        m.on(Event::Answered, at(100));
        crash(&mut m, at(699));
        assert_eq!(pause(&mut m, at(699)), 8, "one second short of healthy");
        m.on(Event::Answered, at(800));
        crash(&mut m, at(1400));
        assert_eq!(pause(&mut m, at(1400)), 1);
    }

    #[test]
    fn an_engine_that_is_never_ready_is_ended_and_counts_as_crashed() {
        let mut m = started();
        m.on(Event::Silent("loading weights".into()), at(299));
        assert_eq!(m.reason(), Some("loading weights"));
        assert_eq!(m.on(Event::Tick, at(300)), Some(Act::Term));
        crash(&mut m, at(310));
        assert!(m.reason().unwrap().contains("was not ready within 300 s; last: loading weights"));
        assert_eq!(pause(&mut m, at(310)), 1);
    }

    #[test]
    fn a_ready_engine_may_be_silent_for_two_minutes_and_no_longer() {
        let mut m = started();
        m.on(Event::Answered, at(10));
        assert_eq!(m.on(Event::Silent("timed out".into()), at(20)), None);
        assert_eq!(m.on(Event::Silent("timed out".into()), at(139)), None);
        m.on(Event::Answered, at(139));
        assert_eq!((m.phase(), m.reason()), (Phase::Ready, None));
        assert_eq!(m.on(Event::Silent("timed out".into()), at(200)), None);
        assert_eq!(m.on(Event::Silent("timed out".into()), at(320)), Some(Act::Term));
    }

    #[test]
    fn what_does_not_end_is_killed_again_and_again() {
        let mut m = started();
        assert_eq!(m.on(Event::Stop, at(5)), Some(Act::Term));
        assert_eq!(m.on(Event::Tick, at(34)), None);
        assert_eq!(m.on(Event::Tick, at(35)), Some(Act::Kill));
        assert_eq!(m.on(Event::Tick, at(45)), Some(Act::Kill));
        assert_eq!(m.on(Event::Kill, at(46)), Some(Act::Kill), "a second signal does not wait");
    }

    #[test]
    fn a_stop_during_the_pause_starts_nothing() {
        let mut m = started();
        crash(&mut m, at(1));
        assert_eq!(m.on(Event::Stop, at(1)), None);
        assert_eq!(m.on(Event::Tick, at(100)), None);
        assert!(m.rests());
    }
}
