"""Operations in progress, and host memory in place of tensors that they cannot use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.futures import Future

from mooncake import _mooncake
from mooncake._pg_torch import keep_until_waited, was_waited

_NO_LIMIT = timedelta(0)


def _span(tensor: Any) -> tuple[int, int]:
    """Returns address and length in bytes of a contiguous tensor."""
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


class _Staging:
    """Tensors of one call. A tensor that is not contiguous, or not on the host, is replaced by a
    copy, and an output is copied back when the operation is over.

    A CUDA tensor is copied on the current stream of the caller, after the work of that stream. The
    copy back is on the same stream.
    """

    __slots__ = ("_copies", "_lock", "keep")

    def __init__(self) -> None:
        self.keep: list[Any] = []
        self._copies: list[tuple[Any, Any, Any]] = []
        self._lock = threading.Lock()

    def input(self, tensor: Any) -> Any:
        """Returns a contiguous host tensor with the elements of `tensor`."""
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise RuntimeError(f"cannot use tensor: it is not dense. layout={tensor.layout}")
        if tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            plain = tensor
        else:
            plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
        self.keep.append(plain)
        return plain

    def output(self, tensor: Any) -> Any:
        """Returns a contiguous host tensor that has the elements of `tensor` until the operation
        overwrites them.
        """
        plain = self.input(tensor)
        if plain is not tensor:
            # Slots of ranks that do not take part keep their elements.
            stream = torch.cuda.current_stream(tensor.device) if tensor.device.type == "cuda" else None
            self._copies.append((tensor.detach(), plain, stream))
        return plain

    @property
    def copies_back(self) -> bool:
        return bool(self._copies)

    def finish(self) -> None:
        """Copies the results back, once."""
        if not self._copies:
            return
        with self._lock, torch.no_grad():
            for tensor, plain, stream in self._copies:
                if stream is None:
                    tensor.copy_(plain)
                    continue
                with torch.cuda.stream(stream):
                    tensor.copy_(plain)
                torch.cuda.current_stream(tensor.device).wait_stream(stream)
            self._copies = []


class MooncakeWork(Work):
    """Operation of a process group in progress."""

    def __init__(
        self,
        operations: Sequence[_mooncake.GroupOperation],
        results: list[Any],
        staging: _Staging,
        capacity: int,
        refresh: Callable[[], None] | None,
        is_p2p: bool = False,
    ) -> None:
        super().__init__()
        self._operations = operations
        self._results = results
        self._staging = staging
        self._capacity = capacity
        self._refresh = refresh
        self._is_p2p = is_p2p
        self._future: Any = None
        if not is_p2p:
            # C++ starts collective operations only, and waits for each of coalesced ones.
            keep_until_waited(self, len(operations))
        if staging.copies_back:
            # The results arrive even if the caller does not wait.
            self._on_done(staging.finish)

    def _on_done(self, callback: Callable[[], None]) -> None:
        """Calls `callback` on another thread when all operations are over."""
        if len(self._operations) == 1:
            self._operations[0].on_done(callback)
            return
        left = len(self._operations)
        if not left:
            callback()
            return
        lock = threading.Lock()

        def step() -> None:
            nonlocal left
            with lock:
                left -= 1
                is_last = left == 0
            if is_last:
                callback()

        for operation in self._operations:
            operation.on_done(step)

    def _finish(self) -> None:
        """Makes the results available. All operations are over."""
        self._staging.finish()
        if self._refresh is not None:
            self._refresh()

    def _fault(self) -> BaseException | None:
        return next((fault for one in self._operations if (fault := one.fault()) is not None), None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the operation. Only point-to-point operations honour `timeout`; the result is
        False when it expires. The failure of another rank raises no exception.
        """
        # C++ names a timeout.
        was_waited(self, timeout is None)
        limit = timeout.total_seconds() if self._is_p2p and timeout is not None and timeout > _NO_LIMIT else None
        for operation in self._operations:
            if not operation.wait(limit):
                return False
        self._finish()
        fault = self._fault()
        if fault is not None:
            raise fault
        return True

    def synchronize(self) -> None:
        """Waits for the operation."""
        self.wait()

    def is_completed(self) -> bool:
        """Returns whether the operation is over."""
        was_waited(self)
        if not all(operation.is_done() for operation in self._operations):
            return False
        self._finish()
        return True

    def is_success(self) -> bool:
        """Returns whether the operation is over without an error or, if point-to-point, without a
        failure.
        """
        if not self.is_completed() or self.exception() is not None:
            return False
        return not self._is_p2p or not any(operation.failed() for operation in self._operations)

    def exception(self) -> Any:
        """Returns the exception of the operation, or `None`."""
        return next((error for one in self._operations if (error := one.error()) is not None), None)

    def result(self) -> list[Any]:
        """Returns the tensors with the results."""
        return self._results

    def get_future(self) -> Any:
        """Returns a future of the results."""
        was_waited(self)
        if self._future is None:
            devices = sorted({one.device.index for one in self._results if one.device.type == "cuda"})
            future = self._future = Future(devices=[torch.device("cuda", index) for index in devices])

            def resolve() -> None:
                self._finish()
                fault = self._fault()
                if fault is not None:
                    future.set_exception(fault)
                else:
                    future.set_result(self._results)

            if self.is_completed():
                resolve()
            else:
                self._on_done(resolve)
        return self._future

    def source_rank(self) -> int:
        """Returns the in-group rank whose message was received."""
        source = self._operations[0].source() if self._operations else None
        if source is None:
            raise RuntimeError("cannot return source rank: the operation has received no message")
        return source

    def _source_rank(self) -> int:
        return self.source_rank()

    def _hint(self) -> Any:
        """Returns 1 for each in-group rank that this rank saw fail, and 0 for the others."""
        failed = 0
        for operation in self._operations:
            failed |= operation.failed()
        return torch.tensor([failed >> slot & 1 for slot in range(self._capacity)], dtype=torch.int32)

    def _local_success(self) -> bool:
        if self._is_p2p and not self.is_completed():
            return False
        return self.exception() is None and not any(operation.failed() for operation in self._operations)


def get_failed_ranks_hint(work: Any) -> Any:
    """Returns an `int32` tensor with 1 for each in-group rank with which this rank saw a failure
    during the operation. Returns `None` for an operation of another backend.
    """
    return work._hint() if isinstance(work, MooncakeWork) else None


def get_local_success(work: Any) -> bool:
    """Returns whether this rank saw no failure during the operation. Returns False for an operation
    of another backend.
    """
    return isinstance(work, MooncakeWork) and work._local_success()
