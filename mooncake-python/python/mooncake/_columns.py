"""Encoding of a column of Python values as payloads of a bundle: concatenated rows, their offsets,
and a mask of absent rows.

A codec converts a list of values to payloads (arrays and bytes) with metadata, and back. It can
also read some rows only. Of long payloads it then reads only the bytes of those rows.
"""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any, Protocol

import numpy as np

from mooncake._decisions import common_type, is_array, is_bytes_like, is_list, is_picture, is_tensor, kinds_of, numbers_in
from mooncake._element_types import is_ml_dtype
from mooncake._manifests import MOST, is_count, numbers_of
from mooncake._members import ArrayRows, Pieces
from mooncake._pool_results import owned
from mooncake._row_types import is_converted, is_rounded

MAX_KEYS, MAX_LIST, MAX_DEPTH = 64, 8, 32
_NUMBERS = bool | int | float | complex
# Rows that are shorter on average are sliced from one copy of all bytes.
_LONG = 4 << 10


@dataclass(frozen=True)
class FieldSchema:
    """Specification of how a field is stored: its codec, whether rows may be `None`, and parameters
    of the codec.

    `metadata["section"]` is the section of the field: `batch`, `non_tensor_batch` or `meta_info`.
    """

    codec: str
    nullable: bool = True
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Column:
    """Stored form of a column."""

    codec: str
    rows: int
    payload: dict[str, Any]
    metadata: dict[str, Any]


class Source(Protocol):
    """Payloads of a column that is read in parts."""

    def whole(self, name: str) -> Any:
        """Returns all elements of a payload."""

    def runs(self, name: str, runs: Any) -> Any:
        """Returns the concatenation of these (begin, end) runs of a payload."""

    def under(self, names: Mapping[str, str]) -> Source:
        """Returns some of the payloads under other names."""


def _nulls(values: Sequence[Any], kinds: Collection[type] | None = None) -> Any:
    """Returns the mask of absent rows. `kinds` are the types of the values, if they are known."""
    if kinds is not None and type(None) not in kinds:
        return np.zeros(len(values), np.bool_)
    return np.fromiter([value is None for value in values], np.bool_, len(values))


def _offsets(lengths: Iterable[int], count: int) -> Any:
    """Returns the offsets of `count` rows of these lengths, and the end of the last one."""
    offsets = np.zeros(count + 1, np.int64)
    given = lengths if isinstance(lengths, np.ndarray) else np.fromiter(lengths, np.int64, count)
    np.cumsum(given, out=offsets[1:])
    return offsets


def _index(rows: Sequence[int]) -> Any:
    """Returns the index that selects rows of an array."""
    if isinstance(rows, range) and rows.step == 1:
        return slice(rows.start, rows.stop)
    return np.asarray(rows, np.int64)


def selected(array: Any, rows: Sequence[int]) -> Any:
    """Returns rows of an array."""
    made = array[_index(rows)]
    if len(made) != len(rows):
        raise ValueError(f"too few rows: {len(made)} of {len(rows)}")
    return made


def _picked(offsets: Any, rows: Sequence[int]) -> tuple[Any, Any]:
    """Returns the runs of the selected rows, and their offsets once they are concatenated."""
    if not isinstance(offsets, np.ndarray) or offsets.ndim != 1 or offsets.dtype.kind not in "iu":
        raise ValueError("row offsets must be an array of integers")
    index = _index(rows)
    last = index.stop - 1 if isinstance(index, slice) else int(index.max(initial=-1))
    if len(rows) and last + 1 >= len(offsets):
        raise ValueError(f"too few row offsets: {len(offsets)} for {last + 1} rows")
    # Overlapping rows could have more bytes than are stored.
    if (offsets[:-1] > offsets[1:]).any():
        raise ValueError("row offsets must not decrease")
    begins, ends = (offsets[index], offsets[1:][index]) if len(rows) else (offsets[:0], offsets[:0])
    runs = np.stack([begins, ends], axis=1)
    if isinstance(index, slice) and len(rows):
        # Adjacent rows are one run.
        runs = np.array([[begins[0], ends[-1]]])
    return runs, _offsets(ends - begins, len(rows))


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise RuntimeError("torch is required for tensor fields") from None
    return torch


