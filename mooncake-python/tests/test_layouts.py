"""Shards that do not belong together, inconsistent layouts, and invalid arguments: no mixture, no
hang, always a result.
"""

from __future__ import annotations

import struct

import pytest

torch = pytest.importorskip("torch")

from layouts import axis, layout, target, tp  # noqa: E402
from mooncake._layout import Axis, Header, Manifest, SHARD  # noqa: E402
from mooncake.store import (  # noqa: E402
    ParallelAxis,
    TensorParallelism,
    _deserialize_tensor,
    _serialize_tensor,
)

MOST = 2**31 - 1


def full(store, key, split_dim=0):
    return store.get_tensor_with_parallelism(key, target("full", tp(0, 1, split_dim)))


def put_shards(store, key, whole, size, upsert=False):
    put = store.upsert_tensor_with_parallelism if upsert else store.put_tensor_with_parallelism
    for rank, shard in enumerate(whole.chunk(size)):
        assert put(key, shard, tp(rank, size)) == 0


WHOLE = torch.arange(32, dtype=torch.float32).reshape(8, 4)


def test_assigned_layouts_are_copied(store, key):
    one, of = ParallelAxis(), TensorParallelism()
    one.kind, one.size, one.split_dim = "tp", 4, 0
    layouts = []
    for rank in range(4):
        one.rank, of = rank, TensorParallelism()
        of.axes = [one]
        layouts.append(of)
    assert [of.axes[0].rank for of in layouts] == [0, 1, 2, 3]
    assert store.batch_put_tensor_with_parallelism([key] * 4, list(WHOLE.chunk(4)), layouts) == [0] * 4
    assert torch.equal(full(store, key), WHOLE)
    wanted = target("shard", layouts[0])
    layouts[0].axes = [axis("tp", 1, 4, split_dim=0)]
    assert torch.equal(store.get_tensor_with_parallelism(key, wanted), WHOLE[:2])


def test_shards_of_two_layouts_are_not_mixed(store, key):
    put_shards(store, key, WHOLE, 2)
    assert torch.equal(full(store, key), WHOLE)
    assert store.upsert_tensor_with_parallelism(key, WHOLE[:, :2].contiguous(), tp(0, 2, 1)) == 0
    assert full(store, key) is None and full(store, key, 1) is None
    # A whole tensor in place of a shard, and two swapped shards.
    for spoilt in ({0: WHOLE[:4]}, {0: WHOLE[4:], 1: WHOLE[:4]}):
        put_shards(store, key, WHOLE, 2, upsert=True)
        assert torch.equal(full(store, key), WHOLE)
        for rank, part in spoilt.items():
            if len(spoilt) == 1:
                assert store.upsert_tensor(f"{key}_tp_{rank}", part.clone()) == 0
            else:
                swapped = Header(0, (4, 4), (8, 4), SHARD, (Axis("tp", 0, 1 - rank, 2, 0, 0),))
                assert store.upsert(f"{key}_tp_{rank}", swapped.pack() + part.contiguous().numpy().tobytes()) == 0
        assert full(store, key) is None
        assert store.get_tensor_with_parallelism(key, target("shard", tp(0, 4))) is None


def test_old_shards_are_not_mixed_with_newer_ones(store, key):
    assert store.put_tensor_with_tp(key, WHOLE[:4], 0, 2, 0) == 0
    put_shards(store, key, WHOLE + 100, 4)
    got = full(store, key)
    assert got is None or torch.equal(got, WHOLE[:4])
    assert store.upsert_tensor_with_parallelism(key, WHOLE[:2] + 100, tp(0, 4)) == 0
    assert full(store, key) is None


@pytest.mark.parametrize("kind", ["manifest", "writer", "header", "empty"])
def test_inconsistent_layouts_end_at_the_first_missing_shard(store, key, kind):
    lie = Manifest(0, 0, MOST, (MOST, 4))
    if kind == "manifest":
        put_shards(store, key, WHOLE, 2)
        assert store.upsert(f"{key}__parallelism_manifest", lie.pack()) == 0
    elif kind == "writer":
        assert store.put(f"{key}__writer_manifest", lie.pack()) == 0
        assert store.get_tensor_with_parallelism(key, target("full")) is None
    elif kind == "header":
        header = Header(0, (1, 4), (MOST, 4), SHARD, (Axis("tp", 0, 0, MOST, 0, 0),))
        assert store.put(f"{key}_tp_0", header.pack() + bytes(16)) == 0
    else:
        assert store.put_tensor_with_parallelism(key, torch.empty(0, 4), tp(0, MOST)) == 0
    assert full(store, key) is None
    # A tensor of another shape than the shards.
    put_shards(store, key + "-2", WHOLE, 2)
    assert store.upsert(f"{key}-2__parallelism_manifest", Manifest(0, 0, 2, (0, 4)).pack()) == 0
    assert full(store, key + "-2") is None


