//! Remount after the master has forgotten this client, because the master was restarted or the
//! client was silent for too long.
//!
//! A client with a grant of the previous master may still write, and a client with a lease may
//! still read. The new master knows of neither. A segment that this client allocated therefore
//! moves to other addresses. The transport refuses access to the old addresses, and the new master
//! may place objects at once. If the master is a new one, the objects in the segment move along and
//! are announced (`inventory`). If it is the same master, the objects are those that it lists.
//! Memory of the caller stays at its addresses, and a new master places no objects there until
//! earlier promises have expired.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::ids::SegmentId;
use mooncake_core::memory::AddressHole;
use mooncake_core::replica::Segment;
use mooncake_core::{Error, ErrorKind, Result};
use mooncake_transport::Transport;

use crate::deadline::Deadline;
use crate::mounted::{Changing, Mounted, Moving};
use crate::state::Inner;

/// Minimum time for which peers may use the addresses of a segment that has left them. No grant
/// lasts longer, but a lease may.
const MIN_ADDRESS_USE: Duration = Duration::from_secs(60);

impl<T: Transport> Inner<T> {
    /// Returns whether the master may lack a segment of this client.
    pub(crate) fn has_unconfirmed(&self) -> bool {
        !self.moving.lock().is_empty() || self.segments.lock().iter().any(|mounted| !mounted.confirmed)
    }

    /// Mounts all segments again.
    pub(crate) async fn remount(self: &Arc<Self>, forgotten: bool, deadline: &Deadline) -> Result<()> {
        let changing = self.changing(deadline).await?;
        if forgotten {
            self.remount_listed(&changing, deadline).await
        } else {
            self.offer_listed(deadline).await
        }
    }

