"""Weights in a store: which object holds which box of which tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mooncake.reshard._values import exact_fields, items, json_list, parsed_object, put, sha256, text, u64, unique
from mooncake.reshard.contracts import ResourceId, ResourceKind, RevisionId, StoredFragmentId, TensorId
from mooncake.reshard.geometry import boxes_exactly_cover
from mooncake.reshard.weight.binding import descriptor_key
from mooncake.reshard.weight.part import check_geometry
from mooncake.reshard.weight.placement import tensor_wire
from mooncake.reshard.weight.serde import tensor_of
from mooncake.reshard.weight.types import TensorDescriptor, aliases_of, box_of

__all__ = ["StoredFragment", "StoredManifestIdentity", "WeightManifest"]

_TEXTS = ("namespace", "resource_id", "revision")
_FIELDS = frozenset(
    "resource_kind namespace resource_id revision weight_generation group_id manifest_key tensors fragments created_at".split()
)
_FRAGMENT = frozenset(
    "fragment_id tensor_id global_offset local_shape object_key object_offset nbytes aliases".split()
)


@dataclass(frozen=True)
class StoredFragment:
    """Box of a tensor in an object of a store."""

    fragment_id: StoredFragmentId
    tensor_id: TensorId
    global_offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    object_key: str
    object_offset: int
    nbytes: int
    aliases: tuple[TensorId, ...] = ()

    def __post_init__(self) -> None:
        text(self.fragment_id, "fragment_id")
        text(self.tensor_id, "tensor_id")
        offset, shape = box_of(self.global_offset, self.local_shape)
        text(self.object_key, "object_key")
        u64(self.object_offset, "object_offset")
        u64(self.nbytes, "nbytes", 1)
        u64(self.object_offset + self.nbytes, "end of the object range")
        put(self, global_offset=offset, local_shape=shape, aliases=aliases_of(self.aliases, self.tensor_id))

    @property
    def box(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offset and shape."""
        return self.global_offset, self.local_shape

    def wire(self) -> dict[str, Any]:
        """Returns the fragment as JSON."""
        return {
            "fragment_id": self.fragment_id,
            "tensor_id": self.tensor_id,
            "global_offset": list(self.global_offset),
            "local_shape": list(self.local_shape),
            "object_key": self.object_key,
            "object_offset": self.object_offset,
            "nbytes": self.nbytes,
            "aliases": list(self.aliases),
        }


@dataclass(frozen=True)
class StoredManifestIdentity:
    """Identifiers of a manifest in a store, and the hash of its content."""

    namespace: str
    resource_id: ResourceId
    revision: RevisionId
    weight_generation: int
    group_id: str
    manifest_key: str
    content_sha256: str


