//! Objects on disks and in shared files: writing them, bringing them back, and borrowing them from
//! their owners.

mod borrow;
mod file_replicas;
#[cfg_attr(not(feature = "disk"), path = "heartbeat/absent.rs")]
mod heartbeat;
mod prefetch;

pub(crate) use self::file_replicas::{FileGrant, FilePut, is_missing_file};
pub use self::prefetch::Prefetch;
