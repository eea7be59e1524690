//! The links of a node, and how an owner is found.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tracing::debug;

use super::link::{Link, Mapping};

/// Where an owner of this host listens: the host by the id of its boot, and the name of the socket, as descriptors carry them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    host: String,
    socket: String,
}

impl Endpoint {
    /// Ours, for a socket of that name.
    ///
    /// # Errors
    /// The host cannot be told from others.
    pub fn here(socket: String) -> Result<Self> {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .map_err(|e| Error::from(e).context("the id of this host's boot"))?;
        Ok(Self { host: boot.trim().to_owned(), socket })
    }

    /// As a descriptor has it.
    pub fn parse(text: &str) -> Option<Self> {
        let (host, socket) = text.split_once(':')?;
        Some(Self { host: host.to_owned(), socket: socket.to_owned() })
    }

    /// Whether both are of one host, and of one run of it.
    pub fn same_host(&self, other: &Endpoint) -> bool {
        self.host == other.host
    }

    /// The name of the socket: another one for each run of an owner.
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
    answer_timeout: Duration,
}

impl<M: Mapping> Links<M> {
    /// None yet. Connections belong to that runtime.
    pub fn new(runtime: &Handle, answer_timeout: Duration) -> Arc<Self> {
        Arc::new(Self { open: Mutex::default(), runtime: runtime.clone(), answer_timeout })
    }

    /// The link to an owner, which has been asked what it has open now.
    ///
    /// # Errors
    /// It is gone, does not answer, or does not trust us.
    pub async fn to(&self, socket: &str) -> Result<Arc<Link<M>>> {
        let known = self.open.lock().get(socket).and_then(Weak::upgrade).filter(|link| link.is_alive());
        let (owned, timeout) = (socket.to_owned(), self.answer_timeout);
        let work = self.runtime.spawn(async move {
            match known {
                Some(link) => link.refresh().await.map(|()| link),
                None => Link::open(&owned, timeout).await.map(Arc::new),
            }
        });
        let ended = |_| Error::new(ErrorCode::TransferFail, "the wire's runtime has ended");
        let link = work.await.map_err(ended)??;
        self.open.lock().insert(socket.to_owned(), Arc::downgrade(&link));
        Ok(link)
    }

    /// Gives up links to the dead, with the memory they show, and asks owners what they have opened and closed, at that interval.
    pub async fn look_after(self: Arc<Self>, interval: Duration) {
        loop {
            tokio::time::sleep(interval).await;
            let alive: Vec<Arc<Link<M>>> = {
                let mut links = self.open.lock();
                links.retain(|_, link| link.strong_count() != 0);
                links.values().filter_map(Weak::upgrade).collect()
            };
            for link in alive {
                if !link.is_alive() {
                    link.give_up();
                } else if link.is_stale()
                    && let Err(error) = link.refresh().await
                {
                    debug!(%error, "an owner on this host was asked in vain");
                }
            }
        }
    }
}
