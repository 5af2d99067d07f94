//! Where a request goes, by the strategy that the operator chose, and why, in one sentence. Pure.
//!
//! `cost` is the one that is meant ([`price`]); the others are there to compare it with, and for taste. A decision
//! carries everything that it was made of, so that it can be explained later and made again.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use super::price::{self, choose};
pub use super::price::{Candidate, Fit, Request, Terms};
use crate::settings::Strategy;

/// By which rule a box was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// It was the only one, or the request names it.
    Bound,
    /// It costs least.
    Cost,
    /// It costs about as little as the cheapest, and had the session before.
    Session,
    /// The price without coefficients: what was foretold has parted from what happened.
    Plain,
    /// Another strategy than cost.
    Strategy,
}

impl Reason {
    pub fn label(self) -> &'static str {
        match self {
            Self::Bound => "bound",
            Self::Cost => "cost",
            Self::Session => "session",
            Self::Plain => "plain",
            Self::Strategy => "strategy",
        }
    }
}

/// What a decision was made of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Basis {
    pub strategy: Strategy,
    pub reason: Reason,
    pub request: Request,
    /// Number of the decision: equals take turns.
    pub turn: u64,
    pub boxes: Vec<Candidate>,
    /// Of each box; none for one that cannot serve.
    pub terms: Vec<Option<Terms>>,
    /// Number of the chosen one.
    pub chosen: usize,
}

impl Basis {
    /// The price of the chosen box.
    pub fn terms(&self) -> Option<&Terms> {
        self.terms.get(self.chosen)?.as_ref()
    }

    /// What the chosen box costs more than the best one, in seconds.
    pub fn regret_s(&self) -> f64 {
        let best = self.terms.iter().flatten().map(|terms| terms.total_s).min_by(f64::total_cmp);
        self.terms().zip(best).map_or(0.0, |(terms, best)| terms.total_s - best)
    }
}

/// What was decided.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    pub node: String,
    /// One sentence for pages and logs.
    pub why: String,
    pub basis: Basis,
}

/// With the strategy `prefix` a box that has the whole prompt is preferred until it has this many requests more in flight
/// than one that has nothing of it.
const MARGIN: f64 = 4.0;

/// Decides. `drifted`: the learned speeds are not to be used. `turn` counts the decisions. None: no box can serve.
pub fn place(
    strategy: Strategy,
    drifted: bool,
    request: Request,
    boxes: Vec<Candidate>,
    turn: u64,
) -> Option<Decision> {
    let terms: Vec<Option<Terms>> = boxes.iter().map(|box_| price::price(&request, box_)).collect();
    let (chosen, reason) = match strategy {
        Strategy::Cost if !drifted => {
            let choice = choose(&request, &boxes, turn)?;
            (choice.chosen, if choice.kept { Reason::Session } else { Reason::Cost })
        }
        Strategy::Cost => (least(&boxes, turn, |_, box_| price::plain(&request, box_))?, Reason::Plain),
        _ => {
            let by = |n: usize, box_: &Candidate| {
                let terms = terms[n].as_ref()?;
                let (load, strained) = (f64::from(box_.running), terms.strain_s);
                let share = f64::from(terms.cached) / f64::from(request.tokens.max(1));
                Some(match strategy {
                    Strategy::Prefix => load - MARGIN * share + strained,
                    Strategy::Kv => return price::plain(&request, box_),
                    Strategy::LeastLoad => load + strained,
                    Strategy::RoundRobin | Strategy::Cost => strained,
                })
            };
            (least(&boxes, turn, by)?, Reason::Strategy)
        }
    };
    let reason = if terms.iter().flatten().count() == 1 { Reason::Bound } else { reason };
    let basis = Basis { strategy, reason, request, turn, boxes, terms, chosen };
    Some(Decision { node: basis.boxes[chosen].node.clone(), why: why(&basis), basis })
}

/// The one with the least; equals take turns.
fn least(boxes: &[Candidate], turn: u64, by: impl Fn(usize, &Candidate) -> Option<f64>) -> Option<usize> {
    let all: Vec<(usize, f64)> =
        boxes.iter().enumerate().filter_map(|(n, box_)| Some((n, by(n, box_)?))).collect();
    let best = all.iter().map(|(_, what)| *what).min_by(f64::total_cmp)?;
    let equals: Vec<usize> = all.into_iter().filter(|(_, what)| *what <= best).map(|(n, _)| n).collect();
    Some(equals[usize::try_from(turn % equals.len() as u64).unwrap_or_default()])
}

/// The sentence.
fn why(basis: &Basis) -> String {
    let Basis { boxes, terms, chosen, request, .. } = basis;
    let node = &boxes[*chosen].node;
    if basis.reason == Reason::Bound {
        let others: Vec<String> = boxes
            .iter()
            .filter(|box_| box_.node != *node)
            .map(|box_| match &box_.fit {
                Fit::Unfit(why) => format!("{}: {why}", box_.node),
                _ => box_.node.clone(),
            })
            .collect();
        return match others.as_slice() {
            [] => format!("{node} is the only node"),
            others => format!("{node} is the only node that can serve it: {}", others.join(", ")),
        };
    }
    let mut told = match basis.reason {
        Reason::Session => format!("{node} had this session before and costs hardly more"),
        Reason::Plain => format!("{node} has least to do (speeds are being learned anew)"),
        Reason::Strategy => format!("{node} by {}", basis.strategy.name()),
        Reason::Cost | Reason::Bound => format!("{node} costs least"),
    };
    let about = if request.approximate { "about " } else { "" };
    for (n, terms) in terms.iter().enumerate() {
        let Some(terms) = terms else { continue };
        let separator = if n == 0 { ": " } else { "; " };
        let strained = match &boxes[n].fit {
            Fit::Strained(why) => format!(", strained ({why})"),
            _ => String::new(),
        };
        let session = if boxes[n].bound { ", had this session" } else { "" };
        // A sentence of a decision is short: it cannot fail to be written.
        let _ = write!(
            told,
            "{separator}{} {:.1} s ({about}{} of {} tokens there, {} in flight, first token in {:.1} s{session}{strained})",
            boxes[n].node,
            terms.total_s,
            terms.cached,
            request.tokens,
            terms.running,
            terms.ttft_s(),
        );
    }
    told
}

