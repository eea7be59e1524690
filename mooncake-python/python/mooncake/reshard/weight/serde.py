"""JSON form of layouts."""

from __future__ import annotations

from typing import Any

from mooncake.reshard._values import canonical_json, exact_fields, integers, json_list, parsed_object, text
from mooncake.reshard.contracts import ParticipantId, PlacementFragmentId, PlacementId, PlacementSetId, ResourceId, ResourceKind
from mooncake.reshard.contracts import RevisionId, TensorId, TopologyId
from mooncake.reshard.weight.part import WeightPlacementPart
from mooncake.reshard.weight.placement import WeightPlacementManifest
from mooncake.reshard.weight.topology import ParallelTopology, TopologyParticipant
from mooncake.reshard.weight.types import (
    KINDS,
    OwnershipAxis,
    ParallelAxis,
    ParallelRank,
    PlacementFragment,
    ReplicatedAxis,
    SplitAxis,
    TensorDescriptor,
)

__all__ = ["weight_placement_from_json", "weight_placement_to_json"]

_PLACEMENT = frozenset(
    "resource_kind resource_id revision weight_generation placement_set_id placement_id topology tensors parts".split()
)
_TOPOLOGY = frozenset("tp_size pp_size ep_size dp_size topology_id participants".split())
_TENSOR = frozenset(
    "tensor_id global_shape dtype itemsize shard_dims layout_fingerprint parallel_axes layer_id expert_id".split()
)
_FRAGMENT = frozenset("tensor_id global_offset local_shape nbytes rank aliases placement_fragment_id".split())


def weight_placement_to_json(placement: WeightPlacementManifest) -> str:
    """Returns the JSON of a layout."""
    if not isinstance(placement, WeightPlacementManifest):
        raise ValueError(f"placement must be a WeightPlacementManifest, not {type(placement).__name__}")
    return canonical_json(placement.wire())


def weight_placement_from_json(content: str) -> WeightPlacementManifest:
    """Returns the layout of a JSON text. Raises `ValueError` for an invalid one."""
    value = exact_fields(parsed_object(content, "weight placement"), _PLACEMENT, "weight placement")
    if value["resource_kind"] != ResourceKind.MODEL_WEIGHT.value:
        raise ValueError(f"unsupported resource_kind: {value['resource_kind']!r}")
    topology = _topology(value["topology"])
    tensors = {one.tensor_id: one for one in map(tensor_of, json_list(value["tensors"], "tensors"))}
    if len(tensors) != len(value["tensors"]):
        raise ValueError("duplicate tensor_id in the tensors of a weight placement")
    parts = []
    used: set[TensorId] = set()
    for given in json_list(value["parts"], "parts"):
        part = exact_fields(given, frozenset(("participant_id", "rank", "fragments")), "part")
        fragments = tuple(_fragment(one) for one in json_list(part["fragments"], "fragments"))
        names = {fragment.tensor_id for fragment in fragments}
        if names - tensors.keys():
            raise ValueError(f"fragment references an unknown tensor: {sorted(names - tensors.keys())[0]!r}")
        used |= names
        parts.append(
            WeightPlacementPart(
                ResourceId(value["resource_id"]),
                RevisionId(value["revision"]),
                value["weight_generation"],
                PlacementSetId(value["placement_set_id"]),
                topology.topology_id,
                ParticipantId(part["participant_id"]),
                _rank(part["rank"]),
                tuple(tensors[name] for name in sorted(names)),
                fragments,
            )
        )
    if tensors.keys() - used:
        raise ValueError(f"unreferenced tensor: {sorted(tensors.keys() - used)[0]!r}")
    return WeightPlacementManifest(
        resource_id=ResourceId(value["resource_id"]),
        revision=RevisionId(value["revision"]),
        weight_generation=value["weight_generation"],
        placement_set_id=PlacementSetId(value["placement_set_id"]),
        topology=topology,
        parts=tuple(parts),
        placement_id=PlacementId(text(value["placement_id"], "placement_id")),
    )


def _topology(given: Any) -> ParallelTopology:
    value = exact_fields(given, _TOPOLOGY, "topology")
    participants = []
    for one in json_list(value["participants"], "participants"):
        one = exact_fields(one, frozenset(("participant_id", "rank")), "participant")
        participants.append(TopologyParticipant(ParticipantId(one["participant_id"]), _rank(one["rank"])))
    return ParallelTopology(
        tp_size=value["tp_size"],
        pp_size=value["pp_size"],
        ep_size=value["ep_size"],
        dp_size=value["dp_size"],
        participants=tuple(participants),
        topology_id=TopologyId(text(value["topology_id"], "topology_id")),
    )


def _rank(given: Any) -> ParallelRank:
    value = exact_fields(given, frozenset(KINDS), "rank")
    return ParallelRank(**{kind: value[kind] for kind in KINDS})


def _axis(given: Any) -> ParallelAxis:
    is_split = isinstance(given, dict) and given.get("semantics") == "split"
    value = exact_fields(given, frozenset(("semantics", "kind", *(["dim"] if is_split else []))), "parallel axis")
    if is_split:
        return SplitAxis(value["kind"], value["dim"])
    kinds: dict[str, type[ReplicatedAxis] | type[OwnershipAxis]] = {"replicated": ReplicatedAxis, "ownership": OwnershipAxis}
    semantics = value["semantics"]
    if not isinstance(semantics, str) or semantics not in kinds:
        raise ValueError(f"unknown axis semantics: {semantics!r}")
    return kinds[semantics](value["kind"])


def tensor_of(given: Any) -> TensorDescriptor:
    """Returns the description of a tensor in a JSON document."""
    value = exact_fields(given, _TENSOR, "tensor")
    return TensorDescriptor(
        TensorId(value["tensor_id"]),
        _integers(value["global_shape"], "global_shape"),
        value["dtype"],
        value["itemsize"],
        _integers(value["shard_dims"], "shard_dims"),
        value["layout_fingerprint"],
        tuple(_axis(axis) for axis in json_list(value["parallel_axes"], "parallel_axes")),
        value["layer_id"],
        value["expert_id"],
    )


def _integers(given: Any, name: str) -> tuple[int, ...]:
    return integers(json_list(given, name), name)


def _fragment(given: Any) -> PlacementFragment:
    value = exact_fields(given, _FRAGMENT, "placement fragment", frozenset(("pipeline_stage_id",)))
    if "pipeline_stage_id" in value and value["pipeline_stage_id"] is None:
        raise ValueError("pipeline_stage_id must be an integer where it is given")
    return PlacementFragment(
        TensorId(value["tensor_id"]),
        _integers(value["global_offset"], "global_offset"),
        _integers(value["local_shape"], "local_shape"),
        value["nbytes"],
        _rank(value["rank"]),
        value.get("pipeline_stage_id"),
        tuple(json_list(value["aliases"], "aliases")),
        PlacementFragmentId(text(value["placement_fragment_id"], "placement_fragment_id")),
    )
