#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

pub use mooncake_client as client;
pub use mooncake_engine::transport_set;
pub use mooncake_master as master;
pub use mooncake_protocol::{self as protocol, api};
#[cfg(feature = "cli")]
pub use mooncake_server::tool;
#[cfg(feature = "server")]
pub use mooncake_server::{self as server, config};

/// Shared client of the processes of a host. `process` runs it as a program.
#[cfg(feature = "local")]
pub mod local {
    pub use mooncake_client::local::*;
    #[cfg(feature = "cli")]
    pub use mooncake_server::client_process as process;
}
