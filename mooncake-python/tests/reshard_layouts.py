"""Random layouts of weights for the tests of `mooncake.reshard`."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

from mooncake.reshard.weight import (
    OwnershipAxis,
    ParallelRank,
    ParallelTopology,
    PlacementFragment,
    ReplicatedAxis,
    SplitAxis,
    StoredFragment,
    TensorDescriptor,
    TopologyParticipant,
    WeightManifest,
    WeightPlacementManifest,
)

KINDS = ("dp", "pp", "ep", "tp")


def cuts(chance: random.Random, extent: int, parts: int) -> list[tuple[int, int]]:
    """Cuts a range into parts of random lengths."""
    at = [0, *sorted(chance.sample(range(1, extent), parts - 1)), extent]
    return list(zip(at, at[1:]))


def boxes_of(intervals: list[list[tuple[int, int]]]) -> Any:
    """Yields the boxes whose intervals are combinations of the given ones."""
    for chosen in itertools.product(*intervals):
        yield tuple(begin for begin, _ in chosen), tuple(end - begin for begin, end in chosen)


def topology(chance: random.Random, name: str) -> ParallelTopology:
    sizes = {kind: chance.choice([1, 1, 2, 3]) for kind in KINDS}
    ranks = [dict(zip(KINDS, at)) for at in itertools.product(*(range(sizes[kind]) for kind in KINDS))]
    participants = tuple(TopologyParticipant(f"{name}{at}", ParallelRank(**rank)) for at, rank in enumerate(ranks))
    return ParallelTopology(**{f"{kind}_size": size for kind, size in sizes.items()}, participants=participants)


def shapes(chance: random.Random) -> dict[str, tuple[tuple[int, ...], int]]:
    """Returns shapes and item sizes of some tensors."""
    return {
        f"w{at}": (tuple(chance.randint(3, 7) for _ in range(chance.randint(1, 3))), chance.choice([1, 2, 4]))
        for at in range(chance.randint(1, 3))
    }


def tensor(chance: random.Random, name: str, shape: tuple[int, ...], itemsize: int, sizes: dict[str, int]) -> TensorDescriptor:
    axes: list[Any] = []
    free = list(range(len(shape)))
    for kind in chance.sample(KINDS, 4):
        if sizes[kind] == 1 and chance.random() < 0.7:
            continue
        wanted = chance.choice(["split", "replicated", "ownership"])
        if wanted == "split" and kind == "ep" and 0 in free:
            free.remove(0)
            axes.append(SplitAxis("ep", 0))
        elif wanted == "split" and kind == "tp" and free:
            axes.append(SplitAxis("tp", free.pop(chance.randrange(len(free)))))
        elif wanted == "ownership":
            axes.append(OwnershipAxis(kind))
        else:
            axes.append(ReplicatedAxis(kind))
    dims = tuple(sorted(axis.dim for axis in axes if isinstance(axis, SplitAxis)))
    return TensorDescriptor(name, shape, "dtype", itemsize, dims, "plain", tuple(axes))


def fragments_of(chance: random.Random, one: TensorDescriptor, where: ParallelTopology) -> list[PlacementFragment]:
    """Returns the fragments that the axes of a tensor require, cut into boxes at random. Copies are
    cut alike.
    """
    sizes = {kind: getattr(where, f"{kind}_size") for kind in KINDS}
    owning = [axis.kind for axis in one.parallel_axes if isinstance(axis, OwnershipAxis)]
    owners = list(itertools.product(*(range(sizes[kind]) for kind in owning)))
    # A transfer needs one owner among data-parallel ranks.
    chosen = chance.sample(owners, 1 if "dp" in owning else chance.randint(1, len(owners)))
    split = {axis.dim: axis.kind for axis in one.parallel_axes if isinstance(axis, SplitAxis)}
    of_dims = {dim: cuts(chance, one.global_shape[dim], sizes[kind]) for dim, kind in split.items()}
    made = []
    cut: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for participant in where.participants:
        rank = participant.rank
        if tuple(getattr(rank, kind) for kind in owning) not in chosen:
            continue
        intervals = []
        for dim, extent in enumerate(one.global_shape):
            part = getattr(rank, split[dim]) if dim in split else 0
            if (dim, part) not in cut:
                begin, end = of_dims[dim][part] if dim in split else (0, extent)
                pieces = cuts(chance, end - begin, chance.randint(1, min(2, end - begin)))
                cut[dim, part] = [(begin + low, begin + high) for low, high in pieces]
            intervals.append(cut[dim, part])
        stage = chance.choice([None, None, 1])
        for offset, shape in boxes_of(intervals):
            size = math.prod(shape) * one.itemsize
            made.append(PlacementFragment(one.tensor_id, offset, shape, size, rank, stage))
    return made


def placement(chance: random.Random, name: str, of: dict[str, tuple[tuple[int, ...], int]]) -> WeightPlacementManifest:
    """Returns a layout of these tensors on ranks of its own."""
    where = topology(chance, name)
    sizes = {kind: getattr(where, f"{kind}_size") for kind in KINDS}
    tensors = [tensor(chance, tensor_id, shape, itemsize, sizes) for tensor_id, (shape, itemsize) in of.items()]
    fragments = [fragment for one in tensors for fragment in fragments_of(chance, one, where)]
    return WeightPlacementManifest.from_fragments(
        resource_id="model", revision="r1", weight_generation=1, placement_set_id=name, topology=where,
        tensors=tensors, fragments=fragments,
    )  # fmt: skip


def stored(chance: random.Random, of: dict[str, tuple[tuple[int, ...], int]]) -> WeightManifest:
    """Returns these tensors in a store, cut at random, in a few objects."""
    tensors, fragments = [], []
    ends = {f"g/payload/{at}": 0 for at in range(2)}
    for name, (shape, itemsize) in of.items():
        tensors.append(TensorDescriptor(name, shape, "dtype", itemsize, (), "plain", ()))
        for offset, extent in boxes_of([cuts(chance, length, chance.randint(1, 3)) for length in shape]):
            key = chance.choice(sorted(ends))
            size = math.prod(extent) * itemsize
            fragments.append(StoredFragment(f"f{len(fragments)}", name, offset, extent, key, ends[key], size))
            ends[key] += size
    return WeightManifest("n", "model", "r1", 1, "g", "g/manifest", tuple(tensors), tuple(fragments), "now")


def summary(plan: Any) -> list[Any]:
    """Returns everything that a plan decides, as JSON."""
    return [
        [
            [one.tensor_id, one.source.fragment_id, one.target.fragment_id, one.overlap_offset, one.overlap_shape,
             one.source_base_offset, one.target_base_offset, one.inner_bytes, one.outer_loop_counts,
             one.source_strides, one.target_strides]
            for one in plan.operations
        ],
        [[route.source_pp, route.source_pipeline_stage_id, route.target_pp, route.target_pipeline_stage_id,
          route.operation_indices] for route in plan.pipeline_routes],
        [[one.participant_id, plan.operation_indices_for_executor(one, "source")] for one in plan.source_executors],
        [[one.participant_id, plan.operation_indices_for_executor(one, "target")] for one in plan.target_executors],
        [one.tensor_id for one in plan.source_tensors], [one.tensor_id for one in plan.target_tensors],
        plan.total_bytes, plan.source_placement_id, plan.target_placement_id,
    ]  # fmt: skip
