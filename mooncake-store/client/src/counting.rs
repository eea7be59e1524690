//! Counting of operations in the metrics of a client.

use mooncake_core::clock::Moment;
use mooncake_transport::Transport;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::metrics::{Begun, CALLED, Counting, Operation};
use crate::state::Inner;

impl<T: Transport> Inner<T> {
    /// Counts keys that were requested and do not exist.
    pub(crate) fn missed(&self, keys: usize) {
        if let Some(metrics) = &self.metrics {
            metrics.read.other.fetch_add(keys as u64, Relaxed);
        }
    }

    /// Begins to count a call. A call that is part of another call is counted as the other call.
    pub(crate) fn counting(&self, operation: Operation) -> Counting<'_> {
        let metrics = self.metrics.as_deref();
        let this = Begun(operation, None);
        let Begun(operation, began) = match metrics {
            Some(_) => CALLED.try_with(|called| *called).unwrap_or(this),
            None => this,
        };
        let now = || metrics.map_or(Moment::default(), |metrics| metrics.clock.now());
        Counting {
            metrics,
            operation,
            began: began.unwrap_or_else(now),
            moving: Duration::ZERO,
            bytes: 0,
            moved: 0,
            outcomes: [0; 3],
        }
    }
}
