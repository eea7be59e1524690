#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

#[allow(unsafe_code)]
pub mod allocator;
#[allow(unsafe_code)]
mod codec;
#[allow(unsafe_code)]
mod copier;
#[allow(unsafe_code)]
pub mod cuda;
mod descriptor_only;
#[allow(unsafe_code)]
mod driver;
#[allow(unsafe_code)]
mod ordered;
mod peer;
mod poller;
mod summary;
#[cfg(feature = "testkit")]
#[allow(unsafe_code)]
pub mod testkit;
#[allow(unsafe_code)]
mod transport;

#[doc(hidden)]
pub use codec::reencode as reencode_records;
pub use copier::Refusal;
pub use cuda::{Cuda, Device, DeviceMemory, Stream};
pub use driver::CudaDriver;
pub use mooncake_transport::config::NvlinkConfig;
pub use ordered::{Ordered, StreamOrder};
pub use peer::NvlinkPeer;
pub use summary::device_summaries;
pub use transport::{NvlinkTransport, Registration};
