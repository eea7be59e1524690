//! Pings to the master, and the remount after the master has forgotten the client.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::time::Duration;

use mooncake_core::clock::Rng;
use mooncake_core::{ErrorCode, ErrorKind, Result};
use mooncake_transport::Transport;
use tokio::sync::watch;

use crate::deadline::Deadline;
use crate::state::Inner;
use crate::version;
use mooncake_protocol::message::ExchangePromise;
use mooncake_protocol::wire::Welcome;

/// Number of consecutive failed pings after which the master counts as lost and its version is
/// checked again.
const FAILURES_BEFORE_RECONNECT: u32 = 3;
/// Longest pause between two attempts while the master is unreachable. Once it is back, its clients
/// reconnect within three seconds.
const MAX_BACKOFF: Duration = Duration::from_secs(1);
/// Pause between two attempts after a change of leader. A new leader may not respond yet.
const QUICK_PAUSE: Duration = Duration::from_millis(20);
/// Number of attempts with the short pause.
const QUICK_ATTEMPTS: u32 = 50;

/// Longest time that a client waits before it announces objects, regardless of the master's
/// request.
const MAX_ANNOUNCE_DELAY: Duration = Duration::from_secs(10);

/// Runs until the client is closed or dropped.
pub(crate) async fn run<T: Transport>(client: Weak<Inner<T>>, mut closed: watch::Receiver<bool>) {
    let mut state = HeartbeatState::default();
    loop {
        let Some(strong) = client.upgrade() else { return };
        let pause = jittered(state.pause(strong.config.ping_interval), &mut strong.rng.lock());
        let master = strong.master.clone();
        // The task holds no reference while it sleeps, so that the client can be dropped.
        drop(strong);
        tokio::select! {
            // An error means that the sender and the client are gone.
            _ = closed.wait_for(|closed| *closed) => return,
            () = tokio::time::sleep(pause) => {}
            // A new leader knows nothing of this client before it receives a ping.
            () = master.another_leads(state.pinged_leader.as_deref()) => state.quick_attempts = QUICK_ATTEMPTS,
        }
        let Some(strong) = client.upgrade() else { return };
        strong.disk_owners.close_departed();
        tokio::select! {
            _ = closed.wait_for(|closed| *closed) => return,
            () = state.send_ping(&strong) => {}
        }
    }
}

/// State of the heartbeat after the last pings.
#[derive(Debug, Default)]
struct HeartbeatState {
    /// Number of consecutive failed pings.
    failures: u32,
    /// Leader that received the last ping, if there are several masters.
    pinged_leader: Option<Arc<str>>,
    /// Number of further attempts that are made with the short pause.
    quick_attempts: u32,
}

impl HeartbeatState {
    /// Returns the pause before the next ping. Without failures it is the interval. After the first
    /// failures it is shorter, because a restarted master is back soon. Once the connection counts
    /// as lost, each failure makes it longer.
    fn pause(&self, interval: Duration) -> Duration {
        if self.failures > 0 && self.quick_attempts > 0 {
            return QUICK_PAUSE;
        }
        if (1..FAILURES_BEFORE_RECONNECT).contains(&self.failures) {
            return interval / 4;
        }
        let doublings = self.failures.saturating_sub(FAILURES_BEFORE_RECONNECT).min(8);
        interval.saturating_mul(1 << doublings).min(MAX_BACKOFF.max(interval))
    }

    async fn send_ping<T: Transport>(&mut self, client: &Arc<Inner<T>>) {
        self.pinged_leader = client.master.leader();
        self.quick_attempts = self.quick_attempts.saturating_sub(1);
        match self.ping(client).await {
            Ok(()) => {
                if self.failures >= FAILURES_BEFORE_RECONNECT {
                    tracing::info!(client = %client.id, "the master is back");
                }
                (self.failures, self.quick_attempts) = (0, 0);
            }
            Err(error) => {
                self.failures = self.failures.saturating_add(1);
                if self.failures == FAILURES_BEFORE_RECONNECT || error.kind() == ErrorKind::VersionMismatch {
                    tracing::warn!(client = %client.id, failures = self.failures, "no sign of the master: {error}");
                } else {
                    tracing::debug!(client = %client.id, failures = self.failures, "ping failed: {error}");
                }
            }
        }
    }

