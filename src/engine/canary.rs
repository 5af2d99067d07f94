//! The check at every engine start that a restored prompt is the prompt that was computed.
//!
//! A checksum proves that a row comes back as it was captured, not that the right bytes were captured. So a prompt
//! nobody has seen runs four times: computed, twice from the engine's own cache, and, after that cache and the rows are
//! emptied, restored from the drive. Text and log-probabilities must agree, and the engine's own count must say that
//! the later runs really reused something; a check that proved nothing is called inconclusive, never passed.
//!
//! Run it before the engine is opened to clients: it empties the cache, and other requests would change the shapes
//! it compares.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::http::{Error, Http};

/// Tokens that each run generates.
pub const MAX_TOKENS: u32 = 16;

/// Blocks of the prompt: enough that a shifted or swapped block has a neighbour to be confused with.
const BLOCKS: u32 = 4;

/// Allowed difference of a log-probability between two runs that computed the same tail on the same prefix, beside
/// [`NOISE_TIMES`] what two runs from the engine's own cache differ by. On a CPU such runs are equal bit by bit; a GPU
/// may sum in another order. Measured with the tiny model: one dropped page of 4 KiB in one row moves it by 0.03 to
/// 1.0, a row of zeros or another row by 0.2 to 2.8.
const SAME_SHAPE: f64 = 0.01;
const NOISE_TIMES: f64 = 4.0;

/// Allowed when one run computed the whole prompt and the other only its tail: bfloat16 keeps 8 bits, and the two
/// shapes round differently in every layer.
const OTHER_SHAPE: f64 = 0.35;

/// One run: the prompt is a few blocks, but a cold engine on a CPU compiles first.
const RUN_LIMIT: Duration = Duration::from_secs(180);

/// The reset is refused while a store is under way.
const RESET_TRIES: u32 = 60;
const RESET_PAUSE: Duration = Duration::from_millis(500);

/// How often the prompt is computed, stored and reset until it comes back.
const ROUNDS: u32 = 3;

/// What came of it.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// All runs agree, and this many tokens really were restored.
    Agree { cached: u32 },
    /// The restored run is another one: the tier must be off.
    Differs(String),
    /// Nothing was proved; why.
    Inconclusive(String),
}

/// What to check.
#[derive(Clone, Copy, Debug)]
pub struct Order<'a> {
    /// URL of the engine, without a path.
    pub url: &'a str,
    pub served_name: &'a str,
    /// Tokens of the largest row of any group.
    pub row_tokens: u32,
    pub max_model_len: u32,
    /// Makes the prompt: the engine's id, which never comes back, so no drive holds it.
    pub seed: &'a str,
}

/// Makes the engine take a step: one token of a prompt that is too short for a row. An engine without requests does
/// not run its plugin, which then neither notices that the node before is gone nor dials the new one.
pub async fn knock(url: &str, served_name: &str) {
    let ask = json!({ "model": served_name, "prompt": "a", "max_tokens": 1, "temperature": 0 });
    if let Err(error) = Http::new(url).post_json("/v1/completions", Some(&ask), RUN_LIMIT).await {
        tracing::info!(%error, "the engine was asked for a step and gave none");
    }
}

/// Runs the check.
pub async fn run(order: Order<'_>) -> Verdict {
    match check(order).await {
        Ok(verdict) => verdict,
        Err(error) => Verdict::Inconclusive(format!("the engine {error}")),
    }
}

async fn check(order: Order<'_>) -> Result<Verdict, Error> {
    let http = Http::new(order.url);
    let wanted = BLOCKS * order.row_tokens + order.row_tokens / 2 + 7;
    let tokens = wanted.min(order.max_model_len.saturating_sub(MAX_TOKENS + 1));
    if tokens <= order.row_tokens {
        return Ok(Verdict::Inconclusive(format!(
            "a prompt of one row has {} tokens, the model takes {}",
            order.row_tokens, order.max_model_len
        )));
    }
    let prompt = prompt(&http, &order, tokens).await;
    let computed = Run::of(&http, &order, &prompt).await?;
    if computed.cached > 0 {
        return Ok(Verdict::Inconclusive(format!("a new prompt had {} cached tokens", computed.cached)));
    }
    let device = Run::of(&http, &order, &prompt).await?;
    let again = Run::of(&http, &order, &prompt).await?;
    if device.cached == 0 || again.cached == 0 {
        return Ok(Verdict::Inconclusive("a repeated prompt was computed again".into()));
    }
    if let Some(difference) = difference(&computed, &device, OTHER_SHAPE) {
        return Ok(Verdict::Differs(format!("computed and from the engine's own cache: {difference}")));
    }
    for _ in 0..ROUNDS {
        if let Err(why) = reset(&http).await? {
            return Ok(Verdict::Inconclusive(why));
        }
        let restored = Run::of(&http, &order, &prompt).await?;
        if restored.cached > 0 {
            return Ok(judge(&computed, &[device, again], &restored));
        }
    }
    Ok(Verdict::Inconclusive("nothing came back from the drive".into()))
}

