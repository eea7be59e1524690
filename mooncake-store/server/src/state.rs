//! The state that the servers of one master share.

use std::sync::Arc;

use mooncake_core::meta::MetadataBackend;
use tokio::sync::Semaphore;

use super::counting::Requests;
use super::endpoint_state::EndpointState;
use super::event_stats::EventStats;
use super::events::Feed;
use super::leader::Leadership;
use super::rates::Rates;
use super::snapshot_stats::SnapshotStats;
use crate::config::MasterConfig;
use mooncake_master::Master;

/// State that the servers of one master share.
#[derive(Debug)]
pub(super) struct State {
    pub(super) master: Arc<Master>,
    pub(super) metadata: Arc<dyn MetadataBackend>,
    /// Metadata service where clients publish themselves: `metadata` or an external one.
    pub(super) published: Arc<dyn MetadataBackend>,
    pub(super) events: Option<Arc<Feed>>,
    pub(super) requests: Requests,
    pub(super) rates: Rates,
    pub(super) snapshots: SnapshotStats,
    pub(super) leadership: Arc<Leadership>,
    pub(super) endpoints: EndpointState,
    pub(super) long_calls: LongCalls,
    /// Permits of checks of addresses.
    pub(super) dial_backs: Arc<Semaphore>,
    pub(super) config: MasterConfig,
}

/// Permits of calls that take long. Each kind has a few, so that it takes a few threads and the
/// memory of a few responses, however many peers call.
#[derive(Debug)]
pub(super) struct LongCalls {
    /// Permits of calls that list objects of all shards.
    pub(super) lists: Arc<Semaphore>,
    /// Permits of calls that remove objects of all shards.
    pub(super) removals: Arc<Semaphore>,
    /// Permits of calls that mount and unmount memory. They visit all shards, too, but no flood of
    /// removals delays them.
    pub(super) mounts: Arc<Semaphore>,
    /// Permits of calls about thousands of keys.
    pub(super) batches: Semaphore,
    /// Permits of calls about hundreds of keys, one for each thread: those that wait for a permit
    /// do not delay short calls.
    pub(super) turns: Semaphore,
}

impl LongCalls {
    /// Creates the permits for a runtime with this number of threads.
    pub(super) fn new(threads: usize) -> Self {
        // These calls run on threads of their own, and leave processors to the others.
        let few = (threads / 4).clamp(1, 4);
        Self {
            lists: Arc::new(Semaphore::new(few)),
            removals: Arc::new(Semaphore::new(few)),
            mounts: Arc::new(Semaphore::new((threads / 2).max(2))),
            batches: Semaphore::new(few),
            turns: Semaphore::new(threads.max(1)),
        }
    }
}

impl State {
    pub(super) fn event_stats(&self) -> Option<EventStats> {
        self.events.as_ref().map(|feed| feed.stats())
    }
}
