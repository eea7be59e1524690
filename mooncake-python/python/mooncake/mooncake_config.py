"""Settings of a store, from a file or from the environment."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mooncake._sizes import SIZES, parse_memory_size, parse_switch, parsed, port

logger = logging.getLogger(__name__)

DEFAULT_GLOBAL_SEGMENT_SIZE = 3355443200
DEFAULT_LOCAL_BUFFER_SIZE = 1073741824
# Protocols of Mooncake C++ as well as those of this package. Another one may belong to a later
# release.
_PROTOCOLS = (
    "tcp", "rdma", "efa", "nvmeof", "nvlink", "musa", "nvlink_intra", "hip", "barex", "cxl", "ascend", "ub", "ubshmem",
    "maca", "sunrise_link", "rpc_only",
)  # fmt: skip
_REQUIRED = ("local_hostname", "metadata_server", "master_server_address")
_SIZES = ("global_segment_size", "local_buffer_size")


def _parse_segment_size(value: Any) -> int:
    """Returns a size in bytes: a number, or a text such as `1.5GB` or `16 MiB`. Units are powers
    of 1024.

    Raises `ValueError` for another value. A size may be negative.
    """
    if isinstance(value, int):
        return value
    if isinstance(value, str):
        text = value.strip()
        return -parse_memory_size(text[1:]) if text.startswith("-") else parse_memory_size(text)
    if isinstance(value, float) and math.isfinite(value):
        return int(value)
    raise ValueError(f"invalid size: {value!r}; expected a number of bytes, or a text such as 64MB or 1.5g")


def _protocol(value: Any) -> str:
    if not isinstance(value, str) or not (protocol := value.strip().lower()):
        raise ValueError(f"Invalid protocol: {value!r}; expected a name such as tcp or rdma")
    if protocol not in _PROTOCOLS:
        logger.warning("Unrecognised protocol %r; known are %s", protocol, ", ".join(_PROTOCOLS))
    return protocol


@dataclass
class MooncakeConfig:
    """Arguments of `MooncakeDistributedStore.setup`."""

    local_hostname: str
    metadata_server: str
    global_segment_size: int
    local_buffer_size: int
    protocol: str
    device_name: str | None
    master_server_address: str
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    tenant_id: str = "default"
    enable_client_http_server: bool = False
    client_http_port: int = 9300

    def __post_init__(self) -> None:
        """Validates the settings, whatever their source. Raises `ValueError` for invalid ones."""
        self.protocol = _protocol(self.protocol)
        for name in _SIZES:
            if (size := getattr(self, name)) < 0:
                raise ValueError(f"{name} must not be negative: {size}")
        for name in _REQUIRED:
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{name} must be a non-empty string, not {value!r}")

    @staticmethod
    def _of(given: Mapping[str, Any]) -> MooncakeConfig:
        # `null` and an empty text count as absent, except for a protocol and sizes, which must be
        # valid if they are named.
        fields = {
            name: value
            for name, value in given.items()
            if value is not None and (name in SIZES or not isinstance(value, str) or value.strip())
        }
        for name in _REQUIRED:
            if name not in fields:
                raise ValueError(f"Missing required config field: {name}")
        return MooncakeConfig(
            local_hostname=fields["local_hostname"],
            metadata_server=fields["metadata_server"],
            global_segment_size=parsed(_parse_segment_size, fields, "global_segment_size", DEFAULT_GLOBAL_SEGMENT_SIZE),
            local_buffer_size=parsed(_parse_segment_size, fields, "local_buffer_size", DEFAULT_LOCAL_BUFFER_SIZE),
            protocol=given.get("protocol", "tcp"),
            device_name=given.get("device_name", ""),
            master_server_address=fields["master_server_address"],
            enable_ssd_offload=parsed(parse_switch, fields, "enable_ssd_offload", False),
            ssd_offload_path=str(fields.get("ssd_offload_path", "")),
            tenant_id=str(fields.get("tenant_id", "default")),
            enable_client_http_server=parsed(parse_switch, fields, "enable_client_http_server", False),
            client_http_port=parsed(port, fields, "client_http_port", 9300),
        )

    @staticmethod
    def from_file(file_path: str) -> MooncakeConfig:
        """Reads settings from a JSON file. Raises `ValueError` for missing or invalid ones."""
        # Some editors write a byte order mark.
        with open(file_path, encoding="utf-8-sig") as file:
            fields = json.load(file)
        if not isinstance(fields, dict):
            raise ValueError(f"invalid config file {file_path}: not a JSON object")
        return MooncakeConfig._of(fields)

    @staticmethod
    def load_from_env() -> MooncakeConfig:
        """Reads settings from the file that `MOONCAKE_CONFIG_PATH` names, else from the variables
        `MOONCAKE_*`. An empty variable, as manifests have them, counts as absent.
        """
        path = os.environ.get("MOONCAKE_CONFIG_PATH")
        if path:
            return MooncakeConfig.from_file(path)
        if not os.environ.get("MOONCAKE_MASTER"):
            raise ValueError(
                "cannot load settings: neither MOONCAKE_CONFIG_PATH nor MOONCAKE_MASTER is set; "
                "set one to a JSON file or to the address of the master"
            )
        variables = {
            "local_hostname": "MOONCAKE_LOCAL_HOSTNAME",
            "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
            "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
            "local_buffer_size": "MOONCAKE_LOCAL_BUFFER_SIZE",
            "protocol": "MOONCAKE_PROTOCOL",
            "device_name": "MOONCAKE_DEVICE",
            "master_server_address": "MOONCAKE_MASTER",
            "enable_ssd_offload": "MOONCAKE_OFFLOAD_ENABLED",
            "ssd_offload_path": "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",
            "tenant_id": "MOONCAKE_TENANT_ID",
            "enable_client_http_server": "MOONCAKE_ENABLE_CLIENT_HTTP_SERVER",
            "client_http_port": "MOONCAKE_CLIENT_HTTP_PORT",
        }

        def is_set(name: str, value: str) -> bool:
            # A protocol that is named must be valid.
            return bool(value if name == "protocol" else value.strip())

        fields: dict[str, Any] = {"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE"}
        fields.update({name: value for name, variable in variables.items() if is_set(name, value := os.environ.get(variable, ""))})
        return MooncakeConfig._of(fields)

    def as_setup(self) -> dict[str, Any]:
        """Returns the settings by the names of the arguments of `MooncakeDistributedStore.setup`.
        """
        return {
            "local_hostname": self.local_hostname,
            "metadata_server": self.metadata_server,
            "global_segment_size": self.global_segment_size,
            "local_buffer_size": self.local_buffer_size,
            "protocol": self.protocol,
            "rdma_devices": self.device_name or "",
            "master_server_addr": self.master_server_address,
            "enable_ssd_offload": self.enable_ssd_offload,
            "ssd_offload_path": self.ssd_offload_path,
            "tenant_id": self.tenant_id,
            "enable_client_http_server": self.enable_client_http_server,
            "client_http_port": self.client_http_port,
        }
