"""The native half of the package."""

from asyncio import Future
from collections.abc import Sequence
from typing import Any, Self, final

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
    "ForkedError",
    "InnerTransferEngine",
    "InvalidArgumentError",
    "LastError",
    "Located",
    "MemoryDescriptor",
    "MooncakeError",
    "MooncakeHostMemAllocator",
    "NoSpaceError",
    "NotFoundError",
    "QueryTaskResponse",
    "ReplicaDescriptor",
    "ReplicateConfig",
    "Store",
    "UnavailableError",
    "UnsupportedError",
    "__version__",
    "_after_fork",
    "_close_all",
    "_configure",
    "_next_record",
    "_start_log",
    "_stop_log",
    "bind_to_numa_node",
    "cuda_missing",
    "device_of",
    "get_alloc_func_addr",
    "get_free_func_addr",
    "local_topology",
    "run_bench",
    "run_client",
    "run_master",
    "run_tool",
]

__version__: str

# Anything with the buffer protocol.
_ReadableBuffer = Any

class MooncakeError(RuntimeError):
    """Base of what mooncake raises."""

    code: int

class InvalidArgumentError(MooncakeError):
    """The call itself is wrong."""

class NotFoundError(MooncakeError):
    """No such object, segment, client or task."""

class NoSpaceError(MooncakeError):
    """There is no room now."""

class BusyError(MooncakeError):
    """Somebody else is using or writing it."""

class UnavailableError(MooncakeError):
    """The other side cannot be reached, or did not answer in time."""

class CorruptError(MooncakeError):
    """The bytes are not the ones written."""

class UnsupportedError(MooncakeError):
    """Not built, not switched on, or not possible here."""

class ForkedError(MooncakeError):
    """Used in the child of a fork."""

@final
class BufferHandle:
    """A value in the store's memory, given back when the last view of it is gone."""

    def __repr__(self, /) -> str: ...
    def __len__(self, /) -> int: ...
    def ptr(self, /) -> int:
        """Address of the first byte."""
    def size(self, /) -> int:
        """Length in bytes."""
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class BufferLease:
    """Memory lent by a pool."""

    def __len__(self, /) -> int: ...
    def release(self, /) -> None:
        """Gives the memory back; `RuntimeError` while a view of it is alive. May be repeated."""
    def __enter__(self, /) -> Self: ...
    def __exit__(self, /, exc_type: Any = None, exc_value: Any = None, traceback: Any = None) -> None: ...
    @property
    def ptr(self) -> int:
        """Address for the calls that name memory by address; `RuntimeError` after release."""
    @property
    def size(self) -> int:
        """Length that was asked for, in bytes."""
    @property
    def buffer(self) -> memoryview:
        """A new writable view of the memory; `BufferError` after release."""

@final
class BufferLeaseView:
    """What a view of a lease keeps."""

    def __new__(cls) -> Self: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __release_buffer__(self, buffer: memoryview, /) -> None: ...

@final
class BufferPool:
    """Lends registered memory: the store's local buffer first, memory of its own when that is full."""

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
        """Lends memory. When all is lent out it waits, at most `timeout` seconds, or raises `RuntimeError` at once without `block`."""
    def buffer(self, /, size: int, block: bool | None = None, timeout: float | None = None) -> BufferLease:
        """The same as `acquire`, for `with`."""
    def prewarm(self, /, size: int, count: int) -> None:
        """Does nothing: there is nothing to warm."""
    def close(self, /) -> None:
        """Ends the pool; `RuntimeError` while memory is lent out. May be repeated."""
    def __enter__(self, /) -> Self: ...
    def __exit__(self, /, exc_type: Any = None, exc_value: Any = None, traceback: Any = None) -> None: ...

@final
class Canceller:
    """Stops work that nobody awaits any more."""

    def __call__(self, /, future: Any) -> None: ...

@final
class Descriptor:
    """A range of a member's memory."""

    def __repr__(self, /) -> str: ...
    @property
    def buffer_address(self) -> int:
        """Address in the member's process."""
    @property
    def size(self) -> int:
        """Length in bytes."""
    @property
    def transport_endpoint(self) -> str:
        """How to reach the member."""

