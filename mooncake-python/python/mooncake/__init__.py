"""Mooncake: a distributed KV cache in memory that other machines read and write directly."""

from __future__ import annotations

import atexit as _atexit
import os as _os
from pkgutil import extend_path as _extend_path

_MOONCAKE_RS = True

from mooncake import _installation

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

__path__ = _extend_path(__path__, __name__)

RegisteredBufferPool = BufferPool

__all__ = [
    "BufferPool",
    "BusyError",
    "CorruptError",
    "ForkedError",
    "InvalidArgumentError",
    "LastError",
    "MooncakeError",
    "NoSpaceError",
    "NotFoundError",
    "RegisteredBufferPool",
    "UnavailableError",
    "UnsupportedError",
    "__version__",
]

# Open stores leave their clusters in order, while the interpreter still runs.
_atexit.register(_mooncake._close_all)
_os.register_at_fork(after_in_child=_mooncake._after_fork)
