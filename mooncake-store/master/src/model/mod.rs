//! Types that the other layers share: options, identities, and small tables with a lock of their
//! own.
//!
//! Nothing here knows an object of the directory or another layer.

pub(crate) mod address_checks;
pub(crate) mod announcements;
pub(crate) mod copy_jobs;
pub(crate) mod counters;
pub(crate) mod curve;
pub(crate) mod disk;
pub(crate) mod disk_replicas;
pub(crate) mod drain;
pub(crate) mod epochs;
pub(crate) mod group;
pub(crate) mod journal;
pub(crate) mod ledger;
pub(crate) mod lifetime;
pub(crate) mod look_ups;
pub(crate) mod misses;
pub(crate) mod options;
pub mod pattern;
pub(crate) mod promise;
pub(crate) mod readers;
pub(crate) mod residue;
pub(crate) mod returned_keys;
pub(crate) mod segment;
pub(crate) mod snapshot;
pub(crate) mod stats;
pub(crate) mod suspicion;
pub(crate) mod tenants;
pub(crate) mod value;
pub(crate) mod weights;
