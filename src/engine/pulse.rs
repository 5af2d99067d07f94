//! Whether the engine makes progress: its own counters, read in passing.
//!
//! vLLM counts its scheduler's steps in the histogram `vllm:iteration_tokens_total` and the requests it runs in the
//! gauge `vllm:num_requests_running`. A healthy engine with running requests steps many times a second; a wedged one
//! answers `/health` and stands still.

use std::time::Duration;

use super::http::{Error, Http};

/// One look at an engine's counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pulse {
    pub running: u32,
    pub waiting: u32,
    /// Grows while the engine works. None: this engine does not tell.
    pub steps: Option<u64>,
}

/// A look that takes longer than this is no look: metrics are answered from memory.
const LIMIT: Duration = Duration::from_secs(3);

impl Pulse {
    /// Reads Prometheus' text format. Series of several labels are added up.
    pub fn of(text: &str) -> Self {
        let sum = |name: &str| {
            let values = text.lines().filter_map(|line| {
                let rest = line.strip_prefix(name)?;
                (rest.starts_with(['{', ' '])).then(|| rest.rsplit(' ').next()?.parse::<f64>().ok()).flatten()
            });
            values.fold(None, |total: Option<f64>, value| Some(total.unwrap_or(0.0) + value.max(0.0)))
        };
        Self {
            running: sum("vllm:num_requests_running").unwrap_or(0.0) as u32,
            waiting: sum("vllm:num_requests_waiting").unwrap_or(0.0) as u32,
            steps: sum("vllm:iteration_tokens_total_count").map(|steps| steps as u64),
        }
    }
}

/// Asks for pulses, over one connection for as long as the engine stays where it is.
#[derive(Debug, Default)]
pub struct Finger(Option<Http>);

impl Finger {
    /// Asks the engine at `url`.
    ///
    /// # Errors
    /// When it does not answer in time or not with metrics.
    pub async fn read(&mut self, url: &str) -> Result<Pulse, Error> {
        let http = match self.0.take() {
            Some(http) if http.is_of(url) => self.0.insert(http),
            _ => self.0.insert(Http::new(url)),
        };
        let body = http.get("/metrics", LIMIT).await?;
        Ok(Pulse::of(&String::from_utf8_lossy(&body)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_vllms_counters_whatever_their_labels() {
        let text = "# HELP vllm:num_requests_running x\nvllm:num_requests_running{engine=\"0\",model_name=\"m 1\"} 2.0\n\
            vllm:num_requests_waiting{engine=\"0\"} 1.0\nvllm:num_requests_waiting_by_reason{reason=\"capacity\"} 9.0\n\
            vllm:iteration_tokens_total_count{engine=\"0\"} 400.0\nvllm:iteration_tokens_total_count{engine=\"1\"} 11.0\n";
        assert_eq!(Pulse::of(text), Pulse { running: 2, waiting: 1, steps: Some(411) });
    }

    #[test]
    fn an_engine_that_tells_nothing_has_no_steps() {
        assert_eq!(Pulse::of("nonsense\n{} 4\n"), Pulse::default());
    }
}
