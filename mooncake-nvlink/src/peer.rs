//! A peer: how its memory is found.

use std::fmt;
use std::sync::Arc;

use mooncake_transport::same_host::{Mapped, MappedRegion};

use crate::listed::{Listed, ListedBuffer};
use crate::shown::{Inside, Link, Remote};

/// A way to one owner. Clones share what they have opened of its memory.
#[derive(Clone)]
pub struct NvlinkPeer {
    way: Way,
}

#[derive(Clone)]
enum Way {
    /// To one that we know to live, and that waits for our copies.
    Linked(Arc<Link>),
    /// To one that is known by its descriptor alone.
    Listed(Arc<Listed>),
}

/// A region of the owner's.
pub(crate) enum Found {
    Region(Arc<MappedRegion<Remote>>),
    Buffer(Arc<ListedBuffer>),
}

impl Found {
    pub(crate) fn remote(&self) -> &Remote {
        match self {
            Found::Region(region) => region.mapping(),
            Found::Buffer(buffer) => &buffer.remote,
        }
    }

    pub(crate) fn offset_of(&self, addr: u64) -> u64 {
        match self {
            Found::Region(region) => region.offset_of(addr) as u64,
            Found::Buffer(buffer) => addr - buffer.addr,
        }
    }
}

impl NvlinkPeer {
    pub(crate) fn linked(link: Arc<Link>) -> Self {
        Self { way: Way::Linked(link) }
    }

    pub(crate) fn listed(listed: Arc<Listed>) -> Self {
        Self { way: Way::Listed(listed) }
    }

    /// What there is to be found now; nothing of an owner that is dead.
    pub(crate) fn view(&self) -> View<'_> {
        let mapped = match &self.way {
            Way::Linked(link) if link.is_alive() => Some(link.mapped()),
            _ => None,
        };
        View { peer: self, mapped }
    }

    pub(crate) fn is_gone(&self) -> bool {
        matches!(&self.way, Way::Linked(link) if !link.is_alive())
    }

    pub(crate) fn stale_link(&self) -> Option<&Arc<Link>> {
        match &self.way {
            Way::Linked(link) if link.is_stale() => Some(link),
            _ => None,
        }
    }

    /// Whether all of these bytes of the owner's are a device's memory that this wire leads to.
    pub fn leads_to(&self, addr: u64, len: u64) -> bool {
        match &self.way {
            Way::Linked(link) => link.mapped().find(addr, len).is_some(),
            Way::Listed(listed) => listed.find(addr, len).is_some(),
        }
    }
}

/// A peer's memory as one submission sees it.
pub(crate) struct View<'a> {
    peer: &'a NvlinkPeer,
    mapped: Option<Arc<Mapped<Remote>>>,
}

impl View<'_> {
    /// The region that holds all of a range which is not empty.
    pub(crate) fn find(&self, addr: u64, len: u64) -> Option<Found> {
        match &self.peer.way {
            Way::Linked(_) => self.mapped.as_ref()?.find(addr, len).cloned().map(Found::Region),
            Way::Listed(listed) => listed.find(addr, len).map(Found::Buffer),
        }
    }

    /// Counts a copy in. `None` when the region has been closed meanwhile; who is known by a descriptor alone counts nothing.
    pub(crate) fn enter(&self, found: &Found) -> Option<Option<Inside>> {
        match (&self.peer.way, found) {
            (Way::Linked(link), Found::Region(region)) => Link::enter(link.clone(), region).map(Some),
            _ => Some(None),
        }
    }
}

impl fmt::Debug for NvlinkPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.way {
            Way::Linked(link) => write!(f, "NvlinkPeer(alive: {})", link.is_alive()),
            Way::Listed(listed) => write!(f, "NvlinkPeer({listed:?})"),
        }
    }
}
