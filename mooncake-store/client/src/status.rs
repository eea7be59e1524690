//! Health and statistics of a client.

use std::future::Future;
use std::sync::atomic::Ordering::Relaxed;

use mooncake_transport::Transport;

use crate::cache::{HotCache, HotCacheStats};
use crate::disk::{DiskReport, FileReport, Files, own};
use crate::handles::ClientStatus;
use crate::metrics::{CURRENT_CALL, Metrics, Operation, StartedCall};
use crate::staging::Staging;

impl<'c, T: Transport> ClientStatus<'c, T> {
    /// Returns whether the master responds.
    pub async fn is_healthy(self) -> bool {
        let inner = &self.client.inner;
        inner.usable().is_ok() && inner.deadline().bound("ping", inner.master.ping(inner.id)).await.is_ok()
    }

    /// Returns the number of bytes of the local buffer in use. The bytes belong to transfers in
    /// progress, and to values from [`get`](crate::Client::get) that the caller still holds.
    pub fn local_buffer_used(self) -> u64 {
        self.client.inner.staging.as_ref().map_or(0, Staging::used)
    }

    /// Returns the statistics of the hot cache, or `None` without one
    /// ([`ClientConfig::hot_cache`](crate::ClientConfig::hot_cache)).
    pub fn hot_cache(self) -> Option<HotCacheStats> {
        self.client.inner.cache.as_ref().map(HotCache::stats)
    }

    /// Returns the statistics of the disk, or `None` without one
    /// ([`ClientConfig::offload`](crate::ClientConfig::offload)).
    pub fn disk(self) -> Option<DiskReport> {
        own::report(&self.client.inner.disk)
    }

    /// Returns the counters of the file system that clients share. Returns `None` if the master has
    /// no directory for files (`--root_fs_dir`).
    pub fn files(self) -> Option<FileReport> {
        self.client.inner.files.as_deref().map(Files::report)
    }

    /// Returns the number of objects that owners of disks have read for this client.
    pub fn disk_reads(self) -> u64 {
        self.client.inner.disk_owners.borrowed_objects.load(Relaxed)
    }

    /// Returns the number of objects in this client's memory that would outlive the master now. See
    /// [`ClientConfig::outlive_master`](crate::ClientConfig::outlive_master).
    ///
    /// Asks the master for its latest changes first, so that objects that were just removed or
    /// replaced do not count.
    pub async fn lasting_objects(self) -> usize {
        self.client.inner.count_lasting().await
    }

    /// Returns the metrics of this client, or `None` if they are disabled
    /// ([`ClientConfig::metrics`](crate::ClientConfig::metrics)).
    pub fn metrics(self) -> Option<&'c Metrics> {
        self.client.inner.metrics.as_deref()
    }

    /// Begins a call that consists of several calls of this client, for programs with another API.
    pub fn begin(self, operation: Operation) -> StartedCall {
        StartedCall(operation, self.metrics().map(|metrics| metrics.clock.now()))
    }

    /// Runs calls that are counted as the call `started`, from its start time on.
    pub async fn counted<F: Future>(self, started: StartedCall, calls: F) -> F::Output {
        match self.metrics() {
            Some(_) => CURRENT_CALL.scope(started, calls).await,
            None => calls.await,
        }
    }
}
