//! What agents do: sessions that grow turn by turn, call sub-agents and are compacted. Pure: everything follows from a
//! seed and from nothing else, so that every router meets the same requests; only when they come depends on its answers.
//!
//! The sizes are those of router.md's matrix: 8,000 tokens of system prompt and tools that all sessions share, turns of
//! 300 to 6,000 tokens, sub-agents in one turn of five (half of them branch off their parent's context), a summary in
//! place of everything beyond 48,000 tokens.

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

use super::super::router::session::Words;

/// What is sent.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Turns of a session.
    pub turns: usize,
    /// Tokens of the system prompt.
    pub system: usize,
    /// Tokens at which a conversation is replaced by a summary.
    pub compact: usize,
    /// Bytes of one token, as the engine counts.
    pub bytes_per_token: f64,
}

/// One request.
#[derive(Clone, Debug)]
pub struct Request {
    pub session: String,
    pub body: Vec<u8>,
}

/// What a session does next.
pub enum Next {
    Ask(Request),
    /// Sub-agents, side by side; the session goes on when all are done.
    Spawn(Vec<Agent>),
    /// Seconds of the engine's time.
    Think(f64),
    End,
}

/// A sub-agent: three questions.
pub struct Agent {
    dice: StdRng,
    name: String,
    messages: Vec<Value>,
    sizes: Sizes,
    asked: usize,
    thought: bool,
}

/// One session.
pub struct Session {
    dice: StdRng,
    seed: u64,
    number: usize,
    messages: Vec<Value>,
    sizes: Sizes,
    turn: usize,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Arrive,
    Ask,
    Spawn,
    Grow,
}

const AGENT_TURNS: usize = 3;

fn text(dice: &mut StdRng, sizes: &Sizes, tokens: usize) -> String {
    Words::new(dice.random()).text((tokens as f64 * sizes.bytes_per_token) as usize)
}

/// The system prompt of the sessions (0), or of sub-agents that begin anew (1).
fn system(sizes: &Sizes, which: u64) -> Value {
    let text = Words::new(100 + which).text((sizes.system as f64 * sizes.bytes_per_token) as usize);
    json!({"role": "system", "content": text})
}

fn user(text: String) -> Value {
    json!({"role": "user", "content": text})
}

fn assistant(text: String) -> Value {
    json!({"role": "assistant", "content": text})
}

fn request(session: String, messages: &[Value], words: u32) -> Request {
    let body = json!({
        "model": "mock", "messages": messages, "max_tokens": words, "ignore_eos": true, "stream": true,
        "stream_options": {"include_usage": true},
    });
    Request { session, body: body.to_string().into_bytes() }
}

/// A prompt that nobody has seen, of so many tokens.
pub fn cold(sizes: &Sizes, seed: u64, tokens: usize) -> Request {
    let mut dice = StdRng::seed_from_u64(seed ^ 0xc01d);
    let question = text(&mut dice, sizes, tokens);
    request("cold".to_owned(), &[user(question)], 16)
}

impl Session {
    pub fn new(seed: u64, number: usize, sizes: Sizes) -> Self {
        let mut dice = StdRng::seed_from_u64(seed * 1000 + number as u64);
        let tokens = dice.random_range(500..4000);
        let messages = vec![system(&sizes, 0), user(text(&mut dice, &sizes, tokens))];
        Self { dice, seed, number, messages, sizes, turn: 0, stage: Stage::Arrive }
    }

    pub fn next(&mut self) -> Next {
        match self.stage {
            Stage::Arrive => {
                self.stage = Stage::Ask;
                // They do not all come at one moment.
                Next::Think(self.dice.random_range(0.0..60.0))
            }
            Stage::Ask if self.turn == self.sizes.turns => Next::End,
            Stage::Ask => {
                self.stage = Stage::Spawn;
                let words = self.dice.random_range(60..240);
                Next::Ask(request(format!("s{}", self.number), &self.messages, words))
            }
            Stage::Spawn => {
                self.stage = Stage::Grow;
                let said = text(&mut self.dice, &self.sizes, 150);
                self.messages.push(assistant(said));
                if !self.dice.random_bool(0.2) {
                    return self.next();
                }
                let (count, branch) = (self.dice.random_range(2..=3), self.dice.random_bool(0.5));
                Next::Spawn((0..count).map(|n| self.agent(n, branch)).collect())
            }
            Stage::Grow => {
                self.stage = Stage::Ask;
                self.turn += 1;
                let tokens = *[300, 600, 1200, 2500, 6000].choose(&mut self.dice).unwrap_or(&600);
                let asked = text(&mut self.dice, &self.sizes, tokens);
                self.messages.push(user(asked));
                let bytes: usize =
                    self.messages.iter().map(|m| m["content"].as_str().map_or(0, str::len)).sum();
                if bytes as f64 > self.sizes.compact as f64 * self.sizes.bytes_per_token {
                    let summary = text(&mut self.dice, &self.sizes, 3000);
                    self.messages = vec![system(&self.sizes, 0), user(summary)];
                }
                Next::Think(exponential(&mut self.dice, 6.0))
            }
        }
    }

