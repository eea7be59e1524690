//! Metrics of a master in the text format of Prometheus, with the names of Mooncake C++.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use mooncake_core::Result;

use super::idle_metrics::IDLE;
use super::snapshot_stats::SnapshotStats;
use super::state::State;
use mooncake_master::{DiskStats, SegmentStats, Stats, TenantInfo};
use mooncake_protocol::message::MASTER_VERSION;
use mooncake_protocol::metrics::{Labels, Page};

/// Formats all metrics.
pub(super) fn text(state: &State) -> Result<Vec<u8>> {
    let mut page = MasterPage::default();
    let stats = state.master.stats();
    page.build();
    page.storage(&stats);
    let watermark = (stats.capacity() as f64 * state.master.options().high_watermark) as u64;
    let help = "Used bytes above which the background evicts";
    page.gauge("master_eviction_high_watermark_bytes", help, watermark);
    page.reads(&stats);
    page.evictions(&stats);
    page.disks(&stats.disks);
    page.requests(state);
    page.latencies(state);
    page.tenants(&state.master.tenants(), stats.capacity());
    page.snapshots(&state.snapshots);
    page.connections("master");
    let help = "Entries that the metadata server refused because it was full";
    page.counter("master_metadata_refused_total", help, state.endpoints.entries_refused.load(Relaxed));
    page.idle();
    page.text()
}

/// A document with the metrics of a master.
#[derive(Default)]
struct MasterPage(Page);

impl Deref for MasterPage {
    type Target = Page;

    fn deref(&self) -> &Page {
        &self.0
    }
}

impl DerefMut for MasterPage {
    fn deref_mut(&mut self) -> &mut Page {
        &mut self.0
    }
}

impl MasterPage {
    fn build(&mut self) {
        let labels: Labels<'_> = &[("version", env!("CARGO_PKG_VERSION")), ("rpc", MASTER_VERSION)];
        self.gauges(
            "master_build_info",
            "Version of the program and of its RPC protocol, always 1",
            [(labels, 1)],
        );
    }

    fn storage(&mut self, stats: &Stats) {
        self.gauge("master_allocated_bytes", "Used bytes of all segments", stats.used());
        self.gauge("master_total_capacity_bytes", "Capacity of all segments in bytes", stats.capacity());
        self.segments("segment_allocated_bytes", "Used bytes of a segment", stats, |at| at.used);
        self.segments("segment_total_capacity_bytes", "Capacity of a segment in bytes", stats, |at| {
            at.segment.size
        });
        self.gauge("master_key_count", "Number of keys", stats.keys);
        self.gauge("master_soft_pin_key_count", "Number of soft-pinned objects", stats.soft_pinned);
        self.gauge("master_active_clients", "Clients with a heartbeat within --client_ttl", stats.clients);
        self.gauge("master_puts_in_progress", "Writes in progress", stats.writing);
        self.gauge("mem_cache_nums_", "Objects in memory", stats.objects);
        self.gauge(
            "file_cache_nums_",
            "Copies of objects on disks of clients and in shared files",
            stats.disks.objects,
        );
        self.gauge(
            "master_put_start_discarded_staging_size",
            "Bytes in quarantine until no reader or writer can touch them",
            stats.resting(),
        );
        self.sizes(stats);
    }

    fn reads(&mut self, stats: &Stats) {
        let (hits, bytes) = (stats.disk_hits, stats.disk_hit_bytes);
        let (memory_hits, memory_bytes) =
            (stats.hits.saturating_sub(hits), stats.hit_bytes.saturating_sub(bytes));
        self.counter("mem_cache_hit_nums_", "Reads of objects that are in memory", memory_hits);
        self.counter("file_cache_hit_nums_", "Reads of objects that are on disk only", hits);
        self.counter("mem_cache_hit_bytes_total", "Bytes of objects read from memory", memory_bytes);
        self.counter("file_cache_hit_bytes_total", "Bytes of objects read from disks", bytes);
        self.counter("valid_get_nums_", "Reads that found their object", stats.hits);
        self.counter("total_get_nums_", "Reads of objects", stats.reads);
    }

