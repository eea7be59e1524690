//! Registry of the mounted segments.

use std::collections::HashMap;
use std::sync::Arc;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::ids::{ClientId, SegmentId};
use mooncake_core::replica::SegmentStatus;

use crate::model::segment::MountedSegment;

/// Segments that are mounted.
pub(crate) struct Registry<A> {
    /// Segments in the order of their mounts, for placement.
    pub(crate) list: Vec<Arc<MountedSegment<A>>>,
    by_id: HashMap<SegmentId, Arc<MountedSegment<A>>>,
    by_name: HashMap<String, Vec<Arc<MountedSegment<A>>>>,
    /// Status that drains of an earlier master have set, for segments that are not mounted again
    /// yet.
    pub(crate) drain_states: HashMap<SegmentId, SegmentStatus>,
}

impl<A> Default for Registry<A> {
    fn default() -> Self {
        Self {
            list: Vec::new(),
            by_id: HashMap::new(),
            by_name: HashMap::new(),
            drain_states: HashMap::new(),
        }
    }
}

impl<A: SegmentAllocator> Registry<A> {
    pub(crate) fn get(&self, id: SegmentId) -> Option<&Arc<MountedSegment<A>>> {
        self.by_id.get(&id)
    }

    /// Returns the segments of a name, in the order of their mounts.
    pub(crate) fn with_name(&self, name: &str) -> &[Arc<MountedSegment<A>>] {
        self.by_name.get(name).map_or(&[], Vec::as_slice)
    }

    /// Returns whether a client has a segment.
    pub(crate) fn has_client(&self, client: ClientId) -> bool {
        self.list.iter().any(|mounted| mounted.client == client)
    }

    pub(crate) fn insert(&mut self, mounted: Arc<MountedSegment<A>>) {
        if let Some(status) = self.drain_states.get(&mounted.info.id) {
            mounted.set_drain(*status);
        }
        self.by_name.entry(mounted.info.name.clone()).or_default().push(mounted.clone());
        self.by_id.insert(mounted.info.id, mounted.clone());
        self.list.push(mounted);
    }

    pub(crate) fn remove(&mut self, id: SegmentId) -> Option<Arc<MountedSegment<A>>> {
        let mounted = self.by_id.remove(&id)?;
        self.list.retain(|other| !Arc::ptr_eq(other, &mounted));
        if let Some(same_name) = self.by_name.get_mut(&mounted.info.name) {
            same_name.retain(|other| !Arc::ptr_eq(other, &mounted));
            if same_name.is_empty() {
                self.by_name.remove(&mounted.info.name);
            }
        }
        Some(mounted)
    }
}
