"""Types of the values of a column that its codec does not keep: which they are, and how they are
made from what the codec returns.

A codec has one type for many: numbers become those of a common type, tuples become lists. A
description of the difference makes the values again. Values for which there is no description are
refused. Mooncake C++ skips descriptions, and returns the values as the codec does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from mooncake._decisions import is_none, is_picture, is_tensor, kinds_of
from mooncake._manifests import is_count, numbers_of
from mooncake._members import PLAIN_ARRAYS, ArrayRows, Pieces

ROW_TYPES = "row_types"
"""Name of the descriptions in the metadata of a column."""

_NUMBERS = frozenset({bool, int, float, complex})
_LEAVES = frozenset({bool, int, float, str, bytes, type(None)})


class InexactError(ValueError):
    """Value that would come back as another one."""


@dataclass(frozen=True)
class ObjectArray:
    """Array of objects in metadata: its shape, and its elements in C order."""

    shape: list[int]
    items: list[Any]


def _real(back: Any) -> Any:
    return back.real if isinstance(back, complex | np.complexfloating) else back


def _maker_of(scalar: Any) -> Callable[[Any], Any]:
    """Returns the maker of scalars of a type of numpy."""
    return scalar if issubclass(scalar, np.complexfloating) else lambda back: scalar(_real(back))


def _raw(back: Any) -> bytes:
    """Returns bytes. Of a number, a buffer of that length would be made."""
    if type(back) is not bytes:
        raise TypeError(f"bytes are needed, not {type(back).__name__}")
    return back


# Makers of a value from what a codec returns, by the name of the type.
_MAKERS: dict[str, Callable[[Any], Any]] = {
    "bool": lambda back: bool(_real(back)),
    "int": lambda back: int(_real(back)),
    "float": lambda back: float(_real(back)),
    "complex": complex,
    "str": str,
    "bytearray": lambda back: bytearray(_raw(back)),
    "memoryview": lambda back: memoryview(_raw(back)),
    "numpy.str": np.str_,
    "numpy.bytes": lambda back: np.bytes_(_raw(back)),
}
_NAMES: dict[type, str] = {
    bool: "bool",
    int: "int",
    float: "float",
    complex: "complex",
    str: "str",
    bytearray: "bytearray",
    memoryview: "memoryview",
    np.str_: "numpy.str",
    np.bytes_: "numpy.bytes",
}
# Scalars of numpy have the character of their type. `q` and `l` are different types of one size.
for _char in "?bBhHiIlLqQefdgFDG":
    _scalar = np.dtype(_char).type
    _NAMES[_scalar] = f"numpy.{_char}"
    _MAKERS[f"numpy.{_char}"] = _maker_of(_scalar)
del _char, _scalar


def is_kept(codec: str, values: Sequence[Any], metadata: Mapping[str, Any]) -> bool:
    """Returns whether a codec surely returns these values as they are. The test looks at types, and
    a column has few.
    """
    kinds = kinds_of(values)
    if not kinds or codec.startswith("ragged_tensor"):
        return True
    if codec == "ndarray":
        return len(kinds) == 1 and kinds <= _NUMBERS
    if codec in ("msgpack_ragged", "json_ragged"):
        return all(map(_is_plain, (value for value in values if not is_none(value))))
    if codec == "utf8_ragged":
        return kinds == {str}
    if codec in ("bytes_ragged", "media_bytes"):
        return all(kind is bytes or is_picture(kind) for kind in kinds)
    present = values if len(kinds) == len(frozenset(map(type, values))) else [one for one in values if not is_none(one)]
    if codec == "typed_ragged" and kinds <= {*PLAIN_ARRAYS}:
        (dtype, *others) = {array.dtype for array in present}
        return not others and dtype.kind in "biufc" and dtype.isnative and str(dtype) == metadata["dtype"]
    if kinds != {list}:
        return False
    inner = frozenset(map(type, chain.from_iterable(present)))
    if codec == "typed_ragged":
        return (inner, metadata["dtype"]) in ((frozenset({int}), "int64"), (frozenset({float}), "float64"))
    return codec == "media_list_ragged" and all(kind is bytes or is_picture(kind) for kind in inner)


def _is_plain(value: Any) -> bool:
    """Returns whether a value consists only of types that msgpack and JSON return as they are."""
    kind = type(value)
    if kind is dict:
        for key in value:
            if type(key) is not str:
                return False
        value = value.values()
    elif kind is not list:
        return kind in _LEAVES
    # A loop is faster than a call for each element.
    for one in value:
        if type(one) not in _LEAVES and not _is_plain(one):
            return False
    return True


def in_memory(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the payload of a column as a reader returns it."""
    return {name: _read_back(part) for name, part in payload.items()}


def _read_back(part: Any) -> Any:
    if isinstance(part, Pieces):
        return b"".join(part.body().pieces)
    if isinstance(part, ArrayRows):
        # torch warns of memory that cannot be written.
        return np.frombuffer(bytearray().join(part.pieces), part.described()["dtype"])
    return part


