"""Storage groups: values that are written together and useful only together.

A configuration names the group of a write in its `group_ids`. An empty name stands for no group.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Sequence
from typing import Any

# Attributes of a configuration that cannot be copied as a whole.
_FIELDS = (
    "data_type",
    "delete_after_read",
    "group_ids",
    "keep",
    "nof_replica_num",
    "parent_key",
    "per_key_preferred_hca_names",
    "position",
    "prefer_alloc_in_same_node",
    "preferred_hca_names",
    "preferred_nof_segments",
    "preferred_segment",
    "preferred_segments",
    "replica_num",
    "residency_affinity_ids",
    "session_ids",
    "ttl_ms",
    "with_hard_pin",
    "with_soft_pin",
)


def _names(config: Any) -> list[str] | None:
    """Returns the names of the groups in a configuration, or `None` if it has none."""
    given = getattr(config, "group_ids", None)
    if given is None:
        return None
    try:
        names = [given] if isinstance(given, str) else list(given)
    except TypeError:
        names = [None]
    if not all(isinstance(name, str) for name in names):
        raise ValueError("cannot choose a storage group: config.group_ids must contain strings")
    if len(names) > 1:
        raise ValueError(
            f"cannot choose a storage group: config.group_ids has {len(names)} names; a structured object takes one"
        )
    return names


def group_of(config: Any) -> str | None:
    """Returns the group of a new batch: the one of its configuration, or a new one. `None` means
    that the batch has no group.
    """
    names = _names(config)
    if not names:
        return f"structured-{uuid.uuid4().hex}"
    return names[0] or None


def in_group(config: Any, group: str | None) -> Any:
    """Returns the configuration of all writes to a batch of that group."""
    names = _names(config)
    if group is None:
        return config
    if names and names[0] not in ("", group):
        raise ValueError(f"config.group_ids conflicts with the storage group of the reference. config={names[0]!r} reference={group!r}")
    return _with_names(config, [group])


def of_one_key(config: Any, names: Sequence[str] | None = None) -> Any:
    """Returns the configuration for a write of one key. It names at most one group."""
    given = getattr(config, "group_ids", None)
    if names is None:
        found = _names(config)
        if found is None or (found and not isinstance(given, str)):
            return config
        names = found
    return _with_names(config, list(names) or None)


def _with_names(config: Any, names: list[str] | None) -> Any:
    made = _new() if config is None else _copied(config)
    made.group_ids = names
    return made


def _new() -> Any:
    from mooncake._mooncake import ReplicateConfig

    return ReplicateConfig()


def _copied(config: Any) -> Any:
    try:
        return copy.copy(config)
    except TypeError as error:
        try:
            made = type(config)()
        except Exception:
            raise TypeError(f"cannot copy the configuration: {error}") from error
    for name in _FIELDS:
        if hasattr(config, name):
            value = getattr(config, name)
            setattr(made, name, list(value) if isinstance(value, list) else value)
    return made
