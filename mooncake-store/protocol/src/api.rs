//! Types of calls from a client to a master.

use mooncake_core::ids::{ClientId, Uuid};

pub use crate::wire::{EndItem, PingReply, ProbePolicy};

/// Tenant of every call if the cluster has no tenants.
pub const DEFAULT_TENANT: &str = "default";

/// Object of a put or upsert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PutItem<'a> {
    /// Key of the object.
    pub key: &'a [u8],
    /// Length of the object in bytes.
    pub len: u64,
}

/// Behaviour of a write whose key exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WriteMode {
    /// The write is refused with `OBJECT_ALREADY_EXISTS`.
    Put,
    /// The write replaces the object.
    Upsert,
}

/// Origin of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller<'a> {
    /// Client that makes the call.
    pub client: ClientId,
    /// Tenant of the objects; [`DEFAULT_TENANT`] if the cluster has no tenants.
    pub tenant: &'a str,
    /// Number of the write or copy that the call belongs to, drawn at random for each start; 0 for
    /// none. `MasterClient::fences_writes` tells whether the master respects that of a write.
    pub attempt: u64,
}

/// Identity of a copy of a hot object, as the task states it. The nil token stands for an ordinary
/// copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyToken {
    /// Number of the master's decision.
    pub lease: Uuid,
    /// Version of the object's value at the decision.
    pub epoch: u64,
}

impl CopyToken {
    /// Returns whether the token stands for an ordinary copy.
    pub fn is_nil(self) -> bool {
        self.lease == Uuid::default()
    }
}
