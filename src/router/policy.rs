//! Where a request goes: the cheapest of the nodes that can serve it, and why, in one sentence.
//!
//! The price here is counted in requests: what a node already has in flight, less what it saves because it knows
//! the prompt's beginning. It is the seam for the price in seconds that takes its place; nothing else in the
//! router knows what a price is made of.

use super::ask::Ask;

/// How fit a node is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fit {
    Well,
    /// It can serve, but others are better.
    Strained(String),
    /// It cannot serve.
    Unfit(String),
}

/// A node that a request might go to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub node: String,
    pub fit: Fit,
    /// Requests in flight there, wherever they came in.
    pub load: u32,
    /// Bytes of the prompt's beginning that it has computed before.
    pub known_bytes: u64,
    /// Whether it served this session before.
    pub session: bool,
}

/// What was decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    pub node: String,
    /// One sentence for pages and logs.
    pub why: String,
}

/// A node that knows the whole prompt is preferred until it has this many requests more in flight than one that
/// knows nothing of it; a node that knows a part, until it has that part of this many. Small on purpose: with a
/// cache behind both nodes a move costs a load, not a recomputation, and a beginning that many sessions share must
/// not gather them all on the node that saw it first.
pub const MARGIN: u32 = 4;

/// What being strained costs, in requests: other nodes come first until they are clearly overloaded.
const STRAIN: u32 = 8;

/// Thousandths of a request: whole numbers, so that equal prices are equal.
const UNIT: i64 = 1000;

/// The price of sending `ask` to `candidate`, in thousandths of a request. None: it cannot go there.
fn price(ask: &Ask, candidate: &Candidate) -> Option<i64> {
    let strain = match candidate.fit {
        Fit::Well => 0,
        Fit::Strained(_) => STRAIN,
        Fit::Unfit(_) => return None,
    };
    let whole = ask.prompt_bytes.max(1);
    let saved =
        u128::from(MARGIN) * u128::from(candidate.known_bytes.min(whole)) * UNIT as u128 / u128::from(whole);
    // Less than one request: it decides between equals only.
    let bound = if candidate.session { UNIT / 2 } else { 0 };
    Some((i64::from(candidate.load) + i64::from(strain)) * UNIT - saved as i64 - bound)
}

/// Decides. `turn` counts the decisions: equals take turns. None: no candidate can serve.
pub fn place(ask: &Ask, candidates: &[Candidate], turn: u64) -> Option<Decision> {
    let priced: Vec<(i64, &Candidate)> =
        candidates.iter().filter_map(|c| Some((price(ask, c)?, c))).collect();
    let lowest = priced.iter().map(|(price, _)| *price).min()?;
    let equals: Vec<&Candidate> = priced.iter().filter(|(p, _)| *p == lowest).map(|(_, c)| *c).collect();
    let chosen = equals[usize::try_from(turn % equals.len() as u64).unwrap_or_default()];
    Some(Decision { node: chosen.node.clone(), why: why(ask, chosen, &priced, candidates) })
}

