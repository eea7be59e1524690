"""Manifests of bundles, and descriptions of their members.

Stored data is untrusted. A manifest is validated on every use. The description of a member is
validated before memory is allocated for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mooncake._element_types import ml_dtype

MOST = (1 << 63) - 1
ML_DTYPE = "ml_dtype"
"""Name of the type of ml_dtypes in the description of an array. Mooncake C++ skips it, and reads
elements of that size without a meaning.
"""
BUFFER = "buffer"
"""Name of the class of a buffer other than `bytes` in its description, which Mooncake C++ skips."""
DIMENSIONS = "ndim"
"""Name of the number of dimensions, 0, of an array whose shape is [1] for Mooncake C++."""
RECORD = "record"
"""Name of the fields of records in the description of an array, which Mooncake C++ skips, too."""


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} must be a dictionary, not {type(value).__name__}")
    return value


def _words(value: Any, what: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{what} must be a list of strings")
    return value


def is_count(value: Any) -> bool:
    """Returns whether a value is a valid count. `True` and `1.0` are not."""
    return type(value) is int and 0 <= value <= MOST


def dictionary_of(data: bytes, what: str) -> dict[str, Any]:
    """Parses a JSON dictionary. Raises `ValueError` if it is none."""
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a dictionary")
    return value


def check_manifest(manifest: Mapping[str, Any], key: str, prefix: str) -> None:
    """Raises `ValueError` if the manifest at `key` is not that of a bundle, or is that of another
    one.
    """
    object_id = manifest.get("object_id")
    if manifest.get("version") != 1 or manifest.get("layout") != "bundle":
        raise ValueError(f"no bundle manifest of version 1 at {key!r}")
    if not isinstance(object_id, str):
        raise ValueError(f"manifest at {key!r}: object_id must be a string")
    if f"{prefix}/{object_id}/manifest" != key:
        raise ValueError(f"manifest_key {key!r} does not fit its manifest, which belongs to {object_id!r}")
    members = _mapping(manifest.get("buffers"), f"buffers of the manifest at {key!r}")
    owners = _words(manifest.get("buffer_object_ids", [object_id]), "buffer_object_ids")
    roots = tuple(f"{prefix}/{owner}/" for owner in owners)
    _check_payload(manifest.get("meta"), (f"{prefix}/{object_id}/",))
    for name, payload in members.items():
        if not name or "/" in name:
            raise ValueError(f"buffer name in the manifest at {key!r} must be one path segment: {name!r}")
        _check_payload(payload, roots)
    outside = [one for one in _words(manifest.get("cleanup_keys", []), "cleanup_keys") if not one.startswith(roots)]
    if outside:
        raise ValueError(f"bundle manifest cleanup_keys {outside} are outside the bundle namespace")


def _check_payload(payload: Any, roots: tuple[str, ...]) -> None:
    payload = _mapping(payload, "payload of a bundle manifest")
    key, size, chunks = (payload.get(name) for name in ("key", "bytes", "chunks"))
    if not isinstance(key, str) or not is_count(size) or not isinstance(chunks, list):
        raise ValueError(f"payload {key!r} of a bundle manifest needs a key, bytes, and a list of chunks")
    if not key.startswith(roots):
        raise ValueError(f"bundle payload {key!r} is outside the bundle namespace")
    sizes, seen = 0, set()
    for given in chunks:
        chunk = _mapping(given, f"chunk of {key!r}")
        name = chunk.get("key")
        if not isinstance(name, str) or not is_count(chunk.get("bytes")):
            raise ValueError(f"chunk of {key!r} needs a key and bytes")
        if name != key and not name.startswith(f"{key}/"):
            raise ValueError(f"bundle chunk {name!r} is outside the namespace of its payload {key!r}")
        if name in seen:
            raise ValueError(f"chunk keys of {key!r} must be unique: {name!r}")
        seen.add(name)
        sizes += chunk["bytes"]
    if sizes != size:
        raise ValueError(f"chunks of {key!r} have {sizes} bytes in total, not {size}")


def payloads(manifest: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Yields all payloads that a manifest lists."""
    yield manifest.get("meta") or {}
    yield from manifest["buffers"].values()


def array_kind(name: str, described: Mapping[str, Any], size: int) -> tuple[Any, tuple[int, ...]]:
    """Returns type and shape of a stored array of `size` bytes. Raises `ValueError` if they do not
    match the size.
    """
    dtype = numbers_of(name, described.get("dtype"))
    other = described.get(ML_DTYPE)
    if other is not None:
        if not isinstance(other, str) or dtype.kind != "V" or ml_dtype(other).itemsize != dtype.itemsize:
            raise ValueError(f"{name}: unsupported dtype {other!r}")
        dtype = ml_dtype(other)
    if described.get(RECORD) is not None:
        dtype = _record_of(name, described[RECORD], dtype.itemsize)
    shape = described.get("shape")
    if not isinstance(shape, list) or not all(is_count(dim) for dim in shape):
        raise ValueError(f"{name}: invalid array shape {shape!r}: it must be a list of non-negative integers")
    if math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"{name}: an array of {dtype} {tuple(shape)} does not have {size} bytes")
    if shape == [1] and described.get(DIMENSIONS) == 0:
        return dtype, ()
    return dtype, tuple(shape)


def numbers_of(name: str, dtype_name: Any) -> Any:
    """Returns the element type of an array by its name. A type with objects is rejected, because
    stored bytes would become pointers.
    """
    try:
        dtype = np.dtype(dtype_name) if isinstance(dtype_name, str) else None
    except (TypeError, ValueError, SyntaxError, OverflowError, MemoryError, RecursionError):
        dtype = None
    # numpy makes arrays of "|S1" from "|S0".
    if dtype is None or dtype.hasobject or dtype.subdtype is not None or (dtype.kind in "SU" and not dtype.itemsize):
        raise ValueError(f"{name}: unsupported dtype {dtype_name!r}")
    return dtype


def record_fields(name: str, dtype: Any) -> list[list[Any]]:
    """Returns name, type and offset of the fields of records. Raises `ValueError` for fields that
    no description names.
    """
    fields = [[one, dtype.fields[one][0].str, dtype.fields[one][1]] for one in dtype.names]
    made = _record_of(name, fields, dtype.itemsize)
    if made != dtype:
        raise ValueError(f"{name}: records have fields of other types than numbers. dtype={dtype}")
    return fields


def _record_of(name: str, fields: Any, size: int) -> Any:
    """Returns the element type of records of that size. Raises `ValueError` for invalid fields."""
    if not isinstance(fields, list) or not all(isinstance(one, list) and len(one) == 3 for one in fields):
        raise ValueError(f"{name}: invalid fields of records: {fields!r:.200}")
    names, formats, offsets = ([one[at] for one in fields] for at in range(3))
    if not all(isinstance(one, str) for one in names) or not all(is_count(one) for one in offsets):
        raise ValueError(f"{name}: invalid fields of records: {fields!r:.200}")
    types = [numbers_of(name, one) for one in formats]
    try:
        return np.dtype({"names": names, "formats": types, "offsets": offsets, "itemsize": size})
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}: invalid fields of records: {error}") from None


def chunk_keys(payload: Mapping[str, Any]) -> list[str]:
    """Returns the keys of the values that hold a payload."""
    return [chunk["key"] for chunk in payload["chunks"]]
