"""Setup and close of stores: valid settings, duplicate settings, and misspelt ones."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from conftest import Master, free_port
from mooncake import ForkedError
from mooncake.buffer_pool import BufferPool
from mooncake.mooncake_config import MooncakeConfig
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
from test_engine import listening

MIB = 1 << 20


def settings(address: str, **changes: object) -> dict[str, object]:
    whole = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": 16 * MIB,
        "local_buffer_size": 0,
        "protocol": "tcp",
        "rdma_devices": "",
        "master_server_addr": address,
    }
    return whole | changes


def test_a_dictionary_must_be_the_only_argument(master, key):
    store = MooncakeDistributedStore()
    assert store.setup(config=settings(master.address)) == 0
    assert store.put(key, b"value") == 0
    nothing = dict.fromkeys(("protocol", "rdma_devices", "tenant_id", "local_buffer_size"))
    assert store.setup(settings(master.address, **nothing)) == 0, "None counts as absent"
    for wrong in ({"tenant_id": "other"}, {"enable_ssd_offload": True}, {"config": settings(master.address)}):
        with pytest.raises(TypeError, match="a dict must be the only argument"):
            store.setup(settings(master.address), **wrong)
    with pytest.raises(TypeError, match="local_hostname"):
        store.setup()
    assert store.put(key + "-2", b"value") == 0, "the previous setup stays"
    store.close()


def test_the_longest_time_of_a_call_is_a_setting(own_master, key):
    master, store = own_master(), MooncakeDistributedStore()
    for wrong in ("0", "-1", "soon", 1.5, "876601h"):
        assert store.setup(settings(master.address, rpc_timeout_ms=wrong)) == -600, wrong
        assert "rpc_timeout_ms" in store.last_error().message
    assert store.setup(settings(master.address, rpc_timeout_ms="300")) == 0
    master.freeze()
    began = time.monotonic()
    assert store.put(key, b"value") < 0
    # The default is 20 s.
    assert 0.3 <= time.monotonic() - began < 15
    master.thaw()
    store.close()


def test_switches_reject_strings(master, tmp_path):
    for switch in ("enable_ssd_offload", "enable_client_http_server"):
        with pytest.raises(TypeError, match=switch):
            MooncakeDistributedStore().setup(**settings(master.address), ssd_offload_path=str(tmp_path), **{switch: "false"})
    assert not list(tmp_path.iterdir())
    config = ReplicateConfig()
    for value, expected in ((np.bool_(True), True), (None, False), (1.0, True), ("no", False)):
        config.prefer_alloc_in_same_node = value
        assert config.prefer_alloc_in_same_node is expected
    with pytest.raises(TypeError):
        config.prefer_alloc_in_same_node = []


def test_a_store_is_set_up_again_on_its_own_disk(own_master, tmp_path):
    store = MooncakeDistributedStore()
    for _ in range(2):
        whole = settings(own_master("--enable_offload=true").address)
        assert store.setup(**whole, enable_ssd_offload=True, ssd_offload_path=str(tmp_path)) == 0, store.last_error()
    assert store.close() == 0


def test_close_is_0_without_a_master(own_master):
    master = own_master()
    store = MooncakeDistributedStore()
    assert store.setup(**settings(master.address)) == 0
    master.kill()
    assert store.close() == 0 and store.close() == 0


def test_bytes_name_files_and_segments(make_store):
    store = make_store()
    path = Path("/dev/shm") / f"mooncake-test-{os.getpid()}-bytes"
    path.write_bytes(bytes(MIB))
    try:
        assert store.mount_segment(os.fsencode(path), 0) == {"ret": 0, "segment_ids": []}
        assert store.mount_segment(os.fsencode(path), MIB)["ret"] == 0
    finally:
        path.unlink()
    assert store.put(bytearray(b"key-of-a-bytearray"), b"value") in (0, -705)
    assert store.get("key-of-a-bytearray") == b"value"
    assert store.batch_replica_clear([b"key-of-a-bytearray"], b"no such segment") == []
    assert store.create_move_task("no such key", b"a", b"b")[1] < 0


def test_values_in_many_buffers_are_compared_with_their_checksums(monkeypatch, make_store, key):
    monkeypatch.setenv("MOONCAKE_STORE_CHECKSUM", "1")
    owner, reader = make_store(), make_store(global_segment_size=0)
    size, here = 200_000, ReplicateConfig()
    here.preferred_segment = owner.get_hostname()
    assert owner.put(key, os.urandom(size), here) == 0
    memory = (ctypes.c_ubyte * size)()
    at = ctypes.addressof(memory)
    for store in (owner, reader):
        assert store.register_buffer(at, size) == 0
        assert store.batch_get_into_multi_buffers([key], [[at, at + 1000]], [[1000, size - 1000]]) == [size]
    place = owner.get_replica_desc(key)[0].get_memory_descriptor().buffer_descriptor
    place = place.buffer_address
    ctypes.memset(place + 5000, 0xAA, 50)
    for store in (owner, reader):
        for cut in (0, 1000, 6000):
            pointers, sizes = [at, at + cut], [cut, size - cut]
            assert store.batch_get_into_multi_buffers([key], [pointers], [sizes]) == [-801], cut


def test_registrations_of_an_ipc_client_may_overlap(light, key):
    assert light.put(key, b"value") == 0
    memory = light.alloc_from_mem_pool(MIB)
    for start, size in ((0, MIB), (0, MIB), (4096, 100), (MIB - 4096, 4096)):
        assert light.register_buffer(memory + start, size) == 0
    assert light.get_into(key, memory + 8192, 1000) == 5
    assert light.unregister_buffer(memory) == 0
    assert light.get_into(key, memory + 8192, 1000) == 5
    assert light.unregister_buffer(memory) == 0
    assert light.get_into(key, memory + 8192, 1000) == -600
    assert "mooncake_client" in light.last_error().message
    assert light.get_into(key, memory + 4100, 50) == light.get_into(key, memory + MIB - 4096, 4096) == 5
    assert light.unregister_buffer(memory + 4096) == light.unregister_buffer(memory + MIB - 4096) == 0


SUB_INTERPRETER = """
import sys
from mooncake.store import MooncakeDistributedStore
import {module} as interpreters

