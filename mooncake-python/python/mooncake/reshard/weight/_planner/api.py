"""Planning of transfers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mooncake.reshard.contracts import ParticipantId, TensorId
from mooncake.reshard.geometry import regions_exactly_cover
from mooncake.reshard.weight._planner.contracts import (
    LogicalTransferPlan,
    PlacementExecutorPlan,
    PlanningLimits,
    TransferRegion,
    check_limits,
    operation_order,
)
from mooncake.reshard.weight._planner.geometry import BoxIndex, SourceFragment, _overlap_box, layout_of
from mooncake.reshard.weight._planner.ownership import (
    Owner,
    complete_dp_owned_source_owners,
    complete_parallel_source_replicas,
    has_dp_ownership,
    parallel_tensor_owner,
)
from mooncake.reshard.weight.part import WeightPlacementPart
from mooncake.reshard.weight.placement import WeightPlacementManifest
from mooncake.reshard.weight.storage_manifest import WeightManifest
from mooncake.reshard.weight.types import PlacementFragment, TensorDescriptor

__all__ = [
    "plan_placement_transfer",
    "plan_placement_transfer_to_local_target",
    "plan_stored_transfer_to_target_placement",
]

Tensors = Mapping[TensorId, TensorDescriptor]
Region = TransferRegion[Any, PlacementFragment]
# Returns the fragments from which a target fragment may be read.
Candidates = Callable[[PlacementFragment], BoxIndex]


def plan_placement_transfer(
    source_placement: WeightPlacementManifest,
    target_placement: WeightPlacementManifest,
    *,
    planning_limits: PlanningLimits | None = None,
) -> LogicalTransferPlan:
    """Plans the transfer of a layout to another one."""
    _check_kinds(source_placement, target_placement)
    _check_resource(source_placement, target_placement)
    source, target = _by_id(source_placement.tensors), _by_id(target_placement.tensors)
    _check_tensors(source, target, is_local=False)
    candidates = _Replicas(source, source_placement.fragments).candidates
    return _plan(source_placement, target_placement, target_placement.parts, target, candidates, planning_limits)


def plan_placement_transfer_to_local_target(
    source_placement: WeightPlacementManifest,
    target_placement: WeightPlacementManifest,
    target_participant_id: ParticipantId | None = None,
    *,
    planning_limits: PlanningLimits | None = None,
) -> LogicalTransferPlan:
    """Plans the transfer to one participant of a layout."""
    _check_kinds(source_placement, target_placement)
    _check_resource(source_placement, target_placement)
    if target_participant_id is None:
        if len(target_placement.parts) != 1:
            raise ValueError("target_participant_id is required: the target placement has several participants")
        target_participant_id = target_placement.parts[0].participant_id
    part = target_placement.part(target_participant_id)
    if part is None:
        raise ValueError(f"unknown target participant: {target_participant_id!r}")
    if not part.fragments:
        raise ValueError(f"target participant has no fragments: {target_participant_id!r}")
    source, target = _by_id(source_placement.tensors), _by_id(part.tensors)
    _check_tensors(source, target, is_local=True)
    wanted = {name: source[name] for name in target}
    candidates = _Replicas(wanted, [one for one in source_placement.fragments if one.tensor_id in wanted]).candidates
    return _plan(source_placement, target_placement, [part], target, candidates, planning_limits)


def plan_stored_transfer_to_target_placement(
    weight_manifest: WeightManifest,
    target_placement: WeightPlacementManifest,
    *,
    planning_limits: PlanningLimits | None = None,
) -> LogicalTransferPlan:
    """Plans the transfer of weights in a store to a layout."""
    if not isinstance(weight_manifest, WeightManifest):
        raise ValueError(f"weight_manifest must be a WeightManifest, not {type(weight_manifest).__name__}")
    _check_kinds(target_placement)
    _check_resource(weight_manifest, target_placement)
    source, target = _by_id(weight_manifest.tensors), _by_id(target_placement.tensors)
    _check_tensors(source, target, is_local=False)
    indexes = _indexes(weight_manifest.fragments, lambda one: (one.object_key, one.fragment_id))
    return _plan(
        weight_manifest,
        target_placement,
        target_placement.parts,
        target,
        lambda fragment: indexes[fragment.tensor_id],
        planning_limits,
    )


def _check_kinds(*placements: WeightPlacementManifest) -> None:
    for one in placements:
        if not isinstance(one, WeightPlacementManifest):
            raise ValueError(f"a placement must be a WeightPlacementManifest, not {type(one).__name__}")


def _by_id(tensors: Sequence[TensorDescriptor]) -> dict[TensorId, TensorDescriptor]:
    return {tensor.tensor_id: tensor for tensor in tensors}


def _check_resource(source: WeightPlacementManifest | WeightManifest, target: WeightPlacementManifest) -> None:
    for name, words in (
        ("resource_id", "resource_id differ"),
        ("revision", "revision differ"),
        ("weight_generation", "weight_generation differ"),
    ):
        if getattr(source, name) != getattr(target, name):
            raise ValueError(f"source and target {words}: {getattr(source, name)!r} and {getattr(target, name)!r}")


def _check_tensors(source: Tensors, target: Tensors, is_local: bool) -> None:
    missing, unknown = sorted(source.keys() - target.keys()), sorted(target.keys() - source.keys())
    if missing and not is_local:
        raise ValueError(f"target manifests are missing tensors: {missing}")
    if unknown:
        raise ValueError(f"target manifests have unknown tensors: {unknown}")
    for name, tensor in target.items():
        other = source[name]
        if tensor.layout_fingerprint != other.layout_fingerprint:
            raise ValueError(f"layout mismatch: tensor_id={name!r}")
        for attribute in ("global_shape", "dtype", "itemsize", "layer_id", "expert_id"):
            if getattr(tensor, attribute) != getattr(other, attribute):
                raise ValueError(f"tensor descriptor mismatch: tensor_id={name!r} {attribute}")


def _indexes(fragments: Sequence[Any], order: Callable[[Any], Any]) -> dict[TensorId, BoxIndex]:
    """Returns the fragments of each tensor. Of those with equal boxes, only the first is used."""
    chosen: dict[tuple[TensorId, Any, Any], Any] = {}
    for one in sorted(fragments, key=order):
        chosen.setdefault((one.tensor_id, one.global_offset, one.local_shape), one)
    of_tensors: dict[TensorId, list[Any]] = {}
    for one in chosen.values():
        of_tensors.setdefault(one.tensor_id, []).append(one)
    return {name: BoxIndex(some) for name, some in of_tensors.items()}


def _source_order(one: PlacementFragment) -> tuple[Any, ...]:
    return (*one.rank.order, one.fragment_id)


class _Replicas:
    """Copies of the source from which the ranks of the target read."""

    def __init__(self, tensors: Tensors, fragments: Sequence[PlacementFragment]) -> None:
        self._tensors = tensors
        self._fragments: dict[TensorId, list[PlacementFragment]] = {}
        for one in fragments:
            self._fragments.setdefault(one.tensor_id, []).append(one)
        self._owned = complete_dp_owned_source_owners(tensors, fragments)
        self._replicas: list[tuple[int, dict[TensorId, Owner]]] = []
        if len(self._owned) != len(tensors):
            self._replicas = sorted(complete_parallel_source_replicas(tensors, fragments).items())
            if not self._replicas:
                raise ValueError("the source has no complete dp replica")
        self._made: dict[tuple[int | None, TensorId], BoxIndex] = {}

    def candidates(self, target: PlacementFragment) -> BoxIndex:
        """Returns the fragments from which a target fragment is read."""
        name = target.tensor_id
        tensor = self._tensors[name]
        dp, owner = None, self._owned.get(name)
        if not has_dp_ownership(tensor):
            dp, owners = self._replicas[target.rank.dp % len(self._replicas)]
            owner = owners[name]
        if (dp, name) not in self._made:
            some = [
                one
                for one in self._fragments[name]
                if (dp is None or one.rank.dp == dp) and parallel_tensor_owner(tensor, one) == owner
            ]
            self._made[dp, name] = _indexes(some, _source_order)[name]
        return self._made[dp, name]


def _plan(
    source: WeightPlacementManifest | WeightManifest,
    target_placement: WeightPlacementManifest,
    target_parts: Sequence[WeightPlacementPart],
    target_tensors: Tensors,
    candidates: Candidates,
    planning_limits: PlanningLimits | None,
) -> LogicalTransferPlan:
    limits = PlanningLimits() if planning_limits is None else planning_limits
    if not isinstance(limits, PlanningLimits):
        raise ValueError(f"planning_limits must be PlanningLimits, not {type(limits).__name__}")
    operations: list[Region] = []
    segments = 0
    for part in target_parts:
        for fragment in part.fragments:
            found: list[Region] = []
            for one in candidates(fragment).candidates(fragment):
                region = _region(one, fragment)
                if region is None:
                    continue
                segments += region.segment_count
                check_limits(limits, len(operations) + len(found) + 1, [region.segment_count])
                if segments > limits.max_total_lowered_segments:
                    raise ValueError(f"transfer plan exceeds max_total_lowered_segments {limits.max_total_lowered_segments}")
                found.append(region)
            if not regions_exactly_cover(fragment, found):
                raise ValueError(f"target fragment is not fully covered: {fragment.fragment_id!r}")
            operations += found
    operations.sort(key=operation_order)
    placed = source if isinstance(source, WeightPlacementManifest) else None
    return LogicalTransferPlan(
        resource_id=target_placement.resource_id,
        revision=target_placement.revision,
        source_placement=placed,
        target_placement=target_placement,
        source_tensors=source.tensors,
        target_tensors=tuple(target_tensors[name] for name in sorted(target_tensors)),
        operations=tuple(operations),
        source_manifest=source if isinstance(source, WeightManifest) else None,
        planning_limits=limits,
        source_executors=() if placed is None else _executors(placed, {one.source.fragment_id for one in operations}),
        target_executors=_executors(target_placement, {one.target.fragment_id for one in operations}),
    )


def _region(source: SourceFragment, target: PlacementFragment) -> Region | None:
    box = _overlap_box(source, target)
    if box is None:
        return None
    base, to, inner, counts, of_strides, to_strides = layout_of(source, target, *box)
    return TransferRegion(target.tensor_id, source, target, *box, base, to, inner, counts, of_strides, to_strides)


def _executors(placement: WeightPlacementManifest, used: set[str]) -> tuple[PlacementExecutorPlan, ...]:
    """Returns the participants that have one of these fragments."""
    made = [
        PlacementExecutorPlan(
            placement.placement_id,
            part.participant_id,
            part.rank,
            tuple(fragment.fragment_id for fragment in part.fragments),
        )
        for part in placement.parts
        if any(fragment.fragment_id in used for fragment in part.fragments)
    ]
    return tuple(sorted(made, key=lambda one: one.rank.order))


