//! Metrics: one registry per process, handed down; each module keeps a plain struct of the series it owns.
//!
//! Names are `sparkkv_<module>_<what>_<unit>[_total]`. There is no global registry: a test makes its own, and two
//! nodes in one process do not share counters.

use prometheus::{
    Encoder, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry, TextEncoder,
};

/// Where series are registered. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Meter(Registry);

/// Seconds from half a millisecond to two minutes: time to first token and loads both fit.
pub const SECONDS: [f64; 18] = [
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0,
    120.0,
];

const TWICE: &str = "each series is registered once, at start";

impl Meter {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn counter(&self, name: &str, help: &str) -> IntCounter {
        let c = IntCounter::new(format!("sparkkv_{name}"), help).expect("a constant, valid name");
        self.0.register(Box::new(c.clone())).expect(TWICE);
        c
    }

    pub fn counters(&self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        let c = IntCounterVec::new(Opts::new(format!("sparkkv_{name}"), help), labels)
            .expect("a constant, valid name");
        self.0.register(Box::new(c.clone())).expect(TWICE);
        c
    }

    pub fn gauge(&self, name: &str, help: &str) -> IntGauge {
        let g = IntGauge::new(format!("sparkkv_{name}"), help).expect("a constant, valid name");
        self.0.register(Box::new(g.clone())).expect(TWICE);
        g
    }

    pub fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
        let g = IntGaugeVec::new(Opts::new(format!("sparkkv_{name}"), help), labels)
            .expect("a constant, valid name");
        self.0.register(Box::new(g.clone())).expect(TWICE);
        g
    }

    pub fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> Histogram {
        let options = HistogramOpts::new(format!("sparkkv_{name}"), help).buckets(buckets.to_vec());
        let h = Histogram::with_opts(options).expect("a constant, valid name");
        self.0.register(Box::new(h.clone())).expect(TWICE);
        h
    }

    pub fn histograms(&self, name: &str, help: &str, buckets: &[f64], labels: &[&str]) -> HistogramVec {
        let options = HistogramOpts::new(format!("sparkkv_{name}"), help).buckets(buckets.to_vec());
        let h = HistogramVec::new(options, labels).expect("a constant, valid name");
        self.0.register(Box::new(h.clone())).expect(TWICE);
        h
    }

    /// All series in Prometheus' text format.
    pub fn text(&self) -> String {
        let mut out = Vec::new();
        TextEncoder::new().encode(&self.0.gather(), &mut out).expect("writing to memory");
        String::from_utf8(out).expect("the text format is UTF-8")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_meters_do_not_share_series() {
        let (one, two) = (Meter::new(), Meter::new());
        one.counter("test_rows_total", "rows").inc_by(3);
        two.counter("test_rows_total", "rows");
        assert!(one.text().contains("sparkkv_test_rows_total 3"));
        assert!(two.text().contains("sparkkv_test_rows_total 0"));
    }
}
