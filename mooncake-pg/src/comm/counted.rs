//! Count of the operations in progress.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Notify;

/// Number of operations in progress.
#[derive(Default)]
pub(super) struct Gauge {
    running: AtomicUsize,
    drained: Notify,
}

impl Gauge {
    /// Waits until no operation is in progress.
    pub(super) async fn drain(&self) {
        loop {
            let notified = self.drained.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            if self.running.load(Ordering::SeqCst) == 0 {
                return;
            }
            notified.await;
        }
    }
}

/// Operation in progress. The drop ends it.
pub(super) struct Counted(Arc<Gauge>);

impl Counted {
    pub(super) fn new(gauge: &Arc<Gauge>) -> Self {
        gauge.running.fetch_add(1, Ordering::SeqCst);
        Self(gauge.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        if self.0.running.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.drained.notify_waiters();
        }
    }
}
