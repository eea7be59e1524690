//! Mounting, retiring and sweeping segments.

use std::collections::HashSet;
use std::sync::Arc;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::{ClientId, SegmentId};
use mooncake_core::replica::{Locality, Segment};
use mooncake_core::{Error, ErrorCode, Result};

use super::retired::RetiredSegments;
use super::state::Space;
use crate::model::misses::MissCause;
use crate::model::segment::MountedSegment;
use crate::sync::atomic::Ordering::Relaxed;

/// Number of sweeps for one mount. Only a mount of the same memory by another client makes a second
/// one necessary.
const MAX_SWEEPS: usize = 8;

/// Kind of a mount.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mount {
    /// New memory.
    New,
    /// Memory that the client mounted before, perhaps at another master.
    Again,
    /// Memory with objects in it.
    WithObjects,
}

impl<A: SegmentAllocator, E: MergeableOrder> Space<A, E> {
    /// Clears the reports about the segments of a client that has sent a heartbeat.
    pub(crate) fn clear_unreachable_reports(&self, client: ClientId) {
        let unreachable_reports = self.unreachable_reports.load(Relaxed);
        if unreachable_reports == 0 {
            return;
        }
        let registry = self.segments.read();
        registry.list.iter().filter(|s| s.client == client).for_each(|s| s.set_reported_unreachable(false));
        if registry.list.iter().all(|s| !s.is_reported_unreachable()) {
            // Another report may have arrived meanwhile; then the number stays.
            let _ = self.unreachable_reports.compare_exchange(unreachable_reports, 0, Relaxed, Relaxed);
        }
    }

    /// Mounts segments of a client, as one for the expiry of clients, and calls `mounted` before
    /// that may happen. Adds the clients whose segments gave way to `displaced`.
    ///
    /// Where replicas may lie in retired mounts of the memory, they are dropped first. That takes
    /// long in a large directory, and mounts of other memory go on meanwhile.
    ///
    /// # Errors
    /// Those of [`mount_one`](Self::mount_one), for the first segment that fails; the segments
    /// before it are mounted.
    pub(crate) fn mount_each(
        &self,
        client: ClientId,
        segments: &[Segment],
        mount: Mount,
        displaced: &mut HashSet<ClientId>,
        mounted: impl Fn(),
    ) -> Result<()> {
        for _ in 0..MAX_SWEEPS {
            let mut retired = self.retired.lock();
            // From the first segment on, because those before may have expired during a sweep.
            // Mounted segments stay as they are.
            let mut missing = segments.iter();
            let is_unswept = loop {
                let Some(segment) = missing.next() else { break false };
                if !self.mount_one(&mut retired, client, segment, mount, displaced)? {
                    break true;
                }
            };
            if !is_unswept {
                mounted();
                return Ok(());
            }
            drop(retired);
            self.sweep_beside();
        }
        let text = "cannot mount segment: other clients mount its memory at the same time; try again";
        Err(Error::new(ErrorCode::UnavailableInCurrentStatus, text))
    }

