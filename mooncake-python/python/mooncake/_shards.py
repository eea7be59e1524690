"""Tensors in memory: the objects that are written from them, and the tensors that are created from
objects.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

from mooncake import _mooncake, _quantized
from mooncake._element_types import DTYPES, code_of, torch_dtype
from mooncake._layout import (
    HEADER_SIZE,
    MAX_DIMS,
    SHARD,
    Axis,
    Header,
    LayoutError,
    Manifest,
    Plan,
    Strips,
    axes_of,
    manifest_base,
    parallelism_manifest_key,
    shard_key,
    shard_range,
    split_dim_of,
    with_dim,
    writer_key,
    writer_manifest_key,
)
from mooncake._types import number_of

_UNPUBLISHED = "preferred_segments must name one segment for each replica"
# Maximum number of shards that one call writes. A dimension without indices divides into any
# number.
_MOST_SHARDS = 1 << 16
# Rank along the divided dimension, in the part of a key behind that of the tensor.
_RANK = re.compile(r"_(?:tp|writer)_(\d+)")
# Rank and size of an axis, in the same part.
_RANK_OF_SIZE = re.compile(r"(?<=_)(\d+)of(\d+)")

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True)
class _Tensor:
    """Whole tensor in memory: its bytes, header, and owner."""

    header: Header
    address: int
    owner: Any
    # Address and length of the serialized object, if the tensor is part of one in memory.
    serialized: tuple[int, int] | None = None


@dataclass(frozen=True)
class _Write:
    """Object to write, in the form that the native half takes."""

    key: str
    header: bytes
    memory: tuple[int, int]
    start: int
    stride: int
    rows: int
    width: int
    # Manifest that is written only in place of another one.
    only_replaces: bool = False


@dataclass(frozen=True)
class _Read:
    """Read of strips, in the form that the native half takes."""

    object: Any
    # `from` is a keyword.
    from_: int
    from_stride: int
    to: int
    to_stride: int
    rows: int
    width: int


@dataclass(frozen=True)
class _Job:
    """Reads into one range of memory, in the form that the native half takes."""

    memory: tuple[int, int]
    reads: list[_Read]


def _torch() -> Any:
    import torch

    return torch


def _of_real_bytes(make: Callable[_P, _R]) -> Callable[_P, _R]:
    """Makes a function create tensors outside torch's modes (such as `FakeTensorMode`), in which
    they would have no bytes.
    """

    @functools.wraps(make)
    def made(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        # Without torch there is no mode. Some releases do not have this function.
        modes = getattr(getattr(sys.modules.get("torch"), "_C", None), "_len_torch_dispatch_stack", None)
        if modes is None or not modes():
            return make(*args, **kwargs)
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():
            return make(*args, **kwargs)

    return made


def _address(tensor: Any) -> int | None:
    """Returns the address of a tensor's bytes, or `None` for a fake tensor without bytes."""
    try:
        # This check comes before `data_ptr`, which warns for some of these tensors.
        if tensor.untyped_storage().device.type == "meta":
            return None
        address = int(tensor.data_ptr())
    except RuntimeError:
        return None
    return address if address or not tensor.numel() else None


def _is_tensor(value: Any) -> bool:
    # The check is by name, so that other values do not require torch. Parameters of modules are
    # tensors, too.
    return any("Tensor" in base.__name__ for base in type(value).__mro__)


def _of_size(size: int) -> Any:
    """Returns a type of torch with elements of that many bytes, which torch can copy."""
    torch = _torch()
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[size]


def _why_unsupported(value: Any) -> str:
    """Returns why a value has no stored form as a tensor."""
    if not _is_tensor(value):
        return f"not a tensor of a supported kind. type={type(value).__name__}"
    found = " ".join(f"{name}={getattr(value, name, None)}" for name in ("dtype", "layout", "device"))
    return f"not a tensor of a supported kind. {found} type={type(value).__name__}"


