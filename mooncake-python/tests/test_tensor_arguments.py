"""Arguments of the tensor calls: accepted as in Mooncake C++, or rejected as a whole."""

from __future__ import annotations

import itertools
import struct
import warnings
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from layouts import axis, layout, target, tp  # noqa: E402
from mooncake.store import (  # noqa: E402
    ParallelAxis,
    ReadTarget,
    ReplicateConfig,
    TensorParallelism,
    _serialize_tensor,
)

WHOLE = torch.arange(32, dtype=torch.float32).reshape(8, 4)
# Transposed in memory.
TURNED = WHOLE.t()
# Longer than the part that is read together with the header.
LARGE = torch.arange(100_000, dtype=torch.float32).reshape(1000, 100)
NO_UTF8 = b"\xff"


def writer(rank: int = 0) -> SimpleNamespace:
    return SimpleNamespace(rank=rank, size=2, split_dim=0)


@pytest.fixture
def serialized(store):
    """Returns address and length of a serialized tensor in registered memory."""
    head, _, size, _ = _serialize_tensor(WHOLE)
    memory = torch.frombuffer(bytearray(head + struct.pack("<32f", *range(32))), dtype=torch.uint8)
    assert memory.nbytes == len(head) + size
    assert store.register_buffer(memory.data_ptr(), memory.nbytes) == 0
    yield memory.data_ptr(), memory.nbytes
    assert store.unregister_buffer(memory.data_ptr()) == 0


def test_shards_of_parameters(store, key):
    weight = torch.nn.Parameter(WHOLE.clone())
    config = ReplicateConfig()
    half = WHOLE[:4]
    assert store.put_tensor_with_tp(f"{key}-1", weight, 0, 2, 0) == 0
    assert store.batch_put_tensor_with_tp([f"{key}-2"], [weight], 0, 2, 0) == [0]
    assert store.pub_tensor_with_tp(f"{key}-3", weight, config, 0, 2, 0) == 0
    assert store.batch_pub_tensor_with_tp([f"{key}-4"], [weight], config, 0, 2, 0) == [0]
    for i in range(1, 5):
        got = store.get_tensor_with_tp(f"{key}-{i}", 0, 2)
        assert torch.equal(got, half) and not got.requires_grad
    both = layout(axis("tp", 0, 2, split_dim=0), axis("ep", 0, 2, expert_id=1))
    assert store.put_tensor_with_parallelism(key, weight, both) == 0
    assert torch.equal(store.get_tensor(f"{key}__tp_0of2_sd0__ep_0of2_eid1"), half)
    assert store.put_tensor_with_parallelism(key, weight, None, config, writer()) == 0
    assert torch.equal(store.get_tensor(f"{key}__writer_0of2_sd0"), half)


@pytest.fixture(params=["device", "default", "fake"])
def elsewhere(request):
    """Runs a test in a mode in which torch's new tensors have no bytes."""
    if request.param == "default":
        torch.set_default_device("meta")
        yield
        torch.set_default_device(None)
        return
    fake_tensor = pytest.importorskip("torch._subclasses.fake_tensor")
    with torch.device("meta") if request.param == "device" else fake_tensor.FakeTensorMode():
        yield


@pytest.fixture
def written(store, key):
    """Returns tensors that were created before."""
    for name, tensor in (("", WHOLE), ("-large", LARGE), ("-empty", torch.empty(0, 4))):
        assert store.put_tensor(key + name, tensor) == 0
    assert store.put_tensor_with_tp(f"{key}-tp", LARGE, 0, 2, 0) == 0
    memory = torch.empty(LARGE.nbytes + 304, dtype=torch.uint8)
    assert store.register_buffer(memory.data_ptr(), memory.nbytes) == 0
    yield memory.data_ptr(), memory.nbytes
    assert store.unregister_buffer(memory.data_ptr()) == 0


