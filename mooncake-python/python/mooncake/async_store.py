"""The store for asyncio: every call `x` also as the coroutine `async_x`."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from mooncake.store import MooncakeDistributedStore

_PREFIX = "async_"


class MooncakeDistributedStoreAsync(MooncakeDistributedStore):
    """A store whose calls can be awaited. The loop goes on while they wait."""

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        # Asked only for what is not there yet.
        call = None
        if name.startswith(_PREFIX) and not name.startswith(_PREFIX + "_"):
            call = getattr(type(self), name[len(_PREFIX) :], None)
        if not callable(call):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        bound = functools.partial(call, self)

        @functools.wraps(call)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.get_running_loop().run_in_executor(None, functools.partial(bound, *args, **kwargs))

        setattr(self, name, coroutine)
        return coroutine


__all__ = ["MooncakeDistributedStoreAsync"]
