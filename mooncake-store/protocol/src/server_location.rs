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

/// Time in which a directory that fails at first may still start.
const FIRST_ANSWER: Duration = Duration::from_millis(1800);

/// Location of a server.
#[derive(Clone, Debug)]
pub enum ServerLocation {
    /// Fixed address `host:port`.
    Fixed(Arc<str>),
    /// Address of the current leader, if there is one.
    Led {
        /// Address.
        leader: watch::Receiver<Option<Arc<str>>>,
        /// State of the directory that names the leader.
        directory: watch::Receiver<DirectoryState>,
    },
}

/// State of a directory.
#[derive(Clone, Debug, Default)]
pub enum DirectoryState {
    /// The first query is in progress.
    #[default]
    Querying,
    /// No query has succeeded. The error is that of the last one.
    Failed(Error),
    /// A query has succeeded.
    Answered,
}

impl ServerLocation {
    /// Follows the leader that a key of a directory names. A task on the current tokio runtime does
    /// so until the last user is dropped.
    pub fn following(directory: Arc<dyn MetadataBackend>, key: String) -> Self {
        let (leader_sender, leader) = watch::channel(None);
        let (state, of_directory) = watch::channel(DirectoryState::default());
        tokio::spawn(follow(directory, key, Followed { leader: leader_sender, directory: state }));
        Self::Led { leader, directory: of_directory }
    }

    /// Returns the current address. Waits up to `patience` for a leader.
    ///
    /// # Errors
    /// `RPC_FAIL` if there is no leader in that time.
    pub async fn now(&self, patience: Duration) -> Result<Arc<str>> {
        match self {
            Self::Fixed(address) => Ok(address.clone()),
            Self::Led { leader, directory } => {
                let mut leader = leader.clone();
                let found = timeout(patience, leader.wait_for(Option::is_some)).await;
                let found = found.ok().and_then(|found| found.ok()?.clone());
                found.ok_or_else(|| match &*directory.borrow() {
                    DirectoryState::Failed(error) => no_leader(error),
                    _ => Error::new(
                        ErrorCode::RpcFail,
                        format!("no master has led the cluster for {patience:?}"),
                    ),
                })
            }
        }
    }

    /// Returns the error of a directory that has failed and not answered for two seconds. Never
    /// returns for a directory that answers, and for a fixed address.
    pub async fn unreachable_directory(&self) -> Error {
        if let Self::Led { directory, .. } = self {
            let mut directory = directory.clone();
            let is_answered = |state: &DirectoryState| matches!(state, DirectoryState::Answered);
            if timeout(FIRST_ANSWER, directory.wait_for(is_answered)).await.is_err()
                && let Ok(state) =
                    directory.wait_for(|state| !matches!(state, DirectoryState::Querying)).await
                && let DirectoryState::Failed(error) = &*state
            {
                return no_leader(error);
            }
        }
        std::future::pending().await
    }

    /// Returns whether the server is still at `address`.
    pub fn is(&self, address: &str) -> bool {
        match self {
            Self::Fixed(_) => true,
            Self::Led { leader, .. } => leader.borrow().as_deref() == Some(address),
        }
    }

    /// Returns the current leader, if the server is one of several.
    pub fn leader(&self) -> Option<Arc<str>> {
        match self {
            Self::Fixed(_) => None,
            Self::Led { leader, .. } => leader.borrow().clone(),
        }
    }

    /// Returns as soon as there is a leader other than `than`. Never returns for a fixed address.
    pub async fn another_leads(&self, than: Option<&str>) {
        if let Self::Led { leader, .. } = self
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
            Self::Led { leader, .. } => {
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
            Self::Led { leader, .. } => match &*leader.borrow() {
                Some(address) => write!(f, "{address}, the leader,"),
                None => f.write_str("the leader (none at the moment)"),
            },
        }
    }
}

fn no_leader(error: &Error) -> Error {
    error.clone().context("cannot find the leader of the cluster")
}

/// Knowledge of a follower.
struct Followed {
    leader: watch::Sender<Option<Arc<str>>>,
    directory: watch::Sender<DirectoryState>,
}

impl Followed {
    /// Records the outcome of a query.
    fn answered(&self, outcome: std::result::Result<(), Error>) {
        self.directory.send_if_modified(|state| match (&*state, outcome) {
            (DirectoryState::Answered, _) => false,
            (_, Ok(())) => {
                *state = DirectoryState::Answered;
                true
            }
            (_, Err(error)) => {
                *state = DirectoryState::Failed(error);
                true
            }
        });
    }
}

