"""Catalogue of stored batches: which batch and row holds each field of a key.

`DataProtoCatalog` keeps its state in memory and does no I/O. One process hosts it.
`DataProtoCatalogTransfer` writes batches and publishes them in a catalogue anywhere.
"""

from __future__ import annotations

import copy
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mooncake._catalog_fragments import Fragment, name_of, names_of, normalized, tags_of

_LOG = logging.getLogger(__name__)
# Attribute of an object with the read results whose memory it uses.
_RESULTS = "_mooncake_catalog_results"
_ATTEMPTS = 2

__all__ = ["DataProtoCatalog", "DataProtoCatalogTransfer"]

# Fragment and row.
_Location = tuple[str, int]
Handles = list[dict[str, Any]]


@dataclass
class _Key:
    """Tag of a key, and the location of each of its fields."""

    tag: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, _Location] = field(default_factory=dict)


class DataProtoCatalog:
    """Locations of the fields of keys in stored batches.

    A stored batch with one stage is a fragment. A fragment is forgotten when no field is in it and
    no read pins it. The handle of a published one is then reported as retired, until that is
    acknowledged. Calls must not run at the same time.
    """

    def __init__(self) -> None:
        self._partitions: dict[str, dict[str, _Key]] = {}
        self._fragments: dict[str, Fragment] = {}
        # Fragments whose batches the catalogue's users remove.
        self._managed: set[str] = set()
        self._retired: dict[str, dict[str, Any]] = {}
        # Fragments in use by each read.
        self._pins: dict[int, list[str]] = {}
        self._last_token = 0
        self._publications: dict[str, dict[str, Any]] = {}
        self._is_drained = False

    # Changes.

    def update(self, partition: str, keys: Sequence[str], *, tags: Any = None, handle: Any = None) -> dict[str, Any]:
        """Merges tags into those of keys, and points the fields of a handle to its rows."""
        return self._update(partition, keys, tags, handle, is_managed=False)

    def publish(
        self, operation_id: str, partition: str, keys: Sequence[str], *, tags: Any = None, handle: Any = None
    ) -> dict[str, Any]:
        """Updates keys like `update`, with a batch that is removed when nothing refers to it.

        A repeated operation returns its first result, until `ack_publication`.
        """
        name_of(operation_id, "operation id")
        if operation_id not in self._publications:
            self._publications[operation_id] = self._update(partition, keys, tags, handle, is_managed=True)
        return copy.deepcopy(self._publications[operation_id])

    def publish_append(
        self,
        operation_id: str,
        fragment_id: str,
        partition: str,
        keys: Sequence[str],
        *,
        previous_handle: Any,
        handle: Any,
    ) -> dict[str, Any]:
        """Replaces the handle of a published batch by one with more fields.

        A conflict with other changes is reported as `append_rejected` in the result.
        """
        name_of(operation_id, "operation id")
        if operation_id not in self._publications:
            made = self._append(name_of(fragment_id, "fragment id"), partition, keys, previous_handle, handle)
            self._publications[operation_id] = made
        return copy.deepcopy(self._publications[operation_id])

    def ack_publication(self, operation_id: str) -> None:
        """Forgets the result of an operation."""
        self._publications.pop(name_of(operation_id, "operation id"), None)

    def remove(self, partition: str, keys: Sequence[str]) -> dict[str, Any]:
        """Removes keys. Unknown ones are ignored."""
        name_of(partition, "partition")
        listed = names_of(keys, "keys")
        known = self._partitions.get(partition, {})
        for key in listed:
            known.pop(key, None)
        if not known:
            self._partitions.pop(partition, None)
        return {"retired_handles": self._collect()}

    def drain(self) -> dict[str, Any]:
        """Forgets everything and refuses later updates. Raises `RuntimeError` while reads pin
        fragments.
        """
        if self._pins:
            raise RuntimeError(f"cannot drain the catalog: {len(self._pins)} reads pin fragments; call release_read first")
        self._is_drained = True
        self._partitions.clear()
        return {"retired_handles": self._collect()}

    def _update(
        self, partition: str, keys: Sequence[str], tags: Any, handle: Any, is_managed: bool
    ) -> dict[str, Any]:
        name_of(partition, "partition")
        listed = names_of(keys, "keys")
        given = tags_of(tags, listed)
        if given is None and handle is None:
            raise ValueError("an update of the catalog needs tags, a handle, or both")
        fragment = None if handle is None else self._checked(Fragment(handle), listed, is_managed)
        self._refuse_if_drained()
        known = self._partitions.setdefault(partition, {})
        if fragment is not None:
            self._fragments[fragment.id] = fragment
            if is_managed:
                self._managed.add(fragment.id)
        for row, key in enumerate(listed):
            entry = known.setdefault(key, _Key())
            if given is not None:
                entry.tag.update(given[row])
            if fragment is not None:
                entry.fields.update({name: (fragment.id, row) for name in fragment.fields})
        return self._changed(listed, known)

    def _refuse_if_drained(self) -> None:
        if self._is_drained:
            raise RuntimeError("cannot update the catalog: it is drained")

    def _checked(self, fragment: Fragment, keys: Sequence[str], is_managed: bool) -> Fragment:
        """Checks a fragment against the keys that it describes and the fragments that are known."""
        if fragment.rows != len(keys):
            raise ValueError(f"the batch size of the handle must be the number of keys: {fragment.rows} and {len(keys)}")
        if not fragment.fields:
            raise ValueError("the handle has no fields")
        if fragment.id in self._retired:
            raise ValueError(f"fragment {fragment.id!r} is retired; call ack_retired first")
        known = self._fragments.get(fragment.id)
        if known is not None and known.handle != fragment.handle:
            raise ValueError(f"fragment collision: {fragment.id!r} is known with another handle")
        if known is not None and (fragment.id in self._managed) != is_managed:
            kinds = ("managed", "unmanaged") if is_managed else ("unmanaged", "managed")
            raise ValueError(f"fragment {fragment.id!r} cannot be {kinds[0]}: it is {kinds[1]}")
        return fragment

    def _append(
        self, fragment_id: str, partition: str, keys: Sequence[str], previous_handle: Any, handle: Any
    ) -> dict[str, Any]:
        name_of(partition, "partition")
        listed = names_of(keys, "keys")
        # The fragment keeps its ID, although its batch has another one.
        fragment, previous = Fragment(handle, fragment_id), normalized(previous_handle)
        known = self._partitions.get(partition, {})
        rejected = self._why_not(partition, listed, known, previous, fragment)
        if rejected is not None:
            return {"append_rejected": rejected}
        added = [name for name in fragment.fields if name not in previous["field_index"]]
        self._fragments[fragment_id] = fragment
        for row, key in enumerate(listed):
            known[key].fields.update({name: (fragment_id, row) for name in added})
        return self._changed(listed, known)

    def _changed(self, keys: list[str], known: Mapping[str, _Key]) -> dict[str, Any]:
        """Returns the result of a change of these keys."""
        return {
            "keys": keys,
            "tags": [copy.deepcopy(known[key].tag) for key in keys],
            "fields": list(dict.fromkeys(name for key in keys for name in known[key].fields)),
            "retired_handles": self._collect(),
        }

    def _why_not(
        self,
        partition: str,
        keys: Sequence[str],
        known: Mapping[str, _Key],
        previous: Mapping[str, Any],
        fragment: Fragment,
    ) -> str | None:
        """Returns why an append is refused, if it is."""
        current = self._fragments.get(fragment.id)
        if self._is_drained:
            return "the catalog is drained"
        if current is None or fragment.id not in self._managed or current.handle != previous:
            return f"stale fragment: {fragment.id!r} is not published with the previous handle"
        handle = fragment.handle
        if fragment.rows != current.rows or fragment.rows != len(keys):
            return f"batch size {fragment.rows} does not match {current.rows} rows and {len(keys)} keys"
        if not handle["partition"] == previous["partition"] == partition:
            return f"partition {handle['partition']!r} does not match {previous['partition']!r} or {partition!r}"
        if handle.get("storage_group_id") != previous.get("storage_group_id"):
            return "the storage group differs from that of the previous handle"
        moved = [name for name, at in previous["field_index"].items() if handle["field_index"].get(name) != at]
        if moved:
            return f"locations of fields have changed: {moved}"
        missing = [key for key in keys if key not in known]
        return f"keys were not found in partition {partition!r}: {missing}" if missing else None

    # Reads.

    def resolve(
        self, partition: str, keys: Sequence[str], fields: Sequence[str] | None = None, *, pin: bool = False
    ) -> dict[str, Any]:
        """Returns the locations of fields of keys, with the handles to read them by.

        With `pin`, the handles stay valid until `release_read` of the returned token.
        """
        name_of(partition, "partition")
        listed = names_of(keys, "keys")
        known = self._partitions.get(partition, {})
        missing = [key for key in listed if key not in known]
        if missing:
            raise ValueError(f"keys were not found in partition {partition!r}: {missing}")
        entries = [known[key] for key in listed]
        names = (
            list(dict.fromkeys(name for entry in entries for name in entry.fields))
            if fields is None
            else names_of(fields, "fields")
        )
        if not names:
            raise ValueError(f"keys of partition {partition!r} do not contain any fields: {listed}")
        groups: dict[tuple[_Location, ...], list[str]] = {}
        for name in names:
            absent = [key for key, entry in zip(listed, entries) if name not in entry.fields]
            if absent:
                raise ValueError(f"field {name!r} is not ready for keys {absent}")
            groups.setdefault(tuple(entry.fields[name] for entry in entries), []).append(name)
        ids = list(dict.fromkeys(of for locations in groups for of, _ in locations))
        result: dict[str, Any] = {
            "keys": listed,
            "tags": [copy.deepcopy(entry.tag) for entry in entries],
            "fields": names,
            "field_groups": [
                {"fields": some, "locations": list(locations)} for locations, some in groups.items()
            ],
            "handles": {of: copy.deepcopy(self._fragments[of].handle) for of in ids},
            "meta_info": self._meta_info(ids),
        }
        if pin:
            self._last_token += 1
            self._pins[self._last_token] = ids
            result["read_token"] = self._last_token
        return result

    def _meta_info(self, ids: Iterable[str]) -> dict[str, Any]:
        from mooncake._dataproto import import_dataproto_ref

        merged: dict[str, Any] = {}
        known: dict[str, Any] = {}
        for of in ids:
            handle = self._fragments[of].handle
            for name, value in import_dataproto_ref(handle).meta_info.items():
                # Values of different types do not conflict if JSON has the same for them. The types
                # are those of the first batch.
                plain = handle["meta_info"][name]
                if known.setdefault(name, plain) != plain:
                    raise ValueError(f"batches have different values of meta_info {name!r}")
                merged.setdefault(name, copy.deepcopy(value))
        return merged

    def list(self, partition: str | None = None) -> dict[str, dict[str, Any]]:
        """Returns the tags of all keys, or of those of one partition."""
        names = list(self._partitions) if partition is None else [name_of(partition, "partition")]
        return {
            name: {key: copy.deepcopy(entry.tag) for key, entry in self._partitions[name].items()}
            for name in names
            if name in self._partitions
        }

    # Lifetime of fragments.

    def release_read(self, read_token: int) -> dict[str, Any]:
        """Ends the use of fragments by a read. Another call does nothing."""
        self._pins.pop(read_token, None)
        return {"retired_handles": self._collect()}

    def ack_retired(self, handles: Iterable[Any]) -> dict[str, Any]:
        """Forgets handles whose batches were removed."""
        removed = []
        for handle in map(normalized, handles):
            ids = [of for of, known in self._retired.items() if known == handle]
            others = [one["manifest_key"] for one in handle["stage_refs"].values() if one["manifest_key"] in self._retired]
            if not ids and others:
                raise ValueError(f"retired fragment mismatch: {others[0]!r} is retired with another handle")
            removed += ids
        for of in removed:
            self._retired.pop(of, None)
        return {"retired_handles": self._collect()}

    def _collect(self) -> Handles:
        """Drops fragments without users. Returns the handles that are retired."""
        used = {of for entries in self._partitions.values() for entry in entries.values() for of, _ in entry.fields.values()}
        used |= {of for pinned in self._pins.values() for of in pinned}
        for of in [of for of in self._fragments if of not in used]:
            fragment = self._fragments.pop(of)
            if of in self._managed:
                self._managed.discard(of)
                self._retired[of] = fragment.handle
        return copy.deepcopy(list(self._retired.values()))


