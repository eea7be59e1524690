"""Transfer engine: reads and writes of registered memory in other processes."""

from __future__ import annotations

# ruff: noqa: E402
from mooncake import _installation

_installation.check()

from collections.abc import Sequence
from enum import Enum
from typing import Any

from mooncake import _log, _mooncake
from mooncake._mooncake import InnerTransferEngine
from mooncake._rpc import (
    CoroRPCInterface,
    ReceivedData,
    ReceivedTensor,
    RpcInterface,
    create_rpc_client,
    create_rpc_server,
)
from mooncake._segments import SharedSegment

# Whether NVIDIA's driver is available. Reading the attribute loads the driver.
SUPPORT_CUDA: bool
SUPPORT_HIP = False
SUPPORT_MUSA = False
SUPPORT_MNNVL: bool
SUPPORT_EFA = False
SUPPORT_INTRA_NVLINK: bool


class TransferOpcode(Enum):
    """Direction of a transfer."""

    Read = 0
    Write = 1
    READ = 0
    WRITE = 1

    def __int__(self) -> int:
        return int(self.value)


Read = TransferOpcode.Read
Write = TransferOpcode.Write


class TransferNotify:
    """Message to the target, sent when a transfer is complete."""

    __slots__ = ("name", "msg", "__weakref__")

    def __init__(self, name: str = "", msg: str = "") -> None:
        self.name = name
        self.msg = msg

    def __repr__(self) -> str:
        return f"TransferNotify(name={self.name!r}, msg={self.msg!r})"


_Opcode = TransferOpcode


def _is_write(opcode: TransferOpcode) -> bool:
    if not isinstance(opcode, TransferOpcode):
        raise TypeError(f"incompatible function arguments: opcode must be a TransferOpcode, not {opcode!r}")
    return opcode is TransferOpcode.Write


def _message(notify: TransferNotify | None) -> tuple[str, str] | None:
    return None if notify is None else (notify.name, notify.msg)


