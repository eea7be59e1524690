"""This process in its world: settings, rendezvous through the store of torch, and the end."""

from __future__ import annotations

import atexit
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from mooncake import _log, _mooncake

# Key of the coordinator's address, the only key of this package in the store of torch.
KEY = "coordinator_addr"
# Longest time, in seconds, in which rank 0 puts an address that it listens at.
_MEET_WITHIN = 300.0
# Seconds of one attempt to reach an address, and between two attempts.
_PROBE_WITHIN = 5.0
_LOOK_AGAIN_AFTER = 0.05


class _Process:
    """Settings of this process, and its context after the first group."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.host = "127.0.0.1"
        self.devices: list[str] = []
        self.engine: Any = None
        self.collective_timeout_us = 10_000_000
        self.p2p_timeout_us = 10_000_000
        self.context: _mooncake.GroupContext | None = None
        self.coordinator = ""
        # Number of groups that are open.
        self.groups = 0
        # The first store. On rank 0 it serves processes that join later.
        self.store: Any = None


_PROCESS = _Process()


def _fixed(what: str) -> RuntimeError:
    return RuntimeError(f"cannot set {what}: a process group was created with another one; set it before the first")


def set_host_ip(host: str) -> None:
    """Sets the address at which other ranks reach this process, 127.0.0.1 by default."""
    with _PROCESS.lock:
        if _PROCESS.context is not None and host != _PROCESS.host:
            raise _fixed("host address")
        _PROCESS.host = host


def set_device_filter(filters: Sequence[str]) -> None:
    """Restricts the network devices of this process to those named."""
    with _PROCESS.lock:
        wanted = sorted(set(filters))
        if _PROCESS.context is not None and wanted != _PROCESS.devices:
            raise _fixed("device filter")
        _PROCESS.devices = wanted


def set_transfer_engine(engine: Any) -> None:
    """Makes process groups use an initialized `mooncake.engine.TransferEngine`. With `None`, they
    start one of their own. The host of the engine replaces that of `set_host_ip`.
    """
    with _PROCESS.lock:
        inner = None
        if engine is not None:
            inner = engine.get_engine() if engine.get_engine_ptr() else None
            if inner is None:
                raise RuntimeError("cannot set transfer engine: it is not initialized; call initialize first")
        if _PROCESS.context is not None and inner is not _PROCESS.engine:
            raise _fixed("transfer engine")
        _PROCESS.engine = inner


def _microseconds(value: int) -> int:
    if value < 0:
        raise ValueError(f"cannot set time limit: it is negative. microseconds={value}")
    return int(value)


def set_collective_timeout_us(us: int) -> None:
    """Sets the time after which a collective operation examines the ranks that it waits for."""
    with _PROCESS.lock:
        _PROCESS.collective_timeout_us = _microseconds(us)
        _apply_timeouts()


def set_p2p_timeout_us(us: int) -> None:
    """Sets the time after which a point-to-point operation examines the other rank."""
    with _PROCESS.lock:
        _PROCESS.p2p_timeout_us = _microseconds(us)
        _apply_timeouts()


def set_fault_reconciliation_window_us(us: int) -> None:
    """Sets the longest time in which the ranks collect evidence about a failure. That of rank 0
    counts.
    """
    _mooncake.set_fault_reconciliation_window(_microseconds(us))


def _apply_timeouts() -> None:
    if _PROCESS.context is not None:
        _PROCESS.context.set_timeouts(_PROCESS.collective_timeout_us, _PROCESS.p2p_timeout_us)


def _responds(address: str) -> bool:
    """Returns whether a process listens at an address."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _PROBE_WITHIN):
            return True
    except OSError:
        return False


def _connect(context: _mooncake.GroupContext, store: Any) -> None:
    """Connects this process to the coordinator, whose address rank 0 puts into the store.

    A program that starts again, as with `torchrun --max-restarts`, finds the address of the run
    before, until rank 0 has put its own. So an address without a listener is read again.
    """
    store.wait([KEY])
    end = time.monotonic() + min(_MEET_WITHIN, store.timeout.total_seconds())
    while True:
        address = store.get(KEY).decode()
        if not _responds(address) and time.monotonic() < end:
            time.sleep(_LOOK_AGAIN_AFTER)
            continue
        try:
            return context.connect(address)
        except RuntimeError:
            # Another process may have got the port of the coordinator that has ended.
            if store.get(KEY).decode() == address:
                raise


def _context(store: Any, rank: int, is_world: bool) -> _mooncake.GroupContext:
    """Returns the context of this process. The first group starts it and meets the coordinator."""
    with _PROCESS.lock:
        context = _PROCESS.context
        if context is None:
            _log.start()
            context = _mooncake.GroupContext(rank, _PROCESS.host, _PROCESS.devices, _PROCESS.engine)
            if rank == 0:
                _PROCESS.coordinator = context.serve()
                store.set(KEY, _PROCESS.coordinator)
                context.connect(_PROCESS.coordinator)
            else:
                _connect(context, store)
            _PROCESS.context = context
            _PROCESS.store = store
            _apply_timeouts()
        elif context.rank != rank:
            raise RuntimeError(
                f"cannot create group: this process has another rank in its world. rank={rank} before={context.rank}; "
                "start a new process"
            )
        elif rank == 0 and is_world:
            # Processes that join later read the new store.
            store.set(KEY, _PROCESS.coordinator)
        return context


def _opened() -> None:
    with _PROCESS.lock:
        _PROCESS.groups += 1


def _closed() -> None:
    with _PROCESS.lock:
        _PROCESS.groups -= 1


@atexit.register
def _leave() -> None:
    """Leaves the world at the end of the interpreter, unless groups are still open."""
    with _PROCESS.lock:
        if _PROCESS.context is not None and _PROCESS.groups == 0:
            _PROCESS.context.shut_down()
