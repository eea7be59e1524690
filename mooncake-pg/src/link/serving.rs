//! Connections from other processes: one task each.

use std::sync::{Arc, Weak};

use mooncake_core::fork::ParentOnly;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::admission::{ConnectionSlot, Connections, ListenerLimits};
use mooncake_transport::net;
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};

use super::greeting::{CONNECT_WITHIN, log_end, receive_greeting};
use super::{IncomingLink, MAX_CONNECTIONS, Plane};

impl Plane {
    /// Accepts connections of other processes, until the task is aborted.
    pub(super) async fn accept(listener: ParentOnly<TcpListener>, plane: Weak<Self>) {
        let mut connections = Connections::new(ListenerLimits {
            request: Some(CONNECT_WITHIN),
            idle: Some(CONNECT_WITHIN),
            ..ListenerLimits::new("process-group", MAX_CONNECTIONS, 2)
        });
        for connection in 0.. {
            let (stream, peer) = connections.accept(|cx| listener.poll_accept(cx)).await;
            let plane = plane.clone();
            connections.admit(|slot| async move {
                let Err(error) = receive(stream, connection, plane, slot).await else { return };
                log_end(&peer.to_string(), &error);
            });
        }
    }
}

/// Serves a connection of another process.
async fn receive(stream: TcpStream, connection: u32, plane: Weak<Plane>, slot: ConnectionSlot) -> Result<()> {
    let mut stream = ParentOnly::new(stream);
    net::keep_connection(&stream).map_err(Error::from)?;
    let Some((own, secret)) = plane.upgrade().map(|plane| (plane.process, plane.secret.clone())) else {
        return Ok(());
    };
    let from = receive_greeting(&mut stream, own, secret.as_ref()).await?;
    // The connection of a rank is kept, even if others wait for a connection.
    if !slot.work() {
        return Ok(());
    }
    let incoming_link =
        Arc::new(IncomingLink { process: from, connection, socket: stream, state: Mutex::default() });
    if let Some(plane) = plane.upgrade()
        && !plane.add_incoming(&incoming_link)
    {
        return Err(Error::new(ErrorCode::RpcFail, "cannot serve connection: a later one is here"));
    }
    let end = read_messages(&incoming_link, &plane).await;
    if let Some(plane) = plane.upgrade() {
        plane.remove_incoming(&incoming_link);
    }
    end
}

async fn read_messages(incoming_link: &IncomingLink, plane: &Weak<Plane>) -> Result<()> {
    loop {
        incoming_link.socket.readable().await.map_err(Error::from)?;
        let Some(plane) = plane.upgrade() else { return Ok(()) };
        let delivered_all =
            plane.read(incoming_link, |received| incoming_link.socket.try_read_buf(received))?;
        drop(plane);
        if !delivered_all {
            tokio::task::yield_now().await;
        }
    }
}
