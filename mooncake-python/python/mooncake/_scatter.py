"""Arguments of transfers as arrays, pages and scattered ranges, and tickets of transfers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

# Formats of 8-byte integers in the byte order of this machine.
_FORMATS = ("q", "Q", "l", "L", "n", "N")


def column(name: str, array: Any) -> list[int]:
    """Returns the numbers of a contiguous one-dimensional array of 8-byte integers."""
    try:
        view = memoryview(array)
    except TypeError:
        raise TypeError(f"{name} must be an array of 8-byte integers, not {type(array).__name__}") from None
    if view.ndim != 1:
        raise TypeError(f"{name} must be one-dimensional, not {view.ndim}-dimensional")
    native_format = view.format.lstrip("@=<")
    if view.itemsize != 8 or native_format not in _FORMATS:
        raise TypeError(f"{name} must hold 8-byte integers (uint64/int64)")
    if not view.contiguous:
        raise TypeError(f"{name} must be contiguous")
    return view.cast("B").cast("q" if native_format.islower() else "Q").tolist()


def columns(buffers: Any, peers: Any, lengths: Any) -> tuple[list[int], list[int], list[int]]:
    """Returns the columns of a batch, of one length."""
    all_columns = (column("buffers", buffers), column("peer_buffer_addresses", peers), column("lengths", lengths))
    if len({len(one) for one in all_columns}) != 1:
        raise ValueError("buffers, peer_buffer_addresses and lengths must have the same length")
    return all_columns


def pages(source: Any, target: Any, fields: Any) -> tuple[Any, Any, Any]:
    """Returns the local address, the address at the peer and the length of each field of each pair
    of pages.
    """
    import numpy as np

    def numbers(name: str, array: Any) -> Any:
        found = np.asarray(array)
        if found.size == 0:
            return found.astype(np.int64)
        if found.dtype.kind not in "iu":
            raise TypeError(f"{name} must hold integers, not {found.dtype}")
        return found.astype(np.int64)

    local, peer = numbers("src_pages", source), numbers("dst_pages", target)
    rows = numbers("fields", fields)
    if rows.ndim != 2 or rows.shape[1] != 5:
        raise TypeError("fields must be a [rows, 5] array")
    if local.ndim != 1 or peer.ndim != 1:
        raise TypeError("src_pages and dst_pages must be one-dimensional")
    if len(local) != len(peer):
        raise ValueError("src_pages and dst_pages must have the same length")
    if (rows[:, 4] <= 0).any():
        raise ValueError("the length of a field must be above 0")
    if (rows[:, (1, 3)] < 0).any():
        raise ValueError("the stride of a field must not be negative")
    buffers = (rows[:, 0, None] + local * rows[:, 1, None]).ravel()
    places = (rows[:, 2, None] + peer * rows[:, 3, None]).ravel()
    return buffers, places, np.repeat(rows[:, 4], len(local))


class ScatterTransferStatus(IntEnum):
    """State of a scatter transfer."""

    COMPLETED = 0
    FAILED_DRAINED = -1
    COMPLETION_UNKNOWN = -2


class ScatterTransferTicket:
    """Scatter transfer in progress, or its outcome.

    While the state is `COMPLETION_UNKNOWN`, the memory of both sides must stay allocated.
    """

    __slots__ = ("_batch", "_drain", "_status", "__weakref__")

    def __init__(self, status: ScatterTransferStatus, batch: int = 0, drain: Callable[[int, int], int] | None = None):
        self._status = status
        self._batch = batch
        self._drain = drain

    @property
    def status(self) -> ScatterTransferStatus:
        """State of the transfer now."""
        return self.drain(0)

    @property
    def drained(self) -> bool:
        """True if no transfer uses the memory any more."""
        return self.status is not ScatterTransferStatus.COMPLETION_UNKNOWN

    def drain(self, timeout_ms: int) -> ScatterTransferStatus:
        """Waits for the end of the transfer, for at most `timeout_ms` milliseconds, and returns the
        state. 0 does not wait.
        """
        if timeout_ms < 0:
            raise ValueError(f"timeout_ms must not be negative, not {timeout_ms}")
        if self._status is ScatterTransferStatus.COMPLETION_UNKNOWN and self._drain is not None:
            code = self._drain(self._batch, timeout_ms)
            # A transfer that exceeded its time limit may still use the memory.
            if code in (1, -1):
                self._status = ScatterTransferStatus.COMPLETED if code == 1 else ScatterTransferStatus.FAILED_DRAINED
        return self._status

    def __repr__(self) -> str:
        return f"<ScatterTransferTicket {self._status.name}>"


def scattered(
    local_bases: Sequence[int],
    local_capacities: Sequence[int],
    remote_bases: Sequence[int],
    remote_capacities: Sequence[int],
    local_offsets: Sequence[Sequence[int]],
    remote_offsets: Sequence[Sequence[int]],
    lengths: Sequence[Sequence[int]],
) -> tuple[list[int], list[int], list[int]] | str:
    """Returns the local addresses, the addresses at the peer and the lengths of ranges, or the
    reason why they are refused.
    """
    lists = (local_capacities, remote_bases, remote_capacities, local_offsets, remote_offsets, lengths)
    if any(len(one) != len(local_bases) for one in lists):
        return "the lists have different lengths"
    buffers: list[int] = []
    places: list[int] = []
    sizes: list[int] = []
    for base, capacity, peer, peer_capacity, offsets, peer_offsets, of_base in zip(
        local_bases, local_capacities, remote_bases, remote_capacities, local_offsets, remote_offsets, lengths
    ):
        if not len(offsets) == len(peer_offsets) == len(of_base):
            return "the lists of a base have different lengths"
        for offset, peer_offset, size in zip(offsets, peer_offsets, of_base):
            if min(offset, peer_offset, size) < 0:
                return "an offset or a length is negative"
            if offset + size > capacity or peer_offset + size > peer_capacity:
                return (
                    f"a range exceeds its capacity. len={size} local_offset={offset} of={capacity} "
                    f"remote_offset={peer_offset} of={peer_capacity}"
                )
            if size:
                buffers.append(base + offset)
                places.append(peer + peer_offset)
                sizes.append(size)
    return buffers, places, sizes
