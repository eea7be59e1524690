"""Options and responses of process groups."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, overload

import torch

from mooncake._sizes import parse_switch

_LOG = logging.getLogger(__name__)
MAX_RANKS = 64
_NAMES = ("active_ranks", "is_extension", "max_group_size", "auto_deactivate_on_failure", "auto_sync_on_failure")


class MooncakeBackendOptions:
    """Options of a process group, for `pg_options`.

    `active_ranks` is an `int32` tensor with an element per slot. The group overwrites it with 1 for
    each active rank and 0 for the others, and keeps it current. `is_extension` is true in a process
    that joins a running group. `max_group_size` is the largest number of ranks of the group; 0
    means its size.
    """

    __slots__ = ("active_ranks", "auto_deactivate_on_failure", "auto_sync_on_failure", "is_extension", "max_group_size")

    @overload
    def __init__(self, active_ranks: Any, is_extension: bool = ..., max_group_size: int = ...) -> None: ...
    @overload
    def __init__(
        self,
        max_group_size: int,
        is_extension: bool = ...,
        auto_deactivate_on_failure: bool = ...,
        auto_sync_on_failure: bool = ...,
    ) -> None: ...
    @overload
    def __init__(self, **options: Any) -> None: ...
    def __init__(self, *values: Any, **options: Any) -> None:
        # A tensor of one element converts to an integer, so its type decides.
        names: tuple[str, ...]
        if values and isinstance(values[0], torch.Tensor):
            names = ("active_ranks", "is_extension", "max_group_size")
        else:
            names = ("max_group_size", "is_extension", "auto_deactivate_on_failure", "auto_sync_on_failure")
        if len(values) > len(names):
            raise TypeError(f"MooncakeBackendOptions takes at most {len(names)} arguments ({len(values)} given)")
        if "max_world_size" in options:
            options.setdefault("max_group_size", options.pop("max_world_size"))
        for name, value in zip(names, values, strict=False):
            if name in options:
                raise TypeError(f"MooncakeBackendOptions got two values for {name!r}")
            options[name] = value
        unknown = sorted(options.keys() - set(_NAMES))
        if unknown:
            raise TypeError(f"MooncakeBackendOptions got an unknown argument {unknown[0]!r}")
        self.active_ranks = options.get("active_ranks")
        self.is_extension = bool(options.get("is_extension", False))
        self.max_group_size = int(options.get("max_group_size", 0))
        self.auto_deactivate_on_failure = bool(options.get("auto_deactivate_on_failure", True))
        self.auto_sync_on_failure = bool(options.get("auto_sync_on_failure", True))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in _NAMES)
        return f"MooncakeBackendOptions({fields})"


def _from_environment() -> MooncakeBackendOptions:
    """Returns the options of a group without `pg_options`."""

    def is_on(name: str) -> bool:
        text = os.environ.get(name, "")
        if not text:
            return True
        try:
            return parse_switch(text)
        except ValueError:
            _LOG.warning("%s=%s is ignored: must be true or false; using true", name, text)
            return True

    return MooncakeBackendOptions(
        auto_deactivate_on_failure=is_on("MOONCAKE_PG_AUTO_DEACTIVATE_ON_FAILURE"),
        auto_sync_on_failure=is_on("MOONCAKE_PG_AUTO_SYNC_ON_FAILURE"),
    )


@dataclass(frozen=True)
class _CheckedOptions:
    """Options that fit a group."""

    capacity: int
    is_extension: bool
    deactivates: bool
    syncs: bool
    active_ranks: Any


def _check(given: MooncakeBackendOptions | None, rank: int, size: int, device: str) -> _CheckedOptions:
    """Returns the options of a group. Raises `RuntimeError` if they do not fit."""
    if given is not None and not isinstance(given, MooncakeBackendOptions):
        raise RuntimeError(f"cannot create group: pg_options has another type. type={type(given).__name__}")
    options = _from_environment() if given is None else given
    capacity = options.max_group_size if options.max_group_size > 0 else size
    if capacity < size:
        raise RuntimeError(
            f"cannot create group: max_group_size is below the size. max_group_size={capacity} size={size}"
        )
    if capacity > MAX_RANKS:
        raise RuntimeError(
            f"cannot create group: max_group_size is too large. max_group_size={capacity} maximum={MAX_RANKS}"
        )
    if not 0 <= rank < size:
        raise RuntimeError(f"cannot create group: rank is out of range. rank={rank} size={size}")
    if options.auto_sync_on_failure and not options.auto_deactivate_on_failure:
        raise RuntimeError("cannot create group: auto_sync_on_failure needs auto_deactivate_on_failure")
    active = options.active_ranks
    if active is None:
        active = torch.zeros(capacity, dtype=torch.int32, device=device)
    elif (
        not isinstance(active, torch.Tensor)
        or active.dtype != torch.int32
        or not active.is_contiguous()
        or active.numel() < capacity
        or active.device.type not in ("cpu", "cuda")
    ):
        raise RuntimeError(
            "cannot create group: active_ranks has to be a contiguous int32 tensor with an element per rank. "
            f"needed={capacity} given={getattr(active, 'dtype', type(active).__name__)}"
        )
    return _CheckedOptions(
        capacity, options.is_extension, options.auto_deactivate_on_failure, options.auto_sync_on_failure, active
    )


class ProposalStatus(IntEnum):
    """Outcome of a change of the active ranks."""

    Rejected = 0
    Applied = 1
    AppliedWithDroppedRanks = 2


ViewUpdateStatus = ProposalStatus


class SyncAfterFailureStatus(IntEnum):
    """Outcome of `sync_after_failure`."""

    Reconciled = 0
    NoPending = 1
    Rejected = 2


@dataclass
class ProposeViewUpdateResponse:
    """Response to `activate_ranks` and `deactivate_ranks`."""

    status: ProposalStatus = ProposalStatus.Rejected
    new_epoch: int = 0
    # In-group ranks that did not acknowledge in time, in ascending order.
    dropped_ranks: list[int] = field(default_factory=list)
    reject_reason: str = ""


@dataclass
class SyncAfterFailureResponse:
    """Response to `sync_after_failure`."""

    status: SyncAfterFailureStatus = SyncAfterFailureStatus.Rejected
    reject_reason: str = ""
