"""Native half of the package."""

from asyncio import Future
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self, final

from typing_extensions import disjoint_base

from mooncake._types import ObjectDataType, ReplicaStatus, SoftPinAction, TaskStatus, TaskType

__all__ = [
    "BufferHandle",
    "BufferLease",
    "BufferLeaseView",
    "BufferPool",
    "BusyError",
    "Canceller",
    "CorruptError",
    "Descriptor",
    "DiskDescriptor",
    "Engine",
    "ExistOptions",
    "ExpertLayout",
    "ExpertRoutes",
    "ExpertSizes",
    "ForkedError",
    "GroupCommunicator",
    "GroupContext",
    "GroupOperation",
    "Handled",
    "InnerTransferEngine",
    "InvalidArgumentError",
    "LastError",
    "Located",
    "MemoryDescriptor",
    "MessageReceiver",
    "MessageSender",
    "MooncakeError",
    "MooncakeHostMemAllocator",
    "NoSpaceError",
    "NotFoundError",
    "ObjectInfo",
    "P2PStore",
    "QueryTaskResponse",
    "RangedReadSnapshot",
    "ReplicaDescriptor",
    "ReplicateConfig",
    "Store",
    "UnavailableError",
    "UnsupportedError",
    "WebGuard",
    "__version__",
    "_after_fork",
    "_close_all",
    "_next_record",
    "_start_log",
    "_stop_log",
    "add_up_rows",
    "bind_to_numa_node",
    "check_memory",
    "cuda_missing",
    "device_of",
    "get_alloc_func_addr",
    "get_free_func_addr",
    "local_topology",
    "run_bench",
    "run_client",
    "run_master",
    "run_tool",
    "set_fault_reconciliation_window",
]

__version__: str

# Object with the buffer protocol.
_ReadableBuffer = Any

class MooncakeError(RuntimeError):
    """Base class of mooncake's exceptions."""

    code: int

class InvalidArgumentError(MooncakeError):
    """Invalid argument or call."""

class NotFoundError(MooncakeError):
    """No such object, segment, client or task."""

class NoSpaceError(MooncakeError):
    """Not enough free space."""

class BusyError(MooncakeError):
    """Object is in use, being written, or already exists."""

class UnavailableError(MooncakeError):
    """Master or client is unreachable, or a call timed out."""

class CorruptError(MooncakeError):
    """Bytes differ from those written."""

class UnsupportedError(MooncakeError):
    """Feature is not built, not enabled, or not possible on this host."""

class ForkedError(MooncakeError):
    """Use of mooncake in the child of a fork."""

@final
class BufferHandle:
    """Value in the store's memory. The memory is freed when the last view of it is gone."""

    def __repr__(self, /) -> str: ...
    def __len__(self, /) -> int: ...
    def ptr(self, /) -> int:
        """Returns the address of the first byte."""
    def size(self, /) -> int:
        """Returns the length in bytes."""
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class BufferLease:
    """Leased memory of a `BufferPool`."""

    def __len__(self, /) -> int: ...
    def release(self, /) -> None:
        """Returns the memory to the pool. Raises `RuntimeError` while a view of it exists. Can be
        called again.
        """
    def __enter__(self, /) -> Self: ...
    def __exit__(self, /, exc_type: Any = None, exc_value: Any = None, traceback: Any = None) -> None: ...
    @property
    def ptr(self) -> int:
        """Address, for calls that name memory by address. Raises `RuntimeError` after release."""
    @property
    def size(self) -> int:
        """Requested length in bytes."""
    @property
    def buffer(self) -> memoryview:
        """New writable view of the memory. Raises `BufferError` after release."""

@final
class BufferLeaseView:
    """Owner of a lease's memory on behalf of a view."""

    def __new__(cls) -> Self: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __release_buffer__(self, buffer: memoryview, /) -> None: ...

@final
class BufferPool:
    """Pool of registered memory: the store's local buffer first, then newly allocated memory."""

    def __new__(
        cls,
        store: Any,
        max_bytes: int = ...,
        min_size_class: int = ...,
        max_size_class: int | None = None,
        alignment: int = ...,
        block_on_exhaustion: bool = True,
        default_timeout: float | None = None,
        max_regions: int | None = None,
        prewarm_size: int | None = None,
        prewarm_count: int = ...,
    ) -> Self: ...
    def acquire(self, /, size: int, block: bool | None = None, timeout: float | None = None) -> BufferLease:
        """Leases memory. If the pool is exhausted, this waits for at most `timeout` seconds.
        Without `block` it raises `RuntimeError` at once. For two seconds, those that wait are
        served in order; then those that fit first.
        """
    def buffer(self, /, size: int, block: bool | None = None, timeout: float | None = None) -> BufferLease:
        """Leases memory like `acquire`, for use in a `with` statement."""
    def prewarm(self, /, size: int, count: int) -> None:
        """Does nothing: this pool needs no warm-up."""
    def close(self, /) -> None:
        """Closes the pool. Raises `RuntimeError` while a lease is active. Can be called again."""
    def __enter__(self, /) -> Self: ...
    def __exit__(self, /, exc_type: Any = None, exc_value: Any = None, traceback: Any = None) -> None: ...

@final
class Canceller:
    """Canceller of work that nothing awaits any more."""

    def __call__(self, /, future: Any) -> None: ...

@final
class Descriptor:
    """Range of a client's memory."""

    def __repr__(self, /) -> str: ...
    @property
    def buffer_address(self) -> int:
        """Address in the client's process."""
    @property
    def size(self) -> int:
        """Length in bytes."""
    @property
    def transport_endpoint(self) -> str:
        """Endpoint of the client."""

@final
class DiskDescriptor:
    """Replica in a file."""

    @property
    def object_size(self) -> int:
        """Length in bytes."""
    @property
    def file_path(self) -> str:
        """Path of the file."""

