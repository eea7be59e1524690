"""Values in memory that is named by address."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mooncake.buffer_pool import BufferPool, RegisteredBufferPool
from mooncake.store import MooncakeHostMemAllocator, ReplicateConfig, TaskStatus


def array_of(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@pytest.fixture
def registered(store):
    """Registers arrays for the duration of a test."""
    kept = []

    def register(array):
        assert store.register_buffer(array.ctypes.data, array.nbytes) == 0, store.last_error()
        kept.append(array)
        return array.ctypes.data

    yield register
    for array in kept:
        store.unregister_buffer(array.ctypes.data)


@pytest.mark.parametrize("where", [(0, 0), (0, 100), (None, 0), (None, 100)], ids=str)
def test_an_absent_key_is_missing_whatever_the_memory(store, registered, key, where):
    """The key comes first, as with Mooncake C++: -600 is about the memory for a present object."""
    target = np.zeros(4096, np.uint8)
    dst = registered(target)
    at, size = where[0] if where[0] is not None else dst, where[1]
    assert store.put(key, b"x" * 100) == 0
    present = 100 if at and size >= 100 else -600
    assert store.get_into(key, at, size) == present
    assert store.get_into("missing", at, size) == -704
    assert store.batch_get_into([key, "missing", key], [at, at, dst], [size, size, 4096]) == [present, -704, 100]
    assert store.batch_get_into_multi_buffers([key, "missing"], [[at]] * 2, [[size]] * 2) == [present, -704]
    missing = store.get_into_ranges([at], [["missing"]], [[[0]]], [[[0]]], [[[size]]])
    assert missing == [[[-704]]]
    assert (target[:100] == ord("x")).all()


def test_put_from_and_get_into(store, registered, key):
    source, target = array_of(100_000), np.zeros(200_000, np.uint8)
    src, dst = registered(source), registered(target)
    assert store.put_from(key, src, source.nbytes) == 0
    assert store.get(key) == source.tobytes()
    assert store.get_into(key, dst, target.nbytes) == 100_000
    assert (target[:100_000] == source).all() and not target[100_000:].any()
    assert store.get_into(key, dst, 99_999) == -600
    assert store.get_into("missing", dst, 10) == -704
    assert store.put_from(key + "0", src, 0) == -600 and store.is_exist(key + "0") == 0
    assert "must not be empty" in str(store.last_error())
    assert store.upsert_from(key, src + 5, 10) == 0
    assert store.upsert_from(key, src, 0) == -600 and store.get_size(key) == 10, "the old value stays"
    assert store.get(key) == source[5:15].tobytes()
    assert store.put_from_with_metadata(key + "m", src + 100, src, 1000, 28) == 0
    assert store.get(key + "m") == source[:28].tobytes() + source[100:1100].tobytes()
    assert store.put_from_with_metadata(key + "n", src + 100, src, 0, 0) == -600 and store.is_exist(key + "n") == 0
    assert store.put_from_with_metadata(key + "n", src + 100, src, 0, 3) == 0 and store.get_size(key + "n") == 3


def test_batches(store, registered, key):
    source, target = array_of(64 * 4096), np.zeros(64 * 4096, np.uint8)
    src, dst = registered(source), registered(target)
    keys = [f"{key}-{i}" for i in range(64)]
    at = [i * 4096 for i in range(64)]
    sizes = [4096] * 64
    assert store.batch_put_from(keys, [src + a for a in at], sizes) == [0] * 64
    assert store.batch_get_into(keys, [dst + a for a in at], sizes) == sizes
    assert (target == source).all()
    assert store.batch_get_into([keys[0], "missing"], [dst, dst], [4096, 4096]) == [4096, -704]
    assert store.batch_upsert_from(keys[:2], [src, src + 1], [1, 2]) == [0, 0]
    assert store.get_batch(keys[:2]) == [source[:1].tobytes(), source[1:3].tobytes()]
    # An item that fails does not affect the others.
    mixed = store.batch_put_from([key + "a", key + "b"], [src, 12345], [10, 10])
    assert mixed == [0, -600] and store.get(key + "a") == source[:10].tobytes()
    assert store.batch_put_from(keys, [src], sizes) == [-600] * 64
    assert store.batch_get_into([], [], []) == []


def test_multi_buffers(store, registered, key):
    source, target = array_of(10 * 61 * 1024), np.zeros(10 * 61 * 1024, np.uint8)
    src, dst = registered(source), registered(target)
    keys = [f"{key}-{i}" for i in range(10)]
    at = [[(i * 61 + j) * 1024 for j in range(61)] for i in range(10)]
    sizes = [[1024] * 61] * 10
    config = ReplicateConfig()
    config.prefer_alloc_in_same_node = True
    put = store.batch_put_from_multi_buffers(keys, [[src + a for a in one] for one in at], sizes, config)
    assert put == [0] * 10
    got = store.batch_get_into_multi_buffers(keys, [[dst + a for a in one] for one in at], sizes, True)
    assert got == [61 * 1024] * 10 and (target == source).all()
    wrong = store.batch_get_into_multi_buffers([keys[0], "missing"], [[dst], [dst]], [[5], [5]])
    assert wrong == [-600, -704]
    # The sizes are capacities, as those of `get_into`.
    assert store.put(key + "short", source[:100].tobytes()) == 0
    for sizes in ([64, 64], [100, 64], [128], [0, 200], [99, 0, 1, 50], [100, 2**64 - 1]):
        target[:] = 0xEE
        at = [dst + 1024 * i for i in range(len(sizes))]
        assert store.batch_get_into_multi_buffers([key + "short"], [at], [sizes]) == [100], sizes
        filled, left = [], 100
        for i, size in enumerate(sizes):
            filled.append(target[1024 * i :][: min(size, left)])
            left -= len(filled[-1])
            assert target[1024 * i + len(filled[-1])] == 0xEE, "no byte beyond the value"
        assert (np.concatenate(filled) == source[:100]).all(), sizes
    assert store.batch_get_into_multi_buffers([key + "short"], [[dst, dst + 64]], [[64, 35]]) == [-600]
    assert "too short" in str(store.last_error())
    assert store.batch_get_into_multi_buffers([key + "short"], [[dst]], [[64, 64]]) == [-600]
    config.replica_num = 2
    assert store.batch_put_from_multi_buffers([key], [[src]], [[5]], config) == [-600], "one replica on the same node"


def test_ranges(store, registered, key):
    one, two = os.urandom(64), os.urandom(32)
    assert store.put_batch([key + "1", key + "2"], [one, two]) == 0
    b0, b1 = np.zeros(32, np.uint8), np.zeros(32, np.uint8)
    p0, p1 = registered(b0), registered(b1)
    read = store.get_into_ranges(
        [p0, p1],
        [[key + "1", key + "2"], [key + "2", key + "1"]],
        [[[0, 20], [8]], [[4], [16]]],
        [[[1, 30], [2]], [[0], [10]]],
        [[[4, 3], [5]], [[6], [4]]],
    )
    assert read == [[[4, 3], [5]], [[6], [4]]]
    assert b0[:4].tobytes() == one[1:5] and b0[20:23].tobytes() == one[30:33] and b0[8:13].tobytes() == two[2:7]
    assert b1[4:10].tobytes() == two[:6] and b1[16:20].tobytes() == one[10:14]
    assert store.get_into_ranges([], [], [], [], []) == []
    # Source and destination out of range, a missing key, an empty range.
    assert store.get_into_ranges(
        [p0], [[key + "1", "missing"]], [[[0, 30, 0], [0]]], [[[60, 0, 0], [0]]], [[[5, 3, 0], [1]]]
    ) == [[[-600, -600, 0], [-704]]]
    assert store.get_into_ranges([p0], [[key + "1"]], [[[0]]], [[[0, 1]]], [[[1]]]) == [[[-600]]]
    # The result has the shape of buffers, keys and fragments, with one entry for a missing list.
    assert store.get_into_ranges([p0, p1], [[key + "1"]], [[[0]]], [[[0]]], [[[1]]]) == [[[-600]], [[-600]]]
    assert store.get_into_ranges([p0], [[key + "1"]], [[[0]]], [[[0]]], [[[1, 1]]]) == [[[-600]]]
    assert store.get_into_ranges([p0], [[key + "1"]], [[[0, 1]]], [[[0]]], [[[1]]]) == [[[-600, -600]]]
    assert store.get_into_ranges([p0], [[key + "1", "x"]], [[[0]]], [[[0]]], [[[1]]]) == [[[-600], [-600]]]
    assert store.get_into_ranges([123], [[key + "1"]], [[[0]]], [[[0]]], [[[1]]]) == [[[-600]]]


def test_registering(store):
    memory = np.zeros(1 << 20, np.uint8)
    at = memory.ctypes.data
    assert store.register_buffer(0, 100) == -600
    assert store.register_buffer(at, 0) == -600
    assert store.register_buffer(at, memory.nbytes) == 0
    assert store.unregister_buffer(at + 4096) == -600
    assert store.unregister_buffer(at) == 0
    assert store.unregister_buffer(at) == -600
    for address, size in [(4096, 4096), (2**64 - 1, 1), (2**64 - 4096, 8192), (at, 2**63), (at, 1 << 45)]:
        assert store.register_buffer(address, size) == -600, (address, size)
    for wrong in (-1, 2**64, None, "x", 1.5):
        with pytest.raises(TypeError):
            store.register_buffer(wrong, 1)
        with pytest.raises(TypeError):
            store.register_buffer(at, wrong)


def test_overlapping_slices_of_one_tensor(make_store, key):
    """TransferQueue registers, puts and unregisters slices from several threads, in any order."""
    store = make_store(global_segment_size=256 << 20)
    count, size, step, threads = 1600, 20_000, 40, 4
    tensor = array_of(step * count + size)
    at = tensor.ctypes.data
    failed = []

    def work(thread: int) -> None:
        rng = random.Random(thread)
        mine = range(thread, count, threads)
        registered = [store.register_buffer(at + step * i, size) for i in mine]
        puts = [
            store.batch_put_from([f"{key}-{i}" for i in part], [at + step * i for i in part], [size] * len(part))
            for part in (mine[start : start + 100] for start in range(0, len(mine), 100))
        ]
        ended = [store.unregister_buffer(at + step * i) for i in rng.sample(mine, len(mine))]
        failed.extend(code for codes in (registered, *puts, ended) for code in codes if code != 0)

    running = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not failed
    for i in range(0, count, 37):
        assert store.get(f"{key}-{i}") == tensor[step * i : step * i + size].tobytes()
    assert store.unregister_buffer(at) == -600, "every registration has ended"


def test_a_registration_does_not_end_with_another_one(store, key):
    memory = array_of(8192)
    at = memory.ctypes.data
    for start, size in ((0, 8192), (0, 4096), (100, 4096), (0, 4096)):
        assert store.register_buffer(at + start, size) == 0
    assert store.put_from(key, at, 8192) == 0
    # Ranges of a buffer are those of the registration that reaches farthest.
    assert store.get_into_ranges([at + 200], [[key]], [[[0]]], [[[0]]], [[[7992]]]) == [[[7992]]]
    for _ in range(2):
        assert store.unregister_buffer(at) == 0
        assert store.get_into_ranges([at], [[key]], [[[8000]]], [[[0]]], [[[100]]]) == [[[100]]]
    assert store.unregister_buffer(at + 100) == 0 and store.unregister_buffer(at + 100) == -600
    assert store.unregister_buffer(at) == 0 and store.unregister_buffer(at) == -600
    assert store.get_into_ranges([at], [[key]], [[[0]]], [[[0]]], [[[1]]]) == [[[-600]]]


UNREGISTERED = """
import ctypes, sys
import numpy as np
from mooncake.store import MooncakeDistributedStore

