//! The state that the servers of one master share.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use mooncake_core::meta::MetadataBackend;
#[cfg(feature = "http")]
use parking_lot::Mutex;

use super::counting::Requests;
use super::event_stats::EventStats;
#[cfg(feature = "events-zmq")]
use super::events::Feed;
use super::expired_clients::ExpiredClients;
use super::leader::Leadership;
use super::rates::Rates;
use super::snapshot_stats::SnapshotStats;
use crate::config::MasterConfig;
#[cfg(feature = "http")]
use crate::config::tenants;
use mooncake_master::Master;

/// State that the servers of one master share.
#[derive(Debug)]
pub(super) struct State {
    pub(super) master: Arc<Master>,
    pub(super) metadata: Arc<dyn MetadataBackend>,
    /// Metadata service where clients publish themselves: `metadata` or an external one.
    pub(super) published: Arc<dyn MetadataBackend>,
    pub(super) expired_clients: ExpiredClients,
    #[cfg(feature = "events-zmq")]
    pub(super) events: Option<Arc<Feed>>,
    pub(super) requests: Requests,
    pub(super) rates: Rates,
    pub(super) snapshots: SnapshotStats,
    pub(super) leadership: Arc<Leadership>,
    pub(super) config: MasterConfig,
    /// Number of metadata entries that were refused because the service was full.
    pub(super) entries_refused: AtomicU64,
    /// Storage of the tenants' policy, if there are tenants.
    #[cfg(feature = "http")]
    pub(super) policy: Option<tenants::Store>,
    /// Lock for changes of the tenants.
    #[cfg(feature = "http")]
    pub(super) policy_changes: Mutex<()>,
}

impl State {
    pub(super) fn event_stats(&self) -> Option<EventStats> {
        #[cfg(feature = "events-zmq")]
        return self.events.as_ref().map(|feed| feed.stats());
        #[cfg(not(feature = "events-zmq"))]
        None
    }
}
