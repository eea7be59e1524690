//! Managed weights: records of revisions, their leases and moves. A revision is a group of objects
//! that is imported, read and removed as a whole.
//!
//! The table knows no object. Callers inspect the objects of a group between two calls of the
//! table, which compares the state again.

mod checks;
mod leases;
mod managed;
mod moves;
mod table;
mod table_moves;
#[cfg(test)]
mod tests;
mod values;

pub(crate) use self::checks::{
    check_change, check_commit, check_id, check_import, check_lease, check_list, check_number, check_ttl,
    group_of,
};
pub(crate) use self::managed::ManagedWeights;
pub(crate) use self::values::{Due, Found, Instants, Progress, Result, StoredRevision, WeightStats};
