//! Objects that a shared client has located and reads no more. The daemon drops them, so that their
//! space need not wait for the ends of their leases. Many of them make one report.

use std::sync::Arc;

use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;

/// Time in which further numbers join a report. A put that waits for space has longer pauses.
const JOIN: Duration = Duration::from_millis(10);

/// Numbers of objects that are not reported to the daemon yet.
#[derive(Debug, Default)]
pub(super) struct ReleasedObjects {
    numbers: Mutex<Vec<u64>>,
    added: Notify,
}

impl ReleasedObjects {
    /// Waits until there are numbers to report.
    pub(super) async fn added(&self) {
        while self.numbers.lock().is_empty() {
            self.added.notified().await;
        }
        tokio::time::sleep(JOIN).await;
    }

    /// Takes the numbers, for one report of all of them.
    pub(super) fn take(&self) -> Vec<u64> {
        std::mem::take(&mut self.numbers.lock())
    }
}

/// Object at the daemon, which drops the object once this value is dropped.
#[derive(Debug)]
pub(super) struct HeldObject {
    pub(super) number: u64,
    released: Arc<ReleasedObjects>,
}

impl HeldObject {
    pub(super) fn new(number: u64, released: &Arc<ReleasedObjects>) -> Arc<Self> {
        Arc::new(Self { number, released: released.clone() })
    }
}

impl Drop for HeldObject {
    fn drop(&mut self) {
        let mut numbers = self.released.numbers.lock();
        numbers.push(self.number);
        if numbers.len() == 1 {
            self.released.added.notify_one();
        }
    }
}
