"""Members of a bundle: conversion of arrays, tensors and buffers to bytes and back."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mooncake._layout import HEADER_SIZE
from mooncake._shards import _is_tensor
from mooncake._tensors import _deserialize_tensor, _serialize_tensor


@dataclass(frozen=True)
class TensorObjectBuffer:
    """Stored form of a tensor, with its header, in registered memory: a member to write, or the
    destination of a read.
    """

    ptr: int
    size: int
    owner: Any = None
    batch_size: int | None = None

    def __len__(self) -> int:
        if self.batch_size is None:
            raise TypeError("tensor object buffer requires batch_size for DataProto use")
        return self.batch_size


@dataclass(frozen=True)
class RawDestination:
    """Memory by address that a member is read into. It must be large enough and stay allocated."""

    ptr: int
    size: int
    owner: Any = None
    pre_registered: bool = False


def tensor_object_buffer(ptr: int, size: int, owner: Any = None, batch_size: int | None = None) -> TensorObjectBuffer:
    """Describes the stored form of a tensor in memory that the store has registered."""
    return TensorObjectBuffer(int(ptr), int(size), owner, batch_size)


def raw_destination(ptr: int, size: int, owner: Any = None, *, pre_registered: bool = False) -> RawDestination:
    """Describes `size` bytes of memory to read into."""
    return RawDestination(int(ptr), int(size), owner, pre_registered)


def _bytes_view(value: Any, name: str) -> memoryview:
    try:
        view = memoryview(value)
    except TypeError:
        raise TypeError(f"{name} must be bytes-like, got {type(value).__name__}") from None
    if not view.c_contiguous:
        view = memoryview(view.tobytes())
    return view.cast("B") if view.nbytes else memoryview(b"")


@dataclass(frozen=True)
class _Body:
    """Bytes of one member in order, and its additional manifest entries."""

    parts: list[memoryview]
    size: int
    extra: dict[str, Any]
    owner: Any = None


def _body(value: Any, name: str) -> tuple[_Body, dict[str, Any] | None]:
    """Returns a member's bytes, and its description among the fields."""
    if isinstance(value, TensorObjectBuffer):
        view = memoryview(_at(value.ptr, value.size)) if value.size else memoryview(b"")
        return _Body([view], value.size, {"metadata_bytes": HEADER_SIZE}, value), {"encoding": "torch_tensor"}
    if _is_tensor(value) and getattr(value, "is_nested", False):
        return _nested_body(value, name)
    if _is_tensor(value):
        header, address, size, owner = _serialized(value, name)
        data = memoryview(_at(address, size)) if size else memoryview(b"")
        torch = {
            "encoding": "torch_tensor",
            "dtype": str(owner.dtype),
            "shape": list(owner.shape),
            "element_size": owner.element_size(),
        }
        return _Body([memoryview(header), data], len(header) + size, {"metadata_bytes": len(header)}, owner), torch
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError(f"{name}: cannot store an array of objects")
        array = np.ascontiguousarray(value)
        view = memoryview(array.reshape(-1).view(np.uint8).data) if array.nbytes else memoryview(b"")
        shape = {"encoding": "ndarray", "dtype": array.dtype.str, "shape": list(array.shape)}
        return _Body([view], array.nbytes, {}, array), shape
    view = _bytes_view(value, name)
    return _Body([view], view.nbytes, {}), {"encoding": "bytes"}


def _serialized(tensor: Any, name: str) -> tuple[bytes, int, int, Any]:
    try:
        return _serialize_tensor(tensor)
    except ValueError as error:
        kind = ", ".join(str(getattr(tensor, one, None)) for one in ("dtype", "layout", "device"))
        raise ValueError(f"{name}: cannot store tensor ({kind}): {error}") from None


