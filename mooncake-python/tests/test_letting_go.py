"""Calls that copy release the GIL. With thread switches by time disabled, another thread runs only
then.
"""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest

from mooncake.engine import TransferEngine

SIZE = 32 << 20


@pytest.fixture
def never_switched():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(before)


def lets_go(call) -> bool:
    """Returns whether a waiting thread runs before the call ends, in at least one of many calls."""
    for _ in range(50):
        gate, seen = threading.Lock(), []
        gate.acquire()
        other = threading.Thread(target=lambda gate=gate, seen=seen: (gate.acquire(), seen.append(1)))
        other.start()
        gate.release()
        call()
        ran = bool(seen)
        other.join()
        if ran:
            return True
    return False


def test_a_call_that_holds_the_gil_is_detected(never_switched):
    long = bytearray(SIZE)
    assert not lets_go(lambda: bytes(long))


def test_values_and_memory(never_switched, make_store, key):
    store = make_store(global_segment_size=4 * SIZE)
    memory = np.ones(2 * SIZE, np.uint8)
    at = memory.ctypes.data
    assert store.register_buffer(at, memory.nbytes) == 0
    assert store.put_from(key, at, SIZE) == 0
    value = memory[:SIZE].tobytes()
    for call in (
        lambda: store.get(key),
        lambda: store.get_batch([key]),
        lambda: store.get_buffer(key),
        lambda: store.get_into(key, at, SIZE),
        lambda: store.batch_get_into_multi_buffers([key], [[at, at + SIZE // 2]], [[SIZE // 2] * 2]),
        lambda: store.get_into_ranges([at], [[key]], [[[0]]], [[[1]]], [[[SIZE - 1]]]),
        lambda: store.upsert(key, value),
        lambda: store.upsert_from(key, at, SIZE),
        lambda: store.batch_is_exist([key]),
        lambda: store.prefix_hits([key]),
        lambda: store.get_prefix_replica_desc([key]),
    ):
        assert lets_go(call)


def test_an_ipc_client(never_switched, light, key):
    value = bytes(SIZE // 2)
    assert light.put(key, value) == 0
    assert lets_go(lambda: light.get(key)) and lets_go(lambda: light.upsert(key, value))


def test_engines(never_switched):
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    memory = np.ones(SIZE, np.uint8)
    at, value = memory.ctypes.data, bytes(SIZE)
    assert engine.register_memory(at, SIZE) == 0
    assert lets_go(lambda: engine.write_bytes_to_buffer(at, value, SIZE))
    assert lets_go(lambda: engine.read_bytes_from_buffer(at, SIZE))
    assert engine.unregister_memory(at) == 0
    engine._close()
