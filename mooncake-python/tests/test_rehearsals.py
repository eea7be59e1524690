"""Call patterns of serving systems, with their arguments, in several processes, while the master
restarts.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import time

import numpy as np
import pytest

from mooncake.engine import TransferEngine
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

MIB = 1 << 20


def block_of(key: str, size: int) -> np.ndarray:
    """Returns the bytes that belong to a key, whichever process wrote them."""
    return np.random.default_rng(sum(key.encode()) * 7919 + len(key)).integers(0, 256, size, dtype=np.uint8)


def paged_worker(master: str, rank: int, seconds: float, outcome) -> None:
    """Connector with a paged cache: multi-buffer puts and gets of 61 layers, existence checks
    first, back-pressure on -200.
    """
    layers, page = 61, 4096
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 64 * MIB, 16 * MIB, "tcp", "", master) == 0
    cache = np.zeros(16 * layers * page, np.uint8)
    assert store.register_buffer(cache.ctypes.data, cache.nbytes) == 0
    config = ReplicateConfig()
    config.preferred_segment = store.get_hostname()
    chance, wrong, hits, stored = random.Random(rank), 0, 0, 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        keys = [f"model@{chance.randrange(40)}" for _ in range(4)]
        keys = list(dict.fromkeys(keys))
        exist = store.batch_is_exist(keys)
        slots = [cache.ctypes.data + i * layers * page for i in range(len(keys))]
        pointers = [[slot + layer * page for layer in range(layers)] for slot in slots]
        sizes = [[page] * layers for _ in keys]
        views = [cache[i * layers * page : (i + 1) * layers * page] for i in range(len(keys))]
        if all(one == 1 for one in exist):
            for view, code, key in zip(views, store.batch_get_into_multi_buffers(keys, pointers, sizes), keys):
                if code > 0:
                    hits += 1
                    wrong += not np.array_equal(view, block_of(key, layers * page))
        else:
            for view, key in zip(views, keys):
                view[:] = block_of(key, layers * page)
            codes = store.batch_put_from_multi_buffers(keys, pointers, sizes, config)
            stored += sum(code == 0 for code in codes)
        found = store.batch_get_replica_desc(keys)
        assert all(one.is_memory_replica() for key in found for one in found[key][:1])
    assert store.unregister_buffer(cache.ctypes.data) == 0
    store.close()
    outcome.put((wrong, hits, stored))


def flat_worker(master: str, rank: int, seconds: float, outcome) -> None:
    """Hierarchical cache and another kind of connector: a warm-up, batches of single buffers,
    parts, handles.
    """
    store = MooncakeDistributedStore()
    settings = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": "64MB",
        "local_buffer_size": 16 * MIB,
        "protocol": "tcp",
        "rdma_devices": "",
        "master_server_addr": master,
        "tenant_id": "default",
        "enable_ssd_offload": False,
    }
    assert store.setup(settings) == 0
    warm = os.urandom(4096)
    assert store.put(f"warm-{rank}", warm) == 0 and store.is_exist(f"warm-{rank}") == 1
    assert store.get(f"warm-{rank}") == warm
    size = 32 << 10
    cache = (ctypes.c_ubyte * (8 * size))()
    at = ctypes.addressof(cache)
    assert store.register_buffer(at, 8 * size) == 0
    view = np.frombuffer(cache, np.uint8)
    chance, wrong, hits, stored = random.Random(rank), 0, 0, 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        keys = list(dict.fromkeys(f"flat-{chance.randrange(60)}" for _ in range(8)))
        pointers = [at + i * size for i in range(len(keys))]
        for i, code in enumerate(store.batch_get_into(keys, pointers, [size] * len(keys))):
            if code > 0:
                hits += 1
                wrong += not np.array_equal(view[i * size : (i + 1) * size], block_of(keys[i], size))
                continue
            view[i * size : (i + 1) * size] = block_of(keys[i], size)
            stored += store.batch_put_from([keys[i]], [pointers[i]], [size]) == [0]
        meta = bytes(28)
        name = f"parts-{chance.randrange(20)}"
        if store.put_parts(name, meta, memoryview(block_of(name, 5000))) == 0:
            handle = store.batch_get_buffer([name])[0]
            if handle is not None:
                got = np.frombuffer(memoryview(handle), np.uint8)
                wrong += not np.array_equal(got[28:], block_of(name, 5000))
    assert store.unregister_buffer(at) == 0
    store.close()
    outcome.put((wrong, hits, stored))


@pytest.mark.parametrize("worker", [paged_worker, flat_worker])
def test_serving_while_the_master_restarts(own_master, worker):
    master = own_master("--default_kv_lease_ttl=1000", "--client_ttl=3")
    spawn = multiprocessing.get_context("spawn")
    outcome = spawn.Queue()
    workers = [spawn.Process(target=worker, args=(master.address, rank, 8.0, outcome)) for rank in range(2)]
    for one in workers:
        one.start()
    time.sleep(4)
    master.kill()
    master.start()
    results = [outcome.get(timeout=120) for _ in workers]
    for one in workers:
        one.join(60)
        assert one.exitcode == 0
    assert sum(wrong for wrong, _, _ in results) == 0
    assert all(hits > 0 and stored > 0 for _, hits, stored in results), results


def test_weights_between_engines():
    """Weight transfer: registration in batches, reads in batches, and polls of a finished batch."""
    ends = []
    for _ in range(2):
        engine = TransferEngine()
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", "") == 0, "without such devices, over tcp"
        buffers = [np.full(MIB, 7 * i, np.uint8) for i in range(4)]
        pointers = [one.ctypes.data for one in buffers]
        assert engine.batch_register_memory(pointers, [MIB] * 4) == 0
        ends.append((engine, buffers, pointers, f"127.0.0.1:{engine.get_rpc_port()}"))
    (a, mine, here, _), (b, theirs, there, name) = ends
    assert a.send_probe(name) == 0
    for one in theirs:
        one += 1
    assert a.batch_transfer_sync_read(name, here, there, [MIB] * 4) == 0
    assert all(np.array_equal(one, other) for one, other in zip(mine, theirs))
    batch = a.batch_transfer_async_write(name, here[::-1], there, [MIB] * 4)
    assert batch > 0 and a.get_batch_transfer_status([batch]) == 0 and a.get_batch_transfer_status([batch]) == 0
    assert all(np.array_equal(one, other) for one, other in zip(mine[::-1], theirs))
    assert a.batch_unregister_memory(here) == 0 and b.batch_unregister_memory(there) == 0
    assert a.batch_transfer_sync_read(name, here, there, [MIB] * 4) < 0
    for engine, *_ in ends:
        engine._close()


def test_batches_of_500(make_store, key):
    """Queue of tensors as bytes: 500 values per call, removed one by one."""
    store = make_store()
    keys = [f"{key}-{i}" for i in range(500)]
    values = [bytes([i % 256]) * (1 + i) for i in range(500)]
    assert store.put_batch(keys, values) == 0
    assert store.get_batch(keys) == values
    time.sleep(0.6)
    assert [store.remove(one) for one in keys] == [0] * 500
