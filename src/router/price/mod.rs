//! What it costs, in seconds, to serve a request on each box. Pure: a decision follows from a snapshot and a request
//! alone, so it can be written down and made again.
//!
//! The price of a box is the time that everybody together waits longer because the request goes there:
//!
//! ```text
//! J = max(W, L) + P          the request's own first token: the queue, loads beside it, then computing what is left
//!   + P · n                  each of the n requests in flight there stands still while a prompt is computed
//!   + 0.3 · D                its own words, and how much slower the others get theirs
//!   + mu · P                 blocks that it pushes out of the device and somebody asks for again
//!   + 0.5 · W · n            a queue on a busy box also delays who comes next
//! ```
//!
//! - `W` = seconds until the prompts before it are computed ([`backlog`]).
//! - `L` = seconds to bring what drive and peer hold, each only as far as that is cheaper than computing it.
//! - `P(u, c)` = u/rho + a2·u·(c + u/2) + ceil(u/2048)·s(n), with `u` tokens to compute behind `c` that are there: linear
//!   work, attention, and the decode step that rides in each chunk.
//! - `D` = O·s(n+1) + O·(s(n+1) − s(n))·n, with O words expected and a decode step s(B) = s0·(1 + kappa·(B − 1)).
//!
//! There is no threshold of tokens, no mode for imbalance and no weight for a hit: all of it is seconds, so all of it can
//! be measured ([`speed`]). The weights 1, 0.3 and 0.5 are where a simulation of two boxes under agents' load was flat:
//! halving or doubling one moved the mean by less than two percent.

pub mod backlog;
pub mod speed;

#[cfg(test)]
mod world;

use serde::{Deserialize, Serialize};

use super::chain::Reach;
use speed::Speeds;

/// How fit a node is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fit {
    Well,
    /// It can serve, but others are better.
    Strained(String),
    /// It cannot serve.
    Unfit(String),
}

/// What standing still costs the others, in seconds per second.
const INTERFERENCE: f64 = 1.0;

/// What a second of decoding counts.
const DECODE: f64 = 0.3;

/// What a second of queue counts for each request in flight.
const CONGESTION: f64 = 0.5;

/// Tokens of one chunk of a prompt. vLLM's default for a box of this kind.
pub const CHUNK: f64 = 2048.0;

/// A session stays where it was for a difference below this many seconds, or this share of the best price.
const BAND_S: f64 = 0.5;
const BAND_SHARE: f64 = 0.1;

/// What being strained costs, in seconds: others come first until they are clearly overloaded.
const STRAIN_S: f64 = 30.0;

/// Prices closer than this are equal.
const EQUAL_S: f64 = 1e-9;

/// A way by which rows come to a box.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// Seconds before the first byte.
    pub setup_s: f64,
    pub bytes_per_s: f64,
    /// Bytes that others have asked for and not got yet.
    pub queued_bytes: f64,
}

impl Link {
    /// Seconds for `tokens` of so many bytes each.
    fn seconds(&self, tokens: f64, bytes_per_token: f64) -> f64 {
        self.setup_s + (self.queued_bytes + tokens * bytes_per_token) / self.bytes_per_s.max(1.0)
    }
}

/// How a box brings rows.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Links {
    /// Bytes of KV of one token, all groups that have a row for every token.
    pub bytes_per_token: f64,
    pub drive: Link,
    pub peer: Link,
}

impl Default for Links {
    /// Nothing is known: a slow drive and a slow link, and the bytes of a large model.
    fn default() -> Self {
        let link = |bytes_per_s| Link { setup_s: 0.02, bytes_per_s, queued_bytes: 0.0 };
        Self { bytes_per_token: 65_536.0, drive: link(1.5e9), peer: link(1.0e9) }
    }
}