async fn follow(directory: Arc<dyn MetadataBackend>, key: String, followed: Followed) {
    while !followed.leader.is_closed() {
        let mut changes = match directory.watch(&key).await {
            Ok(changes) => changes,
            Err(error) => {
                followed.answered(Err(error));
                look(&*directory, &key, &followed).await;
                sleep(RETRY).await;
                continue;
            }
        };
        // Query after the watch has begun, so that no change is missed, and periodically in case
        // the watch misses one.
        while look(&*directory, &key, &followed).await {
            tokio::select! {
                () = followed.leader.closed() => return,
                changed = timeout(LOOK_AGAIN, changes.next()) => if matches!(changed, Ok(None)) { break },
            }
        }
        sleep(RETRY).await;
    }
}

/// Publishes the current leader. Returns whether it is known.
async fn look(directory: &dyn MetadataBackend, key: &str, followed: &Followed) -> bool {
    let found = match directory.get(key).await {
        Ok(found) => found,
        Err(error) => {
            tracing::warn!("cannot find the leader of the cluster: {error}");
            followed.answered(Err(error));
            return false;
        }
    };
    followed.answered(Ok(()));
    let leader: Option<Arc<str>> = found.map(|found| String::from_utf8_lossy(&found.value).trim().into());
    followed.leader.send_if_modified(|known| {
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
    use futures::stream::BoxStream;
    use mooncake_core::meta::{Expect, MemoryMetadata, MetaCapabilities, MetaEvent, MetaValue};

    use super::*;

    /// Directory that cannot be reached, with the reason.
    #[derive(Debug)]
    struct Unreachable;

    #[async_trait::async_trait]
    impl MetadataBackend for Unreachable {
        fn capabilities(&self) -> MetaCapabilities {
            MetaCapabilities { watch: true, durable: true, atomic: true, list: true }
        }

        async fn get(&self, _key: &str) -> Result<Option<MetaValue>> {
            Err(Error::new(ErrorCode::RpcFail, "etcd at 10.0.0.1:2379 refuses"))
        }

        async fn put(&self, _key: &str, _value: bytes::Bytes, _expect: Expect) -> Result<u64> {
            Err(Error::from(ErrorCode::RpcFail))
        }

        async fn delete(&self, _key: &str) -> Result<bool> {
            Err(Error::from(ErrorCode::RpcFail))
        }

        async fn list(&self, _prefix: &str) -> Result<Vec<(String, MetaValue)>> {
            Err(Error::from(ErrorCode::RpcFail))
        }

        async fn watch(&self, _prefix: &str) -> Result<BoxStream<'static, MetaEvent>> {
            Err(Error::new(ErrorCode::RpcFail, "etcd at 10.0.0.1:2379 refuses"))
        }
    }

    #[tokio::test]
    async fn unreachable_directory_returns_only_failures() {
        let location = ServerLocation::following(Arc::new(Unreachable), "k".into());
        let error = timeout(Duration::from_secs(60), location.unreachable_directory()).await.unwrap();
        assert!(error.to_string().contains("cannot find the leader"), "{error}");
        assert!(error.to_string().contains("10.0.0.1:2379"), "{error}");
        let error = location.now(Duration::ZERO).await.unwrap_err();
        assert!(error.to_string().contains("10.0.0.1:2379"), "{error}");

        let location = ServerLocation::following(Arc::new(MemoryMetadata::new()), "k".into());
        let waited = timeout(FIRST_ANSWER * 2, location.unreachable_directory()).await;
        assert!(waited.is_err(), "it answers that there is no leader");
    }

    #[tokio::test]
    async fn another_leads_resolves_on_new_leader() {
        let directory = Arc::new(MemoryMetadata::new());
        let location = ServerLocation::following(directory.clone(), "k".into());
        let lead = async |who: &'static str| directory.put("k", who.into(), Expect::Any).await.unwrap();
        let next_leader = async |than: Option<&str>| {
            timeout(Duration::from_secs(30), location.another_leads(than)).await.unwrap();
            location.leader()
        };
        assert_eq!(location.leader(), None);
        lead("a").await;
        assert_eq!(next_leader(None).await.as_deref(), Some("a"));
        assert!(location.another_leads(Some("a")).now_or_never().is_none());
        directory.delete("k").await.unwrap();
        location.left("a").await;
        assert!(location.another_leads(Some("a")).now_or_never().is_none(), "nobody is not another");
        lead("b").await;
        assert_eq!(next_leader(Some("a")).await.as_deref(), Some("b"));
        assert!(ServerLocation::Fixed("a".into()).another_leads(None).now_or_never().is_none());
    }
}
