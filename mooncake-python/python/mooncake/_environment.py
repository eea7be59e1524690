"""Environment variables of the native half. No other module reads them."""

from __future__ import annotations

import math
import os

from mooncake._sizes import parse_size

_FALSE = ("", "0", "false", "no", "off")
_FIRST_PORT = 12300
_LAST_PORT = 14300


def _number(name: str, otherwise: float) -> float:
    try:
        number = float(os.environ.get(name, ""))
    except ValueError:
        return otherwise
    return number if math.isfinite(number) else otherwise


def huge_page_size() -> int:
    """Returns the length of the pages to allocate, 0 for ordinary ones: `MC_STORE_USE_HUGEPAGE`,
    `MC_STORE_HUGEPAGE_SIZE`.
    """
    if os.environ.get("MC_STORE_USE_HUGEPAGE", "").lower() in _FALSE:
        return 0
    try:
        return parse_size(os.environ.get("MC_STORE_HUGEPAGE_SIZE") or "2MB")
    except ValueError:
        return 2 << 20


def client_ports() -> tuple[int, int]:
    """Returns the range of ports that clients choose from: `MC_STORE_CLIENT_MIN_PORT` to
    `MC_STORE_CLIENT_MAX_PORT`.

    A range that overlaps Linux's ephemeral ports is ignored.
    """
    first = int(_number("MC_STORE_CLIENT_MIN_PORT", _FIRST_PORT))
    last = int(_number("MC_STORE_CLIENT_MAX_PORT", _LAST_PORT))
    usable = 1024 <= first <= last <= 32767 or 61000 <= first <= last <= 65535
    return (first, last) if usable else (_FIRST_PORT, _LAST_PORT)


def allow_overcommit() -> bool:
    """Returns whether a segment may exceed the memory of the host and its control groups:
    `MOONCAKE_ALLOW_OVERCOMMIT`.
    """
    return os.environ.get("MOONCAKE_ALLOW_OVERCOMMIT", "").lower() not in _FALSE


def force_tcp() -> bool:
    """Returns whether TCP is the only transport: `MC_FORCE_TCP`."""
    return os.environ.get("MC_FORCE_TCP", "").lower() not in _FALSE


def checksum() -> bool:
    """Returns whether values are stored and verified with checksums: `MOONCAKE_STORE_CHECKSUM`."""
    return os.environ.get("MOONCAKE_STORE_CHECKSUM", "").lower() not in _FALSE


def metrics() -> tuple[bool, int, str]:
    """Returns the metric settings of a store.

    The settings are: whether the store counts calls (`MC_STORE_CLIENT_METRIC`), seconds between
    two summaries in the log, 0 for none (`MC_STORE_CLIENT_METRIC_INTERVAL`), and the label
    `cluster_id` (`MC_STORE_CLUSTER_ID`).
    """
    on = os.environ.get("MC_STORE_CLIENT_METRIC", "") or "1"
    interval = int(max(_number("MC_STORE_CLIENT_METRIC_INTERVAL", 0), 0))
    return on.lower() not in _FALSE, min(interval, 1 << 31), os.environ.get("MC_STORE_CLUSTER_ID", "")


def copy_in_process() -> bool:
    """Returns whether transfers between stores in this process are plain copies: `MC_STORE_MEMCPY`.
    """
    return (os.environ.get("MC_STORE_MEMCPY", "") or "1").lower() not in _FALSE


def score_replicas() -> bool:
    """Returns whether replicas on faster transports are read first: `MC_STORE_REPLICA_SCORING`."""
    return os.environ.get("MC_STORE_REPLICA_SCORING", "").lower() not in _FALSE


def numa_node() -> int | None:
    """Returns the NUMA node of a store's memory: `MC_STORE_NUMA_SOCKET_ID`."""
    node = int(_number("MC_STORE_NUMA_SOCKET_ID", -1))
    return node if 0 <= node < 1 << 31 else None


def rpc_timeouts() -> tuple[int | None, int | None]:
    """Returns the timeouts of a call and of setup in milliseconds, where set: `MC_RPC_TIMEOUT_MS`,
    `MC_RPC_CONNECT_TIMEOUT_MS`.
    """
    timeouts = (int(_number(name, 0)) for name in ("MC_RPC_TIMEOUT_MS", "MC_RPC_CONNECT_TIMEOUT_MS"))
    call, join = (min(ms, 1 << 31) if ms > 0 else None for ms in timeouts)
    return call, join


def hot_cache() -> tuple[int, int, int]:
    """Returns the settings of the hot cache, which keeps values of other clients that are read
    often.

    The settings are: the size, 0 for none (`MC_STORE_LOCAL_HOT_CACHE_SIZE`), the longest value
    (`MC_STORE_LOCAL_HOT_BLOCK_SIZE`), and the number of reads that admits a value
    (`MC_STORE_LOCAL_HOT_ADMISSION_THRESHOLD`).
    """

    def size(name: str, otherwise: int) -> int:
        try:
            return max(parse_size(os.environ.get(name, "") or otherwise), 0)
        except ValueError:
            return otherwise

    reads = int(min(max(_number("MC_STORE_LOCAL_HOT_ADMISSION_THRESHOLD", 2), 0), 255))
    return size("MC_STORE_LOCAL_HOT_CACHE_SIZE", 0), size("MC_STORE_LOCAL_HOT_BLOCK_SIZE", 16 << 20), reads


def log_level() -> str:
    """Returns the log level of the native half: `MC_LOG_LEVEL`."""
    return os.environ.get("MC_LOG_LEVEL", "") or "WARNING"


def names(text: str) -> list[str]:
    """Returns the names in a text that separates them with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def topology() -> tuple[list[str], list[str], str | None]:
    """Returns devices to include and to exclude, and a file that replaces discovery:
    `MC_TE_FILTERS`, `MC_TE_FILTERS_EXCLUDE`, `MC_CUSTOM_TOPO_JSON`.
    """
    only, without = (names(os.environ.get(name, "")) for name in ("MC_TE_FILTERS", "MC_TE_FILTERS_EXCLUDE"))
    return only, without, os.environ.get("MC_CUSTOM_TOPO_JSON") or None