fn judge(computed: &Run, device: &[Run; 2], restored: &Run) -> Verdict {
    let same = if device[0].cached == restored.cached {
        (SAME_SHAPE + NOISE_TIMES * apart(&device[0], &device[1])).min(OTHER_SHAPE)
    } else {
        OTHER_SHAPE
    };
    for (what, other, allowed) in
        [("from the engine's own cache", &device[0], same), ("computed", computed, OTHER_SHAPE)]
    {
        if let Some(difference) = difference(other, restored, allowed) {
            return Verdict::Differs(format!("{what} and restored: {difference}"));
        }
    }
    Verdict::Agree { cached: restored.cached }
}

/// Largest difference of a log-probability between two runs, over the tokens before they part.
fn apart(one: &Run, two: &Run) -> f64 {
    let pairs = one.tokens.iter().zip(&two.tokens).take_while(|(a, b)| a.text == b.text);
    pairs.map(|(a, b)| (a.logprob - b.logprob).abs()).fold(0.0, f64::max)
}

/// Token ids where the engine tokenizes for us, else text: each word is at least one token.
async fn prompt(http: &Http, order: &Order<'_>, tokens: u32) -> Value {
    let text = words(order.seed, tokens);
    let ask = json!({"model": order.served_name, "prompt": text});
    let answer = http.post_json("/tokenize", Some(&ask), RUN_LIMIT).await.unwrap_or_default();
    let keep = usize::try_from(tokens).unwrap_or(usize::MAX);
    match answer["tokens"].as_array() {
        Some(ids) if ids.len() >= keep => json!(ids[..keep]),
        _ => json!(text),
    }
}

fn words(seed: &str, count: u32) -> String {
    let mut random = StdRng::from_seed(Sha256::digest(seed).into());
    let mut word = || -> String {
        (0..random.random_range(2..7)).map(|_| char::from(random.random_range(b'a'..=b'z'))).collect()
    };
    (0..count).map(|_| word()).collect::<Vec<_>>().join(" ")
}

/// Empties the engine's cache and the rows, so that only the drive is left. The inner error says why it cannot be.
async fn reset(http: &Http) -> Result<Result<(), String>, Error> {
    for _ in 0..RESET_TRIES {
        let answer = http.post_json("/reset_prefix_cache?reset_external=true", None, RUN_LIMIT).await?;
        // Engines before the answer had a body said nothing when it worked.
        if answer.is_null() || answer["success"] == true {
            return Ok(Ok(()));
        }
        tokio::time::sleep(RESET_PAUSE).await;
    }
    Ok(Err("the engine's cache could not be emptied".into()))
}

/// What one run said.
#[derive(Clone, Debug, PartialEq)]
struct Run {
    cached: u32,
    tokens: Vec<Token>,
}

#[derive(Clone, Debug, PartialEq)]
struct Token {
    text: String,
    logprob: f64,
    /// The best tokens at this place.
    top: Vec<(String, f64)>,
}

impl Run {
    async fn of(http: &Http, order: &Order<'_>, prompt: &Value) -> Result<Self, Error> {
        let ask = json!({
            "model": order.served_name,
            "prompt": prompt,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "logprobs": 5,
            "ignore_eos": true,
        });
        let answer = http.post_json("/v1/completions", Some(&ask), RUN_LIMIT).await?;
        Self::parse(&answer).ok_or(Error::NotJson)
    }

    fn parse(answer: &Value) -> Option<Self> {
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
        let said = &answer["choices"][0]["logprobs"];
        let texts = said["tokens"].as_array()?;
        let tokens = texts.iter().enumerate().map(|(number, text)| {
            let top = said["top_logprobs"][number].as_object();
            let top = top.into_iter().flatten().filter_map(|(t, l)| Some((t.clone(), l.as_f64()?)));
            Some(Token {
                text: text.as_str()?.to_owned(),
                logprob: said["token_logprobs"][number].as_f64()?,
                top: top.collect(),
            })
        });
        let tokens: Vec<Token> = tokens.collect::<Option<_>>()?;
        (!tokens.is_empty()).then_some(Self { cached: u32::try_from(cached).ok()?, tokens })
    }
}