def test_tensors_have_bytes_in_every_mode(store, key, written, elsewhere):
    got = {
        name: (store.get_tensor(key + name), store.get_tensor_with_parallelism(key + name))
        for name in ("", "-large", "-empty")
    }
    into = store.get_tensor_into(f"{key}-large", *written)
    whole = store.get_tensor_with_parallelism(f"{key}-tp", target("full", tp(0, 1)))
    put = store.put_tensor(f"{key}-new", TURNED), store.put_tensor_with_tp(f"{key}-new", TURNED, 0, 2, 0)
    with torch.utils._python_dispatch._disable_current_modes():
        for name, tensors in got.items():
            expected = {"": WHOLE, "-large": LARGE}.get(name)
            for tensor in tensors:
                assert type(tensor) is torch.Tensor and tensor.device.type == "cpu"
                assert tensor.shape == (0, 4) if expected is None else torch.equal(tensor, expected)
        assert torch.equal(into, LARGE) and torch.equal(whole, LARGE)
        assert put == (0, 0) and torch.equal(store.get_tensor(f"{key}-new"), TURNED)
        assert torch.equal(store.get_tensor_with_tp(f"{key}-new", 1, 2), TURNED[2:])


def test_fake_tensors_are_rejected(store, key):
    fake_tensor = pytest.importorskip("torch._subclasses.fake_tensor")
    with fake_tensor.FakeTensorMode():
        fakes = [torch.empty(4, 4), torch.empty(0, 4)]
    with warnings.catch_warnings():
        # Both kinds of tensor are experimental in torch, which warns about them.
        warnings.simplefilter("ignore")
        masked = torch.masked.masked_tensor(WHOLE, WHOLE > 3)
    batched = []

    def within(row):
        batched.append(store.put_tensor(key, row))
        return row

    torch.func.vmap(within)(WHOLE)
    assert batched == [-600]
    for value in (*fakes, masked, torch._efficientzerotensor(4)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if value is masked else "error")
            with pytest.raises(ValueError):
                _serialize_tensor(value)
            assert store.put_tensor(key, value) == -600
    assert store.is_exist(key) == 0


def list_calls(store, pointer, size):
    """Yields every call that takes a list of keys, with two items in every other list, and with too
    few.
    """
    config, unlike = ReplicateConfig(), ReplicateConfig()
    unlike.preferred_segments = ["a", "b"]
    two, pointers, sizes = [WHOLE, WHOLE], [pointer] * 2, [size] * 2
    for name in ("batch_put_tensor", "batch_upsert_tensor", "batch_pub_tensor", "batch_upsert_pub_tensor"):
        yield name, (two,), (two[:1],), (two, unlike)
    yield "batch_put_tensor_with_tp", (two, 0, 2, 0), (two[:1], 0, 2, 0)
    yield "batch_pub_tensor_with_tp", (two, config, 0, 2, 0), (two, unlike, 0, 2, 0)
    yield "batch_put_tensor_with_tp_from", (pointers, sizes, 0, 2, 0), (pointers[:1], sizes, 0, 2, 0)
    for name in ("put", "upsert"):
        yield f"batch_{name}_tensor_with_parallelism", (two,), (two, [tp(0, 2)] * 2), (two, [None]), (two, None, unlike)
        yield f"batch_{name}_tensor_from", (pointers, sizes), (pointers[:1], sizes)
        call = f"batch_{name}_tensor_with_parallelism_from"
        yield call, (pointers, sizes), (pointers, sizes, [tp(0, 2)] * 2), (pointers, sizes, [None])
    yield "batch_get_tensor", ()
    yield "batch_get_tensor_with_tp", (), (0, 2)
    yield "batch_get_tensor_with_parallelism", (), ([target("full", tp(0, 1))] * 2,), ([None],)
    for name in ("batch_get_tensor_into", "batch_get_tensor_with_tp_into", "batch_get_tensor_with_parallelism_into"):
        yield name, (pointers, sizes), (pointers[:1], sizes)
    yield "batch_get_tensor_into_cuda", (two,), ([],)


@pytest.mark.parametrize("keys", ["xy", b"xy", bytearray(b"xy"), {"x": 1, "y": 2}, {"x", "y"}, 5, None, ["x", 5], ["x", None]])
def test_keys_must_be_a_list(store, serialized, keys):
    for name, *each in list_calls(store, *serialized):
        for arguments in each:
            with pytest.raises(TypeError):
                getattr(store, name)(keys, *arguments)
    names = ["".join(one) for one in itertools.product("xy", ["", "_tp_0", "__parallelism_manifest"])]
    assert store.batch_is_exist(names) == [0] * len(names)


