"""Values that describe weights: ranks, axes, tensors, and fragments of tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from mooncake.reshard._values import identity, integer, integers, items, optional_integer, put, text, texts, u64
from mooncake.reshard.contracts import PlacementFragmentId, TensorId

ParallelAxisKind = Literal["dp", "pp", "ep", "tp"]
SplitAxisKind = Literal["ep", "tp"]
KINDS: tuple[ParallelAxisKind, ...] = ("dp", "pp", "ep", "tp")

__all__ = [
    "OwnershipAxis",
    "ParallelAxis",
    "ParallelRank",
    "PlacementFragment",
    "ReplicatedAxis",
    "SplitAxis",
    "TensorDescriptor",
]


@dataclass(frozen=True)
class ParallelRank:
    """Coordinates of a process: data, tensor, pipeline and expert parallelism."""

    dp: int = 0
    tp: int = 0
    pp: int = 0
    ep: int = 0

    def __post_init__(self) -> None:
        for kind in KINDS:
            integer(getattr(self, kind), f"{kind} rank")

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Coordinates in the order in which ranks are sorted."""
        return self.dp, self.pp, self.ep, self.tp

    def wire(self) -> dict[str, int]:
        """Returns the coordinates by name."""
        return {kind: getattr(self, kind) for kind in KINDS}


def _axis_kind(kind: Any) -> None:
    if type(kind) is not str or kind not in KINDS:
        raise ValueError(f"axis kind must be one of {', '.join(KINDS)}, not {kind!r}")


@dataclass(frozen=True)
class SplitAxis:
    """Axis whose ranks share a tensor along one dimension."""

    kind: SplitAxisKind
    dim: int

    def __post_init__(self) -> None:
        _axis_kind(self.kind)
        if self.kind not in ("ep", "tp"):
            raise ValueError(f"axis {self.kind!r} does not support split semantics; only ep and tp split tensors")
        integer(self.dim, "axis dim")
        if self.kind == "ep" and self.dim != 0:
            raise ValueError(f"EP must split the leading dimension of a tensor, not dimension {self.dim}")


@dataclass(frozen=True)
class ReplicatedAxis:
    """Axis of which every rank has the whole tensor."""

    kind: ParallelAxisKind

    def __post_init__(self) -> None:
        _axis_kind(self.kind)


@dataclass(frozen=True)
class OwnershipAxis:
    """Axis of which some ranks have the whole tensor and others nothing."""

    kind: ParallelAxisKind

    def __post_init__(self) -> None:
        _axis_kind(self.kind)


ParallelAxis = SplitAxis | ReplicatedAxis | OwnershipAxis


@dataclass(frozen=True)
class TensorDescriptor:
    """Tensor as a whole, and the axes along which it is divided or copied."""

    tensor_id: TensorId
    global_shape: tuple[int, ...]
    dtype: str
    itemsize: int
    shard_dims: tuple[int, ...]
    layout_fingerprint: str
    parallel_axes: tuple[ParallelAxis, ...]
    layer_id: int | None = None
    expert_id: int | None = None

    def __post_init__(self) -> None:
        text(self.tensor_id, "tensor_id")
        shape = integers(self.global_shape, "global_shape", 1)
        if not shape:
            raise ValueError("global_shape must not be empty")
        text(self.dtype, "dtype")
        integer(self.itemsize, "itemsize", 1)
        dims = integers(self.shard_dims, "shard_dims")
        if len(set(dims)) != len(dims):
            raise ValueError(f"shard_dims must not contain duplicates: {dims}")
        if list(dims) != sorted(dims):
            raise ValueError(f"shard_dims must be sorted: {dims}")
        if dims and dims[-1] >= len(shape):
            raise ValueError(f"shard_dims has out-of-range dimensions: {dims}")
        text(self.layout_fingerprint, "layout_fingerprint")
        axes = _axes(self.parallel_axes)
        split = [axis.dim for axis in axes if isinstance(axis, SplitAxis)]
        if len(set(split)) != len(split):
            raise ValueError("split axes must not share a dimension")
        if tuple(sorted(split)) != dims:
            raise ValueError(f"shard_dims must be the dimensions of the split axes: {dims} and {sorted(split)}")
        optional_integer(self.layer_id, "layer_id")
        optional_integer(self.expert_id, "expert_id")
        if self.expert_id is not None and any(isinstance(axis, SplitAxis) and axis.kind == "ep" for axis in axes):
            raise ValueError("an individually allocated expert must not be split by ep")
        put(self, global_shape=shape, shard_dims=dims, parallel_axes=axes)

    def of_kind(self, kind: type[Any]) -> tuple[ParallelAxisKind, ...]:
        """Returns the axes of a class, by name, in the order of ranks."""
        return tuple(axis.kind for axis in self.parallel_axes if isinstance(axis, kind))

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return math.prod(self.global_shape) * self.itemsize


