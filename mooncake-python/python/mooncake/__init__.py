"""Mooncake: a distributed KV cache in memory that other machines read and write directly."""

from __future__ import annotations

import atexit as _atexit
import os as _os
from pkgutil import extend_path as _extend_path
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

_MOONCAKE_RS = True

from mooncake import _installation

_installation.check_interpreter()
_installation.check()

from mooncake import _mooncake
from mooncake._mooncake import (
    BufferPool,
    BusyError,
    CorruptError,
    ForkedError,
    InvalidArgumentError,
    LastError,
    MooncakeError,
    NoSpaceError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
    __version__,
)

if _TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig

__path__ = _extend_path(__path__, __name__)

RegisteredBufferPool = BufferPool

__all__ = [
    "BufferPool",
    "BusyError",
    "CorruptError",
    "ForkedError",
    "InvalidArgumentError",
    "LastError",
    "MooncakeDistributedStore",
    "MooncakeError",
    "NoSpaceError",
    "NotFoundError",
    "RegisteredBufferPool",
    "ReplicateConfig",
    "UnavailableError",
    "UnsupportedError",
    "__version__",
]



def __getattr__(name: str) -> _Any:
    # The module of the store is loaded by programs that use a store.
    if name in ("MooncakeDistributedStore", "ReplicateConfig"):
        from mooncake import store

        return getattr(store, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Open stores leave their clusters in order, while the interpreter still runs.
_atexit.register(_mooncake._close_all)
_os.register_at_fork(after_in_child=_mooncake._after_fork)
