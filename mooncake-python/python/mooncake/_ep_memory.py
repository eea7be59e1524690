"""Host memory of tensors, which is used again when nothing has a tensor in it any more."""

from __future__ import annotations

import mmap
import sys
import threading
from typing import Any

import torch

# Largest number of free pieces that are kept.
_MAX_FREE = 6


def _users(pieces: list[Any], at: int) -> int:
    return sys.getrefcount(pieces[at])


# Number of references to a piece that only its list has.
_UNUSED = _users([mmap.mmap(-1, 1)], 0)


class Memory:
    """Memory for the large tensors of one buffer.

    A tensor refers to its piece of memory, as do all views of it. So a piece without other
    references is free. Pages of a piece that nothing has touched take no space.
    """

    def __init__(self) -> None:
        self._pieces: list[mmap.mmap] = []
        self._lock = threading.Lock()

    def tensor(self, shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
        """Returns a tensor with unspecified elements."""
        length = dtype.itemsize
        for one in shape:
            length *= one
        if device.type != "cpu" or not length:
            return torch.empty(shape, dtype=dtype, device=device)
        with self._lock:
            piece = self._free(length)
            if piece is None:
                piece = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                self._pieces.append(piece)
            whole = torch.frombuffer(piece, dtype=torch.uint8)
        return whole[:length].view(dtype).view(shape)

    def _free(self, length: int) -> mmap.mmap | None:
        """Returns the smallest free piece that is long enough, and drops the oldest of too many."""
        pieces = self._pieces
        free = [at for at in range(len(pieces)) if _users(pieces, at) <= _UNUSED]
        fitting = [at for at in free if length <= len(pieces[at]) <= 2 * length]
        best = pieces[min(fitting, key=lambda at: len(pieces[at]))] if fitting else None
        if len(free) > _MAX_FREE:
            oldest = pieces[free[0]]
            if oldest is not best:
                del pieces[free[0]]
        return best
