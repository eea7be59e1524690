//! Space that was requested for reservations and that no caller has yet.

use std::sync::Arc;

use mooncake_transport::Transport;

use crate::attempt::Attempt;
use crate::deadline::Deadline;
use crate::state::Inner;

/// Space of one request that may have been granted. Dropping it before
/// [`hand_over`](Self::hand_over) returns the space in the background.
pub(super) struct RequestedSpace<'a, T: Transport> {
    client: &'a Arc<Inner<T>>,
    attempt: Attempt,
    keys: Vec<&'a [u8]>,
    has_response: bool,
}

impl<'a, T: Transport> RequestedSpace<'a, T> {
    /// Creates the space of a request that has no response yet.
    pub(super) fn new(client: &'a Arc<Inner<T>>, attempt: Attempt, keys: Vec<&'a [u8]>) -> Self {
        Self { client, attempt, keys, has_response: false }
    }

    /// Creates the granted space of these keys.
    pub(super) fn granted(client: &'a Arc<Inner<T>>, attempt: Attempt, keys: Vec<&'a [u8]>) -> Self {
        Self { client, attempt, keys, has_response: true }
    }

    /// Returns the space to the master, in the background if the master does not respond now.
    /// Returns whether the master has confirmed it.
    ///
    /// A master that does not recognize writers is asked once: a second revoke could concern a
    /// later write of the key.
    pub(super) async fn revoke(mut self, deadline: &Deadline) -> bool {
        if !self.client.master.fences_writes() {
            let keys = std::mem::take(&mut self.keys);
            return self.attempt.revoke(self.client, &keys, deadline).await;
        }
        let is_confirmed = self.attempt.revoke(self.client, &self.keys, deadline).await;
        if is_confirmed {
            self.hand_over();
        }
        is_confirmed
    }

    /// Ends the responsibility for the space. A caller has it from now on, or it is returned.
    pub(super) fn hand_over(mut self) {
        self.keys.clear();
    }
}

impl<T: Transport> Drop for RequestedSpace<'_, T> {
    fn drop(&mut self) {
        // Space that may have been granted is revoked only if the revoke cannot affect another
        // write.
        let is_safe = self.has_response || self.client.master.fences_writes();
        if self.keys.is_empty() || !is_safe {
            return;
        }
        let keys: Vec<Vec<u8>> = self.keys.iter().map(|key| key.to_vec()).collect();
        let (client, attempt, has_response) = (self.client.clone(), self.attempt, self.has_response);
        self.client.runtime.spawn(async move {
            let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
            attempt.revoke_requested(&client, &keys, has_response).await;
        });
    }
}