def differences(values: Sequence[Any], decoded: Sequence[Any]) -> dict[str, Any]:
    """Returns the metadata that makes values from what a codec returns.

    Raises `InexactError` if there is none, with the number of the row.
    """
    rows: list[int] = []
    kinds: list[Any] = []
    known: dict[str, int] = {"None": -1}
    for row, (value, back) in enumerate(zip(values, decoded, strict=True)):
        try:
            found = difference(value, back)
        except InexactError as error:
            raise InexactError(f"row {row} would come back as another value: {error}") from None
        if repr(found) not in known:
            known[repr(found)] = len(kinds)
            kinds.append(found)
        rows.append(known[repr(found)])
    if not kinds:
        return {}
    if len(kinds) == 1 and all(at == 0 or is_none(value) for at, value in zip(rows, values)):
        return {ROW_TYPES: {"kinds": kinds}}
    return {ROW_TYPES: {"kinds": kinds, "rows": rows}}


def difference(value: Any, back: Any) -> Any:
    """Returns the description that makes a value from what a codec returns, or `None` if it returns
    the value as it is. Raises `InexactError` if there is none.
    """
    kind = type(value)
    if is_none(value):
        if value is not back:
            raise InexactError("None is not allowed among these values")
        return None
    if is_tensor(kind) or is_picture(kind):
        is_same = is_tensor(type(back)) if is_tensor(kind) else is_picture(type(back))
        if not is_same:
            raise InexactError(f"a {kind.__name__} becomes a {type(back).__name__}")
        return None
    if kind in PLAIN_ARRAYS:
        return _difference_of_array(value, back)
    if kind in (list, tuple):
        return _difference_of_list(value, back)
    if kind is dict:
        return _difference_of_dict(value, back)
    if kind is ObjectArray:
        return ["objects", value.shape, difference(value.items, _elements(back, len(value.shape)))]
    if kind is type(back) and _equal(value, back):
        return None
    name = _NAMES.get(kind)
    if name is None:
        raise InexactError(f"a {kind.__name__} has no stored form")
    try:
        made = _MAKERS[name](back)
    except (TypeError, ValueError, OverflowError) as error:
        raise InexactError(f"{kind.__name__}: {error}") from None
    if type(made) is not kind or not _equal(value, made):
        raise InexactError(f"{kind.__name__} {value!r:.100} becomes {back!r:.100}")
    return name


def _difference_of_list(value: Any, back: Any) -> Any:
    if not isinstance(back, list) or len(back) != len(value):
        raise InexactError(f"a {type(value).__name__} becomes a {type(back).__name__}")
    below = [difference(one, other) for one, other in zip(value, back)]
    different = {str(at): one for at, one in enumerate(below) if one is not None}
    if len(different) == len(below) > 1 and all(one == below[0] for one in below):
        different = {"*": below[0]}
    return ["tuple" if isinstance(value, tuple) else "list", different] if different or isinstance(value, tuple) else None


def _difference_of_dict(value: dict[Any, Any], back: Any) -> Any:
    if type(back) is not dict or set(map(type, value)) != set(map(type, back)) or value.keys() != back.keys():
        raise InexactError("a dictionary has keys that are not text")
    different = {}
    for key, one in value.items():
        below = difference(one, back[key])
        if below is not None and type(key) is not str:
            raise InexactError(f"a dictionary has keys that are not text: {key!r:.100}")
        if below is not None:
            different[key] = below
    return ["dict", different] if different else None


def _elements(nested: Any, dims: int) -> list[Any]:
    """Returns the elements of nested lists of that many dimensions."""
    made = [nested]
    for _ in range(dims):
        made = [*chain.from_iterable(made)]
    return made


def _difference_of_array(value: Any, back: Any) -> Any:
    if isinstance(back, np.ndarray) and back.dtype == value.dtype and _equal_arrays(value, back):
        return None
    described = ["array", value.dtype.str, list(value.shape)]
    if value.dtype.kind not in "biufcU":
        raise InexactError(f"an array of {value.dtype} has no stored form in this column")
    try:
        with np.errstate(all="ignore"):
            made = restore(back, described)
    except (TypeError, ValueError, OverflowError) as error:
        raise InexactError(f"an array of {value.dtype}: {error}") from None
    if not _equal_arrays(value, made):
        raise InexactError(f"an array of {value.dtype} does not fit the common type of the rows")
    return described


def _equal(one: Any, other: Any) -> bool:
    """Returns whether scalars of one type are equal, with their signs."""
    if isinstance(one, complex | np.complexfloating):
        return _equal(one.real, other.real) and _equal(one.imag, other.imag)
    if isinstance(one, float | np.floating):
        if one != one or other != other:
            return one != one and other != other
        return bool(one == other) and math.copysign(1, one) == math.copysign(1, other)
    if isinstance(one, memoryview):
        return (one.format, one.ndim) == (other.format, other.ndim) and one == other
    return bool(one == other)


def _equal_arrays(one: Any, other: Any) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype.kind not in "fc":
        return bool((one == other).all())
    parts = ((one.real, other.real), (one.imag, other.imag)) if one.dtype.kind == "c" else ((one, other),)
    # NaN has no sign that counts.
    return all(
        np.array_equal(a, b, equal_nan=True) and bool((np.isnan(a) | (np.signbit(a) == np.signbit(b))).all())
        for a, b in parts
    )