@final
class DiskDescriptor:
    """A copy in a file."""

    @property
    def object_size(self) -> int:
        """Length in bytes."""
    @property
    def file_path(self) -> str:
        """Path of the file."""

@disjoint_base
class Engine:
    """The engine, with the names that `mooncake.engine` gives its calls."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self: ...
    def _initialize(self, /, local_hostname: str, metadata_server: str, protocol: str, devices: str) -> int:
        """Starts the engine: 0 or -1."""
    def get_engine(self, /) -> InnerTransferEngine | None:
        """The engine, for a store to share; `None` before it is initialized."""
    def get_rpc_port(self, /) -> int:
        """The port that peers ask for this engine's memory; 0 before it is initialized."""
    def last_error(self, /) -> LastError | None:
        """What went wrong last on this engine; `None` when nothing has."""
    def _register(self, /, addresses: Sequence[int], lengths: Sequence[int]) -> int: ...
    def _unregister(self, /, addresses: Sequence[int]) -> int: ...
    def allocate_managed_buffer(self, /, length: int) -> int:
        """New registered memory; 0 when there is none."""
    def free_managed_buffer(self, /, buffer_addr: int, length: int) -> int:
        """Gives managed memory back: 0, -1 for what is none."""
    def get_first_buffer_address(self, /, segment_name: str) -> int:
        """Address of a segment's first buffer; 0 when it is unknown or has none."""
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
        """Has transfers begin when the work that a CUDA stream has now is over, and the stream's further work wait for them. An error of theirs is kept, and
        raised by the next such call, or by `check_on_cuda`."""
    def _check_streams(self, /, wait: bool) -> None:
        """Raises the first error of a transfer in stream order that was not raised yet; with `wait`, when none is under way any more."""
    def transfer_check_status(self, /, batch_id: int) -> int:
        """How a batch stands: 1 done, 0 under way, -1 failed or unknown, -2 out of time."""
    def get_batch_transfer_status(self, /, batch_ids: list[int]) -> int:
        """Waits for batches: 0 when all were done, else -1. A batch that is over may be asked about again."""
    def write_bytes_to_buffer(self, /, dest_address: int, data: _ReadableBuffer | str, length: int) -> int:
        """Copies bytes into registered memory: 0 or -1."""
    def read_bytes_from_buffer(self, /, source_address: int, length: int) -> bytes:
        """Copies bytes out of registered memory."""
    def _notifications(self, /) -> list[tuple[str, str]]:
        """Notifications that arrived since the last call, as name and message."""
    def send_probe(self, /, peer_server_name: str) -> int:
        """Whether a peer's engine answers: 0, or -102."""
    def _close(self, /) -> None:
        """Withdraws the engine's memory and stops answering."""

@final
class InnerTransferEngine:
    """An engine that a store may share."""

    def __repr__(self, /) -> str: ...

@final
class LastError:
    """What went wrong last, in words."""

    def __repr__(self, /) -> str: ...
    def __str__(self, /) -> str: ...
    @property
    def time(self) -> float:
        """Time of day of the error, in seconds since 1970 UTC."""
    @property
    def message(self) -> str:
        """What was wrong and, where that is known, what to do."""
    @property
    def code(self) -> int:
        """The number the call returned."""
    @property
    def peer(self) -> str:
        """The member or master it has to do with, empty when there is none."""
    @property
    def name(self) -> str:
        """The existing system's name for it."""

@final
class Located:
    """An object found by `_heads`, for reads of its parts."""

    @property
    def size(self) -> int:
        """Length of the object in bytes."""

@final
class MemoryDescriptor:
    """A copy in memory."""

    @property
    def buffer_descriptor(self) -> Descriptor:
        """Where it lies."""

