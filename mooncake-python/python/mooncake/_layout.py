"""Layout of tensors in the store: the header of an object, the keys of shards, and the bytes of a
shard.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mooncake import _quantized
from mooncake._element_types import DTYPES, PACKED, QUANTIZED
from mooncake._types import number_of, word_of

HEADER_SIZE = 304
_MAGIC = 0x4D4F4F4E
_VERSION = 1
MAX_DIMS = 8
_MAX_AXES = 4
FULL = 0
SHARD = 1
_FIXED = struct.Struct("<IHHiiIIQQ8q8qII")
_AXIS = struct.Struct("<iiiiiiq")

MANIFEST_SIZE = 96
_MANIFEST_MAGIC = 0x574D414E
_MANIFEST = struct.Struct("<IHHiiiiii8q")

# Kinds of axes in the order of keys.
KINDS = ("dp", "tp", "ep", "pp")
# Headers may contain another kind, which has no meaning yet.
_KINDS_OF_HEADERS = (*KINDS, "reserved")


class LayoutError(ValueError):
    """Invalid layout, or a layout that does not fit the tensor."""


@dataclass(frozen=True)
class Axis:
    """Axis of a shard, in headers and keys."""

    kind: str
    index: int
    rank: int
    size: int
    split_dim: int | None
    aux: int
    # Used in keys only. Headers store the ID that belongs to the kind as `aux`.
    expert: int | None = None
    stage: int | None = None

    @property
    def order(self) -> int:
        return _KINDS_OF_HEADERS.index(self.kind)

    @property
    def identity(self) -> tuple[str, int, int, int | None, int]:
        """All fields except the position in the caller's list."""
        return (self.kind, self.rank, self.size, self.split_dim, self.aux)

    def suffix(self) -> str:
        """Returns the part of a key that names this axis."""
        text = f"__{self.kind}_{self.rank}of{self.size}"
        if self.split_dim is not None:
            text += f"_sd{self.split_dim}"
        if self.expert is not None:
            text += f"_eid{self.expert}"
        if self.stage is not None:
            text += f"_sid{self.stage}"
        return text


