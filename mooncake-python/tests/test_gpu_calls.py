"""Stores and engines on GPU memory, with a fake libcuda as the driver of separate processes.
The processor cannot access addresses of that library directly.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "mooncake-nvlink" / "fake" / "cuda.c"

PRELUDE = """
import ctypes, sys
from mooncake import _mooncake
cuda = ctypes.CDLL("libcuda.so.1")
u64, size_t, address = ctypes.c_uint64, ctypes.c_size_t, ctypes.addressof

def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    assert code == 0, (name, code)

call("cuInit", 0)
context = ctypes.c_void_p()
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxPushCurrent_v2", context)

def gpu(size):
    at = u64()
    call("cuMemAlloc_v2", ctypes.byref(at), size_t(size))
    return at.value

def settle():
    call("cuStreamSynchronize", None)

def put(at, data):
    host = (ctypes.c_char * len(data)).from_buffer_copy(data)
    call("cuMemcpyAsync", u64(at), u64(address(host)), size_t(len(data)), None)
    settle()

def get(at, size):
    host = (ctypes.c_char * size)()
    call("cuMemcpyAsync", u64(address(host)), u64(at), size_t(size), None)
    settle()
    return host.raw

def data(seed, size):
    return bytes((i * 131 + seed * 7 + (i >> 8)) & 255 for i in range(size))
"""


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fake")
    options = ["-std=gnu11", "-O1", "-fPIC", "-shared", "-pthread", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["cc", *options, "-o", str(folder / "libcuda.so.1"), str(SOURCE), "-lrt"], check=True)
    return folder


def run(fake: Path, code: str, *arguments: str) -> None:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(fake)}
    subprocess.run([sys.executable, "-c", PRELUDE + code, *arguments], env=environment, check=True, timeout=120)


STORES = """
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", sys.argv[1]) == 0
size = (3 << 20) + 11
at = gpu(2 * size)
assert store.register_buffer(at, 2 * size) == 0
assert _mooncake.device_of(at) == 0 and _mooncake.device_of(at + 2 * size - 1) == 0
assert store.register_buffer(at + 2 * size - 1, 100) < 0, "beyond the allocation"
one, two = data(1, size), data(2, size)
put(at, one)
assert store.put_from("one", at, size) == 0
assert store.get("one") == one
assert store.get_into("one", at + size, size) == size
assert get(at + size, size) == one
# Copies run after the current work of the default stream, and before its later work.
cuda.fake_cuda_inject(6, ctypes.c_long(20_000))
call("cuMemsetD8Async", u64(at), ctypes.c_ubyte(99), size_t(size), None)
call("cuMemsetD8Async", u64(at), ctypes.c_ubyte(3), size_t(size), None)
assert store.upsert_from("filled", at, size) == 0
assert store.get("filled") == bytes([3]) * size
call("cuMemsetD8Async", u64(at), ctypes.c_ubyte(99), size_t(size), None)
call("cuMemsetD8Async", u64(at), ctypes.c_ubyte(99), size_t(size), None)
assert store.get_into("filled", at, size) == size
settle()
assert get(at, size) == bytes([3]) * size
cuda.fake_cuda_inject(6, ctypes.c_long(0))
put(at, two)
assert store.upsert_from("one", at, size) == 0 and store.get("one") == two
assert store.batch_put_from(["a", "b"], [at, at + size], [1000, size]) == [0, 0]
assert store.get("a") == two[:1000] and store.get("b") == one
put(at, bytes(2 * size))
assert store.batch_get_into(["a", "b"], [at, at + 1000], [1000, size]) == [1000, size]
assert get(at, 1000 + size) == two[:1000] + one
assert store.batch_put_from_multi_buffers(["parts"], [[at + 10, at]], [[500, 10]]) == [0]
assert store.get("parts") == two[10:510] + two[:10]
assert store.batch_get_into_multi_buffers(["parts"], [[at + 5000, at + 9000]], [[510 - 100, 100]]) == [510]
assert get(at + 5000, 410) + get(at + 9000, 100) == two[10:510] + two[:10]
assert store.get_into_ranges([at], [["one"]], [[[0, 100]]], [[[10, 49]]], [[[5, 1]]]) == [[[5, 1]]]
assert get(at, 5) == two[10:15] and get(at + 100, 1) == two[49:50]
# Sessions write and read values in parts.
put(at, one[:3000] + bytes(2 * size - 3000))
assert store.batch_put_session_start(["layers"], [3000]) == [0]
assert store.batch_put_from_multi_buffer_ranges(["layers"], [[at + 2000, at]], [[1000, 2000]], [[2000, 0]]) == [3000]
assert store.batch_put_session_end(["layers"]) == [0]
assert store.get("layers") == one[:3000]
assert store.batch_get_session_start(["layers"]) == [0]
assert store.batch_get_into_multi_buffer_ranges(["layers"], [[at + 9000, at + 8000]], [[500, 700]], [[100, 2000]]) == [1200]
assert get(at + 9000, 500) == one[100:600] and get(at + 8000, 700) == one[2000:2700]
assert store.batch_get_session_end(["layers"]) == 0
assert store.get_tensor_into_cuda("one", object()) == -600
assert store.unregister_buffer(at) == 0
store.close()
"""


def test_stores_move_memory_of_gpus(fake: Path, master) -> None:  # type: ignore[no-untyped-def]
    run(fake, STORES, master.address)


ENGINES = """
from mooncake import engine as module
from mooncake.engine import TransferEngine
a, b = TransferEngine(), TransferEngine()
for engine in (a, b):
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
size = (2 << 20) + 5
here, there = gpu(size), gpu(size)
assert a.register_memory(here, size) == 0 and b.register_memory(there, size) == 0
to = f"127.0.0.1:{b.get_rpc_port()}"
assert a.write_bytes_to_buffer(here, data(1, size), size) == 0
assert get(here, size) == data(1, size) == a.read_bytes_from_buffer(here, size)
assert a.transfer_sync_write(to, here, there, size) == 0
assert get(there, size) == data(1, size)
put(there, data(2, size))
assert a.transfer_sync_read(to, here, there, size) == 0
assert get(here, size) == data(2, size)

