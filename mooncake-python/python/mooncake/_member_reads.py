"""Reads of one member of a bundle: bytes, an array, or a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mooncake._bundle_types import StructuredMemberSlice
from mooncake._call_reads import CallReader, reader_of
from mooncake._layout import HEADER_SIZE, Header
from mooncake._manifests import BUFFER, array_kind
from mooncake._members import (
    RawDestination,
    TensorObjectBuffer,
    _at,
    _check_destination,
    _loaded,
    _nested_of,
    _nested_rows,
)
from mooncake._payloads import Numbers
from mooncake._pool_results import array_of_lease
from mooncake._shards import _empty, _views
from mooncake._store_calls import StoreCalls
from mooncake._tensors import _deserialize_tensor

Rows = StructuredMemberSlice | Sequence[int] | None
_ARRAY_AXIS = "structured ndarray slicing currently supports axis=0 only"
_TENSOR_AXIS = "structured tensor slicing currently supports axis=0 only"


class MemberReader:
    """Reader of one member."""

    def __init__(
        self,
        calls: StoreCalls,
        pool: Callable[[], Any],
        name: str,
        payload: Mapping[str, Any],
        described: Mapping[str, Any],
    ) -> None:
        self._calls, self._pool, self._name, self._payload, self._described = calls, pool, name, payload, described
        self._reader = reader_of(calls, payload)

    def read(self, rows: Rows, destination: Any) -> Any:
        """Reads the member, or those rows of it that a slice or numbers select."""
        encoding = self._described.get("encoding")
        if encoding == "ndarray":
            return self._array(rows, destination)
        if encoding == "torch_tensor":
            return self._tensor(rows, destination)
        if encoding != "bytes":
            raise ValueError(f"{self._name}: unsupported structured field encoding: {encoding!r}")
        if destination is not None:
            raise ValueError(f"{self._name}: only arrays and tensors can be read into a destination")
        if rows is not None:
            raise ValueError(f"{self._name}: a member of bytes does not support slicing")
        return self._bytes()

    # Bytes and arrays.

    def _leased(self, start: int, dtype: Any, shape: tuple[int, ...], size: int) -> Any:
        """Reads into memory of the buffer pool. Returns `None` if that is not possible."""
        pool = self._pool() if size and self._calls.method("get_into_ranges") is not None else None
        if pool is None:
            return None
        try:
            lease = pool.acquire(size)
        except RuntimeError:
            return None
        try:
            # The memory of the pool is registered already.
            CallReader(self._calls, self._payload).leased(start, size, lease.ptr)
            return array_of_lease(lease, dtype, shape, size)
        except BaseException:
            lease.release()
            raise

    def _bytes(self) -> Any:
        size, kind = self._payload["bytes"], self._described.get(BUFFER)
        if kind in ("bytearray", "memoryview"):
            self._reader.expect(size)
            buffer = bytearray(size)
            self._reader.rows(0, 1, range(size), np.frombuffer(buffer, np.uint8))
            return buffer if kind == "bytearray" else memoryview(buffer)
        array = self._leased(0, np.uint8, (size,), size)
        if array is not None:
            return array
        if not size or not self._calls.is_native:
            return self._reader.whole()
        # An array, as in Mooncake C++, whose results lie in a buffer pool.
        self._reader.expect(size)
        into = np.empty(size, np.uint8)
        self._reader.rows(0, 1, range(size), into)
        return into

    def _array(self, rows: Rows, destination: Any) -> Any:
        name, described = self._name, self._described
        dtype, shape = array_kind(name, described, self._payload["bytes"])
        if rows is not None and not shape:
            raise ValueError(f"{name}: the array has no rows")
        # An array without dimensions has one element.
        selected = _selected(rows, shape or (1,), _ARRAY_AXIS)
        wanted = (len(selected), *shape[1:]) if shape else ()
        width = math.prod(shape[1:]) * dtype.itemsize
        size = math.prod(wanted) * dtype.itemsize
        into = destination
        if isinstance(destination, RawDestination | TensorObjectBuffer):
            if destination.size < size:
                raise ValueError(f"{name}: the destination is too small. size={destination.size} needed={size}")
            # The caller gets its own memory as an array.
            into = np.ndarray(wanted, dtype, _at(destination.ptr, size))
        elif destination is not None:
            _check_destination(name, destination, dtype, wanted)
        else:
            if isinstance(selected, range) and selected.step == 1 and len(selected):
                array = self._leased(selected[0] * width, dtype, wanted, size)
                if array is not None:
                    return array
            self._reader.expect(size)
            into = np.empty(wanted, dtype)
        self._reader.rows(0, width, selected, into)
        return into

    # Tensors.

    def _tensor(self, rows: Rows, destination: Any) -> Any:
        name = self._name
        if destination is not None and not isinstance(destination, RawDestination | TensorObjectBuffer):
            raise ValueError(f"{name}: the destination of a tensor must be a tensor_object_buffer or raw_destination")
        if self._described.get("nested") or self._payload.get("format") == "torch_save":
            if destination is not None:
                raise ValueError(f"{name}: a nested or pickled tensor does not support destinations")
            return self._pickled_or_nested(rows)
        if rows is None and destination is None and not self._calls.is_native:
            return self._whole_tensor()
        if rows is None and destination is not None:
            return self._into_destination(destination)
        return self._rows_of_tensor(rows, destination)

    def _pickled_or_nested(self, rows: Rows) -> Any:
        data = self._reader.whole()
        if self._described.get("nested"):
            whole = _nested_of(data, self._described)
            if rows is None:
                return whole
            return _nested_rows(whole, [*map(int, _selected(rows, (len(whole),), _TENSOR_AXIS))])
        whole = _loaded(data)
        if rows is None:
            return whole
        if not whole.dim():
            raise ValueError(f"{self._name}: the tensor has no rows")
        return whole[[*map(int, _selected(rows, tuple(whole.shape), _TENSOR_AXIS))]]

    def _whole_tensor(self) -> Any:
        if self._payload.get("kind") != "tensor":
            return _deserialize_tensor(self._reader.whole())
        get_tensor = self._calls.method("get_tensor")
        if get_tensor is None:
            raise RuntimeError(f"{self._name}: the store does not support get_tensor")
        return get_tensor(self._payload["key"])

    def _into_destination(self, destination: RawDestination | TensorObjectBuffer) -> Any:
        """Reads a whole tensor with its header. Returns a tensor over the memory for one that the
        store has written as a tensor, and the destination for others.
        """
        size, is_tensor = self._payload["bytes"], self._payload.get("kind") == "tensor"
        if is_tensor and not self._calls.is_native:
            get_tensor_into = self._calls.method("get_tensor_into")
            if get_tensor_into is None:
                raise RuntimeError(f"{self._name}: the store does not support get_tensor_into")
            tensor = get_tensor_into(self._payload["key"], destination.ptr, destination.size)
            return destination if tensor is None else tensor
        if destination.size < size:
            raise ValueError(f"{self._name}: the destination is too small. size={destination.size} needed={size}")
        if isinstance(self._reader, CallReader):
            self._reader.into_address(destination.ptr)
            return destination
        self._reader.rows(0, 1, range(size), np.ctypeslib.as_array(_at(destination.ptr, size)))
        head = bytes(_at(destination.ptr, min(size, HEADER_SIZE)))
        header = Header.parse(head, size)
        if header is None:
            raise ValueError(f"{self._name}: not a tensor")
        return _views(destination.ptr + header.data_offset, header) if is_tensor else destination

    def _rows_of_tensor(self, rows: Rows, destination: Any) -> Any:
        name, reader = self._name, self._reader
        if isinstance(rows, StructuredMemberSlice) and rows.step != 1:
            raise ValueError("structured tensor slicing currently requires step=1")
        head = np.empty(min(HEADER_SIZE, self._payload["bytes"]), np.uint8)
        reader.rows(0, 1, range(head.nbytes), head)
        header = Header.parse(head.tobytes(), self._payload["bytes"])
        if header is not None and header.is_quantized:
            if rows is not None or destination is not None:
                raise ValueError(f"{name}: a quantized tensor is read as a whole, without a destination")
            return _deserialize_tensor(reader.whole())
        if header is None or (rows is not None and not header.local_shape):
            raise ValueError(f"{name}: not a tensor" if header is None else f"{name}: the tensor has no rows")
        shape, width = header.local_shape, header.data_bytes
        selected: range | Numbers = range(1)
        if rows is not None:
            selected = _selected(rows, shape, _TENSOR_AXIS)
            width = header.data_bytes // shape[0] if shape[0] else 0
            shape = (len(selected), *shape[1:])
        part = Header(header.dtype, shape, shape)
        if destination is None:
            reader.expect(part.data_bytes)
            made = _empty(part)
            memory = np.ctypeslib.as_array(_at(made.data_ptr(), part.data_bytes))
            reader.rows(header.data_offset, width, selected, memory)
            return made
        size = HEADER_SIZE + part.data_bytes
        if destination.size < size:
            raise ValueError(f"{name}: the destination is too small. size={destination.size} needed={size}")
        into = np.ctypeslib.as_array(_at(destination.ptr, size))
        into[:HEADER_SIZE] = np.frombuffer(part.pack(), np.uint8)
        reader.rows(header.data_offset, width, selected, into[HEADER_SIZE:])
        return destination


def _selected(rows: Rows, shape: tuple[int, ...], wrong_axis: str) -> range | Numbers:
    """Returns the numbers of the selected rows of a member of that shape."""
    if rows is None:
        return range(shape[0])
    if isinstance(rows, StructuredMemberSlice):
        if rows.axis != 0:
            raise ValueError(wrong_axis)
        return range(shape[0])[rows.start : rows.end : rows.step]
    if isinstance(rows, range) and rows.step > 0:
        within = not rows or (rows[0] >= 0 and rows[-1] < shape[0])
        picked: range | Numbers = rows
    else:
        picked = np.array(rows, np.int64)
        within = not len(picked) or bool(picked.min() >= 0 and picked.max() < shape[0])
    if not within:
        raise IndexError(f"row index out of range for {shape[0]} rows")
    return picked