@dataclass(frozen=True)
class Header:
    """Header of an object, which describes its tensor."""

    dtype: int
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    layout: int = FULL
    axes: tuple[Axis, ...] = ()
    data_offset: int = HEADER_SIZE
    # Bytes between header and data: the parameters of a quantized tensor.
    parameters: bytes = b""

    @property
    def is_quantized(self) -> bool:
        return self.dtype in QUANTIZED

    @property
    def element_size(self) -> int:
        return DTYPES[self.dtype][1]

    @property
    def data_bytes(self) -> int:
        if self.dtype in PACKED:
            return _quantized.data_bytes(self.dtype, self.local_shape)
        return math.prod(self.local_shape) * self.element_size

    @property
    def head_bytes(self) -> int:
        """Length of the packed header with the parameters."""
        return HEADER_SIZE + len(self.parameters)

    @property
    def packed_bytes(self) -> int:
        """Length of the object that holds the packed header and the data."""
        return self.head_bytes + self.data_bytes

    def axis(self, kind: str) -> Axis | None:
        return next((axis for axis in self.axes if axis.kind == kind), None)

    def pack(self) -> bytes:
        """Returns the stored form of the header. Raises `LayoutError` for one that readers reject.
        """
        if not (_is_possible(self.local_shape, self.dtype) and _is_possible(self.global_shape, self.dtype)):
            raise LayoutError(f"invalid tensor shape {self.global_shape}")

        def padded(shape: tuple[int, ...]) -> list[int]:
            return [*shape, *([-1] * (MAX_DIMS - len(shape)))]

        fixed = _FIXED.pack(
            _MAGIC,
            _VERSION,
            HEADER_SIZE,
            self.dtype,
            len(self.local_shape),
            self.layout,
            0,
            HEADER_SIZE + len(self.parameters),
            self.data_bytes,
            *padded(self.global_shape),
            *padded(self.local_shape),
            len(self.axes),
            0,
        )
        axes = b"".join(
            _AXIS.pack(
                axis.order,
                axis.index,
                axis.rank,
                axis.size,
                -1 if axis.split_dim is None else axis.split_dim,
                axis.aux,
                0 if axis.split_dim is None else self.local_shape[axis.split_dim],
            )
            for axis in self.axes
        )
        return (fixed + axes).ljust(HEADER_SIZE, b"\0") + self.parameters

    @staticmethod
    def parse(head: bytes, total: int) -> Header | None:
        """Parses the header of an object of `total` bytes. Returns `None` if the object is not a
        tensor.
        """
        if len(head) < HEADER_SIZE or total < HEADER_SIZE:
            return None
        magic, version, size, dtype, ndim, layout, _, offset, data_bytes, *rest = _FIXED.unpack_from(head)
        shapes, count = rest[:16], rest[16]
        if (magic, version, size) != (_MAGIC, _VERSION, HEADER_SIZE):
            return None
        if not (dtype in DTYPES and 0 <= ndim <= MAX_DIMS and layout <= SHARD and count <= _MAX_AXES):
            return None
        global_shape, local_shape = tuple(shapes[:ndim]), tuple(shapes[8 : 8 + ndim])
        unused = [*shapes[ndim:8], *shapes[8 + ndim :]]
        if any(dim < 0 for dim in (*global_shape, *local_shape)) or any(dim != -1 for dim in unused):
            return None
        axes = []
        for i in range(count):
            kind, index, rank, parts, split_dim, aux, _ = _AXIS.unpack_from(head, _FIXED.size + i * _AXIS.size)
            if not (0 <= kind < len(_KINDS_OF_HEADERS) and 0 <= rank < parts and -1 <= split_dim < ndim):
                return None
            axes.append(Axis(_KINDS_OF_HEADERS[kind], index, rank, parts, None if split_dim < 0 else split_dim, aux))
        # A head of a quantized tensor may be too short for its parameters.
        parameters = head[HEADER_SIZE:offset] if dtype in QUANTIZED and HEADER_SIZE <= offset <= len(head) else b""
        header = Header(dtype, local_shape, global_shape, layout, tuple(axes), offset, parameters)
        if not (_is_possible(local_shape, dtype) and _is_possible(global_shape, dtype)):
            return None
        if not HEADER_SIZE <= offset <= total:
            return None
        if data_bytes != total - offset or data_bytes != header.data_bytes:
            return None
        return header


def _is_possible(shape: Sequence[int], dtype: int) -> bool:
    """Returns whether a tensor of that shape can exist. An empty dimension counts as 1, because an
    empty tensor has strides as well.
    """
    width = DTYPES[dtype][1] if 0 not in shape else 1
    return math.prod(max(dim, 1) for dim in shape) * width < 1 << 63


@dataclass(frozen=True)
class Manifest:
    """Properties that shards of one tensor have in common."""

    dtype: int
    split_dim: int
    shards: int
    global_shape: tuple[int, ...]

    def pack(self) -> bytes:
        """Returns the stored form of the manifest. Raises `LayoutError` for one that readers
        reject.
        """
        if not _is_possible(self.global_shape, self.dtype):
            raise LayoutError(f"invalid tensor shape {self.global_shape}")
        shape = [*self.global_shape, *([-1] * (MAX_DIMS - len(self.global_shape)))]
        return _MANIFEST.pack(
            _MANIFEST_MAGIC,
            _VERSION,
            MANIFEST_SIZE,
            self.dtype,
            len(self.global_shape),
            self.split_dim,
            self.shards,
            0,
            0,
            *shape,
        )

    @staticmethod
    def parse(data: bytes) -> Manifest | None:
        """Parses the manifest in an object. Returns `None` if it is invalid."""
        if len(data) != MANIFEST_SIZE:
            return None
        magic, version, size, dtype, ndim, split_dim, shards, _, _, *shape = _MANIFEST.unpack(data)
        if (magic, version, size) != (_MANIFEST_MAGIC, _VERSION, MANIFEST_SIZE):
            return None
        if not (dtype in DTYPES and 0 < ndim <= MAX_DIMS and 0 <= split_dim < ndim and shards > 0):
            return None
        if any(dim < 0 for dim in shape[:ndim]) or not _is_possible(shape[:ndim], dtype):
            return None
        return Manifest(dtype, split_dim, shards, tuple(shape[:ndim]))