def test_lists_of_other_kinds(store, key):
    np = pytest.importorskip("numpy")
    for i, made in enumerate((tuple, np.array)):
        keys = made([f"{key}-{i}-a", f"{key}-{i}-b"])
        assert store.batch_put_tensor(keys, [WHOLE, WHOLE]) == [0, 0]
        assert store.batch_put_tensor_with_tp(keys, [WHOLE, WHOLE], 0, 2, 0) == [0, 0]
        assert all(torch.equal(got, WHOLE[4:]) for got in store.batch_get_tensor_with_tp(keys, 1, 2))


def one_key_calls(store, key, pointer, size):
    yield lambda: store.put_tensor(key, WHOLE)
    yield lambda: store.put_tensor(key, None)
    yield lambda: store.get_tensor(key)
    yield lambda: store.upsert_tensor(key, WHOLE)
    yield lambda: store.put_tensor_with_tp(key, WHOLE, 0, 2, 0)
    yield lambda: store.put_tensor_with_tp(key, WHOLE, 0, 1, 0)
    yield lambda: store.put_tensor_with_tp_from(key, pointer, size, 0, 2, 0)
    yield lambda: store.get_tensor_with_tp(key, 0, 2)
    yield lambda: store.put_tensor_with_parallelism(key, WHOLE, tp(0, 2))
    yield lambda: store.put_tensor_with_parallelism(key, WHOLE, None, None, writer())
    yield lambda: store.put_tensor_with_parallelism_from(key, pointer, size, tp(0, 2))
    yield lambda: store.put_tensor_from(key, pointer, size)
    yield lambda: store.get_tensor_into(key, pointer, size)
    yield lambda: store.get_tensor_with_parallelism(key, target("full", tp(0, 1)))
    yield lambda: store.get_tensor_with_parallelism_into(key, pointer, size, target("full", tp(0, 1)))


@pytest.mark.parametrize("wrong", [5, None, 1.5, memoryview(b"k"), ["k"]])
def test_a_key_must_be_a_string(store, serialized, wrong):
    for call in one_key_calls(store, wrong, *serialized):
        with pytest.raises(TypeError):
            call()


def test_keys_may_be_bytes_in_tensor_calls(store, key, serialized):
    with pytest.raises(ValueError) as plain:
        store.put(NO_UTF8, b"x")
    for call in one_key_calls(store, NO_UTF8, *serialized):
        with pytest.raises(ValueError, match="invalid UTF-8 in bytes") as found:
            call()
        assert found.type is plain.type
    for made in (bytes, bytearray):
        name = f"{key}-{made.__name__}"
        given = made(name.encode())
        assert store.put_tensor(given, WHOLE) == 0 and store.put_tensor_with_tp(given, WHOLE, 0, 2, 0) == 0
        assert store.put_tensor_with_parallelism(given, WHOLE, layout(axis("dp", 0, 2))) == 0
        assert store.batch_is_exist([name, f"{name}_tp_0", f"{name}__dp_0of2"]) == [1] * 3
        assert torch.equal(store.get_tensor_with_tp(given, 1, 2), WHOLE[4:])


@pytest.mark.parametrize("wrong", ["0", None, 1.0, 2.5, 1 << 31, 1 << 40, b"1"])
def test_numbers_of_tensor_parallelism(store, key, serialized, wrong):
    config = ReplicateConfig()
    for numbers in ((wrong, 2, 0), (0, wrong, 0), (0, 2, wrong)):
        for call in (
            lambda: store.put_tensor_with_tp(key, WHOLE, *numbers),
            lambda: store.batch_put_tensor_with_tp([], [], *numbers),
            lambda: store.pub_tensor_with_tp(key, WHOLE, config, *numbers),
            lambda: store.batch_pub_tensor_with_tp([key], [WHOLE], config, *numbers),
            lambda: store.put_tensor_with_tp_from(key, *serialized, *numbers),
            lambda: store.get_tensor_with_tp(key, *numbers),
            lambda: store.get_tensor_with_tp_into(key, *serialized, *numbers),
        ):
            with pytest.raises(TypeError, match="incompatible function arguments"):
                call()
    for numbers in ((wrong, 2), (0, wrong)):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            store.batch_get_tensor_with_tp([key], *numbers)
    assert store.batch_is_exist([key, f"{key}_tp_0"]) == [0, 0]


