"""Plans of transfers: regions to copy, and who copies them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Generic, Literal, TypeVar

from mooncake.reshard._values import integer, items, put, text, texts
from mooncake.reshard.contracts import ParticipantId, PlacementFragmentId, PlacementId, ResourceId, RevisionId, TensorId
from mooncake.reshard.geometry import box_contains, regions_exactly_cover
from mooncake.reshard.weight._planner.geometry import itemsize_of, layout_of
from mooncake.reshard.weight.placement import WeightPlacementManifest
from mooncake.reshard.weight.storage_manifest import StoredFragment, StoredManifestIdentity, WeightManifest
from mooncake.reshard.weight.types import ParallelRank, PlacementFragment, TensorDescriptor

__all__ = [
    "LogicalTransferOperation",
    "LogicalTransferPlan",
    "PipelineRouteGroup",
    "PlacementExecutorPlan",
    "PlanningLimits",
    "TransferRegion",
]

Source = TypeVar("Source")
Target = TypeVar("Target")
Side = Literal["source", "target"]


@dataclass(frozen=True)
class PlanningLimits:
    """Limits of a plan. A plan that exceeds one is refused."""

    max_transfer_regions: int = 1_000_000
    max_segments_per_region: int = 1_000_000
    max_total_lowered_segments: int = 10_000_000

    def __post_init__(self) -> None:
        for name in ("max_transfer_regions", "max_segments_per_region", "max_total_lowered_segments"):
            integer(getattr(self, name), name, 1)


@dataclass(frozen=True)
class TransferRegion(Generic[Source, Target]):
    """Common box of a source and a target fragment, as byte ranges of both.

    A region has one segment of `inner_bytes` for each combination of the loop counts.
    """

    tensor_id: TensorId
    source: Source
    target: Target
    overlap_offset: tuple[int, ...]
    overlap_shape: tuple[int, ...]
    source_base_offset: int
    target_base_offset: int
    inner_bytes: int
    outer_loop_counts: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]

    def __post_init__(self) -> None:
        source: Any = self.source
        target: Any = self.target
        if not isinstance(source, PlacementFragment | StoredFragment):
            raise ValueError(f"source must be a PlacementFragment or StoredFragment, not {type(source).__name__}")
        if not isinstance(target, PlacementFragment):
            raise ValueError(f"target must be a PlacementFragment, not {type(target).__name__}")
        text(self.tensor_id, "tensor_id")
        if not self.tensor_id == source.tensor_id == target.tensor_id:
            raise ValueError(f"transfer region joins different tensors: {source.tensor_id!r} and {target.tensor_id!r}")
        for side, fragment in (("source", source), ("target", target)):
            if not box_contains(*_box(fragment), self.overlap_offset, self.overlap_shape):
                raise ValueError(f"overlap of a transfer region is not inside its {side} fragment")
        if not self.overlap_shape or min(self.overlap_shape) < 1:
            raise ValueError("overlap of a transfer region must not be empty")
        if itemsize_of(source) != itemsize_of(target):
            raise ValueError("source and target of a transfer region have different item sizes")
        expected = layout_of(source, target, self.overlap_offset, self.overlap_shape)
        if (self.source_base_offset, self.target_base_offset) != expected[:2]:
            raise ValueError(f"base offsets of a transfer region must be {expected[0]} and {expected[1]}")
        given = (self.inner_bytes, self.outer_loop_counts, self.source_strides, self.target_strides)
        if given != expected[2:]:
            raise ValueError(f"transfer region is not canonical: {given}; expected {expected[2:]}")

    @property
    def segment_count(self) -> int:
        """Number of segments."""
        return math.prod(self.outer_loop_counts)

    @property
    def total_bytes(self) -> int:
        """Number of bytes to copy."""
        return self.segment_count * self.inner_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of a segment."""
        return self.inner_bytes

    @property
    def repeat(self) -> int:
        """Number of segments."""
        return self.segment_count

    @property
    def source_offset(self) -> int:
        """Offset of the first segment in the source fragment."""
        return self.source_base_offset

    @property
    def target_offset(self) -> int:
        """Offset of the first segment in the target fragment."""
        return self.target_base_offset

    @property
    def source_stride(self) -> int:
        """Distance of segments in the source. Raises `ValueError` if there are several."""
        return _only(self.source_strides, "source")

    @property
    def target_stride(self) -> int:
        """Distance of segments in the target. Raises `ValueError` if there are several."""
        return _only(self.target_strides, "target")

    def validate_bounds(self) -> None:
        """Raises `ValueError` if a segment exceeds its fragment."""
        for side, base, strides in (
            ("source", self.source_base_offset, self.source_strides),
            ("target", self.target_base_offset, self.target_strides),
        ):
            last = base + sum((count - 1) * stride for count, stride in zip(self.outer_loop_counts, strides))
            if base < 0 or last + self.inner_bytes > getattr(self, side).nbytes:
                raise ValueError(f"transfer region exceeds its {side} fragment")

    def iter_segments(self, *, max_segments: int) -> Iterator[tuple[int, int, int]]:
        """Yields (source offset, target offset, bytes) of each segment.

        Raises `ValueError` if there are more than `max_segments`.
        """
        integer(max_segments, "max_segments", 1)
        if self.segment_count > max_segments:
            raise ValueError(f"transfer region of {self.segment_count} segments exceeds max_segments {max_segments}")
        return self._segments()

    def _segments(self) -> Iterator[tuple[int, int, int]]:
        for at in product(*map(range, self.outer_loop_counts)):
            yield (
                self.source_base_offset + sum(i * stride for i, stride in zip(at, self.source_strides)),
                self.target_base_offset + sum(i * stride for i, stride in zip(at, self.target_strides)),
                self.inner_bytes,
            )


