//! Names of transports.

use std::borrow::Cow;
use std::fmt;

/// Name of a transport as segment descriptors spell it. The set is open: the constants are those of
/// this project.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Protocol(Cow<'static, str>);

impl Protocol {
    /// TCP, crate `mooncake-tcp`.
    pub const TCP: Protocol = Protocol(Cow::Borrowed("tcp"));
    /// RDMA verbs.
    pub const RDMA: Protocol = Protocol(Cow::Borrowed("rdma"));
    /// NVLink between GPUs.
    pub const NVLINK: Protocol = Protocol(Cow::Borrowed("nvlink"));
    /// NVLink between GPUs of one host.
    pub const NVLINK_INTRA: Protocol = Protocol(Cow::Borrowed("nvlink_intra"));
    /// Shared memory of one host, crate `mooncake-shm`.
    pub const SHM: Protocol = Protocol(Cow::Borrowed("shm"));
    /// Files and block devices, crate `mooncake-disk`.
    pub const DISK: Protocol = Protocol(Cow::Borrowed("disk"));
    /// Inside one process, [`Loopback`](crate::loopback::Loopback).
    pub const LOOPBACK: Protocol = Protocol(Cow::Borrowed("loopback"));

    /// Creates the name of a transport.
    pub fn new(name: impl Into<Cow<'static, str>>) -> Self {
        Self(name.into())
    }

    /// Returns the name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
