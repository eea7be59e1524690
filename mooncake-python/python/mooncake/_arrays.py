"""Arrays in the store: values of any library whose memory other programs can name, and arrays that
keep their type and shape.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from mooncake import _mooncake
from mooncake._element_types import numpy_code, numpy_dtype
from mooncake._layout import MAX_DIMS, Header, LayoutError
from mooncake._mooncake import ReplicateConfig
from mooncake._shards import _job, _Tensor, _tensor_in_memory, _whole, _why_unsupported
from mooncake._tensor_plans import INVALID_PARAMS, as_it_is
from mooncake._types import word_of

_NOT_FOUND = -704
# Arrays up to this length are read in full with their headers.
_SMALL = 256 << 10
_BUFFERS = frozenset({bytes, bytearray, memoryview})
# Devices of DLPack whose memory the CPU reads: the CPU, and page-locked memory of CUDA and of ROCm.
_HOST_DEVICES = (1, 3, 11)


def as_buffer(value: Any) -> Any:
    """Returns an object with the buffer protocol over the bytes of a value in C order.

    Accepts tensors of torch, the array interface of numpy and DLPack on the CPU. Contiguous memory
    is not copied. Another value is returned as it is.
    """
    if type(value) in _BUFFERS:
        return value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _bytes_of_tensor(value)
    try:
        memoryview(value)
    except (TypeError, ValueError, BufferError):
        if hasattr(value, "__array_interface__"):
            return _bytes_of_array(value)
        if hasattr(value, "__dlpack__"):
            return _bytes_of_dlpack(value)
    return value


def _bytes_of_tensor(value: Any) -> Any:
    held = _tensor_in_memory(value, 64)
    if held is None:
        raise TypeError(f"cannot put value: {_why_unsupported(value)}; convert it to a dense tensor")
    if held.owner.device.type != "cpu":
        held = _tensor_in_memory(held.owner.cpu(), 64)
        assert held is not None
    if not held.header.data_bytes:
        return b""
    memory: Any = (ctypes.c_ubyte * held.header.data_bytes).from_address(held.address)
    # The tensor lives as long as the array over its memory.
    memory._owner = held.owner
    return memory


def _bytes_of_array(value: Any) -> Any:
    import numpy as np

    array = np.asarray(value)
    if array.dtype.hasobject:
        raise TypeError("cannot store an array of Python objects: it holds only their addresses")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _bytes_of_dlpack(value: Any) -> Any:
    device = value.__dlpack_device__()
    if device[0] not in _HOST_DEVICES:
        raise TypeError(f"cannot put value: it lies on a device. dlpack_device={tuple(map(int, device))}; copy it to the host")
    try:
        import numpy as np

        return _bytes_of_array(np.from_dlpack(value))
    except (BufferError, ImportError, RuntimeError) as error:
        # numpy lacks some types, such as bfloat16.
        try:
            import torch
        except ImportError:
            raise TypeError(f"cannot put value: {error}; pip install torch") from error
        return _bytes_of_tensor(torch.from_dlpack(value))


def _array_in_memory(array: Any) -> _Tensor:
    """Returns the bytes of an array with a header. Raises `LayoutError` for an array that has no
    stored form.
    """
    import numpy as np

    made = np.ascontiguousarray(array).reshape(np.shape(array))
    dtype, shape = numpy_code(made.dtype), tuple(made.shape)
    if dtype is None or len(shape) > MAX_DIMS:
        raise LayoutError(f"cannot put array: unsupported type or number of dimensions. dtype={made.dtype} ndim={len(shape)}")
    return _Tensor(Header(dtype, shape, shape), made.ctypes.data, made)


class ArrayCalls(_mooncake.Store):
    """Calls of the store for values in memory, and for arrays of numpy."""

    def put(self, key: str, value: Any, config: ReplicateConfig | None = None) -> int:
        """Stores a value under a new key. Returns 0, also if the key already exists (its value does
        not change), or a negative code.

        The value has the buffer protocol, the array interface of numpy or DLPack on the CPU. Its
        bytes are stored in C order. Contiguous memory is not copied first.
        """
        return super().put(key, as_buffer(value), config)

    def put_batch(self, keys: list[str], values: list[Any], config: ReplicateConfig | None = None) -> int:
        """Stores many values like `put`. Returns the code of the first failure."""
        return super().put_batch(keys, _buffers(values), config)

    def put_parts(self, key: str, *parts: Any, config: ReplicateConfig | None = None) -> int:
        """Stores a value that is given in consecutive parts, like `put`. A part with the buffer
        protocol has one dimension and single bytes.
        """
        return super().put_parts(key, *map(as_buffer, parts), config=config)

    def upsert(self, key: str, value: Any, config: ReplicateConfig | None = None) -> int:
        """Stores a value and replaces the previous one, if any."""
        return super().upsert(key, as_buffer(value), config)

    def upsert_batch(self, keys: list[str], values: list[Any], config: ReplicateConfig | None = None) -> int:
        """Stores many values like `upsert`. Returns the code of the first failure."""
        return super().upsert_batch(keys, _buffers(values), config)

    def upsert_parts(self, key: str, *parts: Any, config: ReplicateConfig | None = None) -> int:
        """Stores a value that is given in consecutive parts, like `upsert`."""
        return super().upsert_parts(key, *map(as_buffer, parts), config=config)

    def put_array(self, key: str, array: Any, config: ReplicateConfig | None = None) -> int:
        """Stores an array of numpy with its type and shape under a new key, as `put_tensor` stores
        a tensor. Returns 0 or a negative code.
        """
        return self._write_array(False, key, array, config)

    def upsert_array(self, key: str, array: Any, config: ReplicateConfig | None = None) -> int:
        """Stores an array like `put_array` and replaces the previous value, if any."""
        return self._write_array(True, key, array, config)

    def _write_array(self, upsert: bool, key: str, array: Any, config: ReplicateConfig | None) -> int:
        try:
            held = _array_in_memory(array)
            write = _whole(word_of("key", key), held)
        except LayoutError as error:
            return self._note(INVALID_PARAMS, str(error))
        return self._write_strips(upsert, [write], config, [held.owner])[0]

    def get_array(self, key: str) -> Any:
        """Returns the array, or the tensor, of an object as an array of numpy with its type and
        shape.

        Returns `None` if the key does not exist, or if its value is neither or has a type that
        numpy and ml_dtypes lack (see `last_error`).
        """
        import numpy as np

        found = self._heads([word_of("key", key)], _SMALL)[0]
        if found is None:
            self._note(_NOT_FOUND, f"cannot read array: there is no such object. key={key!r}")
            return None
        located, head = found
        header = Header.parse(head, located.size)
        if header is None:
            self._note(INVALID_PARAMS, f"cannot read array: the value has no type and shape. key={key!r}; use get")
            return None
        try:
            array = np.empty(header.local_shape, numpy_dtype(header.dtype))
        except ValueError as error:
            self._note(INVALID_PARAMS, str(error))
            return None
        # A view with single bytes exists for every type.
        memory = array.reshape(-1).view(np.uint8)
        if len(head) == located.size:
            memory[:] = np.frombuffer(head, np.uint8, offset=header.data_offset)
        elif self._read_strips([_job(array.ctypes.data, as_it_is(located, header))], [array])[0] != 0:
            return None
        return array


def _buffers(values: Any) -> Any:
    """Returns the buffers of a list of values, and any other value as it is."""
    return [*map(as_buffer, values)] if isinstance(values, list | tuple) else values
