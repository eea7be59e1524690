//! Metrics of a client for Prometheus, with the names of Mooncake C++.

use std::sync::Arc;

use mooncake_protocol::metrics::{Families, collector};
use mooncake_transport::Transport;
use prometheus::core::Collector;

use crate::cache::HotCacheStats;
use crate::disk::FileReport;
use crate::handles::ClientStatus;
use crate::metrics::{Direction, Metrics, Objects};
use crate::state::Client;

/// Name, description and value of a gauge that a program adds to the metrics.
pub(crate) type ProgramGauge = (&'static str, &'static str, u64);

impl<T: Transport> ClientStatus<'_, T> {
    /// Returns a collector of the metrics of this client, for the registry of a program that embeds
    /// it. The metrics are those of `/metrics`. The collector does not keep the client alive.
    ///
    /// A registry refuses a second client with the same
    /// [`cluster_id`](crate::ClientConfig::cluster_id), because their metrics have the same labels.
    /// `prometheus::Registry::new_custom` creates a registry with more labels.
    ///
    /// ```
    /// fn register(client: &mooncake_client::Client) -> prometheus::Result<()> {
    ///     prometheus::register(Box::new(client.status().metrics_collector()))
    /// }
    /// ```
    pub fn metrics_collector(self) -> impl Collector + use<T> {
        self.metrics_collector_with(Vec::new)
    }

    /// Returns a collector that also has the gauges of a program.
    pub(crate) fn metrics_collector_with<M>(self, more: M) -> impl Collector + use<T, M>
    where
        M: Fn() -> Vec<ProgramGauge> + Send + Sync,
    {
        let inner = &self.client.inner;
        let client = Arc::downgrade(inner);
        collector("mooncake_client", &inner.config.cluster_id, move |families| {
            if let Some(inner) = client.upgrade() {
                Client { inner }.status().add_metrics(families);
            }
            more().into_iter().for_each(|(name, help, value)| families.gauge(name, help, value));
        })
    }

    fn add_metrics(self, families: &mut Families) {
        if let Some(metrics) = self.metrics() {
            metrics.add(families, &self.client.inner.config.cluster_id);
        }
        if let Some(stats) = self.hot_cache() {
            add_hot_cache(families, stats);
        }
        if let Some(report) = self.disk() {
            report.add_metrics(families);
        }
        if let Some(report) = self.files() {
            add_files(families, &report);
        }
        families.connections("mooncake_client");
    }
}

impl Metrics {
    /// Adds all counters of this client, and labels for them and for all metrics after them.
    fn add(&self, families: &mut Families, cluster: &str) {
        families.label("client_mode", "real");
        if !cluster.is_empty() {
            families.label("cluster_id", cluster);
        }
        families.build_info();
        families.counter("mooncake_transfer_read_bytes", "Bytes read", self.read.bytes());
        let help = "Bytes written, once per replica";
        families.counter("mooncake_transfer_write_bytes", help, self.written.bytes());
        for (name, latency) in [
            ("batch_put", &self.written.batch),
            ("batch_get", &self.read.batch),
            ("get", &self.read.single),
            ("put", &self.written.single),
        ] {
            let help = "Transfer time of a call in microseconds";
            families.histogram(&format!("mooncake_transfer_{name}_latency"), help, 1.0, latency);
        }
        let (is_known, seconds) = self.heartbeat();
        let prefix = "mooncake_client_master_heartbeat";
        let help = "1 if the master knew the client at the last heartbeat that it answered";
        families.gauge(&format!("{prefix}_status_ok"), help, u64::from(is_known));
        let help = "Time of the last heartbeat that the master answered, in seconds since 1970; 0 for none";
        families.gauge(&format!("{prefix}_observation_timestamp_seconds"), help, seconds);
        self.add_calls(families);
        self.add_operations(families, Direction::Read, "read");
        self.add_operations(families, Direction::Write, "write");
        let outcomes = |objects: &Objects, names: [&'static str; 3]| {
            names.map(|name| [("outcome", name)]).into_iter().zip(objects.outcomes())
        };
        let read = outcomes(&self.read, ["found", "missing", "failed"]);
        let help = "Objects and parts read, by outcome";
        families.counters("mooncake_client_reads_total", help, read);
        let written = outcomes(&self.written, ["stored", "existed", "failed"]);
        let help = "Objects and parts written, by outcome";
        families.counters("mooncake_client_writes_total", help, written);
    }

    fn add_calls(&self, families: &mut Families) {
        let made = || self.calls.made().map(|call| ([("rpc_name", call.name)], call));
        let counts = made().map(|(labels, call)| (labels, call.latency.count()));
        families.counters("mooncake_client_rpc_count", "RPCs to the master", counts);
        let unanswered = made().map(|(labels, call)| (labels, call.unanswered()));
        families.counters("mooncake_client_rpc_unanswered", "Calls without a response", unanswered);
        let latencies = made().map(|(labels, call)| (labels, &call.latency));
        families.histograms("mooncake_client_rpc_latency", "Microseconds until the response", 1.0, latencies);
    }

    fn add_operations(&self, families: &mut Families, direction: Direction, way: &str) {
        let made = || self.operations(direction).map(|(name, counts)| ([("op_name", name)], counts));
        let prefix = format!("mooncake_transfer_{way}_operation");
        let counts = made().map(|(labels, counts)| (labels, counts.latency.count()));
        families.counters(&format!("{prefix}_count"), "Calls of the store", counts);
        let bytes = made().map(|(labels, counts)| (labels, counts.bytes()));
        families.counters(&format!("{prefix}_bytes"), "Bytes of the values", bytes);
        let latencies = made().map(|(labels, counts)| (labels, &counts.latency));
        families.histograms(&format!("{prefix}_latency"), "Microseconds of a call", 1.0, latencies);
    }
}

fn add_hot_cache(families: &mut Families, stats: HotCacheStats) {
    let help = "Reads served from the hot cache";
    families.counter("mooncake_client_hot_cache_hits_total", help, stats.hits);
    let help = "Values that entered the hot cache";
    families.counter("mooncake_client_hot_cache_fills_total", help, stats.fills);
    families.gauge("mooncake_client_hot_cache_objects", "Values in the hot cache", stats.objects);
    families.gauge("mooncake_client_hot_cache_bytes", "Bytes of values in the hot cache", stats.bytes);
}

/// Adds the metrics of files on a shared file system.
fn add_files(families: &mut Families, report: &FileReport) {
    for (name, help, value) in [
        ("mooncake_client_files_written_total", "Values written to shared files", report.written),
        (
            "mooncake_client_files_written_bytes_total",
            "Bytes of values written to shared files",
            report.written_bytes,
        ),
        ("mooncake_client_files_refused_total", "Values without a file", report.refused),
        ("mooncake_client_files_evicted_total", "Evicted shared files", report.evicted),
        ("mooncake_client_files_read_total", "Values and parts read from shared files", report.read),
        ("mooncake_client_files_read_bytes_total", "Bytes read from shared files", report.read_bytes),
        (
            "mooncake_client_files_unread_total",
            "Shared files that were missing, changed, of another length, or too slow",
            report.unread,
        ),
    ] {
        families.counter(name, help, value);
    }
    families.gauge("mooncake_client_files_used_bytes", "Bytes of known shared files", report.used);
}
