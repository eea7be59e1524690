//! Encoding of replicas.

use std::time::Duration;

use mooncake_core::ids::{ClientId, ReplicaId};
use mooncake_core::replica::{MemoryLocation, Replica, ReplicaList, ReplicaLocation, ReplicaStatus, Segment};

use crate::pack::{Pack, PackError, Reader, Unpack, Wire, Writer, wire_fields};
use crate::type_signature::{TypeSignature, symbol};

wire_fields!(structure MemoryLocation {
    size: u64,
    address: u64,
    protocol: String,
    endpoint: String,
    locality: Box<Locality> [since 1],
});

wire_fields!(structure Replica {
    id: ReplicaId,
    location: ReplicaLocation,
    status: ReplicaStatus,
});

wire_fields!(structure ReplicaList {
    replicas: Vec<Replica>,
    lease: Duration,
    checksum: Option<u64>,
    resolved_tenant: String [since 1],
});

/// Replicas in memory, encoded from their storage: the same bytes as a list of [`Replica`]s without
/// compatible fields. Each is its number, its address and its segment.
#[doc(hidden)]
pub fn pack_in_memory<'s>(
    replicas: impl ExactSizeIterator<Item = (ReplicaId, u64, &'s Segment)>,
    len: u64,
    status: ReplicaStatus,
    out: &mut Writer<'_>,
) {
    out.length(replicas.len());
    for (id, address, segment) in replicas {
        id.pack(out);
        out.byte(IN_MEMORY);
        len.pack(out);
        address.pack(out);
        segment.protocol.pack(out);
        segment.endpoint.pack(out);
        status.pack(out);
    }
}

/// Index of memory among the kinds of locations.
const IN_MEMORY: u8 = 0;

/// Encoding as a variant of five structs. The two kinds of memory are structs around a struct.
impl Wire for ReplicaLocation {
    const SIGNATURE: TypeSignature = TypeSignature::new(&[symbol::VARIANT])
        .then(TypeSignature::structure(&[MemoryLocation::SIGNATURE]))
        .then(TypeSignature::structure(&[MemoryLocation::SIGNATURE]))
        .then(TypeSignature::structure(&[String::SIGNATURE, u64::SIGNATURE]))
        .then(TypeSignature::structure(&[ClientId::SIGNATURE, u64::SIGNATURE, String::SIGNATURE]))
        .then(TypeSignature::structure(&[
            String::SIGNATURE,
            u64::SIGNATURE,
            u64::SIGNATURE,
            u64::SIGNATURE,
            i32::SIGNATURE,
        ]))
        .push(symbol::END);
    const MIN_LEN: usize = 1 + String::MIN_LEN + u64::MIN_LEN;
    const VERSIONS: u64 = MemoryLocation::VERSIONS;
}

impl Pack for ReplicaLocation {
    fn widest(&self) -> usize {
        match self {
            Self::Memory(at) | Self::NofSsd(at) => at.widest(),
            Self::Disk { path, .. } | Self::Dfs { path, .. } => path.len(),
            Self::LocalDisk { endpoint, .. } => endpoint.len(),
        }
    }

    fn pack(&self, out: &mut Writer<'_>) {
        match self {
            Self::Memory(at) => {
                out.byte(IN_MEMORY);
                at.pack(out);
            }
            Self::NofSsd(at) => {
                out.byte(1);
                at.pack(out);
            }
            Self::Disk { path, size } => {
                out.byte(2);
                path.pack(out);
                size.pack(out);
            }
            Self::LocalDisk { client, size, endpoint } => {
                out.byte(3);
                client.pack(out);
                size.pack(out);
                endpoint.pack(out);
            }
            Self::Dfs { path, offset, size, aligned_size, shard } => {
                out.byte(4);
                path.pack(out);
                offset.pack(out);
                size.pack(out);
                aligned_size.pack(out);
                shard.pack(out);
            }
        }
    }

    fn has_members(&self) -> bool {
        self.like_memory().is_some_and(Pack::has_members)
    }

    fn pack_members(&self, version: u8, out: &mut Writer<'_>) {
        if let Some(at) = self.like_memory() {
            at.pack_members(version, out);
        }
    }
}

impl<'a> Unpack<'a> for ReplicaLocation {
    fn unpack(body: &mut Reader<'a>) -> Result<Self, PackError> {
        // Fields are decoded in this order.
        Ok(match body.array()? {
            [0] => Self::Memory(Unpack::unpack(body)?),
            [1] => Self::NofSsd(Unpack::unpack(body)?),
            [2] => Self::Disk { path: Unpack::unpack(body)?, size: Unpack::unpack(body)? },
            [3] => Self::LocalDisk {
                client: Unpack::unpack(body)?,
                size: Unpack::unpack(body)?,
                endpoint: Unpack::unpack(body)?,
            },
            [4] => Self::Dfs {
                path: Unpack::unpack(body)?,
                offset: Unpack::unpack(body)?,
                size: Unpack::unpack(body)?,
                aligned_size: Unpack::unpack(body)?,
                shard: Unpack::unpack(body)?,
            },
            [other] => return Err(PackError::Variant(other)),
        })
    }

    fn unpack_members(&mut self, version: u8, body: &mut Reader<'a>) -> Result<(), PackError> {
        match self {
            Self::Memory(at) | Self::NofSsd(at) => at.unpack_members(version, body),
            Self::Disk { .. } | Self::LocalDisk { .. } | Self::Dfs { .. } => Ok(()),
        }
    }
}
