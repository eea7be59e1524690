"""Time of writes and reads of structured objects: this package and Mooncake C++, each with its own
master, alternating in one run.

    python structured.py HOST --ours PYTHON MASTER [--peer PYTHON MASTER]
        [--rows WORD..] [--rounds N] [--calls N]

Each of them is a process that contributes no memory. A second process of the same kind contributes
it. `--serve` is the argument of the first one. Each row is one column of a batch, and the times of
a whole write, a whole read, a read of a tenth of the rows, and a read of single rows. The results
of reads are compared with what was written.

With `--peer`, the script exits with 1 if this package needs more time for a row than Mooncake C++.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time

from store import MIB, Process, has_torch, own

ROUNDS, CALLS = 3, 2
PICKED = 1000
STEPS = ("put", "get", "tenth", "picked")
# Shapes of Mooncake C++ that need torch.
TENSORS = ("tensors", "dictionaries of tensors", "dense tensor")


def columns():
    """Returns the number of rows of each shape, and the function that makes a row of it."""
    import numpy as np

    noise = np.random.default_rng(0).integers(0, 256, 4 * MIB, dtype=np.uint8)

    def ints(row, least=4, more=13):
        return np.arange(row, row + least + row % more, dtype=np.int64)

    def tensor(row):
        import torch

        return torch.from_numpy(ints(row))

    return {
        "arrays": (300_000, ints),
        "arrays and None": (300_000, lambda row: ints(row) if row % 5 else None),
        "grids": (50_000, lambda row: np.full((1 + row % 7, 16), row, np.float32)),
        "long arrays": (2_000, lambda row: np.frombuffer(noise[: (16 + row % 64) << 10], np.int32)),
        "lists": (100_000, lambda row: [*range(row, row + 4 + row % 13)]),
        "tensors": (50_000, tensor),
        "dictionaries of tensors": (20_000, lambda row: {"x": tensor(row), "y": tensor(row + 1)}),
        "numbers": (300_000, lambda row: row * 0.5),
        "texts": (300_000, lambda row: f"prompt {row} " * (1 + row % 5)),
        "bytes": (300_000, lambda row: noise[row : row + 32 + row % 64].tobytes()),
        "long bytes": (1_000, lambda row: noise[row : row + (64 << 10)].tobytes()),
        "lists of bytes": (20_000, lambda row: [noise[row + n : row + n + 200].tobytes() for n in range(row % 4)]),
        "plain dictionaries": (100_000, lambda row: {"id": row, "text": f"word {row}", "scores": [row, 0.5]}),
        "dictionaries with arrays": (50_000, lambda row: {"image": ints(row), "tag": f"t{row}"}),
        "dense array": (1 << 15, lambda row: np.full(512, row, np.float32)),
        "dense tensor": (1 << 15, lambda row: tensor(row)[:1]),
    }


def column(name, count, make):
    """Returns the batch with one column, and the rows that a read must return."""
    import numpy as np

    rows = [make(row) for row in range(count)]
    if name.startswith("dense"):
        whole = np.stack(rows) if name == "dense array" else tiled(rows)
        return {"batch": {"c": whole}}, whole
    made = np.empty(count, object)
    for row, value in enumerate(rows):
        made[row] = value
    return {"non_tensor_batch": {"c": made}}, rows


def tiled(rows):
    import torch

    return torch.stack(rows).expand(-1, 256).contiguous()


def same(one, other):
    """Returns whether two values are equal, with equal types of arrays and tensors."""
    if isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in other)
    if hasattr(other, "dtype"):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    return one == other


class Bench:
    """Writes and reads of one package."""

    def __init__(self, master, host):
        from mooncake.store import MooncakeDistributedStore
        from mooncake.structured_object_store import MooncakeBundleTransfer

        self.store = MooncakeDistributedStore()
        assert self.store.setup(host, "P2PHANDSHAKE", 0, 1024 * MIB, "tcp", "", master) == 0
        self.transfer, self.columns = MooncakeBundleTransfer(self.store), columns()

    def measure(self, name, calls):
        """Returns the seconds of each step: the best of some calls."""
        count, make = self.columns[name]
        data, expected = column(name, count, make)
        begin, end = count // 2, count // 2 + count // 10
        chance = random.Random(0)
        picked = [chance.randrange(count) for _ in range(min(PICKED, count))]
        # The steps after the first one: rows to read, and their numbers.
        reads = [(None, range(count)), (slice(begin, end), range(begin, end)), (picked, picked)]
        best = {}
        for _ in range(calls):
            ref = self.timed(best, "put", lambda: self.transfer.put(data))
            for step, (rows, numbers) in zip(STEPS[1:], reads):
                got = self.timed(best, step, lambda rows=rows: self.transfer.get(ref, rows=rows))
                found = next(iter((got.get("batch") or got["non_tensor_batch"]).values()))
                assert len(found) == len(numbers)
                wrong = [row for at, row in enumerate(numbers) if not same(found[at], expected[row])]
                assert not wrong, f"{name}: {step}: rows {wrong[:3]}"
                del found
                self.transfer.release_result(got)
                del got
            self.transfer.cleanup_dataproto(ref)
        return best

    @staticmethod
    def timed(best, step, call):
        before = time.perf_counter()
        result = call()
        took = time.perf_counter() - before
        best[step] = min(took, best.get(step, took))
        return result


def serve(master, host):
    """Measures rows on request."""
    bench = Bench(master, host)
    print('=>"ready"', flush=True)
    for line in sys.stdin:
        print("=>" + json.dumps(bench.measure(*json.loads(line))), flush=True)
    bench.store.close()


def compare(options):
    """Measures all rows of all processes, alternating, and keeps the best of the rounds."""
    given = {"ours": options.ours, **({"peer": options.peer} if options.peer else {})}
    owners, measured = [], []
    for name, (python, master) in given.items():
        owners.append(Process(f"the owner of {name}", [python, __file__, "--own", master, options.host]))
        measured.append(Process(name, [python, __file__, "--serve", master, options.host]))
    wanted = [name for name in columns() if not options.rows or any(word in name for word in options.rows)]
    if not all(has_torch(python) for python, _ in given.values()):
        print("without torch there are no rows of tensors")
        wanted = [name for name in wanted if name not in TENSORS]
    for _ in range(options.rounds):
        for row in wanted:
            for one in measured:
                got = one.send([row, options.calls])
                before = one.best.get(row, got)
                one.best[row] = {step: min(got[step], before[step]) for step in STEPS}
    for one in [*measured, *owners]:
        one.end()
    return wanted, {one.name: one.best for one in measured}


def table(wanted, best):
    """Prints the results, and returns the rows in which this package needs more time."""
    missed = []
    for title in ("", *wanted):
        line = f"{title:26}"
        for step in STEPS:
            if not title:
                line += f"{step:>8}{'peer':>8}{'ratio':>7}"
                continue
            ours, peer = (best.get(name, {}).get(title, {}).get(step) for name in ("ours", "peer"))
            line += f"{ours * 1e3:8.1f}"
            line += f"{peer * 1e3:8.1f}{peer / ours:7.2f}" if peer else " " * 15
            if peer and peer < ours:
                missed.append(f"{title}: {step} takes {ours * 1e3:.1f} ms, and the peer {peer * 1e3:.1f} ms")
        print(line + ("" if title else "  (ms)"))
    return missed


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("host")
    parser.add_argument("--ours", nargs=2, required=True)
    parser.add_argument("--peer", nargs=2)
    parser.add_argument("--rows", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--calls", type=int, default=CALLS)
    began = time.perf_counter()
    missed = table(*compare(parser.parse_args()))
    print(f"{time.perf_counter() - began:.0f} s; the best of each row's calls")
    for one in missed:
        print(f"SHORT  {one}")
    return 1 if missed else 0


if __name__ == "__main__":
    roles = {"--own": own, "--serve": serve}
    if sys.argv[1] in roles:
        roles[sys.argv[1]](*sys.argv[2:])
    else:
        sys.exit(main())
