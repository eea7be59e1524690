//! Upkeep of an engine: unused segments are closed, and entries that the metadata service
//! has lost are published again.

use std::sync::Weak;
use std::sync::atomic::Ordering;
use std::time::Duration;

use mooncake_core::Result;
use mooncake_core::clock::Moment;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::meta::fingerprint;
use tracing::{debug, info, warn};

use super::regions::Regions;
use super::target::Target;
use super::{Inner, Publication};
use crate::net::HostPort;
use crate::transport::Transport;

/// Default time after which a segment that is neither used nor connected is closed, and twice that
/// at most.
pub(super) const UNUSED_AFTER: Duration = Duration::from_secs(10);
/// Mean interval at which an engine reads its own entries in the metadata service.
const ENTRY_CHECK: Duration = Duration::from_secs(3);
/// Maximum rate of the checks of a descriptor, in bytes per second. A long descriptor is read less
/// often than every [`ENTRY_CHECK`].
const DESCRIPTOR_RATE: u64 = 64 << 10;

impl<T: Transport> Inner<T> {
    /// Closes the segments that were not used since the last call and whose process has no
    /// connection here, and releases the resources of departed peers.
    pub(super) fn close_unused(&self) {
        let is_needed = |target: &Target<T>| {
            let route = target.route();
            let is_in_process = route.local.is_some()
                && route.instance().is_some_and(|instance| Regions::in_process(instance).is_some());
            is_in_process || self.transport.is_connected(&route.peer)
        };
        if !is_planted("engine-keeps-departed-peers") {
            // The drop of a target may unmap memory, so that it happens outside of the lock.
            let unused = self.targets.lock().take_unused(is_needed);
            for target in unused {
                debug!(segment = target.name(), "unused segment closed");
            }
        }
        self.transport.release_departed();
        self.meters.merge_unused();
    }

    pub(super) async fn publish_again(&self) -> Result<()> {
        let mut published = self.publishing.lock().await;
        if self.closed.load(Ordering::SeqCst) {
            return Ok(());
        }
        if let Some(at) = &self.at
            && self.directory.locate(&self.name).await?.as_ref() != Some(at)
        {
            self.directory.announce(&self.name, at, &self.limits).await?;
        }
        self.publish_locked(&mut published, false).await
    }

    /// Publishes the entries of this engine again, if the metadata service has lost them. Returns
    /// the time to wait before the next call.
    ///
    /// # Errors
    /// Returns the errors of the metadata service.
    async fn check_entries(&self, descriptor_due: Moment) -> Result<EntryCheck> {
        let is_own = self.check_address().await?;
        let now = self.clock.now();
        let unpublished = {
            let published = self.publishing.lock().await;
            published.change != Some(self.changes.load(Ordering::SeqCst))
        };
        match is_own {
            AddressCheck::OtherOwner => return Ok(EntryCheck::OtherOwner),
            AddressCheck::Own if now < descriptor_due && !unpublished => return Ok(EntryCheck::Unchanged),
            AddressCheck::Own | AddressCheck::Published => {}
        }
        let length = self.check_descriptor().await?;
        let pause = Duration::from_millis(length.saturating_mul(1000) / DESCRIPTOR_RATE);
        Ok(EntryCheck::Descriptor(now.after(pause)))
    }

    /// Publishes the handshake address again, if it is lost.
    async fn check_address(&self) -> Result<AddressCheck> {
        let Some(at) = &self.at else { return Ok(AddressCheck::Own) };
        match self.directory.locate(&self.name).await? {
            Some(owner) if owner == *at => return Ok(AddressCheck::Own),
            Some(owner) => return Ok(self.report_other_owner(&owner)),
            None => {}
        }
        let _guard = self.publishing.lock().await;
        if self.closed.load(Ordering::SeqCst) {
            return Ok(AddressCheck::OtherOwner);
        }
        warn!(segment = self.name, "the metadata service has lost this segment; it is published again");
        self.directory.announce(&self.name, at, &self.limits).await?;
        Ok(AddressCheck::Published)
    }

