//! Disk of one client: objects that the client is to write there, and objects that it is to
//! promote.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::ids::{ClientId, ObjectKey};
use mooncake_core::{Error, ErrorCode, Result};

use super::copy_jobs::{CopyJobs, JobState};
use super::suspicion::Suspicion;
use crate::sync::Mutex;
use crate::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Acquire, Relaxed},
};

/// Time for which an object stays in memory until the owner of the disk fetches it, and for which
/// an owner may promote an object: several heartbeats.
const PATIENCE: Duration = Duration::from_secs(60);

/// Maximum number of stale replicas that the owner has not been notified of. With more, the owner
/// is to clear its disk.
const MAX_DROPPED: usize = 1 << 20;

/// Maximum number of stale replicas in one assignment.
const DROPPED_AT_ONCE: usize = 4096;

/// Outcomes of promotions.
#[derive(Default)]
pub(crate) struct PromotionCounters {
    pub(crate) admitted: AtomicU64,
    pub(crate) completed: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) cancelled: AtomicU64,
    pub(crate) expired: AtomicU64,
    pub(crate) too_rare: AtomicU64,
    pub(crate) too_full: AtomicU64,
    pub(crate) over_limit: AtomicU64,
}

/// Reason of a promotion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PromotionCause {
    /// Reads of the object.
    Reads,
    /// A prefetch. The object gets a lease when it is in memory.
    Prefetch,
}

/// Outcomes of offloads.
#[derive(Default)]
pub(crate) struct OffloadCounters {
    pub(crate) enqueued: AtomicU64,
    pub(crate) rejected: AtomicU64,
    pub(crate) completed: AtomicU64,
    pub(crate) cancelled: AtomicU64,
    pub(crate) failed: AtomicU64,
}

pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Relaxed);
}

/// Client that has offered a disk.
pub(crate) struct DiskOwner {
    pub(crate) client: ClientId,
    pub(crate) alive: AtomicBool,
    pub(crate) suspicion: Suspicion,
    /// True if the owner is gone and may return with what is on the disk.
    pub(crate) may_return: AtomicBool,
    /// Bytes of the objects on the disk.
    pub(crate) used: AtomicU64,
    /// Number of objects on the disk.
    pub(crate) objects: AtomicU64,
    /// Size of the disk in bytes; 0 if it is not known.
    pub(crate) capacity: AtomicU64,
    pub(crate) promotions: Arc<PromotionCounters>,
    pub(crate) offloads: Arc<OffloadCounters>,
    pub(crate) state: Mutex<DiskOwnerState>,
}

impl Drop for DiskOwner {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        self.promotions.cancelled.fetch_add(state.promotions.len() as u64, Relaxed);
        let left = state.offloads.in_order().into_iter().map(|(_, job)| job.work.pending()).sum();
        self.offloads.cancelled.fetch_add(left, Relaxed);
        self.offloads.failed.fetch_add(state.never_reported, Relaxed);
    }
}

#[derive(Default)]
pub(crate) struct DiskOwnerState {
    pub(crate) enabled: bool,
    /// True if the owner has sent no heartbeat since the mount. Until then, an unrequested report
    /// names an object that it found on its disk.
    pub(crate) announcing: bool,
    /// True if the owner is to clear its disk.
    pub(crate) must_clear: bool,
    pub(crate) joined: Moment,
    pub(crate) seen: Moment,
    /// Objects to be written to disk.
    pub(crate) offloads: CopyJobs<ObjectKey, Offload, ()>,
    /// Bytes of all offloads.
    pub(crate) under_way: u64,
    /// Number of offloads that were sent and never reported on.
    pub(crate) never_reported: u64,
    /// Objects to be read back into memory.
    pub(crate) promotions: CopyJobs<ObjectKey, PromotionCause, ()>,
    /// True if the owner uses `FetchDiskWork`, which also lists stale replicas.
    pub(crate) fetches_work: bool,
    /// Keys whose replicas on the disk are stale, if the owner uses `FetchDiskWork`.
    pub(crate) dropped: HashSet<ObjectKey>,
    /// Last assignment, until it is done.
    pub(crate) assigned: AssignedWork,
}

