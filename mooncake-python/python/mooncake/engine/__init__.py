"""Transfer engine: reads and writes of registered memory in other processes."""

from __future__ import annotations

# ruff: noqa: E402
from mooncake import _installation

_installation.check()

from collections.abc import Sequence
from enum import Enum
from typing import Any

from mooncake import _log, _mooncake, _scatter
from mooncake._mooncake import InnerTransferEngine
from mooncake._rpc import (
    CoroRPCInterface,
    ReceivedData,
    ReceivedTensor,
    RpcInterface,
    create_rpc_client,
    create_rpc_server,
)
from mooncake._scatter import ScatterTransferStatus, ScatterTransferTicket
from mooncake._segments import SharedSegment

# Whether NVIDIA's driver is available. Reading the attribute loads the driver.
SUPPORT_CUDA: bool
SUPPORT_HIP = False
SUPPORT_MUSA = False
SUPPORT_MNNVL: bool
SUPPORT_EFA = False
SUPPORT_INTRA_NVLINK: bool
SUPPORT_MULTI_PROTOCOL = False


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
# Milliseconds that a scatter transfer is waited for. A transfer has a shorter limit of its own.
_SCATTER_WAIT_MS = 24 * 60 * 60 * 1000


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

    def register_memory(
        self, buffer_addr: int, capacity: int, location: str = "*", remote_accessible: bool = True
    ) -> int:
        """Registers memory for transfers. The memory must stay allocated until it is unregistered.

        Without `remote_accessible`, transfers of this process use the memory, and those of peers
        are refused. Returns 0, -7 for an overlap with memory that is open to peers, or -1.
        """
        del location
        return self._register([buffer_addr], [capacity], remote_accessible)

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
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
        nic_hint: str = "",
    ) -> int:
        """Writes local memory to memory of the target. Returns 0 or -1."""
        del transport_hint, nic_hint
        return self._transfer(target_hostname, [buffer], [peer_buffer_address], [length], True)

    def transfer_sync_read(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
        nic_hint: str = "",
    ) -> int:
        """Reads memory of the target into local memory. Returns 0 or -1."""
        del transport_hint, nic_hint
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
        nic_hint: str = "",
    ) -> int:
        """Reads or writes, and then sends a notification if one is given. Returns 0 or -1."""
        del transport_hint, nic_hint
        return self._transfer(
            target_hostname, [buffer], [peer_buffer_address], [length], _is_write(opcode), _message(notify)
        )

    def transfer_submit_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
        nic_hint: str = "",
    ) -> int:
        """Starts a write. Returns the ID of its batch, or 0 on failure.

        Query the ID. Above 65,536 batches that were not queried, the oldest ones that have ended
        are dropped, and their IDs are unknown (-1).
        """
        del transport_hint, nic_hint
        return self._submit(target_hostname, [buffer], [peer_buffer_address], [length], True)

    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
        nic_hint: str = "",
    ) -> int:
        """Runs several writes at once. Returns 0, or -1 if one failed."""
        del transport_hint, nic_hint
        return self._transfer(target_hostname, buffers, peer_buffer_addresses, lengths, True)

    def batch_transfer_sync_write_pages(
        self,
        target_hostname: str,
        src_pages: Any,
        dst_pages: Any,
        fields: Any,
        max_batch_size: int = 0,
        transport_hint: str = "",
        nic_hint: str = "",
    ) -> int:
        """Writes fields of pages. Returns 0, or -1 if a write failed; later batches are then not
        begun.

        Each row of `fields` is `(local base, local stride, base at the peer, stride at the peer,
        length)`. For each pair of page numbers, `length` bytes go from `local base + source page *
        local stride` to `base at the peer + destination page * stride at the peer`. At most
        `max_batch_size` writes run at once; 0 sets no limit.
        """
        del transport_hint, nic_hint
        return self._transfer_pages(target_hostname, (src_pages, dst_pages, fields), max_batch_size, True)

    def batch_transfer_sync_read_pages(
        self,
        target_hostname: str,
        src_pages: Any,
        dst_pages: Any,
        fields: Any,
        max_batch_size: int = 0,
        transport_hint: str = "",
        nic_hint: str = "",
    ) -> int:
        """Reads fields of pages, like `batch_transfer_sync_write_pages`. The source pages are those
        of this process here, too: bytes go from the destination pages at the peer to the source
        pages.
        """
        del transport_hint, nic_hint
        return self._transfer_pages(target_hostname, (src_pages, dst_pages, fields), max_batch_size, False)

    def _transfer_pages(self, target: str, described: tuple[Any, Any, Any], max_batch_size: int, write: bool) -> int:
        if max_batch_size < 0:
            raise ValueError("max_batch_size must not be negative")
        buffers, peer_buffers, lengths = _scatter.pages(*described)
        count = len(buffers)
        step = max_batch_size or count or 1
        for begin in range(0, count, step):
            part = slice(begin, begin + step)
            code = self._transfer(
                target, buffers[part].tolist(), peer_buffers[part].tolist(), lengths[part].tolist(), write
            )
            if code != 0:
                return code
        return 0

    def batch_transfer_sync_write_arrays(
        self,
        target_hostname: str,
        buffers: Any,
        peer_buffer_addresses: Any,
        lengths: Any,
        transport_hint: str = "",
        nic_hint: str = "",
    ) -> int:
        """Runs several writes at once. The arguments are contiguous arrays of 8-byte integers.
        Returns 0, or -1 if one failed.
        """
        del transport_hint, nic_hint
        return self._transfer(target_hostname, *_scatter.columns(buffers, peer_buffer_addresses, lengths), True)

    def batch_transfer_sync_read_arrays(
        self,
        target_hostname: str,
        buffers: Any,
        peer_buffer_addresses: Any,
        lengths: Any,
        transport_hint: str = "",
        nic_hint: str = "",
    ) -> int:
        """Runs several reads at once, like `batch_transfer_sync_write_arrays`."""
        del transport_hint, nic_hint
        return self._transfer(target_hostname, *_scatter.columns(buffers, peer_buffer_addresses, lengths), False)

    def batch_transfer_async_write_arrays(
        self,
        target_hostname: str,
        buffers: Any,
        peer_buffer_addresses: Any,
        lengths: Any,
        transport_hint: str = "",
        nic_hint: str = "",
    ) -> int:
        """Starts several writes. The arguments are contiguous arrays of 8-byte integers. Returns
        the ID of their batch, or 0 on failure.
        """
        del transport_hint, nic_hint
        return self._submit(target_hostname, *_scatter.columns(buffers, peer_buffer_addresses, lengths), True)

    def batch_transfer_async_read_arrays(
        self,
        target_hostname: str,
        buffers: Any,
        peer_buffer_addresses: Any,
        lengths: Any,
        transport_hint: str = "",
        nic_hint: str = "",
    ) -> int:
        """Starts several reads, like `batch_transfer_async_write_arrays`."""
        del transport_hint, nic_hint
        return self._submit(target_hostname, *_scatter.columns(buffers, peer_buffer_addresses, lengths), False)

    def submit_scatter_write(
        self,
        endpoint: str,
        local_base_addresses: Sequence[int],
        local_capacities: Sequence[int],
        remote_base_addresses: Sequence[int],
        remote_capacities: Sequence[int],
        local_offsets: Sequence[Sequence[int]],
        remote_offsets: Sequence[Sequence[int]],
        lengths: Sequence[Sequence[int]],
    ) -> ScatterTransferTicket:
        """Starts to write ranges of buffers to ranges of buffers at a peer.

        The buffers are pairs of a base here and a base there, with their lengths in bytes. The last
        three arguments have a list for each pair. A refused transfer has a ticket, too:
        `FAILED_DRAINED`.
        """
        return self._scatter(
            endpoint,
            local_base_addresses,
            local_capacities,
            remote_base_addresses,
            remote_capacities,
            local_offsets,
            remote_offsets,
            lengths,
            write=True,
        )

    def submit_scatter_read(
        self,
        endpoint: str,
        local_base_addresses: Sequence[int],
        local_capacities: Sequence[int],
        remote_base_addresses: Sequence[int],
        remote_capacities: Sequence[int],
        local_offsets: Sequence[Sequence[int]],
        remote_offsets: Sequence[Sequence[int]],
        lengths: Sequence[Sequence[int]],
    ) -> ScatterTransferTicket:
        """Starts to read ranges of buffers at a peer into ranges of buffers, like
        `submit_scatter_write`.
        """
        return self._scatter(
            endpoint,
            local_base_addresses,
            local_capacities,
            remote_base_addresses,
            remote_capacities,
            local_offsets,
            remote_offsets,
            lengths,
            write=False,
        )

    def scatter_transfer_sync_write_with_ticket(
        self,
        endpoint: str,
        local_base_addresses: Sequence[int],
        local_capacities: Sequence[int],
        remote_base_addresses: Sequence[int],
        remote_capacities: Sequence[int],
        local_offsets: Sequence[Sequence[int]],
        remote_offsets: Sequence[Sequence[int]],
        lengths: Sequence[Sequence[int]],
    ) -> ScatterTransferTicket:
        """Writes ranges like `submit_scatter_write`, and waits for the end of the transfer."""
        ticket = self.submit_scatter_write(
            endpoint,
            local_base_addresses,
            local_capacities,
            remote_base_addresses,
            remote_capacities,
            local_offsets,
            remote_offsets,
            lengths,
        )
        ticket.drain(_SCATTER_WAIT_MS)
        return ticket

    def scatter_transfer_sync_read_with_ticket(
        self,
        endpoint: str,
        local_base_addresses: Sequence[int],
        local_capacities: Sequence[int],
        remote_base_addresses: Sequence[int],
        remote_capacities: Sequence[int],
        local_offsets: Sequence[Sequence[int]],
        remote_offsets: Sequence[Sequence[int]],
        lengths: Sequence[Sequence[int]],
    ) -> ScatterTransferTicket:
        """Reads ranges like `submit_scatter_read`, and waits for the end of the transfer."""
        ticket = self.submit_scatter_read(
            endpoint,
            local_base_addresses,
            local_capacities,
            remote_base_addresses,
            remote_capacities,
            local_offsets,
            remote_offsets,
            lengths,
        )
        ticket.drain(_SCATTER_WAIT_MS)
        return ticket

    def _scatter(self, endpoint: str, *described: Any, write: bool) -> ScatterTransferTicket:
        ranges = _scatter.scattered(*described)
        if isinstance(ranges, str):
            self._refused(f"cannot transfer ranges: {ranges}")
            return ScatterTransferTicket(ScatterTransferStatus.FAILED_DRAINED)
        if not ranges[0]:
            return ScatterTransferTicket(ScatterTransferStatus.COMPLETED)
        batch = self._submit(endpoint, *ranges, write)
        if batch == 0:
            return ScatterTransferTicket(ScatterTransferStatus.FAILED_DRAINED)
        return ScatterTransferTicket(ScatterTransferStatus.COMPLETION_UNKNOWN, batch, self._drain)

    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
        nic_hint: str = "",
    ) -> int:
        """Runs several reads at once. Returns 0, or -1 if one failed."""
        del transport_hint, nic_hint
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
        nic_hint: str = "",
    ) -> int:
        """Runs several transfers at once, and then sends a notification if one is given. Returns 0
        or -1.
        """
        del transport_hint, nic_hint
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
        nic_hint: str = "",
    ) -> int:
        """Starts several transfers. Returns the ID of their batch, or 0 on failure."""
        del transport_hint, nic_hint
        return self._submit(target_hostname, buffers, peer_buffer_addresses, lengths, _is_write(opcode))

    def batch_transfer_async_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
        nic_hint: str = "",
    ) -> int:
        """Starts several writes. Returns the ID of their batch, or 0 on failure."""
        del transport_hint, nic_hint
        return self._submit(target_hostname, buffers, peer_buffer_addresses, lengths, True)

    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
        nic_hint: str = "",
    ) -> int:
        """Starts several reads. Returns the ID of their batch, or 0 on failure."""
        del transport_hint, nic_hint
        return self._submit(target_hostname, buffers, peer_buffer_addresses, lengths, False)

    def transfer_write_on_cuda(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        stream_ptr: int = 0,
        transport_hint: str = "",
        nic_hint: str = "",
    ) -> None:
        """Writes in the order of a CUDA stream.

        The write starts when the stream's current work is done, and the stream's later work waits
        for it.

        Raises `RuntimeError` if the write cannot start (no CUDA, unknown segment) or an earlier one
        has failed. Each error is raised once, here or by `check_on_cuda`.
        """
        del transport_hint, nic_hint
        self._on_stream(target_hostname, [buffer], [peer_buffer_address], [length], True, stream_ptr)

    def transfer_read_on_cuda(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        stream_ptr: int = 0,
        transport_hint: str = "",
        nic_hint: str = "",
    ) -> None:
        """Reads in the order of a CUDA stream, like `transfer_write_on_cuda`."""
        del transport_hint, nic_hint
        self._on_stream(target_hostname, [buffer], [peer_buffer_address], [length], False, stream_ptr)

    def batch_transfer_write_on_cuda(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        stream_ptr: int = 0,
        transport_hint: str = "",
        nic_hint: str = "",
    ) -> None:
        """Runs several writes in the order of a CUDA stream, like `transfer_write_on_cuda`."""
        del transport_hint, nic_hint
        self._on_stream(target_hostname, buffers, peer_buffer_addresses, lengths, True, stream_ptr)

    def batch_transfer_read_on_cuda(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        stream_ptr: int = 0,
        transport_hint: str = "",
        nic_hint: str = "",
    ) -> None:
        """Runs several reads in the order of a CUDA stream, like `transfer_write_on_cuda`."""
        del transport_hint, nic_hint
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
    "SUPPORT_MULTI_PROTOCOL",
    "SUPPORT_MUSA",
    "ScatterTransferStatus",
    "ScatterTransferTicket",
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
