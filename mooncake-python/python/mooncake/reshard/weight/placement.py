"""Complete layout of weights on all participants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mooncake.reshard._values import identity, items, put, text, u64
from mooncake.reshard.contracts import ParticipantId, PlacementId, PlacementSetId, ResourceId, ResourceKind, RevisionId, TensorId
from mooncake.reshard.weight._completeness import check_complete
from mooncake.reshard.weight.part import WeightPlacementPart
from mooncake.reshard.weight.topology import ParallelTopology
from mooncake.reshard.weight.types import OwnershipAxis, ParallelAxis, PlacementFragment, SplitAxis, TensorDescriptor

__all__ = ["WeightPlacementManifest"]


def axis_wire(axis: ParallelAxis) -> dict[str, Any]:
    """Returns an axis as JSON."""
    if isinstance(axis, SplitAxis):
        return {"semantics": "split", "kind": axis.kind, "dim": axis.dim}
    return {"semantics": "ownership" if isinstance(axis, OwnershipAxis) else "replicated", "kind": axis.kind}


def tensor_wire(tensor: TensorDescriptor) -> dict[str, Any]:
    """Returns the description of a tensor as JSON."""
    return {
        "tensor_id": tensor.tensor_id,
        "global_shape": list(tensor.global_shape),
        "dtype": tensor.dtype,
        "itemsize": tensor.itemsize,
        "shard_dims": list(tensor.shard_dims),
        "layout_fingerprint": tensor.layout_fingerprint,
        "parallel_axes": [axis_wire(axis) for axis in tensor.parallel_axes],
        "layer_id": tensor.layer_id,
        "expert_id": tensor.expert_id,
    }


def part_wire(part: WeightPlacementPart) -> dict[str, Any]:
    """Returns the fragments of a participant as JSON."""
    fragments = [{**one.wire(), "placement_fragment_id": one.placement_fragment_id} for one in part.fragments]
    return {"participant_id": part.participant_id, "rank": part.rank.wire(), "fragments": fragments}


@dataclass(frozen=True, init=False)
class WeightPlacementManifest:
    """Layout of weights on all participants of a topology. Every tensor is complete."""

    resource_id: ResourceId
    placement_id: PlacementId
    revision: RevisionId
    weight_generation: int
    placement_set_id: PlacementSetId
    topology: ParallelTopology
    parts: tuple[WeightPlacementPart, ...]
    tensors: tuple[TensorDescriptor, ...] = field(init=False)
    fragments: tuple[PlacementFragment, ...] = field(init=False)
    _digest: str | None = field(init=False, repr=False, compare=False)

    def __init__(
        self,
        *,
        resource_id: ResourceId,
        revision: RevisionId,
        weight_generation: int,
        placement_set_id: PlacementSetId,
        topology: ParallelTopology,
        parts: tuple[WeightPlacementPart, ...],
        placement_id: PlacementId | None = None,
    ) -> None:
        text(resource_id, "resource_id")
        text(revision, "revision")
        u64(weight_generation, "weight_generation")
        text(placement_set_id, "placement_set_id")
        if not isinstance(topology, ParallelTopology):
            raise ValueError(f"topology must be a ParallelTopology, not {type(topology).__name__}")
        put(self, resource_id=resource_id, revision=revision, weight_generation=weight_generation)
        put(self, placement_set_id=placement_set_id, topology=topology, _digest=None)
        given: tuple[WeightPlacementPart, ...] = items(parts, WeightPlacementPart, "WeightPlacementManifest parts")
        put(self, parts=tuple(sorted(given, key=lambda part: part.participant_id)))
        self._check_parts()
        put(self, tensors=_tensors_of(self.parts))
        listed = [fragment for part in self.parts for fragment in part.fragments]
        put(self, fragments=tuple(sorted(listed, key=lambda one: one.fragment_id)))
        self._check_tensors()
        made = identity({"schema": "complete-weight-placement", **self._content()})
        if placement_id is not None and text(placement_id, "placement_id") != made:
            raise ValueError(f"placement_id does not match the canonical logical content: {placement_id!r}")
        put(self, placement_id=PlacementId(made))

    def _check_parts(self) -> None:
        known = {one.participant_id: one for one in self.topology.participants}
        seen: set[ParticipantId] = set()
        for part in self.parts:
            if part.participant_id in seen:
                raise ValueError(f"duplicate placement participant: {part.participant_id!r}")
            seen.add(part.participant_id)
        missing, unknown = sorted(set(known) - seen), sorted(seen - set(known))
        if missing:
            raise ValueError(f"missing topology participant: {missing[0]!r}")
        if unknown:
            raise ValueError(f"unknown topology participant: {unknown[0]!r}")
        for part in self.parts:
            for name in ("resource_id", "revision", "weight_generation", "placement_set_id"):
                if getattr(part, name) != getattr(self, name):
                    raise ValueError(f"{name} of the part of {part.participant_id!r} differs: {getattr(part, name)!r}")
            if part.topology_id != self.topology.topology_id:
                raise ValueError(f"topology_id of the part of {part.participant_id!r} differs: {part.topology_id!r}")
            if part.rank != known[part.participant_id].rank:
                raise ValueError(f"rank of the part of {part.participant_id!r} differs: {part.rank}")

    def _check_tensors(self) -> None:
        if not self.tensors:
            raise ValueError("WeightPlacementManifest must contain tensors")
        if not self.fragments:
            raise ValueError("WeightPlacementManifest must contain fragments")
        by_tensor: dict[TensorId, list[PlacementFragment]] = {}
        for fragment in self.fragments:
            by_tensor.setdefault(fragment.tensor_id, []).append(fragment)
        for fragment in self.fragments:
            for alias in fragment.aliases:
                if alias not in by_tensor:
                    raise ValueError(f"alias group references unknown tensor: {alias!r}")
                if any(other.aliases != fragment.aliases for other in by_tensor[alias]):
                    raise ValueError(f"alias group is not declared consistently: {fragment.aliases}")
        for tensor in self.tensors:
            check_complete(self.topology, tensor, by_tensor[tensor.tensor_id])

    def _content(self) -> dict[str, Any]:
        return {
            "resource_id": self.resource_id,
            "revision": self.revision,
            "weight_generation": self.weight_generation,
            "placement_set_id": self.placement_set_id,
            "topology": {**self.topology.wire(), "topology_id": self.topology.topology_id},
            "tensors": [tensor_wire(tensor) for tensor in self.tensors],
            "parts": [part_wire(part) for part in self.parts],
        }

    def wire(self) -> dict[str, Any]:
        """Returns the layout as JSON."""
        return {"resource_kind": self.resource_kind.value, "placement_id": self.placement_id, **self._content()}

    @property
    def resource_kind(self) -> ResourceKind:
        """Kind of the resource."""
        return ResourceKind.MODEL_WEIGHT

    @property
    def digest(self) -> str:
        """SHA-256 of the JSON, in hexadecimal digits. It is computed once."""
        if self._digest is None:
            from mooncake.reshard._values import sha256
            from mooncake.reshard.weight import serde

            put(self, _digest=sha256(serde.weight_placement_to_json(self)))
        assert self._digest is not None
        return self._digest

    def part(self, participant_id: ParticipantId) -> WeightPlacementPart | None:
        """Returns the part of a participant, if there is one."""
        return next((part for part in self.parts if part.participant_id == participant_id), None)

    @classmethod
    def from_fragments(
        cls,
        *,
        resource_id: ResourceId,
        revision: RevisionId,
        weight_generation: int,
        placement_set_id: PlacementSetId,
        topology: ParallelTopology,
        tensors: Sequence[TensorDescriptor],
        fragments: Sequence[PlacementFragment],
        placement_id: PlacementId | None = None,
    ) -> WeightPlacementManifest:
        """Makes a layout from the fragments of all ranks."""
        if not isinstance(topology, ParallelTopology):
            raise ValueError(f"topology must be a ParallelTopology, not {type(topology).__name__}")
        described: tuple[TensorDescriptor, ...] = items(tensors, TensorDescriptor, "WeightPlacementManifest tensors")
        listed: tuple[PlacementFragment, ...] = items(fragments, PlacementFragment, "WeightPlacementManifest fragments")
        ranks = {one.rank for one in topology.participants}
        for fragment in listed:
            if fragment.rank not in ranks:
                raise ValueError(f"fragment has an unknown topology rank: {fragment.rank}")
        referenced = {fragment.tensor_id for fragment in listed}
        for tensor in described:
            if tensor.tensor_id not in referenced:
                raise ValueError(f"unreferenced tensor: {tensor.tensor_id!r}")
        parts = []
        for one in topology.participants:
            mine = tuple(fragment for fragment in listed if fragment.rank == one.rank)
            used = {fragment.tensor_id for fragment in mine}
            parts.append(
                WeightPlacementPart(
                    resource_id,
                    revision,
                    weight_generation,
                    placement_set_id,
                    topology.topology_id,
                    one.participant_id,
                    one.rank,
                    tuple(tensor for tensor in described if tensor.tensor_id in used),
                    mine,
                )
            )
        return cls(
            resource_id=resource_id,
            revision=revision,
            weight_generation=weight_generation,
            placement_set_id=placement_set_id,
            topology=topology,
            parts=tuple(parts),
            placement_id=placement_id,
        )


def _tensors_of(parts: Iterable[WeightPlacementPart]) -> tuple[TensorDescriptor, ...]:
    """Returns the tensors of all parts. Parts must describe a tensor alike."""
    known: dict[TensorId, TensorDescriptor] = {}
    for part in parts:
        for tensor in part.tensors:
            if known.setdefault(tensor.tensor_id, tensor) != tensor:
                raise ValueError(f"tensor descriptor mismatch between parts: {tensor.tensor_id!r}")
    return tuple(known[tensor_id] for tensor_id in sorted(known))
