"""Names that serving systems and their caches import, and the arguments with which they call them.

The list was made by parsing vLLM, vLLM-Ascend, vllm-omni, SGLang, LMCache, checkpoint-engine,
TransferQueue, lmdeploy, FlexKV, LightX2V, TorchSpec, SpecForge, speculators, miles, verl, NeMo-RL,
TokenSpeed, unified-cache-management and Dynamo.
"""

from __future__ import annotations

import importlib
import inspect
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from mooncake.engine import TransferEngine
from mooncake.store import MooncakeDistributedStore, MooncakeHostMemAllocator, ReplicateConfig
from mooncake.structured_object_store import MooncakeBundleTransfer

KEYS, ADDRESSES, SIZES = ["a", "b"], [1 << 20, 2 << 20], [10, 20]
CONFIG = ReplicateConfig()
SETUP = ("127.0.0.1", "P2PHANDSHAKE", 1 << 24, 1 << 24, "tcp", "", "127.0.0.1:50051")

MODULES = {
    "mooncake": ["MooncakeDistributedStore", "ReplicateConfig", "__file__"],
    "mooncake.allocator": ["BarexAllocator", "NVLinkAllocator"],
    "mooncake.ep": ["MooncakeBackendOptions", "set_device_filter"],
    "mooncake.engine": [
        "SUPPORT_HIP", "TransferEngine", "TransferNotify", "TransferOpcode",
        "CoroRPCInterface", "ReceivedData", "ReceivedTensor", "RpcInterface", "create_rpc_client", "create_rpc_server",
    ],
    "mooncake.mooncake_ep_buffer": ["Buffer"],
    "mooncake.pg": [
        "MooncakeBackendOptions", "get_peer_state", "join_group", "recover_ranks", "set_device_filter", "set_transfer_engine",
    ],
    "mooncake.store": [
        "EngramStore", "EngramStoreConfig", "MooncakeDistributedStore", "MooncakeHostMemAllocator", "ObjectDataType",
        "ReplicateConfig", "bind_to_numa_node",
    ],
    "mooncake.structured_object_store": ["FieldSchema", "MooncakeBundleTransfer", "export_ref", "import_ref"],
}  # fmt: skip

# Arguments of a call: positional ones, and named ones.
Call = tuple[tuple[object, ...], dict[str, object]]


def call(*args: object, **named: object) -> Call:
    return args, named


STORE = {
    "_batch_exist": [call(KEYS)],
    "batch_get_buffer": [call(KEYS)],
    "batch_get_into": [call(KEYS, ADDRESSES, SIZES)],
    "batch_get_into_multi_buffers": [call(KEYS, [ADDRESSES], [SIZES]), call(KEYS, [ADDRESSES], [SIZES], True)],
    "batch_get_replica_desc": [call(KEYS)],
    "batch_is_exist": [call(KEYS)],
    "batch_put_from": [call(KEYS, ADDRESSES, SIZES), call(KEYS, ADDRESSES, SIZES, CONFIG)],
    "batch_put_from_multi_buffers": [
        call(KEYS, [ADDRESSES], [SIZES]),
        call(KEYS, [ADDRESSES], [SIZES], CONFIG),
        call(KEYS, [ADDRESSES], [SIZES], config=CONFIG),
    ],
    "batch_remove": [call(KEYS), call(KEYS, force=True), call(KEYS, True)],
    "batch_upsert_from": [call(KEYS, ADDRESSES, SIZES), call(KEYS, ADDRESSES, SIZES, config=CONFIG)],
    "close": [call()],
    "get": [call("a")],
    "get_batch": [call(KEYS)],
    "get_buffer": [call("a")],
    "get_hostname": [call()],
    "get_into": [call("a", 1, 2)],
    "get_into_ranges": [call([1], [KEYS], [[[0]]], [[[0]]], [[[1]]])],
    "get_tensor": [call("a")],
    "is_exist": [call("a")],
    "put": [call("a", b"b"), call("a", b"b", CONFIG), call("a", b"b", config=CONFIG)],
    "put_batch": [call(KEYS, [b"a", b"b"])],
    "put_from": [call("a", 1, 2), call("a", 1, 2, CONFIG)],
    "put_parts": [call("a", b"b", b"c"), call("a", b"b", config=CONFIG)],
    "put_tensor": [call("a", None)],
    "register_buffer": [call(1, 2)],
    "remove": [call("a"), call("a", True), call("a", force=True)],
    "remove_all": [call(), call(True), call(force=True)],
    "remove_by_regex": [call("a.*")],
    "setup": [
        call(*SETUP),
        call(*SETUP, None),
        call(*SETUP, None, enable_ssd_offload=False, ssd_offload_path="", tenant_id="default"),
        call(*SETUP, None, enable_client_http_server=False, client_http_port=9300),
        call(*SETUP[:4], protocol="tcp", rdma_devices="", master_server_addr=SETUP[6], engine=None),
        call({"local_hostname": "127.0.0.1"}),
    ],
    "setup_dummy": [call(1, 2, "127.0.0.1:50052")],
    "unregister_buffer": [call(1)],
}

