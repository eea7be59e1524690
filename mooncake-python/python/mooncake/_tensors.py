"""Tensors in the store: whole, or in shards that several workers write and read. torch is imported
on first use.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mooncake import _mooncake, _safetensors
from mooncake._arrays import ArrayCalls
from mooncake._element_types import code_of
from mooncake._layout import FULL, HEADER_SIZE, Header, Plan
from mooncake._mooncake import ReplicateConfig
from mooncake._shard_layouts import ShardLayouts
from mooncake._shards import (
    _UNPUBLISHED,
    _empty,
    _is_of_size,
    _is_tensor,
    _Job,
    _job,
    _legacy,
    _list_of,
    _of_bytes,
    _parallel,
    _Tensor,
    _tensor_in_memory,
    _torch,
    _views,
    _whole,
    _why_unsupported,
    _Write,
)
from mooncake._tensor_plans import INVALID_PARAMS, as_it_is, words
from mooncake._types import also_named, number_of

# Objects up to this length are read in full with their headers.
_SMALL = 256 << 10
# Maximum number of tensors that are looked up before they are read. mooncake_client keeps a limited
# number of located objects.
_AT_ONCE = 4096


class TensorCalls(ArrayCalls, ShardLayouts):
    """Tensor calls of the store."""

    # Writing.

    def _store(
        self,
        upsert: bool,
        entries: Sequence[list[_Write] | int],
        config: ReplicateConfig | None,
        owners: list[Any] | None,
    ) -> list[int]:
        """Stores all writes of each entry. Returns the first nonzero code of each entry, or 0.

        An entry that is a number is returned as its own code.
        """
        given = config.group_ids if config is not None else None
        if given is not None and len(given) != len(entries):
            return [self._note(INVALID_PARAMS, f"group_ids and keys differ in number. group_ids={len(given)} keys={len(entries)}")] * len(entries)
        return self._write_entries(upsert, self._of_one_layout(upsert, entries, config), config, owners)

    def _entry(self, make: Callable[[], list[_Write]]) -> list[_Write] | int:
        """Returns the result of `make`, or the code of its failure."""
        try:
            return make()
        except (ValueError, AttributeError, TypeError) as error:
            return self._invalid(str(error))

    def _from_tensors(
        self,
        upsert: bool,
        keys: Sequence[str],
        tensors: Sequence[Any],
        config: ReplicateConfig | None,
        make: Callable[[int, str, _Tensor], list[_Write]],
    ) -> list[int]:
        keys = words(keys)
        if len(keys) != len(tensors):
            return [self._invalid(f"keys and tensors differ in number. keys={len(keys)} tensors={len(tensors)}")] * len(keys)
        entries: list[list[_Write] | int] = []
        owners = []
        for i, (key, value) in enumerate(zip(keys, tensors)):
            tensor = _tensor_in_memory(value)
            if tensor is None:
                entries.append(self._invalid(f"{key!r}: {_why_unsupported(value)}"))
                continue
            owners.append(tensor.owner)
            entries.append(self._entry(partial(make, i, key, tensor)))
        return self._store(upsert, entries, config, owners)

    def _in_buffer(self, buffer_ptr: int, size: int) -> _Tensor | None:
        """Returns the serialized tensor in registered memory, or `None` if there is none. Its local
        part counts as the whole.
        """
        header = self._header_at(buffer_ptr, size)
        if header is None:
            return None
        whole = replace(header, global_shape=header.local_shape, layout=FULL, axes=())
        return _Tensor(whole, buffer_ptr + header.data_offset, None, (buffer_ptr, size))

    def _header_at(self, pointer: int, size: int) -> Header | None:
        """Returns the header of a serialized tensor in memory, or `None` if there is none."""
        head = self._peek(pointer, HEADER_SIZE) if size >= HEADER_SIZE else None
        header = Header.parse(head, size) if head is not None else None
        if header is not None and header.is_quantized:
            head = self._peek(pointer, header.data_offset)
            header = Header.parse(head, size) if head is not None else None
        return header

    def _from_buffers(
        self,
        upsert: bool,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None,
        make: Callable[[int, str, _Tensor], list[_Write]],
    ) -> list[int]:
        keys = words(keys)
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [self._invalid("keys, buffers and sizes differ in number")] * len(keys)
        entries: list[list[_Write] | int] = []
        for i, (key, pointer, size) in enumerate(zip(keys, buffer_ptrs, sizes)):
            tensor = self._in_buffer(pointer, size)
            if tensor is None:
                entries.append(self._invalid(f"{key!r}: no serialized tensor in registered memory"))
                continue
            entries.append(self._entry(partial(make, i, key, tensor)))
        return self._store(upsert, entries, config, None)

    def _published(self, config: ReplicateConfig | None) -> bool:
        """Returns whether a configuration with segments names one for each replica."""
        if not isinstance(config, ReplicateConfig | None):
            raise TypeError(
                f"incompatible function arguments: config must be a ReplicateConfig, not {type(config).__name__}"
            )
        if config is None or not config.preferred_segments:
            return True
        return len(config.preferred_segments) == config.replica_num

    def _tensors(
        self, upsert: bool, keys: Sequence[str], tensors: list[Any], config: ReplicateConfig | None
    ) -> list[int]:
        if not isinstance(tensors, list):
            raise TypeError(
                f"incompatible function arguments: tensors_list must be a list, not {type(tensors).__name__}"
            )
        keys = words(keys)
        if not self._published(config):
            return [self._invalid(_UNPUBLISHED)] * len(keys)
        return self._from_tensors(upsert, keys, tensors, config, lambda _, key, tensor: [_whole(key, tensor)])

    def put_tensor(self, key: str, tensor: Any, config: ReplicateConfig | None = None) -> int:
        """Stores a whole tensor under a new key. Returns 0 or a negative code."""
        return self._tensors(False, [key], [tensor], config)[0]

    def batch_put_tensor(
        self, keys: list[str], tensors_list: list[Any], config: ReplicateConfig | None = None
    ) -> list[int]:
        """Runs `put_tensor` for many tensors."""
        return self._tensors(False, keys, tensors_list, config)

    def pub_tensor(self, key: str, tensor: Any, config: ReplicateConfig | None = None) -> int:
        """Stores a tensor like `put_tensor`, with the settings of `config`."""
        return self._tensors(False, [key], [tensor], config)[0]

    def batch_pub_tensor(
        self, keys: list[str], tensors_list: list[Any], config: ReplicateConfig | None = None
    ) -> list[int]:
        """Runs `pub_tensor` for many tensors."""
        return self._tensors(False, keys, tensors_list, config)

    def upsert_tensor(self, key: str, tensor: Any, config: ReplicateConfig | None = None) -> int:
        """Stores a whole tensor and replaces the previous value, if any."""
        return self._tensors(True, [key], [tensor], config)[0]

    def batch_upsert_tensor(
        self, keys: list[str], tensors_list: list[Any], config: ReplicateConfig | None = None
    ) -> list[int]:
        """Runs `upsert_tensor` for many tensors."""
        return self._tensors(True, keys, tensors_list, config)

    def upsert_pub_tensor(self, key: str, tensor: Any, config: ReplicateConfig | None = None) -> int:
        """Stores a tensor like `upsert_tensor`, with the settings of `config`."""
        return self._tensors(True, [key], [tensor], config)[0]

    def batch_upsert_pub_tensor(
        self, keys: list[str], tensors_list: list[Any], config: ReplicateConfig | None = None
    ) -> list[int]:
        """Runs `upsert_pub_tensor` for many tensors."""
        return self._tensors(True, keys, tensors_list, config)

    def _whole_from(
        self,
        upsert: bool,
        keys: list[str],
        buffer_ptrs: list[int],
        sizes: list[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        keys = words(keys)
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [self._invalid("keys, buffers and sizes differ in number")] * len(keys)
        if any(self._in_buffer(pointer, size) is None for pointer, size in zip(buffer_ptrs, sizes)):
            return [self._invalid("no serialized tensor in registered memory")] * len(keys)
        call = self.batch_upsert_from if upsert else self.batch_put_from
        return call(keys, buffer_ptrs, sizes, config)

    def put_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        """Stores a serialized tensor from registered memory."""
        return self._whole_from(False, [key], [buffer_ptr], [size])[0]

    def batch_put_tensor_from(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]:
        """Runs `put_tensor_from` for many tensors. An invalid one fails the whole call."""
        return self._whole_from(False, keys, buffer_ptrs, sizes)

    def upsert_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        """Stores a serialized tensor from registered memory and replaces the previous value, if
        any.
        """
        return self._whole_from(True, [key], [buffer_ptr], [size])[0]

    def batch_upsert_tensor_from(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]:
        """Runs `upsert_tensor_from` for many tensors. An invalid one fails the whole call."""
        return self._whole_from(True, keys, buffer_ptrs, sizes)

    def put_tensor_with_tp(self, key: str, tensor: Any, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0) -> int:
        """Stores the shards of all ranks of a whole tensor. `tp_rank` is ignored."""
        return self.batch_put_tensor_with_tp([key], [tensor], tp_rank, tp_size, split_dim)[0]

    def batch_put_tensor_with_tp(
        self, base_keys: list[str], tensors_list: list[Any], tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> list[int]:
        """Runs `put_tensor_with_tp` for many tensors."""
        return self.batch_pub_tensor_with_tp(base_keys, tensors_list, None, tp_rank, tp_size, split_dim)

    def pub_tensor_with_tp(
        self,
        key: str,
        tensor: Any,
        config: ReplicateConfig | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        """Stores shards like `put_tensor_with_tp`, with the settings of `config`."""
        return self.batch_pub_tensor_with_tp([key], [tensor], config, tp_rank, tp_size, split_dim)[0]

    def batch_pub_tensor_with_tp(
        self,
        base_keys: list[str],
        tensors_list: list[Any],
        config: ReplicateConfig | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """Runs `pub_tensor_with_tp` for many tensors."""
        _numbers(tp_rank=tp_rank, tp_size=tp_size, split_dim=split_dim)
        if not isinstance(tensors_list, list):
            raise TypeError("incompatible function arguments: tensors_list must be a list")
        base_keys = words(base_keys)
        if not self._published(config):
            return [self._invalid(_UNPUBLISHED)] * len(base_keys)
        return self._from_tensors(
            False, base_keys, tensors_list, config, lambda _, key, tensor: _legacy(key, tensor, tp_size, split_dim)
        )

    def put_tensor_with_tp_from(
        self, key: str, buffer_ptr: int, size: int, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> int:
        """Stores the shards of all ranks of a serialized whole tensor in registered memory."""
        return self.batch_put_tensor_with_tp_from([key], [buffer_ptr], [size], tp_rank, tp_size, split_dim)[0]

    def batch_put_tensor_with_tp_from(
        self,
        base_keys: list[str],
        buffer_ptrs: list[int],
        sizes: list[int],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """Runs `put_tensor_with_tp_from` for many tensors. Each succeeds or fails independently."""
        _numbers(tp_rank=tp_rank, tp_size=tp_size, split_dim=split_dim)
        return self._from_buffers(
            False,
            base_keys,
            buffer_ptrs,
            sizes,
            None,
            lambda _, key, tensor: _legacy(key, tensor, tp_size, split_dim),
        )

    def _parallel_tensors(
        self,
        upsert: bool,
        keys: list[str],
        tensors: list[Any],
        parallelisms: Any,
        config: ReplicateConfig | None,
        writer_partitions: Any,
    ) -> list[int]:
        if not isinstance(tensors, list):
            raise TypeError("incompatible function arguments: tensors_list must be a list")
        keys, published = words(keys), self._published(config)
        axes, writers = _list_of(parallelisms, len(keys)), _list_of(writer_partitions, len(keys))
        if axes is None or writers is None:
            return [self._invalid("layouts or partitions and keys differ in number")] * len(keys)
        return self._from_tensors(
            upsert,
            keys,
            tensors,
            config,
            lambda i, key, tensor: _parallel(key, tensor, axes[i], writers[i], False, published),
        )

    def _parallel_buffers(
        self,
        upsert: bool,
        keys: list[str],
        buffer_ptrs: list[int],
        sizes: list[int],
        parallelisms: Any,
        config: ReplicateConfig | None,
        writer_partitions: Any,
    ) -> list[int]:
        keys, published = words(keys), self._published(config)
        axes, writers = _list_of(parallelisms, len(keys)), _list_of(writer_partitions, len(keys))
        if axes is None or writers is None:
            return [self._invalid("layouts or partitions and keys differ in number")] * len(keys)
        # As in Mooncake C++, an invalid tensor fails the whole call if there are no lists.
        if parallelisms is None and writer_partitions is None:
            if not published:
                return [self._invalid(_UNPUBLISHED)] * len(keys)
            return self._whole_from(upsert, keys, buffer_ptrs, sizes, config)
        return self._from_buffers(
            upsert,
            keys,
            buffer_ptrs,
            sizes,
            config,
            lambda i, key, tensor: _parallel(key, tensor, axes[i], writers[i], True, published),
        )

    def put_tensor_with_parallelism(
        self,
        key: str,
        tensor: Any,
        parallelism: Any = None,
        config: ReplicateConfig | None = None,
        writer_partition: Any = None,
    ) -> int:
        """Stores a tensor, or the shard of it that `parallelism` or `writer_partition` names."""
        return self._parallel_tensors(False, [key], [tensor], [parallelism], config, [writer_partition])[0]

    @also_named(tensors="tensors_list")
    def batch_put_tensor_with_parallelism(
        self,
        keys: list[str],
        tensors_list: list[Any],
        parallelisms: Any = None,
        config: ReplicateConfig | None = None,
        writer_partitions: Any = None,
    ) -> list[int]:
        """Runs `put_tensor_with_parallelism` for many tensors."""
        return self._parallel_tensors(False, keys, tensors_list, parallelisms, config, writer_partitions)

    def upsert_tensor_with_parallelism(
        self,
        key: str,
        tensor: Any,
        parallelism: Any = None,
        config: ReplicateConfig | None = None,
        writer_partition: Any = None,
    ) -> int:
        """Stores like `put_tensor_with_parallelism` and replaces the previous value, if any."""
        return self._parallel_tensors(True, [key], [tensor], [parallelism], config, [writer_partition])[0]

    @also_named(tensors="tensors_list")
    def batch_upsert_tensor_with_parallelism(
        self,
        keys: list[str],
        tensors_list: list[Any],
        parallelisms: Any = None,
        config: ReplicateConfig | None = None,
        writer_partitions: Any = None,
    ) -> list[int]:
        """Runs `upsert_tensor_with_parallelism` for many tensors."""
        return self._parallel_tensors(True, keys, tensors_list, parallelisms, config, writer_partitions)

    def put_tensor_with_parallelism_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        parallelism: Any = None,
        config: ReplicateConfig | None = None,
        writer_partition: Any = None,
    ) -> int:
        """Stores a serialized whole tensor from registered memory, or the named shards of it."""
        return self._parallel_buffers(False, [key], [buffer_ptr], [size], [parallelism], config, [writer_partition])[0]

    def batch_put_tensor_with_parallelism_from(
        self,
        keys: list[str],
        buffer_ptrs: list[int],
        sizes: list[int],
        parallelisms: Any = None,
        config: ReplicateConfig | None = None,
        writer_partitions: Any = None,
    ) -> list[int]:
        """Runs `put_tensor_with_parallelism_from` for many tensors."""
        return self._parallel_buffers(False, keys, buffer_ptrs, sizes, parallelisms, config, writer_partitions)

    def upsert_tensor_with_parallelism_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        parallelism: Any = None,
        config: ReplicateConfig | None = None,
        writer_partition: Any = None,
    ) -> int:
        """Stores like `put_tensor_with_parallelism_from` and replaces the previous value, if any.
        """
        return self._parallel_buffers(True, [key], [buffer_ptr], [size], [parallelism], config, [writer_partition])[0]

    def batch_upsert_tensor_with_parallelism_from(
        self,
        keys: list[str],
        buffer_ptrs: list[int],
        sizes: list[int],
        parallelisms: Any = None,
        config: ReplicateConfig | None = None,
        writer_partitions: Any = None,
    ) -> list[int]:
        """Runs `upsert_tensor_with_parallelism_from` for many tensors."""
        return self._parallel_buffers(True, keys, buffer_ptrs, sizes, parallelisms, config, writer_partitions)

    # Reading.

    def get_tensor(self, key: str) -> Any:
        """Returns the tensor of an object, or `None` if the key does not exist or its value is not
        a tensor.
        """
        return self.batch_get_tensor([key])[0]

    def batch_get_tensor(self, keys: list[str]) -> list[Any]:
        """Runs `get_tensor` for many keys."""
        return self._tensors_of(keys)

    def _tensors_of(self, keys: list[str], of_shard: Callable[[Header], bool] | None = None) -> list[Any]:
        if len(keys) <= _AT_ONCE:
            return self._located_tensors(keys, of_shard)
        tensors: list[Any] = []
        for at in range(0, len(keys), _AT_ONCE):
            tensors += self._located_tensors(keys[at : at + _AT_ONCE], of_shard)
        return tensors

    def _located_tensors(self, keys: list[str], of_shard: Callable[[Header], bool] | None = None) -> list[Any]:
        """Looks up all keys, and then reads their tensors, except those that `of_shard` refuses."""
        tensors: list[Any] = [None] * len(keys)
        jobs: list[_Job] = []
        of: list[int] = []
        for i, found in enumerate(self._tensor_heads(keys, _SMALL)):
            if found is None:
                continue
            located, head, header = found
            if of_shard is not None and not of_shard(header):
                continue
            if len(head) == located.size:
                tensors[i] = self._made(_of_bytes, header, memoryview(head)[header.data_offset :])
                continue
            tensors[i] = self._made(_empty, header)
            if tensors[i] is None:
                continue
            jobs.append(_job(tensors[i].data_ptr(), as_it_is(located, header)))
            of.append(i)
        self._materialize(jobs, of, tensors)
        return tensors

    def _made(self, make: Callable[..., Any], *arguments: Any) -> Any:
        """Returns a new tensor, or `None` if this torch lacks its type."""
        try:
            return make(*arguments)
        except ValueError as error:
            self._invalid(str(error))
            return None

    def _materialize(self, jobs: list[_Job], of: list[int], tensors: list[Any]) -> None:
        """Reads into new tensors. A tensor that cannot be read becomes `None`."""
        if not jobs:
            return
        for i, code in zip(of, self._read_strips(jobs, [tensors[i] for i in of])):
            if code != 0:
                tensors[i] = None

    def get_tensor_into(self, key: str, buffer_ptr: int, size: int) -> Any:
        """Reads an object into registered memory.

        Returns a tensor over its data in that memory, which the caller must keep, or `None`.
        """
        return self.batch_get_tensor_into([key], [buffer_ptr], [size])[0]

    @also_named(base_keys="keys")
    def batch_get_tensor_into(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[Any]:
        """Runs `get_tensor_into` for many keys. Returns -600 for each if the lists differ in
        length.
        """
        return self._tensors_into(keys, buffer_ptrs, sizes, None)

    def _tensors_into(
        self,
        keys: list[str],
        buffer_ptrs: list[int],
        sizes: list[int],
        of_shard: Callable[[Header], bool] | None,
    ) -> list[Any]:
        keys = words(keys)
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [self._invalid("keys, buffers and sizes differ in number")] * len(keys)
        tensors: list[Any] = []
        for pointer, code in zip(buffer_ptrs, self.batch_get_into(keys, buffer_ptrs, sizes)):
            header = self._header_at(pointer, code)
            if header is None or (of_shard is not None and not of_shard(header)):
                tensors.append(None)
                continue
            tensors.append(self._made(_views, pointer + header.data_offset, header))
        return tensors

    @staticmethod
    def _tp_keys(keys: list[str], tp_rank: int, tp_size: int) -> list[str]:
        keys = words(keys)
        rank = number_of("tp_rank", tp_rank)
        return keys if number_of("tp_size", tp_size) <= 1 else [f"{key}_tp_{rank}" for key in keys]

    def _tp_plans(
        self, keys: list[str], found: list[Any], tp_rank: int, tp_size: int, split_dim: int | None
    ) -> list[Plan | None]:
        """Plans the shards that are not among the found ones, from shards of another size."""
        rank, size = (0, 1) if tp_size <= 1 else (int(tp_rank), int(tp_size))
        # One shard of one is the whole, whatever its dimension.
        split_dim = split_dim if size > 1 else None
        return [
            self._tp_plan(key, rank, size, split_dim) if one is None else None for key, one in zip(words(keys), found)
        ]

    def get_tensor_with_tp(self, key: str, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0) -> Any:
        """Returns the shard of a rank, also from shards of another size or dimension, or from the
        whole tensor.

        A `split_dim` of 0 stands for the dimension of the stored shards, if there are any. Returns
        `None` if there is no such shard.
        """
        return self._tp_tensors([key], tp_rank, tp_size, _named_dim(split_dim))[0]

    def batch_get_tensor_with_tp(self, base_keys: list[str], tp_rank: int = 0, tp_size: int = 1) -> list[Any]:
        """Runs `get_tensor_with_tp` for many keys. The dimension is that of the stored shards, or
        0.
        """
        return self._tp_tensors(base_keys, tp_rank, tp_size, None)

    def _tp_tensors(self, keys: list[str], tp_rank: int, tp_size: int, split_dim: int | None) -> list[Any]:
        tensors = self._tensors_of(self._tp_keys(keys, tp_rank, tp_size), _is_of_size(tp_size, split_dim))
        plans = self._tp_plans(keys, tensors, tp_rank, tp_size, split_dim)
        rebuilt = self._read_plans(plans) if any(plan is not None for plan in plans) else plans
        return [one if plan is None else other for one, plan, other in zip(tensors, plans, rebuilt)]

    def get_tensor_with_tp_into(
        self, key: str, buffer_ptr: int, size: int, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> Any:
        """Reads like `get_tensor_with_tp`, into registered memory."""
        return self._tp_tensors_into([key], [buffer_ptr], [size], tp_rank, tp_size, _named_dim(split_dim))[0]

    def batch_get_tensor_with_tp_into(
        self, base_keys: list[str], buffer_ptrs: list[int], sizes: list[int], tp_rank: int = 0, tp_size: int = 1
    ) -> list[Any]:
        """Runs `get_tensor_with_tp_into` for many keys."""
        return self._tp_tensors_into(base_keys, buffer_ptrs, sizes, tp_rank, tp_size, None)

    def _tp_tensors_into(
        self,
        keys: list[str],
        buffer_ptrs: list[int],
        sizes: list[int],
        tp_rank: int,
        tp_size: int,
        split_dim: int | None,
    ) -> list[Any]:
        stored = self._tp_keys(keys, tp_rank, tp_size)
        tensors = self._tensors_into(stored, buffer_ptrs, sizes, _is_of_size(tp_size, split_dim))
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return tensors
        plans = self._tp_plans(keys, tensors, tp_rank, tp_size, split_dim)
        rebuilt = self._read_plans_into(plans, buffer_ptrs, sizes)
        return [one if plan is None else other for one, plan, other in zip(tensors, plans, rebuilt)]

    def get_tensor_with_parallelism(self, key: str, target: Any = None) -> Any:
        """Returns the form of a tensor that `target` names: as stored, one shard, or the whole.

        Returns `None` if it does not exist.
        """
        return self.batch_get_tensor_with_parallelism([key], [target])[0]

    def batch_get_tensor_with_parallelism(self, keys: list[str], targets: Any = None) -> list[Any]:
        """Runs `get_tensor_with_parallelism` for many keys."""
        return self._read_plans(self._plans(keys, targets))

    def _read_plans(self, plans: list[Plan | None]) -> list[Any]:
        tensors: list[Any] = [None if plan is None else self._made(_empty, plan.header) for plan in plans]
        of = [i for i, plan in enumerate(plans) if tensors[i] is not None and plan is not None and plan.header.data_bytes]
        jobs = [_job(tensors[i].data_ptr(), plans[i]) for i in of]  # type: ignore[arg-type]
        self._materialize(jobs, of, tensors)
        return tensors

    def get_tensor_with_parallelism_into(self, key: str, buffer_ptr: int, size: int, target: Any = None) -> Any:
        """Reads like `get_tensor_with_parallelism`, into registered memory.

        Returns a tensor over its data in that memory, which the caller must keep, or `None`.
        """
        return self.batch_get_tensor_with_parallelism_into([key], [buffer_ptr], [size], [target])[0]

    def batch_get_tensor_with_parallelism_into(
        self, keys: list[str], buffer_ptrs: list[int], sizes: list[int], targets: Any = None
    ) -> list[Any]:
        """Runs `get_tensor_with_parallelism_into` for many keys."""
        keys = words(keys)
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [None] * len(keys)
        return self._read_plans_into(self._plans(keys, targets), buffer_ptrs, sizes)

    def _read_plans_into(self, plans: list[Plan | None], buffer_ptrs: list[int], sizes: list[int]) -> list[Any]:
        results: list[Any] = [None] * len(plans)
        ready = [
            (i, plan)
            for i, plan in enumerate(plans)
            if plan is not None and plan.header.packed_bytes <= sizes[i]
        ]
        jobs = [_job(buffer_ptrs[i] + plan.header.head_bytes, plan) for i, plan in ready]
        for (i, plan), code in zip(ready, self._read_strips(jobs) if jobs else []):
            # The header is written last, so that the memory contains a valid tensor only if all of
            # it is there.
            if code == 0 and plan is not None and self._poke(buffer_ptrs[i], plan.header.pack()):
                results[i] = self._made(_views, buffer_ptrs[i] + plan.header.head_bytes, plan.header)
        return results

    # Tensors in files, and on GPUs.

    def save_tensor_to_safetensor(self, key: str, file_name: str | None = None) -> int:
        """Writes a stored tensor to a safetensors file, which is named after the key by default.

        Returns 0, -1100 if the key does not exist, or -600.
        """
        return _safetensors.save(self, key, file_name)

    def load_tensor_from_safetensor(self, key: str | None = None, file_name: str = "") -> Any:
        """Stores a tensor of a safetensors file and returns it, or `None` if there is none.

        The tensor is the one named like the key, or else the first one of the file. Without a key,
        the name of the file is the key.
        """
        return _safetensors.load(self, key, file_name)

    def get_tensor_into_cuda(self, key: str, tensor: Any) -> int:
        """Reads a tensor into one on a GPU, of the same type and number of elements.

        Returns 0 or a negative code, which is -600 if the process cannot access a GPU.
        """
        return self.batch_get_tensor_into_cuda([key], [tensor])[0]

    def batch_get_tensor_into_cuda(self, keys: list[str], tensors_list: list[Any]) -> list[int]:
        """Runs `get_tensor_into_cuda` for many keys."""
        keys = words(keys)
        if len(keys) != len(tensors_list):
            return [self._invalid(f"keys and tensors differ in number. keys={len(keys)} tensors={len(tensors_list)}")] * len(keys)
        codes = [0] * len(keys)
        jobs, of = [], []
        for i, (found, tensor) in enumerate(zip(self._heads(keys, HEADER_SIZE), tensors_list)):
            if not _is_tensor(tensor) or _mooncake.device_of(tensor.data_ptr()) is None:
                codes[i] = self._invalid(f"{keys[i]!r}: not a tensor on a GPU that this process can access")
                continue
            if found is None:
                codes[i] = self._note(-704, f"no object with key {keys[i]!r}")
                continue
            located, head = found
            header = Header.parse(head, located.size)
            dtype = code_of(tensor.dtype)
            size = tensor.numel() * tensor.element_size()
            if header is None or header.is_quantized or header.dtype != dtype or header.data_bytes != size or not tensor.is_contiguous():
                codes[i] = self._invalid(f"{keys[i]!r}: destination differs in type or length, or is not contiguous")
                continue
            # Running work on the tensor completes before its bytes are overwritten.
            _torch().cuda.current_stream(tensor.device).synchronize()
            jobs.append(_job(tensor.data_ptr(), as_it_is(located, header)))
            of.append(i)
        for i, code in zip(of, self._read_strips(jobs, [tensors_list[i] for i in of]) if jobs else []):
            codes[i] = code
        return codes


def _numbers(**of: int) -> None:
    """Raises `TypeError` for arguments that are not 32-bit numbers, even if the call ignores them.
    """
    for name, value in of.items():
        number_of(name, value)


def _named_dim(split_dim: int) -> int | None:
    """Returns the dimension that a call of one key names, or `None` for 0, which is the default and
    has no effect in Mooncake C++. Raises `TypeError` for another type.
    """
    return number_of("split_dim", split_dim) or None


def _tensor_metadata_size() -> int:
    return HEADER_SIZE


def _serialize_tensor(tensor: Any) -> tuple[bytes, int, int, Any]:
    """Returns header, address and length of the data, and its owner. Raises `ValueError` for an
    unsupported tensor.
    """
    held = _tensor_in_memory(tensor)
    if held is None:
        raise ValueError(f"unsupported tensor type {type(tensor).__name__}")
    return held.header.pack(), held.address, held.header.data_bytes, held.owner


def _deserialize_tensor(data: bytes) -> Any:
    """Returns the tensor of its serialized form. Raises `ValueError` for invalid bytes."""
    data = bytes(data)
    header = Header.parse(data, len(data))
    if header is None:
        raise ValueError("invalid serialized tensor")
    return _of_bytes(header, data[header.data_offset :])