@disjoint_base
class Engine:
    """Engine with the calls that `mooncake.engine` is built on."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self: ...
    def _initialize(self, /, local_hostname: str, metadata_server: str, protocol: str, devices: str) -> int:
        """Starts the engine and returns 0, or -1 on failure. If it returns 0 and records an error,
        the engine uses TCP instead of the protocol, for the reason in that error.
        """
    def get_engine(self, /) -> InnerTransferEngine | None:
        """Returns the engine, for a store to share, or `None` before it is initialized."""
    def get_rpc_port(self, /) -> int:
        """Returns the port where this engine answers handshakes, or 0 before it is initialized."""
    def last_error(self, /) -> LastError | None:
        """Returns the last error of this engine, or `None` if there was none."""
    def _register(self, /, addresses: Sequence[int], lengths: Sequence[int], is_open: bool = True) -> int:
        """Registers ranges for transfers, all or none, open to peers or not. Returns 0 or an engine
        error code.
        """
    def _unregister(self, /, addresses: Sequence[int]) -> int: ...
    def allocate_managed_buffer(self, /, length: int) -> int:
        """Allocates registered memory and returns its address, or 0 on failure."""
    def free_managed_buffer(self, /, buffer_addr: int, length: int) -> int:
        """Frees managed memory. Returns 0, or -1 if the address is not that of a managed buffer."""
    def get_first_buffer_address(self, /, segment_name: str) -> int:
        """Returns the address of a segment's first buffer, or 0 if the segment is unknown or has
        none.
        """
    def _transfer(
        self,
        /,
        target: str,
        buffers: Sequence[int],
        peers: Sequence[int],
        lengths: Sequence[int],
        write: bool,
        notify: tuple[str, str] | None = None,
    ) -> int: ...
    def _submit(
        self, /, target: str, buffers: Sequence[int], peers: Sequence[int], lengths: Sequence[int], write: bool
    ) -> int: ...
    def _on_stream(
        self,
        /,
        target: str,
        buffers: Sequence[int],
        peers: Sequence[int],
        lengths: Sequence[int],
        write: bool,
        stream: int,
    ) -> None:
        """Starts transfers when the current work of a CUDA stream is done, and makes the stream's
        later work wait for them. An error of these transfers is kept and raised by the next such
        call, or by `check_on_cuda`.
        """
    def _check_streams(self, /, wait: bool) -> None:
        """Raises the first error of a transfer in stream order that was not raised yet. With
        `wait`, waits until no such transfer is running.
        """
    def transfer_check_status(self, /, batch_id: int) -> int:
        """Returns the status of a batch: 1 done, 0 running, -1 failed or unknown, -2 timed out."""
    def _drain(self, /, batch_id: int, timeout_ms: int) -> int:
        """Waits for a batch for a limited time, and returns its status as `transfer_check_status`
        does.
        """
    def _refused(self, /, reason: str) -> None:
        """Records the reason why a call was refused, for `last_error`."""
    def get_batch_transfer_status(self, /, batch_ids: list[int]) -> int:
        """Waits for batches and returns 0 if all succeeded, else -1. A finished batch can be
        queried again.
        """
    def write_bytes_to_buffer(self, /, dest_address: int, data: _ReadableBuffer | str, length: int) -> int:
        """Copies bytes into registered memory. Returns 0 or -1."""
    def read_bytes_from_buffer(self, /, source_address: int, length: int) -> bytes:
        """Copies bytes out of registered memory."""
    def _notifications(self, /) -> list[tuple[str, str]]:
        """Returns the notifications that arrived since the last call, each as name and message."""
    def send_probe(self, /, peer_server_name: str) -> int:
        """Probes the engine of a target. Returns 0 if it answers, else -102."""
    def _close(self, /) -> None:
        """Withdraws the engine's memory from the metadata service and closes the engine."""

@final
class InnerTransferEngine:
    """Engine that a store can share."""

    def __repr__(self, /) -> str: ...

@final
class ObjectInfo:
    """Object in the catalogue."""

    def __repr__(self, /) -> str: ...
    @property
    def name(self, /) -> str:
        """Name of the object."""
    @property
    def size(self, /) -> int:
        """Length of the object in bytes."""
    @property
    def max_shard_size(self, /) -> int:
        """Maximum length of a shard in bytes."""
    @property
    def sizes(self, /) -> list[int]:
        """Lengths of the ranges of memory that the object consists of, in bytes."""

@disjoint_base
class P2PStore:
    """Store with the calls that `mooncake.p2p` is built on. Each blocking call has a twin that
    resolves a future.
    """

    def __new__(
        cls,
        local_hostname: str,
        metadata_server: str,
        protocol: str = "tcp",
        device_name: str = "",
        *,
        streams: int = 4,
        readers_per_source: int = 4,
        lease: float = 30.0,
        catalogue_timeout: float = 30.0,
        stall_timeout: float = 120.0,
    ) -> Self: ...
    @property
    def segment_name(self, /) -> str:
        """Name of the segment of this node: host and port."""
    def _register(self, /, name: str, buffers: Sequence[Any], max_shard_size: int, force_create: bool) -> None: ...
    def _async_register(
        self, /, future: Future[Any], name: str, buffers: Sequence[Any], max_shard_size: int, force_create: bool
    ) -> None: ...
    def _get_replica(
        self,
        /,
        name: str,
        buffers: Sequence[Any],
        resume: bool,
        on_progress: Callable[[int, int], object] | None,
    ) -> None: ...
    def _async_get_replica(
        self,
        /,
        future: Future[Any],
        name: str,
        buffers: Sequence[Any],
        resume: bool,
        on_progress: Callable[[int, int], object] | None,
    ) -> None: ...
    def _unregister(self, /, name: str) -> None: ...
    def _async_unregister(self, /, future: Future[Any], name: str) -> None: ...
    def _delete_replica(self, /, name: str) -> None: ...
    def _async_delete_replica(self, /, future: Future[Any], name: str) -> None: ...
    def _list(self, /, prefix: str) -> list[ObjectInfo]: ...
    def _async_list(self, /, future: Future[Any], prefix: str) -> None: ...
    def _find(self, /, name: str) -> ObjectInfo | None: ...
    def _async_find(self, /, future: Future[Any], name: str) -> None: ...
    def _close(self, /) -> None: ...
    def _async_close(self, /, future: Future[Any]) -> None: ...

