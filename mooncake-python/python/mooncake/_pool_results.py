"""Results in memory of a buffer pool, which the reader returns to the pool."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

OWNER = "_mooncake_pool_owner"
_SECTIONS = ("batch", "non_tensor_batch", "meta_info")


class PoolOwner:
    """Lease of the memory of one result."""

    def __init__(self, lease: Any) -> None:
        self._lease = lease

    def release(self) -> None:
        """Returns the memory to the pool. Only the first call has an effect."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    def __del__(self) -> None:
        # The interpreter may be ending.
        with contextlib.suppress(Exception):
            self.release()


class PoolArray(np.ndarray[Any, Any]):
    """Array in memory of a pool. Its views keep the lease, too."""

    _mooncake_pool_owner: Any

    def __array_finalize__(self, source: Any) -> None:
        owner = getattr(source, OWNER, None)
        if owner is not None:
            self._mooncake_pool_owner = owner


class PoolList(list[Any]):
    """List of views of such an array."""

    _mooncake_pool_owner: Any


def array_of_lease(lease: Any, dtype: Any, shape: tuple[int, ...], size: int) -> Any:
    """Returns the memory of a lease as an array."""
    owner = PoolOwner(lease)
    memory: Any = (ctypes.c_ubyte * size).from_address(lease.ptr)
    # An array without the subclass keeps only its memory.
    memory._owner = owner
    array = np.frombuffer(memory, dtype).reshape(shape).view(PoolArray)
    array._mooncake_pool_owner = owner
    return array


def owned(value: Any, source: Any) -> Any:
    """Returns a list or an array of views of `source` that carries the lease of `source`."""
    owner = getattr(source, OWNER, None)
    if owner is None:
        return value
    made = PoolList(value) if isinstance(value, list) else value.view(PoolArray)
    made._mooncake_pool_owner = owner
    return made


def release(value: Any) -> None:
    """Releases all leases in a result, each once. Containers may contain themselves."""
    seen: set[int] = set()
    pending = [value]
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        owner = getattr(one, OWNER, None)
        if owner is not None and id(owner) not in seen:
            seen.add(id(owner))
            owner.release()
        pending += _parts(one)


def _parts(value: Any) -> list[Any]:
    """Returns the values in a container."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, np.ndarray):
        return value.reshape(-1).tolist() if value.dtype == object else []
    if hasattr(value, "batch") and hasattr(value, "non_tensor_batch"):
        return [getattr(value, name, None) for name in _SECTIONS]
    return [value.objects] if type(value).__name__ == "StructuredObjectResult" else []