@dataclass(frozen=True)
class WeightManifest:
    """Complete weights in a store."""

    namespace: str
    resource_id: ResourceId
    revision: RevisionId
    weight_generation: int
    group_id: str
    manifest_key: str
    tensors: tuple[TensorDescriptor, ...]
    fragments: tuple[StoredFragment, ...]
    created_at: str
    manifest_digest: str = field(init=False)

    def __post_init__(self) -> None:
        for name in _TEXTS:
            text(getattr(self, name), name)
        u64(self.weight_generation, "weight_generation")
        for name in ("group_id", "manifest_key", "created_at"):
            text(getattr(self, name), name)
        if self.manifest_key != f"{self.group_id}/manifest":
            raise ValueError(f"manifest_key must be in the group: {self.manifest_key!r} and {self.group_id!r}")
        tensors: tuple[TensorDescriptor, ...] = items(self.tensors, TensorDescriptor, "WeightManifest tensors")
        fragments: tuple[StoredFragment, ...] = items(self.fragments, StoredFragment, "WeightManifest fragments")
        if not tensors:
            raise ValueError("WeightManifest must contain tensors")
        put(self, tensors=tensors, fragments=fragments)
        self._check()
        put(self, manifest_digest=sha256(self.to_json()))

    def _check(self) -> None:
        unique([tensor.tensor_id for tensor in self.tensors], "duplicate tensor_id")
        unique([one.fragment_id for one in self.fragments], "duplicate stored fragment_id")
        known = {tensor.tensor_id: tensor for tensor in self.tensors}
        for one in self.fragments:
            check_geometry(known, one.tensor_id, one.box, one.nbytes)
            if not one.object_key.startswith(f"{self.group_id}/payload/"):
                raise ValueError(f"object_key must be in the payload of the group: {one.object_key!r} and {self.group_id!r}")
        unique([(one.tensor_id, *one.box) for one in self.fragments], "duplicate fragment geometry")
        self._check_aliases(known)
        for tensor in self.tensors:
            boxes = [one.box for one in self.fragments if one.tensor_id == tensor.tensor_id]
            if not boxes_exactly_cover((0,) * len(tensor.global_shape), tensor.global_shape, boxes):
                raise ValueError(f"stored tensor is not fully covered: {tensor.tensor_id!r}")
        self._check_objects()

    def _check_aliases(self, known: Mapping[TensorId, TensorDescriptor]) -> None:
        of_groups: dict[tuple[tuple[TensorId, ...], tuple[tuple[int, ...], tuple[int, ...]]], set[TensorId]] = {}
        for one in self.fragments:
            if one.aliases:
                of_groups.setdefault((one.aliases, one.box), set()).add(one.tensor_id)
        for (aliases, box), members in of_groups.items():
            if set(aliases) - known.keys():
                raise ValueError(f"alias group references unknown tensor: {sorted(set(aliases) - known.keys())[0]!r}")
            if members != set(aliases):
                raise ValueError(f"alias group is not declared consistently: {aliases} at {box}")
            if len({descriptor_key(known[name]) for name in aliases}) > 1:
                raise ValueError(f"aliases must have equal tensor descriptors: {aliases}")

    def _check_objects(self) -> None:
        """Checks that the ranges of one object are disjoint."""
        ranges = sorted((one.object_key, one.object_offset, one.nbytes) for one in self.fragments)
        for (key, offset, size), (following, begin, _) in zip(ranges, ranges[1:]):
            if key == following and begin < offset + size:
                raise ValueError(f"stored object ranges overlap: {key!r} at {begin}")

    @property
    def resource_kind(self) -> ResourceKind:
        """Kind of the resource."""
        return ResourceKind.MODEL_WEIGHT

    @property
    def manifest_identity(self) -> StoredManifestIdentity:
        """Identifiers, and the hash of the content."""
        return StoredManifestIdentity(
            self.namespace,
            self.resource_id,
            self.revision,
            self.weight_generation,
            self.group_id,
            self.manifest_key,
            self.manifest_digest,
        )

    def to_json(self) -> str:
        """Returns the JSON of the manifest."""
        value = {
            "resource_kind": self.resource_kind.value,
            **{name: getattr(self, name) for name in _TEXTS},
            "weight_generation": self.weight_generation,
            "group_id": self.group_id,
            "manifest_key": self.manifest_key,
            "tensors": [tensor_wire(tensor) for tensor in self.tensors],
            "fragments": [fragment.wire() for fragment in self.fragments],
            "created_at": self.created_at,
        }
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, content: str | bytes) -> WeightManifest:
        """Returns the manifest of a JSON text. Raises `ValueError` for an invalid one."""
        return cls.from_dict(parsed_object(content, "weight manifest"))

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> WeightManifest:
        """Returns the manifest of a JSON object. Raises `ValueError` for an invalid one."""
        value = exact_fields(value, _FIELDS, "weight manifest")
        if value["resource_kind"] != ResourceKind.MODEL_WEIGHT.value:
            raise ValueError(f"unsupported resource_kind: {value['resource_kind']!r}")
        fragments = []
        for given in json_list(value["fragments"], "fragments"):
            one = dict(exact_fields(given, _FRAGMENT, "stored fragment"))
            for name in ("global_offset", "local_shape", "aliases"):
                json_list(one[name], name)
            fragments.append(StoredFragment(**one))
        tensors = tuple(tensor_of(one) for one in json_list(value["tensors"], "tensors"))
        rest = {name: value[name] for name in _FIELDS - {"resource_kind", "tensors", "fragments"}}
        return cls(tensors=tensors, fragments=tuple(fragments), **rest)
