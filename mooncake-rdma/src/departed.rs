//! Check of idle connections. A queue pair does not report that the process at its other end has
//! departed, so this module queries the peer at its handshake port.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::handshake::{HandshakeConfig, Kind, exchange};
use mooncake_transport::net;
use serde_json::Value;

use crate::endpoint::Endpoint;
use crate::message::Connection;
use crate::node::Node;

/// Timeout of the response of a peer.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(3);
/// Number of consecutive checks without a response after which a connection is retired.
const MAX_UNANSWERED: u8 = 2;
/// Maximum number of parallel checks.
const PARALLEL_CHECKS: usize = 16;

/// Outcome of a check.
#[derive(Debug, PartialEq, Eq)]
enum Check {
    /// The peer has the connection.
    Connected,
    /// The peer has no such connection, or another process has its port.
    Departed(String),
}

impl Node {
    /// Releases the rails that no peer uses, and begins to check the connections that are idle
    /// since the last call.
    pub(crate) fn release_departed(self: &Arc<Self>) {
        self.rails.lock().retain(|_, rail| Arc::strong_count(rail) > 1);
        if self.closed.load(Ordering::Acquire) || self.is_checking.swap(true, Ordering::AcqRel) {
            return;
        }
        let endpoints =
            self.nics.iter().flat_map(|nic| nic.endpoints.read().values().cloned().collect::<Vec<_>>());
        let idle: Vec<Arc<Endpoint>> = endpoints.filter(|endpoint| endpoint.is_due_for_check()).collect();
        let node = self.clone();
        self.runtime.spawn(async move {
            for batch in idle.chunks(PARALLEL_CHECKS) {
                let mut checks = tokio::task::JoinSet::new();
                for endpoint in batch {
                    let (node, endpoint) = (node.clone(), endpoint.clone());
                    checks.spawn(async move { node.check(&endpoint).await });
                }
                checks.join_all().await;
            }
            node.is_checking.store(false, Ordering::Release);
        });
    }

    /// Retires a connection whose peer has departed.
    async fn check(self: &Arc<Self>, endpoint: &Arc<Endpoint>) {
        let reason = match tokio::time::timeout(RESPONSE_TIMEOUT, self.query_peer(endpoint)).await {
            Ok(Ok(Check::Connected)) => {
                endpoint.unanswered_checks.store(0, Ordering::Relaxed);
                return;
            }
            Ok(Ok(Check::Departed(reason))) => reason,
            Ok(Err(error)) => match endpoint.unanswered_checks.fetch_add(1, Ordering::Relaxed) + 1 {
                ..MAX_UNANSWERED => return,
                _ => error.to_string(),
            },
            Err(_) => match endpoint.unanswered_checks.fetch_add(1, Ordering::Relaxed) + 1 {
                ..MAX_UNANSWERED => return,
                _ => "it does not answer".to_owned(),
            },
        };
        if endpoint.is_due_for_check() {
            self.retire(
                endpoint,
                &Error::new(ErrorCode::TransferFail, format!("the peer has departed: {reason}")),
            );
        }
    }

    /// Asks the peer whether it has the connection.
    async fn query_peer(&self, endpoint: &Endpoint) -> Result<Check> {
        let (own, rail) = (self.own_path(&endpoint.nic), &endpoint.rail);
        if own == rail.path {
            return Ok(Check::Connected);
        }
        let at = rail.at.lock().clone();
        if rail.instance.is_none() {
            // A node of Mooncake C++ would take a message for the set-up of a new connection.
            net::connect(&at.host, at.port).await?;
            return Ok(Check::Connected);
        }
        // A peer that has the connection knows already that this side is ready.
        let message = Connection {
            local_nic_path: own,
            peer_nic_path: rail.path.clone(),
            lid: endpoint.nic.lid(),
            gid: Some(endpoint.nic.gid().addr),
            pairs: endpoint.numbers(),
            refusal: String::new(),
            ready: Some(true),
            instance: Some(self.instance),
            peer_instance: rail.instance,
        };
        let limits = HandshakeConfig { connect_timeout: RESPONSE_TIMEOUT, ..self.config.handshake.clone() };
        let body = message.encode().to_string();
        let response = exchange(&at, Kind::Connection, body.as_bytes(), &limits).await?;
        let response: Value = serde_json::from_slice(&response)
            .map_err(|e| Error::invalid(format!("handshake port {at}: reply is not JSON: {e}")))?;
        let response = Connection::decode(&response)?;
        Ok(if response.refusal.is_empty() { Check::Connected } else { Check::Departed(response.refusal) })
    }
}
