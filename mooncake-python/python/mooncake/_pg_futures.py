"""Futures: the threads that resolve them, and those for code in C++.

The thread that resolves a future runs its callbacks, and a callback may wait for another future. So
no thread that makes results resolves futures, and no future waits for a thread that is busy.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from queue import Empty, SimpleQueue
from typing import Any

import torch

# Seconds after which an idle thread ends.
_IDLE_FOR = 10.0
# Seconds that the end of the interpreter waits for callbacks.
_END_WITHIN = 2.0


class ResolvingThreads:
    """Threads that run tasks, one more whenever all are busy."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: set[threading.Thread] = set()
        # Idle threads.
        self._idle = 0
        self._is_over = False

    def run(self, task: Callable[[], None]) -> None:
        """Runs a task on another thread. At the end of the interpreter, runs it on this one."""
        with self._lock:
            is_over = self._is_over
            if not is_over:
                self._queue(task)
        if is_over:
            task()

    def _queue(self, task: Callable[[], None]) -> None:
        if self._idle:
            self._idle -= 1
        else:
            thread = threading.Thread(target=self._work, name="mooncake-futures", daemon=True)
            self._threads.add(thread)
            thread.start()
        self._tasks.put(task)

    def _work(self) -> None:
        while (task := self._next()) is not None:
            try:
                task()
            except BaseException:
                sys.excepthook(*sys.exc_info())
            del task
            with self._lock:
                self._idle += 1
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _next(self) -> Callable[[], None] | None:
        """Returns the next task, or `None` if this thread is to end."""
        while True:
            try:
                return self._tasks.get(timeout=_IDLE_FOR)
            except Empty:
                with self._lock:
                    # Otherwise a task for this thread has come just now.
                    if self._idle:
                        self._idle -= 1
                        return None

    def stop(self) -> None:
        """Ends the threads, and waits for those that run a task, for at most 2 s."""
        with self._lock:
            self._is_over = True
            threads = list(self._threads)
            for _ in threads:
                self._tasks.put(None)
        end = time.monotonic() + _END_WITHIN
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))


RESOLVING_THREADS = ResolvingThreads()
atexit.register(RESOLVING_THREADS.stop)

# A future that Python makes has a Python object. Code in C++ may want a list of tensors, which only
# TorchScript puts into a future.
_LIST_FUTURE = """
def wait_for_results(
    done: Future[Tensor], has_failed: Tensor, results: List[Tensor]
) -> List[Tensor]:
    torch.jit.wait(done)
    if bool(has_failed.item()):
        raise RuntimeError("cannot finish operation: it has failed on this rank or on another one")
    return results

def list_future(
    done: Future[Tensor], has_failed: Tensor, results: List[Tensor]
) -> Future[List[Tensor]]:
    return torch.jit.fork(wait_for_results, done, has_failed, results)
"""


@cache
def _compiled() -> Any:
    return torch.jit.CompilationUnit(_LIST_FUTURE)


def list_future(done: Any, has_failed: Any, results: list[Any]) -> Any:
    """Returns a future of a list of tensors in C++, which is resolved after `done`. Its callbacks
    run on the threads of TorchScript, so that they must not wait.
    """
    return _compiled().list_future(done, has_failed, results)
