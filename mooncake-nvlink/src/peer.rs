//! Peer, and the lookup of its memory.

use std::fmt;
use std::sync::Arc;

use mooncake_ipc::{Mapped, MappedRegion};

use crate::codec::{CopyGuard, Link, Remote};
use crate::descriptor_only::{DescriptorBuffer, DescriptorMemory};

/// Connection to one owner. Clones share the opened memory.
#[derive(Clone)]
pub struct NvlinkPeer {
    route: Route,
}

#[derive(Clone)]
enum Route {
    /// Connection to a live owner, which waits for the copies of this node.
    Linked(Arc<Link>),
    /// Memory known only by the descriptor.
    DescriptorMemory(Arc<DescriptorMemory>),
}

/// Region of the owner.
pub(crate) enum FoundRegion {
    Region(Arc<MappedRegion<Remote>>),
    Buffer(Arc<DescriptorBuffer>),
}

impl FoundRegion {
    pub(crate) fn remote(&self) -> &Remote {
        match self {
            FoundRegion::Region(region) => region.mapping(),
            FoundRegion::Buffer(buffer) => &buffer.remote,
        }
    }

    pub(crate) fn offset_of(&self, addr: u64) -> u64 {
        match self {
            FoundRegion::Region(region) => region.offset_of(addr) as u64,
            FoundRegion::Buffer(buffer) => addr - buffer.addr,
        }
    }
}

impl NvlinkPeer {
    pub(crate) fn from_link(link: Arc<Link>) -> Self {
        Self { route: Route::Linked(link) }
    }

    pub(crate) fn from_descriptor(memory: Arc<DescriptorMemory>) -> Self {
        Self { route: Route::DescriptorMemory(memory) }
    }

    /// Returns the current memory of the peer, which is empty if the owner is dead.
    pub(crate) fn view(&self) -> View<'_> {
        let mapped = match &self.route {
            Route::Linked(link) if link.is_alive() => Some(link.mapped()),
            _ => None,
        };
        View { peer: self, mapped }
    }

    /// Returns whether the owner is connected and alive.
    pub(crate) fn is_connected(&self) -> bool {
        matches!(&self.route, Route::Linked(link) if link.is_alive())
    }

    pub(crate) fn is_owner_dead(&self) -> bool {
        matches!(&self.route, Route::Linked(link) if !link.is_alive())
    }

    pub(crate) fn stale_link(&self) -> Option<&Arc<Link>> {
        match &self.route {
            Route::Linked(link) if link.is_stale() => Some(link),
            _ => None,
        }
    }

    /// Returns whether a range of the owner is device memory that this transport can reach.
    pub fn contains(&self, addr: u64, len: u64) -> bool {
        match &self.route {
            Route::Linked(link) => link.mapped().find(addr, len).is_some(),
            Route::DescriptorMemory(memory) => memory.find(addr, len).is_some(),
        }
    }
}

/// Memory of a peer as seen by one submission.
pub(crate) struct View<'a> {
    peer: &'a NvlinkPeer,
    mapped: Option<Arc<Mapped<Remote>>>,
}

impl View<'_> {
    /// Returns the region that contains a whole range, which must not be empty.
    pub(crate) fn find(&self, addr: u64, len: u64) -> Option<FoundRegion> {
        match &self.peer.route {
            Route::Linked(_) => self.mapped.as_ref()?.find(addr, len).cloned().map(FoundRegion::Region),
            Route::DescriptorMemory(memory) => memory.find(addr, len).map(FoundRegion::Buffer),
        }
    }

    /// Counts a copy in. Returns `None` when the region has been closed meanwhile. A peer known
    /// only by its descriptor counts nothing.
    pub(crate) fn enter(&self, region: &FoundRegion) -> Option<Option<CopyGuard>> {
        match (&self.peer.route, region) {
            (Route::Linked(link), FoundRegion::Region(region)) => Link::enter(link.clone(), region).map(Some),
            _ => Some(None),
        }
    }
}

impl fmt::Debug for NvlinkPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.route {
            Route::Linked(link) => write!(f, "NvlinkPeer(alive: {})", link.is_alive()),
            Route::DescriptorMemory(memory) => write!(f, "NvlinkPeer({memory:?})"),
        }
    }
}
