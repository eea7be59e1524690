//! One request for space, and the return of that space to the master.

use mooncake_core::clock::Moment;
use mooncake_core::replica::ReplicaType;
use mooncake_protocol::api::WriteMode;
use mooncake_transport::Transport;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::state::Inner;

/// On a master that cannot tell writes apart, a grant older than this is neither ended nor given back: after 30 s others
/// may write the key, and the call would be taken for theirs.
pub(crate) const OURS_FOR: Duration = Duration::from_secs(25);

/// Between two tries to give space back to a master that does not answer.
pub(crate) const REVOKE_PAUSE: Duration = Duration::from_millis(500);

/// One asking for space: what the master knows its calls by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attempt {
    pub(crate) mode: WriteMode,
    pub(crate) number: u64,
    pub(crate) asked: Moment,
}

impl Attempt {
    pub(crate) fn new<T: Transport>(client: &Inner<T>, mode: WriteMode) -> Self {
        let number = client.rng.lock().next_u64().max(1);
        Self { mode, number, asked: client.config.clock.now() }
    }

    /// Whether the master cannot take a call about it for one about another write.
    pub(crate) fn is_ours<T: Transport>(&self, client: &Inner<T>) -> bool {
        client.master.fences_writes() || client.config.clock.now().since(self.asked) <= OURS_FOR
    }

    /// Gives space back; whether the master has it.
    pub(crate) async fn revoke<T: Transport>(
        &self,
        client: &Inner<T>,
        keys: &[&[u8]],
        deadline: &Deadline,
    ) -> bool {
        if !self.is_ours(client) {
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

    /// The master is to expect no files of these.
    pub(crate) async fn refuse_files<T: Transport>(&self, client: &Inner<T>, keys: &[&[u8]]) {
        if !self.is_ours(client) {
            return;
        }
        let caller = client.caller(self.number);
        let call = client.master.put_revoke(caller, WriteMode::Put, keys, ReplicaType::Disk);
        if let Err(error) = client.deadline().bound("revoke of files", call).await {
            tracing::debug!(keys = keys.len(), "the master still expects files: {error}");
        }
    }

    /// As [`Attempt::revoke`], again and again while the master does not answer, and as long as it makes sense.
    pub(crate) async fn revoke_until_heard<T: Transport>(&self, client: &Inner<T>, keys: &[&[u8]]) -> bool {
        while !self.revoke(client, keys, &client.deadline()).await {
            if client.usable().is_err() || client.config.clock.now().since(self.asked) > OURS_FOR {
                return false;
            }
            tokio::time::sleep(REVOKE_PAUSE).await;
        }
        true
    }
}
