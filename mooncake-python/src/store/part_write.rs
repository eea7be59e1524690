//! Object that is being written in parts.

use std::collections::HashMap;
use std::sync::Arc;

use mooncake_core::Result;
use mooncake_store::client::Reservation;
use parking_lot::Mutex;
use tokio::sync::RwLock;

/// Allocated object that is written in parts.
pub(super) struct PartWrite {
    pub(super) space: Reservation,
    /// State of the session: true while it is open. Each write of a part holds the lock shared.
    /// The end of the session takes it exclusively, and no write follows.
    pub(super) open: RwLock<bool>,
}

impl PartWrite {
    /// Returns whether an end of the session has failed without a result, so that the session can
    /// only be ended again or revoked.
    pub(super) fn has_unknown_end(&self) -> bool {
        self.open.try_read().is_ok_and(|open| !*open)
    }
}

/// Writes that a call has taken out of the table of a session. Dropping them puts those that are
/// still open back, so that a second call can end them.
pub(super) struct TakenWrites<'a> {
    pub(super) table: &'a Mutex<HashMap<String, Arc<PartWrite>>>,
    pub(super) keys: &'a [String],
    /// Write of each key.
    pub(super) writes: Vec<Result<Arc<PartWrite>>>,
}

impl TakenWrites<'_> {
    /// Returns the spaces of the writes.
    pub(super) fn spaces(&self) -> Vec<&Reservation> {
        self.writes.iter().flatten().map(|write| &write.space).collect()
    }
}

impl Drop for TakenWrites<'_> {
    fn drop(&mut self) {
        let mut table = self.table.lock();
        for (key, write) in self.keys.iter().zip(self.writes.drain(..)) {
            if let Ok(write) = write
                && write.space.is_open()
            {
                table.entry(key.clone()).or_insert(write);
            }
        }
    }
}
