//! Objects on disks: a disk of this client, access of other clients to it, and access to the disks
//! of other clients.

mod files;
mod loan;
#[cfg_attr(not(feature = "disk"), path = "own/absent.rs")]
pub(crate) mod own;
mod prefetches;
mod shared_folder;

pub use self::files::FileReport;
pub(crate) use self::files::{Files, GrantedFile, QueuePermit};
pub(crate) use self::loan::{DiskOwner, DiskOwners, Loan, PartToBorrow};
pub use self::own::DiskReport;
pub(crate) use self::prefetches::{Prefetches, RequestPermit};

/// Maximum number of objects that an owner is asked for at a time.
pub(crate) const MAX_BORROWED_OBJECTS: usize = 256;
/// Maximum number of bytes that an owner is asked for at a time, unless a single object has more.
pub(crate) const MAX_BORROWED_BYTES: u64 = 64 << 20;
/// Pause before an owner of a disk without free buffers is asked again.
pub(crate) const BUSY_PAUSE: std::time::Duration = std::time::Duration::from_millis(20);

/// Returns a key in the form that disks and their owners use: the tenant, a NUL byte, and the key.
pub(crate) fn scoped(tenant: &str, key: &[u8]) -> Vec<u8> {
    [tenant.as_bytes(), &[0], key].concat()
}
