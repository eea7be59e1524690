//! Real processes that die, freeze, are slow and come back: contract points 1, 2 and 4. The master is the program; members are this test
//! binary, started again for one test that does as its environment says.
#![allow(clippy::print_stdout, reason = "how a process says where it stands, and the figures of a run")]

#[cfg(feature = "metadata-rocksdb")]
#[path = "../http_support/mod.rs"]
mod http_support;
#[path = "../process_support/mod.rs"]
mod process;
#[cfg(feature = "metadata-etcd")]
#[path = "../../../mooncake-transport/tests/servers/mod.rs"]
mod servers;

mod corpus;
mod disk;
mod dying;
mod files;
mod forked;
mod lasting;
mod leading;
mod leases;
mod load;
mod mixed;
mod partition;
#[cfg(feature = "transport-rdma")]
mod rdma;
mod replaced;
mod snapshots;
mod support;
mod worker;
