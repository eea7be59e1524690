//! Metrics of Mooncake C++ for missing features. They are 0, so that its dashboards show 0 instead
//! of "no data".

/// Histogram of Mooncake C++ for the NVMe-oF tier.
pub(super) const IDLE_HISTOGRAM: &str = "master_nof_heartbeat_probe_latency_ms";

/// Subject, gauges and counters.
pub(super) const IDLE: &[(&str, &[&str], &[&str])] = &[
    (
        "NVMe-oF tier",
        &["master_nof_allocated_bytes", "master_total_nof_capacity_bytes"],
        &[
            "master_attempted_evictions_nof",
            "master_evicted_key_count_nof",
            "master_evicted_size_bytes_nof",
            "master_nof_heartbeat_failure_total",
            "master_nof_heartbeat_success_total",
            "master_nof_heartbeat_timeout_total",
            "master_nof_segments_unmounted_by_heartbeat_total",
            "master_successful_evictions_nof",
        ],
    ),
    (
        "Retries of refused promotions",
        &[],
        &[
            "master_promotion_candidate_admission_rejected_total",
            "master_promotion_candidate_admitted_total",
            "master_promotion_candidate_dropped_limit_total",
            "master_promotion_candidate_expired_evaluated_total",
            "master_promotion_candidate_expired_unevaluated_total",
            "master_promotion_candidate_recorded_total",
        ],
    ),
    (
        "Oplog of standbys",
        &[
            "ha_oplog_applied_sequence_id",
            "ha_oplog_last_sequence_id",
            "ha_oplog_pending_entries",
            "ha_oplog_standby_lag",
            "ha_pending_mutation_queue_size",
            "ha_standby_state",
        ],
        &[],
    ),
];
