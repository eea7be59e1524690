//! Identity of a value: the write that made it.

use mooncake_core::ids::ClientId;
use mooncake_protocol::api::Caller;

/// Who writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Writer {
    /// The client.
    pub client: ClientId,
    /// A number the client draws for each put of a key, 0 for none. It tells a repeated call from another one: a start
    /// repeated with the same number gets the same grant, and an end or revoke with another number than the start's is
    /// refused. The existing system has no such number; without it, a second start of a key is answered
    /// `OBJECT_ALREADY_EXISTS` even to the same client, because two of its threads may not share one grant.
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
    /// Whether this caller is the one that `self` was recorded for.
    pub(crate) fn is(self, caller: Writer) -> bool {
        self.client == caller.client
            && (self.attempt == caller.attempt || self.attempt == 0 || caller.attempt == 0)
    }

    /// Whether this caller repeats a call of `self`, beyond doubt.
    pub(crate) fn repeats(self, caller: Writer) -> bool {
        self == caller && self.attempt != 0
    }
}

/// When a value was written: by which master, and after how many uses of its objects. Of one master's, the later is the newer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub(crate) epoch: u64,
    pub(crate) number: u64,
}