def test_one_impossible_shape_fails_alone(store, key):
    head = bytearray(Header(0, (0, 2, 2), (0, 2, 2)).pack())
    for at in range(len(head) - 7):
        if head[at : at + 8] == struct.pack("<q", 2):
            head[at : at + 8] = struct.pack("<q", 1 << 62)
    assert store.put(key, bytes(head)) == 0 and store.put_tensor(key + "-good", WHOLE) == 0
    good, bad = store.batch_get_tensor([key + "-good", key])
    assert torch.equal(good, WHOLE) and bad is None
    assert store.get_tensor_with_parallelism(key) is None
    with pytest.raises(ValueError):
        _deserialize_tensor(bytes(head))


def test_keys_name_every_id_that_is_set(store, key):
    odd = {
        "__dp_0of2_eid3": [axis("dp", 0, 2, expert_id=3)],
        "__pp_0of2_eid4_sid5": [axis("pp", 0, 2, expert_id=4, stage_id=5)],
        "__ep_0of2_eid4_sid5": [axis("ep", 0, 2, expert_id=4, stage_id=5)],
        "__dp_0of2_eid6_sid7__tp_0of2_sd0_eid4_sid5": [
            axis("dp", 0, 2, expert_id=6, stage_id=7),
            axis("tp", 0, 2, split_dim=0, expert_id=4, stage_id=5),
        ],
    }
    for suffix, axes in odd.items():
        assert store.put_tensor_with_parallelism(key, WHOLE, layout(*axes)) == 0
        assert store.is_exist(key + suffix) == 1, suffix
        assert store.get_tensor_with_parallelism(key, target("shard", layout(*axes))) is not None


def test_shards_of_several_axes_are_found_without_a_manifest(store, key):
    both = layout(axis("tp", 1, 2, split_dim=1), axis("dp", 0, 2))
    head, address, size, owner = _serialize_tensor(WHOLE)
    memory = torch.empty(304 + size, dtype=torch.uint8)
    memory[:304] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    memory[304:] = WHOLE.flatten().view(torch.uint8)
    del address, owner
    assert store.register_buffer(memory.data_ptr(), memory.nbytes) == 0
    assert store.put_tensor_with_parallelism_from(key, memory.data_ptr(), memory.nbytes, both) == 0
    assert torch.equal(store.get_tensor_with_parallelism(key, target("full", both)), WHOLE)
    assert torch.equal(store.get_tensor_with_parallelism(key, target("shard", both)), WHOLE[:, 2:])
    assert store.unregister_buffer(memory.data_ptr()) == 0


def test_axes_of_a_reserved_kind_are_read(store, key):
    kept = Header(0, (8, 4), (8, 4), SHARD, (Axis("reserved", 0, 0, 1, None, 0),))
    assert store.put(key, kept.pack() + WHOLE.numpy().tobytes()) == 0
    assert torch.equal(store.get_tensor(key), WHOLE)


def test_a_shard_that_is_stored_again_stays_a_shard(store, key):
    put_shards(store, key, WHOLE, 2)
    size = 304 + WHOLE.nbytes // 2
    memory = torch.empty(size, dtype=torch.uint8)
    assert store.register_buffer(memory.data_ptr(), size) == 0
    assert store.get_into(f"{key}_tp_1", memory.data_ptr(), size) == size
    assert store.put_tensor_with_parallelism_from(key + "-again", memory.data_ptr(), size) == 0
    assert store.get(key + "-again") == store.get(f"{key}_tp_1")
    short = [key + "-3", key + "-4"], [memory.data_ptr()] * 2, [size, 10]
    assert store.batch_put_tensor_with_parallelism_from(*short) == [-600, -600]
    assert store.unregister_buffer(memory.data_ptr()) == 0


def test_parameters_are_tensors(store, key):
    weight = torch.nn.Linear(4, 8).weight
    assert store.put_tensor(key, weight) == 0
    assert store.put_tensor_with_tp(key + "-tp", weight, 0, 2, 0) == 0
    assert torch.equal(store.get_tensor_with_tp(key + "-tp", 1, 2), weight.detach()[4:])
    with pytest.raises(ValueError):
        _serialize_tensor(torch._efficientzerotensor(4))


