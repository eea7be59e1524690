"""Signals during calls that wait: handlers run soon, and their exceptions end the call."""

from __future__ import annotations

import contextlib
import ctypes
import linecache
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import MIB

from mooncake.store import BufferPool, MooncakeDistributedStore

# Less than the timeout of a call, 20 s.
SOON = 15


@pytest.fixture(autouse=True)
def _interrupts() -> Iterator[None]:
    """Restores the handler of Ctrl-C, which a shell disables for background processes."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def sent(number: int, after: float = 0.3) -> Iterator[None]:
    """Sends this process a signal while the block runs."""
    timer = threading.Timer(after, os.kill, (os.getpid(), number))
    timer.start()
    try:
        yield
    finally:
        timer.join()


def wait_until_it_waits(thread: threading.Thread) -> None:
    """Returns when a native call, the target of the thread, has released the interpreter. While
    this thread has the interpreter, the other one is at the line of the call only inside of it.
    """
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        frame = sys._current_frames().get(thread.ident or 0)
        if frame is not None and "self._target(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
            return
        time.sleep(0.01)
    pytest.fail("the thread does not call its target")


@pytest.fixture
def frozen(own_master: Callable[..., Any], make_store: Callable[..., MooncakeDistributedStore]) -> Any:
    """Store whose master does not respond."""
    master = own_master()
    store = make_store(master)
    assert store.put("before", b"x") == 0
    master.freeze()
    yield store
    master.thaw()


def test_ctrl_c_ends_a_call(frozen: MooncakeDistributedStore) -> None:
    for call in (
        lambda: frozen.put("key", b"value"),
        lambda: frozen.is_exist("before"),
        lambda: frozen.get_batch(["before"]),
    ):
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt), sent(signal.SIGINT):
            call()
        assert time.monotonic() - begun < SOON


def test_handlers_run_while_a_call_waits(frozen: MooncakeDistributedStore) -> None:
    ran = []
    before = signal.signal(signal.SIGUSR1, lambda *_: ran.append(time.monotonic()))
    try:
        with pytest.raises(KeyboardInterrupt), sent(signal.SIGUSR1, 0.2), sent(signal.SIGINT, 1.5):
            frozen.put("key", b"value")
        assert ran and time.monotonic() - ran[0] > 0.8, "long before the call ended"
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_other_threads_go_on(frozen: MooncakeDistributedStore) -> None:
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(frozen.is_exist("before")))
    thread.start()
    with pytest.raises(KeyboardInterrupt), sent(signal.SIGINT):
        frozen.put("key", b"value")
    assert not answers, "it still waits"


def test_a_store_is_whole_after_ctrl_c(own_master: Any, make_store: Any) -> None:
    master = own_master()
    store = make_store(master)
    master.freeze()
    with pytest.raises(KeyboardInterrupt), sent(signal.SIGINT):
        store.put("key", b"value")
    master.thaw()
    assert store.put("other", b"value") == 0 and store.get("other") == b"value"


def test_ctrl_c_while_set_up(own_master: Any) -> None:
    master = own_master()
    master.freeze()
    store = MooncakeDistributedStore()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt), sent(signal.SIGINT):
        store.setup("127.0.0.1", "P2PHANDSHAKE", 16 * MIB, MIB, "tcp", "", master.address)
    assert time.monotonic() - begun < SOON
    master.thaw()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 16 * MIB, MIB, "tcp", "", master.address) == 0
    store.close()


def test_ctrl_c_while_waiting_for_a_pool(make_store: Any) -> None:
    pool = BufferPool(make_store(), max_bytes=4 * MIB)
    kept: list[Any] = []
    with contextlib.suppress(RuntimeError):
        while True:
            kept.append(pool.acquire(MIB, block=False))
    assert kept
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt), sent(signal.SIGINT):
        pool.acquire(MIB)
    assert time.monotonic() - begun < SOON
    with pytest.raises(RuntimeError, match="timed out"):
        pool.acquire(MIB, timeout=0.25)
    assert time.monotonic() - begun < SOON
    for lease in kept:
        lease.release()
    pool.acquire(MIB).release()
    pool.close()


def test_a_handler_may_wait_for_what_the_call_holds(own_master: Any, make_store: Any) -> None:
    master = own_master()
    store = make_store(master)
    memory = (ctypes.c_ubyte * 4096)()
    at = ctypes.addressof(memory)
    assert store.register_buffer(at, 4096) == 0
    codes: list[int] = []

    def clean_up(*_: Any) -> None:
        master.thaw()
        codes.append(store.unregister_buffer(at))
        raise SystemExit(7)

    master.freeze()
    before = signal.signal(signal.SIGUSR1, clean_up)
    try:
        begun = time.monotonic()
        with pytest.raises(SystemExit), sent(signal.SIGUSR1):
            store.put_from("key", at, 4096)
        assert codes == [0] and time.monotonic() - begun < SOON
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_unregistering_can_be_interrupted_and_repeated(own_master: Any, make_store: Any) -> None:
    master = own_master()
    store = make_store(master)
    memory = (ctypes.c_ubyte * 4096)()
    at = ctypes.addressof(memory)
    assert store.register_buffer(at, 4096) == 0
    master.freeze()
    put = threading.Thread(target=store.put_from, args=("key", at, 4096))
    put.start()
    wait_until_it_waits(put)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt), sent(signal.SIGINT, 0.5):
        store.unregister_buffer(at)
    assert time.monotonic() - begun < SOON
    threading.Timer(0.5, master.thaw).start()
    assert store.unregister_buffer(at) == 0, "waits for the put"
    put.join(1)
    assert not put.is_alive()
    assert store.unregister_buffer(at) == -600


def test_one_interrupt_ends_calls_in_a_row(frozen: MooncakeDistributedStore) -> None:
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt), sent(signal.SIGINT):
        list(map(frozen.is_exist, ["a", "b", "c"]))
    assert time.monotonic() - begun < SOON
