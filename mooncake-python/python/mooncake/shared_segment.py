"""Tensors in memory that the processes of one host share. One process owns the memory, and all of
them map it.

Needs torch, and a process group if there is more than one rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from mooncake import _segments

__all__ = ["SharedSegment", "SharedSegmentError", "create_shared_segment", "shared_segment_supported"]

# Alignment of tensors in bytes.
_PAGE = 4096


class SharedSegmentError(RuntimeError):
    """Failure to create a segment, or an unknown block. All ranks raise the same error, which names
    the failed ranks.
    """


class _Block(NamedTuple):
    number: int
    shape: tuple[int, ...]
    dtype: Any
    nbytes: int


class SharedSegment:
    """Shared memory with the tensors in it."""

    def __init__(self, segment: _segments.SharedSegment, blocks: dict[str, _Block]) -> None:
        self._segment, self._blocks = segment, blocks

    def tensors(self, block: str) -> list[Any]:
        """Returns the tensors of a block in order. They use the segment's memory without a copy,
        and keep it alive.
        """
        import torch

        if block not in self._blocks:
            raise SharedSegmentError(f"no such block: {block!r}; known blocks: {', '.join(self._blocks)}")
        one, (offsets, stride) = self._blocks[block], _layout(self._blocks)
        starts = range(offsets[block], offsets[block] + one.number * stride, stride)
        memory = self._segment.buffer()
        parts = [torch.frombuffer(memory, dtype=torch.uint8, count=one.nbytes, offset=start) for start in starts]
        return [part.view(one.dtype).view(one.shape) for part in parts]

    def base_addr(self) -> int:
        """Returns the address of the first byte in this process."""
        return self._segment.base_addr()

    def total_size(self) -> int:
        """Returns the size in bytes, including gaps between tensors."""
        return self._segment.size()


def shared_segment_supported(mmap: bool = True, host_register: bool = False) -> bool:
    """Returns whether segments with these settings are supported: host pages that are not
    registered with a device.
    """
    return _segments.SharedSegment.supported(mmap, host_register)


def create_shared_segment(
    name: str,
    blocks: Mapping[str, Mapping[str, Any]],
    world_size: int,
    rank_id: int,
    owner_rank: int = 0,
    device_id: int | None = None,
    comm_group: Any = None,
    mmap: bool = True,
    host_register: bool = False,
    *,
    tp_group: Any = None,
) -> SharedSegment:
    """Creates a segment together with all ranks of a group. Each rank calls this with the same
    arguments.

    `blocks` names groups of tensors of one shape: ``{"k": {"count": layers, "shape": shape,
    "dtype": torch.bfloat16}}``. The memory belongs to `owner_rank`.

    `comm_group` is a torch process group that exchanges Python objects (gloo), or has one as
    ``cpu_group``. A single rank needs none. `tp_group` is an older name of `comm_group`.

    Raises `SharedSegmentError` on every rank if a rank fails or declares different blocks.
    """
    if comm_group is not None and tp_group is not None and comm_group is not tp_group:
        raise SharedSegmentError("cannot create segment: tp_group is an alias of comm_group, and both are given")
    group = tp_group if comm_group is None else comm_group
    if world_size > 1 and group is None:
        raise SharedSegmentError(f"cannot create segment: {world_size} ranks need a comm_group")
    parsed = {block: _parse(block, blocks[block]) for block in sorted(blocks)}
    if not parsed:
        raise SharedSegmentError("cannot create segment: it has no blocks")
    size = _layout(parsed)[1] * max(block.number for block in parsed.values())
    layout = ";".join(f"{key}:{one.number}:{'x'.join(map(str, one.shape))}:{one.dtype}" for key, one in parsed.items())
    made, failure = None, ""
    try:
        made = _segments.SharedSegment.create(
            f"{name}|{layout}", size, world_size, rank_id, owner_rank, device_id or 0, mmap, host_register
        )
    except RuntimeError as error:
        failure = str(error)
    gathered = _gathered((failure, made[1] if made else b""), world_size, group)
    _check([one for one, _ in gathered])
    if made is None:
        raise SharedSegmentError("cannot create segment: a rank did not participate")
    try:
        made[0].complete([blob for _, blob in gathered])
    except RuntimeError as error:
        failure = str(error)
    _check(_gathered(failure, world_size, group))
    return SharedSegment(made[0], parsed)


def _parse(name: str, block: Mapping[str, Any]) -> _Block:
    import torch

    try:
        count, shape = int(block["count"]), tuple(int(length) for length in block["shape"])
        element = torch.empty(0, dtype=block["dtype"]).element_size()
    except (KeyError, TypeError, ValueError) as error:
        raise SharedSegmentError(f"invalid block {name!r}: it needs a count, a shape and a dtype") from error
    if count <= 0 or not shape or min(shape) <= 0:
        raise SharedSegmentError(f"invalid block {name!r}: count={count} shape={shape}")
    return _Block(count, shape, block["dtype"], element * math.prod(shape))


def _layout(blocks: dict[str, _Block]) -> tuple[dict[str, int], int]:
    """Returns the offset of the first tensor of each block, and the distance between numbers.

    Tensors of the same number lie next to each other.
    """
    offsets, end = {}, 0
    for name, block in blocks.items():
        offsets[name] = end
        end += -(-block.nbytes // _PAGE) * _PAGE
    return offsets, end


def _gathered(value: Any, world_size: int, group: Any) -> list[Any]:
    """Gathers a value from each rank, by rank."""
    if world_size == 1:
        return [value]
    from torch import distributed

    all: list[Any] = [None] * world_size
    distributed.all_gather_object(all, value, group=getattr(group, "cpu_group", None) or group)
    return all


def _check(failures: list[str]) -> None:
    failed = [f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure]
    if failed:
        raise SharedSegmentError("; ".join(failed))
