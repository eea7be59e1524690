//! Counting of operations in the metrics of a client.

use mooncake_core::clock::Moment;
use mooncake_transport::Transport;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::metrics::{CURRENT_CALL, Counting, Operation, StartedCall};
use crate::state::Inner;

impl<T: Transport> Inner<T> {
    /// Counts keys that were requested and do not exist.
    pub(crate) fn count_misses(&self, keys: usize) {
        if let Some(metrics) = &self.metrics {
            metrics.read.other.fetch_add(keys as u64, Relaxed);
        }
    }

    /// Begins to count a call. A call that is part of another call is counted as the other call.
    pub(crate) fn counting(&self, operation: Operation) -> Counting<'_> {
        let metrics = self.metrics.as_deref();
        let own_call = StartedCall(operation, None);
        let StartedCall(operation, started) = match metrics {
            Some(_) => CURRENT_CALL.try_with(|current| *current).unwrap_or(own_call),
            None => own_call,
        };
        let now = || metrics.map_or(Moment::default(), |metrics| metrics.clock.now());
        Counting {
            metrics,
            operation,
            started: started.unwrap_or_else(now),
            transfer_time: Duration::ZERO,
            bytes: 0,
            transferred: 0,
            outcomes: [0; 3],
        }
    }
}
