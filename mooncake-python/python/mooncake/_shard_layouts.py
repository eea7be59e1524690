"""Layouts of the shards that calls write: those of one tensor must agree, so that readers can join
them.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mooncake._layout import Header, Manifest
from mooncake._mooncake import ReplicateConfig
from mooncake._shards import (
    _are_all_keys,
    _contradicts,
    _has_manifest,
    _has_rank_only,
    _is_alike,
    _is_of,
    _keys_of_ranks,
    _may_be_uneven,
    _rank_in,
    _rank_of,
    _Write,
)
from mooncake._tensor_plans import LOOKUPS, NOT_FOUND, TensorPlans


class ShardLayouts(TensorPlans):
    """Writes of tensors and their shards."""

    def _write_entries(
        self,
        upsert: bool,
        entries: Sequence[list[_Write] | int],
        config: ReplicateConfig | None,
        owners: list[Any] | None,
    ) -> list[int]:
        writes: list[_Write] = []
        groups: list[str] = []
        given = config.group_ids if config is not None else None
        for i, entry in enumerate(entries):
            if isinstance(entry, list):
                writes += entry
                groups += [given[i]] * len(entry) if given is not None else []
        if given is not None and config is not None:
            config = copy.copy(config)
            config.group_ids = groups
        codes = iter(self._write_strips(upsert, writes, config, owners) if writes else [])
        results = []
        for entry in entries:
            if isinstance(entry, int):
                results.append(entry)
                continue
            own = [next(codes) for _ in entry]
            results.append(next((code for code in own if code != 0), 0))
        return results

    def _of_one_layout(
        self, upsert: bool, entries: Sequence[list[_Write] | int], config: ReplicateConfig | None
    ) -> Sequence[list[_Write] | int]:
        """Refuses shards that contradict the manifest of their tensor, such as those of uneven
        length, which no reader could join. An upsert may begin another layout.

        The manifest is stored before the shards, and the first one counts. So of two programs that
        contradict each other, one is refused. A manifest of which no shard is stored any more does
        not count.
        """
        manifests = {i: one[-1] for i, one in enumerate(entries) if isinstance(one, list) and _has_manifest(one)}
        if not manifests:
            return entries
        stored = self._stored_manifests(manifests)
        absent = {i for i, write in manifests.items() if stored[write.key] is None and not write.only_replaces}
        left_over = set() if upsert else self._left_over(entries, manifests, stored)
        for replaces, some in ((False, absent), (True, left_over)):
            if some:
                codes = self._write_entries(replaces, [[manifests[i]] if i in some else 0 for i in range(len(entries))], config, [])
                entries = [code if code != 0 else entry for code, entry in zip(codes, entries)]
        if absent or left_over:
            stored = self._stored_manifests(manifests)
        shards = {i: entry for i in manifests if isinstance(entry := entries[i], list)}
        begins = self._beginnings(list(shards.values()), stored) if upsert else set()
        made: list[list[_Write] | int] = list(entries)
        # Tensors whose layout this call has decided.
        decided: set[str] = set()
        for i, entry in shards.items():
            write = entry[-1]
            own, found = Manifest.parse(write.header), stored[write.key]
            if found is None and write.only_replaces:
                made[i] = entry[:-1]
                continue
            if found is not None and _contradicts(entry, own, found) and (write.key in decided or write not in begins):
                made[i] = self._invalid(_contradiction(upsert, entry[0].key, found))
                continue
            decided.add(write.key)
            if upsert or found is None:
                stored[write.key] = own
        return made

    def _left_over(
        self, entries: Sequence[list[_Write] | int], manifests: Mapping[int, _Write], stored: Mapping[str, Manifest | None]
    ) -> set[int]:
        """Returns the positions of puts whose stored manifest is replaced: they contradict it, and
        all shards of it were removed or evicted.
        """
        # The first put of a tensor decides.
        first: dict[str, int] = {}
        for i, write in manifests.items():
            first.setdefault(write.key, i)
        contradicted: dict[int, tuple[list[_Write], Manifest]] = {}
        for i in first.values():
            entry, found = entries[i], stored[manifests[i].key]
            if isinstance(entry, list) and found is not None and _contradicts(entry, Manifest.parse(entry[-1].header), found):
                if _are_all_keys(entry[0], entry[-1]):
                    contradicted[i] = entry, found
        kept: set[str] = set()
        shards = [
            (entry[-1], key, found)
            for entry, found in contradicted.values()
            for key in _keys_of_ranks(entry[0], entry[-1], found.shards)
        ]
        for manifest, key, found, header in self._headers_of(shards):
            if manifest.key in kept:
                continue
            # A shard that is being written, or that cannot be read now, counts as stored.
            if header is None and self.get_size(key) != NOT_FOUND or header is not None and _is_of(header, found):
                kept.add(manifest.key)
        return {i for i in contradicted if manifests[i].key not in kept}

    def _beginnings(self, entries: list[list[_Write]], stored: Mapping[str, Manifest | None]) -> set[_Write]:
        """Returns the manifests of upserts that begin another layout than the stored one.

        An upsert does so with another number of shards or dimension, with all shards, if it
        replaces a shard of the stored layout, or if none of those is stored. An upsert of a shard
        that is missing does so, too, unless it looks like an uneven part of the stored tensor.
        Otherwise, it contradicts shards that other ranks have written before.
        """
        groups: dict[_Write, list[_Write]] = {}
        for *shards, manifest in entries:
            groups.setdefault(manifest, []).extend(shards)
        begins: set[_Write] = set()
        unsure: dict[_Write, tuple[Manifest, Manifest]] = {}
        for manifest, shards in groups.items():
            own, found = Manifest.parse(manifest.header), stored[manifest.key]
            if own is None or found is None or own == found:
                continue
            if not _is_alike(own, found) or len({_rank_of(shard, manifest) for shard in shards}) == own.shards:
                begins.add(manifest)
            else:
                unsure[manifest] = own, found
        # Manifests whose shards replace those of a third layout.
        others: set[_Write] = set()
        replaced = ((manifest, shard.key, found) for manifest, (_, found) in unsure.items() for shard in groups[manifest])
        for manifest, _, found, header in self._headers_of(replaced):
            if header is not None:
                (begins if _is_of(header, found) else others).add(manifest)
        for manifest, (own, found) in unsure.items():
            shard = groups[manifest][0]
            has_rank_only, is_missing = _has_rank_only(shard, manifest), manifest not in others
            # Other shards are cut from a whole, so they are even.
            if manifest in begins or (is_missing and not has_rank_only):
                begins.add(manifest)
                continue
            keys = _keys_of_ranks(shard, manifest, found.shards)
            known = self._headers_of((manifest, key, found) for key in keys)
            kept = (_rank_in(key, manifest) for _, key, _, header in known if header is not None and _is_of(header, found))
            if not is_missing:
                if next(kept, None) is None:
                    begins.add(manifest)
                continue
            mine, theirs = {_rank_of(shard, manifest) for shard in groups[manifest]}, {*kept}
            if not theirs or not _may_be_uneven(own, found, mine, theirs):
                begins.add(manifest)
        return begins

    def _headers_of(
        self, shards: Iterable[tuple[_Write, str, Manifest]]
    ) -> Iterator[tuple[_Write, str, Manifest, Header | None]]:
        """Yields the shards with their stored headers, if any. A few are looked up at a time."""
        left = iter(shards)
        while some := list(itertools.islice(left, LOOKUPS)):
            for one, found in zip(some, self._objects([key for _, key, _ in some])):
                yield (*one, None if found is None else found[1])


def _contradiction(upsert: bool, key: str, found: Manifest) -> str:
    call, cure = ("upsert", "remove the other shards first") if upsert else ("put", "upsert all shards")
    return (
        f"cannot {call} shard: other shards of its tensor have another layout. key={key!r} "
        f"shape={list(found.global_shape)} shards={found.shards} split_dim={found.split_dim}; "
        f"divide the dimension evenly, or {cure}"
    )
