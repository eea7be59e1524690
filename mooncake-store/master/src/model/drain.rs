//! Drain jobs, as a caller sees them.

use mooncake_core::ids::Uuid;

/// Segments to empty.
#[derive(Clone, Copy, Debug)]
pub struct DrainRequest<'a> {
    /// Their names; each once.
    pub segments: &'a [String],
    /// Names of the segments that their objects may go to; any, if there are none.
    pub targets: &'a [String],
    /// Replicas that are moved at the same time, at least 1.
    pub max_concurrency: u64,
}

/// How far a drain job is, with the existing system's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum DrainStatus {
    /// Nobody has looked at it yet.
    Created = 0,
    /// What is to be moved is being looked for.
    Planning = 1,
    /// Replicas are being moved, or waited for.
    Running = 2,
    /// The segments are empty.
    Succeeded = 3,
    /// Some replicas could not be moved, or a segment went before it was empty. What is left of the segments takes objects again.
    Failed = 4,
    /// Somebody ended it. The segments take objects again.
    Canceled = 5,
}

impl DrainStatus {
    pub(crate) fn from_number(number: i32) -> Option<Self> {
        use DrainStatus::*;
        let all = [Created, Planning, Running, Succeeded, Failed, Canceled];
        all.into_iter().find(|status| *status as i32 == number)
    }

    /// Whether nothing more happens.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Canceled)
    }
}

/// Where a drain job stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DrainInfo {
    /// Its id.
    pub id: Uuid,
    /// How far it is.
    pub status: DrainStatus,
    /// When it was asked for, in milliseconds of the wall clock.
    pub created_ms: u64,
    /// When it last changed.
    pub updated_ms: u64,
    /// What it empties.
    pub segments: Vec<String>,
    /// Replicas moved.
    pub succeeded: u64,
    /// Replicas given up.
    pub failed: u64,
    /// Replicas that cannot be moved now: hard-pinned, being written or copied, or there is no room for them.
    pub blocked: u64,
    /// Replicas being moved.
    pub active: u64,
    /// Bytes moved.
    pub migrated_bytes: u64,
    /// The state in words, or what went wrong last.
    pub message: String,
}
