//! Table of clients.

use std::collections::{HashMap, HashSet};

use mooncake_core::clock::Moment;
use mooncake_core::ids::ClientId;

/// Maximum number of clients. A client that mounts nothing and sends no heartbeat expires.
pub(crate) const MAX_CLIENTS: usize = 1 << 16;

/// Time of the last heartbeat of each client.
#[derive(Default)]
pub(crate) struct ClientTable {
    pub(crate) seen: HashMap<ClientId, Moment>,
    /// Clients whose heartbeats are overdue, and that have not expired yet.
    pub(crate) suspected: HashSet<ClientId>,
    pub(crate) counts: LivenessCounts,
}

/// Changes of the liveness of clients since the start of the master.
#[derive(Clone, Copy, Default)]
pub(crate) struct LivenessCounts {
    /// Number of times that a client became suspected.
    pub(crate) suspicions: u64,
    /// Number of times that a suspected client sent a heartbeat.
    pub(crate) recoveries: u64,
    /// Number of clients that expired.
    pub(crate) expired: u64,
}

impl ClientTable {
    pub(crate) fn len(&self) -> usize {
        self.seen.len()
    }

    /// Ends the suspicion about a client that has sent a heartbeat. Returns whether there was one.
    pub(crate) fn recover(&mut self, client: ClientId) -> bool {
        let recovers = !self.suspected.is_empty() && self.suspected.remove(&client);
        self.counts.recoveries += u64::from(recovers);
        recovers
    }
}
