//! Checks of the addresses that clients advertise. A client asks for one after a mount. The server
//! of the master connects to the address, and the client fetches the outcome.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::ClientId;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_protocol::wire::AddressCheck;

use super::master::Master;
use crate::model::address_checks::AdvertisedAddress;
use crate::space::mount::MAX_WORD;

const PENDING: AddressCheck = AddressCheck { is_over: false, finding: None };

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Returns the outcome of the check of an address; requests one if there is none, or if an
    /// outcome does not count any more (`again`).
    ///
    /// # Errors
    /// `INVALID_PARAMS` for a longer text than an endpoint; `CLIENT_NOT_FOUND`.
    pub fn check_address(&self, address: AdvertisedAddress, again: bool) -> Result<AddressCheck> {
        if address.endpoint.len().max(address.instance.len()) > MAX_WORD {
            return Err(Error::invalid(format!("cannot check address: it is longer than {MAX_WORD} bytes")));
        }
        if !self.clients.lock().seen.contains_key(&address.client) {
            return Err(ErrorCode::ClientNotFound.into());
        }
        let mut checks = self.address_checks.lock();
        if let Some((_, check)) = checks
            .latest
            .get(&address.client)
            .filter(|(known, check)| *known == address && !(again && check.is_over))
        {
            return Ok(check.clone());
        }
        checks.queue.retain(|waiting| waiting.client != address.client);
        checks.queue.push_back(address.clone());
        checks.latest.insert(address.client, (address, PENDING));
        Ok(PENDING)
    }

    /// Returns the next address to check, once.
    pub fn next_address(&self) -> Option<AdvertisedAddress> {
        self.address_checks.lock().queue.pop_front()
    }

    /// Records the outcome of a check: the reason why the address does not lead to its client.
    pub fn record_address(&self, address: &AdvertisedAddress, finding: Option<String>) {
        if let Some((_, check)) =
            self.address_checks.lock().latest.get_mut(&address.client).filter(|(known, _)| known == address)
        {
            *check = AddressCheck { is_over: true, finding };
        }
    }

    /// Returns the reason why the address of a client does not lead to it, if a check has found
    /// one.
    pub fn address_finding(&self, client: ClientId) -> Option<String> {
        self.address_checks.lock().latest.get(&client)?.1.finding.clone()
    }
}
