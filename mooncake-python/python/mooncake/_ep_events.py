"""Events that callers of expert parallelism wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


class Pending:
    """Rest of a call, which is carried out once."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def __call__(self) -> None:
        with self._lock:
            if self._finish is not None:
                try:
                    self._finish()
                except Exception as error:
                    self._error = error
                # After Ctrl-C, the call can be finished again.
                self._finish = None
            if self._error is not None:
                raise self._error


class EventHandle:
    """Event of a call, or of the present work of a CUDA stream."""

    def __init__(self, stream_ptr: int = 0) -> None:
        self._pending: Pending | None = None
        self._recorded: Any = None
        if stream_ptr:
            self._recorded = torch.cuda.Event()
            self._recorded.record(torch.cuda.ExternalStream(stream_ptr))

    @classmethod
    def _of(cls, pending: Pending) -> EventHandle:
        event = cls()
        event._pending = pending
        return event

    def current_stream_wait(self, stream_ptr: int = 0) -> None:
        """Makes the stream wait for the event. A call on host memory is over on return."""
        if self._pending is not None:
            self._pending()
        if self._recorded is not None:
            self._recorded.wait(torch.cuda.ExternalStream(stream_ptr) if stream_ptr else torch.cuda.current_stream())

    def synchronize(self) -> None:
        """Waits for the event."""
        if self._pending is not None:
            self._pending()
        if self._recorded is not None:
            self._recorded.synchronize()


class EventOverlap:
    """Event of a call that goes on while the program computes. As a context manager, it waits at
    the end of the block.

    `extra_tensors` are kept as long as the event.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Waits for the event. Does nothing without one."""
        if self.event is not None:
            self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.current_stream_wait()
