"""The interpreter ends while threads are in calls: the exit code of the program is its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import pytest

START = """
import atexit, os, random, sys, threading, time
import numpy as np
from mooncake.engine import TransferEngine
from mooncake.store import BufferPool, MooncakeDistributedStore

sys.setswitchinterval(1e-5)
master, key = sys.argv[1:3]
started = threading.Semaphore(0)

def store(segment=16 << 20):
    new = MooncakeDistributedStore()
    assert new.setup("127.0.0.1", "P2PHANDSHAKE", segment, 16 << 20, "tcp", "", master) == 0
    return new

def repeat(call, daemon=True):
    # The call runs in a thread, which has been in it once when this returns.
    def run():
        call()
        started.release()
        while True:
            try:
                call()
            except Exception:
                pass
    threading.Thread(target=run, daemon=daemon).start()
    started.acquire()

s = store()
assert s.put(key, bytes(300_000)) == 0
memory = np.zeros(1 << 20, np.uint8)
at = memory.ctypes.data
assert s.register_buffer(at, memory.nbytes) == 0

class Slow:
    # An argument whose conversion runs code of the program.
    def __bool__(self):
        return sum(range(1000)) > 0
    def __index__(self):
        return sum([1 << 20] + [0] * 1000)
"""

CALLS = {
    "exist": "repeat(lambda: s.is_exist(key))",
    "exist, four threads": "for _ in range(4): repeat(lambda: s.is_exist(key))",
    "get": "repeat(lambda: s.get(key))",
    "get_buffer": "repeat(lambda: s.get_buffer(key))",
    "get_into": "repeat(lambda: s.get_into(key, at, Slow()))",
    "get_batch": "repeat(lambda: s.get_batch([key] * 5))",
    "put": "repeat(lambda: s.put(f'{key}{random.random()}', os.urandom(10_000)))",
    "put_parts": "repeat(lambda: s.put_parts(f'{key}{random.random()}', b'ab', memoryview(b'cd')))",
    "put_from": "repeat(lambda: s.put_from(f'{key}{random.random()}', at, 100_000))",
    "batch": "repeat(lambda: s.batch_is_exist([key] * 100)); repeat(lambda: s.batch_get_into([key], [at], [1 << 20]))",
    "remove": "repeat(lambda: s.remove(f'{key}-absent', Slow()))",
    "health": "repeat(s.health_check)",
    "describe": "repeat(lambda: s.get_replica_desc(key)); repeat(lambda: s.get_size(key))",
    "set up and close": "repeat(lambda: store(0).close())",
    "pool": """
        pool = BufferPool(s, max_bytes=16 << 20)
        lease = pool.acquire(16 << 20)
        def acquire():
            try:
                pool.acquire(1 << 20, timeout=0.01)
            except RuntimeError:
                pass
        repeat(acquire)
        """,
    "engine": """
        engines = TransferEngine(), TransferEngine()
        for engine in engines:
            assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        other = np.zeros(1 << 20, np.uint8)
        assert engines[0].register_memory(at, 1 << 20) == engines[1].register_memory(other.ctypes.data, 1 << 20) == 0
        name = f"127.0.0.1:{engines[1].get_rpc_port()}"
        for call in engines[0].transfer_sync_write, engines[0].transfer_sync_read:
            repeat(lambda: call(name, at, other.ctypes.data, 1 << 20))
        """,
    "asyncio in a thread": """
        import asyncio
        from mooncake.async_store import MooncakeDistributedStoreAsync
        async def read():
            async_store = MooncakeDistributedStoreAsync()
            assert async_store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master) == 0
            while True:
                await asyncio.gather(*(async_store.async_get(key) for _ in range(10)))
                started.release()
        threading.Thread(target=lambda: asyncio.run(read()), daemon=True).start()
        started.acquire()
        """,
}

ENDS = {
    "the end of the program": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "an exception": ("raise ValueError('planned')", 1),
    "os._exit": ("os._exit(5)", 5),
    "an exit handler that runs last": ("atexit.register(time.sleep, 0.05); sys.exit(3)", 3),
    # A handler that was registered before the import of mooncake runs after that of mooncake.
    "a closed store": ("s.close(); sys.exit(3)", 3),
    "a forgotten store": ("s = None; sys.exit(3)", 3),
    "a thread that is waited for": ("threading.Thread(target=time.sleep, args=(0.05,)).start(); sys.exit(3)", 3),
    "the main thread in a call": ("s.get(key); sys.exit(3)", 3),
}


def run(master, key, code, limit=60):
    program = START + textwrap.dedent(code)
    arguments = [sys.executable, "-c", program, master.address, key]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=limit)


@pytest.mark.parametrize("call", CALLS)
def test_threads_in_calls(master, key, call):
    for _ in range(3):
        ended = run(master, key, textwrap.dedent(CALLS[call]) + "\nsys.exit(3)")
        assert ended.returncode == 3, ended.stderr
        assert "Fatal" not in ended.stderr and "panicked" not in ended.stderr, ended.stderr


@pytest.mark.parametrize("end", ENDS)
def test_every_end_of_a_program(master, key, end):
    last, code = ENDS[end]
    for _ in range(3):
        ended = run(master, key, f"for _ in range(4): repeat(lambda: s.is_exist(key))\n{last}\n")
        assert ended.returncode == code, ended.stderr
        assert "Fatal" not in ended.stderr and "panicked" not in ended.stderr, ended.stderr


def test_work_of_an_executor_is_completed(master, key):
    code = """
        from concurrent.futures import ThreadPoolExecutor
        pool = ThreadPoolExecutor(4)
        [pool.submit(s.put, f"{key}-{i}", b"x" * 1000) for i in range(50)]
        """
    ended = run(master, key, code)
    assert ended.returncode == 0, ended.stderr


def test_exit_handlers_of_the_program_see_their_threads_return(master, key):
    """A handler that runs after that of mooncake may wait for threads that are in calls."""
    before = """
