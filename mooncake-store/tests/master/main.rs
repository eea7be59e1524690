//! The master by its synchronous calls, under a clock that the tests move.
//!
//! No test here opens a port, starts a process or measures real time, so all of them run in
//! parallel. Threads of one test share nothing with those of another.

#[path = "../common"]
#[allow(dead_code, reason = "each test program uses a part")]
mod common {
    pub(crate) mod rig;
}

mod calls;
mod copies;
mod curve;
mod disks;
mod drain;
mod drain_support;
mod expired_clients;
mod files;
mod free_space;
mod gittins;
mod groups;
mod hints;
mod hot_replicas;
mod inventory;
mod lifetimes;
mod misses;
mod model;
mod placement;
mod prefix;
mod promised_leases;
mod snapshots;
mod tenants;
mod writes;