def test_accepted_kinds_of_numbers(store, key):
    np = pytest.importorskip("numpy")
    assert store.put_tensor_with_tp(key, WHOLE, np.int64(0), np.int32(2), torch.tensor(0)) == 0
    # The key does not end in `_tp_True`.
    assert torch.equal(store.get_tensor_with_tp(key, True, 2), WHOLE[4:])
    one = axis("tp", True, 2, split_dim=False)
    assert (one.rank, one.split_dim) == (1, 0) and type(one.rank) is type(one.split_dim) is int
    assert store.put_tensor_with_parallelism(f"{key}-2", WHOLE, layout(one)) == 0
    assert store.put_tensor_with_parallelism(f"{key}-2", WHOLE, None, None, SimpleNamespace(rank=True, size=2, split_dim=0)) == 0
    assert store.batch_is_exist([f"{key}-2_tp_1", f"{key}-2__writer_1of2_sd0"]) == [1, 1]


def test_layouts_refuse_mistakes_when_they_are_set():
    one = ParallelAxis()
    for name in ("rank", "size", "split_dim", "expert_id", "stage_id"):
        before = getattr(one, name)
        for value in (1.5, 2.0, "0", 1 << 31, 1 << 40, -(1 << 31) - 1):
            with pytest.raises(TypeError, match=name):
                setattr(one, name, value)
        assert getattr(one, name) == before
    for name in ("rank", "size", "kind"):
        with pytest.raises(TypeError, match=name):
            setattr(one, name, None)
    for axes in ("x", b"x", [1], [None], one, 5, None):
        with pytest.raises(TypeError):
            TensorParallelism().axes = axes
    target = ReadTarget()
    for parallelism in ("x", 5, one):
        with pytest.raises(TypeError, match="parallelism"):
            target.parallelism = parallelism
    for mode in (None, 5):
        with pytest.raises(TypeError, match="mode"):
            target.mode = mode
    assert target.mode == "as_stored" and target.parallelism is None
    one.kind, target.mode = b"tp", b"FULL"
    assert (one.kind, target.mode) == ("tp", "full")


def test_foreign_layouts_are_rejected_as_a_whole(store, key):
    good = {"kind": "tp", "rank": 0, "size": 2, "split_dim": 0, "expert_id": None, "stage_id": None}
    for wrong in ({"rank": 1.5}, {"size": 1 << 40}, {"rank": "0"}, {"kind": 5}, {"kind": NO_UTF8}, {"expert_id": 1.0}):
        given = SimpleNamespace(axes=[SimpleNamespace(**(good | wrong))])
        assert store.put_tensor_with_parallelism(key, WHOLE, given) == -600
        assert store.get_tensor_with_parallelism(key, SimpleNamespace(mode="shard", parallelism=given)) is None
    for wrong in ({"rank": 1.5}, {"rank": "0"}, {"size": 2.0}, {"size": 1 << 40}, {"split_dim": None}):
        given = SimpleNamespace(**(vars(writer()) | wrong))
        assert store.put_tensor_with_parallelism(key, WHOLE, None, None, given) == -600
    assert store.put_tensor(key, WHOLE) == 0
    for target in (tp(0, 2), 5, "full", {}, SimpleNamespace(mode=None, parallelism=None), SimpleNamespace(mode="full", parallelism=5)):
        assert store.get_tensor_with_parallelism(key, target) is None
    assert store.put_tensor_with_parallelism(key, WHOLE, SimpleNamespace(axes=[SimpleNamespace(**good | {"kind": b"TP"})])) == 0
    assert store.is_exist(f"{key}_tp_0") == 1