import atexit, sys, threading
stop, threads = threading.Event(), []
def wait():
    stop.set()
    for thread in threads:
        thread.join(30)
        if thread.is_alive():
            sys.stderr.write("a thread does not return")
atexit.register(wait)
"""
    code = """
        def work():
            while not stop.is_set():
                s.is_exist(key)
        threads += [threading.Thread(target=work, daemon=True) for _ in range(2)]
        [thread.start() for thread in threads]
        time.sleep(0.05)
        sys.exit(3)
        """
    program = before + START + textwrap.dedent(code)
    arguments = [sys.executable, "-c", program, master.address, key]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (3, "")


def test_a_silent_master_does_not_delay_the_end(own_master, key):
    master = own_master()
    code = """
        import signal
        for _ in range(4): repeat(lambda: s.is_exist(key))
        os.kill(int(sys.argv[3]), signal.SIGSTOP)
        sys.exit(3)
        """
    program = START + textwrap.dedent(code)
    arguments = [sys.executable, "-c", program, master.address, key, str(master.process.pid)]
    try:
        ended = subprocess.run(arguments, capture_output=True, text=True, timeout=15)
    finally:
        master.thaw()
    assert ended.returncode == 3, ended.stderr


TARGET = """
import time
import numpy as np
from mooncake.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
memory = np.zeros(1 << 26, np.uint8)
assert engine.register_memory(memory.ctypes.data, memory.nbytes) == 0
print(engine.get_rpc_port(), memory.ctypes.data, flush=True)
time.sleep(600)
"""
USER = """
import os, signal, sys, threading, time
import numpy as np
from mooncake.engine import TransferEngine
name, at, target, call = f"127.0.0.1:{sys.argv[1]}", int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
memory = np.zeros(1 << 26, np.uint8)
own = memory.ctypes.data
assert engine.register_memory(own, memory.nbytes) == 0
assert engine.transfer_sync_write(name, own, at, 4096) == 0
os.kill(target, signal.SIGSTOP)
if call == "transfer_submit_write":
    assert engine.transfer_submit_write(name, own, at, memory.nbytes) > 0
else:
    threading.Thread(target=getattr(engine, call), args=(name, own, at, memory.nbytes), daemon=True).start()
    time.sleep(0.2)
print(time.monotonic(), flush=True)
sys.exit(3)
"""


@pytest.mark.parametrize("call", ["transfer_submit_write", "transfer_sync_write", "transfer_sync_read"])
def test_a_stopped_peer_does_not_delay_the_end(call):
    target = subprocess.Popen([sys.executable, "-c", TARGET], stdout=subprocess.PIPE, text=True)
    try:
        port, at = target.stdout.readline().split()
        arguments = [sys.executable, "-c", USER, port, at, str(target.pid), call]
        user = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
        took = time.monotonic() - float(user.stdout)
    finally:
        target.kill()
        target.wait()
    assert user.returncode == 3, user.stderr
    # The deadline of the transfer is 30 s. The end takes about a second on an idle machine.
    assert took < 10, f"{took} s"


def test_a_subinterpreter_is_refused_by_name():
    code = """
import _xxsubinterpreters as interpreters
try:
    interpreters.run_string(interpreters.create(), "import mooncake.store")
except Exception as error:
    print(error)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "subinterpreter" in ended.stdout, ended.stdout + ended.stderr
