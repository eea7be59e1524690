//! Location of a server: a fixed address, or the address of the current leader.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use mooncake_core::meta::MetadataBackend;
use mooncake_core::{Error, ErrorCode, Result};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

/// Pause before a failed query of the directory is repeated.
const RETRY: Duration = Duration::from_millis(500);
/// Interval between queries of the directory, in case its watch misses a change.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// Location of a server.
#[derive(Clone, Debug)]
pub enum ServerLocation {
    /// Fixed address `host:port`.
    Fixed(Arc<str>),
    /// Address of the current leader, if there is one.
    Led(watch::Receiver<Option<Arc<str>>>),
}

impl ServerLocation {
    /// Follows the leader that a key of a directory names. A task on the current tokio runtime does
    /// so until the last user is dropped.
    pub fn following(directory: Arc<dyn MetadataBackend>, key: String) -> Self {
        let (tell, leader) = watch::channel(None);
        tokio::spawn(follow(directory, key, tell));
        Self::Led(leader)
    }

    /// Returns the current address. Waits up to `patience` for a leader.
    ///
    /// # Errors
    /// `RPC_FAIL` if there is no leader in that time.
    pub async fn now(&self, patience: Duration) -> Result<Arc<str>> {
        match self {
            Self::Fixed(address) => Ok(address.clone()),
            Self::Led(leader) => {
                let mut leader = leader.clone();
                let found = timeout(patience, leader.wait_for(Option::is_some)).await;
                let found = found.ok().and_then(|found| found.ok()?.clone());
                found.ok_or_else(|| {
                    Error::new(ErrorCode::RpcFail, format!("no master has led the cluster for {patience:?}"))
                })
            }
        }
    }

    /// Returns whether the server is still at `address`.
    pub fn is(&self, address: &str) -> bool {
        match self {
            Self::Fixed(_) => true,
            Self::Led(leader) => leader.borrow().as_deref() == Some(address),
        }
    }

    /// Returns the current leader, if the server is one of several.
    pub fn leader(&self) -> Option<Arc<str>> {
        match self {
            Self::Fixed(_) => None,
            Self::Led(leader) => leader.borrow().clone(),
        }
    }

    /// Returns as soon as there is a leader other than `than`. Never returns for a fixed address.
    pub async fn another_leads(&self, than: Option<&str>) {
        if let Self::Led(leader) = self
            && leader.clone().wait_for(|now| now.is_some() && now.as_deref() != than).await.is_ok()
        {
            return;
        }
        std::future::pending().await
    }

    /// Returns as soon as the server is no longer at `address`.
    pub async fn left(&self, address: &str) {
        match self {
            Self::Fixed(_) => std::future::pending().await,
            Self::Led(leader) => {
                let mut leader = leader.clone();
                if leader.wait_for(|now| now.as_deref() != Some(address)).await.is_err() {
                    // Without a follower, no change is known.
                    std::future::pending().await
                }
            }
        }
    }
}

impl std::fmt::Display for ServerLocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Fixed(address) => f.write_str(address),
            Self::Led(leader) => match &*leader.borrow() {
                Some(address) => write!(f, "{address}, the leader,"),
                None => f.write_str("the leader (none at the moment)"),
            },
        }
    }
}

async fn follow(directory: Arc<dyn MetadataBackend>, key: String, tell: watch::Sender<Option<Arc<str>>>) {
    while !tell.is_closed() {
        let Ok(mut changes) = directory.watch(&key).await else {
            look(&*directory, &key, &tell).await;
            sleep(RETRY).await;
            continue;
        };
        // Query after the watch has begun, so that no change is missed, and periodically in case
        // the watch misses one.
        while look(&*directory, &key, &tell).await {
            tokio::select! {
                () = tell.closed() => return,
                changed = timeout(LOOK_AGAIN, changes.next()) => if matches!(changed, Ok(None)) { break },
            }
        }
        sleep(RETRY).await;
    }
}

/// Publishes the current leader. Returns whether it is known.
async fn look(directory: &dyn MetadataBackend, key: &str, tell: &watch::Sender<Option<Arc<str>>>) -> bool {
    let found = match directory.get(key).await {
        Ok(found) => found,
        Err(error) => {
            tracing::warn!("cannot find the leader of the cluster: {error}");
            return false;
        }
    };
    let leader: Option<Arc<str>> = found.map(|found| String::from_utf8_lossy(&found.value).trim().into());
    tell.send_if_modified(|known| {
        let changed = *known != leader;
        if changed {
            tracing::info!(leader = leader.as_deref().unwrap_or("nobody"), "leader of the cluster changed");
            known.clone_from(&leader);
        }
        changed
    });
    true
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use mooncake_core::meta::{Expect, MemoryMetadata};

    use super::*;

    #[tokio::test]
    async fn who_waits_for_another_leader_hears_of_it() {
        let directory = Arc::new(MemoryMetadata::new());
        let location = ServerLocation::following(directory.clone(), "k".into());
        let lead = async |who: &'static str| directory.put("k", who.into(), Expect::Any).await.unwrap();
        let heard = async |than: Option<&str>| {
            timeout(Duration::from_secs(30), location.another_leads(than)).await.unwrap();
            location.leader()
        };
        assert_eq!(location.leader(), None);
        lead("a").await;
        assert_eq!(heard(None).await.as_deref(), Some("a"));
        assert!(location.another_leads(Some("a")).now_or_never().is_none());
        directory.delete("k").await.unwrap();
        location.left("a").await;
        assert!(location.another_leads(Some("a")).now_or_never().is_none(), "nobody is not another");
        lead("b").await;
        assert_eq!(heard(Some("a")).await.as_deref(), Some("b"));
        assert!(ServerLocation::Fixed("a".into()).another_leads(None).now_or_never().is_none());
    }
}
