//! Metrics of a master for Prometheus, with the names of Mooncake C++.

use std::collections::BTreeMap;
use std::sync::Arc;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;
use mooncake_protocol::metrics::{Families, collector};
use mooncake_protocol::wire::{WeightAvailability, WeightResidency};
use prometheus::core::Collector;

use super::master::Master;
use crate::model::curve::CurveReport;
use crate::model::stats::{DiskStats, SegmentStats, Stats};
use crate::model::tenants::TenantInfo;
use crate::model::weights::WeightStats;

/// Value of a tenant.
type TenantValue = fn(&TenantInfo) -> u64;

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Returns a collector of the metrics of this master, for the registry of a program that embeds
    /// it. A server has more metrics, and a collector of its own for them and these. The collector
    /// does not keep the master alive.
    ///
    /// ```
    /// fn register(master: &std::sync::Arc<mooncake_master::Master>) -> prometheus::Result<()> {
    ///     prometheus::register(Box::new(master.metrics_collector()))
    /// }
    /// ```
    pub fn metrics_collector(self: &Arc<Self>) -> impl Collector + use<A, E> {
        let master = Arc::downgrade(self);
        collector("mooncake_master", "", move |families| {
            if let Some(master) = master.upgrade() {
                master.add_metrics(families);
            }
        })
    }

    /// Adds the metrics of this master.
    #[doc(hidden)]
    pub fn add_metrics(&self, families: &mut Families) {
        let stats = self.stats();
        add_storage(families, &stats);
        add_liveness(families, &stats);
        let watermark = (stats.capacity() as f64 * self.options().high_watermark) as u64;
        let help = "Used bytes above which the background evicts";
        families.gauge("master_eviction_high_watermark_bytes", help, watermark);
        add_reads(families, &stats);
        add_evictions(families, &stats);
        add_disks(families, &stats.disks);
        add_tenants(families, &self.tenants(), stats.capacity());
        let learned = self.space().directory.learned.as_ref().map_or(0, |learned| learned.uses());
        let help = "Watched uses that the eviction policy has learned from";
        families.gauge("master_eviction_learned_uses", help, learned);
        add_curve(families, &self.memory_curve());
        add_weights(families, &self.weight_stats());
        self.add_offboarding(families);
    }
}

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Adds the removals of expired clients, with the names of Mooncake C++ 0.3.14.
    fn add_offboarding(&self, families: &mut Families) {
        let prefix = "master_client_offboarding";
        let help = "Time to remove the segments of expired clients in milliseconds";
        families.histogram(&format!("{prefix}_duration_ms"), help, 1.0, &self.space().counters.removal_ms);
        let help = "Expired clients that wait for their removal, always 0: a tick removes them";
        families.gauge(&format!("{prefix}_queue_depth"), help, 0);
        for (what, help) in [
            ("retries", "Removals of expired clients that failed, always 0: none can fail"),
            ("alerts", "Removals of expired clients that failed often, always 0: none can fail"),
        ] {
            families.counter(&format!("{prefix}_{what}_total"), help, 0);
        }
    }
}

/// Adds the numbers of managed weights, with the names of Mooncake C++ 0.3.14.
fn add_weights(families: &mut Families, stats: &WeightStats) {
    let names = WeightAvailability::ALL.iter().map(|availability| match availability {
        WeightAvailability::Importing => "importing",
        WeightAvailability::Ready => "ready",
        WeightAvailability::Degraded => "degraded",
        WeightAvailability::Deleting => "deleting",
        WeightAvailability::Deleted => "deleted",
    });
    let values = names.zip(stats.by_availability).map(|(name, count)| ([("availability", name)], count));
    families.gauges("master_weight_revisions", "Revisions of managed weights by availability", values);
    let names = WeightResidency::ALL.iter().map(|residency| match residency {
        WeightResidency::Unknown => "unknown",
        WeightResidency::Hot => "hot",
        WeightResidency::Cold => "cold",
        WeightResidency::Mixed => "mixed",
        WeightResidency::Absent => "absent",
    });
    let values = names.zip(stats.by_residency).map(|(name, count)| ([("residency", name)], count));
    families.gauges("master_weight_revision_residency", "Revisions of managed weights by residency", values);
    for (name, help, value) in [
        ("active_leases", "Leases on revisions of managed weights", stats.leases),
        ("pending_operations", "Moves of managed weights in progress", stats.moves),
        (
            "oldest_operation_age_ms",
            "Age of the oldest move of managed weights in progress, in milliseconds",
            stats.oldest_move_ms,
        ),
    ] {
        families.gauge(&format!("master_weight_{name}"), help, value);
    }
    let help = "Moves of managed weights that failed, and changes that could not be recorded";
    families.counter("master_weight_reconciliation_failures_total", help, stats.failures);
}

