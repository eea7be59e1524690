//! Values that calls and the table of managed weights exchange.

use std::sync::Arc;

use mooncake_core::clock::Moment;
use mooncake_protocol::wire::{WeightAvailability, WeightError, WeightId, WeightResidency, WeightRevision};

/// Outcome of a call about managed weights.
pub(crate) type Result<T, E = WeightError> = std::result::Result<T, E>;

/// Time of a change, by the clock of decisions and by that of dates.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Instants {
    pub(crate) now: Moment,
    pub(crate) wall_ms: u64,
}

/// Objects of a group as they were found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    /// Keys and lengths of the objects that can be read, the manifest included.
    pub(crate) objects: Vec<(Vec<u8>, u64)>,
    /// Number of these objects in memory.
    pub(crate) in_memory: u64,
    /// Number of writes in progress.
    pub(crate) writes: u64,
}

/// State of a record for the periodic work.
#[derive(Clone, Debug)]
pub(crate) struct Due {
    pub(crate) id: WeightId,
    pub(crate) group: Arc<str>,
    pub(crate) generation: u64,
    pub(crate) availability: WeightAvailability,
    /// Destination of the move in progress.
    pub(crate) target: Option<WeightResidency>,
    pub(crate) objects: u64,
}

/// Record of a revision in a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredRevision {
    pub(crate) revision: WeightRevision,
    /// Time since the last step of the import in milliseconds.
    pub(crate) idle_ms: u64,
    pub(crate) mistyped: Vec<Vec<u8>>,
    pub(crate) has_more_mistyped: bool,
}

/// Numbers for the metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WeightStats {
    /// Number of revisions in each availability.
    pub(crate) by_availability: [u64; 5],
    /// Number of revisions in each residency.
    pub(crate) by_residency: [u64; 5],
    pub(crate) leases: u64,
    pub(crate) moves: u64,
    pub(crate) oldest_move_ms: u64,
    pub(crate) failures: u64,
}

/// Progress of a move, as the objects show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Number of objects that have moved.
    pub(crate) done: u64,
    /// Reason why the move cannot go on.
    pub(crate) obstacle: Option<String>,
}
