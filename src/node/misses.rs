//! Looks at every prompt when its answer is over: was it computed before, and why was it computed again?
//!
//! Bodies are read once more for that, beside the requests and away from their way. What is remembered of them are
//! hashes and lengths.

use bytes::Bytes;
use prometheus::{Histogram, IntCounterVec};

use super::Parts;
use crate::meter::Meter;
use crate::observe::requests::Missed;
use crate::router::{Cause, Conversations, Endpoint, Miss, Outcome, Outline, Turn};

/// Smaller bodies are no prompt that is worth a word.
const BODY_MIN: usize = 4 << 10;

/// Larger ones are read on a thread that may compute: reading takes about a millisecond for so many bytes.
const BODY_HERE: usize = 128 << 10;

/// Seconds of a clock are of no use here: tokens, from a block to the largest window.
const TOKENS: [f64; 8] = [256.0, 1024.0, 4096.0, 16_384.0, 32_768.0, 65_536.0, 131_072.0, 262_144.0];

pub struct Misses {
    conversations: Conversations,
    turns: IntCounterVec,
    tokens: IntCounterVec,
    size: Histogram,
}

impl Misses {
    pub fn new(meter: &Meter) -> Self {
        let turns = "Turns of conversations that were computed again, by what made them";
        let tokens = "Prompt tokens that the turn before had computed and this one computed again, by cause";
        let size = "Tokens that one turn computed again";
        let new = Self {
            conversations: Conversations::default(),
            turns: meter.counters("missed_turns_total", turns, &["cause"]),
            tokens: meter.counters("missed_tokens_total", tokens, &["cause"]),
            size: meter.histogram("missed_tokens", size, &TOKENS),
        };
        for cause in Cause::ALL {
            // Zero is a word, too: a series that is not there says nothing.
            new.turns.with_label_values(&[cause.label()]).inc_by(0);
            new.tokens.with_label_values(&[cause.label()]).inc_by(0);
        }
        new
    }

    /// Why a request that is over was computed again, if it was.
    pub async fn look(&mut self, parts: &Parts, outcome: &Outcome) -> Option<Missed> {
        let usage = outcome.usage.filter(|_| outcome.status == 200)?;
        let count = |tokens: Option<u64>| u32::try_from(tokens?).ok();
        let (prompt, cached) = (count(usage.prompt_tokens)?, count(usage.cached_tokens)?);
        let outline = read(outcome.endpoint, outcome.body.clone()?).await?;
        // Of another box's engine neither the rows' namespace nor its life is known.
        let own = outcome.node.as_deref() == Some(parts.router.name());
        let engine = parts.door.engine().filter(|_| own);
        let grain =
            engine.as_ref().and_then(|engine| engine.hello.groups.iter().map(|g| g.tokens_per_row).max());
        let (namespace, life) = engine
            .map(|engine| (hex::encode(engine.namespace.0), engine.hello.engine_id))
            .unwrap_or_default();
        let end = parts.clock.now();
        let turn = Turn {
            outline,
            session: outcome.session,
            node: outcome.node.clone()?,
            namespace,
            engine: life,
            begin: end.minus(outcome.duration),
            end,
            prompt,
            cached,
        };
        let miss = self.conversations.add(turn, grain.unwrap_or(0))?;
        self.count(&miss);
        tracing::info!(
            id = outcome.id,
            cause = miss.cause.label(),
            tokens = miss.tokens,
            why = miss.why,
            "a turn was computed again"
        );
        let Miss { cause, tokens, why, advice } = miss;
        Some(Missed { cause: cause.label().to_owned(), tokens, why, advice })
    }

    fn count(&self, miss: &Miss) {
        let cause = [miss.cause.label()];
        self.turns.with_label_values(&cause).inc();
        self.tokens.with_label_values(&cause).inc_by(u64::from(miss.tokens));
        self.size.observe(f64::from(miss.tokens));
    }
}

async fn read(endpoint: Endpoint, body: Bytes) -> Option<Outline> {
    match body.len() {
        ..BODY_MIN => None,
        BODY_MIN..=BODY_HERE => Outline::read(endpoint, &body),
        _ => tokio::task::spawn_blocking(move || Outline::read(endpoint, &body)).await.ok()?,
    }
}
