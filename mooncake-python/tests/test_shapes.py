"""Undocumented kinds of arguments that Mooncake C++ accepts, and subclasses of its classes."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from mooncake.engine import TransferEngine
from mooncake.store import BufferPool, MooncakeDistributedStore, ReplicateConfig


def test_keys_may_be_bytes(store: MooncakeDistributedStore, key: str) -> None:
    raw: Any = key.encode()
    other: Any = f"{key}/鍵".encode()
    assert store.put(raw, b"value") == 0 and store.get(key) == b"value" and store.get(raw) == b"value"
    assert store.put_batch([raw + b"-1", f"{key}-2"], [b"1", b"2"]) == 0
    assert store.batch_is_exist((raw, f"{key}-1", raw + b"-2", b"no such key")) == [1, 1, 1, 0]
    memory = (ctypes.c_ubyte * 64)(*range(64))
    at = ctypes.addressof(memory)
    assert store.register_buffer(at, 64) == 0
    assert store.put_from(other, at, 64) == 0
    assert store.get_into_ranges([at], [[other]], [[[0]]], [[[32]]], [[[16]]]) == [[[16]]]
    assert bytes(memory[:16]) == bytes(range(32, 48))
    assert store.unregister_buffer(at) == 0
    with pytest.raises(ValueError, match="UTF-8"):
        store.get(b"\xff")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        store.batch_is_exist(key)  # type: ignore[arg-type]


def test_keys_of_tensors_may_be_bytes(store: MooncakeDistributedStore, key: str) -> None:
    torch = pytest.importorskip("torch")
    raw: Any = key.encode()
    tensor = torch.arange(8).reshape(4, 2)
    assert store.put_tensor_with_tp(raw, tensor, 0, 2, 0) == 0
    assert torch.equal(store.get_tensor_with_tp(raw, 1, 2), store.get_tensor(f"{key}_tp_1"))
    with pytest.raises(TypeError, match="must be a str"):
        store.get_tensor_with_tp(None, 1, 2)  # type: ignore[arg-type]


def test_truth_values(store: MooncakeDistributedStore, key: str) -> None:
    yes: Any = 1
    no: Any = None
    assert store.put(key, b"value") == 0
    assert store.remove(key, yes) == 0 and store.remove(key, no) == -704
    with pytest.raises(TypeError):
        store.remove(key, "yes")  # type: ignore[arg-type]
    config = ReplicateConfig()
    config.with_hard_pin = yes
    assert config.with_hard_pin is True
    config.with_hard_pin = no
    assert config.with_hard_pin is False


def test_subclasses(make_store: Any, key: str) -> None:
    class Store(MooncakeDistributedStore):
        def __init__(self, name: str, *, times: int = 1) -> None:
            super().__init__()
            self.name = name * times

    class Engine(TransferEngine):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

    class Twice(ReplicateConfig):
        def __init__(self, copies: int) -> None:
            super().__init__()
            self.replica_num = copies
            self.mine = "kept"

    assert Store("a", times=2).name == "aa" and Engine("b").name == "b"
    config = Twice(2)
    assert (config.replica_num, config.mine) == (2, "kept")
    first, second = make_store(), make_store()
    assert first.put(key, b"value", config) == 0 and second.get(key) == b"value"
    assert len(first.get_replica_desc(key)) == 2
    for made in (MooncakeDistributedStore, TransferEngine, ReplicateConfig):
        with pytest.raises(TypeError):
            made(1)  # type: ignore[call-arg]
        with pytest.raises(TypeError):
            made(name=1)  # type: ignore[call-arg]


def test_strings_of_other_calls(master: Any, key: str) -> None:
    raw: Any = b"127.0.0.1"
    none: Any = None
    store = MooncakeDistributedStore()
    with pytest.raises(TypeError, match="rdma_devices must be a str"):
        store.setup("127.0.0.1", "P2PHANDSHAKE", 1 << 24, 1 << 20, "tcp", none, master.address)
    with pytest.raises(TypeError, match="local_hostname must be a str or a dict"):
        store.setup(none)
    words: list[Any] = [raw, b"P2PHANDSHAKE", 1 << 24, 1 << 20, b"tcp", b"", master.address.encode()]
    assert store.setup(*words) == 0
    config = ReplicateConfig()
    config.group_ids = [key.encode(), key]  # type: ignore[list-item]
    assert config.group_ids == [key, key]
    config.group_ids = None
    assert store.put(key, b"value") == 0
    assert store.remove_by_regex(f"^{key}$".encode(), True) == 1  # type: ignore[arg-type]
    pool = BufferPool(store)
    yes: Any = 1
    pool.acquire(10, block=yes).release()
    pool.close()
    store.close()


def test_every_kind_of_buffer(store: MooncakeDistributedStore, key: str) -> None:
    numpy = pytest.importorskip("numpy")
    words = (ctypes.c_uint32 * 3)(1, 2, 3)
    for number, (value, content) in enumerate(
        [
            (ctypes.create_string_buffer(b"text", 6), b"text\0\0"),
            (words, bytes(words)),
            (((ctypes.c_uint8 * 2) * 2)((1, 2), (3, 4)), bytes([1, 2, 3, 4])),
            (ctypes.c_uint16(0x0201), b"\1\2"),
            (numpy.array(2.5), numpy.array(2.5).tobytes()),
            (numpy.float32(1.5), numpy.float32(1.5).tobytes()),
            (numpy.arange(6).reshape(2, 3)[:, ::2], numpy.arange(6).reshape(2, 3)[:, ::2].tobytes()),
        ]
    ):
        name = f"{key}-{number}"
        assert store.put(name, value) == 0 and store.get(name) == content
        assert store.put_batch([name + "b"], [value]) == 0 and store.get(name + "b") == content
    assert store.put_parts(key, ctypes.create_string_buffer(b"ab", 2), b"cd") == 0 and store.get(key) == b"abcd"
    for objects in (numpy.array(None), (ctypes.py_object * 1)(store)):
        with pytest.raises(TypeError, match="Python objects"):
            store.put(key, objects)
