"""`RpcInterface`: messages to a callback in another process."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from conftest import free_port
from mooncake import engine
from mooncake.engine import ReceivedTensor, RpcInterface, create_rpc_client, create_rpc_server


class Tensor:
    """Object with what `send_tensor` takes from a tensor."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def data_ptr(self):
        return self.array.ctypes.data

    def numel(self):
        return self.array.size

    def element_size(self):
        return self.array.itemsize


@pytest.fixture
def server():
    """Server that keeps what it receives."""
    interface, interface.got = RpcInterface(), []
    interface.at = f"127.0.0.1:{free_port()}"
    interface.set_data_receive_callback(interface.got.append)
    assert interface.initialize_server(interface.at, thread_count=4)
    assert interface.start_server_async()
    yield interface
    interface.stop_server()


def test_data_arrives(server):
    client = create_rpc_client()
    rng = random.Random()
    for size in (0, 1, 255, 256, 1024, 1025, 3 << 20, 5):
        data = rng.randbytes(size)
        assert client.send_data(server.at, data) == 0
        assert server.got.pop() == {"source": "", "data": data}, size
    array = np.arange(1000, dtype=np.float32)
    assert client.send_tensor(server.at, Tensor(array)) == 0
    assert server.got.pop()["data"] == array.tobytes()
    assert client.send_tensor(server.at, Tensor(array[:0])) == 0 and server.got.pop()["data"] == b""
    for wrong in (object(), None, b"bytes"):
        assert client.send_tensor(server.at, wrong) == -1
    gone = Tensor(array)
    gone.data_ptr = lambda: 4096
    assert client.send_tensor(server.at, gone) == -1
    for wrong in ("text", bytearray(b"x"), memoryview(b"x"), None):
        with pytest.raises(TypeError, match="bytes"):
            client.send_data(server.at, wrong)
    assert not server.got


def test_messages_that_look_like_tensors(server):
    tensors = []
    server.set_tensor_receive_callback(tensors.append)
    head = struct.Struct("<II4q").pack
    client = create_rpc_client()
    for send in (client.send_data, lambda at, data: client.send_tensor(at, Tensor(np.frombuffer(data, np.uint8)))):
        for kind, dims, sizes, dtype, shape in (
            (1, 2, (3, 4, 0, 0), "float16", [3, 4]),
            (9, 4, (1, 0, 2, -1), "bool", [1, 2]),
            (2, 0, (7, 7, 7, 7), "float32", []),
            (2, 1, (5, 1 << 60, 0, 0), "float32", [5]),
        ):
            data = head(kind, dims, *sizes) + b"x" * 48
            assert send(server.at, data) == 0
            got = tensors.pop()
            assert isinstance(got, ReceivedTensor)
            assert (got.dtype, got.shape, got.source_address) == (dtype, shape, "")
            assert got.get_data_as_bytes() == bytes(got.get_memory_view()) == data
            assert got.total_bytes == got.get_data_size() == 88
        for data in (head(0, 1, 1, 0, 0, 0), head(10, 1, 1, 0, 0, 0), head(1, 5, 1, 1, 1, 1), head(1, 1, 1, 0, 0, 0)[:39]):
            assert send(server.at, data) == 0 and server.got.pop()["data"] == data
        assert send(server.at, head(1, 2, 1, 1 << 48, 0, 0)) == 0, "dropped: the size is out of range"
    assert not tensors and not server.got


def test_a_server_starts_and_stops(server, caplog):
    assert not server.start_server_async(), "it runs already"
    client = create_rpc_client()
    other = RpcInterface()
    assert not other.start_server_async() and not other.start_server(), "before initialize"
    assert other.send_data(server.at, b"x") == -1
    assert other.stop_server() is None
    assert other.initialize() and not other.start_server_async(), "no address"
    assert other.initialize(server.at) and not other.start_server_async(), "the port is in use"
    assert other.initialize("999.1.1.1:5") and not other.start_server_async()
    assert other.send_data(server.at, b"from it") == 0 and server.got.pop()["data"] == b"from it"
    assert client.send_data(server.at, b"x") == 0 and server.got.pop()["data"] == b"x"
    server.stop_server()
    server.stop_server()
    began = time.monotonic()
    assert client.send_data(server.at, b"x") == -1, "it has stopped"
    assert 3 < time.monotonic() - began < 10, "it might have been starting"
    assert client.send_data("127.0.0.1", b"x") == -1
    assert server.start_server_async(), "it can be started again"
    assert client.send_data(server.at, b"again") == 0 and server.got.pop()["data"] == b"again"
    blocking = threading.Thread(target=lambda: server.got.append(other.start_server()))
    assert other.initialize_server(f"127.0.0.1:{free_port()}")
    blocking.start()
    while other._receiver is None:
        assert blocking.is_alive()
    other.stop_server()
    blocking.join(30)
    assert server.got == [True]
    assert create_rpc_server().stop_server() is None
    assert engine.CoroRPCInterface is RpcInterface


