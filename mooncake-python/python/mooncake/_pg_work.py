"""Operations in progress, and host memory in place of tensors that they cannot use."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.futures import Future

from mooncake import _mooncake
from mooncake._pg_dispatch import check_tensor
from mooncake._pg_futures import RESOLVING_THREADS, list_future
from mooncake._pg_torch import KEEPS_WORKS, keep_until_waited, was_waited

_NO_LIMIT = timedelta(0)
# Answer of torch for a tensor whose elements share memory for certain.
_OVERLAPS = 1


def _span(tensor: Any) -> tuple[int, int]:
    """Returns address and length in bytes of a contiguous tensor."""
    address, length = tensor.data_ptr(), tensor.nbytes
    if length and not address:
        # A tensor of a derived class, which a caller of the backend has not unwrapped.
        raise RuntimeError(
            f"cannot use tensor: it has no memory of its own. type={type(tensor).__name__}; call the group, not its backend"
        )
    return address, length


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

    def input(self, tensor: Any, dtype: Any = None) -> Any:
        """Returns a contiguous host tensor with the elements of `tensor`, converted to `dtype`."""
        if (
            tensor.is_cpu
            and tensor.layout is torch.strided
            and not tensor.is_quantized
            and dtype is None
            and tensor.is_contiguous()
            and not tensor.is_conj()
            and not tensor.is_neg()
        ):
            plain = tensor
        else:
            check_tensor(tensor)
            plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
            if dtype is not None:
                plain = plain.to(dtype)
        self.keep.append(plain)
        return plain

    def output(self, tensor: Any, dtype: Any = None) -> Any:
        """Returns a contiguous host tensor that has the elements of `tensor`, converted to `dtype`,
        until the operation overwrites them.
        """
        plain = self.input(tensor, dtype)
        if plain is not tensor:
            if not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) == _OVERLAPS:
                raise RuntimeError(
                    "cannot use tensor: several elements of a result have the same memory. "
                    f"shape={tuple(tensor.shape)} stride={tensor.stride()}; call contiguous first"
                )
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


class _JoinedStaging:
    """Tensors of several calls, each of which copies its own results back."""

    copies_back = False

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts

    def finish(self) -> None:
        for part in self._parts:
            part.finish()


def _is_called_by_hook(results: Sequence[Any]) -> bool:
    """Returns whether the caller of the caller is the hook of torch that compresses gradients to
    `float16`. The hook is in C++, so that the innermost code in Python does not name the call.
    """
    if not results or any(one.dtype != torch.float16 for one in results):
        return False
    try:
        return "get_future" not in sys._getframe(2).f_code.co_names
    except ValueError:
        # Code in C++ has started this thread.
        return True


class MooncakeWork(Work):
    """Operation of a process group in progress."""

    def __init__(
        self,
        operations: Sequence[_mooncake.GroupOperation],
        results: list[Any],
        staging: _Staging | _JoinedStaging,
        capacity: int,
        refresh: Callable[[], None] | None,
        is_p2p: bool = False,
        check: Callable[[], BaseException | None] | None = None,
    ) -> None:
        super().__init__()
        self._operations = operations
        self._results = results
        self._staging = staging
        self._capacity = capacity
        self._refresh = refresh
        self._is_p2p = is_p2p
        # Finds what is wrong with an operation that is over.
        self._check = check
        self._future: Any = None
        self._list_future: Any = None
        if KEEPS_WORKS and not is_p2p:
            # C++ starts collective operations only, and waits for each of coalesced ones.
            keep_until_waited(self, len(operations))
        if staging.copies_back:
            # The results arrive even if the caller does not wait.
            self._on_done(staging.finish)

    def join(self, others: Sequence[MooncakeWork]) -> MooncakeWork:
        """Returns the work of the operations of this work and of others of the same group."""
        works = [self, *others]
        checks = [work._check for work in works if work._check is not None]
        return MooncakeWork(
            [operation for work in works for operation in work._operations],
            [result for work in works for result in work._results],
            _JoinedStaging([work._staging for work in works]),
            self._capacity,
            self._refresh,
            self._is_p2p,
            (lambda: next((fault for check in checks if (fault := check()) is not None), None)) if checks else None,
        )

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
        """Returns the exception for the caller, if all operations are over."""
        for operation in self._operations:
            fault = operation.fault()
            if fault is not None:
                return fault
        return None if self._check is None else self._check()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the operation. Only point-to-point operations honour `timeout`; the result is
        False when it expires. The failure of another rank raises no exception.
        """
        if KEEPS_WORKS:
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
        error = next((error for one in self._operations if (error := one.error()) is not None), None)
        if error is None and self._check is not None and all(one.is_done() for one in self._operations):
            return self._check()
        return error

    def result(self) -> list[Any]:
        """Returns the tensors with the results."""
        return self._results

    def get_future(self) -> Any:
        """Returns a future of the results."""
        was_waited(self)
        if self._future is None:
            devices = sorted({one.device.index for one in self._results if one.device.type == "cuda"})
            future = self._future = Future(devices=[torch.device("cuda", index) for index in devices])
            has_failed = torch.zeros((), dtype=torch.bool)

            def resolve() -> None:
                self._finish()
                fault = self._fault()
                if fault is not None:
                    has_failed.fill_(True)
                    future.set_exception(fault)
                else:
                    future.set_result(self._results)

            if _is_called_by_hook(self._results):
                self._list_future = list_future(future, has_failed, self._results)
            if self.is_completed():
                resolve()
            else:
                self._on_done(lambda: RESOLVING_THREADS.run(resolve))
        return self._list_future or self._future

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
