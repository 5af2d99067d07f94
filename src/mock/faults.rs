//! Failures on command: given with the shape at the start, or while it runs by `POST /mock/faults`.
//!
//! Each is one that a real engine has been seen to have, and that a router must tell from the others: a process that
//! dies, one that hangs while `/health` says 200, one that is slow because its clock fell, one that answers with an
//! error for a while, and one whose stream breaks off in the middle.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

/// What is to fail from now on. What is not named stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Order {
    /// The process aborts at once.
    pub crash: bool,
    /// Steps stop, or go on; `/health` goes on saying 200.
    pub hang: Option<bool>,
    /// Speed from now on: 0.55 is a box whose clock fell to 55 %. 1 heals it.
    pub speed: Option<f64>,
    /// The next requests are answered with an error.
    pub answers: Option<Answers>,
    /// The next streams break off.
    pub cut: Option<Cut>,
    /// The process aborts after so many more words, whoever they are for.
    pub crash_after_words: Option<u64>,
}

/// Requests that get an error instead of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Answers {
    pub status: u16,
    pub times: u64,
    /// Seconds of a `Retry-After` header; none without.
    pub retry_after_s: Option<u64>,
}

/// Answers whose connection ends in the middle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cut {
    pub after_words: u64,
    pub times: u64,
}

/// Why an order is none.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum Error {
    #[error("speed is {0}: it must be above 0 and at most 100")]
    Speed(f64),
    #[error("answers.status is {0}: it must be 400 to 599")]
    Status(u16),
}

/// How the engine's steps go.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Going {
    pub hang: bool,
    pub speed: f64,
}

/// What is in force.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct State {
    #[serde(flatten)]
    pub going: Going,
    pub answers: Option<Answers>,
    pub cut: Option<Cut>,
    pub crash_after_words: Option<u64>,
}

#[derive(Debug, Default)]
struct Next {
    answers: Option<Answers>,
    cut: Option<Cut>,
}

/// The engine's faults.
#[derive(Debug)]
pub struct Faults {
    going: watch::Sender<Going>,
    next: Mutex<Next>,
    /// Words until the end, plus one; 0: no end.
    words: AtomicU64,
}

impl Order {
    pub fn check(&self) -> Result<(), Error> {
        if let Some(speed) = self.speed.filter(|speed| !(*speed > 0.0 && *speed <= 100.0)) {
            return Err(Error::Speed(speed));
        }
        match self.answers {
            Some(Answers { status, .. }) if !(400..600).contains(&status) => Err(Error::Status(status)),
            _ => Ok(()),
        }
    }
}

impl Default for Faults {
    fn default() -> Self {
        let going = watch::Sender::new(Going { hang: false, speed: 1.0 });
        Self { going, next: Mutex::default(), words: AtomicU64::new(0) }
    }
}

impl Faults {
    /// Puts an order into force. Does not return when it is to crash.
    pub fn obey(&self, order: &Order) -> Result<(), Error> {
        order.check()?;
        if order.crash {
            crash();
        }
        self.going.send_modify(|going| {
            going.hang = order.hang.unwrap_or(going.hang);
            going.speed = order.speed.unwrap_or(going.speed);
        });
        let mut next = self.next.lock();
        next.answers = order.answers.or(next.answers);
        next.cut = order.cut.or(next.cut);
        if let Some(words) = order.crash_after_words {
            self.words.store(words + 1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Everything goes well again.
    pub fn heal(&self) {
        *self.next.lock() = Next::default();
        self.words.store(0, Ordering::Relaxed);
        self.going.send_replace(Going { hang: false, speed: 1.0 });
    }

    pub fn state(&self) -> State {
        let next = self.next.lock();
        let words = self.words.load(Ordering::Relaxed);
        State {
            going: *self.going.borrow(),
            answers: next.answers.filter(|answers| answers.times > 0),
            cut: next.cut.filter(|cut| cut.times > 0),
            crash_after_words: words.checked_sub(1),
        }
    }

    /// Waits while the engine hangs. Its speed.
    pub async fn speed(&self) -> f64 {
        let mut going = self.going.subscribe();
        // The sender is a field of this: it is not gone.
        let speed = going.wait_for(|going| !going.hang).await.map(|going| going.speed);
        speed.unwrap_or(1.0)
    }

    /// The error that this request gets.
    pub fn answer(&self) -> Option<Answers> {
        let mut next = self.next.lock();
        let answers = next.answers.as_mut().filter(|answers| answers.times > 0)?;
        answers.times -= 1;
        Some(*answers)
    }

    /// After how many words this answer breaks off.
    pub fn cut(&self) -> Option<u64> {
        let mut next = self.next.lock();
        let cut = next.cut.as_mut().filter(|cut| cut.times > 0)?;
        cut.times -= 1;
        Some(cut.after_words)
    }

    /// A word was said.
    pub fn said(&self) {
        let less = |words: u64| (words > 0).then(|| words - 1);
        if self.words.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less) == Ok(2) {
            crash();
        }
    }
}

fn crash() -> ! {
    tracing::warn!("told to crash here");
    std::process::abort()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn orders_add_up_and_healing_ends_them() {
        let faults = Faults::default();
        let order = |json: &str| serde_json::from_str::<Order>(json).unwrap();
        faults
            .obey(&order(r#"{"speed": 0.55, "answers": {"status": 429, "times": 2, "retry_after_s": 7}}"#))
            .unwrap();
        faults.obey(&order(r#"{"cut": {"after_words": 3, "times": 1}}"#)).unwrap();
        assert_eq!(faults.speed().await, 0.55);
        assert_eq!(faults.answer().and_then(|a| a.retry_after_s), Some(7));
        assert_eq!((faults.answer().is_some(), faults.answer()), (true, None));
        assert_eq!((faults.cut(), faults.cut()), (Some(3), None));
        faults.obey(&order(r#"{"hang": true}"#)).unwrap();
        assert_eq!(faults.state().going, Going { hang: true, speed: 0.55 });
        let (speed, ()) = tokio::join!(faults.speed(), async {
            tokio::task::yield_now().await;
            faults.heal();
        });
        assert_eq!(speed, 1.0);
    }

    #[test]
    fn what_is_no_order_is_refused() {
        assert!(serde_json::from_str::<Order>(r#"{"crush": true}"#).is_err());
        let faults = Faults::default();
        let refused = |order: Order| faults.obey(&order).unwrap_err();
        assert_eq!(refused(Order { speed: Some(0.0), ..Order::default() }), Error::Speed(0.0));
        assert!(matches!(refused(Order { speed: Some(f64::NAN), ..Order::default() }), Error::Speed(_)));
        let answers = Some(Answers { status: 200, times: 1, retry_after_s: None });
        assert_eq!(refused(Order { answers, ..Order::default() }), Error::Status(200));
        assert_eq!(faults.state().answers, None);
    }
}
