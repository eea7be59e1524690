"""Time of dispatch and combine of expert parallelism: `mooncake.mooncake_ep_buffer` over a group of
`mooncake.pg`, the same over gloo, and a plain program in torch that sends each row by
`all_to_all_single` of gloo, alternating in one run.

    python ep.py [--ranks N..] [--shapes NAME..] [--seconds S] [--json FILE]

All ranks are processes of this host. Each token goes to random experts. The plain program returns
the rows of all experts one after the other, without the memory layout and the indices of dispatch.
A time is the median over the rounds, in microseconds, of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

from pg import ROUNDS, medians, rows_of

# Tokens of a rank, elements of a token, experts of all ranks, and experts of a token.
SHAPES = {"few": (8, 4096, 64, 4), "decode": (128, 7168, 256, 8), "prefill": (1024, 4096, 64, 6)}


def of_buffer(group: Any, x: Any, topk: Any, weights: Any, experts: int, is_fp8: bool) -> dict[str, Callable[[], object]]:
    """Returns dispatch and combine of a buffer over this group."""
    import torch

    from mooncake.mooncake_ep_buffer import Buffer

    buffer, active = Buffer(group), torch.ones(group.size(), dtype=torch.int32)

    def dispatch() -> Any:
        return buffer.dispatch(x, topk, active, x.size(0), experts, -1, use_fp8=is_fp8)

    handle = dispatch()[2]
    rows = buffer.get_next_combine_buffer(handle)
    counts = (handle[1] & 0xFFFFFFFF).sum(1).tolist()
    for expert, count in enumerate(counts):
        rows[expert, :count] = 1

    def combine() -> None:
        buffer.combine(rows, topk, weights, active, -1, handle)

    return {"dispatch": dispatch, "combine": combine}


def of_plain(group: Any, x: Any, topk: Any, weights: Any, experts: int, is_fp8: bool) -> dict[str, Callable[[], object]]:
    """Returns dispatch and combine in plain torch."""
    import torch
    import torch.distributed as dist

    ranks, (tokens, hidden), choices = group.size(), x.shape, topk.size(1)
    local = experts // ranks

    def exchange(rows: Any, theirs: list[int], ours: list[int]) -> Any:
        output = torch.empty((sum(theirs), rows.size(1)), dtype=rows.dtype)
        dist.all_to_all_single(output, rows, theirs, ours, group=group)
        return output

    def packed() -> Any:
        if not is_fp8:
            return x.view(torch.uint8)
        blocks = x.view(tokens, hidden // 128, 128).float()
        greatest = blocks.abs().amax(2, keepdim=True).clamp_(min=1e-4)
        rows = torch.empty((tokens, hidden + hidden // 32), dtype=torch.uint8)
        rows[:, :hidden] = blocks.mul_(448 / greatest).to(torch.float8_e4m3fn).view(tokens, hidden).view(torch.uint8)
        rows[:, hidden:] = (greatest / 448).view(tokens, hidden // 128).view(torch.uint8)
        return rows

    def dispatch() -> Any:
        expert, order = topk.view(-1).sort(stable=True)
        counts = torch.bincount(expert, minlength=experts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        sent, got = counts.view(ranks, local).sum(1).tolist(), theirs.view(ranks, local).sum(1).tolist()
        rows = exchange(packed().index_select(0, order // choices), got, sent)
        # From the order of ranks to that of experts.
        of = torch.arange(ranks * local).repeat_interleave(theirs) % local
        by_expert = of.argsort(stable=True)
        arrived = rows.index_select(0, by_expert)
        if is_fp8:
            arrived = arrived[:, :hidden].contiguous().view(torch.float8_e4m3fn), arrived[:, hidden:].contiguous()
        return arrived, by_expert, order, sent, got

    _, by_expert, order, sent, got = dispatch()
    answers = torch.ones((sum(got), hidden), dtype=torch.bfloat16)

    def combine() -> Any:
        rows = torch.empty_like(answers)
        rows[by_expert] = answers
        rows = exchange(rows.view(torch.uint8), sent, got).view(torch.bfloat16)
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel())
        total = torch.zeros((tokens, hidden))
        for chosen, weight in zip(place.view(tokens, choices).unbind(1), weights.unbind(1), strict=True):
            total.addcmul_(rows.index_select(0, chosen).float(), weight.view(-1, 1))
        return total.bfloat16()

    return {"dispatch": dispatch, "combine": combine}


def run_rank(rank: int, ranks: int, port: int, shapes: list[str], seconds: float, results: Any) -> None:
    import torch
    import torch.distributed as dist

    from mooncake import pg

    assert pg.__all__
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("mooncake-cpu", store=store, rank=rank, world_size=ranks)
    gloo = dist.new_group(backend="gloo")
    random = torch.Generator().manual_seed(rank)
    for shape in shapes:
        tokens, hidden, experts, choices = SHAPES[shape]
        x = torch.randn((tokens, hidden), generator=random).bfloat16()
        topk = torch.rand((tokens, experts), generator=random).argsort(1)[:, :choices].contiguous()
        weights = torch.rand((tokens, choices), generator=random)
        for is_fp8 in (False, True):
            given = (x, topk, weights, experts, is_fp8)
            sides = {
                "mooncake": of_buffer(dist.group.WORLD, *given),
                "buffer on gloo": of_buffer(gloo, *given),
                "gloo": of_plain(gloo, *given),
            }
            for step in ("dispatch", "combine"):
                if step == "combine" and is_fp8:
                    # The same as without.
                    continue
                found = medians({name: of_one[step] for name, of_one in sides.items()}, seconds, gloo)
                if rank == 0:
                    results.send({"row": step, "shape": shape, "ranks": ranks, "type": "fp8" if is_fp8 else "bf16", **found})
    if rank == 0:
        results.send(None)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--seconds", type=float, default=1.0, help="time of one row of one side")
    parser.add_argument("--json", help="file for the results")
    chosen, found = parser.parse_args(), []
    print(f"{os.cpu_count()} processors; microseconds, median of {ROUNDS} rounds\n")
    head = f"{'step':<10}{'shape':<10}{'type':<6}{'ranks':>6}"
    print(f"{head}{'mooncake':>12}{'buffer, gloo':>14}{'plain, gloo':>13}{'times':>8}")
    for ranks in chosen.ranks:
        for row in rows_of(ranks, run_rank, chosen.shapes, chosen.seconds):
            found.append(row)
            ours, between, plain = row["mooncake"], row["buffer on gloo"], row["gloo"]
            start = f"{row['row']:<10}{row['shape']:<10}{row['type']:<6}{ranks:>6}"
            print(f"{start}{ours:>12.1f}{between:>14.1f}{plain:>13.1f}{plain / ours:>8.2f}", flush=True)
    if chosen.json:
        with open(chosen.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
