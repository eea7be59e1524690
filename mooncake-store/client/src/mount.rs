//! Memory that this client offers to the cluster.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::ids::{SegmentId, Uuid};
use mooncake_core::memory::{HostMemory, HostMemoryOptions, MemorySource};
use mooncake_core::replica::Segment;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::{Region, Transport};

use crate::config;
use crate::deadline::Deadline;
use crate::handles::ClientSegments;
use crate::mounted::{Changing, Mounted, drop_region};
use crate::state::Inner;
use mooncake_protocol::message::DrainClient;
use mooncake_protocol::wire::DrainProgress;

impl<T: Transport> ClientSegments<'_, T> {
    /// Offers `bytes` of new host memory to the cluster, in addition to the memory that is already
    /// offered.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` for fewer than 1024 bytes, and `BUFFER_OVERFLOW` if there is not
    /// that much memory. All other errors are those of the transport or of the master.
    pub async fn mount(self, bytes: u64) -> Result<SegmentId> {
        let len = usize::try_from(bytes).ok().filter(|_| bytes >= config::MIN_BUFFER).ok_or_else(|| {
            Error::invalid(format!("a segment of {bytes} bytes: it needs {} at least", config::MIN_BUFFER))
        })?;
        let held = self.client.inner.segments.lock().iter().map(|mounted| mounted.segment.size).sum();
        self.client.inner.config.check_memory(held, bytes)?;
        let memory = Arc::new(self.client.inner.new_memory(len).await?);
        self.mount_any(memory.clone(), Some(memory)).await
    }

    /// Offers memory of the caller to the cluster.
    ///
    /// # Errors
    /// Returns the error of the transport or of the master. The memory is then free again.
    pub async fn mount_memory(self, memory: Arc<dyn MemorySource>) -> Result<SegmentId> {
        self.mount_any(memory, None).await
    }

    async fn mount_any(
        self,
        memory: Arc<dyn MemorySource>,
        own: Option<Arc<HostMemory>>,
    ) -> Result<SegmentId> {
        self.client.inner.can_transfer()?;
        let deadline = self.client.inner.deadline();
        let id = self.client.inner.mount(memory, own, &deadline).await?;
        self.client.start_heartbeat();
        Ok(id)
    }

    /// Unmounts a segment. Its objects are gone at once. The call may be repeated, because an
    /// unknown identifier is not an error.
    ///
    /// # Errors
    /// Returns the error of the request to the master. The segment then stays mounted.
    pub async fn unmount(self, id: SegmentId) -> Result<()> {
        let deadline = self.client.inner.deadline();
        self.client.inner.unmount(id, &deadline).await
    }

    /// Unmounts a segment after `grace`. Until then its objects are readable, and no objects are
    /// added. The call returns at once. The client must live until the time is over, or the objects
    /// are gone together with the client.
    ///
    /// # Errors
    /// Returns `SEGMENT_NOT_FOUND` for a segment that is not offered, and otherwise the error of
    /// the request to the master. The segment then stays as it was.
    pub async fn unmount_after(self, id: SegmentId, grace: Duration) -> Result<()> {
        self.client.inner.unmount_after(id, grace).await
    }

    /// Asks the master to move the only replicas of objects in this client's segments to other
    /// clients, as far as those have space. From the first call on, the master places no objects in
    /// the segments. Each call returns the progress.
    ///
    /// # Errors
    /// Returns `NOT_SUPPORTED` or a version mismatch if the master is one of Mooncake C++, and
    /// `SEGMENT_NOT_FOUND` if the client has no segment.
    pub async fn drain(self) -> Result<DrainProgress> {
        let call = self.client.inner.master.call(DrainClient { client: self.client.inner.id });
        self.client.inner.deadline().bound("draining", call).await
    }

    /// Returns the segments that are offered now.
    pub fn ids(self) -> Vec<SegmentId> {
        self.client.inner.segments.lock().iter().filter(|m| !m.leaving).map(|m| m.segment.id).collect()
    }

    /// Withdraws the disk from the cluster, if there is one. Objects on it can no longer be read.
    /// The next client with the disk finds the objects again.
    pub async fn close_disk(self) {
        self.client.inner.close_disk(&self.client.inner.deadline()).await;
    }
}

impl<T: Transport> Inner<T> {
    /// Allocates memory to offer, on a blocking thread, because huge pages are allocated at once.
    /// The memory is shared if a transport can use shared memory.
    pub(crate) async fn new_memory(&self, len: usize) -> Result<HostMemory> {
        let options = self.config.memory.clone();
        let share = options.shared.is_none() && self.engine.transport().capabilities().shared_memory;
        let allocated = tokio::task::spawn_blocking(move || {
            if share {
                let shared = HostMemoryOptions { shared: Some("mooncake-segment".into()), ..options.clone() };
                match HostMemory::with(len, &shared) {
                    Ok(memory) => return Ok(memory),
                    Err(error) => {
                        tracing::warn!(%error, "no shared memory for a segment, so other processes reach it over TCP");
                    }
                }
            }
            HostMemory::with(len, &options)
        });
        let allocated = allocated.await;
        allocated
            .map_err(|error| Error::internal(format!("allocating a segment failed: {error}")))?
            .map_err(|error| error.context("segment"))
    }

