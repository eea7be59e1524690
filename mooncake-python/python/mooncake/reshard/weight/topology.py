"""Processes that hold weights, and their coordinates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mooncake.reshard._values import identity, integer, items, put, text, unique
from mooncake.reshard.contracts import ParticipantId, TopologyId
from mooncake.reshard.weight.types import KINDS, ParallelRank

__all__ = ["ParallelTopology", "TopologyParticipant"]
_SIZES = ("tp_size", "pp_size", "ep_size", "dp_size")


@dataclass(frozen=True)
class TopologyParticipant:
    """Process with its coordinates."""

    participant_id: ParticipantId
    rank: ParallelRank

    def __post_init__(self) -> None:
        text(self.participant_id, "participant_id")
        if not isinstance(self.rank, ParallelRank):
            raise ValueError(f"rank must be a ParallelRank, not {type(self.rank).__name__}")


@dataclass(frozen=True, init=False)
class ParallelTopology:
    """All processes, and the sizes of the axes."""

    tp_size: int
    pp_size: int
    ep_size: int
    dp_size: int
    participants: tuple[TopologyParticipant, ...]
    topology_id: TopologyId

    def __init__(
        self,
        *,
        tp_size: int,
        pp_size: int,
        ep_size: int,
        dp_size: int,
        participants: tuple[TopologyParticipant, ...],
        topology_id: TopologyId | None = None,
    ) -> None:
        for name, size in zip(_SIZES, (tp_size, pp_size, ep_size, dp_size)):
            put(self, **{name: integer(size, name, 1)})
        given: tuple[TopologyParticipant, ...] = items(participants, TopologyParticipant, "ParallelTopology participants")
        if not given:
            raise ValueError("ParallelTopology participants must not be empty")
        unique([one.participant_id for one in given], "duplicate topology participant_id")
        unique([one.rank for one in given], "duplicate topology rank")
        for one in given:
            for kind in KINDS:
                if getattr(one.rank, kind) >= self.size(kind):
                    raise ValueError(f"{kind} rank of {one.participant_id!r} must be below {kind}_size: {one.rank}")
        put(self, participants=tuple(sorted(given, key=lambda one: one.participant_id)))
        made = identity({"schema": "weight-parallel-topology", **self.wire()})
        if topology_id is not None and text(topology_id, "topology_id") != made:
            raise ValueError(f"topology_id does not match the canonical logical content: {topology_id!r}")
        put(self, topology_id=TopologyId(made))

    def size(self, kind: str) -> int:
        """Returns the size of an axis."""
        return int(getattr(self, f"{kind}_size"))

    @property
    def world_size(self) -> int:
        """Number of participants, which may be less than the product of the sizes."""
        return len(self.participants)

    def participant(self, participant_id: ParticipantId) -> TopologyParticipant:
        """Returns a participant. Raises `ValueError` if there is none with that identifier."""
        for one in self.participants:
            if one.participant_id == participant_id:
                return one
        raise ValueError(f"unknown topology participant: {participant_id!r}")

    def wire(self) -> dict[str, Any]:
        """Returns the content without the identifier, as JSON."""
        sizes = {name: getattr(self, name) for name in _SIZES}
        listed = [{"participant_id": one.participant_id, "rank": one.rank.wire()} for one in self.participants]
        return {**sizes, "participants": listed}
