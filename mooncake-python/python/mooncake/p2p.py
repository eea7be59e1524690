"""P2P Store: large objects, such as checkpoints, that many nodes read at once, from each other and
without a master.

Errors are raised as `mooncake.MooncakeError`, whose `code` is one of the numbers in docs/p2p.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from mooncake import _mooncake
from mooncake._arrays import as_buffer
from mooncake._mooncake import ObjectInfo
from mooncake.async_store import _awaited

__all__ = ["ObjectInfo", "P2PStore"]

_MAX_SHARD_SIZE = 64 << 20

Progress = Callable[[int, int], object]
# The class has a method of the name `list`.
_Objects = list[ObjectInfo]


def _destination(value: Any) -> Any:
    """Returns an object with the buffer protocol over the memory of a value, never over a copy."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.layout != torch.strided:
            raise TypeError(
                f"cannot read into tensor: a dense tensor on the CPU is needed. device={value.device} layout={value.layout}"
            )
        if not value.is_contiguous() or value.is_conj() or value.is_neg():
            raise TypeError("cannot read into tensor: its memory is not contiguous, or it is a conjugate or negative view")
        return as_buffer(value)
    try:
        return memoryview(value)
    except (TypeError, ValueError, BufferError):
        # Memory whose type the buffer protocol does not know, such as bfloat16 of `ml_dtypes`.
        if not hasattr(value, "__array_interface__"):
            raise
    import numpy as np

    array = np.asarray(value)
    if not array.flags.c_contiguous:
        raise TypeError("cannot read into array: its memory is not contiguous in C order")
    return as_buffer(array)


class P2PStore(_mooncake.P2PStore):
    """Store of one node: the objects that it serves, and its reads.

    `local_hostname` is the address where other nodes reach this one. `metadata_server` holds the
    catalogue: `etcd://host:2379`. Times are in seconds.

    A buffer is anything with the buffer protocol, the array interface of numpy, or a tensor of
    torch. It stays alive until its object is unregistered, deleted or closed. Calls that wait
    release the GIL. Each call `x` is also the coroutine `async_x`. A store that is dropped closes
    in the background.
    """

    def register(
        self,
        name: str,
        buffers: Sequence[Any],
        max_shard_size: int = _MAX_SHARD_SIZE,
        force_create: bool = False,
    ) -> None:
        """Enters an object that consists of the bytes of these buffers, as its seeder.

        Contiguous host memory is not copied. The bytes do not change until `unregister` returns.
        `max_shard_size` is in bytes and divides 4 GiB. `force_create` replaces another object of
        that name.
        """
        self._register(name, [as_buffer(value) for value in buffers], max_shard_size, force_create)

    def unregister(self, name: str) -> None:
        """Ends the copies of an object that this node registered, and releases the buffers. Copies
        of other nodes remain.
        """
        self._unregister(name)

    def list(self, prefix: str = "") -> _Objects:
        """Returns the objects whose names have this prefix, in the order of their names."""
        return self._list(prefix)

    def find(self, name: str) -> ObjectInfo | None:
        """Returns the object of this name, or `None`."""
        return self._find(name)

    def get_replica(
        self,
        name: str,
        buffers: Sequence[Any],
        *,
        resume: bool = False,
        on_progress: Progress | None = None,
    ) -> None:
        """Reads an object into buffers whose lengths are the object's `sizes`, and serves each
        shard from its arrival on.

        Buffers are writable, contiguous and in host memory. With `resume`, shards whose bytes are
        there already are not read. `on_progress` is called with the arrived and the total number of
        bytes on another thread. An interrupt (Ctrl-C) cancels the read.
        """
        self._get_replica(name, [_destination(value) for value in buffers], resume, on_progress)

    def delete_replica(self, name: str) -> None:
        """Ends the copies of an object that this node has read, and releases the buffers."""
        self._delete_replica(name)

    def close(self) -> None:
        """Cancels reads, ends all copies of this node, and releases all buffers."""
        self._close()

    def __enter__(self) -> P2PStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def async_register(
        self,
        name: str,
        buffers: Sequence[Any],
        max_shard_size: int = _MAX_SHARD_SIZE,
        force_create: bool = False,
    ) -> None:
        """Awaits `register`, which goes on if the await is cancelled."""
        held = [as_buffer(value) for value in buffers]
        await _awaited(self._async_register, name, held, max_shard_size, force_create)

    async def async_unregister(self, name: str) -> None:
        """Awaits `unregister`, which goes on if the await is cancelled."""
        await _awaited(self._async_unregister, name)

    async def async_list(self, prefix: str = "") -> _Objects:
        """Awaits `list`."""
        objects: _Objects = await _awaited(self._async_list, prefix)
        return objects

    async def async_find(self, name: str) -> ObjectInfo | None:
        """Awaits `find`."""
        found: ObjectInfo | None = await _awaited(self._async_find, name)
        return found

    async def async_get_replica(
        self,
        name: str,
        buffers: Sequence[Any],
        *,
        resume: bool = False,
        on_progress: Progress | None = None,
    ) -> None:
        """Awaits `get_replica`. A cancelled await cancels the read: the copies of this node leave
        the catalogue, and the buffers are released afterwards.
        """
        held = [_destination(value) for value in buffers]
        await _awaited(self._async_get_replica, name, held, resume, on_progress)

    async def async_delete_replica(self, name: str) -> None:
        """Awaits `delete_replica`, which goes on if the await is cancelled."""
        await _awaited(self._async_delete_replica, name)

    async def async_close(self) -> None:
        """Awaits `close`, which goes on if the await is cancelled."""
        await _awaited(self._async_close)
