"""Tensors in memory that the processes of one host share: one of them owns it, all of them map it.

Needs torch, and a process group where there is more than one rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from mooncake import _segments

__all__ = ["SharedSegment", "SharedSegmentError", "create_shared_segment", "shared_segment_supported"]

# Tensors begin on pages.
_PAGE = 4096


class SharedSegmentError(RuntimeError):
    """A segment cannot be made, or has nothing of that name. On every rank the same, with the ranks it comes from."""


class _Block(NamedTuple):
    number: int
    shape: tuple[int, ...]
    dtype: Any
    nbytes: int


class SharedSegment:
    """A segment, and the tensors in it."""

    def __init__(self, segment: _segments.SharedSegment, blocks: dict[str, _Block]) -> None:
        self._segment, self._blocks = segment, blocks

    def tensors(self, block: str) -> list[Any]:
        """The tensors of a block, by number; each is the segment's own bytes, and keeps them."""
        import torch

        if block not in self._blocks:
            raise SharedSegmentError(f"no block is named {block!r}; there are {', '.join(self._blocks)}")
        one, (offsets, stride) = self._blocks[block], _layout(self._blocks)
        starts = range(offsets[block], offsets[block] + one.number * stride, stride)
        memory = self._segment.buffer()
        parts = [torch.frombuffer(memory, dtype=torch.uint8, count=one.nbytes, offset=start) for start in starts]
        return [part.view(one.dtype).view(one.shape) for part in parts]

    def base_addr(self) -> int:
        """Address of its first byte in this process."""
        return self._segment.base_addr()

    def total_size(self) -> int:
        """Bytes, those between tensors included."""
        return self._segment.size()


def shared_segment_supported(mmap: bool = True, host_register: bool = False) -> bool:
    """Whether memory can be shared in this way: as pages of the host's, not registered with a device."""
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
    """Makes a segment with all ranks of a group, each of which calls this with the same declaration.

    `blocks` names groups of tensors of one shape: ``{"k": {"count": layers, "shape": shape, "dtype": torch.bfloat16}}``. The memory is `owner_rank`'s.
    `comm_group` is a process group of torch that moves objects between processors (gloo), or has one as ``cpu_group``; one rank needs none. `tp_group` is its older name.

    SharedSegmentError, on every rank: a rank has failed, or has declared something else.
    """
    if comm_group is not None and tp_group is not None and comm_group is not tp_group:
        raise SharedSegmentError("comm_group and tp_group are two names of one argument")
    group = tp_group if comm_group is None else comm_group
    if world_size > 1 and group is None:
        raise SharedSegmentError(f"{world_size} ranks need a comm_group")
    parsed = {block: _parse(block, blocks[block]) for block in sorted(blocks)}
    if not parsed:
        raise SharedSegmentError("a segment without blocks")
    size = _layout(parsed)[1] * max(block.number for block in parsed.values())
    layout = ";".join(f"{key}:{one.number}:{'x'.join(map(str, one.shape))}:{one.dtype}" for key, one in parsed.items())
    made, failure = None, ""
    try:
        made = _segments.SharedSegment.create(
            f"{name}|{layout}", size, world_size, rank_id, owner_rank, device_id or 0, mmap, host_register
        )
    except RuntimeError as error:
        failure = str(error)
    said = _gathered((failure, made[1] if made else b""), world_size, group)
    _check([one for one, _ in said])
    if made is None:
        raise SharedSegmentError("a rank has not taken part")
    try:
        made[0].complete([blob for _, blob in said])
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
        raise SharedSegmentError(f"block {name!r} needs a count, a shape and a dtype") from error
    if count <= 0 or not shape or min(shape) <= 0:
        raise SharedSegmentError(f"block {name!r} has {count} tensors of shape {shape}")
    return _Block(count, shape, block["dtype"], element * math.prod(shape))


def _layout(blocks: dict[str, _Block]) -> tuple[dict[str, int], int]:
    """Where the first tensor of each block begins, and how far on the next: those of one number lie together."""
    offsets, end = {}, 0
    for name, block in blocks.items():
        offsets[name] = end
        end += -(-block.nbytes // _PAGE) * _PAGE
    return offsets, end


def _gathered(value: Any, world_size: int, group: Any) -> list[Any]:
    """What each rank says, by rank."""
    if world_size == 1:
        return [value]
    from torch import distributed

    all: list[Any] = [None] * world_size
    distributed.all_gather_object(all, value, group=getattr(group, "cpu_group", None) or group)
    return all


def _check(failures: list[str]) -> None:
    said = [f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure]
    if said:
        raise SharedSegmentError("; ".join(said))