LogicalTransferOperation = TransferRegion
LogicalTransferRegion = TransferRegion


def _box(fragment: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return fragment.global_offset, fragment.local_shape


def _only(strides: tuple[int, ...], side: str) -> int:
    if len(strides) > 1:
        raise ValueError(f"{side}_stride of a transfer region is not one number: {strides}")
    return strides[0] if strides else 0


@dataclass(frozen=True)
class PlacementExecutorPlan:
    """Participant of a layout that takes part in a plan."""

    placement_id: PlacementId
    participant_id: ParticipantId
    rank: ParallelRank
    placement_fragment_ids: tuple[PlacementFragmentId, ...]

    def __post_init__(self) -> None:
        text(self.placement_id, "placement_id")
        text(self.participant_id, "participant_id")
        if not isinstance(self.rank, ParallelRank):
            raise ValueError(f"rank must be a ParallelRank, not {type(self.rank).__name__}")
        ids = tuple(PlacementFragmentId(one) for one in texts(self.placement_fragment_ids, "placement_fragment_ids"))
        if not ids or len(set(ids)) != len(ids):
            raise ValueError("placement_fragment_ids must be unique, and at least one")
        put(self, placement_fragment_ids=tuple(sorted(ids)))


@dataclass(frozen=True)
class PipelineRouteGroup:
    """Operations between the same pipeline stages."""

    source_pp: int | None
    source_pipeline_stage_id: int | None
    target_pp: int
    target_pipeline_stage_id: int | None
    operation_indices: tuple[int, ...]


@dataclass(frozen=True)
class LogicalTransferPlan:
    """Regions that make a layout out of another one, or out of weights in a store.

    Regions of one target fragment cover it exactly.
    """

    resource_id: ResourceId
    revision: RevisionId
    source_placement: WeightPlacementManifest | None
    target_placement: WeightPlacementManifest
    source_tensors: tuple[TensorDescriptor, ...]
    target_tensors: tuple[TensorDescriptor, ...]
    operations: tuple[TransferRegion[Any, PlacementFragment], ...]
    source_manifest: WeightManifest | None = None
    planning_limits: PlanningLimits = field(default_factory=PlanningLimits)
    source_executors: tuple[PlacementExecutorPlan, ...] = ()
    target_executors: tuple[PlacementExecutorPlan, ...] = ()
    source_manifest_identity: StoredManifestIdentity | None = field(init=False)

    def __post_init__(self) -> None:
        text(self.resource_id, "resource_id")
        text(self.revision, "revision")
        if (self.source_placement is None) == (self.source_manifest is None):
            raise ValueError("a transfer plan needs either a source_placement or a source_manifest")
        for value, kind, name in (
            (self.source_placement, WeightPlacementManifest, "source_placement"),
            (self.source_manifest, WeightManifest, "source_manifest"),
        ):
            if value is not None and not isinstance(value, kind):
                raise ValueError(f"{name} must be a {kind.__name__}, not {type(value).__name__}")
        if not isinstance(self.target_placement, WeightPlacementManifest):
            raise ValueError(f"target_placement must be a WeightPlacementManifest, not {type(self.target_placement).__name__}")
        if not isinstance(self.planning_limits, PlanningLimits):
            raise ValueError(f"planning_limits must be PlanningLimits, not {type(self.planning_limits).__name__}")
        stored = self.source_manifest
        put(self, source_manifest_identity=None if stored is None else stored.manifest_identity)
        lists: tuple[tuple[str, type[Any]], ...] = (
            ("source_tensors", TensorDescriptor),
            ("target_tensors", TensorDescriptor),
            ("operations", TransferRegion),
            ("source_executors", PlacementExecutorPlan),
            ("target_executors", PlacementExecutorPlan),
        )
        for name, of in lists:
            put(self, **{name: items(getattr(self, name), of, f"LogicalTransferPlan {name}")})
        for name in ("source_tensors", "target_tensors"):
            put(self, **{name: tuple(sorted(getattr(self, name), key=lambda one: one.tensor_id))})
        self._check()

    def _check(self) -> None:
        source: WeightPlacementManifest | WeightManifest | None = self.source_placement or self.source_manifest
        assert source is not None
        for name, ours in (("resource_id", self.resource_id), ("revision", self.revision)):
            if not ours == getattr(source, name) == getattr(self.target_placement, name):
                raise ValueError(f"{name} of a transfer plan differs from its source or target")
        check_limits(self.planning_limits, len(self.operations), [one.segment_count for one in self.operations])
        self._check_fragments()
        self._check_executors("source", self.source_executors, self.source_placement)
        self._check_executors("target", self.target_executors, self.target_placement)
        if self.source_tensors != tuple(sorted(source.tensors, key=lambda one: one.tensor_id)):
            raise ValueError("source tensor catalog differs from the tensors of the source")
        moved = {one.tensor_id for one in self.operations}
        if self.target_tensors != tuple(one for one in self.target_placement.tensors if one.tensor_id in moved):
            raise ValueError("target tensor catalog differs from the tensors of the operations")
        self._check_cover()

    def _check_fragments(self) -> None:
        if self.source_placement is not None:
            self.validate_source_placement_snapshot()
        else:
            self.validate_source_manifest_snapshot()
        known = {fragment.fragment_id: fragment for fragment in self.target_placement.fragments}
        for one in self.operations:
            if known.get(one.target.fragment_id) != one.target:
                raise ValueError(f"target placement fragment snapshots differ: {one.target.fragment_id!r}")

    def _check_executors(
        self, side: Side, executors: Sequence[PlacementExecutorPlan], placement: WeightPlacementManifest | None
    ) -> None:
        if placement is None:
            if executors:
                raise ValueError(f"a stored {side} has no {side} executors")
            return
        listed: set[PlacementFragmentId] = set()
        for executor in executors:
            part = placement.part(executor.participant_id)
            if part is None or executor.placement_id != placement.placement_id or executor.rank != part.rank:
                raise ValueError(f"{side} executor is not a participant of the placement: {executor.participant_id!r}")
            ids = tuple(fragment.fragment_id for fragment in part.fragments)
            if executor.placement_fragment_ids != ids:
                raise ValueError(f"{side} executor must list all fragments of its part: {executor.participant_id!r}")
            listed.update(ids)
        if len({executor.participant_id for executor in executors}) != len(executors):
            raise ValueError(f"duplicate {side} executor")
        if list(executors) != sorted(executors, key=lambda one: one.rank.order):
            raise ValueError(f"{side} executors must be sorted by rank")
        for one in self.operations:
            if getattr(one, side).fragment_id not in listed:
                raise ValueError(f"operation has no {side} executor metadata: {getattr(one, side).fragment_id!r}")

    def _check_cover(self) -> None:
        regions: dict[PlacementFragmentId, list[TransferRegion[Any, PlacementFragment]]] = {}
        for one in self.operations:
            regions.setdefault(one.target.fragment_id, []).append(one)
        known = {fragment.fragment_id: fragment for fragment in self.target_placement.fragments}
        selected = {fragment_id for executor in self.target_executors for fragment_id in executor.placement_fragment_ids}
        for fragment_id in sorted(selected):
            if not regions_exactly_cover(known[fragment_id], regions.get(fragment_id, [])):
                raise ValueError(f"target fragment is not fully covered: {fragment_id!r}")
        if list(self.operations) != sorted(self.operations, key=operation_order):
            raise ValueError("operations of a transfer plan must be sorted")

    @property
    def total_bytes(self) -> int:
        """Number of bytes to copy."""
        return sum(one.total_bytes for one in self.operations)

    @property
    def source_placement_id(self) -> PlacementId | None:
        """Identifier of the source layout, or `None` for weights in a store."""
        return None if self.source_placement is None else self.source_placement.placement_id

    @property
    def target_placement_id(self) -> PlacementId:
        """Identifier of the target layout."""
        return self.target_placement.placement_id

    def validate_source_manifest_snapshot(self) -> None:
        """Raises `ValueError` if operations do not read fragments of the stored manifest."""
        if self.source_manifest is None:
            raise ValueError("the transfer plan has no source manifest")
        if self.source_manifest.manifest_identity != self.source_manifest_identity:
            raise ValueError("source manifest identity differs from that of the plan")
        self._check_source(self.source_manifest.fragments, "source manifest fragment snapshots differ")

    def validate_source_placement_snapshot(self) -> None:
        """Raises `ValueError` if operations do not read fragments of the source layout."""
        if self.source_placement is None:
            raise ValueError("the transfer plan has no source placement")
        self._check_source(self.source_placement.fragments, "source placement fragment snapshots differ")

    def _check_source(self, fragments: Sequence[Any], words: str) -> None:
        known = {fragment.fragment_id: fragment for fragment in fragments}
        for one in self.operations:
            if known.get(one.source.fragment_id) != one.source:
                raise ValueError(f"{words}: {one.source.fragment_id!r}")

    @property
    def pipeline_routes(self) -> tuple[PipelineRouteGroup, ...]:
        """Operations by the pipeline stages of both ends."""
        groups: dict[tuple[int | None, int | None, int, int | None], list[int]] = {}
        for index, one in enumerate(self.operations):
            groups.setdefault(_route(one), []).append(index)
        return tuple(
            PipelineRouteGroup(*route, tuple(groups[route]))
            for route in sorted(groups, key=lambda route: [(at is not None, at or 0) for at in route])
        )

    def operation_indices_for_executor(self, executor: PlacementExecutorPlan, side: Side) -> tuple[int, ...]:
        """Returns the numbers of the operations that a participant takes part in."""
        if side not in ("source", "target"):
            raise ValueError(f"side must be source or target, not {side!r}")
        if executor not in (self.source_executors if side == "source" else self.target_executors):
            raise ValueError(f"unknown {side} executor: {executor!r}")
        mine = set(executor.placement_fragment_ids)
        return tuple(index for index, one in enumerate(self.operations) if getattr(one, side).fragment_id in mine)


def _route(one: TransferRegion[Any, PlacementFragment]) -> tuple[int | None, int | None, int, int | None]:
    is_placed = isinstance(one.source, PlacementFragment)
    return (
        one.source.rank.pp if is_placed else None,
        one.source.pipeline_stage_id if is_placed else None,
        one.target.rank.pp,
        one.target.pipeline_stage_id,
    )


def operation_order(one: TransferRegion[Any, PlacementFragment]) -> tuple[str, int, str, int]:
    """Returns the order of operations in a plan."""
    return one.target.fragment_id, one.target_base_offset, one.source.fragment_id, one.source_base_offset


def check_limits(limits: PlanningLimits, regions: int, segments: Sequence[int]) -> None:
    """Raises `ValueError` if a plan exceeds a limit."""
    if regions > limits.max_transfer_regions:
        raise ValueError(f"transfer plan exceeds max_transfer_regions {limits.max_transfer_regions}")
    if segments and max(segments) > limits.max_segments_per_region:
        raise ValueError(f"transfer region exceeds max_segments_per_region {limits.max_segments_per_region}")
    if sum(segments) > limits.max_total_lowered_segments:
        raise ValueError(f"transfer plan exceeds max_total_lowered_segments {limits.max_total_lowered_segments}")
