"""`RpcInterface`: bytes and tensors to a callback in another process."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypedDict

from mooncake import _log, _mooncake

_LOGGER = logging.getLogger("mooncake.rpc")
# Head of a message that is delivered as a tensor: type, number of dimensions, and four sizes.
_HEAD = struct.Struct("<II4q")
_DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
_MAX_SIZE = 1 << 48


class _Data(TypedDict):
    source: str
    data: bytes


class ReceivedData:
    """Received bytes. Callbacks receive a dictionary instead, as with Mooncake C++."""

    def __init__(self, data: bytes = b"", source_address: str = "") -> None:
        self._data, self.source_address = data, source_address

    @property
    def data_size(self) -> int:
        """Number of bytes."""
        return len(self._data)

    def get_bytes(self) -> bytes:
        """Returns the bytes."""
        return self._data

    def get_memory_view(self) -> memoryview:
        """Returns a view of the bytes."""
        return memoryview(self._data)


class ReceivedTensor:
    """Received message that begins with the head of a tensor."""

    def __init__(
        self, data: bytes = b"", dtype: str = "", shape: list[int] | None = None, source_address: str = ""
    ) -> None:
        self._data, self.dtype, self.source_address = data, dtype, source_address
        self.shape = [] if shape is None else shape

    @property
    def total_bytes(self) -> int:
        """Number of bytes, those of the head included."""
        return len(self._data)

    def get_data_size(self) -> int:
        """Returns the number of bytes, those of the head included."""
        return len(self._data)

    def get_data_as_bytes(self) -> bytes:
        """Returns the whole message."""
        return self._data

    def get_memory_view(self) -> memoryview:
        """Returns a view of the whole message."""
        return memoryview(self._data)


class RpcInterface:
    """Sender and receiver of messages. It works with that of Mooncake C++ in both directions.

    One callback receives data, and one receives messages that begin with the head of a tensor. They
    run on threads of the receiver. A sender waits until the callback has returned.
    """

    def __init__(self) -> None:
        """Takes no arguments: the interface neither sends nor listens before `initialize`."""
        self._sender: _mooncake.MessageSender | None = None
        self._listen_at, self._threads = "", 8
        self._lock = threading.Lock()
        self._receiver: _mooncake.MessageReceiver | None = None
        self._running: list[threading.Thread] = []
        self._stopped = threading.Event()
        self._on_data: Callable[[_Data], Any] | None = None
        self._on_tensor: Callable[[ReceivedTensor], Any] | None = None

    def initialize(
        self, listen_address: str = "", thread_count: int = 0, timeout_seconds: int = 30, pool_size: int = 100
    ) -> bool:
        """Makes the interface a sender, and sets the address `host:port` of its server.

        `thread_count` is the number of callbacks that run at the same time, 8 for 0; `pool_size`
        that of the connections to one receiver. Stops a running server. Returns True.
        """
        _log.start()
        self.stop_server()
        self._sender = _mooncake.MessageSender(max(pool_size, 1), max(timeout_seconds, 1))
        self._listen_at, self._threads = listen_address, max(thread_count, 0) or 8
        return True

    def initialize_client(self, pool_size: int = 100, timeout_seconds: int = 30) -> bool:
        """Makes the interface a sender. Returns True."""
        return self.initialize("", 0, timeout_seconds, pool_size)

    def initialize_server(self, listen_address: str, thread_count: int = 8, timeout_seconds: int = 30) -> bool:
        """Sets the address of the server, which `start_server` or `start_server_async` starts.
        Returns True.
        """
        return self.initialize(listen_address, thread_count, timeout_seconds)

    def start_server(self) -> bool:
        """Starts the server, and returns when it is stopped. Returns False if it cannot start."""
        if not self.start_server_async():
            return False
        self._stopped.wait()
        return True

    def start_server_async(self) -> bool:
        """Starts the server. Returns False before `initialize`, without an address, if the server
        runs already, and if the port is in use.
        """
        with self._lock:
            if not self._listen_at or self._receiver is not None:
                return False
            try:
                receiver = _mooncake.MessageReceiver(self._listen_at, self._threads)
            except RuntimeError as error:
                _LOGGER.error("cannot start server: %s", error)
                return False
            self._receiver = receiver
            self._stopped.clear()
            self._running = [
                threading.Thread(target=self._receive, args=(receiver,), name="mooncake-rpc", daemon=True)
                for _ in range(self._threads)
            ]
            for thread in self._running:
                thread.start()
            _OPEN.add(self)
        return True

    def stop_server(self) -> None:
        """Stops the server. Waits for callbacks that run for 5 s at most, except in a callback."""
        self._stop(5)

    def _stop(self, patience: float) -> None:
        with self._lock:
            receiver, running = self._receiver, self._running
            self._receiver, self._running = None, []
            _OPEN.discard(self)
        if receiver is not None:
            receiver.stop()
            end = time.monotonic() + patience
            for thread in running:
                if thread is not threading.current_thread():
                    thread.join(max(0, end - time.monotonic()))
            self._stopped.set()

    def set_data_receive_callback(self, callback: Callable[[_Data], Any]) -> None:
        """Sets the callback for data: a dictionary with `data`, and with an empty `source`."""
        if not callable(callback):
            raise TypeError(f"incompatible function arguments: a callback is needed, not {type(callback).__name__}")
        self._on_data = callback

    def set_tensor_receive_callback(self, callback: Callable[[ReceivedTensor], Any]) -> None:
        """Sets the callback for messages that begin with the head of a tensor."""
        if not callable(callback):
            raise TypeError(f"incompatible function arguments: a callback is needed, not {type(callback).__name__}")
        self._on_tensor = callback

    def send_data(self, target_address: str, data: bytes) -> int:
        """Sends bytes to the receiver at `host:port`. Returns 0 when its callback has returned, or
        -1 on failure. A process that does not listen yet is tried for 4 s.
        """
        _bytes(data)
        return self._sent(lambda sender: sender.send_data(target_address, data))

    def send_tensor(self, target_address: str, tensor: Any) -> int:
        """Sends the bytes of a contiguous tensor like `send_data`, without shape and type."""
        memory = _memory(tensor)
        if memory is None:
            return -1
        return self._sent(lambda sender: sender.send_tensor(target_address, *memory))

    def send_data_async(self, target_address: str, data: bytes, loop: asyncio.AbstractEventLoop) -> asyncio.Future[int]:
        """Sends bytes like `send_data`. The future has the result 0, or a `RuntimeError`."""
        _bytes(data)
        future: asyncio.Future[int] = loop.create_future()
        self._known_sender().send_data_async(future, target_address, data)
        return future

    def send_tensor_async(
        self, target_address: str, tensor: Any, loop: asyncio.AbstractEventLoop
    ) -> asyncio.Future[int]:
        """Sends the bytes of a tensor like `send_tensor`. The future has the result 0, or a
        `RuntimeError`.
        """
        memory = _memory(tensor)
        if memory is None:
            raise RuntimeError("cannot send tensor: a contiguous tensor is needed")
        future: asyncio.Future[int] = loop.create_future()
        self._known_sender().send_tensor_async(future, target_address, *memory)
        return future

    def _known_sender(self) -> _mooncake.MessageSender:
        if self._sender is None:
            raise RuntimeError("cannot send: the interface is not initialized; call initialize() first")
        return self._sender

    def _sent(self, send: Callable[[_mooncake.MessageSender], None]) -> int:
        if self._sender is None:
            return -1
        try:
            send(self._sender)
        except RuntimeError as error:
            _LOGGER.error("%s", error)
            return -1
        return 0

    def _receive(self, receiver: _mooncake.MessageReceiver) -> None:
        while (message := receiver.next()) is not None:
            data, handled = message
            try:
                self._deliver(data)
            except Exception:
                _LOGGER.exception("callback failed")
            finally:
                handled.done()
            del message, data, handled

    def _deliver(self, data: bytes) -> None:
        tensor = _tensor(data)
        if tensor is None:
            if self._on_data is not None:
                self._on_data({"source": "", "data": data})
        elif self._on_tensor is not None and tensor.dtype:
            self._on_tensor(tensor)


# Interfaces whose server runs.
_OPEN: weakref.WeakSet[RpcInterface] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    # The threads must not be inside the interpreter when it ends.
    for interface in list(_OPEN):
        interface._stop(1)


def _bytes(data: Any) -> None:
    if not isinstance(data, bytes):
        raise TypeError(f"Object of type '{type(data).__name__}' is not an instance of 'bytes'")


def _memory(tensor: Any) -> tuple[int, int] | None:
    """Returns address and length of the bytes of a tensor, or `None` if it is none."""
    try:
        if any(getattr(tensor, name, None) is None for name in ("shape", "dtype")):
            return None
        if callable(is_contiguous := getattr(tensor, "is_contiguous", None)) and not is_contiguous():
            return None
        return int(tensor.data_ptr()), int(tensor.numel()) * int(tensor.element_size())
    except (AttributeError, TypeError, ValueError):
        return None


def _tensor(data: bytes) -> ReceivedTensor | None:
    """Returns the message as a tensor if it begins with the head of one. It has no type if a size
    is out of range.
    """
    if len(data) < _HEAD.size:
        return None
    kind, dims, *sizes = _HEAD.unpack_from(data)
    if not 1 <= kind <= len(_DTYPES) or dims > 4:
        return None
    shape = [size for size in sizes[:dims] if size > 0]
    dtype = "" if any(size >= _MAX_SIZE for size in sizes[:dims]) else _DTYPES[kind - 1]
    return ReceivedTensor(data, dtype, shape)


def create_rpc_client(local_rank: int = 0, world_size: int = 1) -> RpcInterface:
    """Creates a sender with at most 10 connections to one receiver. The arguments have no effect,
    as in Mooncake C++.
    """
    del local_rank, world_size
    interface = RpcInterface()
    interface.initialize_client(pool_size=10)
    return interface


def create_rpc_server(local_rank: int = 0, world_size: int = 1) -> RpcInterface:
    """Creates an interface whose server will listen at port 8080 of 0.0.0.0, or of the address in
    `MC_BIND_ADDRESS`. The arguments have no effect, as in Mooncake C++.
    """
    del local_rank, world_size
    interface = RpcInterface()
    host = os.environ.get("MC_BIND_ADDRESS") or "0.0.0.0"
    interface.initialize_server(f"[{host}]:8080" if ":" in host else f"{host}:8080")
    return interface


CoroRPCInterface = RpcInterface

__all__ = [
    "CoroRPCInterface",
    "ReceivedData",
    "ReceivedTensor",
    "RpcInterface",
    "create_rpc_client",
    "create_rpc_server",
]
