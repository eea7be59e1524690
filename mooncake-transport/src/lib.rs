#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

pub mod admission;
pub mod bind_address;
pub mod config;
#[allow(unsafe_code)]
pub mod device;
pub mod directory;
pub mod engine;
#[allow(unsafe_code)]
pub mod exposed;
#[allow(unsafe_code)]
pub mod fallback;
pub mod handshake;
#[cfg(feature = "http-server")]
pub mod http_server;
pub mod inline_wait;
pub mod instance;
#[allow(unsafe_code)]
pub mod loopback;
pub mod net;
#[allow(unsafe_code)]
pub mod pool;
pub mod private_files;
pub mod protocol;
#[allow(unsafe_code)]
pub mod region;
#[allow(unsafe_code)]
pub mod region_pool;
pub mod segment;
#[allow(unsafe_code)]
pub mod staged;
#[allow(unsafe_code)]
pub mod staging_pool;
pub mod statistics;
#[cfg(feature = "testkit")]
pub mod testkit;
#[allow(unsafe_code)]
pub mod through_host;
pub mod ticket;
pub mod topology;
#[allow(unsafe_code)]
pub mod transfer;
pub mod transport;

pub use directory::Directory;
pub use engine::{Engine, Request, Target};
pub use exposed::ExposedMemory;
pub use inline_wait::wait_inline;
pub use loopback::{Loopback, LoopbackNet};
pub use pool::{BufferPool, PoolBuf, PoolConfig};
pub use protocol::Protocol;
pub use region::{BorrowedMemory, Region, Sink, Slice, SliceMut, Source};
pub use region_pool::RegionPool;
pub use segment::{BufferDesc, SegmentDesc};
pub use staged::{CopyTransport, Staged};
pub use through_host::ThroughHost;
pub use ticket::{Completion, Ticket, ticket};
pub use transfer::Transfer;
pub use transport::{Access, Capabilities, Op, Opcode, PathStatistics, Transport};
