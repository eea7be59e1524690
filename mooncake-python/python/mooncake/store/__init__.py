"""Store: values in a cluster's memory, by key."""

from __future__ import annotations

# ruff: noqa: E402
from mooncake import _installation

_installation.check()

import difflib
import logging
import operator
from dataclasses import dataclass
from typing import Any, Self

from mooncake import _log
from mooncake._engram import EngramStore, EngramStoreConfig
from mooncake._mooncake import (
    BufferHandle,
    BufferLease,
    BufferLeaseView,
    BufferPool,
    Descriptor,
    DiskDescriptor,
    ExistOptions,
    MemoryDescriptor,
    MooncakeHostMemAllocator,
    QueryTaskResponse,
    RangedReadSnapshot,
    ReplicaDescriptor,
    ReplicateConfig,
    bind_to_numa_node,
    get_alloc_func_addr,
    get_free_func_addr,
)
from mooncake._sizes import SIZES, parse_memory_size, parse_millis, parse_number, parse_switch, parsed, port
from mooncake._tensors import TensorCalls, _deserialize_tensor, _serialize_tensor, _tensor_metadata_size
from mooncake._types import (
    ObjectDataType,
    ParallelAxis,
    ReadTarget,
    ReplicaStatus,
    SoftPinAction,
    TaskStatus,
    TaskType,
    TensorParallelism,
    also_named,
)

RegisteredBufferPool = BufferPool
RegisteredBufferLease = BufferLease
RegisteredBufferLeaseView = BufferLeaseView

# Values of the enumerations are also names of this module. Where two have the same name, the
# task's counts.
for _enumeration in (ObjectDataType, ReplicaStatus, TaskType, TaskStatus):
    globals().update(_enumeration.__members__)
del _enumeration

_LOG = logging.getLogger(__name__)
_MIB = 1 << 20
_INVALID_PARAMS = -600

# Keys of the dictionary of `setup`, as in Mooncake C++. `ipc_socket_path` has no effect, nor have
# the settings of memory in the NVLink domain (EGM).
_SETTINGS = (
    "local_hostname",
    "metadata_server",
    "global_segment_size",
    "local_buffer_size",
    "protocol",
    "rdma_devices",
    "master_server_addr",
    "ipc_socket_path",
    "enable_ssd_offload",
    "ssd_offload_path",
    "tenant_id",
    "enable_client_http_server",
    "client_http_port",
    "enable_embedded_master",
    "enable_ssd_prefetch",
    "ssd_prefetch_cooldown_sec",
    "ssd_prefetch_dedup_ttl_sec",
    "enable_egm_store_pool",
    "egm_numa_nodes",
    "rpc_timeout_ms",
)
# Names of the settings of LMCache, which passes all of them on. Mooncake C++ ignores these names.
_OTHER_NAMES = {"master_server_address": "master_server_addr", "device_name": "rdma_devices"}


@dataclass(frozen=True)
class _Prefetching:
    """Settings of prefetches from disks to memory. `None` stands for that of the environment."""

    enabled: bool | None = None
    cooldown: int | None = None
    dedup: int | None = None

    @classmethod
    def parse(cls, texts: dict[str, str]) -> Self:
        """Returns the settings in a dictionary of `setup`. Raises `ValueError` for invalid ones."""
        name = "enable_ssd_prefetch"
        return cls(
            parsed(parse_switch, texts, name, "") if name in texts else None,
            _seconds(texts, "ssd_prefetch_cooldown_sec"),
            _seconds(texts, "ssd_prefetch_dedup_ttl_sec"),
        )


def _any_number(text: str) -> int:
    return parse_number(text, 0, (1 << 63) - 1)


def _seconds(texts: dict[str, str], name: str) -> int | None:
    """Returns a number of seconds. Raises `ValueError` for an invalid one."""
    if (millis := _millis(texts, name, "s", 0)) is None:
        return None
    if millis % 1000:
        raise ValueError(f"{name} must be whole seconds, not {texts[name]!r}")
    return millis // 1000


def _millis(texts: dict[str, str], name: str, unit: str, least: int) -> int | None:
    """Returns a time in milliseconds. Raises `ValueError` for an invalid one."""
    if name not in texts:
        return None
    millis = parsed(lambda text: parse_millis(text, unit), texts, name, "")
    if millis < least:
        raise ValueError(f"{name} must be at least {least} ms, not {texts[name]!r}")
    return millis