stores = [MooncakeDistributedStore() for _ in range(2)]
for store, segment in zip(stores, (64 << 20, 0)):
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 16 << 20, "tcp", "", sys.argv[1]) == 0
for n, store in enumerate(stores):
    source = np.arange(100_000, dtype=np.uint32)
    target = np.zeros_like(source)
    at, to = source.ctypes.data, target.ctypes.data
    key = f"{sys.argv[2]}-{n}"
    assert store.put_from(key, at, source.nbytes) == 0, store.last_error()
    assert store.get_into(key, to, target.nbytes) == source.nbytes and (target == source).all()
    target[:] = 0
    assert store.batch_put_from([key + "a", key + "b"], [at, 4096], [100, 100]) == [0, -600]
    assert store.batch_get_into([key + "a", key], [to, 8], [100, source.nbytes]) == [100, -600]
    assert bytes(target)[:100] == bytes(source)[:100]
    many = [key + "m"]
    assert store.batch_put_from_multi_buffers(many, [[at + 10, at + 1000]], [[20, 30]]) == [0]
    assert store.batch_get_into_multi_buffers(many, [[to, to + 500]], [[25, 25]]) == [50]
    assert bytes(target)[:25] + bytes(target)[500:525] == bytes(source)[10:30] + bytes(source)[1000:1030]
    assert store.get_into_ranges([to], [many], [[[0]]], [[[0]]], [[[10]]]) == [[[-600]]]
    assert store.upsert_from(key, at + 4, 4) == 0 and store.get(key) == bytes(source)[4:8]
    for wrong in (0, 8, 1 << 46, 2**64 - 50):
        assert store.put_from(key + "w", wrong, 100) == store.get_into(key + "a", wrong, 100) == -600
    assert "not mapped" in store.last_error().message or "range" in store.last_error().message
