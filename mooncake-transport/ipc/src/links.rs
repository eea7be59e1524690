//! Links of a node, and the address of an owner.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tracing::debug;

use crate::link::{Link, Mapping};

/// Address of an owner on this host: the id of the host's boot, and the name of the socket, as in
/// descriptors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    host: String,
    socket: String,
}

impl Endpoint {
    /// Returns the local address for a socket of that name.
    ///
    /// # Errors
    /// Returns an error if the host has no identity.
    pub fn here(socket: String) -> Result<Self> {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .map_err(|e| Error::from(e).context("the id of this host's boot"))?;
        Ok(Self { host: boot.trim().to_owned(), socket })
    }

    /// Parses an address from a descriptor.
    pub fn parse(text: &str) -> Option<Self> {
        let (host, socket) = text.split_once(':')?;
        Some(Self { host: host.to_owned(), socket: socket.to_owned() })
    }

    /// Returns whether both addresses belong to one host and one boot of it.
    pub fn same_host(&self, other: &Endpoint) -> bool {
        self.host == other.host
    }

    /// Returns the name of the socket, which is different for each run of an owner.
    pub fn socket(&self) -> &str {
        &self.socket
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.socket)
    }
}

/// Links to owners, by the names of their sockets.
#[derive(Debug)]
pub struct Links<M> {
    open: Mutex<HashMap<String, Weak<Link<M>>>>,
    runtime: Handle,
    response_timeout: Duration,
}

impl<M: Mapping> Links<M> {
    /// Creates an empty table. Its connections belong to that runtime.
    pub fn new(runtime: &Handle, response_timeout: Duration) -> Arc<Self> {
        Arc::new(Self { open: Mutex::default(), runtime: runtime.clone(), response_timeout })
    }

    /// Returns the link to an owner, with its present regions.
    ///
    /// # Errors
    /// Returns an error if the owner has ended, does not respond, or does not trust this process.
    pub async fn to(&self, socket: &str) -> Result<Arc<Link<M>>> {
        let known = self.open.lock().get(socket).and_then(Weak::upgrade).filter(|link| link.is_alive());
        let (owned, timeout) = (socket.to_owned(), self.response_timeout);
        let task = self.runtime.spawn(async move {
            match known {
                Some(link) => link.refresh().await.map(|()| link),
                None => Link::open(&owned, timeout).await.map(Arc::new),
            }
        });
        let runtime_ended = |_| Error::new(ErrorCode::TransferFail, "the runtime of the transport has ended");
        let link = task.await.map_err(runtime_ended)??;
        self.open.lock().insert(socket.to_owned(), Arc::downgrade(&link));
        Ok(link)
    }

    /// Closes links to dead owners, with their mappings, and refreshes the others, at that
    /// interval.
    pub async fn maintain(self: Arc<Self>, interval: Duration) {
        loop {
            tokio::time::sleep(interval).await;
            let links: Vec<Arc<Link<M>>> = {
                let mut links = self.open.lock();
                links.retain(|_, link| link.strong_count() != 0);
                links.values().filter_map(Weak::upgrade).collect()
            };
            for link in links {
                if !link.is_alive() {
                    link.close();
                } else if link.is_stale()
                    && let Err(error) = link.refresh().await
                {
                    debug!(%error, "cannot refresh the regions of an owner on this host");
                }
            }
        }
    }
}