store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 1 << 24, 0, "tcp", "", sys.argv[1]) == 0
assert store.put(sys.argv[2], b"value") == 0
other = interpreters.create()
try:
    interpreters.run_string(other, "import mooncake.store")
except interpreters.RunFailedError as error:
    print(error)
interpreters.destroy(other)
assert store.get(sys.argv[2]) == b"value"
"""


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="the interpreter refuses by itself, elsewhere")
def test_another_interpreter_of_the_process_is_refused(master, key):
    code = SUB_INTERPRETER.format(module="_xxsubinterpreters")
    done = subprocess.run([sys.executable, "-c", code, master.address, key], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "ImportError" in done.stdout


def test_the_exception_after_a_fork_has_a_code(store):
    pool = BufferPool(store)
    child = os.fork()
    if child == 0:
        try:
            for call in (lambda: store.put("k", b"v"), lambda: pool.acquire(10)):
                try:
                    call()
                    os._exit(1)
                except ForkedError as error:
                    assert error.code < 0
            os._exit(0)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pool.close()


def test_a_client_for_calls_of_the_master_alone(make_store, key, master):
    owner, store = make_store(), MooncakeDistributedStore()
    assert owner.put(key, b"value") == 0
    before = listening()
    address = master.address
    # No metadata service is needed.
    for metadata in ("P2PHANDSHAKE", "http://127.0.0.1:1/metadata"):
        assert store.setup("127.0.0.1", metadata, 0, 0, "rpc_only", "", address) == 0, store.last_error()
    assert len(listening() - before) <= 1, "only the port that reserves the name"
    assert store.health_check() == 0 and store.get_hostname().startswith("127.0.0.1:")
    assert store.is_exist(key) == 1 and store.batch_is_exist([key, "none"]) == [1, 0]
    assert store.get_size(key) == 5 and store.get_size("none") == -704
    assert len(store.get_replica_desc(key)) == 1 and list(store.batch_get_replica_desc([key])) == [key]
    memory = (ctypes.c_ubyte * 100)()
    at = ctypes.addressof(memory)
    assert store.put(key + "2", b"x") == store.put_batch([key + "2"], [b"x"]) == store.upsert(key, b"x") == -600
    assert "rpc_only" in store.last_error().message
    assert store.put_parts(key + "2", b"x") == store.put_from(key + "2", at, 5) == store.get_into(key, at, 100) == -600
    assert store.get(key) == b"" and store.get_batch([key]) == [b""] and store.get_buffer(key) is None
    assert store.register_buffer(at, 100) == -600
    assert store.allocate_and_mount_segment(16 << 20)["ret"] != 0
    assert store.remove(key, True) == 0 and store.is_exist(key) == 0
    assert store.close() == 0 and store.health_check() == 1
    for segment, buffer in ((16 << 20, 0), (0, 16 << 20)):
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", segment, buffer, "rpc_only", "", address) == -600
        assert "rpc_only" in store.last_error().message


def test_services_that_do_not_respond_are_named(master):
    with socket.socket() as silent, socket.socket() as unused:
        for one in silent, unused:
            one.bind(("127.0.0.1", 0))
        silent.listen(50)
        quiet, closed = (f"127.0.0.1:{one.getsockname()[1]}" for one in (silent, unused))
        for changes, address, limit in [
            ({"master_server_addr": f"etcd://{closed}"}, closed, 8),
            ({"master_server_addr": f"etcd://{closed};{closed}"}, closed, 8),
            ({"master_server_addr": f"etcd://{quiet}"}, quiet, 9),
            ({"metadata_server": f"etcd://{closed}"}, closed, 8),
            ({"metadata_server": f"http://{closed}/metadata"}, closed, 8),
            ({"metadata_server": f"http://{quiet}/metadata"}, quiet, 9),
            ({"master_server_addr": closed}, closed, 30),
            ({"master_server_addr": quiet}, quiet, 30),
        ]:
            store, since = MooncakeDistributedStore(), time.monotonic()
            assert store.setup(**settings(master.address, **changes)) < 0, changes
            error = str(store.last_error())
            assert address in error and "the time of the operation" not in error, error
            assert time.monotonic() - since < limit, (changes, error)


def test_a_wrong_path_of_the_metadata_server_is_named(tmp_path):
    port = free_port()
    running = Master(tmp_path, ["--enable_http_metadata_server", f"--http_metadata_server_port={port}"])
    running.start()
    try:
        for path in "", "/meta":
            store = MooncakeDistributedStore()
            url = f"http://127.0.0.1:{port}{path}"
            assert store.setup(**settings(running.address, metadata_server=url)) < 0
            error = str(store.last_error())
            assert f"{url}?key=" in error and "404" in error and "/metadata" in error, error
    finally:
        running.stop()


def test_a_refused_put_names_the_reason(own_master):
    master = own_master()
    store = MooncakeDistributedStore()
    assert store.setup(**settings(master.address, global_segment_size=0, local_buffer_size=16 * MIB)) == 0
    memory = (ctypes.c_ubyte * 64)()
    at = ctypes.addressof(memory)
    assert store.register_buffer(at, 64) == 0
    config = ReplicateConfig()
    config.replica_num = 0
    calls = {
        "put": lambda *config: store.put("k", b"v", *config),
        "upsert": lambda *config: store.upsert("k", b"v", *config),
        "put_batch": lambda *config: store.put_batch(["k", "l"], [b"v", b"w"], *config),
        "put_from": lambda *config: store.put_from("k", at, 64, *config),
        "batch_put_from": lambda *config: store.batch_put_from(["k"], [at], [64], *config)[0],
    }
    for name, call in calls.items():
        assert call(config) == -600 and "replica_num must be at least 1" in str(store.last_error()), name
    assert store.put("k", b"v") == -200
    assert "no client has mounted a segment" in str(store.last_error())
    store.close()


def test_an_unknown_log_level_is_reported(master):
    code = """
