//! State that the connections of a server share.

use mooncake_core::clock::Rng;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::Uuid;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::Transport;
use mooncake_transport::admission::within_descriptors;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use tokio::sync::watch;

use super::guest::Guest;
use super::server_config::LocalServerConfig;
use crate::state::Client;

/// Divisor of the descriptor limit of the process: the connections of the socket may use `1 /
/// DESCRIPTOR_SHARE` of the descriptors.
pub(super) const DESCRIPTOR_SHARE: u64 = 16;

pub(super) struct Owner<T: Transport> {
    pub(super) client: Client<T>,
    pub(super) config: LocalServerConfig,
    pub(super) guests: Mutex<HashMap<Uuid, Arc<Guest<T>>>>,
    pub(super) rng: Mutex<Rng>,
    pub(super) stopped: watch::Sender<bool>,
}

impl<T: Transport> Owner<T> {
    /// Returns the maximum number of shared clients under the present limit of descriptors, at
    /// least 1.
    pub(super) fn most_guests(&self) -> usize {
        let slots = within_descriptors(self.config.slots(), DESCRIPTOR_SHARE);
        match is_planted("controls-take-all-places") {
            true => self.config.max_clients,
            false => self.config.max_clients.min(slots / 2).max(1),
        }
    }

    /// Returns the maximum number of shared clients of one user.
    pub(super) fn most_guests_of_a_user(&self) -> usize {
        let most = self.most_guests();
        if self.config.is_private() { most } else { (most / 2).max(1) }
    }
}

impl<T: Transport> Owner<T> {
    /// Registers a shared client of this process and user, within the limits.
    pub(super) fn list(self: &Arc<Self>, process: Option<i32>, user: Option<u32>) -> Result<Listed<T>> {
        let id = {
            let mut rng = self.rng.lock();
            Uuid::new(rng.next_u64(), rng.next_u64())
        };
        let guest = Arc::new(Guest::new(process, user, id.first >> 1));
        let mut guests = self.guests.lock();
        let of_user = guests.values().filter(|other| other.user == user).count();
        let (most, most_of_a_user) = (self.most_guests(), self.most_guests_of_a_user());
        let exceeded = match () {
            () if guests.len() >= most => Some(most),
            () if of_user >= most_of_a_user => Some(most_of_a_user),
            () => None,
        };
        if let Some(limit) = exceeded {
            tracing::warn!(
                process = guest.process(),
                user,
                limit,
                "local process refused: too many are served"
            );
            let text = format!("mooncake_client serves {limit} processes already (--max_clients)");
            return Err(Error::new(ErrorCode::NoAvailableHandle, text));
        }
        guests.insert(id, guest.clone());
        tracing::info!(process = guest.process(), "a local process joins");
        Ok(Listed { owner: self.clone(), id, guest })
    }

    /// Returns the shared client of that identifier.
    ///
    /// # Errors
    /// Returns `RPC_FAIL` for an unknown one, for example after a restart of the daemon.
    pub(super) fn guest(&self, id: Uuid) -> Result<Arc<Guest<T>>> {
        self.guests.lock().get(&id).cloned().ok_or_else(|| {
            Error::new(ErrorCode::RpcFail, "mooncake_client does not know this process (any more)")
        })
    }
}

/// Registration of a shared client while its control connection is served.
pub(super) struct Listed<T: Transport> {
    owner: Arc<Owner<T>>,
    pub(super) id: Uuid,
    pub(super) guest: Arc<Guest<T>>,
}

impl<T: Transport> Drop for Listed<T> {
    fn drop(&mut self) {
        self.owner.guests.lock().remove(&self.id);
        self.guest.leave();
        tracing::info!(process = self.guest.process(), "a local process leaves");
    }
}

/// Waits until the flag is true or its sender is dropped.
pub(super) async fn set(sign: &mut watch::Receiver<bool>) {
    let _ = sign.wait_for(|given| *given).await;
}