@final
class MooncakeHostMemAllocator:
    """Host memory shared with other processes on request, of huge pages with `MC_STORE_USE_HUGEPAGE=1`."""

    def __new__(cls) -> Self: ...
    def alloc(self, /, size: int) -> int:
        """Address of that many new bytes; `RuntimeError` when there are none."""
    def free(self, /, ptr: int) -> int:
        """Gives memory of `alloc` back: 0, -1 for what is none."""

@final
class QueryTaskResponse:
    """Where a copy or move that was asked for stands."""

    def __repr__(self, /) -> str: ...
    @property
    def id(self) -> tuple[int, int]:
        """Its number, in two halves."""
    @property
    def type(self) -> TaskType:
        """What it does: a `TaskType`."""
    @property
    def status(self) -> TaskStatus:
        """How it goes: a `TaskStatus`."""
    @property
    def created_at_ms_epoch(self) -> int:
        """When it was asked for, in milliseconds since 1970."""
    @property
    def last_updated_at_ms_epoch(self) -> int:
        """When it last changed, in milliseconds since 1970."""
    @property
    def assigned_client(self) -> tuple[int, int]:
        """The client that does it, in two halves."""
    @property
    def message(self) -> str:
        """A sentence about it."""

@final
class ReplicaDescriptor:
    """One copy of an object."""

    def __repr__(self, /) -> str: ...
    def is_memory_replica(self, /) -> bool:
        """Whether it lies in a client's memory."""
    def is_disk_replica(self, /) -> bool:
        """Whether it is a file on a shared file system."""
    def is_local_disk_replica(self, /) -> bool:
        """Whether it lies on a client's own disk."""
    def get_memory_descriptor(self, /) -> MemoryDescriptor:
        """Where in memory it lies; `RuntimeError` for a copy elsewhere."""
    def get_disk_descriptor(self, /) -> DiskDescriptor:
        """Which file it is; `RuntimeError` for a copy elsewhere."""
    @property
    def status(self) -> ReplicaStatus:
        """Whether it can be read: a `ReplicaStatus`."""

@disjoint_base
class ReplicateConfig:
    """How a put wants its object kept: copies, pins, placement, groups."""

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
    def with_soft_pin(self) -> bool: ...
    @with_soft_pin.setter
    def with_soft_pin(self, value: bool) -> None: ...
    @property
    def preferred_segment(self) -> str: ...
    @preferred_segment.setter
    def preferred_segment(self, value: str) -> None: ...

