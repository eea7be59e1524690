//! Memory offered to the cluster.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::ids::{SegmentId, Uuid};
use mooncake_core::memory::{HostMemory, HostMemoryOptions, MemorySource};
use mooncake_core::replica::Segment;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::{Region, Transport};

use crate::config;
use crate::deadline::Deadline;
use crate::mounted::{Mounted, drop_region};
use crate::state::{Client, Inner};
use mooncake_protocol::wire::DrainProgress;

impl<T: Transport> Client<T> {
    /// Offers `bytes` of new host memory to the cluster, besides what it offers already.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for fewer than 1024 bytes, `BUFFER_OVERFLOW` when there is not that much
    /// memory, and whatever keeps the master from taking it.
    pub async fn mount(&self, bytes: u64) -> Result<SegmentId> {
        let len = usize::try_from(bytes).ok().filter(|_| bytes >= config::MIN_BUFFER).ok_or_else(|| {
            Error::invalid(format!("a segment of {bytes} bytes: it needs {} at least", config::MIN_BUFFER))
        })?;
        let held = self.inner.segments.lock().iter().map(|mounted| mounted.segment.size).sum();
        self.inner.config.check_memory(held, bytes)?;
        let memory = Arc::new(self.inner.new_memory(len)?);
        self.mount_any(memory.clone(), Some(memory)).await
    }

    /// Offers memory of the caller's to the cluster.
    ///
    /// # Errors
    /// Whatever keeps the wire or the master from taking it; the memory is then free again.
    pub async fn mount_memory(&self, memory: Arc<dyn MemorySource>) -> Result<SegmentId> {
        self.mount_any(memory, None).await
    }

    async fn mount_any(
        &self,
        memory: Arc<dyn MemorySource>,
        own: Option<Arc<HostMemory>>,
    ) -> Result<SegmentId> {
        self.inner.usable()?;
        let deadline = self.inner.deadline();
        let id = self.inner.mount(memory, own, &deadline).await?;
        self.start_heartbeat();
        Ok(id)
    }

    /// Takes memory back. Objects in it are gone at once; an unknown id is fine, so the call may be
    /// repeated.
    ///
    /// # Errors
    /// The master could not be told. The segment stays as it was.
    pub async fn unmount(&self, id: SegmentId) -> Result<()> {
        let deadline = self.inner.deadline();
        self.inner.unmount(id, &deadline).await
    }

    /// Takes memory back after `grace`: until then objects in it are readable, and none are added.
    /// Returns at once; the client must live until the time is up, or objects in it are gone with
    /// the client.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND` for what is not offered, and whatever keeps the master from being told;
    /// the segment then stays as it was.
    pub async fn unmount_after(&self, id: SegmentId, grace: Duration) -> Result<()> {
        self.inner.unmount_after(id, grace).await
    }

    /// Has the master move the only replicas of objects in this client's segments to other members,
    /// as far as they have room. Nothing is placed in the segments from the first call on. Each
    /// call returns how far the move is.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` or a mismatch of versions if the master is one of Mooncake C++;
    /// `SEGMENT_NOT_FOUND` without a segment.
    pub async fn drain(&self) -> Result<DrainProgress> {
        let asked = self.inner.master.drain_client(self.inner.id);
        self.inner.deadline().bound("draining", asked).await
    }

    /// The segments that are offered now.
    pub fn segments(&self) -> Vec<SegmentId> {
        self.inner.segments.lock().iter().filter(|m| !m.leaving).map(|m| m.segment.id).collect()
    }
}

impl<T: Transport> Inner<T> {
    /// Memory to offer; shared where the wires have a use for that.
    pub(crate) fn new_memory(&self, len: usize) -> Result<HostMemory> {
        let options = &self.config.memory;
        if options.shared.is_none() && self.engine.transport().capabilities().shared_memory {
            let shared = HostMemoryOptions { shared: Some("mooncake-segment".into()), ..options.clone() };
            match HostMemory::with(len, &shared) {
                Ok(memory) => return Ok(memory),
                Err(error) => tracing::debug!(%error, "no shared memory for a segment; private memory it is"),
            }
        }
        HostMemory::with(len, options)
    }