@final
class MessageSender:
    """Sender of messages to any process."""

    def __new__(cls, max_connections: int, timeout_seconds: int) -> Self: ...
    def send_data(self, /, to: str, data: bytes) -> None:
        """Sends bytes to `host:port`. Returns when the receiver has handled them. Raises a
        `MooncakeError` on failure.
        """
    def send_tensor(self, /, to: str, address: int, len: int) -> None:
        """Sends the bytes of a tensor."""
    def send_data_async(self, /, future: Future[Any], to: str, data: bytes) -> None:
        """Sends bytes like `send_data` without waiting, and resolves the future of an event loop.
        """
    def send_tensor_async(self, /, future: Future[Any], to: str, address: int, len: int) -> None:
        """Sends the bytes of a tensor like `send_tensor` without waiting. They are copied first."""

@final
class MessageReceiver:
    """Receiver of messages at a port, until it is stopped."""

    def __new__(cls, address: str, waiting: int) -> Self: ...
    @property
    def address(self) -> str:
        """Address of the port."""
    def next(self, /) -> tuple[bytes, Handled] | None:
        """Waits for the next message: its bytes, and the reply to send when it has been handled.
        Returns `None` once the receiver is stopped. For threads other than the first one.
        """
    def stop(self, /) -> None:
        """Stops the receiver. Messages that are being handled are waited for. Can be called again.
        """

@final
class WebGuard:
    """Rules by which an HTTP server refuses requests of websites."""

    def __new__(cls, allowed: str, own: Sequence[str]) -> Self: ...
    def refusal(
        self,
        /,
        method: str,
        authority: str | None,
        headers: Sequence[tuple[str, bytes]],
        everything: bool,
    ) -> str | None:
        """Returns why a request is refused, or `None` if it is served.

        `authority` is the host of the request line, if it has one. With `everything`, the rules
        hold for reads, too.
        """

@final
class Handled:
    """Reply to a message."""

    def done(self, /) -> None:
        """Sends the reply. The drop of this object sends it, too."""

@final
class LastError:
    """Last error of a store or engine."""

    def __repr__(self, /) -> str: ...
    def __str__(self, /) -> str: ...
    @property
    def time(self) -> float:
        """Time of day of the error, in seconds since 1970 UTC. A later call that succeeds does not
        change it.
        """
    @property
    def message(self) -> str:
        """Description of the error and, where known, how to fix it."""
    @property
    def code(self) -> int:
        """Number that the call returned."""
    @property
    def peer(self) -> str:
        """Client or master that the error concerns. Empty if there is none."""
    @property
    def name(self) -> str:
        """Name of the code in Mooncake C++."""

@final
class Located:
    """Object found by `_heads`, for reads of its parts."""

    @property
    def size(self) -> int:
        """Length of the object in bytes."""

@disjoint_base
class ExistOptions:
    """Settings of an existence check."""

    def __new__(cls) -> Self: ...
    @property
    def prefetch_to_memory(self) -> bool:
        """True if objects that are found only on disks return to memory, in the background."""
    @prefetch_to_memory.setter
    def prefetch_to_memory(self, value: bool) -> None: ...

@final
class RangedReadSnapshot:
    """Located objects, for several reads of ranges."""

@final
class MemoryDescriptor:
    """Replica in memory."""

    @property
    def buffer_descriptor(self) -> Descriptor:
        """Location of the replica."""

@final
class MooncakeHostMemAllocator:
    """Allocator of host memory that can be shared with other processes. `MC_STORE_USE_HUGEPAGE=1`
    selects huge pages.
    """

    def __new__(cls) -> Self: ...
    def alloc(self, /, size: int) -> int:
        """Allocates memory and returns its address. Raises `RuntimeError` on failure."""
    def free(self, /, ptr: int) -> int:
        """Frees memory of `alloc`. Returns 0, or -1 if it was not allocated here."""

@final
class QueryTaskResponse:
    """State of a copy or move task."""

    def __repr__(self, /) -> str: ...
    @property
    def id(self) -> tuple[int, int]:
        """ID of the task, in two halves."""
    @property
    def type(self) -> TaskType:
        """Kind of the task, as a `TaskType`."""
    @property
    def status(self) -> TaskStatus:
        """Progress of the task, as a `TaskStatus`."""
    @property
    def created_at_ms_epoch(self) -> int:
        """Creation time, in milliseconds since 1970."""
    @property
    def last_updated_at_ms_epoch(self) -> int:
        """Time of the last change, in milliseconds since 1970."""
    @property
    def assigned_client(self) -> tuple[int, int]:
        """ID of the client that runs the task, in two halves."""
    @property
    def message(self) -> str:
        """Description of the task's outcome."""

@final
class ReplicaDescriptor:
    """Replica of an object."""

    def __repr__(self, /) -> str: ...
    def is_memory_replica(self, /) -> bool:
        """Returns whether the replica is in a client's memory."""
    def is_disk_replica(self, /) -> bool:
        """Returns whether the replica is a file on a shared file system."""
    def is_local_disk_replica(self, /) -> bool:
        """Returns whether the replica is on a client's own disk."""
    def get_memory_descriptor(self, /) -> MemoryDescriptor:
        """Returns the location of a replica in memory. Raises `RuntimeError` for any other replica.
        """
    def get_disk_descriptor(self, /) -> DiskDescriptor:
        """Returns the file of a replica on a shared file system. Raises `RuntimeError` for any
        other replica.
        """
    @property
    def status(self) -> ReplicaStatus:
        """State of the replica, as a `ReplicaStatus`."""