    fn disks(&mut self, disks: &DiskStats) {
        self.gauge(
            "master_allocated_file_size_bytes",
            "Bytes of objects on disks of clients and in shared files",
            disks.used,
        );
        let help = "Reported capacity of disks of clients in bytes";
        self.gauge("master_total_file_capacity_bytes", help, disks.capacity);
        let help = "Promotions in progress";
        self.gauge("master_promotion_in_flight", help, disks.promotions_in_flight);
        for (what, help, value) in [
            ("admitted", "Promotions that were started", disks.promotions_admitted),
            ("completed", "Promotions that completed", disks.promotions_completed),
            ("completed_bytes", "Bytes of completed promotions", disks.promoted_bytes),
            ("failed", "Promotions that failed", disks.promotions_failed),
            ("cancelled", "Promotions whose object was removed meanwhile", disks.promotions_cancelled),
            ("expired", "Promotions that timed out", disks.promotions_expired),
            (
                "rejected_frequency",
                "Reads of objects below the promotion threshold",
                disks.promotions_too_rare,
            ),
            (
                "rejected_watermark",
                "Promotions refused because memory was above the watermark",
                disks.promotions_too_full,
            ),
            ("rejected_cap", "Promotions refused because the queue was full", disks.promotions_over_limit),
        ] {
            self.counter(&format!("master_promotion_{what}_total"), help, value);
        }
    }

    fn evictions(&mut self, stats: &Stats) {
        for tier in ["", "_mem"] {
            let mut count = |name: &str, tierless: &str, help, value| {
                // Names without a tier end in `_total`; names with a tier do not.
                let name = if tier.is_empty() { tierless.to_owned() } else { format!("{name}{tier}") };
                self.counter(&name, help, value);
            };
            count(
                "master_successful_evictions",
                "master_successful_evictions_total",
                "Evictions of an object or a group",
                stats.evictions_successful,
            );
            count(
                "master_attempted_evictions",
                "master_attempted_evictions_total",
                "Attempts to find space by eviction",
                stats.evictions_attempted,
            );
            count(
                "master_evicted_key_count",
                "master_evicted_key_count",
                "Evicted objects",
                stats.evicted_keys,
            );
            count(
                "master_evicted_size_bytes",
                "master_evicted_size_bytes",
                "Evicted bytes",
                stats.evicted_bytes,
            );
        }
        self.counter(
            "master_put_start_alloc_failures_total",
            "Puts refused because no segment had space",
            stats.no_room,
        );
        self.counter(
            "master_put_start_partial_allocations_total",
            "Puts with fewer replicas than requested",
            stats.partial,
        );
        self.counter("master_put_start_discard_cnt", "Abandoned writes that were revoked", stats.discarded);
        self.counter(
            "master_put_start_release_cnt",
            "Revoked writes whose allocation expired",
            stats.released,
        );
        let name = |what: &str| format!("master_hot_replicas_{what}_total");
        self.counter(&name("proposed"), "Requested replicas of hot objects", stats.hot_proposed);
        self.counter(&name("made"), "Completed replicas of hot objects", stats.hot_made);
        self.counter(&name("dropped"), "Dropped replicas of hot objects", stats.hot_dropped);
        self.gauge("master_hot_replicas", "Current replicas of hot objects", stats.hot_replicas);
    }

