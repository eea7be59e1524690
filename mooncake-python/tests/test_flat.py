"""Resource leaks: memory, descriptors and threads stay constant over many calls."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np

from conftest import effort

from mooncake.buffer_pool import BufferPool
from mooncake.engine import TransferEngine
from mooncake.store import MooncakeDistributedStore

PAGE = os.sysconf("SC_PAGESIZE")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def grown(work, rounds, warm):
    """Returns the growth of memory, descriptors and threads over `rounds` of work, after a warm-up
    that does not count.
    """
    for i in range(warm):
        work(i)
    gc.collect()
    before = resident(), descriptors(), threads()
    for i in range(warm, warm + rounds):
        work(i)
    gc.collect()
    return tuple(now - then for now, then in zip((resident(), descriptors(), threads()), before))


def test_calls(store, key):
    value = np.arange(4096, dtype=np.uint8)
    memory = np.zeros(4096, np.uint8)
    assert store.register_buffer(memory.ctypes.data, 4096) == 0
    pool = BufferPool(store)

    def work(i):
        name = f"{key}-{i % 50}"
        assert store.upsert(name, value) == 0
        assert len(store.get(name)) == 4096 and store.get("missing") == b""
        assert store.get_into(name, memory.ctypes.data, 4096) == 4096
        assert len(store.get_buffer(name)) == 4096
        assert store.put_parts(name, b"x", value) == 0
        assert store.batch_is_exist([name, "missing"]) == [1, 0]
        assert store.put_from(name, 8, 8) == -600
        with pool.buffer(1000) as lease:
            assert store.get_into("missing", lease.ptr, 1000) == -704

    memory_grown, descriptors_grown, threads_grown = grown(work, effort(400, 1500), effort(200, 500))
    assert memory_grown < 6 << 20 and descriptors_grown <= 4 and threads_grown <= 2
    pool.close()
    assert store.unregister_buffer(memory.ctypes.data) == 0


def test_setup_and_close(own_master):
    address = own_master().address

    def work(_):
        store = MooncakeDistributedStore()
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", 16 << 20, 1 << 20, "tcp", "", address) == 0, store.last_error()
        assert store.put("k", b"x" * 1000) == 0 and len(store.get("k")) == 1000
        pool = BufferPool(store)
        pool.acquire(100).release()
        pool.close()
        assert store.remove("k", True) == 0
        assert store.close() == 0

    memory_grown, descriptors_grown, threads_grown = grown(work, 100, 30)
    assert memory_grown < 8 << 20 and descriptors_grown <= 6 and threads_grown <= 2


def test_engines():
    memory = np.zeros(1 << 20, np.uint8)

    def work(_):
        engine = TransferEngine()
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        assert engine.register_memory(memory.ctypes.data, memory.nbytes) == 0
        name = f"127.0.0.1:{engine.get_rpc_port()}"
        assert engine.transfer_sync_write(name, memory.ctypes.data, memory.ctypes.data + 4096, 4096) == 0
        assert engine.unregister_memory(memory.ctypes.data) == 0
        engine._close()

    memory_grown, descriptors_grown, threads_grown = grown(work, 100, 30)
    assert memory_grown < 8 << 20 and descriptors_grown <= 6 and threads_grown <= 2
