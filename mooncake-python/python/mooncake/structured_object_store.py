"""Objects of several named members, and batches of samples: written together, read in parts.

Needs numpy, and msgpack for values that have no other encoding.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

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
from mooncake._bundles import Bundles, _json
from mooncake._call_reads import reader_of
from mooncake._columns import Column, FieldSchema, Ragged
from mooncake._dataproto import (
    _VERSION,
    HANDLE,
    STORAGE_GROUP_ID,
    DataProtoRefLike,
    Envelope,
    MooncakeDataProtoRef,
    StructuredFieldLocation,
    built,
    check_sections,
    column,
    envelope_of,
    envelope_of_dict,
    export_dataproto_ref,
    fields_of,
    flat,
    import_dataproto_ref,
    is_dataproto_ref_handle,
    resolve,
    rows_of,
    section_of,
)
from mooncake._decisions import MISSING, choose
from mooncake._groups import group_of, in_group
from mooncake._manifests import array_kind, chunk_keys
from mooncake._members import RawDestination, TensorObjectBuffer, raw_destination, tensor_object_buffer
from mooncake._pool_results import owned, release
from mooncake._row_types import restored
from mooncake._shards import _is_tensor
from mooncake._store_calls import OBJECT_NOT_FOUND
from mooncake._trees import codec_of, encode, escape_key, infer_structure, type_of_error
from mooncake._writes import AUTO_PARALLEL_MIN_BYTES, AUTO_PARALLEL_MIN_CHUNKS, DEFAULT_CHUNK, BundleTransferPolicy

# Constants of Mooncake C++, for programs that use them.
DATAPROTO_REF_HANDLE_TYPE = HANDLE
DATAPROTO_REF_HANDLE_VERSION = _VERSION
DEFAULT_BUNDLE_CHUNK_BYTES = DEFAULT_CHUNK
MISSING_OBJECT_ERROR = OBJECT_NOT_FOUND
STRUCTURED_FIELD_SPECS_KEY = FIELDS

export_ref = export_dataproto_ref
import_ref = import_dataproto_ref

# Names that tests of Mooncake C++ import.
_choose_leaf_codec = choose
_escape_key = escape_key

Rows = slice | StructuredMemberSlice | Sequence[int]


class _Payloads:
    """Payloads of a column that is read in parts."""

    def __init__(
        self, bundles: MooncakeBundleTransfer, opened: Opened, members: Mapping[str, str], pooled: str | None = None
    ) -> None:
        self._bundles, self._opened, self._members = bundles, opened, members
        # Payload that may lie in the buffer pool, because rows are views of it.
        self._pooled = pooled

    def whole(self, name: str) -> Any:
        return self._bundles._read_member(self._opened, self._member(name), None, None, name == self._pooled)

    def runs(self, name: str, runs: Any) -> Any:
        payload, described = self._opened.member(self._member(name))
        dtype = np.dtype(np.uint8)
        if described.get("encoding") == "ndarray":
            dtype, _ = array_kind(name, described, payload["bytes"])
        wanted = np.asarray(runs, np.int64).reshape(-1, 2)
        begins, lengths = wanted[:, 0], wanted[:, 1] - wanted[:, 0]
        width = dtype.itemsize
        if not width or (len(wanted) and (lengths.min() < 0 or begins.min() < 0 or wanted.max() > payload["bytes"] // width)):
            raise ValueError(f"{name}: row exceeds the payload")
        reader, size = reader_of(self._bundles._calls, payload), int(lengths.sum())
        reader.expect(size * width)
        into = np.empty(size, dtype)
        reader.runs(begins * width, lengths * width, into)
        return into

    def _member(self, name: str) -> str:
        if name not in self._members:
            raise ValueError(f"column has no payload {name!r}")
        return self._members[name]

    def under(self, names: Mapping[str, str]) -> _Payloads:
        return _Payloads(self._bundles, self._opened, {name: self._member(of) for name, of in names.items()})


class MooncakeBundleTransfer(Bundles):
    """Writer and reader of objects of several members, and of batches of samples, under one key
    prefix.
    """

    @staticmethod
    def release_result(result: Any) -> None:
        """Returns the memory of a result to the buffer pool that it came from, if any.

        The result must not be used afterwards. Another call does nothing.
        """
        release(result)

    # Batches: writing.

    def put(
        self,
        data: Any,
        *,
        type: Literal["dataproto", "dict"] = "dataproto",
        namespace: str = "default",
        partition: str = "default",
        stage: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        config: Any = None,
        field_schemas: Mapping[str, FieldSchema] | None = None,
    ) -> MooncakeDataProtoRef:
        """Stores a batch: an object with `batch`, `non_tensor_batch` and `meta_info`, or a flat
        dictionary.
        """
        if type not in ("dataproto", "dict"):
            raise ValueError(f"unsupported Mooncake payload type: {type!r}")
        schemas = field_schemas or {}
        envelope = envelope_of(data) if type == "dataproto" else envelope_of_dict(data, schemas)
        empty = MooncakeDataProtoRef(envelope.rows(), {}, {}, {}, namespace, partition)
        empty._storage_group_id = group_of(config)
        return self._put_stage(empty, envelope, stage, False, schemas, (chunk_bytes, policy, config))

    def put_dataproto(
        self,
        data: Any,
        *,
        namespace: str = "default",
        partition: str = "default",
        stage: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        field_schemas: Mapping[str, FieldSchema] | None = None,
        config: Any = None,
    ) -> MooncakeDataProtoRef:
        """Stores an object with the three sections, like `put`."""
        return self.put(
            data,
            namespace=namespace,
            partition=partition,
            stage=stage,
            chunk_bytes=chunk_bytes,
            policy=policy,
            config=config,
            field_schemas=field_schemas,
        )

    def append_dataproto_fields(
        self,
        ref: DataProtoRefLike,
        data: Any,
        *,
        stage: str,
        overwrite: bool = False,
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        field_schemas: Mapping[str, FieldSchema] | None = None,
        config: Any = None,
    ) -> MooncakeDataProtoRef:
        """Adds fields to a stored batch and returns a new reference that includes them.

        The previous reference stays valid, unless `overwrite` replaces its stage.
        """
        ref, envelope = resolve(ref), envelope_of(data)
        rows = envelope.rows()
        if rows != ref.batch_size and (envelope.batch or envelope.non_tensor_batch):
            raise ValueError(
                f"cannot append fields: their batch size {rows} does not match ref batch size {ref.batch_size}."
                f" fields={[*envelope.batch, *envelope.non_tensor_batch]}; append as many rows as the batch has"
            )
        return self._put_stage(ref, envelope, stage, overwrite, field_schemas or {}, (chunk_bytes, policy, config))

    def _put_stage(
        self,
        ref: MooncakeDataProtoRef,
        envelope: Envelope,
        stage: str,
        overwrite: bool,
        schemas: Mapping[str, FieldSchema],
        how: tuple[int | None, BundleTransferPolicy | None, Any],
    ) -> MooncakeDataProtoRef:
        check_sections(envelope, schemas)
        members, fields, encoded = self._members_of(envelope, stage, schemas)
        made = copy.copy(ref)
        made.meta_info = {**ref.meta_info, **envelope.meta_info}
        if not members:
            return made
        twice = sorted(set(ref.field_index) & set(fields))
        if twice and not overwrite:
            raise ValueError(f"DataProto fields already exist: {twice}")
        lost = sorted(name for name, at in ref.field_index.items() if at.stage == stage and name not in fields)
        if overwrite and lost:
            raise ValueError(f"DataProto overwrite for stage {stage!r} must include existing fields: {lost}")
        described = {
            "version": 1,
            "namespace": ref.namespace,
            "partition": ref.partition,
            "stage": stage,
            "batch_size": ref.batch_size,
        }
        payload = StructuredObjectPayload({"layout": "dataproto_stage", "dataproto": described}, members)
        chunk_bytes, policy, config = how
        config = in_group(config, ref._storage_group_id)
        written = self.put_structured_object(payload, ref.partition, chunk_bytes, policy, None, config)
        before = ref.stage_refs.get(stage)
        if before is not None and overwrite:
            self.remove_bundle(before)
        elif before is not None:
            written = self._merged(before, written, ref.partition, chunk_bytes, config)
        made.stage_refs = {**ref.stage_refs, stage: written}
        made.field_index = {**ref.field_index, **fields}
        kept = {name: one for name, one in ref.encoded_non_tensor.items() if name not in fields}
        made.encoded_non_tensor = {**kept, **encoded}
        return made

    @staticmethod
    def _members_of(
        envelope: Envelope, stage: str, schemas: Mapping[str, FieldSchema]
    ) -> tuple[dict[str, Any], dict[str, StructuredFieldLocation], dict[str, Any]]:
        """Returns the members to write, the locations of fields in them, and the encodings of
        encoded fields.
        """
        members = {f"batch.{name}": value for name, value in envelope.batch.items()}
        fields = {name: StructuredFieldLocation(stage, f"batch.{name}", "batch") for name in envelope.batch}
        encoded: dict[str, Any] = {}
        for name, value in envelope.non_tensor_batch.items():
            member = f"non_tensor_batch.{name}"
            fields[name] = StructuredFieldLocation(stage, member, "non_tensor_batch")
            schema = schemas.get(name)
            if schema is not None and section_of(name, schema) not in (None, "non_tensor_batch"):
                schema = None
            if schema is None and (_is_tensor(value) or (isinstance(value, np.ndarray) and value.dtype != object)):
                members[member] = value
                continue
            made = _encoded(name, member, column(name, value), schema)
            parts = {part: f"{member}.{part}" for part in made.payload}
            members |= {parts[part]: one for part, one in made.payload.items()}
            encoded[name] = {
                "codec": made.codec,
                "rows": made.rows,
                "metadata": made.metadata,
                "payload_members": parts,
            }
        return members, fields, encoded

    def _merged(
        self,
        before: RemoteBundleRef,
        added: RemoteBundleRef,
        partition: str,
        chunk_bytes: int | None,
        config: Any,
    ) -> RemoteBundleRef:
        """Merges the members of two bundles into one. The values stay in place, and `added` loses
        its manifest.
        """
        try:
            old, new = self._open(before), self._open(added)
            twice = sorted(set(old.manifest["buffers"]) & set(new.manifest["buffers"]))
            if twice:
                raise ValueError(f"structured members already exist: {twice}")
            if old.metadata.get("dataproto") != new.metadata.get("dataproto"):
                raise ValueError("cannot merge structured objects: they belong to different batches")
            metadata = {**old.metadata, FIELDS: {**old.fields, **new.fields}}
            obsolete = [added.manifest_key, *chunk_keys(new.manifest["meta"])]
            cleanup = [
                *old.manifest.get("cleanup_keys", []),
                before.manifest_key,
                *chunk_keys(old.manifest["meta"]),
                *obsolete,
            ]
            buffers = {**old.manifest["buffers"], **new.manifest["buffers"]}
            merged = self._put_merged(_json(metadata), buffers, cleanup, partition, chunk_bytes, config)
        except BaseException:
            with contextlib.suppress(Exception):
                self.remove_bundle(added)
            raise
        self._calls.discard(obsolete)
        return merged

    # Batches: reading.

    def get(
        self,
        ref: DataProtoRefLike,
        *,
        type: Literal["dataproto", "dict"] = "dataproto",
        fields: Sequence[str] | None = None,
        batch_fields: Sequence[str] | None = None,
        non_tensor_fields: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        data_cls: Any = None,
        destinations: Mapping[str, Any] | None = None,
        rows: Rows | None = None,
    ) -> Any:
        """Reads a batch, or some fields and rows of it. Only the bytes of those rows are read."""
        if type not in ("dataproto", "dict"):
            raise ValueError(f"unsupported Mooncake payload type: {type!r}")
        ref = resolve(ref)
        picked = rows_of(rows, ref.batch_size)
        opened: dict[str, Opened] = {}
        made = Envelope()
        for name in fields_of(ref, fields, batch_fields, non_tensor_fields):
            at = ref.field_index[name]
            if at.stage not in opened:
                opened[at.stage] = self._open(ref.stage_refs[at.stage])
            encoded = ref.encoded_non_tensor.get(name) if at.section == "non_tensor_batch" else None
            if encoded is None:
                destination = (destinations or {}).get(name)
                value = self._read_member(opened[at.stage], at.member, picked, destination)
            else:
                value = self._read_column(opened[at.stage], encoded, picked, ref.batch_size, type == "dict")
            getattr(made, at.section)[name] = value
        wanted = ref.meta_info if meta_info_keys is None else meta_info_keys
        made.meta_info = {key: ref.meta_info[key] for key in wanted if key in ref.meta_info}
        return flat(made) if type == "dict" else built(made, data_cls)

    def get_dataproto(
        self,
        ref: DataProtoRefLike,
        *,
        fields: Sequence[str] | None = None,
        batch_fields: Sequence[str] | None = None,
        non_tensor_fields: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        data_cls: Any = None,
        destinations: Mapping[str, Any] | None = None,
        rows: Rows | None = None,
    ) -> Any:
        """Reads a batch like `get`, as sections or as an object of `data_cls`."""
        return self.get(
            ref,
            fields=fields,
            batch_fields=batch_fields,
            non_tensor_fields=non_tensor_fields,
            meta_info_keys=meta_info_keys,
            data_cls=data_cls,
            destinations=destinations,
            rows=rows,
        )

    def _read_column(
        self, opened: Opened, encoded: Mapping[str, Any], picked: Sequence[int] | None, total: int, as_list: bool
    ) -> Any:
        try:
            values = self._decoded(opened, encoded, picked, total)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(f"invalid encoded column: {type(error).__name__}: {error}") from error
        if as_list:
            return values
        return owned(np.fromiter(values, object, len(values)), values)

    def _decoded(
        self, opened: Opened, encoded: Mapping[str, Any], picked: Sequence[int] | None, total: int
    ) -> list[Any]:
        codec = codec_of(str(encoded["codec"]))
        source = _Payloads(self, opened, encoded["payload_members"], "data" if isinstance(codec, Ragged) else None)
        metadata = encoded.get("metadata") or {}
        if picked is None:
            payload = {name: source.whole(name) for name in encoded["payload_members"]}
            values = codec.decode(payload, total, metadata)
        else:
            payload, of_part = codec.part(source, picked, metadata)
            values = codec.decode(payload, len(picked), of_part)
        made: list[Any] = owned(restored(values, metadata, picked), values)
        return made

    def dataproto_manifest_view(self, ref: DataProtoRefLike) -> dict[str, Any]:
        """Returns the description of a stored batch, field by field, without reading it."""
        ref = resolve(ref)
        opened = {stage: self._open(one) for stage, one in ref.stage_refs.items()}
        fields: dict[str, dict[str, Any]] = {}
        for name, at in ref.field_index.items():
            described, encoded = opened[at.stage].fields, ref.encoded_non_tensor.get(name)
            spec = dict(described.get(at.member, {"encoding": "bytes"}))
            if encoded is not None:
                parts = dict(encoded["payload_members"])
                spec = {
                    "encoding": "structured_non_tensor",
                    "codec": encoded["codec"],
                    "metadata": encoded.get("metadata"),
                    "payload_members": parts,
                    "payload_specs": {part: dict(described.get(of, {"encoding": "bytes"})) for part, of in parts.items()},
                }
            fields[name] = {"section": at.section, "stage": at.stage, "member": at.member, "spec": spec}
        return {
            "namespace": ref.namespace,
            "partition": ref.partition,
            "batch_size": ref.batch_size,
            "batch_fields": {name: one for name, one in fields.items() if one["section"] == "batch"},
            "non_tensor_fields": {name: one for name, one in fields.items() if one["section"] != "batch"},
            "meta_info_keys": list(ref.meta_info),
            "stages": {
                stage: {"manifest_key": one.manifest_key, "dataproto": opened[stage].metadata.get("dataproto", {})}
                for stage, one in ref.stage_refs.items()
            },
        }

    # Batches: removing.

    def cleanup_dataproto(self, ref: DataProtoRefLike) -> None:
        """Removes a batch with all its stages."""
        for one in {stage.manifest_key: stage for stage in resolve(ref).stage_refs.values()}.values():
            self.remove_bundle(one)

    def cleanup_dataproto_append(self, previous: DataProtoRefLike, appended: DataProtoRefLike) -> None:
        """Removes the values that an append added. No other program may have its reference. The
        previous reference stays valid.
        """
        previous, appended = resolve(previous), resolve(appended)
        for stage, added in appended.stage_refs.items():
            before = previous.stage_refs.get(stage)
            if before is None:
                self.remove_bundle(added)
                continue
            if added.manifest_key != before.manifest_key:
                self._remove_addition(before, added)

    def _remove_addition(self, before: RemoteBundleRef, added: RemoteBundleRef) -> None:
        """Removes a merged bundle without the payloads that it has in common with an earlier one.
        """
        key = added.manifest_key
        if self._calls.exists(key) is False:
            return
        data = bytes(self.store.get(key))
        if not data:
            return
        manifest = self._parsed(key, data)
        kept = self._manifest(before)["buffers"]
        new = {name: payload for name, payload in manifest["buffers"].items() if name not in kept}
        owners = {self._object_id(payload["key"]) for payload in new.values()}
        keys = [*chunk_keys(manifest["meta"]), *(one for payload in new.values() for one in chunk_keys(payload))]
        keys += [one for one in manifest.get("cleanup_keys", []) if self._object_id(one) in owners]
        self._calls.remove(keys)
        self._calls.remove([key])


def _encoded(name: str, member: str, values: Any, schema: FieldSchema | None) -> Column:
    try:
        return encode(member, list(values), schema)
    except ImportError:
        raise
    except Exception as error:
        what = f"unsupported structured non-tensor field {name!r}"
        if schema is not None:
            what = f"failed to encode non_tensor_batch field {name!r} with FieldSchema codec {schema.codec!r}"
        raise type_of_error(error)(f"cannot put batch: {what}: {error}; select another codec with a FieldSchema") from error


__all__ = [
    "AUTO_PARALLEL_MIN_BYTES",
    "AUTO_PARALLEL_MIN_CHUNKS",
    "DATAPROTO_REF_HANDLE_TYPE",
    "DATAPROTO_REF_HANDLE_VERSION",
    "DEFAULT_BUNDLE_CHUNK_BYTES",
    "MISSING",
    "MISSING_OBJECT_ERROR",
    "STORAGE_GROUP_ID",
    "STRUCTURED_FIELD_SPECS_KEY",
    "BundleStore",
    "BundleTransferPolicy",
    "DataProtoRefLike",
    "FieldSchema",
    "MooncakeBundleTransfer",
    "MooncakeDataProtoRef",
    "RawDestination",
    "RemoteBundleRef",
    "StructuredFieldLocation",
    "StructuredMemberSlice",
    "StructuredObjectPayload",
    "StructuredObjectReadSpec",
    "StructuredObjectResult",
    "TensorObjectBuffer",
    "export_dataproto_ref",
    "export_ref",
    "import_dataproto_ref",
    "import_ref",
    "infer_structure",
    "is_dataproto_ref_handle",
    "raw_destination",
    "tensor_object_buffer",
]