def restored(values: list[Any], metadata: Mapping[str, Any], picked: Sequence[int] | None) -> list[Any]:
    """Returns the values of rows, made from what a codec returns. `picked` are the numbers of the
    rows, if they are not all.
    """
    described = metadata.get(ROW_TYPES)
    if described is None:
        return values
    kinds, rows = described["kinds"], described.get("rows")
    if rows is None:
        return [value if is_none(value) else restore(value, kinds[0]) for value in values]
    numbers = rows if picked is None else [rows[row] for row in picked]
    return [value if at < 0 else restore(value, kinds[at]) for value, at in zip(values, numbers, strict=True)]


def restore(back: Any, described: Any) -> Any:
    """Returns a value from what a codec returns. Raises `ValueError` for an invalid description."""
    if isinstance(described, str):
        make = _MAKERS.get(described)
        if make is None:
            raise ValueError(f"unknown type of a row: {described!r}")
        return make(back)
    kind, *rest = described
    if kind == "array":
        dtype = numbers_of("row", rest[0])
        array = np.asarray(back) if not isinstance(back, list) else np.array(back, dtype)
        if array.dtype.kind == "c" and dtype.kind != "c":
            array = array.real
        return array.astype(dtype, copy=False).reshape(rest[1])
    if kind == "objects":
        return _restored_objects(back, *rest)
    if kind == "dict":
        return {**back, **{key: restore(back[key], below) for key, below in rest[0].items()}}
    if kind not in ("list", "tuple"):
        raise ValueError(f"unknown type of a row: {kind!r}")
    made = list(back)
    if "*" in rest[0]:
        made = [restore(one, rest[0]["*"]) for one in made]
    else:
        for at, below in rest[0].items():
            made[int(at)] = restore(made[int(at)], below)
    return tuple(made) if kind == "tuple" else made


def _restored_objects(back: Any, shape: Any, below: Any) -> Any:
    items = _elements(back, len(shape))
    if not isinstance(shape, list) or not all(map(is_count, shape)) or math.prod(shape) != len(items):
        raise ValueError(f"invalid shape of an array: {shape!r:.100}")
    made = np.empty(len(items), object)
    for at, item in enumerate(items if below is None else restore(items, below)):
        made[at] = item
    return made.reshape(shape)


def is_converted(value: Any, back: Any) -> bool:
    """Returns whether a value comes back equal, although as another type: a list for a tuple or an
    array, a number for one of numpy, bytes for a buffer.
    """
    if is_none(value) or is_none(back):
        return is_none(value) and is_none(back)
    if isinstance(value, np.ma.MaskedArray):
        # The codecs lose the mask.
        return False
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "mM":
        # A count of units has another meaning than a time.
        return getattr(back, "dtype", None) == value.dtype and bool(np.array_equal(value, back, equal_nan=True))
    if isinstance(value, np.ndarray | np.generic) and not isinstance(back, np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return isinstance(back, Mapping) and value.keys() == back.keys() and all(
            is_converted(one, back[key]) for key, one in value.items()
        )
    if isinstance(value, list | tuple):
        return isinstance(back, list | tuple) and len(value) == len(back) and all(map(is_converted, value, back))
    if isinstance(value, np.ndarray):
        with np.errstate(all="ignore"):
            again = (back.real if back.dtype.kind == "c" and value.dtype.kind != "c" else back).astype(value.dtype)
        if value.dtype.kind == "c" or back.dtype.kind == "c":
            return _equal_arrays(value, again) and (back.dtype.kind == "c" or not value.imag.any())
        if not _equal_arrays(value, again):
            return False
        # Integers of the other sign may have the same bits.
        return not {value.dtype.kind, back.dtype.kind} <= {*"iu"} or bool(((value < 0) == (back < 0)).all())
    if isinstance(value, bytearray | memoryview):
        return bytes(value) == bytes(back)
    if isinstance(value, complex | np.complexfloating):
        return is_converted(value.real, back.real) and is_converted(value.imag, back.imag)
    # NaN is equal to NaN only.
    return bool(value != value and back != back) or bool(value == back)


def is_rounded(value: Any, back: Any) -> bool:
    """Returns whether numbers come back as those of a floating-point type that their field names,
    which may have fewer digits.
    """
    if is_none(value) or is_none(back):
        return is_none(value) and is_none(back)
    if isinstance(value, list | tuple):
        # Integers beside floats do not round.
        return isinstance(back, list | tuple) and len(value) == len(back) and all(
            is_converted(one, other) or is_rounded(one, other) for one, other in zip(value, back)
        )
    one, other = np.asarray(value), np.asarray(back)
    if one.shape != other.shape or other.dtype.kind not in "fc" or one.dtype.kind not in "fc":
        return False
    if one.dtype.kind == "c" and other.dtype.kind == "f" and one.imag.any():
        return False
    return bool((np.isfinite(one) == np.isfinite(other)).all())
