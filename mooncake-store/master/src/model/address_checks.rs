//! Requested checks of the addresses that clients advertise.

use std::collections::{HashMap, VecDeque};

use mooncake_core::ids::ClientId;
use mooncake_protocol::wire::AddressCheck;

/// Address that a client advertises.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdvertisedAddress {
    /// Client behind the address.
    pub client: ClientId,
    /// Host and port of its handshake port.
    pub endpoint: String,
    /// Identity of its process.
    pub instance: String,
}

/// Requested checks, and their outcomes.
#[derive(Default)]
pub(crate) struct AddressChecks {
    pub(crate) queue: VecDeque<AdvertisedAddress>,
    pub(crate) latest: HashMap<ClientId, (AdvertisedAddress, AddressCheck)>,
}

impl AddressChecks {
    /// Forgets the clients that are not known any more.
    pub(crate) fn prune(&mut self, is_known: impl Fn(ClientId) -> bool) {
        self.latest.retain(|client, _| is_known(*client));
        self.queue.retain(|address| is_known(address.client));
    }
}
