//! Two boxes in virtual time, to see what a price does under load: an engine in steps as vLLM's (decodes first, then one
//! prompt after the other in chunks), a device cache that evicts what was unused for longest, sessions of agents that
//! grow, call others and are cut short. Everything follows from a seed.

use std::collections::{HashMap, VecDeque};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::super::book::{Book, Seat, Told};
use super::super::chain::Reach;
use super::super::policy::{Basis, Candidate, Fit, Request, place};
use super::speed::Speeds;
use super::{CHUNK, Links};
use crate::base::clock::Micros;
use crate::settings::Strategy;

/// Tokens of a block, and blocks that a device holds.
const BLOCK: usize = 64;
const DEVICE: usize = 200_000 / BLOCK;

/// Words of an answer.
const WORDS: u32 = 130;

/// A prompt is cut short at so many tokens.
const LONG: usize = 48_000;

fn micros(seconds: f64) -> Micros {
    Micros((seconds * 1e6) as u64)
}

/// What runs at a box.
struct Run {
    session: usize,
    blocks: Vec<u64>,
    left: u32,
    begun: bool,
    cached: u32,
    words: u32,
}

/// An engine.
struct Engine {
    speeds: Speeds,
    runs: VecDeque<Run>,
    device: HashMap<u64, u64>,
    uses: u64,
    /// When the step under way ends, and what it computes: tokens by run.
    step: Option<(f64, Vec<(usize, u32)>)>,
}

enum Happened {
    First { session: usize, cached: u32 },
    End { session: usize },
}

impl Engine {
    fn new(speeds: Speeds) -> Self {
        Self { speeds, runs: VecDeque::new(), device: HashMap::new(), uses: 0, step: None }
    }

    fn held(&self, blocks: &[u64]) -> u32 {
        let held = blocks.iter().take_while(|block| self.device.contains_key(block)).count();
        (held.min(blocks.len() - 1) * BLOCK) as u32
    }

    fn touch(&mut self, blocks: &[u64]) {
        for block in blocks {
            self.uses += 1;
            self.device.insert(*block, self.uses);
        }
        if self.device.len() > DEVICE + DEVICE / 16 {
            let mut ages: Vec<u64> = self.device.values().copied().collect();
            let surplus = ages.len() - DEVICE;
            let (_, &mut oldest, _) = ages.select_nth_unstable(surplus);
            self.device.retain(|_, used| *used >= oldest);
        }
    }

    fn begin_step(&mut self, now: f64) {
        if self.step.is_some() || self.runs.is_empty() {
            return;
        }
        let decodes = self.runs.iter().filter(|run| run.begun && run.left == 0).count();
        let mut budget = CHUNK as u32 - decodes as u32;
        let mut chunks = Vec::new();
        for n in 0..self.runs.len() {
            if budget == 0 || (self.runs[n].begun && self.runs[n].left == 0) {
                continue;
            }
            if !self.runs[n].begun {
                let blocks = self.runs[n].blocks.clone();
                let cached = self.held(&blocks);
                self.touch(&blocks);
                let run = &mut self.runs[n];
                (run.begun, run.cached, run.left) = (true, cached, (blocks.len() * BLOCK) as u32 - cached);
            }
            let tokens = budget.min(self.runs[n].left);
            budget -= tokens;
            chunks.push((n, tokens));
        }
        let computed: u32 = chunks.iter().map(|(_, tokens)| tokens).sum();
        let seconds = f64::from(computed) / self.speeds.rho + self.speeds.step_s(decodes as f64);
        self.step = Some((now + seconds.max(1e-4), chunks));
    }

    fn end_step(&mut self) -> Vec<Happened> {
        let Some((_, chunks)) = self.step.take() else { return Vec::new() };
        let mut happened = Vec::new();
        for (n, run) in self.runs.iter_mut().enumerate() {
            if run.begun && run.left == 0 {
                run.words += 1;
                if run.words == WORDS {
                    happened.push(Happened::End { session: run.session });
                }
            } else if let Some((_, tokens)) = chunks.iter().find(|(of, _)| *of == n) {
                run.left -= tokens;
                if run.left == 0 {
                    run.words = 1;
                    happened.push(Happened::First { session: run.session, cached: run.cached });
                }
            }
        }
        self.runs.retain(|run| run.words < WORDS);
        happened
    }
}

/// A conversation.
struct Session {
    blocks: Vec<u64>,
    turns: u32,
    /// When it asks next; none while it waits for an answer.
    wakes: Option<f64>,
    asked: Option<Asked>,
    bound: Option<usize>,
}

struct Asked {
    at: f64,
    node: usize,
    front: Seat,
    seat: Seat,
    basis: Basis,
    first: Option<f64>,
    cached: u32,
}

/// What one run came to.
#[derive(Debug, Default)]
pub struct Figures {
    pub makespan: f64,
    pub latency: f64,
    pub ttft: Vec<f64>,
    /// Foretold less seen, as a share of seen, of every first token after the first hundred.
    pub off: Vec<f64>,
    /// Which node served each request, by the time it ended.
    pub nodes: Vec<(f64, usize)>,
    pub cached: f64,
}