@_of_real_bytes
def _tensor_in_memory(value: Any, most_dims: int = MAX_DIMS) -> _Tensor | None:
    """Returns a tensor's bytes in C order, or `None` for a value that the store does not support as
    a tensor.

    The bytes stay on a GPU if the store can access it.
    """
    if not _is_tensor(value):
        return None
    torch = _torch()
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    if value.is_nested or value.is_meta:
        return None
    dtype, parameters = code_of(value.dtype), b""
    if dtype is None or value.dim() > most_dims:
        return None
    held = value.detach()
    if held.device.type not in ("cpu", "cuda"):
        held = held.cpu()
    held = held.resolve_conj().resolve_neg()
    if held.is_quantized:
        try:
            held = held.contiguous()
            parameters = _quantized.parameters_of(held)
        except (RuntimeError, ValueError):
            return None
        if not _quantized.is_whole(held, dtype):
            return None
    elif not held.is_contiguous():
        # torch cannot copy elements of some of the types, such as int4.
        held = held.view(_of_size(DTYPES[dtype][1])).contiguous().view(held.dtype)
    if held.device.type == "cuda":
        if _mooncake.device_of(held.data_ptr()) is None:
            held = held.cpu()
        else:
            # The store's copies are in no stream of the program.
            torch.cuda.current_stream(held.device).synchronize()
    shape, address = tuple(held.shape), _address(held)
    if address is None:
        return None
    offset = HEADER_SIZE + len(parameters)
    return _Tensor(Header(dtype, shape, shape, data_offset=offset, parameters=parameters), address, held)


def _object_sizes(tensor: Any) -> tuple[int, int]:
    """Returns the length of the header of a tensor's object, and that of the object."""
    if tensor.is_quantized:
        held = _tensor_in_memory(tensor)
        if held is not None:
            return held.header.head_bytes, held.header.packed_bytes
    return HEADER_SIZE, HEADER_SIZE + tensor.numel() * tensor.element_size()


def _whole(key: str, tensor: _Tensor) -> _Write:
    if tensor.serialized is not None:
        # The object is stored unchanged, so a shard stays a shard.
        return _Write(key, b"", tensor.serialized, 0, tensor.serialized[1], 1, tensor.serialized[1])
    size = tensor.header.data_bytes
    return _Write(key, tensor.header.pack(), (tensor.address, size), 0, size, 1 if size else 0, size)


def _refuse_quantized(tensor: _Tensor) -> None:
    """Raises `LayoutError` for a quantized tensor, whose scales belong to the whole, and whose
    elements may share bytes.
    """
    if tensor.header.is_quantized:
        name = DTYPES[tensor.header.dtype][0]
        raise LayoutError(f"cannot divide tensor: a quantized tensor is stored as a whole. dtype={name}; put its int_repr()")


def _part(key: str, tensor: _Tensor, header: Header, dim: int, begin: int, end: int) -> _Write:
    """Returns the write of indices `begin` to `end` of one dimension, with their own header."""
    whole = tensor.header
    if header.data_bytes == 0:
        return _raw_write(key, header.pack())
    strips = Strips.part(whole.local_shape, whole.element_size, dim, begin, end)
    rows = strips.rows if strips.width else 0
    memory = (tensor.address, whole.data_bytes)
    return _Write(key, header.pack(), memory, strips.start, strips.stride, rows, strips.width)


def _raw_write(key: str, data: bytes) -> _Write:
    return _Write(key, data, (0, 0), 0, 0, 0, 0)


def _shard(key: str, tensor: _Tensor, axes: tuple[Axis, ...], tp: Axis) -> _Write:
    """Returns the write of the part of a whole tensor that belongs to a rank of its `tp` axis."""
    _refuse_quantized(tensor)
    shape = tensor.header.local_shape
    dim = split_dim_of(tp.split_dim, shape)
    begin, end = shard_range(shape[dim], tp.rank, tp.size)
    header = Header(tensor.header.dtype, with_dim(shape, dim, end - begin), shape, SHARD, axes)
    return _part(key, tensor, header, dim, begin, end)


def _all_shards(key: str, tensor: _Tensor, axes: tuple[Axis, ...], tp: Axis) -> list[_Write]:
    """Returns the writes of the parts of all ranks of the `tp` axis."""
    if tp.size > _MOST_SHARDS:
        raise LayoutError(f"too many shards: {tp.size}; at most {_MOST_SHARDS} are supported")
    writes = []
    for rank in range(tp.size):
        of_rank = replace(tp, rank=rank, aux=0)
        others = tuple(of_rank if axis is tp else axis for axis in axes)
        writes.append(_shard(shard_key(key, others), tensor, others, of_rank))
    return writes


def _legacy(key: str, tensor: _Tensor, tp_size: int, split_dim: int) -> list[_Write]:
    """Returns the writes of a `*_with_tp` call for a whole tensor."""
    tp_size, split_dim = number_of("tp_size", tp_size), number_of("split_dim", split_dim)
    if tp_size <= 1:
        return [_whole(key, tensor)]
    tp = Axis("tp", 0, 0, tp_size, split_dim, 0)
    return _all_shards(key, tensor, (tp,), tp)