    fn agent(&self, n: usize, branch: bool) -> Agent {
        let seed = self.seed * 77_777 + (self.number * 10_000 + self.turn * 100 + n) as u64;
        let mut dice = StdRng::seed_from_u64(seed);
        let messages = match branch {
            true => {
                let task = user(text(&mut dice, &self.sizes, 400));
                [&self.messages[..], &[task]].concat()
            }
            false => vec![system(&self.sizes, 1), user(text(&mut dice, &self.sizes, 800))],
        };
        let name = format!("s{}.{}.{n}", self.number, self.turn);
        Agent { dice, name, messages, sizes: self.sizes, asked: 0, thought: true }
    }
}

impl Agent {
    pub fn next(&mut self) -> Next {
        if self.asked == AGENT_TURNS && self.thought {
            return Next::End;
        }
        if !self.thought {
            self.thought = true;
            return Next::Think(exponential(&mut self.dice, 4.0));
        }
        let words = self.dice.random_range(60..150);
        let request = request(self.name.clone(), &self.messages, words);
        let said = text(&mut self.dice, &self.sizes, 100);
        let tokens = self.dice.random_range(300..2500);
        let asked = text(&mut self.dice, &self.sizes, tokens);
        self.messages.extend([assistant(said), user(asked)]);
        (self.asked, self.thought) = (self.asked + 1, false);
        Next::Ask(request)
    }
}

/// A span with this mean.
fn exponential(dice: &mut StdRng, mean: f64) -> f64 {
    -mean * (1.0 - dice.random::<f64>()).ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: Sizes = Sizes { turns: 12, system: 200, compact: 9000, bytes_per_token: 4.0 };

    /// All bodies of a session, with those of its sub-agents.
    fn bodies(seed: u64) -> (Vec<Vec<u8>>, usize, usize) {
        let mut session = Session::new(seed, 0, SIZES);
        let (mut bodies, mut agents, mut shorter) = (Vec::new(), 0, 0);
        let mut last = 0;
        loop {
            match session.next() {
                Next::Ask(request) => {
                    shorter += usize::from(request.body.len() < last);
                    last = request.body.len();
                    bodies.push(request.body);
                }
                Next::Spawn(mut all) => all.iter_mut().for_each(|agent| {
                    agents += 1;
                    loop {
                        match agent.next() {
                            Next::Ask(request) => bodies.push(request.body),
                            Next::End => break,
                            _ => {}
                        }
                    }
                }),
                Next::Think(seconds) => assert!((0.0..200.0).contains(&seconds)),
                Next::End => return (bodies, agents, shorter),
            }
        }
    }

    #[test]
    fn the_same_seed_asks_the_same_and_another_does_not() {
        let (one, agents, _) = bodies(1);
        assert_eq!(one, bodies(1).0);
        assert_ne!(one, bodies(2).0);
        assert_eq!(one.len(), SIZES.turns + AGENT_TURNS * agents);
        let seeds =
            (1..20).map(bodies).fold((0, 0), |(a, c), (_, agents, shorter)| (a + agents, c + shorter));
        assert!(seeds.0 > 40 && seeds.1 > 5, "sub-agents and compactions happen: {seeds:?}");
    }

    #[test]
    fn turns_go_on_where_the_one_before_ended() {
        let (all, agents, shorter) = (1..400).map(bodies).find(|(_, agents, _)| *agents == 0).unwrap();
        assert_eq!(agents, 0);
        let messages = |body: &Vec<u8>| serde_json::from_slice::<Value>(body).unwrap()["messages"].clone();
        let grows = all.windows(2).filter(|pair| {
            let (a, b) = (messages(&pair[0]), messages(&pair[1]));
            b.as_array().unwrap().starts_with(a.as_array().unwrap())
        });
        assert_eq!(grows.count() + shorter, all.len() - 1);
        let cold = String::from_utf8(cold(&SIZES, 1, 1000).body).unwrap();
        assert!((3900..4400).contains(&cold.len()), "{}", cold.len());
    }
}