@disjoint_base
class ReplicateConfig:
    """Settings for storing an object: replicas, pins, placement and groups."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self: ...
    def __repr__(self, /) -> str: ...
    def __str__(self, /) -> str: ...
    def __copy__(self, /) -> Self: ...
    def __deepcopy__(self, /, memo: Any) -> Self: ...
    @property
    def prefer_alloc_in_same_node(self) -> bool: ...
    @prefer_alloc_in_same_node.setter
    def prefer_alloc_in_same_node(self, value: bool | int | str) -> None: ...
    @property
    def group_ids(self) -> list[str] | None: ...
    @group_ids.setter
    def group_ids(self, value: Sequence[str] | None) -> None: ...
    @property
    def session_ids(self) -> list[str] | None:
        """Session of each key, for events. `None` for no sessions."""
    @session_ids.setter
    def session_ids(self, value: Sequence[str] | None) -> None: ...
    @property
    def preferred_hca_names(self) -> list[str] | None:
        """Names of preferred RDMA devices."""
    @preferred_hca_names.setter
    def preferred_hca_names(self, value: Sequence[str] | None) -> None: ...
    @property
    def per_key_preferred_hca_names(self) -> list[list[str]] | None:
        """Names of preferred RDMA devices for each key."""
    @per_key_preferred_hca_names.setter
    def per_key_preferred_hca_names(self, value: Sequence[Sequence[str]] | None) -> None: ...
    @property
    def residency_affinity_ids(self) -> list[str] | None:
        """Name of the set of weights that each key belongs to, in Mooncake C++."""
    @residency_affinity_ids.setter
    def residency_affinity_ids(self, value: Sequence[str] | None) -> None: ...
    @property
    def with_hard_pin(self) -> bool: ...
    @with_hard_pin.setter
    def with_hard_pin(self, value: bool) -> None: ...
    @property
    def dfs_replica_num(self) -> int: ...
    @dfs_replica_num.setter
    def dfs_replica_num(self, value: int) -> None: ...
    @property
    def preferred_nof_segments(self) -> list[str]: ...
    @preferred_nof_segments.setter
    def preferred_nof_segments(self, value: list[str]) -> None: ...
    @property
    def data_type(self) -> ObjectDataType: ...
    @data_type.setter
    def data_type(self, value: ObjectDataType) -> None: ...
    @property
    def soft_pin_ttl_ms(self) -> int | None: ...
    @soft_pin_ttl_ms.setter
    def soft_pin_ttl_ms(self, value: int | None) -> None: ...
    @property
    def soft_pin_action(self) -> SoftPinAction: ...
    @soft_pin_action.setter
    def soft_pin_action(self, value: SoftPinAction) -> None: ...
    @property
    def preferred_segments(self) -> list[str]: ...
    @preferred_segments.setter
    def preferred_segments(self, value: list[str]) -> None: ...
    @property
    def nof_replica_num(self) -> int: ...
    @nof_replica_num.setter
    def nof_replica_num(self, value: int) -> None: ...
    @property
    def replica_num(self) -> int: ...
    @replica_num.setter
    def replica_num(self, value: int) -> None: ...
    @property
    def parent_key(self) -> str | None:
        """Key of the block before the first key of a put. `None` for no hint."""

    @parent_key.setter
    def parent_key(self, value: str | None) -> None: ...
    @property
    def position(self) -> int | None:
        """Number of blocks of the chain before the first key of a put. `None` for no hint."""

    @position.setter
    def position(self, value: int | None) -> None: ...
    @property
    def keep(self) -> Literal["front", "whole"] | None:
        """Part of the chain that is of use: `"front"` or `"whole"`. `None` for no hint."""

    @keep.setter
    def keep(self, value: Literal["front", "whole"] | None) -> None: ...
    @property
    def ttl_ms(self) -> int | None:
        """Time in milliseconds after which reads of the objects miss. `None` for no limit."""

    @ttl_ms.setter
    def ttl_ms(self, value: int | None) -> None: ...
    @property
    def delete_after_read(self) -> bool:
        """True if the first read of each object is the last one."""

    @delete_after_read.setter
    def delete_after_read(self, value: bool) -> None: ...
    @property
    def with_soft_pin(self) -> bool: ...
    @with_soft_pin.setter
    def with_soft_pin(self, value: bool) -> None: ...
    @property
    def preferred_segment(self) -> str: ...
    @preferred_segment.setter
    def preferred_segment(self, value: str) -> None: ...

@disjoint_base
class Store:
    """Client of a cluster's store, without the calls that need Python packages."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self: ...
    def get_replica_desc(self, /, key: str) -> list[ReplicaDescriptor]:
        """Returns the replicas of an object. Empty if the key does not exist."""
    def batch_replica_clear(self, /, keys: list[str], segment_name: str = ...) -> list[str]:
        """Removes replicas of objects that this store wrote and that have no lease: those in a
        segment, or all. Returns the affected keys.
        """
    def create_copy_task(self, /, key: str, targets: list[str]) -> tuple[tuple[int, int], int]:
        """Creates a task that copies an object to each of these segments. Returns the task's ID and
        0, or a negative code.
        """
    def create_move_task(self, /, key: str, source: str, target: str) -> tuple[tuple[int, int], int]:
        """Creates a task that moves the replica in one segment to another. Returns the task's ID
        and 0, or a negative code.
        """
    def query_task(self, /, task_id: Sequence[int]) -> tuple[QueryTaskResponse | None, int]:
        """Returns the state of a task and 0, or `None` and a negative code."""
    def batch_get_replica_desc(self, /, keys: list[str]) -> dict[str, list[ReplicaDescriptor]]:
        """Returns the replicas of many objects by key. Absent keys are left out."""
    def get_prefix_replica_desc(self, /, keys: list[str]) -> list[list[ReplicaDescriptor]]:
        """Returns the replicas of each object that `prefix_hits` counts, in the order of the keys.
        Empty after an error.
        """
    def _setup(self, /, config: dict[str, Any], engine: InnerTransferEngine | None = None) -> int:
        """Joins a cluster. Returns 0, -600 for invalid settings, or -1 if the cluster cannot be
        reached.
        """
    def close(self, /) -> int:
        """Leaves the cluster, which removes the objects in this client's memory. Returns 0, also if
        the master cannot be notified. Can be called again.
        """
    def health_check(self, /) -> int:
        """Returns 0 if the master responds, 1 before setup and after close, 2 if the master does
        not respond.
        """
    def get_hostname(self, /) -> str:
        """Returns the name of this client in the cluster, `host:port`. Empty before setup."""
    def last_error(self, /) -> LastError | None:
        """Returns the last error of this store: code, name, message and peer. `None` if there was
        none.
        """
    def raise_last_error(self, /) -> None:
        """Raises the last error of this store as a subclass of `mooncake.MooncakeError`. Does
        nothing if there was none.
        """
    def _get_pyclient_capsule(self, /) -> Store | None:
        """Returns this object while it is set up, else `None`."""
    def _note(self, /, code: int, message: str) -> int:
        """Records an error that the Python half has found, and returns its code."""
    def register_buffer(self, /, buffer_ptr: int, size: int) -> int:
        """Registers memory for calls that name memory by address. The memory must stay allocated
        until it is unregistered. It may overlap registered memory; each registration is ended by an
        `unregister_buffer` of its own. Returns 0, or -600 for invalid memory.
        """
    def unregister_buffer(self, /, buffer_ptr: int) -> int:
        """Unregisters memory after waiting for transfers that use it. Memory that another
        registration covers stays registered; of several that begin at the address, the shortest is
        ended. Returns 0, or -600 if none begins there.
        """
    def put_from(self, /, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        """Stores a value from memory of the program like `put`, without a copy. Memory that is not
        registered is accepted where the transport needs no registration, as over TCP.
        """
    def upsert_from(self, /, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        """Stores a value from memory of the program like `upsert`."""
    def put_from_with_metadata(
        self,
        /,
        key: str,
        buffer_ptr: int,
        metadata_buffer_ptr: int,
        size: int,
        metadata_size: int,
        config: ReplicateConfig | None = None,
    ) -> int:
        """Stores metadata and data from memory of the program as one value, metadata first."""
    def batch_put_from(
        self, /, keys: list[str], buffer_ptrs: list[int], sizes: list[int], config: ReplicateConfig | None = None
    ) -> list[int]:
        """Stores many values like `put_from`. Returns a code for each."""
    def batch_upsert_from(
        self, /, keys: list[str], buffer_ptrs: list[int], sizes: list[int], config: ReplicateConfig | None = None
    ) -> list[int]:
        """Stores many values like `upsert_from`. Returns a code for each."""
    def batch_put_from_multi_buffers(
        self,
        /,
        keys: list[str],
        all_buffer_ptrs: list[list[int]],
        all_sizes: list[list[int]],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Stores many values like `put_from`, each from several consecutive buffers. Returns a code
        for each.
        """
    def get_into(self, /, key: str, buffer_ptr: int, size: int) -> int:
        """Reads a value into memory of the program. Returns its length, -704 if the key does not
        exist, or -600 if the memory is too short.
        """
    def batch_get_into(self, /, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]:
        """Runs `get_into` for many keys."""
    def batch_get_into_multi_buffers(
        self,
        /,
        keys: list[str],
        all_buffer_ptrs: list[list[int]],
        all_sizes: list[list[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """Reads values, each into several buffers that are filled in order. Returns the length of
        each value, or -600 if the buffers together are too short.
        """
    def is_exist(self, /, key: str, options: ExistOptions = ...) -> int:
        """Returns 1 if the key is readable, 0 if not, or a negative code. A readable key gets a
        lease, which protects it from eviction.

        With `options.prefetch_to_memory`, an object that is only on a disk returns to memory in the
        background, if the setup has `enable_ssd_prefetch`.
        """
    def batch_is_exist(self, /, keys: list[str], options: ExistOptions = ...) -> list[int]:
        """Runs `is_exist` for many keys."""
    def probe_key(self, /, key: str) -> int:
        """Returns 1 if the key is readable, 0 if not, or a negative code. The key gets no lease."""
    def batch_probe_key(self, /, keys: list[str], policy: str = "none", candidate_size: int = ...) -> list[int]:
        """Runs `probe_key` for many keys. With the policy `"LastHitOnly"` the keys are groups of
        `candidate_size`, and the last group that is wholly readable gets leases.
        """
    def prefix_hits(self, /, keys: list[str]) -> int:
        """Returns the number of keys from the front that are readable, or a negative code. These
        keys get a lease, and later keys get none.
        """
    def get_size(self, /, key: str) -> int:
        """Returns the length of a value in bytes, or -704 if the key does not exist."""
    def remove(self, /, key: str, force: bool = False) -> int:
        """Removes a key. Returns 0, -704 if the key does not exist, or -706 while a lease protects
        it (`force` ignores leases).
        """
    def batch_remove(self, /, keys: list[str], force: bool = False) -> list[int]:
        """Runs `remove` for many keys."""
    def remove_by_regex(self, /, regex_pattern: str, force: bool = False) -> int:
        """Removes the keys that a regular expression matches in any part. Returns their number, or
        -600 for an invalid expression.
        """
    def remove_all(self, /, force: bool = False) -> int:
        """Removes every key and returns their number."""
    def batch_get_session_start(self, /, keys: list[str]) -> list[int]:
        """Looks up the replicas of each key once, for reads of parts. Returns 0, -704 for an absent
        key, or -702 for an object that is not in memory.
        """
    def batch_get_into_multi_buffer_ranges(
        self,
        /,
        keys: list[str],
        all_buffer_ptrs: list[list[int]],
        all_sizes: list[list[int]],
        all_src_offsets: list[list[int]],
    ) -> list[int]:
        """Reads parts of values whose session is open. Returns the bytes read per key, or -707 if
        the lease of the session has expired.
        """
    def batch_get_session_end(self, /, keys: list[str]) -> int:
        """Ends read sessions."""
    def batch_put_session_start(
        self, /, keys: list[str], sizes: list[int], config: ReplicateConfig | None = None
    ) -> list[int]:
        """Allocates space for values of these sizes, to be written in parts. Returns -705 for a key
        that already exists.
        """
    def batch_put_from_multi_buffer_ranges(
        self,
        /,
        keys: list[str],
        all_buffer_ptrs: list[list[int]],
        all_sizes: list[list[int]],
        all_dst_offsets: list[list[int]],
    ) -> list[int]:
        """Writes parts of values whose session is open. Returns the bytes written per key."""
    def batch_put_session_end(self, /, keys: list[str]) -> list[int]:
        """Makes values readable after all their bytes have been written. Returns -1010 for a value
        with a range that was never written, and frees its space; `last_error` names the range.
        Returns -900 or -901 if the master does not answer: end the session again, or revoke it.
        """
    def batch_put_session_revoke(self, /, keys: list[str]) -> list[int]:
        """Frees the space of values that are not to be completed."""
    def mount_segment(
        self, /, path: str, size: int, offset: int = ..., protocol: str = "tcp", location: str = ""
    ) -> dict[str, Any]:
        """Mounts a part of a file as a segment, for example a file in shared memory. Returns
        `{"ret": 0, "segment_ids": [..]}`, or `ret` -1 on failure.
        """
    def allocate_and_mount_segment(self, /, size: int, protocol: str = "tcp", location: str = "") -> dict[str, Any]:
        """Mounts new memory as a segment, a multiple of 16 MiB. The result has its size as
        `allocated_size`.
        """
    def unmount_segment(self, /, segment_ids: list[str], grace_period_seconds: int = ...) -> int:
        """Unmounts segments, after a grace period if one is given. The call does not wait for the
        grace period. Returns 0 or -1.
        """
    def unmount_and_free_segment(self, /, segment_ids: list[str], grace_period_seconds: int = ...) -> int:
        """Unmounts segments of `allocate_and_mount_segment` and frees their memory."""
    def unmount_local_disk_segment(self, /, grace_period_seconds: int = ...) -> int:
        """Unmounts this client's disk segment at once, whatever the grace period. Returns 0, also
        if there is none, or -1 on an IPC client.
        """
    def alloc_from_mem_pool(self, /, size: int) -> int:
        """Allocates memory that `mooncake_client` can map (see `register_buffer`), until close.
        Returns its address, or 0 on failure and on a store that was not set up with `setup_dummy`.
        """
    def _setup_dummy(self, /, local_buffer_size: int, server_address: str) -> int:
        """Connects to the `mooncake_client` of this host at `host:port` or at the path of its
        socket. Returns 0, or -1 if it cannot be reached. Values travel through `local_buffer_size`
        bytes of shared memory. Memory of `alloc_from_mem_pool` is allocated on request.
        """
    def get_offload_rpc_read_count(self, /) -> int:
        """Returns how many values and parts were read from disks of other clients."""
    def _heads(self, /, keys: list[str], upto: int) -> list[tuple[Located, bytes] | None]:
        """Looks up each key and reads at most `upto` first bytes. Absent keys are `None`."""
    def _read_strips(self, /, jobs: list[Any], owners: list[Any] | None = None) -> list[int]:
        """Reads strips of located objects into memory named by its address, or that `owners` keep.
        Returns a code for each job.
        """
    def _write_strips(
        self, /, upsert: bool, writes: list[Any], config: ReplicateConfig | None = None, owners: list[Any] | None = None
    ) -> list[int]:
        """Writes values that consist of a header and strips of memory, which is registered or which
        `owners` keep. Returns a code for each value.
        """
    def _peek(self, /, address: int, len: int) -> bytes | None:
        """Copies bytes out of memory of the program. Returns `None` if the range cannot be used."""
    def _poke(self, /, address: int, bytes: bytes) -> bool:
        """Copies bytes into memory of the program. Returns whether the range can be used."""
    def get_into_ranges(
        self,
        /,
        buffer_ptrs: list[int],
        all_keys: list[list[str]],
        all_dst_offsets: list[list[list[int]]],
        all_src_offsets: list[list[list[int]]],
        all_sizes: list[list[list[int]]],
    ) -> list[list[list[int]]]:
        """Reads ranges of values into registered memory. The lists are by buffer, key and fragment,
        and so is the result: bytes read, or a negative code.
        """
    def prepare_get_into_ranges_snapshot(self, /, keys: list[str]) -> RangedReadSnapshot:
        """Locates objects for several reads of their ranges, and grants leases on them. The
        snapshot also has the keys without an object.
        """
    def get_into_ranges_from_snapshot(
        self,
        /,
        snapshot: RangedReadSnapshot,
        buffer_ptrs: list[int],
        all_keys: list[list[str]],
        all_dst_offsets: list[list[list[int]]],
        all_src_offsets: list[list[list[int]]],
        all_sizes: list[list[list[int]]],
    ) -> list[list[list[int]]]:
        """Reads ranges of the objects of a snapshot into registered memory, like `get_into_ranges`.
        The master is asked again once half of a lease is over. A key that is not in the snapshot is
        -600.
        """
    def put(self, /, key: str, value: _ReadableBuffer, config: ReplicateConfig | None = None) -> int:
        """Stores a value under a new key. Returns 0, also if the key already exists (its value does
        not change), or a negative code.
        """
    def put_batch(self, /, keys: list[str], values: list[Any], config: ReplicateConfig | None = None) -> int:
        """Stores many values like `put`. Returns the code of the first failure."""
    def put_parts(self, /, key: str, *parts: _ReadableBuffer, config: ReplicateConfig | None = None) -> int:
        """Stores a value that is given in consecutive parts, like `put`."""
    def upsert(self, /, key: str, value: _ReadableBuffer, config: ReplicateConfig | None = None) -> int:
        """Stores a value and replaces the previous one, if any."""
    def upsert_batch(self, /, keys: list[str], values: list[Any], config: ReplicateConfig | None = None) -> int:
        """Stores many values like `upsert`. Returns the code of the first failure."""
    def upsert_parts(self, /, key: str, *parts: _ReadableBuffer, config: ReplicateConfig | None = None) -> int:
        """Stores a value that is given in consecutive parts, like `upsert`."""
    def get(self, /, key: str) -> bytes:
        """Returns the value of a key. Empty if the key does not exist or cannot be read."""
    def get_batch(self, /, keys: list[str]) -> list[bytes]:
        """Returns the values of many keys, empty where a key does not exist. Returns a single empty
        value if the call fails as a whole.
        """
    def get_buffer(self, /, key: str) -> BufferHandle | None:
        """Returns the value of a key in the local buffer, without a copy. `None` if the key does
        not exist.
        """
    def _async_put(
        self,
        /,
        future: Future[Any],
        key: str,
        value: _ReadableBuffer,
        config: ReplicateConfig | None = None,
        upsert: bool = False,
    ) -> None: ...
    def _async_get(self, /, future: Future[Any], key: str) -> None: ...
    def _async_get_batch(self, /, future: Future[Any], keys: list[str]) -> None: ...
    def _async_is_exist(self, /, future: Future[Any], key: str) -> None: ...
    def _async_batch_is_exist(self, /, future: Future[Any], keys: list[str]) -> None: ...
    def _async_prefix_hits(self, /, future: Future[Any], keys: list[str]) -> None: ...
    def _async_remove(self, /, future: Future[Any], key: str, force: bool = False) -> None: ...
    def _async_batch_get_into(
        self, /, future: Future[Any], keys: list[str], buffer_ptrs: list[int], sizes: list[int], landed: bool = False
    ) -> bool:
        """Reads values like `batch_get_into`. With `landed`, or if some of the memory is not
        registered, the future resolves only when nothing writes to the memory any more. Returns
        whether it does so.
        """
    def _async_batch_put_from(
        self,
        /,
        future: Future[Any],
        keys: list[str],
        buffer_ptrs: list[int],
        sizes: list[int],
        config: ReplicateConfig | None = None,
        upsert: bool = False,
    ) -> bool:
        """Writes values like `batch_put_from`. If some of the memory is not registered, the future
        resolves only when no transfer uses the memory any more. Returns whether it does so.
        """
    def batch_get_buffer(self, /, keys: list[str]) -> list[BufferHandle | None]:
        """Runs `get_buffer` for many keys."""

def _after_fork() -> None:
    """Marks the child of a fork. The interpreter calls this in the child."""

def _close_all() -> None:
    """Closes every store and waits for transfers that use memory of the program. Called when the
    interpreter ends.
    """

def _next_record() -> tuple[int, str, str] | None:
    """Waits for the next event: level, target and text. Returns `None` when the log has ended."""

def _start_log(level: str) -> bool:
    """Starts to record events of a level and above, by its name in Python. Returns false if this
    process already has another log subscriber.
    """

def _stop_log() -> None:
    """Ends the log after the queued events."""

def local_topology(devices: str) -> str:
    """Returns the priority matrix of this host as text. Names in `devices`, separated by commas,
    restrict the devices, as the environment does.
    """

def check_memory(size: int) -> None: ...
def bind_to_numa_node(node: int) -> None:
    """Binds the calling thread to the processors of a NUMA node and prefers the node's memory.
    Failures are logged as warnings.
    """

def cuda_missing() -> str | None:
    """Returns the reason why CUDA is unavailable, or `None` if it is available. Loads the driver's
    library.
    """

def device_of(address: int) -> int | None:
    """Returns the number of the GPU whose memory contains an address. Returns `None` for
    unallocated memory and for a GPU that this process cannot use.
    """

def get_alloc_func_addr() -> int:
    """Returns the address of the C function `void *(size_t)`, which allocates memory."""

def get_free_func_addr() -> int:
    """Returns the address of the C function `void (void *)`, which frees memory of that allocator.
    """

def run_bench(arguments: list[str]) -> int:
    """Runs `transfer_engine_bench` with these command line arguments, of which the first is the
    program's name. Returns its exit status.
    """

def run_client(arguments: list[str]) -> int:
    """Runs `mooncake_client` with these command line arguments, of which the first is the program's
    name. Returns its exit status once it stops.
    """

def run_tool(arguments: list[str]) -> int:
    """Runs `mooncake` with these command line arguments, of which the first is the program's name.
    Returns its exit status.
    """

def run_master(arguments: list[str]) -> int:
    """Runs a master with these command line arguments, of which the first is the program's name.
    Returns its exit status once it stops.
    """

def set_fault_reconciliation_window(microseconds: int) -> None:
    """Sets the length of the reconciliation windows of this process."""

# Address and length in bytes.
_Span = tuple[int, int]
# A span per slot; or address, length, and length of each piece.
_Spans = Sequence[_Span] | tuple[int, int, int]

@final
class GroupContext:
    """Process in its world of process groups."""

    def __new__(
        cls, rank: int, host: str, devices: Sequence[str], engine: InnerTransferEngine | None = None
    ) -> Self: ...
    @property
    def rank(self) -> int:
        """Rank of this process in its world."""
    def serve(self, /) -> str:
        """Starts the coordinator of the world, and returns its address."""
    def connect(self, /, coordinator: str) -> None:
        """Connects this process to the coordinator, and waits for its registration."""
    def set_timeouts(self, /, collective: int, p2p: int) -> None:
        """Sets the times, in microseconds, after which collective and point-to-point operations
        examine the ranks that they wait for.
        """
    def communicator(
        self,
        /,
        name: str,
        order: Sequence[int],
        slot: int,
        capacity: int,
        is_extension: bool,
        deactivates: bool,
        syncs: bool,
        mirror: int,
        owner: Any,
    ) -> GroupCommunicator:
        """Registers a group, and waits until it is ready. `mirror` has an integer of 32 bits per
        slot, and `owner` keeps it.
        """
    def shut_down(self, /) -> None:
        """Leaves the world. The coordinator waits for the other ranks, for at most 30 s."""

@final
class GroupCommunicator:
    """Communicator of one group. Operations name memory by address; `keep` holds the objects that
    own it until the operation is over. With `waits`, the caller waits for the operation next, and
    its thread carries it out.
    """

    def is_local(self, /) -> bool:
        """Returns whether this rank is alone because the coordinator has refused the group."""
    def size(self, /) -> int:
        """Returns the highest active slot plus one, or the declared size of an inactive rank."""
    def epoch(self, /) -> int:
        """Returns the epoch of the view, which grows with every change."""
    def num_synced(self, /) -> int:
        """Returns the number of slots that are active or can be activated."""
    def peer_state(self, /, ranks: Sequence[int]) -> list[bool]:
        """Returns for each rank whether it is active or can be activated."""
    def refresh(self, /) -> None:
        """Shows the present view in the mirror."""
    def propose(self, /, activates: bool, ranks: Sequence[int]) -> tuple[int, list[int], str | None]:
        """Proposes to activate or deactivate ranks, and waits until the change is in force. Returns
        the epoch, the ranks that did not acknowledge, and the reason of a refusal.
        """
    def sync(self, /) -> tuple[bool, str | None]:
        """Waits for the end of the open reconciliation window. Returns whether one was open, and
        the reason of a refusal.
        """
    def join(self, /) -> None:
        """Declares that this rank may be activated, and waits until it is active."""
    def close(self, /) -> None:
        """Ends all operations and leaves the group. Later calls raise."""
    def barrier(self, /, waits: bool = False) -> GroupOperation:
        """Waits until every active rank has called it."""
    def all_reduce(self, /, tensor: _Span, reducing: tuple[int, int], keep: Any, waits: bool = False) -> GroupOperation:
        """Reduces the tensors of all ranks, in place. `reducing` has the numbers of element type
        and operator.
        """
    def reduce(self, /, tensor: _Span, reducing: tuple[int, int], root: int, keep: Any, waits: bool = False) -> GroupOperation:
        """Reduces the tensors of all ranks, in place on the root."""
    def reduce_scatter(
        self, /, inputs: _Spans, output: _Span, reducing: tuple[int, int], keep: Any, waits: bool = False
    ) -> GroupOperation:
        """Reduces a piece for each rank."""
    def broadcast(self, /, tensor: _Span, root: int, keep: Any, waits: bool = False) -> GroupOperation:
        """Copies the tensor of the root to every rank."""
    def all_gather(self, /, input: _Span, outputs: _Spans, keep: Any, waits: bool = False) -> GroupOperation:
        """Copies the tensor of each rank to every rank."""
    def gather(self, /, input: _Span, outputs: _Spans | None, root: int, keep: Any, waits: bool = False) -> GroupOperation:
        """Copies the tensor of each rank to the root, which has outputs."""
    def scatter(self, /, inputs: _Spans | None, output: _Span, root: int, keep: Any, waits: bool = False) -> GroupOperation:
        """Copies a piece of the root, which has inputs, to each rank."""
    def all_to_all(self, /, inputs: _Spans, outputs: _Spans, keep: Any, waits: bool = False) -> GroupOperation:
        """Copies a piece from each rank to each rank."""
    def send(self, /, tensor: _Span, to: int, keep: Any) -> GroupOperation:
        """Sends a tensor to a rank."""
    def receive(self, /, tensor: _Span, source: int | None, keep: Any) -> GroupOperation:
        """Receives a tensor from a rank, or with `None` from any rank."""
    def exchange(
        self,
        /,
        tag: tuple[int, int, int],
        outputs: Sequence[Sequence[_Span] | None],
        inputs: Sequence[_Span | None],
        seconds: float | None,
        keep: Any,
    ) -> GroupOperation:
        """Exchanges messages with other ranks, until all have arrived or `seconds` have passed.
        `tag` has the numbers of the buffer, the round and the phase. The spans of `outputs[slot]`
        are the message to the slot, whose own message fills the start of `inputs[slot]`.
        """
    def end_exchanges(self, /, buffer: int) -> None:
        """Ends the rounds of a buffer of exchanges. Messages for it are refused from now on."""

@final
class GroupOperation:
    """Operation in progress."""

    def wait(self, /, seconds: float | None = None) -> bool:
        """Waits for the end of the operation, for at most `seconds`. Returns whether it is over."""
    def is_done(self, /) -> bool:
        """Returns whether the operation is over."""
    def failed(self, /) -> int:
        """Returns the slots whose failure this rank saw, as bits."""
    def error(self, /) -> MooncakeError | None:
        """Returns the exception of the operation."""
    def fault(self, /) -> MooncakeError | None:
        """Returns the exception of the operation if no failed or missing rank explains it."""
    def source(self, /) -> int | None:
        """Returns the slot whose message was received."""
    def received(self, /) -> list[tuple[int, int]]:
        """Returns the slots and lengths of the messages of an exchange that are here."""
    def on_done(self, /, callback: Callable[[], None]) -> None:
        """Calls `callback` when the operation is over, on another thread."""

@final
class ExpertSizes:
    """Sizes of expert parallelism on which all ranks agree."""

    def __new__(cls, ranks: int, experts: int, tokens: int, hidden: int, is_fp8: bool) -> Self: ...
    def width(self, /) -> int:
        """Returns the bytes of a row."""
    def quantize(self, /, tokens: _Span, rows: _Span, threads: int) -> None:
        """Writes each token of `bfloat16` as a row: elements of `float8_e4m3fn`, then the scales of
        their blocks. At most that many threads work.
        """
    def space(self, /, choices: int) -> int:
        """Returns the largest number of rows of a message whose tokens have `choices` experts
        each.
        """

@final
class ExpertRoutes:
    """Routes of the tokens of this rank to the ranks of their experts. Calls name memory by
    address; the caller keeps it during the call.
    """

    def __new__(cls, topk: _Span, choices: int, ranks: int, experts: int, own: int) -> Self: ...
    def pairs(self, /) -> list[int]:
        """Returns for each rank the number of tokens and their experts there."""
    def fronts(self, /, sizes: ExpertSizes, is_active: Sequence[bool]) -> list[int]:
        """Returns the number of rows before the tokens of each rank's message."""
    def write_fronts(
        self, /, sizes: ExpertSizes, is_active: Sequence[bool], space: _Span
    ) -> list[list[tuple[int, int]]]:
        """Writes these rows of all ranks, one after the other. Returns for each rank the tokens
        that follow, as first tokens and numbers.
        """
    def rows(self, /, firsts: Sequence[int | None], own: Sequence[int] | None, rows: _Span) -> None:
        """Writes for each choice its row, or -1. The rows of another rank lie one after the other
        from its row in `firsts` on, and those of each own expert from its row in `own` on.
        """

@final
class ExpertLayout:
    """Layout of the tokens that this rank has got."""

    def __new__(
        cls,
        sizes: ExpertSizes,
        routes: ExpertRoutes,
        received: _Span,
        own: _Span,
        parts: Sequence[tuple[int, int] | None],
        space: Sequence[int | None],
    ) -> Self: ...
    def missing(self, /) -> list[int]:
        """Returns the ranks whose message is missing."""
    def counts(self, /) -> list[int]:
        """Returns the number of tokens of each local expert."""
    def rows(self, /) -> list[int]:
        """Returns the row of each token: a received one, or after all of them an own one."""
    def write(self, /, count: _Span, ranges: _Span, sources: _Span) -> None:
        """Writes the number of tokens of each local expert, the rows of each rank there, and the
        index of each token at its source.
        """
    def place(self, /, received: _Span, own: _Span, elements: _Span, scales: _Span, threads: int) -> None:
        """Copies the tokens to the rows of their experts, with at most that many threads."""

def add_up_rows(
    width: int, received: _Span, own: _Span, rows: _Span, weights: _Span, out: _Span, threads: int
) -> None:
    """Adds up rows of `bfloat16` with `width` bytes for each token, with a row and a weight for
    each of its choices. A negative row stands for none.
    """
