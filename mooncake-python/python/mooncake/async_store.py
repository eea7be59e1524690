"""The store for asyncio: every call `x` also as the coroutine `async_x`."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from mooncake._mooncake import ReplicateConfig
from mooncake.store import MooncakeDistributedStore

_PREFIX = "async_"


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    """Hands the outcome of a call to whoever awaits it, if somebody still does."""
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


class MooncakeDistributedStoreAsync(MooncakeDistributedStore):
    """A store whose calls can be awaited. The loop goes on while they wait.

    Those about values wait on no thread, and can be cancelled at any point: a put that is cancelled is taken back. The others
    run on the loop's executor.
    """

    async def async_put(self, key: str, value: Any, config: ReplicateConfig | None = None) -> int:
        """`put`."""
        return int(await self._async_put(key, value, config))

    async def async_upsert(self, key: str, value: Any, config: ReplicateConfig | None = None) -> int:
        """`upsert`."""
        return int(await self._async_put(key, value, config, True))

    async def async_get(self, key: str) -> bytes:
        """`get`."""
        value: bytes = await self._async_get(key)
        return value

    async def async_get_batch(self, keys: list[str]) -> list[bytes]:
        """`get_batch`."""
        values: list[bytes] = await self._async_get_batch(keys)
        return values

    async def async_is_exist(self, key: str) -> int:
        """`is_exist`."""
        return int(await self._async_is_exist(key))

    async def async_batch_is_exist(self, keys: list[str]) -> list[int]:
        """`batch_is_exist`."""
        found: list[int] = await self._async_batch_is_exist(keys)
        return found

    async def async_remove(self, key: str, force: bool = False) -> int:
        """`remove`."""
        return int(await self._async_remove(key, force))

    async def async_get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """`get_into`."""
        (code,) = await self._async_batch_get_into([key], [buffer_ptr], [size])
        return int(code)

    async def async_batch_get_into(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]:
        """`batch_get_into`."""
        codes: list[int] = await self._async_batch_get_into(keys, buffer_ptrs, sizes)
        return codes

    async def async_put_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        """`put_from`."""
        if size == 0:
            return self.put_from(key, buffer_ptr, size, config)
        (code,) = await self._async_batch_put_from([key], [buffer_ptr], [size], config)
        return int(code)

    async def async_batch_put_from(
        self, keys: list[str], buffer_ptrs: list[int], sizes: list[int], config: ReplicateConfig | None = None
    ) -> list[int]:
        """`batch_put_from`."""
        codes: list[int] = await self._async_batch_put_from(keys, buffer_ptrs, sizes, config)
        return codes

    async def async_batch_upsert_from(
        self, keys: list[str], buffer_ptrs: list[int], sizes: list[int], config: ReplicateConfig | None = None
    ) -> list[int]:
        """`batch_upsert_from`."""
        codes: list[int] = await self._async_batch_put_from(keys, buffer_ptrs, sizes, config, True)
        return codes

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        # Asked only for what is not there yet.
        call = None
        if name.startswith(_PREFIX) and not name.startswith(_PREFIX + "_"):
            call = getattr(type(self), name[len(_PREFIX) :], None)
        if call is None or not callable(call):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        bound = functools.partial(call, self)

        @functools.wraps(call)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.get_running_loop().run_in_executor(None, functools.partial(bound, *args, **kwargs))

        setattr(self, name, coroutine)
        return coroutine


__all__ = ["MooncakeDistributedStoreAsync"]
