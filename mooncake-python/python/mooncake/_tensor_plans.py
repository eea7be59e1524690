"""Plans of tensors to read: the stored objects of a form that a program names, and the bytes of
each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mooncake import _mooncake
from mooncake._layout import (
    FULL,
    HEADER_SIZE,
    MANIFEST_SIZE,
    SHARD,
    Axis,
    Header,
    Manifest,
    Plan,
    Source,
    Strips,
    assemble,
    assemble_across,
    axes_of,
    is_shard,
    parallelism_manifest_key,
    shard_key,
    shard_range,
    split_dim_of,
    with_dim,
    word,
    writer_key,
    writer_manifest_key,
)
from mooncake._shards import _list_of, _Write

INVALID_PARAMS = -600
NOT_FOUND = -704
# Maximum number of shards that are looked up at a time.
LOOKUPS = 64


def words(keys: Sequence[str]) -> list[str]:
    """Returns the keys of a list.

    Raises `TypeError` for a string, whose characters are not keys, and for a container without
    order.
    """
    if isinstance(keys, str | bytes | bytearray | Mapping) or not hasattr(keys, "__getitem__"):
        raise TypeError(f"incompatible function arguments: keys must be a list of str, not {type(keys).__name__}")
    return [word(key) for key in keys]


def as_it_is(located: Any, header: Header) -> Plan:
    """Plans a tensor in the form in which one object holds it."""
    size = header.data_bytes
    if size == 0:
        return Plan(header)
    return Plan(header, [(located, Strips(header.data_offset, size, 1, size), Strips.whole(size))])


class TensorPlans(_mooncake.Store):
    """Plans of the tensors in a store."""

    def _invalid(self, why: str) -> int:
        return self._note(INVALID_PARAMS, why)

    def _unreadable(self, key: str, why: str) -> Plan | None:
        """Records why a tensor cannot be read, and returns `None`."""
        self._note(NOT_FOUND, f"cannot read tensor: {why}. key={word(key)!r}")
        return None

    def _plans(self, keys: list[str], targets: Any) -> list[Plan | None]:
        keys = words(keys)
        wanted = _list_of(targets, len(keys))
        if wanted is None:
            return [None] * len(keys)
        return [self._plan(key, target) for key, target in zip(keys, wanted)]

    def _plan(self, key: str, target: Any) -> Plan | None:
        """Plans the assembly of the form that a target names from stored objects."""
        if target is None:
            return self._stored(key)
        try:
            mode, parallelism = word(target.mode).lower(), target.parallelism
            axes = () if parallelism is None else axes_of(parallelism)
            if mode == "as_stored":
                return self._stored(key) if parallelism is None else None
            if mode == "shard":
                return self._shard_plan(key, axes) if axes else None
            if mode == "full":
                return self._full_plan(key, axes)
        except (ValueError, AttributeError, TypeError) as error:
            self._invalid(str(error))
        return None

    def _objects(self, keys: list[str], upto: int = HEADER_SIZE) -> list[tuple[Any, Header] | None]:
        """Returns the locations and headers of tensors."""
        return [None if one is None else (one[0], one[2]) for one in self._tensor_heads(keys, upto)]

    def _tensor_heads(self, keys: list[str], upto: int) -> list[tuple[Any, bytes, Header] | None]:
        """Returns the locations, the first bytes and the headers of tensors."""
        found: list[tuple[Any, bytes, Header] | None] = []
        for key, one in zip(keys, self._heads(keys, upto)):
            header = None if one is None else Header.parse(one[1], one[0].size)
            if one is not None and header is not None and header.is_quantized and len(one[1]) < header.data_offset:
                # The parameters of a tensor can be longer than its head.
                one = self._heads([key], header.data_offset)[0]
                header = None if one is None else Header.parse(one[1], one[0].size)
            found.append(None if one is None or header is None else (*one, header))
        return found

    def _stored(self, key: str) -> Plan | None:
        found = self._objects([key])[0]
        return None if found is None else as_it_is(*found)

    def _shard_plan(self, key: str, axes: tuple[Axis, ...]) -> Plan | None:
        exact = self._objects([shard_key(key, axes)])[0]
        if exact is not None and is_shard(exact[1], axes):
            return as_it_is(*exact)
        tp = next((axis for axis in axes if axis.kind == "tp"), None)
        if tp is None or tp.split_dim is None:
            return self._unreadable(key, "no such shard")
        if len(axes) == 1:
            written = self._objects([writer_key(key, tp.rank, tp.size, tp.split_dim)])[0]
            if written is not None and is_shard(written[1], axes):
                return as_it_is(*written)
        return self._rebuilt(key, axes, tp, False)

    def _full_plan(self, key: str, axes: tuple[Axis, ...]) -> Plan | None:
        if not axes:
            written = self._written(key, (), None)
            plan = self._stored(key) if written is None else written
            return self._only_shard(key) if plan is None else plan
        tp = next((axis for axis in axes if axis.kind == "tp"), None)
        return self._unreadable(key, "a whole is made of tp shards only") if tp is None else self._rebuilt(key, axes, tp, True)

    def _only_shard(self, key: str) -> Plan | None:
        """Plans the whole of a tensor that is stored as one shard of one."""
        manifest = self._manifest(parallelism_manifest_key(key))
        if manifest is None:
            return self._unreadable(key, "neither a whole tensor nor a manifest of its shards is stored")
        if manifest.shards != 1:
            return self._unreadable(key, f"it is stored in shards; name the parallelism. shards={manifest.shards}")
        tp = Axis("tp", 0, 0, 1, manifest.split_dim, 0)
        return self._rebuilt_from(manifest, key, (tp,), tp, True)

    def _written(self, key: str, axes: tuple[Axis, ...], tp: Axis | None) -> Plan | None:
        """Plans a shard of a tensor that several writers have stored, or the whole of it. Returns
        `None` if a part is missing.
        """
        manifest = self._manifest(writer_manifest_key(key))
        if manifest is None:
            return None
        dim, shards = manifest.split_dim, manifest.shards

        def of_rank(rank: int) -> tuple[str, list[Axis]]:
            return writer_key(key, rank, shards, dim), [Axis("tp", 0, rank, shards, dim, 0)]

        return self._assembled(of_rank, manifest, axes, tp)

    def _stored_manifests(self, manifests: Mapping[int, _Write]) -> dict[str, Manifest | None]:
        keys = [*dict.fromkeys(write.key for write in manifests.values())]
        # mooncake_client keeps a limited number of located objects.
        some = (keys[at : at + LOOKUPS] for at in range(0, len(keys), LOOKUPS))
        found = (pair for part in some for pair in zip(part, self._heads(part, MANIFEST_SIZE + 1)))
        return {key: None if one is None else Manifest.parse(one[1]) for key, one in found}

    def _manifest(self, key: str) -> Manifest | None:
        found = self._heads([key], 1 << 10)[0]
        return None if found is None else Manifest.parse(found[1])

    def _rebuilt(self, key: str, axes: tuple[Axis, ...], tp: Axis, full: bool) -> Plan | None:
        """Plans a shard of another size or dimension than the stored ones, or all of them together.
        """
        return self._rebuilt_from(self._shards_of(key, axes, tp), key, axes, tp, full)

    def _shards_of(self, key: str, axes: tuple[Axis, ...], tp: Axis) -> Manifest | None:
        """Returns the manifest of the stored shards, which the first one has if nothing else does.
        """
        manifest = self._manifest(parallelism_manifest_key(key))
        return self._manifest_of_shards(key, axes, tp) if manifest is None else manifest

    def _rebuilt_from(
        self, manifest: Manifest | None, key: str, axes: tuple[Axis, ...], tp: Axis, full: bool
    ) -> Plan | None:
        if manifest is None:
            return self._cut(key, axes, tp, full)
        dim, shards = manifest.split_dim, manifest.shards

        def of_rank(rank: int) -> tuple[str, list[Axis]]:
            stored = [replace(axis, rank=rank, size=shards, split_dim=dim, aux=0) if axis is tp else axis for axis in axes]
            return shard_key(key, stored), stored

        return self._assembled(of_rank, manifest, () if full else axes, tp)

    def _cut(self, key: str, axes: tuple[Axis, ...], tp: Axis, full: bool) -> Plan | None:
        """Plans a shard of a tensor that is stored as a whole, or by several writers."""
        whole = self._objects([word(key)])[0] if len(axes) == 1 else None
        if whole is None or whole[1].layout != FULL:
            written = self._written(key, () if full else axes, tp) if len(axes) == 1 else None
            return written or self._unreadable(key, "neither its shards nor a whole tensor are stored")
        located, header = whole
        shape = header.local_shape
        dim = split_dim_of(tp.split_dim, shape)
        begin, end = shard_range(shape[dim], tp.rank, tp.size)
        if full or tp.size == 1:
            return as_it_is(located, header)
        if header.is_quantized:
            return self._unreadable(key, "a quantized tensor has no shards")
        shard = Header(header.dtype, with_dim(shape, dim, end - begin), shape, SHARD, axes)
        return assemble(shard, dim, begin, end, [Source(located, header, 0, shape[dim])])

    def _tp_plan(self, key: str, rank: int, size: int, split_dim: int | None) -> Plan | None:
        """Plans the shard of a rank of `size` from shards of another size. Without `split_dim`, the
        dimension is that of the stored shards, or 0.
        """
        if not 0 <= rank < size:
            self._invalid(f"cannot read shard: there is no such rank. tp_rank={rank} tp_size={size}")
            return None
        axis = Axis("tp", 0, rank, size, split_dim or 0, 0)
        try:
            manifest = self._shards_of(key, (axis,), axis)
            if manifest is not None and split_dim is None:
                axis = replace(axis, split_dim=manifest.split_dim)
            return self._rebuilt_from(manifest, key, (axis,), axis, False)
        except ValueError as error:
            self._invalid(str(error))
            return None

    def _manifest_of_shards(self, key: str, axes: tuple[Axis, ...], tp: Axis) -> Manifest | None:
        """Derives the manifest of all shards from the first one."""
        first = self._objects([shard_key(key, [replace(axis, rank=0) if axis is tp else axis for axis in axes])])[0]
        of = first[1].axis("tp") if first is not None else None
        if first is None or of is None or of.split_dim is None or len(first[1].axes) != len(axes):
            return None
        return Manifest(first[1].dtype, of.split_dim, of.size, first[1].global_shape)

    def _assembled(
        self,
        of_rank: Callable[[int], tuple[str, list[Axis]]],
        manifest: Manifest,
        axes: tuple[Axis, ...],
        tp: Axis | None,
    ) -> Plan | None:
        """Plans a shard of the rank of `tp`, or the whole without `axes`, from shards whose keys
        and axes `of_rank` returns.

        Returns `None` if a shard is missing or does not match.
        """
        dim, shape, shards = manifest.split_dim, manifest.global_shape, manifest.shards
        each, rest = divmod(shape[dim], shards)
        if rest:
            return self._unreadable(of_rank(0)[0], f"its manifest is invalid. shape={shape} shards={shards}")
        cut, begin, end = dim, 0, shape[dim]
        if tp is not None:
            # This also holds for a full read: the dimension must divide into the requested number
            # of parts.
            of_tp = split_dim_of(tp.split_dim, shape)
            indices = shard_range(shape[of_tp], tp.rank, tp.size)
            # One shard of one is the whole, whatever its dimension.
            if axes and tp.size > 1:
                cut, (begin, end) = of_tp, indices
        # In a dimension without indices all shards are read, else those that contain some. Shards
        # along another dimension all contain some.
        ranks = range(begin // each, -(-end // each)) if each and cut == dim else range(shards)
        sources = []
        # The number of shards is untrusted, so a few are looked up at a time.
        for some in (ranks[at : at + LOOKUPS] for at in range(0, len(ranks), LOOKUPS)):
            stored = [of_rank(rank) for rank in some]
            for rank, (shard, of), found in zip(some, stored, self._objects([key for key, _ in stored])):
                if found is None:
                    return self._unreadable(shard, "a shard is missing, or is not a tensor")
                located, header = found
                # Shards of another layout may have the same keys.
                if (header.dtype, header.global_shape) != (manifest.dtype, shape) or not is_shard(header, of):
                    return self._unreadable(shard, f"a shard is of another layout than {shards} shards of {shape}")
                sources.append(Source(located, header, rank * each, (rank + 1) * each))
        local = with_dim(shape, cut, end - begin)
        header = Header(manifest.dtype, local, shape, SHARD if axes else 0, axes)
        if cut != dim:
            return assemble_across(header, cut, begin, dim, sources)
        return assemble(header, dim, begin, end, sources)