#[cfg(test)]
mod tests {
    use super::super::chain::Reach;
    use super::super::price::{Links, speed::Speeds};
    use super::*;

    fn request(tokens: u32) -> Request {
        Request { tokens, approximate: false, output: 130.0, compacted: false }
    }

    fn candidate(node: &str, running: u32, there: u32) -> Candidate {
        Candidate {
            node: node.into(),
            fit: Fit::Well,
            running,
            queue_s: 0.0,
            speeds: Speeds::default(),
            links: Links::default(),
            reach: Reach { device: there, own: there, all: there },
            bound: false,
        }
    }

    fn chosen(strategy: Strategy, boxes: &[Candidate], turn: u64) -> String {
        place(strategy, false, request(1000), boxes.to_vec(), turn).unwrap().node
    }

    #[test]
    fn each_strategy_looks_at_what_it_says() {
        let boxes = [candidate("a", 3, 900), candidate("b", 2, 0), candidate("c", 1, 0)];
        let all = [Strategy::Prefix, Strategy::Kv, Strategy::LeastLoad];
        assert_eq!(all.map(|strategy| chosen(strategy, &boxes, 0)), ["a", "a", "c"]);
        let turns: Vec<String> = (0..4).map(|turn| chosen(Strategy::RoundRobin, &boxes, turn)).collect();
        assert_eq!(turns, ["a", "b", "c", "a"]);
        // Until it has too many.
        let boxes = [candidate("a", 9, 900), candidate("b", 2, 0)];
        assert_eq!(chosen(Strategy::Prefix, &boxes, 0), "b");
    }

    #[test]
    fn while_speeds_are_not_to_be_trusted_no_coefficient_decides() {
        let wrong = Speeds { rho: 6000.0, ..Speeds::default() };
        let boxes = vec![Candidate { speeds: wrong, ..candidate("a", 1, 0) }, candidate("b", 1, 900)];
        let decision = place(Strategy::Cost, true, request(1000), boxes, 0).unwrap();
        assert_eq!((decision.node.as_str(), decision.basis.reason), ("b", Reason::Plain));
        assert!(decision.why.starts_with("b has least to do"), "{}", decision.why);
    }

    #[test]
    fn a_decision_tells_what_it_was_made_of() {
        let boxes = vec![
            Candidate { bound: true, ..candidate("a", 1, 900) },
            Candidate { fit: Fit::Strained("is hot".into()), ..candidate("b", 0, 0) },
        ];
        let decision =
            place(Strategy::Cost, false, Request { approximate: true, ..request(1000) }, boxes, 0).unwrap();
        let terms = decision.basis.terms().unwrap();
        assert_eq!((decision.node.as_str(), terms.cached, decision.basis.regret_s()), ("a", 900, 0.0));
        for part in [
            "a costs least: a ",
            "about 900 of 1000 tokens there, 1 in flight",
            "strained (is hot)",
            "had this",
        ] {
            assert!(decision.why.contains(part), "{}", decision.why);
        }
    }

    #[test]
    fn one_that_is_alone_is_said_to_be() {
        let one = |boxes: &[Candidate]| place(Strategy::Cost, false, request(9), boxes.to_vec(), 0).unwrap();
        assert_eq!(one(&[candidate("a", 0, 0)]).why, "a is the only node");
        let gone = Candidate { fit: Fit::Unfit("is draining".into()), ..candidate("b", 0, 0) };
        let decision = one(&[candidate("a", 0, 0), gone.clone()]);
        assert_eq!(decision.why, "a is the only node that can serve it: b: is draining");
        assert_eq!(decision.basis.reason, Reason::Bound);
        assert_eq!(place(Strategy::Prefix, false, request(9), vec![gone], 0), None);
    }

    proptest::proptest! {
        /// As an operator would: from the record alone.
        #[test]
        fn a_decision_that_was_written_down_is_made_again(
            boxes in proptest::collection::vec((0_u32..9, 0_u32..9000, 0.0..20.0_f64, proptest::bool::ANY, 0_u8..4), 1..5),
            which in 0_usize..5, drifted: bool, turn: u64,
        ) {
            let all = [Strategy::Cost, Strategy::Prefix, Strategy::Kv, Strategy::LeastLoad, Strategy::RoundRobin];
            let boxes = boxes.into_iter().map(|(running, there, queue_s, bound, fit)| Candidate {
                queue_s,
                bound,
                fit: match fit {
                    0 => Fit::Unfit("is gone".into()),
                    1 => Fit::Strained("is hot".into()),
                    _ => Fit::Well,
                },
                ..candidate("x", running, there)
            });
            let Some(made) = place(all[which], drifted, request(9000), boxes.collect(), turn) else { return Ok(()) };
            let written = serde_json::to_string(&made.basis).unwrap();
            let read: Basis = serde_json::from_str(&written).unwrap();
            // Which of two prices was compared is told by the reason, or does not matter: there was one box.
            let plain = read.reason == Reason::Plain;
            let again = place(read.strategy, plain, read.request, read.boxes, read.turn).unwrap();
            proptest::prop_assert_eq!((again.basis.chosen, again.basis.reason), (made.basis.chosen, made.basis.reason));
            proptest::prop_assert_eq!(again.why, made.why);
        }
    }
}
