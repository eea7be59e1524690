"""Expert parallelism: sizes and events of `mooncake.mooncake_ep_buffer`, and the names of
`mooncake.pg`, which older programs import from here.
"""

from __future__ import annotations

from typing import Any, NoReturn

from mooncake import pg as _pg
from mooncake._ep_events import EventHandle
from mooncake.pg import *

__all__ = [*_pg.__all__, "MAX_QP_COUNT", "Buffer", "ElasticBuffer", "EventHandle", "get_ep_buffer_size_hint"]

MAX_QP_COUNT = 256


def get_ep_buffer_size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Returns the bytes that Mooncake C++ needs for a buffer of these sizes."""
    del num_ranks
    return 4 * (4 * num_experts) + 4 * num_experts * num_max_dispatch_tokens_per_rank * (32 + 2 * hidden)


class Buffer:
    """Properties of the links of a buffer, for `mooncake_ep_buffer.Buffer.runtime`. Data takes the
    way of process groups: no kernel reaches the memory of another rank.
    """

    def __init__(self, rank: int, num_ranks: int, num_ep_buffer_bytes: int, disable_p2p: bool = False) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.num_ep_buffer_bytes = num_ep_buffer_bytes
        self.disable_p2p = disable_p2p

    def ibgda_disabled(self) -> bool:
        """Returns true: no kernel posts RDMA operations."""
        return True

    def p2p_enabled(self) -> bool:
        """Returns false: no kernel reaches the memory of another GPU."""
        return False

    def use_fast_path(self) -> bool:
        """Returns false: there are no kernels."""
        return False

    def is_roce(self) -> bool:
        """Returns false: no kernel posts RDMA operations."""
        return False


class ElasticBuffer:
    """Elastic buffer of Mooncake C++, which this package lacks."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        _refuse()


def _refuse() -> NoReturn:
    raise NotImplementedError(
        "cannot create ElasticBuffer: this package does not have it; use mooncake.mooncake_ep_buffer.Buffer"
    )
