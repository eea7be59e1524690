//! Locations of replicas, and comparison of the values that two responses of a master describe.

use mooncake_core::replica::{Replica, ReplicaLocation};

/// Returns whether two responses of a master describe the same value. Each response is given by its
/// replicas and its checksum.
///
/// One common replica identifier is enough if each identifier belongs to one value. Otherwise
/// identifier, location and length must all be equal. A value that another client overwrites in
/// place keeps all three, and only its checksum, if it has one, changes.
pub(crate) fn is_same(then: (&[Replica], Option<u64>), now: (&[Replica], Option<u64>)) -> bool {
    then.1 == now.1 && now.0.iter().any(|now| then.0.iter().any(|then| is_same_copy(then, now)))
}

/// Returns whether two descriptions of a replica are of the same value.
pub(crate) fn is_same_copy(then: &Replica, now: &Replica) -> bool {
    now.id == then.id && (now.id.is_of_one_value() || now.location == then.location)
}

/// Returns the length and the endpoint of a replica on a disk whose client serves it.
pub(crate) fn on_disk(replica: &Replica) -> Option<(u64, &str)> {
    match &replica.location {
        ReplicaLocation::LocalDisk { size, endpoint, .. } if !endpoint.is_empty() => Some((*size, endpoint)),
        _ => None,
    }
}

/// Returns the length and the path of a replica in a file that every client can read.
pub(crate) fn in_file(replica: &Replica) -> Option<(u64, &str)> {
    match &replica.location {
        ReplicaLocation::Disk { path, size } => Some((*size, path)),
        _ => None,
    }
}