    async fn ping<T: Transport>(&self, client: &Arc<Inner<T>>) -> Result<()> {
        let limit = client.config.timeout;
        let deadline = Deadline::after(&client.config.clock, limit);
        if self.failures >= FAILURES_BEFORE_RECONNECT {
            // The master that responds now may be another one than before the outage.
            let version = deadline.bound("version of the master", client.master.version()).await?;
            version::check(&version)?;
        }
        let reply = deadline.bound("ping", client.master.ping(client.id)).await?;
        if let Some(metrics) = &client.metrics {
            metrics.record_heartbeat(!reply.need_remount);
        }
        if reply.need_remount {
            // The master may be another one. The version numbers of some masters are unique only
            // during the life of that master.
            client.forget_all();
            client.zeroes_nothing.store(false, Relaxed);
            client.address_state.lock().renew();
            client.master.expect_another_master();
        }
        if reply.need_remount || client.has_unconfirmed() {
            client.remount(reply.need_remount, &deadline).await?;
            client.offer_disk_again();
        }
        // A failed request is repeated with the next ping. The failure does not affect whether the
        // client counts as alive.
        match client.take_inventory(&deadline).await {
            Ok(false) => {}
            Ok(true) => client.unmount_and_remount(&deadline).await?,
            Err(error) => tracing::debug!(client = %client.id, "no inventory: {error}"),
        }
        // The master has received the ping of this client. A timeout of the remaining requests does
        // not mean that the master is unreachable.
        if let Err(error) = client.take_tasks(&deadline).await {
            tracing::debug!(client = %client.id, "no tasks: {error}");
        }
        if let Err(error) = client.zero_requested(&deadline).await {
            tracing::debug!(client = %client.id, "no memory to zero: {error}");
        }
        if let Err(error) = client.check_address(&deadline).await {
            tracing::debug!(client = %client.id, "the address is not checked: {error}");
        }
        Ok(())
    }
}

/// Returns a random duration between three quarters of the pause and the whole pause. Clients of a
/// restarted master then do not connect all at once.
fn jittered(pause: Duration, rng: &mut Rng) -> Duration {
    let micros = u64::try_from(pause.as_micros()).unwrap_or(u64::MAX);
    Duration::from_micros(micros - rng.below(micros / 4 + 1))
}

impl<T: Transport> Inner<T> {
    /// Sends the longest promise of earlier masters to the master, and receives the promise of this
    /// master. A master of Mooncake C++ has no such RPC.
    pub(crate) async fn exchange_promise(&self, deadline: &Deadline) -> Result<()> {
        let longest = self.promises.lock().longest(self.config.clock.now());
        let promise_ms = u64::try_from(longest.as_millis()).unwrap_or(u64::MAX);
        let call = self.master.call(ExchangePromise { client: self.id, promise_ms });
        match deadline.bound("telling of earlier leases", call).await {
            Ok(Welcome { promise_ms, announce_after_ms }) => {
                let mut promises = self.promises.lock();
                promises.learn(Duration::from_millis(promise_ms), self.config.clock.now());
                promises.announce_after = Duration::from_millis(announce_after_ms).min(MAX_ANNOUNCE_DELAY);
                promises.is_exchanged = true;
            }
            Err(error)
                if error.code() == ErrorCode::NotSupported || error.kind() == ErrorKind::VersionMismatch =>
            {
                self.promises.lock().is_exchanged = false;
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(failures: u32) -> HeartbeatState {
        HeartbeatState { failures, ..HeartbeatState::default() }
    }

    #[test]
    fn pause_grows_after_third_failure() {
        let interval = Duration::from_millis(250);
        let pauses: Vec<u128> = (0..8).map(|n| failed(n).pause(interval).as_millis()).collect();
        assert_eq!(pauses, [250, 62, 62, 250, 500, 1000, 1000, 1000]);
        assert_eq!(failed(u32::MAX).pause(Duration::from_secs(60)).as_secs(), 60);
        let mut quick = HeartbeatState { quick_attempts: 1, ..failed(5) };
        assert_eq!(quick.pause(interval), QUICK_PAUSE);
        quick.quick_attempts = 0;
        assert_eq!(quick.pause(interval), MAX_BACKOFF);
    }
}
