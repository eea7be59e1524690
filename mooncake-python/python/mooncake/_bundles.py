"""Objects of several named members: written together, read in parts. Needs numpy.

A member is an array, bytes, or a torch tensor. An object is a bundle: values for its members and for what describes them, and a
manifest, written last, that lists them all. Where a member is long, it lies in chunks. A bundle may be merged from others: its
manifest then lists payloads of theirs, and what of them is to be removed with it.
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
# Objects from this size on are looked at again when they are written. Smaller ones hardly drive out parts of themselves, and to look
# is not free: it takes a reader's lease, for whose time (seconds) the memory is nobody else's.
_CHECKED = 4 << 20


class BundleStore(Protocol):
    """What a store must be able to do at least."""

    def put(self, key: str, value: Any, /) -> int: ...

    def get(self, key: str, /) -> bytes: ...

    def remove(self, key: str, /) -> int: ...


@dataclass(frozen=True)
class BundleTransferPolicy:
    """How members are written. Every choice gives the same objects."""

    max_inflight_put: int = 1
    put_mode: Literal["auto", "batch", "parallel"] = "auto"
    copy_mode: Literal["auto", "zero_copy", "copy"] = "auto"

    def __post_init__(self) -> None:
        if self.max_inflight_put < 1:
            raise ValueError("max_inflight_put must be positive")
        if self.put_mode not in ("auto", "batch", "parallel"):
            raise ValueError(f"put_mode {self.put_mode!r}")
        if self.copy_mode not in ("auto", "zero_copy", "copy"):
            raise ValueError(f"copy_mode {self.copy_mode!r}")


@dataclass(frozen=True)
class RemoteBundleRef:
    """Where a bundle is, and its manifest; an empty manifest is fetched when it is needed."""

    manifest_key: str
    manifest: dict[str, Any] = field(default_factory=dict)


class StructuredObjectPayload:
    """An object to write: members by name, and what describes it."""

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
    """Rows of a member, as Python's slices count them."""

    axis: int
    start: int
    end: int
    step: int = 1


@dataclass(frozen=True)
class StructuredObjectReadSpec:
    """What to read of an object. Each narrowing is a new one."""

    ref: RemoteBundleRef | Mapping[str, Any]
    member_names: tuple[str, ...] | None = None
    member_slices: tuple[tuple[str, StructuredMemberSlice], ...] = ()

    def select_members(self, names: Sequence[str] | None) -> StructuredObjectReadSpec:
        """Only these members; all of them for `None`."""
        if names is not None and not names:
            raise ValueError("an empty selection of members")
        selected = None if names is None else tuple(names)
        return StructuredObjectReadSpec(self.ref, selected, self.member_slices)

    def slice_member(self, name: str, axis: int, start: int, end: int, step: int = 1) -> StructuredObjectReadSpec:
        """Only these rows of a member."""
        if step < 1:
            raise ValueError("the step of a slice must be positive")
        others = tuple(one for one in self.member_slices if one[0] != name)
        added = (name, StructuredMemberSlice(axis, start, end, step))
        return StructuredObjectReadSpec(self.ref, self.member_names, (*others, added))

    def member_slice(self, name: str) -> StructuredMemberSlice | None:
        """The rows of a member that are read, if not all."""
        return dict(self.member_slices).get(name)


