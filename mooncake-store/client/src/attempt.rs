//! Requests for space, and the return of the space to the master.

use mooncake_core::replica::{Replica, ReplicaType, ReplicateConfig};
use mooncake_core::{ErrorKind, Result};
use mooncake_protocol::api::{EndItem, PutItem, WriteMode};
use mooncake_transport::Transport;
use std::time::Duration;

use crate::deadline::{Deadline, deadline_exceeded};
pub(crate) use crate::grants::Attempt;
use crate::state::Inner;

/// Response to a call that ends writes, and the number of calls that were made.
pub(crate) type EndResponse = (Result<Vec<Result<()>>>, usize);

/// Age after which a grant is neither ended nor revoked on a master that does not fence writes.
/// After 30 s another client may write the key, and the call would end that write.
pub(crate) const UNFENCED_GRANT_LIFETIME: Duration = Duration::from_secs(25);

/// Pause between two attempts to revoke a grant while the master does not respond.
const REVOKE_PAUSE: Duration = Duration::from_millis(500);

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

    /// Sends a request for space. The request is repeated once if the master recognizes
    /// repetitions, so that a lost response does not fail the write.
    pub(crate) async fn request_space<T: Transport>(
        &self,
        client: &Inner<T>,
        items: &[PutItem<'_>],
        config: &ReplicateConfig,
        deadline: &Deadline,
    ) -> Result<Vec<Result<Vec<Replica>>>> {
        let call = || client.master.put_start(client.caller(self.number), self.mode, items, config);
        match deadline.bound("put start", call()).await {
            Err(error)
                if matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Timeout)
                    && client.master.fences_writes()
                    && !deadline.is_over() =>
            {
                deadline.bound("put start", call()).await
            }
            response => response,
        }
    }

    /// Makes written objects readable with at most `max_calls` calls. The bytes have arrived and
    /// the call may be repeated, so that a lost response need not fail the write.
    pub(crate) async fn end<T: Transport>(
        &self,
        client: &Inner<T>,
        items: &[EndItem<'_>],
        replicas: ReplicaType,
        deadline: &Deadline,
        max_calls: usize,
    ) -> EndResponse {
        let call = || client.master.put_end(client.caller(self.number), self.mode, items, replicas);
        let mut response = Err(deadline_exceeded("put end: others may write the key by now"));
        let mut calls = 0;
        for _ in 0..max_calls {
            if response.is_err() && !deadline.is_over() && self.is_unambiguous(client) {
                response = deadline.bound("put end", call()).await;
                calls += 1;
            }
        }
        (response, calls)
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
    /// too old. A master that does not recognize writers is asked once: another revoke could
    /// concern a later write of the key.
    pub(crate) async fn revoke_until_confirmed<T: Transport>(
        &self,
        client: &Inner<T>,
        keys: &[&[u8]],
    ) -> bool {
        while !self.revoke(client, keys, &client.deadline()).await {
            if client.usable().is_err()
                || !client.master.fences_writes()
                || client.config.clock.now().since(self.requested_at) > UNFENCED_GRANT_LIFETIME
            {
                return false;
            }
            tokio::time::sleep(REVOKE_PAUSE).await;
        }
        true
    }

    /// Revokes requested space that nothing was written to, until the master confirms it. Without a
    /// response to the request, the master may receive the request after the first revoke, so the
    /// revoke is repeated.
    pub(crate) async fn revoke_requested<T: Transport>(
        &self,
        client: &Inner<T>,
        keys: &[&[u8]],
        has_response: bool,
    ) {
        if !self.revoke_until_confirmed(client, keys).await || has_response {
            return;
        }
        tokio::time::sleep(REVOKE_PAUSE).await;
        self.revoke(client, keys, &client.deadline()).await;
    }
}
