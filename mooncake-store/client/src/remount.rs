//! Mounting again, after the master forgot this client: it was restarted, or we were silent for too
//! long.
//!
//! Whoever was granted space by the master before may still write to it, and whoever was told of an
//! object may still read it; the new master knows nothing of either. So a segment that this client
//! allocated itself comes back at other addresses: what goes to the old ones is refused by the
//! wire, and the new master may place objects at once. If another master asks, what lies in the
//! segment moves along and is announced (`inventory`); to the same master, what it lists of it.
//! Memory of the caller's stays where it is; the master lets it rest.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::ids::SegmentId;
use mooncake_core::memory::AddressHole;
use mooncake_core::replica::Segment;
use mooncake_core::{ErrorKind, Result};
use mooncake_transport::Transport;
use mooncake_transport::handshake::HandshakeConfig;

use crate::deadline::Deadline;
use crate::mounted::{Mounted, Moving};
use crate::state::Inner;

/// For how long nothing else may come to lie at addresses that were given up, at least. No grant to
/// a client is used for longer; a lease may be.
const HOLE: Duration = Duration::from_secs(60);

impl<T: Transport> Inner<T> {
    /// Whether the master is not known to have all that is offered.
    pub(crate) fn has_unconfirmed(&self) -> bool {
        !self.moving.lock().is_empty() || self.segments.lock().iter().any(|mounted| !mounted.confirmed)
    }

    /// Mounts everything again.
    pub(crate) async fn remount(self: &Arc<Self>, forgotten: bool, deadline: &Deadline) -> Result<()> {
        let _changing = self.changing(deadline).await?;
        if forgotten { self.remount_listed(deadline).await } else { self.offer_listed(deadline).await }
    }

    /// Takes everything from a master that keeps no list of its objects, and mounts it again with
    /// those of before.
    pub(crate) async fn mount_anew(self: &Arc<Self>, deadline: &Deadline) -> Result<()> {
        let _changing = self.changing(deadline).await?;
        let ids: Vec<_> = {
            let mut segments = self.segments.lock();
            let staying = segments.iter_mut().filter(|mounted| !mounted.leaving);
            // Until they are mounted, should this fail or be dropped.
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
        self.remount_listed(deadline).await
    }

    pub(crate) async fn remount_listed(self: &Arc<Self>, deadline: &Deadline) -> Result<()> {
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
                mounted.kept = false;
                mounted.own.is_some()
            };
            if own {
                self.relocate(id).await?;
                self.settle(deadline).await?;
            } else {
                self.inventory.lock().await.forget(id);
            }
        }
        self.offer_listed(deadline).await?;
        // The master may have removed our directory entry when it took us for dead.
        deadline.bound("publishing again", self.republish()).await
    }

    /// Takes a segment from its addresses, with its objects if there are any to be announced.
    async fn relocate(&self, id: SegmentId) -> Result<()> {
        let keeps = self.inventory.lock().await.keeps(id);
        let at = self.segments.lock().iter().position(|mounted| mounted.id() == id).unwrap_or(0);
        let Some(Mounted { segment, region, own: Some(memory), .. }) = self.take(id) else { return Ok(()) };
        let (bytes, lasting) = (region.len(), memory.is_lasting());
        let closed = tokio::task::spawn_blocking(move || {
            // Deregistering waits for transfers of peers that are under way.
            drop(region);
            // Somebody in this process may still hold a slice of it.
            let memory = Arc::try_unwrap(memory).ok()?;
            Some(if keeps || memory.is_lasting() { memory.relocate() } else { Err(memory) })
        });
        match closed.await {
            Ok(Some(Ok((memory, hole)))) => {
                self.keep_hole(hole);
                let (segment, memory) = (segment, Arc::new(memory));
                self.moving.lock().push(Moving { segment, at, memory, kept: true });
                return Ok(());
            }
            Ok(Some(Err(memory))) => match memory.into_hole() {
                Ok(hole) => self.keep_hole(hole),
                Err(error) => tracing::warn!(segment = %id, "old addresses may be used again: {error}"),
            },
            // It goes when the slices do.
            Ok(None) | Err(_) => {}
        }
        {
            let mut inventory = self.inventory.lock().await;
            if lasting {
                inventory.end_journal();
            }
            inventory.forget(id);
        }
        let memory = self.new_memory(bytes).map_err(|error| {
            tracing::error!(segment = %id, bytes, "there is no memory for it any more: {error}");
            error.context(format!("segment {id} of {bytes} bytes"))
        })?;
        self.moving.lock().push(Moving { segment, at, memory: Arc::new(memory), kept: false });
        Ok(())
    }

    /// Nothing else may come to lie there for a while.
    pub(crate) fn keep_hole(&self, hole: AddressHole) {
        let span = HOLE.max(self.promises.lock().longest(self.config.clock.now()));
        self.runtime.spawn(async move {
            tokio::time::sleep(span).await;
            drop(hole);
        });
    }

    /// Registers what has been taken from its addresses.
    async fn settle(&self, deadline: &Deadline) -> Result<()> {
        loop {
            // It stays listed until it is registered, should this future be dropped.
            let Some(Moving { mut segment, at, memory, kept }) = self.moving.lock().last().cloned() else {
                return Ok(());
            };
            let region = deadline.bound("registering", self.engine.register(memory.clone())).await?;
            segment.base = region.addr();
            if memory.is_lasting() {
                self.inventory.lock().await.moved(segment.base);
            }
            let mounted = Mounted {
                segment,
                region,
                own: Some(memory),
                new: true,
                confirmed: false,
                kept,
                leaving: false,
            };
            let mut segments = self.segments.lock();
            let at = at.min(segments.len());
            segments.insert(at, mounted);
            drop(segments);
            self.moving.lock().pop();
        }
    }

    /// Tells the master of all segments; new ones are mounted, not mounted again.
    pub(crate) async fn offer_listed(self: &Arc<Self>, deadline: &Deadline) -> Result<()> {
        self.settle(deadline).await?;
        let (new, all): (Vec<(Segment, bool)>, Vec<Segment>) = {
            let segments = self.segments.lock();
            let new = segments.iter().filter(|mounted| mounted.new && !mounted.confirmed);
            (
                new.map(|mounted| (mounted.segment.clone(), mounted.kept)).collect(),
                segments.iter().filter(|m| !m.leaving).map(|mounted| mounted.segment.clone()).collect(),
            )
        };
        for (segment, kept) in &new {
            if *kept {
                self.offer_kept(segment, deadline).await?;
            } else {
                deadline.bound("mounting", self.master.mount(self.id, segment)).await?;
            }
        }
        // A master of the existing system counts a client as known only after this call.
        deadline.bound("mounting again", self.master.remount(self.id, &all)).await?;
        if !all.is_empty() {
            // The master has given up what earlier processes had there, so its answers are about
            // this one.
            deadline.bound("publishing the mount", self.engine.mounted()).await?;
        }
        let kept: Vec<_> = {
            let mut segments = self.segments.lock();
            segments.iter_mut().for_each(|mounted| mounted.confirmed = true);
            let kept = |mounted: &mut Mounted<T>| std::mem::take(&mut mounted.kept).then(|| mounted.id());
            segments.iter_mut().filter_map(kept).collect()
        };
        if !kept.is_empty() {
            self.announce_kept(kept);
        }
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
