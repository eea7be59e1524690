"""Memory that this process may only read, or not access: it can be a source, writes to it fail, and
no process crashes.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import numpy as np
import pytest

from mooncake.engine import TransferEngine

SIZE = 1 << 20
NOTHING = 0


class Pages:
    """Mapped pages of a file with these rights."""

    def __init__(self, file, rights):
        self._map = mmap.mmap(file.fileno(), SIZE, flags=mmap.MAP_SHARED, prot=rights)
        self.address = np.frombuffer(self._map, np.uint8).ctypes.data


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(SIZE))
    with path.open("r+b") as opened:
        yield opened


def test_of_a_store(store, key, file):
    pages, content = Pages(file, mmap.PROT_READ), file.read()
    at = pages.address
    assert store.register_buffer(at, SIZE) == 0, store.last_error()
    assert store.put_from(key, at, SIZE) == 0
    assert store.batch_put_from([key + "b"], [at + 1], [100]) == [0]
    assert (store.get(key), store.get(key + "b")) == (content, content[1:101])
    # Every call that fills memory fails, for values from this and from another process.
    assert store.get_into(key, at, SIZE) < 0
    assert store.batch_get_into([key, key + "b"], [at, at], [SIZE, SIZE])[0] < 0
    assert store.batch_get_into_multi_buffers([key], [[at, at + SIZE // 2]], [[SIZE // 2] * 2])[0] < 0
    filled = store.get_into_ranges([at], [[key]], [[[0]]], [[[0]]], [[[10]]])
    assert filled[0][0][0] < 0
    assert store.get(key) == content
    assert store.unregister_buffer(at) == 0


def test_tensors_of_a_store(store, key, file):
    torch = pytest.importorskip("torch")
    tensor = torch.arange(1000)
    assert store.put_tensor(key, tensor) == 0
    pages = Pages(file, mmap.PROT_READ)
    assert store.register_buffer(pages.address, SIZE) == 0
    assert store.get_tensor_into(key, pages.address, SIZE) is None
    assert store.batch_get_tensor_into([key], [pages.address], [SIZE]) == [None]
    assert store.unregister_buffer(pages.address) == 0
    assert torch.equal(store.get_tensor(key), tensor)


def test_unreadable_memory_is_rejected(store, file):
    pages = Pages(file, NOTHING)
    assert store.register_buffer(pages.address, SIZE) == -600
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(pages.address, SIZE) < 0
    engine._close()


OWNER = """
import mmap, sys
import numpy as np
from mooncake.engine import TransferEngine
file = open(sys.argv[1], "r+b")
pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
at = np.frombuffer(pages, np.uint8).ctypes.data
assert engine.register_memory(at, len(pages)) == 0
print(engine.get_rpc_port(), at, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("tcp", ["", "1"])
def test_of_another_engine(tmp_path, file, tcp):
    environment = os.environ | {"MC_FORCE_TCP": tcp}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, file.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    port, theirs = owner.stdout.readline().split()
    to, theirs, content = f"127.0.0.1:{port}", int(theirs), file.read()
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    mine = np.full(SIZE, 7, np.uint8)
    assert engine.register_memory(mine.ctypes.data, SIZE) == 0
    for length in (1, 4096, SIZE):
        assert engine.transfer_sync_write(to, mine.ctypes.data, theirs, length) < 0
        assert engine.transfer_sync_read(to, mine.ctypes.data, theirs, length) == 0
        assert mine[:length].tobytes() == content[:length]
    # A read of this store's own value into memory that can only be read.
    pages = Pages(file, mmap.PROT_READ)
    assert engine.register_memory(pages.address, SIZE) == 0
    assert engine.transfer_sync_read(to, pages.address, theirs, SIZE) < 0
    here = f"127.0.0.1:{engine.get_rpc_port()}"
    assert engine.transfer_sync_write(here, mine.ctypes.data, pages.address, SIZE) < 0
    assert engine.transfer_sync_read(here, mine.ctypes.data, pages.address, SIZE) == 0
    assert engine.write_bytes_to_buffer(pages.address, b"x", 1) < 0
    assert engine.read_bytes_from_buffer(pages.address, 10) == content[:10]
    engine._close()
    owner.communicate("")
    assert owner.returncode == 0
    file.seek(0)
    assert file.read() == content


FREED = """
import mmap, sys, ctypes
from mooncake.engine import TransferEngine
libc = ctypes.CDLL(None)
pages = mmap.mmap(-1, 1 << 20)
at = ctypes.addressof(ctypes.c_char.from_buffer(pages))
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
assert engine.register_memory(at, 1 << 20) == 0
gone = libc.munmap if sys.argv[1] == "gone" else lambda at, size: libc.mprotect(at, size, 1)
assert gone(ctypes.c_void_p(at), ctypes.c_size_t(1 << 20)) == 0
print(engine.get_rpc_port(), at, flush=True)
sys.stdin.read()
import os
os._exit(3)
"""


@pytest.mark.parametrize("how", ["gone", "protected"])
def test_memory_that_was_unmapped_while_registered(how):
    owner = subprocess.Popen(
        [sys.executable, "-c", FREED, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    port, theirs = owner.stdout.readline().split()
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    mine = np.full(SIZE, 7, np.uint8)
    assert engine.register_memory(mine.ctypes.data, SIZE) == 0
    for length in (1, 64, 4096, 65536, SIZE):
        assert engine.transfer_sync_write(f"127.0.0.1:{port}", mine.ctypes.data, int(theirs), length) < 0
    engine._close()
    owner.communicate("")
    assert owner.returncode == 3