fn why(ask: &Ask, chosen: &Candidate, priced: &[(i64, &Candidate)], all: &[Candidate]) -> String {
    let facts = |c: &Candidate| {
        let session = if c.session { ", served this session before" } else { "" };
        let strained =
            if let Fit::Strained(why) = &c.fit { format!(", is strained ({why})") } else { "".into() };
        format!(
            "{} knows {} of {} prompt bytes, has {} in flight{session}{strained}",
            c.node,
            c.known_bytes.min(ask.prompt_bytes),
            ask.prompt_bytes,
            c.load
        )
    };
    if let [_] = priced {
        let others: Vec<String> = all
            .iter()
            .filter(|c| c.node != chosen.node)
            .map(|c| match &c.fit {
                Fit::Unfit(why) => format!("{}: {why}", c.node),
                _ => c.node.clone(),
            })
            .collect();
        return match others.as_slice() {
            [] => format!("{} is the only node", chosen.node),
            others => format!("{} is the only node that can serve it: {}", chosen.node, others.join(", ")),
        };
    }
    let others: Vec<String> =
        priced.iter().filter(|(_, c)| c.node != chosen.node).map(|(_, c)| facts(c)).collect();
    format!("{}; {}", facts(chosen), others.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::router::ask::Endpoint;
    use proptest::prelude::*;

    fn ask(prompt_bytes: u64) -> Ask {
        Ask { prompt_bytes, ..Ask::bare(Endpoint::Chat) }
    }

    fn candidate(node: &str, load: u32, known_bytes: u64) -> Candidate {
        Candidate { node: node.into(), fit: Fit::Well, load, known_bytes, session: false }
    }

    fn node(ask: &Ask, candidates: &[Candidate], turn: u64) -> String {
        place(ask, candidates, turn).unwrap().node
    }

    #[test]
    fn the_longest_known_prefix_wins_up_to_the_margin_and_not_beyond() {
        let at = |load| node(&ask(1000), &[candidate("a", load, 1000), candidate("b", 0, 0)], 1);
        assert_eq!((at(MARGIN - 1).as_str(), at(MARGIN + 1).as_str()), ("a", "b"));
        let half = |load| node(&ask(1000), &[candidate("a", load, 500), candidate("b", 0, 0)], 1);
        assert_eq!((half(1).as_str(), half(3).as_str()), ("a", "b"));
    }

    #[test]
    fn equals_take_turns() {
        let both = [candidate("a", 2, 0), candidate("b", 2, 0)];
        let nodes: Vec<String> = (0..4).map(|turn| node(&ask(10), &both, turn)).collect();
        assert_eq!(nodes, ["a", "b", "a", "b"]);
    }

    #[test]
    fn a_session_returns_to_its_node_when_nothing_else_tells_them_apart() {
        let mut both = [candidate("a", 1, 0), candidate("b", 1, 0)];
        both[1].session = true;
        assert!((0..4).all(|turn| node(&ask(10), &both, turn) == "b"));
        both[1].load = 2;
        assert!((0..4).all(|turn| node(&ask(10), &both, turn) == "a"));
    }

    #[test]
    fn a_strained_node_is_used_when_it_is_the_only_one() {
        let mut both = [candidate("a", 0, 10), candidate("b", 3, 0)];
        both[0].fit = Fit::Strained("is hot".into());
        assert_eq!(node(&ask(10), &both, 0), "b");
        both[1].fit = Fit::Unfit("is draining".into());
        let decision = place(&ask(10), &both, 0).unwrap();
        assert_eq!(decision.node, "a");
        assert_eq!(decision.why, "a is the only node that can serve it: b: is draining");
    }

    #[test]
    fn a_decision_tells_the_facts_it_was_made_of() {
        let decision = place(&ask(100), &[candidate("a", 3, 90), candidate("b", 1, 0)], 0).unwrap();
        assert_eq!(
            decision.why,
            "a knows 90 of 100 prompt bytes, has 3 in flight; b knows 0 of 100 prompt bytes, has 1 in flight"
        );
    }

    /// Sessions that share a large beginning arrive while earlier ones still run.
    #[test]
    fn a_large_shared_system_prompt_does_not_gather_everything_on_one_node_under_load() {
        let (shared, prompt) = (50_000, 52_000);
        let mut running: Vec<usize> = Vec::new();
        let (mut knows, mut placed) = ([true, false], [0, 0]);
        for turn in 0..200_u64 {
            if running.len() >= 10 {
                running.remove(0);
            }
            let load = |n| running.iter().filter(|r| **r == n).count() as u32;
            let known = |n: usize| if knows[n] { shared } else { 0 };
            let both = [candidate("a", load(0), known(0)), candidate("b", load(1), known(1))];
            let n = usize::from(node(&ask(prompt), &both, turn) == "b");
            knows[n] = true;
            placed[n] += 1;
            running.push(n);
        }
        assert!(placed.iter().all(|n| *n >= 80), "{placed:?}");
    }

    fn any_candidates() -> impl Strategy<Value = Vec<Candidate>> {
        let fit = prop_oneof![
            Just(Fit::Well),
            Just(Fit::Strained("is hot".into())),
            Just(Fit::Unfit("is draining".into()))
        ];
        let one = (fit, any::<u32>(), any::<u64>(), any::<bool>());
        proptest::collection::vec(one, 0..5).prop_map(|all| {
            let named = all.into_iter().enumerate();
            named
                .map(|(n, (fit, load, known_bytes, session))| Candidate {
                    node: format!("n{n}"),
                    fit,
                    load,
                    known_bytes,
                    session,
                })
                .collect()
        })
    }

    proptest! {
        #[test]
        fn an_unfit_node_is_never_picked_and_a_fit_one_always_found(
            candidates in any_candidates(), prompt: u64, turn: u64
        ) {
            let fit = |c: &Candidate| !matches!(c.fit, Fit::Unfit(_));
            match place(&ask(prompt), &candidates, turn) {
                None => prop_assert!(!candidates.iter().any(fit)),
                Some(decision) => {
                    let chosen = candidates.iter().find(|c| c.node == decision.node);
                    prop_assert!(chosen.is_some_and(fit));
                }
            }
        }

        #[test]
        fn nobody_waits_at_a_node_that_is_more_than_the_margin_above_the_least_loaded(
            loads in proptest::collection::vec((0_u32..100, 0_u64..2000), 2..5), turn: u64
        ) {
            let candidates: Vec<Candidate> = loads.iter().enumerate()
                .map(|(n, (load, known))| candidate(&format!("n{n}"), *load, *known)).collect();
            let chosen = node(&ask(1000), &candidates, turn);
            let load = candidates.iter().find(|c| c.node == chosen).map(|c| c.load).unwrap();
            let least = candidates.iter().map(|c| c.load).min().unwrap();
            prop_assert!(load <= least + MARGIN);
        }

        #[test]
        fn ties_spread_evenly(count in 1_usize..5, load in 0_u32..9) {
            let candidates: Vec<Candidate> =
                (0..count).map(|n| candidate(&format!("n{n}"), load, 0)).collect();
            let mut tally = std::collections::BTreeMap::new();
            for turn in 0..60 {
                *tally.entry(node(&ask(10), &candidates, turn)).or_insert(0) += 1;
            }
            prop_assert!(tally.values().all(|n| *n == 60 / count as u64 as i32), "{:?}", tally);
        }
    }
}
