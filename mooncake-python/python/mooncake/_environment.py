"""The only module that reads the environment variables of the native part."""

from __future__ import annotations

import os

from mooncake._sizes import parse_size

_FALSE = ("", "0", "false", "no", "off")
_FIRST_PORT = 12300
_LAST_PORT = 14300


def _number(name: str, otherwise: float) -> float:
    try:
        return float(os.environ.get(name, ""))
    except ValueError:
        return otherwise


def huge_page_size() -> int:
    """Length of the pages to allocate, 0 for ordinary ones: `MC_STORE_USE_HUGEPAGE`, `MC_STORE_HUGEPAGE_SIZE`."""
    if os.environ.get("MC_STORE_USE_HUGEPAGE", "").lower() in _FALSE:
        return 0
    try:
        return parse_size(os.environ.get("MC_STORE_HUGEPAGE_SIZE") or "2MB")
    except ValueError:
        return 2 << 20


def client_ports() -> tuple[int, int]:
    """Ports that clients draw from: `MC_STORE_CLIENT_MIN_PORT` to `MC_STORE_CLIENT_MAX_PORT`."""
    first = int(_number("MC_STORE_CLIENT_MIN_PORT", _FIRST_PORT))
    last = int(_number("MC_STORE_CLIENT_MAX_PORT", _LAST_PORT))
    return (first, last) if 1024 <= first <= last <= 65535 else (_FIRST_PORT, _LAST_PORT)


def force_tcp() -> bool:
    """Whether every other wire is to be left alone: `MC_FORCE_TCP`."""
    return os.environ.get("MC_FORCE_TCP", "").lower() not in _FALSE


def checksum() -> bool:
    """Whether values are stored with checksums and compared with them: `MOONCAKE_STORE_CHECKSUM`."""
    return os.environ.get("MOONCAKE_STORE_CHECKSUM", "").lower() not in _FALSE


def log_level() -> str:
    """Level of what the native part logs: `MC_LOG_LEVEL`."""
    return os.environ.get("MC_LOG_LEVEL", "") or "WARNING"


def names(text: str) -> list[str]:
    """Names with commas between them."""
    return [name.strip() for name in text.split(",") if name.strip()]


def topology() -> tuple[list[str], list[str], str | None]:
    """Devices to look at and to leave out, and a file that says everything: `MC_TE_FILTERS`, `MC_TE_FILTERS_EXCLUDE`, `MC_CUSTOM_TOPO_JSON`."""
    only, without = (names(os.environ.get(name, "")) for name in ("MC_TE_FILTERS", "MC_TE_FILTERS_EXCLUDE"))
    return only, without, os.environ.get("MC_CUSTOM_TOPO_JSON") or None
