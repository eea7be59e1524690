//! One of several masters leads: which, and for how long it may say so.
//!
//! The leader holds a key in the directory under a lease. It answers calls only until the lease might be over, counted by its own monotonic clock from
//! when it began to ask for more time: a leader that was frozen, or is cut off from the directory, has stopped before another one begins.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt;
use mooncake_core::Result;
use mooncake_core::clock::{Moment, SharedClock};
use mooncake_core::fault_injection::is_planted;
use mooncake_core::meta::{Hold, Leases};
use parking_lot::Mutex;

#[cfg(test)]
mod tests;

/// What a new leader asks for, as in the existing system.
pub(super) const LEASE: Duration = Duration::from_secs(5);
/// Part of it that is left when the leader stops to answer, in case its clock runs slower than the directory's.
const MARGIN: Duration = Duration::from_millis(500);
/// Pause between two tries to lead, or to look who does.
const RETRY: Duration = Duration::from_secs(1);

/// How a master stands among the masters of its cluster.
#[derive(Debug)]
pub(crate) struct Standing {
    clock: SharedClock,
    /// Calls are answered before this moment only.
    until: AtomicU64,
    seen: Mutex<Seen>,
}

/// What it shows of that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    /// `standby`, `candidate` or `serving`.
    pub(crate) state: &'static str,
    /// Who leads, and which election made it so.
    pub(crate) leader: Option<(String, u64)>,
}

impl Standing {
    /// Of a master that is alone: it always leads.
    pub(crate) fn alone(clock: SharedClock) -> Self {
        let seen = Seen { state: "serving", leader: None };
        Self { clock, until: AtomicU64::new(u64::MAX), seen: Mutex::new(seen) }
    }

    /// Of one among several, which does not lead yet.
    pub(crate) fn one_of_several(clock: SharedClock) -> Self {
        let seen = Seen { state: "standby", leader: None };
        Self { clock, until: AtomicU64::new(0), seen: Mutex::new(seen) }
    }

    /// Whether it may answer calls now.
    pub(crate) fn leads(&self) -> bool {
        let until = self.until.load(Ordering::Acquire);
        until == u64::MAX || self.clock.now().0 < until
    }

    /// `leader` or `standby`.
    pub(crate) fn role(&self) -> &'static str {
        if self.leads() { "leader" } else { "standby" }
    }

    pub(crate) fn seen(&self) -> Seen {
        self.seen.lock().clone()
    }

    fn show(&self, state: &'static str, leader: Option<(String, u64)>) {
        let now = Seen { state, leader };
        let before = std::mem::replace(&mut *self.seen.lock(), now.clone());
        if before != now {
            tracing::info!(state, leader = ?now.leader, "among the masters of the cluster");
        }
    }

    /// It leads until the time that it asked for then may be over.
    fn leads_since(&self, asked: Moment) {
        self.until.store(asked.after(LEASE - MARGIN).0, Ordering::Release);
    }

    fn leads_no_more(&self) {
        self.until.store(0, Ordering::Release);
    }
}

/// How time passes for who waits.
#[async_trait]
pub(crate) trait Pace: std::fmt::Debug + Send + Sync {
    async fn sleep(&self, span: Duration);
}

/// As it does on this machine.
#[derive(Debug)]
struct Machine;

#[async_trait]
impl Pace for Machine {
    async fn sleep(&self, span: Duration) {
        tokio::time::sleep(span).await;
    }
}

/// The election of one cluster's leader.
#[derive(Debug)]
pub(crate) struct Election {
    directory: Arc<dyn Leases>,
    key: String,
    /// Where this master answers calls.
    own: String,
    standing: Arc<Standing>,
    pace: Arc<dyn Pace>,
}

impl Election {
    pub(crate) fn new(directory: Arc<dyn Leases>, key: String, own: String, standing: Arc<Standing>) -> Self {
        Self { directory, key, own, standing, pace: Arc::new(Machine) }
    }

    /// What `work` comes to, if it does in that time.
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
        if self.somebody_leads().await? {
            return Ok(None);
        }
        self.standing.show("candidate", None);
        let asked = self.standing.clock.now();
        let hold = self.directory.take(&self.key, self.own.clone().into(), LEASE).await?;
        if let Some(hold) = &hold {
            self.standing.leads_since(asked);
            self.standing.show("serving", Some((self.own.clone(), hold.revision)));
        } else {
            self.somebody_leads().await?;
        }
        Ok(hold)
    }

    /// Looks who leads. It may be this very process before it was started again: then nobody serves until that lease is over.
    async fn somebody_leads(&self) -> Result<bool> {
        let Some(held) = self.directory.get(&self.key).await? else { return Ok(false) };
        let leader = String::from_utf8_lossy(&held.value).trim().to_owned();
        self.standing.show("standby", Some((leader, held.revision)));
        Ok(true)
    }

    /// Returns when the key has changed, or a while later.
    async fn wait_for_a_change(&self) {
        let Ok(mut changes) = self.directory.watch(&self.key).await else {
            return self.pace.sleep(RETRY).await;
        };
        // It may have changed before the watch was there, and a watch may be silent that should not be.
        while matches!(self.directory.get(&self.key).await, Ok(Some(_))) {
            match self.within(LEASE / 2, changes.next()).await {
                Some(Some(_)) => return,
                Some(None) => return self.pace.sleep(RETRY).await,
                None => {}
            }
        }
    }

    /// Keeps leading for as long as that is possible; returns when it is not any more.
    pub(crate) async fn lead(&self, hold: &Hold) {
        while self.standing.leads() {
            self.pace.sleep(LEASE / 5).await;
            let asked = self.standing.clock.now();
            match self.within(LEASE / 5, self.directory.keep(hold)).await {
                Some(Ok(true)) => self.standing.leads_since(asked),
                Some(Ok(false)) => break,
                Some(Err(error)) => tracing::warn!("the lease of the leader was not renewed: {error}"),
                None => tracing::warn!("the lease of the leader was not renewed: no answer"),
            }
        }
        self.standing.leads_no_more();
        self.standing.show("standby", None);
    }

    /// Keeps leading until the last work of the leader is done, then hands the lead over. The work is done to its end even if
    /// the lead is lost meanwhile.
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

    /// Hands the lead over to the next master. Waits for the directory no longer than the lease lasts.
    pub(crate) async fn resign(&self, hold: Hold) {
        self.standing.leads_no_more();
        match self.within(LEASE, self.directory.let_go(hold)).await {
            Some(Ok(())) => {}
            Some(Err(error)) => tracing::debug!("the lease of the leader runs out by itself: {error}"),
            None => tracing::debug!("the lease of the leader runs out by itself: no answer"),
        }
    }
}
