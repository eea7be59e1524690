//! Drain jobs, as a caller sees them.

use mooncake_core::ids::Uuid;

/// Request to empty segments.
#[derive(Clone, Copy, Debug)]
pub struct DrainRequest<'a> {
    /// Names of the segments, each once.
    pub segments: &'a [String],
    /// Names of the segments that may receive the objects; empty for any.
    pub targets: &'a [String],
    /// Maximum number of replicas that are moved at the same time, at least 1.
    pub max_concurrency: u64,
}

/// Progress of a drain job. The numbers are those of Mooncake C++.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum DrainStatus {
    /// The job has not been processed yet.
    Created = 0,
    /// The job looks for the replicas to move.
    Planning = 1,
    /// Replicas are being moved or waited for.
    Running = 2,
    /// The segments are empty.
    Succeeded = 3,
    /// Some replicas could not be moved, or a segment was unmounted before it was empty. The
    /// message names replicas that are left. The remaining segments accept objects again.
    Failed = 4,
    /// A caller cancelled the job. The segments accept objects again.
    Canceled = 5,
}

impl DrainStatus {
    /// Returns the status with that number.
    pub(crate) fn from_number(number: i32) -> Option<Self> {
        use DrainStatus::*;
        let all = [Created, Planning, Running, Succeeded, Failed, Canceled];
        all.into_iter().find(|status| *status as i32 == number)
    }

    /// Returns whether the job has ended.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Canceled)
    }
}

/// State of a drain job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DrainInfo {
    /// Id of the job.
    pub id: Uuid,
    /// Progress of the job.
    pub status: DrainStatus,
    /// Time of the request, in milliseconds of the wall clock.
    pub created_ms: u64,
    /// Time of the last change, in milliseconds of the wall clock.
    pub updated_ms: u64,
    /// Names of the segments that the job empties.
    pub segments: Vec<String>,
    /// Number of replicas that were moved.
    pub succeeded: u64,
    /// Number of replicas that could not be moved.
    pub failed: u64,
    /// Number of replicas that cannot be moved now: they are being written or copied, or no segment
    /// has enough free space. A job ends with them after a minute without any move. After the end,
    /// also those whose move has not begun.
    pub blocked: u64,
    /// Number of replicas whose move has not begun.
    pub waiting: u64,
    /// Number of replicas that are being moved.
    pub active: u64,
    /// Bytes that were moved.
    pub migrated_bytes: u64,
    /// Progress in words, or the last failure.
    pub message: String,
}