    fn report_other_owner(&self, owner: &HostPort) -> AddressCheck {
        if !self.is_replaced.swap(true, Ordering::Relaxed) {
            warn!(segment = self.name, %owner, "another engine has taken the name of this segment");
        }
        AddressCheck::OtherOwner
    }

    /// Publishes the descriptor again, if it is lost or older than the last published one. Returns
    /// the length of the entry in bytes.
    async fn check_descriptor(&self) -> Result<u64> {
        let is_current = |entry: Option<&[u8]>, published: &Publication| {
            let is_same = |entry| published.fingerprint.is_none_or(|print| print == fingerprint(entry));
            published.change == Some(self.changes.load(Ordering::SeqCst)) && entry.is_some_and(is_same)
        };
        let entry = self.directory.entry(&self.name).await?;
        {
            let published = self.publishing.lock().await;
            if is_current(entry.as_deref(), &published) || self.closed.load(Ordering::SeqCst) {
                return Ok(entry.map_or(0, |entry| entry.len() as u64));
            }
        }
        // A publication may have happened between the two.
        let mut published = self.publishing.lock().await;
        let entry = self.directory.entry(&self.name).await?;
        if is_current(entry.as_deref(), &published) || self.closed.load(Ordering::SeqCst) {
            return Ok(entry.map_or(0, |entry| entry.len() as u64));
        }
        let is_lost = entry.is_none();
        if published.is_republished && !is_lost {
            // The service stores another text than it was given.
            published.fingerprint = None;
            return Ok(entry.map_or(0, |entry| entry.len() as u64));
        }
        // Without a handshake port, a name belongs to the engine that published it first.
        self.publish_locked(&mut published, self.at.is_none() && is_lost).await?;
        published.is_republished = !is_lost;
        info!(segment = self.name, is_lost, "descriptor published again");
        Ok(entry.map_or(0, |entry| entry.len() as u64))
    }
}

/// State of the handshake address in the metadata service.
#[derive(Debug, PartialEq, Eq)]
enum AddressCheck {
    Own,
    Published,
    /// The name has another owner, or the engine is closed.
    OtherOwner,
}

/// Outcome of a check of the entries of an engine.
#[derive(Debug, PartialEq, Eq)]
enum EntryCheck {
    Unchanged,
    /// The descriptor is present, and is due for the next check at that time.
    Descriptor(Moment),
    OtherOwner,
}

/// Closes unused segments at an interval, until the engine is dropped.
pub(super) async fn close_unused_regularly<T: Transport>(engine: Weak<Inner<T>>, interval: Duration) {
    loop {
        tokio::time::sleep(interval).await;
        let Some(engine) = engine.upgrade() else { return };
        engine.close_unused();
    }
}

/// Checks the entries of an engine at intervals, until the engine is dropped.
pub(super) async fn check_entries_regularly<T: Transport>(engine: Weak<Inner<T>>) {
    let mut descriptor_due = Moment::default();
    loop {
        let pause = {
            let Some(engine) = engine.upgrade() else { return };
            // Engines that were started together do not check together.
            let percent = 80 + engine.rng.lock().next_u64() % 41;
            ENTRY_CHECK.mul_f64(percent as f64 / 100.0)
        };
        tokio::time::sleep(pause).await;
        let Some(engine) = engine.upgrade() else { return };
        if engine.closed.load(Ordering::SeqCst) || is_planted("engine-never-checks-its-entries") {
            continue;
        }
        match engine.check_entries(descriptor_due).await {
            Ok(EntryCheck::Descriptor(due)) => descriptor_due = due,
            Ok(EntryCheck::Unchanged | EntryCheck::OtherOwner) => {}
            Err(error) => {
                debug!(segment = engine.name, %error, "cannot check the entries of the metadata service")
            }
        }
    }
}