@pytest.mark.parametrize("wrong", [{}, 0, "x", [], True])
def test_a_configuration_must_be_a_replicate_config(store, key, serialized, wrong):
    match = "incompatible function arguments: config must be a ReplicateConfig"
    for call in (
        lambda: store.pub_tensor(key, WHOLE, wrong),
        lambda: store.upsert_pub_tensor(key, WHOLE, wrong),
        lambda: store.batch_pub_tensor([], [], wrong),
        lambda: store.pub_tensor_with_tp(key, WHOLE, wrong, 0, 2, 0),
        # The configuration is missing here.
        lambda: store.pub_tensor_with_tp(key, WHOLE, 0, 2, 0),
        *(
            lambda name=name, of=of: getattr(store, f"{name}_tensor_with_parallelism{of[0]}")(key, *of[1], *of[2], wrong)
            for name in ("put", "upsert")
            for of in (("", [WHOLE], [None]), ("", [WHOLE], [tp(0, 2)]), ("_from", serialized, [None]), ("_from", serialized, [tp(0, 2)]))
        ),
    ):
        with pytest.raises(TypeError, match=match):
            call()
    assert store.batch_is_exist([key, f"{key}_tp_0"]) == [0, 0]


def test_only_whole_tensors_need_a_segment_for_each_copy(store, key, serialized):
    config = ReplicateConfig()
    config.preferred_segments = ["a", "b"]
    for i, name in enumerate(("put", "upsert")):
        for of, given in (("", [WHOLE]), ("_from", serialized)):
            call = getattr(store, f"{name}_tensor_with_parallelism{of}")
            here = f"{key}-{i}{of}"
            assert call(f"{here}-whole", *given, None, config) == -600
            assert store.is_exist(f"{here}-whole") == 0
            for parallelism in (tp(0, 2), layout(axis("dp", 0, 2))):
                assert call(here, *given, parallelism, config) == 0
            assert call(here, *given, None, config, writer()) == 0
            assert store.batch_is_exist([f"{here}_tp_0", f"{here}__dp_0of2", f"{here}__writer_0of2_sd0"]) == [1, 1, 1]
    both = store.batch_put_tensor_with_parallelism([f"{key}-a", f"{key}-b"], [WHOLE, WHOLE], [tp(0, 2), None], config)
    assert both == [0, -600]
    assert store.pub_tensor_with_tp(key, WHOLE, config, 0, 2, 0) == -600


def test_files_of_tensors(store, key, tmp_path, monkeypatch):
    torch_files = pytest.importorskip("safetensors.torch")
    monkeypatch.chdir(tmp_path)
    assert store.batch_put_tensor([key, f"{key}/b"], [WHOLE, WHOLE]) == [0, 0]
    assert store.save_tensor_to_safetensor(key) == 0 and (tmp_path / key).exists()
    for name in ("", ".", "none/x", "a\0b"):
        assert store.save_tensor_to_safetensor(key, name) == -600, name
    assert store.save_tensor_to_safetensor(f"{key}/b") == -600
    assert [one.name for one in tmp_path.iterdir()] == [key]

    torch_files.save_file({f"{key}-b": WHOLE + 1, f"{key}-a": WHOLE}, "multi.st")
    data = (tmp_path / "multi.st").read_bytes()
    torch_files.save_file({}, "nothing.st")
    for name, content in (("garbage", b"garbage" * 10), ("empty", b""), ("short", data[:-10])):
        (tmp_path / name).write_bytes(content)
    for name in ("garbage", "empty", "short", "nothing.st", "missing", ".", ""):
        assert store.load_tensor_from_safetensor(f"{key}-no", name) is None, name
    assert store.is_exist(f"{key}-no") == 0
    # The file's tensor of that name, else its first one. Without a key, the name of the file is the
    # key.
    assert torch.equal(store.load_tensor_from_safetensor(f"{key}-b", "multi.st"), WHOLE + 1)
    assert torch.equal(store.get_tensor(f"{key}-b"), WHOLE + 1)
    first = store.load_tensor_from_safetensor(f"{key}-other", "multi.st")
    assert torch.equal(first, WHOLE) and torch.equal(store.get_tensor(f"{key}-other"), WHOLE)
    (tmp_path / "multi.st").rename(f"{key}.st")
    assert torch.equal(store.load_tensor_from_safetensor(None, f"{key}.st"), WHOLE)
    assert torch.equal(store.get_tensor(f"{key}.st"), WHOLE) and store.is_exist(f"{key}-a") == 0