print("done")
"""


def test_memory_that_is_not_registered(master, key):
    """TCP and shared memory need no registration. The program is warned once."""
    for environment in ({}, {"MC_FORCE_TCP": "1"}):
        words = [sys.executable, "-c", UNREGISTERED, master.address, f"{key}-{len(environment)}"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=os.environ | environment)
        assert done.stdout == "done\n", done.stderr
        assert done.stderr.count("memory is not registered") == 1, done.stderr


def test_memory_that_is_gone_is_refused(store, key):
    assert store.put(key, b"x" * 100) == 0
    pages = mmap.mmap(-1, 3 << 20)
    view = ctypes.c_char.from_buffer(pages)
    at = ctypes.addressof(view)
    assert store.get_into(key, at, 3 << 20) == 100
    assert store.register_buffer(at, 1 << 20) == 0
    assert store.unregister_buffer(at) == 0
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(at + (1 << 20)), 4096, mmap.PROT_READ) == 0
    assert store.get_into(key, at, 3 << 20) == store.get_into(key, at + (1 << 20), 100) == -600
    assert "read-only" in store.last_error().message
    assert store.put_from(key + "2", at + (1 << 20) - 50, 100) == 0, "it can be read"
    assert libc.mprotect(ctypes.c_void_p(at + (2 << 20)), 4096, 0) == 0
    assert store.put_from(key + "3", at + (2 << 20) - 50, 100) == -600
    del view
    pages.close()
    assert store.get_into(key, at, 100) == store.put_from(key + "3", at, 100) == -600


def test_unregistering_waits_for_transfers(make_store, key):
    a, b = make_store(global_segment_size=256 << 20), make_store()
    value = array_of(32 << 20)
    assert a.put(key, value) == 0
    for _ in range(5):
        memory = mmap.mmap(-1, 32 << 20)
        view = ctypes.c_char.from_buffer(memory)
        at = ctypes.addressof(view)
        assert b.register_buffer(at, 32 << 20) == 0
        codes = []
        reading = threading.Thread(target=lambda at=at: codes.append(b.get_into(key, at, 32 << 20)))
        reading.start()
        time.sleep(0.002)
        assert b.unregister_buffer(at) == 0
        # Nothing writes to the memory any more, so it may be freed.
        del view
        memory.close()
        reading.join()
        assert codes[0] in (32 << 20, -600)


def test_sessions(own_master, make_store, key):
    master = own_master("--default_kv_lease_ttl=2000")
    a, b = make_store(master), make_store(master)
    source, target = array_of(8192), np.zeros(8192, np.uint8)
    for one in (a, b):
        for memory in (source, target):
            assert one.register_buffer(memory.ctypes.data, memory.nbytes) == 0
    src, dst = source.ctypes.data, target.ctypes.data
    keys = [key + "1", key + "2"]
    assert a.batch_put_session_start(keys, [8192, 100]) == [0, 0]
    assert a.batch_put_session_start([keys[0]], [1]) == [-600]
    several = [keys[0], key + "3", "", key + "3", key + "4"]
    assert a.batch_put_session_start(several, [1, 1, 1, 1, 0]) == [-600, 0, -600, -705, -600], "each independently"
    assert a.batch_put_session_revoke([key + "3"]) == [0]
    assert b.is_exist(keys[0]) == 0
    written = a.batch_put_from_multi_buffer_ranges(
        keys, [[src + 4096, src], [src]], [[4096, 4096], [100]], [[4096, 0], [0]]
    )
    assert written == [8192, 100]
    assert a.batch_put_from_multi_buffer_ranges([keys[1]], [[src]], [[2]], [[99]]) == [-600]
    assert a.batch_put_session_end([keys[0], "none"]) == [0, -600]
    assert a.batch_put_session_revoke([keys[1], "none"]) == [0, -600]
    assert a.batch_put_session_revoke([keys[1]]) == [-600]
    assert b.get(keys[0]) == source.tobytes() and b.is_exist(keys[1]) == 0
    assert a.batch_put_session_start([keys[0]], [1]) == [-705]

    assert b.batch_get_session_start([keys[0], "missing"]) == [0, -704]
    read = b.batch_get_into_multi_buffer_ranges([keys[0]], [[dst, dst + 4096]], [[10, 20]], [[100, 0]])
    assert read == [30]
    assert target[:10].tobytes() == source[100:110].tobytes()
    assert target[4096:4116].tobytes() == source[:20].tobytes()
    assert b.batch_get_into_multi_buffer_ranges([keys[0]], [[dst]], [[10]], [[8190]]) == [-600]
    time.sleep(2.2)
    assert b.batch_get_into_multi_buffer_ranges([keys[0]], [[dst]], [[10]], [[0]]) == [-707]
    assert b.batch_get_session_end([keys[0]]) == 0
    # The first read of a session measures latency like any other.
    assert b.batch_get_session_start([keys[0]]) == [0]
    time.sleep(2.2)
    assert b.batch_get_into_multi_buffer_ranges([keys[0]], [[dst]], [[10]], [[0]]) == [-707]
    assert b.batch_get_session_end([keys[0]]) == 0
    assert b.batch_get_into_multi_buffer_ranges([keys[0]], [[dst]], [[10]], [[0]]) == [-600]
    for one in (a, b):
        for memory in (source, target):
            assert one.unregister_buffer(memory.ctypes.data) == 0


def test_parts_of_objects_of_a_client_that_has_left(own_master, make_store, key, monkeypatch):
    """Reads parts of objects whose client has left: from a later replica if the checksum matches,
    else -800.
    """
    monkeypatch.setenv("MOONCAKE_STORE_CHECKSUM", "1")
    master = own_master("--default_kv_lease_ttl=60000")
    first, second = make_store(master), make_store(master)
    reader = make_store(master, global_segment_size=0)
    target = np.zeros(8192, np.uint8)
    dst = target.ctypes.data
    assert reader.register_buffer(dst, target.nbytes) == 0
    config = ReplicateConfig()
    config.preferred_segment = first.get_hostname()
    value = array_of(8192).tobytes()
    for name in (key, key + "lost"):
        assert first.put(name, value, config) == 0
    assert reader.batch_get_session_start([key, key + "lost"]) == [0, 0]

    def part(name, start):
        return reader.batch_get_into_multi_buffer_ranges([name], [[dst]], [[100]], [[start]])

    assert part(key, 0) == part(key + "lost", 0) == [100]
    task, code = reader.create_copy_task(key, [second.get_hostname()])
    assert code == 0
    deadline = time.monotonic() + 60
    while reader.query_task(task)[0].status != TaskStatus.SUCCESS:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    first.close()
    assert part(key, 5000) == [100] and target[:100].tobytes() == value[5000:5100]
    assert part(key + "lost", 5000) == [-800]
    assert reader.last_error().code == -800
    assert reader.unregister_buffer(dst) == 0


def test_a_session_with_a_hole_is_refused(make_store, key):
    """Memory without a write has bytes of earlier values, so the session does not end well."""
    size = 3 << 20
    a = make_store(global_segment_size=16 << 20)
    source = array_of(size)
    at = source.ctypes.data
    assert a.register_buffer(at, size) == 0
    holes = {
        "nothing": ([], "bytes 0..3145728 of 3145728"),
        "begin": ([(0, 100)], "bytes 100..3145728 of 3145728"),
        "last byte": ([(0, size - 1)], "bytes 3145727..3145728 of 3145728"),
        "middle": ([(size // 2 + 5000, size // 2 - 5000), (0, size // 2)], "bytes 1572864..1577864 of 3145728"),
    }
    for name, (parts, missing) in holes.items():
        name = f"{key} {name}"
        assert a.batch_put_session_start([name], [size]) == [0]
        for offset, length in parts:
            written = a.batch_put_from_multi_buffer_ranges([name], [[at + offset]], [[length]], [[offset]])
            assert written == [length]
        assert a.batch_put_session_end([name]) == [-1010]
        assert missing in a.last_error().message, a.last_error()
        assert a.is_exist(name) == 0 and a.get(name) == b""
        assert a.put(name, b"another value") == 0 and a.get(name) == b"another value"
    assert a.unregister_buffer(at) == 0


def test_a_session_ends_after_its_parts(make_store, key):
    """Ends a session while another thread writes. The value is complete or was never published."""
    size = 8 << 20
    a = make_store(global_segment_size=0, local_buffer_size=16 << 20)
    b = make_store(global_segment_size=64 << 20)
    source = array_of(size)
    assert a.register_buffer(source.ctypes.data, source.nbytes) == 0
    whole = 0
    for turn in range(12):
        name = f"{key}-{turn}"
        assert a.batch_put_session_start([name], [size]) == [0]
        begun = threading.Event()
        answers = []

        def write(name=name, begun=begun, answers=answers):
            begun.set()
            answers += a.batch_put_from_multi_buffer_ranges([name], [[source.ctypes.data]], [[size]], [[0]])

        writer = threading.Thread(target=write)
        writer.start()
        begun.wait()
        ended = a.batch_put_session_end([name])
        read = b.get(name)
        writer.join()
        assert answers in ([size], [-600])
        if answers == [size]:
            assert ended == [0] and read == source.tobytes(), turn
            assert b.remove(name, True) == 0
            whole += 1
        else:
            assert ended == [-1010] and b.is_exist(name) == 0, turn
    print(f"{whole} of 12 were written before the end")
    assert a.unregister_buffer(source.ctypes.data) == 0


def test_segments(own_master, make_store, tmp_path):
    store = make_store(own_master(), global_segment_size=0)
    assert store.put("k", b"x") == -200
    answer = store.allocate_and_mount_segment(17 << 20)
    assert answer["ret"] == 0 and answer["allocated_size"] == 32 << 20 and len(answer["segment_ids"]) == 1
    assert store.put("k", b"x") == 0
    assert store.unmount_and_free_segment(answer["segment_ids"]) == 0
    assert store.is_exist("k") == 0
    file = tmp_path / "segment"
    file.write_bytes(bytes(16 << 20))
    mounted = store.mount_segment(str(file), 8 << 20, 4096)
    assert mounted["ret"] == 0, store.last_error()
    assert store.put("k", b"in the file") == 0
    assert b"in the file" in file.read_bytes()
    assert store.unmount_segment(mounted["segment_ids"]) == 0
    for protocol in ("rdma", "", "none there is"):
        # The segment is served by the store's transport.
        mounted = store.mount_segment(str(file), 8 << 20, protocol=protocol)
        assert mounted["ret"] == 0 and store.unmount_segment(mounted["segment_ids"]) == 0, protocol
    assert store.mount_segment(str(tmp_path / "none"), 1 << 20)["ret"] == -1
    assert store.mount_segment(str(file), 32 << 20)["ret"] == -1
    assert store.mount_segment(str(file), 4096, 1)["ret"] == -1
    assert store.unmount_segment(["no id"]) == -1
    with pytest.raises(TypeError):
        store.unmount_segment("no list")
    assert store.unmount_segment(["1-2"]) == -1
    assert store.unmount_local_disk_segment() == 0, "it does not exist"


def test_a_segment_is_unmounted_after_its_grace_period(own_master, make_store):
    master = own_master("--default_kv_lease_ttl=100")
    store, reader = make_store(master, global_segment_size=0), make_store(master, global_segment_size=0)
    answer = store.allocate_and_mount_segment(16 << 20)
    assert reader.put("k", b"x") == 0
    before = time.monotonic()
    assert store.unmount_and_free_segment(answer["segment_ids"], 8) == 0
    assert time.monotonic() - before < 8, "it does not wait"
    assert store.unmount_and_free_segment(answer["segment_ids"], 8) == -1, "it is no longer offered"
    assert reader.get("k") == b"x"
    assert reader.put("new", b"x") == -200
    while reader.is_exist("k"):
        time.sleep(0.05)
    assert time.monotonic() - before > 2.5

def test_pool(make_store, key):
    store = make_store(local_buffer_size=1 << 20)
    assert RegisteredBufferPool is BufferPool
    pool = BufferPool(store)
    assert store.put(key, b"hello") == 0
    with pool.buffer(1024) as lease:
        assert store.get_into(key, lease.ptr, lease.size) == 5
        view = lease.buffer
        assert view[:5].tobytes() == b"hello" and (view.format, view.readonly) == ("B", False)
        view[:5] = b"HELLO"
        assert store.put_from(key + "2", lease.ptr, 5) == 0
        with pytest.raises(RuntimeError, match="exported views exist"):
            lease.release()
        with pytest.raises(RuntimeError, match="active leases"):
            pool.close()
        view.release()
    assert store.get(key + "2") == b"HELLO"
    lease.release()
    assert lease.size == 1024
    with pytest.raises(RuntimeError, match="buffer lease is closed"):
        _ = lease.ptr
    with pytest.raises(BufferError):
        _ = lease.buffer
    big = pool.acquire(2 << 20)
    assert store.get_into(key, big.ptr, big.size) == 5
    with pytest.raises(RuntimeError, match="exhausted"):
        pool.acquire(1, block=False)
    with pytest.raises(RuntimeError, match="timed out"):
        pool.acquire(1, timeout=0.05)
    with pytest.raises(RuntimeError, match="non-negative"):
        pool.acquire(1, timeout=-1)
    with pytest.raises(RuntimeError, match="exceeds pool capacity"):
        pool.acquire((2 << 20) + 1)
    with pytest.raises(TypeError):
        pool.acquire(-1)
    threading.Timer(0.1, big.release).start()
    late = pool.acquire(10, timeout=20)
    kept = late.buffer
    del late
    gc.collect()
    kept[:3] = b"abc"
    assert kept[:3].tobytes() == b"abc", "the view keeps the memory"
    del kept
    gc.collect()
    assert pool.acquire(0).size == 0
    gc.collect()
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.acquire(1)


def test_pool_serves_those_that_have_waited_longest(make_store):
    store = make_store(local_buffer_size=1 << 20)
    with BufferPool(store) as pool, ThreadPoolExecutor(2) as threads:
        first = pool.acquire(1024)
        # Small leases fit beside the first one, and the large one does not.
        large = threads.submit(pool.acquire, 2 << 20, timeout=30)
        end = time.monotonic() + 30
        with pytest.raises(RuntimeError, match="timed out"):
            while time.monotonic() < end:
                pool.acquire(1024, timeout=0.05).release()
        # A caller that does not wait takes what is there.
        pool.acquire(1024, block=False).release()
        # The large one may wait for the leases of the caller, which overtakes it in the end.
        second = pool.acquire(1024)
        assert not large.done()
        small = threads.submit(lambda: pool.acquire(1024, timeout=30).release())
        for lease in (first, second):
            lease.release()
        large.result(30).release()
        small.result(30)


def test_pool_arguments(make_store):
    from mooncake.store import MooncakeDistributedStore

    with pytest.raises(RuntimeError, match="not initialized"):
        BufferPool(None)
    with pytest.raises(RuntimeError, match="not initialized"):
        BufferPool(MooncakeDistributedStore())
    with pytest.raises(RuntimeError, match="_get_pyclient_capsule"):
        BufferPool(7)
    with pytest.raises(RuntimeError, match="local buffer"):
        BufferPool(make_store(local_buffer_size=0))
    store = make_store()
    with pytest.raises(RuntimeError, match="must be positive"):
        BufferPool(store, alignment=0)
    with pytest.raises(RuntimeError, match="power of two"):
        BufferPool(store, alignment=3)
    pool = BufferPool(store, max_regions=1, block_on_exhaustion=False)
    held = pool.acquire(1)
    with pytest.raises(RuntimeError, match="exhausted"):
        pool.acquire(1)
    held.release()

    class Wrapper:
        def _get_pyclient_capsule(self):
            return store._get_pyclient_capsule()

    BufferPool(Wrapper()).close()


def test_a_pool_outlives_its_store(make_store):
    store = make_store()
    pool = BufferPool(store)
    lease = pool.acquire(4096)
    view = lease.buffer
    assert store.close() == 0
    view[:4] = b"abcd"
    assert view[:4].tobytes() == b"abcd"
    del view
    lease.release()


def test_host_memory():
    allocator = MooncakeHostMemAllocator()
    at = allocator.alloc(10_000)
    ctypes.memset(at, 7, 10_000)
    assert allocator.free(at) == 0
    assert allocator.free(at) == -1
    assert allocator.free(0) == -1
    with pytest.raises(RuntimeError, match="Failed to map shared memory"):
        allocator.alloc(0)
    from mooncake.store import bind_to_numa_node, get_alloc_func_addr, get_free_func_addr

    alloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(get_alloc_func_addr())
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(get_free_func_addr())
    memory = alloc(4096)
    assert memory
    free(memory)
    assert alloc(0) is None
    bind_to_numa_node(4711)


# Script of another process, which mounts bytes that are already offered and bytes that are not.
OTHER_OFFER = """
import sys
from mooncake.store import MooncakeDistributedStore

