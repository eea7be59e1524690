//! Links between processes: the listener that shows that a process runs, and probes of others.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::fork::ParentOnly;
use mooncake_transport::admission::{ConnectionSlot, Connections, ListenerLimits};
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use super::connection::{Identity, accept, open};
use super::settings::ControlSettings;
use crate::protocol::{RankInfo, SessionId};
use crate::secret::is_refusal;
use crate::wire::Purpose;

/// Serves the probes and links of other processes.
pub(super) async fn serve_links(
    listener: ParentOnly<TcpListener>,
    session: SessionId,
    settings: Arc<ControlSettings>,
) {
    let mut connections = Connections::new(ListenerLimits {
        request: Some(settings.hello),
        idle: Some(settings.hello),
        ..ListenerLimits::new("group-links", settings.connections, 8)
    });
    loop {
        let (stream, peer) = connections.accept(|cx| listener.poll_accept(cx)).await;
        let settings = settings.clone();
        connections.admit(|slot| async move {
            match serve(ParentOnly::new(stream), session, &settings, &slot).await {
                Err(error) if is_refusal(&error) => tracing::warn!(%peer, %error, "link refused"),
                Err(error) => tracing::debug!(%peer, %error, "link ended"),
                Ok(()) => {}
            }
        });
    }
}

async fn serve(
    mut stream: ParentOnly<TcpStream>,
    session: SessionId,
    settings: &ControlSettings,
    slot: &ConnectionSlot,
) -> std::io::Result<()> {
    let is_own = |hello: &crate::wire::Hello| hello.purpose == Purpose::Link && hello.session == session;
    let accepted = accept(&mut stream, settings.secret.as_ref(), is_own);
    timeout(settings.hello, accepted).await.map_err(|_| std::io::ErrorKind::TimedOut)??;
    if slot.work() {
        wait_until_closed(&mut stream).await;
    }
    Ok(())
}

/// Opens a link to a process.
pub(super) async fn open_link(
    info: &RankInfo,
    limit: Duration,
    identity: Option<&Identity>,
) -> Option<ParentOnly<TcpStream>> {
    match timeout(limit, open(&info.address, Purpose::Link, info.session, identity)).await {
        Ok(Ok(stream)) => Some(stream),
        Ok(Err(error)) if is_refusal(&error) => {
            tracing::warn!(rank = %info.rank, address = info.address, %error, "link refused");
            None
        }
        Ok(Err(error)) => {
            tracing::debug!(rank = %info.rank, address = info.address, %error, "link failed");
            None
        }
        Err(_) => {
            tracing::debug!(rank = %info.rank, address = info.address, "process does not respond");
            None
        }
    }
}

/// Waits until the other side closes a link.
pub(super) async fn wait_until_closed(stream: &mut TcpStream) {
    let mut byte = [0];
    // Nothing is sent over a link: bytes end it as well.
    let _ = stream.read(&mut byte).await;
}
