//! Counting of operations in the metrics of a client.

use mooncake_core::clock::Moment;
use mooncake_transport::Transport;
use std::future::Future;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::metrics::{Begun, CALLED, Counting, Metrics, Operation};
use crate::state::{Client, Inner};

impl<T: Transport> Inner<T> {
    /// So many keys were looked for and not there.
    pub(crate) fn missed(&self, keys: usize) {
        if let Some(metrics) = &self.metrics {
            metrics.read.other.fetch_add(keys as u64, Relaxed);
        }
    }

    /// Begins to count a call, as what it is or as the one that it is part of.
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

impl<T: Transport> Client<T> {
    /// What was counted so far; `None` when it was told not to
    /// ([`ClientConfig::metrics`](crate::ClientConfig::metrics)).
    pub fn metrics(&self) -> Option<&Metrics> {
        self.inner.metrics.as_deref()
    }

    /// Begins a call of another shape than those of this client, for whoever offers such.
    pub fn begin(&self, operation: Operation) -> Begun {
        Begun(operation, self.metrics().map(|metrics| metrics.clock.now()))
    }

    /// Makes calls that are counted as that one, from its beginning on.
    pub async fn counted<F: Future>(&self, begun: Begun, calls: F) -> F::Output {
        match self.metrics() {
            Some(_) => CALLED.scope(begun, calls).await,
            None => calls.await,
        }
    }
}
