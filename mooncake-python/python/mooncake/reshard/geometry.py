"""Boxes of integer coordinates: containment, overlap, exact cover. A box is an offset and a shape.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import Protocol

Box = tuple[tuple[int, ...], tuple[int, ...]]
# Number of comparisons of boxes of three and more dimensions, beyond which the check is refused.
_MAX_HIGH_DIMENSIONAL_PAIRWISE_COMPARISONS = 1_000_000

__all__ = ["LogicalBox", "OverlapRegion", "box_contains", "boxes_exactly_cover", "boxes_overlap", "regions_exactly_cover"]


class LogicalBox(Protocol):
    """Part of a tensor."""

    @property
    def global_offset(self) -> tuple[int, ...]: ...

    @property
    def local_shape(self) -> tuple[int, ...]: ...


class OverlapRegion(Protocol):
    """Common part of two boxes."""

    @property
    def overlap_offset(self) -> tuple[int, ...]: ...

    @property
    def overlap_shape(self) -> tuple[int, ...]: ...


def box_contains(
    outer_offset: tuple[int, ...],
    outer_shape: tuple[int, ...],
    inner_offset: tuple[int, ...],
    inner_shape: tuple[int, ...],
) -> bool:
    """Returns whether a box lies inside another one."""
    lengths = {len(outer_offset), len(outer_shape), len(inner_offset), len(inner_shape)}
    return len(lengths) == 1 and all(
        outer <= inner and inner + length <= outer + extent
        for outer, extent, inner, length in zip(outer_offset, outer_shape, inner_offset, inner_shape)
    )


def boxes_overlap(boxes: Sequence[Box]) -> bool:
    """Returns whether two of the boxes have a coordinate in common.

    Raises `ValueError` for boxes of three and more dimensions that need too many comparisons.
    """
    some = [(offset, shape) for offset, shape in boxes if all(shape)]
    if len(some) < 2:
        return False
    dims = len(some[0][0])
    if not dims:
        return True
    if dims > 2:
        return _many_dimensions(some)
    # Without a second dimension, all boxes lie on one line.
    return _two_dimensions([(o, s) if dims == 2 else ((*o, 0), (*s, 1)) for o, s in some])


def _two_dimensions(boxes: Sequence[Box]) -> bool:
    """Sweeps over the first dimension. The boxes at a position are disjoint intervals, so a new one
    can only overlap its neighbours.
    """
    # A box ends before another one begins at the same position.
    events = sorted(
        event
        for (x, y), (width, height) in boxes
        for event in ((x, True, y, y + height), (x + width, False, y, y + height))
    )
    active: list[tuple[int, int]] = []
    for _, begins, low, high in events:
        at = bisect_left(active, (low, high))
        if not begins:
            active.pop(at)
            continue
        if (at < len(active) and active[at][0] < high) or (at and active[at - 1][1] > low):
            return True
        insort(active, (low, high))
    return False


def _many_dimensions(boxes: Sequence[Box]) -> bool:
    """Sweeps over the dimension with most intervals, and compares each box with those that are not
    over.
    """
    dims = range(len(boxes[0][0]))
    along = max(dims, key=lambda dim: len({(offset[dim], shape[dim]) for offset, shape in boxes}))
    active: list[Box] = []
    comparisons = 0
    for offset, shape in sorted(boxes, key=lambda box: box[0][along]):
        active = [box for box in active if box[0][along] + box[1][along] > offset[along]]
        comparisons += len(active)
        if comparisons > _MAX_HIGH_DIMENSIONAL_PAIRWISE_COMPARISONS:
            raise ValueError(
                f"high-dimensional overlap budget exceeded: {len(boxes)} boxes need more than "
                f"{_MAX_HIGH_DIMENSIONAL_PAIRWISE_COMPARISONS} comparisons"
            )
        for other, extent in active:
            if all(offset[d] < other[d] + extent[d] and other[d] < offset[d] + shape[d] for d in dims):
                return True
        active.append((offset, shape))
    return False


def boxes_exactly_cover(
    container_offset: tuple[int, ...], container_shape: tuple[int, ...], boxes: Sequence[Box]
) -> bool:
    """Returns whether boxes fill a box, each coordinate once."""
    if not boxes or not all(box_contains(container_offset, container_shape, *box) for box in boxes):
        return False
    if sum(math.prod(shape) for _, shape in boxes) != math.prod(container_shape):
        return False
    return not boxes_overlap(boxes)


def regions_exactly_cover(target: LogicalBox, regions: Iterable[OverlapRegion]) -> bool:
    """Returns whether regions fill a part of a tensor, each coordinate once."""
    boxes = [(region.overlap_offset, region.overlap_shape) for region in regions]
    return boxes_exactly_cover(target.global_offset, target.local_shape, boxes)
