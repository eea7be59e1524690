//! Table of the numbered batches of an engine.

use std::collections::HashMap;
use std::fmt;

use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::engine::{BatchView, EngineCode, Progress, Status};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::AbortHandle;

/// Table of the numbered batches of an engine.
#[derive(Default)]
pub(crate) struct Batches {
    pub(crate) open: Mutex<HashMap<u64, NumberedBatch>>,
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
    pub(crate) over: watch::Receiver<Option<Result<(), (ErrorCode, String)>>>,
    pub(crate) task: AbortHandle,
    /// True if a notification is sent when all requests have succeeded.
    pub(crate) notifies: bool,
}

impl BatchPart {
    /// Returns whether the part has ended, except for the release of its memory.
    pub(crate) fn is_over(&self) -> bool {
        self.over.borrow().is_some()
            || self.over.has_changed().is_err()
            || (self.view.is_over() && !self.is_notifying())
    }

    /// Returns whether all requests have succeeded, and the notification is not sent yet.
    fn is_notifying(&self) -> bool {
        self.notifies && self.over.borrow().is_none() && self.view.overall().status == Status::Completed
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

    pub(crate) fn is_over(&self) -> bool {
        self.parts.iter().all(|part| part.as_ref().is_some_and(BatchPart::is_over))
    }
}

impl Batches {
    pub(crate) fn with<R>(&self, id: u64, then: impl FnOnce(&mut NumberedBatch) -> Result<R>) -> Result<R> {
        match self.open.lock().get_mut(&id) {
            Some(entry) => then(entry),
            None => Err(Error::invalid(format!(
                "unknown batch {id}: it was freed, or not allocated by this engine"
            ))
            .with_engine_code(EngineCode::InvalidArgument)),
        }
    }
}

impl Drop for Batches {
    fn drop(&mut self) {
        for part in self.open.get_mut().values().flat_map(|entry| entry.parts.iter().flatten()) {
            part.task.abort();
        }
    }
}

impl fmt::Debug for Batches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batches").field("open", &self.open.lock().len()).finish()
    }
}