@disjoint_base
class Store:
    """A member of a cluster's store, the part of it that needs no Python packages."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self: ...
    def get_replica_desc(self, /, key: str) -> list[ReplicaDescriptor]:
        """The copies of an object; empty when it is not there."""
    def batch_replica_clear(self, /, keys: list[str], segment_name: str = ...) -> list[str]:
        """Drops copies of objects that this store wrote and nobody reads: those in a segment, or all. The keys of which some were."""
    def create_copy_task(self, /, key: str, targets: list[str]) -> tuple[tuple[int, int], int]:
        """Asks for another copy of an object in each of these segments: the task's id and 0, or a negative code."""
    def create_move_task(self, /, key: str, source: str, target: str) -> tuple[tuple[int, int], int]:
        """Asks for the copy in one segment to be moved to another: the task's id and 0, or a negative code."""
    def query_task(self, /, task_id: Sequence[int]) -> tuple[QueryTaskResponse | None, int]:
        """Where a task stands and 0, or `None` and a negative code."""
    def batch_get_replica_desc(self, /, keys: list[str]) -> dict[str, list[ReplicaDescriptor]]:
        """The copies of many objects by key; those that are not there are left out."""
    def _setup(self, /, config: dict[str, Any], engine: InnerTransferEngine | None = None) -> int:
        """Joins a cluster. 0, -600 for what cannot work, -1 when there is no such cluster."""
    def close(self, /) -> int:
        """Leaves the cluster; objects in this client's memory are gone. 0, also when the master cannot be told; may be repeated."""
    def health_check(self, /) -> int:
        """0 when the master answers, 1 before setup and after close, 2 when it does not answer."""
    def get_hostname(self, /) -> str:
        """The name others know this client by, `host:port`; empty before setup."""
    def last_error(self, /) -> LastError | None:
        """What went wrong last on this store: code, name, message and peer; `None` when nothing has."""
    def raise_last_error(self, /) -> None:
        """Raises what went wrong last, as an exception of `mooncake.MooncakeError`'s family; nothing when nothing has."""
    def _get_pyclient_capsule(self, /) -> Store | None:
        """This object while it is set up, else `None`."""
    def _note(self, /, code: int, message: str) -> int:
        """Notes an error that the Python part of the package found, and gives its number back."""
    def register_buffer(self, /, buffer_ptr: int, size: int) -> int:
        """Registers memory for the calls that name memory by address; it must stay allocated until it is unregistered. 0 or a
        negative code: -600 for memory that is none, or overlaps what is registered."""
    def unregister_buffer(self, /, buffer_ptr: int) -> int:
        """Gives registered memory back, after waiting for transfers that use it. 0, or -600 when it is not registered."""
    def put_from(self, /, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        """`put` from registered memory, without a copy."""
    def upsert_from(self, /, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        """`upsert` from registered memory."""
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
        """Stores metadata and data, both in registered memory, as one value: metadata first."""
    def batch_put_from(
        self, /, keys: list[str], buffer_ptrs: list[int], sizes: list[int], config: ReplicateConfig | None = None
    ) -> list[int]:
        """`put_from` of many values; a code for each."""
    def batch_upsert_from(
        self, /, keys: list[str], buffer_ptrs: list[int], sizes: list[int], config: ReplicateConfig | None = None
    ) -> list[int]:
        """`upsert_from` of many values; a code for each."""
    def batch_put_from_multi_buffers(
        self,
        /,
        keys: list[str],
        all_buffer_ptrs: list[list[int]],
        all_sizes: list[list[int]],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """`put_from` of many values, each in several buffers that follow each other; a code for each."""
    def get_into(self, /, key: str, buffer_ptr: int, size: int) -> int:
        """Reads a value into registered memory: its length, -704 when it is not there, -600 when it is longer than the memory."""
    def batch_get_into(self, /, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]:
        """`get_into` of many keys."""
    def batch_get_into_multi_buffers(
        self,
        /,
        keys: list[str],
        all_buffer_ptrs: list[list[int]],
        all_sizes: list[list[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """Reads values into several buffers each, filled in order. Their sizes must add up to that of the value."""
    def is_exist(self, /, key: str) -> int:
        """1 when the key can be read now (nothing takes it away for the time of a lease), 0 when not, or a negative code."""
    def batch_is_exist(self, /, keys: list[str]) -> list[int]:
        """`is_exist` of many keys."""
    def get_size(self, /, key: str) -> int:
        """Length of a value in bytes, -704 when it is not there."""
    def remove(self, /, key: str, force: bool = False) -> int:
        """Removes a key: 0, -704 when it is not there, -706 while somebody may be reading it (`force` overrides that)."""
    def batch_remove(self, /, keys: list[str], force: bool = False) -> list[int]:
        """`remove` of many keys."""
    def remove_by_regex(self, /, regex_pattern: str, force: bool = False) -> int:
        """Removes the keys that a regular expression finds a match in; how many, or -600 for one that is none."""
    def remove_all(self, /, force: bool = False) -> int:
        """Removes every key; how many."""
    def batch_get_session_start(self, /, keys: list[str]) -> list[int]:
        """Asks once where each key lies, for reads of parts: 0, -704, or -702 for what is not in memory."""
    def batch_get_into_multi_buffer_ranges(
        self,
        /,
        keys: list[str],
        all_buffer_ptrs: list[list[int]],
        all_sizes: list[list[int]],
        all_src_offsets: list[list[int]],
    ) -> list[int]:
        """Reads parts of values whose session is open: bytes read per key, -707 when the lease of the session is over."""
    def batch_get_session_end(self, /, keys: list[str]) -> int:
        """Ends read sessions."""
    def batch_put_session_start(
        self, /, keys: list[str], sizes: list[int], config: ReplicateConfig | None = None
    ) -> list[int]:
        """Asks for space for values of these sizes, to be written in parts. -705 for a key that is there already."""
    def batch_put_from_multi_buffer_ranges(
        self,
        /,
        keys: list[str],
        all_buffer_ptrs: list[list[int]],
        all_sizes: list[list[int]],
        all_dst_offsets: list[list[int]],
    ) -> list[int]:
        """Writes parts of values whose session is open: bytes written per key."""
    def batch_put_session_end(self, /, keys: list[str]) -> list[int]:
        """Makes values readable whose parts have been written."""
    def batch_put_session_revoke(self, /, keys: list[str]) -> list[int]:
        """Gives the space of values up that are not to be written after all."""
    def mount_segment(
        self, /, path: str, size: int, offset: int = ..., protocol: str = "tcp", location: str = ""
    ) -> dict[str, Any]:
        """Offers a part of a file (in shared memory, say) to the cluster: `{"ret": 0, "segment_ids": [..]}`, `ret` -1 when it could not."""
    def allocate_and_mount_segment(self, /, size: int, protocol: str = "tcp", location: str = "") -> dict[str, Any]:
        """Offers new memory to the cluster, a multiple of 16 MiB; the answer has its size as `allocated_size`."""
    def unmount_segment(self, /, segment_ids: list[str], grace_period_seconds: int = ...) -> int:
        """Takes memory back, after a grace period when one is given (the call does not wait for that): 0 or -1."""
    def unmount_and_free_segment(self, /, segment_ids: list[str], grace_period_seconds: int = ...) -> int:
        """The same for memory of `allocate_and_mount_segment`, which is freed."""
    def unmount_local_disk_segment(self, /, grace_period_seconds: int = ...) -> int:
        """Stops offering this client's disk, at once whatever the grace period: 0, also where there is none."""
    def alloc_from_mem_pool(self, /, size: int) -> int:
        """Address of new memory that a `mooncake_client` can be given (`register_buffer`), until close; 0 when there is none, and for a store that was
        not set up with `setup_dummy`."""
    def _setup_dummy(self, /, local_buffer_size: int, server_address: str) -> int:
        """Attaches to the `mooncake_client` of this host at `host:port`, or at the path of its socket: 0, or -1 when it cannot be reached."""
    def get_offload_rpc_read_count(self, /) -> int:
        """How many values and parts were read from members' disks."""
    def _heads(self, /, keys: list[str], upto: int) -> list[tuple[Located, bytes] | None]:
        """For each key where it lies and its first bytes, at most `upto`; `None` for one that is not there."""
    def _read_strips(self, /, jobs: list[Any], owners: list[Any] | None = None) -> list[int]:
        """Reads strips of located objects into memory: a code for each job. Memory is registered, or `owners` keep it."""
    def _write_strips(
        self, /, upsert: bool, writes: list[Any], config: ReplicateConfig | None = None, owners: list[Any] | None = None
    ) -> list[int]:
        """Writes values of a header and strips of memory: a code for each. Memory is registered, or `owners` keep it."""
    def _peek(self, /, address: int, len: int) -> bytes | None:
        """Copies bytes out of registered memory; `None` when they do not lie there."""
    def _poke(self, /, address: int, bytes: bytes) -> bool:
        """Copies bytes into registered memory; whether they fit."""
    def get_into_ranges(
        self,
        /,
        buffer_ptrs: list[int],
        all_keys: list[list[str]],
        all_dst_offsets: list[list[list[int]]],
        all_src_offsets: list[list[list[int]]],
        all_sizes: list[list[list[int]]],
    ) -> list[list[list[int]]]:
        """Reads ranges of values into registered memory. Lists by buffer, key and fragment; the answer has their shape:
        bytes read, or a negative code."""
    def put(self, /, key: str, value: _ReadableBuffer, config: ReplicateConfig | None = None) -> int:
        """Stores a value under a key that is not there yet. 0, also when it is there already (and stays as it is), or a negative code."""
    def put_batch(self, /, keys: list[str], values: list[Any], config: ReplicateConfig | None = None) -> int:
        """`put` of many values; the code of the first that failed."""
    def put_parts(self, /, key: str, *parts: _ReadableBuffer, config: ReplicateConfig | None = None) -> int:
        """`put` of a value in parts that follow each other."""
    def upsert(self, /, key: str, value: _ReadableBuffer, config: ReplicateConfig | None = None) -> int:
        """Stores a value in place of the one that is there, if any."""
    def upsert_batch(self, /, keys: list[str], values: list[Any], config: ReplicateConfig | None = None) -> int:
        """`upsert` of many values; the code of the first that failed."""
    def upsert_parts(self, /, key: str, *parts: _ReadableBuffer, config: ReplicateConfig | None = None) -> int:
        """`upsert` of a value in parts that follow each other."""
    def get(self, /, key: str) -> bytes:
        """The value of a key; empty when it is not there or could not be read."""
    def get_batch(self, /, keys: list[str]) -> list[bytes]:
        """The values of many keys, empty where one is not there; a single empty one when nothing could be asked."""
    def get_buffer(self, /, key: str) -> BufferHandle | None:
        """The value of a key in memory of the local buffer's, without a copy; `None` when it is not there."""
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
    def _async_remove(self, /, future: Future[Any], key: str, force: bool = False) -> None: ...
    def _async_batch_get_into(
        self, /, future: Future[Any], keys: list[str], buffer_ptrs: list[int], sizes: list[int], landed: bool = False
    ) -> None:
        """With `landed` the future is settled when nothing is written to the memory any more."""
    def _async_batch_put_from(
        self,
        /,
        future: Future[Any],
        keys: list[str],
        buffer_ptrs: list[int],
        sizes: list[int],
        config: ReplicateConfig | None = None,
        upsert: bool = False,
    ) -> None: ...
    def batch_get_buffer(self, /, keys: list[str]) -> list[BufferHandle | None]:
        """`get_buffer` of many keys."""

def _after_fork() -> None:
    """Called in the child after a fork."""

def _close_all() -> None:
    """Leaves every cluster, for the end of the interpreter."""

def _next_record() -> tuple[int, str, str] | None:
    """Waits for the next event: level, origin and text. `None` when the log has ended."""

def _start_log(level: str) -> bool:
    """Begins to keep events of a level and above, by its name in Python; false when something else does so in this process."""

def _stop_log() -> None:
    """Ends the log, once what is queued has been taken."""

def _configure(huge_page_size: int) -> None:
    """Sets what the package read from the environment."""

def local_topology(only: list[list[str]], without: list[str], custom: str | None) -> str:
    """The priority matrix of this host as text: of devices that each non-empty list names, or what the file says instead."""

def bind_to_numa_node(node: int) -> None:
    """Runs the calling thread on the processors of a NUMA node, and prefers its memory. What cannot be done is a warning."""

def cuda_missing() -> str | None:
    """Why CUDA cannot be used here; `None` where it can. Loads the driver's library."""

def device_of(address: int) -> int | None:
    """Number of the GPU whose memory an address lies in; `None` for memory of nobody, and for a GPU that is not reached from here."""

def get_alloc_func_addr() -> int:
    """Address of a C function `void *(size_t)`."""

def get_free_func_addr() -> int:
    """Address of a C function `void (void *)` for what that one returned."""

def run_bench(arguments: list[str]) -> int:
    """Runs `transfer_engine_bench`; its exit status."""

def run_client(arguments: list[str]) -> int:
    """Runs `mooncake_client` with these command line arguments (the first is the program's name) until it is told to stop; its exit status."""

def run_tool(arguments: list[str]) -> int:
    """Runs `mooncake` with these command line arguments (the first is the program's name); its exit status."""

def run_master(arguments: list[str]) -> int:
    """Runs a master with these command line arguments (the first is the program's name) until it is told to stop; its exit status."""