def _axes(value: Any) -> tuple[ParallelAxis, ...]:
    try:
        axes: tuple[ParallelAxis, ...] = items(value, (SplitAxis, ReplicatedAxis, OwnershipAxis), "parallel_axes")
    except ValueError as error:
        raise ValueError(f"parallel_axes must contain explicit axis values: {error}") from None
    kinds = [axis.kind for axis in axes]
    if len(set(kinds)) != len(kinds):
        raise ValueError(f"parallel_axes has duplicate kinds: {kinds}")
    return tuple(sorted(axes, key=lambda axis: KINDS.index(axis.kind)))


def aliases_of(value: Any, tensor_id: str) -> tuple[TensorId, ...]:
    """Returns the tensors that share the bytes of a fragment, including its own."""
    names = texts(value, "aliases")
    if len(set(names)) != len(names):
        raise ValueError(f"aliases must be unique: {names}")
    if names and (len(names) < 2 or tensor_id not in names):
        raise ValueError(f"an alias group must have at least two tensors, among them {tensor_id!r}: {names}")
    return tuple(TensorId(name) for name in sorted(names))


def box_of(offset: Any, shape: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns offset and shape of a fragment."""
    begin, extent = integers(offset, "global_offset"), integers(shape, "local_shape", 1)
    if len(begin) != len(extent) or not begin:
        raise ValueError(f"global_offset and local_shape must have the same length: {len(begin)} and {len(extent)}")
    return begin, extent


@dataclass(frozen=True, init=False)
class PlacementFragment:
    """Box of a tensor that one rank has, without an address."""

    tensor_id: TensorId
    global_offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    nbytes: int
    rank: ParallelRank
    pipeline_stage_id: int | None
    aliases: tuple[TensorId, ...]
    placement_fragment_id: PlacementFragmentId

    def __init__(
        self,
        tensor_id: TensorId,
        global_offset: tuple[int, ...],
        local_shape: tuple[int, ...],
        nbytes: int,
        rank: ParallelRank,
        pipeline_stage_id: int | None = None,
        aliases: tuple[TensorId, ...] = (),
        placement_fragment_id: PlacementFragmentId | None = None,
    ) -> None:
        text(tensor_id, "tensor_id")
        offset, shape = box_of(global_offset, local_shape)
        u64(nbytes, "nbytes", 1)
        if not isinstance(rank, ParallelRank):
            raise ValueError(f"rank must be a ParallelRank, not {type(rank).__name__}")
        optional_integer(pipeline_stage_id, "pipeline_stage_id")
        put(self, tensor_id=tensor_id, global_offset=offset, local_shape=shape, nbytes=nbytes, rank=rank)
        put(self, pipeline_stage_id=pipeline_stage_id, aliases=aliases_of(aliases, tensor_id))
        if placement_fragment_id is None:
            made = identity({"schema": "weight-placement-fragment", **self.wire()})
            placement_fragment_id = PlacementFragmentId(made)
        text(placement_fragment_id, "placement_fragment_id")
        put(self, placement_fragment_id=placement_fragment_id)

    @property
    def fragment_id(self) -> PlacementFragmentId:
        """Identifier, which follows from the content unless it was given."""
        return self.placement_fragment_id

    def wire(self) -> dict[str, Any]:
        """Returns the content without the identifier, as JSON."""
        stage = {} if self.pipeline_stage_id is None else {"pipeline_stage_id": self.pipeline_stage_id}
        return {
            "tensor_id": self.tensor_id,
            "global_offset": list(self.global_offset),
            "local_shape": list(self.local_shape),
            "nbytes": self.nbytes,
            "rank": self.rank.wire(),
            "aliases": list(self.aliases),
            **stage,
        }

    @property
    def box(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offset and shape."""
        return self.global_offset, self.local_shape