    /// Mounts a segment. Quarantined extents of earlier mounts of the memory stay in quarantine.
    /// Returns false, and mounts nothing, while replicas may lie in such a mount.
    ///
    /// # Errors
    /// `SEGMENT_ALREADY_EXISTS`; `ILLEGAL_CLIENT`; `UNAVAILABLE_IN_CURRENT_STATUS`.
    fn mount_one(
        &self,
        retired: &mut RetiredSegments<A>,
        client: ClientId,
        segment: &Segment,
        mount: Mount,
        displaced: &mut HashSet<ClientId>,
    ) -> Result<bool> {
        if let Some(mounted) = self.segments.read().get(segment.id) {
            return same_mount(mounted, client, segment, mount).map(|()| true);
        }
        self.displace(retired, client, segment, displaced)?;
        if retired.has_unswept_replicas_in(segment) {
            return Ok(false);
        }
        let now = self.clock.now();
        let is_known = retired.knows(segment);
        let not_before = retired.opening_of(segment).max(now);
        let quarantined = retired.take_quarantined(segment);
        let opens = match mount {
            Mount::Again if !is_known => not_before.max(self.started.after(self.rest_after_start())),
            _ => not_before,
        };
        let mut mounted = MountedSegment::new(segment.clone(), client, opens, &self.allocator, &quarantined);
        mounted.ledger = self.ledgers.lock().of(client);
        mounted.suspicion = self.suspicions.of(client);
        if mount == Mount::WithObjects {
            mounted.close();
        }
        if self.separates_tenants() {
            // Memory that a master had before has bytes of objects.
            mounted.separate_tenants(mount == Mount::New && !is_known);
        }
        self.timers.schedule(mounted.next_release());
        if segment.locality.is_some() {
            self.has_localities.store(true, Relaxed);
        }
        self.segments.write().insert(Arc::new(mounted));
        self.update_tenant_capacity();
        self.eviction.end_backoff();
        tracing::info!(segment = %segment.id, name = segment.name, size = segment.size, %client, "segment mounted");
        Ok(true)
    }

    /// Retires the segments of other clients that overlap `segment`. The same memory cannot belong
    /// to two clients, so the client that mounts it has replaced the other one. (A process
    /// restarted on the same address before its predecessor expired.)
    fn displace(
        &self,
        retired: &mut RetiredSegments<A>,
        client: ClientId,
        segment: &Segment,
        displaced: &mut HashSet<ClientId>,
    ) -> Result<()> {
        let others: Vec<_> = {
            let registry = self.segments.read();
            registry.list.iter().filter(|mounted| mounted.overlaps(segment)).cloned().collect()
        };
        if let Some(own) = others.iter().find(|mounted| mounted.client == client) {
            return Err(Error::new(
                ErrorCode::SegmentAlreadyExists,
                format!(
                    "cannot mount segment: it overlaps another segment of the same client. segment={} other={}",
                    segment.id, own.info.id
                ),
            ));
        }
        for mounted in others {
            tracing::warn!(segment = %mounted.info.id, by = %segment.id, "segment retired: another client mounted its memory");
            self.retire_segment(retired, &mounted);
            displaced.insert(mounted.client);
        }
        Ok(())
    }

    /// Unmounts a segment and lists it as retired.
    pub(crate) fn retire_segment(&self, retired: &mut RetiredSegments<A>, mounted: &Arc<MountedSegment<A>>) {
        self.segments.write().remove(mounted.info.id);
        self.update_tenant_capacity();
        mounted.retire();
        retired.add(mounted.clone());
        self.timers.schedule(self.clock.now());
        self.eviction.end_backoff();
        tracing::info!(segment = %mounted.info.id, name = mounted.info.name, "segment retired");
    }

    /// Returns whether writers that may leave bytes out are kept from bytes of other tenants.
    pub(crate) fn separates_tenants(&self) -> bool {
        self.tenants.are_on() && self.options.zero_across_tenants
    }

    /// Updates the capacity that the tenants share.
    fn update_tenant_capacity(&self) {
        if self.tenants.are_on() {
            let registry = self.segments.read();
            let sizes = registry.list.iter().map(|mounted| mounted.info.size);
            self.tenants.set_capacity(sizes.fold(0, u64::saturating_add));
        }
    }

    /// Returns a mounted segment of the client.
    ///
    /// # Errors
    /// `ILLEGAL_CLIENT` if another client mounted it.
    pub(crate) fn own_segment(
        &self,
        client: ClientId,
        segment: SegmentId,
    ) -> Result<Option<Arc<MountedSegment<A>>>> {
        match self.segments.read().get(segment) {
            Some(mounted) if mounted.client != client => Err(Error::new(
                ErrorCode::IllegalClient,
                format!("segment belongs to another client. segment={segment}"),
            )),
            mounted => Ok(mounted.cloned()),
        }
    }

