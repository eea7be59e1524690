//! Clients and their segments: mount, unmount, ping, expiry.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::host_port;
use mooncake_core::ids::{ClientId, SegmentId};
use mooncake_core::replica::{Segment, SegmentStatus};
use mooncake_core::{Error, Result};
use mooncake_protocol::api::PingReply;

use super::master::Master;
use crate::model::segment::MountedSegment;
use crate::space::mount::{Mount, check_segment, unknown};
use crate::space::retired::RetiredSegments;

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Records a heartbeat. A client that is not known is asked to mount its segments again.
    pub fn ping(&self, client: ClientId) -> PingReply {
        let now = self.space().clock.now();
        let mut clients = self.clients.lock();
        let need_remount = match clients.seen.get_mut(&client) {
            Some(seen) => {
                *seen = now;
                false
            }
            None => true,
        };
        drop(clients);
        self.space().disks.mark_seen(client, now);
        self.space().clear_doubts(client);
        PingReply { view: 0, need_remount }
    }

    /// Extends the last heartbeat of every client by `span`, during which this process was stopped
    /// and could receive none.
    pub fn was_stopped(&self, span: Duration) {
        let now = self.space().clock.now();
        for seen in self.clients.lock().seen.values_mut() {
            *seen = seen.after(span).min(now);
        }
        self.space().disks.was_stopped(span, now);
    }

    /// Records that `by` could not reach the client at `endpoint`. Nothing is placed there until
    /// the next heartbeat of that client, which takes a ping interval if it is alive. Its objects
    /// stay readable for clients that can reach it.
    pub fn doubt(&self, by: ClientId, endpoint: &str) {
        let registry = self.space().segments.read();
        for segment in registry.list.iter().filter(|s| s.info.endpoint == endpoint && s.client != by) {
            segment.set_doubted(true);
            self.space().doubts.fetch_add(1, Relaxed);
            tracing::debug!(%endpoint, %by, "client reported as unreachable");
        }
    }

    /// Mounts memory of a client. Repeating the call has no effect.
    ///
    /// # Errors
    /// `INVALID_PARAMS` (base or size 0, or beyond 57 bits); `SEGMENT_ALREADY_EXISTS` (the id is
    /// mounted with other data, or the memory under another id); `ILLEGAL_CLIENT` (mounted by
    /// another client); `UNAVAILABLE_IN_CURRENT_STATUS` (being unmounted).
    pub fn mount(&self, client: ClientId, segment: &Segment) -> Result<()> {
        self.mount_as(client, segment, Mount::New)
    }

    /// Mounts memory of a client and records a heartbeat.
    pub(crate) fn mount_as(&self, client: ClientId, segment: &Segment, mount: Mount) -> Result<()> {
        check_segment(segment)?;
        let mut retired = self.space().retired.lock();
        self.space().mount_one(&mut retired, client, segment, mount)?;
        self.mark_seen(client);
        Ok(())
    }

    /// Registers a client again with its segments. Promises in them that this master still knows
    /// are kept. Segments that it has never seen accept no objects until
    /// [`MasterOptions::remount_rest`](crate::MasterOptions::remount_rest) after its own start.
    ///
    /// # Errors
    /// Those of [`Master::mount`], for the first segment that fails; the segments before it are
    /// mounted.
    pub fn remount(&self, client: ClientId, segments: &[Segment]) -> Result<()> {
        segments.iter().try_for_each(check_segment)?;
        let mut retired = self.space().retired.lock();
        // First, so that segments mounted before a failure expire with the client.
        self.mark_seen(client);
        segments
            .iter()
            .try_for_each(|segment| self.space().mount_one(&mut retired, client, segment, Mount::Again))
    }

    /// Unmounts a segment. Its objects are gone at once. An unknown id is ignored.
    ///
    /// # Errors
    /// `ILLEGAL_CLIENT` if another client mounted it.
    pub fn unmount(&self, client: ClientId, segment: SegmentId) -> Result<()> {
        let mut retired = self.space().retired.lock();
        if let Some(mounted) = self.space().own_segment(client, segment)? {
            self.space().retire_segment(&mut retired, &mounted);
        }
        Ok(())
    }

    /// Unmounts a segment after `grace`. Until then its objects are readable, and none are added.
    /// If the call is repeated, the first grace period counts.
    ///
    /// # Errors
    /// `INVALID_PARAMS` if the client has not mounted the segment.
    pub fn unmount_after(&self, client: ClientId, segment: SegmentId, grace: Duration) -> Result<()> {
        let _retired = self.space().retired.lock();
        let mounted =
            self.space().own_segment(client, segment).map_err(|error| Error::invalid(error.to_string()))?;
        let mounted = mounted.ok_or_else(|| Error::invalid(unknown(&segment).to_string()))?;
        if mounted.unmount_at().is_none() {
            let at = self.space().clock.now().after(grace);
            mounted.set_unmount_at(at);
            self.space().timers.schedule(at);
        }
        Ok(())
    }

    /// Returns the status of a segment.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`.
    pub fn segment_status(&self, segment: SegmentId) -> Result<SegmentStatus> {
        let registry = self.space().segments.read();
        registry.get(segment).map(|mounted| mounted.status()).ok_or_else(|| unknown(&segment))
    }

    /// Returns the status of the first segment of a name.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`.
    pub fn segment_status_named(&self, name: &str) -> Result<SegmentStatus> {
        let registry = self.space().segments.read();
        registry.named(name).first().map(|mounted| mounted.status()).ok_or_else(|| unknown(&name))
    }

    /// Returns the addresses of clients: the hosts of their segments' endpoints, each once. Clients
    /// without segments are omitted.
    pub fn addresses(&self, clients: &[ClientId]) -> Vec<(ClientId, Vec<String>)> {
        let wanted: HashSet<ClientId> = clients.iter().copied().collect();
        let registry = self.space().segments.read();
        let mut found: HashMap<ClientId, Vec<String>> = HashMap::new();
        for mounted in registry.list.iter().filter(|mounted| wanted.contains(&mounted.client)) {
            let addresses = found.entry(mounted.client).or_default();
            let (host, _) = host_port::split(&mounted.info.endpoint);
            if !addresses.iter().any(|known| known == host) {
                addresses.push(host.to_owned());
            }
        }
        // In the order of the request, each once.
        clients.iter().filter_map(|client| found.remove_entry(client)).collect()
    }

    /// Retires the segments of clients without a recent heartbeat, and those whose grace period has
    /// ended. Returns the former.
    pub(crate) fn expire(&self, retired: &mut RetiredSegments<A>, now: Moment) -> Vec<Segment> {
        let mut clients = self.clients.lock();
        let gone: Vec<_> = clients
            .seen
            .extract_if(|_, seen| seen.after(self.space().options.client_ttl) <= now)
            .map(|(client, _)| client)
            .collect();
        for seen in clients.seen.values() {
            self.space().timers.schedule(seen.after(self.space().options.client_ttl));
        }
        let mut ledgers = self.space().ledgers.lock();
        gone.iter().for_each(|client| ledgers.forget(*client));
        ledgers.prune(|client| clients.seen.contains_key(&client), self.space().options.client_ttl, now);
        drop(ledgers);
        drop(clients);
        let due: Vec<_> = {
            let registry = self.space().segments.read();
            let due = |mounted: &&Arc<MountedSegment<A>>| {
                gone.contains(&mounted.client) || mounted.unmount_at().is_some_and(|at| at <= now)
            };
            registry.list.iter().filter(due).cloned().collect()
        };
        for mounted in &due {
            if mounted.unmount_at().is_none() {
                mounted.expire();
                tracing::warn!(client = %mounted.client, segment = mounted.info.name, "segment retired: no heartbeat of its client");
            }
            self.space().retire_segment(retired, mounted);
        }
        for mounted in self.space().segments.read().list.iter() {
            mounted.unmount_at().into_iter().for_each(|at| self.space().timers.schedule(at));
        }
        due.iter().filter(|mounted| gone.contains(&mounted.client)).map(|m| m.info.clone()).collect()
    }

    fn mark_seen(&self, client: ClientId) {
        let now = self.space().clock.now();
        self.clients.lock().seen.insert(client, now);
        self.space().timers.schedule(now.after(self.space().options.client_ttl));
    }
}