class MooncakeDistributedStore(TensorCalls):
    """Client of a cluster's store. Calls are thread-safe, and those that wait release the GIL."""

    def __init__(self) -> None:
        """Takes no arguments. A subclass may have its own."""

    def _batch_exist(self, keys: list[str]) -> list[int]:
        """Runs `batch_is_exist`. FlexKV calls it by this name."""
        return self.batch_is_exist(keys)

    def __enter__(self) -> Self:
        """Returns the store itself, for `with`."""
        return self

    def __exit__(self, *_raised: object) -> None:
        """Closes the store."""
        self.close()

    def setup(
        self,
        local_hostname: str | dict[str, Any] | None = None,
        metadata_server: str = "P2PHANDSHAKE",
        global_segment_size: int = 16 * _MIB,
        local_buffer_size: int = 1024 * _MIB,
        protocol: str = "tcp",
        rdma_devices: str = "",
        master_server_addr: str = "127.0.0.1:50051",
        engine: Any = None,
        enable_ssd_offload: bool = False,
        ssd_offload_path: str = "",
        tenant_id: str = "default",
        enable_client_http_server: bool = False,
        client_http_port: int = 9300,
        enable_embedded_master: bool = False,
        config: dict[str, Any] | None = None,
    ) -> int:
        """Joins a cluster. Returns 0, -600 for invalid settings, or -1 if the cluster cannot be
        joined (see `last_error`).

        With `enable_embedded_master`, the store starts a master inside this process, at free ports
        of 127.0.0.1, in place of the one at `master_server_addr`. The master ends with the store.

        A dictionary as the first argument or as `config` replaces all arguments. Its keys are their
        names, and numbers may be text. Sizes and times may have a unit (`16MB`, `5s`). Its key
        `rpc_timeout_ms` is the longest time of a call in milliseconds, from 1; 25 s at most, and
        20 s without it.
        """
        if config is not None or isinstance(local_hostname, dict):
            return self._setup_dict(_only_dict(locals()))
        return self._join(
            local_hostname,
            metadata_server,
            global_segment_size,
            local_buffer_size,
            protocol,
            rdma_devices,
            master_server_addr,
            engine,
            enable_ssd_offload,
            ssd_offload_path,
            tenant_id,
            enable_client_http_server,
            client_http_port,
            enable_embedded_master,
            _Prefetching(),
            None,
        )

    def _join(
        self,
        local_hostname: Any,
        metadata_server: Any,
        global_segment_size: Any,
        local_buffer_size: Any,
        protocol: Any,
        rdma_devices: Any,
        master_server_addr: Any,
        engine: Any,
        enable_ssd_offload: Any,
        ssd_offload_path: Any,
        tenant_id: Any,
        enable_client_http_server: Any,
        client_http_port: int,
        enable_embedded_master: Any,
        prefetching: _Prefetching,
        timeout_ms: int | None,
    ) -> int:
        """Checks the arguments of `setup` and joins the cluster."""
        local_hostname, metadata_server, protocol, rdma_devices, master_server_addr, ssd_offload_path, tenant_id = _words(
            local_hostname=local_hostname,
            metadata_server=metadata_server,
            protocol=protocol,
            rdma_devices=rdma_devices,
            master_server_addr=master_server_addr,
            ssd_offload_path=ssd_offload_path,
            tenant_id=tenant_id,
        )
        for name, size in (("global_segment_size", global_segment_size), ("local_buffer_size", local_buffer_size)):
            if not hasattr(size, "__index__") or not 0 <= operator.index(size) < 1 << 64:
                text = f"{name} must be a number of bytes, from 0 to 2**64-1, not {size!r}"
                if isinstance(size, str):
                    text += "; a dictionary's sizes may be text"
                raise TypeError(f"setup(): incompatible function arguments: {text}")
        for name, switch in (
            ("enable_ssd_offload", enable_ssd_offload),
            ("enable_client_http_server", enable_client_http_server),
            ("enable_embedded_master", enable_embedded_master),
        ):
            if isinstance(switch, (str, bytes)):
                raise TypeError(f"setup(): incompatible function arguments: {name} must be a bool, not {switch!r}")
        _log.start()
        if enable_client_http_server and not 1 <= client_http_port <= 65535:
            return self._note(_INVALID_PARAMS, f"setup: invalid client_http_port {client_http_port}")
        return self._setup(
            {
                "local_hostname": local_hostname,
                "metadata_server": metadata_server,
                "global_segment_size": global_segment_size,
                "local_buffer_size": local_buffer_size,
                "protocol": protocol,
                "rdma_devices": rdma_devices,
                "master_server_addr": master_server_addr,
                "tenant_id": tenant_id,
                "http_port": client_http_port if enable_client_http_server else None,
                "offload_path": ssd_offload_path if enable_ssd_offload else None,
                "prefetch": prefetching.enabled,
                "prefetch_cooldown": prefetching.cooldown,
                "prefetch_dedup": prefetching.dedup,
                "timeout_ms": timeout_ms,
                "embedded_master": bool(enable_embedded_master),
            },
            engine,
        )

    def _setup_dict(self, config: dict[str, Any]) -> int:
        config = {str(name): value for name, value in config.items()}
        for other, name in _OTHER_NAMES.items():
            value = config.pop(other, None)
            if config.get(name) is None:
                config[name] = value
        for unknown in sorted(config.keys() - set(_SETTINGS)):
            near = difflib.get_close_matches(unknown, _SETTINGS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(_SETTINGS)}"
            return self._note(_INVALID_PARAMS, f"setup: unknown key {unknown!r}; {hint}")
        # An empty value, as templates leave it, counts as absent, except for a size.
        texts = {name: str(value) for name, value in config.items() if value is not None}
        texts = {name: text for name, text in texts.items() if text.strip() or name in SIZES}
        for name in ("local_hostname", "metadata_server"):
            if not texts.get(name):
                return self._note(_INVALID_PARAMS, f"setup: {name} is missing")
        try:
            segment, buffer = (parsed(parse_memory_size, texts, name, str(16 * _MIB)) for name in SIZES)
            serve = parsed(parse_switch, texts, "enable_client_http_server", "false")
            offload = parsed(parse_switch, texts, "enable_ssd_offload", "false")
            # Without a server, any number is a port.
            http_port = parsed(port if serve else _any_number, texts, "client_http_port", "9300")
            embedded = parsed(parse_switch, texts, "enable_embedded_master", "false")
            prefetching = _Prefetching.parse(texts)
            timeout_ms = _millis(texts, "rpc_timeout_ms", "ms", 1)
            if parsed(parse_switch, texts, "enable_egm_store_pool", "false"):
                _LOG.warning("enable_egm_store_pool has no effect: the segment is ordinary memory")
        except ValueError as error:
            return self._note(_INVALID_PARAMS, f"setup: {error}")
        return self._join(
            texts["local_hostname"],
            texts["metadata_server"],
            segment,
            buffer,
            protocol=texts.get("protocol", "tcp"),
            rdma_devices=texts.get("rdma_devices", ""),
            master_server_addr=texts.get("master_server_addr", "127.0.0.1:50051"),
            engine=None,
            enable_ssd_offload=offload,
            ssd_offload_path=texts.get("ssd_offload_path", ""),
            tenant_id=texts.get("tenant_id", "default"),
            enable_client_http_server=serve,
            client_http_port=http_port,
            enable_embedded_master=embedded,
            prefetching=prefetching,
            timeout_ms=timeout_ms,
        )

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """Connects to the `mooncake_client` of this host, by `host:port` or by the path of its
        socket.

        Values travel through `local_buffer_size` bytes of shared memory. `mem_pool_size` is
        ignored, because memory of `alloc_from_mem_pool` is allocated on request.

        Returns 0, or -1 if the process cannot be reached.
        """
        del mem_pool_size
        _log.start()
        return self._setup_dummy(local_buffer_size, server_address)

    @also_named(regex="regex_pattern")
    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """Removes the keys in which the pattern has a match. Returns their number, or a negative
        code.
        """
        removed = super().remove_by_regex(regex_pattern, force)
        if removed == _INVALID_PARAMS and self.health_check() != 1:
            self._note(removed, f"remove_by_regex: the master rejects the pattern {regex_pattern!r}")
        return removed

    def init_all(self, protocol: str, device_name: str, mount_segment_size: int = 16 * _MIB, /) -> int:
        """Runs `setup` with the addresses of a test cluster on this machine."""
        return self.setup("localhost:12345", "127.0.0.1:2379", mount_segment_size, 1024 * _MIB, protocol, device_name)