store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", sys.argv[1]) == 0
print(store.mount_segment(sys.argv[2], 2 << 20)["ret"], store.last_error().code)
print(store.mount_segment(sys.argv[2], 1 << 20, 4 << 20)["ret"])
store.close()
"""


def test_bytes_of_a_file_are_offered_once(make_store, master, key):
    store = make_store(global_segment_size=0)
    path = f"/dev/shm/mooncake-test-{os.getpid()}-once"
    with open(path, "wb") as file:
        file.truncate(6 << 20)
    try:
        first = store.mount_segment(path, 2 << 20)
        assert first["ret"] == 0
        assert store.mount_segment(path, 2 << 20)["ret"] < 0 and "already offered" in store.last_error().message
        assert store.mount_segment(path, 2 << 20, 1 << 20)["ret"] < 0
        second = store.mount_segment(path, 2 << 20, 2 << 20)
        assert second["ret"] == 0
        values = {f"{key}-{i}": bytes([i]) * (64 << 10) for i in range(40)}
        assert [store.put(name, value) for name, value in values.items()] == [0] * 40
        assert all(store.get(name) == value for name, value in values.items())
        assert store.unmount_segment(first["segment_ids"], 0) == 0
        assert store.mount_segment(path, 2 << 20)["ret"] == 0, "free again"
        other = [sys.executable, "-c", OTHER_OFFER, master.address, path]
        done = subprocess.run(other, capture_output=True, text=True, timeout=60)
        assert done.stdout.split() == ["-1", "-102", "0"], done.stderr
    finally:
        os.unlink(path)
