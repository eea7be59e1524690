//! Disk of one client: objects that the client is to write there, and objects that it is to
//! promote.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::ids::{ClientId, ObjectKey};
use mooncake_core::{Error, ErrorCode};
use parking_lot::Mutex;

/// Time for which an object stays in memory until the owner of the disk fetches it: several
/// heartbeats.
const OFFLOAD_PATIENCE: Duration = Duration::from_secs(60);

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

pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Relaxed);
}

/// Client that has offered a disk.
pub(crate) struct DiskOwner {
    pub(crate) client: ClientId,
    pub(crate) alive: AtomicBool,
    /// Bytes of the objects on the disk.
    pub(crate) used: AtomicU64,
    /// Number of objects on the disk.
    pub(crate) objects: AtomicU64,
    /// Size of the disk in bytes; 0 if it is not known.
    pub(crate) capacity: AtomicU64,
    pub(crate) promotions: Arc<PromotionCounters>,
    pub(crate) state: Mutex<DiskOwnerState>,
}

impl Drop for DiskOwner {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        let left = state.promote.len() + state.promoting.len();
        self.promotions.cancelled.fetch_add(left as u64, Relaxed);
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
    /// Keys in the order of their writes. A key without a job is ignored.
    pub(crate) queue: VecDeque<ObjectKey>,
    pub(crate) jobs: HashMap<ObjectKey, OffloadJob>,
    /// Bytes of all jobs.
    pub(crate) under_way: u64,
    /// Number of jobs that were not sent to the owner.
    pub(crate) unsent: usize,
    pub(crate) promote: VecDeque<ObjectKey>,
    /// Keys in `promote`.
    pub(crate) to_promote: HashSet<ObjectKey>,
    pub(crate) promoting: HashMap<ObjectKey, Moment>,
    /// True if the owner uses `FetchDiskWork`, which also lists stale replicas.
    pub(crate) asks_for_work: bool,
    /// Keys whose replicas on the disk are stale, if the owner uses `FetchDiskWork`.
    pub(crate) dropped: HashSet<ObjectKey>,
    /// Last assignment, until it is done.
    pub(crate) assigned: AssignedWork,
}

/// Object to be written to disk.
pub(crate) struct OffloadJob {
    pub(crate) len: u64,
    pub(crate) since: Moment,
    /// True if the job was sent to the owner.
    pub(crate) sent: bool,
    /// True if the value is still the one that the owner was asked to write.
    pub(crate) valid: bool,
    /// Length of the value that replaced the one of this job.
    pub(crate) next_len: Option<u64>,
}

/// Subject of a report of an owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OffloadReport {
    /// The current value.
    Current,
    /// A value that was replaced or removed.
    Stale,
    /// An object that the owner was not asked to write.
    Unasked,
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
        capacity: u64,
        promotions: Arc<PromotionCounters>,
        state: DiskOwnerState,
    ) -> Arc<Self> {
        Arc::new(Self {
            client,
            alive: AtomicBool::new(true),
            used: AtomicU64::new(0),
            objects: AtomicU64::new(0),
            capacity: AtomicU64::new(capacity),
            promotions,
            state: Mutex::new(state),
        })
    }

    /// Returns whether the offer of this disk is still valid.
    pub(crate) fn is_alive(&self) -> bool {
        self.alive.load(Relaxed)
    }

    /// Returns whether the job of an object is recent enough for the object to stay in memory: it
    /// waits for the owner, or is being written since less than `write_out`.
    pub(crate) fn is_offloading(&self, key: &[u8], now: Moment, write_out: Duration) -> bool {
        let state = self.state.lock();
        let patience = |job: &OffloadJob| if job.sent { write_out } else { OFFLOAD_PATIENCE };
        self.is_alive()
            && state.jobs.get(key).is_some_and(|job| job.valid && now < job.since.after(patience(job)))
    }

    /// Returns the time until which the owner may read an object that it was asked to write, at
    /// most `write_out` from then on.
    pub(crate) fn reads_until(&self, key: &[u8], write_out: Duration) -> Moment {
        let state = self.state.lock();
        let sent = state.jobs.get(key).filter(|job| job.sent && self.is_alive());
        sent.map_or(Moment(0), |job| job.since.after(write_out))
    }

    /// Cancels the job of a value that is gone.
    pub(crate) fn cancel(&self, key: &[u8]) {
        let mut state = self.state.lock();
        if let Some(job) = state.jobs.get_mut(key) {
            (job.valid, job.next_len) = (false, None);
            if !job.sent {
                state.end_job(key);
                state.unsent -= 1;
            }
        }
        if state.promoting.remove(key).is_some() {
            self.promotions.cancelled.fetch_add(1, Relaxed);
        }
    }

    /// Queues an object, unless the queue is full. Returns whether the object is queued.
    pub(crate) fn queue_offload(&self, key: &ObjectKey, len: u64, now: Moment, limit: usize) -> bool {
        let mut state = self.state.lock();
        if !state.enabled || !self.is_alive() {
            return false;
        }
        if let Some(job) = state.jobs.get_mut(key.as_bytes()) {
            // The owner is writing the value before. The new one follows.
            if !job.valid {
                job.next_len = Some(len);
            }
            return true;
        }
        if state.unsent >= limit {
            return false;
        }
        state.add_job(key, len, now);
        true
    }

    /// Ends a job. Returns the subject of the report.
    pub(crate) fn end_offload(&self, key: &ObjectKey, now: Moment) -> OffloadReport {
        let mut state = self.state.lock();
        if state.jobs.get(key.as_bytes()).is_some_and(|job| !job.sent) {
            // The report is about the value before: this one was not sent yet.
            return OffloadReport::Stale;
        }
        match state.end_job(key.as_bytes()) {
            None => OffloadReport::Unasked,
            Some(job) if job.valid => OffloadReport::Current,
            Some(job) => {
                if let Some(len) = job.next_len {
                    state.add_job(key, len, now);
                }
                OffloadReport::Stale
            }
        }
    }

    /// Queues a promotion, unless `limit` promotions wait or are in progress.
    pub(crate) fn queue_promotion(&self, key: &ObjectKey, limit: usize) {
        let mut state = self.state.lock();
        let known = state.to_promote.contains(key) || state.promoting.contains_key(key.as_bytes());
        if known || !state.enabled {
            return;
        }
        if state.promote.len() + state.promoting.len() >= limit {
            self.promotions.over_limit.fetch_add(1, Relaxed);
            return;
        }
        state.promote.push_back(key.clone());
        state.to_promote.insert(key.clone());
        self.promotions.admitted.fetch_add(1, Relaxed);
    }

    /// Takes the next objects to promote.
    pub(crate) fn next_promotions(&self, most: usize, now: Moment) -> Vec<ObjectKey> {
        let mut state = self.state.lock();
        let before = state.promoting.len();
        state.promoting.retain(|_, since| now < since.after(OFFLOAD_PATIENCE));
        self.promotions.expired.fetch_add((before - state.promoting.len()) as u64, Relaxed);
        let most = most.min(state.promote.len());
        let keys: Vec<_> = state.promote.drain(..most).collect();
        for key in &keys {
            state.to_promote.remove(key);
        }
        state.promoting.extend(keys.iter().map(|key| (key.clone(), now)));
        keys
    }

    /// Returns whether a promotion of the object is in progress.
    pub(crate) fn is_promoting(&self, key: &[u8]) -> bool {
        self.state.lock().promoting.contains_key(key)
    }

    /// Ends a promotion. Returns whether it was in progress. The caller counts the outcome.
    pub(crate) fn end_promotion(&self, key: &[u8]) -> bool {
        self.state.lock().promoting.remove(key).is_some()
    }
}

