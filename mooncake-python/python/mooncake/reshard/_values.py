"""Checks of values. A value of a wrong type is refused, never converted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

U64 = (1 << 64) - 1
Item = TypeVar("Item")


def integer(value: Any, name: str, minimum: int = 0, maximum: int | None = None) -> int:
    """Returns an integer. Raises `ValueError` for another type or an integer out of range."""
    if type(value) is not int:
        raise ValueError(f"{name} must be an integer, not {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}: {value}")
    if maximum is not None and value > maximum:
        raise ValueError(f"{name} must be an unsigned 64-bit integer: {value}")
    return value


def u64(value: Any, name: str, minimum: int = 0) -> int:
    """Returns an integer of 64 bits without a sign."""
    return integer(value, name, minimum, U64)


def optional_integer(value: Any, name: str) -> int | None:
    """Returns an integer from 0 on, or `None`."""
    return None if value is None else integer(value, name)


def text(value: Any, name: str) -> str:
    """Returns a text that is not empty. Raises `ValueError` for another value."""
    if type(value) is not str or not value:
        raise ValueError(f"{name} must be a non-empty string, not {value!r}")
    return value


def integers(value: Any, name: str, minimum: int = 0) -> tuple[int, ...]:
    """Returns a sequence of integers as a tuple."""
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        raise ValueError(f"{name} must contain integers, not be {type(value).__name__}")
    if not all(type(one) is int for one in value):
        raise ValueError(f"{name} must contain integers: each must be an integer")
    return tuple(integer(one, name, minimum) for one in value)


def items(value: Any, kind: type[Item] | tuple[type[Any], ...], name: str) -> tuple[Item, ...]:
    """Returns a sequence of instances of a class as a tuple."""
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        raise ValueError(f"{name} must be a sequence, not {type(value).__name__}")
    for one in value:
        if not isinstance(one, kind):
            raise ValueError(f"{name} must not contain {type(one).__name__}")
    return tuple(value)


def texts(value: Any, name: str) -> tuple[str, ...]:
    """Returns a sequence of texts as a tuple."""
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        raise ValueError(f"{name} must be a sequence of strings, not {type(value).__name__}")
    return tuple(text(one, name) for one in value)


def put(target: object, **values: Any) -> None:
    """Sets fields of a frozen object while it is made."""
    for name, value in values.items():
        object.__setattr__(target, name, value)


def canonical_json(value: Any) -> str:
    """Returns JSON with sorted keys, without spaces, and in ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def sha256(content: str) -> str:
    """Returns the SHA-256 of a text, in hexadecimal digits."""
    return hashlib.sha256(content.encode()).hexdigest()


def identity(value: Any) -> str:
    """Returns the identifier of content: the hash of its JSON."""
    return f"sha256:{sha256(canonical_json(value))}"


def unique(values: Sequence[Any], words: str) -> None:
    """Raises `ValueError` with these words if a value occurs twice."""
    seen = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{words}: {value!r}")
        seen.add(value)


def parsed_object(content: str | bytes, what: str) -> dict[str, Any]:
    """Parses a JSON object. Raises `ValueError` for repeated names, and for NaN and infinities."""

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(found)
        if len(made) != len(found):
            raise ValueError(f"duplicate JSON field in {what}")
        return made

    def constant(name: str) -> Any:
        raise ValueError(f"non-finite number in {what}: {name}")

    try:
        value = json.loads(content, object_pairs_hook=pairs, parse_constant=constant)
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a JSON object")
    return value


def exact_fields(value: Any, expected: frozenset[str], what: str, optional: frozenset[str] = frozenset()) -> Mapping[str, Any]:
    """Returns a mapping with exactly these fields. Raises `ValueError` for another one."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} must be a JSON object")
    found = set(value)
    if found - optional != expected:
        missing, unknown = sorted(expected - found), sorted(map(str, found - expected - optional))
        raise ValueError(f"{what} schema fields do not match: missing={missing} unknown={unknown}")
    return value


def json_list(value: Any, what: str) -> list[Any]:
    """Returns a list of a JSON document."""
    if not isinstance(value, list):
        raise ValueError(f"{what} must be a list")
    return value