/// A box as the request would find it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Candidate {
    pub node: String,
    pub fit: Fit,
    /// Requests in flight there, wherever they came in.
    pub running: u32,
    /// Seconds until the prompts are computed that wait there.
    pub queue_s: f64,
    pub speeds: Speeds,
    pub links: Links,
    /// What it has of the prompt.
    pub reach: Reach,
    /// Whether it served this session before.
    pub bound: bool,
}

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// Of the prompt.
    pub tokens: u32,
    /// The tokens and what is there of them are estimates.
    pub approximate: bool,
    /// Words expected.
    pub output: f64,
    /// The conversation was cut short since its last turn: where it was says nothing any more.
    pub compacted: bool,
}

/// What the price of one box is made of, in seconds but for the first three.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Terms {
    /// Requests in flight there.
    pub running: u32,
    /// Tokens that need not be computed, and those that must.
    pub cached: u32,
    pub uncached: u32,
    pub queue_s: f64,
    pub load_s: f64,
    pub prefill_s: f64,
    pub interference_s: f64,
    pub decode_s: f64,
    pub eviction_s: f64,
    pub congestion_s: f64,
    pub strain_s: f64,
    /// The sum, loads beside the queue.
    pub total_s: f64,
}

impl Terms {
    /// Seconds until the first token.
    pub fn ttft_s(&self) -> f64 {
        self.queue_s.max(self.load_s) + self.prefill_s
    }
}

/// The price of a box, with its prompt's beginning brought as far as that makes it cheapest. None: it cannot serve.
pub fn price(request: &Request, box_: &Candidate) -> Option<Terms> {
    let strain_s = match box_.fit {
        Fit::Well => 0.0,
        Fit::Strained(_) => STRAIN_S,
        Fit::Unfit(_) => return None,
    };
    let priced = plans(request, box_).map(|(cached, load_s)| with(request, box_, cached, load_s, strain_s));
    priced.into_iter().min_by(|a, b| a.total_s.total_cmp(&b.total_s))
}

/// How far a prompt's beginning can be brought instead of computed, and the seconds that takes: not at all, from the
/// drive, from drive and peer, which bring at the same time.
fn plans(request: &Request, box_: &Candidate) -> [(u32, f64); 3] {
    let Reach { device, own, all } = box_.reach;
    let most = request.tokens.saturating_sub(1);
    let (device, own, all) = (device.min(most), own.min(most), all.min(most));
    let seconds = |from: u32, to: u32, link: &Link| match to.saturating_sub(from) {
        0 => 0.0,
        tokens => link.seconds(f64::from(tokens), box_.links.bytes_per_token),
    };
    let drive_s = seconds(device, own, &box_.links.drive);
    let own = own.max(device);
    let peer_s = seconds(own, all, &box_.links.peer);
    [(device, 0.0), (own, drive_s), (all.max(own), drive_s.max(peer_s))]
}

/// The terms when so many tokens are there after so many seconds.
fn with(request: &Request, box_: &Candidate, cached: u32, load_s: f64, strain_s: f64) -> Terms {
    let speeds = &box_.speeds;
    let uncached = request.tokens.saturating_sub(cached);
    let (n, queue_s) = (f64::from(box_.running), box_.queue_s.max(0.0));
    let prefill_s = speeds.prefill_s(f64::from(uncached), f64::from(cached), n);
    let slower = speeds.step_s(n + 1.0) - speeds.step_s(n);
    let decode_s = request.output * (speeds.step_s(n + 1.0) + slower * n);
    let terms = Terms {
        running: box_.running,
        cached,
        uncached,
        queue_s,
        load_s,
        prefill_s,
        interference_s: INTERFERENCE * prefill_s * n,
        decode_s: DECODE * decode_s,
        eviction_s: speeds.eviction * prefill_s,
        congestion_s: CONGESTION * queue_s * n,
        strain_s,
        total_s: 0.0,
    };
    let others = terms.interference_s + terms.decode_s + terms.eviction_s + terms.congestion_s + strain_s;
    Terms { total_s: terms.ttft_s() + others, ..terms }
}

/// What was chosen, by number, and each box's terms.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    pub chosen: usize,
    /// Kept although another was cheaper: the session was there before.
    pub kept: bool,
    pub terms: Vec<Option<Terms>>,
}

