"""Calls that torch makes on a group, and how torch's dispatcher sees them.

A call of a group enters the dispatcher as an operator of `c10d`, as with a backend in C++. The
dispatcher unwraps tensors of derived classes, answers for fake ones, and shows the operator to
dispatch modes, traces and profilers. The operator then calls the backend of the group. A call with
plain tensors that nothing watches goes straight to the backend.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup

from mooncake._pg_torch import HAS_BACKENDS

# Calls of groups and backends, with the number of leading arguments that have tensors.
_CALLS = {
    "allreduce": 1,
    "allreduce_coalesced": 1,
    "reduce": 1,
    "reduce_scatter": 2,
    "reduce_scatter_single": 2,
    "reduce_scatter_single_coalesced": 2,
    "broadcast": 1,
    "allgather": 2,
    "allgather_coalesced": 2,
    "all_gather_single": 2,
    "all_gather_single_coalesced": 2,
    "gather": 2,
    "gather_single": 2,
    "scatter": 2,
    "alltoall": 2,
    "all_to_all_single": 2,
    "barrier": 0,
    "send": 1,
    "recv": 1,
    "recv_anysource": 1,
}

# Calls that torch 2.13 has renamed, with their names before. Torch from 2.4 to 2.12 calls the old
# name of a group and of a backend, and newer versions the new name of both. Programs call either.
_RENAMED = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "gather_single": "gather_into_tensor",
}

# Types of tensors that the dispatcher treats as plain ones.
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def _is_recorded() -> bool:
    """Returns whether the environment asks torch to record or check each operation of a group.
    Torch does both in its operators.
    """
    recorders = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_DIST_NAN_CHECK")
    return any(os.environ.get(name, "0") not in ("", "0") for name in recorders)


_IS_RECORDED = _is_recorded()
_count_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled
_level_of_transforms: Callable[[], Any] = getattr(torch._C._functorch, "maybe_current_level", lambda: None)


def _is_watched() -> bool:
    """Returns whether a dispatch mode, a profiler or a transform of functions sees the operators of
    this thread. Without backends in torch, an operator of plain tensors has nothing to call.
    """
    if not HAS_BACKENDS:
        return False
    return _count_modes() > 0 or _is_profiling() or _level_of_transforms() is not None or _IS_RECORDED


def _are_plain(given: Iterable[Any]) -> bool:
    """Returns whether all tensors in these arguments, and in their lists, are plain."""
    for one in given:
        kind = type(one)
        if kind in _PLAIN:
            continue
        if kind is list or kind is tuple:
            # Most lists have one tensor.
            if not (len(one) == 1 and type(one[0]) in _PLAIN) and not _are_plain(one):
                return False
        elif isinstance(one, torch.Tensor):
            return False
    return True


def check_tensors(given: Iterable[Any]) -> None:
    """Raises `RuntimeError` if a plain tensor in these arguments, or in their lists, has no
    elements that a group can move.
    """
    for one in given:
        if isinstance(one, list | tuple):
            check_tensors(one)
        elif type(one) in _PLAIN:
            check_tensor(one)


def check_tensor(tensor: Any) -> None:
    """Raises `RuntimeError` if a tensor has no elements that a group can move."""
    if tensor.layout is not torch.strided:
        raise RuntimeError(f"cannot use tensor: it is sparse. layout={tensor.layout}; convert it with to_dense")
    if tensor.is_quantized:
        raise RuntimeError(f"cannot use tensor: it is quantized. dtype={tensor.dtype}; send int_repr and the scale")
    if not tensor.is_cpu and tensor.device.type != "cuda":
        raise RuntimeError(f"cannot use tensor: its device has no memory that a group reads. device={tensor.device}")


class _WorksOfThread(threading.local):
    """Works that the backend has started in the calls of this thread that are in the dispatcher."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []


_WORKS = _WorksOfThread()


def _backend_call(direct: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a call of a backend. The dispatcher gives its caller another object for the work, so
    that the call keeps the work for the group.
    """

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        work = direct(self, *arguments, **options)
        if _WORKS.calls:
            _WORKS.calls[-1].append(work)
        if arguments and getattr(arguments[-1], "asyncOp", True) is False:
            # A traced graph, or a tensor of a derived class, drops the work.
            work.wait()
        return work

    return call


def _hide_from_compiler(call: Any) -> None:
    """Lets `torch.compile` run a call as it is, with the functions that it calls. The compiler
    refuses attributes of a group that torch has not registered.
    """
    call._torchdynamo_disable = True
    call._torchdynamo_disable_msg = "calls of mooncake process groups run as they are"
    try:
        from torch._C._dynamo import eval_frame
        from torch._C._dynamo.eval_frame import set_code_exec_strategy
    except ImportError:
        # Before torch 2.8 groups are not checked.
        return
    skip = eval_frame._FrameAction.SKIP
    set_code_exec_strategy(call.__code__, eval_frame._FrameExecStrategy(skip, skip))


def _group_call(name: str, tensors: int, direct: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a call of a group, whose first `tensors` arguments have tensors."""
    through_dispatcher = getattr(ProcessGroup, name, None)

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        given = (*arguments[:tensors], *options.values()) if options else arguments[:tensors]
        if (_are_plain(given) and not (self._hooks or _is_watched())) or through_dispatcher is None:
            return direct(self, *arguments, **options)
        check_tensors(given)
        works: list[Any] = []
        _WORKS.calls.append(works)
        try:
            returned = through_dispatcher(self, *arguments, **options)
        finally:
            _WORKS.calls.pop()
        if not works:
            return returned
        # A tensor that wraps several others needs several operations.
        return works[0] if len(works) == 1 else works[0].join(works[1:])

    # The function of torch calls the one of the derived class, unless the frame that calls it has
    # its name and the same first argument.
    call.__code__ = call.__code__.replace(co_name=name)
    call.__name__ = name
    _hide_from_compiler(call)
    return call


def group_calls(calls: type) -> dict[str, Callable[..., Any]]:
    """Returns the calls of a group, which run those of the class `calls`."""
    found = {}
    for name, tensors in _CALLS.items():
        direct = getattr(calls, name)
        found[name] = _group_call(name, tensors, direct)
        before = _RENAMED.get(name)
        # A torch that has the new name runs it for the old one. It takes an old name in a class in
        # Python for the function that it looks for, so that the call would call itself.
        if before is not None and not hasattr(ProcessGroup, name):
            found[before] = _group_call(before, tensors, direct)
    return found


def backend_calls(calls: type) -> dict[str, Callable[..., Any]]:
    """Returns the calls of a backend, which run those of the class `calls`."""
    names = [(name, known) for name in _CALLS for known in (name, _RENAMED.get(name)) if known is not None]
    return {known: _backend_call(getattr(calls, name)) for name, known in names}
