//! The client with a real master: embedded with the loopback transport, and remote over RPC with
//! TCP and shared memory.
//!
//! The tests share one process: each has a cluster of its own on free ports, so they run in
//! parallel. Ignored tests need RDMA devices (`cargo xtask rdma-test`), or are child processes that
//! other tests start with this program.

#[path = "../common"]
#[allow(dead_code, reason = "each test program uses a part")]
mod common {
    #[cfg(feature = "disk")]
    pub(crate) mod fake_disk;
    pub(crate) mod http;
}

mod advertised_address;
#[cfg(feature = "disk")]
mod batches;
mod cache;
mod checksum;
mod cluster;
mod departures;
mod device;
mod discovery;
#[cfg(feature = "disk")]
mod disk;
#[cfg(feature = "disk")]
mod disk_faults;
#[cfg(feature = "disk")]
mod disk_limits;
#[cfg(feature = "disk")]
mod disk_parts;
mod drain;
mod faults;
#[cfg(feature = "disk")]
mod files;
mod free_space;
mod hints;
mod hot_replicas;
mod identity;
mod lent_memory;
#[cfg(feature = "disk")]
mod loans;
#[cfg(feature = "local")]
mod local;
mod lossy;
mod lost_responses;
mod many_clients;
mod moved_memory;
#[cfg(feature = "disk")]
mod old_memory;
mod parts;
mod payloads;
#[cfg(feature = "disk")]
mod prefetches;
mod prefix;
mod recovery;
mod restart;
#[cfg(all(feature = "transport-shm", feature = "transport-tcp"))]
mod same_host;
mod scenarios;
mod session_property;
mod sessions;
#[cfg(feature = "transport-tcp")]
mod shared_engine;
mod tasks;
mod tenants;
mod zeroes;
