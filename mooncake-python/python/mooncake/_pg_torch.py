"""Base classes of groups, of their backends and of operations, for each version of torch.

Newer versions accept backends that are written in Python, and ask a group for its backend. Older
versions do not, so that there the group itself answers what its backend would.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import Backend, ProcessGroup
from torch.distributed import distributed_c10d

# Newest version of torch with which the package is tested.
NEWEST = "2.15"

_NAME = "mooncake"
_KIND = ProcessGroup.BackendType.CUSTOM


def _is_derivable(base: Any, *arguments: Any) -> bool:
    """Returns whether torch makes objects of a class in Python that is derived from `base`."""
    try:
        type("Probe", (base,), {})(*arguments)
    except TypeError:
        return False
    return True


def _absent(base: Any) -> dict[str, Any]:
    """Returns properties that say that a group or backend lacks all optional abilities. Those of
    torch call themselves without end in a class in Python.
    """
    names = (name for name in dir(base) if name.lstrip("_").startswith("supports_"))
    return {name: property(lambda _: False) for name in names if isinstance(getattr(base, name), property)}


class _KnownBackend(Backend):
    """Backend that torch knows."""

    vars().update(_absent(Backend))

    @property
    def options(self) -> Any:
        return Backend.Options(_NAME)


class _UnknownBackend:
    """Backend that torch does not know."""

    supports_coalescing = supports_splitting = supports_shrinking = False

    def __init__(self, rank: int, size: int) -> None:
        del rank, size

    def name(self) -> str:
        return _NAME

    def eager_connect_single_device(self, device: Any) -> None:
        """Does nothing: a group is connected from the start."""
        del device


class _GroupOfKnownBackend(ProcessGroup):
    """Group that torch asks for its backend."""

    vars().update(_absent(ProcessGroup))

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(store, rank, size)

    def _register(self, devices: list[str], backend: Any) -> None:
        """Makes `backend` that of the devices."""
        for name in devices:
            self._register_backend(torch.device(name), _KIND, backend)
        self._set_default_backend(_KIND)


class _GroupOfUnknownBackend(ProcessGroup):
    """Group that answers what torch would ask its backend."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        # The constructor with a store is not for classes in Python.
        super().__init__(rank, size)
        self._store = store
        self._of_device: dict[str, Any] = {}
        self._group_name = self._group_desc = ""

    def _register(self, devices: list[str], backend: Any) -> None:
        """Makes `backend` that of the devices."""
        for name in devices:
            self._of_device[name] = backend
            self._register_backend(torch.device(name), _KIND)

    def _get_backend(self, device: Any) -> Any:
        backend = self._of_device.get(torch.device(device).type)
        if backend is None:
            raise RuntimeError(f"cannot return backend: the group has none for this device. device={device}")
        return backend

    def get_group_store(self) -> Any:
        return self._store

    def name(self) -> str:
        return _NAME

    def _has_hooks(self) -> bool:
        return False

    # The functions in C++ keep both in the backend.

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    def getGroupDesc(self) -> str:
        return self._group_desc

    def setGroupDesc(self, text: str) -> None:
        self._group_desc = text

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc


# Whether torch accepts backends in Python, so that its operators call them.
HAS_BACKENDS = _is_derivable(Backend, 0, 1)
BackendBase: Any = _KnownBackend if HAS_BACKENDS else _UnknownBackend
GroupBase: Any = _GroupOfKnownBackend if HAS_BACKENDS else _GroupOfUnknownBackend


def _shut_down_with(shut_down_backend: Any) -> Any:
    """Returns a function for `destroy_process_group` that shuts down groups of this package."""

    def shut_down(group: Any) -> None:
        if isinstance(group, GroupBase):
            group.shutdown()
        else:
            shut_down_backend(group)

    return shut_down


# Before 2.7, torch shuts down backends of NCCL only.
if not hasattr(ProcessGroup, "shutdown") and hasattr(distributed_c10d, "_shutdown_backend"):
    distributed_c10d._shutdown_backend = _shut_down_with(distributed_c10d._shutdown_backend)

# Waits of C++ that are left for each operation. Torch keeps the part in Python of an operation
# that C++ starts since it has `ProcessGroup.abort` (2.7). Before, C++ would wait for the other part
# without end, so that operations are kept here.
_UNWAITED: dict[Any, int] | None = None if hasattr(ProcessGroup, "abort") else {}
KEEPS_WORKS = _UNWAITED is not None


def keep_until_waited(work: Any, times: int) -> None:
    """Keeps an operation until so many calls of `was_waited`, where torch does not."""
    if _UNWAITED is not None:
        _UNWAITED[work] = times


def was_waited(work: Any, is_last: bool = True) -> None:
    """Counts a wait for an operation."""
    if _UNWAITED is not None:
        left = _UNWAITED.pop(work, 0) - 1
        if left > 0 and not is_last:
            _UNWAITED[work] = left
