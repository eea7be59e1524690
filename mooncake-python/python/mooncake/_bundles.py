"""Objects of several named members: written together, read in parts. Needs numpy.

A member is an array, bytes, or a torch tensor. An object is stored as a bundle: one value for each
member, one for the metadata, and a manifest that lists them and is written last. A long member is
split into chunks. A bundle can be merged from others. Its manifest then lists their payloads, and
the keys to remove together with it.
"""

from __future__ import annotations

import copy
import json
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from mooncake import _mooncake
from mooncake._layout import HEADER_SIZE, Header
from mooncake._members import (
    RawDestination,
    TensorObjectBuffer,
    _at,
    _Body,
    _body,
    _bytes_view,
    _check_destination,
    _cut,
    _loaded,
    _nested_of,
    _nested_rows,
)
from mooncake._mooncake import ReplicateConfig
from mooncake._payloads import Numbers, Reader, _mapping, array_kind, check_manifest, dictionary_of, payloads
from mooncake._shards import _empty

_FIELDS = "__mooncake_structured_fields__"
_WRAPPED = "__mooncake_wrapped_object__"
_OBJECT_NOT_FOUND = -704
_NO_AVAILABLE_HANDLE = -200
_DEFAULT_CHUNK = 64 << 20
# Objects from this size on are checked after they were written. A smaller one hardly evicts parts
# of itself. The check takes a lease of several seconds on each part, so it is not free.
_CHECKED = 4 << 20


class BundleStore(Protocol):
    """Interface that a store must implement."""

    def put(self, key: str, value: Any, /) -> int: ...

    def get(self, key: str, /) -> bytes: ...

    def remove(self, key: str, /) -> int: ...


@dataclass(frozen=True)
class BundleTransferPolicy:
    """Policy for writing members. The stored objects do not depend on it."""

    max_inflight_put: int = 1
    put_mode: Literal["auto", "batch", "parallel"] = "auto"
    copy_mode: Literal["auto", "zero_copy", "copy"] = "auto"

    def __post_init__(self) -> None:
        if self.max_inflight_put < 1:
            raise ValueError("max_inflight_put must be positive")
        if self.put_mode not in ("auto", "batch", "parallel"):
            raise ValueError(f"invalid put_mode: {self.put_mode!r}")
        if self.copy_mode not in ("auto", "zero_copy", "copy"):
            raise ValueError(f"invalid copy_mode: {self.copy_mode!r}")


@dataclass(frozen=True)
class RemoteBundleRef:
    """Reference to a bundle, with its manifest. An empty manifest is fetched when it is needed."""

    manifest_key: str
    manifest: dict[str, Any] = field(default_factory=dict)


class StructuredObjectPayload:
    """Object to write: members by name, and its metadata."""

    def __init__(self, metadata: Mapping[str, Any] | None = None, buffers: Mapping[str, Any] | None = None) -> None:
        if buffers is None:
            raise TypeError("StructuredObjectPayload requires buffers")
        for value, what in ((metadata, "metadata"), (buffers, "buffers")):
            if value is not None and not isinstance(value, Mapping):
                raise TypeError(f"structured {what} must be a mapping, got {type(value).__name__}")
        self.metadata = dict(metadata or {})
        self.buffers = dict(buffers)


@dataclass(frozen=True)
class StructuredMemberSlice:
    """Rows of a member, as in a Python slice."""

    axis: int
    start: int
    end: int
    step: int = 1


@dataclass(frozen=True)
class StructuredObjectReadSpec:
    """Specification of a read. Each restriction returns a new one."""

    ref: RemoteBundleRef | Mapping[str, Any]
    member_names: tuple[str, ...] | None = None
    member_slices: tuple[tuple[str, StructuredMemberSlice], ...] = ()

    def select_members(self, names: Sequence[str] | None) -> StructuredObjectReadSpec:
        """Restricts the read to these members. `None` selects all."""
        if names is not None and not names:
            raise ValueError("cannot select members: the selection is empty")
        selected = None if names is None else tuple(names)
        return StructuredObjectReadSpec(self.ref, selected, self.member_slices)

    def slice_member(self, name: str, axis: int, start: int, end: int, step: int = 1) -> StructuredObjectReadSpec:
        """Restricts the read to these rows of a member."""
        if step < 1:
            raise ValueError("step of a slice must be positive")
        others = tuple(one for one in self.member_slices if one[0] != name)
        added = (name, StructuredMemberSlice(axis, start, end, step))
        return StructuredObjectReadSpec(self.ref, self.member_names, (*others, added))

    def member_slice(self, name: str) -> StructuredMemberSlice | None:
        """Returns the rows of a member to read, or `None` for all."""
        return dict(self.member_slices).get(name)


