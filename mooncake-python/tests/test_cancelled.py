"""Reads that are cancelled during their transfer: a short run of `cancelled.py`, and programs that
end during a read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from cancelled import Directory, program
from mooncake.async_store import MooncakeDistributedStoreAsync

TRIAL = Path(__file__).with_name("cancelled.py")


@pytest.mark.parametrize("way", ["asyncio", "signal", "shared"])
def test_no_read_gets_bytes_of_a_cancelled_one(way: str) -> None:
    words = [sys.executable, str(TRIAL), "--reads", "120", "--ways", way]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    print(done.stdout)
    assert done.returncode == 0


def test_a_program_ends_while_bytes_travel() -> None:
    """Bytes of the reads are delayed for longer than the interpreter waits for a master."""
    words = [sys.executable, str(TRIAL), "--ways", "end", "--delay", "3"]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    print(done.stdout)
    assert done.returncode == 0


@pytest.mark.parametrize("ending", ["return", "exit", "exception", "dropped"])
def test_a_program_ends_while_a_batch_of_its_engine_travels(ending: str) -> None:
    """The interpreter waits until no byte of the batch can arrive any more."""
    delay = "1"
    with contextlib.ExitStack() as stack:
        directory = Directory(0, "127.0.0.1")
        directory.run()
        stack.callback(directory.close)
        at = f"http://127.0.0.1:{directory.port}/metadata"
        _, name = stack.enter_context(program(str(TRIAL), "engine-owner", at))
        _, port = stack.enter_context(program(str(TRIAL), "relay", str(directory.data_port(name)), delay))
        directory.relayed = (name, int(port))
        words = [sys.executable, str(TRIAL), "engine-reader", at, name, ending, delay]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=os.environ | {"MC_FORCE_TCP": "1"})
        print(done.stdout, done.stderr)
        assert "landed" not in done.stderr
        assert done.returncode == (1 if ending == "exception" else 0)


class Slow(MooncakeDistributedStoreAsync):
    """Store whose calls are replaced by the program's own, and end on request."""

    may_end = threading.Event()

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        assert self.may_end.wait(60)
        return 7

    def get_into_ranges(self, *_: Any) -> Any:
        return self.get_into("", 0, 0)


@pytest.mark.parametrize("name", ["async_get_into", "async_get_into_ranges"])
def test_waiting_for_the_end_of_a_call_on_a_thread(name: str) -> None:
    async def work() -> None:
        store = Slow()
        store.may_end.clear()
        call = getattr(store, name)
        task = asyncio.create_task(call("key", 0, 0, wait_on_cancel=True))
        await asyncio.sleep(0)
        for _ in range(3):
            task.cancel()
            await asyncio.wait([task], timeout=0.05)
            assert not task.done(), "the call has not ended"
        store.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await call("key", 0, 0, wait_on_cancel=True) == 7

    asyncio.run(work())