class TransferEngine(_mooncake.Engine):
    """Endpoint of this process for all transfers. Calls that wait release the GIL."""

    TransferOpcode = TransferOpcode

    def __init__(self) -> None:
        """Takes no arguments. A subclass may have its own."""

    def initialize(self, local_hostname: str, metadata_server: str, protocol: str, device_name: str) -> int:
        """Starts the engine. Returns 0, or -1 on failure (see `last_error`).

        The engine falls back to TCP for a protocol that is not supported, and for "rdma" if there
        is no RDMA device or none of those in `device_name` (separated by commas). It then returns
        0, as Mooncake C++ does, and `last_error` and the log give the reason. With `MC_FORCE_HCA`
        it returns -1 instead.
        """
        _log.start()
        return self._initialize(local_hostname, metadata_server, protocol, device_name or "")

    def initialize_ext(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str, metadata_type: str
    ) -> int:
        """Starts the engine like `initialize`, with the kind of the metadata service as a separate
        argument.
        """
        if metadata_type in ("p2p", "P2PHANDSHAKE"):
            metadata_server = "P2PHANDSHAKE"
        elif metadata_type and "://" not in metadata_server and metadata_server != "P2PHANDSHAKE":
            metadata_server = f"{metadata_type}://{metadata_server}"
        return self.initialize(local_hostname, metadata_server, protocol, device_name)

    def get_engine_ptr(self) -> int:
        """Returns a number that identifies the engine in this process, or 0 before it is
        initialized.
        """
        engine = self.get_engine()
        return 0 if engine is None else id(engine)

    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        """Registers memory for transfers. The memory must stay allocated until it is unregistered.

        Returns 0, -7 for an overlap with registered memory, or -1.
        """
        del location
        return self._register([buffer_addr], [capacity])

    def unregister_memory(self, buffer_addr: int) -> int:
        """Unregisters memory after waiting for transfers that use it. Returns 0, or -3 if it is not
        registered.
        """
        return self._unregister([buffer_addr])

    def batch_register_memory(
        self, buffer_addresses: Sequence[int], capacities: Sequence[int], location: str = "*"
    ) -> int:
        """Registers several ranges, all or none. Returns 0, or the code of the first failure."""
        del location
        return self._register(buffer_addresses, capacities)

    def batch_unregister_memory(self, buffer_addresses: Sequence[int]) -> int:
        """Unregisters several ranges, also after a failure. Returns 0, or the code of the first
        failure.
        """
        return self._unregister(buffer_addresses)

    def transfer_sync_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        """Writes local memory to memory of the target. Returns 0 or -1."""
        del transport_hint
        return self._transfer(target_hostname, [buffer], [peer_buffer_address], [length], True)

    def transfer_sync_read(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        """Reads memory of the target into local memory. Returns 0 or -1."""
        del transport_hint
        return self._transfer(target_hostname, [buffer], [peer_buffer_address], [length], False)

    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: _Opcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Reads or writes, and then sends a notification if one is given. Returns 0 or -1."""
        del transport_hint
        return self._transfer(
            target_hostname, [buffer], [peer_buffer_address], [length], _is_write(opcode), _message(notify)
        )

    def transfer_submit_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        """Starts a write. Returns the ID of its batch, or 0 on failure."""
        del transport_hint
        return self._submit(target_hostname, [buffer], [peer_buffer_address], [length], True)

    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Runs several writes at once. Returns 0, or -1 if one failed."""
        del transport_hint
        return self._transfer(target_hostname, buffers, peer_buffer_addresses, lengths, True)

    def batch_transfer_sync_write_pages(
        self, target_hostname: str, src_pages: Any, dst_pages: Any, fields: Any, max_batch_size: int = 4096
    ) -> int:
        """Writes fields of pages. Returns 0, or -1 if a write failed; later batches are then not
        begun.

        Each row of `fields` is `(source, stride of source, destination, stride of destination,
        length)`. For each pair of page numbers, `length` bytes go from `source + page * stride` to
        the destination. At most `max_batch_size` writes run at once. TokenSpeed calls it.
        """
        import numpy as np

        source, target = np.asarray(src_pages, np.int64), np.asarray(dst_pages, np.int64)
        rows = np.asarray(fields, np.int64)
        if source.ndim != 1 or source.shape != target.shape or rows.ndim != 2 or rows.shape[1:] != (5,):
            raise ValueError("the pages must be two arrays of one length, and fields an array of rows of 5 numbers")
        if max_batch_size < 1:
            raise ValueError("max_batch_size must be positive")
        buffers = (rows[:, 0, None] + source * rows[:, 1, None]).ravel()
        places = (rows[:, 2, None] + target * rows[:, 3, None]).ravel()
        lengths = np.repeat(rows[:, 4], len(source))
        for begin in range(0, len(buffers), max_batch_size):
            part = slice(begin, begin + max_batch_size)
            lists = (column[part].tolist() for column in (buffers, places, lengths))
            code = self.batch_transfer_sync_write(target_hostname, *lists)
            if code != 0:
                return code
        return 0

    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Runs several reads at once. Returns 0, or -1 if one failed."""
        del transport_hint
        return self._transfer(target_hostname, buffers, peer_buffer_addresses, lengths, False)

    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: _Opcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Runs several transfers at once, and then sends a notification if one is given. Returns 0
        or -1.
        """
        del transport_hint
        return self._transfer(
            target_hostname, buffers, peer_buffer_addresses, lengths, _is_write(opcode), _message(notify)
        )

    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: _Opcode,
        transport_hint: str = "",
    ) -> int:
        """Starts several transfers. Returns the ID of their batch, or 0 on failure."""
        del transport_hint
        return self._submit(target_hostname, buffers, peer_buffer_addresses, lengths, _is_write(opcode))

    def batch_transfer_async_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Starts several writes. Returns the ID of their batch, or 0 on failure."""
        del transport_hint
        return self._submit(target_hostname, buffers, peer_buffer_addresses, lengths, True)

    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Starts several reads. Returns the ID of their batch, or 0 on failure."""
        del transport_hint
        return self._submit(target_hostname, buffers, peer_buffer_addresses, lengths, False)

    def transfer_write_on_cuda(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """Writes in the order of a CUDA stream.

        The write starts when the stream's current work is done, and the stream's later work waits
        for it.

        Raises `RuntimeError` if the write cannot start (no CUDA, unknown segment) or an earlier one
        has failed. Each error is raised once, here or by `check_on_cuda`.
        """
        del transport_hint
        self._on_stream(target_hostname, [buffer], [peer_buffer_address], [length], True, stream_ptr)

    def transfer_read_on_cuda(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """Reads in the order of a CUDA stream, like `transfer_write_on_cuda`."""
        del transport_hint
        self._on_stream(target_hostname, [buffer], [peer_buffer_address], [length], False, stream_ptr)

    def batch_transfer_write_on_cuda(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """Runs several writes in the order of a CUDA stream, like `transfer_write_on_cuda`."""
        del transport_hint
        self._on_stream(target_hostname, buffers, peer_buffer_addresses, lengths, True, stream_ptr)

    def batch_transfer_read_on_cuda(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """Runs several reads in the order of a CUDA stream, like `transfer_write_on_cuda`."""
        del transport_hint
        self._on_stream(target_hostname, buffers, peer_buffer_addresses, lengths, False, stream_ptr)

    def check_on_cuda(self, wait: bool = False) -> None:
        """Raises the first error of a transfer in stream order that was not raised yet.

        With `wait`, it first waits until no such transfer is running.
        """
        self._check_streams(wait)

    def get_notifies(self) -> list[TransferNotify]:
        """Returns notifications that arrived since the last call."""
        return [TransferNotify(name, msg) for name, msg in self._notifications()]

    def get_local_topology(self, device_name: str | None = None) -> str:
        """Returns the network devices near each memory, as JSON.

        `device_name` restricts the RDMA devices to those named, separated by commas.
        """
        return _mooncake.local_topology(device_name or "")

    def warmup_efa_segment(self, segment_name: str) -> int:
        """Does nothing and returns 0. There is no EFA transport."""
        del segment_name
        return 0


__all__ = [
    "CoroRPCInterface",
    "InnerTransferEngine",
    "Read",
    "ReceivedData",
    "ReceivedTensor",
    "RpcInterface",
    "SUPPORT_CUDA",
    "SUPPORT_EFA",
    "SUPPORT_HIP",
    "SUPPORT_INTRA_NVLINK",
    "SUPPORT_MNNVL",
    "SUPPORT_MUSA",
    "SharedSegment",
    "TransferEngine",
    "TransferNotify",
    "TransferOpcode",
    "Write",
    "create_rpc_client",
    "create_rpc_server",
]


def __getattr__(name: str) -> Any:
    if name in ("SUPPORT_CUDA", "SUPPORT_INTRA_NVLINK", "SUPPORT_MNNVL"):
        return _mooncake.cuda_missing() is None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