    /// Unmounts all segments at a master that has no list of their objects, and mounts them again
    /// with the retained objects.
    pub(crate) async fn unmount_and_remount(self: &Arc<Self>, deadline: &Deadline) -> Result<()> {
        let changing = self.changing(deadline).await?;
        let ids: Vec<_> = {
            let mut segments = self.segments.lock();
            let staying = segments.iter_mut().filter(|mounted| !mounted.leaving);
            // The segments stay unconfirmed until they are mounted, even if this call fails or is
            // dropped.
            staying
                .map(|mounted| {
                    mounted.confirmed = false;
                    mounted.id()
                })
                .collect()
        };
        for id in ids {
            match deadline.bound("unmounting", self.master.unmount(self.id, id)).await {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        self.remount_listed(&changing, deadline).await
    }

    pub(crate) async fn remount_listed(
        self: &Arc<Self>,
        changing: &Changing,
        deadline: &Deadline,
    ) -> Result<()> {
        self.stop_announcing().await;
        self.begin_inventory(deadline).await?;
        let ids: Vec<_> =
            self.segments.lock().iter().filter(|m| !m.leaving).map(crate::mounted::Mounted::id).collect();
        tracing::info!(client = %self.id, segments = ids.len(), "the master does not know us: mounting again");
        for id in ids {
            let own = {
                let mut segments = self.segments.lock();
                let Some(mounted) = segments.iter_mut().find(|mounted| mounted.id() == id) else { continue };
                mounted.confirmed = false;
                mounted.new = false;
                mounted.has_retained = false;
                mounted.own.is_some()
            };
            if own {
                // The segment is in no list until it has moved. A dropped call does not stop this.
                let (client, changing) = (self.clone(), changing.clone());
                let moved = self.runtime.spawn(async move {
                    let _changing = changing;
                    client.relocate(id).await
                });
                moved.await.map_err(|error| Error::internal(format!("cannot move segment: {error}")))??;
                self.register_moved(deadline).await?;
            } else {
                self.inventory.lock().await.forget(id);
            }
        }
        self.offer_listed(deadline).await?;
        // The master may have removed the directory entry of this client when the client expired.
        deadline.bound("publishing again", self.republish()).await
    }

    /// Moves a segment away from its addresses, with its objects if any are to be announced.
    async fn relocate(&self, id: SegmentId) -> Result<()> {
        let has_objects = self.inventory.lock().await.has_retained(id);
        let at = self.segments.lock().iter().position(|mounted| mounted.id() == id).unwrap_or(0);
        let Some(Mounted { segment, region, own: Some(memory), .. }) = self.take(id) else { return Ok(()) };
        let (bytes, lasting) = (region.len(), memory.is_lasting());
        let closed = tokio::task::spawn_blocking(move || {
            // Deregistration waits for transfers of other nodes that are in progress.
            drop(region);
            // Another part of this process may still hold a slice of the memory.
            let memory = Arc::try_unwrap(memory).ok()?;
            Some(if has_objects || memory.is_lasting() { memory.relocate() } else { Err(memory) })
        });
        match closed.await {
            Ok(Some(Ok((memory, hole)))) => {
                self.reserve_hole(hole);
                let (segment, memory) = (segment, Arc::new(memory));
                self.moving.lock().push(Moving { segment, at, memory, has_retained: true });
                return Ok(());
            }
            Ok(Some(Err(memory))) => match memory.into_hole() {
                Ok(hole) => self.reserve_hole(hole),
                Err(error) => tracing::warn!(segment = %id, "old addresses may be used again: {error}"),
            },
            // The memory is freed together with the last slice.
            Ok(None) | Err(_) => {}
        }
        {
            let mut inventory = self.inventory.lock().await;
            if lasting {
                inventory.end_journal();
            }
            inventory.forget(id);
        }
        let memory = self.new_memory(bytes).await.map_err(|error| {
            tracing::error!(segment = %id, bytes, "there is no memory for it any more: {error}");
            error.context(format!("segment {id} of {bytes} bytes"))
        })?;
        self.moving.lock().push(Moving { segment, at, memory: Arc::new(memory), has_retained: false });
        Ok(())
    }

    /// Returns the time for which peers may use the addresses of a segment that leaves them now.
    pub(crate) fn address_use(&self) -> Duration {
        MIN_ADDRESS_USE.max(self.promises.lock().longest(self.config.clock.now()))
    }

    /// Reserves the addresses for a while, so that no other memory is mapped there.
    pub(crate) fn reserve_hole(&self, hole: AddressHole) {
        let span = self.address_use();
        self.runtime.spawn(async move {
            tokio::time::sleep(span).await;
            drop(hole);
        });
    }

    /// Registers the segments that were moved away from their addresses.
    async fn register_moved(&self, deadline: &Deadline) -> Result<()> {
        loop {
            // The segment stays listed until it is registered, even if this future is dropped.
            let Some(Moving { mut segment, at, memory, has_retained }) = self.moving.lock().last().cloned()
            else {
                return Ok(());
            };
            let region = deadline.bound("registering", self.engine.register(memory.clone())).await?;
            segment.base = region.addr();
            if memory.is_lasting() {
                self.inventory.lock().await.record_move(segment.base);
            }
            let mounted = Mounted { has_retained, ..Mounted::new(segment, region, Some(memory)) };
            let mut segments = self.segments.lock();
            let at = at.min(segments.len());
            segments.insert(at, mounted);
            drop(segments);
            self.moving.lock().pop();
        }
    }

    /// Sends all segments to the master. New segments are mounted before that.
    pub(crate) async fn offer_listed(self: &Arc<Self>, deadline: &Deadline) -> Result<()> {
        self.register_moved(deadline).await?;
        let (new, all): (Vec<(Segment, bool)>, Vec<Segment>) = {
            let segments = self.segments.lock();
            let new = segments.iter().filter(|mounted| mounted.new && !mounted.confirmed);
            (
                new.map(|mounted| (mounted.segment.clone(), mounted.has_retained)).collect(),
                segments.iter().filter(|m| !m.leaving).map(|mounted| mounted.segment.clone()).collect(),
            )
        };
        for (segment, has_retained) in &new {
            if *has_retained {
                self.mount_with_reserved_space(segment, deadline).await?;
            } else {
                deadline.bound("mounting", self.master.mount(self.id, segment)).await?;
            }
        }
        // A master of Mooncake C++ counts a client as known only after this RPC.
        deadline.bound("mounting again", self.master.remount(self.id, &all)).await?;
        if !all.is_empty() {
            // The master has discarded the segments of earlier processes, so its responses refer to
            // this process.
            deadline.bound("publishing the mount", self.engine.mounted()).await?;
        }
        let with_retained: Vec<_> = {
            let mut segments = self.segments.lock();
            segments.iter_mut().for_each(|mounted| mounted.confirmed = true);
            let take_id =
                |mounted: &mut Mounted<T>| std::mem::take(&mut mounted.has_retained).then(|| mounted.id());
            segments.iter_mut().filter_map(take_id).collect()
        };
        if !with_retained.is_empty() {
            self.announce_retained(with_retained);
        }
        Ok(())
    }

    async fn republish(&self) -> Result<()> {
        self.engine.publish_again().await
    }
}
