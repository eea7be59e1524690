"""Checks of addresses against a layout."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake.reshard._values import items
from mooncake.reshard.contracts import RuntimeBindingFragment, TensorId, row_major_strides, validate_resource_binding_identity
from mooncake.reshard.weight.placement import WeightPlacementManifest
from mooncake.reshard.weight.runtime import WeightRuntimeBindingManifest
from mooncake.reshard.weight.types import PlacementFragment, TensorDescriptor

__all__ = ["validate_runtime_binding", "validate_runtime_bindings"]

_Bound = tuple[RuntimeBindingFragment, PlacementFragment]


def validate_runtime_binding(placement: WeightPlacementManifest, binding: WeightRuntimeBindingManifest) -> None:
    """Raises `ValueError` if a binding does not fit its participant in the layout."""
    _check_addresses(placement, _bound(placement, binding))


def validate_runtime_bindings(
    placement: WeightPlacementManifest, bindings: Sequence[WeightRuntimeBindingManifest]
) -> None:
    """Raises `ValueError` if bindings are not those of all participants with fragments."""
    given: tuple[WeightRuntimeBindingManifest, ...] = items(bindings, WeightRuntimeBindingManifest, "runtime bindings")
    seen = set()
    of_instances: dict[str, list[_Bound]] = {}
    for binding in given:
        if binding.participant_id in seen:
            raise ValueError(f"duplicate runtime binding participant: {binding.participant_id!r}")
        seen.add(binding.participant_id)
        of_instances.setdefault(binding.instance_id, []).extend(_bound(placement, binding))
    for some in of_instances.values():
        _check_addresses(placement, some)
    missing = [part.participant_id for part in placement.parts if part.fragments and part.participant_id not in seen]
    if missing:
        raise ValueError(f"missing runtime binding participant: {missing[0]!r}")


def _bound(placement: WeightPlacementManifest, binding: WeightRuntimeBindingManifest) -> list[_Bound]:
    """Checks a binding, and returns its fragments together with those of the layout."""
    if not isinstance(placement, WeightPlacementManifest):
        raise ValueError(f"placement must be a WeightPlacementManifest, not {type(placement).__name__}")
    if not isinstance(binding, WeightRuntimeBindingManifest):
        raise ValueError(f"binding must be a WeightRuntimeBindingManifest, not {type(binding).__name__}")
    validate_resource_binding_identity(placement, binding)
    part = placement.part(binding.participant_id)
    if part is None:
        raise ValueError(f"unknown runtime binding participant: {binding.participant_id!r}")
    known = {fragment.fragment_id: fragment for fragment in part.fragments}
    tensors = {tensor.tensor_id: tensor for tensor in placement.tensors}
    bound = []
    for one in binding.fragments:
        fragment = known.pop(one.placement_fragment_id, None)
        if fragment is None:
            raise ValueError(f"runtime binding has an unknown placement fragment: {one.placement_fragment_id!r}")
        itemsize = tensors[fragment.tensor_id].itemsize
        for words, ours, theirs in (
            ("byte size", fragment.nbytes, one.nbytes),
            ("local_shape", fragment.local_shape, one.local_shape),
            ("itemsize", itemsize, one.itemsize),
            ("row-major stride", row_major_strides(fragment.local_shape, itemsize), one.strides_bytes),
        ):
            if ours != theirs:
                raise ValueError(f"runtime binding {words} does not match the placement: {theirs} and {ours}")
        bound.append((one, fragment))
    if known:
        raise ValueError(f"runtime binding has a missing placement fragment: {sorted(known)[0]!r}")
    return bound


def _check_addresses(placement: WeightPlacementManifest, bound: Sequence[_Bound]) -> None:
    """Checks that fragments in one process and device share memory only if they are aliases."""
    tensors = {tensor.tensor_id: tensor for tensor in placement.tensors}
    groups: dict[tuple[str, str], list[_Bound]] = {}
    for one in bound:
        groups.setdefault((one[0].worker_id, one[0].device), []).append(one)
    for some in groups.values():
        some.sort(key=lambda one: (one[0].address, one[0].nbytes))
        last: list[_Bound] = []
        for one in some:
            last = [other for other in last if other[0].address + other[0].nbytes > one[0].address]
            if not all(_may_share(tensors, one, other) for other in last):
                raise ValueError(f"runtime address ranges overlap: {one[0].fragment_id!r}")
            last.append(one)
        allocations = sorted({(one.storage_address, one.storage_nbytes) for one, _ in some})
        for (address, size), (following, _) in zip(allocations, allocations[1:]):
            if address + size > following:
                raise ValueError(f"storage allocation ranges overlap: {address} and {following}")


def _may_share(tensors: dict[TensorId, TensorDescriptor], one: _Bound, other: _Bound) -> bool:
    first, second = one[1], other[1]
    same_memory = (one[0].address, one[0].nbytes) == (other[0].address, other[0].nbytes)
    same_group = first.aliases == second.aliases and {first.tensor_id, second.tensor_id} <= set(first.aliases)
    alike = descriptor_key(tensors[first.tensor_id]) == descriptor_key(tensors[second.tensor_id])
    return same_memory and same_group and first.box == second.box and alike


def descriptor_key(tensor: TensorDescriptor) -> tuple[object, ...]:
    """Returns everything in a description but the identifier."""
    return (
        tensor.global_shape,
        tensor.dtype,
        tensor.itemsize,
        tensor.shard_dims,
        tensor.layout_fingerprint,
        tensor.parallel_axes,
        tensor.layer_id,
        tensor.expert_id,
    )
