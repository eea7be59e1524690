"""Objects of several named members: written together, read in parts. Needs numpy.

A member is an array, bytes, or a torch tensor. An object is a bundle: values for its members and for what describes them, and a
manifest, written last, that lists them all. Where a member is long, it lies in chunks. A bundle may be merged from others: its
manifest then lists payloads of theirs, and what of them is to be removed with it.
"""

from __future__ import annotations

import copy
import ctypes
import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from mooncake import _mooncake
from mooncake._layout import HEADER_SIZE, Header
from mooncake._mooncake import ReplicateConfig
from mooncake._shards import _empty, _is_tensor, _Job, _Read
from mooncake._tensors import _deserialize_tensor, _serialize_tensor

_FIELDS = "__mooncake_structured_fields__"
_WRAPPED = "__mooncake_wrapped_object__"
_OBJECT_NOT_FOUND = -704
_DEFAULT_CHUNK = 64 << 20


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
class TensorObjectBuffer:
    """A tensor as it is stored, header and all, in registered memory: a member to write, or where one is read to."""

    ptr: int
    size: int
    owner: Any = None
    batch_size: int | None = None

    def __len__(self) -> int:
        if self.batch_size is None:
            raise TypeError("tensor object buffer requires batch_size for DataProto use")
        return self.batch_size


@dataclass(frozen=True)
class RawDestination:
    """Memory by address that a member is read into. It must hold it, and stay."""

    ptr: int
    size: int
    owner: Any = None
    pre_registered: bool = False


def tensor_object_buffer(ptr: int, size: int, owner: Any = None, batch_size: int | None = None) -> TensorObjectBuffer:
    """A stored form of a tensor in memory that the store has registered."""
    return TensorObjectBuffer(int(ptr), int(size), owner, batch_size)


def raw_destination(ptr: int, size: int, owner: Any = None, *, pre_registered: bool = False) -> RawDestination:
    """`size` bytes of memory to read into."""
    return RawDestination(int(ptr), int(size), owner, pre_registered)


@dataclass(frozen=True)
class Opened:
    """A bundle whose manifest and metadata were read."""

    manifest: dict[str, Any]
    metadata: dict[str, Any]

    @property
    def fields(self) -> dict[str, Any]:
        """What is said of each member."""
        fields = self.metadata.get(_FIELDS, {})
        if not isinstance(fields, dict):
            raise ValueError("what is said of the members must be a dictionary")
        return fields


@dataclass
class StructuredObjectResult:
    """What was read."""

    metadata: dict[str, Any]
    objects: dict[str, Any]


def _bytes_view(value: Any, name: str) -> memoryview:
    try:
        view = memoryview(value)
    except TypeError:
        raise TypeError(f"{name} must be bytes-like, got {type(value).__name__}") from None
    if not view.c_contiguous:
        view = memoryview(view.tobytes())
    return view.cast("B") if view.nbytes else memoryview(b"")


def _segment(name: str, what: str) -> str:
    """A name that can be one part of a key."""
    if not isinstance(name, str) or not name or "/" in name or any(ord(char) < 32 for char in name):
        raise ValueError(f"{what} must be one non-empty path segment: {name!r}")
    return name


@dataclass(frozen=True)
class _Body:
    """Bytes of one member in order, and what the manifest says of them."""

    parts: list[memoryview]
    size: int
    extra: dict[str, Any]
    owner: Any = None