/// Adds the liveness of clients, with the names of Mooncake C++ 0.3.14.
fn add_liveness(families: &mut Families, stats: &Stats) {
    let prefix = "master_client_liveness";
    for (name, help, value) in [
        ("active", "Clients whose heartbeats are not overdue", stats.clients - stats.suspected_clients),
        ("suspected", "Clients whose heartbeats are overdue", stats.suspected_clients),
        ("offline", "Expired clients that are still known, always 0", 0),
    ] {
        families.gauge(&format!("{prefix}_{name}_clients"), help, value);
    }
    for (name, help, value) in [
        ("suspected_transitions", "Times that a client became suspected", stats.suspicions),
        ("recoveries", "Times that a suspected client sent a heartbeat", stats.recoveries),
        ("offline_transitions", "Clients that expired", stats.expired_clients),
    ] {
        families.counter(&format!("{prefix}_{name}_total"), help, value);
    }
}

fn add_storage(families: &mut Families, stats: &Stats) {
    for (name, help, value) in [
        ("master_allocated_bytes", "Used bytes of all segments", stats.used()),
        ("master_total_capacity_bytes", "Capacity of all segments in bytes", stats.capacity()),
        ("master_key_count", "Number of keys", stats.keys),
        ("master_soft_pin_key_count", "Number of soft-pinned objects", stats.soft_pinned),
        (
            "master_active_clients",
            "Clients whose heartbeats are not overdue",
            stats.clients - stats.suspected_clients,
        ),
        ("master_puts_in_progress", "Writes in progress", stats.writing),
        (
            "master_inventory_pending_bytes",
            "Memory of changes that owners of segments have not fetched, in bytes",
            stats.ledger_bytes,
        ),
        (
            "master_inventory_pending_limit_bytes",
            "Limit of the memory of changes that owners of segments have not fetched, in bytes",
            stats.ledger_limit,
        ),
        ("mem_cache_nums_", "Objects in memory", stats.objects),
        (
            "file_cache_nums_",
            "Copies of objects on disks of clients and in shared files",
            stats.disks.objects,
        ),
        (
            "master_put_start_discarded_staging_size",
            "Bytes in quarantine until no reader or writer can touch them",
            stats.resting(),
        ),
    ] {
        families.gauge(name, help, value);
    }
    add_segments(families, "segment_allocated_bytes", "Used bytes of a segment", stats, |at| at.used);
    let help = "Capacity of a segment in bytes";
    add_segments(families, "segment_total_capacity_bytes", help, stats, |at| at.segment.size);
    let count = stats.value_sizes.last().map_or(0, |(_, count)| *count);
    let bounded = stats.value_sizes.iter().filter(|(bound, _)| *bound != u64::MAX);
    let buckets = bounded.map(|(bound, count)| (*bound as f64, *count)).collect();
    let help = "Sizes of written values in bytes";
    families.buckets("master_value_size_bytes", help, buckets, count, stats.value_bytes as f64);
}

/// Adds a gauge per segment name. Segments with the same name share a gauge.
fn add_segments(
    families: &mut Families,
    name: &str,
    help: &str,
    stats: &Stats,
    value: impl Fn(&SegmentStats) -> u64,
) {
    let mut by_name = BTreeMap::<&str, u64>::new();
    for at in &stats.segments {
        *by_name.entry(&at.segment.name).or_default() += value(at);
    }
    families.gauges(name, help, by_name.into_iter().map(|(name, value)| ([("segment", name)], value)));
}

