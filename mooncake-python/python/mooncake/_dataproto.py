"""References to stored batches of samples: their fields, the location of each, and its encoding."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from mooncake._bundle_types import RemoteBundleRef, StructuredMemberSlice
from mooncake._columns import FieldSchema
from mooncake._members import PLAIN_ARRAYS, check_class
from mooncake._row_types import InexactError, ObjectArray, difference, restore
from mooncake._shards import _is_tensor

HANDLE = "mooncake_dataproto_ref"
STORAGE_GROUP_ID = "storage_group_id"
# Version of handles that are written. Version 2 has the same parts and must name a group.
_VERSION = 1
_GROUPED_VERSION = 2
META_TYPES = "meta_types"
"""Name of the types of metadata that JSON lacks, in a handle. Mooncake C++ skips it."""
# Kinds of arrays and scalars of numpy whose elements JSON has.
_OF_JSON = "biufU"
SECTIONS = ("batch", "non_tensor_batch", "meta_info")


@dataclass(frozen=True)
class StructuredFieldLocation:
    """Location of a field: its stage, its name in the bundle, and its section."""

    stage: str
    member: str
    section: Literal["batch", "non_tensor_batch"]


@dataclass
class MooncakeDataProtoRef:
    """Stored batch: one bundle for each stage that wrote fields of it."""

    batch_size: int
    stage_refs: dict[str, RemoteBundleRef]
    field_index: dict[str, StructuredFieldLocation]
    meta_info: dict[str, Any]
    namespace: str = "default"
    partition: str = "default"
    global_indexes: list[int] | None = None
    encoded_non_tensor: dict[str, Any] = field(default_factory=dict)
    _storage_group_id: str | None = field(default=None, repr=False)


DataProtoRefLike = MooncakeDataProtoRef | Mapping[str, Any]


def is_dataproto_ref_handle(value: Any) -> bool:
    """Returns whether a value is a handle of `export_dataproto_ref`."""
    return isinstance(value, Mapping) and value.get("type") == HANDLE


def _json_safe(value: Any, name: str) -> Any:
    """Returns a value as JSON has it: tuples and arrays as lists, numbers of numpy as Python's, and
    values of a subclass of a plain type as those of the plain type.

    Raises `TypeError` with the name of a value that JSON does not have.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int | float):
        return int.__int__(value) if isinstance(value, int) else float.__float__(value)
    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in _OF_JSON and not value.dtype.hasobject:
        with np.errstate(all="ignore"):
            # `tolist` returns long numbers as those of numpy.
            return (value.astype(np.float64) if value.dtype.kind == "f" else value).tolist()
    if _is_of_objects(value):
        return _json_safe(value.tolist(), name)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(
                    f"cannot export DataProto ref: JSON has only keys that are str. name={name!r} key={key!r} type={type(key).__name__}"
                )
        return {str(key): _json_safe(one, f"{name}.{key}") for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_json_safe(one, f"{name}[{at}]") for at, one in enumerate(value)]
    raise TypeError(
        f"cannot export DataProto ref: handles support only JSON-safe values. name={name!r} type={type(value).__name__};"
        " put a field, or a value that JSON has"
    )


def _is_of_objects(value: Any) -> bool:
    return type(value) in PLAIN_ARRAYS and value.dtype == object


def _typed(value: Any, name: str) -> tuple[Any, Any]:
    """Returns a value as JSON has it, and the description of what JSON lacks of it, if anything.

    Raises `TypeError` with the name of a value that would come back as another one.
    """
    try:
        plain = _json_safe(value, name)
        return plain, difference(_plain_classes(value), plain)
    except InexactError as error:
        text = f"cannot export DataProto ref: a value would come back as another one: {error}. name={name!r}; put it as a field"
        raise TypeError(text) from None
    except RecursionError:
        raise TypeError(f"cannot export DataProto ref: a value is nested too deeply. name={name!r}; put it as a field") from None


def _plain_classes(value: Any) -> Any:
    """Returns a value with dictionaries, lists, tuples, texts and numbers of the plain classes, and
    arrays of objects as their elements.
    """
    if isinstance(value, Mapping):
        return {str.__str__(key): _plain_classes(one) for key, one in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_plain_classes, value))
    if isinstance(value, list):
        return [*map(_plain_classes, value)]
    if _is_of_objects(value):
        return ObjectArray(list(value.shape), [*map(_plain_classes, value.reshape(-1))])
    if isinstance(value, str | int | float) and not isinstance(value, np.generic):
        return _json_safe(value, "")
    return value


