//! Disk of one client: objects that the client is to write there, and objects that come back.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::ids::{ClientId, ObjectKey};
use mooncake_core::{Error, ErrorCode};
use parking_lot::Mutex;

/// How long an object is kept in memory for the sake of a disk whose owner has not come for it: several heartbeats.
const OFFLOAD_PATIENCE: Duration = Duration::from_secs(60);

/// Most copies that do not count any more and whose owner has not heard of it; with more it is to empty its disk.
const MAX_DROPPED: usize = 1 << 20;

/// Most copies that do not count any more which are told at a time.
const DROPPED_AT_ONCE: usize = 4096;

/// What became of objects that were read from a disk.
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

/// A client and its disk.
pub(crate) struct DiskOwner {
    pub(crate) client: ClientId,
    pub(crate) alive: AtomicBool,
    /// Bytes of the objects that lie there.
    pub(crate) used: AtomicU64,
    /// How many there are.
    pub(crate) objects: AtomicU64,
    /// Bytes of the disk, 0 while not known.
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
    /// It has had no heartbeat yet, so what it reports unasked is what it found.
    pub(crate) announcing: bool,
    /// It is to empty its disk.
    pub(crate) must_clear: bool,
    pub(crate) joined: Moment,
    pub(crate) seen: Moment,
    /// Keys in the order they are to be written; those without a job are none any more.
    pub(crate) queue: VecDeque<ObjectKey>,
    pub(crate) jobs: HashMap<ObjectKey, OffloadJob>,
    /// Bytes of all jobs.
    pub(crate) under_way: u64,
    /// Jobs that the owner has not been told of.
    pub(crate) unsent: usize,
    pub(crate) promote: VecDeque<ObjectKey>,
    /// The same keys.
    pub(crate) to_promote: HashSet<ObjectKey>,
    pub(crate) promoting: HashMap<ObjectKey, Moment>,
    /// It asks what does not count any more.
    pub(crate) asks_for_work: bool,
    /// Keys whose copies on the disk do not count any more, if it does.
    pub(crate) dropped: HashSet<ObjectKey>,
    /// What it was told last, until it is done.
    pub(crate) assigned: AssignedWork,
}

/// One object to be written.
pub(crate) struct OffloadJob {
    pub(crate) len: u64,
    pub(crate) since: Moment,
    /// The owner has been told.
    pub(crate) sent: bool,
    /// The value is still the one the owner was told about.
    pub(crate) valid: bool,
    /// The length of the value that came after.
    pub(crate) next_len: Option<u64>,
}

/// What an owner's report is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OffloadReport {
    /// The value that is there.
    Current,
    /// One that was replaced or removed.
    Stale,
    /// Nothing it was asked for.
    Unasked,
}

/// What an owner was told last.
#[derive(Default)]
pub(crate) struct AssignedWork {
    pub(crate) number: u64,
    pub(crate) clear: bool,
    pub(crate) dropped: Vec<ObjectKey>,
    pub(crate) write: Vec<(ObjectKey, u64)>,
}

impl AssignedWork {
    /// What comes next when the disk is to be emptied, and the owner counts what it is told.
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

    pub(crate) fn is_alive(&self) -> bool {
        self.alive.load(Relaxed)
    }

    /// Whether a job is young enough for its object to be kept: waiting for the owner, or being written within `write_out`.
    pub(crate) fn is_offloading(&self, key: &[u8], now: Moment, write_out: Duration) -> bool {
        let state = self.state.lock();
        let patience = |job: &OffloadJob| if job.sent { write_out } else { OFFLOAD_PATIENCE };
        self.is_alive()
            && state.jobs.get(key).is_some_and(|job| job.valid && now < job.since.after(patience(job)))
    }

    /// Until when it may be reading an object that it was told to write, in `write_out` from then at most.
    pub(crate) fn reads_until(&self, key: &[u8], write_out: Duration) -> Moment {
        let state = self.state.lock();
        let sent = state.jobs.get(key).filter(|job| job.sent && self.is_alive());
        sent.map_or(Moment(0), |job| job.since.after(write_out))
    }

    /// The value a job was for is gone.
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

    /// Puts an object in line, unless the line is full or it is in it.
    pub(crate) fn queue_offload(&self, key: &ObjectKey, len: u64, now: Moment, limit: usize) -> bool {
        let mut state = self.state.lock();
        if !state.enabled || !self.is_alive() {
            return false;
        }
        if let Some(job) = state.jobs.get_mut(key.as_bytes()) {
            // The owner is writing the value before: this one comes when that is over.
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

    /// Ends a job.
    pub(crate) fn end_offload(&self, key: &ObjectKey, now: Moment) -> OffloadReport {
        let mut state = self.state.lock();
        if state.jobs.get(key.as_bytes()).is_some_and(|job| !job.sent) {
            // Of the value before: nobody has been told of this one.
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

    /// Takes the next objects to come back.
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

    pub(crate) fn is_promoting(&self, key: &[u8]) -> bool {
        self.state.lock().promoting.contains_key(key)
    }

    /// Whether it was under way; the caller counts what became of it.
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

    /// Takes what the owner has not been told of, to tell it now.
    pub(crate) fn send_jobs(&mut self, now: Moment, write_out: Duration) -> Vec<(ObjectKey, u64)> {
        let keys = std::mem::take(&mut self.queue);
        self.unsent = 0;
        // What it was told of and never spoke of next_len.
        self.jobs.retain(|_, job| !job.sent || now < job.since.after(write_out));
        self.under_way = self.jobs.values().map(|job| job.len).sum();
        let mut sent = Vec::new();
        for key in keys {
            let Some(job) = self.jobs.get_mut(key.as_bytes()).filter(|job| job.valid && !job.sent) else {
                continue;
            };
            (job.sent, job.since) = (true, now);
            // What it writes takes the place of that.
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

    /// What lies on the disk under that key does not count.
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

    /// What was assigned last is done; this is next.
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

    /// The owner may not have heard what was assigned last, or has not come to the end of it.
    pub(crate) fn assign_again(&mut self, now: Moment) {
        let mut write = std::mem::take(&mut self.assigned.write);
        write.retain(|(key, _)| match self.jobs.get_mut(key.as_bytes()) {
            Some(job) if job.sent && job.valid => {
                job.since = now;
                true
            }
            // The value is gone. Whether the owner has written it, or has an older one, is not known.
            Some(job) if job.sent => {
                let next_len = job.next_len;
                self.end_job(key.as_bytes());
                if let Some(len) = next_len {
                    self.add_job(key, len, now);
                }
                self.mark_dropped(key);
                false
            }
            // Reported, and perhaps in line next_len.
            _ => false,
        });
        self.assigned.write = write;
    }
}

pub(crate) fn not_offered() -> Error {
    Error::new(ErrorCode::SegmentNotFound, "this client has offered no disk")
}
