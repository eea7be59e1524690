"""Expert parallelism: tokens go to the ranks of their experts (`dispatch`), and what the experts
return comes back and is added up (`combine`). A rank that does not answer in time is left out.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from mooncake import _mooncake, ep, pg
from mooncake._ep_events import EventHandle, EventOverlap, Pending
from mooncake._ep_links import Link, Message, calls_of, link_of
from mooncake._ep_memory import Memory
from mooncake._ep_rows import BLOCK, add_up, packed, place, returned
from mooncake._pg_work import _span

# After the import that says by name that torch is missing.
import torch  # isort: skip

__all__ = ["Buffer", "EventOverlap"]

# Source index, ranges of rows, and the sizes of a dispatch.
Handle = tuple[Any, Any, int, int, int]
Hook = Callable[[], None]


class Buffer:
    """Dispatch and combine over a process group.

    A group of `mooncake.pg` honours time limits and failed ranks. Any other group works without
    both. The constructor and `update_ep_member` are collective.
    """

    def __init__(self, group: Any, num_ep_buffer_bytes: int = 0, disable_p2p: bool = False) -> None:
        self.rank: int = group.rank()
        self.group_size: int = group.size()
        self.group = self.backend = group
        self.num_ep_buffer_bytes = num_ep_buffer_bytes
        self.runtime = ep.Buffer(self.rank, self.group_size, num_ep_buffer_bytes, disable_p2p)
        # Whether data takes the way of process groups, which is the only one.
        self._use_fallback = self.group_size > 1
        self._memory = Memory()
        self._link: Link | None = None
        # Calls whose results may not be complete, oldest first.
        self._unfinished: list[Pending] = []
        self._has_warned = False
        self.connect()

    @staticmethod
    def get_ep_buffer_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Returns the bytes that Mooncake C++ needs for a buffer of these sizes."""
        return ep.get_ep_buffer_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    def connect(self, is_update: bool = False) -> None:
        """Agrees with the other ranks on a new start. Collective."""
        del is_update
        self._finish(0)
        before, self._link = self._link, None
        if before is not None:
            before.close()
        self._link = link_of(self.group, self.group_size, self._memory)

    def update_ep_member(self) -> None:
        """Starts again with the present ranks, after a rank has been replaced. Collective."""
        self.connect(is_update=True)

    def dispatch(
        self,
        x: Any,
        topk_idx: Any,
        active_ranks: Any,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        timeout_us: int,
        use_fp8: bool | None = None,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, Any, Handle, EventOverlap, Hook | None]:
        """Sends each token to the ranks of its experts, and returns the tokens for the experts of
        this rank: their elements, their number per expert, and a handle for `combine`.

        A rank whose tokens are not here after `timeout_us` becomes 0 in `active_ranks`; with -1
        there is no limit. With `async_finish`, the results are complete after a wait for the event.
        With `return_recv_hook`, they are complete after a call of the hook.
        """
        limit, ranks = num_max_dispatch_tokens_per_rank, self.group_size
        if async_finish and return_recv_hook:
            raise AssertionError("cannot dispatch: async_finish excludes return_recv_hook")
        _check_matrix("x", x, torch.bfloat16, None)
        _check_matrix("topk_idx", topk_idx, torch.int64, x.size(0))
        tokens, hidden = x.shape
        if hidden % BLOCK or not hidden:
            raise AssertionError(f"cannot dispatch: hidden size is not a multiple of {BLOCK}. hidden={hidden}")
        if tokens > limit:
            raise AssertionError(f"cannot dispatch: too many tokens. tokens={tokens} maximum={limit}")
        if num_experts <= 0 or num_experts % ranks:
            raise AssertionError(
                f"cannot dispatch: ranks cannot share the experts evenly. num_experts={num_experts} ranks={ranks}"
            )
        self._check_size(limit, hidden, num_experts)
        is_fp8 = True if use_fp8 is None else use_fp8
        sizes = _mooncake.ExpertSizes(ranks, num_experts, limit, hidden, is_fp8)
        routes = _routes(topk_idx, ranks, num_experts, self.rank)
        is_active, written = self._mask(active_ranks)

        own = packed(x, sizes, is_fp8)
        numbers = routes.fronts(sizes, is_active)
        fronts = torch.empty((sum(numbers), sizes.width()), dtype=torch.uint8)
        messages, first = [], 0
        for number, runs in zip(numbers, routes.write_fronts(sizes, is_active, _span(fronts)), strict=True):
            messages.append(Message([(fronts, first, number), *((own, *run) for run in runs)]))
            first += number
        most = sizes.space(topk_idx.size(1))
        space = [most if active else None for active in is_active]
        receive = self._start(messages, space, sizes.width(), timeout_us)

        local, slots = num_experts // ranks, ranks * limit
        recv_x = self._memory.tensor(
            (local, slots, hidden), torch.float8_e4m3fn if is_fp8 else torch.bfloat16, x.device
        )
        scales = None
        if is_fp8:
            shape = (local, slots, hidden // BLOCK)
            if x.device.type == "cpu":
                scales = self._memory.tensor(shape, torch.float32, x.device)
            else:
                # The layout in which kernels read scales.
                scales = torch.empty((local, shape[2], slots), dtype=torch.float32, device=x.device).transpose(1, 2)
        recv_count = torch.zeros(local, dtype=torch.int32, device=x.device)
        layout_range = torch.zeros((local, ranks), dtype=torch.int64, device=x.device)
        src_info = torch.zeros((local, slots), dtype=torch.int32, device=x.device)

        def finish() -> None:
            received = receive()
            given = _span(received.rows), _span(own)
            layout = _mooncake.ExpertLayout(sizes, routes, *given, received.places, space)
            for rank in layout.missing():
                if written is not None:
                    written[rank] = 0
            place(layout, received.rows, own, recv_x, scales)
            results = recv_count, layout_range, src_info
            on_host = [one.cpu() for one in results]
            layout.write(*(_span(one) for one in on_host))
            for result, one in zip(results, on_host, strict=True):
                if result is not one:
                    result.copy_(one)

        handle: Handle = (src_info, layout_range, limit, hidden, num_experts)
        kept = (x, topk_idx, recv_x, scales, recv_count, src_info, layout_range)
        event, hook = self._settle(finish, async_finish, return_recv_hook, kept)
        return (recv_x if scales is None else (recv_x, scales)), recv_count, handle, event, hook

    def combine(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        active_ranks: Any,
        timeout_us: int,
        handle: Handle,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Any = None,
    ) -> tuple[Any, EventOverlap, Hook | None]:
        """Sends the rows of the experts back, and returns the weighted sums of the own tokens.

        `x` has the rows in the order of the dispatch that has returned `handle`. Rows of a rank
        that are not here after `timeout_us` are left out, and the rank becomes 0 in `active_ranks`.
        With `zero_copy`, `x` is the tensor of `get_next_combine_buffer`.
        """
        del zero_copy
        _, layout_range, limit, hidden, experts = handle
        ranks = self.group_size
        shape = (experts // ranks, ranks * limit, hidden)
        if async_finish and return_recv_hook:
            raise AssertionError("cannot combine: async_finish excludes return_recv_hook")
        if tuple(x.shape) != shape or not x.is_contiguous() or x.dtype != torch.bfloat16:
            raise AssertionError(
                "cannot combine: x is not a contiguous bfloat16 tensor of the shape of the dispatch. "
                f"needed={shape} shape={tuple(x.shape)} dtype={x.dtype}"
            )
        _check_matrix("topk_idx", topk_idx, torch.int64, None)
        _check_matrix("topk_weights", topk_weights, torch.float32, *topk_idx.shape)
        tokens = topk_idx.size(0)
        if out is None:
            out = torch.empty((tokens, hidden), dtype=torch.bfloat16, device=x.device)
        _check_matrix("out", out, torch.bfloat16, tokens, hidden)
        routes = _routes(topk_idx, ranks, experts, self.rank)
        is_active, written = self._mask(active_ranks)

        own, runs = returned(x, layout_range.cpu())
        messages = [
            Message([(own, *run) for run in of_rank if run[1]] if active and rank != self.rank else [])
            for rank, (active, of_rank) in enumerate(zip(is_active, runs, strict=True))
        ]
        pairs = routes.pairs()
        space = [pairs[rank] if is_active[rank] else None for rank in range(ranks)]
        receive = self._start(messages, space, 2 * hidden, timeout_us)

        def finish() -> None:
            received = receive()
            firsts: list[int | None] = [None] * ranks
            for rank, part in enumerate(received.places):
                # A rank that has left this one out sends no rows.
                if part is not None and part[1] == 2 * hidden * pairs[rank]:
                    firsts[rank] = part[0]
                elif rank != self.rank and is_active[rank] and written is not None:
                    written[rank] = 0
            split = received.rows.size(0)
            own_firsts = [split + first for first, _ in runs[self.rank]] if is_active[self.rank] else None
            row_of = torch.empty(topk_idx.shape, dtype=torch.int64)
            routes.rows(firsts, own_firsts, _span(row_of))
            add_up(received.rows, own, row_of, topk_weights, out)

        event, hook = self._settle(finish, async_finish, return_recv_hook, (x, topk_idx, topk_weights, layout_range, out))
        return out, event, hook

    def get_next_combine_buffer(self, handle: Handle) -> Any:
        """Returns a tensor for the rows of the experts, for `combine`."""
        _, layout_range, limit, hidden, experts = handle
        shape = (experts // self.group_size, self.group_size * limit, hidden)
        return self._memory.tensor(shape, torch.bfloat16, layout_range.device)

    def _check_size(self, tokens: int, hidden: int, experts: int) -> None:
        if not self.num_ep_buffer_bytes:
            return
        needed = self.get_ep_buffer_size_hint(tokens, hidden, self.group_size, experts)
        if needed > self.num_ep_buffer_bytes:
            raise RuntimeError(
                f"cannot dispatch: num_ep_buffer_bytes is too small. needed={needed} given={self.num_ep_buffer_bytes}; "
                "use get_ep_buffer_size_hint"
            )

    def _mask(self, active_ranks: Any) -> tuple[list[bool], Any]:
        """Returns which ranks take part, and the tensor of the caller that shows failures."""
        ranks = self.group_size
        if active_ranks is None:
            if calls_of(self.group) is not None:
                return [bool(one) for one in pg.get_active_ranks(self.group)[:ranks].tolist()], None
            if not self._has_warned:
                self._has_warned = True
                warnings.warn("all ranks count as active: the group is not one of mooncake.pg", RuntimeWarning, stacklevel=3)
            return [True] * ranks, None
        if active_ranks.dtype != torch.int32 or active_ranks.dim() != 1 or not active_ranks.is_contiguous():
            raise AssertionError(
                "cannot use active_ranks: it is not a contiguous int32 tensor with one dimension. "
                f"shape={tuple(active_ranks.shape)} dtype={active_ranks.dtype}"
            )
        if active_ranks.numel() != ranks:
            return [True] * ranks, None
        return [bool(one) for one in active_ranks.tolist()], active_ranks

    def _start(self, messages: Sequence[Message], space: Sequence[int | None], width: int, timeout_us: int) -> Any:
        """Starts an exchange with the other ranks. At most the one before is in progress."""
        self._finish(1)
        if self._link is None:
            raise RuntimeError("cannot use buffer: it is not connected; call connect")
        space = [None if rank == self.rank else one for rank, one in enumerate(space)]
        return self._link.exchange(messages, space, width, None if timeout_us < 0 else timeout_us / 1e6)

    def _finish(self, left: int) -> None:
        """Finishes the oldest calls until no more than `left` are unfinished."""
        while len(self._unfinished) > left:
            # The caller that waits for this call gets its error.
            with contextlib.suppress(Exception):
                self._unfinished.pop(0)()

    def _settle(
        self, finish: Callable[[], None], async_finish: bool, return_recv_hook: bool, kept: tuple[Any, ...]
    ) -> tuple[EventOverlap, Hook | None]:
        """Finishes a call, or leaves that to the event or the hook."""
        pending = Pending(finish)
        self._unfinished.append(pending)
        if not (async_finish or return_recv_hook):
            pending()
            return EventOverlap(), None
        return EventOverlap(EventHandle._of(pending) if async_finish else None, kept), pending if return_recv_hook else None


def _routes(topk_idx: Any, ranks: int, experts: int, own: int) -> _mooncake.ExpertRoutes:
    topk = topk_idx.cpu()
    try:
        return _mooncake.ExpertRoutes(_span(topk), topk.size(1), ranks, experts, own)
    except RuntimeError as error:
        raise AssertionError(str(error)) from None


def _check_matrix(name: str, tensor: Any, dtype: Any, rows: int | None, columns: int | None = None) -> None:
    """Raises `AssertionError`, as Mooncake C++ does, if a tensor does not have this type and
    shape.
    """
    fits = tensor.dim() == 2 and tensor.is_contiguous() and tensor.dtype == dtype
    if not fits or rows not in (None, tensor.size(0)) or columns not in (None, tensor.size(1)):
        raise AssertionError(
            f"cannot use {name}: it is not a contiguous tensor of the right type and shape. "
            f"needed={dtype},{(rows, columns)} given={tensor.dtype},{tuple(tensor.shape)}"
        )