def word(key: str | bytes) -> str:
    """Returns a key as a string. Mooncake C++ accepts bytes wherever it takes strings."""
    return word_of("key", key)


def parallelism_manifest_key(key: str) -> str:
    return f"{word(key)}__parallelism_manifest"


def manifest_base(key: str) -> str | None:
    """Returns the key of a tensor from that of its manifest, or `None` for another key."""
    for suffix in ("__parallelism_manifest", "__writer_manifest"):
        if key.endswith(suffix):
            return key.removesuffix(suffix)
    return None


def writer_manifest_key(key: str) -> str:
    return f"{word(key)}__writer_manifest"


def writer_key(key: str, rank: int, size: int, split_dim: int) -> str:
    return f"{word(key)}__writer_{rank}of{size}_sd{split_dim}"


def shard_key(key: str, axes: Sequence[Axis]) -> str:
    """Returns the key of the shard with these axes."""
    if len(axes) == 1 and axes[0].kind == "tp":
        return f"{word(key)}_tp_{axes[0].rank}"
    return word(key) + "".join(axis.suffix() for axis in sorted(axes, key=lambda axis: axis.order))


def axes_of(parallelism: Any) -> tuple[Axis, ...]:
    """Returns the axes of a `TensorParallelism`, or of an object with the same attributes. Raises
    `LayoutError` for invalid ones.
    """
    given = list(parallelism.axes)
    if not 1 <= len(given) <= _MAX_AXES:
        raise LayoutError(f"invalid number of axes: {len(given)}; expected 1 to {_MAX_AXES}")
    axes = []
    for index, one in enumerate(given):
        kind, rank, size = word_of("kind", one.kind).lower(), number_of("rank", one.rank), number_of("size", one.size)
        split_dim, expert, stage = (
            None if (number := getattr(one, name)) is None else number_of(name, number)
            for name in ("split_dim", "expert_id", "stage_id")
        )
        if kind not in KINDS:
            raise LayoutError(f"unknown kind of axis: {one.kind!r}")
        if not 0 <= rank < size:
            raise LayoutError(f"invalid axis: rank={rank} size={size}")
        if (kind == "tp") != (split_dim is not None) or (split_dim is not None and split_dim < 0):
            raise LayoutError(f"invalid {kind} axis: split_dim={split_dim}")
        if (kind == "ep" and expert is None) or (kind == "pp" and stage is None):
            raise LayoutError(f"invalid {kind} axis: its id is missing")
        aux = {"ep": expert, "pp": stage}.get(kind)
        axes.append(Axis(kind, index, rank, size, split_dim, aux or 0, expert, stage))
    if len({axis.kind for axis in axes}) != len(axes):
        raise LayoutError("invalid axes: two have the same kind")
    return tuple(axes)


def is_shard(header: Header, axes: Sequence[Axis]) -> bool:
    """Returns whether an object is the shard with these axes, in any order. The object under its
    key can be anything.
    """
    tp, whole = header.axis("tp"), header.local_shape
    if tp is not None and tp.split_dim is not None:
        whole = with_dim(whole, tp.split_dim, whole[tp.split_dim] * tp.size)
    # An inconsistent header is not a shard, either.
    if header.layout != SHARD or header.global_shape != whole:
        return False
    return {axis.identity for axis in header.axes} == {axis.identity for axis in axes}


def shard_range(dim: int, rank: int, parts: int) -> tuple[int, int]:
    """Returns the first index of a shard and the one behind its last. Raises `LayoutError` if the
    dimension does not divide evenly.
    """
    if parts < 1 or dim % parts != 0:
        raise LayoutError(f"dimension of {dim} does not divide evenly into {parts} parts")
    return dim * rank // parts, dim * (rank + 1) // parts


def split_dim_of(dim: int | None, shape: Sequence[int]) -> int:
    """Returns the dimension that an axis divides. Raises `LayoutError` if the tensor lacks it."""
    if dim is None or not 0 <= dim < len(shape):
        raise LayoutError(f"invalid split_dim {dim} for a tensor of {len(shape)} dimensions")
    return dim


def with_dim(shape: tuple[int, ...], dim: int, length: int) -> tuple[int, ...]:
    return (*shape[:dim], length, *shape[dim + 1 :])


