//! Metrics of a master server for Prometheus, with the names of Mooncake C++.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use mooncake_protocol::message::MASTER_VERSION;
use mooncake_protocol::metrics::{Families, collector};
use prometheus::core::Collector;

use super::idle_metrics::{IDLE, IDLE_HISTOGRAM};
use super::snapshot_stats::SnapshotStats;
use super::state::State;

/// Returns a collector of all metrics. The collector does not keep the state alive.
pub(super) fn of(state: &Arc<State>) -> impl Collector + use<> {
    let state = Arc::downgrade(state);
    collector("mooncake_master", "", move |families| {
        if let Some(state) = state.upgrade() {
            add(families, &state);
        }
    })
}

fn add(families: &mut Families, state: &State) {
    let labels = [("version", env!("CARGO_PKG_VERSION")), ("rpc", MASTER_VERSION)];
    let help = "Version of the program and of its RPC protocol, always 1";
    families.gauges("master_build_info", help, [(labels, 1)]);
    families.build_info();
    families.process_memory();
    state.master.add_metrics(families);
    add_requests(families, state);
    add_snapshots(families, &state.snapshots);
    families.connections("master");
    let help = "Entries that the metadata server refused because it was full";
    families.counter("master_metadata_refused_total", help, state.endpoints.entries_refused.load(Relaxed));
    for (subject, gauges, counters) in IDLE {
        let help = format!("{subject}: not supported, always 0");
        gauges.iter().for_each(|name| families.gauge(name, &help, 0));
        counters.iter().for_each(|name| families.counter(name, &help, 0));
    }
    let help = "Latency of probes of the NVMe-oF tier in milliseconds: not supported, always 0";
    families.buckets(IDLE_HISTOGRAM, help, Vec::new(), 0, 0.0);
}

/// Adds the counters of each operation, and the time of its calls in the master.
fn add_requests(families: &mut Families, state: &State) {
    let shed = state.requests.shed.load(Relaxed);
    families.counter("master_rpc_shed_total", "Requests refused because the master was overloaded", shed);
    let (single, batch) = state.requests.all();
    for (name, counters) in single.iter() {
        let [requests, failures] = counters.read();
        families.counter(&format!("master_{name}_requests_total"), "Number of requests", requests);
        families.counter(&format!("master_{name}_failures_total"), "Failed requests", failures);
    }
    for (name, counters) in batch.iter() {
        let [requests, failures, partial, items, failed_items] = counters.read();
        for (what, help, value) in [
            ("requests", "Number of requests", requests),
            ("failures", "Batch requests whose items all failed", failures),
            ("partial_successes", "Batch requests with some failed items", partial),
            ("items", "Items of batch requests", items),
            ("failed_items", "Failed items of batch requests", failed_items),
        ] {
            families.counter(&format!("master_{name}_{what}_total"), help, value);
        }
    }
    let single = single.iter().map(|(name, counters)| (*name, &counters.latency));
    let all = single.chain(batch.iter().map(|(name, counters)| (*name, &counters.latency)));
    let all = all.map(|(name, latency)| ([("operation", name)], latency.histogram()));
    let help = "Time of an RPC in the master in seconds, without the network";
    families.histograms("master_rpc_latency_seconds", help, 1e9, all);
}

fn add_snapshots(families: &mut Families, taken: &SnapshotStats) {
    families.counter("master_snapshot_success", "Written snapshots", taken.success.load(Relaxed));
    families.counter("master_snapshot_fail", "Failed snapshots", taken.failed.load(Relaxed));
    let help = "Duration of a snapshot in milliseconds";
    families.histogram("master_snapshot_duration_ms", help, 1.0, &taken.took);
}
