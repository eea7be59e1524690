//! Table of the numbered batches of an engine.

use std::collections::BTreeMap;
use std::fmt;

use mooncake_core::fault_injection::is_planted;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::engine::{BatchView, EngineCode, Progress, Status};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::AbortHandle;

/// Maximum number of batches that have ended and are not freed.
pub(crate) const MAX_ENDED_BATCHES: usize = 1 << 16;
/// Maximum number of requests in batches that have ended and are not freed.
pub(crate) const MAX_ENDED_REQUESTS: usize = 1 << 22;

/// Table of the numbered batches of an engine.
#[derive(Default)]
pub(crate) struct Batches {
    open: Mutex<OpenBatches>,
}

#[derive(Default)]
struct OpenBatches {
    by_id: BTreeMap<u64, NumberedBatch>,
    /// Number of the requests of all batches.
    requests: usize,
    /// Number of batches and of requests above which the table is searched again for batches to
    /// drop, because most of them were in progress at the last search.
    next_search: (usize, usize),
}

impl OpenBatches {
    fn remove(&mut self, id: u64) -> Option<NumberedBatch> {
        let batch = self.by_id.remove(&id)?;
        self.requests -= batch.requests.len();
        Some(batch)
    }

    /// Drops the oldest batches that have ended, if there are too many. Returns the dropped ones.
    fn drop_ended(&mut self) -> Vec<NumberedBatch> {
        let (batches, requests) = self.next_search;
        if self.by_id.len() <= batches.max(MAX_ENDED_BATCHES)
            && self.requests <= requests.max(MAX_ENDED_REQUESTS)
        {
            return Vec::new();
        }
        // A part more than necessary, so that not every new batch causes a search.
        let (batches, requests) =
            (MAX_ENDED_BATCHES - MAX_ENDED_BATCHES / 16, MAX_ENDED_REQUESTS - MAX_ENDED_REQUESTS / 16);
        let (mut too_many, mut too_long) =
            (self.by_id.len().saturating_sub(batches), self.requests.saturating_sub(requests));
        let mut is_dropped = |batch: &NumberedBatch| {
            let is_dropped = (too_many > 0 || too_long > 0) && !batch.parts.is_empty() && batch.is_finished();
            if is_dropped {
                too_many = too_many.saturating_sub(1);
                too_long = too_long.saturating_sub(batch.requests.len());
            }
            is_dropped
        };
        let ids = self.by_id.iter().filter(|(_, batch)| is_dropped(batch)).map(|(id, _)| *id);
        let ids: Vec<u64> = ids.collect();
        let dropped: Vec<_> = ids.iter().filter_map(|id| self.by_id.remove(id)).collect();
        self.requests -= dropped.iter().map(|batch| batch.requests.len()).sum::<usize>();
        self.next_search =
            (self.by_id.len() + MAX_ENDED_BATCHES / 16, self.requests + MAX_ENDED_REQUESTS / 16);
        dropped
    }
}

pub(crate) struct NumberedBatch {
    pub(crate) capacity: usize,
    /// Part and number of each request. `None` for a request of no bytes.
    pub(crate) requests: Vec<Option<(usize, usize)>>,
    /// Parts of the batch. `None` while a part is being posted, because posting may copy bytes.
    pub(crate) parts: Vec<Option<BatchPart>>,
}

pub(crate) struct BatchPart {
    pub(crate) view: BatchView,
    /// First failure of the requests and the notification, once they have ended.
    pub(crate) outcome: watch::Receiver<Option<Result<(), (ErrorCode, String)>>>,
    pub(crate) task: AbortHandle,
    /// True if a notification is sent when all requests have succeeded.
    pub(crate) notifies: bool,
}

impl BatchPart {
    /// Returns whether the part has ended, except for the release of its memory.
    pub(crate) fn is_finished(&self) -> bool {
        self.outcome.borrow().is_some()
            || self.outcome.has_changed().is_err()
            || (self.view.is_finished() && !self.is_notifying())
    }

    /// Returns whether all requests have succeeded, and the notification is not sent yet.
    fn is_notifying(&self) -> bool {
        self.notifies && self.outcome.borrow().is_none() && self.view.overall().status == Status::Completed
    }

    /// Returns the progress of a request. The last request is not completed before the notification
    /// is sent, because the program may end once all requests are completed.
    pub(crate) fn request(&self, number: usize) -> Option<Progress> {
        let progress = self.view.request(number)?;
        let waits = number + 1 == self.view.len() && self.is_notifying();
        Some(if waits { POSTING } else { progress })
    }

    pub(crate) fn overall(&self) -> Progress {
        if self.is_notifying() {
            Progress { status: Status::Pending, ..self.view.overall() }
        } else {
            self.view.overall()
        }
    }
}

/// Progress of a request that is being posted.
pub(crate) const POSTING: Progress = Progress { status: Status::Pending, transferred: 0 };

impl NumberedBatch {
    pub(crate) fn request(&self, index: usize) -> Option<Progress> {
        match *self.requests.get(index)? {
            None => Some(Progress { status: Status::Completed, transferred: 0 }),
            Some((part, number)) => match self.parts.get(part)? {
                Some(part) => part.request(number),
                None => Some(POSTING),
            },
        }
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.parts.iter().all(|part| part.as_ref().is_some_and(BatchPart::is_finished))
    }
}

impl Batches {
    pub(crate) fn with<R>(&self, id: u64, then: impl FnOnce(&mut NumberedBatch) -> Result<R>) -> Result<R> {
        let mut open = self.open.lock();
        let Some(entry) = open.by_id.get_mut(&id) else {
            return Err(Error::invalid(format!(
                "unknown batch {id}: it was freed, dropped as one of the oldest that had ended, or not allocated by this engine"
            ))
            .with_engine_code(EngineCode::InvalidArgument));
        };
        let before = entry.requests.len();
        let result = then(entry);
        let more = entry.requests.len() - before;
        open.requests += more;
        result
    }

    /// Adds an empty batch. Drops the oldest batches that have ended, if there are too many.
    pub(crate) fn add(&self, id: u64, capacity: usize) {
        let batch = NumberedBatch { capacity, requests: Vec::new(), parts: Vec::new() };
        let mut open = self.open.lock();
        open.by_id.insert(id, batch);
        let dropped = if is_planted("ended-batches-are-kept") { Vec::new() } else { open.drop_ended() };
        drop(open);
        if !dropped.is_empty() {
            tracing::warn!(
                batches = dropped.len(),
                "batches dropped that had ended and were never freed or queried"
            );
        }
    }

    pub(crate) fn remove(&self, id: u64) {
        let removed = self.open.lock().remove(id);
        drop(removed);
    }
}

impl Drop for Batches {
    fn drop(&mut self) {
        for part in self.open.get_mut().by_id.values().flat_map(|entry| entry.parts.iter().flatten()) {
            part.task.abort();
        }
    }
}

impl fmt::Debug for Batches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batches").field("open", &self.open.lock().by_id.len()).finish()
    }
}