TARGET = ("127.0.0.1:1", ADDRESSES, ADDRESSES, SIZES)
ENGINE = {
    "batch_register_memory": [call(ADDRESSES, SIZES)],
    "batch_transfer_async_read": [call(*TARGET)],
    "batch_transfer_async_write": [call(*TARGET)],
    "batch_transfer_sync": [call(*TARGET, None), call(*TARGET, None, None)],
    "batch_transfer_sync_read": [call(*TARGET)],
    "batch_transfer_sync_write": [call(*TARGET)],
    "batch_transfer_sync_write_pages": [call("127.0.0.1:1", [1], [2], [[0] * 5], 100)],
    "batch_unregister_memory": [call(ADDRESSES)],
    "get_engine": [call()],
    "get_notifies": [call()],
    "get_rpc_port": [call()],
    "initialize": [call("127.0.0.1", "P2PHANDSHAKE", "tcp", "")],
    "initialize_ext": [call("127.0.0.1", "P2PHANDSHAKE", "tcp", "", "p2p")],
    "register_memory": [call(1, 2)],
    "send_probe": [call("127.0.0.1:1")],
    "transfer_check_status": [call(1)],
    "transfer_submit_write": [call("127.0.0.1:1", 1, 2, 3)],
    "transfer_sync": [call("127.0.0.1:1", 1, 2, 3, None), call("127.0.0.1:1", 1, 2, 3, None, None)],
    "transfer_sync_read": [call("127.0.0.1:1", 1, 2, 3)],
    "transfer_sync_write": [call("127.0.0.1:1", 1, 2, 3)],
    "unregister_memory": [call(1)],
}

BUNDLES = {
    "cleanup_dataproto": [call({})],
    "get": [call({}), call({}, type="dict"), call({}, fields=["a"], rows=[0])],
    "put": [call({}, type="dict", namespace="n", chunk_bytes=1, config=CONFIG, field_schemas={})],
    "release_result": [call()],
}

# Fields that clients set, and values that they set.
FIELDS = {
    "data_type": [CONFIG.data_type],
    "group_ids": [["a"], ("a", "b"), None],
    "prefer_alloc_in_same_node": [True, False],
    "preferred_segment": ["127.0.0.1:12345"],
    "replica_num": [2],
    "with_hard_pin": [True],
    "with_soft_pin": [True],
}


@pytest.mark.parametrize("module", MODULES)
def test_modules(module):
    if module.partition(".")[2] in ("ep", "mooncake_ep_buffer", "pg"):
        pytest.importorskip("torch", reason="process groups need torch")
    loaded = importlib.import_module(module)
    for name in MODULES[module]:
        assert hasattr(loaded, name), name
        scope: dict[str, object] = {}
        exec(f"from {module} import {name}", scope)
        assert scope[name] is not None


@pytest.mark.parametrize(("of", "table"), [(MooncakeDistributedStore, STORE), (TransferEngine, ENGINE), (MooncakeBundleTransfer, BUNDLES)])
def test_calls_take_the_arguments_of_clients(of, table):
    for name, calls in table.items():
        assert hasattr(of, name), name
        assert of is MooncakeBundleTransfer or hasattr(of(), name), name
        signature = inspect.signature(getattr(of, name))
        for args, named in calls:
            try:
                signature.bind(None, *args, **named)
            except TypeError as error:
                pytest.fail(f"{name}{signature}: {args} {named}: {error}")


def test_fields_of_a_configuration():
    for name, values in FIELDS.items():
        assert hasattr(ReplicateConfig, name), "clients look at the class"
        for value in values:
            setattr(CONFIG, name, value)


def test_other_names():
    from mooncake.allocator import BarexAllocator, NVLinkAllocator
    from mooncake.store import ObjectDataType

    assert ObjectDataType.TENSOR is not None
    assert callable(BarexAllocator.get_allocator) and callable(NVLinkAllocator.get_allocator)
    assert callable(MooncakeHostMemAllocator.alloc) and callable(MooncakeHostMemAllocator.free)
    for program in ("mooncake_master", "mooncake_store_master", "mooncake_client", "mc_store_rest_server", "transfer_engine_bench"):
        assert shutil.which(program, path=Path(sys.executable).parent), program


def test_pages_are_written():
    """TokenSpeed names the fields of pages, and not each write."""
    engines = [TransferEngine() for _ in range(2)]
    for engine in engines:
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    source = np.random.default_rng().integers(0, 256, 1 << 16, dtype=np.uint8)
    target = np.zeros_like(source)
    for engine, memory in zip(engines, (source, target)):
        assert engine.register_memory(memory.ctypes.data, memory.nbytes) == 0
    sender, name = engines[0], f"127.0.0.1:{engines[1].get_rpc_port()}"
    at, to = source.ctypes.data, target.ctypes.data
    pages = np.array([3, 0, 7]), np.array([1, 5, 2])
    fields = np.array([[at, 4096, to, 8192, 1000], [at + 2000, 4096, to + 4000, 8192, 500]])
    for batch in (1, 4, 1000):
        target[:] = 0
        expected = np.zeros_like(target)
        for begin, stride, there, there_stride, length in fields.tolist():
            for one, other in zip(*pages):
                from_, into = begin - at + one * stride, there - to + other * there_stride
                expected[into : into + length] = source[from_ : from_ + length]
        assert sender.batch_transfer_sync_write_pages(name, *pages, fields, batch) == 0
        assert (target == expected).all()
    assert sender.batch_transfer_sync_write_pages(name, [], [], fields, 10) == 0
    assert sender.batch_transfer_sync_write_pages(name, [1000], [0], fields, 10) == -1
    for wrong in (([1], [1, 2], fields, 10), ([1], [1], fields[:, :4], 10), (*pages, fields, -1)):
        with pytest.raises((TypeError, ValueError)):
            sender.batch_transfer_sync_write_pages(name, *wrong)


