//! Series of the cluster, made once per node.

use prometheus::{IntCounter, IntCounterVec, IntGauge};

use crate::meter::Meter;

#[derive(Clone, Debug)]
pub struct Metrics {
    pub connected: IntGauge,
    pub keys: IntGauge,
    pub sessions: IntCounter,
    pub refused: IntCounterVec,
    pub resyncs: IntCounter,
    pub stale: IntCounter,
    pub over: IntCounter,
    pub malformed: IntCounter,
    pub relays: IntCounterVec,
}

impl Metrics {
    pub fn new(meter: &Meter) -> Self {
        let refused = meter.counters(
            "cluster_joins_refused_total",
            "Nodes that were not let in, by reason.",
            &["reason"],
        );
        for reason in ["unknown", "used", "expired", "stranger", "version", "crowd", "name"] {
            refused.with_label_values(&[reason]);
        }
        Self {
            connected: meter.gauge("cluster_peers_connected", "Other nodes with a live session."),
            keys: meter.gauge("cluster_peer_keys", "Rows that other nodes are known to hold."),
            sessions: meter.counter("cluster_sessions_total", "Sessions with other nodes that began."),
            refused,
            resyncs: meter.counter(
                "cluster_resyncs_total",
                "Times another node's index was asked for again because a part was missing.",
            ),
            stale: meter.counter(
                "cluster_stale_words_total",
                "Messages of an earlier generation of a node that were dropped.",
            ),
            over: meter.counter(
                "cluster_keys_over_limit_total",
                "Keys of other nodes that were not kept because the index of that node was full.",
            ),
            malformed: meter.counter(
                "cluster_malformed_total",
                "Connections between nodes closed because of what was sent on them.",
            ),
            relays: meter.counters(
                "cluster_relays_total",
                "Streams relayed between nodes, by direction.",
                &["direction"],
            ),
        }
    }
}
