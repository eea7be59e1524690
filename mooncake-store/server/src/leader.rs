//! Election of the leader among several masters, and the time limit of its leadership.
//!
//! The leader holds a key in the directory under a lease. It handles calls only until the lease may
//! have expired. The monotonic clock of the leader measures that time from the start of the last
//! renewal. A leader that was frozen or cut off from the directory therefore stops before the next
//! one begins.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt;
use mooncake_core::Result;
use mooncake_core::clock::{Moment, SharedClock};
use mooncake_core::fault_injection::is_planted;
use mooncake_core::meta::{Hold, Leases, longest_promise, master_view};
use parking_lot::Mutex;

mod promise;
#[cfg(test)]
mod tests;

/// Remaining part of the lease at which the leader stops, in case its clock is slower than the
/// clock of the directory.
const MARGIN: Duration = Duration::from_millis(500);
/// Pause between two attempts to lead or to find the leader.
const RETRY: Duration = Duration::from_secs(1);

/// Leadership of a master in its cluster.
#[derive(Debug)]
pub(crate) struct Leadership {
    clock: SharedClock,
    /// Duration of the lease of the leader.
    lease: Duration,
    /// End of the time in which the master may handle calls.
    until: AtomicU64,
    status: Mutex<LeadershipStatus>,
}

/// Published state of the leadership.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LeadershipStatus {
    /// `standby`, `candidate` or `serving`.
    pub(crate) state: &'static str,
    /// Address of the leader, and the number of its election.
    pub(crate) leader: Option<(String, u64)>,
}

impl Leadership {
    /// Leadership of a single master: it always leads.
    pub(crate) fn single(clock: SharedClock) -> Self {
        let status = LeadershipStatus { state: "serving", leader: None };
        Self { clock, lease: Duration::MAX, until: AtomicU64::new(u64::MAX), status: Mutex::new(status) }
    }

    /// Leadership of one of several masters under leases of this duration: it does not lead yet.
    pub(crate) fn among_several(clock: SharedClock, lease: Duration) -> Self {
        let status = LeadershipStatus { state: "standby", leader: None };
        Self { clock, lease, until: AtomicU64::new(0), status: Mutex::new(status) }
    }

    /// Returns whether the master may handle calls now.
    pub(crate) fn leads(&self) -> bool {
        let until = self.until.load(Ordering::Acquire);
        until == u64::MAX || self.clock.now().0 < until
    }

    /// Returns `leader` or `standby`.
    pub(crate) fn role(&self) -> &'static str {
        if self.leads() { "leader" } else { "standby" }
    }

    pub(crate) fn status(&self) -> LeadershipStatus {
        self.status.lock().clone()
    }

    fn publish(&self, state: &'static str, leader: Option<(String, u64)>) {
        let now = LeadershipStatus { state, leader };
        let before = std::mem::replace(&mut *self.status.lock(), now.clone());
        if before != now {
            tracing::info!(state, leader = ?now.leader, "leadership changed");
        }
    }

    /// Extends the leadership by a lease that was requested at `requested_at`.
    fn extend(&self, requested_at: Moment) {
        self.until.store(requested_at.after(self.lease.saturating_sub(MARGIN)).0, Ordering::Release);
    }

    fn end(&self) {
        self.until.store(0, Ordering::Release);
    }
}

/// Source of time for waits.
#[async_trait]
pub(crate) trait Pace: std::fmt::Debug + Send + Sync {
    async fn sleep(&self, span: Duration);
}

/// Real time.
#[derive(Debug)]
struct RealTime;

#[async_trait]
impl Pace for RealTime {
    async fn sleep(&self, span: Duration) {
        tokio::time::sleep(span).await;
    }
}

/// Election of one cluster's leader.
#[derive(Debug)]
pub(crate) struct Election {
    directory: Arc<dyn Leases>,
    key: String,
    /// Key of the longest promise of the cluster's leaders.
    promise_key: String,
    /// RPC address of this master.
    own: String,
    leadership: Arc<Leadership>,
    pace: Arc<dyn Pace>,
}