def joined(settings):
    store = MooncakeDistributedStore()
    assert store.setup(settings) == 0, store.last_error()
    return store


@pytest.mark.parametrize("name", ["master_server_addr", "master_server_address"])
def test_lmcache_stores_chunks(master, key, name):
    """LMCache passes its settings on as text, `device_name` always among them, and does not
    register the memory of some of its allocators.
    """
    settings = {"local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE", "device_name": "", "protocol": "tcp"}
    settings |= {"global_segment_size": str(16 << 20), "local_buffer_size": str(4 << 20), name: master.address}
    store, config = joined(settings), ReplicateConfig()
    config.replica_num = 1
    config.preferred_segment = store.get_hostname()
    size, count = 32 << 10, 8
    chunks = np.random.default_rng().integers(0, 256, (count, size), dtype=np.uint8)
    at = [chunks[i].ctypes.data for i in range(count)]
    keys = [f"{key}@1@0@{i}@half" for i in range(count)]
    assert store.put_from(keys[0], at[0], size, config) == 0
    assert store.batch_put_from(keys[1:], at[1:], [size] * (count - 1), config) == [0] * (count - 1)
    assert [store.is_exist(one) for one in (*keys, key)] == [1] * count + [0]
    into = np.zeros_like(chunks)
    to = [into[i].ctypes.data for i in range(count)]
    found = store.batch_get_into([*keys, key], [*to, to[0]], [size] * (count + 1))
    assert found[:count] == [size] * count and found[count] < 0 and (into == chunks).all()
    assert store.put_parts(f"{key}-parts", b"header", memoryview(chunks[0])) == 0
    buffer, missing = store.batch_get_buffer([f"{key}-parts", f"{key}-none"])
    assert bytes(memoryview(buffer)) == b"header" + chunks[0].tobytes() and missing is None
    del buffer
    assert store.register_buffer(at[0], chunks.nbytes) == 0 and store.unregister_buffer(at[0]) == 0
    assert store.remove(keys[0], True) == 0 and store.is_exist(keys[0]) == 0
    store.close()


def test_unknown_settings_are_refused_beside_those_of_lmcache(master):
    store = MooncakeDistributedStore()
    settings = {"local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE", "global_segment_size": 0}
    assert store.setup({**settings, "master_server_address": master.address, "device_label": ""}) == -600
    assert "unknown key 'device_label'" in str(store.last_error())
    both = {"master_server_addr": master.address, "master_server_address": "127.0.0.1:1"}
    assert store.setup({**settings, **both}) == 0, "the name of Mooncake C++ counts"
    store.close()


def test_transfer_queue_registers_overlapping_slices(make_store, key):
    """TransferQueue stores slices of one tensor from four threads. Each thread registers its
    slices, which overlap those of the others, and unregisters them at its end.
    """
    store, config = make_store(), ReplicateConfig()
    config.with_hard_pin = True
    slices, size, step, batch = 1600, 20_000, 40, 400
    whole = np.random.default_rng().integers(0, 256, slices * step + size, dtype=np.uint8)
    at = [whole.ctypes.data + i * step for i in range(slices)]
    keys = [f"{key}-{i}" for i in range(slices)]

    def write(first):
        some = slice(first, first + batch)
        for address in at[some]:
            store.register_buffer(address, size)
        codes = store.batch_upsert_from(keys[some], at[some], [size] * batch, config=config)
        for address in at[some]:
            store.unregister_buffer(address)
        return codes

    def read(first):
        some, into = keys[first : first + batch], np.zeros((batch, size), np.uint8)
        store.register_buffer(into.ctypes.data, into.nbytes)
        codes = store.batch_get_into(some, [row.ctypes.data for row in into], [size] * batch)
        store.unregister_buffer(into.ctypes.data)
        expected = np.lib.stride_tricks.sliding_window_view(whole, size)[:: step][first : first + batch]
        return codes == [size] * batch and bool((into == expected).all())

    with ThreadPoolExecutor(4) as threads:
        for _ in range(2):
            assert [*threads.map(write, range(0, slices, batch))] == [[0] * batch] * 4
        assert all(threads.map(read, range(0, slices, batch)))
    assert store.batch_remove(keys, force=True) == [0] * slices
    assert store.batch_remove(keys[:2], force=True) == [-704] * 2
