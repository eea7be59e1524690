"""Resources of any kind: their identifiers, and the interfaces of their manifests."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NewType, Protocol, runtime_checkable

from mooncake.reshard._values import U64, integers, put, text, u64

ResourceId = NewType("ResourceId", str)
RevisionId = NewType("RevisionId", str)
TensorId = NewType("TensorId", str)
TopologyId = NewType("TopologyId", str)
ParticipantId = NewType("ParticipantId", str)
PlacementId = NewType("PlacementId", str)
PlacementSetId = NewType("PlacementSetId", str)
PlacementFragmentId = NewType("PlacementFragmentId", str)
RuntimeFragmentId = NewType("RuntimeFragmentId", str)
RuntimeInstanceId = NewType("RuntimeInstanceId", str)
LeaseId = NewType("LeaseId", str)
StoredFragmentId = NewType("StoredFragmentId", str)

__all__ = [
    "LeaseId",
    "ParticipantId",
    "PlacementFragmentId",
    "PlacementId",
    "PlacementManifest",
    "PlacementSetId",
    "ResourceId",
    "ResourceKind",
    "ResourceManifest",
    "RevisionId",
    "RuntimeBindingFragment",
    "RuntimeBindingManifest",
    "RuntimeFragmentId",
    "RuntimeInstanceId",
    "StoredFragmentId",
    "StoredResourceManifest",
    "TensorId",
    "TopologyId",
    "validate_resource_binding_identity",
]


class ResourceKind(str, Enum):
    """Kind of a resource."""

    MODEL_WEIGHT = "model_weight"
    # Reserved.
    KV_CACHE = "kv_cache"


@runtime_checkable
class ResourceManifest(Protocol):
    """Description of a resource."""

    @property
    def resource_id(self) -> ResourceId: ...

    @property
    def revision(self) -> RevisionId: ...

    @property
    def resource_kind(self) -> ResourceKind: ...


@runtime_checkable
class PlacementManifest(ResourceManifest, Protocol):
    """Layout of a resource on the participants of a cluster, without addresses."""

    @property
    def placement_id(self) -> PlacementId: ...

    @property
    def digest(self) -> str: ...


@runtime_checkable
class RuntimeBindingManifest(ResourceManifest, Protocol):
    """Addresses of the parts of a layout in a running process."""

    @property
    def placement_id(self) -> PlacementId: ...

    @property
    def placement_digest(self) -> str: ...

    @property
    def instance_id(self) -> RuntimeInstanceId: ...

    @property
    def generation(self) -> int: ...

    @property
    def lease_id(self) -> LeaseId: ...


@runtime_checkable
class StoredResourceManifest(ResourceManifest, Protocol):
    """Description of a resource in a store."""


def row_major_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Returns the strides in bytes of an array whose last dimension is contiguous."""
    return tuple(math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape)))


@dataclass(frozen=True)
class RuntimeBindingFragment:
    """Address of a fragment in the memory of a process.

    `owner` keeps the memory alive. It is neither compared nor shown nor pickled.
    """

    placement_fragment_id: PlacementFragmentId
    fragment_id: RuntimeFragmentId
    address: int
    nbytes: int
    worker_id: str
    endpoint: str
    device: str
    itemsize: int
    local_shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    storage_address: int
    storage_nbytes: int
    storage_offset_bytes: int
    owner: object | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("placement_fragment_id", "fragment_id", "worker_id", "endpoint", "device"):
            text(getattr(self, name), name)
        for name, least in (("address", 1), ("nbytes", 1), ("itemsize", 1), ("storage_address", 1), ("storage_nbytes", 1), ("storage_offset_bytes", 0)):
            u64(getattr(self, name), name, least)
        shape, strides = _dims(self.local_shape, "local_shape", 1), _dims(self.strides_bytes, "strides_bytes", 0)
        if len(shape) != len(strides):
            raise ValueError(f"strides_bytes must have the length of local_shape: {len(strides)} and {len(shape)}")
        if any(stride == 0 and extent != 1 for stride, extent in zip(strides, shape)):
            raise ValueError("strides_bytes may only be 0 where the extent is 1")
        rows = row_major_strides(shape, self.itemsize)
        put(self, local_shape=shape, strides_bytes=tuple(r if e == 1 else s for s, e, r in zip(strides, shape, rows)))
        self._check_storage()

    def _check_storage(self) -> None:
        if self.address != self.storage_address + self.storage_offset_bytes:
            raise ValueError("address must be storage_address plus storage_offset_bytes")
        if self.storage_offset_bytes + self.nbytes > self.storage_nbytes:
            raise ValueError("the fragment must lie inside its storage allocation")
        if self.address + self.nbytes > U64 or self.storage_address + self.storage_nbytes > U64:
            raise ValueError("addresses must be unsigned 64-bit integers up to the end of the memory")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "owner": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _dims(value: Any, name: str, minimum: int) -> tuple[int, ...]:
    if not isinstance(value, tuple | list):
        raise ValueError(f"{name} must contain integers in a tuple or list, not {type(value).__name__}")
    return integers(value, name, minimum)


def validate_resource_binding_identity(placement: PlacementManifest, binding: RuntimeBindingManifest) -> None:
    """Raises `ValueError` if a binding is not one of that layout."""
    for name, ours, theirs in (
        ("resource_kind", placement.resource_kind, binding.resource_kind),
        ("resource_id", placement.resource_id, binding.resource_id),
        ("placement_id", placement.placement_id, binding.placement_id),
        ("placement digest", placement.digest, binding.placement_digest),
        ("revision", placement.revision, binding.revision),
    ):
        if ours != theirs:
            raise ValueError(f"runtime binding {name} does not match the placement: {theirs!r} and {ours!r}")