fn add_reads(families: &mut Families, stats: &Stats) {
    let memory_hits = stats.hits.saturating_sub(stats.disk_hits);
    let memory_bytes = stats.hit_bytes.saturating_sub(stats.disk_hit_bytes);
    for (name, help, value) in [
        ("mem_cache_hit_nums_", "Reads of objects that are in memory", memory_hits),
        ("file_cache_hit_nums_", "Reads of objects that are on disk only", stats.disk_hits),
        ("mem_cache_hit_bytes_total", "Bytes of objects read from memory", memory_bytes),
        ("file_cache_hit_bytes_total", "Bytes of objects read from disks", stats.disk_hit_bytes),
        ("valid_get_nums_", "Reads that found their object", stats.hits),
        ("total_get_nums_", "Reads of objects", stats.reads),
    ] {
        families.counter(name, help, value);
    }
    let help = "Keys that requests asked for and could not use, by cause";
    let misses = stats.misses.iter().map(|(cause, count)| ([("cause", cause.name())], count));
    families.counters("master_misses_total", help, misses);
}

fn add_evictions(families: &mut Families, stats: &Stats) {
    let (attempts, attempted) = ("Attempts to find space by eviction", stats.evictions_attempted);
    let (evictions, successful) = ("Evictions of an object or a group", stats.evictions_successful);
    for (name, help, value) in [
        ("master_successful_evictions_total", evictions, successful),
        ("master_attempted_evictions_total", attempts, attempted),
        ("master_evicted_key_count", "Evicted objects", stats.evicted_keys),
        ("master_evicted_size_bytes", "Evicted bytes", stats.evicted_bytes),
        (
            "master_evicted_looked_up_key_count",
            "Evicted objects with a lease that only look-ups had extended",
            stats.look_ups_yielded,
        ),
        // Only memory is evicted. Names with a tier do not end in `_total`.
        ("master_successful_evictions_mem", evictions, successful),
        ("master_attempted_evictions_mem", attempts, attempted),
        ("master_evicted_key_count_mem", "Evicted objects", stats.evicted_keys),
        ("master_evicted_size_bytes_mem", "Evicted bytes", stats.evicted_bytes),
        (
            "master_put_start_alloc_failures_total",
            "Puts refused because no segment had space",
            stats.out_of_space,
        ),
        (
            "master_put_start_partial_allocations_total",
            "Puts with fewer replicas than requested",
            stats.partial,
        ),
        (
            "master_put_start_object_already_exists_total",
            "Puts of one object refused because the object exists",
            stats.existed,
        ),
        (
            "master_batch_put_start_object_already_exists_total",
            "Objects of batch puts refused because they exist",
            stats.existed_in_batches,
        ),
        ("master_put_start_discard_cnt", "Abandoned writes that were revoked", stats.discarded),
        ("master_put_start_release_cnt", "Revoked writes whose allocation expired", stats.released),
        ("master_hot_replicas_proposed_total", "Requested replicas of hot objects", stats.hot_proposed),
        ("master_hot_replicas_made_total", "Completed replicas of hot objects", stats.hot_made),
        (
            "master_inventory_dropped_total",
            "Owners of segments that lost their unfetched changes to the limit",
            stats.ledgers_dropped,
        ),
        ("master_hot_replicas_dropped_total", "Dropped replicas of hot objects", stats.hot_dropped),
    ] {
        families.counter(name, help, value);
    }
    families.gauge("master_hot_replicas", "Current replicas of hot objects", stats.hot_replicas);
}

