//! Mounting, retiring and sweeping segments.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::{ClientId, SegmentId};
use mooncake_core::replica::Segment;
use mooncake_core::{Error, ErrorCode, Result};

use super::retired::RetiredSegments;
use super::state::Space;
use crate::model::misses::MissCause;
use crate::model::segment::MountedSegment;

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
    /// Ends the doubts about the segments of a client that has sent a heartbeat.
    pub(crate) fn clear_doubts(&self, client: ClientId) {
        let doubts = self.doubts.load(Relaxed);
        if doubts == 0 {
            return;
        }
        let registry = self.segments.read();
        registry.list.iter().filter(|s| s.client == client).for_each(|s| s.set_doubted(false));
        if registry.list.iter().all(|s| !s.is_doubted()) {
            // A new doubt may have been reported meanwhile; then the number stays.
            let _ = self.doubts.compare_exchange(doubts, 0, Relaxed, Relaxed);
        }
    }

    /// Mounts a segment. Quarantined extents of earlier mounts of the memory stay in quarantine.
    ///
    /// # Errors
    /// `SEGMENT_ALREADY_EXISTS`; `ILLEGAL_CLIENT`; `UNAVAILABLE_IN_CURRENT_STATUS`.
    pub(crate) fn mount_one(
        &self,
        retired: &mut RetiredSegments<A>,
        client: ClientId,
        segment: &Segment,
        mount: Mount,
    ) -> Result<()> {
        if let Some(mounted) = self.segments.read().get(segment.id) {
            return same_mount(mounted, client, segment, mount);
        }
        self.displace(retired, client, segment)?;
        if retired.has_unswept_replicas_in(segment) {
            self.sweep(retired);
        }
        let now = self.clock.now();
        let known = retired.contains(segment.id);
        let quarantined = retired.take_quarantined(segment);
        let opens = match mount {
            Mount::Again if !known => self.started.after(self.rest_after_start()),
            _ => now,
        };
        let mut mounted = MountedSegment::new(segment.clone(), client, opens, &self.allocator, &quarantined);
        mounted.ledger = self.ledgers.lock().of(client);
        if mount == Mount::WithObjects {
            mounted.close();
        }
        self.timers.schedule(mounted.next_release());
        self.segments.write().insert(Arc::new(mounted));
        self.update_tenant_capacity();
        self.eviction.end_backoff();
        tracing::info!(segment = %segment.id, name = segment.name, size = segment.size, %client, "segment mounted");
        Ok(())
    }

    /// Retires the segments of other clients that overlap `segment`. The same memory cannot belong
    /// to two clients, so the client that mounts it has replaced the other one. (A process
    /// restarted on the same address before its predecessor expired.)
    fn displace(&self, retired: &mut RetiredSegments<A>, client: ClientId, segment: &Segment) -> Result<()> {
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

    /// Drops every replica in a retired segment. The sweep examines every object, so it is slow.
    /// Only `tick` sweeps, and a mount of memory that belongs to a retired segment.
    pub(crate) fn sweep(&self, retired: &mut RetiredSegments<A>) {
        self.drop_retired();
        retired.mark_all_swept();
    }

    /// Sweeps like [`sweep`](Self::sweep) without blocking mounts. The segments that were retired
    /// before the call are swept afterwards.
    pub(crate) fn sweep_beside(&self) {
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
            shard[slot].retain_disk_replicas(|_| true);
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
    Ok(())
}

/// Maximum length of an endpoint or a protocol, in bytes: the longest that every response can
/// contain (`pack::encode_answers`).
pub(crate) const MAX_WORD: usize = 255;

/// Maximum length of a name or a host, in bytes.
const MAX_NAME: usize = 4096;

/// Returns the error for a segment that is not mounted.
pub(crate) fn unknown(segment: &dyn std::fmt::Display) -> Error {
    Error::new(ErrorCode::SegmentNotFound, format!("segment is not mounted. segment={segment}"))
}
