//! Table of clients.

use std::collections::HashMap;

use mooncake_core::clock::Moment;
use mooncake_core::ids::ClientId;

/// Time of the last heartbeat of each client.
#[derive(Default)]
pub(crate) struct ClientTable {
    pub(crate) seen: HashMap<ClientId, Moment>,
}

impl ClientTable {
    pub(crate) fn len(&self) -> usize {
        self.seen.len()
    }
}