def export_dataproto_ref(ref: MooncakeDataProtoRef) -> dict[str, Any]:
    """Converts a reference to a handle of plain values that can be sent as JSON."""
    if not isinstance(ref, MooncakeDataProtoRef):
        raise TypeError(f"expected MooncakeDataProtoRef, got {type(ref).__name__}")
    typed = {key: _typed(value, f"meta_info.{key}") for key, value in ref.meta_info.items()}
    types = {key: described for key, (_, described) in typed.items() if described is not None}
    handle: dict[str, Any] = {
        "type": HANDLE,
        "version": _VERSION,
        "kind": "bundle_stages",
        "batch_size": int(ref.batch_size),
        "namespace": ref.namespace,
        "partition": ref.partition,
        "global_indexes": _json_safe(ref.global_indexes, "global_indexes"),
        "stage_refs": {stage: {"manifest_key": one.manifest_key} for stage, one in ref.stage_refs.items()},
        "field_index": {
            name: {"stage": at.stage, "member": at.member, "section": at.section}
            for name, at in ref.field_index.items()
        },
        "meta_info": _json_safe({key: plain for key, (plain, _) in typed.items()}, "meta_info"),
        "encoded_non_tensor": _json_safe(ref.encoded_non_tensor, "encoded_non_tensor"),
    }
    if types:
        handle[META_TYPES] = types
    if ref._storage_group_id is not None:
        handle[STORAGE_GROUP_ID] = ref._storage_group_id
    json.dumps(handle)
    return handle


def _part(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"DataProto ref handle {name} must be a mapping")
    return value


def _word(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"DataProto ref handle {name} must be a non-empty string")
    return value


def import_dataproto_ref(handle: Mapping[str, Any]) -> MooncakeDataProtoRef:
    """Converts a handle to a reference. Raises `ValueError` for an invalid handle."""
    if not is_dataproto_ref_handle(handle):
        raise ValueError("not a Mooncake DataProto ref handle")
    version = handle.get("version")
    if isinstance(version, bool) or version not in (_VERSION, _GROUPED_VERSION):
        raise ValueError(f"unsupported DataProto ref handle version: {version!r}")
    if handle.get("kind") != "bundle_stages":
        raise ValueError(f"unsupported DataProto ref handle kind: {handle.get('kind')!r}")
    group = handle.get(STORAGE_GROUP_ID)
    if group is not None or version == _GROUPED_VERSION:
        _word(group, STORAGE_GROUP_ID)
    stages = {
        _word(stage, "stage"): RemoteBundleRef(_word(_part(one, "stage_refs").get("manifest_key"), "manifest_key"), {})
        for stage, one in _part(handle.get("stage_refs"), "stage_refs").items()
    }
    fields: dict[str, StructuredFieldLocation] = {}
    for name, given in _part(handle.get("field_index"), "field_index").items():
        at = _part(given, "field_index")
        stage, section = _word(at.get("stage"), "stage"), at.get("section")
        if section not in SECTIONS[:2]:
            raise ValueError(f"DataProto ref handle field {name!r} has an invalid section: {section!r}")
        if stage not in stages:
            raise ValueError(f"DataProto ref handle field {name!r} is in an unknown stage: {stage!r}")
        fields[_word(name, "field")] = StructuredFieldLocation(stage, _word(at.get("member"), "member"), section)
    indexes, size = handle.get("global_indexes"), handle.get("batch_size")
    if indexes is not None and not (isinstance(indexes, list) and all(type(one) is int for one in indexes)):
        raise ValueError("DataProto ref handle global_indexes must be a list of integers or null")
    if type(size) is not int or size < 0:
        raise ValueError("DataProto ref handle batch_size must be a non-negative integer")
    encoded = dict(_part(handle.get("encoded_non_tensor", {}), "encoded_non_tensor"))
    for name, one in encoded.items():
        if name not in fields or not isinstance(one, Mapping) or not isinstance(one.get("payload_members"), Mapping):
            raise ValueError(f"DataProto ref handle encoded_non_tensor {name!r} does not describe a field")
    meta_info = dict(_part(handle.get("meta_info", {}), "meta_info"))
    for name, described in _part(handle.get(META_TYPES, {}), META_TYPES).items():
        try:
            meta_info[name] = restore(meta_info[name], described)
        except (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"cannot import DataProto ref: {META_TYPES} does not fit meta_info: {error!r:.200}. name={name!r}") from error
    return MooncakeDataProtoRef(
        batch_size=size,
        stage_refs=stages,
        field_index=fields,
        meta_info=meta_info,
        namespace=str(handle.get("namespace", "default")),
        partition=str(handle.get("partition", "default")),
        global_indexes=indexes,
        encoded_non_tensor=encoded,
        _storage_group_id=group,
    )


