"""Choice of a codec for the values of a column."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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


def is_bytes_like(value: Any) -> bool:
    """Returns whether a value is a buffer of bytes."""
    return isinstance(value, bytes | bytearray | memoryview)


def is_picture(value: Any) -> bool:
    """Returns whether a value is an image of PIL."""
    return (type(value).__module__ or "").startswith("PIL.") and hasattr(value, "tobytes")


def is_tensor(value: Any) -> bool:
    """Returns whether a value is a tensor of torch."""
    return type(value).__module__.startswith("torch") and "Tensor" in type(value).__name__


def _refused(reason: str) -> Decision:
    return Decision(False, "msgpack_ragged", reason, "python object")


def _numeric(value: Any) -> Any:
    """Returns the element type of a sequence of numbers, or `None` for another value."""
    try:
        dtype = np.asarray(value).dtype
    except (ValueError, OverflowError):
        # Rows that are not rectangular arrays have more structure.
        return None
    return dtype if dtype.kind in "iufc" else None


def _of_arrays(present: Sequence[Any]) -> Decision:
    for value in present:
        dtype = value.dtype if isinstance(value, np.ndarray) else _numeric(value)
        if dtype is None or dtype.kind not in "iufc":
            return _refused("some rows are arrays of other values than numbers")
    if not all(isinstance(value, np.ndarray) for value in present):
        # Mooncake C++ refuses such a column.
        return Decision(True, "typed_ragged", "arrays and sequences of numbers", "numeric sequence")
    return Decision(True, "typed_ragged", "arrays of numbers", "numeric sequence", {"recursive_source": "ndarray"})


_SCALARS = (bool, int, float, np.number, np.bool_)
_PLAIN: tuple[tuple[str, str, Any], ...] = (
    ("bytes_ragged", "bytes-like", is_bytes_like),
    ("media_bytes", "media", is_picture),
    ("utf8_ragged", "str", lambda value: isinstance(value, str)),
    ("msgpack_ragged", "msgpack", lambda value: isinstance(value, dict | list | tuple)),
)


def choose(values: Sequence[Any]) -> Decision:
    """Returns the codec that preserves these values."""
    present = [value for value in values if not is_none(value)]

    def every(test: Callable[[Any], bool]) -> bool:
        return all(test(value) for value in present)

    if not present:
        return NO_VALUES
    if every(is_tensor):
        dtypes = sorted({str(value.dtype) for value in present})
        if len(dtypes) > 1:
            return Decision(False, "ragged_tensor", f"mixed tensor dtype: {dtypes}", "torch.Tensor")
        return Decision(True, "ragged_tensor", "tensors", "torch.Tensor", {"dtype": dtypes[0]})
    if every(lambda v: isinstance(v, list | tuple) and all(is_bytes_like(one) or is_picture(one) for one in v)):
        return Decision(True, "media_list_ragged", "lists of bytes or images", "media list")
    if any(isinstance(value, np.ndarray) for value in present):
        if every(lambda v: isinstance(v, list | tuple | np.ndarray)):
            return _of_arrays(present)
        return _refused("some rows are arrays and others are not")
    if every(lambda v: isinstance(v, list | tuple)):
        found = [_numeric(value) for value in present]
        if all(dtype is not None for dtype in found):
            common = {"dtype": str(np.result_type(*found))}
            return Decision(True, "typed_ragged", "sequences of numbers", "numeric sequence", common)
    if every(lambda v: isinstance(v, _SCALARS)):
        dtype = np.result_type(*present)
        if dtype.kind not in "biufc":
            return _refused(f"numbers without a common type: {dtype}")
        return Decision(True, "ndarray", "numbers", "numeric scalar", {"dtype": str(dtype)})
    for codec, kind, test in _PLAIN:
        if every(test):
            return Decision(True, codec, f"values of kind {kind}", kind)
    if every(lambda v: isinstance(v, bool | int | float | str)):
        # Words and numbers, which Mooncake C++ refuses.
        return Decision(True, "msgpack_ragged", "words and numbers", "msgpack")
    return _refused("rows have different types")
