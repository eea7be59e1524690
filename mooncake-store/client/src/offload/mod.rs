//! Objects on disks and in shared files: writing them, bringing them back, and borrowing them from
//! their owners.

mod borrow;
#[cfg(feature = "disk")]
mod file_replicas;
#[cfg(feature = "disk")]
mod heartbeat;
#[cfg(feature = "disk")]
mod promote;

#[cfg(feature = "disk")]
pub(crate) use self::file_replicas::{FilePut, is_gone};
