//! What the router has in flight where, and what that teaches. Pure.
//!
//! Each request has a seat at one node at a time. Its prompt is part of that node's backlog until its first byte comes;
//! its count stays until its answer has passed. What this node's own engine took for it, beside what the engine says
//! of its tokens, teaches this node's speeds, which the other nodes are told.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use super::price::backlog::Backlog;
use super::price::speed::{Decode, Learner, Prefill, Speeds};
use super::price::{Links, Terms};
use crate::base::clock::Micros;

/// One node's requests from here.
#[derive(Debug, Default)]
struct Load {
    running: u32,
    backlog: Backlog,
    /// Prompts that it was ever given.
    given: u64,
}

/// A request at a node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Seat {
    id: u64,
    /// When it was given to the node, and to how many others beside.
    pub since: Micros,
    pub beside: u32,
    /// No prompt waited there before it, and how many the node had been given.
    alone: bool,
    given: u64,
    /// When its first byte came, and how many ran beside then.
    first: Option<(Micros, u32)>,
    /// No other prompt came before its first byte did.
    undisturbed: bool,
}

/// What the engine said a request had.
#[derive(Clone, Copy, Debug)]
pub struct Told {
    pub prompt: u64,
    pub cached: u64,
    pub words: u64,
    /// Bytes of the prompt, as the router counts them.
    pub prompt_bytes: u64,
}

/// Sessions whose last prompt is remembered.
const SESSIONS_MAX: usize = 8192;

/// A prompt that shares less than this of the one before, in percent, is a conversation that was cut short.
const COMPACTED: u64 = 30;

/// Words of an answer, until some were counted.
const WORDS: f64 = 130.0;

/// Bytes of a token, until some were counted, and what they can be.
const BYTES: f64 = 4.0;
const BYTES_LEAST: f64 = 1.0;
const BYTES_MOST: f64 = 16.0;

/// What a new answer counts.
const FRESH: f64 = 0.05;

/// Loading beyond this share of the time to the first byte makes that say nothing about computing.
const LOADING: f64 = 0.2;

#[derive(Debug)]
pub struct Book {
    loads: BTreeMap<String, Load>,
    seats: u64,
    learner: Learner,
    links: Links,
    /// This box's clock, as a share of what it was when its speeds were learned.
    clock: f64,
    words: f64,
    bytes: f64,
    sessions: HashMap<u64, u64>,
    oldest: VecDeque<u64>,
}

impl Book {
    pub fn new(speeds: Speeds) -> Self {
        Self {
            loads: BTreeMap::new(),
            seats: 0,
            learner: Learner::new(speeds),
            links: Links::default(),
            clock: 1.0,
            words: WORDS,
            bytes: BYTES,
            sessions: HashMap::new(),
            oldest: VecDeque::new(),
        }
    }

    /// Another engine is served, which may be another model: everything is learned anew.
    pub fn begin(&mut self, speeds: Speeds, links: Links) {
        (self.learner, self.links) = (Learner::new(speeds), links);
    }

    /// The clock of this box falls to a share of what it was, or is back at 1: its price changes at once.
    pub fn set_clock(&mut self, share: f64) {
        self.clock = share;
    }

    /// A request is given to `node`, where its prompt takes so many seconds.
    pub fn sit(&mut self, node: &str, prefill_s: f64, now: Micros) -> Seat {
        self.seats += 1;
        let load = self.loads.entry(node.to_owned()).or_default();
        let (beside, alone) = (load.running, load.backlog.count() == 0);
        load.running += 1;
        load.given += 1;
        load.backlog.add(self.seats, prefill_s, now);
        let given = load.given;
        Seat { id: self.seats, since: now, beside, alone, given, first: None, undisturbed: false }
    }

    /// The first byte of its answer comes.
    pub fn first_byte(&mut self, node: &str, seat: &mut Seat, now: Micros) {
        let Some(load) = self.loads.get_mut(node) else { return };
        load.backlog.remove(seat.id, now);
        if seat.first.is_none() {
            seat.first = Some((now, load.running.saturating_sub(1)));
            seat.undisturbed = seat.alone && load.given == seat.given;
        }
    }

    /// It leaves the node.
    pub fn stand(&mut self, node: &str, seat: &Seat, now: Micros) {
        let Some(load) = self.loads.get_mut(node) else { return };
        load.backlog.remove(seat.id, now);
        load.running = load.running.saturating_sub(1);
        if load.running == 0 {
            self.loads.remove(node);
        }
    }

    /// Requests at a node that went there from here.
    pub fn running(&self, node: &str) -> u32 {
        self.loads.get(node).map_or(0, |load| load.running)
    }

    /// Seconds until their prompts are computed.
    pub fn queue_s(&self, node: &str, now: Micros) -> f64 {
        self.loads.get(node).map_or(0.0, |load| load.backlog.seconds(now))
    }

    /// What an answer of any node teaches about prompts and answers.
    pub fn on_answer(&mut self, told: &Told) {
        if told.prompt >= 64 && told.prompt_bytes > 0 {
            let bytes = told.prompt_bytes as f64 / told.prompt as f64;
            self.bytes += FRESH * (bytes.clamp(BYTES_LEAST, BYTES_MOST) - self.bytes);
        }
        self.words += FRESH * (told.words as f64 - self.words);
    }