/// Value to be written to disk.
pub(crate) struct Offload {
    pub(crate) len: u64,
    /// True if the value is still the one that the owner was requested to write.
    pub(crate) valid: bool,
    /// Length of the value that replaced the one of this job.
    pub(crate) next_len: Option<u64>,
}

impl Offload {
    /// Returns the number of values of this job that still count: its own, and the next one.
    fn pending(&self) -> u64 {
        u64::from(self.valid) + u64::from(self.next_len.is_some())
    }
}

/// Subject of a report of an owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OffloadReport {
    /// The current value.
    Current,
    /// A value that was replaced or removed.
    Stale,
    /// An object that the owner was not requested to write.
    Unrequested,
}

/// Work that was last assigned to an owner.
#[derive(Default)]
pub(crate) struct AssignedWork {
    pub(crate) number: u64,
    pub(crate) clear: bool,
    pub(crate) dropped: Vec<ObjectKey>,
    pub(crate) write: Vec<(ObjectKey, u64)>,
}

impl AssignedWork {
    /// Returns the assignment after the disk is to be cleared. Only a numbered one is recorded.
    pub(crate) fn clearing(&self, numbered: bool) -> Self {
        Self { number: self.number + u64::from(numbered), clear: numbered, ..Self::default() }
    }

    fn is_empty(&self) -> bool {
        !self.clear && self.dropped.is_empty() && self.write.is_empty()
    }
}

impl DiskOwner {
    pub(crate) fn new(
        client: ClientId,
        suspicion: Suspicion,
        capacity: u64,
        (promotions, offloads): (Arc<PromotionCounters>, Arc<OffloadCounters>),
        state: DiskOwnerState,
    ) -> Arc<Self> {
        Arc::new(Self {
            client,
            alive: AtomicBool::new(true),
            suspicion,
            may_return: AtomicBool::new(false),
            used: AtomicU64::new(0),
            objects: AtomicU64::new(0),
            capacity: AtomicU64::new(capacity),
            promotions,
            offloads,
            state: Mutex::new(state),
        })
    }

    /// Returns whether the offer of this disk is still valid.
    pub(crate) fn is_alive(&self) -> bool {
        self.alive.load(Acquire)
    }

    /// Returns whether objects on this disk can be read: the offer is valid, and heartbeats of the
    /// owner are not overdue.
    pub(crate) fn is_readable(&self) -> bool {
        self.is_alive() && !self.suspicion.is_suspected()
    }

    /// Returns whether the offload of an object is recent enough for the object to stay in memory.
    pub(crate) fn is_offloading(&self, key: &[u8], now: Moment) -> bool {
        let state = self.state.lock();
        self.is_alive() && state.offloads.get(key).is_some_and(|job| job.work.valid && now < job.deadline)
    }

    /// Returns the time until which the owner may read an object that it was requested to write.
    pub(crate) fn reads_until(&self, key: &[u8]) -> Moment {
        let state = self.state.lock();
        let sent = state.offloads.get(key).filter(|job| job.is_handed_out() && self.is_alive());
        sent.map_or(Moment(0), |job| job.deadline)
    }

    /// Cancels the jobs of a value that is gone.
    pub(crate) fn cancel(&self, key: &[u8]) {
        let mut state = self.state.lock();
        if let Some(job) = state.offloads.get_mut(key) {
            self.offloads.cancelled.fetch_add(job.work.pending(), Relaxed);
            (job.work.valid, job.work.next_len) = (false, None);
            if !job.is_handed_out() {
                state.end_offload(key);
            }
        }
        if state.end_promotion(key).is_some() {
            count(&self.promotions.cancelled);
        }
    }

