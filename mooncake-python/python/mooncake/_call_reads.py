"""Reads of the bytes of a payload by the public calls of a store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mooncake._payloads import Bytes, Numbers, Reader, _bytes_of
from mooncake._store_calls import StoreCalls

# Chunk, source offset, destination offset, length.
_Fragment = tuple[Mapping[str, Any], int, int, int]


def reader_of(calls: StoreCalls, payload: Mapping[str, Any]) -> Reader | CallReader:
    """Returns the reader of a payload."""
    return Reader(calls.store, payload) if calls.is_native else CallReader(calls, payload)


class CallReader:
    """Reader of one payload, across its chunks, with the methods of `Reader`."""

    def __init__(self, calls: StoreCalls, payload: Mapping[str, Any]) -> None:
        self._calls = calls
        self._key, self._size, self._chunks = payload["key"], payload["bytes"], payload["chunks"]

    def expect(self, size: int) -> None:
        """Does nothing: these stores cannot tell the sizes of values."""
        del size

    def whole(self) -> bytes:
        """Reads the whole payload."""
        if not self._size:
            return b""
        batch_get_into = self._calls.method("batch_get_into")
        if batch_get_into is not None:
            into = np.empty(self._size, np.uint8)
            with self._calls.registered(into.ctypes.data, self._size) as is_registered:
                if is_registered:
                    self._batch_get(batch_get_into, into.ctypes.data)
                    return into.tobytes()
        return b"".join(self._get(chunk) for chunk in self._chunks)

    def _batch_get(self, batch_get_into: Any, address: int) -> None:
        keys, addresses, sizes = [], [], []
        for chunk in self._chunks:
            keys.append(chunk["key"])
            addresses.append(address)
            sizes.append(chunk["bytes"])
            address += chunk["bytes"]
        codes = list(batch_get_into(keys, addresses, sizes))
        for index, (key, size) in enumerate(zip(keys, sizes)):
            code = codes[index] if index < len(codes) else None
            if code != size:
                raise RuntimeError(f"get failed for {key}: {code}")

    def _get(self, chunk: Mapping[str, Any]) -> bytes:
        data = bytes(self._calls.store.get(chunk["key"]))
        if len(data) != chunk["bytes"]:
            raise RuntimeError(f"get failed for {chunk['key']}: {len(data)} of {chunk['bytes']} bytes")
        return data

    def rows(self, start: int, width: int, rows: range | Numbers, into: Any) -> None:
        """Reads rows of `width` bytes, which begin at `start`, into consecutive memory."""
        if not width or not len(rows):
            return
        view = _bytes_of(into)
        if isinstance(rows, range) and rows.step == 1:
            self._fetch([(start + rows[0] * width, 0, len(rows) * width)], view)
        elif isinstance(rows, range):
            # Rows at even distances are read together with the gaps between them.
            cover = np.empty((rows[-1] - rows[0] + 1) * width, np.uint8)
            self._fetch([(start + rows[0] * width, 0, cover.nbytes)], cover)
            picked = np.ndarray((len(rows),), f"V{width}", cover, strides=(rows.step * width,))
            np.ndarray((len(rows),), f"V{width}", view)[:] = picked
        else:
            self._fetch([(start + int(row) * width, at * width, width) for at, row in enumerate(rows)], view)

    def runs(self, starts: Numbers, lengths: Numbers, into: Any) -> None:
        """Reads runs of bytes into consecutive memory. Adjacent runs are read as one."""
        parts: list[tuple[int, int, int]] = []
        to = 0
        for start, length in zip(starts.tolist(), lengths.tolist()):
            if parts and parts[-1][0] + parts[-1][2] == start:
                parts[-1] = (parts[-1][0], parts[-1][1], parts[-1][2] + length)
            elif length:
                parts.append((start, to, length))
            to += length
        self._fetch(parts, _bytes_of(into))

    def leased(self, start: int, size: int, address: int) -> None:
        """Reads bytes into memory of a buffer pool, which is registered already."""
        ranges = self._calls.method("get_into_ranges")
        assert ranges is not None
        self._read_ranges(ranges, self._fragments([(start, 0, size)]), address)

    def _fetch(self, parts: Iterable[tuple[int, int, int]], into: Bytes) -> None:
        """Reads parts (source offset, destination offset, length) into memory."""
        fragments = self._fragments(parts)
        if not fragments:
            return
        address = into.ctypes.data
        get_into, ranges = self._calls.method("get_into"), self._calls.method("get_into_ranges")
        chunk, start, to, length = fragments[0]
        is_whole = len(self._chunks) == len(fragments) == 1 and not start and not to and length == chunk["bytes"]
        if ranges is not None or (get_into is not None and is_whole):
            with self._calls.registered(address, into.nbytes) as is_registered:
                if is_registered and is_whole and get_into is not None:
                    code = get_into(chunk["key"], address, length)
                    if code != length:
                        raise RuntimeError(f"get failed for {chunk['key']}: {code}")
                    return
                if is_registered and ranges is not None:
                    self._read_ranges(ranges, fragments, address)
                    return
        self._read_values(fragments, into)

    def into_address(self, address: int) -> None:
        """Reads the whole payload to an address. Its memory is registered by the caller."""
        parts = self._fragments([(0, 0, self._size)])
        ranges = self._calls.method("get_into_ranges")
        if ranges is not None and parts:
            self._read_ranges(ranges, parts, address)
        elif parts:
            from mooncake._members import _at

            self._read_values(parts, np.ctypeslib.as_array(_at(address, self._size)))

    def _fragments(self, parts: Iterable[tuple[int, int, int]]) -> list[_Fragment]:
        """Splits parts at chunk boundaries."""
        ends = np.cumsum([chunk["bytes"] for chunk in self._chunks], dtype=np.int64)
        made: list[_Fragment] = []
        for start, to, length in parts:
            end = start + length
            if start < 0 or end > self._size:
                raise ValueError(f"{self._key}: part exceeds the payload")
            index = int(np.searchsorted(ends, start, "right"))
            while start < end:
                chunk = self._chunks[index]
                begin = int(ends[index]) - chunk["bytes"]
                last = min(end, int(ends[index]))
                if last > start:
                    made.append((chunk, start - begin, to, last - start))
                to, start, index = to + last - start, last, index + 1
        return made

    @staticmethod
    def _read_ranges(ranges: Any, fragments: Sequence[_Fragment], address: int) -> None:
        keys = [chunk["key"] for chunk, *_ in fragments]
        sources, targets, lengths = ([[one[at]] for one in fragments] for at in (1, 2, 3))
        codes = ranges([address], [keys], [targets], [sources], [lengths])
        try:
            found = [[list(one) for one in row] for row in codes]
        except TypeError:
            found = []
        if len(found) != 1 or len(found[0]) != len(keys):
            raise RuntimeError(f"get_into_ranges failed for {keys[0]}: unexpected result {codes!r}")
        for key, code, length in zip(keys, found[0], lengths):
            if code != length:
                raise RuntimeError(f"get_into_ranges failed for {key}: {', '.join(map(str, code))}")

    def _read_values(self, fragments: Sequence[_Fragment], into: Bytes) -> None:
        """Reads each chunk of the fragments once, as a whole."""
        of_chunks: dict[str, list[_Fragment]] = {}
        for fragment in fragments:
            of_chunks.setdefault(fragment[0]["key"], []).append(fragment)
        for some in of_chunks.values():
            data = np.frombuffer(self._get(some[0][0]), np.uint8)
            for _, start, to, length in some:
                into[to : to + length] = data[start : start + length]
