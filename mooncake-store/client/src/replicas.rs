//! Where a replica lies, and whether two answers of a master are about the same value.

use mooncake_core::replica::{Replica, ReplicaLocation};

/// Whether a later answer of a master speaks of the very value that an earlier one spoke of, with these replicas and this checksum.
///
/// One number in common is enough where numbers are of one value. Elsewhere number, place and length must all be what they were,
/// which a value written over in place by somebody else leaves as they are; its checksum, if it has one, does not.
pub(crate) fn is_same(then: (&[Replica], Option<u64>), now: (&[Replica], Option<u64>)) -> bool {
    then.1 == now.1 && now.0.iter().any(|now| then.0.iter().any(|then| is_same_copy(then, now)))
}

pub(crate) fn is_same_copy(then: &Replica, now: &Replica) -> bool {
    now.id == then.id && (now.id.is_of_one_value() || now.location == then.location)
}

/// Length and owner of a replica, if it lies on a disk whose owner serves it.
pub(crate) fn on_disk(replica: &Replica) -> Option<(u64, &str)> {
    match &replica.location {
        ReplicaLocation::LocalDisk { size, endpoint, .. } if !endpoint.is_empty() => Some((*size, endpoint)),
        _ => None,
    }
}

/// Length and path of a replica, if it lies in a file that every client reads.
#[cfg(feature = "disk")]
pub(crate) fn in_file(replica: &Replica) -> Option<(u64, &str)> {
    match &replica.location {
        ReplicaLocation::Disk { path, size } => Some((*size, path)),
        _ => None,
    }
}