    /// Queues an object, unless the queue is full. Returns whether the object is queued.
    pub(crate) fn queue_offload(&self, key: &ObjectKey, len: u64, now: Moment, limit: usize) -> bool {
        let mut state = self.state.lock();
        if !state.enabled || !self.is_alive() {
            count(&self.offloads.rejected);
            return false;
        }
        if let Some(job) = state.offloads.get_mut(key.as_bytes()) {
            // The owner is writing the value before. The new one follows.
            if !job.work.valid && job.work.next_len.replace(len).is_none() {
                count(&self.offloads.enqueued);
            }
            return true;
        }
        if state.offloads.queued() >= limit {
            count(&self.offloads.rejected);
            return false;
        }
        state.add_offload(key, len, now);
        count(&self.offloads.enqueued);
        true
    }

    /// Ends an offload. Returns the subject of the report.
    pub(crate) fn end_offload(&self, key: &ObjectKey, now: Moment) -> OffloadReport {
        let mut state = self.state.lock();
        if state.offloads.get(key.as_bytes()).is_some_and(|job| !job.is_handed_out()) {
            // The report is about the value before: this one was not sent yet.
            return OffloadReport::Stale;
        }
        match state.end_offload(key.as_bytes()) {
            None => OffloadReport::Unrequested,
            Some(Offload { valid: true, .. }) => OffloadReport::Current,
            Some(Offload { next_len, .. }) => {
                if let Some(len) = next_len {
                    state.add_offload(key, len, now);
                }
                OffloadReport::Stale
            }
        }
    }

    /// Queues a promotion, unless `limit` promotions wait or are in progress.
    pub(crate) fn queue_promotion(&self, key: &ObjectKey, limit: usize) {
        let mut state = self.state.lock();
        if state.promotions.get(key).is_some() || !state.enabled {
            return;
        }
        if state.promotions.len() >= limit {
            return count(&self.promotions.over_limit);
        }
        state.promotions.add(key.clone(), (), JobState::Queued, Moment(u64::MAX), PromotionCause::Reads);
        count(&self.promotions.admitted);
    }

    /// Reserves the promotion of an object that the owner prefetches, unless `limit` promotions
    /// wait or are in progress.
    ///
    /// # Errors
    /// `PROMOTION_ALREADY_EXISTS`; `KEYS_ULTRA_LIMIT` at the limit.
    pub(crate) fn reserve_promotion(&self, key: &ObjectKey, limit: usize, now: Moment) -> Result<()> {
        let mut state = self.state.lock();
        self.expire_promotions(&mut state, now);
        if state.promotions.get(key).is_some() {
            return Err(ErrorCode::PromotionAlreadyExists.into());
        }
        if state.promotions.len() >= limit {
            count(&self.promotions.over_limit);
            let text = format!("cannot prefetch object: too many promotions wait. limit={limit}");
            return Err(Error::new(ErrorCode::KeysUltraLimit, text));
        }
        let deadline = now.after(PATIENCE);
        state.promotions.add(key.clone(), (), JobState::HandedOut, deadline, PromotionCause::Prefetch);
        count(&self.promotions.admitted);
        Ok(())
    }

    /// Ends the promotions that the owner has not ended in time.
    fn expire_promotions(&self, state: &mut DiskOwnerState, now: Moment) {
        let expired = state.promotions.expire(JobState::HandedOut, now).len();
        self.promotions.expired.fetch_add(expired as u64, Relaxed);
    }

    /// Takes the next objects to promote.
    pub(crate) fn next_promotions(&self, most: usize, now: Moment) -> Vec<ObjectKey> {
        let mut state = self.state.lock();
        self.expire_promotions(&mut state, now);
        state.promotions.hand_out((), most, now.after(PATIENCE))
    }

    /// Returns whether a promotion of the object is in progress.
    pub(crate) fn is_promoting(&self, key: &[u8]) -> bool {
        self.state.lock().promotions.get(key).is_some_and(|job| job.is_handed_out())
    }