def _body(value: Any, name: str) -> tuple[_Body, dict[str, Any] | None]:
    """A member's bytes, and what describes it among the fields."""
    if isinstance(value, TensorObjectBuffer):
        view = memoryview(_at(value.ptr, value.size)) if value.size else memoryview(b"")
        return _Body([view], value.size, {"metadata_bytes": HEADER_SIZE}, value), {"encoding": "torch_tensor"}
    if _is_tensor(value) and getattr(value, "is_nested", False):
        return _nested_body(value, name)
    if _is_tensor(value):
        header, address, size, owner = _serialize_tensor(value)
        data = memoryview(_at(address, size)) if size else memoryview(b"")
        torch = {
            "encoding": "torch_tensor",
            "dtype": str(owner.dtype),
            "shape": list(owner.shape),
            "element_size": owner.element_size(),
        }
        return _Body([memoryview(header), data], len(header) + size, {"metadata_bytes": len(header)}, owner), torch
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError(f"{name}: arrays of objects have no bytes to store")
        array = np.ascontiguousarray(value)
        view = memoryview(array.reshape(-1).view(np.uint8).data) if array.nbytes else memoryview(b"")
        shape = {"encoding": "ndarray", "dtype": array.dtype.str, "shape": list(array.shape)}
        return _Body([view], array.nbytes, {}, array), shape
    view = _bytes_view(value, name)
    return _Body([view], view.nbytes, {}), {"encoding": "bytes"}


def _nested_body(value: Any, name: str) -> tuple[_Body, dict[str, Any]]:
    """A tensor of rows of different lengths: its values, where rows begin, and how long they are, each as a tensor of its own."""
    import torch

    if value.layout != torch.jagged:
        raise ValueError(f"{name}: nested tensors must have the jagged layout")
    tensors = [value.values(), value.offsets()]
    if value.lengths() is not None:
        tensors.append(value.lengths())
    views: list[memoryview] = []
    owners, sizes = [], []
    for tensor in tensors:
        header, address, size, owner = _serialize_tensor(tensor)
        views += [memoryview(header), *([memoryview(_at(address, size))] if size else [])]
        owners.append(owner)
        sizes.append(len(header) + size)
    described = {
        "encoding": "torch_tensor",
        "dtype": str(value.dtype),
        "nested": True,
        "format": "tensor_parts",
        "part_bytes": sizes,
        "has_lengths": len(tensors) == 3,
        "ragged_idx": int(getattr(value, "_ragged_idx", 1)),
    }
    return _Body(views, sum(sizes), {}, owners), described


def _nested_of(data: bytes, described: Mapping[str, Any]) -> Any:
    import torch

    if described.get("format") == "torch_save":
        stored = _loaded(data)
        parts = [stored.values(), stored.offsets(), stored.lengths()]
        ragged = int(getattr(stored, "_ragged_idx", 1))
    else:
        sizes = [int(size) for size in described.get("part_bytes", [])]
        if len(sizes) != (3 if described.get("has_lengths") else 2) or sum(sizes) != len(data) or min(sizes) <= 0:
            raise ValueError("the parts of a nested tensor do not make up its bytes")
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        parts = [_deserialize_tensor(data[start : start + size]) for start, size in zip(starts, sizes)]
        parts += [None] * (3 - len(parts))
        ragged = int(described.get("ragged_idx", 1))
    values, offsets, lengths = parts
    counts = lengths if lengths is not None else offsets.diff()
    least, most = (int(counts.min()), int(counts.max())) if counts.numel() else (0, 0)
    return torch.nested.nested_tensor_from_jagged(
        values, offsets=offsets, lengths=lengths, jagged_dim=ragged, min_seqlen=least, max_seqlen=most
    )


def _nested_rows(value: Any, rows: Sequence[int]) -> Any:
    """Some rows of a nested tensor."""
    import torch

    every = value.unbind()
    if not rows:
        offsets = torch.zeros(1, dtype=value.offsets().dtype)
        return torch.nested.nested_tensor_from_jagged(value.values()[:0], offsets=offsets)
    return torch.nested.as_nested_tensor([every[row] for row in rows], layout=value.layout)


def _loaded(data: bytes) -> Any:
    """What torch saved; only tensors, no code."""
    import io

    import torch

    return torch.load(io.BytesIO(data), weights_only=True)


def _at(address: int, size: int) -> Any:
    return (ctypes.c_ubyte * size).from_address(address)


def _key(payload: Mapping[str, Any]) -> str:
    return str(payload["key"])