impl Election {
    /// Creates the election of the leader of `cluster_id`. `own` is the RPC address of this master.
    pub(crate) fn new(
        directory: Arc<dyn Leases>,
        cluster_id: &str,
        own: String,
        leadership: Arc<Leadership>,
    ) -> Self {
        let (key, promise_key) = (master_view(cluster_id), longest_promise(cluster_id));
        Self { directory, key, promise_key, own, leadership, pace: Arc::new(RealTime) }
    }

    /// Returns the result of `work`, if it completes in time.
    async fn within<T>(&self, span: Duration, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            done = work => Some(done),
            () = self.pace.sleep(span) => None,
        }
    }

    /// Waits until this master leads.
    pub(crate) async fn win(&self) -> Hold {
        loop {
            match self.attempt().await {
                Ok(Some(hold)) => return hold,
                Ok(None) => self.wait_for_a_change().await,
                Err(error) => {
                    tracing::warn!("the directory of the masters does not answer: {error}");
                    self.pace.sleep(RETRY).await;
                }
            }
        }
    }

    async fn attempt(&self) -> Result<Option<Hold>> {
        if self.has_leader().await? {
            return Ok(None);
        }
        self.leadership.publish("candidate", None);
        let requested_at = self.leadership.clock.now();
        let hold = self.directory.take(&self.key, self.own.clone().into(), self.leadership.lease).await?;
        if let Some(hold) = &hold {
            self.leadership.extend(requested_at);
            self.leadership.publish("serving", Some((self.own.clone(), hold.revision)));
        } else {
            self.has_leader().await?;
        }
        Ok(hold)
    }

    /// Returns whether there is a leader. It may be this process before a restart: then there is no
    /// active leader until that lease has expired.
    async fn has_leader(&self) -> Result<bool> {
        let Some(held) = self.directory.get(&self.key).await? else { return Ok(false) };
        let leader = String::from_utf8_lossy(&held.value).trim().to_owned();
        self.leadership.publish("standby", Some((leader, held.revision)));
        Ok(true)
    }

    /// Returns when the key has changed, or after a while.
    async fn wait_for_a_change(&self) {
        let Ok(mut changes) = self.directory.watch(&self.key).await else {
            return self.pace.sleep(RETRY).await;
        };
        // The key may have changed before the watch began, and a watch may miss a change.
        while matches!(self.directory.get(&self.key).await, Ok(Some(_))) {
            match self.within(self.leadership.lease / 2, changes.next()).await {
                Some(Some(_)) => return,
                Some(None) => return self.pace.sleep(RETRY).await,
                None => {}
            }
        }
    }

    /// Renews the leadership as long as possible. Returns when it is lost.
    pub(crate) async fn lead(&self, hold: &Hold) {
        let interval = self.leadership.lease / 5;
        while self.leadership.leads() {
            self.pace.sleep(interval).await;
            let requested_at = self.leadership.clock.now();
            match self.within(interval, self.directory.renew(hold)).await {
                Some(Ok(true)) => self.leadership.extend(requested_at),
                Some(Ok(false)) => break,
                Some(Err(error)) => tracing::warn!("the lease of the leader was not renewed: {error}"),
                None => {
                    tracing::warn!("the lease of the leader was not renewed: the directory did not respond")
                }
            }
        }
        self.leadership.end();
        self.leadership.publish("standby", None);
    }

    /// Renews the leadership until the last work of the leader is done, then resigns. The work is
    /// completed even if the leadership is lost meanwhile.
    pub(crate) async fn resign_after(&self, hold: Hold, last_work: impl Future<Output = ()>) {
        let mut last_work = std::pin::pin!(last_work);
        if is_planted("stopping-leader-does-not-renew") {
            last_work.await;
        } else {
            tokio::select! {
                biased;
                () = last_work.as_mut() => {}
                () = self.lead(&hold) => last_work.await,
            }
        }
        self.resign(hold).await;
    }

    /// Hands the leadership over to the next master. Waits for the directory at most for the
    /// duration of the lease.
    pub(crate) async fn resign(&self, hold: Hold) {
        self.leadership.end();
        match self.within(self.leadership.lease, self.directory.release(hold)).await {
            Some(Ok(())) => {}
            Some(Err(error)) => tracing::debug!("the lease of the leader runs out by itself: {error}"),
            None => tracing::debug!(
                "cannot delete the lease of the leader, which will expire: the directory did not respond"
            ),
        }
    }
}
