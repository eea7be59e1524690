"""Reads of the bytes of a payload by location."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake._manifests import MOST
from mooncake._shards import _Job, _Read

# Runs of bytes with at most this gap between them are read as one, which costs less than another
# read.
_NEAR = 16 << 10
# A run of at least this length is read directly into its destination, without a copy.
_LONG = 64 << 10
# Approximate length of the temporary buffer for bytes that cannot be read into their destination.
_PIECE = 8 << 20
# Maximum number of rows, and of runs, that are read at a time.
_ROWS, _RUNS = 1 << 20, 1 << 16
# Before this much memory is allocated, the sizes in the manifest are compared with the stored ones.
_LARGE = 64 << 20

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]


class Reader:
    """Reader of one payload, across its chunks. It reads only the bytes of the payload."""

    def __init__(self, store: Any, payload: Mapping[str, Any]) -> None:
        self._store = store
        self._key, self._size, self._chunks = payload["key"], payload["bytes"], payload["chunks"]
        # End of each chunk.
        self._ends = list(accumulate(chunk["bytes"] for chunk in self._chunks))
        self._sizes = {chunk["key"]: chunk["bytes"] for chunk in self._chunks}

    def whole(self) -> bytes:
        """Reads the whole payload."""
        keys = [chunk["key"] for chunk in self._chunks]
        data = b"".join(self._store.get_batch(keys)) if len(keys) > 1 else b"".join(map(self._store.get, keys))
        if len(data) != self._size:
            raise RuntimeError(f"get failed for {self._key}: {len(data)} of {self._size} bytes")
        return data

    def expect(self, size: int) -> None:
        """Compares the stored chunks with the manifest, before `size` bytes are allocated."""
        if size >= _LARGE:
            # Missing chunks may not be among those to read.
            self._located([chunk["key"] for chunk in self._chunks], gone_is_fine=True)

    def rows(self, start: int, width: int, rows: range | Numbers, into: Any) -> None:
        """Reads rows of `width` bytes, which begin at `start`, into consecutive memory."""
        if not width or not len(rows):
            return
        view = _bytes_of(into)
        if isinstance(rows, range):
            if start + rows[0] * width < 0 or start + (rows[-1] + 1) * width > self._size:
                raise ValueError(f"{self._key}: part exceeds the payload")
            if rows.step == 1:
                self._fetch([(start + rows[0] * width, 0, len(rows) * width)], view)
                return
            if self._is_dense(rows, width):
                self._read_dense(start, width, rows, view)
                return
        for at in range(0, len(rows), _ROWS):
            some = rows[at : at + _ROWS]
            numbers = np.arange(some.start, some.stop, some.step) if isinstance(some, range) else some
            lengths = np.full(len(some), width, np.int64)
            self.runs(start + numbers * width, lengths, view[at * width : (at + len(some)) * width])

    def _is_dense(self, rows: range, width: int) -> bool:
        """Returns whether the gaps between rows are read as well: they are small and contain no
        whole chunk.
        """
        gap = (rows.step - 1) * width
        least = min((chunk["bytes"] for chunk in self._chunks[:-1]), default=MOST)
        return rows.step > 1 and width < _LONG and gap <= _NEAR and gap < least

    def _read_dense(self, start: int, width: int, rows: range, into: Bytes) -> None:
        """Reads rows at even distances together with the gaps between them."""
        stride = rows.step * width
        many = max(_PIECE // stride, 1)
        for at in range(0, len(rows), many):
            some = rows[at : at + many]
            staged = np.empty((len(some) - 1) * stride + width, np.uint8)
            self._fetch([(start + some.start * width, 0, staged.nbytes)], staged)
            # numpy copies an element of a `V` type in one operation.
            picked = np.ndarray((len(some),), f"V{width}", staged, strides=(stride,))
            np.ndarray((len(some),), f"V{width}", into[at * width :])[:] = picked

    def runs(self, starts: Numbers, lengths: Numbers, into: Any) -> None:
        """Reads runs of bytes into consecutive memory."""
        view = _bytes_of(into)
        to = np.cumsum(lengths) - lengths
        some = lengths > 0
        starts, lengths, to = starts[some], lengths[some], to[some]
        if not len(starts):
            return
        if starts.min() < 0 or (starts + lengths).max() > self._size:
            raise ValueError(f"{self._key}: part exceeds the payload")
        # Runs that are adjacent in the payload become one.
        heads = np.concatenate(([0], np.flatnonzero(starts[1:] != (starts + lengths)[:-1]) + 1))
        starts, to, lengths = starts[heads], to[heads], np.add.reduceat(lengths, heads)
        order = np.argsort(starts, kind="stable")
        starts, to, lengths = starts[order], to[order], lengths[order]
        together = self._together(starts, lengths)
        alone = together < 0
        direct = zip(starts[alone].tolist(), to[alone].tolist(), lengths[alone].tolist())
        self._fetch(direct, view)
        near = ~alone
        self._read_covers(starts[near], to[near], lengths[near], together[near], view)

    def _together(self, starts: Numbers, lengths: Numbers) -> Numbers:
        """Groups nearby runs, in the order of their positions, into covers that are read as one.

        Returns the number of each run's cover, or -1 for a run that is read alone.
        """
        numbers = np.full(len(starts), -1, np.int64)
        (short,) = np.nonzero(lengths < _LONG)
        if len(short) < 2:
            return numbers
        begins = starts[short]
        ends = np.maximum.accumulate(begins + lengths[short])
        # A chunk without wanted bytes is not read.
        skips = np.searchsorted(self._ends, begins[1:], "right") - np.searchsorted(self._ends, ends[:-1] - 1, "right") > 1
        breaks = np.concatenate(([True], (begins[1:] - ends[:-1] > _NEAR) | skips))
        # Covers that are too long are split.
        windows = (begins - begins[breaks][np.cumsum(breaks) - 1]) // _PIECE
        breaks[1:] |= windows[1:] != windows[:-1]
        cover = np.cumsum(breaks) - 1
        several = np.bincount(cover)[cover] > 1
        numbers[short[several]] = cover[several]
        return numbers

    def _read_covers(self, starts: Numbers, to: Numbers, lengths: Numbers, cover: Numbers, into: Bytes) -> None:
        """Reads the covers of nearby runs, and copies the runs out of them."""
        if not len(starts):
            return
        heads = np.concatenate(([0], np.flatnonzero(np.diff(cover)) + 1))
        begins, sizes = starts[heads], np.maximum.reduceat(starts + lengths, heads) - starts[heads]
        at = np.cumsum(sizes) - sizes
        cover = np.repeat(np.arange(len(heads)), np.diff(heads, append=len(starts)))
        pieces = np.concatenate(([0], np.flatnonzero(np.diff(at // _PIECE)) + 1, [len(heads)]))
        for first, last in zip(pieces[:-1].tolist(), pieces[1:].tolist()):
            offsets = at[first:last] - at[first]
            staged = np.empty(int(offsets[-1] + sizes[last - 1]), np.uint8)
            self._fetch(zip(begins[first:last].tolist(), offsets.tolist(), sizes[first:last].tolist()), staged)
            begin, end = np.searchsorted(cover, [first, last])
            runs = slice(begin, end)
            of = cover[runs]
            _copy(staged, starts[runs] - begins[of] + at[of] - at[first], into, to[runs], lengths[runs])

    def _fetch(self, parts: Iterable[tuple[int, int, int]], into: Bytes) -> None:
        """Reads parts (source offset, destination offset, length) into memory."""
        pieces: list[tuple[int, int, int, int]] = []
        for piece in self._pieces(parts):
            pieces.append(piece)
            if len(pieces) == _RUNS:
                self._copy_in(pieces, into)
                pieces = []
        if pieces:
            self._copy_in(pieces, into)

    def _pieces(self, parts: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int, int]]:
        """Splits parts at chunk boundaries: number of the chunk, source offset, destination offset,
        length.
        """
        for start, to, length in parts:
            end, index = start + length, bisect_right(self._ends, start)
            while start < end:
                last = min(end, self._ends[index])
                if last > start:
                    begins = self._ends[index] - self._chunks[index]["bytes"]
                    yield index, start - begins, to, last - start
                to, start, index = to + last - start, last, index + 1

    def _copy_in(self, pieces: list[tuple[int, int, int, int]], into: Bytes) -> None:
        keys = [self._chunks[index]["key"] for index, *_ in pieces]
        found = self._located([*dict.fromkeys(keys)])
        reads = [
            _Read(found[key], start, length, to, length, 1, length) for key, (_, start, to, length) in zip(keys, pieces)
        ]
        code = self._store._read_strips([_Job((into.ctypes.data, into.nbytes), reads)], [into])[0]
        if code != 0:
            raise RuntimeError(f"get failed for {self._key}: {code}")

    def _located(self, keys: Sequence[str], gone_is_fine: bool = False) -> dict[str, Any]:
        """Looks up chunks. Raises `RuntimeError` for a chunk that is shorter than the manifest
        states.
        """
        located = {}
        for key, found in zip(keys, self._store._heads(list(keys), 1)):
            if found is None and not gone_is_fine:
                raise RuntimeError(f"get failed for {key}")
            if found is not None and found[0].size < self._sizes[key]:
                raise RuntimeError(f"get failed for {key}: {found[0].size} of {self._sizes[key]} bytes")
            located[key] = found[0] if found is not None else None
        return located


def _bytes_of(into: Any) -> Bytes:
    """Returns the memory of a contiguous array as bytes."""
    view: Bytes = np.asarray(into).reshape(-1).view(np.uint8)
    return view


def _copy(source: Bytes, begins: Numbers, target: Bytes, to: Numbers, lengths: Numbers) -> None:
    """Copies runs of bytes. Runs of one length are copied at once, as elements of that size at any
    offset.
    """
    order = np.argsort(lengths, kind="stable")
    for some in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1):
        width = int(lengths[some[0]])
        of, into = (
            np.ndarray((memory.nbytes - width + 1,), f"V{width}", memory, strides=(1,)) for memory in (source, target)
        )
        into[to[some]] = of[begins[some]]
