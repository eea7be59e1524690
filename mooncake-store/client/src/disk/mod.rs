//! Objects on disks: keeping them on one's own, serving them from there, and asking others for theirs.

use mooncake_core::replica::{Replica, ReplicaLocation};

#[cfg(feature = "disk")]
mod beat;
mod config;
#[cfg(feature = "disk")]
mod files;
#[cfg(feature = "disk")]
mod keep;
#[cfg(feature = "disk")]
mod owner;
#[cfg(feature = "disk")]
mod promote;
mod read;
#[cfg(feature = "disk")]
mod serve;
#[cfg(feature = "disk")]
#[allow(unsafe_code)]
mod shelf;

#[cfg(feature = "disk")]
pub(super) use self::beat::Running;
#[cfg(all(feature = "disk", feature = "testkit"))]
pub use self::config::DiskFaults;
pub use self::config::OffloadConfig;
#[cfg(feature = "disk")]
pub use self::files::FileReport;
#[cfg(feature = "disk")]
pub(super) use self::files::Files;
#[cfg(feature = "disk")]
pub(super) use self::keep::{FilePut, is_gone};
#[cfg(feature = "disk")]
pub use self::owner::DiskReport;
pub(super) use self::read::{Loan, Owners, Wanted};

/// Most objects, and bytes unless one alone has more, that an owner is asked for at a time.
pub(super) const BORROWED: usize = 256;
pub(super) const BYTES_BORROWED: u64 = 64 << 20;

/// Length and owner of a replica, if it lies on a disk whose owner serves it.
pub(super) fn on_disk(replica: &Replica) -> Option<(u64, &str)> {
    match &replica.location {
        ReplicaLocation::LocalDisk { size, endpoint, .. } if !endpoint.is_empty() => Some((*size, endpoint)),
        _ => None,
    }
}

/// Length and path of a replica, if it lies in a file that every client reads.
#[cfg(feature = "disk")]
pub(super) fn in_file(replica: &Replica) -> Option<(u64, &str)> {
    match &replica.location {
        ReplicaLocation::Disk { path, size } => Some((*size, path)),
        _ => None,
    }
}

/// A key as disks and their owners know it: whose it is, a NUL, and the key.
fn scoped(tenant: &str, key: &[u8]) -> Vec<u8> {
    [tenant.as_bytes(), &[0], key].concat()
}

/// Whose key that is, and which. One without a tenant is of the default one.
#[cfg(feature = "disk")]
fn split(scoped: &[u8]) -> (&str, &[u8]) {
    let at = scoped.iter().position(|byte| *byte == 0);
    let parts = at.and_then(|at| Some((std::str::from_utf8(&scoped[..at]).ok()?, &scoped[at + 1..])));
    parts.filter(|(tenant, _)| !tenant.is_empty()).unwrap_or((mooncake_protocol::api::DEFAULT_TENANT, scoped))
}