def _partition(key: str, tensor: _Tensor, writer: Any) -> list[_Write]:
    """Returns the writes of a tensor with a writer partition."""
    rank, size, dim = (number_of(name, getattr(writer, name)) for name in ("rank", "size", "split_dim"))
    if not 0 <= rank < size:
        raise LayoutError(f"invalid writer partition: rank={rank} size={size}")
    tp = Axis("tp", 0, rank, size, dim, 0)
    shard = _shard(writer_key(key, rank, size, dim), tensor, (tp,), tp)
    header = tensor.header
    manifest = Manifest(header.dtype, dim, size, header.local_shape)
    return [shard, _raw_write(writer_manifest_key(key), manifest.pack())]


def _parallel(
    key: str, tensor: _Tensor, parallelism: Any, writer: Any, from_buffer: bool, published: bool
) -> list[_Write]:
    """Returns the writes of a `*_with_parallelism` call."""
    if parallelism is not None and writer is not None:
        raise LayoutError("parallelism and writer_partition are mutually exclusive")
    if writer is not None:
        return _partition(key, tensor, writer)
    if parallelism is None:
        # As in Mooncake C++, only whole tensors need a segment for each replica.
        if not published:
            raise LayoutError(_UNPUBLISHED)
        return [_whole(key, tensor)]
    axes = axes_of(parallelism)
    _refuse_quantized(tensor)
    header = tensor.header
    tp = next((axis for axis in axes if axis.kind == "tp"), None)
    if tp is None:
        shard = Header(header.dtype, header.local_shape, header.local_shape, SHARD, axes)
        return [_whole(shard_key(key, axes), _Tensor(shard, tensor.address, tensor.owner))]
    if from_buffer:
        dim = split_dim_of(tp.split_dim, header.local_shape)
        manifest = Manifest(header.dtype, dim, tp.size, header.local_shape)
        # As in Mooncake C++, shards from a buffer along one axis have no manifest: the first one
        # describes the others. An older manifest would contradict them. Keys of shards along
        # several axes have the size, which only a manifest tells to readers of another size.
        last = replace(_raw_write(parallelism_manifest_key(key), manifest.pack()), only_replaces=len(axes) == 1)
        return [*_all_shards(key, tensor, axes, tp), last]
    dim = split_dim_of(tp.split_dim, header.local_shape)
    if len(axes) == 1:
        # With plain tensor parallelism, the given tensor is the shard.
        whole = with_dim(header.local_shape, dim, header.local_shape[dim] * tp.size)
        shard = Header(header.dtype, header.local_shape, whole, SHARD, axes)
        write = _whole(shard_key(key, axes), _Tensor(shard, tensor.address, tensor.owner))
    else:
        whole = header.local_shape
        write = _shard(shard_key(key, axes), tensor, axes, tp)
    manifest = Manifest(header.dtype, dim, tp.size, whole)
    return [write, _raw_write(parallelism_manifest_key(key), manifest.pack())]


def _is_of_size(tp_size: int, split_dim: int | None) -> Callable[[Header], bool] | None:
    """Returns a test of the header of a shard: it is one of `tp_size` along `split_dim`, if that is
    named, or has no size.
    """
    if tp_size <= 1:
        return None

    def is_of_size(header: Header) -> bool:
        tp = header.axis("tp")
        if split_dim is None or split_dim < 0:
            # As in Mooncake C++, a dimension that no tensor has is that of the stored shard.
            return tp is None or tp.size == tp_size
        return tp is None or (tp.size, tp.split_dim) == (tp_size, split_dim)

    return is_of_size


def _has_manifest(writes: list[_Write]) -> bool:
    return len(writes) > 1 and manifest_base(writes[-1].key) is not None


def _contradicts(writes: list[_Write], own: Manifest | None, stored: Manifest) -> bool:
    """Returns whether shards of two manifests cannot be read together, although their keys are
    alike.
    """
    if own is None or own == stored:
        return False
    # Other keys than those with the rank only have all numbers of the layout.
    return _has_rank_only(writes[0], writes[-1]) or _is_alike(own, stored)


def _has_rank_only(write: _Write, manifest: _Write) -> bool:
    """Returns whether the key of a shard has the rank only, as that of a shard along one axis."""
    return write.key.startswith(f"{manifest_base(manifest.key)}_tp_")


def _is_alike(one: Manifest, other: Manifest) -> bool:
    """Returns whether the shards of two manifests have the same ranks and dimension."""
    return (one.split_dim, one.shards) == (other.split_dim, other.shards)


def _rank_of(write: _Write, manifest: _Write) -> int:
    """Returns the rank in the key of a shard."""
    return _rank_in(write.key, manifest)


def _rank_in(key: str, manifest: _Write) -> int:
    found = _RANK.search(key, len(manifest_base(manifest.key) or ""))
    return int(found[1]) if found else 0


