"""Copies of many arrays to one place, without the interpreter lock. Needs numpy."""

from __future__ import annotations

import ctypes
import operator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

# Calls of this kind release the interpreter lock.
_MEMMOVE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ("memmove", ctypes.CDLL(None))
)
# A list whose arrays are shorter on average is copied by numpy in one call, which costs less than a
# call for each.
_SHORT = 16 << 10


def concat_arrays_into(
    arrays: list[Any], dest_ptr: int, dest_size: int, start: int = 0, count: int = -1, nthreads: int = 1, /
) -> int:
    """Copies the bytes of some arrays, one after the other, to an address. Returns their number.

    The arrays are those from `start` on, `count` of them or all. Runs of arrays are copied by
    `nthreads` threads. Nothing is copied if an argument is invalid.

    Raises `TypeError` for elements that are not arrays. Raises `ValueError` for an array that is
    not C-contiguous, and for a destination that is too small.
    """
    if not isinstance(arrays, list):
        raise TypeError(f"arrays must be a list, not {type(arrays).__name__}")
    address, room, start, count, threads = map(operator.index, (dest_ptr, dest_size, start, count, nthreads))
    first = min(max(start, 0), len(arrays))
    last = len(arrays) if count < 0 else min(first + count, len(arrays))
    selected = arrays[first:last]
    if not selected:
        return 0
    for at, array in enumerate(selected, first):
        if not isinstance(array, np.ndarray):
            raise TypeError(f"arrays[{at}] must be an ndarray, not {type(array).__name__}")
        if not array.flags.c_contiguous:
            raise ValueError(f"arrays[{at}] must be C-contiguous")
    total = sum(int(array.nbytes) for array in selected)
    if total > room:
        raise ValueError(f"destination buffer too small: size={room} needed={total}")
    if not total:
        return 0
    if not address:
        raise ValueError("destination buffer must not be at address 0")
    threads = min(max(threads, 1), len(selected))
    each = -(-len(selected) // threads)
    runs = []
    for at in range(0, len(selected), each):
        run = selected[at : at + each]
        size = sum(int(array.nbytes) for array in run)
        runs.append((run, address, size))
        address += size
    if len(runs) == 1:
        _copy(*runs[0])
    else:
        with ThreadPoolExecutor(len(runs)) as executor:
            for done in [executor.submit(_copy, *run) for run in runs]:
                done.result()
    return total


def _copy(arrays: list[Any], address: int, size: int) -> None:
    """Copies arrays of `size` bytes in total."""
    if size // len(arrays) < _SHORT and not any(array.dtype.hasobject for array in arrays):
        into = np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(address))
        if size:
            np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays if array.size], out=into)
        return
    for array in arrays:
        if array.nbytes:
            _MEMMOVE(address, array.ctypes.data, array.nbytes)
        address += array.nbytes
