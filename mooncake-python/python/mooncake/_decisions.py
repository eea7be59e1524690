"""Choice of a codec for the values of a column."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np


class _Missing:
    """Marker of a key that a row's dictionary does not have. `None` is a value that it can have."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<MISSING>"


MISSING = _Missing()
SCHEMA_SOURCE = "inferred_from_runtime_values"
"""Origin of the codec of a column without a schema."""


@dataclass(frozen=True)
class Decision:
    """Codec of a column. A refusal names the codec of last resort."""

    accepted: bool
    codec: str
    reason: str
    normalized_type: str
    metadata: dict[str, Any] = field(default_factory=dict)

    def described(self) -> dict[str, Any]:
        """Returns the metadata that a column without a schema carries."""
        source = {"recursive_source": "ndarray"} if "recursive_source" in self.metadata else {}
        return {
            "schema_source": SCHEMA_SOURCE,
            "decision_reason": self.reason,
            "normalized_type": self.normalized_type,
            **source,
        }


# Decision for a column without values. It fits no codec better than another.
NO_VALUES = Decision(False, "msgpack_ragged", "no row has a value", "msgpack")


def is_none(value: Any) -> bool:
    """Returns whether a row has no value."""
    return value is None or value is MISSING


_ABSENT = frozenset({type(None), _Missing})


def kinds_of(values: Iterable[Any]) -> frozenset[type]:
    """Returns the types of the present values. A column has few, so tests of types are fast."""
    return frozenset(map(type, values)) - _ABSENT


def is_array(kind: type) -> bool:
    """Returns whether values of a type are arrays of numpy."""
    return issubclass(kind, np.ndarray)


def is_list(kind: type) -> bool:
    """Returns whether values of a type are lists or tuples."""
    return issubclass(kind, list | tuple)


def is_bytes_like(kind: type) -> bool:
    """Returns whether values of a type are buffers of bytes."""
    return issubclass(kind, bytes | bytearray | memoryview)


def is_picture(kind: type) -> bool:
    """Returns whether values of a type are images of PIL."""
    return (kind.__module__ or "").startswith("PIL.") and hasattr(kind, "tobytes")


def is_tensor(kind: type) -> bool:
    """Returns whether values of a type are tensors of torch, or parameters of modules, which count
    as the tensors of their numbers. Other subclasses have more than numbers.
    """
    if kind.__module__ == "torch":
        return kind.__name__ == "Tensor"
    names = {base.__name__ for base in kind.__mro__ if base.__module__ == "torch.nn.parameter"}
    # A parameter that is not initialized has no numbers.
    return "Parameter" in names and "UninitializedTensorMixin" not in names


def numbers_in(lists: Sequence[Any]) -> Any:
    """Returns the numbers in flat lists as one array, or `None` if the type of each list has to be
    looked at.
    """
    kinds = frozenset(map(type, chain.from_iterable(lists)))
    if not kinds:
        return np.zeros(0, np.int64)
    try:
        if kinds == {int}:
            return np.fromiter(chain.from_iterable(lists), np.int64)
        if kinds == {float}:
            return np.fromiter(chain.from_iterable(lists), np.float64)
    except OverflowError:
        pass
    return None


def common_type(numbers: Sequence[Any]) -> Any:
    """Returns the element type of an array that can hold these numbers."""
    kinds = kinds_of(numbers)
    some: list[Any] = []
    for kind in kinds:
        of_kind = numbers if len(kinds) == 1 else [number for number in numbers if type(number) is kind]
        # Numbers of one of these types have one element type. A single integer that is too long for
        # it has another one than two of them.
        some += of_kind[:2] if kind in (bool, int, float, complex) or issubclass(kind, np.generic) else of_kind
    return np.result_type(*some)


def _refused(reason: str) -> Decision:
    return Decision(False, "msgpack_ragged", reason, "python object")