@dataclass(frozen=True)
class Opened:
    """A bundle whose manifest and metadata were read."""

    manifest: dict[str, Any]
    metadata: dict[str, Any]

    @property
    def fields(self) -> Mapping[str, Any]:
        """What is said of each member."""
        return _mapping(self.metadata.get(_FIELDS, {}), "what is said of the members")

    def member(self, name: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """A member's payload, and what is said of it."""
        payload = self.manifest["buffers"].get(name)
        if payload is None:
            raise ValueError(f"{name}: the bundle has no such member")
        return payload, _mapping(self.fields.get(name, {"encoding": "bytes"}), f"{name}: what is said of the member")


@dataclass
class StructuredObjectResult:
    """What was read."""

    metadata: dict[str, Any]
    objects: dict[str, Any]


def _segment(name: str, what: str) -> str:
    """A name that can be one part of a key."""
    if not isinstance(name, str) or not name or "/" in name or not _can_be_key(name):
        raise ValueError(f"{what} must be one non-empty path segment of UTF-8: {name!r}")
    return name


def _can_be_key(text: str) -> bool:
    """Whether keys can have it: text with a lone surrogate is no UTF-8."""
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
    """How values are kept, all in one group: that of the configuration, or the one given. Nothing in the name of a group is none."""
    names = getattr(config, "group_ids", None)
    names = [names] if isinstance(names, str) else list(names or [])
    if len(names) > 1 or not all(isinstance(name, str) for name in names):
        raise ValueError("a bundle has one group id")
    if group is not None and names and names[0] not in ("", group):
        raise ValueError("config.group_ids names another group than that of what is appended to")
    name = group if group is not None else next(iter(names), None)
    if config is None and name is None:
        return None
    made = ReplicateConfig() if config is None else copy.copy(config)
    made.group_ids = [name] if name else None
    return made


class Bundles:
    """Writes and reads bundles under one prefix of keys."""

    def __init__(
        self,
        store: BundleStore,
        key_prefix: str = "bundle",
        default_chunk_bytes: int = _DEFAULT_CHUNK,
        buffer_pool: Any = None,
    ) -> None:
        prefix = key_prefix.strip("/")
        if not prefix or not _can_be_key(prefix):
            raise ValueError(f"key_prefix {key_prefix!r}")
        if default_chunk_bytes < 1:
            raise ValueError("default_chunk_bytes must be positive")
        self._store: Any = store
        self._prefix = prefix
        self._chunk_bytes = default_chunk_bytes
        # Reads go straight into the arrays they are for.
        del buffer_pool

    @property
    def store(self) -> Any:
        """The store that bundles are in."""
        return self._store

    @property
    def key_prefix(self) -> str:
        """What all keys begin with, without slashes at its ends."""
        return self._prefix

    @property
    def default_chunk_bytes(self) -> int:
        """Bytes of a chunk, where a call does not say otherwise."""
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
        """Writes an object. What was written is removed again when something fails."""
        metadata = dict(payload.metadata)
        if _FIELDS in metadata:
            raise ValueError(f"metadata must not have a key {_FIELDS!r}")
        layout = metadata.setdefault("layout", "structured")
        if not isinstance(layout, str):
            raise ValueError("the layout in the metadata must be a string")
        bodies, fields = {}, {}
        for name, value in payload.buffers.items():
            bodies[_segment(name, "a member's name")], fields[name] = _body(value, name)
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
        """Writes named values and raw bytes that describe them."""
        described = bytes(_bytes_view(meta, "meta"))
        bodies = {_segment(name, "a member's name"): _body(value, name)[0] for name, value in buffers.items()}
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
        """Writes a dictionary of members, or one value."""
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
            # The existing package's class and words.
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
                # A tensor's header and data stay together.
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
        """A bundle of payloads that are there already, with keys that are to go when it goes."""
        object_id = f"{_segment(partition, 'partition')}/{uuid.uuid4().hex}"
        base = f"{self._prefix}/{object_id}"
        # An object's name has two parts: that of the partition, and its own.
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
        """Refuses an object of which something is gone already: one larger than the free space drives out its own first chunks.

        What is there gets a reader's lease, so that it stays until the manifest names it.
        """
        if not hasattr(self._store, "batch_is_exist"):
            return
        for key, there in zip(keys, self._store.batch_is_exist(keys)):
            if there != 1:
                raise RuntimeError(f"put failed for {key}: {there if there < 0 else _NO_AVAILABLE_HANDLE}")

    # Removing.

    def remove_bundle(self, ref: RemoteBundleRef | Mapping[str, Any]) -> None:
        """Removes a bundle with all its values; one that is not there is as good as removed."""
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
        """Removes values, and gives the codes of those that are still there."""
        if not keys:
            return {}
        if hasattr(self._store, "batch_remove"):
            codes = self._store.batch_remove(keys, True)
        else:
            codes = [self._store.remove(key) for key in keys]
        # Once more, each by itself.
        again = [key for key, code in zip(keys, codes) if code not in (None, 0, _OBJECT_NOT_FOUND)]
        codes = {key: self._store.remove(key) for key in again}
        return {key: code for key, code in codes.items() if code not in (None, 0, _OBJECT_NOT_FOUND)}

    # Manifests.

    def _manifest_key(self, ref: RemoteBundleRef | Mapping[str, Any]) -> str:
        if not isinstance(ref, RemoteBundleRef | Mapping):
            raise TypeError(f"a bundle ref must be a RemoteBundleRef or a mapping, got {type(ref).__name__}")
        key = ref.manifest_key if isinstance(ref, RemoteBundleRef) else ref.get("manifest_key")
        if key is None:
            raise ValueError("bundle ref must include manifest_key")
        if not isinstance(key, str) or not key.startswith(f"{self._prefix}/") or not key.endswith("/manifest"):
            raise ValueError(f"{key!r} is no manifest under {self._prefix!r}")
        return key

    def _manifest(self, ref: RemoteBundleRef | Mapping[str, Any]) -> dict[str, Any]:
        key = self._manifest_key(ref)
        given = ref.manifest if isinstance(ref, RemoteBundleRef) else ref.get("manifest")
        what = f"the manifest at {key!r}"
        manifest = dict(_mapping(given, what)) if given else dictionary_of(bytes(self._store.get(key)), what)
        check_manifest(manifest, key, self._prefix)
        return manifest

    # Reading.

    def read_spec(self, ref: RemoteBundleRef | Mapping[str, Any]) -> StructuredObjectReadSpec:
        """A read of everything, to be narrowed."""
        return StructuredObjectReadSpec(ref)

    def materialize(self, spec: StructuredObjectReadSpec) -> StructuredObjectResult:
        """Reads what `spec` names into new objects."""
        return self._read(spec, {})

    def materialize_into(
        self, spec: StructuredObjectReadSpec, destinations: Mapping[str, Any] | None
    ) -> StructuredObjectResult:
        """Reads arrays into those given by name; the others are new."""
        return self._read(spec, dict(destinations or {}))

    def get_object(self, ref: RemoteBundleRef | Mapping[str, Any]) -> Any:
        """What `put_object` wrote."""
        result = self.materialize(self.read_spec(ref))
        return result.objects["value"] if result.metadata.get(_WRAPPED) else result.objects

    def _open(self, ref: RemoteBundleRef | Mapping[str, Any]) -> Opened:
        manifest = self._manifest(ref)
        data = Reader(self._store, manifest["meta"]).whole()
        return Opened(manifest, dictionary_of(data, "the metadata of a structured object"))

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
        """A member, or those of its rows: a slice of them, or their numbers."""
        payload, described = opened.member(name)
        encoding = described.get("encoding")
        if encoding == "ndarray":
            return self._read_array(name, payload, described, rows, destination)
        if encoding == "torch_tensor":
            return self._read_tensor(name, payload, described, rows, destination)
        if encoding != "bytes":
            raise ValueError(f"{name}: unsupported structured field encoding: {encoding!r}")
        if destination is not None:
            raise ValueError(f"{name}: only arrays and tensors are read into memory of the caller's")
        if rows is not None:
            raise ValueError(f"{name}: a member of bytes is read as a whole")
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
            raise ValueError(f"{name}: an array without rows")
        # One without dimensions has one element.
        selected = _selected(rows, shape or (1,), "structured ndarray slicing currently supports axis=0 only")
        wanted = (len(selected), *shape[1:]) if shape else ()
        size = math.prod(wanted) * dtype.itemsize
        reader, into = Reader(self._store, payload), destination
        if isinstance(destination, RawDestination | TensorObjectBuffer):
            if destination.size < size:
                raise ValueError(f"{name}: the destination has {destination.size} bytes, {size} are read")
            # What is lent by address is the caller's to look at, as an array.
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
            raise ValueError(f"{name}: a tensor is read into tensor_object_buffer or raw_destination")
        axis, reader = "structured tensor slicing currently supports axis=0 only", Reader(self._store, payload)
        if described.get("nested") or payload.get("format") == "torch_save":
            if destination is not None:
                raise ValueError(f"{name}: such a tensor is not read into memory of the caller's")
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
            raise ValueError(f"{name}: not a tensor" if header is None else f"{name}: a tensor without rows")
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
            raise ValueError(f"{name}: the destination has {destination.size} bytes, {HEADER_SIZE + part.data_bytes} are read")
        into = np.ctypeslib.as_array(_at(destination.ptr, HEADER_SIZE + part.data_bytes))
        into[:HEADER_SIZE] = np.frombuffer(part.pack(), np.uint8)
        reader.rows(header.data_offset, width, selected, into[HEADER_SIZE:])
        return destination


def _selected(
    rows: StructuredMemberSlice | Sequence[int] | None, shape: tuple[int, ...], wrong_axis: str
) -> range | Numbers:
    """Numbers of the rows that are meant, of a member of that shape."""
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
        raise IndexError(f"a row beyond the {shape[0]} there are")
    return picked
