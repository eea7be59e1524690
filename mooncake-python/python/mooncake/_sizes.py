"""Parsers of values of settings: sizes (`1.5g`), times (`5s`), numbers and switches (`off`).

The native half takes the same texts (`mooncake-core/src/settings/values.rs`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_Parsed = TypeVar("_Parsed")

# Settings of memory. An empty one is refused, as by Mooncake C++.
SIZES = ("global_segment_size", "local_buffer_size")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
# A number, which may be hexadecimal or have an exponent, and a unit.
_PARTS = re.compile(r"([+-]?(?:0x[0-9a-f_.]*|(?:[0-9._]|e[+-]?(?=[0-9]))*))\s*(.*)", re.IGNORECASE | re.ASCII | re.DOTALL)
_WHOLE = re.compile(r"([+-]?)(?:0x([0-9a-f]+)|([0-9]+))", re.IGNORECASE | re.ASCII)
_FLOAT = re.compile(r"\+?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?", re.IGNORECASE | re.ASCII)
# Largest size of a setting in bytes. No file is larger.
_LARGEST = (1 << 63) - 1
# Longest time of a setting in milliseconds: a century.
_LONGEST = 36_525 * 24 * 60 * 60 * 1000
_MILLIS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}
_TRUE = ("true", "t", "1", "yes", "y", "on", "enable", "enabled")
_FALSE = ("false", "f", "0", "no", "n", "off", "disable", "disabled")


def _split_unit(text: str) -> tuple[str, str]:
    """Splits a text into a number and a unit in small letters, which may have spaces between them.
    """
    parts = _PARTS.fullmatch(text.strip())
    return ("", text) if parts is None else (parts[1], parts[2].lower())


def _whole_number(text: str) -> int | None:
    """Returns a whole number, which may be hexadecimal, or `None` for another text."""
    parts = _WHOLE.fullmatch(text)
    if parts is None:
        return None
    number = int(parts[2], 16) if parts[2] else int(parts[3])
    return -number if parts[1] == "-" else number


def parse_size(size: int | str) -> int:
    """Returns a size in bytes. Units are powers of 1024.

    Raises `ValueError` for an invalid or negative size.
    """
    if isinstance(size, int):
        if size < 0:
            raise ValueError(f"size must not be negative: {size}")
        return size
    number, unit = _split_unit(size)
    factor = _UNITS.get(re.sub(r"i?b\Z", "", unit))
    if number.startswith("-"):
        raise ValueError(f"size must not be negative: {size!r}")
    # `_` separates digits.
    is_separated = not (number.startswith("_") or number.endswith("_") or "__" in number)
    digits = number.replace("_", "")
    whole = _whole_number(digits)
    if factor is None or not is_separated or (whole is None and not _FLOAT.fullmatch(digits)):
        raise ValueError(f"invalid size: {size!r}; expected a size such as 1048576, 512MB or 4 GB")
    # A size that does not fit into 64 bits counts as a float. The result is too large anyway.
    count = float(digits) * factor if whole is None else whole * factor
    if not count <= _LARGEST:
        raise ValueError(f"size is too large: {size!r}; at most 8388607 TB")
    return int(count)


def parse_memory_size(size: int | str) -> int:
    """Returns the size of a store's memory like `parse_size`. A hexadecimal size is refused,
    because it is likely to be an address.
    """
    if isinstance(size, str) and size.strip().lstrip("+").lower().startswith("0x"):
        raise ValueError(f"invalid size: {size!r}; expected a decimal size such as 1048576, 512MB or 4 GB")
    return parse_size(size)


def parse_number(value: int | str, least: int, most: int) -> int:
    """Returns a whole number, which may be hexadecimal text. Raises `ValueError` for another value.
    """
    number = value if isinstance(value, int) else _whole_number(value.strip()) if isinstance(value, str) else None
    if number is None or not least <= number <= most:
        raise ValueError(f"invalid number: {value!r}; expected a whole number from {least} to {most}")
    return number


def parse_millis(text: str, unit: str) -> int:
    """Returns a time in milliseconds: a whole number with `ms`, `s`, `m` or `h`, or in `unit`.

    Raises `ValueError` for an invalid or negative time.
    """
    number, given = _split_unit(text)
    count, factor = _whole_number(number), _MILLIS.get(given or unit)
    if count is None or factor is None:
        raise ValueError(f"invalid time: {text!r}; expected a whole number with ms, s, m or h")
    if number.startswith("-"):
        raise ValueError(f"time must not be negative: {text!r}")
    if count * factor > _LONGEST:
        raise ValueError(f"time is too long: {text!r}; at most {_LONGEST // _MILLIS['h']} h")
    return count * factor


def port(text: int | str) -> int:
    """Returns the port that a setting names, 0 for any. Raises `ValueError` for an invalid one."""
    return parse_number(text, 0, (1 << 16) - 1)


def parse_switch(value: Any) -> bool:
    """Returns the truth value of a word or a number. Raises `ValueError` for any other value."""
    if isinstance(value, int | float):
        return bool(value)
    text = value.strip().lower() if isinstance(value, str) else None
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f"invalid truth value: {value!r}; expected true or false")


def parsed(parse: Callable[[Any], _Parsed], settings: Mapping[str, Any], name: str, otherwise: Any) -> _Parsed:
    """Returns a setting. Raises `ValueError` with its name for an invalid one."""
    try:
        return parse(settings.get(name, otherwise))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None
