"""Latency of collective operations and messages: `mooncake.pg` and gloo, row by row, alternating in
one run.

    python pg.py [--ranks N..] [--sizes BYTES..] [--rows NAME..] [--seconds S] [--json FILE]

All ranks are processes of this host. A size is that of the whole tensor of a rank: the sum of the
pieces in all_gather, reduce_scatter and all_to_all. In the row send_recv each rank sends to the
next one and receives from the one before. A time is the median over the rounds, in microseconds, of
the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

SIZES = [4, 64, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
ROWS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"]
ROUNDS = 7
# Least and greatest number of operations in one round.
LEAST, MOST = 2, 2000


def operation(row: str, size: int, group: Any) -> Callable[[], None]:
    """Returns one operation on tensors of that size."""
    import torch
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    elements = max(size // 4 // ranks, 1) * ranks
    whole, piece = torch.ones(elements), torch.ones(elements // ranks)
    plain = torch.ones(max(size // 4, 1))
    other = torch.ones(max(elements, plain.numel()))

    def send_recv() -> None:
        works = [
            dist.isend(plain, (rank + 1) % ranks, group=group),
            dist.irecv(other[: plain.numel()], (rank - 1) % ranks, group=group),
        ]
        for work in works:
            work.wait()

    return {
        "all_reduce": lambda: dist.all_reduce(plain, op=dist.ReduceOp.MAX, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, piece, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(piece, whole, op=dist.ReduceOp.MAX, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other[:elements], whole, group=group),
        "broadcast": lambda: dist.broadcast(plain, 0, group=group),
        "send_recv": send_recv,
    }[row]


def measure(call: Callable[[], object], count: int, gloo: Any) -> float:
    """Returns the seconds of one call on the slowest rank."""
    import torch
    import torch.distributed as dist

    dist.barrier(group=gloo)
    begin = time.perf_counter()
    for _ in range(count):
        call()
    spent = torch.tensor([(time.perf_counter() - begin) / count], dtype=torch.float64)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX, group=gloo)
    return spent.item()


def run_rank(rank: int, ranks: int, port: int, rows: list[str], sizes: list[int], seconds: float, results: Any) -> None:
    import torch
    import torch.distributed as dist

    from mooncake import pg

    assert pg.__all__
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("mooncake-cpu", store=store, rank=rank, world_size=ranks)
    gloo = dist.new_group(backend="gloo")
    groups = {"mooncake": dist.group.WORLD, "gloo": gloo}
    for row in rows:
        for size in sizes:
            calls = {name: operation(row, size, group) for name, group in groups.items()}
            found = medians(calls, seconds, gloo)
            if rank == 0:
                results.send({"row": row, "ranks": ranks, "bytes": size, **found})
    if rank == 0:
        results.send(None)
    dist.destroy_process_group()


def rows_of(ranks: int, run: Callable[..., None], *arguments: Any) -> Iterator[dict[str, Any]]:
    """Starts the ranks, each with `run(rank, ranks, port, *arguments, results)`, and yields the
    rows that rank 0 sends. `None` is the last one.
    """
    from torch.distributed import TCPStore

    context = multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    receiver, sender = context.Pipe(duplex=False)
    processes = [
        context.Process(target=run, args=(rank, ranks, store.port, *arguments, sender), daemon=True) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    sender.close()
    try:
        while (row := receiver.recv()) is not None:
            yield row
    except EOFError:
        sys.exit("a rank has ended")
    for process in processes:
        process.join(60)


def medians(calls: dict[str, Callable[[], object]], seconds: float, gloo: Any) -> dict[str, float]:
    """Returns the microseconds of each call, which alternate."""
    counts, times = {}, {name: [] for name in calls}
    for name, call in calls.items():
        for _ in range(3):
            call()
        guess = measure(call, 3, gloo)
        counts[name] = min(MOST, max(LEAST, int(seconds / ROUNDS / guess)))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(measure(call, counts[name], gloo))
    return {name: statistics.median(of_one) * 1e6 for name, of_one in times.items()}


def words(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--rows", nargs="+", default=ROWS, choices=ROWS)
    parser.add_argument("--seconds", type=float, default=0.5, help="time of one row of one backend")
    parser.add_argument("--json", help="file for the results")
    chosen = parser.parse_args()
    found = []
    print(f"{os.cpu_count()} processors; microseconds, median of {ROUNDS} rounds\n")
    print(f"{'operation':<16}{'ranks':>6}{'size':>10}{'mooncake':>12}{'gloo':>12}{'times':>8}")
    for ranks in chosen.ranks:
        for row in rows_of(ranks, run_rank, chosen.rows, chosen.sizes, chosen.seconds):
            found.append(row)
            times = row["gloo"] / row["mooncake"]
            print(
                f"{row['row']:<16}{ranks:>6}{words(row['bytes']):>10}{row['mooncake']:>12.1f}{row['gloo']:>12.1f}{times:>8.2f}",
                flush=True,
            )
    if chosen.json:
        with open(chosen.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