    /// Ends a promotion. Returns its cause if it was in progress. The caller counts the outcome.
    pub(crate) fn end_promotion(&self, key: &[u8]) -> Option<PromotionCause> {
        self.state.lock().end_promotion(key)
    }
}

impl DiskOwnerState {
    fn add_offload(&mut self, key: &ObjectKey, len: u64, now: Moment) {
        let work = Offload { len, valid: true, next_len: None };
        self.offloads.add(key.clone(), (), JobState::Queued, now.after(PATIENCE), work);
        self.under_way += len;
    }

    fn end_offload(&mut self, key: &[u8]) -> Option<Offload> {
        let offload = self.offloads.end(key)?.work;
        self.under_way -= offload.len;
        Some(offload)
    }

    /// Ends a promotion that the owner has received. Returns its cause if there was one.
    fn end_promotion(&mut self, key: &[u8]) -> Option<PromotionCause> {
        self.promotions.get(key).filter(|job| job.is_handed_out())?;
        self.promotions.end(key).map(|job| job.work)
    }

    /// Takes the offloads that were not sent to the owner, to send them now.
    pub(crate) fn send_offloads(&mut self, now: Moment, write_out: Duration) -> Vec<(ObjectKey, u64)> {
        // Offloads that were sent and never reported on.
        let lost = self.offloads.expire(JobState::HandedOut, now);
        self.never_reported += lost.iter().map(|(_, job)| job.work.pending()).sum::<u64>();
        self.under_way -= lost.iter().map(|(_, job)| job.work.len).sum::<u64>();
        let keys = self.offloads.hand_out((), usize::MAX, now.after(write_out));
        let send = |key: ObjectKey| {
            // The new write replaces the stale replica.
            self.dropped.remove(&key);
            let len = self.offloads.get(&key)?.work.len;
            Some((key, len))
        };
        keys.into_iter().filter_map(send).collect()
    }

    /// Marks the replica of that key on the disk as stale.
    pub(crate) fn mark_dropped(&mut self, key: &ObjectKey) {
        if !self.fetches_work || self.must_clear {
            return;
        }
        if self.dropped.len() >= MAX_DROPPED {
            // A listing of the disk may name any number of files that count no more. No object
            // refers to them, so they may stay.
            if self.announcing {
                return;
            }
            (self.must_clear, self.dropped) = (true, HashSet::new());
            return;
        }
        self.dropped.insert(key.clone());
    }

    /// Lets the owner keep an object that was marked as dropped and counts again.
    pub(crate) fn spare(&mut self, key: &ObjectKey) {
        self.dropped.remove(key);
    }

    /// Assigns the next work, after the last assignment is done.
    pub(crate) fn assign_next(&mut self, now: Moment, write_out: Duration) {
        let write = self.send_offloads(now, write_out);
        let dropped: Vec<_> = self.dropped.iter().take(DROPPED_AT_ONCE).cloned().collect();
        for key in &dropped {
            self.dropped.remove(key);
        }
        let number = self.assigned.number;
        self.assigned = AssignedWork { number, clear: false, dropped, write };
        self.assigned.number += u64::from(!self.assigned.is_empty());
    }

    /// Repeats the last assignment. The owner may not have received it, or has not finished it.
    pub(crate) fn assign_again(&mut self, now: Moment, write_out: Duration) {
        let mut write = std::mem::take(&mut self.assigned.write);
        write.retain(|(key, _)| match self.offloads.get_mut(key).filter(|job| job.is_handed_out()) {
            Some(job) if job.work.valid => {
                job.deadline = now.after(write_out);
                true
            }
            // The value is gone. The owner may have written it, or may hold an older one.
            Some(job) => {
                let next_len = job.work.next_len;
                self.end_offload(key.as_bytes());
                if let Some(len) = next_len {
                    self.add_offload(key, len, now);
                }
                self.mark_dropped(key);
                false
            }
            // The owner has reported it; it may be in the queue again.
            None => false,
        });
        self.assigned.write = write;
    }
}

