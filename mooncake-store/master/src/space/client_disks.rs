//! Disks of all clients.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::ids::{ClientId, ObjectKey};

use crate::model::disk::{DiskOwner, OffloadCounters, PromotionCounters};
use crate::model::disk_replicas::FileTotals;
use crate::model::stats::DiskStats;
use crate::sync::Mutex;
use crate::sync::atomic::{
    AtomicU64, AtomicUsize,
    Ordering::{Relaxed, Release},
};

/// Disks that clients have offered.
#[derive(Default)]
pub(crate) struct ClientDisks {
    pub(crate) owners: Mutex<HashMap<ClientId, Arc<DiskOwner>>>,
    /// Number of disks. A cluster without disks takes no lock.
    pub(crate) count: AtomicUsize,
    /// Number of disks that were removed.
    pub(crate) removed: AtomicU64,
    /// Objects that eviction skipped because they are to be written to disk first.
    pub(crate) offload_requests: Mutex<OffloadRequests>,
    pub(crate) promotions: Arc<PromotionCounters>,
    pub(crate) offloads: Arc<OffloadCounters>,
    pub(crate) files: Arc<FileTotals>,
}

/// Keys to offload, each once, in the order of the requests.
#[derive(Default)]
pub(crate) struct OffloadRequests {
    pub(crate) keys: Vec<ObjectKey>,
    pub(crate) known: HashSet<ObjectKey>,
    /// Bytes of the requested objects.
    pub(crate) bytes: u64,
    /// Bytes that may still be requested.
    pub(crate) budget: u64,
}

impl ClientDisks {
    /// Returns the disk of a client.
    pub(crate) fn get(&self, client: ClientId) -> Option<Arc<DiskOwner>> {
        if self.count.load(Relaxed) == 0 {
            return None;
        }
        self.owners.lock().get(&client).cloned()
    }

    /// Adds a disk, in place of an earlier one of the client.
    pub(crate) fn insert(&self, owner: Arc<DiskOwner>) {
        let mut owners = self.owners.lock();
        if let Some(before) = owners.insert(owner.client, owner) {
            before.alive.store(false, Relaxed);
        }
        self.count.store(owners.len(), Relaxed);
    }

    /// Removes the disks that `should_remove` accepts. Returns their clients.
    pub(crate) fn remove(&self, should_remove: impl Fn(&DiskOwner) -> bool) -> HashSet<ClientId> {
        if self.count.load(Relaxed) == 0 {
            return HashSet::new();
        }
        let mut owners = self.owners.lock();
        let removed = owners.extract_if(|_, owner| should_remove(owner)).map(|(client, owner)| {
            owner.may_return.store(true, Relaxed);
            owner.alive.store(false, Release);
            client
        });
        let removed: HashSet<_> = removed.collect();
        self.count.store(owners.len(), Relaxed);
        self.removed.fetch_add(removed.len() as u64, Relaxed);
        removed
    }

    /// Returns the free part of the disk of a client; 1 if nothing is known of it.
    pub(crate) fn free_ratio(&self, client: ClientId) -> f64 {
        let Some(owner) = self.get(client) else { return 1.0 };
        match owner.capacity.load(Relaxed) {
            0 => 1.0,
            capacity => (1.0 - owner.used.load(Relaxed) as f64 / capacity as f64).max(0.0),
        }
    }

    /// Returns the statistics of all disks and files. The files have `file_capacity` bytes.
    pub(crate) fn stats(&self, file_capacity: u64) -> DiskStats {
        let owners = self.owners.lock();
        let sum = |figure: fn(&DiskOwner) -> u64| {
            owners.values().map(|owner| figure(owner)).fold(0, u64::saturating_add)
        };
        let read = |counter: &AtomicU64| counter.load(Relaxed);
        let (promotions, offloads) = (&self.promotions, &self.offloads);
        DiskStats {
            objects: sum(|owner| owner.objects.load(Relaxed)) + read(&self.files.objects),
            used: sum(|owner| owner.used.load(Relaxed)) + read(&self.files.used),
            capacity: sum(|owner| owner.capacity.load(Relaxed)).saturating_add(file_capacity),
            offloads_enqueued: read(&offloads.enqueued),
            offloads_rejected: read(&offloads.rejected),
            offloads_completed: read(&offloads.completed),
            offloads_cancelled: read(&offloads.cancelled),
            offloads_failed: read(&offloads.failed) + sum(|owner| owner.state.lock().never_reported),
            promotions_in_flight: sum(|owner| owner.state.lock().promotions.len() as u64),
            promotions_admitted: read(&promotions.admitted),
            promotions_completed: read(&promotions.completed),
            promoted_bytes: read(&promotions.bytes),
            promotions_failed: read(&promotions.failed),
            promotions_cancelled: read(&promotions.cancelled),
            promotions_expired: read(&promotions.expired),
            promotions_too_rare: read(&promotions.too_rare),
            promotions_too_full: read(&promotions.too_full),
            promotions_over_limit: read(&promotions.over_limit),
        }
    }

    /// Returns the counters of copies between memory and disks.
    pub(crate) fn counters(&self) -> (Arc<PromotionCounters>, Arc<OffloadCounters>) {
        (self.promotions.clone(), self.offloads.clone())
    }

    /// Records a heartbeat of a client.
    pub(crate) fn mark_seen(&self, client: ClientId, now: Moment) {
        self.get(client).into_iter().for_each(|owner| owner.state.lock().seen = now);
    }

    /// Extends the last heartbeat of every client by the time that this process was stopped.
    pub(crate) fn was_stopped(&self, span: Duration, now: Moment) {
        for mut state in self.owners.lock().values().map(|owner| owner.state.lock()) {
            state.seen = state.seen.after(span).min(now);
        }
    }
}
