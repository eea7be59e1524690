//! Signs of life to the master, and mounting again when it has forgotten the client.

use std::sync::{Arc, Weak};
use std::time::Duration;

use mooncake_core::clock::Rng;
use mooncake_core::{ErrorCode, ErrorKind, Result};
use mooncake_transport::Transport;
use tokio::sync::watch;

use crate::deadline::Deadline;
use crate::state::Inner;
use crate::version;
use mooncake_protocol::wire::Welcome;

/// Pings that fail one after another before the master is looked at afresh.
const FAILURES_BEFORE_RECONNECT: u32 = 3;
/// Longest pause between two tries while the master is away: once it is back, its members are
/// within three seconds.
const MAX_BACKOFF: Duration = Duration::from_secs(1);
/// One that has just begun to lead may not answer yet: the pause between two tries then, and how
/// many there are.
const HURRY: Duration = Duration::from_millis(20);
const HURRIED: u32 = 50;

/// Longest time that a client waits before it announces objects, whatever the master says.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// Runs until the client is closed or dropped.
pub(crate) async fn run<T: Transport>(client: Weak<Inner<T>>, mut closed: watch::Receiver<bool>) {
    let mut beat = Beat::default();
    loop {
        let Some(strong) = client.upgrade() else { return };
        let pause = jittered(beat.pause(strong.config.ping_interval), &mut strong.rng.lock());
        let master = strong.master.clone();
        // While the task sleeps, the client can go.
        drop(strong);
        tokio::select! {
            // An error means that the sender is gone, and the client with it.
            _ = closed.wait_for(|closed| *closed) => return,
            () = tokio::time::sleep(pause) => {}
            // It knows nothing before it has been told.
            () = master.another_leads(beat.asked.as_deref()) => beat.hurry = HURRIED,
        }
        let Some(strong) = client.upgrade() else { return };
        tokio::select! {
            _ = closed.wait_for(|closed| *closed) => return,
            () = beat.once(&strong) => {}
        }
    }
}

/// What the last pings came to.
#[derive(Debug, Default)]
struct Beat {
    failures: u32,
    /// The leader that was asked last, of several masters.
    asked: Option<Arc<str>>,
    /// So many tries more are made without delay.
    hurry: u32,
}

impl Beat {
    /// Until the next ping: the interval; less after the first failures, since a master that was
    /// started again is back soon; longer with every one once the connection counts as lost.
    fn pause(&self, interval: Duration) -> Duration {
        if self.failures > 0 && self.hurry > 0 {
            return HURRY;
        }
        if (1..FAILURES_BEFORE_RECONNECT).contains(&self.failures) {
            return interval / 4;
        }
        let doublings = self.failures.saturating_sub(FAILURES_BEFORE_RECONNECT).min(8);
        interval.saturating_mul(1 << doublings).min(MAX_BACKOFF.max(interval))
    }

    async fn once<T: Transport>(&mut self, client: &Arc<Inner<T>>) {
        self.asked = client.master.leader();
        self.hurry = self.hurry.saturating_sub(1);
        match self.ask(client).await {
            Ok(()) => {
                if self.failures >= FAILURES_BEFORE_RECONNECT {
                    tracing::info!(client = %client.id, "the master is back");
                }
                (self.failures, self.hurry) = (0, 0);
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

    async fn ask<T: Transport>(&self, client: &Arc<Inner<T>>) -> Result<()> {
        let limit = client.config.timeout;
        let deadline = Deadline::after(&client.config.clock, limit);
        if self.failures >= FAILURES_BEFORE_RECONNECT {
            // Whoever answers now may be another master than the one that went away.
            let version = deadline.bound("version of the master", client.master.version()).await?;
            version::check(&version)?;
        }
        let reply = deadline.bound("ping", client.master.ping(client.id)).await?;
        if reply.need_remount {
            // Perhaps another master: of some, numbers tell values apart only while they live.
            client.forget_all();
        }
        if reply.need_remount || client.has_unconfirmed() {
            client.remount(reply.need_remount, &deadline).await?;
            #[cfg(feature = "disk")]
            client.offer_disk_again();
        }
        // A question that fails is asked again; it takes nothing from the client's being alive.
        match client.take_inventory(&deadline).await {
            Ok(false) => {}
            Ok(true) => client.mount_anew(&deadline).await?,
            Err(error) => tracing::debug!(client = %client.id, "no inventory: {error}"),
        }
        // The master has heard of this client: that it has no time for the rest is no sign that it
        // is away.
        if let Err(error) = client.take_tasks(&deadline).await {
            tracing::debug!(client = %client.id, "no tasks: {error}");
        }
        Ok(())
    }
}

/// A part of the pause, from three quarters on: clients of one master that was restarted do not
/// come all at once.
fn jittered(pause: Duration, rng: &mut Rng) -> Duration {
    let micros = u64::try_from(pause.as_micros()).unwrap_or(u64::MAX);
    Duration::from_micros(micros - rng.below(micros / 4 + 1))
}

impl<T: Transport> Inner<T> {
    /// Tells the master what earlier masters promised, and learns what this one promises. A master
    /// of Mooncake C++ has no such call.
    pub(crate) async fn exchange_promise(&self, deadline: &Deadline) -> Result<()> {
        let longest = self.promises.lock().longest(self.config.clock.now());
        let asked = self.master.exchange_promise(self.id, longest);
        match deadline.bound("telling of earlier leases", asked).await {
            Ok(Welcome { promise_ms, announce_after_ms }) => {
                let mut promises = self.promises.lock();
                promises.learn(Duration::from_millis(promise_ms), self.config.clock.now());
                promises.announce_after = Duration::from_millis(announce_after_ms).min(LONGEST_WAIT);
            }
            Err(error)
                if error.code() == ErrorCode::NotSupported || error.kind() == ErrorKind::VersionMismatch => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(failures: u32) -> Beat {
        Beat { failures, ..Beat::default() }
    }

    #[test]
    fn pauses_are_short_at_first_grow_after_the_third_failure_and_stop_growing() {
        let often = Duration::from_millis(250);
        let pauses: Vec<u128> = (0..8).map(|n| failed(n).pause(often).as_millis()).collect();
        assert_eq!(pauses, [250, 62, 62, 250, 500, 1000, 1000, 1000]);
        assert_eq!(failed(u32::MAX).pause(Duration::from_secs(60)).as_secs(), 60);
        let mut hurried = Beat { hurry: 1, ..failed(5) };
        assert_eq!(hurried.pause(often), HURRY);
        hurried.hurry = 0;
        assert_eq!(hurried.pause(often), MAX_BACKOFF);
    }
}
