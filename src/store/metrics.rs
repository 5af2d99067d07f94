//! The store's series.

use prometheus::{IntCounter, IntCounterVec, IntGauge};

use crate::meter::Meter;

#[derive(Clone, Debug)]
pub struct Metrics {
    /// Rows written.
    pub stored: IntCounter,
    /// Rows offered that were held already.
    pub held: IntCounter,
    /// Rows read and verified, for the engine.
    pub loaded: IntCounter,
    /// Rows read and verified, for a peer.
    pub served: IntCounter,
    /// Rows neither stored nor loaded, by reason.
    pub failed: IntCounterVec,
    /// Rows that were not what was written, or could not be read.
    pub damaged: IntCounter,
    pub written_bytes: IntCounter,
    pub read_bytes: IntCounter,
    pub used_bytes: IntGauge,
    pub capacity_bytes: IntGauge,
    pub rows: IntGauge,
    pub segments: IntGauge,
    pub reclaimed: IntCounter,
    /// Rows that went because room was needed.
    pub released: IntCounter,
    /// Payload bytes copied out of segments that are emptied.
    pub moved_bytes: IntCounter,
    /// Rows offered and not kept, because what is held is worth more.
    pub refused: IntCounter,
    pub pinned_bytes: IntGauge,
    /// Rows that wait for the drive, by direction.
    pub queued_reads: IntGauge,
    pub queued_writes: IntGauge,
    pub in_flight: IntGauge,
    pub read_only: IntGauge,
    /// Rows and bytes read back by scrub and verify, and what was rotten of them.
    pub scrub_rows: IntCounter,
    pub scrub_bytes: IntCounter,
    pub scrub_damaged: IntCounter,
    pub scrub_segments: IntCounter,
    pub write_budget_bytes: IntGauge,
    pub day_written_bytes: IntGauge,
    pub day_read_bytes: IntGauge,
}

impl Metrics {
    pub fn new(meter: &Meter) -> Self {
        let queued = meter.gauges("store_queued_rows", "Rows that wait for the drive", &["direction"]);
        Self {
            stored: meter.counter("store_rows_stored_total", "Rows written to the drive"),
            held: meter.counter("store_rows_held_total", "Rows offered that were held already"),
            loaded: meter.counter("store_rows_loaded_total", "Rows read and verified for the engine"),
            served: meter.counter("store_rows_served_total", "Rows read and verified for a peer"),
            failed: meter.counters("store_rows_failed_total", "Rows neither stored nor loaded", &["reason"]),
            damaged: meter
                .counter("store_rows_damaged_total", "Rows or segments that were not what was written"),
            written_bytes: meter.counter("store_written_bytes_total", "Payload bytes written"),
            read_bytes: meter.counter("store_read_bytes_total", "Payload bytes read and verified"),
            used_bytes: meter.gauge("store_used_bytes", "Bytes taken on the drive"),
            capacity_bytes: meter.gauge("store_capacity_bytes", "Most bytes the store takes on the drive"),
            rows: meter.gauge("store_rows", "Rows held"),
            segments: meter.gauge("store_segments", "Segment files"),
            reclaimed: meter
                .counter("store_segments_reclaimed_total", "Segments removed: no row was left in them"),
            released: meter.counter("store_rows_released_total", "Rows that went because room was needed"),
            moved_bytes: meter
                .counter("store_moved_bytes_total", "Payload bytes copied out of segments that are emptied"),
            refused: meter.counter(
                "store_rows_refused_total",
                "Rows offered and not kept, because what is held is worth more",
            ),
            pinned_bytes: meter.gauge("store_pinned_bytes", "Bytes of rows that stay whatever needs room"),
            queued_reads: queued.with_label_values(&["read"]),
            queued_writes: queued.with_label_values(&["write"]),
            in_flight: meter.gauge("store_operations_in_flight", "Operations that the drive has"),
            read_only: meter.gauge("store_read_only", "1 while no rows are taken"),
            scrub_rows: meter.counter("store_scrub_rows_total", "Rows read back to look for rot"),
            scrub_bytes: meter.counter("store_scrub_bytes_total", "Payload bytes read back to look for rot"),
            scrub_damaged: meter.counter("store_scrub_damaged_total", "Rows that were rotten when read back"),
            scrub_segments: meter.counter("store_scrub_segments_total", "Segments read back whole"),
            write_budget_bytes: meter
                .gauge("store_write_budget_bytes", "Most bytes written in a day; 0: no limit"),
            day_written_bytes: meter
                .gauge("store_day_written_bytes", "Bytes written to the drive in the last 24 hours"),
            day_read_bytes: meter
                .gauge("store_day_read_bytes", "Payload bytes read in the last 24 hours, scrub left out"),
        }
    }
}