def test_the_default_device_is_ignored(store, key):
    large = torch.arange(200_000, dtype=torch.int64)
    assert store.put_tensor(key, large) == 0
    put_shards(store, key + "-shards", WHOLE, 2)
    with torch.device("meta"):
        got, shards = store.get_tensor(key), full(store, key + "-shards")
    assert got.device.type == "cpu" and torch.equal(got, large) and torch.equal(shards, WHOLE)


def test_a_string_is_not_a_list_of_keys(store):
    pair = [torch.ones(1), torch.ones(1)]
    for call in (
        lambda: store.batch_put_tensor("xy", pair),
        lambda: store.batch_put_tensor_with_tp("xy", pair, 0, 2, 0),
        lambda: store.batch_put_tensor_with_parallelism("xy", pair),
        lambda: store.batch_get_tensor_with_tp("xy", 0, 2),
        lambda: store.batch_get_tensor_with_parallelism("xy"),
        lambda: store.batch_put_tensor_from("xy", [0, 0], [400, 400]),
    ):
        with pytest.raises(TypeError):
            call()
    assert store.batch_is_exist(["x", "y", "x_tp_0"]) == [0, 0, 0]


def test_layouts_reject_invalid_numbers(store, key):
    one = ParallelAxis()
    for name, value in (("rank", 1.5), ("size", 2**40), ("expert_id", "e"), ("stage_id", 1.5), ("rank", None), ("kind", 1)):
        with pytest.raises(TypeError):
            setattr(one, name, value)
    one.kind, one.rank, one.size, one.split_dim = b"tp", True, 2, 0
    assert (one.kind, one.rank) == ("tp", 1) and type(one.rank) is int
    assert store.put_tensor_with_parallelism(key, WHOLE[4:], layout(one)) == 0 and store.is_exist(f"{key}_tp_1") == 1
    assert store.get_tensor_with_parallelism(key, layout(one)) is None, "no target"
    for config in ({}, 0, "x"):
        with pytest.raises(TypeError, match="ReplicateConfig"):
            store.pub_tensor(key, WHOLE, config)
        with pytest.raises(TypeError, match="ReplicateConfig"):
            store.put_tensor_with_parallelism(key, WHOLE, tp(0, 2), config)
    with pytest.raises(TypeError):
        store.get_tensor_with_tp(key, "0", 2)


def test_invalid_safetensors_files(store, key, tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    assert store.put_tensor(key, WHOLE) == 0 and store.put_tensor("a/b", WHOLE) in (0, -705)
    assert store.save_tensor_to_safetensor(key) == 0 and (tmp_path / key).exists()
    for name in ("a/b", key):
        assert store.save_tensor_to_safetensor(name, str(tmp_path / "none" / "x")) == -600
    assert store.save_tensor_to_safetensor(key, str(tmp_path)) == -600
    assert store.save_tensor_to_safetensor("no such key") == -1100
    (tmp_path / "bad").write_bytes(b"garbage" * 10)
    for name in ("bad", "none", "."):
        assert store.load_tensor_from_safetensor(key + "-no", name) is None
    assert torch.equal(store.load_tensor_from_safetensor(key + "-new", key), WHOLE)
    assert torch.equal(store.get_tensor(key + "-new"), WHOLE)
    (tmp_path / key).rename(tmp_path / f"{key}.st")
    assert torch.equal(store.load_tensor_from_safetensor(None, f"{key}.st"), WHOLE)
    assert torch.equal(store.get_tensor(f"{key}.st"), WHOLE)


# Nearby short strips are read at once, others one by one. With a request for each of a million
# short strips, this took 4.6 s.
@pytest.mark.parametrize(("rows", "columns"), [(9, 40_000), (1000, 4), (9, 8), (40, 3000), (8, 3000), (12, 9000)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_strips_of_every_width(store, key, rows, columns, ranks):
    whole = torch.arange(rows * columns, dtype=torch.int32).reshape(rows, columns)
    for rank, part in enumerate(whole.chunk(ranks, dim=1)):
        assert store.put_tensor_with_parallelism(key, part.contiguous(), tp(rank, ranks, 1)) == 0
    assert torch.equal(full(store, key, 1), whole)
    for wanted in (4, 1000):
        for rank in range(0, wanted, 333) if columns % wanted == 0 else ():
            got = store.get_tensor_with_parallelism(key, target("shard", tp(rank, wanted, 1)))
            assert torch.equal(got, whole.chunk(wanted, dim=1)[rank]), (wanted, rank)