    /// What an answer of the own engine teaches about its speeds: `terms` is what was foretold.
    pub fn on_own_answer(&mut self, seat: &Seat, terms: Option<&Terms>, told: &Told, end: Micros) {
        let Some((first, beside)) = seat.first else { return };
        let seconds = |span: Duration| span.as_secs_f64();
        let ttft = seconds(first.since(seat.since));
        if let Some(terms) = terms {
            self.learner.on_first_token(terms.ttft_s(), ttft);
        }
        let load_s = terms.map_or(0.0, |terms| terms.load_s);
        if seat.undisturbed && load_s < LOADING * ttft {
            let count = |tokens: u64| u32::try_from(tokens).unwrap_or(u32::MAX);
            self.learner.on_prefill(Prefill {
                uncached: count(told.prompt.saturating_sub(told.cached)),
                cached: count(told.cached),
                running: seat.beside,
                seconds: ttft - load_s,
            });
        }
        let running = f64::from(seat.beside + beside) / 2.0 + 1.0;
        let tokens = told.words.saturating_sub(1);
        self.learner.on_decode(Decode { tokens, running, seconds: seconds(end.since(first)) });
    }

    /// What this box can do now.
    pub fn speeds(&self) -> Speeds {
        self.learner.speeds().at_clock(self.clock)
    }

    /// Nothing before this box has shown what it can.
    pub fn learned(&self) -> Option<Speeds> {
        self.learner.is_taught().then(|| self.speeds())
    }

    pub fn links(&self) -> Links {
        self.links
    }

    pub fn has_drifted(&self) -> bool {
        self.learner.has_drifted()
    }

    /// Bias and size of what was foretold wrongly, as shares.
    pub fn residual(&self) -> (f64, f64) {
        self.learner.residual()
    }

    /// Words that an answer is expected to have.
    pub fn words(&self, most: Option<u64>) -> f64 {
        most.map_or(self.words, |most| self.words.min(most as f64)).max(1.0)
    }

    /// Tokens that so many bytes of a prompt are, about.
    pub fn tokens(&self, bytes: u64) -> u32 {
        (bytes as f64 / self.bytes).round().min(f64::from(u32::MAX)) as u32
    }

    /// The session goes on with a prompt of so many bytes, `known` of which were in a prompt before. Whether the
    /// conversation was cut short since.
    pub fn goes_on(&mut self, session: u64, bytes: u64, known: u64) -> bool {
        let before = self.sessions.insert(session, bytes);
        if before.is_none() {
            self.oldest.push_back(session);
        }
        if self.sessions.len() > SESSIONS_MAX
            && let Some(oldest) = self.oldest.pop_front()
        {
            self.sessions.remove(&oldest);
        }
        before.is_some_and(|before| known.saturating_mul(100) < before.saturating_mul(COMPACTED))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: f64) -> Micros {
        Micros((seconds * 1e6) as u64)
    }

    fn told(prompt: u64, cached: u64, words: u64) -> Told {
        Told { prompt, cached, words, prompt_bytes: prompt * 3 }
    }

    #[test]
    fn a_prompt_is_in_the_backlog_until_its_first_byte_and_a_request_until_it_leaves() {
        let mut book = Book::new(Speeds::default());
        let mut one = book.sit("a", 4.0, at(0.0));
        let two = book.sit("a", 2.0, at(1.0));
        assert_eq!((book.running("a"), book.queue_s("a", at(1.0)), book.running("b")), (2, 5.0, 0));
        book.first_byte("a", &mut one, at(2.0));
        assert_eq!((book.running("a"), book.queue_s("a", at(2.0))), (2, 2.0));
        book.stand("a", &two, at(3.0));
        book.stand("a", &one, at(4.0));
        assert_eq!((book.running("a"), book.queue_s("a", at(4.0))), (0, 0.0));
        assert!(book.loads.is_empty());
    }

    #[test]
    fn only_a_prompt_that_was_alone_teaches_how_fast_prompts_are_computed() {
        let mut book = Book::new(Speeds::default());
        let prior = book.speeds().rho;
        let run = |book: &mut Book, begin: f64, disturbed: bool| {
            let mut seat = book.sit("a", 1.0, at(begin));
            let other = disturbed.then(|| book.sit("a", 1.0, at(begin + 1.0)));
            book.first_byte("a", &mut seat, at(begin + 10.0));
            book.on_own_answer(&seat, None, &told(8500, 0, 1), at(begin + 10.0));
            other.iter().for_each(|other| book.stand("a", other, at(begin + 11.0)));
            book.stand("a", &seat, at(begin + 11.0));
        };
        (0..40).for_each(|n| run(&mut book, f64::from(n) * 20.0, true));
        assert_eq!(book.speeds().rho, prior);
        (40..80).for_each(|n| run(&mut book, f64::from(n) * 20.0, false));
        assert!((book.speeds().rho / 850.0 - 1.0).abs() < 0.1, "{:?}", book.speeds());
        book.set_clock(0.5);
        assert!((book.speeds().rho / 425.0 - 1.0).abs() < 0.1);
    }

    #[test]
    fn bytes_of_a_token_and_words_of_an_answer_are_learned() {
        let mut book = Book::new(Speeds::default());
        assert_eq!((book.tokens(4000), book.words(None), book.words(Some(7))), (1000, 130.0, 7.0));
        (0..200).for_each(|_| book.on_answer(&told(1000, 0, 40)));
        assert!((f64::from(book.tokens(3000)) - 1000.0).abs() < 5.0 && (book.words(None) - 40.0).abs() < 1.0);
    }

    #[test]
    fn a_conversation_that_shares_little_with_its_last_turn_was_cut_short() {
        let mut book = Book::new(Speeds::default());
        assert!(!book.goes_on(1, 1000, 0), "the first turn");
        assert!(!book.goes_on(1, 1500, 1000));
        assert!(book.goes_on(1, 700, 300));
        assert!(!book.goes_on(2, 10, 0), "another one");
        for session in 10..10 + 2 * SESSIONS_MAX as u64 {
            book.goes_on(session, 1, 1);
        }
        assert!(book.sessions.len() <= SESSIONS_MAX && book.oldest.len() <= SESSIONS_MAX);
    }
}