def _keys_of_ranks(write: _Write, manifest: _Write, shards: int) -> Iterator[str]:
    """Yields the keys of the shards of all ranks, along each axis."""
    base = manifest_base(manifest.key) or ""
    if _has_rank_only(write, manifest):
        yield from (f"{base}_tp_{rank}" for rank in range(min(shards, _MOST_SHARDS)))
        return
    # Texts between the axes, and the number of ranks of each.
    first, *rest = _RANK_OF_SIZE.split(write.key[len(base) :])
    sizes, texts = rest[1::3], rest[2::3]
    for ranks in itertools.islice(itertools.product(*map(range, map(int, sizes))), _MOST_SHARDS):
        yield base + first + "".join(f"{rank}of{size}{text}" for rank, size, text in zip(ranks, sizes, texts))


def _are_all_keys(write: _Write, manifest: _Write) -> bool:
    """Returns whether `_keys_of_ranks` yields the keys of all shards. Keys of experts and stages
    have numbers that nothing counts.
    """
    rest = write.key[len(manifest_base(manifest.key) or "") :]
    ranks = math.prod(int(size) for _, size in _RANK_OF_SIZE.findall(rest))
    return "_eid" not in rest and "_sid" not in rest and ranks <= _MOST_SHARDS


def _may_be_uneven(own: Manifest, stored: Manifest, mine: set[int], theirs: set[int]) -> bool:
    """Returns whether the shards of some ranks can be parts of one tensor beside stored ones of
    another length, as `chunk` and `tensor_split` of torch divide it.
    """
    dim = own.split_dim
    if own.dtype != stored.dtype or with_dim(own.global_shape, dim, 0) != with_dim(stored.global_shape, dim, 0):
        return False
    length, other = own.global_shape[dim] // own.shards, stored.global_shape[dim] // stored.shards
    longer, shorter = (mine, theirs) if length > other else (theirs, mine)
    # The last part of `chunk` can have any length.
    return max(longer) < min(shorter) and (abs(length - other) == 1 or shorter == {own.shards - 1})


def _is_of(header: Header, manifest: Manifest) -> bool:
    """Returns whether a shard is one of those that a manifest describes."""
    tp = header.axis("tp")
    if tp is None or (header.dtype, header.global_shape) != (manifest.dtype, manifest.global_shape):
        return False
    return (tp.split_dim, tp.size) == (manifest.split_dim, manifest.shards)


@_of_real_bytes
def _views(address: int, header: Header) -> Any:
    """Returns a tensor over the caller's memory, at the data behind a header."""
    torch = _torch()
    dtype = torch_dtype(torch, header.dtype)
    if header.data_bytes == 0:
        return _empty(header)
    device = _mooncake.device_of(address)
    if device is not None:
        flat = torch.as_tensor(_OnGpu(address, header.data_bytes), device=f"cuda:{device}")
    else:
        flat = torch.frombuffer((ctypes.c_uint8 * header.data_bytes).from_address(address), dtype=torch.uint8)
    if header.is_quantized:
        return _quantized.quantized(torch, flat, header.dtype, header.local_shape, header.parameters)
    return flat.view(dtype).reshape(header.local_shape)


class _OnGpu:
    """GPU memory in the form that other libraries import."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


@_of_real_bytes
def _empty(header: Header) -> Any:
    torch = _torch()
    if header.is_quantized:
        flat = torch.empty(header.data_bytes, dtype=torch.uint8, device="cpu")
        return _quantized.quantized(torch, flat, header.dtype, header.local_shape, header.parameters)
    return torch.empty(header.local_shape, dtype=torch_dtype(torch, header.dtype), device="cpu")


@_of_real_bytes
def _of_bytes(header: Header, data: bytes | memoryview) -> Any:
    torch = _torch()
    if not data:
        return _empty(header)
    if header.is_quantized:
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return _quantized.quantized(torch, flat, header.dtype, header.local_shape, header.parameters)
    flat = torch.frombuffer(bytearray(data), dtype=torch_dtype(torch, header.dtype))
    return flat.reshape(header.local_shape)


def _job(address: int, plan: Plan) -> _Job:
    reads = [
        _Read(located, stored.start, stored.stride, target.start, target.stride, stored.rows, stored.width)
        for located, stored, target in plan.reads
    ]
    return _Job((address, plan.header.data_bytes), reads)


def _list_of(values: Any, n: int) -> list[Any] | None:
    """Returns one value for each key, or `None` if `values` does not match."""
    if values is None:
        return [None] * n
    return values if isinstance(values, list) and len(values) == n else None