def test_callbacks_that_fail(server, caplog):
    client = create_rpc_client()
    for wrong in (None, 5):
        with pytest.raises(TypeError):
            server.set_data_receive_callback(wrong)
        with pytest.raises(TypeError):
            server.set_tensor_receive_callback(wrong)
    server.set_data_receive_callback(lambda data: 1 / 0)
    with caplog.at_level(logging.ERROR, "mooncake"):
        assert client.send_data(server.at, b"x") == 0
    assert "ZeroDivisionError" in caplog.text
    # A callback may stop its own server.
    server.set_data_receive_callback(lambda data: server.stop_server())
    client.send_data(server.at, b"x")
    while server._receiver is not None:
        time.sleep(0.01)


def test_many_senders(server):
    client = RpcInterface()
    assert client.initialize_client(pool_size=3, timeout_seconds=60)
    codes = []

    def send(thread):
        rng = random.Random(thread)
        codes.extend(client.send_data(server.at, bytes([thread]) * rng.choice([10, 2000])) for _ in range(100))

    threads = [threading.Thread(target=send, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0] * 800
    assert all(len(set(got["data"])) == 1 for got in server.got)
    assert sorted(got["data"][0] for got in server.got) == sorted(list(range(8)) * 100)


def test_a_timeout(server):
    hold = threading.Event()
    server.set_data_receive_callback(lambda data: hold.wait(30))
    client = RpcInterface()
    assert client.initialize_client(timeout_seconds=1)
    assert client.send_data(server.at, b"x") == -1
    hold.set()


def test_event_loops(server):
    client = create_rpc_client()

    async def work():
        loop = asyncio.get_running_loop()
        assert await client.send_data_async(server.at, b"a" * 2000, loop) == 0
        assert await client.send_tensor_async(server.at, Tensor(np.arange(9)), loop) == 0
        with pytest.raises(RuntimeError):
            await client.send_data_async("127.0.0.1:1", b"x", loop)
        with pytest.raises(TypeError):
            client.send_data_async(server.at, "x", loop)
        with pytest.raises(RuntimeError):
            client.send_tensor_async(server.at, object(), loop)
        with pytest.raises(RuntimeError, match="initialize"):
            RpcInterface().send_data_async(server.at, b"x", loop)

    asyncio.run(work())
    assert [len(got["data"]) for got in server.got] == [2000, 72]


PROGRAM = """
import signal, sys
from mooncake.engine import RpcInterface

# A shell starts programs in the background with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
server = RpcInterface()
server.set_data_receive_callback(lambda data: print(data["data"].decode(), flush=True))
server.initialize_server(sys.argv[1])
if sys.argv[2] == "blocks":
    print("ready", flush=True)
    server.start_server()
else:
    assert server.start_server_async()
    print("ready", flush=True)
    sys.stdin.read()
print("over", flush=True)
"""


@pytest.mark.parametrize("how", ["blocks", "returns"])
def test_a_program_ends_while_its_server_runs(how):
    at = f"127.0.0.1:{free_port()}"
    words = [sys.executable, "-c", PROGRAM, at, how]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout.readline() == "ready\n"
            client = create_rpc_client()
            assert client.send_data(at, b"hello") == 0 and program.stdout.readline() == "hello\n"
            if how == "blocks":
                os.kill(program.pid, signal.SIGINT)
            program.stdin.close()
            assert program.wait(30) == (1 if how == "blocks" else 0) or program.returncode == -signal.SIGINT
            assert "fatal" not in program.stderr.read().lower()
        finally:
            program.kill()


STUCK = """
import sys, threading
from mooncake.engine import RpcInterface

entered = threading.Semaphore(0)
server, client = RpcInterface(), RpcInterface()
server.set_data_receive_callback(lambda data: (entered.release(), threading.Event().wait()))
server.initialize_server(sys.argv[1], 4)
assert server.start_server_async()
client.initialize_client()
for _ in range(4):
    threading.Thread(target=client.send_data, args=(sys.argv[1], b"x"), daemon=True).start()
for _ in range(4):
    assert entered.acquire(timeout=30)
print("stuck", flush=True)
sys.exit(3)
"""


def test_callbacks_that_do_not_return_delay_the_end_once():
    words = [sys.executable, "-c", STUCK, f"127.0.0.1:{free_port()}"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout.readline() == "stuck\n"
        began = time.monotonic()
        assert program.wait(60) == 3
        # Each of the four threads had 5 s before.
        assert time.monotonic() - began < 15
