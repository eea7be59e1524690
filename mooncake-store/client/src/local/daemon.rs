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

use super::server_config::LocalServerConfig;
use super::shared_client::SharedClient;
use crate::state::Client;

/// Divisor of the descriptor limit of the process: the connections of the socket may use `1 /
/// DESCRIPTOR_SHARE` of the descriptors.
pub(super) const DESCRIPTOR_SHARE: u64 = 16;

pub(super) struct Daemon<T: Transport> {
    pub(super) client: Client<T>,
    pub(super) config: LocalServerConfig,
    pub(super) shared_clients: Mutex<HashMap<Uuid, Arc<SharedClient<T>>>>,
    pub(super) rng: Mutex<Rng>,
    pub(super) stopped: watch::Sender<bool>,
}

impl<T: Transport> Daemon<T> {
    /// Returns the maximum number of shared clients under the present limit of descriptors, at
    /// least 1.
    pub(super) fn max_shared_clients(&self) -> usize {
        let slots = within_descriptors(self.config.slots(), DESCRIPTOR_SHARE);
        match is_planted("controls-take-all-places") {
            true => self.config.max_clients,
            false => self.config.max_clients.min(slots / 2).max(1),
        }
    }

    /// Returns the maximum number of shared clients of one user.
    pub(super) fn max_shared_clients_per_user(&self) -> usize {
        let max = self.max_shared_clients();
        if self.config.is_private() { max } else { (max / 2).max(1) }
    }
}

impl<T: Transport> Daemon<T> {
    /// Registers a shared client of this process and user, within the limits.
    pub(super) fn register(
        self: &Arc<Self>,
        process: Option<i32>,
        user: Option<u32>,
    ) -> Result<ControlRegistration<T>> {
        let id = {
            let mut rng = self.rng.lock();
            Uuid::new(rng.next_u64(), rng.next_u64())
        };
        let shared_client = Arc::new(SharedClient::new(process, user, id.first >> 1, self.config.max_calls));
        let mut shared_clients = self.shared_clients.lock();
        let of_user = shared_clients.values().filter(|other| other.user == user).count();
        let (max, max_per_user) = (self.max_shared_clients(), self.max_shared_clients_per_user());
        let exceeded = match () {
            () if shared_clients.len() >= max => Some(max),
            () if of_user >= max_per_user => Some(max_per_user),
            () => None,
        };
        if let Some(limit) = exceeded {
            tracing::warn!(
                process = shared_client.process(),
                user,
                limit,
                "local process refused: too many are served"
            );
            let text = format!("mooncake_client serves {limit} processes already (--max_clients)");
            return Err(Error::new(ErrorCode::NoAvailableHandle, text));
        }
        shared_clients.insert(id, shared_client.clone());
        tracing::info!(process = shared_client.process(), "a local process joins");
        Ok(ControlRegistration { daemon: self.clone(), id, shared_client })
    }

    /// Returns the shared client of that identifier.
    ///
    /// # Errors
    /// Returns `RPC_FAIL` for an unknown one, for example after a restart of the daemon.
    pub(super) fn shared_client(&self, id: Uuid) -> Result<Arc<SharedClient<T>>> {
        self.shared_clients.lock().get(&id).cloned().ok_or_else(|| {
            Error::new(ErrorCode::RpcFail, "mooncake_client does not know this process (any more)")
        })
    }
}

/// Registration of a shared client while its control connection is served.
pub(super) struct ControlRegistration<T: Transport> {
    daemon: Arc<Daemon<T>>,
    pub(super) id: Uuid,
    pub(super) shared_client: Arc<SharedClient<T>>,
}

impl<T: Transport> Drop for ControlRegistration<T> {
    fn drop(&mut self) {
        self.daemon.shared_clients.lock().remove(&self.id);
        self.shared_client.depart();
        tracing::info!(process = self.shared_client.process(), "a local process leaves");
    }
}
