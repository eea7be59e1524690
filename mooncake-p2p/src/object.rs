//! Objects in the memory of this node.

use mooncake_core::{Error, ErrorCode, Result};
use mooncake_engine::TransportSet;
use mooncake_transport::{Region, SliceMut};
use parking_lot::Mutex;

use crate::catalogue::{Location, Payload, Role, shard_sizes};
use crate::records::ChecksumRecord;

/// Object that this node serves.
#[derive(Debug)]
pub(crate) struct Object {
    /// The object without copies.
    pub(crate) layout: Payload,
    pub(crate) role: Role,
    /// Location of each shard in this node.
    pub(crate) locations: Vec<Location>,
    /// Checksums of the shards that are there.
    pub(crate) checksums: Mutex<ChecksumRecord>,
    pub(crate) memory: ObjectMemory,
}

/// Registered memory of an object.
pub(crate) enum ObjectMemory {
    /// Memory of a seeder. A range inside the range of another object has that region.
    Seed(Vec<Region<TransportSet>>),
    /// Memory of a reader, by shard.
    Replica(Vec<SliceMut<TransportSet>>),
}

impl std::fmt::Debug for ObjectMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Seed(regions) => f.debug_tuple("Seed").field(regions).finish(),
            Self::Replica(shards) => f.debug_tuple("Replica").field(shards).finish(),
        }
    }
}

impl Object {
    /// Returns the regions of a seeder.
    pub(crate) fn regions(&self) -> &[Region<TransportSet>] {
        match &self.memory {
            ObjectMemory::Seed(regions) => regions,
            ObjectMemory::Replica(_) => &[],
        }
    }
}

/// Returns the locations of the shards of an object whose ranges begin at these addresses.
pub(crate) fn locations_of(layout: &Payload, starts: &[u64], segment: &str) -> Vec<Location> {
    let mut locations = Vec::with_capacity(layout.shards.len());
    for (start, size) in starts.iter().zip(&layout.size_list) {
        for index in 0..shard_sizes(&[*size], layout.max_shard_size).count() as u64 {
            let offset = start + index * layout.max_shard_size;
            locations.push(Location { segment_name: segment.to_owned(), offset });
        }
    }
    locations
}

/// Divides registered ranges into the shards of an object.
///
/// # Errors
/// Returns `INVALID_PARAMS` for read-only memory, and `OBJECT_REPLICA_BUSY` if a range is in use.
pub(crate) fn divide(
    regions: Vec<Region<TransportSet>>,
    max_shard_size: u64,
) -> Result<Vec<SliceMut<TransportSet>>> {
    let mut shards = Vec::new();
    for region in regions {
        let (address, len) = (region.addr(), region.len());
        if region.span().read_only {
            return Err(Error::invalid(format!(
                "cannot read object: the memory is read-only. address={address:#x} len={len}"
            )));
        }
        let busy = || {
            Error::new(
                ErrorCode::ObjectReplicaBusy,
                format!("cannot read object: the memory is in use. address={address:#x} len={len}"),
            )
        };
        let mut rest = region.exclusive().map_err(|_| busy())?;
        let shard_len = usize::try_from(max_shard_size).unwrap_or(usize::MAX);
        while rest.len() > shard_len {
            let (shard, tail) = rest.split_at(shard_len).map_err(|_| busy())?;
            shards.push(shard);
            rest = tail;
        }
        shards.push(rest);
    }
    Ok(shards)
}
