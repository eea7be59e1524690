"""The transfer engine: reads and writes of other processes' registered memory."""

from __future__ import annotations

# ruff: noqa: E402
from mooncake import _installation

_installation.check()

from collections.abc import Sequence
from enum import Enum
from typing import Any

from mooncake import _environment, _log, _mooncake
from mooncake._mooncake import InnerTransferEngine
from mooncake._segments import SharedSegment

# Whether NVIDIA's driver can be had; asked when it is read, as it loads the driver.
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
    """A message to a peer, sent when a transfer is complete."""

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
    """One process's end of all transfers. Calls that wait let other threads run."""

    TransferOpcode = TransferOpcode

    def __init__(self) -> None:
        """Takes nothing; classes made from this one may."""

    def initialize(self, local_hostname: str, metadata_server: str, protocol: str, device_name: str) -> int:
        """Starts the engine: 0, or -1 (see `last_error`).

        Without a device for "rdma", or one of those named (with commas between them), and for a protocol that is not built in, the
        engine has TCP: 0 all the same, as in the existing system, and `last_error` and the log say why. With `MC_FORCE_HCA` it is -1.
        """
        _log.start()
        return self._initialize(local_hostname, metadata_server, protocol, device_name or "")

    def initialize_ext(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str, metadata_type: str
    ) -> int:
        """`initialize` with the kind of the metadata server named beside its address."""
        if metadata_type in ("p2p", "P2PHANDSHAKE"):
            metadata_server = "P2PHANDSHAKE"
        elif metadata_type and "://" not in metadata_server and metadata_server != "P2PHANDSHAKE":
            metadata_server = f"{metadata_type}://{metadata_server}"
        return self.initialize(local_hostname, metadata_server, protocol, device_name)

    def get_engine_ptr(self) -> int:
        """A number that names the engine in this process; 0 before it is initialized."""
        engine = self.get_engine()
        return 0 if engine is None else id(engine)

    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        """Opens memory to peers; it must stay allocated until it is unregistered. 0, -7 when it overlaps, -1."""
        del location
        return self._register([buffer_addr], [capacity])

    def unregister_memory(self, buffer_addr: int) -> int:
        """Closes memory again, after waiting for transfers that use it. 0, -3 when it is not registered."""
        return self._unregister([buffer_addr])

    def batch_register_memory(
        self, buffer_addresses: Sequence[int], capacities: Sequence[int], location: str = "*"
    ) -> int:
        """`register_memory` of several ranges: all, or none and the code of the first that could not be."""
        del location
        return self._register(buffer_addresses, capacities)

    def batch_unregister_memory(self, buffer_addresses: Sequence[int]) -> int:
        """`unregister_memory` of several ranges: the first code that is not 0; the others are closed all the same."""
        return self._unregister(buffer_addresses)

    def transfer_sync_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        """Writes local memory to a peer's: 0 or -1."""
        del transport_hint
        return self._transfer(target_hostname, [buffer], [peer_buffer_address], [length], True)

    def transfer_sync_read(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        """Reads a peer's memory into local memory: 0 or -1."""
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
        """Reads or writes, and tells the peer afterwards when a message is given: 0 or -1."""
        del transport_hint
        return self._transfer(
            target_hostname, [buffer], [peer_buffer_address], [length], _is_write(opcode), _message(notify)
        )

    def transfer_submit_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        """Begins a write: the number of its batch, 0 when it could not begin."""
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
        """Several writes at once: 0, -1 when one failed."""
        del transport_hint
        return self._transfer(target_hostname, buffers, peer_buffer_addresses, lengths, True)

    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Several reads at once: 0, -1 when one failed."""
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
        """Several transfers at once, and a message afterwards when one is given: 0 or -1."""
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
        """Begins several transfers: the number of their batch, 0 when they could not begin."""
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
        """Begins several writes."""
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
        """Begins several reads."""
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
        """A write in the order of a CUDA stream.

        Begins when the stream's work so far is over, and the stream goes on when it is. `RuntimeError` when it cannot begin (no CUDA, no such
        segment), or an earlier one has failed: an error is kept and raised once, here or by `check_on_cuda`.
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
        """A read in the order of a CUDA stream."""
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
        """Several writes in the order of a CUDA stream."""
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
        """Several reads in the order of a CUDA stream."""
        del transport_hint
        self._on_stream(target_hostname, buffers, peer_buffer_addresses, lengths, False, stream_ptr)

    def check_on_cuda(self, wait: bool = False) -> None:
        """Raises the first error of a transfer in stream order that was not raised yet; with `wait`, when none is under way any more."""
        self._check_streams(wait)

    def get_notifies(self) -> list[TransferNotify]:
        """Messages of peers that arrived since the last call."""
        return [TransferNotify(name, msg) for name, msg in self._notifications()]

    def get_local_topology(self, device_name: str | None = None) -> str:
        """Which network devices are near which memory, as JSON: of all RDMA devices, or of those named (with commas between)."""
        only, without, custom = _environment.topology()
        return _mooncake.local_topology([only, _environment.names(device_name or "")], without, custom)

    def warmup_efa_segment(self, segment_name: str) -> int:
        """Nothing to warm up: 0."""
        del segment_name
        return 0


__all__ = [
    "InnerTransferEngine",
    "Read",
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
]


def __getattr__(name: str) -> Any:
    if name in ("SUPPORT_CUDA", "SUPPORT_INTRA_NVLINK", "SUPPORT_MNNVL"):
        return _mooncake.cuda_missing() is None
    if name in ("RpcInterface", "CoroRPCInterface"):
        raise AttributeError(f"mooncake.engine.{name} is not built in; see docs/python.md")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