    pub(crate) async fn mount(
        self: &Arc<Self>,
        memory: Arc<dyn MemorySource>,
        own: Option<Arc<HostMemory>>,
        deadline: &Deadline,
    ) -> Result<SegmentId> {
        let region = deadline.bound("registering", self.engine.register(memory)).await?;
        let changing = self.changing(deadline).await?;
        self.usable()?;
        let more = !self.segments.lock().is_empty();
        if more && deadline.bound("ping", self.master.ping(self.id)).await?.need_remount {
            // This mount would make a master that forgot this client know it again. The master
            // would then never request the other segments.
            self.remount_listed(&changing, deadline).await?;
        }
        let segment = self.new_segment(&region);
        if !more {
            self.begin_inventory(deadline).await?;
        }
        // A master that was restarted since the memory was unmounted knows nothing of its readers.
        // It places no objects in memory that is mounted again before their leases have ended. A
        // master of Mooncake C++ ignores that call of a client that it knows.
        let is_exchanged = self.promises.lock().is_exchanged;
        let new = !is_exchanged || !self.engine.is_span_retired(region.span());
        let mounted = Mounted { new, ..Mounted::new(segment, region, own) };
        self.offer_new(mounted, deadline).await
    }

    /// Returns the description of a region for the master.
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
            locality: None,
        }
    }

    /// Offers a new segment to the master. Unmounts the segment if that fails.
    pub(crate) async fn offer_new(
        self: &Arc<Self>,
        mounted: Mounted<T>,
        deadline: &Deadline,
    ) -> Result<SegmentId> {
        let (id, size) = (mounted.id(), mounted.segment.size);
        // The segment is listed first. If the response is lost, the heartbeat and `close` still
        // know it.
        self.segments.lock().push(mounted);
        match self.offer_listed(deadline).await {
            Ok(()) => Ok(id),
            Err(error) => {
                // If only the response was lost, the master must not send clients to memory that is
                // gone.
                let (master, client, limit) = (self.master.clone(), self.id, self.config.timeout);
                self.runtime.spawn(async move {
                    let _ = tokio::time::timeout(limit, master.unmount(client, id)).await;
                });
                self.release(id).await?;
                Err(error.context(format!("mount {size} bytes")))
            }
        }
    }

    /// Waits until no other change of the segments is under way.
    pub(crate) async fn changing(&self, deadline: &Deadline) -> Result<Changing> {
        let locked = async { Ok(Arc::new(self.mounting.clone().lock_owned().await)) };
        deadline.bound("waiting for another mount", locked).await
    }

    /// Returns whether this client has segments. A segment that is being moved to other addresses
    /// is in no list meanwhile.
    pub(crate) fn has_segments(&self) -> bool {
        let Ok(_unchanged) = self.mounting.try_lock() else { return true };
        !self.segments.lock().is_empty() || !self.moving.lock().is_empty()
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
        // A master that is restarted meanwhile must not receive these objects.
        self.inventory.lock().await.withdraw(id);
        // Closing the client does not wait for this task.
        let client = Arc::downgrade(self);
        self.runtime.spawn(async move {
            tokio::time::sleep(grace).await;
            let Some(client) = client.upgrade() else { return };
            // The master retires the segment by itself when the grace period ends. This call is for
            // a master that was restarted meanwhile.
            if let Err(error) = client.unmount(id, &client.deadline()).await {
                tracing::warn!(segment = %id, "the grace period is over, and the master was not notified: {error}");
            }
        });
        Ok(())
    }

    pub(crate) async fn unmount_listed(&self, id: SegmentId, deadline: &Deadline) -> Result<()> {
        deadline.bound("unmounting", self.master.unmount(self.id, id)).await?;
        self.inventory.lock().await.withdraw(id);
        // The region is dropped only now. While the master knows the segment, writers may connect,
        // and completed writes must land.
        self.release(id).await
    }

    /// Drops a segment of the list. Its addresses stay reserved for a while: the master would place
    /// no objects in other memory there, because earlier readers may still use those addresses.
    async fn release(&self, id: SegmentId) -> Result<()> {
        if let Some(hole) = drop_region(self.take(id)).await? {
            self.reserve_hole(hole);
        }
        Ok(())
    }

    /// Removes a segment from the list and returns it. Peers with a lease or an allocation may use
    /// its addresses for a while.
    pub(crate) fn take(&self, id: SegmentId) -> Option<Mounted<T>> {
        let mounted = {
            let mut segments = self.segments.lock();
            let at = segments.iter().position(|m| m.segment.id == id)?;
            segments.remove(at)
        };
        self.retire_addresses(&mounted);
        Some(mounted)
    }

    /// Records that peers may use the addresses of a segment for a while.
    pub(crate) fn retire_addresses(&self, mounted: &Mounted<T>) {
        let until = self.config.clock.now().after(self.address_use());
        self.engine.retire_span(mounted.region.span(), until);
    }
}
