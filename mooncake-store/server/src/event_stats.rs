//! Counters of published events.

/// Counters of the events that a master has published about its objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventStats {
    /// Messages.
    pub batches: u64,
    /// Events in the messages.
    pub events: u64,
    /// Events that were lost because the queue was full.
    pub dropped: u64,
    /// Events about keys that are not a hash.
    pub without_hash: u64,
}
