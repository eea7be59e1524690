#!/usr/bin/env bash
# `all_reduce` with MAX or MIN on gloo, torch 2.15.0: a NaN of one rank reaches some elements of the
# result and vanishes from others, and numbers of other ranks vanish with it. Every element of the
# tensors below has the same inputs. With three ranks that have 0, NaN and 2, the result has
# elements 0, 2 and NaN, by position, alike on all ranks. `torch.maximum` gives NaN in every case.
# An infinity norm over ranks, which is one element, may thus hide a gradient that is not a number.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
# With its dependencies torch takes 5 GB.
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.15.0 numpy==2.4.6
cat > "$folder/reduce.py" <<'PYTHON'
import math
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 3


def results(rank):
    """Returns the values of the result by operation and by the rank that has NaNs (-1 for none)."""
    found = {}
    for name in ("MAX", "MIN"):
        for owner in (-1, 0, 1, 2):
            value = math.nan if rank == owner else float(rank)
            tensor = torch.full((64,), value)
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
            # As texts, because a NaN equals nothing.
            found[name, owner] = sorted({str(one) for one in tensor.tolist()})
    return found


def run(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    every = [None] * RANKS
    dist.all_gather_object(every, results(rank))
    dist.destroy_process_group()
    if rank:
        return
    print("torch", torch.__version__)
    numbers = torch.tensor([0.0, math.nan, 2.0])
    assert math.isnan(torch.maximum(torch.maximum(numbers[0], numbers[1]), numbers[2]).item())
    for (name, owner), here in every[0].items():
        print(name, "without NaN" if owner < 0 else f"NaN of rank {owner}", [one[name, owner] for one in every])
        assert all(one[name, owner] == here for one in every), "ranks differ"
    expected = {
        ("MAX", -1): ["2.0"],
        ("MAX", 0): ["2.0", "nan"],
        ("MAX", 1): ["0.0", "2.0", "nan"],
        ("MAX", 2): ["1.0", "nan"],
        ("MIN", -1): ["0.0"],
        ("MIN", 0): ["1.0", "2.0", "nan"],
        ("MIN", 1): ["0.0", "nan"],
        ("MIN", 2): ["0.0", "1.0", "nan"],
    }
    assert every[0] == expected, "not as described"


if __name__ == "__main__":
    mp.spawn(run, (sys.argv[1],), RANKS)
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/reduce.py" "$folder/store"
echo "as described"
