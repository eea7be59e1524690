"""Process groups for `torch.distributed`, whose ranks may fail, leave and join.

Importing this module registers the backends `mooncake-cpu` (tensors of the host) and `mooncake`
(CUDA tensors).
"""

# ruff: noqa: E402
from __future__ import annotations

try:
    import torch as _torch
except ImportError as error:
    raise ImportError("cannot import mooncake.pg: torch is not installed; pip install torch") from error

import re as _re

from mooncake import _installation, _mooncake

_installation.check()
if not hasattr(_mooncake, "GroupContext"):
    raise ImportError("cannot import mooncake.pg: this build of the package lacks the feature `pg`")

import torch.distributed as _distributed

_OLDEST = (2, 4)
_found = _re.match(r"(\d+)\.(\d+)", _torch.__version__)
if _found is not None and (int(_found[1]), int(_found[2])) < _OLDEST:
    raise ImportError(
        f"cannot import mooncake.pg: torch is too old. torch={_torch.__version__} oldest={'.'.join(map(str, _OLDEST))}; "
        "pip install --upgrade torch"
    )
if not _distributed.is_available():
    raise ImportError(
        f"cannot import mooncake.pg: torch is built without torch.distributed. torch={_torch.__version__}; install another build"
    )

from mooncake._pg_groups import (
    MooncakeBackend,
    MooncakeProcessGroup,
    activate_ranks,
    createMooncakeBackend,
    createMooncakeCpuBackend,
    deactivate_ranks,
    extend_group_size_to,
    get_active_ranks,
    get_current_epoch,
    get_num_synced_ranks,
    get_peer_state,
    join_group,
    recover_ranks,
    sync_after_failure,
)
from mooncake._pg_options import (
    MooncakeBackendOptions,
    ProposalStatus,
    ProposeViewUpdateResponse,
    SyncAfterFailureResponse,
    SyncAfterFailureStatus,
    ViewUpdateStatus,
)
from mooncake._pg_process import (
    set_collective_timeout_us,
    set_device_filter,
    set_fault_reconciliation_window_us,
    set_host_ip,
    set_p2p_timeout_us,
    set_transfer_engine,
)
from mooncake._pg_work import MooncakeWork, get_failed_ranks_hint, get_local_success

__all__ = [
    "MooncakeBackend",
    "MooncakeBackendOptions",
    "MooncakeProcessGroup",
    "MooncakeWork",
    "ProposalStatus",
    "ProposeViewUpdateResponse",
    "SyncAfterFailureResponse",
    "SyncAfterFailureStatus",
    "ViewUpdateStatus",
    "activate_ranks",
    "createMooncakeBackend",
    "createMooncakeCpuBackend",
    "deactivate_ranks",
    "extend_group_size_to",
    "get_active_ranks",
    "get_current_epoch",
    "get_failed_ranks_hint",
    "get_local_success",
    "get_num_synced_ranks",
    "get_peer_state",
    "join_group",
    "recover_ranks",
    "set_collective_timeout_us",
    "set_device_filter",
    "set_fault_reconciliation_window_us",
    "set_host_ip",
    "set_p2p_timeout_us",
    "set_transfer_engine",
    "sync_after_failure",
]

_distributed.Backend.register_backend("mooncake-cpu", createMooncakeCpuBackend, extended_api=True, devices=["cpu"])
_distributed.Backend.register_backend("mooncake", createMooncakeBackend, extended_api=True, devices=["cuda"])
