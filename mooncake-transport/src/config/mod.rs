//! Settings of the transports between processes.
//!
//! They lie here and not beside their transports, so that a program has the same settings whatever
//! transports it is built with. Nothing here is read from the environment.

mod nvlink;
mod rdma;
mod shm;
mod tcp;

pub use nvlink::NvlinkConfig;
pub use rdma::{MAX_PAIRS, MAX_RETRIES, RdmaConfig};
pub use shm::ShmConfig;
pub use tcp::{Framing, TcpConfig};

/// Settings of one transport.
pub trait TransportConfig {
    /// Name of the transport, as in the feature `transport-<name>`.
    const TRANSPORT: &'static str;
}
