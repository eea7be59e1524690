#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

#[allow(unsafe_code)]
pub mod allocator;
#[allow(unsafe_code)]
mod copier;
#[allow(unsafe_code)]
pub mod cuda;
#[allow(unsafe_code)]
mod driver;
mod listed;
#[allow(unsafe_code)]
mod ordered;
mod peer;
mod poller;
#[allow(unsafe_code)]
mod shown;
#[cfg(feature = "testkit")]
#[allow(unsafe_code)]
pub mod testkit;
#[allow(unsafe_code)]
mod transport;

pub use copier::Refusal;
pub use cuda::{Cuda, Device, DeviceMemory, Stream};
pub use driver::CudaDriver;
pub use mooncake_transport::config::NvlinkConfig;
pub use ordered::{Ordered, StreamOrder};
pub use peer::NvlinkPeer;
#[doc(hidden)]
pub use shown::again as records_again;
pub use transport::{NvlinkTransport, Registration};
