//! Whose request it is that an engine computes: from the engine's own id of it to the name of the API key it came with.
//! Pure.
//!
//! The engine says its id when it stores what it computed, which may be after the answer has ended; the last requests
//! are remembered for that. A client can choose its request's id, and so one that fits somebody else's too: then it is
//! not clear whose it is, and whoever asks must not guess.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// Requests that are remembered after their end. Rows are stored within seconds; this is minutes of a busy box.
const ENDED_MAX: usize = 4096;

/// What follows a request's id in the engine's: at most so many words of so many characters (the number of a prompt, a
/// random end).
const WORDS: usize = 2;
const WORD_MAX: usize = 10;

#[derive(Debug)]
struct Entry {
    /// None: several had this id.
    owner: Option<Arc<str>>,
    /// Requests in flight under it, and mentions among those that have ended.
    in_flight: u32,
    ended: u32,
}

/// Owners by the beginning of the engine's id.
#[derive(Debug, Default)]
pub struct Owners {
    known: HashMap<String, Entry>,
    ended: VecDeque<String>,
}

impl Owners {
    /// A request of this owner begins, and the engine's id of it will begin so.
    pub fn enter(&mut self, engine_id: &str, owner: &Arc<str>) {
        if let Some(entry) = self.known.get_mut(engine_id) {
            entry.in_flight += 1;
            if entry.owner.as_ref() != Some(owner) {
                entry.owner = None;
            }
            return;
        }
        let entry = Entry { owner: Some(owner.clone()), in_flight: 1, ended: 0 };
        self.known.insert(engine_id.to_owned(), entry);
    }

    /// No request is in flight under any id.
    pub fn is_idle(&self) -> bool {
        self.known.values().all(|entry| entry.in_flight == 0)
    }

    /// A request that had entered has ended.
    pub fn leave(&mut self, engine_id: &str) {
        let Some(entry) = self.known.get_mut(engine_id) else { return };
        entry.in_flight = entry.in_flight.saturating_sub(1);
        entry.ended += 1;
        self.ended.push_back(engine_id.to_owned());
        if self.ended.len() > ENDED_MAX
            && let Some(oldest) = self.ended.pop_front()
            && let Some(entry) = self.known.get_mut(&oldest)
        {
            entry.ended -= 1;
            if entry.ended == 0 && entry.in_flight == 0 {
                self.known.remove(&oldest);
            }
        }
    }

    /// The owner of what the engine calls `internal`; an empty name when it came without a key. None: several have this
    /// id, or nobody knows of it any more, or it did not come through here.
    pub fn of(&self, internal: &str) -> Option<Arc<str>> {
        let mut found: Option<&Option<Arc<str>>> = None;
        // One of several answers to a request: `N_ID`.
        let sample = internal.split_once('_').filter(|(n, _)| n.bytes().all(|b| b.is_ascii_digit()));
        for id in [Some(internal), sample.map(|(_, id)| id)].into_iter().flatten() {
            for stem in stems(id) {
                let Some(entry) = self.known.get(stem) else { continue };
                if found.is_some_and(|owner| *owner != entry.owner) {
                    return None;
                }
                found = Some(&entry.owner);
            }
        }
        found.and_then(Clone::clone)
    }
}

/// The id, and what is left of it without its last words.
fn stems(id: &str) -> impl Iterator<Item = &str> {
    fn shorter<'a>(id: &&'a str) -> Option<&'a str> {
        let (stem, word) = id.rsplit_once(['-', '_'])?;
        (!word.is_empty() && word.len() <= WORD_MAX).then_some(stem)
    }
    std::iter::successors(Some(id), shorter).take(1 + WORDS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owners(known: &[(&str, &str)]) -> Owners {
        let mut owners = Owners::default();
        known.iter().for_each(|(id, owner)| owners.enter(id, &(*owner).into()));
        owners
    }

    #[test]
    fn the_engines_id_leads_to_the_owner_while_it_runs_and_after() {
        let mut owners =
            owners(&[("chatcmpl-a", "ann"), ("cmpl-b", "bob"), ("resp_c", "cid"), ("cmpl-n", "")]);
        for left in [false, true] {
            for (internal, owner) in [
                ("chatcmpl-a-0a1b2c3d", "ann"),
                ("cmpl-n-0-0a1b2c3d", ""),
                ("chatcmpl-a", "ann"),
                ("1_chatcmpl-a-0a1b2c3d", "ann"),
                ("cmpl-b-7-0a1b2c3d", "bob"),
                ("resp_c_0a1b2c3d", "cid"),
                ("resp_c", "cid"),
            ] {
                assert_eq!(owners.of(internal).as_deref(), Some(owner), "{internal}, left: {left}");
            }
            // Not through here.
            for internal in ["chatcmpl-z-0a1b2c3d", "chatcmpl-ab-0a1b2c3d", "chatcmpl-a-1-2-0a1b2c3d", ""] {
                assert_eq!(owners.of(internal), None, "{internal}, left: {left}");
            }
            ["chatcmpl-a", "cmpl-b", "resp_c", "cmpl-n"].iter().for_each(|id| owners.leave(id));
        }
    }

    #[test]
    fn an_id_that_fits_two_owners_is_nobodys() {
        let mut owners = owners(&[("chatcmpl-a", "ann"), ("chatcmpl-a", "bob")]);
        assert_eq!(owners.of("chatcmpl-a-0a1b2c3d"), None);
        owners.leave("chatcmpl-a");
        assert_eq!(owners.of("chatcmpl-a-0a1b2c3d"), None, "which of them has ended is not clear either");
        // Also when one id only begins with the other.
        let owners = self::owners(&[("cmpl-b", "ann"), ("cmpl-b-0", "eve")]);
        assert_eq!(owners.of("cmpl-b-0-0a1b2c3d"), None);
        assert_eq!(owners.of("cmpl-b-1-0a1b2c3d").as_deref(), Some("ann"));
        let owners = self::owners(&[("cmpl-b", "ann"), ("cmpl-b-0", "ann")]);
        assert_eq!(owners.of("cmpl-b-0-0a1b2c3d").as_deref(), Some("ann"));
    }

    #[test]
    fn the_last_requests_are_remembered_and_no_more() {
        let mut owners = owners(&[("long", "ann")]);
        for n in 0..3 * ENDED_MAX {
            let id = format!("chatcmpl-{n}");
            owners.enter(&id, &"bob".into());
            owners.leave(&id);
        }
        assert_eq!(owners.known.len(), ENDED_MAX + 1);
        assert_eq!(owners.of("long").as_deref(), Some("ann"));
        assert_eq!(owners.of("chatcmpl-5"), None, "guessing would put it under somebody's key");
        let last = format!("chatcmpl-{}-0a1b2c3d", 3 * ENDED_MAX - 1);
        assert_eq!(owners.of(&last).as_deref(), Some("bob"));
        // One id again and again takes no more room either.
        for _ in 0..2 * ENDED_MAX {
            owners.enter("same", &"ann".into());
            owners.leave("same");
        }
        assert_eq!(owners.known.len(), 2);
    }
}
