//! Memory that the owners of segments zero before a writer may leave bytes of other tenants there.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::ClientId;
use mooncake_protocol::wire::{ZeroExtent, ZeroWork};

use super::master::Master;

/// Number of bytes that one response requests, unless one extent has more.
const MAX_REQUESTED: u64 = 64 << 20;

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Returns extents in the segments of a client, which the client zeroes. Nothing is placed
    /// there until a later call reports the number of the extent in `done`. Each number stands for
    /// one request. Requests without a report are repeated.
    pub fn zero_work(&self, client: ClientId, done: &[u64]) -> ZeroWork {
        let space = self.space();
        if !space.separates_tenants() {
            return ZeroWork { needed: false, extents: Vec::new() };
        }
        let registry = space.segments.read();
        let mut work = ZeroWork { needed: true, extents: Vec::new() };
        let mut has_freed = false;
        for mounted in registry.list.iter().filter(|mounted| mounted.client == client) {
            for number in done {
                has_freed |= mounted.acknowledge_zeroed(*number);
            }
            let requested = mounted.request_zeroes(MAX_REQUESTED, || space.new_replica().0);
            let segment = mounted.info.id;
            work.extents.extend(requested.into_iter().map(|(number, extent)| ZeroExtent {
                number,
                segment,
                offset: extent.offset,
                len: extent.len,
            }));
        }
        if has_freed {
            space.eviction.end_backoff();
        }
        work
    }
}
