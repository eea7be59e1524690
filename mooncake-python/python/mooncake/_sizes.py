"""Parsers of sizes and switches: `16MB`, `4 GB`, `1.5g`, `1024`; `true`, `off`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_Parsed = TypeVar("_Parsed")

# Settings of memory. An empty one is refused, as by Mooncake C++.
SIZES = ("global_segment_size", "local_buffer_size")
_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"\s*\+?([0-9][0-9_]*(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|\.[0-9]+)\s*([kmgt]?)(?:i?b)?\s*", re.IGNORECASE)
_TRUE = ("true", "1", "yes", "on", "enable", "enabled", "y", "t")
_FALSE = ("false", "0", "no", "off", "disable", "disabled", "n", "f", "")


def parse_size(size: int | str) -> int:
    """Returns a size in bytes. Units are powers of 1024.

    Raises `ValueError` for an invalid or negative size.
    """
    if isinstance(size, int):
        if size < 0:
            raise ValueError(f"size must not be negative: {size}")
        return size
    match = _SIZE.fullmatch(size)
    if match is None:
        raise ValueError(f"invalid size: {size!r}")
    number, unit = match.groups()
    factor = _UNITS[unit.lower()]
    try:
        return int(number) * factor if number.isdigit() else int(float(number) * factor)
    except (ValueError, OverflowError):
        raise ValueError(f"invalid size: {size!r}") from None


def port(text: str) -> int:
    """Returns the port that a command line names, 0 for any. Raises `ValueError` for an invalid
    one.
    """
    number = int(text)
    if not 0 <= number < 1 << 16:
        raise ValueError(f"port must be from 0 to 65535: {text}")
    return number


def parse_switch(value: Any) -> bool:
    """Returns the truth value of a word. Raises `ValueError` for any other word."""
    text = str(value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f"invalid truth value: {value!r}")


def parsed(parse: Callable[[Any], _Parsed], settings: Mapping[str, Any], name: str, otherwise: Any) -> _Parsed:
    """Returns a setting. Raises `ValueError` with its name for an invalid one."""
    try:
        return parse(settings.get(name, otherwise))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None
