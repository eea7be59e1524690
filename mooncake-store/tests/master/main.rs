//! The master by its synchronous calls, under a clock that the tests move.
//!
//! No test here opens a port, starts a process or measures real time, so all of them run in
//! parallel. Threads of one test share nothing with those of another.

#[path = "../common"]
#[allow(dead_code, reason = "each test program uses a part")]
mod common {
    pub(crate) mod rig;
}

mod announced_order;
mod calls;
mod copies;
mod curve;
mod disks;
mod drain;
mod drain_support;
mod ends_of_reads;
mod expired_clients;
mod files;
mod free_space;
mod gittins;
mod groups;
mod hints;
mod hot_replicas;
mod inventory;
mod key_forms;
mod lifetimes;
mod looked_up;
mod lost_copies;
mod misses;
mod model;
mod numbered_copies;
mod pins;
mod placement;
mod prefetches;
mod prefix;
mod promised_leases;
mod read_once;
mod removals;
mod removed_on_disks;
mod retired_mounts;
mod short_leases;
mod snapshots;
mod snapshots_beside_returns;
mod suspected_clients;
mod tenants;
mod weight_property;
mod weights;
mod write_order;
mod writes;
mod zeroes;
