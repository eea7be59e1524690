"""Inputs of expert parallelism that every rank can compute for all ranks, and what dispatch and
combine return for them, written plainly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """Sizes of a round."""

    seed: int
    ranks: int
    # Number of experts of a rank, of choices per token, and largest number of tokens.
    local: int
    choices: int
    limit: int
    hidden: int
    is_fp8: bool
    # Ranks that every rank has marked as failed.
    inactive: tuple[int, ...] = ()

    @property
    def experts(self) -> int:
        return self.local * self.ranks

    def active(self, rank: int) -> bool:
        return rank not in self.inactive


@dataclass(frozen=True)
class Input:
    """Tokens of one rank."""

    x: Any
    topk: Any
    weights: Any


def input_of(case: Case, rank: int) -> Input:
    """Returns the tokens of a rank: none, all that may be, or some."""
    random = torch.Generator().manual_seed(case.seed * 64 + rank)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=random))

    tokens = (0, case.limit, below(case.limit + 1))[below(3)]
    x = torch.randn((tokens, case.hidden), generator=random) * 10.0 ** torch.randint(-6, 5, (tokens, 1), generator=random)
    topk = torch.rand((tokens, case.experts), generator=random).argsort(1)[:, : case.choices].contiguous()
    topk[torch.rand(topk.shape, generator=random) < (0.0, 0.3, 1.0)[below(3)]] = -1
    weights = torch.rand(topk.shape, generator=random)
    return Input(x.bfloat16(), topk, weights)


def quantized(x: Any) -> tuple[Any, Any]:
    """Returns rows as `float8_e4m3fn`, and the scale of each block of 128."""
    blocks = x.float().view(x.size(0), x.size(1) // 128, 128)
    greatest = torch.maximum(blocks.abs().max(2).values, torch.tensor(1e-4))
    return (blocks * (448 / greatest).unsqueeze(2)).to(torch.float8_e4m3fn).view(x.shape), greatest / 448


def restored(rows: Any, scales: Any) -> Any:
    """Returns rows with their scales applied."""
    return (rows.float().view(*scales.shape, 128) * scales.unsqueeze(-1)).view(rows.shape)


def returned(row: Any, expert: int) -> Any:
    """Returns the row that an expert computes for a token."""
    return (row.float() * (1 + 0.1 * expert)).bfloat16()


def check_dispatch(case: Case, rank: int, recv_x: Any, recv_count: Any, handle: Any) -> None:
    """Compares the results of a dispatch with the tokens of all ranks, byte by byte."""
    src_info, layout_range, *sizes = handle
    assert sizes == [case.limit, case.hidden, case.experts]
    rows, scales = recv_x if case.is_fp8 else (recv_x, None)
    slots = case.ranks * case.limit
    assert rows.shape == (case.local, slots, case.hidden) and src_info.shape == (case.local, slots)
    assert rows.dtype == (torch.float8_e4m3fn if case.is_fp8 else torch.bfloat16)
    assert (recv_count.dtype, src_info.dtype, layout_range.dtype) == (torch.int32, torch.int32, torch.int64)
    assert layout_range.shape == (case.local, case.ranks)
    if scales is not None:
        assert scales.shape == (case.local, slots, case.hidden // 128) and scales.dtype == torch.float32
    inputs = [input_of(case, source) for source in range(case.ranks)]
    for local in range(case.local):
        at = 0
        for source, one in enumerate(inputs):
            tokens = (one.topk == rank * case.local + local).any(1).nonzero().view(-1)
            if not case.active(source) or not case.active(rank):
                tokens = tokens[:0]
            part = slice(at, at + len(tokens))
            assert int(layout_range[local, source]) == at << 32 | len(tokens)
            assert src_info[local, part].tolist() == tokens.tolist()
            if scales is None:
                assert torch.equal(rows[local, part].view(torch.int16), one.x[tokens].view(torch.int16))
            else:
                wanted, scale = quantized(one.x[tokens])
                assert torch.equal(rows[local, part].view(torch.uint8), wanted.view(torch.uint8))
                assert torch.equal(scales[local, part], scale)
            at += len(tokens)
        assert int(recv_count[local]) == at


def answers(case: Case, rank: int, recv_x: Any, recv_count: Any, out: Any = None) -> Any:
    """Returns the rows that the experts of a rank compute. Unused rows are not numbers."""
    rows = restored(*recv_x) if case.is_fp8 else recv_x
    y = torch.empty((case.local, case.ranks * case.limit, case.hidden), dtype=torch.bfloat16) if out is None else out
    y.fill_(float("nan"))
    for local, count in enumerate(recv_count.tolist()):
        y[local, :count] = returned(rows[local, :count], rank * case.local + local)
    return y


def check_combine(case: Case, rank: int, out: Any) -> None:
    """Compares the result of a combine with sums in double precision."""
    own = input_of(case, rank)
    x = restored(*quantized(own.x)) if case.is_fp8 else own.x
    wanted, size = torch.zeros(own.x.shape, dtype=torch.float64), torch.zeros(own.x.shape, dtype=torch.float64)
    for token, experts in enumerate(own.topk.tolist()):
        for choice, expert in enumerate(experts):
            if expert >= 0 and case.active(expert // case.local) and case.active(rank):
                term = own.weights[token, choice].double() * returned(x[token], expert).double()
                wanted[token] += term
                size[token] += term.abs()
    assert out.shape == own.x.shape and out.dtype == torch.bfloat16
    assert ((out.double() - wanted).abs() <= wanted.abs() * 2.0**-8 + size * 1e-6).all()