def _cut(body: _Body, start: int, end: int) -> list[memoryview]:
    """Bytes `start` to `end` of a body."""
    parts, at = [], 0
    for part in body.parts:
        first, last = max(start - at, 0), min(end - at, part.nbytes)
        if first < last:
            parts.append(part[first:last])
        at += part.nbytes
    return parts


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
        if not prefix or any(ord(char) < 32 for char in prefix):
            raise ValueError(f"key_prefix {key_prefix!r}")
        if default_chunk_bytes < 1:
            raise ValueError("default_chunk_bytes must be positive")
        self._store: Any = store
        self._prefix = prefix
        self._chunk_bytes = default_chunk_bytes
        # Reads go straight into the arrays they are for.
        del buffer_pool

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
        described = json.dumps(metadata, separators=(",", ":")).encode()
        return self._put(described, bodies, partition, chunk_bytes, policy, max_inflight_put, config)

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
        bodies = {_segment(name, "a member's name"): _body(value, name)[0] for name, value in buffers.items()}
        return self._put(bytes(meta), bodies, partition, chunk_bytes, policy, max_inflight_put, config)

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
            raise ValueError("copy_mode zero_copy needs members in registered memory (tensor_object_buffer)")
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
        keys = [chunk["key"] for one in self._payloads(manifest) for chunk in one["chunks"]]
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
        key = ref.manifest_key if isinstance(ref, RemoteBundleRef) else ref["manifest_key"]
        if not isinstance(key, str) or not key.startswith(f"{self._prefix}/") or not key.endswith("/manifest"):
            raise ValueError(f"{key!r} is no manifest under {self._prefix!r}")
        return key

    def _manifest(self, ref: RemoteBundleRef | Mapping[str, Any]) -> dict[str, Any]:
        key = self._manifest_key(ref)
        given = ref.manifest if isinstance(ref, RemoteBundleRef) else ref.get("manifest")
        manifest: Any = dict(given) if given else json.loads(bytes(self._store.get(key)))
        base = key.removesuffix("/manifest")
        if not isinstance(manifest, dict) or manifest.get("layout") != "bundle":
            raise ValueError(f"there is no manifest of a bundle at {key!r}")
        if f"{self._prefix}/{manifest.get('object_id')}" != base:
            raise ValueError(f"the manifest at {key!r} is that of another object")
        others = manifest.get("buffer_object_ids", [])
        places = (f"{base}/", *(f"{self._prefix}/{other}/" for other in others))
        for one in self._payloads(manifest):
            sizes = 0
            for chunk in one["chunks"]:
                if not str(chunk["key"]).startswith(places):
                    raise ValueError(f"bundle payload {chunk['key']!r} is outside the bundle namespace")
                sizes += int(chunk["bytes"])
            if sizes != one["bytes"]:
                raise ValueError(f"the chunks of {one['key']!r} have {sizes} bytes in all, not {one['bytes']}")
        outside = [key for key in manifest.get("cleanup_keys", []) if not str(key).startswith(places)]
        if outside:
            raise ValueError(f"bundle manifest cleanup_keys {outside} are outside the bundle namespace")
        return manifest

    @staticmethod
    def _payloads(manifest: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
        yield manifest["meta"]
        yield from manifest["buffers"].values()

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
        metadata = json.loads(self._read_bytes(manifest["meta"]))
        if not isinstance(metadata, dict):
            raise ValueError("the metadata of a structured object must be a dictionary")
        return Opened(manifest, metadata)

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
        payload, described = opened.manifest["buffers"][name], opened.fields.get(name, {"encoding": "bytes"})
        encoding = described.get("encoding")
        if encoding == "ndarray":
            return self._read_array(name, payload, described, rows, destination)
        if encoding == "torch_tensor":
            return self._read_tensor(name, payload, described, rows, destination)
        if destination is not None:
            raise ValueError(f"{name}: only arrays and tensors are read into memory of the caller's")
        if rows is not None:
            raise ValueError(f"{name}: a member of bytes is read as a whole")
        return self._read_bytes(payload)

    def _read_array(
        self,
        name: str,
        payload: Mapping[str, Any],
        described: Mapping[str, Any],
        rows: StructuredMemberSlice | Sequence[int] | None,
        destination: Any,
    ) -> Any:
        dtype, shape = np.dtype(described["dtype"]), tuple(described["shape"])
        selected = _selected(rows, shape, "structured ndarray slicing currently supports axis=0 only")
        wanted = (len(selected), *shape[1:])
        into = destination
        if isinstance(destination, RawDestination | TensorObjectBuffer):
            size = int(np.prod(wanted, dtype=np.int64)) * dtype.itemsize
            if destination.size < size:
                raise ValueError(f"{name}: the destination has {destination.size} bytes, {size} are read")
            into = np.ctypeslib.as_array(_at(destination.ptr, size)).view(dtype).reshape(wanted)
        elif destination is not None:
            _check_destination(name, destination, dtype, wanted)
        else:
            into = np.empty(wanted, dtype)
        width = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
        if payload["bytes"] != shape[0] * width:
            raise ValueError(f"{name}: {payload['bytes']} bytes are not an array of {shape}")
        self._read_spans(payload, _spans(selected, 0, width), into)
        # What is lent by address is the caller's to look at, as an array.
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
        axis = "structured tensor slicing currently supports axis=0 only"
        if described.get("nested") or payload.get("format") == "torch_save":
            if destination is not None:
                raise ValueError(f"{name}: such a tensor is not read into memory of the caller's")
            data = self._read_bytes(payload)
            if described.get("nested"):
                whole = _nested_of(data, described)
                return whole if rows is None else _nested_rows(whole, list(_selected(rows, (len(whole),), axis)))
            whole = _loaded(data)
            return whole if rows is None else whole[list(_selected(rows, tuple(whole.shape), axis))]
        head = np.empty(min(HEADER_SIZE, payload["bytes"]), np.uint8)
        self._read_spans(payload, [(0, 0, head.nbytes)], head)
        header = Header.parse(head.tobytes(), payload["bytes"])
        if header is None or (rows is not None and not header.local_shape):
            raise ValueError(f"{name}: not a tensor" if header is None else f"{name}: a tensor without rows")
        if rows is None:
            shape, spans = header.local_shape, [(header.data_offset, 0, header.data_bytes)]
        else:
            if isinstance(rows, StructuredMemberSlice) and rows.step != 1:
                raise ValueError("structured tensor slicing currently requires step=1")
            selected = _selected(rows, header.local_shape, axis)
            shape = (len(selected), *header.local_shape[1:])
            width = header.data_bytes // header.local_shape[0] if header.local_shape[0] else 0
            spans = _spans(selected, header.data_offset, width)
        part = Header(header.dtype, shape, shape)
        if destination is None:
            made = _empty(part)
            self._read_spans(payload, spans, np.ctypeslib.as_array(_at(made.data_ptr(), part.data_bytes)))
            return made
        if destination.size < HEADER_SIZE + part.data_bytes:
            raise ValueError(f"{name}: the destination has {destination.size} bytes, {HEADER_SIZE + part.data_bytes} are read")
        into = np.ctypeslib.as_array(_at(destination.ptr, HEADER_SIZE + part.data_bytes))
        into[:HEADER_SIZE] = np.frombuffer(part.pack(), np.uint8)
        self._read_spans(payload, spans, into[HEADER_SIZE:])
        return destination

    def _read_bytes(self, payload: Mapping[str, Any]) -> bytes:
        chunks = payload["chunks"]
        if len(chunks) == 1:
            data = bytes(self._store.get(chunks[0]["key"]))
        elif hasattr(self._store, "get_batch") and chunks:
            data = b"".join(bytes(one) for one in self._store.get_batch([chunk["key"] for chunk in chunks]))
        else:
            data = b"".join(bytes(self._store.get(chunk["key"])) for chunk in chunks)
        if len(data) != payload["bytes"]:
            raise RuntimeError(f"get failed for {payload['key']}: {len(data)} of {payload['bytes']} bytes")
        return data

    def _read_spans(self, payload: Mapping[str, Any], spans: list[tuple[int, int, int]], into: Any) -> None:
        """Reads runs of a payload's bytes (from, to, how many) into memory, across chunks, and only those chunks."""
        spans = [span for span in spans if span[2]]
        if not spans:
            return
        if max(start + length for start, _, length in spans) > payload["bytes"]:
            raise ValueError(f"{payload['key']}: a part does not lie inside it")
        pieces: list[tuple[str, int, int, int]] = []
        ends, total = [], 0
        for chunk in payload["chunks"]:
            ends.append((chunk["key"], total, total + chunk["bytes"]))
            total += chunk["bytes"]
        for start, to, length in spans:
            for key, first, last in ends:
                begin, end = max(start, first), min(start + length, last)
                if begin < end:
                    pieces.append((key, begin - first, to + begin - start, end - begin))
        keys = sorted({piece[0] for piece in pieces})
        if not isinstance(self._store, _mooncake.Store):
            # Whole values are all that it gives.
            values = {key: np.frombuffer(bytes(self._store.get(key)), np.uint8) for key in keys}
            view = into.reshape(-1).view(np.uint8)
            for key, start, to, length in pieces:
                part = values[key][start : start + length]
                if part.nbytes != length:
                    raise RuntimeError(f"get failed for {key}")
                view[to : to + length] = part
            return
        found = dict(zip(keys, self._store._heads(keys, 1)))
        missing = [key for key in keys if found[key] is None]
        if missing:
            raise RuntimeError(f"get failed for {missing[0]}")
        reads = [
            _Read(found[key][0], start, length, to, length, 1, length)  # type: ignore[index]
            for key, start, to, length in pieces
        ]
        code = self._store._read_strips([_Job((into.ctypes.data, into.nbytes), reads)], [into])[0]
        if code != 0:
            raise RuntimeError(f"get failed for {payload['key']}: {code}")


def _selected(
    rows: StructuredMemberSlice | Sequence[int] | None, shape: tuple[int, ...], wrong_axis: str
) -> Sequence[int]:
    """Numbers of the rows that are meant, of a member of that shape."""
    if rows is None:
        return range(shape[0])
    if isinstance(rows, StructuredMemberSlice):
        if rows.axis != 0:
            raise ValueError(wrong_axis)
        return range(shape[0])[rows.start : rows.end : rows.step]
    if any(not 0 <= row < shape[0] for row in rows):
        raise IndexError(f"a row beyond the {shape[0]} there are")
    return rows


def _spans(rows: Sequence[int], start: int, width: int) -> list[tuple[int, int, int]]:
    """Where rows of `width` bytes lie and where they go, those that follow each other in one run."""
    if not width or not rows:
        return []
    if isinstance(rows, range) and rows.step == 1:
        return [(start + rows.start * width, 0, len(rows) * width)]
    runs: list[tuple[int, int, int]] = []
    for at, row in enumerate(rows):
        if runs and runs[-1][0] + runs[-1][2] == start + row * width:
            first, to, length = runs[-1]
            runs[-1] = (first, to, length + width)
        else:
            runs.append((start + row * width, at * width, width))
    return runs


def _check_destination(name: str, destination: Any, dtype: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(destination, np.ndarray):
        raise TypeError(f"{name}: the destination must be an ndarray, not {type(destination).__name__}")
    if destination.dtype != dtype or destination.shape != shape:
        raise ValueError(f"{name}: {dtype} {shape} does not fit into {destination.dtype} {destination.shape}")
    if not destination.flags.c_contiguous or not destination.flags.writeable:
        raise ValueError(f"{name}: the destination must be C-contiguous and writable")

