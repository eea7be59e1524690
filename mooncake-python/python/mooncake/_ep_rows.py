"""Rows of tokens: packed for dispatch, placed for the experts, and added up.

Rows in host memory are converted, copied and added up by the native half, with as many threads as
torch has. Rows on
a GPU are left to torch.
"""

from __future__ import annotations

from typing import Any

import torch

from mooncake import _mooncake
from mooncake._pg_work import _span

# Elements of a token that share a scale, and the greatest `float8_e4m3fn`.
BLOCK = 128
_LARGEST = 448.0
_NOTHING = (0, 0)


def packed(x: Any, sizes: _mooncake.ExpertSizes, is_fp8: bool) -> Any:
    """Returns rows of bytes in host memory with the elements of each token, and with `is_fp8` as
    `float8_e4m3fn` followed by the scales of their blocks.
    """
    tokens, hidden = x.shape
    if not is_fp8:
        return x.view(torch.uint8).cpu()
    if x.device.type == "cpu":
        rows = torch.empty((tokens, sizes.width()), dtype=torch.uint8)
        sizes.quantize(_span(x), _span(rows), torch.get_num_threads())
        return rows
    blocks = x.view(tokens, hidden // BLOCK, BLOCK).float()
    greatest = blocks.abs().amax(2, keepdim=True).clamp_(min=1e-4)
    rows = torch.empty((tokens, hidden + hidden // 32), dtype=torch.uint8, device=x.device)
    # No product exceeds the greatest element of the type after rounding.
    rows[:, :hidden] = blocks.mul_(_LARGEST / greatest).to(torch.float8_e4m3fn).view(tokens, hidden).view(torch.uint8)
    rows[:, hidden:] = (greatest / _LARGEST).view(tokens, hidden // BLOCK).view(torch.uint8)
    return rows.cpu()


def place(layout: _mooncake.ExpertLayout, received: Any, own: Any, recv_x: Any, scales: Any) -> None:
    """Copies received and own tokens to their experts."""
    if recv_x.device.type == "cpu":
        of_scales = _NOTHING if scales is None else _span(scales)
        layout.place(_span(received), _span(own), _span(recv_x), of_scales, torch.get_num_threads())
        return
    hidden, rows = recv_x.size(2), torch.cat((received, own)).to(recv_x.device)
    chosen = torch.tensor(layout.rows(), device=recv_x.device)
    target = recv_x.view(torch.uint8)
    first = 0
    for expert, count in enumerate(layout.counts()):
        whole = rows.index_select(0, chosen[first : first + count])
        target[expert, :count] = whole[:, : target.size(2)]
        if scales is not None:
            scales[expert, :count] = whole[:, hidden:].contiguous().view(torch.float32)
        first += count


def returned(x: Any, layout_range: Any) -> tuple[Any, list[list[tuple[int, int]]]]:
    """Returns rows of bytes in host memory with those of the experts. For each rank that has sent
    tokens, and each expert, it returns the first row and the number of rows.
    """
    local, slots, hidden = x.shape
    begin, counts = layout_range >> 32, layout_range & 0xFFFFFFFF
    rows = x.view(local * slots, hidden)
    first = begin + torch.arange(0, local * slots, slots).view(-1, 1)
    if x.device.type != "cpu":
        # Only rows in use leave the device, in the order of the messages.
        number = counts.t().reshape(-1)
        before = number.cumsum(0) - number
        at = torch.arange(int(number.sum())) + (first.t().reshape(-1) - before).repeat_interleave(number)
        rows = rows.index_select(0, at.to(x.device)).cpu()
        first = before.view(-1, local).t()
    numbers = zip(first.t().tolist(), counts.t().tolist(), strict=True)
    return rows.view(torch.uint8), [list(zip(*of_rank, strict=True)) for of_rank in numbers]


def add_up(received: Any, own: Any, row_of: Any, weights: Any, out: Any) -> None:
    """Adds up the rows of each token with its weights, in `float32` and the order of its choices.
    In `row_of`, -1 stands for no row, and own rows come after the received ones.
    """
    if out.device.type == "cpu":
        spans = _span(received), _span(own), _span(row_of), _span(weights), _span(out)
        _mooncake.add_up_rows(2 * out.size(1), *spans, torch.get_num_threads())
        return
    rows, row_of = torch.cat((received, own)).view(torch.bfloat16).to(out.device), row_of.to(out.device)
    total = torch.zeros(out.shape, device=out.device)
    for chosen, weight in zip(row_of.unbind(1), weights.unbind(1), strict=True):
        at = (chosen >= 0).nonzero().view(-1)
        total[at] += rows.index_select(0, chosen[at]).float() * weight[at].view(-1, 1)
    out.copy_(total)
