//! The directory: a table of objects, sharded by key.
//!
//! A shard has one lock. The lock covers its objects, their order of eviction, the replicas that
//! expired clients may announce again, and the record of removals.

pub(crate) mod absent_disks;
mod chains;
mod copying;
mod departed;
pub(crate) mod expired;
mod lifetimes;
pub(crate) mod object;
pub(crate) mod object_disks;
mod order;
pub(crate) mod read_rates;
pub(crate) mod removals;
pub(crate) mod removed_keys;
mod replicas;
pub(crate) mod shard;
mod shard_copies;
mod slots;
mod table;

pub(crate) use self::chains::ChainHint;
pub(crate) use self::copying::{CopyOutcome, Copying};
pub(crate) use self::object::{Object, Value, Write};
pub(crate) use self::order::Pass;
pub(crate) use self::replicas::Replicas;
pub(crate) use self::shard::Shard;
pub(crate) use self::table::{Directory, LockedShards, Position};