def _nested_body(value: Any, name: str) -> tuple[_Body, dict[str, Any]]:
    """Encodes a tensor of rows of different lengths. Its values, offsets and lengths become
    separate tensors.
    """
    import torch

    if value.layout != torch.jagged:
        raise ValueError(f"{name}: nested tensors must have the jagged layout")
    tensors = [value.values(), value.offsets()]
    if value.lengths() is not None:
        tensors.append(value.lengths())
    views: list[memoryview] = []
    owners, sizes = [], []
    for tensor in tensors:
        header, address, size, owner = _serialized(tensor, name)
        views += [memoryview(header), *([memoryview(_at(address, size))] if size else [])]
        owners.append(owner)
        sizes.append(len(header) + size)
    described = {
        "encoding": "torch_tensor",
        "dtype": str(value.dtype),
        "nested": True,
        "format": "tensor_parts",
        "part_bytes": sizes,
        "has_lengths": len(tensors) == 3,
        "ragged_idx": int(getattr(value, "_ragged_idx", 1)),
    }
    return _Body(views, sum(sizes), {}, owners), described


def _nested_of(data: bytes, described: Mapping[str, Any]) -> Any:
    import torch

    if described.get("format") == "torch_save":
        stored = _loaded(data)
        parts = [stored.values(), stored.offsets(), stored.lengths()]
        ragged = int(getattr(stored, "_ragged_idx", 1))
    else:
        sizes = described.get("part_bytes")
        if not isinstance(sizes, list) or not all(type(size) is int for size in sizes):
            raise ValueError("invalid nested tensor: part_bytes must be a list of sizes")
        if len(sizes) != (3 if described.get("has_lengths") else 2) or sum(sizes) != len(data) or min(sizes) <= 0:
            raise ValueError("invalid nested tensor: part_bytes do not add up to its length")
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        parts = [_deserialize_tensor(data[start : start + size]) for start, size in zip(starts, sizes)]
        parts += [None] * (3 - len(parts))
        ragged = described.get("ragged_idx", 1)
        if type(ragged) is not int:
            raise ValueError(f"invalid nested tensor: ragged_idx={ragged!r}")
    values, offsets, lengths = parts
    if not 1 <= ragged <= values.dim():
        raise ValueError(f"invalid nested tensor: ragged_idx={ragged}")
    counts = lengths if lengths is not None else offsets.diff()
    if offsets.dim() != 1 or counts.dim() != 1 or len(offsets) != len(counts) + 1:
        raise ValueError("invalid nested tensor: it needs one offset more than it has rows")
    # torch does not check offsets.
    for numbers in (counts, offsets, offsets[:-1] + counts):
        if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) <= values.shape[ragged - 1]:
            raise ValueError("invalid nested tensor: a row exceeds its values")
    least, most = (int(counts.min()), int(counts.max())) if counts.numel() else (0, 0)
    return torch.nested.nested_tensor_from_jagged(
        values, offsets=offsets, lengths=lengths, jagged_dim=ragged, min_seqlen=least, max_seqlen=most
    )


def _nested_rows(value: Any, rows: Sequence[int]) -> Any:
    """Returns some rows of a nested tensor."""
    import torch

    every = value.unbind()
    if not rows:
        offsets = torch.zeros(1, dtype=value.offsets().dtype)
        return torch.nested.nested_tensor_from_jagged(value.values()[:0], offsets=offsets)
    return torch.nested.as_nested_tensor([every[row] for row in rows], layout=value.layout)


def _loaded(data: bytes) -> Any:
    """Loads an object that torch saved. Only tensors are loaded, and no code runs."""
    import io

    import torch

    return torch.load(io.BytesIO(data), weights_only=True)


def _at(address: int, size: int) -> Any:
    return (ctypes.c_ubyte * size).from_address(address)


def _cut(body: _Body, start: int, end: int) -> list[memoryview]:
    """Returns bytes `start` to `end` of a body."""
    parts, at = [], 0
    for part in body.parts:
        first, last = max(start - at, 0), min(end - at, part.nbytes)
        if first < last:
            parts.append(part[first:last])
        at += part.nbytes
    return parts


def _check_destination(name: str, destination: Any, dtype: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(destination, np.ndarray):
        raise TypeError(f"{name}: the destination must be an ndarray, not {type(destination).__name__}")
    # Elements of such an array are pointers, which stored bytes must never become.
    if destination.dtype.hasobject:
        raise ValueError(f"{name}: the destination must not hold objects. dtype={destination.dtype}")
    if destination.dtype != dtype or destination.shape != shape:
        raise ValueError(f"{name}: {dtype} {shape} does not fit into {destination.dtype} {destination.shape}")
    if not destination.flags.c_contiguous or not destination.flags.writeable:
        raise ValueError(f"{name}: the destination must be C-contiguous and writable")
