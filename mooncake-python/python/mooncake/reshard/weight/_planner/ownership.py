"""Choice of the ranks of a source that a transfer reads from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mooncake.reshard.contracts import TensorId
from mooncake.reshard.geometry import boxes_exactly_cover
from mooncake.reshard.weight.types import KINDS, OwnershipAxis, ParallelRank, PlacementFragment, TensorDescriptor

__all__ = ["complete_dp_owned_source_owners", "complete_parallel_source_replicas", "has_dp_ownership", "parallel_tensor_owner"]

Owner = tuple[int, ...]


def has_dp_ownership(tensor: TensorDescriptor) -> bool:
    """Returns whether only some data-parallel ranks have a tensor."""
    return "dp" in tensor.of_kind(OwnershipAxis)


def parallel_tensor_owner(tensor: TensorDescriptor, fragment: PlacementFragment) -> Owner:
    """Returns the coordinates on the ownership axes of a tensor."""
    return tuple(getattr(fragment.rank, kind) for kind in tensor.of_kind(OwnershipAxis))


def _is_whole(tensor: TensorDescriptor, fragments: Sequence[PlacementFragment]) -> bool:
    """Returns whether fragments cover a tensor. Copies of a box count once."""
    boxes = list({fragment.box for fragment in fragments})
    return boxes_exactly_cover((0,) * len(tensor.global_shape), tensor.global_shape, boxes)


def _by_owner(tensor: TensorDescriptor, fragments: Sequence[PlacementFragment]) -> dict[Owner, list[PlacementFragment]]:
    groups: dict[Owner, list[PlacementFragment]] = {}
    for fragment in fragments:
        groups.setdefault(parallel_tensor_owner(tensor, fragment), []).append(fragment)
    return groups


def complete_parallel_source_replicas(
    source_tensors: Mapping[TensorId, TensorDescriptor], source_fragments: Sequence[PlacementFragment]
) -> dict[int, dict[TensorId, Owner]]:
    """Returns the data-parallel ranks that have all tensors, with the owner of each tensor: the one
    with the smallest coordinates.

    Tensors that data-parallel ranks own are left out.
    """
    tensors = {name: tensor for name, tensor in source_tensors.items() if not has_dp_ownership(tensor)}
    found: dict[int, dict[TensorId, list[PlacementFragment]]] = {}
    for fragment in source_fragments:
        if fragment.tensor_id in tensors:
            found.setdefault(fragment.rank.dp, {}).setdefault(fragment.tensor_id, []).append(fragment)
    complete = {}
    for dp in sorted(found):
        owners: dict[TensorId, Owner] = {}
        for name, tensor in tensors.items():
            groups = _by_owner(tensor, found[dp].get(name, []))
            whole = sorted(owner for owner, some in groups.items() if _is_whole(tensor, some))
            if whole:
                owners[name] = whole[0]
        if len(owners) == len(tensors):
            complete[dp] = owners
    return complete


def complete_dp_owned_source_owners(
    source_tensors: Mapping[TensorId, TensorDescriptor], source_fragments: Sequence[PlacementFragment]
) -> dict[TensorId, Owner]:
    """Returns the owner of each tensor that data-parallel ranks own. There must be exactly one."""
    owners = {}
    for name, tensor in source_tensors.items():
        if not has_dp_ownership(tensor):
            continue
        groups = _by_owner(tensor, [one for one in source_fragments if one.tensor_id == name])
        whole = sorted(owner for owner, some in groups.items() if _is_whole(tensor, some))
        if not whole:
            raise ValueError(f"no complete declared owner: tensor_id={name!r}")
        if len(whole) > 1:
            raise ValueError(f"ambiguous declared owners: tensor_id={name!r} owners={whole}")
        owners[name] = whole[0]
    return owners


def rank_order(rank: ParallelRank | None) -> tuple[int, ...]:
    """Returns the order of ranks. A stored fragment has none."""
    return rank.order if rank is not None else (0,) * len(KINDS)
