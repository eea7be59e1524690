"""Objects of several named members: written together, read in parts. Needs numpy.

A member is an array, bytes, or a torch tensor. An object is stored as a bundle: one value for each
member, one for the metadata, and a manifest that lists them and is written last. A long member is
split into chunks. A bundle can be merged from others. Its manifest then lists their payloads, and
the keys to remove together with it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from mooncake._bundle_types import (
    FIELDS,
    BundleStore,
    Opened,
    RemoteBundleRef,
    StructuredMemberSlice,
    StructuredObjectPayload,
    StructuredObjectReadSpec,
    StructuredObjectResult,
)
from mooncake._call_reads import reader_of
from mooncake._manifests import _mapping, check_manifest, chunk_keys, dictionary_of, payloads
from mooncake._member_reads import MemberReader
from mooncake._members import Member, _bytes_view, member_of
from mooncake._store_calls import StoreCalls
from mooncake._writes import DEFAULT_CHUNK, BundleTransferPolicy, Writer

_WRAPPED = "__mooncake_wrapped_object__"
_NO_AVAILABLE_HANDLE = -200
# Objects from this size on are checked after they were written. A smaller one hardly evicts parts
# of itself. The check takes a lease of several seconds on each part, so it is not free.
_CHECKED = 4 << 20


def _segment(name: Any, what: str) -> str:
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


def _check_keys(value: Any, name: str) -> None:
    """Raises `TypeError` for a dictionary whose keys JSON would turn into text."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            if not isinstance(key, str):
                raise TypeError(f"structured metadata must be JSON-serializable: a key of {name} is not a text. key={key!r}")
            _check_keys(below, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for below in value:
            _check_keys(below, name)


class Bundles:
    """Writer and reader of bundles under one key prefix."""

    def __init__(
        self,
        store: BundleStore,
        key_prefix: str = "bundle",
        default_chunk_bytes: int = DEFAULT_CHUNK,
        buffer_pool: Any = None,
    ) -> None:
        prefix = key_prefix.strip("/")
        if not prefix or not _can_be_key(prefix):
            raise ValueError(f"invalid key_prefix: {key_prefix!r}")
        if default_chunk_bytes < 1:
            raise ValueError("default_chunk_bytes must be positive")
        self._calls = StoreCalls(store)
        self._prefix = prefix
        self._chunk_bytes = default_chunk_bytes
        self._given_pool = buffer_pool
        # Pool of the store, once it was looked for.
        self._own_pool: Any = None
        self._looked_for_pool = False

    @property
    def store(self) -> Any:
        """Store that contains the bundles."""
        return self._calls.store

    @property
    def key_prefix(self) -> str:
        """Prefix of all keys, without leading and trailing slashes."""
        return self._prefix

    @property
    def default_chunk_bytes(self) -> int:
        """Default size of a chunk in bytes."""
        return self._chunk_bytes

    def _pool(self) -> Any:
        """Returns the buffer pool for reads and writes, if there is one.

        A store of ours needs none: reads go directly into arrays.
        """
        if self._given_pool is not None or self._calls.is_native:
            return self._given_pool
        capsule = self._calls.method("_get_pyclient_capsule")
        if not self._looked_for_pool and capsule is not None and capsule() is not None:
            self._looked_for_pool = True
            from mooncake.buffer_pool import BufferPool

            try:
                self._own_pool = BufferPool(self.store)
            except (RuntimeError, TypeError):
                self._own_pool = None
        return self._own_pool

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
        metadata, buffers = payload.parts()
        if FIELDS in metadata:
            raise ValueError(f"metadata key {FIELDS!r} is reserved")
        layout = metadata.setdefault("layout", "structured")
        if not isinstance(layout, str):
            raise ValueError("the layout in the metadata must be a string")
        members, fields = {}, {}
        for name, value in buffers.items():
            members[_segment(name, "buffer name")], fields[name] = member_of(value, name)
        try:
            _check_keys(metadata, "metadata")
        except RecursionError:
            raise ValueError("structured metadata must be JSON-serializable: it is nested too deeply") from None
        metadata[FIELDS] = fields
        return self._put(_json(metadata), members, partition, chunk_bytes, policy, max_inflight_put, config)

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
        members = {_segment(name, "buffer name"): member_of(value, name, any_buffer=True)[0] for name, value in buffers.items()}
        return self._put(described, members, partition, chunk_bytes, policy, max_inflight_put, config)

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

    def _writer(self, chunk_bytes: int | None, policy: Any, max_inflight_put: int | None, config: Any) -> Writer:
        given = policy or BundleTransferPolicy()
        if max_inflight_put is not None:
            given = BundleTransferPolicy(max_inflight_put, given.put_mode, given.copy_mode)
        # A policy of another class has the same attributes.
        BundleTransferPolicy.check(given)
        chunk = self._chunk_bytes if chunk_bytes is None else chunk_bytes
        if chunk < 1:
            raise ValueError("chunk_bytes must be positive")
        self._calls.keywords(config)
        return Writer(self._calls, self._pool() if given.copy_mode == "auto" else None, given, chunk, config)

    def _put(
        self,
        meta: bytes,
        members: Mapping[str, Member],
        partition: str,
        chunk_bytes: int | None,
        policy: BundleTransferPolicy | None,
        max_inflight_put: int | None,
        config: Any,
    ) -> RemoteBundleRef:
        writer = self._writer(chunk_bytes, policy, max_inflight_put, config)
        object_id = f"{_segment(partition, 'partition')}/{uuid.uuid4().hex}"
        base = f"{self._prefix}/{object_id}"
        try:
            manifest: dict[str, Any] = {
                "version": 1,
                "layout": "bundle",
                "object_id": object_id,
                "meta": writer.plain(f"{base}/meta", meta),
                "buffers": {},
            }
            for name, member in members.items():
                manifest["buffers"][name] = writer.member(f"{base}/buffer/{name}", member)
            if sum(payload["bytes"] for payload in payloads(manifest)) >= _CHECKED:
                self._check_written(writer.written)
            return self._finish(writer, base, manifest)
        except BaseException:
            writer.discard()
            raise

    def _put_merged(
        self,
        meta: bytes,
        buffers: dict[str, Any],
        cleanup: Sequence[str],
        partition: str,
        chunk_bytes: int | None,
        config: Any,
    ) -> RemoteBundleRef:
        """Writes a bundle of existing payloads. `cleanup` lists keys to remove together with it."""
        writer = self._writer(chunk_bytes, None, None, config)
        object_id = f"{_segment(partition, 'partition')}/{uuid.uuid4().hex}"
        base = f"{self._prefix}/{object_id}"
        owners = {self._object_id(key) for key in [*cleanup, *(str(one["key"]) for one in buffers.values())]}
        try:
            manifest: dict[str, Any] = {
                "version": 1,
                "layout": "bundle",
                "object_id": object_id,
                "meta": writer.plain(f"{base}/meta", meta),
                "buffers": buffers,
                "buffer_object_ids": sorted(owners),
                "cleanup_keys": list(dict.fromkeys(cleanup)),
            }
            return self._finish(writer, base, manifest)
        except BaseException:
            writer.discard()
            raise

    def _object_id(self, key: str) -> str:
        """Returns the ID of the object that a key belongs to: its partition and its own name."""
        return "/".join(key.removeprefix(f"{self._prefix}/").split("/")[:2])

    @staticmethod
    def _finish(writer: Writer, base: str, manifest: dict[str, Any]) -> RemoteBundleRef:
        writer.value(f"{base}/manifest", json.dumps(manifest, separators=(",", ":")).encode())
        return RemoteBundleRef(f"{base}/manifest", manifest)

    def _check_written(self, keys: list[str]) -> None:
        """Raises `RuntimeError` if a part of a new object is already gone. An object larger than
        the free space evicts its own first chunks.

        The check takes a lease on each part, so that the parts stay until the manifest names them.
        Stores of other classes are not asked.
        """
        if not self._calls.is_native:
            return
        for key, exists in zip(keys, self.store.batch_is_exist(keys)):
            if exists != 1:
                raise RuntimeError(f"put failed for {key}: {exists if exists < 0 else _NO_AVAILABLE_HANDLE}")

    # Removing.

    def remove_bundle(self, ref: RemoteBundleRef | Mapping[str, Any]) -> None:
        """Removes a bundle with all its values. A missing bundle is not an error."""
        key, manifest = self._manifest_key(ref), self._given_manifest(ref)
        if manifest is None:
            manifest = self._stored_manifest(key)
        if manifest is None:
            return
        keys = [name for payload in payloads(manifest) for name in chunk_keys(payload)]
        self._calls.remove([*keys, *manifest.get("cleanup_keys", [])])
        self._calls.remove([key])

    def _stored_manifest(self, key: str) -> dict[str, Any] | None:
        """Reads a manifest that is removed next. Returns `None` if it does not exist."""
        exists = self._calls.exists(key)
        if exists is False:
            return None
        try:
            data = bytes(self.store.get(key))
            if exists is None and not data:
                return None
            return self._parsed(key, data)
        except Exception:
            # Another program may have removed it meanwhile.
            if exists is not None and self._calls.exists(key) is False:
                return None
            raise

    # Manifests.

    def _manifest_key(self, ref: RemoteBundleRef | Mapping[str, Any]) -> str:
        if not isinstance(ref, RemoteBundleRef | Mapping):
            raise TypeError(f"bundle ref must be a RemoteBundleRef or a mapping, got {type(ref).__name__}")
        key = ref.manifest_key if isinstance(ref, RemoteBundleRef) else ref.get("manifest_key")
        if key is None:
            raise ValueError("bundle ref must include manifest_key")
        if not isinstance(key, str) or not key.startswith(f"{self._prefix}/") or not key.endswith("/manifest"):
            raise ValueError(f"invalid manifest key {key!r}: manifest_key must lie below the prefix {self._prefix!r}")
        return key

    def _given_manifest(self, ref: RemoteBundleRef | Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns the manifest that a reference contains, if it does."""
        key = self._manifest_key(ref)
        given = ref.manifest if isinstance(ref, RemoteBundleRef) else ref.get("manifest")
        if not given:
            return None
        manifest = dict(_mapping(given, f"manifest at {key!r}"))
        check_manifest(manifest, key, self._prefix)
        return manifest

    def _parsed(self, key: str, data: bytes) -> dict[str, Any]:
        manifest = dictionary_of(data, f"manifest at {key!r}")
        check_manifest(manifest, key, self._prefix)
        return manifest

    def _manifest(self, ref: RemoteBundleRef | Mapping[str, Any]) -> dict[str, Any]:
        given = self._given_manifest(ref)
        if given is not None:
            return given
        key = self._manifest_key(ref)
        return self._parsed(key, bytes(self.store.get(key)))

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
        data = reader_of(self._calls, manifest["meta"]).whole()
        return Opened(manifest, dictionary_of(data, "metadata of a structured object"))

    def _read(self, spec: StructuredObjectReadSpec, destinations: dict[str, Any]) -> StructuredObjectResult:
        if spec.member_names is not None and not spec.member_names:
            raise ValueError("cannot read structured object: the specification selected no members")
        for name, some in spec.member_slices:
            if some.step < 1:
                raise ValueError(f"{name}: slice step must be positive: {some.step}")
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
        self,
        opened: Opened,
        name: str,
        rows: StructuredMemberSlice | Sequence[int] | None,
        destination: Any,
        may_be_pooled: bool = True,
    ) -> Any:
        """Reads a member, or those rows of it that a slice or numbers select."""
        payload, described = opened.member(name)
        pool = self._pool if may_be_pooled else lambda: None
        return MemberReader(self._calls, pool, name, payload, described).read(rows, destination)
