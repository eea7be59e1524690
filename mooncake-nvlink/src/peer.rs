//! Peer, and the lookup of its memory.

use std::fmt;
use std::sync::Arc;

use mooncake_ipc::{Mapped, MappedRegion};

use crate::codec::{Inside, Link, Remote};
use crate::listed::{Listed, ListedBuffer};

/// Connection to one owner. Clones share the opened memory.
#[derive(Clone)]
pub struct NvlinkPeer {
    way: Route,
}

#[derive(Clone)]
enum Route {
    /// Connection to a live owner, which waits for the copies of this node.
    Linked(Arc<Link>),
    /// Memory known only by the descriptor.
    Listed(Arc<Listed>),
}

/// Region of the owner.
pub(crate) enum FoundRegion {
    Region(Arc<MappedRegion<Remote>>),
    Buffer(Arc<ListedBuffer>),
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
    pub(crate) fn linked(link: Arc<Link>) -> Self {
        Self { way: Route::Linked(link) }
    }

    pub(crate) fn listed(listed: Arc<Listed>) -> Self {
        Self { way: Route::Listed(listed) }
    }

    /// Returns the current memory of the peer, which is empty if the owner is dead.
    pub(crate) fn view(&self) -> View<'_> {
        let mapped = match &self.way {
            Route::Linked(link) if link.is_alive() => Some(link.mapped()),
            _ => None,
        };
        View { peer: self, mapped }
    }

    pub(crate) fn is_gone(&self) -> bool {
        matches!(&self.way, Route::Linked(link) if !link.is_alive())
    }

    pub(crate) fn stale_link(&self) -> Option<&Arc<Link>> {
        match &self.way {
            Route::Linked(link) if link.is_stale() => Some(link),
            _ => None,
        }
    }

    /// Returns whether a range of the owner is device memory that this transport can reach.
    pub fn leads_to(&self, addr: u64, len: u64) -> bool {
        match &self.way {
            Route::Linked(link) => link.mapped().find(addr, len).is_some(),
            Route::Listed(listed) => listed.find(addr, len).is_some(),
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
        match &self.peer.way {
            Route::Linked(_) => self.mapped.as_ref()?.find(addr, len).cloned().map(FoundRegion::Region),
            Route::Listed(listed) => listed.find(addr, len).map(FoundRegion::Buffer),
        }
    }

    /// Counts a copy in. Returns `None` when the region has been closed meanwhile. A peer known
    /// only by its descriptor counts nothing.
    pub(crate) fn enter(&self, found: &FoundRegion) -> Option<Option<Inside>> {
        match (&self.peer.way, found) {
            (Route::Linked(link), FoundRegion::Region(region)) => Link::enter(link.clone(), region).map(Some),
            _ => Some(None),
        }
    }
}

impl fmt::Debug for NvlinkPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.way {
            Route::Linked(link) => write!(f, "NvlinkPeer(alive: {})", link.is_alive()),
            Route::Listed(listed) => write!(f, "NvlinkPeer({listed:?})"),
        }
    }
}
