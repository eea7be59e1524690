"""Edge cases of awaited calls: end of the interpreter, subclasses, weak references."""

from __future__ import annotations

import asyncio
import copy
import inspect
import subprocess
import sys
import weakref

import pytest
from mooncake.async_store import MooncakeDistributedStoreAsync
from mooncake.buffer_pool import RegisteredBufferPool
from mooncake.p2p import P2PStore
from mooncake.store import (
    ExistOptions,
    MooncakeHostMemAllocator,
    ParallelAxis,
    ReadTarget,
    ReplicateConfig,
    TensorParallelism,
)

# Program that ends during awaited calls of an event loop on a thread that is never joined.
ENDS = """
import asyncio, sys, threading, time
from mooncake.async_store import MooncakeDistributedStoreAsync

store = MooncakeDistributedStoreAsync()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 32 << 20, 16 << 20, "tcp", "", sys.argv[1]) == 0

async def work():
    i = 0
    while True:
        i += 1
        await asyncio.gather(*(store.async_put(f"{sys.argv[2]}-{i}-{n}", b"x" * 100) for n in range(50)))
        await asyncio.gather(*(store.async_get(f"{sys.argv[2]}-{i}-{n}") for n in range(50)))

for _ in range(2):
    threading.Thread(target=lambda: asyncio.run(work()), daemon=True).start()
time.sleep(float(sys.argv[3]))
if sys.argv[4] == "close":
    store.close()
"""


@pytest.mark.parametrize("how", ["close", "end"])
def test_a_program_ends_while_a_loop_awaits(master, key, how):
    for i in range(10):
        words = [sys.executable, "-c", ENDS, master.address, f"{key}-{i}", str(0.2 + i / 100), how]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


class Prefixed(MooncakeDistributedStoreAsync):
    def get(self, key):
        return b"mine of " + super().get(key)

    def put(self, key, value, config=None):
        return super().put("prefix/" + key, value)


def test_async_calls_use_overrides_of_a_subclass(master, key, monkeypatch):
    async def work():
        store = Prefixed()
        assert await store.async_setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", master.address) == 0
        assert await store.async_put(key, b"a") == 0 and store.is_exist("prefix/" + key) == 1
        assert await store.async_get("prefix/" + key) == b"mine of a"
        assert await store.async_upsert(key, b"b") == 0 and await store.async_get(key) == b"mine of b"
        assert await store.async_get_size(key) == 1
        monkeypatch.setattr(store, "get_size", lambda key: 77)
        monkeypatch.setattr(store, "is_exist", lambda key: 78)
        assert await store.async_get_size(key) == 77 and await store.async_is_exist(key) == 78
        store.close()

    asyncio.run(work())


class Counted(ReplicateConfig):
    def __init__(self, counts):
        super().__init__()
        self.counts = counts


def test_copies_of_a_subclassed_configuration_are_complete():
    config = Counted([1])
    config.replica_num = 3
    shallow, deep = copy.copy(config), copy.deepcopy(config)
    assert type(shallow) is type(deep) is Counted and shallow.replica_num == deep.replica_num == 3
    assert shallow.counts is config.counts and deep.counts == [1] and deep.counts is not config.counts
    shallow.replica_num = 1
    assert config.replica_num == 3 and type(copy.copy(ReplicateConfig())) is ReplicateConfig


def test_objects_support_weak_references(store, key):
    assert store.put(key, b"0123") == 0
    pool = RegisteredBufferPool(store)
    objects = [
        *(ReplicateConfig(), ParallelAxis(), ReadTarget(), TensorParallelism(), MooncakeHostMemAllocator()),
        *(store.get_buffer(key), store.get_replica_desc(key)[0], pool, pool.acquire(100)),
    ]
    del pool
    while objects:
        reference = weakref.ref(objects[-1])
        assert reference() is objects[-1]
        gone = []
        weakref.finalize(objects.pop(), gone.append, 1)
        assert reference() is None and gone == [1]


def test_awaited_puts_take_arrays_and_tensors(master, key):
    torch = pytest.importorskip("torch", reason="a tensor is put")

    async def work():
        store = MooncakeDistributedStoreAsync()
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", 32 << 20, 16 << 20, "tcp", "", master.address) == 0
        tensor = torch.arange(6).bfloat16()
        expected = bytes(tensor.view(torch.uint8).tolist())
        for put in (store.async_put, store.async_upsert):
            assert await put(key, tensor) == 0 and await store.async_get(key) == expected
        assert await store.async_put_batch([key + "-b"], [tensor]) == 0 and store.get(key + "-b") == expected
        assert await store.async_put_array(key + "-a", tensor.float().numpy()) == 0
        assert (await store.async_get_array(key + "-a")).tolist() == tensor.tolist()
        store.close()

    asyncio.run(work())


def test_coroutines_take_the_arguments_of_their_calls():
    def arguments(of):
        """Returns names, kinds, and whether a default exists. `wait_on_cancel` is of coroutines."""
        taken = inspect.signature(of).parameters.values()
        return [
            (it.name, it.kind is it.KEYWORD_ONLY, it.default is not it.empty)
            for it in taken
            if it.name not in ("self", "wait_on_cancel")
        ]

    for of in (MooncakeDistributedStoreAsync, P2PStore):
        names = [name for name in dir(of) if name.startswith("async_")]
        assert names
        for name in names:
            assert arguments(getattr(of, name)) == arguments(getattr(of, name.removeprefix("async_"))), (of, name)


def test_awaited_existence_checks_take_options(master, key):
    options = ExistOptions()
    options.prefetch_to_memory = True

    async def work():
        store = MooncakeDistributedStoreAsync()
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", 32 << 20, 16 << 20, "tcp", "", master.address) == 0
        assert await store.async_put(key, b"a") == 0
        missing = key + "-missing"
        for given in ((), (None,), (ExistOptions(),), (options,)):
            assert await store.async_is_exist(key, *given) == 1
            assert await store.async_is_exist(missing, *given) == 0
            assert await store.async_batch_is_exist([key, missing], *given) == [1, 0]
        assert await store.async_is_exist(key, options=options) == 1
        assert await store.async_batch_is_exist([key], options=options) == [1]
        with pytest.raises(TypeError):
            await store.async_is_exist(key, "prefetch")
        store.close()

    asyncio.run(work())
