//! Where a server is: at one address, or where the leader of several is now.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use mooncake_core::meta::MetadataBackend;
use mooncake_core::{Error, ErrorCode, Result};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

/// Pause before a directory is asked again that did not answer.
const RETRY: Duration = Duration::from_millis(500);
/// How long a watch is trusted that says nothing.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// Where a server is.
#[derive(Clone, Debug)]
pub enum Place {
    /// `host:port`.
    Fixed(Arc<str>),
    /// There now, if anybody leads.
    Led(watch::Receiver<Option<Arc<str>>>),
}

impl Place {
    /// Where the leader is that a key of a directory names. Follows it on the current tokio runtime, until nobody asks any more.
    pub fn following(directory: Arc<dyn MetadataBackend>, key: String) -> Self {
        let (tell, leader) = watch::channel(None);
        tokio::spawn(follow(directory, key, tell));
        Self::Led(leader)
    }

    /// Where it is now; waits for a leader as long as `patience` lasts.
    ///
    /// # Errors
    /// `RPC_FAIL` when nobody leads for all that time.
    pub async fn now(&self, patience: Duration) -> Result<Arc<str>> {
        match self {
            Self::Fixed(address) => Ok(address.clone()),
            Self::Led(leader) => {
                let mut leader = leader.clone();
                let found = timeout(patience, leader.wait_for(Option::is_some)).await;
                let found = found.ok().and_then(|found| found.ok()?.clone());
                found.ok_or_else(|| {
                    Error::new(ErrorCode::RpcFail, format!("no master leads the cluster since {patience:?}"))
                })
            }
        }
    }

    /// Whether it still is there.
    pub fn is(&self, address: &str) -> bool {
        match self {
            Self::Fixed(_) => true,
            Self::Led(leader) => leader.borrow().as_deref() == Some(address),
        }
    }

    /// Who leads now, if that may change and somebody does.
    pub fn leader(&self) -> Option<Arc<str>> {
        match self {
            Self::Fixed(_) => None,
            Self::Led(leader) => leader.borrow().clone(),
        }
    }

    /// Returns when somebody else leads. Never, at a fixed place.
    pub async fn another_leads(&self, than: Option<&str>) {
        if let Self::Led(leader) = self
            && leader.clone().wait_for(|now| now.is_some() && now.as_deref() != than).await.is_ok()
        {
            return;
        }
        std::future::pending().await
    }

    /// Returns when it is not there any more.
    pub async fn left(&self, address: &str) {
        match self {
            Self::Fixed(_) => std::future::pending().await,
            Self::Led(leader) => {
                let mut leader = leader.clone();
                if leader.wait_for(|now| now.as_deref() != Some(address)).await.is_err() {
                    // Nobody follows any more, so nothing is known against it.
                    std::future::pending().await
                }
            }
        }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Fixed(address) => f.write_str(address),
            Self::Led(leader) => match &*leader.borrow() {
                Some(address) => write!(f, "{address}, the leader,"),
                None => f.write_str("the leader, of which there is none now,"),
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
        // Read after the watch has begun, so that no change falls between the two; and from time to time, for a watch may be silent that should not be.
        while look(&*directory, &key, &tell).await {
            tokio::select! {
                () = tell.closed() => return,
                changed = timeout(LOOK_AGAIN, changes.next()) => if matches!(changed, Ok(None)) { break },
            }
        }
        sleep(RETRY).await;
    }
}

/// Tells who leads now; whether that is known.
async fn look(directory: &dyn MetadataBackend, key: &str, tell: &watch::Sender<Option<Arc<str>>>) -> bool {
    let found = match directory.get(key).await {
        Ok(found) => found,
        Err(error) => {
            tracing::warn!("who leads the cluster is not known: {error}");
            return false;
        }
    };
    let leader: Option<Arc<str>> = found.map(|found| String::from_utf8_lossy(&found.value).trim().into());
    tell.send_if_modified(|known| {
        let changed = *known != leader;
        if changed {
            tracing::info!(leader = leader.as_deref().unwrap_or("nobody"), "leads the cluster");
            known.clone_from(&leader);
        }
        changed
    });
    true
}

/// `host:port`, with brackets around an IPv6 address.
pub fn join(host: &str, port: u16) -> String {
    if host.contains(':') && !host.starts_with('[') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use mooncake_core::meta::{Expect, MemoryMetadata};

    use super::*;

    #[tokio::test]
    async fn who_waits_for_another_leader_hears_of_it() {
        let directory = Arc::new(MemoryMetadata::new());
        let place = Place::following(directory.clone(), "k".into());
        let lead = async |who: &'static str| directory.put("k", who.into(), Expect::Any).await.unwrap();
        let heard = async |than: Option<&str>| {
            timeout(Duration::from_secs(30), place.another_leads(than)).await.unwrap();
            place.leader()
        };
        assert_eq!(place.leader(), None);
        lead("a").await;
        assert_eq!(heard(None).await.as_deref(), Some("a"));
        assert!(place.another_leads(Some("a")).now_or_never().is_none());
        directory.delete("k").await.unwrap();
        place.left("a").await;
        assert!(place.another_leads(Some("a")).now_or_never().is_none(), "nobody is not another");
        lead("b").await;
        assert_eq!(heard(Some("a")).await.as_deref(), Some("b"));
        assert!(Place::Fixed("a".into()).another_leads(None).now_or_never().is_none());
    }
}
