"""Handles of stored batches as the catalogue keeps them, and the checks of its arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class Fragment:
    """Handle of a stored batch. The ID is the key of the manifest of its first stage, and stays
    when fields are added.
    """

    def __init__(self, handle: Any, id: str | None = None) -> None:
        self.handle = normalized(handle)
        stages = list(self.handle["stage_refs"].values())
        if id is None and len(stages) != 1:
            raise ValueError(f"a DataProto handle in the catalog must have exactly one stage, not {len(stages)}")
        self.id = str(stages[0]["manifest_key"]) if id is None else id

    @property
    def fields(self) -> list[str]:
        """Names of the fields."""
        return list(self.handle["field_index"])

    @property
    def rows(self) -> int:
        """Number of samples."""
        return int(self.handle["batch_size"])


def normalized(handle: Any) -> dict[str, Any]:
    """Returns a handle with all its parts, so that equal handles compare equal."""
    from mooncake.structured_object_store import export_dataproto_ref, import_dataproto_ref

    return export_dataproto_ref(import_dataproto_ref(handle))


def name_of(value: Any, what: str) -> str:
    """Returns a name. Raises `ValueError` for another value."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{what} must be a non-empty string, not {value!r}")
    return value


def names_of(values: Any, what: str) -> list[str]:
    """Returns a list of different names. Raises `ValueError` for other values."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise ValueError(f"{what} must be a sequence of non-empty strings, not {type(values).__name__}")
    names = list(values)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{what} must be non-empty strings")
    if len(set(names)) != len(names):
        raise ValueError(f"{what} must be unique")
    return names


def tags_of(tags: Any, keys: Sequence[str]) -> list[dict[str, Any]] | None:
    """Returns copies of the tags of some keys. Raises `TypeError` for one that is not a mapping."""
    if tags is None:
        return None
    given = list(tags)
    if len(given) != len(keys):
        raise ValueError(f"tags and keys must have the same length: {len(given)} and {len(keys)}")
    for tag in given:
        if not isinstance(tag, Mapping):
            raise TypeError(f"a tag must be a mapping, not {type(tag).__name__}")
    return [dict(tag) for tag in given]
