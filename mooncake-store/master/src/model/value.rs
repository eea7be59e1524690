//! Identity of a value: the write that made it.

use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::ClientId;
use mooncake_protocol::api::Caller;

use super::residue::Grantee;

/// Writer of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Writer {
    /// Client that writes.
    pub client: ClientId,
    /// Number that the client draws for each put of a key; 0 for none.
    ///
    /// The number identifies a repeated call. A start that is repeated with the same number returns
    /// the same allocation. An end or revoke with another number than that of the start is refused.
    /// Mooncake C++ has no such number. Without it, a second start of a key fails with
    /// `OBJECT_ALREADY_EXISTS` even for the same client, because two of its threads may not share
    /// one allocation.
    pub attempt: u64,
}

impl From<ClientId> for Writer {
    fn from(client: ClientId) -> Self {
        Self { client, attempt: 0 }
    }
}

impl From<Caller<'_>> for Writer {
    fn from(caller: Caller<'_>) -> Self {
        Self { client: caller.client, attempt: caller.attempt }
    }
}

impl Writer {
    /// Returns whether `caller` is this writer. A number of 0 on either side matches every number.
    pub(crate) fn is(self, caller: Writer) -> bool {
        self.client == caller.client
            && (self.attempt == caller.attempt || self.attempt == 0 || caller.attempt == 0)
    }

    /// Returns this writer as the receiver of space for an object of a tenant. Clients of this
    /// project number their writes, and end none with bytes missing.
    pub(crate) fn grantee(self, tenant: u32) -> Grantee {
        let writes_all = self.attempt != 0 || is_planted("old-memory-across-tenants");
        Grantee { tenant, writes_all }
    }

    /// Returns whether `caller` certainly repeats a call of this writer.
    pub(crate) fn repeats(self, caller: Writer) -> bool {
        self == caller && self.attempt != 0
    }
}

/// Time at which a value became readable: the master that handled the write, and a number.
/// Among the stamps of one master, the one with the higher number is the newer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub(crate) epoch: u64,
    pub(crate) number: u64,
}

impl Stamp {
    /// Epoch of values of unknown earlier masters. Every other value counts as newer.
    pub(crate) const BEFORE: u64 = 0;

    /// Stamp of a value of an unknown earlier master.
    pub(crate) const UNKNOWN: Self = Self { epoch: Self::BEFORE, number: 0 };
}
