//! Count of the operations in progress.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Notify;

/// Number of operations in progress.
pub(super) struct Gauge {
    running: AtomicUsize,
    /// Number of operations of all communicators.
    process_total: Arc<AtomicUsize>,
    drained: Notify,
}

impl Gauge {
    pub(super) fn new(process_total: Arc<AtomicUsize>) -> Arc<Self> {
        Arc::new(Self { running: AtomicUsize::new(0), process_total, drained: Notify::new() })
    }

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
        gauge.process_total.fetch_add(1, Ordering::SeqCst);
        Self(gauge.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.process_total.fetch_sub(1, Ordering::SeqCst);
        if self.0.running.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.drained.notify_waiters();
        }
    }
}
