//! Origin of the addresses that a client reads from and writes to.

use mooncake_core::clock::Moment;
use mooncake_transport::engine::LookUps;

/// Issuer of an address, with the state of the look-ups of the engine before the request to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Issuer {
    /// The master, for memory that is mounted.
    Master(LookUps),
    /// The owner of the memory, for a value that it has read from its disk.
    Owner(LookUps),
}

/// Time before a request for addresses, and the look-ups that the engine had made by then.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestStamp {
    pub(crate) at: Moment,
    pub(crate) look_ups: LookUps,
}
