//! Objects that this node registers.

use std::sync::Arc;

use futures::{StreamExt, TryStreamExt, stream};
use mooncake_core::memory::MemorySource;
use mooncake_core::{Error, Result};
use mooncake_engine::TransportSet;
use mooncake_transport::{Region, Slice};

use super::inner::{Inner, Opened};
use crate::catalogue::{Payload, Role, name_in_use, shard_sizes};
use crate::checksum;
use crate::object::{Object, ObjectMemory, locations_of};
use crate::options::RegisterOptions;
use crate::records::ChecksumRecord;

/// Number of shards whose checksums are computed at once.
const CHECKSUMS_AT_ONCE: usize = 4;

impl Inner {
    pub(super) async fn register(
        self: &Arc<Self>,
        name: &str,
        memory: Vec<Arc<dyn MemorySource>>,
        options: RegisterOptions,
    ) -> Result<()> {
        let sizes: Vec<u64> = memory.iter().map(|memory| memory.span().len as u64).collect();
        let layout = Payload::new(name, &sizes, options.max_shard_size)?;
        let mut reservation = self.reserve(name)?;
        // The creation returns the same error, but only after the checksums are computed.
        let present = async { Ok(!options.force_create && self.catalogue.read(name).await?.is_some()) };
        if self.bounded("register object", present).await? {
            return Err(name_in_use(name));
        }
        let regions = self.open_regions(&memory).await?;
        let starts: Vec<u64> = memory.iter().map(|memory| memory.span().addr()).collect();
        let checksums = checksums_of(&layout, &starts, &regions).await?;
        let locations = locations_of(&layout, &starts, &self.segment);
        let mut payload = layout.clone();
        for (shard, location) in locations.iter().enumerate() {
            payload.add(Role::Gold, shard, location);
        }
        let entered = async {
            self.records.put_checksums(name, &self.segment, &checksums).await?;
            self.catalogue.create(payload, options.force_create).await
        };
        if let Err(error) = self.bounded("register object", entered).await {
            // A write whose response was lost may have entered the object.
            let undone = self.remove_copies(name, &[Role::Gold], &self.segment);
            if let Err(error) = self.bounded("undo a registration", undone).await {
                tracing::warn!(name, %error, "registration not undone; its entries end with the lease");
            }
            return Err(error);
        }
        reservation.outcome = Some(Arc::new(Object {
            layout,
            role: Role::Gold,
            locations,
            checksums: parking_lot::Mutex::new(checksums),
            memory: ObjectMemory::Seed(regions),
        }));
        Ok(())
    }

    /// Opens memory to other nodes. A range inside a range of another object shares its region.
    async fn open_regions(&self, memory: &[Arc<dyn MemorySource>]) -> Result<Vec<Region<TransportSet>>> {
        let mut regions: Vec<_> = memory.iter().map(|memory| self.region_around(&**memory)).collect();
        let missing = memory.iter().zip(&regions).filter(|(_, region)| region.is_none());
        let missing = missing.map(|(memory, _)| memory.clone()).collect();
        let opened = self.engine.register_many(missing).await?;
        for (region, opened) in regions.iter_mut().filter(|region| region.is_none()).zip(opened) {
            *region = Some(opened);
        }
        Ok(regions.into_iter().flatten().collect())
    }

    /// Returns the region of a registered object that contains this memory.
    fn region_around(&self, memory: &dyn MemorySource) -> Option<Region<TransportSet>> {
        let span = memory.span();
        let objects = self.objects.lock();
        let mut regions = objects.values().flat_map(|opened| match opened {
            Opened::Object(object) => object.regions(),
            Opened::InProgress => &[],
        });
        regions.find(|region| region.span().contains(span.addr(), span.len as u64)).cloned()
    }
}

/// Returns the checksums of all shards, computed on threads that may block.
async fn checksums_of(
    layout: &Payload,
    starts: &[u64],
    regions: &[Region<TransportSet>],
) -> Result<ChecksumRecord> {
    let mut slices: Vec<Slice<TransportSet>> = Vec::with_capacity(layout.shards.len());
    for ((region, address), size) in regions.iter().zip(starts).zip(&layout.size_list) {
        // A region of another object may begin before the range.
        let mut start = (address - region.addr()) as usize;
        for len in shard_sizes(&[*size], layout.max_shard_size) {
            slices.push(region.slice(start..start + len as usize)?);
            start += len as usize;
        }
    }
    let compute = |slice: Slice<TransportSet>| async move {
        let computed = tokio::task::spawn_blocking(move || checksum::of_slice(&slice)).await;
        computed.map_err(|error| Error::internal(format!("cannot compute checksum: {error}")))?
    };
    let crc64 = stream::iter(slices).map(compute).buffered(CHECKSUMS_AT_ONCE).map_ok(Some).try_collect();
    Ok(ChecksumRecord { crc64: crc64.await? })
}