def resolve(ref: DataProtoRefLike) -> MooncakeDataProtoRef:
    """Returns a reference as it is, or the one of a handle."""
    if isinstance(ref, MooncakeDataProtoRef):
        return ref
    if is_dataproto_ref_handle(ref):
        return import_dataproto_ref(ref)
    raise TypeError(f"expected MooncakeDataProtoRef or DataProto handle, got {type(ref).__name__}")


def _rows_of_field(name: str, value: Any) -> int:
    """Returns the number of rows of a field. Raises `TypeError` if it has none."""
    try:
        return len(value)
    except TypeError as error:
        raise TypeError(
            f"cannot put batch: a field has no rows: {error}. field={name!r} type={type(value).__name__}; put it into meta_info"
        ) from error


def _sizes(sizes: Mapping[str, int]) -> str:
    """Returns a text that names fields of each size."""
    first: dict[int, list[str]] = {}
    for name, size in sizes.items():
        first.setdefault(size, []).append(name)
    return " ".join(f"rows={size} fields={names[:4]}" for size, names in sorted(first.items()))


@dataclass
class Envelope:
    """Fields of a batch by section."""

    batch: dict[str, Any] = field(default_factory=dict)
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def rows(self) -> int:
        """Returns the number of samples. Raises `ValueError` if fields differ in it."""
        for name in (*self.batch, *self.non_tensor_batch):
            # A handle has names of JSON.
            if not isinstance(name, str) or not name:
                raise TypeError(f"cannot put batch: a name of a field is not a non-empty str. field={name!r}; rename it")
        both = sorted(set(self.batch) & set(self.non_tensor_batch))
        if both:
            raise ValueError(f"cannot put batch: batch and non_tensor_batch fields overlap. fields={both}; rename one of them")
        sizes = {name: _rows_of_field(name, value) for values in (self.batch, self.non_tensor_batch) for name, value in values.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(
                f"cannot put batch: fields have inconsistent batch sizes. {_sizes(sizes)}; put fields without rows into meta_info"
            )
        return next(iter(sizes.values()), 0)


def _dictionary(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return dict(value)
    items = getattr(value, "items", None)
    if not callable(items):
        raise TypeError(f"expected mapping-like value, got {type(value).__name__}")
    return dict(items())


def _is_dictionary(value: Any) -> bool:
    return value is None or isinstance(value, Mapping) or callable(getattr(value, "items", None))


def envelope_of(data: Any) -> Envelope:
    """Returns the batch of an object with the three sections, a dictionary of them, or a dictionary
    of tensors.
    """
    if not isinstance(data, Mapping):
        return Envelope(*(_dictionary(getattr(data, section, None)) for section in SECTIONS))
    if data and set(data) <= set(SECTIONS) and all(_is_dictionary(value) for value in data.values()):
        return Envelope(*(_dictionary(data.get(section)) for section in SECTIONS))
    return Envelope(dict(data))


def section_of(name: str, schema: FieldSchema | None) -> str | None:
    """Returns the section that a schema names for its field, if any."""
    section = None if schema is None else schema.metadata.get("section")
    if section is not None and section not in SECTIONS:
        raise ValueError(f"FieldSchema for {name!r}: metadata['section'] must be one of {sorted(SECTIONS)}")
    return section


def _dense(value: Any) -> bool:
    """Returns whether a value is a numeric array or a tensor, with rows."""
    if _is_tensor(value):
        return bool(value.ndim > 0)
    return isinstance(value, np.ndarray) and value.dtype != object and value.ndim > 0


def _listed(value: Any) -> bool:
    return (isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)) or (
        isinstance(value, np.ndarray) and value.dtype == object and value.ndim > 0
    )


def _one_size(data: Mapping[str, Any], names: Sequence[str], what: str) -> int | None:
    """Returns the number of rows of these fields, or `None` if there is no field."""
    sizes = {name: _rows_of_field(name, data[name]) for name in names}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"cannot put batch: flat dict {what} have ambiguous batch sizes. {_sizes(sizes)}; specify their sections with a FieldSchema"
        )
    return next(iter(sizes.values()), None)


