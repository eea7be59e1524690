//! The client against a real master: embedded over loopback, and remote over RPC with TCP and shared memory.

mod cache;
mod checksum;
mod device;
#[cfg(feature = "disk")]
mod disk;
#[cfg(feature = "disk")]
mod disk_faults;
#[cfg(feature = "disk")]
mod disk_parts;
mod drain;
mod faults;
#[cfg(feature = "disk")]
mod files;
mod herd;
mod hot;
#[path = "../http_support/mod.rs"]
mod http;
mod identity;
mod lent;
mod lossy;
mod meeting;
mod outlive;
mod parts;
mod restart;
mod room;
#[cfg(all(feature = "transport-shm", feature = "transport-tcp"))]
mod same_host;
mod scenarios;
mod session_property;
mod sessions;
#[cfg(feature = "transport-tcp")]
mod shared_engine;
mod support;
mod tasks;
mod tenants;
