//! Connections to the addresses that clients advertise. An address may lead to another process: a
//! name that resolves to another host, or a service in front of several processes.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::Result;
use mooncake_transport::handshake::{HandshakeConfig, probe_instance};
use mooncake_transport::net::HostPort;
use tokio::runtime::Handle;

use super::state::State;

/// Maximum number of addresses that are checked concurrently.
pub(super) const MAX_CONCURRENT: usize = 16;
/// Number of connections to one address. A service in front of several processes leads to another
/// one each time.
const CONNECTIONS: usize = 4;
/// Time for a connection, and time for its response.
const PATIENCE: Duration = Duration::from_secs(2);

/// Starts the requested checks in the background, up to the limit.
pub(super) fn start_checks(state: &Arc<State>, runtime: &Handle) {
    while let Ok(permit) = state.dial_backs.clone().try_acquire_owned() {
        let Some(address) = state.master.next_address() else { return };
        let state = Arc::downgrade(state);
        runtime.spawn(async move {
            let finding = examine(&address.endpoint, &address.instance).await;
            if let Some(finding) = &finding {
                let (client, advertised) = (address.client, &address.endpoint);
                tracing::warn!(%client, advertised, finding, "the address of a client does not lead to it");
            }
            if let Some(state) = state.upgrade() {
                state.master.record_address(&address, finding);
            }
            drop(permit);
        });
    }
}

/// Connects to an address. Returns the reason why it does not lead to the process `instance`.
async fn examine(address: &str, instance: &str) -> Option<String> {
    let found = connect(address, instance).await.unwrap_or_else(|error| Some(error.to_string()))?;
    Some(match resolved(address).await {
        Some(there) => format!("{found}; the address is {there} for the master"),
        None => format!("{found}; the name has no address for the master"),
    })
}

async fn connect(address: &str, instance: &str) -> Result<Option<String>> {
    let at = HostPort::exact(address)?;
    let config =
        HandshakeConfig { connect_timeout: PATIENCE, reply_timeout: PATIENCE, ..HandshakeConfig::default() };
    for _ in 0..CONNECTIONS {
        match probe_instance(&at, &config).await? {
            Some(found) if found == instance => {}
            Some(found) => return Ok(Some(format!("another process responds there. instance={found}"))),
            None => return Ok(Some("another process responds there, which has no instance".to_owned())),
        }
    }
    Ok(None)
}

/// Returns the addresses of a host and port, with commas between them.
async fn resolved(address: &str) -> Option<String> {
    let found = tokio::time::timeout(PATIENCE, tokio::net::lookup_host(address)).await.ok()?.ok()?;
    Some(found.map(|there| there.to_string()).collect::<Vec<_>>().join(", "))
}