/// Where two runs part, if they do by more than `allowed`. After two tokens that were as good as each other the runs
/// go different ways with right: nothing after it is compared.
fn difference(one: &Run, two: &Run, allowed: f64) -> Option<String> {
    if one.tokens.len() != two.tokens.len() {
        return Some(format!("{} and {} tokens", one.tokens.len(), two.tokens.len()));
    }
    for (number, (a, b)) in one.tokens.iter().zip(&two.tokens).enumerate() {
        if a.text == b.text {
            let apart = (a.logprob - b.logprob).abs();
            // Not "greater": a value that is no number is a difference too.
            if apart <= allowed {
                continue;
            }
            return Some(format!("log-probability of token {number} is off by {apart:.3}"));
        }
        let as_good = |run: &Token, other: &Token| {
            run.top.iter().any(|(text, l)| *text == other.text && run.logprob - l <= allowed)
        };
        if as_good(a, b) && as_good(b, a) {
            return None;
        }
        return Some(format!("token {number} is {:?} and {:?}", a.text, b.text));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    type Sketch<'a> = (&'a str, f64, &'a [(&'a str, f64)]);

    fn run_of(tokens: &[Sketch<'_>]) -> Run {
        let token = |(text, logprob, top): &Sketch<'_>| Token {
            text: (*text).into(),
            logprob: *logprob,
            top: top.iter().map(|(t, l)| ((*t).to_owned(), *l)).collect(),
        };
        Run { cached: 512, tokens: tokens.iter().map(token).collect() }
    }

    #[test]
    fn runs_that_differ_in_a_log_probability_or_a_token_differ() {
        let a = run_of(&[("x", -1.0, &[("x", -1.0), ("y", -3.0)]), ("y", -0.5, &[])]);
        assert_eq!(difference(&a, &a, SAME_SHAPE), None);
        let off = run_of(&[("x", -1.2, &[]), ("y", -0.5, &[])]);
        assert!(difference(&a, &off, SAME_SHAPE).is_some());
        assert_eq!(difference(&a, &off, OTHER_SHAPE), None);
        let other = run_of(&[("y", -1.0, &[("y", -1.0), ("x", -3.0)]), ("y", -0.5, &[])]);
        assert!(difference(&a, &other, OTHER_SHAPE).unwrap().contains("token 0"));
        let nan = run_of(&[("x", f64::NAN, &[]), ("y", -0.5, &[])]);
        assert!(difference(&a, &nan, OTHER_SHAPE).is_some());
        assert!(difference(&a, &run_of(&[("x", -1.0, &[])]), OTHER_SHAPE).is_some());
    }

    #[test]
    fn a_tie_may_fall_either_way_and_ends_the_comparison() {
        let a = run_of(&[("x", -1.0, &[("x", -1.0), ("y", -1.005)]), ("p", -0.5, &[])]);
        let b = run_of(&[("y", -1.0, &[("y", -1.0), ("x", -1.005)]), ("q", -4.5, &[])]);
        assert_eq!(difference(&a, &b, SAME_SHAPE), None);
    }

    #[test]
    fn a_restored_run_is_held_closer_to_the_cached_one_than_to_the_computed_one() {
        let at = |logprob| run_of(&[("x", logprob, &[])]);
        let device = |noise: f64| [at(-1.0), at(-1.0 - noise)];
        let agree = |cached| Verdict::Agree { cached };
        assert_eq!(judge(&at(-1.2), &device(0.0), &at(-1.0)), agree(512));
        assert!(matches!(judge(&at(-1.0), &device(0.0), &at(-1.02)), Verdict::Differs(_)));
        let shorter = Run { cached: 384, ..at(-1.2) };
        assert_eq!(judge(&at(-1.0), &device(0.0), &shorter), agree(384));
        assert_eq!(
            judge(&at(-1.0), &device(0.01), &at(-1.02)),
            agree(512),
            "an engine that is as noisy itself"
        );
        assert!(
            matches!(judge(&at(-1.0), &device(5.0), &at(-1.5)), Verdict::Differs(_)),
            "noise excuses little"
        );
    }

    #[test]
    fn prompts_of_two_starts_share_nothing_and_one_start_repeats_itself() {
        assert_eq!(words("spark-a-1", 50), words("spark-a-1", 50));
        assert_ne!(words("spark-a-1", 50)[..20], words("spark-a-2", 50)[..20]);
        assert_eq!(words("s", 600).split(' ').count(), 600);
    }

    #[test]
    fn an_answer_without_log_probabilities_proves_nothing() {
        assert_eq!(Run::parse(&json!({"choices": [{"text": "x", "logprobs": null}]})), None);
        let answer = json!({
            "choices": [{"logprobs": {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5}]}}],
            "usage": {"prompt_tokens_details": {"cached_tokens": 7}},
        });
        assert_eq!(Run::parse(&answer).unwrap().cached, 7);
    }
}
