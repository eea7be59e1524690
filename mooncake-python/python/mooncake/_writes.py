"""Writes of the payloads of a bundle: in chunks, from the memory of the caller or through a buffer
pool.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Literal, NamedTuple

import numpy as np

from mooncake._members import ArrayRows, Body, Member, TensorMember, TensorObjectBuffer, _at
from mooncake._shards import _object_sizes
from mooncake._store_calls import StoreCalls, check

DEFAULT_CHUNK = 64 << 20
# An automatic write is parallel from this size on.
AUTO_PARALLEL_MIN_BYTES = DEFAULT_CHUNK
AUTO_PARALLEL_MIN_CHUNKS = 8
# More pieces than this in a chunk are joined before they are written.
_MAX_PARTS = 64


@dataclass(frozen=True)
class BundleTransferPolicy:
    """Policy for writing members. The stored objects do not depend on it. A write checks it."""

    max_inflight_put: int = 1
    put_mode: Literal["auto", "batch", "parallel"] = "auto"
    copy_mode: Literal["auto", "zero_copy", "copy"] = "auto"

    def check(self) -> None:
        """Raises `ValueError` for an invalid policy."""
        if isinstance(self.max_inflight_put, bool) or not isinstance(self.max_inflight_put, int) or self.max_inflight_put < 1:
            raise ValueError(f"max_inflight_put must be positive: {self.max_inflight_put!r}")
        if self.put_mode not in ("auto", "batch", "parallel"):
            raise ValueError(f"invalid put_mode: {self.put_mode!r}")
        if self.copy_mode not in ("auto", "zero_copy", "copy"):
            raise ValueError(f"invalid copy_mode: {self.copy_mode!r}")


class _Chunk(NamedTuple):
    """Part of a payload under one key: its pieces, or a run of its rows."""

    key: str
    size: int
    pieces: list[memoryview]
    first_row: int = 0
    rows: int = 0


def _runs_of_rows(ends: Any, chunk: int) -> list[tuple[int, int, int]] | None:
    """Packs whole rows, which end at these offsets, into chunks: first row, number of rows, bytes.
    Returns `None` if a row does not fit into a chunk.
    """
    runs: list[tuple[int, int, int]] = []
    first = begin = 0
    while first < len(ends):
        last = int(np.searchsorted(ends, begin + chunk, "right"))
        if last == first:
            return None
        end = int(ends[last - 1])
        if end > begin:
            runs.append((first, last - first, end - begin))
        first, begin = last, end
    return runs


def _cut(pieces: list[memoryview], sizes: Iterable[int]) -> Iterator[list[memoryview]]:
    """Cuts pieces into chunks of these sizes, until all bytes are used."""
    rest = iter(sizes)
    free = next(rest, 0)
    some: list[memoryview] = []
    for piece in pieces:
        at = 0
        while at < piece.nbytes:
            part = piece[at : at + free]
            some.append(part)
            at, free = at + part.nbytes, free - part.nbytes
            if not free:
                yield some
                some, free = [], next(rest, 0)
    if some:
        yield some


def _one(pieces: list[memoryview]) -> memoryview:
    return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))


def _fill(lease: Any, pieces: list[memoryview]) -> None:
    """Copies pieces to the memory of a lease."""
    copy = getattr(lease, "copy_from_buffers", None)
    if callable(copy):
        copy(pieces)
        return
    buffer = lease.buffer
    with memoryview(buffer) as view, view.cast("B") as target:
        at = 0
        for piece in pieces:
            target[at : at + piece.nbytes] = piece
            at += piece.nbytes
    release = getattr(buffer, "release", None)
    if callable(release):
        release()


def _concat_arrays_into() -> Any:
    """Returns the function that concatenates arrays without the interpreter lock, if it is there.
    """
    try:
        from mooncake._fast_copy import concat_arrays_into
    except ImportError:
        return None
    return concat_arrays_into


class Writer:
    """Writer of one bundle. It remembers the keys that it has written."""

    def __init__(self, calls: StoreCalls, pool: Any, policy: BundleTransferPolicy, chunk: int, config: Any) -> None:
        self._calls, self._pool, self._policy, self._chunk, self._config = calls, pool, policy, chunk, config
        self._is_native = calls.is_native
        self.written: list[str] = []

    def discard(self) -> None:
        """Removes everything that was written."""
        self._calls.discard(self.written)

    def value(self, key: str, value: Any) -> None:
        """Writes one value."""
        self._attempt(key, lambda: self._calls.put(key, value, self._config))

    def _attempt(self, key: str, write: Callable[[], None]) -> None:
        """Writes a value and remembers its key. One of ours may be stored although its write has
        failed.
        """
        before = [key] if self._is_native else []
        self.written += before
        write()
        self.written += [] if before else [key]

    def plain(self, key: str, data: bytes) -> dict[str, Any]:
        """Writes bytes whatever the policy says. Returns the description of the payload."""
        return self._serial(key, Body([memoryview(data)], len(data)))

    def member(self, key: str, member: Member) -> dict[str, Any]:
        """Writes a member. Returns the description of its payload."""
        if isinstance(member, TensorObjectBuffer):
            return self._tensor_object(key, member)
        if isinstance(member, TensorMember):
            return self._tensor(key, member)
        return self._body(key, member)

    # Tensors.

    def _tensor_object(self, key: str, member: TensorObjectBuffer) -> dict[str, Any]:
        if self._is_native:
            self.value(key, memoryview(_at(member.ptr, member.size)).cast("B"))
        else:
            self._write_from(key, member.ptr, member.size)
        return _described(key, member.size, [(key, member.size)])

    def _can_write_from(self) -> bool:
        """Returns whether the store can write one value from registered memory."""
        names = ["put_from", *(["put_tensor_from"] if self._config is None else [])]
        return any(self._calls.method(name) is not None for name in names)

    def _write_from(self, key: str, address: int, size: int) -> None:
        """Writes the stored form of a tensor from registered memory."""
        put_tensor_from, put_from = self._calls.method("put_tensor_from"), self._calls.method("put_from")
        if self._config is None and put_tensor_from is not None:
            check("put_tensor_from", key, put_tensor_from(key, address, size))
        elif put_from is not None:
            check("put_from", key, put_from(key, address, size, **self._calls.keywords(self._config)))
        else:
            raise RuntimeError(f"put_from is unavailable: the store cannot write from memory. key={key}")
        self.written.append(key)

    def _tensor(self, key: str, member: TensorMember) -> dict[str, Any]:
        if self._policy.copy_mode == "zero_copy":
            raise ValueError(
                f"{member.name}: zero-copy tensors must be in a BufferPool tensor-object buffer; use tensor_object_buffer"
            )
        if self._policy.copy_mode == "auto":
            by_tensor = self._put_tensor(key, member)
            if by_tensor is not None:
                return by_tensor
            if self._pool is not None and self._can_write_from():
                try:
                    return self._tensor_through_pool(key, member)
                except RuntimeError:
                    # The value is written by plain calls.
                    pass
        if member.tensor.dim() == 0:
            import torch

            file = io.BytesIO()
            torch.save(member.tensor, file)
            return {**self._whole(key, file.getbuffer()), "format": "torch_save"}
        body = member.body()
        return {**self._whole(key, _one(body.pieces)), "metadata_bytes": body.pieces[0].nbytes}

    def _put_tensor(self, key: str, member: TensorMember) -> dict[str, Any] | None:
        """Writes a tensor by the call for tensors, or returns `None` if the store lacks it."""
        name = "put_tensor" if self._config is None else "pub_tensor"
        put = self._calls.method(name)
        if put is None:
            return None
        tensor = member.tensor
        check(name, key, put(key, tensor, **self._calls.keywords(self._config)))
        self.written.append(key)
        head, size = _object_sizes(tensor)
        return {
            "key": key,
            "kind": "tensor",
            "bytes": size,
            "dtype": str(tensor.dtype),
            "shape": list(tensor.shape),
            "chunks": [{"key": key, "bytes": size}],
            "metadata_bytes": head,
        }

    def _tensor_through_pool(self, key: str, member: TensorMember) -> dict[str, Any]:
        body = member.body()
        lease = self._pool.acquire(body.size)
        try:
            _fill(lease, body.pieces)
            self._write_from(key, lease.ptr, body.size)
        finally:
            lease.release()
        return _described(key, body.size, [(key, body.size)])

    def _whole(self, key: str, data: memoryview) -> dict[str, Any]:
        """Writes bytes as one chunk."""
        return self._body(key, Body([data], data.nbytes), data.nbytes)

    # Bytes.

    def _body(self, key: str, body: Body | ArrayRows, chunk: int | None = None) -> dict[str, Any]:
        mode = self._policy.copy_mode
        if mode == "zero_copy" and body.size:
            raise RuntimeError("zero-copy put requires tensor-object buffers: only their memory is registered")
        if mode == "copy" or self._pool is None or not body.size:
            return self._serial(key, body, chunk)
        batch_put_from = self._calls.method("batch_put_from")
        if batch_put_from is None and not body.has_parts:
            raise RuntimeError(f"batch_put_from is unavailable: the store cannot write from a buffer pool. key={key}")
        if batch_put_from is None:
            return self._serial(key, body, chunk)
        return self._through_pool(key, body, chunk or self._chunk, batch_put_from)

    def _chunks(
        self, key: str, body: Body | ArrayRows, chunk: int, keeps_rows: bool, needs_pieces: bool = True
    ) -> list[_Chunk]:
        runs = _runs_of_rows(body.ends, chunk) if keeps_rows and isinstance(body, ArrayRows) else None
        if runs is not None:
            cut = _cut(body.pieces, [size for *_, size in runs]) if needs_pieces else repeat([])
            made = [_Chunk("", size, parts, at, rows) for (at, rows, size), parts in zip(runs, cut)]
        else:
            made = [_Chunk("", sum(part.nbytes for part in parts), parts) for parts in _cut(body.pieces, repeat(chunk))]
        several = body.size > chunk
        return [one._replace(key=f"{key}/chunk/{at}" if several else key) for at, one in enumerate(made)]

    def _serial(self, key: str, body: Body | ArrayRows, chunk: int | None = None) -> dict[str, Any]:
        """Writes chunks by one `put` each."""
        is_native = self._is_native
        chunks = self._chunks(key, body, chunk or self._chunk, is_native)
        put_parts = self._calls.store.put_parts if is_native else None

        def write(one: _Chunk) -> None:
            if put_parts is not None and 1 < len(one.pieces) <= _MAX_PARTS:
                check("put", one.key, put_parts(one.key, *one.pieces, **self._calls.keywords(self._config)))
            else:
                self._calls.put(one.key, _one(one.pieces), self._config)

        if self._is_parallel(body, chunks):
            self._in_threads(chunks, write)
        else:
            for one in chunks:
                self._attempt(one.key, lambda one=one: write(one))  # type: ignore[misc]
        return _described(key, body.size, [(one.key, one.size) for one in chunks])

    def _through_pool(self, key: str, body: Body | ArrayRows, chunk: int, batch_put_from: Any) -> dict[str, Any]:
        """Copies chunks to memory of the pool and writes them from there."""
        rows = body if isinstance(body, ArrayRows) else None
        concat = _concat_arrays_into() if rows is not None else None
        chunks = self._chunks(key, body, chunk, concat is not None, concat is None)

        def write(one: _Chunk) -> None:
            lease = self._pool.acquire(one.size)
            try:
                if one.rows and rows is not None and concat is not None:
                    copied = concat(rows.arrays, lease.ptr, one.size, one.first_row, one.rows)
                    if copied != one.size:
                        raise RuntimeError(f"native fast-copy wrote {copied} of {one.size} bytes. key={one.key}")
                else:
                    _fill(lease, one.pieces)
                codes = list(batch_put_from([one.key], [lease.ptr], [one.size], **self._calls.keywords(self._config)))
                if len(codes) != 1:
                    raise RuntimeError(f"batch_put_from failed for {one.key}: {len(codes)} results for one key")
                check("batch_put_from", one.key, codes[0])
            finally:
                lease.release()

        # A chunk whose write failed may be stored all the same.
        self.written += [one.key for one in chunks]
        if self._is_parallel(body, chunks):
            self._in_threads(chunks, write)
        else:
            for one in chunks:
                write(one)
        return _described(key, body.size, [(one.key, one.size) for one in chunks])

    def _is_parallel(self, body: Body | ArrayRows, chunks: list[_Chunk]) -> bool:
        policy = self._policy
        if not body.has_parts or len(chunks) < 2 or policy.put_mode == "batch" or policy.max_inflight_put < 2:
            return False
        large = len(chunks) >= AUTO_PARALLEL_MIN_CHUNKS and body.size >= AUTO_PARALLEL_MIN_BYTES
        return large or (policy.put_mode == "parallel" and not (chunks[0].rows and self._pool is not None))

    def _in_threads(self, chunks: list[_Chunk], write: Any) -> None:
        """Writes consecutive runs of chunks, each in a thread."""
        threads = min(self._policy.max_inflight_put, len(chunks))
        each = -(-len(chunks) // threads)

        def run(some: list[_Chunk]) -> None:
            for one in some:
                write(one)

        self.written += [one.key for one in chunks]
        with ThreadPoolExecutor(threads) as executor:
            runs = [executor.submit(run, chunks[at : at + each]) for at in range(0, len(chunks), each)]
        for one in runs:
            one.result()


def _described(key: str, size: int, chunks: list[tuple[str, int]]) -> dict[str, Any]:
    return {"key": key, "bytes": size, "chunks": [{"key": name, "bytes": count} for name, count in chunks]}
