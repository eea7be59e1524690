//! The programs `mooncake_master`, `mooncake_client` and `mooncake` as processes that are killed,
//! stopped, slow, and started again.
//!
//! Clients of the tests are often this test program, started again for one ignored test that takes
//! its arguments from the environment. So the environment, limits of descriptors, signals and open
//! files of a node are those of a child process, and the tests share one process. The tests of
//! [`listeners`] raise the limit of descriptors of this process, which disturbs no other test.
#![allow(clippy::print_stdout, reason = "processes print their state, and runs their measurements")]

#[path = "../common"]
#[allow(dead_code, reason = "each test program uses a part")]
mod common {
    #[cfg(feature = "metadata-etcd")]
    pub(crate) mod fake_etcd;
    #[cfg(feature = "metadata-rocksdb")]
    pub(crate) mod http;
}
#[cfg(feature = "metadata-etcd")]
#[path = "../../../mooncake-transport/metadata/tests/servers/mod.rs"]
mod servers;

mod bindings;
mod browsers;
mod changed_flags;
mod cluster;
mod corpus;
mod disk;
mod failover;
mod files;
mod forked;
mod hostile;
mod killed_clients;
mod leases;
mod listeners;
mod load;
mod local_clients;
mod master_program;
mod mixed;
mod p2p;
mod partition;
mod process;
mod promised_memory;
#[cfg(feature = "transport-rdma")]
mod rdma;
mod replaced;
mod security;
mod segment_files;
mod snapshots;
mod tool;
mod torture;
mod worker;
