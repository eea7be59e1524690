"""Encoding of a column of Python values as payloads of a bundle: concatenated rows, their offsets,
and a mask of absent rows.

A codec converts a list of values to payloads (arrays and bytes) with metadata, and back. It can
also read some rows only. Of long payloads it then reads only the bytes of those rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from mooncake._decisions import is_bytes_like, is_picture
from mooncake._manifests import numbers_of
from mooncake._members import Pieces
from mooncake._pool_results import owned

MAX_KEYS, MAX_LIST, MAX_DEPTH = 64, 8, 32


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

    def runs(self, name: str, runs: Sequence[tuple[int, int]]) -> Any:
        """Returns the concatenation of these (begin, end) runs of a payload."""

    def under(self, names: Mapping[str, str]) -> Source:
        """Returns some of the payloads under other names."""


def _nulls(values: Sequence[Any]) -> Any:
    return np.array([value is None for value in values], np.bool_)


def _offsets(lengths: Sequence[int]) -> Any:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(np.asarray(lengths, np.int64), out=offsets[1:])
    return offsets


def _picked(offsets: Any, rows: Sequence[int]) -> tuple[list[tuple[int, int]], Any]:
    """Returns the runs of the selected rows, and their offsets once they are concatenated."""
    picked = np.asarray(rows, np.int64)
    if not isinstance(offsets, np.ndarray) or offsets.ndim != 1 or offsets.dtype.kind not in "iu":
        raise ValueError("row offsets must be an array of integers")
    if len(picked) and picked.max() + 1 >= len(offsets):
        raise ValueError(f"too few row offsets: {len(offsets)} for {picked.max() + 1} rows")
    begins, ends = offsets[picked], offsets[picked + 1]
    lengths: Any = ends - begins
    # Overlapping rows could have more bytes than are stored.
    if (offsets[:-1] > offsets[1:]).any():
        raise ValueError("row offsets must not decrease")
    return list(zip(begins.tolist(), ends.tolist())), _offsets(lengths)


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
    """Column with a number in each row."""

    def encode(self, values: list[Any], schema: FieldSchema) -> tuple[dict[str, Any], dict[str, Any]]:
        present = [value for value in values if value is not None]
        dtype = dtype_of(schema) or (np.result_type(*present) if present else np.dtype(np.float64))
        if dtype.kind not in "biufc":
            raise ValueError(f"rows must be numbers, not {dtype}")
        data = np.array([0 if value is None else value for value in values], dtype)
        return {"data": data, "nulls": _nulls(values)}, {"dtype": str(dtype), "shape": list(data.shape)}

    def decode(self, payload: Mapping[str, Any], rows: int, metadata: Mapping[str, Any]) -> list[Any]:
        return [
            None if null else value for value, null in zip(payload["data"].tolist(), payload["nulls"].tolist())
        ]

    def part(
        self, source: Source, rows: Sequence[int], metadata: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        runs = [(row, row + 1) for row in rows]
        return {"data": source.runs("data", runs), "nulls": source.whole("nulls")[list(rows)]}, dict(metadata)


class Ragged(Codec):
    """Arrays, or sequences of numbers, of any lengths and shapes."""

    def encode(self, values: list[Any], schema: FieldSchema) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.rows_of(values, dtype_of(schema))

    @staticmethod
    def rows_of(values: list[Any], dtype: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        made = [None if value is None else np.asarray(value) for value in values]
        present = [array for array in made if array is not None]
        # An empty list has no element type.
        typed = [a for a, value in zip(made, values) if a is not None and (a.size or isinstance(value, np.ndarray))]
        dtype = dtype or (np.result_type(*typed) if typed else np.dtype(np.int64))
        if dtype.hasobject or any(array.dtype.hasobject for array in present):
            raise ValueError("rows must be arrays of numbers")
        arrays = [np.zeros(0, dtype) if array is None else np.asarray(array, dtype, order="C") for array in made]
        most = max((array.ndim for array in present), default=0)
        shapes = np.zeros((len(values), max(most, 1)), np.int64)
        alike = {array.shape[1:] for array in present if isinstance(array, np.ndarray)}
        if present and len(alike) == 1 and all(value is None or isinstance(value, np.ndarray) for value in values):
            # As in Mooncake C++, an absent row has the shape of the others, without elements.
            shapes[:, 1:most] = next(iter(alike))
        for row, array in enumerate(made):
            if array is not None:
                shapes[row, : array.ndim] = array.shape
        as_arrays = [isinstance(value, np.ndarray) for value in values]
        # As in Mooncake C++, an absent row among lists is an empty one.
        absent = 0 if any(as_arrays) or not present else 1
        payload = {
            "data": Pieces(arrays, dtype),
            "offsets": _offsets([array.size for array in arrays]),
            "shapes": shapes,
            "ndims": np.array([absent if array is None else array.ndim for array in made], np.int16),
            "nulls": _nulls(values),
        }
        metadata: dict[str, Any] = {"dtype": str(dtype), "max_ndim": most, "shape_policy": "ragged"}
        if all(array or value is None for array, value in zip(as_arrays, values)):
            metadata |= {"row_format": "ndarray", "ndarray_rows": None, "physical_layout": "contiguous_flat"}
        elif any(as_arrays):
            metadata |= {"row_format": "mixed", "ndarray_rows": as_arrays}
        else:
            metadata |= {"row_format": "list", "ndarray_rows": None}
        return payload, metadata

    def decode(self, payload: Mapping[str, Any], rows: int, metadata: Mapping[str, Any]) -> list[Any]:
        data = payload["data"]
        dtype = numbers_of("column", metadata.get("dtype", "int64"))
        if not isinstance(data, np.ndarray) or data.dtype != dtype:
            data = np.frombuffer(data, dtype)
        style, as_arrays = metadata.get("row_format"), metadata.get("ndarray_rows") or []
        offsets, shapes = payload["offsets"].tolist(), payload["shapes"].tolist()
        values: list[Any] = []
        for row, (null, ndim) in enumerate(zip(payload["nulls"].tolist(), payload["ndims"].tolist())):
            if null:
                values.append(None)
                continue
            array = data[offsets[row] : offsets[row + 1]].reshape(shapes[row][:ndim])
            keeps = style == "ndarray" or (style == "mixed" and as_arrays[row])
            values.append(array if keeps else array.tolist())
        made: list[Any] = owned(values, data)
        return made

    def part(
        self, source: Source, rows: Sequence[int], metadata: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        picked = list(rows)
        runs, offsets = _picked(source.whole("offsets"), picked)
        payload = {name: source.whole(name)[picked] for name in ("shapes", "ndims", "nulls")}
        payload |= {"data": source.runs("data", runs), "offsets": offsets}
        as_arrays = metadata.get("ndarray_rows")
        kept = [as_arrays[row] for row in picked] if as_arrays else None
        return payload, {**metadata, "ndarray_rows": kept}


class Tensors(Ragged):
    """Tensors of one type and of any shapes."""

    def encode(self, values: list[Any], schema: FieldSchema) -> tuple[dict[str, Any], dict[str, Any]]:
        torch = _torch()
        arrays: list[Any] = []
        dtypes: set[str] = set()
        for value in values:
            if value is None:
                arrays.append(None)
                continue
            tensor = torch.as_tensor(np.array(value) if isinstance(value, np.ndarray) else value).detach().cpu()
            if tensor.dtype == torch.bfloat16:
                raise ValueError("ragged tensor codec does not support torch.bfloat16")
            dtypes.add(str(tensor.dtype))
            arrays.append(tensor.contiguous().numpy())
        if len(dtypes) > 1:
            raise ValueError(f"mixed tensor dtype: {sorted(dtypes)}")
        dtype = next(iter(dtypes), "torch.float32")
        payload, metadata = self.rows_of(arrays, self._numpy(dtype))
        return payload, {**metadata, "dtype": dtype}

    @staticmethod
    def _numpy(dtype: str) -> Any:
        torch = _torch()
        known = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(known, torch.dtype):
            raise ValueError(f"unknown torch dtype: {dtype}")
        return torch.empty(0, dtype=known).numpy().dtype

    def decode(self, payload: Mapping[str, Any], rows: int, metadata: Mapping[str, Any]) -> list[Any]:
        torch = _torch()
        dtype = str(metadata.get("dtype", "torch.float32"))
        arrays = super().decode(payload, rows, {**metadata, "dtype": str(self._numpy(dtype)), "row_format": "ndarray"})
        tensors: list[Any] = [None if array is None else torch.from_numpy(array) for array in arrays]
        made: list[Any] = owned(tensors, arrays)
        return made


class TensorDicts(Codec):
    """Dictionaries of tensors, of which each key is a column."""

    _one = Tensors()
    _parts = ("data", "offsets", "shapes", "ndims", "nulls")

    def encode(self, values: list[Any], schema: FieldSchema) -> tuple[dict[str, Any], dict[str, Any]]:
        declared = schema.metadata.get("keys")
        found: dict[str, None] = {}
        for row, value in enumerate(values):
            if value is None:
                continue
            if not isinstance(value, Mapping):
                raise TypeError(f"ragged_tensor_dict rows must be mappings or None; row {row} is {type(value).__name__}")
            empty = sorted(str(key) for key, tensor in value.items() if tensor is None)
            if empty:
                raise TypeError(f"ragged_tensor_dict: row {row} has explicit None for {empty}")
            found |= dict.fromkeys(value)
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
        columns = {
            key: self._one.decode({name: payload[f"{key}.{name}"] for name in self._parts}, rows, codecs.get(key) or {})
            for key in keys
        }
        return [
            None if null else {key: columns[key][row] for key in keys if columns[key][row] is not None}
            for row, null in enumerate(payload["null_mask"].tolist())
        ]

    def part(
        self, source: Source, rows: Sequence[int], metadata: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        payload: dict[str, Any] = {"null_mask": source.whole("null_mask")[list(rows)]}
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
    """Returns the bytes of a value and their description. An image becomes its pixels."""
    if value is None:
        return b"", {"kind": "null"}
    if is_picture(value):
        kept = {"mode": value.mode, "size": list(value.size), "format": getattr(value, "format", None)}
        return value.tobytes(), {"kind": "pil_raw", **kept}
    if not is_bytes_like(value):
        raise TypeError(f"rows must be bytes or images, not {type(value).__name__}")
    return bytes(value), {"kind": "bytes"}


def _of_media(data: bytes, encoding: Mapping[str, Any] | None) -> Any:
    if not encoding or encoding.get("kind") != "pil_raw":
        return data
    try:
        from PIL import Image
    except ImportError:
        return data
    picture = Image.frombytes(encoding["mode"], tuple(encoding["size"]), data)
    picture.format = encoding.get("format")
    return picture


def _media_types(encodings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    pictures = any(encoding["kind"] == "pil_raw" for encoding in encodings)
    return {"media_types": ["image/raw"]} if pictures else {}


class Bytes(Codec):
    """Bytes, or values that are packed into bytes. Images become their pixels."""

    def __init__(self, pack: Callable[[Any], Any] = lambda v: v, unpack: Callable[[bytes], Any] = lambda v: v) -> None:
        self.pack, self.unpack = pack, unpack

    def encode(self, values: list[Any], schema: FieldSchema) -> tuple[dict[str, Any], dict[str, Any]]:
        made = [_media(None if value is None else self.pack(value)) for value in values]
        parts, encodings = [data for data, _ in made], [encoding for _, encoding in made]
        metadata = _media_types(encodings)
        if metadata:
            metadata |= {"media_encodings": encodings, "encode_source": "raw_pixels_from_object"}
        offsets = _offsets([len(part) for part in parts])
        return {"data": Pieces(parts), "offsets": offsets, "nulls": _nulls(values)}, metadata

    def decode(self, payload: Mapping[str, Any], rows: int, metadata: Mapping[str, Any]) -> list[Any]:
        data, offsets = memoryview(payload["data"]), payload["offsets"].tolist()
        if len(offsets) != rows + 1 or len(payload["nulls"]) != rows:
            counts = f"offsets={len(offsets)} nulls={len(payload['nulls'])} rows={rows}"
            raise ValueError(f"invalid encoded column: offsets length must be that of rows and one more. {counts}")
        encodings = metadata.get("media_encodings") or [None] * rows
        return [
            None if null else self.unpack(_of_media(bytes(data[offsets[row] : offsets[row + 1]]), encodings[row]))
            for row, null in enumerate(payload["nulls"].tolist())
        ]

    def part(
        self, source: Source, rows: Sequence[int], metadata: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        picked = list(rows)
        runs, offsets = _picked(source.whole("offsets"), picked)
        encodings = metadata.get("media_encodings")
        kept = {"media_encodings": [encodings[row] for row in picked]} if encodings else {}
        payload = {"data": source.runs("data", runs), "offsets": offsets, "nulls": source.whole("nulls")[picked]}
        return payload, {**metadata, **kept}


class MediaLists(Codec):
    """Lists of bytes and images."""

    def encode(self, values: list[Any], schema: FieldSchema) -> tuple[dict[str, Any], dict[str, Any]]:
        lists = [[] if value is None else [_media(one) for one in value] for value in values]
        items = [item for one in lists for item in one]
        encodings = [encoding for _, encoding in items]
        payload = {
            "data": Pieces([data for data, _ in items]),
            "row_offsets": _offsets([len(one) for one in lists]),
            "byte_offsets": _offsets([len(data) for data, _ in items]),
            "nulls": _nulls(values),
        }
        kept = {"encode_source": "raw_pixels_from_object", "media_encodings": encodings}
        return payload, {**kept, **_media_types(encodings)}

    def decode(self, payload: Mapping[str, Any], rows: int, metadata: Mapping[str, Any]) -> list[Any]:
        data, of_rows = memoryview(payload["data"]), payload["row_offsets"].tolist()
        of_bytes = payload["byte_offsets"].tolist()
        encodings = metadata.get("media_encodings") or [None] * of_rows[-1]

        def item(index: int) -> Any:
            return _of_media(bytes(data[of_bytes[index] : of_bytes[index + 1]]), encodings[index])

        return [
            None if null else [item(index) for index in range(of_rows[row], of_rows[row + 1])]
            for row, null in enumerate(payload["nulls"].tolist())
        ]

    def part(
        self, source: Source, rows: Sequence[int], metadata: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        picked = list(rows)
        items, row_offsets = _picked(source.whole("row_offsets"), picked)
        indices = [index for begin, end in items for index in range(begin, end)]
        runs, byte_offsets = _picked(source.whole("byte_offsets"), indices)
        encodings = metadata.get("media_encodings")
        kept = {"media_encodings": [encodings[index] for index in indices]} if encodings else {}
        payload = {"data": source.runs("data", runs), "row_offsets": row_offsets, "byte_offsets": byte_offsets}
        return {**payload, "nulls": source.whole("nulls")[picked]}, {**metadata, **kept}


def _packed(value: Any) -> bytes:
    import msgpack

    packed: bytes = msgpack.packb(_plain(value), use_bin_type=True, strict_types=True)
    return packed


def _unpacked(data: bytes) -> Any:
    import msgpack

    return msgpack.unpackb(data, raw=False)


def _text(value: Any) -> bytes:
    return json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":")).encode()


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
    "utf8_ragged": Bytes(lambda text: text.encode("utf-8"), lambda data: data.decode("utf-8")),
    "msgpack_ragged": Bytes(_packed, _unpacked),
    "json_ragged": Bytes(_text, json.loads),
}
