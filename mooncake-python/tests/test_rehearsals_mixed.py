"""Serving systems of several kinds on one cluster: connectors, queues and stores of hidden states,
while the master restarts.

`test_rehearsals.py` has systems that store pages of a cache. Each worker here is a process that
makes the calls of one system, with its arguments, and checks every byte it reads.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import random
import struct
import time

import numpy as np
import pytest

from mooncake.store import MooncakeDistributedStore, MooncakeHostMemAllocator, ReplicateConfig
from mooncake.structured_object_store import MooncakeBundleTransfer, StructuredObjectPayload

MIB = 1 << 20


def values_of(key: str, size: int) -> np.ndarray:
    """Returns the bytes that belong to a key, whichever process wrote them."""
    return np.random.default_rng(sum(key.encode()) * 7919 + len(key)).integers(0, 256, size, dtype=np.uint8)


def joined(master: str, **more) -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    settings = ("127.0.0.1", "P2PHANDSHAKE", 48 * MIB, 16 * MIB, "tcp", "", master)
    assert store.setup(*settings, **more) == 0, store.last_error()
    return store


class Count:
    """Results of a worker."""

    def __init__(self, seconds: float) -> None:
        self.wrong = self.read = self.written = 0
        self.end = time.monotonic() + seconds

    def going(self) -> bool:
        return time.monotonic() < self.end

    def check(self, good: bool) -> None:
        self.read += 1
        self.wrong += not good


def remote_cache(master: str, count: Count) -> None:
    """Remote backend of a cache layer: a header of 28 bytes and the tensor as parts, handles, and
    reads into a pinned pool.
    """
    store = joined(master, engine=None, enable_ssd_offload=False, ssd_offload_path="", tenant_id="default")
    config = ReplicateConfig()
    config.replica_num, config.preferred_segment = 1, store.get_hostname()
    size, chance = 20_000, random.Random(1)
    pool = (ctypes.c_ubyte * (4 * size))()
    at = ctypes.addressof(pool)
    assert store.register_buffer(at, 4 * size) == 0
    view = np.frombuffer(pool, np.uint8)
    while count.going():
        key = f"vllm@model@{chance.randrange(30)}"
        if store.is_exist(key) != 1:
            header = struct.pack("<7i", 0, size, 1, 2, 3, 4, 5)
            count.written += store.put_parts(key, header, memoryview(values_of(key, size))) == 0
        handle = store.batch_get_buffer([key])[0]
        if handle is not None:
            fields = struct.unpack("<7i", memoryview(handle).cast("B")[:28])
            body = np.frombuffer(memoryview(handle).cast("B"), np.uint8)[28:]
            count.check(fields[1] == size and np.array_equal(body, values_of(key, size)))
        raw = f"raw-{chance.randrange(20)}"
        view[:size] = values_of(raw, size)
        count.written += store.put_from(raw, at, size, config) == 0
        if store.batch_get_into([raw], [at + size], [size])[0] > 0:
            count.check(np.array_equal(view[size : 2 * size], view[:size]))
    assert store.unregister_buffer(at) == 0 and store.close() == 0


def host_cache(master: str, count: Count) -> None:
    """Hierarchical cache: memory of the package's allocator, groups if the class supports them, two
    buffers a page.
    """
    store = joined(master)
    assert store.put("warm-up", bytes(4096)) == 0 and store.is_exist("warm-up") == 1
    allocator, page, chance = MooncakeHostMemAllocator(), 16 << 10, random.Random(2)
    at = allocator.alloc(16 * page)
    assert at and store.register_buffer(at, 16 * page) == 0
    view = np.frombuffer((ctypes.c_ubyte * (16 * page)).from_address(at), np.uint8)
    assert hasattr(ReplicateConfig, "group_ids")
    while count.going():
        pages = chance.sample(range(40), 4)
        keys = [f"page-{number}-{part}" for number in pages for part in "kv"]
        pointers = [at + i * page for i in range(len(keys))]
        if all(there == 1 for there in store.batch_is_exist(keys)):
            for i, code in enumerate(store.batch_get_into(keys, pointers, [page] * len(keys))):
                if code > 0:
                    count.check(np.array_equal(view[i * page : (i + 1) * page], values_of(keys[i], page)))
            continue
        for i, key in enumerate(keys):
            view[i * page : (i + 1) * page] = values_of(key, page)
        config = ReplicateConfig()
        config.group_ids = [f"group-{number}" for number in pages for _ in "kv"]
        count.written += store.batch_put_from(keys, pointers, [page] * len(keys), config).count(0)
    del view
    assert store.unregister_buffer(at) == 0 and allocator.free(at) == 0 and store.close() == 0


def layers(master: str, count: Count) -> None:
    """Layer by layer: a put session, ranges as layers complete, and the same for reads."""
    store = joined(master)
    number, size, chance = 8, 4096, random.Random(3)
    memory = np.zeros(2 * number * size, np.uint8)
    at = memory.ctypes.data
    assert store.register_buffer(at, memory.nbytes) == 0
    offsets = [[layer * size] for layer in range(number)]
    while count.going():
        key = f"layers-{chance.randrange(30)}"
        if store.batch_put_session_start([key], [number * size], ReplicateConfig()) == [0]:
            memory[: number * size] = values_of(key, number * size)
            for layer, offset in enumerate(offsets):
                parts = ([[at + layer * size]], [[size]], [offset])
                if store.batch_put_from_multi_buffer_ranges([key], *parts) != [size]:
                    store.batch_put_session_revoke([key])
                    break
            else:
                count.written += store.batch_put_session_end([key]) == [0]
        if store.batch_get_session_start([key]) == [0]:
            codes = []
            for layer, offset in enumerate(offsets):
                parts = ([[at + (number + layer) * size]], [[size]], [offset])
                codes += store.batch_get_into_multi_buffer_ranges([key], *parts)
            if codes == [size] * number:
                count.check(np.array_equal(memory[number * size :], values_of(key, number * size)))
            assert store.batch_get_session_end([key]) == 0
    assert store.unregister_buffer(at) == 0 and store.close() == 0


def hidden_states(master: str, count: Count) -> None:
    """Store of hidden states and embeddings: pinned while they are needed, read by ranges, removed
    one by one.
    """
    store = joined(master)
    rows, width, chance = 32, 512, random.Random(4)
    memory = np.zeros(2 * rows * width, np.uint8)
    at, size = memory.ctypes.data, rows * width
    assert store.register_buffer(at, memory.nbytes) == 0
    config = ReplicateConfig()
    if hasattr(config, "with_hard_pin"):
        config.with_hard_pin = True
    else:
        config.with_soft_pin = True
    while count.going():
        key = f"states-{chance.randrange(1000)}"
        memory[:size] = values_of(key, size)
        if store.put_from(key, at, size, config) != 0:
            continue
        count.written += 1
        wanted = sorted(chance.sample(range(rows), 5))
        places = [i * width for i in range(5)]
        sources = [row * width for row in wanted]
        read = store.get_into_ranges([at + size], [[key]], [[places]], [[sources]], [[[width] * 5]])
        if read == [[[width] * 5]]:
            rows_read = memory[size : size + 5 * width].reshape(5, width)
            count.check(np.array_equal(rows_read, values_of(key, size).reshape(rows, width)[wanted]))
        one = store.get_into_ranges([at + size], [[key]], [[[0]]], [[[7]]], [[[9]]])
        if one == [[[9]]]:
            count.check(np.array_equal(memory[size : size + 9], values_of(key, size)[7:16]))
        store.remove(key, True)
    assert store.unregister_buffer(at) == 0 and store.close() == 0


def queue(master: str, count: Count) -> None:
    """Queue of training samples, set up by a dictionary: batches of bytes and structured objects,
    read once, then removed.
    """
    store = MooncakeDistributedStore()
    settings = {
        "local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE", "global_segment_size": "48MB",
        "local_buffer_size": "16 MB", "protocol": "tcp", "rdma_devices": "", "master_server_addr": master,
    }  # fmt: skip
    assert store.setup(settings) == 0
    transfer, step = MooncakeBundleTransfer(store, key_prefix="rollout", default_chunk_bytes=4096), 0
    while count.going():
        step += 1
        keys = [f"sample-{step}-{i}" for i in range(100)]
        values = [values_of(key, 1000).tobytes() for key in keys]
        if store.put_batch(keys, values) == 0:
            count.written += len(keys)
            got = store.get_batch(keys)
            # A missing value is empty: the master may have restarted meanwhile.
            for value, expected in zip(got, values):
                if value:
                    count.check(value == expected)
        store.batch_remove(keys, True)
        tokens = np.arange(step, step + 6000, dtype=np.int32).reshape(100, 60)
        try:
            payload = StructuredObjectPayload({"step": step}, {"tokens": tokens, "prompt": b"words"})
            ref = transfer.put_structured_object(payload)
            spec = transfer.read_spec(ref).select_members(["tokens"]).slice_member("tokens", 0, 10, 20)
            read = transfer.materialize(spec).objects["tokens"]
            count.check(np.array_equal(read, tokens[10:20]))
            transfer.remove_bundle(ref)
        except (RuntimeError, ValueError):
            # The master may have restarted meanwhile.
            continue
    assert store.close() == 0


WORKERS = [remote_cache, host_cache, layers, hidden_states, queue]


def work(worker, master: str, seconds: float, outcome) -> None:
    count = Count(seconds)
    worker(master, count)
    outcome.put((worker.__name__, count.wrong, count.read, count.written))


@pytest.mark.nightly
def test_all_kinds_while_the_master_restarts(own_master):
    master = own_master("--default_kv_lease_ttl=2000", "--client_ttl=3")
    spawn = multiprocessing.get_context("spawn")
    outcome = spawn.Queue()
    workers = [spawn.Process(target=work, args=(one, master.address, 12.0, outcome)) for one in WORKERS]
    for one in workers:
        one.start()
    time.sleep(6)
    master.kill()
    master.start()
    results = {name: counts for name, *counts in (outcome.get(timeout=200) for _ in workers)}
    for one in workers:
        one.join(60)
        assert one.exitcode == 0
    assert all(wrong == 0 and read > 0 and written > 0 for wrong, read, written in results.values()), results
