"""Members of a bundle: conversion of arrays, tensors and buffers to bytes and back."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mooncake._decisions import is_tensor as is_plain_tensor
from mooncake._element_types import code_of, is_ml_dtype
from mooncake._manifests import BUFFER, DIMENSIONS, ML_DTYPE, RECORD, numbers_of, record_fields
from mooncake._pool_results import PoolArray
from mooncake._shards import _is_tensor
from mooncake._tensors import _deserialize_tensor, _serialize_tensor

# Arrays of one of these types are equal to plain ones: the bytes of a file, and those of a pool.
PLAIN_ARRAYS = (np.ndarray, np.memmap, PoolArray)
# Parts that are shorter on average become one piece.
_SHORT = 64 << 10


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
        raise TypeError(
            f"cannot put member: {name} must be bytes-like, got {type(value).__name__}; put an array, a tensor or bytes"
        ) from None
    if not view.c_contiguous:
        view = memoryview(view.tobytes())
    return view.cast("B") if view.nbytes else memoryview(b"")


@dataclass(frozen=True)
class Body:
    """Bytes of one member, as pieces in order.

    `has_parts` says whether the member was given in parts, however many pieces there are.
    """

    pieces: list[memoryview]
    size: int
    owner: Any = None
    has_parts: bool = False


class Pieces:
    """Value of a member that is given as parts of bytes."""

    def __init__(self, parts: list[bytes]) -> None:
        self._parts = parts

    def described(self) -> dict[str, Any]:
        """Returns the description of the member among the fields."""
        return {"encoding": "bytes"}

    def body(self) -> Body:
        """Returns the bytes of the member."""
        parts = [part for part in self._parts if part]
        size = sum(map(len, parts))
        # Short parts are joined, because each piece has a cost.
        pieces = [b"".join(parts)] if size < len(parts) * _SHORT else parts
        return Body([memoryview(part) for part in pieces], size, None, len(parts) > 1)


class ArrayRows:
    """Value of a member that is given as rows, each an array. They are stored as elements of one
    type, one row after the other.

    `sizes` are the numbers of elements of the rows. Either the rows are given or their elements as
    one array, `joined`. A chunk never cuts a row if all rows fit into a chunk.
    """

    def __init__(self, sizes: Any, dtype: Any, rows: Sequence[Any] = (), joined: Any = None) -> None:
        self._dtype, self._sizes, self._rows, self._joined = dtype, sizes, rows, joined
        # End of each row in bytes.
        self.ends = np.cumsum(sizes) * dtype.itemsize
        self.size = int(self.ends[-1]) if len(sizes) else 0
        self.has_parts = int(np.count_nonzero(sizes)) > 1

    def described(self) -> dict[str, Any]:
        """Returns the description of the member among the fields."""
        return {"encoding": "ndarray", "dtype": self._dtype.str, "shape": [self.size // self._dtype.itemsize]}

    @cached_property
    def arrays(self) -> list[Any]:
        """Rows as contiguous arrays of one dimension."""
        if self._joined is not None:
            ends = np.cumsum(self._sizes).tolist()
            return [self._joined[begin:end] for begin, end in zip([0, *ends], ends)]
        return [np.ascontiguousarray(row, self._dtype).reshape(-1) for row in self._rows]

    @cached_property
    def pieces(self) -> list[memoryview]:
        """Bytes in order."""
        if not self.size:
            return []
        if self._joined is not None:
            arrays = [self._joined]
        elif self.size < np.count_nonzero(self._sizes) * _SHORT:
            # Short rows are joined, because each piece has a cost.
            arrays = [np.concatenate(self._rows, axis=None, dtype=self._dtype, casting="unsafe")]
        else:
            arrays = [array for array in self.arrays if array.size]
        return [memoryview(array.view(np.uint8)) for array in arrays]


@dataclass(frozen=True)
class TensorMember:
    """Tensor that is stored as an object of its own kind, with a header."""

    tensor: Any
    name: str

    def body(self) -> Body:
        """Returns header and data of the tensor. Raises `ValueError` if it has no such form."""
        header, address, size, owner = _serialized(self.tensor, self.name)
        pieces = [memoryview(header), *([memoryview(_at(address, size)).cast("B")] if size else [])]
        return Body(pieces, len(header) + size, owner)


Member = Body | ArrayRows | TensorMember | TensorObjectBuffer


def member_of(value: Any, name: str, any_buffer: bool = False) -> tuple[Member, dict[str, Any]]:
    """Returns a member to write, and its description among the fields.

    Buffers that would come back as other values are refused, unless `any_buffer` asks for their
    bytes only.
    """
    if isinstance(value, TensorObjectBuffer):
        return value, {"encoding": "torch_tensor"}
    if isinstance(value, Pieces):
        return value.body(), value.described()
    if isinstance(value, ArrayRows):
        return value, value.described()
    if _is_tensor(value) and getattr(value, "is_nested", False):
        return _nested_body(value, name)
    if _is_tensor(value):
        check_tensor(value, name)
        described = {
            "encoding": "torch_tensor",
            "dtype": str(value.dtype),
            "shape": list(value.shape),
            "element_size": value.element_size(),
        }
        return TensorMember(value, name), described
    if isinstance(value, np.ndarray):
        _check_array(value, name)
        # With `ascontiguousarray`, an array without dimensions has one.
        array = np.asarray(value, order="C")
        view = memoryview(array.reshape(-1).view(np.uint8).data) if array.nbytes else memoryview(b"")
        described = {"encoding": "ndarray", "dtype": array.dtype.str, "shape": list(array.shape)}
        if not array.ndim:
            # Mooncake C++ has no reader of arrays without dimensions.
            described |= {"shape": [1], DIMENSIONS: 0}
        if is_ml_dtype(array.dtype):
            # The string of such a type does not name it, and may be none that numpy reads.
            described |= {"dtype": f"|V{array.dtype.itemsize}", ML_DTYPE: array.dtype.name}
        if array.dtype.names is not None:
            described[RECORD] = record_fields(name, array.dtype)
        return Body([view], array.nbytes, array), described
    view = _bytes_view(value, name)
    described = {"encoding": "bytes"} if any_buffer else {"encoding": "bytes", **_buffer_kind(value, name)}
    return Body([view], view.nbytes), described


def _buffer_kind(value: Any, name: str) -> dict[str, str]:
    """Returns the description of the class of a buffer. Raises `TypeError` for one whose bytes are
    not its value.
    """
    kind = type(value)
    if kind is memoryview and value.ndim == 1 and value.format in ("B", "<B"):
        return {BUFFER: "memoryview"}
    if kind in (bytes, bytearray):
        return {} if kind is bytes else {BUFFER: "bytearray"}
    what = f"{kind.__module__}.{kind.__qualname__}"
    if kind is memoryview:
        what += f" format={value.format!r} shape={value.shape}"
    raise TypeError(
        f"cannot put member: it would come back as bytes. name={name!r} type={what};"
        " put bytes(value), memoryview(value).cast('B') or numpy.asarray(value)"
    )


def check_class(array: Any, name: str, what: str = "member") -> None:
    """Raises `TypeError` for an array whose class would be lost."""
    kind = type(array)
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"cannot put {what}: its mask would be lost. name={name!r}; put data and mask as two arrays")
    if kind not in PLAIN_ARRAYS:
        raise TypeError(
            f"cannot put {what}: its class would be lost. name={name!r} class={_full_name(kind)}; put value.view(numpy.ndarray)"
        )


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _check_array(array: Any, name: str) -> None:
    """Raises `TypeError` or `ValueError` for an array that would come back as another one."""
    if array.dtype.hasobject:
        raise TypeError(f"cannot put member: an array of objects has no stored form. name={name!r}; put a batch with this field")
    check_class(array, name)
    try:
        if not is_ml_dtype(array.dtype):
            numbers_of(name, array.dtype.str)
        if array.dtype.names is not None:
            record_fields(name, array.dtype)
    except ValueError:
        raise ValueError(
            f"cannot put member: its element type has no stored form. name={name!r} dtype={array.dtype}; put an array of numbers"
        ) from None


def check_tensor(tensor: Any, name: str) -> None:
    """Raises `TypeError` or `ValueError` for a tensor that would come back as another one."""
    if not is_plain_tensor(type(tensor)):
        raise TypeError(
            f"cannot put member: its class would be lost. name={name!r} class={_full_name(type(tensor))}; put a torch.Tensor"
        )
    if code_of(tensor.dtype) is None or str(tensor.layout) != "torch.strided":
        raise ValueError(
            f"cannot put member: unsupported type or layout of a tensor. name={name!r} dtype={tensor.dtype} layout={tensor.layout};"
            " put value.to_dense() or other numbers"
        )


def _serialized(tensor: Any, name: str) -> tuple[bytes, int, int, Any]:
    try:
        return _serialize_tensor(tensor)
    except ValueError as error:
        kind = " ".join(f"{one}={getattr(tensor, one, None)}" for one in ("dtype", "layout", "device"))
        raise ValueError(f"cannot put member: {error}. name={name!r} {kind}") from None


def _nested_body(value: Any, name: str) -> tuple[Body, dict[str, Any]]:
    """Encodes a tensor of rows of different lengths. Its values, offsets and lengths become
    separate tensors.
    """
    import torch

    if value.layout != torch.jagged:
        raise ValueError(
            f"cannot put member: a nested tensor must have the jagged layout. name={name!r} layout={value.layout};"
            " create it with layout=torch.jagged"
        )
    tensors = [value.values(), value.offsets()]
    if value.lengths() is not None:
        tensors.append(value.lengths())
    views: list[memoryview] = []
    owners, sizes = [], []
    for tensor in tensors:
        header, address, size, owner = _serialized(tensor, name)
        views += [memoryview(header), *([memoryview(_at(address, size)).cast("B")] if size else [])]
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
    return Body(views, sum(sizes), owners, True), described


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


def _check_destination(name: str, destination: Any, dtype: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(destination, np.ndarray):
        raise TypeError(f"{name}: the destination must be an ndarray, not {type(destination).__name__}")
    # Elements of such an array are pointers, which stored bytes must never become.
    if destination.dtype.hasobject:
        raise ValueError(f"{name}: the destination must not hold objects. dtype={destination.dtype}")
    if destination.dtype != dtype:
        raise ValueError(f"{name}: destination dtype mismatch: {destination.dtype}; expected {dtype}")
    if destination.shape != shape:
        raise ValueError(f"{name}: destination shape mismatch: {destination.shape}; expected {shape}")
    if not destination.flags.c_contiguous:
        raise ValueError(f"{name}: the destination must be C-contiguous")
    if not destination.flags.writeable:
        raise ValueError(f"{name}: the destination must be writeable")