@dataclass(frozen=True)
class Opened:
    """Bundle whose manifest and metadata were read."""

    manifest: dict[str, Any]
    metadata: dict[str, Any]

    @property
    def fields(self) -> Mapping[str, Any]:
        """Descriptions of the members."""
        return _mapping(self.metadata.get(_FIELDS, {}), "descriptions of the members")

    def member(self, name: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Returns a member's payload and its description."""
        payload = self.manifest["buffers"].get(name)
        if payload is None:
            raise ValueError(f"no such member in the bundle: {name!r}")
        return payload, _mapping(self.fields.get(name, {"encoding": "bytes"}), f"{name}: description of the member")


@dataclass
class StructuredObjectResult:
    """Metadata and members that were read."""

    metadata: dict[str, Any]
    objects: dict[str, Any]


def _segment(name: str, what: str) -> str:
    """Checks a name that is one part of a key."""
    if not isinstance(name, str) or not name or "/" in name or not _can_be_key(name):
        raise ValueError(f"{what} must be one non-empty path segment of UTF-8: {name!r}")
    return name


def _can_be_key(text: str) -> bool:
    """Returns whether a text can be part of a key. A lone surrogate cannot be encoded as UTF-8."""
    return not any(ord(char) < 32 or 0xD800 <= ord(char) < 0xE000 for char in text)


def _json(metadata: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(metadata, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"structured metadata must be JSON-serializable: {error}") from error


def _key(payload: Mapping[str, Any]) -> str:
    return str(payload["key"])


def _grouped(config: Any, group: str | None = None) -> Any:
    """Returns the configuration with all values in one group: that of `config`, or `group`. An
    empty name stands for no group.
    """
    names = getattr(config, "group_ids", None)
    names = [names] if isinstance(names, str) else list(names or [])
    if len(names) > 1 or not all(isinstance(name, str) for name in names):
        raise ValueError("a bundle takes one group id")
    if group is not None and names and names[0] not in ("", group):
        raise ValueError("config.group_ids must name the group of the bundle that is appended to")
    name = group if group is not None else next(iter(names), None)
    if config is None and name is None:
        return None
    made = ReplicateConfig() if config is None else copy.copy(config)
    made.group_ids = [name] if name else None
    return made


class Bundles:
    """Writer and reader of bundles under one key prefix."""

    def __init__(
        self,
        store: BundleStore,
        key_prefix: str = "bundle",
        default_chunk_bytes: int = _DEFAULT_CHUNK,
        buffer_pool: Any = None,
    ) -> None:
        prefix = key_prefix.strip("/")
        if not prefix or not _can_be_key(prefix):
            raise ValueError(f"invalid key_prefix: {key_prefix!r}")
        if default_chunk_bytes < 1:
            raise ValueError("default_chunk_bytes must be positive")
        self._store: Any = store
        self._prefix = prefix
        self._chunk_bytes = default_chunk_bytes
        # Reads go directly into the destination arrays, so a pool is not needed.
        del buffer_pool

    @property
    def store(self) -> Any:
        """Store that contains the bundles."""
        return self._store

    @property
    def key_prefix(self) -> str:
        """Prefix of all keys, without leading and trailing slashes."""
        return self._prefix

    @property
    def default_chunk_bytes(self) -> int:
        """Default size of a chunk in bytes."""
        return self._chunk_bytes

    # Writing.

    def put_structured_object(
        self,
        payload: StructuredObjectPayload,
        partition: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        max_inflight_put: int | None = None,
        config: Any = None,
    ) -> RemoteBundleRef:
        """Writes an object. After a failure, all values that were written are removed."""
        metadata = dict(payload.metadata)
        if _FIELDS in metadata:
            raise ValueError(f"metadata must not have a key {_FIELDS!r}")
        layout = metadata.setdefault("layout", "structured")
        if not isinstance(layout, str):
            raise ValueError("the layout in the metadata must be a string")
        bodies, fields = {}, {}
        for name, value in payload.buffers.items():
            bodies[_segment(name, "member name")], fields[name] = _body(value, name)
        metadata[_FIELDS] = fields
        return self._put(_json(metadata), bodies, partition, chunk_bytes, policy, max_inflight_put, config)

    def put_bundle(
        self,
        meta: bytes | bytearray | memoryview,
        buffers: Mapping[str, Any],
        partition: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        max_inflight_put: int | None = None,
        config: Any = None,
    ) -> RemoteBundleRef:
        """Writes named values with raw bytes as their metadata."""
        described = bytes(_bytes_view(meta, "meta"))
        bodies = {_segment(name, "member name"): _body(value, name)[0] for name, value in buffers.items()}
        return self._put(described, bodies, partition, chunk_bytes, policy, max_inflight_put, config)

    def put_object(
        self,
        obj: Any,
        partition: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        max_inflight_put: int | None = None,
        config: Any = None,
    ) -> RemoteBundleRef:
        """Writes a dictionary of members, or a single value."""
        wrapped = not isinstance(obj, Mapping)
        payload = StructuredObjectPayload({_WRAPPED: True} if wrapped else {}, {"value": obj} if wrapped else obj)
        return self.put_structured_object(payload, partition, chunk_bytes, policy, max_inflight_put, config)

    def _put(
        self,
        meta: bytes,
        bodies: Mapping[str, _Body],
        partition: str,
        chunk_bytes: int | None,
        policy: BundleTransferPolicy | None,
        max_inflight_put: int | None,
        config: Any,
    ) -> RemoteBundleRef:
        registered = all(isinstance(body.owner, TensorObjectBuffer) for body in bodies.values())
        if policy is not None and policy.copy_mode == "zero_copy" and not registered:
            # Mooncake C++ raises this class with this message.
            raise RuntimeError("zero-copy put requires tensor-object buffers")
        if max_inflight_put is not None and max_inflight_put < 1:
            raise ValueError("max_inflight_put must be positive")
        config = _grouped(config)
        chunk = self._chunk_bytes if chunk_bytes is None else chunk_bytes
        if chunk < 1:
            raise ValueError("chunk_bytes must be positive")
        object_id = f"{_segment(partition, 'partition')}/{uuid.uuid4().hex}"
        base = f"{self._prefix}/{object_id}"
        written: list[str] = []
        try:
            described = _Body([memoryview(meta)], len(meta), {})
            manifest: dict[str, Any] = {
                "version": 1,
                "layout": "bundle",
                "object_id": object_id,
                "meta": self._put_body(f"{base}/meta", described, chunk, config, written),
                "buffers": {},
            }
            for name, body in bodies.items():
                key = f"{base}/buffer/{name}"
                # A tensor's header and data stay in one value.
                whole = body.size if "metadata_bytes" in body.extra else chunk
                manifest["buffers"][name] = self._put_body(key, body, max(whole, 1), config, written)
            if sum(body.size for body in bodies.values()) >= _CHECKED:
                self._check_written(written)
            listed = json.dumps(manifest, separators=(",", ":")).encode()
            self._put_value(f"{base}/manifest", [memoryview(listed)], config, written)
        except BaseException:
            self._remove(written)
            raise
        return RemoteBundleRef(f"{base}/manifest", manifest)

    def _put_merged(
        self,
        meta: bytes,
        buffers: dict[str, Any],
        cleanup: list[str],
        partition: str,
        chunk_bytes: int | None,
        config: Any,
    ) -> RemoteBundleRef:
        """Writes a bundle of existing payloads. `cleanup` lists keys to remove together with it."""
        object_id = f"{_segment(partition, 'partition')}/{uuid.uuid4().hex}"
        base = f"{self._prefix}/{object_id}"
        # The ID of an object has two parts: its partition and its own name.
        parts = (key.removeprefix(f"{self._prefix}/").split("/") for key in [*cleanup, *map(_key, buffers.values())])
        owners = {"/".join(part[:2]) for part in parts}
        written: list[str] = []
        try:
            described = _Body([memoryview(meta)], len(meta), {})
            manifest: dict[str, Any] = {
                "version": 1,
                "layout": "bundle",
                "object_id": object_id,
                "meta": self._put_body(f"{base}/meta", described, chunk_bytes or self._chunk_bytes, config, written),
                "buffers": buffers,
                "buffer_object_ids": sorted(owners),
                "cleanup_keys": list(dict.fromkeys(cleanup)),
            }
            listed = json.dumps(manifest, separators=(",", ":")).encode()
            self._put_value(f"{base}/manifest", [memoryview(listed)], config, written)
        except BaseException:
            self._remove(written)
            raise
        return RemoteBundleRef(f"{base}/manifest", manifest)

    def _put_body(self, key: str, body: _Body, chunk: int, config: Any, written: list[str]) -> dict[str, Any]:
        chunks = []
        for index, start in enumerate(range(0, body.size, chunk)):
            end = min(start + chunk, body.size)
            name = key if body.size <= chunk else f"{key}/chunk/{index}"
            self._put_value(name, _cut(body, start, end), config, written)
            chunks.append({"key": name, "bytes": end - start})
        return {"key": key, "bytes": body.size, "chunks": chunks, **body.extra}

    def _put_value(self, key: str, parts: list[memoryview], config: Any, written: list[str]) -> None:
        written.append(key)
        keywords = {} if config is None else {"config": config}
        if len(parts) > 1 and hasattr(self._store, "put_parts"):
            code = self._store.put_parts(key, *parts, **keywords)
        else:
            value = parts[0] if len(parts) == 1 else b"".join(parts)
            if not isinstance(self._store, _mooncake.Store):
                value = bytes(value)
            code = self._store.put(key, value, **keywords)
        if code != 0:
            raise RuntimeError(f"put failed for {key}: {code}")

    def _check_written(self, keys: list[str]) -> None:
        """Raises `RuntimeError` if a part of a new object is already gone. An object larger than
        the free space evicts its own first chunks.

        The check takes a lease on each part, so that the parts stay until the manifest names them.
        """
        if not hasattr(self._store, "batch_is_exist"):
            return
        for key, exists in zip(keys, self._store.batch_is_exist(keys)):
            if exists != 1:
                raise RuntimeError(f"put failed for {key}: {exists if exists < 0 else _NO_AVAILABLE_HANDLE}")

    # Removing.

    def remove_bundle(self, ref: RemoteBundleRef | Mapping[str, Any]) -> None:
        """Removes a bundle with all its values. A missing bundle is not an error."""
        key = self._manifest_key(ref)
        try:
            manifest = self._manifest(ref)
        except ValueError:
            if self._store.get(key):
                raise
            return
        keys = [chunk["key"] for one in payloads(manifest) for chunk in one["chunks"]]
        left = self._remove([*dict.fromkeys([*keys, *manifest.get("cleanup_keys", [])])]) or self._remove([key])
        if left:
            raise RuntimeError(f"remove failed for {', '.join(f'{key}: {code}' for key, code in left.items())}")

    def _remove(self, keys: list[str]) -> dict[str, int]:
        """Removes values and returns the codes of those that could not be removed."""
        if not keys:
            return {}
        if hasattr(self._store, "batch_remove"):
            codes = self._store.batch_remove(keys, True)
        else:
            codes = [self._store.remove(key) for key in keys]
        # A second attempt, one key at a time.
        again = [key for key, code in zip(keys, codes) if code not in (None, 0, _OBJECT_NOT_FOUND)]
        codes = {key: self._store.remove(key) for key in again}
        return {key: code for key, code in codes.items() if code not in (None, 0, _OBJECT_NOT_FOUND)}

    # Manifests.

    def _manifest_key(self, ref: RemoteBundleRef | Mapping[str, Any]) -> str:
        if not isinstance(ref, RemoteBundleRef | Mapping):
            raise TypeError(f"bundle ref must be a RemoteBundleRef or a mapping, got {type(ref).__name__}")
        key = ref.manifest_key if isinstance(ref, RemoteBundleRef) else ref.get("manifest_key")
        if key is None:
            raise ValueError("bundle ref must include manifest_key")
        if not isinstance(key, str) or not key.startswith(f"{self._prefix}/") or not key.endswith("/manifest"):
            raise ValueError(f"invalid manifest key {key!r}: not below the prefix {self._prefix!r}")
        return key

    def _manifest(self, ref: RemoteBundleRef | Mapping[str, Any]) -> dict[str, Any]:
        key = self._manifest_key(ref)
        given = ref.manifest if isinstance(ref, RemoteBundleRef) else ref.get("manifest")
        what = f"manifest at {key!r}"
        manifest = dict(_mapping(given, what)) if given else dictionary_of(bytes(self._store.get(key)), what)
        check_manifest(manifest, key, self._prefix)
        return manifest

    # Reading.

    def read_spec(self, ref: RemoteBundleRef | Mapping[str, Any]) -> StructuredObjectReadSpec:
        """Returns a specification that reads everything. Its methods restrict the read."""
        return StructuredObjectReadSpec(ref)

    def materialize(self, spec: StructuredObjectReadSpec) -> StructuredObjectResult:
        """Reads the members that `spec` selects into new objects."""
        return self._read(spec, {})

    def materialize_into(
        self, spec: StructuredObjectReadSpec, destinations: Mapping[str, Any] | None
    ) -> StructuredObjectResult:
        """Reads members into the given destinations, by name. The other members are new objects."""
        return self._read(spec, dict(destinations or {}))

    def get_object(self, ref: RemoteBundleRef | Mapping[str, Any]) -> Any:
        """Reads an object of `put_object`."""
        result = self.materialize(self.read_spec(ref))
        return result.objects["value"] if result.metadata.get(_WRAPPED) else result.objects

    def _open(self, ref: RemoteBundleRef | Mapping[str, Any]) -> Opened:
        manifest = self._manifest(ref)
        data = Reader(self._store, manifest["meta"]).whole()
        return Opened(manifest, dictionary_of(data, "metadata of a structured object"))

    def _read(self, spec: StructuredObjectReadSpec, destinations: dict[str, Any]) -> StructuredObjectResult:
        opened = self._open(spec.ref)
        buffers = opened.manifest["buffers"]
        names = tuple(buffers) if spec.member_names is None else spec.member_names
        unknown = sorted({*names, *(name for name, _ in spec.member_slices)} - set(buffers))
        if unknown:
            raise KeyError(f"unknown bundle buffers: {unknown}")
        objects = {
            name: self._read_member(opened, name, spec.member_slice(name), destinations.get(name)) for name in names
        }
        return StructuredObjectResult(opened.metadata, objects)

    def _read_member(
        self, opened: Opened, name: str, rows: StructuredMemberSlice | Sequence[int] | None, destination: Any
    ) -> Any:
        """Reads a member, or those rows of it that a slice or numbers select."""
        payload, described = opened.member(name)
        encoding = described.get("encoding")
        if encoding == "ndarray":
            return self._read_array(name, payload, described, rows, destination)
        if encoding == "torch_tensor":
            return self._read_tensor(name, payload, described, rows, destination)
        if encoding != "bytes":
            raise ValueError(f"{name}: unsupported structured field encoding: {encoding!r}")
        if destination is not None:
            raise ValueError(f"{name}: only arrays and tensors can be read into a destination")
        if rows is not None:
            raise ValueError(f"{name}: a member of bytes can only be read as a whole")
        return Reader(self._store, payload).whole()

    def _read_array(
        self,
        name: str,
        payload: Mapping[str, Any],
        described: Mapping[str, Any],
        rows: StructuredMemberSlice | Sequence[int] | None,
        destination: Any,
    ) -> Any:
        dtype, shape = array_kind(name, described, payload["bytes"])
        if rows is not None and not shape:
            raise ValueError(f"{name}: the array has no rows")
        # An array without dimensions has one element.
        selected = _selected(rows, shape or (1,), "structured ndarray slicing currently supports axis=0 only")
        wanted = (len(selected), *shape[1:]) if shape else ()
        size = math.prod(wanted) * dtype.itemsize
        reader, into = Reader(self._store, payload), destination
        if isinstance(destination, RawDestination | TensorObjectBuffer):
            if destination.size < size:
                raise ValueError(f"{name}: the destination is too small. size={destination.size} needed={size}")
            # The caller gets its own memory as an array.
            into = np.ndarray(wanted, dtype, _at(destination.ptr, size))
        elif destination is not None:
            _check_destination(name, destination, dtype, wanted)
        else:
            reader.expect(size)
            into = np.empty(wanted, dtype)
        reader.rows(0, math.prod(shape[1:]) * dtype.itemsize, selected, into)
        return into

    def _read_tensor(
        self,
        name: str,
        payload: Mapping[str, Any],
        described: Mapping[str, Any],
        rows: StructuredMemberSlice | Sequence[int] | None,
        destination: Any,
    ) -> Any:
        if destination is not None and not isinstance(destination, RawDestination | TensorObjectBuffer):
            raise ValueError(f"{name}: the destination of a tensor must be a tensor_object_buffer or raw_destination")
        axis, reader = "structured tensor slicing currently supports axis=0 only", Reader(self._store, payload)
        if described.get("nested") or payload.get("format") == "torch_save":
            if destination is not None:
                raise ValueError(f"{name}: a nested or pickled tensor cannot be read into a destination")
            data = reader.whole()
            if described.get("nested"):
                whole = _nested_of(data, described)
                return whole if rows is None else _nested_rows(whole, [*map(int, _selected(rows, (len(whole),), axis))])
            whole = _loaded(data)
            return whole if rows is None else whole[[*map(int, _selected(rows, tuple(whole.shape), axis))]]
        head = np.empty(min(HEADER_SIZE, payload["bytes"]), np.uint8)
        reader.rows(0, 1, range(head.nbytes), head)
        header = Header.parse(head.tobytes(), payload["bytes"])
        if header is None or (rows is not None and not header.local_shape):
            raise ValueError(f"{name}: not a tensor" if header is None else f"{name}: the tensor has no rows")
        shape, width = header.local_shape, header.data_bytes
        selected: range | Numbers = range(1)
        if rows is not None:
            if isinstance(rows, StructuredMemberSlice) and rows.step != 1:
                raise ValueError("structured tensor slicing currently requires step=1")
            selected = _selected(rows, shape, axis)
            width = header.data_bytes // shape[0] if shape[0] else 0
            shape = (len(selected), *shape[1:])
        part = Header(header.dtype, shape, shape)
        if destination is None:
            reader.expect(part.data_bytes)
            made = _empty(part)
            memory = np.ctypeslib.as_array(_at(made.data_ptr(), part.data_bytes))
            reader.rows(header.data_offset, width, selected, memory)
            return made
        if destination.size < HEADER_SIZE + part.data_bytes:
            raise ValueError(f"{name}: the destination is too small. size={destination.size} needed={HEADER_SIZE + part.data_bytes}")
        into = np.ctypeslib.as_array(_at(destination.ptr, HEADER_SIZE + part.data_bytes))
        into[:HEADER_SIZE] = np.frombuffer(part.pack(), np.uint8)
        reader.rows(header.data_offset, width, selected, into[HEADER_SIZE:])
        return destination


def _selected(
    rows: StructuredMemberSlice | Sequence[int] | None, shape: tuple[int, ...], wrong_axis: str
) -> range | Numbers:
    """Returns the numbers of the selected rows of a member of that shape."""
    if rows is None:
        return range(shape[0])
    if isinstance(rows, StructuredMemberSlice):
        if rows.axis != 0:
            raise ValueError(wrong_axis)
        return range(shape[0])[rows.start : rows.end : rows.step]
    if isinstance(rows, range) and rows.step > 0:
        within = not rows or (rows[0] >= 0 and rows[-1] < shape[0])
        picked: range | Numbers = rows
    else:
        picked = np.array(rows, np.int64)
        within = not len(picked) or bool(picked.min() >= 0 and picked.max() < shape[0])
    if not within:
        raise IndexError(f"row out of range for {shape[0]} rows")
    return picked
