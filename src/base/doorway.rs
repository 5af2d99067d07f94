//! How many who have not said who they are may stand in a doorway at one time: all together, and from one address.
//!
//! Without the second bound a single silent stranger takes every place, and the peer finds the door shut.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;

/// A doorway. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Doorway {
    places: usize,
    of_one: usize,
    /// Guards: who stands in it. Never held across an await.
    guests: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

/// One place, until it is dropped.
#[derive(Debug)]
pub struct Guest {
    from: IpAddr,
    guests: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

impl Doorway {
    /// `places` in all, at most `of_one` of them from one address.
    pub fn new(places: usize, of_one: usize) -> Self {
        Self { places, of_one, guests: Arc::default() }
    }

    /// A place, or `None` when there is none for this address.
    pub fn admit(&self, from: IpAddr) -> Option<Guest> {
        let mut guests = self.guests.lock();
        let taken: usize = guests.values().sum();
        let own = guests.get(&from).copied().unwrap_or(0);
        if taken >= self.places || own >= self.of_one {
            return None;
        }
        guests.insert(from, own + 1);
        Some(Guest { from, guests: self.guests.clone() })
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let mut guests = self.guests.lock();
        if let Some(own) = guests.get_mut(&self.from) {
            *own -= 1;
            if *own == 0 {
                guests.remove(&self.from);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_cannot_take_the_places_of_others() {
        let doorway = Doorway::new(4, 2);
        let [a, b, c] = [1, 2, 3].map(|n| IpAddr::from([10, 0, 0, n]));
        let held = [doorway.admit(a), doorway.admit(a), doorway.admit(b)];
        assert!(held.iter().all(Option::is_some));
        assert!(doorway.admit(a).is_none(), "its own places are taken");
        let last = doorway.admit(b);
        assert!(last.is_some() && doorway.admit(c).is_none(), "all places are taken");
        drop((held, last));
        assert!(doorway.admit(c).is_some() && doorway.guests.lock().is_empty());
    }
}