# As in Mooncake C++, calls without a stream run after the current work of the default stream.
cuda.fake_cuda_inject(6, ctypes.c_long(20_000))
for value in (7, 8):
    call("cuMemsetD8Async", u64(here), ctypes.c_ubyte(99), size_t(size), None)
    call("cuMemsetD8Async", u64(here), ctypes.c_ubyte(value), size_t(size), None)
    assert a.transfer_sync_write(to, here, there, size) == 0
    assert get(there, size) == bytes([value]) * size
call("cuMemsetD8Async", u64(here), ctypes.c_ubyte(99), size_t(size), None)
call("cuMemsetD8Async", u64(here), ctypes.c_ubyte(99), size_t(size), None)
assert a.transfer_sync_read(to, here, there, size) == 0
settle()
assert get(here, size) == bytes([8]) * size
cuda.fake_cuda_inject(6, ctypes.c_long(0))

# In stream order: after the write that fills the memory, before the one that overwrites it.
for value in range(1, 6):
    call("cuMemsetD8Async", u64(here), ctypes.c_ubyte(value), size_t(size), None)
    a.transfer_write_on_cuda(to, here, there, size, 0)
    call("cuMemsetD8Async", u64(here), ctypes.c_ubyte(255), size_t(size), None)
    settle()
    a.check_on_cuda(wait=True)
    assert get(there, size) == bytes([value]) * size and get(here, size) == bytes([255]) * size
a.batch_transfer_read_on_cuda(to, [here, here + 100], [there, there + 9], [100, 5], 0)
settle()
assert get(here, 106) == bytes([5]) * 105 + bytes([255])

# A failed transfer does not end the process, and its error is raised once.
a.transfer_read_on_cuda(to, here, there + size, 8, 0)
settle()
try:
    a.check_on_cuda(wait=True)
    raise SystemExit("no error was raised")
except RuntimeError as error:
    assert "registered" in str(error), error
a.check_on_cuda()
a.transfer_read_on_cuda(to, here, there + size, 8, 0)
settle()
try:
    a.transfer_read_on_cuda(to, here, there, 8, 0)
    raise SystemExit("no error was raised")
except RuntimeError:
    pass
for wrong in (("127.0.0.1:1", here, there, 8), (to, [here], [there], [8, 9])):
    try:
        (a.transfer_write_on_cuda if len(wrong[0]) == 11 else a.batch_transfer_write_on_cuda)(*wrong)
        raise SystemExit("no error was raised")
    except RuntimeError:
        pass
assert module.SUPPORT_CUDA and module.SUPPORT_INTRA_NVLINK and not module.SUPPORT_HIP
assert a.unregister_memory(here) == 0 and b.unregister_memory(there) == 0
"""


def test_engines_move_memory_of_gpus(fake: Path) -> None:
    run(fake, ENGINES)


def test_a_missing_gpu_is_reported() -> None:
    from mooncake import _mooncake, engine
    from mooncake.store import MooncakeDistributedStore

    missing = _mooncake.cuda_missing()
    if missing is None:
        pytest.skip("there is a GPU")
    assert "libcuda" in missing
    assert not engine.SUPPORT_CUDA and not engine.SUPPORT_INTRA_NVLINK
    with pytest.raises(AttributeError):
        _ = engine.SUPPORT_NOTHING  # type: ignore[attr-defined]
    assert _mooncake.device_of(id(engine)) is None
    assert MooncakeDistributedStore().batch_get_tensor_into_cuda(["a"], []) == [-600]
