//! State of a master that only its HTTP endpoints read.

mod expired_clients;

use std::sync::atomic::AtomicU64;

use mooncake_core::replica::Segment;
use parking_lot::Mutex;

use self::expired_clients::ExpiredClients;
use crate::config::tenants;

/// State that the HTTP endpoints of one master share.
#[derive(Debug)]
pub(super) struct EndpointState {
    pub(super) expired_clients: ExpiredClients,
    /// Number of metadata entries that were refused because the service was full.
    pub(super) entries_refused: AtomicU64,
    /// Storage of the tenants' policy, if there are tenants.
    pub(super) policy: Option<tenants::Store>,
    /// Lock for changes of the tenants.
    pub(super) policy_changes: Mutex<()>,
}

impl EndpointState {
    pub(super) fn new(policy: Option<tenants::Store>) -> Self {
        Self {
            expired_clients: ExpiredClients::default(),
            entries_refused: AtomicU64::new(0),
            policy,
            policy_changes: Mutex::default(),
        }
    }

    /// Adds the segments of clients that have expired.
    pub(super) fn note_expired(&self, segments: &[Segment]) {
        self.expired_clients.note(segments);
    }
}
