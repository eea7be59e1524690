//! Transports of this build, under one name each. No other file of the crate depends on the
//! features `transport-*`. [`absent`](crate::absent) replaces a transport that is left out.

#[cfg(not(feature = "transport-tcp"))]
pub(crate) use crate::absent::Absent as Tcp;
#[cfg(not(feature = "transport-shm"))]
pub(crate) use crate::absent::Absent as Shm;
#[cfg(not(feature = "transport-nvlink"))]
pub(crate) use crate::absent::{Absent as Nvlink, Cuda, CudaDriver, StreamOrder, device_summaries};
#[cfg(not(feature = "transport-rdma"))]
pub(crate) use crate::absent::{Absent as Rdma, device_names};
#[cfg(feature = "transport-nvlink")]
pub(crate) use mooncake_nvlink::{
    Cuda, CudaDriver, NvlinkTransport as Nvlink, StreamOrder, device_summaries,
};
#[cfg(feature = "transport-rdma")]
pub(crate) use mooncake_rdma::{RdmaTransport as Rdma, verbs::device_names};
#[cfg(feature = "transport-shm")]
pub(crate) use mooncake_shm::ShmTransport as Shm;
#[cfg(feature = "transport-tcp")]
pub(crate) use mooncake_tcp::TcpTransport as Tcp;

/// Names of the transports between processes, and whether this build has them.
const TRANSPORTS: [(&str, bool); 5] = [
    ("tcp", cfg!(feature = "transport-tcp")),
    ("shm", cfg!(feature = "transport-shm")),
    ("rdma", cfg!(feature = "transport-rdma")),
    ("nvlink", cfg!(feature = "transport-nvlink")),
    ("nvlink_intra", cfg!(feature = "transport-nvlink")),
];

/// Returns the names of the transports that this build has.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    TRANSPORTS.iter().filter(|(_, built)| *built).map(|(name, _)| *name)
}

/// Returns whether this build has the transport of that name.
pub(crate) fn has(name: &str) -> bool {
    names().any(|built| built == name)
}