/// The cheapest box. `turn` counts the decisions: equals take turns. None: none can serve.
pub fn choose(request: &Request, boxes: &[Candidate], turn: u64) -> Option<Choice> {
    let terms: Vec<Option<Terms>> = boxes.iter().map(|box_| price(request, box_)).collect();
    let priced = || terms.iter().enumerate().filter_map(|(n, terms)| Some((n, terms.as_ref()?.total_s)));
    let best = priced().map(|(_, total)| total).min_by(f64::total_cmp)?;
    let band = BAND_S.max(BAND_SHARE * best);
    let bound = priced().filter(|(n, total)| boxes[*n].bound && !request.compacted && total - best < band);
    let well = |n: usize| boxes[n].fit == Fit::Well;
    // A session that was on several boxes goes to the cheapest of those.
    if let Some((kept, total)) = bound.filter(|(n, _)| well(*n)).min_by(|a, b| a.1.total_cmp(&b.1)) {
        return Some(Choice { chosen: kept, kept: total - best > EQUAL_S, terms });
    }
    let equals: Vec<usize> = priced().filter(|(_, total)| total - best <= EQUAL_S).map(|(n, _)| n).collect();
    let chosen = equals[usize::try_from(turn % equals.len() as u64).unwrap_or_default()];
    Some(Choice { chosen, kept: false, terms })
}