def _numeric(value: Any) -> Any:
    """Returns the element type of a sequence of numbers, or `None` for another value."""
    try:
        dtype = np.asarray(value).dtype
    except (ValueError, OverflowError, RuntimeError, TypeError):
        # Rows that are not rectangular arrays have more structure. Some tensors become no array.
        return None
    return dtype if dtype.kind in "iufc" else None


def _of_arrays(present: Sequence[Any], kinds: frozenset[type]) -> Decision:
    only_arrays = all(map(is_array, kinds))
    arrays = present if only_arrays else [value for value in present if isinstance(value, np.ndarray)]
    others = () if only_arrays else (value for value in present if not isinstance(value, np.ndarray))
    kinds_of_numbers = {array.dtype.kind for array in arrays}
    if not kinds_of_numbers <= set("iufc") or any(_numeric(value) is None for value in others):
        return _refused("some rows are arrays of other values than numbers")
    if not only_arrays:
        # Mooncake C++ refuses such a column.
        return Decision(True, "typed_ragged", "arrays and sequences of numbers", "numeric sequence")
    return Decision(True, "typed_ragged", "arrays of numbers", "numeric sequence", {"recursive_source": "ndarray"})


def _of_lists(present: Sequence[Any]) -> Decision | None:
    """Returns the decision for lists of bytes, images or numbers, or `None` for other lists."""
    inner = frozenset(map(type, chain.from_iterable(present)))
    if all(is_bytes_like(kind) or is_picture(kind) for kind in inner):
        return Decision(True, "media_list_ragged", "lists of bytes or images", "media list")
    numbers = numbers_in(present)
    if numbers is None:
        found = [_numeric(value) for value in present]
    else:
        found = [numbers.dtype, *([] if all(present) else [np.dtype(np.float64)])]
    if any(dtype is None for dtype in found):
        return None
    common = {"dtype": str(np.result_type(*dict.fromkeys(found)))}
    return Decision(True, "typed_ragged", "sequences of numbers", "numeric sequence", common)


_SCALARS = (bool, int, float, complex, np.number, np.bool_)
_PLAIN: tuple[tuple[str, str, Any], ...] = (
    ("bytes_ragged", "bytes-like", is_bytes_like),
    ("media_bytes", "media", is_picture),
    ("utf8_ragged", "str", lambda kind: issubclass(kind, str)),
    ("msgpack_ragged", "msgpack", lambda kind: issubclass(kind, dict | list | tuple)),
)


def choose(values: Sequence[Any]) -> Decision:
    """Returns the codec that preserves these values."""
    kinds = kinds_of(values)

    def every(test: Callable[[type], bool]) -> bool:
        return all(map(test, kinds))

    if not kinds:
        return NO_VALUES
    present = [value for value in values if not is_none(value)]
    if every(is_tensor):
        dtypes = sorted(map(str, {value.dtype for value in present}))
        if len(dtypes) > 1:
            return Decision(False, "ragged_tensor", f"mixed tensor dtype: {dtypes}", "torch.Tensor")
        return Decision(True, "ragged_tensor", "tensors", "torch.Tensor", {"dtype": dtypes[0]})
    of_lists = _of_lists(present) if every(is_list) else None
    if of_lists is not None:
        return of_lists
    if any(map(is_array, kinds)):
        if every(lambda kind: is_list(kind) or is_array(kind)):
            return _of_arrays(present, kinds)
        return _refused("some rows are arrays and others are not")
    if every(lambda kind: issubclass(kind, _SCALARS)):
        dtype = common_type(present)
        if dtype.kind not in "biufc":
            return _refused(f"numbers without a common type: {dtype}")
        return Decision(True, "ndarray", "numbers", "numeric scalar", {"dtype": str(dtype)})
    for codec, name, test in _PLAIN:
        if every(test):
            return Decision(True, codec, f"values of kind {name}", name)
    if every(lambda kind: issubclass(kind, bool | int | float | str)):
        # Words and numbers, which Mooncake C++ refuses.
        return Decision(True, "msgpack_ragged", "words and numbers", "msgpack")
    return _refused("rows have different types")
