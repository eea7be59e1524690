//! Objects on disks: a disk of this client, access of other clients to it, and access to the disks
//! of other clients.

mod files;
mod loan;
#[cfg_attr(not(feature = "disk"), path = "own/absent.rs")]
pub(crate) mod own;

pub use self::files::FileReport;
pub(crate) use self::files::{Files, GrantedFile, Waiting};
pub(crate) use self::loan::{Loan, Owner, Owners, Wanted};
pub use self::own::DiskReport;

/// Maximum number of objects that an owner is asked for at a time.
pub(crate) const BORROWED: usize = 256;
/// Maximum number of bytes that an owner is asked for at a time, unless a single object has more.
pub(crate) const BYTES_BORROWED: u64 = 64 << 20;

/// Returns a key in the form that disks and their owners use: the tenant, a NUL byte, and the key.
pub(crate) fn scoped(tenant: &str, key: &[u8]) -> Vec<u8> {
    [tenant.as_bytes(), &[0], key].concat()
}
