//! Longest promise of the leaders of a cluster, in the metadata service beside the key of the
//! leader.
//!
//! A leader reads the promises of earlier leaders before it serves, and publishes its own for the
//! next leader. The value changes only when a leader with longer leases or grants begins, and when
//! all leases and grants of such a leader have expired.

use std::time::Duration;

use mooncake_core::Result;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::meta::{Expect, MetaValue};

use super::{Election, RETRY};

/// Promises of earlier leaders as a new leader finds them, with its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StoredPromise {
    /// Longest promise of earlier leaders.
    pub(crate) earlier: Duration,
    own: Duration,
    /// Revision of the key with this value.
    revision: u64,
}

impl Election {
    /// Reads the longest promise of earlier leaders, and stores the longer one of that and `own`
    /// for the next leader. Waits as long as the metadata service does not respond, since a leader
    /// must not serve before.
    pub(crate) async fn store_promise(&self, own: Duration) -> StoredPromise {
        loop {
            match self.try_store_promise(own).await {
                Ok(stored) => return stored,
                Err(error) => {
                    tracing::warn!(
                        "cannot read the leases of earlier leaders: {error}. key={}",
                        self.promise_key
                    );
                    self.pace.sleep(RETRY).await;
                }
            }
        }
    }

    async fn try_store_promise(&self, own: Duration) -> Result<StoredPromise> {
        if is_planted("leader-keeps-no-promise") {
            return Ok(StoredPromise { earlier: Duration::ZERO, own, revision: 0 });
        }
        let found = self.directory.get(&self.promise_key).await?;
        let earlier = found.as_ref().map_or(Duration::ZERO, parse);
        let revision = match found {
            Some(found) if earlier >= own => found.revision,
            Some(found) => self.write_promise(own, Expect::At(found.revision)).await?,
            None => self.write_promise(own, Expect::Absent).await?,
        };
        Ok(StoredPromise { earlier, own, revision })
    }

    /// Writes the leader's own promise as soon as all leases and grants of earlier leaders have
    /// expired, then waits for ever. A deposed leader writes nothing: the revision of the key has
    /// changed, or the leader no longer polls this future.
    pub(crate) async fn lower_promise(&self, stored: StoredPromise) {
        if stored.earlier > stored.own {
            self.pace.sleep(stored.earlier).await;
            if self.leadership.leads()
                && let Err(error) = self.write_promise(stored.own, Expect::At(stored.revision)).await
            {
                // The longer promise remains, which only delays later leaders.
                tracing::debug!(
                    "cannot lower the promise of earlier leaders: {error}. key={}",
                    self.promise_key
                );
            }
        }
        std::future::pending().await
    }

    async fn write_promise(&self, promise: Duration, expect: Expect) -> Result<u64> {
        let text = u64::try_from(promise.as_millis()).unwrap_or(u64::MAX).to_string();
        self.directory.put(&self.promise_key, text.into(), expect).await
    }
}

/// Parses a promise. An invalid value counts as the longest promise that masters accept.
fn parse(found: &MetaValue) -> Duration {
    let text = String::from_utf8_lossy(&found.value);
    Duration::from_millis(text.trim().parse().unwrap_or_else(|_| {
        tracing::warn!(
            "cannot parse the longest promise of earlier leaders; assuming the maximum. value={text:?}"
        );
        u64::MAX
    }))
}