fn add_disks(families: &mut Families, disks: &DiskStats) {
    let help = "Bytes of objects on disks of clients and in shared files";
    families.gauge("master_allocated_file_size_bytes", help, disks.used);
    let help = "Reported capacity of disks of clients in bytes";
    families.gauge("master_total_file_capacity_bytes", help, disks.capacity);
    for (what, help, value) in [
        ("enqueued", "Objects queued for disks of clients", disks.offloads_enqueued),
        (
            "enqueue_rejected",
            "Objects that no queue took: it was full, or the disk takes none",
            disks.offloads_rejected,
        ),
        ("completed", "Objects written to disks of clients on request", disks.offloads_completed),
        ("cancelled", "Queued objects that were removed or replaced", disks.offloads_cancelled),
        (
            "failed",
            "Queued objects that the owner of the disk could not write, or never reported on",
            disks.offloads_failed,
        ),
    ] {
        families.counter(&format!("master_offload_{what}_total"), help, value);
    }
    families.gauge("master_promotion_in_flight", "Promotions in progress", disks.promotions_in_flight);
    for (what, help, value) in [
        ("admitted", "Promotions that were started", disks.promotions_admitted),
        ("completed", "Promotions that completed", disks.promotions_completed),
        ("completed_bytes", "Bytes of completed promotions", disks.promoted_bytes),
        ("failed", "Promotions that failed", disks.promotions_failed),
        ("cancelled", "Promotions whose object was removed meanwhile", disks.promotions_cancelled),
        ("expired", "Promotions that timed out", disks.promotions_expired),
        ("rejected_frequency", "Reads of objects below the promotion threshold", disks.promotions_too_rare),
        (
            "rejected_watermark",
            "Promotions refused because memory was above the watermark",
            disks.promotions_too_full,
        ),
        ("rejected_cap", "Promotions refused because the queue was full", disks.promotions_over_limit),
    ] {
        families.counter(&format!("master_promotion_{what}_total"), help, value);
    }
}

fn add_curve(families: &mut Families, curve: &CurveReport) {
    let help = "Reads that found their object, and puts that stored one";
    families.counter("master_memory_curve_uses_total", help, curve.total_uses);
    let factors: Vec<String> = curve.points.iter().map(|point| point.factor.to_string()).collect();
    let points = factors.iter().zip(&curve.points);
    let misses = points.map(|(factor, point)| ([("memory", factor.as_str())], point.total_misses));
    let help = "Estimated uses that miss, with so many times the memory";
    families.counters("master_memory_curve_misses_total", help, misses);
    let help = "Number of keys of which one is watched for the curve of hits by memory";
    families.gauge("master_memory_curve_keys_for_each_sampled", help, curve.keys_for_each_sampled);
}

fn add_tenants(families: &mut Families, tenants: &[TenantInfo], capacity: u64) {
    if tenants.is_empty() {
        return;
    }
    let sum = |value: TenantValue| tenants.iter().map(value).fold(0, u64::saturating_add);
    let prefix = "mooncake_tenant_quota";
    for (name, help, value) in [
        ("allocatable_capacity_bytes", "Capacity that tenants share, in bytes", capacity),
        ("requested_bytes_sum", "Requested quotas of all tenants in bytes", sum(|at| at.requested)),
        ("effective_bytes_sum", "Effective quotas of all tenants in bytes", sum(|at| at.effective)),
    ] {
        families.gauge(&format!("{prefix}_{name}"), help, value);
    }
    let each: [(&str, &str, TenantValue); 6] = [
        ("requested_bytes", "Requested quota of a tenant in bytes", |at| at.requested),
        ("effective_bytes", "Effective quota of a tenant in bytes", |at| at.effective),
        ("charged_bytes", "Charged bytes of a tenant", |at| at.charged),
        ("admission_closed", "Always 0", |_| 0),
        ("over_quota", "1 if a tenant exceeds its quota", |at| u64::from(at.charged > at.effective)),
        ("explicit_policy", "Always 1", |_| 1),
    ];
    for (name, help, value) in each {
        let values = tenants.iter().map(|at| ([("tenant_id", &*at.name)], value(at)));
        families.gauges(&format!("{prefix}_{name}"), help, values);
    }
    let rejected =
        tenants.iter().map(|at| ([("tenant_id", &*at.name), ("reason", "quota_exceeded")], at.rejected));
    families.counters("mooncake_tenant_quota_reject_total", "Puts refused because of a quota", rejected);
    let evicted = tenants.iter().map(|at| ([("tenant_id", &*at.name)], at.evicted));
    families.counters("mooncake_tenant_evict_bytes_total", "Bytes evicted because of a quota", evicted);
    let misses = tenants.iter().flat_map(|at| {
        at.misses.iter().map(|(cause, count)| ([("tenant_id", &*at.name), ("cause", cause.name())], count))
    });
    let help = "Keys that requests of a tenant asked for and could not use, by cause";
    families.counters("mooncake_tenant_misses_total", help, misses);
}
