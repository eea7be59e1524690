//! Requests for space, and the return of the space to the master.

use mooncake_core::clock::Moment;
use mooncake_core::replica::ReplicaType;
use mooncake_protocol::api::WriteMode;
use mooncake_transport::Transport;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::state::Inner;

/// Age after which a grant is neither ended nor revoked on a master that does not fence writes.
/// After 30 s another client may write the key, and the call would end that write.
pub(crate) const UNFENCED_GRANT_LIFETIME: Duration = Duration::from_secs(25);

/// Pause between two attempts to revoke a grant while the master does not respond.
pub(crate) const REVOKE_PAUSE: Duration = Duration::from_millis(500);

/// Request for space, and the number by which the master recognizes later calls about it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attempt {
    pub(crate) mode: WriteMode,
    pub(crate) number: u64,
    pub(crate) requested_at: Moment,
}

impl Attempt {
    pub(crate) fn new<T: Transport>(client: &Inner<T>, mode: WriteMode) -> Self {
        let number = client.rng.lock().next_u64().max(1);
        Self { mode, number, requested_at: client.config.clock.now() }
    }

    /// Returns whether the master cannot confuse this write with a later one.
    pub(crate) fn is_unambiguous<T: Transport>(&self, client: &Inner<T>) -> bool {
        client.master.fences_writes()
            || client.config.clock.now().since(self.requested_at) <= UNFENCED_GRANT_LIFETIME
    }

    /// Returns space to the master. Returns whether the master confirmed it.
    pub(crate) async fn revoke<T: Transport>(
        &self,
        client: &Inner<T>,
        keys: &[&[u8]],
        deadline: &Deadline,
    ) -> bool {
        if !self.is_unambiguous(client) {
            return false;
        }
        let call = client.master.put_revoke(client.caller(self.number), self.mode, keys, ReplicaType::All);
        match deadline.bound("put revoke", call).await {
            Ok(_) => true,
            Err(error) => {
                tracing::debug!(keys = keys.len(), "space was not given back: {error}");
                false
            }
        }
    }

    /// Tells the master that no files are written for these keys.
    pub(crate) async fn refuse_files<T: Transport>(&self, client: &Inner<T>, keys: &[&[u8]]) {
        if !self.is_unambiguous(client) {
            return;
        }
        let caller = client.caller(self.number);
        let call = client.master.put_revoke(caller, WriteMode::Put, keys, ReplicaType::Disk);
        if let Err(error) = client.deadline().bound("revoke of files", call).await {
            tracing::debug!(keys = keys.len(), "the master still expects files: {error}");
        }
    }

    /// Repeats [`Attempt::revoke`] until the master confirms it, the client closes, or the grant is
    /// too old.
    pub(crate) async fn revoke_until_confirmed<T: Transport>(
        &self,
        client: &Inner<T>,
        keys: &[&[u8]],
    ) -> bool {
        while !self.revoke(client, keys, &client.deadline()).await {
            if client.usable().is_err()
                || client.config.clock.now().since(self.requested_at) > UNFENCED_GRANT_LIFETIME
            {
                return false;
            }
            tokio::time::sleep(REVOKE_PAUSE).await;
        }
        true
    }
}