    pub(crate) async fn mount(
        self: &Arc<Self>,
        memory: Arc<dyn MemorySource>,
        own: Option<Arc<HostMemory>>,
        deadline: &Deadline,
    ) -> Result<SegmentId> {
        let region = deadline.bound("registering", self.engine.register(memory)).await?;
        let _changing = self.changing(deadline).await?;
        self.usable()?;
        let more = !self.segments.lock().is_empty();
        if more && deadline.bound("ping", self.master.ping(self.id)).await?.need_remount {
            // By this mount a master that forgot us would know us again, and never ask for the
            // other segments.
            self.remount_listed(deadline).await?;
        }
        let segment = self.new_segment(&region);
        if !more {
            self.begin_inventory(deadline).await?;
        }
        let mounted =
            Mounted { segment, region, own, new: true, confirmed: false, kept: false, leaving: false };
        self.offer_new(mounted, deadline).await
    }

    /// What the master is told of memory.
    pub(crate) fn new_segment(&self, region: &Region<T>) -> Segment {
        let id = {
            let mut rng = self.rng.lock();
            SegmentId(Uuid::new(rng.next_u64(), rng.next_u64()))
        };
        Segment {
            id,
            name: self.name.clone(),
            base: region.addr(),
            size: region.len() as u64,
            endpoint: self.endpoint.clone(),
            protocol: self.protocol.clone(),
            host_id: config::host_id(&self.name).to_owned(),
        }
    }

    /// Tells the master of it, or takes it back.
    pub(crate) async fn offer_new(
        self: &Arc<Self>,
        mounted: Mounted<T>,
        deadline: &Deadline,
    ) -> Result<SegmentId> {
        let (id, size) = (mounted.id(), mounted.segment.size);
        // Listed first: should the answer be lost, the heartbeat and `close` still know of it.
        self.segments.lock().push(mounted);
        match self.offer_listed(deadline).await {
            Ok(()) => Ok(id),
            Err(error) => {
                // Should it have been the answer that was lost, nobody is to be sent to memory that
                // is gone.
                let (master, client, limit) = (self.master.clone(), self.id, self.config.timeout);
                self.runtime.spawn(async move {
                    let _ = tokio::time::timeout(limit, master.unmount(client, id)).await;
                });
                drop_region(self.take(id)).await?;
                Err(error.context(format!("mount {size} bytes")))
            }
        }
    }

    /// Waits until no other change of the segments is under way.
    pub(crate) async fn changing(&self, deadline: &Deadline) -> Result<tokio::sync::MutexGuard<'_, ()>> {
        deadline.bound("waiting for another mount", async { Ok(self.mounting.lock().await) }).await
    }

    pub(crate) async fn unmount(&self, id: SegmentId, deadline: &Deadline) -> Result<()> {
        let _changing = self.changing(deadline).await?;
        self.unmount_listed(id, deadline).await
    }

    async fn unmount_after(self: &Arc<Self>, id: SegmentId, grace: Duration) -> Result<()> {
        let deadline = self.deadline();
        let _changing = self.changing(&deadline).await?;
        let known = |m: &&mut Mounted<T>| m.segment.id == id && !m.leaving;
        if self.segments.lock().iter_mut().find(known).is_none() {
            return Err(Error::new(ErrorCode::SegmentNotFound, format!("segment {id} is not mounted")));
        }
        deadline.bound("unmounting", self.master.unmount_after(self.id, id, grace)).await?;
        if let Some(mounted) = self.segments.lock().iter_mut().find(known) {
            mounted.leaving = true;
        }
        // Should the master be restarted meanwhile, it is not told of this any more.
        self.inventory.lock().await.forget(id);
        // Closing the client does not wait for this.
        let client = Arc::downgrade(self);
        self.runtime.spawn(async move {
            tokio::time::sleep(grace).await;
            let Some(client) = client.upgrade() else { return };
            // The master lets nobody in by itself; the last call is for one that was restarted
            // meanwhile.
            if let Err(error) = client.unmount(id, &client.deadline()).await {
                tracing::warn!(segment = %id, "the grace period is over, and the master cannot be told: {error}");
            }
        });
        Ok(())
    }

    pub(crate) async fn unmount_listed(&self, id: SegmentId, deadline: &Deadline) -> Result<()> {
        deadline.bound("unmounting", self.master.unmount(self.id, id)).await?;
        self.inventory.lock().await.forget(id);
        // Only now: while the master knows the segment, writers may come, and completed writes must
        // land.
        drop_region(self.take(id)).await
    }

    /// Forgets a segment and hands out its memory.
    pub(crate) fn take(&self, id: SegmentId) -> Option<Mounted<T>> {
        let mut segments = self.segments.lock();
        let at = segments.iter().position(|m| m.segment.id == id)?;
        Some(segments.remove(at))
    }
}
