"""Addresses of weights in a running process."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mooncake.reshard._values import integer, items, put, text, unique
from mooncake.reshard.contracts import (
    LeaseId,
    ParticipantId,
    PlacementId,
    ResourceId,
    ResourceKind,
    RevisionId,
    RuntimeBindingFragment,
    RuntimeInstanceId,
)

__all__ = ["RuntimeBindingFragment", "WeightRuntimeBindingManifest"]
_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class WeightRuntimeBindingManifest:
    """Addresses of all fragments of one participant."""

    resource_id: ResourceId
    placement_id: PlacementId
    placement_digest: str
    instance_id: RuntimeInstanceId
    generation: int
    lease_id: LeaseId
    revision: RevisionId
    participant_id: ParticipantId
    fragments: tuple[RuntimeBindingFragment, ...]

    def __post_init__(self) -> None:
        text(self.resource_id, "resource_id")
        text(self.placement_id, "placement_id")
        if type(self.placement_digest) is not str or _DIGEST.fullmatch(self.placement_digest) is None:
            raise ValueError(f"placement_digest must be a SHA-256 of 64 lower-case hexadecimal digits: {self.placement_digest!r}")
        text(self.instance_id, "instance_id")
        integer(self.generation, "generation")
        for name in ("lease_id", "revision", "participant_id"):
            text(getattr(self, name), name)
        given: tuple[RuntimeBindingFragment, ...] = items(
            self.fragments, RuntimeBindingFragment, "WeightRuntimeBindingManifest fragments"
        )
        unique([one.placement_fragment_id for one in given], "duplicate placement fragment")
        unique([one.fragment_id for one in given], "duplicate runtime fragment_id")
        put(self, fragments=tuple(sorted(given, key=lambda one: one.placement_fragment_id)))

    @property
    def resource_kind(self) -> ResourceKind:
        """Kind of the resource."""
        return ResourceKind.MODEL_WEIGHT