class DataProtoCatalogTransfer:
    """Writer of batches that publishes them in a catalogue, and removes those that it retires.

    `catalog_call(method, *args, **kwargs)` calls the catalogue, wherever it is.
    """

    def __init__(self, transfer: Any, catalog_call: Callable[..., Any]) -> None:
        self._transfer, self._call = transfer, catalog_call
        # Publications that failed, and acknowledgements that are due, by operation.
        self._publications: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {}
        self._acknowledgements: dict[str, None] = {}
        self._results: list[Any] = []

    # Writing.

    def put(self, data: Any, *, partition: str, keys: Sequence[str], tags: Any = None, **put_kwargs: Any) -> dict[str, Any]:
        """Stores a batch with one row for each key, and publishes it. Without data, only tags are
        published.
        """
        self._settle()
        listed = names_of(keys, "keys")
        handle = None
        if data is None and tags is None:
            raise ValueError("an update of the catalog needs tags or data")
        if data is not None:
            if len(data) != len(listed):
                raise ValueError(f"data and keys must have the same length: {len(data)} and {len(listed)}")
            ref = self._transfer.put(data, type="dataproto", partition=partition, **put_kwargs)
            handle = _exported(ref)
        return self._publish("publish", (partition, listed), {"tags": tags, "handle": handle})

    def append(
        self,
        fragment_id: str,
        handle: Any,
        data: Any,
        *,
        partition: str,
        keys: Sequence[str],
        stage: str,
        **append_kwargs: Any,
    ) -> dict[str, Any]:
        """Adds fields to a published batch. Raises `ValueError` if others have changed it."""
        self._settle()
        if "overwrite" in append_kwargs:
            raise ValueError("cannot append to a published batch: overwrite is not supported")
        previous = normalized(handle)
        if previous["partition"] != partition:
            raise ValueError(f"partition {partition!r} is not that of the handle: {previous['partition']!r}")
        found = self._call("resolve", partition, list(keys), list(previous["field_index"]))
        if found["handles"].get(fragment_id) != previous:
            raise ValueError(f"stale fragment: {fragment_id!r} is not published with this handle")
        ref = self._transfer.append_dataproto_fields(previous, data, stage=stage, **append_kwargs)
        appended = _exported(ref)
        result = self._publish(
            "publish_append",
            (fragment_id, partition, list(keys)),
            {"previous_handle": previous, "handle": appended},
        )
        if "append_rejected" in result:
            self._transfer.cleanup_dataproto_append(previous, appended)
            raise ValueError(result["append_rejected"])
        return result

    def _publish(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        operation = uuid.uuid4().hex
        for attempt in range(_ATTEMPTS):
            try:
                result: dict[str, Any] = self._call(method, operation, *args, **kwargs)
                break
            except Exception:
                if attempt + 1 == _ATTEMPTS:
                    self._publications[operation] = (method, args, kwargs)
                    raise
        self._published(operation, result)
        return result

    def _published(self, operation: str, result: Mapping[str, Any]) -> None:
        """Removes what a publication has retired, and acknowledges the publication."""
        self._clean(result.get("retired_handles", ()))
        self._acknowledgements[operation] = None
        self._acknowledge(operation)

    def _acknowledge(self, operation: str) -> None:
        try:
            self._call("ack_publication", operation)
        except Exception as error:
            _LOG.warning("acknowledgement failed", extra={"operation": operation}, exc_info=error)
            return
        self._acknowledgements.pop(operation, None)

    def _settle(self) -> None:
        """Repeats acknowledgements and publications that have failed."""
        for operation in list(self._acknowledgements):
            self._acknowledge(operation)
        last: Exception | None = None
        for operation, (method, args, kwargs) in list(self._publications.items()):
            try:
                result = self._call(method, operation, *args, **kwargs)
            except Exception as error:
                last = error
                continue
            del self._publications[operation]
            if "append_rejected" in result:
                self._transfer.cleanup_dataproto_append(kwargs["previous_handle"], kwargs["handle"])
            self._published(operation, result)
        if self._publications:
            raise RuntimeError(f"{len(self._publications)} publications are pending: {last}") from last

    # Reading.

    def resolve(self, partition: str, keys: Sequence[str], fields: Sequence[str] | None = None) -> dict[str, Any]:
        """Returns the locations of fields of keys, and pins the batches until `release_read`."""
        found: dict[str, Any] = self._call("resolve", partition, keys, fields, pin=True)
        return found

    def release_read(self, read_token: int) -> None:
        """Ends a read, and removes batches that it was the last to use."""
        self._clean(self._call("release_read", read_token)["retired_handles"])

    def remove(self, partition: str, keys: Sequence[str]) -> None:
        """Removes keys, and the batches that nothing else refers to."""
        self._clean(self._call("remove", partition, keys)["retired_handles"])

    def list(self, partition: str | None = None) -> dict[str, dict[str, Any]]:
        """Returns the tags of all keys, or of those of one partition."""
        found: dict[str, dict[str, Any]] = self._call("list", partition)
        return found

    def _clean(self, handles: Iterable[Any], strict: bool = False) -> None:
        """Removes retired batches. A batch that cannot be removed stays retired."""
        removed, failed = [], None
        for handle in handles:
            try:
                self._transfer.cleanup_dataproto(handle)
                removed.append(handle)
            except Exception as error:
                failed = error
                _LOG.warning("cleanup of a retired batch failed", exc_info=error)
        if removed:
            try:
                self._call("ack_retired", removed)
            except Exception as error:
                failed = error
                _LOG.warning("acknowledgement of retired batches failed", exc_info=error)
        if strict and failed is not None:
            raise RuntimeError(f"retired batches remain: {failed}") from failed

    # Results in the memory of a pool.

    def attach_results(self, output: Any, results: Iterable[Any]) -> None:
        """Remembers the results whose memory an object uses."""
        setattr(output, _RESULTS, [*getattr(output, _RESULTS, ()), *results])

    def release_result(self, output: Any) -> None:
        """Releases the results of an object."""
        results = getattr(output, _RESULTS, None)
        if results is not None:
            setattr(output, _RESULTS, [])
            self.discard_results(results)

    def discard_results(self, results: Iterable[Any], *, strict: bool = False) -> None:
        """Releases results. A result that cannot be released is tried again later.

        Raises `RuntimeError` if some remain and `strict` is true.
        """
        left, failed = [], None
        for result in results:
            for attempt in range(_ATTEMPTS):
                try:
                    self._transfer.release_result(result)
                    break
                except Exception as error:
                    failed = error
                    if attempt + 1 == _ATTEMPTS:
                        left.append(result)
        self._results += left
        if left:
            _LOG.warning("release of results failed", exc_info=failed)
        if strict and left:
            raise RuntimeError(f"{len(left)} results could not be released: {failed}") from failed

    # End.

    def drain(self) -> None:
        """Empties the catalogue and removes all published batches."""
        for attempt in range(_ATTEMPTS):
            try:
                self._settle()
                self._clean(self._call("drain")["retired_handles"], strict=True)
                return
            except Exception:
                if attempt + 1 == _ATTEMPTS:
                    raise

    def close(self) -> None:
        """Completes everything that is pending. Raises `RuntimeError` if something remains."""
        results, self._results = self._results, []
        self.discard_results(results, strict=True)
        self._settle()
        if self._acknowledgements:
            raise RuntimeError(f"{len(self._acknowledgements)} acknowledgements are pending")


def _exported(ref: Any) -> dict[str, Any]:
    from mooncake.structured_object_store import export_dataproto_ref

    return export_dataproto_ref(ref)
