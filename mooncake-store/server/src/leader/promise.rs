//! Longest promise of the leaders of a cluster, in the metadata service beside the key of the leader.
//!
//! A leader reads the promises of earlier leaders before it serves, and tells the next leader of its own. The value changes only when a leader with
//! longer leases or grants begins, and when nothing of such a leader holds any more.

use std::time::Duration;

use mooncake_core::Result;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::meta::{Expect, MetaValue};

use super::{Election, RETRY};

/// Promises of earlier leaders as a new leader finds them, with its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeptPromise {
    /// Longest promise of earlier leaders.
    pub(crate) earlier: Duration,
    own: Duration,
    /// Revision of the key that tells both.
    revision: u64,
}

impl Election {
    /// Reads for how long earlier leaders promised something, and keeps the longer of that and `own` for the next leader. Waits for as long as the
    /// metadata service does not answer, since a leader must not serve before.
    pub(crate) async fn keep_promise(&self, own: Duration) -> KeptPromise {
        loop {
            match self.try_to_keep_promise(own).await {
                Ok(kept) => return kept,
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

    async fn try_to_keep_promise(&self, own: Duration) -> Result<KeptPromise> {
        if is_planted("leader-keeps-no-promise") {
            return Ok(KeptPromise { earlier: Duration::ZERO, own, revision: 0 });
        }
        let found = self.directory.get(&self.promise_key).await?;
        let earlier = found.as_ref().map_or(Duration::ZERO, parse);
        let revision = match found {
            Some(found) if earlier >= own => found.revision,
            Some(found) => self.write_promise(own, Expect::At(found.revision)).await?,
            None => self.write_promise(own, Expect::Absent).await?,
        };
        Ok(KeptPromise { earlier, own, revision })
    }

    /// Writes the leader's own promise once nothing of earlier leaders holds any more, then waits for ever. A deposed leader writes
    /// nothing: the revision of the key tells of its successor, or the leader has stopped polling.
    pub(crate) async fn lower_promise(&self, kept: KeptPromise) {
        if kept.earlier > kept.own {
            self.pace.sleep(kept.earlier).await;
            if self.standing.leads()
                && let Err(error) = self.write_promise(kept.own, Expect::At(kept.revision)).await
            {
                // The longer promise stays, which costs later leaders time and nothing else.
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

/// Reads a promise. A value that is no number counts as the longest promise that masters believe.
fn parse(found: &MetaValue) -> Duration {
    let text = String::from_utf8_lossy(&found.value);
    Duration::from_millis(text.trim().parse().unwrap_or_else(|_| {
        tracing::warn!("the longest promise of earlier leaders is no number. value={text:?}");
        u64::MAX
    }))
}
