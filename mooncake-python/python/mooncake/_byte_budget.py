"""Limit of the bytes that peers keep in this process: parts of requests, and unread responses."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Protocol

from mooncake._sizes import parse_size

_LOG = logging.getLogger(__name__)
_MIB = 1 << 20
# Largest default of the limit, and the divisor of the memory that gives it on smaller machines.
_MOST = 256 * _MIB
_SHARE = 16
# Seconds that each message has beyond those for its length, and the bytes that it has to move in
# one second.
GRACE_S = 30.0
_RATE = _MIB


def time_for(length: int, grace_s: float = GRACE_S) -> float:
    """Returns the longest time for a message of this length in seconds."""
    return grace_s + length / _RATE


class Holder(Protocol):
    """Connection that holds bytes."""

    held: int
    since: float | None
    began: float | None

    def close(self) -> None: ...


class ByteBudget:
    """Bytes of all connections, with a limit.

    Above the limit, the connection is closed whose message has been under way for longest. Buffers
    of idle connections close none. One message that is longer than half of the limit does not count
    as long as the others have the other half.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.closed = 0
        self._holders: dict[int, Holder] = {}

    def hold(self, holder: Holder, count: int) -> None:
        """Sets the number of bytes that a connection holds."""
        self.held += count - holder.held
        grows, holder.held = count > holder.held, count
        if count:
            self._holders[id(holder)] = holder
        else:
            self._holders.pop(id(holder), None)
        while grows and self.held > self.limit:
            under_way = [it for it in self._holders.values() if it.began is not None]
            waiting = [it for it in under_way if it.since is not None]
            if self._is_within([it.held for it in under_way]) or not waiting:
                return
            longest = min(waiting, key=lambda it: it.began or 0.0)
            _LOG.warning(
                "connection closed: waiting requests and unread responses exceed their limit. bytes=%s limit=%s", longest.held, self.limit
            )
            self.closed += 1
            self.hold(longest, 0)
            longest.close()

    def _is_within(self, under_way: list[int]) -> bool:
        """Returns whether the bytes of these messages are within the limit."""
        longest = max(under_way, default=0)
        return len(under_way) < 2 or (longest > self.limit // 2 and sum(under_way) - longest <= self.limit // 2)

    def metrics(self, prefix: str) -> list[tuple[str, str, str, dict[str, int]]]:
        """Returns the use of the budget as families of `metrics_page`."""
        return [
            (f"{prefix}_connection_bytes", "gauge", "Bytes of incomplete requests and unread responses", {"": self.held}),
            (f"{prefix}_connection_bytes_limit", "gauge", "Limit of the bytes of incomplete requests and unread responses", {"": self.limit}),
            (
                f"{prefix}_connections_closed_for_bytes_total",
                "counter",
                "Connections that were closed because these bytes exceeded their limit",
                {"": self.closed},
            ),
        ]


def default_limit() -> int:
    """Returns `MC_CONNECTION_BYTES`, or 256 MiB, or a 16th of the memory if that is less."""
    text = os.environ.get("MC_CONNECTION_BYTES", "")
    if text:
        with contextlib.suppress(ValueError):
            if (limit := parse_size(text)) >= _MIB:
                return limit
        _LOG.warning("cannot use MC_CONNECTION_BYTES: it must be a size of at least 1MB. value=%r", text)
    return min(_MOST, _memory() // _SHARE)


def _memory() -> int:
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):
            # There is no such control group, or it has no limit.
            continue
    return min(limits)