class Codec:
    """Encoding of a column."""

    def encode(self, values: list[Any], schema: FieldSchema) -> tuple[dict[str, Any], dict[str, Any]]:
        raise NotImplementedError

    def decode(self, payload: Mapping[str, Any], rows: int, metadata: Mapping[str, Any]) -> list[Any]:
        raise NotImplementedError

    def part(
        self, source: Source, rows: Sequence[int], metadata: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns payload and metadata as if only those rows had been stored."""
        raise NotImplementedError


class Numbers(Codec):
    """Column with a number in each row, or with numbers of one shape."""

    def encode(self, values: list[Any], schema: FieldSchema) -> tuple[dict[str, Any], dict[str, Any]]:
        nulls = _nulls(values, set(map(type, values)))
        present = [value for value in values if value is not None] if nulls.any() else values
        dtype = dtype_of(schema) or (common_type(present) if present else np.dtype(np.float64))
        if dtype.kind not in "biufc":
            raise ValueError(f"rows must be numbers, not {dtype}")
        data = np.array(values if present is values else [0 if value is None else value for value in values], dtype)
        return {"data": data, "nulls": nulls}, {"dtype": str(dtype), "shape": list(data.shape)}

    def decode(self, payload: Mapping[str, Any], rows: int, metadata: Mapping[str, Any]) -> list[Any]:
        numbers, nulls = payload["data"].tolist(), payload["nulls"]
        if not nulls.any() and len(nulls) == len(numbers):
            made: list[Any] = numbers
            return made
        return [None if null else value for value, null in zip(numbers, nulls.tolist())]

    def part(
        self, source: Source, rows: Sequence[int], metadata: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        if isinstance(rows, range) and rows.step == 1:
            runs = np.array([[rows.start, rows.stop]])
        else:
            picked = np.asarray(rows, np.int64)
            runs = np.stack([picked, picked + 1], axis=1)
        shape = metadata.get("shape", [len(rows)])
        if not isinstance(shape, list) or not shape or not all(map(is_count, shape)):
            raise ValueError(f"invalid shape of a column: {shape!r:.100}")
        width = math.prod(shape[1:])
        if width > MOST >> 32:
            raise ValueError(f"invalid shape of a column: {shape!r:.100}")
        data = source.runs("data", runs * width).reshape(len(rows), *shape[1:])
        return {"data": data, "nulls": selected(source.whole("nulls"), rows)}, dict(metadata)


class Ragged(Codec):
    """Arrays, or sequences of numbers, of any lengths and shapes."""

    def encode(self, values: list[Any], schema: FieldSchema) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.rows_of(values, dtype_of(schema))

    @staticmethod
    def rows_of(values: list[Any], dtype: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        every = set(map(type, values))
        kinds, nulls = every - {type(None)}, _nulls(values, every)
        present = [value for value in values if value is not None] if nulls.any() else values
        only_arrays, has_arrays = all(map(is_array, kinds)), any(map(is_array, kinds))
        numbers = numbers_in(present) if kinds and all(map(is_list, kinds)) else None
        if numbers is not None:
            dtype, sizes = dtype or numbers.dtype, _lengths(present)
            shapes, ndims = sizes.reshape(-1, 1), np.ones(len(present), np.int16)
            data = ArrayRows(sizes, dtype, joined=numbers.astype(dtype, copy=False))
        else:
            arrays = present if only_arrays else [np.asarray(value) for value in present]
            # An empty list has no element type.
            typed = [a for a, of in zip(arrays, present) if a.size or isinstance(of, np.ndarray)]
            dtype = dtype or (_common_dtype(typed) if typed else np.dtype(np.int64))
            if any(one.hasobject or is_ml_dtype(one) for one in {dtype, *(array.dtype for array in arrays)}):
                raise ValueError("rows must be arrays of numbers that numpy has itself")
            shapes, ndims, sizes = _shapes(arrays)
            data = ArrayRows(sizes, dtype, arrays)
        most = int(ndims.max(initial=0))
        of_absent = np.zeros(shapes.shape[1], np.int64)
        if only_arrays and present and (shapes[:, 1:] == shapes[0, 1:]).all() and (ndims[0] == ndims).all():
            # As in Mooncake C++, an absent row has the shape of the others, without elements.
            of_absent[1:most] = shapes[0, 1:most]
        payload = {
            "data": data,
            "offsets": _offsets(_spread(sizes, nulls, 0), len(values)),
            "shapes": _spread(shapes, nulls, of_absent),
            # As in Mooncake C++, an absent row among lists is an empty one.
            "ndims": _spread(ndims, nulls, 0 if has_arrays or not present else 1),
            "nulls": nulls,
        }
        metadata: dict[str, Any] = {"dtype": str(dtype), "max_ndim": most, "shape_policy": "ragged"}
        if only_arrays:
            metadata |= {"row_format": "ndarray", "ndarray_rows": None, "physical_layout": "contiguous_flat"}
        elif has_arrays:
            metadata |= {"row_format": "mixed", "ndarray_rows": [isinstance(value, np.ndarray) for value in values]}
        else:
            metadata |= {"row_format": "list", "ndarray_rows": None}
        return payload, metadata

    def decode(self, payload: Mapping[str, Any], rows: int, metadata: Mapping[str, Any]) -> list[Any]:
        data = payload["data"]
        dtype = numbers_of("column", metadata.get("dtype", "int64"))
        if not isinstance(data, np.ndarray) or data.dtype != dtype:
            data = np.frombuffer(data, dtype)
        style, as_arrays = metadata.get("row_format"), metadata.get("ndarray_rows") or []
        offsets, shapes, ndims, nulls = (payload[name] for name in ("offsets", "shapes", "ndims", "nulls"))
        values: list[Any]
        if _are_flat(offsets, shapes, ndims, nulls, len(data)):
            ends = offsets.tolist()
            if nulls.any():
                bounds = zip(ends, ends[1:], nulls.tolist())
                values = [None if null else data[begin:end] for begin, end, null in bounds]
            else:
                values = [data[begin:end] for begin, end in zip(ends, ends[1:])]
        else:
            values = self._shaped(data, offsets.tolist(), shapes.tolist(), ndims.tolist(), nulls.tolist())
        if style == "mixed":
            values = [value if value is None or as_arrays[row] else value.tolist() for row, value in enumerate(values)]
        elif style != "ndarray":
            values = [None if value is None else value.tolist() for value in values]
        made: list[Any] = owned(values, data)
        return made

    @staticmethod
    def _shaped(
        data: Any, offsets: list[int], shapes: list[list[int]], ndims: list[int], nulls: list[bool]
    ) -> list[Any]:
        """Returns views of rows of any shapes."""
        values: list[Any] = []
        for row, (null, ndim) in enumerate(zip(nulls, ndims)):
            if null:
                values.append(None)
                continue
            part, shape = data[offsets[row] : offsets[row + 1]], shapes[row]
            values.append(part if ndim == 1 and len(part) == shape[0] else part.reshape(shape[:ndim]))
        return values

    def part(
        self, source: Source, rows: Sequence[int], metadata: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        runs, offsets = _picked(source.whole("offsets"), rows)
        payload = {name: selected(source.whole(name), rows) for name in ("shapes", "ndims", "nulls")}
        payload |= {"data": source.runs("data", runs), "offsets": offsets}
        as_arrays = metadata.get("ndarray_rows")
        kept = [as_arrays[row] for row in rows] if as_arrays else None
        return payload, {**metadata, "ndarray_rows": kept}


def _common_dtype(arrays: Sequence[Any]) -> Any:
    dtypes = [*dict.fromkeys(array.dtype for array in arrays)]
    # With itself, a type of another byte order becomes native, as that of several arrays.
    return np.result_type(*dtypes, *(dtypes[:1] if len(arrays) > 1 else ()))


def _lengths(values: Sequence[Any]) -> Any:
    return np.fromiter(map(len, values), np.int64, len(values))


def _shapes(arrays: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Returns shapes padded with zeros, numbers of dimensions, and numbers of elements."""
    count = len(arrays)
    ndims = np.fromiter((array.ndim for array in arrays), np.int16, count)
    if count and ndims.min() == ndims.max() == 1:
        lengths = _lengths(arrays)
        return lengths.reshape(-1, 1), ndims, lengths
    shapes = np.zeros((count, max(int(ndims.max(initial=0)), 1)), np.int64)
    is_dim = np.arange(shapes.shape[1]) < ndims[:, None]
    shapes[is_dim] = np.fromiter(chain.from_iterable(array.shape for array in arrays), np.int64)
    return shapes, ndims, np.where(is_dim, shapes, 1).prod(axis=1)


def _spread(some: Any, nulls: Any, absent: Any) -> Any:
    """Returns an element for each row, from those of the present rows and that of absent rows."""
    if not nulls.any():
        return some
    every = np.empty((len(nulls), *some.shape[1:]), some.dtype)
    every[nulls], every[~nulls] = absent, some
    return every


def _are_flat(offsets: Any, shapes: Any, ndims: Any, nulls: Any, size: int) -> bool:
    """Returns whether present rows are parts of `size` elements and have one dimension each."""
    if not len(offsets) == len(shapes) + 1 == len(ndims) + 1 == len(nulls) + 1 or shapes.ndim != 2:
        return False
    lengths, present = np.diff(offsets), ~nulls
    fit = (lengths == shapes[:, 0]) & (ndims == 1)
    return bool(0 <= offsets[0] and offsets[-1] <= size and (lengths >= 0).all() and fit[present].all())


class Tensors(Ragged):
    """Tensors of one type and of any shapes."""

    def encode(self, values: list[Any], schema: FieldSchema) -> tuple[dict[str, Any], dict[str, Any]]:
        torch = _torch()
        arrays: list[Any] = []
        # Rows of Python's numbers, which have no element type of their own.
        untyped: dict[int, Any] = {}
        dtypes: set[Any] = set()
        for row, value in enumerate(values):
            if value is None:
                arrays.append(None)
            elif is_tensor(type(value)):
                arrays.append(self._of_tensor(torch, value))
                dtypes.add(arrays[-1].dtype)
            else:
                arrays.append(_of_numbers(value))
                if isinstance(value, np.ndarray | np.generic):
                    dtypes.add(arrays[-1].dtype)
                else:
                    untyped[row] = value
        if len(dtypes) > 1:
            raise ValueError(f"mixed tensor dtype: {sorted(self._torch_name(torch, one) for one in dtypes)}")
        # As in Mooncake C++, tensors and arrays keep their type, whatever the schema names.
        dtype = next(iter(dtypes)) if dtypes else self._named(schema) if untyped else None
        may_round = dtype is not None
        if dtype is None:
            # An empty list has the type of the others.
            found = {arrays[row].dtype for row in untyped if arrays[row].size}
            if len(found) > 1:
                raise ValueError(f"mixed tensor dtype: {sorted(self._torch_name(torch, one) for one in found)}")
            dtype = next(iter(found), np.dtype(np.float32))
        for row, value in untyped.items():
            arrays[row] = _as_type(arrays[row], dtype, row, value, may_round)
        payload, metadata = self.rows_of(arrays, dtype)
        return payload, {**metadata, "dtype": self._torch_name(torch, dtype)}

    @staticmethod
    def _of_tensor(torch: Any, value: Any) -> Any:
        """Returns the numbers of a tensor. A tensor of the host shares its memory with them."""
        try:
            return value.numpy()
        except (RuntimeError, TypeError):
            pass
        if value.dtype == torch.bfloat16:
            raise ValueError("ragged tensor codec does not support torch.bfloat16")
        return value.detach().cpu().resolve_conj().resolve_neg().contiguous().numpy()

    @staticmethod
    def _torch_name(torch: Any, dtype: Any) -> str:
        return str(torch.from_numpy(np.empty(0, dtype)).dtype)

    def _named(self, schema: FieldSchema) -> Any:
        """Returns the element type that a schema names in words of torch or numpy, or `None`."""
        torch, name = _torch(), schema.metadata.get("dtype")
        if not str(name).startswith("torch."):
            # `float` and `int` are other types in torch. Only torch knows bfloat16.
            with contextlib.suppress(TypeError, ValueError):
                return dtype_of(schema)
        known = getattr(torch, str(name).removeprefix("torch."), None)
        if isinstance(known, torch.dtype) and known.is_floating_point and known not in (torch.float16, torch.float32, torch.float64):
            # float32 has all numbers of the types that numpy lacks, such as bfloat16.
            return np.dtype(np.float32)
        return self._numpy(str(name)) if isinstance(known, torch.dtype) or str(name).startswith("torch.") else dtype_of(schema)

    @staticmethod
    def _numpy(dtype: str) -> Any:
        torch = _torch()
        known = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(known, torch.dtype):
            raise ValueError(f"unknown torch dtype: {dtype}")
        try:
            return torch.empty(0, dtype=known).numpy().dtype
        except (RuntimeError, TypeError):
            raise ValueError(f"ragged tensor codec does not support {known}") from None

    def decode(self, payload: Mapping[str, Any], rows: int, metadata: Mapping[str, Any]) -> list[Any]:
        torch = _torch()
        dtype = str(metadata.get("dtype", "torch.float32"))
        arrays = super().decode(payload, rows, {**metadata, "dtype": str(self._numpy(dtype)), "row_format": "ndarray"})
        tensors: list[Any] = [None if array is None else torch.from_numpy(array) for array in arrays]
        made: list[Any] = owned(tensors, arrays)
        return made


def _of_numbers(value: Any) -> Any:
    """Returns an array of the numbers of a row without a tensor, in native byte order."""
    kind = type(value)
    if isinstance(value, str) or is_bytes_like(kind) or not isinstance(value, Sequence | np.ndarray | np.generic | _NUMBERS):
        raise TypeError(f"rows must be tensors, arrays, numbers or sequences of numbers, not {kind.__name__}")
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError("the mask of a row would be lost")
    array = np.asarray(value)
    if array.dtype.kind not in "biufc" or is_ml_dtype(array.dtype):
        raise TypeError(f"rows must be numbers, not {array.dtype}")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _as_type(array: Any, dtype: Any, row: int, value: Any, may_round: bool) -> Any:
    """Returns the numbers of a row as another type. Raises `ValueError` for numbers that the type
    does not have.
    """
    with np.errstate(all="ignore"), warnings.catch_warnings():
        # The check finds numbers that lose their imaginary part. Old releases of numpy have the
        # warning elsewhere.
        warnings.simplefilter("ignore", getattr(np, "exceptions", np).ComplexWarning)
        made = array.astype(dtype, copy=False)
        back, value = made.tolist(), _as_lists(value)
        is_kept = is_converted(value, back) or (may_round and is_rounded(value, back))
    if not is_kept:
        raise ValueError(f"row {row} does not fit the type of the column. dtype={dtype} value={value!r:.100}")
    return made


def _as_lists(value: Any) -> Any:
    """Returns other sequences of numbers as lists."""
    if type(value) in (list, tuple):
        plain = {bool, int, float, complex}
        return value if plain.issuperset(map(type, value)) else [*map(_as_lists, value)]
    return [*map(_as_lists, value)] if isinstance(value, Sequence) else value


class TensorDicts(Codec):
    """Dictionaries of tensors, of which each key is a column."""

    _one = Tensors()
    _parts = ("data", "offsets", "shapes", "ndims", "nulls")

    def encode(self, values: list[Any], schema: FieldSchema) -> tuple[dict[str, Any], dict[str, Any]]:
        declared = schema.metadata.get("keys")
        present = [value for value in values if value is not None]
        if not all(issubclass(kind, Mapping) for kind in set(map(type, present))):
            row, value = next((r, v) for r, v in enumerate(values) if v is not None and not isinstance(v, Mapping))
            raise TypeError(f"ragged_tensor_dict rows must be mappings or None; row {row} is {type(value).__name__}")
        if type(None) in set(map(type, chain.from_iterable(value.values() for value in present))):
            row, value = next((r, v) for r, v in enumerate(values) if v is not None and type(None) in map(type, v.values()))
            empty = sorted(str(key) for key, tensor in value.items() if tensor is None)
            raise TypeError(f"ragged_tensor_dict: row {row} has explicit None for {empty}")
        found = dict.fromkeys(chain.from_iterable(present))
        keys = self._checked(sorted(found) if declared is None else declared)
        beyond = sorted(set(self._checked(found)) - set(keys))
        if beyond:
            raise ValueError(f"ragged_tensor_dict rows have keys not declared in FieldSchema metadata['keys']: {beyond}")
        payload: dict[str, Any] = {"null_mask": _nulls(values)}
        codecs = {}
        for key in keys:
            try:
                tensors = [None if value is None else value.get(key) for value in values]
                parts, codecs[key] = self._one.encode(tensors, schema)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ValueError(f"failed to encode ragged_tensor_dict key {key!r}: {error}") from error
            payload |= {f"{key}.{name}": part for name, part in parts.items()}
        return payload, {"keys": keys, "key_codecs": codecs}

    @staticmethod
    def _checked(keys: Any) -> list[str]:
        listed = list(keys)
        for key in listed:
            if not isinstance(key, str):
                raise TypeError("ragged_tensor_dict keys must be strings")
            if not key:
                raise ValueError("ragged_tensor_dict keys must not be empty")
            if any(char in key for char in "./\\"):
                raise ValueError(f"ragged_tensor_dict keys must not contain '.', '/' or '\\': {key!r}")
        if len(set(listed)) != len(listed):
            raise ValueError("ragged_tensor_dict keys contain a duplicate key")
        return listed

    def decode(self, payload: Mapping[str, Any], rows: int, metadata: Mapping[str, Any]) -> list[Any]:
        keys, codecs = self._checked(metadata.get("keys", [])), metadata.get("key_codecs", {})
        columns = [
            self._one.decode({name: payload[f"{key}.{name}"] for name in self._parts}, rows, codecs.get(key) or {})
            for key in keys
        ]
        nulls = payload["null_mask"].tolist()
        below: Any = zip(*columns, strict=True) if columns else repeat((), len(nulls))
        return [
            None if null else {key: tensor for key, tensor in zip(keys, tensors) if tensor is not None}
            for null, tensors in zip(nulls, below, strict=True)
        ]

    def part(
        self, source: Source, rows: Sequence[int], metadata: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        payload: dict[str, Any] = {"null_mask": selected(source.whole("null_mask"), rows)}
        codecs = dict(metadata.get("key_codecs", {}))
        for key in self._checked(metadata.get("keys", [])):
            one = source.under({name: f"{key}.{name}" for name in self._parts})
            parts, codecs[key] = self._one.part(one, rows, codecs.get(key) or {})
            payload |= {f"{key}.{name}": part for name, part in parts.items()}
        return payload, {**metadata, "key_codecs": codecs}


def _plain(value: Any) -> Any:
    """Converts a value to types that JSON and msgpack have: arrays and tuples to lists, numpy
    numbers to numbers.
    """
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


def _media(value: Any) -> tuple[bytes, dict[str, Any]]:
    """Returns the bytes of a value and their description. An image becomes its pixels.

    Raises `ValueError` for an image of several frames.
    """
    if value is None:
        return b"", {"kind": "null"}
    if is_picture(type(value)):
        frames = _frames_of(value)
        if frames > 1:
            raise ValueError(f"an image would lose all frames but one, so put image.copy() of each frame. frames={frames}")
        kept = {"mode": value.mode, "size": list(value.size), "format": getattr(value, "format", None)}
        return value.tobytes(), {"kind": "pil_raw", **kept, **_colors_of(value)}
    if not is_bytes_like(type(value)):
        raise TypeError(f"rows must be bytes or images, not {type(value).__name__}")
    return bytes(value), {"kind": "bytes"}


def _frames_of(picture: Any) -> int:
    """Returns the number of frames of an image. A photo beside its previews is one frame. So is the
    frame that is left of a file that is closed.
    """
    if getattr(picture, "format", None) == "MPO":
        return 1
    try:
        file = getattr(picture, "_fp", None)
        # Some formats read their file to count.
        return 1 if file is not None and file.closed else int(getattr(picture, "n_frames", 1))
    except Exception:
        # Any use of a closed file fails. An image without pixels fails once it is loaded.
        return 1


def _colors_of(picture: Any) -> dict[str, Any]:
    """Returns the palette of an image and its transparency. Mooncake C++ skips both."""
    made: dict[str, Any] = {}
    # A file has its final palette once it is loaded.
    picture.load()
    colors = picture.getpalette(None)
    if colors:
        mode = "RGB" if len(colors) == len(picture.getpalette("RGB")) else "RGBA"
        made |= {"palette": b64encode(bytes(colors)).decode(), "palette_mode": mode}
    transparency = picture.info.get("transparency")
    if type(transparency) is int:
        made["transparency"] = transparency
    elif type(transparency) is bytes:
        made["transparency"] = b64encode(transparency).decode()
    elif type(transparency) is tuple and all(type(one) is int for one in transparency):
        made["transparency"] = list(transparency)
    elif transparency is not None:
        raise TypeError(f"the transparency of an image must be a number, bytes or a tuple, not {type(transparency).__name__}")
    return made


def _b64decoded(text: str) -> bytes:
    return b64decode(text, validate=True)


def _of_media(data: bytes, encoding: Mapping[str, Any] | None) -> Any:
    if not encoding or encoding.get("kind") != "pil_raw":
        return data
    try:
        from PIL import Image
    except ImportError:
        return data
    picture = Image.frombytes(encoding["mode"], tuple(encoding["size"]), data)
    picture.format = encoding.get("format")
    if encoding.get("palette") is not None:
        picture.putpalette(_b64decoded(encoding["palette"]), encoding.get("palette_mode", "RGB"))
    transparency = encoding.get("transparency")
    if transparency is not None:
        forms: dict[type, Any] = {str: _b64decoded, list: tuple, int: int}
        picture.info["transparency"] = forms[type(transparency)](transparency)
    return picture


def _media_types(encodings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    pictures = any(encoding["kind"] == "pil_raw" for encoding in encodings)
    return {"media_types": ["image/raw"]} if pictures else {}


class Packed(Codec):
    """Values that are packed into bytes, one after the other."""

    def pack(self, values: Iterable[Any]) -> list[bytes]:
        """Returns the bytes of each value."""
        raise NotImplementedError

    def unpack(self, parts: list[bytes]) -> list[Any]:
        """Returns the value of each of these bytes."""
        raise NotImplementedError

    def encode(self, values: list[Any], schema: FieldSchema) -> tuple[dict[str, Any], dict[str, Any]]:
        nulls = _nulls(values, set(map(type, values)))
        if nulls.any():
            packed = iter(self.pack(value for value in values if value is not None))
            parts = [b"" if value is None else next(packed) for value in values]
        else:
            parts = self.pack(values)
        return {"data": Pieces(parts), "offsets": _offsets(map(len, parts), len(parts)), "nulls": nulls}, {}

    def decode(self, payload: Mapping[str, Any], rows: int, metadata: Mapping[str, Any]) -> list[Any]:
        offsets, nulls = payload["offsets"].tolist(), payload["nulls"]
        if len(offsets) != rows + 1 or len(nulls) != rows:
            counts = f"offsets={len(offsets)} nulls={len(nulls)} rows={rows}"
            raise ValueError(f"invalid encoded column: offsets length must be that of rows and one more. {counts}")
        data = memoryview(payload["data"])
        if data.nbytes < rows * _LONG:
            whole = bytes(data)
            parts = [whole[begin:end] for begin, end in zip(offsets, offsets[1:])]
        else:
            parts = [bytes(data[begin:end]) for begin, end in zip(offsets, offsets[1:])]
        if not nulls.any():
            return self.unpack(parts)
        absent = nulls.tolist()
        values = iter(self.unpack([part for part, null in zip(parts, absent) if not null]))
        return [None if null else next(values) for null in absent]

    def part(
        self, source: Source, rows: Sequence[int], metadata: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        runs, offsets = _picked(source.whole("offsets"), rows)
        payload = {"data": source.runs("data", runs), "offsets": offsets, "nulls": selected(source.whole("nulls"), rows)}
        return payload, dict(metadata)


class Bytes(Packed):
    """Bytes and images. Images become their pixels."""

    def pack(self, values: Iterable[Any]) -> list[bytes]:
        return [value if type(value) is bytes else _media(value)[0] for value in values]

    def unpack(self, parts: list[bytes]) -> list[Any]:
        return parts

    def encode(self, values: list[Any], schema: FieldSchema) -> tuple[dict[str, Any], dict[str, Any]]:
        payload, metadata = super().encode(values, schema)
        if any(map(is_picture, kinds_of(values))):
            encodings = [_media(value)[1] for value in values]
            metadata = {**_media_types(encodings), "media_encodings": encodings, "encode_source": "raw_pixels_from_object"}
        return payload, metadata

    def decode(self, payload: Mapping[str, Any], rows: int, metadata: Mapping[str, Any]) -> list[Any]:
        values, encodings = super().decode(payload, rows, metadata), metadata.get("media_encodings")
        if not encodings:
            return values
        return [None if value is None else _of_media(value, encodings[row]) for row, value in enumerate(values)]

    def part(
        self, source: Source, rows: Sequence[int], metadata: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        payload, described = super().part(source, rows, metadata)
        encodings = metadata.get("media_encodings")
        kept = {"media_encodings": [encodings[row] for row in rows]} if encodings else {}
        return payload, {**described, **kept}


class Texts(Packed):
    """Texts in UTF-8."""

    def pack(self, values: Iterable[Any]) -> list[bytes]:
        return [text.encode("utf-8") for text in values]

    def unpack(self, parts: list[bytes]) -> list[Any]:
        return [part.decode("utf-8") for part in parts]


class MessagePacked(Packed):
    """Values that msgpack has, and those that `_plain` converts to such values."""

    def pack(self, values: Iterable[Any]) -> list[bytes]:
        import msgpack

        pack = msgpack.Packer(use_bin_type=True, strict_types=True, default=_plain).pack
        return [pack(value) for value in values]

    def unpack(self, parts: list[bytes]) -> list[Any]:
        from msgpack import unpackb

        return [unpackb(part, raw=False) for part in parts]


class Json(Packed):
    """Values that JSON has, and those that `_plain` converts to such values."""

    def pack(self, values: Iterable[Any]) -> list[bytes]:
        encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_plain_for_json).encode
        return [encode(value).encode() for value in values]

    def unpack(self, parts: list[bytes]) -> list[Any]:
        return [json.loads(part) for part in parts]


def _plain_for_json(value: Any) -> Any:
    made = _plain(value)
    if made is value:
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return made


class MediaLists(Codec):
    """Lists of bytes and images."""

    def encode(self, values: list[Any], schema: FieldSchema) -> tuple[dict[str, Any], dict[str, Any]]:
        nulls = _nulls(values, set(map(type, values)))
        lists = [[] if value is None else list(value) for value in values]
        items = [*chain.from_iterable(lists)]
        if set(map(type, items)) <= {bytes}:
            parts, encodings = items, [{"kind": "bytes"} for _ in items]
        else:
            media = [_media(item) for item in items]
            parts, encodings = [data for data, _ in media], [encoding for _, encoding in media]
        payload = {
            "data": Pieces(parts),
            "row_offsets": _offsets(map(len, lists), len(lists)),
            "byte_offsets": _offsets(map(len, parts), len(parts)),
            "nulls": nulls,
        }
        kept = {"encode_source": "raw_pixels_from_object", "media_encodings": encodings}
        return payload, {**kept, **_media_types(encodings)}

    def decode(self, payload: Mapping[str, Any], rows: int, metadata: Mapping[str, Any]) -> list[Any]:
        data, of_rows, of_bytes = bytes(payload["data"]), payload["row_offsets"], payload["byte_offsets"].tolist()
        items: list[Any] = [data[begin:end] for begin, end in zip(of_bytes, of_bytes[1:])]
        if of_rows.min() < 0 or of_rows.max() > len(items):
            raise ValueError(f"row offsets exceed the items. items={len(items)}")
        encodings: Any = metadata.get("media_encodings")
        if encodings:
            items = [_of_media(item, encodings[index]) for index, item in enumerate(items)]
        ends = of_rows.tolist()
        return [
            None if null else items[begin:end]
            for begin, end, null in zip(ends[:-1], ends[1:], payload["nulls"].tolist(), strict=True)
        ]

    def part(
        self, source: Source, rows: Sequence[int], metadata: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        of_rows, row_offsets = _picked(source.whole("row_offsets"), rows)
        indices = [index for begin, end in of_rows.tolist() for index in range(begin, end)]
        runs, byte_offsets = _picked(source.whole("byte_offsets"), indices)
        encodings = metadata.get("media_encodings")
        kept = {"media_encodings": [encodings[index] for index in indices]} if encodings else {}
        payload = {"data": source.runs("data", runs), "row_offsets": row_offsets, "byte_offsets": byte_offsets}
        return {**payload, "nulls": selected(source.whole("nulls"), rows)}, {**metadata, **kept}


def dtype_of(schema: FieldSchema) -> Any:
    """Returns the numeric type that a schema names, or `None`."""
    name = schema.metadata.get("dtype")
    if name is None or str(name).startswith("torch."):
        return None
    try:
        dtype = np.dtype(name)
    except TypeError:
        raise ValueError(f"invalid FieldSchema metadata['dtype']: {name!r}") from None
    if dtype.kind not in "biufc":
        raise ValueError(f"FieldSchema metadata['dtype'] must be numeric or bool, got {dtype}")
    return dtype


LEAVES: dict[str, Codec] = {
    "ndarray": Numbers(),
    "typed_ragged": Ragged(),
    "ragged_tensor": Tensors(),
    "ragged_tensor_dict": TensorDicts(),
    "bytes_ragged": Bytes(),
    "media_bytes": Bytes(),
    "media_list_ragged": MediaLists(),
    "utf8_ragged": Texts(),
    "msgpack_ragged": MessagePacked(),
    "json_ragged": Json(),
}
