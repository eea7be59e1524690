"""Process groups that `torch.distributed` creates, and the calls about their ranks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup

from mooncake import _mooncake, _pg_process
from mooncake._pg_calls import GroupCalls, _Mirror
from mooncake._pg_dispatch import backend_calls, group_calls
from mooncake._pg_options import (
    MooncakeBackendOptions,
    ProposalStatus,
    ProposeViewUpdateResponse,
    SyncAfterFailureResponse,
    SyncAfterFailureStatus,
    _check,
)
from mooncake._pg_torch import NEWEST, BackendBase, GroupBase


class MooncakeBackend(GroupCalls, BackendBase):
    """Backend of a group, which torch's operators call."""

    vars().update(backend_calls(GroupCalls))

    def __init__(self, comm: _mooncake.GroupCommunicator, rank: int, size: int, capacity: int, mirror: _Mirror) -> None:
        super().__init__(rank, size)
        self._comm = comm
        self._capacity = capacity
        self._declared = size
        self._mirror = mirror
        self._own = rank

    @property
    def _slot(self) -> int:
        return self._own

    @property
    def supports_coalescing(self) -> bool:
        return False

    def rank(self) -> int:
        return self._own

    def size(self) -> int:
        return self._extent()


class MooncakeProcessGroup(GroupCalls, GroupBase):
    """Group that `torch.distributed` returns."""

    vars().update(group_calls(GroupCalls))

    def __init__(self, store: Any, backend: MooncakeBackend, device: str) -> None:
        super().__init__(store, backend._own, backend._declared)
        self._comm = backend._comm
        self._capacity = backend._capacity
        self._declared = backend._declared
        self._mirror = backend._mirror
        self._own = backend._own
        # The group in C++ does not keep the part of the backend in Python.
        self._backend = backend
        self._is_open = True
        # Numbers of the hooks that torch runs around each operator.
        self._hooks: set[tuple[str, int]] = set()
        self._register(["cpu", "cuda"] if device == "cuda" or torch.cuda.is_available() else ["cpu"], backend)

    @property
    def _slot(self) -> int:
        return self._own

    def rank(self) -> int:
        return self._own

    def size(self) -> int:
        return self._extent()

    # Names in C++.
    getRank = rank
    getSize = size

    def register_pre_hook(self, hook_id: int, hook: Any) -> None:
        """Calls `hook` before each collective operation. Needs torch 2.15."""
        super().register_pre_hook(hook_id, hook)
        self._hooks.add(("pre", hook_id))

    def unregister_pre_hook(self, hook_id: int) -> None:
        super().unregister_pre_hook(hook_id)
        self._hooks.discard(("pre", hook_id))

    def register_post_hook(self, hook_id: int, hook: Any) -> None:
        """Calls `hook` after the start of each collective operation. Needs torch 2.15."""
        super().register_post_hook(hook_id, hook)
        self._hooks.add(("post", hook_id))

    def unregister_post_hook(self, hook_id: int) -> None:
        super().unregister_post_hook(hook_id)
        self._hooks.discard(("post", hook_id))

    def shutdown(self) -> None:
        """Leaves the group."""
        if self._is_open:
            self._is_open = False
            self._comm.close()
            _pg_process._closed()

    def abort(self) -> None:
        """Ends all operations and leaves the group."""
        self.shutdown()

    def split_group(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError("cannot split group: the backend mooncake does not support it; use new_group")

    def merge_remote_group(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError("cannot merge groups: the backend mooncake does not support it")


def _create(given: Any, options: MooncakeBackendOptions | None, device: str) -> MooncakeProcessGroup:
    rank, size = given.group_rank, given.group_size
    checked = _check(options, rank, size, device)
    ranks = list(given.global_ranks_in_group)
    order = ranks or list(range(size))
    context = _pg_process._context(given.store, order[rank], not ranks)
    mirror = _Mirror(checked.active_ranks)
    comm = context.communicator(
        f"{'cpu' if device == 'cpu' else 'device'}:{given.group_id}",
        order,
        rank,
        checked.capacity,
        checked.is_extension,
        checked.deactivates,
        checked.syncs,
        mirror.host.data_ptr(),
        mirror.host,
    )
    _pg_process._opened()
    if mirror.copies is not None:
        mirror.copies()
    try:
        return MooncakeProcessGroup(given.store, MooncakeBackend(comm, rank, size, checked.capacity, mirror), device)
    except (AttributeError, TypeError) as error:
        comm.close()
        _pg_process._closed()
        raise RuntimeError(
            f"cannot create group: torch differs from the versions that mooncake.pg knows. torch={torch.__version__} "
            f"newest={NEWEST}; install torch {NEWEST}"
        ) from error


def createMooncakeBackend(opts: Any, options: MooncakeBackendOptions | None = None) -> MooncakeProcessGroup:
    """Creates a group for CUDA tensors, for `torch.distributed.Backend.register_backend`."""
    return _create(opts, options, "cuda" if torch.cuda.is_available() else "cpu")


def createMooncakeCpuBackend(opts: Any, options: MooncakeBackendOptions | None = None) -> MooncakeProcessGroup:
    """Creates a group for tensors of the host, for `torch.distributed.Backend.register_backend`."""
    return _create(opts, options, "cpu")


def _group(backend: Any) -> GroupCalls:
    """Returns the group of a process group or of its backend."""
    if isinstance(backend, GroupCalls):
        return backend
    if isinstance(backend, ProcessGroup):
        found = backend._get_backend(torch.device("cpu"))
        if isinstance(found, GroupCalls):
            return found
    raise RuntimeError(f"cannot use group: its backend is not mooncake. type={type(backend).__name__}")


def get_active_ranks(backend: Any) -> Any:
    """Returns the tensor that shows which ranks are active. Every call returns the same tensor."""
    group = _group(backend)
    group._comm.refresh()
    if group._mirror.copies is not None:
        group._mirror.copies()
    return group._mirror.shown


def get_num_synced_ranks(backend: Any) -> int:
    """Returns the number of ranks that are active or can be activated."""
    return _group(backend)._comm.num_synced()


def get_peer_state(backend: Any, ranks: Sequence[int]) -> list[bool]:
    """Returns for each in-group rank whether it is active or can be activated. Local knowledge."""
    return _group(backend)._comm.peer_state(list(ranks))


def get_current_epoch(backend: Any) -> int:
    """Returns the epoch of the group's view, which grows with every change."""
    return _group(backend)._comm.epoch()


def _propose(backend: Any, activates: bool, ranks: Sequence[int]) -> ProposeViewUpdateResponse:
    epoch, dropped, reason = _group(backend)._comm.propose(activates, list(ranks))
    if reason is not None:
        return ProposeViewUpdateResponse(ProposalStatus.Rejected, epoch, [], reason[:255])
    status = ProposalStatus.AppliedWithDroppedRanks if dropped else ProposalStatus.Applied
    return ProposeViewUpdateResponse(status, epoch, list(dropped), "")


def activate_ranks(backend: Any, ranks: Sequence[int]) -> ProposeViewUpdateResponse:
    """Makes in-group ranks active, and waits until all active ranks know. The ranks are in
    `join_group` meanwhile.
    """
    return _propose(backend, True, ranks)


recover_ranks = activate_ranks


def deactivate_ranks(backend: Any, ranks: Sequence[int]) -> ProposeViewUpdateResponse:
    """Takes in-group ranks out of operations, and waits until all active ranks know."""
    return _propose(backend, False, ranks)


def join_group(backend: Any) -> None:
    """Waits until another rank activates this one, for at most 300 s."""
    group = _group(backend)
    group._comm.join()
    if group._mirror.copies is not None:
        group._mirror.copies()


def sync_after_failure(backend: Any) -> SyncAfterFailureResponse:
    """Waits for the end of the open reconciliation window, and applies the resulting view."""
    was_open, reason = _group(backend)._comm.sync()
    if reason is not None:
        return SyncAfterFailureResponse(SyncAfterFailureStatus.Rejected, reason[:255])
    status = SyncAfterFailureStatus.Reconciled if was_open else SyncAfterFailureStatus.NoPending
    return SyncAfterFailureResponse(status, "")


def extend_group_size_to(backend: Any, size: int) -> None:
    """Does nothing. A group grows when processes join it, up to `max_group_size`."""
    del backend, size
    warnings.warn("extend_group_size_to does nothing: a group grows up to its max_group_size", stacklevel=2)