impl Figures {
    pub fn quantile(of: &[f64], share: f64) -> f64 {
        let mut all = of.to_vec();
        all.sort_by(f64::total_cmp);
        all.get(((all.len() as f64 - 1.0) * share) as usize).copied().unwrap_or(0.0)
    }
}

pub struct World {
    rng: StdRng,
    engines: [Engine; 2],
    sessions: Vec<Session>,
    front: Book,
    books: [Book; 2],
    strategy: Strategy,
    turn: u64,
    fresh: u64,
    /// From when to when the second box runs at this share of its speed.
    throttle: Option<(f64, f64, f64)>,
}

const NODES: [&str; 2] = ["a", "b"];

impl World {
    pub fn new(seed: u64, strategy: Strategy, sessions: usize, turns: u32) -> Self {
        let mut world = Self {
            rng: StdRng::seed_from_u64(seed),
            engines: [Engine::new(Speeds::default()), Engine::new(Speeds::default())],
            sessions: Vec::new(),
            front: Book::new(Speeds::default()),
            books: [Book::new(Speeds::default()), Book::new(Speeds::default())],
            strategy,
            turn: 0,
            fresh: 1 << 32,
            throttle: None,
        };
        for n in 0..sessions {
            // Everybody begins with the same 8,000 tokens.
            let blocks = (0..8000 / BLOCK as u64).collect();
            let wakes = Some(n as f64 * 1.5);
            world.sessions.push(Session { blocks, turns, wakes, asked: None, bound: None });
        }
        world
    }

    pub fn throttled(mut self, from: f64, until: f64, share: f64) -> Self {
        self.throttle = Some((from, until, share));
        self
    }

    fn grow(&mut self, n: usize, tokens: usize) {
        for _ in 0..tokens.div_ceil(BLOCK) {
            self.fresh += 1;
            self.sessions[n].blocks.push(self.fresh);
        }
    }

    fn ask(&mut self, n: usize, now: f64) {
        let tokens = if self.rng.random_bool(0.2) { 6000 } else { self.rng.random_range(300..2500) };
        self.grow(n, tokens);
        let compacted = self.sessions[n].blocks.len() * BLOCK > LONG;
        if compacted {
            self.sessions[n].blocks.truncate(8000 / BLOCK);
            self.grow(n, 2500);
        }
        let blocks = self.sessions[n].blocks.clone();
        let request = Request {
            tokens: (blocks.len() * BLOCK) as u32,
            approximate: false,
            output: f64::from(WORDS),
            compacted,
        };
        let boxes = (0..2).map(|node| self.candidate(n, node, &blocks, now)).collect();
        let drifted = self.books.iter().any(Book::has_drifted);
        self.turn += 1;
        let decision = place(self.strategy, drifted, request, boxes, self.turn).expect("both can serve");
        let node = decision.basis.chosen;
        let prefill_s = decision.basis.terms().expect("it was priced").prefill_s;
        let (front, seat) = (
            self.front.sit(NODES[node], prefill_s, micros(now)),
            self.books[node].sit("own", prefill_s, micros(now)),
        );
        let run = Run { session: n, blocks, left: 0, begun: false, cached: 0, words: 0 };
        self.engines[node].runs.push_back(run);
        self.sessions[n].wakes = None;
        self.sessions[n].bound = Some(node);
        self.sessions[n].asked =
            Some(Asked { at: now, node, front, seat, basis: decision.basis, first: None, cached: 0 });
    }

    fn candidate(&self, session: usize, node: usize, blocks: &[u64], now: f64) -> Candidate {
        let held = self.engines[node].held(blocks);
        Candidate {
            node: NODES[node].into(),
            fit: Fit::Well,
            running: self.front.running(NODES[node]),
            queue_s: self.front.queue_s(NODES[node], micros(now)),
            speeds: self.books[node].speeds(),
            links: Links::default(),
            reach: Reach { device: held, own: held, all: held },
            bound: self.sessions[session].bound == Some(node),
        }
    }

    fn first(&mut self, n: usize, cached: u32, now: f64) {
        let asked = self.sessions[n].asked.as_mut().expect("it asked");
        (asked.first, asked.cached) = (Some(now), cached);
        self.front.first_byte(NODES[asked.node], &mut asked.front, micros(now));
        self.books[asked.node].first_byte("own", &mut asked.seat, micros(now));
    }

