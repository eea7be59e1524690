//! The state that the servers of one master share.

use std::sync::Arc;

use mooncake_core::meta::MetadataBackend;

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
    pub(super) config: MasterConfig,
}

impl State {
    pub(super) fn event_stats(&self) -> Option<EventStats> {
        self.events.as_ref().map(|feed| feed.stats())
    }
}
