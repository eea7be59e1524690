//! Membership of a group that the coordinator has refused: this rank is alone.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use mooncake_pg::view::{Evidence, Membership, Slot, SyncOutcome, View};
use tokio::sync::watch;

/// Membership without other ranks. It never has a view.
pub(super) struct LocalMembership {
    slot: Slot,
    views: watch::Sender<Option<Arc<View>>>,
}

impl LocalMembership {
    pub(super) fn new(slot: Slot) -> Self {
        Self { slot, views: watch::Sender::new(None) }
    }
}

#[async_trait]
impl Membership for LocalMembership {
    fn slot(&self) -> Slot {
        self.slot
    }

    fn view(&self) -> watch::Receiver<Option<Arc<View>>> {
        self.views.subscribe()
    }

    fn publish_endpoint(&self, _endpoint: Bytes) {}

    fn report(&self, _slot: Slot, _incarnation: u64, _evidence: Evidence) {}

    async fn is_alive(&self, slot: Slot) -> bool {
        slot == self.slot
    }

    async fn sync_after_failure(&self) -> SyncOutcome {
        SyncOutcome::Rejected("cannot sync: the coordinator has refused the group".to_owned())
    }
}