    fn end(&mut self, n: usize, now: f64, figures: &mut Figures) {
        let asked = self.sessions[n].asked.take().expect("it asked");
        let prompt = u64::from(asked.basis.request.tokens);
        let told =
            Told { prompt, cached: asked.cached.into(), words: WORDS.into(), prompt_bytes: prompt * 4 };
        let book = &mut self.books[asked.node];
        book.on_own_answer(&asked.seat, asked.basis.terms(), &told, micros(now));
        book.stand("own", &asked.seat, micros(now));
        self.front.stand(NODES[asked.node], &asked.front, micros(now));
        let ttft = asked.first.expect("it had a first token") - asked.at;
        let foretold = asked.basis.terms().expect("it was priced").ttft_s();
        if figures.nodes.len() >= 100 {
            figures.off.push((foretold - ttft) / ttft);
        }
        figures.ttft.push(ttft);
        figures.latency += now - asked.at;
        figures.cached += f64::from(asked.cached) / prompt as f64;
        figures.nodes.push((now, asked.node));
        figures.makespan = now;
        self.grow(n, WORDS as usize);
        let think = self.rng.random_range(1.0..6.0);
        let session = &mut self.sessions[n];
        session.turns -= 1;
        session.wakes = (session.turns > 0).then_some(now + think);
    }

    pub fn run(mut self) -> Figures {
        let mut figures = Figures::default();
        loop {
            let wakes = self.sessions.iter().enumerate().filter_map(|(n, s)| Some((s.wakes?, n)));
            let wakes = wakes.min_by(|a, b| a.0.total_cmp(&b.0));
            let steps = self.engines.iter().enumerate().filter_map(|(n, e)| Some((e.step.as_ref()?.0, n)));
            let step = steps.min_by(|a, b| a.0.total_cmp(&b.0));
            let now = match (wakes, step) {
                (Some((wakes, n)), step) if step.is_none_or(|(ends, _)| wakes <= ends) => {
                    self.ask(n, wakes);
                    wakes
                }
                (_, Some((ends, node))) => {
                    for happened in self.engines[node].end_step() {
                        match happened {
                            Happened::First { session, cached } => self.first(session, cached, ends),
                            Happened::End { session } => self.end(session, ends, &mut figures),
                        }
                    }
                    ends
                }
                _ => return figures,
            };
            if let Some((from, until, share)) = self.throttle {
                let share = if (from..until).contains(&now) { share } else { 1.0 };
                self.engines[1].speeds = Speeds::default().at_clock(share);
            }
            self.engines.iter_mut().for_each(|engine| engine.begin_step(now));
        }
    }
}

/// The mean over some seeds of what `of` says, against that of the price.
fn against(strategy: Strategy, of: fn(&Figures) -> f64) -> f64 {
    let mean = |strategy| (1..=6).map(|seed| of(&World::new(seed, strategy, 10, 16).run())).sum::<f64>();
    mean(strategy) / mean(Strategy::Cost)
}

#[test]
fn the_price_is_no_slower_than_the_price_without_coefficients_and_faster_than_the_rest() {
    let all = [Strategy::Kv, Strategy::Prefix, Strategy::LeastLoad, Strategy::RoundRobin];
    let makespans = all.map(|strategy| against(strategy, |figures| figures.makespan));
    let latencies = all.map(|strategy| against(strategy, |figures| figures.latency));
    let told = format!("against the price: makespan {makespans:.3?}, latency {latencies:.3?} of {all:?}");
    assert!(makespans[0] > 0.99 && latencies[0] > 0.99, "{told}");
    assert!(latencies[1..].iter().all(|ratio| *ratio > 1.02), "{told}");
    assert!(makespans[1..].iter().all(|ratio| *ratio > 1.0), "{told}");
}

/// 0.55 of 1.55 is 0.355 of what both can do.
#[test]
fn a_box_that_slows_gets_what_it_can_do_within_twenty_answers_until_it_recovers() {
    let share = |nodes: &[(f64, usize)], from: f64, until: f64, skip: usize| {
        let during: Vec<usize> =
            nodes.iter().filter(|(t, _)| (from..until).contains(t)).map(|(_, n)| *n).collect();
        let late = &during[skip.min(during.len())..];
        late.iter().filter(|n| **n == 1).count() as f64 / late.len().max(1) as f64
    };
    let (mut slow, mut well) = (0.0, 0.0);
    for seed in 1..=8 {
        let figures = World::new(seed, Strategy::Cost, 10, 60).throttled(400.0, 1200.0, 0.55).run();
        slow += share(&figures.nodes, 400.0, 1200.0, 20) / 8.0;
        well += share(&figures.nodes, 1200.0, 2000.0, 20) / 8.0;
    }
    assert!((0.30..=0.38).contains(&slow), "{slow}");
    assert!((0.4..=0.6).contains(&well), "{well}");
}

#[test]
fn the_first_token_comes_when_it_was_foretold() {
    let mut off = Vec::new();
    for seed in 1..=4 {
        off.extend(World::new(seed, Strategy::Cost, 6, 60).run().off);
    }
    let sizes: Vec<f64> = off.iter().map(|off: &f64| off.abs()).collect();
    let (bias, size) = (Figures::quantile(&off, 0.5), Figures::quantile(&sizes, 0.5));
    assert!(
        size <= 0.15 && bias.abs() <= 0.05,
        "half are within {size:.3}, the middle one is off by {bias:.3}"
    );
}