/// The price without coefficients: tokens to be computed before it and for it, times the requests that wait with it. What
/// is used while the learned speeds do not foretell what happens.
pub fn plain(request: &Request, box_: &Candidate) -> Option<f64> {
    let terms = price(request, box_)?;
    let queued = box_.queue_s * box_.speeds.rho;
    let strain =
        if terms.strain_s > 0.0 { f64::from(request.tokens) + STRAIN_S * box_.speeds.rho } else { 0.0 };
    Some((f64::from(terms.uncached) + queued + strain) * (f64::from(box_.running) + 1.0))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn request(tokens: u32) -> Request {
        Request { tokens, approximate: false, output: 130.0, compacted: false }
    }

    fn candidate(node: &str) -> Candidate {
        Candidate {
            node: node.into(),
            fit: Fit::Well,
            running: 0,
            queue_s: 0.0,
            speeds: Speeds::default(),
            links: Links::default(),
            reach: Reach::default(),
            bound: false,
        }
    }

    fn reach(device: u32, own: u32, all: u32) -> Reach {
        Reach { device, own, all }
    }

    fn total(request: &Request, box_: &Candidate) -> f64 {
        price(request, box_).unwrap().total_s
    }

    #[test]
    fn the_terms_are_those_of_the_formula() {
        let speeds = Speeds { rho: 1000.0, a2: 1e-8, s0: 0.05, kappa: 0.1, eviction: 0.2 };
        let box_ =
            Candidate { running: 2, queue_s: 1.5, speeds, reach: reach(4000, 4000, 4000), ..candidate("a") };
        let terms = price(&request(10_000), &box_).unwrap();
        let prefill = 6.0 + 1e-8 * 6000.0 * 7000.0 + 3.0 * 0.05 * 1.1;
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} {b}");
        close(terms.prefill_s, prefill);
        close(terms.interference_s, 2.0 * prefill);
        close(terms.decode_s, 0.3 * 130.0 * (0.05 * 1.2 + 0.005 * 2.0));
        close(terms.congestion_s, 0.5 * 1.5 * 2.0);
        close(terms.eviction_s, 0.2 * prefill);
        close(terms.ttft_s(), 1.5 + prefill);
        let rest = terms.interference_s + terms.decode_s + terms.congestion_s + terms.eviction_s;
        close(terms.total_s, terms.ttft_s() + rest);
    }

    #[test]
    fn a_tier_is_used_as_far_as_it_is_cheaper_than_computing() {
        let link = Link { setup_s: 0.1, bytes_per_s: 1e9, queued_bytes: 0.0 };
        let links = Links { bytes_per_token: 100_000.0, drive: link, peer: link };
        let plan = |reach, links| {
            let terms = price(&request(20_000), &Candidate { links, reach, ..candidate("a") }).unwrap();
            (terms.cached, (terms.load_s * 1e6).round() / 1e6)
        };
        assert_eq!(plan(reach(1000, 9000, 17_000), links), (17_000, 0.9), "both at the same time");
        // A few tokens are not worth the way, unless others lie behind them; a long queue is not worth waiting for.
        assert_eq!(plan(reach(1000, 1100, 1100), links), (1000, 0.0));
        assert_eq!(plan(reach(1000, 1100, 9100), links), (9100, 0.9));
        let jam = Link { queued_bytes: 1e12, ..link };
        assert_eq!(plan(reach(1000, 9000, 17_000), Links { drive: jam, ..links }), (1000, 0.0));
        assert_eq!(plan(reach(1000, 9000, 17_000), Links { peer: jam, ..links }), (9000, 0.9));
        // The last token is always computed.
        assert_eq!(plan(reach(20_000, 20_000, 20_000), links), (19_999, 0.0));
    }

    #[test]
    fn a_session_stays_within_the_band_and_leaves_beyond_it_or_when_it_was_compacted() {
        let at = |queue_s, compacted| {
            let boxes = [Candidate { queue_s, bound: true, ..candidate("a") }, candidate("b")];
            let choice = choose(&Request { compacted, ..request(100) }, &boxes, 0).unwrap();
            (choice.chosen, choice.kept)
        };
        assert_eq!(at(0.0, false), (0, false));
        assert_eq!(at(0.4, false), (0, true));
        assert_eq!(at(9.0, false), (1, false));
        assert_eq!(at(0.4, true), (1, false));
    }

    #[test]
    fn equals_take_turns_and_a_strained_box_waits_for_overload() {
        let boxes = [candidate("a"), candidate("b")];
        let chosen: Vec<usize> =
            (0..4).map(|turn| choose(&request(10), &boxes, turn).unwrap().chosen).collect();
        assert_eq!(chosen, [0, 1, 0, 1]);
        let strained = Candidate { fit: Fit::Strained("is hot".into()), ..candidate("a") };
        let busy = |queue_s| [strained.clone(), Candidate { queue_s, running: 3, ..candidate("b") }];
        assert_eq!(choose(&request(2000), &busy(5.0), 0).unwrap().chosen, 1);
        assert_eq!(choose(&request(2000), &busy(60.0), 0).unwrap().chosen, 0);
        let bound = Candidate { bound: true, ..strained.clone() };
        assert_eq!(
            choose(&request(10), &[bound, candidate("b")], 0).unwrap().chosen,
            1,
            "no band for a strained one"
        );
    }

    /// Only what boxes differ in counts: a beginning that all of them have draws nobody anywhere.
    #[test]
    fn a_large_shared_beginning_does_not_gather_everything_on_one_box() {
        let (mut running, mut placed) = ([0_u32; 2], [0; 2]);
        let mut held = std::collections::VecDeque::new();
        for turn in 0..200 {
            if held.len() >= 10 {
                running[held.pop_front().unwrap_or(0_usize)] -= 1;
            }
            let box_ = |n: usize, node| Candidate {
                running: running[n],
                reach: if n == 0 { reach(8000, 8000, 8000) } else { reach(0, 0, 8000) },
                ..candidate(node)
            };
            let chosen = choose(&request(8200), &[box_(0, "a"), box_(1, "b")], turn).unwrap().chosen;
            running[chosen] += 1;
            placed[chosen] += 1;
            held.push_back(chosen);
        }
        assert!(placed.iter().all(|n| *n >= 60), "{placed:?}");
    }

    #[test]
    fn a_decision_can_be_made_again_from_what_was_written_down() {
        let boxes = [
            Candidate {
                running: 3,
                queue_s: 0.5,
                reach: reach(100, 900, 4000),
                bound: true,
                ..candidate("a")
            },
            Candidate { fit: Fit::Strained("is hot".into()), ..candidate("b") },
            Candidate { fit: Fit::Unfit("is gone".into()), ..candidate("c") },
        ];
        let written = serde_json::to_string(&(request(5000), &boxes, 7)).unwrap();
        let (asked, read, turn): (Request, Vec<Candidate>, u64) = serde_json::from_str(&written).unwrap();
        assert_eq!(choose(&asked, &read, turn), choose(&request(5000), &boxes, 7));
    }

    fn any_box() -> impl Strategy<Value = Candidate> {
        let fit = prop_oneof![
            3 => Just(Fit::Well),
            1 => Just(Fit::Strained("is hot".into())),
            1 => Just(Fit::Unfit("is gone".into()))
        ];
        let reach = (0_u32..60_000, 0_u32..60_000, 0_u32..60_000);
        let speeds = (200.0..4000.0_f64, 0.01..0.2_f64, 0.0..0.3_f64);
        (fit, 0_u32..32, 0.0..60.0_f64, reach, speeds, any::<bool>()).prop_map(
            |(fit, running, queue_s, (x, y, z), (rho, s0, kappa), bound)| {
                let mut all = [x, y, z];
                all.sort_unstable();
                Candidate {
                    fit,
                    running,
                    queue_s,
                    reach: reach_of(all),
                    speeds: Speeds { rho, s0, kappa, ..Speeds::default() },
                    bound,
                    ..candidate("x")
                }
            },
        )
    }

    fn reach_of([device, own, all]: [u32; 3]) -> Reach {
        Reach { device, own, all }
    }

    proptest! {
        #[test]
        fn an_unfit_box_is_never_chosen_and_a_fit_one_always_found(
            boxes in proptest::collection::vec(any_box(), 0..5), tokens in 1_u32..60_000, turn: u64
        ) {
            let fit = |box_: &Candidate| !matches!(box_.fit, Fit::Unfit(_));
            match choose(&request(tokens), &boxes, turn) {
                None => prop_assert!(!boxes.iter().any(fit)),
                Some(choice) => prop_assert!(fit(&boxes[choice.chosen])),
            }
        }

        #[test]
        fn more_queue_more_requests_or_a_slower_box_is_never_cheaper(
            box_ in any_box(), tokens in 1_u32..60_000, more in 0.0..30.0_f64, others in 0_u32..8, slower in 0.2..1.0_f64
        ) {
            prop_assume!(!matches!(box_.fit, Fit::Unfit(_)));
            let asked = request(tokens);
            let before = total(&asked, &box_) - 1e-9;
            let queue_s = box_.queue_s + more;
            let busier = Candidate { queue_s, ..box_.clone() };
            let fuller = Candidate { running: box_.running + others, ..box_.clone() };
            let throttled = Candidate { speeds: box_.speeds.at_clock(slower), ..box_.clone() };
            for dearer in [busier, fuller, throttled] {
                prop_assert!(total(&asked, &dearer) >= before, "{:?}", dearer);
            }
        }

        #[test]
        fn more_on_the_device_is_never_dearer(box_ in any_box(), tokens in 1_u32..60_000, more in 0_u32..9000) {
            prop_assume!(!matches!(box_.fit, Fit::Unfit(_)));
            let Reach { device, own, all } = box_.reach;
            let asked = request(tokens);
            let longer = Reach { device: device + more, own: own.max(device + more), all: all.max(device + more) };
            let after = total(&asked, &Candidate { reach: longer, ..box_.clone() });
            prop_assert!(after <= total(&asked, &box_) + 1e-9);
        }

        #[test]
        fn equal_boxes_share_evenly(box_ in any_box(), count in 1_usize..5, tokens in 1_u32..60_000) {
            prop_assume!(box_.fit == Fit::Well);
            let boxes = vec![Candidate { bound: false, ..box_ }; count];
            let mut tally = vec![0; count];
            for turn in 0..60 {
                tally[choose(&request(tokens), &boxes, turn).unwrap().chosen] += 1;
            }
            prop_assert!(tally.iter().all(|n| *n == 60 / count), "{:?}", tally);
        }
    }
}
