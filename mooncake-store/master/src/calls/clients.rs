//! Clients and their segments: mount, unmount, ping, expiry.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::host_port;
use mooncake_core::ids::{ClientId, SegmentId};
use mooncake_core::replica::{Segment, SegmentStatus};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_protocol::api::PingReply;

use super::client_table::{ClientTable, MAX_CLIENTS};
use super::master::Master;
use crate::model::segment::MountedSegment;
use crate::space::mount::{Mount, check_segment, unknown};
use crate::space::retired::RetiredSegments;
use crate::sync::atomic::Ordering::Relaxed;

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
        self.end_suspicion(&mut clients, client, need_remount);
        drop(clients);
        self.space().disks.mark_seen(client, now);
        self.space().clear_unreachable_reports(client);
        PingReply { view: 0, need_remount }
    }

    /// Extends the last heartbeat of every client, and the time for announcements of values of
    /// earlier masters, by `span`, during which this process was stopped and could receive none.
    pub fn was_stopped(&self, span: Duration) {
        let now = self.space().clock.now();
        for seen in self.clients.lock().seen.values_mut() {
            *seen = seen.after(span).min(now);
        }
        self.space().disks.was_stopped(span, now);
        self.space().announcements.extend(span);
    }

    /// Records that `by` could not reach the client at `endpoint`. Nothing is placed there until
    /// the next heartbeat of that client, which takes a ping interval if it is alive. Its objects
    /// stay readable for clients that can reach it.
    pub fn report_unreachable(&self, by: ClientId, endpoint: &str) {
        let registry = self.space().segments.read();
        for segment in registry.list.iter().filter(|s| s.info.endpoint == endpoint && s.client != by) {
            segment.set_reported_unreachable(true);
            self.space().unreachable_reports.fetch_add(1, Relaxed);
            tracing::debug!(%endpoint, %by, "client reported as unreachable");
        }
    }

    /// Mounts memory of a client. Repeating the call has no effect.
    ///
    /// # Errors
    /// `INVALID_PARAMS` (base or size 0, or beyond 57 bits); `SEGMENT_ALREADY_EXISTS` (the id is
    /// mounted with other data, or the memory under another id); `ILLEGAL_CLIENT` (mounted by
    /// another client); `UNAVAILABLE_IN_CURRENT_STATUS` (being unmounted, or too many clients).
    pub fn mount(&self, client: ClientId, segment: &Segment) -> Result<()> {
        self.mount_as(client, segment, Mount::New)
    }

    /// Mounts memory of a client and records a heartbeat.
    pub(crate) fn mount_as(&self, client: ClientId, segment: &Segment, mount: Mount) -> Result<()> {
        check_segment(segment)?;
        self.admit_client(client)?;
        self.mount_all(client, std::slice::from_ref(segment), mount)
    }

    /// Checks that the table of clients has space for a client.
    pub(crate) fn admit_client(&self, client: ClientId) -> Result<()> {
        let clients = self.clients.lock();
        if clients.len() < MAX_CLIENTS || clients.seen.contains_key(&client) {
            return Ok(());
        }
        let text = format!("cannot register client: {MAX_CLIENTS} clients are known. client={client}");
        Err(Error::new(ErrorCode::UnavailableInCurrentStatus, text))
    }

    /// Mounts segments of a client, whose descriptions were checked, and records a heartbeat.
    fn mount_all(&self, client: ClientId, segments: &[Segment], mount: Mount) -> Result<()> {
        let mut displaced = HashSet::new();
        let mark_seen = || self.mark_seen(client);
        let outcome = self.space().mount_each(client, segments, mount, &mut displaced, mark_seen);
        self.jobs.end_work_of(&displaced, self.space().clock.now());
        outcome
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
        self.admit_client(client)?;
        // First, so that segments mounted before a failure expire with the client.
        self.mark_seen(client);
        self.mount_all(client, segments, Mount::Again)
    }

    /// Unmounts a segment. Its objects are gone at once. An unknown id is ignored.
    ///
    /// Clients of earlier versions unmount the segment file of their previous process, too, so
    /// their segments are handed over; see [`Master::hand_over`].
    ///
    /// # Errors
    /// `ILLEGAL_CLIENT` if another client mounted it.
    pub fn unmount(&self, client: ClientId, segment: SegmentId) -> Result<()> {
        {
            let mut retired = self.space().retired.lock();
            let Some(mounted) = self.space().own_segment(client, segment)? else { return Ok(()) };
            let is_earlier = mounted.ledger.as_ref().is_some_and(|ledger| !ledger.knows_hand_over());
            if is_earlier && !is_planted("earlier-clients-hand-nothing-over") {
                mounted.hand_over();
            }
            self.space().retire_segment(&mut retired, &mounted);
        }
        if !self.space().segments.read().has_client(client) {
            self.jobs.end_work_of(&HashSet::from([client]), self.space().clock.now());
        }
        Ok(())
    }

    /// Unmounts a segment like [`Master::unmount`]. For ten minutes the same client may mount the
    /// memory again, as a segment of another identifier, with [`Master::mount_with_objects`], and
    /// announce those objects in it that were not removed or replaced meanwhile.
    ///
    /// # Errors
    /// Those of [`Master::unmount`].
    pub fn hand_over(&self, client: ClientId, segment: SegmentId) -> Result<()> {
        let mut retired = self.space().retired.lock();
        if let Some(mounted) = self.space().own_segment(client, segment)? {
            mounted.hand_over();
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
    pub fn segment_status_by_name(&self, name: &str) -> Result<SegmentStatus> {
        let registry = self.space().segments.read();
        registry.with_name(name).first().map(|mounted| mounted.status()).ok_or_else(|| unknown(&name))
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
    /// ended. Returns the former, and the clients that are lost: those without a heartbeat, and
    /// those without a segment from now on.
    pub(crate) fn expire(
        &self,
        retired: &mut RetiredSegments<A>,
        now: Moment,
    ) -> (Vec<Segment>, HashSet<ClientId>) {
        let lifetime = self.space().options.client_lifetime();
        let mut clients = self.clients.lock();
        let expired_clients: HashSet<_> = clients
            .seen
            .extract_if(|_, seen| seen.after(lifetime) <= now)
            .map(|(client, _)| client)
            .collect();
        clients.counts.expired += expired_clients.len() as u64;
        self.suspect_silent(&mut clients, now);
        let mut ledgers = self.space().ledgers.lock();
        expired_clients.iter().for_each(|client| ledgers.forget(*client));
        ledgers.prune(|client| clients.seen.contains_key(&client), lifetime, now);
        drop(ledgers);
        if !expired_clients.is_empty() {
            self.address_checks.lock().prune(|client| clients.seen.contains_key(&client));
        }
        drop(clients);
        let due: Vec<_> = {
            let registry = self.space().segments.read();
            let due = |mounted: &&Arc<MountedSegment<A>>| {
                expired_clients.contains(&mounted.client) || mounted.unmount_at().is_some_and(|at| at <= now)
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
        let expired = due.iter().filter(|mounted| expired_clients.contains(&mounted.client));
        let expired = expired.map(|mounted| mounted.info.clone()).collect();
        let registry = self.space().segments.read();
        for mounted in registry.list.iter() {
            mounted.unmount_at().into_iter().for_each(|at| self.space().timers.schedule(at));
        }
        let mut lost = expired_clients;
        lost.extend(due.iter().map(|mounted| mounted.client).filter(|client| !registry.has_client(*client)));
        (expired, lost)
    }

    /// Suspects clients whose heartbeats are overdue, and schedules the next change of each client.
    fn suspect_silent(&self, clients: &mut ClientTable, now: Moment) {
        let options = &self.space().options;
        let ClientTable { seen, suspected, counts } = clients;
        suspected.retain(|client| seen.contains_key(client));
        for (client, seen) in seen.iter() {
            let overdue = seen.after(options.client_ttl);
            if overdue > now {
                self.space().timers.schedule(overdue);
                continue;
            }
            if suspected.insert(*client) {
                counts.suspicions += 1;
                self.space().suspicions.set(*client, true);
                tracing::warn!(%client, "client suspected: no heartbeat");
            }
            self.space().timers.schedule(seen.after(options.client_lifetime()));
        }
    }

    /// Ends the suspicion about a client that has sent a heartbeat. `is_expired` if the client is
    /// not known any more: its disk may be known for longer.
    fn end_suspicion(&self, clients: &mut ClientTable, client: ClientId, is_expired: bool) {
        if self.space().options.client_suspicion.is_zero() {
            return;
        }
        let recovers = clients.recover(client);
        if recovers || is_expired {
            self.space().suspicions.set(client, false);
            self.space().eviction.end_backoff();
        }
        if recovers {
            tracing::info!(%client, "client sends heartbeats again");
        }
    }

    fn mark_seen(&self, client: ClientId) {
        let now = self.space().clock.now();
        let mut clients = self.clients.lock();
        let is_new = clients.seen.insert(client, now).is_none();
        self.end_suspicion(&mut clients, client, is_new);
        drop(clients);
        self.space().timers.schedule(now.after(self.space().options.client_ttl));
    }
}
