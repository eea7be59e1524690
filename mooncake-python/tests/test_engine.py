"""Transfer engine, between two engines of one process and of two processes."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode
from mooncake.store import ReplicateConfig


@pytest.fixture
def pair():
    engines = []
    for _ in range(2):
        engine = TransferEngine()
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0, engine.last_error()
        engines.append(engine)
    yield engines
    for engine in engines:
        engine._close()


def memory(engine, size, fill=None):
    array = np.zeros(size, np.uint8) if fill is None else np.full(size, fill, np.uint8)
    assert engine.register_memory(array.ctypes.data, size) == 0, engine.last_error()
    return array


def name_of(engine):
    return f"127.0.0.1:{engine.get_rpc_port()}"


def test_reads_and_writes(pair):
    a, b = pair
    mine, theirs = memory(a, 1 << 20, 7), memory(b, 1 << 20)
    src, dst, to = mine.ctypes.data, theirs.ctypes.data, name_of(b)
    assert a.transfer_sync_write(to, src, dst + 100, 1000) == 0
    assert theirs[100:1100].sum() == 7000 and theirs.sum() == 7000
    theirs[:] = 9
    assert a.transfer_sync_read(to, src, dst, 1 << 20) == 0 and (mine == 9).all()
    assert a.transfer_sync(to, src, dst, 10, TransferOpcode.WRITE, TransferNotify("n", "m")) == 0
    deadline = time.monotonic() + 10
    while not (got := b.get_notifies()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [(one.name, one.msg) for one in got] == [("n", "m")] and b.get_notifies() == []
    assert a.batch_transfer_sync_write(to, [src, src + 8], [dst, dst + 8], [8, 8]) == 0
    assert a.batch_transfer_sync_read(to, [], [], []) == 0
    assert a.batch_transfer_sync_write(to, [src], [dst], [8, 8]) == -1
    assert a.transfer_sync_write(to, src, dst, 0) == 0
    assert a.get_first_buffer_address(to) == dst
    assert a.send_probe(to) == 0
    assert a.send_probe("127.0.0.1:1") == -102


def test_batches_under_way(pair):
    a, b = pair
    mine, theirs = memory(a, 4096, 3), memory(b, 4096)
    to = name_of(b)
    first = a.transfer_submit_write(to, mine.ctypes.data, theirs.ctypes.data, 4096)
    assert first > 0
    assert a.get_batch_transfer_status([first]) == 0
    assert (theirs == 3).all()
    assert a.transfer_check_status(first) == 1, "a finished batch can be queried again"
    second = a.batch_transfer_async_read(to, [mine.ctypes.data], [theirs.ctypes.data], [4096])
    deadline = time.monotonic() + 10
    while (status := a.transfer_check_status(second)) == 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert status == 1
    assert a.get_batch_transfer_status([]) == 0
    assert a.transfer_check_status(4711) == -1
    assert a.batch_transfer_async_write(to, [1], [2], []) == 0
    nowhere = a.transfer_submit_write("127.0.0.1:1", mine.ctypes.data, 1, 1)
    assert nowhere == 0, "no engine listens at first"


def test_invalid_calls_return_errors(pair):
    a, b = pair
    mine, theirs = memory(a, 4096), memory(b, 4096)
    src, dst, to = mine.ctypes.data, theirs.ctypes.data, name_of(b)
    assert a.register_memory(src, 4096) == -7
    assert a.unregister_memory(12345) == -3
    assert a.register_memory(0, 1) != 0 and a.register_memory(src, 0) != 0
    assert a.transfer_sync_write(to, src, dst + 1, 4096) == -1, "beyond the target's memory"
    assert a.transfer_sync_write(to, src + 1, dst, 4096) == -1, "beyond local memory"
    assert a.transfer_sync_write(to, 8, dst, 8) == -1
    assert a.transfer_sync_write("127.0.0.1:1", src, dst, 8) == -1
    assert a.last_error().message
    with pytest.raises(TypeError):
        a.transfer_sync(to, src, dst, 8, 1)
    for wrong in (-1, None, "x", 1.0):
        with pytest.raises(TypeError):
            a.transfer_sync_write(to, wrong, dst, 8)
    assert a.unregister_memory(src) == 0
    assert a.transfer_sync_write(to, src, dst, 8) == -1
    assert a.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == -1
    with pytest.raises(RuntimeError, match="libcuda"):
        a.transfer_write_on_cuda(to, src, dst, 8, 0)


def test_before_it_is_initialized():
    engine = TransferEngine()
    assert engine.get_rpc_port() == 0 and engine.get_engine() is None
    assert engine.register_memory(4096, 4096) == -1
    assert engine.transfer_sync_write("x", 1, 2, 3) == -1
    assert engine.transfer_submit_write("x", 1, 2, 3) == 0
    assert engine.get_batch_transfer_status([1]) == -1
    assert engine.get_notifies() == []
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "xgmi", "") == -1
    assert engine.initialize("127.0.0.1", "http://127.0.0.1:1/metadata", "tcp", "") == -1


def test_topology(monkeypatch, tmp_path):
    engine = TransferEngine()
    found = json.loads(engine.get_local_topology())
    assert set(found) >= {"cpu:0"} and all(len(lists) == 2 for lists in found.values())
    assert json.loads(engine.get_local_topology("no_such_device"))["cpu:0"] == [[], []]
    file = tmp_path / "topology.json"
    file.write_text('{"cpu:0": [["mlx5_0"], []]}')
    monkeypatch.setenv("MC_CUSTOM_TOPO_JSON", str(file))
    # Mooncake C++ prints this text.
    assert engine.get_local_topology() == '{\n\t"cpu:0" : \n\t[\n\t\t[\n\t\t\t"mlx5_0"\n\t\t],\n\t\t[]\n\t]\n}\n'


def test_managed_memory(pair):
    a, b = pair
    at = a.allocate_managed_buffer(100)
    assert at
    assert a.write_bytes_to_buffer(at, b"hello", 5) == 0
    assert a.write_bytes_to_buffer(at + 5, "text", 4) == 0
    assert a.read_bytes_from_buffer(at, 9) == b"hellotext"
    there = b.allocate_managed_buffer(100)
    assert a.transfer_sync_write(name_of(b), at, there, 9) == 0
    assert b.read_bytes_from_buffer(there, 9) == b"hellotext"
    assert a.write_bytes_to_buffer(8, b"x", 1) == -1
    assert a.write_bytes_to_buffer(at, b"x", 2) == -1
    with pytest.raises(RuntimeError):
        a.read_bytes_from_buffer(8, 1)
    assert a.free_managed_buffer(at, 99) == -1
    assert a.free_managed_buffer(at, 100) == 0
    assert a.free_managed_buffer(at, 100) == -1
    assert a.allocate_managed_buffer(0) == 0


def test_a_store_shares_the_engines_memory_and_ports(pair, make_store, key):
    engine = pair[0]
    mine = memory(engine, 4096, 5)
    before = listening()
    store = make_store(engine=engine.get_engine())
    assert len(listening() - before) <= 1, "no additional ports except the one that reserves its name"
    here = ReplicateConfig()
    # The cluster has other clients, such as the shared `mooncake_client`.
    here.preferred_segment = store.get_hostname()
    assert store.put_from(key, mine.ctypes.data, 4096, here) == 0
    assert name_of(engine) in str(store.get_replica_desc(key)), "other clients reach the store through the engine"
    mine[:] = 0
    assert store.get_into(key, mine.ctypes.data, 4096) == 4096 and (mine == 5).all()
    assert store.register_buffer(mine.ctypes.data, 4096) == 0, "registered memory can be registered again"
    assert store.unregister_buffer(mine.ctypes.data) == 0
    assert store.get_into(key, mine.ctypes.data, 4096) == 4096
    assert store.close() == 0
    assert pair[1].transfer_sync_read(name_of(engine), memory(pair[1], 64).ctypes.data, mine.ctypes.data, 64) == 0


def listening():
    """Returns the listening sockets of this process."""
    mine = {os.readlink(link) for link in pathlib.Path("/proc/self/fd").iterdir() if link.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                found.add(fields[9])
    return found


def test_several_ranges_at_once(pair):
    a, b = pair
    mine = np.zeros(4096, np.uint8)
    at = mine.ctypes.data
    assert a.batch_register_memory([at, at + 1024], [1024, 1024]) == 0
    assert a.batch_register_memory([at + 2048, at + 2050], [1024, 8]) == -7
    assert a.register_memory(at + 2048, 1024) == 0, "none of them was registered"
    assert a.batch_register_memory([at], []) == -1
    assert a.batch_unregister_memory([at, 12345, at + 1024]) == -3
    assert a.batch_unregister_memory([at + 2048]) == 0, "the others are unregistered"
    assert a.batch_unregister_memory([at]) == -3
    assert a.batch_transfer_sync(name_of(b), [], [], [], TransferOpcode.READ, TransferNotify("n", "m")) == 0
    deadline = time.monotonic() + 10
    while not (got := b.get_notifies()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [one.msg for one in got] == ["m"]


def test_the_environment_is_read(monkeypatch):
    monkeypatch.setenv("MC_MIN_RPC_PORT", "16990")
    monkeypatch.setenv("MC_MAX_RPC_PORT", "16999")
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert 16990 <= engine.get_rpc_port() <= 16999
    engine._close()


PEER = """
import numpy as np, sys
from mooncake.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
memory = np.arange(1 << 20, dtype=np.uint32).view(np.uint8)
assert engine.register_memory(memory.ctypes.data, memory.nbytes) == 0
print(engine.get_rpc_port(), memory.ctypes.data, flush=True)
sys.stdin.readline()
print(int(memory[:4096].sum()), flush=True)
"""


def test_another_process(pair):
    a = pair[0]
    peer = subprocess.Popen([sys.executable, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        port, address = map(int, peer.stdout.readline().split())
        mine = memory(a, 4 << 20)
        assert a.transfer_sync_read(f"127.0.0.1:{port}", mine.ctypes.data, address, 4 << 20) == 0
        assert (mine.view(np.uint32) == np.arange(1 << 20)).all()
        mine[:] = 1
        assert a.transfer_sync_write(f"127.0.0.1:{port}", mine.ctypes.data, address, 4096) == 0
        out, _ = peer.communicate("done\n", timeout=30)
        assert int(out) == 4096
    finally:
        peer.kill()
        peer.wait()
    assert a.transfer_sync_read(f"127.0.0.1:{port}", mine.ctypes.data, address, 4096) == -1
