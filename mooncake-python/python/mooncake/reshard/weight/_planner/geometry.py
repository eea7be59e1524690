"""Common boxes of fragments, and the byte ranges that copy them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

from mooncake.reshard.contracts import row_major_strides
from mooncake.reshard.weight.storage_manifest import StoredFragment
from mooncake.reshard.weight.types import PlacementFragment

SourceFragment = PlacementFragment | StoredFragment
Box = tuple[tuple[int, ...], tuple[int, ...]]
# Source and target base offset, bytes of a segment, loop counts, source and target strides.
Layout = tuple[int, int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _overlap_box(source: Any, target: Any) -> Box | None:
    """Returns the common box of two fragments, or `None`."""
    pairs = list(zip(source.global_offset, source.local_shape, target.global_offset, target.local_shape))
    begins = tuple(max(a, b) for a, _, b, _ in pairs)
    ends = tuple(min(a + m, b + n) for a, m, b, n in pairs)
    if any(begin >= end for begin, end in zip(begins, ends)):
        return None
    return begins, tuple(end - begin for begin, end in zip(begins, ends))


def itemsize_of(fragment: Any) -> int:
    """Returns the size of an element of a fragment. Raises `ValueError` if there is none."""
    elements = math.prod(fragment.local_shape)
    if fragment.nbytes % elements:
        raise ValueError(f"fragment byte size mismatch: nbytes={fragment.nbytes} elements={elements}")
    return int(fragment.nbytes // elements)


def layout_of(source: Any, target: Any, offset: tuple[int, ...], shape: tuple[int, ...]) -> Layout:
    """Returns the byte ranges of a common box. Dimensions that are contiguous on both sides become
    one segment.
    """
    itemsize = itemsize_of(source)
    of, to = row_major_strides(source.local_shape, itemsize), row_major_strides(target.local_shape, itemsize)

    def base(fragment: Any, strides: tuple[int, ...]) -> int:
        return sum((at - begin) * stride for at, begin, stride in zip(offset, fragment.global_offset, strides))

    inner, dim = shape[-1] * itemsize, len(shape) - 2
    while dim >= 0 and of[dim] == to[dim] == inner:
        inner *= shape[dim]
        dim -= 1
    outer = slice(0, dim + 1)
    return base(source, of), base(target, to), inner, shape[outer], of[outer], to[outer]


class BoxIndex:
    """Fragments of a tensor by their interval in the dimension with most intervals."""

    def __init__(self, fragments: Sequence[Any]) -> None:
        dims = range(len(fragments[0].global_offset))
        self._dim = max(dims, key=lambda dim: len({(one.global_offset[dim], one.local_shape[dim]) for one in fragments}))
        self._fragments = sorted(fragments, key=lambda one: one.global_offset[self._dim])
        self._begins = [one.global_offset[self._dim] for one in self._fragments]
        # Largest end of a fragment and of all before it.
        self._ends: list[int] = []
        for one in self._fragments:
            end = one.global_offset[self._dim] + one.local_shape[self._dim]
            self._ends.append(max(end, self._ends[-1]) if self._ends else end)

    def candidates(self, target: Any) -> Iterator[Any]:
        """Yields the fragments whose interval has a coordinate in common with that of `target`."""
        begin = target.global_offset[self._dim]
        at = bisect_left(self._begins, begin + target.local_shape[self._dim]) - 1
        while at >= 0 and self._ends[at] > begin:
            one = self._fragments[at]
            if one.global_offset[self._dim] + one.local_shape[self._dim] > begin:
                yield one
            at -= 1
