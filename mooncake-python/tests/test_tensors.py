"""Tensors: stored bytes, shards, and reads."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the tensor calls need torch")

import layouts  # noqa: E402
import numpy as np  # noqa: E402
from layouts import axis, layout  # noqa: E402
from mooncake._element_types import DTYPES as ALL_TYPES  # noqa: E402
from mooncake._element_types import FIRST_OWN_CODE, QUANTIZED  # noqa: E402
from mooncake._layout import Header  # noqa: E402
from mooncake.store import (  # noqa: E402
    ReadTarget,
    ReplicateConfig,
    _deserialize_tensor,
    _serialize_tensor,
    _tensor_metadata_size,
)

DTYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.int8: 2,
    torch.uint8: 3,
    torch.int16: 4,
    torch.uint16: 5,
    torch.int32: 6,
    torch.uint32: 7,
    torch.int64: 8,
    torch.uint64: 9,
    torch.bool: 10,
    torch.float16: 11,
    torch.bfloat16: 12,
    torch.float8_e4m3fn: 13,
    torch.float8_e5m2: 14,
}


def tensor_of(dtype, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    count = 1
    for dim in shape:
        count *= dim
    high = 2 if dtype == torch.bool else 128
    data = torch.randint(0, high, (max(count * size, 1),), dtype=torch.uint8, generator=generator)[: count * size]
    return data.view(dtype).reshape(shape)


def same(one, other):
    assert one is not None and one.dtype == other.dtype and one.shape == other.shape, (one, other)
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def target(mode, *axes):
    return layouts.target(mode, layout(*axes) if axes else None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type(make_store, key, dtype):
    a, b = make_store(), make_store()
    for i, shape in enumerate([(), (1,), (0, 4), (2, 3), (2, 3, 4, 1, 1, 1, 1, 5), (300, 700)]):
        tensor = tensor_of(dtype, *shape, seed=i)
        assert a.put_tensor(f"{key}-{i}", tensor) == 0, a.last_error()
        assert same(b.get_tensor(f"{key}-{i}"), tensor)
        stored = b.get(f"{key}-{i}")
        magic, version, size, code, ndim, layout, flags, offset, length = struct.unpack_from("<IHHiiIIQQ", stored)
        assert (magic, version, size, code, ndim) == (0x4D4F4F4E, 1, 304, DTYPES[dtype], len(shape))
        assert (layout, flags, offset, length) == (0, 0, 304, tensor.numel() * tensor.element_size())
        assert list(struct.unpack_from("<8q", stored, 40)) == [*shape, *[-1] * (8 - len(shape))]
        assert stored[40:104] == stored[104:168] and stored[168:304] == bytes(136)
        assert stored[304:] == bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()) if length < 999 else True


def test_invalid_tensors_are_rejected(store, key):
    bad = [None, [1.0], b"x", torch.zeros(2).to_sparse()]
    for value in bad:
        assert store.put_tensor(key, value) == -600, value
    assert store.batch_put_tensor([key, key + "2"], [None, torch.ones(2)]) == [-600, 0]
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
    for value in (torch.ones(2, device="meta"), nested):
        assert store.put_tensor(key, value) == -600
        assert store.batch_put_tensor([key, key + "3"], [value, torch.ones(2)]) == [-600, 0]
    assert store.batch_put_tensor([key], []) == [-600]
    with pytest.raises(TypeError):
        store.batch_put_tensor([key], (torch.ones(2),))
    assert store.put("raw-" + key, b"x" * 400) == 0
    assert store.get_tensor("raw-" + key) is None and store.get_tensor(key) is None
    grad = torch.ones(2, requires_grad=True)
    assert store.put_tensor(key, grad) == 0 and same(store.get_tensor(key), grad.detach())


def test_views_and_upserts(store, key):
    tensor = tensor_of(torch.int32, 64, 48)
    assert store.put_tensor(key, tensor.t()) == 0 and same(store.get_tensor(key), tensor.t())
    assert store.put_tensor(key, tensor) == 0 and same(store.get_tensor(key), tensor.t()), "it existed"
    assert store.upsert_tensor(key, tensor[::2, 1::3]) == 0 and same(store.get_tensor(key), tensor[::2, 1::3])
    assert store.batch_upsert_tensor([key, key + "2"], [tensor, tensor.t()]) == [0, 0]
    got = store.batch_get_tensor([key, "missing", key + "2"])
    assert same(got[0], tensor) and got[1] is None and same(got[2], tensor.t())
    got[0][0, 0] = 7
    config = ReplicateConfig()
    config.preferred_segments = ["a", "b"]
    assert store.pub_tensor(key + "3", tensor, config) == -600
    assert store.batch_pub_tensor([key + "3"], [tensor], config) == [-600]
    config.preferred_segments = [store.get_hostname()]
    assert store.pub_tensor(key + "3", tensor, config) == 0
    assert store.upsert_pub_tensor(key + "3", tensor, config) == 0
    assert store.batch_upsert_pub_tensor([key + "3"], [tensor], config) == [0]
    assert store.put_tensor(key + "4", tensor, config) == 0
    config.group_ids = ["g", "h"]
    assert store.batch_pub_tensor([key + "5", key + "6"], [None, tensor], config) == [-600, 0]


def test_serialized(store, key):
    tensor = tensor_of(torch.bfloat16, 5, 6)
    header, address, size, owner = _serialize_tensor(tensor)
    assert (len(header), size, _tensor_metadata_size()) == (304, 60, 304) and address == owner.data_ptr()
    whole = header + bytes(tensor.view(-1).view(torch.uint8).tolist())
    assert same(_deserialize_tensor(whole), tensor)
    assert store.put(key, whole) == 0 and same(store.get_tensor(key), tensor)
    for broken in (b"", whole[:-1], whole + b"x", b"x" + whole[1:], whole[:12] + b"\x09" + whole[13:]):
        with pytest.raises(ValueError):
            _deserialize_tensor(broken)
    with pytest.raises(ValueError):
        _serialize_tensor([1])


@pytest.fixture
def buffer(store):
    memory = torch.zeros(4 << 20, dtype=torch.uint8)
    assert store.register_buffer(memory.data_ptr(), memory.numel()) == 0
    yield memory
    store.unregister_buffer(memory.data_ptr())


def place(buffer, tensor, at=0):
    header, _, size, owner = _serialize_tensor(tensor)
    buffer[at : at + 304] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    buffer[at + 304 : at + 304 + size] = owner.view(-1).view(torch.uint8)
    return buffer.data_ptr() + at, 304 + size


def test_from_and_into_memory(store, buffer, key):
    tensor = tensor_of(torch.float16, 100, 30)
    at, size = place(buffer, tensor)
    assert store.put_tensor_from(key, at, size) == 0 and same(store.get_tensor(key), tensor)
    assert store.put_tensor_from(key + "x", at, size - 1) == -600
    assert store.put_tensor_from(key + "x", at + 1, size) == -600
    assert store.put_tensor_from(key + "x", 0, size) == -600
    assert store.put_tensor_from(key + "x", at, 300) == -600
    assert store.batch_put_tensor_from([key + "x", key + "y"], [at, at], [size, size + 1]) == [-600, -600]
    assert store.upsert_tensor_from(key, at, size) == 0
    into = buffer.data_ptr() + (1 << 20)
    got = store.get_tensor_into(key, into, 1 << 20)
    assert same(got, tensor) and got.data_ptr() == into + 304
    assert store.get_tensor_into(key, into, size - 1) is None
    assert store.get_tensor_into("missing", into, size) is None
    assert store.get_tensor_into(key, 4096, size) is None
    assert store.batch_get_tensor_into([key], [into], []) == [-600]
    got = store.batch_get_tensor_into([key, "missing"], [into, into], [1 << 20, 1 << 20])
    assert same(got[0], tensor) and got[1] is None


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_legacy_shards(store, buffer, key, dim):
    tensor = tensor_of(torch.float32, 8, 12, 40)
    assert store.put_tensor_with_tp(key, tensor, 3, 4, dim) == 0
    parts = torch.chunk(tensor, 4, dim)
    for rank in range(4):
        assert same(store.get_tensor_with_tp(key, rank, 4, dim), parts[rank].contiguous())
    assert store.get_tensor(key) is None and store.get_tensor_with_tp(key, 4, 4) is None
    assert same(store.batch_get_tensor_with_tp([key], 1, 4)[0], parts[1].contiguous())
    stored = store.get(f"{key}_tp_2")
    assert struct.unpack_from("<I", stored, 16) == (1,)
    assert list(struct.unpack_from("<3q", stored, 40)) == [8, 12, 40]
    assert struct.unpack_from("<I", stored, 168) == (1,)
    assert struct.unpack_from("<iiiiiiq", stored, 176) == (1, 0, 2, 4, dim, 0, parts[2].shape[dim])
    at, size = place(buffer, tensor)
    assert store.put_tensor_with_tp_from(key + "f", at, size, 0, 4, dim) == 0
    for rank in range(4):
        assert store.get(f"{key}f_tp_{rank}") == store.get(f"{key}_tp_{rank}")
    into = buffer.data_ptr() + (1 << 20)
    assert same(store.get_tensor_with_tp_into(key, into, 1 << 20, 2, 4, dim), parts[2].contiguous())
    assert same(store.batch_get_tensor_with_tp_into([key], [into], [1 << 20], 2, 4)[0], parts[2].contiguous())


def test_shards_that_cannot_be(store, buffer, key):
    tensor = tensor_of(torch.float32, 6, 5)
    assert store.put_tensor_with_tp(key, tensor, 0, 4, 0) == -600
    assert store.put_tensor_with_tp(key, tensor, 0, 2, -1) == -600
    assert store.put_tensor_with_tp(key, tensor, 0, 2, 2) == -600
    keys = [f"{key}-{i}" for i in range(4)]
    even = tensor_of(torch.float32, 8)
    assert store.batch_put_tensor_with_tp(keys, [even, None, tensor, even], 0, 4) == [0, -600, -600, 0]
    assert store.put_tensor_with_tp(key, tensor, 0, 1) == 0 and same(store.get_tensor_with_tp(key), tensor)
    at, size = place(buffer, even)
    codes = store.batch_put_tensor_with_tp_from([key + "a", key + "b"], [at, at], [size, size - 1], 0, 4)
    assert codes == [0, -600]


def test_a_full_tensor(store, key):
    tensor = tensor_of(torch.float32, 6, 5)
    assert store.put_tensor_with_parallelism(key, tensor) == 0
    assert same(store.get_tensor_with_parallelism(key), tensor)
    assert same(store.get_tensor_with_parallelism(key, target("as_stored")), tensor)
    assert same(store.get_tensor_with_parallelism(key, target("full")), tensor)
    assert store.get_tensor_with_parallelism(key, target("as_stored", axis("tp", 0, 2, 0))) is None
    assert store.get_tensor_with_parallelism(key, target("shard")) is None


@pytest.mark.parametrize("dim", [0, 1])
def test_shards_of_another_size(store, buffer, key, dim):
    tensor = tensor_of(torch.bfloat16, 24, 36)
    for rank, part in enumerate(torch.chunk(tensor, 4, dim)):
        assert store.put_tensor_with_parallelism(key, part.contiguous(), layout(axis("TP", rank, 4, dim))) == 0
    assert store.get_size(f"{key}__parallelism_manifest") == 96
    into = buffer.data_ptr()
    for size in (1, 2, 3, 4, 6, 12):
        for rank, part in enumerate(torch.chunk(tensor, size, dim)):
            wanted = target("shard", axis("tp", rank, size, dim))
            assert same(store.get_tensor_with_parallelism(key, wanted), part.contiguous())
            assert same(store.get_tensor_with_parallelism_into(key, into, 1 << 20, wanted), part.contiguous())
            assert same(_deserialize_tensor(buffer[: 304 + part.numel() * 2].numpy().tobytes()), part.contiguous())
    assert same(store.get_tensor_with_parallelism(key, target("full", axis("tp", 0, 2, dim))), tensor)
    assert store.get_tensor_with_parallelism(key, target("shard", axis("tp", 0, 5, dim))) is None, "uneven"
    wanted = target("shard", axis("tp", 1, 2, 1 - dim))
    assert same(store.get_tensor_with_parallelism(key, wanted), torch.chunk(tensor, 2, 1 - dim)[1].contiguous()), "other dim"
    assert store.get_tensor_with_parallelism(key, target("full")) is None
    assert store.get_tensor_with_parallelism_into(key, into, 305, target("shard", axis("tp", 0, 2, dim))) is None
    assert store.remove(f"{key}_tp_3", True) == 0
    assert store.get_tensor_with_parallelism(key, target("full", axis("tp", 0, 2, dim))) is None, "one is missing"
    assert same(
        store.get_tensor_with_parallelism(key, target("shard", axis("tp", 0, 2, dim))),
        torch.chunk(tensor, 2, dim)[0].contiguous(),
    )


def test_legacy_shards_are_resharded(store, key):
    tensor = tensor_of(torch.float32, 8, 6)
    assert store.put_tensor_with_tp(key, tensor, 0, 4, 0) == 0
    wanted = target("shard", axis("tp", 1, 2, 0))
    assert same(store.get_tensor_with_parallelism(key, wanted), tensor[4:])


def test_several_axes(store, buffer, key):
    tensor = tensor_of(torch.int16, 12, 10)
    for rank in range(2):
        axes = (axis("dp", 1, 2), axis("tp", rank, 2, 0))
        assert store.put_tensor_with_parallelism(f"{key}M", tensor, layout(*axes)) == 0
        assert store.is_exist(f"{key}M__dp_1of2__tp_{rank}of2_sd0") == 1
        turned = target("shard", *reversed(axes))
        assert same(store.get_tensor_with_parallelism(f"{key}M", turned), tensor[6 * rank : 6 * rank + 6])
    assert same(
        store.get_tensor_with_parallelism(f"{key}M", target("shard", axis("dp", 1, 2), axis("tp", 2, 3, 0))), tensor[8:]
    )
    assert store.get_tensor_with_parallelism(f"{key}M", target("shard", axis("dp", 0, 2), axis("tp", 0, 2, 0))) is None
    assert same(
        store.get_tensor_with_parallelism(f"{key}M", target("full", axis("dp", 1, 2), axis("tp", 0, 2, 0))), tensor
    )
    only = layout(axis("dp", 0, 4))
    assert store.put_tensor_with_parallelism(f"{key}D", tensor, only) == 0
    assert store.is_exist(f"{key}D__dp_0of4") == 1
    assert same(store.get_tensor_with_parallelism(f"{key}D", target("shard", axis("dp", 0, 4))), tensor)
    assert store.get_tensor_with_parallelism(f"{key}D", target("full", axis("dp", 0, 4))) is None
    four = (
        axis("dp", 0, 2),
        axis("tp", 0, 2, 0),
        axis("ep", 1, 2, expert_id=7),
        axis("pp", 0, 2, stage_id=0),
    )
    assert store.put_tensor_with_parallelism(f"{key}Q", tensor, layout(*four)) == 0
    assert store.is_exist(f"{key}Q__dp_0of2__tp_0of2_sd0__ep_1of2_eid7__pp_0of2_sid0") == 1
    at, size = place(buffer, tensor)
    assert store.put_tensor_with_parallelism_from(f"{key}F", at, size, layout(axis("tp", 0, 2, 1))) == 0
    assert same(store.get_tensor(f"{key}F_tp_1"), tensor[:, 5:].contiguous())
    assert store.is_exist(f"{key}F__parallelism_manifest") == 0
    assert store.upsert_tensor_with_parallelism_from(f"{key}F", at, size, None) == 0
    assert same(store.get_tensor(f"{key}F"), tensor)


def test_writer_partitions(store, key):
    tensor = tensor_of(torch.float64, 9, 4)
    for rank in range(3):
        writer = SimpleNamespace(rank=rank, size=3, split_dim=0)
        assert store.put_tensor_with_parallelism(key, tensor, writer_partition=writer) == 0
        assert store.is_exist(f"{key}__writer_{rank}of3_sd0") == 1
    assert store.get_size(f"{key}__writer_manifest") == 96
    assert same(store.get_tensor_with_parallelism(key, target("full")), tensor)
    assert same(store.get_tensor_with_parallelism(key, target("shard", axis("tp", 1, 3, 0))), tensor[3:6])
    assert same(store.get_tensor_with_parallelism(key, target("shard", axis("tp", 8, 9, 0))), tensor[8:])
    assert same(store.get_tensor_with_parallelism(key, target("shard", axis("tp", 1, 2, 1))), tensor[:, 2:].contiguous())
    assert store.get_tensor_with_parallelism(key, target("shard", axis("tp", 0, 2, 0))) is None, "uneven"
    both = store.put_tensor_with_parallelism(
        key, tensor, layout(axis("tp", 0, 3, 0)), None, SimpleNamespace(rank=0, size=3, split_dim=0)
    )
    assert both == -600
    assert store.put_tensor_with_parallelism(key, tensor, writer_partition=(0, 3, 0)) == -600
    assert store.put_tensor_with_parallelism(key, None) == -600


def test_invalid_layouts(store, key):
    tensor = tensor_of(torch.float32, 8, 4)
    bad = [
        [],
        [axis("xp")],
        [axis("tp", 0, 2, 0), axis("tp", 0, 2, 1)],
        [axis("tp", 2, 2, 0)],
        [axis("tp", -1, 2, 0)],
        [axis("tp", 0, 2)],
        [axis("dp", 0, 2, 0)],
        [axis("ep", 0, 2)],
        [axis("pp", 0, 2)],
        [axis("tp", 0, 2, 5)],
        [axis("tp", 0, 2, -1)],
    ]
    for axes in bad:
        made = layout(*axes)
        assert store.put_tensor_with_parallelism(key, tensor, made) == -600, axes
        wanted = ReadTarget()
        wanted.mode, wanted.parallelism = "shard", made
        assert store.get_tensor_with_parallelism(key, wanted) is None
    with pytest.raises(RuntimeError, match="Unsupported ReadTarget mode"):
        ReadTarget().mode = "some"
    assert store.batch_put_tensor_with_parallelism([key], [tensor], (None,)) == [-600]
    assert store.batch_put_tensor_with_parallelism([key, key + "2"], [tensor, tensor], [None]) == [-600, -600]
    assert store.batch_get_tensor_with_parallelism([key], []) == [None]
    got = store.batch_put_tensor_with_parallelism(
        [key, key + "2"], [tensor, tensor], [None, layout(axis("tp", 0, 2, 0))]
    )
    assert got == [0, 0]
    read = store.batch_get_tensor_with_parallelism([key, key + "2"], [None, target("shard", axis("tp", 0, 2, 0))])
    assert same(read[0], tensor) and same(read[1], tensor)


# Types that Mooncake C++ lacks, by their number in the header.
OWN = {code: name for code, (name, _) in ALL_TYPES.items() if FIRST_OWN_CODE <= code not in QUANTIZED and hasattr(torch, name)}


@pytest.mark.parametrize("code", OWN, ids=OWN.get)
def test_types_that_the_other_package_lacks(make_store, key, code):
    dtype = getattr(torch, OWN[code])
    a, b = make_store(), make_store()
    shapes = [(), (1,), (0, 4), (2, 3), (300, 700)]
    tensors = [tensor_of(dtype, *shape, seed=i) for i, shape in enumerate(shapes)]
    # A view that is not contiguous, although torch cannot copy elements of every type.
    tensors.append(tensor_of(torch.uint8, 6, 8 * tensors[0].element_size()).view(dtype).t())
    keys = [f"{key}-{i}" for i in range(len(tensors))]
    assert [a.put_tensor(one, tensor) for one, tensor in zip(keys, tensors)] == [0] * len(keys), a.last_error()
    assert a.batch_upsert_tensor(keys, tensors) == [0] * len(keys)
    for one, tensor, got in zip(keys, tensors, b.batch_get_tensor(keys)):
        tensor = contiguous(tensor)
        assert same(got, tensor) and same(b.get_tensor(one), tensor)
        assert struct.unpack_from("<i", b.get(one), 8) == (code,) and code > 1 << 15
        header, address, size, owner = _serialize_tensor(tensor)
        assert same(_deserialize_tensor(header + bytes_of(tensor)), tensor)


def bytes_of(tensor):
    return contiguous(tensor).reshape(-1).view(torch.uint8).numpy().tobytes()


def contiguous(tensor):
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[tensor.element_size()]
    return tensor.view(size).contiguous().view(tensor.dtype)


@pytest.mark.parametrize("code", OWN, ids=OWN.get)
def test_shards_of_types_that_the_other_package_lacks(store, key, code):
    whole = tensor_of(getattr(torch, OWN[code]), 6, 4, seed=code)
    for dim in (0, 1):
        assert store.put_tensor_with_tp(f"{key}-{dim}", whole, 0, 2, dim) == 0
        for rank in range(2):
            part = contiguous(whole.view(torch.uint8).reshape(6, 4, -1).narrow(dim, rank * (3 - dim), 3 - dim))
            got = store.get_tensor_with_tp(f"{key}-{dim}", rank, 2, dim)
            assert got.dtype == whole.dtype and bytes_of(got) == bytes_of(part)
        full = store.get_tensor_with_parallelism(f"{key}-{dim}", target("full", axis("tp", 0, 2, dim)))
        assert same(full, whole)


def test_conjugate_and_negative_views(store, key):
    tensor = torch.tensor([1 + 2j, -0.0 - 3j, complex(float("nan"), 1)])
    for i, view in enumerate((tensor.conj(), tensor.conj().imag, tensor.to(torch.complex32).conj())):
        assert store.put_tensor(f"{key}-{i}", view) == 0
        assert same(store.get_tensor(f"{key}-{i}"), view.resolve_conj().resolve_neg())


def quantized():
    """Returns quantized tensors of every type and scheme."""
    numbers = torch.arange(15.0).reshape(3, 5) / 7 - 1
    made = [torch.quantize_per_tensor(numbers, 0.1, 3, one) for one in (torch.qint8, torch.quint8, torch.qint32)]
    made.append(torch.quantize_per_tensor(numbers, 0.1, 3, torch.qint8).t())
    made.append(torch.quantize_per_tensor(torch.ones(300, 1100), 1 / 3, 0, torch.quint8))
    for axis_, count in ((0, 3), (1, 5)):
        scales, zeros = torch.arange(1, count + 1).double() / 3, torch.arange(count)
        made.append(torch.quantize_per_channel(numbers, scales, zeros, axis_, torch.qint8))
    many = torch.ones(20_000, 2)
    made.append(torch.quantize_per_channel(many, torch.arange(1, 20_001) / 3, torch.zeros(20_000).long(), 0, torch.quint8))
    for dtype in (torch.quint4x2, torch.quint2x4):
        made.append(torch.quantize_per_channel(numbers, torch.rand(3) + 0.1, torch.rand(3), 0, dtype))
    made.append(torch.quantize_per_tensor(torch.empty(0, 3), 0.5, 1, torch.qint8))
    return made


def raw_bytes(tensor):
    storage = tensor.contiguous().untyped_storage()
    return ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""


def same_quantized(one, other):
    assert one is not None and (one.dtype, one.shape, one.qscheme()) == (other.dtype, other.shape, other.qscheme())
    if other.qscheme() == torch.per_tensor_affine:
        scales = (one.q_scale(), one.q_zero_point()) == (other.q_scale(), other.q_zero_point())
    else:
        pairs = [(of.q_per_channel_scales(), of.q_per_channel_zero_points()) for of in (one, other)]
        scales = all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(*pairs))
        scales = scales and one.q_per_channel_axis() == other.q_per_channel_axis()
    return scales and raw_bytes(one) == raw_bytes(other)


def test_quantized_tensors(make_store, key):
    a, b = make_store(), make_store()
    tensors = quantized()
    keys = [f"{key}-{i}" for i in range(len(tensors))]
    assert a.batch_put_tensor(keys, tensors) == [0] * len(keys), a.last_error()
    memory = torch.zeros(2 << 20, dtype=torch.uint8)
    assert b.register_buffer(memory.data_ptr(), memory.numel()) == 0
    of_memory = (memory.data_ptr(), memory.numel())
    for one, tensor, got in zip(keys, tensors, b.batch_get_tensor(keys)):
        assert same_quantized(got, tensor) and same_quantized(b.get_tensor_with_parallelism(one), tensor)
        assert same_quantized(_deserialize_tensor(b.get(one)), tensor)
        assert same_quantized(b.get_tensor_into(one, *of_memory), tensor)
        assert b.put_tensor_from(one + "-from", memory.data_ptr(), b.get_size(one)) == 0
        assert same_quantized(b.get_tensor_with_parallelism_into(one + "-from", *of_memory), tensor)
        assert a.put(one + "-raw", tensor) == (0 if tensor.numel() else -600)
        assert a.get(one + "-raw") == raw_bytes(tensor)
        # Scales belong to the whole.
        assert a.put_tensor_with_tp(one + "-tp", tensor, 0, 3, 0) == -600
        assert "quantized" in a.last_error().message
        assert a.put_tensor_with_parallelism(one + "-tp", tensor, layout(axis("tp", 0, 2, 0))) == -600
        assert b.get_array(one) is None and "numpy" in b.last_error().message
        assert same_quantized(b.get_tensor_with_tp(one, 0, 1), tensor)
        assert b.get_tensor_with_tp(one, 0, len(tensor) or 2) is None and "quantized" in b.last_error().message
    assert b.unregister_buffer(memory.data_ptr()) == 0
    part = torch.quantize_per_channel(torch.ones(4, 6), torch.ones(4), torch.zeros(4), 0, torch.quint4x2)
    packed = torch.quantize_per_tensor(torch.ones(4, 6), 0.5, 0, torch.quint4x2)
    assert a.put_tensor(key + "-part", packed[1:]) == -600 and "quint4x2" in a.last_error().message
    assert a.put_tensor(key + "-part", part) == 0


INVALID_SCALES = [
    b"",
    b"{}",
    b"7",
    b"x",
    b'{"scheme":"per_tensor_affine","scale":"x","zero_point":0}',
    b'{"scheme":"per_channel_affine","axis":0,"scales":[1],"zero_points":[0]}',
    b"[" * 5000,
    b'{"scheme":"other"}',
    b'{"scheme":"per_channel_affine","axis":5,"scales":[1,1],"zero_points":[0,0]}',
]


@pytest.mark.parametrize("parameters", INVALID_SCALES, ids=range(9))
def test_invalid_scales_are_no_tensor(store, key, parameters):
    code = next(code for code in QUANTIZED if ALL_TYPES[code][0] == "quint8")
    header = Header(code, (2, 3), (2, 3), data_offset=304 + len(parameters), parameters=parameters)
    assert store.put(key, header.pack() + bytes(6)) == 0
    assert store.get_tensor(key) is None and "scales" in store.last_error().message
    assert store.get_tensor_with_parallelism(key) is None
    with pytest.raises(ValueError):
        _deserialize_tensor(header.pack() + bytes(6))


def test_safetensors_of_every_type(store, key, tmp_path):
    pytest.importorskip("safetensors")
    lacking = set()
    for code, (name, _) in ALL_TYPES.items():
        if code in QUANTIZED or not hasattr(torch, name):
            continue
        tensor = tensor_of(getattr(torch, name), 6, 4, seed=code)
        path = str(tmp_path / name)
        assert store.put_tensor(f"{key}-{name}", tensor) == 0
        if store.save_tensor_to_safetensor(f"{key}-{name}", path) == 0:
            assert same(store.load_tensor_from_safetensor(f"{key}-{name}-again", path), tensor)
            assert same(store.get_tensor(f"{key}-{name}-again"), tensor)
        else:
            lacking.add(name)
            assert str(tensor.dtype) in store.last_error().message
    assert not lacking & {str(dtype).removeprefix("torch.") for dtype in DTYPES}


ML_TYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "int4", "uint4", "int2")


def arrays():
    """Yields arrays of every type that numpy or ml_dtypes and the header have."""
    for name in "? i1 u1 i2 u2 i4 u4 i8 u8 f2 f4 f8 c8 c16".split():
        yield np.arange(12).astype(name).reshape(3, 4)
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name in ML_TYPES:
        yield np.arange(12, dtype=np.uint8).view(np.uint8).astype(getattr(ml_dtypes, name)).reshape(3, 4)


def test_arrays_keep_type_and_shape(make_store, key):
    a, b = make_store(), make_store()
    for i, array in enumerate(arrays()):
        forms = (array, array.T, array[1, 2:3].reshape(()), array[:0], np.repeat(array, 50_000))
        for j, form in enumerate(forms):
            assert a.put_array(f"{key}-{i}-{j}", form) == 0, a.last_error()
            got = b.get_array(f"{key}-{i}-{j}")
            assert (got.dtype, got.shape) == (form.dtype, form.shape) and got.tobytes() == form.tobytes()
        got[...] = array.reshape(-1)[0]
        assert a.upsert_array(f"{key}-{i}-0", array[:1]) == 0 and b.get_array(f"{key}-{i}-0").shape == (1, 4)
        assert b.get_tensor(f"{key}-{i}-1").shape == (4, 3)
    for wrong in (np.array(["x"]), np.array([None]), np.zeros(2, ">i4"), np.zeros(2, "M8[s]"), np.zeros((1,) * 9)):
        assert a.put_array(key, wrong) == -600 and str(wrong.dtype) in a.last_error().message
    assert b.get_array(key) is None and "no such object" in b.last_error().message
    assert a.put(key, b"x" * 500) == 0 and b.get_array(key) is None and "use get" in b.last_error().message
    assert a.put_tensor(key + "-c", tensor_of(torch.float4_e2m1fn_x2, 3)) == 0 and b.get_array(key + "-c") is None
    assert "float4_e2m1fn_x2" in b.last_error().message


def test_values_of_other_libraries(store, key):
    values = [(array, array.tobytes()) for array in arrays()]
    values += [(array.T, array.T.tobytes()) for array in arrays()]
    values += [(np.arange(4).astype("M8[s]"), np.arange(4).tobytes()), (np.zeros(0, "M8[s]"), b"")]
    for code, (name, _) in ALL_TYPES.items():
        if code not in QUANTIZED and hasattr(torch, name):
            tensor = tensor_of(getattr(torch, name), 6, 4)
            values += [(tensor, bytes_of(tensor)), (tensor.t(), bytes_of(tensor.t()))]
    values.append((torch.ones(2, requires_grad=True), bytes_of(torch.ones(2))))
    for i, (value, expected) in enumerate(values):
        name = f"{key}-{i}"
        code = store.put(name, value)
        assert (code == 0) == bool(expected) and store.get(name) == expected, value
        if not expected:
            continue
        assert store.upsert(name, value) == 0 and store.get(name) == expected
        assert store.put_batch([name + "b", name + "c"], [value, b"x"]) == 0 and store.get(name + "b") == expected
        assert store.upsert_batch([name + "b"], [value]) == 0 and store.get(name + "b") == expected
        if not hasattr(value, "__buffer__") and not isinstance(value, np.ndarray):
            assert store.put_parts(name + "p", b"<", value, b">") == 0 and store.get(name + "p") == b"<" + expected + b">"
            assert store.upsert_parts(name + "p", value) == 0 and store.get(name + "p") == expected


def test_array_interface_and_dlpack(store, key):
    array, tensor = np.arange(6.0).reshape(2, 3), torch.arange(6).bfloat16()

    class OfDlpack:
        def __init__(self, of, device=(1, 0)):
            self.of, self.device = of, device

        def __dlpack__(self, **how):
            return self.of.__dlpack__(**how)

        def __dlpack_device__(self):
            return self.device

    class OfInterface:
        __array_interface__ = array.__array_interface__

    for i, (value, expected) in enumerate(
        [(OfInterface(), array.tobytes()), (OfDlpack(array), array.tobytes()), (OfDlpack(tensor), bytes_of(tensor))]
    ):
        assert store.put(f"{key}-{i}", value) == 0 and store.get(f"{key}-{i}") == expected
    with pytest.raises(TypeError, match="lies on a device"):
        store.put(key, OfDlpack(array, (2, 0)))
    for value in (torch.zeros(2).to_sparse(), torch.ones(2, device="meta"), object(), "text", 7, np.array([None])):
        with pytest.raises(TypeError):
            store.put(key, value)
    assert store.is_exist(key) == 0
