//! The clients: each session asks, reads its stream to the end, thinks, and asks again. Times are the engine's own:
//! what the clock on the wall says, times how much faster the engines run.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::join_all;
use http::{Request as Head, header};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client as Pool;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use parking_lot::Mutex;

use super::workload::{Agent, Next, Request, Session};

/// Longest that one answer may take on the wall: a router that loses a request is not waited for without end.
const ANSWER: Duration = Duration::from_secs(300);

/// What came of one request, in seconds of the engine's time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Answer {
    pub cold: bool,
    /// Since the run began.
    pub begin: f64,
    pub ttft: f64,
    pub whole: f64,
    pub prompt: u64,
    pub cached: u64,
}

/// Between two words of one stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gap {
    /// Since the run began.
    pub end: f64,
    pub seconds: f64,
}

/// Everything that was seen.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    pub answers: Vec<Answer>,
    pub gaps: Vec<Gap>,
    pub errors: Vec<String>,
}

/// One crowd of clients. Cheap to clone.
#[derive(Clone)]
pub struct Crowd {
    to: SocketAddr,
    pool: Pool<HttpConnector, Full<Bytes>>,
    begin: Instant,
    /// Times faster than the box would be.
    clock: f64,
    seen: Arc<Mutex<Seen>>,
}

impl Crowd {
    pub fn new(to: SocketAddr, clock: f64) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let pool = Pool::builder(TokioExecutor::new()).build(connector);
        Self { to, pool, begin: Instant::now(), clock, seen: Arc::default() }
    }

    /// All sessions, side by side, and one prompt that comes after so many seconds. What was seen, and how long the
    /// sessions took.
    pub async fn run(&self, sessions: Vec<Session>, cold: Option<(f64, Request)>) -> (Seen, f64) {
        let asking = join_all(sessions.into_iter().map(|session| self.session(session)));
        let alone = async {
            if let Some((after, request)) = &cold {
                self.think(*after).await;
                self.ask(request, true).await;
            }
        };
        let timed = async {
            asking.await;
            self.now()
        };
        let (makespan, ()) = tokio::join!(timed, alone);
        (std::mem::take(&mut *self.seen.lock()), makespan)
    }

    async fn session(&self, mut session: Session) {
        loop {
            match session.next() {
                Next::Ask(request) => self.ask(&request, false).await,
                Next::Spawn(agents) => {
                    join_all(agents.into_iter().map(|agent| self.agent(agent))).await;
                }
                Next::Think(seconds) => self.think(seconds).await,
                Next::End => return,
            }
        }
    }

    async fn agent(&self, mut agent: Agent) {
        loop {
            match agent.next() {
                Next::Ask(request) => self.ask(&request, false).await,
                Next::Think(seconds) => self.think(seconds).await,
                Next::Spawn(_) | Next::End => return,
            }
        }
    }

    /// Seconds of the engine's time since the run began.
    fn now(&self) -> f64 {
        self.begin.elapsed().as_secs_f64() * self.clock
    }

    async fn think(&self, seconds: f64) {
        tokio::time::sleep(Duration::from_secs_f64(seconds / self.clock)).await;
    }

    async fn ask(&self, request: &Request, cold: bool) {
        let asked = tokio::time::timeout(ANSWER, self.stream(request, cold));
        let answer = asked.await.unwrap_or_else(|_| Err("no whole answer in time".to_owned()));
        let mut seen = self.seen.lock();
        match answer {
            Ok(answer) => seen.answers.push(answer),
            Err(why) => seen.errors.push(why),
        }
    }

    async fn stream(&self, request: &Request, cold: bool) -> Result<Answer, String> {
        let begin = self.now();
        let head = Head::post(format!("http://{}/v1/chat/completions", self.to))
            .header(header::CONTENT_TYPE, "application/json")
            .header("x-session-id", &request.session)
            .body(Full::new(Bytes::from(request.body.clone())))
            .map_err(|error| error.to_string())?;
        let response = self.pool.request(head).await.map_err(|error| error.to_string())?;
        let status = response.status();
        let mut body = response.into_body();
        if !status.is_success() {
            let text = body.collect().await.map(|all| all.to_bytes()).unwrap_or_default();
            return Err(format!("{status}: {}", String::from_utf8_lossy(&text[..text.len().min(200)])));
        }
        let mut reading = Reading::default();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| error.to_string())?;
            if let Some(data) = frame.data_ref() {
                self.heard(&mut reading, data, cold);
            }
        }
        let Reading { first, usage: Some((prompt, cached)), done: true, .. } = reading else {
            return Err("the stream ended in its middle".to_owned());
        };
        let ttft = first.ok_or("an answer without a word")? - begin;
        Ok(Answer { cold, begin, ttft, whole: self.now() - begin, prompt, cached })
    }

    /// Bytes of a stream have come.
    fn heard(&self, reading: &mut Reading, data: &[u8], cold: bool) {
        let now = self.now();
        let words = reading.take(data);
        if words == 0 {
            return;
        }
        if let Some(last) = reading.last.replace(now)
            && !cold
        {
            self.seen.lock().gaps.push(Gap { end: now, seconds: now - last });
        }
        reading.first.get_or_insert(now);
    }
}

/// A stream as far as it was read.
#[derive(Debug, Default)]
struct Reading {
    line: Vec<u8>,
    first: Option<f64>,
    last: Option<f64>,
    usage: Option<(u64, u64)>,
    done: bool,
}

impl Reading {
    /// Takes more bytes. Words that were in them.
    fn take(&mut self, data: &[u8]) -> usize {
        let mut words = 0;
        for &byte in data {
            if byte != b'\n' {
                self.line.push(byte);
                continue;
            }
            let line = std::mem::take(&mut self.line);
            let Some(event) = line.strip_prefix(b"data: ") else { continue };
            if event.starts_with(b"[DONE]") {
                self.done = true;
                continue;
            }
            let Ok(event) = serde_json::from_slice::<serde_json::Value>(event) else { continue };
            let word = event["choices"][0]["delta"]["content"].as_str().unwrap_or_default();
            words += usize::from(!word.is_empty());
            if let Some(prompt) = event["usage"]["prompt_tokens"].as_u64() {
                let cached = &event["usage"]["prompt_tokens_details"]["cached_tokens"];
                self.usage = Some((prompt, cached.as_u64().unwrap_or(0)));
            }
        }
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_read_wherever_it_is_cut() {
        let text = concat!(
            ": waiting\n\n",
            "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n",
            "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\ndata: {\"choices\":[{\"delta\":{\"content\":\"b\"}}]}\n\n",
            "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\n",
            "data: [DONE]\n\n"
        );
        for size in [1, 7, text.len()] {
            let mut reading = Reading::default();
            let words: usize = text.as_bytes().chunks(size).map(|part| reading.take(part)).sum();
            assert_eq!((words, reading.usage, reading.done), (2, Some((9, 4)), true), "{size}");
        }
    }
}
