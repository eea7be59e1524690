//! State that the connections of a server share.

use mooncake_core::clock::Rng;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::Uuid;
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
        let places = within_descriptors(self.config.places(), DESCRIPTOR_SHARE);
        match is_planted("controls-take-all-places") {
            true => self.config.max_clients,
            false => self.config.max_clients.min(places / 2).max(1),
        }
    }

    /// Returns the maximum number of shared clients of one user.
    pub(super) fn most_guests_of_a_user(&self) -> usize {
        let most = self.most_guests();
        if self.config.is_private() { most } else { (most / 2).max(1) }
    }
}

/// Waits until the flag is true or its sender is dropped.
pub(super) async fn set(sign: &mut watch::Receiver<bool>) {
    let _ = sign.wait_for(|given| *given).await;
}
