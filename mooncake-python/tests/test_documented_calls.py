"""Programs like those in the documentation of Mooncake C++: its calls, its arguments, and the
documented results.

All of them use the address `localhost`, and the metadata service that the master serves over HTTP.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from conftest import Master, free_port

from mooncake.buffer_pool import BufferPool, RegisteredBufferPool
from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode
from mooncake.store import (
    MooncakeDistributedStore,
    MooncakeHostMemAllocator,
    ParallelAxis,
    ReadTarget,
    ReplicateConfig,
    TaskStatus,
    TensorParallelism,
    bind_to_numa_node,
)
from mooncake.structured_object_store import MooncakeBundleTransfer, StructuredMemberSlice, StructuredObjectPayload

MIB = 1024 * 1024


@dataclass
class Place:
    """Addresses that programs use in place of `localhost:8080` and `localhost:50051`."""

    metadata: str
    master: str

    def store(self, metadata: str | None = None) -> MooncakeDistributedStore:
        store = MooncakeDistributedStore()
        where = metadata or self.metadata
        code = store.setup("localhost", where, 64 * MIB, 32 * MIB, "tcp", "", self.master)
        assert code == 0, store.last_error()
        return store


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Place]:
    port = free_port()
    directory = ["--enable_http_metadata_server=true", "--http_metadata_server_host=0.0.0.0"]
    flags = [*directory, f"--http_metadata_server_port={port}", "--default_kv_lease_ttl=500"]
    master = Master(tmp_path_factory.mktemp("documented"), flags)
    master.start()
    yield Place(f"http://localhost:{port}/metadata", f"localhost:{master.port}")
    master.stop()


@pytest.fixture
def store(place) -> Iterator[MooncakeDistributedStore]:
    store = place.store()
    yield store
    store.remove_all(True)
    assert store.close() == 0


@pytest.mark.parametrize("metadata", [None, "P2PHANDSHAKE"])
def test_hello(place, metadata):
    store = place.store(metadata)
    store.put("hello", b"Hello from the store")
    assert store.get("hello").decode() == "Hello from the store"
    store.remove("hello", True)
    store.close()


def test_values_of_numpy_and_json(store):
    store.put("config", b'{"model": "small", "temperature": 0.7}')
    weights = np.random.default_rng(1).standard_normal((300, 200)).astype(np.float32)
    store.put("weights", weights.tobytes())
    assert json.loads(store.get("config").decode())["model"] == "small"
    got = np.frombuffer(store.get("weights"), dtype=np.float32).reshape(300, 200)
    assert np.array_equal(got, weights)
    assert bool(store.is_exist("weights")) and not bool(store.is_exist("cache"))


def test_one_at_a_time_and_many(store):
    assert store.put("key", b"value") == 0 and store.get("key") == b"value"
    assert store.put_batch(["k1", "k2", "k3"], [b"1", b"22", b"333"]) == 0
    assert store.get_batch(["k1", "k2", "k3"]) == [b"1", b"22", b"333"]
    assert store.put_parts("greeting", b"Hello, ", b"World!", b" From parts") == 0
    assert store.get("greeting") == b"Hello, World! From parts"
    assert store.is_exist("key") == 1 and store.is_exist("none") == 0
    assert store.batch_is_exist(["k1", "none", "k3"]) == [1, 0, 1]
    assert store.get_size("greeting") == 24 and store.get_size("none") < 0
    assert store.upsert("key", b"another") == 0 and store.get("key") == b"another"
    assert store.upsert_parts("key", b"of ", b"parts") == 0 and store.get("key") == b"of parts"
    assert store.upsert_batch(["k1", "k2"], [b"x", b"y"]) == 0 and store.get_batch(["k1", "k2"]) == [b"x", b"y"]
    assert "localhost" in store.get_hostname() or "127.0.0.1" in store.get_hostname()


def test_removing(store):
    assert store.put_batch([f"prefix_{i}" for i in range(4)], [b"v"] * 4) == 0
    assert store.put("other", b"v") == 0
    assert store.remove("prefix_0") == 0
    assert store.batch_remove(["prefix_1", "none"]) == [0, -704]
    assert store.batch_remove(["prefix_2"], force=True) == [0]
    assert store.remove_by_regex("^prefix_.*") == 1
    assert store.remove_all() == 1


def test_buffers_without_a_copy(store):
    store.put("large", b"x" * 10_000)
    buffer = store.get_buffer("large")
    assert buffer and buffer.size() == len(buffer) == 10_000 and buffer.ptr() != 0
    array = np.array(buffer, copy=False)
    assert array.nbytes == 10_000 and (array.view(np.uint8) == ord("x")).all()
    buffers = store.batch_get_buffer(["large", "none"])
    assert [one.size() if one else None for one in buffers] == [10_000, None]
    assert store.get_buffer("none") is None


def test_registered_memory(store):
    data = np.random.default_rng(2).standard_normal((500, 400)).astype(np.float32)
    got = np.empty_like(data)
    for array in (data, got):
        assert store.register_buffer(array.ctypes.data, array.nbytes) == 0
    assert store.put_from("tensor", data.ctypes.data, data.nbytes) == 0
    assert store.get_into("tensor", got.ctypes.data, got.nbytes) == data.nbytes
    assert np.array_equal(data, got)
    assert store.upsert_from("tensor", data.ctypes.data, 4000) == 0
    assert store.batch_upsert_from(["tensor", "b"], [data.ctypes.data] * 2, [400, 800]) == [0, 0]
    assert store.batch_put_from(["c", "d"], [data.ctypes.data, data.ctypes.data + 400], [400, 400]) == [0, 0]
    assert store.batch_get_into(["c", "none"], [got.ctypes.data] * 2, [400, 400]) == [400, -704]
    metadata = np.arange(16, dtype=np.int32)
    store.register_buffer(metadata.ctypes.data, metadata.nbytes)
    at = (data.ctypes.data, metadata.ctypes.data, 400, metadata.nbytes)
    assert store.put_from_with_metadata("with metadata", *at, ReplicateConfig()) == 0
    assert store.get("with metadata") == metadata.tobytes() + data.tobytes()[:400]
    for array in (data, got, metadata):
        assert store.unregister_buffer(array.ctypes.data) == 0


def test_many_buffers_of_one_value(store):
    keys, layers, size = [f"k{i}" for i in range(4)], 61, 1024
    source = np.random.default_rng(3).integers(0, 256, len(keys) * layers * size, dtype=np.uint8)
    target = np.zeros_like(source)
    pointers = []
    for array in (source, target):
        assert store.register_buffer(array.ctypes.data, array.nbytes) == 0
        starts = [array.ctypes.data + i * layers * size for i in range(len(keys))]
        pointers.append([[start + layer * size for layer in range(layers)] for start in starts])
    sizes = [[size] * layers for _ in keys]
    config = ReplicateConfig()
    config.prefer_alloc_in_same_node = "True"
    assert store.batch_put_from_multi_buffers(keys, pointers[0], sizes, config) == [0] * 4
    assert store.batch_get_into_multi_buffers(keys, pointers[1], sizes, True) == [layers * size] * 4
    assert np.array_equal(source, target)


def test_ranges(store):
    store.put("key1", bytes(range(64)))
    store.put("key2", bytes(range(100, 132)))
    buffers = [(ctypes.c_ubyte * 32)() for _ in range(2)]
    pointers = [ctypes.addressof(one) for one in buffers]
    for pointer in pointers:
        store.register_buffer(pointer, 32)
    results = store.get_into_ranges(
        pointers,
        [["key1", "key2"], ["key2", "key1"]],
        [[[0, 20], [8]], [[4], [16]]],
        [[[1, 30], [2]], [[0], [10]]],
        [[[4, 3], [5]], [[6], [4]]],
    )
    assert results == [[[4, 3], [5]], [[6], [4]]]
    assert bytes(buffers[0])[:4] == bytes([1, 2, 3, 4]) and bytes(buffers[1])[4:10] == bytes(range(100, 106))


def test_leased_buffers(store):
    store.put("my_key", b"z" * 1000)
    pool = BufferPool(store)
    with pool.buffer(MIB) as lease:
        count = store.get_into("my_key", lease.ptr, lease.size)
        view = lease.buffer[:count]
        assert bytes(view) == b"z" * 1000
        # While a view exists, the memory is not freed, and the end of the block raises.
        with pytest.raises(RuntimeError, match="exported views"):
            lease.release()
        del view
    lease = pool.acquire(4096, block=False)
    with pytest.raises(RuntimeError, match="active leases"):
        pool.close()
    lease.release()
    pool.close()
    assert RegisteredBufferPool is BufferPool


def test_replication_settings(store):
    config = ReplicateConfig()
    assert (config.replica_num, config.with_soft_pin, config.with_hard_pin) == (1, False, False)
    assert (config.preferred_segment, config.group_ids) == ("", None)
    config.replica_num = 3
    config.with_soft_pin = True
    config.preferred_segment = store.get_hostname()
    assert store.put("kept", b"value", config) == 0
    config = ReplicateConfig()
    config.with_hard_pin = True
    assert store.put("pinned", b"value", config) == 0
    config = ReplicateConfig()
    config.group_ids = ["session-a", "", "session-b"]
    assert store.put_batch(["ga", "gb", "gc"], [b"1", b"2", b"3"], config) == 0
    config.group_ids = ["session-a"]
    assert store.put("gd", b"4", config) == 0
    assert store.put_batch(["ge", "gf"], [b"5", b"6"], config) == -600


def test_replicas_and_tasks(place, store):
    other = place.store()
    config = ReplicateConfig()
    config.preferred_segment = store.get_hostname()
    store.put("key1", b"value", config)
    for copy in store.get_replica_desc("key1"):
        assert copy.is_memory_replica() and not copy.is_disk_replica()
        at = copy.get_memory_descriptor().buffer_descriptor
        assert at.size == 5 and at.buffer_address and at.transport_endpoint
    assert list(store.batch_get_replica_desc(["key1", "none"])) == ["key1"]
    for create, copies in [
        (lambda: store.create_copy_task("key1", [other.get_hostname()]), 2),
        (lambda: store.create_move_task("key1", store.get_hostname(), other.get_hostname()), 1),
    ]:
        task, error = create()
        assert error == 0
        # The ID of a task can be a dictionary key.
        waiting = {task}
        while waiting:
            response, status = store.query_task(task)
            assert status == 0
            assert response.status != TaskStatus.FAILED, response.message
            if response.status == TaskStatus.SUCCESS:
                waiting.remove(task)
            time.sleep(0.05)
        assert len(store.get_replica_desc("key1")) == copies
    other.close()


def test_segments(store):
    file = Path(f"/dev/shm/documented-{free_port()}")
    file.write_bytes(bytes(16 * MIB))
    try:
        result = store.mount_segment(str(file), 16 * MIB, offset=0, protocol="tcp", location="")
        assert result["ret"] == 0 and store.unmount_segment(list(result["segment_ids"]), grace_period_seconds=0) == 0
    finally:
        file.unlink()
    result = store.allocate_and_mount_segment(16 * MIB, protocol="tcp", location="")
    assert result["ret"] == 0 and result["allocated_size"] == 16 * MIB
    assert store.unmount_and_free_segment(list(result["segment_ids"])) == 0


def test_structured_objects(store):
    transfer = MooncakeBundleTransfer(store, key_prefix="demo/structured")
    tokens = np.array(range(24), dtype=np.int32).reshape(6, 4)
    payload = StructuredObjectPayload(
        metadata={"step": 7, "layout": "rollout"},
        buffers={"tokens": tokens, "mask": np.ones((6, 4), dtype=np.int8), "prompt_ids": b"sample-ids"},
    )
    ref = transfer.put_structured_object(payload)
    result = transfer.materialize(transfer.read_spec(ref))
    assert np.array_equal(result.objects["tokens"], tokens) and bytes(result.objects["prompt_ids"]) == b"sample-ids"
    assert result.metadata["step"] == 7
    spec = transfer.read_spec(ref).select_members(["tokens"]).slice_member("tokens", axis=0, start=2, end=5)
    assert np.array_equal(transfer.materialize(spec).objects["tokens"], tokens[2:5])
    assert spec.member_slice("tokens") == StructuredMemberSlice(axis=0, start=2, end=5)
    destination = np.empty((3, 4), dtype=np.int32)
    assert transfer.materialize_into(spec, {"tokens": destination}).objects["tokens"] is destination
    assert np.array_equal(destination, tokens[2:5])
    transfer.remove_bundle(ref)
    bundle = transfer.put_bundle(b"about it", {"a": b"1", "b": b"22"})
    transfer.remove_bundle(bundle)


def test_host_memory():
    bind_to_numa_node(0)
    allocator = MooncakeHostMemAllocator()
    address = allocator.alloc(MIB)
    assert address != 0 and allocator.free(address) == 0 and allocator.free(address) == -1


def test_tensors(store):
    torch = pytest.importorskip("torch")
    tensor = torch.randn(100, 100)
    assert store.put_tensor("my_tensor", tensor) == 0
    assert torch.equal(store.get_tensor("my_tensor"), tensor)
    tensors = [torch.randn(10, 20) for _ in range(3)]
    assert store.batch_put_tensor(["t1", "t2", "t3"], tensors) == [0, 0, 0]
    got = store.batch_get_tensor(["t1", "none", "t3"])
    assert torch.equal(got[0], tensors[0]) and got[1] is None and torch.equal(got[2], tensors[2])
    assert store.put_tensor_with_tp("weights", tensor, tp_rank=0, tp_size=4, split_dim=0) == 0
    assert torch.equal(store.get_tensor_with_tp("weights", tp_rank=1, tp_size=4), tensor[25:50])
    config = ReplicateConfig()
    config.replica_num = 2
    config.with_soft_pin = True
    assert store.put_tensor("with config", tensor, config) == 0
    assert store.pub_tensor("published", tensor, config) == 0
    assert store.batch_pub_tensor(["p1", "p2"], tensors[:2], config) == [0, 0]
    assert store.pub_tensor_with_tp("tp", tensor, config, tp_rank=0, tp_size=2, split_dim=1) == 0
    assert store.batch_put_tensor_with_tp(["b1", "b2"], tensors[:2], tp_rank=0, tp_size=2, split_dim=1) == [0, 0]
    assert store.batch_pub_tensor_with_tp(["c1", "c2"], tensors[:2], config, tp_rank=0, tp_size=2) == [0, 0]
    halves = store.batch_get_tensor_with_tp(["b1", "b2"], tp_rank=1, tp_size=2)
    assert all(torch.equal(half, whole[:, 10:]) for half, whole in zip(halves, tensors))
    assert store.upsert_tensor("my_tensor", tensors[0]) == 0
    assert store.upsert_pub_tensor("my_tensor", tensor, config) == 0
    assert store.batch_upsert_tensor(["t1", "t2"], tensors[1:]) == [0, 0]
    assert store.batch_upsert_pub_tensor(["t1", "t2"], tensors[1:], config) == [0, 0]


def test_tensors_in_registered_memory(store):
    torch = pytest.importorskip("torch")
    tensor = torch.arange(64, dtype=torch.int32).reshape(8, 8)
    store.put_tensor("t", tensor)
    size = store.get_size("t")
    memory = np.zeros(8 * size, np.uint8)
    at = memory.ctypes.data
    store.register_buffer(at, memory.nbytes)
    assert torch.equal(store.get_tensor_into("t", at, size), tensor)
    assert store.put_tensor_from("from", at, size) == 0 and store.upsert_tensor_from("from", at, size) == 0
    assert store.batch_put_tensor_from(["f1", "f2"], [at, at], [size, size]) == [0, 0]
    assert store.batch_upsert_tensor_from(["f1", "f2"], [at, at], [size, size]) == [0, 0]
    assert store.put_tensor_with_tp_from("tp", at, size, tp_rank=0, tp_size=2, split_dim=0) == 0
    assert store.batch_put_tensor_with_tp_from(["a", "b"], [at, at], [size, size], tp_size=2) == [0, 0]
    shard = store.get_tensor_with_tp_into("tp", at + size, size, tp_rank=1, tp_size=2)
    assert torch.equal(shard, tensor[4:])
    shards = store.batch_get_tensor_with_tp_into(["a", "b"], [at + 2 * size, at + 3 * size], [size, size], 0, 2)
    assert all(torch.equal(one, tensor[:4]) for one in shards)
    both = store.batch_get_tensor_into(["f1", "f2"], [at + 4 * size, at + 5 * size], [size, size])
    assert all(torch.equal(one, tensor) for one in both)
    # The views are freed before the memory.
    del shard, shards, both
    assert store.unregister_buffer(at) == 0


def test_tensors_with_parallelism(store):
    torch = pytest.importorskip("torch")

    def layout(rank: int, size: int) -> TensorParallelism:
        axis = ParallelAxis()
        axis.kind, axis.rank, axis.size, axis.split_dim = "tp", rank, size, 0
        parallelism = TensorParallelism()
        parallelism.axes = [axis]
        return parallelism

    full = torch.arange(96, dtype=torch.float32).reshape(12, 8)
    for rank in range(4):
        assert store.put_tensor_with_parallelism("p", full[3 * rank : 3 * rank + 3], parallelism=layout(rank, 4)) == 0
    target = ReadTarget()
    target.mode, target.parallelism = "shard", layout(1, 2)
    assert torch.equal(store.get_tensor_with_parallelism("p", target=target), full[6:])
    target.mode = "full"
    assert torch.equal(store.get_tensor_with_parallelism("p", target=target), full)
    assert store.batch_put_tensor_with_parallelism(["q", "r"], [full, full], parallelisms=[None, None]) == [0, 0]
    assert all(torch.equal(one, full) for one in store.batch_get_tensor_with_parallelism(["q", "r"], targets=None))
    assert store.upsert_tensor_with_parallelism("q", full + 1) == 0
    assert torch.equal(store.get_tensor("q"), full + 1)


def test_engines():
    engines = [TransferEngine() for _ in range(2)]
    for engine in engines:
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    here, there = engines
    name = f"127.0.0.1:{there.get_rpc_port()}"
    text = b"Hello, Transfer Engine!"
    managed = here.allocate_managed_buffer(MIB)
    assert managed != 0 and here.write_bytes_to_buffer(managed, text, len(text)) == 0
    assert here.read_bytes_from_buffer(managed, len(text)) == text
    memory = np.zeros(MIB, np.uint8)
    remote = memory.ctypes.data
    assert there.register_memory(remote, memory.nbytes) == 0
    assert here.get_first_buffer_address(name) == remote
    assert here.transfer_sync_write(name, managed, remote, len(text)) == 0
    assert memory[: len(text)].tobytes() == text
    memory[:4] = 7
    assert here.transfer_sync_read(name, managed, remote, 4) == 0
    assert here.read_bytes_from_buffer(managed, 4) == b"\7" * 4
    batch = here.transfer_submit_write(name, managed, remote, len(text))
    while (status := here.transfer_check_status(batch)) == 0:
        time.sleep(0.001)
    assert status == 1
    notify = TransferNotify("transfer_complete", "chunk_1_done")
    assert here.transfer_sync(name, managed, remote, 4, TransferOpcode.WRITE, notify) == 0
    told = []
    while not told:
        told = there.get_notifies()
    assert [(one.name, one.msg) for one in told] == [("transfer_complete", "chunk_1_done")]
    chunks = [np.full(1000, i, np.uint8) for i in range(4)]
    local, lengths = [one.ctypes.data for one in chunks], [1000] * 4
    targets = [remote + 1000 * i for i in range(4)]
    assert here.batch_register_memory(local, lengths) == 0
    assert here.batch_transfer_sync_write(name, local, targets, lengths) == 0
    assert memory[:4000:1000].tolist() == [0, 1, 2, 3]
    batch = here.batch_transfer_async_write(name, local[::-1], targets, lengths)
    assert here.get_batch_transfer_status([batch]) == 0
    assert memory[:4000:1000].tolist() == [3, 2, 1, 0]
    assert here.batch_unregister_memory(local) == 0 and there.unregister_memory(remote) == 0
    assert here.free_managed_buffer(managed, MIB) == 0
    assert isinstance(json.loads(here.get_local_topology()), dict)
    for engine in engines:
        engine._close()