    /// Drops every replica in the segments that were retired before the call. The sweep examines
    /// every object, so it is slow. It does not block mounts, and there is one at a time: a caller
    /// that waited for another one mostly finds nothing left.
    pub(crate) fn sweep_beside(&self) {
        let _one = self.sweeping.lock();
        let unswept = self.retired.lock().unswept();
        if unswept.is_empty() {
            return;
        }
        self.drop_retired();
        self.retired.lock().mark_swept(&unswept);
    }

    /// Drops the replicas in retired segments. A replica that was placed before its segment was
    /// retired is in its shard before the visit: puts hold the lock of the shard throughout.
    fn drop_retired(&self) {
        let now = self.clock.now();
        self.directory.visit(|shard, slot| {
            shard.prune(slot, now, self.options.put_release);
            shard.remove_if_empty(slot, MissCause::OwnerLost);
        });
    }

    /// Drops the replicas on disks that are gone.
    pub(crate) fn sweep_disks(&self) {
        self.directory.visit(|shard, slot| {
            shard.prune_disks(slot);
            shard.remove_if_empty(slot, MissCause::OwnerLost);
        });
    }
}

fn same_mount<A: SegmentAllocator>(
    mounted: &MountedSegment<A>,
    client: ClientId,
    segment: &Segment,
    mount: Mount,
) -> Result<()> {
    let refuse = |code, why: &str| {
        Err(Error::new(code, format!("cannot mount segment: {why}. segment={}", segment.id)))
    };
    if mounted.client != client {
        return refuse(ErrorCode::IllegalClient, "another client has mounted it");
    }
    if mounted.info != *segment {
        return refuse(ErrorCode::SegmentAlreadyExists, "it is mounted with another address, size or name");
    }
    // A client that mounts everything again must not fail for a segment that it is about to
    // replace.
    if mounted.unmount_at().is_some() && mount != Mount::Again {
        return refuse(ErrorCode::UnavailableInCurrentStatus, "it is being unmounted");
    }
    Ok(())
}

/// Upper bound of addresses. x86 and ARM give a process 57 bits at most.
const ADDRESSES: u64 = 1 << 57;

/// Checks the description of a segment.
pub(crate) fn check_segment(segment: &Segment) -> Result<()> {
    if segment.base == 0 || segment.size == 0 {
        return Err(Error::invalid(format!(
            "cannot mount segment: base and size must not be 0. segment={}",
            segment.id
        )));
    }
    if segment.base.checked_add(segment.size).is_none_or(|end| end > ADDRESSES) {
        return Err(Error::invalid(format!(
            "cannot mount segment: it exceeds the address space. segment={} base={:#x} size={}",
            segment.id, segment.base, segment.size
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
                "cannot mount segment: its {what} is longer than {most} bytes. segment={} len={}",
                segment.id,
                text.len()
            )));
        }
    }
    segment.locality.as_ref().map_or(Ok(()), |locality| check_locality(segment, locality))
}

/// Checks the locality of a segment, which every description of a replica repeats.
fn check_locality(segment: &Segment, locality: &Locality) -> Result<()> {
    let len: usize = locality.hca_names.iter().map(|name| 4 + name.len()).sum();
    if LOCALITY_HEAD + len <= MAX_LOCALITY {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "cannot mount segment: its locality is too long. segment={} names={} len={len} maximum={}",
        segment.id,
        locality.hca_names.len(),
        MAX_LOCALITY - LOCALITY_HEAD
    )))
}

/// Maximum length of a locality in a response, in bytes.
pub(crate) const MAX_LOCALITY: usize = 1024;

/// Length of a locality without the names of the devices, in bytes.
const LOCALITY_HEAD: usize = 8;

/// Maximum length of an endpoint or a protocol, in bytes: the longest that every response can
/// contain (`pack::encode_answers`).
pub(crate) const MAX_WORD: usize = 255;

/// Maximum length of a name or a host, in bytes.
const MAX_NAME: usize = 4096;

/// Returns the error for a segment that is not mounted.
pub(crate) fn unknown(segment: &dyn std::fmt::Display) -> Error {
    Error::new(ErrorCode::SegmentNotFound, format!("segment is not mounted. segment={segment}"))
}
