"""Columns of dictionaries and lists that contain arrays, tensors or bytes. They are split into one
column for each path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any

import numpy as np

from mooncake._columns import LEAVES, MAX_DEPTH, MAX_KEYS, MAX_LIST, Codec, Column, FieldSchema, Source, dtype_of, selected
from mooncake._decisions import MISSING, NO_VALUES, SCHEMA_SOURCE, Decision, choose, is_array, is_none, kinds_of
from mooncake._row_types import InexactError, differences, in_memory, is_converted, is_kept, is_rounded

TREE = "structured_recursive"
# Codecs that convert numbers to a common type.
_OF_NUMBERS = ("ndarray", "typed_ragged")
# Codecs whose values justify splitting dictionaries. Other dictionaries are stored as a whole.
_HEAVY = ("ragged_tensor", "bytes_ragged", "media_bytes", "media_list_ragged")


_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError)


def type_of_error(error: Exception) -> type[Exception]:
    """Returns the class of an error that takes a text and that callers of a put expect."""
    return next((kind for kind in _ERRORS if isinstance(error, kind)), ValueError)


@dataclass
class Leaf:
    """Values of one path in all rows."""

    path: str
    values: list[Any]
    decision: Decision

    @property
    def codec(self) -> str | None:
        """Codec that preserves the values, or `None` if there is none."""
        if self.decision is NO_VALUES:
            return "json_ragged"
        return self.decision.codec if self.decision.accepted else None


def _is_heavy(leaf: Leaf) -> bool:
    arrays = leaf.codec == "typed_ragged" and any(map(is_array, kinds_of(leaf.values)))
    return arrays or leaf.codec in _HEAVY


@dataclass
class Node:
    """Path whose values are dictionaries or lists, and its children."""

    path: str
    node_type: str
    children: list[Any]
    lengths: list[int] | None
    row_mask: list[bool]
    missing: list[bool]
    # All containers are plain dictionaries, or plain lists.
    is_plain: bool = True


def _names(present: Sequence[Any]) -> list[str] | None:
    """Returns the keys of dictionaries, or `None` if some keys are not `str` or there are too many.
    """
    keys = set(chain.from_iterable(present))
    return sorted(keys) if all(type(key) is str for key in keys) and len(keys) <= MAX_KEYS else None


def _longest(present: Sequence[Any]) -> int | None:
    """Returns the length of the longest of short nested lists, or `None` for other lists."""
    longest = max(map(len, present))
    if longest > MAX_LIST:
        return None
    inner = set(map(type, chain.from_iterable(present)))
    return longest if all(issubclass(kind, type(None) | dict | list | tuple) for kind in inner) else None


def escape_key(key: str) -> str:
    """Returns a key as a part of a path."""
    return key.replace("\\", "\\\\").replace(".", "\\.").replace("[", "\\[")


def infer_structure(path: str, values: list[Any], leaves: list[Leaf], nodes: list[Node], *, _depth: int = 0) -> None:
    """Splits values: paths of dictionaries and lists go to `nodes`, all others with their values to
    `leaves`.
    """
    if _depth > MAX_DEPTH:
        raise ValueError(f"{path}: nested deeper than {MAX_DEPTH} levels")
    kinds = kinds_of(values)
    are_dicts, are_lists = (
        bool(kinds) and all(issubclass(kind, of) for kind in kinds) for of in (dict, list | tuple)
    )
    some = [value for value in values if not is_none(value)] if are_dicts or are_lists else []
    names = _names(some) if are_dicts else None
    longest = _longest(some) if are_lists else None
    if names is None and longest is None:
        leaves.append(Leaf(path, values, choose(values)))
        return
    missing, present = [value is MISSING for value in values], [not is_none(value) for value in values]
    is_plain = kinds <= {dict} or kinds <= {list}
    if names is not None:
        is_plain = is_plain and set(map(type, chain.from_iterable(some))) <= {str}
        nodes.append(Node(path, "dict", list(names), None, present, missing, is_plain))
        for name in names:
            below = [value.get(name, MISSING) if is_dict else None for value, is_dict in zip(values, present)]
            infer_structure(f"{path}.{escape_key(name)}", below, leaves, nodes, _depth=_depth + 1)
        return
    assert longest is not None
    lengths = [len(value) if is_list else 0 for value, is_list in zip(values, present)]
    nodes.append(Node(path, "list", list(range(longest)), lengths, present, missing, is_plain))
    for i in range(longest):
        below = [
            value[i] if is_list and i < len(value) else MISSING for value, is_list in zip(values, present)
        ]
        infer_structure(f"{path}[{i}]", below, leaves, nodes, _depth=_depth + 1)


class Trees(Codec):
    """Columns that `infer_structure` has split."""

    def encode_tree(self, path: str, leaves: Sequence[Leaf], nodes: Sequence[Node], rows: int) -> Column:
        payload: dict[str, Any] = {}
        of_nodes, of_leaves = [], []
        for number, node in enumerate(nodes):
            described: dict[str, Any] = {"id": number, "path": node.path, "node_type": node.node_type}
            described |= {"children": node.children, "missing_payload": f"node.{number}.missing"}
            payload[f"node.{number}.missing"] = np.array(node.missing, np.bool_)
            described["row_mask_payload"] = f"node.{number}.row_mask"
            payload[f"node.{number}.row_mask"] = np.array(node.row_mask, np.bool_)
            if node.lengths is not None:
                described["lengths_payload"] = f"node.{number}.lengths"
                payload[f"node.{number}.lengths"] = np.array(node.lengths, np.int64)
            of_nodes.append(described)
        for number, leaf in enumerate(leaves):
            if leaf.codec is None:
                raise ValueError(f"{leaf.path}: no codec supports these values: {leaf.decision.reason}")
            values = [None if value is MISSING else value for value in leaf.values]
            try:
                codec, parts, metadata = _encoded_leaf(leaf.codec, values)
            except (TypeError, ValueError, OverflowError, RuntimeError) as error:
                raise type_of_error(error)(f"{leaf.path}: {error}") from error
            metadata = {**metadata, **leaf.decision.described()}
            parts["missing"] = np.array([value is MISSING for value in leaf.values], np.bool_)
            members = {name: f"leaf.{number}.{name}" for name in parts}
            payload |= {members[name]: part for name, part in parts.items()}
            of_leaves.append(
                {
                    "id": number,
                    "path": leaf.path,
                    "codec": codec,
                    "rows": rows,
                    "metadata": metadata,
                    "payload_members": members,
                }
            )
        described = {"schema_source": SCHEMA_SOURCE, "structure_version": 1, "root_path": path}
        described |= {"nodes": of_nodes, "leaves": of_leaves}
        return Column(TREE, rows, payload, described)

    def decode(self, payload: Mapping[str, Any], rows: int, metadata: Mapping[str, Any]) -> list[Any]:
        columns: dict[str, list[Any]] = {}
        for leaf in metadata.get("leaves", []):
            parts = {name: payload[member] for name, member in leaf["payload_members"].items()}
            missing = parts.pop("missing").tolist()
            values = LEAVES[leaf["codec"]].decode(parts, rows, leaf.get("metadata") or {})
            if any(missing):
                values = [MISSING if gone else value for gone, value in zip(missing, values)]
            columns[leaf["path"]] = values
        # A path comes before its children.
        for node in reversed(metadata.get("nodes", [])):
            columns[node["path"]] = self._rebuilt(node, payload, columns, rows)
        return columns[metadata["root_path"]]

    @staticmethod
    def _rebuilt(
        node: Mapping[str, Any], payload: Mapping[str, Any], columns: Mapping[str, list[Any]], rows: int
    ) -> list[Any]:
        def column(name: str, otherwise: Any) -> list[Any]:
            member = node.get(f"{name}_payload")
            return [otherwise] * rows if member is None else list(payload[member].tolist())

        is_dict = node["node_type"] == "dict"
        children = node["children"] if is_dict else [int(child) for child in node["children"]]
        paths = [f"{node['path']}.{escape_key(str(c))}" if is_dict else f"{node['path']}[{c}]" for c in children]
        missing, present = column("missing", False), column("row_mask", True)
        lengths = column("lengths", len(children))
        made: list[Any] = []
        below: Any = zip(*(columns[path] for path in paths), strict=True) if paths else repeat((), rows)
        for gone, is_present, length, values in zip(missing, present, lengths, below, strict=True):
            if gone or not is_present:
                made.append(MISSING if gone else None)
            elif is_dict:
                made.append({child: value for child, value in zip(children, values) if value is not MISSING})
            else:
                items = [None] * length
                for child, value in zip(children, values):
                    if value is not MISSING and child < length:
                        items[child] = value
                made.append(items)
        return made

    def part(
        self, source: Source, rows: Sequence[int], metadata: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        payload: dict[str, Any] = {}
        for node in metadata.get("nodes", []):
            for name in ("missing", "row_mask", "lengths"):
                member = node.get(f"{name}_payload")
                if member is not None:
                    payload[member] = selected(source.whole(member), rows)
        leaves = []
        for leaf in metadata.get("leaves", []):
            members = leaf["payload_members"]
            parts, described = LEAVES[leaf["codec"]].part(source.under(members), rows, leaf.get("metadata") or {})
            parts["missing"] = selected(source.whole(members["missing"]), rows)
            payload |= {members[name]: part for name, part in parts.items()}
            leaves.append({**leaf, "metadata": described})
        return payload, {**metadata, "leaves": leaves}


def _is_kept_tree(column: Column, leaves: Sequence[Leaf], nodes: Sequence[Node]) -> bool:
    """Returns whether a tree surely returns its values as they are."""
    stored = column.metadata["leaves"]
    return all(node.is_plain for node in nodes) and all(
        is_kept(of["codec"], leaf.values, of["metadata"]) for leaf, of in zip(leaves, stored)
    )


_TREES = Trees()
CODECS: dict[str, Codec] = {**LEAVES, TREE: _TREES}


def codec_of(name: str) -> Codec:
    """Returns the codec of that name. Raises `ValueError` if there is none."""
    codec = CODECS.get(name)
    if codec is None:
        raise ValueError(f"unknown structured non-tensor codec: {name!r}")
    return codec


def _encoded_leaf(codec: str, values: list[Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Returns codec, payload and metadata of a leaf. Numbers that their codec does not keep are
    packed one by one.
    """
    names = [codec, "msgpack_ragged"] if codec in _OF_NUMBERS else [codec]
    for name in names:
        try:
            parts, metadata = LEAVES[name].encode(values, FieldSchema(name))
            if name in _OF_NUMBERS and not is_kept(name, values, metadata):
                differences(values, LEAVES[name].decode(in_memory(parts), len(values), metadata))
        except (ValueError, OverflowError):
            if name is names[-1]:
                raise
            continue
        return name, parts, metadata
    raise AssertionError("the last codec returns or raises")


