"""`mooncake.reshard`: values, complete layouts, and plans compared with copies of elements."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
import random
import subprocess
import sys
import typing

import pytest
from reshard_layouts import placement, shapes, stored

from mooncake import reshard
from mooncake.reshard import contracts, geometry
from mooncake.reshard._compat import _strict_zip
from mooncake.reshard.weight import (
    OwnershipAxis,
    ParallelRank,
    ParallelTopology,
    PlacementFragment,
    PlanningLimits,
    ReplicatedAxis,
    RuntimeBindingFragment,
    SplitAxis,
    StoredFragment,
    TensorDescriptor,
    TopologyParticipant,
    WeightManifest,
    WeightPlacementManifest,
    WeightPlacementPart,
    WeightRuntimeBindingManifest,
    manifest,
    plan_placement_transfer,
    plan_placement_transfer_to_local_target,
    plan_stored_transfer_to_target_placement,
    validate_runtime_binding,
    validate_runtime_bindings,
    weight_placement_from_json,
    weight_placement_to_json,
)
from mooncake.reshard.weight._planner.geometry import BoxIndex, _overlap_box


@pytest.fixture
def chance():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed)


def ranks(**sizes):
    """Returns a topology of all ranks of these sizes."""
    every = {f"{kind}_size": sizes.get(kind, 1) for kind in ("dp", "pp", "ep", "tp")}
    at = itertools.product(*(range(every[f"{kind}_size"]) for kind in ("dp", "pp", "ep", "tp")))
    made = [ParallelRank(dp=dp, pp=pp, ep=ep, tp=tp) for dp, pp, ep, tp in at]
    return ParallelTopology(**every, participants=tuple(TopologyParticipant(f"p{i}", rank) for i, rank in enumerate(made)))


def tensor(**change):
    return TensorDescriptor(**{
        "tensor_id": "t", "global_shape": (4, 6), "dtype": "float16", "itemsize": 2, "shard_dims": (),
        "layout_fingerprint": "plain", "parallel_axes": (), **change,
    })  # fmt: skip


def fragment(offset=(0, 0), shape=(4, 6), rank=None, **change):
    size = 2
    for extent in shape:
        size *= extent
    return PlacementFragment(**{
        "tensor_id": "t", "global_offset": offset, "local_shape": shape, "nbytes": size, "rank": rank or ParallelRank(), **change,
    })  # fmt: skip


def layout(tensors=None, fragments=None, topology=None, **change):
    return WeightPlacementManifest.from_fragments(**{
        "resource_id": "m", "revision": "r1", "weight_generation": 3, "placement_set_id": "s",
        "topology": topology or ranks(), "tensors": tensors or [tensor()], "fragments": fragments or [fragment()], **change,
    })  # fmt: skip


# Plans against copies of single elements.


def elements(shape, offset, extent):
    """Yields the number of each element of a box, in row-major order."""
    for at in itertools.product(*(range(begin, begin + length) for begin, length in zip(offset, extent))):
        number = 0
        for index, length in zip(at, shape):
            number = number * length + index
        yield number


def bytes_of(shape, itemsize, one):
    return b"".join((7 + n).to_bytes(4, "little")[:itemsize] for n in elements(shape, one.global_offset, one.local_shape))


def check_by_copying(plan, tensors, targets):
    """Executes a plan on memory. Every byte of a target must come from the same element, once."""
    memory = {one.fragment_id: bytearray(one.nbytes) for one in targets}
    counts = {one.fragment_id: bytearray(one.nbytes) for one in targets}
    for operation in plan.operations:
        shape, itemsize = tensors[operation.tensor_id]
        source = bytes_of(shape, itemsize, operation.source)
        operation.validate_bounds()
        segments = list(operation.iter_segments(max_segments=operation.segment_count))
        assert sum(size for *_, size in segments) == operation.total_bytes
        for of, to, size in segments:
            name = operation.target.fragment_id
            memory[name][to : to + size] = source[of : of + size]
            for at in range(to, to + size):
                counts[name][at] += 1
    for one in targets:
        shape, itemsize = tensors[one.tensor_id]
        assert bytes(memory[one.fragment_id]) == bytes_of(shape, itemsize, one)
        assert set(counts[one.fragment_id]) == {1}


def test_random_layouts(chance):
    for _ in range(60):
        of = shapes(chance)
        source, target, weights = placement(chance, "s", of), placement(chance, "t", of), stored(chance, of)
        plan = plan_placement_transfer(source, target)
        check_by_copying(plan, of, target.fragments)
        check_replicas(plan, source)
        check_by_copying(plan_stored_transfer_to_target_placement(weights, target), of, target.fragments)
        part = chance.choice([part for part in target.parts if part.fragments])
        local = plan_placement_transfer_to_local_target(source, target, part.participant_id)
        check_by_copying(local, of, part.fragments)
        mine = {one.fragment_id for one in part.fragments}
        assert local.operations == tuple(one for one in plan.operations if one.target.fragment_id in mine)
        assert pickle.loads(pickle.dumps(plan)) == plan and dataclasses.replace(plan) == plan
        assert weight_placement_from_json(weight_placement_to_json(source)) == source
        assert WeightManifest.from_json(weights.to_json().encode()) == weights
        routes = plan.pipeline_routes
        assert sorted(i for route in routes for i in route.operation_indices) == list(range(len(plan.operations)))
        for side, executors in (("source", plan.source_executors), ("target", plan.target_executors)):
            indices = [i for one in executors for i in plan.operation_indices_for_executor(one, side)]
            assert sorted(indices) == list(range(len(plan.operations)))


def check_replicas(plan, source):
    """Checks from which data-parallel rank each target reads."""
    for one in plan.operations:
        described = next(t for t in source.tensors if t.tensor_id == one.tensor_id)
        if "dp" in described.of_kind(OwnershipAxis):
            continue
        replicas = sorted({f.rank.dp for f in source.fragments if f.tensor_id == one.tensor_id})
        assert one.source.rank.dp == replicas[one.target.rank.dp % len(replicas)]


def test_damaged_layouts(chance):
    """A layout without one of its fragments is never complete."""
    for _ in range(60):
        made = placement(chance, "s", shapes(chance))
        gone = chance.choice(made.fragments)
        left = [one for one in made.fragments if one is not gone]
        used = {one.tensor_id for one in left}
        if gone.tensor_id not in used:
            continue
        others = [one for one in left if one.tensor_id == gone.tensor_id]
        owning = next(t for t in made.tensors if t.tensor_id == gone.tensor_id).of_kind(OwnershipAxis)
        owner = [getattr(gone.rank, kind) for kind in owning]
        if not any([getattr(one.rank, kind) for kind in owning] == owner for one in others):
            # The owner had nothing else.
            continue
        with pytest.raises(ValueError, match="global placement tensor is not fully covered"):
            layout(made.tensors, left, made.topology)


def test_boxes(chance):
    for dims in (1, 2, 3):
        for _ in range(150):
            boxes = [
                (tuple(chance.randint(0, 6) for _ in range(dims)), tuple(chance.randint(0, 3) for _ in range(dims)))
                for _ in range(chance.randint(0, 6))
            ]
            points = [set(itertools.product(*(range(o, o + s) for o, s in zip(*box)))) for box in boxes]
            overlap = any(a & b for a, b in itertools.combinations(points, 2))
            assert geometry.boxes_overlap(boxes) == overlap, boxes
            whole = set(itertools.product(range(4), repeat=dims))
            covered = bool(boxes) and not overlap and set().union(*points) == whole
            filled = [box for box in boxes if all(box[1])]
            if filled == boxes:
                assert geometry.boxes_exactly_cover((0,) * dims, (4,) * dims, boxes) == covered, boxes
    grid = [((i, j), (1, 1)) for i in range(90) for j in range(90)]
    assert geometry.boxes_exactly_cover((0, 0), (90, 90), grid) and not geometry.boxes_exactly_cover((0, 0), (90, 90), grid[1:])
    cubes = [((i, j, k), (1, 1, 1)) for i in range(20) for j in range(20) for k in range(20)]
    with pytest.raises(ValueError, match="high-dimensional overlap budget"):
        geometry.boxes_overlap(cubes)
    assert geometry.box_contains((0, 0), (2, 2), (1, 0), (1, 2)) and not geometry.box_contains((0,), (2,), (1,), (2,))


def test_candidates(chance):
    for _ in range(100):
        some = [fragment((chance.randint(0, 9), chance.randint(0, 9)), (chance.randint(1, 5), chance.randint(1, 5))) for _ in range(12)]
        target = chance.choice(some)
        found = [one for one in BoxIndex(some).candidates(target) if _overlap_box(one, target)]
        assert sorted(one.fragment_id for one in found) == sorted(one.fragment_id for one in some if _overlap_box(one, target))


def test_many_experts():
    experts = 256

    def split(name, step):
        axis = (SplitAxis("ep", 0),)
        tensors = [tensor(global_shape=(experts, 8, 8), shard_dims=(0,), parallel_axes=axis)]
        count = experts // step
        participants = tuple(TopologyParticipant(f"{name}{i}", ParallelRank(ep=i)) for i in range(count))
        where = ParallelTopology(tp_size=1, pp_size=1, ep_size=count, dp_size=1, participants=participants)
        some = [fragment((i * step, 0, 0), (step, 8, 8), ParallelRank(ep=i)) for i in range(count)]
        return layout(tensors, some, where)

    plan = plan_placement_transfer(split("a", 1), split("b", 4))
    assert len(plan.operations) == experts and all(one.outer_loop_counts == () for one in plan.operations)


# Identifiers.


def test_known_identifiers():
    rows = [fragment((2 * i, 0), (2, 6), ParallelRank(tp=i), tensor_id="w") for i in range(2)]
    w = tensor(tensor_id="w", shard_dims=(0,), parallel_axes=(SplitAxis("tp", 0),))
    where = ParallelTopology(
        tp_size=2, pp_size=1, ep_size=1, dp_size=1,
        participants=(TopologyParticipant("s1", ParallelRank(tp=1)), TopologyParticipant("s0", ParallelRank())),
    )  # fmt: skip
    source = layout([w], rows, where)
    assert [one.fragment_id for one in rows] == [
        "sha256:1e46d19dfd55e8b3542271aa59f3e182c70ed3553b212b46059e4e754f8e4f59",
        "sha256:57d11173bb5552e6b0ca52f3bdfe0cc00874ce41a909e2bc8a21bf737d6ba155",
    ]
    assert where.topology_id == "sha256:775c76de4588a3eeea406e7654a3e059875384ba2855db91fb92e6a78e7f57d7"
    assert source.placement_id == "sha256:6fba8d745e88105d755933b0a2cca3e2f2fb2443c8c80b22be4e9adb746f6670"
    assert source.digest == "e09420b6b42a89e86327c9b00ac8eab04f81a0663aeaf8b597ff6a2787a43095"
    columns = [fragment((0, 2 * i), (4, 2), ParallelRank(tp=i), tensor_id="w") for i in range(3)]
    target = layout([dataclasses.replace(w, shard_dims=(1,), parallel_axes=(SplitAxis("tp", 1),))], columns, ranks(tp=3))
    plan = plan_placement_transfer(source, target)
    assert len(plan.operations) == 6
    (one,) = [one for one in plan.operations if one.source == rows[1] and one.target == columns[2]]
    assert (one.overlap_offset, one.overlap_shape, one.source_base_offset, one.target_base_offset) == ((2, 4), (2, 2), 8, 8)
    assert (one.inner_bytes, one.outer_loop_counts, one.source_strides, one.target_strides) == (4, (2,), (12,), (4,))
    assert list(one.iter_segments(max_segments=2)) == [(8, 8, 4), (20, 12, 4)]
    assert (one.segment_count, one.repeat, one.nbytes, one.source_stride, one.target_stride) == (2, 2, 4, 12, 4)
    with pytest.raises(ValueError, match="exceeds max_segments"):
        one.iter_segments(max_segments=1)
    for limits, words in (
        (PlanningLimits(max_transfer_regions=5), "max_transfer_regions"),
        (PlanningLimits(max_segments_per_region=1), "max_segments_per_region"),
        (PlanningLimits(max_total_lowered_segments=11), "max_total_lowered_segments"),
    ):
        with pytest.raises(ValueError, match=words):
            plan_placement_transfer(source, target, planning_limits=limits)


# Refusals.

BOTH = [fragment(), fragment(rank=ParallelRank(tp=1))]
ROWS = [fragment((2 * i, 0), (2, 6), ParallelRank(tp=i)) for i in range(2)]
COLUMNS = [fragment((0, 3 * i), (4, 3), ParallelRank(tp=i)) for i in range(2)]
SPLIT = tensor(shard_dims=(0,), parallel_axes=(SplitAxis("tp", 0),))


def two(kind):
    return [fragment(), fragment(rank=ParallelRank(**{kind: 1}))]


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda: ParallelRank(dp=True), "integer"),
        (lambda: ParallelRank(tp=-1), "at least"),
        (lambda: SplitAxis("dp", 0), "split semantics"),
        (lambda: SplitAxis("x", 0), "kind"),
        (lambda: SplitAxis("ep", 1), "EP must split.*leading"),
        (lambda: tensor(global_shape=()), "global_shape"),
        (lambda: tensor(global_shape={4}), "global_shape must contain integers"),
        (lambda: tensor(dtype=""), "dtype"),
        (lambda: tensor(shard_dims=(0, 0)), "duplicates"),
        (lambda: tensor(shard_dims=(1, 0)), "sorted"),
        (lambda: tensor(shard_dims=(2,)), "out-of-range"),
        (lambda: tensor(parallel_axes=("tp",)), "explicit axis"),
        (lambda: tensor(parallel_axes=(ReplicatedAxis("tp"), OwnershipAxis("tp"))), "duplicate"),
        (lambda: tensor(shard_dims=(0,), parallel_axes=(SplitAxis("tp", 0), SplitAxis("ep", 0))), "share a dimension"),
        (lambda: tensor(parallel_axes=(SplitAxis("tp", 0),)), "shard_dims"),
        (lambda: tensor(shard_dims=(0,), parallel_axes=(SplitAxis("ep", 0),), expert_id=1), "individually allocated expert"),
        (lambda: fragment(aliases=("t",)), "alias"),
        (lambda: fragment(aliases=("u", "v")), "alias"),
        (lambda: fragment(aliases=("t", "t")), "aliases"),
        (lambda: fragment(nbytes=1 << 64), "64-bit"),
        (lambda: ranks(tp=2).participant("what"), "unknown"),
        (lambda: dataclasses.replace(ranks(tp=2), tp_size=1), "tp rank"),
        (lambda: dataclasses.replace(ranks(), topology_id="x"), "topology_id"),
        (lambda: layout(fragments=[fragment(shape=(2, 6))]), "not fully covered"),
        (lambda: layout(fragments=[fragment(shape=(5, 6))]), "out of bounds"),
        (lambda: layout(fragments=[fragment(nbytes=46)]), "byte size mismatch"),
        (lambda: layout(fragments=[fragment(shape=(2, 6)), fragment((1, 0), (2, 6))]), "logical fragment boxes overlap"),
        (lambda: layout(tensors=[tensor(), tensor(tensor_id="u")]), "unreferenced tensor"),
        (lambda: layout(fragments=[fragment(aliases=("t", "u"))]), "alias group references unknown tensor"),
        (lambda: layout(topology=ranks(tp=2)), "not fully covered.*undeclared tp axis"),
        (lambda: layout(topology=ranks(dp=2), fragments=two("dp")), "undeclared dp axis"),
        (lambda: layout(topology=ranks(pp=2), fragments=two("pp")), "undeclared pp axis"),
        (lambda: layout(topology=ranks(ep=2), fragments=two("ep")), "undeclared ep axis"),
        (
            lambda: layout([tensor(parallel_axes=(ReplicatedAxis("tp"),))], topology=ranks(tp=2)),
            "missing or unexpected replicated-axis participant",
        ),
        (lambda: layout([SPLIT], ROWS[:1], ranks(tp=2)), "missing or unexpected split-axis participant"),
        (lambda: layout([SPLIT], COLUMNS, ranks(tp=2)), "split-axis rank geometry"),
        (lambda: layout([SPLIT], [ROWS[0], fragment((1, 0), (2, 6), ParallelRank(tp=1))], ranks(tp=2)), "not fully covered"),
        (lambda: layout(placement_id="x"), "canonical logical content"),
        (lambda: plan_placement_transfer(layout(), layout(revision="r2")), "revision"),
        (lambda: plan_placement_transfer(layout(), layout(weight_generation=4)), "weight_generation differ"),
        (lambda: plan_placement_transfer(layout(), layout([tensor(layout_fingerprint="x")])), "layout mismatch"),
        (lambda: plan_placement_transfer(layout(), layout([tensor(dtype="x")])), "tensor descriptor mismatch"),
        (
            lambda: plan_placement_transfer(layout(), layout([tensor(tensor_id="u")], [fragment(tensor_id="u")])),
            "target manifests are missing tensors",
        ),
        (lambda: plan_placement_transfer_to_local_target(layout(), layout(), "what"), "unknown"),
        (lambda: weight_placement_from_json("{}"), "schema fields"),
        (lambda: weight_placement_from_json('{"a": 1, "a": 2}'), "duplicate JSON field"),
        (lambda: weight_placement_from_json(weight_placement_to_json(layout()).replace("model_weight", "x")), "resource_kind"),
        (lambda: list(_strict_zip([1], [2, 3])), "different lengths"),
    ],
)  # fmt: skip
def test_refusals(work, words):
    with pytest.raises(ValueError, match=words):
        work()


def test_undeclared_axes_that_follow_others():
    some = [fragment((2 * i, 0), (2, 6), ParallelRank(tp=i, ep=i)) for i in range(2)]
    where = ParallelTopology(
        tp_size=2, pp_size=1, ep_size=2, dp_size=1,
        participants=tuple(TopologyParticipant(f"p{i}", ParallelRank(tp=i, ep=i)) for i in range(2)),
    )  # fmt: skip
    assert layout([SPLIT], some, where).topology.world_size == 2
    with pytest.raises(ValueError, match="undeclared ep axis.*independently"):
        layout([SPLIT], [fragment((2 * tp, 0), (2, 6), ParallelRank(tp=tp, ep=ep)) for tp in range(2) for ep in range(2)], ranks(tp=2, ep=2))


def test_owners():
    owned = tensor(parallel_axes=(OwnershipAxis("dp"),))
    two_owners = layout([owned], [fragment(), fragment(rank=ParallelRank(dp=1))], ranks(dp=2))
    one_owner = layout([owned], [fragment(rank=ParallelRank(dp=1))], ranks(dp=2))
    assert plan_placement_transfer(one_owner, layout()).operations[0].source.rank.dp == 1
    with pytest.raises(ValueError, match="ambiguous declared owners"):
        plan_placement_transfer(two_owners, layout())
    replicated = tensor(parallel_axes=(ReplicatedAxis("dp"),))
    copies = {n: layout([replicated], [fragment(rank=ParallelRank(dp=dp)) for dp in range(n)], ranks(dp=n)) for n in (2, 3)}
    plan = plan_placement_transfer(copies[2], copies[3])
    assert {one.target.rank.dp: one.source.rank.dp for one in plan.operations} == {0: 0, 1: 1, 2: 0}


def test_parts_of_a_layout():
    made = layout([SPLIT], ROWS, ranks(tp=2))

    def again(parts):
        return WeightPlacementManifest(
            resource_id="m", revision="r1", weight_generation=3, placement_set_id="s", topology=made.topology, parts=parts
        )

    assert again(made.parts[::-1]) == made and isinstance(made.parts[0], WeightPlacementPart)
    for parts, words in (
        (made.parts[:1], "missing topology participant"),
        ((*made.parts, made.parts[0]), "duplicate placement participant"),
        ((*made.parts, dataclasses.replace(made.parts[0], participant_id="x")), "unknown"),
        ((made.parts[0], dataclasses.replace(made.parts[1], revision="r2")), "revision"),
        ((made.parts[0], dataclasses.replace(made.parts[1], topology_id="x")), "topology_id"),
    ):
        with pytest.raises(ValueError, match=words):
            again(parts)


def test_changed_plans():
    plan = plan_placement_transfer(layout(), layout())
    other = layout(fragments=[fragment(shape=(2, 6)), fragment((2, 0), (2, 6))])
    for change, words in (
        ({"source_placement": other}, "source placement fragment snapshots differ"),
        ({"source_placement": None}, "source_placement"),
        ({"source_executors": ()}, "no source executor metadata"),
        ({"source_tensors": ()}, "source tensor catalog differs"),
        ({"target_tensors": ()}, "target tensor catalog differs"),
    ):
        with pytest.raises(ValueError, match=words):
            dataclasses.replace(plan, **change)
    (one,) = plan.operations
    for change, words in (
        ({"inner_bytes": 24}, "canonical"),
        ({"source_base_offset": 2}, "base offset"),
        ({"overlap_offset": (9, 9)}, "inside"),
    ):
        with pytest.raises(ValueError, match=words):
            dataclasses.replace(one, **change)


# Addresses.


def bound(one, address=4096, **change):
    return RuntimeBindingFragment(**{
        "placement_fragment_id": one.fragment_id, "fragment_id": f"r{address}", "address": address, "nbytes": one.nbytes,
        "worker_id": "w", "endpoint": "e", "device": "d", "itemsize": 2, "local_shape": list(one.local_shape),
        "strides_bytes": contracts.row_major_strides(one.local_shape, 2), "storage_address": address,
        "storage_nbytes": one.nbytes, "storage_offset_bytes": 0, **change,
    })  # fmt: skip


def binding(of, participant, fragments, **change):
    return WeightRuntimeBindingManifest(**{
        "resource_id": "m", "placement_id": of.placement_id, "placement_digest": of.digest, "instance_id": "i",
        "generation": 0, "lease_id": "l", "revision": "r1", "participant_id": participant, "fragments": tuple(fragments), **change,
    })  # fmt: skip


def test_bindings():
    made = layout([SPLIT], ROWS, ranks(tp=2))
    first, second = binding(made, "p0", [bound(ROWS[0])]), binding(made, "p1", [bound(ROWS[1], 8192)])
    validate_runtime_binding(made, first)
    validate_runtime_bindings(made, [second, first])
    same = bound(ROWS[0], owner=object())
    assert same == bound(ROWS[0]) and "owner" not in repr(same) and pickle.loads(pickle.dumps(same)).owner is None
    for work, words in (
        (lambda: validate_runtime_binding(made, None), "WeightRuntimeBindingManifest"),
        (lambda: validate_runtime_binding(made, dataclasses.replace(first, revision="x")), "revision"),
        (lambda: validate_runtime_binding(made, dataclasses.replace(first, placement_digest="0" * 64)), "digest"),
        (lambda: dataclasses.replace(first, placement_digest="x"), "SHA-256"),
        (lambda: binding(made, "p0", [bound(ROWS[0]), bound(ROWS[0], 8192)]), "duplicate placement fragment"),
        (lambda: validate_runtime_binding(made, binding(made, "what", [])), "unknown runtime binding participant"),
        (lambda: validate_runtime_binding(made, binding(made, "p0", [])), "missing placement fragment"),
        (lambda: validate_runtime_binding(made, binding(made, "p0", [bound(ROWS[1])])), "unknown placement fragment"),
        (lambda: validate_runtime_binding(made, binding(made, "p0", [bound(ROWS[0], nbytes=20)])), "byte size"),
        (lambda: validate_runtime_binding(made, binding(made, "p0", [bound(ROWS[0], strides_bytes=(14, 2))])), "stride"),
        (lambda: validate_runtime_bindings(made, [first, first]), "duplicate runtime binding participant"),
        (lambda: validate_runtime_bindings(made, [first]), "missing runtime binding participant"),
        (
            lambda: validate_runtime_bindings(made, [first, binding(made, "p1", [bound(ROWS[1], 4100, storage_address=4100)])]),
            "address ranges overlap",
        ),
        (
            lambda: validate_runtime_bindings(
                made, [first, binding(made, "p1", [bound(ROWS[1], 4120, storage_address=4100, storage_offset_bytes=20, storage_nbytes=44)])]
            ),
            "storage allocation ranges overlap",
        ),
        (lambda: bound(ROWS[0], storage_nbytes=8), "storage allocation"),
        (lambda: bound(ROWS[0], storage_address=1), "storage_address plus"),
        (lambda: bound(ROWS[0], strides_bytes=(0, 2)), "strides_bytes"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            work()
    # Another worker has memory of its own.
    other = binding(made, "p1", [bound(ROWS[1], 4096, worker_id="w2")])
    validate_runtime_bindings(made, [first, other])
    names = ("t", "u")
    tied = [fragment(aliases=names), fragment(aliases=names, tensor_id="u")]
    shared = layout([tensor(), tensor(tensor_id="u")], tied)
    validate_runtime_binding(shared, binding(shared, "p0", [bound(tied[0]), bound(tied[1], fragment_id="other")]))
    with pytest.raises(ValueError, match="address ranges overlap"):
        untied = [fragment(), fragment(tensor_id="u")]
        apart = layout([tensor(), tensor(tensor_id="u")], untied)
        validate_runtime_binding(apart, binding(apart, "p0", [bound(untied[0]), bound(untied[1], fragment_id="other")]))


def test_strides_of_single_rows():
    one = fragment(shape=(1, 6))
    assert bound(one, strides_bytes=(999, 2)).strides_bytes == bound(one, strides_bytes=(0, 2)).strides_bytes == (12, 2)


# Weights in a store.


def weights(fragments=None, tensors=None, **change):
    return WeightManifest(**{
        "namespace": "n", "resource_id": "m", "revision": "r1", "weight_generation": 3, "group_id": "g", "manifest_key": "g/manifest",
        "tensors": tuple(tensors or [tensor()]), "fragments": tuple(fragments or [piece()]), "created_at": "now", **change,
    })  # fmt: skip


def piece(**change):
    return StoredFragment(**{
        "fragment_id": "f", "tensor_id": "t", "global_offset": (0, 0), "local_shape": (4, 6), "object_key": "g/payload/x",
        "object_offset": 0, "nbytes": 48, **change,
    })  # fmt: skip


def test_stored_manifests():
    made = weights()
    assert WeightManifest.from_dict(json.loads(made.to_json())) == made
    assert made.manifest_identity.content_sha256 == made.manifest_digest and len(made.manifest_digest) == 64
    half = {"local_shape": (2, 6), "nbytes": 24}
    for work, words in (
        (lambda: weights(manifest_key="x"), "group"),
        (lambda: weights([piece(object_key="x")]), "group"),
        (lambda: weights([piece(**half)]), "not fully covered"),
        (lambda: weights([piece(), piece(fragment_id="b")]), "duplicate fragment geometry"),
        (lambda: weights([piece(**half), piece(fragment_id="b", global_offset=(2, 0), **half)]), "object ranges overlap"),
        (lambda: weights([piece(nbytes=46)]), "byte size mismatch"),
        (lambda: WeightManifest.from_json("[]"), "JSON object"),
        (lambda: WeightManifest.from_json("{}"), "schema"),
        (lambda: WeightManifest.from_json(made.to_json().replace('"n"', "NaN")), "non-finite"),
        (lambda: weights(tensors=[3]), "WeightManifest tensors"),
    ):
        with pytest.raises(ValueError, match=words):
            work()
    plan = plan_stored_transfer_to_target_placement(made, layout())
    assert plan.source_placement_id is None and plan.source_executors == () and plan.pipeline_routes[0].source_pp is None
    assert plan.source_manifest_identity == made.manifest_identity
    plan.validate_source_manifest_snapshot()
    with pytest.raises(ValueError, match="source manifest fragment snapshots differ"):
        dataclasses.replace(plan, source_manifest=weights([piece(object_offset=8)]))


# Modules.


def test_names_of_modules():
    assert reshard.__all__ == ["ResourceKind", "ResourceManifest", "PlacementManifest", "RuntimeBindingManifest"]
    assert contracts.ResourceKind.MODEL_WEIGHT == "model_weight"
    for name in manifest.__all__:
        value = getattr(manifest, name)
        assert typing.get_type_hints(value) is not None
        if isinstance(value, type):
            assert typing.get_type_hints(value.__init__) is not None
    for gone in ("mooncake.model_weight", "mooncake.reshard.kv_cache"):
        with pytest.raises(ModuleNotFoundError):
            __import__(gone)
    program = "import sys, mooncake.reshard.weight; print([m for m in ('numpy', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"
