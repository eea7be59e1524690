"""Stores of `setup_dummy`: every call that those of Mooncake C++ have, against `mooncake_client` of
this package.
"""

from __future__ import annotations

import asyncio
import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import MIB, Master, Owner

from mooncake.async_store import MooncakeDistributedStoreAsync
from mooncake.store import (
    BufferPool,
    MooncakeDistributedStore,
    MooncakeHostMemAllocator,
    ReplicateConfig,
    TaskStatus,
)

Store = MooncakeDistributedStore


def fill(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))


def peek(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


def pattern(size: int, seed: int = 0) -> bytes:
    return bytes((i + seed) % 251 for i in range(min(size, 251))) * (size // 251 + 1)


def test_an_absent_key_is_missing_whatever_the_memory(light: Store, key: str) -> None:
    assert light.put(key, b"value") == 0
    for size in (0, 100):
        assert light.get_into("absent", 0, size) == -704 and light.get_into(key, 0, size) == -600
        assert light.batch_get_into([key, "absent"], [0, 0], [size, size]) == [-600, -704]
        assert light.batch_get_into_multi_buffers(["absent"], [[0]], [[size]]) == [-704]


def test_all_calls_with_bytes(light: Store, store: Store, key: str) -> None:
    for size in (1, 4096, MIB, 5 * MIB, 20 * MIB):
        name, value = f"{key}-{size}", pattern(size)[:size]
        assert light.put(name, value) == 0
        assert light.put(name, b"other") == 0, "it exists and does not change"
        assert light.get(name) == value
        assert store.get(name) == value, "a full client reads the same value"
        handle = light.get_buffer(name)
        assert handle is not None and len(handle) == size and bytes(memoryview(handle)) == value
        assert light.get_size(name) == size and light.is_exist(name) == 1
        del handle
        assert light.remove(name, force=True) == 0 and light.is_exist(name) == 0
    assert light.put_parts(key, b"ab", bytearray(b"cd"), memoryview(b"ef")) == 0
    assert light.get(key) == b"abcdef"
    assert light.upsert(key, b"new") == 0 and light.get(key) == b"new"
    assert light.upsert_parts(key, b"x", b"y") == 0 and light.get(key) == b"xy"
    names = [f"{key}-{i}" for i in range(5)]
    assert light.put_batch(names[:4], [name.encode() for name in names[:4]]) == 0
    assert light.get_batch(names) == [name.encode() for name in names[:4]] + [b""]
    assert light.upsert_batch(names[:1], [b"once more"]) == 0
    handles = light.batch_get_buffer([names[0], names[4]])
    assert bytes(memoryview(handles[0])) == b"once more" and handles[1] is None
    assert light.batch_is_exist(names) == [1, 1, 1, 1, 0]
    assert light.prefix_hits(names) == 4 and light.prefix_hits(names[::-1]) == 0
    assert len(light.get_prefix_replica_desc(names)) == 4
    assert light.batch_remove(names, force=True) == [0, 0, 0, 0, -704]
    assert light.get("nothing") == b"" and light.get_buffer("nothing") is None
    assert light.get_size("nothing") == -704 and light.remove("nothing") == -704
    assert light.put(key, b"") == -600 and light.put("", b"v") == -600
    assert light.remove_by_regex(f"^{key}", True) == 1
    assert light.remove_by_regex("(") == -600


def test_registered_memory(light: Store, key: str) -> None:
    pool = light.alloc_from_mem_pool(MIB)
    assert pool != 0
    assert light.put_from(key, pool, 100) == -600, "not registered yet"
    assert light.register_buffer(pool, MIB) == 0
    fill(pool, pattern(5000))
    assert light.put_from(key, pool, 5000) == 0
    assert light.get(key) == pattern(5000)[:5000]
    fill(pool, bytes(5000))
    assert light.get_into(key, pool, MIB) == 5000 and peek(pool, 5000) == pattern(5000)[:5000]
    assert light.get_into(key, pool, 10) == -600 and light.get_into("nothing", pool, 10) == -704
    assert light.upsert_from(key, pool + 1, 10) == 0 and light.get(key) == pattern(11)[1:11]
    keys = [f"{key}-{i}" for i in range(3)]
    at = [pool + 10_000 * i for i in range(3)]
    assert light.batch_put_from(keys, at, [100, 200, 300]) == [0, 0, 0]
    assert light.batch_upsert_from(keys, at, [101, 201, 301]) == [0, 0, 0]
    assert light.batch_get_into([*keys, "nothing"], [*at, pool], [1000] * 4) == [101, 201, 301, -704]
    many = f"{key}-many"
    assert light.batch_put_from_multi_buffers([many], [[pool, pool + 50]], [[20, 30]]) == [0]
    assert light.batch_get_into_multi_buffers([many], [[pool + 2000, pool + 3000]], [[25, 25]]) == [50]
    assert light.batch_get_into_multi_buffers([many], [[pool + 4000, pool + 5000]], [[49, 7]]) == [50], "room is left"
    assert peek(pool + 4000, 49) + peek(pool + 5000, 1) == light.get(many)
    assert light.batch_get_into_multi_buffers([many], [[pool]], [[49]]) == [-600]
    for put in (light.put_from, light.upsert_from):
        assert put(f"{key}-empty", pool, 0) == -600 and light.is_exist(f"{key}-empty") == 0
    assert light.put_parts(f"{key}-empty", b"", b"") == light.batch_put_from([f"{key}-empty"], [pool], [0])[0] == -600
    assert peek(pool + 2000, 25) + peek(pool + 3000, 25) == light.get(many)
    assert light.get_into_ranges([pool], [[many]], [[[0, 100]]], [[[10, 49]]], [[[5, 1]]]) == [[[5, 1]]]
    assert peek(pool, 5) == light.get(many)[10:15]
    assert light.get_into_ranges([pool], [["nothing"]], [[[0]]], [[[0]]], [[[5]]]) == [[[-704]]]
    with_metadata = f"{key}-metadata"
    assert light.put_from_with_metadata(with_metadata, pool, pool + 4096, 10, 4) == 0
    assert light.get(with_metadata) == peek(pool + 4096, 4) + peek(pool, 10)
    assert light.unregister_buffer(pool) == 0 and light.unregister_buffer(pool) == -600
    assert light.put_from(key, pool, 100) == -600

    allocator = MooncakeHostMemAllocator()
    shared = allocator.alloc(MIB)
    assert light.register_buffer(shared, MIB) == 0
    assert light.get_into(many, shared, MIB) == 50
    assert light.unregister_buffer(shared) == 0 and allocator.free(shared) == 0
    heap = (ctypes.c_ubyte * 4096)()
    assert light.register_buffer(ctypes.addressof(heap), 4096) == -1
    assert "this process alone" in light.last_error().message
    assert light.register_buffer(0, 10) == -1 and light.alloc_from_mem_pool(0) == 0


def test_unsupported_calls_of_an_ipc_client(light: Store, key: str) -> None:
    assert light.get_hostname() == ""
    assert light.health_check() == 0
    assert light.mount_segment("/dev/shm/nothing", MIB)["ret"] == -1
    assert light.allocate_and_mount_segment(16 * MIB)["ret"] == -1
    assert light.unmount_segment(["1-2"]) == -1 and light.unmount_and_free_segment(["1-2"]) == -1
    assert light.batch_replica_clear([key]) == []
    assert light.batch_get_session_start([key]) == [-600]
    assert light.batch_get_into_multi_buffer_ranges([key], [[1]], [[1]], [[0]]) == [-600]
    assert light.batch_get_session_end([key]) == -600
    assert light.batch_put_session_start([key], [10]) == [-600]
    assert light.batch_put_from_multi_buffer_ranges([key], [[1]], [[1]], [[0]]) == [-600]
    assert light.batch_put_session_end([key]) == [-600] and light.batch_put_session_revoke([key]) == [-600]


def test_replicas_and_tasks(light: Store, store: Store, key: str) -> None:
    assert light.put(key, b"value", ReplicateConfig()) == 0
    (replica,) = light.get_replica_desc(key)
    assert replica.is_memory_replica() and light.get_replica_desc("nothing") == []
    assert list(light.batch_get_replica_desc([key, "nothing"])) == [key]
    assert light.create_copy_task(key, []) == ((0, 0), -600)
    task, code = light.create_copy_task(key, [store.get_hostname()])
    assert code in (0, -600)
    if code == 0:
        found, code = light.query_task(task)
        assert code == 0 and found.status in (TaskStatus.PENDING, TaskStatus.PROCESSING, TaskStatus.SUCCESS)
    assert light.query_task((1, 2)) == (None, -1400)


def test_pool_of_buffers(light: Store, key: str) -> None:
    pool = BufferPool(light)
    assert light.put(key, b"12345678") == 0
    with pool.buffer(4096) as lease:
        assert light.get_into(key, lease.ptr, lease.size) == 8
        assert bytes(lease.buffer[:8]) == b"12345678"
    pool.close()


def test_asyncio(owner: Owner, key: str) -> None:
    async def run() -> None:
        light = MooncakeDistributedStoreAsync()
        assert light.setup_dummy(0, MIB, owner.address) == 0
        values = [pattern(1000, i)[:1000] for i in range(20)]
        assert await asyncio.gather(*(light.async_put(f"{key}-{i}", v) for i, v in enumerate(values))) == [0] * 20
        assert await asyncio.gather(*(light.async_get(f"{key}-{i}") for i in range(20))) == values
        assert await light.async_is_exist("nothing") == 0
        light.close()

    asyncio.run(run())


def test_tensors(light: Store, store: Store, key: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(600, dtype=torch.float32).reshape(20, 30)
    assert light.put_tensor(key, tensor) == 0
    assert torch.equal(light.get_tensor(key), tensor) and torch.equal(store.get_tensor(key), tensor)
    assert light.put_tensor_with_tp(f"{key}-tp", tensor, tp_rank=0, tp_size=1) == 0
    for rank in range(2):
        shard = tensor.chunk(2, 1)[rank].contiguous()
        assert light.put_tensor_with_tp(f"{key}-two", tensor, tp_rank=rank, tp_size=2, split_dim=1) == 0
        assert torch.equal(light.get_tensor_with_tp(f"{key}-two", tp_rank=rank, tp_size=2, split_dim=1), shard)
    pool = light.alloc_from_mem_pool(MIB)
    assert light.register_buffer(pool, MIB) == 0
    assert torch.equal(light.get_tensor_into(key, pool, MIB), tensor)
    assert light.put_tensor_from(f"{key}-from", pool, 304 + 2400) == 0
    assert torch.equal(light.get_tensor(f"{key}-from"), tensor)
    assert light.upsert_tensor(key, tensor + 1) == 0
    assert torch.equal(light.batch_get_tensor([key])[0], tensor + 1)


def test_no_process_at_the_address(tmp_path: Path) -> None:
    store = Store()
    for address in (str(tmp_path / "nobody.sock"), "127.0.0.1:1", "nonsense", ""):
        assert store.setup_dummy(0, MIB, address) == -1
        assert store.last_error() is not None
    assert store.put("k", b"v") == -600 and store.alloc_from_mem_pool(10) == 0
    with pytest.raises(TypeError):
        store.setup_dummy(0, MIB)  # type: ignore[call-arg]


def test_by_port_and_in_many_processes(own_master: Callable[..., Master], tmp_path: Path, key: str) -> None:
    """A `mooncake_client` at a port, and several processes, as a serving system starts them. One
    process is killed during its work.
    """
    from conftest import free_port

    port = free_port()
    owner = Owner(tmp_path, own_master(), [f"--port={port}"])
    owner_path = f"/tmp/mooncake_client_{port}.sock"
    # The address is a port without a socket path.
    flags = [f"--master_server_address={owner.master.address}", "--metadata_server=P2PHANDSHAKE", "--host=127.0.0.1"]
    from conftest import command

    process = subprocess.Popen([command("mooncake_client"), f"--port={port}", "--global_segment_size=64MB", *flags])
    try:
        deadline = time.monotonic() + 30
        while not Path(owner_path).exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        program = (
            "import sys\n"
            "from mooncake.store import MooncakeDistributedStore\n"
            "store = MooncakeDistributedStore()\n"
            f"assert store.setup_dummy(0, 1 << 20, '127.0.0.1:{port}') == 0\n"
            "name = sys.argv[1]\n"
            "print('ready', flush=True)\n"
            "for i in range(int(sys.argv[2])):\n"
            "    value = (name * (i % 50 + 1)).encode() * 100\n"
            "    assert store.upsert(name, value) == 0\n"
            "    assert store.get(name) == value\n"
        )
        run = [sys.executable, "-c", program]
        workers = [subprocess.Popen([*run, f"w{i}", "200"], stdout=subprocess.PIPE) for i in range(3)]
        doomed = subprocess.Popen([*run, "doomed", "1000000"], stdout=subprocess.PIPE)
        assert doomed.stdout is not None and doomed.stdout.readline() == b"ready\n"
        doomed.send_signal(signal.SIGKILL)
        doomed.wait(30)
        doomed.stdout.close()
        for worker in workers:
            out, _ = worker.communicate(timeout=120)
            assert worker.returncode == 0 and out == b"ready\n"
    finally:
        process.terminate()
        process.wait(30)
    assert process.returncode == 0 and not Path(owner_path).exists()


def test_an_owner_that_is_started_again(own_master: Callable[..., Master], tmp_path: Path, key: str) -> None:
    owner = Owner(tmp_path, own_master())
    owner.start()
    light = Store()
    assert light.setup_dummy(0, MIB, owner.address) == 0
    pool = light.alloc_from_mem_pool(4096)
    assert light.register_buffer(pool, 4096) == 0
    fill(pool, b"before")
    assert light.put(key, b"value") == 0
    owner.kill()
    began = time.monotonic()
    assert light.put(key, b"value") == -900
    assert light.health_check() == 2 and time.monotonic() - began < 20
    owner.start()
    deadline = time.monotonic() + 30
    while light.put_from(f"{key}-later", pool, 6) != 0:
        assert time.monotonic() < deadline, light.last_error()
        time.sleep(0.05)
    assert light.get(f"{key}-later") == b"before"
    light.close()
    assert light.close() == 0 and light.put(key, b"v") == -600
    owner.stop()


def test_both_kinds_in_one_object(owner: Owner, make_store: Callable[..., Store], key: str) -> None:
    store = make_store()
    settings: dict[str, Any] = {"local_hostname": "127.0.0.1", "master_server_addr": owner.master.address}
    assert store.put(key, b"value") == 0
    assert store.setup_dummy(0, MIB, owner.address) == 0 and store.get_hostname() == ""
    assert store.put(f"{key}-2", b"value") == 0
    assert store.setup(**settings) == 0 and store.get_hostname() != ""
    assert store.get(f"{key}-2") == b"value"
