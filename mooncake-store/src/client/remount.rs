//! Mounting again, after the master forgot this client: it was restarted, or we were silent for too long.
//!
//! Whoever was granted space by the master before may still write to it, and whoever was told of an object may still read it; the new master knows
//! nothing of either. So a segment that this client allocated itself comes back as other memory, at other addresses: what goes to the
//! old ones is refused by the wire, and the new master may place objects at once. Nothing is lost by that, since a master
//! that knows no object of ours will never ask for one. Memory of the caller's stays where it is; the master lets it rest.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::Result;
use mooncake_core::memory::HostMemory;
use mooncake_core::replica::Segment;
use mooncake_transport::handshake::HandshakeConfig;
use mooncake_transport::{Region, Transport};

use super::Inner;
use super::deadline::Deadline;

/// For how long nothing else may come to lie at addresses that were given up. No grant to a client is used for longer.
const HOLE: Duration = Duration::from_secs(60);

impl<T: Transport> Inner<T> {
    /// Whether the master is not known to have all that is offered.
    pub(super) fn has_unconfirmed(&self) -> bool {
        self.segments.lock().iter().any(|mounted| !mounted.confirmed)
    }

    /// Mounts everything again.
    pub(super) async fn remount(self: &Arc<Self>, forgotten: bool, deadline: &Deadline) -> Result<()> {
        let _changing = self.changing(deadline).await?;
        if forgotten { self.remount_listed(deadline).await } else { self.offer_listed(deadline).await }
    }

    pub(super) async fn remount_listed(&self, deadline: &Deadline) -> Result<()> {
        let ids: Vec<_> = self.segments.lock().iter().map(super::mount::Mounted::id).collect();
        tracing::info!(client = %self.id, segments = ids.len(), "the master does not know us: mounting again");
        for id in ids {
            let (own, bytes) = {
                let mut segments = self.segments.lock();
                let Some(mounted) = segments.iter_mut().find(|mounted| mounted.id() == id) else { continue };
                mounted.confirmed = false;
                mounted.new = false;
                (mounted.own.is_some(), mounted.region.len())
            };
            if !own {
                continue;
            }
            match self.fresh(bytes, deadline).await {
                Ok((memory, region)) => {
                    let mut segments = self.segments.lock();
                    let Some(mounted) = segments.iter_mut().find(|mounted| mounted.id() == id) else {
                        continue;
                    };
                    mounted.segment.base = region.addr();
                    mounted.new = true;
                    let region = std::mem::replace(&mut mounted.region, region);
                    let memory = mounted.own.replace(memory);
                    drop(segments);
                    self.give_up(region, memory);
                }
                // Then it is mounted as it is, and rests.
                Err(error) => tracing::warn!(segment = %id, "no other memory for the segment: {error}"),
            }
        }
        self.offer_listed(deadline).await?;
        // The master may have removed our directory entry when it took us for dead.
        deadline.bound("publishing again", self.republish()).await
    }

    async fn fresh(&self, bytes: usize, deadline: &Deadline) -> Result<(Arc<HostMemory>, Region<T>)> {
        let memory = Arc::new(self.new_memory(bytes)?);
        let region = deadline.bound("registering", self.engine.register(memory.clone())).await?;
        Ok((memory, region))
    }

    /// Deregisters memory that nobody may use any more, gives its pages back, and keeps its addresses for a while.
    fn give_up(&self, region: Region<T>, memory: Option<Arc<HostMemory>>) {
        self.runtime.spawn(async move {
            // Deregistering waits for transfers of peers that are under way.
            let hole = tokio::task::spawn_blocking(move || {
                drop(region);
                // Somebody in this process may still hold a slice of it; then it goes when that does.
                memory.map(|memory| Arc::try_unwrap(memory).map(HostMemory::into_hole))
            });
            let hole = hole.await;
            tokio::time::sleep(HOLE).await;
            drop(hole);
        });
    }

    /// Tells the master of all segments; new ones are mounted, not mounted again.
    pub(super) async fn offer_listed(&self, deadline: &Deadline) -> Result<()> {
        let (new, all): (Vec<Segment>, Vec<Segment>) = {
            let segments = self.segments.lock();
            let new = segments.iter().filter(|mounted| mounted.new && !mounted.confirmed);
            (
                new.map(|mounted| mounted.segment.clone()).collect(),
                segments.iter().map(|mounted| mounted.segment.clone()).collect(),
            )
        };
        for segment in new {
            deadline.bound("mounting", self.master.mount(self.id, &segment)).await?;
        }
        // A master of the existing system counts a client as known only after this call.
        deadline.bound("mounting again", self.master.remount(self.id, &all)).await?;
        self.segments.lock().iter_mut().for_each(|mounted| mounted.confirmed = true);
        Ok(())
    }

    async fn republish(&self) -> Result<()> {
        let name = self.engine.name();
        if let Some(at) = self.engine.handshake_addr()
            && self.directory.locate(name).await?.as_ref() != Some(at)
        {
            self.directory.announce(name, at, &HandshakeConfig::default()).await?;
        }
        self.directory.publish(&self.engine.descriptor(), false).await
    }
}
