//! Clients and their segments: mount, unmount, ping, expiry.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::EvictionPolicy;
use mooncake_core::ids::{ClientId, SegmentId};
use mooncake_core::replica::{Segment, SegmentStatus};
use mooncake_core::{Error, ErrorCode, Result};

use super::Master;
use super::graves::Graves;
use super::segments::Mounted;
use mooncake_protocol::api::PingReply;

/// When each client was last heard of.
#[derive(Default)]
pub(super) struct Clients {
    seen: HashMap<ClientId, Moment>,
}

impl Clients {
    pub(super) fn len(&self) -> usize {
        self.seen.len()
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Mount {
    New,
    Again,
    /// With objects in it.
    Kept,
}

impl<A: SegmentAllocator, E: EvictionPolicy> Master<A, E> {
    /// The client lives. One that is not known is told to mount again.
    pub fn ping(&self, client: ClientId) -> PingReply {
        let now = self.clock.now();
        let mut clients = self.clients.lock();
        let need_remount = match clients.seen.get_mut(&client) {
            Some(seen) => {
                *seen = now;
                false
            }
            None => true,
        };
        drop(clients);
        self.disks.hear(client, now);
        self.trust(client);
        PingReply { view: 0, need_remount }
    }

    /// This process was stopped for so long, and could hear nobody: no client counts as silent for that.
    pub fn was_stopped(&self, span: Duration) {
        let now = self.clock.now();
        for seen in self.clients.lock().seen.values_mut() {
            *seen = seen.after(span).min(now);
        }
        self.disks.was_stopped(span, now);
    }

    /// Somebody could not reach the member at `endpoint`: nothing is placed there until it is heard of, which takes a live
    /// one a ping interval. What lies there stays readable for those who can reach it.
    pub fn doubt(&self, by: ClientId, endpoint: &str) {
        let registry = self.segments.read();
        for segment in registry.list.iter().filter(|s| s.info.endpoint == endpoint && s.client != by) {
            segment.doubt(true);
            self.doubts.fetch_add(1, Relaxed);
            tracing::debug!(%endpoint, %by, "a member could not be reached");
        }
    }

    fn trust(&self, client: ClientId) {
        let doubts = self.doubts.load(Relaxed);
        if doubts == 0 {
            return;
        }
        let registry = self.segments.read();
        registry.list.iter().filter(|s| s.client == client).for_each(|s| s.doubt(false));
        if registry.list.iter().all(|s| !s.is_doubted()) {
            // Unless somebody has raised one since.
            let _ = self.doubts.compare_exchange(doubts, 0, Relaxed, Relaxed);
        }
    }

    /// Opens a client's memory for objects. Repeated, it is fine.
    ///
    /// # Errors
    /// `INVALID_PARAMS` (base or size 0, or beyond 57 bits); `SEGMENT_ALREADY_EXISTS` (the id is mounted with other data, or the memory
    /// under another id); `ILLEGAL_CLIENT` (another client's); `UNAVAILABLE_IN_CURRENT_STATUS` (it is being unmounted).
    pub fn mount(&self, client: ClientId, segment: &Segment) -> Result<()> {
        self.mount_as(client, segment, Mount::New)
    }

    pub(super) fn mount_as(&self, client: ClientId, segment: &Segment, mount: Mount) -> Result<()> {
        check_segment(segment)?;
        let mut graves = self.membership.lock();
        self.mount_one(&mut graves, client, segment, mount)?;
        self.hear(client);
        Ok(())
    }

    /// Makes a client known (again), with the segments it has. What this master still knows of promises in them is kept. Segments
    /// it has never seen take no objects until [`MasterOptions::remount_rest`](super::MasterOptions::remount_rest) after its own start.
    ///
    /// # Errors
    /// As [`Master::mount`], for the first segment that fails; those before it are mounted.
    pub fn remount(&self, client: ClientId, segments: &[Segment]) -> Result<()> {
        segments.iter().try_for_each(check_segment)?;
        let mut graves = self.membership.lock();
        // First, so that what is mounted before a failure goes when the client does.
        self.hear(client);
        segments.iter().try_for_each(|segment| self.mount_one(&mut graves, client, segment, Mount::Again))
    }

    /// Takes a segment out: its objects are gone at once. An unknown id is fine.
    ///
    /// # Errors
    /// `ILLEGAL_CLIENT` when another client mounted it.
    pub fn unmount(&self, client: ClientId, segment: SegmentId) -> Result<()> {
        let mut graves = self.membership.lock();
        if let Some(mounted) = self.own_segment(client, segment)? {
            self.bury(&mut graves, &mounted);
        }
        Ok(())
    }

    /// Takes a segment out after `grace`: until then its objects are readable, and none are added. Repeated, the first grace
    /// counts.
    ///
    /// # Errors
    /// `INVALID_PARAMS` when it is not mounted, or by another client.
    pub fn unmount_after(&self, client: ClientId, segment: SegmentId, grace: Duration) -> Result<()> {
        let _graves = self.membership.lock();
        let mounted = self.own_segment(client, segment).map_err(|error| Error::invalid(error.to_string()))?;
        let mounted = mounted.ok_or_else(|| Error::invalid(unknown(&segment).to_string()))?;
        if mounted.leaves().is_none() {
            let at = self.clock.now().after(grace);
            mounted.leave_at(at);
            self.timers.at(at);
        }
        Ok(())
    }

    /// State of a segment.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`.
    pub fn segment_status(&self, segment: SegmentId) -> Result<SegmentStatus> {
        let registry = self.segments.read();
        registry.get(segment).map(|mounted| mounted.status()).ok_or_else(|| unknown(&segment))
    }

    /// State of the first segment of a name.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`.
    pub fn segment_status_named(&self, name: &str) -> Result<SegmentStatus> {
        let registry = self.segments.read();
        registry.named(name).first().map(|mounted| mounted.status()).ok_or_else(|| unknown(&name))
    }

    /// Addresses of clients, from their segments' endpoints, without ports and each once. Clients without segments are left out.
    pub fn addresses(&self, clients: &[ClientId]) -> Vec<(ClientId, Vec<String>)> {
        let wanted: HashSet<ClientId> = clients.iter().copied().collect();
        let registry = self.segments.read();
        let mut found: HashMap<ClientId, Vec<String>> = HashMap::new();
        for mounted in registry.list.iter().filter(|mounted| wanted.contains(&mounted.client)) {
            let addresses = found.entry(mounted.client).or_default();
            let host = host_of(&mounted.info.endpoint);
            if !addresses.iter().any(|known| known == host) {
                addresses.push(host.to_owned());
            }
        }
        // In the order they were asked for, each once.
        clients.iter().filter_map(|client| found.remove_entry(client)).collect()
    }

    /// Buries the segments of clients that were silent too long, and those whose grace is over. Returns the former.
    pub(super) fn expire(&self, graves: &mut Graves<A>, now: Moment) -> Vec<Segment> {
        let mut clients = self.clients.lock();
        let gone: Vec<_> = clients
            .seen
            .extract_if(|_, seen| seen.after(self.options.client_ttl) <= now)
            .map(|(client, _)| client)
            .collect();
        for seen in clients.seen.values() {
            self.timers.at(seen.after(self.options.client_ttl));
        }
        let mut ledgers = self.ledgers.lock();
        gone.iter().for_each(|client| ledgers.forget(*client));
        ledgers.prune(|client| clients.seen.contains_key(&client), self.options.client_ttl, now);
        drop(ledgers);
        drop(clients);
        let due: Vec<_> = {
            let registry = self.segments.read();
            let due = |mounted: &&Arc<Mounted<A>>| {
                gone.contains(&mounted.client) || mounted.leaves().is_some_and(|at| at <= now)
            };
            registry.list.iter().filter(due).cloned().collect()
        };
        for mounted in &due {
            if mounted.leaves().is_none() {
                mounted.expire();
                tracing::warn!(client = %mounted.client, segment = mounted.info.name, "client was silent too long");
            }
            self.bury(graves, mounted);
        }
        for mounted in self.segments.read().list.iter() {
            mounted.leaves().into_iter().for_each(|at| self.timers.at(at));
        }
        due.iter().filter(|mounted| gone.contains(&mounted.client)).map(|m| m.info.clone()).collect()
    }

    fn mount_one(
        &self,
        graves: &mut Graves<A>,
        client: ClientId,
        segment: &Segment,
        mount: Mount,
    ) -> Result<()> {
        if let Some(mounted) = self.segments.read().get(segment.id) {
            return same_mount(mounted, client, segment, mount);
        }
        self.displace(graves, client, segment)?;
        if graves.is_under(segment) {
            self.sweep(graves);
        }
        let now = self.clock.now();
        let known = graves.knows(segment.id);
        let resting = graves.inherit(segment);
        let opens = match mount {
            Mount::Again if !known => self.started.after(self.rest_after_start()),
            _ => now,
        };
        let mut mounted = Mounted::new(segment.clone(), client, opens, &self.allocator, &resting);
        mounted.ledger = self.ledgers.lock().of(client);
        if mount == Mount::Kept {
            mounted.close();
        }
        self.timers.at(mounted.next_release());
        self.segments.write().insert(Arc::new(mounted));
        self.count_capacity();
        self.eviction.something_changed();
        tracing::info!(segment = %segment.id, name = segment.name, size = segment.size, %client, "segment mounted");
        Ok(())
    }

    /// The same memory cannot belong to two: a client that mounts what another one had has taken its place
    /// (a process restarted on the same address before its predecessor expired).
    fn displace(&self, graves: &mut Graves<A>, client: ClientId, segment: &Segment) -> Result<()> {
        let others: Vec<_> = {
            let registry = self.segments.read();
            registry.list.iter().filter(|mounted| mounted.overlaps(segment)).cloned().collect()
        };
        if let Some(own) = others.iter().find(|mounted| mounted.client == client) {
            return Err(Error::new(
                ErrorCode::SegmentAlreadyExists,
                format!("segment {} overlaps segment {} of the same client", segment.id, own.info.id),
            ));
        }
        for mounted in others {
            tracing::warn!(segment = %mounted.info.id, by = %segment.id, "segment displaced: its memory was mounted by another client");
            self.bury(graves, &mounted);
        }
        Ok(())
    }

    fn bury(&self, graves: &mut Graves<A>, mounted: &Arc<Mounted<A>>) {
        self.segments.write().remove(mounted.info.id);
        self.count_capacity();
        mounted.bury();
        graves.add(mounted.clone());
        self.timers.at(self.clock.now());
        self.eviction.something_changed();
        tracing::info!(segment = %mounted.info.id, name = mounted.info.name, "segment unmounted");
    }

    /// Tenants share what there is.
    fn count_capacity(&self) {
        if self.tenants.are_on() {
            let registry = self.segments.read();
            let sizes = registry.list.iter().map(|mounted| mounted.info.size);
            self.tenants.set_capacity(sizes.fold(0, u64::saturating_add));
        }
    }

    pub(super) fn own_segment(
        &self,
        client: ClientId,
        segment: SegmentId,
    ) -> Result<Option<Arc<Mounted<A>>>> {
        match self.segments.read().get(segment) {
            Some(mounted) if mounted.client != client => Err(Error::new(
                ErrorCode::IllegalClient,
                format!("segment {segment} was mounted by another client"),
            )),
            mounted => Ok(mounted.cloned()),
        }
    }

    fn hear(&self, client: ClientId) {
        let now = self.clock.now();
        self.clients.lock().seen.insert(client, now);
        self.timers.at(now.after(self.options.client_ttl));
    }
}

fn same_mount<A: SegmentAllocator>(
    mounted: &Mounted<A>,
    client: ClientId,
    segment: &Segment,
    mount: Mount,
) -> Result<()> {
    let refuse = |code, why: &str| Err(Error::new(code, format!("segment {}: {why}", segment.id)));
    if mounted.client != client {
        return refuse(ErrorCode::IllegalClient, "mounted by another client");
    }
    if mounted.info != *segment {
        return refuse(ErrorCode::SegmentAlreadyExists, "mounted with another address, size or name");
    }
    // Whoever mounts all it has again must not fail for what it is about to take back anyway.
    if mounted.leaves().is_some() && mount != Mount::Again {
        return refuse(ErrorCode::UnavailableInCurrentStatus, "being unmounted");
    }
    Ok(())
}

/// No machine gives a process more addresses: x86 and ARM have 57 bits at most.
const ADDRESSES: u64 = 1 << 57;

fn check_segment(segment: &Segment) -> Result<()> {
    if segment.base == 0 || segment.size == 0 {
        return Err(Error::invalid(format!("segment {}: base and size must not be 0", segment.id)));
    }
    if segment.base.checked_add(segment.size).is_none_or(|end| end > ADDRESSES) {
        return Err(Error::invalid(format!(
            "segment {}: {} bytes at {:#x} are beyond what a process can have",
            segment.id, segment.size, segment.base
        )));
    }
    for (what, text, most) in [
        ("endpoint", &segment.endpoint, MAX_WORD),
        ("protocol", &segment.protocol, MAX_WORD),
        ("name", &segment.name, MAX_NAME),
        ("host", &segment.host_id, MAX_NAME),
    ] {
        if text.len() > most {
            return Err(Error::invalid(format!(
                "segment {}: its {what} has {} bytes; the most is {most}",
                segment.id,
                text.len()
            )));
        }
    }
    Ok(())
}

/// Longest endpoint and protocol, in bytes: what any answer can name (`pack::encode_answers`).
pub(super) const MAX_WORD: usize = 255;
/// Longest name and host, in bytes.
const MAX_NAME: usize = 4096;

pub(super) fn unknown(segment: &dyn std::fmt::Display) -> Error {
    Error::new(ErrorCode::SegmentNotFound, format!("no segment {segment}"))
}

/// `host:port` and `[v6]:port` without the port.
fn host_of(endpoint: &str) -> &str {
    if let Some((host, _)) = endpoint.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        return host;
    }
    match endpoint.rsplit_once(':') {
        Some((host, _)) if !host.contains(':') => host,
        _ => endpoint,
    }
}

#[cfg(test)]
mod tests {
    use super::host_of;

    #[test]
    fn hosts_of_endpoints() {
        for (endpoint, host) in [
            ("10.0.0.1:5", "10.0.0.1"),
            ("[::1]:5", "::1"),
            ("node", "node"),
            ("fe80::1", "fe80::1"),
            ("", ""),
        ] {
            assert_eq!(host_of(endpoint), host);
        }
    }
}
