"""Completeness of a layout: every rank that should have a part of a tensor has it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import NoReturn

from mooncake.reshard.geometry import boxes_exactly_cover
from mooncake.reshard.weight.topology import ParallelTopology
from mooncake.reshard.weight.types import KINDS, OwnershipAxis, ParallelRank, PlacementFragment, ReplicatedAxis, SplitAxis, TensorDescriptor

Coordinates = tuple[int, ...]


def coordinates(rank: ParallelRank, kinds: Iterable[str]) -> Coordinates:
    """Returns the coordinates of a rank on some axes."""
    return tuple(getattr(rank, kind) for kind in kinds)


def _refuse(tensor: TensorDescriptor, why: str) -> NoReturn:
    raise ValueError(f"global placement tensor is not fully covered: tensor_id={tensor.tensor_id!r}: {why}")


def check_complete(topology: ParallelTopology, tensor: TensorDescriptor, fragments: Sequence[PlacementFragment]) -> None:
    """Raises `ValueError` unless the fragments of a tensor are all that its axes require."""
    _check_undeclared(topology, tensor, fragments)
    ranks = [one.rank for one in topology.participants]
    owning, replicated = tensor.of_kind(OwnershipAxis), tensor.of_kind(ReplicatedAxis)
    by_owner: dict[Coordinates, dict[Coordinates, list[PlacementFragment]]] = {}
    for fragment in fragments:
        of_owner = by_owner.setdefault(coordinates(fragment.rank, owning), {})
        of_owner.setdefault(coordinates(fragment.rank, replicated), []).append(fragment)
    for owner, replicas in by_owner.items():
        of_owner_ranks = [rank for rank in ranks if coordinates(rank, owning) == owner]
        if set(replicas) != {coordinates(rank, replicated) for rank in of_owner_ranks}:
            _refuse(tensor, f"missing or unexpected replicated-axis participant: owner={owner}")
        for replica, some in replicas.items():
            matching = [rank for rank in of_owner_ranks if coordinates(rank, replicated) == replica]
            _check_replica(topology, tensor, some, matching)


def _check_undeclared(topology: ParallelTopology, tensor: TensorDescriptor, fragments: Sequence[PlacementFragment]) -> None:
    declared = [axis.kind for axis in tensor.parallel_axes]
    varying = [kind for kind in declared if len({getattr(one.rank, kind) for one in fragments}) > 1]
    for kind in KINDS:
        if kind in declared or topology.size(kind) == 1:
            continue
        seen = {getattr(one.rank, kind) for one in fragments}
        if kind in ("dp", "pp") or len(seen) == 1:
            _refuse(tensor, f"active undeclared {kind} axis")
        if not varying:
            _refuse(tensor, f"undeclared {kind} axis varies, and no declared one does")
        of: dict[Coordinates, int] = {}
        for one in fragments:
            found = of.setdefault(coordinates(one.rank, varying), getattr(one.rank, kind))
            if found != getattr(one.rank, kind):
                _refuse(tensor, f"undeclared {kind} axis varies independently of the declared ones")


def _check_replica(
    topology: ParallelTopology,
    tensor: TensorDescriptor,
    fragments: Sequence[PlacementFragment],
    matching: Sequence[ParallelRank],
) -> None:
    """Checks one whole copy of a tensor against the ranks that share it."""
    origin = (0,) * len(tensor.global_shape)
    split = tensor.of_kind(SplitAxis)
    if split:
        found = {coordinates(one.rank, split) for one in fragments}
        if found != {coordinates(rank, split) for rank in matching}:
            _refuse(tensor, "missing or unexpected split-axis participant")
        values = [sorted({one[at] for one in found}) for at in range(len(split))]
        for kind, ranks in zip(split, values):
            if ranks != list(range(topology.size(kind))):
                _refuse(tensor, f"missing or unexpected split-axis participant: axis={kind} ranks={ranks}")
        if found != set(product(*values)):
            _refuse(tensor, "non-Cartesian split-axis coordinates")
    if not boxes_exactly_cover(origin, tensor.global_shape, [one.box for one in fragments]):
        _refuse(tensor, "the fragments of a copy leave a gap or overlap")
    for axis in tensor.parallel_axes:
        if isinstance(axis, SplitAxis):
            _check_split(tensor, axis, fragments)


def _check_split(tensor: TensorDescriptor, axis: SplitAxis, fragments: Sequence[PlacementFragment]) -> None:
    """Checks that the ranks of an axis divide its dimension among them."""
    of_ranks: dict[int, list[tuple[int, int]]] = {}
    for one in fragments:
        begin = one.global_offset[axis.dim]
        of_ranks.setdefault(getattr(one.rank, axis.kind), []).append((begin, begin + one.local_shape[axis.dim]))
    at = 0
    for begin, end in sorted(interval for some in of_ranks.values() for interval in _merged(some)):
        if begin != at:
            at = -1
            break
        at = end
    if at != tensor.global_shape[axis.dim]:
        _refuse(tensor, f"split-axis rank geometry: axis={axis.kind} dim={axis.dim}")


def _merged(intervals: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins intervals that touch or overlap."""
    made: list[tuple[int, int]] = []
    for begin, end in sorted(intervals):
        if made and begin <= made[-1][1]:
            made[-1] = (made[-1][0], max(made[-1][1], end))
        else:
            made.append((begin, end))
    return made