def _only_dict(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the dictionary among the arguments of `setup`. Raises `TypeError` if there is another
    argument.
    """
    names = MooncakeDistributedStore.setup.__annotations__
    defaults = dict(zip(names, MooncakeDistributedStore.setup.__defaults__ or (), strict=False))
    given = {name: arguments[name] for name, default in defaults.items() if arguments[name] != default}
    if len(given) != 1 or not isinstance(config := next(iter(given.values())), dict):
        raise TypeError(f"setup(): incompatible function arguments: a dict must be the only argument, got {', '.join(given)}")
    return config


def _words(**arguments: Any) -> list[str]:
    """Returns the text arguments of `setup`, decoded if they are bytes. Raises `TypeError` for any
    other type.
    """
    for name, value in arguments.items():
        if not isinstance(value, (str, bytes)):
            also = " or a dict" if name == "local_hostname" else ""
            raise TypeError(
                f"setup(): incompatible function arguments: {name} must be a str{also}, not {type(value).__name__}"
            )
    return [value.decode() if isinstance(value, bytes) else value for value in arguments.values()]


def _get_pyclient_from_wrapper(store: Any) -> Any:
    """Returns the native store under a wrapper, as `BufferPool` takes it."""
    return store._get_pyclient_capsule()


__all__ = [
    "_deserialize_tensor",
    "_get_pyclient_from_wrapper",
    "_serialize_tensor",
    "_tensor_metadata_size",
    "BufferHandle",
    "BufferLease",
    "BufferLeaseView",
    "BufferPool",
    "Descriptor",
    "DiskDescriptor",
    "EngramStore",
    "EngramStoreConfig",
    "ExistOptions",
    "MemoryDescriptor",
    "MooncakeDistributedStore",
    "MooncakeHostMemAllocator",
    "ObjectDataType",
    "ParallelAxis",
    "QueryTaskResponse",
    "RangedReadSnapshot",
    "ReadTarget",
    "RegisteredBufferLease",
    "RegisteredBufferLeaseView",
    "RegisteredBufferPool",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SoftPinAction",
    "TaskStatus",
    "TaskType",
    "TensorParallelism",
    "bind_to_numa_node",
    "get_alloc_func_addr",
    "get_free_func_addr",
]