@dataclass(frozen=True)
class Strips:
    """Bytes of a part of a tensor along one dimension: `rows` strips of `width`, every `stride`,
    from `start` on.
    """

    start: int
    stride: int
    rows: int
    width: int

    @staticmethod
    def whole(data_bytes: int) -> Strips:
        return Strips(0, data_bytes, 1, data_bytes)

    @staticmethod
    def part(shape: tuple[int, ...], element: int, dim: int, begin: int, end: int) -> Strips:
        """Returns the strips of indices `begin` to `end` in a dimension of a tensor of that shape.
        """
        inner = math.prod(shape[dim + 1 :]) * element
        return Strips(begin * inner, shape[dim] * inner, math.prod(shape[:dim]), (end - begin) * inner)


@dataclass
class Source:
    """Stored object that contains indices `begin` to `end` of a dimension."""

    located: Any
    header: Header
    begin: int
    end: int


@dataclass
class Plan:
    """Plan of a tensor to read: its header, and the strips of stored objects with their
    destinations.
    """

    header: Header
    reads: list[tuple[Any, Strips, Strips]] = field(default_factory=list)


def assemble(header: Header, dim: int, begin: int, end: int, sources: list[Source]) -> Plan | None:
    """Plans the assembly of indices `begin` to `end` from stored parts. Returns `None` if some are
    missing.
    """
    plan = Plan(header)
    at = begin
    for source in sorted(sources, key=lambda source: source.begin):
        first, last = max(at, source.begin), min(end, source.end)
        if first >= last:
            continue
        if first != at:
            return None
        element = header.element_size
        stored = Strips.part(source.header.local_shape, element, dim, first - source.begin, last - source.begin)
        stored = Strips(stored.start + source.header.data_offset, stored.stride, stored.rows, stored.width)
        target = Strips.part(header.local_shape, element, dim, first - begin, last - begin)
        # Without bytes, the offsets may overflow.
        if source.header.data_bytes:
            plan.reads.append((source.located, stored, target))
        at = last
    return plan if at == end else None


def assemble_across(header: Header, dim: int, begin: int, stored_dim: int, sources: list[Source]) -> Plan | None:
    """Plans the assembly of a shard along one dimension, from index `begin` on, from parts along
    `stored_dim`. Returns `None` if some are missing.
    """
    plan, at = Plan(header), 0
    for source in sorted(sources, key=lambda source: source.begin):
        if source.begin == source.end:
            continue
        if source.begin != at:
            return None
        # Without bytes, the offsets may overflow.
        if header.data_bytes:
            plan.reads += _block(header, dim, begin, stored_dim, source)
        at = source.end
    return plan if at == header.local_shape[stored_dim] else None


def _block(
    header: Header, dim: int, begin: int, stored_dim: int, source: Source
) -> list[tuple[Any, Strips, Strips]]:
    """Returns the reads of the bytes that a shard and a part along another dimension share."""
    stored, target, element = source.header.local_shape, header.local_shape, header.element_size
    extents = with_dim(target, stored_dim, stored[stored_dim])
    first, second = min(dim, stored_dim), max(dim, stored_dim)

    def bytes_from(shape: tuple[int, ...], at: int) -> int:
        return math.prod(shape[at:]) * element

    # Bytes of the extents from the second dimension on are contiguous in both. Indices of the
    # dimensions between are one level of strips, and those before the first one are another.
    width = bytes_from(extents, second)
    inner, outer = math.prod(extents[first:second]), math.prod(extents[:first])
    start = source.header.data_offset + begin * bytes_from(stored, dim + 1)
    to = source.begin * bytes_from(target, stored_dim + 1)
    levels = [
        (inner, bytes_from(stored, second), bytes_from(target, second)),
        (outer, bytes_from(stored, first), bytes_from(target, first)),
    ]
    # The longer level is that of the strips.
    (reads, from_step, to_step), (rows, from_stride, to_stride) = sorted(levels, key=lambda level: level[0])
    return [
        (
            source.located,
            Strips(start + i * from_step, from_stride, rows, width),
            Strips(to + i * to_step, to_stride, rows, width),
        )
        for i in range(reads)
    ]