def _exact(column: Column, values: list[Any], schema: FieldSchema | None) -> Column:
    """Returns a column with the description of the types that its codec does not keep.

    Raises `InexactError` if values would come back as others. With a schema, their types may
    change.
    """
    if column.codec.startswith("ragged_tensor"):
        return column
    decoded = codec_of(column.codec).decode(in_memory(column.payload), column.rows, column.metadata)
    try:
        return replace(column, metadata={**column.metadata, **differences(values, decoded)})
    except InexactError:
        if schema is None or not all(map(is_converted, values, decoded)):
            raise
        return column


def _as_named(column: Column, values: list[Any]) -> Column:
    """Returns a column of numbers of the type that its schema names. Raises `ValueError` for
    numbers that the type does not have. A floating-point type may round.
    """
    decoded = codec_of(column.codec).decode(in_memory(column.payload), column.rows, column.metadata)
    for row, (value, back) in enumerate(zip(values, decoded, strict=True)):
        if not is_converted(value, back) and not is_rounded(value, back):
            raise ValueError(f"row {row} does not fit the type that the schema names. dtype={column.metadata['dtype']} value={value!r:.100}")
    return column


def encode(path: str, values: list[Any], schema: FieldSchema | None) -> Column:
    """Encodes a column as the schema specifies, or with the codec that preserves its values.

    An error has the reason, to which the caller adds the name of the field.
    """
    rows = len(values)
    if schema is not None and not schema.nullable and any(value is None for value in values):
        raise ValueError("FieldSchema is not nullable, and a row is None")
    is_chosen = schema is not None and schema.codec not in ("auto", TREE)
    if schema is not None and schema.codec == "ndarray" and "dtype" not in schema.metadata:
        # As in Mooncake C++, the codec for numbers gives way for other values.
        is_chosen = choose(values).codec == "ndarray" or all(value is None for value in values)
    if schema is not None and is_chosen:
        codec = LEAVES.get(schema.codec)
        if codec is None:
            raise ValueError(f"unsupported schema codec: {schema.codec!r}")
        made = Column(schema.codec, rows, *codec.encode(values, schema))
        if schema.codec in _OF_NUMBERS and dtype_of(schema) is not None:
            return _as_named(made, values)
        return made if is_kept(made.codec, values, made.metadata) else _exact(made, values, schema)
    leaves: list[Leaf] = []
    nodes: list[Node] = []
    infer_structure(path, values, leaves, nodes)
    refused = []
    if nodes and any(map(_is_heavy, leaves)):
        try:
            made = _TREES.encode_tree(path, leaves, nodes, rows)
            return made if _is_kept_tree(made, leaves, nodes) else _exact(made, values, None)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            if schema is None:
                raise
            refused.append(f"{TREE}: {error}")
    whole = Leaf(path, values, choose(values)) if nodes else leaves[0]
    names = [whole.codec]
    if whole.codec in _OF_NUMBERS:
        # Numbers that have no common type are packed one by one.
        names.append("msgpack_ragged")
    if schema is not None:
        # With a schema, values may be converted to types that msgpack or JSON have.
        names += ["msgpack_ragged", "json_ragged"]
    for name in dict.fromkeys(name for name in names if name is not None):
        try:
            made = Column(name, rows, *LEAVES[name].encode(values, FieldSchema(name)))
            if not is_kept(name, values, made.metadata):
                made = _exact(made, values, schema)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            refused.append(f"{name}: {error}")
            continue
        inferred = whole.decision.described() if name == whole.codec else {}
        return replace(made, metadata={**made.metadata, **inferred})
    why = "; ".join(refused) or whole.decision.reason
    raise ValueError(why if schema is None else f"unable to infer a safe codec: {why}")
