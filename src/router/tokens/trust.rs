//! Whether the ids made here are the engine's: nothing is believed before it was proved, and one difference ends it.

/// How it stands with one engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trust {
    /// There are no exact tokens, and why.
    Absent(String),
    /// Everything that was compared agreed: probes at the start, requests since.
    Exact { proved: u32, checked: u64 },
    /// They were compared and differ: someone should know.
    Differs(String),
}

impl Default for Trust {
    fn default() -> Self {
        Self::Absent("its engine is not ready yet".into())
    }
}

/// Probes that must agree: enough that texts of several scripts, roles and at least one template argument are among
/// them, whatever a template refuses.
pub const AGREED_MIN: u32 = 16;

impl Trust {
    pub fn is_exact(&self) -> bool {
        matches!(self, Self::Exact { .. })
    }

    /// Why tokens are guessed. None: they are exact.
    pub fn why(&self) -> Option<&str> {
        match self {
            Self::Exact { .. } => None,
            Self::Absent(why) | Self::Differs(why) => Some(why),
        }
    }

    /// A request was compared.
    pub fn agreed(&mut self) {
        if let Self::Exact { checked, .. } = self {
            *checked += 1;
        }
    }

    /// A request was compared and differs. True: it was believed until now.
    pub fn differed(&mut self, how: String) -> bool {
        let believed = self.is_exact();
        if believed {
            *self = Self::Differs(how);
        }
        believed
    }
}

/// The probes so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Proof {
    agreed: u32,
    /// We had ids and the engine refused, or the other way round: neither proves anything.
    silent: u32,
    differs: Option<String>,
}

impl Proof {
    /// Takes one probe: our ids and the engine's, each unless refused.
    pub fn take(&mut self, what: &str, ours: Option<&[u32]>, engine: Option<&[u32]>) {
        match (ours, engine) {
            (Some(ours), Some(engine)) => match difference(ours, engine) {
                None => self.agreed += 1,
                Some(how) => {
                    self.differs.get_or_insert(format!("{what}: {how}"));
                }
            },
            _ => self.silent += 1,
        }
    }

    pub fn differs(&self) -> bool {
        self.differs.is_some()
    }

    pub fn verdict(self) -> Trust {
        match self.differs {
            Some(how) => Trust::Differs(how),
            None if self.agreed >= AGREED_MIN => Trust::Exact { proved: self.agreed, checked: 0 },
            None => Trust::Absent(format!(
                "only {} probes could be compared with the engine, {} not",
                self.agreed, self.silent
            )),
        }
    }
}

/// Where two lists of ids part.
pub fn difference(ours: &[u32], engine: &[u32]) -> Option<String> {
    if ours == engine {
        return None;
    }
    let at = ours.iter().zip(engine).take_while(|(a, b)| a == b).count();
    let at_end = |ids: &[u32]| ids.get(at).map_or("no more".to_owned(), u32::to_string);
    Some(format!(
        "token {at} of {} is {} here and {} there, of {}",
        ours.len(),
        at_end(ours),
        at_end(engine),
        engine.len()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proof(agreed: u32) -> Proof {
        let mut proof = Proof::default();
        (0..agreed).for_each(|_| proof.take("chat", Some(&[1, 2]), Some(&[1, 2])));
        proof
    }

    #[test]
    fn enough_that_agrees_is_believed_until_something_differs() {
        let mut trust = proof(AGREED_MIN).verdict();
        assert_eq!(trust, Trust::Exact { proved: AGREED_MIN, checked: 0 });
        trust.agreed();
        assert_eq!(trust, Trust::Exact { proved: AGREED_MIN, checked: 1 });
        assert!(trust.differed("how".into()));
        assert!(!trust.differed("again".into()), "said once");
        trust.agreed();
        assert_eq!(trust, Trust::Differs("how".into()));
        assert_eq!(trust.why(), Some("how"));
    }

    #[test]
    fn too_little_proves_nothing_and_one_difference_is_one_too_many() {
        let mut few = proof(AGREED_MIN - 1);
        few.take("chat", None, Some(&[1]));
        few.take("chat", Some(&[1]), None);
        assert!(matches!(few.verdict(), Trust::Absent(why) if why.contains("15") && why.contains('2')));
        let mut one = proof(100);
        one.take("chat", Some(&[1, 2, 3]), Some(&[1, 5]));
        assert!(one.differs());
        assert_eq!(one.verdict(), Trust::Differs("chat: token 1 of 3 is 2 here and 5 there, of 2".into()));
    }

    #[test]
    fn a_difference_in_length_is_one() {
        assert_eq!(difference(&[1], &[1]), None);
        assert!(difference(&[1], &[1, 2]).is_some_and(|how| how.contains("no more")));
    }
}