import logging, sys
logging.basicConfig()
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", sys.argv[1]) == 0
"""
    for level, is_reported in [("loud", True), ("42", True), ("debug", False), ("TRACE", False), ("", False)]:
        ended = subprocess.run(
            [sys.executable, "-c", code, master.address],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "MC_LOG_LEVEL": level},
        )
        assert ended.returncode == 0, ended.stderr
        assert (f"MC_LOG_LEVEL={level} is ignored" in ended.stderr) == is_reported, ended.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("global_segment_size", "16 XB"),
        ("local_buffer_size", "many"),
        ("client_http_port", "http"),
        ("enable_client_http_server", "maybe"),
        ("enable_ssd_prefetch", "maybe"),
    ],
)
def test_a_refused_setting_is_named(master, tmp_path, name, value):
    store = MooncakeDistributedStore()
    assert store.setup(settings(master.address, **{name: value})) == -600
    assert name in store.last_error().message
    if name == "enable_ssd_prefetch":
        return
    path = tmp_path / "config.json"
    known = {"local_hostname": "a", "metadata_server": "b", "master_server_address": "c"}
    path.write_text(json.dumps({**known, name: value}))
    with pytest.raises(ValueError, match=name):
        MooncakeConfig.from_file(str(path))


def test_empty_settings_count_as_absent(master, tmp_path):
    store = MooncakeDistributedStore()
    empty = dict.fromkeys(("client_http_port", "enable_ssd_offload", "protocol"), "")
    assert store.setup(settings(master.address, **empty)) == 0
    store.close()
    path = tmp_path / "config.json"
    fields = {"local_hostname": "a", "metadata_server": "b", "master_server_address": "c"}
    path.write_text("\ufeff" + json.dumps({**fields, "client_http_port": "", "tenant_id": ""}), encoding="utf-8")
    config = MooncakeConfig.from_file(str(path))
    assert (config.client_http_port, config.tenant_id) == (9300, "default")


@pytest.mark.parametrize("size", ["", " ", "0x", "0x1000000", "sixteen", "-1", "nan", "1e400", "16 XB"])
@pytest.mark.parametrize("name", ["global_segment_size", "local_buffer_size"])
def test_sizes_that_mean_nothing_are_refused_by_name(master, tmp_path, monkeypatch, name, size):
    store = MooncakeDistributedStore()
    assert store.setup(settings(master.address, **{name: size})) == -600
    assert name in store.last_error().message
    store.close()
    path = tmp_path / "config.json"
    fields = {"local_hostname": "a", "metadata_server": "b", "master_server_address": "c"}
    path.write_text(json.dumps({**fields, name: size}))
    with pytest.raises(ValueError, match=name):
        MooncakeConfig.from_file(str(path))
    monkeypatch.setenv("MOONCAKE_MASTER", "c")
    monkeypatch.setenv(f"MOONCAKE_{name.upper()}", size)
    if size.strip():
        with pytest.raises(ValueError, match=name):
            MooncakeConfig.load_from_env()
    else:
        assert MooncakeConfig.load_from_env().local_buffer_size == 1 << 30
