"""Store for asyncio: every call `x` is also the coroutine `async_x`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

from mooncake._arrays import as_buffer
from mooncake._mooncake import ExistOptions, ReplicateConfig
from mooncake.store import MooncakeDistributedStore

_PREFIX = "async_"

_Call = TypeVar("_Call", bound=Callable[..., Any])


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    """Resolves the future of a call, unless it is already done."""
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


async def _awaited(begin: Callable[..., bool | None], *args: Any) -> Any:
    """Returns the outcome of a call that resolves the future it is given.

    If the call says so, a cancellation is raised only when the call has ended.
    """
    future = asyncio.get_running_loop().create_future()
    to_the_end = begin(future, *args)
    return await (_to_the_end(future) if to_the_end else future)


async def _to_the_end(future: asyncio.Future[Any]) -> Any:
    """Returns the outcome of a call. A cancellation is raised only when the call has ended."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            # A second cancellation has no further effect.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        if not future.cancelled():
            # Marks the exception as retrieved.
            future.exception()
        raise


async def _on_executor(call: Callable[..., Any], *args: Any, wait_on_cancel: bool = False, **kwargs: Any) -> Any:
    """Returns the outcome of a call on a thread. The call goes on when its await is cancelled."""
    future = asyncio.get_running_loop().run_in_executor(None, functools.partial(call, *args, **kwargs))
    return await (_to_the_end(future) if wait_on_cancel else future)


def _of_call(native: _Call) -> _Call:
    """Returns the coroutine of a call.

    If a subclass or a test has replaced the call, the coroutine runs the replacement on the
    executor.
    """
    name = native.__name__.removeprefix(_PREFIX)
    ours = getattr(MooncakeDistributedStore, name)

    @functools.wraps(native)
    async def coroutine(self: MooncakeDistributedStore, *args: Any, **kwargs: Any) -> Any:
        if name in self.__dict__ or getattr(type(self), name) is not ours:
            return await _on_executor(getattr(self, name), *args, **kwargs)
        return await native(self, *args, **kwargs)

    return cast(_Call, coroutine)


class MooncakeDistributedStoreAsync(MooncakeDistributedStore):
    """Store whose calls can be awaited without blocking the event loop.

    Calls that transfer values occupy no thread and can be cancelled at any point. A cancelled put
    is revoked. The other calls run on the loop's executor, and so does a call that a subclass has
    overridden. A call on the executor goes on when its await is cancelled. With
    `wait_on_cancel=True`, and for calls that name unregistered memory, the cancellation is raised
    only when the call has ended.
    """

    @_of_call
    async def async_put(self, key: str, value: Any, config: ReplicateConfig | None = None) -> int:
        """Awaits `put`."""
        return int(await _awaited(self._async_put, key, as_buffer(value), config))

    @_of_call
    async def async_upsert(self, key: str, value: Any, config: ReplicateConfig | None = None) -> int:
        """Awaits `upsert`."""
        return int(await _awaited(self._async_put, key, as_buffer(value), config, True))

    @_of_call
    async def async_get(self, key: str) -> bytes:
        """Awaits `get`."""
        value: bytes = await _awaited(self._async_get, key)
        return value

    @_of_call
    async def async_get_batch(self, keys: list[str]) -> list[bytes]:
        """Awaits `get_batch`."""
        values: list[bytes] = await _awaited(self._async_get_batch, keys)
        return values

    @_of_call
    async def async_is_exist(self, key: str, options: ExistOptions | None = None) -> int:
        """Awaits `is_exist`. A call with options runs on the executor."""
        if options is not None:
            return int(await _on_executor(self.is_exist, key, options))
        return int(await _awaited(self._async_is_exist, key))

    @_of_call
    async def async_batch_is_exist(self, keys: list[str], options: ExistOptions | None = None) -> list[int]:
        """Awaits `batch_is_exist`. A call with options runs on the executor."""
        found: list[int]
        if options is not None:
            found = await _on_executor(self.batch_is_exist, keys, options)
            return found
        found = await _awaited(self._async_batch_is_exist, keys)
        return found

    @_of_call
    async def async_prefix_hits(self, keys: list[str]) -> int:
        """Awaits `prefix_hits`."""
        return int(await _awaited(self._async_prefix_hits, keys))

    @_of_call
    async def async_remove(self, key: str, force: bool = False) -> int:
        """Awaits `remove`."""
        return int(await _awaited(self._async_remove, key, force))

    @_of_call
    async def async_get_into(self, key: str, buffer_ptr: int, size: int, *, wait_on_cancel: bool = False) -> int:
        """Awaits `get_into`.

        A cancelled call may write to the buffer until its transfer has ended or `unregister_buffer`
        has returned 0. With `wait_on_cancel`, a cancellation is raised only when nothing writes to
        the buffer any more, at the timeout of a call at the latest.
        """
        (code,) = await self._get_into([key], [buffer_ptr], [size], wait_on_cancel)
        return int(code)

    @_of_call
    async def async_batch_get_into(
        self, keys: list[str], buffer_ptrs: list[int], sizes: list[int], *, wait_on_cancel: bool = False
    ) -> list[int]:
        """Awaits `batch_get_into`. Cancellation and `wait_on_cancel` work as in `async_get_into`.
        """
        return await self._get_into(keys, buffer_ptrs, sizes, wait_on_cancel)

    async def _get_into(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int], landed: bool) -> list[int]:
        codes: list[int] = await _awaited(self._async_batch_get_into, keys, buffer_ptrs, sizes, landed)
        return codes

    @_of_call
    async def async_put_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        """Awaits `put_from`."""
        if size == 0:
            return self.put_from(key, buffer_ptr, size, config)
        (code,) = await _awaited(self._async_batch_put_from, [key], [buffer_ptr], [size], config)
        return int(code)

    @_of_call
    async def async_batch_put_from(
        self, keys: list[str], buffer_ptrs: list[int], sizes: list[int], config: ReplicateConfig | None = None
    ) -> list[int]:
        """Awaits `batch_put_from`."""
        codes: list[int] = await _awaited(self._async_batch_put_from, keys, buffer_ptrs, sizes, config)
        return codes

    @_of_call
    async def async_batch_upsert_from(
        self, keys: list[str], buffer_ptrs: list[int], sizes: list[int], config: ReplicateConfig | None = None
    ) -> list[int]:
        """Awaits `batch_upsert_from`."""
        codes: list[int] = await _awaited(self._async_batch_put_from, keys, buffer_ptrs, sizes, config, True)
        return codes

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        # Python calls this only for attributes that do not exist yet.
        of = name[len(_PREFIX) :] if name.startswith(_PREFIX) and not name.startswith(_PREFIX + "_") else None
        call = None if of is None else getattr(type(self), of, None)
        if of is None or not callable(call):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        @functools.wraps(call)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            return await _on_executor(getattr(self, of), *args, **kwargs)

        setattr(self, name, coroutine)
        return coroutine


__all__ = ["MooncakeDistributedStoreAsync"]