    fn snapshots(&mut self, taken: &SnapshotStats) {
        let read = |count: &AtomicU64| count.load(Relaxed);
        self.counter("master_snapshot_success", "Written snapshots", read(&taken.success));
        self.counter("master_snapshot_fail", "Failed snapshots", read(&taken.failed));
        let all: [(Labels<'_>, _); 1] = [(&[], &taken.took)];
        self.histograms("master_snapshot_duration_ms", "Duration of a snapshot in milliseconds", 1.0, all);
    }

    fn requests(&mut self, state: &State) {
        let shed = state.requests.shed.load(Relaxed);
        self.counter("master_rpc_shed_total", "Requests refused because the master was overloaded", shed);
        let (single, batch) = state.requests.all();
        for (name, counters) in single {
            let [requests, failures] = counters.read();
            self.counter(&format!("master_{name}_requests_total"), "Number of requests", requests);
            self.counter(&format!("master_{name}_failures_total"), "Failed requests", failures);
        }
        for (name, counters) in batch {
            let [requests, failures, partial, items, failed_items] = counters.read();
            for (what, help, value) in [
                ("requests", "Number of requests", requests),
                ("failures", "Batch requests whose items all failed", failures),
                ("partial_successes", "Batch requests with some failed items", partial),
                ("items", "Items of batch requests", items),
                ("failed_items", "Failed items of batch requests", failed_items),
            ] {
                self.counter(&format!("master_{name}_{what}_total"), help, value);
            }
        }
    }

    /// Adds the time of calls in the master, in one histogram per operation.
    fn latencies(&mut self, state: &State) {
        let (single, batch) = state.requests.all();
        let single = single.into_iter().map(|(name, counters)| (name, &counters.latency));
        let all = single.chain(batch.into_iter().map(|(name, counters)| (name, &counters.latency)));
        let labels: Vec<_> =
            all.map(|(name, latency)| ([("operation", name)], latency.histogram())).collect();
        let all = labels.iter().map(|(labels, histogram)| (&labels[..], *histogram));
        let help = "Time of an RPC in the master in seconds, without the network";
        self.histograms("master_rpc_latency_seconds", help, 1e9, all);
    }

    fn tenants(&mut self, tenants: &[TenantInfo], capacity: u64) {
        if tenants.is_empty() {
            return;
        }
        let sum = |value: fn(&TenantInfo) -> u64| tenants.iter().map(value).fold(0, u64::saturating_add);
        let prefix = "mooncake_tenant_quota";
        self.gauge(
            &format!("{prefix}_allocatable_capacity_bytes"),
            "Capacity that tenants share, in bytes",
            capacity,
        );
        let help = "Requested quotas of all tenants in bytes";
        self.gauge(&format!("{prefix}_requested_bytes_sum"), help, sum(|at| at.requested));
        let help = "Effective quotas of all tenants in bytes";
        self.gauge(&format!("{prefix}_effective_bytes_sum"), help, sum(|at| at.effective));
        let names: Vec<[(&str, &str); 1]> = tenants.iter().map(|at| [("tenant_id", &*at.name)]).collect();
        let mut each = |name: &str, help: &str, value: fn(&TenantInfo) -> u64| {
            let values = names.iter().zip(tenants).map(|(labels, at)| (&labels[..], value(at)));
            self.gauges(&format!("{prefix}_{name}"), help, values);
        };
        each("requested_bytes", "Requested quota of a tenant in bytes", |at| at.requested);
        each("effective_bytes", "Effective quota of a tenant in bytes", |at| at.effective);
        each("charged_bytes", "Charged bytes of a tenant", |at| at.charged);
        each("admission_closed", "Always 0", |_| 0);
        each("over_quota", "1 if a tenant exceeds its quota", |at| u64::from(at.charged > at.effective));
        each("explicit_policy", "Always 1", |_| 1);
        let reason = ("reason", "quota_exceeded");
        let refused: Vec<[(&str, &str); 2]> = names.iter().map(|[tenant]| [*tenant, reason]).collect();
        let rejected = refused.iter().zip(tenants).map(|(labels, at)| (&labels[..], at.rejected));
        self.counters("mooncake_tenant_quota_reject_total", "Puts refused because of a quota", rejected);
        let evicted = names.iter().zip(tenants).map(|(labels, at)| (&labels[..], at.evicted));
        self.counters("mooncake_tenant_evict_bytes_total", "Bytes evicted because of a quota", evicted);
    }

    fn idle(&mut self) {
        for (subject, gauges, counters) in IDLE {
            let help = format!("{subject}: not supported, always 0");
            gauges.iter().for_each(|name| self.gauge(name, &help, 0));
            counters.iter().for_each(|name| self.counter(name, &help, 0));
        }
    }

    /// Adds a gauge per segment name; segments with the same name share a gauge.
    fn segments(&mut self, name: &str, help: &str, stats: &Stats, value: impl Fn(&SegmentStats) -> u64) {
        let mut by_name = std::collections::BTreeMap::<&str, u64>::new();
        for at in &stats.segments {
            *by_name.entry(&at.segment.name).or_default() += value(at);
        }
        let values: Vec<_> = by_name.into_iter().map(|(name, value)| ([("segment", name)], value)).collect();
        self.gauges(name, help, values.iter().map(|(labels, value)| (labels as Labels<'_>, *value)));
    }

    fn sizes(&mut self, stats: &Stats) {
        let count = stats.value_sizes.last().map_or(0, |(_, count)| *count);
        let bounded = stats.value_sizes.iter().filter(|(bound, _)| *bound != u64::MAX);
        let buckets = bounded.map(|(bound, count)| (*bound as f64, *count));
        self.histogram(
            "master_value_size_bytes",
            "Sizes of written values in bytes",
            buckets,
            count,
            stats.value_bytes as f64,
        );
    }
}
