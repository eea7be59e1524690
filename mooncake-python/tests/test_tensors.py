"""Tensors: stored bytes, shards, and reads."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the tensor calls need torch")

import layouts  # noqa: E402
from layouts import axis, layout  # noqa: E402
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
    bad = [None, [1.0], b"x", torch.zeros(2).to_sparse(), torch.zeros(2).cfloat()]
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
    assert store.get_tensor_with_parallelism(key, target("shard", axis("tp", 0, 2, 1 - dim))) is None, "other dim"
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
    assert store.get_tensor_with_parallelism(key, target("shard", axis("tp", 0, 9, 0))) is None
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