/// Returns the error for a client without a disk.
pub(crate) fn not_offered() -> Error {
    Error::new(ErrorCode::SegmentNotFound, "the client has no mounted disk; call MountLocalDiskSegment first")
}

#[cfg(test)]
mod tests {
    use mooncake_core::ids::Uuid;

    use super::*;

    const WRITE_OUT: Duration = Duration::from_secs(600);

    fn owner(enabled: bool) -> Arc<DiskOwner> {
        let state = DiskOwnerState { enabled, ..DiskOwnerState::default() };
        DiskOwner::new(ClientId(Uuid::new(1, 2)), Suspicion::default(), 0, Default::default(), state)
    }

    fn key(name: &str) -> ObjectKey {
        ObjectKey::new(name).unwrap()
    }

    #[test]
    fn each_promotion_is_counted_by_one_outcome() {
        let owner = owner(true);
        let counters = owner.promotions.clone();
        for name in ["a", "a", "b", "c", "d", "e"] {
            owner.queue_promotion(&key(name), 4);
        }
        let read = |counter: &AtomicU64| counter.load(Relaxed);
        assert_eq!((read(&counters.admitted), read(&counters.over_limit)), (4, 1), "a is queued once");
        assert_eq!(owner.end_promotion(b"a"), None, "the owner has not received it");
        assert_eq!(owner.next_promotions(3, Moment(0)), [key("a"), key("b"), key("c")]);
        assert!(owner.is_promoting(b"a") && !owner.is_promoting(b"d"));
        assert_eq!(owner.end_promotion(b"a"), Some(PromotionCause::Reads));
        assert_eq!(owner.end_promotion(b"a"), None);
        owner.cancel(b"b");
        owner.cancel(b"d");
        assert_eq!(read(&counters.cancelled), 1, "d is cancelled when it is handed out");
        assert_eq!(owner.next_promotions(0, Moment(0).after(PATIENCE)), []);
        assert!(!owner.is_promoting(b"c"), "a late report finds nothing");
        drop(owner);
        assert_eq!((read(&counters.expired), read(&counters.cancelled)), (1, 2), "d went with its disk");
    }

    #[test]
    fn a_value_that_is_replaced_during_its_write_is_followed_by_the_next() {
        let owner = owner(true);
        let (first, second) = (key("first"), key("second"));
        let send = |now| owner.state.lock().send_offloads(now, WRITE_OUT);
        assert!(
            owner.queue_offload(&first, 10, Moment(0), 2) && owner.queue_offload(&second, 20, Moment(0), 2)
        );
        assert!(!owner.queue_offload(&key("third"), 1, Moment(0), 2), "the queue is full");
        assert_eq!(owner.end_offload(&first, Moment(0)), OffloadReport::Stale, "it was not sent");
        assert_eq!(owner.reads_until(b"first"), Moment(0));
        assert_eq!(send(Moment(5)), [(first.clone(), 10), (second.clone(), 20)]);
        assert_eq!(owner.reads_until(b"first"), Moment(5).after(WRITE_OUT));
        owner.cancel(b"first");
        assert!(!owner.is_offloading(b"first", Moment(5)) && owner.is_offloading(b"second", Moment(5)));
        assert!(owner.queue_offload(&first, 30, Moment(6), 2));
        assert_eq!(owner.end_offload(&first, Moment(7)), OffloadReport::Stale);
        assert_eq!((send(Moment(8)), owner.state.lock().under_way), (vec![(first.clone(), 30)], 50));
        assert_eq!(owner.end_offload(&second, Moment(9)), OffloadReport::Current);
        assert_eq!(owner.end_offload(&second, Moment(9)), OffloadReport::Unrequested, "reported twice");
        // An owner that never reports loses the job, and the object may leave memory.
        let late = Moment(8).after(WRITE_OUT);
        assert!(!owner.is_offloading(b"first", late));
        assert_eq!((send(late), owner.state.lock().under_way), (vec![], 0));
    }
}
