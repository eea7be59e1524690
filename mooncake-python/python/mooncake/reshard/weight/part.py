"""Weights of one participant."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mooncake.reshard._values import items, put, text, u64, unique
from mooncake.reshard.contracts import ParticipantId, PlacementSetId, ResourceId, RevisionId, TensorId, TopologyId
from mooncake.reshard.geometry import box_contains, boxes_overlap
from mooncake.reshard.weight.types import ParallelRank, PlacementFragment, TensorDescriptor

__all__ = ["WeightPlacementPart"]


@dataclass(frozen=True)
class WeightPlacementPart:
    """Fragments of one participant, with the tensors that they belong to.

    A part alone need not cover its tensors.
    """

    resource_id: ResourceId
    revision: RevisionId
    weight_generation: int
    placement_set_id: PlacementSetId
    topology_id: TopologyId
    participant_id: ParticipantId
    rank: ParallelRank
    tensors: tuple[TensorDescriptor, ...]
    fragments: tuple[PlacementFragment, ...]

    def __post_init__(self) -> None:
        for name in ("resource_id", "revision", "placement_set_id", "topology_id", "participant_id"):
            text(getattr(self, name), name)
        u64(self.weight_generation, "weight_generation")
        if not isinstance(self.rank, ParallelRank):
            raise ValueError(f"rank must be a ParallelRank, not {type(self.rank).__name__}")
        tensors: tuple[TensorDescriptor, ...] = items(self.tensors, TensorDescriptor, "WeightPlacementPart tensors")
        fragments: tuple[PlacementFragment, ...] = items(self.fragments, PlacementFragment, "WeightPlacementPart fragments")
        for fragment in fragments:
            if fragment.rank != self.rank:
                raise ValueError(f"fragment rank must be that of the part: {fragment.rank} and {self.rank}")
        unused = {tensor.tensor_id for tensor in tensors} - {fragment.tensor_id for fragment in fragments}
        if unused:
            raise ValueError(f"unreferenced tensor in the part of {self.participant_id!r}: {sorted(unused)[0]!r}")
        put(
            self,
            tensors=tuple(sorted(tensors, key=lambda one: one.tensor_id)),
            fragments=tuple(sorted(fragments, key=lambda one: one.fragment_id)),
        )
        check_fragments(self.tensors, self.fragments)


def check_fragments(tensors: Sequence[TensorDescriptor], fragments: Sequence[PlacementFragment]) -> None:
    """Raises `ValueError` for repeated or overlapping fragments, and for such that do not fit their
    tensors.
    """
    unique([tensor.tensor_id for tensor in tensors], "duplicate tensor_id")
    unique([fragment.fragment_id for fragment in fragments], "duplicate placement fragment_id")
    unique([(one.tensor_id, one.rank, *one.box) for one in fragments], "duplicate placement fragment geometry")
    known = {tensor.tensor_id: tensor for tensor in tensors}
    groups: dict[tuple[TensorId, ParallelRank], list[PlacementFragment]] = {}
    for fragment in fragments:
        check_geometry(known, fragment.tensor_id, fragment.box, fragment.nbytes)
        groups.setdefault((fragment.tensor_id, fragment.rank), []).append(fragment)
    for (tensor_id, _), some in groups.items():
        if boxes_overlap([fragment.box for fragment in some]):
            raise ValueError(f"logical fragment boxes overlap: tensor_id={tensor_id!r}")


def check_geometry(
    tensors: Mapping[TensorId, TensorDescriptor],
    tensor_id: TensorId,
    box: tuple[tuple[int, ...], tuple[int, ...]],
    nbytes: int,
) -> None:
    """Raises `ValueError` if a fragment does not fit its tensor."""
    tensor = tensors.get(tensor_id)
    if tensor is None:
        raise ValueError(f"fragment references an unknown tensor: {tensor_id!r}")
    offset, shape = box
    if len(offset) != len(tensor.global_shape):
        raise ValueError(f"fragment rank does not match its tensor: tensor_id={tensor_id!r} dimensions={len(offset)}")
    if not box_contains((0,) * len(offset), tensor.global_shape, offset, shape):
        raise ValueError(f"fragment is out of bounds: tensor_id={tensor_id!r} offset={offset} shape={shape}")
    if nbytes != math.prod(shape) * tensor.itemsize:
        raise ValueError(f"fragment byte size mismatch: tensor_id={tensor_id!r} nbytes={nbytes}")
