"""Bundles: references to them, payloads to write, specifications of reads, and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mooncake._manifests import _mapping

FIELDS = "__mooncake_structured_fields__"


class BundleStore(Protocol):
    """Interface that a store must implement."""

    def put(self, key: str, value: Any, /) -> Any: ...

    def get(self, key: str, /) -> bytes: ...

    def remove(self, key: str, force: bool, /) -> Any: ...


@dataclass
class RemoteBundleRef:
    """Reference to a bundle, with its manifest. An empty manifest is fetched when it is needed."""

    manifest_key: str
    manifest: dict[str, Any]


class StructuredObjectPayload:
    """Object to write: members by name, and its metadata. A write checks both."""

    def __init__(self, metadata: Mapping[str, Any] | None = None, buffers: Mapping[str, Any] | None = None) -> None:
        if buffers is None:
            raise TypeError("StructuredObjectPayload requires buffers")
        self.metadata: Any = {} if metadata is None else metadata
        self.buffers: Any = buffers

    def parts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns copies of metadata and members. Raises `TypeError` if one is not a mapping."""
        for value, what in ((self.metadata, "metadata"), (self.buffers, "buffers")):
            if not isinstance(value, Mapping):
                raise TypeError(f"structured {what} must be a mapping, got {type(value).__name__}")
        return dict(self.metadata), dict(self.buffers)


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
        selected = None if names is None else tuple(names)
        return StructuredObjectReadSpec(self.ref, selected, self.member_slices)

    def slice_member(self, name: str, axis: int, start: int, end: int, step: int = 1) -> StructuredObjectReadSpec:
        """Restricts the read to these rows of a member. The read checks them."""
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
        return _mapping(self.metadata.get(FIELDS, {}), "descriptions of the members")

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
