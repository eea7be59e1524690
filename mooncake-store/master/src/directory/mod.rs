//! The directory: a table of objects, sharded by key.
//!
//! A shard has one lock. The lock covers its objects, their order of eviction, and the replicas
//! that expired clients may announce again.

mod chains;
mod departed;
pub(crate) mod expired;
mod lifetimes;
pub(crate) mod object;
pub(crate) mod object_disks;
mod order;
pub(crate) mod read_rates;
pub(crate) mod shard;
mod slots;
mod table;

pub(crate) use self::chains::ChainHint;
pub(crate) use self::object::{Copying, Object, Replicas, Value, Write};
pub(crate) use self::order::Pass;
pub(crate) use self::shard::Shard;
pub(crate) use self::table::Directory;