impl DiskOwnerState {
    fn add_job(&mut self, key: &ObjectKey, len: u64, now: Moment) {
        if self.queue.len() > 2 * self.unsent + 1024 {
            let (queue, jobs) = (&mut self.queue, &self.jobs);
            queue.retain(|key| jobs.get(key.as_bytes()).is_some_and(|job| !job.sent));
        }
        self.jobs
            .insert(key.clone(), OffloadJob { len, since: now, sent: false, valid: true, next_len: None });
        self.queue.push_back(key.clone());
        self.unsent += 1;
        self.under_way += len;
    }

    /// Takes the jobs that were not sent to the owner, to send them now.
    pub(crate) fn send_jobs(&mut self, now: Moment, write_out: Duration) -> Vec<(ObjectKey, u64)> {
        let keys = std::mem::take(&mut self.queue);
        self.unsent = 0;
        // Jobs that were sent and never reported on.
        self.jobs.retain(|_, job| !job.sent || now < job.since.after(write_out));
        self.under_way = self.jobs.values().map(|job| job.len).sum();
        let mut sent = Vec::new();
        for key in keys {
            let Some(job) = self.jobs.get_mut(key.as_bytes()).filter(|job| job.valid && !job.sent) else {
                continue;
            };
            (job.sent, job.since) = (true, now);
            // The new write replaces the stale replica.
            self.dropped.remove(&key);
            sent.push((key, job.len));
        }
        sent
    }

    fn end_job(&mut self, key: &[u8]) -> Option<OffloadJob> {
        let job = self.jobs.remove(key)?;
        self.under_way -= job.len;
        Some(job)
    }

    /// Marks the replica of that key on the disk as stale.
    pub(crate) fn mark_dropped(&mut self, key: &ObjectKey) {
        if !self.asks_for_work || self.must_clear {
            return;
        }
        if self.dropped.len() >= MAX_DROPPED {
            (self.must_clear, self.dropped) = (true, HashSet::new());
            return;
        }
        self.dropped.insert(key.clone());
    }

    /// Assigns the next work, after the last assignment is done.
    pub(crate) fn assign_next(&mut self, now: Moment, write_out: Duration) {
        let write = self.send_jobs(now, write_out);
        let dropped: Vec<_> = self.dropped.iter().take(DROPPED_AT_ONCE).cloned().collect();
        for key in &dropped {
            self.dropped.remove(key);
        }
        let number = self.assigned.number;
        self.assigned = AssignedWork { number, clear: false, dropped, write };
        self.assigned.number += u64::from(!self.assigned.is_empty());
    }

    /// Repeats the last assignment. The owner may not have received it, or has not finished it.
    pub(crate) fn assign_again(&mut self, now: Moment) {
        let mut write = std::mem::take(&mut self.assigned.write);
        write.retain(|(key, _)| match self.jobs.get_mut(key.as_bytes()) {
            Some(job) if job.sent && job.valid => {
                job.since = now;
                true
            }
            // The value is gone. The owner may have written it, or may hold an older one.
            Some(job) if job.sent => {
                let next_len = job.next_len;
                self.end_job(key.as_bytes());
                if let Some(len) = next_len {
                    self.add_job(key, len, now);
                }
                self.mark_dropped(key);
                false
            }
            // The owner has reported it; it may be in the queue again.
            _ => false,
        });
        self.assigned.write = write;
    }
}

/// Returns the error for a client without a disk.
pub(crate) fn not_offered() -> Error {
    Error::new(ErrorCode::SegmentNotFound, "the client has no mounted disk; call MountLocalDiskSegment first")
}
