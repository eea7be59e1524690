"""Objects under the keys of shards: replaced halves, inconsistent headers, whole tensors in place
of shards.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the tensor calls need torch")

from conftest import effort  # noqa: E402
from layouts import axis, layout, target, tp  # noqa: E402
from mooncake._layout import Header, LayoutError, Manifest  # noqa: E402
from mooncake.store import ReplicateConfig, _serialize_tensor  # noqa: E402

MOST = 2**31 - 1
WHOLE = torch.arange(16, dtype=torch.float32).reshape(4, 4)
# Offsets of fields in the header of a shard.
LAYOUT, GLOBAL, LOCAL, AXES, RANK, SIZE, SPLIT_DIM = 16, 40, 104, 168, 184, 188, 192


def read(store, key, mode, parallelism=None):
    return store.get_tensor_with_parallelism(key, target(mode, parallelism))


def put_shards(store, key, whole, size):
    for rank, part in enumerate(whole.chunk(size)):
        assert store.put_tensor_with_parallelism(key, part, tp(rank, size)) == 0


def put_written(store, key, whole, size):
    for rank in range(size):
        writer = SimpleNamespace(rank=rank, size=size, split_dim=0)
        assert store.put_tensor_with_parallelism(key, whole, writer_partition=writer) == 0


def change(store, key, at, *numbers, width="i"):
    data = bytearray(store.get(key))
    struct.pack_into(f"<{len(numbers)}{width}", data, at, *numbers)
    assert store.upsert(key, bytes(data)) == 0


LIES = {
    "full": (LAYOUT, (0,), "i"),
    "without axes": (AXES, (0,), "i"),
    "rank": (RANK, (1,), "i"),
    "size": (SIZE, (4,), "i"),
    "split_dim": (SPLIT_DIM, (1,), "i"),
    "global shape": (GLOBAL, (8, 4), "q"),
    "local shape": (LOCAL, (4, 2), "q"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_contradicts_its_key_is_not_a_shard(store, key, lie):
    at, numbers, width = LIES[lie]
    put_shards(store, key, WHOLE, 2)
    assert torch.equal(read(store, key, "full", tp(0, 2)), WHOLE)
    change(store, f"{key}_tp_0", at, *numbers, width=width)
    assert read(store, key, "full", tp(0, 2)) is None
    for size in (1, 2, 4):
        assert read(store, key, "shard", tp(0, size)) is None, size
    assert torch.equal(read(store, key, "shard", tp(1, 2)), WHOLE[2:]), "the other is unchanged"
    # Without a manifest, the first shard describes the others.
    assert store.remove(f"{key}__parallelism_manifest", True) == 0
    assert read(store, key, "full", tp(0, 2)) is None
    put_written(store, key, WHOLE, 2)
    change(store, f"{key}__writer_0of2_sd0", at, *numbers, width=width)
    assert read(store, key, "full") is None
    assert read(store, key, "shard", tp(0, 2)) is None


def test_shards_that_were_replaced_by_larger_ones(store, key):
    put_shards(store, key, torch.arange(32, dtype=torch.float32).reshape(8, 4), 4)
    for rank in range(2):
        assert store.remove(f"{key}_tp_{rank}", True) == 0
    assert store.put_tensor_with_tp(key, WHOLE, 0, 2, 0) == 0
    assert read(store, key, "full", tp(0, 2)) is None and read(store, key, "full", tp(0, 4)) is None
    for rank, size in ((0, 1), (0, 4), (1, 4), (0, 8)):
        assert read(store, key, "shard", tp(rank, size)) is None
    assert torch.equal(read(store, key, "shard", tp(1, 2)), WHOLE[2:]), "all of one layout"


def test_parts_of_several_writers_form_the_whole_tensor(store, key):
    plain = torch.arange(3)
    spoilt = {"missing": None, "shards": (20, 3), "uneven": (32, 5), "kind": (0, 1)}
    for name, of in spoilt.items():
        put_written(store, key + name, WHOLE, 2)
        assert torch.equal(read(store, key + name, "full"), WHOLE)
        if of is None:
            assert store.remove(f"{key}{name}__writer_1of2_sd0", True) == 0
        else:
            change(store, f"{key}{name}__writer_manifest", *of)
        assert read(store, key + name, "full") is None, name
        assert store.put_tensor(key + name, plain) == 0
        assert torch.equal(read(store, key + name, "full"), plain), name


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 3)], ids=str)
def test_a_tensor_without_elements_has_all_its_shards(store, key, shape):
    whole = torch.empty(shape[0] * 4, *shape[1:])
    for rank in range(4):
        assert read(store, key, "full", tp(0, 4)) is None
        assert read(store, key, "shard", tp(0, 1)) is None
        assert store.put_tensor_with_parallelism(key, torch.empty(shape), tp(rank, 4)) == 0
    assert read(store, key, "full", tp(0, 4)).shape == whole.shape
    assert read(store, key, "shard", tp(1, 2)).shape == whole.chunk(2)[1].shape


@pytest.fixture
def objects(store, key):
    """Returns a shard and a whole tensor in stored form, in registered memory."""
    assert store.put_tensor_with_tp(f"{key}-of", WHOLE, 0, 2, 0) == 0
    header, address, size, owner = _serialize_tensor(WHOLE)
    shard = store.get(f"{key}-of_tp_1")
    memory = torch.frombuffer(bytearray(shard + header + WHOLE.numpy().tobytes()), dtype=torch.uint8)
    at = memory.data_ptr()
    assert store.register_buffer(at, memory.nbytes) == 0
    yield shard, (at, len(shard)), (at + len(shard), 304 + WHOLE.nbytes), memory
    assert store.unregister_buffer(at) == 0


def test_items_with_and_without_layout_in_one_batch(store, key, objects):
    shard, of_shard, of_whole, _memory = objects
    pointers, sizes = zip(of_shard, of_whole)
    for upsert in (False, True):
        call = store.batch_upsert_tensor_with_parallelism_from if upsert else store.batch_put_tensor_with_parallelism_from
        name = f"{key}-{upsert}"
        assert call([name, name + "-tp"], list(pointers), list(sizes), [None, tp(0, 2)]) == [0, 0]
        assert store.get(name) == shard
        assert store.get(name + "-tp_tp_1") == shard
        writers = [None, SimpleNamespace(rank=1, size=2, split_dim=0)]
        assert call([name + "-2", name + "-w"], list(pointers), list(sizes), None, None, writers) == [0, 0]
        assert store.get(name + "-2") == shard and store.get(name + "-w__writer_1of2_sd0") == shard
    # A single rank is not a layout.
    assert store.put_tensor_with_tp_from(key, *of_shard) == 0 and store.get(key) == shard


def test_an_invalid_tensor_fails_the_batch_only_without_lists(store, key, objects):
    _shard, _of_shard, of_whole, _memory = objects
    call = store.batch_put_tensor_with_parallelism_from
    pointers, sizes = [of_whole[0]] * 2, [10, of_whole[1]]
    assert call([key, key + "-2"], pointers, sizes) == [-600, -600] and store.is_exist(key + "-2") == 0
    assert call([key, key + "-2"], pointers, sizes, [None, None]) == [-600, 0]
    assert torch.equal(store.get_tensor(key + "-2"), WHOLE)


def test_too_many_shards_are_rejected(store, key, objects):
    _shard, _of_shard, _of_whole, memory = objects
    empty = torch.empty(0, 4)
    assert store.put_tensor_with_tp(key, empty, 0, MOST, 0) == -600
    assert store.batch_put_tensor_with_tp([key], [torch.empty(MOST, 0)], 0, MOST, 0) == [-600]
    header = _serialize_tensor(empty)[0]
    memory[:304] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    assert store.put_tensor_with_tp_from(key, memory.data_ptr(), 304, 0, MOST, 0) == -600
    assert store.put_tensor_with_parallelism_from(key, memory.data_ptr(), 304, tp(0, MOST)) == -600
    assert store.is_exist(f"{key}_tp_0") == 0
    assert store.put_tensor_with_tp(key, empty, 0, 64, 0) == 0 and store.is_exist(f"{key}_tp_63") == 1


def test_large_shapes_without_elements(store, buffer_of, key):
    large = torch.empty(0, 1 << 62)
    assert store.put_tensor(key, large) == 0
    assert store.get_tensor(key).shape == large.shape
    assert store.get_tensor_with_parallelism(key).shape == large.shape
    put_shards(store, key + "-of", large, 1)
    assert read(store, key + "-of", "full", tp(0, 1)).shape == large.shape
    wide = tp(0, 2, 1)
    assert store.put_tensor_with_tp(key + "-wide", large, 0, 2, 1) == 0
    assert read(store, key + "-wide", "full", wide).shape == large.shape
    assert store.get_tensor_with_parallelism_into(key + "-wide", *buffer_of, target("full", wide)).shape == large.shape
    # A whole tensor that cannot exist fails without the others.
    long = torch.empty(1 << 40, 0)
    assert store.put_tensor_with_parallelism(key + "-no", long, tp(0, MOST)) == -600
    codes = store.batch_put_tensor_with_parallelism([key + "-no", key + "-yes"], [long, WHOLE], [tp(0, MOST), None])
    assert codes == [-600, 0]


@pytest.fixture
def buffer_of(store):
    memory = torch.zeros(4096, dtype=torch.uint8)
    assert store.register_buffer(memory.data_ptr(), memory.nbytes) == 0
    yield memory.data_ptr(), memory.nbytes
    assert store.unregister_buffer(memory.data_ptr()) == 0


def test_unreadable_objects_are_not_written():
    for shape in ((1 << 62, 1 << 62), (0, 1 << 62, 1 << 62), (1 << 62, 2)):
        with pytest.raises(LayoutError):
            Header(0, shape, shape).pack()
        with pytest.raises(LayoutError):
            Manifest(0, 0, 1, shape).pack()
    for shape in ((0, 1 << 62), (1 << 60,), (2, 3)):
        head = Header(0, shape, shape).pack()
        assert Manifest.parse(Manifest(0, 0, 1, shape).pack()) == Manifest(0, 0, 1, shape)
        total = 304 + Header(0, shape, shape).data_bytes
        assert Header.parse(head, total) == Header(0, shape, shape)


# Every number of writers and readers, and every remainder.

COUNTS = range(1, 6)


def parts_of(whole, count, dim):
    """Returns the equal parts of a tensor, or `None` if it has none."""
    return whole.chunk(count, dim) if whole.shape[dim] % count == 0 else None


def check_reads(store, key, whole, dim, name, buffer, has_tp=True):
    """Reads all shards along all dimensions, with each call that has a layout."""
    for readers, along in itertools.product(COUNTS, range(whole.dim())):
        expected = parts_of(whole, readers, along)
        wanted = [target("shard", tp(rank, readers, along)) for rank in range(readers)]
        wanted += [target("full", one.parallelism) for one in wanted]
        parts = None if expected is None else [*expected, *[whole] * readers]
        got = store.batch_get_tensor_with_parallelism([key] * len(wanted), wanted)
        check(store, got, parts, (name, readers, along))
        # One buffer at a time.
        got = [store.get_tensor_with_parallelism_into(key, *buffer, one) for one in wanted[:1]]
        check(store, got, parts and parts[:1], (name, readers, along, "into"))
        # A dimension of 0 is the default of the calls, which read along that of the shards.
        if has_tp and (along or not dim):
            for rank in range(readers):
                got = [store.get_tensor_with_tp(key, rank, readers, along)]
                check(store, got, parts and [whole if readers == 1 else parts[rank]], (name, readers, along, rank))
            got = [store.get_tensor_with_tp_into(key, *buffer, readers - 1, readers, along)]
            check(store, got, parts and [parts[readers - 1]], (name, readers, along, "into"))
        if has_tp and along == dim:
            for got in (store.get_tensor_with_tp(key, 0, readers), *store.batch_get_tensor_with_tp([key], 0, readers)):
                check(store, [got], parts and [parts[0]], (name, readers, "default"))
            got = store.batch_get_tensor_with_tp_into([key], *([one] for one in buffer), readers - 1, readers)
            check(store, got, parts and [parts[readers - 1]], (name, readers, "default into"))


def check(store, got, expected, name):
    if expected is None:
        assert all(one is None for one in got), name
        assert "does not divide evenly" in store.last_error().message, name
        return
    for one, part in zip(got, expected, strict=True):
        assert one is not None, (name, store.last_error())
        assert torch.equal(one, part), name


CALLS = {"put": "another layout", "upsert": "remove the other shards"}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("writers", COUNTS)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_shards_of_every_number_are_right_or_refused(store, buffer_of, key, writers, dim, call):
    lengths = (1, 2, 3, 4, 5, 6, 7, 12)
    # Uneven lengths of each number of shards, and one even length.
    some = {writers * 2, writers + 1, writers * 2 - 1}
    write_one = getattr(store, f"{call}_tensor_with_parallelism")
    write_many = getattr(store, f"batch_{call}_tensor_with_parallelism")
    write_from = getattr(store, f"{call}_tensor_with_parallelism_from")
    for length in lengths if effort(0, 1) else sorted(some):
        shape = [2, 3, 2]
        shape[dim] = length
        whole = torch.arange(12 * length, dtype=torch.int32)[: torch.Size(shape).numel()].reshape(shape)
        parts, name = parts_of(whole, writers, dim), (writers, dim, length)
        one = f"{key}-{length}-legacy"
        code = store.put_tensor_with_tp(one, whole, 0, writers, dim)
        assert code == (0 if parts is not None else -600), name
        if code == 0:
            # One shard of one is a whole tensor.
            check_reads(store, one, whole, dim if writers > 1 else 0, name, buffer_of)
            ctypes.memmove(buffer_of[0], _serialize_tensor(whole)[0] + whole.numpy().tobytes(), 304 + whole.nbytes)
            one = f"{key}-{length}-from"
            assert write_from(one, buffer_of[0], 304 + whole.nbytes, tp(0, writers, dim)) == 0
            check_reads(store, one, whole, dim, name, buffer_of)
            one = f"{key}-{length}-writers"
            for rank in range(writers):
                writer = SimpleNamespace(rank=rank, size=writers, split_dim=dim)
                assert write_one(one, whole, None, None, writer) == 0
            check_reads(store, one, whole, dim, name, buffer_of, has_tp=False)
        # The given tensors are the shards. Those of uneven length are refused, whatever the cut.
        cuts = {"even": parts, "chunk": whole.chunk(writers, dim), "split": whole.tensor_split(writers, dim)}
        for kind, shards in cuts.items():
            if shards is None or len(shards) != writers:
                continue
            one = f"{key}-{length}-{kind}"
            codes = [write_one(one, part, tp(rank, writers, dim)) for rank, part in enumerate(shards)]
            if len({part.shape for part in shards}) == 1:
                assert codes == [0] * writers, name
                check_reads(store, one, whole, dim, name, buffer_of)
            else:
                lengths = [part.shape[dim] for part in shards]
                assert codes == [0 if length == lengths[0] else -600 for length in lengths], name
                assert f"cannot {call} shard" in store.last_error().message and f"{one}_tp_" in store.last_error().message
                many = [tp(rank, writers, dim) for rank in range(writers)]
                assert write_many([f"{one}-2"] * writers, list(shards), many) == codes, name


def upsert(store, key, part, layout):
    return store.upsert_tensor_with_parallelism(key, part.contiguous(), layout)


def test_upserts_begin_a_layout_or_are_refused(store, key):
    long = torch.arange(36, dtype=torch.float32).reshape(9, 4)
    # Another length, number and dimension, in any order of the ranks.
    for i, (whole, size, dim) in enumerate([(WHOLE, 2, 0), (long[:6], 2, 0), (WHOLE, 4, 0), (WHOLE, 4, 1), (long, 3, 0)]):
        ranks = range(size) if i % 2 else range(size)[::-1]
        assert [upsert(store, key, whole.chunk(size, dim)[rank], tp(rank, size, dim)) for rank in ranks] == [0] * size
        assert torch.equal(read(store, key, "full", tp(0, size, dim)), whole), i
    # The first uneven shard begins a layout, which the last one contradicts.
    cut = torch.arange(20, dtype=torch.float32).reshape(5, 4).tensor_split(3)
    assert [upsert(store, key, part, tp(rank, 3)) for rank, part in enumerate(cut)] == [0, 0, -600]
    message = store.last_error().message
    assert "cannot upsert shard" in message and f"{key}_tp_2" in message and "remove the other shards" in message
    # The cure of the message.
    for rank in range(2):
        assert store.remove(f"{key}_tp_{rank}", True) == 0
    assert [upsert(store, key, long.chunk(3)[rank], tp(rank, 3)) for rank in (2, 0, 1)] == [0, 0, 0]
    assert torch.equal(read(store, key, "full", tp(0, 1)), long)


def test_upserts_of_all_shards_at_once_replace_any_layout(store, key, objects):
    _shard, _of_shard, of_whole, _memory = objects
    put_shards(store, key, WHOLE[:2], 2)
    assert store.remove(f"{key}_tp_1", True) == 0
    layouts = [tp(1, 2), tp(0, 2)]
    assert store.batch_upsert_tensor_with_parallelism([key] * 2, [WHOLE[2:], WHOLE[:2]], layouts) == [0, 0]
    assert torch.equal(read(store, key, "full", tp(0, 2)), WHOLE)
    # A manifest of other shards is replaced, too. Without one, none is stored.
    put_shards(store, key + "-from", WHOLE[:2], 2)
    for name in (key + "-from", key + "-new"):
        assert store.upsert_tensor_with_parallelism_from(name, *of_whole, tp(0, 4)) == 0
        assert torch.equal(read(store, name, "full", tp(0, 2)), WHOLE)
    assert store.is_exist(f"{key}-from__parallelism_manifest") == 1
    assert store.is_exist(f"{key}-new__parallelism_manifest") == 0
    put_shards(store, key + "-put", WHOLE, 2)
    assert store.put_tensor_with_parallelism_from(key + "-put", *of_whole, tp(0, 4)) == -600
    assert "another layout" in store.last_error().message
    assert torch.equal(read(store, key + "-put", "full", tp(0, 1)), WHOLE)


def test_upserts_of_several_axes_and_writers(store, key):
    def both(replica, rank):
        return layout(axis("dp", replica, 2), axis("tp", rank, 2, split_dim=0))

    for whole in (WHOLE, torch.cat([WHOLE, WHOLE])):
        for replica, rank in itertools.product(range(2), range(2)):
            assert upsert(store, key, whole, both(replica, rank)) == 0
            writer = SimpleNamespace(rank=rank, size=2, split_dim=0)
            assert store.upsert_tensor_with_parallelism(key + "-w", whole, writer_partition=writer) == 0
        assert torch.equal(read(store, key, "full", both(1, 0)), whole)
        assert torch.equal(read(store, key, "shard", layout(axis("dp", 1, 2), axis("tp", 3, 4, split_dim=1))), whole[:, 3:])
        assert torch.equal(read(store, key + "-w", "full"), whole)
    assert store.remove(f"{key}-w__writer_1of2_sd0", True) == 0
    # Parts of a whole are even, so a missing one begins a layout.
    for rank in (1, 0):
        writer = SimpleNamespace(rank=rank, size=2, split_dim=0)
        assert store.upsert_tensor_with_parallelism(key + "-w", WHOLE, writer_partition=writer) == 0
    assert torch.equal(read(store, key + "-w", "full"), WHOLE)


def test_a_manifest_without_shards_is_absent(store, key, objects):
    _shard, _of_shard, of_whole, _memory = objects
    for name, size, shape in (("more", 4, WHOLE), ("fewer", 1, WHOLE), ("same", 2, torch.cat([WHOLE, WHOLE]))):
        name = f"{key}-{name}"
        put_shards(store, name, WHOLE, 2)
        assert store.remove(f"{name}_tp_0", True) == 0
        assert store.put_tensor_with_parallelism(name, shape.chunk(size)[0], tp(0, size)) == -600, "another shard is stored"
        assert store.remove(f"{name}_tp_1", True) == 0
        put_shards(store, name, shape, size)
        assert torch.equal(read(store, name, "full", tp(0, size)), shape)
    # In one batch, the first put decides.
    put_shards(store, key, WHOLE, 2)
    assert [store.remove(f"{key}_tp_{rank}", True) for rank in range(2)] == [0, 0]
    codes = store.batch_put_tensor_with_parallelism([key] * 3, [WHOLE[:1], WHOLE[:2], WHOLE[1:2]], [tp(0, 4), tp(0, 2), tp(1, 4)])
    assert codes == [0, -600, 0]
    for rank in range(2):
        assert store.remove(f"{key}_tp_{rank}", True) == 0
    # Shards from a buffer replace the manifest, too.
    assert store.put_tensor_with_parallelism_from(key, *of_whole, tp(0, 2)) == 0
    assert torch.equal(read(store, key, "full", tp(0, 1)), WHOLE)


def test_a_manifest_of_several_axes_without_shards_is_absent(store, key):
    def both(replica, rank):
        return layout(axis("dp", replica, 2), axis("tp", rank, 2, split_dim=0))

    for replica, rank in itertools.product(range(2), range(2)):
        assert store.put_tensor_with_parallelism(key, WHOLE, both(replica, rank)) == 0
    keys = [f"{key}__dp_{replica}of2__tp_{rank}of2_sd0" for replica, rank in itertools.product(range(2), range(2))]
    for shard in keys:
        assert store.put_tensor_with_parallelism(key, WHOLE[:2], both(0, 0)) == -600
        assert store.remove(shard, True) == 0
    assert store.put_tensor_with_parallelism(key, WHOLE[:2], both(0, 0)) == 0


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("whole", [torch.ones(8, 4), torch.ones(4, 2), torch.ones(4, 4, dtype=torch.int32)], ids=["longer", "narrower", "type"])
def test_upserts_beside_a_missing_shard_begin_a_layout(store, key, order, whole):
    for lost in range(2):
        name = f"{key}-{lost}"
        put_shards(store, name, WHOLE, 2)
        assert store.remove(f"{name}_tp_{lost}", True) == 0
        if lost == 0 and whole.shape == (8, 4):
            # The longer part could be the first one of `chunk`.
            assert upsert(store, name, whole.chunk(2)[1], tp(1, 2)) == 0
        assert [upsert(store, name, whole.chunk(2)[rank], tp(rank, 2)) for rank in order] == [0, 0]
        assert torch.equal(read(store, name, "full", tp(0, 1)), whole)


def test_upserts_beside_missing_shards_of_many(store, key):
    for i, whole in enumerate((WHOLE[:, :1].repeat(3, 1), WHOLE.repeat(3, 1), WHOLE.repeat(2, 1)[:6])):
        name = f"{key}-{i}"
        put_shards(store, name, torch.zeros(9, 4), 3)
        assert store.remove(f"{name}_tp_1", True) == 0
        assert [upsert(store, name, whole.chunk(3)[rank], tp(rank, 3)) for rank in (1, 0, 2)] == [0, 0, 0]
        assert torch.equal(read(store, name, "full", tp(0, 1)), whole)


def test_shards_of_several_axes_from_a_buffer(store, key, objects):
    _shard, _of_shard, of_whole, _memory = objects
    for call in (store.put_tensor_with_parallelism_from, store.upsert_tensor_with_parallelism_from):
        name = f"{key}-{call.__name__}"
        assert call(name, *of_whole, layout(axis("dp", 1, 2), axis("tp", 0, 4, split_dim=0))) == 0
        for size, dim in itertools.product((1, 2, 4), (0, 1)):
            wanted = layout(axis("dp", 1, 2), axis("tp", size - 1, size, split_dim=dim))
            assert torch.equal(read(store, name, "shard", wanted), WHOLE.chunk(size, dim)[-1]), (size, dim)
            assert torch.equal(read(store, name, "full", wanted), WHOLE), (size, dim)


def test_shards_of_many_dimensions(store, key):
    whole = torch.arange(2 * 3 * 4 * 6 * 2, dtype=torch.int16).reshape(2, 3, 4, 6, 2)
    for stored, along in itertools.product(range(5), range(5)):
        name = f"{key}-{stored}"
        size, parts = whole.shape[stored], whole.shape[along]
        assert store.put_tensor_with_tp(name, whole, 0, size, stored) == 0
        for rank in range(parts):
            got = read(store, name, "shard", tp(rank, parts, along))
            assert torch.equal(got, whole.chunk(parts, along)[rank]), (stored, along, rank)


def test_shards_along_a_dimension_that_is_not_there(store, key):
    assert store.put_tensor(key, WHOLE) == 0 and store.put_tensor_with_tp(key + "-tp", WHOLE, 0, 2, 0) == 0
    # As in Mooncake C++, stored shards have no dimension below 0.
    assert torch.equal(store.get_tensor_with_tp(key + "-tp", 1, 2, -1), WHOLE[2:])
    for name, dim in ((key, -1), (key, 2), (key + "-tp", 2)):
        assert store.get_tensor_with_tp(name, 0, 2, dim) is None, (name, dim)
        assert f"split_dim {dim}" in store.last_error().message, (name, dim)


def test_a_whole_tensor_is_shard_0_of_1(store, buffer_of, key):
    assert store.put_tensor(key, WHOLE) == 0
    assert torch.equal(read(store, key, "shard", tp(0, 1)), WHOLE)
    assert torch.equal(read(store, key, "full", tp(0, 1)), WHOLE)
    assert torch.equal(read(store, key, "shard", tp(1, 2, 1)), WHOLE[:, 2:])
    into = store.get_tensor_with_parallelism_into(key, *buffer_of, target("shard", tp(3, 4)))
    assert torch.equal(into, WHOLE[3:])
    for wrong, why in ((tp(0, 1, 2), "split_dim"), (tp(0, 3), "does not divide evenly")):
        assert read(store, key, "shard", wrong) is None and why in store.last_error().message
    assert read(store, key + "-no", "shard", tp(0, 1)) is None and key in store.last_error().message


def test_shards_of_another_layout_are_refused(store, key):
    put_shards(store, key, WHOLE, 2)
    for shard, layout in ((WHOLE[:1], tp(2, 4)), (WHOLE[:, :2], tp(1, 2, 1)), (WHOLE[:1], tp(1, 2)), (WHOLE[2:].int(), tp(1, 2))):
        assert store.put_tensor_with_parallelism(key, shard.contiguous(), layout) == -600
    assert torch.equal(read(store, key, "full", tp(0, 2)), WHOLE) and store.is_exist(f"{key}_tp_2") == 0
    # Upserts replace a layout.
    for rank, part in enumerate(WHOLE.chunk(4)):
        assert store.upsert_tensor_with_parallelism(key, part, tp(rank, 4)) == 0
    assert torch.equal(read(store, key, "full", tp(0, 2)), WHOLE)
    names = [f"{key}-{i}" for i in range(70) for _ in range(2)]
    codes = store.batch_put_tensor_with_parallelism(names, [WHOLE[:2], WHOLE[2:3]] * 70, [tp(0, 2), tp(1, 2)] * 70)
    assert codes == [0, -600] * 70
    put_written(store, key + "-w", WHOLE, 2)
    writer = SimpleNamespace(rank=1, size=2, split_dim=0)
    assert store.put_tensor_with_parallelism(key + "-w", WHOLE[:2], writer_partition=writer) == -600
    config = ReplicateConfig()
    config.group_ids = ["a", "b", "c"]
    names, layouts = [key + "-g", key + "-h", key + "-g"], [tp(0, 2), None, tp(1, 2)]
    codes = store.batch_put_tensor_with_parallelism(names, [WHOLE[:2], WHOLE, WHOLE[2:3]], layouts, config)
    assert codes == [0, 0, -600]


def test_one_shard_of_one_is_the_whole(store, key):
    whole = WHOLE[:3]
    for dim in (0, 1):
        name = f"{key}-{dim}"
        assert store.put_tensor_with_parallelism(name, whole, tp(0, 1, dim)) == 0
        for mode, wanted in [("full", None), ("full", tp(0, 1, 0)), ("full", tp(0, 1, 1)), ("shard", tp(0, 1, 1 - dim))]:
            assert torch.equal(read(store, name, mode, wanted), whole), (dim, mode, wanted)
        assert torch.equal(read(store, name, "shard", tp(1, 2, 1)), whole[:, 2:])
        assert torch.equal(read(store, name, "shard", tp(1, 3, 0)), whole[1:2])


def test_a_whole_without_the_number_of_its_shards_is_refused_with_the_reason(store, key):
    put_shards(store, key, WHOLE, 4)
    assert read(store, key, "full") is None
    assert "shards=4" in store.last_error().message
    assert read(store, f"{key}-absent", "full") is None
    assert "neither a whole tensor nor a manifest" in store.last_error().message
