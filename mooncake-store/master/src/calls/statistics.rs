//! Statistics.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;

use super::master::Master;
use crate::model::stats::{SegmentStats, Stats};

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Returns the statistics. The call locks every shard, one after the other.
    pub fn stats(&self) -> Stats {
        let now = self.space().clock.now();
        let file_capacity = self.options().files.as_ref().map_or(0, |files| files.capacity);
        let mut stats = Stats {
            segments: self.segment_stats(),
            disks: self.space().disks.stats(file_capacity),
            ..Stats::default()
        };
        let clients = self.clients.lock();
        (stats.clients, stats.suspected_clients) = (clients.len() as u64, clients.suspected.len() as u64);
        stats.suspicions = clients.counts.suspicions;
        (stats.recoveries, stats.expired_clients) = (clients.counts.recoveries, clients.counts.expired);
        drop(clients);
        let ledgers = self.space().ledgers.lock().stats();
        (stats.ledger_bytes, stats.ledger_limit) = (ledgers.used, ledgers.limit);
        stats.ledgers_dropped = ledgers.dropped;
        self.space().counters.fill(&mut stats);
        if let Some(hot) = &self.space().hot {
            [stats.hot_proposed, stats.hot_made, stats.hot_dropped, stats.hot_replicas] = hot.counts();
        }
        for shard in self.space().directory.shards() {
            stats.keys += shard.len() as u64;
            stats.objects += shard.values() as u64;
            stats.writing += shard.writing().len() as u64;
            stats.soft_pinned += shard.count_soft_pinned(now) as u64;
            stats.misses.add_all(&shard.misses);
            stats.reads += shard.reads.requests;
            stats.hits += shard.reads.hits;
            stats.hit_bytes = stats.hit_bytes.saturating_add(shard.reads.hit_bytes);
            stats.disk_hits += shard.reads.disk_hits;
            stats.disk_hit_bytes = stats.disk_hit_bytes.saturating_add(shard.reads.disk_hit_bytes);
        }
        stats
    }

    /// Returns the statistics of the mounted segments, in the order of their mounts.
    pub fn segment_stats(&self) -> Vec<SegmentStats> {
        let registry = self.space().segments.read();
        let stats = registry.list.iter().map(|mounted| SegmentStats {
            segment: mounted.info.clone(),
            client: mounted.client,
            status: mounted.status(),
            used: mounted.used(),
            resting: mounted.quarantined(),
        });
        stats.collect()
    }
}
