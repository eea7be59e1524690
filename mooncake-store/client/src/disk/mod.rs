//! Objects on disks: a disk of this client, access of other clients to it, and access to the disks
//! of other clients.

#[cfg(feature = "disk")]
mod files;
mod loan;
#[cfg(feature = "disk")]
mod open;
#[cfg(feature = "disk")]
mod owner;
#[cfg(feature = "disk")]
mod running;
#[cfg(feature = "disk")]
mod serve;
#[cfg(feature = "disk")]
#[allow(unsafe_code)]
mod shelf;

#[cfg(feature = "disk")]
pub use self::files::FileReport;
#[cfg(feature = "disk")]
pub(crate) use self::files::Files;
#[cfg(feature = "disk")]
pub(crate) use self::files::Waiting;
pub(crate) use self::loan::{Loan, Owner, Owners, Wanted};
#[cfg(feature = "disk")]
pub(crate) use self::open::open;
#[cfg(feature = "disk")]
pub(crate) use self::owner::Disk;
#[cfg(feature = "disk")]
pub use self::owner::DiskReport;
#[cfg(feature = "disk")]
pub(crate) use self::running::Running;

/// Maximum number of objects that an owner is asked for at a time.
pub(crate) const BORROWED: usize = 256;
/// Maximum number of bytes that an owner is asked for at a time, unless a single object has more.
pub(crate) const BYTES_BORROWED: u64 = 64 << 20;

/// Returns a key in the form that disks and their owners use: the tenant, a NUL byte, and the key.
pub(crate) fn scoped(tenant: &str, key: &[u8]) -> Vec<u8> {
    [tenant.as_bytes(), &[0], key].concat()
}

/// Splits a key of a disk into tenant and key. A key without a tenant belongs to the default
/// tenant.
#[cfg(feature = "disk")]
pub(crate) fn split(scoped: &[u8]) -> (&str, &[u8]) {
    let at = scoped.iter().position(|byte| *byte == 0);
    let parts = at.and_then(|at| Some((std::str::from_utf8(&scoped[..at]).ok()?, &scoped[at + 1..])));
    parts.filter(|(tenant, _)| !tenant.is_empty()).unwrap_or((mooncake_protocol::api::DEFAULT_TENANT, scoped))
}
