//! Object that is being written in parts.

use mooncake_store::client::Reservation;
use tokio::sync::RwLock;

/// Allocated object that is written in parts.
pub(super) struct PartWrite {
    pub(super) space: Reservation,
    /// State of the session: true while it is open. Each write of a part holds the lock shared.
    /// The end of the session takes it exclusively, and no write follows.
    pub(super) open: RwLock<bool>,
}