def envelope_of_dict(data: Any, schemas: Mapping[str, FieldSchema]) -> Envelope:
    """Returns the batch of a flat dictionary.

    Arrays with one row for each sample become tensors, lists of that length become other fields,
    and the rest becomes metadata. A schema overrides this.
    """
    if not isinstance(data, Mapping):
        raise TypeError("flat dict payload must be a mapping")
    declared = {name: section for name in data if (section := section_of(name, schemas.get(name))) is not None}
    row_aligned = [name for name, section in declared.items() if section != "meta_info"]
    free = [name for name in data if name not in declared]
    rows = _one_size(data, row_aligned, "fields")
    if not row_aligned:
        rows = _one_size(data, [name for name in free if _dense(data[name])], "dense fields")
        if rows is None:
            rows = _one_size(data, [name for name in free if _listed(data[name])], "fields") or None
    made = Envelope()
    for name, value in data.items():
        section = declared.get(name)
        if section is None and _dense(value) and len(value) == rows:
            section = "batch"
        elif section is None and not row_aligned and _listed(value) and len(value) == rows:
            section = "non_tensor_batch"
        if section == "non_tensor_batch":
            value = column(name, value)
        getattr(made, section or "meta_info")[name] = value
    return made


def column(name: str, value: Any) -> Any:
    """Returns rows of a non-tensor field as an array."""
    if isinstance(value, np.ndarray):
        check_class(value, name, "batch")
        return value
    if not _listed(value):
        raise TypeError(
            f"cannot put batch: non_tensor_batch field {name!r} must be an ndarray or non-string sequence. type={type(value).__name__}"
        )
    return np.fromiter(value, object, len(value))


def check_sections(envelope: Envelope, schemas: Mapping[str, FieldSchema]) -> None:
    """Raises `ValueError` if a field is not in the section that its schema names."""
    for name, schema in schemas.items():
        section = section_of(name, schema)
        present = [one for one in SECTIONS if name in getattr(envelope, one)]
        if section is not None and present and section not in present:
            raise ValueError(f"FieldSchema for {name!r} declares section {section!r}, but data contains it in {present}")


def flat(envelope: Envelope) -> dict[str, Any]:
    """Returns all fields in one dictionary. Non-tensor fields become lists."""
    every = [name for section in SECTIONS for name in getattr(envelope, section)]
    twice = sorted({name for name in every if every.count(name) > 1})
    if twice:
        raise ValueError(f"Duplicate keys found across DataProto sections: {twice}")
    others = {
        name: value.tolist() if isinstance(value, np.ndarray) and value.dtype == object else value
        for name, value in envelope.non_tensor_batch.items()
    }
    return {**envelope.meta_info, **envelope.batch, **others}


def built(envelope: Envelope, data_cls: Any) -> Any:
    """Returns a dictionary of the sections, or an instance of `data_cls`."""
    if data_cls is None or data_cls is dict:
        return {section: getattr(envelope, section) for section in SECTIONS}
    from_dict = getattr(data_cls, "from_dict", None)
    try:
        if callable(from_dict):
            return from_dict(envelope.batch, envelope.non_tensor_batch, meta_info=envelope.meta_info)
        return data_cls(**{section: getattr(envelope, section) for section in SECTIONS})
    except TypeError as error:
        name = getattr(data_cls, "__name__", data_cls)
        raise TypeError(f"{name!r} cannot be constructed from {', '.join(SECTIONS)}") from error


def rows_of(rows: slice | StructuredMemberSlice | Sequence[int] | None, total: int) -> Sequence[int] | None:
    """Returns the numbers of the selected rows, or `None` for all."""
    if rows is None:
        return None
    if isinstance(rows, StructuredMemberSlice):
        if rows.axis != 0:
            raise ValueError("DataProto row slicing currently supports axis=0 only")
        rows = slice(rows.start, rows.end, rows.step)
    if isinstance(rows, slice):
        if rows.step is not None and rows.step <= 0:
            raise ValueError("DataProto row slicing step must be positive")
        return range(total)[rows]
    if not isinstance(rows, np.ndarray) and not _listed(rows):
        raise TypeError("DataProto rows must be a slice, StructuredMemberSlice, or row index sequence")
    picked = []
    for row in rows:
        if isinstance(row, bool) or not isinstance(row, int | np.integer):
            raise TypeError("DataProto row indices must be integers")
        if not -total <= row < total:
            raise IndexError(f"DataProto row index {row} out of range for {total} rows")
        picked.append(int(row) % total)
    return picked


def fields_of(
    ref: MooncakeDataProtoRef,
    fields: Sequence[str] | None,
    batch_fields: Sequence[str] | None,
    non_tensor_fields: Sequence[str] | None,
) -> list[str]:
    """Returns the names of the selected fields."""
    if fields is not None and (batch_fields is not None or non_tensor_fields is not None):
        raise ValueError("fields cannot be combined with batch_fields or non_tensor_fields")
    if fields is None and batch_fields is None and non_tensor_fields is None:
        return list(ref.field_index)
    names = list(fields) if fields is not None else [*(batch_fields or []), *(non_tensor_fields or [])]
    unknown = [name for name in names if name not in ref.field_index]
    if unknown:
        raise KeyError(f"unknown DataProto fields: {unknown}")
    return names
